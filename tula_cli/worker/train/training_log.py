"""The rows of a training in metrics.jsonl and steps.jsonl: its start, steps, epochs and warnings."""

import json
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from tula_cli.diagnostics import Diagnostic
from tula_cli.models.out_of_memory import MIN_NORMALISED
from tula_cli.models.time.changes import Level, StepTimeDrift, describe_step_change, make_step_change
from tula_cli.models.time.noise import compute_trimmed_mean
from tula_cli.optim import explain_small_effect
from tula_cli.run.directory import RunDir
from tula_cli.run.files import append_json_line, open_file, open_file_to_append, read_lines, write_file_atomically
from tula_cli.run.records.recommendations import Prediction, StageSteps
from tula_cli.run.records.results import StepParts
from tula_cli.run.records.tasks import TrainTask
from tula_cli.run.secrets import remove_secrets
from tula_cli.run.step_series import MAX_ROWS_UNJOINED, StepRow, format_rows, join_adjacent_rows
from tula_cli.run.training_run import TrainingRun, is_complete_row
from tula_cli.words import (
    add_timestamp,
    compute_seconds_to_next_progress_line,
    describe_progress,
    format_count,
    format_duration,
    format_number,
)
from tula_cli.worker import environment, messages
from tula_cli.worker.build.batches import TokenCounter
from tula_cli.worker.build.loaders import TrainingPosition
from tula_cli.worker.build.norms import count_batch_norm_micro_batches
from tula_cli.worker.build.samples import StreamedDataset
from tula_cli.worker.train.diagnostics import Diagnostics
from tula_cli.worker.train.evaluation import Evaluation
from tula_cli.worker.train.loop import Step, Trainer

# --- The file of steps
#
# Rows are added between steps, never in one. Before each checkpoint all rows are written, so that none has steps from both
# sides of it; those beyond the checkpoint that a training resumes from are dropped, since their steps are made again.

ROWS_PER_LINE = 32
"""Rows that are written at once, so that the start of a line is short compared with them."""


class StepRecordFile:
    """The file of steps of one training; used on rank 0 alone."""

    def __init__(self, training: TrainingRun, *, max_rows: int = MAX_ROWS_UNJOINED) -> None:
        self.training, self.max_rows = training, max_rows
        self.count = 0  # number of rows in the file
        self.width = 1  # steps per new row
        self.complete_rows: list[StepRow] = []  # full rows that are not yet written
        self.open: list[StepRow] = []  # joined steps of the row that is not yet full
        self.last: StepRow | None = None  # newest row with the newest norm, for a resumption

    def resume(self, samples: int) -> None:
        """Drop the rows beyond `samples`, and continue after the others."""
        if not self.training.steps_path.exists():
            return
        rows = [row for row in self.training.read_step_rows() if row.samples <= samples]
        widest = max((row.steps for row in rows), default=1)
        self.width = 2 ** (widest - 1).bit_length()
        self.complete_rows, self.open, complete = [], [], [row for row in rows if row.last is not None]
        # Steps skipped by GradScaler have no norm and do not count for the change at the next step.
        self.last = complete[-1]._replace(samples=rows[-1].samples) if complete else None
        self._rewrite_file(rows)

    def add_steps(self, steps: Sequence[StepRow], *, close: bool) -> None:
        """Add steps, and write the full rows if they are enough for a line.

        Args:
            close: write all rows, including the last one even if it is not full.
        """
        for step in steps:
            self.complete_rows += self._add_to_open_row(step)
        if close and self.open:
            self.complete_rows.append(self.open.pop())
        if not self.complete_rows or (len(self.complete_rows) < ROWS_PER_LINE and not close):
            return
        rows, self.complete_rows = self.complete_rows, []
        with open_file_to_append(self.training.steps_path) as file:
            file.write(format_rows(rows).encode())
        self.count += len(rows)
        if self.count > self.max_rows:
            self._double_row_width()

    def _add_to_open_row(self, step: StepRow) -> list[StepRow]:
        """Add a step to the open row; return the rows that become full."""
        full: list[StepRow] = []
        if self.open and not step.is_directly_after(self.open[0]):
            full.append(self.open.pop())
        self.open = [self.open[0].join_next_row(step) if self.open else step]
        if self.open[0].steps >= self.width:
            full.append(self.open.pop())
        return full

    def _double_row_width(self) -> None:
        """Join pairs of rows from now on; rows on both sides of a checkpoint stay apart, as a training may resume from it."""
        marks = sorted(int(path.stem) for path in self.training.list_checkpoints())

        def are_apart(first: int, after: int) -> bool:
            return any(first <= mark < after for mark in marks)

        self.width *= 2
        rows = self.training.read_step_rows()
        self._rewrite_file(join_adjacent_rows(rows, max_rows=self.width, must_stay_apart=are_apart))

    def _rewrite_file(self, rows: Sequence[StepRow]) -> None:
        write_file_atomically(self.training.steps_path, format_rows(rows))
        self.count = len(rows)


