"""What a probe finds in steps of their own: on data that is there, at synchronisation, at gradients, at local work."""

import itertools
import platform
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from tula_cli.models.efficiency import Pair, summarise
from tula_cli.models.memory.host_memory import PREFETCH_FACTOR
from tula_cli.run.records.probes import GradientStats, RankPace, Tokens
from tula_cli.worker.build.batches.tokens import TokenCounter
from tula_cli.worker.measure.looks.gradients import GradientNormRecorder, half_batch_bytes, half_batch_norms
from tula_cli.worker.parallel.sharded import Sharded
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train.loop import Step, Trainer
from tula_cli.worker.train.watching.sync_spy import SynchronisationTimer

_MEMORY_MARGIN = 1.2
"""Times as much room as a look takes that there has to be."""
MIN_BATCHES_LOADED = 4
"""The fewest batches by which a data loader is timed."""


def measure_breakdown(
    trainer: Trainer, stream: Generator[Step, None, None], *, steps: int, norms: int, room: int | None
) -> dict[str, Any]:
    """Return what is found in steps of their own, by the names that it has in a result; the trainer has done its work.

    Args:
        trainer: of the probe.
        stream: its steps.
        steps: of each look at a time.
        norms: the most steps whose gradient norms are taken.
        room: bytes of a GPU that the probe has left free; None where nothing bounds them.
    """
    with zero_learning_rate(trainer):
        breakdown: dict[str, Any] = {
            "cached_time": _cached_batch_time(trainer, steps),
            "sync_time": _synchronisation_time(trainer, stream, steps),
        }
    breakdown["gradients"] = _gradient_stats(trainer, stream, norms=norms, room=room)
    breakdown["compute_time"], breakdown["ranks"] = _local_step_time(trainer, stream, steps, room=room)
    stream.close()  # with its workers
    breakdown["loader_time"], breakdown["tokens"] = loader_time(trainer)
    return breakdown


@contextmanager
def zero_learning_rate(trainer: Trainer) -> Iterator[None]:
    """Take steps at a learning rate of 0, which take what others do.

    Gradient norms belong to the start of training. A window of seconds may hold epochs of a small dataset.
    """
    factor, trainer.lr_factor = trainer.lr_factor, lambda _: 0.0
    yield
    trainer.lr_factor = factor


def step_seconds(trainer: Trainer, steps: list[Step]) -> list[float]:
    return [trainer.clock.seconds(step.start, step.end) for step in steps]


def _cached_batch_time(trainer: Trainer, count: int) -> float:
    """Return the median seconds of a step on data that is on the device already.

    One batch again and again, and none beside those that training holds: a probe near the limit of memory is not ended.
    """
    steps = itertools.islice(worker_train_loop.cached_steps(trainer), count)
    return trainer.ranks.max(statistics.median(step_seconds(trainer, list(steps))))


def loader_time(trainer: Trainer) -> tuple[float, Tokens | None]:
    """Return the seconds in which the data loader makes the data of a step, all ranks at once, while nothing else is done.

    And what tokens a sample of it has, where it is text.

    From the first batch on two rounds of all workers: their start is not counted, nor is a batch that was ready before.
    """
    batches = max(MIN_BATCHES_LOADED, PREFETCH_FACTOR * trainer.workers)
    stream = worker_train_loop.load_micro_batches(
        trainer, trainer.position.epoch + 2 + batches
    )  # of a batch an epoch at least
    next(stream)
    trainer.ranks.broadcast(0)
    began, taken, counter = time.perf_counter(), 0, TokenCounter()
    for batch in itertools.islice(stream, batches):
        counter.add(batch)
        taken += 1
        if time.perf_counter() - began > trainer.spec.search.max_seconds:
            break
    seconds = trainer.ranks.max((time.perf_counter() - began) / taken * trainer.parts)
    tokens = counter.means_per_sample()
    return seconds, tokens and Tokens(length=tokens[0], real=tokens[1])


