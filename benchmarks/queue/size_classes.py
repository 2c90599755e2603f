"""The waits of jobs similar to one to be submitted: by size class (nodes x time limit); small classes are merged with neighbours."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quantile_bound import CONFIDENCE, QUANTILE, WaitSeries, min_values

from tula_cli.words import format_count

CLASS_LIMITS = (60.0, 240.0, 720.0, 1440.0)
"""Upper time limits of the classes in minutes; the last class has all above."""
ENOUGH_FACTOR = 2
"""Minimum number of waits of an unmerged class, as a multiple of what a bound needs; with fewer, the bounds are the largest waits."""
MAX_AGE_DAYS = 14.0
"""Maximum age of waits: the queue of last month says little about today's."""

Size = tuple[int, int]
"""The class of the nodes (1, 2, 3-4, 5-8 ...) and that of the time limit, both from 0."""


@dataclass(frozen=True)
class PastWait:
    """A job that has waited or is waiting."""

    submitted: float  # Unix time at which it could have started; in a chain, after its dependency
    wait: float  # seconds; infinite while it waits
    nodes: int
    minutes: float  # its time limit

    @property
    def known_at(self) -> float:
        """The Unix time at which the wait was known."""
        return self.submitted + self.wait


@dataclass(frozen=True)
class WaitBound:
    """An upper bound of a wait, with 90 % probability."""

    seconds: float
    middle: float  # median of the waits used
    waits: int  # number of waits used
    confidence: float  # that the bound is not below the quantile; less than requested if there are too few waits


def classify_job(nodes: int, minutes: float) -> Size:
    """Return the class of a job."""
    limit = next((place for place, most in enumerate(CLASS_LIMITS) if minutes <= most), len(CLASS_LIMITS))
    return (nodes - 1).bit_length(), limit


def describe_class(size: Size) -> str:
    """Describe a class in words: "5-8 nodes, up to 4 h"."""
    most = 2 ** size[0]
    nodes = format_count(most) if most <= 2 else f"{most // 2 + 1}-{most} nodes"
    limit = (
        f"up to {CLASS_LIMITS[size[1]] / 60:g} h"
        if size[1] < len(CLASS_LIMITS)
        else f"above {CLASS_LIMITS[-1] / 60:g} h"
    )
    return f"{nodes}, {limit}"


def bound_wait(
    history: Iterable[PastWait],
    *,
    nodes: int,
    minutes: float,
    now: float,
    quantile: float = QUANTILE,
    confidence: float = CONFIDENCE,
) -> WaitBound | None:
    """Return the bound of the wait of a job that is submitted now; None without any waits.

    With too few waits for the confidence, the bound is the largest wait, with its confidence.

    Args:
        history: of the same partition; in any order.
        nodes: requested by the job.
        minutes: its time limit.
        now: Unix time; waits that ended after it, or more than DAYS before it, are not used.
        quantile: of the waits that is bounded.
        confidence: that the bound is not below it.
    """
    by_size: defaultdict[Size, list[PastWait]] = defaultdict(list)
    waiting: defaultdict[Size, list[float]] = defaultdict(list)
    for past in history:
        size = classify_job(past.nodes, past.minutes)
        if now - MAX_AGE_DAYS * 86400 <= past.known_at <= now:
            by_size[size].append(past)
        elif past.submitted < now < past.known_at:
            waiting[size].append(now - past.submitted)
    size_wanted = classify_job(nodes, minutes)
    counts = Counter({size: len(jobs) for size, jobs in by_size.items()})
    sizes = merge_classes(size_wanted, counts, ENOUGH_FACTOR * min_values(quantile, confidence))
    series = WaitSeries(quantile=quantile, confidence=confidence)
    for past in sorted((past for size in sizes for past in by_size[size]), key=lambda past: past.known_at):
        series.add(past.wait)
    _add_pending_jobs(series, sorted(age for size in sizes for age in waiting[size]))
    bound, middle, count = series.bound(), series.middle(), len(series.waits)
    if middle is None:
        return None
    if bound is not None:
        return WaitBound(bound, middle, count, confidence)
    return WaitBound(max(series.waits), middle, count, 1 - quantile**count)


def _add_pending_jobs(series: WaitSeries, ages: Sequence[float]) -> None:
    """Add jobs that have already waited longer than their bound, because this is known before they start."""
    for age in ages:
        if (bound := series.bound()) is not None and age > bound:
            series.add(age)


def merge_classes(size_wanted: Size, counts: Counter[Size], needed: int) -> list[Size]:
    """Return a job's class and as many rings of neighbours as are needed for `needed` waits; all classes if there are too few.

    Neighbouring classes differ by one step of the time limit or of the nodes.
    """
    if not counts:
        return [size_wanted]
    away = {size: abs(size[0] - size_wanted[0]) + abs(size[1] - size_wanted[1]) for size in counts}
    for radius in sorted(set(away.values())):
        sizes = sorted(size for size, steps in away.items() if steps <= radius)
        if sum(counts[size] for size in sizes) >= needed:
            return sizes
    return sorted(counts)
