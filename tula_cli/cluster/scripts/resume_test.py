"""The resume test of a script: the next start, the observations of each start, and the verdict from all of them."""

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tula_cli.cluster.allocation import Allocation
from tula_cli.cluster.decisions import ALLOCATION_ENDED
from tula_cli.cluster.scripts import checkpoints
from tula_cli.cluster.scripts.start import ScriptProgram
from tula_cli.cluster.scripts.watch import ScriptMonitor, find_last_script_line
from tula_cli.errors import JobFailed
from tula_cli.models.resuming import judge_resume_test
from tula_cli.run.directory import RunDir
from tula_cli.run.records.base import OutcomeClass
from tula_cli.run.records.failures import Failure
from tula_cli.run.records.jobs import LeaderCommand
from tula_cli.run.records.scripts import KillPlan, ObservedStart, Phase, PlannedStart, ResumeTestResult, Schedule
from tula_cli.run.records.tasks import ResumeTestTask, Task
from tula_cli.run.script_attempt import ResumeTestRecords, ScriptAttempt
from tula_cli.spec.job import JobSpec, compute_lr_scale
from tula_cli.spec.scripts.placeholders import find_placeholders
from tula_cli.spec.scripts.script import Length, count_requested_samples, count_script_samples

# --- Rows and tracebacks of a start

MAX_RATES = 400
"""Maximum points of a stored learning-rate curve."""
WEIGHTS_ONLY = "weights_only"
WEIGHTS_ONLY_HINT = "the checkpoint contains more than weights: call torch.load with weights_only=False"


def count_trained_steps(rows: Sequence[Mapping[str, Any]], local_batch: int) -> tuple[int, int]:
    """Return steps and samples of one rank from one row per step; a step trains at most its local batch.

    Further samples delivered by the loader were skipped or prefetched: up to one local batch counts for the next step.
    """
    steps = samples = delivered = prefetched = 0
    for row in rows:
        if row["step"] == steps:
            continue  # the last step may have two rows
        if row["step"] < steps:
            samples = delivered = prefetched = 0  # counted anew, because another optimizer now counts the steps
        steps = row["step"]
        if row["samples"] is None:
            samples += local_batch
            continue
        available = prefetched + int(row["samples"]) - delivered  # to this step
        delivered = int(row["samples"])
        samples += min(available, local_batch)
        prefetched = min(max(0, available - local_batch), local_batch)
    return steps, samples


def find_learning_rates(rows: Sequence[Mapping[str, Any]], saved: int) -> dict[str, float | None]:
    """Return the learning rate of the step after the checkpoint, and its change over two steps."""
    after = [row["lr"] for row in rows if row["step"] > saved and row.get("lr") is not None]
    upto = [row["lr"] for row in rows if row["step"] <= saved and row.get("lr") is not None]
    rates = after or upto[-1:]
    return {
        "next_lr": rates[0] if rates else None,
        "lr_step": abs(rates[min(2, len(rates) - 1)] - rates[0]) if rates else 0.0,
    }


