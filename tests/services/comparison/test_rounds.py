"""A comparison in rounds: who is trained for how long, who is dropped and why, and where an interrupted one resumes."""

import dataclasses
import itertools
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import make_runs as make
import pytest
from isolation import isolate_environment, poll_quickly
from make_results import make_inspection

from tula_cli.errors import JobFailed
from tula_cli.options import ComparisonRequest
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.job_runs import open_run
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.results import Comparison
from tula_cli.run.records.tasks import TrainTask
from tula_cli.services import compare as services_compare
from tula_cli.services import status as services_status
from tula_cli.services.compare import Grid
from tula_cli.services.comparison import accuracy, rounds, session, trainings
from tula_cli.services.events import Note, run_work
from tula_cli.services.plans import ComparePlan
from tula_cli.services.waiting import Submission
from tula_cli.show import compare as show_compare
from tula_cli.show import live
from tula_cli.spec.job import JobSpec

SPEC = {
    **make.SPEC,
    "train": {"epochs": 16, "reference_batch": 32, "seed": 5, "method": "ramp"},
    "search": {"nodes": [1], "max_node_hours": 1},
}
METHODS = ("lbt", "ramp", "ags", "lrs", "ortho")
SCORES = {"lbt": 60.0, "ramp": 90.0, "ags": 80.0, "lrs": 89.0, "ortho": 70.0, "lbt-x2": 65.0, "lbt-x4": 20.0}
"""Top-1 in full, and what a seed adds is -1, 0, 1. In short trainings all are 20 points lower."""


def inspect(spec: JobSpec) -> Inspection:
    return make_inspection()


class Trains(make.FakeLauncher):
    """Trains each job at once; `broken` are (method, short) that fail, `diverging` those without a finite loss."""

    def __init__(
        self,
        scores: Mapping[str, float] = SCORES,
        short: Mapping[str, float] | None = None,
        *,
        spread: float = 1.0,
        broken: tuple[tuple[str, bool], ...] = (),
        diverging: tuple[tuple[str, bool], ...] = (),
        loss: bool = False,
    ) -> None:
        super().__init__()
        self.scores, self.short, self.spread, self.loss = scores, short or {}, spread, loss
        self.broken, self.diverging = broken, diverging
        self.tasks: list[TrainTask] = []

    def submit(self, run: RunDir, task: TrainTask) -> Any:
        job = super().submit(run, task).model_copy(update={"submitted_at": time.time()})
        self.tasks.append(task)
        self.says[task.job] = "ended"
        kind, now = (self.method(task), self.is_short(task)), time.time()
        if kind in self.broken:
            run.write_attempt(make.attempt(task.id, start=now, end=now, outcome="user", message="KeyError: 'x'"))
        elif kind in self.diverging:
            run.write_attempt(
                make.attempt(task.id, start=now, end=now, outcome="diverged", message="Diverged: the loss")
            )
        else:
            self._train(run, task, *kind)
        return job

    @staticmethod
    def method(task: TrainTask) -> str:
        factor = task.spec.optimizer.lr / make.SPEC["optimizer"]["lr"]
        return task.spec.train.method if factor == 1 else f"lbt-x{factor:.0f}"

    @staticmethod
    def is_short(task: TrainTask) -> bool:
        return task.spec.train.epochs < 16

    def _train(self, run: RunDir, task: TrainTask, method: str, short: bool) -> None:
        top1 = 95.0 if task.batch == 32 else self.scores[method]
        top1 = self.short.get(method, top1 - 20) if short else top1 + self.spread * (task.spec.train.seed - 6)
        metrics = {"eval_loss": 10 - top1 / 10} if self.loss else {"top1": top1, "top5": 99.0, "eval_loss": 1.0}
        run.write_train_result(
            make.train_result(task.signature).model_copy(update={"metrics": metrics, "samples": 8000})
        )
        hours = 32 / task.batch * (0.25 if short else 1)
        run.write_summary(
            make.summary(
                signature=task.signature, start_batch=task.batch, batch=task.batch, metrics=metrics, actual_hours=hours,
                best_top1=0.0,
            )
        )  # fmt: skip

    @property
    def trained(self) -> dict[str, list[str]]:
        """The trainings at the large batch by row: s for a short one, the seed for a full one, in their order."""
        rows: dict[str, list[str]] = {}
        for task in (task for task in self.tasks if task.batch != 32):
            rows.setdefault(self.method(task), []).append("s" if self.is_short(task) else str(task.spec.train.seed))
        return rows


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate_environment(monkeypatch, tmp_path)
    poll_quickly(monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "tula-runs", make.spec(**SPEC))


