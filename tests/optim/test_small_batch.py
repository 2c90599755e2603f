"""The gradient of the small batch: no copy more than it needs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tula_cli.optim.ags import AgsSetup

MARKED = torch.full((4,), 3.0)


class Marking(torch.autograd.Function):
    """The identity, whose gradient is one known tensor, so that a copy of it can be told."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return MARKED


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self) -> Tensor:
        result: Tensor = Marking.apply(self.weight)
        return result


@pytest.mark.parametrize("scale", [None, 0.0, 8.0])
def test_gradients_are_copied_only_where_a_loss_scale_is_divided_out(scale: float | None) -> None:
    model = Marked()
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=bool(scale))
    base = torch.optim.SGD([model.weight])
    setup = AgsSetup.from_optimizer(base, model, b_large=2, b_small=1, available=None, steps_per_epoch=None, seed=0)
    (small_gradient,) = setup.compute_small_batch_gradients(
        lambda n: model().sum(), [model.weight], refresh_index=0, step=0, scaler=scaler
    )
    assert small_gradient is not None
    assert (small_gradient.data_ptr() == MARKED.data_ptr()) is not bool(scale)
    assert small_gradient.tolist() == [3.0 / (scale or 1.0)] * 4
    assert MARKED.tolist() == [3.0] * 4
