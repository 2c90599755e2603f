"""`tula profile`: find the missing probes and their maximum cost, and submit them."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tula_cli.cluster.inspection import NotInspectable
from tula_cli.cluster.launcher import Launcher, list_attachable_jobs, list_unfinished_jobs, lock_submission, submit_task
from tula_cli.cluster.slurm import first_job
from tula_cli.errors import BadMeasurements, JobFailed, OutOfMemoryAtMinimum
from tula_cli.host.failures import FAILURE_KINDS, advise
from tula_cli.models.cost import MaxCost, compute_max_cost
from tula_cli.run.code import choose_code, take_snapshot
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.imports import Source
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.tasks import MeasuringTask, ProbeTask, make_probe_id
from tula_cli.services.search import (
    Round,
    choose_next_round,
    choose_probes,
    find_largest_local_batch,
    group_probes_by_nodes,
    list_feasible_candidates,
)
from tula_cli.services.search_cost import choose_strategy
from tula_cli.services.status import count_notes
from tula_cli.spec.job import JobSpec

MAX_EXIT_SECONDS = 60.0
"""How long to wait for a job to exit that has all its results."""


@dataclass(frozen=True)
class ProfilePlan(MaxCost):
    """The probes that profiling would run now, those without a result, and their maximum cost."""

    tasks: tuple[ProbeTask, ...]  # one job a number of nodes, those with missing probes only
    total: int  # probes of the whole search
    done: int
    minutes_at_most: float  # of all jobs, one after the other
    code: Source  # the user's own code that they run
    reasons: tuple[str, ...] = ()  # why each of these probes, with strategy: adaptive
    certainty: str = ""  # how certain the decisions are, with strategy: adaptive
    in_rounds: bool = False  # further probes may follow from the results

    @property
    def missing(self) -> int:
        return sum(len(task.local_batches) for task in self.tasks)

    @property
    def jobs(self) -> dict[str, ProbeTask]:
        """The task of each job."""
        return {task.job: task for task in self.tasks}


@dataclass(frozen=True)
class ProfileReport:
    """The measurements so far."""

    measured: tuple[Measured, ...]
    out_of_memory: tuple[OutOfMemory, ...]
    failed: tuple[Failed, ...]
    missing: tuple[str, ...]  # ids
    certainty: str = ""  # how certain the decisions are and why no more is measured, with strategy: adaptive
    notes: tuple[str, ...] = ()  # what the probes of a script do not tell, and why

    @property
    def is_complete(self) -> bool:
        """Whether no probe has failed or is missing."""
        return not self.failed and not self.missing


def plan_probes(run: Run, inspection: Inspection, *, elsewhere: float = 0.0, again: bool = True) -> ProfilePlan:
    """Return the missing probes, grouped into jobs, and their maximum cost.

    Args:
        run: the run, which may have results already or not exist yet.
        inspection: dataset size and memory estimate.
        elsewhere: node-hours that other node types of the same job have used or are about to use.
        again: whether failed probes are measured again.

    Raises:
        Infeasible: no configuration of the search can run.
        SpecError: a file of the user's code cannot be read.
    """
    spec = run.spec
    source = choose_code(run, spec, Path.cwd(), keep=True)
    largest = find_largest_local_batch(spec, inspection)
    chosen_by_auto = spec.search.strategy == "auto"
    spec = choose_strategy(spec, dataset_size=inspection.dataset_size, largest=largest, run=run)
    results_by_id = {result.id: result for result in run.read_results()}
    wanted_batches, round_ = _choose_batches(run.with_spec(spec), inspection, results_by_id, elsewhere=elsewhere)
    tasks = []
    for nodes, local_batches in wanted_batches.items():
        missing = [
            local for local in local_batches if _is_open(results_by_id.get(make_probe_id(nodes, local)), again=again)
        ]
        if missing:
            tasks.append(_make_probe_task(spec, nodes, missing, workdir=source.workdir))
    in_rounds = spec.search.strategy == "adaptive"
    choice = ("search.strategy: auto chose adaptive",) if chosen_by_auto and in_rounds else ()
    total = sum(len(local_batches) for local_batches in wanted_batches.values())
    node_hours = compute_max_node_hours(spec, [task.nodes for task in tasks])
    return ProfilePlan(
        **vars(compute_max_cost(spec, node_hours, inspection.capacity)),
        tasks=tuple(tasks),
        total=total,
        done=total - sum(len(task.local_batches) for task in tasks),
        minutes_at_most=len(tasks) * spec.measuring_minutes(),
        code=source,
        reasons=(*choice, *round_.reasons),
        certainty=round_.words,
        in_rounds=in_rounds,
    )


Known = Mapping[str, Measured | OutOfMemory | Failed]
"""Results by their ids."""


def _choose_batches(
    run: Run, inspection: Inspection, results_by_id: Known, *, elsewhere: float
) -> tuple[Mapping[int, Sequence[int]], Round]:
    """Return all local batches to measure by number of nodes; with `adaptive`, those so far and the next round."""
    spec = run.spec
    largest = find_largest_local_batch(spec, inspection)
    if spec.search.strategy != "adaptive":
        return choose_probes(spec, dataset_size=inspection.dataset_size, max_local_batch=largest), Round({}, (), "")
    begun_probes = _list_begun_probes(run)
    settled = {probe for probe in begun_probes if _is_settled(results_by_id.get(make_probe_id(*probe)))}
    candidates = list_feasible_candidates(spec, dataset_size=inspection.dataset_size, max_local_batch=largest)
    searched = {(config.nodes, config.local_batch(spec.cluster.gpus_per_node)) for config in candidates}
    failed = {(r.nodes, r.local_batch) for r in results_by_id.values() if isinstance(r, Failed)} & searched
    # A round that is under way: the next one follows from its results, without those that failed.
    open_ = (begun_probes - settled) & searched
    if open_ - failed:
        return group_probes_by_nodes(settled | open_), Round({}, (), "")
    fresh = choose_next_round(
        spec,
        list(results_by_id.values()),
        inspection=inspection,
        **_collect_adaptive_inputs(run, results_by_id),
    )
    fresh = _limit_round_to_cap(spec, fresh, spent=elsewhere + count_measured_node_hours(run))
    picked = {(nodes, size) for nodes, sizes in fresh.probes.items() for size in sizes}
    return group_probes_by_nodes(settled | failed | picked), fresh


def _collect_adaptive_inputs(run: Run, results_by_id: Known) -> dict[str, Any]:
    """Return the inputs of an adaptive search other than probes, as arguments of `choose_next_round`."""
    if not run.exists:
        return {}
    from tula_cli.services.recommendation.measurements import (
        CachedTrainings,
        list_observations_from_trainings,
        read_measurements_of_other_sizes,
    )

    return {
        "attempts": run.read_attempts(),
        "trained": list_observations_from_trainings(run, list(results_by_id.values())).steps,
        "others": read_measurements_of_other_sizes(run.sizes, CachedTrainings()),
    }


def _list_begun_probes(run: RunDir) -> set[tuple[int, int]]:
    """Return all probes that were requested or have a result, as (nodes, local batch)."""
    requested = {(task.nodes, size) for task in run.read().probe_tasks for size in task.local_batches}
    return requested | {(result.nodes, result.local_batch) for result in run.read_results() if _is_settled(result)}


def count_measured_node_hours(run: RunDir) -> float:
    """Return the node-hours used by profiling so far, including resume tests and the first job that built the model."""
    tasks = [task for task in run.read_tasks() if isinstance(task, MeasuringTask)]
    nodes = {task.id: task.nodes for task in tasks}
    return first_job.count_node_hours(run) + sum(
        nodes[attempt.task] * attempt.count_seconds() / 3600 for attempt in run.read_attempts() if attempt.task in nodes
    )


def _limit_round_to_cap(spec: JobSpec, round_: Round, *, spent: float) -> Round:
    """Drop a further round that might exceed the cap on node-hours; `require_within_cap` checks the first round."""
    cap = spec.search.max_node_hours
    at_most = compute_max_node_hours(spec, list(round_.probes))
    if cap is None or not round_.probes or not round_.words or spent + at_most <= cap:
        return round_
    why = f"Stopped: a further round may take {at_most:.3g} node-hours, and {spent:.2g} of {cap:g} are spent. To continue, raise the limit: --set search.max_node_hours={2 * cap:g}"
    return Round({}, (), f"{round_.words} {why}")


def _is_settled(result: Measured | OutOfMemory | Failed | None) -> bool:
    return isinstance(result, Measured | OutOfMemory)


def _is_open(result: Measured | OutOfMemory | Failed | None, *, again: bool) -> bool:
    return result is None or (again and isinstance(result, Failed))


def _make_probe_task(spec: JobSpec, nodes: int, local_batches: list[int], *, workdir: Path) -> ProbeTask:
    job = f"probe-n{nodes:03d}"
    return ProbeTask(
        id=job, job=job, spec=spec, workdir=str(workdir), nodes=nodes, local_batches=tuple(sorted(local_batches))
    )


def compute_max_node_hours(spec: JobSpec, nodes: Sequence[int]) -> float:
    """Return the maximum node-hours of profiling on these numbers of nodes: the time requested from SLURM."""
    return sum(nodes) * spec.measuring_minutes() / 60


def submit_probes(run: RunDir, plan: ProfilePlan, launcher: Launcher) -> tuple[str, ...]:
    """Submit the jobs of a plan, one after another; jobs that are already waiting or running are left alone.

    The user's code is copied first, so that later edits do not affect submitted jobs.

    Returns:
        The ids of the jobs to wait for.
    """
    jobs = plan.jobs
    with lock_submission(run):
        alive = list_attachable_jobs(run, launcher, jobs)
        code = take_snapshot(run, plan.tasks[0].spec, plan.code) if jobs.keys() - alive else ""
        for id_, task in jobs.items():
            if id_ not in alive:
                submit_task(run, launcher, task.model_copy(update={"code": code}))
    return tuple(jobs)


def wait_for_exits(
    run: RunDir, launcher: Launcher, plan: ProfilePlan, *, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Wait until those jobs of a plan have exited that have all results of the round before.

    A round submits jobs of the same ids as the one before. While a job of that round exits, it would pass for the job that
    measures this one.
    """
    pause, remaining = plan.tasks[0].spec.cluster.backend.poll[0], MAX_EXIT_SECONDS
    while remaining > 0 and any(
        run.is_finished(task)
        for id_ in list_unfinished_jobs(run, launcher, list(plan.jobs))
        for task in run.read().list_tasks_of_job(id_)
    ):
        sleep(pause)
        remaining -= pause


