"""Predictions for a job at each measured sequence length (search.sequence): which batches fit, and tokens per second.

The length affects what the model learns, so it is not chosen here: the choice is among configurations at the job's
length.
"""

import statistics
import sys
from collections.abc import Sequence

from tula_cli.errors import BadMeasurements, Infeasible
from tula_cli.models.estimator import Estimator
from tula_cli.models.out_of_memory import find_smallest_ruled_out
from tula_cli.models.time import growth
from tula_cli.models.time.growth import LengthGrowth, Point
from tula_cli.models.time.noise import compute_trimmed_mean
from tula_cli.run.records.base import Components
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.recommendations import SequenceLength
from tula_cli.services.recommendation.measurements import TypeMeasurements, warn_failed_probes


def predict_lengths(measurements: TypeMeasurements) -> tuple[tuple[SequenceLength, ...], str]:
    """Return the predictions of each length on the fewest nodes, ascending, and how time and memory grow, in words.

    Args:
        measurements: measurements of the chosen node type, at the job's length.

    Returns:
        An empty tuple and an empty string if search.sequence has no other length.
    """
    run = measurements.run
    own_length = run.spec.length
    other_runs = run.lengths
    if own_length is None or not other_runs:
        return (), ""
    nodes = min(run.spec.search.nodes)
    forecasts: dict[int, Estimator] = {own_length: measurements.estimator}
    rows = [_predict_length(own_length, measurements.estimator, nodes=nodes, is_own_length=True)]
    for other_run in other_runs:
        assert other_run.length is not None
        results = other_run.results()
        try:
            estimator = Estimator.fit(other_run.spec, results, attempts=other_run.attempts())
        except (BadMeasurements, Infeasible) as error:
            rows.append(SequenceLength(length=other_run.length, own=False, nodes=nodes, note=error.message))
        else:
            forecasts[other_run.length] = estimator
            failed = " ".join(map(str, warn_failed_probes(results)))
            rows.append(_predict_length(other_run.length, estimator, nodes=nodes, is_own_length=False, note=failed))
    return tuple(sorted(rows, key=lambda row: row.length)), _describe_growth(forecasts, nodes)


def _predict_length(
    length: int, estimator: Estimator, *, nodes: int, is_own_length: bool, note: str = ""
) -> SequenceLength:
    probes = [probe for (count, _), probe in estimator.probes.items() if count == nodes]
    tokens = [probe.tokens for probe in probes if probe.tokens is not None]
    return SequenceLength(
        length=length,
        own=is_own_length,
        nodes=nodes,
        note=note,
        tokens=statistics.fmean(probe_tokens.real for probe_tokens in tokens) if tokens else float(length),
        padding=statistics.fmean(probe_tokens.padding for probe_tokens in tokens) if tokens else 0.0,
        largest_batch=_find_largest_batch(estimator, nodes),
        rows=tuple(sorted(estimator.predictions([nodes]), key=lambda row: row.batch)),
    )


def _find_largest_batch(estimator: Estimator, nodes: int) -> int | None:
    """Return the largest global batch that fits in memory, candidate or not; None if memory sets no bound."""
    accumulate, ran = estimator.spec.train.accumulate, max(size for _, size in estimator.probes)
    bounds = [estimator.largest_local_batch(nodes)]
    oom = find_smallest_ruled_out(estimator.ooms, nodes, sys.maxsize, sharded=estimator.spec.train.sharded)
    if oom is not None:
        bounds.append((oom - 1) // accumulate * accumulate)
    known_bounds = [bound for bound in bounds if bound is not None]
    return max(min(known_bounds), ran) * nodes * estimator.spec.cluster.gpus_per_node if known_bounds else None


def _describe_growth(forecasts: dict[int, Estimator], nodes: int) -> str:
    """Describe how step time and memory grow with the length; empty if fewer than two lengths were measured."""
    probes = [
        (length, probe)
        for length, estimator in forecasts.items()
        for (count, _), probe in estimator.probes.items()
        if count == nodes
    ]
    time = growth.fit_length_growth(
        [(length, float(probe.local_batch), _compute_seconds(probe)) for length, probe in probes]
    )
    memory = growth.fit_length_growth(_list_memory_points(probes))
    longest = max(forecasts)
    sentences = [
        _describe_length_growth(quantity, fitted, longest)
        for quantity, fitted in (("step's time", time), ("memory", memory))
        if fitted
    ]
    return "; ".join(sentences)


def _compute_seconds(probe: Measured) -> float:
    """Return the seconds of a step without synchronisation, else with cached data, else of the whole step."""
    return probe.compute_time or probe.cached_time or compute_trimmed_mean(probe.step_times)


def _list_memory_points(probes: Sequence[tuple[int, Measured]]) -> list[Point]:
    """Return the memory in bytes that grows with the batch: activations and the batch itself."""
    probes_with_components = [
        (length, probe, probe.memory) for length, probe in probes if isinstance(probe.memory, Components)
    ]
    rows = [
        (length, probe.local_batch / probe.accumulate, float(memory.activations + memory.batch))
        for length, probe, memory in probes_with_components
    ]
    return [row for row in rows if row[2] > 0]


def _describe_length_growth(quantity: str, growth: LengthGrowth, longest: int) -> str:
    off = "" if growth.error is None else f" (median error {100 * growth.error:.1f} %)"
    square = growth.quadratic_share(longest)
    if square < 0.005:
        return f"the {quantity} per sample grows linearly with the length{off}"
    return (
        f"of a sample's share of the {quantity} {100 * square:.0f} % grow with the square of the length at {longest}, as attention does"
        + off
    )
