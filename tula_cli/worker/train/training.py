"""The training run: every step of the loop, with evaluation, metrics and checkpoints."""

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tula_cli.errors import Diverged
from tula_cli.host import outcome
from tula_cli.models import halving
from tula_cli.models.cost import checkpoint_interval, interruption_rate
from tula_cli.models.time.noise import centre
from tula_cli.optim import advice
from tula_cli.run.directory import RunDir
from tula_cli.run.records.recommendations import Prediction
from tula_cli.run.records.results import TrainResult
from tula_cli.run.records.tasks import TrainTask
from tula_cli.spec.ags import Arm
from tula_cli.spec.sections import Hessian
from tula_cli.worker import environment
from tula_cli.worker.build.samples import Datasets
from tula_cli.worker.build.sampling import steps_left
from tula_cli.worker.preemption import Leaving, Left
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import checkpoint, evaluation, hessian, remarks, tuning
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train.diagnostics import Diagnostics
from tula_cli.worker.train.divergence import Watch
from tula_cli.worker.train.evaluation import Evaluation
from tula_cli.worker.train.loop import Step, Trainer
from tula_cli.worker.train.metrics import LOG_SECONDS, Metrics


@dataclass(frozen=True)
class Here:
    """Where and with whom this rank trains."""

    run: RunDir
    ranks: Ranks
    datasets: Datasets
    leaving: Leaving
    attempt: int  # of the task, for the mark that says why the ranks left


@dataclass
class Run:
    """A training run under way on this rank."""

    task: TrainTask
    here: Here
    trainer: Trainer
    metrics: Metrics
    evaluator: evaluation.Evaluator
    best: dict[str, float]
    owed: bool  # the epoch that has ended is not evaluated yet
    watch: Watch
    ahead: int = 0  # steps of branches that are to come before the training goes on
    step_times: list[float] = field(default_factory=list)  # of the epoch under way
    recent: list[Step] = field(default_factory=list)  # since the last row
    window: deque[float] = field(default_factory=deque)  # the newest step times, for the comparison with the prediction
    within: bool | None = None  # they are in the predicted interval, as of the last epoch
    last_row: float = 0.0
    last_save: float = field(default_factory=time.monotonic)
    save_time: float = 0.0
    eval_time: float = 0.0
    diagnostics: Diagnostics | None = None  # of the epoch under way
    choice: tuning.Choice | None = None  # of a training that tunes itself
    behind: int = 0  # epochs in a row that ended where the choice should not have led
    advised: set[str] = field(default_factory=set)  # what was said already and is said once

    @property
    def first(self) -> bool:
        return self.here.ranks.first

    @property
    def run(self) -> RunDir:
        return self.here.run


def run_training(
    task: TrainTask, run: RunDir, ranks: Ranks, datasets: Datasets, *, attempt: int = 1, leaving: Leaving | None = None
) -> None:
    """Train from the newest checkpoint (or the start) to the last epoch, or until the ranks have to leave.

    Args:
        task: what to train.
        run: where.
        ranks: the process group.
        datasets: of the task.
        attempt: of the task, for the mark that says why the ranks left.
        leaving: who tells when to leave.

    Raises:
        Diverged: loss or weights are not finite; the newest checkpoint is from before.
    """
    leaving = leaving or Leaving(ranks)
    if ranks.from_first(int(run.training(task.signature).result() is not None)):
        return
    here = Here(run, ranks, datasets, leaving, attempt)
    with contextlib.suppress(Left):
        if task.spec.train.facts.tunes:
            _run_tuned(task, here)
        else:
            _run(task, here)


def _run_tuned(task: TrainTask, here: Here) -> None:
    """Train as tuning chooses; where that breaks down in the training, as it chooses next."""
    while True:
        choice = _choose(task, here)
        try:
            return _run(choice.task(task), here, choice=choice)
        except tuning.BrokenDown as broken:
            tuning.give_up(task, here.run, here.ranks, samples=broken.samples)


