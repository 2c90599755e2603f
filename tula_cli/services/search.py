"""Choose the configurations to measure: full and partial search of the paper (III-A-2), a sweep in between, or rounds.

A probe is a number of nodes and a local batch. All local batches of one number of nodes are measured in one job, in
ascending order. The expected duration of a search suggests the strategy.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tula_cli.errors import BadMeasurements, Infeasible
from tula_cli.models.choice.grid import Config, LimitByNodes, find_highest_limit, list_candidates
from tula_cli.models.cost import count_training_work
from tula_cli.models.out_of_memory import find_smallest_excluding_oom
from tula_cli.run.directory import RunDir
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.jobs import Attempt
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory, Result
from tula_cli.run.records.recommendations import Prediction, TrainedSteps
from tula_cli.spec.job import JobSpec
from tula_cli.spec.sections import MEMORY_MARGIN
from tula_cli.words import describe_probe_configuration

if TYPE_CHECKING:
    from tula_cli.models.choice.adaptive import Candidate
    from tula_cli.models.estimator import Estimator
    from tula_cli.models.observations import OtherGpuCountMeasurements
REGRET_TOLERANCE = 0.01
"""Expected regret at which search.strategy `adaptive` stops, as a share of time or cost."""
_MAX_COMPARED_CONFIGURATIONS = 100
"""Number of configurations that are compared with each other for each of time and cost."""

ByNodes = Mapping[int, Sequence[int]]
"""Map from number of nodes (ascending) to local batches (ascending); no entry is empty."""


def choose_probes(spec: JobSpec, *, dataset_size: int, max_local_batch: LimitByNodes) -> dict[int, tuple[int, ...]]:
    """Return the probes of the spec's strategy: a map from number of nodes to ascending local batches.

    For `adaptive` they are the first round, for `auto` a sweep (`choose_strategy` decides between them). A
    job that is measured in addition to another one (`JobSpec.is_supplement_with_fewer_gpus`) takes two batches on the
    fewest nodes. Numbers of nodes without a feasible batch are left out.

    Args:
        dataset_size: training samples; no batch is larger.
        max_local_batch: the largest local batch that fits one GPU; None if memory sets no bound.

    Raises:
        Infeasible: no batch is feasible on any number of nodes; the message names the bound.
    """
    candidates = list_feasible_candidates(spec, dataset_size=dataset_size, max_local_batch=max_local_batch)
    by_nodes = _group_candidates_by_nodes(spec, candidates)
    strategy = "sweep" if spec.search.strategy == "auto" else spec.search.strategy
    if strategy == "adaptive" and not spec.is_supplement_with_fewer_gpus:
        from tula_cli.models.choice.adaptive import choose_first_probes

        first_probes = choose_first_probes(by_nodes.items(), whole_steps=_has_whole_steps_only(spec, ()))
        return group_probes_by_nodes(set(first_probes))
    choose = choose_smallest_and_middle_probes if spec.is_supplement_with_fewer_gpus else STRATEGIES[strategy]
    chosen = choose(by_nodes)
    return {nodes: tuple(sorted(local_batches)) for nodes, local_batches in sorted(chosen.items())}


def _group_candidates_by_nodes(spec: JobSpec, candidates: Iterable[Config]) -> dict[int, tuple[int, ...]]:
    return group_probes_by_nodes(
        (config.nodes, config.compute_local_batch(spec.cluster.gpus_per_node)) for config in candidates
    )


@dataclass(frozen=True)
class Round:
    """The next probes of `strategy: adaptive`."""

    probes: Mapping[int, tuple[int, ...]]  # number of nodes to ascending local batches; empty if no probe pays off
    reasons: tuple[str, ...]  # one line per probe
    words: str  # how certain the decisions are; empty at the start


def choose_next_round(
    spec: JobSpec,
    results: Sequence[Result],
    *,
    inspection: Inspection,
    attempts: Iterable[Attempt] = (),
    trained: Sequence[TrainedSteps] = (),
    others: "OtherGpuCountMeasurements | None" = None,
) -> Round:
    """Return the probes with the highest expected improvement of the decisions per node-second.

    Args:
        results: results of the probes so far; failed probes, and numbers of nodes on which a script only failed,
            are proposed again only if no other configuration is left.
        attempts: attempts of the jobs so far, which show the cost of starting a job.
        trained: steps of the run's trainings, which are fitted in addition to the probes.
        others: measurements with other numbers of GPUs per node, for the step time.

    Raises:
        Infeasible: no configuration is feasible.
        BadMeasurements: the results cannot be fitted together.
    """
    from tula_cli.models.choice import adaptive
    from tula_cli.models.estimator import Estimator  # imports numpy, which the other strategies do not need
    from tula_cli.models.observations import OtherGpuCountMeasurements
    from tula_cli.models.time.job_fit import choose_priors_of_job
    from tula_cli.models.time.step_model import may_lack_overlap

    candidates = list_feasible_candidates(
        spec, dataset_size=inspection.dataset_size, max_local_batch=find_largest_local_batch(spec, inspection)
    )
    finished = {(r.nodes, r.local_batch) for r in results if isinstance(r, Measured | OutOfMemory)}
    ooms = [(r.nodes, r.local_batch) for r in results if isinstance(r, OutOfMemory)]
    gpus, sharded = spec.cluster.gpus_per_node, spec.train.is_sharded
    fitting = {
        c
        for c in candidates
        if not find_smallest_excluding_oom(ooms, c.nodes, c.compute_local_batch(gpus), sharded=sharded)
    }
    failed = {(r.nodes, r.local_batch) for r in results if isinstance(r, Failed)}
    # A script that fails on a number of nodes, for example because it is not distributed, also fails at other batches.
    failing_nodes = {
        r.nodes for r in results if spec.script is not None and isinstance(r, Failed) and r.outcome == "user"
    }
    failing_nodes -= {nodes for nodes, _ in finished}
    fitting = {
        c for c in fitting if c.nodes not in failing_nodes and (c.nodes, c.compute_local_batch(gpus)) not in failed
    } or fitting
    measured = [result for result in results if isinstance(result, Measured)]
    whole_steps = _has_whole_steps_only(spec, measured) or may_lack_overlap(choose_priors_of_job(spec, measured))
    start = adaptive.choose_first_probes(
        _group_candidates_by_nodes(spec, fitting or candidates).items(), whole_steps=whole_steps
    )
    if missing := [probe for probe in start if probe not in finished]:
        reason = f"initial probes: {'; '.join(describe_probe_configuration(*probe) for probe in missing)}"
        return Round(group_probes_by_nodes(missing), (reason,), "")
    estimator = Estimator.fit(
        spec,
        results,
        inspection=inspection,
        attempts=attempts,
        trained=trained,
        other_sizes=others or OtherGpuCountMeasurements(),
    )
    rows = _select_compared_configurations(estimator, fitting)
    if not rows:
        raise BadMeasurements("the probes so far do not determine a step time", "use search.strategy: sweep")
    proposal = adaptive.propose_probes(
        estimator.steps,
        [_make_candidate(estimator, row) for row in rows],
        tolerance=REGRET_TOLERANCE,
    )
    picked = [(pick.candidate.nodes, pick.candidate.local_batch) for pick in proposal.picks]
    return Round(group_probes_by_nodes(picked), tuple(pick.reason for pick in proposal.picks), proposal.summary)


def _has_whole_steps_only(spec: JobSpec, measured: Iterable[Measured]) -> bool:
    """Return whether the probes time whole steps only; without probes on several GPUs, whether they are expected to."""
    synchronised_probes = [probe for probe in measured if probe.nodes * probe.gpus_per_node > 1]
    if not synchronised_probes:
        return spec.train.is_sharded or not spec.workload.measures_step_parts
    return all(probe.compute_time is None for probe in synchronised_probes)


def _select_compared_configurations(estimator: "Estimator", fitting: Set[Config]) -> tuple[Prediction, ...]:
    """Return the configurations to compare, fastest first.

    These are the measured ones, and the fastest and the cheapest of each batch, up to `_MAX_COMPARED_CONFIGURATIONS`: the cost of the
    comparison grows with the square of their number.
    """
    from tula_cli.models.choice.objective import find_best_rows
    from tula_cli.query import QUANTITIES

    rows = estimator.predict_configurations(*estimator.find_known_configurations()).sort_by_time()
    rows = rows.select_rows([config in fitting for config in rows.list_configurations()])
    is_candidate = rows["measured"].copy()
    for name in ("time", "cost"):
        is_candidate[find_best_rows(rows, QUANTITIES[name], max_rows=_MAX_COMPARED_CONFIGURATIONS)] = True
    return rows.select_rows(is_candidate).make_predictions()


def _make_candidate(estimator: "Estimator", row: Prediction) -> "Candidate":
    from tula_cli.models.choice.adaptive import Candidate

    search = estimator.spec.search
    start = statistics.median(probe.overheads.startup for probe in estimator.probes.values())
    return Candidate(
        nodes=row.nodes,
        gpus_per_node=estimator.spec.cluster.gpus_per_node,
        local_batch=row.local_batch,
        batch=row.batch,
        node_or_gpu_count=row.nodes,
        steps=row.hours * 3600 / row.step_time,
        price=row.cost / row.hours if row.hours else 0.0,
        probe_seconds=row.nodes * search.estimate_probe_seconds(row.step_time),
        job_seconds=row.nodes * (start + estimator.shutdown),
        measured=row.step_time if row.measured else None,
        log_sd=_compute_reducible_deviation(estimator, row),
    )


def _compute_reducible_deviation(estimator: "Estimator", row: Prediction) -> float:
    """Return the standard deviation of ln(step time) without its variation between jobs, which no probe reduces."""
    from tula_cli.models.choice.objective import INTERVAL_WIDTH_SD

    if not row.step_low or not row.step_high:
        return 0.0
    gpus = estimator.spec.cluster.gpus_per_node
    (repeats,) = estimator.steps.compute_repeat_deviation([row.nodes], [gpus], [row.local_batch])
    return math.sqrt(max(0.0, (math.log(row.step_high / row.step_low) / INTERVAL_WIDTH_SD) ** 2 - 2 * repeats**2))


def group_probes_by_nodes(chosen: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    """Return probes (nodes, local batch) grouped by number of nodes, both ascending."""
    by_nodes: dict[int, list[int]] = {}
    for nodes, local_batch in sorted(chosen):
        by_nodes.setdefault(nodes, []).append(local_batch)
    return {nodes: tuple(local_batches) for nodes, local_batches in by_nodes.items()}


def find_largest_local_batch(spec: JobSpec, inspection: Inspection) -> LimitByNodes:
    """Return the largest local batch that fits according to the memory estimate, less the margin.

    Returns:
        One number, or one per number of nodes if the model is sharded; 0 if not even one sample fits, None if nothing
        bounds it.
    """
    if inspection.capacity is None or not inspection.footprints:
        return None
    from tula_cli.models import memory

    model = memory.fit_memory_model(
        inspection.footprints, accumulate=spec.train.accumulate, sharded=spec.train.is_sharded
    )
    capacity, margin, gpus = inspection.capacity, MEMORY_MARGIN, spec.cluster.gpus_per_node
    if not model.sharded:
        return model.compute_largest_local_batch(capacity, margin=margin)
    return {
        nodes: model.adapt_to_ranks(nodes * gpus).compute_largest_local_batch(capacity, margin=margin)
        for nodes in spec.search.nodes
    }


def list_feasible_candidates(spec: JobSpec, *, dataset_size: int, max_local_batch: LimitByNodes) -> list[Config]:
    """Return the candidates within all bounds, ordered by nodes, then batch.

    Raises:
        Infeasible: there is no candidate; the message names the bound.
    """
    largest = min(dataset_size, spec.search.max_batch or dataset_size)
    candidates = _list_candidates(spec, max_batch=largest, max_local_batch=max_local_batch)
    if not candidates:
        raise _make_infeasible_error(spec, dataset_size=dataset_size, max_local_batch=max_local_batch)
    return candidates


def _list_candidates(spec: JobSpec, *, max_batch: int, max_local_batch: LimitByNodes) -> list[Config]:
    return list_candidates(
        spec.search.nodes,
        gpus_per_node=spec.cluster.gpus_per_node,
        min_batch=spec.search.min_batch,
        max_batch=max_batch,
        max_local_batch=max_local_batch,
        accumulate=spec.train.accumulate,
    )


def _make_infeasible_error(spec: JobSpec, *, dataset_size: int, max_local_batch: LimitByNodes) -> Infeasible:
    """Return an error that names the bound that excludes every batch: dataset, divisibility or memory."""
    search = spec.search
    if search.min_batch > dataset_size:
        return Infeasible(
            f"the smallest batch, {search.min_batch}, is larger than the dataset ({dataset_size} training samples)",
            f"lower search.min_batch to at most {dataset_size}",
        )
    largest = min(dataset_size, search.max_batch or dataset_size)
    divisible = _list_candidates(spec, max_batch=largest, max_local_batch=None)
    if not divisible:
        step = min(search.nodes) * spec.cluster.gpus_per_node * spec.train.accumulate
        return Infeasible(
            f"no batch {search.min_batch} x 2^k up to {largest} is divisible by {min(search.nodes)} nodes x"
            f" {spec.cluster.gpus_per_node} GPUs x {spec.train.accumulate} accumulation steps",
            f"set search.min_batch to a multiple of {step}, or add a smaller number to search.nodes"
            if step <= largest
            else "add a smaller number to search.nodes",
        )
    least = min(config.compute_local_batch(spec.cluster.gpus_per_node) for config in divisible)
    return Infeasible(
        f"every probe ran out of memory: at most {find_highest_limit(max_local_batch)} samples fit on one GPU, but the smallest local batch is"
        f" {least}",
        spec.workload.less_memory_hint,
    )


def _choose_full_search(by_nodes: ByNodes) -> dict[int, set[int]]:
    return {nodes: set(local_batches) for nodes, local_batches in by_nodes.items()}


def _choose_corner_probes(by_nodes: ByNodes) -> dict[int, set[int]]:
    """Return the four corners: the smallest and the largest batch on the fewest and on the most nodes."""
    return {nodes: {by_nodes[nodes][0], by_nodes[nodes][-1]} for nodes in (min(by_nodes), max(by_nodes))}


def _choose_sweep_search(by_nodes: ByNodes) -> dict[int, set[int]]:
    """Return every batch on the fewest nodes, the smallest on all others, and the middle and largest on the most.

    Around the middle batch, the dominant cost changes from synchronisation to compute. The largest batch shows how much
    of the synchronisation is hidden by compute, and is often the cheapest.
    """
    chosen = {nodes: {local_batches[0]} for nodes, local_batches in by_nodes.items()}
    many = by_nodes[max(by_nodes)]
    chosen[max(by_nodes)] |= {_find_middle_batch(many), many[-1]}
    chosen[min(by_nodes)] = set(by_nodes[min(by_nodes)])
    return chosen


def _find_middle_batch(local_batches: Sequence[int]) -> int:
    """Return the median by rank; the larger one of two."""
    return local_batches[len(local_batches) // 2]


def choose_smallest_and_middle_probes(by_nodes: ByNodes) -> dict[int, set[int]]:
    """Return two batches on the fewest nodes."""
    local_batches = by_nodes[min(by_nodes)]
    return {min(by_nodes): {local_batches[0], _find_middle_batch(local_batches)}}


STRATEGIES: Mapping[str, Callable[[ByNodes], dict[int, set[int]]]] = {
    "full": _choose_full_search,
    "partial": _choose_corner_probes,
    "sweep": _choose_sweep_search,
}
"""Strategies that choose all probes at once."""
STRATEGIES_ON_ALL_NODES = ("full", "sweep")
"""Strategies that measure on every number of nodes with a feasible batch, except for jobs measured in addition."""

# --- Expected cost of profiling

ASSUMED_STEP_SECONDS = 0.1
"""Seconds per step that are assumed if no probe has measured any."""
ASSUMED_START_SECONDS = 20.0
"""Seconds from the start of a job to its first step that are assumed if no probe has measured any."""


@dataclass(frozen=True)
class SearchEstimate:
    """The duration and node-hours of all probes of a search."""

    hours: float  # total hours if jobs run one after the other
    node_hours: float
    probes: int  # number of probes that the step times are based on; 0: based on `ASSUMED_STEP_SECONDS`

    @property
    def basis(self) -> str:
        """Description of the step times that the expectation is based on."""
        if not self.probes:
            return f"(assuming {ASSUMED_STEP_SECONDS:g} s per step)"
        return (
            "(from the step time of 1 probe)" if self.probes == 1 else f"(from the step times of {self.probes} probes)"
        )


def estimate_search(
    spec: JobSpec, jobs: Sequence[tuple[int, Sequence[int]]], probes: Sequence[Measured]
) -> SearchEstimate:
    """Return the expected duration and node-hours of a search.

    Args:
        jobs: nodes and local batches of each job of the search.
        probes: probes of the job, which measure the time of a step; a batch without a probe takes that of the nearest
            probed batch. Without probes, durations are assumed.
    """
    start = statistics.median(probe.overheads.startup for probe in probes) if probes else ASSUMED_START_SECONDS
    max_seconds = 60 * spec.search.max_minutes
    seconds = [
        min(
            max_seconds,
            start + sum(spec.search.estimate_probe_seconds(_estimate_step_time(probes, local)) for local in batches),
        )
        for _, batches in jobs
    ]
    node_seconds = sum(nodes * seconds_of_job for (nodes, _), seconds_of_job in zip(jobs, seconds, strict=True))
    return SearchEstimate(sum(seconds) / 3600, node_seconds / 3600, len(probes))


def _estimate_step_time(probes: Sequence[Measured], local_batch: int) -> float:
    """Return the median step time, in seconds, of the probe nearest to a local batch; without probes, an assumed one."""
    if not probes:
        return ASSUMED_STEP_SECONDS
    nearest = min(probes, key=lambda probe: max(probe.local_batch, local_batch) / min(probe.local_batch, local_batch))
    return statistics.median(nearest.step_times)


def list_measured_probes(run: RunDir | None) -> list[Measured]:
    """Return the successful probes of a run, which need not exist yet."""
    return [] if run is None or not run.exists else run.read_measurements()


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
        largest: the largest local batch that fits one GPU.
        run: the run of the job, which need not exist yet.
    """
    if spec.search.strategy != "auto":
        return spec
    tasks = run.read_snapshot().submitted_probe_tasks if run is not None and run.exists else []
    begun_strategies = [name for task in tasks if (name := task.spec.search.strategy) in ("sweep", "adaptive")]
    if begun_strategies:
        return _set_search_strategy(spec, begun_strategies[-1])
    share = _estimate_sweep_share(spec, list_measured_probes(run), dataset_size, largest)
    return _set_search_strategy(spec, "sweep" if share is None or share <= MAX_SWEEP_SHARE else "adaptive")


def _estimate_sweep_share(
    spec: JobSpec, probes: Sequence[Measured], dataset_size: int, largest: LimitByNodes
) -> float | None:
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
    todo = count_training_work(
        spec,
        batch=local_batch * fewest * gpus,
        world=fewest * gpus,
        dataset_size=dataset_size,
        eval_size=None,
        eval_batch_size=None,
    )
    if not todo.steps:
        return None
    node_hours = fewest * todo.epochs * todo.steps * _estimate_step_time(probes, local_batch) / 3600
    return float(estimate_search(spec, list(sweep.items()), probes).node_hours / node_hours)


def _set_search_strategy(spec: JobSpec, strategy: str) -> JobSpec:
    return spec.model_copy(update={"search": spec.search.model_copy(update={"strategy": strategy})})
