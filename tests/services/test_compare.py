"""`tula compare`: the grid, what is trained when, the table, the page."""

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import make_runs as make
import pytest
import status as benchmark
from isolation import isolate_environment, poll_quickly
from make_comparisons import (
    COMMAND,
    COMPARE_ARGUMENTS,
    GRID,
    METRIC,
    SPEC,
    TOP1,
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
from read_diagnostics import codes

from tula_cli.errors import BadMeasurements, JobFailed, SpecError, TulaError
from tula_cli.options import ComparisonRequest
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.records.failures import Failure, Fallback, Recovery, Relaunch
from tula_cli.services import compare as services_compare
from tula_cli.services import messages, waiting
from tula_cli.services import status as services_status
from tula_cli.services.compare import Grid
from tula_cli.services.comparison import accuracy, session, trainings
from tula_cli.services.comparison.rows import list_known_methods, make_row_of_job
from tula_cli.show import compare as show_compare
from tula_cli.show import live
from tula_cli.spec.job import JobSpec
from tula_cli.spec.signature import compute_train_signature
from tula_cli.words import format_number


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate_environment(monkeypatch, tmp_path)
    poll_quickly(monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "tula-runs", make.spec(**SPEC))


# --- the grid


def test_a_method_or_batch_that_is_listed_twice_is_trained_once(run: RunDir) -> None:
    request = ComparisonRequest(methods=("ags", "lbt", "ags"), batches=(64, 64, 128))
    grid = session.complete_grid(request, Run(run.path, run.spec), None)
    assert (grid.methods, grid.batches) == (("ags", "lbt"), (64, 128))


def test_the_first_seed_of_every_row_comes_before_any_second_one(run: RunDir) -> None:
    cells = make_plan(run).comparison.cells
    rows = [
        ("lbt", 32),
        *itertools.product(("lbt", "lrs", "ags", "lbt-x2", "lbt-x4"), (128,)),
        *itertools.product(("lbt", "lrs", "ags", "lbt-x2", "lbt-x4"), (256,)),
    ]
    assert [(cell.method, cell.batch, cell.seed) for cell in cells] == [(*r, seed) for seed in (5, 6) for r in rows]
    assert [cell.reference for cell in cells[:3]] == [True, False, False]


def test_controls_can_be_left_out_and_are_only_at_large_batches(run: RunDir) -> None:
    without = Grid(methods=("ags",), batches=(128,), seeds=1, nodes=1, controls=False)
    assert [cell.method for cell in make_plan(run, without).comparison.cells] == ["lbt", "ags"]
    small = Grid(methods=("ags",), batches=(32,), seeds=1, nodes=1)
    assert [(cell.method, cell.batch) for cell in make_plan(run, small).comparison.cells] == [("lbt", 32), ("ags", 32)]


def test_the_reference_among_the_batches_is_trained_once(run: RunDir) -> None:
    cells = make_plan(run, Grid(methods=("lbt",), batches=(32, 128), seeds=1, nodes=1)).comparison.cells
    assert [(cell.method, cell.batch) for cell in cells] == [
        ("lbt", 32),
        ("lbt", 128),
        ("lbt-x2", 128),
        ("lbt-x4", 128),
    ]
    assert len({cell.signature for cell in cells}) == len(cells)


def test_two_rows_that_are_one_training_are_one_row() -> None:
    spec = make.spec(**SPEC, ags={"preset": "robust"})
    run = RunDir(Path("tula-runs") / "x")
    cells = make_plan(run, Grid(methods=("ags", "robust"), batches=(128,), seeds=1, nodes=1, controls=False), spec)
    assert [cell.method for cell in cells.comparison.cells] == ["lbt", "ags"]


def test_the_reference_is_the_first_row_also_beside_smaller_batches(run: RunDir) -> None:
    report = run_comparison(
        run, ImmediateTraining(), Grid(methods=("lbt",), batches=(16, 256), seeds=1, nodes=1, controls=False)
    )
    assert [row.batch for row in report.rows] == [32, 16, 256]


def test_a_cell_is_the_training_of_the_same_overrides(run: RunDir) -> None:
    spec = run.read_spec()
    by_hand = make.spec(**{**SPEC, "optimizer": {"lr": 0.4}, "train": {**SPEC["train"], "method": "lbt", "seed": 6}})
    assert services_compare.make_job_of_cell(spec, "lbt-x4", 6) == by_hand
    cell = next(c for c in make_plan(run).comparison.cells if (c.method, c.batch, c.seed) == ("lbt-x4", 256, 6))
    assert cell.signature == compute_train_signature(by_hand, nodes=1, batch=256)


def test_a_scaling_of_the_learning_rate_is_that_of_the_jobs_own_method_alone() -> None:
    spec = make.spec(**{**SPEC, "train": {**SPEC["train"], "method": "lrs", "lr_scaling": "sqrt"}})
    scaling = {
        name: services_compare.make_job_of_cell(spec, name, 5).train.lr_scaling
        for name in ("lrs", "ags", "lbt-x2", "sqrt")
    }
    assert scaling == {"lrs": "sqrt", "ags": "auto", "lbt-x2": "auto", "sqrt": "sqrt"}


def test_a_row_may_keep_the_half_life_of_the_second_moment_which_a_script_has_for_itself() -> None:
    adam = make.spec(**{**SPEC, "optimizer": {"name": "AdamW", "lr": 1e-3}})
    made = services_compare.make_job_of_cell(adam, "sqrt-beta2", 5)
    assert (made.train.method, made.train.lr_scaling, made.optimizer.beta2_half_life) == ("lrs", "sqrt", "auto")
    assert services_compare.make_job_of_cell(adam, "sqrt", 5).optimizer.beta2_half_life is None
    assert "cannot change the optimizer or schedule of a script" in services_compare.explain_unsupported_method(
        script_job(), "sqrt-beta2"
    )


def test_robust_keeps_of_the_jobs_own_scaling_what_optimizer_and_ranks_need(run: RunDir) -> None:
    kept = {"apply_to": "update", "parameters": ["*", "!norms"]}
    spec = make.spec(**SPEC, ags={"delta": 0.2, **kept})
    job = services_compare.make_job_of_cell(spec, "robust", 5)
    assert job.train.method == "ags" and job.ags.fill_from_preset() != spec.ags.fill_from_preset()
    assert job.ags.fill_from_preset() == make.spec(ags={"preset": "robust", **kept}).ags.fill_from_preset()


def test_the_plain_large_batch_is_plain_whatever_the_job_scales() -> None:
    spec = make.spec(**{**SPEC, "train": {**SPEC["train"], "method": "lbt", "lr_scaling": "linear"}})
    assert {services_compare.make_job_of_cell(spec, name, 5).train.lr_scaling for name in ("lbt", "lbt-x2", "ags")} == {
        "auto"
    }


def test_a_batch_grows_in_the_rows_of_method_ramp_alone() -> None:
    stages = [{"epochs": 1, "batch": 32}]
    spec = make.spec(**{**SPEC, "train": {**SPEC["train"], "method": "lrs", "ramp": stages}})
    results = {
        name: services_compare.make_job_of_cell(spec, name, 5).train.stages for name in ("ramp", "lrs", "lbt", "ags")
    }
    (stage,) = results.pop("ramp")
    assert stage.batch == 32 and set(results.values()) == {None}
    plain = make.spec(**{**SPEC, "train": {**SPEC["train"], "method": "lrs"}})
    assert services_compare.make_job_of_cell(plain, "ramp", 5).train.stages == "auto"


def test_methods_that_do_not_go_with_the_optimizer_are_refused_at_once(run: RunDir) -> None:
    adam = make.spec(**{**SPEC, "optimizer": {"name": "AdamW", "lr": 0.1}}, ags={"apply_to": "gradient"})
    grid = Grid(methods=("lbt", "lars", "ortho", "ags", "lamb"), batches=(128,), seeds=1, nodes=1)
    with pytest.raises(SpecError) as error:
        make_plan(run, grid, adam)
    assert [problem.path for problem in error.value.problems] == ["lars", "ags"]
    scaled = make.spec(**{**SPEC, "optimizer": {"name": "AdamW", "lr": 0.1}})
    make_plan(run, dataclasses.replace(grid, methods=("ags", "robust", "lamb")), scaled)
    with pytest.raises(SpecError) as error:
        make_plan(run, dataclasses.replace(grid, methods=("lamb",)))
    assert "replaces Adam or AdamW, so it cannot be used with optimizer.name: SGD" in str(error.value.problems[0])


OPTIMIZERS = (
    ("SGD", {}), ("SGD", {"momentum": 0.9}), ("SGD", {"momentum": 0.9, "args": {"nesterov": True}}), ("Adam", {}), ("AdamW", {}),
    ("NAdam", {}), ("RAdam", {}), ("Adamax", {}), ("Adagrad", {}), ("Adadelta", {}), ("Adafactor", {}), ("RMSprop", {}),
    ("Rprop", {}), ("Muon", {}), ("ASGD", {}), ("mine:Lamb", {}), ("mine:Lars", {}),
)  # fmt: skip
OF_METHODS = {
    "lars": "SGD", "lamb": "AdamW", "polo": "SGD", "static": "AdamW", "ortho": "SGD", "lrs": "RMSprop",
    "schedule_free": "AdamW", "auto": "AdamW", "ags": "AdamW", "lbt": "Adam", "mine:Method": "AdamW",
}  # fmt: skip


def default_grid(tmp_path: Path, *, batch: int = 512, **changes: dict[str, Any]) -> tuple[JobSpec, Grid]:
    """Return a job of 32 -> 512 with the grid of a comparison that names nothing but the batch."""
    base = {**SPEC, "train": {**SPEC["train"], "epochs": 20, "method": "ramp"}}
    spec = make.spec(**{**base, **{name: {**base.get(name, {}), **value} for name, value in changes.items()}})
    run = RunDir.create(tmp_path / "tula-runs", spec)
    return spec, session.complete_grid(ComparisonRequest(batches=(batch,)), Run(run.path, spec), None)


@pytest.mark.parametrize(
    "changes",
    [
        *({"optimizer": {"name": name, "lr": 0.01, **value}} for name, value in OPTIMIZERS),
        *({"optimizer": {"name": of}, "train": {"method": method}} for method, of in OF_METHODS.items()),
        *({"optimizer": {"name": of}, "train": {"method": "lbt", "parallel": "fsdp"}} for of in ("SGD", "AdamW")),
        {"optimizer": {"name": "AdamW"}, "train": {"epochs": 4}},
        {"optimizer": {"name": "AdamW", "beta2_half_life": "auto"}},
        {"train": {"method": "lrs", "ramp": [{"epochs": 1, "batch": 64}]}},
        {"train": {"method": "lbt", "lr_scaling": "sqrt"}},
        {"train": {"method": "ramp", "max_lr_factor": 4}},
    ],
)
def test_without_methods_every_job_has_rows_that_fit_with_its_own(tmp_path: Path, changes: dict[str, Any]) -> None:
    spec, grid = default_grid(tmp_path, **changes)
    value = make_row_of_job(spec)
    assert {"lbt", value} <= set(grid.methods) and len(grid.methods) <= 4
    assert grid.list_rows(32)[0] == ("lbt", 32) and ("lbt-x4", 512) in grid.list_rows(32), "one control"
    services_compare._require_fitting_methods(spec, grid)
    made = services_compare.make_job_of_cell(spec, value, spec.train.seed)
    assert compute_train_signature(made, nodes=1, batch=512) == compute_train_signature(spec, nodes=1, batch=512), (
        "as the job trains"
    )


def test_all_rows_have_the_schedule_of_the_job(tmp_path: Path) -> None:
    ramp, grid = default_grid(tmp_path, optimizer={"name": "AdamW"}, train={"method": "ramp"})
    kinds = {
        row: services_compare.make_job_of_cell(ramp, row, 0).schedule.decay_from for row in (*grid.methods, "lbt-x4")
    }
    assert set(kinds.values()) == {0.7}, "that of method ramp, also for the plain large batch and the control"
    plain, _ = default_grid(tmp_path, optimizer={"name": "AdamW"}, train={"method": "lbt"})
    assert services_compare.make_job_of_cell(plain, "ramp", 0).schedule.kind == "constant"
    assert services_compare.make_job_of_cell(ramp, "ramp:schedule.kind=cosine", 0).schedule.kind == "cosine"
    assert services_compare.make_job_of_cell(ramp, "schedule_free", 0).schedule.kind == "constant"


def test_at_the_reference_batch_there_is_no_control_and_just_above_it_the_smaller_one(tmp_path: Path) -> None:
    spec, grid = default_grid(tmp_path, batch=32)
    assert grid.list_rows(32) == [("lbt", 32), ("ags", 32), ("ramp", 32)]
    assert services_compare.choose_default_control(spec, (32, 64)) == ("lbt-x2",)


def test_what_the_default_rows_leave_out_is_said_with_the_reason(tmp_path: Path) -> None:
    spec, _ = default_grid(tmp_path, optimizer={"name": "AdamW"}, train={"epochs": 4})
    words = services_compare.list_default_rows(spec, nodes=1).description
    assert words.startswith("compares the methods that fit this job: lbt, sqrt, ramp (ramp is the method of the job)")
    assert words.endswith(
        "To choose others, use --methods; available: ags, lrs, lamb, polo, static, ortho, schedule_free, auto"
    )
    spec, _ = default_grid(
        tmp_path / "3", optimizer={"name": "AdamW"}, train={"epochs": 4}, schedule={"warmup_epochs": 5}
    )
    assert (
        "without sqrt, which would not finish its 5 epochs"
        in services_compare.list_default_rows(spec, nodes=1).description
    )
    fsdp, _ = default_grid(tmp_path / "2", optimizer={"name": "AdamW"}, train={"method": "lbt", "parallel": "fsdp"})
    assert services_compare.list_default_rows(fsdp, nodes=1).description.startswith(
        "compares the methods that fit this job: lbt, sqrt, ramp"
    )


def test_settings_of_ags_train_nothing_else_again(run: RunDir) -> None:
    before, after = (make_plan(run, GRID, make.spec(**SPEC, ags={"delta": delta})).comparison for delta in (0.5, 0.2))
    known = {cell.signature for cell in before.cells}
    assert {cell.method for cell in after.cells if cell.signature not in known} == {"ags"}


def test_a_gap_is_over_the_seeds_of_both(run: RunDir) -> None:
    """One seed is better than the other by two points for every method; alone it would move a gap by one."""
    planned, launcher = make_plan(run), ImmediateTraining()
    for cell in planned.comparison.cells:
        if (cell.method, cell.seed) != ("lrs", 5):
            trainings.submit_cell(run, cell, launcher, inspect=inspect)
    result = find_row(compare(run, planned.comparison), "lrs", 256)
    assert result.top1.n == 1 and result.gap == pytest.approx(5.0)
    assert result.recovered is None, "of one seed in common no noise is known"
    whole = find_row(compare(run, planned.comparison), "ags", 256)
    assert (whole.gap, whole.recovered) == (pytest.approx(0.0), pytest.approx(1.0))


def test_a_diverged_seed_has_no_loss_to_compare(run: RunDir) -> None:
    report = run_comparison(run, ImmediateTraining(classes=False, diverges=("lrs",)))
    result = find_row(report, "lrs", 256)
    assert (result.seeds, result.gap, result.recovered) == (0, None, None)
    assert result.count_trainings("diverged") == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"methods": ("lbz",)}, "did you mean lb"),
        ({"batches": ()}, "batch: none given"),
        ({"batches": (128, 0)}, "batch 0: must be at least 1"),
        ({"seeds": 0}, "seeds 0: must be at least 1"),
        ({"nodes": 0}, "nodes 0: must be at least 1"),
    ],
)
def test_a_grid_of_nonsense_is_refused(changes: dict, words: str) -> None:
    with pytest.raises(SpecError) as error:
        Grid(**{"methods": ("lbt",), "batches": (128,), "seeds": 1, "nodes": 1, **changes})
    assert words in f"{error.value.message} {error.value.hint}"


