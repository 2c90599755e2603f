"""`tula train`: choose the configuration to train, submit the training, and return its result."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tula_cli.cluster.chains import list_nodes_of_chain_jobs
from tula_cli.cluster.full_disk import release_held_jobs
from tula_cli.cluster.inspection import Inspect
from tula_cli.cluster.launcher import Launcher, list_unfinished_jobs, lock_submission, submit_missing_tasks
from tula_cli.cluster.slurm import first_job
from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import BadMeasurements, Infeasible, SchedulerError, SpecError
from tula_cli.models import moldable, self_tuning
from tula_cli.models.choice.grid import check_divisibility, list_batches
from tula_cli.models.cost import describe_price
from tula_cli.models.estimator import Estimator
from tula_cli.models.ramp_costs import (
    check_stages,
    choose_stage_objective_of_recommendation,
    compute_batch_divisor,
    move_task_to_stage_nodes,
)
from tula_cli.options import NodeRange, TrainRequest, parse_nodes, require_positive
from tula_cli.run.code import choose_code, get_user_code, list_code_changes
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.format import require_current_format
from tula_cli.run.imports import Source, add_weights_digest
from tula_cli.run.job_runs import compare_jobs, find_chosen_run, select_runs
from tula_cli.run.records.base import Market
from tula_cli.run.records.failures import Recovery, Resize
from tula_cli.run.records.recommendations import Prediction, Recommendation
from tula_cli.run.records.results import Summary
from tula_cli.run.records.tasks import JobSize, Rung, TrainTask
from tula_cli.services import messages
from tula_cli.services.events import Note, TrainPlanned, WarningEvent, Work
from tula_cli.services.job_warnings import warn_large_reference_batch
from tula_cli.services.measurements import fit_estimator_of_recommendation, plan_stages
from tula_cli.services.plans import TrainPlan
from tula_cli.services.resume_test import TrainingStart, describe_interruption_cost, run_resume_test_if_due
from tula_cli.services.site_charges import (
    add_site_billing_to_run,
    check_balance_of_task,
    require_known_balance,
    require_sufficient_balance,
)
from tula_cli.services.training_end import load_summary, require_known_job
from tula_cli.services.waiting import DetachedJobs, Submission, explain_interruption
from tula_cli.spec.job import JobSpec
from tula_cli.spec.signature import compute_train_signature
from tula_cli.words import format_count, format_local_time, quote_path

if TYPE_CHECKING:
    from tula_cli.models.choice.baseline import BaselineSaving


def choose_run_to_train(runs: Sequence[Run], node_type: str | None) -> Run:
    """Return the run to train in, with SLURM's billing.

    Args:
        node_type: the node type to train on; None for the recommended one.

    Raises:
        BadMeasurements: there are several node types, but none is given or recommended.
        SpecError: there is no such node type.
    """
    chosen = find_chosen_run(select_runs(runs, node_type))
    if chosen is None:
        raise BadMeasurements(
            f"{runs[0].job_name} has no recommendation, and [[--type]] is not given",
            "run tula recommend first, or give all three options: tula train --type NAME --nodes N --batch B",
        )
    return add_site_billing_to_run(chosen)


def plan_training(
    run: Run,
    *,
    nodes: int | NodeRange | None = None,
    batch: int | None = None,
    inspect: Inspect,
) -> TrainPlan:
    """Plan a training on the given nodes and batch, or else the recommended ones.

    Args:
        run: the run, with or without probes and a recommendation.
        nodes: number of nodes, or the range within which each job uses what it is granted.

    Raises:
        BadMeasurements: nodes or batch are neither given nor recommended.
        SpecError: the batch cannot be trained on that many nodes, or is larger than the dataset; or the nodes are a
            range, and the job cannot use what it is granted.
        Infeasible: no number of nodes of a range can be used.
    """
    recommendation, spec = run.read_recommendation(), run.spec
    choice = recommendation.choice if recommendation is not None else None
    source = _describe_source(recommendation, [name for name, value in (("nodes", nodes), ("batch", batch)) if value])
    nodes, batch = _complete_configuration(run, choice, nodes, batch)
    estimator = _fit_estimator_if_measured(run, recommendation)
    as_chosen = choice is not None and (choice.nodes, choice.batch) == (nodes, batch)
    market: Market = choice.market if choice and (as_chosen or isinstance(nodes, NodeRange)) else "on_demand"
    sizes: tuple[JobSize, ...] = ()
    if isinstance(nodes, NodeRange):
        sizes = moldable.choose_job_sizes(
            spec, nodes, batch, estimator=estimator, recommendation=recommendation, market=market
        )
        nodes = sizes[-1].nodes
    check_divisibility(batch, compute_batch_divisor(spec, nodes))
    code = _choose_code_to_train(run, None if sizes else nodes, batch)
    fallbacks = sizes[-1].ladder if sizes else _list_oom_fallbacks(estimator, spec, nodes, batch, market)
    task = _make_train_task(spec, nodes, batch, code, fallbacks, sizes=sizes)
    training, prediction = run.get_training(task.signature), task.prediction
    if (newest := training.read_newest_task()) is None:
        dataset_size = find_dataset_size(run, inspect)
        task = _add_ramp_stages(run, task, recommendation if as_chosen else None, dataset_size)
        prediction = task.prediction
        warnings = [*warn_large_reference_batch(spec, dataset_size), *_warn_shortened_ramp(run, task, dataset_size)]
    else:
        task = _apply_current_settings(run, newest, task)
        prediction = task.sizes[-1].prediction if task.sizes else prediction
        warnings = _warn_unusable_sizes(task, sizes)
    if sizes and not task.sizes:
        raise Infeasible(
            "no number of nodes in the range can be used, because none divides all batches of train.ramp among its GPUs",
            "use a range of fewer nodes",
        )
    return TrainPlan(
        task=task,
        prediction=prediction,
        source=source,
        finished=training.read_summary() is not None,
        resumes=training.find_newest_checkpoint_samples() or None,
        code=code,
        warnings=tuple(warnings),
        price=describe_price(spec.pricing),
        interruption=describe_interruption_cost(
            run, spec, batch=batch, step_time=prediction.step_time if prediction else None
        ),
    )


def _complete_configuration(
    run: Run, choice: Prediction | None, nodes: int | NodeRange | None, batch: int | None
) -> tuple[int | NodeRange, int]:
    """Return the given nodes and batch; those not given are the recommended ones."""
    most = nodes.most if isinstance(nodes, NodeRange) else nodes
    require_positive(nodes=most)
    missing = [name for name, value in (("[[--nodes]]", most), ("[[--batch]]", batch)) if value is None]
    if missing and choice is None:
        first = "tula recommend" if any(run.read_results()) else "tula profile and tula recommend"
        raise BadMeasurements(
            f"{run.id} has no recommendation, and {' and '.join(missing)} {'are' if missing[1:] else 'is'} not given",
            f"run {first}, or give both: tula train --nodes N --batch B",
        )
    if choice is not None:
        nodes, batch = nodes or choice.nodes, batch or choice.batch
    assert nodes is not None
    assert batch is not None
    return nodes, batch


def _list_finished_at_other_configurations(run: Run, plan: TrainPlan) -> tuple[Summary, ...]:
    """Return the finished trainings with the settings of this one, but other nodes or another batch."""
    summaries, snapshot = [], run.read_snapshot()
    for signature in () if plan.finished else run.list_train_signatures():
        summary = snapshot.get_training(signature).read_summary()
        if summary is None or signature == plan.task.signature:
            continue
        nodes, batch, code = summary.nodes, summary.start_batch, plan.code.identity
        if compute_train_signature(run.spec, nodes=nodes, batch=batch, code=code) == signature:
            summaries.append(summary)
    return tuple(summaries)


def _add_ramp_stages(run: Run, task: TrainTask, recommended: Recommendation | None, size: int) -> TrainTask:
    """Return a new task with its ramp stages, after checking that its batch fits `size` training samples."""
    spec, nodes, batch = task.spec, task.nodes, task.batch
    _require_fitting_batch(spec, nodes, batch, size)
    stages = plan_stages(run.with_spec(spec), nodes, batch, size, recommended=recommended)
    task = task.model_copy(update={"stages": stages}).with_divisible_sizes()
    return move_task_to_stage_nodes(task, samples=run.get_training(task.signature).find_newest_checkpoint_samples())


def _describe_source(recommendation: Recommendation | None, given_names: Sequence[str]) -> str:
    """Describe where nodes and batch come from: a recommendation, or the arguments in `given_names`."""
    if recommendation is None or len(given_names) == 2:
        return "as given"
    when = format_local_time(recommendation.created_at)
    recommended = f"as recommended ({recommendation.criteria}; {when})"
    return f"{given_names[0]} as given, otherwise {recommended}" if given_names else recommended


def _apply_current_settings(run: RunDir, newest: TrainTask, requested: TrainTask) -> TrainTask:
    """Return the newest task with the current settings; reduced loader processes are kept unless workers changed.

    If its number of nodes is outside the requested range, it moves to the most that can be used: as the next attempt if
    it has started, because the attempts so far are charged for the nodes of their task.
    """
    changed = requested.spec.train.workers != newest.spec.train.workers
    workers = requested.workers if changed else newest.workers
    update = {"spec": requested.spec, "workdir": requested.workdir, "workers": workers, "sizes": requested.sizes}
    resumed = newest.model_copy(update=update).with_divisible_sizes()
    if not resumed.sizes:
        return resumed
    size = next((size for size in resumed.sizes if size.nodes == newest.nodes), resumed.sizes[-1])
    resumed = resumed.with_size(size)
    if resumed.nodes == newest.nodes or all(attempt.task != newest.id for attempt in run.read_attempts_of_task(newest)):
        return resumed
    attempt, resize = newest.attempt + 1, Resize(nodes=resumed.nodes, nodes_before=newest.nodes, granted=None)
    changes = {"id": f"{newest.job}-{attempt}", "attempt": attempt, "recovery": Recovery(decision=resize)}
    return resumed.model_copy(update=changes)


def _warn_unusable_sizes(task: TrainTask, sizes: Sequence[JobSize]) -> list[Diagnostic]:
    """Return a warning if a stored training cannot use some of the sizes that its batch alone would allow."""
    unusable = [size.nodes for size in sizes if size.nodes not in task.node_counts]
    batches = sorted({*(stage.batch for stage in task.stages), task.batch})
    return [messages.nodes_unusable_for_started_training(nodes=unusable, batches=batches)] if unusable else []


def _warn_shortened_ramp(run: Run, task: TrainTask, size: int) -> list[Diagnostic]:
    """Return a warning if the stages of a new training would have other batches on the fewest nodes of its range."""
    if not task.sizes or not task.stages:
        return []
    least = task.sizes[0].nodes
    on_least = [stage.batch for stage in plan_stages(run, least, task.batch, size, recommended=None)]
    batches = [stage.batch for stage in task.stages]
    if batches == on_least:
        return []
    return [
        messages.ramp_shortened_by_nodes(
            batches=batches, nodes=task.sizes[-1].nodes, batches_on_least=on_least, least=least
        )
    ]


def _choose_code_to_train(run: Run, nodes: int | None, batch: int) -> Source:
    """Return the current code, also if the run was measured with other code; warn if a training is left unfinished."""
    spec, snapshot = run.spec, run.read_snapshot()
    code = choose_code(run, spec, Path.cwd(), keep=False)
    signature = compute_train_signature(spec, nodes=nodes, batch=batch, code=code.identity)
    for digest in run.read_code_digests() - {code.digest}:
        earlier = compute_train_signature(spec, nodes=nodes, batch=batch, code=add_weights_digest(digest, code.weights))
        samples = snapshot.get_training(earlier).find_newest_checkpoint_samples()
        if (
            samples
            and not snapshot.get_training(signature).find_newest_checkpoint_samples()
            and snapshot.get_training(earlier).read_summary() is None
        ):
            warning = messages.earlier_training_unfinished(
                training=earlier,
                samples=samples,
                code=str(get_user_code(spec, Path.cwd())),
                files=list_code_changes(run, spec, Path.cwd(), digest=digest),
            )
            code = dataclasses.replace(code, warnings=(*code.warnings, warning))
    return code


def find_dataset_size(run: Run, inspect: Inspect) -> int:
    """Return the number of training samples: as a probe has recorded it, else as the inspection of the job finds it."""
    return (
        run.read_snapshot().measured_dataset_size
        or first_job.reuse_stored_inspection(inspect, run)(run.spec).dataset_size
    )


def _require_fitting_batch(spec: JobSpec, nodes: int, batch: int, dataset_size: int) -> None:
    if batch > dataset_size:
        raise SpecError(
            f"batch {batch} is larger than the dataset: {dataset_size} training samples",
            f"lower [[--batch]]; the largest power of two that fits is {1 << (dataset_size.bit_length() - 1)}",
        )
    self_tuning.require_tuning_samples(spec, batch=batch, dataset_size=dataset_size)
    check_stages(spec, batch=batch, nodes=nodes, dataset_size=dataset_size)


def _make_train_task(
    spec: JobSpec, nodes: int, batch: int, code: Source, ladder: tuple[Rung, ...], *, sizes: tuple[JobSize, ...]
) -> TrainTask:
    signature = compute_train_signature(spec, nodes=None if sizes else nodes, batch=batch, code=code.identity)
    job = f"train-{signature}"
    task = TrainTask(
        id=f"{job}-1",
        job=job,
        spec=spec,
        workdir=str(code.workdir),
        nodes=nodes,
        signature=signature,
        attempt=1,
        ladder=ladder,
        workers=spec.train.workers,
        sizes=sizes,
    )
    return task.with_size(sizes[-1]) if sizes else task


def _fit_estimator_if_measured(run: Run, recommended: Recommendation | None) -> Estimator | None:
    """Return the models of a run; None without measurements, where a training has no prediction."""
    with contextlib.suppress(BadMeasurements, Infeasible):
        return fit_estimator_of_recommendation(run, stages_by=choose_stage_objective_of_recommendation(recommended))
    return None


def _list_oom_fallbacks(
    estimator: Estimator | None, spec: JobSpec, nodes: int, batch: int, market: Market
) -> tuple[Rung, ...]:
    """Return the batch and its out-of-memory fallbacks, with predictions if there are measurements."""
    if estimator is not None:
        with contextlib.suppress(BadMeasurements, Infeasible):
            return estimator.list_oom_fallbacks(nodes, batch, market=market)
    divisor = nodes * spec.cluster.gpus_per_node * spec.train.accumulate
    smaller = [b for b in list_batches(spec.search.min_batch, batch) if b < batch and b % divisor == 0]
    return tuple(Rung(batch=b) for b in [batch, *reversed(smaller)])


def submit_training(
    run: RunDir, plan: TrainPlan, launcher: Launcher, *, after: str = "", follows: Sequence[str] = ()
) -> str:
    """Submit the training job with a copy of the user's code, and return its id; a running training is left alone.

    Args:
        after: the job of a resume test that the training has to wait for; empty for none.
        follows: unfinished jobs that the training has to wait for, because it takes over their nodes.

    Raises:
        DiskFull: the last attempt ended because the disk was full, and nothing has been freed.
        SchedulerError: the job is still being cancelled, or was refused; or the training is to resume on other nodes while
            it is still running.
    """
    task = plan.task
    with lock_submission(run):
        release_held_jobs(run, task)
        waiting_task = task.model_copy(update={"after": after, "follows": tuple(follows)})
        if submit_missing_tasks(run, launcher, [waiting_task], plan.code):
            newest = run.get_training(task.signature).read_newest_task()
            if newest is not None and task.attempt > newest.attempt:
                raise SchedulerError(
                    f"training {task.signature} is still running on {format_count(newest.nodes)}, so it cannot resume on other nodes",
                    f"run tula cancel {quote_path(run.path)} to save a checkpoint and stop the training, then run the same command to resume it",
                )
    return task.job


# --- Running a training


@dataclass(frozen=True)
class PreparedTraining:
    """A training before anything is submitted: the run of the hardware to train on, and the plan."""

    run: Run
    plan: TrainPlan
    request: TrainRequest
    start: TrainingStart


def prepare_training(
    runs: Sequence[Run],
    request: TrainRequest,
    inspect: Inspect,
) -> Work[PreparedTraining]:
    """Plan a training on the chosen node type of a job; nothing is written.

    Raises:
        OtherFormat: the run has an older format.
        BadMeasurements, SpecError: as in `choose_run_to_train` and `plan_training`.
        SpecError, CannotResume: as in `TrainingStart.require_resume_on_other_nodes`.
    """
    run = choose_run_to_train(runs, request.node_type)
    require_current_format(run.path)
    yield from map(WarningEvent, run.read_snapshot().damage_warnings)
    if run.type is not None:
        yield Note(f"node type {run.type}")
    nodes = parse_nodes(request.nodes) if isinstance(request.nodes, str) else request.nodes
    plan = plan_training(run, nodes=nodes, batch=request.batch, inspect=inspect)
    yield from map(WarningEvent, plan.code.warnings)
    yield from map(WarningEvent, (*plan.warnings, *warn_interrupted_training(run, plan.task)))
    if run.spec.cluster.collective == "parameter_server":
        yield WarningEvent(messages.parameter_server_collective())
    start = TrainingStart.from_plan(plan, run, runs, allow_resume_test=request.rehearse)
    start.require_resume_on_other_nodes()
    remaining_share = 1.0
    if plan.resumes is not None:
        remaining_share -= plan.resumes / (find_dataset_size(run, inspect) * run.spec.train.max_epochs)
    balance = None if plan.finished else check_balance_of_task(plan.task, remaining_share=max(0.0, remaining_share))
    if request.within_balance and not plan.finished:
        require_known_balance(balance)
    elif balance is not None and balance.lacking:
        yield WarningEvent(balance.lacking)
    plan = dataclasses.replace(
        plan,
        rehearses=start.is_test_due,
        balance=balance,
        finished_elsewhere=_list_finished_at_other_configurations(run, plan),
    )
    return PreparedTraining(run, plan, request, start)


def _warn_settings_not_applied(run: Run, signature: str) -> Iterator[WarningEvent]:
    """Warn of settings that a finished training did not have, although its weights do not depend on them."""
    trained = run.get_training(signature).read_newest_task()
    if trained is None:
        return
    keys = [
        name
        for name in ("metrics", "diagnostics")
        if getattr(run.spec.train, name) != getattr(trained.spec.train, name)
    ]
    if keys:
        yield WarningEvent(messages.settings_not_applied_to_finished_training(keys=[f"train.{key}" for key in keys]))


def run_training(training: PreparedTraining, submission: Submission) -> Work[Summary | DetachedJobs]:
    """Train, or attach to the training if it is already running.

    Raises:
        OverBudget: the training was not confirmed, or exceeds the balance.
        Pending: the timeout has passed.
        Interruption: Ctrl-C; the training continues to run.
        CannotResume, ResumeUntested: as in `run_resume_test_if_due`.
        OutOfMemoryAtMinimum, Diverged, DeviceFault, JobFailed: the training failed for that reason.
        SchedulerError: the scheduler refused the job.
    """
    plan, run = training.plan, training.run
    if plan.finished:
        yield Note("this training has already finished")
        yield from _warn_settings_not_applied(run, plan.task.signature)
        return load_summary(run, plan.task.signature)
    launcher = submission.launcher_for(run.spec)
    unfinished = list_unfinished_jobs(run, launcher, [plan.task.job])
    if not unfinished:
        if training.request.within_balance:
            require_sufficient_balance(require_known_balance(plan.balance))
        planned = TrainPlanned(plan, list_nodes_of_chain_jobs(plan.task))
        yield planned
        submission.require_confirmed(planned)
    submission.save_runs([run])
    after = "" if unfinished else (yield from run_resume_test_if_due(training.start, launcher, submission))
    with explain_interruption([run]):
        job = submit_training(run, plan, launcher, after=after)
        outcome = yield from submission.wait_for_jobs_or_detach(run, launcher, [job], unfinished)
    if isinstance(outcome, DetachedJobs):
        return outcome
    require_known_job(outcome, job)
    return load_summary(run, plan.task.signature)


def find_baseline_saving(run: Run, summary: Summary) -> "BaselineSaving | None":
    """Return the gain of a finished training over the baseline in the recommendation of its run; None if unknown."""
    from tula_cli.models.choice.baseline import (
        compute_baseline_saving,  # imported here: only needed at the end of a training
    )

    recommendation = run.read_recommendation()
    if recommendation is None:
        return None
    return compute_baseline_saving(recommendation.headline, summary, length=run.spec.workload.describe_length())


# --- A training with other settings


def warn_interrupted_training(run: RunDir, task: TrainTask) -> list[Diagnostic]:
    """Return a warning if an interrupted training differs from this new one only in settings."""
    if run.get_training(task.signature).read_newest_task() is not None:
        return []
    snapshot = run.read_snapshot()
    for signature in run.list_train_signatures():
        training = snapshot.get_training(signature)
        newest, samples = training.read_newest_task(), training.find_newest_checkpoint_samples()
        if (
            newest is None
            or not samples
            or training.read_summary()
            or (newest.training_nodes, newest.batch) != (task.training_nodes, task.batch)
        ):
            continue
        keys = [
            key for key in compare_jobs(newest.spec, task.spec) if key.split(".")[0] not in _SECTIONS_WITHOUT_EFFECT
        ]
        if keys:
            return [messages.earlier_training_other_settings(training=signature, samples=samples, keys=keys)]
    return []


_SECTIONS_WITHOUT_EFFECT = ("name", "search", "pricing", "baseline", "cluster", "node_types")
