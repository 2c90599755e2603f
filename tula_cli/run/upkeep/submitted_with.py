"""Which tula a job was submitted with, and which one runs it: an upgrade reaches the later jobs of a chain."""

from tula_cli.run.records.jobs import Attempt, Job
from tula_cli.run.snapshot import Snapshot


def upgraded(job: Job | None, ran_with: str) -> str:
    """Say that a job runs with another tula than it was submitted with; empty where it does not, or nobody knows.

    Args:
        job: as it was submitted.
        ran_with: the version that runs it; empty where that was not written down.
    """
    if job is None or not job.tula or not ran_with or job.tula == ran_with:
        return ""
    return f"{job.id} was submitted with tula {job.tula}, and goes on with tula {ran_with}, which reads the same format"


def upgrades(look: Snapshot) -> tuple[str, ...]:
    """Return the same of each job of a run, by its newest attempt."""
    newest: dict[str, Attempt] = {job.id: found[-1] for job in look.jobs if (found := look.attempts_of(job.id))}
    told = (upgraded(job, newest[job.id].tula) for job in look.jobs if job.id in newest)
    return tuple(filter(None, told))
