"""Squared gradient norms at a small and a large batch, from which the gradient noise scale follows.

With several ranks both come for free: a rank's own gradient is that of the local batch, the reduced one that of the
global batch (McCandlish et al. 2018, appendix A.1). A single rank takes two halves of its batch in their place.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from tula_cli.models.efficiency import Pair
from tula_cli.optim.ddp_hook import add_listener
from tula_cli.worker.build.batches.tree import slice_batch
from tula_cli.worker.parallel.sharded import Sharded
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train.loop import Step, Trainer
from tula_cli.worker.train.watching.gradient_noise import compute_gradient, squared_norm


@dataclass
class GradientNormRecorder:
    """Listens to DDP's reductions and, while it watches, sums the squares of each bucket before and after.

    Nothing is read by the host before the window is over: a step never waits. It knows nothing of the trainer: DDP
    holds it from C++, and a cycle through that is never collected.
    """

    ranks: Ranks
    watching: bool = False
    local: list[torch.Tensor] = field(default_factory=list)  # norms of the buckets of the current step
    reduced: list[torch.Tensor] = field(default_factory=list)
    steps: list[torch.Tensor] = field(default_factory=list)  # squared norms (local, reduced), one pair a step

    @classmethod
    def attach(cls, trainer: Trainer) -> "GradientNormRecorder":
        """Attach to a trainer between two of its steps; DDP keeps it."""
        assert not isinstance(trainer.parallel, Sharded), "shares are reduced in another way"
        spy = cls(trainer.ranks)
        add_listener(trainer.parallel, spy)
        return spy

    def __call__(self, bucket: GradBucket) -> Callable[[], None] | None:
        """See one bucket (`optim.ddp_hook.Listener`)."""
        if not self.watching:
            return None
        gradient = bucket.buffer()
        self.local.append(_squared_bucket_norm(gradient))
        return lambda: self.reduced.append(_squared_bucket_norm(gradient))

    def watch(self, steps: Iterator[Step], scaler: torch.amp.GradScaler) -> Iterator[Step]:
        """Pass the steps on, and keep the norms of each."""
        self.watching = True
        scale = float(scaler.get_scale())  # of the step to come: the scaler may change it after each
        for step in steps:
            self._close(scale)
            scale = float(scaler.get_scale())
            yield step
        self.watching = False

    def _close(self, scale: float) -> None:
        norms = [torch.stack(norms).square().sum() / scale**2 for norms in (self.local, self.reduced)]
        self.steps.append(torch.stack(norms))
        self.local, self.reduced = [], []

    def pairs(self) -> list[Pair]:
        """Return what was seen, the local norms as means over all ranks, which all take part."""
        norms = torch.stack(self.steps).double().cpu()
        small = self.ranks.sum(norms[:, 0].tolist())
        return [(total / self.ranks.world, big) for total, big in zip(small, norms[:, 1].tolist(), strict=True)]


def _squared_bucket_norm(gradient: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
    return norm


def half_batch_norms(trainer: Trainer) -> Pair:
    """Return the squared norms of the gradients of the two halves of the newest micro-batch, and of their mean.

    Of a model in shares they are those of the halves of all ranks' micro-batches together; every rank takes part.
    """
    assert trainer.last_batch is not None
    samples, half = trainer.micro_batch, trainer.micro_batch // 2
    has_user_collate = trainer.datasets.collate is not None
    first_half, second = (
        compute_gradient(
            trainer, slice_batch(trainer.last_batch, samples=samples, start=at, stop=at + half, own=has_user_collate)
        )
        for at in (0, half)
    )
    squares = [squared_norm(trainer, gradients) for gradients in (first_half, second)]
    for parameter, gradient in second.items():
        first_half[parameter] = first_half[parameter].add_(gradient) if parameter in first_half else gradient
    return sum(squares) / 2, squared_norm(trainer, first_half) / 4


def half_batch_bytes(trainer: Trainer) -> int:
    """Return the bytes of a GPU that `halves` takes beside the training: two gradients of float32."""
    return sum(8 * parameter.numel() for parameter in trainer.parallel.parameters() if parameter.requires_grad)
