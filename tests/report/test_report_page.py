"""The report as a page: whole, by itself, and not to be broken by what a job has said."""

from __future__ import annotations

from html.parser import HTMLParser

from holdfast.observe import report, report_html
from holdfast.observe.goodput import Phase
from report.written import Written, killed

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Its tags, which must be closed in order, and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page(job: Written) -> Page:
    return Page(report_html.page(job.divided(), report.peers()))


def test_it_has_every_phase_and_each_incident() -> None:
    found = page(killed(base=10))
    words = " ".join(found.words)
    assert "46.00 %" in words
    for phase in Phase:
        assert phase.value in words
    assert "rank 1: killed by SIGKILL" in words
    assert [row["id"] for row in found.of("tr") if "id" in row] == ["incident-1"]
    assert {"href": "#incident-1"} in found.of("a")
    assert "torchrun (best setting)" in words and "bench.recovery" in words


def test_its_bar_is_divided_as_the_wall_clock_is() -> None:
    divided = killed(base=10).divided()
    text = report_html.page(divided, report.peers())
    bar = Page(text.partition('<div class="bar"')[2].partition("</div>")[0])
    parts = [float((box["style"] or "").removeprefix("flex:")) for box in bar.of("i")]
    assert parts == [taken_s for taken_s in divided.phases_s.values() if taken_s]
    assert round(sum(parts), 6) == divided.wall_s


def test_it_needs_nothing_else() -> None:
    text = report_html.page(killed().divided(), report.peers())
    assert "<script" not in text and "http://" not in text and "https://" not in text
    found = Page(text)
    assert not any("src" in attributes for _, attributes in found.tags)
    policies = [meta["content"] for meta in found.of("meta") if "http-equiv" in meta]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_hostile_words_stay_words() -> None:
    evil = "\"><script>alert(1)</script><img src=x onerror='alert(2)'>&amp;\x00\u202e</title></style>"
    job = Written(run_id=evil, program=evil).world(0, 1.0, 1.5, 2.0, 2.0)
    job.incident(1, 0, 5.0, 5.5, restarted=False, headline=evil, node=evil).end(6.0, evil)
    found = page(job)
    allowed = {"html", "head", "meta", "title", "style", "body", "main", "header", "h1", "h2", "p", "ul", "li", "b"}
    allowed |= {"section", "div", "i", "span", "svg", "rect", "a", "small", "table", "thead", "tbody", "tr", "th", "td"}
    assert {tag for tag, _ in found.tags} <= {*allowed, "br", "code"}
    assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)
    words = "".join(found.words)
    assert "<script>alert(1)</script>" in words and "\x00" not in words and "\u202e" not in words


def test_ten_thousand_incidents_are_a_page_that_opens() -> None:
    """The costliest are in the table, and the drawing has no more than can be told apart."""
    job = Written()
    for generation in range(10_000):
        at_s = 10.0 * generation
        job.world(generation, at_s, at_s + 0.1, at_s + 0.5, at_s + 0.5)
        job.back(generation + 1, generation, at_s + 9.0, at_s + 9.9, at_s + 10.0, at_s + 10.5)
    text = report_html.page(job.divided(), report.peers())
    assert text.count('<tr id="incident-') == report_html.MOST
    most = report_html.WIDE / report_html.NARROW + 1
    assert 0 < text.count("<rect ") <= most * (len(Phase) + 2)
    assert len(text) < 4_000_000


def test_nothing_is_drawn_of_no_time() -> None:
    found = page(Written())
    assert found.of("svg") == []
    assert "no end yet" in " ".join(found.words)
