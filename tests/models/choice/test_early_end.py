"""Where earlier trainings would have ended, and what is predicted up to there."""

from typing import Any

import make_runs as make
import pytest

from tula_cli.models.choice.early_stopping import find_end_epoch, has_metrics, shorten_prediction
from tula_cli.run.records.recommendations import TimeParts
from tula_cli.spec.sections import Train


def rows(*top1: float, **more: list[float]) -> list[dict[str, Any]]:
    """Return an epoch's row for each top-1."""
    return [
        {"epoch": float(epoch), "top1": value, "top5": None, "eval_loss": 1 / epoch, "perplexity": None}
        | ({"metrics": {name: values[epoch - 1] for name, values in more.items()}} if more else {})
        for epoch, value in enumerate(top1, 1)
    ]


def train(metric: str = "auto", **stopping: Any) -> Train:
    metrics = {"f1": "mine:f1"} if metric == "f1" else {}
    best = {"metric": metric}
    return Train(epochs=9, early_stopping=stopping, best_checkpoint=best, metrics=metrics)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("until", "found", "epoch"),
    [
        ({"metric": "top1", "target": 0.7}, rows(50, 69, 71, 80), 3),
        ({"metric": "top1", "target": 0.9}, rows(50, 69, 71, 80), None),
        ({"metric": "loss", "target": 0.5}, rows(50, 69, 71, 80), 2),
        ({"patience": 2}, rows(50, 69, 60, 61, 80), 4),
        ({"metric": "f1", "target": 0.3}, rows(0, 0, 0, f1=[0.1, 0.2, 0.4]), 3),
    ],
)
def test_the_rows_of_a_training_tell_where_it_would_have_ended(until: Any, found: Any, epoch: int | None) -> None:
    assert has_metrics(found, train(**until))
    assert find_end_epoch(found, train(**until)) == epoch


def test_rows_without_the_metric_tell_nothing() -> None:
    requested = train(metric="f1", target=0.3)
    assert not has_metrics(rows(50, 60), requested) and not has_metrics([], requested)
    assert not has_metrics([{**row, "top1": None} for row in rows(50, 60)], train(metric="top1", target=0.7))


def test_the_prediction_of_some_epochs_keeps_starts_and_ends_whole() -> None:
    parts = TimeParts(steps=800.0, data=100.0, evaluation=100.0, checkpoints=60.0, branches=20.0, rest=20.0)
    whole = make.prediction(1, 64, hours=1000 / 3600, hours_low=None, hours_high=1.0, cost=4.0, kwh=2.0, parts=parts)
    result = shorten_prediction(whole, epochs=1, of=4)
    assert result.parts == TimeParts(
        steps=200.0, data=25.0, evaluation=25.0, checkpoints=15.0, branches=20.0, rest=20.0
    )
    assert result.hours == pytest.approx(280 / 3600) and result.hours_low is None
    assert (result.hours_high, result.cost, result.kwh) == pytest.approx((0.28, 1.12, 0.56))
    assert shorten_prediction(whole.model_copy(update={"parts": None}), epochs=1, of=4).cost == 1.0
