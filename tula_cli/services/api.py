"""The Python API: what `import tula_cli as tula` offers."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

from tula_cli.cluster import inspection, launcher
from tula_cli.cluster.inspection import CachedInspection
from tula_cli.errors import (
    BadMeasurements,
    CannotWrite,
    OverBudget,
    SpecError,
    require_callable,
    require_list,
    require_number,
)
from tula_cli.models.time.noise import compute_trimmed_mean
from tula_cli.plugins import suggest_nearest
from tula_cli.query import Curve, Objective, Query
from tula_cli.run.code import run_of_job
from tula_cli.run.directory import RunDir
from tula_cli.run.frames import make_frame
from tula_cli.run.jobfile import find_settings_origin, list_parts_with_data, load_with_overrides
from tula_cli.run.owner import find_other_owner
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.recommendations import Recommendation
from tula_cli.run.records.results import EvaluationRecord, JobFile, Summary
from tula_cli.run.step_series import StepSeries
from tula_cli.services import check as checking
from tula_cli.services import estimate as estimating
from tula_cli.services import events, profiling_rounds
from tula_cli.services import nodes as node_checking
from tula_cli.services import recommend as recommending
from tula_cli.services import status as status_service
from tula_cli.services import train as training
from tula_cli.services.check import CheckResult
from tula_cli.services.comparison import session
from tula_cli.services.comparison.accuracy import CompareReport
from tula_cli.services.diff import RunDifference, compare_runs
from tula_cli.services.estimate import EstimateReport
from tula_cli.services.evaluate import EvaluationRequest, prepare_evaluation, run_evaluation
from tula_cli.services.events import Event, Note, Planned, WarningEvent, Work, follow
from tula_cli.services.exporting import export as exporting
from tula_cli.services.exporting.export import ExportResult
from tula_cli.services.nodes import ClusterCheck
from tula_cli.services.reporting import formats
from tula_cli.services.reporting.document import Document
from tula_cli.services.resume_test import ResumeFinding, run_resume_test
from tula_cli.services.status import RunStatus
from tula_cli.services.waiting import Dependencies, DetachedJobs, WaitPolicy
from tula_cli.spec.job import JobSpec
from tula_cli.spec.kinds import parse_size
from tula_cli.spec.load import load_spec, validate
from tula_cli.spec.merge import apply_overrides
from tula_cli.spec.old_keys import merge_old_keys, replace_old_keys

if TYPE_CHECKING:
    import pandas as pd
    from typing_extensions import Unpack


# --- Runs

Result = Measured | OutOfMemory | Failed


@dataclass(frozen=True)
class Status:
    """How far a run is, on each type of node; None is the type of a job that names none."""

    types: Mapping[str | None, RunStatus]

    @property
    def active(self) -> bool:
        """Whether a job is queued or running."""
        return any(run_status.active() for run_status in self.types.values())

    def frame(self) -> "pd.DataFrame":
        """Return one row a job: id, kind, nodes, state, reason, probes done and in all, node-hours."""
        columns = ("id", "kind", "nodes", "state", "reason", "done", "total", "node_hours")
        rows = [
            {"node_type": name or "", **{column: getattr(job, column) for column in columns}}
            for name, run_status in self.types.items()
            for job in run_status.jobs
        ]
        return make_frame(rows)


@dataclass(frozen=True)
class Run:
    """A run directory: what was measured, recommended and trained of one job.

    Every method looks at the files anew. `tula.profile` returns one; `Run.open` opens one that is there.
    """

    path: Path
    directory: RunDir = field(repr=False, compare=False)

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """Return the run in a folder.

        Raises:
            SpecError: there is no such folder, or it is not a run directory.
        """
        return cls.of(RunDir.open(Path(path).absolute()))

    @classmethod
    def of(cls, directory: RunDir) -> "Run":
        """Return the handle of a run directory."""
        return cls(directory.path, directory)

    @property
    def id(self) -> str:
        """The folder's name: that of the job and a signature of what its measurements depend on."""
        return self.directory.id

    def spec(self) -> JobSpec:
        """Return the job's settings, resolved."""
        return self.directory.spec()

    def probes(self) -> dict[str | None, list[Result]]:
        """Return what was measured, as typed records by the name of a part: a type of node, `length-128` of other
        lengths of text (search.sequence), None of a job without types at its own length.

        Raises:
            BadMeasurements: a result is damaged.
        """
        return {part.name: part.run.results() for part in list_parts_with_data(self.directory, self.spec())}

    def results(self) -> "pd.DataFrame":
        """Return one row a probe: its configuration, outcome, times (seconds) and peak memory (bytes of one GPU).

        `batch` is global, `local_batch` one GPU's; columns of whole numbers are Int64, also where some are missing.

        Raises:
            BadMeasurements: a result is damaged.
        """
        return make_frame(
            [_make_result_row(name, result) for name, results in self.probes().items() for result in results]
        )

    def recommendation(self) -> Recommendation | None:
        """Return the answer that training takes; None where there is none yet."""
        return self.directory.recommendation()

    def weights(self, signature: str) -> Path | None:
        """Return the checkpoint of the best epoch of a training: a file of torch.save whose key "model" is a state_dict.

        Args:
            signature: of the training, as `tula.train` returns it.

        Returns:
            None where there is none yet, and for a script, which saves where it likes.
        """
        parts = list_parts_with_data(self.directory, self.spec())
        return next((path for part in parts if (path := part.run.training(signature).weights())), None)

    def steps(self, signature: str) -> StepSeries:
        """Return what is kept of every step of a training, in columns, plain lists; empty ones where nothing is.

        Args:
            signature: of the training, as `tula.train` returns it.
        """
        parts = list_parts_with_data(self.directory, self.spec())
        trainings = (part.run.training(signature) for part in parts)
        return next((training.steps() for training in trainings if training.steps_path.exists()), StepSeries())

    def report(self) -> "Document":
        """Return all that it has found, as `tula report` has it: plain values, in sections with tables and figures.

        Raises:
            TulaError: a record of the run cannot be read.
        """
        from tula_cli.services.reporting.run_report import build_run_report  # with the services of all commands

        make_launcher = partial(launcher.make_launcher, submits=False)
        return build_run_report(self.directory, self.spec(), make_launcher, now=time.time())

    def status(self) -> Status:
        """Return how far its jobs and its training are; the scheduler is asked."""
        parts = list_parts_with_data(self.directory, self.spec())
        return Status(
            {
                part.name: status_service.run_status(
                    part.run, launcher.make_launcher(part.spec, submits=False), now=time.time()
                )
                for part in parts
            }
        )


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