def _choose(task: TrainTask, here: Here) -> tuning.Choice:
    """Return what a self-tuning training goes on with; trains up to there, and the branches, where that is missing.

    Raises:
        Left: the ranks leave.
    """
    run, ranks = here.run, here.ranks
    if (found := tuning.chosen(task, run, ranks)) is not None:
        return found
    split = tuning.held_out(task.spec, here.datasets, batch=task.batch)
    control = task.model_copy(update={"spec": halving.tuned(task.spec, Arm(name=halving.CONTROL))})
    ahead = halving.plan(task.spec, batch=task.batch, dataset_size=len(here.datasets.train)).steps
    _run(control, here, until=task.spec.auto.after, ahead=ahead)
    with Metrics(run, task, first=ranks.first, samples=run.training(task.signature).newest_samples()) as metrics:
        try:
            return tuning.tune(task, run, ranks, split, leaving=here.leaving, log=metrics.add)
        except Left as left:
            if ranks.first:
                run.write_stop(task.id, here.attempt, left.reason)
            raise


def _run(
    task: TrainTask, here: Here, *, until: int | None = None, ahead: int = 0, choice: tuning.Choice | None = None
) -> None:
    """Train from the newest checkpoint to the end, or `until` an epoch; as tuning has chosen, where it has.

    Args:
        task: with the method that trains.
        here: where.
        until: epoch at which branches begin.
        ahead: their steps, for the time that is left.
        choice: what they came to.

    Raises:
        Left: the ranks have saved and leave.
        Diverged: loss or weights are not finite.
        BrokenDown: so with what tuning has chosen.
    """
    trainer = worker_train_loop.build(
        task, here.ranks, here.datasets, batch=task.batch, workers=task.workers, refresh=True
    )
    trainer.until = until
    if choice is not None:
        trainer.lr_factor = choice.lr_factor
    best, owed = _resume(task, here.run, trainer)
    with Metrics(here.run, task, first=here.ranks.first, samples=trainer.position.samples) as metrics:
        work = Run(
            task,
            here,
            trainer,
            metrics,
            evaluation.Evaluator(trainer),
            best,
            owed,
            Watch(trainer),
            ahead,
            choice=choice,
        )
        work.diagnostics = Diagnostics.attach(trainer)
        _announce(work)
        here.leaving.listen()
        _train(work)


def _leave(work: Run, left: Left) -> None:
    """Save where the ranks stand; the next start goes on from here."""
    work.trainer.method.join(work.trainer)
    _see_whether_it_diverges(work, weights=True)
    if not work.first:
        return
    _drain(work)
    _save(work, is_best=False)
    work.run.write_stop(work.task.id, work.here.attempt, left.reason)


def _resume(task: TrainTask, run: RunDir, trainer: Trainer) -> tuple[dict[str, float], bool]:
    """Load the newest checkpoint; every rank loads the one that rank 0 found.

    Returns:
        The best metrics so far, and whether the epoch that has ended there is still to be evaluated.
    """
    if trainer.ranks.first:
        run.training(task.signature).drop_drafts()
    found = checkpoint.load_for_all(run, task.signature, trainer.ranks)
    return (checkpoint.restore(trainer, found), bool(found.get("owed"))) if found is not None else ({}, False)


def _announce(work: Run) -> None:
    trainer, task = work.trainer, work.task
    work.metrics.add(
        "start",
        trainer.position,
        trainer.epoch,
        attempt=task.attempt,
        batch=task.batch,
        nodes=task.nodes,
        lr=trainer.lr,
        cause=task.cause,
    )
    here = environment.environment(trainer.ranks)
    work.metrics.add("environment", trainer.position, trainer.epoch, **here.model_dump(mode="json"))
    for message in remarks.remarks(trainer):
        _warn(work, message)
    if work.choice is not None and work.choice.broken:
        _warn(work, f"broke down after the choice: {', '.join(work.choice.broken)}; goes on as {work.choice.arm.name}")


def _warn(work: Run, message: str) -> None:
    work.metrics.add("warning", work.trainer.position, work.trainer.epoch, message=message)


def _train(work: Run) -> None:
    with contextlib.closing(worker_train_loop.steps(work.trainer)) as stream:
        try:
            _steps(work, stream)
        except Left as left:
            _leave(work, left)  # first of all: the end of the loader's processes takes its time
            raise
    if work.trainer.until is None:
        _finish(work)


