"""What the rows and the tracebacks of a rehearsed start tell."""

from collections.abc import Mapping, Sequence
from typing import Any

WEIGHTS_ONLY = "weights_only"
HINT = "torch.load reads weights only unless it is told weights_only=False, and the checkpoint holds more"


def trained(rows: Sequence[Mapping[str, Any]], local_batch: int) -> tuple[int, int]:
    """Return steps and samples of one rank, by a row a step; a step trains its batch at most.

    What a loader delivers beyond that was skipped, or comes ahead of its step: as much as a step's is kept for the next.
    """
    steps = samples = delivered = ahead = 0
    for row in rows:
        if row["step"] == steps:
            continue  # the last one is told twice
        if row["step"] < steps:
            samples = delivered = ahead = 0  # counted anew: another optimizer is the clock
        steps = row["step"]
        if row["samples"] is None:
            samples += local_batch
            continue
        here = ahead + int(row["samples"]) - delivered
        delivered = int(row["samples"])
        samples += min(here, local_batch)
        ahead = min(max(0, here - local_batch), local_batch)
    return steps, samples


def learning_rates(rows: Sequence[Mapping[str, Any]], saved: int) -> dict[str, float | None]:
    """Return the learning rate of the step after the checkpoint, and what two steps make of it."""
    after = [row["lr"] for row in rows if row["step"] > saved and row.get("lr") is not None]
    upto = [row["lr"] for row in rows if row["step"] <= saved and row.get("lr") is not None]
    known = after or upto[-1:]
    return {
        "next_lr": known[0] if known else None,
        "lr_step": abs(known[min(2, len(known) - 1)] - known[0]) if known else 0.0,
    }


def error_line(text: str, error: str) -> str:
    """Return the line of a traceback that tells its exception.

    Args:
        text: the traceback.
        error: full name of the exception's class.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [error]
    told = next((line for line in reversed(lines) if line.startswith(f"{error}:")), lines[-1])
    if WEIGHTS_ONLY not in text or "Unpickl" not in error:
        return told
    which = next((line for line in lines if "Unsupported global" in line), told)
    return f"{error}: {which.removeprefix('WeightsUnpickler error: ').partition('. Please use')[0]} ({HINT})"
