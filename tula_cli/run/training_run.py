"""One training in a run directory, over all its relaunches: its tasks and attempts, checkpoints, metrics and results."""

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tula_cli.run.files import (
    RecordReader,
    list_names,
    make_read_error,
    open_file,
    parse_json_object,
    read_change_time,
    read_json_lines,
    read_lines,
    read_record,
    read_records,
    remove_path,
    write_record,
)
from tula_cli.run.records.jobs import Attempt
from tula_cli.run.records.results import (
    CountedEnergy,
    EvaluationRecord,
    MicroBatches,
    ScriptProgress,
    ScriptSaves,
    StepChange,
    Summary,
    TrainResult,
    Tuning,
)
from tula_cli.run.records.tasks import TrainTask
from tula_cli.run.step_series import StepRow, StepSeries, convert_to_columns, is_step_line, parse_rows

CHECKPOINT_PATTERN = re.compile(r"[0-9]{12,}\.(pt|dcp)")
"""File names created by `get_checkpoint_path`."""
DRAFT_PATTERN = re.compile(r"\.[0-9]{12,}\.(pt\..+\.[0-9]+|dcp\.(draft|old))")
"""File names of checkpoints that are being written or replaced, by `write_file_atomically` or as shards."""

MAX_CLOCK_NOISE_SECONDS, COPIED_FILE_SECONDS = 5.0, 3600.0
"""Seconds between a row's own time and its file's modification time: a smaller difference is the time until it is
written, one above the second value means that the file is a copy."""

_PROGRESS_KINDS = ("start", "step", "epoch")
"""Kinds of rows that record the progress of a training."""
_REQUIRED_FIELDS: Mapping[str, tuple[str, ...]] = {"start": ("attempt",), "step": ("step",)}
"""Numbers that every row of a kind has."""
_MEASURED_FIELDS = (
    "loss", "lr", "step_time", "plain_time", "data_wait", "compute", "sync", "count", "refreshed", "eta", "eval_loss", "top1",
    "top5", "perplexity", "predicted_step", "step_low", "step_high", "eval_seconds", "tokens_per_second", "padding",
)  # fmt: skip
"""Names of measured values, which are numbers or null."""
_MAX_NUMBER = 1e18
_SAMPLED_BYTES, _STEP_ROW_PREFIX = 2**20, b'{"kind": "step"'
"""Approximate bytes of step rows that represent a training well enough, and the prefix of a step row."""
_NUMBER_PATTERN = rb"-?[0-9]{1,17}(?:\.[0-9]+)?(?:e-[0-9]+)?"
_PLAIN_STEP_PATTERN = re.compile(
    rb'\{"kind": "step", "time": %s, "samples": [0-9]{1,17}, "epoch": (?:%s|null)(?:, "[a-z0-9_]+": (?:%s|null))*\}\n'
    % (_NUMBER_PATTERN, _NUMBER_PATTERN, _NUMBER_PATTERN)
)
"""A regular step row: there may be a million of them, and parsing each as JSON takes three times as long."""


