"""`tula profile` from its plans to its report: rounds over all node types, confirmation, and waiting."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tula_cli.cluster.inspection import NotInspectable
from tula_cli.cluster.launcher import Launcher, list_unfinished_jobs
from tula_cli.cluster.slurm import first_job
from tula_cli.errors import BadMeasurements, Infeasible, JobFailed, OutOfMemoryAtMinimum, TulaError
from tula_cli.run.directory import Run
from tula_cli.run.format import require_current_format
from tula_cli.run.job_runs import save_runs
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.results import JobFile
from tula_cli.services import largest_batch, messages, profile
from tula_cli.services.events import Note, ProfilePlanned, WarningEvent, Work
from tula_cli.services.largest_batch import LargestBatch
from tula_cli.services.profile import ProfilePlan, ProfileReport, UpperBoundPlan, plan_upper_bound
from tula_cli.services.site_charges import bill_run_by_site, warn_balance_for_probes
from tula_cli.services.waiting import (
    Dependencies,
    DetachedJobs,
    WaitPolicy,
    make_interruption_of_jobs,
    require_confirmed,
    require_within_cap,
    wait_for_jobs,
    warn_new_jobs,
)
from tula_cli.words import describe_part

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
    """The job scripts for one node type, as text."""

    plan: ProfilePlan | UpperBoundPlan
    scripts: tuple[str, ...]


Inspections = Mapping[str | None, Inspection]
"""Inspections of the model and the dataset, by the name of a variant."""


def plan_variants(
    runs: Sequence[Run], inspections: Inspections, *, again: bool = True, largest: bool = False
) -> Work[list[tuple[Run, ProfilePlan]]]:
    """Return the probes to measure for each variant; yield a warning for one that has none, if another can be trained.

    Args:
        runs: the run of each variant, which need not exist yet.
        inspections: inspection of each variant.
        again: whether failed probes are measured again.
        largest: whether to search for the largest batch; each trial follows from the one before.

    Raises:
        Infeasible: no variant that can be trained has a feasible configuration.
    """
    planned: list[tuple[Run, ProfilePlan]] = []
    errors = []
    rounds = any(run.spec.search.strategy in ("auto", "adaptive") for run in runs)
    spent = {run.name: profile.count_measured_node_hours(run) if rounds else 0.0 for run in runs}
    for run in runs:
        elsewhere = sum(spent.values()) - spent[run.name] + sum(plan.node_hours_at_most for _, plan in planned)
        inspection = inspections[run.name]
        for text in inspection.warnings:
            yield WarningEvent(messages.inspection_warning(text=text))
        try:
            plan = (
                largest_batch.plan_search(run, inspection)
                if largest
                else profile.plan_probes(run, inspection, elsewhere=elsewhere, again=again)
            )
            planned.append((run, plan))
        except Infeasible as error:
            errors.append((run.name, error))
    if not planned:
        raise errors[0][1]
    for name, infeasible in errors:
        if name is not None:
            yield WarningEvent(messages.part_left_out(part=describe_part(name), reason=infeasible.message))
    yield from (WarningEvent(warning) for _, plan in planned for warning in plan.code.warnings)
    return planned


def inspect_variant(run: Run, dependencies: Dependencies) -> Inspection | NotInspectable:
    """Return a stored or new inspection of a variant, or the error; as of `inspect_if_possible`."""
    return first_job.inspect_if_possible(run.spec, first_job.inspect_with_stored(dependencies.inspect, run))


def _plan_first_jobs(
    runs: Sequence[Run], inspections: Mapping[str | None, Inspection | NotInspectable]
) -> dict[str | None, UpperBoundPlan]:
    """Return the plan of each variant of a job of which some model and dataset must first be inspected on a node."""
    failures = {name: inspection for name, inspection in inspections.items() if isinstance(inspection, NotInspectable)}
    return {run.name: plan_upper_bound(run.spec, why=failures.get(run.name)) for run in runs}


def make_dry_run(
    runs: Sequence[Run], dependencies: Dependencies, *, largest: bool = False
) -> Work[dict[str | None, DryRun]]:
    """Return the jobs that would be submitted on each node type; nothing is written.

    Args:
        runs, dependencies, largest: as of `run_profile`.

    Raises:
        Infeasible: no configuration is feasible.
    """
    variants = _prepare_runs(runs)
    inspections = {variant.name: inspect_variant(variant, dependencies) for variant in variants}
    settled = {
        name: inspection for name, inspection in inspections.items() if not isinstance(inspection, NotInspectable)
    }
    if len(settled) < len(inspections):
        planned = _plan_first_jobs(variants, inspections)
        scripts = {
            variant.name: ()
            if variant.name in settled
            else (first_job.render_inspection_script(variant, variant.spec),)
            for variant in variants
        }
        return {name: DryRun(plan, scripts[name]) for name, plan in planned.items()}
    dry_runs = {}
    for variant, plan in (yield from plan_variants(variants, settled, largest=largest)):
        launcher = dependencies.launcher_for(variant.spec)
        dry_runs[variant.name] = DryRun(plan, tuple(launcher.script(variant, task) for task in plan.tasks))
    return dry_runs


def _prepare_runs(runs: Sequence[Run]) -> list[Run]:
    """Return the runs to measure, with the billing of their site, after checking that jobs may be submitted in them."""
    for run in runs:
        require_current_format(run.path)
    return [bill_run_by_site(run) for run in runs]


def run_profile(
    runs: Sequence[Run],
    dependencies: Dependencies,
    wait_policy: WaitPolicy,
    *,
    file: JobFile | None = None,
    largest: bool = False,
) -> Work[ProfileResult | SubmittedProbes]:
    """Measure the missing probes, round after round; jobs that are already running are attached to.

    Args:
        runs: the runs of a job, which need not exist yet.
        dependencies: launcher, inspection, and the confirmation that is requested before jobs are submitted.
        wait_policy: whether and how long to wait.
        file: the file that the spec comes from.
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
    runs = _prepare_runs(runs)
    return (yield from _Profiling(runs, dependencies, wait_policy, file, largest).work())