def _gradient_stats(trainer: Trainer, stream: Iterator[Step], *, norms: int, room: int | None) -> GradientStats:
    """Return the gradient norms of some more steps; where no probe of the search has two ranks, those of half batches.

    These are of no steps where a GPU has not the room for them: what trains is no out-of-memory.
    From here on DDP has a communication hook, with which a step is not a training's any more.
    """
    pairs: list[Pair] = []
    half = trainer.micro_batch // 2
    if isinstance(trainer.parallel, Sharded):
        if trainer.micro_batch < 4:
            return summarise([], local_batch=trainer.local_batch, batch=trainer.batch)
        _run_steps(trainer, stream, trainer.spec.search.split_steps, lambda: pairs.append(half_batch_norms(trainer)))
        samples = half * trainer.ranks.world
        return summarise(pairs, local_batch=samples, batch=2 * samples)
    if _max_search_ranks(trainer) > 1 or trainer.micro_batch < 4:  # batch norm cannot do with one sample
        recorder = GradientNormRecorder.attach(trainer)
        for _ in recorder.watch(itertools.islice(stream, norms), trainer.scaler):
            pass
        return summarise(recorder.pairs(), local_batch=trainer.local_batch, batch=trainer.batch)
    if room is not None and room < _MEMORY_MARGIN * half_batch_bytes(trainer):
        return summarise([], local_batch=half, batch=2 * half)
    _run_steps(trainer, stream, trainer.spec.search.split_steps, lambda: pairs.append(half_batch_norms(trainer)))
    return summarise(pairs, local_batch=half, batch=2 * half)


def _max_search_ranks(trainer: Trainer) -> int:
    """Return the ranks of the largest probe of the search."""
    return max(trainer.ranks.world, max(trainer.spec.search.nodes) * trainer.spec.cluster.gpus_per_node)


def _synchronisation_time(trainer: Trainer, stream: Iterator[Step], count: int) -> float | None:
    """Return the exposed synchronisation in seconds; None of shares, which are gathered all along the passes."""
    if isinstance(trainer.parallel, Sharded):
        return None
    with SynchronisationTimer(trainer.clock, trainer.parallel) as spy:
        _run_steps(trainer, stream, count, spy.reduced)
    return trainer.ranks.max(spy.median())


def _local_step_time(
    trainer: Trainer, stream: Iterator[Step], count: int, *, room: int | None
) -> tuple[float | None, tuple[RankPace, ...]]:
    """Return the seconds of a step without synchronisation, the slowest rank's and each one's; None of shares that do not
    fit a GPU together.

    Args:
        trainer: of the probe.
        stream: its steps.
        count: how many of them.
        room: bytes of a GPU that the probe has left free; None where nothing bounds them.
    """
    trainer.synchronise = False
    independent: AbstractContextManager[None] = nullcontext()
    if isinstance(trainer.parallel, Sharded):
        if not trainer.parallel.can_run_without_communication or (
            room is not None and room < _MEMORY_MARGIN * trainer.parallel.gathered_bytes
        ):
            return None, ()
        independent = trainer.parallel.without_communication()
    with independent:
        steps = _run_steps(trainer, stream, count, None)  # last: the replicas drift apart
    own = RankPace(
        host=platform.node(),
        compute=statistics.median(step_seconds(trainer, steps)),
        wait=statistics.median(trainer.clock.seconds(step.start, step.loaded) for step in steps),
    )
    paces = tuple(map(RankPace.model_validate_json, trainer.ranks.gather(own.model_dump_json())))
    return max(pace.compute for pace in paces), paces if len(paces) > 1 else ()


def _run_steps(
    trainer: Trainer, stream: Iterator[Step], count: int, on_gradient: Callable[[], None] | None
) -> list[Step]:
    """Run some steps, looking at each finished gradient."""
    trainer.after_backward = on_gradient
    steps = list(itertools.islice(stream, count))
    trainer.after_backward = None
    return steps
