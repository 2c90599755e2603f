"""`tula clean`: measure the disk space of runs and remove what is no longer needed.

Nothing is removed from a run that a job may still write to.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tula_cli.cluster.local import LocalLauncher
from tula_cli.cluster.scheduler import SchedulerState, make_scheduler
from tula_cli.cluster.slurm import queue
from tula_cli.errors import CannotWrite, NotYours, TulaError
from tula_cli.host import machine_lock
from tula_cli.run import format as run_format
from tula_cli.run.clean import CleanPolicy, RemovableEntry, list_removable_entries, measure_disk_usage, remove_entry
from tula_cli.run.directory import RunDir
from tula_cli.run.files import read_change_time
from tula_cli.run.records.jobs import Job
from tula_cli.run.snapshot import Snapshot
from tula_cli.spec.backend import get_backend

JUST_SUBMITTED_SECONDS = 600.0
"""Seconds after its submission for which a job that SLURM does not list counts as pending."""

StateQuery = Callable[[Sequence[str]], Mapping[str, SchedulerState]]
"""Queries SLURM for the states of jobs, by SLURM's job ids."""


@dataclass(frozen=True)
class RunDiskUsage:
    """The disk space of one run, in bytes."""

    id: str
    path: Path
    held: int  # bytes of all files of the run
    changed: float  # Unix time of the newest change
    holdings: tuple[RemovableEntry, ...]  # removable files
    kept: str = ""  # why nothing is removable now; empty if something may be removed
    lives: bool = False  # reason of `kept`: True if jobs are or may be active; False if the run is unreadable
    final: tuple[str, ...] = ()  # signatures of trainings that cannot resume after the removal
    compared: tuple[str, ...] = ()  # signatures of `tula compare` trainings that are removed entirely

    @property
    def size(self) -> int:
        return sum(holding.size for holding in self.holdings)


@dataclass(frozen=True)
class CleanResult:
    """The disk space that was freed."""

    files: int  # number of removed files and folders
    size: int  # bytes
    problems: tuple[str, ...]  # why some files could not be removed


def measure_runs_disk_usage(
    runs: Iterable[RunDir],
    *,
    keep_best: bool = False,
    compared: bool = False,
    older: float | None = None,
    ask: StateQuery = queue.query_states,
    now: Callable[[], float] = time.time,
) -> list[RunDiskUsage]:
    """Return the disk space of runs and their removable files, largest first; nothing is changed.

    SLURM is queried once for all jobs.

    Args:
        compared: remove the finished trainings of `tula compare` entirely.
        older: only runs in which nothing was written for that many seconds; None for all.
        now: Unix time.
    """
    disk_usages, snapshots = [], {}
    for run in runs:
        size, changed = measure_disk_usage(run.path)
        if older is None or now() - changed >= older:
            snapshots[run.path] = run.read_snapshot(strict=True)
            disk_usages.append(_make_run_disk_usage(run, size, changed, keep_best=keep_best, compared=compared))
    to_check = [snapshots[disk_usage.path] for disk_usage in disk_usages if disk_usage.holdings]
    reason_by_path = _find_reasons_to_keep(to_check, ask, now())
    spaces = [
        replace(disk_usage, kept=reason, lives=True, holdings=(), final=(), compared=())
        if (reason := reason_by_path.get(disk_usage.path))
        else disk_usage
        for disk_usage in disk_usages
    ]
    return sorted(spaces, key=lambda disk_usage: (-disk_usage.size, -disk_usage.held))


def _make_run_disk_usage(run: RunDir, size: int, changed: float, *, keep_best: bool, compared: bool) -> RunDiskUsage:
    """Return what can be removed from a run, with its size and last change.

    Nothing is removable if the run is damaged or of another format.
    """
    try:
        run_format.require_known_format(run.path)
        cells = comparison.cells if compared and (comparison := run.read_comparison()) else ()
        policy = CleanPolicy(keep_best, frozenset(cell.signature for cell in cells))
        removable = tuple(list_removable_entries(run.path, policy))
    except TulaError as error:
        return RunDiskUsage(run.id, run.path, size, changed, (), kept=error.message)
    final = _list_training_signatures(
        entry for entry in removable if entry.kind == "checkpoints" and _is_newest_checkpoint(entry.path)
    )
    compared_trainings = _list_training_signatures(entry for entry in removable if entry.kind == "compared")
    return RunDiskUsage(run.id, run.path, size, changed, removable, final=final, compared=compared_trainings)


def _list_training_signatures(entries: Iterable[RemovableEntry]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(entry.path.parent.parent.name for entry in entries))


def _is_newest_checkpoint(path: Path) -> bool:
    """Return whether there is no later checkpoint to resume from."""
    return all(checkpoint.name <= path.name for checkpoint in path.parent.glob("[0-9]*"))


# --- Runs with active jobs


