"""The page in a real browser: what a person sees, and what a hostile job cannot make them see."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dashboard.chromium import Browser, Tab
from dashboard.conftest import Open, Page
from dashboard.fake_agent import answering, folded, told
from dashboard.made_records import HOSTILE, LEAD, Made, large, typical
from holdfast.control.causes import Kind
from holdfast.control.incidents import Follower
from holdfast.control.stacks import Group
from holdfast.observe import record
from ports import free_port

# Of the timeline, in the middle of its bar, so many seconds after the start of a job of 3110 s.
PIXEL = (
    "(() => { const c = document.querySelector('#timeline'); const x = Math.round((c.width - 8) * %d / 3110);"
    " return [...c.getContext('2d').getImageData(x, 36, 1, 1).data]; })()"
)
LIVE = "document.querySelector('#line').dataset.is === 'live'"


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    made = browser.tab()
    yield made
    made.close()


@pytest.fixture(scope="module")
def reader(browser: Browser) -> Iterator[Tab]:
    """For those who only look, one after the other."""
    made = browser.tab()
    yield made
    made.close()


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    page = Page(typical(tmp_path_factory.mktemp("usual") / "job_ab").run_dir)
    yield page
    page.close()


def see(tab: Tab, page: Page) -> None:
    tab.open(page.url)
    tab.until(LIVE)


def test_one_look_is_enough(reader: Tab, usual: Page) -> None:
    see(reader, usual)
    assert reader.text("#state") == "Training: generation 5, 32 ranks on 4 nodes, slow: rank 27"
    assert reader.text("h1") == "llama-small"
    tiles = reader.text("#tiles").split("\n")
    assert tiles[tiles.index("Step") + 1] == "14,557" and tiles[tiles.index("Incidents") + 1] == "5"
    assert reader.eval("document.querySelectorAll('#grid .cell[data-state=training]').length") == 32
    assert reader.eval("document.querySelector('.cell.slow').getAttribute('aria-label')") == "rank 27: training, slow"
    reader.until("document.querySelector('#chart-step').ariaLabel === 'Step: from 47 to 14,557, at step 14,557'")
    reader.until("document.querySelector('#read-timeline').textContent === '6 generations, 5 incidents'")
    bars = [reader.eval(PIXEL % at_s) for at_s in (100, 700, 1300, 1800, 2400, 3000)]  # one in each generation
    assert all(alpha == 255 for *_, alpha in bars) and len({tuple(bar) for bar in bars}) == 2, "they take turns"
    painted = "(() => { const c = document.querySelector('#chart-loss'); return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((v) => v > 0); })()"  # fmt: skip # noqa: E501
    reader.until(painted)
    assert reader.complaints() == []


def test_an_incident_with_all_that_is_known(reader: Tab, usual: Page) -> None:
    see(reader, usual)
    reader.eval("document.querySelector('tr[data-number=\"1\"] button').focus()")
    reader.key("Enter", 13)
    reader.eval("document.activeElement.click()")
    reader.until("document.querySelector('#incident[open] .facts')")
    shown = reader.text("#incident")
    for part in ("hangs: no step for 34 s", "rank 21 on gpu-a3 (pid 20021)", "detect 34.2 s", "31 ranks in all_reduce",
                 "the others wait for this", "data.py:19 batches", "Time lost: 35.1 s"):  # fmt: skip
        assert part in shown
    reader.key("Escape", 27)
    reader.until("!document.querySelector('#incident').open")
    reader.click('tr[data-number="2"] button')
    reader.until("document.querySelector('#incident').innerText.includes('Traceback')")
    assert "W tokens: retry 3 of 3" in reader.text("#incident") and "Connection closed by peer" in reader.text(
        "#incident"
    )
    assert reader.complaints() == []


def test_it_follows_the_job(tab: Tab, tmp_path: Path, open_page: Open) -> None:
    made = Made(tmp_path / "job_ab")
    made.start([LEAD], 4)
    made.launch(0, [LEAD], 4, 1.0)
    page = open_page(made.run_dir)
    see(tab, page)
    tab.eval("window.kept = document.querySelector('.cell[data-rank=\"0\"]')")
    made.add(record.RankExited(0, 2, 20_002, -9), 9.0)
    tab.until("document.querySelector('.cell[data-rank=\"2\"]').dataset.state === 'failed'")
    assert tab.eval("window.kept === document.querySelector('.cell[data-rank=\"0\"]')"), "others are not drawn anew"
    made.incident(0, 0, 9.0, rank=2)
    tab.until("document.querySelector('tr[data-number=\"0\"]')?.innerText.includes('recovered')")
    made.launch(1, [LEAD], 4, 10.0)
    made.add(record.Trained(123, "2", 0.5), 12.0)
    tab.until("document.querySelector('#tiles').innerText.includes('123')")
    tab.until("document.querySelector('#state').textContent.includes('generation 1')")
    sections = (10_000, 10_000, 50_000, 10_000)
    made.add(record.Progress(1, 0, 123, (9,), 114, (90_000,), (30_000,) * 4, 0.0, "1111", sections), 12.5)
    made.add(record.StragglerFound(1, 2, 0.05, 0.01, 5.0, 3, by="section"), 12.5)
    tab.click('.cell[data-rank="2"]')
    slow = "training, slow in its sections · 9 steps in this world · 90 ms each · 30 ms of that for itself · 50 ms in"
    tab.until(f"document.querySelector('#rank .words').textContent.startsWith('{slow} sections')")
    made.add(record.StragglerGone(1, 2), 12.75)
    tab.until("document.querySelector('#rank .words').textContent.startsWith('training · ')")
    made.add(record.StandbyReady(0, 300, 312_000_000, 1_500_000_000), 13.0)
    tab.until("document.querySelector('#world').textContent.endsWith(', 1 process stands by (312 MB, 1.5 GB on GPUs)')")
    made.add(record.JobEnded("error", "no restarts left", 130, 20.0, 0.1), 20.0)
    tab.until("document.querySelector('#state').textContent === 'Failed: error'")
    assert tab.text("#reason") == "no restarts left"
    assert tab.complaints() == []


def test_an_end_on_request_is_no_failure(tab: Tab, tmp_path: Path, open_page: Open) -> None:
    made = Made(tmp_path / "job_ab")
    made.start([LEAD], 2)
    made.launch(0, [LEAD], 2, 1.0)
    made.incident(0, 0, 9.0, failed_again_at_s=made.clock_s + 11.0)
    made.incident(1, 1, 11.0)
    made.incident(2, 2, 13.0, restarted=False, action="1 healthy node goes on")
    made.add(record.JobEnded("preempted", "stopped by SIGTERM", 130, 20.0, 2.1), 20.0)
    see(tab, open_page(made.run_dir))
    assert (tab.text("#state"), tab.text("#reason")) == ("Stopped", "stopped by SIGTERM")
    then = "[...document.querySelectorAll('#incidents td[data-name=Then]')].map((cell) => cell.textContent)"
    assert tab.eval(then) == ["no restart", "recovered", "failed again"]
    assert tab.complaints() == []


@pytest.mark.parametrize(("how", "seen"), [(signal.SIGTERM, "ended"), (signal.SIGKILL, "lost")])
def test_it_finds_the_server_again(tab: Tab, tmp_path: Path, open_page: Open, how: int, seen: str) -> None:
    made = Made(tmp_path / "job_ab")
    made.start([LEAD], 1)
    page = open_page(made.run_dir, "--listen", str(free_port()))
    see(tab, page)
    page.process.send_signal(how)
    tab.until(f"document.querySelector('#line').dataset.is === '{seen}'")
    page.process.wait(30)
    made.add(record.Trained(77), 12.0)
    open_page(made.run_dir, "--listen", str(page.port))
    tab.until(f"{LIVE} && document.querySelector('#tiles').innerText.includes('77')")


def test_hostile_text_is_only_text(tab: Tab, tmp_path: Path, open_page: Open) -> None:
    made = Made(tmp_path / "job_ab", run_id=HOSTILE, lead=HOSTILE)
    made.start([HOSTILE], 2)
    made.launch(0, [HOSTILE], 2, 1.0)
    made.add(record.RankRaised(0, 1, HOSTILE), 2.0)
    made.add(record.CoordinatorSaid(HOSTILE), 2.0)
    groups = (Group((1,), 1, HOSTILE, False, (HOSTILE,), HOSTILE),)
    made.incident(
        0, 0, 3.0, Kind.HANG, headline=HOSTILE, node=HOSTILE, action=HOSTILE, traceback=HOSTILE, groups=groups,
        stderr_tail=(HOSTILE, "</pre>" + HOSTILE), followers=(Follower(0, HOSTILE, HOSTILE),),
    )  # fmt: skip
    page = open_page(made.run_dir)
    see(tab, page)
    tab.click('.cell[data-rank="1"]')
    tab.click('tr[data-number="0"] button')
    tab.until("document.querySelector('#incident[open] .facts')")
    assert HOSTILE in tab.text("#incident") and HOSTILE in tab.text("#rank") and tab.text("h1") == HOSTILE
    assert tab.eval("document.querySelectorAll('img').length") == 1, "the page's own icon"
    assert tab.eval("document.querySelectorAll('script').length") == 1
    assert tab.eval("document.title") != "taken"
    assert tab.complaints() == []


def test_a_script_that_got_in_would_not_run(tab: Tab, usual: Page) -> None:
    """The policy, should an escape ever be forgotten."""
    see(tab, usual)
    tab.eval("document.addEventListener('securitypolicyviolation', (event) => { window.refused = event; })")
    tab.eval("document.body.insertAdjacentHTML('beforeend', '<img src=\"/nowhere\" onerror=\"window.taken = 1\">')")
    tab.until("window.refused")
    assert tab.eval("window.refused.effectiveDirective") == "script-src-attr"
    assert tab.eval("window.taken") is None


def test_ranks_by_keyboard(reader: Tab, usual: Page) -> None:
    see(reader, usual)
    reader.eval("document.querySelector('#drain').focus(); document.querySelector('.cell[tabindex=\"0\"]').focus()")
    focused = "document.activeElement.dataset.rank"
    assert reader.eval("document.querySelectorAll('.cell[tabindex=\"0\"]').length") == 1, "one stop for all ranks"
    for key, code, rank in (("ArrowRight", 39, "1"), ("End", 35, "31"), ("ArrowLeft", 37, "30"), ("Home", 36, "0")):
        reader.key(key, code)
        assert reader.eval(focused) == rank
    reader.key("Enter", 13)
    assert reader.text("#rank h3") == "Rank 0"
    assert "steps in this world" in reader.text("#rank")


def test_it_fits_a_phone(browser: Browser, usual: Page) -> None:
    tab = browser.tab(360, 740)
    see(tab, usual)
    assert tab.eval("document.documentElement.scrollWidth") == 360
    tab.click('tr[data-number="1"] button')
    tab.until("document.querySelector('#incident[open] .facts')")
    assert tab.eval("document.querySelector('#incident').getBoundingClientRect().right <= 360")
    assert tab.complaints() == []
    tab.close()


def test_a_screen_reader_finds_its_way(reader: Tab, usual: Page) -> None:
    """By the browser's own accessibility tree."""
    see(reader, usual)
    nodes = reader.call("Accessibility.getFullAXTree")["nodes"]
    found = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
    roles = {role for role, _ in found}
    assert {"banner", "main", "contentinfo", "heading", "grid", "gridcell", "table", "status"} <= roles
    nameless = [role for role, name in found if role in ("button", "textbox", "searchbox", "combobox", "radio", "grid", "gridcell", "image", "img") and not name.strip()]  # fmt: skip # noqa: E501
    assert nameless == []
    assert reader.eval("document.querySelectorAll('[aria-live]').length") == 1


