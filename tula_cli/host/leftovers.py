"""Orphans of an earlier attempt on this node: its processes, and the GPU memory that they hold.

A process that lost its rank (a data loader amid a batch, a child of the user's code in a session of its own) may hold the
GPU's memory for as long as it lives, and the next attempt would be out of memory for no reason of its own.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tula_cli.host import devices

MARK_VARIABLE = "TULA_STARTED_BY"
"""The variable by which everything that a supervisor starts is known again."""
REAP_PATIENCE = 10.0
"""Seconds that killed processes may take to be gone: the driver frees the memory of each first."""
MEMORY_PATIENCE = 30.0
"""Seconds to wait for the memory of GPUs to be back."""
MAX_EXTRA_BYTES = 64 * 2**20
"""Bytes that a GPU may have in use more than before the first attempt."""
POLL = 0.2


def make_mark(run: Path, task: str, allocation: str, index: int) -> str:
    """Return the value of `MARK_VARIABLE`.

    Args:
        run: the run's directory.
        task: what the supervisor was started with; the same in all jobs of a chain.
        allocation: the scheduler's name of the allocation.
        index: of the supervisor among those of the allocation.
    """
    return "|".join((str(run.resolve()), task, allocation, str(index)))


def kill_leftovers(own_mark: str, *, spare: Collection[int] = ()) -> list[int]:
    """Kill what attempts before this one have left on this node; return the process ids.

    Only this user's processes that carry the mark of the same run and task: this supervisor's own, and those of earlier
    allocations. Other supervisors of this allocation look after theirs.

    Args:
        own: the mark of this supervisor.
        spare: processes that are to live.
    """
    spared = {os.getpid(), *spare, *(process.pid for process in psutil.Process().parents())}
    killed: set[int] = set()
    deadline = time.monotonic() + REAP_PATIENCE
    while alive := [pid for pid in _find_leftover_pids(own_mark) if pid not in spared]:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(alive)
        if time.monotonic() > deadline:
            break
        time.sleep(POLL / 10)
    return sorted(killed)


def _find_leftover_pids(own_mark: str) -> Iterator[int]:
    """Yield the processes of this run and task that this supervisor or those of earlier allocations have started."""
    _, _, allocation, index = own_mark.rsplit("|", 3)
    for pid, (their_allocation, their_index) in _find_marked_processes(own_mark).items():
        if their_allocation != allocation or their_index == index:
            yield pid


def _find_marked_processes(own_mark: str) -> dict[int, tuple[str, str]]:
    """Return this user's living processes that carry the mark of a run and a task: allocation and index of each."""
    places_by_pid: dict[int, tuple[str, str]] = {}
    for pid, value in find_processes_with_variable(MARK_VARIABLE).items():
        if value.count("|") < 3:
            continue
        *run_and_task, allocation, index = value.rsplit("|", 3)
        if run_and_task == own_mark.rsplit("|", 3)[:2]:
            places_by_pid[pid] = (allocation, index)
    return places_by_pid


def find_processes_with_variable(variable: str) -> dict[int, str]:
    """Return this user's living processes that were started with an environment variable, and its value in each."""
    values = {}
    for process in psutil.process_iter(["uids", "status", "environ"]):  # None: it may not be read
        info = process.info
        is_alive = info["status"] not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        if is_alive and info["uids"] and info["uids"].real == os.getuid() and variable in (info["environ"] or {}):
            values[process.pid] = info["environ"][variable]
    return values


@dataclass
class GpuMemory:
    """The GPUs of one supervisor: how much of them was in use before its first attempt, and by whom."""

    _used: dict[str, int] | None = None
    _holders: Collection[int] = ()

    def wait_until_back(self, gpus: Sequence[str], own_mark: str, *, give_up: Callable[[], bool]) -> str:
        """Wait until the memory that attempts took is free again; the first call remembers what is in use now.

        Args:
            gpus: this supervisor's, as CUDA_VISIBLE_DEVICES names them; none for all that are to be seen.
            own: the mark of this supervisor.
            give_up: asked while waiting.

        Returns:
            Who holds it where it is not back in time; empty where it is.
        """
        if self._used is None:
            self._used, self._holders = devices.read_used_gpu_memory(gpus), frozenset(devices.find_device_holders())
            return ""
        deadline = time.monotonic() + MEMORY_PATIENCE
        while missing := self._describe_missing(gpus, own_mark):
            if give_up():
                return ""
            if time.monotonic() > deadline:
                return f"{missing}; held by {', '.join(devices.describe_holders()) or 'nobody who is to be seen from here'}"
            time.sleep(POLL)
        return ""

    def _describe_missing(self, gpus: Sequence[str], own_mark: str) -> str:
        """Say what is not as it was before the first attempt; empty where everything is."""
        used_before = self._used or {}
        if used_now := devices.read_used_gpu_memory(gpus):
            extra_bytes = {
                gpu: used - used_before.get(gpu, 0)
                for gpu, used in used_now.items()
                if used > used_before.get(gpu, 0) + MAX_EXTRA_BYTES
            }
            return ", ".join(f"{extra >> 20} MiB of {gpu} are in use still" for gpu, extra in extra_bytes.items())
        # Where nothing tells of memory, its holders do; those of this run are by now other supervisors' next ranks.
        later = sorted(set(devices.find_device_holders()) - set(self._holders) - set(_find_marked_processes(own_mark)))
        return f"processes {later} hold GPUs still" if later else ""
