"""Ends a rank whose step hangs, and reports the stack; without it the job would wait for half an hour.

The peers of such a rank wait in a reduction until torch's timeout. A thread counts the seconds of a step; the step
itself accesses no file and does not communicate for this.
"""

import faulthandler
import os
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

from tula_cli import words
from tula_cli.host.network import get_node_name
from tula_cli.run.directory import RunDir
from tula_cli.run.records.failures import Failure

if TYPE_CHECKING:
    from tula_cli.run.records.tasks import TrainTask
    from tula_cli.worker.train.loop import Step

MIN_HANG_SECONDS = 600.0
"""Minimum seconds after which a step counts as hung; scripts have the same limit."""
LIMIT_IN_STEPS = 20
"""The limit as a multiple of the median step time."""
POLL_SECONDS = 1.0  # interval of the checks
MEDIAN_STEPS = 101  # number of newest steps in the median step time
_STACK = 512 * 2**10  # stack bytes of the thread; the default of 8 MiB would count against a memory limit
_WAITING_FUNCTIONS = ("_engine_run_backward", "synchronize")  # functions that wait for DDP's reducer or a device


@dataclass
class HangWatch:
    """Watches the steps of one training on this rank, except the first one, which may compile.

    A rank that waits for others does not count as hung.
    """

    run: RunDir
    task: "TrainTask"
    attempt: int
    rank: int
    world: int
    end: Callable[[int], object] = os._exit
    _step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MEDIAN_STEPS))
    _step: int | None = None  # number of the current step; None between two steps
    _finished: threading.Event = field(default_factory=threading.Event)

    def watch_steps(self, steps: Iterator["Step"]) -> Iterator["Step"]:
        """Yield the steps; work of the caller between two steps (evaluating, saving) may take any time."""
        thread = threading.Thread(
            target=self._watch_main_thread, args=(threading.get_ident(),), name="hang-watch", daemon=True
        )
        default_stack_size = threading.stack_size(_STACK)
        thread.start()
        threading.stack_size(default_stack_size)
        try:
            for number in range(sys.maxsize):
                self._step, began = number, time.monotonic()
                step = next(steps, None)
                self._step = None
                if step is None:
                    return
                self._step_seconds.append(time.monotonic() - began)
                yield step
        finally:
            self._step = None
            self._finished.set()

    @property
    def max_step_seconds(self) -> float:
        """Seconds that a step may take; infinity for the first."""
        if not self._step_seconds:
            return float("inf")
        return max(MIN_HANG_SECONDS, LIMIT_IN_STEPS * statistics.median(self._step_seconds))

    def _watch_main_thread(self, main: int) -> None:
        last_step, silent = None, 0.0
        while not self._finished.wait(POLL_SECONDS):
            step = self._step
            # Count polls instead of clock time: the time in which a job is suspended counts as one poll.
            silent = silent + POLL_SECONDS if step is not None and step == last_step else 0.0
            last_step = step
            if step is None or silent < self.max_step_seconds:
                continue
            frame = sys._current_frames().get(main)
            if frame is not None and not (self.world > 1 and is_waiting_for_peers(frame)) and self._step == step:
                self._report_hang(frame, silent)
                self.end(1)

    def _report_hang(self, frame: FrameType, silent: float) -> None:
        """Write the stacks of all threads to the log, and the failure for the supervisor."""
        position = describe_position(frame)
        message = f"no step finished for {silent:.0f} s, although a step takes {statistics.median(self._step_seconds):.3g} s: {position}"
        detail = f"rank {self.rank} hangs: {message}\n{_list_thread_stacks()}"
        tag = words.make_rank_tag(self.rank)
        # Bypass sys.stderr, which the hanging thread may have locked.
        os.write(2, "".join(f"{tag}{line}\n" for line in detail.splitlines()).encode())
        self.run.write_failure(
            Failure(
                task=self.task.id,
                attempt=self.attempt,
                rank=self.rank,
                host=get_node_name(),
                pid=os.getpid(),
                outcome="hung",
                message=message,
                detail=detail,
                failed_at=time.time(),
            )
        )


def is_waiting_for_peers(frame: FrameType) -> bool:
    """Return whether the innermost frame of a thread waits for other ranks, or for a device that may wait for them."""
    code = frame.f_code
    module = str(frame.f_globals.get("__name__", ""))
    return (
        code.co_name in _WAITING_FUNCTIONS
        or module.startswith("torch.distributed")
        or module == "tula_cli.worker.ranks"
    )


def describe_position(frame: FrameType) -> str:
    """Describe where a thread is: the innermost line outside of Python's library and of installed packages."""
    frames = list(traceback.extract_stack(frame))
    user_frames = [
        summary
        for summary in frames
        if "site-packages" not in summary.filename and not summary.filename.startswith(_PYTHON_FOLDERS)
    ]
    innermost = (user_frames or frames)[-1]
    return f"in {innermost.name}, {innermost.filename} line {innermost.lineno}"


_PYTHON_FOLDERS = (os.path.dirname(os.__file__), "<")  # noqa: PTH120 - once, at the import of every rank


def _list_thread_stacks() -> str:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
