"""Orthogonalised steps: as long as SGD's, in Muon's direction (Jordan et al. 2024), so that SGD's learning rate fits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .parts import placement
from .parts.gradient_scaling import copies
from .parts.indicators import alike, clip_, wide
from .parts.refusals import place, refuse_sharded
from .parts.wrapper import Wrapper

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd polynomial that Muon iterates: it is steep at 0 and stays around 1, rather than converging to it."""
ITERATIONS = 5

WIDEST = 2048
"""A matrix whose shorter side is longer keeps the base's step: its multiplications would outweigh the training's."""

ON_GPU = torch.bfloat16
"""What a GPU multiplies in, as in Muon."""
PADDING = 1.4
"""Elements that a GPU multiplies over those that there are, at most: zeros for few kernels."""
TOGETHER = 2**24, 2**18
"""Elements that are multiplied at a time, of several matrices, on a GPU and on the CPU, where a kernel costs nothing."""

ALIGN_EVERY = 100
"""Steps after which rank 0's matrices are handed out, should other hardware round products otherwise."""


def is_sgd(base: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is SGD, or derived from it: its steps have a length that a direction can take over."""
    return "SGD" in {kind.__name__ for kind in type(base).__mro__}


class Ortho(Wrapper):
    """Wraps SGD and turns what its step does to each matrix into the nearest (semi-)orthogonal direction.

    With u what the base's step adds to a weight, as a matrix of (outputs, all else), and U S V^T its singular value
    decomposition, the weight moves by |u| / |U V^T| U V^T instead: all directions that the step has take part alike,
    where SGD's follows the few strong ones. U V^T is approximated by five iterations of a polynomial (Newton-Schulz), as
    in Muon. The length stays the base's ("grafting", Agarwal et al. 2020), so learning rate, schedule and momentum keep
    their meaning. The base's weight decay is a part of the step that is turned: of a matrix it pulls the small directions
    as the large ones, and the whole less than in SGD.

    Turned are weights of two dimensions and more; not embeddings, depthwise convolutions (one input a filter) and
    matrices whose shorter side is above 2048, which like biases and norms take the base's step.

    Every rank computes the same from the same averaged gradients; what rounding might make of that is ended every 100
    steps by a broadcast. `param_groups`, `state`, `defaults` and `state_dict()` are the base's. Do not clip before the
    step; use `max_grad_norm`.

    Args:
        base: torch.optim.SGD, or an optimizer derived from it.
        model: the module, or its DistributedDataParallel.
        max_grad_norm: clips the joint norm of the gradients.

    Raises:
        ValueError: a base that is not SGD, or sharded parameters.
    """

    def __init__(self, base: torch.optim.Optimizer, *, model: nn.Module, max_grad_norm: float | None = None) -> None:
        if not is_sgd(base):
            raise ValueError(
                f"the steps of {type(base).__name__} have no length that a direction could take over; use torch.optim.SGD"
            )
        refuse_sharded(base, model, "Ortho")
        super().__init__(base)
        self.max_grad_norm = max_grad_norm
        self._spared = frozenset(map(id, _spared(model)))
        _, self._world = place(model)
        self._steps = 0
        # A class of its own may step otherwise: its step is read off the weights, which have to be fine enough for that.
        self._plain = type(base) is torch.optim.SGD
        if not self._plain and (half := {p.dtype for p in self.matrices()} - {torch.float32, torch.float64}):
            raise ValueError(
                f"the step of {type(base).__name__} cannot be read off weights in {', '.join(sorted(map(str, half)))}, which round"
                " it away; use torch.optim.SGD, or weights in float32 (autocast computes in half precision)"
            )

    def matrices(self) -> list[Tensor]:
        """The parameters whose steps are turned, in the order of the groups."""
        params = (p for group in self.param_groups for p in group["params"])
        return [p for p in params if id(p) not in self._spared and _is_turned(p)]

    def _drop(self) -> None:
        """There is nothing to forget: a step needs nothing beside the gradients."""

    def _update(self) -> None:
        """One step of the base, turned. For a moment one copy of the matrices more, and some of those taken together."""
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.max_grad_norm is not None and grads:
            clip_(grads, self.max_grad_norm)
        matrices = [p for p in self.matrices() if p.grad is not None]
        if not matrices:
            self.base.step()
        elif self._plain:
            self._turned_sgd(matrices)
        else:
            before = copies(matrices)
            self.base.step()
            torch._foreach_sub_(matrices, before)
            turn_(matrices)
            torch._foreach_add_(matrices, before)
        self._steps += 1
        if self._steps % ALIGN_EVERY == 0:
            self._align()

    def _turned_sgd(self, matrices: Sequence[Tensor]) -> None:
        """SGD's step, of the matrices turned before it changes a weight: what it is would be rounded away in a half one's."""
        turned, own = set(map(id, matrices)), list[tuple[list[Tensor], list[Tensor], Any]]()
        for group in self.param_groups:
            params = [p for p in group["params"] if id(p) in turned]
            for indices in alike(params).values():
                some = [params[i] for i in indices]
                own.append((some, self._directions(group, some), group["lr"]))
        grads = [p.grad for p in matrices]
        for p in matrices:
            p.grad = None  # the base steps all others
        self.base.step()
        for p, grad in zip(matrices, grads, strict=True):
            p.grad = grad
        turn_([direction for _, directions, _ in own for direction in directions])
        for params, directions, lr in own:
            torch._foreach_mul_(directions, lr)
            torch._foreach_sub_(params, directions)

    def _directions(self, group: dict[str, Any], params: Sequence[Tensor]) -> list[Tensor]:
        """Return what torch.optim.SGD would subtract from these parameters at a learning rate of 1, with its momentum gone on."""
        found = [p.grad for p in params if p.grad is not None]
        grads = list(torch._foreach_neg(found)) if group["maximize"] else found
        if group["weight_decay"]:
            grads = list(torch._foreach_add(grads, list(params), alpha=group["weight_decay"]))
        if not group["momentum"]:
            return copies(grads)
        buffers = [self.state[p].get("momentum_buffer") for p in params]
        going = [i for i, buffer in enumerate(buffers) if buffer is not None]
        if going:
            own = [buffers[i] for i in going]
            torch._foreach_mul_(own, group["momentum"])
            torch._foreach_add_(own, [grads[i] for i in going], alpha=1 - group["dampening"])
        for p, buffer, grad in zip(params, buffers, grads, strict=True):
            if buffer is None:  # the first step has no dampening
                self.state[p]["momentum_buffer"] = grad.detach().clone()
        states = [self.state[p]["momentum_buffer"] for p in params]
        return list(torch._foreach_add(grads, states, alpha=group["momentum"])) if group["nesterov"] else copies(states)

    def state_dict(self) -> dict[str, Any]:
        """The base's state: there is none beside it."""
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a base, wrapped or not, stood."""
        self.base.load_state_dict(state_dict)

    def _align(self) -> None:
        if self._world > 1:
            for handle in [dist.broadcast(p, 0, async_op=True) for p in self.matrices()]:
                assert handle is not None
                handle.wait()


def turn_(updates: Sequence[Tensor]) -> None:
    """Give each update its orthogonal direction at its own length (Frobenius norm), in place; zeros stay zeros.

    Matrices with the same shorter side are multiplied together (`batches`), on a GPU in bfloat16 as Muon does it, else in
    float32, or float64 for float64.

    Args:
        updates: of two dimensions or more, of which the first are the rows of the matrix.
    """
    for (_, dtype), indices in alike(updates).items():
        own = [updates[i] for i in indices]
        device = placement.on_device(own[0])
        lengths = torch._foreach_norm(own, 2, dtype=wide(dtype))
        padding, most = (PADDING, TOGETHER[0]) if device else (1.0, TOGETHER[1])
        for batch in batches([_sides(u) for u in own], padding=padding, most=most):
            stacked = torch.stack([lengths[i] for i in batch])
            _turn_together_([own[i] for i in batch], stacked, ON_GPU if device else wide(dtype))


def batches(sides: Sequence[tuple[int, int]], *, padding: float, most: int) -> list[list[int]]:
    """Return the positions of the matrices that are multiplied together, filled up with zeros to the longest of them.

    Args:
        sides: (shorter, longer) side of each matrix; the shorter ones of a batch are the same.
        padding: elements of a batch over those of its matrices, at most; 1: the longer ones are the same too.
        most: elements of a batch; a single matrix may have more.
    """
    found: list[list[int]] = []
    for index in sorted(range(len(sides)), key=lambda i: sides[i], reverse=True):
        batch = [*found[-1], index] if found else [index]
        short, longest = sides[batch[0]]
        filled, there = longest * len(batch), sum(sides[i][1] for i in batch)
        if found and sides[index][0] == short and filled <= padding * there and short * filled <= most:
            found[-1] = batch
        else:
            found.append([index])
    return found


def _turn_together_(updates: Sequence[Tensor], lengths: Tensor, dtype: torch.dtype) -> None:
    """Turn updates whose shorter sides are the same, (k,) long, in one batch of `dtype`."""
    sides = [_sides(u) for u in updates]
    short, longest = sides[0][0], max(long for _, long in sides)
    new = updates[0].new_empty if all(long == longest for _, long in sides) else updates[0].new_zeros
    if updates[0].shape[0] > short:  # as it lies in memory
        work = new((len(updates), longest, short), dtype=dtype).mT
    else:
        work = new((len(updates), short, longest), dtype=dtype)
    torch._foreach_copy_(_views(work, updates), list(updates))
    direction = orthogonalised(work)
    norms = torch.linalg.vector_norm(direction, dim=(1, 2), keepdim=True, dtype=lengths.dtype)
    scales = lengths.view(-1, 1, 1) / norms.clamp_(min=torch.finfo(norms.dtype).tiny)
    torch._foreach_copy_(list(updates), _views(direction * scales, updates))


def _sides(update: Tensor) -> tuple[int, int]:
    rows, columns = update.shape[0], math.prod(update.shape[1:])
    return min(rows, columns), max(rows, columns)


def _views(batch: Tensor, updates: Sequence[Tensor]) -> list[Tensor]:
    """Return the matrices of a batch, (k, shorter, longest), in the shapes of the updates."""
    views = []
    for matrix, update in zip(batch.unbind(), updates, strict=True):
        short, long = _sides(update)
        tall = update.shape[0] > short
        own = matrix[:, :long].T if tall else matrix[:, :long]
        views.append(own.unflatten(1, update.shape[1:]))
    return views


def orthogonalised(matrices: Tensor) -> Tensor:
    """Return about U V^T of each matrix U S V^T: Newton-Schulz iteration with Muon's coefficients.

    Args:
        matrices: (k, m, n), m at most n; columns of zeros stay zeros and change nothing else.
    """
    # all singular values are at most 1 then
    work: Tensor = matrices / torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True).clamp_(min=1e-30)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = torch.bmm(work, work.mT)
        work = torch.baddbmm(work, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), work, beta=a)
    return work


def _is_turned(param: Tensor) -> bool:
    if param.ndim < 2 or not param.requires_grad:
        return False
    return 1 < _sides(param)[0] <= WIDEST


def _spared(model: nn.Module) -> Iterator[Tensor]:
    """Weights that are no linear map of what comes in: tables, and filters that see one channel each."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) or (
            isinstance(module, nn.modules.conv._ConvNd) and module.groups == module.in_channels > 1
        ):
            yield module.weight
