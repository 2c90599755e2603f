"""The state of a run directory at one moment; each file is read at most once."""

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import BadMeasurements
from tula_cli.run import messages
from tula_cli.run.damage import list_curve_warnings, warn_damaged_record
from tula_cli.run.disk_space import measure_file_size
from tula_cli.run.files import list_files, list_names, read_change_time, read_record, read_records, read_text
from tula_cli.run.parsed_spec import find_spec_damage
from tula_cli.run.records.failures import Failure
from tula_cli.run.records.jobs import Attempt, Job
from tula_cli.run.records.probes import RESULT, Measured, Result
from tula_cli.run.records.recommendations import Recommendation
from tula_cli.run.records.results import Comparison, JobFile, RateSearch, Variant
from tula_cli.run.records.scripts import ResumeTestResult
from tula_cli.run.records.tasks import TASK, BaseTask, CheckTask, JobTask, ProbeTask, Task, TrainTask
from tula_cli.run.training_run import COPIED_FILE_SECONDS, MAX_CLOCK_NOISE_SECONDS, TrainingRun

T = TypeVar("T")
SelectedTask = TypeVar("SelectedTask", bound=BaseTask)


def has_run_moved(job: Job, run_path: Path) -> bool:
    """Return whether a job's run was moved after its submission, so that the job's run directory no longer exists.

    Args:
        run_path: resolved path of the run.
    """
    return bool(job.folder) and Path(job.folder) != run_path and not os.path.exists(job.folder)  # noqa: PTH110 - raises no PermissionError


def is_of_another_run(job: Job, run_path: Path) -> bool:
    """Return whether a job belongs to the run that this one was copied from: it writes there and is cancelled there.

    Args:
        run_path: resolved path of the run.
    """
    job_folder = Path(job.folder)
    is_there = os.path.exists(job_folder / f"jobs/{job.id}.json")  # noqa: PTH110 - raises no PermissionError in another user's folder
    if not job.folder or job_folder == run_path or not is_there:
        return False
    return not job_folder.samefile(run_path)


