"""What training takes beside its steps at any configuration: each part from the probes most like it that tell it."""

import functools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log2

from tula_cli.models import refresh
from tula_cli.models.choice.grid import Config
from tula_cli.models.time.noise import Z90
from tula_cli.run.records.jobs import Attempt
from tula_cli.run.records.probes import Measured, Overheads
from tula_cli.spec.job import JobSpec


@dataclass(frozen=True)
class OverheadModel:
    """The overheads that probes tell."""

    spec: JobSpec
    probes: Sequence[Measured]  # at least one
    shutdown: float  # seconds from the last measurement of a job to its end

    @cached_property
    def at(self) -> Callable[[Config], Overheads]:
        """What gives the overheads of a configuration, None where no probe tells; each is worked out once."""
        return functools.cache(self._at)

    @cached_property
    def startup_spread(self) -> float:
        """Half the 90 % interval of what a start takes from one job to the next: seconds, 0 where one job tells nothing."""
        apart: list[float] = []
        for nodes in {probe.nodes for probe in self.probes}:
            # The probes of one job started together: they tell the same.
            seen = sorted({probe.overheads.startup for probe in self.probes if probe.nodes == nodes})
            apart.append(statistics.median(seen))
        return Z90 * statistics.stdev(apart) if len(apart) > 1 else 0.0

    @cached_property
    def _of_the_job(self) -> Callable[[int], tuple[float, float | None]]:
        return functools.cache(self._startup_and_checkpoint)

    def _startup_and_checkpoint(self, nodes: int) -> tuple[float, float | None]:
        """Return what no batch changes: the medians over the nearest number of nodes, in seconds."""

        def nearest(told: Sequence[tuple[int, float]]) -> float | None:
            count = min((count for count, _ in told), key=lambda count: abs(log2(count / nodes)), default=None)
            return statistics.median(seconds for other, seconds in told if other == count) if told else None

        startup = nearest([(probe.nodes, probe.overheads.startup) for probe in self.probes])
        assert startup is not None
        saves = [(probe.nodes, save) for probe in self.probes if (save := probe.overheads.checkpoint) is not None]
        return startup + self.shutdown, nearest(saves)

    def _at(self, config: Config) -> Overheads:
        """Take those of the nearest local batch, and of the nearest number of nodes what no batch changes."""
        local_batch = config.local_batch(self.spec.cluster.gpus_per_node)
        told = [probe for probe in self.probes if probe.overheads.eval_batch is not None] or self.probes
        nearest = min(
            told,
            key=lambda probe: (abs(log2(probe.local_batch / local_batch)), abs(log2(probe.nodes / config.nodes))),
        )
        startup, checkpoint = self._of_the_job(config.nodes)
        took = refresh.seconds(self.spec, self.probes, nodes=config.nodes, local_batch=local_batch, batch=config.batch)
        return nearest.overheads.model_copy(update={"startup": startup, "checkpoint": checkpoint, "refresh": took})


def shutdown_of(attempts: Iterable[Attempt], measured: Sequence[Measured]) -> float:
    """Return the median seconds between the last result of a job and its end; 0 where no job tells."""
    found = []
    for attempt in attempts:
        if attempt.outcome != "done" or attempt.ended_at is None:
            continue
        inside = [p.measured_at for p in measured if attempt.started_at <= p.measured_at <= attempt.ended_at]
        if inside:
            found.append(attempt.ended_at - max(inside))
    return statistics.median(found) if found else 0.0
