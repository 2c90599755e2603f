"""The failure of an attempt: from the records that its ranks wrote or else from the end of their log."""

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tula_cli.errors import DiskFull, RunGone, StorageFailed, TulaError
from tula_cli.host.devices import has_gpu
from tula_cli.host.failure_texts import (
    classify_failure,
    find_device_fault,
    find_kill_signal,
    find_launcher_summary,
    find_line_of_failure,
    find_most_informative_line,
    find_signal,
    find_user_exception,
    has_crashed,
    is_thread_refused,
)
from tula_cli.host.failures import find_root_failure
from tula_cli.host.machine import CONTROL_GROUPS_FOLDER
from tula_cli.host.network import get_node_name
from tula_cli.run.directory import RunDir
from tula_cli.run.disk_space import FULL_DISK_ERRNOS, IO_ERRNOS, find_full_disk_errno
from tula_cli.run.files import make_write_error, open_file_to_append
from tula_cli.run.records.base import OutcomeClass
from tula_cli.run.records.failures import Failure
from tula_cli.run.records.jobs import Attempt
from tula_cli.run.records.tasks import Task
from tula_cli.run.shortages import get_shortage, parse_shortage


@dataclass(frozen=True)
class RankExit:
    """The exit of a process that a supervisor started; of several processes, that of the one that failed first."""

    exit_code: int
    oom_kill: bool  # whether the kernel killed a process of this node for lack of memory during the attempt
    words: str  # end of the output of the process
    rank: int  # rank of the process; under torchrun its first rank


def find_rank_failure(run: RunDir, task: Task, attempt: Attempt, exited: RankExit) -> Failure:
    """Return why the ranks of this supervisor failed."""
    device = find_device_type(run, task)
    recorded = find_root_failure(run.read_failures(task.id, attempt.number))
    # An out-of-memory kill counted by the kernel takes precedence over reports of peers, if a signal killed this rank
    # or a rank of this node lost a process.
    lost_process = recorded is not None and recorded.outcome == "signal" and recorded.host == get_node_name()
    shot = exited.oom_kill and (exited.exit_code < 0 or lost_process)
    if recorded is not None and recorded.outcome != "peer" and not shot:
        return add_shortage_to_failure(run, task, recorded, recorded.detail)
    failure = _find_failure_in_log(run, task, exited, device)
    if recorded is not None and failure.outcome in ("unknown", "peer"):
        return recorded.model_copy(update={"outcome": "peer"})
    return add_shortage_to_failure(run, task, failure, exited.words)


def _find_failure_in_log(run: RunDir, task: Task, exited: RankExit, device: str) -> Failure:
    """Return why ranks failed that wrote no record, from the end of their log and their exit code."""
    output_text = exited.words
    summary = find_launcher_summary(output_text)
    outcome = classify_failure(output_text, exit_code=exited.exit_code, device=device)
    if outcome in ("peer", "unknown") and find_kill_signal(summary):
        outcome = "signal"
    elif outcome in ("peer", "unknown"):  # the signal that killed a rank is closer to the cause than a lost peer
        # SIGABRT does not count as a kill, because torch aborts its own process after losing a peer.
        exit_message = "" if exited.exit_code < 0 and exited.exit_code != -signal.SIGABRT else summary
        outcome = classify_failure(exit_message, exit_code=exited.exit_code, device=device)
    host = get_node_name()
    if outcome == "disk" or (outcome in ("unknown", "peer") and _is_disk_full(run, task, exited)):
        return Failure(outcome="disk", rank=exited.rank, host=host)
    if exited.oom_kill and outcome in ("signal", "unknown", "peer"):
        outcome = "device_oom" if device == "cpu" else "host_oom"
        message = "the kernel killed a process because the memory was used up"
        return Failure(outcome=outcome, message=message, rank=exited.rank, host=host)
    line = find_line_of_failure(output_text)
    if line and outcome == classify_failure(line, device=device):
        return _make_failure(outcome, line, exited, rank=exited.rank)
    is_limited = task.spec.cluster.memory_per_gpu is not None and device == "cpu"
    if outcome == "signal" and is_limited and has_crashed(summary, exited.exit_code):
        # Native code that does not check an allocation crashes under the limit instead of raising.
        message = f"crashed under the memory limit (cluster.memory_per_gpu): {find_most_informative_line(summary)}"
        return Failure(outcome="device_oom", message=message, host=host)
    if exited.exit_code < 0:
        message = f"its process was killed by {signal.Signals(-exited.exit_code).name}"
        return _make_failure(outcome, message, exited, rank=exited.rank)
    if outcome == "unknown":
        return _make_failure(outcome, _describe_unknown_exit(summary, exited), exited, rank=None)
    exception_line = find_user_exception(output_text) if outcome == "user" else ""
    return _make_failure(outcome, exception_line or find_most_informative_line(summary), exited, rank=None)


