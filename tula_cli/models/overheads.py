"""Overheads of training in addition to its steps, each taken from the most similar probes that measured it."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tula_cli.models import refresh
from tula_cli.models.choice.candidates import Floats, Ints, compute_ratio_distances, find_nearest_columns
from tula_cli.models.time.noise import Z90
from tula_cli.run.records.jobs import Attempt, Job
from tula_cli.run.records.probes import Measured
from tula_cli.spec.job import JobSpec


@dataclass(frozen=True)
class OverheadColumns:
    """Overheads of many configurations, each of shape (n,), in seconds; the fields of `Overheads`."""

    startup: Floats
    eval_batch: Floats | None  # seconds per evaluation batch; None if no probe measured it
    eval_batch_size: Ints  # 0 if the nearest probe did not record it
    checkpoint: Floats | None  # None if no probe measured it
    refresh: Floats  # nan if no probe measured it


@dataclass(frozen=True)
class OverheadModel:
    """Overheads estimated from probes."""

    spec: JobSpec
    probes: Sequence[Measured]  # at least one
    shutdown: float  # seconds from the last measurement of a job to its end

    def estimate_overheads(self, nodes: Ints, local_batch: Ints, batch: Ints) -> OverheadColumns:
        """Return the overheads of configurations, from the probes with the nearest local batch.

        Overheads that do not depend on the batch are taken from the nearest number of nodes. Start-up does not get
        shorter with more nodes, unless the measurements show it clearly.
        """
        eval_batch, eval_batch_size = self._estimate_eval_batch_time_and_size(nodes, local_batch)
        return OverheadColumns(
            startup=_select_nearest_seconds(_pool_shorter_startups(self._startups), nodes) + self.shutdown,
            eval_batch=eval_batch,
            eval_batch_size=eval_batch_size,
            checkpoint=self._estimate_checkpoint_seconds(nodes),
            refresh=refresh.compute_refresh_seconds(
                self.spec, self.probes, nodes=nodes, local_batch=local_batch, batch=batch
            ),
        )

    def _estimate_eval_batch_time_and_size(self, nodes: Ints, local_batch: Ints) -> tuple[Floats | None, Ints]:
        """Return the seconds per evaluation batch, None if no probe measured them, and the samples of that batch."""
        probes_with_evaluation = [probe for probe in self.probes if probe.overheads.eval_batch is not None]
        probes = probes_with_evaluation or self.probes
        nearest = find_nearest_columns(
            compute_ratio_distances([probe.local_batch for probe in probes], local_batch),
            compute_ratio_distances([probe.nodes for probe in probes], nodes),
        )
        sizes = np.array([probe.overheads.eval_batch_size or 0 for probe in probes])[nearest]
        if not probes_with_evaluation:
            return None, sizes
        return np.array([probe.overheads.eval_batch for probe in probes], dtype=float)[nearest], sizes

    def _estimate_checkpoint_seconds(self, nodes: Ints) -> Floats | None:
        saves: dict[int, list[float]] = {}
        for probe in self.probes:
            if probe.overheads.checkpoint is not None:
                saves.setdefault(probe.nodes, []).append(probe.overheads.checkpoint)
        medians = {count: statistics.median(seconds) for count, seconds in saves.items()}
        return _select_nearest_seconds(medians, nodes) if medians else None

    @cached_property
    def startup_spread(self) -> float:
        """Half the 90 % interval of the start-up time between jobs, in seconds; 0 if only one job was measured."""
        medians = [statistics.median(startups) for startups in self._startups.values()]
        return Z90 * statistics.stdev(medians) if len(medians) > 1 else 0.0

    @cached_property
    def _startups(self) -> dict[int, list[float]]:
        """The start-up time of each job by number of nodes, ascending; the probes of one job share theirs."""
        return {
            nodes: sorted({probe.overheads.startup for probe in self.probes if probe.nodes == nodes})
            for nodes in sorted({probe.nodes for probe in self.probes})
        }


MIN_STARTUPS = 3
"""Minimum number of start-ups on each of two numbers of nodes that can show a difference: by chance, all three on one are
shorter than all three on the other once in 20 times."""


def _pool_shorter_startups(startups: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Return the start-up time by number of nodes; more nodes have a shorter one only if the difference is clear.

    Otherwise both have the median of their start-ups together (isotonic regression by pooling adjacent violators).
    The numbers of nodes must be ascending.
    """
    pools: list[tuple[list[int], list[float]]] = []
    for count, seconds in startups.items():
        counts, pooled = [count], list(seconds)
        while pools and _is_shorter_by_chance(pooled, pools[-1][1]):
            fewer, longer = pools.pop()
            counts, pooled = fewer + counts, longer + pooled
        pools.append((counts, pooled))
    return {count: statistics.median(pooled) for counts, pooled in pools for count in counts}


def _is_shorter_by_chance(seconds: Sequence[float], before: Sequence[float]) -> bool:
    """Return whether start-ups have a smaller median than those on fewer nodes without being clearly shorter."""
    is_clear = min(len(seconds), len(before)) >= MIN_STARTUPS and max(seconds) < min(before)
    return statistics.median(seconds) < statistics.median(before) and not is_clear


def _select_nearest_seconds(seconds: Mapping[int, float], nodes: Ints) -> Floats:
    """Return the seconds of the nearest number of nodes that has them, shape (n,)."""
    distinct, where = np.unique(nodes, return_inverse=True)
    nearest: Floats = np.array(list(seconds.values()))[
        find_nearest_columns(compute_ratio_distances(list(seconds), distinct))
    ][where]
    return nearest


def compute_median_shutdown(attempts: Iterable[Attempt], measured: Sequence[Measured]) -> float:
    """Return the median seconds between the last result of a job and its end; 0 if unknown."""
    seconds = []
    for attempt in attempts:
        if attempt.outcome != "done" or attempt.ended_at is None:
            continue
        inside = [p.measured_at for p in measured if attempt.started_at <= p.measured_at <= attempt.ended_at]
        if inside:
            seconds.append(attempt.ended_at - max(inside))
    return statistics.median(seconds) if seconds else 0.0


def compute_median_queue_wait(jobs: Iterable[Job], attempts: Iterable[Attempt]) -> float:
    """Return the median seconds that jobs waited in the queue, from submission to first start; 0 if unknown."""
    started: dict[str, float] = {}
    for attempt in attempts:
        started[attempt.scheduler_id] = min(attempt.started_at, started.get(attempt.scheduler_id, attempt.started_at))
    queued_jobs = [job for job in jobs if job.scheduler != "local" and job.scheduler_id in started]
    waits = [max(0.0, started[job.scheduler_id] - job.submitted_at) for job in queued_jobs]
    return statistics.median(waits) if waits else 0.0
