"""Stored steps are read back as they were written, and joined rows describe all their steps."""

import json
import math

import pytest

from tula_cli.run.step_series import StepRow, convert_to_columns, format_rows, join_adjacent_rows, parse_rows


def steps(count: int, *, batch: int = 8, start: int = 0, scaled: bool = False) -> list[StepRow]:
    return [
        StepRow.from_step(
            samples=start + (at + 1) * batch,
            batch=batch,
            lr=0.1 / (1 + at // 3),
            norm=2 + math.sin(at),
            delta=None if at == 0 else abs(math.cos(at)),
            scaled=at % 2 == 0 if scaled else None,
            factor=1.5 if scaled else None,
        )
        for at in range(count)
    ]


def back(rows: list[StepRow]) -> list[StepRow]:
    return parse_rows(map(json.loads, format_rows(rows).splitlines()))


@pytest.mark.parametrize("scaled", [False, True])
def test_rows_come_back_as_they_were_written(scaled: bool) -> None:
    rows = [*steps(7, scaled=scaled), *steps(4, batch=16, start=56, scaled=scaled), *steps(2, batch=16, start=1000)]
    rows[2] = StepRow.from_step(samples=24, batch=8, lr=0.1, norm=math.inf, delta=math.nan)
    assert back(rows) == rows
    assert len(format_rows(rows).splitlines()) == 3
    wide = join_adjacent_rows(rows, max_rows=4, must_stay_apart=lambda *_: False)
    assert back(wide) == wide and max(row.steps for row in wide) == 4


def test_a_row_of_one_step_takes_some_30_bytes() -> None:
    assert len(format_rows(steps(1000))) < 30 * 1000
    assert len(format_rows(steps(1000, scaled=True))) < 36 * 1000


def test_a_joined_row_has_mean_least_and_largest_of_its_steps() -> None:
    rows = steps(4, scaled=True)
    (row,) = join_adjacent_rows(rows, max_rows=4, must_stay_apart=lambda *_: False)
    norms = [part.norm for part in rows if part.norm is not None]
    deltas = [part.delta for part in rows if part.delta is not None]
    assert (row.samples, row.steps, row.batch, row.lr, row.last) == (32, 4, 8, rows[-1].lr, rows[-1].last)
    assert (row.norm, row.norm_low, row.norm_high) == (pytest.approx(sum(norms) / 4), min(norms), max(norms))
    assert (row.delta_low, row.delta_high) == (min(deltas), max(deltas))  # the first step has none
    assert (row.scaled, row.factor) == (0.5, 1.5)


def test_rows_of_other_batches_and_on_both_sides_of_a_mark_stay_apart() -> None:
    rows = [*steps(4), *steps(4, batch=16, start=32)]
    result = join_adjacent_rows(rows, max_rows=8, must_stay_apart=lambda before, after: before <= 64 < after)
    assert [(row.samples, row.steps, row.batch) for row in result] == [(32, 4, 8), (64, 2, 16), (96, 2, 16)]


def test_damaged_lines_are_left_out() -> None:
    whole = json.loads(format_rows(steps(3)))
    damaged = [{}, {**whole, "rows": 4}, {**whole, "norm": ["x"] * 3}, {**whole, "steps": 0}, {**whole, "rows": 10**12}]
    assert parse_rows([*damaged, whole]) == steps(3)


def test_columns_are_equally_long_and_plain() -> None:
    result = convert_to_columns(steps(5, scaled=True))
    assert {len(column) for column in vars(result).values()} == {5}
    assert result.norm == result.norm_low == result.norm_high
    assert result.factor == [1.5, None, 1.5, None, 1.5] and result.scaled == [1, 0, 1, 0, 1]
    assert convert_to_columns([]).samples == []


def test_a_damaged_row_without_bounds_is_joined_by_its_mean() -> None:
    first, second = steps(2)
    damaged = second._replace(norm_low=None, norm_high=None)
    joined = first.join_next_row(damaged)
    assert (joined.norm_low, joined.norm_high) == (first.norm_low, damaged.norm)
