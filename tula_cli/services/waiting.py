"""Shared parts of the commands that submit jobs: how they submit, confirm and wait."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tula_cli import words
from tula_cli.cluster.inspection import Inspect
from tula_cli.cluster.launcher import Launcher
from tula_cli.cluster.slurm.scheduler import list_overriding_variables
from tula_cli.errors import Interruption, OverBudget, Pending, RunGone, SchedulerError, SpecError
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.files import list_names
from tula_cli.run.job_runs import find_settings_origin, save_runs
from tula_cli.run.records.probes import Failed
from tula_cli.run.records.results import JobFile
from tula_cli.run.records.tasks import make_probe_id
from tula_cli.services import messages
from tula_cli.services.events import Event, JobsProgress, Planned, ProbeFinished, WarningEvent, Work
from tula_cli.services.status import ACTIVE_STATES, JobStatus, RunStatus, read_job_progress, read_run_status
from tula_cli.services.tracking import export_while_waiting
from tula_cli.spec.backend import get_backend
from tula_cli.spec.job import JobSpec


@dataclass(frozen=True)
class Submission:
    """How a command submits its jobs and waits for them; tests replace its functions."""

    launcher_for: Callable[[JobSpec], Launcher]
    inspect: Inspect  # returns the dataset's size and the memory estimate
    confirm: Callable[[Planned], bool]  # returns whether the plan may be submitted
    wait: bool | None = None  # None: wait on this machine, but not on a cluster
    timeout: float | None = None  # seconds to wait; None: no limit
    job: Path | None = None  # job file that the settings come from; None if they are those of a run
    overrides: tuple[str, ...] = ()  # `a.b=c`, in addition to those of the file
    clock: Callable[[], float] = time.monotonic

    def should_wait(self, spec: JobSpec) -> bool:
        return not spec.cluster.backend.has_queue if self.wait is None else self.wait

    def starts_one_by_one(self, spec: JobSpec) -> bool:
        """Return whether a command that starts several trainings does so one after the other, as on this machine."""
        return not spec.cluster.backend.has_queue

    def require_waiting(self, spec: JobSpec) -> None:
        """Raise SpecError for --no-wait if the command starts several trainings one after the other."""
        if self.starts_one_by_one(spec) and self.wait is False:
            raise SpecError(
                "[[--no-wait]] is not possible: on this machine trainings run one after the other, and this command starts each of them",
                "remove [[--no-wait]]; if you interrupt the command, finished trainings are kept",
            )

    def require_confirmed(self, planned: Planned) -> None:
        """Request confirmation before money is spent; raise OverBudget if the plan is not confirmed."""
        if not self.confirm(planned):
            raise OverBudget("not confirmed; nothing was submitted")

    def find_settings_origin(self, run: Run) -> JobFile | None:
        """Return the job file and overrides that the settings come from, as the run records them; None without a file."""
        return find_settings_origin(run, self.job, self.overrides)

    def save_runs(self, runs: Sequence[Run]) -> None:
        """Write runs with their jobs, and mark the last one as the newest.

        Raises:
            TulaError: they cannot be written.
        """
        for run in runs:
            save_runs([run], self.find_settings_origin(run))

    def wait_for_jobs_or_detach(
        self,
        run: Run,
        launcher: Launcher,
        jobs: Sequence[str],
        under_way: Sequence[str],
        list_results: Callable[[], Iterable[Event]] = tuple,
    ) -> "Work[RunStatus | DetachedJobs]":
        """Wait for submitted jobs, or leave them in the background.

        Args:
            under_way: those of the jobs that were queued or running before.
            list_results: as of `wait_for_jobs`.

        Raises:
            Pending: the timeout has passed.
        """
        if self.should_wait(run.spec):
            return (yield from wait_for_jobs(run, launcher, jobs, timeout=self.timeout, list_results=list_results))
        yield from warn_about_submitted_jobs(run, launcher, jobs, under_way)
        return DetachedJobs(tuple(jobs), tuple(under_way))


@dataclass(frozen=True)
class DetachedJobs:
    """Jobs that are not waited for."""

    jobs: tuple[str, ...]
    under_way: tuple[str, ...]  # jobs that were already queued or running


def describe_exceeded_cap(subject: str, node_hours: float, cap: float | None) -> str:
    """Return a message that `subject` may use more node-hours than the cap; empty if it fits, or without a cap."""
    if cap is None or node_hours <= cap:
        return ""
    return f"{subject} may take {words.format_number(node_hours)} node-hours, but search.max_node_hours is {cap:g}"


def require_within_cap(node_hours: Sequence[float], cap: float | None, *, first_jobs: float = 0.0) -> None:
    """Enforce the cap on node-hours over all node types of a job.

    Args:
        node_hours: node-hours of the probes on each node type.
        cap: search.max_node_hours.
        first_jobs: node-hours of the jobs that build the model and the dataset on a node.

    Raises:
        OverBudget: the total may exceed the cap.
    """
    types = f" of all {len(node_hours)} node types" if len(node_hours) > 1 else ""
    subjects = [f"the probes{types}"] if node_hours else []
    if first_jobs:
        subjects.append("the job that builds the model and the dataset")
    needed = sum(node_hours) + first_jobs
    if problem := describe_exceeded_cap(" and ".join(subjects), needed, cap):
        hint = f"raise the limit with [[--set search.max_node_hours={math.ceil(needed)}]], lower search.max_minutes, or search fewer nodes"
        raise OverBudget(problem, hint)


def wait_for_jobs(
    run: Run,
    launcher: Launcher,
    jobs: Sequence[str],
    *,
    timeout: float | None = None,
    list_results: Callable[[], Iterable[Event]] = tuple,
) -> Work[RunStatus]:
    """Wait until jobs have ended, and return the status of the run.

    Args:
        list_results: returns events about new results other than those of probes, which are always reported.

    Raises:
        Pending: some jobs have not ended when the timeout has passed.
    """
    run_status, new_results = None, _NewProbeResults(run)
    watched = watch_jobs(run, launcher, jobs, timeout=timeout)
    for event in export_while_waiting(run, jobs, map(JobsProgress, watched)):
        if isinstance(event, JobsProgress):
            run_status = event.status
            yield from new_results.list_events(run_status)
            yield from list_results()
        yield event
    assert run_status is not None
    awaited_jobs = [job for job in run_status.jobs if job.id in jobs]
    if unfinished := [f"{job.id} ({job.state})" for job in awaited_jobs if job.state in ACTIVE_STATES]:
        raise Pending(
            f"not finished within the timeout: {', '.join(unfinished)}", "run the same command again to follow the jobs"
        )
    snapshot = run.read_snapshot()
    # if no probe was measured, the error that follows reports the failures
    reported = set() if snapshot.measured else {r.message for r in snapshot.results if isinstance(r, Failed)}
    for job in awaited_jobs:
        if job.state != "done" and job.reason not in reported:
            yield WarningEvent(messages.job_ended(job=job.id, state=job.state, reason=words.get_first_line(job.reason)))
    return run_status


class _NewProbeResults:
    """Finds the results of probes that have arrived since the last call."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._known = {result.id: result for result in run.read_snapshot().results}
        self._finished = {id_ for id_, result in self._known.items() if not isinstance(result, Failed)}

    def list_events(self, run_status: RunStatus) -> Iterator[ProbeFinished]:
        """Yield an event for each result that is new since the last call, with the counts of the jobs in `run_status`."""
        jobs = {job.id: job for job in run_status.jobs if job.kind == "probe"}
        if not jobs:
            return
        snapshot = self._run.read_snapshot()
        new = [result for result in snapshot.results if self._known.get(result.id) != result]
        self._known |= {result.id: result for result in new}
        probes = {
            make_probe_id(task.nodes, local)
            for task in snapshot.probe_tasks
            if task.job in jobs
            for local in task.local_batches
        }
        remaining = max((job.left for job in jobs.values() if job.left is not None), default=None)
        for result in new:
            self._finished.add(result.id)
            yield ProbeFinished(result, len(probes & self._finished), len(probes), remaining)


@contextlib.contextmanager
def explain_interruption(runs: Sequence[Run]) -> Iterator[None]:
    """Turn Ctrl-C into an `Interruption` that states how to follow or stop the jobs of these runs, which continue to run."""
    try:
        yield
    except KeyboardInterrupt:
        cancels = "; ".join(f"tula cancel {words.quote_path(run.path)}" for run in runs)
        raise Interruption(
            "interrupted; the jobs continue", f"run the same command again to follow the jobs; {cancels} stops them"
        ) from None


def warn_about_submitted_jobs(
    run: Run, launcher: Launcher, jobs: Sequence[str], under_way: Sequence[str]
) -> Iterator[Event]:
    """Warn of jobs that will not start or have other settings, and of environment variables not passed to sbatch."""
    if run.spec.cluster.kind == "slurm" and (names := list_overriding_variables(os.environ)):
        yield WarningEvent(messages.environment_not_passed(variables=names))
    submitted = [job for job in run.read_jobs() if job.id in jobs]
    for id_, state in launcher.query_states(run.read_snapshot(strict=True), submitted).items():
        if state.hopeless:
            yield WarningEvent(messages.job_will_not_start(job=id_, reason=state.reason))
    tasks = {task.job: task for task in run.read_tasks()}
    for id_ in under_way:
        if id_ in tasks and tasks[id_].spec.cluster != run.spec.cluster:
            yield WarningEvent(messages.other_cluster_section(job=id_))


