"""A rehearsal of how a script resumes: which start comes next, what was seen in it, and what follows from all of them."""

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tula_cli.cluster.exit_reason import ExitReason
from tula_cli.cluster.rank_start import world_size
from tula_cli.cluster.scripts import checkpoints, printed_metrics
from tula_cli.cluster.scripts.rehearsing.traces import (
    error_line,
    learning_rate_curve,
    learning_rates,
    schedule_seen,
    trained,
)
from tula_cli.cluster.scripts.values import Place, own, values
from tula_cli.models.resuming import judged
from tula_cli.run.directory import RunDir
from tula_cli.run.records.base import OutcomeClass
from tula_cli.run.records.jobs import LeaderCommand
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.rehearsals import Phase, Rehearsal, RehearsalStart, Rehearsed
from tula_cli.run.records.shim import Killing
from tula_cli.run.records.tasks import RehearsalTask
from tula_cli.run.script_attempt import Rehearsals, ScriptAttempt
from tula_cli.spec.job import lr_scale
from tula_cli.spec.scripts import section
from tula_cli.spec.scripts.own_script import Length
from tula_cli.spec.scripts.placeholders import fill, names

EPOCHS = 3
"""Of a rehearsal's length: one up to the checkpoint, one boundary beyond it."""
ASK_AT = 24
"""Step after which a script that can be asked for a checkpoint is asked: then half of them are many."""
BEYOND = 5
"""Steps from the checkpoint to the end of the first start: the learning rates to hold others against."""
SHARES: Mapping[Phase, float] = {"begin": 0.6, "same": 0.5, "half": 1.0}
"""Of the time that is left, what a start may take."""
LEAST_SECONDS = 5.0
ENDLESS = 2.0
"""What is left to train, times this, ends a start that goes on and on."""
AGAIN: tuple[OutcomeClass, ...] = ("port", "time_limit", "preempted", "node_failure")
"""Endings that tell nothing of the script: the same start is due again, if there is time."""


