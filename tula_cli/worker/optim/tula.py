"""Adaptive gradient scaling (AGS, Algorithm 1 of the Tula paper) as an optimizer around another optimizer.

In the loop, between `backward()` and the step::

    if opt.wants_small_batch:
        opt.small_batch(lambda n: loss_fn(ddp.module(x[:n]), y[:n]))
    opt.step()

Line numbers in this module are those of Algorithm 1.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .indicators import (
    Bounds,
    alike,
    clip_,
    element_factors,
    factor_limit,
    gradient_change,
    squared_norm,
    tensor_factors,
    wide,
)

Granularity = Literal["element", "tensor"]
Consensus = Literal["broadcast", "check", "off"]
Draw = Literal["source", "spread"]
SmallLoss = Callable[[int], Tensor]

VERSION = 1

# These divide by the gradient's own magnitude (or keep its sign only), so a factor on the gradient cancels out.
NORMALISING = frozenset(
    {"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SparseAdam", "FusedAdam", "Adagrad", "Adadelta", "Adafactor"}
    | {"RMSprop", "Rprop", "Muon", "Lion", "LAMB", "Lamb", "FusedLAMB", "LARS", "Lars"}
)
# These keep each rank's own gradient or shard, so no rank holds the gradient that Eq. 5 speaks of.
SHARDING = frozenset(
    {"FullyShardedDataParallel", "FSDPModule", "DTensor", "ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"}
)


class TulaOptimizer(torch.optim.Optimizer):
    """Wraps a base optimizer and scales the large batch's gradients towards those of a small batch.

    Each step compares the squared gradient norm with that of the step before (Eq. 5). Where it changed by less than
    `delta`, the gradients are multiplied by the current factors (line 6), else they stay as they are (line 8). The
    factors are the ratio of small-batch to large-batch gradients at the same weights (line 16), taken at every
    refresh and used from the next step on; until the first refresh they are 1, so the first epoch is the base's own.

    `param_groups`, `state` and `defaults` are the base's objects, hence learning-rate schedulers and GradScaler take
    the wrapper as they would take the base. After `step()`, `.grad` holds the gradients that the base has seen. Do
    not clip gradients before the step, which would make every norm the same; use `max_grad_norm`.

    Args:
        base: the optimizer that makes the update; one without a division by the gradient's magnitude, such as SGD.
        model: the module, or its DistributedDataParallel (compiled or not). With the latter all ranks of the default
            process group take part; any other module is taken to be trained by this process alone.
        b_large: samples in one optimizer step, over all ranks and accumulation steps.
        b_small: samples in the small batch, over all ranks.
        granularity: "element", a factor for each element (line 16 as printed), or "tensor", one for each parameter.
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

    Attributes:
        base: the base optimizer.
        small_batch_size: samples, over all ranks, that a refresh really uses: `b_small` as far as the draw allows.

    Raises:
        ValueError: an argument out of range, a base that AGS cannot act through, or sharded parameters.
    """

    # GradScaler must unscale before the step: a fused base would unscale after the norm and the factors were applied
    _step_supports_amp_scaling = False

    _factor: dict[Tensor, Tensor]
    _square: Tensor | None
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
        refresh: Literal["epoch"] | int = "epoch",
        steps_per_epoch: int | None = None,
        consensus: Consensus = "broadcast",
        draw: Draw = "source",
        available: int | None = None,
        max_grad_norm: float | None = None,
        seed: int = 0,
        _on_device: bool | None = None,
    ) -> None:
        self.base = base
        self.model = model
        self.b_large, self.b_small = b_large, b_small
        self.granularity, self.delta, self.eps, self.s_min = granularity, delta, eps, s_min
        self.consensus, self.draw, self.max_grad_norm, self.seed = consensus, draw, max_grad_norm, seed
        self._rank, self._world = _place(model)
        self.available = max(1, b_large // self._world) if available is None else available
        self._on_device = _on_device
        self._schedule = _schedule(refresh, steps_per_epoch)
        _check(self)
        self.small_batch_size = sum(draw_counts(draw, b_small, self.available, self._world, 0))
        self._forget()
        self._n_steps = self._n_refresh = 0
        self._counts, self._mark = torch.zeros(3, dtype=torch.int64), (0, 0, 0, 0)
        self._staged: dict[Tensor, Tensor] | None = None
        self._answered = False
        self._warned: set[str] = set()
        super().__setstate__({})  # Optimizer's hooks, without its own groups and state: those are the base's

    # ---- the base's own objects

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The base's parameter groups, the same list."""
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The base's state; the AGS tensors are not in it."""
        return self.base.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The base's defaults."""
        return self.base.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base; its parameters have the factor 1 until the next refresh."""
        self.base.add_param_group(param_group)
        _refuse_sharded(self.base, self.model)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the base's gradients, and drop a small-batch gradient that no step has used."""
        self._drop()
        self.base.zero_grad(set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    # ---- the refresh

    @property
    def bounds(self) -> Bounds:
        """The interval of the factors: s_min, and s_max = sqrt(b_large / small_batch_size) (line 12)."""
        return Bounds(self.s_min, factor_limit(self.b_large, self.small_batch_size))

    @property
    def identity(self) -> str | None:
        """Why every step is exactly the base's, or None where AGS acts."""
        if self.small_batch_size < self.b_large:
            return None
        return (
            f"AGS leaves the gradients as they are: its small batch of {self.small_batch_size} samples is not below"
            f" the batch of {self.b_large}"
        )

    @property
    def wants_small_batch(self) -> bool:
        """Whether the coming step refreshes the factors, so that `small_batch` has to be called before it.

        A refresh that could not be taken (a skipped step, a gradient that is not finite) is wanted again.

        Raises:
            RuntimeError: refresh is "epoch" and the length of the epoch is not known.
        """
        return self.identity is None and self._schedule.due

    def start_epoch(self, steps: int) -> None:
        """Say that the coming epoch, or what is left of it after a resume, has this many optimizer steps.

        Epochs that follow without such a call have `steps_per_epoch` steps, or, where that was not given, as many as
        this one. Has no effect with refresh=k, which counts through.

        Raises:
            ValueError: `steps` is below 1.
        """
        if steps < 1:
            raise ValueError(f"an epoch needs at least 1 step, got {steps}")
        self._schedule.start(steps)

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
        grads: list[Tensor | None] = [None] * len(params)
        if params and counts[self._rank]:
            with _untouched(self.model), _own_randomness(params, self._draw_seed()):
                grads = _small_gradients(loss, counts[self._rank], params, scaler)
        if self._world > 1:
            grads = _combined(grads, params, counts, self._rank)
        staged = {p: g for p, g in zip(params, grads, strict=True) if g is not None}
        if _finite(list(staged.values())):
            self._staged = staged

    def _draw_seed(self) -> int:
        return random.Random(f"{self.seed}, {self._n_steps}, {self._rank}").getrandbits(63)

    def _drop(self) -> None:
        self._staged = None
        self._answered = False

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
        due = self.wants_small_batch
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = self._gradients()
        square, factors = self._adapt(grads, due) if grads and self.identity is None else (None, None)
        if self.max_grad_norm is not None and grads:
            clip_(list(grads.values()), self.max_grad_norm)
        self.base.step()
        self._advance(square, factors, due)
        return loss

    def _gradients(self) -> dict[Tensor, Tensor]:
        return {p: p.grad for p in self._parameters() if p.grad is not None}

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _adapt(self, grads: dict[Tensor, Tensor], due: bool) -> tuple[Tensor, dict[Tensor, Tensor] | None]:
        """Scale the gradients in place by the old factors; returns |G|^2 and the new factors, both of the raw ones."""
        square = self._agreed(squared_norm(list(grads.values())), due)
        change = gradient_change(square, self._square)
        calm = change < self.delta
        self._count(square, change, calm)
        factors = None if self._staged is None else self._factors(self._staged, grads)
        self._scale(grads, calm)
        return square, factors

    def _agreed(self, square: Tensor, due: bool) -> Tensor:
        if self._world > 1 and self.consensus == "broadcast":
            dist.broadcast(square, 0)
        elif self._world > 1 and self.consensus == "check" and due:
            _assert_equal(torch.stack([square.double(), self._counts[0].to(square.device).double()]))
        return square

    def _count(self, square: Tensor, change: Tensor, calm: Tensor) -> None:
        self._change = change
        before = square if self._square is None else self._square
        jump = change >= self.delta
        counts = torch.stack([calm, jump & (square > before), jump & (square < before)])
        self._counts = self._counts.to(square.device) + counts

    def _factors(self, staged: dict[Tensor, Tensor], grads: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        params = [p for p in staged if p in grads and not grads[p].is_sparse]
        rule = element_factors if self.granularity == "element" else tensor_factors
        factors = rule([staged[p] for p in params], [grads[p] for p in params], self.eps, self.bounds)
        return dict(zip(params, factors, strict=True))

    def _scale(self, grads: dict[Tensor, Tensor], calm: Tensor) -> None:
        if any(g.is_sparse for g in grads.values()):
            self._warn("AGS counts sparse gradients in the norm but does not scale them")
        scaled = [p for p, g in grads.items() if p in self._factor and not g.is_sparse]
        on_device = calm.device.type != "cpu" if self._on_device is None else self._on_device
        apply_ = scale_on_device_ if on_device else scale_on_host_
        apply_([grads[p] for p in scaled], [self._factor[p] for p in scaled], calm)

    def _advance(self, square: Tensor | None, factors: dict[Tensor, Tensor] | None, due: bool) -> None:
        if square is not None:
            self._square = square
        if factors is not None:
            self._factor = factors
            self._n_refresh += 1
        if due and not self._answered:
            self._warn("an AGS refresh was due, but small_batch() was not called: the factors stay as they are")
        self._drop()
        self._n_steps += 1
        if self.identity is None:
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

        A state of other batch sizes or granularity keeps the base's part and the counters, but its factors, previous
        norm and place in the epoch are void. delta, eps and s_min stay the constructor's.

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
            "mode": self.granularity,
            "delta": self.delta,
            "eps": self.eps,
            "s_min": self.s_min,
            "s_max": self.bounds.high,
            "b_large": self.b_large,
            "b_small": self.b_small,
            "n_steps": self._n_steps,
            "n_refresh": self._n_refresh,
            "n_scaled": int(self._counts[0]),
            "prev_sq": self._square,
            "scale": {index[p]: s for p, s in self._factor.items()},
            "schedule": self._schedule.position(),
        }

    def _load_ags(self, ags: Mapping[str, Any]) -> None:
        self._forget()
        self._drop()
        self._n_steps, self._n_refresh = ags["n_steps"], ags["n_refresh"]
        self._counts = torch.tensor([ags["n_scaled"], 0, 0])
        self._mark = (self._n_steps, ags["n_scaled"], 0, 0)
        if (ags["b_large"], ags["b_small"], ags["mode"]) != (self.b_large, self.b_small, self.granularity):
            self._schedule.restart()
            return
        self._schedule.resume(ags["schedule"])
        params = self._parameters()
        self._factor = {params[i]: s.to(params[i].device) for i, s in ags["scale"].items()}
        if ags["prev_sq"] is not None:
            self._square = ags["prev_sq"].to(params[0].device)

    def _forget(self) -> None:
        self._factor, self._square, self._change = {}, None, None

    # ---- what it did

    def report(self) -> dict[str, float]:
        """Plain numbers for a log line at a refresh; waits for the device, and changes nothing in the training.

        "scaled", "jumps_up" and "jumps_down" are shares of the steps since the report before: those scaled, and
        those not scaled because |G|^2 rose or fell by the share `delta` or more. "mean", "at_cap" and "at_floor" are
        over all factors, one an element or one a tensor; 1, 0 and 0 before the first refresh. "delta" is the last
        Delta(G), infinite in the first step; "refreshes" counts from the start of the training.
        """
        now = (self._n_steps, *(int(n) for n in self._counts.tolist()))
        steps, *counts = (a - b for a, b in zip(now, self._mark, strict=True))
        self._mark = cast(tuple[int, int, int, int], now)
        shares = dict(zip(("scaled", "jumps_up", "jumps_down"), (n / max(1, steps) for n in counts), strict=True))
        change = math.inf if self._change is None else float(self._change)
        return self._spread() | shares | {"delta": change, "refreshes": float(self._n_refresh)}

    def memory(self) -> int:
        """Bytes of the factors, held from the first refresh on: as much as the trainable parameters in element mode,
        one number a parameter in tensor mode, none where AGS is the identity."""
        params = [p for p in self._parameters() if p.requires_grad and self.identity is None]
        if self.granularity == "element":
            return sum(p.numel() * p.element_size() for p in params)
        return sum(wide(p.dtype).itemsize for p in params)

    def _spread(self) -> dict[str, float]:
        total, cap, floor, mean = 0, 0, 0, 0.0
        for factor in self._factor.values():
            low, high = self.bounds.rounded(factor.dtype)
            total += factor.numel()
            mean += float(factor.double().sum())
            cap += int((factor >= high).sum())
            floor += int((factor <= low).sum())
        if not total:
            return {"mean": 1.0, "at_cap": 0.0, "at_floor": 0.0}
        return {"mean": mean / total, "at_cap": cap / total, "at_floor": floor / total}


# ---- when to refresh


@dataclass
class _Schedule:
    """Where the training stands between refreshes: an epoch of `steps` steps, or `every` steps counted through."""

    every: int | None
    steps: int | None
    usual: int | None  # steps in an epoch of which nothing else was said; None: as in the epoch before
    taken: int = 0
    refreshed: bool = False
    owed: bool = False

    @property
    def due(self) -> bool:
        if self.steps is None:
            raise RuntimeError(
                'refresh="epoch" needs the length of the epoch: call start_epoch(steps), or give steps_per_epoch'
            )
        return self.owed or self.taken + 1 == self.steps

    def advance(self, *, refreshed: bool) -> None:
        self.taken += 1
        self.refreshed |= refreshed
        self.owed &= not refreshed
        if self.taken == self.steps:
            self._close()

    def start(self, steps: int) -> None:
        if self.every is not None:
            return
        # the rest of an epoch after a resume is not a new one, and owes nothing yet
        if self.taken + steps == self.steps:
            self.taken = 0
        elif self.taken:
            # GradScaler skipped steps, so the count never came to the epoch's last
            self._close()
        self.steps = steps

    def restart(self) -> None:
        self.taken, self.refreshed, self.owed = 0, False, False

    def position(self) -> dict[str, int | bool | None]:
        return {name: value for name, value in asdict(self).items() if name != "usual"}

    def resume(self, saved: Mapping[str, Any]) -> None:
        self.restart()
        if saved["every"] == self.every:
            self.steps, self.taken = saved["steps"], saved["taken"]
            self.refreshed, self.owed = saved["refreshed"], saved["owed"]

    def _close(self) -> None:
        self.owed |= not self.refreshed
        self.taken, self.refreshed = 0, False
        self.steps = self.usual or self.steps


def _schedule(refresh: Literal["epoch"] | int, steps: int | None) -> _Schedule:
    if refresh == "epoch":
        if steps is not None and steps < 1:
            raise ValueError(f"steps_per_epoch must be at least 1, got {steps}")
        return _Schedule(every=None, steps=steps, usual=steps)
    if isinstance(refresh, str) or refresh < 1:
        raise ValueError(f'refresh must be "epoch" or a number of steps of at least 1, got {refresh!r}')
    return _Schedule(every=refresh, steps=refresh, usual=refresh)


# ---- lines 5 to 8, twice: the host reads the branch, or the device computes it without a synchronisation


def scale_on_host_(grads: Sequence[Tensor], factors: Sequence[Tensor], calm: Tensor) -> None:
    """Multiply each gradient by its factor where `calm` (0-dim, bool) is true; reads `calm` on the host."""
    if grads and bool(calm):
        torch._foreach_mul_(list(grads), list(factors))


def scale_on_device_(grads: Sequence[Tensor], factors: Sequence[Tensor], calm: Tensor) -> None:
    """What `scale_on_host_` does, bit by bit, without waiting for the device; for a moment as much memory again.

    The multiplier s f + (1 - f) is exact: s where f = 1, and 1 where f = 0.
    """
    for (device, dtype), indices in alike(factors).items():
        flag = calm.to(device, dtype)
        multipliers = torch._foreach_mul([factors[i] for i in indices], flag)
        torch._foreach_add_(multipliers, 1 - flag)
        torch._foreach_mul_([grads[i] for i in indices], multipliers)


# ---- the small batch


def draw_counts(draw: Draw, b_small: int, available: int, world: int, turn: int) -> list[int]:
    """How many samples of the small batch each rank takes.

    "source": the fewest ranks that hold `b_small` samples, starting at rank `turn` modulo the world size, as evenly
    as possible. "spread": b_small / world on every rank, rounded up. No rank takes more than `available`.
    """
    if draw == "spread":
        return [min(available, math.ceil(b_small / world))] * world
    ranks = min(world, math.ceil(b_small / available))
    share, rest = divmod(min(b_small, ranks * available), ranks)
    counts = [0] * world
    for place in range(ranks):
        counts[(turn + place) % world] = share + (place < rest)
    return counts


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


def _small_gradients(
    loss: SmallLoss, n: int, params: Sequence[Tensor], scaler: torch.amp.GradScaler | None
) -> list[Tensor | None]:
    """The gradient on n samples; None for a parameter that the loss does not depend on."""
    with torch.enable_grad():
        value = loss(n)
        # autograd.grad, not backward(): .grad keeps the large batch's, and DDP's reducer is not set off
        grads = torch.autograd.grad(value if scaler is None else scaler.scale(value), params, allow_unused=True)
    if scaler is None:
        return list(grads)
    factor = 1.0 / scaler.get_scale()
    return [None if g is None else g * factor for g in grads]


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
            result[index] = piece.view(param.shape) if weight > 0 else None
    return result


def _packed(grads: Sequence[Tensor | None], params: Sequence[Tensor], weight: float) -> Tensor:
    """One flat tensor: the weight for each parameter that has a gradient (else 0), then the weighted gradients."""
    used = torch.tensor([0.0 if g is None else weight for g in grads]).to(params[0])
    pairs = zip(grads, params, strict=True)
    pieces = [p.new_zeros(p.numel()) if g is None else g.reshape(-1) * weight for g, p in pairs]
    return torch.cat([used, *pieces])


def _reduce_(flat: Tensor, counts: Sequence[int]) -> None:
    sources = [rank for rank, n in enumerate(counts) if n]
    if len(sources) == 1:
        dist.broadcast(flat, sources[0])
    else:
        dist.all_reduce(flat)


def _finite(grads: Sequence[Tensor]) -> bool:
    return not grads or math.isfinite(squared_norm(grads))


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


# ---- what is refused


def _place(model: nn.Module) -> tuple[int, int]:
    """(rank, world size); (0, 1) for a module that this process trains alone."""
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, DistributedDataParallel):
        return 0, 1
    world = dist.get_world_size()
    if dist.get_world_size(inner.process_group) != world:
        raise ValueError("TulaOptimizer needs DistributedDataParallel over the default process group")
    return dist.get_rank(), world


