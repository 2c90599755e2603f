"""A training by a script: where it resumes, its progress (recorded by its own monitor), and its result."""

import contextlib
import glob
import math
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tula_cli import words
from tula_cli.cluster.allocation import Allocation
from tula_cli.cluster.scripts.checkpoints import (
    UNCHANGED_SECONDS,
    find_newest_checkpoint,
    find_position_at_time,
    is_settled_since,
    list_earlier_saves,
    read_checkpoint_change_time,
)
from tula_cli.cluster.scripts.methods import NEVER_REFRESH_STEPS, summarize_scaling
from tula_cli.cluster.scripts.metrics import find_last_and_best, read_metrics
from tula_cli.cluster.scripts.start import ScriptProgram, compute_script_learning_rate
from tula_cli.cluster.scripts.watch import ScriptMonitor, describe_missing_step
from tula_cli.errors import JobFailed
from tula_cli.host.leftovers import find_processes_with_variable
from tula_cli.host.network import get_node_name
from tula_cli.host.processes import find_innermost_pid
from tula_cli.models import claims, refresh
from tula_cli.models.out_of_memory import list_splits, make_batch_norm_limit
from tula_cli.run.files import append_json_line, open_file_to_append, read_change_time
from tula_cli.run.records.failures import Failure
from tula_cli.run.records.jobs import Attempt, LeaderCommand
from tula_cli.run.records.recommendations import TimeParts
from tula_cli.run.records.results import MicroBatches, ScriptCheckpointSave, ScriptProgress, Splits, TrainResult
from tula_cli.run.records.scripts import RankResult, Verdict
from tula_cli.run.records.tasks import TrainTask
from tula_cli.run.script_attempt import ResumeTestRecords, ScriptAttempt
from tula_cli.run.secrets import remove_secrets
from tula_cli.run.training_run import TrainingRun
from tula_cli.spec.scripts.placeholders import fill_text
from tula_cli.spec.scripts.script import Resume, count_script_samples
from tula_cli.spec.signature import compute_resume_test_signature

if TYPE_CHECKING:
    from tula_cli.models.time.changes import ScriptLevelDetector


# --- The monitor

FIRST_STEP_STARTS = 20
"""Limit for a training's first step in startup times of a probe; at least search.max_minutes."""
ROW_SECONDS = 1.0
"""Seconds between two rows of metrics.jsonl, as in the training loop of tula."""
SAVE_SIGNALS = {name: signal.Signals[name] for name in ("SIGUSR1", "SIGUSR2", "SIGTERM")}
SAVE_SECONDS = 5.0
"""Seconds between two checks for a new checkpoint."""