def test_every_method_of_the_spec_can_be_a_row() -> None:
    assert {"ags", "lbt", "lrs"} <= set(list_known_methods())
    assert set(services_compare.CONTROLS) <= set(list_known_methods())


def test_what_cannot_be_trained_is_refused_before_anything_starts(run: RunDir) -> None:
    with pytest.raises(SpecError, match="method lbt: batch 4096 is larger than the dataset"):
        make_plan(run, Grid(methods=("lbt",), batches=(4096,), seeds=1, nodes=1))
    with pytest.raises(SpecError, match="the reference: batch 32 is not divisible by 3"):
        make_plan(run, Grid(methods=("lbt",), batches=(96,), seeds=1, nodes=3))


# --- training


def test_everything_is_trained_once_and_the_table_is_whole(run: RunDir) -> None:
    launcher = ImmediateTraining()
    report = run_comparison(run, launcher)
    assert report.complete and report.total == 22 == len(launcher.submitted) == len(set(launcher.submitted))
    assert not make_plan(run).missing
    again = ImmediateTraining()
    run_comparison(run, again)
    assert again.submitted == []


def test_a_seed_more_trains_only_that(run: RunDir) -> None:
    run_comparison(run, ImmediateTraining())
    launcher = ImmediateTraining()
    run_comparison(run, launcher, Grid(methods=GRID.methods, batches=GRID.batches, seeds=3, nodes=1))
    assert {task.spec.train.seed for task in launcher.tasks} == {7}
    assert len(launcher.tasks) == 11