class TrainingRun:
    """A training. Reading a file that does not exist yet never fails; the result is None or an empty list.

    Args:
        read: reads its records.
    """

    def __init__(self, run: Path, signature: str, *, read: RecordReader = read_record) -> None:
        self.run = run
        self.signature = signature
        self._read_record = read

    @property
    def path(self) -> Path:
        return self.run / "train" / self.signature

    # --- Tasks and attempts of this training

    def read_tasks(self) -> list[TrainTask]:
        """Return the task of each relaunch, first attempt first."""
        tasks = read_records(self.run / "tasks", TrainTask, f"train-{self.signature}-*.json", read=self._read_record)
        return sorted(tasks, key=lambda task: task.attempt)

    def read_newest_task(self) -> TrainTask | None:
        """Return the task of the newest attempt; None before the first one."""
        tasks = self.read_tasks()
        return tasks[-1] if tasks else None

    def read_attempts(self) -> list[Attempt]:
        """Return the attempts over all relaunches, oldest first."""
        attempts = read_records(
            self.run / "attempts", Attempt, f"train-{self.signature}-*.json", read=self._read_record
        )
        return sorted(attempts, key=lambda attempt: attempt.sort_key)

    def find_diverged_attempt(self) -> Attempt | None:
        """Return the newest attempt if it diverged and no relaunch follows it."""
        attempts, task = self.read_attempts(), self.read_newest_task()
        if not attempts or attempts[-1].outcome != "diverged" or (task is not None and task.id != attempts[-1].task):
            return None
        return attempts[-1]

    # --- Progress and result

    def read_result(self) -> TrainResult | None:
        return self._read_record(self.path / "result.json", TrainResult)

    def read_summary(self) -> Summary | None:
        return self._read_record(self.path / "summary.json", Summary)

    def find_weights(self) -> Path | None:
        """Return the checkpoint of the best epoch of tula's own loop; None if there is none yet.

        A file of torch.save, or, for a sharded model (`train.parallel: fsdp`), a folder of
        torch.distributed.checkpoint.
        """
        best = self.path / "best"
        return best if best.exists() else None

    def find_script_output(self) -> Path | None:
        """Return the output folder of a script (`{out}`) that was written last; None without a script."""
        folders = [path for path in self.path.glob("out*") if path.is_dir()]
        return max(folders, key=read_change_time, default=None)

    def read_evaluations(self) -> list[EvaluationRecord]:
        """Return the results of `tula evaluate` on its weights, oldest first."""
        evaluations = read_records(self.path / "evaluations", EvaluationRecord, read=self._read_record)
        return sorted(evaluations, key=lambda evaluation: evaluation.evaluated_at)

    def read_evaluation(self, key: str) -> EvaluationRecord | None:
        return self._read_record(self._get_evaluation_path(key), EvaluationRecord)

    def write_evaluation(self, evaluated: EvaluationRecord) -> None:
        write_record(self._get_evaluation_path(evaluated.key), evaluated)

    def drop_evaluation(self, key: str) -> None:
        self._get_evaluation_path(key).unlink(missing_ok=True)

    def _get_evaluation_path(self, key: str) -> Path:
        return self.path / "evaluations" / f"{key}.json"

    def read_tuning(self) -> Tuning | None:
        """Return the state of a training's self-tuning; None before it starts."""
        return self._read_record(self.path / "tuning.json", Tuning)

    def read_energy(self) -> CountedEnergy | None:
        """Return the energy counted so far; None if the GPUs have no counter."""
        return self._read_record(self.path / "energy.json", CountedEnergy)

    def read_script_progress(self) -> ScriptProgress | None:
        """Return the newest checkpoint of a script; None if there is none, or tula's own loop trains."""
        return self._read_record(self.path / "script.json", ScriptProgress)

    def write_script_progress(self, progress: ScriptProgress) -> None:
        write_record(self.path / "script.json", progress)

    def read_script_saves(self) -> ScriptSaves:
        """Return the checkpoints that a script has saved, and the samples it lost."""
        return self._read_record(self.path / "saves.json", ScriptSaves) or ScriptSaves()

    def write_script_saves(self, saves: ScriptSaves) -> None:
        write_record(self.path / "saves.json", saves)

    def read_micro_batches(self) -> MicroBatches | None:
        """Return how far its micro-batches may be split; None before its ranks have reported it, and for a script."""
        return self._read_record(self.path / "micro_batches.json", MicroBatches)

    def write_micro_batches(self, known: MicroBatches) -> None:
        write_record(self.path / "micro_batches.json", known)

    def find_newest_checkpoint_samples(self) -> int:
        """Return the samples of the newest checkpoint; 0 if there is none."""
        script = self.read_script_progress()
        return script.samples if script is not None else next((int(path.stem) for path in self.list_checkpoints()), 0)

    def count_tuned_samples(self) -> int:
        """Return the samples of finished branches, which are not trained again after a restart."""
        tuning = self.read_tuning()
        return tuning.samples if tuning is not None else 0

    def count_trained_samples(self) -> int:
        """Return the samples that a restart does not train again: up to the newest checkpoint, and in branches."""
        return self.find_newest_checkpoint_samples() + self.count_tuned_samples()

    def validate_records(self) -> None:
        """Read every existing record, so that the reader notices damaged ones."""
        records: dict[str, Callable[[], object]] = {
            "result.json": self.read_result, "summary.json": self.read_summary, "tuning.json": self.read_tuning, "energy.json": self.read_energy,
            "script.json": self.read_script_progress, "saves.json": self.read_script_saves, "micro_batches.json": self.read_micro_batches,
            "evaluations": self.read_evaluations,
        }  # fmt: skip
        for name in list_names(self.path):
            if name in records:
                records[name]()

    # --- Checkpoints and metrics

    def get_checkpoint_path(self, samples: int, *, sharded: bool = False) -> Path:
        """Return the path of a checkpoint: a file of torch.save, or a folder for a sharded model."""
        return self.path / "checkpoints" / f"{samples:012d}.{'dcp' if sharded else 'pt'}"

    def list_checkpoints(self) -> list[Path]:
        """Return the checkpoints, newest (most samples) first; other files in the folder are the user's."""
        paths = (self.path / "checkpoints").glob("*")
        return sorted((path for path in paths if CHECKPOINT_PATTERN.fullmatch(path.name)), reverse=True)

    def drop_drafts(self) -> None:
        """Remove unfinished checkpoints that killed ranks left behind."""
        for draft in (self.path / "checkpoints").glob(".*"):
            if DRAFT_PATTERN.fullmatch(draft.name):
                remove_path(draft)

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def read_step_changes(self) -> tuple[StepChange, ...]:
        """Return the detected changes of the step time, oldest first."""
        return tuple(StepChange.model_validate(row["change"]) for row in self.read_metrics("change"))

    def read_metrics(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl, of these kinds or of all; damaged and incomplete rows are left out.

        A long training has a million step rows: callers that do not need them should name the kinds.
        """
        begins = tuple(f'{{"kind": "{kind}"'.encode() for kind in kinds)
        rows = read_json_lines(self.metrics_path, is_wanted=lambda line: not kinds or line.startswith(begins))
        return list(filter(_has_required_fields, rows))

    @property
    def steps_path(self) -> Path:
        return self.path / "steps.jsonl"

    def read_steps(self) -> StepSeries:
        """Return the recorded values of every step, in columns; empty if nothing was recorded.

        Recorded if the method scales gradients, or with `train.diagnostics: [gradient_norms]`; never for a script.
        """
        return convert_to_columns(self.read_step_rows())

    def read_step_rows(self) -> list[StepRow]:
        """Return the recorded values of every step as rows, oldest first; damaged and incomplete rows are left out."""
        return parse_rows(read_json_lines(self.steps_path))

    def compute_clock_offset(self, rows: Sequence[Mapping[str, Any]]) -> float:
        """Return the seconds by which the file system's clock is ahead of that of the writing host; 0 if they agree.

        Rows are written immediately, so the newest one is compared with the file's modification time. A difference
        below `MAX_CLOCK_NOISE_SECONDS` is the time until a row is written; above `COPIED_FILE_SECONDS` the file is a copy.
        """
        try:
            offset = self.metrics_path.stat().st_mtime - max(
                row["time"] for row in rows if isinstance(row.get("time"), int | float)
            )
        except (OSError, ValueError):
            return 0.0
        return float(offset) if MAX_CLOCK_NOISE_SECONDS < abs(offset) < COPIED_FILE_SECONDS else 0.0

    def read_newest_metrics(self) -> list[dict[str, Any]]:
        """Return the rows in the last 16 KiB of metrics.jsonl."""
        return list(filter(_has_required_fields, read_json_lines(self.metrics_path, last_bytes=2**14)))

    def read_sampled_metrics(self) -> Sequence[dict[str, Any]]:
        """Return the rows as `read_metrics` does, but for a long training only every n-th step row and the newest one.

        The result is cached until the file changes; callers must not modify it.
        """
        return (
            () if (version := self._read_metrics_version()) is None else _read_sampled_rows(self.metrics_path, *version)
        )

    def find_damaged_metrics_lines(self) -> list[int]:
        """Return the line numbers (from 1) of metrics.jsonl that are not valid rows.

        An incomplete row at the end of the file is still being written, or was cut off by a kill: it counts as damaged
        only if the training has finished.
        """
        finished = (self.path / "result.json").exists()
        return _list_damaged_lines(
            self.metrics_path, lambda line: is_complete_row(line) or (not finished and _may_be_incomplete_row(line))
        )

    def find_damaged_step_lines(self) -> list[int]:
        """Return the line numbers (from 1) of steps.jsonl that are damaged; an incomplete last line is not."""
        return _list_damaged_lines(
            self.steps_path, lambda line: is_step_line(parse_json_object(line) or {}) or _may_be_incomplete_row(line)
        )

    def _read_metrics_version(self) -> tuple[int, int] | None:
        """Return the modification time (ns) and size of metrics.jsonl; None if it does not exist."""
        try:
            file_statistics = self.metrics_path.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise make_read_error(self.metrics_path, error) from error
        return file_statistics.st_mtime_ns, file_statistics.st_size


@functools.lru_cache(maxsize=8)
def _read_sampled_rows(path: Path, _changed: int, size: int) -> tuple[dict[str, Any], ...]:
    """Return every n-th step row and all other rows of a file; cached by modification time (ns) and size."""
    every = 1 + size // _SAMPLED_BYTES
    number = itertools.count()
    rows: list[dict[str, Any]] = []
    skipped: tuple[int, bytes] | None = None  # (index in rows, line) of the newest step if it was left out

    def keep_line(line: bytes) -> bool:
        nonlocal skipped
        is_step = line.startswith(_STEP_ROW_PREFIX)
        if is_step and next(number) % every:
            skipped = (len(rows), line)
            return False
        skipped = None if is_step else skipped
        return True

    for row in filter(_has_required_fields, read_json_lines(path, is_wanted=keep_line)):
        rows.append(row)  # noqa: PERF402 - `keep_line` reads len(rows) meanwhile
    if skipped is not None and (newest := parse_json_object(skipped[1])) is not None and _has_required_fields(newest):
        rows.insert(skipped[0], newest)
    return tuple(rows)


def _list_damaged_lines(path: Path, is_valid_line: Callable[[bytes], bool]) -> list[int]:
    """Return the line numbers (from 1) of a file that are not sound; empty if there is no such file."""
    number, damaged = 1, dict[int, None]()
    try:
        with open_file(path) as file:
            for line in read_lines(file):
                if not is_valid_line(line):
                    damaged[number] = None
                number += line.endswith(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise make_read_error(path, error) from error
    return list(damaged)


def is_complete_row(line: bytes) -> bool:
    """Return whether a line of metrics.jsonl is a complete row."""
    if _PLAIN_STEP_PATTERN.fullmatch(line):
        return True
    row = parse_json_object(line) if line.endswith(b"\n") else None
    return row is not None and _has_required_fields(row)


def _may_be_incomplete_row(line: bytes) -> bool:
    """Return whether a line may be the start of one that is still being written: ASCII text without a line end."""
    return not line.endswith(b"\n") and line.isascii()


def _has_required_fields(row: Mapping[str, Any]) -> bool:
    """Return whether a row of metrics.jsonl has the fields its readers need; lost nodes may leave partial blocks."""
    kind = row.get("kind")
    if kind == "warning":
        return isinstance(row.get("message"), str)
    if kind == "change":
        with contextlib.suppress(ValidationError):
            return bool(StepChange.model_validate(row.get("change")))
        return False
    if kind == "noise":
        return _are_numbers(row.get("epoch"), row.get("batch"))
    if kind not in _PROGRESS_KINDS:
        return isinstance(kind, str)
    positions = [row[name] for name in ("time", "epoch", "batch") if row.get(name) is not None]
    numbers = [row[name] for name in _MEASURED_FIELDS if row.get(name) is not None]
    has_position = "epoch" in row and _are_numbers(
        row.get("samples"), *positions, *(row.get(name) for name in _REQUIRED_FIELDS.get(kind, ()))
    )
    return has_position and all(isinstance(value, int | float) for value in numbers)


def _are_numbers(*values: object) -> bool:
    return all(isinstance(value, int | float) and abs(value) < _MAX_NUMBER for value in values)
