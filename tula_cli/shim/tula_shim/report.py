"""The result of one rank, from what its recorder holds."""

from __future__ import annotations

import os
import platform
import socket
import sys
from typing import Any

from . import clocks
from .hooks.optimizers import base_learning_rate
from .place import backend
from .recorder import CAUSES, LOCAL, TIMED, WARMUP, Interval, Recorder


def report(recorder: Recorder, why: str) -> dict[str, Any]:
    """Return what this rank has seen; reading it waits for the GPU.

    Args:
        recorder: of this process.
        why: "begun", "stopped", "ended" or "saved".
    """
    plan, optimizers = recorder.plan, recorder.optimizers
    main = optimizers.main() or {"name": None, "elements": None}
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
        "device": recorder.device,
        "hardware": clocks.hardware(),
        "backend": backend(),
        "capacity": clocks.capacity(),
        "startup": recorder.startup,
        "steps": recorder.step,
        "samples": recorder.samples(),
        "optimizer": main["name"],
        "parameters": main["elements"],
        "bytes": optimizers.bytes or None,
        "peak": recorder.peaks,
        "lr": _lr(recorder),
        "warmup": [recorder.seconds(i.begin, i.end) for i in recorder.intervals.get(WARMUP, ())],
        "timed": [_row(recorder, interval) for interval in recorder.intervals.get(TIMED, ())],
        "split": _split(recorder),
        "loader": recorder.delivered.facts.get(recorder.delivered.training or 0),
        "loaders": list(recorder.delivered.facts.values()),
        "notes": [note for note in notes if note],
    }


def _lr(recorder: Recorder) -> dict[str, float | None] | None:
    """Return the learning rates of the first step, the first timed one and the last one, and that before any scheduler."""
    lrs = [float(lr) for lr in recorder.lrs if lr is not None]
    if not lrs:
        return None
    base = base_learning_rate(recorder.optimizers.clock)
    return {"base": base, "first": lrs[0], "timed": lrs[min(recorder.plan.warmup, len(lrs) - 1)], "last": lrs[-1]}


def _row(recorder: Recorder, interval: Interval) -> dict[str, Any]:
    delivered = recorder.delivered
    dataset = delivered.trained_on(interval.counts)
    samples, batches, waited = interval.counts.get(dataset or 0, (0, 0, 0.0))
    counted = delivered.counts_samples(dataset)
    return {
        "seconds": recorder.seconds(interval.begin, interval.end),
        "wait": waited if delivered.training is not None else None,
        "samples": interval.samples if interval.samples is not None else samples if counted else None,
        "batches": batches if delivered.training is not None else None,
        "backwards": interval.backwards,
        "gap": [name for cause, name in CAUSES.items() if interval.gap & cause],
    }


def _split(recorder: Recorder) -> dict[str, Any] | None:
    """Return what the steps after the timed ones have shown; None where there were none."""
    split = recorder.split
    if not split.exposed:
        return None
    return {
        "modules": len(split.alive()),
        "hook": split.hook,
        "sync": [sum(recorder.seconds(*pair) for pair in pairs) for pairs in split.exposed],
        "norms": [[float(own), float(reduced)] for own, reduced in split.norms],
        "local": [_row(recorder, interval) for interval in recorder.intervals.get(LOCAL, ()) if split.local],
    }
