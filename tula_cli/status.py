"""What became of a run: its jobs, its training, its logs.

Reads the run directory; the scheduler is asked, not believed: it forgets jobs and runs ahead of the files. Services for `tula status`, `list`, `logs`, `cancel` and for the waiting in `profile` and `train`.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tula_cli.errors import SpecError, TulaError
from tula_cli.launch import Launcher
from tula_cli.models import halving
from tula_cli.outcome import advice
from tula_cli.plugins import nearest
from tula_cli.records import (
    Attempt,
    Branch,
    Failed,
    Job,
    Measured,
    OutOfMemory,
    ProbeTask,
    Recommendation,
    TrainTask,
    Tuning,
)
from tula_cli.relaunch import TAKEN
from tula_cli.rundir import Part, RunDir, probe_id
from tula_cli.scheduler import SchedulerState

JobState = Literal["queued", "running", "done", "failed", "diverged", "cancelled", "lost"]
ACTIVE: tuple[JobState, ...] = ("queued", "running")

GRACE = {"local": 2.0, "slurm": 60.0}
"""Seconds for which the files of an ended job may still be on their way (NFS, Lustre)."""

CLOCKS_APART = 60.0
"""Seconds by which the clocks of two machines may differ."""

POLL = {"local": (0.5, 2.0), "slurm": (10.0, 60.0)}
"""Seconds between two questions to the scheduler: the first, and what it grows to."""

LOOK = 2.0
"""Seconds between two looks at the results, which tell of the end first."""


@dataclass(frozen=True)
class Probe:
    """A configuration that a job measures; `batch` is global."""

    nodes: int
    local_batch: int
    batch: int


@dataclass(frozen=True)
class JobStatus:
    """One job. `total` and `done` count its probes; a training job has one thing to do."""

    id: str
    kind: Literal["probe", "train"]
    scheduler: Literal["local", "slurm"]
    scheduler_id: str
    nodes: int
    state: JobState
    reason: str
    starts_at: float | None  # Unix time at which a queued job is expected to start; None where nobody tells
    total: int
    done: int
    now: Probe | None  # what runs, or comes next
    elapsed: float | None  # seconds; None before it starts
    left: float | None  # seconds, estimated; None where nothing tells
    node_hours: float
    node_hours_left: float | None


@dataclass(frozen=True)
class TuningStatus:
    """How far a self-tuning training is with its branches."""

    arm: str | None  # whose branch is next or under way; None once one is chosen
    number: int  # of the branch among those of its rung, from 1
    count: int  # branches of the rung
    rung: int  # from 1
    chosen: str | None
    branches: tuple[Branch, ...]  # those that have ended


@dataclass(frozen=True)
class TrainingStatus:
    """How far a training run is. Seconds; `batch` is global."""

    signature: str
    job: str
    finished: bool
    nodes: int
    batch: int
    attempt: int
    epoch: float
    epochs: int
    samples: int
    loss: float | None
    top1: float | None
    lr: float | None
    step_time: float | None
    predicted_step: float | None
    eta: float | None
    warnings: tuple[str, ...]
    tuning: TuningStatus | None = None  # of method auto


@dataclass(frozen=True)
class AttemptStatus:
    """One start of a job's ranks, and its place in the story."""

    job: str
    attempt: Attempt
    batch: int | None  # global; None for probes, which have several
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
    between_rounds: bool = False  # an adaptive search may have a further round to submit

    def active(self, job_ids: Iterable[str] | None = None) -> bool:
        """Return whether one of these jobs (of all) is queued or running."""
        wanted = None if job_ids is None else set(job_ids)
        return any(job.state in ACTIVE for job in self.jobs if wanted is None or job.id in wanted)


# --- one moment


