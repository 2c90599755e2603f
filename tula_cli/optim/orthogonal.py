"""Orthogonalised steps: as long as SGD's, in Muon's direction (Jordan et al. 2024), so that SGD's learning rate fits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .parts.indicators import clip_, wide
from .parts.refusals import place, refuse_sharded
from .parts.wrapper import Wrapper

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd polynomial that Muon iterates: it is steep at 0 and stays around 1, rather than converging to it."""
ITERATIONS = 5

WIDEST = 2048
"""A matrix whose shorter side is longer keeps the base's step: its multiplications would outweigh the training's."""

ALIGN_EVERY = 100
"""Steps after which rank 0's matrices are handed out, should other hardware round products otherwise."""


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
        if "SGD" not in {kind.__name__ for kind in type(base).__mro__}:
            raise ValueError(
                f"the steps of {type(base).__name__} have no length that a direction could take over; use torch.optim.SGD"
            )
        refuse_sharded(base, model, "Ortho")
        super().__init__(base)
        self.max_grad_norm = max_grad_norm
        self._spared = frozenset(map(id, _spared(model)))
        _, self._world = place(model)
        self._steps = 0

    def matrices(self) -> list[Tensor]:
        """The parameters whose steps are turned, in the order of the groups."""
        params = (p for group in self.param_groups for p in group["params"])
        return [p for p in params if id(p) not in self._spared and _is_turned(p)]

    def _drop(self) -> None:
        """There is nothing to forget: a step needs nothing beside the gradients."""

    def _update(self) -> None:
        """One step of the base, turned. One copy of the matrices more."""
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.max_grad_norm is not None and grads:
            clip_(grads, self.max_grad_norm)
        before = [(p, p.clone()) for p in self.matrices() if p.grad is not None]
        self.base.step()
        for param, start in before:
            param.copy_(start.add_(turned(param - start)))
        self._steps += 1
        if self._steps % ALIGN_EVERY == 0:
            self._align()

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


def turned(update: Tensor) -> Tensor:
    """Return an update's orthogonal direction at its own length (Frobenius norm); zeros stay zeros.

    Args:
        update: two dimensions or more, of which the first are the rows of the matrix.
    """
    direction = orthogonalised(update.flatten(1)).to(wide(update.dtype))
    length = update.norm(dtype=wide(update.dtype)) / direction.norm().clamp(min=torch.finfo(direction.dtype).tiny)
    result: Tensor = (direction * length).to(update.dtype).view_as(update)
    return result


def orthogonalised(matrix: Tensor) -> Tensor:
    """Return about U V^T of a matrix U S V^T: Newton-Schulz iteration with Muon's coefficients, (m, n) as the matrix.

    On a GPU in bfloat16, as Muon does it; else in float32, or float64 for float64.
    """
    work = matrix.to(torch.bfloat16 if matrix.is_cuda else wide(matrix.dtype))
    tall = work.shape[0] > work.shape[1]
    if tall:
        work = work.T
    work = work / work.norm().clamp(min=1e-30)  # all singular values are at most 1 then
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = work @ work.T
        work = torch.addmm(work, torch.addmm(gram, gram, gram, beta=b, alpha=c), work, beta=a)
    return work.T if tall else work


def _is_turned(param: Tensor) -> bool:
    if param.ndim < 2 or not param.requires_grad:
        return False
    rows, columns = param.shape[0], math.prod(param.shape[1:])
    return 1 < min(rows, columns) <= WIDEST


def _spared(model: nn.Module) -> Iterator[Tensor]:
    """Weights that are no linear map of what comes in: tables, and filters that see one channel each."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) or (
            isinstance(module, nn.modules.conv._ConvNd) and module.groups == module.in_channels > 1
        ):
            yield module.weight
