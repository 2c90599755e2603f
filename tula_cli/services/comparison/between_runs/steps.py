"""The probes that two runs have in common: step time, its parts, memory."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tula_cli.models.time.changes.step_change import changed_parts
from tula_cli.models.time.changes.two_probes import StepRatio, compare_step_times
from tula_cli.models.time.noise import trimmed_mean
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.results import Part, StepParts

Result = Measured | OutOfMemory | Failed


@dataclass(frozen=True)
class ValuePair:
    """A number of each of two runs; None is what was not measured."""

    before: float | None
    after: float | None

    @property
    def ratio(self) -> float | None:
        return self.after / self.before if self.before and self.after is not None else None


@dataclass(frozen=True)
class StepDifference:
    """One configuration in both runs. Times in seconds, memory in bytes of one GPU."""

    part: str  # type of node, or length of text; empty where the job names none
    nodes: int
    gpus_per_node: int
    batch: int
    local_batch: int
    outcomes: tuple[str, str]  # measured, out_of_memory, failed
    step: ValuePair
    compute: ValuePair  # without synchronisation and without waiting for data
    sync: ValuePair
    data_wait: ValuePair
    memory: ValuePair
    ratio: float | None = None  # of the step times, B over A; None where either has none
    beyond_noise: bool = False  # more than the noise of the steps explains
    causes: tuple[Part, ...] = ()  # the parts that make a notable share of it, the most first


@dataclass(frozen=True)
class StepComparison:
    """All configurations of two runs."""

    rows: tuple[StepDifference, ...]  # those that both have tried
    only: tuple[int, int]  # how many A alone has, and B alone

    @property
    def timed(self) -> tuple[StepDifference, ...]:
        """Those that both have measured."""
        return tuple(row for row in self.rows if row.ratio is not None)

    @property
    def changed(self) -> tuple[StepDifference, ...]:
        """Those whose step time differs by more than noise."""
        return tuple(row for row in self.timed if row.beyond_noise)

    @property
    def ratio(self) -> float | None:
        """The middle ratio of those that differ; None where none does."""
        return statistics.median(row.ratio for row in self.changed if row.ratio) if self.changed else None

    @property
    def causes(self) -> tuple[Part, ...]:
        """The parts that most of the changed configurations are down to."""
        counted = Counter(part for row in self.changed for part in row.causes)
        with_causes = sum(bool(row.causes) for row in self.changed)
        return tuple(part for part, count in counted.most_common() if 2 * count > with_causes)


def compare_steps(pairs: Iterable[tuple[str, Sequence[Result], Sequence[Result]]]) -> StepComparison:
    """Compare the results of two runs.

    Args:
        pairs: for each part of the runs its name, and the results of the one and of the other.
    """
    rows: list[StepDifference] = []
    alone = [0, 0]
    for part, before, after in pairs:
        results_before, results_after = (
            {_configuration(result): result for result in results} for results in (before, after)
        )
        common = [configuration for configuration in results_before if configuration in results_after]
        rows += [
            _compare_results(part, results_before[configuration], results_after[configuration])
            for configuration in common
        ]
        alone[0] += len(results_before) - len(common)
        alone[1] += len(results_after) - len(common)
    return StepComparison(tuple(rows), (alone[0], alone[1]))


def _configuration(result: Result) -> tuple[int, int, int]:
    return result.nodes, result.gpus_per_node, result.local_batch


def _compare_results(part: str, before: Result, after: Result) -> StepDifference:
    probe_before, probe_after = (result if isinstance(result, Measured) else None for result in (before, after))
    steps = _compare_steps(probe_before, probe_after)
    step_parts = [_step_parts(probe) for probe in (probe_before, probe_after)]
    beyond = steps is not None and steps.is_beyond_noise
    causes = changed_parts(step_parts[0], step_parts[1]) if beyond and step_parts[0] and step_parts[1] else ()

    def both(name: str) -> ValuePair:
        values = [getattr(parts, name) if parts is not None else None for parts in step_parts]
        return ValuePair(values[0], values[1])

    return StepDifference(
        part,
        *_configuration(before)[:2],
        batch=before.nodes * before.gpus_per_node * before.local_batch,
        local_batch=before.local_batch,
        outcomes=(before.kind, after.kind),
        step=both("step"),
        compute=both("compute"),
        sync=both("sync"),
        data_wait=both("data"),
        memory=ValuePair(*(probe.memory.peak if probe else None for probe in (probe_before, probe_after))),
        ratio=steps.ratio if steps else None,
        beyond_noise=beyond,
        causes=causes,
    )


def _compare_steps(probe_before: Measured | None, probe_after: Measured | None) -> StepRatio | None:
    """Return how the steps of two probes compare; None where either has no time that a step could have taken."""
    if probe_before is None or probe_after is None or not (_is_timed(probe_before) and _is_timed(probe_after)):
        return None
    return compare_step_times(probe_before.step_times, probe_after.step_times)


def _is_timed(probe: Measured) -> bool:
    return bool(probe.step_times) and 0 < trimmed_mean(probe.step_times) < math.inf


def _step_parts(probe: Measured | None) -> StepParts | None:
    """Return where the time of a probe's step goes; None of what was not measured."""
    if probe is None or not _is_timed(probe):
        return None
    wait, work = probe.data_wait, probe.compute_time
    return StepParts(
        step=trimmed_mean(probe.step_times),
        data=wait,
        compute=None if work is None else max(0.0, work - (wait or 0.0)),
        sync=probe.sync_time,
    )
