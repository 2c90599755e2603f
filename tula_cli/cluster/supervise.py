"""What the scheduler runs: starts the ranks as children, outlives them, and decides what comes next.

A supervisor imports no torch. When its ranks have failed it reads what they wrote and starts fresh processes: an
out-of-memory leaves the peers in a reduction, so only a new process group is clean. No command line has to be running.
"""

import contextlib
import fcntl
import itertools
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tula_cli.cluster.allocation import POLL, Place, Supervisor, deadline_of, newest, over, taken
from tula_cli.cluster.attempt import (
    close_attempt,
    closing,
    first_rank,
    meeting,
    open_attempt,
    pause,
    run_attempt,
    world_size,
)
from tula_cli.cluster.ending import Ending
from tula_cli.cluster.relaunch import LOST, TAKEN, after, no_progress, write_summary
from tula_cli.cluster.slurm import queue as scheduler
from tula_cli.errors import JobFailed, TulaError
from tula_cli.run.directory import RunDir
from tula_cli.run.records.jobs import Attempt, Job, Order
from tula_cli.run.records.tasks import ProbeTask, Task, TrainTask

LAG = 60.0
"""Seconds by which a file may appear later than another one that was written after it (NFS)."""


def supervise(path: Path, task_id: str, *, environ: Mapping[str, str] = os.environ) -> None:
    """Run a task, and what follows from it, to the end.

    Args:
        path: the run directory.
        task_id: the task to start with; a newer attempt of the same training run takes its place.
        environ: the environment of the ranks.
    """
    me = Supervisor(RunDir(path), Place.from_environment(environ), environ)
    try:
        _supervise(me, task_id)
    except TulaError as error:  # a full disk above all: nothing can be written, so the scheduler's log has to tell
        sys.stderr.write(f"tula: {error.message}. {error.hint}\n")
        raise SystemExit(error.exit_code) from error
    finally:
        me.starter.close()


def _supervise(me: Supervisor, task_id: str) -> None:
    if me.place.alone:
        with _machine_to_ourselves(me.run, newest(me.run, task_id)):
            _lead(me, task_id)
        return
    me.notice.listen()
    if me.place.index:
        _follow(me)
    else:
        me.ends_at = scheduler.ends_at(me.place.job_id, me.environ)
        _lead(me, task_id)


# --- the supervisor of task 0, and the others


def _lead(me: Supervisor, task_id: str) -> None:
    """Start attempt after attempt until the job is over, telling the other supervisors each time."""
    for first in _packed(me.run, task_id):
        if me.notice.given:
            break
        _lead_task(me, first)
    _tell(me, Order(task=None))


def _packed(run: RunDir, task_id: str) -> list[Task]:
    """Return the task and those that share its allocation (search.packing: single)."""
    first = newest(run, task_id)
    others = [newest(run, other) for other in first.then] if isinstance(first, ProbeTask) else []
    return [first, *others]


def _lead_task(me: Supervisor, first: Task) -> None:
    deadline = deadline_of(first)
    task = _take_up(me, first)
    while task is not None and not over(me.run, task):
        attempt = open_attempt(me, task)
        try:
            order = Order(task=task.id, attempt=attempt.number, ranks=world_size(task), meeting=meeting(task))
        except JobFailed as error:
            ending = Ending("user", f"{error.message}; {error.hint}", host=socket.gethostname())
            after(me.run, task, ending, 0)
            close_attempt(me.run, attempt, ending)
            break
        _tell(me, order)
        ending = closing(me, task, attempt, run_attempt(me, task, attempt, order, deadline))
        taken = ending.outcome in TAKEN or (ending.outcome is not None and me.notice.given)
        following = None if taken else after(me.run, task, ending, _lost(me, task) + (ending.outcome in LOST))
        # Last: who sees the attempt ended may rely on everything that follows from it.
        close_attempt(me.run, attempt, ending)
        if taken and not me.run.cancelled(task.job):
            return  # the next link of the chain goes on
        task = following
    _conclude(me, task or first)


def _conclude(me: Supervisor, task: Task) -> None:
    """Write what an earlier supervisor still owed, and give the queue back the links that are not needed."""
    if not isinstance(task, TrainTask):
        return
    if me.run.training(task.signature).result() and not me.run.training(task.signature).summary():
        write_summary(me.run, task)
    job = _own_job(me, task)
    if job is not None:
        scheduler.cancel([link for link in job.links if link != me.place.job_id])


def _tell(me: Supervisor, order: Order) -> None:
    number = next(me.numbers)
    if me.place.count > 1:
        me.run.write_order(me.place.allocation, number, order)


def _follow(me: Supervisor) -> None:
    """Do what the supervisor of task 0 says, until it says that the job is over.

    Where it is killed, srun's --kill-on-bad-exit ends this process too.
    """
    deadlines: dict[str, float] = {}
    for number in itertools.count():
        while (order := me.run.order(me.place.allocation, number)) is None:
            if me.notice.given:
                return
            pause(me)
        if order.task is None:
            return
        task, attempt = _subject(me, order.task, order.attempt)
        if first_rank(me, task) >= order.ranks:
            continue  # a smaller number of nodes is being measured
        run_attempt(me, task, attempt, order, deadlines.setdefault(task.id, deadline_of(task)))