def grid(
    methods: tuple[str, ...] = METHODS, *, batches: tuple[int, ...] = (512,), seeds: int = 3, controls: Any = False
) -> Grid:
    return Grid(methods, batches, seeds, nodes=1, controls=controls, halving=True)


def plan(run: RunDir, requested: Grid | None = None, spec: JobSpec | None = None) -> ComparePlan:
    return services_compare.plan_comparison(
        Run(run.path, spec or run.read_spec()), requested or grid(), inspect=inspect, now=1.0
    )


def trained(
    run: RunDir, launcher: Trains, requested: Grid | None = None, *, most: int | None = None
) -> accuracy.CompareReport:
    """Train a comparison, or its first `most` trainings, and return the table."""
    planned = plan(run, requested)
    steps = trainings.train_cells_one_by_one(open_run(run), planned, launcher, inspect=inspect)
    ended = (step for step in steps if step.ended is not None)
    list(itertools.islice(ended, most))
    return table(run, planned.comparison)


def table(run: RunDir, comparison: Comparison) -> accuracy.CompareReport:
    now = services_status.read_run_status(run, make.FakeLauncher(), now=time.time())
    return accuracy.build_compare_report(Run(run.path, run.read_spec()), comparison, jobs=now.jobs)


FULL = ["5", "6", "7"]


# --- who is trained for how long


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # All rows but lbt in a short training; the best two and lbt in full.
        ({}, {"lbt": FULL, "ramp": ["s", *FULL], "lrs": ["s", *FULL], "ags": ["s"], "ortho": ["s"]}),
        # The job's own row is in full, though two are better.
        (
            {"scores": {**SCORES, "ramp": 62.0, "ags": 90.0}},
            {"lbt": FULL, "ramp": ["s", *FULL], "ags": ["s", *FULL], "lrs": ["s", *FULL], "ortho": ["s"]},
        ),
        # What diverges in a short training has no place.
        (
            {"diverging": (("lrs", True),)},
            {"lbt": FULL, "ramp": ["s", *FULL], "ags": ["s", *FULL], "lrs": ["s"], "ortho": ["s"]},
        ),
        (
            {"diverging": (("lrs", False),)},
            {"lbt": FULL, "ramp": ["s", *FULL], "ags": ["s"], "lrs": ["s", *FULL], "ortho": ["s"]},
        ),
        # The job's own row diverges: it is trained in full all the same, and two others are.
        (
            {"diverging": (("ramp", True), ("ramp", False))},
            {"lbt": FULL, "ramp": ["s", *FULL], "ags": ["s", *FULL], "lrs": ["s", *FULL], "ortho": ["s"]},
        ),
        # The loss counts where there are no classes.
        ({"loss": True, "spread": 1.0}, {"lbt": FULL, "ramp": ["s", *FULL], "lrs": ["s", *FULL], "ags": ["s"], "ortho": ["s"]}),
        # A failed short training ends nothing; the next call tries it again.
        (
            {"broken": (("lrs", True),)},
            {"lbt": FULL, "ramp": ["s", *FULL], "ags": ["s", *FULL], "lrs": ["s"], "ortho": ["s"]},
        ),
    ],
)  # fmt: skip
def test_who_is_trained_for_how_long(run: RunDir, changes: dict[str, Any], expected: dict[str, list[str]]) -> None:
    launcher = Trains(**changes)
    trained(run, launcher)
    assert {method: sorted(kinds, key="s567".index) for method, kinds in launcher.trained.items()} == expected
    small = [task for task in launcher.tasks if task.batch == 32]
    assert [task.spec.train.seed for task in small] == [5, 6, 7] and not any(map(launcher.is_short, small))


def test_short_trainings_come_first_then_a_seed_of_every_row(run: RunDir) -> None:
    launcher = Trains()
    trained(run, launcher)
    order = [("s" if launcher.is_short(task) else str(task.spec.train.seed)) for task in launcher.tasks]
    assert order == [*"ssss", *"5555", *"6666", *"7777"]
    assert all(task.spec.train.epochs in (4, 16) for task in launcher.tasks)