@dataclass(frozen=True)
class ScriptRehearsal:
    """One rehearsal, as the leader of its supervisors sees it."""

    run: RunDir
    task: RehearsalTask

    @property
    def files(self) -> Rehearsals:
        return Rehearsals(self.run.path)

    @property
    def found(self) -> Rehearsal:
        """What was found so far."""
        return self.files.read(self.task.id) or Rehearsal(task=self.task.id, key=self.task.key, began_at=time.time())

    # --- what comes next

    def begin(self) -> RehearsalStart:
        """Return the first start that is due of a rehearsal that is not over; from the first on its time counts."""
        found = self.found
        self.files.write(found)
        start = self._next(found, max(self._left(found), LEAST_SECONDS))
        assert start is not None, "it is over"
        return start

    def _left(self, found: Rehearsal) -> float:
        """Return the seconds that are left to it."""
        return 60 * self.task.spec.search.max_minutes - (time.time() - found.began_at)

    def _next(self, found: Rehearsal, left: float) -> RehearsalStart | None:
        """Return the start that is due with so many seconds left; None where there is none."""
        begins = [start for start in found.starts if start.phase == "begin"]
        if not begins:
            return self._beginning(found, self._first_length(), self.task.batch, left)
        if left < LEAST_SECONDS:
            return None
        last = found.starts[-1]
        if last.phase == "begin":
            if (again := self._once_more(begins, left)) is not None:
                return self._beginning(found, *again, left)
            return self._resuming("same", last, last.batch, left) if _usable(last) else None
        halves = last.phase == "same" and last.ended == "ended" and last.steps
        half = last.batch // 2
        if not halves or last.batch % 2 or half % (world_size(self.task) * self.task.spec.train.accumulate):
            return None
        return self._resuming("half", begins[-1], half, left)

    def _beginning(self, found: Rehearsal, length: Length, batch: int, left: float) -> RehearsalStart:
        out = self.files.folder(self.task.id) / f"begin-{len(found.starts) + 1}"
        seconds = max(LEAST_SECONDS, SHARES["begin"] * left)
        return RehearsalStart(phase="begin", batch=batch, length=length, out=str(out), seconds=seconds)

    def _resuming(self, phase: Phase, begin: Rehearsed, batch: int, left: float) -> RehearsalStart | None:
        """Return a start from the checkpoint: each has a copy of its own, for it writes more of them."""
        out = self.files.folder(self.task.id) / phase
        start = RehearsalStart(
            phase=phase,
            batch=batch,
            length=begin.length,
            out=str(out),
            seconds=max(LEAST_SECONDS, SHARES[phase] * left),
        )
        resume = own(self.task.spec).resume
        assert resume is not None
        checkpoint, _ = checkpoints.newest(resume, self.known(start), workdir=Path(self.task.workdir), since=0.0)
        return None if checkpoint is None else start.model_copy(update={"checkpoint": str(checkpoint)})

    def _first_length(self) -> Length:
        """Return the length to begin with: short where the command takes one, and a checkpoint will come soon."""
        script = own(self.task.spec)
        if not self._length_is_told:
            return script.length
        if script.length.epochs is not None:
            return Length(epochs=min(EPOCHS, script.length.epochs))
        asked = section.samples_asked(script) or 0
        return Length(samples=min(asked, 3 * ASK_AT * self.task.batch)) if script.save != "none" else script.length

    @property
    def _length_is_told(self) -> bool:
        return bool({"epochs", "steps", "samples"} & set(names(own(self.task.spec).command)))

    def _once_more(self, begins: Sequence[Rehearsed], left: float) -> tuple[Length, int] | None:
        """Return length and batch of another beginning: a shorter or longer one, or a batch that fits the memory."""
        last, whole = begins[-1], own(self.task.spec).length
        if last.ended == "failed":
            half, parts = last.batch // 2, world_size(self.task) * self.task.spec.train.accumulate
            fits = last.outcome == "device_oom" and half >= parts and half % parts == 0
            return (last.length, half) if fits else None
        if last.ended == "ended" and not _usable(last) and last.length != whole:
            return whole, last.batch
        fitted = self._fitted(last)
        affordable = last.seconds * 2.5 < left
        return (fitted, last.batch) if fitted is not None and len(begins) == 1 and affordable else None

    def _fitted(self, begin: Rehearsed) -> Length | None:
        """Return the length half as long again as it took to the first checkpoint, where that is much shorter."""
        saved = begin.saved_samples
        if not (self._length_is_told and saved and begin.length.epochs is None and begin.whole):
            return None
        return Length(samples=math.ceil(1.5 * saved)) if begin.whole > 2 * saved else None

    def known(self, start: RehearsalStart) -> dict[str, str | float]:
        """What the placeholders of paths stand for."""
        return values(
            self.task.spec, Place(self.task.nodes, 0, "", 0), batch=start.batch, out=Path(start.out),
            run=self.run.path.absolute(), workers=0,
        )  # fmt: skip

    def killing(self, start: RehearsalStart) -> Killing | None:
        """Return how a start is ended from within; None where it goes on from a checkpoint."""
        script = own(self.task.spec)
        if start.phase != "begin" or script.resume is None:
            return None
        known = self.known(start)
        pattern = checkpoints.pattern(script.resume, known, workdir=Path(self.task.workdir))
        ask = fill(script.save, known) if script.save != "none" else ""
        if ask.startswith("file:"):
            ask = f"file:{Path(self.task.workdir) / ask.removeprefix('file:')}"
        return Killing(checkpoint=pattern, after=BEYOND, ask=ask, ask_at=ASK_AT, settled=checkpoints.SETTLED)

    # --- what was seen

    def settled(self, command: LeaderCommand, reason: ExitReason) -> ExitReason:
        """Keep what a start has shown, and the verdict after the last one; return why it ended: as planned is well."""
        assert command.rehearsal is not None
        found = self.found
        again = reason.outcome in AGAIN and (not found.starts or self._left(found) > LEAST_SECONDS)
        if again or self.run.cancelled(self.task.job):
            return reason
        seen = self._seen(command.rehearsal, command.attempt, reason)
        found = found.model_copy(update={"starts": (*found.starts, seen)})
        self._hand_on(command.rehearsal, seen)
        if self._next(found, self._left(found)) is None:
            found = self._concluded(found)
        self.files.write(found)
        return reason if seen.ended == "failed" else ExitReason(None, reason.message)

    def _seen(self, start: RehearsalStart, number: int, reason: ExitReason) -> Rehearsed:
        attempt = ScriptAttempt(self.run.path, self.task.id, number)
        killed, rows = attempt.killed(), [row for row in attempt.rows(0) if row["kind"] == "row"]
        size = own(self.task.spec).known_dataset_size if own(self.task.spec).dataset_size != "auto" else None
        size = size or (killed.dataset if killed is not None else None) or self._measured_size
        if start.phase != "begin":
            size = self.found.starts[-1].dataset_size
        steps, samples = trained(rows, start.batch // world_size(self.task))
        world = world_size(self.task)
        seen = Rehearsed(
            phase=start.phase, batch=start.batch, length=start.length, whole=_whole(self.task, start.length, size),
            ended="ended", seconds=time.time() - attempt.plan_path.stat().st_mtime, steps=steps, samples=samples * world,
            first_lr=rows[0].get("lr") if rows else None, dataset_size=size,
            rates=learning_rate_curve(rows, start.batch),
            schedule=schedule_seen(rows, after=killed.steps if killed is not None else 0),
        )  # fmt: skip
        if killed is not None and start.phase == "begin":
            before = [row for row in rows if row["step"] <= killed.steps]
            saved = trained(before, start.batch // world)[1] * world
            seen = seen.model_copy(
                update={"saved_steps": killed.steps, "saved_samples": saved, **learning_rates(rows, killed.steps)}
            )
        ending = _ending(attempt, reason, killed=killed is not None and killed.killed)
        if not steps and "why" not in ending:
            ending["why"] = printed_metrics.last_line(self.run.log_path(self.task.id, number))
        return seen.model_copy(update=ending)

    @property
    def _measured_size(self) -> int | None:
        measured = (result.dataset_size for result in self.run.read().results if isinstance(result, Measured))
        return next(measured, None)

    def _hand_on(self, start: RehearsalStart, seen: Rehearsed) -> None:
        """Give those that go on from the checkpoint a folder each: what was killed, and a copy of it."""
        if start.phase != "begin" or not _usable(seen):
            return
        folder = self.files.folder(self.task.id)
        for phase in ("same", "half"):
            shutil.rmtree(folder / phase, ignore_errors=True)
        shutil.copytree(start.out, folder / "half", ignore_dangling_symlinks=True)
        Path(start.out).rename(folder / "same")

    def _concluded(self, found: Rehearsal) -> Rehearsal:
        """Return it with its verdict; the script's files are of no more use."""
        shutil.rmtree(self.files.folder(self.task.id), ignore_errors=True)
        begin = next(start for start in reversed(found.starts) if start.phase == "begin")
        told = {"lr", "lr_factor"} & own(self.task.spec).placeholders
        spec, half = self.task.spec, begin.batch // 2
        ratio = lr_scale(spec, half) / lr_scale(spec, begin.batch) if told and half else None
        judgement = judged(found.starts, lr_ratio=ratio)
        return found.model_copy(
            update={
                "verdict": judgement.verdict,
                "told": judgement.told,
                "faults": judgement.faults,
                "over_at": time.time(),
            }
        )

    def endless(self, start: RehearsalStart, attempt: ScriptAttempt) -> ExitReason | None:
        """Return why a start that goes on from the checkpoint is to be ended: it has trained twice what was left."""
        if start.phase == "begin" or (beat := attempt.heartbeat(0)) is None:
            return None
        begin = next(seen for seen in reversed(self.found.starts) if seen.phase == "begin")
        if begin.whole is None:
            return None
        left = begin.whole - (begin.saved_samples or 0)
        if beat.step * start.batch <= ENDLESS * left + 4 * begin.batch:
            return None
        return ExitReason("cancelled", "it trains more than twice what was left")


def _usable(begin: Rehearsed) -> bool:
    """Return whether there is a checkpoint with something left to train after it."""
    if begin.saved_samples is None or begin.ended == "failed":
        return False
    return begin.ended != "ended" or begin.whole is None or begin.whole - begin.saved_samples > 2 * begin.batch


def _whole(task: RehearsalTask, length: Length, size: int | None) -> int | None:
    script = own(task.spec).model_copy(update={"length": length})
    asked = section.samples_asked(script)
    if asked is not None:
        return asked
    return None if size is None else section.samples(script, size)


def _ending(attempt: ScriptAttempt, reason: ExitReason, *, killed: bool) -> dict[str, Any]:
    """Return how a start has ended, and of what failed the line that says why."""
    if killed:
        return {"ended": "killed"}
    if reason.outcome is None:
        return {"ended": "ended"}
    if reason.outcome == "cancelled":
        return {"ended": "cut"}
    failure = next((told for told in attempt.failures() if told.where == "script"), None)
    if failure is None:
        return {"ended": "failed", "outcome": reason.outcome, "why": reason.message}
    return {
        "ended": "failed",
        "outcome": reason.outcome,
        "error": failure.error,
        "why": error_line(failure.text, failure.error),
    }
