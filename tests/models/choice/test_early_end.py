"""Where early stopping ends a training, and what is predicted up to there."""

import math
from typing import Any

import make_runs as make
import pytest

from tula_cli.models.choice.early_stopping import describe_stop_reason, is_better_evaluation, select_best_values
from tula_cli.models.cost import shorten_prediction
from tula_cli.run.records.recommendations import TimeParts
from tula_cli.spec.sections import Train


def train(metric: str = "auto", **stopping: Any) -> Train:
    metrics = {"f1": "mine:f1"} if metric == "f1" else {}
    best = {"metric": metric}
    return Train(epochs=9, early_stopping=stopping, best_checkpoint=best, metrics=metrics)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("until", "evaluations", "end"),
    [
        ({"metric": "top1", "target": 0.7}, [{"top1": 50.0}, {"top1": 69.0}, {"top1": 71.0}, {"top1": 80.0}], 3),
        ({"metric": "top1", "target": 0.9}, [{"top1": 50.0}, {"top1": 69.0}, {"top1": 71.0}, {"top1": 80.0}], None),
        ({"metric": "loss", "target": 0.5}, [{"loss": 1.0}, {"loss": 0.5}, {"loss": 0.3}], 2),
        ({"patience": 2}, [{"top1": 50.0}, {"top1": 69.0}, {"top1": 60.0}, {"top1": 61.0}], 4),
        ({"metric": "f1", "target": 0.3}, [{"f1": 0.1}, {"f1": 0.2}, {"f1": 0.4}], 3),
        ({"epochs": 2}, [{"top1": 50.0}, {"top1": 69.0}, {"top1": 80.0}], 2),
    ],
)
def test_a_training_ends_at_its_target_after_some_epochs_or_without_a_better_one(
    until: dict[str, Any], evaluations: list[dict[str, float]], end: int | None
) -> None:
    section, best, ends = train(**until), dict[str, float](), list[int]()
    for epoch, evaluation in enumerate(evaluations, 1):
        values = {"top1": math.nan, "loss": 1.0, **evaluation}
        if is_better_evaluation(values, best, section.best_checkpoint):
            best = select_best_values(values, section.best_checkpoint, epoch=epoch)
        ends += [epoch] if describe_stop_reason(values, best, section, epoch=epoch) else []
    assert next(iter(ends), None) == end


def test_the_prediction_of_some_epochs_keeps_starts_and_ends_whole() -> None:
    parts = TimeParts(steps=800.0, data=100.0, evaluation=100.0, checkpoints=60.0, branches=20.0, rest=20.0)
    whole = make.prediction(1, 64, hours=1000 / 3600, hours_low=None, hours_high=1.0, cost=4.0, kwh=2.0, parts=parts)
    result = shorten_prediction(whole, epochs=1, all_epochs=4)
    assert result.parts == TimeParts(
        steps=200.0, data=25.0, evaluation=25.0, checkpoints=15.0, branches=20.0, rest=20.0
    )
    assert result.hours == pytest.approx(280 / 3600) and result.hours_low is None
    assert (result.hours_high, result.cost, result.kwh) == pytest.approx((0.28, 1.12, 0.56))
    assert shorten_prediction(whole.model_copy(update={"parts": None}), epochs=1, all_epochs=4).cost == 1.0
