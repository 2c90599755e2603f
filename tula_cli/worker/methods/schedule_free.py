"""Method schedule_free: averaged weights in place of a decaying learning rate (Defazio et al. 2024).

The optimizers of the package train one point (y) and evaluate another (x), the average of the steps. Switching from y
to x and back rounds, so the original y are restored exactly: an evaluation or a checkpoint changes no step. BatchNorm's
running statistics result from the steps, at y. Before an evaluation they are recomputed at x, and remain so: no step
reads them, and a checkpoint saved then holds the statistics that belong to its weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tula_cli.errors import SpecError
from tula_cli.spec.job import JobSpec
from tula_cli.worker.methods.plain import Loop, Plain

SCHEDULE_FREE_CLASSES = {"SGD": "SGDScheduleFree", "AdamW": "AdamWScheduleFree"}
"""The package's classes, by the optimizers that they replace."""


class ScheduleFree(Plain):
    """SGD or AdamW of the package schedulefree; the model in a checkpoint has the averaged weights."""

    evaluates_averages = True

    def get_replacement_class(self, spec: JobSpec) -> type[torch.optim.Optimizer] | None:
        try:
            import schedulefree
        except ImportError:
            raise SpecError(
                "train.method schedule_free needs the package schedulefree, which is not installed",
                "pip install 'tula-cli[schedulefree]'",
            ) from None
        optimizer_class: type[torch.optim.Optimizer] = getattr(
            schedulefree, SCHEDULE_FREE_CLASSES.get(spec.optimizer.name, SCHEDULE_FREE_CLASSES["SGD"])
        )
        return optimizer_class

    def build_base_optimizer(self, spec: JobSpec, parameters: Any) -> torch.optim.Optimizer:
        optimizer = super().build_base_optimizer(spec, parameters)
        _switch_weights(optimizer, training=True)
        return optimizer

    @contextmanager
    def use_evaluated_weights(self, loop: Loop) -> Iterator[None]:
        trained = [p.detach().clone() for p in _list_trained_parameters(loop)]
        _switch_weights(loop.base, training=False)
        try:
            yield
        finally:
            _switch_weights(loop.base, training=True)
            with torch.no_grad():
                for parameter, exact in zip(_list_trained_parameters(loop), trained, strict=True):
                    parameter.copy_(exact)

    def get_model_state(self, loop: Loop) -> dict[str, Any]:
        with self.use_evaluated_weights(loop):
            return {name: value.detach().cpu().clone() for name, value in loop.parallel.module.state_dict().items()}

    def own_state(self, loop: Loop) -> dict[str, Any]:
        return {"trained": [p.detach() for p in _list_trained_parameters(loop)]}

    @torch.no_grad()
    def load_own_state(self, loop: Loop, state: dict[str, Any]) -> None:
        for parameter, trained in zip(_list_trained_parameters(loop), state["trained"], strict=True):
            parameter.copy_(trained)


def _switch_weights(optimizer: torch.optim.Optimizer, *, training: bool) -> None:
    schedule_free: Any = optimizer  # torch's base class has no train() and eval()
    schedule_free.train() if training else schedule_free.eval()


def _list_trained_parameters(loop: Loop) -> list[torch.nn.Parameter]:
    return [p for group in loop.base.param_groups for p in group["params"]]


METHOD = ScheduleFree
