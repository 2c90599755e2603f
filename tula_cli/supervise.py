"""What the scheduler runs: starts the ranks as children, outlives them, and decides what comes next.

A supervisor imports no torch. When its ranks have failed it reads what they wrote and starts fresh processes: an
out-of-memory leaves the peers in a reduction, so only a new process group is clean. No command line has to be running.
"""

import contextlib
import fcntl
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tula_cli.errors import TulaError
from tula_cli.models.cost import cost
from tula_cli.outcome import classify, root
from tula_cli.processes import die_with_parent
from tula_cli.records import (
    Attempt,
    Failed,
    Failure,
    Order,
    OutcomeClass,
    OutOfMemory,
    Prediction,
    ProbeTask,
    Summary,
    TrainTask,
)
from tula_cli.rundir import RunDir, probe_id

POLL = 0.2  # seconds
PEER_GRACE = 5.0
"""Seconds the other ranks get to end by themselves once one has failed, and to say why."""
END_GRACE = 10.0
"""Seconds between asking child processes to end and killing them."""
TAIL = 20_000  # bytes of a log that are read for its last words
RESTARTS = 2
"""How often a probe job starts again after a lost process (not after an out-of-memory or the user's own error)."""
RESTARTED: tuple[OutcomeClass, ...] = ("signal", "peer", "port", "unknown")

_CRASH = re.compile(r"exitcode *: *-(?:11|6)\b")  # SIGSEGV, SIGABRT

Task = ProbeTask | TrainTask


@dataclass(frozen=True)
class Place:
    """Which of a job's supervisors this is: one a rank under srun, one for all ranks on this machine."""

    index: int
    count: int
    local_index: int = 0  # on its node
    allocation: str = ""  # the scheduler's job id

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "Place":
        if "SLURM_PROCID" not in environ:
            return cls(0, 1)
        return cls(
            index=int(environ["SLURM_PROCID"]),
            count=int(environ["SLURM_NTASKS"]),
            local_index=int(environ["SLURM_LOCALID"]),
            allocation=environ["SLURM_JOB_ID"] + "." + environ.get("SLURM_RESTART_COUNT", "0"),
        )

    @property
    def alone(self) -> bool:
        return not self.allocation


@dataclass(frozen=True)
class Ending:
    """How the children of one attempt ended; `outcome` None is well."""

    outcome: OutcomeClass | None
    message: str = ""
    rank: int | None = None
    host: str = ""


def supervise(path: Path, task_id: str, *, environ: Mapping[str, str] = os.environ) -> None:
    """Run a task, and what follows from it, to the end.

    Args:
        path: the run directory.
        task_id: the task to start with; a newer attempt of the same training run takes its place.
        environ: the environment of the ranks.
    """
    try:
        _supervise(RunDir(path), task_id, environ)
    except TulaError as error:  # a full disk above all: nothing can be written, so the scheduler's log has to tell
        sys.stderr.write(f"tula: {error.message}. {error.hint}\n")
        raise SystemExit(error.exit_code) from error


def _supervise(run: RunDir, task_id: str, environ: Mapping[str, str]) -> None:
    place = Place.from_environment(environ)
    if place.index:
        _follow(run, place, environ)
    elif place.alone:
        with _machine_to_ourselves(run, _newest(run, task_id)):
            _lead(run, task_id, place, environ)
    else:
        _lead(run, task_id, place, environ)


def _lead(run: RunDir, task_id: str, place: Place, environ: Mapping[str, str]) -> None:
    """Start attempt after attempt until the job is over, telling the other supervisors each time."""
    first = _newest(run, task_id)
    deadline = _deadline(first)
    task: Task | None = first
    restarts = 0
    for number in itertools.count():
        if task is None or _over(run, task):
            break
        attempt = _open_attempt(run, task)
        _tell(run, place, number, Order(task=task.id, attempt=attempt.number))
        ending = _attempt(run, task, attempt, place, environ, deadline)
        restarts += ending.outcome in RESTARTED
        task = _next(run, task, ending, restarts)
        # Last: who sees the attempt ended may rely on everything that follows from it.
        _close_attempt(run, attempt, ending)
    _tell(run, place, number, Order(task=None))
    if isinstance(task, TrainTask) and run.train_result(task.signature) and not run.summary(task.signature):
        _write_summary(run, task)  # an earlier supervisor was killed just before


def _tell(run: RunDir, place: Place, number: int, order: Order) -> None:
    if place.count > 1:
        run.write_order(place.allocation, number, order)


