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
from tula_cli.models.halving import dearest
from tula_cli.models.memory.host_memory import AHEAD
from tula_cli.run.directory import RunDir
from tula_cli.run.records.components import Components
from tula_cli.run.records.probes import GpuState, Measured, OutOfMemory, Overheads
from tula_cli.run.records.tasks import ProbeTask, probe_identity
from tula_cli.worker import device, environment
from tula_cli.worker.build.batches.collate import collated
from tula_cli.worker.build.batches.tree import tensors
from tula_cli.worker.build.finetune import initial_weights
from tula_cli.worker.build.samples import Datasets
from tula_cli.worker.build.sampling import Position
from tula_cli.worker.energy import EnergyMeter
from tula_cli.worker.measure import meter as worker_measure_meter
from tula_cli.worker.measure.first_samples import longest
from tula_cli.worker.measure.gpu_states import GpuStates
from tula_cli.worker.measure.looks.looks import looks_of, seconds_of, standing_still
from tula_cli.worker.measure.window import steps_to_look, steps_to_time, steps_to_warm_up
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import checkpoint, evaluation
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train.divergence import DivergenceDetector
from tula_cli.worker.train.loop import Step, Trainer

EVAL_BATCHES = 8
REFRESHES = 3
NORMS = 50
"""The most steps whose gradient norms are taken: they tell the start of training, and change the weights."""
NEVER = 10**9
"""Steps until AGS refreshes by itself: a probe times refreshes apart from steps."""


def run_probes(task: ProbeTask, run: RunDir, ranks: Ranks, datasets: Datasets, *, started_at: float) -> None:
    """Measure the task's local batches that have no result yet, ascending; each result is written by rank 0.

    Args:
        started_at: Unix time at which the supervisor started this attempt.
    """
    task = task.model_copy(update={"spec": dearest(task.spec)})
    overheads: JobOverheads | None = None
    for local_batch in task.local_batches:
        wanted = ranks.first and run.current_probe(task) == local_batch
        if not ranks.from_first(int(wanted)):
            continue
        overheads = overheads or _job_overheads(
            task, run, ranks, datasets, local_batch=local_batch, started_at=started_at
        )
        result = measure(task, ranks, datasets, local_batch=local_batch, overheads=overheads)
        if ranks.first:
            run.write_result(result)
            if isinstance(result, Measured):
                sys.stdout.write(f"{result.told}\n")


@dataclass(frozen=True)
class JobOverheads:
    """What is measured once a job. Seconds."""

    startup: float
    save: float
    longest: Any = None  # the largest sample that was looked at, where samples differ in shape

    def beside(self, trainer: Trainer, *, eval_time: float, refresh_time: float) -> Overheads:
        """Return them with those of one probe."""
        return Overheads(
            startup=self.startup,
            eval_batch=eval_time,
            eval_batch_size=trainer.micro_batch,
            checkpoint=self.save,
            refresh=refresh_time,
        )


def _job_overheads(
    task: ProbeTask, run: RunDir, ranks: Ranks, datasets: Datasets, *, local_batch: int, started_at: float
) -> JobOverheads:
    """Take the first steps of this process, which load libraries and their buffers: no probe shall count those."""
    trainer = _trainer(task, ranks, datasets, local_batch=local_batch)
    stream = endless(trainer)
    first = next(stream)
    trainer.clock.seconds(first.start, first.end)
    startup = time.time() - started_at
    next(stream)
    found = longest(datasets)
    return JobOverheads(
        startup=ranks.largest(startup),
        save=ranks.largest(_save_time(trainer, run)),
        longest=None if found is None else found[0],
    )


def _trainer(task: ProbeTask, ranks: Ranks, datasets: Datasets, *, local_batch: int) -> Trainer:
    trainer = worker_train_loop.build(
        task, ranks, datasets, batch=local_batch * ranks.world, workers=task.spec.train.workers, refresh=False
    )
    initial_weights.load(task.spec.model, trainer.parallel.module, first=ranks.first)
    if trainer.ags:
        trainer.ags.start_epoch(NEVER)
    trainer.until = trainer.method.probe_epochs()
    return trainer


