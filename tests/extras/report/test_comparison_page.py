"""The sections of a comparison in a report."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import make_runs as make
import pytest
from isolation import isolate_environment, poll_quickly
from make_comparisons import (
    COMPARE_ARGUMENTS,
    GRID,
    SPEC,
    ImmediateScripts,
    ImmediateTraining,
    compare,
    compare_scripts,
    find_row,
    inspect,
    make_plan,
    run_comparison,
    run_tula,
    script_job,
    use_immediate_training,
)

from tula_cli.extras.report import comparison_document
from tula_cli.extras.report.material import collect_report_data
from tula_cli.extras.report.page import render_page
from tula_cli.extras.report.run_report import build_document
from tula_cli.extras.report.values import TrainingCurve
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.records.results import Comparison
from tula_cli.services.compare import Grid
from tula_cli.services.comparison import trainings
from tula_cli.services.comparison.accuracy import CompareReport, SeedStatistics
from tula_cli.services.document import Document


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate_environment(monkeypatch, tmp_path)
    poll_quickly(monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "tula-runs", make.spec(**SPEC))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ImmediateTraining:
    return use_immediate_training(monkeypatch, tmp_path)


def test_the_page_names_the_job_and_draws_every_method(here: ImmediateTraining, tmp_path: Path) -> None:
    here.diverges = ("lbt-x4",)
    assert run_tula(*COMPARE_ARGUMENTS)[0] == 0
    code, out, _ = run_tula("report", "--html", "page.html")
    content = (tmp_path / "page.html").read_text()
    assert code == 0 and "page.html" in out
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", content))
    assert facts["model"].startswith("resnet18") and facts["data"] == "digits"
    assert "lbt (reference)" in content and ">91.00</td>" in content and "2 diverged" in content
    # Of the four that have numbers: by batch, and during training at two batches.
    titles = re.findall(r"<figure [^>]*><h3>(.*?)</h3>", content)
    by_batch = titles.index("top-1 (%) by batch")
    assert titles[by_batch + 1 : by_batch + 3] == [
        "top-1 (%) during training, batch 128",
        "top-1 (%) during training, batch 256",
    ]
    assert {"Mean scaling factor", "Gradient norm", "Scaling factors of ags, batch 256"} <= set(titles)
    assert content.count("<svg") == len(titles)


def test_equal_metrics_of_all_seeds_have_an_error_bar_of_length_zero(run: RunDir) -> None:
    planned, launcher = make_plan(run), ImmediateTraining()
    list(trainings.train_cells_one_by_one(run, planned, launcher, inspect=inspect))
    report = compare(run, planned.comparison)
    rows = tuple(dataclasses.replace(row, top1=SeedStatistics(91.0, 0.0, 2)) for row in report.rows)
    sections = make_document(dataclasses.replace(report, rows=rows)).sections
    (figure,) = [figure for section in sections for figure in section.figures if figure.key == "top1_by_batch"]
    assert figure.series
    for series in figure.series:
        assert series.low == series.high == series.y == (91.0,) * len(series.x)


def test_a_page_shows_no_text_of_arguments_and_says_what_is_not_recorded(run: RunDir) -> None:
    spec = make.spec(**{**SPEC, "model": {"name": "resnet18", "args": {"width": 8, "token": "hf_planted"}}})
    result = build_document(collect_report_data([Run(run.path, spec)], now=0.0))
    facts = {fact.name: fact.value for fact in result.facts}
    assert facts["model"] == "resnet18 (width 8)" and "hf_planted" not in render_page(result)
    assert facts["hardware"] == "not recorded yet; 1 GPU per node"


def test_a_comparison_answers_at_the_largest_batch_that_is_trained(run: RunDir) -> None:
    planned, launcher = make_plan(run, dataclasses.replace(GRID, batches=(128,))), ImmediateTraining()
    list(trainings.train_cells_one_by_one(run, planned, launcher, inspect=inspect))
    half = document(run, make_plan(run).comparison).answer
    assert (
        half.startswith(
            "At batch 128 the differences between the methods are within the noise of the seeds: ags has top1 91.00 ± 1.4, where batch 32 has 91.00"
        )
        and "(12 of 22 trainings done)" in half
    )


def document(run: RunDir, comparison: Comparison) -> Document:
    curves = comparison_document.read_training_curves(Run(run.path, make.spec(**SPEC)), comparison)
    return make_document(compare(run, comparison), curves)


def test_the_page_of_a_language_model_draws_loss_and_perplexity(run: RunDir) -> None:
    planned, launcher = make_plan(run), ImmediateTraining(words=True)
    list(trainings.train_cells_one_by_one(run, planned, launcher, inspect=inspect))
    result = document(run, planned.comparison)
    titles = [figure.title for section in result.sections for figure in section.figures]
    assert {"loss by batch", "perplexity by batch"} <= set(titles)
    assert {
        f"{words} during training, batch {batch}" for words in ("perplexity", "loss") for batch in (128, 256)
    } <= set(titles)
    plain = find_row(compare(run, planned.comparison), "lbt", 256).metrics["perplexity"]
    assert f"<td>{plain.mean:.3f}</td>" in render_page(result)


def make_document(report: CompareReport, curves: Sequence[TrainingCurve] = ()) -> Document:
    sections = tuple(comparison_document.build_comparison_sections(report, curves))
    return Document("own: comparison", "", report.answer, "", (), sections)


def test_a_script_is_compared_by_its_own_metric(tmp_path: Path) -> None:
    report = compare_scripts(tmp_path, ImmediateScripts(), script_job(), methods=("lbt", "lrs", "sqrt"), seeds=2)
    result = make_document(report)
    columns = [column.title for column in result.sections[0].tables[0].columns]
    assert {"acc", "best acc"} <= set(columns) and "top-1" not in columns
    assert "<td>0.7050</td>" in render_page(result)


def test_a_metric_that_no_training_told_has_no_number(tmp_path: Path) -> None:
    report = compare_scripts(
        tmp_path, ImmediateScripts(told=False), script_job(), methods=("lbt",), seeds=1, controls=False
    )
    result = make_document(report)
    assert "acc" not in [column.title for column in result.sections[0].tables[0].columns]


def test_a_comparison_in_rounds_has_a_table_of_the_first_round(run: RunDir) -> None:
    grid = Grid(("lbt", "lrs", "ags", "ortho", "sqrt"), (512,), 2, nodes=1, controls=False, halving=True)
    report = run_comparison(run, ImmediateTraining(), grid)
    content = render_page(make_document(report))
    assert "First round: 1 of 4 epochs" in content and re.search(r"dropped in round 1: place [45] of [45]", content)
