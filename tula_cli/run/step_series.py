"""The values recorded for every step of a training, and their format in steps.jsonl.

A line holds neighbouring rows with the same batch and number of steps, column by column; a column of equal values is
stored as one value. A row is one step and takes 30 to 40 bytes. In a long training a row covers several steps, so that
no file has more than `MAX_ROWS_UNJOINED` rows.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

MAX_ROWS_UNJOINED = 50_000
"""Maximum rows before neighbours are joined: 2 MB if a row is one step, 5 MB for the longest training."""

_COLUMNS = ("lr", "norm", "norm_low", "norm_high", "delta", "delta_low", "delta_high", "scaled", "factor", "last")
_SAME_IN_ONE_STEP = {
    "norm_low": "norm",
    "norm_high": "norm",
    "delta_low": "delta",
    "delta_high": "delta",
    "last": "norm",
}
"""Columns that equal another one if a row is one step, and are then not stored."""
_SIGNIFICANT_DIGITS = {"lr": 6, "norm": 9, "delta": 4, "scaled": 4, "factor": 5, "last": 9}
"""Significant digits. Norms are single precision, which 9 digits represent exactly."""


class StepRow(NamedTuple):
    """One step, or neighbouring steps of a long training; None where no step has a finite value.

    In a row of one step, mean, low and high are the same number.
    """

    samples: int  # samples trained at the end of its last step
    steps: int  # optimizer steps
    batch: int  # global
    lr: float  # learning rate of its last step
    norm: float | None = None  # mean |G|
    norm_low: float | None = None
    norm_high: float | None = None
    delta: float | None = None  # mean Delta(G)
    delta_low: float | None = None
    delta_high: float | None = None
    scaled: float | None = None  # share of its steps in which gradients were scaled
    factor: float | None = None  # mean scaling factor over these steps
    last: float | None = None  # |G| of its last step, relative to which Delta(G) of the next step is computed

    @classmethod
    def from_step(
        cls,
        *,
        samples: int,
        batch: int,
        lr: float,
        norm: float | None,
        delta: float | None,
        scaled: bool | None = None,
        factor: float | None = None,
    ) -> "StepRow":
        """Return the row of one step; a number that is not finite becomes None."""
        size, change = round_value("norm", norm), round_value("delta", delta)
        share = None if scaled is None else float(scaled)
        mean_factor = round_value("factor", factor) if scaled else None
        rate = round_value("lr", lr) or 0.0
        return cls(samples, 1, batch, rate, size, size, size, change, change, change, share, mean_factor, size)

    def is_directly_after(self, previous: "StepRow") -> bool:
        """Return whether this row directly follows another one with the same batch."""
        return self.batch == previous.batch and self.samples - self.steps * self.batch == previous.samples

    def join_next_row(self, later: "StepRow") -> "StepRow":
        """Return one row for the steps of this row and of the one that follows it."""
        earlier_share, later_share = self.scaled or 0.0, later.scaled or 0.0
        weights = (self.steps * earlier_share, later.steps * later_share)
        scaled = sum(weights) / (self.steps + later.steps)
        has_scaled = self.scaled is not None or later.scaled is not None
        norm, norm_low, norm_high = _join_spreads("norm", self, later)
        delta, delta_low, delta_high = _join_spreads("delta", self, later)
        return later._replace(
            steps=self.steps + later.steps,
            norm=norm,
            norm_low=norm_low,
            norm_high=norm_high,
            delta=delta,
            delta_low=delta_low,
            delta_high=delta_high,
            scaled=round_value("scaled", scaled) if has_scaled else None,
            factor=round_value("factor", _compute_weighted_mean((self.factor, later.factor), weights)),
        )


@dataclass(frozen=True)
class StepSeries:
    """Every step of a training, oldest first, in columns of equal length.

    In a long training neighbouring steps share an entry.

    If `steps` is 1, mean, low and high are the same number.
    """

    samples: list[int] = field(default_factory=list)  # samples trained at the end of the last step of the entry
    steps: list[int] = field(default_factory=list)  # optimizer steps
    batch: list[int] = field(default_factory=list)  # global
    lr: list[float] = field(default_factory=list)  # learning rate of the last step of the entry
    norm: list[float | None] = field(default_factory=list)  # mean |G| before clipping and scaling; None if not finite
    norm_low: list[float | None] = field(default_factory=list)
    norm_high: list[float | None] = field(default_factory=list)
    # mean Delta(G), Eq. 5; None in the first step, and in the first step at another batch
    delta: list[float | None] = field(default_factory=list)
    delta_low: list[float | None] = field(default_factory=list)
    delta_high: list[float | None] = field(default_factory=list)
    scaled: list[float | None] = field(default_factory=list)  # share of scaled steps; None if the method scales none
    factor: list[float | None] = field(default_factory=list)  # mean scaling factor over the scaled steps


def convert_to_columns(rows: Sequence[StepRow]) -> StepSeries:
    return StepSeries(**{field.name: [getattr(row, field.name) for row in rows] for field in fields(StepSeries)})


def join_adjacent_rows(
    rows: Sequence[StepRow], *, max_rows: int, must_stay_apart: Callable[[int, int], bool]
) -> list[StepRow]:
    """Return the rows with neighbours joined.

    Args:
        max_rows: maximum steps per row.
        must_stay_apart: whether two rows must not be joined, by the samples at their ends.
    """
    joined_rows: list[StepRow] = []
    for row in rows:
        previous = joined_rows[-1] if joined_rows else None
        fits = previous is not None and row.is_directly_after(previous) and previous.steps + row.steps <= max_rows
        if previous is not None and fits and not must_stay_apart(previous.samples, row.samples):
            joined_rows[-1] = previous.join_next_row(row)
        else:
            joined_rows.append(row)
    return joined_rows


def format_rows(rows: Iterable[StepRow]) -> str:
    """Format rows as lines of steps.jsonl."""
    return "".join(json.dumps(_make_line(group), separators=(",", ":")) + "\n" for group in _group_rows_of_line(rows))


def parse_rows(lines: Iterable[Mapping[str, Any]]) -> list[StepRow]:
    """Parse lines of steps.jsonl; damaged lines are left out."""
    return [row for line in lines for row in _parse_rows_of_line(line)]


def _group_rows_of_line(rows: Iterable[StepRow]) -> Iterator[list[StepRow]]:
    group: list[StepRow] = []
    for row in rows:
        if group and not (row.is_directly_after(group[-1]) and row.steps == group[-1].steps):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _make_line(rows: Sequence[StepRow]) -> dict[str, Any]:
    """Return several rows as one line of the file, without columns that readers can derive."""
    first_row = rows[0]
    line: dict[str, Any] = {
        "samples": first_row.samples,
        "batch": first_row.batch,
        "steps": first_row.steps,
        "rows": len(rows),
    }
    for name in _COLUMNS:
        values = [getattr(row, name) for row in rows]
        is_repeated = first_row.steps == 1 and name in _SAME_IN_ONE_STEP
        is_unused = name in ("scaled", "factor") and all(value is None for value in values)
        if not (is_repeated or is_unused):
            line[name] = _compact_column(values)
    return line


def _compact_column(values: Sequence[float | None]) -> Any:
    """Return a column for JSON: a single value if all are equal, whole numbers without a decimal point."""
    rounded = [int(value) if value is not None and value.is_integer() else value for value in values]
    return rounded[0] if all(value == rounded[0] for value in rounded) else rounded


def is_step_line(line: Mapping[str, Any]) -> bool:
    """Return whether a line has all columns; a lost node may leave a damaged one."""
    return _read_line(line) is not None


def _read_line(line: Mapping[str, Any]) -> tuple[tuple[int, int, int, int], list[list[float | None]]] | None:
    """Return (samples, batch, steps, rows) of a line and its columns; None if it is damaged."""
    header = [line.get(name) for name in ("samples", "batch", "steps", "rows")]
    if not all(isinstance(value, int) and 0 < value < 10**18 for value in header):
        return None
    samples, batch, steps, count = (int(value or 0) for value in header)
    if count > 2 * MAX_ROWS_UNJOINED or "lr" not in line:
        return None
    values = [column for name in _COLUMNS if (column := _read_column(line.get(name), count)) is not None]
    return ((samples, batch, steps, count), values) if len(values) == len(_COLUMNS) else None


def _parse_rows_of_line(line: Mapping[str, Any]) -> Iterator[StepRow]:
    if (line_parts := _read_line(line)) is None:
        return
    (samples, batch, steps, count), columns = line_parts
    samples_at_ends = range(samples, samples + count * steps * batch, steps * batch)
    for at, values in zip(samples_at_ends, zip(*columns, strict=True), strict=True):
        row = StepRow(at, steps, batch, values[0] or 0.0, *values[1:])
        if steps == 1:
            row = row._replace(**{name: getattr(row, other) for name, other in _SAME_IN_ONE_STEP.items()})
        yield row


def _read_column(content: Any, count: int) -> list[float | None] | None:
    values = content if isinstance(content, list) else [content] * count
    if len(values) != count or not all(value is None or isinstance(value, int | float) for value in values):
        return None
    return [None if value is None else float(value) for value in values]


def round_value(name: str, value: float | None) -> float | None:
    """Round a value to the significant digits of its column; None if it is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{_SIGNIFICANT_DIGITS[name]}g}")


def _join_spreads(name: str, first: StepRow, second: StepRow) -> list[float | None]:
    """Return mean, low and high of a value over the steps of two rows."""
    columns = (name, f"{name}_low", f"{name}_high")
    known_rows = [row for row in (first, second) if getattr(row, name) is not None]
    if len(known_rows) < 2:
        return [getattr((*known_rows, first)[0], column) for column in columns]
    means, lows, highs = ([getattr(row, column) for row in known_rows] for column in columns)
    mean = round_value(name, _compute_weighted_mean(means, (first.steps, second.steps)))
    assert mean is not None
    # a damaged row may have no low and high; use its mean
    low, high = (
        choose(value if bound is None else bound for value, bound in zip(means, bounds, strict=True))
        for choose, bounds in ((min, lows), (max, highs))
    )
    return [min(max(mean, low), high), low, high]


def _compute_weighted_mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Return the weighted mean of the values that are known and have a weight; None if there are none."""
    known_values = [
        (value, weight) for value, weight in zip(values, weights, strict=True) if value is not None and weight
    ]
    total = sum(weight for _, weight in known_values)
    return sum(value * weight for value, weight in known_values) / total if known_values else None
