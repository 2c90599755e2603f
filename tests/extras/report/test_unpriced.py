"""Node-hours are shown once where no price is set: as node-hours, and not as a cost in node-hours beside them."""

import csv
import io
import re
from dataclasses import replace
from pathlib import Path

import make_reports as reports
import pytest
from isolation import isolate_environment
from make_reports import find_table, make_report, read_column

from tula_cli.cli import app
from tula_cli.extras.report import formats
from tula_cli.extras.report.page import render_page
from tula_cli.run.directory import RunDir
from tula_cli.services.document import Document
from tula_cli.show.screen import Screen
from tula_cli.spec.resources import UNPRICED_PRICING, Pricing

TABLES = ("configurations", "strong_scaling", "weak_scaling")
PRICED = {
    "money": Pricing(price=2.0),
    "money of the same figures": Pricing(price=1.0, currency="EUR"),
    "a price in node-hours": Pricing(price=2.0, currency="node-h"),
    "GPU-hours": Pricing(kind="gpu_hour", price=0.5, currency="EUR"),
}


def run_with(root: Path, pricing: Pricing) -> RunDir:
    job = reports.JOB.model_copy(update={"pricing": pricing})
    return reports.add_comparison(
        reports.add_training(
            reports.add_recommendation(reports.make_probed_run(root, job=job)), currency=pricing.currency
        )
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return run_with(tmp_path_factory.mktemp("unpriced") / "tula-runs", UNPRICED_PRICING)


@pytest.fixture(scope="module")
def document(run: RunDir) -> Document:
    return make_report(run)


@pytest.mark.parametrize("key", TABLES)
def test_a_table_has_node_hours_and_no_cost_without_a_price(key: str, document: Document) -> None:
    value = find_table(document, key)
    titles = [item.title for item in value.columns]
    assert "node-hours" in titles and "cost" not in titles
    assert all(len(row) == len(titles) for row in value.rows)
    assert "cost" not in value.caption


@pytest.mark.parametrize("name", PRICED)
def test_a_price_has_its_column(name: str, tmp_path: Path) -> None:
    priced = make_report(
        reports.add_recommendation(
            reports.make_probed_run(tmp_path, job=reports.JOB.model_copy(update={"pricing": PRICED[name]}))
        )
    )
    for key in TABLES:
        value = find_table(priced, key)
        factor = 0.5 if name == "GPU-hours" else PRICED[name].price
        assert read_column(value, "cost") == pytest.approx(
            [factor * hours for hours in read_column(value, "node-hours")]
        )
    assert "node-hours, " in priced.answer and PRICED[name].currency in priced.answer


@pytest.mark.parametrize("form", ["html", "markdown", "latex", "csv"])
def test_no_form_of_the_report_has_them_twice(form: str, document: Document) -> None:
    write = {
        "html": render_page,
        "markdown": formats.render_markdown,
        "latex": formats.render_latex,
        "csv": formats.render_csv,
    }[form]
    tables = tuple(replace(section, figures=()) for section in document.sections)  # to draw figures takes seconds
    text = write(replace(document, sections=tables))  # type: ignore[operator]
    assert repeated(text) == []
    if form == "csv":
        value = formats.render_csv_files(document)
        heads = {name: next(csv.reader(io.StringIO(value[f"table_{name}"]))) for name in TABLES}
        assert all("node-hours" in head and "cost (node-h)" not in head for head in heads.values())


def repeated(text: str) -> list[str]:
    """Return where the same number of node-hours is twice."""
    return [
        result[0] for result in re.finditer(r"([\d.]+) node-h(?:ours)?\b[^\d\n]{1,12}\b([\d.]+) node-h", text)
        if float(result[1]) == float(result[2])
    ]  # fmt: skip


def tula(*words: str) -> str:
    screen = Screen(out=io.StringIO(), err=io.StringIO())
    code = app.run(list(words), screen=screen)
    assert code == 0, (words, screen.err.getvalue())  # type: ignore[attr-defined]
    return str(screen.out.getvalue()) + str(screen.err.getvalue())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "words",
    [
        "recommend",
        "recommend --all --objective cost",
        "recommend --objective accuracy-time",
        "status",
        "list",
        "train --dry-run --nodes 1 --batch 64",
        "train --dry-run --nodes 8 --batch 32",
        "compare --show",
        "report --markdown",
        "report --latex",
    ],
)
def test_no_screen_has_them_twice(words: str, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate_environment(monkeypatch, run.path.parent.parent)
    command, *options = words.split()
    named = ["--run-dir", str(run.path.parent)] if command == "list" else ["--run", str(run.path)]
    text = tula(command, *named, *options)
    assert repeated(text) == []
    heads = [line.split() for line in text.splitlines() if "pricing.price" not in line]
    assert not [head for head in heads if {"cost", "node-hours"} <= set(head)]


def test_words_of_a_cost() -> None:
    from tula_cli.show.tables import describe_cost, describe_max_cost

    assert describe_cost(1.0, 1.0, "node-h") == "1.00 node-h"
    assert describe_cost(1.0, 2.0, "node-h") == "1.00 node-h, 2.00 node-h", "a price in node-hours is one"
    assert describe_cost(1.0, 1.0, "EUR") == "1.00 node-h, 1.00 EUR"
    assert describe_max_cost(None, 0.25, 0.25, "node-h") == "at most 0.250 node-h"
