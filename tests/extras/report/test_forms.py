"""A report as Markdown, LaTeX and CSV: nothing is lost or taken for markup."""

import csv
import io
import re
from collections import Counter

import make_reports as reports
import pytest
from make_reports import find_table

from tula_cli.extras.report import formats
from tula_cli.extras.report.run_report import build_document
from tula_cli.services.document import (
    Annotation,
    Column,
    Density,
    Document,
    Fact,
    Figure,
    Section,
    Series,
    Table,
)

TABLE = Table(
    "t",
    "A & B",
    (Column("name", align="left"), Column("value", "%", digits=3)),
    (("x_1 | y", 1.23456), ("*star*", None), ("50 %", 7)),
    "Caption with $ and <b>.",
    ("chosen", "front", ""),
)
FIGURE = Figure(
    "f",
    "Drawn",
    "Its caption.",
    "batch",
    "time (s)",
    (Series("a, b", (0.0, 1.0), (2.0, None), (1.5, None), (2.5, None), measured=(True, False)),),
    marks=(Annotation(1.0, None, "chosen: 64", "choice"), Annotation(None, 9.0, "limit", "limit")),
    x_scale="category",
    categories=("32", "64"),
    paper="Figure 4",
)
DENSE = Figure("d", "Dense", "", "samples", "factor", density=Density((0.0, 10.0), (1.0, 2.0, 4.0), ((0.25, 0.75),)))
PAGE = Document(
    "name_of # it",
    "How many?",
    "2 nodes ± 5 %",
    "today",
    (Fact("model", "a\\b{c}~^"),),
    (
        Section("one", "First", ("A *text*.",), tables=(TABLE,), figures=(FIGURE, DENSE)),
        Section("two", "Second", missing="nothing: tula train"),
    ),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Document:
    run = reports.make_probed_run(tmp_path_factory.mktemp("forms"))
    return build_document(
        reports.read_material(reports.add_comparison(reports.add_training(reports.add_recommendation(run))))
    )


# --- Markdown


def test_markdown_has_every_cell_and_takes_none_for_markup() -> None:
    text = formats.render_markdown(PAGE)
    assert "| \\* | x\\_1 \\| y | 1.23 |" in text
    assert "| + | \\*star\\* | - |" in text
    assert "|  | 50 % | 7 |" in text
    assert "# name\\_of \\# it" in text and "Caption with $ and &lt;b\\>. \\* chosen, + on the Pareto front." in text
    assert "*Missing: nothing: tula train.*" in text
    assert "Figure `f`: Drawn (Figure 4 of the paper). Its caption. Marked: chosen: 64; limit." in text


def test_every_row_of_a_table_has_its_columns(whole: Document) -> None:
    for result in (TABLE, *(item for section in whole.sections for item in section.tables)):
        lines = formats.Markdown().render_table(result).splitlines()
        counts = [len(re.findall(r"(?<!\\)\|", line)) for line in lines if line.startswith("|")]
        assert set(counts) == {len(result.columns) + 1 + any(result.marks)}
        assert len(counts) == 2 + len(result.rows)


# --- LaTeX


def test_latex_escapes_what_it_would_take_for_itself() -> None:
    text = formats.render_latex(PAGE)
    assert r"\item[{model}] a\textbackslash{}b\{c\}\textasciitilde{}\textasciicircum{}" in text
    assert r"2 nodes $\pm$ 5 \%" in text and r"name\_of \# it" in text
    assert r"$\ast$ & x\_1 \textbar{} y & 1.23 \\" in text, "a star that begins a row is no option of the row's end"
    assert text.count(r"\begin{tabular}{llr}") == text.count(r"\end{table}") == 1
    assert r"Caption with \$ and \textless{}b\textgreater{}" in text


def test_latex_is_ascii_and_its_braces_and_environments_match(whole: Document) -> None:
    for document in (PAGE, whole):
        text = formats.render_latex(document)
        assert text.isascii()
        assert "\\usepackage" not in text
        bare = re.sub(r"\\[{}\\]", "", text)
        assert bare.count("{") == bare.count("}")
        begun, ended = (Counter(re.findall(rf"\\{word}\{{(\w+)\}}", text)) for word in ("begin", "end"))
        assert begun == ended and begun["table"] == sum(len(section.tables) for section in document.sections)
    assert formats.Latex().escape_text("Jülich 日") == "Julich ?"


# --- CSV


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_each_table_and_figure_is_a_csv_with_whole_numbers() -> None:
    result = formats.render_csv_files(PAGE)
    assert list(result) == ["table_t", "figure_f", "figure_d"]
    assert rows(result["table_t"])[0] == {"name": "x_1 | y", "value (%)": "1.23456", "mark": "chosen"}
    assert rows(result["table_t"])[1]["value (%)"] == ""
    first, second, choice, limit = rows(result["figure_f"])
    assert first == {
        "series": "a, b",
        "batch": "32",
        "time (s)": "2.0",
        "low": "1.5",
        "high": "2.5",
        "measured": "true",
    }
    assert (second["time (s)"], second["measured"]) == ("", "false")
    assert (choice["series"], choice["batch"]) == ("choice: chosen: 64", "64")
    assert (limit["batch"], limit["time (s)"]) == ("", "9.0")
    assert rows(result["figure_d"])[1] == {
        "share": "0.75", "samples from": "0.0", "samples to": "10.0", "factor from": "2.0", "factor to": "4.0"
    }  # fmt: skip


def test_all_of_them_together_are_reported_apart(whole: Document) -> None:
    text, result = formats.render_csv(whole), formats.render_csv_files(whole)
    assert re.findall(r"^# (\w+): ", text, re.MULTILINE) == list(result)
    assert float(rows(result["table_strong_scaling"])[0]["samples/s"]) == find_table(whole, "strong_scaling").rows[0][7]


def test_keys_that_are_taken_get_a_number() -> None:
    twice = Document("x", "", "", "", (), (Section("a", "A", tables=(TABLE,)), Section("b", "B", tables=(TABLE,))))
    assert list(formats.render_csv_files(twice)) == ["table_t", "table_t_2"]
