"""The stages of a training whose batch grows over its first epochs (`train.ramp`): from where on it has which batch.

The clock is samples passed: those of whole epochs, with what their ends leave out, and those done of the epoch under way. A
stage ends with the first step that comes to its end or beyond, so that batches stay slices of an epoch's order, one after the
other: at a change no sample is left out, and none is trained twice. The batch follows from the position alone, so that a
training resumes in any stage, and one that goes on at a smaller batch keeps the stages below that.

By default the batch of stage k is reference_batch x 2^k, up to the training's own: in the first epochs the gradient's noise
is small, and a larger batch averages little out (McCandlish et al. 2018). With `ramp: noise` the noise that was measured tells
how long each lasts (`by_noise`), with `ramp: decay` the schedule of the learning rate: it is spent as batch.
"""

import functools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from tula_cli.errors import SpecError
from tula_cli.models.ramp.by_noise import NoisePath, stages_by_noise
from tula_cli.run.records.recommendations import Stage
from tula_cli.spec.job import JobSpec, warmup_epochs
from tula_cli.spec.parts.of_train import MIN_STAGE_SHARE, RampStage
from tula_cli.spec.schedules import ROUNDING, decayed_share
from tula_cli.spec.sections import Schedule

SHARE = 0.05
"""Of the training, that each stage of `auto` lasts."""
MOST = 0.5
"""Of the training, that all stages of `auto` below its own batch last together."""


