"""Layer-wise adaptive optimizers for large batches: LARS and LAMB.

Both make the step of each tensor proportional to its norm. Tensors of at most one dimension (biases, the scales and
shifts of normalization layers) get the plain step without weight decay, as is usual with both. Steps and states of weights in
half precision are computed in float32: in half precision norms overflow and squares of gradients vanish.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .gradient_stats import get_accumulation_dtype, group_by_dtype
from .wrapper import Optimizer

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]


class _Layerwise(Optimizer):
    """Base class of LARS and LAMB: a loop over groups of tensors that one foreach operation can process."""

    def _take_step(self) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for adapted in (True, False):
                selected = [p for p in params if (p.ndim > 1) == adapted]
                for indices in group_by_dtype(selected).values():
                    self._update_tensors(group, [selected[i] for i in indices], adapted=adapted)

    def _update_tensors(self, group: dict[str, Any], params: list[Tensor], *, adapted: bool) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of a `state_dict()`; torch's method would round the states to the precision of the weights."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, params, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and get_accumulation_dtype(p.dtype) is not p.dtype:
                    self.state[p][name] = value.to(p.device, get_accumulation_dtype(p.dtype), copy=True)


class Lars(_Layerwise):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, Algorithm 1).

    For each tensor w with gradient g, weight decay b, momentum m and learning rate lr::

        local = trust |w| / (|g| + b |w|)       (1 where either norm is 0)
        v <- m v + lr local (g + b w)
        w <- w - v

    As in the paper the learning rate is part of the momentum. torch (v <- m v + ..., w <- w - lr v) and libraries that
    follow it differ from this while the learning rate changes.

    Args:
        params: parameters or groups.
        lr: learning rate; with a trust coefficient of 0.001 larger than SGD's.
        momentum: m.
        weight_decay: b, of tensors of two dimensions and more.
        trust_coefficient: trust, the step of a tensor relative to its norm at lr 1.
        nesterov: take the step w - (m v + lr local (g + b w)).
        eps: added to the denominator.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        nesterov: bool = False,
        eps: float = 1e-8,
    ) -> None:
        _require_nonnegative(lr=lr, momentum=momentum, weight_decay=weight_decay, eps=eps)
        if not trust_coefficient > 0:
            raise ValueError(f"trust_coefficient must be a number above 0, got {trust_coefficient}")
        if nesterov and not momentum:
            raise ValueError("nesterov needs a momentum above 0")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "nesterov": nesterov,
            "eps": eps,
        }
        super().__init__(params, defaults)

    def _update_tensors(self, group: dict[str, Any], params: list[Tensor], *, adapted: bool) -> None:
        lr, momentum = group["lr"], group["momentum"]
        updates = _get_gradients(params)
        if adapted:
            decay = group["weight_decay"]
            rates = _compute_lars_rates(
                params, updates, decay=decay, trust=group["trust_coefficient"], eps=group["eps"]
            )
            updates = list(torch._foreach_add(updates, _convert_to_state_precision(params), alpha=decay))
            torch._foreach_mul_(updates, rates)
            torch._foreach_mul_(updates, lr)
        else:
            updates = list(torch._foreach_mul(updates, lr))
        if momentum:
            buffers = self._get_momentum_buffers(params)
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, updates)
            if group["nesterov"]:
                torch._foreach_add_(updates, buffers, alpha=momentum)
            else:
                updates = buffers
        torch._foreach_sub_(params, _cast_like(updates, params))

    def _get_momentum_buffers(self, params: Sequence[Tensor]) -> list[Tensor]:
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = _make_zero_state(p)
        return [self.state[p]["momentum_buffer"] for p in params]


def _compute_lars_rates(
    params: Sequence[Tensor], grads: Sequence[Tensor], *, decay: float, trust: float, eps: float
) -> list[Tensor]:
    """Return each tensor's local learning rate (Eq. 6 of the paper), 0-dim, without waiting for the device."""
    w, g = _compute_norms(params), _compute_norms(grads)
    return list(torch.where((w > 0) & (g > 0), trust * w / (g + decay * w + eps), 1.0).unbind())


class Lamb(_Layerwise):
    """Layer-wise adaptive moments (You et al. 2020, Algorithm 2), with the identity as the function phi.

    For each tensor w with gradient g, and t counting its steps::

        m <- b1 m + (1 - b1) g         v <- b2 v + (1 - b2) g^2
        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + decay w
        w <- w - lr |w| / |u| u        (ratio 1 where either norm is 0)

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: (b1, b2).
        eps: as above.
        weight_decay: decay, decoupled as AdamW's, of tensors of two dimensions and more.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        _require_nonnegative(lr=lr, eps=eps, weight_decay=weight_decay)
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers of at least 0 and below 1, got {betas}")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def _update_tensors(self, group: dict[str, Any], params: list[Tensor], *, adapted: bool) -> None:
        first_moments, second, steps = self._get_moments(params)
        grads, (beta1, beta2) = _get_gradients(params), group["betas"]
        torch._foreach_lerp_(first_moments, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, value=1 - beta2)
        updates = torch._foreach_div(second, [1 - beta2**t for t in steps])
        torch._foreach_sqrt_(updates)
        torch._foreach_add_(updates, group["eps"])
        torch._foreach_reciprocal_(updates)
        torch._foreach_mul_(updates, first_moments)
        torch._foreach_mul_(updates, [1 / (1 - beta1**t) for t in steps])
        if adapted:
            torch._foreach_add_(updates, _convert_to_state_precision(params), alpha=group["weight_decay"])
            torch._foreach_mul_(updates, _compute_trust_ratios(params, updates))
        torch._foreach_sub_(params, _cast_like(torch._foreach_mul(updates, group["lr"]), params))

    def _get_moments(self, params: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[int]]:
        for p in params:
            state = self.state[p]
            if not state:
                state["step"] = 0  # a number, which the host reads without waiting for the device
                state["exp_avg"], state["exp_avg_sq"] = _make_zero_state(p), _make_zero_state(p)
            state["step"] += 1
        states = [self.state[p] for p in params]
        return [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], [s["step"] for s in states]


def _compute_trust_ratios(params: Sequence[Tensor], updates: Sequence[Tensor]) -> list[Tensor]:
    w, u = _compute_norms(params), _compute_norms(updates)
    return list(torch.where((w > 0) & (u > 0), w / u, 1.0).unbind())


def _compute_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norms of n tensors as one tensor, (n,)."""
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=get_accumulation_dtype(tensors[0].dtype)))


def _make_zero_state(param: Tensor) -> Tensor:
    return torch.zeros_like(param, dtype=get_accumulation_dtype(param.dtype), memory_format=torch.preserve_format)


def _convert_to_state_precision(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.to(get_accumulation_dtype(tensor.dtype)) for tensor in tensors]


def _cast_like(updates: Sequence[Tensor], params: Sequence[Tensor]) -> list[Tensor]:
    return [update.to(p.dtype) for update, p in zip(updates, params, strict=True)]


def _get_gradients(params: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients, in the precision of the states.

    Raises:
        RuntimeError: a gradient is sparse; its norm is not that of the whole tensor.
    """
    grads = [p.grad for p in params if p.grad is not None]
    if any(grad.is_sparse for grad in grads):
        raise RuntimeError("LARS and LAMB do not work with sparse gradients; use sparse=False in the embedding")
    return _convert_to_state_precision(grads)


def _require_nonnegative(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
