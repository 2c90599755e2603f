"""Evaluation on the held-out samples, and the statistics of BatchNorm that it takes."""

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from tula_cli.words import perplexity
from tula_cli.worker.build.batches.calling import is_language_model_output, scores_from_outputs
from tula_cli.worker.build.batches.collate import collate_items
from tula_cli.worker.build.compiled import without_compilation
from tula_cli.worker.build.norms import batch_norms_of
from tula_cli.worker.build.sampling import build_eval_loader
from tula_cli.worker.parallel.sharded import Sharded
from tula_cli.worker.seeding import seed_torch, stable_seed
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train.judging.own_metrics import MetricInput, UserMetrics
from tula_cli.worker.train.loop import Trainer, autocast, to_device

STATISTICS_SAMPLES = 4096
"""Training samples of all ranks, a tenth of the training set at most, that statistics of BatchNorm are taken over."""

_STREAM = 0x4E4F  # parts this module's random numbers from the job's others


@dataclass(frozen=True)
class Evaluation:
    """Means over the evaluation set. Accuracies are percentages; nan where the output is not one score a class.

    The loss of a language model is the mean over samples of what each batch's is over its tokens.
    """

    loss: float
    top1: float
    top5: float
    samples: int
    perplexity: float = float("nan")  # the exponential of the loss of a language model; nan of any other
    own: Mapping[str, float] = field(default_factory=dict)  # of train.metrics, by name

    @property
    def values(self) -> dict[str, float]:
        """Every metric by its name."""
        values = {"top1": self.top1, "top5": self.top5, "loss": self.loss, "perplexity": self.perplexity}
        return {**values, **self.own}


class Evaluator:
    """Evaluates on every rank's share of the evaluation data; keeps its loader's processes between epochs."""

    def __init__(self, trainer: Trainer) -> None:
        ranks = trainer.ranks
        self.trainer = trainer
        self.own = UserMetrics(trainer.spec.train, ranks)
        self.loader = build_eval_loader(
            trainer.datasets.eval,
            size=len(trainer.datasets.eval),
            rank=ranks.rank,
            world=ranks.world,
            batch=trainer.largest_micro_batch,
            workers=trainer.workers,
            pin=ranks.device.type == "cuda",
            collate=trainer.datasets.collate,
        )

    @torch.no_grad()
    def evaluate(self, max_batches: int | None = None, *, between: Callable[[], None] = lambda: None) -> Evaluation:
        """Evaluate the whole set, or only some batches of each rank where only the time is wanted.

        Args:
            max_batches: at most so many of each rank.
            between: called after each batch that every rank has, so it may communicate; it may raise.
        """
        with self.trainer.method.evaluating(self.trainer):
            if self.trainer.method.evaluates_averages and max_batches is None:
                average_batch_norm_statistics(self.trainer, between=between)
            return self._evaluate(max_batches, between)

    def _evaluate(self, max_batches: int | None, between: Callable[[], None]) -> Evaluation:
        trainer = self.trainer
        # Each rank's BatchNorm has seen its own samples since the last forward; all evaluate rank 0's, which is saved.
        for buffer in trainer.parallel.module.buffers():
            dist.broadcast(buffer, src=0)
        trainer.parallel.eval()
        sums = torch.zeros(5, dtype=torch.float64, device=trainer.ranks.device)
        common, most, batches_done = self.batch_count(trainer.ranks.world - 1), self.batch_count(0), 0
        self.own.reset()
        newest: Any = None
        for index, batch in enumerate(self.loader):
            if index == max_batches:
                break
            batches_done += 1
            sums += self._score_batch(to_device(trainer, batch), self._batch_size(index))
            newest = batch
            if index < common:
                between()
        for _ in range(batches_done, min(most, max_batches or most)):
            self._join_extra_batch(newest)
            self.own.update(None)
        if isinstance(trainer.parallel, Sharded):
            trainer.parallel.reshard()
        trainer.parallel.train()
        loss, top1, top5, samples, language = trainer.ranks.sum(sums.tolist())
        if not samples:
            unknown = dict.fromkeys(self.own.metrics, math.nan)
            return Evaluation(float("nan"), float("nan"), float("nan"), 0, own=unknown)
        mean = loss / samples
        # Of a loss of the user's own nobody knows whether it is the mean logarithm that perplexity is made of.
        perplexity_value = perplexity(mean) if language == samples and trainer.call.default else math.nan
        user_metrics = self.own.compute()
        return Evaluation(
            mean, 100 * top1 / samples, 100 * top5 / samples, int(samples), perplexity_value, user_metrics
        )

    def _join_extra_batch(self, batch: Any) -> None:
        """Compute along with ranks that have one batch more, where they need this rank's shares of the model."""
        trainer = self.trainer
        if not isinstance(trainer.parallel, Sharded):
            return
        if batch is None:  # fewer samples than ranks
            batch = collate_items(trainer.datasets.collate, trainer.datasets.train.first_samples(1))
        with without_compilation(trainer.spec.train), autocast(trainer):
            trainer.call.compute_outputs(trainer.parallel.module, to_device(trainer, batch))

    def _sample_count(self, rank: int) -> int:
        """Return a rank's samples."""
        return len(range(rank, len(self.trainer.datasets.eval), self.trainer.ranks.world))

    def batch_count(self, rank: int) -> int:
        """Return how many batches a rank has: the first ranks may have one more than the last."""
        return math.ceil(self._sample_count(rank) / self.trainer.largest_micro_batch)

    def _batch_size(self, index: int) -> int:
        """Return how many samples this rank's batch of this number has; the last one may have fewer than the others."""
        size = self.trainer.largest_micro_batch
        return min(size, self._sample_count(self.trainer.ranks.rank) - index * size)

    def _score_batch(self, batch: Any, count: int) -> torch.Tensor:
        """Return (loss, top-1 hits, top-5 hits, samples, samples of language) summed over a batch of `count` samples."""
        trainer = self.trainer
        odd = count != trainer.largest_micro_batch  # the last batch, which is not worth a compilation
        with without_compilation(trainer.spec.train) if odd else contextlib.nullcontext(), autocast(trainer):
            outputs = trainer.call.compute_outputs(trainer.parallel.module, batch)
            loss = trainer.call.loss_from_outputs(outputs, batch)
        guesses, targets = scores_from_outputs(outputs), trainer.call.target_of(batch)
        self.own.update(MetricInput(outputs, scores=guesses, target=targets, batch=batch, samples=count))
        if not _is_classification(guesses, targets):
            hits1 = hits5 = torch.tensor(float("nan"))
        else:
            best = guesses.topk(min(5, guesses.shape[1]), dim=1).indices
            match = best == targets[:, None]
            hits1, hits5 = match[:, 0].sum(), match.any(dim=1).sum()
        scores = (
            loss * count,
            hits1,
            hits5,
            torch.tensor(count),
            torch.tensor(count * is_language_model_output(guesses, targets)),
        )
        return torch.stack([value.double().to(trainer.ranks.device) for value in scores])


