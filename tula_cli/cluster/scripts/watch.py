"""Monitoring of a script's ranks by their supervisor, while they run and when they exit."""

import contextlib
import filecmp
import os
import shutil
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from tula_cli.cluster.allocation import Allocation
from tula_cli.cluster.failures import find_device_type
from tula_cli.cluster.rank_program import RankMonitor
from tula_cli.cluster.scripts.start import AttemptContext, ScriptProgram
from tula_cli.errors import BadMeasurements
from tula_cli.host.failure_texts import classify_failure, find_device_fault, find_line_of_failure, find_signal
from tula_cli.host.network import get_node_name
from tula_cli.models.resuming import NO_STEP_SEEN
from tula_cli.run.files import append_json_line, read_change_time, read_last_bytes
from tula_cli.run.records.failures import Failure
from tula_cli.run.records.jobs import LeaderCommand
from tula_cli.run.records.scripts import Heartbeat, ScriptFailure
from tula_cli.run.script_attempt import ScriptAttempt
from tula_cli.words import join_first_words

# --- Files that a probe writes outside its folder

MAX_FILES_NAMED = 3
"""Maximum files listed by name; further ones are counted."""
DATABASE_SUFFIXES = ("-journal", "-wal", "-shm")
"""Suffixes of the files with changes that are not in their SQLite database yet."""


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

    def can_be_rewritten(self) -> bool:
        """Return whether the path can be written without a change of another one: it is a writable file without links."""
        is_file = self.path.is_file() and not self.path.is_symlink()
        return is_file and self.path.stat().st_nlink == 1 and os.access(self.path, os.W_OK)

    def is_unchanged(self) -> bool:
        """Return whether an existing file is unchanged; numpy.memmap, e.g., may open for writing and only read."""
        if not self.existed or not os.path.lexists(self.path):
            return False
        if self.copy is None:
            return self.path.lstat().st_mtime_ns == self.modified
        if self.path.is_symlink() or self.copy.is_symlink():
            return self.path.is_symlink() and self.copy.is_symlink() and self.path.readlink() == self.copy.readlink()
        return self.path.is_file() and filecmp.cmp(self.path, self.copy, shallow=False)

    @property
    def is_kept(self) -> bool:
        """Whether the file stays as it is: it existed, and is unchanged or cannot be restored."""
        try:
            return self.existed and (self.copy is None or self.is_unchanged())
        except OSError:
            return True


def move_probe_files(attempt: ScriptAttempt) -> str:
    """Move files that a start created after its first step into its folder, and restore changed or removed ones.

    Files written before the first step are kept, as they do not depend on training (downloads, prepared data,
    settings).

    Returns:
        Description of the changes; empty if there were none.
    """
    rows = attempt.read_changed_files(socket.gethostname())
    stepped = min((row["stepped"] for row in rows if "stepped" in row), default=None)
    if stepped is None:
        return ""
    existing = {row["path"] for row in rows if row.get("existed")}
    created = {row["path"] for row in rows if row.get("folder")} - existing
    folders = sorted(map(Path, created), reverse=True)
    moved: list[str] = []
    remaining: list[str] = []
    for file in _list_changed_files(rows, folders, since=stepped):
        try:
            if file.is_unchanged():
                continue
            restored = _restore_file(file, attempt.moved_files_folder / file.path.relative_to("/"))
        except OSError as error:
            remaining.append(f"{file.path} ({error.strerror})")
            continue
        (moved if restored else remaining).append(str(file.path))
    for folder in folders:  # deepest first; folders that the probe created and that are empty now
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    text = _describe_moved_files(moved, remaining, attempt.moved_files_folder)
    if text:
        append_json_line(attempt.path / "aside.jsonl", {"text": text})
    return text


