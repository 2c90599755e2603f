"""Text of other people in a report: no spreadsheet computes it, and no page that shows it runs it."""

import csv
import html
import io
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import make_reports as reports
import make_runs as make
import pytest
from make_results import Truth, make_probe

from tula_cli.run.directory import RunDir
from tula_cli.run.job_runs import open_run
from tula_cli.services.api import Run, report_text

FORMULAS = {
    "=": "=HYPERLINK(0)",
    "+": "+1+cmd",
    "-": "-2+3+cmd",
    "@": "@SUM(1+1)",
    "tab": "\t=1+1",
    "cr": "\r=1+1",
}


def compared(root: Path, method: str) -> RunDir:
    """Return a run whose comparison has a row of that name."""
    run = reports.add_comparison(RunDir.create(root, reports.JOB))
    comparison = run.read_comparison()
    assert comparison is not None
    named = [cell.model_copy(update={"method": method}) if cell.method == "ags" else cell for cell in comparison.cells]
    run.write_comparison(comparison.model_copy(update={"methods": ("lbt", method), "cells": tuple(named)}))
    return run


def trained(root: Path, message: str) -> RunDir:
    """Return a run whose training was ended once with that message."""
    run = reports.add_training(RunDir.create(root, reports.JOB))
    ended = {"start": make.START + 50, "end": make.START + 60, "outcome": "user", "message": message}
    run.write_attempt(make.attempt("train-ab12cd34-1", number=3, **ended))
    return run


def text_cells(run: RunDir) -> list[str]:
    """Return the cells of a report's CSV that are no numbers."""
    text = report_text(Run.from_directories([open_run(run)]), form="csv")
    cells = [cell for row in csv.reader(io.StringIO(text, newline="")) for cell in row]
    return [cell for cell in cells if not re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", cell)]


def formulas(cells: list[str]) -> list[str]:
    return [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\t", "\r"))]


@pytest.mark.parametrize("name", [name for name in FORMULAS if name != "cr"])
def test_the_name_of_a_method_is_no_formula_in_csv(name: str, tmp_path: Path) -> None:
    cells = text_cells(compared(tmp_path, f"{FORMULAS[name]} mine"))
    assert [cell for cell in cells if "mine" in cell] and formulas(cells) == []


def test_a_carriage_return_in_a_name_does_not_begin_a_row_of_csv(tmp_path: Path) -> None:
    text = report_text(Run.from_directories([open_run(compared(tmp_path, "mine\r=1+1"))]), form="csv")
    assert "mine" in text
    assert [line for line in text.splitlines() if line.startswith("=1+1")] == []


@pytest.mark.parametrize("name", FORMULAS)
def test_the_message_of_an_attempt_is_no_formula_in_csv(name: str, tmp_path: Path) -> None:
    cells = text_cells(trained(tmp_path, f"{FORMULAS[name]} mine"))
    assert [cell for cell in cells if "mine" in cell] and formulas(cells) == []


@pytest.mark.parametrize("name", ["=", "+", "-", "@"])
def test_the_message_of_a_probe_is_no_formula_in_results_csv(name: str, tmp_path: Path) -> None:
    run = reports.make_probed_run(tmp_path)
    make.add_failed(run, 8, 16, f"{FORMULAS[name]} mine")
    reports.add_recommendation(run)
    with (run.path / "results.csv").open(newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert [cell for cell in cells if "mine" in cell] and formulas(cells) == []


def test_a_negative_number_is_a_number_in_csv(tmp_path: Path) -> None:
    run = reports.add_training(RunDir.create(tmp_path, reports.JOB))
    rows = csv.reader(io.StringIO(report_text(Run.from_directories([open_run(run)]), form="csv"), newline=""))
    assert any(cell.startswith("-") and float(cell) < 0 for row in rows for cell in row if re.match(r"-\d", cell))


# --- Markdown

SCRIPT = "<script>alert('mine')</script>"
IMAGE = "<img src=x onerror=alert('mine')>"


def of_device(root: Path, name: str) -> RunDir:
    run = RunDir.create(root, reports.JOB)
    probe = make_probe(Truth(), 1, 32)
    run.write_result(probe.model_copy(update={"environment": probe.environment.model_copy(update={"hardware": name})}))
    return run


def of_command(root: Path, name: str) -> RunDir:
    command = f"python {shlex.quote(name)} -b {{local_batch}}"
    script = {"command": command, "length": {"epochs": 3}, "reference": {"batch": 256}}
    job = make.validate_job({"name": "own", "script": script, "search": {"nodes": [1]}}, source="test")
    return RunDir.create(root, job)


def warned(root: Path, message: str) -> RunDir:
    rows = [*reports.make_epoch_rows(), {"kind": "warning", "time": make.START, "samples": 3000, "message": message}]
    return reports.add_training(RunDir.create(root, reports.JOB), rows=rows)


def chosen_for(root: Path, reason: str) -> RunDir:
    run = RunDir.create(root, reports.JOB)
    run.write_recommendation(make.recommendation(reason=reason))
    return run


@pytest.mark.parametrize("text", [SCRIPT, IMAGE], ids=["script", "img"])
@pytest.mark.parametrize("make_run", [compared, trained, of_device, of_command, warned, chosen_for])
def test_markdown_has_no_tag_of_anybody_else(
    make_run: Callable[[Path, str], RunDir], text: str, tmp_path: Path
) -> None:
    """Some readers of Markdown know no escaped `<` and take it for a tag: it has to be an entity."""
    written = report_text(Run.from_directories([open_run(make_run(tmp_path, text))]))
    assert "mine" in html.unescape(written)
    assert re.findall(r"<\s*/?\s*(?:script|img)", written) == []
