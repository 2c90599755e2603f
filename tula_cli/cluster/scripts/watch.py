"""What the shims of the ranks that a supervisor has started tell while they run, and at their end."""

import contextlib
import math
import os
import signal
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tula_cli import words
from tula_cli.cluster.exit_reason import ExitReason, computed_on
from tula_cli.cluster.scripts import checkpoints
from tula_cli.cluster.scripts.printed_metrics import no_step
from tula_cli.cluster.scripts.put_aside import put_aside
from tula_cli.cluster.scripts.rehearsing.script_rehearsal import ScriptRehearsal
from tula_cli.cluster.scripts.script_training import ScriptTraining
from tula_cli.cluster.scripts.values import own
from tula_cli.host.leftovers import processes_with_variable
from tula_cli.host.network import node_name
from tula_cli.host.outcome import classify, telling_line
from tula_cli.host.processes import inner_id
from tula_cli.run.directory import RunDir
from tula_cli.run.records.jobs import Failure, LeaderCommand
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.shim import Heartbeat, ScriptFailure
from tula_cli.run.records.tasks import ProbeTask, RehearsalTask, Task, TrainTask
from tula_cli.run.script_attempt import ScriptAttempt
from tula_cli.spec.scripts.placeholders import fill

if TYPE_CHECKING:
    from tula_cli.models.time.changes.script_pace import ScriptPace

SILENCE = 60.0
"""The least seconds without a sign of life after which a probe that has stepped is ended."""
TRAINING_SILENCE = 600.0
"""The same of a training: it evaluates and saves, not always with what the shim sees, and is started again for nothing."""
FIRST_STEP_STARTS = 20
"""A training's first step may take as many times what a probe's start took, and search.max_minutes in any case."""
SILENT_STEPS = 20
"""The same in steps, of its median step time."""
ROW_SECONDS = 1.0
"""Between two rows of metrics.jsonl, as of tula's own loop."""
SIGNALS = {name: signal.Signals[name] for name in ("SIGUSR1", "SIGUSR2", "SIGTERM")}
SAVE_SECONDS = 5.0
"""Between two looks for a new checkpoint."""