def test_a_failure_is_reported_and_does_not_end_the_grid(run: RunDir) -> None:
    report = run_comparison(run, ImmediateTraining(fails=("lrs",)))
    failed = find_row(report, "lrs", 256)
    assert [cell.state for cell in failed.cells] == ["failed", "failed"]
    assert (report.finished, report.total, failed.top1, failed.gap) == (18, 22, None, None)
    assert messages.job_ended(job="lrs, batch 128, seed 5", state="failed", reason="KeyError: 'x'") in report.warnings
    assert find_row(report, "ags", 256).top1 is not None
    launcher = ImmediateTraining()
    assert run_comparison(run, launcher).complete  # the next call trains what has failed
    assert len(launcher.submitted) == 4


def test_a_job_that_never_works_ends_the_grid(run: RunDir) -> None:
    launcher = ImmediateTraining(fails=tuple(TOP1))
    with pytest.raises(JobFailed, match=r"first 3 trainings have all failed.*KeyError"):
        run_comparison(run, launcher)
    assert len(launcher.submitted) == trainings.MAX_FIRST_FAILURES


def test_a_cancelled_training_ends_the_grid(run: RunDir) -> None:
    class Cancelled(ImmediateTraining):
        def submit(self, run, task):
            job = make.FakeLauncher.submit(self, run, task)
            self.says[task.job] = "ended"
            run.mark_job_cancelled(task.job)
            return job

    launcher = Cancelled()
    report = run_comparison(run, launcher)
    assert len(launcher.submitted) == 1
    assert find_row(report, "lbt", 32).cells[0].state == "cancelled"


