"""The Python API: what `import tula_cli as tula` offers."""

import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

from tula_cli.cluster import inspection, launcher
from tula_cli.cluster.inspection import CachedInspection
from tula_cli.diagnostics import DiagnosticWarning
from tula_cli.errors import BadMeasurements, OverBudget, SpecError
from tula_cli.models.choice.baseline import BaselineSaving
from tula_cli.models.choice.campaign import Campaign
from tula_cli.models.observed import ObservedReport
from tula_cli.models.time.noise import compute_trimmed_mean
from tula_cli.options import (
    DEFAULT_OBSERVATIONS_FOLDER,
    DEFAULT_RUNS_FOLDER,
    CheckedNodes,
    ComparisonRequest,
    EvaluationRequest,
    Every,
    ExportRequest,
    Fresh,
    NodeType,
    Observed,
    Overrides,
    Root,
    Timeout,
    Trackers,
    TrainRequest,
    Wait,
    check_type,
    require_callable,
    require_positive,
    with_arguments,
)
from tula_cli.plugins import suggest_nearest
from tula_cli.query import Query
from tula_cli.run.code import make_runs_of_job
from tula_cli.run.directory import LATEST_FILE, RunDir
from tula_cli.run.directory import Run as HardwareRun
from tula_cli.run.frames import make_frame, render_html
from tula_cli.run.job_runs import (
    find_recommendation,
    find_settings_origin,
    list_runs_with_data,
    make_runs,
    open_run,
    open_runs,
)
from tula_cli.run.records.probes import Measured, Result
from tula_cli.run.records.recommendations import Recommendation
from tula_cli.run.records.results import EvaluationRecord, JobFile, Summary
from tula_cli.run.step_series import StepSeries
from tula_cli.services import campaign as campaigns
from tula_cli.services import check as checking
from tula_cli.services import estimate as estimating
from tula_cli.services import nodes as node_checking
from tula_cli.services import profile as profiling
from tula_cli.services import recommend as recommending
from tula_cli.services import recommendation_files
from tula_cli.services import status as status_service
from tula_cli.services import train as training
from tula_cli.services.check import CheckResult
from tula_cli.services.comparison import learning_rates, session
from tula_cli.services.comparison.accuracy import CompareReport
from tula_cli.services.comparison.learning_rates import LearningRateReport
from tula_cli.services.diff import RunDifference, choose_run, compare_runs
from tula_cli.services.document import Document, TextForm, load_report_package
from tula_cli.services.estimate import EstimateReport
from tula_cli.services.evaluate import prepare_evaluation, run_evaluation
from tula_cli.services.events import Event, Note, Planned, WarningEvent, Work, run_work
from tula_cli.services.largest_batch import LargestBatch
from tula_cli.services.nodes import ClusterCheck
from tula_cli.services.observe import list_observed_reports
from tula_cli.services.observed_probes import add_observed_probes
from tula_cli.services.resume_test import ResumeTestFinding, run_resume_test
from tula_cli.services.status import RunStatus
from tula_cli.services.tracking import ExportResult, load_trackers_package
from tula_cli.services.train_seeds import SeedsReport, prepare_seed_trainings, run_seed_trainings
from tula_cli.services.waiting import DetachedJobs, Submission
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import load_spec, validate_job
from tula_cli.spec.merge import apply_overrides
from tula_cli.spec.old_keys import replace_old_keys
from tula_cli.words import format_bytes, format_count, format_number

if TYPE_CHECKING:
    import pandas as pd


T = TypeVar("T")

# --- Runs


@dataclass(frozen=True)
class Status:
    """The status of a run by node type; the key is None if the job names no node types."""

    types: Mapping[str | None, RunStatus]

    @property
    def active(self) -> bool:
        """Whether any job is queued or running."""
        return any(run_status.has_active_jobs() for run_status in self.types.values())

    def frame(self) -> "pd.DataFrame":
        """Return one row per job: node type, id, kind, nodes, state, reason, probes finished and in all, node-hours."""
        columns = ("id", "kind", "nodes", "state", "reason", "done", "total", "node_hours")
        rows = [
            {"node_type": name or "", **{column: getattr(job, column) for column in columns}}
            for name, run_status in self.types.items()
            for job in run_status.jobs
        ]
        return make_frame(rows)


