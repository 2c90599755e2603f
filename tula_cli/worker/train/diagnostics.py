"""What the gradients of an epoch were like: the numbers behind Figures 5 to 8 of the paper.

Norms are gathered as tensors on the device and read once an epoch, so that no step waits for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tula_cli.optim import TulaOptimizer
from tula_cli.optim.parts import shares
from tula_cli.optim.parts.indicators import squared_norm
from tula_cli.worker.parallel.sharded import Sharded
from tula_cli.worker.train.loop import Trainer

QUANTILES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}
EDGES = tuple(2.0 ** (half / 2) for half in range(-20, 15))
"""Of the histogram of factors: half octaves from 2^-10 to 2^7. Beyond these there is one bin on each side."""

_CHUNK = 2**20  # elements that are sorted into bins at a time: their bins take as much memory again


@dataclass
class Diagnostics:
    """The norms of the averaged gradient, of one epoch at a time; of post-local SGD after its switch, rank 0's own.

    Of a method that scales gradients they are TulaOptimizer's own, which cost nothing. With `train.diagnostics` they are
    also taken where the method does not need them: one pass over the gradients, before they are clipped.
    """

    squares: list[Tensor] = field(default_factory=list)  # |G|^2 of the steps, 0-dim
    changes: list[Tensor] = field(default_factory=list)  # Delta(G) as the optimizer saw it
    last: Tensor | None = None  # |G|^2 of the newest step, also across the end of an epoch

    @classmethod
    def attach(cls, trainer: Trainer) -> "Diagnostics | None":
        """Return the diagnostics of a trainer; None where nothing is to be gathered on this rank."""
        # The averaged gradient is the same on all ranks; post-local SGD's is not, after its switch. Shares need them all.
        if not trainer.ranks.first:
            if isinstance(trainer.parallel, Sharded) and trainer.spec.train.diagnostics and _acting(trainer) is None:
                trainer.on_gradient = _squared_norm
            return None
        if _acting(trainer) is not None:
            return cls()
        if not trainer.spec.train.diagnostics:
            return None
        found = cls()
        trainer.on_gradient = found.see
        return found

    def see(self, trainer: Trainer) -> None:
        """Take the norm of the gradient that a step is about to use: averaged, unless post-local SGD has switched."""
        square = _squared_norm(trainer)
        if square is not None:
            # Divided as a number and not as a gradient: the step stays what it was.
            scale = trainer.scaler.get_scale() if trainer.scaler.is_enabled() else 1.0
            self.squares.append(square / scale**2)

    def follow(self, trainer: Trainer) -> None:
        """Take what TulaOptimizer has seen in the step that is over; one that GradScaler skipped has left nothing."""
        ags = _acting(trainer)
        if ags is None or ags.gate.square is None or ags.gate.change is None or ags.gate.square is self.last:
            return
        self.last = ags.gate.square
        self.squares.append(ags.gate.square)
        self.changes.append(ags.gate.change)

    def report(self, trainer: Trainer, *, scaled: float | None) -> dict[str, Any]:
        """Return the numbers of the epoch for its row of metrics.jsonl, and start the next one.

        Args:
            trainer: whose factors are counted.
            scaled: share of the steps whose gradients were scaled; None where the method scales none.

        Returns:
            "steps"; "norm", the quantiles of |G| over the steps, and "delta", those of Delta(G) (Eq. 5), as far as they
            are finite; "scaled"; and "factors", the histogram of the factors as they are now: "edges", and "counts" of
            elements (or tensors), one more, with those below and above all edges at its ends.
        """
        squares = torch.stack(self.squares).double().cpu() if self.squares else torch.empty(0)
        finite = squares[squares.isfinite()]
        delta = torch.stack(self.changes).double().cpu() if self.changes else self._changes(finite)
        ags = _acting(trainer)
        factors = ags.factors.values if ags else []
        self.squares, self.changes = [], []
        return {
            "steps": len(squares),
            "norm": _quantiles(finite.sqrt()),
            "delta": _quantiles(delta),
            "scaled": scaled,
            "factors": {"edges": list(EDGES), "counts": histogram(factors)} if factors else None,
        }

    def _changes(self, squares: Tensor) -> Tensor:
        """Return Delta(G) of steps whose norms were gathered here; the first of all has none."""
        before = squares if self.last is None else torch.cat([self.last[None], squares])
        if len(squares):
            self.last = squares[-1]
        return ((before[1:] - before[:-1]) / before[:-1]).abs()


def _squared_norm(trainer: Trainer) -> Tensor | None:
    """Return the squared norm of the gradient; every rank takes part where each holds a share of it."""
    gradients = [shares.share(p.grad) for p in trainer.parallel.parameters() if p.grad is not None]
    if not gradients:
        return None
    return shares.squared_norm(gradients) if isinstance(trainer.parallel, Sharded) else squared_norm(gradients)


def _acting(trainer: Trainer) -> TulaOptimizer | None:
    return None if trainer.ags is None or trainer.ags.identity else trainer.ags


def _quantiles(values: Tensor) -> dict[str, float] | None:
    known = values[values.isfinite()]
    if not len(known):
        return None
    found = torch.quantile(known, torch.tensor(list(QUANTILES.values()), dtype=known.dtype))
    return dict(zip(QUANTILES, found.tolist(), strict=True))


def histogram(tensors: Sequence[Tensor]) -> list[int]:
    """Return how many elements lie in each bin: len(EDGES) + 1 counts; an edge belongs to the bin above it."""
    total = torch.zeros(len(EDGES) + 1, dtype=torch.int64)
    for tensor in tensors:
        edges = torch.tensor(EDGES, dtype=tensor.dtype, device=tensor.device)
        for part in tensor.detach().flatten().split(_CHUNK):
            bins = torch.bucketize(part, edges, out_int32=True, right=True)
            total += torch.bincount(bins, minlength=len(total)).cpu()
    return [int(count) for count in total.tolist()]