def test_a_rank_is_killed_with_the_control_token(
    tab: Tab, tmp_path: Path, open_page: Open, sleeper: subprocess.Popen[bytes]
) -> None:
    folded(tmp_path, sleeper.pid)
    with answering(told(tmp_path)):
        page = open_page(tmp_path)
        see(tab, page)
        tab.until("!document.querySelector('#drain').hidden")
        tab.click('.cell[data-rank="0"]')
        tab.click("#rank button")
        assert tab.text("#act-title") == "Kill rank 0?"
        assert "ranks that cannot stay in their processes start anew" in tab.text("#act-text")
        assert tab.eval("document.activeElement === document.querySelector('#act-token input')")
        tab.type("not the token")
        tab.key("Enter", 13)
        tab.click("#act-yes")
        tab.until("document.querySelector('#act-answer').textContent.startsWith('the control token is wrong')")
        assert sleeper.poll() is None
        tab.eval("document.querySelector('#act-token input').focus()")
        tab.type(page.control)
        tab.click("#act-yes")
        tab.until("document.querySelector('#act-answer').textContent.endsWith('was sent SIGKILL')")
        assert sleeper.wait(30) == -signal.SIGKILL
        tab.click("#act-no")
        tab.click("#drain")
        assert tab.text("#act-text") == "Ranks save where they can, and end. The job is not restarted."
        assert tab.eval("document.querySelector('#act-token').hidden"), "it is asked for once"
        tab.click("#act-no")
    assert [each for each in tab.complaints() if "401" not in each] == []


