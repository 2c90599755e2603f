"""AdaScale SGD (Johnson et al. 2020): the learning rate of a small batch times a gain that the gradients' noise allows."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from . import gradient_stats
from .ddp_hook import NormListener, add_listener
from .gradient_stats import clip_, squared_norm
from .wrapper import Wrapper, find_ddp, get_rank_and_world

VERSION = 1
Number = TypeVar("Number", float, Tensor)
LEAST_NOISE = 1e-6
"""Lower bound of an estimate of the variance (appendix B.3): nothing is divided by zero."""


class AdaScale(Wrapper):
    """Wraps SGD and multiplies its learning rate by the gain r, between 1 and S = batch / reference_batch.

    With sigma^2 the trace of the gradient's covariance at the reference batch and mu^2 the squared norm of its mean::

        r = (sigma^2 + mu^2) / (sigma^2 / S + mu^2)

    Both come from the squared norms of gradients at two batches (Eq. 4 of the paper in the form of McCandlish et al. 2018,
    appendix A.1, where the smaller need not be the reference batch), averaged over steps as in appendix B.3. A step uses
    the averages of the steps before it (the gain of the first is 1), so it does not depend on the noise of its batch.

    On a GPU fused SGD reads the learning rate from a tensor, so the host does not wait. A base optimizer that is not fused
    needs a number, so the host waits for the backward pass at each step.

    With several ranks the small batch is that of one rank, before the reduction; accumulate with no_sync(). A single process
    passes the gradient norm of a part of the batch to `observe`.

    The paper counts a step as r steps of the reference batch, in its schedule and for the end of the training. `iterations`
    has that count; the caller decides what its schedule depends on.

    `param_groups`, `state` and `defaults` are the base's objects. Do not clip before the step; use `max_grad_norm`.

    Args:
        base: torch.optim.SGD, or an optimizer derived from it; the gain is not derived for any other.
        model: the module, or its DistributedDataParallel.
        batch: samples in one optimizer step, over all ranks and accumulation steps.
        reference_batch: the batch that the learning rate was tuned for.
        max_grad_norm: clips the joint norm of the gradients, after the norms for the gain are computed.

    Raises:
        ValueError: an argument is out of range, or the base optimizer is not SGD.
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
        _, self._world = get_rank_and_world(model)
        self._local = NormListener(lambda: True) if self._world > 1 else None
        ddp = find_ddp(model)
        if ddp is not None and self._local is not None:
            add_listener(ddp, self._local)
        self._observed: tuple[Tensor, int] | None = None
        self._noise: Tensor | None = None  # moving average of sigma^2, 0-dim
        self._signal: Tensor | None = None  # of mu^2
        self._count = 0  # steps in the averages
        self._iterations: float | Tensor = 0.0

    @property
    def iterations(self) -> float:
        """Steps of the reference batch that the steps so far are equivalent to (sum of the gains); waits for the newest step."""
        return float(self._iterations)

    @property
    def scale(self) -> float:
        """S, the ratio of the batch to the reference batch."""
        return self.batch / self.reference_batch

    @property
    def gain(self) -> float:
        """r, from the steps so far; 1 before the first; waits for the newest step."""
        if self._noise is None or self._signal is None:
            return 1.0
        noise, signal = torch.stack([self._noise, self._signal]).tolist()
        value: float = compute_gain(noise, signal, self.scale)
        return value

    def observe(self, square: Tensor, samples: int) -> None:
        """Take note of the squared norm of the mean gradient over a part of the coming step's batch; for a single process.

        Args:
            square: the squared norm, 0-dim, without a loss scale.
            samples: samples of that part, fewer than the batch.

        Raises:
            ValueError: `samples` is below 1 or not below the batch.
        """
        if not 0 < samples < self.batch:
            raise ValueError(f"a part of the batch of {self.batch} has 1 to {self.batch - 1} samples, got {samples}")
        self._observed = square, samples

    def _discard_pending(self) -> None:
        self._observed = None
        if self._local is not None:
            self._local.clear()

    def _update(self) -> None:
        """Take a step of the base optimizer at its learning rate times the gain.

        Raises:
            RuntimeError: the gradient norm of a smaller batch is missing.
        """
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms = self._compute_batch_norms(squared_norm(grads)) if grads else None
        factor = self._compute_factor()
        if self.max_grad_norm is not None and grads:
            clip_(grads, self.max_grad_norm)
        self._take_scaled_step(factor)
        self._iterations = self._iterations + factor
        if norms is not None:
            self._update_statistics(*norms)
        self._discard_pending()

    def _compute_factor(self) -> float | Tensor:
        """Return the gain: 0-dim, float64, if it is on a device and the base optimizer accepts a tensor; else a number."""
        if self._noise is None or self._signal is None or not gradient_stats.on_device(self._noise):
            return self.gain
        if not all(group.get("fused") for group in self.param_groups):
            return self.gain
        return compute_gain(self._noise.double(), self._signal.double(), self.scale)

    def _take_scaled_step(self, factor: float | Tensor) -> None:
        rates = [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, rates, strict=True):
            scaled = rate * factor
            group["lr"] = scaled.float() if isinstance(scaled, Tensor) else scaled  # fused kernels read float32
        self.base.step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate

    def _compute_batch_norms(self, large: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return |g|^2 of the small batch and of the large one, and the samples of the small one."""
        if self._local is None:
            if self._observed is None:
                raise RuntimeError("in one process, AdaScale needs the gradient of a part of the batch: call observe()")
            square, samples = self._observed
            return square, large, samples
        norms = self._local.pop_norms()
        if norms is None:
            raise RuntimeError(
                "AdaScale observed no gradient reduction; the last backward pass before a step must not be in no_sync()"
            )
        # Both include the loss scale of GradScaler, which cancels in their ratio.
        _, local_norm, averaged = norms
        return large * (local_norm.sum() / averaged.sum()), large, self.batch // self._world

    def _update_statistics(self, small: Tensor, large: Tensor, samples: int) -> None:
        noise, signal = estimate_noise(
            small, large, samples=samples, batch=self.batch, reference_batch=self.reference_batch
        )
        self._count += 1
        # The mean of all steps, until there are more than the window of the moving average.
        weight = max(1 / self._count, min(1.0, self.batch / samples / 1000))
        self._noise = _update_average(self._noise, noise, weight)
        self._signal = _update_average(self._signal, signal, weight)

    def state_dict(self) -> dict[str, Any]:
        """Return the base optimizer's state under "base" and the averages under "adascale"; safe for `weights_only=True`."""
        averages = {
            "version": VERSION,
            "noise": self._noise,
            "signal": self._signal,
            "count": self._count,
            "iterations": self.iterations,
        }
        return {"base": self.base.state_dict(), "adascale": averages}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of a `state_dict()`; its averages apply to any batch with the same reference batch.

        Raises:
            ValueError: it is not the state of an AdaScale, or has an unknown version.
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
        self._discard_pending()

    def report(self) -> dict[str, float]:
        """Return numbers for a log line: the gain, and the steps of the reference batch so far; waits for the device."""
        return {"gain": self.gain, "iterations": self.iterations}


def compute_gain(noise: Number, signal: Number, scale: float) -> Number:
    """Return r = (sigma^2 + mu^2) / (sigma^2 / S + mu^2) (Eq. 3 of the paper); 1 if both are 0, which means unknown.

    Args:
        noise: sigma^2, at the reference batch.
        signal: mu^2.
        scale: S, the ratio of the batch to the reference batch.
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
        large: |g|^2 of the mean gradient over the whole `batch`, which contains the small ones.
    """
    trace = (small - large) / (1 / samples - 1 / batch)  # trace of one sample's covariance
    return (trace / reference_batch).clamp(min=LEAST_NOISE), (large - trace / batch).clamp(min=0.0)


def _update_average(average: Tensor | None, value: Tensor, weight: float) -> Tensor:
    if average is None:
        average = torch.zeros_like(value)
    # A gradient that is not finite, or all zero, has no information.
    return torch.where(value.isfinite(), average + weight * (value - average), average)
