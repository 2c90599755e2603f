"""The base class of training methods, which is also the plain large batch (methods lbt and lrs)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tula_cli.optim import TulaOptimizer
from tula_cli.spec.job import JobSpec
from tula_cli.worker.build import zoo
from tula_cli.worker.build.batches import BatchSizes
from tula_cli.worker.build.data import Datasets, Position
from tula_cli.worker.build.finetune import Parameters
from tula_cli.worker.parallel.sharding import Parallel
from tula_cli.worker.ranks import Ranks


class Loop(Protocol):
    """The state of a running training that a method may read."""

    spec: JobSpec
    ranks: Ranks
    datasets: Datasets
    parallel: Parallel
    base: torch.optim.Optimizer
    optimizer: torch.optim.Optimizer  # what `wrap` has returned
    scaler: torch.amp.GradScaler
    sizes: BatchSizes
    position: Position
    apart: bool  # the replicas differ

    @property
    def batch(self) -> int:
        """Samples of the coming step, global."""

    @property
    def splits(self) -> int:
        """Parts that each micro-batch is computed in, after an out-of-memory."""

    @property
    def parts(self) -> int:
        """Micro-batches an optimizer step, those parts counted."""

    @property
    def micro_batch(self) -> int:
        """Samples a GPU takes at a time: one of those parts."""


@dataclass(frozen=True)
class Configuration:
    """The configuration that a method's optimizer is built for."""

    spec: JobSpec
    batch: int  # global
    world: int
    refresh: bool = True  # whether AGS refreshes by itself (a probe times a refresh apart)


@dataclass(frozen=True)
class Memory:
    """The memory of a method in a step, in addition to the base optimizer's state."""

    factors: bool = False  # an element's, or a tensor's
    small_batch: bool = False  # the gradient of a small batch beside the large one's
    before: Sequence[nn.Parameter] = ()  # those whose value before the step is kept until it is changed
    after: bool = False  # and for a moment, a part at a time, two copies of their value after the step


class Plain:
    """A method; each of its own says what it does otherwise."""

    least_parts_why = "ranks x train.accumulate"
    evaluates_averages = False
    """Whether `evaluating` puts other weights into the model, at which BatchNorm's statistics are taken anew."""

    def base(self, spec: JobSpec, parameters: Parameters) -> torch.optim.Optimizer:
        """Return the base optimizer, the spec's or what takes its place.

        Raises:
            SpecError: it cannot be built.
        """
        return zoo.build_optimizer(spec, parameters, instead=self.instead(spec))

    def instead(self, spec: JobSpec) -> type[torch.optim.Optimizer] | None:
        """Return the class that takes the place of the spec's optimizer; None where none does."""

    def wrap(
        self, base: torch.optim.Optimizer, parallel: Parallel, configuration: Configuration
    ) -> torch.optim.Optimizer:
        """Return what steps: the base optimizer, or a wrapper around it, which clips gradients by itself."""
        return base

    def check(self, spec: JobSpec, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that only its class, or its parameters, tell apart.

        Raises:
            SpecError: the method cannot do with it.
        """

    def least_parts(self, world: int) -> int:
        """Return the fewest micro-batches of a step."""
        return 1

    def fewest_samples(self, configuration: Configuration) -> int:
        """Return the samples that a GPU has to take at a time for the method to stay what it is."""
        return 1

    def memory(self, spec: JobSpec, parameters: Sequence[nn.Parameter], *, several: bool) -> Memory:
        """Return what a step holds beside the optimizer's state.

        Args:
            spec: the job.
            parameters: that are trained.
            several: whether some configuration has more ranks than one.
        """
        return Memory()

    def scaling(self, optimizer: torch.optim.Optimizer) -> TulaOptimizer | None:
        """Return the optimizer as what scales gradients; None where it does not."""
        return None

    def change_batch(self, loop: Loop) -> None:
        """Called when the coming step has another batch than the one before: `loop.batch`."""

    def before_backward(self, loop: Loop) -> None:
        """Called once a step, before the first micro-batch."""

    def after_first_backward(self, loop: Loop) -> None:
        """Called once a step, when the gradient of the first micro-batch is there, with all of its parts."""

    def refresh(self, loop: Loop, small_loss: Callable[[int], Tensor]) -> bool:
        """Called once a step, when the gradient is there; return whether this step did more than others do.

        Args:
            loop: the training.
            small_loss: returns the loss of so many samples of the newest micro-batch.
        """
        return False

    def after_step(self, loop: Loop) -> None:
        """Called when the weights have changed; `loop.position` is still that before the step."""

    def local_stepper(self, loop: Loop) -> torch.optim.Optimizer:
        """Return what steps where a step without synchronisation is timed."""
        return loop.base

    def is_local(self, loop: Loop) -> bool:
        """Return whether the coming step is each rank's own."""
        return False

    def join(self, loop: Loop) -> None:
        """Make all replicas the same again, where they differ; every rank takes part."""

    def probe_epochs(self) -> int | None:
        """Return the epoch before which a probe starts anew; None: the job's last."""
        return None

    @contextmanager
    def evaluating(self, loop: Loop) -> Iterator[None]:
        """Have the weights in the model that are evaluated; those that train are back afterwards."""
        yield

    def model_state(self, loop: Loop) -> dict[str, Any]:
        """Return the model's state for a checkpoint: with the weights that are evaluated."""
        state: dict[str, Any] = loop.parallel.module.state_dict()
        return state

    def own_state(self, loop: Loop) -> dict[str, Any]:
        """Return what a checkpoint holds beside model and optimizer; empty where that is nothing."""
        return {}

    def load_own_state(self, loop: Loop, state: dict[str, Any]) -> None:
        """Put back what `own_state` has returned, after model and optimizer."""

    def remarks(self, loop: Loop) -> list[str]:
        """Return what the user has asked for and what does nothing in this training."""
        return []

    def report(self, loop: Loop) -> dict[str, Any]:
        """Return what an epoch's row of metrics.jsonl tells of the method."""
        return {}


METHOD = Plain()
