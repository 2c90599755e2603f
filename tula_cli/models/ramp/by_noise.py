"""Stages from the gradient noise scale (`train.ramp: noise`): B(t) = min(B, B_noise(t)).

B(t) grows in doublings of the reference batch.

A batch up to the noise scale loses little of the information in its samples (McCandlish et al. 2018); the scale grows
during training. The stages are fixed before the training starts, from the measurements until then.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from tula_cli.diagnostics import Diagnostic
from tula_cli.models import messages
from tula_cli.run.records.recommendations import Stage
from tula_cli.spec.sections import MIN_STAGE_SHARE
from tula_cli.words import format_number

GROWTH = 0.65
"""Exponent of the noise scale over the epochs, fitted to six applications (benchmarks/replay/efficiency.py fits it with
each of them left out: 0.60 to 0.70)."""

MAX_NOISE = 1e12
"""Noise scale, in samples, that is assumed if the gradient cannot be distinguished from its noise."""
NOISE_NOT_MEASURED = "train.ramp: noise needs the gradient noise scale, which was not measured"
HOW_TO_MEASURE = "train once with train.diagnostics: [gradient_noise] to measure the scale, or set train.ramp: auto"


@dataclass(frozen=True)
class NoisePath:
    """The gradient noise scale as a function of the epochs done.

    log(reference + noise) is linear in log(1 + epochs) between measurements, and after the last one continues with the
    exponent of whole trainings (`GROWTH`). A measurement followed by a lower one is reduced to that value: a batch
    starts where the noise remains high enough.
    """

    reference: int  # batch
    points: tuple[tuple[float, float], ...]  # (epochs done, samples), ascending, one at least

    @classmethod
    def from_measurements(cls, measured: Mapping[float, float], *, reference: int) -> "NoisePath | None":
        """Return the path through noise scales (samples) by epochs done, or None if there are none."""
        backwards = sorted(((epoch, min(scale, MAX_NOISE)) for epoch, scale in measured.items()), reverse=True)
        scales = accumulate((scale for _, scale in backwards), min)
        points = tuple(zip((epoch for epoch, _ in backwards), scales, strict=True))
        return cls(reference, points[::-1]) if points else None

    @property
    def measured_at(self) -> float:
        """Epochs done at the newest measurement."""
        return self.points[-1][0]

    def interpolate_noise(self, epoch: float) -> float:
        """Return the noise scale (samples) after `epoch` epochs."""
        x, line = math.log1p(epoch), self._line
        for (x0, y0), (x1, y1) in pairwise(line):
            if x <= x1:
                return self._scale(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
        return self._scale(line[-1][1] + GROWTH * (x - line[-1][0]))

    def find_first_epoch(self, scale: float) -> float:
        """Return the epochs done from which on the noise scale is at least `scale` (samples)."""
        y, line = math.log(self.reference + scale), self._line
        if y <= line[0][1]:
            return 0.0
        for (x0, y0), (x1, y1) in pairwise(line):
            if y <= y1:
                return math.expm1(x0 + (x1 - x0) * (y - y0) / (y1 - y0))
        return math.expm1(line[-1][0] + (y - line[-1][1]) / GROWTH)

    @property
    def _line(self) -> list[tuple[float, float]]:
        line = [(math.log1p(epoch), math.log(self.reference + scale)) for epoch, scale in self.points]
        x, y = line[0]
        return line if x == 0 else [(0.0, y - GROWTH * x), *line]

    def _scale(self, y: float) -> float:
        return max(0.0, math.exp(y) - self.reference)


def plan_stages_by_noise(path: NoisePath, *, batch: int, size: int, epochs: int) -> tuple[Stage, ...]:
    """Return the stages of a training, its own batch last; if the noise never reaches it, it starts at the end.

    Args:
        path: the noise scale.
        batch: the training's own, global.
        size: samples per epoch.
        epochs: of the whole training.
    """
    total = size * epochs
    doubled = [path.reference << k for k in range(batch.bit_length()) if path.reference << k < batch]
    batches = [*doubled, batch]
    start = max(0, sum(stage_batch <= path.interpolate_noise(0.0) for stage_batch in batches) - 1)
    stages = [Stage(begin=0, batch=batches[start], noise=path.interpolate_noise(0.0))]
    for following in batches[start + 1 :]:
        begin = math.ceil(max(stages[-1].begin + MIN_STAGE_SHARE * total, path.find_first_epoch(following) * size))
        if begin > (1 - MIN_STAGE_SHARE) * total:
            return (*stages, Stage(begin=total, batch=batch))
        stages.append(Stage(begin=begin, batch=following, noise=path.interpolate_noise(begin / size)))
    return tuple(stages)


def warn_missing_noise(noise: NoisePath | None) -> list[Diagnostic]:
    """Return warnings about missing or limited noise measurements for a job with `ramp: noise`."""
    if noise is None:
        return [messages.noise_not_measured()]
    return [] if noise.measured_at else [messages.noise_only_at_start()]


# --- in words


def add_stage_epochs(stages: Iterable[Stage], size: int) -> tuple[Stage, ...]:
    """Return stages for storage, with the epoch (of `size` samples) in which each starts."""
    return tuple(stage.model_copy(update={"epoch": stage.begin / size}) for stage in stages)


def describe_stages(stages: Sequence[Stage]) -> str:
    """Describe where a training reaches each batch, and at which noise scale; expects stages with epochs."""
    by_noise = any(stage.noise is not None for stage in stages)
    return "; ".join(_describe_stage(stage, by_noise=by_noise) for stage in stages)


def _describe_stage(stage: Stage, *, by_noise: bool) -> str:
    if stage.noise is None:
        never = f"batch {stage.batch}: never, because the noise scale remains below it"
        return never if by_noise else f"batch {stage.batch} from epoch {format_number(stage.epoch)}"
    return f"batch {stage.batch} from epoch {format_number(stage.epoch)}: noise scale {format_number(stage.noise)}"
