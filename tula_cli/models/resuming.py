"""The verdict of a resume test: the batches with which a script can resume."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tula_cli.run.records.scripts import ObservedStart, Phase, Verdict
from tula_cli.words import format_count, format_duration, format_number, format_percent

LR_TOLERANCE = 0.01
"""Relative tolerance of a learning rate, in addition to the change that its schedule makes in two steps."""
CURVE_TOLERANCE = 0.03
"""Tolerance between two learning-rate curves at equal samples, as a share of their range, because a slow schedule
changes little."""
LR_ROUNDING = 1e-6
"""Relative rounding error of a learning rate stored as a 32-bit number or written on a command line."""
NO_STEP_SEEN = "no step of a torch optimizer was observed: check that the script uses torch.optim, and that Python is started without -I, -E and -S"


@dataclass(frozen=True)
class ResumeVerdict:
    """Verdict of a resume test; `verdict` is None if there is none.

    `reasons` holds all findings, `faults` those that describe faults. `other_nodes` is whether the script resumes at the
    same batch on other nodes; None if that is not known.
    """

    verdict: Verdict | None
    reasons: tuple[str, ...]
    faults: tuple[str, ...] = ()
    other_nodes: bool | None = None


@dataclass(frozen=True)
class _ResumedStart:
    """Observations of one start from the checkpoint."""

    exact: bool = False  # whether it was observed to its end without faults
    lost_progress: bool = False  # whether it failed or started from the beginning
    reasons: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


def judge_resume_test(starts: Sequence[ObservedStart], *, lr_ratio: float | None) -> ResumeVerdict:
    """Return the verdict on the starts of a resume test; properties that the starts do not show are reported as not tested.

    Args:
        starts: in their order.
        lr_ratio: learning rate that the command line sets at half the batch, relative to the full batch; None if the
            script sets its own.
    """
    judgement = _judge_batches(starts, lr_ratio=lr_ratio)
    begin, same, more = (_find_last_start_of_phase(starts, phase) for phase in ("begin", "same", "more"))
    if begin is None or same is None or more is None or judgement.verdict in (None, "none"):
        return judgement
    if more.ended == "failed" and more.outcome != "user":
        return replace(
            judgement, reasons=(*judgement.reasons, f"not tested {_describe_resumed_start(begin, more)}: {more.why}")
        )
    resumed = _judge_resumed_start(begin, more, lr_ratio=1.0)
    faults = resumed.faults or _describe_other_lr(begin, same, more)
    return replace(
        judgement,
        reasons=(*judgement.reasons, *(faults or resumed.reasons)),
        faults=(*judgement.faults, *faults),
        other_nodes=False if faults else resumed.exact or None,
    )


def _judge_batches(starts: Sequence[ObservedStart], *, lr_ratio: float | None) -> ResumeVerdict:
    begin, same, half = (_find_last_start_of_phase(starts, phase) for phase in ("begin", "same", "half"))
    if begin is None or same is None or begin.saved_samples is None:
        return ResumeVerdict(None, (_explain_missing_checkpoint(begin),))
    same_batch = _judge_resumed_start(begin, same, lr_ratio=1.0)
    if same.ended == "failed" and same.outcome != "user":
        return ResumeVerdict(None, (f"not tested: at batch {same.batch} {same.why}",))
    if same.ended == "cut" and not same_batch.faults:
        return ResumeVerdict(None, same_batch.reasons)  # it may have started from the beginning
    if same_batch.lost_progress:
        return ResumeVerdict("none", same_batch.reasons, same_batch.faults)
    if half is None:
        return ResumeVerdict("same", (*same_batch.reasons, "not tested at another batch"), same_batch.faults)
    second = _judge_resumed_start(begin, half, lr_ratio=lr_ratio)
    schedule = "" if second.faults else _describe_schedule_fault(begin, same, half, lr_ratio)
    reasons = (*same_batch.reasons, *second.reasons, *([schedule] if schedule else []))
    faults = (*same_batch.faults, *second.faults, *([schedule] if schedule else []))
    if not second.exact or same_batch.faults or schedule:
        return ResumeVerdict("same", reasons, faults)
    return ResumeVerdict("epoch" if _is_checkpoint_at_epoch_end(begin) else "any", reasons, faults)


def _find_last_start_of_phase(starts: Sequence[ObservedStart], phase: Phase) -> ObservedStart | None:
    return next((start for start in reversed(starts) if start.phase == phase), None)


def _describe_resumed_start(begin: ObservedStart, start: ObservedStart) -> str:
    nodes = f" on {format_count(start.nodes)} instead of {begin.nodes}" if start.nodes != begin.nodes else ""
    return f"at batch {start.batch}{nodes}"


def _describe_other_lr(begin: ObservedStart, same: ObservedStart, more: ObservedStart) -> tuple[str, ...]:
    """Describe the first difference of the learning rate between other and the same nodes; empty if there is none."""
    different = _find_first_difference(begin, same, more, 1.0) if same.rates else None
    if different is None:
        return ()
    return (f"{_describe_resumed_start(begin, more)} its learning rate is {_describe_difference(*different)}",)


def _explain_missing_checkpoint(begin: ObservedStart | None) -> str:
    if begin is None:
        return "not tested: the script was not started"
    if begin.ended == "failed":
        return f"not tested: at batch {begin.batch} the script failed before it could resume: {begin.why}"
    if begin.saved_samples is None and not begin.steps:
        why = f"no step of a torch optimizer was observed; last line of the script: {begin.why}"
        return f"not tested: at batch {begin.batch} {why if begin.why else NO_STEP_SEEN}"
    if begin.saved_samples is None and begin.ended == "cut":
        within = f"within {format_duration(begin.seconds)} at batch {begin.batch}"
        return f"not tested: no checkpoint {within}; raise search.max_minutes, or set script.save so that tula can request a checkpoint"
    if begin.saved_samples is None:
        return "not tested: the script ended without a checkpoint that matches script.resume.checkpoint"
    if begin.ended == "ended":
        return "not tested: the script's only checkpoint is from the end of the training"
    return (
        "not tested: the script did not resume, because its checkpoint is incomplete or search.max_minutes was reached"
    )


def _is_checkpoint_at_epoch_end(begin: ObservedStart) -> bool:
    """Return whether the checkpoint was written between two epochs, whose last batches may have been dropped."""
    size, saved = begin.dataset_size, begin.saved_samples or 0
    if not size:
        return False  # the size of a stream is unknown
    epochs = round(saved / size)
    return epochs > 0 and abs(saved - epochs * size) <= epochs * begin.batch


def _judge_resumed_start(begin: ObservedStart, start: ObservedStart, *, lr_ratio: float | None) -> _ResumedStart:
    at = _describe_resumed_start(begin, start)
    if start.ended == "failed":
        message = f"{at} it cannot resume from its own checkpoint: {start.why}"
        return _ResumedStart(lost_progress=True, reasons=(message,), faults=(message,))
    if not start.steps and start.ended == "cut":
        return _ResumedStart(reasons=(f"not tested {at}: no step within {format_duration(start.seconds)}",))
    counted = _judge_samples(begin, start)
    lr = _describe_wrong_learning_rate(begin, start, lr_ratio) or (
        _describe_lost_schedule(begin, start) if start.batch == begin.batch else ""
    )
    lr_faults = (lr,) if lr else ()
    faults, reasons = (*lr_faults, *counted.faults), (*lr_faults, *counted.reasons)
    return _ResumedStart(counted.exact and not faults, counted.lost_progress, reasons, faults)


def _judge_samples(begin: ObservedStart, start: ObservedStart) -> _ResumedStart:
    """Compare the samples trained after a start from the checkpoint with those that remained."""
    at, saved, total = _describe_resumed_start(begin, start), begin.saved_samples or 0, start.whole
    if total is None:
        message = f"samples {at} were not compared, because the samples per epoch are unknown (script.dataset_size)"
        return _ResumedStart(reasons=(message,))
    remaining, tolerance = total - saved, _compute_sample_tolerance(begin, start, total - saved)
    excess = start.samples - remaining
    if excess > tolerance:
        least = "at least " * (start.ended == "cut")
        share = f"{least}{format_percent(excess / total)} % too many"
        message = f"{at} it trains {least}{saved + start.samples} samples in total instead of {total}: {share}"
        anew = abs(start.samples - total) <= tolerance < saved
        restart_message = f"{at} it does not resume from its checkpoint, but starts from the beginning: all {total} samples are trained again"
        verdict = restart_message if anew else message
        return _ResumedStart(lost_progress=anew, reasons=(verdict,), faults=(verdict,))
    if start.ended == "cut":
        reached = f"{start.samples} of {remaining} samples in {format_duration(start.seconds)}"
        message = f"{at} the script trains, but did not finish ({reached}), so the position from which it resumed is unknown: raise search.max_minutes"
        return _ResumedStart(reasons=(message,))
    if excess < -tolerance:
        message = f"{at} it trains {saved + start.samples} samples in total instead of {total}: {-excess} too few"
        return _ResumedStart(reasons=(message,), faults=(message,))
    miscounted = saved * abs(1 - start.batch * start.nodes / (begin.batch * begin.nodes))
    if 0 < miscounted <= tolerance:
        other = "steps counted at the other batch" if start.nodes == begin.nodes else "samples counted per rank"
        early = f"its checkpoint contains only {saved} samples, too few to notice {other}"
        return _ResumedStart(reasons=(f"{at} it resumes, but {early}",))
    message = f"{at} it resumes from its checkpoint, up to {saved + start.samples} of the {total} samples of the test"
    return _ResumedStart(exact=True, reasons=(message,))


def _compute_sample_tolerance(begin: ObservedStart, start: ObservedStart, remaining: int) -> int:
    """Return the difference in samples that is not significant.

    Each epoch may drop its last batch, and one batch is counted ahead of the checkpoint.
    """
    epochs = max(1, math.ceil(remaining / begin.dataset_size)) if begin.dataset_size else 1
    return epochs * start.batch + begin.batch


def _describe_wrong_learning_rate(begin: ObservedStart, start: ObservedStart, ratio: float | None) -> str:
    """Describe a wrong first learning rate after the checkpoint; empty if it is right or unknown."""
    if begin.next_lr is None or start.first_lr is None:
        return ""
    ratios = _list_allowed_ratios(ratio)
    slack = LR_TOLERANCE * abs(begin.next_lr) + begin.lr_step
    if any(abs(start.first_lr - begin.next_lr * allowed_ratio) <= slack * allowed_ratio for allowed_ratio in ratios):
        return ""
    expected_text = f"should be {format_number(begin.next_lr * ratios[0], 4)}"
    if ratios[0] == 1.0:
        expected_text = f"was {format_number(begin.next_lr, 4)} at that point in the first run"
    return f"{_describe_resumed_start(begin, start)} its learning rate is {format_number(start.first_lr, 4)} after the checkpoint, but {expected_text}"


def _list_allowed_ratios(ratio: float | None) -> list[float]:
    """Return the allowed ratios of the learning rate at half the batch to that at the full one.

    The requested ratio, else the ones by which scripts usually scale it.
    """
    return [ratio] if ratio is not None else [1.0, 0.5, math.sqrt(0.5)]


def _describe_lost_schedule(begin: ObservedStart, same: ObservedStart) -> str:
    """Describe a schedule that does not resume from its position at the checkpoint; empty if it does.

    This may not show in the learning rate.
    """
    schedule_before, after = begin.schedule, same.schedule
    if schedule_before is None or after is None or after.moves is False or abs(schedule_before.at - after.at) <= 1:
        return ""
    return f"{_describe_resumed_start(begin, same)} its schedule ({after.name}) resumes at step {after.at} instead of {schedule_before.at}"


def _describe_schedule_fault(
    begin: ObservedStart, same: ObservedStart, half: ObservedStart, ratio: float | None
) -> str:
    """Describe why the schedules at half and full batch differ at equal samples; empty if they do not.

    A scheduler that counts optimizer steps and resumes at the step of the checkpoint is wrong at another batch, however
    little of its curve a short training shows. All others are judged by the learning rates that were used.
    """
    if why := _describe_step_of_schedule(begin, same, half):
        return why
    factors = _list_curve_factors(same, half, ratio)
    differences = [_find_first_difference(begin, same, half, factor) for factor in factors]
    known_differences = [difference for difference in differences if difference is not None]
    if not factors or len(known_differences) < len(factors):  # with one of the factors, the curves agree
        return ""
    latest = max(known_differences)  # of the factor with which the curves agree longest
    rate = _describe_difference(*latest)
    return f"at batch {half.batch} its learning rate is {rate}: the schedule counts steps of the previous batch"


def _describe_step_of_schedule(begin: ObservedStart, same: ObservedStart, half: ObservedStart) -> str:
    """Describe a scheduler that counts steps, and is at the same step at half and full batch; empty if it is not."""
    before, after = same.schedule, half.schedule
    if before is None or after is None or not after.per_step or after.moves is False:
        return ""
    has_equal_step = abs(before.at - after.at) <= 1
    if not has_equal_step or after.at <= 1:  # a new schedule is at step 0 or 1 at any batch
        return ""
    why = f"the schedule counts steps, but steps before the checkpoint had {begin.batch} samples"
    return (
        f"at batch {half.batch} its schedule ({after.name}) resumes at step {after.at}, as at batch {same.batch}: {why}"
    )


def _describe_difference(samples: int, rate: float, expected_rate: float) -> str:
    return f"{format_number(rate, 4)} after {samples} samples instead of {format_number(expected_rate, 4)}"


def _list_curve_factors(same: ObservedStart, half: ObservedStart, ratio: float | None) -> list[float]:
    """Return the factors by which the learning-rate curve of the full batch may be multiplied.

    The ratio of the first rates if it is allowed, then the allowed ratios.
    """
    if not same.rates or not half.rates:
        return []
    same_rate, half_rate = same.rates[0][1], half.rates[0][1]
    first_ratio = half_rate / same_rate if same_rate > 0 else 0.0
    allowed = _list_allowed_ratios(ratio)
    return [*(first_ratio for expected in allowed if abs(first_ratio - expected) <= LR_TOLERANCE * expected), *allowed]


def _find_first_difference(
    begin: ObservedStart, same: ObservedStart, half: ObservedStart, factor: float
) -> tuple[int, float, float] | None:
    """Return (samples, rate, expected rate) where the curve of half the batch first deviates from the full one.

    Each point is compared with the full batch's curve over the range of samples by which the epochs of the two may
    differ.
    """
    values = [rate for _, rate in same.rates]
    slack = CURVE_TOLERANCE * (max(values) - min(values)) + LR_ROUNDING * max(values)
    for samples, rate in half.rates:
        tolerance = _compute_sample_tolerance(begin, half, samples)
        if samples > same.rates[-1][0] + tolerance:
            break
        low = max((position for position, _ in same.rates if position <= samples - tolerance), default=0)
        high = min(
            (position for position, _ in same.rates if position >= samples + tolerance), default=same.rates[-1][0]
        )
        near = [value for position, value in same.rates if low <= position <= high]
        if near and not factor * (min(near) - slack) <= rate <= factor * (max(near) + slack):
            due = min(near, key=lambda value: abs(factor * value - rate))
            return samples, rate, factor * due
    return None
