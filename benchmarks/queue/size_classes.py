"""The waits of jobs like one that is to be submitted: by size class (nodes x time limit), thin classes with their neighbours."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quantile_bound import CONFIDENCE, QUANTILE, WaitSeries, fewest

from tula_cli.words import format_count

LIMITS = (60.0, 240.0, 720.0, 1440.0)
"""Time limits (minutes) up to which a class goes; the last one has those above."""
ENOUGH = 2
"""Times as many waits as a bound needs have to be there before a class stands by itself: of just enough the largest bounds."""
DAYS = 14.0
"""How far back waits are looked at: a queue of last month says little of today's."""

Size = tuple[int, int]
"""The class of the nodes (1, 2, 3-4, 5-8 ...) and that of the time limit, both from 0."""


@dataclass(frozen=True)
class PastWait:
    """A job that waited, or waits still."""

    submitted: float  # Unix time at which it could have started: after what it depends on, in a chain
    wait: float  # seconds; infinite while it waits
    nodes: int
    minutes: float  # its time limit

    @property
    def known_at(self) -> float:
        """The Unix time at which this was known of it."""
        return self.submitted + self.wait


@dataclass(frozen=True)
class WaitBound:
    """An upper bound of a wait, with 90 % probability."""

    seconds: float
    middle: float  # the median of the waits that it rests on
    waits: int  # that it rests on
    confidence: float  # that it is not below the quantile; less than asked for where too few have waited


def size_of(nodes: int, minutes: float) -> Size:
    """Return the class of a job."""
    limit = next((place for place, most in enumerate(LIMITS) if minutes <= most), len(LIMITS))
    return (nodes - 1).bit_length(), limit


def size_words(size: Size) -> str:
    """Return a class in words: "5-8 nodes, up to 4 h"."""
    most = 2 ** size[0]
    nodes = format_count(most) if most <= 2 else f"{most // 2 + 1}-{most} nodes"
    limit = f"up to {LIMITS[size[1]] / 60:g} h" if size[1] < len(LIMITS) else f"above {LIMITS[-1] / 60:g} h"
    return f"{nodes}, {limit}"


def wait_bound(
    history: Iterable[PastWait],
    *,
    nodes: int,
    minutes: float,
    now: float,
    quantile: float = QUANTILE,
    confidence: float = CONFIDENCE,
) -> WaitBound | None:
    """Return the bound of the wait of a job that is submitted now; None where nobody has waited.

    Of too few waits for the confidence it is the largest, with the confidence that this has.

    Args:
        history: of the same partition; in any order.
        nodes: that the job asks for.
        minutes: its time limit.
        now: Unix time; waits that were not over then, or were over for more than DAYS, do not count.
        quantile: of the waits that is bounded.
        confidence: that the bound is not below it.
    """
    by_size: defaultdict[Size, list[PastWait]] = defaultdict(list)
    waiting: defaultdict[Size, list[float]] = defaultdict(list)
    for past in history:
        size = size_of(past.nodes, past.minutes)
        if now - DAYS * 86400 <= past.known_at <= now:
            by_size[size].append(past)
        elif past.submitted < now < past.known_at:
            waiting[size].append(now - past.submitted)
    size_wanted = size_of(nodes, minutes)
    counts = Counter({size: len(jobs) for size, jobs in by_size.items()})
    sizes = merged(size_wanted, counts, ENOUGH * fewest(quantile, confidence))
    series = WaitSeries(quantile=quantile, confidence=confidence)
    for past in sorted((past for size in sizes for past in by_size[size]), key=lambda past: past.known_at):
        series.add(past.wait)
    _with_waiting(series, sorted(age for size in sizes for age in waiting[size]))
    bound, middle, count = series.bound(), series.middle(), len(series.waits)
    if middle is None:
        return None
    if bound is not None:
        return WaitBound(bound, middle, count, confidence)
    return WaitBound(max(series.waits), middle, count, 1 - quantile**count)


def _with_waiting(series: WaitSeries, ages: Sequence[float]) -> None:
    """Count jobs that wait already for longer than their bound: so much is known before they start."""
    for age in ages:
        if (bound := series.bound()) is not None and age > bound:
            series.add(age)


def merged(size_wanted: Size, counts: Counter[Size], needed: int) -> list[Size]:
    """Return a job's class and as many rings of its neighbours as it takes to have so many waits; all where they are few.

    A class is one step away where its time limits are the next ones, or its nodes.
    """
    if not counts:
        return [size_wanted]
    away = {size: abs(size[0] - size_wanted[0]) + abs(size[1] - size_wanted[1]) for size in counts}
    for radius in sorted(set(away.values())):
        sizes = sorted(size for size, steps in away.items() if steps <= radius)
        if sum(counts[size] for size in sizes) >= needed:
            return sizes
    return sorted(counts)