def read_learning_rate_curve(rows: Sequence[Mapping[str, Any]], batch: int) -> tuple[tuple[int, float], ...]:
    """Return samples and learning rate per step, evenly thinned to about MAX_RATES points with first and last step."""
    lr_by_step = {row["step"]: row["lr"] for row in rows if row.get("lr") is not None}
    points = [(step * batch, lr) for step, lr in sorted(lr_by_step.items())]
    stride = max(1, -(-len(points) // MAX_RATES))
    return tuple(points[::stride] + points[-1:] * ((len(points) - 1) % stride > 0))


def find_observed_schedule(rows: Sequence[Mapping[str, Any]], *, after: int) -> Schedule | None:
    """Return the learning-rate scheduler in the rows, with its position in the first step after `after` steps.

    None without a scheduler, or with too few steps to see how it counts.
    """
    points = [(row["step"], row["schedule"]) for row in rows if row.get("schedule")]
    if not points or points[-1][0] - points[0][0] < 2:
        return None
    counted = (points[-1][1]["at"] - points[0][1]["at"]) / (points[-1][0] - points[0][0])
    _, scheduler = next((row for row in points if row[0] > after), points[-1])
    return Schedule(
        name=scheduler["name"].rpartition(".")[2], at=scheduler["at"], per_step=counted > 0.5, moves=scheduler["moves"]
    )


def find_error_line(text: str, error: str) -> str:
    """Return the exception and message at the end of a traceback, in one line.

    For a checkpoint that torch.load refuses (weights_only), the line has the refused class and a hint.

    Args:
        text: the traceback.
        error: full name of the exception's class.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [error]
    last_error_line = next((line for line in reversed(lines) if line.startswith(f"{error}:")), lines[-1])
    if WEIGHTS_ONLY not in text or "Unpickl" not in error:
        return last_error_line
    cause_line = next((line for line in lines if "Unsupported global" in line), last_error_line)
    return f"{error}: {cause_line.removeprefix('WeightsUnpickler error: ').partition('. Please use')[0]} ({WEIGHTS_ONLY_HINT})"


# --- The test

EPOCHS = 3
"""Maximum epochs of a resume test: one up to the checkpoint, and another epoch boundary after it."""
STEPS_BEFORE_KILL = 24
"""Step at which a script is asked for a checkpoint, if it can be; late enough for half of the steps to be many."""
STEPS_AFTER_SAVE = 5
"""Steps between checkpoint and kill of the first start; their learning rates are compared with resumed ones."""
TIME_SHARES: Mapping[Phase, float] = {"begin": 0.6, "same": 0.5, "more": 0.5, "half": 1.0}
"""Fraction of the remaining time that a start may take."""
MIN_START_SECONDS = 5.0
ENDLESS_RATIO = 2.0
"""A start that trains more than this multiple of the remaining samples is stopped."""
RETRIED_OUTCOMES: tuple[OutcomeClass, ...] = ("port", *ALLOCATION_ENDED)
"""Outcomes unrelated to the script, after which the same start is repeated if there is time."""


class ResumeTest(ScriptProgram):
    """A resume test of a script, run by the leader of its supervisors."""

    task: ResumeTestTask
    records_steps = True

    # --- Starts of the script

    def make_leader_command(self, *, attempt: int, rendezvous: str) -> LeaderCommand:
        command, start = super().make_leader_command(attempt=attempt, rendezvous=rendezvous), self.find_next_start()
        ranks = start.nodes * self.task.spec.cluster.gpus_per_node
        update = {"ranks": ranks, "batch": start.batch, "checkpoint": start.checkpoint, "rehearsal": start}
        return command.model_copy(update=update)

    def make_monitor(self, allocation: Allocation, command: LeaderCommand) -> ScriptMonitor:
        return ScriptMonitor(self, command, self.list_ranks(allocation))

    def get_output_folder(self, command: LeaderCommand) -> Path:
        return Path(_get_start(command).out)

    def make_spec(self, command: LeaderCommand) -> JobSpec:
        script = self.script.model_copy(update={"length": _get_start(command).length})
        return self.task.spec.model_copy(update={"script": script})

    # --- Records

    @property
    def records(self) -> ResumeTestRecords:
        return ResumeTestRecords(self.run.path)

    @property
    def record(self) -> ResumeTestResult:
        """The record of the test so far."""
        return self.records.read_result(self.task.id) or ResumeTestResult(
            task=self.task.id, key=self.task.key, began_at=time.time()
        )

    # --- The next start

    def find_next_start(self) -> PlannedStart:
        """Return the next start of an unfinished test; its time limit runs from the first call."""
        record = self.record
        self.records.write_result(record)
        start = self._plan_next_start(record, max(self._compute_remaining_seconds(record), MIN_START_SECONDS))
        assert start is not None, "it has ended"
        return start

    def _compute_remaining_seconds(self, record: ResumeTestResult) -> float:
        return 60 * self.task.spec.search.max_minutes - (time.time() - record.began_at)

    def _plan_next_start(self, record: ResumeTestResult, remaining: float) -> PlannedStart | None:
        """Return the next start with `remaining` seconds left; None if there is none."""
        begins = [start for start in record.starts if start.phase == "begin"]
        if not begins:
            return self._plan_initial_start(record, self._choose_first_length(), self.task.batch, remaining)
        if remaining < MIN_START_SECONDS:
            return None
        last_start = record.starts[-1]
        if last_start.phase == "begin":
            if (retry := self._choose_another_first_start(begins, remaining)) is not None:
                return self._plan_initial_start(record, *retry, remaining)
            if not _has_usable_checkpoint(last_start):
                return None
            return self._plan_resuming_start("same", last_start, last_start.batch, remaining)
        same = next((start for start in record.starts if start.phase == "same"), last_start)
        if same.ended != "ended" or not same.steps or last_start.phase == "half":
            return None
        if self.task.nodes > 1 and last_start.phase == "same" and self._is_divisible(same.batch, self.task.nodes):
            return self._plan_resuming_start("more", begins[-1], same.batch, remaining)
        if same.batch % 2 or not self._is_divisible(same.batch // 2, self.task.first_nodes):
            return None
        return self._plan_resuming_start("half", begins[-1], same.batch // 2, remaining)

    def _is_divisible(self, batch: int, nodes: int) -> bool:
        return batch % (nodes * self.task.spec.cluster.gpus_per_node * self.task.spec.train.accumulate) == 0

    def _plan_initial_start(
        self, record: ResumeTestResult, length: Length, batch: int, remaining: float
    ) -> PlannedStart:
        out = self.records.get_script_folder(self.task.id) / f"begin-{len(record.starts) + 1}"
        seconds = max(MIN_START_SECONDS, TIME_SHARES["begin"] * remaining)
        return PlannedStart(
            phase="begin", nodes=self.task.first_nodes, batch=batch, length=length, out=str(out), seconds=seconds
        )

    def _plan_resuming_start(
        self, phase: Phase, begin: ObservedStart, batch: int, remaining: float
    ) -> PlannedStart | None:
        """Return a start that resumes from the phase's copy of the checkpoint; None if there is no checkpoint."""
        out = self.records.get_script_folder(self.task.id) / phase
        start = PlannedStart(
            phase=phase,
            nodes=self.task.nodes if phase == "more" else self.task.first_nodes,
            batch=batch,
            length=begin.length,
            out=str(out),
            seconds=max(MIN_START_SECONDS, TIME_SHARES[phase] * remaining),
        )
        resume = self.script.resume
        assert resume is not None
        values, workdir = self.list_path_values(out, batch=batch, nodes=start.nodes), Path(self.task.workdir)
        checkpoint, _ = checkpoints.find_newest_checkpoint(resume, values, workdir=workdir, since=0.0)
        return None if checkpoint is None else start.model_copy(update={"checkpoint": str(checkpoint)})

    def _choose_first_length(self) -> Length:
        """Return the length of the first start: shortened if the command takes a length and saves early."""
        script = self.script
        if not self._has_length_placeholder:
            return script.length
        if script.length.epochs is not None:
            return Length(epochs=min(EPOCHS, script.length.epochs))
        if script.save == "none":
            return script.length
        return Length(samples=min(count_requested_samples(script) or 0, 3 * STEPS_BEFORE_KILL * self.task.batch))

    @property
    def _has_length_placeholder(self) -> bool:
        return bool({"epochs", "steps", "samples"} & set(find_placeholders(self.script.command)))

    def _choose_another_first_start(
        self, begins: Sequence[ObservedStart], remaining: float
    ) -> tuple[Length, int] | None:
        """Return length and batch of another first start (shorter, longer, or with less memory), or None."""
        last_begin, full_length = begins[-1], self.script.length
        if last_begin.ended == "failed":
            half = last_begin.batch // 2
            fits = last_begin.outcome == "device_oom" and half > 0 and self._is_divisible(half, self.task.first_nodes)
            return (last_begin.length, half) if fits else None
        if last_begin.ended == "ended" and not _has_usable_checkpoint(last_begin) and last_begin.length != full_length:
            return full_length, last_begin.batch
        fitted = self._choose_shorter_length(last_begin)
        affordable = last_begin.seconds * 2.5 < remaining
        return (fitted, last_begin.batch) if fitted is not None and len(begins) == 1 and affordable else None

    def _choose_shorter_length(self, begin: ObservedStart) -> Length | None:
        """Return 1.5 times the length up to the first checkpoint if the whole is more than twice as long, or None."""
        saved = begin.saved_samples
        if not (self._has_length_placeholder and saved and begin.length.epochs is None and begin.whole):
            return None
        return Length(samples=math.ceil(1.5 * saved)) if begin.whole > 2 * saved else None

    def make_kill_plan(self, command: LeaderCommand) -> KillPlan | None:
        """Return how the shim kills a first start after its checkpoint; None for starts that resume."""
        start, script = _get_start(command), self.script
        if start.phase != "begin" or script.resume is None:
            return None
        return checkpoints.make_kill_plan(
            script,
            self.list_path_values(Path(start.out), batch=start.batch, nodes=start.nodes),
            workdir=Path(self.task.workdir),
            after=STEPS_AFTER_SAVE,
            ask_at=STEPS_BEFORE_KILL,
        )

    # --- Observations of a start

    def record_results(self, command: LeaderCommand, failure: Failure | None) -> Failure | None:
        """Record the observations of a start, and the verdict after the last one.

        Returns:
            Why the start failed; None if it went as planned.
        """
        record, start = self.record, _get_start(command)
        has_time = not record.starts or self._compute_remaining_seconds(record) > MIN_START_SECONDS
        is_retried = failure is not None and failure.outcome in RETRIED_OUTCOMES and has_time
        if is_retried or self.run.is_cancelled(self.task.job):
            return failure
        outcome = self._observe_start(start, command, failure)
        record = record.model_copy(update={"starts": (*record.starts, outcome)})
        self._copy_checkpoints(start, outcome)
        if self._plan_next_start(record, self._compute_remaining_seconds(record)) is None:
            record = self._add_verdict(record)
        self.records.write_result(record)
        return failure if outcome.ended == "failed" else None

    def _observe_start(self, start: PlannedStart, command: LeaderCommand, failure: Failure | None) -> ObservedStart:
        attempt, world = self.get_attempt(command), command.ranks
        killed, rows = attempt.read_kill(), [row for row in attempt.read_rows(0) if row["kind"] == "row"]
        if start.phase != "begin":
            size = self.record.starts[-1].dataset_size
        elif self.script.dataset_size != "auto":
            size = self.script.dataset_size
        else:
            size = (killed and killed.dataset) or self.run.read_snapshot().measured_dataset_size
        steps, samples = count_trained_steps(rows, start.batch // world)
        observation = ObservedStart(
            phase=start.phase, nodes=start.nodes, batch=start.batch, length=start.length, whole=_count_samples_of_length(self.task, start.length, size),
            ended="ended", seconds=time.time() - attempt.plan_path.stat().st_mtime, steps=steps, samples=samples * world,
            first_lr=rows[0].get("lr") if rows else None, dataset_size=size,
            rates=read_learning_rate_curve(rows, start.batch),
            schedule=find_observed_schedule(rows, after=killed.steps if killed is not None else 0),
        )  # fmt: skip
        if killed is not None and start.phase == "begin":
            rows_before = [row for row in rows if row["step"] <= killed.steps]
            saved = count_trained_steps(rows_before, start.batch // world)[1] * world
            observation = observation.model_copy(
                update={"saved_steps": killed.steps, "saved_samples": saved, **find_learning_rates(rows, killed.steps)}
            )
        ending = _make_outcome_fields(attempt, failure, killed=killed is not None and killed.killed)
        if not steps and "why" not in ending:
            ending["why"] = find_last_script_line(self.run.get_log_path(self.task.id, command.attempt))
        return observation.model_copy(update=ending)

    def _copy_checkpoints(self, start: PlannedStart, observation: ObservedStart) -> None:
        """Give each of the resuming starts a folder: that of the killed start, and copies of it."""
        if start.phase != "begin" or not _has_usable_checkpoint(observation):
            return
        folder = self.records.get_script_folder(self.task.id)
        for phase in ("same", "more", "half"):
            shutil.rmtree(folder / phase, ignore_errors=True)
        for phase in ("more", "half") if self.task.nodes > 1 else ("half",):
            shutil.copytree(start.out, folder / phase, ignore_dangling_symlinks=True)
        Path(start.out).rename(folder / "same")

    def _add_verdict(self, record: ResumeTestResult) -> ResumeTestResult:
        """Return the record with its verdict, and remove the files of the script."""
        shutil.rmtree(self.records.get_script_folder(self.task.id), ignore_errors=True)
        begin = next(start for start in reversed(record.starts) if start.phase == "begin")
        lr_placeholders = {"lr", "lr_factor"} & self.script.placeholders
        spec, half = self.task.spec, begin.batch // 2
        ratio = compute_lr_scale(spec, half) / compute_lr_scale(spec, begin.batch) if lr_placeholders and half else None
        judgement = judge_resume_test(record.starts, lr_ratio=ratio)
        return record.model_copy(
            update={
                "verdict": judgement.verdict,
                "other_nodes": judgement.other_nodes,
                "told": judgement.reasons,
                "faults": judgement.faults,
                "over_at": time.time(),
            }
        )

    def find_reason_to_stop(self, command: LeaderCommand) -> Failure | None:
        """Return why a resuming start must be stopped: it trained more than twice the remaining samples; else None."""
        start = _get_start(command)
        if start.phase == "begin" or (heartbeat := self.get_attempt(command).read_heartbeat(0)) is None:
            return None
        begin = next(earlier_start for earlier_start in reversed(self.record.starts) if earlier_start.phase == "begin")
        if begin.whole is None:
            return None
        remaining = begin.whole - (begin.saved_samples or 0)
        if heartbeat.step * start.batch <= ENDLESS_RATIO * remaining + 4 * begin.batch:
            return None
        return Failure(outcome="cancelled", message="it trains more than twice the remaining samples")


def _get_start(command: LeaderCommand) -> PlannedStart:
    assert command.rehearsal is not None
    return command.rehearsal


def _has_usable_checkpoint(begin: ObservedStart) -> bool:
    """Return whether a start left a checkpoint with enough left to train after it."""
    if begin.saved_samples is None or begin.ended == "failed":
        return False
    return begin.ended != "ended" or begin.whole is None or begin.whole - begin.saved_samples > 2 * begin.batch


def _count_samples_of_length(task: ResumeTestTask, length: Length, size: int | None) -> int | None:
    script = task.spec.get_script().model_copy(update={"length": length})
    return count_requested_samples(script) if size is None else count_script_samples(script, size)


def _make_outcome_fields(attempt: ScriptAttempt, failure: Failure | None, *, killed: bool) -> dict[str, Any]:
    """Return the fields that record how an attempt of the script ended, with outcome and error line if it failed."""
    if killed:
        return {"ended": "killed"}
    if failure is None:
        return {"ended": "ended"}
    if failure.outcome == "cancelled":
        return {"ended": "cut"}
    reported = next((recorded for recorded in attempt.read_failures() if recorded.where == "script"), None)
    if reported is None:
        return {"ended": "failed", "outcome": failure.outcome, "why": failure.summary}
    return {
        "ended": "failed",
        "outcome": failure.outcome,
        "error": reported.error,
        "why": find_error_line(reported.text, reported.error),
    }


def require_resumable_script(run: RunDir, task: Task) -> None:
    """Check that the resume test before a training has found that its script can resume as the training requires.

    Raises:
        JobFailed: the script cannot resume from its checkpoint, or is not known to do so on the nodes that it is granted.
    """
    if not task.resume_test_job_id:
        return
    resume_test = ResumeTestRecords(run.path).read_result(task.resume_test_job_id)
    if resume_test is not None and resume_test.verdict == "none":
        raise JobFailed(
            f"the training was not started, because the script cannot resume after an interruption: {'; '.join(resume_test.faults)}",
            "correct how the script resumes, or use tula train --no-rehearse, which starts from the beginning after each interruption",
        )
    if len(task.node_counts) > 1 and (resume_test is None or not resume_test.other_nodes):
        why = "; ".join(resume_test.faults or resume_test.told) if resume_test is not None else "the test did not run"
        raise JobFailed(
            f"the training was not started, because it is unknown whether the script can resume on another number of nodes: {why}",
            "correct how the script resumes, or give one number of nodes: tula train --nodes 4",
        )
