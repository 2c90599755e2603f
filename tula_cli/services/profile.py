"""`tula profile`: submit the missing probes in rounds over all node types, and wait for them."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tula_cli.cluster.inspection import Inspect, NotInspectable
from tula_cli.cluster.launcher import Launcher, list_unfinished_jobs, lock_submission, submit_missing_tasks
from tula_cli.cluster.slurm import first_job
from tula_cli.errors import BadMeasurements, Infeasible, JobFailed, OutOfMemoryAtMinimum, TulaError, UnreadableFile
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.format import require_current_format
from tula_cli.run.records.inspections import Inspection
from tula_cli.services import messages
from tula_cli.services.events import Note, ProfilePlanned, WarningEvent, Work
from tula_cli.services.job_warnings import warn_large_reference_batch
from tula_cli.services.largest_batch import LargestBatch, make_largest_batch, plan_largest_batch_search
from tula_cli.services.plans import ProfilePlan, UpperBoundPlan
from tula_cli.services.profile_plan import count_measured_node_hours, plan_probes, plan_upper_bound
from tula_cli.services.profile_report import ProfileReport, is_plan_measured, make_profile_report
from tula_cli.services.site_charges import add_site_billing_to_run, warn_balance_for_probes
from tula_cli.services.waiting import (
    DetachedJobs,
    Submission,
    explain_interruption,
    require_within_cap,
    wait_for_jobs,
    warn_about_submitted_jobs,
)
from tula_cli.words import describe_node_type

MAX_EXIT_SECONDS = 60.0
"""How long to wait for a job to exit that has all its results."""


def submit_probes(run: RunDir, plan: ProfilePlan, launcher: Launcher) -> None:
    """Submit the jobs of a plan, one after another; jobs that are already waiting or running are left alone."""
    with lock_submission(run):
        submit_missing_tasks(run, launcher, plan.tasks, plan.code)


def wait_for_job_exits(
    run: RunDir, launcher: Launcher, plan: ProfilePlan, *, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Wait until the jobs of a plan that have all results of the previous round have exited.

    The jobs of a round have the same ids as those of the round before, so a job that is still exiting would be taken for
    the job of the new round.
    """
    pause, remaining = plan.tasks[0].spec.cluster.backend.poll[0], MAX_EXIT_SECONDS
    while remaining > 0 and any(
        run.is_finished(task)
        for id_ in list_unfinished_jobs(run, launcher, plan.job_ids)
        for task in run.read_snapshot().list_tasks_of_job(id_)
    ):
        sleep(pause)
        remaining -= pause


Plans = Sequence[tuple[Run, ProfilePlan]]


@dataclass(frozen=True)
class ProfileResult:
    """The measurements of each variant (node type); the key is None for a job without variants."""

    reports: Mapping[str | None, ProfileReport | LargestBatch]
    partial: bool  # a probe failed or has no result, or a type has none at all


@dataclass(frozen=True)
class SubmittedProbes(DetachedJobs):
    """Submitted probes that are not waited for, and the plans that they belong to."""

    plans: Mapping[str | None, ProfilePlan]


@dataclass(frozen=True)
class DryRun:
    """The plan for one node type, and its job scripts as text."""

    plan: ProfilePlan | UpperBoundPlan
    scripts: tuple[str, ...]


Inspections = Mapping[str | None, Inspection]
"""Inspections of the model and the dataset, by the name of a variant."""