def snapshot(run: RunDir, launcher: Launcher, *, now: float) -> RunStatus:
    """Return what is known of a run at `now` (Unix time). A damaged result is a warning: the others are shown."""
    readable, problems = run.readable_results()
    tasks, results = run.tasks(), {result.id: result for result in readable}
    attempts = run.attempts()
    pace = _pace(results.values(), attempts)
    training = _training(run, tasks, now=now)
    tasked = [(job, own) for job in run.jobs() if (own := [task for task in tasks if task.job == job.id])]
    states = launcher.states(run, [job for job, _ in tasked])
    jobs = [_job(run, job, own, results, states[job.id], pace=pace, training=training, now=now) for job, own in tasked]
    moving = {status.id for status in jobs if status.state in ACTIVE}
    if training is not None and not training.finished and training.job not in moving:
        training = dataclasses.replace(training, eta=None)
    return RunStatus(
        id=run.id,
        path=run.path,
        at=now,
        measured=sum(isinstance(result, Measured) for result in results.values()),
        out_of_memory=sum(isinstance(result, OutOfMemory) for result in results.values()),
        failed=sum(isinstance(result, Failed) for result in results.values()),
        jobs=tuple(jobs),
        training=training,
        attempts=_story(tasks, attempts),
        recommendation=run.recommendation(),
        warnings=tuple(problems),
        between_rounds=not moving and _between_rounds(run, tasks, results),
    )


def _between_rounds(run: RunDir, tasks: Iterable[ProbeTask | TrainTask], results: Mapping[str, object]) -> bool:
    """Return whether what an adaptive search has measured so far waits for its next round, or for its end."""
    asked = [task for task in tasks if isinstance(task, ProbeTask) and task.spec.search.strategy == "adaptive"]
    begun = any(isinstance(task, TrainTask) for task in tasks) or run.recommendation() is not None
    return bool(asked and results) and not begun


def _story(tasks: list[ProbeTask | TrainTask], attempts: list[Attempt]) -> tuple[AttemptStatus, ...]:
    by_id = {task.id: task for task in tasks}
    return tuple(
        AttemptStatus(
            job=task.job,
            attempt=attempt,
            batch=task.batch if isinstance(task, TrainTask) else None,
            cause=task.cause if isinstance(task, TrainTask) and attempt.number == 1 else "",
        )
        for attempt in attempts
        if (task := by_id.get(attempt.task)) is not None
    )


Results = dict[str, Measured | OutOfMemory | Failed]


@dataclass(frozen=True)
class _Progress:
    """What a job has to do and what of it there is."""

    total: int
    done: int
    now: Probe | None
    measured_at: float | None = None  # Unix time of the last measurement
    failed: tuple[str, ...] = ()  # messages of what failed; the next call runs it again

    @property
    def complete(self) -> bool:
        return self.done + len(self.failed) == self.total


def _job(
    run: RunDir,
    job: Job,
    tasks: list[ProbeTask | TrainTask],
    results: Results,
    scheduler: SchedulerState,
    *,
    pace: float | None,
    training: TrainingStatus | None,
    now: float,
) -> JobStatus:
    progress = _progress(run, tasks, results)
    attempts = sorted((a for task in tasks for a in run.attempts(task.id)), key=lambda attempt: attempt.started_at)
    recent = [attempt for attempt in attempts if attempt.started_at >= job.submitted_at - CLOCKS_APART]
    state, reason = _state(progress, recent, scheduler, cancelled=run.cancelled_by(job.id))
    elapsed = _elapsed(attempts, until=now if state == "running" else progress.measured_at)
    left = _left(progress, training, pace=pace) if state in ACTIVE else None
    return JobStatus(
        id=job.id,
        kind=tasks[0].kind,
        scheduler=job.scheduler,
        scheduler_id=job.scheduler_id,
        nodes=job.nodes,
        state=state,
        reason=reason,
        starts_at=scheduler.starts_at if state == "queued" else None,
        total=progress.total,
        done=progress.done,
        now=progress.now if state in ACTIVE else None,
        elapsed=elapsed,
        left=left,
        node_hours=job.nodes * (elapsed or 0.0) / 3600,
        node_hours_left=None if left is None else job.nodes * left / 3600,
    )


