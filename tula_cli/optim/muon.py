"""torch.optim.Muon for a whole network: matrices by Muon, all other parameters by AdamW."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .orthogonal import find_matrices
from .wrapper import Optimizer

ADAMW_LR_RATIO = 0.1
"""Default of AdamW's learning rate as a multiple of Muon's, unless `adjust_lr_fn: match_rms_adamw` makes both equal."""


def describe_missing_muon() -> str:
    """Return why torch.optim.Muon cannot be used; empty if it can."""
    if hasattr(torch.optim, "Muon"):
        return ""
    return f"torch.optim.Muon needs torch 2.9 or newer, but torch {torch.__version__} is installed"


class MuonWithAdamW(Optimizer):
    """torch.optim.Muon for matrices and the weights of convolutions, torch.optim.AdamW for all else.

    Args:
        params: parameters, or groups of them; `split` marks by "by_muon" the groups that Muon updates. Without the mark Muon
            updates parameters of two dimensions.
        lr: learning rate of Muon.
        weight_decay: weight decay of Muon and AdamW.
        momentum: momentum of Muon.
        adamw: arguments of AdamW that override these: lr, betas, eps, weight_decay ...
        muon: further arguments of torch.optim.Muon.

    Raises:
        ValueError: this torch has no Muon, or it refuses an argument.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        adamw: Mapping[str, Any] | None = None,
        **muon: Any,
    ) -> None:
        if why := describe_missing_muon():
            raise ValueError(why)
        ratio = 1.0 if muon.get("adjust_lr_fn") == "match_rms_adamw" else ADAMW_LR_RATIO
        adamw_arguments = {"lr": lr * ratio, "weight_decay": weight_decay, **(adamw or {})}
        matrix, vector = nn.Parameter(torch.zeros(1, 1)), nn.Parameter(torch.zeros(1))
        self._muon = torch.optim.Muon([matrix], lr=lr, weight_decay=weight_decay, momentum=momentum, **muon)
        self._adamw = torch.optim.AdamW([vector], **adamw_arguments)
        groups = []
        for group in split_parameters(list(params)):
            settings = {key: value for key, value in group.items() if value is not None}
            defaults = (self._muon if group["by_muon"] else self._adamw).defaults
            if "lr" in settings:
                settings["lr"] *= defaults["lr"] / lr
            groups.append({**defaults, **settings})
        super().__init__(groups, {})

    def _take_step(self) -> None:
        for optimizer, by_muon in ((self._muon, True), (self._adamw, False)):
            optimizer.param_groups = [group for group in self.param_groups if group["by_muon"] == by_muon]
            optimizer.state = self.state
        with _reshape_to_matrices([p for group in self._muon.param_groups for p in group["params"]]):
            self._muon.step()
        self._adamw.step()


def split_parameters(params: Sequence[Any], model: nn.Module | None = None) -> list[dict[str, Any]]:
    """Return groups of parameters; "by_muon" marks those that Muon updates, AdamW updates the others.

    Args:
        params: parameters or groups; groups with a mark are not changed.
        model: the model of the parameters; None: parameters of two dimensions count as matrices.
    """
    matrix_ids = None if model is None else set(map(id, find_matrices(model)))
    groups = params if params and isinstance(params[0], dict) else [{"params": list(params)}]
    result = []
    for group in groups:
        chosen: dict[bool, list[Tensor]] = {True: [], False: []}
        for p in group["params"]:
            by_muon = bool(group.get("by_muon", p.ndim == 2 if matrix_ids is None else id(p) in matrix_ids))
            chosen[by_muon].append(p)
        result += [{**group, "params": members, "by_muon": by_muon} for by_muon, members in chosen.items() if members]
    return result


@contextmanager
def _reshape_to_matrices(params: Sequence[Tensor]) -> Iterator[None]:
    """Reshape weights and gradients of convolutions to matrices of (outputs, all else), which Muon requires."""
    shaped = [(p, p.data, p.grad) for p in params if p.ndim > 2 and p.grad is not None]
    for p, weight, grad in shaped:
        p.grad = None
        p.data = weight.flatten(1)
        p.grad = grad.flatten(1)
    try:
        yield
    finally:
        for p, weight, grad in shaped:
            p.grad = None
            if not weight.is_contiguous():  # channels_last: the matrix is a copy, not a view
                weight.copy_(p.data.view_as(weight))
            p.data = weight
            p.grad = grad