@dataclass(frozen=True)
class Run:
    """The measurements, recommendation and trainings of one job: a run directory, or one for each of its node types.

    Every method reads the files again. `tula.profile` returns a run; `Run.open` opens an existing run directory.
    """

    path: Path  # the first run directory
    directories: tuple[HardwareRun, ...] = field(repr=False, compare=False)

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """Return the run in a folder, or the newest run for the path of file `latest`, such as tula-runs/latest.

        Raises:
            SpecError: the folder does not exist, or is not a run directory.
        """
        check_type("path", path, str | Path)
        folder = Path(path).absolute()
        is_latest = folder.name == LATEST_FILE and folder.is_file()
        return cls.from_directories([open_run(RunDir.find_newest(folder.parent) if is_latest else RunDir.open(folder))])

    @classmethod
    def from_directories(cls, directories: Sequence[HardwareRun]) -> "Run":
        """Return the run made of a job's run directories, one per node type."""
        return cls(directories[0].path, tuple(directories))

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        """Return the recommendation, if any, and a row per probe, for a notebook."""
        rows = [_make_result_row(name, result) for name, results in self.probes().items() for result in results]
        is_typed = any(row["node_type"] for row in rows)
        cells = [
            (
                *([row["node_type"]] if is_typed else []),
                str(row["nodes"]),
                str(row["batch"]),
                str(row["local_batch"]),
                row["outcome"],
                format_number(row["step_time_s"] and 1000 * row["step_time_s"]),
                format_number(row["samples_per_s"]),
                "-" if row["peak_memory_bytes"] is None else format_bytes(row["peak_memory_bytes"]),
            )
            for row in rows
        ]
        columns = ["nodes", "batch", "batch/GPU", "outcome", "step (ms)", "samples/s", "peak memory/GPU"]
        recommendation = self.recommendation()
        return render_html(
            f"Run {self.id}: {format_count(len(rows), 'probe')}",
            ["node type", *columns] if is_typed else columns,
            cells,
            notes=["No recommendation yet." if recommendation is None else f"Recommended: {recommendation.summary}"],
        )

    @property
    def id(self) -> str:
        """The folder's name: the job's name and a hash of the settings that its measurements depend on."""
        return self.path.name

    def spec(self) -> JobSpec:
        """Return the job's resolved settings; for a job with node types, those of the first type."""
        return self.directories[0].read_spec()

    @property
    def _runs(self) -> list[HardwareRun]:
        return list_runs_with_data(self.directories)

    def probes(self) -> dict[str | None, list[Result]]:
        """Return the results of the probes by node type; the key is None if the job names no node types.

        A damaged result is left out, with a Python warning.
        """
        snapshots = {run.type: run.read_snapshot() for run in self._runs}
        for warning in (warning for snapshot in snapshots.values() for warning in snapshot.record_warnings):
            warnings.warn(warning.text, stacklevel=2)
        return {name: snapshot.results for name, snapshot in snapshots.items()}

    def results(self) -> "pd.DataFrame":
        """Return one row per probe; `RESULT_COLUMNS` and docs/reference/tables.md have the columns with their units.

        Columns of integers are Int64, even if values are missing. A damaged result is left out, with a Python warning.
        """
        return make_frame(
            [_make_result_row(name, result) for name, results in self.probes().items() for result in results]
        )

    def recommendation(self) -> Recommendation | None:
        """Return the recommendation that `tula.train` uses, or None if there is none yet or it is damaged."""
        return find_recommendation(self.directories)

    def weights(self, signature: str) -> Path | None:
        """Return the checkpoint of a training's best epoch: a torch.save file with a state_dict under the key "model".

        Args:
            signature: the training's signature, as returned by `tula.train`.

        Returns:
            The file; None if there is none yet, and for scripts, which save checkpoints themselves.
        """
        check_type("signature", signature, str)
        return next((path for run in self._runs if (path := run.get_training(signature).find_weights())), None)

    def steps(self, signature: str) -> StepSeries:
        """Return the recorded values of every step of a training, as columns (plain lists); empty if there are none.

        Args:
            signature: the training's signature, as returned by `tula.train`.
        """
        check_type("signature", signature, str)
        trainings = (run.get_training(signature) for run in self._runs)
        return next((training.read_steps() for training in trainings if training.steps_path.exists()), StepSeries())

    def report(self) -> "Document":
        """Return the report that `tula report` shows: sections with tables and figures, as plain values.

        Raises:
            SpecError: tula's optional package report is not installed.
            TulaError: a record of the run cannot be read.
        """
        return load_report_package().build(self._runs, now=time.time())

    def status(self) -> Status:
        """Return the status of the run's jobs and of its newest training; queries the scheduler."""
        return Status({run.type: status_service.query_run_status(run) for run in self._runs})


RESULT_COLUMNS = {
    "node_type": "node type; empty if the job names none",
    "nodes": "number of nodes",
    "gpus_per_node": "GPUs (or processes on CPUs) per node",
    "batch": "global batch: samples per optimizer step over all GPUs",
    "local_batch": "samples per optimizer step on one GPU",
    "outcome": "measured, out_of_memory or failed",
    "step_time_s": "seconds per optimizer step; this column and those up to peak_memory_bytes have a value only if outcome is measured",
    "sync_time_s": "seconds per step of gradient synchronisation that does not overlap with computing",
    "compute_time_s": "seconds per step without synchronisation",
    "data_wait_s": "seconds per step of waiting for the data loader",
    "cached_time_s": "seconds per step on a batch that is already on the device",
    "loader_time_s": "seconds that the data loader needs for the samples of one step, if nothing else runs",
    "samples_per_s": "samples per second over all GPUs",
    "peak_memory_bytes": "peak reserved memory of one GPU, in bytes",
    "message": "why there is no measurement; empty if outcome is measured",
}
"""Columns of `Run.results()`, with units."""


