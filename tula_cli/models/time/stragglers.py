"""Ranks that are slower than others, and jobs whose steps wait for something that the models do not describe.

Every step of a synchronous training takes as long as its slowest rank (Dean and Barroso 2013 call this the tail). Each
rank records its own time per step; a rank that is slow in most of its probes is named. If no rank is, but the exposed
synchronisation grows with the batch, which that of gradients does not, and the probes lie far off their fit, something
else delays ranks: data from a shared source, or a different slow rank each time.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from tula_cli.diagnostics import Diagnostic
from tula_cli.models import messages
from tula_cli.models.time.step_time import Observation, StepModel
from tula_cli.run.records.probes import Measured, RankStepTimes

MIN_STRAGGLER_RATIO = 1.2
"""A rank that takes this multiple of the median rank's time is slow: ranks of one cluster normally differ by a few per
cent."""
_MIN_SLOW_SHARE = 0.75  # minimum share of its probes in which a straggler is slow
_MIN_PROBES = 2  # minimum number of probes
MIN_SYNC_GROWTH = 0.5
"""Exposed synchronisation counts as growing with the batch if it grows by more than this share of the largest batch's
compute."""
FAR_NOISE = 3.0
"""Probes lie far off their fit if its noise is this multiple of that of other clusters."""


@dataclass(frozen=True)
class Straggler:
    """A node, or a rank if there is one node, whose own part of a step takes longer than that of the others."""

    name: str
    factor: float  # time relative to that of the median node or rank
    probes: int  # probes in which it was slow
    all_probes: int  # probes in which it took part
    waits: bool  # whether it waits for data; otherwise it computes slowly

    @property
    def warning(self) -> Diagnostic:
        return messages.straggler(
            name=self.name,
            factor=self.factor,
            slow_probes=self.probes,
            probes=self.all_probes,
            waits_for_data=self.waits,
        )


def find_stragglers(measured: Iterable[Measured]) -> list[Straggler]:
    """Return the nodes or ranks that were slow in most of the probes they took part in, the slowest first."""
    ratios_by_name: dict[str, list[tuple[float, bool]]] = {}
    for probe in measured:
        for name, ratio in _compare_to_median(probe.ranks).items():
            ratios_by_name.setdefault(name, []).append(ratio)
    slow_ranks: list[Straggler] = []
    for name, ratios in ratios_by_name.items():
        slow = [(ratio, is_waiting) for ratio, is_waiting in ratios if ratio >= MIN_STRAGGLER_RATIO]
        if len(slow) >= max(_MIN_PROBES, math.ceil(_MIN_SLOW_SHARE * len(ratios))):
            is_waiting = sum(is_waiting for _, is_waiting in slow) > len(slow) / 2
            slow_ranks.append(Straggler(name, median(ratio for ratio, _ in slow), len(slow), len(ratios), is_waiting))
    return sorted(slow_ranks, key=lambda straggler: -straggler.factor)


def _compare_to_median(ranks: Sequence[RankStepTimes]) -> Mapping[str, tuple[float, bool]]:
    """Return the time of each node relative to the median, and whether waiting for data causes the difference.

    With one node, of each rank.
    """
    if len(ranks) < 2:
        return {}
    by_name: dict[str, list[RankStepTimes]] = {}
    for number, rank in enumerate(ranks):
        by_name.setdefault(rank.host if len({r.host for r in ranks}) > 1 else f"rank {number}", []).append(rank)
    compute_by_name = {name: median(rank.compute for rank in paces) for name, paces in by_name.items()}
    waits = {name: median(rank.wait for rank in paces) for name, paces in by_name.items()}
    median_compute, median_wait = median_low(compute_by_name.values()), median_low(waits.values())
    return {
        name: (seconds / median_compute, waits[name] - median_wait > (seconds - median_compute) / 2)
        for name, seconds in compute_by_name.items()
    }


def warn_unexplained_waits(observations: Sequence[Observation], model: StepModel) -> list[Diagnostic]:
    """Warn about waits that are explained neither by compute nor by the synchronisation of gradients.

    Args:
        model: fitted to them.
    """
    sizes = {(o.nodes, o.gpus_per_node) for o in observations if o.nodes * o.gpus_per_node > 1}
    if not sizes or model.noise <= FAR_NOISE:
        return []
    max_size = max(sizes)
    far = sorted(
        (o for o in observations if (o.nodes, o.gpus_per_node) == max_size and math.isfinite(o.compute_time)),
        key=lambda o: o.local_batch,
    )
    if len(far) < 2:
        return []
    small, large = far[0], far[-1]
    grown = (large.seconds - large.compute_time) - (small.seconds - small.compute_time)
    if grown <= MIN_SYNC_GROWTH * large.compute_time:
        return []
    return [
        messages.unexplained_waits(
            nodes=max_size[0],
            milliseconds=1e3 * grown,
            small_batch=small.local_batch,
            large_batch=large.local_batch,
        )
    ]
