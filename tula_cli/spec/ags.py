"""The sections `ags` and `auto`: adaptive gradient scaling and self-tuning."""

import math
from functools import cache
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from tula_cli.presets import AGS_PRESETS
from tula_cli.spec.kinds import NonNegativeFloat, Positive, PositiveFloat, Section
from tula_cli.spec.methods import SHARDABLE_METHODS, ArmMethod

if TYPE_CHECKING:
    from tula_cli.spec.sections import Train


class Every(Section):
    """Recompute the scaling factors after a fixed number of optimizer steps."""

    every: Positive  # Number of optimizer steps


def _convert_infinity(value: object) -> object:
    """Convert infinity (YAML's .inf) to "inf", which JSON can represent."""
    return "inf" if isinstance(value, float) and value == math.inf else value


_WRITTEN_THRESHOLD = {"anyOf": [{"type": "number", "minimum": 0}, {"const": "inf"}]}
Threshold = Annotated[
    NonNegativeFloat | Literal["inf"], BeforeValidator(_convert_infinity), WithJsonSchema(_WRITTEN_THRESHOLD)
]


class Ags(Section):
    """Adaptive gradient scaling (Algorithm 1 of the paper). The preset sets the keys that are missing or null."""

    # Preset for the keys that are not set: paper (Algorithm 1) or robust (the default for scripts)
    preset: Literal["paper", "robust"] = "paper"
    # element: one factor per element; tensor: one per parameter tensor; null: from the preset
    granularity: Literal["element", "tensor"] | None = None
    # Scale the gradient only in steps in which its squared norm differs by less than this share from that of the step
    # before; inf: in every step; null: from the preset
    delta: Threshold | None = None
    # Size of the small batch in samples; auto: train.reference_batch, but at most a quarter of the batch
    b_small: Literal["auto"] | Positive = "auto"
    # When factors are recomputed. epoch: once per epoch; {every: N}: every N steps; null: from the preset
    refresh: Literal["epoch"] | Every | None = None
    # Gradient from which factors are computed. small_batch: the gradient of an additional pass over part of the batch;
    # local_norms: the norms of each GPU's own gradient (only with granularity: tensor); null: from the preset
    source: Literal["small_batch", "local_norms"] | None = None
    # What the factors scale: the gradient, or the update of the optimizer. null: the update if the optimizer normalises
    # the gradient (Adam, Muon ...), otherwise as in the preset.
    apply_to: Literal["gradient", "update"] | None = None
    # Parameters whose gradients are scaled. all: every parameter, as in the paper; auto: all except embeddings, of
    # which a small batch contains few rows; or patterns as in model.frozen, for example ["*", "!embeddings", "!norms"]
    parameters: Literal["auto", "all"] | Annotated[tuple[str, ...], Field(min_length=1)] = "auto"
    factor: Literal["auto"] | PositiveFloat = "auto"  # Only for method static: the factor; auto: sqrt(batch / b_small)

    def fill_from_preset(self) -> "ResolvedAgs":
        """Return the section with every field filled, from the preset if not given."""
        return _resolve_preset(self)

    @model_validator(mode="after")
    def _check_settings(self) -> "Ags":
        preset = AGS_PRESETS[self.preset]
        source, granularity = self.source or preset["source"], self.granularity or preset["granularity"]
        if source != "local_norms":
            return self
        if granularity == "element":
            raise ValueError(
                "source: local_norms provides one norm per tensor, but ags.granularity is element; set ags.granularity: tensor or ags.source: small_batch"
            )
        if self.b_small != "auto":
            raise ValueError(
                "b_small: has no effect with ags.source: local_norms, which uses each GPU's own batch as the small batch; remove the key, or set ags.source: small_batch"
            )
        return self


@cache  # because forecasts call it for every configuration
def _resolve_preset(ags: Ags) -> "ResolvedAgs":
    return ResolvedAgs.model_validate({**AGS_PRESETS[ags.preset], **ags.model_dump(exclude_none=True)})


