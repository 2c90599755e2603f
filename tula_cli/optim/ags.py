"""Adaptive gradient scaling (AGS, Algorithm 1 of the Tula paper) as an optimizer around another optimizer.

In the loop, between `backward()` and the step::

    if opt.needs_small_batch:
        opt.small_batch(lambda n: loss_fn(ddp.module(x[:n]), y[:n]))
    opt.step()

Line numbers in this package are those of Algorithm 1.
"""

from __future__ import annotations

import math
import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any, ClassVar, Literal, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tula_cli.presets import AGS_PRESETS

from . import gradient_stats, sharding
from .ddp_hook import NormListener, add_listener
from .gradient_stats import (
    Bounds,
    clip_,
    compute_element_factor,
    compute_factor_limit,
    compute_gradient_change,
    compute_local_factors,
    compute_squared_norm,
    compute_tensor_factors,
    get_accumulation_dtype,
    group_by_dtype,
    scale_,
    scale_update,
    select_,
)
from .sharding import compute_sharded_gradients, get_local_shard
from .wrapper import (
    OptimizerWrapper,
    check_base_can_be_scaled,
    check_model_has_parameters_of_base,
    check_sharding,
    find_ddp,
    get_rank_and_world,
    require_one_of,
    require_real_numbers,
    require_whole_numbers,
)

# --- Warnings, as classes so that a caller can filter them


class IdentityWarning(UserWarning):
    """Every step equals the base optimizer's; see `TulaOptimizer.identity`."""


class MissedRefreshWarning(UserWarning):
    """The factors were due to be refreshed, but the small batch's gradient is missing."""


# --- The gate (line 5): is this step scaled?


class Gate:
    """Decides per step whether gradients are scaled: only if the squared gradient norm changed by less than `delta` (Eq. 5).

    A gate belongs to one TulaOptimizer. All ranks make the same decision, by rank 0's norm.

    Args:
        delta: threshold on the relative change; 0 never scales, inf scales at any finite change.

    Attributes:
        square: |G|^2 of the newest step before scaling, 0-dim, on the device; None before the first step.
        change: Delta(G) of the newest step, 0-dim, on the device; infinite in the first step, None before it and after a
            load.
        scaled: whether the newest step was scaled, 0-dim, bool, on the device; None as for `change`.

    Raises:
        ValueError: `delta` has the wrong type or is out of range.
    """

    def __init__(self, delta: float = 0.5) -> None:
        require_real_numbers(delta=delta)
        if not delta >= 0:
            raise ValueError(f"delta must be a number of at least 0, got {delta}")
        self.delta = delta
        self.square: Tensor | None = None
        self.change: Tensor | None = None
        self.scaled: Tensor | None = None
        self._world: int | None = None
        self._counts = torch.zeros(3, dtype=torch.int64)  # numbers of scaled steps, rises and falls of |G|^2
        self._mark: tuple[int, ...] = (0, 0, 0, 0)  # steps and counts at the previous report

    def bind(self, world: int) -> None:
        """Attach the gate to an optimizer on `world` ranks.

        Raises:
            ValueError: it is already attached to one.
        """
        if self._world is not None:
            raise ValueError("this Gate belongs to another TulaOptimizer; create a Gate for each TulaOptimizer")
        self._world = world

    def decide(self, square: Tensor, *, has_factors: bool) -> Tensor:
        """Return whether this step is scaled (line 5), 0-dim, bool, on the device.

        Args:
            square: |G|^2 of the raw gradients, 0-dim.
            has_factors: whether factors exist; without them no step counts as scaled.
        """
        assert self._world is not None, "bind the Gate to an optimizer before the first step"
        if self._world > 1:
            dist.broadcast(square, 0)
        rise = compute_gradient_change(square, self.square)
        change = rise.abs()
        should_scale = change < self.delta
        self.scaled = should_scale if has_factors else torch.zeros_like(should_scale)
        self._count_jumps(rise, self.scaled)
        self.square, self.change = square, change
        return should_scale

    def _count_jumps(self, rise: Tensor, scaled: Tensor) -> None:
        if self.square is None:  # the first step has no predecessor
            up = down = torch.zeros_like(scaled)
        else:
            least = max(self.delta, torch.finfo(rise.dtype).tiny)  # an unchanged norm is neither rise nor fall
            up, down = rise >= least, rise <= -least
        self._counts = self._counts.to(rise.device) + torch.stack([scaled, up, down])

    def report(self, steps: int) -> dict[str, float]:
        """Return the gate's part of `TulaOptimizer.report` for the steps since the previous call; waits for the device.

        Args:
            steps: number of optimizer steps taken so far.
        """
        counts = (steps, *(int(n) for n in self._counts.tolist()))
        steps_taken, scaled, up, down = (a - b for a, b in zip(counts, self._mark, strict=True))
        self._mark = counts
        shares = {"scaled": scaled, "jumps_up": up, "jumps_down": down}
        change = math.inf if self.change is None else float(self.change)
        report = {name: n / max(1, steps_taken) for name, n in shares.items()}
        return report | {"steps": float(steps_taken), "delta": change}

    def reset(self) -> None:
        """Forget the norms so far, since those of another batch size are not comparable."""
        self.square = self.change = self.scaled = None

    def state_dict(self) -> dict[str, Any]:
        return {"n_scaled": int(self._counts[0]), "prev_sq": self.square}

    def load_state_dict(self, state: Mapping[str, Any], *, steps: int, device: torch.device | None) -> None:
        """Restore the state of a `state_dict()`.

        Args:
            steps: number of optimizer steps taken before.
            device: device of the parameters; None if the stored norm is no longer comparable, so that only the count is kept.
        """
        self._counts = torch.tensor([state["n_scaled"], 0, 0])
        self._mark = (steps, state["n_scaled"], 0, 0)
        square = state["prev_sq"]
        self.change = self.scaled = None
        self.square = None if device is None or square is None else square.to(device)


# --- When the factors are refreshed (line 10): at the last step of each epoch, or every k steps

Refresh = Literal["epoch"] | int


