"""How the factors of TulaOptimizer are found, and those in force (lines 10 to 18 of Algorithm 1, and Eq. 8)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .parts.factor_source import Factors
from .parts.indicators import Bounds, element_factor, local_factors, smoothed, tensor_factors, where_, wide
from .parts.local_norms import NormListener
from .parts.reduction import listen
from .parts.refresh_schedule import Refresh, Schedule
from .parts.refusals import distributed, one_of, real_numbers
from .parts.setup import Setup
from .parts.small_batch import SmallLoss, are_finite

Per = Literal["element", "tensor"]


class Static(Factors):
    """One factor for all gradients (Eq. 8), so that no small batch is needed.

    Args:
        factor: None: sqrt(b_large / b_small), the most that AGS would take, and at least 1.

    Raises:
        ValueError: a factor that is no number above 0.
    """

    kind = "static"

    def __init__(self, factor: float | None = None) -> None:
        real_numbers(factor=factor)
        if factor is not None and not 0 < factor < math.inf:
            raise ValueError(f"factor must be above 0, got {factor}")
        self.reads_b_small = factor is None
        self.factor = factor

    @property
    def _number(self) -> float:
        return max(1.0, self.setup.limit) if self.factor is None else self.factor

    @property
    def mean(self) -> float:
        return self._number

    @property
    def identity(self) -> str | None:
        return "AGS leaves the gradients as they are: its factor is 1" if self._number == 1 else None

    @property
    def bounds(self) -> Bounds:
        """The factor, and 1, which a step that is not scaled has."""
        return Bounds(min(1.0, self._number), max(1.0, self._number))

    @property
    def ready(self) -> bool:
        return True

    def in_force(self, params: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        kinds = {p: (p.device, wide(p.dtype)) for p in params}
        # full(), since tensor() would wait for the device
        common = {k: torch.full((), self._number, device=k[0], dtype=k[1]) for k in set(kinds.values())}
        return {p: common[kind] for p, kind in kinds.items()}

    def spread(self) -> dict[str, float]:
        return {"factors": 1.0, "mean": self._number, "at_cap": 0.0, "at_floor": 0.0}


class SmallBatch(Factors):
    """The ratio of a small batch's gradient to the large one's at the same weights (line 16), by an extra pass.

    It is taken at every refresh and used from the next step on; until the first refresh the factors are 1.

    Args:
        per: "element", a factor for each element (line 16 as printed), or "tensor", one for each parameter.
        refresh: "epoch", at the last step of each epoch, or k, at every k-th step.
        s_min: lower bound of the factors, 0 to 1; 0 is the paper's listing, Lemma 1 needs more than 0.
        eps: the stability term of line 16.
        ema: keeps a moving average of the factors over refreshes, with this weight of the past.

    Attributes:
        schedule: when the next refresh is.

    Raises:
        ValueError: an argument of another kind or out of range.
    """

    kind = "small_batch"

    def __init__(
        self,
        per: Per = "element",
        *,
        refresh: Refresh = "epoch",
        s_min: float = 1e-3,
        eps: float = 1e-8,
        ema: float = 0.0,
    ) -> None:
        real_numbers(s_min=s_min, eps=eps, ema=ema)
        one_of("per", per, ("element", "tensor"))
        if not 0 <= s_min <= 1:
            raise ValueError(f"s_min must be between 0 and 1, got {s_min}")
        if not 0 <= eps < math.inf:
            raise ValueError(f"eps must not be negative or NaN, got {eps}")
        if not 0 <= ema < 1:
            raise ValueError(f"ema must be at least 0 and below 1, got {ema}")
        self.per, self.refresh, self.s_min, self.eps, self.ema = per, refresh, s_min, eps, ema
        self.schedule = Schedule.of(refresh, None)
        self._factor: dict[Tensor, Tensor] = {}
        self._found: dict[Tensor, Tensor] | None = None
        self._staged: dict[Tensor, Tensor] | None = None
        self._finite: Tensor | None = None  # whether what is staged is; 0-dim, bool
        self._answered = self._warned = False

    def bind(self, setup: Setup) -> None:
        super().bind(setup)
        self.schedule = Schedule.of(self.refresh, setup.steps_per_epoch)
        if setup.sharded and self.per == "element":
            raise ValueError(f'a model in shares has factors of tensors alone: {type(self).__name__}(per="tensor")')
        if self.reads_b_small and setup.world > 1 and _synchronises_statistics(setup.model):
            raise ValueError(
                "SyncBatchNorm needs every rank in a forward pass, and few take the small batch: use LocalNorms()"
                " (ags.source: local_norms), which needs no such pass"
            )

    @property
    def identity(self) -> str | None:
        size, large = self.setup.small_batch_size, self.setup.b_large
        if size < large:
            return None
        return (
            f"AGS leaves the gradients as they are: its small batch of {size} samples is not below the batch of {large}"
        )

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.s_min, self.limit)

    @property
    def ready(self) -> bool:
        return bool(self._factor)

    @property
    def values(self) -> list[Tensor]:
        return list(self._factor.values())

    @property
    def due(self) -> bool:
        return self.identity is None and self.schedule.due

    @property
    def wants_small_batch(self) -> bool:
        return self.reads_b_small and self.due

    def change(self, setup: Setup) -> None:
        super().change(setup)
        self.drop()
        self._factor = {}
        self.schedule.restart()
        self.refresh_soon()

    def start_epoch(self, steps: int, *, rest: bool | None) -> None:
        self.schedule.start(steps, rest=rest)

    def refresh_soon(self) -> None:
        self.schedule.owe()

    def in_force(self, params: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        return {p: self._factor[p] for p in params if p in self._factor}

    def take(
        self, loss: SmallLoss, params: Sequence[Tensor], *, step: int, scaler: torch.amp.GradScaler | None
    ) -> None:
        self.drop()
        self._answered = True
        grads = self.setup.small_gradients(loss, params, turn=self.n_refresh, step=step, scaler=scaler)
        staged = {p: g for p, g in zip(params, grads, strict=True) if g is not None}
        if self.per == "tensor":  # nothing but the norms is needed, so the gradient is let go at once
            staged = dict(zip(staged, self.setup.norms(list(staged.values())), strict=True))
        self._finite = are_finite(list(staged.values())) if staged else None
        # what each step refreshes waits for nothing, and what is not finite stays as it is (`_kept`)
        if self._each_step or self._finite is None or bool(self._finite):
            self._staged = staged

    def find(self, grads: Mapping[Tensor, Tensor]) -> None:
        self._found = self._averaged(self._compute_factors(grads))

    def _averaged(self, factors: dict[Tensor, Tensor] | None) -> dict[Tensor, Tensor] | None:
        if factors is None or not self.ema:
            return factors
        repeated = [p for p in factors if p in self._factor]
        new, old = [factors[p] for p in repeated], [self._factor[p] for p in repeated]
        return factors | dict(zip(repeated, smoothed(new, old, self.ema) if repeated else [], strict=True))

    def _compute_factors(self, grads: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor] | None:
        """The new factors; None where a refresh that was due has to wait."""
        staged, self._staged = self._staged, None
        if staged is None:
            return None
        params = [p for p in staged if p in grads and not grads[p].is_sparse]
        if self.per == "tensor":
            # of norms, whose norms are themselves
            large = self.setup.norms([grads[p] for p in params])
            factors = tensor_factors([staged[p] for p in params], large, self.eps, self.bounds)
            return dict(zip(params, self._replace_non_finite(params, factors), strict=True))
        # one by one, so that small gradients and factors never are two copies; what came through a collective is ours
        is_distributed = self.setup.world > 1
        found: dict[Tensor, Tensor] = {}
        for p in params:
            factor = element_factor(staged.pop(p), grads[p], self.eps, self.bounds, overwrite=is_distributed)
            (found[p],) = self._replace_non_finite([p], [factor])
        return found

    @property
    def _each_step(self) -> bool:
        return self.refresh == 1

    def _replace_non_finite(self, params: Sequence[Tensor], factors: Sequence[Tensor]) -> list[Tensor]:
        """The factors so far, 1 where there are none, in place of those of a gradient that was not finite."""
        if not self._each_step or self._finite is None:
            return list(factors)
        previous = [
            self._factor[p] if p in self._factor else s.new_ones(()) for p, s in zip(params, factors, strict=True)
        ]
        return where_(factors, previous, self._finite)

    def advance(self) -> None:
        if self.due and not self._answered and not self._warned:
            self._warned = True
            warnings.warn(f"an AGS refresh was due, but {self._missing}: the factors stay as they are", stacklevel=2)
        factors = self._found
        if factors is not None:
            self._factor = factors
            self.n_refresh += 1
        self.drop()
        if self.identity is None:
            self.schedule.advance(refreshed=factors is not None)

    @property
    def _missing(self) -> str:
        return "small_batch() was not called"

    def drop(self) -> None:
        self._staged = self._found = self._finite = None
        self._answered = False

    def memory(self) -> int:
        params = [
            p for p in self.setup.params if p.requires_grad and self.identity is None and p not in self.setup.excluded
        ]
        if self.per == "tensor":
            return sum(wide(p.dtype).itemsize for p in params)
        return sum(p.numel() * p.element_size() for p in params)

    def spread(self) -> dict[str, float]:
        total, cap, floor, mean = 0, 0, 0, 0.0
        for factor in self._factor.values():
            low, high = self.bounds.rounded(factor.dtype)
            total += factor.numel()
            mean += float(factor.double().sum())
            cap += int((factor >= high).sum())
            floor += int((factor <= low).sum())
        if not total:
            return {"factors": 0.0, "mean": 1.0, "at_cap": 0.0, "at_floor": 0.0}
        return {"factors": float(total), "mean": mean / total, "at_cap": cap / total, "at_floor": floor / total}

    def meaning(self) -> dict[str, Any]:
        return super().meaning() | {"per": self.per, "ema": self.ema}

    def state_dict(self) -> dict[str, Any]:
        index = {p: i for i, p in enumerate(self.setup.params)}
        scale = {index[p]: s for p, s in self._factor.items()}
        return {"n_refresh": self.n_refresh, "scale": scale, "schedule": self.schedule.position()}

    def load_state_dict(self, state: Mapping[str, Any], *, void: bool) -> None:
        self.drop()
        self.n_refresh, self._factor = state.get("n_refresh", 0), {}
        if void:
            self.schedule.restart()
            return
        self.schedule.resume(state["schedule"])
        params = self.setup.params
        self._factor = {params[i]: _match_layout(s, params[i]) for i, s in state["scale"].items()}


class LocalNorms(SmallBatch):
    """One factor a tensor, from the gradients that the ranks hold before they are averaged: no extra pass.

    One all-reduce of a number a tensor, and factors of at most sqrt(ranks). The small batch is each rank's own, and
    `b_small` only says from which b_large on AGS acts. In one process it needs the extra pass all the same. Accumulate
    with no_sync(), or the ranks' gradients are no longer their own.

    Args: as for SmallBatch.

    Raises:
        ValueError: an argument of another kind or out of range.
    """

    kind = "local_norms"

    def __init__(self, *, refresh: Refresh = 1, s_min: float = 1e-3, eps: float = 1e-8, ema: float = 0.9) -> None:
        super().__init__("tensor", refresh=refresh, s_min=s_min, eps=eps, ema=ema)
        self._listener: NormListener | None = None

    def bind(self, setup: Setup) -> None:
        """Listen to DDP's reductions.

        Raises:
            ValueError: the DDP has a communication hook of someone else's.
        """
        if setup.sharded:
            raise ValueError(
                "LocalNorms needs the gradients of single ranks, which a model in shares has not; use SmallBatch"
                " (ags.source: small_batch)"
            )
        ddp = distributed(setup.model)
        self.reads_b_small = ddp is None or setup.world == 1
        super().bind(setup)
        if ddp is None or setup.world == 1:
            return
        schedule = self.schedule  # what listens must not hold the DDP
        self._listener = NormListener(lambda: not schedule.known or schedule.due)
        try:
            listen(ddp, self._listener)
        except RuntimeError as error:
            raise ValueError(
                "LocalNorms needs the communication hook of DistributedDataParallel, which is taken; use SmallBatch"
                " (ags.source: small_batch)"
            ) from error

    @property
    def limit(self) -> float:
        return self.setup.limit if self._listener is None else math.sqrt(self.setup.world)

    def _compute_factors(self, grads: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor] | None:
        if self._listener is None:
            return super()._compute_factors(grads)
        norms = self._listener.take()
        if norms is None:
            return None
        self._answered = True
        params, small, large = norms
        previous = torch.stack([self._factor.get(p, small.new_ones(())).to(small) for p in params])
        factors = local_factors(small, large, previous, self.bounds).unbind()
        return {p: s.to(p.device) for p, s in zip(params, factors, strict=True) if p in grads}

    @property
    def _missing(self) -> str:
        return super()._missing if self._listener is None else "no gradient came through DDP"

    def drop(self) -> None:
        super().drop()
        if self._listener is not None:
            self._listener.drop()


def _match_layout(factor: Tensor, param: Tensor) -> Tensor:
    """On the parameter's device, and with its strides, of which foreach kernels take only equal ones together."""
    factor = factor.to(param.device)
    if factor.shape != param.shape or factor.stride() == param.stride():
        return factor
    return torch.empty_like(param, dtype=factor.dtype).copy_(factor)


def _synchronises_statistics(model: nn.Module) -> bool:
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
