from make_runs import prediction

from tula_cli.diagnostics import Diagnostic
from tula_cli.models import messages
from tula_cli.models.time.changes import StepTimeDrift


def said(times: list[float | None]) -> list[Diagnostic]:
    """Return what is said after epochs of these step times (seconds), where .4 to .6 were predicted."""
    drift = StepTimeDrift(prediction(1, 16, step_time=0.5, step_low=0.4, step_high=0.6))
    results = [drift.check_epoch(time, epoch=epoch) for epoch, time in enumerate(times, start=1)]
    return [warning for warning in results if warning]


def test_a_single_epoch_outside_the_interval_says_nothing() -> None:
    assert said([0.5, 0.5, 0.7, 0.5, 0.7, None, 0.7, 0.5]) == []


def test_two_epochs_outside_are_reported_once_and_the_return_too() -> None:
    slow, again = said([0.5, 0.7, 0.7, 0.7, 0.5, 0.7, 0.5, 0.5, 0.5])
    assert slow == messages.step_time_not_as_predicted(
        epoch=3, step_ms=700.0, predicted_ms=500.0, low_ms=400.0, high_ms=600.0
    )
    assert "above the predicted" in slow.text
    assert again == messages.step_time_as_predicted(epoch=8, step_ms=500.0, predicted_ms=500.0)


def test_faster_is_reported_as_faster() -> None:
    assert ["below the predicted" in warning.text for warning in said([0.3, 0.3])] == [True]


def test_what_comes_and_goes_is_reported_three_times() -> None:
    answer = said([*[0.7] * 2, *[0.5] * 2] * 5)
    assert [warning.code for warning in answer] == [
        "step-time-not-as-predicted", "step-time-as-predicted", "step-time-not-as-predicted"
    ]  # fmt: skip