def _follow(run: RunDir, place: Place, environ: Mapping[str, str]) -> None:
    """Do what the supervisor of task 0 says, until it says that the job is over.

    Where it is killed, srun's --kill-on-bad-exit ends this process too.
    """
    deadline: float | None = None
    for number in itertools.count():
        while (order := run.order(place.allocation, number)) is None:
            time.sleep(POLL)
        if order.task is None:
            return
        task = run.task(order.task)
        assert task is not None
        attempt = next(a for a in run.attempts(task.id) if a.number == order.attempt)
        deadline = deadline or _deadline(task)
        _attempt(run, task, attempt, place, environ, deadline)


def _deadline(task: Task) -> float:
    """Return when a job that starts now has to end, however often its ranks are started: its cost is bounded."""
    return time.monotonic() + 60 * task.spec.search.max_minutes if isinstance(task, ProbeTask) else float("inf")


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
    if isinstance(task, TrainTask):
        return run.train_result(task.signature) is not None
    return run.current_probe(task) is None


@contextlib.contextmanager
def _machine_to_ourselves(run: RunDir, task: Task | None) -> Iterator[None]:
    """Wait until no other job of this user runs here: jobs side by side would spoil each other's times.

    The lock lives on the machine, not in the run directory, and the kernel drops it with this process. A job that is
    cancelled while it waits goes on without it, to find that it is over.
    """
    assert task is not None
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


# --- one attempt


def _open_attempt(run: RunDir, task: Task) -> Attempt:
    """Record the start; an attempt whose supervisor was killed is closed first, at its log's last sign of life."""
    earlier = run.attempts(task.id)
    for lost in earlier:
        if lost.ended_at is None:
            log = run.log_path(task.id, lost.number)
            ended = log.stat().st_mtime if log.exists() else lost.started_at
            update = {"ended_at": ended, "outcome": "signal", "message": "its supervisor was killed"}
            run.write_attempt(lost.model_copy(update=update))
    attempt = Attempt(
        task=task.id, number=len(earlier) + 1, started_at=time.time(), host=socket.gethostname(), pid=os.getpid()
    )
    run.write_attempt(attempt)
    return attempt


def _close_attempt(run: RunDir, attempt: Attempt, ending: Ending) -> None:
    update = {
        "ended_at": time.time(),
        "outcome": ending.outcome or "done",
        "message": ending.message,
        "rank": ending.rank,
        "host": ending.host or attempt.host,
    }
    run.write_attempt(attempt.model_copy(update=update))


