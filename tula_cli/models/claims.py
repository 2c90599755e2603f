"""Comparison of what a script did with its arguments and with the user's settings."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression, median

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import BadMeasurements
from tula_cli.models import messages
from tula_cli.run.records.probes import Measured, ScriptObservation
from tula_cli.run.records.scripts import LearningRates, RankResult, ScriptStep
from tula_cli.spec.sections import MIN_TIMED_STEPS

_MAX_SHARE_OF_DISTURBED = 0.5  # activities in more than this share of the steps are part of a normal step
_MAX_EXPONENT_DIFFERENCE = 0.1  # difference of exponents of the batch that is ignored
STREAM_SAMPLER_NAME = "_InfiniteConstantSampler"  # sampler that torch uses for an IterableDataset
_MAX_BATCH_DIFFERENCE = 0.1  # relative change of the samples per step that is ignored
_NEWEST_STEPS = 3  # minimum number of newest steps that are checked for a change
_MAX_EPOCH_DIFFERENCE = 0.05  # tolerated relative error of a dataset_size given by the user


@dataclass(frozen=True)
class JointStep:
    """One step of all ranks: seconds of the slowest and the sum of samples; None if a rank did not record a value."""

    seconds: float
    wait: float | None
    samples: float | None
    causes: tuple[str, ...]  # why the step is not representative, from any rank; empty if it is


def join_steps(ranks: Sequence[RankResult]) -> tuple[JointStep, ...]:
    """Combine the timed steps of all ranks.

    A step is disturbed if any rank evaluated, saved or started an epoch in it, because the others waited. A cause that
    occurs in more than half of the steps (for example a frozen module that is switched to evaluation mode each time) is
    not a disturbance.
    """
    steps = [_join_step(row) for row in zip(*(rank.timed for rank in ranks), strict=False)]
    counts = Counter(cause for step in steps for cause in step.causes)
    frequent = {cause for cause, count in counts.items() if count > _MAX_SHARE_OF_DISTURBED * len(steps)}
    return tuple(replace(step, causes=tuple(cause for cause in step.causes if cause not in frequent)) for step in steps)


def _join_step(row: Sequence[ScriptStep]) -> JointStep:
    return JointStep(
        seconds=max(step.seconds for step in row),
        wait=max(waits) if (waits := _list_known_values(step.wait for step in row)) else None,
        samples=sum(samples) if (samples := _list_known_values(step.samples for step in row)) else None,
        causes=tuple(dict.fromkeys(cause for step in row for cause in step.gap)),
    )


def _list_known_values(values: Iterable[float | None]) -> list[float]:
    """Return the values, or an empty list if one of them is None."""
    known_values = list(values)
    return [] if None in known_values else [value for value in known_values if value is not None]


def select_undisturbed_steps(ranks: Sequence[RankResult]) -> tuple[JointStep, ...]:
    """Return the timed steps without a disturbance on any rank (see `join_steps`).

    Raises:
        BadMeasurements: there is no such step.
    """
    steps = join_steps(ranks)
    clean = tuple(step for step in steps if not step.causes)
    if not clean:
        raise BadMeasurements(
            f"all {len(steps)} timed steps contain an evaluation, a checkpoint or the start of an epoch",
            "raise search.min_steps, or set script.probe_args so that the script evaluates less often in probes",
        )
    return clean


def list_mismatches(ranks: Sequence[RankResult]) -> list[Diagnostic]:
    """Return the expectations that the ranks of one start do not meet; values that were not observed are not checked."""
    if (world := _find_world_mismatch(ranks)) is not None:
        return [world]  # with missing ranks, the other checks are not possible
    candidates = [_find_batch_mismatch(ranks), _find_accumulation_mismatch(ranks), _find_epoch_mismatch(ranks)]
    return [mismatch for mismatch in candidates if mismatch is not None]


def describe_unmet_expectations(ranks: Sequence[RankResult], *, resumed: bool) -> str:
    """Describe the expectations that a training does not meet; empty if none, or not all ranks have reported yet.

    Args:
        ranks: results of the ranks' first steps. With fewer than `MIN_TIMED_STEPS` steps only the number of ranks is
            checked, because the last batches of an epoch are smaller.
        resumed: whether the training resumed from a checkpoint, so that its loader may hold only the rest of an epoch.
    """
    if not ranks or len(ranks) < ranks[0].world:
        return ""
    has_few_steps = min(len(rank.timed) for rank in ranks) < MIN_TIMED_STEPS
    mismatched = list_mismatches([rank.model_copy(update={"timed": ()}) for rank in ranks] if has_few_steps else ranks)
    return " ".join(mismatch.text for mismatch in mismatched if not (resumed and mismatch.code == "epoch-steps-differ"))


def _find_world_mismatch(ranks: Sequence[RankResult]) -> Diagnostic | None:
    expected, observed = ranks[0].expected.world, ranks[0].world
    if expected is None or expected == observed:
        return None
    return messages.rank_count_differs(expected=expected, observed=observed)


def _find_batch_mismatch(ranks: Sequence[RankResult]) -> Diagnostic | None:
    expected = ranks[0].expected.batch
    known_samples = _list_known_values(step.samples for step in join_steps(ranks) if not step.causes)
    if expected is None or not known_samples:
        return None
    seen, newest = median(known_samples), known_samples[-max(_NEWEST_STEPS, len(known_samples) // 3) :]
    grown = seen == expected and expected not in newest  # a smaller last batch is no change
    if grown:
        seen = median(newest)
    if seen == expected:
        return None
    return messages.batch_differs(expected=expected, observed=seen, at_end=grown)


def _find_accumulation_mismatch(ranks: Sequence[RankResult]) -> Diagnostic | None:
    """Compare the micro-batches per step with the expected number.

    Batches of the loader or backward passes may match, since a script may split a batch itself or do two passes.
    """
    expected = ranks[0].expected.accumulate
    steps = [step for rank in ranks for step in rank.timed]
    if expected is None or not steps:
        return None
    batches = [step.batches for step in steps if step.batches is not None]
    seen = median(batches or [step.backwards for step in steps])
    if expected in (seen, median(step.backwards for step in steps)) or not seen:
        return None  # neither is visible for engines without torch's loaders and backward passes
    return messages.micro_batches_differ(expected=expected, observed=seen)


def _find_epoch_mismatch(ranks: Sequence[RankResult]) -> Diagnostic | None:
    """Compare the steps of an epoch with the dataset size: rounded down or up, as the last batch may be dropped."""
    loader, batch = ranks[0].loader, ranks[0].expected.batch
    micro = median([step.batches or 0 for step in ranks[0].timed] or [0])
    size = find_dataset_size(ranks)
    if batch is None or size is None or loader is None or loader.batches is None or not micro:
        return None
    low, high, seen = size // batch, math.ceil(size / batch), loader.batches / micro
    if low <= seen <= high or math.ceil(seen) == high:
        return None
    given = ranks[0].expected.dataset
    if given is not None and loader.sampler == STREAM_SAMPLER_NAME:
        return None  # its length is defined by the dataset, and may be that of one rank or of all
    is_close = abs(seen - size / batch) <= 1 + _MAX_EPOCH_DIFFERENCE * size / batch
    if is_close and (given is not None or _have_separate_shards(ranks)):
        return None  # the given size may be rounded, and shards may differ in length
    return messages.epoch_steps_differ(
        expected=high, observed=math.ceil(seen), dataset_size=size, batch=batch, is_given=given is not None
    )


def find_dataset_size(ranks: Sequence[RankResult]) -> int | None:
    """Return the samples of an epoch over all ranks.

    The value given in the job, else the sum of the shards, else the size of the dataset; None if unknown.
    """
    given, sizes = ranks[0].expected.dataset, [rank.loader.dataset if rank.loader else None for rank in ranks]
    if given is not None:
        return given
    if _have_separate_shards(ranks) and None not in sizes:
        return sum(size for size in sizes if size is not None)
    return sizes[0]


def _have_separate_shards(ranks: Sequence[RankResult]) -> bool:
    """Return whether each rank has its own shard of the dataset: the contents of any two ranks differ."""
    contents = [rank.loader.content if rank.loader is not None else "" for rank in ranks]
    return len(contents) > 1 and "" not in contents and len(set(contents)) == len(contents) == ranks[0].world


def count_epoch_samples(ranks: Sequence[RankResult]) -> int | None:
    """Return the samples that an epoch trains on over all ranks, without dropped ones; None if unknown for a rank."""
    counts = [rank.loader.epoch_samples if rank.loader is not None else None for rank in ranks]
    if not counts or None in counts or len(counts) < ranks[0].world:
        return None
    return sum(count for count in counts if count is not None)


def detect_batch_change(seen: float | None, *, before: float) -> float | None:
    """Return the samples of a step over all ranks if they differ from `before` by more than 10 %, else None."""
    return None if seen is None or seen <= 0 or abs(seen / before - 1) <= _MAX_BATCH_DIFFERENCE else seen


def list_probe_differences(probes: Sequence[RankResult | ScriptObservation]) -> list[Diagnostic]:
    """Return properties that must be equal in all probes of a script but differ; `probes` holds rank 0 of each."""
    differences = []
    for aspect, values in (
        ("parameters", [probe.parameters for probe in probes]),
        ("optimizer", [probe.optimizer for probe in probes]),
    ):
        first = values[0]
        other = next((value for value in values if value != first), first)
        if other != first:
            differences.append(messages.probes_differ(aspect=aspect, first=str(first), other=str(other)))
    return differences


@dataclass(frozen=True)
class ObservedRate:
    """The learning rate of one probe."""

    batch: int
    given: float | None  # learning rate on the command line; None if the script chooses it
    seen: float

    @classmethod
    def from_rates(cls, batch: int, rates: LearningRates | None, given: float | None) -> "ObservedRate | None":
        """Return the learning rate of a probe, or None if its optimizer has none.

        The base rate of a scheduler is used if there is one: a warm-up counted in epochs is further advanced after the
        same number of steps at a larger batch, which would look as if the learning rate followed the batch.
        """
        if rates is None:
            return None
        return cls(batch, given, rates.first if rates.base is None else rates.base)


def fit_lr_exponent(rates: Iterable[ObservedRate]) -> float | None:
    """Return the power of the batch by which a script itself scales its learning rate, beyond the given rate.

    The least-squares slope of log(seen / given) over log(batch); None with fewer than two batches. Rates that are not
    positive are left out.
    """
    points = [
        (math.log(rate.batch), math.log(rate.seen / (rate.given or 1.0)))
        for rate in rates
        if rate.seen > 0 and (rate.given is None or rate.given > 0)
    ]
    if len({x for x, _ in points}) < 2:
        return None
    return linear_regression(*zip(*points, strict=True)).slope


def warn_script_scales_lr(rates: Sequence[ObservedRate]) -> list[Diagnostic]:
    """Return a warning if a script itself scales its learning rate with the batch; none if unknown."""
    exponent = fit_lr_exponent(rates)
    if exponent is None or abs(exponent) < _MAX_EXPONENT_DIFFERENCE:
        return []
    figures = ", ".join(f"{rate.seen:g} at batch {rate.batch}" for rate in rates)
    return [messages.script_scales_learning_rate(exponent=exponent, rates=figures)]


def warn_inconsistent_probes(measured: Iterable[Measured]) -> list[Diagnostic]:
    """Return warnings about differences between probes of a script, and about scaling of its learning rate."""
    seen = [(probe.batch, probe.script) for probe in measured if probe.script is not None]
    rates = [
        rate
        for batch, script in seen
        if (rate := ObservedRate.from_rates(batch, script.lr, script.lr_given)) is not None
    ]
    # if tula passes no learning rate, the script's scaling is intended
    has_rates = any(rate.given is not None for rate in rates)
    differences = list_probe_differences([script for _, script in seen]) if seen else []
    return [*differences, *(warn_script_scales_lr(rates) if has_rates else [])]
