"""The state of a run: its jobs and its training.

Reads the run directory; the scheduler is asked, not believed: it forgets jobs and runs ahead of the files. Services for `tula status`, `list`, `logs`, `cancel` and for the waiting in `profile` and `train`.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tula_cli.cluster.launcher import Launcher
from tula_cli.cluster.scheduler import SchedulerState
from tula_cli.errors import RunGone, SchedulerError, TulaError
from tula_cli.models import halving
from tula_cli.run.directory import Part, RunDir
from tula_cli.run.files import list_names
from tula_cli.run.owner import require_own
from tula_cli.run.package import list_upgrades
from tula_cli.run.records.jobs import Attempt
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.recommendations import Recommendation
from tula_cli.run.records.results import Evaluated, StageDecision, TrainResult, Tuning
from tula_cli.run.records.scripts import Rehearsal
from tula_cli.run.records.tasks import JobTask, ProbeTask, TrainTask
from tula_cli.run.snapshot import Snapshot
from tula_cli.services.exporting import destination
from tula_cli.services.progress.job_status import (
    ACTIVE,
    JobStatus,
    StageStatus,
    TrainingStatus,
    TuningStatus,
    grace,
    job_progress,
    job_status,
    mean_probe_seconds,
    with_file_clock,
)
from tula_cli.services.progress.probe_notes import count_notes
from tula_cli.spec.job import JobSpec
from tula_cli.spec.scripts.script import requested_samples

POLL = {"local": (0.5, 2.0), "slurm": (10.0, 60.0)}
"""Seconds between two questions to the scheduler: the first, and what it grows to."""

FILE_POLL_SECONDS = 2.0
"""Seconds between two looks at the results, which tell of the end first."""


def poll_interval(scheduler: str) -> tuple[float, float]:
    """Return the seconds between two looks at jobs, at first and at most, by what they run on."""
    return POLL["local" if scheduler == "local" else "slurm"]


@dataclass(frozen=True)
class AttemptStatus:
    """One start of a job's ranks, and its place in the story."""

    job: str
    attempt: Attempt
    batch: int | None  # global; None for probes, which have several
    nodes: int
    cause: str  # why a training was relaunched; empty for the first


@dataclass(frozen=True)
class RunStatus:
    """A whole run at one moment."""

    id: str
    path: Path
    at: float  # Unix time
    measured: int
    out_of_memory: int
    failed: int
    jobs: tuple[JobStatus, ...]
    training: TrainingStatus | None
    attempts: tuple[AttemptStatus, ...]  # oldest first
    recommendation: Recommendation | None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # of an upgrade under a job; what the probes of a script do not tell, and why
    rehearsal: Rehearsal | None = None  # the newest of a script's resume
    evaluations: tuple[Evaluated, ...] = ()  # of the training's weights (tula evaluate), oldest first
    between_rounds: bool = False  # an adaptive search may have a further round to submit

    def active(self, job_ids: Iterable[str] | None = None) -> bool:
        """Return whether one of these jobs (of all) is queued or running."""
        requested = None if job_ids is None else set(job_ids)
        return any(job.state in ACTIVE for job in self.jobs if requested is None or job.id in requested)


# --- one moment


def run_status(run: RunDir, launcher: Launcher, *, now: float, only: Set[str] | None = None) -> RunStatus:
    """Return what is known of a run at `now` (Unix time). Damaged records and rows are warnings: the others are shown.

    Args:
        run: the run.
        launcher: who knows the scheduler.
        now: Unix time.
        only: tell of these jobs and their training alone; None for all.
    """
    files_snapshot = run.read(skip_damaged=only is None)
    results = {result.id: result for result in files_snapshot.results}
    pace = mean_probe_seconds(files_snapshot.results, files_snapshot.attempts)
    tasks = [task for task in files_snapshot.tasks if only is None or task.job in only]
    tasked = [
        job for job in files_snapshot.jobs if (only is None or job.id in only) and files_snapshot.tasks_of(job.id)
    ]
    states = launcher.states(files_snapshot, tasked)
    training = _training_status(files_snapshot, tasks, states, now=now)
    jobs = [
        job_status(files_snapshot, job, results, states[job.id], pace=pace, training=training, now=now)
        for job in tasked
    ]
    moving = {status.id for status in jobs if status.state in ACTIVE}
    if training is not None and not training.finished and training.job not in moving:
        training = dataclasses.replace(training, eta=None)
    return RunStatus(
        id=run.id,
        path=run.path,
        at=now,
        measured=sum(isinstance(result, Measured) for result in files_snapshot.results),
        out_of_memory=sum(isinstance(result, OutOfMemory) for result in files_snapshot.results),
        failed=sum(isinstance(result, Failed) for result in files_snapshot.results),
        jobs=tuple(jobs),
        training=training,
        attempts=_attempt_statuses(tasks, with_file_clock(files_snapshot, files_snapshot.attempts)),
        recommendation=files_snapshot.recommendation,
        warnings=(
            *files_snapshot.job_warnings,
            *files_snapshot.record_warnings,
            *(files_snapshot.training_warnings if only is None else ()),
            *(destination.problems(run.path / "exports") if only is None else ()),
        ),
        notes=(
            *list_upgrades(files_snapshot),
            *count_notes(result for result in files_snapshot.results if isinstance(result, Measured)),
        ),
        rehearsal=files_snapshot.rehearsals[-1] if files_snapshot.rehearsals and only is None else None,
        evaluations=tuple(files_snapshot.training(training.signature).evaluations()) if training is not None else (),
        between_rounds=not moving and _is_between_rounds(files_snapshot),
    )


