"""`tula profile --largest`: the search for the largest batch that fits into the memory, on the fewest of search.nodes."""

from dataclasses import dataclass
from pathlib import Path

from tula_cli.errors import Infeasible, OutOfMemoryAtMinimum, SpecError
from tula_cli.models.cost import compute_max_cost
from tula_cli.run.code import choose_code
from tula_cli.run.directory import Run
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.tasks import BatchBounds, ProbeTask
from tula_cli.services.plans import ProfilePlan
from tula_cli.services.profile_plan import compute_max_node_hours
from tula_cli.services.profile_report import make_profile_report
from tula_cli.spec.job import JobSpec
from tula_cli.spec.sections import MEMORY_MARGIN, MIN_TIMED_STEPS
from tula_cli.words import format_count

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


def make_largest_batch_bounds(spec: JobSpec, inspection: Inspection) -> BatchBounds:
    """Return the range of local batches in which the largest that fits is searched, and where the search starts.

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
    ranks = min(spec.search.nodes) * cluster.gpus_per_node
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
    spec, nodes, bounds = run.spec, min(run.spec.search.nodes), make_largest_batch_bounds(run.spec, inspection)
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
        minutes_at_most=len(tasks) * spec.compute_measuring_minutes(),
        code=source,
    )


def make_largest_batch(run: Run, inspection: Inspection, plan: ProfilePlan) -> LargestBatch:
    """Return the largest batch known so far.

    Raises:
        OutOfMemoryAtMinimum: not even the smallest batch fits.
        JobFailed, BadMeasurements: as of `make_profile_report`.
    """
    spec, nodes = run.spec, min(run.spec.search.nodes)
    report = make_profile_report(run, plan)
    from tula_cli.models.largest_batch import BatchBracket

    bracket = BatchBracket.from_results(spec, nodes, make_largest_batch_bounds(spec, inspection), run.read_results())
    if not bracket.fitting:
        raise OutOfMemoryAtMinimum(
            f"out of memory at local batch {bracket.failing} on {format_count(nodes)}",
            spec.workload.less_memory_hint,
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
        local_batch_with_margin=bracket.estimate_largest_batch(margin=MEMORY_MARGIN),
        finished=bracket.choose_next_trial() is None,
        measured=tuple(result for result in report.measured if result.nodes == nodes),
        out_of_memory=tuple(result for result in report.out_of_memory if result.nodes == nodes),
        failed=tuple(result for result in report.failed if result.nodes == nodes),
    )
