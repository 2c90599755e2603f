"""Run the trainings of a comparison: one after another on this machine, in parallel on a cluster."""

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from tula_cli.cluster.inspection import Inspect
from tula_cli.cluster.launcher import Launcher
from tula_cli.errors import Diverged, JobFailed, TulaError
from tula_cli.run.code import list_code_changes
from tula_cli.run.directory import Run
from tula_cli.run.records.results import Cell
from tula_cli.services import status, train, waiting
from tula_cli.services.compare import (
    UNFINISHED_END_STATES,
    cache_first_inspection,
    compute_mean_hours_by_row,
    estimate_hours,
    has_cell_ended,
    plan_cell,
)
from tula_cli.services.comparison import rounds
from tula_cli.services.events import ComparisonProgress
from tula_cli.services.plans import ComparePlan, sum_hours
from tula_cli.services.status import RunStatus
from tula_cli.services.training_end import MAX_FIRST_FAILURES, load_summary
from tula_cli.words import describe_files

START_SECONDS = 15.0
"""Seconds after which a training that is not running yet is reported as waiting."""


def submit_cell(run: Run, cell: Cell, launcher: Launcher, *, inspect: Inspect) -> str:
    """Submit the training of a cell, or find its running job, and return the job's id.

    Raises:
        TulaError: the user's code has changed since the comparison was planned.
    """
    planned = plan_cell(run, cell, inspect)
    if planned.task.signature != cell.signature:
        raise TulaError(
            "the code of the job has changed since the comparison was started"
            + describe_files(list_code_changes(run, run.spec, Path.cwd())),
            "run the same command again to compare with the current code",
        )
    return train.submit_training(run, planned, launcher)


def submit_cells(run: Run, plan: ComparePlan, launcher: Launcher, *, inspect: Inspect) -> list[str]:
    """Submit all missing trainings, most useful first, and return the job ids; the scheduler runs them in parallel."""
    inspect = cache_first_inspection(inspect)
    return [submit_cell(run, cell, launcher, inspect=inspect) for cell in plan.missing]