def test_a_diverged_training_is_over_without_a_number_and_not_tried_again(run: RunDir) -> None:
    launcher = ImmediateTraining(diverges=("lbt-x4",))
    report = run_comparison(run, launcher)
    result = find_row(report, "lbt-x4", 256)
    assert [cell.state for cell in result.cells] == ["diverged", "diverged"]
    assert result.seeds == 0 and result.top1 is result.loss is result.gap is result.recovered is None
    assert report.complete and not make_plan(run).missing
    diverged = messages.job_ended(job="lbt-x4, batch 256, seed 5", state="diverged", reason=launcher.DIVERGED)
    assert diverged in report.warnings


def test_an_evaluation_that_is_not_finite_counts_with_its_accuracy(run: RunDir) -> None:
    planned, launcher = make_plan(run), ImmediateTraining()
    cell = next(cell for cell in planned.comparison.cells if (cell.method, cell.batch) == ("lbt-x4", 256))
    trainings.submit_cell(run, cell, launcher, inspect=inspect)
    summary = run.get_training(cell.signature).read_summary()
    run.write_summary(summary.model_copy(update={"metrics": {"top1": 10.0, "top5": 50.0}}))
    result = find_row(compare(run, planned.comparison), "lbt-x4", 256)
    assert result.cells[0].state == "diverged"
    assert result.top1 == accuracy.SeedStatistics(10.0, None, 1) and result.loss is None


def test_progress_counts_and_tells_what_is_left(run: RunDir) -> None:
    planned = make_plan(run)
    steps = list(trainings.train_cells_one_by_one(run, planned, ImmediateTraining(fails=("lrs",)), inspect=inspect))
    ended = [step for step in steps if step.ended is not None]
    assert [step.done + step.failed for step in ended] == list(range(1, 23))
    assert (ended[-1].done, ended[-1].failed, ended[-1].left) == (18, 4, 0.0)
    assert ended[0].left is None  # as nothing was known when it began
    seeds = [step.left for step in ended if step.ended.seed == 6]
    assert seeds == sorted(seeds, reverse=True) and seeds[0] > 3600  # the second reference takes an hour


def test_what_is_left_is_what_the_training_says_and_what_is_expected_of_the_others(run: RunDir) -> None:
    job = make.add_training(run, rows=make.metrics())
    now = services_status.read_run_status(run, make.FakeLauncher(says={job: "running"}), now=make.START + 60)
    assert now.training is not None and now.training.eta == pytest.approx(70.0)
    assert trainings._estimate_remaining_seconds(now, job, 1.0, 2.0) == pytest.approx(70.0 + 7200)
    assert trainings._estimate_remaining_seconds(now, "train-another", 1.0, 2.0) == pytest.approx(3600 + 7200)
    assert trainings._estimate_remaining_seconds(now, job, 1.0, None) is None


def test_changed_code_ends_a_comparison(run: RunDir) -> None:
    planned = make_plan(run)
    first = planned.comparison.cells[0].model_copy(update={"signature": "00000000"})
    with pytest.raises(TulaError, match="has changed since the comparison was started"):
        trainings.submit_cell(run, first, ImmediateTraining(), inspect=inspect)


def test_a_scheduler_gets_everything_at_once(run: RunDir) -> None:
    launcher = ImmediateTraining()
    planned = make_plan(run)
    jobs = trainings.submit_cells(run, planned, launcher, inspect=inspect)
    assert jobs == [f"train-{cell.signature}" for cell in planned.comparison.cells]
    steps = list(trainings.wait_for_cells(run, planned, launcher, jobs))
    assert (steps[-1].done, steps[-1].failed, steps[-1].total) == (22, 0, 22)
    assert {step.ended for step in steps if step.ended} == set(planned.comparison.cells)


def test_expected_hours_are_those_of_the_own_row_then_predicted_then_of_the_batch() -> None:
    took = {("a", 32): 1.0, ("b", 64): 3.0, ("c", 64): 5.0}
    assert services_compare.estimate_hours(("a", 32), took, {("a", 32): 9.0}) == 1.0
    assert services_compare.estimate_hours(("d", 64), took, {("d", 64): 9.0}) == 9.0
    assert services_compare.estimate_hours(("d", 64), took, {}) == 4.0
    assert services_compare.estimate_hours(("d", 128), took, {}) == 3.0
    assert services_compare.estimate_hours(("d", 128), {}, {}) is None


# --- the table


def test_mean_deviation_gap_and_what_is_recovered(run: RunDir) -> None:
    report = run_comparison(run, ImmediateTraining())
    lrs = find_row(report, "lrs", 256)
    assert lrs.top1 == accuracy.SeedStatistics(86.0, pytest.approx(math.sqrt(2)), 2)  # 85 and 87: the sample deviation
    assert (lrs.gap, lrs.recovered) == (pytest.approx(5.0), pytest.approx(0.5))
    assert find_row(report, "ags", 256).recovered == pytest.approx(1.0)
    assert find_row(report, "lbt-x2", 256).recovered == pytest.approx(-1.0)
    assert find_row(report, "lbt", 256).gap == pytest.approx(10.0) and find_row(report, "lbt", 256).recovered is None
    assert find_row(report, "lbt", 32).gap is None and find_row(report, "lbt", 32).reference
    assert (lrs.samples, lrs.hours) == (8000, pytest.approx(32 / 256))


def test_samples_of_branches_are_seen_too(run: RunDir) -> None:
    run_comparison(run, ImmediateTraining())
    comparison = make_plan(run, GRID).comparison
    cell = next(cell for cell in comparison.cells if (cell.method, cell.batch, cell.seed) == ("lrs", 256, 5))
    branches = (make.branch("lbt", samples=300), make.branch("x2", samples=400))
    run.write_tuning(make.tuning(branches).model_copy(update={"signature": cell.signature}))
    result = find_row(compare(run, comparison), "lrs", 256)
    assert [value.samples for value in result.cells] == [8700, 8000] and result.samples == 8350


