"""Asking before money is spent, waiting for jobs, and telling what was submitted."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tula_cli import words
from tula_cli.cli.options import Interrupted
from tula_cli.errors import OverBudget, Pending, SpecError
from tula_cli.show import live as show_live
from tula_cli.show.screen import Screen

if TYPE_CHECKING:
    from tula_cli.cluster.launcher import Launcher
    from tula_cli.run.directory import RunDir
    from tula_cli.services.status import RunStatus
    from tula_cli.spec.job import JobSpec


def allow(screen: Screen, question: str, *, yes: bool, capped: bool) -> None:
    """Go on if the user says yes, said so before, or has set a cap where there is nobody to ask.

    Raises:
        OverBudget: not confirmed.
    """
    if yes or (capped and not sys.stdin.isatty()):
        return
    if not sys.stdin.isatty():
        raise OverBudget("not confirmed: there is no terminal to ask on", "add -y, or set search.max_node_hours")
    if not screen.confirm(question):
        raise OverBudget("not confirmed; nothing was submitted")


def wait_for(
    screen: Screen,
    run: "RunDir",
    launcher: "Launcher",
    jobs: Sequence[str],
    *,
    timeout: float | None,
    cancel_on_interrupt: bool,
) -> "RunStatus":
    """Show the jobs until they have ended; return how.

    Raises:
        Pending: the time to wait is over, they are not.
        Interrupted: Ctrl-C.
    """
    from tula_cli.services import status
    from tula_cli.services.progress import job_status

    now = None
    try:
        with show_live.live(screen) as live:
            for now in status.watch(run, launcher, jobs, timeout=timeout):
                live.update(now)
    except KeyboardInterrupt:
        if cancel_on_interrupt:
            ended = status.cancel(run, launcher)
            raise Interrupted(f"interrupted; cancelled {', '.join(ended) or 'nothing'}") from None
        hint = f"the same command attaches to them again; tula cancel {words.near(run.path)} ends them"
        raise Interrupted("interrupted; the jobs go on", hint) from None
    assert now is not None
    left = [job for job in now.jobs if job.id in jobs and job.state in job_status.ACTIVE]
    if left:
        running = ", ".join(f"{job.id} ({job.state})" for job in left)
        raise Pending(f"not over after {timeout:g} s: {running}", "the same command attaches to them again")
    for job in now.jobs:
        if job.id in jobs and job.state in ("lost", "failed", "diverged", "cancelled"):
            screen.warn(f"{job.id} {job.state}: {words.first_line(job.reason)}")
    return now


def waits(wait: bool | None, spec: "JobSpec") -> bool:
    return spec.cluster.kind == "local" if wait is None else wait


def refuse(given: bool, option: str, why: str) -> None:
    if given:
        raise SpecError(f"{option} {why}")


def require_within_cap(node_hours: Sequence[float], cap: float | None) -> None:
    if cap is not None and sum(node_hours) > cap:
        types = f" on all {len(node_hours)} node types" if len(node_hours) > 1 else ""
        raise OverBudget(
            f"the probes{types} may take {words.number(sum(node_hours))} node-hours, search.max_node_hours is {cap:g}",
            "raise it with --set search.max_node_hours=..., or lower search.max_minutes, or search fewer nodes",
        )


def warn_all(screen: Screen, warnings: Sequence[str]) -> None:
    for text in warnings:
        screen.warn(text)


def detached(
    screen: Screen, run: "RunDir", jobs: Sequence[str], under_way: Sequence[str], data: dict[str, Any]
) -> None:
    """Answer for jobs that nobody waits for."""
    screen.status = "pending"
    started = [job for job in jobs if job not in under_way]
    told = [f"started {', '.join(started)}"] if started else []
    told += [f"under way already: {', '.join(under_way)}"] if under_way else []
    line = f"{'; '.join(told)}; tula status --run {words.near(run.path)} shows how far they are"
    screen.answer({"jobs": list(jobs), **data}, [line])


def tell_new(
    screen: Screen,
    run: "RunDir",
    launcher: "Launcher",
    jobs: Sequence[str],
    under_way: Sequence[str],
    spec: "JobSpec",
) -> None:
    """Warn of jobs that will not start, and of those that were submitted with other settings of the cluster."""
    known = [found for found in run.jobs() if found.id in jobs]
    for id_, state in launcher.states(run, known).items():
        if state.hopeless:
            screen.warn(f"{id_}: {state.reason}; tula cancel, correct the cluster section, and start again")
    tasks = {task.job: task for task in run.tasks()}
    for id_ in under_way:
        if id_ in tasks and tasks[id_].spec.cluster != spec.cluster:
            screen.warn(f"{id_} was submitted with another cluster section; tula cancel first, to have this one")