def _steps(work: Run, stream: Iterator[Step]) -> None:
    if work.owed:
        _end_epoch(work, None)
    if not work.trainer.position.samples:  # also tells at once, and not after an epoch, where it cannot be measured
        _measure_curvature(work)
    for step in _timed(work, stream):
        work.watch.follow(step)
        if work.diagnostics:
            work.diagnostics.follow(work.trainer)
        if step.epoch_ended:
            _end_epoch(work, step)
        elif work.first:
            _log_step(work)
            if not work.trainer.apart:  # a checkpoint is the state of every rank
                _save_when_due(work)
        _check(work)


def _check(work: Run) -> None:
    if work.here.leaving.check(reserve=1.5 * work.save_time):
        _see_whether_it_diverges(work)


def _see_whether_it_diverges(work: Run, *, weights: bool = False) -> None:
    """End a training that is not finite; a chosen arm gives way to the next. Every rank takes part.

    Raises:
        Diverged: it is not.
        BrokenDown: a chosen arm is not.
    """
    found = work.watch.look(weights=weights)
    if not found:
        return
    if work.first:
        _drain(work)  # the last row shows it
    if work.choice is not None and work.choice.arm.name != halving.CONTROL:
        raise tuning.BrokenDown(work.trainer.position.samples)
    raise Diverged(found, outcome.advice("diverged"))


def _timed(work: Run, stream: Iterator[Step]) -> Iterator[Step]:
    for step in stream:
        if work.first:  # only rank 0 writes rows
            work.recent.append(step)
        yield step


def _log_step(work: Run) -> None:
    """Write a row when the last one is a second old; this reads the loss, so it waits for the device once a second."""
    if time.monotonic() - work.last_row < LOG_SECONDS:
        return
    _drain(work)
    work.last_row = time.monotonic()


def _drain(work: Run) -> None:
    """Turn the steps since the last row into seconds, and write the row."""
    if not work.recent:
        return
    trainer, steps = work.trainer, work.recent
    seconds = [trainer.clock.seconds(step.start, step.end) for step in steps]
    waits = [trainer.clock.seconds(step.start, step.loaded) for step in steps]
    plain = [value for value, step in zip(seconds, steps, strict=True) if not step.refreshed]
    work.step_times += plain
    work.window.extend(plain)
    work.metrics.add(
        "step",
        trainer.position,
        trainer.epoch,
        step=trainer.position.steps,
        loss=float(steps[-1].loss),
        lr=steps[-1].lr,
        step_time=statistics.fmean(seconds),
        data_wait=statistics.fmean(waits),
        eta=_seconds_left(work, statistics.fmean(seconds)),
    )
    work.recent = []


