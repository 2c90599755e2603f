"""What the scheduler runs: starts the ranks as children, outlives them, and decides what comes next.

A supervisor imports no torch. When its ranks have failed it reads what they wrote and starts fresh processes: an
out-of-memory leaves the peers in a reduction, so only a new process group is clean. No command line has to be running.
"""

import contextlib
import fcntl
import itertools
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tula_cli import ending as judge
from tula_cli import network, sbatch, scheduler
from tula_cli.ending import Ending, Seen
from tula_cli.errors import JobFailed, TulaError
from tula_cli.forkserver import Start
from tula_cli.group import Group, Starter
from tula_cli.records import Attempt, CheckTask, Job, Order, OutcomeClass, ProbeTask, Task, TrainTask
from tula_cli.relaunch import LOST, TAKEN, after, no_progress, write_summary
from tula_cli.rundir import RunDir

LAG = 60.0
"""Seconds by which a file may appear later than another one that was written after it (NFS)."""
POLL = 0.2  # seconds
POLL_MOST = 2.0
"""Seconds between two looks at the run directory where many supervisors share it: a few dozen looks a second in all."""
PEER_GRACE = 5.0
"""Seconds the other ranks get to end by themselves once one has failed, and to say why."""
END_GRACE = 10.0
"""Seconds between asking child processes to end and killing them."""
NOTICE_GRACE = 25.0
"""The same when the scheduler ends the allocation: it kills everything itself after its KillWait, 30 s by default."""
VERDICT = 1.0
"""Seconds that the scheduler gets to know why it has ended an allocation: its accounting lags."""
SLACK = (0.05, 10.0, 60.0)
"""How long before its time limit an allocation should be empty: a share of what is left of it, and its bounds (s)."""


@dataclass(frozen=True)
class Place:
    """Which of a job's supervisors this is: one a rank or one a node on SLURM, one for all ranks on this machine."""

    index: int
    count: int
    local_index: int = 0  # on its node
    job_id: str = ""  # SLURM's
    restarts: int = 0  # how often SLURM has requeued it
    hosts: str = ""  # as SLURM writes them

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "Place":
        if "SLURM_PROCID" not in environ:
            return cls(0, 1)
        return cls(
            index=int(environ["SLURM_PROCID"]),
            count=int(environ["SLURM_NTASKS"]),
            local_index=int(environ["SLURM_LOCALID"]),
            job_id=environ["SLURM_JOB_ID"],
            restarts=int(environ.get("SLURM_RESTART_COUNT", "0")),
            hosts=environ.get("SLURM_JOB_NODELIST", ""),
        )

    @property
    def poll(self) -> float:
        return min(POLL_MOST, max(POLL, self.count / 50))

    @property
    def alone(self) -> bool:
        return not self.job_id

    @property
    def allocation(self) -> str:
        return "" if self.alone else f"{self.job_id}.{self.restarts}"


@dataclass
class Notice:
    """Whether the scheduler has asked this job to end: a time limit, a preemption, a cancel, a lost node."""

    given: bool = False

    def listen(self) -> None:
        """Take the signals from submitit, which would end this process over the one that warns of the time limit."""
        signal.signal(signal.SIGTERM, self._take)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
            signal.signal(number, _ignore)

    def _take(self, *_: object) -> None:
        self.given = True


def _ignore(*_: object) -> None:
    """The clock says the same as the signal that warns of a time limit, and SIGCONT comes before each SIGTERM."""


@dataclass
class Supervisor:
    """This process: its run, its place among the job's supervisors, and what it has been told."""

    run: RunDir
    place: Place
    environ: Mapping[str, str]
    notice: Notice = field(default_factory=Notice)
    since: float = field(default_factory=time.time)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    ends_at: float | None = None  # Unix time of the allocation's end, where it has one
    starter: Starter = field(default_factory=Starter)


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
        with _machine_to_ourselves(me.run, _newest(me.run, task_id)):
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
    first = _newest(run, task_id)
    others = [_newest(run, other) for other in first.then] if isinstance(first, ProbeTask) else []
    return [first, *others]


