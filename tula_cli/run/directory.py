"""The run directory: the only module that knows its file names.

One file, one writer, replaced whole: a draft named after host and pid, flush, fsync, os.replace. A reader sees the old
file or the new one, never half of either, on NFS and Lustre too.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from tula_cli.errors import BadMeasurements, SpecError, TulaError
from tula_cli.run.files import cannot_write, content, write_atomic
from tula_cli.run.records.cluster_reports import ClusterReport
from tula_cli.run.records.jobs import Attempt, Failure, Job, Order
from tula_cli.run.records.probes import RESULT, Failed, Measured, OutOfMemory
from tula_cli.run.records.recommendations import Recommendation
from tula_cli.run.records.results import Comparison, JobFile, Summary, TrainResult, Tuning
from tula_cli.run.records.tasks import TASK, CheckTask, CodeSnapshot, ProbeTask, Task, TrainTask
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import dump_yaml, validate
from tula_cli.spec.signature import signature
from tula_cli.spec.yaml_text import read_yaml

LATEST = "latest"
LOCK_AGE = 300.0
"""Seconds after which a lock is taken for one that its owner left behind."""
_CHECKPOINT = re.compile(r"[0-9]{12,}\.pt")
"""A file name of `checkpoint_path`."""
_DRAFT = re.compile(r"\.[0-9]{12,}\.pt\..+\.[0-9]+")
"""A file name of `write_atomic` while it writes one."""
T = TypeVar("T")


def probe_id(nodes: int, local_batch: int) -> str:
    return f"probe-n{nodes:03d}-l{local_batch:06d}"


@dataclass(frozen=True)
class Part:
    """What of a job is measured, and may be trained, on one type of node: a run of its own, with a whole spec."""

    type: str  # empty where the job names no types: then the part is the whole
    run: "RunDir"
    spec: JobSpec


class RunDir:
    """One run. Reading never fails on a file that is not there yet; it answers None or an empty list."""

    def __init__(self, path: Path) -> None:
        self.path = path

    # --- which run

    @classmethod
    def of(cls, root: Path, spec: JobSpec, *, code: str = "") -> "RunDir":
        """Return the run of `spec` under `root`, which may not be there yet; nothing is written.

        Args:
            root: where runs are kept.
            spec: the job.
            code: digest of the user's own code that the spec names; empty for none.
        """
        return cls(root / f"{spec.name}-{signature(spec, code)}")

    @classmethod
    def create(cls, root: Path, spec: JobSpec, *, code: str = "") -> "RunDir":
        """Return the run of `spec` under `root`, made if it is not there."""
        run = cls.of(root, spec, code=code)
        run.adopt(spec)
        return run

    def adopt(self, spec: JobSpec, file: JobFile | None = None) -> None:
        """Make this the newest run, with this spec; its measurements stay.

        Args:
            spec: the job.
            file: where the spec comes from, if that is known.

        Raises:
            TulaError: it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        if file is not None:
            self._write("job_file.json", file)
        write_atomic(self.path / "spec.yaml", dump_yaml(spec))
        write_atomic(self.path.parent / LATEST, f"{self.path.name}\n")

    @classmethod
    def open(cls, path: Path) -> "RunDir":
        """Return an existing run.

        Raises:
            SpecError: there is no such folder, or it is not a run directory.
        """
        try:
            there, is_run = path.is_dir(), (path / "spec.yaml").is_file()
        except PermissionError:
            raise SpecError(f"no permission to read {path}", "a run belongs to the user who started it") from None
        if not there:
            raise SpecError(f"no such run directory: {path}", "tula list shows the runs there are")
        if not is_run:
            raise SpecError(
                f"not a run directory: {path} (it holds no spec.yaml)", "tula list shows the runs there are"
            )
        return cls(path)

    @classmethod
    def newest(cls, root: Path) -> "RunDir":
        """Return the run that was used last under `root`.

        Raises:
            SpecError: there is none.
        """
        pointer = root / LATEST
        if pointer.is_file():
            named = root / pointer.read_text(encoding="utf-8").strip()
            if (named / "spec.yaml").is_file():
                return cls(named)
        found = cls.all(root)
        if not found:
            raise SpecError(f"no run under {root}", "start one with tula profile job.yaml, or name one with --run DIR")
        return found[0]

    @classmethod
    def all(cls, root: Path) -> list["RunDir"]:
        """Return the runs under `root`, last changed first."""
        specs = sorted(root.glob("*/spec.yaml"), key=lambda spec: spec.stat().st_mtime, reverse=True)
        return [cls(spec.parent) for spec in specs]

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def exists(self) -> bool:
        return (self.path / "spec.yaml").is_file()

    def spec(self) -> JobSpec:
        return validate(read_yaml(self.path / "spec.yaml"), source=str(self.path / "spec.yaml"))

    def job_file(self) -> JobFile | None:
        return self._read("job_file.json", TypeAdapter(JobFile))

    def parts(self, spec: JobSpec, only: str | None = None) -> tuple[Part, ...]:
        """Return the run of each node type of `spec`, inside this one; the run itself where it names none.

        What is measured on one type is never seen beside what is measured on another. A part's name holds the signature
        of what is special about it: a changed type is measured anew, the others are kept.

        Args:
            spec: the job.
            only: the one type to return.

        Raises:
            SpecError: there is no such type.
        """
        return tuple(Part(name, self._of_type(name, own), own) for name, own in spec.by_type(only).items())

    def _of_type(self, name: str, spec: JobSpec) -> "RunDir":
        return RunDir(self.path / "types" / f"{spec.name}-{name}-{signature(spec)}") if name else self

    # --- tasks, jobs, attempts

    def write_task(self, task: Task) -> None:
        self._write(f"tasks/{task.id}.json", task)

    def task(self, task_id: str) -> Task | None:
        return self._read(f"tasks/{task_id}.json", TASK)

    def tasks(self) -> list[ProbeTask | TrainTask]:
        """Return the tasks that measure or train."""
        found = [task for path in self._list("tasks") if (task := self._read(path, TASK))]
        return [task for task in found if not isinstance(task, CheckTask)]

    def check_tasks(self) -> list[CheckTask]:
        """Return the tasks of `tula check --on-cluster`."""
        found = [self._read(path, TASK) for path in self._list("tasks", "check-*.json")]
        return [task for task in found if isinstance(task, CheckTask)]

    def superseded(self, task: TrainTask) -> bool:
        """Return whether a later attempt of a training has been written: whoever runs this one has to stop."""
        return (self.path / f"tasks/{task.job}-{task.attempt + 1}.json").exists()

    def newest_train_task(self, train_signature: str) -> TrainTask | None:
        """Return the training task with the highest attempt."""
        found = [t for t in self.tasks() if isinstance(t, TrainTask) and t.signature == train_signature]
        return max(found, key=lambda task: task.attempt, default=None)

    def write_job(self, job: Job) -> None:
        self._write(f"jobs/{job.id}.json", job)

    def job(self, job_id: str) -> Job | None:
        return self._read(f"jobs/{job_id}.json", TypeAdapter(Job))

    def jobs(self) -> list[Job]:
        found = [job for path in self._list("jobs") if (job := self._read(path, TypeAdapter(Job)))]
        return sorted(found, key=lambda job: (job.submitted_at, job.id))

    def write_attempt(self, attempt: Attempt) -> None:
        self._write(f"attempts/{attempt.task}.{attempt.number:03d}.json", attempt)

    def attempt(self, task_id: str, number: int) -> Attempt | None:
        """Return one attempt, by its name: the listing of a folder on NFS may be half a minute old."""
        return self._read(f"attempts/{task_id}.{number:03d}.json", TypeAdapter(Attempt))

    def attempts(self, task_id: str | None = None) -> list[Attempt]:
        """Return the attempts of one task (or of all), oldest first."""
        pattern = "*.json" if task_id is None else f"{task_id}.*.json"
        found = [a for path in self._list("attempts", pattern) if (a := self._read(path, TypeAdapter(Attempt)))]
        return sorted(found, key=lambda attempt: (attempt.started_at, attempt.task, attempt.number))

    def training_attempts(self, train_signature: str) -> list[Attempt]:
        """Return the attempts of a training run over all its relaunches, oldest first."""
        tasks = {t.id for t in self.tasks() if isinstance(t, TrainTask) and t.signature == train_signature}
        return [attempt for attempt in self.attempts() if attempt.task in tasks]

    def diverged(self, train_signature: str) -> Attempt | None:
        """Return the newest attempt of a training if that is how it ended; nothing of other trainings is read."""
        paths = self._list("attempts", f"train-{train_signature}-*.json")
        found = [attempt for path in paths if (attempt := self._read(path, TypeAdapter(Attempt)))]
        newest = max(found, key=lambda attempt: attempt.started_at, default=None)
        return newest if newest is not None and newest.outcome == "diverged" else None

    def write_failure(self, failure: Failure) -> None:
        self._write(f"failures/{failure.task}.{failure.attempt:03d}.{failure.rank:04d}.json", failure)

    def failures(self, task_id: str, attempt: int | None = None) -> list[Failure]:
        """Return what failing ranks saw, earliest first."""
        number = "*" if attempt is None else f"{attempt:03d}"
        paths = self._list("failures", f"{task_id}.{number}.*.json")
        found = [failure for path in paths if (failure := self._read(path, TypeAdapter(Failure)))]
        return sorted(found, key=lambda failure: failure.failed_at)

    def cancel(self, job_id: str, *, by: str = "tula cancel") -> None:
        """Mark a job as cancelled by the user: nothing starts or restarts it until `uncancel`."""
        if not self.cancelled(job_id):
            write_atomic(self.path / f"jobs/{job_id}.cancelled", f"{by}\n")

    def cancelled_by(self, job_id: str) -> str:
        """Return the command that cancelled a job; empty where none has."""
        path = self.path / f"jobs/{job_id}.cancelled"
        return path.read_text(encoding="utf-8").strip() if path.exists() else ""

    def uncancel(self, job_id: str) -> None:
        (self.path / f"jobs/{job_id}.cancelled").unlink(missing_ok=True)

    def cancelled(self, job_id: str) -> bool:
        return (self.path / f"jobs/{job_id}.cancelled").exists()

    # --- submitting

    def write_script(self, name: str, text: str) -> Path:
        """Write what sbatch is given, beside what submitit writes; return its absolute path."""
        path = self.submitit_dir.absolute() / f"{name}.sh"
        write_atomic(path, text)
        return path

    def lock(self) -> str:
        """Take the right to submit jobs of this run; return "" or, where another command line has it, whose it is.

        A folder, because making one is atomic on NFS and Lustre, where file locks are not to be trusted. The lock of a
        process that has ended, or one that is older than any submission takes, is taken over.

        Raises:
            TulaError: the folder cannot be written.
        """
        try:
            self._lock.mkdir(parents=True)
        except FileExistsError:
            owner = self._lock_owner(self._lock)
            if not self._is_stale(owner):
                return owner or "another process"
            aside = self._lock.with_name(f".lock.{socket.gethostname()}.{os.getpid()}")
            with contextlib.suppress(OSError):  # another process may have taken it over meanwhile
                self._lock.rename(aside)
                if self._lock_owner(aside) == owner:
                    shutil.rmtree(aside)
                else:
                    aside.rename(self._lock)
            return owner or "another process"
        except OSError as error:
            raise cannot_write(self._lock, error) from error
        try:
            write_atomic(self._lock / "owner", f"{socket.gethostname()}:{os.getpid()}\n")
        except TulaError:
            shutil.rmtree(self._lock, ignore_errors=True)
            raise
        return ""

    def hold(self) -> None:
        """Show that the lock is not left behind: sbatch of a busy controller takes a minute a job."""
        if self._lock_owner(self._lock) == f"{socket.gethostname()}:{os.getpid()}":
            with contextlib.suppress(OSError):
                os.utime(self._lock)

    def unlock(self) -> None:
        """Give the lock back, if it has not been taken over."""
        if self._lock_owner(self._lock) == f"{socket.gethostname()}:{os.getpid()}":
            shutil.rmtree(self._lock, ignore_errors=True)

    @property
    def _lock(self) -> Path:
        return self.path / "lock"

    @staticmethod
    def _lock_owner(lock: Path) -> str:
        try:
            return (lock / "owner").read_text(encoding="utf-8").strip()
        except OSError:
            return ""

    def _is_stale(self, owner: str) -> bool:
        host, _, pid = owner.partition(":")
        if host == socket.gethostname() and pid.isdigit():
            return not Path(f"/proc/{pid}").exists()
        try:
            return time.time() - self._lock.stat().st_mtime > LOCK_AGE
        except OSError:
            return False  # given back just now

    # --- results

    def write_result(self, result: Measured | OutOfMemory | Failed) -> None:
        self._write(f"results/{result.id}.json", result)

    def result(self, result_id: str) -> Measured | OutOfMemory | Failed | None:
        return self._read(f"results/{result_id}.json", RESULT)

    def results(self) -> list[Measured | OutOfMemory | Failed]:
        found = [result for path in self._list("results") if (result := self._read(path, RESULT))]
        return sorted(found, key=lambda result: (result.nodes, result.local_batch))

    def readable_results(self) -> tuple[list[Measured | OutOfMemory | Failed], list[str]]:
        """Return the results that can be read, and what is wrong with the others."""
        found, problems = [], []
        for path in self._list("results"):
            try:
                found.append(self._read(path, RESULT))
            except BadMeasurements as error:
                problems.append(f"{error.message}; {error.hint}")
        kept = [result for result in found if result is not None]
        return sorted(kept, key=lambda result: (result.nodes, result.local_batch)), problems

    def current_probe(self, task: ProbeTask) -> int | None:
        """Return the local batch that a job is at: the first without a result that stands; None where all have one."""
        for local_batch in task.local_batches:
            known = self.result(probe_id(task.nodes, local_batch))
            if local_batch not in task.skip and (known is None or known.kind == "failed"):
                return local_batch
        return None

    def write_recommendation(self, recommendation: Recommendation) -> None:
        self._write("recommendation.json", recommendation)

    def recommendation(self) -> Recommendation | None:
        return self._read("recommendation.json", TypeAdapter(Recommendation))

    def write_text(self, name: str, text: str) -> Path:
        """Write one of recommended.yaml, results.csv, cmd.txt; return its path."""
        write_atomic(self.path / name, text)
        return self.path / name

    # --- a check of the cluster

    def write_token(self, task_id: str, token: str) -> None:
        """Leave what the nodes have to find: they see this folder, and not another one of the same name."""
        write_atomic(self.path / f"checks/{task_id}.token", f"{token}\n")

    def token(self, task_id: str) -> str:
        path = self.path / f"checks/{task_id}.token"
        return path.read_text(encoding="utf-8").strip() if path.exists() else ""

    def sign_in(self, task_id: str, rank: int, host: str) -> None:
        """Show whoever started a check that this rank's node can write here.

        Raises:
            TulaError: it cannot.
        """
        write_atomic(self.path / f"checks/{task_id}.{rank:04d}.here", f"{host}\n")

    def signed_in(self, task_id: str) -> dict[int, str]:
        """Return the hosts of a check's ranks that could write here."""
        found = self._list("checks", f"{task_id}.*.here")
        return {int(path.name.split(".")[-2]): path.read_text(encoding="utf-8").strip() for path in found}

    def write_cluster_report(self, report: ClusterReport) -> None:
        self._write(f"checks/{report.id}.json", report)

    def cluster_report(self, task_id: str) -> ClusterReport | None:
        return self._read(f"checks/{task_id}.json", TypeAdapter(ClusterReport))

    def mark_told(self, task_id: str) -> None:
        """Note that the user has seen how a check ended: the next one is a new one."""
        write_atomic(self.path / f"checks/{task_id}.told", f"{time.time()}\n")

    def told(self, task_id: str) -> bool:
        return (self.path / f"checks/{task_id}.told").exists()

    # --- training

    def train_dir(self, train_signature: str) -> Path:
        return self.path / "train" / train_signature

    def train_signatures(self) -> list[str]:
        """Return the training runs there are, last changed first."""
        found = [path for path in (self.path / "train").glob("*") if path.is_dir()]
        return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]

    def checkpoints(self, train_signature: str) -> list[Path]:
        """Return the checkpoints, newest (most samples) first; what else lies there is the user's."""
        found = (self.train_dir(train_signature) / "checkpoints").glob("*.pt")
        return sorted((path for path in found if _CHECKPOINT.fullmatch(path.name)), reverse=True)

    def drop_drafts(self, train_signature: str) -> None:
        """Remove checkpoints that a killed rank 0 was writing."""
        for draft in (self.train_dir(train_signature) / "checkpoints").glob(".*.pt.*"):
            if _DRAFT.fullmatch(draft.name):
                draft.unlink(missing_ok=True)

    def checkpoint_path(self, train_signature: str, samples: int) -> Path:
        return self.train_dir(train_signature) / "checkpoints" / f"{samples:012d}.pt"

    def metrics_path(self, train_signature: str) -> Path:
        return self.train_dir(train_signature) / "metrics.jsonl"

    def metrics(self, train_signature: str) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl; a last line that is still being written is left out."""
        return list(self._rows(self.metrics_path(train_signature)))

    def write_train_result(self, result: TrainResult) -> None:
        self._write(f"train/{result.signature}/result.json", result)

    def train_result(self, train_signature: str) -> TrainResult | None:
        return self._read(f"train/{train_signature}/result.json", TypeAdapter(TrainResult))

    def write_summary(self, summary: Summary) -> None:
        self._write(f"train/{summary.signature}/summary.json", summary)

    def summary(self, train_signature: str) -> Summary | None:
        return self._read(f"train/{train_signature}/summary.json", TypeAdapter(Summary))

    def write_comparison(self, comparison: Comparison) -> None:
        self._write("comparison.json", comparison)

    def comparison(self) -> Comparison | None:
        return self._read("comparison.json", TypeAdapter(Comparison))

    def write_tuning(self, tuning: Tuning) -> None:
        self._write(f"train/{tuning.signature}/tuning.json", tuning)

    def tuning(self, train_signature: str) -> Tuning | None:
        """Return how far a training that tunes itself has come with it; None before it begins."""
        return self._read(f"train/{train_signature}/tuning.json", TypeAdapter(Tuning))

    # --- folders of others

    @property
    def submitit_dir(self) -> Path:
        return self.path / "submitit"

    def log_path(self, task_id: str, attempt: int, rank: int = 0) -> Path:
        """Return where the output of one attempt goes: of all ranks that one supervisor has started."""
        suffix = f".{rank:04d}" if rank else ""
        return self.path / "logs" / f"{task_id}.{attempt:03d}{suffix}.log"

    def open_log(self, path: Path) -> BinaryIO:
        """Open a log to add to it.

        Raises:
            TulaError: the disk is full or the folder cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return open(path, "ab")
        except OSError as error:
            raise cannot_write(path, error) from error

    def handover_path(self, task_id: str, attempt: int) -> Path:
        """Return the file through which the ranks of one attempt find each other (address and port)."""
        return self.path / "handover" / f"{task_id}.{attempt:03d}"

    def write_stop(self, task_id: str, attempt: int, reason: str) -> None:
        """Say that the ranks have saved and left on their own: "time_limit", or "signal" when they were told to end."""
        write_atomic(self.path / "stopped" / f"{task_id}.{attempt:03d}", f"{reason}\n")

    def stopped(self, task_id: str, attempt: int) -> str:
        """Return why the ranks of an attempt left before the end; empty where they did not."""
        path = self.path / "stopped" / f"{task_id}.{attempt:03d}"
        return path.read_text(encoding="utf-8").strip() if path.exists() else ""

    def newest_samples(self, train_signature: str) -> int:
        """Return the samples of the newest checkpoint, 0 where there is none."""
        return next((int(path.stem) for path in self.checkpoints(train_signature)), 0)

    def tuned_samples(self, train_signature: str) -> int:
        """Return the samples of finished branches, which no restart trains again."""
        tuning = self.tuning(train_signature)
        return tuning.samples if tuning is not None else 0

    def progress(self, train_signature: str) -> int:
        """Return the samples that have been trained for good: up to the newest checkpoint, and in branches."""
        return self.newest_samples(train_signature) + self.tuned_samples(train_signature)

    def write_order(self, allocation: str, number: int, order: Order) -> None:
        self._write(f"orders/{allocation}.{number:03d}.json", order)

    def order(self, allocation: str, number: int) -> Order | None:
        return self._read(f"orders/{allocation}.{number:03d}.json", TypeAdapter(Order))

    # --- the user's code

    def code_dir(self, name: str) -> Path:
        """Return where a snapshot of the user's code lies."""
        return self.path / "code" / name

    def write_code(self, snapshot: CodeSnapshot) -> None:
        self._write(f"code/{snapshot.name}.json", snapshot)

    def code(self, name: str) -> CodeSnapshot | None:
        """Return what is known of a snapshot; None where there is none of that name (as of the empty one)."""
        return self._read(f"code/{name}.json", TypeAdapter(CodeSnapshot)) if name else None

    def code_digests(self) -> set[str]:
        """Return the digests of all code that jobs of this run were submitted with."""
        return {found.digest for path in self._list("code") if (found := self._read(path, TypeAdapter(CodeSnapshot)))}

    def scheduler_logs(self, ids: Iterable[str]) -> list[Path]:
        """Return what SLURM kept of jobs, by its own ids: there are words where no supervisor has started."""
        found = [path for id_ in ids for path in self.submitit_dir.glob(f"{id_}_*_log.*") if path.stat().st_size]
        return sorted(found, key=lambda path: path.stat().st_mtime)

    def logs(self) -> list[Path]:
        return sorted((self.path / "logs").glob("*.log"), key=lambda path: path.stat().st_mtime)

    # ---

    def _write(self, name: str, record: BaseModel) -> None:
        write_atomic(self.path / name, record.model_dump_json(indent=1) + "\n")

    def _read(self, name: str | Path, adapter: TypeAdapter[T]) -> T | None:
        path = name if isinstance(name, Path) else self.path / name
        try:
            return adapter.validate_json(content(path))
        except FileNotFoundError:
            return None
        except ValidationError as error:
            first = error.errors()[0]
            raise BadMeasurements(
                f"{path} is damaged: {first['msg']} at {'.'.join(str(part) for part in first['loc']) or 'the top'}",
                "delete that file and run the same command again",
            ) from None

    def _list(self, folder: str, pattern: str = "*.json") -> list[Path]:
        return sorted(path for path in (self.path / folder).glob(pattern) if not path.name.startswith("."))

    @staticmethod
    def _rows(path: Path) -> Iterator[dict[str, Any]]:
        if not path.exists():
            return
        with open(path, encoding="utf-8") as file:
            for line in file:
                # A lost node may leave a line of which some blocks were never written.
                with contextlib.suppress(json.JSONDecodeError):
                    if line.endswith("\n"):
                        yield json.loads(line)
