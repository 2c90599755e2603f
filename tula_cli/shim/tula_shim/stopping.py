"""The end of a probe: every rank writes its result, waits for the others, and exits without leaving processes
behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from .clocks import read_peak_memory
from .plan import write_json
from .recorder import TIMED, Recorder, make_report

PEER_RESULT_TIMEOUT_SECONDS = 20.0
"""Seconds to wait for the other ranks to write: a rank still in a collective would fail if this one exited."""
MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.02, 2.0
"""First and longest interval in seconds between two polls of the shared folder: a few dozen polls per second over all
ranks, which therefore wait longer the more ranks there are."""
SIGKILL_DELAY_SECONDS = 2.0
"""Seconds between SIGTERM to a child and SIGKILL."""
SELF_EXITING_CHILDREN = (b"resource_tracker", b"torch_shm_manager")
"""Children that exit by themselves, and remove shared memory that others have left: not to be killed."""


def write_first_steps(recorder: Recorder) -> None:
    write_json(recorder.plan.folder / f"begun-{recorder.rank}.json", make_report(recorder, "begun"))


def write_result(recorder: Recorder, why: str) -> None:
    """Write this rank's result and its last heartbeat and row."""
    recorder.over = True
    if recorder.plan.is_observing:
        recorder.peaks[TIMED] = read_peak_memory()
    recorder.pulse.write()
    if recorder.plan.is_training:
        recorder.pulse.close()
    write_json(recorder.plan.folder / f"result-{recorder.rank}.json", make_report(recorder, why))


def stop_process(recorder: Recorder, why: str) -> None:
    """Exit this process once all ranks have written, with exit code 0; never returns."""
    write_result(recorder, why)
    wait_for_ranks(recorder.plan.folder, recorder.world)
    terminate_children()
    with contextlib.suppress(OSError, ValueError):  # the reader has closed the pipe
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def wait_for_ranks(folder: Path, world: int, timeout: float = PEER_RESULT_TIMEOUT_SECONDS) -> bool:
    """Wait until all ranks have written; return whether they have. Lists the folder, because NFS caches missing
    files."""
    expected_files = {f"result-{rank}.json" for rank in range(world)}
    deadline, pause = time.monotonic() + timeout, MIN_POLL_SECONDS
    while not expected_files <= {path.name for path in folder.iterdir()}:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return False
        time.sleep(min(pause, remaining))
        pause = min(1.5 * pause, MAX_POLL_SECONDS, max(10 * MIN_POLL_SECONDS, world / 50))
    return True


def terminate_children() -> None:
    """Terminate this process' descendants: first data loader workers, which torch would wait for, then all others."""
    for child in multiprocessing.active_children():
        child.terminate()
    for signal_sent in (signal.SIGTERM, signal.SIGKILL):
        for pid in _list_remaining_descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_sent)
        deadline = time.monotonic() + SIGKILL_DELAY_SECONDS
        while time.monotonic() < deadline:
            _reap_children()
            if not _list_remaining_descendants():
                return
            time.sleep(0.01)


def _list_remaining_descendants() -> list[int]:
    return [pid for pid in list_descendants(os.getpid()) if not _is_cleanup_process(pid)]


def _reap_children() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def list_descendants(pid: int) -> list[int]:
    """Return the descendants of `pid`, from /proc; zombies do not count."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, parent = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(entry.name))
    pids, pending = [], [pid]
    while pending:
        below = children.get(pending.pop(), [])
        pids += below
        pending += below
    return pids


def _is_cleanup_process(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(name in command for name in SELF_EXITING_CHILDREN)
