"""Monitoring of a script's ranks by their supervisor, while they run and when they exit."""

import contextlib
import filecmp
import math
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tula_cli import words
from tula_cli.cluster.exit_reason import ExitReason, compute_device
from tula_cli.cluster.scripts.placeholders import get_script
from tula_cli.cluster.scripts.resume_test import ResumeTest
from tula_cli.cluster.scripts.training import (
    SETTLED_SECONDS,
    ScriptTraining,
    describe_missing_step,
    get_checkpoint_change_time,
)
from tula_cli.host.failures import classify_failure, find_telling_line
from tula_cli.host.leftovers import find_processes_with_variable
from tula_cli.host.network import get_node_name
from tula_cli.host.processes import find_inner_id
from tula_cli.run.directory import RunDir
from tula_cli.run.files import append_json_line
from tula_cli.run.records.jobs import Failure, LeaderCommand
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.scripts import Heartbeat, ScriptFailure
from tula_cli.run.records.tasks import ProbeTask, RehearsalTask, Task, TrainTask
from tula_cli.run.script_attempt import ScriptAttempt
from tula_cli.spec.scripts.placeholders import fill

if TYPE_CHECKING:
    from tula_cli.models.time.changes import ScriptLevelDetector


# --- Files that a probe writes outside its folder

MAX_NAMED = 3
"""Maximum files listed by name; further ones are counted."""


@dataclass(frozen=True)
class ChangedFile:
    """A path that the processes of one node have changed.

    Attributes:
        existed: whether the path existed before the probe.
        copy: copy of the earlier content; None if there is none.
        modified: last modification of the earlier content (ns); None if unknown.
    """

    path: Path
    existed: bool
    copy: Path | None
    modified: int | None = None

    def is_unchanged(self) -> bool:
        """Return whether an existing file is unchanged; numpy.memmap, e.g., may open for writing and only read."""
        if not self.existed or not os.path.lexists(self.path):
            return False
        if self.copy is None:
            return self.path.lstat().st_mtime_ns == self.modified
        if self.path.is_symlink() or self.copy.is_symlink():
            return self.path.is_symlink() and self.copy.is_symlink() and self.path.readlink() == self.copy.readlink()
        return self.path.is_file() and filecmp.cmp(self.path, self.copy, shallow=False)


def put_aside_probe_files(attempt: ScriptAttempt) -> str:
    """Move files that a start created after its first step into its folder, and restore changed or removed ones.

    Files written before the first step are kept, as they do not depend on training (downloads, prepared data,
    settings).

    Returns:
        Description of the changes; empty if there were none.
    """
    rows = attempt.changed_files(socket.gethostname())
    stepped = min((row["stepped"] for row in rows if "stepped" in row), default=None)
    if stepped is None:
        return ""
    folders = sorted({Path(row["path"]) for row in rows if row.get("folder") and not row["existed"]}, reverse=True)
    moved: list[str] = []
    remaining: list[str] = []
    for file in _list_changed_files(rows, folders, since=stepped):
        try:
            if file.is_unchanged():
                continue
            restored = _restore(file, attempt.aside / file.path.relative_to("/"))
        except OSError as error:
            remaining.append(f"{file.path} ({error.strerror})")
            continue
        (moved if restored else remaining).append(str(file.path))
    for folder in folders:  # the deepest first; what the probe made, and holds nothing more
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    text = _describe_moved(moved, remaining, attempt.aside)
    if text:
        append_json_line(attempt.path / "aside.jsonl", {"text": text})
    return text