def test_a_gap_within_the_noise_cannot_be_recovered() -> None:
    near, far, seed_statistics = (
        accuracy.SeedStatistics(80.0, 3.0, 2),
        accuracy.SeedStatistics(80.0, 0.1, 2),
        accuracy.SeedStatistics(82.0, 1.0, 2),
    )
    reference = accuracy.SeedStatistics(82.0, 3.0, 2)
    assert (
        accuracy.compute_recovered_share(reference, near, seed_statistics, "top1") is None
    )  # standard error of the difference: 3
    assert accuracy.compute_recovered_share(
        accuracy.SeedStatistics(83.5, 3.0, 2), near, seed_statistics, "top1"
    ) == pytest.approx(2 / 3.5)
    assert accuracy.compute_recovered_share(
        accuracy.SeedStatistics(82.0, 0.1, 2), far, seed_statistics, "top1"
    ) == pytest.approx(1.0)
    assert (
        accuracy.compute_recovered_share(
            accuracy.SeedStatistics(82.0, None, 1), accuracy.SeedStatistics(80.0, 0.1, 2), seed_statistics, "top1"
        )
        is None
    ), "noise unknown"
    assert (
        accuracy.compute_recovered_share(reference, accuracy.SeedStatistics(90.0, 0.0, 2), seed_statistics, "top1")
        is None
    )  # no gap at all


@pytest.mark.parametrize("missing", range(3))
def test_without_a_result_of_a_row_no_share_is_recovered(missing: int) -> None:
    rows = [accuracy.SeedStatistics(mean, 0.1, 2) for mean in (90.0, 80.0, 85.0)]
    assert accuracy.compute_recovered_share(*rows, "top1") == pytest.approx(0.5)
    rows[missing] = None
    assert accuracy.compute_recovered_share(*rows, "top1") is None


def test_without_classes_the_loss_is_compared(run: RunDir) -> None:
    report = run_comparison(run, ImmediateTraining(classes=False))
    assert report.metric == "loss"
    result = find_row(report, "lrs", 256)
    assert result.top1 is None and result.loss is not None and result.loss.mean == pytest.approx(1.4)
    assert (result.gap, result.recovered) == (pytest.approx(0.5), pytest.approx(0.5))


def test_a_partial_table_tells_what_is_missing(run: RunDir) -> None:
    planned, launcher = make_plan(run), ImmediateTraining()
    for cell in planned.comparison.cells[:4]:
        trainings.submit_cell(run, cell, launcher, inspect=inspect)
    report = compare(run, planned.comparison)
    assert (report.finished, report.total) == (4, 22)
    assert find_row(report, "ags", 128).count_trainings("missing") == 1 and find_row(report, "ags", 128).top1.sd is None
    assert report.hours_left is not None and report.hours_left > 0


def test_a_training_that_fell_back_to_a_smaller_batch_is_marked(run: RunDir) -> None:
    planned, launcher = make_plan(run), ImmediateTraining()
    cell = planned.comparison.cells[1]
    trainings.submit_cell(run, cell, launcher, inspect=inspect)
    summary = run.get_training(cell.signature).read_summary()
    assert summary is not None
    run.write_summary(summary.model_copy(update={"batch": 64}))
    report = compare(run, planned.comparison)
    assert report.warnings == (messages.row_trained_at_smaller_batch(method="lbt", batch=128, smaller=[64]),)


def test_a_training_whose_batch_norm_saw_fewer_samples_is_marked(run: RunDir) -> None:
    planned, launcher = make_plan(run), ImmediateTraining()
    cell = planned.comparison.cells[1]
    trainings.submit_cell(run, cell, launcher, inspect=inspect)
    summary = run.get_training(cell.signature).read_summary()
    assert summary is not None
    oom, killed = Failure(outcome="device_oom"), Failure(outcome="signal", message="killed")
    plain = Fallback(rung=0, splits=2, batch=128, micro_batch=64, micro_batches=2)
    changed = plain.model_copy(update={"splits": 4, "micro_batch": 32, "micro_batches": 4, "normalised": 32})
    first, second = (Recovery(failure=oom, decision=Relaunch(fallback=fallback)) for fallback in (plain, changed))
    run.write_summary(summary.model_copy(update={"recoveries": (first,)}))
    assert compare(run, planned.comparison).warnings == ()
    third = Recovery(failure=killed, decision=Relaunch())
    run.write_summary(summary.model_copy(update={"recoveries": (first, second, third)}))
    assert compare(run, planned.comparison).warnings == (
        messages.row_trained_with_other_normalisation(
            method="lbt", batch=128, normalisation="BatchNorm's statistics over 32 samples"
        ),
    )


# --- the command


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ImmediateTraining:
    return use_immediate_training(monkeypatch, tmp_path)


def test_a_table_reads_each_file_at_most_once(run: RunDir) -> None:
    run_comparison(run, ImmediateTraining(fails=("lrs",)))
    comparison = make_plan(run).comparison
    with benchmark.count_reads() as reads:
        report = accuracy.build_compare_report(Run(run.path, run.read_spec()), comparison)
    assert report.finished and len(reads) == len(set(reads))


def test_the_command_trains_and_shows_the_table(here: ImmediateTraining) -> None:
    code, out, err = run_tula(*COMPARE_ARGUMENTS)
    assert code == 0 and len(here.submitted) == 18
    assert "ags" in out and "91.00 ± 1.41" in out and "18 of 18 trainings done" in out
    assert "18 of 18 trainings done" in err and "top-1" in out
    code, out, err = run_tula("compare")  # the same grid, of the newest run
    assert code == 0 and len(here.submitted) == 18 and "have already finished" in err
    assert run_tula("compare", "--seeds", 3)[0] == 0 and len(here.submitted) == 27, "a third seed of each row"


def test_a_dry_run_touches_nothing(here: ImmediateTraining, tmp_path: Path) -> None:
    code, out, _ = run_tula(*COMPARE_ARGUMENTS, "--dry-run")
    assert code == 0 and "lbt (reference)" in out and "18 trainings to do, 0 of 18 done" in out
    assert "#!/bin/bash" in out  # what the first of them would submit
    assert not (tmp_path / "tula-runs").exists() and not here.submitted


