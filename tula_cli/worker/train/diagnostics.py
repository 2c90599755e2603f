"""Statistics of gradients per step and per epoch: the values behind Figures 5 to 8 of the paper.

Norms are collected as tensors on the device and read when a row of steps is written, so that no step waits for them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tula_cli.optim import TulaOptimizer, sharding
from tula_cli.run.step_series import StepRow, round_value
from tula_cli.worker.train.loop import Step, Trainer

QUANTILES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}
HISTOGRAM_EDGES = tuple(2.0 ** (half / 2) for half in range(-20, 15))
"""Edges of the histogram of factors: half octaves from 2^-10 to 2^7. There is one more bin on each side."""

_HISTOGRAM_CHUNK_ELEMENTS = 2**20  # elements sorted into bins at a time; their bin numbers need as much memory again


@dataclass(frozen=True)
class _UnreadStep:
    """A step whose values are still on the device."""

    samples: int  # samples trained at the end of the step
    batch: int
    lr: float
    square: Tensor | None  # |G|^2, 0-dim; None if GradScaler skipped the step
    change: Tensor | None = None  # Delta(G) as the optimizer saw it, 0-dim
    scaled: Tensor | None = None  # 0-dim, bool
    factor: Tensor | float | None = None  # mean of the scaling factors used in the step, 0-dim


@dataclass
class Diagnostics:
    """The norms of the averaged gradient, step by step; for post-local SGD after its switch, those of rank 0.

    A method that scales gradients has these norms already, in TulaOptimizer, at no cost. With `train.diagnostics:
    [gradient_norms]` they are also computed for other methods: one pass over the gradients, before they are clipped.
    """

    computes_norms: bool = False  # whether norms are computed here, not taken from TulaOptimizer
    square: Tensor | None = None  # |G|^2 of the newest step, if computes_norms
    last: Tensor | None = None  # Delta(G) of TulaOptimizer at the newest step; the same object if it was skipped
    factor: Tensor | float | None = None  # mean of the scaling factors of the coming step; None without factors
    refreshes_recorded: int = -1  # number of refreshes when `factor` was read; -1 if it is None
    waiting: list[_UnreadStep] = field(default_factory=list)  # steps whose values are not yet read from the device
    rows: list[StepRow] = field(default_factory=list)  # rows not yet returned by `pop_rows`
    newest: StepRow | None = None
    norms: list[float] = field(default_factory=list)  # |G| of each step of the current epoch; nan if missing
    changes: list[float] = field(default_factory=list)  # Delta(G), likewise

    @classmethod
    def attach(cls, trainer: Trainer) -> "Diagnostics | None":
        """Return the diagnostics of a trainer; None if nothing is to be collected on this rank."""
        ags = _find_scaling_optimizer(trainer)
        computes_norms = ags is None and "gradient_norms" in trainer.spec.train.diagnostics
        # Rank 0's gradient suffices, also for post-local SGD; for a sharded model all ranks must take part.
        if not trainer.ranks.is_first:
            if trainer.parallel.needs_all_ranks and computes_norms:
                trainer.on_gradient = _compute_squared_norm
            return None
        diagnostics = cls()
        if ags is not None:
            diagnostics._update_factor_mean(ags)
            return diagnostics
        if not computes_norms:
            return None
        diagnostics.computes_norms, trainer.on_gradient = True, diagnostics.record_norm
        return diagnostics

    def resume(self, newest: StepRow | None, samples: int) -> None:
        """Continue after a row of an earlier attempt, if it ends where this attempt starts."""
        self.newest = newest if newest is not None and newest.samples == samples else None

    def record_norm(self, trainer: Trainer) -> None:
        """Compute the norm of the gradient of the coming update: averaged, unless post-local SGD has switched."""
        square = _compute_squared_norm(trainer)
        # Divide the squared norm by the loss scale instead of unscaling the gradients, which would change the step.
        scale = trainer.scaler.get_scale() if trainer.scaler.is_enabled() else 1.0
        self.square = None if square is None else square / scale**2

    def record_step(self, trainer: Trainer, step: Step) -> None:
        """Record a finished step; TulaOptimizer has no values of a step that GradScaler skipped."""
        samples, batch, lr = trainer.position.samples, step.batch, step.lr
        if self.computes_norms:
            self.waiting.append(_UnreadStep(samples, batch, lr, self.square))
            self.square = None
        elif (ags := _find_scaling_optimizer(trainer)) is not None:
            gate = ags.gate
            # The gate of a step that GradScaler skipped has no values, or still those of the step before.
            has_new_values = gate.change is not None and gate.change is not self.last
            gate_values = (gate.square, gate.change, gate.scaled) if has_new_values else (None, None, None)
            self.waiting.append(_UnreadStep(samples, batch, lr, *gate_values, self.factor))
            self.last = gate.change
            self._update_factor_mean(ags)

    def _update_factor_mean(self, ags: TulaOptimizer) -> None:
        """Update the mean of the factors that act from the coming step on, if the factors have changed."""
        factors = ags.factors
        if not factors.has_factors:
            self.factor, self.refreshes_recorded = None, -1
        elif factors.n_refresh != self.refreshes_recorded:
            self.factor, self.refreshes_recorded = factors.mean, factors.n_refresh

    def pop_rows(self) -> list[StepRow]:
        """Return the rows of the steps since the last call; waits for the device."""
        self._read_unread_steps()
        rows, self.rows = self.rows, []
        return rows

    def _read_unread_steps(self) -> None:
        waiting, self.waiting = self.waiting, []
        squares, changes = _read_numbers([s.square for s in waiting]), _read_numbers([s.change for s in waiting])
        shares, factors = _read_numbers([s.scaled for s in waiting]), _read_numbers([s.factor for s in waiting])
        for at, unread in enumerate(waiting):
            square, scaled = squares[at], shares[at]
            norm = round_value("norm", None if square is None else math.sqrt(square))
            row = StepRow.from_step(
                samples=unread.samples,
                batch=unread.batch,
                lr=unread.lr,
                norm=norm,
                delta=changes[at] if unread.change is not None else self._compute_relative_change(norm, unread.batch),
                scaled=None if scaled is None else bool(scaled),
                factor=factors[at],
            )
            self.rows.append(row)
            if square is not None:
                self.norms.append(math.nan if norm is None else norm)
                self.changes += [] if row.delta is None else [row.delta]
            if norm is not None:
                self.newest = row

    def _compute_relative_change(self, norm: float | None, batch: int) -> float | None:
        """Return Delta(G), Eq. 5; None for the first step of all, and if the previous step had another batch."""
        previous = self.newest
        if norm is None or previous is None or not previous.last or previous.batch != batch:
            return None
        return float(abs(norm**2 - previous.last**2) / previous.last**2)

    def report(self, trainer: Trainer, *, scaled: float | None) -> dict[str, Any]:
        """Return the values of the epoch for its row of metrics.jsonl, and start the next epoch.

        Args:
            scaled: share of the steps whose gradients were scaled; None if the method scales none.

        Returns:
            "steps"; "norm", the quantiles of |G| over the steps, and "delta", those of Delta(G) (Eq. 5), over finite
            values; "scaled"; and "factors", the histogram of the current factors: "edges", and "counts" of elements (or
            tensors), one more than edges, with those below and above all edges at its ends.
        """
        self._read_unread_steps()
        ags = _find_scaling_optimizer(trainer)
        factors = ags.factors.tensors if ags else []
        norms, changes = self.norms, self.changes
        self.norms, self.changes = [], []
        return {
            "steps": len(norms),
            "norm": _compute_quantiles(norms),
            "delta": _compute_quantiles(changes),
            "scaled": scaled,
            "factors": {"edges": list(HISTOGRAM_EDGES), "counts": count_elements_per_bin(factors)} if factors else None,
        }


def _read_numbers(numbers: Sequence[Tensor | float | None]) -> list[float | None]:
    """Return values that are on the device as numbers, in a single transfer."""
    tensors = [value for value in numbers if isinstance(value, Tensor)]
    read = iter(torch.stack(tensors).double().cpu().tolist() if tensors else ())
    return [next(read) if isinstance(value, Tensor) else value for value in numbers]


def _compute_squared_norm(trainer: Trainer) -> Tensor | None:
    """Return the squared norm of the gradient; if the model is sharded, every rank must call this."""
    gradients = [sharding.get_local_shard(p.grad) for p in trainer.parallel.parameters() if p.grad is not None]
    if not gradients:
        return None
    return trainer.parallel.compute_squared_norm(gradients)


def _find_scaling_optimizer(trainer: Trainer) -> TulaOptimizer | None:
    return None if trainer.ags is None or trainer.ags.identity else trainer.ags


def _compute_quantiles(values: Sequence[float]) -> dict[str, float] | None:
    finite = torch.tensor(values, dtype=torch.float64)
    finite = finite[finite.isfinite()]
    if not len(finite):
        return None
    quantiles = torch.quantile(finite, torch.tensor(list(QUANTILES.values()), dtype=finite.dtype))
    return dict(zip(QUANTILES, quantiles.tolist(), strict=True))


def count_elements_per_bin(tensors: Sequence[Tensor]) -> list[int]:
    """Return the number of elements in each bin: len(HISTOGRAM_EDGES) + 1 counts; an edge belongs to the bin above it."""
    total = torch.zeros(len(HISTOGRAM_EDGES) + 1, dtype=torch.int64)
    for tensor in tensors:
        edges = torch.tensor(HISTOGRAM_EDGES, dtype=tensor.dtype, device=tensor.device)
        for chunk in tensor.detach().flatten().split(_HISTOGRAM_CHUNK_ELEMENTS):
            bins = torch.bucketize(chunk, edges, out_int32=True, right=True)
            total += torch.bincount(bins, minlength=len(total)).cpu()
    return [int(count) for count in total.tolist()]