def plan_probes_of_runs(
    runs: Sequence[Run], inspections: Inspections, *, repeat_failed: bool = True, largest: bool = False
) -> Work[list[tuple[Run, ProfilePlan]]]:
    """Return the planned probes of each run; a run without a feasible configuration is left out with a warning.

    Args:
        largest: whether to search for the largest batch that fits, one trial after another.

    Raises:
        Infeasible: no run has a feasible configuration.
    """
    planned: list[tuple[Run, ProfilePlan]] = []
    errors = []
    has_rounds = any(run.spec.search.strategy in ("auto", "adaptive") for run in runs)
    measured_node_hours = {run.type: count_measured_node_hours(run) if has_rounds else 0.0 for run in runs}
    for run in runs:
        node_hours_of_other_types = (
            sum(measured_node_hours.values())
            - measured_node_hours[run.type]
            + sum(plan.node_hours_at_most for _, plan in planned)
        )
        inspection = inspections[run.type]
        yield from map(WarningEvent, inspection.warnings)
        if run is runs[0]:
            yield from map(WarningEvent, warn_large_reference_batch(run.spec, inspection.dataset_size))
        try:
            plan = (
                plan_largest_batch_search(run, inspection)
                if largest
                else plan_probes(
                    run, inspection, node_hours_of_other_types=node_hours_of_other_types, repeat_failed=repeat_failed
                )
            )
            planned.append((run, plan))
        except Infeasible as error:
            errors.append((run.type, error))
    if not planned:
        raise errors[0][1]
    for name, infeasible in errors:
        if name is not None:
            yield WarningEvent(messages.part_left_out(part=describe_node_type(name), reason=infeasible.message))
    yield from (WarningEvent(warning) for _, plan in planned for warning in plan.code.warnings)
    return planned


def _inspect_runs(
    runs: Sequence[Run], inspect: Inspect
) -> tuple[dict[str | None, Inspection], dict[str | None, NotInspectable]]:
    """Return the stored or new inspections by node type, and the errors of those that only a node can inspect."""
    inspections: dict[str | None, Inspection] = {}
    failures: dict[str | None, NotInspectable] = {}
    for run in runs:
        answer = first_job.inspect_job_if_possible(run.spec, first_job.reuse_stored_inspection(inspect, run))
        if isinstance(answer, NotInspectable):
            failures[run.type] = answer
        else:
            inspections[run.type] = answer
    return inspections, failures


def make_dry_run(
    runs: Sequence[Run], submission: Submission, *, largest: bool = False
) -> Work[dict[str | None, DryRun]]:
    """Return the jobs that would be submitted on each node type; nothing is written.

    Raises:
        Infeasible: no configuration is feasible.
    """
    variants = yield from _prepare_runs(runs)
    inspections, failures = _inspect_runs(variants, submission.inspect)
    if failures:
        return {
            variant.type: DryRun(
                plan_upper_bound(variant.spec, why=failures.get(variant.type)),
                (first_job.render_inspection_script(variant, variant.spec),) if variant.type in failures else (),
            )
            for variant in variants
        }
    dry_runs = {}
    for variant, plan in (yield from plan_probes_of_runs(variants, inspections, largest=largest)):
        launcher = submission.launcher_for(variant.spec)
        dry_runs[variant.type] = DryRun(plan, tuple(launcher.render_script(variant, task) for task in plan.tasks))
    return dry_runs


def _prepare_runs(runs: Sequence[Run]) -> Work[list[Run]]:
    """Return the runs to measure, with the billing of their site, after checking that jobs may be submitted in them.

    Raises:
        OtherFormat: a run has an older format.
        UnreadableFile: a result may be intact, but cannot be read: it is not measured again.
    """
    for run in runs:
        require_current_format(run.path)
        snapshot = run.read_snapshot()
        for error in snapshot.damaged_results:
            if isinstance(error, UnreadableFile):
                raise error
        yield from map(WarningEvent, (*snapshot.job_warnings, *snapshot.record_warnings))
    return [add_site_billing_to_run(run) for run in runs]


