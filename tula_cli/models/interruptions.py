"""Cost of an interruption of a script: the work since the newest checkpoint that the script wrote."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tula_cli.models.cost import TrainingTime, compute_script_seconds
from tula_cli.run.records.results import Save
from tula_cli.spec.scripts.script import Script
from tula_cli.words import format_count, format_duration


@dataclass(frozen=True)
class CheckpointSchedule:
    """Interval of the checkpoints that a script can resume from, in epochs, steps or seconds; all None if unknown."""

    resumes: bool  # from a checkpoint at all
    save_request: str = "none"  # script.save
    epochs: int | None = None
    steps: int | None = None
    seconds: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether the cost of an interruption is known."""
        return not self.resumes or any(value is not None for value in (self.epochs, self.steps, self.seconds))

    def compute_hours_on_spot(self, training: TrainingTime, step_time: Any) -> Any:
        """Return the expected hours on spot nodes of a training by a script that alone decides when it saves.

        Args:
            training: its work, overheads and interruption rate.
            step_time: seconds; a number, or an array of them.
        """
        work, interval = training.work, self.compute_interval(step_time, epoch_steps=training.work.steps)
        if interval is None:
            return math.inf
        stepping, overheads = work.epochs * work.steps * step_time, training.overheads
        return compute_script_seconds(stepping, overheads=overheads, interval=interval, rate=training.rate) / 3600

    def compute_interval(self, step_time: Any, *, epoch_steps: Any) -> Any | None:
        """Return the seconds between two checkpoints; infinite if the script cannot resume, None if unknown.

        Args:
            step_time: seconds; a number, or an array with one for each of many configurations.
            epoch_steps: steps per epoch at the batch that is trained; likewise.
        """
        if not self.resumes:
            return math.inf
        if self.epochs is not None:
            return self.epochs * epoch_steps * step_time
        return self.seconds if self.steps is None else self.steps * step_time

    def describe_loss(self, step_time: float | None, *, epoch_steps: float | None) -> str:
        """Describe the cost of an interruption.

        Args:
            step_time: seconds; None before it is measured.
            epoch_steps: steps per epoch at the batch that is trained; None likewise.
        """
        if not self.resumes:
            return "the script cannot resume (no script.resume): an interruption loses all progress"
        if not self.is_known:
            return f"the checkpoint interval is unknown until the script trains{self._setting_text}"
        interval_text = self._interval_text
        timed = (
            None
            if step_time is None or epoch_steps is None
            else self.compute_interval(step_time, epoch_steps=epoch_steps)
        )
        seconds = self.seconds if timed is None else timed
        if seconds is None:
            return f"saves {interval_text}: an interruption costs half of this interval on average{self._setting_text}"
        lasts = f", {format_duration(seconds)}" if self.steps or self.epochs else ""
        return f"saves {interval_text}{lasts}: an interruption costs {format_duration(seconds / 2)} on average{self._setting_text}"

    @property
    def _interval_text(self) -> str:
        if self.epochs is not None:
            return "each epoch" if self.epochs == 1 else f"every {format_count(self.epochs, 'epoch')}"
        if self.steps is not None:
            return "each step" if self.steps == 1 else f"every {format_count(self.steps, 'step')}"
        return f"every {format_duration(self.seconds)}"

    @property
    def _setting_text(self) -> str:
        if self.save_request == "none":
            return "; tula cannot request a checkpoint before a time limit (script.save: none)"
        return f"; before a time limit, tula requests a checkpoint ({self.save_request})"


def find_checkpoint_schedule(script: Script, saves: Iterable[Save], *, dataset_size: int | None) -> CheckpointSchedule:
    """Return how often a script saves, as observed in its trainings.

    Args:
        script: section of the job.
        saves: checkpoints that its trainings have written.
        dataset_size: samples of an epoch; None if unknown.
    """
    resume, observed_saves = script.resume, list(saves)
    if resume is None and not observed_saves:  # there are some of a script that was seen to resume by itself
        return CheckpointSchedule(resumes=False, save_request=script.save)
    if not observed_saves:
        return CheckpointSchedule(True, script.save)
    if epochs := _find_whole_epochs(observed_saves, dataset_size):
        return CheckpointSchedule(True, script.save, epochs=epochs)
    steps = [save.steps for save in observed_saves]
    usual, times = statistics.mode(steps), [save.seconds for save in observed_saves if save.seconds is not None]
    if times and 2 * steps.count(usual) < len(steps):
        return CheckpointSchedule(True, script.save, seconds=statistics.median(times))
    return CheckpointSchedule(True, script.save, steps=usual)


def _find_whole_epochs(saves: list[Save], dataset_size: int | None) -> int | None:
    """Return the most frequent number of epochs between saves; None if most saves do not fit it.

    A save fits if it is within one batch per epoch of a whole number of epochs.
    """
    if not dataset_size:
        return None
    epoch_counts = [round(save.samples / dataset_size) for save in saves]
    epochs = statistics.mode(epoch_counts)
    near = [abs(save.samples - epochs * dataset_size) <= epochs * save.batch for save in saves]
    return epochs if epochs and 2 * sum(near) >= len(saves) else None
