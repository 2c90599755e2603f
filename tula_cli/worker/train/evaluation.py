"""Evaluation on the held-out samples, the BatchNorm statistics that it needs, and `tula evaluate` on the nodes."""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import JobFailed, SpecError
from tula_cli.plugins import load_named_object
from tula_cli.run.directory import RunDir
from tula_cli.run.records.results import EvaluationRecord
from tula_cli.run.records.tasks import EvaluateTask
from tula_cli.spec.job import JobSpec
from tula_cli.spec.sections import Dataset, Optimizer, Train
from tula_cli.words import compute_perplexity
from tula_cli.worker import messages
from tula_cli.worker.build.batches import accepts_batch, find_scores, is_language_model_output, make_batch
from tula_cli.worker.build.compiled import disable_compilation
from tula_cli.worker.build.construct import call_with_arguments
from tula_cli.worker.build.data import build_test_dataset
from tula_cli.worker.build.loaders import build_eval_loader
from tula_cli.worker.build.norms import list_batch_norms
from tula_cli.worker.build.samples import Datasets
from tula_cli.worker.build.weights import load_weights
from tula_cli.worker.device import make_autocast_context
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.seeding import compute_stable_seed, seed_torch
from tula_cli.worker.train.loop import Trainer, build_trainer, list_upcoming_micro_batches, move_batch_to_device

# --- Metrics of the user's own

STATEFUL_METHODS = ("update", "compute", "reset")


def build_metrics(section: Train) -> dict[str, Any]:
    """Return each metric by its name: an object with update, compute and reset, or a callable.

    Raises:
        SpecError: it cannot be imported or built, or is neither.
    """
    return {name: _build_metric(name, entry) for name, entry in section.metrics.items()}


def _build_metric(name: str, entry: str | Mapping[str, Mapping[str, Any]]) -> Any:
    path = f"train.metrics.{name}"
    imported, args = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
    target = load_named_object(imported, {}, kind="metric")
    if isinstance(target, type):
        target = call_with_arguments(target, args, path=path, name=imported)
    elif args:
        raise SpecError(f"{path}: {imported} is not a class, so it cannot have arguments", "remove the arguments")
    if not is_stateful(target) and not callable(target):
        raise SpecError(
            f"{path}: {imported} is a {type(target).__name__}, not a metric",
            "name a function of (outputs, batch), or a class with update, compute and reset",
        )
    return target


def is_stateful(metric: Any) -> bool:
    """Return whether a metric accumulates over batches, by update, compute and reset."""
    return all(callable(getattr(metric, name, None)) for name in STATEFUL_METHODS)


def has_built_in_synchronization(metric: Any) -> bool:
    """Return whether a metric combines the results of all ranks by itself (`sync`)."""
    return callable(getattr(metric, "sync", None))


def can_merge_states(metric: Any) -> bool:
    """Return whether a metric can merge the states of other objects (`merge_state`)."""
    return callable(getattr(metric, "merge_state", None))


def list_gathered_metrics(section: Train) -> list[Diagnostic]:
    """Return notes on metrics for which the batches of all ranks must be gathered on rank 0."""
    return [
        messages.metric_gathered(metric=name, with_inputs=accepts_batch(metric.update))
        for name, metric in build_metrics(section).items()
        if is_stateful(metric) and not has_built_in_synchronization(metric) and not can_merge_states(metric)
    ]


