"""Which epoch is the best (`train.best_checkpoint`), and whether a training has reached what it is to (`train.early_stopping`)."""

import math
from collections.abc import Mapping

from tula_cli.spec.parts.of_train import BestCheckpoint
from tula_cli.spec.sections import Train
from tula_cli.words import number, plural

PERCENT = ("top1", "top5")

Values = Mapping[str, float]
"""An evaluation: top1 and top5 in percent, loss, and the user's own metrics. What is not known is nan."""


def remembered(values: Values, best: BestCheckpoint, *, epoch: int) -> dict[str, float]:
    """Return what is kept of the best evaluation; its metric as `value`, where train.best_checkpoint names one."""
    kept = {"top1": values["top1"], "loss": values["loss"], "epoch": float(epoch)}
    return kept if best.metric == "auto" else {**kept, "value": values[best.metric]}


def better(values: Values, kept: Mapping[str, float], best: BestCheckpoint) -> bool:
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


def reached(values: Values, kept: Mapping[str, float], train: Train, *, epoch: int) -> str:
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
    value = values.get(train.goal, math.nan)
    least, most = (
        None if bound is None else in_unit(train.goal, bound) for bound in (stopping.at_least, stopping.at_most)
    )
    if least is not None and value >= least:
        return f"{train.goal} is {number(value, 4)}, at least {number(least, 4)}"
    if most is not None and value <= most:
        return f"{train.goal} is {number(value, 4)}, at most {number(most, 4)}"
    if stopping.epochs is not None and epoch >= stopping.epochs:
        return f"train.early_stopping.epochs is {stopping.epochs}"
    if stopping.patience is not None and epoch - kept["epoch"] >= stopping.patience:
        return f"no better epoch than {int(kept['epoch'])} in {plural(stopping.patience, 'epoch')}"
    return ""


def in_unit(metric: str, bound: float) -> float:
    """Return a bound in the metric's unit: one of an accuracy up to 1 is a share, others are percent."""
    return 100 * bound if metric in PERCENT and bound <= 1 else bound
