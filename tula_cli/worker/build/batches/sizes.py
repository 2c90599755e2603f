"""The batches of a training, and in how many micro-batches each is computed."""

from collections.abc import Mapping
from dataclasses import dataclass

from tula_cli.models.ramp.stages import Ramp


@dataclass(frozen=True)
class BatchSizes:
    """The batches of a training, and in how many micro-batches each is computed."""

    ramp: Ramp
    micro_batches: int  # of a step on one rank, uncut
    splits: Mapping[int, int]  # of each batch: parts that each of them is computed in
    largest: int  # that this attempt comes to: less than the training's own where it leaves for more nodes before

    @property
    def batch(self) -> int:
        """The training's own batch: that of the last stage."""
        return self.ramp.stages[-1].batch

    @property
    def parts(self) -> dict[int, int]:
        """Of each batch, the micro-batches of a step on one rank, as they are computed."""
        return {batch: self.micro_batches * splits for batch, splits in self.splits.items()}
