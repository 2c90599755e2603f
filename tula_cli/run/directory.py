"""The run directory: the only module that knows its file names.

Each file has one writer and is replaced as a whole: a draft named after host and pid, flush, fsync, os.replace. A
reader sees either the old file or the new one, never a partial one, on NFS and Lustre too.
"""

import contextlib
import copy
import time
from collections.abc import Iterable
from pathlib import Path

from tula_cli.errors import BadMeasurements, SpecError, UnreadableFile
from tula_cli.run.files import (
    RecordReader,
    is_listed,
    list_files,
    list_names,
    make_folder,
    make_write_error,
    read_change_time,
    read_record,
    read_records,
    read_text,
    touch_change_marker,
    write_file_atomically,
    write_record,
    write_record_and_announce,
)
from tula_cli.run.lock import FolderLock
from tula_cli.run.observed import make_observed_jobs_hint
from tula_cli.run.owner import describe_left_out_runs, find_other_owner, require_ownership, require_readable_run
from tula_cli.run.parsed_spec import list_run_folders, read_job_change_time, read_stored_spec, write_parsed_spec
from tula_cli.run.records.failures import Failure
from tula_cli.run.records.inspections import ClusterReport
from tula_cli.run.records.jobs import Attempt, Job, LeaderCommand
from tula_cli.run.records.probes import RESULT, Measured, Result
from tula_cli.run.records.recommendations import Recommendation
from tula_cli.run.records.results import (
    Comparison,
    CountedEnergy,
    JobFile,
    RateSearch,
    ScriptCheckpointSave,
    Summary,
    TrainResult,
    Tuning,
    Variant,
)
from tula_cli.run.records.scripts import ResumeTestResult
from tula_cli.run.records.tasks import (
    TASK,
    CheckTask,
    CodeSnapshot,
    EvaluateTask,
    JobTask,
    ProbeTask,
    RateSearchTask,
    ResumeTestTask,
    Task,
    make_probe_id,
)
from tula_cli.run.snapshot import Snapshot, is_of_another_run
from tula_cli.run.training_run import TrainingRun
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import dump_yaml
from tula_cli.spec.signature import compute_measurement_signature

# --- Checks of the cluster


class ClusterChecks:
    """The cluster checks of one run.

    Args:
        path: their folder, which may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write_token(self, task_id: str, token: str) -> None:
        """Write a token by which nodes verify that they see this folder and not another one of the same name."""
        write_file_atomically(self.path / f"{task_id}.token", f"{token}\n")

    def read_token(self, task_id: str) -> str:
        return read_text(self.path / f"{task_id}.token")

    def record_sign_in(self, task_id: str, rank: int, host: str) -> None:
        """Record that this rank's node can write here.

        Raises:
            TulaError: it cannot.
        """
        write_file_atomically(self.path / f"{task_id}.{rank:04d}.here", f"{host}\n")

    def read_signed_in_hosts(self, task_id: str) -> dict[int, str]:
        """Return the hosts of a check's ranks that could write here, by rank."""
        return {int(path.name.split(".")[-2]): read_text(path) for path in list_files(self.path, f"{task_id}.*.here")}

    def write_report(self, report: ClusterReport) -> None:
        write_record(self.path / f"{report.id}.json", report)

    def write_draft_report(self, report: ClusterReport) -> None:
        """Save the findings before the network test, which may terminate the ranks."""
        write_record(self.path / f"{report.id}.draft", report)

    def read_draft_report(self, task_id: str) -> ClusterReport | None:
        return read_record(self.path / f"{task_id}.draft", ClusterReport)

    def read_report(self, task_id: str) -> ClusterReport | None:
        return read_record(self.path / f"{task_id}.json", ClusterReport)

    def mark_reported(self, task_id: str) -> None:
        """Record that the user has seen the outcome of a check, so that the next call starts a new one."""
        write_file_atomically(self.path / f"{task_id}.told", f"{time.time()}\n")

    def is_reported(self, task_id: str) -> bool:
        return (self.path / f"{task_id}.told").exists()


