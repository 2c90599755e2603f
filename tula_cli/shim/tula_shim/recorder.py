"""Records the steps of one process, and the measurements of each phase of the plan."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import socket
import sys
import time
from typing import Any, NamedTuple

from . import clocks
from .ags import AgsHooks
from .batches import DeliveredBatches
from .branch import BranchSteps
from .clocks import HostClock, Mark, compute_process_age, make_clock, read_peak_memory, reset_peak_memory
from .ddp_split import DdpSplit
from .file_changes import FileChangeRecorder
from .optimizers import Optimizers, ScheduleReporter, get_base_learning_rate
from .ortho import OrthoHooks
from .plan import Plan, make_observed_folder_path
from .ranks import NoStoreError, broadcast_decision, count_ranks, get_backend_name, get_rank
from .supervision import HeartbeatWriter, SaveRequestPoller, StepKiller

WARMUP, TIMED, SYNC, NORMS, LOCAL, OBSERVED = "warmup", "timed", "sync", "norms", "local", "observed"

EVAL, EPOCH, SAVE = 1, 2, 4
GAP_CAUSES = {EVAL: "eval", EPOCH: "epoch", SAVE: "save"}
"""Events within a step besides its own work: a module was set to evaluate or a loader read without gradients, a data
loader began or ended an epoch, torch.save was called."""


class RecordedStep(NamedTuple):
    """One step. `counts` as in `DeliveredBatches`; `gap` is a bit mask of the causes."""

    begin: Mark
    end: Mark
    counts: dict[int, list[float]]
    samples: float | None  # as reported by the loop; None if it does not
    backwards: int
    gap: int


class Recorder:
    """Records steps until the plan is complete. One per process; the hooks call it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        # Parent folder of the results of an observed job, whose own folder is named at its first step.
        self.root = plan.folder
        self.hooked = False  # torch is hooked
        self.over = False  # nothing more is recorded
        self.loads: dict[str, float] = {}  # path of a loaded file -> its modification time (Unix time)
        self.files = FileChangeRecorder(plan.folder, plan.files) if plan.files is not None else None
        self.reset()

    def reset(self) -> None:
        """Reset all records, because this process was forked from the recorded one."""
        self.optimizers = Optimizers()
        self.delivered = DeliveredBatches()
        self.split = DdpSplit()
        self.requests = SaveRequestPoller(self.plan)
        self.ags = AgsHooks(self.plan, self.split) if self.plan.ags is not None else None
        self.ortho = OrthoHooks(self.plan) if self.plan.ortho is not None else None
        self.branch = BranchSteps(self.plan.branch) if self.plan.branch is not None else None
        self.restart()

    def restart(self, *, by_hand: bool = False) -> None:
        """Restart counting steps, because the steps of another optimizer, or of the loop itself, are counted from now on."""
        self.by_hand = by_hand
        self.step = 0
        self.phase = WARMUP
        self.asked_to = ""  # "save" or "stop" if requested after the current step, else empty
        self.begun = False  # the first steps of a training ended with the current step
        self.gap = 0
        self.saved: dict[str, float] = {}  # files that the current step saves -> when it began to (Unix time)
        self.backwards = 0
        self.startup: float | None = None
        self.rank, self.world = 0, 1
        self.notes: list[str] = []
        self.lrs: list[Any] = []
        self.peaks: dict[str, dict[str, int]] = {}
        self.intervals: dict[str, list[RecordedStep]] = {}
        self.pulse = HeartbeatWriter(self.plan)
        self.pulse.more = self._make_row_extras
        self.schedule = ScheduleReporter()
        self.killing = StepKiller(self.plan)
        self._reported_samples: float | None = None
        self._trouble: OSError | None = None
        self.clock: HostClock = HostClock()
        self._begin: Mark | None = None
        self._timed: int | None = None
        self._stepped: float | None = None  # perf_counter at the end of the last step of an observed job

    # --- Between steps

    def record_disturbance(self, cause: int) -> None:
        """Record an event that makes the current step longer than others."""
        self.gap |= cause
        self.record_activity()

    def record_save(self, target: Any) -> None:
        """Record a call of torch.save with its path, or for an open file or a buffer the class of this."""
        is_path = isinstance(target, (str, os.PathLike))
        self.saved[os.path.abspath(target) if is_path else type(target).__name__] = time.time()  # noqa: PTH100
        self.record_disturbance(SAVE)
        # So that the samples of the checkpoint are known even if the process ends now.
        self.record_activity(at_once=True)
        if self.files is not None:
            self.files.record_change(target, resolve=True)

    def record_activity(self, *, at_once: bool = False) -> None:
        """Record that the process is not stuck; raises nothing, because the script's own calls may call it."""
        if self.step and not self.over:
            try:
                self.pulse.write() if at_once else self.pulse.record_activity()
            except OSError as error:
                self._trouble = error

    def get_batch_counter(self) -> DeliveredBatches | None:
        """Return the counter of a new batch; None once recording is over, and in an evaluation, which trains on no batch."""
        from torch import is_grad_enabled

        if self.over:
            return None
        if not is_grad_enabled():
            self.record_disturbance(EVAL)
            return None
        self.record_activity()
        return self.delivered

    def record_load(self, path: Any) -> None:
        """Record a file that is loaded before the first step of a training: it may be one of its checkpoints."""
        if self.step or not self.plan.is_training or not isinstance(path, (str, os.PathLike)):
            return
        real_path = os.path.realpath(path)
        with contextlib.suppress(OSError):  # the script's own call reports the error
            self.loads[real_path] = os.stat(real_path).st_mtime  # noqa: PTH116

    def count_samples(self) -> float | None:
        """Return the samples of this rank so far; None if neither the loop nor a data loader reports them."""
        return self._reported_samples if self.by_hand else self.delivered.count_samples()

    # --- End of a step

    def after_step(self, *, lr: Any, samples: float | None = None, loss: Any = None) -> bool:
        """Record the end of a step; return whether the plan is complete and the process is to exit.

        Args:
            lr: learning rate of the step: a number, or a tensor that is not changed any more.
            samples: of this step on this rank, if the loop reports them.
            loss: of this step; a tensor is read only when a row is written.

        Raises:
            OSError: a file could not be written, now or since the last step.
        """
        if self._trouble is not None:
            raise self._trouble
        if self.step == 0:
            self._start_training()
        self.step += 1
        self._write_notes()
        counts = self.delivered.pop_batch_counts()
        if samples is not None:
            self._reported_samples = (self._reported_samples or 0) + samples
        self.pulse.record_step(self.step, self.count_samples())
        if self.plan.is_training:
            self._record_training_step(counts, samples, lr=lr, loss=loss)
        elif self.plan.is_observing:
            self._record_observed_step(counts, samples)
        else:
            self.lrs.append(lr)
            self._store_step(counts, samples)
        self.split.after_step()
        self.gap, self.saved, self.backwards = 0, {}, 0
        return self._is_plan_complete()

    def _is_plan_complete(self) -> bool:
        """Return whether this step was the last of a branch or of a probe; a probe enters its next phase here."""
        if self.branch is None:
            return self.plan.mode == "probe" and self._enter_next_phase()
        if self.step <= self.branch.norms:
            self._watch_branch_norms(self.branch)
        return self.branch.is_finished(self.step)

    def _record_training_step(
        self, counts: dict[int, list[float]], samples: float | None, *, lr: Any, loss: Any
    ) -> None:
        """Report a step of a training, and do what its supervisor has asked for."""
        observed_loss = None if self.branch is None else self.branch.pop_loss()
        causes = [name for cause, name in GAP_CAUSES.items() if self.gap & cause]
        self.pulse.write_row_if_due(causes, lr=lr, loss=observed_loss if loss is None else loss, saved=self.saved)
        self.killing.after_step(self.step, self.pulse.before, self.rank, self.delivered.get_dataset_size())
        self.asked_to = self.requests.poll_request(self.step, self.pulse, self.world)
        self._begin_training(counts, samples)

    def _watch_branch_norms(self, branch: BranchSteps) -> None:
        """Record the gradient norms of the second to the last of the first steps, if DDP reduces gradients."""
        if self.step == 1 and self.world > 1 and self.ags is None and self.split.list_modules():
            self.split.watch_norms()
        elif self.step == branch.norms:
            self.split.stop_watching()

    def _make_row_extras(self) -> dict[str, Any]:
        extras = self.ags.report() if self.ags is not None else {}
        if self.plan.schedule:
            extras = {**extras, **self.schedule.describe_schedule(self.optimizers.main_optimizer)}
        return extras

    def _start_training(self) -> None:
        self.rank, self.world = get_rank() or 0, count_ranks(by_hand=self.by_hand)
        if self.plan.is_observing:
            folder = make_observed_folder_path(self.root, self.world)
            self.plan = self.pulse.plan = dataclasses.replace(self.plan, folder=folder)
        self.startup = compute_process_age()
        self.clock = make_clock()
        if self.files is not None:
            self.files.mark_first_step()
        self.pulse.rank = self.rank
        for path, written in self.loads.items():
            self.pulse.write_loaded_file(path, written)

    def _write_notes(self) -> None:
        notes = [text for steps in (self.ags, self.ortho) if steps is not None for text in steps.pop_notes()]
        for text in notes:
            if self.plan.is_training:
                self.pulse.write_note(self.step, text)
            else:
                self.notes.append(text)

    def _begin_training(self, counts: dict[int, list[float]], samples: float | None) -> None:
        """Record a training's first steps, the fewest that a probe times, for comparison with the plan's claims."""
        remaining = self.plan.warmup + self.plan.min_steps - self.step
        self.begun = remaining == 0
        if remaining >= 0:
            self.phase = WARMUP if self.step <= self.plan.warmup else TIMED
            self._store_step(counts, samples)

    def _record_observed_step(self, counts: dict[int, list[float]], samples: float | None) -> None:
        """Measure the first steps as a probe does, without changing anything; after them only add up durations.

        Each rank enters the next phase by its own decision, so that no rank ever waits for another one.
        """
        self._add_step_to_totals(counts)
        self.begun = False
        if self.phase == OBSERVED:
            return
        self._store_step(counts, samples)
        timed = self.step - self.plan.warmup
        if self.phase == WARMUP and timed == 0:
            self.phase = TIMED
        elif self.phase == TIMED and self._has_timed_enough_steps(timed):
            if self._can_time_parts_of_step():
                self.phase = SYNC
                self.split.watch_sync(self.clock.mark)
            else:
                self._end_observation()
        elif self.phase == SYNC and self._has_enough_steps():
            self.split.stop_watching()
            self._end_observation()
        self._begin = self.clock.mark()

    def _has_timed_enough_steps(self, timed: int) -> bool:
        if timed < self.plan.min_steps:
            return False
        return timed >= self.plan.max_steps or timed * self.pulse.median_step_time >= self.plan.seconds

    def _end_observation(self) -> None:
        self.phase, self.begun = OBSERVED, True
        self.optimizers.measure_bytes()
        self.peaks[TIMED] = read_peak_memory()

    def _add_step_to_totals(self, counts: dict[int, list[float]]) -> None:
        """Add the step to the seconds of the job: all of it, the waits for data, and what disturbed steps took longer."""
        totals, now = self.pulse.totals, time.perf_counter()
        if self._stepped is None:
            totals.update(dict.fromkeys(("training", "data", *GAP_CAUSES.values()), 0.0))
        else:
            seconds, waited = now - self._stepped, sum(counted[2] for counted in counts.values())
            totals["training"] += seconds
            totals["data"] += waited
            cause = next((name for cause, name in GAP_CAUSES.items() if self.gap & cause), None)
            if cause is not None:
                totals[cause] += max(0.0, seconds - waited - self.pulse.median_step_time)
        self._stepped = now

    def _store_step(self, counts: dict[int, list[float]], samples: float | None) -> None:
        end = self.clock.mark()
        if self._begin is not None:
            interval = RecordedStep(self._begin, end, counts, samples, self.backwards, self.gap)
            self.intervals.setdefault(self.phase, []).append(interval)
        self._begin = end

    def _enter_next_phase(self) -> bool:
        """Enter the next phase if the current one is over; return True if no phase is left."""
        done = self.step - self.plan.warmup
        if self.phase == WARMUP and done == 0:
            self.phase, self.peaks[WARMUP] = TIMED, read_peak_memory()
            reset_peak_memory()
        elif self.phase == TIMED and done == self._agree_on_timed_steps(done):
            self.peaks[TIMED] = read_peak_memory()
            self.optimizers.measure_bytes()
            if not self._can_time_parts_of_step():
                return True
            self.phase = SYNC
            self.split.watch_sync(self.clock.mark)
        elif self.phase == SYNC and self._has_enough_steps():
            self.phase = NORMS
            self.split.watch_norms()
        elif self.phase == NORMS and self._has_enough_steps():
            self.phase = LOCAL
            self.split.skip_sync()
        else:
            return self.phase == LOCAL and self._has_enough_steps()
        self._begin = self.clock.mark()  # so that the next step excludes the work of this method
        return False

    def _has_enough_steps(self) -> bool:
        return len(self.intervals.get(self.phase, ())) >= self.plan.split_steps

    def _can_time_parts_of_step(self) -> bool:
        if self.world == 1 or self.plan.split_steps == 0:
            return False
        if not self.split.list_modules():
            self.notes.append(
                "communication time, gradient norms and local compute time not measured: the script does not use DistributedDataParallel"
            )
        return bool(self.split.list_modules())

    def _agree_on_timed_steps(self, done: int) -> int:
        """Return the number of timed steps: decided by rank 0 after the minimum number, because clocks differ."""
        plan = self.plan
        if plan.min_steps == plan.max_steps:
            return plan.max_steps
        if self._timed is None and done >= plan.min_steps:
            try:
                self._timed = int(broadcast_decision("steps", self._estimate_timed_steps, world=self.world))
            except NoStoreError as error:
                self.notes.append(f"only {plan.min_steps} steps were timed, the minimum: {error}")
                self._timed = plan.min_steps
        return plan.min_steps if self._timed is None else self._timed

    def _estimate_timed_steps(self) -> str:
        fitting = int(self.plan.seconds / max(self.pulse.median_step_time, 1e-9))
        return str(max(self.plan.min_steps, min(self.plan.max_steps, fitting)))


