"""Warnings about a recommendation: missing probes, and reasons why the choice may not hold."""

from collections.abc import Sequence

from tula_cli.models.choice.objective import Choice
from tula_cli.models.estimator import Estimator
from tula_cli.query import Query
from tula_cli.run.records.jobs import Attempt
from tula_cli.run.records.probes import Failed
from tula_cli.run.records.recommendations import Prediction
from tula_cli.services.recommendation.measurements import Results, UnknownConfigurations, describe_pending
from tula_cli.spec.sections import MEMORY_MARGIN
from tula_cli.words import format_count, format_duration, is_too_wide

_MAX_REASONS = 5  # for which configurations are left out that are told one by one
_MAX_DISAGREEMENT = 0.15  # a second opinion that is further off than this share, and outside the interval, is told


def list_probe_warnings(results: Results, unknown: Sequence[UnknownConfigurations], *, pending: int) -> list[str]:
    """Return warnings on missing measurements: pending probes, failed probes, and configurations left out."""
    warnings = []
    if pending:
        warnings.append(f"{describe_pending(pending)}: the answer may change when they are done")
    warnings += [
        f"the probe with {format_count(result.nodes)} and local batch {result.local_batch} failed ({result.message});"
        " tula profile runs it again"
        for result in results
        if isinstance(result, Failed)
    ]
    for left_out in unknown[:_MAX_REASONS]:
        on = ", ".join(map(str, left_out.nodes))
        warnings.append(f"{left_out.count} configurations on {on} nodes are left out: {left_out.why}")
    if remaining := unknown[_MAX_REASONS:]:
        counts = [count for left_out in remaining for count in left_out.nodes]
        on = f"on {len(counts)} other numbers of nodes ({min(counts)} to {max(counts)})"
        warnings.append(
            f"{sum(group.count for group in remaining)} configurations more are left out, for like reasons, {on}"
        )
    return warnings


def warn_disturbed_probes(attempts: Sequence[Attempt]) -> list[str]:
    """Warn of probes that measured while trainings of the same user ran on the same GPUs or cores."""
    return [
        f"{attempt.task} measured while {', '.join(attempt.disturbed_by)} ran on the same GPUs or cores: its step times may"
        f" be too long; delete its results and run tula profile again to measure it undisturbed"
        for attempt in attempts
        if attempt.disturbed_by
    ]


def list_choice_warnings(estimator: Estimator, choice: Choice, query: Query) -> list[str]:
    """Return the reasons why the choice may be worse than predicted."""
    chosen, warnings = choice.prediction, []
    if estimator.steps.determined_exactly and not all(row.measured for row in (chosen, *choice.runners_up)):
        warnings.append(
            "the fit is exactly determined: as many parameters as probes, so nothing tells its error;"
            " measure more (search.strategy: sweep or full) to know it"
        )
    warnings += _warn_wide_interval(chosen)
    if chosen.further:
        warnings.append(_warn_extrapolated(estimator, chosen))
    warnings += _warn_second_opinion(estimator, chosen)
    if chosen.headroom is not None and chosen.headroom < MEMORY_MARGIN:
        warnings.append(
            f"the choice ran in its probe, but leaves only {chosen.headroom:.0%} of the memory free (wanted: {MEMORY_MARGIN:.0%})"
        )
    timed = chosen.same_progress if query.same_progress and chosen.same_progress else chosen
    latest_hours = timed.hours_high or 0.0
    if query.deadline_hours is not None and latest_hours > query.deadline_hours:
        warnings.append(f"the choice may miss the deadline: up to {latest_hours:.3g} hours (90 % interval)")
    if (
        chosen.market == "on_demand"
        and estimator.spec.pricing.spot is not None
        and estimator.predict_on_spot(chosen) is None
    ):
        warnings.append(f"no spot nodes for {format_count(chosen.nodes)}: {_describe_why_no_spot(estimator)}")
    if chosen.market == "spot" and query.deadline_hours is not None:
        warnings.append("the time on spot nodes is an expected one: a run with more interruptions takes longer")
    return warnings


def _warn_wide_interval(chosen: Prediction) -> list[str]:
    low, high = chosen.hours_low, chosen.hours_high
    if low is None or high is None or not is_too_wide(low, high):
        return []
    return [
        f"the time of the choice is too uncertain to decide by: its 90 % interval is {format_duration(3600 * max(low, 0.0))} to"
        f" {format_duration(3600 * high)}; probe longer or more (search.min_seconds, search.strategy: full) and recommend again"
    ]


def _warn_extrapolated(estimator: Estimator, chosen: Prediction) -> str:
    most, gpus = format_count(max(nodes for nodes, _ in estimator.probes)), estimator.spec.cluster.gpus_per_node
    had, follows = f"more than {most}", "how synchronisation has grown up to there"
    if estimator.steps.levels:
        had, follows = (
            f"{format_count(gpus, 'GPU')} a node on more than {most}",
            "probes with other numbers of GPUs a node",
        )
    return (
        f"no probe had {had}: what {format_count(chosen.nodes)} take follows from {follows}; a probe on as many would tell"
        " (search.nodes)"
    )


def _describe_why_no_spot(estimator: Estimator) -> str:
    if estimator.saving is not None and not estimator.saving.is_known:
        return "how often the script saves is not known until it trains (or say script.resume.checkpoint_interval)"
    return "interruptions would leave no time to get anywhere"


def _warn_second_opinion(estimator: Estimator, chosen: Prediction) -> list[str]:
    """Warn if a fit without overlap, which is accurate if little is overlapped, predicts a very different step time."""
    gpus = estimator.spec.cluster.gpus_per_node
    second_opinion = None if chosen.measured else estimator.steps.second_opinion(chosen.nodes, gpus, chosen.local_batch)
    if second_opinion is None or chosen.step_low is None or chosen.step_high is None:
        return []
    if (
        chosen.step_low <= second_opinion <= chosen.step_high
        or abs(second_opinion / chosen.step_time - 1) < _MAX_DISAGREEMENT
    ):
        return []
    return [
        f"a plain additive fit of the same probes gives {second_opinion * 1e3:.3g} ms a step for the choice, not"
        f" {chosen.step_time * 1e3:.3g} ms: measure it (search.strategy: full, or adaptive) before relying on it"
    ]