@pytest.mark.parametrize(
    ("asked", "epochs"),
    [
        (grid(("lbt", "ramp", "ags")), 16),  # two rows beside lbt: both are in full anyway
        (grid(("lbt",)), 16),
        (grid(), 1),  # one epoch has no quarter
        (grid(seeds=1), 2),  # four halves of a training cost more than one less saves
        (grid(("lbt", "ramp"), controls=True), 16),  # with the job's row and both controls, all may be in full
        (Grid(METHODS, (512,), 3, nodes=1), 16),  # a caller that wants no rounds
    ],
)  # fmt: skip
def test_what_saves_nothing_runs_in_full_at_once(run: RunDir, asked: Grid, epochs: int) -> None:
    spec = make.spec(**{**SPEC, "train": {**SPEC["train"], "epochs": epochs}})
    planned = plan(run, asked, spec)
    assert not any(cell.short for cell in planned.comparison.cells) and not planned.state.undecided
    assert len(planned.missing) == len(planned.comparison.cells)


def test_each_batch_has_rounds_of_its_own(run: RunDir) -> None:
    planned = plan(run, grid(batches=(128, 512)))
    assert sorted((cell.batch, cell.method) for cell in planned.comparison.cells if cell.short) == [
        (batch, method) for batch in (128, 512) for method in ("ags", "lrs", "ortho", "ramp")
    ]
    launcher = Trains()
    report = trained(run, launcher, grid(batches=(128, 512)))
    assert report.complete and {row.batch for row in report.first_round} == {128, 512}


def test_seven_rows_and_three_seeds_cost_the_epochs_of_thirteen_trainings_not_of_twenty_one(run: RunDir) -> None:
    requested = grid(("lbt", "ramp", "ags", "lrs"), controls=True)
    launcher = Trains()
    trained(run, launcher, requested)
    assert sum(task.spec.train.epochs for task in launcher.tasks) / 16 <= 13.25
    assert sum(not cell.short for cell in plan(run, requested).comparison.cells) == 21


def test_one_seed_has_two_rounds(run: RunDir) -> None:
    launcher = Trains(short={"ags": 69.5})
    report = trained(run, launcher, grid(seeds=1))
    assert launcher.trained == {"ramp": ["s", "5"], "ags": ["s", "5"], "lrs": ["s"], "ortho": ["s"], "lbt": ["5"]}
    assert (
        report.complete
        and not any(row.dropped for row in report.rows)
        and "cannot be distinguished with one seed" in report.answer
    )


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({"method": "ramp"}, "ramp"),
        ({"method": "ags"}, "ags"),
        ({"method": "lrs", "ramp": [{"epochs": 1, "batch": 64}]}, 'lrs:train.ramp=[{"epochs": 1.0, "batch": 64}]'),
        ({"method": "lbt"}, "lbt"),
        ({"method": "lbt", "lr_scaling": "linear"}, 'lbt:train.lr_scaling="linear"'),
    ],
)
def test_by_default_the_jobs_own_row_is_in_full(tmp_path: Path, train: dict[str, Any], expected: str) -> None:
    spec = make.spec(**{**SPEC, "train": {**SPEC["train"], **train}})
    run = RunDir.create(tmp_path / "tula-runs", spec)
    requested = session.complete_grid(ComparisonRequest(batches=(512,)), Run(run.path, spec), None)
    planned = plan(run, requested, spec)
    full = {cell.method for cell in planned.missing if cell.batch == 512 and not cell.short}
    job_row = planned.comparison.job_row
    assert requested.halving and job_row in full and "lbt" in full
    assert job_row.partition("=")[0] == expected.partition("=")[0]


# --- the plan and the progress


def test_the_plan_says_how_many_trainings_and_node_hours_it_takes_at_most(run: RunDir) -> None:
    planned = plan(run)
    assert (len(planned.missing), len(planned.state.undecided)) == (4 + 3 * 3, 2 * 3)
    text = "\n".join(str(line) for line in show_compare.render_compare_plan(planned))
    assert "at most 19 trainings to do, 0 of 19 done" in text
    assert (
        "Round 1 trains all rows except lbt for 4 of 16 epochs." in text
        and "at most as much as 16.0 full trainings, instead of 18 without rounds." in text
    )
    launcher = Trains()
    trained(run, launcher, most=4)
    after = plan(run)
    assert after.hours_left is not None and after.hours_left == pytest.approx(12 * 32 / 512)
    assert len(launcher.tasks) + len(after.missing) + len(after.state.undecided) <= 19