def measure(
    task: ProbeTask, ranks: Ranks, datasets: Datasets, *, local_batch: int, overheads: JobOverheads
) -> Measured | OutOfMemory:
    """Run one probe.

    Raises:
        Diverged: loss or weights are not finite after its warm-up: at that batch there is no training to choose.
    """
    meter = device.MemoryMeter(ranks.device)
    meter.reset()
    trainer = _trainer(task, ranks, datasets, local_batch=local_batch)
    stream = endless(trainer)
    warmup_times = _warm_up(trainer, stream)
    if why := DivergenceDetector(trainer).look(weights=True):
        raise Diverged(why, outcome.advice("diverged"))
    if overheads.longest is not None:
        _largest_step(trainer, overheads.longest)
    meter.settled()
    with standing_still(trainer):
        window = _timed(trainer, stream)
        refresh_time = _refresh_time(trainer, stream, window.steps)
        eval_time = _eval_time(trainer)
        memory = _memory(trainer, meter)  # before all that trainings do not do
        retries = int(ranks.largest(meter.allocator_retries()))
    capacity = worker_measure_meter.capacity(ranks, task.spec.cluster.memory_per_gpu)
    room = None if capacity is None else capacity - memory.reserved - memory.libraries
    steps = ranks.from_first(steps_to_look(window.steps, trainer.spec.search) if ranks.first else 0)
    looks = looks_of(trainer, stream, steps=steps, norms=min(NORMS, len(window.steps)), room=room)
    if retries:
        return _overfull(task, local_batch, retries)
    return Measured(
        **probe_identity(task, local_batch),
        batch=trainer.batch,
        accumulate=trainer.parts,
        step_times=tuple(window.steps),
        warmup_times=tuple(warmup_times),
        data_wait=statistics.median(window.waits),
        **looks,
        memory=memory,
        capacity=capacity,
        overheads=overheads.beside(trainer, eval_time=eval_time, refresh_time=refresh_time),
        environment=environment.environment(ranks, workers=trainer.workers),
        dataset_size=len(datasets.train),
        eval_size=len(datasets.eval),
        energy=window.joules,
        gpus=window.gpus,
        allocator_retries=retries,
        oversubscribed=environment.oversubscribed(ranks, ranks_here=environment.ranks_here(ranks, task.spec.cluster)),
        measured_at=time.time(),
    )


