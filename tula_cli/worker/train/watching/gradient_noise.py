"""The gradient noise scale while a training is under way (`train.gradient_noise`), from passes of its own.

Squared norms of the gradients of single micro-batches, and of the mean of several (McCandlish et al. 2018, appendix A.1), on
the samples that are trained next. Nothing of the training changes: weights, buffers and gradients are afterwards as they
were, and every step draws its random numbers anew.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tula_cli.models.efficiency import Pair, noise_scale, summarise
from tula_cli.optim.parts import shares
from tula_cli.worker.build.compiled import as_written
from tula_cli.worker.build.sampling import steps_left
from tula_cli.worker.parallel.sharded import Sharded
from tula_cli.worker.seeding import seed_torch, stable_seed
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train.loop import Trainer

_STREAM = 0x4E53  # parts this module's random numbers from the job's others

Gradient = dict[torch.Tensor, torch.Tensor]
"""Of each parameter that the batch needs."""
GROUP = 8
"""Micro-batches whose mean is held against themselves: in that of two, a gradient a tenth of its noise would be lost."""
GROUPS = 4
"""As many of them at least tell how sure the noise is; of smaller datasets they are smaller."""


def measure(trainer: Trainer, *, batches: int, between: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Measure the noise at the trainer's weights, as a row of metrics.jsonl holds it; every rank takes part.

    Args:
        trainer: only looked at. Its replicas are taken to be equal.
        batches: micro-batches of each rank.
        between: called after each, on every rank at the same time; it may raise.

    Returns:
        `stats`, the norms as a probe's; `scale`, `low` and `high` of the noise, in samples, where they tell it; `seconds`.
    """
    began, pairs, position = time.monotonic(), list[Pair](), trainer.position
    # By the position, not by what ran before: stages follow from it, and a training that was interrupted has the same.
    seed = stable_seed(trainer.spec.train.seed, _STREAM, position.samples, trainer.ranks.rank)
    seed_torch(seed, trainer.ranks.device)
    count = min(batches, _upcoming(trainer))
    size = max(2, min(GROUP, count // GROUPS))
    with _buffers_kept(trainer.parallel.module), contextlib.closing(worker_train_loop.upcoming(trainer)) as stream:
        trainer.parallel.train()
        for _ in range(count // size):
            pairs.append(_group(trainer, itertools.islice(stream, size), between))
    together = trainer.micro_batch * (trainer.ranks.world if isinstance(trainer.parallel, Sharded) else 1)
    stats = summarise(_over_ranks(trainer, pairs), local_batch=together, batch=size * together)
    noise = noise_scale([stats])
    told = {} if noise is None else {"scale": noise.scale, "low": noise.low, "high": noise.high}
    return {"stats": stats.model_dump(mode="json"), **told, "seconds": time.monotonic() - began}


def _upcoming(trainer: Trainer) -> int:
    """Return how many micro-batches there are in the rest of this epoch and the next one."""
    size, done = len(trainer.datasets.train), trainer.position.done
    return (steps_left(size, done, trainer.batch) + size // trainer.batch) * trainer.parts


def _over_ranks(trainer: Trainer, pairs: Sequence[Pair]) -> list[Pair]:
    """Return the means over all ranks, whose samples differ."""
    world = trainer.ranks.world
    sums = trainer.ranks.sum([value for pair in pairs for value in pair])
    return [(sums[at] / world, sums[at + 1] / world) for at in range(0, len(sums), 2)]


def _group(trainer: Trainer, batches: Iterator[Any], between: Callable[[], None]) -> Pair:
    """Return the mean of the squared norms of the batches' gradients, and that of their mean."""
    total: Gradient = {}
    squares = []
    for batch in batches:
        found = gradient(trainer, batch)
        squares.append(squared_norm(trainer, found))
        for parameter, part in found.items():
            total[parameter] = total[parameter].add_(part) if parameter in total else part
        between()
    mean = {parameter: part / len(squares) for parameter, part in total.items()}
    return sum(squares) / len(squares), squared_norm(trainer, mean)


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Outside, what the passes inside have counted into buffers (BatchNorm) is gone again."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, copy in buffers:
                buffer.copy_(copy)


# --- gradients of single batches


def gradient(trainer: Trainer, batch: Any) -> Gradient:
    """Return the gradient of a batch of this rank's, unscaled; of a model in shares this rank's share of that of all ranks'."""

    def loss() -> torch.Tensor:
        with as_written(trainer.spec.train), worker_train_loop.autocast(trainer):
            return trainer.call.taken(trainer.parallel.module, batch)

    if isinstance(trainer.parallel, Sharded):
        return dict(shares.gradients(loss, trainer.parallel))
    parameters = [p for p in trainer.parallel.parameters() if p.requires_grad]
    found = torch.autograd.grad(trainer.scaler.scale(loss()), parameters, allow_unused=True)
    scale = float(trainer.scaler.get_scale())
    parts = ((p, part.float()) for p, part in zip(parameters, found, strict=True) if part is not None)
    return {p: part if scale == 1 else part.div_(scale) for p, part in parts}


def squared_norm(trainer: Trainer, parts: Gradient) -> float:
    """Return the squared norm of the whole gradient; of shares every rank takes part."""
    if isinstance(trainer.parallel, Sharded):
        return float(shares.squared_norm(list(parts.values())))
    pieces = (piece for part in parts.values() for piece in part.flatten().split(_PIECE))
    return float(torch.stack([piece.double().square().sum() for piece in pieces]).sum().item())


_PIECE = 2**20
"""Elements that are held in twice their bytes at a time."""
