"""A report as Markdown, LaTeX and CSV, and what sites ask for: nothing is lost or taken for markup."""

import csv
import io
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import make_reports as reports
import pytest
from make_reports import table

from tula_cli import assets
from tula_cli.errors import BadMeasurements, SpecError
from tula_cli.run.directory import RunDir
from tula_cli.services.reporting.document import (
    Column,
    Density,
    Document,
    Fact,
    Figure,
    Mark,
    Section,
    Series,
    Table,
)
from tula_cli.services.reporting.forms import csv_files, latex, markdown, sites
from tula_cli.services.reporting.forms.site_values import SiteValues, site_values
from tula_cli.services.reporting.material import Material
from tula_cli.services.reporting.run_report import build_document, for_site
from tula_cli.words import number

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
    marks=(Mark(1.0, None, "knee: 64", "knee"), Mark(None, 9.0, "limit", "limit")),
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


# --- Markdown


def test_markdown_has_every_cell_and_takes_none_for_markup() -> None:
    text = markdown.markdown(PAGE)
    assert "| \\* | x\\_1 \\| y | 1.23 |" in text
    assert "| + | \\*star\\* | - |" in text
    assert "|  | 50 % | 7 |" in text
    assert "# name\\_of \\# it" in text and "Caption with $ and &lt;b\\>. \\* chosen." in text
    assert "*Missing: nothing: tula train.*" in text
    assert "Figure `f`: Drawn (Figure 4 of the paper). Its caption. Marked: knee: 64; limit." in text


def test_every_row_of_a_table_has_its_columns(whole: Document) -> None:
    for found in (TABLE, *(one for section in whole.sections for one in section.tables)):
        counts = [len(re.findall(r"(?<!\\)\|", line)) for line in markdown.rows(found)]
        assert set(counts) == {len(found.columns) + 1 + any(found.marks)}
        assert len(counts) == 2 + len(found.rows)


# --- LaTeX


def test_latex_escapes_what_it_would_take_for_itself() -> None:
    text = latex.latex(PAGE)
    assert r"\item[{model}] a\textbackslash{}b\{c\}\textasciitilde{}\textasciicircum{}" in text
    assert r"2 nodes $\pm$ 5 \%" in text and r"name\_of \# it" in text
    assert r"$\ast$ & x\_1 \textbar{} y & 1.23 \\" in text, "a star that begins a row is no option of the row's end"
    assert text.count(r"\begin{tabular}{llr}") == text.count(r"\end{table}") == 1
    assert r"Caption with \$ and \textless{}b\textgreater{}" in text


def test_latex_is_ascii_and_its_braces_and_environments_match(whole: Document) -> None:
    for document in (PAGE, whole):
        text = latex.latex(document)
        assert text.isascii()
        assert "\\usepackage" not in text
        bare = re.sub(r"\\[{}\\]", "", text)
        assert bare.count("{") == bare.count("}")
        begun, ended = (Counter(re.findall(rf"\\{word}\{{(\w+)\}}", text)) for word in ("begin", "end"))
        assert begun == ended and begun["table"] == sum(len(section.tables) for section in document.sections)
    assert latex.escaped("Jülich 日") == "Julich ?"


# --- CSV


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_each_table_and_figure_is_a_csv_with_whole_numbers() -> None:
    found = csv_files.files(PAGE)
    assert list(found) == ["table_t", "figure_f", "figure_d"]
    assert rows(found["table_t"])[0] == {"name": "x_1 | y", "value (%)": "1.23456", "mark": "chosen"}
    assert rows(found["table_t"])[1]["value (%)"] == ""
    first, second, knee, limit = rows(found["figure_f"])
    assert first == {
        "series": "a, b",
        "batch": "32",
        "time (s)": "2.0",
        "low": "1.5",
        "high": "2.5",
        "measured": "true",
    }
    assert (second["time (s)"], second["measured"]) == ("", "false")
    assert (knee["series"], knee["batch"]) == ("knee: knee: 64", "64")
    assert (limit["batch"], limit["time (s)"]) == ("", "9.0")
    assert rows(found["figure_d"])[1] == {
        "share": "0.75", "samples from": "0.0", "samples to": "10.0", "factor from": "2.0", "factor to": "4.0"
    }  # fmt: skip