def _find_reasons_to_keep(snapshots: Sequence[Snapshot], ask: StateQuery, now: float) -> dict[Path, str]:
    """Return, by run, the reason why nothing may be removed: a job that is or may be active; empty if there is none."""
    ids = [
        id_
        for snapshot in snapshots
        for job in _list_readable_jobs(snapshot)
        if job.scheduler == "slurm"
        for id_ in job.scheduler_ids
    ]
    states = ask(ids) if ids else {}
    holders = [ticket.holder for ticket in machine_lock.list_living_tickets()]
    return {snapshot.path: _describe_active_job(snapshot, states, holders, now) for snapshot in snapshots}


def _list_readable_jobs(snapshot: Snapshot) -> list[Job]:
    with contextlib.suppress(TulaError):
        return snapshot.jobs
    return []


def _describe_active_job(
    snapshot: Snapshot, states: Mapping[str, SchedulerState], holders: Sequence[str], now: float
) -> str:
    try:
        jobs = snapshot.jobs
        if snapshot.damaged_jobs:
            return f"{snapshot.damaged_jobs[0].message}, so it is unknown whether the job of that file is running"
        local = LocalLauncher().query_states(snapshot, [job for job in jobs if job.scheduler == "local"])
        # SLURM was asked for the jobs of all runs at once; every other scheduler is asked for those of this run.
        if job_ids := [id_ for job in jobs if job.scheduler not in ("local", "slurm") for id_ in job.scheduler_ids]:
            states = {**states, **make_scheduler(RunDir(snapshot.path).read_spec().cluster).query_states(job_ids)}
    except TulaError as error:
        return error.message
    for name, _, run in (holder.partition(" of ") for holder in holders):
        if run == str(snapshot.resolved_path):
            return f"job {name} is running or waiting on this machine"
    for job in jobs:
        state = local[job.id] if job.scheduler == "local" else _find_chain_state(job, states, now)
        if state.state != "ended":
            reason_text = f" ({state.reason})" if state.reason else ""
            scheduler_title = get_backend(job.scheduler).title
            description = (
                f"may be running: {scheduler_title} does not answer"
                if state.state == "unknown"
                else f"is {state.state}"
            )
            return f"{job.id} {description}{reason_text}"
    return ""


def _find_chain_state(job: Job, known: Mapping[str, SchedulerState], now: float) -> SchedulerState:
    """Return the state of a job: that of the first of its chained scheduler jobs that has not ended."""
    states = [known[id_] for id_ in job.scheduler_ids if id_ in known]
    if len(states) < len(job.scheduler_ids) and now - job.submitted_at < JUST_SUBMITTED_SECONDS:
        return SchedulerState("pending", "just submitted")
    return next((state for state in states if state.state != "ended"), SchedulerState("ended"))


# --- Removal


def remove_files(disk_usages: Iterable[RunDiskUsage]) -> CleanResult:
    """Remove the removable files of `disk_usages`; runs with jobs submitted in the meantime are left unchanged.

    If interrupted, the same call removes the remaining files.

    Raises:
        TulaError: no file could be removed; `NotYours` or a `CannotWrite` of one class if that is why for all runs.
    """
    files, size, problems, errors = 0, 0, [], set()
    for disk_usage in disk_usages:
        if not disk_usage.holdings:
            continue
        try:
            with _lock_run(disk_usage):
                for holding in disk_usage.holdings:
                    remove_entry(holding)
                    files, size = files + 1, size + holding.size
        except TulaError as error:
            problems.append(f"{disk_usage.id}: {error.message}")
            errors.add(type(error) if isinstance(error, CannotWrite | NotYours) else TulaError)
    if problems and not files:
        error_class = errors.pop() if len(errors) == 1 else TulaError
        raise error_class(
            f"cannot delete the files: {'; '.join(problems)}", "resolve the cause, and run the same command again"
        )
    return CleanResult(files, size, tuple(problems))


@contextlib.contextmanager
def _lock_run(disk_usage: RunDiskUsage) -> Iterator[None]:
    """Lock a run so that no other command submits jobs for it.

    Raises:
        TulaError: another command is submitting jobs, or has submitted some since the run was measured.
    """
    lock = RunDir(disk_usage.path).lock
    if lock.acquire() and (owner := lock.acquire()):  # the first call removes the lock of a killed command
        raise TulaError(
            f"another tula command ({owner}) is submitting jobs of this run; no file of the run was deleted"
        )
    try:
        with contextlib.suppress(FileNotFoundError):
            times = (read_change_time(path, follow_symlinks=False) for path in (disk_usage.path / "jobs").iterdir())
            newest = max(times, default=0.0)
            if newest > disk_usage.changed:
                raise TulaError("a job was submitted for this run in the meantime; no file of the run was deleted")
        yield
    finally:
        lock.release()
