"""`tula profile` from its plans to its report: rounds over all types of node, asking before each, and waiting."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tula_cli.cluster.inspection import NotInspected
from tula_cli.cluster.launcher import Launcher, under_way
from tula_cli.cluster.slurm.first_job import inspect_on_node, kept_inspection
from tula_cli.errors import (
    BadMeasurements,
    Infeasible,
    Interruption,
    JobFailed,
    OutOfMemoryAtMinimum,
    TulaError,
)
from tula_cli.run.directory import Part, RunDir
from tula_cli.run.jobfile import adopt
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.results import JobFile
from tula_cli.services import profile, status
from tula_cli.services.events import Note, ProfilePlanned, Warned, Work
from tula_cli.services.profile import ProfilePlan, ProfileReport
from tula_cli.services.waiting import (
    Detached,
    Means,
    Patience,
    allow,
    doubts_of_new,
    require_within_cap,
    wait_for,
)
from tula_cli.spec.job import JobSpec

Plans = Sequence[tuple[Part, ProfilePlan]]


@dataclass(frozen=True)
class Profiled:
    """What was measured on each type of node; None is the type of a job that names none."""

    reports: Mapping[str | None, ProfileReport]
    partial: bool  # a probe failed or has no result, or a type has none at all


@dataclass(frozen=True)
class Submitted(Detached):
    """The probes that nobody waits for, and the plans they are of."""

    plans: Mapping[str | None, ProfilePlan]


@dataclass(frozen=True)
class DryRun:
    """What would be submitted, as text, on one type of node."""

    plan: ProfilePlan
    scripts: tuple[str, ...]


def plans(
    run: RunDir,
    spec: JobSpec,
    inspect: Callable[[JobSpec], Inspection],
    *,
    again: bool = True,
    first_job: Callable[[Part], Inspection] | None = None,
) -> Work[list[tuple[Part, ProfilePlan]]]:
    """Return what is to be measured on each type; one that nothing fits is a warning as long as there is another.

    Args:
        run: the run, which may not be there yet.
        spec: the job.
        inspect: builds the model and the dataset.
        again: whether what has failed is measured again.
        first_job: does the same on a node; None where nothing may be submitted.

    Raises:
        Infeasible: nothing fits anywhere.
        NotInspected: the jobs' interpreter cannot run here, and there is no first job.
    """
    found: list[tuple[Part, ProfilePlan]] = []
    errors = []
    parts = run.parts(spec)
    rounds = any(part.spec.search.strategy == "adaptive" for part in parts)
    spent = {part.type: profile.spent(part.run) if rounds else 0.0 for part in parts}
    for part in parts:
        elsewhere = sum(spent.values()) - spent[part.type] + sum(plan.node_hours_at_most for _, plan in found)
        inspection = yield from _inspected(part, inspect, first_job)
        for text in inspection.warnings:
            yield Warned(text)
        try:
            found.append((part, profile.plan(part.spec, inspection, part.run, elsewhere=elsewhere, again=again)))
        except Infeasible as error:
            errors.append((part.type, error))
    if not found:
        raise errors[0][1]
    left_out = [f"node type {name} is left out: {error.message}" for name, error in errors]
    for text in (*left_out, *(text for _, plan in found for text in plan.code.warnings)):
        yield Warned(text)
    return found


def _inspected(
    part: Part, inspect: Callable[[JobSpec], Inspection], first_job: Callable[[Part], Inspection] | None
) -> Work[Inspection]:
    """Return what building the model and the dataset tells: here, or on a node where this machine cannot."""
    if kept := kept_inspection(part.run):
        return kept
    try:
        return inspect(part.spec)
    except NotInspected as error:
        if first_job is None or part.spec.cluster.kind != "slurm":
            raise
        yield Note(f"{error.message}; the first job does it on a node, and settles what is measured")
    return first_job(part)


def dry_run(run: RunDir, spec: JobSpec, means: Means) -> Work[dict[str | None, DryRun]]:
    """Return what would be submitted on each type of node; nothing is written.

    Raises:
        Infeasible: nothing fits anywhere.
    """
    found = {}
    for part, plan in (yield from plans(run, spec, means.inspect)):
        launcher = means.launcher_for(part.spec)
        scripts = [launcher.script(part.run, tasks[0]) for tasks in plan.jobs.values()]
        found[part.type] = DryRun(plan, tuple(scripts))
    return found


def work(
    run: RunDir, spec: JobSpec, means: Means, patience: Patience, *, file: JobFile | None = None
) -> Work[Profiled | Submitted]:
    """Measure what is missing, round after round; jobs that are under way are attached to.

    Args:
        run: the run, which may not be there yet.
        spec: the job.
        means: launcher, inspection, and who is asked before something is submitted.
        patience: whether and how long to wait.
        file: where the spec comes from.

    Raises:
        Infeasible: nothing fits anywhere.
        OverBudget: more than search.max_node_hours, or not confirmed.
        Pending: the time to wait is over.
        Interruption: Ctrl-C; the jobs go on, unless they are to be cancelled.
        JobFailed, OutOfMemoryAtMinimum, BadMeasurements: nothing was measured.
        SchedulerError: a job was refused.
    """
    return (yield from _Profiling(run, spec, means, patience, file).work())


@dataclass
class _AtWork:
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
        return self.part.spec.search.strategy == "adaptive" and profile.measured(self.part.run, self.plan)


@dataclass
class _Profiling:
    """One call of `work`."""

    run: RunDir
    spec: JobSpec
    means: Means
    patience: Patience
    file: JobFile | None
    confirmed: bool = False

    def _first_job(self, part: Part) -> Inspection:
        self.means.launcher_for(part.spec)  # says so where nothing can be submitted from here
        adopt(self.run, self.spec, [part], self.file)
        return inspect_on_node(part.run, part.spec)

    def work(self) -> Work[Profiled | Submitted]:
        timeout, clock = self.patience.timeout, self.patience.clock
        deadline = None if timeout is None else clock() + timeout
        stopped: set[str | None] = set()  # types whose last round ended without all its results
        again = True  # what failed before; what fails now is left to the next call
        while True:
            planned = yield from plans(self.run, self.spec, self.means.inspect, again=again, first_job=self._first_job)
            missing = [(part, plan) for part, plan in planned if plan.missing and part.type not in stopped]
            if not missing:
                adopt(self.run, self.spec, [part for part, _ in planned], self.file)
                yield Note(_nothing_missing(planned))
                break
            jobs = yield from self._start(planned, missing)
            if not all(self.patience.waits(own.part.spec) for own in jobs):
                return (yield from _submitted(planned, jobs))
            yield from self._wait(jobs, deadline)
            again = False
            further = {own.part.type for own in jobs if own.goes_on}
            stopped |= {own.part.type for own in jobs} - further
            if not further:
                break
        return (yield from _reports(planned))

    def _start(self, planned: Plans, missing: Plans) -> Work[list[_AtWork]]:
        """Submit a round, after asking where there is something to submit."""
        jobs = [_AtWork(part, plan, self.means.launcher_for(part.spec)) for part, plan in missing]
        if any(own.fresh for own in jobs):
            asked = ProfilePlanned({part.type: plan for part, plan in planned})
            yield asked
            cap = self.spec.search.max_node_hours
            require_within_cap([plan.node_hours_at_most for plan in asked.plans.values()], cap)
            if not self.confirmed:  # the rounds to come are within what was allowed
                allow(self.means.confirm, asked)
            self.confirmed = True
        adopt(self.run, self.spec, [part for part, _ in planned], self.file)
        for own in jobs:
            own.started = profile.start(own.part.run, own.plan, own.launcher)
        return jobs

    def _wait(self, jobs: Sequence[_AtWork], deadline: float | None) -> Work[None]:
        """Wait for the jobs of one type after the other, until `deadline`: all of them are submitted."""
        for own in jobs:
            if own.part.type is not None:
                yield Note(f"node type {own.part.type}:")
            left = None if deadline is None else max(0.0, deadline - self.patience.clock())
            patience = dataclasses.replace(self.patience, timeout=left)
            try:
                yield from wait_for(own.part.run, own.launcher, own.started, patience)
            except Interruption:
                for other in jobs if patience.cancel_on_interrupt else ():
                    status.cancel(other.part.run, other.launcher)
                raise


def _nothing_missing(planned: Plans) -> str:
    return next((plan.certainty for _, plan in planned if plan.certainty), "every probe has a result already")


def _submitted(planned: Plans, jobs: Sequence[_AtWork]) -> Work[Submitted]:
    for own in jobs:
        yield from doubts_of_new(own.part.run, own.launcher, own.started, own.under_way, own.part.spec)
    started = [job for own in jobs for job in own.part.named(own.started)]
    going_on = [job for own in jobs for job in own.part.named(own.under_way)]
    return Submitted(tuple(started), tuple(going_on), {part.type: plan for part, plan in planned})


def _reports(planned: Plans) -> Work[Profiled]:
    """Return what was measured; a type of which nothing was is a warning as long as there is another.

    Raises:
        TulaError: nothing was measured.
    """
    found: dict[str | None, ProfileReport] = {}
    errors: list[TulaError] = []
    for part, plan in planned:
        try:
            found[part.type] = profile.report(part.run, plan)
        except (BadMeasurements, JobFailed, OutOfMemoryAtMinimum) as error:
            errors.append(error)
            if part.type is not None:
                yield Warned(f"node type {part.type}: {error.message}")
    if not found:
        raise errors[0]
    return Profiled(found, bool(errors) or any(report.failed or report.missing for report in found.values()))