# --- The result of one rank


def make_report(recorder: Recorder, why: str) -> dict[str, Any]:
    """Return the measurements of this rank; waits for the GPU.

    Args:
        why: "begun", "stopped", "ended" or "saved".
    """
    plan, optimizers = recorder.plan, recorder.optimizers
    main = optimizers.describe_main_optimizer() or {"name": None, "elements": None}
    torch = sys.modules.get("torch")
    notes = [*recorder.notes, recorder.split.note, recorder.requests.note]
    return {
        "version": 1,
        "task": plan.task,
        "attempt": plan.attempt,
        "why": why,
        "rank": recorder.rank,
        "world": recorder.world,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "expected": plan.expected,
        "python": platform.python_version(),
        "torch": str(getattr(torch, "__version__", "")),
        "device": recorder.clock.device,
        "hardware": clocks.read_hardware_name(),
        "backend": get_backend_name(),
        "capacity": clocks.read_device_capacity(),
        "startup": recorder.startup,
        "steps": recorder.step,
        "samples": recorder.count_samples(),
        "optimizer": main["name"],
        "parameters": main["elements"],
        "bytes": optimizers.bytes or None,
        "peak": recorder.peaks,
        "lr": _list_learning_rates(recorder),
        "warmup": [recorder.clock.measure_seconds(i.begin, i.end) for i in recorder.intervals.get(WARMUP, ())],
        "timed": [_make_interval_row(recorder, interval) for interval in recorder.intervals.get(TIMED, ())],
        "split": _make_split_report(recorder),
        "loader": recorder.delivered.facts.get(recorder.delivered.training or 0),
        "loaders": list(recorder.delivered.facts.values()),
        "notes": [note for note in notes if note],
    }