def _subject(me: Supervisor, task_id: str, number: int) -> tuple[Task, Attempt]:
    """Return the task and the attempt that an order is about: written before it, but NFS may show the order first.

    Raises:
        TulaError: they do not appear.
    """
    deadline = time.monotonic() + LAG
    while True:
        task, attempt = me.run.task(task_id), me.run.attempt(task_id, number)
        if task is not None and attempt is not None:
            return task, attempt
        if time.monotonic() > deadline:
            raise TulaError(f"the order of task 0 came, but not what it is about, in {LAG:g} s")
        time.sleep(POLL)


@contextlib.contextmanager
def _machine_to_ourselves(run: RunDir, task: Task) -> Iterator[None]:
    """Wait until no other job of this user runs here: jobs side by side would spoil each other's times.

    The lock lives on the machine, not in the run directory, and the kernel drops it with this process. A job that is
    cancelled while it waits goes on without it, to find that it is over.
    """
    path = Path(tempfile.gettempdir()) / f"tula-{os.getuid()}.lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not (_locked(lock) or run.cancelled(task.job)):
            time.sleep(POLL)
        yield
    finally:
        os.close(lock)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --- after earlier allocations


def _take_up(me: Supervisor, task: Task) -> Task | None:
    """Continue where the earlier links of the chain have left a training; None where they say that it is over."""
    _close_lost(me, task)
    if not isinstance(task, TrainTask):
        return task
    job = _own_job(me, task)
    if job is not None and _predecessor_cancelled(me, job):
        me.run.cancel(task.job, by="scancel")
    earlier = _of_submission(me, task)
    if not earlier or earlier[-1].task != task.id:
        return task  # the first of this submission, or its relaunch is written already
    last = _corrected(me, earlier[-1])
    if last.outcome == "cancelled" and not me.place.alone:
        me.run.cancel(task.job, by="scancel")
    if why := no_progress(earlier, me.run.training(task.signature).progress(), task.spec.train.max_attempts):
        me.run.write_attempt(last.model_copy(update={"message": f"{last.message}; {why}"}))
        return None
    if last.outcome not in (*LOST, *TAKEN, "host_oom", "device_oom"):  # an OOM whose relaunch nobody has written yet
        return None
    return after(me.run, task, Ending(last.outcome, last.message), _lost(me, task))


def _corrected(me: Supervisor, last: Attempt) -> Attempt:
    """Return an attempt with why its allocation was ended, where its own supervisor could not tell yet."""
    if last.outcome != "signal" or last.allocation in ("", me.place.allocation):
        return last
    how = taken(last.allocation)
    if how.outcome == "signal":
        return last
    found = last.model_copy(update={"outcome": how.outcome, "message": how.message})
    me.run.write_attempt(found)
    return found


def _own_job(me: Supervisor, task: Task) -> Job | None:
    """Return the submission that this allocation belongs to; None while the command line has not written it."""
    job = me.run.job(task.job)
    return job if job is not None and me.place.job_id in job.links else None


def _predecessor_cancelled(me: Supervisor, job: Job) -> bool:
    """Return whether the user has ended the link before this one (scancel): it stays ended."""
    before = job.links[: job.links.index(me.place.job_id)]
    return bool(before) and scheduler.ended_how(before[-1]) == "cancelled"


def _of_submission(me: Supervisor, task: TrainTask) -> list[Attempt]:
    """Return the attempts that earlier links of this submission have made; the user's new submission begins anew."""
    attempts = me.run.training(task.signature).attempts()
    if me.place.alone:
        return [attempt for attempt in attempts if attempt.started_at >= me.since]
    job = _own_job(me, task)
    links = job.links if job is not None else (me.place.job_id,)
    return [attempt for attempt in attempts if attempt.allocation.partition(".")[0] in links]


def _lost(me: Supervisor, task: Task) -> int:
    """Return how many attempts of this job have lost their processes so far."""
    if isinstance(task, TrainTask):
        progress = me.run.training(task.signature).progress()  # those that have advanced it do not count
        attempts = [attempt for attempt in _of_submission(me, task) if attempt.progress == progress]
    else:
        attempts = [attempt for attempt in me.run.attempts(task.id) if attempt.started_at >= me.since]
    return sum(attempt.outcome in LOST for attempt in attempts)


# --- one attempt


def _close_lost(me: Supervisor, task: Task) -> None:
    """Close attempts whose supervisor was killed, at their log's last sign of life, with what the scheduler says."""
    run = me.run
    attempts = run.training(task.signature).attempts() if isinstance(task, TrainTask) else run.attempts(task.id)
    for lost in attempts:
        if lost.ended_at is None:
            log = run.log_path(lost.task, lost.number)
            ended = log.stat().st_mtime if log.exists() else lost.started_at
            how = taken(lost.allocation) if lost.allocation else Ending("signal", "its supervisor was killed")
            run.write_attempt(
                lost.model_copy(update={"ended_at": ended, "outcome": how.outcome, "message": how.message})
            )