def _list_changed_files(
    rows: Sequence[Mapping[str, Any]], folders: Iterable[Path], *, since: float
) -> Iterable[ChangedFile]:
    """Yield the files that were changed after the first step, according to the journal or their modification time."""
    by_path: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if "path" in row and not row["folder"]:
            by_path.setdefault(row["path"], []).append(row)
    for name, events in by_path.items():
        copy = next((event["copy"] for event in events if event["copy"]), None)
        modified = next((event["modified"] for event in events if event.get("modified")), None)
        existed = any(event["existed"] for event in events)
        if not existed and not os.path.lexists(name):
            continue  # a draft that was renamed, or a temporary file
        if any(event["late"] for event in events) or _get_modification_time(Path(name)) >= since:
            yield ChangedFile(Path(name), existed, None if copy is None else Path(copy), modified)
    new_files = {
        file for folder in folders for file in folder.rglob("*") if file.is_file() and str(file) not in by_path
    }
    yield from (ChangedFile(file, False, None) for file in sorted(new_files) if _get_modification_time(file) >= since)


def _restore(file: ChangedFile, target: Path) -> bool:
    """Move a file aside and restore its earlier content; return False if there is no copy of that."""
    if file.existed and file.copy is None:
        return False
    if os.path.lexists(file.path):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(file.path, target)
    if file.copy is not None:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file.copy, file.path, follow_symlinks=False)
    return True