def run_profile(
    runs: Sequence[Run],
    submission: Submission,
    *,
    largest: bool = False,
) -> Work[ProfileResult | SubmittedProbes]:
    """Measure the missing probes, round after round; jobs that are already running are attached to.

    Args:
        largest: search for the largest batch that fits, on the fewest nodes, instead of the probes of the search.

    Raises:
        OtherFormat: the run has an older format.
        Infeasible: no configuration is feasible.
        OverBudget: the search exceeds search.max_node_hours, or was not confirmed.
        Pending: the timeout has passed.
        Interruption: Ctrl-C; the jobs continue to run.
        JobFailed, OutOfMemoryAtMinimum, BadMeasurements: nothing was measured.
        SchedulerError: the scheduler refused a job.
    """
    runs = yield from _prepare_runs(runs)
    return (yield from _ProfilingSession(runs, submission, largest).run_rounds())


@dataclass
class _SubmittedRun:
    """The jobs that measure one variant of a job."""

    run: Run
    plan: ProfilePlan
    launcher: Launcher

    def __post_init__(self) -> None:
        self.under_way = list_unfinished_jobs(self.run, self.launcher, self.plan.job_ids)

    @property
    def may_continue(self) -> bool:
        """Whether the results may lead to a further round."""
        return self.plan.in_rounds and is_plan_measured(self.run, self.plan)


