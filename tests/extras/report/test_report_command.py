"""`tula report` as it is typed."""

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import make_reports as reports
import make_runs as make
import pytest
from isolation import isolate_environment

from tula_cli.cli import app
from tula_cli.run.directory import RunDir
from tula_cli.show.screen import Screen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that nobody changes."""
    root = tmp_path_factory.mktemp("cli")
    reports.add_training(reports.add_recommendation(reports.make_probed_run(root / "tula-runs")))
    return root


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate_environment(monkeypatch, folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a run without probes, whose report is made at once."""
    return str(reports.add_training(RunDir.create(tmp_path_factory.mktemp("trained"), reports.JOB)).path)


def tula(*words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = app.run(["report", *words], screen=Screen(out=out, err=err))
    return code, out.getvalue(), err.getvalue()


def test_without_a_form_it_says_what_there_is_and_what_is_missing() -> None:
    code, out, err = tula()
    assert code == 0
    assert "Scaling" in out and "Methods and batches: nothing has been compared yet. Run tula compare" in out
    assert "To write them: --html FILE" in out and err.startswith("run tula-runs/test-")


def test_text_forms_are_the_answer_on_stdout_word_by_word(trained: str) -> None:
    code, out, err = tula("--markdown")
    assert code == 0 and out.startswith("# test\n\n**On how many nodes (1, 2, 4, 8)")
    assert "| nodes | batch |" in out, "no line is broken to the width of the screen"
    assert err.startswith("run tula-runs/test-") and err.count("\n") == 1
    assert tula(trained, "--latex")[1].startswith("\\documentclass")
    assert tula(trained, "--csv", "-")[1].startswith("# table_predicted_actual: Predicted and actual\n")


def test_a_run_is_named_or_given(trained: str) -> None:
    name = Path(trained).name
    assert tula(trained)[1] == tula("--run", name, "--run-dir", str(Path(trained).parent))[1]
    code, _, err = tula(trained, "--run", trained)
    assert code == 2 and "both name a run" in err
    assert tula("nowhere")[0] == 2


def test_json_has_the_whole_report_and_the_text(trained: str) -> None:
    envelope = json.loads(tula("--json", "--markdown")[1])
    assert envelope["status"] == "done"
    assert [item["key"] for item in envelope["data"]["report"]["sections"]][:3] == [
        "choice",
        "time_and_cost",
        "scaling",
    ]
    assert envelope["data"]["text"].startswith("# test\n")
    assert "text" not in json.loads(tula(trained, "--json")[1])["data"]


def test_csv_is_a_folder_of_files_or_one_file(trained: str, tmp_path: Path) -> None:
    code, out, _ = tula("--csv", str(tmp_path / "data"))
    assert code == 0 and "wrote" in out
    files = {path.name for path in (tmp_path / "data").iterdir()}
    assert {"table_strong_scaling.csv", "figure_memory.csv", "figure_loss_by_samples.csv"} <= files
    rows = list(csv.DictReader((tmp_path / "data/table_strong_scaling.csv").open()))
    assert [row["nodes"] for row in rows] == ["1", "2", "4", "8"][-len(rows) :]
    assert tula(trained, "--csv", str(tmp_path / "all.csv"), "--markdown")[0] == 0
    assert (tmp_path / "all.csv").read_text().startswith("# table_predicted_actual: ")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--markdown", "--latex"), "--markdown and --latex both print to stdout"),
        (("--csv", "-", "--latex"), "--latex and --csv - both print to stdout"),
        (("--html", "."), "--html . is a folder"),
        (("--html", "no/where.html"), "does not exist"),
        (("--html", "/dev/tula-test.html"), "only be written to a regular file"),
        (("--html", "-"), "only be written to a regular file"),
        (("--svg", "a/b/c"), "does not exist"),
        (("--csv", "tula-runs/latest"), "is a file"),
        (("--svg", "figures.csv"), "is a file"),
        (("--for", "lcrc"), "tula report: option --for was removed\nHINT: tula report --markdown, --latex"),
        (("--runs", "5"), "tula report: option --runs was removed\nHINT: tula report --markdown, --latex"),
    ],
)
def test_what_cannot_be_asked_is_refused(words: tuple[str, ...], told: str) -> None:
    Path("figures.csv").touch()
    code, out, err = tula(*words)
    assert (code, out) == (2, "") and told in err


@pytest.mark.parametrize(
    ("form", "rows"),
    [
        (("--markdown",), r"^\| (\S*) +\| (\d+) \| (\d+) \|"),
        (("--latex",), r"^(\S*) & (\d+) & (\d+) & "),
        (("--csv", "-"), r"^(\d+),(\d+),"),
    ],
)
def test_each_text_form_has_the_scaling_tables(form: tuple[str, ...], rows: str) -> None:
    text = tula(*form)[1]
    strong = text[text.index("Strong scaling: global batch") :].partition("Weak scaling: batch")
    for table in (strong[0], strong[2]):
        results = [match.groups()[-2:] for line in table.splitlines() if (match := re.match(rows, line))]
        assert ("4", "4") in results and len(results) >= 3, (form, table[:400])


def test_the_page_and_the_figures_are_drawn_from_the_same_document(trained: str, tmp_path: Path) -> None:
    code, out, _ = tula(trained, "--html", str(tmp_path / "r.html"), "--svg", str(tmp_path / "svg"))
    assert code == 0 and "wrote" in out and "r.html" in out
    written = (tmp_path / "r.html").read_text()
    assert written.startswith("<!doctype html>") and "Loss over samples" in written
    assert "Loss over samples" in (tmp_path / "svg/loss_by_samples.svg").read_text()


def test_a_report_changes_nothing_in_the_run(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert tula("--markdown")[0] == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


def test_a_page_takes_the_place_of_no_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    code, _, err = tula("--html", str(tmp_path / "pipe"))
    assert code == 2 and "only be written to a regular file" in err and (tmp_path / "pipe").is_fifo()


def test_a_report_without_figures_loads_neither_matplotlib_nor_statsmodels(folder: Path) -> None:
    code = (
        "import sys; from tula_cli.cli import app; code = app.run(['report']); "
        "print('exit', code, *sorted({'statsmodels', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "exit 0", done.stderr


def test_a_run_of_an_older_format_is_reported_and_not_changed(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, make.spec())
    make.make_older(run)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    code, out, err = tula(str(run.path), "--json")
    assert code == 0, err
    assert json.loads(out)["command"] == "report"
    after = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert {path: content for path, content in after.items() if path.name != "report.html"} == before
