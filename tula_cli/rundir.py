"""The run directory: the only module that knows its file names.

One file, one writer, replaced whole: a draft named after host and pid, flush, fsync, os.replace. A reader sees the old
file or the new one, never half of either, on NFS and Lustre too.
"""

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from tula_cli.errors import BadMeasurements, SpecError, TulaError
from tula_cli.records import (
    RESULT,
    TASK,
    Attempt,
    Failed,
    Failure,
    Job,
    Measured,
    Order,
    OutOfMemory,
    ProbeTask,
    Recommendation,
    Summary,
    TrainResult,
    TrainTask,
)
from tula_cli.spec import JobSpec, dump_yaml, read_yaml, signature, validate

LATEST = "latest"
T = TypeVar("T")


def probe_id(nodes: int, local_batch: int) -> str:
    return f"probe-n{nodes:03d}-l{local_batch:06d}"


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace `path` whole.

    Raises:
        TulaError: the disk is full or the folder cannot be written; the old file stands as it was.
    """
    content = data.encode() if isinstance(data, str) else data
    draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(draft, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> TulaError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TulaError(
            f"cannot write {path}: {error.strerror}", "free some space and run the same command again; nothing is lost"
        )
    return TulaError(f"cannot write {path}: {error.strerror}", "choose another folder with --run-dir")


class RunDir:
    """One run. Reading never fails on a file that is not there yet; it answers None or an empty list."""

    def __init__(self, path: Path) -> None:
        self.path = path

    # --- which run

    @classmethod
    def of(cls, root: Path, spec: JobSpec) -> "RunDir":
        """Return the run of `spec` under `root`, which may not be there yet; nothing is written."""
        return cls(root / f"{spec.name}-{signature(spec)}")

    @classmethod
    def create(cls, root: Path, spec: JobSpec) -> "RunDir":
        """Return the run of `spec` under `root`, made if it is not there."""
        run = cls.of(root, spec)
        run.adopt(spec)
        return run

    def adopt(self, spec: JobSpec) -> None:
        """Make this the newest run, with this spec; its measurements stay.

        Raises:
            TulaError: it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        write_atomic(self.path / "spec.yaml", dump_yaml(spec))
        write_atomic(self.path.parent / LATEST, f"{self.path.name}\n")

    @classmethod
    def open(cls, path: Path) -> "RunDir":
        """Return an existing run.

        Raises:
            SpecError: there is no such folder, or it is not a run directory.
        """
        if not path.is_dir():
            raise SpecError(f"no such run directory: {path}", "tula list shows the runs there are")
        if not (path / "spec.yaml").is_file():
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

    # --- tasks, jobs, attempts

    def write_task(self, task: ProbeTask | TrainTask) -> None:
        self._write(f"tasks/{task.id}.json", task)

    def task(self, task_id: str) -> ProbeTask | TrainTask | None:
        return self._read(f"tasks/{task_id}.json", TASK)

    def tasks(self) -> list[ProbeTask | TrainTask]:
        return [task for path in self._list("tasks") if (task := self._read(path, TASK))]

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

    def attempts(self, task_id: str | None = None) -> list[Attempt]:
        """Return the attempts of one task (or of all), oldest first."""
        pattern = "*.json" if task_id is None else f"{task_id}.*.json"
        found = [a for path in self._list("attempts", pattern) if (a := self._read(path, TypeAdapter(Attempt)))]
        return sorted(found, key=lambda attempt: (attempt.started_at, attempt.task, attempt.number))

    def write_failure(self, failure: Failure) -> None:
        self._write(f"failures/{failure.task}.{failure.attempt:03d}.{failure.rank:04d}.json", failure)

    def failures(self, task_id: str, attempt: int | None = None) -> list[Failure]:
        """Return what failing ranks saw, earliest first."""
        number = "*" if attempt is None else f"{attempt:03d}"
        paths = self._list("failures", f"{task_id}.{number}.*.json")
        found = [failure for path in paths if (failure := self._read(path, TypeAdapter(Failure)))]
        return sorted(found, key=lambda failure: failure.failed_at)

    def cancel(self, job_id: str) -> None:
        """Mark a job as cancelled by the user: nothing starts or restarts it until `uncancel`."""
        write_atomic(self.path / f"jobs/{job_id}.cancelled", f"{time.time()}\n")

    def uncancel(self, job_id: str) -> None:
        (self.path / f"jobs/{job_id}.cancelled").unlink(missing_ok=True)

    def cancelled(self, job_id: str) -> bool:
        return (self.path / f"jobs/{job_id}.cancelled").exists()

    # --- results

    def write_result(self, result: Measured | OutOfMemory | Failed) -> None:
        self._write(f"results/{result.id}.json", result)

    def result(self, result_id: str) -> Measured | OutOfMemory | Failed | None:
        return self._read(f"results/{result_id}.json", RESULT)

    def results(self) -> list[Measured | OutOfMemory | Failed]:
        found = [result for path in self._list("results") if (result := self._read(path, RESULT))]
        return sorted(found, key=lambda result: (result.nodes, result.local_batch))

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

    # --- training

    def train_dir(self, train_signature: str) -> Path:
        return self.path / "train" / train_signature

    def train_signatures(self) -> list[str]:
        """Return the training runs there are, last changed first."""
        found = [path for path in (self.path / "train").glob("*") if path.is_dir()]
        return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]

    def checkpoints(self, train_signature: str) -> list[Path]:
        """Return the checkpoints, newest (most samples) first."""
        return sorted((self.train_dir(train_signature) / "checkpoints").glob("*.pt"), reverse=True)

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

    # --- folders of others

    @property
    def submitit_dir(self) -> Path:
        return self.path / "submitit"

    def log_path(self, task_id: str, attempt: int, rank: int = 0) -> Path:
        """Return where the output of one attempt goes: of all ranks under torchrun, of one rank under srun."""
        suffix = f".{rank:04d}" if rank else ""
        return self.path / "logs" / f"{task_id}.{attempt:03d}{suffix}.log"

    def handover_path(self, task_id: str, attempt: int) -> Path:
        """Return the file through which the ranks of one attempt find each other (address and port)."""
        return self.path / "handover" / f"{task_id}.{attempt:03d}"

    def write_order(self, allocation: str, number: int, order: Order) -> None:
        self._write(f"orders/{allocation}.{number:03d}.json", order)

    def order(self, allocation: str, number: int) -> Order | None:
        return self._read(f"orders/{allocation}.{number:03d}.json", TypeAdapter(Order))

    def logs(self) -> list[Path]:
        return sorted((self.path / "logs").glob("*.log"), key=lambda path: path.stat().st_mtime)

    # ---

    def _write(self, name: str, record: BaseModel) -> None:
        write_atomic(self.path / name, record.model_dump_json(indent=1) + "\n")

    def _read(self, name: str | Path, adapter: TypeAdapter[T]) -> T | None:
        path = name if isinstance(name, Path) else self.path / name
        try:
            return adapter.validate_json(path.read_bytes())
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
                if line.endswith("\n"):
                    yield json.loads(line)