@dataclass
class ScriptWatch:
    """One attempt of a script, as one supervisor sees it.

    Args:
        ranks: that this supervisor has started, or whose command it has.
        training: whose rows the leader writes; None for others, and of a probe.
    """

    run: RunDir
    task: Task
    command: LeaderCommand
    ranks: range
    training: ScriptTraining | None = None
    _next_row: float = 0.0
    _next_words: float = words.pause(0.0)  # seconds after the start at which the log tells how far it is
    _next_epoch: float = 0.0  # or once this has begun
    _next_look: float = 0.0
    _began: float = field(default_factory=time.monotonic)
    _step: int = 0
    _batch: float = 0.0  # samples of a step that were seen last; 0 before any were
    _broken: ExitReason | None = None
    _held: bool = False  # the first steps of all ranks against what is claimed

    @property
    def attempt(self) -> ScriptAttempt:
        return ScriptAttempt(self.run.path, self.task.id, self.command.attempt)

    def begin(self) -> None:
        """Write that a training starts."""
        if self.training is not None:
            self.training.begin(self.command)

    def follow(self) -> None:
        """Write down what these ranks' shims have told since the last look."""
        self._adopt_failures()
        if self.training is not None and time.monotonic() >= self._next_row:
            self._next_row = time.monotonic() + ROW_SECONDS
            before, self._step = self._step, self.training.follow(self.attempt, self.command, after=self._step)
            if self._step > before:
                self._tell(self.training)
            self._batch = self.training.follow_batch(
                self.attempt, self.command, before=self._batch or self.command.batch
            )
            self.training.look(self._pace, self.attempt, self.command)
            if not self._held and (begun := self.attempt.begun()):
                self._broken = self.training.broken_claims(begun, self.command)
                self._held = len(begun) >= begun[0].world
        if self.training is not None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + SAVE_SECONDS
            self.training.note_save(self.attempt, self.command)

    def _tell(self, training: ScriptTraining) -> None:
        """Say in the job's log, at the end of an epoch and now and then between, how far the script is."""
        row = next((row for row in reversed(training.training.newest_metrics()) if row["kind"] == "step"), None)
        age = time.monotonic() - self._began
        if row is None or (age < self._next_words and (row["epoch"] is None or row["epoch"] < self._next_epoch)):
            return
        self._next_words, self._next_epoch = age + words.pause(age), math.floor(row["epoch"] or 0) + 1
        told = words.progress(
            epoch=row["epoch"], of=None, samples=row["samples"], batch=training.task.batch, loss=row["loss"],
            step_time=row["step_time"], left=row["eta"],
        )  # fmt: skip
        with self.run.open_log(self.run.log_path(self.task.id, self.command.attempt)) as log:
            log.write(f"{words.stamped(told)}\n".encode())

    @cached_property
    def _pace(self) -> "ScriptPace":
        from tula_cli.models.time.changes.script_pace import ScriptPace  # numpy: not for those that do not lead

        return ScriptPace()

    def last(self) -> None:
        """Write down what they have told at their end."""
        self._next_row = 0.0
        self.follow()

    def put_aside(self) -> str:
        """Undo what a probe or a resume test has written outside of its own folder on this node; return it in words."""
        return "" if isinstance(self.task, TrainTask) else put_aside(self.attempt)

    def _adopt_failures(self) -> None:
        """Write down, as a worker does, what the shims of these ranks have seen."""
        told = self.attempt.failures()
        known = {failure.rank for failure in self.run.failures(self.task.id, self.command.attempt)} if told else set()
        for seen in told:
            if seen.where == "shim" and isinstance(self.task, TrainTask):
                continue  # the training goes on without being watched, and its log says so
            rank = self.ranks.start if seen.rank is None else seen.rank
            if rank in self.ranks and rank not in known:
                known.add(rank)
                self.run.write_failure(self._failure(seen, rank))

    def _failure(self, seen: ScriptFailure, rank: int) -> Failure:
        own = seen.where != "script"
        shims_fault = "measuring the script failed (this is tula's fault): " if seen.where == "shim" else ""
        return Failure(
            task=self.task.id,
            attempt=self.command.attempt,
            rank=rank,
            host=node_name(),
            pid=seen.pid,
            outcome="user" if own else classify(seen.text, exit_code=1, device=computed_on(self.run, self.task)),
            message=shims_fault + ((seen.where == "script" and telling_line(seen.text)) or seen.words),
            detail=seen.text,
            local_batch=self.command.batch // self.command.ranks,
            failed_at=seen.failed_at,
        )

    # --- leaving

    @property
    def saves(self) -> bool:
        """Whether this is a training that can be asked to save."""
        return isinstance(self.task, TrainTask) and own(self.task.spec).save != "none"

    def ask_to_save(self) -> None:
        """Ask these ranks for a checkpoint, as the spec says; by a file, the leader alone does."""
        how = own(self.task.spec).save
        if how in SIGNALS:
            for pid in self._processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, SIGNALS[how])
        elif self.training is not None and how == "hooks":
            self.attempt.write_save_request()
        elif self.training is not None:
            path = Path(self.task.workdir) / fill(how.removeprefix("file:"), self.training.known)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def _processes(self) -> list[int]:
        """Return the processes of these ranks: those of this attempt whose own id is that of a heart."""
        hearts = {beat.pid for rank in self.ranks if (beat := self.attempt.heartbeat(rank)) is not None}
        plan = str(self.attempt.plan_path)
        return [
            pid
            for pid, value in processes_with_variable("TULA_PLAN").items()
            if value == plan and inner_id(pid) in hearts
        ]

    def saved(self, *, since: float) -> bool:
        """Return whether there is a checkpoint that was begun and ended since (Unix time), and is not being written."""
        if not isinstance(self.task, TrainTask):
            return False
        found = ScriptTraining(self.run, self.task).checkpoint()
        return found is not None and since < checkpoints.changed(found) < time.time() - checkpoints.SETTLED

    # --- faults

    @property
    def stepped(self) -> bool:
        """Whether one of these ranks has stepped."""
        return any(self.attempt.heartbeat(rank) is not None for rank in self.ranks)

    def stuck(self) -> ExitReason | None:
        """Return why the ranks are to be ended: one that has stepped gives no sign of life any more, and no other does.

        Or, in a rehearsal, because they go on beyond what was left; and a training whose first steps are not what was claimed.
        """
        if self._broken is not None:
            return self._broken
        if isinstance(self.task, RehearsalTask) and self.command.rehearsal is not None:
            endless = ScriptRehearsal(self.run, self.task).endless(self.command.rehearsal, self.attempt)
            if endless is not None:
                return endless
        for rank in self.ranks:
            beat = self.attempt.heartbeat(rank)
            if beat is None or not self._silent(beat) or self._written(rank) or self._others_alive():
                continue
            told = f"no step for {time.time() - beat.alive_at:.0f} s, after {beat.step} steps of {beat.seconds:.3g} s"
            return ExitReason("unknown", f"{told}: ended as stuck", rank, node_name())
        return self._never_stepped()

    def _never_stepped(self) -> ExitReason | None:
        """Return why a training is to be ended of which no rank, on any node, takes its first step; a probe has its time limit."""
        if not isinstance(self.task, TrainTask) or time.monotonic() - self._began <= self._first_step_within:
            return None
        seen = any(self.attempt.heartbeat(rank) is not None for rank in range(self.command.ranks))
        if seen or any(
            failure.where == "shim" for failure in self.attempt.failures()
        ):  # it goes on without being watched
            return None
        log = self.run.log_path(self.task.id, self.command.attempt)
        limit = f"{self._first_step_within / 60:.3g} min after its start (search.max_minutes, or 20 starts of a probe)"
        return ExitReason("user", f"ended {limit}: {no_step(log)}", self.ranks.start, node_name())

    @cached_property
    def _first_step_within(self) -> float:
        """Seconds."""
        results = self.run.read().results
        starts = [result.overheads.startup for result in results if isinstance(result, Measured)]
        return max(60 * self.task.spec.search.max_minutes, FIRST_STEP_STARTS * max(starts, default=0.0))

    def _others_alive(self) -> bool:
        """Return whether a rank goes on, on any node: those that wait for it (it evaluates or saves alone) are not stuck."""
        beats = [self.attempt.heartbeat(rank) for rank in range(self.command.ranks)]
        return any(beat is not None and (beat.lost is not None or not self._silent(beat)) for beat in beats)

    def _silent(self, beat: Heartbeat) -> bool:
        least = SILENCE if isinstance(self.task, ProbeTask) else TRAINING_SILENCE
        return time.time() - beat.alive_at > max(least, SILENT_STEPS * beat.seconds)

    def _written(self, rank: int) -> bool:
        return (self.attempt.path / f"result-{rank}.json").exists()
