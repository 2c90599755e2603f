"""The gradient noise scale during a training (`train.diagnostics: [gradient_noise]`), from additional passes.

It is computed from squared norms of the gradients of single micro-batches, and of the mean of several (McCandlish et
al. 2018, appendix A.1), on the samples that are trained next. The training is not affected: weights, buffers and
gradients are restored, and every step reseeds its random numbers.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tula_cli.models.efficiency import Pair, estimate_noise_scale, summarize_gradient_norms
from tula_cli.optim import sharding
from tula_cli.optim.ags import restore_buffers
from tula_cli.worker.build.compiled import disable_compilation
from tula_cli.worker.build.loaders import count_remaining_steps
from tula_cli.worker.device import make_autocast_context
from tula_cli.worker.parallel.sharding import Sharded
from tula_cli.worker.seeding import compute_stable_seed, seed_torch
from tula_cli.worker.train.loop import Trainer, list_upcoming_micro_batches

_SEED_STREAM = 0x4E53  # part of the seed, so that random numbers differ from the job's others

Gradient = dict[torch.Tensor, torch.Tensor]
"""Gradients of the parameters that the batch uses."""
BATCHES_PER_GROUP = 8
"""Micro-batches per group, whose mean is compared with the single ones: with two, a gradient of a tenth of the noise is
lost."""
MIN_GROUPS = 4
"""Minimum number of groups from which the uncertainty of the noise can be estimated; smaller datasets have smaller
groups."""
_PIECE_ELEMENTS = 2**20  # elements that are converted to double precision at a time


def measure_gradient_noise(
    trainer: Trainer, *, batches: int, after_batch: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Measure the noise at the trainer's weights; return a row's fields for metrics.jsonl. Every rank must call this.

    Args:
        trainer: not changed. Its replicas are assumed to be equal.
        batches: micro-batches of each rank.
        after_batch: called after each micro-batch, on every rank at the same time; it may raise.

    Returns:
        `stats`, the norms as in a probe; `scale`, `low` and `high` of the noise, in samples, if they can be estimated;
        `seconds`.
    """
    began, pairs, position = time.monotonic(), list[Pair](), trainer.position
    # The seed depends only on the position, so that a resumed training measures the same noise.
    seed = compute_stable_seed(trainer.spec.train.seed, _SEED_STREAM, position.samples, trainer.ranks.rank)
    seed_torch(seed, trainer.ranks.device)
    count = min(batches, _count_upcoming_micro_batches(trainer))
    size = max(2, min(BATCHES_PER_GROUP, count // MIN_GROUPS))
    with (
        restore_buffers(trainer.parallel.module),
        contextlib.closing(list_upcoming_micro_batches(trainer)) as stream,
    ):
        trainer.parallel.train()
        for _ in range(count // size):
            pairs.append(_measure_batch_group(trainer, itertools.islice(stream, size), after_batch))
    samples_of_gradient = trainer.parallel.count_samples_of_gradient(trainer.micro_batch)
    stats = summarize_gradient_norms(
        _average_pairs_over_ranks(trainer, pairs), local_batch=samples_of_gradient, batch=size * samples_of_gradient
    )
    noise = estimate_noise_scale([stats])
    interval = {} if noise is None else {"scale": noise.scale, "low": noise.low, "high": noise.high}
    return {"stats": stats.model_dump(mode="json"), **interval, "seconds": time.monotonic() - began}


def _count_upcoming_micro_batches(trainer: Trainer) -> int:
    """Return the number of micro-batches in the rest of this epoch and the next one."""
    size, samples_done = len(trainer.datasets.train), trainer.position.done
    return (count_remaining_steps(size, samples_done, trainer.batch) + size // trainer.batch) * trainer.parts


def _average_pairs_over_ranks(trainer: Trainer, pairs: Sequence[Pair]) -> list[Pair]:
    """Return the means over all ranks, whose samples differ."""
    world = trainer.ranks.world
    sums = trainer.ranks.sum([value for pair in pairs for value in pair])
    return [(sums[at] / world, sums[at + 1] / world) for at in range(0, len(sums), 2)]


def _measure_batch_group(trainer: Trainer, batches: Iterator[Any], after_batch: Callable[[], None]) -> Pair:
    """Return the mean of the squared norms of the batches' gradients, and the squared norm of their mean."""
    total: Gradient = {}
    squares = []
    for batch in batches:
        gradients = compute_gradient(trainer, batch)
        squares.append(compute_squared_norm(trainer, gradients))
        for parameter, gradient_sum in gradients.items():
            total[parameter] = total[parameter].add_(gradient_sum) if parameter in total else gradient_sum
        after_batch()
    mean = {parameter: gradient_sum / len(squares) for parameter, gradient_sum in total.items()}
    return sum(squares) / len(squares), compute_squared_norm(trainer, mean)


# --- Gradients of single batches


def compute_gradient(trainer: Trainer, batch: Any) -> Gradient:
    """Return the unscaled gradient of this rank's batch; if sharded, this rank's shard of that of all ranks'
    batches."""

    def compute_loss() -> torch.Tensor:
        with disable_compilation(trainer.spec.train), make_autocast_context(trainer.spec.train, trainer.ranks.device):
            return trainer.call.compute_loss(trainer.parallel.module, batch)

    if isinstance(trainer.parallel, Sharded):
        return dict(sharding.compute_sharded_gradients(compute_loss, trainer.parallel))
    parameters = [p for p in trainer.parallel.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(trainer.scaler.scale(compute_loss()), parameters, allow_unused=True)
    scale = float(trainer.scaler.get_scale())
    tensors = ((p, tensor.float()) for p, tensor in zip(parameters, gradients, strict=True) if tensor is not None)
    return {p: tensor if scale == 1 else tensor.div_(scale) for p, tensor in tensors}


def compute_squared_norm(trainer: Trainer, gradient: Gradient) -> float:
    """Return the squared norm of the whole gradient; if the model is sharded, every rank must call this."""
    if trainer.parallel.needs_all_ranks:
        return float(sharding.compute_sharded_squared_norm(list(gradient.values())))
    pieces = (piece for tensor in gradient.values() for piece in tensor.flatten().split(_PIECE_ELEMENTS))
    return float(torch.stack([piece.double().square().sum() for piece in pieces]).sum().item())