def _is_between_rounds(files_snapshot: Snapshot) -> bool:
    """Return whether what an adaptive search has measured so far waits for its next round, or for its end."""
    adaptive_tasks = [
        task for task in files_snapshot.tasks if isinstance(task, ProbeTask) and task.spec.search.strategy == "adaptive"
    ]
    has_begun = (
        any(isinstance(task, TrainTask) for task in files_snapshot.tasks) or files_snapshot.recommendation is not None
    )
    return bool(adaptive_tasks and files_snapshot.results) and not has_begun


def _attempt_statuses(tasks: Sequence[JobTask], attempts: Sequence[Attempt]) -> tuple[AttemptStatus, ...]:
    by_id = {task.id: task for task in tasks}
    return tuple(
        AttemptStatus(
            job=task.job,
            attempt=attempt,
            batch=task.batch if isinstance(task, TrainTask) else None,
            nodes=task.nodes,
            cause=task.cause if isinstance(task, TrainTask) and attempt.number == 1 else "",
        )
        for attempt in attempts
        if (task := by_id.get(attempt.task)) is not None
    )


# --- training


def _training_status(
    files_snapshot: Snapshot, tasks: Iterable[JobTask], states: Mapping[str, SchedulerState], *, now: float
) -> TrainingStatus | None:
    """Return the state of that training of these tasks which was worked on last."""
    newest = _newest_train_task(files_snapshot, tasks)
    if newest is None:
        return None
    files = files_snapshot.training(newest.signature)
    rows, result = files.sampled_metrics(), files.result()
    steps = [row for row in rows if row["kind"] == "step"]
    epochs = [row for row in rows if row["kind"] == "epoch"]
    moving = [row for row in rows if row["kind"] in ("start", "step", "epoch")]
    last_step, last_epoch = steps[-1] if steps else {}, epochs[-1] if epochs else {}
    latest = max((row for row in (last_step, last_epoch) if row), key=lambda row: row["samples"], default={})
    row = _newest_with_eta(rows)
    script, stage = newest.spec.script, _stage_status(rows, result, files.stage_decisions(), nodes=newest.nodes)
    prediction = newest.prediction and newest.prediction.of_batch(stage.batch if stage else newest.batch)
    summary = files.summary() if result is not None else None
    return TrainingStatus(
        signature=newest.signature,
        job=newest.job,
        finished=result is not None,
        nodes=newest.nodes,
        batch=newest.batch if result is None else result.batch,
        attempt=newest.attempt,
        epoch=float(moving[-1]["epoch"] or 0.0) if moving else 0.0,
        epochs=_epochs_of_training(newest.spec, moving),
        samples=int(moving[-1]["samples"]) if moving else 0,
        loss=latest.get("loss"),
        top1=last_epoch.get("top1"),
        perplexity=last_epoch.get("perplexity"),
        tokens_per_second=last_step.get("tokens_per_second"),
        padding=last_step.get("padding"),
        metrics=last_epoch.get("metrics") or {},
        lr=latest.get("lr"),
        beta2=next((row.get("beta2") for row in reversed(rows) if row["kind"] in ("start", "stage")), None),
        step_time=latest.get("step_time") if summary is None or summary.actual_step is None else summary.actual_step,
        predicted_step=None if prediction is None else prediction.step_time,
        eta=_remaining_seconds(
            row,
            finished=result is not None,
            now=now - files.clock_ahead(rows)
            if _is_training(files_snapshot, newest.job, states.get(newest.job), row)
            else None,
        ),
        noise=next((row for row in reversed(rows) if row["kind"] == "noise"), None),
        tuning=_tuning_status(files.tuning()),
        kwh=energy.kwh if (energy := files.energy()) is not None else None,
        samples_asked=None if script is None else requested_samples(script),
        ags=_newest_scaling(rows),
        warnings=tuple(dict.fromkeys(row["message"] for row in rows if row["kind"] == "warning")),
        changes=files.changes(),
        stage=stage,
        stages=newest.stages,
    )