def is_measured(run: RunDir, plan: ProfilePlan) -> bool:
    """Return whether every probe of a plan has a result, and at least one did not fail (measured or out of memory)."""
    results = [run.read_result(make_probe_id(task.nodes, size)) for task in plan.tasks for size in task.local_batches]
    return None not in results and any(map(_is_settled, results))


def make_profile_report(run: RunDir, plan: ProfilePlan) -> ProfileReport:
    """Return the results of a finished profile.

    Raises:
        OutOfMemoryAtMinimum: no local batch fits.
        JobFailed, Diverged: probes failed, and none was measured now.
        BadMeasurements: none was measured for another reason.
    """
    results = run.read_results()
    measured = tuple(result for result in results if isinstance(result, Measured))
    failed = tuple(result for result in results if isinstance(result, Failed))
    out_of_memory = tuple(result for result in results if isinstance(result, OutOfMemory))
    known_ids = {result.id for result in results}
    wanted_ids = [make_probe_id(task.nodes, local) for task in plan.tasks for local in task.local_batches]
    missing = tuple(i for i in wanted_ids if i not in known_ids)
    report = ProfileReport(measured, out_of_memory, failed, missing, plan.certainty, count_notes(measured))
    of_plan = [result for result in results if result.id in wanted_ids]
    if not measured or (of_plan and all(isinstance(result, Failed) for result in of_plan)):
        raise _make_nothing_measured_error(report, next((task.spec for task in plan.tasks), None))
    return report


def _make_nothing_measured_error(report: ProfileReport, spec: JobSpec | None) -> Exception:
    if report.failed:
        first_failure = report.failed[0]
        alike = all(result.outcome == first_failure.outcome for result in report.failed)
        kind = FAILURE_KINDS[first_failure.outcome].error if alike else JobFailed
        return kind(
            f"{first_failure.id} failed: {first_failure.message}",
            advise(first_failure.failure, spec),
        )
    if report.out_of_memory:
        first_oom = report.out_of_memory[0]
        return OutOfMemoryAtMinimum(
            f"out of memory at the smallest local batch, {first_oom.local_batch}: {first_oom.message}",
            advise("device_oom", spec),
        )
    return BadMeasurements("no probe has a result", "run tula profile again; tula status shows the jobs")


# --- Plans before the job is known


@dataclass(frozen=True)
class UpperBoundPlan(MaxCost):
    """A first job on one node, and the probes that depend on its result: their maximum cost, within the cap."""

    why: str  # it is not done here; empty where it was
    remedy: str  # what would make it possible here
    first_job_minutes: float  # 0 where there is none
    nodes: tuple[int, ...]  # of the search
    probe_node_hours: float  # at most; of one round with search.strategy: adaptive
    cap: float | None  # search.max_node_hours: more is not started
    adaptive: bool  # further rounds may follow

    @property
    def first_job_node_hours(self) -> float:
        """Node-hours of the first job."""
        return self.first_job_minutes / 60


def plan_upper_bound(spec: JobSpec, *, why: NotInspectable | None) -> UpperBoundPlan:
    """Return the maximum cost of profiling before the dataset's size and the memory are known.

    Args:
        spec: the job.
        why: why the model and the dataset cannot be inspected here; None if they were.
    """
    search = spec.search
    first_job_minutes = first_job.MINUTES if why else 0.0
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