@dataclass
class TrainingMonitor(ScriptMonitor):
    """Monitor of one attempt of a training; that of the leader also records the rows and checkpoints of the training."""

    program: "ScriptTraining"
    leads: bool = False
    _next_row: float = 0.0
    # seconds after the start of the next progress line
    _next_print: float = words.compute_seconds_to_next_progress_line(0.0)
    _next_epoch: float = 0.0  # epoch at whose start a progress line is printed earlier
    _next_checkpoint_check: float = 0.0
    _began: float = field(default_factory=time.monotonic)
    _step: int = 0
    _batch: float = 0.0  # samples per step at the last check; 0 before the first
    _first_step_failure: Failure | None = None
    _first_steps_checked: bool = False  # whether the first steps of all ranks were compared with the settings

    tolerates_shim_failures = True

    def record_start(self) -> None:
        """Record the start of the training in its metrics."""
        if self.leads:
            self.program.record_start(self.command)

    def record_progress(self) -> None:
        """Record failures, progress and checkpoints reported by the shims of these ranks since the last call."""
        super().record_progress()
        if not self.leads:
            return
        if time.monotonic() >= self._next_row:
            self._next_row = time.monotonic() + ROW_SECONDS
            previous_step = self._step
            self._step = self.program.log_progress(self.attempt, self.command, after=previous_step)
            if self._step > previous_step:
                self._print_progress()
            self._batch = self.program.warn_step_samples_change(
                self.attempt, self.command, previous=self._batch or self.command.batch
            )
            self.program.record_step_time_change(self._level_detector, self.attempt, self.command)
            if not self._first_steps_checked and (first_results := self.attempt.read_first_results()):
                self._first_step_failure = self.program.find_contradiction_in_first_steps(first_results, self.command)
                self._first_steps_checked = len(first_results) >= first_results[0].world
        if time.monotonic() >= self._next_checkpoint_check:
            self._next_checkpoint_check = time.monotonic() + SAVE_SECONDS
            self.program.record_save(self.attempt, self.command)

    def record_final_reports(self) -> None:
        self._next_row = 0.0
        super().record_final_reports()

    def _print_progress(self) -> None:
        """Print the progress of the script into the log of the job, at epoch ends and from time to time in between."""
        training = self.program
        row = next((row for row in reversed(training.training.read_newest_metrics()) if row["kind"] == "step"), None)
        age = time.monotonic() - self._began
        if row is None or (age < self._next_print and (row["epoch"] is None or row["epoch"] < self._next_epoch)):
            return
        self._next_print = age + words.compute_seconds_to_next_progress_line(age)
        self._next_epoch = math.floor(row["epoch"] or 0) + 1
        progress_text = words.describe_progress(
            epoch=row["epoch"], all_epochs=None, samples=row["samples"], batch=training.task.batch, loss=row["loss"],
            step_time=row["step_time"], remaining=row["eta"],
        )  # fmt: skip
        with open_file_to_append(self.run.get_log_path(self.task.id, self.command.attempt)) as log:
            log.write(f"{words.add_timestamp(progress_text)}\n".encode())

    @cached_property
    def _level_detector(self) -> "ScriptLevelDetector":
        from tula_cli.models.time.changes import ScriptLevelDetector

        return ScriptLevelDetector()

    def undo_file_changes(self) -> str:
        return ""

    # --- The end of the allocation

    @property
    def can_save(self) -> bool:
        return self.program.script.save != "none"

    def write_allocation_end(self, ends_at: float) -> None:
        self.attempt.write_allocation_end(ends_at)

    def read_allocation_end(self) -> float | None:
        return self.attempt.read_end_time()

    def request_checkpoint(self) -> None:
        """Ask these ranks for a checkpoint in the way that script.save names; only the leader does so by a file or hook."""
        save_method = self.program.script.save
        if save_method in SAVE_SIGNALS:
            for pid in self._find_rank_processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, SAVE_SIGNALS[save_method])
        elif self.leads and save_method == "hooks":
            self.attempt.write_save_request()
        elif self.leads:
            path = Path(self.task.workdir) / fill_text(
                save_method.removeprefix("file:"), self.program.placeholder_values
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def _find_rank_processes(self) -> list[int]:
        """Return the processes of these ranks: those of this attempt whose inner process id is that of a heartbeat."""
        hearts = {heartbeat.pid for rank in self.ranks if (heartbeat := self.attempt.read_heartbeat(rank)) is not None}
        plan = str(self.attempt.plan_path)
        return [
            pid
            for pid, value in find_processes_with_variable("TULA_PLAN").items()
            if value == plan and find_innermost_pid(pid) in hearts
        ]

    def has_saved_since(self, *, since: float) -> bool:
        """Return whether a checkpoint was written after `since` (Unix time) and is no longer being written."""
        checkpoint = self.program.find_resume_checkpoint()
        return checkpoint is not None and is_settled_since(checkpoint, since)

    # --- Failures

    def find_reason_to_kill(self) -> Failure | None:
        """Return why the ranks must be killed: also if their first steps contradict the settings, or are late."""
        return self._first_step_failure or super().find_reason_to_kill() or self._check_first_step_timeout()

    def _check_first_step_timeout(self) -> Failure | None:
        """Return the failure of a training of which no rank has finished its first step within the limit, or None."""
        if time.monotonic() - self._began <= self._first_step_timeout:
            return None
        if any(self.attempt.read_heartbeat(rank) is not None for rank in range(self.command.ranks)):
            return None
        if any(failure.where == "shim" for failure in self.attempt.read_failures()):
            return None  # the script runs unwatched
        minutes = f"{self._first_step_timeout / 60:.3g} min"
        limit = f"{minutes} (search.max_minutes, or 20 times the start-up time of a probe)"
        message = f"stopped, because the first step was not done after {limit}: {describe_missing_step(self.log)}"
        return Failure(outcome="user", message=message, rank=self.ranks.start, host=get_node_name())

    @cached_property
    def _first_step_timeout(self) -> float:
        """Seconds in which a training must take its first step."""
        starts = [probe.overheads.startup for probe in self.run.read_measurements()]
        return max(60 * self.task.spec.search.max_minutes, FIRST_STEP_STARTS * max(starts, default=0.0))


# --- The training

SHORT_TOLERANCE = 0.05
"""Fraction of the requested samples by which a training may differ without a warning (e.g. dropped last batches)."""
MAX_SAVES_REMEMBERED = 50
"""Maximum number of checkpoints for which the trained steps are recorded."""


@dataclass(frozen=True)
class ScriptTraining(ScriptProgram):
    """A training of a script, run by the leader of its supervisors."""

    task: TrainTask
    _first_steps: list[RankResult] = field(default_factory=list, compare=False)
    _gaps: dict[int, dict[str, Any]] = field(default_factory=dict, compare=False)
    """Rows of the steps of the current attempt that included an evaluation, a save or a new epoch, by step."""

    @property
    def training(self) -> TrainingRun:
        return self.run.get_training(self.task.signature)

    # --- Starts of the script

    def make_leader_command(self, *, attempt: int, rendezvous: str) -> LeaderCommand:
        command = super().make_leader_command(attempt=attempt, rendezvous=rendezvous)
        update = {"batch": self.task.batch, "checkpoint": str(self.find_resume_checkpoint() or "")}
        return command.model_copy(update=update)

    def make_monitor(self, allocation: Allocation, command: LeaderCommand) -> TrainingMonitor:
        return TrainingMonitor(self, command, self.list_ranks(allocation), leads=allocation.is_leader)

    def get_output_folder(self, command: LeaderCommand) -> Path:
        return self.output_folder

    def list_watched_folders(self, command: LeaderCommand) -> None:
        return None

    @property
    def extra_probe_variables(self) -> Mapping[str, str]:
        return {}

    def count_steps_per_epoch(self, batch: int) -> int:
        """Return the steps of an epoch, if AGS refreshes its factors once per epoch.

        Raises:
            JobFailed: it does, and the number of samples is unknown.
        """
        if self.task.spec.ags.fill_from_preset().refresh != "epoch":
            return NEVER_REFRESH_STEPS
        if self.dataset_size is None:
            raise JobFailed(
                "ags.refresh is epoch, but the number of samples per epoch is unknown",
                "set script.dataset_size, or ags.refresh: {every: N} (optimizer steps)",
            )
        return max(1, self.dataset_size // batch)

    def preview_command(self) -> str:
        return self.preview_command_at_batch(self.task.batch)

    # --- Resumption

    @property
    def output_folder(self) -> Path:
        """The script's output folder; a new one if the batch has changed and the script cannot resume with another."""
        first_batch = next((task.batch for task in self.training.read_tasks()), self.task.batch)
        anew = self.task.batch != first_batch and not self._can_resume_at_any_batch
        return (self.training.path / (f"out-{self.task.batch}" if anew else "out")).absolute()

    @property
    def resume_settings(self) -> Resume | None:
        """The settings with which the script resumes: those of the spec, else those observed when it resumed by itself; or None."""
        configured, pattern = self.script.resume, self.training.read_script_saves().resumes_from
        return Resume(checkpoint=pattern, batch="same") if configured is None and pattern else configured

    @property
    def _can_resume_at_any_batch(self) -> bool:
        return self.allowed_resume_batch in ("epoch", "any")

    @cached_property
    def allowed_resume_batch(self) -> Verdict:
        """The batch with which the script may resume from a checkpoint: that of the spec, or the result of a resume test.

        It is "none" if a resume test found the checkpoint unusable, and "same" if the spec asks for a resume test and
        there was none.
        """
        resume, code = self.resume_settings, self.run.read_code(self.task.code)
        if resume is None:
            return "none"
        key = compute_resume_test_signature(self.task.spec, code.digest if code is not None else "")
        resume_test = ResumeTestRecords(self.run.path).find_newest_verdict(key)
        if resume_test is not None and resume_test.verdict == "none":
            return "none"
        if resume.batch != "rehearse":
            return resume.batch
        return "same" if resume_test is None or resume_test.verdict is None else resume_test.verdict

    @property
    def placeholder_values(self) -> dict[str, str | float]:
        """The values of the placeholders in paths."""
        return self.list_path_values(self.output_folder, batch=self.task.batch, nodes=self.task.nodes)

    def find_resume_checkpoint(self) -> Path | None:
        """Return the checkpoint to resume from; None if the training starts anew."""
        return self._find_resumable_checkpoint()[0]

    def _find_resumable_checkpoint(self) -> tuple[Path | None, list[Path]]:
        """Return the checkpoint to resume from, and the newer ones that are skipped because they are damaged."""
        resume, attempts = self.resume_settings, self.training.read_attempts()
        if not self._can_resume_at_any_batch:
            tasks_of_same_batch = {task.id for task in self.training.read_tasks() if task.batch == self.task.batch}
            attempts = [attempt for attempt in attempts if attempt.task in tasks_of_same_batch]
        if resume is None or self.allowed_resume_batch == "none" or not attempts:
            return None, []
        began = min(attempt.started_at for attempt in attempts)
        useless = self.training.read_script_saves().left_out
        left_out = ("", 0.0) if useless is None else (useless.checkpoint, useless.saved_at)
        return find_newest_checkpoint(
            resume, self.placeholder_values, workdir=Path(self.task.workdir), since=began, left_out=left_out
        )

    # --- Progress

    @property
    def dataset_size(self) -> int | None:
        """Samples per epoch: as in the spec, else as seen by probes or first steps of the training; or None."""
        known_size = self.script.known_dataset_size or self._measured_dataset_size
        if known_size is None and self._first_rank_results:
            return claims.find_dataset_size(self._first_rank_results)
        return known_size

    @cached_property
    def _measured_dataset_size(self) -> int | None:
        return self.run.read_snapshot().measured_dataset_size

    @property
    def _first_rank_results(self) -> Sequence[RankResult]:
        """Results of the first steps of the first start at this batch, on the whole dataset; empty until complete."""
        if not self._first_steps and (attempts := self.run.read_attempts(self.task.id)):
            first_results = ScriptAttempt(self.run.path, self.task.id, attempts[0].number).read_first_results()
            if first_results and len(first_results) >= first_results[0].world:
                self._first_steps.extend(first_results)
        return self._first_steps

    @property
    def epoch_samples(self) -> int | None:
        """Samples trained per epoch: the dataset, less samples that the loader drops, plus those that it repeats."""
        size, observed = self.dataset_size, claims.count_epoch_samples(self._first_rank_results)
        by_loader = claims.find_dataset_size(self._first_rank_results) if self._first_rank_results else None
        if self.script.length.epochs is None or observed is None or by_loader != size:
            return size  # a loader of a part of the dataset does not show the length of an epoch
        return observed

    @property
    def total_samples(self) -> int | None:
        """Samples of the whole training; None if unknown."""
        size = self.epoch_samples
        return None if size is None else count_script_samples(self.script, size)

    def make_summary_fields(self, attempts: Sequence[Attempt], seconds: float) -> dict[str, Any]:
        """Return the breakdown of the seconds, the samples lost at failed starts, and the warnings."""
        messages = (row["message"] for row in self.training.read_metrics() if row["kind"] == "warning")
        return {
            "actual_parts": self.measure_time_parts(attempts, seconds),
            "lost": self.training.read_script_saves().lost,
            "warnings": tuple(dict.fromkeys(messages)),
        }

    def measure_time_parts(self, attempts: Sequence[Attempt], seconds: float) -> TimeParts | None:
        """Return the breakdown of the seconds of the training, from the rows of rank 0; None if there are none.

        Evaluation comprises everything between steps that a script does in addition: evaluations, checkpoints, new epochs.
        """
        stepping = between = 0.0
        for attempt in attempts:
            script_attempt = ScriptAttempt(self.run.path, attempt.task, attempt.number)
            rows = [row for row in script_attempt.read_rows(0) if row["kind"] in ("row", "gap")]
            heartbeat = script_attempt.read_heartbeat(0)
            if not rows or heartbeat is None:
                continue
            gaps = sum(max(0.0, row["seconds"] - heartbeat.seconds) for row in rows if row["kind"] == "gap")
            stepping += max(0.0, heartbeat.stepped_at - rows[0]["time"] - gaps)
            between += gaps + max(0.0, rows[-1]["time"] - heartbeat.stepped_at)  # the last row is written at the exit
        if not stepping:
            return None
        rest = max(0.0, seconds - stepping - between)
        return TimeParts(steps=stepping, data=None, evaluation=between, checkpoints=0.0, branches=0.0, rest=rest)

    def find_start_position(self, command: LeaderCommand) -> tuple[int, int]:
        """Return the samples and steps from which an attempt starts; 0 unless it resumes."""
        progress = self._progress
        # Without a given checkpoint, the script may have loaded one, as recorded at its first step.
        this_attempt = (command.task, command.attempt)
        resumes = command.checkpoint or self.training.read_script_saves().resumed_attempt == this_attempt
        return (progress.samples, progress.steps) if resumes and progress is not None else (0, 0)

    def detect_resume_by_script(self, attempt: ScriptAttempt, command: LeaderCommand) -> None:
        """Detect, at the first step of an attempt, that the script has loaded a checkpoint of an earlier attempt.

        The samples in the checkpoint are those that the earlier attempt had trained when it was written.
        """
        attempts = self.training.read_attempts()
        earlier = [other for other in attempts if (other.task, other.number) != (command.task, command.attempt)]
        if self.script.resume is not None or command.checkpoint or not earlier:
            return
        first_start = min(other.started_at for other in earlier)
        this_start = read_change_time(attempt.plan_path)
        loads = [row for row in attempt.read_loaded_files(0) if first_start <= row["written"] < this_start]
        if not loads:
            return
        newest = max(loads, key=lambda row: float(row["written"]))
        path, written = Path(newest["path"]), float(newest["written"])
        writer = max((other for other in earlier if other.started_at <= written), key=lambda other: other.started_at)
        steps, counted = find_position_at_time(ScriptAttempt(self.run.path, writer.task, writer.number), written)
        batch = self.task.batch
        samples = steps * batch if counted is None else round(counted * self.task.ranks)
        self.training.write_script_progress(
            ScriptProgress(samples=samples, steps=steps, batch=batch, checkpoint=str(path), saved_at=written)
        )
        pattern, saves = self._make_glob_for_siblings(path), self.training.read_script_saves()
        lost = (*saves.lost[:-1], *(max(0, value - samples) for value in saves.lost[-1:]))
        update = {"lost": lost, "resumes_from": pattern, "resumed_attempt": (command.task, command.attempt)}
        self.training.write_script_saves(saves.model_copy(update=update))
        message = (
            f"the script resumed by itself from {path.name}, so counting continues at {samples} samples;"
            f' to declare this in the job file, set script.resume: {{checkpoint: "{pattern}"}}'
        )
        self._add_warning(samples, message)

    def _make_glob_for_siblings(self, path: Path) -> str:
        """Return the pattern of checkpoints similar to this one, with * for its numbers."""
        folder = self.output_folder.resolve()
        if not path.is_relative_to(folder):
            return glob.escape(str(path)).replace("{", "{{").replace("}", "}}")
        name = glob.escape(str(path.relative_to(folder))).replace("{", "{{").replace("}", "}}")
        return "{out}/" + re.sub(r"\d+", "*", name)

    @property
    def _progress(self) -> ScriptProgress | None:
        """The newest recorded checkpoint, if the script may resume from it with this batch."""
        progress = self.training.read_script_progress()
        if progress is not None and (progress.batch == self.task.batch or self._can_resume_at_any_batch):
            return progress
        return None

    def record_start(self, command: LeaderCommand) -> None:
        """Record the start of an attempt, with warnings about its checkpoints."""
        if self.allowed_resume_batch == "none" and self.script.resume is not None:
            message = "according to the resume test, the script cannot resume from its own checkpoint, so it starts from the beginning after each interruption"
            self._add_warning(0, message)
        for message in self._describe_damaged_checkpoints():
            self._add_warning(self.find_start_position(command)[0], message)
        lr = compute_script_learning_rate(self.task.spec, self.task.batch)
        self._add_row(
            "start", self.find_start_position(command)[0], batch=self.task.batch, attempt=self.task.attempt, lr=lr
        )

    def _describe_damaged_checkpoints(self) -> Iterator[str]:
        """Yield a message for each damaged checkpoint that this start skips."""
        used, damaged = self._find_resumable_checkpoint()
        progress = self.training.read_script_progress()
        resumes = f"resumes from {used.name} and repeats all later samples" if used else "starts from the beginning"
        for path in damaged:
            is_known = progress is not None and progress.checkpoint == str(path)
            samples = f" ({progress.samples} samples)" if progress is not None and is_known else ""
            yield (f"the checkpoint {path.name}{samples} is damaged and was skipped: the training {resumes}")

    def log_progress(self, attempt: ScriptAttempt, command: LeaderCommand, *, after: int) -> int:
        """Write a row with the progress of an attempt if it has new steps; return its number of steps.

        Args:
            attempt: files that the shims of its ranks write.
            after: steps at the last row.
        """
        heartbeat = attempt.read_heartbeat(0)
        if heartbeat is None or heartbeat.step <= after:
            return after
        if after == 0:
            self._gaps.clear()
            self.detect_resume_by_script(attempt, command)
        for note in attempt.read_notes(0) if after == 0 else ():
            self._add_warning(self.find_start_position(command)[0], note)
        self._gaps.update({gap["step"]: gap for gap in attempt.read_gaps(0)})
        row = attempt.read_newest_row(0)
        samples, steps = self._find_reached_position(command, heartbeat.step, heartbeat.samples)
        batch = (heartbeat.step_samples or 0) * self.task.ranks or self.task.batch
        total = self.total_samples
        remaining = None if total is None else max(0, total - samples) / batch * heartbeat.seconds
        if remaining is not None and total is not None:
            remaining += self._estimate_remaining_gap_seconds(command, samples, total, heartbeat.seconds)
        self._add_row(
            "step",
            samples,
            step=steps,
            loss=row.get("loss"),
            lr=row.get("lr"),
            step_time=heartbeat.seconds,
            eta=remaining,
            **({"ags": row["ags"]} if "ags" in row else {}),
        )
        return heartbeat.step

    def _estimate_remaining_gap_seconds(
        self, command: LeaderCommand, samples: int, total: int, step_time: float
    ) -> float:
        """Return the seconds of the evaluations, saves and new epochs to come, if they are as frequent as in this attempt.

        A resumed attempt may start just before the end of an epoch, so its gaps count for at least one epoch. A script may
        evaluate after its first step, so the mean distance of gaps is at least the distance since the newest one.
        """
        if not self._gaps:
            return 0.0
        newest = self._gaps[max(self._gaps)]
        start, _ = self.find_start_position(command)
        reached, _ = self._find_reached_position(command, newest["step"] - 1, newest["before"])
        covered = max(
            1, reached - start, len(self._gaps) * (samples - reached), self.epoch_samples or 0 if start else 0
        )
        seconds = sum(max(0.0, float(gap["seconds"]) - step_time) for gap in self._gaps.values())
        return seconds / covered * max(0, total - reached)

    def warn_step_samples_change(self, attempt: ScriptAttempt, command: LeaderCommand, *, previous: float) -> float:
        """Warn if the number of samples per step has changed; return that of the newest steps.

        Args:
            attempt: files that the shims of its ranks write.
            previous: samples per step observed, or requested, so far.
        """
        heartbeat = attempt.read_heartbeat(0)
        if heartbeat is None or heartbeat.step_samples is None:
            return previous
        changed = claims.detect_batch_change(heartbeat.step_samples * self.task.ranks, before=previous)
        if changed is None:
            return previous
        samples, steps = self._find_reached_position(command, heartbeat.step, heartbeat.samples)
        message = (
            f"at step {steps}, a step trains on {changed:g} samples, but the command was given batch"
            f" {self.task.batch}, for which step time, cost and learning rate were predicted. Check whether the script"
            " accumulates more or increases its batch after its first steps."
        )
        self._add_warning(samples, message)
        return changed

    def record_step_time_change(
        self, pace: "ScriptLevelDetector", attempt: ScriptAttempt, command: LeaderCommand
    ) -> None:
        """Record a change of the step time."""
        from tula_cli.models.time.changes import make_step_change  # here: needs numpy

        heartbeat = attempt.read_heartbeat(0)
        if heartbeat is None or heartbeat.lost is not None:
            return
        samples, _ = self._find_reached_position(command, heartbeat.step, heartbeat.samples)
        level = pace.detect_level_change(
            heartbeat, attempt.read_gaps(0), samples=samples, epoch=self._convert_to_epochs(samples)
        )
        if level is None:
            return
        remaining_steps = None if self.total_samples is None else max(0, self.total_samples - samples) / self.task.batch
        change = make_step_change(
            level, self.task, lambda step_time: None if remaining_steps is None else remaining_steps * step_time
        )
        self._add_row("change", samples, change=change.model_dump(mode="json"))

    def record_save(
        self, attempt: ScriptAttempt, command: LeaderCommand, *, stable_seconds: float = UNCHANGED_SECONDS
    ) -> None:
        """Record the new checkpoints of an attempt, each with the steps and samples trained since the previous one.

        A script may have saved several times since the last call; only the newest checkpoint need still exist.

        Args:
            attempt: files that the shims of its ranks write.
            stable_seconds: seconds without a change after which a checkpoint counts as complete.
        """
        checkpoint = self.find_resume_checkpoint()
        saved_at = 0.0 if checkpoint is None else read_checkpoint_change_time(checkpoint)
        saves, heartbeat = self.training.read_script_saves(), attempt.read_heartbeat(0)
        began = read_change_time(attempt.plan_path)
        if stable_seconds and (heartbeat is None or heartbeat.stepped_at <= saved_at):
            return  # the row with the step of the save follows with the next step
        if not max([began, *(save.saved_at for save in saves.saves[-1:])]) < saved_at <= time.time() - stable_seconds:
            return
        assert checkpoint is not None
        previous_save = next((save.saved_at for save in saves.saves[-1:] if save.saved_at > began), None)
        samples, steps = self.find_start_position(command)
        if previous_save is not None:
            samples, steps = self._find_reached_position(command, *find_position_at_time(attempt, previous_save))
        end = self._find_reached_position(command, *find_position_at_time(attempt, saved_at))
        earlier = [
            (when, *self._find_reached_position(command, step, samples_here))
            for when, step, samples_here in list_earlier_saves(attempt, checkpoint, saved_at)
        ]
        new_saves: list[ScriptCheckpointSave] = []
        for when, samples_then, steps_then in [*(save for save in earlier if save[2] < end[1]), (saved_at, *end)]:
            if steps_then > steps:
                new_saves.append(
                    ScriptCheckpointSave(
                        saved_at=when,
                        batch=self.task.batch,
                        steps=steps_then - steps,
                        samples=samples_then - samples,
                        seconds=None if previous_save is None else when - previous_save,
                    )
                )
                previous_save, samples, steps = when, samples_then, steps_then
        if new_saves:
            update = {"saves": (*saves.saves, *new_saves)[-MAX_SAVES_REMEMBERED:]}
            self.training.write_script_saves(saves.model_copy(update=update))

    def _record_lost_samples(self, samples: int) -> None:
        """Record the samples lost by an attempt that reached `samples`: those after the newest checkpoint."""
        progress, saves = self._progress, self.training.read_script_saves()
        lost = max(0, samples - (0 if progress is None else progress.samples))
        self.training.write_script_saves(saves.model_copy(update={"lost": (*saves.lost, lost)}))

    def _find_reached_position(self, command: LeaderCommand, step: int, samples: float | None) -> tuple[int, int]:
        """Return total samples and steps; samples are those of all ranks, from the steps if rank 0 counts none."""
        samples_before, steps = self.find_start_position(command)
        samples_seen = step * self.task.batch if samples is None else round(samples * self.task.ranks)
        return samples_before + samples_seen, steps + step

    def _add_warning(self, samples: int, message: str) -> None:
        self._add_row("warning", samples, message=message)

    def _add_row(self, kind: str, samples: int, **values: Any) -> None:
        row = {
            "kind": kind,
            "time": time.time(),
            "samples": samples,
            "epoch": self._convert_to_epochs(samples),
            **remove_secrets(values),
        }
        append_json_line(self.training.metrics_path, row)

    def _convert_to_epochs(self, samples: int) -> float | None:
        """Return `samples` in epochs; None if the samples per epoch are unknown."""
        return samples / self.epoch_samples if self.epoch_samples else None

    def find_contradiction_in_first_steps(self, ranks: Sequence[RankResult], command: LeaderCommand) -> Failure | None:
        """Return why the reported first steps of an attempt contradict its settings; None if they do not."""
        violation = claims.describe_unmet_expectations(ranks, resumed=bool(command.checkpoint))
        return Failure(outcome="user", message=violation, permanent=True) if violation else None

    # --- The end of an attempt

    def count_samples_reached(self, command: LeaderCommand, attempt: Attempt) -> int | None:
        heartbeat = self.get_attempt(command).read_heartbeat(0)
        return None if heartbeat is None else self._find_reached_position(command, heartbeat.step, heartbeat.samples)[0]

    def record_results(self, command: LeaderCommand, failure: Failure | None) -> Failure | None:
        """Record the checkpoint of an attempt, and the result of a successful one; return why it failed in the end."""
        attempt = self.get_attempt(command)
        heartbeat = attempt.read_heartbeat(0)
        step, counted = (heartbeat.step, heartbeat.samples) if heartbeat is not None else (0, None)
        samples, steps = self._find_reached_position(command, step, counted)
        log = self.run.get_log_path(self.task.id, command.attempt)
        if failure is None and heartbeat is None and not command.checkpoint:
            return Failure(outcome="user", message=f"the command exited with code 0, but {describe_missing_step(log)}")
        broken = self.find_contradiction_in_first_steps(attempt.read_results(), command) if failure is None else None
        if broken is not None:
            return broken
        if failure is not None and failure.outcome == "user" and heartbeat is None:
            retried = self._use_older_checkpoint_after_failure(attempt, command, failure)
            if retried is not None:
                return retried
        self.record_save(attempt, command, stable_seconds=0.0)
        self._record_newest_checkpoint(attempt, command)
        if failure is not None:
            self._record_lost_samples(samples)
        else:
            self._warn_if_too_short(samples)
            self._write_result(samples, steps, None if heartbeat is None else heartbeat.seconds)
        return failure

    def _use_older_checkpoint_after_failure(
        self, attempt: ScriptAttempt, command: LeaderCommand, failure: Failure
    ) -> Failure | None:
        """Exclude a checkpoint from which the script failed before its first step; return the failure to start again.

        None if the checkpoint is not the cause, or there is no older one. If the older one fails too, the script is the
        cause, and the newest checkpoint is used again.
        """
        saves, progress = self.training.read_script_saves(), self._progress
        failed = any(reported.where == "script" and reported.step == 0 for reported in attempt.read_failures())
        if not failed or progress is None or progress.checkpoint != command.checkpoint:
            return None
        if saves.left_out is not None and saves.left_out.saved_at > progress.saved_at:
            self.training.write_script_progress(saves.left_out)
            self.training.write_script_saves(saves.model_copy(update={"left_out": None}))
            return None
        self.training.write_script_saves(saves.model_copy(update={"left_out": progress}))
        if (older := self.find_resume_checkpoint()) is None:
            self.training.write_script_saves(saves)
            return None
        self._use_older_checkpoint(progress, older)
        message = f"{failure.description}; skipped {Path(progress.checkpoint).name}; trying the previous checkpoint {older.name}"
        self._add_warning(progress.samples, message)
        return Failure(outcome="unknown", message=message, rank=failure.rank, host=failure.host)

    def _use_older_checkpoint(self, progress: ScriptProgress, older: Path) -> None:
        """Record an older checkpoint to resume from; its samples are those of the newest, less the saves since."""
        saved_at, saves = read_checkpoint_change_time(older), self.training.read_script_saves()
        since = [save for save in saves.saves if saved_at < save.saved_at <= progress.saved_at]
        samples = max(0, progress.samples - sum(save.samples for save in since))
        steps = max(0, progress.steps - sum(save.steps for save in since))
        progress_fields = {"samples": samples, "steps": steps, "checkpoint": str(older), "saved_at": saved_at}
        self.training.write_script_progress(progress.model_copy(update=progress_fields))
        lost = (*saves.lost, progress.samples - samples)
        self.training.write_script_saves(saves.model_copy(update={"lost": lost}))

    def recover_lost_attempt(self, lost: Attempt) -> None:
        """Record the checkpoint of an attempt of this task whose supervisor was lost before doing so."""
        progress = self._progress
        command = LeaderCommand(
            task=lost.task, attempt=lost.number, checkpoint=progress.checkpoint if progress is not None else ""
        )
        attempt = ScriptAttempt(self.run.path, lost.task, lost.number)
        heartbeat = attempt.read_heartbeat(0)
        self.record_save(attempt, command, stable_seconds=0.0)
        step, counted = (0, 0.0) if heartbeat is None else (heartbeat.step, heartbeat.samples)
        samples, _ = self._find_reached_position(command, step, counted)
        self._record_newest_checkpoint(attempt, command)
        self._record_lost_samples(samples)

    def _record_newest_checkpoint(self, attempt: ScriptAttempt, command: LeaderCommand) -> None:
        """Record the newest checkpoint, with the samples and steps trained when it was written."""
        checkpoint = self.find_resume_checkpoint()
        if checkpoint is None:
            return
        saved_at = read_checkpoint_change_time(checkpoint)
        if str(checkpoint) == command.checkpoint and saved_at < read_change_time(attempt.plan_path):
            return
        samples, steps = self._find_reached_position(command, *find_position_at_time(attempt, saved_at))
        progress = ScriptProgress(
            samples=samples, steps=steps, batch=self.task.batch, checkpoint=str(checkpoint), saved_at=saved_at
        )
        self.training.write_script_progress(progress)

    def _warn_if_too_short(self, samples: int) -> None:
        total = self.total_samples
        if total is not None and abs(samples - total) > max(SHORT_TOLERANCE * total, self.task.batch):
            check = (
                "check that its command contains {epochs}, {steps} or {samples}, and that script.dataset_size is right"
                if samples < total
                else "check whether the script counts samples from the beginning when it resumes from its checkpoint"
            )
            self._add_warning(samples, f"the script ended after {samples} samples instead of {total}: {check}")

    def _write_result(self, samples: int, steps: int, seconds: float | None) -> None:
        script, task = self.script, self.task
        attempts = self.training.read_attempts()
        logs = [self.run.get_log_path(attempt.task, attempt.number) for attempt in attempts]
        rows = read_metrics(script, logs)
        for name, values in rows.items():
            if not values:
                self._add_warning(samples, f"script.metric {name} does not occur in the output of the script")
            elif not math.isfinite(values[-1]):
                message = (
                    f"the last value of script.metric {name} is {values[-1]:g}: the training has probably diverged"
                )
                self._add_warning(samples, message)
        metrics = find_last_and_best(rows)
        self.run.write_train_result(
            TrainResult(
                signature=task.signature,
                nodes=task.nodes,
                batch=task.batch,
                samples=samples,
                steps=steps,
                epochs=script.length.epochs or 0,
                metrics=metrics,
                best_top1=metrics.get("best_top1"),
                best_epoch=0,
                step_time=seconds or None,
                finished_at=time.time(),
                scaled=summarize_scaling(
                    ScriptAttempt(self.run.path, other_attempt.task, other_attempt.number).read_newest_row(0)
                    for other_attempt in attempts
                ),
            )
        )

    def list_micro_batch_splits(self) -> MicroBatches:
        """Return the possible splits of the micro-batch for each batch of the OOM fallbacks (`task.ladder`).

        If no rank has reported whether the model has BatchNorm (it was killed), BatchNorm per rank is assumed.
        """
        run, task = self.run, self.task
        attempts = run.read_attempts(task.id)
        number = attempts[-1].number if attempts else 1
        batch_norms = [failure.batch_norm for failure in ScriptAttempt(run.path, task.id, number).read_failures()]
        norms = {norm for norm in batch_norms if norm is not None} or {"batch"}
        world, micro_batches = task.ranks, task.spec.train.accumulate
        micro_batches_per_statistic = [1] * ("batch" in norms) or [world] * ("sync" in norms)
        limits = [make_batch_norm_limit(ranks=ranks) for ranks in micro_batches_per_statistic]

        def make_splits(batch: int) -> Splits:
            micro_batch = batch // world // micro_batches
            fewest = refresh.compute_max_samples_drawn(task.spec, batch, available=micro_batch, world=world)
            ags_limit = (
                lambda samples: samples >= fewest,
                f"AGS needs a small batch of {fewest} samples from each micro-batch",
            )
            return list_splits(batch, micro_batch=micro_batch, micro_batches=micro_batches, limits=[ags_limit, *limits])

        splits = tuple(make_splits(fallback.batch) for fallback in task.ladder)
        return MicroBatches(
            splits=splits,
            normalised=micro_batches_per_statistic[0] if micro_batches_per_statistic and batch_norms else 0,
        )