def _list_changed_files(
    rows: Sequence[Mapping[str, Any]], folders: Iterable[Path], *, since: float
) -> list[ChangedFile]:
    """Return the files that were changed after the first step, according to the journal or their modification time.

    A file in a folder that the probe created counts as created by the probe, even if C code has written it.
    """
    by_path: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if "path" in row and not row["folder"]:
            by_path.setdefault(row["path"], []).append(row)
    files: dict[str, ChangedFile] = {}
    changed: list[ChangedFile] = []
    for name, events in by_path.items():
        file = _make_changed_file(Path(name), events)
        if not file.existed and not os.path.lexists(name):
            continue  # a renamed draft or a deleted temporary file
        database = next((files.get(name.removesuffix(end)) for end in DATABASE_SUFFIXES if name.endswith(end)), None)
        if database is not None and database.is_kept:
            # It belongs to the current database, and may hold the transactions of another job.
            file = replace(file, existed=True, copy=None)
        files[name] = file
        if any(event["late"] for event in events) or read_change_time(file.path, follow_symlinks=False) >= since:
            changed.append(file)
    new_files = {file for folder in folders for file in folder.glob("*") if file.is_file() and str(file) not in by_path}
    new_files = {path for path in new_files if read_change_time(path, follow_symlinks=False) >= since}
    return [*changed, *(ChangedFile(path, existed=False, copy=None) for path in sorted(new_files))]


def _make_changed_file(path: Path, events: Iterable[Mapping[str, Any]]) -> ChangedFile:
    """Return a path as the processes of a node have recorded it."""
    copies = [event["copy"] for event in events if event["copy"]]
    times = [event["modified"] for event in events if event["modified"]]
    copy = Path(copies[0]) if copies else None
    existed = any(event["existed"] for event in events)
    return ChangedFile(path, existed, copy, min(times, default=None))


def _restore_file(file: ChangedFile, target: Path) -> bool:
    """Move a file aside and restore its earlier content; return False if there is no copy of that."""
    if file.existed and file.copy is None:
        return False
    if os.path.lexists(file.path):
        target.parent.mkdir(parents=True, exist_ok=True)
    if file.copy is not None and not file.copy.is_symlink() and file.can_be_rewritten():
        # In place, because another job may have it open.
        shutil.copy2(file.path, target)
        shutil.copyfile(file.copy, file.path)
        with contextlib.suppress(PermissionError):  # the file of another user, who shares it
            shutil.copystat(file.copy, file.path)
        return True
    if os.path.lexists(file.path):
        shutil.move(file.path, target)
    if file.copy is not None:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file.copy, file.path, follow_symlinks=False)
    return True


def _describe_moved_files(moved: Sequence[str], remaining: Sequence[str], folder: Path) -> str:
    sentences = []
    if moved:
        sentences.append(
            f"the script wrote files outside of {{out}}: {join_first_words(moved, MAX_FILES_NAMED)}; tula moved these files to {folder}, so that no training starts from them"
        )
    if remaining:
        sentences.append(
            f"the script changed {join_first_words(remaining, MAX_FILES_NAMED)}, and tula could not restore the earlier content: check these files before a training starts from them"
        )
    return "; ".join(sentences)


# --- The log

TAIL_BYTES = 16_384
"""Bytes at the end of a log in which its last line is searched."""
MAX_QUOTED = 300
"""Maximum characters of the line that are quoted."""


def find_last_script_line(log: Path) -> str:
    """Return the last non-empty line of a log that is not tula's, at most MAX_QUOTED characters; else empty."""
    try:
        lines = read_last_bytes(log, TAIL_BYTES).splitlines()
    except (OSError, BadMeasurements):
        return ""
    script_lines = (line.strip() for line in reversed(lines) if not line.startswith("tula: "))
    return next((line for line in script_lines if line), "")[:MAX_QUOTED]


def describe_missing_step(log: Path) -> str:
    """Return a message that no step was seen, with the last line of the script, or else with possible causes."""
    line = find_last_script_line(log)
    return f"no step of a torch optimizer was observed; last line of the script: {line}" if line else NO_STEP_SEEN


# --- The reports of the ranks

MIN_HANG_STEPS = 20
"""Minimum silence in median step times, in addition to `ScriptProgram.silence`."""