def _lead_task(me: Supervisor, first: Task) -> None:
    deadline = _deadline(first)
    task = _take_up(me, first)
    while task is not None and not _over(me.run, task):
        attempt = _open_attempt(me, task)
        try:
            order = Order(task=task.id, attempt=attempt.number, ranks=_world(task), meeting=_meeting(task))
        except JobFailed as error:
            ending = Ending("user", f"{error.message}; {error.hint}", host=socket.gethostname())
            after(me.run, task, ending, 0)
            _close_attempt(me.run, attempt, ending)
            break
        _tell(me, order)
        ending = _closing(me, task, attempt, _attempt(me, task, attempt, order, deadline))
        taken = ending.outcome in TAKEN or (ending.outcome is not None and me.notice.given)
        following = None if taken else after(me.run, task, ending, _lost(me, task) + (ending.outcome in LOST))
        # Last: who sees the attempt ended may rely on everything that follows from it.
        _close_attempt(me.run, attempt, ending)
        if taken and not me.run.cancelled(task.job):
            return  # the next link of the chain goes on
        task = following
    _conclude(me, task or first)


def _conclude(me: Supervisor, task: Task) -> None:
    """Write what an earlier supervisor still owed, and give the queue back the links that are not needed."""
    if not isinstance(task, TrainTask):
        return
    if me.run.train_result(task.signature) and not me.run.summary(task.signature):
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
            _pause(me)
        if order.task is None:
            return
        task, attempt = _subject(me, order.task, order.attempt)
        if _first_rank(me, task) >= order.ranks:
            continue  # a smaller number of nodes is being measured
        _attempt(me, task, attempt, order, deadlines.setdefault(task.id, _deadline(task)))


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


def _deadline(task: Task) -> float:
    """Return when a job that starts now has to end, however often its ranks are started: its cost is bounded."""
    match task:
        case TrainTask():
            return float("inf")
        case ProbeTask():
            return time.monotonic() + 60 * task.spec.search.max_minutes
        case CheckTask():
            return time.monotonic() + 60 * CheckTask.MINUTES


def _overdue(task: Task) -> str:
    if isinstance(task, CheckTask):
        return f"stopped after {CheckTask.MINUTES:g} minutes"
    return f"stopped after search.max_minutes: {task.spec.search.max_minutes:g}"


def _newest(run: RunDir, task_id: str) -> Task:
    task = run.task(task_id)
    assert task is not None, f"{run.path} has no task {task_id}"
    if isinstance(task, TrainTask):
        return run.newest_train_task(task.signature) or task
    return task


def _over(run: RunDir, task: Task) -> bool:
    """Return whether nothing is left to do: start is resume."""
    return run.cancelled(task.job) or _finished(run, task)


def _finished(run: RunDir, task: Task) -> bool:
    """Return whether every result of a task is there: success is a valid result file."""
    match task:
        case TrainTask():
            return run.train_result(task.signature) is not None
        case ProbeTask():
            return run.current_probe(task) is None
        case CheckTask():
            return run.cluster_report(task.id) is not None


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
    if why := no_progress(earlier, me.run.progress(task.signature), task.spec.train.max_attempts):
        me.run.write_attempt(last.model_copy(update={"message": f"{last.message}; {why}"}))
        return None
    if last.outcome not in (*LOST, *TAKEN, "host_oom", "device_oom"):  # an OOM whose relaunch nobody has written yet
        return None
    return after(me.run, task, Ending(last.outcome, last.message), _lost(me, task))


