"""Forecasts of many configurations as columns: objectives, Pareto front and limits select among them by index.

Records (`Prediction`) are created only for rows that are shown, because creating one for each of a hundred thousand
takes seconds.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tula_cli.models.choice.columns import Flags, Floats, Ints
from tula_cli.run.records.recommendations import Prediction, SameProgress, TimeParts

_NESTED = ("parts", "same_progress")
_WHOLE = ("peak_memory",)  # that are None or a whole number; nan for None makes a column of floats
_OPTIONAL = (
    "step_low", "step_high", "hours_low", "hours_high", "peak_memory", "headroom", "step_fitted", "refresh_share", "energy", "node_hours",
    "kwh", "kwh_low", "kwh_high",
)  # fmt: skip


@dataclass(frozen=True)
class ProgressColumns:
    """`SameProgress` of many configurations, each field of shape (n,)."""

    epochs: Floats
    epochs_low: Floats
    epochs_high: Floats
    epochs_alike: Floats
    epochs_lossy: Floats
    hours: Floats
    hours_low: Floats
    hours_high: Floats
    cost: Floats


@dataclass(frozen=True)
class PartsColumns:
    """`TimeParts` of many configurations, each field of shape (n,)."""

    steps: Floats
    data: Floats  # nan where no probe tells
    evaluation: Floats
    checkpoints: Floats
    branches: Floats
    rest: Floats


@dataclass(frozen=True)
class Offers:
    """Configurations, each on a market, with the forecast of a training: the fields of `Prediction`, shape (n,).

    nan stands for None.
    """

    nodes: Ints
    batch: Ints
    local_batch: Ints
    step_time: Floats
    step_low: Floats
    step_high: Floats
    step_fitted: Floats
    hours: Floats
    hours_low: Floats
    hours_high: Floats
    cost: Floats
    node_hours: Floats
    peak_memory: Floats
    headroom: Floats
    measured: Flags
    further: Flags
    refresh_share: Floats
    energy: Floats
    kwh: Floats
    kwh_low: Floats
    kwh_high: Floats
    type: NDArray[np.str_]
    market: NDArray[np.str_]
    trained: NDArray[np.str_]
    pareto: Flags
    stages: NDArray[np.object_]  # of a batch that grows, a tuple of StageSteps each; None where there are none
    parts: PartsColumns | None = None
    same_progress: ProgressColumns | None = None

    @classmethod
    def of(cls, rows: Iterable[Prediction]) -> "Offers":
        """Convert records to columns; nested fields that only some of them have are left out."""
        records = list(rows)
        columns_by_name: dict[str, Any] = {
            field.name: np.array([getattr(row, field.name) for row in records], dtype=_get_dtype(field.name))
            for field in fields(cls)
            if field.name not in ("stages", *_NESTED)
        }
        return cls(
            **columns_by_name,
            stages=to_object_column([row.stages or None for row in records]),
            parts=_make_nested_columns(PartsColumns, [row.parts for row in records]),
            same_progress=_make_nested_columns(ProgressColumns, [row.same_progress for row in records]),
        )

    @classmethod
    def join(cls, offers: Sequence["Offers"]) -> "Offers":
        """Concatenate the rows of several tables, which all have the same nested fields."""
        return _map_columns(lambda *columns: np.concatenate(columns), *offers)

    def __len__(self) -> int:
        return len(self.nodes)

    def take(self, where: Flags | NDArray[np.intp] | Ints | Sequence[int]) -> "Offers":
        """Return the flagged rows, or those with the given indices in their order."""
        return _map_columns(lambda column: column[where], self)

    def ordered(self) -> "Offers":
        """Return the rows fastest first; ties by fewer nodes, then by the smaller batch."""
        return self.take(np.lexsort((self.batch, self.nodes, self.hours)))

    def configurations(self) -> Ints:
        """Return for each row the number of its configuration, from 0, which is the same on both markets."""
        kinds = np.unique(self.type, return_inverse=True)[1]
        order = np.lexsort((self.batch, self.nodes, kinds))
        keys = np.stack([kinds, self.nodes, self.batch])[:, order]
        numbers = np.zeros(len(self), dtype=np.int64)
        numbers[order[1:]] = np.cumsum((keys[:, 1:] != keys[:, :-1]).any(axis=0))
        return numbers

    def record(self, index: int) -> Prediction:
        """Return one row as a record."""
        return self.take([index]).records()[0]

    def records(self) -> tuple[Prediction, ...]:
        """Return all rows as records, in their order."""
        values_by_name = {
            field.name: _list_column_values(field.name, getattr(self, field.name))
            for field in fields(self)
            if field.name not in _NESTED
        }
        if self.parts is not None:
            values_by_name["parts"] = [TimeParts(**row) for row in _list_table_rows(self.parts, optional=("data",))]
        if self.same_progress is not None:
            values_by_name["same_progress"] = [SameProgress(**row) for row in _list_table_rows(self.same_progress)]
        return tuple(
            Prediction(**dict(zip(values_by_name, row, strict=True)))
            for row in zip(*values_by_name.values(), strict=True)
        )


Table = TypeVar("Table")


def _map_columns(of: Callable[..., NDArray[Any]], *tables: Table) -> Table:
    """Apply a function to each column of the tables, including nested ones, and return the table of the results."""
    columns: dict[str, Any] = {}
    for field in fields(tables[0]):  # type: ignore[arg-type]
        values = [getattr(table, field.name) for table in tables]
        if isinstance(values[0], PartsColumns | ProgressColumns):
            columns[field.name] = _map_columns(of, *values)
        else:
            columns[field.name] = None if values[0] is None else of(*values)
    return type(tables[0])(**columns)


def to_object_column(values: Sequence[object]) -> NDArray[np.object_]:
    """Return an object column of any values, including tuples, which numpy would otherwise expand to an array."""
    column = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        column[index] = value
    return column


def _get_dtype(name: str) -> type:
    if name in ("nodes", "batch", "local_batch"):
        return np.int64
    if name in ("measured", "further", "pareto"):
        return np.bool_
    return np.str_ if name in ("type", "market", "trained") else np.float64


def _make_nested_columns(kind: Any, rows: Sequence[Any]) -> Any:
    """Convert nested records to columns; None if any row has none."""
    if not rows or any(row is None for row in rows):
        return None
    return kind(**{f.name: np.array([getattr(row, f.name) for row in rows], dtype=float) for f in fields(kind)})


def _list_column_values(name: str, column: NDArray[Any]) -> list[Any]:
    """Convert a column to the values of record fields."""
    values = column.tolist()
    if name == "stages":
        return [value or () for value in values]
    if name in _OPTIONAL:
        values = [None if value != value else value for value in values]
    return [value if value is None else int(value) for value in values] if name in _WHOLE else values


def _list_table_rows(table: PartsColumns | ProgressColumns, *, optional: Sequence[str] = ()) -> list[dict[str, Any]]:
    columns = {field.name: getattr(table, field.name).tolist() for field in fields(table)}
    for name in optional:
        columns[name] = [None if value != value else value for value in columns[name]]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
