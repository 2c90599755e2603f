"""Early stopping by a target or by patience, and the predicted time and cost of a part of the epochs."""

import math
from collections.abc import Mapping

from tula_cli.run.records.recommendations import Prediction
from tula_cli.spec.sections import BestCheckpoint, Train
from tula_cli.words import format_count, format_number

# --- Stopping

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


# --- The prediction of some epochs


def shorten_prediction(prediction: Prediction, *, epochs: int, all_epochs: int) -> Prediction:
    """Return the prediction for the first epochs of a training; starts, exits and branches are not shortened.

    Args:
        prediction: for all epochs.
        epochs: number of epochs trained.
        all_epochs: number of all epochs.
    """
    share, parts = epochs / all_epochs, prediction.parts
    ratio = share
    if parts is not None:
        steps = parts.steps * compute_step_time_share(prediction, share)
        data = None if parts.data is None else parts.data * steps / parts.steps if parts.steps else 0.0
        others = {name: share * getattr(parts, name) for name in ("evaluation", "checkpoints")}
        shortened = parts.model_copy(update={"steps": steps, "data": data, **others})
        ratio = shortened.total / parts.total if parts.total else share
        parts = shortened
    names = ("hours", "hours_low", "hours_high", "cost", "node_hours", "kwh", "kwh_low", "kwh_high")
    shortened_values = {name: value * ratio for name in names if (value := getattr(prediction, name)) is not None}
    return prediction.model_copy(update={**shortened_values, "parts": parts})


def compute_step_time_share(prediction: Prediction, epoch_share: float) -> float:
    """Return the share of the time of all steps for the first `epoch_share` of the epochs.

    With a growing batch, the first epochs have more steps, which are shorter.
    """
    assert prediction.parts is not None
    smaller = sum(stage.steps * stage.step_time for stage in prediction.stages)
    if not smaller:
        return epoch_share
    early = sum(stage.steps * stage.batch for stage in prediction.stages)
    later_steps = (prediction.parts.steps - smaller) / prediction.step_time * prediction.batch
    grown = early / (early + later_steps)  # share of the epochs trained before the last stage
    seconds = smaller * min(1.0, epoch_share / grown)
    if epoch_share > grown:
        seconds += (prediction.parts.steps - smaller) * (epoch_share - grown) / (1 - grown)
    return seconds / prediction.parts.steps


def compute_remaining_time_share(prediction: Prediction, epoch_share: float) -> float:
    """Return the share of a training's time for the last `epoch_share` of its epochs; less if the batch has grown."""
    parts = prediction.parts
    if parts is None or not prediction.stages or not parts.total:
        return epoch_share
    stepping = parts.steps * (1 - compute_step_time_share(prediction, 1 - epoch_share))
    return (stepping + epoch_share * (parts.total - parts.steps)) / parts.total