def _make_result_row(node_type: str | None, result: Result) -> dict[str, Any]:
    probe = result if isinstance(result, Measured) else None
    step = None if probe is None else compute_trimmed_mean(probe.step_times)
    batch = result.local_batch * result.nodes * result.gpus_per_node
    return {
        "node_type": node_type or "",
        "nodes": result.nodes,
        "gpus_per_node": result.gpus_per_node,
        "batch": batch,
        "local_batch": result.local_batch,
        "outcome": result.kind,
        "step_time_s": step,
        "sync_time_s": probe and probe.sync_time,
        "compute_time_s": probe and probe.compute_time,
        "data_wait_s": probe and probe.data_wait,
        "cached_time_s": probe and probe.cached_time,
        "loader_time_s": probe and probe.loader_time,
        "samples_per_s": step and batch / step,
        "peak_memory_bytes": probe and probe.memory.peak,
        "message": "" if isinstance(result, Measured) else result.message,
    }


# --- Common arguments

Job = str | Path | Mapping[str, Any] | JobSpec
"""A job: the path of a job.yaml, its content as a mapping, or a spec."""
Target = Job | Run
"""A run, the path of its folder, or its job."""
OnEvent = Callable[[Event], object]
Confirm = Callable[[Planned], bool]

JobArgument = Annotated[Job, "the path of a job.yaml, its content as a mapping, or a spec."]
RunArgument = Annotated[Target, "a run, the path of its folder, or its job."]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments of all functions that take a job with overrides."""

    root: Root = DEFAULT_RUNS_FOLDER
    overrides: Overrides = ()

    def resolve(self, target: Target) -> "ResolvedTarget":
        """Return the runs of a target with its settings and the overrides.

        Raises:
            SpecError: the job or an override is invalid, or a folder is not a run directory.
        """
        return ResolvedTarget.from_target(target, root=self.root, overrides=self.overrides)


@dataclass(frozen=True, kw_only=True)
class JobArguments(Settings):
    """Arguments of all functions that submit jobs."""

    on_event: Annotated[
        OnEvent | None,
        "called with every event; None: warnings become Python warnings, and other events are dropped.",
    ] = None

    def __post_init__(self) -> None:
        require_callable(on_event=self.on_event)

    def run_work(self, work: Work[T]) -> T:
        """Run work and return its result; pass its events to `on_event`, or turn its warnings into Python warnings."""
        return run_work(work, self.on_event or issue_python_warning)


@dataclass(frozen=True, kw_only=True)
class SubmitArguments(JobArguments):
    """Arguments of all functions that submit jobs after a confirmation."""

    confirm: Annotated[
        Confirm | None,
        "called with the plan (with `.node_hours`), returns whether to submit it; None: submit within"
        " search.max_node_hours.",
    ] = None
    wait: Wait = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_callable(confirm=self.confirm)

    def make_submission(
        self, resolved: "ResolvedTarget", *, timeout: float | None = None, fresh: bool = False
    ) -> Submission:
        """Return how the call submits its jobs."""
        inspect = make_inspector(resolved.runs[0].path.parent, fresh=fresh, report_event=self.on_event)
        confirm = _make_confirmation(resolved.runs[0].spec, self.confirm)
        return Submission(
            launcher.make_launcher, inspect, confirm, self.wait, timeout, resolved.job, resolved.overrides
        )


@dataclass(frozen=True)
class ResolvedTarget:
    """The runs that a target refers to, which may not exist yet, with the origin of their settings."""

    runs: tuple[HardwareRun, ...]
    job: Path | None  # the job file; None if the settings are those of a run, a mapping or a spec
    overrides: tuple[str, ...] = ()

    @classmethod
    def from_target(cls, target: Target, *, root: str | Path, overrides: Sequence[str] = ()) -> "ResolvedTarget":
        """Return the runs of a target; those of a job are under `root`.

        Raises:
            SpecError: the job or an override is invalid, or a folder is not a run directory.
        """
        check_type("root", root, str | Path)
        if isinstance(target, str | Path) and (Path(target).is_dir() or Path(target).name == LATEST_FILE):
            target = Run.open(target)
        if isinstance(target, Run):
            return cls(open_runs(target.directories, overrides), None, tuple(overrides))
        if not isinstance(target, str | Path | Mapping | JobSpec):
            raise SpecError(f"{target!r} is not a run or a job", "give a run, the path of its folder, or its job")
        runs = make_runs_of_job(Path(root), load_job(target, overrides))
        return cls(runs, Path(target) if isinstance(target, str | Path) else None, tuple(overrides))

    @property
    def file(self) -> JobFile | None:
        """The job file and overrides that the settings come from, as a run records them; None without a job file."""
        return find_settings_origin(self.runs[0], self.job, self.overrides)

    def require_measured(self) -> "ResolvedTarget":
        """Return this target; raise BadMeasurements if none of its runs exists yet."""
        if not any(run.exists for run in self.runs):
            raise BadMeasurements(f"{self.runs[0].job_name} has no measurements yet", "call profile first")
        return self


def load_job(job: Job, overrides: Sequence[str] = ()) -> JobSpec:
    """Return the settings of a job, with overrides.

    Raises:
        SpecError: the job or an override is invalid.
    """
    if isinstance(job, str | Path):
        return load_spec(Path(job), overrides=overrides)
    if not isinstance(job, JobSpec | Mapping):
        raise SpecError(f"{job!r} is not a job", "give the path of a job.yaml, its content as a mapping, or a spec")
    if isinstance(job, JobSpec) and not overrides:
        return job
    content = job.model_dump(mode="json", exclude_unset=True) if isinstance(job, JobSpec) else deepcopy(dict(job))
    content = replace_old_keys(content, source="the job")
    apply_overrides(content, overrides, {})
    return validate_job(content, source="the job")


def make_inspector(root: str | Path, *, fresh: bool = False, report_event: OnEvent | None = None) -> CachedInspection:
    """Return an inspector of jobs that caches its results under `root`."""
    note = report_event or issue_python_warning
    return CachedInspection(Path(root).absolute(), inspection.inspect, fresh=fresh, note=lambda text: note(Note(text)))


def _find_measured_run(target: Target, root: str | Path) -> Run:
    return Run.from_directories(ResolvedTarget.from_target(target, root=root).require_measured().runs)


def _make_confirmation(spec: JobSpec, confirm: Confirm | None) -> Confirm:
    """Return the function that confirms a plan: `confirm`, or one that accepts every plan of a job with a cap."""

    def is_confirmed(planned: Planned) -> bool:
        if confirm is not None:
            return confirm(planned)
        if spec.search.max_node_hours is None:
            raise OverBudget(
                "not confirmed: search.max_node_hours is not set, and no confirm function was given",
                'pass overrides=["search.max_node_hours=2"], or confirm=lambda planned: True',
            )
        return True

    return is_confirmed


def issue_python_warning(event: Event) -> None:
    """Issue a Python warning for a warning event; ignore other events."""
    if isinstance(event, WarningEvent):
        warnings.warn(DiagnosticWarning(event.warning), stacklevel=2)


# --- Functions that submit no jobs


@dataclass(frozen=True)
class CheckArguments(Settings):
    """Arguments of `check`."""

    job: JobArgument
    _: KW_ONLY
    node_type: NodeType = None
    online: Annotated[bool, "also build the model and the dataset, in a separate process."] = True
    fresh: Fresh = False


@with_arguments(CheckArguments)
def check(arguments: CheckArguments) -> CheckResult:
    """Check a job, and return the plan and the cost of its search.

    Returns:
        A report for each node type; its `require_sound("my job")` raises an error if nothing can run.

    Raises:
        SpecError: the job is invalid or cannot be built.
        JobFailed: the user's code fails.

    Example:
        >>> tula.check("job.yaml").problems
        {}
    """
    spec, inspect = load_job(arguments.job, arguments.overrides), make_inspector(arguments.root, fresh=arguments.fresh)
    runs = (make_runs_of_job if arguments.online else make_runs)(Path(arguments.root), spec)
    return checking.check_job_on_all_node_types(
        runs, node_type=arguments.node_type, online=arguments.online, inspector=inspect
    )


@dataclass(frozen=True)
class EstimateArguments(Settings):
    """Arguments of `estimate`."""

    job: JobArgument
    _: KW_ONLY
    memory: Annotated[int | str | None, 'memory of one GPU, in bytes or like "16GiB"; None: as known.'] = None
    node_type: NodeType = None
    fresh: Fresh = False


@with_arguments(EstimateArguments)
def estimate(arguments: EstimateArguments) -> dict[str | None, EstimateReport]:
    """Estimate the memory of one GPU by batch size, without a GPU; existing probes of the job correct the estimate.

    Returns:
        A report for each node type; the key is None if the job names no node types.

    Raises:
        SpecError: the job is invalid or cannot be built, or `memory` is not a size.
        JobFailed: the user's code fails.
    """
    resolved = arguments.resolve(arguments.job)
    capacity = None if arguments.memory is None else estimating.parse_capacity("memory", arguments.memory)
    inspect = make_inspector(arguments.root, fresh=arguments.fresh)
    return estimating.estimate_memory_on_all_node_types(
        resolved.runs, capacity=capacity, node_type=arguments.node_type, inspector=inspect
    )


@dataclass(frozen=True)
class RecommendArguments(Settings, Query):
    """Arguments of `recommend`: the query, and whether to save the answer."""

    run: RunArgument
    _: KW_ONLY
    every: Every = False
    save: Annotated[
        bool | None,
        "save the answer, so that `train` uses it; None: only if it is the first answer or updates one to the same"
        " criteria, and the run is writable.",
    ] = None
    observed: Observed = None


@with_arguments(RecommendArguments)
def recommend(arguments: RecommendArguments) -> Recommendation:
    """Choose the number of nodes and the batch size from the measurements.

    Returns:
        The choice and the other configurations in its table; `recommendation.frame()` returns the table.

    Raises:
        SpecError: the job or an override is invalid.
        BadMeasurements: there are no or too few measurements.
        Pending: probes are running, and the finished ones do not determine the answer yet.
        Infeasible: no configuration is within the limits.

    Example:
        >>> tula.recommend(run, objective="cost", deadline_hours=24).choice.nodes
    """
    resolved = arguments.resolve(arguments.run)
    if arguments.observed is not None:
        run_work(add_observed_probes(resolved.runs, arguments.observed, resolved.file), issue_python_warning)
    resolved.require_measured()
    pending = recommending.count_pending_probes(resolved.runs)
    answer = recommending.recommend_configuration(
        resolved.runs, arguments, overrides=arguments.overrides, pending=pending, now=time.time()
    )
    answer = recommending.add_start_estimate(answer)
    if arguments.save is not False:
        stored = recommendation_files.store_answer(
            resolved.runs,
            answer,
            requested=arguments.save is True,
            overrides=arguments.overrides,
            job=resolved.job,
            every=arguments.every,
        )
        for warning in stored.warnings:
            warnings.warn(DiagnosticWarning(warning), stacklevel=2)
    return answer.with_all_rows() if arguments.every else answer.recommendation


@dataclass(frozen=True)
class CampaignArguments(Settings, Query):
    """Arguments of `plan_trainings`."""

    run: Annotated[
        Target | Sequence[Target],
        "a run, the path of its folder, or its job; or a sequence of these, for different jobs.",
    ]
    trainings: Annotated[int | Sequence[int], "number of trainings; for several jobs, one number for each."]
    _: KW_ONLY
    save: Annotated[bool, "save the plan, so that `train` with the same number of seeds uses it."] = False


@with_arguments(CampaignArguments)
def plan_trainings(arguments: CampaignArguments) -> Campaign:
    """Plan many trainings on a limited number of nodes: the nodes of each, and how many run concurrently.

    `max_nodes` limits the nodes in use at a time; `deadline_hours` and `budget` apply to all trainings together.

    Returns:
        The plan; `campaign.frame()` returns a table of its waves.

    Raises:
        SpecError: a job or an override is invalid, or `trainings` is below 1, too large, or not one number per job.
        BadMeasurements: there are no or too few measurements.
        Pending: probes are running, and the finished ones do not determine the answer yet.
        Infeasible: no configuration or no plan is within the limits.

    Example:
        >>> tula.plan_trainings(run, 30, max_nodes=16, deadline_hours=72).hours
    """
    targets: Sequence[Target] = arguments.run if isinstance(arguments.run, list | tuple) else [arguments.run]  # type: ignore[list-item]
    trainings = arguments.trainings if isinstance(arguments.trainings, Collection) else [arguments.trainings]
    for number in trainings:
        require_positive(trainings=number)
    jobs = [arguments.resolve(target).require_measured().runs for target in targets]
    return campaigns.plan_trainings(jobs, arguments, trainings, overrides=arguments.overrides, save=arguments.save)


def status(run: Target, *, root: str | Path = DEFAULT_RUNS_FOLDER) -> Status:
    """Return the status of a run's jobs and of its newest training; `.frame()` returns a table of the jobs.

    Args:
        run: a run, the path of its folder, or its job.
        root: folder that contains the runs of jobs.

    Raises:
        SpecError: the job is invalid.
        BadMeasurements: the job has no run yet.
    """
    return _find_measured_run(run, root).status()


# --- Functions that submit jobs


@dataclass(frozen=True)
class NodeCheckArguments(JobArguments):
    """Arguments of `check_nodes`, which needs no confirmation and always waits."""

    job: RunArgument
    _: KW_ONLY
    nodes: CheckedNodes = None
    node_type: NodeType = None
    timeout: Timeout = None


@with_arguments(NodeCheckArguments)
def check_nodes(arguments: NodeCheckArguments) -> ClusterCheck:
    """Check nodes of the cluster in a job of about a minute, and wait for it: `tula check --on-cluster`.

    Returns:
        The report of each node, problems and warnings; `require_sound("my job")` raises an error if there are problems.

    Raises:
        SpecError: the job is invalid, names several node types, or does not have `nodes` nodes.
        Pending: the job is unfinished after `timeout` seconds.
        JobFailed: the job failed.
        SchedulerError: the scheduler rejected the job, or will never start it.
        KeyboardInterrupt: Ctrl-C; the job continues, and the same call attaches to it again.
    """
    resolved = arguments.resolve(arguments.job)
    work = node_checking.run_node_check(
        resolved.runs,
        launcher.make_launcher,
        nodes=arguments.nodes,
        node_type=arguments.node_type,
        timeout=arguments.timeout,
        file=resolved.file,
    )
    return arguments.run_work(work)


@dataclass(frozen=True)
class ProfileArguments(SubmitArguments):
    """Arguments of `profile`."""

    job: RunArgument
    _: KW_ONLY
    max_node_hours: Annotated[float | None, "node-hours that probes may use; replaces search.max_node_hours."] = None
    timeout: Timeout = None
    fresh: Fresh = False

    def resolve(self, target: Target) -> ResolvedTarget:
        """Return the runs of a target with its settings, the overrides and the cap on node-hours."""
        cap = () if self.max_node_hours is None else (f"search.max_node_hours={self.max_node_hours}",)
        return ResolvedTarget.from_target(target, root=self.root, overrides=(*self.overrides, *cap))


@with_arguments(ProfileArguments)
def profile(arguments: ProfileArguments) -> Run:
    """Measure short training runs over node counts and batch sizes; a repeated call measures only missing ones.

    Attaches to jobs of the same search that are queued or running.

    Returns:
        The run; `run.results()` returns a table of its probes.

    Raises:
        SpecError: the job is invalid or cannot be built.
        Infeasible: no configuration fits.
        OverBudget: the plan exceeds the cap, `confirm` declined it, or neither a cap nor `confirm` is given.
        Pending: jobs are unfinished after `timeout` seconds.
        JobFailed, OutOfMemoryAtMinimum, BadMeasurements: no probe succeeded.
        SchedulerError: the scheduler rejected a job.
        KeyboardInterrupt: Ctrl-C; the jobs continue, and the same call attaches to them again.

    Example:
        >>> run = tula.profile("job.yaml", max_node_hours=2)
        >>> run.results()[["nodes", "batch", "step_time_s"]]
    """
    resolved = arguments.resolve(arguments.job)
    submission = arguments.make_submission(resolved, timeout=arguments.timeout, fresh=arguments.fresh)
    arguments.run_work(profiling.run_profile(resolved.runs, submission))
    return Run.from_directories(resolved.runs)


@with_arguments(ProfileArguments)
def find_largest_batch(arguments: ProfileArguments) -> LargestBatch | None:
    """Find the largest batch that fits the GPUs, on the fewest nodes: `tula profile --largest`.

    Each trial is a probe in new processes, and `recommend` uses its result too. A repeated call continues the search.

    Returns:
        The largest batch so far; None if the call does not wait for the job.

    Raises:
        SpecError: the job is invalid, cannot be built, names several node types, or runs on CPUs without a memory limit.
        OutOfMemoryAtMinimum: not even the smallest batch fits.
        OverBudget, Pending, JobFailed, BadMeasurements, SchedulerError, KeyboardInterrupt: see `profile`.

    Example:
        >>> tula.find_largest_batch("job.yaml", max_node_hours=1).local_batch
    """
    resolved = arguments.resolve(arguments.job)
    submission = arguments.make_submission(resolved, timeout=arguments.timeout, fresh=arguments.fresh)
    if len(resolved.runs) > 1:
        raise SpecError(
            f"find_largest_batch works on one node type, but the job has {len(resolved.runs)}",
            "use tula profile --largest",
        )
    profiled = arguments.run_work(profiling.run_profile(resolved.runs, submission, largest=True))
    if isinstance(profiled, DetachedJobs):
        return None
    (largest_batch,) = profiled.reports.values()
    assert isinstance(largest_batch, LargestBatch)
    return largest_batch


@dataclass(frozen=True)
class TrainArguments(SubmitArguments, TrainRequest):
    """Arguments of `train`."""

    run: RunArgument
    _: KW_ONLY
    timeout: Timeout = None


class TrainingSummary(Summary):
    """The summary of a training, with its gain over the baseline configuration."""

    gain: BaselineSaving | None  # None without a forecast of the baseline, or if it was trained itself


@with_arguments(TrainArguments)
def train(arguments: TrainArguments) -> TrainingSummary | SeedsReport | None:
    """Train with the recommended nodes and batch size, attach to a running training, or resume an interrupted one.

    Returns:
        Predicted and actual duration and cost, the final metrics, and the gain over the baseline configuration.
        With `seeds`, all trainings of the plan with their states, finished or not; `report.frame()` returns a table.
        None if the call does not wait for the training (`tula.status(run)` shows it).

    Raises:
        SpecError: the job or the batch is invalid.
        BadMeasurements: there is no recommendation, and nodes and batch are not given.
        OverBudget: `confirm` declined the plan, or neither search.max_node_hours nor `confirm` is given.
        Pending: the training is unfinished after `timeout` seconds.
        CannotResume: the training takes more than an hour, and its script cannot resume from its own checkpoint.
        OutOfMemoryAtMinimum, Diverged, DeviceFault, JobFailed: the training failed.
        SchedulerError: the scheduler rejected the job.
        KeyboardInterrupt: Ctrl-C; the training continues, and the same call attaches to it again.
    """
    resolved = arguments.resolve(arguments.run)
    submission = arguments.make_submission(resolved, timeout=arguments.timeout)
    if arguments.seeds is not None:
        seeds = arguments.run_work(prepare_seed_trainings(resolved.runs, arguments, submission.inspect))
        return arguments.run_work(run_seed_trainings(seeds, submission))
    prepared = arguments.run_work(training.prepare_training(resolved.runs, arguments, submission.inspect))
    summary = arguments.run_work(training.run_training(prepared, submission))
    if isinstance(summary, DetachedJobs):
        return None
    return TrainingSummary(**dict(summary), gain=training.find_baseline_saving(prepared.run, summary))


@dataclass(frozen=True)
class CompareArguments(SubmitArguments, ComparisonRequest):
    """Arguments of `compare`."""

    run: RunArgument
    _: KW_ONLY
    node_type: NodeType = None


@with_arguments(CompareArguments)
def compare(arguments: CompareArguments) -> CompareReport:
    """Train with several methods, batches and seeds, and compare the accuracy; finished trainings are not repeated.

    Returns:
        The comparison, complete or partial, with the number of failed trainings; `report.frame()` returns a table.

    Raises:
        SpecError: the job, a method or a batch is invalid, or `wait` is False on this machine.
        BadMeasurements: no batch is given, known or recommended.
        OverBudget: `confirm` declined the plan, or neither search.max_node_hours nor `confirm` is given.
        JobFailed: the first trainings have all failed.
        KeyboardInterrupt: Ctrl-C; finished trainings are kept, and running ones continue.
    """
    resolved = arguments.resolve(arguments.run)
    submission = arguments.make_submission(resolved)
    prepared = arguments.run_work(
        session.prepare_comparison(resolved.runs, arguments, submission.inspect, node_type=arguments.node_type)
    )
    return arguments.run_work(session.run_comparison(prepared, submission)).report


@dataclass(frozen=True)
class LearningRateArguments(SubmitArguments):
    """Arguments of `find_learning_rate`."""

    job: RunArgument
    _: KW_ONLY
    batch: Annotated[int | None, "global batch size (default: as recommended)."] = None
    nodes: Annotated[int | None, "number of nodes (default: as recommended, otherwise the fewest in search.nodes)."] = (
        None
    )
    near_batches: Annotated[bool, "also try half and twice the batch."] = False
    node_type: NodeType = None
    timeout: Timeout = None


@with_arguments(LearningRateArguments)
def find_learning_rate(arguments: LearningRateArguments) -> LearningRateReport | None:
    """Find the learning rate for a large batch by short trainings from one checkpoint: `tula compare --learning-rates`.

    A repeated call runs only the missing short trainings (branches).

    Returns:
        The learning rate, and how to train with it; `report.frame()` returns a table of the branches. None if the call
        does not wait for the job.

    Raises:
        SpecError: the batch or the method cannot be searched, or the script cannot be branched.
        BadMeasurements: no batch is given or recommended.
        Diverged: every learning rate diverges.
        OverBudget, Pending, OutOfMemoryAtMinimum, DeviceFault, JobFailed, SchedulerError, KeyboardInterrupt: as `train`.

    Example:
        >>> tula.find_learning_rate("job.yaml", batch=1024).answer
    """
    resolved = arguments.resolve(arguments.job)
    submission = arguments.make_submission(resolved, timeout=arguments.timeout)
    work = learning_rates.prepare_rate_search(
        resolved.runs,
        submission.inspect,
        batch=arguments.batch,
        nodes=arguments.nodes,
        node_type=arguments.node_type,
        near_batches=arguments.near_batches,
    )
    search = arguments.run_work(work)
    result = arguments.run_work(learning_rates.run_rate_search(search, submission))
    return None if isinstance(result, DetachedJobs) else result


def diff(before: str | Path | Run, after: str | Path | Run, *, root: str | Path = DEFAULT_RUNS_FOLDER) -> RunDifference:
    """Compare two runs, A and B: `tula diff`. Nothing is written.

    Args:
        before: run A: a run, the path of its folder or job file, or its name under `root`.
        after: run B, given like `before`.
        root: folder that contains the runs.

    Returns:
        The difference: `.headline` summarises it in one or two lines, `.same` is whether there is none, and `.frame()`
        returns a table of step times.

    Raises:
        SpecError: a run does not exist, A and B are the same run, or a run has several node types.
        BadMeasurements: a record of a run is damaged.

    Example:
        >>> print(*tula.diff("digits-1f0c5b7e", "digits-9a4e02cd").headline, sep="\\n")
    """
    check_type("root", root, str | Path)
    return compare_runs(*(choose_run(_open_run_directories(named, Path(root))) for named in (before, after)))


def _open_run_directories(named: str | Path | Run, root: Path) -> tuple[HardwareRun, ...]:
    if isinstance(named, Run):
        return named.directories
    if not isinstance(named, str | Path):
        raise SpecError(f"{named!r} is not a run", "give a run, the path of its folder, or its name")
    path = Path(named)
    if path.is_file() and path.name != LATEST_FILE:
        return _find_measured_run(path, root).directories
    inside = root / path
    return Run.open(path if path.exists() or not inside.is_dir() else inside).directories


@dataclass(frozen=True)
class EvaluateArguments(SubmitArguments, EvaluationRequest):
    """Arguments of `evaluate`; `confirm` is not called for evaluations on this machine."""

    run: RunArgument
    _: KW_ONLY
    timeout: Timeout = None


@with_arguments(EvaluateArguments)
def evaluate(arguments: EvaluateArguments) -> EvaluationRecord | None:
    """Evaluate the weights of a training on dataset.test, or on the training's evaluation samples if it is not set.

    Returns:
        `.metrics` has those available of loss, top-1 and top-5 (percent), perplexity and train.metrics. None if the
        call does not wait for the job (`tula.status(run)` shows it).

    Raises:
        SpecError: the job, the training or the file is invalid, or the job trains with a script.
        BadMeasurements: there is no training yet, or it has no saved weights.
        OverBudget: `confirm` declined the plan, or neither search.max_node_hours nor `confirm` is given.
        Pending: the job is unfinished after `timeout` seconds.
        DeviceFault, JobFailed: the job failed.
        SchedulerError: the scheduler rejected the job.
        KeyboardInterrupt: Ctrl-C; the job continues, and the same call attaches to it again.

    Example:
        >>> tula.evaluate(run, weights="best").metrics["top1"]
    """
    resolved = arguments.resolve(arguments.run)
    prepared = prepare_evaluation(resolved.runs, arguments)
    submission = arguments.make_submission(resolved, timeout=arguments.timeout)
    evaluation = arguments.run_work(run_evaluation(prepared, submission))
    return None if isinstance(evaluation, DetachedJobs) else evaluation


@dataclass(frozen=True)
class ExportArguments(ExportRequest):
    """Arguments of `export`."""

    run: RunArgument
    to: Trackers = ()
    _: KW_ONLY
    on_event: Annotated[OnEvent | None, "called with every event, as in `profile`."] = None
    root: Root = DEFAULT_RUNS_FOLDER

    def __post_init__(self) -> None:
        require_callable(on_event=self.on_event)


@with_arguments(ExportArguments)
def export(arguments: ExportArguments) -> tuple[ExportResult, ...]:
    """Send a run's settings, probes, recommendation, trainings and report (Markdown) to trackers: `tula export`.

    A repeated call sends only new data.

    Returns:
        For each tracker, what was sent and how much of it is new.

    Raises:
        SpecError: the job or an argument is invalid, a tracker's package is missing, or no tracker is given.
        BadMeasurements: the job has no run yet.
        TrackerError: a tracker did not accept all data; the same call sends the rest.
        TulaError: the run cannot be read or written.
        KeyboardInterrupt: Ctrl-C, with `follow`.

    Example:
        >>> tula.export(run, "mlflow", uri="http://tracking.example.org:5000")[0].new_points
    """
    resolved = ResolvedTarget.from_target(arguments.run, root=arguments.root).require_measured()
    to = [arguments.to] if isinstance(arguments.to, str) else list(arguments.to)
    work = load_trackers_package().export(resolved.runs, to, arguments)
    return run_work(work, arguments.on_event or issue_python_warning)


@dataclass(frozen=True)
class TestResumeArguments(JobArguments):
    """Arguments of `rehearse`, which needs no confirmation and always waits."""

    job: RunArgument
    _: KW_ONLY
    fresh: Annotated[bool, "repeat the test even if there is a verdict."] = False
    node_type: NodeType = None
    timeout: Timeout = None


@with_arguments(TestResumeArguments)
def rehearse(arguments: TestResumeArguments) -> ResumeTestFinding:
    """Test in a job on one node whether a script resumes from its own checkpoint, and wait: `tula check --rehearse`.

    Returns:
        The finding (`.resumes`, `.why`, `.rehearsal`); `require_found("my job")` raises an error if the test was
        inconclusive, `require_resumable_script("my job", "")` if the script cannot resume from its checkpoint.

    Raises:
        SpecError: the job is invalid, has no script.resume, or names several node types.
        OverBudget: the test may use more than the remaining node-hours of search.max_node_hours.
        Pending: the job is unfinished after `timeout` seconds.
        JobFailed: the job ended without a result.
        SchedulerError: the scheduler rejected the job, or will never start it.
        KeyboardInterrupt: Ctrl-C; the job continues, and the same call attaches to it again.
    """
    resolved = arguments.resolve(arguments.job)
    work = run_resume_test(
        resolved.runs,
        launcher.make_launcher,
        node_type=arguments.node_type,
        timeout=arguments.timeout,
        fresh=arguments.fresh,
        file=resolved.file,
    )
    return arguments.run_work(work)


def observed_jobs(root: str | Path = DEFAULT_OBSERVATIONS_FOLDER, name: str | None = None) -> list[ObservedReport]:
    """Return the measurements that `tula observe` took of jobs.

    Args:
        root: folder of the observations.
        name: SCRIPT for all jobs of a script, SCRIPT/JOB for one; None for the newest job.

    Raises:
        SpecError: the job does not exist.
        BadMeasurements: the job has not been measured yet.
    """
    check_type("root", root, str | Path)
    check_type("name", name, str | None)
    return list_observed_reports(Path(root).expanduser(), name)


def report(run: Target, *, root: str | Path = DEFAULT_RUNS_FOLDER) -> Document:
    """Return the report of a run: sections with tables and figures, as plain values.

    Args:
        run: a run, the path of its folder, or its job.
        root: folder that contains the runs of jobs.

    Raises:
        SpecError: the job is invalid, or tula's optional package report is not installed.
        BadMeasurements: the job has no run yet.
        TulaError: a record of the run cannot be read.

    Example:
        >>> tula.report(run).answer
    """
    return _find_measured_run(run, root).report()


def report_text(run: Target, *, form: TextForm = "markdown", root: str | Path = DEFAULT_RUNS_FOLDER) -> str:
    """Return the report of a run as text.

    Args:
        run: a run, the path of its folder, or its job.
        form: "markdown", "latex" or "csv".
        root: folder that contains the runs of jobs.

    Raises:
        SpecError: the job is invalid, or `form` is unknown.
        BadMeasurements: the job has no run yet.
        TulaError: a record of the run cannot be read.

    Example:
        >>> print(tula.report_text(run, form="latex"))
    """
    if form not in get_args(TextForm):
        raise SpecError(
            f"unknown form {form!r}; use one of {', '.join(get_args(TextForm))}",
            suggest_nearest(str(form), get_args(TextForm)),
        )
    return load_report_package().render_text(report(run, root=root), form)