def test_the_token_is_asked_for_and_leaves_the_address(tab: Tab, tmp_path: Path, open_page: Open) -> None:
    made = Made(tmp_path / "job_ab")
    made.start([LEAD], 1)
    (tmp_path / "token").write_text("a-token-of-a-test-02")
    (tmp_path / "token").chmod(0o600)
    page = open_page(made.run_dir, "--token-file", str(tmp_path / "token"))
    tab.open(page.url)
    assert tab.text("body").startswith("a token is needed")
    tab.open(f"{page.url}?token={page.token}")
    tab.until(LIVE)
    assert tab.eval("location.href") == page.url
    assert tab.eval("document.cookie") == "", "no script can read it"
    tab.open(page.url)
    tab.until(LIVE)


def test_a_thousand_ranks_and_ten_thousand_incidents(tab: Tab, tmp_path: Path, open_page: Open) -> None:
    """How fast that is, `bench/` says. Here: all of it is there, and few elements show it."""
    page = open_page(large(tmp_path / "job_ab").run_dir)
    see(tab, page)
    assert tab.eval("document.querySelectorAll('#grid .cell').length") == 1000
    assert tab.text("#where") == "1 to 20 of 10,000"
    tab.click("#older")
    assert tab.text("#where") == "21 to 40 of 10,000"
    tab.eval("document.querySelector('#search').focus()")
    tab.type("#9977")
    tab.until("document.querySelectorAll('#incidents tbody tr').length === 1")
    assert "rank 977" in tab.text("#incidents tbody")
    assert tab.eval("document.querySelectorAll('*').length") < 4000
    assert json.loads(page.ask("/incident/9999")[1])["number"] == 9999
    assert tab.complaints() == []