def _corrected(me: Supervisor, last: Attempt) -> Attempt:
    """Return an attempt with why its allocation was ended, where its own supervisor could not tell yet."""
    if last.outcome != "signal" or last.allocation in ("", me.place.allocation):
        return last
    how = _taken(last.allocation)
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
    attempts = me.run.training_attempts(task.signature)
    if me.place.alone:
        return [attempt for attempt in attempts if attempt.started_at >= me.since]
    job = _own_job(me, task)
    links = job.links if job is not None else (me.place.job_id,)
    return [attempt for attempt in attempts if attempt.allocation.partition(".")[0] in links]


def _lost(me: Supervisor, task: Task) -> int:
    """Return how many attempts of this job have lost their processes so far."""
    if isinstance(task, TrainTask):
        progress = me.run.progress(task.signature)  # those that have advanced it do not count
        attempts = [attempt for attempt in _of_submission(me, task) if attempt.progress == progress]
    else:
        attempts = [attempt for attempt in me.run.attempts(task.id) if attempt.started_at >= me.since]
    return sum(attempt.outcome in LOST for attempt in attempts)


# --- one attempt


def _close_lost(me: Supervisor, task: Task) -> None:
    """Close attempts whose supervisor was killed, at their log's last sign of life, with what the scheduler says."""
    run = me.run
    attempts = run.training_attempts(task.signature) if isinstance(task, TrainTask) else run.attempts(task.id)
    for lost in attempts:
        if lost.ended_at is None:
            log = run.log_path(lost.task, lost.number)
            ended = log.stat().st_mtime if log.exists() else lost.started_at
            how = _taken(lost.allocation) if lost.allocation else Ending("signal", "its supervisor was killed")
            run.write_attempt(
                lost.model_copy(update={"ended_at": ended, "outcome": how.outcome, "message": how.message})
            )


_TAKEN_WORDS: dict[OutcomeClass, str] = {
    "time_limit": "time limit of job {0} reached",
    "preempted": "job {0} was preempted",
    "node_failure": "a node of job {0} failed",
    "cancelled": "job {0} was cancelled (scancel)",
    "host_oom": "job {0} was out of memory",
}


def _taken(allocation: str) -> Ending:
    """Tell how the scheduler ended an allocation."""
    job_id, _, restarts = allocation.partition(".")
    deadline = time.monotonic() + VERDICT
    while (how := scheduler.ended_how(job_id, restart=int(restarts))) is None and time.monotonic() < deadline:
        time.sleep(POLL)
    if how in _TAKEN_WORDS:
        return Ending(how, _TAKEN_WORDS[how].format(job_id))
    return Ending("signal", f"job {job_id} was ended from outside, or its supervisor was killed")


def _open_attempt(me: Supervisor, task: Task) -> Attempt:
    attempt = Attempt(
        task=task.id,
        number=max((earlier.number for earlier in me.run.attempts(task.id)), default=0) + 1,
        started_at=time.time(),
        host=socket.gethostname(),
        pid=os.getpid(),
        allocation=me.place.allocation,
        hosts=me.place.hosts,
        samples=me.run.newest_samples(task.signature) if isinstance(task, TrainTask) else None,
        tuned=me.run.tuned_samples(task.signature) if isinstance(task, TrainTask) else 0,
    )
    me.run.write_attempt(attempt)
    return attempt


def _closing(me: Supervisor, task: Task, attempt: Attempt, ending: Ending) -> Ending:
    """Tell the end of an attempt by the scheduler's words where it has ended the allocation."""
    if me.notice.given and not _finished(me.run, task):
        ending = _taken(me.place.allocation)
        if me.run.cancelled(task.job):
            return Ending("cancelled", "cancelled by the user")
        if ending.outcome == "cancelled":
            me.run.cancel(task.job, by="scancel")
        return ending
    # A rank may lose its peers on the way out: they have left and saved all the same.
    if ending.outcome in ("unknown", "peer", "signal") and me.run.stopped(task.id, attempt.number) == "time_limit":
        return Ending("time_limit", _TAKEN_WORDS["time_limit"].format(me.place.job_id))
    return ending