def test_show_starts_nothing(here: ImmediateTraining) -> None:
    assert run_tula("compare", "job.yaml", "--show")[0] == BadMeasurements.exit_code
    here.fails = ("ags",)
    run_tula(*COMPARE_ARGUMENTS)
    submitted = len(here.submitted)
    code, out, err = run_tula("compare", "--show", "--json")
    answer = json.loads(out)
    assert code == 0 and len(here.submitted) == submitted
    assert (answer["status"], answer["data"]["finished"], answer["data"]["total"]) == ("partial", 14, 18)
    assert answer["data"]["rows"][0]["top1"] == {"mean": 91.0, "sd": pytest.approx(math.sqrt(2)), "n": 2}
    assert "ags, batch 128, seed 5 failed" in err


def test_failures_are_reported_when_they_happen_and_diverged_ones_are_counted(here: ImmediateTraining) -> None:
    here.fails, here.diverges = ("ags",), ("lbt-x4",)
    code, out, err = run_tula(*COMPARE_ARGUMENTS)
    assert code == JobFailed.exit_code and "4 of 18 trainings failed" in err
    assert "ags, batch 128, seed 5 failed: Training failed on attempt 1: KeyError: 'x'" in err
    (line, *_) = [line for line in out.splitlines() if "lbt-x4" in line]
    assert re.search(r"lbt-x4 +0 +- .*2 diverged", line)


def test_without_a_batch_the_recommended_one_is_compared(here: ImmediateTraining, run: RunDir) -> None:
    assert run_tula("compare", "job.yaml")[0] == BadMeasurements.exit_code
    run.write_recommendation(make.recommendation(choice=make.prediction(2, 256)))
    code, out, _ = run_tula("compare", "job.yaml", "--methods", "ags", "--dry-run", "--json")
    cells = json.loads(out)["data"]["comparison"]["cells"]
    assert code == 0 and {(cell["batch"], cell["nodes"]) for cell in cells} == {(32, 2), (256, 2)}


@pytest.mark.parametrize(
    "words",
    [
        ("--methods", "lbt", "--batch", "12a"),
        ("--batch", "128", "--methods", "lbtt"),
        ("--methods", "lbt", "--batch", "128", "--no-wait"),
    ],
)
def test_what_the_user_gets_wrong_is_said(here: ImmediateTraining, words: tuple[str, ...]) -> None:
    code, _, err = run_tula("compare", "job.yaml", *words)
    assert code == SpecError.exit_code and words[-1] in err


def test_a_look_takes_no_grid(here: ImmediateTraining) -> None:
    assert run_tula(*COMPARE_ARGUMENTS)[0] == 0
    code, _, err = run_tula("compare", "--show", "--methods", "lbt")
    assert code == SpecError.exit_code and "have no effect with --show" in err


