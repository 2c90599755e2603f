"""The small batch's gradient (lines 13 and 14 of Algorithm 1): who draws it, how it is taken and brought together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .indicators import alike, squared_norm
from .shares import gradients

SmallLoss = Callable[[int], Tensor]


def draw_counts(b_small: int, available: int, world: int, turn: int) -> list[int]:
    """How many samples of the small batch each rank takes.

    Those of the fewest ranks that hold `b_small` samples, starting at rank `turn` modulo the world size, as evenly as
    possible. No rank takes more than `available`.
    """
    ranks = min(world, math.ceil(b_small / available))
    share, rest = divmod(min(b_small, ranks * available), ranks)
    counts = [0] * world
    for place in range(ranks):
        counts[(turn + place) % world] = share + (place < rest)
    return counts


def small_gradients(
    loss: SmallLoss,
    model: nn.Module,
    params: Sequence[Tensor],
    *,
    counts: Sequence[int],
    rank: int,
    seed: int,
    scaler: torch.amp.GradScaler | None,
    sharded: bool = False,
) -> list[Tensor | None]:
    """The gradient of the mean loss over the ranks' samples, the same on all; None where the loss does not depend.

    Of a model that fully_shard has divided it is this rank's part.

    Buffers, generators, modes and `.grad` are afterwards as they were before.

    Args:
        loss: n -> the mean loss on n samples of this rank.
        params: with dense gradients, in the same order on all ranks.
        counts: how many samples each rank takes; with one entry nothing is communicated.
        seed: of the random numbers that the forward pass draws.
        scaler: scales the loss; the gradient is divided again.
        sharded: whether fully_shard has divided the model. Then a rank without samples computes one all the same, for its
            shares are needed, and gives it no weight.
    """
    if sharded:
        with _untouched(model), _own_randomness(params, seed):
            return _shared_gradients(loss, counts, rank, model, params, scaler)
    grads: list[Tensor | None] = [None] * len(params)
    if params and counts[rank]:
        with _untouched(model), _own_randomness(params, seed):
            grads = _gradients(loss, counts[rank], params, scaler)
    return grads if len(counts) == 1 else _combined(grads, params, counts, rank)


def are_finite(grads: Sequence[Tensor]) -> Tensor:
    """Whether all of the gradients, at least one, are: 0-dim, bool, on the device."""
    return squared_norm(grads).isfinite()


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Put every buffer back, also one that the forward pass replaced by another tensor."""
    kept = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, copy in kept:
                if buffer is not None and copy is not None:
                    buffer.copy_(copy)
                module._buffers[name] = buffer


@contextmanager
def _own_randomness(params: Sequence[Tensor], seed: int) -> Iterator[None]:
    """Seeded generators inside, those of before outside: the CPU's and the parameters' devices'."""
    devices = sorted({p.device.index for p in params if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for index in devices:
            torch.cuda.default_generators[index].manual_seed(seed)
        yield


def _gradients(
    loss: SmallLoss, n: int, params: Sequence[Tensor], scaler: torch.amp.GradScaler | None
) -> list[Tensor | None]:
    """The gradient on n samples; None for a parameter that the loss does not depend on."""
    with torch.enable_grad():
        value = loss(n)
        # autograd.grad, not backward(): .grad keeps the large batch's, and DDP's reducer is not set off
        scaled = value if scaler is None else scaler.scale(value)
        grads: list[Tensor | None] = list(torch.autograd.grad(scaled, params, allow_unused=True))
    return grads if scaler is None or not scaler.is_enabled() else _unscaled(grads, scaler)


def _shared_gradients(
    loss: SmallLoss,
    counts: Sequence[int],
    rank: int,
    model: nn.Module,
    params: Sequence[Tensor],
    scaler: torch.amp.GradScaler | None,
) -> list[Tensor | None]:
    """This rank's parts of the gradient of the mean loss over all ranks' samples; all ranks take part."""
    weight = counts[rank] * len(counts) / sum(counts)

    def weighted() -> Tensor:
        value = loss(max(1, counts[rank])) * weight
        return value if scaler is None else scaler.scale(value)

    found = gradients(weighted, model)
    grads = [found.get(p) for p in params]
    return grads if scaler is None or not scaler.is_enabled() else _unscaled(grads, scaler)


def _unscaled(grads: list[Tensor | None], scaler: torch.amp.GradScaler) -> list[Tensor | None]:
    """The gradients of a loss that was scaled, divided again, in the same list."""
    first = next((grad for grad in grads if grad is not None), None)
    if first is None:
        return grads
    factor = 1.0 / scaler.scale(torch.ones((), device=first.device))  # on the device: get_scale() would wait for it
    for index, grad in enumerate(grads):  # one by one, so that there are never two copies; not in place: they may alias
        grads[index] = None if grad is None else grad * factor.to(grad.device)
    return grads


def _combined(
    grads: Sequence[Tensor | None], params: Sequence[Tensor], counts: Sequence[int], rank: int
) -> list[Tensor | None]:
    """The mean over the ranks' samples, one collective for each dtype; None where no rank has a gradient."""
    result: list[Tensor | None] = [None] * len(params)
    for indices in alike(params).values():
        group = [params[i] for i in indices]
        flat = _packed([grads[i] for i in indices], group, counts[rank] / sum(counts))
        _reduce_(flat, counts)
        used = flat[: len(group)].tolist()
        pieces = flat[len(group) :].split_with_sizes([p.numel() for p in group])
        for index, param, piece, weight in zip(indices, group, pieces, used, strict=True):
            result[index] = _as(piece, param) if weight > 0 else None
    return result


def _packed(grads: Sequence[Tensor | None], params: Sequence[Tensor], weight: float) -> Tensor:
    """One flat tensor: the weight for each parameter that has a gradient (else 0), then the weighted gradients."""
    used = torch.tensor([0.0 if g is None else weight for g in grads]).to(params[0])
    pairs = zip(grads, params, strict=True)
    pieces = [p.new_zeros(p.numel()) if g is None else _flat(g, p) * weight for g, p in pairs]
    return torch.cat([used, *pieces])


def _flat(grad: Tensor, param: Tensor) -> Tensor:
    """A gradient's values in the order in which a dense copy of its parameter has them in memory (channels_last)."""
    if param.is_contiguous():
        return grad.reshape(-1)
    laid = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
    return laid.as_strided((laid.numel(),), (1,))


def _as(piece: Tensor, param: Tensor) -> Tensor:
    """Values in that order as a gradient: with the strides that the large batch's has, a view of DDP's buckets."""
    return piece.as_strided(param.shape, torch.empty_like(param, device="meta").stride())


def _reduce_(flat: Tensor, counts: Sequence[int]) -> None:
    sources = [rank for rank, n in enumerate(counts) if n]
    if len(sources) == 1:
        dist.broadcast(flat, sources[0])
    else:
        dist.all_reduce(flat)