# --- What the functions share

ROOT = "tula-runs"
Job = str | Path | Mapping[str, Any] | JobSpec
"""A job: the path of a job.yaml, its content as a mapping, or a spec."""
Target = Job | Run
"""A run, or the path of its folder, or the job that it is of."""
OnEvent = Callable[[Event], object]
Confirm = Callable[[Planned], bool]


class Settings(TypedDict, total=False):
    """Arguments of all functions that submit jobs.

    Keys:
        root: where the runs of jobs are kept; "tula-runs".
        overrides: settings laid over the job's, as `--set` does: ["search.nodes=[1,2]"].
        confirm: is given what is planned (with `.node_hours`), and tells whether to submit it; None for yes, within
            search.max_node_hours.
        wait: whether to wait for the jobs; None: on this machine, not on SLURM.
        on_event: is given every event; without it what deserves a warning is a Python warning, and the rest is dropped.
    """

    root: str | Path
    overrides: Sequence[str]
    confirm: Confirm | None
    wait: bool | None
    on_event: OnEvent | None


@dataclass(frozen=True)
class Call:
    """The subject of a call: the run (which may not exist yet), its settings, and their origin."""

    run: RunDir
    spec: JobSpec
    job: Path | None  # the file of the settings; None for those of the run, of a mapping or of a spec
    overrides: tuple[str, ...] = ()

    @classmethod
    def from_target(cls, target: Target, *, root: str | Path = ROOT, overrides: Sequence[str] = ()) -> "Call":
        """Return the run that is meant; of a job the one under `root`.

        Raises:
            SpecError: the job or an override cannot be used, or a folder is no run.
        """
        if isinstance(target, str | Path) and Path(target).is_dir():
            target = Run.open(target)
        if isinstance(target, Run):
            return cls(target.directory, load_with_overrides(target.directory, overrides), None, tuple(overrides))
        spec = load_job(target, overrides)
        run = run_of_job(Path(root), spec)
        return cls(run, spec, Path(target) if isinstance(target, str | Path) else None, tuple(overrides))

    @property
    def file(self) -> JobFile | None:
        """Where the settings come from, as a run keeps it."""
        return find_settings_origin(self.run, self.job, self.overrides)

    def measured(self) -> "Call":
        """Return this call, about a run that is there.

        Raises:
            BadMeasurements: it is not.
        """
        if not self.run.exists:
            raise BadMeasurements(f"nothing was measured for {self.spec.name} yet", "call profile first")
        return self


