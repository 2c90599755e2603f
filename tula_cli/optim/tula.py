"""Adaptive gradient scaling (AGS, Algorithm 1 of the Tula paper) as an optimizer around another optimizer.

In the loop, between `backward()` and the step::

    if opt.wants_small_batch:
        opt.small_batch(lambda n: loss_fn(ddp.module(x[:n]), y[:n]))
    opt.step()

Line numbers in this package are those of Algorithm 1.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tula_cli.presets import AGS_PRESETS

from .configure import Target, configured
from .gate import Gate
from .parts.factor_source import Factors
from .parts.gradient_scaling import scale_, scaled_update
from .parts.indicators import Bounds, clip_
from .parts.refusals import one_of, real_numbers, refuse_base, refuse_other_model, refuse_sharded
from .parts.setup import Setup
from .parts.shares import share
from .parts.small_batch import SmallLoss
from .parts.wrapper import Wrapper

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
        one_of("apply_to", apply_to, ("gradient", "update"))
        one_of("preset", preset, tuple(AGS_PRESETS))
        real_numbers(max_grad_norm=max_grad_norm)
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
            raise RuntimeError("small_batch() is for steps where wants_small_batch is true")
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
        return {p: share(p.grad) for p in self.setup.params if p.grad is not None}

    def _scaled(self, grads: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        excluded = self.setup.excluded
        return {p: g for p, g in grads.items() if p not in excluded} if excluded else grads

    def _look(self, grads: dict[Tensor, Tensor], due: bool) -> Tensor:
        """What the raw gradients say: whether to scale in this step (line 5), and the factors of the next (line 10)."""
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
        return scaled_update([share(p) for p in used], list(used.values()), calm)

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
        raise ValueError('the state is not of a TulaOptimizer: it has no "base" and "ags"')
    _check_version(state["ags"])


def _check_version(ags: Mapping[str, Any]) -> None:
    version = ags.get("version")
    if version != VERSION:
        raise ValueError(f"the AGS state has version {version}, this program reads version {VERSION}")