class UserMetrics:
    """The metrics of one evaluation; every rank makes the same calls in the same order.

    A callable's value is the mean of its values for each batch, weighted by samples. An object that communicates by
    itself (torchmetrics: `sync`) is updated with each rank's own batches, and so is one that can merge states
    (torcheval: `merge_state`), which rank 0 does at the end; any other is updated with the batches of all ranks, on
    rank 0 alone.
    """

    def __init__(self, section: Train, ranks: Ranks) -> None:
        self.ranks, self.metrics = ranks, build_metrics(section)
        for metric in self.metrics.values():
            if callable(getattr(metric, "to", None)):
                metric.to(ranks.device)

    def reset(self) -> None:
        """Start an evaluation."""
        self.sums = {name: [0.0, 0.0] for name in self.metrics}
        for name, metric in self.metrics.items():
            if is_stateful(metric):
                self._call_metric(name, metric.reset)

    def update(self, entry: "MetricInput | None") -> None:
        """Add a batch; None if this rank has none left while others have one."""
        for name, metric in self.metrics.items():
            if not is_stateful(metric):
                if entry is not None:
                    self._add_batch_value(name, entry)
            elif self._uses_batches_of_its_rank(metric) or can_merge_states(metric):
                if entry is not None:
                    self._call_metric(name, metric.update, *entry.get_arguments(metric.update))
            else:
                for arguments in self._gather_batches(None if entry is None else entry.get_arguments(metric.update)):
                    self._call_metric(name, metric.update, *arguments)

    def _uses_batches_of_its_rank(self, metric: Any) -> bool:
        return self.ranks.world == 1 or has_built_in_synchronization(metric)

    def _add_batch_value(self, name: str, entry: "MetricInput") -> None:
        value = self._parse_number(name, self._call_metric(name, self.metrics[name], entry.outputs, entry.batch))
        self.sums[name][0] += value * entry.samples
        self.sums[name][1] += entry.samples

    def _gather_batches(self, arguments: tuple[Any, ...] | None) -> list[tuple[Any, ...]]:
        """Return, on rank 0, the arguments of a metric's update from each rank that has a batch; else an empty list."""
        local = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), arguments)
        gathered: list[Any] | None = [None] * self.ranks.world if self.ranks.is_first else None
        dist.gather_object(local, gathered, dst=0)
        present = [entry for entry in gathered or () if entry is not None]
        return [tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.ranks.device), entry) for entry in present]

    def compute(self) -> dict[str, float]:
        """Return each metric over all ranks, the same on all of them; nan if it is not a finite number."""
        values = {}
        for name, metric in self.metrics.items():
            if not is_stateful(metric):
                total, samples = self.ranks.sum(self.sums[name])
                values[name] = total / samples if samples else math.nan
            elif self._uses_batches_of_its_rank(metric):
                values[name] = self._parse_number(name, self._call_metric(name, metric.compute))
            else:
                if can_merge_states(metric):
                    self._merge_states(name, metric)
                value = (
                    self._parse_number(name, self._call_metric(name, metric.compute)) if self.ranks.is_first else 0.0
                )
                values[name] = self.ranks.sum([value])[0]
        return values

    def _merge_states(self, name: str, metric: Any) -> None:
        """Merge the states of all ranks into rank 0's object; they are sent once per evaluation."""
        states: list[Any] = [None] * self.ranks.world
        can_move = callable(getattr(metric, "to", None))
        if can_move:
            metric.to("cpu")  # the state of another rank may be on a device that this rank lacks
        dist.gather_object(metric, states if self.ranks.is_first else None, dst=0)
        if self.ranks.is_first:
            self._call_metric(name, metric.merge_state, states[1:])
        if can_move:
            metric.to(self.ranks.device)

    def _call_metric(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # the user's code may raise anything
            raise JobFailed(f"train.metrics.{name} fails: {type(error).__name__}: {error}") from error

    def _parse_number(self, name: str, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise JobFailed(
                f"train.metrics.{name} returned a {type(value).__name__}, not one number",
                "make it return one number, for example the mean over classes",
            ) from error


class MetricInput:
    """The values of a batch that metrics receive.

    Args:
        scores: the tensor of scores among them if there is one; else the outputs.
        target: target of the batch; None if it has none.
    """

    def __init__(self, outputs: Any, *, scores: Any, target: Any, batch: Any, samples: int) -> None:
        self.outputs, self.scores, self.target = outputs, scores, target
        self.batch, self.samples = batch, samples

    def get_arguments(self, update: Callable[..., Any]) -> tuple[Any, ...]:
        """Return the arguments of a metric's update: scores and target, or outputs and batch (`accepts_batch`)."""
        return (self.outputs, self.batch) if accepts_batch(update) else (self.scores, self.target)


# --- Evaluation

STATISTICS_SAMPLES = 4096
"""Training samples over all ranks from which BatchNorm statistics are computed; at most a tenth of the training set."""

_SEED_STREAM = 0x4E4F  # part of the seed, so that random numbers differ from the job's others


@dataclass(frozen=True)
class Evaluation:
    """Means over the evaluation set. Accuracies are percentages; nan if the output is not one score per class.

    The loss of a language model is the mean over samples of each batch's mean over its tokens.
    """

    loss: float
    top1: float
    top5: float
    samples: int
    perplexity: float = float("nan")  # exp(loss) of a language model; nan for other models
    user_metrics: Mapping[str, float] = field(default_factory=dict)  # values of train.metrics, by name

    @property
    def metrics(self) -> dict[str, float]:
        """Every metric by its name."""
        values = {"top1": self.top1, "top5": self.top5, "loss": self.loss, "perplexity": self.perplexity}
        return {**values, **self.user_metrics}


class Evaluator:
    """Evaluates on every rank's share of the evaluation data; keeps its loader's processes between epochs."""

    def __init__(self, trainer: Trainer) -> None:
        ranks = trainer.ranks
        self.trainer = trainer
        self.user_metrics = UserMetrics(trainer.spec.train, ranks)
        self.loader = build_eval_loader(
            trainer.datasets.eval,
            rank=ranks.rank,
            world=ranks.world,
            batch=trainer.largest_micro_batch,
            workers=trainer.workers,
            pin=ranks.device.type == "cuda",
            collate=trainer.datasets.collate,
        )

    @torch.no_grad()
    def evaluate(self, max_batches: int | None = None, *, after_batch: Callable[[], None] = lambda: None) -> Evaluation:
        """Evaluate the whole set, or only some batches of each rank to measure the time.

        Args:
            max_batches: the most batches of each rank; None: all.
            after_batch: called after each batch that every rank has, so it may communicate; it may raise.
        """
        with self.trainer.method.use_evaluated_weights(self.trainer):
            if self.trainer.method.evaluates_averages and max_batches is None:
                average_batch_norm_statistics(self.trainer, after_batch=after_batch)
            return self._evaluate(max_batches, after_batch)

    def _evaluate(self, max_batches: int | None, after_batch: Callable[[], None]) -> Evaluation:
        trainer = self.trainer
        # BatchNorm's statistics differ between ranks; all ranks evaluate with rank 0's, which are saved.
        for buffer in trainer.parallel.module.buffers():
            dist.broadcast(buffer, src=0)
        trainer.parallel.eval()
        sums = torch.zeros(5, dtype=torch.float64, device=trainer.ranks.device)
        common, most_batches, batches_done = self.count_batches(trainer.ranks.world - 1), self.count_batches(0), 0
        self.user_metrics.reset()
        newest: Any = None
        for index, batch in enumerate(self.loader):
            if index == max_batches:
                break
            batches_done += 1
            sums += self._score_batch(move_batch_to_device(trainer, batch), self._get_batch_size(index))
            newest = batch
            if index < common:
                after_batch()
        for _ in range(batches_done, min(most_batches, max_batches or most_batches)):
            self._join_extra_batch(newest)
            self.user_metrics.update(None)
        trainer.parallel.release_gathered_parameters()
        trainer.parallel.train()
        loss, top1, top5, samples, language = trainer.ranks.sum(sums.tolist())
        if not samples:
            unknown = dict.fromkeys(self.user_metrics.metrics, math.nan)
            return Evaluation(math.nan, math.nan, math.nan, 0, user_metrics=unknown)
        mean = loss / samples
        # A loss of the user's may not be the mean cross-entropy from which perplexity is computed.
        perplexity_value = compute_perplexity(mean) if language == samples and trainer.call.default else math.nan
        user_metrics = self.user_metrics.compute()
        return Evaluation(
            mean, 100 * top1 / samples, 100 * top5 / samples, int(samples), perplexity_value, user_metrics
        )

    def _join_extra_batch(self, batch: Any) -> None:
        """Run the model on ranks without a further batch, if ranks that have one need the shards of these ranks."""
        trainer = self.trainer
        if not trainer.parallel.needs_all_ranks:
            return
        if batch is None:  # fewer samples than ranks
            batch = make_batch(trainer.datasets.collate, trainer.datasets.train.list_first_samples(1))
        with disable_compilation(trainer.spec.train), make_autocast_context(trainer.spec.train, trainer.ranks.device):
            trainer.call.compute_outputs(trainer.parallel.module, move_batch_to_device(trainer, batch))

    def _count_samples_of_rank(self, rank: int) -> int:
        return len(range(rank, len(self.trainer.datasets.eval), self.trainer.ranks.world))

    def count_batches(self, rank: int) -> int:
        """Return the number of batches of a rank: the first ranks may have one more than the last."""
        return math.ceil(self._count_samples_of_rank(rank) / self.trainer.largest_micro_batch)

    def _get_batch_size(self, index: int) -> int:
        """Return the number of samples in this rank's batch number `index`; the last batch may have fewer."""
        size = self.trainer.largest_micro_batch
        return min(size, self._count_samples_of_rank(self.trainer.ranks.rank) - index * size)

    def _score_batch(self, batch: Any, count: int) -> torch.Tensor:
        """Return sums over a batch of `count` samples: loss, top-1 hits, top-5 hits, samples, and samples of language models."""
        trainer = self.trainer
        is_smaller = count != trainer.largest_micro_batch  # not compiled for the shape of a smaller last batch
        with (
            disable_compilation(trainer.spec.train) if is_smaller else contextlib.nullcontext(),
            make_autocast_context(trainer.spec.train, trainer.ranks.device),
        ):
            outputs = trainer.call.compute_outputs(trainer.parallel.module, batch)
            loss = trainer.call.compute_loss_from_outputs(outputs, batch)
        guesses, targets = find_scores(outputs), trainer.call.get_target(batch)
        self.user_metrics.update(MetricInput(outputs, scores=guesses, target=targets, batch=batch, samples=count))
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


def average_batch_norm_statistics(trainer: Trainer, *, after_batch: Callable[[], None] = lambda: None) -> None:
    """Recompute BatchNorm's statistics at the model's current weights, equal on all ranks; every rank must call this.

    They are computed from the training batches that come next: a run that stops in between, or is resumed, computes the
    same statistics. The training's random state is unchanged.
    """
    ranks = trainer.ranks
    samples = min(STATISTICS_SAMPLES, len(trainer.datasets.train) // 10)
    batches = max(1, samples // (ranks.world * trainer.micro_batch))
    with torch.random.fork_rng(devices=[ranks.device] if ranks.device.type == "cuda" else []):
        seed_torch(
            compute_stable_seed(trainer.spec.train.seed, _SEED_STREAM, trainer.position.samples, ranks.rank),
            ranks.device,
        )
        norms = recompute_batch_norm_statistics(trainer, batches=batches, after_batch=after_batch)
    for norm in norms:
        for mean in (norm.running_mean, norm.running_var):
            assert mean is not None
            dist.all_reduce(mean)
            mean.div_(ranks.world)


@torch.no_grad()
def recompute_batch_norm_statistics(
    trainer: Trainer, *, batches: int, after_batch: Callable[[], None]
) -> list[_BatchNorm]:
    """Recompute this rank's BatchNorm statistics from up to `batches` of its next training micro-batches.

    Means over batches of their means and (unbiased) variances, as torch.optim.swa_utils.update_bn computes them.
    Nothing else of the model changes.

    Args:
        trainer: its model is left in training mode.
        batches: the most micro-batches; two epochs may have fewer.
        after_batch: called after each batch, on every rank; it may raise.

    Returns:
        The BatchNorm modules; if the model has none, an empty list, and no batch is loaded.
    """
    ranks = trainer.ranks
    norms = [norm for norm in list_batch_norms(trainer.parallel) if norm.track_running_stats]
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
        norm.momentum = None  # None: cumulative mean over all batches
    try:
        with contextlib.closing(list_upcoming_micro_batches(trainer)) as stream:
            for batch in itertools.islice(stream, batches):
                with disable_compilation(trainer.spec.train), make_autocast_context(trainer.spec.train, ranks.device):
                    trainer.call.compute_outputs(trainer.parallel.module, batch)
                after_batch()
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for buffer, value in zip(other_buffers, buffers, strict=True):
            buffer.copy_(value)
    return norms


def _is_classification(outputs: Any, targets: Any) -> bool:
    """Return whether the output is one score per class, and the target one class, for each sample."""
    if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor) or outputs.ndim != 2:
        return False
    return targets.shape == outputs.shape[:1] and not targets.is_floating_point()


def evaluate_checkpoint(task: EvaluateTask, run: RunDir, ranks: Ranks, datasets: Datasets) -> None:
    """Evaluate the weights and write the result; does nothing if it has been written already.

    Raises:
        SpecError: the test set cannot be built, or the weights do not fit the model.
        JobFailed: the checkpoint no longer exists.
    """
    training = run.get_training(task.signature)
    if ranks.broadcast(int(training.read_evaluation(task.key) is not None)):
        return
    samples = build_test_dataset(task.spec, datasets)
    trainer = build_trainer(
        task.model_copy(update={"spec": _remove_training_state(task.spec)}),
        ranks,
        dataclasses.replace(datasets, eval=samples),
        batch=task.local_batch * ranks.world,
        workers=task.spec.train.workers,
        refresh=False,
    )
    _load_weights(task, trainer, ranks)
    began = time.monotonic()
    evaluation = Evaluator(trainer).evaluate()
    if not ranks.is_first:
        return
    training.write_evaluation(
        EvaluationRecord(
            **task.model_dump(include={"signature", "key", "weights", "path", "samples", "nodes", "local_batch"}),
            test=task.spec.dataset.test is not None,
            dataset=_describe_dataset(task.spec.dataset),
            size=evaluation.samples,
            metrics={name: value for name, value in evaluation.metrics.items() if math.isfinite(value)},
            seconds=time.monotonic() - began,
            evaluated_at=time.time(),
        )
    )


def _remove_training_state(spec: JobSpec) -> JobSpec:
    """Return a job with the same model, and a method and optimizer that hold no state, because no step is taken."""
    plain = {"method": "lbt", "lr_scaling": "auto", "accumulate": 1, "compile": False}
    train = spec.train.model_copy(update={**plain, "activation_checkpointing": False})
    return spec.model_copy(update={"train": train, "optimizer": Optimizer(name="SGD", lr=1.0)})


def _load_weights(task: EvaluateTask, trainer: Trainer, ranks: Ranks) -> None:
    if task.samples is not None and not Path(task.path).exists():
        raise JobFailed(
            f"the checkpoint {task.path} no longer exists: the training has saved newer checkpoints",
            "run the same command again",
        )
    section = task.spec.model.model_copy(update={"weights": task.path, "strict": True})
    load_weights(section, trainer.parallel.module, first=ranks.is_first, key="--weights")


def _describe_dataset(dataset: Dataset) -> str:
    name = dataset if dataset.test is None else dataset.test_dataset
    return name.name if ":" in name.name else f"{name.name} in {name.root}"