def test_the_plan_has_the_hours_of_each_training(run: RunDir) -> None:
    planned = dataclasses.replace(plan(run), hours={("ags", 512): 2.0, ("lbt", 512): 6.0})
    made = next(iter(show_compare.render_compare_plan(planned)))
    (*_, expected) = made.columns
    rows = zip((cell.method for cell in planned.state.wanted), expected.cells, strict=True)
    assert {(method, hours) for method, hours in rows if method in ("ags", "lbt", "lrs")} == {
        ("ags", "0.500"), ("lbt", "-"), ("lbt", "6.00"), ("lrs", "-"),
    }  # fmt: skip


def test_the_trainings_that_are_done_never_exceed_what_was_planned(run: RunDir) -> None:
    for scores in (SCORES, {**SCORES, "ramp": 1.0}, {**SCORES, "ags": 90.1, "lrs": 90.2, "ramp": 90.0}):
        place = RunDir.create(run.path.parent / str(scores["ramp"]), make.spec(**SPEC))
        planned, launcher = plan(place), Trains(scores)
        trained(place, launcher)
        assert len(launcher.tasks) <= len(planned.missing) + len(planned.state.undecided)


def test_progress_says_which_row_and_which_round(run: RunDir) -> None:
    steps = list(trainings.train_cells_one_by_one(open_run(run), plan(run), Trains(), inspect=inspect))
    messages = [
        live.describe_comparison_progress(step) for step in steps if step.cell is not None or step.ended is not None
    ]
    assert messages[0].startswith("round 1 of 2: 0 of at most 19 trainings done")
    assert any("now: ramp, batch 512, seed 5, 4 of 16 epochs" in text for text in messages)
    assert any(text.startswith("round 2 of 2: ") and "now: lrs, batch 512, seed 5" in text for text in messages)
    assert messages[-1] == "round 2 of 2: 16 of 16 trainings done"


# --- resuming


def test_an_interrupted_comparison_resumes_wherever_it_was_and_trains_nothing_twice(tmp_path: Path) -> None:
    whole = RunDir.create(tmp_path / "whole", make.spec(**SPEC))
    expected, everything = trained(whole, Trains()), Trains()
    trained(RunDir.create(tmp_path / "all", make.spec(**SPEC)), everything)
    for most in range(
        0, 17, 3
    ):  # 16 trainings in all: interrupted before the first, in each round, and in the last training
        run = RunDir.create(tmp_path / f"cut-{most}", make.spec(**SPEC))
        first, second = Trains(), Trains()
        trained(run, first, most=most)
        report = trained(run, second)
        names = [task.signature for task in (*first.tasks, *second.tasks)]
        assert len(set(names)) == len(names) == 16 and set(names) == {task.signature for task in everything.tasks}
        assert [(row.method, row.top1, row.dropped) for row in report.rows] == [
            (row.method, row.top1, row.dropped) for row in expected.rows
        ]
    assert not plan(whole).missing and not plan(whole).state.undecided


@pytest.mark.parametrize(
    ("metrics", "loss"),
    [
        ({"top1": 70.0, "eval_loss": 1.0}, -70.0),
        ({"eval_loss": 1.5}, 1.5),
        ({"top1": 70.0}, None),
        ({}, None),
    ],
)
def test_a_training_without_a_finite_loss_has_no_place(
    run: RunDir, metrics: dict[str, float], loss: float | None
) -> None:
    cell = plan(run).comparison.cells[0]
    assert rounds.read_outcome(run, cell, run.read_spec()) is None
    run.write_summary(make.summary(signature=cell.signature, metrics=metrics))
    outcome = rounds.read_outcome(run, cell, run.read_spec())
    assert outcome is not None and (outcome.loss, outcome.diverged) == (loss, loss is None)


def test_a_row_that_failed_is_tried_again_and_may_still_be_one_of_the_best(run: RunDir) -> None:
    broken = Trains(broken=(("lrs", True),))
    report = trained(run, broken)
    failed = [w.values["job"] for w in report.warnings if w.code == "job-ended"]
    assert not report.complete and "lrs, batch 512, seed 5, 4 of 16 epochs" in failed
    again = Trains()
    report = trained(run, again)
    assert again.trained == {"lrs": ["s", *FULL]} and report.complete
    partial = next(row for row in report.rows if row.method == "ags")
    assert partial.seeds == 3 and not partial.dropped, "it was one of the best two without the row that failed"


