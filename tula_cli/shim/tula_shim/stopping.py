"""The end of a probe: every rank writes, waits for the others, and leaves no process behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Callable

from .plan import write_json
from .recorder import Recorder, make_report

PATIENCE = 20.0
"""Seconds for the other ranks to write: one that is still in a collective would die with an error of its own."""
LOOK, LOOK_MOST = 0.02, 2.0
"""Seconds between two looks at a folder that all ranks share: a few dozen looks a second in all, as ranks wait longer."""
GRACE = 2.0
"""Seconds between asking a child to end and killing it."""
CLEANERS = (b"resource_tracker", b"torch_shm_manager")
"""Children that end by themselves, and remove what others have left in shared memory: not to be killed."""


def write_begun(recorder: Recorder) -> None:
    """Write what the first steps of a training have shown."""
    write_json(recorder.plan.folder / f"begun-{recorder.rank}.json", make_report(recorder, "begun"))


def write_result(recorder: Recorder, why: str) -> None:
    """Write this rank's result and its last heartbeat and row."""
    recorder.over = True
    recorder.pulse.write()
    if recorder.plan.training:
        recorder.pulse.close()
    write_json(recorder.plan.folder / f"result-{recorder.rank}.json", make_report(recorder, why))


def stop(recorder: Recorder, why: str) -> None:
    """End this process as the plan says, with exit code 0; returns in no case.

    Raises:
        SystemExit: where the plan says "raise".
    """
    recorder.stopping = True
    write_result(recorder, why)
    wait_for_ranks(recorder.plan.folder, recorder.world)
    if recorder.plan.stop == "raise":
        raise SystemExit(0)
    _exit_process()


def enforce_stop(recorder: Recorder) -> None:
    """End a process that steps on although it was asked to end: its script caught SystemExit."""
    if recorder.stopping:
        _exit_process()


def _exit_process() -> None:
    end_children()
    with contextlib.suppress(OSError, ValueError):  # a pipe that nobody reads any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def wait_for_ranks(folder: Path, world: int, patience: float = PATIENCE) -> bool:
    """Wait until all ranks have written; return whether they have. The folder is listed, for NFS keeps what it knew."""
    wanted = {f"result-{rank}.json" for rank in range(world)}
    deadline, pause = time.monotonic() + patience, LOOK
    while not wanted <= {path.name for path in folder.iterdir()}:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return False
        time.sleep(min(pause, remaining))
        pause = min(1.5 * pause, LOOK_MOST, max(10 * LOOK, world / 50))
    return True


def end_children() -> None:
    """End this process' descendants: data loader workers first, which torch would wait for, then whatever is left."""
    for child in multiprocessing.active_children():
        child.terminate()
    _end_process(lambda: [pid for pid in list_descendants(os.getpid()) if not _is_cleaner(pid)])


def _end_process(remaining: Callable[[], list[int]]) -> None:
    for signal_sent in (signal.SIGTERM, signal.SIGKILL):
        for pid in remaining():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_sent)
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline:
            _reap_children()
            if not remaining():
                return
            time.sleep(0.01)


def _reap_children() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def list_descendants(pid: int) -> list[int]:
    """Return the processes below `pid`, from /proc; those that have ended and were not waited for do not count."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, parent = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(entry.name))
    pids, ahead = [], [pid]
    while ahead:
        below = children.get(ahead.pop(), [])
        pids += below
        ahead += below
    return pids


def _is_cleaner(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(name in command for name in CLEANERS)
