"""`tula clean`: what runs hold, and what of it may go. Nothing of a run that a job may still write to."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tula_cli.cluster.local import LocalLauncher
from tula_cli.cluster.scheduling.protocol import SchedulerState
from tula_cli.cluster.scheduling.schedulers import scheduler_of
from tula_cli.cluster.slurm import queue as scheduler
from tula_cli.errors import TulaError
from tula_cli.host import machine_lock
from tula_cli.run.directory import RunDir
from tula_cli.run.records.jobs import Job
from tula_cli.run.snapshot import Snapshot
from tula_cli.run.upkeep import format as run_format
from tula_cli.run.upkeep.holdings import Holding, Wish, free, holdings, parts, size_of
from tula_cli.spec.resources import KINDS

JUST_SUBMITTED = 600.0
"""Seconds for which a job that SLURM does not know counts as one that it does not know yet."""

Ask = Callable[[Sequence[str]], Mapping[str, SchedulerState]]
"""Asks SLURM about jobs, by its own ids."""


@dataclass(frozen=True)
class RunSpace:
    """What one run holds on the disk. Bytes."""

    id: str
    path: Path
    held: int  # all of it
    changed: float  # when the newest of it was written (Unix time)
    holdings: tuple[Holding, ...]  # what may go
    kept: str = ""  # why nothing of it may go now
    lives: bool = False  # a job of it runs, or waits, or nobody can tell; else it is damaged, or of another format
    final: tuple[str, ...] = ()  # trainings, by signature, that cannot be resumed afterwards
    compared: tuple[str, ...] = ()  # those of `tula compare` of which nothing is left to evaluate

    @property
    def size(self) -> int:
        return sum(holding.size for holding in self.holdings)


@dataclass(frozen=True)
class Cleaned:
    """What was freed."""

    files: int  # and folders
    size: int  # bytes
    problems: tuple[str, ...]  # why some of it is still there


def spaces(
    runs: Iterable[RunDir],
    *,
    keep_best: bool = False,
    compared: bool = False,
    older: float | None = None,
    ask: Ask = scheduler.ask,
    now: Callable[[], float] = time.time,
) -> list[RunSpace]:
    """Return what runs hold and what of it may go, largest first; nothing is changed. SLURM is asked once for all jobs.

    Args:
        runs: this user's own.
        keep_best: of finished trainings leave the best weights alone.
        compared: free the finished trainings of `tula compare`, whole.
        older: only runs in which nothing was written for so many seconds; None for all.
        ask: who asks SLURM.
        now: Unix time.
    """
    found, looks = [], {}
    for run in runs:
        held, changed = size_of(run.path)
        if older is None or now() - changed >= older:
            one, looks[run.path] = _space(run, held, changed, keep_best=keep_best, compared=compared)
            found.append(one)
    wanted = [one.path for one in found if one.holdings]
    why = dict(zip(wanted, _held_back([looks[path] for path in wanted], ask, now()), strict=True))
    told = [_left(one, words) if (words := why.get(one.path)) else one for one in found]
    return sorted(told, key=lambda one: (-one.size, -one.held))


def _left(one: RunSpace, why: str) -> RunSpace:
    return replace(one, kept=why, lives=True, holdings=(), final=(), compared=())


def _space(
    run: RunDir, held: int, changed: float, *, keep_best: bool, compared: bool
) -> tuple[RunSpace, list[Snapshot]]:
    """Return what a run holds, with a look at each of its parts; of a damaged one, or of another format, nothing may go."""
    gone: list[Holding] = []
    looks: list[Snapshot] = []
    try:
        run_format.require_known(run.path)
        for part in parts(run.path):
            looks.append(Snapshot(part))
            cells = comparison.cells if compared and (comparison := RunDir(part).comparison()) else ()
            gone += holdings(part, Wish(keep_best, frozenset(cell.signature for cell in cells)))
    except TulaError as error:
        return RunSpace(run.id, run.path, held, changed, (), kept=error.message), looks
    whole = tuple(dict.fromkeys(_training(one) for one in gone if one.kind == "compared"))
    final = tuple(dict.fromkeys(_training(one) for one in gone if one.kind == "checkpoints" and _is_newest(one.path)))
    return RunSpace(run.id, run.path, held, changed, tuple(gone), final=final, compared=whole), looks


def _training(holding: Holding) -> str:
    return holding.path.parent.parent.name


def _is_newest(path: Path) -> bool:
    """Return whether no later checkpoint is left to go on from."""
    return all(other.name <= path.name for other in path.parent.glob("[0-9]*"))


# --- who still works


def _held_back(runs: Sequence[Sequence[Snapshot]], ask: Ask, now: float) -> list[str]:
    """Say of each run, given by its parts, why nothing of it may go; empty of one that no job lives of."""
    ids = [
        id_
        for looks in runs
        for look in looks
        for job in _readable(look)
        if job.scheduler == "slurm"
        for id_ in job.ids
    ]
    known = ask(ids) if ids else {}
    holders = [ticket.holder for ticket in machine_lock.tickets()]
    return [next((words for look in looks if (words := _lives(look, known, holders, now))), "") for looks in runs]


def _readable(look: Snapshot) -> list[Job]:
    with contextlib.suppress(TulaError):
        return look.jobs
    return []


def _lives(look: Snapshot, known: Mapping[str, SchedulerState], holders: Sequence[str], now: float) -> str:
    try:
        jobs = look.jobs
        if look.damaged_jobs:
            return f"{look.damaged_jobs[0].message}: nobody knows whether that job runs"
        local = LocalLauncher().states(look, [job for job in jobs if job.scheduler == "local"])
        if own := [id_ for job in jobs if job.scheduler not in KINDS for id_ in job.ids]:
            known = {**known, **scheduler_of(RunDir(look.path).spec().cluster).ask(own)}
    except TulaError as error:
        return error.message
    for name, _, run in (holder.partition(" of ") for holder in holders):
        if run == str(look.here):
            return f"{name} measures, trains or waits on this machine"
    for job in jobs:
        state = local[job.id] if job.scheduler == "local" else _queued(job, known, now)
        if state.state != "ended":
            told = f" ({state.reason})" if state.reason else ""
            who = "SLURM" if job.scheduler == "slurm" else "its scheduler"
            words = f"may run: {who} does not tell" if state.state == "unknown" else f"is {state.state}"
            return f"{job.id} {words}{told}"
    return ""


def _queued(job: Job, known: Mapping[str, SchedulerState], now: float) -> SchedulerState:
    """Return the state of a job that lives while one of its links does."""
    states = [known[id_] for id_ in job.ids if id_ in known]
    if len(states) < len(job.ids) and now - job.submitted_at < JUST_SUBMITTED:
        return SchedulerState("pending", "just submitted")
    return next((state for state in states if state.state != "ended"), SchedulerState("ended"))


# --- doing it


def clean(found: Iterable[RunSpace]) -> Cleaned:
    """Free what `spaces` has found. A run that a command has submitted jobs of since is left as it is.

    Interrupted at any place, the same call goes on.
    """
    files, size, problems = 0, 0, []
    for one in found:
        if not one.holdings:
            continue
        try:
            with _nobody_else(one):
                for holding in one.holdings:
                    free(holding)
                    files, size = files + 1, size + holding.size
        except TulaError as error:
            problems.append(f"{one.id}: {error.message}")
    return Cleaned(files, size, tuple(problems))


@contextlib.contextmanager
def _nobody_else(one: RunSpace) -> Iterator[None]:
    """Keep others from submitting jobs of a run meanwhile.

    Raises:
        TulaError: another command does, or has submitted some since the look.
    """
    with contextlib.ExitStack() as locks:
        for part in parts(one.path):
            lock = RunDir(part).lock
            if lock.acquire() and (owner := lock.acquire()):  # the first call takes away what a killed command has left
                raise TulaError(f"another tula command ({owner}) is submitting jobs of it; nothing more was freed")
            locks.callback(lock.release)
            jobs = part / "jobs"
            with contextlib.suppress(FileNotFoundError):
                newest = max((entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(jobs)), default=0.0)
                if newest > one.changed:
                    raise TulaError("a job of it was submitted meanwhile; nothing of it was freed")
        yield