def _describe_unknown_exit(summary: str, exited: RankExit) -> str:
    """Return the telling line of the output, with the exit code if that line alone may be unrelated to the exit."""
    if not summary.strip():
        return f"exited with code {exited.exit_code} without any output"
    line = find_most_informative_line(summary)
    # Python exits with code 1 after printing an exception; the script has chosen any other code.
    return line if exited.exit_code in (0, 1) else f"exited with code {exited.exit_code}; last output: {line}"


def _make_failure(outcome: OutcomeClass, message: str, exited: RankExit, *, rank: int | None) -> Failure:
    return Failure(
        outcome=outcome,
        message=message,
        rank=rank,
        host=get_node_name(),
        signal=find_signal(find_launcher_summary(exited.words), exited.exit_code) if outcome == "signal" else "",
        fault=find_device_fault(message) if outcome == "device_fault" else None,
    )


def _is_disk_full(run: RunDir, task: Task, exited: RankExit) -> bool:
    """Return whether ranks that wrote no failure record exited because the disk is full."""
    exited_by_worker = task.script is None and exited.exit_code == DiskFull.exit_code
    return exited_by_worker or bool(find_full_disk_errno(run.path))


def add_shortage_to_failure(run: RunDir, task: Task, failure: Failure, text: str) -> Failure:
    """Return a failure with the missing space added if the disk was full; other failures are returned as they are.

    A thread that could not start under `cluster.memory_per_gpu` on CPUs becomes out-of-memory, if `text`, the output of
    the process, shows it.
    """
    if (
        failure.outcome == "host_limit"
        and is_thread_refused(text)
        and task.spec.cluster.memory_per_gpu
        and find_device_type(run, task) == "cpu"
    ):
        message = f"{failure.message} (under the memory limit cluster.memory_per_gpu)"
        return failure.model_copy(update={"outcome": "device_oom", "message": message})
    if failure.outcome != "disk" or failure.shortage is not None:
        return failure
    shortage = parse_shortage(f"{failure.message}\n{text}", (run.path, Path(task.workdir)))
    return failure.model_copy(update={"shortage": shortage})


def find_device_type(run: RunDir, task: Task) -> str:
    """Return the device of the ranks (cpu or cuda): as configured, else as probes recorded, else what this node has."""
    requested = task.spec.cluster.device
    if requested != "auto":
        return requested
    devices_seen = {probe.environment.device for probe in run.read_measurements()}
    if devices_seen:
        return "cpu" if devices_seen == {"cpu"} else "cuda"
    return "cuda" if has_gpu() else "cpu"


