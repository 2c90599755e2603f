"""The training run: every step of the loop, with evaluation, metrics and checkpoints."""

import contextlib
import json
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from tula_cli.models.cost import checkpoint_interval, interruption_rate
from tula_cli.models.noise import centre
from tula_cli.records import Prediction, TrainResult, TrainTask
from tula_cli.rundir import RunDir, write_atomic
from tula_cli.worker import checkpoint, loop, meter
from tula_cli.worker.data import Datasets
from tula_cli.worker.leaving import Leaving, Left
from tula_cli.worker.loop import Evaluation, Step, Trainer
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.sampling import Position, steps_left
from tula_cli.worker.schedule import learning_rate

LOG_SECONDS = 1.0
"""At most one step row a second: enough for a live view, little enough for a shared file system."""


class Metrics:
    """metrics.jsonl: one JSON object a line, appended by rank 0; other ranks write nothing.

    Rows beyond `samples`, where the run resumes, are dropped: those steps are trained again.
    """

    def __init__(self, run: RunDir, task: TrainTask, *, first: bool, samples: int) -> None:
        self.path = run.metrics_path(task.signature)
        self.run, self.task, self.first, self.samples = run, task, first, samples
        self._board: Any = None

    def __enter__(self) -> "Metrics":
        if self.first:
            self._cut()
            if self.task.spec.train.tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(self.path.parent / "tensorboard"), purge_step=self.samples + 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._board is not None:
            self._board.close()

    def _cut(self) -> None:
        if self.path.exists():
            kept = [row for row in self.run.metrics(self.task.signature) if row["samples"] <= self.samples]
            write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def add(self, kind: str, position: Position, epoch: float, **values: Any) -> None:
        if not self.first:
            return
        row = {"kind": kind, "time": time.time(), "samples": position.samples, "epoch": epoch, **_plain(values)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self._board.add_scalar(f"{kind}/{name}", value, position.samples)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with nan and infinity as null: JSON has neither."""
    return {
        name: _plain(value)
        if isinstance(value, dict)
        else None
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for name, value in values.items()
    }


@dataclass
class Run:
    """A training run under way on this rank."""

    task: TrainTask
    run: RunDir
    trainer: Trainer
    metrics: Metrics
    evaluator: loop.Evaluator
    best: dict[str, float]
    leaving: Leaving
    owed: bool  # the epoch that has ended is not evaluated yet
    step_times: list[float] = field(default_factory=list)  # of the epoch under way
    recent: list[Step] = field(default_factory=list)  # since the last row
    window: deque[float] = field(default_factory=deque)  # the newest step times, for the comparison with the prediction
    within: bool | None = None  # they are in the predicted interval, as of the last epoch
    last_row: float = 0.0
    last_save: float = field(default_factory=time.monotonic)
    save_time: float = 0.0
    eval_time: float = 0.0

    @property
    def first(self) -> bool:
        return self.trainer.ranks.first


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
    """
    leaving = leaving or Leaving(ranks)
    if ranks.from_first(int(run.train_result(task.signature) is not None)):
        return
    trainer = loop.build(task, ranks, datasets, batch=task.batch, workers=task.workers, refresh=True)
    best, owed = _resume(task, run, trainer)
    with Metrics(run, task, first=ranks.first, samples=trainer.position.samples) as metrics:
        work = Run(task, run, trainer, metrics, loop.Evaluator(trainer), best, leaving, owed)
        _announce(work)
        leaving.listen()
        _train(work, attempt)


def _leave(work: Run, left: Left, attempt: int) -> None:
    """Save where the ranks stand; the next start goes on from here."""
    if not work.first:
        return
    _drain(work)
    _save(work, is_best=False)
    work.run.write_stop(work.task.id, attempt, left.reason)


def _resume(task: TrainTask, run: RunDir, trainer: Trainer) -> tuple[dict[str, float], bool]:
    """Load the newest checkpoint; every rank loads the one that rank 0 found.

    Returns:
        The best metrics so far, and whether the epoch that has ended there is still to be evaluated.
    """
    if trainer.ranks.first:
        run.drop_drafts(task.signature)
    found = checkpoint.load_newest(run, task.signature) if trainer.ranks.first else None
    samples = trainer.ranks.from_first(-1 if found is None else found[1]["position"]["samples"])
    if samples < 0:
        return {}, False
    if found is None:
        path = run.checkpoint_path(task.signature, samples)
        found = path, torch.load(path, map_location="cpu", weights_only=True)
    return checkpoint.restore(trainer, found[1]), bool(found[1].get("owed"))


def _announce(work: Run) -> None:
    trainer, task = work.trainer, work.task
    work.metrics.add(
        "start",
        trainer.position,
        trainer.epoch,
        attempt=task.attempt,
        batch=task.batch,
        nodes=task.nodes,
        lr=learning_rate(task.spec, trainer.epoch, task.batch),
        cause=task.cause,
    )
    here = meter.environment(trainer.ranks)
    work.metrics.add("environment", trainer.position, trainer.epoch, **here.model_dump(mode="json"))
    if trainer.ags and trainer.ags.identity:
        _warn(work, trainer.ags.identity)


def _warn(work: Run, message: str) -> None:
    work.metrics.add("warning", work.trainer.position, work.trainer.epoch, message=message)


def _train(work: Run, attempt: int) -> None:
    with contextlib.closing(loop.steps(work.trainer)) as stream:
        try:
            _steps(work, stream)
        except Left as left:
            _leave(work, left, attempt)  # first of all: the end of the loader's processes takes its time
            return
    _finish(work)


def _steps(work: Run, stream: Iterator[Step]) -> None:
    if work.owed:
        _end_epoch(work, None)
    for step in _timed(work, stream):
        if step.epoch_ended:
            _end_epoch(work, step)
        elif work.first:
            _log_step(work)
            _save_when_due(work)
        _check(work)


def _check(work: Run) -> None:
    work.leaving.check(reserve=1.5 * work.save_time)


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
    return step_time * left + per_epoch * whole_epochs


def _save_when_due(work: Run) -> None:
    task = work.task
    every = task.spec.train.checkpoint_every
    if every == "auto":
        every = checkpoint_interval(work.save_time, rate=interruption_rate(task.spec.pricing, task.nodes))
    if time.monotonic() - work.last_save >= every:
        _save(work, is_best=False)


def _save(work: Run, *, is_best: bool) -> None:
    began = time.monotonic()
    checkpoint.save(work.run, work.task.signature, work.trainer, best=work.best, is_best=is_best, owed=work.owed)
    work.last_save = time.monotonic()
    work.save_time = work.last_save - began


def _end_epoch(work: Run, step: Step | None) -> None:
    """Evaluate, compare the step time with the prediction, log and save.

    `step` is the epoch's last; None where an earlier attempt made it and had to leave before the evaluation.
    """
    _drain(work)
    began = time.monotonic()
    work.owed = True
    result = work.evaluator.run(between=lambda: _check(work))
    work.owed = False
    work.eval_time = time.monotonic() - began
    # The mean loss of the last step over all ranks; every rank takes part.
    (loss_sum,) = work.trainer.ranks.sum([float(step.loss) if step else math.nan])
    if not work.first:
        work.step_times = []
        return
    epoch = work.trainer.position.epoch
    is_best = not work.best or _better(result, work.best)
    if is_best:
        work.best = {"top1": result.top1, "loss": result.loss, "epoch": float(epoch)}
    step_time = centre(work.step_times) if work.step_times else None
    lr = step.lr if step else learning_rate(work.task.spec, work.trainer.epoch, work.task.batch)
    _log_epoch(work, result, step_time, loss=loss_sum / work.trainer.ranks.world, lr=lr)
    _save(work, is_best=is_best)
    if epoch == work.task.spec.train.epochs:
        _write_result(work, result, step_time)
    work.step_times = []


def _better(result: Evaluation, best: dict[str, float]) -> bool:
    """Compare accuracies, and losses where there are no classes."""
    if math.isnan(result.top1) or math.isnan(best["top1"]):
        return result.loss < best["loss"] or math.isnan(best["loss"])
    return result.top1 > best["top1"]


def _log_epoch(work: Run, result: Evaluation, step_time: float | None, *, loss: float, lr: float) -> None:
    prediction = work.task.ladder[0].prediction
    recent = _recent_step_time(work)
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
        ags=trainer.ags.report() if trainer.ags and not trainer.ags.identity else None,
    )
    _warn_of_drift(work, within=within, step_time=recent)


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
            # JSON knows no nan: accuracies without classes, or the loss of a training that diverged.
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
            best_top1=work.best["top1"] if math.isfinite(work.best["top1"]) else 0.0,
            best_epoch=int(work.best["epoch"]),
            step_time=step_time or 0.0,
            finished_at=time.time(),
        )
    )


def _finish(work: Run) -> None:
    """A run resumed after its last step, or whose last epoch had less than a batch left, still owes its result."""
    written = work.first and work.run.train_result(work.task.signature) is not None
    if work.trainer.ranks.from_first(int(written)):
        return
    result = work.evaluator.run()
    if not work.first:
        return
    if not work.best:
        work.best = {"top1": result.top1, "loss": result.loss, "epoch": float(work.trainer.position.epoch)}
    _save(work, is_best=False)
    _write_result(work, result, _logged_step_time(work))


def _logged_step_time(work: Run) -> float | None:
    """Return the step time of the last epoch that was logged."""
    epochs = [row for row in work.run.metrics(work.task.signature) if row["kind"] == "epoch"]
    step_time: float | None = epochs[-1]["step_time"] if epochs else None
    return step_time
