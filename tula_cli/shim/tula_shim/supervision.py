"""Messages between this process and its supervisor: heartbeats, requests to save, and in a resume test the kill."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import signal
import socket
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any, Callable, NamedTuple

from .plan import Plan, append_row, write_json
from .ranks import NoStoreError, broadcast_decision

RECENT_STEPS = 100  # steps for the median step time
RECENT_SAMPLES = 20  # steps for the median of samples per step; few, to notice a changed batch soon


class HeartbeatWriter:
    """Writes heartbeat-<rank>.json and steps-<rank>.jsonl at most as often as the plan allows. Durations are of the host."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rank = 0
        self.step = 0
        self.samples: float | None = None
        self.before: float | None = 0.0  # samples of this rank before the last step; None if unknown
        self.lost: str | None = None  # why recording stopped; None while it continues
        self._began: float | None = None  # perf_counter at the end of the last step; None before the first
        self._beaten = self._row_at = float("-inf")
        self._stepped_at = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._recent_samples: deque[float] = deque(maxlen=RECENT_SAMPLES)
        self._newest: dict[str, Any] = {}
        self.more: Callable[[], dict[str, Any]] = dict
        """Returns further fields of a row."""
        self.totals: dict[str, float] = {}  # seconds of an observed job by kind, since its first step

    @property
    def median_step_time(self) -> float:
        """Return the median time of the last steps in seconds; 0.0 before the second step."""
        return statistics.median(self._recent) if self._recent else 0.0

    def record_step(self, step: int, samples: float | None) -> None:
        """Record a step; `samples` is the total of all steps."""
        now = time.perf_counter()
        if self._began is not None:
            self._recent.append(now - self._began)
            self.before = self.samples
            if samples is not None and self.before is not None:
                self._recent_samples.append(samples - self.before)
        self._began, self.step, self.samples = now, step, samples
        self._stepped_at = time.time()
        self._write_if_due(now)

    def record_activity(self) -> None:
        """Record activity between two steps: a batch was delivered, or an evaluation started."""
        self._write_if_due(time.perf_counter())

    def _write_if_due(self, now: float) -> None:
        if now - self._beaten >= self.plan.heartbeat:
            self._beaten = now
            self.write()

    def write(self) -> None:
        """Write the heartbeat with its current values."""
        content = {
            "step": self.step,
            "samples": self.samples,
            "stepped_at": self._stepped_at,
            "seconds": self.median_step_time,
            "step_samples": statistics.median(self._recent_samples) if self._recent_samples else None,
            "alive_at": time.time(),
            "lost": self.lost,
            "totals": self.totals or None,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        write_json(self.plan.folder / f"heartbeat-{self.rank}.json", content, durable=False)

    def write_row_if_due(self, causes: list[str], *, lr: Any, loss: Any, saved: dict[str, float]) -> None:
        """Write a row if one is due, and a gap row for each step with further events. Called after `record_step`."""
        self._newest = {"lr": lr, "loss": loss}
        if causes and self._recent:
            where = {"step": self.step, "samples": self.samples, "time": time.time()}
            files = {"saved": saved} if saved else {}
            self._append_row(kind="gap", **where, before=self.before, seconds=self._recent[-1], causes=causes, **files)
        if self._began is not None and self._began - self._row_at >= self.plan.row:
            self._row_at = self._began
            self.close()

    def close(self) -> None:
        """Write a row with the current state of the training. Only this call waits for a tensor on a GPU."""
        newest = {name: None if value is None else float(value) for name, value in self._newest.items()}
        self._append_row(kind="row", step=self.step, samples=self.samples, time=time.time(), **newest, **self.more())

    def write_note(self, step: int, text: str) -> None:
        """Write a note about the training."""
        self._append_row(kind="note", step=step, samples=self.samples, time=time.time(), text=text)

    def write_loaded_file(self, path: str, written: float) -> None:
        """Write that a file was loaded before the first step."""
        self._append_row(kind="load", step=0, samples=0.0, time=time.time(), path=path, written=written)

    def _append_row(self, **row: Any) -> None:
        append_row(self.plan.folder / f"steps-{self.rank}.jsonl", row)


# --- Save requests

REQUEST_POLL_SECONDS = 2.0  # seconds between two polls
MAX_STEPS_BETWEEN_POLLS = 1000


class SaveRequestPoller:
    """Polls for save.json every few steps. Rank 0 decides the interval, because all ranks must poll at the same
    step."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.callback: Callable[[str], object] | None = None
        self.note = ""
        self._every = 0
        self._off = not plan.save

    def poll_request(self, step: int, pulse: HeartbeatWriter, world: int) -> str:
        """Return "save" or "stop" if requested after this step, else "". `pulse` provides the step time."""
        if self._off or step < self.plan.warmup or (self._every and step % self._every):
            return ""
        try:
            if not self._every:
                self._every = int(
                    broadcast_decision(
                        "every", lambda: str(_count_steps_between_polls(pulse.median_step_time)), world=world
                    )
                )
                return ""
            return broadcast_decision(f"asked/{step}", self._read_request, world=world)
        except NoStoreError as error:
            self._off = True
            self.note = f"checkpoints cannot be requested: {error}"
            return ""

    def _read_request(self) -> str:
        try:
            request = json.loads((self.plan.folder / "save.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return ""  # no file, or a partly written one, which the next poll reads completely
        return "stop" if request.get("then") == "stop" else "save"

    def save_training(self, step: int, samples: float | None, rank: int) -> bool:
        """Save through the loop's callback; return whether there is one."""
        if self.callback is None:
            return False
        self.callback(self.plan.checkpoint)
        self.report_saved(step, samples, rank, path=self.plan.checkpoint)
        return True

    def report_saved(self, step: int, samples: float | None, rank: int, *, path: str) -> None:
        """Report to the supervisor that a checkpoint has been written."""
        if rank == 0:
            record = {"step": step, "samples": samples, "path": path, "time": time.time()}
            write_json(self.plan.folder / "saved.json", record)
            with contextlib.suppress(FileNotFoundError):
                (self.plan.folder / "save.json").unlink()


def _count_steps_between_polls(median: float) -> int:
    return max(1, min(MAX_STEPS_BETWEEN_POLLS, round(REQUEST_POLL_SECONDS / max(median, 1e-6))))


# --- Kill after a checkpoint

CHECKPOINT_TIMEOUT_SECONDS = 120.0
"""Longest wait in seconds for a checkpoint to be written: some are written by a thread while training continues."""


class StepKiller:
    """Kills the process a number of steps after its first checkpoint. Done within the process, because a short script
    could finish before an outside observer sees the checkpoint."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.wanted: dict[str, Any] = plan.rehearsal or {}
        self._has_started = False  # the first step whose checkpoints count is over
        self._checkpoint: dict[str, Any] | None = None
        self._last = 0  # step after which the process is killed
        self._files = _CheckpointFiles()

    def after_step(self, step: int, before: float | None, rank: int, dataset: int | None) -> None:
        """Request the planned checkpoint, record a new one, and kill the process the planned number of steps after the first.

        Args:
            before: samples of this rank before the step; None if unknown.
            dataset: size of the dataset; None if unknown.

        Raises:
            OSError: the records cannot be written.
        """
        if not self.wanted or step < self.wanted.get("first", 1):
            return
        if step == self.wanted.get("ask_at"):
            self._request_save(str(self.wanted.get("ask", "")), rank)
        if rank == 0:
            self._find_checkpoint(step, before, dataset)
            if self._checkpoint is not None and step >= self._last:
                self._kill_process()

    def _request_save(self, request: str, rank: int) -> None:
        if request.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, request))
        elif rank == 0 and request.startswith("file:"):
            path = Path(request[len("file:") :])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        elif rank == 0 and request == "hooks":
            write_json(self.plan.folder / "save.json", {"then": "go on"})

    def _find_checkpoint(self, step: int, samples: float | None, dataset: int | None) -> None:
        """Record the newest checkpoint, taken to hold the previous step: a script may save at each step.

        It counts if it differs from that at the first call, whatever its time: file servers have other clocks.
        """
        newest = _find_newest_checkpoint(str(self.wanted["checkpoint"]))
        is_new = newest.path != "" and self._files.is_new_checkpoint(newest.path)
        has_started, self._has_started = self._has_started, True
        if not has_started or not is_new:
            return
        if self._checkpoint is None:
            self._last = step - 1 + int(self.wanted["after"])
        self._checkpoint = {"steps": step - 1, "samples": samples, "dataset": dataset, "killed": False}
        self._write_record()

    def _kill_process(self) -> None:
        stable_seconds, pattern = float(self.wanted.get("settled", 2.0)), str(self.wanted["checkpoint"])
        newest, unchanged_since = _find_newest_checkpoint(pattern), time.monotonic()
        deadline = unchanged_since + CHECKPOINT_TIMEOUT_SECONDS
        while unchanged_since + stable_seconds > time.monotonic() < deadline:
            time.sleep(stable_seconds / 20)
            before, newest = newest, _find_newest_checkpoint(pattern)
            unchanged_since = unchanged_since if newest == before else time.monotonic()
        assert self._checkpoint is not None
        self._checkpoint["killed"] = True
        self._write_record()
        os.kill(os.getpid(), signal.SIGKILL)

    def _write_record(self) -> None:
        assert self._checkpoint is not None
        write_json(self.plan.folder / "rehearsal.json", self._checkpoint)


SAMPLE_BYTES = 2**16
"""Bytes at the start and at the end of a file by which a rewritten file differs from one that grows."""


class _FileState(NamedTuple):
    inode: int
    changed: int  # modification time (ns)
    size: int  # bytes
    sample: bytes  # its first and last bytes


class _CheckpointFiles:
    """The files of the newest checkpoint: a new one begins when a file that this one has written is written again.

    A file may grow, and files may be added, while a thread still writes the same checkpoint.
    """

    def __init__(self) -> None:
        self._path, self._inode = "", 0
        self._files: dict[str, _FileState] = {}
        self._written: set[str] = set()  # files that this checkpoint has written

    def is_new_checkpoint(self, path: str) -> bool:
        """Return whether the file or folder at a path holds another checkpoint than at the last call."""
        before = self._files
        try:
            inode = os.stat(path).st_ino  # noqa: PTH116
            files = {file: _read_file_state(file, before.get(file)) for file in _list_files(path)}
            rewritten = {
                file for file in before.keys() & files.keys() if _is_rewritten(file, before[file], files[file])
            }
        except OSError:
            return False  # removed or replaced meanwhile: the next call sees the result
        is_new = (path, inode) != (self._path, self._inode) or bool(rewritten & self._written)
        self._path, self._inode, self._files = path, inode, files
        self._written = (set() if is_new else self._written) | rewritten | (files.keys() - before.keys())
        return is_new


def _read_file_state(path: str, before: _FileState | None) -> _FileState:
    """Return the state of a file; it is read only if it has changed."""
    status = os.stat(path)  # noqa: PTH116
    if before is not None and before[:3] == (status.st_ino, status.st_mtime_ns, status.st_size):
        return before
    return _FileState(status.st_ino, status.st_mtime_ns, status.st_size, _read_sample(path, status.st_size))


def _is_rewritten(path: str, before: _FileState, state: _FileState) -> bool:
    """Return whether a file has been written anew, and not only become longer."""
    if state.inode != before.inode:
        return True
    if state.changed <= before.changed:
        return False
    return state.size <= before.size or _read_sample(path, before.size) != before.sample


def _read_sample(path: str, size: int) -> bytes:
    """Return the first and the last SAMPLE_BYTES of the first `size` bytes of a file."""
    with open(path, "rb") as file:
        start = file.read(min(SAMPLE_BYTES, size))
        file.seek(max(0, size - SAMPLE_BYTES))
        return start + file.read(min(SAMPLE_BYTES, size))


class _NewestCheckpoint(NamedTuple):
    """The checkpoint that was written last."""

    changed: float = 0.0  # modification time (Unix time) of its newest file
    path: str = ""


def _find_newest_checkpoint(pattern: str) -> _NewestCheckpoint:
    paths = glob.iglob(pattern, recursive=True)  # noqa: PTH207 - an absolute pattern
    return max((_NewestCheckpoint(_read_change_time(path), path) for path in paths), default=_NewestCheckpoint())


def _list_files(path: str) -> list[str]:
    """Return the files of a folder, or the path itself if it is a file."""
    return [str(file) for file in Path(path).rglob("*") if file.is_file()] if os.path.isdir(path) else [path]  # noqa: PTH112


def _read_change_time(path: str) -> float:
    """Return the modification time (Unix time) of the newest file at a path; 0 if it is removed meanwhile."""
    try:
        return max((os.stat(file).st_mtime for file in _list_files(path)), default=0.0)  # noqa: PTH116
    except OSError:
        return 0.0