def test_a_job_that_never_works_ends_after_three_trainings(run: RunDir) -> None:
    with pytest.raises(JobFailed, match="first 3 trainings have all failed"):
        trained(run, Trains(broken=tuple((method, True) for method in SCORES)))


def test_a_comparison_that_was_trained_in_full_before_stays_as_it_is(run: RunDir) -> None:
    trained(run, Trains(), Grid(METHODS, (512,), 3, nodes=1, controls=False))
    planned = plan(run)
    assert (
        not planned.missing and not planned.state.undecided and not any(cell.short for cell in planned.comparison.cells)
    )
    launcher = Trains()
    assert len(trained(run, launcher, grid(seeds=4)).rows) == 6 and set(launcher.trained) == set(METHODS)


def test_a_dropped_row_that_is_trained_in_full_by_itself_is_a_row_like_the_others(run: RunDir) -> None:
    trained(run, Trains())
    trained(run, Trains(), grid(("lbt", "ortho")))
    launcher = Trains()
    report = trained(run, launcher)
    result = next(row for row in report.rows if row.method == "ortho")
    assert launcher.tasks == [] and (result.seeds, result.dropped) == (3, "")


def test_a_seed_more_is_for_the_rows_that_are_left(run: RunDir) -> None:
    trained(run, Trains())
    launcher = Trains()
    trained(run, launcher, grid(seeds=4))
    assert launcher.trained == {"lbt": ["8"], "ramp": ["8"], "lrs": ["8"]}


# --- the table


def test_dropped_rows_are_shown_apart_with_their_epochs_and_the_reason(run: RunDir) -> None:
    report = trained(run, Trains())
    assert [row.method for row in report.rows] == ["lbt", "lbt", "ramp", "lrs"] and report.epochs == (4, 16)
    reasons = {row.method: row.dropped for row in report.first_round}
    assert reasons == {
        "ramp": "", "lrs": "",
        "ags": "dropped in round 1: place 3 of 4, top1 is 10.0 worse than that of ramp",
        "ortho": "dropped in round 1: place 4 of 4, top1 is 20.0 worse than that of ramp",
    }  # fmt: skip
    assert next(row for row in report.first_round if row.method == "ags").top1 == accuracy.SeedStatistics(60.0, None, 1)
    assert (report.finished, report.total, report.undecided) == (16, 16, 0)
    shown = [str(line) for line in show_compare.render_comparison(report)]
    assert "round 1: 4 of 16 epochs, one seed; do not compare these values with full trainings" in shown
    assert report.answer in shown and "noise of the seeds: ramp has top1 90.00 ± 1.0" in report.answer


def test_rows_of_one_accuracy_are_ranked_by_their_loss(run: RunDir) -> None:
    class ByLoss(Trains):
        def _train(self, run: RunDir, task: TrainTask, method: str, short: bool) -> None:
            super()._train(run, task, method, short)
            if short:
                summary = run.get_training(task.signature).read_summary()
                assert summary is not None
                loss = {"ags": 1.1, "lrs": 1.4, "ortho": 1.2, "ramp": 1.3}[method]
                run.write_summary(summary.model_copy(update={"metrics": {"top1": 10.0, "eval_loss": loss}}))

    launcher = ByLoss(spread=20.0)
    report = trained(run, launcher)
    assert [method for method, kinds in launcher.trained.items() if kinds == ["s"]] == ["lrs"]
    dropped = next(row.dropped for row in report.first_round if row.method == "lrs")
    assert dropped == "dropped in round 1: place 4 of 4, top1 equals that of ags, but the loss is higher"


@pytest.mark.parametrize(
    ("values", "differs"),
    [
        (((78.97, 5.71), (24.93, 2.56)), True),  # two seeds each, twelve deviations apart
        (((78.97, 5.71), (60.0, 2.56)), False),
        (((90.0, 0.0), (80.0, 0.0)), True),
        (((90.0, 0.0), (90.0, 0.0)), False),
        (((90.0, 1.2), (80.0, 0.0)), False),  # one degree of freedom: 12.7 standard errors of 0.85
        (((90.0, 0.5), (80.0, 0.0)), True),
        (((90.0, None), (10.0, None)), False),
    ],
)
def test_rows_differ_beyond_the_noise_of_two_seeds(values: Any, differs: bool) -> None:
    rows = [
        accuracy.ComparisonRow(
            "m", 512, False, (), accuracy.SeedStatistics(mean, sd, 1 if sd is None else 2), None, None
        )
        for mean, sd in values
    ]
    assert (
        accuracy.differs_beyond_noise(*rows, "top1")
        is accuracy.differs_beyond_noise(*reversed(rows), "top1")
        is differs
    )


