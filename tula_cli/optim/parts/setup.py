"""The training that an optimizer serves, as far as its factors depend on it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import indicators, shares
from .indicators import factor_limit
from .refusals import place, whole_numbers
from .small_batch import SmallLoss, draw_counts, small_gradients


def embeddings(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights of a model's embeddings, and so of heads that are tied to them."""
    found = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    return [parameter for module in found for parameter in module.parameters()]


@dataclass(frozen=True)
class Setup:
    """An optimizer's model, the sizes of its batches over all ranks, and where this process stands among them."""

    base: torch.optim.Optimizer
    model: nn.Module
    rank: int
    world: int
    b_large: int
    b_small: int  # as asked for
    available: int  # samples that one rank can offer to the small batch
    steps_per_epoch: int | None
    seed: int
    excluded: frozenset[Tensor] = frozenset()  # parameters whose factor is always 1
    sharded: bool = False  # each rank holds a part of every parameter and gradient (fully_shard)

    @classmethod
    def of(
        cls,
        base: torch.optim.Optimizer,
        model: nn.Module,
        *,
        b_large: int,
        b_small: int,
        available: int | None,
        steps_per_epoch: int | None,
        seed: int,
        exclude: Iterable[Tensor] | None = None,
    ) -> Setup:
        """Fill in what the process group and the batch tell.

        Raises:
            ValueError: a size that is no whole number or below 1, a small batch above the large one, a DDP over another
                process group, or nothing that is left to scale.
        """
        whole_numbers(b_large=b_large, b_small=b_small, available=available, steps_per_epoch=steps_per_epoch)
        rank, world = place(model)
        share = max(1, b_large // world) if available is None else available
        for name, value in (("b_large", b_large), ("b_small", b_small), ("available", share)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1 sample, got {value}")
        if b_small > b_large:
            raise ValueError(
                f"b_small, {b_small}, is above b_large, {b_large}: the small batch is a part of the large one"
            )
        left, sharded = frozenset(embeddings(model) if exclude is None else exclude), shares.is_sharded(model)
        found = cls(base, model, rank, world, b_large, b_small, share, steps_per_epoch, seed, left, sharded)
        if found.excluded and found.excluded.issuperset(found.params):
            raise ValueError("exclude leaves no parameter to scale (without it embeddings are left out)")
        return found

    @property
    def params(self) -> list[Tensor]:
        """The base's parameters, in the order of its groups."""
        return [p for group in self.base.param_groups for p in group["params"]]

    @property
    def small_batch_size(self) -> int:
        """Samples, over all ranks, that a small batch really has: `b_small` as far as the ranks hold it."""
        return sum(draw_counts(self.b_small, self.available, self.world, 0))

    @property
    def limit(self) -> float:
        """s_max = sqrt(b_large / b_small) (line 12), of the small batch that is really taken."""
        return factor_limit(self.b_large, self.small_batch_size)

    def norms(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """The l2 norm of each gradient, 0-dim, the same on all ranks; of parts, all of which take part."""
        return shares.norms(grads) if self.sharded else indicators.norms(grads)

    def squared_norm(self, grads: Sequence[Tensor]) -> Tensor:
        """The squared l2 norm over all gradients together, likewise."""
        return shares.squared_norm(grads) if self.sharded else indicators.squared_norm(grads)

    def small_gradients(
        self, loss: SmallLoss, params: Sequence[Tensor], *, turn: int, step: int, scaler: torch.amp.GradScaler | None
    ) -> list[Tensor | None]:
        """The small batch's gradient, the same on all ranks (`small_batch.small_gradients`), or this rank's part of it.

        Args:
            turn: refreshes so far: the ranks that hold the small batch take turns.
            step: optimizer steps so far: with seed and rank it seeds what the forward pass draws.
        """
        seed = random.Random(f"{self.seed}, {step}, {self.rank}").getrandbits(63)
        size = self.small_batch_size
        # where every rank has to compute, each takes its share
        available = -(-size // self.world) if self.sharded else self.available
        counts = draw_counts(size, available, self.world, turn)
        return small_gradients(
            loss,
            self.model,
            params,
            counts=counts,
            rank=self.rank,
            seed=seed,
            scaler=scaler,
            sharded=self.sharded,
        )
