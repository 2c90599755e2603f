"""The functions of the Python API: each does what the command of its name does, returns it, and prints nothing."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tula_cli.cluster import launcher
from tula_cli.errors import require_list
from tula_cli.models.choice.objective import Curve, Objective
from tula_cli.run.code import run_of_job
from tula_cli.run.owner import other_owner
from tula_cli.run.records.recommendations import Recommendation
from tula_cli.run.records.results import Summary
from tula_cli.services import check as checking
from tula_cli.services import estimate as estimating
from tula_cli.services import nodes as node_checking
from tula_cli.services import profiling_rounds
from tula_cli.services import recommend as recommending
from tula_cli.services import train as training
from tula_cli.services.api.calls import (
    ROOT,
    Call,
    Job,
    Settings,
    Submission,
    Target,
    load_job,
    make_inspector,
    save_or_warn,
)
from tula_cli.services.api.handles import Run, Status
from tula_cli.services.check import CheckResult
from tula_cli.services.comparison import session
from tula_cli.services.comparison.accuracy import CompareReport
from tula_cli.services.estimate import EstimateReport
from tula_cli.services.events import Event, Work, follow
from tula_cli.services.nodes import ClusterCheck
from tula_cli.services.recommendation.limits import Criteria, Limits
from tula_cli.services.waiting import DetachedJobs
from tula_cli.spec.kinds import parse_size

if TYPE_CHECKING:
    from typing_extensions import Unpack

# --- what submits nothing


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
    limits = Limits(nodes, max_nodes, max_batch, deadline_hours, budget, same_progress=objective == "accuracy-time")
    criteria = Criteria(objective, limits, curve, node_type, from_training)
    make_launcher = functools.partial(launcher.launcher_for, submits=False)
    answer = recommending.answer_query(call.run, call.spec, criteria, launcher_for=make_launcher, overrides=overrides)
    recommendation = answer.recommendation
    renews = recommending.should_replace(recommendation, call.run.recommendation()) and not other_owner(call.run.path)
    if save if save is not None else renews:
        write = functools.partial(recommending.save_answer, overrides=overrides, job=call.job, every=every)
        save_or_warn(functools.partial(write, call.run, call.spec, answer), is_required=bool(save))
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
    return Run.of(Call.from_target(run, root=root).measured().run).status()


# --- what submits jobs


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
    follow(_profile_work(submission), submission.tell)
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
    yield from _profile_work(submission)
    yield Finished(Run.of(submission.call.run))


def _with_cap(settings: Settings, max_node_hours: float | None) -> Settings:
    if max_node_hours is None:
        return settings
    cap = f"search.max_node_hours={max_node_hours}"
    return {**settings, "overrides": (*settings.get("overrides", ()), cap)}


def _profile_work(submission: Submission) -> Work[profiling_rounds.ProfileResult | profiling_rounds.SubmittedProbes]:
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