def test_differences_within_noise_are_said_not_to_be_distinguishable(run: RunDir) -> None:
    report = trained(run, Trains({**SCORES, "lbt": 90.0, "lrs": 89.5}))
    assert (
        "noise of the seeds: lbt has top1" in report.answer
        and "ramp has 90.00 ± 1.0, lrs has 89.50 ± 1.0" in report.answer
    )


# --- what a short training is


LONG = {"epochs": 40}


@pytest.mark.parametrize(
    ("changes", "path", "expected"),
    [
        ({}, "train.epochs", 10),
        ({"schedule": {"kind": "multistep", "milestones": [20, 30]}}, "schedule.milestones", [5.0, 7.5]),
        ({"schedule": {"kind": "cosine", "warmup_epochs": 4}}, "schedule.warmup_epochs", 1.0),
        ({"schedule": {"kind": "linear", "decay_from": 0.7}}, "schedule.decay_from", 0.7),
        ({"train": {"early_stopping": {"epochs": 20}}}, "train.early_stopping.epochs", 5),
        ({"train": {"early_stopping": {"patience": 6}}}, "train.early_stopping.patience", 2),
        ({"train": {"ramp": [{"epochs": 8, "batch": 64}, {"epochs": 4, "batch": 128}]}}, "train.ramp", [(2.0, 64), (1.0, 128)]),
        ({"train": {"ramp": "auto"}}, "train.ramp", "auto"),
        ({"train": {"method": "auto"}, "auto": {"branch_epochs": 4.0}}, "auto.branch_epochs", 1.0),
        ({"train": {"seed": 8}}, "train.seed", 8),
    ],
)  # fmt: skip
def test_a_short_training_has_a_schedule_of_its_length(changes: dict[str, Any], path: str, expected: Any) -> None:
    base = {**SPEC, "train": {**SPEC["train"], **LONG}}
    spec = make.spec(**{**base, **{name: {**base.get(name, {}), **part} for name, part in changes.items()}})
    value: Any = rounds.shorten_job_to_epochs(spec, rounds.compute_short_epochs(spec))
    for name in path.split("."):
        value = getattr(value, name)
    if path == "train.ramp" and isinstance(value, list):
        value = [(stage.epochs, stage.batch) for stage in value]
    assert value == expected


def test_a_row_whose_settings_do_not_fit_a_quarter_is_trained_in_full(run: RunDir) -> None:
    spec = make.spec(**{**SPEC, "train": {**SPEC["train"], "epochs": 4}})
    planned = plan(run, grid((*METHODS, "auto")), spec)  # auto needs an epoch before its arms part, and one after
    assert {cell.method for cell in planned.comparison.cells if cell.short} == {"ramp", "ags", "lrs", "ortho"}
    assert {cell.seed for cell in planned.missing if cell.method == "auto"} == {5, 6, 7}


@pytest.mark.parametrize(
    ("command", "length", "short"),
    [
        ("t.py --batch {batch} --lr {lr} --seed {seed} --epochs {epochs}", {"epochs": 8}, 2),
        ("t.py --batch {batch} --lr {lr} --seed {seed} --steps {steps}", {"epochs": 8}, 2),
        ("t.py --batch {batch} --lr {lr} --seed {seed}", {"epochs": 8}, 8),
        ("t.py --batch {batch} --lr {lr} --seed {seed} --steps {steps}", {"steps": 800}, 1),
    ],
)
def test_a_script_is_shortened_if_its_command_takes_the_length(
    command: str, length: dict[str, int], short: int
) -> None:
    Path("t.py").touch()
    script = {
        "command": command, "length": length, "dataset_size": 4096, "reference": {"batch": 32, "lr": 0.1}, "metric": {"acc": "(.*)"},
    }  # fmt: skip
    spec = make.validate_job(
        {"name": "own", "script": script, "train": {"method": "lbt"}, "search": {"nodes": [1], "max_node_hours": 1}},
        source="test",
    )
    assert rounds.compute_short_epochs(spec) == short
    if short < spec.train.epochs:
        made = rounds.shorten_job_to_epochs(spec, short)
        assert made.script is not None and made.script.length.epochs == made.train.epochs == short