def _newest_scaling(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return what gradient scaling did in the last epoch, of a script in all; None where a training scales none."""
    ags_rows = (row["ags"] for row in reversed(rows) if isinstance(row.get("ags"), Mapping))
    return next((values.get("so_far", values) for values in ags_rows), None)


def _stage_status(
    rows: Sequence[Mapping[str, Any]], result: TrainResult | None, decisions: Sequence[StageDecision], *, nodes: int
) -> StageStatus | None:
    """Return the stage of a training whose batch grows; None of any other, and of one that is over."""
    newest = next((row for row in reversed(rows) if row["kind"] == "stage"), None)
    if newest is None or result is not None:
        return None
    coming = next((decision for decision in reversed(decisions) if decision.batch > newest["batch"]), None)
    return StageStatus(newest["batch"], newest["stage"], newest["stages"], newest.get("noise"), coming, nodes)


def _epochs_of_training(spec: JobSpec, moving: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the epochs of a training; None where they do not tell how far it is: nobody knows how many samples one has."""
    if spec.script is None:
        return spec.train.epochs_at_most
    return None if moving and moving[-1]["epoch"] is None else spec.script.length.epochs


def _newest_train_task(files_snapshot: Snapshot, tasks: Iterable[JobTask]) -> TrainTask | None:
    trainings = [task for task in tasks if isinstance(task, TrainTask)]
    submitted = {job.id: job.submitted_at for job in files_snapshot.jobs}
    return max(trainings, key=lambda task: (submitted.get(task.job, 0.0), task.attempt), default=None)


def _newest_with_eta(rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the newest row that says what is left, of the newest start; nothing if that has made no step yet."""
    newest = [row for row in rows if row["kind"] in ("step", "branch", "start")][-1:]
    return newest[0] if newest and newest[0]["kind"] != "start" else {}


def _tuning_status(tuning: Tuning | None) -> TuningStatus | None:
    if tuning is None:
        return None
    names = [arm.name for arm in tuning.arms]
    turn, _ = halving.next_branch_or_winner(names, tuning.branches)
    if turn is None or tuning.chosen is not None:
        chosen = tuning.chosen.name if tuning.chosen is not None else None
        return TuningStatus(None, 0, 0, 0, chosen, tuning.branches)
    branches_done = sum(branch.rung == turn.rung for branch in tuning.branches)
    count = max(branches_done + 1, len(halving.arms_of_rung(names, tuning.branches)))
    return TuningStatus(names[turn.arm], branches_done + 1, count, turn.rung, None, tuning.branches)


def _is_training(files_snapshot: Snapshot, job: str, scheduler: SchedulerState | None, row: Mapping[str, Any]) -> bool:
    """Return whether the attempt that has written a row still trains: it has not ended, nor does its job wait."""
    if scheduler is not None and (scheduler.state == "pending" or scheduler.suspended):
        return False
    attempts = files_snapshot.attempts_of(job)
    return not attempts or (attempts[-1].ended_at is None and row.get("time", 0.0) >= attempts[-1].started_at)


def _remaining_seconds(last_row: Mapping[str, Any], *, finished: bool, now: float | None) -> float | None:
    """Return the seconds left: what the last row said, less the time since; all of it while nothing trains (`now` is None)."""
    if finished:
        return 0.0
    if last_row.get("eta") is None:
        return None
    since = 0.0 if now is None else now - last_row["time"]
    return max(0.0, float(last_row["eta"]) - since)


# --- waiting


def watch_jobs(
    run: RunDir,
    launcher: Launcher,
    job_ids: Iterable[str],
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    timeout: float | None = None,
) -> Iterator[RunStatus]:
    """Yield the status of these jobs until all have ended; what else the run has is left out.

    A job whose results are complete, or whose last attempt has ended, is over at once; one that the scheduler calls
    ended without either is given the grace period of its file system first.

    Args:
        run: the run.
        launcher: who knows the scheduler.
        job_ids: the jobs to wait for.
        clock: Unix time.
        sleep: waits for some seconds.
        timeout: seconds after which to stop, ended or not; None waits for ever.

    Raises:
        RunGone: the run directory was moved or removed meanwhile.
        SchedulerError: none of the jobs that are left will ever start.
    """
    waiting_for, started, lost_since = set(job_ids), clock(), dict[str, float]()
    launcher = launcher.patient()
    kinds = {job.scheduler for job in run.jobs() if job.id in waiting_for}
    pause, longest = poll_interval("local" if kinds <= {"local"} else "slurm")
    hopeless = 0  # polls in sequence: a busy controller may give such a reason for a moment
    while True:
        now, folders = clock(), _result_folders(run)
        written = _last_written(folders)
        status = run_status(run, launcher, now=now, only=waiting_for)
        if not run.path.is_dir():
            raise RunGone(run.path)
        yield status
        waiting = [job for job in status.jobs if _is_waiting(job, lost_since, now=now)]
        if not waiting:
            return
        hopeless = hopeless + 1 if all(job.hopeless for job in waiting) else 0
        if hopeless > 1:
            raise _never_starts_error(waiting)
        if timeout is not None and now - started >= timeout:
            return
        remaining = pause if timeout is None else min(pause, max(0.0, started + timeout - now))
        while remaining > 0:
            last_written, written = written, _last_written(folders)
            if written != last_written and _are_complete(run, waiting_for):
                break
            sleep(min(FILE_POLL_SECONDS, remaining))
            remaining -= FILE_POLL_SECONDS
        pause = min(longest, pause * 1.5)


def _never_starts_error(jobs: Sequence[JobStatus]) -> SchedulerError:
    reasons = dict.fromkeys(job.reason for job in jobs)
    names = ", ".join(job.id for job in jobs)
    return SchedulerError(
        f"waiting for {names} is of no use: {'; '.join(reasons)}",
        "tula cancel takes what is queued out of the queue; correct the cluster section and run the same command again",
    )


def _result_folders(run: RunDir) -> list[Path]:
    trainings = [run.path / "train" / name for name in list_names(run.path / "train")]
    evaluations = [folder / "evaluations" for folder in trainings]
    return [*(run.path / name for name in ("tasks", "results", "script", "train")), *trainings, *evaluations]


def _last_written(folders: Iterable[Path]) -> list[int]:
    """Return when folders were last written to (ns), those that are there: a few calls, where reading takes thousands."""
    times = []
    for folder in folders:
        with contextlib.suppress(OSError):
            times.append(folder.stat().st_mtime_ns)
    return times


def _are_complete(run: RunDir, job_ids: set[str]) -> bool:
    """Return whether the files say that these jobs are over: looking at them is cheaper than asking the scheduler."""
    files_snapshot = run.read()
    results = {result.id: result for result in files_snapshot.results}
    tasks_by_job = [files_snapshot.tasks_of(id_) for id_ in job_ids]
    return all(
        tasks and (progress := job_progress(files_snapshot, tasks, results)).done == progress.total
        for tasks in tasks_by_job
    )


def _is_waiting(job: JobStatus, lost_since: dict[str, float], *, now: float) -> bool:
    if job.state != "lost":
        lost_since.pop(job.id, None)
        return job.state in ACTIVE
    return now - lost_since.setdefault(job.id, now) < grace(job.scheduler)


# --- ending


def cancel_jobs(parts: Sequence[Part], launcher_for: Callable[[Part], Launcher]) -> list[str]:
    """End the parts' own jobs that are queued or running; return their names. Those that cannot be read are left out.

    Each is marked first, so that nothing (a supervisor, the next link of a chain) starts it again meanwhile. A job, or a part,
    that cannot be cancelled keeps none of the others.

    Raises:
        NotYours: the run is another user's.
        TulaError: some could not be cancelled; it names them, and those that were.
    """
    for part in parts:
        require_own(part.run.path)
    cancelled: list[str] = []
    failures: dict[str, TulaError] = {}
    for part in parts:
        try:
            launcher, files_snapshot = launcher_for(part), part.run.read()
            states = launcher.states(files_snapshot, files_snapshot.jobs)
        except TulaError as error:
            failures[f"all jobs of {part.name}" if part.name else "all jobs"] = error
            continue
        for job in files_snapshot.jobs:
            if states[job.id].state == "ended":
                continue
            (name,) = part.name_jobs([job.id])
            try:
                part.run.cancel(job.id)
                launcher.cancel(part.run, job)
                cancelled.append(name)
            except TulaError as error:
                failures[name] = error
    if len(failures) == 1 and not cancelled:
        raise next(iter(failures.values()))
    if failures:
        raise SchedulerError(
            f"not cancelled: {'; '.join(f'{name} ({error.message})' for name, error in failures.items())}",
            f"run tula cancel again, or end them by the scheduler's own command; cancelled: {', '.join(cancelled) or 'none'}",
        )
    return cancelled
