"""The time to a result: waits and runs of all links of a chain of jobs."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Ask:
    """What a chain of jobs asks the queue for: nodes and time limit of each of its links."""

    nodes: int
    minutes: float
    links: int  # that a training needs


def chain_links(minutes: float, limit: float, *, restart: float = 0.0) -> int:
    """Return how many jobs of a time limit a training takes.

    Args:
        minutes: of the training.
        limit: of a job, minutes.
        restart: minutes that each job after the first spends on coming to where the one before it ended.
    """
    if minutes <= limit:
        return 1
    assert restart < limit, "a job that only restarts never comes to an end"
    return 1 + math.ceil((minutes - limit) / (limit - restart) - 1e-9)


def links_wait(ask: Ask, first: float, later: float) -> float:
    """Return a bound (seconds) of the waits of all links together: the sum of theirs, which holds the more surely the more
    there are of them, for they are not all long at once.

    Args:
        ask: the chain.
        first: bound of the first link's wait, to which the scheduler's own estimate may have been added.
        later: of each other one.
    """
    return first + (ask.links - 1) * later