def train_cells_one_by_one(
    run: Run,
    plan: ComparePlan,
    launcher: Launcher,
    *,
    inspect: Inspect,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[ComparisonProgress]:
    """Run the missing trainings one after another, as on this machine; a failed training does not stop the others.

    Raises:
        JobFailed: the first trainings have all failed.
    """
    inspect = cache_first_inspection(inspect)
    missing, failed, attempted = list(plan.missing), 0, set[str]()
    ended_before = len(plan.state.wanted) - len(missing)
    while missing:
        hours = _reestimate_hours(run, plan)
        expected = sum_hours(missing[:1], hours)
        cell = missing.pop(0)
        attempted.add(cell.signature)
        other_hours = sum_hours((*missing, *plan.state.undecided), hours)
        job, submitted = submit_cell(run, cell, launcher, inspect=inspect), clock()
        finished = ended_before + len(attempted) - 1 - failed
        describe = _make_progress_factory(plan)
        for run_status in waiting.watch_jobs(run, launcher, [job]):
            reasons = [job_status.reason for job_status in run_status.jobs if job_status.state == "queued"]
            waits = reasons[0] if reasons and clock() - submitted > START_SECONDS else ""
            remaining = _estimate_remaining_seconds(run_status, job, expected, other_hours)
            yield describe(finished, failed, cell, run_status.training, remaining, running=1, waits=waits)
        problem = _describe_failure(run, cell)
        failed += bool(problem)
        if failed == MAX_FIRST_FAILURES and failed == len(attempted) + ended_before:
            raise JobFailed(
                f"the first {failed} trainings have all failed: {problem}", "read their output with tula logs"
            )
        if plan.comparison.has_rounds:
            plan = update_comparison_plan(run, plan, attempted)
            missing = list(plan.missing)
            other_hours = sum_hours((*missing, *plan.state.undecided), _reestimate_hours(run, plan))
        yield _make_progress_factory(plan)(
            finished + (not problem),
            failed,
            None,
            None,
            None if other_hours is None else 3600 * other_hours,
            ended=cell,
            problem=problem,
        )
        if run.is_cancelled(job):  # the user cancelled: do not start the next training
            return


def update_comparison_plan(run: Run, plan: ComparePlan, attempted: Collection[str]) -> ComparePlan:
    """Return the plan updated with the trainings that have ended since, without those that this call has tried."""
    unfinished = [cell for cell in plan.comparison.cells if not has_cell_ended(run, cell)]
    failed = {cell.signature for cell in unfinished} & set(attempted)
    comparison_state = rounds.compute_comparison_state(
        run, plan.comparison, plan.spec, failed=failed, hours=_reestimate_hours(run, plan)
    )
    missing = tuple(cell for cell in comparison_state.wanted if cell in unfinished and cell.signature not in attempted)
    return dataclasses.replace(plan, state=comparison_state, missing=missing)


def _make_progress_factory(plan: ComparePlan) -> Callable[..., ComparisonProgress]:
    """Return a constructor of `ComparisonProgress` with the total and the current round of a plan."""
    number = (1 if any(cell.short for cell in plan.missing) else 2) if plan.comparison.has_rounds else None
    undecided = len(plan.state.undecided)
    return functools.partial(ComparisonProgress, plan.state.max_trainings, round=number, undecided=undecided)


def _reestimate_hours(run: Run, plan: ComparePlan) -> dict[tuple[str, int], float | None]:
    """Return the expected hours of each row, based on the trainings finished since the plan was made."""
    measured_hours = compute_mean_hours_by_row(run, plan.comparison)
    if not measured_hours:
        return dict(plan.hours)
    return {row: estimate_hours(row, measured_hours, {}) for row in plan.hours}


def _estimate_remaining_seconds(
    run_status: RunStatus, job: str, expected: float | None, other_hours: float | None
) -> float | None:
    """Return the total remaining seconds: those of the current training, and the expected ones of all others."""
    training_seconds = (
        run_status.training.eta if run_status.training is not None and run_status.training.job == job else None
    )
    elapsed = next((job_status.elapsed or 0.0 for job_status in run_status.jobs if job_status.id == job), 0.0)
    if training_seconds is None and expected is not None:
        training_seconds = max(0.0, 3600 * expected - elapsed)
    return None if training_seconds is None or other_hours is None else training_seconds + 3600 * other_hours


def _describe_failure(run: Run, cell: Cell) -> str:
    """Return the reason why a training failed; empty if it did not fail, or diverged."""
    try:
        load_summary(run, cell.signature)
    except Diverged:
        return ""
    except TulaError as error:
        return error.message
    return ""


def wait_for_cells(
    run: Run, plan: ComparePlan, launcher: Launcher, jobs: Sequence[str]
) -> Iterator[ComparisonProgress]:
    """Watch jobs that a scheduler runs in parallel until all have ended."""
    cells = {f"train-{cell.signature}": cell for cell in plan.comparison.cells}
    ended_jobs, describe = set[str](), _make_progress_factory(plan)
    for run_status in waiting.watch_jobs(run, launcher, jobs):
        states = {job.id: job for job in run_status.jobs if job.id in cells}
        # A training that looks lost at first may only be delayed; the final table decides.
        unfinished = (*status.ACTIVE_STATES, "lost")
        newly_ended = [
            job for job in jobs if job in states and states[job].state not in unfinished and job not in ended_jobs
        ]
        running = sum(job.state == "running" for job in states.values())
        finished = sum(has_cell_ended(run, cell) for cell in plan.state.wanted)
        failed = sum(job.state in UNFINISHED_END_STATES for job in states.values())
        for job in newly_ended:
            ended_jobs.add(job)
            cell = cells[job]
            yield describe(
                finished, failed, None, None, None, running, ended=cell, problem=_describe_failure(run, cell)
            )
        yield describe(finished, failed, None, None, None, running)