def _list_learning_rates(recorder: Recorder) -> dict[str, float | None] | None:
    """Return the learning rates of the first, first timed and last step, and the base rate before any scheduler."""
    lrs = [float(lr) for lr in recorder.lrs if lr is not None]
    if not lrs:
        return None
    base = get_base_learning_rate(recorder.optimizers.main_optimizer)
    return {"base": base, "first": lrs[0], "timed": lrs[min(recorder.plan.warmup, len(lrs) - 1)], "last": lrs[-1]}


def _make_interval_row(recorder: Recorder, interval: RecordedStep) -> dict[str, Any]:
    delivered = recorder.delivered
    dataset = delivered.find_trained_dataset(interval.counts)
    samples, batches, waited = interval.counts.get(dataset or 0, (0, 0, 0.0))
    counted = delivered.can_count_samples(dataset)
    return {
        "seconds": recorder.clock.measure_seconds(interval.begin, interval.end),
        "wait": waited if delivered.training is not None else None,
        "samples": interval.samples if interval.samples is not None else samples if counted else None,
        "batches": batches if delivered.training is not None else None,
        "backwards": interval.backwards,
        "gap": [name for cause, name in GAP_CAUSES.items() if interval.gap & cause],
    }


def _make_split_report(recorder: Recorder) -> dict[str, Any] | None:
    """Return the measurements of the steps after the timed ones, or of a branch; None if there were none."""
    split = recorder.split
    if not split.exposed and not split.norms:
        return None
    return {
        "modules": len(split.list_modules()),
        "hook": split.hook,
        "sync": [sum(recorder.clock.measure_seconds(*pair) for pair in pairs) for pairs in split.exposed],
        "norms": [[float(local), float(reduced)] for local, reduced in split.norms],
        "local": [
            _make_interval_row(recorder, interval) for interval in recorder.intervals.get(LOCAL, ()) if split.local
        ],
    }