@dataclass(frozen=True)
class _Wanted:
    id: str
    probe: Probe


def _probes(tasks: Iterable[ProbeTask | TrainTask]) -> list[_Wanted]:
    """Return the probes of a job, ascending as it runs them."""
    found = {}
    for task in tasks:
        if isinstance(task, ProbeTask):
            for local in task.local_batches:
                batch = local * task.nodes * task.spec.cluster.gpus_per_node
                found[task.nodes, local] = _Wanted(probe_id(task.nodes, local), Probe(task.nodes, local, batch))
    # A packed job has several numbers of nodes, and begins with the largest.
    return [found[key] for key in sorted(found, key=lambda key: (-key[0], key[1]))]


def _progress(run: RunDir, tasks: list[ProbeTask | TrainTask], results: Results) -> _Progress:
    newest = tasks[-1]
    if isinstance(newest, TrainTask):
        return _Progress(total=1, done=int(run.summary(newest.signature) is not None), now=None)
    probes = _probes(tasks)
    there = {wanted.id: results[wanted.id] for wanted in probes if wanted.id in results}
    failed = {id_: result.message for id_, result in there.items() if isinstance(result, Failed)}
    undone = [wanted.probe for wanted in probes if wanted.id not in there or wanted.id in failed]
    return _Progress(
        total=len(probes),
        done=len(probes) - len(undone),
        now=undone[0] if undone else None,
        measured_at=max((r.measured_at for r in there.values() if isinstance(r, Measured)), default=None),
        failed=tuple(failed.values()),
    )


def _state(
    progress: _Progress, attempts: list[Attempt], scheduler: SchedulerState, *, cancelled: str
) -> tuple[JobState, str]:
    """Return a job's state: results first, then the user's cancel, then the scheduler, then the attempts."""
    live = scheduler.state in ("pending", "running")
    if progress.complete and not (progress.failed and live):
        return ("failed", progress.failed[0]) if progress.failed else ("done", "")
    if cancelled:
        return "cancelled", f"by {cancelled}"
    if scheduler.state == "pending":
        return "queued", scheduler.reason
    if scheduler.state == "running":
        return "running", scheduler.reason
    return _state_from_attempts(progress, attempts, scheduler)


def _state_from_attempts(
    progress: _Progress, attempts: list[Attempt], scheduler: SchedulerState
) -> tuple[JobState, str]:
    last = attempts[-1] if attempts else None
    if last is not None and last.ended_at is not None:
        if scheduler.state == "unknown" and last.outcome in TAKEN:
            return "queued", scheduler.reason  # the next link of its chain goes on
        measured = last.outcome == "done" or (last.outcome == "device_oom" and progress.now is not None)
        if measured:  # its supervisor saw all results: they are on their way here (NFS, Lustre)
            return "lost", f"ended well, but {progress.done} of {progress.total} results are to be seen here"
        if last.outcome == "diverged":
            return "diverged", f"{last.message}; {advice(last.outcome)}"
        words = last.message or f"ended with {progress.done} of {progress.total} probes"
        verdict = (
            "" if scheduler.reason.startswith("FAILED") or not scheduler.reason else f" (SLURM: {scheduler.reason})"
        )
        return "failed", f"{words}{verdict}"
    if scheduler.state == "ended":
        return "lost", scheduler.reason or "ended without saying why (killed from outside?)"
    if last is not None:
        return "running", scheduler.reason or "the scheduler does not know the job"
    return "queued", scheduler.reason or "the scheduler does not know the job"


def _elapsed(attempts: list[Attempt], *, until: float | None) -> float | None:
    """Return the seconds that attempts took; an open one lasts until `until`, or is not counted."""
    if not attempts:
        return None
    ends = [attempt.ended_at or until or attempt.started_at for attempt in attempts]
    return sum(max(0.0, end - attempt.started_at) for attempt, end in zip(attempts, ends, strict=True))


