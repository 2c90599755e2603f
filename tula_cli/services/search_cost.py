"""The cost of a search: the expected duration of profiling, and the strategy that it suggests."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tula_cli.errors import Infeasible
from tula_cli.models.choice.grid import LimitByNodes
from tula_cli.models.cost import count_work
from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import Measured
from tula_cli.services.search import choose_probes
from tula_cli.spec.job import JobSpec

# --- Expected cost of profiling

ASSUMED_STEP = 0.1
"""Seconds per step that are assumed if no probe has measured any."""
ASSUMED_START = 20.0
"""Seconds from the start of a job to its first step that are assumed if no probe has measured any."""


@dataclass(frozen=True)
class Expectation:
    """The duration and node-hours of all probes of a search."""

    hours: float  # one job after the other
    node_hours: float
    probes: int  # whose step times it follows from; 0: from `ASSUMED_STEP`

    @property
    def basis(self) -> str:
        """Return a description of the step times that the expectation is based on."""
        if not self.probes:
            return f"(assuming {ASSUMED_STEP:g} s per step)"
        return (
            "(from the step time of 1 probe)" if self.probes == 1 else f"(from the step times of {self.probes} probes)"
        )


def estimate_search(
    spec: JobSpec, jobs: Sequence[tuple[int, Sequence[int]]], probes: Sequence[Measured]
) -> Expectation:
    """Return the expected duration and node-hours of a search.

    Args:
        spec: the job.
        jobs: nodes and local batches of each job of the search.
        probes: probes of the job, which measure the time of a step; a batch without a probe takes that of the nearest
            probed batch. Without probes, durations are assumed.
    """
    start = statistics.median(probe.overheads.startup for probe in probes) if probes else ASSUMED_START
    most = 60 * spec.search.max_minutes
    seconds = [
        min(most, start + sum(_estimate_probe_seconds(spec, probes, local) for local in batches)) for _, batches in jobs
    ]
    node_seconds = sum(nodes * seconds_of_job for (nodes, _), seconds_of_job in zip(jobs, seconds, strict=True))
    return Expectation(sum(seconds) / 3600, node_seconds / 3600, len(probes))


def find_nearest_step_time(probes: Sequence[Measured], local_batch: int) -> float | None:
    """Return the median step time, in seconds, of the probe nearest to a local batch; None if there are no probes."""
    return statistics.median(_find_nearest_probe(probes, local_batch).step_times) if probes else None


def list_measured_probes(run: RunDir | None) -> list[Measured]:
    """Return the successful probes of a run, which need not exist yet."""
    return [] if run is None or not run.exists else [r for r in run.read_results() if isinstance(r, Measured)]


def _estimate_probe_seconds(spec: JobSpec, probes: Sequence[Measured], local_batch: int) -> float:
    step = find_nearest_step_time(probes, local_batch)
    return spec.search.estimate_probe_seconds(ASSUMED_STEP if step is None else step)


def _find_nearest_probe(probes: Sequence[Measured], local_batch: int) -> Measured:
    return min(probes, key=lambda probe: max(probe.local_batch, local_batch) / min(probe.local_batch, local_batch))


# --- The strategy of a search

MAX_SWEEP_SHARE = 0.01
"""Share of the training's node-hours up to which `search.strategy: auto` is a sweep.

A sweep takes about this share of a training of ten hours. Its cost hardly matters then, it waits in the queue only
once, and it chooses better under a bound on the batch (benchmarks/replay/replay_worth.py).
"""


def choose_strategy(spec: JobSpec, *, dataset_size: int, largest: LimitByNodes, run: RunDir | None) -> JobSpec:
    """Return the job with `search.strategy: auto` replaced by a strategy.

    The strategy that the run has started with is kept; otherwise it depends on the cost of a sweep relative to the
    training.

    Args:
        spec: the job; a strategy other than auto is kept.
        dataset_size: training samples.
        largest: the largest local batch that fits one GPU.
        run: the run of the job, which need not exist yet.
    """
    if spec.search.strategy != "auto":
        return spec
    tasks = run.read().probe_tasks if run is not None and run.exists else []
    begun_strategies = [task.spec.search.strategy for task in tasks]
    begun_strategies = [name for name in begun_strategies if name in ("sweep", "adaptive")]
    if begun_strategies:
        return _set_search_strategy(spec, begun_strategies[-1])
    share = _estimate_sweep_share(spec, list_measured_probes(run), dataset_size, largest)
    return _set_search_strategy(spec, "sweep" if share is None or share <= MAX_SWEEP_SHARE else "adaptive")


def _estimate_sweep_share(spec: JobSpec, probes: Sequence[Measured], dataset_size: int, largest: LimitByNodes) -> float | None:
    """Return the node-hours of a sweep as a share of those of a training's steps; None if nothing can be searched.

    The training has the fewest nodes, and the largest batch that is feasible there.
    """
    try:
        full, sweep = (
            choose_probes(_set_search_strategy(spec, name), dataset_size=dataset_size, max_local_batch=largest)
            for name in ("full", "sweep")
        )
    except Infeasible:
        return None
    fewest, gpus = min(full), spec.cluster.gpus_per_node
    local_batch = full[fewest][-1]
    todo = count_work(
        spec,
        batch=local_batch * fewest * gpus,
        world=fewest * gpus,
        dataset_size=dataset_size,
        eval_size=None,
        eval_batch_size=None,
    )
    if not todo.steps:
        return None
    step = find_nearest_step_time(probes, local_batch) or ASSUMED_STEP
    node_hours = fewest * todo.epochs * todo.steps * step / 3600
    return float(estimate_search(spec, list(sweep.items()), probes).node_hours / node_hours)


def _set_search_strategy(spec: JobSpec, strategy: str) -> JobSpec:
    return spec.model_copy(update={"search": spec.search.model_copy(update={"strategy": strategy})})
