"""What a job takes at each length of text that was measured (search.sequence): what fits, and tokens a second.

A length changes what is learned, so none is chosen here: the choice is among configurations at the job's own length.
"""

import statistics
import sys
from collections.abc import Sequence

from tula_cli.errors import BadMeasurements, Infeasible
from tula_cli.models.forecast import Forecast
from tula_cli.models.out_of_memory import ruled_out
from tula_cli.models.time import growth
from tula_cli.models.time.growth import Growth, Point
from tula_cli.models.time.noise import centre
from tula_cli.run.records.components import Components
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.recommendations import SequenceLength
from tula_cli.services.recommendation.doubts import state_of_the_probes
from tula_cli.services.recommendation.measured import TypeMeasurements


def at_lengths(measurements: TypeMeasurements) -> tuple[tuple[SequenceLength, ...], str]:
    """Return what each length takes on the fewest nodes, ascending, and how time and memory grow with it, in words.

    Args:
        measurements: of the type of node that was chosen, at the job's own length.

    Returns:
        Nothing where search.sequence asks for no other length, or another network or other GPUs are supposed.
    """
    part = measurements.part
    own = part.spec.length
    others = part.run.lengths(part.spec, part.type)
    if own is None or not others or measurements.forecast.supposed:
        return (), ""
    nodes = min(part.spec.search.nodes)
    forecasts: dict[int, Forecast] = {own: measurements.forecast}
    rows = [_length(own, measurements.forecast, nodes=nodes, own=True)]
    for other in others:
        assert other.length is not None
        results = other.run.results()
        try:
            forecast = Forecast.from_results(other.spec, results, attempts=other.run.attempts())
        except (BadMeasurements, Infeasible) as error:
            rows.append(SequenceLength(length=other.length, own=False, nodes=nodes, note=error.message))
        else:
            forecasts[other.length] = forecast
            failed = "; ".join(state_of_the_probes(results, (), pending=0))
            rows.append(_length(other.length, forecast, nodes=nodes, own=False, note=failed))
    return tuple(sorted(rows, key=lambda row: row.length)), _growth_words(forecasts, nodes)


def _length(length: int, forecast: Forecast, *, nodes: int, own: bool, note: str = "") -> SequenceLength:
    probes = [probe for (count, _), probe in forecast.probes.items() if count == nodes]
    tokens = [probe.tokens for probe in probes if probe.tokens is not None]
    return SequenceLength(
        length=length,
        own=own,
        nodes=nodes,
        note=note,
        tokens=statistics.fmean(one.real for one in tokens) if tokens else float(length),
        padding=statistics.fmean(one.padding for one in tokens) if tokens else 0.0,
        largest_batch=_largest_batch(forecast, nodes),
        rows=tuple(sorted(forecast.predictions([nodes]), key=lambda row: row.batch)),
    )


def _largest_batch(forecast: Forecast, nodes: int) -> int | None:
    """Return the largest global batch that memory holds, whether it is a candidate or not; None where it sets no bound."""
    accumulate, ran = forecast.spec.train.accumulate, max(size for _, size in forecast.probes)
    bounds = [forecast.largest_local_batch(nodes)]
    oom = ruled_out(forecast.ooms, nodes, sys.maxsize, sharded=forecast.spec.train.sharded)
    if oom is not None:
        bounds.append((oom - 1) // accumulate * accumulate)
    known = [bound for bound in bounds if bound is not None]
    return max(min(known), ran) * nodes * forecast.spec.cluster.gpus_per_node if known else None


def _growth_words(forecasts: dict[int, Forecast], nodes: int) -> str:
    """Say how a step's time and a sample's memory grow with the length; empty where two lengths were not measured."""
    probes = [
        (length, probe)
        for length, forecast in forecasts.items()
        for (count, _), probe in forecast.probes.items()
        if count == nodes
    ]
    time_ = growth.fit([(length, float(probe.local_batch), _seconds(probe)) for length, probe in probes])
    memory = growth.fit(_memory_points(probes))
    longest = max(forecasts)
    told = [_words(what, found, longest) for what, found in (("step's time", time_), ("memory", memory)) if found]
    return "; ".join(told)


def _seconds(probe: Measured) -> float:
    """Return what a step computes: with its data there, and without synchronisation where that is told."""
    return probe.compute_time or probe.cached_time or centre(probe.step_times)


def _memory_points(probes: Sequence[tuple[int, Measured]]) -> list[Point]:
    """Return what grows with the batch: activations and the batch itself. Bytes."""
    told = [(length, probe, probe.memory) for length, probe in probes if isinstance(probe.memory, Components)]
    rows = [
        (length, probe.local_batch / probe.accumulate, float(memory.activations + memory.batch))
        for length, probe, memory in told
    ]
    return [row for row in rows if row[2] > 0]


def _words(what: str, found: Growth, longest: int) -> str:
    off = "" if found.error is None else f" (off by {found.error:.1%} in the median)"
    square = found.share(longest)
    if square < 0.005:
        return f"a sample's share of the {what} grows with the length{off}"
    return (
        f"of a sample's share of the {what} {square:.0%} grow with the square of the length at {longest}, as attention does"
        + off
    )