def _warm_up(trainer: Trainer, stream: Iterator[Step]) -> list[float]:
    """Take steps until they are alike; return their seconds."""
    first = [next(stream)]
    # With factors in place the timed steps scale as training does.
    first.append(_step_with_refresh(trainer, stream))
    queue = -(-AHEAD * trainer.workers // trainer.parts)
    blocks = Blocks(trainer, partial(steps_to_warm_up, search=trainer.spec.search, ahead=queue))
    blocks.take(stream)
    return seconds_of(trainer, first) + blocks.steps


def _largest_step(trainer: Trainer, sample: Any) -> None:
    """Take a step of the largest sample alone, as many times as it has room: what it holds, a training may come to hold."""
    batch = collated(trainer.datasets.collate, [sample] * trainer.micro_batch)
    with standing_still(trainer):
        worker_train_loop.step_on(trainer, batch)


@dataclass(frozen=True)
class TimedWindow:
    """The timed steps, and what the GPUs did meanwhile."""

    steps: list[float]  # seconds
    waits: list[float]  # for data, seconds
    joules: float | None  # of one step on all GPUs
    gpus: tuple[GpuState, GpuState] | None


def _timed(trainer: Trainer, stream: Iterator[Step]) -> TimedWindow:
    """Take the timed steps."""
    meter, states = EnergyMeter(trainer.ranks), GpuStates(trainer.ranks)
    blocks = Blocks(trainer, partial(steps_to_time, search=trainer.spec.search), at_work=states.look)
    blocks.take(stream)
    joules = meter.joules()
    return TimedWindow(
        steps=blocks.steps,
        waits=blocks.waits,
        joules=None if joules is None else joules / len(blocks.steps),
        gpus=states.ends(),
    )


@dataclass
class Blocks:
    """Steps in blocks, as many as rank 0's clock tells; ranks agree between two of them, outside of any step."""

    trainer: Trainer
    more: Callable[[list[float]], int]  # the length of the next block by the seconds so far; 0: none
    at_work: Callable[[], None] = lambda: None  # called at the end of a block, which a GPU is still busy with
    steps: list[float] = field(default_factory=list)  # seconds
    waits: list[float] = field(default_factory=list)  # for data

    def take(self, stream: Iterator[Step]) -> None:
        trainer = self.trainer
        while count := trainer.ranks.from_first(self.more(self.steps) if trainer.ranks.first else 0):
            block = list(itertools.islice(stream, count))
            self.at_work()
            self.steps += seconds_of(trainer, block)
            self.waits += [trainer.clock.seconds(step.start, step.loaded) for step in block]


def _overfull(task: ProbeTask, local_batch: int, retries: int) -> OutOfMemory:
    message = f"it ran only because the allocator flushed its cache {retries} times"
    return OutOfMemory(**probe_identity(task, local_batch), assumed=False, message=message)


def _memory(trainer: Trainer, meter: device.MemoryMeter) -> Components:
    """Return the memory of the steps so far, the most of all ranks."""
    ranks, limit = trainer.ranks, trainer.spec.cluster.memory_per_gpu
    peak, reserved = meter.peak()
    assert trainer.last_batch is not None
    return worker_measure_meter.split_memory(
        trainer.parallel.module,
        trainer.base,
        batch=device.tensor_bytes(tensors(trainer.last_batch)),
        factors=trainer.ags.memory() if trainer.ags else 0,
        peak=int(ranks.largest(peak)),
        reserved=int(ranks.largest(reserved)),
        libraries=int(ranks.largest(meter.libraries(limit))),
        accumulate=trainer.parts,
    )


def endless(trainer: Trainer) -> Generator[Step, None, None]:
    """Yield the loop's steps, starting over where a small dataset is used up before the probe is done."""
    while True:
        yield from worker_train_loop.steps(trainer)
        trainer.position = Position()


def _refresh_time(trainer: Trainer, stream: Iterator[Step], timed: list[float]) -> float:
    """Return what a refresh of the AGS factors adds to a step, in seconds."""
    if trainer.ags is None or trainer.ags.identity or trainer.spec.ags.resolved().each_step:
        return 0.0
    with_refresh = [_step_with_refresh(trainer, stream) for _ in range(REFRESHES)]
    extra = statistics.median(seconds_of(trainer, with_refresh)) - statistics.median(timed)
    return max(0.0, extra)


def _step_with_refresh(trainer: Trainer, stream: Iterator[Step]) -> Step:
    """Take a step that refreshes the AGS factors; where it overflows, as the first of fp16 may, the next one does."""
    if trainer.ags:
        trainer.ags.refresh_soon()
    return next(stream)


def _eval_time(trainer: Trainer) -> float:
    """Return the seconds of one evaluation batch; the first pass starts the loader's processes and is not counted."""
    evaluator = evaluation.Evaluator(trainer)
    evaluator.run(max_batches=1)
    batches = min(EVAL_BATCHES, evaluator.batches(0))  # the same on all ranks
    began = time.perf_counter()
    evaluator.run(max_batches=batches)
    trainer.clock.wait()
    return (time.perf_counter() - began) / max(1, batches)


def _save_time(trainer: Trainer, run: RunDir) -> float:
    """Return the seconds it takes to write a checkpoint to the file system that training will write them to."""
    if checkpoint.of_all_ranks(trainer):
        began = time.perf_counter()
        checkpoint.write_shares(run.path / ".timing.dcp", trainer, best={})
        taken = time.perf_counter() - began
        if trainer.ranks.first:
            shutil.rmtree(run.path / ".timing.dcp")
        return taken
    if not trainer.ranks.first:
        return 0.0
    path = run.path / ".timing.pt"
    began = time.perf_counter()
    checkpoint.write(path, checkpoint.state(trainer, best={}))
    path.unlink()
    return time.perf_counter() - began