@dataclass(frozen=True)
class Submission:
    """A call that submits jobs."""

    call: Call
    dependencies: Dependencies
    wait_policy: WaitPolicy
    tell: OnEvent

    @classmethod
    def from_arguments(
        cls,
        target: Target,
        *,
        root: str | Path = ROOT,
        overrides: Sequence[str] = (),
        confirm: Confirm | None = None,
        wait: bool | None = None,
        timeout: float | None = None,
        fresh: bool = False,
        on_event: OnEvent | None = None,
    ) -> "Submission":
        """Return the call that the arguments of a function make.

        Raises:
            SpecError: the job, an override or an argument cannot be used, or a folder is no run.
        """
        require_number(timeout=timeout)
        require_callable(confirm=confirm, on_event=on_event)
        call, tell = Call.from_target(target, root=root, overrides=overrides), on_event or warn_of_event
        inspect = make_inspector(call.run.path.parent, fresh=fresh, tell=tell)
        asks = _make_confirm(call.spec, confirm)
        dependencies = Dependencies(launcher.make_launcher, inspect, asks)
        return cls(call, dependencies, WaitPolicy(wait, timeout), tell)


def load_job(job: Job, overrides: Sequence[str] = ()) -> JobSpec:
    """Return the settings of a job, with overrides.

    Raises:
        SpecError: the job or an override cannot be used.
    """
    if isinstance(job, str | Path):
        return load_spec(Path(job), overrides=overrides)
    if not isinstance(job, JobSpec | Mapping):
        raise SpecError(f"{job!r} is no job", "give the path of a job.yaml, its content as a mapping, or a spec")
    if isinstance(job, JobSpec) and not overrides:
        return job
    content = job.model_dump(mode="json", exclude_unset=True) if isinstance(job, JobSpec) else deepcopy(dict(job))
    content = replace_old_keys(content, source="the job")
    merge_old_keys(content, source="the job")
    apply_overrides(content, overrides, {})
    return validate(content, source="the job")


def make_inspector(root: str | Path, *, fresh: bool = False, tell: OnEvent | None = None) -> CachedInspection:
    """Return what inspects jobs, and remembers under `root` what it found."""
    note = tell or warn_of_event
    return CachedInspection(Path(root).absolute(), inspection.inspect, fresh=fresh, note=lambda text: note(Note(text)))


def _find_measured_run(target: Target, root: str | Path) -> Run:
    """Return the run of a target, which must be there already.

    Raises:
        SpecError: the job cannot be used.
        BadMeasurements: there is no run of it yet.
    """
    return Run.of(Call.from_target(target, root=root).measured().run)


def _make_confirm(spec: JobSpec, confirm: Confirm | None) -> Confirm:
    """Return who is asked before jobs are submitted: nobody where the job has a cap."""

    def allowed(planned: Planned) -> bool:
        if confirm is not None:
            return confirm(planned)
        if spec.search.max_node_hours is None:
            raise OverBudget(
                "not confirmed: the job has no search.max_node_hours, and there is nobody to ask",
                "set it, or give confirm=lambda planned: True",
            )
        return True

    return allowed


def warn_of_event(event: Event) -> None:
    """Make a Python warning of what deserves one, and drop the rest."""
    if isinstance(event, WarningEvent):
        warnings.warn(event.text, stacklevel=2)


def save_or_warn(write: Callable[[], object], *, is_required: bool) -> None:
    """Write what was asked for, or else where it can be: then it is a Python warning that it cannot.

    Raises:
        CannotWrite: what was asked for cannot be written.
    """
    try:
        write()
    except CannotWrite as error:
        if is_required:
            raise
        warnings.warn(f"not saved: {error.message}", stacklevel=3)


# --- Functions that submit nothing


