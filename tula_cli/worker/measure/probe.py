"""A probe: the training loop cut short, and everything that is measured on the way."""

import itertools
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tula_cli.errors import Diverged
from tula_cli.host import outcome
from tula_cli.models.halving import most_expensive_job
from tula_cli.models.memory.host_memory import PREFETCH_FACTOR
from tula_cli.run.directory import RunDir
from tula_cli.run.records.components import Components
from tula_cli.run.records.probes import GpuState, Measured, OutOfMemory, Overheads
from tula_cli.run.records.tasks import ProbeTask, probe_identity
from tula_cli.worker import device, environment
from tula_cli.worker.build.batches.collate import collate_items
from tula_cli.worker.build.batches.tree import tensors_of
from tula_cli.worker.build.finetune import initial_weights
from tula_cli.worker.build.samples import Datasets
from tula_cli.worker.build.sampling import Position
from tula_cli.worker.energy import EnergyMeter
from tula_cli.worker.measure import meter as worker_measure_meter
from tula_cli.worker.measure.first_samples import longest_sample
from tula_cli.worker.measure.gpu_states import GpuStateRecorder
from tula_cli.worker.measure.looks.looks import measure_breakdown, step_seconds, zero_learning_rate
from tula_cli.worker.measure.window import count_steps_for_median, count_steps_to_time, count_warm_up_steps
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import checkpoint, evaluation
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train.divergence import DivergenceDetector
from tula_cli.worker.train.loop import Step, Trainer

EVAL_BATCHES = 8
REFRESHES = 3
MAX_NORM_STEPS = 50
"""The most steps whose gradient norms are taken: they tell the start of training, and change the weights."""
NEVER = 10**9
"""Steps until AGS refreshes by itself: a probe times refreshes apart from steps."""


def run_probes(task: ProbeTask, run: RunDir, ranks: Ranks, datasets: Datasets, *, started_at: float) -> None:
    """Measure the task's local batches that have no result yet, ascending; each result is written by rank 0.

    Args:
        started_at: Unix time at which the supervisor started this attempt.
    """
    task = task.model_copy(update={"spec": most_expensive_job(task.spec)})
    overheads: JobOverheads | None = None
    for local_batch in task.local_batches:
        marks_progress = ranks.is_first and run.current_probe(task) == local_batch
        if not ranks.broadcast(int(marks_progress)):
            continue
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
    """What is measured once a job. Seconds."""

    startup: float
    save: float
    longest: Any = None  # the largest sample that was looked at, where samples differ in shape

    def with_probe(self, trainer: Trainer, *, eval_time: float, refresh_time: float) -> Overheads:
        """Return them with those of one probe."""
        return Overheads(
            startup=self.startup,
            eval_batch=eval_time,
            eval_batch_size=trainer.micro_batch,
            checkpoint=self.save,
            refresh=refresh_time,
        )


def _measure_job_overheads(
    task: ProbeTask, run: RunDir, ranks: Ranks, datasets: Datasets, *, local_batch: int, started_at: float
) -> JobOverheads:
    """Take the first steps of this process, which load libraries and their buffers: no probe shall count those."""
    trainer = _build_trainer(task, ranks, datasets, local_batch=local_batch)
    stream = endless_steps(trainer)
    first_step = next(stream)
    trainer.clock.seconds(first_step.start, first_step.end)
    startup = time.time() - started_at
    next(stream)
    found = longest_sample(datasets)
    return JobOverheads(
        startup=ranks.max(startup),
        save=ranks.max(_measure_save_time(trainer, run)),
        longest=None if found is None else found[0],
    )


def _build_trainer(task: ProbeTask, ranks: Ranks, datasets: Datasets, *, local_batch: int) -> Trainer:
    trainer = worker_train_loop.build_trainer(
        task, ranks, datasets, batch=local_batch * ranks.world, workers=task.spec.train.workers, refresh=False
    )
    initial_weights.load_weights(task.spec.model, trainer.parallel.module, first=ranks.is_first)
    if trainer.ags:
        trainer.ags.start_epoch(NEVER)
    trainer.until = trainer.method.probe_epochs()
    return trainer


