"""`tula profile` from its plans to its report: rounds over all types of node, asking before each, and waiting."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tula_cli.cluster.inspection import NotInspected
from tula_cli.cluster.launcher import Launcher, under_way
from tula_cli.cluster.slurm import first_job
from tula_cli.errors import (
    BadMeasurements,
    Infeasible,
    Interruption,
    JobFailed,
    OutOfMemoryAtMinimum,
    TulaError,
)
from tula_cli.run.directory import Part, RunDir
from tula_cli.run.jobfile import adopt, all_parts
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.results import JobFile
from tula_cli.services import profile
from tula_cli.services.events import FirstJobPlanned, Note, ProfilePlanned, WarningEvent, Work
from tula_cli.services.profile import ProfilePlan, ProfileReport
from tula_cli.services.profiling.unsettled import UnsettledPlan, unsettled
from tula_cli.services.recommendation.beyond.account_balance import probes_lacking
from tula_cli.services.recommendation.beyond.site_charges import billed
from tula_cli.services.waiting import (
    Dependencies,
    DetachedJobs,
    WaitPolicy,
    allow,
    doubts_of_new,
    interruption_of_jobs,
    require_within_cap,
    wait_for,
)
from tula_cli.spec.job import JobSpec
from tula_cli.words import part_words

Plans = Sequence[tuple[Part, ProfilePlan]]


@dataclass(frozen=True)
class ProfileResult:
    """What was measured of each part (type of node, length of text); None is the whole of a job without types."""

    reports: Mapping[str | None, ProfileReport]
    partial: bool  # a probe failed or has no result, or a type has none at all


@dataclass(frozen=True)
class SubmittedProbes(DetachedJobs):
    """The probes that nobody waits for, and the plans they are of."""

    plans: Mapping[str | None, ProfilePlan]


@dataclass(frozen=True)
class DryRun:
    """What would be submitted, as text, on one type of node."""

    plan: ProfilePlan | UnsettledPlan
    scripts: tuple[str, ...]


Inspections = Mapping[str | None, Inspection]
"""What building the model and the dataset tells, by the name of a part."""


def plans(
    parts: Sequence[Part], inspections: Inspections, *, again: bool = True
) -> Work[list[tuple[Part, ProfilePlan]]]:
    """Return what is to be measured of each part; one that nothing fits is a warning as long as there is another to train.

    Args:
        parts: of the run, which may not be there yet.
        inspections: of each of them.
        again: whether what has failed is measured again.

    Raises:
        Infeasible: nothing fits anywhere.
    """
    found: list[tuple[Part, ProfilePlan]] = []
    errors = []
    rounds = any(part.spec.search.strategy in ("auto", "adaptive") for part in parts)
    spent = {part.name: profile.spent(part.run) if rounds else 0.0 for part in parts}
    for part in parts:
        elsewhere = sum(spent.values()) - spent[part.name] + sum(plan.node_hours_at_most for _, plan in found)
        inspection = inspections[part.name]
        for text in inspection.warnings:
            yield WarningEvent(text)
        try:
            found.append(
                (
                    part,
                    profile.plan(part.spec, inspection, part.run, elsewhere=elsewhere, again=again, sizes=part.sizes),
                )
            )
        except Infeasible as error:
            errors.append((part.name, error))
    if all(part.length is not None for part, _ in found):
        raise errors[0][1]
    left_out = [f"{part_words(name)} is left out: {error.message}" for name, error in errors if name is not None]
    for text in (*left_out, *(text for _, plan in found for text in plan.code.warnings)):
        yield WarningEvent(text)
    return found


def inspected(part: Part, dependencies: Dependencies) -> Inspection | NotInspected:
    """Return what is known of the model and the dataset of a part; the error where only a node can tell.

    Raises:
        SpecError: they cannot be built.
        JobFailed: the user's code fails; NotInspected where there are no nodes to ask.
    """
    try:
        return first_job.or_told(dependencies.inspect, part.run)(part.spec)
    except NotInspected as error:
        if part.spec.cluster.kind != "slurm":
            raise
        return error


def _unsettled(parts: Sequence[Part], found: Mapping[str | None, Inspection | NotInspected]) -> FirstJobPlanned:
    """Return what is planned where a node has to tell what the model and the dataset of some type are."""
    failures = {name: inspection for name, inspection in found.items() if isinstance(inspection, NotInspected)}
    settled_later = {part.name: unsettled(part.spec, why=failures.get(part.name)) for part in parts}
    return FirstJobPlanned(settled_later, parts[0].spec.search.max_node_hours)


def dry_run(run: RunDir, spec: JobSpec, dependencies: Dependencies) -> Work[dict[str | None, DryRun]]:
    """Return what would be submitted on each type of node; nothing is written.

    Raises:
        Infeasible: nothing fits anywhere.
    """
    parts = all_parts(run, billed(spec, run.path.parent))
    known = {part.name: inspected(part, dependencies) for part in parts}
    settled = {name: one for name, one in known.items() if not isinstance(one, NotInspected)}
    if len(settled) < len(known):
        planned = _unsettled(parts, known).plans
        scripts = {
            part.name: () if part.name in settled else (first_job.script(part.run, part.spec),) for part in parts
        }
        return {name: DryRun(plan, scripts[name]) for name, plan in planned.items()}
    found = {}
    for part, plan in (yield from plans(parts, settled)):
        launcher = dependencies.launcher_for(part.spec)
        found[part.name] = DryRun(plan, tuple(launcher.script(part.run, tasks[0]) for tasks in plan.jobs.values()))
    return found


def work(
    run: RunDir, spec: JobSpec, dependencies: Dependencies, wait_policy: WaitPolicy, *, file: JobFile | None = None
) -> Work[ProfileResult | SubmittedProbes]:
    """Measure what is missing, round after round; jobs that are under way are attached to.

    Args:
        run: the run, which may not be there yet.
        spec: the job.
        dependencies: launcher, inspection, and who is asked before something is submitted.
        wait_policy: whether and how long to wait.
        file: where the spec comes from.

    Raises:
        Infeasible: nothing fits anywhere.
        OverBudget: more than search.max_node_hours, or not confirmed.
        Pending: the time to wait is over.
        Interruption: Ctrl-C; the jobs go on, unless they are to be cancelled.
        JobFailed, OutOfMemoryAtMinimum, BadMeasurements: nothing was measured.
        SchedulerError: a job was refused.
    """
    return (yield from _Profiling(run, billed(spec, run.path.parent), dependencies, wait_policy, file).work())


@dataclass
class _SubmittedPart:
    """The jobs that measure one part of a run."""

    part: Part
    plan: ProfilePlan
    launcher: Launcher
    started: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.under_way = under_way(self.part.run, self.launcher, list(self.plan.jobs))

    @property
    def fresh(self) -> bool:
        """Whether there is something to submit."""
        return len(self.under_way) < len(self.plan.jobs)

    @property
    def goes_on(self) -> bool:
        """Whether a further round may follow from the results."""
        return self.plan.in_rounds and profile.measured(self.part.run, self.plan)


@dataclass
class _Profiling:
    """One call of `work`."""

    run: RunDir
    spec: JobSpec
    dependencies: Dependencies
    wait_policy: WaitPolicy
    file: JobFile | None
    confirmed: bool = False
    first_jobs: float = 0.0  # node-hours that building the model and the dataset on nodes has taken

    def _inspections(self, parts: Sequence[Part], deadline: float | None) -> Work[Inspections]:
        """Build the model and the dataset: here or, where that cannot be, on a node, after asking."""
        known = {part.name: inspected(part, self.dependencies) for part in parts}
        found = {name: one for name, one in known.items() if not isinstance(one, NotInspected)}
        elsewhere = [part for part in parts if part.name not in found]
        if not elsewhere:
            return found
        for part in elsewhere:
            self.dependencies.launcher_for(part.spec)  # says so where nothing can be submitted from here
        asked = _unsettled(parts, known)
        yield asked
        first_jobs = sum(plan.first_job_node_hours for plan in asked.plans.values())
        require_within_cap([], self.spec.search.max_node_hours, first_jobs=first_jobs)
        allow(self.dependencies.confirm, asked)
        self.confirmed = True
        adopt(self.run, self.spec, elsewhere, self.file)
        for part in elsewhere:
            found[part.name] = first_job.inspect_on_node(part.run, part.spec, timeout=self._left(deadline))
            self.first_jobs += first_job.newest_node_hours(part.run)
        return found

    def _left(self, deadline: float | None) -> float | None:
        """Return the seconds that are left to wait."""
        return None if deadline is None else max(0.0, deadline - self.wait_policy.clock())

    def work(self) -> Work[ProfileResult | SubmittedProbes]:
        timeout, clock = self.wait_policy.timeout, self.wait_policy.clock
        deadline = None if timeout is None else clock() + timeout
        parts = all_parts(self.run, self.spec)
        inspections = yield from self._inspections(parts, deadline)
        stopped: set[str | None] = set()  # types whose last round ended without all its results
        again = True  # what failed before; what fails now is left to the next call
        while True:
            planned = yield from plans(parts, inspections, again=again)
            missing = [(part, plan) for part, plan in planned if plan.missing and part.name not in stopped]
            if not missing:
                adopt(self.run, self.spec, [part for part, _ in planned], self.file)
                yield Note(_nothing_missing(planned))
                break
            jobs = yield from self._start(planned, missing)
            if not all(self.wait_policy.waits(own.part.spec) for own in jobs):
                return (yield from _submitted(planned, jobs))
            yield from self._wait(jobs, deadline)
            again = False
            further = {own.part.name for own in jobs if own.goes_on}
            stopped |= {own.part.name for own in jobs} - further
            if not further:
                break
        return (yield from _reports(planned))

    def _start(self, planned: Plans, missing: Plans) -> Work[list[_SubmittedPart]]:
        """Submit a round, after asking where there is something to submit."""
        jobs = [_SubmittedPart(part, plan, self.dependencies.launcher_for(part.spec)) for part, plan in missing]
        if any(own.fresh for own in jobs):
            for part, plan in missing:
                if text := probes_lacking(part.spec, plan.node_hours_at_most):
                    yield WarningEvent(text)
            asked = ProfilePlanned({part.name: plan for part, plan in planned})
            yield asked
            hours = [plan.node_hours_at_most for plan in asked.plans.values()]
            require_within_cap(hours, self.spec.search.max_node_hours, first_jobs=self.first_jobs)
            if not self.confirmed:  # the rounds to come are within what was allowed
                allow(self.dependencies.confirm, asked)
            self.confirmed = True
        adopt(self.run, self.spec, [part for part, _ in planned], self.file)
        self._submit(jobs)
        return jobs

    def _submit(self, jobs: Sequence[_SubmittedPart]) -> None:
        """Submit the jobs of each type of node.

        Raises:
            Interruption: Ctrl-C; what is submitted goes on, unless it is to be cancelled.
        """
        try:
            for own in jobs:
                own.started = profile.start(own.part.run, own.plan, own.launcher)
        except KeyboardInterrupt:
            raise self._interruption(jobs) from None

    def _interruption(self, jobs: Sequence[_SubmittedPart]) -> Interruption:
        """Return what to raise on Ctrl-C; where the jobs are to be cancelled, those of every type are."""
        return interruption_of_jobs(self.run, [(own.part, own.launcher) for own in jobs], self.wait_policy)

    def _wait(self, jobs: Sequence[_SubmittedPart], deadline: float | None) -> Work[None]:
        """Wait for the jobs of one type after the other, until `deadline`: all of them are submitted."""
        try:
            for own in jobs:
                if own.part.name is not None:
                    yield Note(f"{part_words(own.part.name)}:")
                wait_policy = dataclasses.replace(self.wait_policy, timeout=self._left(deadline))
                yield from wait_for(own.part.run, own.launcher, own.started, wait_policy)
        except KeyboardInterrupt:
            raise self._interruption(jobs) from None


def _nothing_missing(planned: Plans) -> str:
    return next((plan.certainty for _, plan in planned if plan.certainty), "every probe has a result already")


def _submitted(planned: Plans, jobs: Sequence[_SubmittedPart]) -> Work[SubmittedProbes]:
    for own in jobs:
        yield from doubts_of_new(own.part.run, own.launcher, own.started, own.under_way, own.part.spec)
    started = [job for own in jobs for job in own.part.named(own.started)]
    going_on = [job for own in jobs for job in own.part.named(own.under_way)]
    return SubmittedProbes(tuple(started), tuple(going_on), {part.name: plan for part, plan in planned})


def _reports(planned: Plans) -> Work[ProfileResult]:
    """Return what was measured; a part of which nothing was is a warning as long as there is another to train.

    Raises:
        TulaError: nothing was measured.
    """
    found: dict[str | None, ProfileReport] = {}
    errors: list[TulaError] = []
    for part, plan in planned:
        try:
            found[part.name] = profile.report(part.run, plan)
        except (BadMeasurements, JobFailed, OutOfMemoryAtMinimum) as error:
            errors.append(error)
            if part.name is not None:
                yield WarningEvent(f"{part_words(part.name)}: {error.message}")
    if all(part.length is not None for part, _ in planned if part.name in found):
        raise errors[0]
    return ProfileResult(found, bool(errors) or any(report.failed or report.missing for report in found.values()))