def _left(progress: _Progress, training: TrainingStatus | None, *, pace: float | None) -> float | None:
    if progress.now is None:
        return training.eta if training is not None else None
    return None if pace is None else pace * (progress.total - progress.done)


def _pace(results: Iterable[Measured | OutOfMemory | Failed], attempts: list[Attempt]) -> float | None:
    """Return the mean seconds of a probe so far, start-up of its workers included; None before the first."""
    moments: dict[int, list[float]] = {}
    for result in results:
        if isinstance(result, Measured):
            moments.setdefault(result.nodes, []).append(result.measured_at)
    starts = sorted(attempt.started_at for attempt in attempts)
    spans = []
    for times in moments.values():
        before = [start for start in starts if start <= min(times)]
        marks = sorted([*before[-1:], *times])
        spans += [late - early for early, late in itertools.pairwise(marks)]
    return sum(spans) / len(spans) if spans else None


# --- training


def _training(run: RunDir, tasks: list[ProbeTask | TrainTask], *, now: float) -> TrainingStatus | None:
    """Return the state of the training run that was worked on last."""
    newest = _newest_train_task(run, tasks)
    if newest is None:
        return None
    rows, result = run.metrics(newest.signature), run.train_result(newest.signature)
    steps = [row for row in rows if row["kind"] == "step"]
    epochs = [row for row in rows if row["kind"] == "epoch"]
    moving = [row for row in rows if row["kind"] in ("start", "step", "epoch")]
    last_step, last_epoch = steps[-1] if steps else {}, epochs[-1] if epochs else {}
    latest = max((row for row in (last_step, last_epoch) if row), key=lambda row: row["samples"], default={})
    prediction = newest.ladder[0].prediction
    return TrainingStatus(
        signature=newest.signature,
        job=newest.job,
        finished=result is not None,
        nodes=newest.nodes,
        batch=newest.batch if result is None else result.batch,
        attempt=newest.attempt,
        epoch=float(moving[-1]["epoch"]) if moving else 0.0,
        epochs=newest.spec.train.epochs,
        samples=int(moving[-1]["samples"]) if moving else 0,
        loss=latest.get("loss"),
        top1=last_epoch.get("top1"),
        lr=latest.get("lr"),
        step_time=latest.get("step_time"),
        predicted_step=None if prediction is None else prediction.step_time,
        eta=_eta(_newest_with_eta(rows), finished=result is not None, now=now),
        tuning=_tuning(run.tuning(newest.signature)),
        warnings=tuple(dict.fromkeys(row["message"] for row in rows if row["kind"] == "warning")),
    )


def _newest_train_task(run: RunDir, tasks: list[ProbeTask | TrainTask]) -> TrainTask | None:
    trainings = [task for task in tasks if isinstance(task, TrainTask)]
    submitted = {job.id: job.submitted_at for job in run.jobs()}
    return max(trainings, key=lambda task: (submitted.get(task.job, 0.0), task.attempt), default=None)


