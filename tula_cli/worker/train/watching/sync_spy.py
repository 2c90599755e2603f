"""The exposed synchronisation of a step."""

import statistics
from dataclasses import dataclass, field

import torch
from torch import nn

from tula_cli.worker.device import Clock, Mark


@dataclass
class SynchronisationTimer:
    """Times the exposed synchronisation of backward passes: last local gradient to the end of the reduction.

    A hook on each parameter fires when its local gradient is there, before DDP reduces it; the last one to fire ends the
    local work. Used on steps of its own, for the hooks cost time.
    """

    clock: Clock
    model: nn.Module
    last: Mark | None = None
    exposed: list[tuple[Mark, Mark]] = field(default_factory=list)

    def __enter__(self) -> "SynchronisationTimer":
        self._handles = [p.register_hook(self._gradient_ready) for p in self.model.parameters() if p.requires_grad]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _gradient_ready(self, _: torch.Tensor) -> None:
        self.last = self.clock.mark()

    def reduced(self) -> None:
        """Call when backward has returned: on the CPU the reduction is over, on a GPU the stream waits for it."""
        assert self.last is not None
        self.exposed.append((self.last, self.clock.mark()))

    def seconds(self) -> list[float]:
        """Return the exposed synchronisation of each backward pass in seconds; waits for the device."""
        return [self.clock.seconds(start, end) for start, end in self.exposed]

    def median(self) -> float:
        """Return the median exposed synchronisation in seconds."""
        return statistics.median(self.seconds())
