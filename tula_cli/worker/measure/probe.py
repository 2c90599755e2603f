"""A probe: a shortened training loop, and all measurements made during it."""

import itertools
import json
import math
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from tula_cli.errors import Diverged
from tula_cli.host import failures
from tula_cli.models.efficiency import Pair, summarize_gradient_norms
from tula_cli.models.memory import PREFETCH_FACTOR
from tula_cli.models.self_tuning import find_most_expensive_job
from tula_cli.models.time.noise import compute_standard_error, compute_trimmed_mean
from tula_cli.optim.ddp_hook import add_listener
from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import (
    Components,
    GpuState,
    GradientStats,
    Measured,
    OutOfMemory,
    Overheads,
    RankStepTimes,
    Tokens,
)
from tula_cli.run.records.tasks import ProbeTask, make_probe_identity
from tula_cli.spec.sections import MIN_TIMED_STEPS, Search
from tula_cli.worker import device, environment
from tula_cli.worker.build.batches import TokenCounter, list_tensors, make_batch, slice_batch
from tula_cli.worker.build.loaders import TrainingPosition
from tula_cli.worker.build.samples import Datasets
from tula_cli.worker.build.weights import load_weights
from tula_cli.worker.device import get_gpu_uuid
from tula_cli.worker.energy import EnergyMeter, open_nvml_device
from tula_cli.worker.measure.first_samples import find_longest_sample
from tula_cli.worker.measure.meter import get_memory_capacity, split_memory
from tula_cli.worker.parallel.sharding import Replicated
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import checkpoint, evaluation, loop
from tula_cli.worker.train.divergence import DivergenceDetector
from tula_cli.worker.train.gradient_noise import compute_gradient, compute_squared_norm
from tula_cli.worker.train.loop import Step, Trainer
from tula_cli.worker.train.step_watch import SynchronisationTimer

# --- The timed window
#
# All ranks must stop at the same step, so rank 0 decides for all, between two blocks of steps: a step in which ranks
# communicate about this would not be representative. Each decision gives the number of steps of the next block.

MAX_RELATIVE_STANDARD_ERROR = 0.01
"""Standard error of the mean, relative to the mean, at which a window ends: jobs differ by more between restarts."""
UNTIMED_STEPS = 2
"""Steps at the start of a probe: the first, which compiles and chooses kernels, and one that refreshes factors."""
MAX_RELATIVE_DIFFERENCE = 0.1
"""Largest relative difference between the medians of successive groups of steps after warm-up."""


