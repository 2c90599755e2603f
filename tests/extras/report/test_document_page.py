"""The page of a report: what stands in it, and how it looks in a real browser."""

import dataclasses
import itertools
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import browser
import documents
import make_reports
import pytest

from tula_cli.extras.report import page as document_page
from tula_cli.extras.report import svg
from tula_cli.services.document import Column, Document, Fact, Figure, Section, Series, Table

EMPTY = {"meta", "link", "br"}


class Reader(HTMLParser):
    """A page as it is built; every element must be closed in its order."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open, self.starts, self.words = list[str](), list[tuple[str, dict[str, str]]](), list[str]()
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.starts.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.starts.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.starts if name == tag]


@pytest.fixture(scope="module")
def rich() -> str:
    return document_page.render_page(documents.make_document())


@pytest.fixture(scope="module")
def hostile() -> str:
    return document_page.render_page(documents.make_hostile_document())


def test_the_question_and_the_answer_stand_before_all_else(rich: str) -> None:
    places = [rich.index(words) for words in ("How many nodes", "8 nodes at batch 1024", "<nav", "<dl", "<main", "</main>", "tula 0.1.0")]  # fmt: skip
    assert places == sorted(places)
    assert "<dt>hardware</dt><dd>NVIDIA A100-SXM4-80GB; 8 GPUs a node</dd>" in rich


def test_the_page_stands_alone(rich: str) -> None:
    read = Reader(rich)
    assert not {"script", "iframe", "img", "object"} & {tag for tag, _ in read.starts}
    loaded = [values.get("href", values.get("src", "")) for tag, values in read.starts if tag in ("link", "use", "a")]
    assert all(target.startswith(("#", "data:,")) for target in loaded)
    assert "@import" not in rich and not re.search(r"url\((?!#)", rich)


def test_the_page_can_be_heard(rich: str) -> None:
    read = Reader(rich)
    assert read.all("html")[0]["lang"] == "en"
    assert [tag for tag, _ in read.starts if tag in ("header", "nav", "main", "footer")] == ["header", "nav", "main", "footer"]  # fmt: skip
    heads = [int(tag[1]) for tag, _ in read.starts if re.fullmatch(r"h[1-6]", tag)]
    assert heads[0] == 1 and heads.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(heads))
    ids = [values["id"] for _, values in read.starts if "id" in values]
    assert len(set(ids)) == len(ids)
    named = [name for _, values in read.starts for name in values.get("aria-labelledby", "").split()]
    assert named and set(named) <= set(ids)
    assert {values["href"].removeprefix("#") for values in read.all("a")} <= set(ids)
    assert all(values.get("scope") == "col" for values in read.all("th"))
    assert len(read.all("caption")) == len(read.all("table"))


def test_a_table_has_its_units_its_marks_and_dashes_for_what_is_not_known(rich: str) -> None:
    assert '<th scope="col">time <span class="unit">(h)</span></th>' in rich
    row = next(row for row in rich.split("<tr") if row.startswith(" class=chosen"))
    assert 'aria-label="chosen">★</span>' in row and '<td data-label="batch">1024</td>' in row and ">-</td>" in row
    assert "★ chosen" in rich and rich.count('aria-label="marked">◆') == 2


def test_each_figure_has_its_numbers_behind_it_and_what_is_missing_is_said(rich: str) -> None:
    assert rich.count("<svg") == 6 == rich.count("<details>")
    assert "Figure 4 of the paper, for this job." in rich
    assert "computing" in rich and "<td>1.1667</td>" not in rich
    assert "<strong>Missing:</strong> no probe measured the energy" in rich


def test_the_numbers_of_a_figure_are_what_is_drawn() -> None:
    series = Series("a", (128, 256), (0.5754, None), measured=(True, False))
    table = document_page.make_figure_table(Figure("k", "t", "", "batch", "time (s)", (series,)))
    assert [column.title for column in table.columns] == ["series", "batch", "time (s)", "measured"]
    assert table.rows == (("a", 128, 0.5754, "true"), ("a", 256, None, "false"))


def test_of_very_many_numbers_the_first_are_shown_and_the_others_counted() -> None:
    x = tuple(float(place) for place in range(1500))
    figure = Figure("k", "t", "", "x", "y", (Series("a", x, x, style="line"),))
    page = document_page.render_page(Document("t", "", "", "", (), (Section("s", "S", figures=(figure,)),)))
    assert "The first 1000 of 1500 rows." in page and "(1500 rows)" in page


def test_a_series_looks_the_same_in_all_figures_of_a_section() -> None:
    def figure(*names: str) -> Figure:
        return Figure("k", "t", "", "x", "y", tuple(Series(name, (1, 2), (1.0, 2.0)) for name in names))

    section = Section("s", "S", figures=(figure("lbt", "lrs", "ags"), figure("ags", "lrs")))
    first, second = document_page.render_page(Document("t", "", "", "", (), (section,))).split("<svg")[1:]
    colors = [
        {color for color in svg.SERIES_COLORS if f"stroke: {svg.COLORS[color]}" in drawing}
        for drawing in (first, second)
    ]
    assert colors == [{"s0", "s1", "s2"}, {"s1", "s2"}]


def test_nothing_in_a_report_is_markup(hostile: str) -> None:
    read = Reader(hostile)
    assert not {"script", "b"} & {tag for tag, _ in read.starts}
    assert "<script>alert(1)</script>" in read.words
    assert "\x00" not in hostile and hostile.encode()


def test_an_empty_report_is_a_page_all_the_same() -> None:
    read = Reader(document_page.render_page(Document("", "", "", "", (), ())))
    assert read.all("main") and not read.all("nav") and not read.all("dl")
    table = Table("t", "T", (Column("a"),), ())
    assert Reader(
        document_page.render_page(Document("t", "q", "a", "m", (Fact("", ""),), (Section("", "", tables=(table,)),)))
    )


# --- in a browser


@pytest.fixture(scope="module")
def needs_browser() -> None:
    """Skip where there is none; fail instead where TULA_REQUIRE_BROWSER=1 says that one has to be."""
    if browser.find_browser() is None:
        required = os.environ.get("TULA_REQUIRE_BROWSER") == "1"
        (pytest.fail if required else pytest.skip)("no Chromium here: make browser-packages installs it (Debian, root)")


@pytest.mark.parametrize("width", [400, 1400])
def test_in_a_browser_nothing_is_too_wide_clipped_or_on_each_other(
    needs_browser: None, tmp_path: Path, rich: str, width: int
) -> None:
    (tmp_path / "page.html").write_text(rich)
    seen = browser.check_layout(tmp_path / "page.html", width=width)
    assert (seen["width"], seen["scrolled"], seen["figures"]) == (width, width, 6)
    assert (seen["console"], seen["wide"], seen["clipped"], seen["overlapping"], seen["requests"]) == (
        [],
        [],
        [],
        [],
        [],
    )
    assert seen["smallest"] >= (9 if width == 400 else 12)
    assert seen["background"] == "rgb(255, 255, 255)"


@pytest.fixture(scope="module")
def page_of_run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run with prices, several node counts, a training and a comparison."""
    run = make_reports.add_comparison(
        make_reports.add_training(
            make_reports.add_recommendation(make_reports.make_probed_run(tmp_path_factory.mktemp("page")))
        )
    )
    return document_page.render_page(make_reports.make_report(run))


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("kind", ["rich", "page_of_run"])
def test_in_a_browser_no_table_is_cut(
    needs_browser: None, tmp_path: Path, request: pytest.FixtureRequest, kind: str, width: int
) -> None:
    (tmp_path / "page.html").write_text(request.getfixturevalue(kind))
    seen = browser.check_layout(tmp_path / "page.html", width=width)
    assert (seen["cut"], seen["wide"], seen["scrolled"]) == ([], [], width)


def test_in_a_browser_hostile_names_do_nothing(needs_browser: None, tmp_path: Path, hostile: str) -> None:
    (tmp_path / "page.html").write_text(hostile)
    seen = browser.check_layout(tmp_path / "page.html", width=400)
    assert (seen["width"], seen["scrolled"]) == (400, 400)
    assert (seen["console"], seen["wide"], seen["clipped"], seen["requests"]) == ([], [], [], [])


def test_on_paper_no_figure_is_cut(needs_browser: None, tmp_path: Path) -> None:
    report = documents.make_document()
    figures = tuple(dataclasses.replace(documents.make_memory_figure(), title=f"Number {place}") for place in range(7))
    section = dataclasses.replace(report.sections[0], tables=(), figures=figures)
    (tmp_path / "page.html").write_text(document_page.render_page(dataclasses.replace(report, sections=(section,))))
    out = tmp_path / "page.pdf"
    browser.run_browser(f"--print-to-pdf={out}", "--no-pdf-header-footer", (tmp_path / "page.html").as_uri())  # fmt: skip
    pages = len(re.findall(rb"/Type\s*/Page\b", out.read_bytes()))
    assert 2 <= pages <= 4