# --- The run directory

LATEST_FILE = "latest"


class RunDir:
    """The files of one run. Reading a file that does not exist yet never fails; the result is None or an empty list."""

    def __init__(self, path: Path) -> None:
        self.path = path

    # --- Creation and lookup

    @staticmethod
    def from_spec(root: Path, spec: JobSpec, *, code: str = "") -> "Run":
        """Return the run of `spec` under `root`, which may not exist yet; nothing is written.

        Args:
            spec: the job, on one hardware and at one text length.
            code: digest of the user's code that the spec names; empty for none.
        """
        return Run(root / f"{spec.name}-{compute_measurement_signature(spec, code)}", spec)

    @staticmethod
    def create(root: Path, spec: JobSpec, *, code: str = "") -> "Run":
        """Return the run of `spec` under `root`, creating it if it does not exist."""
        run = RunDir.from_spec(root, spec, code=code)
        run.save_job(spec)
        return run

    def save_job(self, spec: JobSpec, file: JobFile | None = None) -> None:
        """Store the job of this run and make the run the newest one; measurements in it are kept.

        Args:
            file: the job file that the spec comes from, if known.

        Raises:
            TulaError: it cannot be written, or belongs to another user.
        """
        require_ownership(self.path)
        try:
            make_folder(self.path)
        except OSError as error:
            raise make_write_error(self.path, error) from error
        if file is not None:
            write_record(self.path / "job_file.json", file)
        spec = spec.without_slurm_billing()  # each command reads it from the scheduler
        write_parsed_spec(self.path, dump_yaml(spec), spec.model_dump(mode="json"))
        # In a shared folder, the file of another user is not overwritten.
        if not find_other_owner(self.path.parent / LATEST_FILE):
            write_file_atomically(self.path.parent / LATEST_FILE, f"{self.path.name}\n")

    @staticmethod
    def open(path: Path) -> "RunDir":
        """Return an existing run.

        Raises:
            SpecError: there is no such folder, or it is not a run directory.
            NotYours: it belongs to another user and is not readable.
        """
        require_readable_run(path)
        return RunDir(path)

    @staticmethod
    def find_newest(root: Path) -> "RunDir":
        """Return the most recently used readable run under `root`, preferring the user's own runs.

        Raises:
            SpecError: there is none.
            TulaError: `root` cannot be read.
        """
        latest = ""
        with contextlib.suppress(BadMeasurements):  # damaged: the runs show which one is the newest
            latest = "" if find_other_owner(root / LATEST_FILE) else read_text(root / LATEST_FILE)
        newest = RunDir(root / latest)
        if newest.exists and not find_other_owner(newest.path):
            return newest
        runs = RunDir.list_all(root)
        if not runs:
            others_text = describe_left_out_runs(root / name for name in list_names(root))
            message = f"no run under {root}{others_text and f' ({others_text})'}"
            hint = f"start one with tula profile job.yaml, or name one with [[--run]] DIR{make_observed_jobs_hint()}"
            raise SpecError(message, hint)
        return next((run for run in runs if not find_other_owner(run.path)), runs[0])

    @staticmethod
    def list_all(root: Path) -> list["RunDir"]:
        """Return the runs under `root`, most recently changed first; unreadable runs of other users are left out.

        Raises:
            TulaError: `root` cannot be read.
        """
        return [RunDir(path) for path in list_run_folders(root)]

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def exists(self) -> bool:
        return read_job_change_time(self.path) is not None

    def read_spec(self) -> JobSpec:
        """Return the stored job; raises as `read_stored_spec` does."""
        return read_stored_spec(self.path)

    def read_job_file(self) -> JobFile | None:
        """Return where the settings come from; None if that is not recorded, or the record is damaged."""
        return self.read_snapshot().job_file

    def read_variant(self) -> Variant | None:
        """Return the node type and GPU count of the job that this run measures; None if the job names neither, or the record is damaged."""
        return self.read_snapshot().variant

    def write_variant(self, variant: Variant) -> None:
        write_record(self.path / "variant.json", variant)

    def read_snapshot(self, *, strict: bool = False) -> Snapshot:
        """Return a snapshot of the run's records, to be shared by all queries of a caller; `strict` as in `Snapshot`."""
        return Snapshot(self.path, strict=strict)

    # --- Tasks, jobs and attempts

    def write_task(self, task: Task) -> None:
        write_record_and_announce(self.path, f"tasks/{task.id}.json", task)

    def read_task(self, task_id: str) -> Task | None:
        return read_record(self.path / f"tasks/{task_id}.json", TASK)

    def read_tasks(self) -> list[JobTask]:
        """Return the readable tasks that measure, test resuming, train or evaluate."""
        return self.read_snapshot().tasks

    def read_check_tasks(self) -> list[CheckTask]:
        """Return the tasks of `tula check --on-cluster`, oldest first."""
        return sorted(read_records(self.path / "tasks", CheckTask, "check-*.json"), key=lambda task: task.number)

    def is_superseded(self, task: Task) -> bool:
        """Return whether a later attempt of a training exists, so that the job running this one has to stop."""
        return bool(task.next_attempt_id) and is_listed(self.path / f"tasks/{task.next_attempt_id}.json")

    def write_job(self, job: Job) -> None:
        write_record(self.path / f"jobs/{job.id}.json", job)

    def find_job(self, job_id: str) -> Job | None:
        """Return a job of this run; None if there is none, or if it belongs to the run that this one was copied from."""
        job = read_record(self.path / f"jobs/{job_id}.json", Job)
        return None if job is None or is_of_another_run(job, self.path.resolve()) else job

    def read_jobs(self) -> list[Job]:
        return self.read_snapshot(strict=True).jobs

    def write_attempt(self, attempt: Attempt) -> None:
        write_record(self.path / f"attempts/{attempt.task}.{attempt.number:03d}.json", attempt)

    def read_attempt(self, task_id: str, number: int) -> Attempt | None:
        """Return one attempt by its file name, because the listing of an NFS folder may be half a minute old."""
        return read_record(self.path / f"attempts/{task_id}.{number:03d}.json", Attempt)

    def read_attempts(self, task_id: str | None = None) -> list[Attempt]:
        """Return the attempts of one task, or the readable ones of all, oldest first."""
        if task_id is None:
            return self.read_snapshot().attempts
        attempts = read_records(self.path / "attempts", Attempt, f"{task_id}.*.json")
        return sorted(attempts, key=lambda attempt: attempt.sort_key)

    def read_attempts_of_task(self, task: Task) -> list[Attempt]:
        """Return the attempts of a task, oldest first; of a training, those of all its relaunches."""
        training = self.find_training(task)
        return self.read_attempts(task.id) if training is None else training.read_attempts()

    def write_failure(self, failure: Failure) -> None:
        assert failure.rank is not None, "the failure of a rank"
        write_record_and_announce(
            self.path, f"failures/{failure.task}.{failure.attempt:03d}.{failure.rank:04d}.json", failure
        )

    def read_failures(self, task_id: str, attempt: int | None = None) -> list[Failure]:
        """Return the readable failures of ranks, earliest first."""
        failures = []
        number = "*" if attempt is None else f"{attempt:03d}"
        for path in list_files(self.path / "failures", f"{task_id}.{number}.*.json"):
            with contextlib.suppress(BadMeasurements):
                failures += [failure] if (failure := read_record(path, Failure)) else []
        return sorted(failures, key=lambda failure: failure.failed_at)

    def list_failed_ranks(self, task_id: str, attempt: int) -> list[int]:
        """Return the ranks of an attempt with a recorded failure."""
        paths = list_files(self.path / "failures", f"{task_id}.{attempt:03d}.*.json")
        return [int(path.name.split(".")[-2]) for path in paths]

    def mark_job_cancelled(self, job_id: str, *, by: str = "tula cancel") -> None:
        """Mark a job as cancelled by the user: nothing starts or restarts it until `remove_cancellation`."""
        if not self.is_cancelled(job_id):
            require_ownership(self.path)
            write_file_atomically(self.path / f"jobs/{job_id}.cancelled", f"{by}\n")
            touch_change_marker(self.path)

    def remove_cancellation(self, job_id: str) -> None:
        (self.path / f"jobs/{job_id}.cancelled").unlink(missing_ok=True)

    def is_cancelled(self, job_id: str) -> bool:
        return is_listed(self.path / f"jobs/{job_id}.cancelled")

    def record_released_jobs(self, job_id: str, ids: Iterable[str], why: str) -> None:
        """Record that the supervisor removed waiting jobs of a chain from the queue.

        The scheduler reports this only as a cancellation.
        """
        path = self.path / f"jobs/{job_id}.released"
        write_file_atomically(path, read_text(path) + "".join(f"{id_} {why}\n" for id_ in ids))

    def write_script(self, name: str, text: str) -> Path:
        """Write the batch script next to submitit's files; return its absolute path."""
        path = self.submitit_dir.absolute() / f"{name}.sh"
        write_file_atomically(path, text)
        return path

    @property
    def lock(self) -> FolderLock:
        """The lock for submitting jobs of this run."""
        return FolderLock(self.path / "lock")

    def write_result(self, result: Result) -> None:
        write_record(self.path / f"results/{result.id}.json", result)

    def read_result(self, result_id: str) -> Result | None:
        """Return a result; None if there is none, or if it is damaged, so that it is measured again.

        Raises:
            UnreadableFile: it cannot be read, but may be intact.
        """
        try:
            return read_record(self.path / f"results/{result_id}.json", RESULT)
        except UnreadableFile:
            raise
        except BadMeasurements:
            return None

    def read_results(self) -> list[Result]:
        """Return the readable results, by nodes and local batch; `Snapshot.record_warnings` has the damaged ones."""
        return self.read_snapshot().results

    def read_measurements(self) -> list[Measured]:
        """Return the readable results of probes that succeeded, by nodes and local batch."""
        return self.read_snapshot().measured

    def find_current_probe(self, task: ProbeTask) -> int | None:
        """Return the local batch that a job is measuring: the first without a valid result; None if all have one."""
        for local_batch in task.local_batches:
            result = self.read_result(make_probe_id(task.nodes, local_batch))
            if local_batch not in task.skip and (result is None or result.kind == "failed"):
                return local_batch
        return None

    def is_finished(self, task: Task, *, read: RecordReader = read_record) -> bool:
        """Return whether a task has all its results, i.e. valid result files; `read` reads those of all but probes."""
        match task:
            case ProbeTask():
                return self.find_current_probe(task) is None
            case ResumeTestTask():
                resume_test = read(self.path / f"script/{task.id}.json", ResumeTestResult)
                return resume_test is not None and resume_test.over_at is not None
            case EvaluateTask():
                return TrainingRun(self.path, task.signature, read=read).read_evaluation(task.key) is not None
            case RateSearchTask():
                search = read(self.path / f"rates/{task.key}.json", RateSearch)
                return search is not None and search.finished
        training = self.find_training(task)
        return (self.checks.read_report(task.id) if training is None else training.read_result()) is not None

    def write_recommendation(self, recommendation: Recommendation) -> None:
        write_record(self.path / "recommendation.json", recommendation)

    def read_recommendation(self) -> Recommendation | None:
        """Return the stored recommendation; None if there is none, or it is damaged."""
        return self.read_snapshot().recommendation

    def write_text(self, name: str, text: str) -> Path:
        """Write one of recommended.yaml and results.csv; return its path."""
        write_file_atomically(self.path / name, text)
        return self.path / name

    @property
    def checks(self) -> ClusterChecks:
        """The files of `tula check --on-cluster`."""
        return ClusterChecks(self.path / "checks")

    def get_training(self, train_signature: str) -> TrainingRun:
        """Return one training with all its relaunches; it need not exist yet."""
        return TrainingRun(self.path, train_signature)

    def find_training(self, task: Task) -> TrainingRun | None:
        """Return the training that a task starts or resumes; None for another task."""
        return self.get_training(task.trained_signature) if task.trained_signature else None

    def list_train_signatures(self) -> list[str]:
        """Return the signatures of existing trainings, most recently changed first."""
        folders = [path for path in (self.path / "train").glob("*") if path.is_dir()]
        return [path.name for path in sorted(folders, key=read_change_time, reverse=True)]

    def find_newest_script_saves(self) -> tuple[ScriptCheckpointSave, ...]:
        """Return the checkpoints that a script saved: at each batch those of the training that saved last, newest batch last."""
        newest: dict[int, list[ScriptCheckpointSave]] = {}
        snapshot = self.read_snapshot()
        for signature in self.list_train_signatures():
            by_batch: dict[int, list[ScriptCheckpointSave]] = {}
            for save in snapshot.get_training(signature).read_script_saves().saves:
                by_batch.setdefault(save.batch, []).append(save)
            for batch, saves in by_batch.items():
                newest[batch] = max(newest.get(batch, saves), saves, key=lambda saves: saves[-1].saved_at)
        by_age = sorted(newest.values(), key=lambda saves: saves[-1].saved_at)
        return tuple(save for saves in by_age for save in saves)

    def write_train_result(self, result: TrainResult) -> None:
        write_record(self.path / f"train/{result.signature}/result.json", result)

    def write_summary(self, summary: Summary) -> None:
        write_record(self.path / f"train/{summary.signature}/summary.json", summary)

    def write_energy(self, train_signature: str, energy: CountedEnergy) -> None:
        write_record(self.path / f"train/{train_signature}/energy.json", energy)

    def write_rate_search(self, search: RateSearch) -> None:
        write_record(self.path / f"rates/{search.key}.json", search)

    def read_rate_search(self, key: str) -> RateSearch | None:
        """Return the state of a search for a learning rate; None before its first measurement."""
        return read_record(self.path / f"rates/{key}.json", RateSearch)

    def write_comparison(self, comparison: Comparison) -> None:
        """Replace the comparison; the signatures of earlier trainings that did not train the job unchanged are kept."""
        previous = self.read_comparison()
        earlier = () if previous is None else tuple(sorted(previous.signatures - previous.unchanged_job_signatures))
        write_record(self.path / "comparison.json", comparison.model_copy(update={"earlier": earlier}))

    def read_comparison(self) -> Comparison | None:
        return read_record(self.path / "comparison.json", Comparison)

    def write_tuning(self, tuning: Tuning) -> None:
        write_record(self.path / f"train/{tuning.signature}/tuning.json", tuning)

    # --- Logs and messages between processes

    @property
    def submitit_dir(self) -> Path:
        return self.path / "submitit"

    def get_log_path(self, task_id: str, attempt: int, index: int = 0) -> Path:
        """Return the path of the log of an attempt, for the ranks that one supervisor (`index`) starts."""
        return self.path / "logs" / f"{task_id}.{attempt:03d}{f'.{index:04d}' if index else ''}.log"

    def get_rendezvous_path(self, task_id: str, attempt: int) -> Path:
        """Return the file of the rendezvous of the ranks of an attempt: address, port and device type of rank 0."""
        return self.path / "handover" / f"{task_id}.{attempt:03d}"

    def has_seen_gpus(self, attempt: Attempt) -> bool:
        """Return whether rank 0 of an attempt had a GPU."""
        return read_text(self.get_rendezvous_path(attempt.task, attempt.number)).endswith(" cuda")

    def write_stop_reason(self, task_id: str, attempt: int, reason: str) -> None:
        """Record why the ranks saved and exited on their own: "time_limit", "stage_end" or "signal"."""
        write_file_atomically(self.path / "stopped" / f"{task_id}.{attempt:03d}", f"{reason}\n")

    def read_stop_reason(self, task_id: str, attempt: int) -> str:
        """Return why the ranks of an attempt exited before the end; empty if they did not."""
        return read_text(self.path / "stopped" / f"{task_id}.{attempt:03d}")

    def write_leader_command(self, allocation: str, number: int, command: LeaderCommand) -> None:
        write_record_and_announce(self.path, f"orders/{allocation}.{number:03d}.json", command)

    def read_leader_command(self, allocation: str, number: int) -> LeaderCommand | None:
        """Return a leader command, or None.

        The file is opened only once it is listed, because a failed lookup by name might be cached.
        """
        path = self.path / f"orders/{allocation}.{number:03d}.json"
        return read_record(path, LeaderCommand) if is_listed(path) else None

    # --- Code snapshots

    def get_code_dir(self, name: str) -> Path:
        """Return the folder of a snapshot of the user's code."""
        return self.path / "code" / name

    def write_code(self, snapshot: CodeSnapshot) -> None:
        write_record(self.path / f"code/{snapshot.name}.json", snapshot)

    def read_code(self, name: str) -> CodeSnapshot | None:
        """Return the record of a snapshot, or None if there is none of that name (or the name is empty)."""
        return read_record(self.path / f"code/{name}.json", CodeSnapshot) if name else None

    def read_code_snapshots(self) -> list[CodeSnapshot]:
        """Return all code with which jobs of this run were submitted, the newest last."""
        return sorted(read_records(self.path / "code", CodeSnapshot), key=lambda snapshot: snapshot.taken_at)

    def read_code_digests(self) -> set[str]:
        """Return the digests of all code with which jobs of this run were submitted."""
        return {snapshot.digest for snapshot in self.read_code_snapshots()}

    def list_logs(self) -> list[Path]:
        logs = [path for path in (self.path / "logs").glob("*.log") if path.is_file()]
        return sorted(logs, key=read_change_time)


