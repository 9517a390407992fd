"""Who may look at a page, who may act through it, and what it says to everybody else."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dashboard.conftest import Page
from dashboard.made_records import Made
from harness import needs
from holdfast.cli import dashboard as command
from holdfast.dashboard import tokens
from holdfast.dashboard.serving import parse_listen

READ = ("/", "/page.js", "/state", "/events", "/metrics", "/incident/0")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Made(tmp_path_factory.mktemp("access") / "job_ab")
    made.start(["gpu-a1:4100"], 2)
    made.launch(0, ["gpu-a1:4100"], 2, 1.0)
    made.incident(0, 0, 2.0)
    made.close()
    return made.run_dir


def write(path: Path, token: str) -> Path:
    path.write_text(token)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def plain(run_dir: Path) -> Iterator[Page]:
    page = Page(run_dir)
    yield page
    page.close()


@pytest.fixture(scope="module")
def locked(run_dir: Path) -> Iterator[Page]:
    page = Page(run_dir, "--token-file", str(write(run_dir.parent / "token", "a-token-of-a-test-01\n")))
    yield page
    page.close()


def test_everybody_on_this_machine_may_read_on_loopback(plain: Page) -> None:
    page = plain
    assert page.token is None
    status, body = page.ask("/state")
    assert (status, json.loads(body)["head"]["run_id"]) == (200, "llama-small")
    assert page.ask("/state", Host=f"localhost:{page.port + 1}")[0] == 200, "through a tunnel"
    assert page.ask("/state", Host=f"127.0.0.2:{page.port}")[0] == 200, "a number is no name that leads here"
    assert b"holdfast_" in page.ask("/metrics")[1]


def test_a_name_that_points_here_is_refused(plain: Page) -> None:
    page = plain
    for path in READ:
        assert page.ask(path, Host=f"evil.example:{page.port}")[0] == 403
    assert page.ask("/state", Host="127.0.0.1.evil.example")[0] == 403
    assert page.ask("/state", Host="[::1")[0] == 403


def test_a_wrong_token_gets_nothing(locked: Page) -> None:
    page = locked
    for path in READ:
        for offered in ({}, {"Cookie": f"holdfast_{page.port}=wrong"}, {"Authorization": "Bearer wrong"}):
            status, body = page.ask(path, **offered)
            assert (status, body[:17]) == (401, b"a token is needed")
        assert page.ask(f"{path}?token=wrong")[0] == 401
        assert page.ask(f"{path}?token=")[0] == 401


def test_the_right_token_becomes_a_cookie(locked: Page) -> None:
    page = locked
    assert page.token == "a-token-of-a-test-01"
    answer, _ = page.answer(f"/?token={page.token}")
    cookie = answer.headers["Set-Cookie"]
    assert {part.strip() for part in cookie.split(";")[1:]} == {"Path=/", "HttpOnly", "SameSite=Strict"}
    assert page.ask("/state", Cookie=cookie.partition(";")[0])[0] == 200
    assert page.ask("/metrics", Authorization=f"Bearer {page.token}")[0] == 200, "for Prometheus"


@needs(shutil.which("unshare") is not None and os.geteuid() == 0, "root and unshare")
def test_any_other_address_makes_a_token(run_dir: Path) -> None:
    """In a network of its own, where nobody is."""
    script = (
        "import sys; from dashboard.conftest import Page; from pathlib import Path\n"
        "page = Page(Path(sys.argv[1]), '--listen', '0.0.0.0:0')\n"
        "found = [page.ask(f'/state{query}')[0] for query in ('', f'?token={page.token}')]\n"
        "print(len(page.token), *found, page.token in page.said[1])\n"
        "page.close()\n"
    )
    command = 'ip link set lo up && exec "$@"'
    done = subprocess.run(
        ["unshare", "--net", "bash", "-c", command, "bash", sys.executable, "-c", script, str(run_dir)],
        capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    if "Operation not permitted" in done.stderr and os.environ.get("HOLDFAST_CI") != "1":
        pytest.skip("this machine lets nobody make a network namespace")
    assert done.stdout == "43 401 200 False\n", done.stderr


def test_acting_takes_the_control_token(locked: Page) -> None:
    page = locked
    reads = {"Authorization": f"Bearer {page.token}"}
    for path in ("/drain", "/kill?rank=0"):
        assert page.ask(path, "POST")[0] == 401
        assert page.ask(path, "POST", X_Holdfast_Control=page.control)[0] == 401, "may not even read"
        assert page.ask(path, "POST", **reads)[0] == 401
        assert page.ask(path, "POST", X_Holdfast_Control="wrong", **reads)[0] == 401
        assert page.ask(path, "POST", X_Holdfast_Control=str(page.token), **reads)[0] == 401
        and_token = f"{'&' if '?' in path else '?'}token={page.token}"
        assert page.ask(path + and_token, "POST", X_Holdfast_Control=page.control)[0] == 401, "anybody can link to that"
        assert page.ask(path, "POST", X_Holdfast_Control=page.control, **reads)[0] == 409, "there is no such job"


def test_another_sites_page_cannot_act(plain: Page) -> None:
    page = plain
    for more in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Origin": ""},
        {"Sec_Fetch_Site": "cross-site"},
    ):
        assert page.ask("/drain", "POST", X_Holdfast_Control=page.control, **more)[0] == 403
    own = {"Origin": f"http://127.0.0.1:{page.port}", "Sec_Fetch_Site": "same-origin"}
    assert page.ask("/drain", "POST", X_Holdfast_Control=page.control, **own)[0] == 409
    assert page.ask("/kill", "POST", X_Holdfast_Control=page.control)[0] == 400
    assert page.ask("/kill?rank=-1", "POST", X_Holdfast_Control=page.control)[0] == 400
    assert page.ask("/drain", X_Holdfast_Control=page.control)[0] == 404, "nothing is done by looking"


@pytest.mark.parametrize("path", ["/..", "/../events.jsonl", "/%2e%2e/control-token", "/control-token", "/page.html",
                                  "//etc/passwd", "/server.py", "/incident/", "/incident/9", "/incident/-1",
                                  "/incident/../state", "/incident/٣", "http://["])  # fmt: skip
def test_there_is_nothing_else(plain: Page, path: str) -> None:
    page = plain
    with socket.create_connection(("127.0.0.1", page.port)) as line:  # as it is: a client would tidy it up
        line.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
        assert line.makefile("rb").readline().split()[1] in (b"404", b"400")


def test_every_answer_tells_the_browser_what_it_must_not_do(plain: Page) -> None:
    page = plain
    for path in ("/", "/page.js", "/page.css", "/state", "/incident/0", "/nothing"):
        answer, _ = page.answer(path)
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["Cache-Control"] == "no-store"
        assert "Python" not in answer.headers["Server"]


# -- tokens in files --------------------------------------------------------------------------------------------------


def test_the_control_token_is_this_users_alone_and_stays(tmp_path: Path) -> None:
    token = tokens.kept(str(tmp_path))
    file = tmp_path / tokens.NAME
    assert (file.stat().st_mode & 0o777, file.read_text()) == (0o600, token + "\n")
    assert tokens.kept(str(tmp_path)) == token, "all pages of a job have one"
    assert os.listdir(tmp_path) == [tokens.NAME]


def test_a_planted_control_token_is_not_believed(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("known-to-the-attacker\n")
    theirs.chmod(0o600)
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / tokens.NAME).symlink_to(theirs)
    assert tokens.kept(str(tmp_path / "job")) != "known-to-the-attacker"
    assert theirs.read_text() == "known-to-the-attacker\n", "nothing was written through it"
    (tmp_path / "job" / tokens.NAME).write_text("known-to-the-attacker\n")
    (tmp_path / "job" / tokens.NAME).chmod(0o644)
    assert tokens.kept(str(tmp_path / "job")) != "known-to-the-attacker"


def test_a_bad_token_file_is_refused(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "token", "long-enough-for-all\n")
    file.chmod(0o644)
    argv = [str(run_dir), "--listen", "0", "--token-file", str(file)]
    assert command.main(argv) == 1
    said = capsys.readouterr().err
    assert said.startswith("holdfast dashboard: ") and said.endswith(f"others may read it; chmod 600 {file}\n")
    write(file, "short\n")
    assert command.main(argv) == 1
    said = capsys.readouterr().err
    assert "16 to 512 plain characters" in said and said.count("\n") == 1


def test_wrong_use_is_one_line(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main([str(run_dir), "--listen", "localhost:http"])
    said = capsys.readouterr().err
    assert "no port from 0 to 65535" in said and said.count("\n") == 1
    assert command.main([str(tmp_path / "nowhere")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("holdfast dashboard: ") and said.count("\n") == 1
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert command.main([str(run_dir), "--listen", str(port)]) == 1
    assert capsys.readouterr().err == (
        f"holdfast dashboard: cannot listen on 127.0.0.1:{port}: Address already in use; choose another with --listen\n"
    )


@pytest.mark.parametrize(
    ("text", "meant"),
    [("80", ("127.0.0.1", 80)), ("0.0.0.0:80", ("0.0.0.0", 80)), ("[::1]:80", ("::1", 80)), ("a.b:0", ("a.b", 0))],
)
def test_where_to_listen(text: str, meant: tuple[str, int]) -> None:
    assert parse_listen(text) == meant


@pytest.mark.parametrize("text", ["", ":80", "::1:80", "a:", "a:65536", "a:-1", "a", "[::1]", "a:٣"])
def test_where_nobody_can_listen(text: str) -> None:
    with pytest.raises(ValueError, match=r"try "):
        parse_listen(text)


@pytest.mark.parametrize(
    ("host", "is_it"), [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("0.0.0.0", False), ("::", False),
                        ("10.0.0.1", False), ("localhost", False)])  # fmt: skip
def test_what_is_loopback(host: str, is_it: bool) -> None:
    """Of an address: names are resolved before."""
    assert tokens.is_loopback(host) is is_it