def _attempt(
    run: RunDir, task: Task, attempt: Attempt, place: Place, environ: Mapping[str, str], deadline: float
) -> Ending:
    """Start the ranks of this supervisor and wait for their end."""
    log = run.log_path(task.id, attempt.number, place.index)
    log.parent.mkdir(parents=True, exist_ok=True)
    kills = _kernel_oom_kills()
    with open(log, "ab") as output:
        child = subprocess.Popen(
            _command(run, task, attempt, place),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(environ, place),
            cwd=task.workdir,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        stopped = _wait(run, task, attempt, child, deadline)
    if stopped:
        return stopped
    return _judge(run, task, attempt, place, exit_code=child.returncode, oom_kill=_kernel_oom_kills() > kills)


def _command(run: RunDir, task: Task, attempt: Attempt, place: Place) -> list[str]:
    """Return torchrun with every rank of the job on this machine, or one rank under srun."""
    world = task.nodes * task.spec.cluster.gpus_per_node
    if not place.alone:
        return [sys.executable, "-u", "-m", "tula_cli.worker", str(run.path.resolve()), task.id, str(attempt.number)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=0"]
    worker = ["-m", "tula_cli.worker", str(run.path.resolve()), task.id, str(attempt.number)]
    return [*torchrun, f"--nproc-per-node={world}", *worker]


def _environment(environ: Mapping[str, str], place: Place) -> dict[str, str]:
    """Return the ranks' environment. On this machine they share its cores, one thread each."""
    own = {**environ, "PYTHONUNBUFFERED": "1"}
    if place.alone:
        return {**own, "OMP_NUM_THREADS": "1"}
    threads = environ.get("SLURM_CPUS_PER_TASK", "1")
    numbers = {"RANK": place.index, "WORLD_SIZE": place.count, "LOCAL_RANK": place.local_index}
    return {**own, "OMP_NUM_THREADS": threads, **{name: str(value) for name, value in numbers.items()}}


def _wait(
    run: RunDir, task: Task, attempt: Attempt, child: "subprocess.Popen[bytes]", deadline: float
) -> Ending | None:
    """Wait for the child; end it when the user cancels or its time is over. None: it ended by itself."""
    failed_at: float | None = None
    while child.poll() is None:
        if run.cancelled(task.job):
            _end(child)
            return Ending("cancelled", "cancelled by the user")
        if time.monotonic() > deadline:
            _end(child)
            return Ending("cancelled", f"stopped after search.max_minutes: {task.spec.search.max_minutes:g}")
        if failed_at is None and run.failures(task.id, attempt.number):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() > failed_at + PEER_GRACE:
            _end(child)  # it sits in a reduction with a rank that is gone
            return None
        time.sleep(POLL)
    return None


def _end(child: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_GRACE)
            return


def _kernel_oom_kills() -> int:
    """Return how many processes the kernel has killed for memory since it started."""
    for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0


def _judge(run: RunDir, task: Task, attempt: Attempt, place: Place, *, exit_code: int, oom_kill: bool) -> Ending:
    """Tell how the ranks ended: by what they wrote, else by the last words of their log."""
    if exit_code == 0:
        return Ending(None) if _finished(run, task) else Ending("unknown", "the ranks ended without a result")
    ending = _own_ending(run, task, attempt, place, exit_code=exit_code, oom_kill=oom_kill)
    if place.alone:
        return ending
    return _common_ending(run, task, attempt, place, ending)


def _common_ending(run: RunDir, task: Task, attempt: Attempt, place: Place, own: Ending) -> Ending:
    """Write down how this rank ended, if it has not itself, and tell the attempt's end from what all ranks wrote."""
    if not any(failure.rank == place.index for failure in run.failures(task.id, attempt.number)):
        run.write_failure(
            Failure(
                task=task.id,
                attempt=attempt.number,
                rank=place.index,
                host=socket.gethostname(),
                pid=os.getpid(),
                outcome=own.outcome or "unknown",
                message=own.message,
                detail=_last_words(run.log_path(task.id, attempt.number, place.index)),
                failed_at=time.time(),
            )
        )
    if place.index:
        return own
    time.sleep(PEER_GRACE)  # for what the other ranks have to say
    failure = root(run.failures(task.id, attempt.number))
    return Ending(failure.outcome, failure.message, failure.rank, failure.host) if failure else own


def _own_ending(run: RunDir, task: Task, attempt: Attempt, place: Place, *, exit_code: int, oom_kill: bool) -> Ending:
    """Tell how this supervisor's ranks ended."""
    device = "cpu" if task.spec.cluster.device == "cpu" or not Path("/dev/nvidiactl").exists() else "cuda"
    failure = root(run.failures(task.id, attempt.number))
    if failure is not None and failure.outcome != "peer":
        return Ending(failure.outcome, failure.message, failure.rank, failure.host)
    words = _last_words(run.log_path(task.id, attempt.number, place.index))
    root_cause = words.rpartition("Root Cause")[2]  # torchrun's summary of the rank that failed first
    outcome = classify(words, exit_code=exit_code, device=device)
    if outcome in ("peer", "unknown"):  # that a rank was killed says more than that its peers noticed
        outcome = classify(root_cause, exit_code=exit_code, device=device)
    if outcome == "signal" and task.spec.cluster.memory_per_gpu and device == "cpu" and _CRASH.search(root_cause):
        # Native code that does not check an allocation crashes under the limit instead of raising.
        return Ending(
            "device_oom", f"crashed under cluster.memory_per_gpu: {_last_line(root_cause)}", host=attempt.host
        )
    if oom_kill and outcome in ("signal", "unknown", "peer"):
        message = "the kernel killed a process for memory"
        return Ending("device_oom" if device == "cpu" else "host_oom", message, host=attempt.host)
    if failure is not None and outcome in ("unknown", "peer"):
        return Ending("peer", failure.message, failure.rank, failure.host)
    killed = f"its start process was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else ""
    return Ending(outcome, killed or _last_line(root_cause), host=attempt.host)


def _last_words(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        return file.read().decode(errors="replace")


def _last_line(words: str) -> str:
    """Return the line that tells most: torchrun's exit code, else the last one that is not a rule of dashes."""
    lines = [line.strip() for line in words.splitlines() if line.strip(" =-")]
    told = [line for line in lines if line.startswith(("exitcode", "rank"))]
    return ", ".join(" ".join(line.split()) for line in told) or (lines[-1] if lines else "no output")


# --- what comes next


def _next(run: RunDir, task: Task, ending: Ending, restarts: int) -> Task | None:
    """Write the results that follow from an ending; return the task to start now, None where the job is over."""
    match task:
        case ProbeTask():
            return _next_probe(run, task, ending, restarts)
        case TrainTask():
            return _next_training(run, task, ending, restarts)


def _next_probe(run: RunDir, task: ProbeTask, ending: Ending, restarts: int) -> ProbeTask | None:
    current = run.current_probe(task)
    if current is None:
        return None
    if ending.outcome == "device_oom":
        _write_out_of_memory(run, task, current, ending.message)
    elif ending.outcome in RESTARTED and restarts <= RESTARTS:
        return task
    elif ending.outcome != "cancelled" or not run.cancelled(task.job):
        outcome = ending.outcome or "unknown"
        run.write_result(Failed(**_where(task, current), outcome=outcome, message=ending.message))
        return _without(run, task, current) if outcome == "user" else None
    return None


def _without(run: RunDir, task: ProbeTask, failed: int) -> ProbeTask | None:
    """Go on with the other batches once one has failed in the user's code (a batch of one under BatchNorm, say).

    Two failures say that it is not the batch.
    """
    if task.skip:
        return None
    rest = task.model_copy(update={"skip": (failed,)})
    run.write_task(rest)
    return rest


def _where(task: ProbeTask, local_batch: int) -> dict[str, Any]:
    return {
        "id": probe_id(task.nodes, local_batch),
        "nodes": task.nodes,
        "gpus_per_node": task.spec.cluster.gpus_per_node,
        "local_batch": local_batch,
    }


def _write_out_of_memory(run: RunDir, task: ProbeTask, current: int, message: str) -> None:
    """A batch that does not fit is a result; larger ones are taken not to fit either."""
    for local_batch in task.local_batches:
        if local_batch < current:
            continue
        assumed = local_batch > current
        text = f"a local batch of {current} did not fit" if assumed else message
        run.write_result(OutOfMemory(**_where(task, local_batch), assumed=assumed, message=text))


def _next_training(run: RunDir, task: TrainTask, ending: Ending, restarts: int) -> TrainTask | None:
    if ending.outcome is None:
        _write_summary(run, task)
        return None
    relaunch = _relaunch(task, ending, restarts)
    if relaunch is not None:
        run.write_task(relaunch)
    return relaunch


def _relaunch(task: TrainTask, ending: Ending, restarts: int) -> TrainTask | None:
    """Return the next attempt: a smaller batch after an OOM, fewer loader processes after the host's, else the same."""
    update: dict[str, object] = {}
    if ending.outcome == "device_oom":
        if len(task.ladder) < 2:
            return None
        cause = f"out of memory at batch {task.batch}"
        update = {"ladder": task.ladder[1:]}
    elif ending.outcome == "host_oom":
        if not task.workers or task.workers < task.spec.train.workers:
            return None
        cause = f"host out of memory with {task.workers} loader processes a rank"
        update = {"workers": task.workers // 2}
    elif ending.outcome in RESTARTED and restarts < task.spec.train.max_attempts:
        cause = f"{ending.outcome}: {ending.message}"
    else:
        return None
    attempt = task.attempt + 1
    return task.model_copy(update={**update, "id": f"{task.job}-{attempt}", "attempt": attempt, "cause": cause})


def _write_summary(run: RunDir, task: TrainTask) -> None:
    """Keep predicted against actual; actual is every attempt's wall-clock time, the failed ones too."""
    result = run.train_result(task.signature)
    tasks = [t for t in run.tasks() if isinstance(t, TrainTask) and t.signature == task.signature]
    assert result is not None
    assert tasks
    tasks.sort(key=lambda t: t.attempt)
    attempts = [attempt for t in tasks for attempt in run.attempts(t.id)]
    hours = sum((a.ended_at or time.time()) - a.started_at for a in attempts) / 3600
    prediction = tasks[0].ladder[0].prediction
    run.write_summary(
        Summary(
            signature=task.signature,
            nodes=task.nodes,
            start_batch=tasks[0].batch,
            batch=result.batch,
            attempts=len(attempts),
            predicted_hours=prediction.hours if prediction else None,
            actual_hours=hours,
            predicted_cost=prediction.cost if prediction else None,
            actual_cost=_cost(task, hours, prediction),
            predicted_step=prediction.step_time if prediction else None,
            actual_step=result.step_time,
            metrics=result.metrics,
            best_top1=result.best_top1,
            currency=task.spec.pricing.currency,
            causes=tuple(t.cause for t in tasks[1:]),
        )
    )


def _cost(task: TrainTask, hours: float, prediction: Prediction | None) -> float:
    cluster = task.spec.cluster
    reserved = (prediction.peak_memory if prediction else None) or 0
    return cost(
        task.spec.pricing, hours=hours, nodes=task.nodes, gpus_per_node=cluster.gpus_per_node, reserved=reserved
    )