def _check(opt: TulaOptimizer) -> None:
    _refuse_base(opt.base)
    _refuse_sharded(opt.base, opt.model)
    _refuse_range(opt)
    _refuse_choice("granularity", opt.granularity, ("element", "tensor"))
    _refuse_choice("consensus", opt.consensus, ("broadcast", "check", "off"))
    _refuse_choice("draw", opt.draw, ("source", "spread"))
    if opt.draw == "source" and opt._world > 1 and any(isinstance(m, nn.SyncBatchNorm) for m in opt.model.modules()):
        raise ValueError('SyncBatchNorm needs every rank in the small batch: use draw="spread"')


def _refuse_base(base: torch.optim.Optimizer) -> None:
    names = _names(base)
    name = type(base).__name__
    if names & NORMALISING:
        raise ValueError(
            f"{name} divides by the gradient's own magnitude, so that scaling the gradient changes nothing."
            f" Use torch.optim.SGD as the base of TulaOptimizer, or {name} without AGS"
        )
    if "LBFGS" in names:
        raise ValueError(f"{name} evaluates its closure several times a step. Use torch.optim.SGD as the base")


def _refuse_sharded(base: torch.optim.Optimizer, model: nn.Module) -> None:
    params = [p for group in base.param_groups for p in group["params"]]
    for thing in (base, *model.modules(), *params):
        if _names(thing) & SHARDING:
            raise ValueError(
                f"TulaOptimizer does not work with {type(thing).__name__}: it needs every rank to hold the whole,"
                " averaged gradient. Use DistributedDataParallel"
            )
    if any(p.is_complex() for p in params):
        raise ValueError("TulaOptimizer does not work with complex parameters")


def _refuse_range(opt: TulaOptimizer) -> None:
    for name, value in (("b_large", opt.b_large), ("b_small", opt.b_small), ("available", opt.available)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1 sample, got {value}")
    if not 0 <= opt.s_min <= 1:
        raise ValueError(f"s_min must be between 0 and 1, got {opt.s_min}")
    if not (opt.delta >= 0 and 0 <= opt.eps < math.inf):
        raise ValueError(f"delta and eps must not be negative or NaN, got {opt.delta} and {opt.eps}")
    if opt.max_grad_norm is not None and not opt.max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be above 0, got {opt.max_grad_norm}")


def _refuse_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _check_state(state: Mapping[str, Any]) -> None:
    if "base" not in state or "ags" not in state:
        raise ValueError('the state is not of a TulaOptimizer: it has no "base" and "ags"')
    version = state["ags"].get("version")
    if version != VERSION:
        raise ValueError(f"the AGS state has version {version}, this program reads version {VERSION}")


def _names(thing: object) -> set[str]:
    # by name, so that neither optional parts of torch nor other packages have to be imported
    return {cls.__name__ for cls in type(thing).__mro__}