def check(
    job: Job,
    *,
    overrides: Sequence[str] = (),
    node_type: str | None = None,
    online: bool = True,
    fresh: bool = False,
    root: str | Path = ROOT,
) -> CheckResult:
    """Check a job, and tell what it would search and cost.

    Args:
        job: the path of a job.yaml, its content as a mapping, or a spec.
        overrides: settings laid over the job's, as `--set` does: ["search.nodes=[1,2]"].
        node_type: this type of node alone.
        online: also build the model and the dataset, in a process of its own.
        fresh: build them also where it is known what they are.
        root: where runs are kept, and beside them what the model and the dataset are.

    Returns:
        A report for each type of node; `require_sound("my job")` raises where nothing can run.

    Raises:
        SpecError: the job cannot be used or built.
        JobFailed: the user's code fails.

    Example:
        >>> tula.check("job.yaml").problems
        {}
    """
    spec, inspect = load_job(job, overrides), make_inspector(root, fresh=fresh)
    run = run_of_job(Path(root), spec) if online else None
    return checking.check_all(spec, node_type=node_type, online=online, inspector=inspect, run=run)


def estimate(
    job: Job,
    *,
    memory: int | str | None = None,
    overrides: Sequence[str] = (),
    node_type: str | None = None,
    fresh: bool = False,
    root: str | Path = ROOT,
) -> dict[str | None, EstimateReport]:
    """Estimate the memory of one GPU by batch size; needs no GPU. Where the job has been probed, that corrects it.

    Args:
        memory: of one GPU, in bytes or like "16GiB"; None for what is known.
        job, overrides, node_type, fresh, root: as of `check`.

    Returns:
        A report for each type of node; None is the type of a job that names none.

    Raises:
        SpecError: the job cannot be used or built.
        JobFailed: the user's code fails.
        ValueError: `memory` is no size.
    """
    call = Call.from_target(job, root=root, overrides=overrides)
    capacity = None if memory is None else int(parse_size(memory))  # type: ignore[call-overload]
    inspect = make_inspector(root, fresh=fresh)
    return estimating.estimate_all(call.run, call.spec, capacity=capacity, node_type=node_type, inspector=inspect)


def recommend(
    run: Target,
    *,
    objective: Objective = "knee",
    curve: Curve = "time",
    nodes: int | None = None,
    max_nodes: int | None = None,
    max_batch: int | None = None,
    deadline_hours: float | None = None,
    budget: float | None = None,
    node_type: str | None = None,
    from_training: bool = False,
    every: bool = False,
    save: bool | None = None,
    overrides: Sequence[str] = (),
    root: str | Path = ROOT,
) -> Recommendation:
    """Choose nodes and batch size from what was measured.

    Args:
        run: a run, the path of its folder, or its job.
        objective: time, cost, knee, accuracy-time (the least time to the same progress), or energy (the least kWh).
        curve: the curve whose knee is looked for.
        nodes: this number of nodes only.
        max_nodes: at most so many.
        max_batch: global.
        deadline_hours: train within.
        budget: spend at most, in the currency of the pricing.
        node_type: this type of node only.
        from_training: go by what the steps of the training under way take now; only with `save` does it move.
        every: list every configuration, here and in results.csv; of more than 40 else those that are worth a look.
        save: whether `train` takes this answer; None: where it is the first, or renews that to the same criteria, and can be written.
        overrides: settings laid over the run's, as `--set` does: ["pricing.price=3"]; no later call takes them.
        root: where the runs of jobs are kept.

    Returns:
        The choice, and the configurations that it is listed with: `recommendation.frame()` is a table of them.

    Raises:
        SpecError: the job or an override cannot be used.
        BadMeasurements: nothing, or too little, was measured.
        Pending: probes are under way, and those done do not determine the answer yet.
        Infeasible: nothing is within the limits.

    Example:
        >>> tula.recommend(run, objective="cost", deadline_hours=24).choice.nodes
    """
    call = Call.from_target(run, root=root, overrides=overrides).measured()
    query = Query(
        objective=objective,
        curve=curve,
        nodes=nodes,
        max_nodes=max_nodes,
        max_batch=max_batch,
        deadline_hours=deadline_hours,
        budget=budget,
        node_type=node_type,
        from_training=from_training,
    )
    make_launcher = partial(launcher.make_launcher, submits=False)
    answer = recommending.answer_query(call.run, call.spec, query, launcher_for=make_launcher, overrides=overrides)
    recommendation = answer.recommendation
    renews = recommending.should_replace(recommendation, call.run.recommendation()) and not find_other_owner(
        call.run.path
    )
    if save if save is not None else renews:
        write = partial(recommending.save_answer, overrides=overrides, job=call.job, every=every)
        save_or_warn(partial(write, call.run, call.spec, answer), is_required=bool(save))
    return answer.with_all_rows() if every else recommendation