# --- The progress of jobs

FILE_POLL_SECONDS = 2.0
"""Seconds between two polls of the results, which show the end of a job before the scheduler does."""


def watch_jobs(
    run: RunDir,
    launcher: Launcher,
    job_ids: Iterable[str],
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    timeout: float | None = None,
) -> Iterator[RunStatus]:
    """Yield the status of these jobs until all have ended; other jobs of the run are left out.

    A job whose results are complete, or whose last attempt has ended, is over at once. A job that the scheduler reports
    as ended without either is waited for during the grace period of its file system.

    Args:
        clock: Unix time.
        timeout: seconds after which to stop, whether the jobs have ended or not; None waits forever.

    Raises:
        RunGone: the run directory was moved or removed in the meantime.
        SchedulerError: none of the remaining jobs will ever start.
    """
    waiting_for, started, lost_since = set(job_ids), clock(), dict[str, float]()
    pause, longest = max(
        (get_backend(job.scheduler).poll for job in run.read_jobs() if job.id in waiting_for),
        default=get_backend("local").poll,
    )
    never_starts_polls = 0  # polls in sequence: a busy controller may give such a reason for a moment
    while True:
        now, folders = clock(), _list_result_folders(run)
        written = _list_write_times(folders)
        status = read_run_status(run, launcher, now=now, only=waiting_for)
        if not run.path.is_dir():
            raise RunGone(run.path)
        yield status
        waiting = [job for job in status.jobs if _is_waiting(job, lost_since, now=now)]
        if not waiting:
            return
        never_starts_polls = never_starts_polls + 1 if all(job.hopeless for job in waiting) else 0
        if never_starts_polls > 1:
            reasons = dict.fromkeys(job.reason for job in waiting)
            raise SchedulerError(
                f"{', '.join(job.id for job in waiting)} will not start: {'; '.join(reasons)}",
                "remove queued jobs with tula cancel, correct section cluster, and run the same command again",
            )
        if timeout is not None and now - started >= timeout:
            return
        remaining = pause if timeout is None else min(pause, max(0.0, started + timeout - now))
        while remaining > 0:
            last_written, written = written, _list_write_times(folders)
            if written != last_written and _are_jobs_finished(run, waiting_for):
                break
            sleep(min(FILE_POLL_SECONDS, remaining))
            remaining -= FILE_POLL_SECONDS
        pause = min(longest, pause * 1.5)


def _list_result_folders(run: RunDir) -> list[Path]:
    trainings = [run.path / "train" / name for name in list_names(run.path / "train")]
    evaluations = [folder / "evaluations" for folder in trainings]
    return [*(run.path / name for name in ("tasks", "results", "script", "train")), *trainings, *evaluations]


def _list_write_times(folders: Iterable[Path]) -> list[int]:
    """Return the modification times (ns) of the folders that exist; much cheaper than reading the files in them."""
    times = []
    for folder in folders:
        with contextlib.suppress(OSError):
            times.append(folder.stat().st_mtime_ns)
    return times


def _are_jobs_finished(run: RunDir, job_ids: set[str]) -> bool:
    """Return whether the files show that these jobs are over; reading them is cheaper than querying the scheduler."""
    snapshot = run.read_snapshot()
    results = {result.id: result for result in snapshot.results}
    tasks_by_job = [snapshot.list_tasks_of_job(id_) for id_ in job_ids]
    return all(
        tasks and (progress := read_job_progress(snapshot, tasks, results)).done == progress.total
        for tasks in tasks_by_job
    )


def _is_waiting(job: JobStatus, lost_since: dict[str, float], *, now: float) -> bool:
    if job.state != "lost":
        lost_since.pop(job.id, None)
        return job.state in ACTIVE_STATES
    return now - lost_since.setdefault(job.id, now) < get_backend(job.scheduler).grace
