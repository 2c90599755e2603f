"""Whether a training's steps take as long as was predicted, and when to say that they do not."""

from tula_cli.run.records.recommendations import Prediction, StageSteps

MAX_WARNINGS = 3
"""How often an attempt says that its step time left the predicted interval, or is back in it."""


class StepTimeDrift:
    """Holds the step time of each epoch against the predicted interval.

    What is said changes when two epochs in a row agree: a time near an end of the interval goes in and out by chance.

    Args:
        prediction: what the training was chosen by, or a stage of it; None where there was none.
    """

    def __init__(self, prediction: Prediction | StageSteps | None) -> None:
        self.prediction = prediction
        self._settled: bool | None = None  # within the interval, as of two epochs that agree
        self._latest: bool | None = None  # the same of the latest epoch
        self._told = 0

    def is_within(self, step_time: float | None) -> bool | None:
        """Return whether a step time (seconds) is within the 90 % interval; None where either is unknown."""
        prediction = self.prediction
        if prediction is None or step_time is None or prediction.step_low is None or prediction.step_high is None:
            return None
        return prediction.step_low <= step_time <= prediction.step_high

    def warning(self, step_time: float | None, *, epoch: int) -> str:
        """Return what there is to say after an epoch; "" for nothing new.

        Args:
            step_time: seconds; None where too few steps have been timed.
            epoch: which one has ended.
        """
        within, previously_within = self.is_within(step_time), self._latest
        self._latest = within
        if within is None or within is not previously_within or within is self._settled:
            return ""
        untold = (within and self._settled is None) or self._told == MAX_WARNINGS
        self._settled = within
        if untold or step_time is None or self.prediction is None:
            return ""
        self._told += 1
        took = (
            f"epoch {epoch}: a step takes {1000 * step_time:.1f} ms, predicted {1000 * self.prediction.step_time:.1f}"
        )
        if within:
            return f"{took}: within the interval again"
        low, high = (1000 * (bound or 0.0) for bound in (self.prediction.step_low, self.prediction.step_high))
        why = "has the network or the load changed?" if 1000 * step_time > high else "faster than the probes were"
        return f"{took} (90 % between {low:.1f} and {high:.1f}): {why}"
