"""Errors shown to the user: what is wrong, what to do, and the exit code of each class.

Any exception that is not a TulaError is a defect of tula and keeps its traceback.
"""

import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType

ARGUMENT_BY_FLAG: ContextVar[Mapping[str, str]] = ContextVar("argument_by_flag", default=MappingProxyType({}))
"""The arguments of the Python function that is being called, by the flags that they stand for; empty on the command line."""
_MARKED_OPTION = re.compile(r"\[\[(--[a-z-]+)(?: (.*?))?\]\](?!\]| \1 )", re.DOTALL)  # values may contain ]]


def name_options(text: str) -> str:
    """Return a text in which options are marked as `[[--nodes]]` with their flags, or in a Python call with its arguments.

    A mark may contain values of an option that takes a list: `[[--set a.b=1 --set c=2]]`.
    """

    def name_option(match: re.Match[str]) -> str:
        flag, values = match.groups()
        argument = ARGUMENT_BY_FLAG.get().get(flag)
        if argument is None:
            return match[0][2:-2]
        if values is None:
            return argument
        return f"{argument}={[int(item) if item.isdecimal() else item for item in values.split(f' {flag} ')]}"

    return _MARKED_OPTION.sub(name_option, text)


class TulaError(Exception):
    """An error that the user can act on.

    Args:
        message: what is wrong, with the offending value; options are marked as described by `name_options`.
        hint: what to do about it, or empty.
    """

    exit_code = 1
    code = "failed"

    def __init__(self, message: str, hint: str = "") -> None:
        self.message, self.hint = name_options(message), name_options(hint)
        super().__init__(self.message)

    def __str__(self) -> str:
        """Return the message, details and hint, as the command prints them: a notebook shows only this text."""
        return "\n".join((self.message, *self._list_details(), *([f"HINT: {self.hint}"] if self.hint else [])))

    def _list_details(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class Problem:
    """One problem of a job spec: its key, the message, and the nearest valid value as a hint if there is one."""

    path: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" + (f" ({self.hint})" if self.hint else "")


class CannotWrite(TulaError):
    """A file cannot be written: no space, or no permission."""


class DiskFull(CannotWrite):
    """No space, quota or inodes are left on the file system of the run, of the job's output or of the command's output.

    Args:
        message: what could not be written, and the free space.
        hint: what to do about it.
        folder: the folder that was written to.
        quota: whether the user's quota is exhausted, not the file system.
        needed: bytes of the data to write; None if unknown.
    """

    exit_code = 13
    code = "disk"

    def __init__(
        self, message: str, hint: str = "", *, folder: str = "", quota: bool = False, needed: int | None = None
    ) -> None:
        super().__init__(message, hint)
        self.folder = folder
        self.quota = quota
        self.needed = needed


class StorageFailed(CannotWrite):
    """The file system did not answer, lost a file or had a disk error, or is read-only."""

    exit_code = 14
    code = "storage"


class NotYours(TulaError):
    """A run, its lock or one of its records belongs to another user and may not be read or changed."""

    exit_code = 15
    code = "owner"


class RunGone(TulaError):
    """The run directory of a job was moved or removed while the job ran.

    Args:
        path: the path that the run directory had.
    """

    def __init__(self, path: object) -> None:
        super().__init__(
            f"the run directory {path} was moved or removed, so its jobs stop",
            "if you moved the directory, run the same command with [[--run]] and the new path to resume from the newest checkpoint",
        )


class SpecError(TulaError):
    """A job file or a command line is invalid. `problems` lists all problems, not only the first."""

    exit_code = 2
    code = "spec"

    def __init__(self, message: str, hint: str = "", *, problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(message, hint)
        self.problems = problems

    def _list_details(self) -> tuple[str, ...]:
        return tuple(f"  {problem}" for problem in self.problems)


class Infeasible(TulaError):
    """No configuration satisfies the memory limit and the constraints."""

    exit_code = 3
    code = "infeasible"


class BadMeasurements(TulaError):
    """There are too few measurements, they cannot be used together, or a file of the run is damaged."""

    exit_code = 4
    code = "measurements"


class UnreadableFile(BadMeasurements):
    """A file of a run cannot be read, but may be intact: it is not replaced."""


class SchedulerError(TulaError):
    """The scheduler refused the job or could not be reached."""

    exit_code = 5
    code = "scheduler"


class JobFailed(TulaError):
    """The job failed in the user's code, data or environment.

    Args:
        message: what failed.
        hint: what to do about it, or empty.
        evidence: what the failing program itself printed or raised; empty: the message.
    """

    exit_code = 6
    code = "job"

    def __init__(self, message: str, hint: str = "", *, evidence: str = "") -> None:
        super().__init__(message, hint)
        self.evidence = evidence or self.message


class OutOfMemoryAtMinimum(TulaError):
    """Out of memory at the smallest possible batch."""

    exit_code = 7
    code = "memory"


class OverBudget(TulaError):
    """The job needs more node-hours than its limit allows, or the user did not confirm it."""

    exit_code = 8
    code = "budget"


class Diverged(TulaError):
    """The loss or weights of a training, or of all probes of a job, are not finite."""

    exit_code = 9
    code = "diverged"


class DeviceFault(TulaError):
    """Several nodes or GPUs were faulty, one after the other."""

    exit_code = 10
    code = "device"


class NoGpu(DeviceFault):
    """A rank of a GPU job sees no GPU: its node is faulty, or the job did not request any."""


class CannotResume(TulaError):
    """The resume test found that a script cannot resume from its own checkpoint."""

    exit_code = 11
    code = "resume"


class ResumeUntested(TulaError):
    """The resume test could not find out how a script resumes."""

    exit_code = 12
    code = "unrehearsed"


class OtherFormat(TulaError):
    """A run directory has a format that this version of tula does not read; it was not changed."""

    exit_code = 16
    code = "format"


class TrackerError(TulaError):
    """A tracker (MLflow, Weights & Biases, TensorBoard) is not installed, does not answer or refuses the request."""

    exit_code = 18
    code = "tracker"


class Pending(TulaError):
    """The job is still queued or running."""

    exit_code = 75
    code = "pending"


class CommandNotStarted(TulaError):
    """The command to observe does not exist or cannot be started (as in a shell)."""

    exit_code = 127
    code = "command"


class Interruption(KeyboardInterrupt):
    """Ctrl-C during a service. Not a TulaError, so that code which continues after an error still stops on Ctrl-C.

    Args:
        message: the state in which the jobs were left.
        hint: what to do about them, or empty.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint
