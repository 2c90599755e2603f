"""`tula train`: where to train, submitting it, and what came of it."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tula_cli.cluster.launcher import Launcher, submitting, under_way
from tula_cli.cluster.scheduling.chains import nodes_of_links
from tula_cli.cluster.slurm import first_job
from tula_cli.cluster.stopping.full_disk import let_go
from tula_cli.errors import BadMeasurements, Infeasible, JobFailed, Pending, SchedulerError, SpecError, require_positive
from tula_cli.models import halving
from tula_cli.models.choice.grid import batches, check_divides
from tula_cli.models.cost import price_words
from tula_cli.models.observations import NO_OTHER_SIZES, OtherSizes
from tula_cli.models.overheads import queue_wait
from tula_cli.models.ramp.by_noise import continued, put_off
from tula_cli.models.ramp.stage_nodes import check_stages, parts_on, stages_worth_of, with_nodes
from tula_cli.run.code import behind, choose, snapshot
from tula_cli.run.directory import Part, RunDir
from tula_cli.run.imports import Source
from tula_cli.run.jobfile import adopt
from tula_cli.run.records.base import Market
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.recommendations import Prediction, Recommendation
from tula_cli.run.records.results import JobFile, Summary
from tula_cli.run.records.tasks import Rung, TrainTask
from tula_cli.run.source.weights_file import with_weights
from tula_cli.services.events import Note, TrainPlanned, WarningEvent, Work
from tula_cli.services.progress.earlier_ends import ExpectedEnd, expected_end
from tula_cli.services.progress.ending import CANCELLED, failure_of, require_found
from tula_cli.services.recommendation.beyond.other_sizes import recommended_by
from tula_cli.services.recommendation.beyond.queue_waits import as_chosen as with_its_limit
from tula_cli.services.recommendation.beyond.queue_waits import first_bound
from tula_cli.services.recommendation.continuing import left_behind, moved, require_stopped
from tula_cli.services.recommendation.gradient_noise_of import planned_stages
from tula_cli.services.recommendation.measured import as_recommended
from tula_cli.services.recommendation.saves import cost_of_interruption
from tula_cli.services.rehearsal import before_training
from tula_cli.services.rehearsal.rehearse import beyond_what_is_left
from tula_cli.services.waiting import (
    Dependencies,
    DetachedJobs,
    WaitPolicy,
    allow,
    doubts_of_new,
    interruption_of_jobs,
    wait_for,
)
from tula_cli.spec.job import JobSpec
from tula_cli.spec.signature import train_signature


@dataclass(frozen=True)
class TrainPlan:
    """What training would do now."""

    task: TrainTask
    prediction: Prediction | None
    source: str  # where nodes and batch come from, in words
    finished: bool  # there is nothing left to do
    resumes: int | None  # samples of the newest checkpoint, None where it starts from the beginning
    code: Source  # the user's own code that it runs
    price: str = ""  # in words, with unit, source and date
    interruption: str = ""  # what one costs a script, in words
    rehearses: bool = False  # a rehearsal of the script's resume comes first
    wait_bound: float | None = None  # seconds, of its first job; None where the queue was not asked
    ends: ExpectedEnd | None = None  # where train.until is expected to end it; None where nothing tells


def part(run: RunDir, spec: JobSpec, node_type: str | None) -> tuple[Part, Recommendation | None]:
    """Return the part of a job to train and what is recommended there; the whole job where it names no node types.

    Args:
        run: the run.
        spec: the job.
        node_type: the type to train on; None for the recommended one.

    Raises:
        BadMeasurements: there are types, but none is given or recommended.
        SpecError: there is no such type.
    """
    found = run.recommendation()
    if spec.types and node_type is None:
        if found is None:
            raise BadMeasurements(
                f"{run.id} has no recommendation, and --type not given",
                "run tula recommend first, or name all: tula train --type NAME --nodes N --batch B",
            )
        node_type = found.choice.type
    (chosen,) = run.parts(spec, node_type)
    if found is None or found.choice.type != (chosen.type or ""):
        found = chosen.run.recommendation()
    return chosen, found


def plan(
    run: RunDir,
    spec: JobSpec,
    *,
    nodes: int | None = None,
    batch: int | None = None,
    recommendation: Recommendation | None = None,
    others: OtherSizes = NO_OTHER_SIZES,
    inspect: Callable[[JobSpec], Inspection],
) -> TrainPlan:
    """Decide nodes and batch: those given, else the recommended ones.

    Args:
        run: the run, with or without probes.
        spec: the job.
        nodes: number of nodes.
        batch: global batch.
        recommendation: what is recommended; None for what the run itself recommends.
        others: with other numbers of GPUs a node, for the prediction.
        inspect: tells the dataset's size where no probe has.

    Raises:
        BadMeasurements: neither given nor recommended.
        SpecError: a batch that cannot be trained on that many nodes, or that is larger than the dataset.
    """
    require_positive(nodes=nodes, batch=batch)
    recommendation = recommendation or run.recommendation()
    choice = recommendation.choice if recommendation is not None else None
    if choice is None and (nodes is None or batch is None):
        raise BadMeasurements(
            f"{run.id} has no recommendation, and {'--batch' if nodes else '--nodes and --batch'} not given",
            "run tula recommend, which says why where it leaves something out; or name both: tula train --nodes N --batch B",
        )
    source = _source(recommendation, [word for word, value in (("nodes", nodes), ("batch", batch)) if value])
    if choice is not None:
        nodes, batch = nodes or choice.nodes, batch or choice.batch
    assert nodes is not None
    assert batch is not None
    check_divides(batch, parts_on(spec, nodes))
    code = _code(run, spec, nodes, batch)
    as_chosen = choice is not None and (choice.nodes, choice.batch) == (nodes, batch)
    rungs = _ladder(run, spec, nodes, batch, recommendation, others)
    task = _task(with_its_limit(spec, choice if as_chosen else None), nodes, batch, code, rungs)
    task = moved(run, task, recommendation if as_chosen else None, code=code.identity)
    newest = run.training(task.signature).newest_task()
    if newest is None or task.attempt > newest.attempt:
        task = _staged(run, task, newest, recommendation if as_chosen else None, _dataset_size(run, spec, inspect))
    step = task.prediction.step_time if task.prediction else None
    return TrainPlan(
        task=_again(newest, task) if newest and newest.attempt >= task.attempt else task,
        prediction=task.prediction,
        source=source,
        finished=run.training(task.signature).summary() is not None,
        resumes=run.training(task.signature).newest_samples() or None,
        code=code,
        price=price_words(spec.pricing),
        wait_bound=first_bound(recommendation, nodes=nodes, batch=batch),
        interruption=cost_of_interruption(run, spec, batch=batch, step_time=step),
    )


def _staged(
    run: RunDir, task: TrainTask, newest: TrainTask | None, recommended: Recommendation | None, size: int
) -> TrainTask:
    """Return a task that begins, or goes on elsewhere, with its stages, where it fits the dataset of so many samples."""
    spec, nodes, batch = task.spec, task.nodes, task.batch
    _check_size(spec, nodes, batch, size)
    stages = planned_stages(run, spec, nodes, batch, size, recommended=recommended)
    stages, training = continued(newest.stages if newest else (), stages), run.training(task.signature)
    if decisions := training.stage_decisions():  # of a training that goes on elsewhere
        stages = put_off(stages, decisions, total=size * spec.train.epochs, size=size)
    return with_nodes(task.model_copy(update={"stages": stages}), samples=training.newest_samples())


def _source(recommendation: Recommendation | None, given: Sequence[str]) -> str:
    """Say where nodes and batch come from: which recommendation, or `given`, the words for those that were given."""
    if recommendation is None or len(given) == 2:
        return "as given"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(recommendation.created_at))
    recommended = f"as recommended ({recommendation.criteria}; {when})"
    return f"{given[0]} as given, the rest {recommended}" if given else recommended


def _again(newest: TrainTask, wanted: TrainTask) -> TrainTask:
    """Return the newest task with what the user says now; loader processes stay reduced unless they say otherwise."""
    changed = wanted.spec.train.workers != newest.spec.train.workers
    workers = wanted.workers if changed else newest.workers
    return newest.model_copy(update={"spec": wanted.spec, "workdir": wanted.workdir, "workers": workers})


def _code(run: RunDir, spec: JobSpec, nodes: int, batch: int) -> Source:
    """Return the code to train: what is there now, also where the run was measured with other code."""
    code = choose(run, spec, Path.cwd(), keep=False)
    signature = train_signature(spec, nodes=nodes, batch=batch, code=code.identity)
    for digest in run.code_digests() - {code.digest}:
        earlier = train_signature(spec, nodes=nodes, batch=batch, code=with_weights(digest, code.weights))
        samples = run.training(earlier).newest_samples()
        if samples and not run.training(signature).newest_samples() and run.training(earlier).summary() is None:
            told = (
                f"training {earlier} stands at {samples} samples, but {behind(spec)} was another then: this is a"
                " training of its own, from the beginning (with the code as it was, the same command goes on there)"
            )
            code = dataclasses.replace(code, warnings=(*code.warnings, told))
    return code


def _dataset_size(run: RunDir, spec: JobSpec, inspect: Callable[[JobSpec], Inspection]) -> int:
    measured = (result.dataset_size for result in run.results() if isinstance(result, Measured))
    return next(measured, None) or first_job.or_told(inspect, run)(spec).dataset_size


def _check_size(spec: JobSpec, nodes: int, batch: int, dataset_size: int) -> None:
    if batch > dataset_size:
        raise SpecError(
            f"batch {batch} is larger than the dataset: {dataset_size} training samples",
            f"the largest power-of-two batch with a step in it is {1 << (dataset_size.bit_length() - 1)}",
        )
    halving.check_size(spec, batch=batch, dataset_size=dataset_size)
    check_stages(spec, batch=batch, nodes=nodes, dataset_size=dataset_size)


def _task(spec: JobSpec, nodes: int, batch: int, code: Source, ladder: tuple[Rung, ...]) -> TrainTask:
    signature = train_signature(spec, nodes=nodes, batch=batch, code=code.identity)
    job = f"train-{signature}"
    return TrainTask(
        id=f"{job}-1",
        job=job,
        spec=spec,
        workdir=str(code.workdir),
        nodes=nodes,
        signature=signature,
        attempt=1,
        ladder=ladder,
        workers=spec.train.workers,
    )


def _ladder(
    run: RunDir, spec: JobSpec, nodes: int, batch: int, recommended: Recommendation | None, others: OtherSizes
) -> tuple[Rung, ...]:
    """Return the batch and those an out-of-memory falls back to, with predictions where there are measurements."""
    chosen, by = recommended and recommended.choice, stages_worth_of(recommended)
    market: Market = chosen.market if chosen and (chosen.nodes, chosen.batch) == (nodes, batch) else "on_demand"
    with contextlib.suppress(BadMeasurements, Infeasible):  # given without a profile: train without a prediction
        queue = queue_wait(run.jobs(), run.attempts())
        forecast = dataclasses.replace(as_recommended(run, spec, others), stages_by=by, queue=queue)
        if found := forecast.ladder(nodes, batch, market=market):
            return found
    parts = nodes * spec.cluster.gpus_per_node * spec.train.accumulate
    smaller = [b for b in batches(spec.search.min_batch, batch) if b < batch and b % parts == 0]
    return tuple(Rung(batch=b) for b in [batch, *reversed(smaller)])


def start(run: RunDir, plan: TrainPlan, launcher: Launcher, *, after: str = "") -> str:
    """Submit the training job, with the user's code copied; one under way is left alone. Returns its id.

    `after` is the job of a rehearsal that it has to wait for. Raises DiskFull where the last attempt ended of that and
    nothing has been freed.
    """
    task = plan.task
    with submitting(run):
        let_go(run, task)
        if under_way(run, launcher, [task.job]):
            if run.cancelled(task.job):
                raise SchedulerError(f"{task.job} is still being cancelled", "run the same command again in a minute")
            require_stopped(run, task)
        else:
            run.uncancel(task.job)
            run.write_task(task.model_copy(update={"code": snapshot(run, task.spec, plan.code), "after": after}))
            run.write_job(launcher.submit(run, task).model_copy(update={"wait_bound": plan.wait_bound}))
    return task.job


def report(run: RunDir, signature: str) -> Summary:
    """Return predicted against actual of a finished training run.

    Raises:
        OutOfMemoryAtMinimum: the smallest batch did not fit.
        Diverged: its loss or its weights were not finite.
        DeviceFault: nodes or their devices were faulty, each time that it was tried.
        JobFailed: it ended for another reason.
        Pending: it has not ended.
    """
    summary = run.training(signature).summary()
    if summary is not None:
        return summary
    task = run.training(signature).newest_task()
    if task is not None and run.cancelled(task.job):  # its ranks may not have ended yet
        raise JobFailed(f"training {signature} was cancelled", CANCELLED)
    attempts = run.training(signature).attempts()
    if task is None or not attempts:
        raise Pending(f"training {signature} has not started", "tula status tells what it waits for")
    raise failure_of(task, attempts, kept=run.training(signature).newest_samples())


# --- from the plan to the end


@dataclass(frozen=True)
class PreparedTraining:
    """A training before anything is submitted: the whole run, the part of it to train on, and the plan."""

    run: RunDir
    spec: JobSpec
    part: Part
    plan: TrainPlan
    rehearse: bool = True  # a script's resume, where that is due

    @property
    def by_script(self) -> before_training.Training:
        """What a rehearsal of its script's resume needs to know."""
        found = self.plan
        over = beyond_what_is_left(self.run, self.spec) if self.spec.script is not None else ""
        return before_training.Training(self.part, found.task, found.code, found.prediction, self.rehearse, over)


def prepare(
    run: RunDir,
    spec: JobSpec,
    inspect: Callable[[JobSpec], Inspection],
    *,
    nodes: int | None = None,
    batch: int | None = None,
    node_type: str | None = None,
    rehearse: bool = True,
) -> Work[PreparedTraining]:
    """Decide where to train; nothing is written.

    Args:
        run: the run.
        spec: the job.
        inspect: tells the dataset's size where no probe has.
        nodes: number of nodes; None for the recommended one.
        batch: global batch; None for the recommended one.
        node_type: the type of node; None for the recommended one.
        rehearse: whether a script's resume is rehearsed before the first long training.

    Raises:
        BadMeasurements, SpecError: as `part` and `plan`.
    """
    own, recommendation = part(run, spec, node_type)
    if own.type is not None:
        yield Note(f"node type {own.type}")
    others, unknown = recommended_by(own, recommendation)
    found = plan(
        own.run, own.spec, nodes=nodes, batch=batch, recommendation=recommendation, others=others, inspect=inspect
    )
    for text in (*unknown, *found.code.warnings, left_behind(own.run, found.task), own.spec.cluster.collective_warning):
        if text:
            yield WarningEvent(text)
    ready = PreparedTraining(run, spec, own, found, rehearse)
    ends = expected_end(own.run, found.task, code=found.code.digest)
    return dataclasses.replace(ready, plan=dataclasses.replace(found, rehearses=ready.by_script.due, ends=ends))


def work(
    training: PreparedTraining, dependencies: Dependencies, wait_policy: WaitPolicy, *, file: JobFile | None = None
) -> Work[Summary | DetachedJobs]:
    """Train, or attach to the training where it is under way.

    Args:
        training: what `prepare` has decided.
        dependencies: launcher, and who is asked before something is submitted.
        wait_policy: whether and how long to wait.
        file: where the settings come from.

    Raises:
        OverBudget: not confirmed.
        Pending: the time to wait is over.
        Interruption: Ctrl-C; the training goes on, unless it is to be cancelled.
        CannotResume: its script cannot go on from its own checkpoint, and it is long.
        OutOfMemoryAtMinimum, Diverged, DeviceFault, JobFailed: it has ended so.
        SchedulerError: it was refused.
    """
    found, own = training.plan, training.part
    if found.finished:
        yield Note("this training run is finished already")
        return report(own.run, found.task.signature)
    launcher = dependencies.launcher_for(own.spec)
    going_on = under_way(own.run, launcher, [found.task.job])
    if not going_on:
        planned = TrainPlanned(found, nodes_of_links(found.task))
        yield planned
        allow(dependencies.confirm, planned)
    adopt(training.run, training.spec, [own], file)
    after = "" if going_on else (yield from before_training.prepared(training.by_script, launcher, wait_policy))
    try:
        jobs = (start(own.run, found, launcher, after=after),)
        if not wait_policy.waits(own.spec):
            yield from doubts_of_new(own.run, launcher, jobs, going_on, own.spec)
            return DetachedJobs(jobs, tuple(going_on))
        now = yield from wait_for(own.run, launcher, jobs, wait_policy)
    except KeyboardInterrupt:
        raise interruption_of_jobs(own.run, [(own, launcher)], wait_policy) from None
    require_found(now, found.task.job)
    return report(own.run, found.task.signature)
