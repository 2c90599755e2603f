"""Method adascale: the learning rate times a gain computed from the noise of the gradients (Johnson et al. 2020)."""

from typing import Any

import torch
from torch import nn

from tula_cli.errors import SpecError
from tula_cli.optim.adascale_sgd import AdaScale
from tula_cli.optim.gradient_stats import squared_norm
from tula_cli.spec.job import JobSpec
from tula_cli.worker.methods.plain import Configuration, Loop, Plain
from tula_cli.worker.parallel.sharding import Parallel


class WithAdaScale(Plain):
    """AdaScale; it compares the gradients of two batch sizes, so a single rank needs two micro-batches."""

    least_parts_why = "AdaScale needs half batches"

    def wrap(
        self, base: torch.optim.Optimizer, parallel: Parallel, configuration: Configuration
    ) -> torch.optim.Optimizer:
        train, batch = configuration.spec.train, configuration.batch
        reference, limit = train.reference_batch, train.max_grad_norm
        return AdaScale(base, model=parallel, batch=batch, reference_batch=reference, max_grad_norm=limit)

    def check(self, spec: JobSpec, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        try:
            AdaScale(optimizer, model=model, batch=2, reference_batch=1)
        except ValueError as error:
            hint = "set optimizer.name: SGD, or another method"
            raise SpecError(f"train.method {spec.train.method}: {error}", hint) from error

    def least_parts(self, world: int) -> int:
        return 2 if world == 1 else 1

    def change_batch(self, loop: Loop) -> None:
        _find_adascale(loop).batch = loop.batch  # its averages are of the reference batch

    def after_first_backward(self, loop: Loop) -> None:
        """Pass AdaScale the first micro-batch's gradient, if there is no other rank's gradient to compare with.

        After an out-of-memory error a micro-batch is computed in parts, whose gradients add up: AdaScale sees the same
        gradient.
        """
        if loop.ranks.world > 1:
            return
        square = squared_norm([p.grad for p in loop.parallel.parameters() if p.grad is not None])
        # the loss was divided by the one and multiplied by the other, which stays on the device
        unscaled = loop.parts / loop.splits / loop.scaler.scale(torch.ones_like(square))
        _find_adascale(loop).observe(square * unscaled**2, loop.micro_batch * loop.splits)

    def remarks(self, loop: Loop) -> list[str]:
        if (batch := loop.sizes.batch) > loop.spec.train.reference_batch:
            return []
        return [f"AdaScale has no effect: batch {batch} is not above train.reference_batch"]

    def report(self, loop: Loop) -> dict[str, Any]:
        """Return the gain, and the number of epochs at the reference batch that the steps so far correspond to."""
        report = _find_adascale(loop).report()
        per_epoch = len(loop.datasets.train) / loop.spec.train.reference_batch
        return {"adascale": {"gain": report["gain"], "epochs": report["iterations"] / per_epoch}}


def _find_adascale(loop: Loop) -> AdaScale:
    assert isinstance(loop.optimizer, AdaScale)
    return loop.optimizer


METHOD = WithAdaScale()
