"""Whether a batch trains and how much memory it needs: a few steps of tula's trainer at each requested batch.

On a GPU, one process tries all batches, because a caught out-of-memory error leaves nothing allocated there. On the CPU, each batch
has a separate process, because freed memory remains in the heap, which the next batch would count.
"""

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from tula_cli.host.failure_texts import classify_failure
from tula_cli.run.records.probes import Components, Environment, Measured
from tula_cli.spec.job import JobSpec

RESOLUTION = 0.02
"""Relative precision of the largest batch at which bisection stops."""
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""On the CPU, freed memory returns to the system immediately; otherwise the heap would count as the model's."""


class TrialFailed(Exception):
    """A trial failed for a reason other than memory; the message is that of the trial."""


@dataclass(frozen=True)
class Trial:
    """The outcome of a batch. Bytes."""

    batch: int
    fits: bool
    memory: dict[str, Any] | None  # of `Components`; None if the batch does not fit
    text: str = ""  # message if the batch does not fit
    seconds: float = 0.0  # of the last step
    device: str = "cpu"
    capacity: int | None = None  # memory limit of the trial

    @property
    def peak(self) -> int:
        assert self.memory is not None
        return int(self.memory["peak"])

    def measured(self) -> Measured:
        """Return a probe result with only the fields that the memory model reads."""
        memory = Components.model_validate(self.memory)
        times: dict[str, Any] = {"step_times": (self.seconds,), "compute_time": self.seconds}
        return Measured.model_construct(
            local_batch=self.batch, accumulate=1, nodes=1, gpus_per_node=1, memory=memory, capacity=self.capacity,
            environment=Environment.model_construct(device=self.device), **times,
        )  # fmt: skip


class Trials:
    """Tries batches of one job after the other, on one rank.

    Args:
        spec: the job; its dataset has random images, as many as each batch.
        capacity: bytes that may be used, including libraries; None for all memory.
    """

    def __init__(self, spec: JobSpec, *, capacity: int | None = None) -> None:
        self.spec, self.capacity = spec, capacity
        self.fresh = spec.cluster.device == "cpu"
        self.process: subprocess.Popen[str] | None = None
        self.known = False  # whether the process has received the job
        self.errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `__exit__`

    def __enter__(self) -> "Trials":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self.errors.close()

    def of(self, spec: JobSpec, *, capacity: int | None = None) -> "Trials":
        """Switch to another job in the same process."""
        self.spec, self.capacity, self.known = spec, capacity, False
        return self

    def __call__(self, batch: int) -> Trial:
        """Try a batch.

        Raises:
            TrialFailed: it failed for a reason other than memory.
        """
        process = self.process = self.process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            if not self.known:
                job = {"spec": self.spec.model_dump(mode="json"), "capacity": self.capacity}
                process.stdin.write(json.dumps(job) + "\n")
            process.stdin.write(f"{batch}\n")
            process.stdin.flush()
        self.known = True
        line = process.stdout.readline()
        if not line or self.fresh:
            self._end()
        if line:
            return Trial(**json.loads(line))
        self.errors.seek(0)
        text = self.errors.read()
        if not is_out_of_memory(text, self.spec.cluster.device, process.returncode):
            raise TrialFailed(text.strip()[-2000:] or f"exit code {process.returncode}")
        return Trial(batch, False, None, text.strip()[-2000:])

    def _start(self) -> "subprocess.Popen[str]":
        self.errors.seek(0)
        self.errors.truncate()
        environment = {**os.environ, **(RETURN_FREED_MEMORY if self.fresh else {})}
        return subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def _end(self) -> None:
        if self.process is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.communicate()
            self.process, self.known = None, False


def is_out_of_memory(text: str, device: str, code: int | None = 1) -> bool:
    """Return whether a process with this output ran out of memory; under a limit, native code may crash without a message."""
    crashed = device == "cpu" and code is not None and code < 0
    return crashed or classify_failure(text, exit_code=code, device=device) in ("device_oom", "host_oom")