def _get_modification_time(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _describe_moved(moved: Sequence[str], remaining: Sequence[str], folder: Path) -> str:
    sentences = []
    if moved:
        sentences.append(
            f"the script writes outside of {{out}}: {_list_names(moved)}; put aside in {folder}, so that no training starts from it"
        )
    if remaining:
        sentences.append(
            f"the script changed {_list_names(remaining)}, which could not be restored: check it before a training starts from it"
        )
    return "; ".join(sentences)


def _list_names(names: Sequence[str]) -> str:
    hidden = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {hidden} more" if hidden > 0 else "")


# --- The reports of the ranks

PROBE_SILENCE = 60.0
"""Minimum seconds without a heartbeat after which a probe that has stepped is killed as stuck."""
TRAINING_SILENCE = 600.0
"""The same for a training, which may evaluate and save unseen by the shim, and must not be restarted needlessly."""
FIRST_STEP_STARTS = 20
"""Limit for a training's first step in startup times of a probe; at least search.max_minutes."""
SILENT_STEPS = 20
"""Minimum silence in median step times, in addition to PROBE_SILENCE and TRAINING_SILENCE."""
ROW_SECONDS = 1.0
"""Seconds between two rows of metrics.jsonl, as in the training loop of tula."""
SIGNALS = {name: signal.Signals[name] for name in ("SIGUSR1", "SIGUSR2", "SIGTERM")}
SAVE_SECONDS = 5.0
"""Seconds between two checks for a new checkpoint."""


@dataclass
class ScriptWatch:
    """Monitor of one attempt of a script, in one supervisor.

    Args:
        ranks: ranks that this supervisor, or the command that it runs, has started.
        training: training whose rows the leader writes; None for followers and for other tasks.
    """

    run: RunDir
    task: Task
    command: LeaderCommand
    ranks: range
    training: ScriptTraining | None = None
    _next_row: float = 0.0
    _next_words: float = words.compute_log_pause(0.0)  # seconds after the start at which the log tells how far it is
    _next_epoch: float = 0.0  # or once this has begun
    _next_look: float = 0.0
    _began: float = field(default_factory=time.monotonic)
    _step: int = 0
    _batch: float = 0.0  # samples of a step that were seen last; 0 before any were
    _broken: ExitReason | None = None
    _claims_checked: bool = False  # the first steps of all ranks against what is claimed

    @property
    def attempt(self) -> ScriptAttempt:
        return ScriptAttempt(self.run.path, self.task.id, self.command.attempt)

    def log_start(self) -> None:
        """Record the start of a training in its metrics."""
        if self.training is not None:
            self.training.log_start(self.command)

    def record_progress(self) -> None:
        """Record failures, progress and checkpoints reported by the shims of these ranks since the last call."""
        self._record_failures()
        if self.training is not None and time.monotonic() >= self._next_row:
            self._next_row = time.monotonic() + ROW_SECONDS
            previous_step, self._step = (
                self._step,
                self.training.log_progress(self.attempt, self.command, after=self._step),
            )
            if self._step > previous_step:
                self._print_progress(self.training)
            self._batch = self.training.check_step_samples(
                self.attempt, self.command, previous=self._batch or self.command.batch
            )
            self.training.check_step_time(self._pace, self.attempt, self.command)
            if not self._claims_checked and (first_results := self.attempt.first_results()):
                self._broken = self.training.broken_claims(first_results, self.command)
                self._claims_checked = len(first_results) >= first_results[0].world
        if self.training is not None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + SAVE_SECONDS
            self.training.record_save(self.attempt, self.command)

    def _print_progress(self, training: ScriptTraining) -> None:
        """Print the progress of the script into the log of the job, at epoch ends and from time to time in between."""
        row = next((row for row in reversed(training.training.newest_metrics()) if row["kind"] == "step"), None)
        age = time.monotonic() - self._began
        if row is None or (age < self._next_words and (row["epoch"] is None or row["epoch"] < self._next_epoch)):
            return
        self._next_words, self._next_epoch = age + words.compute_log_pause(age), math.floor(row["epoch"] or 0) + 1
        progress_text = words.describe_progress(
            epoch=row["epoch"], of=None, samples=row["samples"], batch=training.task.batch, loss=row["loss"],
            step_time=row["step_time"], left=row["eta"],
        )  # fmt: skip
        with self.run.open_log(self.run.log_path(self.task.id, self.command.attempt)) as log:
            log.write(f"{words.stamp_line(progress_text)}\n".encode())

    @cached_property
    def _pace(self) -> "ScriptLevelDetector":
        from tula_cli.models.time.changes import ScriptLevelDetector

        return ScriptLevelDetector()

    def record_end(self) -> None:
        """Record the last reports of the ranks after their exit."""
        self._next_row = 0.0
        self.record_progress()

    def put_aside(self) -> str:
        """Undo changes of a probe or resume test outside its folder on this node; return a description of them."""
        return "" if isinstance(self.task, TrainTask) else put_aside_probe_files(self.attempt)

    def _record_failures(self) -> None:
        """Write failure records, like those of a worker, for the failures that the shims of these ranks reported."""
        shim_failures = self.attempt.failures()
        recorded_ranks = (
            {failure.rank for failure in self.run.failures(self.task.id, self.command.attempt)}
            if shim_failures
            else set()
        )
        for shim_failure in shim_failures:
            if shim_failure.where == "shim" and isinstance(self.task, TrainTask):
                continue  # the training goes on without being watched, and its log says so
            rank = self.ranks.start if shim_failure.rank is None else shim_failure.rank
            if rank in self.ranks and rank not in recorded_ranks:
                recorded_ranks.add(rank)
                self.run.write_failure(self._failure(shim_failure, rank))

    def _failure(self, shim_failure: ScriptFailure, rank: int) -> Failure:
        is_of_shim = shim_failure.where != "script"
        shims_fault = "measuring the script failed (this is tula's fault): " if shim_failure.where == "shim" else ""
        return Failure(
            task=self.task.id,
            attempt=self.command.attempt,
            rank=rank,
            host=get_node_name(),
            pid=shim_failure.pid,
            outcome="user"
            if is_of_shim
            else classify_failure(shim_failure.text, exit_code=1, device=compute_device(self.run, self.task)),
            message=shims_fault
            + ((shim_failure.where == "script" and find_telling_line(shim_failure.text)) or shim_failure.description),
            detail=shim_failure.text,
            local_batch=self.command.batch // self.command.ranks,
            failed_at=shim_failure.failed_at,
        )

    # --- leaving

    @property
    def can_save(self) -> bool:
        """Whether the task is a training whose script can be asked to save."""
        return isinstance(self.task, TrainTask) and get_script(self.task.spec).save != "none"

    def ask_to_save(self) -> None:
        """Ask these ranks for a checkpoint in the way of script.save; only the leader does so by a file or hook."""
        how = get_script(self.task.spec).save
        if how in SIGNALS:
            for pid in self._rank_processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, SIGNALS[how])
        elif self.training is not None and how == "hooks":
            self.attempt.write_save_request()
        elif self.training is not None:
            path = Path(self.task.workdir) / fill(how.removeprefix("file:"), self.training.placeholder_values)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def _rank_processes(self) -> list[int]:
        """Return the processes of these ranks: those of this attempt whose inner process id is that of a heartbeat."""
        hearts = {beat.pid for rank in self.ranks if (beat := self.attempt.heartbeat(rank)) is not None}
        plan = str(self.attempt.plan_path)
        return [
            pid
            for pid, value in find_processes_with_variable("TULA_PLAN").items()
            if value == plan and find_inner_id(pid) in hearts
        ]

    def has_saved(self, *, since: float) -> bool:
        """Return whether a checkpoint was written after `since` (Unix time) and is no longer being written."""
        if not isinstance(self.task, TrainTask):
            return False
        checkpoint = ScriptTraining(self.run, self.task).newest_checkpoint()
        return checkpoint is not None and since < get_checkpoint_change_time(checkpoint) < time.time() - SETTLED_SECONDS

    # --- faults

    @property
    def has_stepped(self) -> bool:
        """Whether any of these ranks has taken a step."""
        return any(self.attempt.heartbeat(rank) is not None for rank in self.ranks)

    def stuck_reason(self) -> ExitReason | None:
        """Return why the ranks must be killed, or None.

        A rank is stuck if it has stepped and no rank on any node has a recent heartbeat. A resume test is killed if it
        trains beyond the remaining samples, a training if its first steps contradict its settings or are late.
        """
        if self._broken is not None:
            return self._broken
        if isinstance(self.task, RehearsalTask) and self.command.rehearsal is not None:
            endless = ResumeTest(self.run, self.task).endless_reason(self.command.rehearsal, self.attempt)
            if endless is not None:
                return endless
        for rank in self.ranks:
            beat = self.attempt.heartbeat(rank)
            if beat is None or not self._is_silent(beat) or self._has_written_result(rank) or self._is_any_rank_alive():
                continue
            message = (
                f"no step for {time.time() - beat.alive_at:.0f} s, after {beat.step} steps of {beat.seconds:.3g} s"
            )
            return ExitReason("unknown", f"{message}: ended as stuck", rank, get_node_name())
        return self._no_first_step_reason()

    def _no_first_step_reason(self) -> ExitReason | None:
        """Return why a training is killed of which no rank takes a step in time; other tasks have a time limit."""
        if not isinstance(self.task, TrainTask) or time.monotonic() - self._began <= self._first_step_limit:
            return None
        has_heartbeat = any(self.attempt.heartbeat(rank) is not None for rank in range(self.command.ranks))
        if has_heartbeat or any(
            failure.where == "shim" for failure in self.attempt.failures()
        ):  # it goes on without being watched
            return None
        log = self.run.log_path(self.task.id, self.command.attempt)
        limit = f"{self._first_step_limit / 60:.3g} min after its start (search.max_minutes, or 20 starts of a probe)"
        return ExitReason("user", f"ended {limit}: {describe_missing_step(log)}", self.ranks.start, get_node_name())

    @cached_property
    def _first_step_limit(self) -> float:
        """Seconds in which a training must take its first step."""
        results = self.run.read().results
        starts = [result.overheads.startup for result in results if isinstance(result, Measured)]
        return max(60 * self.task.spec.search.max_minutes, FIRST_STEP_STARTS * max(starts, default=0.0))

    def _is_any_rank_alive(self) -> bool:
        """Return whether any rank on any node is alive; ranks that wait while it evaluates or saves are not stuck."""
        beats = [self.attempt.heartbeat(rank) for rank in range(self.command.ranks)]
        return any(beat is not None and (beat.lost is not None or not self._is_silent(beat)) for beat in beats)

    def _is_silent(self, beat: Heartbeat) -> bool:
        least = PROBE_SILENCE if isinstance(self.task, ProbeTask) else TRAINING_SILENCE
        return time.time() - beat.alive_at > max(least, SILENT_STEPS * beat.seconds)

    def _has_written_result(self, rank: int) -> bool:
        return (self.attempt.path / f"result-{rank}.json").exists()