def measure_probe(
    task: ProbeTask, ranks: Ranks, datasets: Datasets, *, local_batch: int, overheads: JobOverheads
) -> Measured | OutOfMemory:
    """Run one probe.

    Raises:
        Diverged: loss or weights are not finite after its warm-up: at that batch there is no training to choose.
    """
    meter = device.MemoryMeter(ranks.device)
    meter.reset()
    trainer = _build_trainer(task, ranks, datasets, local_batch=local_batch)
    stream = endless_steps(trainer)
    warmup_times = _warm_up(trainer, stream)
    if why := DivergenceDetector(trainer).describe_divergence(weights=True):
        raise Diverged(why, outcome.advice("diverged"))
    if overheads.longest is not None:
        _largest_step(trainer, overheads.longest)
    meter.restart_after_warmup()
    with zero_learning_rate(trainer):
        window = _time_steps(trainer, stream)
        refresh_time = _measure_refresh_time(trainer, stream, window.steps)
        eval_time = _measure_eval_time(trainer)
        memory = _peak_components(trainer, meter)  # before all that trainings do not do
        retries = int(ranks.max(meter.allocator_retries()))
    capacity = worker_measure_meter.memory_capacity(ranks, task.spec.cluster.memory_per_gpu)
    room = None if capacity is None else capacity - memory.reserved - memory.libraries
    steps = ranks.broadcast(count_steps_for_median(window.steps, trainer.spec.search) if ranks.is_first else 0)
    breakdown = measure_breakdown(trainer, stream, steps=steps, norms=min(MAX_NORM_STEPS, len(window.steps)), room=room)
    if retries:
        return _out_of_memory_by_retries(task, local_batch, retries)
    return Measured(
        **probe_identity(task, local_batch),
        batch=trainer.batch,
        accumulate=trainer.parts,
        step_times=tuple(window.steps),
        warmup_times=tuple(warmup_times),
        data_wait=statistics.median(window.waits),
        **breakdown,
        memory=memory,
        capacity=capacity,
        overheads=overheads.with_probe(trainer, eval_time=eval_time, refresh_time=refresh_time),
        environment=environment.describe_environment(ranks, workers=trainer.workers),
        dataset_size=len(datasets.train),
        eval_size=len(datasets.eval),
        energy=window.joules,
        gpus=window.gpus,
        allocator_retries=retries,
        oversubscribed=environment.is_oversubscribed(
            ranks, ranks_here=environment.count_local_ranks(ranks, task.spec.cluster)
        ),
        measured_at=time.time(),
    )