@dataclass
class _ProfilingSession:
    """The state of one call of `run_profile`."""

    runs: Sequence[Run]
    submission: Submission
    largest: bool
    confirmed: bool = False
    is_started: bool = False  # the plan of the search was shown, and its first round submitted
    first_jobs: float = 0.0  # node-hours that building the model and the dataset on nodes has taken

    @property
    def cap(self) -> float | None:
        """Maximum node-hours of all runs together."""
        return self.runs[0].spec.search.max_node_hours

    def _inspect_variants(self, deadline: float | None) -> Work[Inspections]:
        """Inspect the model and the dataset: here or, if that is not possible, on a node after confirmation."""
        inspections, failures = _inspect_runs(self.runs, self.submission.inspect)
        if not failures:
            return inspections
        runs_to_inspect = [run for run in self.runs if run.type in failures]
        for run in runs_to_inspect:
            self.submission.launcher_for(run.spec)  # raises an error if no job can be submitted from this machine
        plans = {run.type: plan_upper_bound(run.spec, why=failures.get(run.type)) for run in self.runs}
        planned_event = ProfilePlanned(plans, self.cap)
        yield planned_event
        require_within_cap([], self.cap, first_jobs=sum(plan.first_job_node_hours for plan in plans.values()))
        self.submission.require_confirmed(planned_event)
        self.confirmed = True
        self.submission.save_runs(runs_to_inspect)
        for run in runs_to_inspect:
            inspections[run.type] = first_job.inspect_job_on_node(
                run, run.spec, timeout=self._compute_remaining_seconds(deadline)
            )
            self.first_jobs += first_job.count_newest_node_hours(run)
        return inspections

    def _compute_remaining_seconds(self, deadline: float | None) -> float | None:
        return None if deadline is None else max(0.0, deadline - self.submission.clock())

    def run_rounds(self) -> Work[ProfileResult | SubmittedProbes]:
        """Submit the missing probes and wait for them, until no variant leads to a further round."""
        timeout, clock = self.submission.timeout, self.submission.clock
        deadline = None if timeout is None else clock() + timeout
        inspections = yield from self._inspect_variants(deadline)
        stopped: set[str | None] = set()  # node types whose last round ended with results missing
        # repeat probes that failed before this call; those that fail now are left to the next call
        measures_failed_again = True
        while True:
            planned = yield from plan_probes_of_runs(
                self.runs, inspections, repeat_failed=measures_failed_again, largest=self.largest
            )
            missing = [(run, plan) for run, plan in planned if plan.missing_count and run.type not in stopped]
            if not missing:
                self.submission.save_runs([run for run, _ in planned])
                if not any(
                    plan.certainty for _, plan in planned
                ):  # for a search in rounds, the report states why it is finished
                    yield Note("all probes already have results")
                break
            jobs = yield from self._submit_round(planned, missing)
            if not all(self.submission.should_wait(submitted.run.spec) for submitted in jobs):
                return (yield from _list_submitted_probes(planned, jobs))
            yield from self._wait_for_round(jobs, deadline)
            measures_failed_again = False
            unfinished = {submitted.run.type for submitted in jobs if submitted.may_continue}
            stopped |= {submitted.run.type for submitted in jobs} - unfinished
            if not unfinished:
                break
        return (yield from self._collect_reports(planned, inspections))

    def _collect_reports(self, planned: Plans, inspections: Inspections) -> Work[ProfileResult]:
        """Return the measurements; a variant without any is a warning if another can be trained.

        Raises:
            TulaError: no variant that can be trained was measured.
        """
        reports: dict[str | None, ProfileReport | LargestBatch] = {}
        errors: list[TulaError] = []
        for run, plan in planned:
            try:
                reports[run.type] = (
                    make_largest_batch(run, inspections[run.type], plan)
                    if self.largest
                    else make_profile_report(run, plan)
                )
            except (BadMeasurements, JobFailed, OutOfMemoryAtMinimum) as error:
                errors.append(error)
                if run.type is not None:
                    yield WarningEvent(messages.part_failed(part=describe_node_type(run.type), reason=error.message))
        if not reports:
            raise errors[0]
        return ProfileResult(reports, bool(errors) or any(not report.finished for report in reports.values()))

    def _submit_round(self, planned: Plans, missing: Plans) -> Work[list[_SubmittedRun]]:
        """Submit a round, after confirmation if there are jobs to submit."""
        for run, plan in missing:
            wait_for_job_exits(run, self.submission.launcher_for(run.spec), plan)
        jobs = [_SubmittedRun(run, plan, self.submission.launcher_for(run.spec)) for run, plan in missing]
        if any(len(submitted.under_way) < len(submitted.plan.job_ids) for submitted in jobs):
            for run, plan in missing:
                yield from map(WarningEvent, warn_balance_for_probes(run.spec, plan.node_hours_at_most))
            planned_event = ProfilePlanned({run.type: plan for run, plan in planned}, self.cap, self.is_started)
            yield planned_event
            hours = [plan.node_hours_at_most for _, plan in planned]
            require_within_cap(hours, self.cap, first_jobs=self.first_jobs)
            if not self.confirmed:  # later rounds are covered by the first confirmation
                self.submission.require_confirmed(planned_event)
            self.confirmed = self.is_started = True
        self.submission.save_runs([run for run, _ in planned])
        with explain_interruption([run for run, _ in missing]):
            for submitted in jobs:
                submit_probes(submitted.run, submitted.plan, submitted.launcher)
        return jobs

    def _wait_for_round(self, jobs: Sequence[_SubmittedRun], deadline: float | None) -> Work[None]:
        """Wait until `deadline` for the jobs of one variant after another; all of them have been submitted."""
        with explain_interruption([submitted.run for submitted in jobs]):
            for submitted in jobs:
                if submitted.run.type is not None:
                    yield Note(f"{describe_node_type(submitted.run.type)}:")
                yield from wait_for_jobs(
                    submitted.run,
                    submitted.launcher,
                    submitted.plan.job_ids,
                    timeout=self._compute_remaining_seconds(deadline),
                )


def _list_submitted_probes(planned: Plans, jobs: Sequence[_SubmittedRun]) -> Work[SubmittedProbes]:
    for submitted in jobs:
        yield from warn_about_submitted_jobs(
            submitted.run, submitted.launcher, submitted.plan.job_ids, submitted.under_way
        )
    started = [job for submitted in jobs for job in submitted.run.prefix_job_names(submitted.plan.job_ids)]
    unfinished = [job for submitted in jobs for job in submitted.run.prefix_job_names(submitted.under_way)]
    return SubmittedProbes(tuple(started), tuple(unfinished), {run.type: plan for run, plan in planned})
