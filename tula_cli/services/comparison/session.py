"""`tula compare` from the request to the table: the grid, its plan, the trainings, and the report."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tula_cli import words
from tula_cli.cluster.inspection import Inspect
from tula_cli.cluster.launcher import Launcher
from tula_cli.errors import BadMeasurements, Interruption, JobFailed
from tula_cli.options import ComparisonRequest, require_list
from tula_cli.run.directory import Run
from tula_cli.run.format import require_current_format
from tula_cli.run.records.results import Comparison
from tula_cli.services import compare, status
from tula_cli.services.compare import Grid
from tula_cli.services.comparison import accuracy, rows, trainings
from tula_cli.services.comparison.accuracy import CompareReport
from tula_cli.services.events import ComparePlanned, Note, WarningEvent, Work
from tula_cli.services.plans import ComparePlan
from tula_cli.services.tracking import export_while_waiting
from tula_cli.services.train import choose_run_to_train
from tula_cli.services.waiting import Submission, warn_about_submitted_jobs


def complete_grid(request: ComparisonRequest, run: Run, previous: Comparison | None) -> Grid:
    """Return the grid of a request, with the values that it leaves open.

    Raises:
        BadMeasurements: no batch is given, known or recommended.
        SpecError: methods or batches are no list, a method is unknown, or a number is below 1.
    """
    spec = run.spec
    require_list(methods=request.methods, batches=request.batches)
    nodes = (
        request.nodes
        if request.nodes is not None
        else previous.nodes
        if previous
        else compare.choose_default_nodes(run)
    )
    batches = tuple(dict.fromkeys(request.batches or ())) or (
        previous.batches if previous else (compare.read_recommended_batch(run),)
    )
    by_default = True if request.methods else compare.choose_default_control(spec, batches)
    controls = request.controls if request.controls is not None else previous.controls if previous else by_default
    seeds = (
        request.seeds if request.seeds is not None else previous.seeds if previous else rows.choose_default_seeds(spec)
    )
    return Grid(
        methods=tuple(dict.fromkeys(request.methods or ()))
        or (previous.methods if previous else compare.list_default_rows(spec, nodes=nodes).methods),
        batches=batches,
        seeds=seeds,
        nodes=nodes,
        controls=controls if "lr" in spec.workload.settings else False,
        halving=True,
    )


@dataclass(frozen=True)
class PreparedComparison:
    """A comparison before anything is submitted: the run of the hardware to train on, and the plan."""

    run: Run
    plan: ComparePlan


@dataclass(frozen=True)
class ComparisonResult:
    """The table, and whether some of its jobs are still active."""

    report: CompareReport
    active: bool

    def require_none_failed(self) -> None:
        """Raise JobFailed if trainings have failed and no job is active any more."""
        report = self.report
        failed = sum(row.count_trainings(*compare.UNFINISHED_END_STATES) for row in (*report.rows, *report.first_round))
        if failed and not report.complete and not self.active:
            raise JobFailed(
                f"{failed} of {words.format_count(report.total, 'training')} failed",
                "read the output of the trainings with tula logs; run the same command to start the trainings again",
            )


def prepare_comparison(
    runs: Sequence[Run], request: ComparisonRequest, inspect: Inspect, *, node_type: str | None
) -> Work[PreparedComparison]:
    """Plan a comparison; nothing is written.

    Args:
        node_type: the node type; None for the recommended one.

    Raises:
        OtherFormat: the run has an older format.
        BadMeasurements: no batch or node type is given, known or recommended.
        SpecError: a batch cannot be trained, or methods are not compatible with the job.
    """
    run = choose_run_to_train(runs, node_type)
    require_current_format(run.path)
    if run.type is not None:
        yield Note(f"node type {run.type}")
    previous = run.read_comparison()
    grid = complete_grid(request, run, previous)
    if request.methods is None and previous is None:
        yield Note(compare.list_default_rows(run.spec, nodes=grid.nodes).description)
    plan = compare.plan_comparison(run, grid, inspect=inspect, now=time.time())
    for text in plan.warnings:
        yield WarningEvent(text)
    return PreparedComparison(run, plan)


def load_comparison(runs: Sequence[Run], *, node_type: str | None) -> tuple[Run, Comparison]:
    """Return the stored comparison of a job, and its run.

    Raises:
        BadMeasurements: there is no comparison.
    """
    run = choose_run_to_train(runs, node_type)
    comparison = run.read_comparison()
    if comparison is None:
        raise BadMeasurements(
            f"nothing has been compared in {run.id} yet",
            "run tula compare, for example tula compare job.yaml --batch 512,1024",
        )
    return run, comparison


def read_comparison_result(run: Run, comparison: Comparison, launcher: Launcher) -> ComparisonResult:
    run_status = status.read_run_status(run, launcher, now=time.time())
    return ComparisonResult(
        accuracy.build_compare_report(run, comparison, jobs=run_status.jobs), run_status.has_active_jobs()
    )


def run_comparison(prepared: PreparedComparison, submission: Submission) -> Work[ComparisonResult]:
    """Run the missing trainings, or attach to those already running, and return the table.

    Raises:
        OverBudget: the comparison was not confirmed.
        SpecError: --no-wait on this machine, where trainings run one after another.
        Interruption: Ctrl-C; running jobs continue.
        SchedulerError: the scheduler refused a training.
        JobFailed: the first trainings have all failed.
    """
    plan, run = prepared.plan, prepared.run
    launcher = submission.launcher_for(run.spec)
    if plan.missing:
        submission.require_waiting(run.spec)
        planned = ComparePlanned(plan)
        yield planned
        submission.require_confirmed(planned)
    else:
        yield Note("all trainings of this comparison have already finished")
    submission.save_runs([run])
    run.write_comparison(plan.comparison)
    if plan.missing:
        yield from _run_missing_trainings(run, plan, launcher, submission)
    return read_comparison_result(run, plan.comparison, launcher)


def _run_missing_trainings(run: Run, plan: ComparePlan, launcher: Launcher, submission: Submission) -> Work[None]:
    """Run the missing trainings: one after another on this machine, in parallel on a cluster."""
    try:
        if submission.starts_one_by_one(run.spec):
            one_by_one = trainings.train_cells_one_by_one(run, plan, launcher, inspect=submission.inspect)
            yield from export_while_waiting(run, None, one_by_one)
            return
        failed_signatures: set[str] = set()
        while plan.missing:
            yield Note(f"submitting {words.format_count(len(plan.missing), 'training')}")
            jobs = trainings.submit_cells(run, plan, launcher, inspect=submission.inspect)
            yield from warn_about_submitted_jobs(run, launcher, jobs, [])
            yield Note(f"{words.format_count(len(jobs), 'training')} under way")
            if not submission.should_wait(run.spec):
                if plan.state.undecided:
                    yield Note("when these trainings have finished, run the same command again to start the next round")
                return
            waiting = trainings.wait_for_cells(run, plan, launcher, jobs)
            yield from export_while_waiting(run, None, waiting)
            failed_signatures |= {cell.signature for cell in plan.missing}
            plan = trainings.update_comparison_plan(run, plan, failed_signatures)
    except KeyboardInterrupt:
        hint = f"run the same command to follow them; tula cancel {words.quote_path(run.path)} stops them"
        message = "interrupted; finished trainings are kept, and running ones continue"
        raise Interruption(message, hint) from None
