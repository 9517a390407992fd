"""Where the secret comes from, on real files: which source wins, how the default file is made, and what is refused."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.wire import secret
from holdfast.wire.secret import INSECURE, Secret, SecretError

GOOD = "a secret of more than sixteen characters"


def write(path: Path, content: str | bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)
    return path


def home_of(path: Path) -> dict[str, str]:
    return {"HOME": str(path)}


def test_a_named_file_beats_the_environment_and_the_environment_beats_the_default_file(tmp_path: Path) -> None:
    environ = home_of(tmp_path)
    default = secret.load(environ=environ)
    environ["HOLDFAST_SECRET"] = "another of more than sixteen characters"
    variable = secret.load(environ=environ)
    named = secret.load(write(tmp_path / "named", GOOD), environ)
    assert len({default.key, variable.key, named.key}) == 3
    assert default.source == f"the file {tmp_path}/.config/holdfast/secret"
    assert variable.source == "the variable HOLDFAST_SECRET"
    assert named.source == f"the file {tmp_path}/named"


def test_the_same_content_is_the_same_key_wherever_it_is(tmp_path: Path) -> None:
    in_a_file = secret.load(write(tmp_path / "secret", f"\n {GOOD}\r\n"), {})
    in_the_environment = secret.load(environ={"HOLDFAST_SECRET": GOOD})
    assert in_a_file.key == in_the_environment.key
    assert GOOD.encode() not in in_a_file.key


def test_bytes_that_are_no_text_are_a_secret_too(tmp_path: Path) -> None:
    assert len(secret.load(write(tmp_path / "secret", bytes(range(128, 192))), {}).key) == 32


def test_the_default_file_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        first = secret.load(environ=home_of(tmp_path))
    finally:
        os.umask(before)
    path = tmp_path / ".config/holdfast/secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert len(bytes.fromhex(path.read_text())) == 32
    assert secret.load(environ=home_of(tmp_path)) == first
    assert os.listdir(path.parent) == ["secret"]


def test_xdg_config_home_is_followed_unless_it_is_relative(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path / "home"), "XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    assert secret.default_file(environ) == tmp_path / "xdg/holdfast/secret"
    environ["XDG_CONFIG_HOME"] = "xdg"
    assert secret.default_file(environ) == tmp_path / "home/.config/holdfast/secret"


def test_processes_that_make_the_file_at_once_get_one_secret(tmp_path: Path) -> None:
    program = (
        "import sys; from holdfast.wire import secret\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        f"print(secret.load(environ={home_of(tmp_path)!r}).key.hex())"
    )
    racers = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    keys = {racer.communicate()[0] for racer in racers}
    assert [racer.returncode for racer in racers] == [0] * 8
    assert keys == {secret.load(environ=home_of(tmp_path)).key.hex() + "\n"}
    assert os.listdir(tmp_path / ".config/holdfast") == ["secret"]


def test_a_file_that_is_there_already_is_left_alone_by_its_makers(tmp_path: Path) -> None:
    path = write(tmp_path / "secret", GOOD)
    secret._make(path)
    assert path.read_text() == GOOD
    assert os.listdir(tmp_path) == ["secret"]


def test_the_key_is_in_no_repr() -> None:
    shown = Secret(b"k" * 32, "the file /s")
    assert repr(shown) == "Secret(from the file /s)"
    assert "kkk" not in f"{shown} {shown!r} {[shown]}"


def test_insecure_is_an_empty_key() -> None:
    assert INSECURE.insecure
    assert not Secret(b"k", "").insecure


def refusal(file: Path | None, environ: dict[str, str]) -> str:
    with pytest.raises(SecretError) as error:
        secret.load(file, environ)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    text = refusal(tmp_path / "none", {"HOLDFAST_SECRET": GOOD})
    assert text == f"the secret file {tmp_path}/none is not there; copy it from the coordinator's node"


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    assert f"the secret file {tmp_path} cannot be read (Is a directory)" in refusal(tmp_path, {})


@pytest.mark.parametrize("content", ["", " \n", "fifteen letters", "     fifteen letters     \n"])
def test_a_short_secret_is_refused(tmp_path: Path, content: str) -> None:
    for text in (refusal(write(tmp_path / "s", content), {}), refusal(None, {"HOLDFAST_SECRET": content})):
        assert "and needs 16; `openssl rand -hex 32`" in text
        assert ("is empty" if not content.strip() else "has 15 characters") in text
        assert "fifteen" not in text


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o610, 0o666])
def test_a_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "s", GOOD, mode)
    assert refusal(path, {}) == f"the secret file {path} is open to other users (mode {mode:o}); chmod 600 {path}"


def test_a_default_file_that_is_no_good_is_refused_and_not_replaced(tmp_path: Path) -> None:
    secret.load(environ=home_of(tmp_path))
    path = write(tmp_path / ".config/holdfast/secret", "short")
    assert "has 5 characters" in refusal(None, home_of(tmp_path))
    assert path.read_text() == "short"


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    # Tests may run as root, who can write anywhere but to /proc and below a plain file.
    assert "set HOLDFAST_SECRET or give --secret-file" in refusal(None, {"HOME": "/proc"})
    write(tmp_path / ".config", "")
    assert "(Not a directory)" in refusal(None, home_of(tmp_path))
    (tmp_path / "xdg").mkdir()
    write(tmp_path / "xdg/holdfast", "")
    assert "(Not a directory)" in refusal(None, {"XDG_CONFIG_HOME": str(tmp_path / "xdg")})


def test_no_home_is_refused() -> None:
    text = "there is no HOME to keep the job's secret in; set HOLDFAST_SECRET or give --secret-file"
    assert refusal(None, {}) == text
    assert refusal(None, {"HOME": ""}) == text