def find_largest_batch(fits: Callable[[int], bool], start: int, *, resolution: float = RESOLUTION) -> int:
    """Return the largest batch that fits: double or halve from `start`, then bisect; 0 if not even one sample fits.

    Args:
        fits: tries a batch.
        start: the first batch to try, ideally close to the result.
        resolution: relative precision of the result.
    """
    low, high, step, batch = 0, 0, max(0.05, resolution), max(1, start)
    while not (low and high):
        if fits(batch):
            low, batch = batch, max(batch + 1, round(batch * (1 + step)))
        elif batch == 1:
            return 0
        else:
            high, batch = batch, max(1, round(batch * (1 - step)))
        step *= 1.6
    while high - low > max(1, resolution * low):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


# --- the process that tries batches


def serve_trials() -> None:
    """Read jobs and batches from stdin, one per line; answer each batch with a line."""
    from gpu.rig import join_alone
    from tula_cli.worker import device as worker_device

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not mix with the answers
    line = sys.stdin.readline()
    with join_alone(json.loads(line)["spec"]["cluster"]["device"]) as me:
        while line:
            given = json.loads(line)
            if isinstance(given, dict):
                spec, capacity = JobSpec.model_validate(given["spec"]), given["capacity"]
                limit_memory(spec, me, capacity)
            else:
                answers.write(json.dumps(asdict(run_trial(spec, me, given, capacity))) + "\n")
                answers.flush()
            line = sys.stdin.readline()
        worker_device.lift_memory_limit()


def limit_memory(spec: JobSpec, me: Any, capacity: int | None) -> None:
    """Limit the memory of the following steps to `capacity` bytes, including libraries."""
    import torch

    from tula_cli.worker import device as worker_device

    if me.device.type != "cuda":
        if capacity is not None:
            worker_device.limit_memory(capacity)
        return
    torch.cuda.set_per_process_memory_fraction(1.0, me.device)
    run_steps(spec, me, 2, None)  # allocates the memory of the libraries
    if capacity is not None:
        meter = worker_device.MemoryMeter(me.device)
        meter.reset()
        total = torch.cuda.get_device_properties(me.device).total_memory
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, (capacity - meter.count_library_bytes(capacity)) / total), me.device
        )


def run_trial(spec: JobSpec, me: Any, batch: int, capacity: int | None) -> Trial:
    """Return the outcome of a batch; raise errors other than out-of-memory errors."""
    import torch

    from tula_cli.worker import device as worker_device

    try:
        return run_steps(spec, me, batch, capacity)
    except Exception as error:  # the process boundary of a trial
        text = "".join(traceback.format_exception(error))
        if not is_out_of_memory(text, me.device.type):
            worker_device.lift_memory_limit()
            raise
    gc.collect()
    if me.device.type == "cuda":
        torch.cuda.empty_cache()
    return Trial(batch, False, None, text[-2000:])


def run_steps(spec: JobSpec, me: Any, batch: int, capacity: int | None) -> Trial:
    """Run four steps, one of them with a refresh, and an evaluation; return their memory."""
    from gpu.rig import ConstantBatchTrainer
    from tula_cli.worker import device as worker_device
    from tula_cli.worker.measure.meter import split_memory

    arguments = {**spec.dataset.args, "size": max(64, batch)}
    spec = spec.model_copy(update={"dataset": spec.dataset.model_copy(update={"args": arguments})})
    meter = worker_device.MemoryMeter(me.device)
    meter.reset()
    fixed = ConstantBatchTrainer.of(spec, me, batch=batch)
    fixed.warm_up()
    step = fixed.step()
    seconds = fixed.trainer.clock.measure_seconds(step.start, step.end)
    fixed.evaluate()
    fixed.trainer.clock.wait_for_device()
    peak, reserved = meter.read_peak()
    ags = fixed.trainer.ags
    memory = split_memory(
        fixed.trainer.parallel.module,
        fixed.trainer.base,
        batch=worker_device.count_tensor_bytes(fixed.pair),
        factors=ags.compute_memory() if ags else 0,
        peak=peak,
        reserved=reserved,
        libraries=meter.count_library_bytes(capacity),
    )
    parts = memory.model_dump(mode="json")
    return Trial(batch, True, parts, seconds=seconds, device=me.device.type, capacity=capacity)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    serve_trials()