@dataclass
class RefreshSchedule:
    """Counts the steps until the next refresh: the last of an epoch of `steps` steps, or every `every` steps."""

    every: int | None
    steps: int | None
    usual: int | None  # steps of an epoch without a call of `start`; None: as many as the previous epoch
    taken: int = 0
    refreshed: bool = False
    owed: bool = False

    @classmethod
    def from_settings(cls, refresh: Refresh, steps: int | None) -> RefreshSchedule:
        """Return the schedule of a training that starts.

        Args:
            refresh: "epoch" or a number of steps.
            steps: optimizer steps per epoch, if known; only used for "epoch".

        Raises:
            ValueError: one of them is below 1, or `refresh` is neither "epoch" nor a whole number.
        """
        if refresh == "epoch":
            if steps is not None and steps < 1:
                raise ValueError(f"steps_per_epoch must be at least 1, got {steps}")
            return cls(every=None, steps=steps, usual=steps)
        if not isinstance(refresh, Integral) or isinstance(refresh, bool) or refresh < 1:
            raise ValueError(f'refresh must be "epoch" or an integer of at least 1 (steps), got {refresh!r}')
        return cls(every=int(refresh), steps=int(refresh), usual=int(refresh))

    @property
    def is_due(self) -> bool:
        """Whether the coming step refreshes the factors.

        Raises:
            RuntimeError: the number of steps of this epoch is unknown.
        """
        if self.steps is None:
            raise RuntimeError(
                'refresh="epoch" needs the length of the epoch: call start_epoch(steps), or give steps_per_epoch'
            )
        return self.owed or self.taken + 1 == self.steps

    def count_step(self, *, refreshed: bool) -> None:
        self.taken += 1
        self.refreshed |= refreshed
        self.owed &= not refreshed
        if self.taken == self.steps:
            self._finish_epoch()

    def start(self, steps: int, *, rest: bool | None = None) -> None:
        """Start an epoch of `steps` steps, or the rest of one after a resume.

        Args:
            steps: steps of the epoch or of its rest.
            rest: whether it is a rest; None: it is if the steps so far and these make up the epoch.
        """
        if self.every is not None:
            return
        if rest is None:
            rest = self.taken + steps == self.steps
        if rest and self.taken:
            return  # counting continues; steps that GradScaler skipped before the resume are not made up
        if self.taken:
            # GradScaler skipped steps, so the count did not reach the last step of the epoch
            self._finish_epoch()
        self.steps = steps

    def request_refresh(self) -> None:
        """Make the coming step a refresh; if it fails, the step after it, and so on."""
        self.owed = True

    def restart(self) -> None:
        """Count from the start of an epoch."""
        self.taken, self.refreshed, self.owed = 0, False, False

    def state_dict(self) -> dict[str, int | bool | None]:
        """Return the state for a checkpoint."""
        return {name: value for name, value in asdict(self).items() if name != "usual"}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state of a `state_dict()`; count from the start if it has another `every`."""
        self.restart()
        if saved["every"] == self.every:
            self.steps, self.taken = saved["steps"], saved["taken"]
            self.refreshed, self.owed = saved["refreshed"], saved["owed"]

    def _finish_epoch(self) -> None:
        self.owed |= not self.refreshed
        self.taken, self.refreshed = 0, False
        self.steps = self.usual or self.steps


# --- The gradient of the small batch (lines 13 and 14)

SmallLoss = Callable[[int], Tensor]


def count_samples_per_rank(b_small: int, available: int, world: int, refresh_index: int) -> list[int]:
    """Return how many samples of the small batch each rank computes, (world,) long.

    The fewest ranks that together hold `b_small` samples share them as evenly as possible, starting at rank
    `refresh_index` modulo `world`. No rank computes more than `available`.
    """
    ranks = min(world, math.ceil(b_small / available))
    share, remainder = divmod(min(b_small, ranks * available), ranks)
    counts = [0] * world
    for number in range(ranks):
        counts[(refresh_index + number) % world] = share + (number < remainder)
    return counts


@contextmanager
def restore_buffers(model: nn.Module) -> Iterator[None]:
    """Restore every buffer at the end, including one that the forward pass replaced by another tensor."""
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, copy in buffers:
                if buffer is not None and copy is not None:
                    buffer.copy_(copy)
                module._buffers[name] = buffer


@contextmanager
def _seed_generators(params: Sequence[Tensor], seed: int) -> Iterator[None]:
    """Seed the random generators of the CPU and of the parameters' devices inside; restore them at the end."""
    devices = sorted({p.device.index for p in params if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for index in devices:
            torch.cuda.default_generators[index].manual_seed(seed)
        yield


def _compute_gradients(
    loss: SmallLoss, n: int, params: Sequence[Tensor], scaler: torch.amp.GradScaler | None
) -> list[Tensor | None]:
    """Return the gradients on n samples; None for a parameter that the loss does not depend on."""
    with torch.enable_grad():
        value = loss(n)
        # autograd.grad, not backward(): .grad keeps the large batch's gradient, and DDP's reducer does not run
        scaled = value if scaler is None else scaler.scale(value)
        grads: list[Tensor | None] = list(torch.autograd.grad(scaled, params, allow_unused=True))
    return grads if scaler is None or not scaler.is_enabled() else _undo_loss_scale(grads, scaler)


def _compute_sharded_small_batch_gradients(
    loss: SmallLoss,
    counts: Sequence[int],
    rank: int,
    model: nn.Module,
    params: Sequence[Tensor],
    scaler: torch.amp.GradScaler | None,
) -> list[Tensor | None]:
    """Return this rank's shards of the gradient of the mean loss over all ranks' samples; every rank must call this.

    A rank without samples computes one with weight 0, because the others need its shards.
    """
    weight = counts[rank] * len(counts) / sum(counts)

    def compute_weighted_loss() -> Tensor:
        value = loss(max(1, counts[rank])) * weight
        return value if scaler is None else scaler.scale(value)

    sharded = compute_sharded_gradients(compute_weighted_loss, model)
    grads = [sharded.get(p) for p in params]
    return grads if scaler is None or not scaler.is_enabled() else _undo_loss_scale(grads, scaler)


def _undo_loss_scale(grads: list[Tensor | None], scaler: torch.amp.GradScaler) -> list[Tensor | None]:
    """Divide the gradients of a scaled loss by the scale, in the same list."""
    first = next((grad for grad in grads if grad is not None), None)
    if first is None:
        return grads
    factor = 1.0 / scaler.scale(torch.ones((), device=first.device))  # on the device: get_scale() would wait
    # one by one, so that all copies never exist at once; not in place, as gradients may share memory
    for index, grad in enumerate(grads):
        grads[index] = None if grad is None else grad * factor.to(grad.device)
    return grads


def _average_over_ranks(
    grads: Sequence[Tensor | None], params: Sequence[Tensor], counts: Sequence[int], rank: int
) -> list[Tensor | None]:
    """Return the mean over all ranks' samples, with one collective per dtype; None if no rank has a gradient."""
    result: list[Tensor | None] = [None] * len(params)
    for indices in group_by_dtype(params).values():
        group = [params[i] for i in indices]
        flat = _pack_gradients([grads[i] for i in indices], group, counts[rank] / sum(counts))
        _sum_over_ranks_(flat, counts)
        used = flat[: len(group)].tolist()
        pieces = flat[len(group) :].split_with_sizes([p.numel() for p in group])
        for index, param, piece, weight in zip(indices, group, pieces, used, strict=True):
            result[index] = _unflatten_like(piece, param) if weight > 0 else None
    return result


def _pack_gradients(grads: Sequence[Tensor | None], params: Sequence[Tensor], weight: float) -> Tensor:
    """Return one flat tensor: for each parameter the weight, or 0 without a gradient; then the weighted gradients."""
    used = torch.tensor([0.0 if g is None else weight for g in grads]).to(params[0])
    pairs = zip(grads, params, strict=True)
    pieces = [p.new_zeros(p.numel()) if g is None else _flatten_like(g, p) * weight for g, p in pairs]
    return torch.cat([used, *pieces])


def _flatten_like(grad: Tensor, param: Tensor) -> Tensor:
    """Return a gradient's values in the memory order of a dense copy of its parameter (which may be channels_last)."""
    if param.is_contiguous():
        return grad.reshape(-1)
    dense = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
    return dense.as_strided((dense.numel(),), (1,))


def _unflatten_like(piece: Tensor, param: Tensor) -> Tensor:
    """Return flat values as a gradient with the strides of the large batch's, which is a view of DDP's buckets."""
    return piece.as_strided(param.shape, torch.empty_like(param, device="meta").stride())


def _sum_over_ranks_(flat: Tensor, counts: Sequence[int]) -> None:
    """Sum a tensor over all ranks in place; it is 0 on ranks without samples, so that a single other rank broadcasts it."""
    sources = [rank for rank, n in enumerate(counts) if n]
    if len(sources) == 1:
        dist.broadcast(flat, sources[0])
    else:
        dist.all_reduce(flat)


# --- The training: the model and the batch sizes that the factors depend on


def find_embeddings(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights of a model's embeddings, which include output layers tied to them."""
    modules = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    return [parameter for module in modules for parameter in module.parameters()]


@dataclass(frozen=True)
class AgsSetup:
    """An optimizer's model, its global batch sizes, and the rank of this process."""

    base: torch.optim.Optimizer
    model: nn.Module
    rank: int
    world: int
    b_large: int
    b_small: int  # requested global number of samples in a small batch
    available: int  # samples that one rank can contribute to the small batch
    steps_per_epoch: int | None
    seed: int
    excluded: frozenset[Tensor] = frozenset()  # parameters whose factor is always 1
    sharded: bool = False  # whether fully_shard has sharded parameters and gradients over the ranks

    @classmethod
    def from_optimizer(
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
    ) -> AgsSetup:
        """Return the setup in the current process group.

        Raises:
            ValueError: a size is not a whole number or below 1, the small batch exceeds the large one, the DDP uses another
                process group, or no parameter is left to scale.
        """
        require_whole_numbers(b_large=b_large, b_small=b_small, available=available, steps_per_epoch=steps_per_epoch)
        rank, world = get_rank_and_world(model)
        share = max(1, b_large // world) if available is None else available
        for name, value in (("b_large", b_large), ("b_small", b_small), ("available", share)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1 sample, got {value}")
        if b_small > b_large:
            raise ValueError(f"b_small must be at most b_large ({b_large}), got {b_small}")
        excluded = frozenset(find_embeddings(model) if exclude is None else exclude)
        sharded = sharding.is_sharded(model)
        setup = cls(base, model, rank, world, b_large, b_small, share, steps_per_epoch, seed, excluded, sharded)
        if setup.excluded and setup.excluded.issuperset(setup.params):
            raise ValueError("exclude leaves no parameter to scale (by default, embeddings are excluded)")
        return setup

    @property
    def params(self) -> list[Tensor]:
        """The base optimizer's parameters, in the order of its groups."""
        return [p for group in self.base.param_groups for p in group["params"]]

    @property
    def small_batch_size(self) -> int:
        """Global number of samples in a small batch: `b_small`, or less if the ranks hold less."""
        return sum(count_samples_per_rank(self.b_small, self.available, self.world, 0))

    @property
    def max_factor(self) -> float:
        """s_max = sqrt(b_large / b_small) (line 12), with `small_batch_size` for b_small."""
        return compute_factor_limit(self.b_large, self.small_batch_size)

    def compute_norms(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return the l2 norm of each gradient, 0-dim, equal on all ranks; with shards every rank must call this."""
        return sharding.compute_sharded_norms(grads) if self.sharded else gradient_stats.compute_norms(grads)

    def compute_squared_norm(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the squared l2 norm over all gradients together, 0-dim, equal on all ranks; with shards every rank must call this."""
        compute = sharding.compute_sharded_squared_norm if self.sharded else gradient_stats.compute_squared_norm
        return compute(grads)

    def compute_small_batch_gradients(
        self,
        loss: SmallLoss,
        params: Sequence[Tensor],
        *,
        refresh_index: int,
        step: int,
        scaler: torch.amp.GradScaler | None,
    ) -> list[Tensor | None]:
        """Return the gradient of the small batch's mean loss for each parameter, equal on all ranks; every rank must call it.

        It is None for a parameter that the loss does not depend on. For a model sharded by fully_shard it is this rank's
        shard. Buffers, random generators, modes and `.grad` are left unchanged.

        Args:
            loss: n -> the mean loss on n samples of this rank.
            params: parameters with dense gradients, in the same order on all ranks.
            refresh_index: refreshes so far, since the ranks take turns at computing the small batch.
            step: optimizer steps so far; with seed and rank it seeds the random numbers of the forward pass.
            scaler: scales the loss; the gradient is divided by the scale.
        """
        seed = random.Random(f"{self.seed}, {step}, {self.rank}").getrandbits(63)
        size = self.small_batch_size
        # every rank of a sharded model has to compute, so each computes its share
        available = -(-size // self.world) if self.sharded else self.available
        counts = count_samples_per_rank(size, available, self.world, refresh_index)
        grads: list[Tensor | None] = [None] * len(params)
        if self.sharded or (params and counts[self.rank]):
            with restore_buffers(self.model), _seed_generators(params, seed):
                if self.sharded:
                    return _compute_sharded_small_batch_gradients(loss, counts, self.rank, self.model, params, scaler)
                grads = _compute_gradients(loss, counts[self.rank], params, scaler)
        return grads if self.world == 1 else _average_over_ranks(grads, params, counts, self.rank)


# --- The scaling factors (lines 11 to 18 and Eq. 8)


class ScalingFactors(ABC):
    """Base class of the ways to compute factors. An object belongs to one TulaOptimizer.

    Attributes:
        reads_b_small: whether the size of the small batch has any effect.
        n_refresh: refreshes so far.
    """

    kind: ClassVar[str]
    reads_b_small = True
    n_refresh = 0
    _setup: AgsSetup | None = None

    def bind(self, setup: AgsSetup) -> None:
        """Attach the factors to a training.

        Raises:
            ValueError: they are already attached to one, or are unsuitable for this one.
        """
        if self._setup is not None:
            raise ValueError(f"this {type(self).__name__} belongs to another TulaOptimizer; create one for each")
        self._setup = setup

    def change_setup(self, setup: AgsSetup) -> None:
        """Change the batch sizes: the factors so far are dropped, and the coming step refreshes them."""
        self._setup = setup

    @property
    def setup(self) -> AgsSetup:
        """The training that the factors belong to."""
        assert self._setup is not None, "bind the factors to an optimizer before you read them"
        return self._setup

    @property
    @abstractmethod
    def identity(self) -> str | None:
        """Reason why every step equals the base optimizer's; None if the factors have an effect."""

    @property
    @abstractmethod
    def bounds(self) -> Bounds:
        """The interval of the factors."""

    @property
    @abstractmethod
    def has_factors(self) -> bool:
        """False until the first refresh has computed factors."""

    @abstractmethod
    def get_factors(self, params: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """Return the current factor of each of the parameters that has one."""

    @abstractmethod
    def report(self) -> dict[str, float]:
        """Return the factors' part of `TulaOptimizer.report`; waits for the device."""

    @property
    def max_factor(self) -> float:
        """s_max of line 12, sqrt(b_large / b_small): the upper bound of factors from a small batch; `bounds` holds their interval."""
        return self.setup.max_factor

    @property
    def tensors(self) -> list[Tensor]:
        """The current factors, one tensor per parameter that has any."""
        return []

    @property
    def mean(self) -> Tensor | float | None:
        """Mean over all factors (per element or per tensor), without waiting for the device; None without factors."""
        tensors = self.tensors
        total = sum(factor.numel() for factor in tensors)
        if not tensors:
            return None
        if total == len(tensors):
            return torch.stack([factor.reshape(()) for factor in tensors]).mean()
        return torch.stack([f.mean(dtype=torch.float32) * (f.numel() / total) for f in tensors]).sum()

    # ---- the refresh

    @property
    def is_due(self) -> bool:
        """Whether the coming step refreshes the factors."""
        return False

    @property
    def needs_small_batch(self) -> bool:
        """Whether a small batch must be computed before the coming step."""
        return False

    def start_epoch(self, steps: int, *, rest: bool | None) -> None:  # noqa: B027
        """Start an epoch, or the rest of one; as `TulaOptimizer.start_epoch`."""

    def request_refresh(self) -> None:  # noqa: B027
        """Make the coming step a refresh."""

    def stage_small_batch_gradients(  # noqa: B027
        self, loss: SmallLoss, params: Sequence[Tensor], *, step: int, scaler: torch.amp.GradScaler | None
    ) -> None:
        """Compute the small batch's gradients of these parameters (lines 13 and 14).

        Args: as of `AgsSetup.compute_small_batch_gradients`.
        """

    def refresh_factors(self, grads: Mapping[Tensor, Tensor]) -> None:  # noqa: B027
        """Compute the factors for the next steps from the large batch's raw gradients; called in steps that are due."""

    def finish_step(self) -> None:  # noqa: B027
        """Count the step, and put new factors into effect."""

    def discard_pending(self) -> None:  # noqa: B027
        """Drop gradients and norms gathered for the coming step."""

    # ---- state

    def compute_memory(self) -> int:
        """Return the bytes of the factors from the first refresh on."""
        return 0

    def get_state_settings(self) -> dict[str, Any]:
        """Return the settings that stored factors and norms depend on."""
        return {"kind": self.kind, "s_max": self.max_factor}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint saves."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], *, void: bool) -> None:  # noqa: B027
        """Restore the state of a `state_dict()`.

        Args:
            void: whether its factors no longer apply, so that only the counts are kept.
        """


class Static(ScalingFactors):
    """One constant factor for all gradients (Eq. 8), without a small batch.

    Args:
        factor: None: sqrt(b_large / b_small), the upper bound of AGS, and at least 1.

    Raises:
        ValueError: the factor is not a number above 0.
    """

    kind = "static"

    def __init__(self, factor: float | None = None) -> None:
        require_real_numbers(factor=factor)
        if factor is not None and not 0 < factor < math.inf:
            raise ValueError(f"factor must be a finite number above 0, got {factor}")
        self.reads_b_small = factor is None
        self.factor = factor

    @property
    def _constant_factor(self) -> float:
        return max(1.0, self.setup.max_factor) if self.factor is None else self.factor

    @property
    def mean(self) -> float:
        return self._constant_factor

    @property
    def identity(self) -> str | None:
        return "AGS does not change the gradients, because the factor is 1" if self._constant_factor == 1 else None

    @property
    def bounds(self) -> Bounds:
        """The interval between the factor and 1, the factor of steps that are not scaled."""
        return Bounds(min(1.0, self._constant_factor), max(1.0, self._constant_factor))

    @property
    def has_factors(self) -> bool:
        return True

    def get_factors(self, params: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        kinds = {p: (p.device, get_accumulation_dtype(p.dtype)) for p in params}
        # full(), because tensor() would wait for the device
        common = {k: torch.full((), self._constant_factor, device=k[0], dtype=k[1]) for k in set(kinds.values())}
        return {p: common[kind] for p, kind in kinds.items()}

    def report(self) -> dict[str, float]:
        return {"factors": 1.0, "mean": self._constant_factor, "at_cap": 0.0, "at_floor": 0.0}


class SmallBatch(ScalingFactors):
    """Factors from the ratio of a small batch's gradient to the large one's at the same weights (line 16).

    Each refresh computes the small batch's gradient in an extra pass; its factors are used from the next step on. Until
    the first refresh the factors are 1.

    Args:
        per: "element": a factor per element (line 16 as printed); "tensor": a factor per parameter.
        refresh: "epoch": at the last step of each epoch; k: at every k-th step.
        s_min: lower bound of the factors, 0 to 1; Algorithm 1 has 0, Lemma 1 needs more than 0.
        eps: the stability term of line 16.
        ema: weight of the past in a moving average of the factors over refreshes; 0: no average.

    Attributes:
        schedule: counts the steps until the next refresh.

    Raises:
        ValueError: an argument has the wrong type or is out of range.
    """

    kind = "small_batch"

    def __init__(
        self,
        per: Literal["element", "tensor"] = "element",
        *,
        refresh: Refresh = "epoch",
        s_min: float = 1e-3,
        eps: float = 1e-8,
        ema: float = 0.0,
    ) -> None:
        require_real_numbers(s_min=s_min, eps=eps, ema=ema)
        require_one_of("per", per, ("element", "tensor"))
        if not 0 <= s_min <= 1:
            raise ValueError(f"s_min must be a number from 0 to 1, got {s_min}")
        if not 0 <= eps < math.inf:
            raise ValueError(f"eps must be a finite number of at least 0, got {eps}")
        if not 0 <= ema < 1:
            raise ValueError(f"ema must be a number of at least 0 and below 1, got {ema}")
        self.per, self.refresh, self.s_min, self.eps, self.ema = per, refresh, s_min, eps, ema
        self.schedule = RefreshSchedule.from_settings(refresh, None)
        self._factor: dict[Tensor, Tensor] = {}
        self._next_factors: dict[Tensor, Tensor] | None = None
        self._staged: dict[Tensor, Tensor] | None = None
        self._finite: Tensor | None = None  # whether `_staged` is finite, 0-dim, bool; None without gradients
        self._small_batch_staged = self._warned = False

    def bind(self, setup: AgsSetup) -> None:
        super().bind(setup)
        self.schedule = RefreshSchedule.from_settings(self.refresh, setup.steps_per_epoch)
        if setup.sharded and self.per == "element":
            name = type(self).__name__
            raise ValueError(f'a sharded model can only have factors per tensor: use {name}(per="tensor")')
        has_sync_batch_norm = any(isinstance(module, nn.SyncBatchNorm) for module in setup.model.modules())
        if self.reads_b_small and setup.world > 1 and has_sync_batch_norm:
            raise ValueError(
                "SyncBatchNorm needs all ranks in a forward pass, but only some compute the small batch; use LocalNorms()"
                " (ags.source: local_norms), which needs no small batch"
            )

    @property
    def identity(self) -> str | None:
        size, large = self.setup.small_batch_size, self.setup.b_large
        if size < large:
            return None
        return f"AGS does not change the gradients, because its small batch of {size} samples is not below the batch of {large}"

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.s_min, self.max_factor)

    @property
    def has_factors(self) -> bool:
        return bool(self._factor)

    @property
    def tensors(self) -> list[Tensor]:
        return list(self._factor.values())

    @property
    def is_due(self) -> bool:
        return self.identity is None and self.schedule.is_due

    @property
    def needs_small_batch(self) -> bool:
        return self.reads_b_small and self.is_due

    def change_setup(self, setup: AgsSetup) -> None:
        super().change_setup(setup)
        self.discard_pending()
        self._factor = {}
        self.schedule.restart()
        self.request_refresh()

    def start_epoch(self, steps: int, *, rest: bool | None) -> None:
        self.schedule.start(steps, rest=rest)

    def request_refresh(self) -> None:
        self.schedule.request_refresh()

    def get_factors(self, params: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        return {p: self._factor[p] for p in params if p in self._factor}

    def stage_small_batch_gradients(
        self, loss: SmallLoss, params: Sequence[Tensor], *, step: int, scaler: torch.amp.GradScaler | None
    ) -> None:
        self.discard_pending()
        self._small_batch_staged = True
        grads = self.setup.compute_small_batch_gradients(
            loss, params, refresh_index=self.n_refresh, step=step, scaler=scaler
        )
        staged = {p: g for p, g in zip(params, grads, strict=True) if g is not None}
        if self.per == "tensor":  # only the norms are needed, so the gradients are freed at once
            staged = dict(zip(staged, self.setup.compute_norms(list(staged.values())), strict=True))
        self._finite = compute_squared_norm(list(staged.values())).isfinite() if staged else None
        # A refresh at every step does not wait for the device: `_replace_non_finite` keeps the previous factors.
        if self._refreshes_each_step or self._finite is None or bool(self._finite):
            self._staged = staged

    def refresh_factors(self, grads: Mapping[Tensor, Tensor]) -> None:
        self._next_factors = self._average_with_previous(self._compute_factors(grads))

    def _average_with_previous(self, factors: dict[Tensor, Tensor] | None) -> dict[Tensor, Tensor] | None:
        if factors is None or not self.ema:
            return factors
        repeated = [p for p in factors if p in self._factor]
        new, old = [factors[p] for p in repeated], [self._factor[p] for p in repeated]
        smoothed = torch._foreach_lerp(old, new, 1 - self.ema) if repeated else ()
        return factors | dict(zip(repeated, smoothed, strict=True))

    def _compute_factors(self, grads: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor] | None:
        """Return the new factors; None if the refresh has to be postponed."""
        staged, self._staged = self._staged, None
        if staged is None:
            return None
        params = [p for p in staged if p in grads and not grads[p].is_sparse]
        if self.per == "tensor":
            # `staged` holds norms
            large = self.setup.compute_norms([grads[p] for p in params])
            factors = compute_tensor_factors([staged[p] for p in params], large, self.eps, self.bounds)
            return dict(zip(params, self._replace_non_finite(params, factors), strict=True))
        # one by one, so that small gradients and factors never exist twice; results of a collective may be overwritten
        is_distributed = self.setup.world > 1
        computed: dict[Tensor, Tensor] = {}
        for p in params:
            factor = compute_element_factor(staged.pop(p), grads[p], self.eps, self.bounds, overwrite=is_distributed)
            (computed[p],) = self._replace_non_finite([p], [factor])
        return computed

    @property
    def _refreshes_each_step(self) -> bool:
        return self.refresh == 1

    def _replace_non_finite(self, params: Sequence[Tensor], factors: Sequence[Tensor]) -> list[Tensor]:
        """Return the previous factors (1 without any) in place of factors of a gradient that is not finite."""
        if not self._refreshes_each_step or self._finite is None:
            return list(factors)
        previous = [
            self._factor[p] if p in self._factor else s.new_ones(()) for p, s in zip(params, factors, strict=True)
        ]
        return select_(factors, previous, self._finite)

    def finish_step(self) -> None:
        if self.is_due and not self._small_batch_staged and not self._warned:
            self._warned = True
            warnings.warn(
                f"an AGS refresh was due, but {self._missing_input_message}: the factors are not changed",
                MissedRefreshWarning,
                stacklevel=2,
            )
        factors = self._next_factors
        if factors is not None:
            self._factor = factors
            self.n_refresh += 1
        self.discard_pending()
        if self.identity is None:
            self.schedule.count_step(refreshed=factors is not None)

    @property
    def _missing_input_message(self) -> str:
        return "small_batch() was not called"

    def discard_pending(self) -> None:
        self._staged = self._next_factors = self._finite = None
        self._small_batch_staged = False

    def compute_memory(self) -> int:
        if self.identity is not None:
            return 0
        params = [p for p in self.setup.params if p.requires_grad and p not in self.setup.excluded]
        if self.per == "tensor":
            return sum(get_accumulation_dtype(p.dtype).itemsize for p in params)
        return sum(p.numel() * p.element_size() for p in params)

    def report(self) -> dict[str, float]:
        total, cap, floor, mean = 0, 0, 0, 0.0
        for factor in self._factor.values():
            low, high = self.bounds.round_inwards(factor.dtype)
            total += factor.numel()
            mean += float(factor.double().sum())
            cap += int((factor >= high).sum())
            floor += int((factor <= low).sum())
        if not total:
            return {"factors": 0.0, "mean": 1.0, "at_cap": 0.0, "at_floor": 0.0}
        return {"factors": float(total), "mean": mean / total, "at_cap": cap / total, "at_floor": floor / total}

    def get_state_settings(self) -> dict[str, Any]:
        return super().get_state_settings() | {"per": self.per, "ema": self.ema}

    def state_dict(self) -> dict[str, Any]:
        index = {p: i for i, p in enumerate(self.setup.params)}
        scale = {index[p]: s for p, s in self._factor.items()}
        return {"n_refresh": self.n_refresh, "scale": scale, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], *, void: bool) -> None:
        self.discard_pending()
        self.n_refresh, self._factor = state.get("n_refresh", 0), {}
        if void:
            self.schedule.restart()
            return
        self.schedule.load_state_dict(state["schedule"])
        params = self.setup.params
        self._factor = {params[i]: _match_layout(s, params[i]) for i, s in state["scale"].items()}


class LocalNorms(SmallBatch):
    """One factor per tensor from the gradients of single ranks before they are averaged, without an extra pass.

    It costs one all-reduce of a number per tensor; factors are at most sqrt(ranks). The small batch is that of one rank,
    and `b_small` only sets the b_large above which AGS has an effect. A single process needs the extra pass of
    SmallBatch. Accumulate with no_sync(), else the gradients are already averaged over ranks.

    Args: as for SmallBatch.

    Raises:
        ValueError: an argument has the wrong type or is out of range.
    """

    kind = "local_norms"

    def __init__(self, *, refresh: Refresh = 1, s_min: float = 1e-3, eps: float = 1e-8, ema: float = 0.9) -> None:
        super().__init__("tensor", refresh=refresh, s_min=s_min, eps=eps, ema=ema)
        self._listener: NormListener | None = None

    def bind(self, setup: AgsSetup) -> None:
        """Attach the factors to a training, and to the reductions of its DDP.

        Raises:
            ValueError: the DDP already has another communication hook.
        """
        if setup.sharded:
            raise ValueError(
                "LocalNorms needs the gradients of single ranks, which a sharded model does not have; use SmallBatch"
                " (ags.source: small_batch)"
            )
        ddp = find_ddp(setup.model)
        self.reads_b_small = ddp is None or setup.world == 1
        super().bind(setup)
        if ddp is None or setup.world == 1:
            return
        schedule = self.schedule  # the listener must not keep the DDP alive
        self._listener = NormListener(lambda: schedule.steps is None or schedule.is_due)
        try:
            add_listener(ddp, self._listener)
        except RuntimeError as error:
            raise ValueError(
                "LocalNorms needs the communication hook of DistributedDataParallel, which is already in use; use SmallBatch"
                " (ags.source: small_batch)"
            ) from error

    @property
    def max_factor(self) -> float:
        return self.setup.max_factor if self._listener is None else math.sqrt(self.setup.world)

    def _compute_factors(self, grads: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor] | None:
        if self._listener is None:
            return super()._compute_factors(grads)
        norms = self._listener.pop_norms()
        if norms is None:
            return None
        self._small_batch_staged = True
        params, small, large = norms
        previous = torch.stack([self._factor.get(p, small.new_ones(())).to(small) for p in params])
        factors = compute_local_factors(small, large, previous, self.bounds).unbind()
        return {p: s.to(p.device) for p, s in zip(params, factors, strict=True) if p in grads}

    @property
    def _missing_input_message(self) -> str:
        return super()._missing_input_message if self._listener is None else "no gradient came through DDP"

    def discard_pending(self) -> None:
        super().discard_pending()
        if self._listener is not None:
            self._listener.clear()


def _match_layout(factor: Tensor, param: Tensor) -> Tensor:
    """Return the factor on the parameter's device and with its strides, as foreach kernels need equal strides."""
    factor = factor.to(param.device)
    if factor.shape != param.shape or factor.stride() == param.stride():
        return factor
    return torch.empty_like(param, dtype=factor.dtype).copy_(factor)


# --- The settings of section `ags` of a job file

ScalingTarget = Literal["gradient", "update"]


class AgsArguments(TypedDict):
    """Arguments for one TulaOptimizer; factors and gate hold its state."""

    factors: ScalingFactors
    gate: Gate
    apply_to: ScalingTarget


def configure_ags(settings: Mapping[str, Any]) -> AgsArguments:
    """Return new factors and a new gate: `TulaOptimizer(base, model=ddp, b_large=1024, **configure_ags(AGS_PRESETS["robust"]))`.

    Args:
        settings: all settings of a preset (`tula_cli/presets.py`).

    Raises:
        ValueError: a value has the wrong type or is out of range.
    """
    refresh = settings["refresh"]
    common: dict[str, Any] = {
        "refresh": refresh["every"] if isinstance(refresh, Mapping) else refresh,
        "s_min": settings["s_min"],
        "eps": settings["eps"],
        "ema": settings["scale_ema"],
    }
    local = settings["source"] == "local_norms"
    if local and settings["granularity"] != "tensor":
        raise ValueError("source local_norms has one norm per tensor: use granularity tensor")
    return {
        "factors": LocalNorms(**common) if local else SmallBatch(settings["granularity"], **common),
        "gate": Gate(float(settings["delta"])),
        "apply_to": settings["apply_to"],
    }


# --- The optimizer

VERSION = 2


class TulaOptimizer(OptimizerWrapper):
    """Wraps a base optimizer and scales the large batch's gradients towards those of a small batch.

    At each step the gate compares the squared gradient norm with that of the step before (Eq. 5). If it changed by less
    than `delta`, the gradients are multiplied by the current factors (line 6), else they are left unchanged (line 8).
    `factors` computes the factors; before the first refresh there are none, so the first epoch is that of the base
    optimizer.

    `param_groups`, `state` and `defaults` are the base optimizer's objects, so learning-rate schedulers and GradScaler
    accept the wrapper. After `step()`, `.grad` holds the scaled gradients. Do not clip gradients before the step, which
    would make every norm equal; use `max_grad_norm`.

    Args:
        base: the optimizer that updates the weights; with apply_to="gradient" it must not divide by the gradient's
            magnitude, as SGD does not.
        model: a module, its DistributedDataParallel (compiled or not), or a module sharded by fully_shard. The last two
            are trained by all ranks of the default process group, any other module by this process alone.
        b_large: samples in one optimizer step, over all ranks and accumulation steps.
        b_small: samples in the small batch, over all ranks.
        preset: default of `factors` and `gate`: "paper" is Algorithm 1; "robust" has one smoothed factor per tensor,
            refreshed at every step from the gradients of single ranks, and no gate (`tula_cli/presets.py`).
        factors: how factors are computed: SmallBatch, LocalNorms or Static; an object for this optimizer alone.
        gate: decides which steps are scaled; an object for this optimizer alone.
        apply_to: "gradient" (line 6), or "update", which scales the change of the weights in the base optimizer's step,
            weight decay included: for Adam and similar optimizers. It needs a temporary copy of the parameters.
        steps_per_epoch: optimizer steps per epoch, for factors refreshed at the end of epochs; `start_epoch` sets them
            for one epoch.
        available: samples that one rank can contribute to the small batch, equal on all ranks; by default
            b_large // world. With gradient accumulation: the size of a micro-batch.
        max_grad_norm: clips the joint norm of the gradients after scaling.
        seed: seed of the random numbers that the small batch's forward pass draws.
        exclude: parameters whose factor is always 1; the gate includes their gradients. By default embeddings, most of
            whose rows do not occur in a small batch; () scales all parameters, as the paper does.

    Attributes:
        base: the base optimizer.
        setup: the model and its batch sizes, among them `small_batch_size`, the global number of samples of a refresh.

    Raises:
        ValueError: an argument has the wrong type or is out of range, AGS has no effect through the base optimizer, the
            model has none of its parameters, or parameters are sharded in another way.

    Warns with IdentityWarning if every step equals the base optimizer's: see `identity`.
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        *,
        model: nn.Module,
        b_large: int,
        b_small: int = 128,
        preset: Literal["paper", "robust"] = "paper",
        factors: ScalingFactors | None = None,
        gate: Gate | None = None,
        apply_to: ScalingTarget = "gradient",
        steps_per_epoch: int | None = None,
        available: int | None = None,
        max_grad_norm: float | None = None,
        seed: int = 0,
        exclude: Iterable[Tensor] | None = None,
    ) -> None:
        super().__init__(base)
        require_one_of("apply_to", apply_to, ("gradient", "update"))
        require_one_of("preset", preset, tuple(AGS_PRESETS))
        require_real_numbers(max_grad_norm=max_grad_norm)
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be a number above 0, got {max_grad_norm}")
        check_sharding(base, model)
        sizes: dict[str, Any] = {"b_large": b_large, "b_small": b_small, "available": available}
        self.setup = AgsSetup.from_optimizer(
            base, model, **sizes, steps_per_epoch=steps_per_epoch, seed=seed, exclude=exclude
        )
        check_base_can_be_scaled(base, of_gradients=apply_to == "gradient")
        check_model_has_parameters_of_base(base, model)
        self.apply_to, self.max_grad_norm = apply_to, max_grad_norm
        preset_settings = configure_ags(AGS_PRESETS[preset])
        self.factors, self.gate = factors or preset_settings["factors"], gate or preset_settings["gate"]
        self.factors.bind(self.setup)
        self.gate.bind(self.setup.world)
        self._n_steps = 0
        self._warned = False
        if self.identity is not None:
            warnings.warn(self.identity, IdentityWarning, stacklevel=2)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base optimizer; its parameters have the factor 1 until the next refresh."""
        super().add_param_group(param_group)
        check_sharding(self.base, self.setup.model)

    # ---- the refresh

    @property
    def bounds(self) -> Bounds:
        """The interval of the factors: from s_min to s_max (line 12), or between a constant factor and 1."""
        return self.factors.bounds

    @property
    def identity(self) -> str | None:
        """Reason why every step equals the base optimizer's; None if AGS has an effect."""
        return self.factors.identity

    @property
    def needs_small_batch(self) -> bool:
        """Whether `small_batch` must be called before the coming step, because that step refreshes the factors.

        A refresh that failed (a skipped step, a gradient that is not finite) is repeated at the next step.

        Raises:
            RuntimeError: factors are refreshed at the end of epochs, and the number of steps of this epoch is unknown.
        """
        return self.factors.needs_small_batch

    def start_epoch(self, steps: int, *, rest: bool | None = None) -> None:
        """Set the number of optimizer steps of the coming epoch, or of its rest after a resume.

        Epochs without such a call have `steps_per_epoch` steps or, if that was not given, as many as this one. It has no
        effect on factors that are refreshed every k steps.

        Args:
            steps: steps of the epoch, or of its rest.
            rest: whether it is the rest of an epoch; None: it is if the steps so far and these make up an epoch, which
                holds unless GradScaler has skipped steps.

        Raises:
            ValueError: `steps` is below 1.
        """
        if steps < 1:
            raise ValueError(f"an epoch needs at least 1 step, got {steps}")
        self.factors.start_epoch(steps, rest=rest)

    def change_batch(self, *, b_large: int, b_small: int, available: int | None = None) -> None:
        """Continue at other batch sizes: factors and norms so far are dropped, and the coming step refreshes them.

        Counters continue. Call it between two steps, on every rank, and then `start_epoch` with the remaining steps of the
        epoch.

        Args: as of the constructor.

        Raises:
            ValueError: a size is not a whole number or below 1, or the small batch exceeds the large one.
        """
        setup, steps = self.setup, self.setup.steps_per_epoch
        sizes: dict[str, Any] = {"b_large": b_large, "b_small": b_small, "available": available}
        new = AgsSetup.from_optimizer(
            self.base, setup.model, **sizes, steps_per_epoch=steps, seed=setup.seed, exclude=setup.excluded
        )
        if new == setup:
            return
        self.setup = new
        self.gate.reset()
        self.factors.change_setup(new)

    def request_refresh(self) -> None:
        """Make the coming step a refresh, for AGS that starts in the middle of a training.

        Without it the first epoch, or the first k steps, would equal the base optimizer's.
        """
        self.factors.request_refresh()

    def small_batch(self, loss: SmallLoss, *, scaler: torch.amp.GradScaler | None = None) -> None:
        """Compute the small batch's gradients (lines 13 and 14), from which the coming step computes new factors.

        Call it on every rank after `backward()` if `needs_small_batch` is true. Buffers, random generators, modes and
        `.grad` are left unchanged. If a gradient is not finite on any rank, the refresh is postponed on all ranks.

        Args:
            loss: n -> the mean loss, 0-dim, on any n samples of the rank's batch, computed with the module inside
                DistributedDataParallel. It is not called on a rank that has no samples of the small batch.
            scaler: the GradScaler of the loop; it scales the loss, and the gradients are divided by the scale.

        Raises:
            RuntimeError: `needs_small_batch` is false.
        """
        if not self.needs_small_batch:
            raise RuntimeError("call small_batch() only in steps in which needs_small_batch is true")
        params = [p for p, g in self._select_scaled_gradients(self._get_gradients()).items() if not g.is_sparse]
        self.factors.stage_small_batch_gradients(loss, params, step=self._n_steps, scaler=scaler)

    def _discard_pending_gradients(self) -> None:
        self.factors.discard_pending()

    # ---- the step

    @contextmanager
    def wrap_base_step(self) -> Iterator[None]:
        """Turn a step that the caller takes with the base optimizer inside this context into a step of AGS (lines 4 to 10).

        Enter and leave it with gradients disabled, on every rank. After an exception the step does not count.

        Raises:
            RuntimeError: the number of steps of this epoch is unknown, or the gate finds that the ranks differ.
        """
        due = self.factors.is_due
        grads = self._get_gradients()
        should_scale = self._decide_and_refresh(grads, due) if grads and self.identity is None else None
        used = {} if should_scale is None else self._get_factors(grads)
        if should_scale is not None and self.apply_to == "gradient":
            scale_([grads[p] for p in used], list(used.values()), should_scale)
        if self.max_grad_norm is not None and grads:
            tensors = list(grads.values())
            clip_(tensors, self.max_grad_norm, square=self.setup.compute_squared_norm(tensors))
        with self._scale_update(used, should_scale):
            yield
        self.factors.finish_step()
        self._n_steps += 1

    def _get_gradients(self) -> dict[Tensor, Tensor]:
        return {p: get_local_shard(p.grad) for p in self.setup.params if p.grad is not None}

    def _select_scaled_gradients(self, grads: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        excluded = self.setup.excluded
        return {p: g for p, g in grads.items() if p not in excluded} if excluded else grads

    def _decide_and_refresh(self, grads: dict[Tensor, Tensor], due: bool) -> Tensor:
        """Return whether to scale this step (line 5), and compute the factors of the next if due (line 10)."""
        square = self.setup.compute_squared_norm(list(grads.values()))
        should_scale = self.gate.decide(square, has_factors=self.factors.has_factors)
        if due:
            self.factors.refresh_factors(self._select_scaled_gradients(grads))
        return should_scale

    def _get_factors(self, grads: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Return the factor of each parameter that has one and a dense gradient."""
        dense = [p for p, g in grads.items() if not g.is_sparse]
        if len(dense) < len(grads) and not self._warned:
            self._warned = True
            warnings.warn("AGS counts sparse gradients in the norm but does not scale them", stacklevel=2)
        return self.factors.get_factors([p for p in dense if p not in self.setup.excluded])

    def _scale_update(self, used: dict[Tensor, Tensor], should_scale: Tensor | None) -> AbstractContextManager[None]:
        if should_scale is None or self.apply_to == "gradient":
            return nullcontext()
        return scale_update([get_local_shard(p) for p in used], list(used.values()), should_scale)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the base optimizer's state under "base" and that of AGS under "ags"; safe for `torch.load(weights_only=True)`."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state: dict[str, Any] = {"base": self.base.state_dict(), "ags": self.ags_state_dict()}
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of a `state_dict()`.

        Of a state with other batch sizes or other settings of factors and norms, only the base optimizer's state and the
        counters are restored; factors, previous norm and position in the epoch are dropped. delta, eps and s_min remain
        those of the constructor.

        Raises:
            ValueError: it is not the state of a TulaOptimizer, or has an unknown version.
        """
        state = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state = before(self, state) or state
        if "base" not in state or "ags" not in state:
            raise ValueError('this is not the state of a TulaOptimizer: the keys "base" and "ags" are missing')
        _check_version(state["ags"])
        self.base.load_state_dict(state["base"])
        self.load_ags_state_dict(state["ags"])
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def ags_state_dict(self) -> dict[str, Any]:
        """Return the state of AGS alone, for a base optimizer whose state is saved elsewhere."""
        return {
            "version": VERSION,
            "n_steps": self._n_steps,
            "meaning": self._get_state_settings(),
            "gate": self.gate.state_dict(),
            "factors": self.factors.state_dict(),
        }

    def load_ags_state_dict(self, ags: Mapping[str, Any]) -> None:
        """Restore an `ags_state_dict()`, as `load_state_dict` does; restore the base optimizer before.

        Raises:
            ValueError: it has an unknown version.
        """
        _check_version(ags)
        self._n_steps, device = ags["n_steps"], self.setup.params[0].device
        void = ags["meaning"] != self._get_state_settings()
        self.gate.load_state_dict(ags["gate"], steps=self._n_steps, device=None if void else device)
        self.factors.load_state_dict(ags["factors"], void=void)

    def _get_state_settings(self) -> dict[str, Any]:
        """Return the settings that stored factors and norms depend on."""
        excluded = [index for index, p in enumerate(self.setup.params) if p in self.setup.excluded]
        return {
            **({"excluded": excluded} if excluded else {}),
            "b_large": self.setup.b_large,
            "b_small": self.setup.b_small,
            "apply_to": self.apply_to,
            "gate": {"ewma": 0.0},  # as in checkpoints of versions that could average norms
            "factors": self.factors.get_state_settings(),
        }

    # ---- report

    def report(self) -> dict[str, float]:
        """Return numbers for a log line at a refresh; waits for the device.

        "scaled", "jumps_up" and "jumps_down" are shares of the "steps" since the previous report: those scaled, and those
        whose |G|^2 rose or fell by the share `delta` or more. Before the first refresh no step counts as scaled.
        "factors" is the number of factors (per element or per tensor), "mean" their mean, "at_cap" and "at_floor" the
        shares at the upper and the lower bound; 0, 1, 0 and 0 before the first refresh. "delta" is the latest Delta(G),
        infinite in the first step; "refreshes" counts from the start of the training.
        """
        refreshes = {"refreshes": float(self.factors.n_refresh)}
        return self.factors.report() | self.gate.report(self._n_steps) | refreshes

    def compute_memory(self) -> int:
        """Return the bytes of the factors from the first refresh on.

        Factors per element need as much as the trainable parameters, factors per tensor one number per parameter, a
        constant factor none.
        """
        return self.factors.compute_memory()


def _check_version(ags: Mapping[str, Any]) -> None:
    version = ags.get("version")
    if version != VERSION:
        raise ValueError(f"the AGS state has format {version}, but this version of tula reads only format {VERSION}")


# --- Advice for settings that do not suit a training

MIN_SHARE_SCALED, MAX_SHARE_AT_FLOOR = 0.2, 0.3


def explain_small_effect(report: Mapping[str, float]) -> dict[str, str]:
    """Return why AGS has little effect, from `TulaOptimizer.report()`: the name of a number of the report -> a sentence.

    That is the case if the gate left more than 80 % of the steps unscaled, or if more than 30 % of the factors are at their
    lower bound. It is empty otherwise, and before the first refresh.
    """
    if not (report["steps"] and report["factors"]):
        return {}
    sentences = {}
    shut = report["jumps_up"] + report["jumps_down"]
    if shut > 1 - MIN_SHARE_SCALED:
        sentences["scaled"] = (
            f"AGS scaled only {100 * report['scaled']:.0f} % of {report['steps']:.0f} steps, because in {100 * shut:.0f} % of the steps the gradient norm"
            ' changed by more than delta allows. Increase delta, or use the preset "robust", which has no limit on this change'
        )
    if report["at_floor"] > MAX_SHARE_AT_FLOOR:
        sentences["at_floor"] = (
            f"{100 * report['at_floor']:.0f} % of the AGS factors are at their lower bound s_min, so the weights with these factors hardly change,"
            ' because the small batch has no gradient for them. Use one factor per tensor (granularity "tensor"), or a larger b_small'
        )
    return sentences
