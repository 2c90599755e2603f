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
    accumulation_dtype,
    clip_,
    element_factor,
    factor_limit,
    gradient_change,
    group_by_dtype,
    local_factors,
    moving_average,
    scale_,
    scaled_update,
    smooth_factors,
    squared_norm,
    tensor_factors,
    where_,
)
from .sharding import local_shard, sharded_gradients
from .wrapper import (
    Wrapper,
    find_ddp,
    rank_and_world,
    refuse_base,
    refuse_other_model,
    refuse_sharded,
    require_one_of,
    require_real_numbers,
    require_whole_numbers,
)

# --- The gate (line 5): is this step scaled?

Consensus = Literal["broadcast", "check", "off"]


class Gate:
    """Lets the factors act where the squared gradient norm changed by less than `delta` since the step before (Eq. 5).

    A gate serves one TulaOptimizer.

    Args:
        delta: threshold on the relative change; 0 never scales, inf scales at any finite change.
        ewma: keeps a moving average of the squared norm, with this weight of the past, and gates on its change. The
            average moves slowly: at 0.9 the same `delta` means a tenfold change of a single norm.
        consensus: how ranks come to the same branch: "broadcast" rank 0's norm at each step, "check" at refreshes
            that they agree, or "off".

    Attributes:
        square: |G|^2 of the newest step, before scaling: 0-dim, on the device. None before the first step.
        level: what the next step is compared with: the same, or its moving average.
        change: Delta(G) of the newest step: 0-dim, on the device, infinite in the first. None before it.
        scaled: whether the newest step was scaled: 0-dim, bool, on the device. None before the first.

    Raises:
        ValueError: an argument of another kind or out of range.
    """

    def __init__(self, delta: float = 0.5, *, ewma: float = 0.0, consensus: Consensus = "broadcast") -> None:
        require_real_numbers(delta=delta, ewma=ewma)
        if not delta >= 0:
            raise ValueError(f"delta must not be negative or NaN, got {delta}")
        if not 0 <= ewma < 1:
            raise ValueError(f"ewma must be at least 0 and below 1, got {ewma}")
        require_one_of("consensus", consensus, ("broadcast", "check", "off"))
        self.delta, self.ewma, self.consensus = delta, ewma, consensus
        self.square: Tensor | None = None
        self.level: Tensor | None = None
        self.change: Tensor | None = None
        self.scaled: Tensor | None = None
        self._world: int | None = None
        self._counts = torch.zeros(3, dtype=torch.int64)  # steps scaled, jumps up, jumps down
        self._mark = (0, 0, 0, 0)  # steps and counts at the newest report

    def bind(self, world: int) -> None:
        """Serve an optimizer of so many ranks.

        Raises:
            ValueError: it serves one already.
        """
        if self._world is not None:
            raise ValueError("this Gate belongs to another TulaOptimizer; create one for each")
        self._world = world

    def decide(self, square: Tensor, *, has_factors: bool, refreshes: bool) -> Tensor:
        """Look at the squared norm of the raw gradients: whether this step is scaled (line 5), 0-dim, bool, on the device.

        Args:
            square: |G|^2, 0-dim.
            has_factors: whether there is anything to scale by; else no step counts as scaled.
            refreshes: whether this step refreshes the factors.

        Raises:
            RuntimeError: consensus is "check" and the ranks disagree.
        """
        square = self._agree_on_norm(square, refreshes)
        level = moving_average(square, self.level, self.ewma)
        rise = gradient_change(level, self.level)
        change = rise.abs()
        calm = change < self.delta
        self.scaled = calm if has_factors else torch.zeros_like(calm)
        self._count(rise, self.scaled)
        self.square, self.level, self.change = square, level, change
        return calm

    def _agree_on_norm(self, square: Tensor, refreshes: bool) -> Tensor:
        assert self._world is not None, "bind the gate to an optimizer before it decides"
        if self._world > 1 and self.consensus == "broadcast":
            dist.broadcast(square, 0)
        elif self._world > 1 and self.consensus == "check" and refreshes:
            _assert_equal(torch.stack([square.double(), self._counts[0].to(square.device).double()]))
        return square

    def _count(self, rise: Tensor, scaled: Tensor) -> None:
        if self.level is None:  # nothing to rise from
            up = down = torch.zeros_like(scaled)
        else:
            least = max(self.delta, torch.finfo(rise.dtype).tiny)  # 0 is no jump
            up, down = rise >= least, rise <= -least
        self._counts = self._counts.to(rise.device) + torch.stack([scaled, up, down])

    def report(self, steps: int) -> dict[str, float]:
        """Return the gate's part of `TulaOptimizer.report` after a number of steps; waits for the device."""
        counts = (steps, *(int(n) for n in self._counts.tolist()))
        steps_taken, scaled, up, down = (a - b for a, b in zip(counts, self._mark, strict=True))
        self._mark = (counts[0], counts[1], counts[2], counts[3])
        shares = {"scaled": scaled, "jumps_up": up, "jumps_down": down}
        change = math.inf if self.change is None else float(self.change)
        return {name: n / max(1, steps_taken) for name, n in shares.items()} | {
            "steps": float(steps_taken),
            "delta": change,
        }

    def forget(self) -> None:
        """Compare the next step with none: the norms of the batches to come are others."""
        self.square = self.level = self.change = self.scaled = None

    def meaning(self) -> dict[str, Any]:
        """The settings without which a stored norm means something else."""
        return {"ewma": self.ewma}

    def state_dict(self) -> dict[str, Any]:
        return {"n_scaled": int(self._counts[0]), "prev_sq": self.level}

    def load_state_dict(self, state: Mapping[str, Any], *, steps: int, device: torch.device | None) -> None:
        """Go on from a `state_dict()`.

        Args:
            steps: optimizer steps until then.
            device: of the parameters; None where the norm means something else now, so that only the count is kept.
        """
        self._counts = torch.tensor([state["n_scaled"], 0, 0])
        self._mark = (steps, state["n_scaled"], 0, 0)
        level = state["prev_sq"]
        self.square = self.change = self.scaled = None
        self.level = None if device is None or level is None else level.to(device)


def _assert_equal(local_bits: Tensor) -> None:
    """Compares bits, so that NaN equals NaN."""
    gathered = [torch.empty_like(local_bits) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local_bits)
    if any(not torch.equal(bits.view(torch.int64), local_bits.view(torch.int64)) for bits in gathered):
        bits_by_rank = [tuple(bits.tolist()) for bits in gathered]
        raise RuntimeError(
            f"the ranks disagree on (squared gradient norm, steps scaled): {bits_by_rank}; their weights may have drifted"
            ' apart. Train with consensus="broadcast"'
        )


# --- When the factors are refreshed (line 10): at the last step of each epoch, or every k steps

Refresh = Literal["epoch"] | int


@dataclass
class Schedule:
    """Where the training stands between refreshes: an epoch of `steps` steps, or `every` steps counted through."""

    every: int | None
    steps: int | None
    usual: int | None  # steps in an epoch of which nothing else was said; None: as in the epoch before
    taken: int = 0
    refreshed: bool = False
    owed: bool = False

    @classmethod
    def of(cls, refresh: Refresh, steps: int | None) -> Schedule:
        """Start at the first step.

        Args:
            refresh: "epoch" or a number of steps.
            steps: optimizer steps in each epoch, where known; for "epoch" only.

        Raises:
            ValueError: one of them is below 1, or `refresh` is another word or no whole number.
        """
        if refresh == "epoch":
            if steps is not None and steps < 1:
                raise ValueError(f"steps_per_epoch must be at least 1, got {steps}")
            return cls(every=None, steps=steps, usual=steps)
        if not isinstance(refresh, Integral) or isinstance(refresh, bool) or refresh < 1:
            raise ValueError(f'refresh must be "epoch" or a whole number of steps of at least 1, got {refresh!r}')
        return cls(every=int(refresh), steps=int(refresh), usual=int(refresh))

    @property
    def known(self) -> bool:
        """Whether the length of the epoch is known."""
        return self.steps is not None

    @property
    def due(self) -> bool:
        """Whether the coming step refreshes the factors.

        Raises:
            RuntimeError: the length of the epoch is not known.
        """
        if self.steps is None:
            raise RuntimeError(
                'refresh="epoch" needs the length of the epoch: call start_epoch(steps), or give steps_per_epoch'
            )
        return self.owed or self.taken + 1 == self.steps

    def advance(self, *, refreshed: bool) -> None:
        """Count a step."""
        self.taken += 1
        self.refreshed |= refreshed
        self.owed &= not refreshed
        if self.taken == self.steps:
            self._close()

    def start(self, steps: int, *, rest: bool | None = None) -> None:
        """Begin an epoch of so many steps, or what is left of one after a resume; None: whichever the count fits."""
        if self.every is not None:
            return
        if rest is None:
            rest = self.taken + steps == self.steps
        if rest and self.taken:
            return  # the count goes on, and steps that GradScaler skipped before the resume stay skipped
        if self.taken:
            # GradScaler skipped steps, so the count never came to the epoch's last
            self._close()
        self.steps = steps

    def owe(self) -> None:
        """Make the coming step refresh, and every one after it until one has."""
        self.owed = True

    def restart(self) -> None:
        """Forget the place in the epoch."""
        self.taken, self.refreshed, self.owed = 0, False, False

    def position(self) -> dict[str, int | bool | None]:
        """Return what a checkpoint keeps."""
        return {name: value for name, value in asdict(self).items() if name != "usual"}

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Go on from a `position()`; from the start where that counted otherwise."""
        self.restart()
        if saved["every"] == self.every:
            self.steps, self.taken = saved["steps"], saved["taken"]
            self.refreshed, self.owed = saved["refreshed"], saved["owed"]

    def _close(self) -> None:
        self.owed |= not self.refreshed
        self.taken, self.refreshed = 0, False
        self.steps = self.usual or self.steps


# --- The gradient of the small batch (lines 13 and 14)

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

    sharded = sharded_gradients(weighted, model)
    grads = [sharded.get(p) for p in params]
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
    for indices in group_by_dtype(params).values():
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


# --- The training that the optimizer serves, as far as its factors depend on it


def embeddings(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights of a model's embeddings, and so of heads that are tied to them."""
    modules = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    return [parameter for module in modules for parameter in module.parameters()]


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
        require_whole_numbers(b_large=b_large, b_small=b_small, available=available, steps_per_epoch=steps_per_epoch)
        rank, world = rank_and_world(model)
        share = max(1, b_large // world) if available is None else available
        for name, value in (("b_large", b_large), ("b_small", b_small), ("available", share)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1 sample, got {value}")
        if b_small > b_large:
            raise ValueError(
                f"b_small, {b_small}, is above b_large, {b_large}, but the small batch must be a part of the large one"
            )
        excluded, sharded = frozenset(embeddings(model) if exclude is None else exclude), sharding.is_sharded(model)
        setup = cls(base, model, rank, world, b_large, b_small, share, steps_per_epoch, seed, excluded, sharded)
        if setup.excluded and setup.excluded.issuperset(setup.params):
            raise ValueError("exclude leaves no parameter to scale (by default, embeddings are excluded)")
        return setup

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
        return sharding.sharded_norms(grads) if self.sharded else gradient_stats.norms(grads)

    def squared_norm(self, grads: Sequence[Tensor]) -> Tensor:
        """The squared l2 norm over all gradients together, likewise."""
        return sharding.sharded_squared_norm(grads) if self.sharded else gradient_stats.squared_norm(grads)

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


# --- The scaling factors (lines 11 to 18 and Eq. 8)


class Factors(ABC):
    """One way to find factors. An object of it serves one TulaOptimizer.

    Attributes:
        reads_b_small: whether anything depends on how many samples the small batch has.
        n_refresh: refreshes so far.
    """

    kind: ClassVar[str]
    reads_b_small = True
    n_refresh = 0
    _setup: Setup | None = None

    def bind(self, setup: Setup) -> None:
        """Serve this training.

        Raises:
            ValueError: it serves one already, or cannot serve this one.
        """
        if self._setup is not None:
            raise ValueError(f"this {type(self).__name__} belongs to another TulaOptimizer; create one for each")
        self._setup = setup

    def change(self, setup: Setup) -> None:
        """Serve the same training at other batches; what was found is void, and the coming step refreshes."""
        self._setup = setup

    @property
    def setup(self) -> Setup:
        """The training that is served."""
        assert self._setup is not None, "bind the factors to an optimizer before you read them"
        return self._setup

    @property
    @abstractmethod
    def identity(self) -> str | None:
        """Why every step is exactly the base's; None where the factors act."""

    @property
    @abstractmethod
    def bounds(self) -> Bounds:
        """The interval of the factors."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether there is anything to scale by."""

    @abstractmethod
    def in_force(self, params: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """The factor of each of these parameters that has one."""

    @abstractmethod
    def spread(self) -> dict[str, float]:
        """Return the factors' part of `TulaOptimizer.report`; waits for the device."""

    @property
    def limit(self) -> float:
        """s_max (line 12)."""
        return self.setup.limit

    @property
    def values(self) -> list[Tensor]:
        """The factors that have been found, one tensor a parameter that has any."""
        return []

    @property
    def mean(self) -> Tensor | float | None:
        """The mean of the factors, one an element or one a tensor; None where there are none. It waits for nothing."""
        values = self.values
        total = sum(factor.numel() for factor in values)
        if not values:
            return None
        if total == len(values):
            return torch.stack([factor.reshape(()) for factor in values]).mean()
        return torch.stack([f.mean(dtype=torch.float32) * (f.numel() / total) for f in values]).sum()

    # ---- the refresh

    @property
    def due(self) -> bool:
        """Whether the coming step refreshes the factors."""
        return False

    @property
    def wants_small_batch(self) -> bool:
        """Whether a small batch has to be taken before the coming step."""
        return False

    def start_epoch(self, steps: int, *, rest: bool | None) -> None:  # noqa: B027
        """Begin an epoch of so many steps, or the rest of one (`TulaOptimizer.start_epoch`)."""

    def refresh_soon(self) -> None:  # noqa: B027
        """Make the coming step refresh."""

    def take(  # noqa: B027
        self, loss: SmallLoss, params: Sequence[Tensor], *, step: int, scaler: torch.amp.GradScaler | None
    ) -> None:
        """Take the small batch's gradient (lines 13 and 14) with regard to these parameters.

        Args: as `Setup.small_gradients` has them.
        """

    def find(self, grads: Mapping[Tensor, Tensor]) -> None:  # noqa: B027
        """Find the factors that act from the next step on, by the large batch's raw gradients; in steps that are due."""

    def advance(self) -> None:  # noqa: B027
        """End a step."""

    def drop(self) -> None:  # noqa: B027
        """Forget what was seen for the coming step."""

    # ---- what is kept

    def memory(self) -> int:
        """Bytes of the factors, once there are any."""
        return 0

    def meaning(self) -> dict[str, Any]:
        """The settings without which stored factors and norms mean something else."""
        return {"kind": self.kind, "s_max": self.limit}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint saves."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], *, void: bool) -> None:  # noqa: B027
        """Go on from a `state_dict()`.

        Args:
            void: its factors mean something else now, so that the counts alone are kept.
        """


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
        require_real_numbers(factor=factor)
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
        return "AGS does not change the gradients, because its factor is 1" if self._number == 1 else None

    @property
    def bounds(self) -> Bounds:
        """The factor, and 1, which a step that is not scaled has."""
        return Bounds(min(1.0, self._number), max(1.0, self._number))

    @property
    def ready(self) -> bool:
        return True

    def in_force(self, params: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        kinds = {p: (p.device, accumulation_dtype(p.dtype)) for p in params}
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
        require_real_numbers(s_min=s_min, eps=eps, ema=ema)
        require_one_of("per", per, ("element", "tensor"))
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
            raise ValueError(f'a sharded model can only have factors per tensor: {type(self).__name__}(per="tensor")')
        if self.reads_b_small and setup.world > 1 and _synchronises_statistics(setup.model):
            raise ValueError(
                "SyncBatchNorm needs all ranks in a forward pass, but only some compute the small batch: use LocalNorms()"
                " (ags.source: local_norms), which needs no such pass"
            )

    @property
    def identity(self) -> str | None:
        size, large = self.setup.small_batch_size, self.setup.b_large
        if size < large:
            return None
        return f"AGS does not change the gradients, because its small batch of {size} samples is not below the batch of {large}"

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
        return factors | dict(zip(repeated, smooth_factors(new, old, self.ema) if repeated else [], strict=True))

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
        computed: dict[Tensor, Tensor] = {}
        for p in params:
            factor = element_factor(staged.pop(p), grads[p], self.eps, self.bounds, overwrite=is_distributed)
            (computed[p],) = self._replace_non_finite([p], [factor])
        return computed

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
            return sum(accumulation_dtype(p.dtype).itemsize for p in params)
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
                "LocalNorms needs the gradients of single ranks, which a sharded model does not have; use SmallBatch"
                " (ags.source: small_batch)"
            )
        ddp = find_ddp(setup.model)
        self.reads_b_small = ddp is None or setup.world == 1
        super().bind(setup)
        if ddp is None or setup.world == 1:
            return
        schedule = self.schedule  # what listens must not hold the DDP
        self._listener = NormListener(lambda: not schedule.known or schedule.due)
        try:
            add_listener(ddp, self._listener)
        except RuntimeError as error:
            raise ValueError(
                "LocalNorms needs the communication hook of DistributedDataParallel, which is already in use; use SmallBatch"
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


# --- The settings of section `ags` of a job file

Target = Literal["gradient", "update"]


class Configured(TypedDict):
    """Arguments of TulaOptimizer, for one of them: factors and gate keep its state."""

    factors: Factors
    gate: Gate
    apply_to: Target


def configured(settings: Mapping[str, Any]) -> Configured:
    """Make new collaborators: `TulaOptimizer(base, model=ddp, b_large=1024, **configured(AGS_PRESETS["robust"]))`.

    Args:
        settings: all that a preset names (`tula_cli/presets.py`), and `consensus` where it is not the usual one.

    Raises:
        ValueError: a value of another kind or out of range.
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
    gate = Gate(float(settings["delta"]), ewma=settings["norm_ewma"], consensus=settings.get("consensus", "broadcast"))
    return {
        "factors": LocalNorms(**common) if local else SmallBatch(settings["granularity"], **common),
        "gate": gate,
        "apply_to": settings["apply_to"],
    }


# --- The optimizer

Preset = Literal["paper", "robust"]

VERSION = 2


class TulaOptimizer(Wrapper):
    """Wraps a base optimizer and scales the large batch's gradients towards those of a small batch.

    Each step the gate compares the squared gradient norm with that of the step before (Eq. 5). Where it changed by less
    than its `delta`, the gradients are multiplied by the current factors (line 6), else they stay as they are (line 8).
    How factors are found is the business of `factors`; until the first refresh there are none, so the first epoch is
    the base's own.

    `param_groups`, `state` and `defaults` are the base's objects, hence learning-rate schedulers and GradScaler take
    the wrapper as they would take the base. After `step()`, `.grad` holds the gradients that the base has seen. Do
    not clip gradients before the step, which would make every norm the same; use `max_grad_norm`.

    Args:
        base: the optimizer that makes the update; with apply_to="gradient" one without a division by the gradient's
            magnitude, such as SGD.
        model: the module, or its DistributedDataParallel (compiled or not), or one that fully_shard has divided. With
            these all ranks of the default process group take part; any other module is taken to be trained by this process
            alone.
        b_large: samples in one optimizer step, over all ranks and accumulation steps.
        b_small: samples in the small batch, over all ranks.
        preset: where `factors` and `gate` come from if they are not given: "paper" is Algorithm 1, "robust" one smoothed
            factor a tensor, taken at every step from the ranks' own gradients, and no gate (`tula_cli/presets.py`).
        factors: how factors are found: SmallBatch, LocalNorms or Static; an object for this optimizer alone.
        gate: which steps are scaled; an object for this optimizer alone.
        apply_to: "gradient" (line 6), or "update", which scales what the base's step does to the weights, weight decay
            included: the way for Adam and its like. For a moment a copy of the parameters more.
        steps_per_epoch: optimizer steps in each epoch, for factors refreshed at its end; `start_epoch` says the same of
            one epoch.
        available: samples that one rank can offer to the small batch, equal on all ranks; by default
            b_large // world, with gradient accumulation the size of a micro-batch.
        max_grad_norm: clips the joint norm of the gradients that the base sees, after scaling.
        seed: seeds the random numbers that the small batch's forward pass draws.
        exclude: parameters whose factor is always 1. The gate looks at their gradients as at all others. By default those of
            embeddings, whose rows are mostly not in the small batch; () scales all, as the paper does.

    Attributes:
        base: the base optimizer.
        setup: the model and its batches, among them `small_batch_size`: samples, over all ranks, that a refresh really
            uses.

    Raises:
        ValueError: an argument of another kind or out of range, a base that AGS cannot act through, a model that has
            none of the base's parameters, or parameters that are sharded in another way.

    Warns where it can only be the base: see `identity`.
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        *,
        model: nn.Module,
        b_large: int,
        b_small: int = 128,
        preset: Preset = "paper",
        factors: Factors | None = None,
        gate: Gate | None = None,
        apply_to: Target = "gradient",
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
            raise ValueError(f"max_grad_norm must be above 0, got {max_grad_norm}")
        refuse_sharded(base, model, shares=True)
        sizes: dict[str, Any] = {"b_large": b_large, "b_small": b_small, "available": available}
        self.setup = Setup.of(base, model, **sizes, steps_per_epoch=steps_per_epoch, seed=seed, exclude=exclude)
        refuse_base(base, of_gradients=apply_to == "gradient")
        refuse_other_model(base, model)
        self.apply_to, self.max_grad_norm = apply_to, max_grad_norm
        usual = configured(AGS_PRESETS[preset])
        self.factors, self.gate = factors or usual["factors"], gate or usual["gate"]
        self.factors.bind(self.setup)
        self.gate.bind(self.setup.world)
        self._n_steps = 0
        self._warned = False
        if self.identity is not None:
            warnings.warn(self.identity, stacklevel=2)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base; its parameters have the factor 1 until the next refresh."""
        super().add_param_group(param_group)
        refuse_sharded(self.base, self.setup.model, shares=True)

    # ---- the refresh

    @property
    def bounds(self) -> Bounds:
        """The interval of the factors: s_min and s_max (line 12), or of one common factor and 1."""
        return self.factors.bounds

    @property
    def identity(self) -> str | None:
        """Why every step is exactly the base's although AGS was to act; None where it acts."""
        return self.factors.identity

    @property
    def wants_small_batch(self) -> bool:
        """Whether `small_batch` has to be called before the coming step, because that refreshes the factors.

        A refresh that could not be taken (a skipped step, a gradient that is not finite) is wanted again.

        Raises:
            RuntimeError: factors are refreshed at the end of the epoch, and its length is not known.
        """
        return self.factors.wants_small_batch

    def start_epoch(self, steps: int, *, rest: bool | None = None) -> None:
        """Say that the coming epoch, or what is left of it after a resume, has this many optimizer steps.

        `rest` tells which of the two it is; without it, it is the rest where the count of steps fits that, as it does
        unless GradScaler has skipped some.

        Epochs that follow without such a call have `steps_per_epoch` steps, or, where that was not given, as many as
        this one. Has no effect on factors that are refreshed every k steps, which counts through.

        Raises:
            ValueError: `steps` is below 1.
        """
        if steps < 1:
            raise ValueError(f"an epoch needs at least 1 step, got {steps}")
        self.factors.start_epoch(steps, rest=rest)

    def change_batch(self, *, b_large: int, b_small: int, available: int | None = None) -> None:
        """Go on at other batches: what a state of the old ones does to a new optimizer, and the coming step refreshes.

        Factors and norms so far are void, counters go on. To be called between two steps, on every rank; `start_epoch`
        tells the steps that are left of the epoch.

        Args: as of the constructor.

        Raises:
            ValueError: a size that is no whole number or below 1, or a small batch above the large one.
        """
        setup, steps = self.setup, self.setup.steps_per_epoch
        sizes: dict[str, Any] = {"b_large": b_large, "b_small": b_small, "available": available}
        new = Setup.of(self.base, setup.model, **sizes, steps_per_epoch=steps, seed=setup.seed, exclude=setup.excluded)
        if new == setup:
            return
        self.setup = new
        self.gate.forget()
        self.factors.change(new)

    def refresh_soon(self) -> None:
        """Let the coming step refresh the factors, for AGS that begins in the middle of a training.

        Without it the first epoch, or the first k steps, from there on would be the base's own.
        """
        self.factors.refresh_soon()

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
            raise RuntimeError("call small_batch() only in steps in which wants_small_batch is true")
        params = [p for p, g in self._scaled(self._gradients()).items() if not g.is_sparse]
        self.factors.take(loss, params, step=self._n_steps, scaler=scaler)

    def _drop(self) -> None:
        self.factors.drop()

    # ---- the step

    def _update(self) -> None:
        """One optimizer step (lines 4 to 10)."""
        with self.around_base_step():
            self.base.step()

    @contextmanager
    def around_base_step(self) -> Iterator[None]:
        """Make one step of the base that is taken inside a step of AGS: for a base that somebody else steps.

        To be entered and left with gradients disabled, on every rank. Left by an exception, the step was none.

        Raises:
            RuntimeError: the length of the epoch is not known, or the gate is to check the ranks and they disagree.
        """
        due = self.factors.due
        grads = self._gradients()
        calm = self._look(grads, due) if grads and self.identity is None else None
        used = {} if calm is None else self._in_force(grads)
        if calm is not None and self.apply_to == "gradient":
            scale_([grads[p] for p in used], list(used.values()), calm)
        if self.max_grad_norm is not None and grads:
            clip_(list(grads.values()), self.max_grad_norm, square=self.setup.squared_norm(list(grads.values())))
        with self._around_update(used, calm):
            yield
        self.factors.advance()
        self._n_steps += 1

    def _gradients(self) -> dict[Tensor, Tensor]:
        return {p: local_shard(p.grad) for p in self.setup.params if p.grad is not None}

    def _scaled(self, grads: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        excluded = self.setup.excluded
        return {p: g for p, g in grads.items() if p not in excluded} if excluded else grads

    def _look(self, grads: dict[Tensor, Tensor], due: bool) -> Tensor:
        """Decide from the raw gradients whether to scale this step (line 5), and compute the factors of the next (line 10)."""
        calm = self.gate.decide(
            self.setup.squared_norm(list(grads.values())), has_factors=self.factors.ready, refreshes=due
        )
        if due:
            self.factors.find(self._scaled(grads))
        return calm

    def _in_force(self, grads: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """The factor of each parameter that has one and a dense gradient."""
        dense = [p for p, g in grads.items() if not g.is_sparse]
        if len(dense) < len(grads) and not self._warned:
            self._warned = True
            warnings.warn("AGS counts sparse gradients in the norm but does not scale them", stacklevel=2)
        return self.factors.in_force([p for p in dense if p not in self.setup.excluded])

    def _around_update(self, used: dict[Tensor, Tensor], calm: Tensor | None) -> AbstractContextManager[None]:
        if calm is None or self.apply_to == "gradient":
            return nullcontext()
        return scaled_update([local_shard(p) for p in used], list(used.values()), calm)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The base's state under "base", that of AGS under "ags"; loads with `torch.load(weights_only=True)`."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state: dict[str, Any] = {"base": self.base.state_dict(), "ags": self.ags_state_dict()}
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
        self.load_ags_state_dict(state["ags"])
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def ags_state_dict(self) -> dict[str, Any]:
        """The part of `state_dict` that is not the base's, for a base whose own is kept elsewhere."""
        return {
            "version": VERSION,
            "n_steps": self._n_steps,
            "meaning": self._meaning(),
            "gate": self.gate.state_dict(),
            "factors": self.factors.state_dict(),
        }

    def load_ags_state_dict(self, ags: Mapping[str, Any]) -> None:
        """Continue from an `ags_state_dict()`, as `load_state_dict` does; the base has its own state by then.

        Raises:
            ValueError: it is of an unknown version.
        """
        _check_version(ags)
        self._n_steps, device = ags["n_steps"], self.setup.params[0].device
        void = ags["meaning"] != self._meaning()
        self.gate.load_state_dict(ags["gate"], steps=self._n_steps, device=None if void else device)
        self.factors.load_state_dict(ags["factors"], void=void)

    def _meaning(self) -> dict[str, Any]:
        """The settings without which stored factors and norms mean something else."""
        excluded = [index for index, p in enumerate(self.setup.params) if p in self.setup.excluded]
        return {
            **({"excluded": excluded} if excluded else {}),
            "b_large": self.setup.b_large,
            "b_small": self.setup.b_small,
            "apply_to": self.apply_to,
            "gate": self.gate.meaning(),
            "factors": self.factors.meaning(),
        }

    # ---- what it did

    def report(self) -> dict[str, float]:
        """Plain numbers for a log line at a refresh; waits for the device, and changes nothing in the training.

        "scaled", "jumps_up" and "jumps_down" are shares of the "steps" since the report before: those scaled, and
        those whose |G|^2 rose or fell by the share `delta` or more. Before the first refresh there are no factors, and
        no step counts as scaled. "mean", "at_cap" and "at_floor" are over all "factors", one an element or one a tensor;
        1, 0 and 0 before the first refresh. "delta" is the last
        Delta(G), infinite in the first step; "refreshes" counts from the start of the training.
        """
        refreshes = {"refreshes": float(self.factors.n_refresh)}
        return self.factors.spread() | self.gate.report(self._n_steps) | refreshes

    def memory(self) -> int:
        """Bytes of the factors, held from the first refresh on: as much as the trainable parameters with one an element,
        one number a parameter with one a tensor, none with one common factor and where AGS is the identity."""
        return self.factors.memory()


def _check_state(state: Mapping[str, Any]) -> None:
    if "base" not in state or "ags" not in state:
        raise ValueError('this is not the state of a TulaOptimizer: it has no "base" and "ags"')
    _check_version(state["ags"])


def _check_version(ags: Mapping[str, Any]) -> None:
    version = ags.get("version")
    if version != VERSION:
        raise ValueError(f"the AGS state has version {version}, this program reads version {VERSION}")


# --- Advice for settings that do not suit a training

FEW_SCALED, MANY_AT_FLOOR = 0.2, 0.3


def advice(report: Mapping[str, float]) -> dict[str, str]:
    """Say in which way AGS hardly acts, from `TulaOptimizer.report()`: a sentence by the number that shows it.

    That is where the gate was shut in more than 80 % of the steps, or more than 30 % of the factors are at their lower
    bound. Empty where nothing is wrong. That no step is scaled before the first refresh is no fault, and not told.
    """
    if not (report["steps"] and report["factors"]):
        return {}
    sentences = {}
    shut = report["jumps_up"] + report["jumps_down"]
    if shut > 1 - FEW_SCALED:
        sentences["scaled"] = (
            f"AGS scaled only {report['scaled']:.0%} of {report['steps']:.0f} steps: in {shut:.0%} of them the gradient norm changed by more"
            " than delta allows."
            ' Increase delta, or use the preset "robust", which has no such gate'
        )
    if report["at_floor"] > MANY_AT_FLOOR:
        sentences["at_floor"] = (
            f"{report['at_floor']:.0%} of the AGS factors are at their lower bound s_min, so their weights hardly change:"
            ' the small batch has no gradient for them. Use one factor per tensor (granularity "tensor"), or a larger b_small'
        )
    return sentences
