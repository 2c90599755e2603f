"""Orphans of an earlier attempt on this node: its processes, and the GPU memory that they hold.

A process that lost its rank (a data loader in the middle of a batch, a child of the user's code in a separate session)
may hold GPU memory as long as it lives, so that the next attempt would be out of memory without cause.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tula_cli.host import devices

MARK_VARIABLE = "TULA_STARTED_BY"
"""Environment variable that marks all processes started by a supervisor."""
REAP_TIMEOUT_SECONDS = 10.0
"""Seconds to wait until killed processes have exited: the driver first frees the memory of each."""
MEMORY_TIMEOUT = 30.0
"""Seconds to wait until the memory of GPUs is free again."""
MAX_EXTRA_BYTES = 64 * 2**20
"""Bytes by which the used memory of a GPU may exceed that before the first attempt."""
POLL_SECONDS = 0.2


def make_process_mark(run: Path, task: str, allocation: str, index: int) -> str:
    """Return the value of `MARK_VARIABLE`.

    Args:
        task: the task that the supervisor was started with; the same in all jobs of a chain.
        allocation: id of the allocation.
        index: index of the supervisor in the allocation.
    """
    return "|".join((str(run.resolve()), task, allocation, str(index)))


def kill_leftovers(mark: str, *, spare: Collection[int]) -> list[int]:
    """Kill processes left behind by earlier attempts on this node; return their ids.

    Only processes of this user with the mark of the same run and task are killed: those of this supervisor, and those
    of earlier allocations. Other supervisors of this allocation kill theirs.

    Args:
        mark: the mark of this supervisor.
        spare: ids of processes that are not killed.
    """
    spared = {os.getpid(), *spare, *(process.pid for process in psutil.Process().parents())}
    *_, allocation, index = mark.rsplit("|", 3)
    killed: set[int] = set()
    deadline = time.monotonic() + REAP_TIMEOUT_SECONDS
    while alive := [
        pid
        for pid, (their_allocation, their_index) in _find_marked_processes(mark).items()
        if pid not in spared and (their_allocation != allocation or their_index == index)
    ]:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(alive)
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS / 10)
    return sorted(killed)


def _find_marked_processes(mark: str) -> dict[int, tuple[str, str]]:
    """Return allocation and supervisor index of living processes with the mark of the same run and task, by pid."""
    places_by_pid: dict[int, tuple[str, str]] = {}
    for pid, value in find_processes_with_variable(MARK_VARIABLE).items():
        if value.count("|") < 3:
            continue
        *run_and_task, allocation, index = value.rsplit("|", 3)
        if run_and_task == mark.rsplit("|", 3)[:2]:
            places_by_pid[pid] = (allocation, index)
    return places_by_pid


def find_processes_with_variable(variable: str) -> dict[int, str]:
    """Return the value of an environment variable in this user's living processes that have it, by process id."""
    values = {}
    for process in psutil.process_iter(["uids", "status", "environ"]):  # environ is None if it may not be read
        info = process.info
        is_alive = info["status"] not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        if is_alive and info["uids"] and info["uids"].real == os.getuid() and variable in (info["environ"] or {}):
            values[process.pid] = info["environ"][variable]
    return values


@dataclass
class GpuMemory:
    """GPU memory of one supervisor: bytes used before its first attempt, and the processes that used it."""

    _used: dict[str, int] | None = None
    _holders: Collection[int] = ()

    def wait_until_memory_is_free(self, gpus: Sequence[str], mark: str, *, give_up: Callable[[], bool]) -> str:
        """Wait until the GPU memory of earlier attempts is free again; the first call only records the current use.

        Args:
            gpus: GPUs of this supervisor, named as in CUDA_VISIBLE_DEVICES; empty: all.
            mark: the mark of this supervisor.
            give_up: called while waiting; stops the wait if it returns True.

        Returns:
            Description of the memory that is not free in time and its holders; else empty.
        """
        if self._used is None:
            self._used, self._holders = devices.read_used_gpu_memory(gpus), frozenset(devices.find_device_holders())
            return ""
        deadline = time.monotonic() + MEMORY_TIMEOUT
        while missing := self._describe_memory_in_use(gpus, mark):
            if give_up():
                return ""
            if time.monotonic() > deadline:
                return f"{missing}; held by {', '.join(devices.describe_gpu_holders()) or 'no visible process'}"
            time.sleep(POLL_SECONDS)
        return ""

    def _describe_memory_in_use(self, gpus: Sequence[str], mark: str) -> str:
        """Return a description of GPU memory or holders beyond those before the first attempt; empty without any."""
        used_before = self._used or {}
        if used_now := devices.read_used_gpu_memory(gpus):
            extra_bytes = {
                gpu: used - used_before.get(gpu, 0)
                for gpu, used in used_now.items()
                if used > used_before.get(gpu, 0) + MAX_EXTRA_BYTES
            }
            return ", ".join(f"{extra >> 20} MiB of {gpu}" for gpu, extra in extra_bytes.items())
        # If used memory is unknown, compare holders; processes of this run belong to other supervisors' next attempt.
        later = sorted(set(devices.find_device_holders()) - set(self._holders) - set(_find_marked_processes(mark)))
        return f"processes {', '.join(map(str, later))} use GPUs" if later else ""
