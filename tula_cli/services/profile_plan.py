"""The probes that `tula profile` has to measure, and their maximum cost."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tula_cli.cluster.inspection import NotInspectable
from tula_cli.cluster.slurm import first_job
from tula_cli.models.choice.grid import LimitByNodes
from tula_cli.models.cost import compute_max_cost
from tula_cli.run.code import choose_code
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.probes import Failed, Result
from tula_cli.run.records.tasks import MeasuringTask, ProbeTask, make_probe_id
from tula_cli.services.plans import ProfilePlan, UpperBoundPlan
from tula_cli.services.search import (
    Round,
    choose_next_round,
    choose_probes,
    choose_strategy,
    find_largest_local_batch,
    group_probes_by_nodes,
    list_feasible_candidates,
)
from tula_cli.spec.job import JobSpec


def plan_probes(
    run: Run, inspection: Inspection, *, node_hours_of_other_types: float = 0.0, repeat_failed: bool = True
) -> ProfilePlan:
    """Return the missing probes, grouped into jobs, and their maximum cost.

    Args:
        run: the run, which may have results already or not exist yet.
        node_hours_of_other_types: node-hours that other node types of the same job have used or are about to use.

    Raises:
        Infeasible: no configuration of the search can run.
        SpecError: a file of the user's code cannot be read.
    """
    spec = run.spec
    source = choose_code(run, spec, Path.cwd(), keep=True)
    largest = find_largest_local_batch(spec, inspection)
    chosen_by_auto = spec.search.strategy == "auto"
    spec = choose_strategy(spec, dataset_size=inspection.dataset_size, largest=largest, run=run)
    results = run.read_results()
    wanted_batches, round_ = _choose_local_batches_and_round(
        run.with_spec(spec), inspection, largest, results, node_hours_of_other_types=node_hours_of_other_types
    )
    known = {result.id for result in results if not (repeat_failed and isinstance(result, Failed))}
    tasks = []
    for nodes, local_batches in wanted_batches.items():
        job = f"probe-n{nodes:03d}"
        missing = tuple(sorted(local for local in local_batches if make_probe_id(nodes, local) not in known))
        if missing:
            tasks.append(
                ProbeTask(id=job, job=job, spec=spec, workdir=str(source.workdir), nodes=nodes, local_batches=missing)
            )
    in_rounds = spec.search.strategy == "adaptive"
    choice = ("search.strategy: auto chose adaptive",) if chosen_by_auto and in_rounds else ()
    total = sum(len(local_batches) for local_batches in wanted_batches.values())
    node_hours = compute_max_node_hours(spec, [task.nodes for task in tasks])
    return ProfilePlan(
        **vars(compute_max_cost(spec, node_hours, inspection.capacity)),
        tasks=tuple(tasks),
        total=total,
        done=total - sum(len(task.local_batches) for task in tasks),
        minutes_at_most=len(tasks) * spec.compute_measuring_minutes(),
        code=source,
        reasons=(*choice, *round_.reasons),
        certainty=round_.words,
        in_rounds=in_rounds,
    )


def _choose_local_batches_and_round(
    run: Run,
    inspection: Inspection,
    largest: LimitByNodes,
    results: Sequence[Result],
    *,
    node_hours_of_other_types: float,
) -> tuple[Mapping[int, Sequence[int]], Round]:
    """Return all local batches to measure by number of nodes; with `adaptive`, those so far and the next round."""
    spec = run.spec
    if spec.search.strategy != "adaptive":
        return choose_probes(spec, dataset_size=inspection.dataset_size, max_local_batch=largest), Round({}, (), "")
    submitted = {
        (task.nodes, size) for task in run.read_snapshot().submitted_probe_tasks for size in task.local_batches
    }
    settled = {(r.nodes, r.local_batch) for r in results if not isinstance(r, Failed)}
    candidates = list_feasible_candidates(spec, dataset_size=inspection.dataset_size, max_local_batch=largest)
    searched = {(config.nodes, config.compute_local_batch(spec.cluster.gpus_per_node)) for config in candidates}
    failed = {(r.nodes, r.local_batch) for r in results if isinstance(r, Failed)} & searched
    # The current round must finish, except for failed probes, before the next one is chosen.
    open_ = (submitted - settled) & searched
    if open_ - failed:
        return group_probes_by_nodes(settled | open_), Round({}, (), "")
    from tula_cli.services.measurements import (  # numpy, which the other strategies do not need
        list_observations_from_trainings,
        read_measurements_of_other_sizes,
    )

    exists = run.exists  # a first plan needs nothing of other runs, which may be damaged
    fresh = choose_next_round(
        spec,
        results,
        inspection=inspection,
        attempts=run.read_attempts() if exists else (),
        trained=list_observations_from_trainings(run).steps if exists else (),
        others=read_measurements_of_other_sizes(run) if exists else None,
    )
    fresh = _limit_round_to_cap(spec, fresh, spent=node_hours_of_other_types + count_measured_node_hours(run))
    picked = {(nodes, size) for nodes, sizes in fresh.probes.items() for size in sizes}
    return group_probes_by_nodes(settled | failed | picked), fresh


def count_measured_node_hours(run: RunDir) -> float:
    """Return the node-hours used by profiling so far, including resume tests and the first job that built the model."""
    tasks = run.read_snapshot().select_tasks(MeasuringTask)
    nodes = {task.id: task.nodes for task in tasks}
    return first_job.count_node_hours(run) + sum(
        nodes[attempt.task] * attempt.compute_duration_seconds() / 3600
        for attempt in run.read_attempts()
        if attempt.task in nodes
    )


def _limit_round_to_cap(spec: JobSpec, round_: Round, *, spent: float) -> Round:
    """Drop a further round that might exceed the cap on node-hours; `require_within_cap` checks the first round."""
    cap = spec.search.max_node_hours
    at_most = compute_max_node_hours(spec, list(round_.probes))
    if cap is None or not round_.probes or not round_.words or spent + at_most <= cap:
        return round_
    why = f"Stopped: a further round may take {at_most:.3g} node-hours, and {spent:.2g} of {cap:g} are spent. To continue, raise the limit: --set search.max_node_hours={2 * cap:g}"
    return Round({}, (), f"{round_.words} {why}")


def compute_max_node_hours(spec: JobSpec, nodes: Sequence[int]) -> float:
    """Return the maximum node-hours of profiling on these numbers of nodes: the time requested from SLURM."""
    return sum(nodes) * spec.compute_measuring_minutes() / 60


def plan_upper_bound(spec: JobSpec, *, why: NotInspectable | None) -> UpperBoundPlan:
    """Return the maximum cost of profiling before the dataset's size and the memory are known.

    Args:
        why: why the model and the dataset cannot be inspected here; None if they were.
    """
    search = spec.search
    first_job_minutes = first_job.INSPECTION_JOB_MINUTES if why else 0.0
    probes = compute_max_node_hours(spec, search.nodes)
    total, cap = first_job_minutes / 60 + probes, search.max_node_hours
    node_hours = total if cap is None else max(first_job_minutes / 60, min(total, cap))
    return UpperBoundPlan(
        **vars(compute_max_cost(spec, node_hours, spec.cluster.memory_per_gpu)),
        why=why.message if why else "",
        remedy=why.remedy if why else "",
        first_job_minutes=first_job_minutes,
        nodes=tuple(search.nodes),
        probe_node_hours=probes,
        cap=cap,
        adaptive=search.strategy in ("auto", "adaptive"),
    )
