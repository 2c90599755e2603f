"""The best epoch of a training by its metrics, and early stopping by a target or by patience."""

import math
from collections.abc import Mapping

from tula_cli.spec.sections import BestCheckpoint, Train
from tula_cli.words import format_count, format_number

PERCENT_METRICS = ("top1", "top5")

Metrics = Mapping[str, float]
"""Metrics of an evaluation, by name: top1 and top5 in percent, loss, and the user's own metrics. Unknown ones are nan."""


def select_best_values(metrics: Metrics, best: BestCheckpoint, *, epoch: int) -> dict[str, float]:
    """Return the numbers to keep of the best evaluation; `value` is the metric that train.best_checkpoint names."""
    kept = {"top1": metrics["top1"], "loss": metrics["loss"], "epoch": float(epoch)}
    return kept if best.metric == "auto" else {**kept, "value": metrics[best.metric]}


def is_better_evaluation(metrics: Metrics, best_values: Mapping[str, float], best: BestCheckpoint) -> bool:
    """Return whether an evaluation is better than the kept one; True if `best_values` is empty.

    With metric auto, accuracies are compared, or losses if there are no classes.
    """
    if not best_values:
        return True
    if best.metric != "auto":
        new, old = metrics[best.metric], best_values.get("value", math.nan)
        return not math.isnan(new) and (math.isnan(old) or (new < old if best.is_lower_better else new > old))
    if math.isnan(metrics["top1"]) or math.isnan(best_values["top1"]):
        return metrics["loss"] < best_values["loss"] or math.isnan(best_values["loss"])
    return metrics["top1"] > best_values["top1"]


def describe_stop_reason(metrics: Metrics, best_values: Mapping[str, float], train: Train, *, epoch: int) -> str:
    """Return why a training stops here, in words; empty if it continues.

    Args:
        metrics: of the epoch that has ended.
        best_values: of the best epoch so far, including this one.
        epoch: number of epochs done.
    """
    stopping = train.early_stopping
    if stopping is None:
        return ""
    if stopping.target is not None:
        best = train.best_checkpoint
        value, target = metrics.get(best.metric, math.nan), convert_bound_to_unit(best.metric, stopping.target)
        if value <= target if best.is_lower_better else value >= target:
            bound = "at most" if best.is_lower_better else "at least"
            return f"{best.metric} is {format_number(value, 4)}, {bound} {format_number(target, 4)}"
    if stopping.epochs is not None and epoch >= stopping.epochs:
        return f"train.early_stopping.epochs is {stopping.epochs}"
    if stopping.patience is not None and epoch - best_values["epoch"] >= stopping.patience:
        return f"no better epoch than {int(best_values['epoch'])} in {format_count(stopping.patience, 'epoch')}"
    return ""


def convert_bound_to_unit(metric: str, bound: float) -> float:
    """Convert a bound to the metric's unit: for an accuracy, values up to 1 are shares, others percent."""
    return 100 * bound if metric in PERCENT_METRICS and bound <= 1 else bound
