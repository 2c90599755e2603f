"""How results of the Python API are shown in a notebook and in an interactive session."""

import re
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import make_comparisons
import make_runs as make
import pytest
from make_reports import JOB, add_recommendation, make_probed_run
from make_results import make_inspection

from tula_cli import entry_points
from tula_cli.errors import SpecError
from tula_cli.run.directory import RunDir
from tula_cli.run.frames import MAX_ROWS, list_columns, render_html
from tula_cli.run.job_runs import make_runs, open_run
from tula_cli.run.records.recommendations import ADDED_COLUMNS, Prediction, Recommendation
from tula_cli.services import messages
from tula_cli.services.api import RESULT_COLUMNS, Run
from tula_cli.services.check import CheckResult, check_job_on_all_node_types

HOSTILE = "<script>alert('x')</script> & \x1b[31mred"
ESCAPED = "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; red"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.from_directories([open_run(add_recommendation(make_probed_run(tmp_path)))])


@pytest.fixture
def recommendation(run: Run) -> Recommendation:
    stored = run.recommendation()
    assert stored is not None
    return stored


@pytest.fixture
def checked() -> CheckResult:
    return check_job_on_all_node_types(make_runs(Path("tula-runs"), JOB), inspector=lambda spec: make_inspection())


def list_rows(html: str) -> list[list[str]]:
    """Return the cells of the body of a table."""
    return [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr.*?>(<td>.*?)</tr>", html)]


def test_a_result_is_one_short_line(
    run: Run, recommendation: Recommendation, checked: CheckResult, tmp_path: Path
) -> None:
    compared = make_comparisons.run_comparison(
        RunDir.create(tmp_path / "c", make.spec()), make_comparisons.ImmediateTraining()
    )
    for result in (recommendation, checked, *checked.reports.values(), compared):
        assert str(result) == repr(result) and "\n" not in repr(result)
        assert repr(result).startswith(f"<{type(result).__name__}: ") and len(repr(result)) < 300
    choice = recommendation.choice
    assert f"{choice.nodes} node" in repr(recommendation) and f"batch {choice.batch} " in repr(recommendation)
    assert repr(run) == f"Run({str(run.path)!r})"


def test_a_recommendation_is_a_table_with_the_choice_first(recommendation: Recommendation) -> None:
    html = recommendation._repr_html_()
    rows, choice = list_rows(html), recommendation.choice
    assert len(rows) == min(len(recommendation.rows), MAX_ROWS)
    assert rows[0][:3] == [str(choice.nodes), str(choice.batch), str(choice.local_batch)]
    assert recommendation.headline is not None and escape(recommendation.headline.text) in html
    assert html.count("bold") == 1 and html.index("bold") < html.index("<td>")
    assert [row[:3] for row in rows].count(rows[0][:3]) == 1, "the choice is listed once"
    assert "<th>cost (USD)</th>" in html and re.search(r"<th>time \((s|min|h)\)</th>", html)


def test_an_interval_that_decides_nothing_says_so(recommendation: Recommendation) -> None:
    vague = recommendation.choice.model_copy(update={"hours_low": 0.0, "hours_high": 5.0})
    unknown = recommendation.rows[-1].model_copy(update={"hours_low": None, "hours_high": None})
    rows = list_rows(recommendation.model_copy(update={"choice": vague, "rows": (vague, unknown)})._repr_html_())
    assert rows[0][4].endswith("(too uncertain to decide by)") and rows[1][4] == "unknown"


def test_a_check_is_a_table_of_its_jobs_with_its_warnings(checked: CheckResult) -> None:
    report = checked.reports[None]
    rows = list_rows(checked._repr_html_())
    assert [(int(row[0]), int(row[1])) for row in rows] == [(job.nodes, len(job.batches)) for job in report.jobs]
    assert f"{report.probes} probes in {len(report.jobs)} jobs" in checked._repr_html_()
    assert all(escape(warning.text) in checked._repr_html_() for warning in report.warnings)


def test_a_check_with_problems_shows_them(checked: CheckResult) -> None:
    problem = messages.node_type_left_out(node_type="big", problems=["GPU memory is too small."])
    report = replace(checked.reports[None], problems=(problem,), jobs=())
    failed = CheckResult({"a": report, "b": checked.reports[None]}, None)
    assert problem.text in repr(failed) and escape(problem.text) in failed._repr_html_()
    assert {row[0] for row in list_rows(failed._repr_html_())} == {"b"} and "<th>node type</th>" in failed._repr_html_()


def test_a_run_is_a_table_of_its_probes(run: Run) -> None:
    rows = list_rows(run._repr_html_())
    assert len(rows) == len(run.results()) and {row[3] for row in rows} == {"measured", "out_of_memory"}
    assert "Recommended: " in run._repr_html_()


def test_a_comparison_is_a_table_of_methods(tmp_path: Path) -> None:
    report = make_comparisons.run_comparison(RunDir.create(tmp_path, make.spec()), make_comparisons.ImmediateTraining())
    rows = list_rows(report._repr_html_())
    assert [row[0] for row in rows] == ["lbt (reference)", *(row.method for row in report.rows[1:])]
    assert report.answer in repr(report) and escape(report.answer) in report._repr_html_()


def test_text_is_escaped_and_rows_beyond_a_screen_are_counted() -> None:
    html = render_html(HOSTILE, [HOSTILE], [[HOSTILE]] * (MAX_ROWS + 2), notes=[HOSTILE])
    assert html.count(ESCAPED) == 1 + 1 + MAX_ROWS + 1 and "<script" not in html and "\x1b" not in html
    assert "<p>2 rows not shown</p>" in html


def test_text_of_a_job_is_escaped(recommendation: Recommendation) -> None:
    changes: dict[str, Any] = {"reason": HOSTILE, "warnings": (HOSTILE,), "currency": HOSTILE}
    assert "<script" not in recommendation.model_copy(update=changes)._repr_html_()


def test_every_column_is_described(run: Run, recommendation: Recommendation) -> None:
    assert list(run.results().columns) == list(RESULT_COLUMNS)
    described = {column.name: column.description for column in list_columns(Prediction)} | ADDED_COLUMNS
    assert list(recommendation.frame().columns) == list(described)
    assert all(described.values()) and all(RESULT_COLUMNS.values())


def test_a_plot_against_an_unknown_quantity_is_refused(recommendation: Recommendation) -> None:
    with pytest.raises(SpecError, match="against 'price': must be one of cost, nodes"):
        recommendation.plot("price")  # type: ignore[arg-type]


def test_a_plot_without_its_package_names_the_extra(
    recommendation: Recommendation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    monkeypatch.setattr(entry_points, "PROJECT_FILE", tmp_path / "pyproject.toml")
    with pytest.raises(SpecError, match="optional package report is not installed") as error:
        recommendation.plot()
    assert "pip install 'tula-cli[report]'" in error.value.hint
