"""Early stopping: when a metric has reached its goal or has stopped improving, and what ending early is expected to save."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from tula_cli.run.records.recommendations import Prediction
from tula_cli.spec.sections import BestCheckpoint, Train
from tula_cli.words import format_count, format_number

# --- Stopping

PERCENT = ("top1", "top5")

Values = Mapping[str, float]
"""An evaluation: top1 and top5 in percent, loss, and the user's own metrics. What is not known is nan."""


def remember_best(values: Values, best: BestCheckpoint, *, epoch: int) -> dict[str, float]:
    """Return what is kept of the best evaluation; its metric as `value`, where train.best_checkpoint names one."""
    kept = {"top1": values["top1"], "loss": values["loss"], "epoch": float(epoch)}
    return kept if best.metric == "auto" else {**kept, "value": values[best.metric]}


def is_better(values: Values, kept: Mapping[str, float], best: BestCheckpoint) -> bool:
    """Return whether an evaluation is better than the one that is kept; empty: there is none.

    By itself it compares accuracies, and losses where there are no classes.
    """
    if not kept:
        return True
    if best.metric != "auto":
        new, old = values[best.metric], kept.get("value", math.nan)
        return not math.isnan(new) and (math.isnan(old) or (new < old if best.falls else new > old))
    if math.isnan(values["top1"]) or math.isnan(kept["top1"]):
        return values["loss"] < kept["loss"] or math.isnan(kept["loss"])
    return values["top1"] > kept["top1"]


def describe_stop(values: Values, kept: Mapping[str, float], train: Train, *, epoch: int) -> str:
    """Return why a training ends here, in words; empty where it goes on.

    Args:
        values: of the epoch that has ended.
        kept: of the best one so far, this one included.
        train: the section.
        epoch: how many are done.
    """
    stopping = train.early_stopping
    if stopping is None:
        return ""
    if stopping.target is not None:
        best = train.best_checkpoint
        value, target = values.get(best.metric, math.nan), convert_to_unit(best.metric, stopping.target)
        if value <= target if best.falls else value >= target:
            bound = "at most" if best.falls else "at least"
            return f"{best.metric} is {format_number(value, 4)}, {bound} {format_number(target, 4)}"
    if stopping.epochs is not None and epoch >= stopping.epochs:
        return f"train.early_stopping.epochs is {stopping.epochs}"
    if stopping.patience is not None and epoch - kept["epoch"] >= stopping.patience:
        return f"no better epoch than {int(kept['epoch'])} in {format_count(stopping.patience, 'epoch')}"
    return ""


def convert_to_unit(metric: str, bound: float) -> float:
    """Return a bound in the metric's unit: one of an accuracy up to 1 is a share, others are percent."""
    return 100 * bound if metric in PERCENT and bound <= 1 else bound


# --- Expected end


def find_end_epoch(rows: Iterable[Mapping[str, Any]], train: Train) -> int | None:
    """Return the epoch after which a training with these rows would have ended; None where it would have gone on.

    Args:
        rows: of its epochs, as metrics.jsonl has them, first epoch first.
        train: the section, with `early_stopping`.
    """
    kept: dict[str, float] = {}
    for row in rows:
        values, epoch = _read_metric_values(row), int(row["epoch"])
        if is_better(values, kept, train.best_checkpoint):
            kept = remember_best(values, train.best_checkpoint, epoch=epoch)
        if describe_stop(values, kept, train, epoch=epoch):
            return epoch
    return None


def has_metrics(rows: Iterable[Mapping[str, Any]], train: Train) -> bool:
    """Return whether rows have the metrics that `best_checkpoint` asks for; a metric may have come later."""
    metric = train.best_checkpoint.metric
    return metric == "auto" or any(not math.isnan(_read_metric_values(row).get(metric, math.nan)) for row in rows)


def _read_metric_values(row: Mapping[str, Any]) -> dict[str, float]:
    known = {"loss": row["eval_loss"], **{name: row.get(name) for name in ("top1", "top5", "perplexity")}}
    return {name: math.nan if value is None else value for name, value in {**known, **row.get("metrics", {})}.items()}


def shorten_prediction(prediction: Prediction, *, epochs: int, of: int) -> Prediction:
    """Return what is predicted for the first epochs of a training; starts, ends and branches stay whole.

    Args:
        prediction: for all epochs.
        epochs: how many are trained.
        of: all of them.
    """
    share, parts = epochs / of, prediction.parts
    if parts is None:
        ratio = share
    else:
        update = {name: share * getattr(parts, name) for name in ("evaluation", "checkpoints")}
        update["steps"] = steps = parts.steps * compute_share_of_steps(prediction, share)
        data = None if parts.data is None else parts.data * steps / parts.steps if parts.steps else 0.0
        parts = parts.model_copy(update={**update, "data": data})
        ratio = parts.total / prediction.parts.total if prediction.parts and prediction.parts.total else share
    names = ("hours", "hours_low", "hours_high", "cost", "node_hours", "kwh", "kwh_low", "kwh_high")
    shortened_values = {name: value * ratio for name in names if (value := getattr(prediction, name)) is not None}
    return prediction.model_copy(update={**shortened_values, "parts": parts})


def compute_share_of_steps(prediction: Prediction, share: float) -> float:
    """Return the share of the steps' time in the first epochs; a batch that grows has its shortest steps there, and most."""
    assert prediction.parts is not None
    smaller = sum(stage.steps * stage.step_time for stage in prediction.stages)
    if not smaller:
        return share
    early = sum(stage.steps * stage.batch for stage in prediction.stages)
    late = (prediction.parts.steps - smaller) / prediction.step_time * prediction.batch
    grown = early / (early + late)  # share of the epochs
    seconds = smaller * min(1.0, share / grown)
    if share > grown:
        seconds += (prediction.parts.steps - smaller) * (share - grown) / (1 - grown)
    return seconds / prediction.parts.steps


def compute_remaining_share(prediction: Prediction, share: float) -> float:
    """Return the share of a training's time that the last `left` of its epochs take: those of a grown batch take less."""
    parts = prediction.parts
    if parts is None or not prediction.stages or not parts.total:
        return share
    stepping = parts.steps * (1 - compute_share_of_steps(prediction, 1 - share))
    return (stepping + share * (parts.total - parts.steps)) / parts.total
