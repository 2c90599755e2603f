"""AdaScale SGD (Johnson et al. 2020): the learning rate of a small batch times a gain that the gradients' noise allows."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from . import gradient_stats
from .ddp_hook import NormListener, add_listener
from .gradient_stats import clip_, squared_norm
from .wrapper import Wrapper, find_ddp, rank_and_world

VERSION = 1
Number = TypeVar("Number", float, Tensor)
LEAST_NOISE = 1e-6
"""Lower bound of an estimate of the variance (appendix B.3): nothing is divided by zero."""


class AdaScale(Wrapper):
    """Wraps SGD and multiplies its learning rate by the gain r, between 1 and S = batch / reference_batch.

    With sigma^2 the trace of the gradient's covariance at the reference batch and mu^2 the squared norm of its mean::

        r = (sigma^2 + mu^2) / (sigma^2 / S + mu^2)

    Both come from the squared norms of gradients at two batches (Eq. 4 of the paper in the form of McCandlish et al. 2018,
    appendix A.1, where the smaller need not be the reference batch), averaged over steps as in appendix B.3. A step takes
    the averages of the steps before it (the first one has gain 1): it does not depend on its own batch's noise.

    On a GPU the gain stays there, as a learning rate that fused SGD reads from a tensor, and the host waits for nothing.
    A base that is not fused takes numbers alone, so that the host waits for the backward pass at each step.

    With several ranks the small batch is a rank's own, seen before the reduction; accumulate with no_sync(). One process
    has to tell by `observe` what the gradient of a part of the batch was.

    The paper counts a step as r steps of the reference batch, in its schedule and until it ends. Here that count is kept
    and told (`iterations`), and the caller decides what its schedule goes by.

    `param_groups`, `state` and `defaults` are the base's objects. Do not clip before the step; use `max_grad_norm`.

    Args:
        base: torch.optim.SGD, or an optimizer derived from it; the gain is not derived for any other.
        model: the module, or its DistributedDataParallel.
        batch: samples in one optimizer step, over all ranks and accumulation steps.
        reference_batch: the batch that the learning rate was tuned for.
        max_grad_norm: clips the joint norm of the gradients after it was taken.

    Raises:
        ValueError: an argument out of range, or a base that is not SGD.
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        *,
        model: nn.Module,
        batch: int,
        reference_batch: int,
        max_grad_norm: float | None = None,
    ) -> None:
        if batch < 1 or reference_batch < 1:
            raise ValueError(f"batches must be at least 1 sample, got {batch} and {reference_batch}")
        if "SGD" not in {kind.__name__ for kind in type(base).__mro__}:
            raise ValueError(f"AdaScale's gain is derived for SGD, not for {type(base).__name__}; use torch.optim.SGD")
        super().__init__(base)
        self.batch, self.reference_batch, self.max_grad_norm = batch, reference_batch, max_grad_norm
        _, self._world = rank_and_world(model)
        self._local = NormListener(lambda: True) if self._world > 1 else None
        ddp = find_ddp(model)
        if ddp is not None and self._local is not None:
            add_listener(ddp, self._local)
        self._observed: tuple[Tensor, int] | None = None
        self._noise: Tensor | None = None  # moving average of sigma^2, 0-dim
        self._signal: Tensor | None = None  # of mu^2
        self._count = 0  # steps that were averaged
        self._iterations: float | Tensor = 0.0

    @property
    def iterations(self) -> float:
        """Steps of the reference batch that the steps so far are worth, the sum of the gains. Waits for the newest step."""
        return float(self._iterations)

    @property
    def scale(self) -> float:
        """S, the batch over the reference batch."""
        return self.batch / self.reference_batch

    @property
    def gain(self) -> float:
        """r, from the steps so far; 1 before the first. Waits for the newest step."""
        if self._noise is None or self._signal is None:
            return 1.0
        noise, signal = torch.stack([self._noise, self._signal]).tolist()
        value: float = gain(noise, signal, self.scale)
        return value

    def observe(self, square: Tensor, samples: int) -> None:
        """Tell, before a step, the squared norm of the mean gradient over a part of its batch; for one process.

        Args:
            square: 0-dim, not multiplied by a loss scale.
            samples: in that part, fewer than the batch.

        Raises:
            ValueError: the part is none.
        """
        if not 0 < samples < self.batch:
            raise ValueError(f"a part of the batch of {self.batch} has 1 to {self.batch - 1} samples, got {samples}")
        self._observed = square, samples

    def _drop(self) -> None:
        self._observed = None
        if self._local is not None:
            self._local.drop()

    def _update(self) -> None:
        """One step of the base at its learning rate times the gain.

        Raises:
            RuntimeError: no gradient of a smaller batch was seen.
        """
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms = self._norms_of_batches(squared_norm(grads)) if grads else None
        factor = self._factor()
        if self.max_grad_norm is not None and grads:
            clip_(grads, self.max_grad_norm)
        self._scaled_step(factor)
        self._iterations = self._iterations + factor
        if norms is not None:
            self._learn(*norms)
        self._drop()

    def _factor(self) -> float | Tensor:
        """The gain; where the host would have to wait for it and the base can do without, 0-dim, float64."""
        if self._noise is None or self._signal is None or not gradient_stats.on_device(self._noise):
            return self.gain
        if not all(group.get("fused") for group in self.param_groups):
            return self.gain
        return gain(self._noise.double(), self._signal.double(), self.scale)

    def _scaled_step(self, factor: float | Tensor) -> None:
        rates = [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, rates, strict=True):
            scaled = rate * factor
            group["lr"] = scaled.float() if isinstance(scaled, Tensor) else scaled  # fused kernels read float32
        self.base.step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate

    def _norms_of_batches(self, large: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return |g|^2 of the small batch and of the large one, and the samples of the small one."""
        if self._local is None:
            if self._observed is None:
                raise RuntimeError("in one process, AdaScale needs the gradient of a part of the batch: call observe()")
            square, samples = self._observed
            return square, large, samples
        norms = self._local.take()
        if norms is None:
            raise RuntimeError(
                "AdaScale observed no gradient reduction; the last backward pass before a step must not be in no_sync()"
            )
        # Both were taken before GradScaler unscaled the gradients; their ratio knows nothing of that.
        _, local_norm, averaged = norms
        return large * (local_norm.sum() / averaged.sum()), large, self.batch // self._world

    def _learn(self, small: Tensor, large: Tensor, samples: int) -> None:
        noise, signal = estimate_noise(
            small, large, samples=samples, batch=self.batch, reference_batch=self.reference_batch
        )
        self._count += 1
        # The mean of all steps until there are as many as the moving average looks back on.
        weight = max(1 / self._count, min(1.0, self.batch / samples / 1000))
        self._noise = _moving_average(self._noise, noise, weight)
        self._signal = _moving_average(self._signal, signal, weight)

    def state_dict(self) -> dict[str, Any]:
        """The base's state under "base", the averages under "adascale"; loads with `torch.load(weights_only=True)`."""
        averages = {
            "version": VERSION,
            "noise": self._noise,
            "signal": self._signal,
            "count": self._count,
            "iterations": self.iterations,
        }
        return {"base": self.base.state_dict(), "adascale": averages}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict()` was taken; the averages hold for any batch at the same reference batch.

        Raises:
            ValueError: the state is not of an AdaScale, or of an unknown version.
        """
        averages = state_dict.get("adascale")
        if averages is None or averages.get("version") != VERSION:
            raise ValueError("this is not the state of a known version of AdaScale")
        self.base.load_state_dict(state_dict["base"])
        device = self.param_groups[0]["params"][0].device
        self._noise, self._signal = (
            None if v is None else v.to(device) for v in (averages["noise"], averages["signal"])
        )
        self._count, self._iterations = averages["count"], averages["iterations"]
        self._drop()

    def report(self) -> dict[str, float]:
        """Plain numbers for a log line: the gain, and the steps of the reference batch so far. Waits for the device."""
        return {"gain": self.gain, "iterations": self.iterations}


def gain(noise: Number, signal: Number, scale: float) -> Number:
    """Return r = (sigma^2 + mu^2) / (sigma^2 / S + mu^2) (Eq. 3 of the paper); 1 where both are 0, for nothing is known.

    Args:
        noise: sigma^2, at the reference batch.
        signal: mu^2.
        scale: S, the batch over the reference batch.
    """
    below = noise / scale + signal
    if isinstance(below, Tensor):
        return torch.where(below > 0, (noise + signal) / below, 1.0)
    return (noise + signal) / below if below > 0 else 1.0


def estimate_noise(
    small: Tensor, large: Tensor, *, samples: int, batch: int, reference_batch: int
) -> tuple[Tensor, Tensor]:
    """Return unbiased estimates of sigma^2 at the reference batch and of mu^2, then bounded as in appendix B.3.

    Args:
        small: |g|^2 of mean gradients over `samples` each.
        large: |g|^2 of the mean gradient over the whole `batch`, of which the small ones are parts.
    """
    trace = (small - large) / (1 / samples - 1 / batch)  # of one sample's covariance
    return (trace / reference_batch).clamp(min=LEAST_NOISE), (large - trace / batch).clamp(min=0.0)


def _moving_average(average: Tensor | None, value: Tensor, weight: float) -> Tensor:
    if average is None:
        average = torch.zeros_like(value)
    # A gradient that is not finite, or zero altogether, tells nothing.
    return torch.where(value.isfinite(), average + weight * (value - average), average)
