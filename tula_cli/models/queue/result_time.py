"""The time to a result: waits and runs of all links of a chain of jobs, each with the time limit that makes it least."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tula_cli.models.choice.columns import Floats
from tula_cli.models.choice.offers import Offers, ResultColumns

LIMITS = (60, 240, 720, 1440, 2880)
"""Time limits (minutes) that are tried below the job's own: each is the end of a class of waits."""
MOST_LINKS = 40
"""Of a chain that is planned: tula submits half as many again."""


@dataclass(frozen=True)
class LinkWaits:
    """What the links of a chain wait at one time limit; seconds."""

    minutes: int  # the limit
    first: float  # of the first link, as is chosen by: the scheduler's own estimate, where it gives one, else the bound
    later: float  # bound of each other link
    bound: float  # of the first link


def limits_to_try(minutes: int, *, restart: float) -> list[int]:
    """Return the time limits (minutes) that a chain may have: the job's own, and shorter ones.

    Args:
        minutes: the job's own.
        restart: minutes that a job spends on coming to where the one before it ended; a limit has to be well above it.
    """
    return [limit for limit in LIMITS if limit < minutes and limit >= 4 * restart] + [minutes]


def result_columns(
    rows: Offers, waits: Mapping[tuple[str, int], Sequence[LinkWaits]], *, restart: float
) -> ResultColumns:
    """Return the time to the result of each configuration, at the time limit that makes it least; shape (n,).

    Args:
        rows: forecasts, whose hours are the run.
        waits: of each type and number of nodes, by time limit; at least one each.
        restart: seconds that each job after the first takes before it goes on.
    """
    found = {name: np.zeros(len(rows)) for name in ("minutes", "links", "wait", "bound", "first_bound", "hours")}
    for kind, nodes in sorted({(str(kind), int(nodes)) for kind, nodes in zip(rows.type, rows.nodes, strict=True)}):
        (own,) = np.nonzero((rows.type == kind) & (rows.nodes == nodes))
        tables = [_at(rows.hours[own], one, restart) for one in waits[kind, nodes]]
        best = np.argmin([table["hours"] for table in tables], axis=0)
        for name, column in found.items():
            column[own] = np.stack([table[name] for table in tables])[best, np.arange(len(own))]
    return ResultColumns(**found)


def _at(hours: Floats, waits: LinkWaits, restart: float) -> dict[str, Floats]:
    """Return what trainings of so many hours take at one time limit; hours, and what a chain has too many links for never ends."""
    limit, lost = waits.minutes / 60, restart / 3600
    more = np.ceil(np.maximum(0.0, hours - limit) / max(limit - lost, 1e-9) - 1e-9)
    never = more >= MOST_LINKS
    more = np.where(never, MOST_LINKS - 1, more)
    wait, bound = ((first + more * waits.later) / 3600 for first in (waits.first, waits.bound))
    whole = hours + more * lost + wait
    # Beyond the most links the longest limit is still the best there is.
    return {
        "minutes": np.full(len(hours), float(waits.minutes)),
        "links": more + 1,
        "wait": wait,
        "bound": bound,
        "first_bound": np.full(len(hours), waits.bound / 3600),
        "hours": np.where(never, whole + 1e6 / waits.minutes, whole),
    }
