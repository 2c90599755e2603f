from worker_jobs import prediction

from tula_cli.models.time.changes import StepTimeDrift


def said(times: list[float | None]) -> list[str]:
    """Return what is said after epochs of these step times (seconds), where .4 to .6 were predicted."""
    drift = StepTimeDrift(prediction(step_time=0.5, low=0.4, high=0.6))
    found = [drift.warning(time, epoch=epoch) for epoch, time in enumerate(times, start=1)]
    return [text for text in found if text]


def test_a_single_epoch_outside_the_interval_says_nothing() -> None:
    assert said([0.5, 0.5, 0.7, 0.5, 0.7, None, 0.7, 0.5]) == []


def test_two_epochs_outside_are_told_once_and_the_return_too() -> None:
    slow, again = said([0.5, 0.7, 0.7, 0.7, 0.5, 0.7, 0.5, 0.5, 0.5])
    assert (
        slow
        == "epoch 3: a step takes 700.0 ms, predicted 500.0 (90 % between 400.0 and 600.0): has the network or the load changed?"
    )
    assert again == "epoch 8: a step takes 500.0 ms, predicted 500.0: within the interval again"


def test_faster_is_told_as_faster() -> None:
    assert ["faster than the probes were" in text for text in said([0.3, 0.3])] == [True]


def test_what_comes_and_goes_is_told_three_times() -> None:
    told = said([*[0.7] * 2, *[0.5] * 2] * 5)
    assert ["again" in text for text in told] == [False, True, False]