class TrainsScripts(Trains):
    """Trains a script whose error is the first metric: the higher the learning rate, the less."""

    @staticmethod
    def method(task: TrainTask) -> str:
        lr = task.spec.script.reference.lr if task.spec.script is not None else None
        return {0.1: task.spec.train.lr_scaling + task.spec.train.method, 0.2: "lbt-x2", 0.4: "lbt-x4"}[lr or 0.0]

    def _train(self, run: RunDir, task: TrainTask, method: str, short: bool) -> None:
        error = {"autolbt": 0.9, "autolrs": 0.2, "sqrtlrs": 0.4, "lbt-x2": 0.6, "lbt-x4": 0.3}[method]
        metrics = {"err": error + 0.01 * task.spec.train.seed, "best_err": error}
        run.write_train_result(make.train_result(task.signature).model_copy(update={"metrics": metrics}))
        run.write_summary(
            make.summary(
                signature=task.signature, start_batch=task.batch, batch=task.batch, metrics=metrics, best_top1=0.0
            )
        )


def test_a_script_is_compared_in_rounds_by_its_own_metric(tmp_path: Path) -> None:
    Path("t.py").touch()
    script = {
        "command": "t.py --batch {batch} --lr {lr} --seed {seed} --epochs {epochs}", "length": {"epochs": 8}, "dataset_size": 4096,
        "reference": {"batch": 32, "lr": 0.1}, "metric": {"err": "err (.*)"},
    }  # fmt: skip
    spec = make.validate_job(
        {"name": "own", "script": script, "train": {"method": "lbt"}, "search": {"nodes": [1], "max_node_hours": 1}},
        source="test",
    )
    run, launcher = RunDir.create(tmp_path / "tula-runs", spec), TrainsScripts()
    requested = session.complete_grid(
        ComparisonRequest(methods=("lbt", "lrs", "sqrt"), batches=(512,), seeds=2), Run(run.path, spec), None
    )
    planned = plan(run, requested, spec)
    list(trainings.train_cells_one_by_one(run, planned, launcher, inspect=inspect))
    report = accuracy.build_compare_report(Run(run.path, spec), planned.comparison)
    assert {row.method: row.dropped for row in report.first_round} == {
        "lrs": "", "sqrt": "", "lbt-x2": "dropped in round 1: place 3 of 3, err is 0.400 worse than that of lrs",
    }, "lbt-x4 is sqrt once more"  # fmt: skip
    assert (
        report.complete
        and report.epochs == (2, 8)
        and [row.method for row in report.rows] == ["lbt", "lbt", "lrs", "sqrt"]
    )


# --- by a scheduler


def submission(launcher: Trains, *, wait: bool) -> Submission:
    return Submission(lambda spec, **_: launcher, inspect, lambda _: True, wait)


@pytest.mark.parametrize("wait", [True, False])
def test_a_scheduler_gets_a_round_at_a_time(tmp_path: Path, wait: bool) -> None:
    spec = make.spec(**{**SPEC, "cluster": {**SPEC.get("cluster", {}), "kind": "slurm"}})
    run, launcher, notes = RunDir.create(tmp_path / "tula-runs", spec), Trains(), list[str]()
    for call in range(1 if wait else 6):
        part = Run(run.path, spec)
        prepared = session.PreparedComparison(part, plan(run, grid(), spec))
        before = len(launcher.tasks)
        result = run_work(
            session.run_comparison(prepared, submission(launcher, wait=wait)),
            lambda event: notes.append(event.text) if isinstance(event, Note) else None,
        )
        if call == 0 and not wait:
            assert [launcher.is_short(task) for task in launcher.tasks].count(True) == 4
            assert "when these trainings have finished, run the same command again to start the next round" in notes
        if len(launcher.tasks) == before:
            break
    assert result.report.complete and sorted(launcher.trained) == ["ags", "lbt", "lrs", "ortho", "ramp"]
    assert len(launcher.tasks) == 16 == len({task.signature for task in launcher.tasks})
    json.dumps(result.report.finished)
