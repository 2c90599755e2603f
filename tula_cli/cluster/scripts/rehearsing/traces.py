"""What the rows and the tracebacks of a rehearsed start tell."""

from collections.abc import Mapping, Sequence
from typing import Any

from tula_cli.run.records.rehearsals import Schedule

MAX_RATES = 400
"""Points of a curve of learning rates that are kept."""
WEIGHTS_ONLY = "weights_only"
HINT = "torch.load reads weights only unless it is told weights_only=False, and the checkpoint holds more"


def count_trained(rows: Sequence[Mapping[str, Any]], local_batch: int) -> tuple[int, int]:
    """Return steps and samples of one rank, by a row a step; a step trains its batch at most.

    What a loader delivers beyond that was skipped, or comes ahead of its step: as much as a step's is kept for the next.
    """
    steps = samples = delivered = prefetched = 0
    for row in rows:
        if row["step"] == steps:
            continue  # the last one is told twice
        if row["step"] < steps:
            samples = delivered = prefetched = 0  # counted anew: another optimizer is the clock
        steps = row["step"]
        if row["samples"] is None:
            samples += local_batch
            continue
        delivered_ahead = prefetched + int(row["samples"]) - delivered
        delivered = int(row["samples"])
        samples += min(delivered_ahead, local_batch)
        prefetched = min(max(0, delivered_ahead - local_batch), local_batch)
    return steps, samples


def learning_rates(rows: Sequence[Mapping[str, Any]], saved: int) -> dict[str, float | None]:
    """Return the learning rate of the step after the checkpoint, and what two steps make of it."""
    after = [row["lr"] for row in rows if row["step"] > saved and row.get("lr") is not None]
    upto = [row["lr"] for row in rows if row["step"] <= saved and row.get("lr") is not None]
    rows_ = after or upto[-1:]
    return {
        "next_lr": rows_[0] if rows_ else None,
        "lr_step": abs(rows_[min(2, len(rows_) - 1)] - rows_[0]) if rows_ else 0.0,
    }


def learning_rate_curve(rows: Sequence[Mapping[str, Any]], batch: int) -> tuple[tuple[int, float], ...]:
    """Return samples and learning rate of each step, thinned out evenly; the first and the last step are kept."""
    lr_by_step = {row["step"]: row["lr"] for row in rows if row.get("lr") is not None}
    points = [(step * batch, lr) for step, lr in sorted(lr_by_step.items())]
    stride = max(1, -(-len(points) // MAX_RATES))
    return tuple(points[::stride] + points[-1:] * ((len(points) - 1) % stride > 0))


def observed_schedule(rows: Sequence[Mapping[str, Any]], *, after: int) -> Schedule | None:
    """Return the scheduler that the rows tell of, as it stands in the first step after so many.

    None without one, or with too few steps to see how it counts.
    """
    points = [(row["step"], row["schedule"]) for row in rows if row.get("schedule")]
    if not points or points[-1][0] - points[0][0] < 2:
        return None
    counted = (points[-1][1]["at"] - points[0][1]["at"]) / (points[-1][0] - points[0][0])
    _, scheduler = next((row for row in points if row[0] > after), points[-1])
    return Schedule(
        name=scheduler["name"].rpartition(".")[2], at=scheduler["at"], per_step=counted > 0.5, moves=scheduler["moves"]
    )


def error_line(text: str, error: str) -> str:
    """Return the line of a traceback that tells its exception.

    Args:
        text: the traceback.
        error: full name of the exception's class.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [error]
    last_error_line = next((line for line in reversed(lines) if line.startswith(f"{error}:")), lines[-1])
    if WEIGHTS_ONLY not in text or "Unpickl" not in error:
        return last_error_line
    cause_line = next((line for line in lines if "Unsupported global" in line), last_error_line)
    return f"{error}: {cause_line.removeprefix('WeightsUnpickler error: ').partition('. Please use')[0]} ({HINT})"