@dataclass
class ScriptMonitor(AttemptContext, RankMonitor):
    """Monitor of one attempt of a script, in one supervisor.

    Args:
        command: command of the leader that started the attempt.
        ranks: ranks that this supervisor, or the command that it runs, has started.
    """

    program: ScriptProgram
    command: LeaderCommand
    ranks: range

    @property
    def log(self) -> Path:
        return self.run.get_log_path(self.task.id, self.command.attempt)

    def get_poll_interval(self, allocation: Allocation) -> float:
        return allocation.poll_interval

    def record_final_reports(self) -> None:
        """Record the last reports of the ranks after their exit."""
        self.record_progress()

    def undo_file_changes(self) -> str:
        """Undo changes outside the script's folder on this node; return a description of them."""
        return move_probe_files(self.attempt)

    tolerates_shim_failures: ClassVar[bool] = False
    """Whether the script continues without being watched if the shim fails."""

    def record_progress(self) -> None:
        """Write failure records, like those of a worker, for the failures that the shims of these ranks reported."""
        shim_failures = self.attempt.read_failures()
        if not shim_failures:
            return
        recorded_ranks = {failure.rank for failure in self.run.read_failures(self.task.id, self.command.attempt)}
        for shim_failure in shim_failures:
            if shim_failure.where == "shim" and self.tolerates_shim_failures:
                continue
            rank = self.ranks.start if shim_failure.rank is None else shim_failure.rank
            if rank in self.ranks and rank not in recorded_ranks:
                recorded_ranks.add(rank)
                self.run.write_failure(self._make_failure(shim_failure, rank))

    def _make_failure(self, shim_failure: ScriptFailure, rank: int) -> Failure:
        is_of_shim = shim_failure.where != "script"
        shims_fault = "measuring the script failed (a bug in tula): " if shim_failure.where == "shim" else ""
        device = find_device_type(self.run, self.task)
        outcome = "user" if is_of_shim else classify_failure(shim_failure.text, exit_code=1, device=device)
        line = "" if is_of_shim else find_line_of_failure(shim_failure.text)
        message = shims_fault + (line or shim_failure.description)
        return Failure(
            task=self.task.id,
            attempt=self.command.attempt,
            rank=rank,
            host=get_node_name(),
            pid=shim_failure.pid,
            outcome=outcome,
            message=message,
            detail=shim_failure.text,
            signal=find_signal(message) if outcome == "signal" else "",
            fault=find_device_fault(message) if outcome == "device_fault" else None,
            local_batch=self.command.batch // self.command.ranks,
            failed_at=shim_failure.failed_at,
        )

    # --- Failures

    @property
    def has_stepped(self) -> bool:
        """Whether any of these ranks has taken a step."""
        return any(self.attempt.read_heartbeat(rank) is not None for rank in self.ranks)

    def find_reason_to_kill(self) -> Failure | None:
        """Return why the ranks must be killed, or None.

        A rank is stuck if it has stepped and no rank on any node has a recent heartbeat.
        """
        if (reason := self.program.find_reason_to_stop(self.command)) is not None:
            return reason
        for rank in self.ranks:
            heartbeat = self.attempt.read_heartbeat(rank)
            if heartbeat is None or not self._is_heartbeat_stale(heartbeat):
                continue
            has_result = (self.attempt.path / f"result-{rank}.json").exists()
            if has_result or self._is_any_rank_alive():
                continue
            message = (
                f"stopped, because no step finished for {time.time() - heartbeat.alive_at:.0f} s"
                f" (after {heartbeat.step} steps of {heartbeat.seconds:.3g} s)"
            )
            return Failure(outcome="unknown", message=message, rank=rank, host=get_node_name())
        return None

    def describe_missing_step(self) -> str:
        return "" if self.has_stepped else describe_missing_step(self.log)

    def _is_any_rank_alive(self) -> bool:
        """Return whether any rank on any node is alive; ranks that wait while it evaluates or saves are not stuck."""
        beats = [self.attempt.read_heartbeat(rank) for rank in range(self.command.ranks)]
        return any(
            heartbeat is not None and (heartbeat.lost is not None or not self._is_heartbeat_stale(heartbeat))
            for heartbeat in beats
        )

    def _is_heartbeat_stale(self, heartbeat: Heartbeat) -> bool:
        return time.time() - heartbeat.alive_at > max(self.program.silence, MIN_HANG_STEPS * heartbeat.seconds)
