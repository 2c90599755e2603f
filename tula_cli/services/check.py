"""`tula check`: validate a job and show what its search would measure and cost."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tula_cli.cluster.inspection import Inspect, NotInspectable, inspect
from tula_cli.cluster.scheduler import make_scheduler
from tula_cli.cluster.slurm.first_job import inspect_job_if_possible, reuse_stored_inspection
from tula_cli.cluster.slurm.sbatch import check_setup_files, warn_too_few_cpus
from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import Infeasible, OverBudget
from tula_cli.host.machine import read_shared_memory
from tula_cli.models.choice.grid import LimitByNodes, find_highest_limit
from tula_cli.models.cost import MaxCost, compute_max_cost
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.frames import render_html
from tula_cli.run.job_runs import select_runs
from tula_cli.run.records.inspections import Inspection
from tula_cli.services import messages
from tula_cli.services.job_warnings import (
    check_shared_memory,
    describe_loader_and_scaling,
    warn_ags_on_one_rank,
    warn_unlikely_settings,
)
from tula_cli.services.plans import UpperBoundPlan
from tula_cli.services.profile_plan import compute_max_node_hours, plan_upper_bound
from tula_cli.services.resume_test import describe_interruption_cost
from tula_cli.services.search import (
    STRATEGIES_ON_ALL_NODES,
    SearchEstimate,
    choose_probes,
    choose_strategy,
    estimate_search,
    find_largest_local_batch,
    list_measured_probes,
)
from tula_cli.services.site_charges import add_site_billing
from tula_cli.services.waiting import require_within_cap
from tula_cli.spec.job import JobSpec, describe_training_method
from tula_cli.words import format_count, format_number, join_words


@dataclass(frozen=True)
class PlannedJob:
    """One profiling job: its number of nodes and the batches that it measures."""

    nodes: int
    local_batches: tuple[int, ...]  # of one GPU, ascending
    batches: tuple[int, ...]  # global


@dataclass(frozen=True)
class CheckReport(MaxCost):
    """The planned search of a job. Upper bounds assume that every profiling job takes `search.max_minutes`."""

    inspection: Inspection | None  # None if the model and the dataset were not built
    jobs: tuple[PlannedJob, ...]
    largest_local_batch: int | None  # by the memory estimate, less the margin; None without a bound
    machine_hours_at_most: float | None  # if jobs run one after the other on this machine; None on SLURM
    problems: tuple[Diagnostic, ...]  # nothing can run before these are solved
    warnings: tuple[Diagnostic, ...]
    unsettled: UpperBoundPlan | None = None  # set if the model and the dataset can only be built on a node
    settings: tuple[str, ...] = ()  # descriptions of how the training computes, such as its precision
    method_line: str = ""  # the large-batch method and why it was chosen
    interruption: str = ""  # the cost of an interruption of a script, in words; empty if unknown
    # expected cost of the jobs; None without jobs, or if their batches are unknown
    expected: SearchEstimate | None = None

    def __repr__(self) -> str:
        return f"<CheckReport: {self.summary}>"

    @property
    def summary(self) -> str:
        """The problems, or else the extent of the search and its maximum cost, in one line."""
        if self.problems:
            return f"cannot run: {' '.join(problem.text for problem in self.problems)}"
        if self.is_extent_unknown:
            return "the extent of the search is unknown until the dataset is built"
        extent = f"{format_count(self.probes, 'probe')} in {format_count(len(self.jobs), 'job')}"
        cost = "" if self.price_at_most is None else f", {format_number(self.price_at_most)} {self.currency}"
        return f"{extent}, at most {format_number(self.node_hours_at_most)} node-h{cost * (self.currency != 'node-h')}"

    @property
    def is_extent_unknown(self) -> bool:
        """Whether neither the dataset nor `search.max_batch` bounds the batches, so that no job could be planned."""
        return not (self.jobs or self.problems or self.unsettled)

    @property
    def node_hours_to_allow(self) -> float:
        """Node-hours that must be within the cap before anything starts: those of the first job, if any, else all.

        The probes that follow a first job are compared with the cap once it has finished.
        """
        return self.node_hours_at_most if self.unsettled is None else self.unsettled.first_job_node_hours

    @property
    def probes(self) -> int:
        """Number of configurations to measure."""
        return sum(len(job.local_batches) for job in self.jobs)


@dataclass(frozen=True)
class CheckResult:
    """The search of a job on each node type; the key is None for a job without node types."""

    reports: Mapping[str | None, CheckReport]
    cap: float | None  # maximum node-hours (search.max_node_hours); None without a cap

    def __repr__(self) -> str:
        return f"<CheckResult: {'; '.join(self._list_summaries())}>"

    def _repr_html_(self) -> str:
        """Return the profiling jobs, their maximum cost and the warnings, for a notebook."""
        rows = [
            (
                *([] if name is None else [name]),
                str(job.nodes),
                str(len(job.local_batches)),
                join_words(job.batches),
                join_words(job.local_batches),
            )
            for name, report in self.reports.items()
            for job in report.jobs
        ]
        columns = ["nodes", "probes", "batches", "batches/GPU"]
        warnings = [warning.text for report in self.reports.values() for warning in report.warnings]
        title, *others = self._list_summaries()
        return render_html(
            title, columns if None in self.reports else ["node type", *columns], rows, notes=[*others, *warnings]
        )

    def _list_summaries(self) -> list[str]:
        return [f"{name}: {report.summary}" if name else report.summary for name, report in self.reports.items()]

    @property
    def problems(self) -> dict[str | None, tuple[Diagnostic, ...]]:
        """Problems that prevent the job from running, by node type; node types without problems are left out."""
        return {name: report.problems for name, report in self.reports.items() if report.problems}

    @property
    def left_out(self) -> list[Diagnostic]:
        """A warning for each node type that cannot run; empty if none can."""
        if len(self.problems) == len(self.reports):
            return []
        return [
            messages.node_type_left_out(node_type=name, problems=[problem.text for problem in problems])
            for name, problems in self.problems.items()
        ]

    def require_sound(self, name: str) -> None:
        """Raise an error if the job can run on no node type, or if its search may exceed the cap on all of them.

        Raises:
            Infeasible: the job can run on no node type.
            OverBudget: the search may take more node-hours than search.max_node_hours.
        """
        if len(self.problems) == len(self.reports):
            kind = (
                OverBudget if any(report.jobs or report.unsettled for report in self.reports.values()) else Infeasible
            )
            distinct_problems = dict.fromkeys(
                problem.text for problems in self.problems.values() for problem in problems
            )
            raise kind(f"{name} cannot run: {' '.join(distinct_problems)}")
        require_within_cap([report.node_hours_to_allow for report in self.reports.values()], self.cap)


def check_job_on_all_node_types(
    runs: Sequence[Run], *, node_type: str | None = None, online: bool = True, inspector: Inspect
) -> CheckResult:
    """Check a job on each of its node types.

    Args:
        runs: the runs of a job that has passed the validation of its file; they need not exist yet. The inspection
            stored by the first job of a run is used, unless the inspector requests a new one.
        node_type: check only this node type.
        online: as in `check`; if False, nothing is read from the runs.

    Raises:
        SpecError: the job cannot be built or has no such node type; or a user-defined scheduler is missing or
            incomplete.
        JobFailed: the user's code fails.
    """
    runs = select_runs(runs, node_type)
    for run in runs:
        if online and not run.spec.cluster.is_included:
            # before the model is built, so that a missing scheduler is reported at once
            make_scheduler(run.spec.cluster)
    reports = {
        run.type: check_job(
            add_site_billing(run.spec, run.path.parent if online else None),
            online=online,
            inspector=reuse_stored_inspection(inspector, run),
            run=run if online else None,
        )
        for run in runs
    }
    return CheckResult(reports, runs[0].spec.search.max_node_hours)


def check_job(
    spec: JobSpec,
    *,
    online: bool = True,
    inspector: Inspect | None = None,
    run: RunDir | None = None,
) -> CheckReport:
    """Check a job on one node type.

    Args:
        spec: the job, which has passed the validation of its file.
        online: also build the model and the dataset, in a separate process. If False, the extent of the search is known
            only if `search.max_batch` bounds it.
        inspector: None builds the model and the dataset.
        run: the run of the job. Its trainings show how often a script saves checkpoints, its probes how long a step
            takes, and its node checks how much shared memory the nodes have.

    Raises:
        SpecError: the job cannot be built, or a file that its jobs need cannot be read.
        JobFailed: the user's code fails.
    """
    check_setup_files(spec.cluster, Path.cwd())
    answer = inspect_job_if_possible(spec, inspector or inspect) if online else None
    inspection = answer if isinstance(answer, Inspection) else None
    upper_bound_plan = plan_upper_bound(spec, why=answer) if isinstance(answer, NotInspectable) else None
    largest = find_largest_local_batch(spec, inspection) if inspection else None
    chosen_by_auto = spec.search.strategy == "auto"
    if inspection:
        spec = choose_strategy(spec, dataset_size=inspection.dataset_size, largest=largest, run=run)
    jobs, problems = _plan_jobs(spec, inspection, largest=largest)
    node_hours = (
        upper_bound_plan.node_hours_at_most
        if upper_bound_plan
        else compute_max_node_hours(spec, [job.nodes for job in jobs])
    )
    one_by_one = len(jobs) * spec.compute_measuring_minutes() / 60
    capacity = inspection.capacity if inspection else spec.cluster.memory_per_gpu
    sizes = {job.nodes: job.local_batches for job in jobs}
    return CheckReport(
        **vars(compute_max_cost(spec, node_hours, capacity)),
        inspection=inspection,
        jobs=jobs,
        largest_local_batch=find_highest_limit(largest),
        machine_hours_at_most=None if spec.cluster.backend.has_queue else one_by_one,
        problems=(
            *problems,
            *_check_gpu_count(spec, inspection),
            *_check_ramp_stages(spec, inspection)[0],
            *check_shared_memory(spec, inspection, sizes, free=find_free_shared_memory(spec, run)),
            *_check_node_hour_cap(spec, node_hours, upper_bound_plan),
        ),
        warnings=(
            *_warn_unknown_cost(upper_bound_plan),
            *([messages.plan_made_offline(strategy=spec.search.strategy)] if jobs and not online else []),
            *_list_warnings(spec, inspection, jobs, chosen_by_auto=chosen_by_auto),
        ),
        unsettled=upper_bound_plan,
        settings=describe_loader_and_scaling(spec, inspection),
        method_line=describe_training_method(spec),
        interruption=describe_interruption_cost(run, spec),
        expected=estimate_search(spec, list(sizes.items()), list_measured_probes(run)) if jobs else None,
    )


def _warn_unknown_cost(upper_bound_plan: UpperBoundPlan | None) -> Iterator[Diagnostic]:
    if upper_bound_plan is None:
        return
    yield messages.first_job_inspects(
        reason=upper_bound_plan.why, minutes=upper_bound_plan.first_job_minutes, remedy=upper_bound_plan.remedy
    )
    total = upper_bound_plan.first_job_node_hours + upper_bound_plan.probe_node_hours
    if upper_bound_plan.cap is not None and total > upper_bound_plan.cap:
        yield messages.first_search_may_exceed_cap(node_hours=total, cap=upper_bound_plan.cap)


def _plan_jobs(
    spec: JobSpec, inspection: Inspection | None, *, largest: LimitByNodes
) -> tuple[tuple[PlannedJob, ...], tuple[Diagnostic, ...]]:
    """Return one job per number of nodes and no problems; or no jobs and the reason why none is feasible."""
    size = inspection.dataset_size if inspection else spec.search.max_batch
    if size is None:
        return (), ()
    try:
        by_nodes = choose_probes(spec, dataset_size=size, max_local_batch=largest)
    except Infeasible as error:
        return (), (messages.no_feasible_batch(reason=error.message, advice=error.hint),)
    gpus = spec.cluster.gpus_per_node
    jobs = [
        PlannedJob(nodes, tuple(sizes), tuple(size * nodes * gpus for size in sizes))
        for nodes, sizes in sorted(by_nodes.items())
    ]
    return tuple(jobs), ()


def _check_node_hour_cap(
    spec: JobSpec, node_hours: float, upper_bound_plan: UpperBoundPlan | None
) -> Iterator[Diagnostic]:
    """Yield a problem if the search exceeds the cap on node-hours.

    If a first job inspects the model on a node, only that job is compared with the cap.
    """
    cap = spec.search.max_node_hours
    if cap is None:
        return
    if upper_bound_plan is None and node_hours > cap:
        yield messages.search_exceeds_cap(node_hours=node_hours, cap=cap)
    if upper_bound_plan is not None and upper_bound_plan.first_job_node_hours > cap:
        yield messages.first_job_exceeds_cap(
            node_hours=upper_bound_plan.first_job_node_hours, cap=cap, remedy=upper_bound_plan.remedy
        )


def _check_ramp_stages(spec: JobSpec, inspection: Inspection | None) -> tuple[list[Diagnostic], list[Diagnostic]]:
    if spec.train.stages is None:
        return [], []
    # imports numpy, which jobs without a ramp do not need
    from tula_cli.models.ramp_costs import list_stage_diagnostics

    return list_stage_diagnostics(spec, dataset_size=inspection.dataset_size if inspection else None)


def find_free_shared_memory(spec: JobSpec, run: RunDir | None) -> int | None:
    """Return the free bytes of /dev/shm: on this machine, or the fewest in the newest check of nodes; None if unknown."""
    if spec.cluster.kind == "local":
        return read_shared_memory()
    if run is None:
        return None
    reports = [report for task in run.read_check_tasks() if (report := run.checks.read_report(task.id)) is not None]
    return min((node.shared for node in reports[-1].nodes if node.shared), default=None) if reports else None


def _check_gpu_count(spec: JobSpec, inspection: Inspection | None) -> tuple[Diagnostic, ...]:
    """Return a problem if a search on this machine needs more GPUs than it has: every rank needs its own GPU."""
    if inspection is None or spec.cluster.kind != "local" or inspection.device != "cuda":
        return ()
    needed, available = spec.max_ranks, inspection.gpus
    if needed <= available:
        return ()
    fit = [nodes for nodes in spec.search.nodes if nodes * spec.cluster.gpus_per_node <= available]
    advice = (
        f"search.nodes: {fit or [1]}"
        if spec.cluster.gpus_per_node <= available
        else f"cluster.gpus_per_node: {available}"
    )
    return (messages.too_few_gpus(nodes=spec.search.nodes, needed=needed, available=available, advice=advice),)


def _list_warnings(
    spec: JobSpec, inspection: Inspection | None, jobs: tuple[PlannedJob, ...], *, chosen_by_auto: bool
) -> tuple[Diagnostic, ...]:
    warnings = [*(inspection.warnings if inspection else ())]
    warnings += warn_too_few_cpus(spec)
    if spec.cluster.collective == "parameter_server":  # the other kinds are variants of all-reduce
        warnings.append(messages.parameter_server_collective())
    if inspection and inspection.estimate_error:
        warnings.append(messages.memory_not_estimated(reason=inspection.estimate_error))
    warnings += [
        *warn_unlikely_settings(spec, inspection),
        *_warn_small_batch(spec, jobs),
        *_check_ramp_stages(spec, inspection)[1],
        *warn_ags_on_one_rank(spec),
    ]
    left_out = sorted(set(spec.search.nodes) - {job.nodes for job in jobs}) if jobs else []
    if left_out and spec.search.strategy in STRATEGIES_ON_ALL_NODES and not spec.is_supplement_with_fewer_gpus:
        warnings.append(messages.nodes_without_batch(nodes=left_out))
    ranks, shares_cores = spec.max_ranks, not spec.cluster.backend.core_assigner
    if inspection and shares_cores and inspection.device == "cpu" and ranks > inspection.cpus:
        warnings.append(messages.ranks_share_cores(ranks=ranks, cores=inspection.cpus))
    if spec.search.strategy == "adaptive" and jobs:
        warnings.append(
            messages.adaptive_first_round(chosen_by_auto=chosen_by_auto, capped=spec.search.max_node_hours is not None)
        )
    if spec.search.max_node_hours is None:
        warnings.append(messages.no_cap_on_node_hours())
    return tuple(warnings)


def _warn_small_batch(spec: JobSpec, jobs: tuple[PlannedJob, ...]) -> list[Diagnostic]:
    """Warn if the configured `ags.b_small` is not below some of the batches, which are then not scaled."""
    small = spec.ags.b_small
    if small == "auto" or spec.effective_ags is None:
        return []
    batches = sorted({batch for job in jobs for batch in job.batches if batch <= small})
    return [messages.batch_not_scaled(b_small=small, batches=batches, method=spec.train.method)] if batches else []