def _seconds_left(work: Run, step_time: float) -> float:
    trainer = work.trainer
    size, position, epochs = len(trainer.datasets.train), trainer.position, work.task.spec.train.epochs
    whole_epochs = max(0, epochs - position.epoch - 1)
    left = steps_left(size, position.done, trainer.batch) if position.epoch < epochs else 0
    per_epoch = step_time * (size // trainer.batch) + work.eval_time + work.save_time
    return step_time * (left + work.ahead) + per_epoch * whole_epochs


def _save_when_due(work: Run) -> None:
    task = work.task
    every = task.spec.train.checkpoint_every
    if every == "auto":
        every = checkpoint_interval(work.save_time, rate=interruption_rate(task.spec.pricing, task.nodes))
    if time.monotonic() - work.last_save >= every and work.watch.may_save():
        _save(work, is_best=False)


def _save(work: Run, *, is_best: bool) -> None:
    began = time.monotonic()
    keep = work.choice.start if work.choice is not None else None
    checkpoint.save(
        work.run, work.task.signature, work.trainer, best=work.best, is_best=is_best, owed=work.owed, keep=keep
    )
    work.last_save = time.monotonic()
    work.save_time = work.last_save - began


def _end_epoch(work: Run, step: Step | None) -> None:
    """Evaluate, compare the step time with the prediction, log and save.

    `step` is the epoch's last; None where an earlier attempt made it and had to leave before the evaluation.
    """
    _drain(work)
    _see_whether_it_diverges(work, weights=True)
    began = time.monotonic()
    work.owed = True
    result = work.evaluator.run(between=lambda: _check(work))
    work.eval_time = time.monotonic() - began
    _measure_curvature(work)
    work.owed = False
    # The mean loss of the last step over all ranks; every rank takes part.
    (loss_sum,) = work.trainer.ranks.sum([float(step.loss) if step else math.nan])
    if step:
        _see_whether_it_breaks_down(work, loss_sum / work.trainer.ranks.world)
    if not work.first:
        work.step_times = []
        return
    epoch = work.trainer.position.epoch
    is_best = not work.best or _better(result, work.best)
    if is_best:
        work.best = {"top1": result.top1, "loss": result.loss, "epoch": float(epoch)}
    step_time = centre(work.step_times) if work.step_times else None
    lr = step.lr if step else work.trainer.lr
    _log_epoch(work, result, step_time, loss=loss_sum / work.trainer.ranks.world, lr=lr)
    _save(work, is_best=is_best)
    if epoch == work.task.spec.train.epochs:
        _write_result(work, result, step_time)
    work.step_times = []


def _see_whether_it_breaks_down(work: Run, loss: float) -> None:
    """Raise BrokenDown where a chosen arm has; `loss` is the same on all ranks.

    Judged by the loss of training: the evaluation set has no part in what is trained.
    """
    choice, position = work.choice, work.trainer.position
    if choice is None or choice.arm.name == halving.CONTROL:
        return
    work.behind = work.behind + 1 if choice.is_behind(loss, epoch=work.trainer.epoch) else 0
    if work.behind >= tuning.BEHIND:
        raise tuning.BrokenDown(position.samples)


def _better(result: Evaluation, best: dict[str, float]) -> bool:
    """Compare accuracies, and losses where there are no classes."""
    if math.isnan(result.top1) or math.isnan(best["top1"]):
        return result.loss < best["loss"] or math.isnan(best["loss"])
    return result.top1 > best["top1"]


def _log_epoch(work: Run, result: Evaluation, step_time: float | None, *, loss: float, lr: float) -> None:
    prediction = work.task.ladder[0].prediction
    # The prediction is of synchronous steps, which post-local SGD leaves behind.
    recent = None if work.trainer.local_sgd else _recent_step_time(work)
    within = _is_within(prediction, recent)
    trainer = work.trainer
    epoch = trainer.position.epoch
    work.metrics.add(
        "epoch",
        trainer.position,
        epoch,
        loss=loss,
        lr=lr,
        eval_loss=result.loss,
        top1=result.top1,
        top5=result.top5,
        step_time=step_time,
        predicted_step=prediction.step_time if prediction else None,
        step_low=prediction.step_low if prediction else None,
        step_high=prediction.step_high if prediction else None,
        within=within,
        eval_seconds=work.eval_time,
        ags=(ags := trainer.ags.report() if trainer.ags and not trainer.ags.identity else None),
        **trainer.method.report(trainer),
        diagnostics=_diagnostics(work, ags),
    )
    _warn_of_evaluation(work, result)
    _advise(work, ags)
    _warn_of_drift(work, within=within, step_time=recent)


def _warn_of_evaluation(work: Run, result: Evaluation) -> None:
    """Say once that the evaluation is not finite where the training is."""
    if result.samples and not math.isfinite(result.loss) and "evaluation" not in work.advised:
        work.advised.add("evaluation")
        _warn(
            work,
            f"the loss on the evaluation set is not finite at epoch {work.trainer.position.epoch}, while that of training"
            " is: look at the evaluation data, and at the running statistics of BatchNorm",
        )


def _advise(work: Run, ags: Mapping[str, float] | None) -> None:
    """Say once of each way in which AGS hardly acts that it does."""
    for kind, message in advice(ags).items() if ags else ():
        if kind not in work.advised:
            work.advised.add(kind)
            _warn(work, message)


def _diagnostics(work: Run, ags: Mapping[str, float] | None) -> dict[str, Any] | None:
    if work.diagnostics is None:
        return None
    return work.diagnostics.report(work.trainer, scaled=ags["scaled"] if ags else None)


def _measure_curvature(work: Run) -> None:
    """Write a row with the largest Hessian eigenvalue, where it is asked for and due; every rank takes part.

    At the end of an epoch that is before its evaluation counts as done: a run that has to leave in between measures again.
    """
    asked, trainer = work.task.spec.train.hessian, work.trainer
    settings = asked if isinstance(asked, Hessian) else Hessian()
    if not asked or trainer.position.epoch % settings.every:
        return
    found = hessian.measure(trainer, samples=settings.samples, between=lambda: _check(work))
    low, high = _factor_bounds(trainer)
    bound = hessian.step_size_bound(found.smoothness, low, high)
    bounds = {"s_min": low, "s_max": high, "lr": trainer.lr, "lr_bound": bound}
    work.metrics.add("hessian", trainer.position, trainer.epoch, **asdict(found), **bounds)


def _factor_bounds(trainer: Trainer) -> tuple[float, float]:
    """Return the interval of what gradients are multiplied by, unscaled steps included."""
    ags = trainer.ags
    if ags is None or ags.identity:
        return 1.0, 1.0
    return ags.bounds.low, ags.bounds.high


def _recent_step_time(work: Run) -> float | None:
    """Return the step time over the newest steps: an epoch's, and no fewer than a probe's; None until there are so many.

    The interval is that of a probe's mean; an epoch of five steps would leave it by chance alone.
    """
    wanted = max(len(work.step_times), work.task.spec.search.steps)
    while len(work.window) > wanted:
        work.window.popleft()
    return centre(list(work.window)) if len(work.window) == wanted else None


def _is_within(prediction: Prediction | None, step_time: float | None) -> bool | None:
    if prediction is None or step_time is None or prediction.step_low is None or prediction.step_high is None:
        return None
    return prediction.step_low <= step_time <= prediction.step_high


def _warn_of_drift(work: Run, *, within: bool | None, step_time: float | None) -> None:
    """Warn when the step time leaves the predicted interval, and say when it is back; not in every epoch between."""
    prediction = work.task.ladder[0].prediction
    if within is None or step_time is None or prediction is None or within is work.within:
        return
    epoch = work.trainer.position.epoch
    took = f"epoch {epoch}: a step takes {1000 * step_time:.1f} ms, predicted {1000 * prediction.step_time:.1f}"
    if not within:
        low, high = (1000 * (bound or 0.0) for bound in (prediction.step_low, prediction.step_high))
        why = "has the network or the load changed?" if 1000 * step_time > high else "faster than the probes were"
        _warn(work, f"{took} (90 % between {low:.1f} and {high:.1f}): {why}")
    elif work.within is False:
        _warn(work, f"{took}: within the interval again")
    work.within = within


def _write_result(work: Run, result: Evaluation, step_time: float | None) -> None:
    trainer = work.trainer
    metrics = {"eval_loss": result.loss, "top1": result.top1, "top5": result.top5}
    work.run.write_train_result(
        TrainResult(
            signature=work.task.signature,
            nodes=work.task.nodes,
            batch=trainer.batch,
            samples=trainer.position.samples,
            steps=trainer.position.steps,
            epochs=trainer.position.epoch,
            # JSON knows no nan: accuracies without classes, or the loss of an evaluation that is not finite.
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
            best_top1=work.best["top1"] if math.isfinite(work.best["top1"]) else 0.0,
            best_epoch=int(work.best["epoch"]),
            step_time=step_time or 0.0,
            finished_at=time.time(),
            tuning=work.run.training(work.task.signature).tuning(),
        )
    )


def _finish(work: Run) -> None:
    """A run resumed after its last step, or whose last epoch had less than a batch left, still owes its result."""
    written = work.first and work.run.training(work.task.signature).result() is not None
    if work.trainer.ranks.from_first(int(written)):
        return
    _see_whether_it_diverges(work, weights=True)
    result = work.evaluator.run()
    if not work.first:
        return
    _warn_of_evaluation(work, result)
    if not work.best:
        work.best = {"top1": result.top1, "loss": result.loss, "epoch": float(work.trainer.position.epoch)}
    _save(work, is_best=False)
    _write_result(work, result, _logged_step_time(work))


def _logged_step_time(work: Run) -> float | None:
    """Return the step time of the last epoch that was logged."""
    epochs = [row for row in work.run.training(work.task.signature).metrics() if row["kind"] == "epoch"]
    step_time: float | None = epochs[-1]["step_time"] if epochs else None
    return step_time
