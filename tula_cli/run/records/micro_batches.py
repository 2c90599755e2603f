"""How far the micro-batches of a training may be cut after an out-of-memory."""

from tula_cli.run.records.base import Record


class Splits(Record):
    """Of one batch: into how many parts each micro-batch of `train.accumulate` may be cut, and why into no more."""

    batch: int  # global
    micro_batch: int  # samples that a GPU takes at a time, uncut
    micro_batches: int  # of a step on one GPU, uncut
    into: tuple[int, ...]  # numbers of parts from 2, ascending
    limit: str  # why there are no more of them, in words


class MicroBatches(Record):
    """Of every batch that a training may fall back to; its rank 0 writes it, who alone knows model and method."""

    splits: tuple[Splits, ...]
    normalised: (
        int  # micro-batches that BatchNorm takes its statistics over: several of SyncBatchNorm; 0 without either
    )

    def splits_of_batch(self, batch: int) -> Splits | None:
        """Return those of a batch; None where it is not among them."""
        return next((splits for splits in self.splits if splits.batch == batch), None)
