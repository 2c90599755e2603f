"""What a supervisor that fails leaves behind, so that nobody takes it for one that was killed."""

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from tula_cli.cluster.exit_reason import ExitReason, add_disk_shortage
from tula_cli.errors import DiskFull, RunGone, StorageFailed, TulaError
from tula_cli.host.network import node_name
from tula_cli.host.outcome import find_root_failure
from tula_cli.run.directory import RunDir
from tula_cli.run.files import write_error
from tula_cli.run.records.base import OutcomeClass
from tula_cli.run.records.jobs import Attempt, Failure
from tula_cli.run.records.tasks import Task
from tula_cli.run.storage.shortages import shortage_of
from tula_cli.run.storage.space import FULL, SILENT

SUPERVISOR_OUTCOMES: tuple[OutcomeClass, ...] = ("disk", "storage", "supervisor")
"""Classes of what ends a supervisor from within."""


@contextlib.contextmanager
def record_supervisor_failure(run: RunDir, died: Callable[[Exception], None]) -> Iterator[None]:
    """Have it written down what fails in a supervisor itself.

    Args:
        run: the run.
        died: writes an error down, as far as that can be done still.

    Raises:
        DiskFull, StorageFailed: what the file system has refused.
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
    """Return an error of the file system that nobody has named yet as the one that it is to the user; any other as it is."""
    if isinstance(error, OSError) and error.errno in (*FULL, *SILENT):
        name = error.filename if isinstance(error.filename, str) else ""
        return write_error(Path(name) if name else run.path / "logs", error)
    return error


def reason_of_error(error: Exception, run: RunDir, task: Task) -> ExitReason:
    """Return why a supervisor ends that an error has come up in."""
    host = node_name()
    if isinstance(error, DiskFull):
        return add_disk_shortage(run, task, ExitReason("disk", host=host, shortage=shortage_of(error)), error.message)
    if isinstance(error, StorageFailed):
        return ExitReason("storage", error.message, host=host)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    message = error.message if isinstance(error, TulaError) else str(error)
    description = ": ".join(filter(None, (type(error).__name__, message.strip().split("\n", 1)[0])))
    return ExitReason("supervisor", f"tula's supervisor failed: {description}{where}", host=host)


def keep_traceback(run: RunDir, attempt: Attempt, index: int, error: Exception) -> None:
    """Add where an error came up to the log that `tula logs` shows; nothing where that cannot be written."""
    with (
        contextlib.suppress(TulaError, OSError),
        run.open_log(run.log_path(attempt.task, attempt.number, index)) as log,
    ):
        log.write("".join(traceback.format_exception(error)).encode())


def failure_of_follower(task: Task, attempt: Attempt, rank: int, reason: ExitReason, error: Exception) -> Failure:
    """Return what a follower leaves for its leader, which srun ends together with it."""
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


def reason_by_supervisors(run: RunDir, attempt: Attempt) -> ExitReason | None:
    """Return what ended an attempt by what a supervisor has left; None where none of them has failed."""
    failures = [
        failure for failure in run.failures(attempt.task, attempt.number) if failure.outcome in SUPERVISOR_OUTCOMES
    ]
    root_failure = find_root_failure(failures)
    return None if root_failure is None else ExitReason.from_failure(root_failure)
