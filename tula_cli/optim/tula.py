"""Adaptive gradient scaling (AGS, Algorithm 1 of the Tula paper) as an optimizer around another optimizer.

In the loop, between `backward()` and the step::

    if opt.wants_small_batch:
        opt.small_batch(lambda n: loss_fn(ddp.module(x[:n]), y[:n]))
    opt.step()

Line numbers in this package are those of Algorithm 1.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .parts.gradient_scaling import Scale, scale_compiled_, scale_on_device_, scale_on_host_, scaled_update
from .parts.indicators import (
    Bounds,
    clip_,
    element_factor,
    factor_limit,
    gradient_change,
    local_factors,
    moving_average,
    norms,
    smoothed,
    squared_norm,
    tensor_factors,
    wide,
)
from .parts.local_norms import LocalNorms
from .parts.reduction import listen
from .parts.refresh_schedule import Refresh, Schedule
from .parts.refusals import check, distributed, place, real_numbers, refuse_sharded, whole_numbers
from .parts.small_batch import Draw, SmallLoss, draw_counts, is_finite, small_gradients
from .parts.wrapper import Wrapper, evaluated

Granularity = Literal["element", "tensor", "static", "none"]
Source = Literal["small_batch", "local_norms"]
Target = Literal["gradient", "update"]
Consensus = Literal["broadcast", "check", "off"]

VERSION = 1
EARLIER: dict[str, Any] = {"source": "small_batch", "norm_ewma": 0.0, "scale_ema": 0.0, "apply_to": "gradient"}
"""What a state that does not name these settings was taken with."""


class TulaOptimizer(Wrapper):
    """Wraps a base optimizer and scales the large batch's gradients towards those of a small batch.

    Each step compares the squared gradient norm with that of the step before (Eq. 5). Where it changed by less than
    `delta`, the gradients are multiplied by the current factors (line 6), else they stay as they are (line 8). The
    factors are the ratio of small-batch to large-batch gradients at the same weights (line 16), taken at every
    refresh and used from the next step on; until the first refresh they are 1, so the first epoch is the base's own.

    `param_groups`, `state` and `defaults` are the base's objects, hence learning-rate schedulers and GradScaler take
    the wrapper as they would take the base. After `step()`, `.grad` holds the gradients that the base has seen. Do
    not clip gradients before the step, which would make every norm the same; use `max_grad_norm`.

    Args:
        base: the optimizer that makes the update; with apply_to="gradient" one without a division by the gradient's
            magnitude, such as SGD.
        model: the module, or its DistributedDataParallel (compiled or not). With the latter all ranks of the default
            process group take part; any other module is taken to be trained by this process alone.
        b_large: samples in one optimizer step, over all ranks and accumulation steps.
        b_small: samples in the small batch, over all ranks. With source="local_norms" and several ranks the small
            batch is each rank's own, and `b_small` only says from which b_large on AGS acts.
        granularity: "element", a factor for each element (line 16 as printed); "tensor", one for each parameter;
            "static", `factor` for all (Eq. 8), so that no small batch is needed; or "none", the base's own steps, of
            which the norms are taken and reported.
        delta: threshold on the relative change of the squared norm; 0 never scales, inf scales at any finite change.
        eps: the stability term of line 16.
        s_min: lower bound of the factors, 0 to 1; 0 is the paper's listing, Lemma 1 needs more than 0.
        refresh: "epoch", at the last step of each epoch, or k, at every k-th step.
        steps_per_epoch: optimizer steps in each epoch, for refresh="epoch"; `start_epoch` says the same of one epoch.
        consensus: how ranks come to the same branch: "broadcast" rank 0's norm at each step, "check" at refreshes
            that they agree, or "off".
        draw: "source", the small batch on as few ranks as can hold it, in turn, or "spread", an equal share on each.
        available: samples that one rank can offer to the small batch, equal on all ranks; by default
            b_large // world, with gradient accumulation the size of a micro-batch.
        max_grad_norm: clips the joint norm of the gradients that the base sees, after scaling.
        seed: seeds the random numbers that the small batch's forward pass draws.
        factor: of granularity "static"; "auto" is sqrt(b_large / small_batch_size), the most that AGS would take.
        source: where factors come from. "small_batch", an extra pass over some samples; or, for granularity "tensor",
            "local_norms", the gradients that the ranks hold before they are averaged: no extra pass, one all-reduce of
            a number a tensor, factors of at most sqrt(ranks). In one process it needs the extra pass all the same.
            Accumulate with no_sync(), or the ranks' gradients are no longer their own.
        norm_ewma: keeps a moving average of the squared norm, with this weight of the past, and gates on its change.
            The average moves slowly: at 0.9 the same `delta` means a tenfold change of a single norm.
        scale_ema: keeps a moving average of the factors over refreshes, with this weight of the past.
        apply_to: "gradient" (line 6), or "update", which scales what the base's step does to the weights, weight decay
            included: the way for Adam and its like. For a moment a copy of the parameters more.
        compile: scale in a single pass, compiled by torch.compile in the first step that scales; needs its compiler.

    Attributes:
        base: the base optimizer.
        small_batch_size: samples, over all ranks, that a refresh really uses: `b_small` as far as the draw allows.

    Raises:
        ValueError: an argument of another kind or out of range, a base that AGS cannot act through, a model that has
            none of the base's parameters, or sharded parameters.

    Warns where it can only be the base: see `identity`.
    """

    _factor: dict[Tensor, Tensor]
    _square: Tensor | None  # |G|^2 of the newest step
    _level: Tensor | None  # what the gate compares with: the same, or its moving average
    _change: Tensor | None

    def __init__(
        self,
        base: torch.optim.Optimizer,
        *,
        model: nn.Module,
        b_large: int,
        b_small: int = 128,
        granularity: Granularity = "element",
        delta: float = 0.5,
        eps: float = 1e-8,
        s_min: float = 1e-3,
        refresh: Refresh = "epoch",
        steps_per_epoch: int | None = None,
        consensus: Consensus = "broadcast",
        draw: Draw = "source",
        available: int | None = None,
        max_grad_norm: float | None = None,
        seed: int = 0,
        factor: float | Literal["auto"] = "auto",
        source: Source = "small_batch",
        norm_ewma: float = 0.0,
        scale_ema: float = 0.0,
        apply_to: Target = "gradient",
        compile: bool = False,
        _on_device: bool | None = None,
    ) -> None:
        super().__init__(base)
        whole_numbers(b_large=b_large, b_small=b_small, available=available, steps_per_epoch=steps_per_epoch)
        real_numbers(delta=delta, eps=eps, s_min=s_min, norm_ewma=norm_ewma, scale_ema=scale_ema)
        real_numbers(max_grad_norm=max_grad_norm, factor=1.0 if factor == "auto" else factor)
        self.model = model
        self.b_large, self.b_small = b_large, b_small
        self.granularity, self.delta, self.eps, self.s_min = granularity, delta, eps, s_min
        self.consensus, self.draw, self.max_grad_norm, self.seed = consensus, draw, max_grad_norm, seed
        self.source, self.norm_ewma, self.scale_ema = source, norm_ewma, scale_ema
        self.apply_to, self.compile = apply_to, compile
        self._rank, self._world = place(model)
        self.available = max(1, b_large // self._world) if available is None else available
        self.factor = 1.0 if factor == "auto" else factor
        self._on_device = _on_device
        self._schedule = Schedule.of(refresh, steps_per_epoch)
        check(self)
        self.small_batch_size = sum(draw_counts(draw, b_small, self.available, self._world, 0))
        if factor == "auto":
            self.factor = max(1.0, factor_limit(b_large, self.small_batch_size))
        self._local = self._listen()
        self._forget()
        self._n_steps = self._n_refresh = 0
        self._counts, self._mark = torch.zeros(3, dtype=torch.int64), (0, 0, 0, 0)
        self._staged: dict[Tensor, Tensor] | None = None
        self._answered = False
        self._warned: set[str] = set()
        if self.identity is not None:
            warnings.warn(self.identity, stacklevel=2)

    def _listen(self) -> LocalNorms | None:
        """Listen to DDP's reductions, where the factors come from them."""
        ddp, schedule = distributed(self.model), self._schedule
        if ddp is None or self._world == 1 or self.granularity != "tensor" or self.source != "local_norms":
            return None
        local = LocalNorms(lambda: not schedule.known or schedule.due)
        try:
            listen(ddp, local)
        except RuntimeError as error:
            raise ValueError(
                'source="local_norms" needs the communication hook of DistributedDataParallel, which is taken; use'
                ' source="small_batch"'
            ) from error
        return local

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base; its parameters have the factor 1 until the next refresh."""
        super().add_param_group(param_group)
        refuse_sharded(self.base, self.model)

    # ---- the refresh

    @property
    def bounds(self) -> Bounds:
        """The interval of the factors: s_min, and s_max = sqrt(b_large / b_small) (line 12).

        The small batch is of `small_batch_size` samples, or, with local norms on N ranks, one of N equal parts.
        """
        high = factor_limit(self.b_large, self.small_batch_size) if self._local is None else math.sqrt(self._world)
        return Bounds(self.s_min, high)

    @property
    def square(self) -> Tensor | None:
        """|G|^2 of the newest step, before scaling: 0-dim, on the device. None before the first step."""
        return self._square

    @property
    def change(self) -> Tensor | None:
        """Delta(G) of the newest step (Eq. 5): 0-dim, on the device, infinite in the first. None before it."""
        return self._change

    @property
    def factors(self) -> list[Tensor]:
        """The current factors, one tensor a parameter that has any: none before the first refresh."""
        return list(self._factor.values())

    @property
    def _has_factors(self) -> bool:
        """Whether there is anything to scale by: a static factor, or a refresh that has been."""
        return self.granularity == "static" or bool(self._factor)

    @property
    def identity(self) -> str | None:
        """Why every step is exactly the base's although AGS was to act; None where it acts, and with "none"."""
        if self.granularity == "none":
            return None
        if self.granularity == "static":
            return "AGS leaves the gradients as they are: its factor is 1" if self.factor == 1 else None
        if self.small_batch_size < self.b_large:
            return None
        return (
            f"AGS leaves the gradients as they are: its small batch of {self.small_batch_size} samples is not below"
            f" the batch of {self.b_large}"
        )

    @property
    def _is_due(self) -> bool:
        """Whether the coming step refreshes the factors."""
        return self.granularity in ("element", "tensor") and self.identity is None and self._schedule.due

    @property
    def wants_small_batch(self) -> bool:
        """Whether `small_batch` has to be called before the coming step, because that refreshes the factors.

        A refresh that could not be taken (a skipped step, a gradient that is not finite) is wanted again.

        Raises:
            RuntimeError: refresh is "epoch" and the length of the epoch is not known.
        """
        return self._local is None and self._is_due

    def start_epoch(self, steps: int, *, rest: bool | None = None) -> None:
        """Say that the coming epoch, or what is left of it after a resume, has this many optimizer steps.

        `rest` tells which of the two it is; without it, it is the rest where the count of steps fits that, as it does
        unless GradScaler has skipped some.

        Epochs that follow without such a call have `steps_per_epoch` steps, or, where that was not given, as many as
        this one. Has no effect with refresh=k, which counts through.

        Raises:
            ValueError: `steps` is below 1.
        """
        if steps < 1:
            raise ValueError(f"an epoch needs at least 1 step, got {steps}")
        self._schedule.start(steps, rest=rest)

    def refresh_soon(self) -> None:
        """Let the coming step refresh the factors, for AGS that begins in the middle of a training.

        Without it the first epoch, or the first k steps, from there on would be the base's own.
        """
        self._schedule.owe()

    def small_batch(self, loss: SmallLoss, *, scaler: torch.amp.GradScaler | None = None) -> None:
        """Take the small batch's gradient (lines 13 and 14), to become the factors in the coming step.

        To be called on every rank after `backward()`, while `wants_small_batch` is true. Buffers, random number
        generators, modes and `.grad` are afterwards as they were before. Where the gradient is not finite, on any
        rank, the refresh is put off on all.

        Args:
            loss: n -> the mean loss, 0-dim, on the first n samples of the rank's batch or any n of them, computed
                with the module inside DistributedDataParallel. Not called on a rank that takes no part.
            scaler: the GradScaler of the loop. The loss is scaled by it and the gradient divided again.

        Raises:
            RuntimeError: no small batch is wanted at this step.
        """
        if not self.wants_small_batch:
            raise RuntimeError("small_batch() is for steps where wants_small_batch is true")
        self._drop()
        self._answered = True
        params = [p for p, g in self._gradients().items() if not g.is_sparse]
        counts = draw_counts(self.draw, self.b_small, self.available, self._world, self._n_refresh)
        grads = small_gradients(
            loss, self.model, params, counts=counts, rank=self._rank, seed=self._draw_seed(), scaler=scaler
        )
        staged = {p: g for p, g in zip(params, grads, strict=True) if g is not None}
        if self.granularity == "tensor":  # nothing but the norms is needed, so the gradient is let go at once
            staged = dict(zip(staged, norms(list(staged.values())), strict=True))
        if is_finite(list(staged.values())):
            self._staged = staged

    def _draw_seed(self) -> int:
        return random.Random(f"{self.seed}, {self._n_steps}, {self._rank}").getrandbits(63)

    def _drop(self) -> None:
        self._staged = None
        self._answered = False
        if self._local is not None:
            self._local.drop()

    # ---- the step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One optimizer step (lines 4 to 10).

        Args:
            closure: re-evaluates the model and returns the loss; called once, with gradients enabled, before the
                norm is taken. The base gets none.

        Returns:
            The closure's loss, None without one.

        Raises:
            RuntimeError: the length of the epoch is not known, or consensus is "check" and the ranks disagree.
        """
        due = self._is_due
        loss = evaluated(closure)
        grads = self._gradients()
        acts = bool(grads) and self.identity is None
        calm, factors = self._look(grads, due) if acts else (None, None)
        if calm is not None and self.apply_to == "gradient":
            self._scaling()(*self._scaled(grads), calm)
        if self.max_grad_norm is not None and grads:
            clip_(list(grads.values()), self.max_grad_norm)
        with self._around_update(grads, calm):
            self.base.step()
        self._advance(factors, due)
        return loss

    def _gradients(self) -> dict[Tensor, Tensor]:
        return {p: p.grad for p in self._parameters() if p.grad is not None}

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _look(self, grads: dict[Tensor, Tensor], due: bool) -> tuple[Tensor, dict[Tensor, Tensor] | None]:
        """What the raw gradients say: whether to scale in this step (line 5), and the factors of the next (line 10)."""
        square = self._agreed(squared_norm(list(grads.values())), due)
        level = moving_average(square, self._level, self.norm_ewma)
        change = gradient_change(level, self._level)
        calm = change < self.delta
        self._count(level, change, calm)
        self._square, self._level, self._change = square, level, change
        return calm, self._factors(grads) if due else None

    def _agreed(self, square: Tensor, due: bool) -> Tensor:
        if self._world > 1 and self.consensus == "broadcast":
            dist.broadcast(square, 0)
        elif self._world > 1 and self.consensus == "check" and due:
            _assert_equal(torch.stack([square.double(), self._counts[0].to(square.device).double()]))
        return square

    def _count(self, level: Tensor, change: Tensor, calm: Tensor) -> None:
        before = level if self._level is None else self._level
        jump = change >= self.delta
        scaled = calm if self._has_factors else torch.zeros_like(calm)
        counts = torch.stack([scaled, jump & (level > before), jump & (level < before)])
        self._counts = self._counts.to(level.device) + counts

    def _factors(self, grads: dict[Tensor, Tensor]) -> dict[Tensor, Tensor] | None:
        """The new factors; None where a refresh that was due has to wait."""
        factors = self._of_local_norms(grads) if self._local is not None else self._of_small_batch(grads)
        if factors is None or not self.scale_ema:
            return factors
        known = [p for p in factors if p in self._factor]
        new, old = [factors[p] for p in known], [self._factor[p] for p in known]
        return factors | dict(zip(known, smoothed(new, old, self.scale_ema) if known else [], strict=True))

    def _of_small_batch(self, grads: dict[Tensor, Tensor]) -> dict[Tensor, Tensor] | None:
        staged, self._staged = self._staged, None
        if staged is None:
            return None
        params = [p for p in staged if p in grads and not grads[p].is_sparse]
        if self.granularity == "tensor":
            # staged are the norms, whose norms are themselves
            factors = tensor_factors([staged[p] for p in params], [grads[p] for p in params], self.eps, self.bounds)
            return dict(zip(params, factors, strict=True))
        # one by one, so that small gradients and factors never are two copies; what came through a collective is ours
        ours = self._world > 1
        return {p: element_factor(staged.pop(p), grads[p], self.eps, self.bounds, overwrite=ours) for p in params}

    def _of_local_norms(self, grads: dict[Tensor, Tensor]) -> dict[Tensor, Tensor] | None:
        assert self._local is not None
        seen = self._local.take()
        if seen is None:
            return None
        self._answered = True
        params, small, large = seen
        before = torch.stack([self._factor.get(p, small.new_ones(())).to(small) for p in params])
        factors = local_factors(small, large, before, self.bounds).unbind()
        return {p: s.to(p.device) for p, s in zip(params, factors, strict=True) if p in grads}

    def _scaled(self, grads: dict[Tensor, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients that are scaled, and their factors."""
        used = self._in_force(grads)
        return [grads[p] for p in used], list(used.values())

    def _in_force(self, grads: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """The factor of each parameter that has one and a dense gradient."""
        dense = [p for p, g in grads.items() if not g.is_sparse]
        if len(dense) < len(grads) and self.granularity != "none":
            self._warn("AGS counts sparse gradients in the norm but does not scale them")
        if self.granularity != "static":
            return {p: self._factor[p] for p in dense if p in self._factor}
        kinds = {p: (p.device, wide(p.dtype)) for p in dense}
        # full(), since tensor() would wait for the device
        common = {k: torch.full((), self.factor, device=k[0], dtype=k[1]) for k in set(kinds.values())}
        return {p: common[kind] for p, kind in kinds.items()}

    def _scaling(self) -> Scale:
        if self.compile:
            return scale_compiled_
        return scale_on_device_ if self._reads_on_device else scale_on_host_

    @property
    def _reads_on_device(self) -> bool:
        on_device = self._square is not None and self._square.device.type != "cpu"
        return on_device if self._on_device is None else self._on_device

    def _around_update(self, grads: dict[Tensor, Tensor], calm: Tensor | None) -> AbstractContextManager[None]:
        if calm is None or self.apply_to == "gradient":
            return nullcontext()
        used = self._in_force(grads)
        return scaled_update(list(used), list(used.values()), calm, on_device=self._reads_on_device)

    def _advance(self, factors: dict[Tensor, Tensor] | None, due: bool) -> None:
        if factors is not None:
            self._factor = factors
            self._n_refresh += 1
        if due and not self._answered:
            self._warn(
                "an AGS refresh was due, but "
                + ("small_batch() was not called" if self._local is None else "no gradient came through DDP")
                + ": the factors stay as they are"
            )
        self._drop()
        self._n_steps += 1
        if self.identity is None and self.granularity in ("element", "tensor"):
            self._schedule.advance(refreshed=factors is not None)

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=2)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The base's state under "base", that of AGS under "ags"; loads with `torch.load(weights_only=True)`."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state: dict[str, Any] = {"base": self.base.state_dict(), "ags": self._ags_state()}
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly where `state_dict()` was taken.

        A state of other batch sizes, or of other settings that say what a factor and a norm are, keeps the base's part
        and the counters, but its factors, previous norm and place in the epoch are void. delta, eps and s_min stay the
        constructor's.

        Raises:
            ValueError: the state is not of a TulaOptimizer, or of an unknown version.
        """
        state = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state = before(self, state) or state
        _check_state(state)
        self.base.load_state_dict(state["base"])
        self._load_ags(state["ags"])
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _ags_state(self) -> dict[str, Any]:
        index = {p: i for i, p in enumerate(self._parameters())}
        return {
            "version": VERSION,
            **self._meaning(),
            "delta": self.delta,
            "eps": self.eps,
            "s_min": self.s_min,
            "n_steps": self._n_steps,
            "n_refresh": self._n_refresh,
            "n_scaled": int(self._counts[0]),
            "prev_sq": self._level,
            "scale": {index[p]: s for p, s in self._factor.items()},
            "schedule": self._schedule.position(),
        }

    def _load_ags(self, ags: Mapping[str, Any]) -> None:
        self._forget()
        self._drop()
        self._n_steps, self._n_refresh = ags["n_steps"], ags["n_refresh"]
        self._counts = torch.tensor([ags["n_scaled"], 0, 0])
        self._mark = (self._n_steps, ags["n_scaled"], 0, 0)
        if EARLIER | {name: ags[name] for name in self._meaning() if name in ags} != self._meaning():
            self._schedule.restart()
            return
        self._schedule.resume(ags["schedule"])
        params = self._parameters()
        self._factor = {params[i]: s.to(params[i].device) for i, s in ags["scale"].items()}
        if ags["prev_sq"] is not None:
            self._level = ags["prev_sq"].to(params[0].device)

    def _meaning(self) -> dict[str, Any]:
        """The settings without which stored factors and norms mean something else."""
        return {
            "mode": self.granularity,
            "s_max": self.bounds.high,
            "b_large": self.b_large,
            "b_small": self.b_small,
            "source": self.source,
            "norm_ewma": self.norm_ewma,
            "scale_ema": self.scale_ema,
            "apply_to": self.apply_to,
        }

    def _forget(self) -> None:
        self._factor, self._square, self._level, self._change = {}, None, None, None

    # ---- what it did

    def report(self) -> dict[str, float]:
        """Plain numbers for a log line at a refresh; waits for the device, and changes nothing in the training.

        "scaled", "jumps_up" and "jumps_down" are shares of the "steps" since the report before: those scaled, and
        those whose |G|^2 rose or fell by the share `delta` or more. Before the first refresh there are no factors, and
        no step counts as scaled. "mean", "at_cap" and "at_floor" are over all "factors", one an element or one a tensor;
        1, 0 and 0 before the first refresh. "delta" is the last
        Delta(G), infinite in the first step; "refreshes" counts from the start of the training.
        """
        now = (self._n_steps, *(int(n) for n in self._counts.tolist()))
        steps, *counts = (a - b for a, b in zip(now, self._mark, strict=True))
        self._mark = cast(tuple[int, int, int, int], now)
        shares = dict(zip(("scaled", "jumps_up", "jumps_down"), (n / max(1, steps) for n in counts), strict=True))
        change = math.inf if self._change is None else float(self._change)
        totals = {"steps": float(steps), "refreshes": float(self._n_refresh)}
        return self._spread() | shares | totals | {"delta": change}

    def memory(self) -> int:
        """Bytes of the factors, held from the first refresh on: as much as the trainable parameters in element mode,
        one number a parameter in tensor mode, none with one common factor and where AGS is the identity."""
        params = [p for p in self._parameters() if p.requires_grad and self.identity is None]
        if self.granularity == "element":
            return sum(p.numel() * p.element_size() for p in params)
        return sum(wide(p.dtype).itemsize for p in params) if self.granularity == "tensor" else 0

    def _spread(self) -> dict[str, float]:
        total, cap, floor, mean = 0, 0, 0, 0.0
        for factor in self._factor.values():
            low, high = self.bounds.rounded(factor.dtype)
            total += factor.numel()
            mean += float(factor.double().sum())
            cap += int((factor >= high).sum())
            floor += int((factor <= low).sum())
        if self.granularity == "static":
            return {"factors": 1.0, "mean": self.factor, "at_cap": 0.0, "at_floor": 0.0}
        if not total:
            return {"factors": 0.0, "mean": 1.0, "at_cap": 0.0, "at_floor": 0.0}
        return {"factors": float(total), "mean": mean / total, "at_cap": cap / total, "at_floor": floor / total}


def _assert_equal(mine: Tensor) -> None:
    """Compares bits, so that NaN equals NaN."""
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    if any(not torch.equal(other.view(torch.int64), mine.view(torch.int64)) for other in theirs):
        seen = [tuple(other.tolist()) for other in theirs]
        raise RuntimeError(
            f"the ranks disagree on (squared gradient norm, steps scaled): {seen}; their weights may have drifted"
            ' apart. Train with consensus="broadcast"'
        )


def _check_state(state: Mapping[str, Any]) -> None:
    if "base" not in state or "ags" not in state:
        raise ValueError('the state is not of a TulaOptimizer: it has no "base" and "ags"')
    version = state["ags"].get("version")
    if version != VERSION:
        raise ValueError(f"the AGS state has version {version}, this program reads version {VERSION}")
