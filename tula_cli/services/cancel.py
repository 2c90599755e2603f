"""`tula cancel`: cancel the jobs of runs."""

from collections.abc import Callable, Sequence

from tula_cli.cluster.launcher import Launcher
from tula_cli.errors import SchedulerError, TulaError
from tula_cli.run.directory import Run
from tula_cli.run.owner import require_ownership


def cancel_jobs(runs: Sequence[Run], launcher_for: Callable[[Run], Launcher]) -> list[str]:
    """Cancel the queued and running jobs of the runs, and return their names; unreadable records are left out.

    Each job is marked as cancelled first, so that nothing (a supervisor, the next job of a chain) restarts it. A job, or
    the jobs of a node type, that cannot be cancelled do not prevent the cancellation of the others.

    Raises:
        NotYours: the run belongs to another user.
        TulaError: some jobs could not be cancelled; the message names them, and those that were.
    """
    for run in runs:
        require_ownership(run.path)
    cancelled: list[str] = []
    failures: dict[str, TulaError] = {}
    for run in runs:
        try:
            launcher, snapshot = launcher_for(run), run.read_snapshot()
            states = launcher.query_states(snapshot, snapshot.jobs)
        except TulaError as error:
            failures[f"all jobs of {run.type}" if run.type else "all jobs"] = error
            continue
        for job in snapshot.jobs:
            if states[job.id].state == "ended":
                continue
            (name,) = run.prefix_job_names([job.id])
            try:
                run.mark_job_cancelled(job.id)
                launcher.cancel(run, job)
                cancelled.append(name)
            except TulaError as error:
                failures[name] = error
    if len(failures) == 1 and not cancelled:
        raise next(iter(failures.values()))
    if failures:
        raise SchedulerError(
            f"not cancelled: {'; '.join(f'{name} ({error.message})' for name, error in failures.items())}",
            f"cancelled: {', '.join(cancelled) or 'none'}; run tula cancel again for the others, or end them with the"
            " scheduler's own command",
        )
    return cancelled
