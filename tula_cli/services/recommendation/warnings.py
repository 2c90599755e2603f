"""Warnings about a recommendation: missing probes, and reasons why the choice may not hold."""

from collections.abc import Iterator

from tula_cli.diagnostics import Diagnostic
from tula_cli.models.choice.objective import Choice
from tula_cli.models.estimator import Estimator
from tula_cli.query import Query
from tula_cli.run.records.probes import Failed
from tula_cli.run.records.recommendations import Prediction
from tula_cli.services import messages
from tula_cli.services.recommendation.measurements import Results, TypeMeasurements
from tula_cli.spec.sections import MEMORY_MARGIN
from tula_cli.words import is_too_wide

_MAX_REASONS = 5
"""Maximum number of reasons for leaving out configurations that are reported one by one."""
_MAX_DISAGREEMENT = 0.15
"""Largest relative difference from the additive fit that is not reported."""


def warn_failed_probes(results: Results) -> list[Diagnostic]:
    """Return a warning for each failed probe."""
    return [
        messages.probe_failed(nodes=result.nodes, local_batch=result.local_batch, reason=result.message)
        for result in results
        if isinstance(result, Failed)
    ]


def list_measurement_warnings(measurements: TypeMeasurements) -> Iterator[Diagnostic]:
    """Yield warnings on missing, failed and disturbed probes, on the fits, and on damaged files, of a node type."""
    if measurements.pending:
        yield messages.probes_pending(probes=measurements.pending)
    yield from warn_failed_probes(measurements.results)
    unknown = measurements.unknown
    for group in unknown[:_MAX_REASONS]:
        yield messages.configurations_left_out(configurations=group.count, nodes=group.nodes, reason=group.why)
    if remaining := unknown[_MAX_REASONS:]:
        yield messages.more_configurations_left_out(
            configurations=sum(group.count for group in remaining),
            nodes=[count for group in remaining for count in group.nodes],
        )
    snapshot = measurements.run.read()
    for attempt in snapshot.attempts:
        if attempt.disturbed_by:
            yield messages.probe_disturbed(task=attempt.task, trainings=attempt.disturbed_by)
    yield from (*measurements.estimator.warnings, *snapshot.job_warnings, *snapshot.training_warnings)


def list_choice_warnings(estimator: Estimator, choice: Choice, query: Query) -> Iterator[Diagnostic]:
    """Yield the reasons why the choice may be worse than predicted."""
    chosen, deadline = choice.prediction, query.deadline_hours
    if estimator.steps.determined_exactly and not all(row.measured for row in (chosen, *choice.runners_up)):
        yield messages.fit_error_unknown()
    low, high = chosen.hours_low, chosen.hours_high
    if low is not None and high is not None and is_too_wide(low, high):
        yield messages.time_too_uncertain(low_hours=max(low, 0.0), high_hours=high)
    if chosen.further:
        yield messages.beyond_probed_nodes(
            nodes=chosen.nodes,
            probed_nodes=max(nodes for nodes, _ in estimator.probes),
            gpus_per_node=estimator.spec.cluster.gpus_per_node if estimator.steps.levels else None,
        )
    yield from warn_additive_fit(estimator, chosen)
    if chosen.headroom is not None and chosen.headroom < MEMORY_MARGIN:
        yield messages.little_memory_free(free_share=chosen.headroom, wanted_share=MEMORY_MARGIN)
    timed = chosen.same_progress if query.same_progress and chosen.same_progress else chosen
    latest_hours = timed.hours_high or 0.0
    if deadline is not None and latest_hours > deadline:
        yield messages.may_miss_deadline(high_hours=latest_hours, deadline_hours=deadline)
    if chosen.market == "spot":
        if deadline is not None:
            yield messages.spot_time_is_expected()
    elif estimator.spec.pricing.spot is not None and estimator.predict_on_spot(chosen) is None:
        if estimator.saving is not None and not estimator.saving.is_known:
            yield messages.no_spot_saves_unknown(nodes=chosen.nodes)
        else:
            yield messages.no_spot_too_many_interruptions(nodes=chosen.nodes)


def warn_additive_fit(estimator: Estimator, chosen: Prediction) -> list[Diagnostic]:
    """Warn if a fit without overlap, which is accurate if little is overlapped, predicts a very different step time."""
    gpus = estimator.spec.cluster.gpus_per_node
    seconds = None if chosen.measured else estimator.steps.second_opinion(chosen.nodes, gpus, chosen.local_batch)
    if seconds is None or chosen.step_low is None or chosen.step_high is None:
        return []
    is_near = abs(seconds / chosen.step_time - 1) < _MAX_DISAGREEMENT
    if is_near or chosen.step_low <= seconds <= chosen.step_high:
        return []
    return [messages.additive_fit_disagrees(additive_ms=1e3 * seconds, predicted_ms=1e3 * chosen.step_time)]