def status(run: Target, *, root: str | Path = ROOT) -> Status:
    """Tell how far a run's jobs and its training are; `.frame()` is a table of the jobs.

    Args:
        run: a run, the path of its folder, or its job.
        root: where the runs of jobs are kept.

    Raises:
        SpecError: the job cannot be used.
        BadMeasurements: there is no run of it yet.
    """
    return _find_measured_run(run, root).status()


# --- Functions that submit jobs


@dataclass(frozen=True)
class Finished:
    """The last event of `profile_events`."""

    run: Run


def check_nodes(
    job: Target,
    *,
    nodes: int | None = None,
    node_type: str | None = None,
    timeout: float | None = None,
    **settings: "Unpack[Settings]",
) -> ClusterCheck:
    """Look at the nodes of the cluster in a job of a minute or so, and wait for it: `tula check --on-cluster`.

    Args:
        job: the path of a job.yaml, its content as a mapping, a spec, or a run.
        nodes: how many; None for the fewest of the search, two or more where possible.
        node_type: the type of node, where the job names several.
        timeout: seconds to wait at most.
        settings: `root`, `overrides` and `on_event` of `Settings`; there is nothing to confirm, and it always waits.

    Returns:
        What each node told, problems and warnings; `require_sound("my job")` raises where there are problems.

    Raises:
        SpecError: the job cannot be used, names several types of node, or `nodes` is below 1 or more than there are.
        Pending: `timeout` is over.
        JobFailed: it has failed.
        SchedulerError: it was refused, or will never start.
        KeyboardInterrupt: Ctrl-C; the job goes on, and the same call attaches to it again.
    """
    for name in ("confirm", "wait"):
        if name in settings:
            raise TypeError(f"check_nodes() takes no {name}: it asks nobody, and waits")
    submission = Submission.from_arguments(job, timeout=timeout, **settings)
    call = submission.call
    work = node_checking.run_node_check(
        call.run,
        call.spec,
        submission.dependencies.launcher_for,
        nodes=nodes,
        node_type=node_type,
        timeout=timeout,
        file=call.file,
    )
    return follow(work, submission.tell)


def profile(
    job: Target,
    *,
    max_node_hours: float | None = None,
    timeout: float | None = None,
    fresh: bool = False,
    **settings: "Unpack[Settings]",
) -> Run:
    """Measure short training runs over nodes and batch sizes: only what is missing; jobs under way are attached to.

    Args:
        job: the path of a job.yaml, its content as a mapping, a spec, or a run.
        max_node_hours: in place of the job's search.max_node_hours: what it may take at most.
        timeout: seconds to wait at most.
        fresh: build the model and the dataset also where it is known what they are.
        settings: root, overrides, confirm, wait, on_event; see `Settings`.

    Returns:
        The run; `run.results()` is a table of its probes.

    Raises:
        SpecError: the job cannot be used or built.
        Infeasible: no configuration fits.
        OverBudget: more than the cap on node-hours, or not confirmed, or neither a cap nor `confirm`.
        Pending: `timeout` is over.
        JobFailed, OutOfMemoryAtMinimum, BadMeasurements: nothing was measured.
        SchedulerError: a job was refused.
        KeyboardInterrupt: Ctrl-C; the jobs go on, and the same call attaches to them again.

    Example:
        >>> run = tula.profile("job.yaml", max_node_hours=2)
        >>> run.results()[["nodes", "batch", "step_time_s"]]
    """
    submission = Submission.from_arguments(job, timeout=timeout, fresh=fresh, **_with_cap(settings, max_node_hours))
    follow(_run_profile_work(submission), submission.tell)
    return Run.of(submission.call.run)


def profile_events(
    job: Target,
    *,
    max_node_hours: float | None = None,
    timeout: float | None = None,
    fresh: bool = False,
    **settings: "Unpack[Settings]",
) -> Iterator[Event | Finished]:
    """Do the same as `profile`, and yield its events; the last one, Finished, has the run.

    The work goes on while one iterates: who stops iterating leaves the jobs that are submitted as they are.

    Args, Raises:
        as of `profile`; there is no on_event.

    Example:
        >>> for event in tula.profile_events("job.yaml"):
        ...     print(event)
    """
    if "on_event" in settings:
        raise TypeError("profile_events() takes no on_event: it yields the events")
    submission = Submission.from_arguments(job, timeout=timeout, fresh=fresh, **_with_cap(settings, max_node_hours))
    yield from _run_profile_work(submission)
    yield Finished(Run.of(submission.call.run))


def _with_cap(settings: Settings, max_node_hours: float | None) -> Settings:
    if max_node_hours is None:
        return settings
    cap = f"search.max_node_hours={max_node_hours}"
    return {**settings, "overrides": (*settings.get("overrides", ()), cap)}


def _run_profile_work(
    submission: Submission,
) -> Work[profiling_rounds.ProfileResult | profiling_rounds.SubmittedProbes]:
    call = submission.call
    return profiling_rounds.run_profile(
        call.run, call.spec, submission.dependencies, submission.wait_policy, file=call.file
    )


def train(
    run: Target,
    *,
    nodes: int | None = None,
    batch: int | None = None,
    node_type: str | None = None,
    rehearse: bool = True,
    within_balance: bool = False,
    timeout: float | None = None,
    **settings: "Unpack[Settings]",
) -> Summary | None:
    """Train at the recommended nodes and batch size, or attach to the training, or go on from its newest checkpoint.

    Args:
        run: a run, the path of its folder, or its job.
        nodes: in place of the recommended ones.
        batch: global; in place of the recommended one.
        node_type: in place of the recommended type.
        rehearse: try a script's resume first, once, where training takes more than an hour.
        within_balance: refuse where the account's balance does not carry it (OverBudget).
        timeout: seconds to wait at most.
        settings: root, overrides, confirm, wait, on_event; see `Settings`.

    Returns:
        Predicted against actual and how good it is; None where nobody waits for it (`tula.status(run)` tells).

    Raises:
        SpecError: the job or the batch cannot be used.
        BadMeasurements: nothing is recommended, and nodes and batch are not given.
        OverBudget: not confirmed, or neither search.max_node_hours nor `confirm` is there.
        Pending: `timeout` is over.
        CannotResume: its script cannot go on from its own checkpoint, and it takes more than an hour.
        OutOfMemoryAtMinimum, Diverged, DeviceFault, JobFailed: it has ended so.
        SchedulerError: it was refused.
        KeyboardInterrupt: Ctrl-C; the training goes on, and the same call attaches to it again.
    """
    submission = Submission.from_arguments(run, timeout=timeout, **settings)
    call, inspect = submission.call, submission.dependencies.inspect
    work = training.prepare_training(
        call.run, call.spec, inspect, nodes=nodes, batch=batch, node_type=node_type, rehearse=rehearse,
        within_balance=within_balance,
    )  # fmt: skip
    summary = follow(
        training.run_training(
            follow(work, submission.tell), submission.dependencies, submission.wait_policy, file=call.file
        ),
        submission.tell,
    )
    return None if isinstance(summary, DetachedJobs) else summary


def compare(
    run: Target,
    *,
    methods: Sequence[str] | None = None,
    batches: Sequence[int] | None = None,
    seeds: int | None = None,
    nodes: int | None = None,
    controls: bool | None = None,
    node_type: str | None = None,
    **settings: "Unpack[Settings]",
) -> CompareReport:
    """Train with several methods, batches and seeds, and compare the accuracy; what is trained already stays.

    Args:
        run: a run, the path of its folder, or its job.
        methods: values of train.method, or lbt-x2, lbt-x4, sqrt, sqrt-beta2, robust, with settings of the row's own behind
            colons: "ags:delta=0.1", "lbt:optimizer.lr=0.2".
        batches: global.
        seeds: how many, from train.seed on.
        nodes: in place of the recommended ones.
        controls: whether lbt at twice and four times the learning rate is part of it.
        node_type: in place of the recommended type.
        settings: root, overrides, confirm, wait, on_event; see `Settings`.

    Returns:
        The table, whole or partial (trainings that failed are counted in it); `report.frame()` is one of pandas.

    Raises:
        SpecError: the job, a method or a batch cannot be used, or not to wait on this machine.
        BadMeasurements: no batch is given, known or recommended.
        OverBudget: not confirmed, or neither search.max_node_hours nor `confirm` is there.
        JobFailed: the first trainings have all failed.
        KeyboardInterrupt: Ctrl-C; what is trained stays, and what runs goes on.
    """
    require_list(methods=methods, batches=batches)
    submission = Submission.from_arguments(run, **settings)
    call = submission.call
    request = session.GridRequest(tuple(methods or ()) or None, tuple(batches or ()) or None, seeds, nodes, controls)
    ready = follow(
        session.prepare(call.run, call.spec, request, submission.dependencies, node_type=node_type), submission.tell
    )
    return follow(
        session.run_comparison(ready, submission.dependencies, submission.wait_policy, file=call.file), submission.tell
    ).report


def diff(before: str | Path | Run, after: str | Path | Run, *, root: str | Path = ROOT) -> RunDifference:
    """Tell what is different between two runs: `tula diff`. Nothing is written.

    Args:
        before: A: a run, the path of its folder, or its name under `root`.
        after: B, alike.
        root: where runs are kept.

    Returns:
        `.headline` is the answer in a line or two, `.same` whether nothing differs, `.frame()` a table of step times.

    Raises:
        SpecError: there is no such run, or both are the same one.
        BadMeasurements: a record of theirs is damaged.

    Example:
        >>> print(*tula.diff("digits-1f0c5b7e", "digits-9a4e02cd").headline, sep="\\n")
    """
    return compare_runs(_as_run_directory(before, Path(root)), _as_run_directory(after, Path(root)))


def _as_run_directory(named: str | Path | Run, root: Path) -> RunDir:
    if isinstance(named, Run):
        return named.directory
    path = Path(named)
    inside = root / path
    return RunDir.open((path if path.exists() or not inside.is_dir() else inside).absolute())


def evaluate(
    run: Target,
    *,
    weights: str | Path | None = None,
    training: str | None = None,
    nodes: int = 1,
    node_type: str | None = None,
    fresh: bool = False,
    timeout: float | None = None,
    **settings: "Unpack[Settings]",
) -> EvaluationRecord | None:
    """Evaluate the weights of a training on dataset.test; without one on the samples that training is evaluated on.

    Args:
        run: a run, the path of its folder, or its job.
        weights: "best", "last" or the path of a file; None: best where there is one, else last.
        training: its signature, as `tula.train` returns it; None for the one that was started last.
        nodes: how many share the samples.
        node_type: look for trainings on this type alone.
        fresh: evaluate although it is known what they come to.
        timeout: seconds to wait at most.
        settings: root, overrides, confirm, wait, on_event; see `Settings`. Nobody is asked on this machine.

    Returns:
        Loss, top-1 and top-5 (percent), perplexity and train.metrics, those that there are, as `.metrics`; None where nobody
        waits for it (`tula.status(run)` tells).

    Raises:
        SpecError: the job, the training or the file cannot be used, or a script trains by itself.
        BadMeasurements: nothing is trained yet, or nothing of it is saved.
        OverBudget: not confirmed, or neither search.max_node_hours nor `confirm` is there.
        Pending: `timeout` is over.
        DeviceFault, JobFailed: it has ended so.
        SchedulerError: it was refused.
        KeyboardInterrupt: Ctrl-C; the job goes on, and the same call attaches to it again.

    Example:
        >>> tula.evaluate(run, weights="best").metrics["top1"]
    """
    submission = Submission.from_arguments(run, timeout=timeout, **settings)
    request = EvaluationRequest(None if weights is None else str(weights), training, nodes, fresh)
    prepared = prepare_evaluation(submission.call.run, submission.call.spec, request, node_type=node_type)
    evaluation = follow(run_evaluation(prepared, submission.dependencies, submission.wait_policy), submission.tell)
    return None if isinstance(evaluation, DetachedJobs) else evaluation


def export(
    run: Target,
    to: str | Sequence[str] = (),
    *,
    uri: str | None = None,
    project: str | None = None,
    follow: bool = False,
    every: float | None = None,
    on_event: OnEvent | None = None,
    root: str | Path = ROOT,
) -> tuple[ExportResult, ...]:
    """Send a run's settings, probes, recommendation and trainings to trackers: `tula export`. What was sent is not sent again.

    Args:
        run: a run, the path of its folder, or its job.
        to: "mlflow", "wandb", "tensorboard" or "package.module:callable", one or several; none: those of section export.
        uri: the place of the one that is named; None: the tracker's own, or the run.
        project: MLflow's experiment, W&B's project; None: the job's name.
        follow: go on while jobs run.
        every: seconds between two looks; None: 30.
        on_event: is given every event; without it what deserves a warning is a Python warning, and the rest is dropped.
        root: where the runs of jobs are kept.

    Returns:
        What was sent to each, and how much of it is new. The report on the run is sent as Markdown.

    Raises:
        SpecError: the job or an argument cannot be used, a tracker's package is missing, or nothing says where to.
        BadMeasurements: there is no run of it yet.
        TrackerError: one did not answer, or not to all; the same call sends what was missed.
        TulaError: the run cannot be read or written.
        KeyboardInterrupt: Ctrl-C while it follows.

    Example:
        >>> tula.export(run, "mlflow", uri="http://tracking.example.org:5000")[0].new_points
    """
    require_number(every=every)
    require_callable(on_event=on_event)
    call = Call.from_target(run, root=root).measured()
    trackers = exporting.list_requested_trackers(
        call.spec, [to] if isinstance(to, str) else list(to), uri=uri, project=project
    )
    results = events.follow(
        exporting.export_run(call.run, trackers, follow=follow, every=every), on_event or warn_of_event
    )
    exporting.require_sent(results)
    return results


def rehearse(
    job: Target,
    *,
    fresh: bool = False,
    node_type: str | None = None,
    timeout: float | None = None,
    **settings: "Unpack[Settings]",
) -> ResumeFinding:
    """Try how a script goes on from its own checkpoint, in a job of one node, and wait for it: `tula check --rehearse`.

    Args:
        job: the path of a job.yaml, its content as a mapping, a spec, or a run.
        fresh: rehearse although there is a verdict.
        node_type: the type of node, where the job names several.
        timeout: seconds to wait at most.
        settings: `root`, `overrides` and `on_event` of `Settings`; there is nothing to confirm, and it always waits.

    Returns:
        What was found (`.resumes`, `.why`, `.rehearsal`); `require_found("my job")` raises where nothing was, and
        `require_resumable("my job", "")` where its checkpoint is of no use to the script.

    Raises:
        SpecError: the job cannot be used, has no script with a resume, or names several types of node.
        OverBudget: it may take more than is left of search.max_node_hours.
        Pending: `timeout` is over.
        JobFailed: it ended without having found anything.
        SchedulerError: it was refused, or will never start.
        KeyboardInterrupt: Ctrl-C; the job goes on, and the same call attaches to it again.
    """
    for name in ("confirm", "wait"):
        if name in settings:
            raise TypeError(f"rehearse() takes no {name}: it asks nobody, and waits")
    submission = Submission.from_arguments(job, timeout=timeout, **settings)
    call, launcher_for = submission.call, submission.dependencies.launcher_for
    finding = run_resume_test(
        call.run, call.spec, launcher_for, node_type=node_type, timeout=timeout, fresh=fresh, file=call.file
    )  # fmt: skip
    return follow(finding, submission.tell)


Form = Literal["markdown", "latex", "csv"]


def report(run: Target, *, root: str | Path = ROOT) -> Document:
    """Return all that a run has found: sections with tables and figures, in plain values.

    Args:
        run: a run, the path of its folder, or its job.
        root: where the runs of jobs are kept.

    Raises:
        SpecError: the job cannot be used.
        BadMeasurements: there is no run of it yet.
        TulaError: a record of the run cannot be read.

    Example:
        >>> tula.report(run).answer
    """
    return _find_measured_run(run, root).report()


def report_text(run: Target, *, form: Form = "markdown", root: str | Path = ROOT) -> str:
    """Return the report of a run as text.

    Args:
        run: a run, the path of its folder, or its job.
        form: "markdown", "latex" or "csv".
        root: where the runs of jobs are kept.

    Raises:
        SpecError: the job cannot be used, or there is no such form.
        BadMeasurements: there is no run of it yet.
        TulaError: a record of the run cannot be read.

    Example:
        >>> print(tula.report_text(run, form="latex"))
    """
    if form not in get_args(Form):
        raise SpecError(
            f"form {form!r} is none of {', '.join(get_args(Form))}", suggest_nearest(str(form), get_args(Form))
        )
    forms = {"markdown": formats.render_markdown, "latex": formats.render_latex, "csv": formats.render_csv}
    return forms[form](report(run, root=root))
