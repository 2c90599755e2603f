"""Method static: multiplies gradients by a constant factor (Eq. 8 of the paper)."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from tula_cli.optim import Static
from tula_cli.optim.ags import AgsArguments
from tula_cli.spec.ags import Ags
from tula_cli.spec.job import JobSpec
from tula_cli.worker.methods.ags import Scaling
from tula_cli.worker.methods.plain import Configuration, Memory


class StaticScaling(Scaling):
    """Gradient scaling with a constant factor that is known in advance."""

    def make_arguments(self, ags: Ags, **changed: Any) -> AgsArguments:
        arguments = super().make_arguments(ags, **changed)
        arguments["factors"] = Static(None if ags.factor == "auto" else ags.factor)
        return arguments

    def count_small_batch_samples_per_rank(self, configuration: Configuration) -> Sequence[int]:
        return ()

    def estimate_memory(self, spec: JobSpec, parameters: Sequence[nn.Parameter], *, several: bool) -> Memory:
        return Memory(before=super().estimate_memory(spec, parameters, several=several).before, after=True)


METHOD = StaticScaling