@dataclass
class _SubmittedRun:
    """The jobs that measure one variant of a job."""

    run: Run
    plan: ProfilePlan
    launcher: Launcher
    started: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.under_way = list_unfinished_jobs(self.run, self.launcher, list(self.plan.jobs))

    @property
    def has_missing(self) -> bool:
        """Whether some of the jobs are still to be submitted."""
        return len(self.under_way) < len(self.plan.jobs)

    @property
    def may_go_on(self) -> bool:
        """Whether the results may lead to a further round."""
        return self.plan.in_rounds and profile.is_measured(self.run, self.plan)


@dataclass
class _Profiling:
    """The state of one call of `run_profile`."""

    runs: Sequence[Run]
    dependencies: Dependencies
    wait_policy: WaitPolicy
    file: JobFile | None
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
        results = {run.name: inspect_variant(run, self.dependencies) for run in self.runs}
        inspections = {
            name: inspection for name, inspection in results.items() if not isinstance(inspection, NotInspectable)
        }
        elsewhere = [run for run in self.runs if run.name not in inspections]
        if not elsewhere:
            return inspections
        for run in elsewhere:
            self.dependencies.launcher_for(run.spec)  # says so where nothing can be submitted from here
        plans = _plan_first_jobs(self.runs, results)
        planned_event = ProfilePlanned(plans, self.cap)
        yield planned_event
        require_within_cap([], self.cap, first_jobs=sum(plan.first_job_node_hours for plan in plans.values()))
        require_confirmed(self.dependencies.confirm, planned_event)
        self.confirmed = True
        save_runs(elsewhere, self.file)
        for run in elsewhere:
            inspections[run.name] = first_job.inspect_on_node(run, run.spec, timeout=self._remaining_seconds(deadline))
            self.first_jobs += first_job.count_newest_node_hours(run)
        return inspections

    def _remaining_seconds(self, deadline: float | None) -> float | None:
        """Return the seconds until the deadline, or None without a deadline."""
        return None if deadline is None else max(0.0, deadline - self.wait_policy.clock())

    def work(self) -> Work[ProfileResult | SubmittedProbes]:
        timeout, clock = self.wait_policy.timeout, self.wait_policy.clock
        deadline = None if timeout is None else clock() + timeout
        inspections = yield from self._inspect_variants(deadline)
        stopped: set[str | None] = set()  # types whose last round ended without all its results
        measures_failed_again = True  # what failed before; what fails now is left to the next call
        while True:
            planned = yield from plan_variants(
                self.runs, inspections, again=measures_failed_again, largest=self.largest
            )
            missing = [(run, plan) for run, plan in planned if plan.missing and run.name not in stopped]
            if not missing:
                save_runs([run for run, _ in planned], self.file)
                if not any(
                    plan.certainty for _, plan in planned
                ):  # the report says when a search in rounds is finished
                    yield Note("all probes already have results")
                break
            jobs = yield from self._start(planned, missing)
            if not all(self.wait_policy.should_wait(submitted.run.spec) for submitted in jobs):
                return (yield from _list_submitted_probes(planned, jobs))
            yield from self._wait(jobs, deadline)
            measures_failed_again = False
            unfinished = {submitted.run.name for submitted in jobs if submitted.may_go_on}
            stopped |= {submitted.run.name for submitted in jobs} - unfinished
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
                reports[run.name] = (
                    largest_batch.make_result(run, inspections[run.name], plan)
                    if self.largest
                    else profile.make_profile_report(run, plan)
                )
            except (BadMeasurements, JobFailed, OutOfMemoryAtMinimum) as error:
                errors.append(error)
                if run.name is not None:
                    yield WarningEvent(messages.part_failed(part=describe_part(run.name), reason=error.message))
        if not reports:
            raise errors[0]
        return ProfileResult(reports, bool(errors) or any(not report.is_complete for report in reports.values()))

    def _start(self, planned: Plans, missing: Plans) -> Work[list[_SubmittedRun]]:
        """Submit a round, after confirmation if there are jobs to submit."""
        for run, plan in missing:
            profile.wait_for_exits(run, self.dependencies.launcher_for(run.spec), plan)
        jobs = [_SubmittedRun(run, plan, self.dependencies.launcher_for(run.spec)) for run, plan in missing]
        if any(submitted.has_missing for submitted in jobs):
            for run, plan in missing:
                yield from map(WarningEvent, warn_balance_for_probes(run.spec, plan.node_hours_at_most))
            planned_event = ProfilePlanned({run.name: plan for run, plan in planned}, self.cap, self.is_started)
            yield planned_event
            hours = [plan.node_hours_at_most for _, plan in planned]
            require_within_cap(hours, self.cap, first_jobs=self.first_jobs)
            if not self.confirmed:  # the rounds to come are within what was allowed
                require_confirmed(self.dependencies.confirm, planned_event)
            self.confirmed = self.is_started = True
        save_runs([run for run, _ in planned], self.file)
        self._submit(jobs)
        return jobs

    def _submit(self, jobs: Sequence[_SubmittedRun]) -> None:
        """Submit the jobs of each variant.

        Raises:
            Interruption: Ctrl-C; submitted jobs continue to run.
        """
        try:
            for submitted in jobs:
                submitted.started = profile.submit_probes(submitted.run, submitted.plan, submitted.launcher)
        except KeyboardInterrupt:
            raise make_interruption_of_jobs([submitted.run for submitted in jobs]) from None

    def _wait(self, jobs: Sequence[_SubmittedRun], deadline: float | None) -> Work[None]:
        """Wait until `deadline` for the jobs of one variant after another; all of them have been submitted."""
        try:
            for submitted in jobs:
                if submitted.run.name is not None:
                    yield Note(f"{describe_part(submitted.run.name)}:")
                wait_policy = dataclasses.replace(self.wait_policy, timeout=self._remaining_seconds(deadline))
                yield from wait_for_jobs(submitted.run, submitted.launcher, submitted.started, wait_policy)
        except KeyboardInterrupt:
            raise make_interruption_of_jobs([submitted.run for submitted in jobs]) from None


def _list_submitted_probes(planned: Plans, jobs: Sequence[_SubmittedRun]) -> Work[SubmittedProbes]:
    for submitted in jobs:
        yield from warn_new_jobs(
            submitted.run, submitted.launcher, submitted.started, submitted.under_way, submitted.run.spec
        )
    started = [job for submitted in jobs for job in submitted.run.name_jobs(submitted.started)]
    unfinished = [job for submitted in jobs for job in submitted.run.name_jobs(submitted.under_way)]
    return SubmittedProbes(tuple(started), tuple(unfinished), {run.name: plan for run, plan in planned})
