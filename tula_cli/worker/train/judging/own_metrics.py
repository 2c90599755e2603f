"""Metrics of the user's own (`train.metrics`), over the evaluation sets of all ranks."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from tula_cli.errors import JobFailed, SpecError
from tula_cli.plugins import load
from tula_cli.spec.sections import Train
from tula_cli.worker.build.batches.calling import takes_batch
from tula_cli.worker.build.construct import call_with_arguments
from tula_cli.worker.ranks import Ranks

STATEFUL = ("update", "compute", "reset")


def build_metrics(section: Train) -> dict[str, Any]:
    """Return each metric by its name: an object with update, compute and reset, or a callable.

    Raises:
        SpecError: it cannot be imported or built, or is neither.
    """
    return {name: _build_metric(name, entry) for name, entry in section.metrics.items()}


def _build_metric(name: str, entry: str | Mapping[str, Mapping[str, Any]]) -> Any:
    path = f"train.metrics.{name}"
    imported, args = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
    target = load(imported, {}, kind="metric")
    if isinstance(target, type):
        target = call_with_arguments(target, args, path=path, name=imported)
    elif args:
        raise SpecError(f"{path}: {imported} is no class, and only those are built with arguments", "leave them out")
    if not is_stateful(target) and not callable(target):
        raise SpecError(
            f"{path}: {imported} is a {type(target).__name__}",
            "a callable(outputs, batch), or update, compute and reset",
        )
    return target


def is_stateful(metric: Any) -> bool:
    """Return whether a metric gathers what it is shown and tells of all of it."""
    return all(callable(getattr(metric, name, None)) for name in STATEFUL)


def synchronizes_itself(metric: Any) -> bool:
    """Return whether a metric puts what all ranks have seen together by itself."""
    return callable(getattr(metric, "sync", None))


def can_merge_states(metric: Any) -> bool:
    """Return whether a metric takes in the states of others."""
    return callable(getattr(metric, "merge_state", None))


def warn_gathered_metrics(section: Train) -> list[str]:
    """Warn about metrics whose batches of all ranks must be gathered on rank 0."""
    return [
        f"train.metrics.{name} has neither sync nor merge_state: each batch of an evaluation is sent to the first GPU for it, with"
        f" {'its inputs' if takes_batch(metric.update) else 'scores and targets alone'}"
        for name, metric in build_metrics(section).items()
        if is_stateful(metric) and not synchronizes_itself(metric) and not can_merge_states(metric)
    ]


class UserMetrics:
    """The metrics of one evaluation; every rank calls the same, in the same order.

    A callable's value is the mean of what it returns for each batch, weighted by samples. An object that communicates by
    itself (torchmetrics: `sync`) is shown each rank's own batches, and so is one that takes in the state of others (torcheval:
    `merge_state`), which rank 0 does at the end; any other is shown the batches of all ranks, on rank 0 alone.

    Args:
        section: names them.
        ranks: this process among its peers.
    """

    def __init__(self, section: Train, ranks: Ranks) -> None:
        self.ranks, self.metrics = ranks, build_metrics(section)
        for metric in self.metrics.values():
            if callable(getattr(metric, "to", None)):
                metric.to(ranks.device)

    def reset(self) -> None:
        """Begin an evaluation."""
        self.sums = {name: [0.0, 0.0] for name in self.metrics}
        for name, metric in self.metrics.items():
            if is_stateful(metric):
                self._call_metric(name, metric.reset)

    def update(self, shown: "MetricInput | None") -> None:
        """Take a batch; None where this rank has none left while others have one."""
        for name, metric in self.metrics.items():
            if not is_stateful(metric):
                if shown is not None:
                    self._add_batch_value(name, shown)
            elif self._uses_own_batches(metric) or can_merge_states(metric):
                if shown is not None:
                    self._call_metric(name, metric.update, *shown.arguments_for(metric.update))
            else:
                for arguments in self._gather_batches(None if shown is None else shown.arguments_for(metric.update)):
                    self._call_metric(name, metric.update, *arguments)

    def _uses_own_batches(self, metric: Any) -> bool:
        return self.ranks.world == 1 or synchronizes_itself(metric)

    def _add_batch_value(self, name: str, shown: "MetricInput") -> None:
        value = self._number(name, self._call_metric(name, self.metrics[name], shown.outputs, shown.batch))
        self.sums[name][0] += value * shown.samples
        self.sums[name][1] += shown.samples

    def _gather_batches(self, arguments: tuple[Any, ...] | None) -> list[tuple[Any, ...]]:
        """Return what a metric is shown of each rank that has a batch, on rank 0; nothing on the others."""
        local = None if arguments is None else tree_map(_on_cpu, arguments)
        gathered: list[Any] | None = [None] * self.ranks.world if self.ranks.is_first else None
        dist.gather_object(local, gathered, dst=0)
        return [tree_map(self._to_device, entry) for entry in gathered or () if entry is not None]

    def _to_device(self, leaf: Any) -> Any:
        return leaf.to(self.ranks.device) if isinstance(leaf, torch.Tensor) else leaf

    def compute(self) -> dict[str, float]:
        """Return each metric over all ranks, the same on all of them; nan where it is no finite number."""
        values = {}
        for name, metric in self.metrics.items():
            if not is_stateful(metric):
                total, samples = self.ranks.sum(self.sums[name])
                values[name] = total / samples if samples else math.nan
            elif self._uses_own_batches(metric):
                values[name] = self._number(name, self._call_metric(name, metric.compute))
            else:
                if can_merge_states(metric):
                    self._merge_states(name, metric)
                value = self._number(name, self._call_metric(name, metric.compute)) if self.ranks.is_first else 0.0
                values[name] = self.ranks.sum([value])[0]
        return values

    def _merge_states(self, name: str, metric: Any) -> None:
        """Have rank 0's object take in the states of the others, which are sent once an evaluation."""
        states: list[Any] = [None] * self.ranks.world
        placed = callable(getattr(metric, "to", None))
        if placed:
            metric.to("cpu")  # another rank's device is none of this one's
        dist.gather_object(metric, states if self.ranks.is_first else None, dst=0)
        if self.ranks.is_first:
            self._call_metric(name, metric.merge_state, states[1:])
        if placed:
            metric.to(self.ranks.device)

    def _call_metric(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # whatever the user's code raises
            raise JobFailed(f"train.metrics.{name} fails: {type(error).__name__}: {error}") from error

    def _number(self, name: str, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise JobFailed(
                f"train.metrics.{name} is {type(value).__name__}, not one number",
                "let it return the mean over classes, for example",
            ) from error


class MetricInput:
    """What metrics are shown of a batch.

    Args:
        outputs: of the model.
        scores: the tensor of them that is one; else the outputs.
        target: of the batch; None where it has none.
        batch: all of it.
        samples: how many.
    """

    def __init__(self, outputs: Any, *, scores: Any, target: Any, batch: Any, samples: int) -> None:
        self.outputs, self.scores, self.target = outputs, scores, target
        self.batch, self.samples = batch, samples

    def arguments_for(self, update: Callable[..., Any]) -> tuple[Any, ...]:
        """Return what a metric's update is called with: scores and target, or outputs and batch where it says `batch`."""
        return (self.outputs, self.batch) if takes_batch(update) else (self.scores, self.target)


def _on_cpu(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf
