"""The functions of the Python API: each does what the command of its name does, returns it, and prints nothing."""

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tula_cli.cluster import inspection, launcher
from tula_cli.errors import BadMeasurements, OverBudget
from tula_cli.models.choice.objective import Curve, Objective
from tula_cli.run.jobfile import origin
from tula_cli.run.records.recommendations import Recommendation
from tula_cli.run.records.results import Summary
from tula_cli.services import check as checking
from tula_cli.services import estimate as estimating
from tula_cli.services import recommend as recommending
from tula_cli.services import train as training
from tula_cli.services.api.handles import Job, Named, Run, Status, Target, named, spec_of
from tula_cli.services.check import Checked
from tula_cli.services.comparison import session
from tula_cli.services.comparison.accuracy import CompareReport
from tula_cli.services.estimate import EstimateReport
from tula_cli.services.events import Event, Planned, Warned, Work, follow
from tula_cli.services.profiling import rounds
from tula_cli.services.recommendation.limits import Limits, Question
from tula_cli.services.waiting import Detached, Means, Patience
from tula_cli.spec.job import JobSpec
from tula_cli.spec.kinds import parse_size

ROOT = "tula-runs"
OnEvent = Callable[[Event], object]
Confirm = Callable[[Planned], bool]


@dataclass(frozen=True)
class Finished:
    """The last event of `profile_events`."""

    run: Run


def check(job: Job, *, node_type: str | None = None, online: bool = True) -> Checked:
    """Check a job, and tell what it would search and cost.

    Args:
        job: the path of a job.yaml, its content as a mapping, or a spec.
        node_type: this type of node alone.
        online: also build the model and the dataset, in a process of its own.

    Returns:
        A report for each type of node; `require_sound("my job")` raises where nothing can run.

    Raises:
        SpecError: the job cannot be used or built.
        JobFailed: the user's code fails.

    Example:
        >>> tula.check("job.yaml").problems
        {}
    """
    return checking.check_all(spec_of(job)[0], node_type=node_type, online=online)


def estimate(
    job: Job, *, memory: int | str | None = None, node_type: str | None = None, root: str | Path = ROOT
) -> dict[str | None, EstimateReport]:
    """Estimate the memory of one GPU by batch size; needs no GPU. Where the job has been probed, that corrects it.

    Args:
        job: the path of a job.yaml, its content as a mapping, or a spec.
        memory: of one GPU, in bytes or like "16GiB"; None for what is known.
        node_type: this type of node alone.
        root: where runs are kept.

    Returns:
        A report for each type of node; None is the type of a job that names none.

    Raises:
        SpecError: the job cannot be used or built.
        JobFailed: the user's code fails.
        ValueError: `memory` is no size.
    """
    own = named(job, root)
    capacity = None if memory is None else int(parse_size(memory))  # type: ignore[call-overload]
    return {
        part.type: estimating.estimate(part.spec, capacity=capacity, results=part.run.results())
        for part in own.run.parts(own.spec, node_type)
    }


def profile(
    job: Target,
    *,
    root: str | Path = ROOT,
    max_node_hours: float | None = None,
    confirm: Confirm | None = None,
    wait: bool | None = None,
    timeout: float | None = None,
    on_event: OnEvent | None = None,
) -> Run:
    """Measure short training runs over nodes and batch sizes: only what is missing; jobs under way are attached to.

    Args:
        job: the path of a job.yaml, its content as a mapping, a spec, or a run.
        root: where runs are kept.
        max_node_hours: in place of the job's search.max_node_hours: what it may take at most.
        confirm: is given what is planned (with `.node_hours`), and tells whether to submit it; None for yes, within
            search.max_node_hours.
        wait: whether to wait for the jobs; None: on this machine, not on SLURM.
        timeout: seconds to wait at most.
        on_event: is given every event; without it what deserves a warning is a Python warning, and the rest is dropped.

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
    work, run = _profiling(job, root, max_node_hours, confirm, Patience(wait, timeout))
    follow(work, on_event or _warn)
    return run


def profile_events(
    job: Target,
    *,
    root: str | Path = ROOT,
    max_node_hours: float | None = None,
    confirm: Confirm | None = None,
    wait: bool | None = None,
    timeout: float | None = None,
) -> Iterator[Event | Finished]:
    """Do the same as `profile`, and yield its events; the last one, Finished, has the run.

    The work goes on while one iterates: who stops iterating leaves the jobs that are submitted as they are.

    Args, Raises:
        as of `profile`.

    Example:
        >>> for event in tula.profile_events("job.yaml"):
        ...     print(event)
    """
    work, run = _profiling(job, root, max_node_hours, confirm, Patience(wait, timeout))
    yield from work
    yield Finished(run)


def _profiling(
    job: Target, root: str | Path, max_node_hours: float | None, confirm: Confirm | None, patience: Patience
) -> tuple[Work[rounds.Profiled | rounds.Submitted], Run]:
    own, overrides = named(job, root), []
    if max_node_hours is not None:
        overrides = [f"search.max_node_hours={max_node_hours}"]
        search = own.spec.search.model_copy(update={"max_node_hours": max_node_hours})
        own = replace(own, spec=own.spec.model_copy(update={"search": search}))
    file = origin(own.run, own.file, overrides)
    return rounds.work(own.run, own.spec, _means(own.spec, confirm), patience, file=file), Run.of(own.run)


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
    save: bool | None = None,
    root: str | Path = ROOT,
) -> Recommendation:
    """Choose nodes and batch size from what was measured.

    Args:
        run: a run, the path of its folder, or its job.
        objective: time, cost, knee, or accuracy-time: the least time to the same progress.
        curve: the curve whose knee is looked for.
        nodes: this number of nodes only.
        max_nodes: at most so many.
        max_batch: global.
        deadline_hours: train within.
        budget: spend at most, in the currency of the pricing.
        node_type: this type of node only.
        save: whether `train` takes this answer; None: where it is the first, or renews the answer to the same question.
        root: where the runs of jobs are kept.

    Returns:
        The choice, and every configuration: `recommendation.frame()` is a table of them.

    Raises:
        SpecError: the job cannot be used.
        BadMeasurements: nothing, or too little, was measured.
        Pending: probes are under way, and those done do not determine the answer yet.
        Infeasible: nothing is within the limits.

    Example:
        >>> tula.recommend(run, objective="cost", deadline_hours=24).choice.nodes
    """
    own = _measured(run, root)
    limits = Limits(nodes, max_nodes, max_batch, deadline_hours, budget, same_progress=objective == "accuracy-time")
    question = Question(objective, limits, curve, node_type)
    looks = functools.partial(launcher.launcher_for, submits=False)
    answer = recommending.ask(own.run, own.spec, question, launcher_for=looks)
    found = answer.recommendation
    if save if save is not None else recommending.renews(found, own.run.recommendation()):
        recommending.save(own.run, own.spec, answer, job=own.file)
    return found


def train(
    run: Target,
    *,
    nodes: int | None = None,
    batch: int | None = None,
    node_type: str | None = None,
    confirm: Confirm | None = None,
    wait: bool | None = None,
    timeout: float | None = None,
    on_event: OnEvent | None = None,
    root: str | Path = ROOT,
) -> Summary | None:
    """Train at the recommended nodes and batch size, or attach to the training, or go on from its newest checkpoint.

    Args:
        run: a run, the path of its folder, or its job.
        nodes: in place of the recommended ones.
        batch: global; in place of the recommended one.
        node_type: in place of the recommended type.
        confirm, wait, timeout, on_event: as of `profile`.
        root: where the runs of jobs are kept.

    Returns:
        Predicted against actual and how good it is; None where nobody waits for it (`tula.status(run)` tells).

    Raises:
        SpecError: the job or the batch cannot be used.
        BadMeasurements: nothing is recommended, and nodes and batch are not given.
        OverBudget: not confirmed, or neither search.max_node_hours nor `confirm` is there.
        Pending: `timeout` is over.
        OutOfMemoryAtMinimum, Diverged, JobFailed: it has ended so.
        SchedulerError: it was refused.
        KeyboardInterrupt: Ctrl-C; the training goes on, and the same call attaches to it again.
    """
    own, tell = named(run, root), on_event or _warn
    means = _means(own.spec, confirm)
    ready = follow(
        training.prepare(own.run, own.spec, means.inspect, nodes=nodes, batch=batch, node_type=node_type), tell
    )
    file = origin(own.run, own.file, ())
    found = follow(training.work(ready, means, Patience(wait, timeout), file=file), tell)
    return None if isinstance(found, Detached) else found


def compare(
    run: Target,
    *,
    methods: Sequence[str] | None = None,
    batches: Sequence[int] | None = None,
    seeds: int | None = None,
    nodes: int | None = None,
    controls: bool | None = None,
    node_type: str | None = None,
    confirm: Confirm | None = None,
    wait: bool | None = None,
    on_event: OnEvent | None = None,
    root: str | Path = ROOT,
) -> CompareReport:
    """Train with several methods, batches and seeds, and compare the accuracy; what is trained already stays.

    Args:
        run: a run, the path of its folder, or its job.
        methods: values of train.method, or lbt-x2, lbt-x4, sqrt, robust.
        batches: global.
        seeds: how many, from train.seed on.
        nodes: in place of the recommended ones.
        controls: whether lbt at twice and four times the learning rate is part of it.
        node_type: in place of the recommended type.
        confirm, wait, on_event: as of `profile`.
        root: where the runs of jobs are kept.

    Returns:
        The table, whole or partial (trainings that failed are counted in it); `report.frame()` is one of pandas.

    Raises:
        SpecError: the job, a method or a batch cannot be used, or not to wait on this machine.
        BadMeasurements: no batch is given, known or recommended.
        OverBudget: not confirmed, or neither search.max_node_hours nor `confirm` is there.
        JobFailed: the first trainings have all failed.
        KeyboardInterrupt: Ctrl-C; what is trained stays, and what runs goes on.
    """
    own, tell = named(run, root), on_event or _warn
    means = _means(own.spec, confirm)
    asked = session.Asked(tuple(methods or ()) or None, tuple(batches or ()) or None, seeds, nodes, controls)
    ready = follow(session.prepare(own.run, own.spec, asked, means, node_type=node_type), tell)
    file = origin(own.run, own.file, ())
    return follow(session.work(ready, means, Patience(wait), file=file), tell).report


def status(run: Target, *, root: str | Path = ROOT) -> Status:
    """Tell how far a run's jobs and its training are; `.frame()` is a table of the jobs.

    Args:
        run: a run, the path of its folder, or its job.
        root: where the runs of jobs are kept.

    Raises:
        SpecError: the job cannot be used.
        BadMeasurements: there is no run of it yet.
    """
    return Run.of(_measured(run, root).run).status()


def _measured(target: Target, root: str | Path) -> Named:
    own = named(target, root)
    if not own.run.exists:
        raise BadMeasurements(f"nothing was measured for {own.spec.name} yet", "call profile first")
    return own


def _means(spec: JobSpec, confirm: Confirm | None) -> Means:
    def allowed(planned: Planned) -> bool:
        if confirm is not None:
            return confirm(planned)
        if spec.search.max_node_hours is None:
            raise OverBudget(
                "not confirmed: the job has no search.max_node_hours, and there is nobody to ask",
                "set it, or give confirm=lambda planned: True",
            )
        return True

    return Means(launcher.launcher_for, inspection.inspect, allowed)


def _warn(event: Event) -> None:
    if isinstance(event, Warned):
        warnings.warn(event.text, stacklevel=2)