# --- The file of metrics

LOG_SECONDS = 1.0
"""At most one step row per second: enough for a live view, and a small load on a shared file system."""


class MetricsFile:
    """metrics.jsonl: one JSON object per line, appended by rank 0; other ranks write nothing.

    Rows beyond `samples`, from which the run resumes, are dropped: those steps are trained again. A damaged row before
    that is kept: `tula status` reports it as long as it exists.
    """

    def __init__(self, run: RunDir, task: TrainTask, *, is_first: bool, samples: int) -> None:
        self.path = run.get_training(task.signature).metrics_path
        self.run, self.task, self.first, self.samples = run, task, is_first, samples
        self.steps = StepRecordFile(run.get_training(task.signature))  # values of every step

    def __enter__(self) -> "MetricsFile":
        if self.first:
            self._drop_later_rows()
            self.steps.resume(self.samples)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.steps.add_steps([], close=True)  # also after a failure, whose cause the last steps may show

    def _drop_later_rows(self) -> None:
        if not self.path.exists():
            return
        kept_lines: list[bytes] = []
        damaged: list[bytes] = []  # damaged rows since the last kept row
        with open_file(self.path) as file:
            for line in read_lines(file):
                if not is_complete_row(line):
                    damaged.append(line.strip(b"\0\n") + b"\n")
                elif json.loads(line).get("samples", 0) <= self.samples:
                    kept_lines += [*damaged, line]
                    damaged.clear()
        write_file_atomically(self.path, b"".join(kept_lines))

    def add_row(self, kind: str, position: TrainingPosition, epoch: float, **values: Any) -> None:
        if not self.first:
            return
        row = {
            "kind": kind,
            "time": time.time(),
            "samples": position.samples,
            "epoch": epoch,
            **remove_secrets(_replace_non_finite(values)),
        }
        append_json_line(self.path, row)


def compute_mean_step_time(rows: Iterable[dict[str, Any]], configuration: tuple[int, int, int]) -> float | None:
    """Return the step time (s) over all epochs of all attempts at these nodes, batch and micro-batch; None without any.

    A late epoch alone may have only two steps, and a speed that differs from the training that was predicted.
    """
    is_same_configuration, times = False, []
    _, own_batch, micro_batch = configuration
    for row in rows:
        if row["kind"] == "start":
            # Rows of older versions have no micro_batch.
            is_same_configuration = configuration == (row["nodes"], row["batch"], row.get("micro_batch", micro_batch))
        elif (
            row["kind"] == "epoch"
            and is_same_configuration
            and row["step_time"] is not None
            and row.get("batch", own_batch) == own_batch
        ):
            times.append(row["step_time"])
    return compute_trimmed_mean(times) if times else None