def test_interrupting_keeps_what_is_done(here: ImmediateTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, calls = waiting.watch_jobs, itertools.count()

    def interrupted(*arguments, **named):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return watch(*arguments, **named)

    monkeypatch.setattr(waiting, "watch_jobs", interrupted)
    code, _, err = run_tula(*COMPARE_ARGUMENTS)
    assert code == 130 and "are kept" in err
    monkeypatch.setattr(waiting, "watch_jobs", watch)
    assert run_tula(*COMPARE_ARGUMENTS)[0] == 0
    assert len(set(here.submitted)) == 18 == len(here.submitted)


def test_a_training_that_waits_for_another_job_of_the_machine_says_so(run: RunDir) -> None:
    launcher, ticks, planned = (
        make.FakeLauncher(reason="waiting for another tula job"),
        itertools.count(step=4.0),
        make_plan(run),
    )
    launcher.says = {f"train-{cell.signature}": "pending" for cell in planned.comparison.cells}
    steps = trainings.train_cells_one_by_one(run, planned, launcher, inspect=inspect, clock=lambda: next(ticks))
    message = [live.describe_comparison_progress(now) for now in itertools.islice(steps, 5)]
    assert ["waiting for another tula job" in text for text in message] == [False, False, False, True, True]


def test_post_local_sgd_alone_is_said_to_be_nothing(run: RunDir) -> None:
    grid = Grid(methods=("polo",), batches=(128,), seeds=1, nodes=1, controls=False)
    assert "method-needs-several-gpus" in codes(make_plan(run, grid).warnings)
    two = dataclasses.replace(grid, nodes=2)
    assert "method-needs-several-gpus" not in codes(make_plan(run, two).warnings)


def test_a_warm_up_that_never_ends_is_reported_of_every_method(run: RunDir) -> None:
    grid = Grid(methods=("polo", "lrs", "ags"), batches=(128,), seeds=1, nodes=2, controls=False)
    given = make.spec(**SPEC, schedule={"warmup_epochs": 5})
    assert make_plan(run, grid, given).warnings == tuple(
        messages.only_warmup(method=method, warmup_epochs=5.0, epochs=4) for method in ("polo", "lrs", "ags")
    )
    long = make.spec(**{**SPEC, "train": {**SPEC["train"], "epochs": 9}})
    assert make_plan(RunDir(Path("tula-runs") / "x"), grid, long).warnings == ()


# --- a script of the user's own


def test_methods_of_a_script_are_compared_by_its_own_metric(tmp_path: Path) -> None:
    launcher = ImmediateScripts()
    report = compare_scripts(tmp_path, launcher, script_job(), methods=("lbt", "lrs", "sqrt"), seeds=2)
    assert (report.metric, report.columns) == ("acc", ("acc", "best_acc", "loss", "best_loss"))
    assert report.complete and not report.less_is_better
    by_batch = {batch: [lr / 0.1 for other, lr in launcher.lrs if other == batch] for batch in (32, 64, 128)}
    assert by_batch[32] == pytest.approx([1, 1])
    assert by_batch[64] == pytest.approx(2 * [1, 2, 2**0.5, 4]), "lbt-x2 would be lrs once more"
    assert by_batch[128] == pytest.approx(2 * [1, 4, 2])
    plain, sqrt, linear = (find_row(report, method, 128) for method in ("lbt", "sqrt", "lrs"))
    assert plain.top1 is plain.loss is None and plain.metrics["acc"].mean == pytest.approx(0.705)
    assert (plain.gap, sqrt.gap, linear.gap) == pytest.approx((0.2, 0.1, 0.0))
    assert (sqrt.recovered, linear.recovered) == pytest.approx((0.5, 1.0))
    assert plain.metrics["best_loss"].mean == pytest.approx(0.9 - 0.705) and plain.seeds == 2
    shown = list(show_compare.render_comparison(report))
    assert any("acc lost relative to lbt at batch 32" in str(line) for line in shown)
    assert list(report.frame()["acc_mean"]) == pytest.approx([result.metrics["acc"].mean for result in report.rows])


def test_a_metric_of_a_script_whose_least_is_best_is_lost_upwards(tmp_path: Path) -> None:
    spec = script_job(metric={"loss": METRIC["loss"]})
    report = compare_scripts(tmp_path, ImmediateScripts(), spec, methods=("lbt",), seeds=1)
    assert report.less_is_better and find_row(report, "lbt", 128).gap == pytest.approx(0.2)


def test_a_metric_that_no_training_told_is_said_to_be_missing(tmp_path: Path) -> None:
    report = compare_scripts(
        tmp_path, ImmediateScripts(told=False), script_job(), methods=("lbt",), seeds=1, controls=False
    )
    assert messages.metric_not_found(training="lbt, batch 64, seed 0", metric="acc") in report.warnings
    assert (report.complete, find_row(report, "lbt", 64).gap, find_row(report, "lbt", 64).seeds) == (True, None, 0)


def test_a_script_whose_last_value_is_no_number_has_diverged(tmp_path: Path) -> None:
    spec = script_job()
    report = compare_scripts(tmp_path, ImmediateScripts(), spec, methods=("lbt",), seeds=1, controls=False)
    run = RunDir(next((tmp_path / "tula-runs").glob("own-*")))
    cell = next(outcome.cells[0].cell for outcome in report.rows if outcome.batch == 128)
    kept = run.get_training(cell.signature).read_summary()
    run.write_summary(kept.model_copy(update={"metrics": {"best_acc": 0.8, "best_loss": 0.1}}))
    comparison = services_compare.plan_comparison(
        Run(run.path, spec), Grid(("lbt",), (64, 128), 1, 1, controls=False), inspect=inspect, now=1.0
    ).comparison
    result = find_row(accuracy.build_compare_report(Run(run.path, spec), comparison), "lbt", 128)
    assert (result.cells[0].state, result.gap) == ("diverged", None)
    (message,) = accuracy.build_compare_report(Run(run.path, spec), comparison).warnings
    assert (message.code, message.values["state"]) == ("job-ended", "diverged")


def test_a_script_without_a_metric_is_not_compared(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no script\.metric") as error:
        compare_scripts(tmp_path, ImmediateScripts(), script_job(metric={}))
    assert "script.metric: {top1:" in error.value.hint


@pytest.mark.parametrize(
    ("command", "asks_for_seed"), [(COMMAND, False), (COMMAND.replace(" --seed {seed}", ""), True)]
)
def test_more_seeds_are_advised_only_to_a_script_that_takes_them(
    command: str, asks_for_seed: bool, tmp_path: Path
) -> None:
    report = compare_scripts(
        tmp_path, ImmediateScripts(), script_job(command), methods=("lbt", "lrs"), seeds=1, controls=False
    )
    assert "tula compare --seeds 5" in report.answer
    assert ("add {seed} to script.command, then train more seeds" in report.answer) == asks_for_seed


def test_seeds_of_a_script_have_to_reach_it(tmp_path: Path) -> None:
    without = script_job(COMMAND.replace(" --seed {seed}", ""))
    with pytest.raises(SpecError, match=r"script.command has no \{seed\}, so the trainings with 2 seeds"):
        compare_scripts(tmp_path, ImmediateScripts(), without, seeds=2)
    run = RunDir(tmp_path / "x")
    grid = session.complete_grid(ComparisonRequest(batches=(64,)), Run(run.path, without), None)
    assert (
        grid.seeds == 1
        and session.complete_grid(ComparisonRequest(batches=(64,)), Run(run.path, script_job()), None).seeds == 3
    )
    (message,) = services_compare.plan_comparison(Run(run.path, without), grid, inspect=inspect, now=1.0).warnings
    assert message.code == "one-seed-only"


@pytest.mark.parametrize("of_script", [True, False])
@pytest.mark.parametrize(
    ("batches", "below"),
    [
        ((8,), (8,)),
        ((16,), (16,)),
        ((32,), (32,)),
        ((64,), ()),
        ((8, 64), (8,)),
        ((8, 32, 64), (8, 32)),
        ((64, 128), ()),
    ],
)
def test_batches_that_are_not_above_the_reference_are_named(
    of_script: bool, batches: tuple[int, ...], below: tuple[int, ...], tmp_path: Path
) -> None:
    spec = script_job() if of_script else make.spec(train={"epochs": 2, "reference_batch": 32})
    assert spec.train.reference_batch == 32
    run = RunDir.create(tmp_path, spec)
    warnings = services_compare.plan_comparison(
        Run(run.path, spec), Grid(("lbt", "lrs"), batches, 1, 1), inspect=inspect, now=1.0
    ).warnings
    named = [warning.values for warning in warnings if warning.code == "batch-not-above-reference"]
    assert [values["batch"] for values in named] == list(below)
    assert all((values["key"] == "script.reference.batch") == of_script for values in named)


def test_methods_of_a_script_are_those_that_run_on_it() -> None:
    assert services_compare.list_default_rows(script_job(), nodes=2).methods == ("lbt", "lrs", "sqrt", "ags")
    assert services_compare.list_default_rows(script_job(), nodes=1).methods == ("lbt", "lrs", "sqrt"), (
        "one GPU has no other"
    )
    own_scaling = script_job(COMMAND.replace(" --lr {lr}", ""), lr=None)
    assert services_compare.list_default_rows(own_scaling, nodes=2).methods == ("lbt", "ags")
    grid = session.complete_grid(ComparisonRequest(batches=(64,)), Run(Path("x"), own_scaling), None)
    assert not grid.controls, "there is no learning rate to raise"
    warnings = services_compare.plan_comparison(Run(Path("x"), own_scaling), grid, inspect=inspect, now=1.0).warnings
    assert [list(w.values["controls"]) for w in warnings if w.code == "controls-left-out"] == [["lbt-x2", "lbt-x4"]]
    with pytest.raises(SpecError) as error:
        grid = dataclasses.replace(grid, methods=("lbt", "lrs", "lars", "lbt-x2"), seeds=1)
        services_compare.plan_comparison(Run(Path("x"), own_scaling), grid, inspect=inspect, now=1.0)
    problems = {problem.path: problem.message for problem in error.value.problems}
    assert set(problems) == {"lrs", "lars", "lbt-x2"}
    assert "neither {lr} nor {lr_factor}" in problems["lrs"] and "no {lr} that could be increased" in problems["lbt-x2"]


def test_a_script_that_scales_gradients_gives_the_plain_rows_none_of_it() -> None:
    content = script_job().model_dump(mode="json", exclude_unset=True)
    spec = make.validate_job(
        {**content, "train": {"method": "ags"}, "ags": {"preset": "robust", "delta": 0.2}}, source="test"
    )
    assert services_compare.make_job_of_cell(spec, "ags", 0).ags.delta == 0.2
    assert services_compare.make_job_of_cell(spec, "lrs", 0).train.method == "lrs", (
        "which section ags would be refused with"
    )
    assert "ags" in services_compare.list_default_rows(spec, nodes=1).methods, "the job says that its loop helps"


@pytest.mark.parametrize(
    ("train", "rows"),
    [
        ({}, ("lbt", "lrs")),
        ({"method": "lrs", "lr_scaling": "sqrt"}, ("lbt", "lrs")),
        ({"method": "lrs"}, ("lbt", "lrs", "sqrt")),
        ({"method": "lbt"}, ("lbt", "lrs", "sqrt")),
    ],
)
def test_no_two_default_rows_of_a_script_train_alike(train: dict[str, str], rows: tuple[str, ...]) -> None:
    content = script_job().model_dump(mode="json", exclude_unset=True)
    spec = make.validate_job({**content, "train": train}, source="test")
    assert services_compare.list_default_rows(spec, nodes=1).methods == rows


# --- what recommend tells of it


def compared_at(run: RunDir, *, seeds: int = 2) -> None:
    grid = dataclasses.replace(GRID, seeds=seeds)
    run.write_comparison(make_plan(run, grid).comparison)
    run_comparison(run, ImmediateTraining(), grid)


@pytest.mark.parametrize(
    ("method", "batch", "outcome", "gap", "of"),
    [
        ("lrs", 200, "may lose", 5.0, 256),
        ("lbt", 256, "may lose", 10.0, 256),
    ],
)
def test_whether_a_batch_keeps_the_accuracy_is_reported_by_the_trainings_of_the_job(
    run: RunDir, method: str, batch: int, outcome: str, gap: float, of: int
) -> None:
    compared_at(run, seeds=1)
    spec = make.spec(**{**SPEC, "train": {**SPEC["train"], "method": method}})
    accuracy_evidence = accuracy.find_accuracy_evidence(Run(run.path, spec), batch=batch)
    assert accuracy_evidence is not None
    assert (
        accuracy_evidence.outcome,
        accuracy_evidence.gap,
        accuracy_evidence.batch,
        accuracy_evidence.reference_batch,
        accuracy_evidence.seeds,
    ) == (outcome, gap, of, 32, 1)
    words = accuracy_evidence.words
    assert (
        accuracy_evidence.error is None
        and f": {method} at batch {of} was {format_number(gap)} points worse in top1" in words
        and "±" not in words
    )


@pytest.mark.parametrize("batch", [64, 128])
def test_one_seed_without_a_loss_is_no_evidence_and_several_within_their_noise_are(
    run: RunDir, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared_at(run, seeds=1)
    of_job = Run(run.path, make.spec(**{**SPEC, "train": {**SPEC["train"], "method": "ags"}}))
    assert accuracy.find_accuracy_evidence(of_job, batch=batch) is None
    monkeypatch.setattr(accuracy, "compute_standard_error", lambda *_: 0.1)
    evidence = accuracy.find_accuracy_evidence(of_job, batch=batch)
    assert evidence is not None and (evidence.outcome, evidence.gap, evidence.batch) == ("keeps", 0.0, 128)


def test_a_gap_within_a_point_keeps_the_accuracy_only_where_its_interval_says_so(run: RunDir) -> None:
    compared_at(run)
    spec = make.spec(**{**SPEC, "train": {**SPEC["train"], "method": "ags"}})
    accuracy_evidence = accuracy.find_accuracy_evidence(Run(run.path, spec), batch=256)
    assert accuracy_evidence is not None and accuracy_evidence.seeds == 2 and accuracy_evidence.gap == 0
    assert accuracy_evidence.error == pytest.approx(math.sqrt(2)) and accuracy_evidence.outcome == "may lose", (
        "two seeds 2 points apart tell little"
    )
    assert "was equal in top1 to batch 32 (0 ± 1.41 points)" in accuracy_evidence.words


def test_of_a_loss_a_fiftieth_of_the_small_batchs_may_be_lost(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOP1, "lrs", 89.83)
    monkeypatch.setitem(TOP1, "ags", 89.81)
    run.write_comparison(make_plan(run, GRID).comparison)
    run_comparison(run, ImmediateTraining(classes=False), GRID)
    monkeypatch.setattr(accuracy, "compute_standard_error", lambda *_: 0.0)

    def judge(method: str) -> tuple[str, float]:
        spec = make.spec(**{**SPEC, "train": {**SPEC["train"], "method": method}})
        evidence = accuracy.find_accuracy_evidence(Run(run.path, spec), batch=256)
        assert evidence is not None and evidence.metric == "loss"
        return evidence.outcome, evidence.gap

    # the reference's mean loss is 0.9
    assert judge("lrs") == ("keeps", pytest.approx(0.017)) and judge("ags") == ("may lose", pytest.approx(0.019))


def test_of_what_was_not_compared_nothing_is_said(run: RunDir) -> None:
    assert accuracy.find_accuracy_evidence(Run(run.path, run.read_spec()), batch=128) is None
    compared_at(run)
    assert accuracy.find_accuracy_evidence(Run(run.path, run.read_spec()), batch=512) is None
    static = make.spec(**{**SPEC, "train": {**SPEC["train"], "method": "static"}})
    assert accuracy.find_accuracy_evidence(Run(run.path, static), batch=128) is None