def _close_attempt(run: RunDir, attempt: Attempt, ending: Ending) -> None:
    update = {
        "ended_at": time.time(),
        "outcome": ending.outcome or "done",
        "message": ending.message,
        "rank": ending.rank,
        "host": ending.host or attempt.host,
    }
    run.write_attempt(attempt.model_copy(update=update))


def _attempt(me: Supervisor, task: Task, attempt: Attempt, order: Order, deadline: float) -> Ending:
    """Start the ranks of this supervisor and wait for their end."""
    log = me.run.log_path(task.id, attempt.number, me.place.index).resolve()
    kills = judge.oom_kills()
    starts = _starts(me, task, order, log)
    with me.run.open_log(log) as output:
        try:
            group = me.starter.start(
                starts, output, give_up=lambda: me.notice.given or bool(_unwanted(me, task, deadline))
            )
        except OSError as error:  # the wrapper, or the folder where the job was submitted, is not on this node
            words = f"cannot start {starts[0].command[0]} in {starts[0].folder}: {error.strerror}"
            own = Ending("user", words, host=socket.gethostname())
            judge.report(me.run, task, attempt, Seen(127, False, log, _first_rank(me, task)), own)
            return own
        stopped = _wait(me, task, attempt, group, deadline)
    if stopped:
        return stopped
    place, code = group.failed() or (0, 0)
    return _judge(me, task, attempt, Seen(code, judge.oom_kills() > kills, log, _first_rank(me, task) + place))


def _judge(me: Supervisor, task: Task, attempt: Attempt, seen: Seen) -> Ending:
    if seen.exit_code == 0:
        return Ending(None) if _finished(me.run, task) else Ending("unknown", "the ranks ended without a result")
    own = judge.own_ending(me.run, task, attempt, seen)
    if me.place.alone or me.notice.given:
        return own
    judge.report(me.run, task, attempt, seen, own)
    if me.place.index:
        return own
    time.sleep(PEER_GRACE)  # for what the other ranks have to say
    return judge.told_by_all(me.run, task, attempt, own)


def _wait(me: Supervisor, task: Task, attempt: Attempt, group: Group, deadline: float) -> Ending | None:
    """Wait for the ranks; end them when the user cancels or their time is over. None: they ended by themselves."""
    failed_at: float | None = None
    while group.running():
        if unwanted := _unwanted(me, task, deadline):
            group.end(END_GRACE)
            return unwanted
        if me.notice.given:
            group.end(NOTICE_GRACE)
            return None
        failed = group.failed() is not None
        if failed_at is None and (failed or me.run.failures(task.id, attempt.number)):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() > failed_at + PEER_GRACE:
            return _given_up(me, task, attempt, group)
        if isinstance(task, TrainTask) and not me.place.alone and me.run.superseded(task):
            group.kill()  # this node was given up for lost, and lives: two would write one run
            return Ending("node_failure", "another allocation has taken over")
        _pause(me)
    return None


def _given_up(me: Supervisor, task: Task, attempt: Attempt, group: Group) -> Ending | None:
    """End ranks that sit in a reduction with one that is gone. None: that was one of them."""
    own = group.failed() is not None
    group.kill()
    # Not its own end, so not its own report.
    return None if own else judge.told_by_all(me.run, task, attempt, Ending("peer"))


def _unwanted(me: Supervisor, task: Task, deadline: float) -> Ending | None:
    """Tell why the ranks are to run no longer: cancelled, or overdue."""
    if me.run.cancelled(task.job):
        return Ending("cancelled", "cancelled by the user")
    return Ending("cancelled", _overdue(task)) if time.monotonic() > deadline else None


def _pause(me: Supervisor) -> None:
    """Wait until the next look at the run directory, or until the scheduler ends the job."""
    until = time.monotonic() + me.place.poll
    while not me.notice.given and (left := until - time.monotonic()) > 0:
        time.sleep(min(POLL, left))


