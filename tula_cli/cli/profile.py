"""`tula profile`."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tula_cli.cli.options import (
    RUNS,
    CancelOnInterrupt,
    DryRun,
    Interrupted,
    MaybeRun,
    MaybeSpec,
    Overrides,
    Root,
    T,
    Timeout,
    Wait,
    Yes,
)
from tula_cli.cli.runs import adopt, by_type, headed, open_run
from tula_cli.cli.waiting import allow, detached, require_within_cap, tell_new, wait_for, waits, warn_all
from tula_cli.errors import BadMeasurements, Infeasible, JobFailed, OutOfMemoryAtMinimum
from tula_cli.show import profile as show_profile
from tula_cli.show.screen import Screen

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tula_cli.cluster.launcher import Launcher
    from tula_cli.run.directory import Part, RunDir
    from tula_cli.run.records.inspections import Inspection
    from tula_cli.services.profile import ProfilePlan, ProfileReport
    from tula_cli.spec.job import JobSpec


def profile(
    screen: Screen,
    job: MaybeSpec = None,
    named: MaybeRun = None,
    root: Root = RUNS,
    overrides: Overrides = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    wait: Wait = None,
    timeout: Timeout = None,
    cancel_on_interrupt: CancelOnInterrupt = False,
) -> None:
    """Measure short training runs over nodes and batch sizes.

    The same command again attaches to what is under way, does what is missing, and stops.
    """
    import time

    from tula_cli.cluster import launcher as cluster_launcher
    from tula_cli.services import profile as service

    if dry_run:
        return _profile_dry_run(screen, job, named, root, overrides)
    run, spec = open_run(screen, job, named, root, overrides)
    end = None if timeout is None else time.monotonic() + timeout
    stopped: set[str] = set()  # types whose last round ended without all its results
    again = True  # what failed before; what fails now is left to the next call
    while True:
        planned = _profile_plans(screen, run, spec, again=again)
        missing = [(part, plan) for part, plan in planned if plan.missing and part.type not in stopped]
        if not missing:
            adopt(run, spec, [part for part, _ in planned], job, overrides)
            screen.note(
                next((plan.certainty for _, plan in planned if plan.certainty), "every probe has a result already")
            )
            break
        at_work = [_AtWork(part, plan, cluster_launcher.launcher_for(part.spec)) for part, plan in missing]
        if any(work.fresh for work in at_work):
            _confirm_profile(screen, planned, spec, yes=yes)
            yes = True  # for the rounds to come
        adopt(run, spec, [part for part, _ in planned], job, overrides)
        for work in at_work:
            work.started = service.start(work.part.run, work.plan, work.launcher)
        if not all(waits(wait, work.part.spec) for work in at_work):
            return _profile_detached(screen, run, at_work, {"plan": _whole({p.type: plan for p, plan in planned})})
        _wait_for_probes(screen, at_work, deadline=end, cancel_on_interrupt=cancel_on_interrupt)
        again = False
        further = {
            part.type
            for part, plan in missing
            if part.spec.search.strategy == "adaptive" and service.measured(part.run, plan)
        }
        stopped |= {part.type for part, _ in missing} - further
        if not further:
            break
    reports = _profile_reports(screen, planned)
    if any(report.failed or report.missing for report in reports.values()):
        screen.status = "partial"
    by_type(screen, reports, show_profile.profile_report)
    return None


def _confirm_profile(
    screen: Screen, planned: Sequence[tuple["Part", "ProfilePlan"]], spec: "JobSpec", *, yes: bool
) -> None:
    """Show what is to be submitted and what it may cost; raise OverBudget where that is not allowed."""
    cap = spec.search.max_node_hours
    screen.aside(headed({part.type: plan for part, plan in planned}, lambda _, plan: show_profile.profile_plan(plan)))
    screen.aside(show_profile.all_types([plan for _, plan in planned]))
    require_within_cap([plan.node_hours_at_most for _, plan in planned], cap)
    allow(screen, "start?", yes=yes, capped=cap is not None)


class _AtWork:
    """The jobs that measure one part of a run."""

    def __init__(self, part: "Part", plan: "ProfilePlan", launcher: "Launcher") -> None:
        from tula_cli.cluster import launcher as cluster_launcher

        self.part, self.plan, self.launcher = part, plan, launcher
        self.under_way = cluster_launcher.under_way(part.run, launcher, list(plan.jobs))
        self.fresh = len(self.under_way) < len(plan.jobs)  # whether there is something to submit
        self.started: Sequence[str] = ()

    def named(self, jobs: Sequence[str]) -> list[str]:
        """Return jobs as the user tells those of one type from those of another."""
        return [f"{self.part.type}/{job}" if self.part.type else job for job in jobs]


def _profile_plans(
    screen: Screen, run: "RunDir", spec: "JobSpec", *, again: bool = True
) -> list[tuple["Part", "ProfilePlan"]]:
    """Return what is to be measured on each type; one that nothing fits is a warning as long as there is another.

    Raises:
        Infeasible: nothing fits anywhere.
    """
    from tula_cli.services import profile as service

    found: list[tuple[Part, ProfilePlan]] = []
    errors = []
    parts = run.parts(spec)
    rounds = any(part.spec.search.strategy == "adaptive" for part in parts)
    spent = {part.type: service.spent(part.run) if rounds else 0.0 for part in parts}
    for part in parts:
        elsewhere = sum(spent.values()) - spent[part.type] + sum(plan.node_hours_at_most for _, plan in found)
        try:
            plan = service.plan(part.spec, _inspect(screen, part.spec), part.run, elsewhere=elsewhere, again=again)
            found.append((part, plan))
        except Infeasible as error:
            errors.append((part.type, error))
    if not found:
        raise errors[0][1]
    warn_all(screen, [f"node type {name} is left out: {error.message}" for name, error in errors])
    for _, plan in found:
        warn_all(screen, plan.code.warnings)
    return found


def _whole(found: Mapping[str, T]) -> Any:
    """Return what is known of a job without types, or of each type."""
    return found[""] if list(found) == [""] else {"types": dict(found)}


def _profile_detached(screen: Screen, run: "RunDir", at_work: Sequence[_AtWork], data: dict[str, Any]) -> None:
    for work in at_work:
        tell_new(screen, work.part.run, work.launcher, work.started, work.under_way, work.part.spec)
    started = [job for work in at_work for job in work.named(work.started)]
    under_way = [job for work in at_work for job in work.named(work.under_way)]
    detached(screen, run, started, under_way, data)


def _wait_for_probes(
    screen: Screen, at_work: Sequence[_AtWork], *, deadline: float | None, cancel_on_interrupt: bool
) -> None:
    """Wait for the jobs of one type after the other, until `deadline` (monotonic): all of them are submitted."""
    import time

    from tula_cli.services import status

    for work in at_work:
        if work.part.type:
            screen.note(f"node type {work.part.type}:")
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            wait_for(
                screen,
                work.part.run,
                work.launcher,
                work.started,
                timeout=left,
                cancel_on_interrupt=cancel_on_interrupt,
            )
        except Interrupted:
            for other in at_work if cancel_on_interrupt else ():
                status.cancel(other.part.run, other.launcher)
            raise


def _profile_reports(screen: Screen, planned: Sequence[tuple["Part", "ProfilePlan"]]) -> dict[str, "ProfileReport"]:
    """Return what was measured; a type of which nothing was is a warning as long as there is another.

    Raises:
        TulaError: nothing was measured.
    """
    from tula_cli.services import profile as service

    found, errors = {}, []
    for part, plan in planned:
        try:
            found[part.type] = service.report(part.run, plan)
        except (BadMeasurements, JobFailed, OutOfMemoryAtMinimum) as error:
            errors.append(error)
            if part.type:
                screen.warn(f"node type {part.type}: {error.message}")
    if not found:
        raise errors[0]
    if errors:
        screen.status = "partial"
    return found


def _inspect(screen: Screen, spec: "JobSpec") -> "Inspection":
    from tula_cli.cluster import inspection as cluster_inspection

    screen.note("building the model and the dataset")
    inspection = cluster_inspection.inspect(spec)
    warn_all(screen, inspection.warnings)
    return inspection


def _profile_dry_run(
    screen: Screen, job: Path | None, named: Path | None, root: Path, overrides: Sequence[str] | None
) -> None:
    from tula_cli.cluster import launcher as cluster_launcher

    run, spec = open_run(screen, job, named, root, overrides)
    plans, scripts = {}, {}
    for part, plan in _profile_plans(screen, run, spec):
        launcher = cluster_launcher.launcher_for(part.spec)
        plans[part.type] = plan
        scripts[part.type] = [launcher.script(part.run, tasks[0]) for tasks in plan.jobs.values()]

    def shown() -> Iterator["RenderableType"]:
        yield from headed(plans, lambda name, plan: show_profile.profile_plan(plan, scripts=scripts[name]))
        yield from show_profile.all_types(list(plans.values()))

    screen.answer(_whole({name: {"plan": plan, "scripts": scripts[name]} for name, plan in plans.items()}), shown())
