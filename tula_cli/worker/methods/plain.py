"""The base class of training methods, which is also the plain large batch (methods lbt and lrs)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tula_cli.diagnostics import Diagnostic
from tula_cli.optim import TulaOptimizer
from tula_cli.spec.job import JobSpec
from tula_cli.worker.build import zoo
from tula_cli.worker.build.batches import BatchSizes
from tula_cli.worker.build.loaders import TrainingPosition
from tula_cli.worker.build.parameter_groups import Parameters
from tula_cli.worker.build.samples import Datasets
from tula_cli.worker.parallel.sharding import Parallel
from tula_cli.worker.ranks import Ranks


class Loop(Protocol):
    """The state of a running training that a method may read."""

    spec: JobSpec
    ranks: Ranks
    datasets: Datasets
    parallel: Parallel
    base: torch.optim.Optimizer
    optimizer: torch.optim.Optimizer  # the optimizer returned by `wrap_optimizer`
    scaler: torch.amp.GradScaler
    sizes: BatchSizes
    position: TrainingPosition
    apart: bool  # whether the replicas differ (post-local SGD between two averages)

    @property
    def batch(self) -> int:
        """Samples of the coming step, global."""

    @property
    def parts(self) -> int:
        """Micro-batches per optimizer step, with each part of a split micro-batch counted."""

    @property
    def micro_batch(self) -> int:
        """Samples that a GPU processes at a time: one part of a split micro-batch."""


@dataclass(frozen=True)
class Configuration:
    """The configuration that a method's optimizer is built for."""

    spec: JobSpec
    batch: int  # global batch
    world: int
    refresh: bool = True  # whether AGS refreshes by itself (a probe times refreshes separately)


@dataclass(frozen=True)
class Memory:
    """The memory that a method needs in a step, in addition to the base optimizer's state."""

    factors: bool = False  # whether there are scaling factors, per element or per tensor
    small_batch: bool = False  # whether the gradient of a small batch is held in addition
    before: Sequence[nn.Parameter] = ()  # parameters of which a copy from before the step is held until the step ends
    after: bool = False  # whether two copies of them after the step are also held, one chunk at a time


class Plain:
    """The base class of methods; subclasses override what they do differently."""

    evaluates_averages = False
    """Whether `use_evaluated_weights` puts other weights into the model, for which BatchNorm's statistics are recomputed."""

    def build_base_optimizer(self, spec: JobSpec, parameters: Parameters) -> torch.optim.Optimizer:
        """Return the base optimizer: that of the spec or the method's replacement.

        Raises:
            SpecError: it cannot be built.
        """
        return zoo.build_optimizer(spec, parameters, instead=self.get_replacement_class(spec))

    def get_replacement_class(self, spec: JobSpec) -> type[torch.optim.Optimizer] | None:
        """Return the class that replaces the spec's optimizer; None if it is not replaced."""

    def wrap_optimizer(
        self, base: torch.optim.Optimizer, parallel: Parallel, configuration: Configuration
    ) -> torch.optim.Optimizer:
        """Return the optimizer that takes the steps: the base optimizer, or a wrapper, which clips gradients itself."""
        return base

    def check_optimizer(self, spec: JobSpec, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that is unsuitable because of its class or its parameters.

        Raises:
            SpecError: the method cannot use it.
        """

    def compute_min_samples(self, configuration: Configuration) -> int:
        """Return the fewest samples that a GPU has to process at a time for the method to work unchanged."""
        return 1

    def estimate_memory(self, spec: JobSpec, parameters: Sequence[nn.Parameter], *, several: bool) -> Memory:
        """Return the memory that a step needs in addition to the optimizer's state.

        Args:
            several: whether some configuration has more than one rank.
        """
        return Memory()

    def get_scaling_optimizer(self, optimizer: torch.optim.Optimizer) -> TulaOptimizer | None:
        """Return the optimizer as a TulaOptimizer, which scales gradients; None if this method does not scale them."""
        return None

    def change_batch(self, loop: Loop) -> None:
        """Adapt to a new batch; called if the batch of the coming step (`loop.batch`) differs from that of the step before."""

    def before_backward(self, loop: Loop) -> None:
        """Prepare a step; called once per step, before the first micro-batch."""

    def refresh(self, loop: Loop, small_loss: Callable[[int], Tensor]) -> bool:
        """Use the complete gradient; called once per step. Return whether this step did more work than a usual one.

        Args:
            small_loss: returns the loss of the given number of samples of the newest micro-batch.
        """
        return False

    def after_step(self, loop: Loop) -> None:
        """Finish a step; called after the weights have changed, while `loop.position` is still the position before the step."""

    def get_local_optimizer(self, loop: Loop) -> torch.optim.Optimizer:
        """Return the optimizer to step with when a step without synchronisation is timed."""
        return loop.base

    def is_local(self, loop: Loop) -> bool:
        """Return whether each rank takes the coming step by itself, without synchronising."""
        return False

    def synchronize_replicas(self, loop: Loop) -> None:
        """Make all replicas equal again if they differ; every rank must call this."""

    def probe_epochs(self) -> int | None:
        """Return the epoch before which a probe starts over; None: the job's last epoch."""
        return None

    @contextmanager
    def use_evaluated_weights(self, loop: Loop) -> Iterator[None]:
        """Put the weights that are evaluated into the model; the trained weights are restored afterwards."""
        yield

    def get_model_state(self, loop: Loop) -> dict[str, Any]:
        """Return the model's state for a checkpoint, with the weights that are evaluated."""
        state: dict[str, Any] = loop.parallel.module.state_dict()
        return state

    def own_state(self, loop: Loop) -> dict[str, Any]:
        """Return the state that a checkpoint holds in addition to model and optimizer; empty if there is none."""
        return {}

    def load_own_state(self, loop: Loop, state: dict[str, Any]) -> None:
        """Restore the state that `own_state` returned; called after model and optimizer have been loaded."""

    def list_remarks(self, loop: Loop) -> list[Diagnostic]:
        """Return remarks about settings of the user that have no effect in this training."""
        return []

    def report(self, loop: Loop) -> dict[str, Any]:
        """Return the method's entries in an epoch's row of metrics.jsonl."""
        return {}


METHOD = Plain
