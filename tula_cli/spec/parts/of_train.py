"""The sections that stand in section train: its stages, what it measures beside it, and how it is judged."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from tula_cli.spec.kinds import Positive, PositiveFloat, Section

MIN_STAGE_SHARE = 0.02
"""Of the training, that a stage lasts at least which follows from the noise or the schedule."""


class RampStage(Section):
    """A smaller batch for a while, at the beginning of a training."""

    epochs: PositiveFloat | None = None  # how long it lasts: so many, or
    samples: Positive | None = None  # so many samples
    batch: Positive  # global
    nodes: Positive | None = None  # that it runs on, fewer than the training; null: as train.ramp_nodes says

    @model_validator(mode="after")
    def _lasts_for_something(self) -> "RampStage":
        if (self.epochs is None) == (self.samples is None):
            raise ValueError("needs epochs or samples, one of them, for example {epochs: 1, batch: 128}")
        return self


Stages = Literal["auto", "noise", "decay"] | Annotated[list[RampStage], Field(min_length=1)]


HESSIAN_SAMPLES = 128
"""Samples of the training set, over all GPUs, on which the Hessian's eigenvalue is measured: always the same ones."""
NOISE_BATCHES = 32
"""Micro-batches of each GPU, forward and backward, by which the gradient noise is measured: the next ones of the training."""


def _without_settings(value: object) -> object:
    """Read an empty mapping as true: what is left of the settings that older versions had here, if they were the default ones."""
    if isinstance(value, Mapping):
        if value:
            raise ValueError(f"is true or false; {', '.join(map(str, value))} cannot be set any more")
        return True
    return value


Measured = Annotated[bool, BeforeValidator(_without_settings)]
"""Whether something is measured at the end of each epoch."""


class BestCheckpoint(Section):
    """The metric by which the best checkpoint is chosen."""

    metric: str = "auto"  # top1, top5, loss, perplexity or one of train.metrics; auto: top1, loss without classes
    mode: Literal["auto", "max", "min"] = "auto"  # auto: min of loss and perplexity, max of all others

    @property
    def falls(self) -> bool:
        """Whether less is better."""
        return self.mode == "min" or (self.mode == "auto" and self.metric in ("loss", "perplexity"))


class EarlyStopping(Section):
    """Conditions that end a training before its last epoch, checked after the evaluation of each epoch."""

    metric: str = "auto"  # auto: that of train.best_checkpoint
    at_least: float | None = None  # of top1 and top5 in percent, or up to 1 as a share: 0.76 is 76 %
    at_most: float | None = None  # for example of loss
    patience: Positive | None = None  # epochs in a row without a better value of train.best_checkpoint.metric
    epochs: Positive | None = None  # that are done; schedules stay those of train.epochs

    @property
    def by_metric(self) -> bool:
        """Whether evaluations tell when it ends."""
        return any(value is not None for value in (self.at_least, self.at_most, self.patience))

    @model_validator(mode="after")
    def _something_ends_it(self) -> "EarlyStopping":
        if not self.by_metric and self.epochs is None:
            raise ValueError("needs at_least, at_most, patience or epochs, for example {metric: top1, at_least: 0.76}")
        return self