# --- how the ranks are started


def _world(task: Task) -> int:
    return task.nodes * task.spec.cluster.gpus_per_node


def _by_torchrun(task: Task) -> bool:
    """Return whether torchrun starts the ranks of a node; else supervisors start them themselves."""
    cluster = task.spec.cluster
    return cluster.kind == "slurm" and cluster.slurm is not None and cluster.slurm.launcher == "torchrun"


def _first_rank(me: Supervisor, task: Task) -> int:
    return me.place.index * (task.spec.cluster.gpus_per_node if _by_torchrun(task) else 1)


def _meeting(task: Task) -> str:
    """Return where torchrun's agents meet; a port taken meanwhile is an ending of its own, and another is tried."""
    if not _by_torchrun(task):
        return ""
    return f"{network.own_address(task.spec.cluster.interface)}:{network.free_port()}"


def _starts(me: Supervisor, task: Task, order: Order, log: Path) -> list[Start]:
    """Return what this supervisor starts: torchrun, its own rank, or all ranks of this machine."""
    command, folder = tuple(_command(me, task, order)), _start_folder(me.run, task)
    return [Start(command, environment, folder, str(log)) for environment in _environments(me, task)]


def _command(me: Supervisor, task: Task, order: Order) -> list[str]:
    """Return the command of a rank, or of torchrun, which starts those of a node."""
    worker = ["-m", "tula_cli.worker", str(me.run.path.resolve()), task.id, str(order.attempt)]
    wrapper = [] if me.place.alone else sbatch.wrapper(task.spec, environ=me.environ)
    if not _by_torchrun(task):
        return [*wrapper, sys.executable, "-u", *worker]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=0"]
    address, _, port = order.meeting.rpartition(":")
    place = [f"--nnodes={task.nodes}", f"--node-rank={me.place.index}"]
    meeting = [f"--master-addr={address}", f"--master-port={port}"]
    ranks = f"--nproc-per-node={task.spec.cluster.gpus_per_node}"
    if not wrapper:
        return [*torchrun, *place, *meeting, ranks, *worker]
    return [*torchrun, *place, *meeting, ranks, "--no-python", *wrapper, sys.executable, "-u", *worker]


def _start_folder(run: RunDir, task: Task) -> str:
    """Return where python finds the user's code first: what was submitted is what runs. The ranks then go to workdir."""
    code = run.code_dir(task.code) if task.code else Path(task.workdir)
    return str(code) if code.is_dir() else task.workdir  # the ranks say what is missing


def _environments(me: Supervisor, task: Task) -> list[dict[str, str]]:
    """Return the environment of each process that this supervisor starts."""
    own = {**me.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(_threads(me, task)), **_time_limit(me)}
    if _by_torchrun(task):
        return [own]
    # A rendezvous of the site's set-up lines, or of a shell, is not ours.
    own = {name: value for name, value in own.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    world = _world(task)
    places = [(rank, rank) for rank in range(world)] if me.place.alone else [(me.place.index, me.place.local_index)]
    return [{**own, "RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(world)} for rank, local in places]


def _threads(me: Supervisor, task: Task) -> int:
    """Return the threads of a rank. On this machine the ranks share its cores, one thread each."""
    if me.place.alone:
        return 1
    threads = int(me.environ.get("SLURM_CPUS_PER_TASK", "1"))
    return max(1, threads // task.spec.cluster.gpus_per_node) if _by_torchrun(task) else threads


def _time_limit(me: Supervisor) -> dict[str, str]:
    """Tell the ranks when to save and leave: some time before the allocation ends."""
    if me.ends_at is None:
        return {}
    share, least, most = SLACK
    slack = min(most, max(least, share * (me.ends_at - time.time())))
    return {"TULA_LEAVE_AT": f"{me.ends_at - slack:.1f}"}