class Snapshot:
    """The records of a run, each read on first access and not read again.

    Args:
        path: the run directory; missing records are None or empty.
        strict: whether a damaged record raises an error; else it is left out, and `record_warnings` and
            `training_warnings` report it.
    """

    def __init__(self, path: Path, *, strict: bool = False) -> None:
        self.path = path
        self.strict = strict
        self._records: dict[Path, Any] = {}
        self._errors: dict[Path, BadMeasurements] = {}

    @cached_property
    def resolved_path(self) -> Path:
        return self.path.resolve()

    # --- Tasks, jobs and attempts

    @cached_property
    def _all_tasks(self) -> list[Task]:
        return read_records(self.path / "tasks", TASK, read=self.read_record)

    @cached_property
    def tasks(self) -> list[JobTask]:
        """The tasks that measure, test resuming, train or evaluate, by their ids."""
        return [task for task in self._all_tasks if not isinstance(task, CheckTask)]

    def select_tasks(self, kind: type[SelectedTask]) -> list[SelectedTask]:
        """Return the tasks of a class, by their ids."""
        return [task for task in self._all_tasks if isinstance(task, kind)]

    @property
    def probe_tasks(self) -> list[ProbeTask]:
        """The probe tasks, by their ids."""
        return self.select_tasks(ProbeTask)

    @property
    def submitted_probe_tasks(self) -> list[ProbeTask]:
        """The probe tasks whose job was submitted, by their ids; a job with a damaged record counts as submitted."""
        submitted = {path.stem for path in list_files(self.path / "jobs")}
        return [task for task in self.probe_tasks if task.job in submitted]

    @property
    def train_tasks(self) -> list[TrainTask]:
        """The tasks of all attempts of all trainings, by their ids."""
        return self.select_tasks(TrainTask)

    @cached_property
    def _tasks_by_job(self) -> Mapping[str, list[JobTask]]:
        return _group_records(self.tasks, by=lambda task: task.job)

    def list_tasks_of_job(self, job_id: str) -> list[JobTask]:
        """Return the tasks of a job, by their ids."""
        return self._tasks_by_job.get(job_id, [])

    @cached_property
    def _all_jobs(self) -> list[Job]:
        jobs = read_records(self.path / "jobs", Job, read=self._read_if_readable)
        return sorted(jobs, key=lambda job: (job.submitted_at, job.id))

    @cached_property
    def _jobs_of_another_run(self) -> list[Job]:
        return [job for job in self._all_jobs if is_of_another_run(job, self.resolved_path)]

    @cached_property
    def jobs(self) -> list[Job]:
        """The readable jobs of this run by time of submission, without those of a run of which it is a copy."""
        return [job for job in self._all_jobs if job not in self._jobs_of_another_run]

    @property
    def damaged_jobs(self) -> list[BadMeasurements]:
        """Errors of the job records that cannot be read."""
        _ = self._all_jobs
        return self._list_record_errors("jobs")

    @property
    def job_warnings(self) -> list[Diagnostic]:
        """Warnings about jobs that are not shown: damaged ones, and those of the run of which this is a copy."""
        damaged = [messages.damaged_job(problem=error.message) for error in self.damaged_jobs]
        foreign_jobs = [messages.copy_of_run(original=str(job.folder)) for job in self._jobs_of_another_run[:1]]
        return [*damaged, *foreign_jobs]

    @property
    def damaged_tasks(self) -> list[BadMeasurements]:
        """Errors of the tasks that cannot be read."""
        _ = self._all_tasks
        return self._list_record_errors("tasks")

    def require_readable(self, job_ids: Collection[str]) -> None:
        """Check the records of jobs: without one of its records, a job would seem to be over.

        Raises:
            BadMeasurements: one of them is damaged.
        """
        _ = self.jobs, self._all_tasks, self.attempts
        folders = [self.path / name for name in ("jobs", "tasks", "attempts")]
        beginnings = tuple(f"{id_}{separator}" for id_ in job_ids for separator in ".-")
        for path, error in self._errors.items():
            if path.parent in folders and path.name.startswith(beginnings):
                raise error

    @cached_property
    def attempts(self) -> list[Attempt]:
        """The attempts of all tasks, oldest first."""
        attempts = read_records(self.path / "attempts", Attempt, read=self.read_record)
        return sorted(attempts, key=lambda attempt: attempt.sort_key)

    @cached_property
    def _attempts_by_job(self) -> Mapping[str, list[Attempt]]:
        jobs = {task.id: task.job for task in self._all_tasks}
        job_attempts = [attempt for attempt in self.attempts if attempt.task in jobs]
        return _group_records(job_attempts, by=lambda attempt: jobs[attempt.task])

    def list_attempts_of_job(self, job_id: str, *, since: float = float("-inf")) -> list[Attempt]:
        """Return the attempts of a job that started at `since` (Unix time) or later, oldest first."""
        return [attempt for attempt in self._attempts_by_job.get(job_id, []) if attempt.started_at >= since]

    def read_last_log_time(self, attempt: Attempt) -> float | None:
        """Return when an attempt last wrote to its log (Unix time of the file system); None if it has no log yet."""
        return read_change_time(self.path / f"logs/{attempt.task}.{attempt.number:03d}.log") or None

    def estimate_lost_attempt_ends(self, attempts: Iterable[Attempt]) -> list[Attempt]:
        """Return attempts of jobs that no longer run; one left open by a killed supervisor ends when its log was last written."""
        return [
            attempt
            if attempt.ended_at is not None or (written := self.read_last_log_time(attempt)) is None
            else attempt.model_copy(update={"ended_at": written})
            for attempt in attempts
        ]

    def adjust_starts_to_file_clock(self, attempts: Iterable[Attempt]) -> list[Attempt]:
        """Return the attempts; an open one starts by the clock of the file system if the clock of its host differs."""
        adjusted = []
        for attempt in attempts:
            record = self.path / f"attempts/{attempt.task}.{attempt.number:03d}.json"
            written = 0.0 if attempt.ended_at is not None else read_change_time(record)
            offset = abs(written - attempt.started_at) if written else 0.0
            if MAX_CLOCK_NOISE_SECONDS < offset < COPIED_FILE_SECONDS:
                attempt = attempt.model_copy(update={"started_at": written})
            adjusted.append(attempt)
        return adjusted

    @cached_property
    def _cancelled_job_ids(self) -> frozenset[str]:
        return frozenset(path.stem for path in list_files(self.path / "jobs", "*.cancelled"))

    def read_cancel_command(self, job_id: str) -> str:
        """Return the command that cancelled a job; empty if it was not cancelled."""
        return read_text(self.path / f"jobs/{job_id}.cancelled") if job_id in self._cancelled_job_ids else ""

    def read_released_jobs(self, job_id: str) -> dict[str, str]:
        """Return the jobs of a chain that its supervisor removed from the queue: the reason by scheduler id."""
        rows = read_text(self.path / f"jobs/{job_id}.released").splitlines()
        return {id_: why for id_, _, why in (row.partition(" ") for row in rows)}

    # --- Results

    @cached_property
    def results(self) -> list[Result]:
        """The readable results, by nodes and local batch."""
        results = read_records(self.path / "results", RESULT, read=self._read_if_readable)
        return sorted(results, key=lambda result: (result.nodes, result.local_batch))

    @property
    def measured(self) -> list[Measured]:
        """The results of probes that succeeded, by nodes and local batch."""
        return [result for result in self.results if isinstance(result, Measured)]

    @property
    def measured_dataset_size(self) -> int | None:
        """Samples per epoch as the first probe has recorded them; None without a probe, or if it could not count them."""
        return next((probe.dataset_size for probe in self.measured), None)

    @property
    def damaged_results(self) -> list[BadMeasurements]:
        """Errors of the results that cannot be read."""
        _ = self.results
        return self._list_record_errors("results")

    @cached_property
    def job_file(self) -> JobFile | None:
        """The job file and the overrides (--set) from which the run was made; None if not recorded."""
        return self.read_record(self.path / "job_file.json", JobFile)

    @cached_property
    def variant(self) -> Variant | None:
        """The node type and number of GPUs per node that the run measures; None if its job has only one of each."""
        return self.read_record(self.path / "variant.json", Variant)

    @cached_property
    def recommendation(self) -> Recommendation | None:
        return self.read_record(self.path / "recommendation.json", Recommendation)

    @cached_property
    def comparison(self) -> Comparison | None:
        return self.read_record(self.path / "comparison.json", Comparison)

    @cached_property
    def cell_descriptions(self) -> dict[str, str]:
        """Method, batch and seed of each training of the comparison, by its signature."""
        return {} if self.comparison is None else {cell.signature: cell.description for cell in self.comparison.cells}

    @cached_property
    def failures(self) -> list[Failure]:
        """The readable failures of ranks."""
        return read_records(self.path / "failures", Failure, read=self._read_if_readable)

    @cached_property
    def resume_test_results(self) -> list[ResumeTestResult]:
        """Results of resume tests, oldest first."""
        records = read_records(self.path / "script", ResumeTestResult, "rehearse-*.json", read=self.read_record)
        return sorted(records, key=lambda record: record.began_at)

    def get_training(self, train_signature: str) -> TrainingRun:
        """Return one training with all its relaunches; its records are read through this snapshot, once each."""
        return TrainingRun(self.path, train_signature, read=self.read_record)

    def read_rate_search(self, key: str) -> RateSearch | None:
        """Return the state of a search for a learning rate; None before its first measurement."""
        return self.read_record(self.path / f"rates/{key}.json", RateSearch)

    @cached_property
    def record_warnings(self) -> list[Diagnostic]:
        """Warnings about damaged records, except those of jobs and trainings; the remaining records are shown."""
        if self.strict:
            return Snapshot(self.path).record_warnings
        _ = self.job_file, self.variant, self.results, self.tasks, self.attempts, self.recommendation, self.comparison
        _ = self.failures, self.resume_test_results
        other_folders = (self.path / "jobs", self.path / "train")
        errors = {
            path: error for path, error in self._errors.items() if not any(map(path.is_relative_to, other_folders))
        }
        if (damage := find_spec_damage(self.path)) is not None:
            errors[self.path / "spec.yaml"] = damage.error
        return [warn_damaged_record(self.path, path, error) for path, error in errors.items()]

    @cached_property
    def training_warnings(self) -> list[Diagnostic]:
        """Warnings about trainings whose rows, weights or records are damaged; the remaining ones are shown."""
        snapshot = Snapshot(self.path) if self.strict else self
        signatures = dict.fromkeys(task.signature for task in snapshot.train_tasks)
        begun_trainings = set(list_names(snapshot.path / "train")) if signatures else ()
        trainings = [snapshot.get_training(signature) for signature in signatures if signature in begun_trainings]
        for training in trainings:
            training.validate_records()
        of_records = [
            warn_damaged_record(snapshot.path, path, error)
            for path, error in snapshot._errors.items()
            if path.is_relative_to(snapshot.path / "train")
        ]
        return [*of_records, *(warning for training in trainings for warning in list_curve_warnings(training))]

    @property
    def damage_warnings(self) -> list[Diagnostic]:
        """Warnings about damaged jobs, records and trainings of the run, and about jobs of another run of which it is a copy."""
        return [*self.job_warnings, *self.record_warnings, *self.training_warnings]

    # --- Logs of the scheduler

    @cached_property
    def _scheduler_files(self) -> Mapping[str, list[Path]]:
        return _group_records(
            list_files(self.path / "submitit", "*_log.*"), by=lambda path: path.name.partition("_")[0]
        )

    def list_started_logs(self, ids: Iterable[str]) -> list[Path]:
        """Return the logs, including empty ones, that SLURM created for jobs, by scheduler id.

        A job without any could not access the folder.
        """
        return [path for id_ in ids for path in self._scheduler_files.get(id_, [])]

    def list_scheduler_logs(self, ids: Iterable[str]) -> list[Path]:
        """Return the non-empty logs that SLURM kept for jobs, last written last.

        They show errors from before a supervisor started.
        """
        logs = (path for path in self.list_started_logs(ids) if measure_file_size(path))
        return sorted(logs, key=read_change_time)

    # --- Reading

    def read_record(self, path: Path, kind: type[T] | TypeAdapter[T]) -> T | None:
        """Return a record, read at most once; None if it is missing, or damaged and the snapshot is not strict."""
        record = self._read_if_readable(path, kind)
        if path in self._errors and self.strict:
            raise self._errors[path]
        return record

    def _list_record_errors(self, folder: str) -> list[BadMeasurements]:
        return [error for path, error in self._errors.items() if path.parent == self.path / folder]

    def _read_if_readable(self, path: Path, kind: type[T] | TypeAdapter[T]) -> T | None:
        """Return a record, or None if it is missing or damaged; the error of a damaged one is kept."""
        if path not in self._records:
            try:
                self._records[path] = read_record(path, kind)
            except BadMeasurements as error:
                self._records[path] = None
                self._errors[path] = error
        record: T | None = self._records[path]
        return record


def _group_records(items: Iterable[T], *, by: Callable[[T], str]) -> dict[str, list[T]]:
    groups: defaultdict[str, list[T]] = defaultdict(list)
    for item in items:
        groups[by(item)].append(item)
    return dict(groups)
