"""A training that `train.early_stopping` ends before its last epoch: when earlier ones would have ended, and what is then predicted."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from tula_cli.models.choice import goals
from tula_cli.run.records.recommendations import Prediction
from tula_cli.spec.sections import Train


def end_of(rows: Iterable[Mapping[str, Any]], train: Train) -> int | None:
    """Return the epoch after which a training with these rows would have ended; None where it would have gone on.

    Args:
        rows: of its epochs, as metrics.jsonl has them, first epoch first.
        train: the section, with `until`.
    """
    kept: dict[str, float] = {}
    for row in rows:
        values, epoch = _values(row), int(row["epoch"])
        if goals.better(values, kept, train.best_checkpoint):
            kept = goals.remembered(values, train.best_checkpoint, epoch=epoch)
        if goals.reached(values, kept, train, epoch=epoch):
            return epoch
    return None


def tells(rows: Iterable[Mapping[str, Any]], train: Train) -> bool:
    """Return whether rows have the metrics that `until` and `best` ask for; a metric may have come later."""
    asked = {train.goal, train.best_checkpoint.metric} - {"auto"}
    return all(any(not math.isnan(_values(row).get(name, math.nan)) for row in rows) for name in asked)


def _values(row: Mapping[str, Any]) -> dict[str, float]:
    known = {"loss": row["eval_loss"], **{name: row.get(name) for name in ("top1", "top5", "perplexity")}}
    return {name: math.nan if value is None else value for name, value in {**known, **row.get("metrics", {})}.items()}


def shortened(prediction: Prediction, *, epochs: int, of: int) -> Prediction:
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
        update["steps"] = steps = parts.steps * share_of_steps(prediction, share)
        data = None if parts.data is None else parts.data * steps / parts.steps if parts.steps else 0.0
        parts = parts.model_copy(update={**update, "data": data})
        ratio = parts.total / prediction.parts.total if prediction.parts and prediction.parts.total else share
    names = ("hours", "hours_low", "hours_high", "cost", "node_hours", "kwh", "kwh_low", "kwh_high")
    told = {name: value * ratio for name in names if (value := getattr(prediction, name)) is not None}
    return prediction.model_copy(update={**told, "parts": parts})


def share_of_steps(prediction: Prediction, share: float) -> float:
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


def share_left(prediction: Prediction, left: float) -> float:
    """Return the share of a training's time that the last `left` of its epochs take: those of a grown batch take less."""
    parts = prediction.parts
    if parts is None or not prediction.stages or not parts.total:
        return left
    stepping = parts.steps * (1 - share_of_steps(prediction, 1 - left))
    return (stepping + left * (parts.total - parts.steps)) / parts.total