def count_warm_up_steps(times: Sequence[float], search: Search, *, prefetched: int = 0) -> int:
    """Return the number of steps until the next check; 0: the warm-up is over.

    The warm-up is over when the median of the newest steps is close to that of the steps before them. The first steps,
    however long, do not count towards the time limit: compiling is the purpose of a warm-up.

    Args:
        times: seconds of the steps after the first `UNTIMED_STEPS`.
        prefetched: steps whose data the loader may have made while the first steps compiled; only later ones wait for
            it.
    """
    missing = max(search.min_steps - UNTIMED_STEPS, prefetched and prefetched + MIN_TIMED_STEPS) - len(times)
    if sum(times) >= search.max_seconds:
        return 0
    if missing > 0:
        return min(MIN_TIMED_STEPS, missing)
    window_size = min(MIN_TIMED_STEPS, len(times) // 2)
    if window_size < 2:
        return MIN_TIMED_STEPS
    newest = statistics.median(times[-window_size:])
    previous = statistics.median(times[-2 * window_size : -window_size])
    return 0 if abs(newest - previous) <= MAX_RELATIVE_DIFFERENCE * previous else MIN_TIMED_STEPS


def count_steps_for_median(times: Sequence[float], search: Search) -> int:
    """Return the number of steps that determine a median to `MAX_RELATIVE_STANDARD_ERROR`, given the spread of the timed ones.

    At least MIN_TIMED_STEPS, which a spread needs, and at most search.max_extra_timing_steps. The variance of a median is
    pi/2 times that of a mean for normally distributed values.
    """
    error = compute_standard_error(times) / (MAX_RELATIVE_STANDARD_ERROR * compute_trimmed_mean(times))
    return min(
        search.max_extra_timing_steps, max(MIN_TIMED_STEPS, math.ceil(min(math.pi / 2 * len(times) * error**2, 1e9)))
    )


def count_steps_to_time(times: Sequence[float], search: Search) -> int:
    """Return the number of steps until the next check, from the seconds of the timed ones; 0: the window is over.

    Blocks grow with the number of timed steps, so that there are few checks.
    """
    timed, seconds = len(times), sum(times)
    if timed < MIN_TIMED_STEPS:
        return MIN_TIMED_STEPS - timed
    if seconds >= search.max_seconds:
        return 0
    mean = seconds / timed
    missing = max(search.min_steps - timed, math.ceil((search.min_seconds - seconds) / mean))
    if missing <= 0:
        if compute_standard_error(times) <= MAX_RELATIVE_STANDARD_ERROR * compute_trimmed_mean(times):
            return 0
        missing = max(MIN_TIMED_STEPS, timed // 2)
    return min(missing, math.ceil((search.max_seconds - seconds) / mean))


# --- States of the GPU

THROTTLE_REASONS = {0x04: "power cap", 0x08: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}
"""Reasons for a lowered clock, by NVML's bits; an idle GPU and a clock that was set lower do not count."""


class GpuStateRecorder:
    """The state of this rank's GPU at the first and the last sample; `get_first_and_last` combines those of all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._device = open_nvml_device(get_gpu_uuid()) if ranks.device.type == "cuda" else None
        self._samples: list[GpuState] = []

    def sample_state(self) -> None:
        """Read the state now, before waiting for the GPU: the clocks of an idle GPU differ from those under load."""
        if self._device is not None and (state := _read_gpu_state(*self._device)) is not None:
            self._samples = [*self._samples[:1], state]

    def get_first_and_last(self) -> tuple[GpuState, GpuState] | None:
        """Return the combined state of all GPUs at the first and the last sample, or None if no GPU reports it; every
        rank must call this."""
        texts = self._ranks.gather(json.dumps([state.model_dump() for state in self._samples]))
        ranks_samples = [samples for text in texts if (samples := json.loads(text))]
        if not ranks_samples:
            return None
        first = _combine_gpu_states(samples[0] for samples in ranks_samples)
        return first, _combine_gpu_states(samples[-1] for samples in ranks_samples)


def _combine_gpu_states(rank_states: Iterable[dict[str, Any]]) -> GpuState:
    states = [GpuState.model_validate(state) for state in rank_states]
    return GpuState(
        sm_mhz=min(state.sm_mhz for state in states),
        watts=max(state.watts for state in states),
        held_down=tuple(sorted({reason for state in states for reason in state.held_down})),
    )


def _read_gpu_state(nvml: Any, handle: Any) -> GpuState | None:
    """Return clock, power and throttle reasons of a GPU from NVML; None if the driver or the package does not report them."""
    try:
        bits = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return GpuState(
            sm_mhz=int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            watts=nvml.nvmlDeviceGetPowerUsage(handle) / 1000,  # mW
            held_down=tuple(sorted({reason for bit, reason in THROTTLE_REASONS.items() if bits & bit})),
        )
    except (nvml.NVMLError, AttributeError):  # AttributeError: the package is too old
        return None


# --- Statistics of gradients
#
# With several ranks both norms cost nothing: the gradient of a rank is that of the local batch, the reduced one that of
# the global batch (McCandlish et al. 2018, appendix A.1). A single rank uses two halves of its batch instead.


@dataclass
class GradientNormRecorder:
    """Listens to DDP's reductions and, while `watching`, sums the squares of each bucket before and after.

    The host reads no value before the window is over, so no step waits. The recorder has no reference to the trainer:
    DDP holds it from C++, and a cycle through DDP is never collected.
    """

    ranks: Ranks
    watching: bool = False
    local: list[torch.Tensor] = field(default_factory=list)  # norms of the current step's buckets
    reduced: list[torch.Tensor] = field(default_factory=list)
    steps: list[torch.Tensor] = field(default_factory=list)  # one tensor per step: its squared norms (local, reduced)

    @classmethod
    def attach(cls, trainer: Trainer) -> "GradientNormRecorder":
        """Attach a recorder to a trainer between two of its steps; DDP keeps a reference to it."""
        assert isinstance(trainer.parallel, Replicated), "sharded gradients are reduced in another way"
        recorder = cls(trainer.ranks)
        add_listener(trainer.parallel, recorder)
        return recorder

    def __call__(self, bucket: GradBucket) -> Callable[[], None] | None:
        """Record the norms of one bucket (`optim.ddp_hook.Listener`)."""
        if not self.watching:
            return None
        gradient = bucket.buffer()
        self.local.append(_compute_bucket_norm(gradient))
        return lambda: self.reduced.append(_compute_bucket_norm(gradient))

    def watch_steps(self, steps: Iterator[Step], scaler: torch.amp.GradScaler) -> Iterator[Step]:
        """Yield the steps unchanged, and record the gradient norms of each."""
        self.watching = True
        scale = float(scaler.get_scale())  # scale of the coming step; GradScaler may change it after each step
        for step in steps:
            self._record_step_norms(scale)
            scale = float(scaler.get_scale())
            yield step
        self.watching = False

    def _record_step_norms(self, scale: float) -> None:
        norms = [torch.stack(norms).square().sum() / scale**2 for norms in (self.local, self.reduced)]
        self.steps.append(torch.stack(norms))
        self.local, self.reduced = [], []

    def gather_pairs(self) -> list[Pair]:
        """Return the recorded pairs, with local norms averaged over all ranks; every rank must call this."""
        norms = torch.stack(self.steps).double().cpu()
        small = self.ranks.sum(norms[:, 0].tolist())
        return [(total / self.ranks.world, big) for total, big in zip(small, norms[:, 1].tolist(), strict=True)]


def _compute_bucket_norm(gradient: torch.Tensor) -> torch.Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=torch.float32)
    return norm


def measure_half_batch_norms(trainer: Trainer) -> Pair:
    """Return the mean squared gradient norm of the newest micro-batch's two halves, and the squared norm of their mean.

    For a sharded model the halves are those of all ranks' micro-batches together; every rank must call this.
    """
    assert trainer.last_batch is not None
    samples, half = trainer.micro_batch, trainer.micro_batch // 2
    slice_half = partial(
        slice_batch, trainer.last_batch, samples=samples, from_user=trainer.datasets.collate is not None
    )
    first_half = compute_gradient(trainer, slice_half(start=0, stop=half))
    second_half = compute_gradient(trainer, slice_half(start=half, stop=2 * half))
    squares = [compute_squared_norm(trainer, gradients) for gradients in (first_half, second_half)]
    for parameter, gradient in second_half.items():
        first_half[parameter] = first_half[parameter].add_(gradient) if parameter in first_half else gradient
    return sum(squares) / 2, compute_squared_norm(trainer, first_half) / 4


def count_half_batch_bytes(trainer: Trainer) -> int:
    """Return the additional GPU memory in bytes of `measure_half_batch_norms`: two float32 gradients."""
    return sum(8 * parameter.numel() for parameter in trainer.parallel.parameters() if parameter.requires_grad)


# --- Breakdown of a step

_MEMORY_MARGIN = 1.2
"""Required free memory, as a multiple of the memory that a measurement needs."""
MIN_BATCHES_LOADED = 4
"""The fewest batches with which a data loader is timed."""


def measure_step_breakdown(
    trainer: Trainer, stream: Generator[Step, None, None], *, steps: int, norms: int, free_bytes: int | None
) -> dict[str, Any]:
    """Return the measurements that need additional steps, by their field names in a result.

    The trainer cannot continue a training afterwards.

    Args:
        steps: number of steps of each timing.
        norms: maximum number of steps whose gradient norms are recorded.
        free_bytes: bytes of GPU memory that the probe has left free; None if there is no limit.
    """
    with use_zero_learning_rate(trainer):
        breakdown: dict[str, Any] = {
            "cached_time": _measure_cached_batch_time(trainer, steps),
            "sync_time": _measure_synchronisation_time(trainer, stream, steps),
        }
    breakdown["gradients"] = _measure_gradient_stats(trainer, stream, norms=norms, free_bytes=free_bytes)
    breakdown["compute_time"], breakdown["ranks"] = _measure_local_step_time(
        trainer, stream, steps, free_bytes=free_bytes
    )
    stream.close()  # also stops its loader processes
    breakdown["loader_time"], breakdown["tokens"] = measure_loader_time(trainer)
    return breakdown


@contextmanager
def use_zero_learning_rate(trainer: Trainer) -> Iterator[None]:
    """Take steps at a learning rate of 0, which take the same time as others.

    Gradient norms are to describe the start of training, and a window of seconds may cover epochs of a small dataset.
    """
    factor, trainer.lr_factor = trainer.lr_factor, lambda _: 0.0
    yield
    trainer.lr_factor = factor


def measure_step_seconds(trainer: Trainer, steps: list[Step]) -> list[float]:
    return [trainer.clock.measure_seconds(step.start, step.end) for step in steps]


def _measure_cached_batch_time(trainer: Trainer, count: int) -> float:
    """Return the median seconds of a step on data that is on the device already.

    One batch is reused, and none is loaded besides those that training holds, so that a probe near the memory limit
    does not fail.
    """
    steps = [loop.run_step_on_batch(trainer, trainer.last_batch) for _ in range(count)]
    return trainer.ranks.max(statistics.median(measure_step_seconds(trainer, steps)))


def measure_loader_time(trainer: Trainer) -> tuple[float, Tokens | None]:
    """Return the seconds that the slowest rank's data loader needs for a step's data without training, and token counts.

    The token counts are means per sample; None if the data is not text. After the first batch, two rounds of all
    workers are timed: neither their start nor a batch that was ready before is counted.
    """
    batches = max(MIN_BATCHES_LOADED, PREFETCH_FACTOR * trainer.workers)
    epochs = trainer.position.epoch + 2 + batches  # at least one batch per epoch
    stream = loop.load_micro_batches(trainer, epochs)
    next(stream)
    trainer.ranks.broadcast(0)
    began, taken, counter = time.perf_counter(), 0, TokenCounter()
    for batch in itertools.islice(stream, batches):
        counter.add(batch)
        taken += 1
        if time.perf_counter() - began > trainer.spec.search.max_seconds:
            break
    seconds = trainer.ranks.max((time.perf_counter() - began) / taken * trainer.parts)
    tokens = counter.compute_means_per_sample()
    return seconds, tokens and Tokens(length=tokens[0], real=tokens[1])


def _measure_gradient_stats(
    trainer: Trainer, stream: Iterator[Step], *, norms: int, free_bytes: int | None
) -> GradientStats:
    """Return the gradient norms of further steps; of half batches if the model is sharded or no probe of the search has
    two ranks.

    No norms of half batches are taken if the GPU has too little free memory for them: a configuration that can train
    must not be reported as out of memory. From this call on DDP has a communication hook, so steps no longer equal
    those of a training.
    """
    too_small = trainer.micro_batch < 4  # BatchNorm cannot train on one sample
    replicated = trainer.parallel.separates_communication
    if replicated and (too_small or max(trainer.ranks.world, trainer.spec.max_ranks) > 1):
        recorder = GradientNormRecorder.attach(trainer)
        for _ in recorder.watch_steps(itertools.islice(stream, norms), trainer.scaler):
            pass
        return summarize_gradient_norms(recorder.gather_pairs(), local_batch=trainer.local_batch, batch=trainer.batch)
    if too_small:
        return summarize_gradient_norms([], local_batch=trainer.local_batch, batch=trainer.batch)
    pairs: list[Pair] = []
    if not replicated or free_bytes is None or free_bytes >= _MEMORY_MARGIN * count_half_batch_bytes(trainer):
        _run_steps(
            trainer,
            stream,
            trainer.spec.search.max_extra_timing_steps,
            lambda: pairs.append(measure_half_batch_norms(trainer)),
        )
    half = trainer.micro_batch // 2
    samples = half if replicated else trainer.parallel.count_samples_of_gradient(half)
    return summarize_gradient_norms(pairs, local_batch=samples, batch=2 * samples)


def _measure_synchronisation_time(trainer: Trainer, stream: Iterator[Step], count: int) -> float | None:
    """Return the exposed synchronisation in seconds; None for a sharded model, which communicates throughout."""
    if not isinstance(trainer.parallel, Replicated):
        return None
    with SynchronisationTimer(trainer.clock, trainer.parallel) as timer:
        _run_steps(trainer, stream, count, timer.record_reduction)
    return trainer.ranks.max(timer.compute_median())


def _measure_local_step_time(
    trainer: Trainer, stream: Iterator[Step], count: int, *, free_bytes: int | None
) -> tuple[float | None, tuple[RankStepTimes, ...]]:
    """Return the seconds of a step without synchronisation, the slowest rank's and each rank's; (None, ()) for a
    sharded model that cannot run without communication or does not fit a GPU as a whole.
    """
    trainer.synchronise = False
    independent = trainer.parallel.make_local_context(
        lambda needed: free_bytes is None or free_bytes >= _MEMORY_MARGIN * needed
    )
    if independent is None:
        return None, ()
    with independent:
        steps = _run_steps(trainer, stream, count, None)  # done last, because the replicas diverge
    rank_pace = RankStepTimes(
        host=platform.node(),
        compute=statistics.median(measure_step_seconds(trainer, steps)),
        wait=statistics.median(trainer.clock.measure_seconds(step.start, step.loaded) for step in steps),
    )
    paces = tuple(map(RankStepTimes.model_validate_json, trainer.ranks.gather(rank_pace.model_dump_json())))
    return max(pace.compute for pace in paces), paces if len(paces) > 1 else ()


def _run_steps(
    trainer: Trainer, stream: Iterator[Step], count: int, on_gradient: Callable[[], None] | None
) -> list[Step]:
    """Run `count` steps, calling `on_gradient` after each finished gradient."""
    trainer.after_backward = on_gradient
    steps = list(itertools.islice(stream, count))
    trainer.after_backward = None
    return steps


# --- The probe

TIMED_EVAL_BATCHES = 8
TIMED_REFRESHES = 3
MAX_NORM_STEPS = 50
"""The most steps whose gradient norms are recorded: they describe the start of training, and they change the
weights."""
NO_REFRESH_STEPS = 10**9
"""Steps until AGS refreshes by itself: a probe times refreshes separately from steps."""


def run_probes(task: ProbeTask, run: RunDir, ranks: Ranks, datasets: Datasets, *, started_at: float) -> None:
    """Measure the task's local batches that have no result yet, ascending; rank 0 writes each result.

    Args:
        started_at: Unix time at which the supervisor started this attempt.
    """
    task = task.model_copy(update={"spec": find_most_expensive_job(task.spec)})
    overheads: JobOverheads | None = None
    # Rank 0 decides for all: on NFS, other nodes may not yet see the newest trial in the task.
    while local_batch := ranks.broadcast((run.find_current_probe(task) or 0) if ranks.is_first else 0):
        overheads = overheads or _measure_job_overheads(
            task, run, ranks, datasets, local_batch=local_batch, started_at=started_at
        )
        result = measure_probe(task, ranks, datasets, local_batch=local_batch, overheads=overheads)
        if ranks.is_first:
            run.write_result(result)
            if isinstance(result, Measured):
                sys.stdout.write(f"{result.description}\n")


@dataclass(frozen=True)
class JobOverheads:
    """Overheads that are measured once per job. Seconds."""

    startup: float
    save: float
    longest: Any = None  # largest inspected sample if shapes differ; else None


def _measure_job_overheads(
    task: ProbeTask, run: RunDir, ranks: Ranks, datasets: Datasets, *, local_batch: int, started_at: float
) -> JobOverheads:
    """Measure start-up and saving; first steps and a first evaluation, so that no probe counts the loading of libraries."""
    trainer = _build_trainer(task, ranks, datasets, local_batch=local_batch)
    evaluator = evaluation.Evaluator(trainer)  # before the first step, as in a training: it imports the user's metrics
    stream = repeat_steps(trainer)
    first_step = next(stream)
    trainer.clock.measure_seconds(first_step.start, first_step.end)
    startup = max(0.0, time.time() - started_at)  # the clock may have been set back
    next(stream)
    evaluator.evaluate(max_batches=1)
    longest = find_longest_sample(datasets)
    return JobOverheads(
        startup=ranks.max(startup),
        save=ranks.max(_measure_save_time(trainer, run)),
        longest=None if longest is None else longest[0],
    )


def _build_trainer(task: ProbeTask, ranks: Ranks, datasets: Datasets, *, local_batch: int) -> Trainer:
    trainer = loop.build_trainer(
        task, ranks, datasets, batch=local_batch * ranks.world, workers=task.spec.train.workers, refresh=False
    )
    load_weights(task.spec.model, trainer.parallel.module, first=ranks.is_first)
    if trainer.ags:
        trainer.ags.start_epoch(NO_REFRESH_STEPS)
    trainer.until = trainer.method.probe_epochs()
    return trainer


def measure_probe(
    task: ProbeTask, ranks: Ranks, datasets: Datasets, *, local_batch: int, overheads: JobOverheads
) -> Measured | OutOfMemory:
    """Run one probe.

    Raises:
        Diverged: loss or weights are not finite after the warm-up: no training at that batch can be chosen.
    """
    meter = device.MemoryMeter(ranks.device)
    meter.reset()
    trainer = _build_trainer(task, ranks, datasets, local_batch=local_batch)
    stream = repeat_steps(trainer)
    warmup_times = _run_warm_up(trainer, stream)
    if why := DivergenceDetector(trainer).describe_divergence(weights=True):
        raise Diverged(why, failures.describe_advice("diverged"))
    if overheads.longest is not None:
        _run_step_on_largest_sample(trainer, overheads.longest)
    meter.restart_counts_after_warmup()
    with use_zero_learning_rate(trainer):
        energy, gpu_states = EnergyMeter(ranks), GpuStateRecorder(ranks)
        more = partial(count_steps_to_time, search=trainer.spec.search)
        window = StepBlocks(trainer, more, at_work=gpu_states.sample_state)
        window.run_blocks(stream)
        joules, gpus = energy.read_joules(), gpu_states.get_first_and_last()
        refresh_time = _measure_refresh_time(trainer, stream, window.steps)
        eval_time = _measure_eval_time(trainer)
        memory = _measure_peak_components(trainer, meter)  # measured before steps that a training does not take
        retries = int(ranks.max(meter.count_allocator_retries()))
    capacity = get_memory_capacity(ranks, task.spec.cluster.memory_per_gpu)
    free_bytes = None if capacity is None else capacity - memory.reserved - memory.libraries
    steps = ranks.broadcast(count_steps_for_median(window.steps, trainer.spec.search) if ranks.is_first else 0)
    breakdown = measure_step_breakdown(
        trainer, stream, steps=steps, norms=min(MAX_NORM_STEPS, len(window.steps)), free_bytes=free_bytes
    )
    if retries:
        message = f"counted as out of memory: the batch fits only because PyTorch's allocator flushed its cache {retries} times"
        return OutOfMemory(**make_probe_identity(task, local_batch), assumed=False, message=message)
    return Measured(
        **make_probe_identity(task, local_batch),
        batch=trainer.batch,
        accumulate=trainer.parts,
        step_times=tuple(window.steps),
        warmup_times=tuple(warmup_times),
        data_wait=statistics.median(window.waits),
        **breakdown,
        memory=memory,
        capacity=capacity,
        overheads=Overheads(
            startup=overheads.startup,
            eval_batch=eval_time,
            eval_batch_size=trainer.micro_batch,
            checkpoint=overheads.save,
            refresh=refresh_time,
        ),
        environment=environment.collect_environment(ranks, workers=trainer.workers),
        dataset_size=len(datasets.train),
        eval_size=len(datasets.eval),
        energy=None if joules is None else joules / len(window.steps),
        gpus=gpus,
        allocator_retries=retries,
        oversubscribed=environment.is_oversubscribed(
            ranks, ranks_here=environment.count_local_ranks(ranks, task.spec.cluster)
        ),
        measured_at=time.time(),
    )


def _run_warm_up(trainer: Trainer, stream: Iterator[Step]) -> list[float]:
    """Take steps until their times are stable; return their seconds."""
    # Once factors exist, the timed steps scale gradients as training does.
    first_steps = [next(stream), _run_step_with_refresh(trainer, stream)]
    queue = -(-PREFETCH_FACTOR * trainer.workers // trainer.parts)
    blocks = StepBlocks(trainer, partial(count_warm_up_steps, search=trainer.spec.search, prefetched=queue))
    blocks.run_blocks(stream)
    return measure_step_seconds(trainer, first_steps) + blocks.steps


def _run_step_on_largest_sample(trainer: Trainer, sample: Any) -> None:
    """Take a step on a batch of copies of the largest sample, whose memory a training may need at some step."""
    batch = make_batch(trainer.datasets.collate, [sample] * trainer.micro_batch)
    with use_zero_learning_rate(trainer):
        loop.run_step_on_batch(trainer, batch)


@dataclass
class StepBlocks:
    """Runs steps in blocks whose length rank 0 decides by its clock; ranks agree between blocks, outside of steps."""

    trainer: Trainer
    more: Callable[[list[float]], int]  # seconds of the steps so far -> length of the next block; 0: stop
    at_work: Callable[[], None] = lambda: None  # called after a block is queued, while the GPU still works on it
    steps: list[float] = field(default_factory=list)  # seconds of each step
    waits: list[float] = field(default_factory=list)  # seconds of each step spent waiting for data

    def run_blocks(self, stream: Iterator[Step]) -> None:
        trainer = self.trainer
        while count := trainer.ranks.broadcast(self.more(self.steps) if trainer.ranks.is_first else 0):
            block = list(itertools.islice(stream, count))
            self.at_work()
            self.steps += measure_step_seconds(trainer, block)
            self.waits += [trainer.clock.measure_seconds(step.start, step.loaded) for step in block]


def _measure_peak_components(trainer: Trainer, meter: device.MemoryMeter) -> Components:
    """Return the memory of the steps so far, the maximum over all ranks."""
    ranks, limit = trainer.ranks, trainer.spec.cluster.memory_per_gpu
    peak, reserved = meter.read_peak()
    assert trainer.last_batch is not None
    return split_memory(
        trainer.parallel.module,
        trainer.base,
        batch=device.count_tensor_bytes(list_tensors(trainer.last_batch)),
        factors=trainer.ags.compute_memory() if trainer.ags else 0,
        peak=int(ranks.max(peak)),
        reserved=int(ranks.max(reserved)),
        libraries=int(ranks.max(meter.count_library_bytes(limit))),
        accumulate=trainer.parts,
    )


def repeat_steps(trainer: Trainer) -> Generator[Step, None, None]:
    """Yield the loop's steps, starting over if a small dataset is used up before the probe has finished."""
    while True:
        yield from loop.run_steps(trainer)
        trainer.position = TrainingPosition()


def _measure_refresh_time(trainer: Trainer, stream: Iterator[Step], timed: list[float]) -> float:
    """Return the additional seconds of a step that refreshes the AGS factors."""
    if trainer.ags is None or trainer.ags.identity or trainer.spec.ags.fill_from_preset().refreshes_each_step:
        return 0.0
    with_refresh = [_run_step_with_refresh(trainer, stream) for _ in range(TIMED_REFRESHES)]
    extra = statistics.median(measure_step_seconds(trainer, with_refresh)) - statistics.median(timed)
    return max(0.0, extra)


def _run_step_with_refresh(trainer: Trainer, stream: Iterator[Step]) -> Step:
    """Take a step that refreshes the AGS factors; if it overflows, as fp16's first step may, the next one does."""
    if trainer.ags:
        trainer.ags.request_refresh()
    return next(stream)


def _measure_eval_time(trainer: Trainer) -> float:
    """Return the seconds of one evaluation batch; the first pass starts the loader's processes and is not counted."""
    evaluator = evaluation.Evaluator(trainer)
    evaluator.evaluate(max_batches=1)
    batches = min(TIMED_EVAL_BATCHES, evaluator.count_batches(0))  # the same on all ranks
    began = time.perf_counter()
    evaluator.evaluate(max_batches=batches)
    trainer.clock.wait_for_device()
    return (time.perf_counter() - began) / max(1, batches)


def _measure_save_time(trainer: Trainer, run: RunDir) -> float:
    """Return the seconds in which a checkpoint is written to the file system on which training will write them."""
    if trainer.parallel.needs_all_ranks:
        began = time.perf_counter()
        checkpoint.write_sharded_checkpoint(run.path / ".timing.dcp", trainer, best={})
        seconds = time.perf_counter() - began
        if trainer.ranks.is_first:
            shutil.rmtree(run.path / ".timing.dcp")
        return seconds
    if not trainer.ranks.is_first:
        return 0.0
    path = run.path / ".timing.pt"
    began = time.perf_counter()
    checkpoint.write_checkpoint(path, checkpoint.make_checkpoint_state(trainer, best={}))
    path.unlink()
    return time.perf_counter() - began