def average_batch_norm_statistics(trainer: Trainer, *, between: Callable[[], None] = lambda: None) -> None:
    """Take BatchNorm's statistics anew at the weights that are in the model, the same on all ranks, which all take part.

    They are those of the training batches that come next: a run that has to leave in between, or is resumed, finds the
    same ones. Random numbers of the training stay as they are.
    """
    ranks = trainer.ranks
    samples = min(STATISTICS_SAMPLES, len(trainer.datasets.train) // 10)
    batches = max(1, samples // (ranks.world * trainer.micro_batch))
    with torch.random.fork_rng(devices=[ranks.device] if ranks.device.type == "cuda" else []):
        seed_torch(stable_seed(trainer.spec.train.seed, _STREAM, trainer.position.samples, ranks.rank), ranks.device)
        norms = recompute_batch_norm_statistics(trainer, batches=batches, between=between)
    for norm in norms:
        for mean in (norm.running_mean, norm.running_var):
            assert mean is not None
            dist.all_reduce(mean)
            mean.div_(ranks.world)


@torch.no_grad()
def recompute_batch_norm_statistics(trainer: Trainer, *, batches: int, between: Callable[[], None]) -> list[_BatchNorm]:
    """Average this rank's statistics of BatchNorm anew over so many of its next training micro-batches.

    Means over batches of their means and (unbiased) variances, as torch.optim.swa_utils.update_bn takes them. Nothing
    else of the model changes.

    Args:
        trainer: its model is left in training mode.
        batches: at most; there may be fewer in two epochs.
        between: called after each batch, on every rank; it may raise.

    Returns:
        The modules; none where the model has none, and then no batch is loaded.
    """
    norms = [norm for norm in batch_norms_of(trainer.parallel) if norm.track_running_stats]
    if not norms:
        return []
    norm_modules = set(norms)
    other_buffers = [
        b for module in trainer.parallel.modules() if module not in norm_modules for b in module.buffers(recurse=False)
    ]
    buffers, momenta = [buffer.clone() for buffer in other_buffers], [norm.momentum for norm in norms]
    trainer.parallel.train()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean of all that come, also where a ghost batch takes its part of a batch
    try:
        with contextlib.closing(worker_train_loop.upcoming_micro_batches(trainer)) as stream:
            for batch in itertools.islice(stream, batches):
                with without_compilation(trainer.spec.train), autocast(trainer):
                    trainer.call.compute_outputs(trainer.parallel.module, batch)
                between()
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for buffer, value in zip(other_buffers, buffers, strict=True):
            buffer.copy_(value)
    return norms


def _is_classification(outputs: Any, targets: Any) -> bool:
    """Return whether the output is one score a class, and the target a class, of each sample."""
    if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor) or outputs.ndim != 2:
        return False
    return targets.shape == outputs.shape[:1] and not targets.is_floating_point()
