"""The errors a user meets: what is wrong, what to do, and the exit code of each class.

Anything that is not a TulaError is a defect of tula and keeps its traceback.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real


class TulaError(Exception):
    """Something the user can act on.

    Args:
        message: what is wrong, with the value that is wrong.
        hint: what to do about it, or nothing.
    """

    exit_code = 1
    code = "failed"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """Return all that the command would say: a notebook shows this and nothing else."""
        return "\n".join((self.message, *self._details(), *([f"HINT: {self.hint}"] if self.hint else [])))

    def _details(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a job spec: where, what, and the nearest valid value if there is one."""

    path: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" + (f" ({self.hint})" if self.hint else "")


class CannotWrite(TulaError):
    """A file that cannot be written: no space, no right."""


class DiskFull(CannotWrite):
    """No space, no quota or no more files on the file system of the run, of what the job writes, or of the answer.

    Args:
        message: what could not be written, and what is free.
        hint: what to do about it.
        folder: where it was to be written.
        quota: whether the user's quota is used up, rather than the file system.
        needed: bytes of what was to be written; None where that is not known.
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
    """The file system did not answer, or lost a file: a time-out, a stale handle, an error of the disk."""

    exit_code = 14
    code = "storage"


class NotYours(TulaError):
    """A run, its lock or one of its records belongs to another user, and may not be read or changed."""

    exit_code = 15
    code = "owner"


class RunGone(TulaError):
    """The run directory that a job works for is no longer where it was.

    Args:
        path: where it was.
    """

    def __init__(self, path: object) -> None:
        super().__init__(
            f"the run directory {path} is no longer there: it was moved or removed, and its jobs end",
            "where it was moved, the same command with --run and its new place goes on from the newest checkpoint",
        )


class SpecError(TulaError):
    """A job spec or a command line that cannot be used. Carries all problems found, not the first."""

    exit_code = 2
    code = "spec"

    def __init__(self, message: str, hint: str = "", *, problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(message, hint)
        self.problems = problems

    def _details(self) -> tuple[str, ...]:
        return tuple(f"  {problem}" for problem in self.problems)


def require_positive(**given: object) -> None:
    """Refuse what the command line does not let through, and Python code may give.

    Args:
        given: whole numbers by the names that they were given under; None for none.

    Raises:
        SpecError: one of them is no whole number, or below 1.
    """
    for name, value in given.items():
        if value is not None and (not isinstance(value, Integral) or isinstance(value, bool)):
            raise SpecError(f"{name} {value!r}: must be a whole number")
        if value is not None and value < 1:
            raise SpecError(f"{name} {value}: must be 1 or more")


def require_number(**given: object) -> None:
    """Refuse what is no number, by the name that it was given under; None for none.

    Raises:
        SpecError: one of them is none.
    """
    for name, value in given.items():
        if value is not None and (not isinstance(value, Real) or isinstance(value, bool)):
            raise SpecError(f"{name} {value!r}: must be a number")


def require_callable(**given: object) -> None:
    """Refuse what is no function, by the name that it was given under; None for none.

    Raises:
        SpecError: one of them is none.
    """
    for name, value in given.items():
        if value is not None and not callable(value):
            raise SpecError(f"{name} {value!r}: must be a function")


def require_list(**given: object) -> None:
    """Refuse one value where several are meant; a string would be taken for its letters.

    Args:
        given: lists by the names that they were given under; None for none.

    Raises:
        SpecError: one of them is a string, or no list.
    """
    for name, value in given.items():
        if value is not None and (isinstance(value, str) or not isinstance(value, Iterable)):
            raise SpecError(f"{name} {value!r}: give a list", f"for example [{value!r}]")


class Infeasible(TulaError):
    """No configuration satisfies memory and constraints."""

    exit_code = 3
    code = "infeasible"


class BadMeasurements(TulaError):
    """Too few measurements, or none that can be used together."""

    exit_code = 4
    code = "measurements"


class SchedulerError(TulaError):
    """The scheduler refused the job or could not be reached."""

    exit_code = 5
    code = "scheduler"


class JobFailed(TulaError):
    """The job failed in the user's code, data or environment."""

    exit_code = 6
    code = "job"


class OutOfMemoryAtMinimum(TulaError):
    """Out of memory at the smallest batch there is."""

    exit_code = 7
    code = "memory"


class OverBudget(TulaError):
    """More node-hours than the cap allows, or not confirmed."""

    exit_code = 8
    code = "budget"


class Diverged(TulaError):
    """A training whose loss or weights are not finite, or every probe of one."""

    exit_code = 9
    code = "diverged"


class DeviceFault(TulaError):
    """Node after node, or GPU after GPU, was faulty."""

    exit_code = 10
    code = "device"


class NoGpu(DeviceFault):
    """Jobs are to compute on GPUs, and a rank sees none: its node is faulty, or its job did not ask for any."""


class CannotResume(TulaError):
    """A script that cannot go on from its own checkpoint, as a rehearsal has found."""

    exit_code = 11
    code = "resume"


class NotRehearsed(TulaError):
    """A rehearsal that has not found out how a script goes on from its checkpoint."""

    exit_code = 12
    code = "unrehearsed"


class OtherFormat(TulaError):
    """A run directory in a format that this tula does not read; it was left as it is."""

    exit_code = 16
    code = "format"


class TrackerError(TulaError):
    """A tracker (MLflow, Weights & Biases, TensorBoard) that is not installed, does not answer, or refuses."""

    exit_code = 18
    code = "tracker"


class Pending(TulaError):
    """Still queued or running."""

    exit_code = 75
    code = "pending"


class Interruption(KeyboardInterrupt):
    """Ctrl-C while a service worked. No TulaError: whoever goes on after an error still ends on Ctrl-C.

    Args:
        message: what became of the jobs.
        hint: what to do about them, or nothing.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint
