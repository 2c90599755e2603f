"""`tula profile`: find the missing probes and their maximum cost, submit them in rounds over all node types, and wait."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tula_cli.cluster.inspection import NotInspectable
from tula_cli.cluster.launcher import Launcher, list_unfinished_jobs, lock_submission, submit_missing
from tula_cli.cluster.slurm import first_job
from tula_cli.errors import (
    BadMeasurements,
    Infeasible,
    JobFailed,
    OutOfMemoryAtMinimum,
    SpecError,
    TulaError,
    UnreadableFile,
)
from tula_cli.host.failures import FAILURE_KINDS, describe_advice
from tula_cli.models.cost import compute_max_cost
from tula_cli.models.out_of_memory import LESS_MEMORY_HINT, LESS_MEMORY_HINT_FOR_SCRIPT
from tula_cli.run.code import choose_code
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.format import require_current_format
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.tasks import BatchBounds, MeasuringTask, ProbeTask, make_probe_id
from tula_cli.services import messages
from tula_cli.services.events import Note, ProfilePlanned, WarningEvent, Work
from tula_cli.services.job_warnings import warn_large_reference_batch
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
from tula_cli.services.site_charges import bill_run_by_site, warn_balance_for_probes
from tula_cli.services.status import summarize_probe_notes
from tula_cli.services.waiting import (
    DetachedJobs,
    Submission,
    explain_interruption,
    require_within_cap,
    wait_for_jobs,
    warn_about_submitted_jobs,
)
from tula_cli.spec.job import JobSpec
from tula_cli.spec.sections import MEMORY_MARGIN, MIN_TIMED_STEPS
from tula_cli.words import describe_node_type, format_count

MAX_EXIT_SECONDS = 60.0
"""How long to wait for a job to exit that has all its results."""


@dataclass(frozen=True)
class ProfileReport:
    """The measurements so far."""

    measured: tuple[Measured, ...]
    out_of_memory: tuple[OutOfMemory, ...]
    failed: tuple[Failed, ...]
    missing: tuple[str, ...]  # ids of probes without a result
    certainty: str = ""  # how certain the decisions are and why no more is measured, with strategy: adaptive
    notes: tuple[str, ...] = ()  # quantities that the script's probes could not measure, and why

    @property
    def is_complete(self) -> bool:
        """Whether no probe has failed or is missing."""
        return not self.failed and not self.missing


def plan_probes(
    run: Run, inspection: Inspection, *, node_hours_of_other_types: float = 0.0, repeat_failed: bool = True
) -> ProfilePlan:
    """Return the missing probes, grouped into jobs, and their maximum cost.

    Args:
        run: the run, which may have results already or not exist yet.
        inspection: dataset size and memory estimate.
        node_hours_of_other_types: node-hours that other node types of the same job have used or are about to use.
        repeat_failed: whether failed probes are measured again.

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
    wanted_batches, round_ = _choose_batches(
        run.with_spec(spec), inspection, results_by_id, node_hours_of_other_types=node_hours_of_other_types
    )
    tasks = []
    for nodes, local_batches in wanted_batches.items():
        missing = [
            local
            for local in local_batches
            if _needs_measurement(results_by_id.get(make_probe_id(nodes, local)), repeat_failed=repeat_failed)
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
        minutes_at_most=len(tasks) * spec.get_measuring_minutes(),
        code=source,
        reasons=(*choice, *round_.reasons),
        certainty=round_.words,
        in_rounds=in_rounds,
    )


ResultsById = Mapping[str, Measured | OutOfMemory | Failed]
"""Results by their ids."""


def _choose_batches(
    run: Run, inspection: Inspection, results_by_id: ResultsById, *, node_hours_of_other_types: float
) -> tuple[Mapping[int, Sequence[int]], Round]:
    """Return all local batches to measure by number of nodes; with `adaptive`, those so far and the next round."""
    spec = run.spec
    largest = find_largest_local_batch(spec, inspection)
    if spec.search.strategy != "adaptive":
        return choose_probes(spec, dataset_size=inspection.dataset_size, max_local_batch=largest), Round({}, (), "")
    begun_probes = _list_begun_probes(run)
    settled = {probe for probe in begun_probes if _has_final_result(results_by_id.get(make_probe_id(*probe)))}
    candidates = list_feasible_candidates(spec, dataset_size=inspection.dataset_size, max_local_batch=largest)
    searched = {(config.nodes, config.local_batch(spec.cluster.gpus_per_node)) for config in candidates}
    failed = {(r.nodes, r.local_batch) for r in results_by_id.values() if isinstance(r, Failed)} & searched
    # The current round must finish, except for failed probes, before the next one is chosen.
    open_ = (begun_probes - settled) & searched
    if open_ - failed:
        return group_probes_by_nodes(settled | open_), Round({}, (), "")
    fresh = choose_next_round(
        spec,
        list(results_by_id.values()),
        inspection=inspection,
        **_collect_adaptive_search_inputs(run, results_by_id),
    )
    fresh = _limit_round_to_cap(spec, fresh, spent=node_hours_of_other_types + count_measured_node_hours(run))
    picked = {(nodes, size) for nodes, sizes in fresh.probes.items() for size in sizes}
    return group_probes_by_nodes(settled | failed | picked), fresh


def _collect_adaptive_search_inputs(run: Run, results_by_id: ResultsById) -> dict[str, Any]:
    """Return the inputs of an adaptive search other than probes, as arguments of `choose_next_round`."""
    if not run.exists:
        return {}
    from tula_cli.services.measurements import (
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
    """Return all probes that were submitted or have a result, as (nodes, local batch)."""
    submitted = {
        (task.nodes, size) for task in run.read_snapshot().submitted_probe_tasks for size in task.local_batches
    }
    return submitted | {
        (result.nodes, result.local_batch) for result in run.read_results() if _has_final_result(result)
    }


def count_measured_node_hours(run: RunDir) -> float:
    """Return the node-hours used by profiling so far, including resume tests and the first job that built the model."""
    tasks = run.read_snapshot().select_tasks(MeasuringTask)
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


def _has_final_result(result: Measured | OutOfMemory | Failed | None) -> bool:
    return isinstance(result, Measured | OutOfMemory)


def _needs_measurement(result: Measured | OutOfMemory | Failed | None, *, repeat_failed: bool) -> bool:
    return result is None or (repeat_failed and isinstance(result, Failed))


def _make_probe_task(spec: JobSpec, nodes: int, local_batches: list[int], *, workdir: Path) -> ProbeTask:
    job = f"probe-n{nodes:03d}"
    return ProbeTask(
        id=job, job=job, spec=spec, workdir=str(workdir), nodes=nodes, local_batches=tuple(sorted(local_batches))
    )


def compute_max_node_hours(spec: JobSpec, nodes: Sequence[int]) -> float:
    """Return the maximum node-hours of profiling on these numbers of nodes: the time requested from SLURM."""
    return sum(nodes) * spec.get_measuring_minutes() / 60


def submit_probes(run: RunDir, plan: ProfilePlan, launcher: Launcher) -> tuple[str, ...]:
    """Submit the jobs of a plan, one after another; jobs that are already waiting or running are left alone.

    Returns:
        The ids of the jobs to wait for.
    """
    with lock_submission(run):
        submit_missing(run, launcher, plan.tasks, plan.code)
    return tuple(plan.jobs)


def wait_for_exits(
    run: RunDir, launcher: Launcher, plan: ProfilePlan, *, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Wait until the jobs of a plan that have all results of the previous round have exited.

    A round submits jobs of the same ids as the one before. While a job of that round exits, it would pass for the job that
    measures this one.
    """
    pause, remaining = plan.tasks[0].spec.cluster.backend.poll[0], MAX_EXIT_SECONDS
    while remaining > 0 and any(
        run.is_finished(task)
        for id_ in list_unfinished_jobs(run, launcher, list(plan.jobs))
        for task in run.read_snapshot().list_tasks_of_job(id_)
    ):
        sleep(pause)
        remaining -= pause


def is_measured(run: RunDir, plan: ProfilePlan) -> bool:
    """Return whether every probe of a plan has a result, and at least one did not fail (measured or out of memory)."""
    results = [run.read_result(make_probe_id(task.nodes, size)) for task in plan.tasks for size in task.local_batches]
    return None not in results and any(map(_has_final_result, results))


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
    report = ProfileReport(measured, out_of_memory, failed, missing, plan.certainty, summarize_probe_notes(measured))
    of_plan = [result for result in results if result.id in wanted_ids]
    if not measured or (of_plan and all(isinstance(result, Failed) for result in of_plan)):
        raise _make_nothing_measured_error(report, next((task.spec for task in plan.tasks), None))
    return report


def _make_nothing_measured_error(report: ProfileReport, spec: JobSpec | None) -> Exception:
    if report.failed:
        first_failure = report.failed[0]
        have_same_outcome = all(result.outcome == first_failure.outcome for result in report.failed)
        kind = FAILURE_KINDS[first_failure.outcome].error if have_same_outcome else JobFailed
        return kind(
            f"{first_failure.id} failed: {first_failure.message}",
            describe_advice(first_failure.failure, spec),
        )
    if report.out_of_memory:
        first_oom = report.out_of_memory[0]
        return OutOfMemoryAtMinimum(
            f"out of memory at the smallest local batch, {first_oom.local_batch}: {first_oom.message}",
            describe_advice("device_oom", spec),
        )
    return BadMeasurements("no probe has a result", "run tula profile again; tula status shows the jobs")


# --- Plans before the job is inspected


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


TRIAL_SECONDS = 10.0
"""Longest warm-up and longest timing of a trial, in seconds: with its other measurements it takes about a minute at most."""


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch that has fitted on one number of nodes. Batches are in samples, memory in bytes of one GPU."""

    nodes: int
    gpus_per_node: int
    batch: int  # global
    local_batch: int  # of one GPU; it ran
    too_large: int | None  # the smallest local batch above it that did not fit; None if none was tried
    limit: int  # largest local batch of the search: that of the dataset or of search.max_batch
    capacity: int | None  # bytes of memory per rank; None if unknown
    headroom: float | None  # share of the capacity that the largest local batch leaves free
    margin: float  # share of the capacity that tula keeps free in a training
    local_batch_with_margin: int | None  # largest local batch that leaves the margin free; None if unknown
    finished: bool  # whether the search is over; else the same command continues it
    measured: tuple[Measured, ...]  # measured probes on these nodes
    out_of_memory: tuple[OutOfMemory, ...]
    failed: tuple[Failed, ...]

    @property
    def is_complete(self) -> bool:
        """Whether the search is over."""
        return self.finished


def get_search_nodes(spec: JobSpec) -> int:
    """Return the number of nodes on which the largest batch is searched: the fewest of search.nodes."""
    return min(spec.search.nodes)


def make_largest_batch_bounds(spec: JobSpec, inspection: Inspection) -> BatchBounds:
    """Return the bounds of the search.

    Raises:
        SpecError: the ranks run on CPUs without a memory limit, so that no batch would fail.
        Infeasible: the dataset or search.max_batch does not allow one sample per GPU and micro-batch.
    """
    cluster, step = spec.cluster, spec.train.accumulate
    if cluster.memory_per_gpu is None and not cluster.backend.may_have_gpu(cluster.device, here=inspection.device):
        raise SpecError(
            "the largest batch is unlimited: the job runs on CPUs, whose processes have no memory limit",
            "set cluster.memory_per_gpu, for example to 16GiB",
        )
    ranks = get_search_nodes(spec) * cluster.gpus_per_node
    largest = min(inspection.dataset_size, spec.search.max_batch or inspection.dataset_size)
    limit = largest // (ranks * step) * step
    if not limit:
        raise Infeasible(
            f"the largest possible batch, {largest}, has less than one sample for each of {ranks} GPUs x {step} accumulation steps",
            "search fewer nodes",
        )
    return BatchBounds(
        limit=limit,
        start=min(limit, max(1, spec.search.min_batch // (ranks * step)) * step),
        capacity=inspection.capacity or cluster.memory_per_gpu,
        footprints=inspection.footprints,
    )


def plan_largest_batch_search(run: Run, inspection: Inspection) -> ProfilePlan:
    """Return the plan of the search for the largest batch from its next trial on; without tasks if the search is over.

    Raises:
        SpecError, Infeasible: as of `make_largest_batch_bounds`; or a file of the user's code cannot be read.
    """
    spec, nodes, bounds = run.spec, get_search_nodes(run.spec), make_largest_batch_bounds(run.spec, inspection)
    source = choose_code(run, spec, Path.cwd(), keep=True)
    done = [result for result in run.read_results() if result.nodes == nodes and not isinstance(result, Failed)]
    from tula_cli.models.largest_batch import BatchBracket  # numpy, which plans do without

    trial = BatchBracket.from_results(spec, nodes, bounds, done).choose_next_trial()
    seconds, steps = min(spec.search.max_seconds, TRIAL_SECONDS), min(spec.search.min_steps, MIN_TIMED_STEPS)
    short = {"max_seconds": seconds, "min_seconds": min(spec.search.min_seconds, seconds), "min_steps": steps}
    job = f"largest-n{nodes:03d}"
    task = ProbeTask(
        id=job,
        job=job,
        spec=spec.model_copy(update={"search": spec.search.model_copy(update=short)}),
        workdir=str(source.workdir),
        nodes=nodes,
        local_batches=() if trial is None else (trial,),
        bounds=bounds,
    )
    tasks = () if trial is None else (task,)
    node_hours = compute_max_node_hours(spec, [task.nodes for task in tasks])
    return ProfilePlan(
        **vars(compute_max_cost(spec, node_hours, inspection.capacity)),
        tasks=tasks,
        total=len(done) + len(tasks),
        done=len(done),
        minutes_at_most=len(tasks) * spec.get_measuring_minutes(),
        code=source,
    )


def make_largest_batch(run: Run, inspection: Inspection, plan: ProfilePlan) -> LargestBatch:
    """Return the largest batch known so far.

    Raises:
        OutOfMemoryAtMinimum: not even the smallest batch fits.
        JobFailed, BadMeasurements: as of `make_profile_report`.
    """
    spec, nodes = run.spec, get_search_nodes(run.spec)
    report = make_profile_report(run, plan)
    from tula_cli.models.largest_batch import BatchBracket

    bracket = BatchBracket.from_results(spec, nodes, make_largest_batch_bounds(spec, inspection), run.read_results())
    if not bracket.fitting:
        raise OutOfMemoryAtMinimum(
            f"out of memory at local batch {bracket.failing} on {format_count(nodes)}",
            LESS_MEMORY_HINT if spec.script is None else LESS_MEMORY_HINT_FOR_SCRIPT,
        )
    return LargestBatch(
        nodes=nodes,
        gpus_per_node=spec.cluster.gpus_per_node,
        batch=bracket.fitting * nodes * spec.cluster.gpus_per_node,
        local_batch=bracket.fitting,
        too_large=bracket.failing,
        limit=bracket.bounds.limit,
        capacity=bracket.capacity,
        headroom=bracket.compute_headroom(),
        margin=MEMORY_MARGIN,
        local_batch_with_margin=bracket.estimate_largest(margin=MEMORY_MARGIN),
        finished=bracket.choose_next_trial() is None,
        measured=tuple(result for result in report.measured if result.nodes == nodes),
        out_of_memory=tuple(result for result in report.out_of_memory if result.nodes == nodes),
        failed=tuple(result for result in report.failed if result.nodes == nodes),
    )


Plans = Sequence[tuple[Run, ProfilePlan]]


@dataclass(frozen=True)
class ProfileResult:
    """The measurements of each variant (node type); the key is None for a job without variants."""

    reports: Mapping[str | None, ProfileReport | LargestBatch]
    partial: bool  # a probe failed or has no result, or a type has none at all


@dataclass(frozen=True)
class SubmittedProbes(DetachedJobs):
    """Submitted probes that are not waited for, and the plans that they belong to."""

    plans: Mapping[str | None, ProfilePlan]


@dataclass(frozen=True)
class DryRun:
    """The job scripts for one node type, as text."""

    plan: ProfilePlan | UpperBoundPlan
    scripts: tuple[str, ...]


Inspections = Mapping[str | None, Inspection]
"""Inspections of the model and the dataset, by the name of a variant."""


def plan_probes_of_runs(
    runs: Sequence[Run], inspections: Inspections, *, repeat_failed: bool = True, largest: bool = False
) -> Work[list[tuple[Run, ProfilePlan]]]:
    """Return the planned probes of each run; a run without a feasible configuration is left out with a warning.

    Args:
        repeat_failed: whether failed probes are measured again.
        largest: whether to search for the largest batch that fits, one trial after another.

    Raises:
        Infeasible: no run has a feasible configuration.
    """
    planned: list[tuple[Run, ProfilePlan]] = []
    errors = []
    has_rounds = any(run.spec.search.strategy in ("auto", "adaptive") for run in runs)
    measured_node_hours = {run.type: count_measured_node_hours(run) if has_rounds else 0.0 for run in runs}
    for run in runs:
        node_hours_of_other_types = (
            sum(measured_node_hours.values())
            - measured_node_hours[run.type]
            + sum(plan.node_hours_at_most for _, plan in planned)
        )
        inspection = inspections[run.type]
        for text in inspection.warnings:
            yield WarningEvent(messages.inspection_warning(text=text))
        if run is runs[0]:
            yield from map(WarningEvent, warn_large_reference_batch(run.spec, inspection.dataset_size))
        try:
            plan = (
                plan_largest_batch_search(run, inspection)
                if largest
                else plan_probes(
                    run, inspection, node_hours_of_other_types=node_hours_of_other_types, repeat_failed=repeat_failed
                )
            )
            planned.append((run, plan))
        except Infeasible as error:
            errors.append((run.type, error))
    if not planned:
        raise errors[0][1]
    for name, infeasible in errors:
        if name is not None:
            yield WarningEvent(messages.part_left_out(part=describe_node_type(name), reason=infeasible.message))
    yield from (WarningEvent(warning) for _, plan in planned for warning in plan.code.warnings)
    return planned


def inspect_variant(run: Run, inspect: Callable[[JobSpec], Inspection]) -> Inspection | NotInspectable:
    """Return a stored or new inspection of a variant, or the error (see `inspect_if_possible`)."""
    return first_job.inspect_if_possible(run.spec, first_job.inspect_with_stored(inspect, run))


def _plan_first_jobs(
    runs: Sequence[Run], inspections: Mapping[str | None, Inspection | NotInspectable]
) -> dict[str | None, UpperBoundPlan]:
    """Return the plan of each variant of a job of which some model and dataset must first be inspected on a node."""
    failures = {name: inspection for name, inspection in inspections.items() if isinstance(inspection, NotInspectable)}
    return {run.type: plan_upper_bound(run.spec, why=failures.get(run.type)) for run in runs}


def make_dry_run(
    runs: Sequence[Run], submission: Submission, *, largest: bool = False
) -> Work[dict[str | None, DryRun]]:
    """Return the jobs that would be submitted on each node type; nothing is written.

    Args:
        runs, submission, largest: as of `run_profile`.

    Raises:
        Infeasible: no configuration is feasible.
    """
    variants = yield from _prepare_runs(runs)
    inspections = {variant.type: inspect_variant(variant, submission.inspect) for variant in variants}
    settled = {
        name: inspection for name, inspection in inspections.items() if not isinstance(inspection, NotInspectable)
    }
    if len(settled) < len(inspections):
        planned = _plan_first_jobs(variants, inspections)
        scripts = {
            variant.type: ()
            if variant.type in settled
            else (first_job.render_inspection_script(variant, variant.spec),)
            for variant in variants
        }
        return {name: DryRun(plan, scripts[name]) for name, plan in planned.items()}
    dry_runs = {}
    for variant, plan in (yield from plan_probes_of_runs(variants, settled, largest=largest)):
        launcher = submission.launcher_for(variant.spec)
        dry_runs[variant.type] = DryRun(plan, tuple(launcher.render_script(variant, task) for task in plan.tasks))
    return dry_runs


def _prepare_runs(runs: Sequence[Run]) -> Work[list[Run]]:
    """Return the runs to measure, with the billing of their site, after checking that jobs may be submitted in them.

    Raises:
        OtherFormat: a run has an older format.
        UnreadableFile: a result may be intact, but cannot be read: it is not measured again.
    """
    for run in runs:
        require_current_format(run.path)
        snapshot = run.read_snapshot()
        for error in snapshot.damaged:
            if isinstance(error, UnreadableFile):
                raise error
        yield from map(WarningEvent, (*snapshot.job_warnings, *snapshot.record_warnings))
    return [bill_run_by_site(run) for run in runs]


def run_profile(
    runs: Sequence[Run],
    submission: Submission,
    *,
    largest: bool = False,
) -> Work[ProfileResult | SubmittedProbes]:
    """Measure the missing probes, round after round; jobs that are already running are attached to.

    Args:
        largest: search for the largest batch that fits, on the fewest nodes, instead of the probes of the search.

    Raises:
        OtherFormat: the run has an older format.
        Infeasible: no configuration is feasible.
        OverBudget: the search exceeds search.max_node_hours, or was not confirmed.
        Pending: the timeout has passed.
        Interruption: Ctrl-C; the jobs continue to run.
        JobFailed, OutOfMemoryAtMinimum, BadMeasurements: nothing was measured.
        SchedulerError: the scheduler refused a job.
    """
    runs = yield from _prepare_runs(runs)
    return (yield from _ProfilingSession(runs, submission, largest).run())


@dataclass
class _SubmittedRun:
    """The jobs that measure one variant of a job."""

    run: Run
    plan: ProfilePlan
    launcher: Launcher
    started: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.under_way = list_unfinished_jobs(self.run, self.launcher, list(self.plan.jobs))

    @property
    def has_missing(self) -> bool:
        """Whether some of the jobs are still to be submitted."""
        return len(self.under_way) < len(self.plan.jobs)

    @property
    def may_continue(self) -> bool:
        """Whether the results may lead to a further round."""
        return self.plan.in_rounds and is_measured(self.run, self.plan)


@dataclass
class _ProfilingSession:
    """The state of one call of `run_profile`."""

    runs: Sequence[Run]
    submission: Submission
    largest: bool
    confirmed: bool = False
    is_started: bool = False  # the plan of the search was shown, and its first round submitted
    first_jobs: float = 0.0  # node-hours that building the model and the dataset on nodes has taken

    @property
    def cap(self) -> float | None:
        """Maximum node-hours of all runs together."""
        return self.runs[0].spec.search.max_node_hours

    def _inspect_variants(self, deadline: float | None) -> Work[Inspections]:
        """Inspect the model and the dataset: here or, if that is not possible, on a node after confirmation."""
        results = {run.type: inspect_variant(run, self.submission.inspect) for run in self.runs}
        inspections = {
            name: inspection for name, inspection in results.items() if not isinstance(inspection, NotInspectable)
        }
        runs_to_inspect = [run for run in self.runs if run.type not in inspections]
        if not runs_to_inspect:
            return inspections
        for run in runs_to_inspect:
            self.submission.launcher_for(run.spec)  # raises an error if no job can be submitted from this machine
        plans = _plan_first_jobs(self.runs, results)
        planned_event = ProfilePlanned(plans, self.cap)
        yield planned_event
        require_within_cap([], self.cap, first_jobs=sum(plan.first_job_node_hours for plan in plans.values()))
        self.submission.require_confirmed(planned_event)
        self.confirmed = True
        self.submission.save_runs(runs_to_inspect)
        for run in runs_to_inspect:
            inspections[run.type] = first_job.inspect_on_node(run, run.spec, timeout=self._remaining_seconds(deadline))
            self.first_jobs += first_job.count_newest_node_hours(run)
        return inspections

    def _remaining_seconds(self, deadline: float | None) -> float | None:
        """Return the seconds until the deadline, or None without a deadline."""
        return None if deadline is None else max(0.0, deadline - self.submission.clock())

    def run(self) -> Work[ProfileResult | SubmittedProbes]:
        timeout, clock = self.submission.timeout, self.submission.clock
        deadline = None if timeout is None else clock() + timeout
        inspections = yield from self._inspect_variants(deadline)
        stopped: set[str | None] = set()  # node types whose last round ended with results missing
        # repeat probes that failed before this call; those that fail now are left to the next call
        measures_failed_again = True
        while True:
            planned = yield from plan_probes_of_runs(
                self.runs, inspections, repeat_failed=measures_failed_again, largest=self.largest
            )
            missing = [(run, plan) for run, plan in planned if plan.missing and run.type not in stopped]
            if not missing:
                self.submission.save_runs([run for run, _ in planned])
                if not any(
                    plan.certainty for _, plan in planned
                ):  # for a search in rounds, the report states why it is finished
                    yield Note("all probes already have results")
                break
            jobs = yield from self._submit_round(planned, missing)
            if not all(self.submission.should_wait(submitted.run.spec) for submitted in jobs):
                return (yield from _list_submitted_probes(planned, jobs))
            yield from self._wait_for_round(jobs, deadline)
            measures_failed_again = False
            unfinished = {submitted.run.type for submitted in jobs if submitted.may_continue}
            stopped |= {submitted.run.type for submitted in jobs} - unfinished
            if not unfinished:
                break
        return (yield from self._collect_reports(planned, inspections))

    def _collect_reports(self, planned: Plans, inspections: Inspections) -> Work[ProfileResult]:
        """Return the measurements; a variant without any is a warning if another can be trained.

        Raises:
            TulaError: no variant that can be trained was measured.
        """
        reports: dict[str | None, ProfileReport | LargestBatch] = {}
        errors: list[TulaError] = []
        for run, plan in planned:
            try:
                reports[run.type] = (
                    make_largest_batch(run, inspections[run.type], plan)
                    if self.largest
                    else make_profile_report(run, plan)
                )
            except (BadMeasurements, JobFailed, OutOfMemoryAtMinimum) as error:
                errors.append(error)
                if run.type is not None:
                    yield WarningEvent(messages.part_failed(part=describe_node_type(run.type), reason=error.message))
        if not reports:
            raise errors[0]
        return ProfileResult(reports, bool(errors) or any(not report.is_complete for report in reports.values()))

    def _submit_round(self, planned: Plans, missing: Plans) -> Work[list[_SubmittedRun]]:
        """Submit a round, after confirmation if there are jobs to submit."""
        for run, plan in missing:
            wait_for_exits(run, self.submission.launcher_for(run.spec), plan)
        jobs = [_SubmittedRun(run, plan, self.submission.launcher_for(run.spec)) for run, plan in missing]
        if any(submitted.has_missing for submitted in jobs):
            for run, plan in missing:
                yield from map(WarningEvent, warn_balance_for_probes(run.spec, plan.node_hours_at_most))
            planned_event = ProfilePlanned({run.type: plan for run, plan in planned}, self.cap, self.is_started)
            yield planned_event
            hours = [plan.node_hours_at_most for _, plan in planned]
            require_within_cap(hours, self.cap, first_jobs=self.first_jobs)
            if not self.confirmed:  # later rounds are covered by the first confirmation
                self.submission.require_confirmed(planned_event)
            self.confirmed = self.is_started = True
        self.submission.save_runs([run for run, _ in planned])
        with explain_interruption([run for run, _ in missing]):
            for submitted in jobs:
                submitted.started = submit_probes(submitted.run, submitted.plan, submitted.launcher)
        return jobs

    def _wait_for_round(self, jobs: Sequence[_SubmittedRun], deadline: float | None) -> Work[None]:
        """Wait until `deadline` for the jobs of one variant after another; all of them have been submitted."""
        with explain_interruption([submitted.run for submitted in jobs]):
            for submitted in jobs:
                if submitted.run.type is not None:
                    yield Note(f"{describe_node_type(submitted.run.type)}:")
                yield from wait_for_jobs(
                    submitted.run, submitted.launcher, submitted.started, timeout=self._remaining_seconds(deadline)
                )


def _list_submitted_probes(planned: Plans, jobs: Sequence[_SubmittedRun]) -> Work[SubmittedProbes]:
    for submitted in jobs:
        yield from warn_about_submitted_jobs(
            submitted.run, submitted.launcher, submitted.started, submitted.under_way, submitted.run.spec
        )
    started = [job for submitted in jobs for job in submitted.run.prefix_job_names(submitted.started)]
    unfinished = [job for submitted in jobs for job in submitted.run.prefix_job_names(submitted.under_way)]
    return SubmittedProbes(tuple(started), tuple(unfinished), {run.type: plan for run, plan in planned})
