"""TLS contexts from the files a user names. Imported only where TLS is asked for; the secret's handshake runs inside.

Every node runs a Python whose OpenSSL has TLS 1.3, so nothing older is spoken.
"""

from __future__ import annotations

import ssl
from pathlib import Path


class TlsError(Exception):
    """The files are of no use. One line: what is wrong, where, and what to do next."""


def server_context(cert: str, key: str | None = None, ca: str | None = None) -> ssl.SSLContext:
    """For the coordinator. With a CA, a node without a certificate of that CA is refused."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # a node connects once and stays; nothing is resumed
    _load_own(context, cert, key)
    if ca is not None:
        _load_ca(context, ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(cert: str | None = None, key: str | None = None, ca: str | None = None) -> ssl.SSLContext:
    """For an agent. The coordinator's certificate must bear the name or address it is reached by, and come from the CA;
    without one, from any that this machine trusts."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if cert is not None:
        _load_own(context, cert, key)
    elif key is not None:
        raise TlsError(f"the key {key} has no certificate; give --tls-cert as well")
    if ca is None:
        context.load_default_certs()
    else:
        _load_ca(context, ca)
    return context


def _load_own(context: ssl.SSLContext, cert: str, key: str | None) -> None:
    _check_readable("--tls-cert", cert)
    if key is not None:
        _check_readable("--tls-key", key)
    held = f"the key in {key or cert}"

    def refuse_passphrase() -> str:
        raise TlsError(f"{held} has a passphrase, which nobody is there to type; `openssl pkey` can take it off")

    try:
        context.load_cert_chain(cert, key, password=refuse_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsError(
                f"{held} is not that of the certificate {cert}; give the two that belong together"
            ) from error
        raise TlsError(
            f"the certificate {cert} or {held} is not in PEM format; give --tls-cert and --tls-key"
        ) from error


def _load_ca(context: ssl.SSLContext, ca: str) -> None:
    _check_readable("--tls-ca", ca)
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise TlsError(f"{ca} holds no certificate in PEM format; give the CA's own as --tls-ca") from error


def _check_readable(flag: str, path: str) -> None:
    """`ssl` names no file in its errors."""
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise TlsError(f"{flag} {path} cannot be read ({error.strerror}); give a file that can") from error