def test_all_of_them_together_are_told_apart(whole: Document) -> None:
    text, found = csv_files.together(whole), csv_files.files(whole)
    assert re.findall(r"^# (\w+): ", text, re.MULTILINE) == list(found)
    assert float(rows(found["table_strong_scaling"])[0]["samples/s"]) == table(whole, "strong_scaling").rows[0][7]


def test_keys_that_are_taken_get_a_number() -> None:
    twice = Document("x", "", "", "", (), (Section("a", "A", tables=(TABLE,)), Section("b", "B", tables=(TABLE,))))
    assert list(csv_files.files(twice)) == ["table_t", "table_t_2"]


# --- sites


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Material:
    run = reports.probed(tmp_path_factory.mktemp("forms"))
    return reports.seen(reports.compared(reports.trained(reports.answered(run))))


@pytest.fixture(scope="module")
def whole(seen: Material) -> Document:
    return build_document(seen)


@pytest.fixture
def values(seen: Material, whole: Document) -> SiteValues:
    return site_values(seen, whole, runs=3)


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder of the user's own templates; there are no others on this machine."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("XDG_CONFIG_DIRS", raising=False)
    monkeypatch.setattr(assets, "SITE_FOLDER", tmp_path / "etc")
    (tmp_path / "config/tula/sites").mkdir(parents=True)
    (tmp_path / "etc/sites").mkdir(parents=True)
    return tmp_path / "config/tula/sites"


def filled(text: str, values: SiteValues, tmp_path: Path) -> str:
    path = tmp_path / "template.txt"
    path.write_text(text, encoding="utf-8")
    return sites.fill(path, values)


def test_lcrc_is_a_strong_scaling_table_in_text(seen: Material, whole: Document) -> None:
    text = for_site(seen, whole, "lcrc")
    found = table(whole, "strong_scaling")
    lines = text.splitlines()
    head = next(place for place, line in enumerate(lines) if line.startswith("nodes  GPUs"))
    assert len([line for line in lines[head + 2 :] if re.match(r" +\d", line)]) >= len(found.rows)
    for row, line in zip(found.rows, lines[head + 2 :], strict=False):
        assert line.split()[:3] == [str(row[0]), str(row[1]), number(float(row[4] or 0), 3)]
    assert "Test GPU" in text and "{" not in text and max(map(len, lines[head : head + 6])) < 120


def test_the_node_hours_of_a_copy_are_those_of_the_run(seen: Material, whole: Document, tmp_path: Path) -> None:
    """Its jobs are those of the other run, and are not shown; what they took was used all the same."""
    copied = reports.seen(RunDir(shutil.copytree(seen.run.path, tmp_path / "copy" / seen.run.id)))
    hidden = replace(copied, parts=tuple(replace(one, now=replace(one.now, jobs=())) for one in copied.parts))
    used = [site_values(one, whole, runs=1).words["used_node_hours"] for one in (seen, copied, hidden)]
    assert float(used[0]) > 0 and used == used[:1] * 3


def test_ncar_is_a_table_of_experiments_with_their_total(seen: Material, whole: Document, values: SiteValues) -> None:
    choice = seen.choice
    assert choice is not None
    found = values.tables["experiments"]
    assert found.rows[0] == (
        f"training on {choice.nodes} nodes, batch {choice.batch}", choice.all_node_hours, 3, 3 * choice.all_node_hours
    )  # fmt: skip
    assert found.rows[1:-1] == tuple((f"{name}, batch {batch}", 0.5, 2, 1.0) for name, batch in (("lbt (reference)", 128), ("lbt", 512), ("ags", 512)))  # fmt: skip
    assert found.rows[-1][3] == pytest.approx(sum(row[3] for row in found.rows[:-1]))  # type: ignore[misc]
    text = for_site(seen, whole, "ncar", runs=3)
    assert re.search(rf"training on .*  {re.escape(number(choice.all_node_hours))} +3 ", text)
    assert f"In all {values.words['total_node_hours']} node-hours" in text