@dataclass(frozen=True)
class Ramp:
    """The stages of one training, ascending; the last one has its own batch and ends with it."""

    stages: tuple[Stage, ...]
    remarks: tuple[str, ...] = ()  # stages that no rule of the job's named and that are left out, and why

    @classmethod
    def constant(cls, batch: int) -> "Ramp":
        """Return that of a training whose batch stays."""
        return cls((Stage(begin=0, batch=batch),))

    def at(self, passed: int) -> int:
        """Return the number of the stage, from 0, that a training is in when so many samples are passed."""
        return max(0, sum(stage.begin <= passed for stage in self.stages) - 1)

    def batch_at(self, passed: int) -> int:
        """Return the batch, global, of the step that begins when so many samples are passed."""
        return self.stages[self.at(passed)].batch

    def shares(self, total: int) -> dict[int, float]:
        """Return the share of so many samples that pass at each batch."""
        ends = [min(stage.begin, total) for stage in (*self.stages[1:], Stage(begin=total, batch=0))]
        return {stage.batch: max(0, end - stage.begin) / total for stage, end in zip(self.stages, ends, strict=True)}

    def of_epoch(self, epoch: int, *, done: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield (batch, steps) of what is left of an epoch; less than a batch at its end is left out.

        Args:
            epoch: epochs completed.
            done: samples done of the next one.
            size: samples of an epoch.
        """
        while True:
            passed = epoch * size + done
            number = self.at(passed)
            batch, following = self.stages[number].batch, self.stages[number + 1 :]
            steps = max(0, size - done) // batch
            if following:
                steps = min(steps, ceil((following[0].begin - passed) / batch))
            if not steps:
                return
            yield batch, steps
            done += steps * batch

    def steps(self, *, size: int, epochs: int, epoch: int = 0, done: int = 0) -> dict[int, int]:
        """Return the steps of each batch, ascending, from a position to the last epoch's end.

        Args:
            size: samples of an epoch.
            epochs: of the whole training.
            epoch: epochs completed.
            done: samples done of the next one.
        """
        found = dict.fromkeys((stage.batch for stage in self.stages), 0)
        while epoch < epochs:
            for batch, steps in self.of_epoch(epoch, done=done, size=size):
                found[batch] += steps
            epoch, done = epoch + 1, 0
            number = self.at(epoch * size)
            ends = [stage.begin // size for stage in self.stages[number + 1 : number + 2]]
            alike = max(0, min([epochs, *ends]) - epoch)  # epochs without a change
            found[self.stages[number].batch] += alike * (size // self.stages[number].batch)
            epoch += alike
        return found


def ramp_of(
    spec: JobSpec,
    *,
    batch: int,
    parts: int,
    dataset_size: int,
    noise: NoisePath | None = None,
    decided: Sequence[Stage] = (),
    fewer: Sequence[int] = (),
) -> Ramp:
    """Return the stages of a training; one where its batch does not grow.

    Args:
        spec: the job.
        batch: the training's own, global; stages that are not below it are left out.
        parts: ranks x micro-batches a step: a batch is divided among them.
        dataset_size: training samples.
        noise: of the gradients, for `ramp: noise`; where nothing tells it, stages are those of `auto`.
        decided: the stages as they were before the training began, that of its own batch last; none: they follow anew.
        fewer: parts on fewer nodes, descending, for stages that leave a GPU of those without a sample.

    Raises:
        SpecError: a stage that the job names does not divide, or they last as long as the training.
    """
    asked = spec.train.stages
    if asked is None:
        return Ramp.constant(batch)
    if decided and not isinstance(asked, list):
        return _fitted([*below(decided, batch)], [parts], spec.train.ghost_batch)
    if asked == "noise" and noise is not None:
        planned = stages_by_noise(
            noise, batch=batch, factor=noise_factor(spec), size=dataset_size, epochs=spec.train.epochs
        )
        return _fitted(planned, [parts, *fewer], spec.train.ghost_batch)
    if asked == "decay":
        planned = stages_by_decay(spec, batch=batch, size=dataset_size)
        return _fitted(planned, [parts, *fewer], spec.train.ghost_batch)
    if not isinstance(asked, list):
        return _auto(spec, batch, [parts, *fewer], dataset_size)
    return _named(spec, asked, batch, parts, dataset_size)


def stages_by_decay(spec: JobSpec, *, batch: int, size: int) -> tuple[Stage, ...]:
    """Return the stages of a training whose decay is spent as batch, its own batch last; one it never comes to begins at its end.

    The batch is the reference batch x 2^k from where the schedule leaves 2^-k of the full learning rate (Meterez et al. 2025,
    arXiv 2510.14717, Algorithm 1). In between the rate follows the schedule, so that rate and batch are worth that of the
    reference batch at every point (`job._noise_rule`).

    Args:
        spec: the job, with `ramp: decay`.
        batch: the training's own, global.
        size: samples of an epoch.
    """
    reference, total = spec.train.reference_batch, spec.train.epochs * size
    doubled = [reference << k for k in range(1, batch.bit_length()) if reference << k < batch]
    begins = {0: min(reference, batch)}  # of stages that begin at once the last one stays
    schedule, warmup = spec.schedule.model_dump_json(), warmup_epochs(spec)
    for following in [*doubled, *([batch] if batch > reference else [])]:
        share = reference / following
        begin = _decayed_at(share, schedule, spec.optimizer.lr, warmup=warmup, epochs=spec.train.epochs, size=size)
        begins[begin if begin <= (1 - MIN_STAGE_SHARE) * total else total] = following
    return tuple(Stage(begin=begin, batch=each) for begin, each in begins.items())


@functools.lru_cache(maxsize=1024)  # the same for all nodes of a search
def _decayed_at(share: float, schedule: str, lr: float, *, warmup: float, epochs: int, size: int) -> int:
    """Return the samples passed from which on a schedule leaves at most a share of the full learning rate.

    Args:
        share: of `lr`, above 0.
        schedule: as JSON.
        lr: at the reference batch.
        warmup: epochs.
        epochs: of the whole training.
        size: samples of an epoch.
    """
    rule = Schedule.model_validate_json(schedule)

    def has_decayed(passed: int) -> bool:
        left = decayed_share(rule, lr, epoch=passed / size, warmup=warmup, epochs=epochs)
        return left <= share * (1 + ROUNDING)

    return bisect_left(range(epochs * size), True, key=has_decayed)


def noise_factor(spec: JobSpec) -> float:
    """Return how many times the gradient noise scale a batch may be (`train.ramp_noise`)."""
    return 1.0 if spec.train.ramp_noise is None else spec.train.ramp_noise


def below(stages: Sequence[Stage], batch: int) -> Iterator[Stage]:
    """Yield the stages below a batch, and it where the first of those begins that are not below, or else the last one does."""
    yield from (stage for stage in stages if stage.batch < batch)
    own = next((stage for stage in stages if stage.batch >= batch), stages[-1])
    yield own.model_copy(update={"batch": batch})


def _fitted(stages: Sequence[Stage], parts: Sequence[int], ghost: int | None) -> Ramp:
    """Return stages as they divide among the parts on the most nodes on which none is without a sample; else they are left out."""
    *smaller, own = stages
    sizes = [_fitting(stage.batch, parts, ghost) for stage in smaller]
    found = [stage.model_copy(update={"batch": size}) for stage, size in zip(smaller, sizes, strict=True) if size]
    first, *others = (*found, own)
    remarks = tuple(
        f"train.ramp leaves batch {stage.batch} out: it has less than one sample for each of {parts[-1]} (GPUs x micro-batches)"
        for stage, size in zip(smaller, sizes, strict=True)
        if not size
    )
    return Ramp((first.model_copy(update={"begin": 0}), *others), remarks)


def _named(spec: JobSpec, asked: Sequence[RampStage], batch: int, parts: int, dataset_size: int) -> Ramp:
    begin, found = 0, []
    for stage in asked:
        if stage.batch >= batch:  # after an out-of-memory the training's own may be smaller than it was
            break
        own = stage.nodes * spec.cluster.gpus_per_node * spec.train.accumulate if stage.nodes else parts
        if stage.batch % own:
            raise SpecError(
                f"train.ramp: batch {stage.batch} does not divide by {own} (GPUs x micro-batches of a step)",
                f"the nearest are {stage.batch // own * own or own} and {(stage.batch // own + 1) * own}",
            )
        found.append(Stage(begin=begin, batch=stage.batch))
        length = stage.samples or round((stage.epochs or 0.0) * dataset_size)
        if not length:
            raise SpecError(
                f"train.ramp: {stage.epochs:g} epochs at batch {stage.batch} are less than one of the dataset's {dataset_size} samples",
                "leave the stage out, or give it more epochs",
            )
        begin += length
    if begin >= spec.train.epochs * dataset_size:
        raise SpecError(
            f"train.ramp lasts {begin / dataset_size:g} epochs, which leaves nothing of train.epochs {spec.train.epochs} to"
            f" train at batch {batch}"
        )
    return Ramp((*found, Stage(begin=begin, batch=batch)))


def _auto(spec: JobSpec, batch: int, parts: Sequence[int], dataset_size: int) -> Ramp:
    reference = spec.train.reference_batch
    doubled = [reference << k for k in range(batch.bit_length()) if reference << k < batch]
    fitting = {asked: _fitting(asked, parts, spec.train.ghost_batch) for asked in doubled}
    kept = [found for found in fitting.values() if found]
    length = min(SHARE, MOST / max(1, len(kept))) * spec.train.epochs * dataset_size
    remarks = [
        f"train.ramp: auto leaves batch {asked} out: it has less than one sample for each of {parts[-1]} (GPUs x micro-batches)"
        for asked, found in fitting.items()
        if not found
    ]
    if not doubled:
        remarks.append(f"train.ramp: auto does nothing: batch {batch} is not above train.reference_batch {reference}")
    stages = [Stage(begin=round(number * length), batch=found) for number, found in enumerate([*kept, batch])]
    return Ramp(tuple(stages), tuple(remarks))


def _fitting(batch: int, parts: Sequence[int], ghost: int | None) -> int:
    """Return the largest batch up to this one that divides among the first of the parts that each have a sample, else 0."""
    return next((found for own in parts if (found := _dividing(batch, own, ghost))), 0)


def _dividing(batch: int, parts: int, ghost: int | None) -> int:
    """Return the largest batch up to this one that divides among the parts, and a part into ghost batches."""
    micro_batch = batch // parts
    if ghost is not None and micro_batch > ghost:
        micro_batch -= micro_batch % ghost
    return micro_batch * parts


def stage_batches(spec: JobSpec, *, batch: int, parts: int, dataset_size: int) -> list[int]:
    """Return the batches below a training's own that it may come to on so many parts, as far as the job alone tells.

    Stages that name their nodes are on those, whatever the parts here.

    Args: as of `ramp_of`.
    """
    asked = spec.train.stages
    if isinstance(asked, list):
        return [one.batch for one in asked if one.batch < batch and not one.nodes and one.batch % parts == 0]
    if asked is None:
        return []
    return [stage.batch for stage in _auto(spec, batch, [parts], dataset_size).stages[:-1]]