def _warm_up(trainer: Trainer, stream: Iterator[Step]) -> list[float]:
    """Take steps until they are alike; return their seconds."""
    first_steps = [next(stream)]
    # With factors in place the timed steps scale as training does.
    first_steps.append(_step_with_refresh(trainer, stream))
    queue = -(-PREFETCH_FACTOR * trainer.workers // trainer.parts)
    blocks = StepBlocks(trainer, partial(count_warm_up_steps, search=trainer.spec.search, prefetched=queue))
    blocks.run(stream)
    return step_seconds(trainer, first_steps) + blocks.steps


def _largest_step(trainer: Trainer, sample: Any) -> None:
    """Take a step of the largest sample alone, as many times as it has room: what it holds, a training may come to hold."""
    batch = collate_items(trainer.datasets.collate, [sample] * trainer.micro_batch)
    with zero_learning_rate(trainer):
        worker_train_loop.step_on(trainer, batch)


@dataclass(frozen=True)
class TimedWindow:
    """The timed steps, and what the GPUs did meanwhile."""

    steps: list[float]  # seconds
    waits: list[float]  # for data, seconds
    joules: float | None  # of one step on all GPUs
    gpus: tuple[GpuState, GpuState] | None


def _time_steps(trainer: Trainer, stream: Iterator[Step]) -> TimedWindow:
    """Take the timed steps."""
    meter, states = EnergyMeter(trainer.ranks), GpuStateRecorder(trainer.ranks)
    blocks = StepBlocks(trainer, partial(count_steps_to_time, search=trainer.spec.search), at_work=states.sample)
    blocks.run(stream)
    joules = meter.joules()
    return TimedWindow(
        steps=blocks.steps,
        waits=blocks.waits,
        joules=None if joules is None else joules / len(blocks.steps),
        gpus=states.first_and_last(),
    )


@dataclass
class StepBlocks:
    """Steps in blocks, as many as rank 0's clock tells; ranks agree between two of them, outside of any step."""

    trainer: Trainer
    more: Callable[[list[float]], int]  # the length of the next block by the seconds so far; 0: none
    at_work: Callable[[], None] = lambda: None  # called at the end of a block, which a GPU is still busy with
    steps: list[float] = field(default_factory=list)  # seconds
    waits: list[float] = field(default_factory=list)  # for data

    def run(self, stream: Iterator[Step]) -> None:
        trainer = self.trainer
        while count := trainer.ranks.broadcast(self.more(self.steps) if trainer.ranks.is_first else 0):
            block = list(itertools.islice(stream, count))
            self.at_work()
            self.steps += step_seconds(trainer, block)
            self.waits += [trainer.clock.seconds(step.start, step.loaded) for step in block]


def _out_of_memory_by_retries(task: ProbeTask, local_batch: int, retries: int) -> OutOfMemory:
    message = f"it ran only because the allocator flushed its cache {retries} times"
    return OutOfMemory(**probe_identity(task, local_batch), assumed=False, message=message)


def _peak_components(trainer: Trainer, meter: device.MemoryMeter) -> Components:
    """Return the memory of the steps so far, the most of all ranks."""
    ranks, limit = trainer.ranks, trainer.spec.cluster.memory_per_gpu
    peak, reserved = meter.peak()
    assert trainer.last_batch is not None
    return worker_measure_meter.split_memory(
        trainer.parallel.module,
        trainer.base,
        batch=device.tensor_bytes(tensors_of(trainer.last_batch)),
        factors=trainer.ags.memory() if trainer.ags else 0,
        peak=int(ranks.max(peak)),
        reserved=int(ranks.max(reserved)),
        libraries=int(ranks.max(meter.library_bytes(limit))),
        accumulate=trainer.parts,
    )


def endless_steps(trainer: Trainer) -> Generator[Step, None, None]:
    """Yield the loop's steps, starting over where a small dataset is used up before the probe is done."""
    while True:
        yield from worker_train_loop.run_steps(trainer)
        trainer.position = Position()


def _measure_refresh_time(trainer: Trainer, stream: Iterator[Step], timed: list[float]) -> float:
    """Return what a refresh of the AGS factors adds to a step, in seconds."""
    if trainer.ags is None or trainer.ags.identity or trainer.spec.ags.resolved().each_step:
        return 0.0
    with_refresh = [_step_with_refresh(trainer, stream) for _ in range(REFRESHES)]
    extra = statistics.median(step_seconds(trainer, with_refresh)) - statistics.median(timed)
    return max(0.0, extra)


def _step_with_refresh(trainer: Trainer, stream: Iterator[Step]) -> Step:
    """Take a step that refreshes the AGS factors; where it overflows, as the first of fp16 may, the next one does."""
    if trainer.ags:
        trainer.ags.refresh_soon()
    return next(stream)


def _measure_eval_time(trainer: Trainer) -> float:
    """Return the seconds of one evaluation batch; the first pass starts the loader's processes and is not counted."""
    evaluator = evaluation.Evaluator(trainer)
    evaluator.evaluate(max_batches=1)
    batches = min(EVAL_BATCHES, evaluator.batch_count(0))  # the same on all ranks
    began = time.perf_counter()
    evaluator.evaluate(max_batches=batches)
    trainer.clock.wait()
    return (time.perf_counter() - began) / max(1, batches)


def _measure_save_time(trainer: Trainer, run: RunDir) -> float:
    """Return the seconds it takes to write a checkpoint to the file system that training will write them to."""
    if checkpoint.needs_all_ranks(trainer):
        began = time.perf_counter()
        checkpoint.write_sharded(run.path / ".timing.dcp", trainer, best={})
        seconds = time.perf_counter() - began
        if trainer.ranks.is_first:
            shutil.rmtree(run.path / ".timing.dcp")
        return seconds
    if not trainer.ranks.is_first:
        return 0.0
    path = run.path / ".timing.pt"
    began = time.perf_counter()
    checkpoint.write_checkpoint(path, checkpoint.checkpoint_state(trainer, best={}))
    path.unlink()
    return time.perf_counter() - began