def _newest_with_eta(rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    timed = [row for row in rows if row["kind"] in ("step", "branch")]
    return timed[-1] if timed else {}


def _tuning(found: Tuning | None) -> TuningStatus | None:
    if found is None:
        return None
    names = [arm.name for arm in found.arms]
    turn, _ = halving.standing(names, found.branches)
    if turn is None or found.chosen is not None:
        chosen = found.chosen.name if found.chosen is not None else None
        return TuningStatus(None, 0, 0, 0, chosen, found.branches)
    done = sum(branch.rung == turn.rung for branch in found.branches)
    count = max(done + 1, len(halving.alive(names, found.branches)))
    return TuningStatus(names[turn.arm], done + 1, count, turn.rung, None, found.branches)


def _eta(last_row: Mapping[str, Any], *, finished: bool, now: float) -> float | None:
    """Return the seconds left: what the last row said, less the time since."""
    if finished:
        return 0.0
    if last_row.get("eta") is None:
        return None
    left: float = last_row["eta"] - (now - last_row["time"])
    return max(0.0, left)


# --- waiting


def watch(
    run: RunDir,
    launcher: Launcher,
    job_ids: Iterable[str],
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    timeout: float | None = None,
) -> Iterator[RunStatus]:
    """Yield the run's status until all these jobs have ended.

    A job whose results are complete, or whose last attempt has ended, is over at once; one that the scheduler calls
    ended without either is given the grace period of its file system first.

    Args:
        run: the run.
        launcher: who knows the scheduler.
        job_ids: the jobs to wait for.
        clock: Unix time.
        sleep: waits for some seconds.
        timeout: seconds after which to stop, ended or not; None waits for ever.
    """
    wanted, started, lost_since = set(job_ids), clock(), dict[str, float]()
    kinds = {job.scheduler for job in run.jobs() if job.id in wanted}
    pause, longest = POLL["slurm" if "slurm" in kinds else "local"]
    while True:
        now = clock()
        status = snapshot(run, launcher, now=now)
        yield status
        if not any(_waits(job, lost_since, now=now) for job in status.jobs if job.id in wanted):
            return
        if timeout is not None and now - started >= timeout:
            return
        left = pause if timeout is None else min(pause, max(0.0, started + timeout - now))
        while left > 0 and not _complete(run, wanted):
            sleep(min(LOOK, left))
            left -= LOOK
        pause = min(longest, pause * 1.5)


def _complete(run: RunDir, job_ids: set[str]) -> bool:
    """Return whether the files say that these jobs are over: looking at them is cheaper than asking the scheduler."""
    tasks, results = run.tasks(), {result.id: result for result in run.readable_results()[0]}
    own = [[task for task in tasks if task.job == id_] for id_ in job_ids]
    return all(found and (now := _progress(run, found, results)).done == now.total for found in own)


def _waits(job: JobStatus, lost_since: dict[str, float], *, now: float) -> bool:
    if job.state != "lost":
        lost_since.pop(job.id, None)
        return job.state in ACTIVE
    return now - lost_since.setdefault(job.id, now) < GRACE[job.scheduler]


# --- all runs


@dataclass(frozen=True)
class RunSummary:
    """A line of `tula list`; `problem` says why a damaged run cannot be read."""

    id: str
    path: Path
    changed: float | None  # Unix time
    model: str = ""
    dataset: str = ""
    measured: int = 0
    out_of_memory: int = 0
    failed: int = 0
    recommendation: Recommendation | None = None
    trained: int = 0  # finished training runs
    best_top1: float | None = None
    problem: str = ""


def list_runs(root: Path) -> tuple[RunSummary, ...]:
    """Return the runs under `root`, last changed first. The scheduler is not asked."""
    return tuple(_summary(run) for run in RunDir.all(root))


def _summary(run: RunDir) -> RunSummary:
    try:
        spec, recommendation = run.spec(), run.recommendation()
        runs = [part.run for part in run.parts(spec)]  # of each node type
        results = [result for own in runs for result in own.results()]
        finished = [result for own in runs for name in own.train_signatures() if (result := own.train_result(name))]
        moments = [result.measured_at for result in results if isinstance(result, Measured)]
        moments += [job.submitted_at for own in runs for job in own.jobs()]
        moments += [result.finished_at for result in finished]
        moments += [] if recommendation is None else [recommendation.created_at]
    except TulaError as error:
        return RunSummary(id=run.id, path=run.path, changed=None, problem=error.message)
    return RunSummary(
        id=run.id,
        path=run.path,
        changed=max(moments, default=None),
        model=spec.model.name,
        dataset=spec.dataset.name,
        measured=sum(isinstance(result, Measured) for result in results),
        out_of_memory=sum(isinstance(result, OutOfMemory) for result in results),
        failed=sum(isinstance(result, Failed) for result in results),
        recommendation=recommendation,
        trained=len(finished),
        best_top1=max((result.best_top1 for result in finished), default=None),
    )


# --- logs


@dataclass(frozen=True)
class LogLine:
    """A line that a job wrote, and where."""

    file: Path
    text: str


def logs(
    run: RunDir,
    *,
    job: str | None = None,
    last: int | None = None,
    follow: bool = False,
    active: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[LogLine]:
    """Yield the lines of the newest log file, of one job or of all.

    Args:
        run: the run.
        job: only this job's.
        last: only the last so many lines of what is there already.
        follow: go on with what is written from now on, in later files (relaunches) too, while `active()`.
        active: whether something may still be written.
        sleep: waits for some seconds.

    Raises:
        SpecError: the run has no such job.
    """
    files = _log_files(run, job)
    offsets = {path: path.stat().st_size for path in files[:-1]}
    lines = [line for path in files[-1:] for line in _read_lines(path, offsets, whole=not follow)]
    yield from lines if last is None else lines[max(0, len(lines) - last) :]
    while follow:
        going_on = active()
        for path in _log_files(run, job):
            yield from _read_lines(path, offsets, whole=not going_on)
        if not going_on:
            return
        sleep(POLL["local"][0])


def seldom(
    check: Callable[[], bool], *, pause: float, clock: Callable[[], float] = time.monotonic
) -> Callable[[], bool]:
    """Return a check that asks again only when its last answer is `pause` seconds old: a scheduler serves many users."""
    at, answer = float("-inf"), False

    def remembered() -> bool:
        nonlocal at, answer
        if clock() - at >= pause:
            answer, at = check(), clock()
        return answer

    return remembered


def newest_part(parts: Iterable[Part], job: str | None) -> RunDir | None:
    """Return the run of the node type that wrote last (of those that have that job); None where none has."""
    having = [part.run for part in parts if job is None or part.run.job(job) is not None]
    return max(having, key=lambda run: max((log.stat().st_mtime for log in run.logs()), default=0.0), default=None)


def _log_files(run: RunDir, job: str | None) -> list[Path]:
    """Return the log files of a job (of all), last written last."""
    if job is None:
        return run.logs() or run.scheduler_logs(id_ for found in run.jobs() for id_ in found.ids)
    known = [found.id for found in run.jobs()]
    if job not in known:
        raise SpecError(f"no job {job!r} in {run.path}", nearest(job, known) or f"there are: {', '.join(known) or '-'}")
    tasks = tuple(f"{task.id}." for task in (*run.tasks(), *run.check_tasks()) if task.job == job)
    own = [path for path in run.logs() if path.name.startswith(tasks)]
    return own or run.scheduler_logs(id_ for found in run.jobs() if found.id == job for id_ in found.ids)


def _read_lines(path: Path, offsets: dict[Path, int], *, whole: bool) -> Iterator[LogLine]:
    """Yield what was added to a file since its offset; a line without its end only where `whole`."""
    with open(path, "rb") as file:
        file.seek(offsets.get(path, 0))
        for line in file:
            if not line.endswith(b"\n") and not whole:
                return
            offsets[path] = offsets.get(path, 0) + len(line)
            yield LogLine(path, line.decode(errors="replace").rstrip("\r\n"))


# --- ending


def cancel(run: RunDir, launcher: Launcher) -> list[str]:
    """End the run's own jobs that are queued or running; return their ids.

    Each is marked first, so that nothing (a supervisor, the next link of a chain) starts it again meanwhile.
    """
    jobs = run.jobs()
    states = launcher.states(run, jobs)
    going_on = [job for job in jobs if states[job.id].state != "ended"]
    for job in going_on:
        run.cancel(job.id)
        launcher.cancel(run, job)
    return [job.id for job in going_on]