def _replace_non_finite(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with nan and infinity replaced by null, because JSON cannot represent them."""
    return {
        name: _replace_non_finite(value)
        if isinstance(value, dict)
        else None
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for name, value in values.items()
    }


MIN_STEPS_JUDGED = 20
"""Minimum number of steps before a warning that AGS hardly acts."""


class TrainingLog:
    """The rows of one training. Steps and epochs are recorded on rank 0 alone; other ranks write no rows.

    Args:
        ahead: steps of branches that are to come before the training continues.
    """

    def __init__(self, metrics: MetricsFile, task: TrainTask, trainer: Trainer, *, ahead: int = 0) -> None:
        self.metrics, self.task, self.trainer, self.ahead = metrics, task, trainer, ahead
        self.diagnostics = Diagnostics.attach(trainer)  # gradient statistics of the current epoch, or None
        self.recent: list[Step] = []  # steps since the last row
        self.tokens = TokenCounter()  # tokens of their batches
        self.step_times: list[float] = []  # step times (s) of the current epoch
        self.window: deque[float] = deque()  # newest step times (s), compared with the prediction
        self.batch = trainer.batch  # global batch of these steps
        self.drift = StepTimeDrift(self.current_prediction)
        self.parts: StepParts | None = None  # parts of a step in the newest sample
        self.changed = False  # whether a change of the step time was reported
        self.save_time = self.eval_time = 0.0  # seconds of the newest checkpoint and evaluation
        self.last_row = 0.0
        self.began = time.monotonic()
        # monotonic time of the next progress line
        self.next_print = self.began + compute_seconds_to_next_progress_line(0.0)
        self.unjudged: list[Mapping[str, float]] = []  # AGS reports of the newest epochs, until judged
        self.warned: set[str] = set()  # kinds of warnings that were already given

    @property
    def current_prediction(self) -> Prediction | StageSteps | None:
        """The prediction of the step time at the current batch; None if there is none."""
        return self.task.prediction and self.task.prediction.get_prediction_at_batch(self.batch)

    def add_row(self, kind: str, **values: Any) -> None:
        """Write a row at the trainer's position."""
        self.metrics.add_row(kind, self.trainer.position, self.trainer.epoch, **values)

    def warn(self, warning: Diagnostic) -> None:
        self.add_row("warning", message=warning.text, code=warning.code, values=dict(warning.values))
        self._print_line(f"warning: {warning.text}")

    def _print_line(self, line: str) -> None:
        """Print a line to the job's log, which `tula logs` shows; rank 0 alone."""
        if self.trainer.ranks.is_first:
            sys.stdout.write(f"{add_timestamp(line)}\n")
            sys.stdout.flush()

    def write_start(self) -> None:
        """Write the rows of a start or a resumption; every rank must call this."""
        task, trainer = self.task, self.trainer
        if self.diagnostics:
            self.diagnostics.resume(self.metrics.steps.last, trainer.position.samples)
        lr, cause = trainer.lr, task.cause
        sizes = {"batch": task.batch, "micro_batch": trainer.largest_micro_batch}
        beta2 = {"beta2": trainer.beta2s[0]} if trainer.beta2s else {}
        self.add_row("start", attempt=task.attempt, **sizes, nodes=task.nodes, lr=lr, **beta2, cause=cause)
        self.add_row("environment", **self._collect_environment())
        at = f"from sample {trainer.position.samples}" if trainer.position.samples else "from the beginning"
        beta2_text = f", beta2 {trainer.beta2s[0]:.6g}" if trainer.beta2s else ""
        later = f" (of {task.training_nodes} later)" * (task.training_nodes != task.nodes and not task.sizes)
        self._print_line(
            f"training on {format_count(task.nodes)}{later}, batch {task.batch}{beta2_text}, {at}"
            + f": {cause}" * bool(cause)
        )
        if len(trainer.sizes.ramp.stages) > 1:
            self.write_stage_start()
        for warning in list_ineffective_settings(trainer):
            self.warn(warning)

    def _collect_environment(self) -> dict[str, Any]:
        """Return the environment of this training; every rank must call this."""
        ranks = self.trainer.ranks
        local_ranks = environment.count_local_ranks(ranks, self.task.spec.cluster)
        description = environment.collect_environment(ranks, workers=self.trainer.workers).model_dump(mode="json")
        return {**description, "oversubscribed": environment.is_oversubscribed(ranks, ranks_here=local_ranks)}

    def write_stage_start(self) -> None:
        """Write the row of a new stage, which starts with the coming step; its steps are judged separately."""
        trainer, stages = self.trainer, self.trainer.sizes.ramp.stages
        self.batch, stage_number = trainer.batch, trainer.sizes.ramp.find_stage(trainer.samples_passed)
        self.step_times, self.changed = [], False
        self.window.clear()
        self.drift = StepTimeDrift(self.current_prediction)
        beta2 = {"beta2": trainer.beta2s[0]} if trainer.beta2s else {}
        noise = stages[stage_number].noise
        by = {} if noise is None else {"noise": noise}  # gradient noise scale from which the stage was planned
        self.add_row(
            "stage", batch=self.batch, stage=stage_number + 1, stages=len(stages), lr=trainer.lr, **by, **beta2
        )
        noise_text = "" if noise is None else f", noise scale {format_number(noise)}"
        self._print_line(
            f"batch {self.batch} from epoch {trainer.epoch:.3g} on, sample {trainer.position.samples}: stage {stage_number + 1} of"
            f" {len(stages)}, lr {format_number(trainer.lr)}{noise_text}"
        )

    def record_step(self, step: Step) -> None:
        """Record the step that has just been made."""
        if self.trainer.ranks.is_first:
            self.recent.append(step)
            self.tokens.add(self.trainer.last_batch)
        if self.diagnostics:
            self.diagnostics.record_step(self.trainer, step)

    # --- Steps

    def write_steps_when_due(self) -> None:
        """Write a row if the last one is LOG_SECONDS old; this reads the loss, so it waits for the device."""
        if time.monotonic() - self.last_row < LOG_SECONDS:
            return
        self.write_steps(prints=time.monotonic() >= self.next_print)
        self.last_row = time.monotonic()

    def write_steps(self, *, prints: bool = False) -> None:
        """Compute the times of the steps since the last row, and write the row."""
        if not self.recent:
            return
        trainer, steps = self.trainer, self.recent
        seconds = [trainer.clock.measure_seconds(step.start, step.end) for step in steps]
        waits = [trainer.clock.measure_seconds(step.start, step.loaded) for step in steps]
        plain = [value for value, step in zip(seconds, steps, strict=True) if not step.refreshed]
        self.step_times += plain
        self.window.extend(plain)
        loss, remaining = float(steps[-1].loss), self._estimate_remaining_seconds(statistics.fmean(seconds))
        self.write_step_values(close=False)  # cheap now, as the device has just been waited for
        self.add_row(
            "step",
            step=trainer.position.steps,
            count=len(steps),  # steps since the last row
            loss=loss,
            lr=steps[-1].lr,
            batch=self.batch,
            step_time=statistics.fmean(seconds),
            refreshed=len(steps) - len(plain),
            plain_time=statistics.fmean(plain) if plain else None,  # without steps that refresh factors
            data_wait=statistics.fmean(waits),
            compute=self.parts and self.parts.compute,
            sync=self.parts and self.parts.sync,
            **self._compute_token_rates(statistics.fmean(seconds)),
            eta=remaining,
        )
        if prints:
            self._print_steps(loss, statistics.fmean(seconds), remaining)
        self.recent, self.tokens = [], TokenCounter()

    def write_step_values(self, *, close: bool) -> None:
        """Write the recorded values of each step; with `close`, before a checkpoint, all of them."""
        if self.diagnostics:
            self.metrics.steps.add_steps(self.diagnostics.pop_rows(), close=close)

    def _print_steps(self, loss: float, step_time: float, remaining: float) -> None:
        self._print_line(
            describe_progress(
                all_epochs=self.task.spec.train.max_epochs,
                epoch=self.trainer.epoch,
                samples=self.trainer.position.samples,
                batch=self.batch,
                loss=loss,
                step_time=step_time,
                remaining=remaining,
            )
        )
        self._delay_next_print()

    def _delay_next_print(self) -> None:
        """Postpone the next progress line, because another line has just reported the progress."""
        self.next_print = time.monotonic() + compute_seconds_to_next_progress_line(time.monotonic() - self.began)

    def _compute_token_rates(self, step_time: float) -> dict[str, float | None]:
        """Return the tokens per second over all GPUs and the share of padding; None if batches are not text."""
        means = self.tokens.compute_means_per_sample()
        if means is None or not step_time:
            return {"tokens_per_second": None, "padding": None}
        length, real = means
        return {"tokens_per_second": real * self.batch / step_time, "padding": 1 - real / length}

    def _estimate_remaining_seconds(self, step_time: float) -> float:
        trainer, position = self.trainer, self.trainer.position
        size, epochs = len(trainer.datasets.train), self.task.spec.train.max_epochs
        remaining_steps = trainer.sizes.ramp.count_remaining_steps(
            size=size, epochs=epochs, epoch=position.epoch, samples_done=position.done
        )
        stepping = sum(
            steps * step_time * self._predict_step_time_ratio(batch) for batch, steps in remaining_steps.items()
        )
        overhead = (self.eval_time + self.save_time) * max(0, epochs - position.epoch - 1)
        return stepping + step_time * self.ahead + overhead

    def _predict_step_time_ratio(self, batch: int) -> float:
        """Return the predicted ratio of the step time at a batch to that at the current one, else the batches'
        ratio."""
        current = self.current_prediction
        other = self.task.prediction and self.task.prediction.get_prediction_at_batch(batch)
        return other.step_time / current.step_time if current and other else batch / self.batch

    def warn_step_time_change(self, level: Level) -> None:
        """Report a change of the step time: since when, in which part of the step, and its consequences."""
        change = make_step_change(level, self.task, self._estimate_remaining_seconds)
        self.changed = True
        self.add_row("change", change=change.model_dump(mode="json"))
        self._print_line(f"changed: {describe_step_change(change)}")

    # --- Epochs

    def write_epoch(self, result: Evaluation, *, loss: float, lr: float) -> None:
        """Write the row of the epoch that has ended, with its last step's mean loss and learning rate, and warnings."""
        trainer, prediction = self.trainer, self.current_prediction
        step_time = compute_trimmed_mean(self.step_times) if self.step_times else None
        # The prediction is for synchronous steps, unlike those of post-local SGD after its switch.
        recent = None if trainer.is_local_sgd else self._compute_recent_step_time()
        within = self.drift.is_within_prediction(recent)
        ags = trainer.ags.report() if trainer.ags and not trainer.ags.identity else None
        self.metrics.add_row(
            "epoch",
            trainer.position,
            trainer.position.epoch,
            loss=loss,
            lr=lr,
            batch=self.batch,
            eval_loss=result.loss,
            top1=result.top1,
            top5=result.top5,
            perplexity=result.perplexity,
            step_time=step_time,
            predicted_step=prediction.step_time if prediction else None,
            step_low=prediction.step_low if prediction else None,
            step_high=prediction.step_high if prediction else None,
            within=within,
            eval_seconds=self.eval_time,
            **({"metrics": dict(result.user_metrics)} if result.user_metrics else {}),
            ags=ags,
            **trainer.method.report(trainer),
            diagnostics=self.diagnostics and self.diagnostics.report(trainer, scaled=ags["scaled"] if ags else None),
        )
        self._print_line(self._describe_epoch(result, loss=loss, lr=lr, step_time=step_time))
        self._delay_next_print()
        self.warn_non_finite_evaluation(result)
        self._warn_inactive_ags(ags)
        drifted = self.drift.check_epoch(recent, epoch=trainer.position.epoch)
        if drifted and not self.changed:  # a reported change says the same, with a cause
            self.warn(drifted)
        self.step_times = []

    def _describe_epoch(self, result: Evaluation, *, loss: float, lr: float, step_time: float | None) -> str:
        position, classes = self.trainer.position, math.isfinite(result.top1)
        remaining = format_duration(self._estimate_remaining_seconds(step_time)) if step_time else ""
        pace = f", {format_number(self.batch / step_time)} samples/s, {remaining} left" if step_time else ""
        return (
            f"epoch {position.epoch} of {self.task.spec.train.max_epochs}: {position.samples} samples, loss {format_number(loss, 4)},"
            f" eval loss {format_number(result.loss, 4)}, "
            + f"top-1 {format_number(result.top1, 4)} %, " * classes
            + f"perplexity {format_number(result.perplexity, 4)}, " * math.isfinite(result.perplexity)
            + "".join(f"{name} {format_number(value, 4)}, " for name, value in result.user_metrics.items())
            + f"batch {self.batch}, lr {format_number(lr)}, {format_number(step_time and 1000 * step_time)} ms per step{pace}"
        )

    def warn_non_finite_evaluation(self, result: Evaluation) -> None:
        """Warn once if the evaluation loss is not finite although the training loss is, and once if the metric of
        train.best_checkpoint is not finite."""
        metric, epoch = self.task.spec.train.best_checkpoint.metric, self.trainer.position.epoch
        value = result.user_metrics.get(metric, 0.0) if result.samples else 0.0
        if not math.isfinite(value) and "best" not in self.warned:
            self.warned.add("best")
            self.warn(messages.metric_not_finite(metric=metric, epoch=epoch))
        if result.samples and not math.isfinite(result.loss) and "evaluation" not in self.warned:
            self.warned.add("evaluation")
            self.warn(messages.evaluation_loss_not_finite(epoch=epoch))

    def _warn_inactive_ags(self, ags: Mapping[str, float] | None) -> None:
        """Warn once about each way in which AGS has little effect, over at least MIN_STEPS_JUDGED steps (several short epochs)."""
        if not ags or not ags["factors"]:
            return
        self.unjudged.append(ags)
        steps = sum(report["steps"] for report in self.unjudged)
        if steps < MIN_STEPS_JUDGED:
            return
        shares = {
            name: sum(report[name] * report["steps"] for report in self.unjudged) / steps
            for name in ("scaled", "jumps_up", "jumps_down")
        }
        self.unjudged = []
        for kind, message in explain_small_effect({**ags, **shares, "steps": steps}).items():
            if kind not in self.warned:
                self.warned.add(kind)
                self.warn(messages.ags_hardly_scales(text=message))

    # --- Comparison with the prediction

    def _compute_recent_step_time(self) -> float | None:
        """Return the trimmed mean of the newest step times (s), and drop older ones; None before enough steps have run.

        These are at least as many steps as a probe times: the predicted interval is that of a probe's mean, and the mean
        of fewer steps varies more.
        """
        prediction = self.current_prediction
        if prediction is None:
            return None
        min_steps = max(len(self.step_times), self.task.spec.search.estimate_timed_steps(prediction.step_time))
        while len(self.window) > min_steps:
            self.window.popleft()
        return compute_trimmed_mean(list(self.window)) if len(self.window) == min_steps else None


def list_ineffective_settings(trainer: Trainer) -> list[Diagnostic]:
    """Return warnings about settings that have no effect, or an unexpected one, in this training."""
    train, warnings = trainer.spec.train, []
    if (warmup := trainer.spec.workload.warmup_epochs) >= train.epochs:
        warnings.append(messages.warmup_never_ends(warmup_epochs=warmup, epochs=train.epochs))
    if isinstance(trainer.datasets.train, StreamedDataset) and (passed := trainer.position.done):
        warnings.append(messages.stream_read_again(samples=passed))
    return [
        *warnings,
        *trainer.method.list_remarks(trainer),
        *trainer.sizes.ramp.remarks,
        *_warn_small_norm_batches(trainer),
    ]


def _warn_small_norm_batches(trainer: Trainer) -> list[Diagnostic]:
    sizes, world = trainer.sizes, trainer.ranks.world
    micro_batch_count = count_batch_norm_micro_batches(trainer.parallel.module, world=world)
    samples = {
        stage.batch: micro_batch_count * stage.batch // (world * sizes.parts[stage.batch])
        for stage in sizes.ramp.stages[:-1]
        if stage.batch <= sizes.largest
    }
    small_batches = {batch: count for batch, count in samples.items() if micro_batch_count and count < MIN_NORMALISED}
    return [messages.small_norm_batches(samples=small_batches)] if small_batches else []
