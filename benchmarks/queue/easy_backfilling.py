"""A scheduler with EASY backfilling (Lifka 1995): first come, first served, but a job may overtake others if, by its time limit, it
does not delay the first one.
"""

import copy
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from lublin_feitelson import ModelJob


@dataclass
class Cluster:
    """A cluster at a moment, and the jobs to come. Seconds."""

    nodes: int
    ahead: Sequence[ModelJob]  # ascending by submission
    next: int = 0  # index into `ahead`
    now: float = 0.0
    free: int = -1
    waiting: list[ModelJob] = field(default_factory=list)
    running: list[tuple[float, int, int, float]] = field(
        default_factory=list
    )  # heap: end, number, nodes, end by the limit
    starts: dict[int, float] = field(default_factory=dict)  # by id() of the job
    granted: dict[int, int] = field(default_factory=dict)  # nodes, by id() of the job
    count: int = 0

    def __post_init__(self) -> None:
        if self.free < 0:
            self.free = self.nodes

    def fork(self) -> "Cluster":
        """Return an independent copy."""
        other = copy.copy(self)
        other.waiting, other.running, other.starts, other.granted = list(self.waiting), list(self.running), {}, {}
        return other

    def until(self, moment: float) -> None:
        """Simulate all events up to and including a moment."""
        while (at := self._next_event()) is not None and at <= moment:
            self._advance(at)
        self.now = max(self.now, moment)

    def finish(self) -> None:
        """Simulate until all jobs have started."""
        while (at := self._next_event()) is not None:
            self._advance(at)

    def wait_of(self, job: ModelJob) -> float:
        """Return the wait of a job that is submitted now, in addition to all jobs to come; simulates until it starts."""
        self.waiting.append(job)
        self._schedule()
        while id(job) not in self.starts:
            at = self._next_event()
            assert at is not None, "a job that fits starts at last"
            self._advance(at)
        return self.starts[id(job)] - job.submitted

    def earliest(self, nodes: int) -> float:
        """Return the wait until `nodes` nodes are free by the limits of the running jobs, as `sbatch --test-only` estimates it."""
        free = self.free
        if free >= nodes:
            return 0.0
        for by_limit, count in sorted((row[3], row[2]) for row in self.running):
            free += count
            if free >= nodes:
                return max(0.0, by_limit - self.now)
        return 0.0

    def _next_event(self) -> float | None:
        ends = self.running[0][0] if self.running else None
        comes = self.ahead[self.next].submitted if self.next < len(self.ahead) else None
        return min((at for at in (ends, comes) if at is not None), default=None)

    def _advance(self, at: float) -> None:
        self.now = max(self.now, at)
        while self.running and self.running[0][0] <= self.now:
            self.free += heapq.heappop(self.running)[2]
        while self.next < len(self.ahead) and self.ahead[self.next].submitted <= self.now:
            self.waiting.append(self.ahead[self.next])
            self.next += 1
        self._schedule()

    def _schedule(self) -> None:
        started = 0
        while started < len(self.waiting) and self.waiting[started].nodes <= self.free:
            self._start(self.waiting[started], self.free)
            started += 1
        del self.waiting[:started]
        if not self.waiting or not self.free:
            return
        reserved, spare = self._reservation(self.waiting[0].nodes)
        remaining = [self.waiting[0]]
        for job in self.waiting[1:]:
            ends_before = self.now + job.limit <= reserved
            available = self.free if ends_before else min(self.free, spare)
            if job.nodes <= available:
                nodes = self._start(job, available)
                spare -= 0 if ends_before else nodes
            else:
                remaining.append(job)
        self.waiting = remaining

    def _reservation(self, nodes: int) -> tuple[float, int]:
        """Return when the first pending job can start by the limits of the running jobs, and the nodes left over then."""
        free = self.free
        for by_limit, count in sorted((row[3], row[2]) for row in self.running):
            free += count
            if free >= nodes:
                return by_limit, free - nodes
        raise AssertionError("a job asks for more nodes than there are")

    def _start(self, job: ModelJob, available: int) -> int:
        """Start a job on as many of the available nodes as it takes; return their number."""
        nodes = job.choose_nodes(available)
        self.free -= nodes
        self.starts[id(job)], self.granted[id(job)] = self.now, nodes
        self.count += 1
        row = (self.now + min(job.seconds_on(nodes), job.limit), self.count, nodes, self.now + job.limit)
        heapq.heappush(self.running, row)
        return nodes