def test_the_templates_that_come_with_tula_can_be_filled(seen: Material, whole: Document) -> None:
    assert sites.names() == ["lcrc", "ncar", "scaling"]
    for name in sites.names():
        assert "{" not in for_site(seen, whole, name)
    here = {path.stem for path in (Path(__file__).parents[3] / "templates/sites").glob("*.txt")}
    assert here == set(sites.names())


def test_a_template_of_the_user_comes_before_that_of_the_site_and_of_tula(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "etc/sites/lcrc.txt").write_text("site")
    assert sites.find("lcrc").read_text() == "site"
    (folders / "lcrc.txt").write_text("mine")
    (folders / "juwels.txt").write_text("{nodes}")
    assert sites.find("lcrc").read_text() == "mine"
    assert sites.names() == ["juwels", "lcrc", "ncar", "scaling"]
    assert sites.find(str(folders / "juwels.txt")) == folders / "juwels.txt"


@pytest.mark.parametrize(
    ("name", "hint"),
    [("lcr", "did you mean lcrc?"), ("xyz", "there are lcrc, ncar, scaling"), ("x/y.txt", "the names known are lcrc")],
)
def test_an_unknown_template_is_refused_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(SpecError) as refused:
        sites.find(name)
    assert hint in refused.value.hint


def test_placeholders_are_values_tables_and_columns_of_tables(values: SiteValues, tmp_path: Path) -> None:
    assert filled("{{{nodes}}} of {name_of}".replace("{name_of}", "{batch}"), values, tmp_path) == (
        f"{{{values.words['nodes']}}} of {values.words['batch']}"
    )
    lines = filled("{strong_scaling: efficiency, nodes}", values, tmp_path).splitlines()
    assert lines[0].split() == ["efficiency", "(%)", "nodes"]
    assert lines[2].split() == ["100", str(values.tables["strong_scaling"].rows[0][0])]


@pytest.mark.parametrize(
    ("text", "told", "hint"),
    [
        ("a\n{nodez}", "line 2: {nodez} is nothing that a report has", "did you mean nodes"),
        ("{zzzzzz}", "line 1: {zzzzzz} is nothing", "there are "),
        ("{strong_scaling: speedup}", "has no column 'speedup'", "did you mean speed-up?"),
        ("{nodes: a}", "nodes is no table", "write {nodes}"),
        ("{nodes", "line 1: a single {", "write it twice"),
        ("a }", "line 1: a single }", "write it twice"),
    ],
)
def test_what_a_template_has_wrong_is_told_with_its_line(
    text: str, told: str, hint: str, values: SiteValues, tmp_path: Path
) -> None:
    with pytest.raises(SpecError) as refused:
        filled(text, values, tmp_path)
    assert told in refused.value.message and hint in refused.value.hint


def test_what_a_run_does_not_tell_yet_is_told_with_what_would_bring_it(tmp_path: Path) -> None:
    look = reports.seen(reports.trained(RunDir.create(tmp_path / "r", reports.JOB)))
    with pytest.raises(BadMeasurements) as refused:
        for_site(look, build_document(look), "lcrc")
    assert "this run does not tell batch" in refused.value.message and "tula profile" in refused.value.hint
    own = site_values(look, build_document(look), runs=1)
    assert filled("{hardware}; {experiments}", own, tmp_path).startswith(
        "1 GPU a node; nothing was measured yet; experiment"
    )
    with pytest.raises(BadMeasurements, match="does not tell methods"):
        filled("{methods}", own, tmp_path)


def test_a_template_that_is_no_text_is_refused(values: SiteValues, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="cannot be read as text"):
        sites.fill(tmp_path / "t.txt", values)
