"""The training run: all steps of the loop, with evaluation, checkpoints and the result."""

import contextlib
import functools
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from tula_cli.errors import Diverged
from tula_cli.host import failures
from tula_cli.models import self_tuning
from tula_cli.models.choice import early_stopping
from tula_cli.models.cost import compute_checkpoint_interval, compute_interruption_rate
from tula_cli.run.directory import RunDir
from tula_cli.run.records.results import BestValue, TrainResult
from tula_cli.run.records.tasks import TrainTask
from tula_cli.spec.job import compute_lr_scale
from tula_cli.spec.sections import HESSIAN_SAMPLES, NOISE_BATCHES
from tula_cli.worker import messages
from tula_cli.worker.build.samples import Datasets
from tula_cli.worker.build.weights import load_weights
from tula_cli.worker.energy import TrainingEnergy
from tula_cli.worker.preemption import Preempted, PreemptionHandler
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import checkpoint, evaluation, gradient_noise, hessian, loop
from tula_cli.worker.train.batch_partition import list_micro_batch_splits
from tula_cli.worker.train.divergence import DivergenceDetector
from tula_cli.worker.train.evaluation import Evaluation
from tula_cli.worker.train.hang_watch import HangWatch
from tula_cli.worker.train.loop import Step
from tula_cli.worker.train.step_watch import StepWatch
from tula_cli.worker.train.training_log import MetricsFile, TrainingLog, compute_mean_step_time


@dataclass(frozen=True)
class TrainContext:
    """The run directory, process group and data of a training on this rank."""

    run: RunDir
    ranks: Ranks
    datasets: Datasets
    preemption: PreemptionHandler
    attempt: int  # attempt of the task, for the marker that records why the ranks stopped early
    energy: TrainingEnergy
    task: TrainTask  # the job's task; with method auto, arms train tasks derived from it


