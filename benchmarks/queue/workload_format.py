"""The Standard Workload Format: one job per line, 18 numbers, -1 for unknown values."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LoggedJob:
    """A job of a log; times in seconds."""

    submitted: float
    wait: float
    run: float
    nodes: int  # processors, if each job has whole nodes with one processor
    limit: float


def read_log(path: Path) -> list[LoggedJob]:
    """Return the jobs of a log with known wait and size, in the order of their submission.

    Raises:
        ValueError: a line has too few fields.
    """
    return parse_log(path.read_text(encoding="utf-8", errors="replace").splitlines())


def parse_log(lines: Iterable[str]) -> list[LoggedJob]:
    """Return the jobs of the lines of a log, as `read_log` does."""
    jobs = []
    for line in lines:
        if not line.strip() or line.startswith(";"):
            continue
        fields = line.split()
        if len(fields) < 9:
            raise ValueError(f"not a line of the Standard Workload Format: {line!r}")
        submitted, wait, run, used, _, _, requested, limit = map(float, fields[1:9])
        nodes = int(requested if requested > 0 else used)
        if wait >= 0 and nodes > 0:
            jobs.append(LoggedJob(submitted, wait, max(run, 0.0), nodes, limit if limit > 0 else max(run, 0.0)))
    return sorted(jobs, key=lambda job: job.submitted)
