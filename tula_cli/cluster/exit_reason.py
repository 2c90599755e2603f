"""Why an attempt ended, from the failures that its ranks wrote or else from the end of their log."""

import contextlib
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tula_cli.errors import DiskFull, RunGone, StorageFailed, TulaError
from tula_cli.host.devices import has_gpu
from tula_cli.host.failures import (
    FAILURE_KINDS,
    PEER,
    classify_failure,
    find_root_failure,
    find_telling_line,
    find_user_exception,
    kill_signal,
)
from tula_cli.host.network import get_node_name
from tula_cli.run.directory import RunDir
from tula_cli.run.disk_space import FULL_DISK_ERRNOS, IO_ERRNOS, make_missing_bytes_error
from tula_cli.run.files import write_error
from tula_cli.run.records.base import OutcomeClass
from tula_cli.run.records.jobs import Attempt, Failure, Shortage
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.tasks import Task
from tula_cli.run.shortages import describe_shortage, get_shortage, parse_shortage

CGROUPS = Path("/sys/fs/cgroup")

_NOISE = re.compile(r"\b\w*Warning: |\bwarnings\.warn\(|\bresource_tracker\b|^\[?[IW]\d{4}[ :]")
"""Lines that are unrelated to an exit, though they may be the last ones."""
_THREAD = "can't start new thread"
_CRASH = re.compile(r"exitcode *: *-(?:11|6)\b")  # SIGSEGV, SIGABRT


@dataclass(frozen=True)
class ExitReason:
    """Why the ranks of one attempt ended; `outcome` None means success."""

    outcome: OutcomeClass | None
    message: str = ""
    rank: int | None = None
    host: str = ""
    shortage: Shortage | None = None  # of a full disk
    final: bool = False  # nothing is to follow, whatever its class says
    once_more: bool = False  # tried again whatever its class says, in the next job of the chain if there is one
    reached: int | None = None  # samples trained by then; None before a first step

    @property
    def description(self) -> str:
        """The message, with the node if the outcome concerns the node or its devices."""
        on_node = self.outcome is not None and FAILURE_KINDS[self.outcome].names_host and self.host
        return f"{self.message} on {self.host}" if on_node else self.message

    @classmethod
    def from_failure(cls, failure: Failure) -> "ExitReason":
        """Return the exit reason for a rank's failure; a lost peer gets a generic message, as its cause is unknown."""
        lost = failure.outcome == "peer" and PEER.pattern.search(failure.message)
        message = f"rank {failure.rank} lost its connection to another rank, which has not said why" if lost else ""
        return cls(failure.outcome, message or failure.message, failure.rank, failure.host, failure.shortage)

    @classmethod
    def disk_full(cls, shortage: Shortage, *, rank: int | None = None, host: str = "") -> "ExitReason":
        """Return the exit reason for a full disk, with the folder and the missing space."""
        problem = "disk quota exceeded" if shortage.quota else "no space left on device"
        return cls("disk", f"{problem}: {describe_shortage(shortage)}", rank, host, shortage)


@dataclass(frozen=True)
class RankExit:
    """How a process that a supervisor started has exited; of several processes, the one that failed first."""

    exit_code: int
    oom_kill: bool  # the kernel killed a process for memory meanwhile
    words: str  # that came last of it
    rank: int  # that this is about; under torchrun the first of those it has started


def find_reason_of_ranks(run: RunDir, task: Task, attempt: Attempt, exited: RankExit) -> ExitReason:
    """Return why the ranks of this supervisor failed."""
    device = compute_device(run, task)
    failure = find_root_failure(run.failures(task.id, attempt.number))
    # The kernel's count is evidence, and outweighs what others saw: of a rank, or of a process that a rank of this node has lost.
    lost_process = failure is not None and failure.outcome == "signal" and failure.host == get_node_name()
    shot = exited.oom_kill and (exited.exit_code < 0 or lost_process)
    if failure is not None and failure.outcome != "peer" and not shot:
        return add_disk_shortage(run, task, ExitReason.from_failure(failure), failure.detail)
    output_text = exited.words
    summary = output_text.rpartition("Root Cause")[2]  # torchrun's summary of the rank that failed first
    outcome = classify_failure(output_text, exit_code=exited.exit_code, device=device)
    if outcome in ("peer", "unknown") and kill_signal(summary):
        outcome = "signal"
    elif outcome in ("peer", "unknown"):  # that a rank was killed says more than that its peers noticed
        # SIGABRT is no kill: torch ends its own process by it over a lost peer.
        exit_message = "" if exited.exit_code < 0 and exited.exit_code != -signal.SIGABRT else summary
        outcome = classify_failure(exit_message, exit_code=exited.exit_code, device=device)
    host = get_node_name()
    if outcome == "disk" or (outcome in ("unknown", "peer") and _is_disk_full(run, task, exited)):
        return add_disk_shortage(run, task, ExitReason("disk", rank=exited.rank, host=host), output_text)
    if exited.oom_kill and outcome in ("signal", "unknown", "peer"):
        message = "the kernel killed a process for memory"
        return ExitReason("device_oom" if device == "cpu" else "host_oom", message, exited.rank, host)
    line = find_telling_line(output_text)
    if line and outcome == classify_failure(line, device=device):
        return add_disk_shortage(run, task, ExitReason(outcome, line, exited.rank, host), output_text)
    if outcome == "signal" and task.spec.cluster.memory_per_gpu and device == "cpu" and _has_crashed(exited, summary):
        # Native code that does not check an allocation crashes under the limit instead of raising.
        return ExitReason(
            "device_oom", f"crashed under cluster.memory_per_gpu: {_find_most_informative_line(summary)}", host=host
        )
    if failure is not None and outcome in ("unknown", "peer"):
        return ExitReason.from_failure(failure.model_copy(update={"outcome": "peer"}))
    killed = _kill_signal(exited.exit_code)
    exit_message = (
        killed
        or (find_user_exception(output_text) if outcome == "user" else "")
        or _find_most_informative_line(summary)
    )
    return ExitReason(outcome, exit_message, exited.rank if killed else None, host)


def _is_disk_full(run: RunDir, task: Task, exited: RankExit) -> bool:
    """Return whether ranks that wrote no failure record exited because the disk is full."""
    exited_by_worker = task.spec.script is None and exited.exit_code == DiskFull.exit_code
    return exited_by_worker or bool(make_missing_bytes_error(run.path))


def add_disk_shortage(run: RunDir, task: Task, reason: ExitReason, text: str) -> ExitReason:
    """Return a reason with the missing space added if the disk was full; other reasons are returned as they are.

    A thread that could not start under `cluster.memory_per_gpu` on CPUs becomes out-of-memory.

    Args:
        run: the run.
        task: the attempted task.
        reason: why the attempt ended.
        text: output of the process about the failure.
    """
    if (
        reason.outcome == "host_limit"
        and _THREAD in text
        and task.spec.cluster.memory_per_gpu
        and compute_device(run, task) == "cpu"
    ):
        return replace(reason, outcome="device_oom", message=f"{reason.message} (under cluster.memory_per_gpu)")
    if reason.outcome != "disk":
        return reason
    shortage = reason.shortage or parse_shortage(f"{reason.message}\n{text}", (run.path, Path(task.workdir)))
    return ExitReason.disk_full(shortage, rank=reason.rank, host=reason.host)


def compute_device(run: RunDir, task: Task) -> str:
    """Return the device of the ranks (cpu or cuda): as configured, else as probes recorded, else what this node has."""
    requested = task.spec.cluster.device
    if requested != "auto":
        return requested
    devices_seen = {result.environment.device for result in run.results() if isinstance(result, Measured)}
    if devices_seen:
        return "cpu" if devices_seen == {"cpu"} else "cuda"
    return "cuda" if has_gpu() else "cpu"


def _has_crashed(exited: RankExit, summary: str) -> bool:
    return bool(_CRASH.search(summary)) or exited.exit_code in (-signal.SIGSEGV, -signal.SIGABRT)


def _kill_signal(exit_code: int) -> str:
    return f"its process was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else ""


def write_exit_report(run: RunDir, task: Task, attempt: Attempt, exited: RankExit, reason: ExitReason) -> None:
    """Write a failure record, read by the leader, for this supervisor's ranks unless the rank itself wrote one."""
    written = {failure.rank: failure.outcome for failure in run.failures(task.id, attempt.number)}
    by_kernel = (
        exited.oom_kill and reason.outcome in ("host_oom", "device_oom") and written.get(exited.rank) == "signal"
    )
    if exited.rank in written and not by_kernel:
        return
    run.write_failure(
        Failure(
            task=task.id,
            attempt=attempt.number,
            rank=exited.rank,
            host=get_node_name(),
            pid=attempt.pid,
            # What another rank has told is not told once more in this one's name, by another clock.
            outcome=reason.outcome or "unknown" if reason.rank in (None, exited.rank) else "peer",
            message=reason.message,
            detail=exited.words,
            shortage=reason.shortage,
            failed_at=time.time(),
        )
    )


def find_root_cause(run: RunDir, task: Task, attempt: Attempt, reason: ExitReason) -> ExitReason:
    """Return the exit reason of an attempt from the failure records of all supervisors; `reason` if there are none."""
    failure = find_root_failure(run.failures(task.id, attempt.number))
    return add_disk_shortage(run, task, ExitReason.from_failure(failure), failure.detail) if failure else reason


def _find_most_informative_line(output_text: str) -> str:
    """Return torchrun's exit codes, else a message with the signal that a launcher names, else the last useful line."""
    lines = [line.strip() for line in output_text.splitlines() if line.strip(" =-~^")]
    if exit_lines := [line for line in lines if line.startswith(("exitcode", "rank"))]:
        return ", ".join(" ".join(line.split()) for line in exit_lines)
    if name := kill_signal(output_text):
        return f"a rank was killed by {name}, as its launcher says"
    telling = [line for line in lines if not _NOISE.search(line)]
    return (telling or lines or ["no output"])[-1]


def count_oom_kills() -> int:
    """Return the number of out-of-memory kills by the kernel in this process's cgroup, or else on the machine.

    The count of the machine includes processes of other users.
    """
    for counter in _list_oom_counters(Path("/proc/self/cgroup").read_text(encoding="ascii")):
        if (count := _read_oom_kills(counter)) is not None:
            return count
    return _read_oom_kills(Path("/proc/vmstat")) or 0


def _list_oom_counters(cgroups: str) -> list[Path]:
    """Return the files in which cgroups v1 and v2 keep the count, from the lines of /proc/self/cgroup."""
    counters = []
    for line in cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            counters.append(CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control")
        elif not controllers and path != "/":
            counters.append(CGROUPS / path.lstrip("/") / "memory.events")
    return counters


def _read_oom_kills(counter: Path) -> int | None:
    try:
        lines = counter.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


# --- Failures of the supervisor itself

SUPERVISOR_OUTCOMES: tuple[OutcomeClass, ...] = ("disk", "storage", "supervisor")
"""Outcomes of errors in a supervisor itself."""


@contextlib.contextmanager
def write_supervisor_failure(run: RunDir, died: Callable[[Exception], None]) -> Iterator[None]:
    """Record errors of a supervisor itself, and raise them again.

    Args:
        run: the run.
        died: records an error, as far as that is still possible.

    Raises:
        DiskFull, StorageFailed: an operation that the file system refused.
    """
    try:
        yield
    except RunGone:
        raise
    except Exception as error:
        named_error = as_named_error(error, run)
        with contextlib.suppress(Exception):  # the first error counts, and is told by the scheduler's log too
            died(named_error)
        if named_error is not error:
            raise named_error from error
        raise


def as_named_error(error: Exception, run: RunDir) -> Exception:
    """Return the user-facing error (DiskFull, StorageFailed) for an OSError of the file system; else `error`."""
    if isinstance(error, OSError) and error.errno in (*FULL_DISK_ERRNOS, *IO_ERRNOS):
        name = error.filename if isinstance(error.filename, str) else ""
        return write_error(Path(name) if name else run.path / "logs", error)
    return error


def find_reason_of_error(error: Exception, run: RunDir, task: Task) -> ExitReason:
    """Return the exit reason for an error raised in a supervisor."""
    host = get_node_name()
    if isinstance(error, DiskFull):
        return add_disk_shortage(run, task, ExitReason("disk", host=host, shortage=get_shortage(error)), error.message)
    if isinstance(error, StorageFailed):
        return ExitReason("storage", error.message, host=host)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    message = error.message if isinstance(error, TulaError) else str(error)
    description = ": ".join(filter(None, (type(error).__name__, message.strip().split("\n", 1)[0])))
    return ExitReason("supervisor", f"tula's supervisor failed: {description}{where}", host=host)


def keep_traceback(run: RunDir, attempt: Attempt, index: int, error: Exception) -> None:
    """Append the traceback of an error to the log that `tula logs` shows, if the log can be written."""
    with (
        contextlib.suppress(TulaError, OSError),
        run.open_log(run.log_path(attempt.task, attempt.number, index)) as log,
    ):
        log.write("".join(traceback.format_exception(error)).encode())


def make_failure_of_follower(task: Task, attempt: Attempt, rank: int, reason: ExitReason, error: Exception) -> Failure:
    """Return the failure record of a follower for its leader, which srun terminates together with the follower."""
    assert reason.outcome is not None
    return Failure(
        task=task.id,
        attempt=attempt.number,
        rank=rank,
        host=reason.host,
        pid=os.getpid(),
        outcome=reason.outcome,
        message=reason.message,
        detail="".join(traceback.format_exception(error)),
        shortage=reason.shortage,
        failed_at=time.time(),
    )


def find_reason_by_supervisors(run: RunDir, attempt: Attempt) -> ExitReason | None:
    """Return the exit reason of an attempt from the failure records of supervisors; None if no supervisor failed."""
    failures = [
        failure for failure in run.failures(attempt.task, attempt.number) if failure.outcome in SUPERVISOR_OUTCOMES
    ]
    root_failure = find_root_failure(failures)
    return None if root_failure is None else ExitReason.from_failure(root_failure)