class Training:
    """One training on this rank, positioned at the newest checkpoint, or at the start.

    Args:
        until: epoch at whose end the training stops without a result, because branches start there; None: the last.
        ahead: steps of these branches, for the estimate of the remaining time.
    """

    keep: tuple[int, ...] = ()
    """Samples of the checkpoints that must not be deleted."""

    def __init__(self, task: TrainTask, context: TrainContext, *, until: int | None = None, ahead: int = 0) -> None:
        self.task, self.context, self.run = task, context, context.run
        self.trainer = loop.build_trainer(
            task, context.ranks, context.datasets, batch=task.batch, workers=task.workers, refresh=True
        )
        self.trainer.until = until
        self._record_possible_splits()
        self.best: dict[str, float] = {}
        self.damaged: list[str] = []  # messages about damaged checkpoints that were renamed
        self.weights_mismatch = ""  # mismatches of the initial weights' file with the model; empty if none
        self.stop_reason = ""  # reason to end before the last epoch; empty if it continues
        self.evaluation_pending = False  # whether the epoch that has ended is not yet evaluated
        self._load_checkpoint_or_weights()
        samples = self.trainer.position.samples
        self.metrics = MetricsFile(self.run, task, is_first=self.is_first_rank, samples=samples)
        self.log = TrainingLog(self.metrics, task, self.trainer, ahead=ahead)
        self.evaluator = evaluation.Evaluator(self.trainer)
        self.divergence = DivergenceDetector(self.trainer)
        self.watch = StepWatch(self.trainer)
        self.last_save = time.monotonic()

    @property
    def is_first_rank(self) -> bool:
        return self.context.ranks.is_first

    def _record_possible_splits(self) -> None:
        """Write the possible splits for the supervisor, before a step can run out of memory on any rank."""
        if self.is_first_rank:
            task = self.context.task
            batches = [fallback.batch for fallback in task.ladder]
            list_jobs = functools.partial(self_tuning.list_jobs_of_training, task.spec)
            splits = list_micro_batch_splits(self.trainer, batches, list_jobs)
            self.run.get_training(self.task.signature).write_micro_batches(splits)

    def _load_checkpoint_or_weights(self) -> None:
        """Load the newest checkpoint, or the initial weights; every rank loads the one that rank 0 found."""
        if self.is_first_rank:
            self.run.get_training(self.task.signature).drop_drafts()
        content = checkpoint.load_newest_checkpoint_on_all_ranks(
            self.run, self.task.signature, self.context.ranks, self.damaged.append
        )
        if content is not None:
            self.best = checkpoint.restore_checkpoint(self.trainer, content)
            self.evaluation_pending = bool(content.get("owed"))
            self.stop_reason = content.get("ended", "")  # only the result is missing
            return
        self.weights_mismatch = load_weights(
            self.task.spec.model, self.trainer.parallel.module, first=self.is_first_rank
        )

    def train(self) -> None:
        """Train to the end.

        Raises:
            Preempted: the ranks have saved and stop.
            Diverged: loss or weights are not finite.
        """
        with self.metrics:
            self._log_start()
            self.context.preemption.install()
            with contextlib.closing(loop.run_steps(self.trainer)) as stream:
                try:
                    self._run_steps(stream)
                except Preempted as preempted:
                    self._save_and_stop(preempted)  # before the loader processes are stopped, which takes time
                    raise
            if self.trainer.until is None:
                self._finish_training()

    def _log_start(self) -> None:
        self.log.write_start()
        samples = self.trainer.position.samples
        for message in self.damaged:
            self.log.warn(messages.damaged_checkpoint_skipped(problem=message, samples=samples))
        if self.weights_mismatch:
            weights = str(self.task.spec.model.weights)
            self.log.warn(messages.weights_partly_loaded(weights=weights, reason=self.weights_mismatch))

    def _run_steps(self, stream: Iterator[Step]) -> None:
        if self.evaluation_pending:
            self._end_epoch(None)
        if self.stop_reason:
            return
        self._stop_before_larger_stage()
        if not self.trainer.position.samples:  # fails before the first epoch if it cannot be measured
            self._measure_curvature()
        ranks = self.context.ranks
        hangs = HangWatch(self.run, self.task, self.context.attempt, ranks.rank, ranks.world)
        for step in hangs.watch_steps(stream):
            self.log.record_step(step)
            self.divergence.record_loss(step)
            self.watch.record_step(step)
            if step.epoch_ended:
                self._end_epoch(step)
                if self.stop_reason:
                    return
            elif self.is_first_rank:
                self.log.write_steps_when_due()
                # A checkpoint must hold the state of all ranks.
                if not self.trainer.apart and not self.trainer.parallel.needs_all_ranks and self._is_checkpoint_due():
                    self._save_checkpoint_if_finite()
            self._stop_before_larger_stage()
            self._check_preemption()
            if step.batch != self.trainer.batch:
                self._begin_stage()

    def _begin_stage(self) -> None:
        """Start a stage: its steps are compared only with each other and with the prediction at their batch."""
        if self.is_first_rank:
            self.log.write_steps()
        self.log.write_stage_start()
        self.watch.restart()
        self.log.parts = None

    def _stop_before_larger_stage(self) -> None:
        """Stop at the start of the next stage, if it has more nodes; every rank reaches it at the same step.

        Raises:
            Preempted: the ranks stop.
        """
        following, epochs = self.task.next_stage, self.task.spec.train.epochs
        is_past_end = self.trainer.position.epoch == epochs  # stages that are never reached are placed at the end
        if following is not None and self.trainer.batch >= following.batch and not is_past_end:
            raise Preempted("stage_end")

    # --- Early stops and divergence

    def _check_preemption(self) -> None:
        if self.context.preemption.stop_if_requested(reserve=1.5 * self.log.save_time):
            self._check_divergence()
            self._check_step_times()
            is_sharded = self.trainer.parallel.needs_all_ranks and not self.evaluation_pending
            if is_sharded and self.context.ranks.broadcast(int(self._is_checkpoint_due())):
                self._save_checkpoint_if_finite()

    def _check_step_times(self) -> None:
        """Report a change of the step time; every rank must call this."""
        level = self.watch.detect_level_change()
        self.log.parts = self.watch.newest
        if level:
            self.log.warn_step_time_change(level)

    def _save_and_stop(self, preempted: Preempted) -> None:
        """Save at the current position, from which the next attempt resumes."""
        self.trainer.method.synchronize_replicas(self.trainer)
        self._check_divergence(weights=True)
        if self.is_first_rank:
            self.log.write_steps()
        if self.is_saving_rank:
            self._save_checkpoint(is_best=False)
        if self.is_first_rank:
            self.run.write_stop_reason(self.task.id, self.context.attempt, preempted.reason)

    def _check_divergence(self, *, weights: bool = False) -> None:
        """Fail if loss or weights are not finite, or the loss has blown up. Every rank must call this.

        Raises:
            Diverged: the training has diverged.
        """
        problem = self.divergence.describe_divergence(weights=weights)
        if not problem:
            return
        if self.is_first_rank:
            self.log.write_steps()  # the last row shows the divergence
        raise self._make_divergence_error(problem)

    def _make_divergence_error(self, description: str) -> Exception:
        """Return the error to raise on every rank; a ramp's checkpoints since the loss rose are deleted."""
        if self.divergence.should_judge_finite_losses:
            losses, factor = self.trainer.losses, compute_lr_scale(self.task.spec, self.trainer.batch)
            self.log.add_row("diverged", message=description, sound=losses.sound, lr_factor=losses.lr_factor or factor)
            checkpoint.delete_checkpoints_after(self.run, self.task.signature, losses.sound)
        self.context.ranks.broadcast(0)  # wait for rank 0, as the first rank to exit makes the others exit
        return Diverged(description, failures.describe_advice("diverged"))

    def _handle_evaluation(self, loss: float) -> None:
        """Handle the evaluation of an epoch; called on every rank with the mean loss of its last step, and may raise."""

    # --- Checkpoints

    @property
    def is_saving_rank(self) -> bool:
        """True on rank 0, and on every rank if the model is sharded."""
        return self.is_first_rank or self.trainer.parallel.needs_all_ranks

    def _is_checkpoint_due(self) -> bool:
        interval = self.task.spec.train.checkpoint_every
        if interval == "auto":
            rate = compute_interruption_rate(self.task.spec.pricing, self.task.nodes)
            interval = compute_checkpoint_interval(self.log.save_time, rate=rate)
        return time.monotonic() - self.last_save >= interval

    def _save_checkpoint_if_finite(self) -> None:
        """Save, unless weights are not finite on this rank, or on any rank if all ranks take part in saving."""
        non_finite_weights = not self.divergence.has_finite_weights()
        if self.trainer.parallel.needs_all_ranks:
            non_finite_weights = bool(self.context.ranks.max(float(non_finite_weights)))
        if not non_finite_weights:
            self._save_checkpoint(is_best=False)

    def _save_checkpoint(self, *, is_best: bool) -> None:
        self.log.write_step_values(close=True)
        self.divergence.update_loss_level()
        began = time.monotonic()
        checkpoint.save_checkpoint(
            self.run,
            self.task.signature,
            self.trainer,
            best=self.best,
            is_best=is_best,
            evaluation_pending=self.evaluation_pending,
            stop_reason=self.stop_reason,
            keep=(*self.keep, *self._list_checkpoints_before_rise()),
        )
        self.last_save = time.monotonic()
        self.log.save_time = self.last_save - began
        self.log.add_row("save", seconds=self.log.save_time)

    def _list_checkpoints_before_rise(self) -> list[int]:
        """Return the samples of the newest checkpoint from before the loss rose; empty if finite losses are not
        judged."""
        if not self.divergence.should_judge_finite_losses:
            return []
        checkpoint_samples = (int(path.stem) for path in self.run.get_training(self.task.signature).list_checkpoints())
        return [samples for samples in checkpoint_samples if samples <= self.trainer.losses.sound][:1]

    # --- The end of an epoch and of the training

    def _end_epoch(self, step: Step | None) -> None:
        """Evaluate, compare the step time with the prediction, log and save.

        `step` is the epoch's last; None if an earlier attempt made it and had to stop before the evaluation.
        """
        self.log.write_steps()
        self._check_divergence(weights=True)
        began = time.monotonic()
        self.evaluation_pending = True
        result = self.evaluator.evaluate(after_batch=self._check_preemption)
        self.log.eval_time = time.monotonic() - began
        self._measure_curvature()
        self._measure_gradient_noise()
        self.evaluation_pending = False
        # The mean loss of the last step over all ranks; every rank takes part.
        (loss_sum,) = self.trainer.ranks.sum([float(step.loss) if step else math.nan])
        loss = loss_sum / self.trainer.ranks.world
        if step:
            self._handle_evaluation(loss)
        self.context.energy.save_energy()
        train = self.task.spec.train
        # Rank 0 alone knows the best epoch.
        is_best = self.is_first_rank and early_stopping.is_better_evaluation(
            result.metrics, self.best, train.best_checkpoint
        )
        if is_best:
            self._store_best_values(result)
        self._decide_early_stop(result)
        if self.is_first_rank:
            lr = step.lr if step else self.trainer.lr
            self.log.write_epoch(result, loss=loss, lr=lr)
        if self.is_saving_rank:
            self._save_checkpoint(is_best=is_best)
        if self.is_first_rank and (self.trainer.position.epoch == train.epochs or self.stop_reason):
            self._write_result(result)

    def _decide_early_stop(self, result: Evaluation) -> None:
        """Decide whether the training ends here; rank 0, which knows the best epoch so far, decides for all ranks."""
        train, epoch = self.task.spec.train, self.trainer.position.epoch
        if train.early_stopping is None or self.trainer.until is not None:
            return
        why = ""
        if self.is_first_rank and epoch < train.epochs:
            why = early_stopping.describe_stop_reason(result.metrics, self.best, train, epoch=epoch)
        self.stop_reason = self.trainer.ranks.gather(why)[0]

    def _store_best_values(self, result: Evaluation) -> None:
        self.best = early_stopping.select_best_values(
            result.metrics, self.task.spec.train.best_checkpoint, epoch=self.trainer.position.epoch
        )

    def _measure_curvature(self) -> None:
        """Write a row with the extreme Hessian eigenvalues, if the job requests it; every rank must call this.

        At the end of an epoch this happens before its evaluation counts as done: a run that stops in between measures
        again.
        """
        if "hessian" in self.task.spec.train.diagnostics:
            curvature = hessian.measure_curvature(
                self.trainer, samples=HESSIAN_SAMPLES, after_product=self._check_preemption
            )
            terms = hessian.compute_lemma_1_terms(self.trainer, curvature.smoothness)
            self.log.add_row("hessian", **asdict(curvature), **terms)

    def _measure_gradient_noise(self) -> None:
        """Write a row with the gradient noise scale, if the job requests it; every rank must call this."""
        if "gradient_noise" in self.task.spec.train.diagnostics:
            noise = gradient_noise.measure_gradient_noise(
                self.trainer, batches=NOISE_BATCHES, after_batch=self._check_preemption
            )
            self.log.add_row("noise", batch=self.trainer.batch, **noise)

    def _write_result(self, result: Evaluation) -> None:
        trainer, signature = self.trainer, self.task.signature
        values = result.metrics
        metrics = {"eval_loss": values.pop("loss"), **values}
        metric, rows = self.task.spec.train.best_checkpoint.metric, self.run.get_training(signature).read_metrics()
        configuration = (self.task.nodes, trainer.sizes.batch, trainer.largest_micro_batch)
        self.run.write_train_result(
            TrainResult(
                signature=signature,
                nodes=self.task.nodes,
                batch=trainer.sizes.batch,
                samples=trainer.position.samples,
                steps=trainer.position.steps,
                epochs=trainer.position.epoch,
                # JSON knows no nan: accuracies without classes, or the loss of an evaluation that is not finite.
                metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
                best_top1=replace_infinite(self.best["top1"]),
                best_loss=replace_infinite(self.best["loss"]),
                best_epoch=int(self.best["epoch"]),
                best=BestValue.from_metric(metric, self.best.get("value")),
                ended=self.stop_reason,
                step_time=compute_mean_step_time(rows, configuration),
                finished_at=time.time(),
                tuning=self.run.get_training(signature).read_tuning(),
            )
        )

    def _finish_training(self) -> None:
        """Evaluate and write the result if it is missing: of a run resumed after its last step, or whose last epoch had
        less than a batch left."""
        written = self.is_first_rank and self.run.get_training(self.task.signature).read_result() is not None
        if self.trainer.ranks.broadcast(int(written)):
            return
        self._check_divergence(weights=True)
        result = self.evaluator.evaluate()
        if self.is_first_rank:
            self.log.warn_non_finite_evaluation(result)
            if not self.best:
                self._store_best_values(result)
        if self.is_saving_rank:
            self._save_checkpoint(is_best=False)
        if self.is_first_rank:
            self._write_result(result)


def replace_infinite(value: float) -> float | None:
    """Return a number that JSON can represent: None if it is not finite."""
    return value if math.isfinite(value) else None
