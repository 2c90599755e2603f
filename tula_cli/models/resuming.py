"""What a rehearsal says of how a script resumes: with which batch it may go on, from what was seen from inside."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tula_cli.run.records.rehearsals import Phase, Rehearsed, Verdict
from tula_cli.words import duration, number, percent

LR_TOLERANCE = 0.01
"""Share by which a learning rate may differ from the expected one, beside what its schedule does in two steps."""
CURVE_TOLERANCE = 0.03
"""The same at equal samples of two curves, as a share of the range that they pass through: a slow schedule moves little."""
ROUNDING = 1e-6
"""Relative, of a learning rate that is a 32-bit number or was written on a command line."""
NO_STEP = (
    "no optimizer step of torch was seen: does it train with an optimizer of torch.optim, and is its Python started without"
    " -I, -E and -S?"
)


@dataclass(frozen=True)
class Judgement:
    """`verdict` None: not found out. `told` holds all sentences, `faults` those of what is wrong."""

    verdict: Verdict | None
    told: tuple[str, ...]
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Resumed:
    """What one start from the checkpoint has shown."""

    exact: bool = False  # it was seen to its end, and nothing was wrong
    useless: bool = False  # the checkpoint was of no use to it
    told: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


def judged(starts: Sequence[Rehearsed], *, lr_ratio: float | None) -> Judgement:
    """Return what the starts of a rehearsal come to; what they have not reached is told, never assumed.

    Args:
        starts: in their order.
        lr_ratio: what the command line makes of the learning rate at half the batch, relative to the whole; None where the
            script has its own.
    """
    begin, same, half = (_last(starts, phase) for phase in ("begin", "same", "half"))
    if begin is None or same is None or begin.saved_samples is None:
        return Judgement(None, (_no_checkpoint(begin),))
    first = _resumed(begin, same, lr_ratio=1.0)
    if same.ended == "failed" and same.outcome != "user":
        return Judgement(None, (f"not rehearsed: at batch {same.batch} {same.why}",))
    if same.ended == "cut" and not first.faults:
        return Judgement(None, first.told)  # it might as well have begun anew
    if first.useless:
        return Judgement("none", first.told, first.faults)
    if half is None:
        return Judgement("same", (*first.told, "not rehearsed at another batch"), first.faults)
    second = _resumed(begin, half, lr_ratio=lr_ratio)
    schedule = "" if second.faults else _schedule_fault(begin, same, half, lr_ratio)
    reasons = (*first.told, *second.told, *([schedule] if schedule else []))
    faults = (*first.faults, *second.faults, *([schedule] if schedule else []))
    if not second.exact or first.faults or schedule:
        return Judgement("same", reasons, faults)
    return Judgement("epoch" if _at_epoch_end(begin) else "any", reasons, faults)


def _last(starts: Sequence[Rehearsed], phase: Phase) -> Rehearsed | None:
    return next((start for start in reversed(starts) if start.phase == phase), None)


def _no_checkpoint(begin: Rehearsed | None) -> str:
    if begin is None:
        return "not rehearsed: nothing was started"
    if begin.ended == "failed":
        return f"not rehearsed: at batch {begin.batch} it failed before it went on: {begin.why}"
    if begin.saved_samples is None and not begin.steps:
        why = (
            f"no optimizer step of torch was seen; the last line of the script is: {begin.why}"
            if begin.why
            else NO_STEP
        )
        return f"not rehearsed: at batch {begin.batch} {why}"
    if begin.saved_samples is None and begin.ended == "cut":
        within = f"within {duration(begin.seconds)} at batch {begin.batch}"
        return (
            f"not rehearsed: no checkpoint {within}; raise search.max_minutes, or say in script.save how to ask for one"
        )
    if begin.saved_samples is None:
        return "not rehearsed: it ended without a checkpoint that script.resume.checkpoint finds"
    if begin.ended == "ended":
        return "not rehearsed: its only checkpoint is that of its end"
    return "not rehearsed: nothing went on from its checkpoint, which is not whole, or search.max_minutes was over"


def _at_epoch_end(begin: Rehearsed) -> bool:
    """Return whether the checkpoint was written between two epochs, whose last batches may have been dropped."""
    size, saved = begin.dataset_size, begin.saved_samples or 0
    if not size:
        return False  # a stream
    epochs = round(saved / size)
    return epochs > 0 and abs(saved - epochs * size) <= epochs * begin.batch


def _resumed(begin: Rehearsed, start: Rehearsed, *, lr_ratio: float | None) -> _Resumed:
    at = f"at batch {start.batch}"
    if start.ended == "failed":
        words = f"{at} it cannot go on from its own checkpoint: {start.why}"
        return _Resumed(useless=True, told=(words,), faults=(words,))
    if not start.steps and start.ended == "cut":
        return _Resumed(told=(f"not rehearsed {at}: no step within {duration(start.seconds)}",))
    counted = _samples(begin, start)
    lr = _learning_rate(begin, start, lr_ratio) or (_schedule_lost(begin, start) if start.batch == begin.batch else "")
    faults = (*([lr] if lr else []), *counted.faults)
    told = (*([lr] if lr else []), *counted.told)
    return _Resumed(counted.exact and not faults, counted.useless, told, faults)


def _samples(begin: Rehearsed, start: Rehearsed) -> _Resumed:
    """Hold the samples of a start from the checkpoint against those that were left."""
    at, saved, whole = f"at batch {start.batch}", begin.saved_samples or 0, start.whole
    if whole is None:
        return _Resumed(
            told=(f"samples {at} were not compared: nothing tells those of an epoch (script.dataset_size)",)
        )
    left, tolerance = whole - saved, _tolerance(begin, start, whole - saved)
    beyond = start.samples - left
    if beyond > tolerance:
        least = "at least " * (start.ended == "cut")
        share = f"{least}{percent(beyond / whole)} % too many"
        words = f"{at} it trains {least}{saved + start.samples} samples in all where {whole} were asked for: {share}"
        anew = abs(start.samples - whole) <= tolerance < saved
        again = f"{at} it does not go on from its checkpoint, but begins anew: all {whole} samples are trained again"
        told = again if anew else words
        return _Resumed(useless=anew, told=(told,), faults=(told,))
    if start.ended == "cut":
        reached = f"{start.samples} of {left} samples in {duration(start.seconds)}"
        words = f"{at} it takes steps, but was not seen to its end ({reached}), so where it goes on is not known: raise search.max_minutes"
        return _Resumed(told=(words,))
    if beyond < -tolerance:
        words = f"{at} it trains {saved + start.samples} samples in all where {whole} were asked for: {-beyond} too few"
        return _Resumed(told=(words,), faults=(words,))
    if start.batch < begin.batch and saved * (1 - start.batch / begin.batch) <= tolerance:
        early = f"its checkpoint holds {saved} samples alone: steps counted at the other batch would not show"
        return _Resumed(told=(f"{at} it goes on, but {early}",))
    return _Resumed(
        exact=True, told=(f"{at} it goes on from its checkpoint, to {saved + start.samples} samples of {whole}",)
    )


def _tolerance(begin: Rehearsed, start: Rehearsed, left: int) -> int:
    """Return samples that say nothing: each epoch may drop its last batch, and a batch is counted ahead of the checkpoint."""
    epochs = math.ceil(left / begin.dataset_size) if begin.dataset_size else 1
    return max(1, epochs) * start.batch + begin.batch


def _learning_rate(begin: Rehearsed, start: Rehearsed, ratio: float | None) -> str:
    """Return what is wrong with the first learning rate after the checkpoint; empty where nothing is, or none is told."""
    if begin.next_lr is None or start.first_lr is None:
        return ""
    ratios = _ratios(ratio)
    slack = LR_TOLERANCE * abs(begin.next_lr) + begin.lr_step
    if any(abs(start.first_lr - begin.next_lr * one) <= slack * one for one in ratios):
        return ""
    expected = begin.next_lr * ratios[0]
    asked = (
        f"it was {number(expected, 4)} there at first" if ratios[0] == 1.0 else f"{number(expected, 4)} was asked for"
    )
    return f"at batch {start.batch} its learning rate is {number(start.first_lr, 4)} after the checkpoint, and {asked}"


def _ratios(ratio: float | None) -> list[float]:
    """Return what the learning rate at half the batch may be relative to the whole: as asked, else as scripts scale it."""
    return [ratio] if ratio is not None else [1.0, 0.5, math.sqrt(0.5)]


def _schedule_lost(begin: Rehearsed, same: Rehearsed) -> str:
    """Return that the schedule does not go on where it stood at the checkpoint, although the learning rate hides that."""
    before, after = begin.schedule, same.schedule
    if before is None or after is None or after.moves is False or abs(before.at - after.at) <= 1:
        return ""
    return f"at batch {same.batch} its schedule ({after.name}) goes on at step {after.at}, and stood at {before.at}"


def _schedule_fault(begin: Rehearsed, same: Rehearsed, half: Rehearsed, ratio: float | None) -> str:
    """Return why the schedule of half the batch is not that of the whole at equal samples; empty if it is.

    A scheduler that counts optimizer steps and goes on at the step of the checkpoint is wrong at another batch, however
    little of its curve a short training shows. All others are judged by the learning rates that were used.
    """
    at, before, after = f"at batch {half.batch}", same.schedule, half.schedule
    counts = before is not None and after is not None and after.per_step and after.moves is not False
    if before is not None and after is not None and counts and abs(before.at - after.at) <= 1 < after.at:
        why = f"it counts steps, and those before the checkpoint were of {begin.batch} samples"
        return f"{at} its schedule ({after.name}) goes on at step {after.at} as at batch {same.batch}: {why}"
    differing = [_first_difference(begin, same, half, factor) for factor in _factors(same, half, ratio)]
    if not differing or not all(differing):
        return ""
    samples, seen, expected = max(point for point in differing if point is not None)
    figures = f"{number(seen, 4)} after {samples} samples, and {number(expected, 4)} was due there"
    return f"{at} its learning rate is {figures}: the schedule counts steps of the batch before"


def _factors(same: Rehearsed, half: Rehearsed, ratio: float | None) -> list[float]:
    """Return by what the curve of the whole batch may be multiplied: what the first steps show, if that is allowed."""
    if not same.rates or not half.rates:
        return []
    first, other = same.rates[0][1], half.rates[0][1]
    seen = other / first if first > 0 else 0.0
    close = [seen for expected in _ratios(ratio) if abs(seen - expected) <= LR_TOLERANCE * expected]
    return [*close, *_ratios(ratio)]


def _first_difference(
    begin: Rehearsed, same: Rehearsed, half: Rehearsed, factor: float
) -> tuple[int, float, float] | None:
    """Return samples, learning rate and the due one where the curve of half the batch first leaves that of the whole.

    Around each point the whole batch's curve is taken over the samples by which epochs of the two may be apart.
    """
    values = [rate for _, rate in same.rates]
    slack = CURVE_TOLERANCE * (max(values) - min(values)) + ROUNDING * max(values)
    for samples, rate in half.rates:
        apart = _tolerance(begin, half, samples)
        if samples > same.rates[-1][0] + apart:
            break
        low = max((place for place, _ in same.rates if place <= samples - apart), default=0)
        high = min((place for place, _ in same.rates if place >= samples + apart), default=same.rates[-1][0])
        near = [value for place, value in same.rates if low <= place <= high]
        if near and not factor * (min(near) - slack) <= rate <= factor * (max(near) + slack):
            due = min(near, key=lambda value: abs(factor * value - rate))
            return samples, rate, factor * due
    return None