def write_exit_report(run: RunDir, task: Task, attempt: Attempt, exited: RankExit, failure: Failure) -> None:
    """Write a failure record, read by the leader, for this supervisor's ranks unless the rank itself wrote one."""
    written = {recorded.rank: recorded.outcome for recorded in run.read_failures(task.id, attempt.number)}
    by_kernel = (
        exited.oom_kill and failure.outcome in ("host_oom", "device_oom") and written.get(exited.rank) == "signal"
    )
    if exited.rank in written and not by_kernel:
        return
    # The failure of another rank is recorded as a lost peer, since that rank has reported it with its own clock.
    outcome = failure.outcome if failure.rank in (None, exited.rank) else "peer"
    identity = {"task": task.id, "attempt": attempt.number, "rank": exited.rank, "host": get_node_name()}
    report = {"pid": attempt.pid, "outcome": outcome, "message": failure.summary, "detail": exited.words}
    run.write_failure(failure.model_copy(update={**identity, **report, "failed_at": time.time()}))


def find_root_cause(run: RunDir, task: Task, attempt: Attempt, failure: Failure) -> Failure:
    """Return the failure of an attempt from the records of all supervisors; `failure` if there are none."""
    root = find_root_failure(run.read_failures(task.id, attempt.number))
    return add_shortage_to_failure(run, task, root, root.detail) if root else failure


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
        controllers, _, path = line.partition(":")[2].partition(":")
        if "memory" in controllers.split(","):
            counters.append(CONTROL_GROUPS_FOLDER / "memory" / path.lstrip("/") / "memory.oom_control")
        elif not controllers and path.strip("/"):
            counters.append(CONTROL_GROUPS_FOLDER / path.lstrip("/") / "memory.events")
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
def record_supervisor_errors(run: RunDir, record_error: Callable[[Exception], None]) -> Iterator[None]:
    """Record errors of a supervisor itself, as far as that is still possible, and raise them again.

    Raises:
        DiskFull, StorageFailed: an operation that the file system refused.
    """
    try:
        yield
    except RunGone:
        raise
    except Exception as error:
        named_error = error
        if isinstance(error, OSError) and error.errno in (*FULL_DISK_ERRNOS, *IO_ERRNOS):
            name = error.filename if isinstance(error.filename, str) else ""
            named_error = make_write_error(Path(name) if name else run.path / "logs", error)
        with contextlib.suppress(Exception):  # the first error matters, and the scheduler's log shows it too
            record_error(named_error)
        if named_error is not error:
            raise named_error from error
        raise


def convert_error_to_failure(error: Exception, run: RunDir, task: Task) -> Failure:
    host = get_node_name()
    if isinstance(error, DiskFull):
        full = Failure(outcome="disk", host=host, shortage=get_shortage(error))
        return add_shortage_to_failure(run, task, full, error.message)
    if isinstance(error, StorageFailed):
        return Failure(outcome="storage", message=error.message, host=host)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    message = error.message if isinstance(error, TulaError) else str(error)
    description = ": ".join(filter(None, (type(error).__name__, message.strip().split("\n", 1)[0])))
    return Failure(outcome="supervisor", message=f"tula's supervisor failed: {description}{where}", host=host)


def append_traceback(run: RunDir, attempt: Attempt, index: int, error: Exception) -> None:
    """Append the traceback of an error to the log that `tula logs` shows, if the log can be written."""
    with (
        contextlib.suppress(TulaError, OSError),
        open_file_to_append(run.get_log_path(attempt.task, attempt.number, index)) as log,
    ):
        log.write("".join(traceback.format_exception(error)).encode())


def write_follower_failure(
    run: RunDir, task: Task, attempt: Attempt, rank: int, failure: Failure, error: Exception
) -> None:
    """Write the failure of a follower for its leader, which srun terminates together with the follower."""
    detail = "".join(traceback.format_exception(error))
    identity = {"task": task.id, "attempt": attempt.number, "rank": rank, "pid": os.getpid()}
    run.write_failure(failure.model_copy(update={**identity, "detail": detail}))


def find_supervisor_failure(run: RunDir, attempt: Attempt) -> Failure | None:
    """Return the failure of an attempt from the records of supervisors; None if no supervisor failed."""
    return find_root_failure(
        failure for failure in run.read_failures(attempt.task, attempt.number) if failure.outcome in SUPERVISOR_OUTCOMES
    )
