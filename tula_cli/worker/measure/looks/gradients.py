"""Squared gradient norms at a small and a large batch, from which the gradient noise scale follows.

With several ranks both come for free: a rank's own gradient is that of the local batch, the reduced one that of the
global batch (McCandlish et al. 2018, appendix A.1). A single rank takes two halves of its batch in their place.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from tula_cli.models.efficiency import Pair
from tula_cli.optim.parts import shares
from tula_cli.optim.parts.reduction import listen
from tula_cli.worker.build.batches.tree import cut
from tula_cli.worker.build.compiled import as_written
from tula_cli.worker.parallel.sharded import Sharded
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train.loop import Step, Trainer


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
        listen(trainer.parallel, spy)
        return spy

    def __call__(self, bucket: GradBucket) -> Callable[[], None] | None:
        """See one bucket (`optim.parts.reduction.Listener`)."""
        if not self.watching:
            return None
        gradient = bucket.buffer()
        self.local.append(_norm(gradient))
        return lambda: self.reduced.append(_norm(gradient))

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
        seen = torch.stack(self.steps).double().cpu()
        small = self.ranks.sum(seen[:, 0].tolist())
        return [(total / self.ranks.world, big) for total, big in zip(small, seen[:, 1].tolist(), strict=True)]


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
    return norm


def halves(trainer: Trainer) -> Pair:
    """Return the squared norms of the gradients of the two halves of the newest micro-batch, and of their mean."""
    gradients = [_gradient(trainer, part) for part in _halved(trainer)]
    first, second = (_sqr(gradient) for gradient in gradients)
    for mean, other in zip(*gradients, strict=True):
        mean.add_(other).div_(2)
    return (first + second) / 2, _sqr(gradients[0])


def _halved(trainer: Trainer) -> list[Any]:
    """Return the halves of the newest micro-batch."""
    assert trainer.last_batch is not None
    samples, half = trainer.micro_batch, trainer.micro_batch // 2
    own = trainer.datasets.collate is not None
    return [cut(trainer.last_batch, samples=samples, start=at, stop=at + half, own=own) for at in (0, half)]


def shared_halves(trainer: Trainer) -> Pair:
    """Return what `halves` does of a model in shares: of the halves of all ranks' newest micro-batches together.

    Every rank takes part.
    """
    first, second = (_shared_gradient(trainer, part) for part in _halved(trainer))
    squares = [float(shares.squared_norm(list(gradient.values()))) for gradient in (first, second)]
    mean = [(part + second[p]) / 2 for p, part in first.items()]
    return sum(squares) / 2, float(shares.squared_norm(mean))


def _shared_gradient(trainer: Trainer, batch: Any) -> dict[torch.Tensor, torch.Tensor]:
    def loss() -> torch.Tensor:
        with worker_train_loop.autocast(trainer):
            return trainer.call.taken(trainer.parallel.module, batch)

    return shares.gradients(loss, trainer.parallel)


def _gradient(trainer: Trainer, batch: Any) -> list[torch.Tensor]:
    with as_written(trainer.spec.train), worker_train_loop.autocast(trainer):
        loss = trainer.call.taken(trainer.parallel.module, batch)
    parameters = [p for p in trainer.parallel.parameters() if p.requires_grad]
    found = torch.autograd.grad(trainer.scaler.scale(loss), parameters, allow_unused=True)
    scale = float(trainer.scaler.get_scale())
    return [gradient.float() / scale for gradient in found if gradient is not None]


def _sqr(gradient: Sequence[torch.Tensor]) -> float:
    return float(torch.stack([part.double().square().sum() for part in gradient]).sum().item())
