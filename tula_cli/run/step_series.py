"""The values recorded for every step of a training, and their format in steps.jsonl.

A line holds neighbouring rows with the same batch and number of steps, column by column; a column of equal values is
stored as one value. A row is one step and takes 30 to 40 bytes. In a long training a row covers several steps, so that
no file has more than `MOST_ROWS` rows.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

MOST_ROWS = 50_000
"""Maximum rows before neighbours are joined: 2 MB if a row is one step, 5 MB for the longest training."""

_COLUMNS = ("lr", "norm", "norm_low", "norm_high", "delta", "delta_low", "delta_high", "scaled", "factor", "last")
_DIGITS = {"lr": 6, "norm": 9, "delta": 4, "scaled": 4, "factor": 5, "last": 9}
"""Significant digits. Norms are single precision, which 9 digits represent exactly."""


class StepSpread(NamedTuple):
    """Mean, minimum and maximum of a value over the steps of a row that have one."""

    mean: float
    low: float
    high: float


class StepRow(NamedTuple):
    """One step, or neighbouring steps of a long training."""

    samples: int  # seen at the end of its last step
    steps: int
    batch: int  # global
    lr: float  # of its last step
    norm: StepSpread | None = None  # |G|
    delta: StepSpread | None = None  # Delta(G)
    scaled: float | None = None  # share of its steps
    factor: float | None = None  # mean over those
    last: float | None = None  # |G| of its last step: what the next one's change is of

    @classmethod
    def of_step(
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
        size = round_value("norm", norm)
        return cls(
            samples=samples,
            steps=1,
            batch=batch,
            lr=round_value("lr", lr) or 0.0,
            norm=_make_constant_spread(size),
            delta=_make_constant_spread(round_value("delta", delta)),
            scaled=None if scaled is None else float(scaled),
            factor=round_value("factor", factor) if scaled else None,
            last=size,
        )

    def follows(self, previous: "StepRow") -> bool:
        """Return whether this row directly follows another one with the same batch."""
        return self.batch == previous.batch and self.samples - self.steps * self.batch == previous.samples

    def join(self, later: "StepRow") -> "StepRow":
        """Return one row for the steps of this row and of the one that follows it."""
        own_scaled, other_scaled = self.scaled or 0.0, later.scaled or 0.0
        scaled = (self.steps * own_scaled + later.steps * other_scaled) / (self.steps + later.steps)
        has_scaled = self.scaled is not None or later.scaled is not None
        weights = (self.steps * own_scaled, later.steps * other_scaled)
        return StepRow(
            samples=later.samples,
            steps=self.steps + later.steps,
            batch=later.batch,
            lr=later.lr,
            norm=_join_spreads("norm", self.norm, later.norm, (self.steps, later.steps)),
            delta=_join_spreads("delta", self.delta, later.delta, (self.steps, later.steps)),
            scaled=round_value("scaled", scaled) if has_scaled else None,
            factor=round_value("factor", _compute_weighted_mean((self.factor, later.factor), weights)),
            last=later.last,
        )


@dataclass(frozen=True)
class StepSeries:
    """Every step of a training, oldest first, in columns of equal length.

    In a long training neighbouring steps share an entry.

    If `steps` is 1, mean, low and high are the same number.
    """

    samples: list[int] = field(default_factory=list)  # seen at the end of its last step
    steps: list[int] = field(default_factory=list)  # optimizer steps
    batch: list[int] = field(default_factory=list)  # global
    lr: list[float] = field(default_factory=list)  # of its last step
    norm: list[float | None] = field(
        default_factory=list
    )  # mean |G|, before it is clipped and scaled; None: not finite
    norm_low: list[float | None] = field(default_factory=list)
    norm_high: list[float | None] = field(default_factory=list)
    # mean Delta(G), Eq. 5; None in the first step of all and at another batch
    delta: list[float | None] = field(default_factory=list)
    delta_low: list[float | None] = field(default_factory=list)
    delta_high: list[float | None] = field(default_factory=list)
    scaled: list[float | None] = field(default_factory=list)  # share of the steps; None where the method scales none
    factor: list[float | None] = field(default_factory=list)  # mean factor of those that were scaled


def to_columns(rows: Iterable[StepRow]) -> StepSeries:
    """Convert rows to columns."""
    series = StepSeries()
    for row in rows:
        series.samples.append(row.samples)
        series.steps.append(row.steps)
        series.batch.append(row.batch)
        series.lr.append(row.lr)
        for name in ("norm", "delta"):
            value: StepSpread | None = getattr(row, name)
            for at, column in enumerate((name, f"{name}_low", f"{name}_high")):
                getattr(series, column).append(None if value is None else value[at])
        series.scaled.append(row.scaled)
        series.factor.append(row.factor)
    return series


def join_neighbours(
    rows: Sequence[StepRow], *, most: int, must_stay_apart: Callable[[int, int], bool]
) -> list[StepRow]:
    """Return the rows with neighbours joined.

    Args:
        rows: of a training.
        most: maximum steps per row.
        must_stay_apart: whether two rows must not be joined, by the samples at their ends.
    """
    joined_rows: list[StepRow] = []
    for row in rows:
        previous = joined_rows[-1] if joined_rows else None
        fits = previous is not None and row.follows(previous) and previous.steps + row.steps <= most
        if previous is not None and fits and not must_stay_apart(previous.samples, row.samples):
            joined_rows[-1] = previous.join(row)
        else:
            joined_rows.append(row)
    return joined_rows


# --- lines


def format_rows(rows: Iterable[StepRow]) -> str:
    """Format rows as lines of steps.jsonl."""
    return "".join(json.dumps(_parse_line(group), separators=(",", ":")) + "\n" for group in _group_alike_rows(rows))


def parse_rows(lines: Iterable[Mapping[str, Any]]) -> list[StepRow]:
    """Parse lines of steps.jsonl; damaged lines are left out."""
    return [row for line in lines for row in _parse_rows_of_line(line)]


def _group_alike_rows(rows: Iterable[StepRow]) -> Iterator[list[StepRow]]:
    number, previous = 0, None

    def place(row: StepRow) -> int:
        nonlocal number, previous
        if previous is not None and not (row.follows(previous) and row.steps == previous.steps):
            number += 1
        previous = row
        return number

    for _, group in groupby(rows, place):
        yield list(group)


def _parse_line(rows: Sequence[StepRow]) -> dict[str, Any]:
    first_row = rows[0]
    line: dict[str, Any] = {
        "samples": first_row.samples,
        "batch": first_row.batch,
        "steps": first_row.steps,
        "rows": len(rows),
    }
    line["lr"] = _compact_column([row.lr for row in rows])
    for name in ("norm", "delta"):
        values: list[StepSpread | None] = [getattr(row, name) for row in rows]
        for at, column in enumerate((name, f"{name}_low", f"{name}_high")[: 1 if first_row.steps == 1 else 3]):
            line[column] = _compact_column([None if value is None else value[at] for value in values])
    for name in ("scaled", "factor"):
        if any(getattr(row, name) is not None for row in rows):
            line[name] = _compact_column([getattr(row, name) for row in rows])
    if first_row.steps > 1:
        line["last"] = _compact_column([row.last for row in rows])
    return line


def _compact_column(values: Sequence[float | None]) -> Any:
    """Return a column for JSON: a single value if all are equal, whole numbers without a decimal point."""
    rounded = [int(value) if value is not None and value.is_integer() else value for value in values]
    return rounded[0] if all(value == rounded[0] for value in rounded) else rounded


def is_step_line(line: Mapping[str, Any]) -> bool:
    """Return whether a line has all columns of its rows; a lost node may leave a damaged one."""
    return _read_line(line) is not None


def _read_line(line: Mapping[str, Any]) -> tuple[tuple[int, int, int, int], list[list[float | None]]] | None:
    """Return (samples, batch, steps, rows) of a line and its columns; None if it is damaged."""
    header = [line.get(name) for name in ("samples", "batch", "steps", "rows")]
    if not all(isinstance(value, int) and 0 < value < 10**18 for value in header):
        return None
    samples, batch, steps, count = (int(value or 0) for value in header)
    if count > 2 * MOST_ROWS or "lr" not in line:
        return None
    values = [column for name in _COLUMNS if (column := _read_column(line.get(name), count)) is not None]
    return ((samples, batch, steps, count), values) if len(values) == len(_COLUMNS) else None


def _parse_rows_of_line(line: Mapping[str, Any]) -> Iterator[StepRow]:
    """Yield the rows of a line; nothing if it is damaged."""
    if (line_parts := _read_line(line)) is None:
        return
    (samples, batch, steps, count), columns = line_parts
    samples_at_ends = range(samples, samples + count * steps * batch, steps * batch)
    for at, row in zip(samples_at_ends, zip(*columns, strict=True), strict=True):
        lr, norm, low, high, delta, least, most, scaled, factor, last_norm = row
        yield StepRow(
            samples=at,
            steps=steps,
            batch=batch,
            lr=lr or 0.0,
            norm=_make_constant_spread(norm) if low is None or high is None else StepSpread(norm or 0.0, low, high),
            delta=_make_constant_spread(delta)
            if least is None or most is None
            else StepSpread(delta or 0.0, least, most),
            scaled=scaled,
            factor=factor,
            last=norm if steps == 1 else last_norm,
        )


def _read_column(content: Any, count: int) -> list[float | None] | None:
    """Return the `count` values of a column; None if it is not a valid column."""
    values = content if isinstance(content, list) else [content] * count
    if len(values) != count or not all(value is None or isinstance(value, int | float) for value in values):
        return None
    return [None if value is None else float(value) for value in values]


# --- numbers


def round_value(name: str, value: float | None) -> float | None:
    """Round a value to the significant digits of its column; None if it is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{_DIGITS[name]}g}")


def _make_constant_spread(value: float | None) -> StepSpread | None:
    return None if value is None else StepSpread(value, value, value)


def _join_spreads(
    name: str, first: StepSpread | None, second: StepSpread | None, weights: tuple[float, float]
) -> StepSpread | None:
    if first is None or second is None:
        return first or second
    mean = round_value(name, _compute_weighted_mean((first.mean, second.mean), weights))
    assert mean is not None
    low, high = min(first.low, second.low), max(first.high, second.high)
    return StepSpread(min(max(mean, low), high), low, high)


def _compute_weighted_mean(values: tuple[float | None, float | None], weights: tuple[float, float]) -> float | None:
    """Return the weighted mean of the values that are known and have a weight; None if there are none."""
    known_values = [
        (value, weight) for value, weight in zip(values, weights, strict=True) if value is not None and weight
    ]
    total = sum(weight for _, weight in known_values)
    return sum(value * weight for value, weight in known_values) / total if known_values else None