class ResolvedAgs(Ags):
    """The section `ags` with missing keys filled from the preset."""

    granularity: Literal["element", "tensor"]
    delta: Threshold
    refresh: Literal["epoch"] | Every
    s_min: float  # smallest factor
    eps: float  # added to the denominator of a factor
    source: Literal["small_batch", "local_norms"]
    scale_ema: float  # weight of the past in the moving average of the factors over refreshes; 0: no averaging
    apply_to: Literal["gradient", "update"]

    @property
    def refreshes_each_step(self) -> bool:
        """Whether every step refreshes the factors, so that the step time includes the refresh."""
        return isinstance(self.refresh, Every) and self.refresh.every == 1


BRANCHING_EPOCH = 1
"""Epochs at train.reference_batch before the arms of a self-tuning training branch off."""


class GivenArm(Section):
    """An arm: settings that a training with method auto tries in a branch. An arm with method ags uses the section `ags`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$")]  # Name of the arm, shown by tula status
    method: ArmMethod = "lbt"  # Method that trains the arm
    lr_factor: PositiveFloat = 1.0  # Factor of the learning rate, in the whole training


class Arm(GivenArm):
    """An arm as it is trained and recorded: one of the job, or a default one, which may have further settings."""

    model_config = ConfigDict(extra="ignore")  # records of older versions have removed settings

    warmup_epochs: NonNegativeFloat = 0.0  # epochs over which the factor of the learning rate grows from 1
    decay_factor: NonNegativeFloat = 1.0  # factor of the weight decay


class Auto(Section):
    """Settings of method auto, which tries several arms in short branches and compares them on held-out training samples."""

    # Epochs of a branch. auto: chosen so that the branches, and the epoch before them, together train on a quarter as many
    # samples as the training.
    branch_epochs: Literal["auto"] | PositiveFloat = "auto"
    # Settings to compare with lbt, which is always tried. empty: ramp, ramp with half the learning rate, and ramp with
    # 4 times the weight decay
    arms: list[GivenArm] = []

    @model_validator(mode="after")
    def _check_arm_names(self) -> "Auto":
        names = [arm.name for arm in self.arms]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"arms: each arm must have a different name, but several are called {', '.join(twice)}")
        if any(arm.name == "lbt" and arm != GivenArm(name="lbt") for arm in self.arms):
            raise ValueError(
                "arms: lbt is the name of the built-in arm (the large batch without other changes); choose another name"
            )
        return self


def adapt_to_sharded_model(ags: Ags, train: "Train") -> Ags:
    """Return the section `ags` adapted to a sharded model: one factor per tensor unless `granularity` is given.

    Raises:
        ValueError: the job has a setting that needs the whole model.
    """
    if not train.is_sharded:
        return ags
    if why := _explain_sharding_conflict(train):
        raise ValueError(f"train.parallel: fsdp divides the model among the GPUs, but {why}")
    if not train.training_method.scales_gradients:
        return ags
    if ags.granularity == "element":
        raise ValueError("train.parallel: fsdp supports only one AGS factor per tensor; set ags.granularity: tensor")
    if ags.fill_from_preset().source == "local_norms":
        raise ValueError(
            "train.parallel: fsdp does not provide the gradient of each GPU, which ags.source: local_norms needs; set ags.source: small_batch or ags.preset: paper"
        )
    return ags.model_copy(update={"granularity": "tensor"})


def _explain_sharding_conflict(train: "Train") -> str:
    """Return which setting needs the whole model on each GPU; empty if none does."""
    if train.method not in SHARDABLE_METHODS:
        return f"train.method {train.method} needs complete gradients or weights on each GPU; set train.method to one of {', '.join(SHARDABLE_METHODS)}"
    if train.precision == "fp16":
        return "with train.precision: fp16, each GPU would choose its loss scale by its own part of the gradient; set train.precision: bf16"
    if train.compile:
        return "train.compile needs the complete model on each GPU; remove train.compile"
    if "hessian" in train.diagnostics:
        return "train.diagnostics: [hessian] needs the complete weights on each GPU; remove hessian"
    return ""