class Run(RunDir):
    """A run of a job on one hardware: its files and its job, to which overrides of the current command may apply.

    Args:
        path: the run directory, which may not exist yet.
        spec: the job on this hardware.
        variant: node type and GPU count that the run measures; empty if the job has no variants.
    """

    def __init__(self, path: Path, spec: JobSpec, variant: Variant = Variant()) -> None:  # noqa: B008 - it is frozen
        super().__init__(path)
        self.spec, self.variant = spec, variant
        self.type = variant.type  # name among the variants, None without others; the id or path if types are equal
        self.family: tuple[Run, ...] = (self,)  # the runs of all variants of the job

    @property
    def job_name(self) -> str:
        """Name of the job without that of the variant."""
        return self.spec.name.removesuffix(f"-{self.type}")

    def read_job(self) -> JobSpec:
        """Return the stored job on this hardware, to which no overrides of the current command apply."""
        return self.read_spec().with_fewer_gpus(self.variant.in_addition == "gpus")

    def with_spec(self, spec: JobSpec) -> "Run":
        """Return this run with other settings."""
        run = copy.copy(self)
        run.spec = spec
        return run

    def with_variant_name(self) -> "Run":
        """Return this run with the name of its variant, for commands that compare it with no run of the same type."""
        run = copy.copy(self)
        run.type = self.variant.type
        return run

    def prefix_job_names(self, jobs: Iterable[str]) -> list[str]:
        """Return job names prefixed with the name of the variant, as shown to the user."""
        return [job if self.type is None else f"{self.type}/{job}" for job in jobs]

    @property
    def runs_of_other_sizes(self) -> tuple["Run", ...]:
        """The runs with other numbers of GPUs on the same nodes, whose measurements also enter a fit."""
        here = self.variant.node_type
        runs = (run for run in self.family if run.variant.node_type == here)
        return tuple(run for run in runs if run.variant.gpus != self.variant.gpus)
