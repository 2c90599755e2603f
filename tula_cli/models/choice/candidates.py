"""The table of candidates: what can be chosen, and the forecast of a training with each."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tula_cli.models.choice.grid import Config
from tula_cli.query import Query
from tula_cli.run.frames import convert_frame_to_records, list_columns, make_column_frame
from tula_cli.run.records.recommendations import Prediction, StageSteps

if TYPE_CHECKING:
    import pandas as pd
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def convert_to_columns(configs: Sequence[Config]) -> tuple[Ints, Ints]:
    """Convert configurations to arrays of nodes and batches, shape (n,)."""
    pairs = np.array(configs, dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def convert_to_configs(nodes: Ints, batch: Ints) -> list[Config]:
    """Convert arrays of nodes and batches, shape (n,), to configurations."""
    return [Config(*nodes_and_batch) for nodes_and_batch in zip(nodes.tolist(), batch.tolist(), strict=True)]


def compute_ratio_distances(known_values: Sequence[int], at: Ints | Floats) -> Floats:
    """Return the ratio, at least 1, between each value of `at` and each known value, shape (len(at), len(known))."""
    column, other = at[:, None], np.asarray(known_values, dtype=float)[None, :]
    ratios: Floats = np.maximum(column / other, other / column)
    return ratios


def find_nearest_columns(*distances: Floats) -> Ints:
    """Return for each row the column of the least distance, shape (n,); ties go to the next distance, then the first.

    Args:
        distances: in order of priority, each of shape (n, m).
    """
    candidates = np.ones(distances[0].shape, dtype=bool)
    for distance in distances:
        here = np.where(candidates, distance, np.inf)
        candidates &= here == here.min(axis=1, keepdims=True)
    nearest_index: Ints = candidates.argmax(axis=1)
    return nearest_index


def apply_to_distinct_values(function: Callable[[int], float], values: Ints | int) -> Any:
    """Apply a function to a number, or to each value of an array, shape (n,), calling it once per distinct value."""
    if isinstance(values, int):
        return function(values)
    distinct, where = np.unique(values, return_inverse=True)
    values_by_position: NDArray[Any] = np.array([function(value) for value in distinct.tolist()])[where]
    return values_by_position


@dataclass(frozen=True)
class StageTable:
    """The stages of trainings whose batch grows: arrays of shape (n, stages), ascending by batch.

    The last column is the stage of a training's own batch. Where a training has no such stage, its batch is 0.
    """

    nodes: Ints
    batch: Ints
    steps: Floats  # optimizer steps of the stage in the whole training
    share: Floats  # share of the training's epochs
    step_time: Floats  # seconds per optimizer step
    step_low: Floats  # nan if unknown
    step_high: Floats

    @classmethod
    def concatenate(cls, tables: Sequence["StageTable"]) -> "StageTable":
        """Return the rows of several tables, one after the other."""
        if all(table is NO_STAGES for table in tables):
            return NO_STAGES
        width = max(table.batch.shape[1] for table in tables)

        def join_columns(name: str) -> NDArray[Any]:
            columns = [getattr(table, name) for table in tables]
            joined = np.zeros((sum(map(len, columns)), width), dtype=columns[0].dtype)
            at = 0
            for column in columns:
                joined[at : at + len(column), width - column.shape[1] :] = column
                at += len(column)
            return joined

        return cls(**{field.name: join_columns(field.name) for field in fields(cls)})

    def select_rows(self, rows: Ints) -> "StageTable":
        """Return the rows with the given indices, in their order."""
        return self if self is NO_STAGES else StageTable(**{name: column[rows] for name, column in vars(self).items()})

    def count_changes(self) -> Ints:
        """Return how often each training changes its nodes, shape (n,)."""
        ascending = np.sort(np.where(self.batch > 0, self.nodes, self.nodes[:, -1:]), axis=1)
        changes: Ints = (np.diff(ascending, axis=1) > 0).sum(axis=1)
        return changes

    def build_records(self, row: int) -> tuple[StageSteps, ...]:
        """Return the stages of a training before its own batch."""
        if self is NO_STAGES:
            return ()
        return tuple(
            StageSteps(
                batch=int(self.batch[row, stage]),
                steps=int(self.steps[row, stage]),
                share=float(self.share[row, stage]),
                step_time=float(self.step_time[row, stage]),
                step_low=None if math.isnan(low := float(self.step_low[row, stage])) else low,
                step_high=None if math.isnan(high := float(self.step_high[row, stage])) else high,
                nodes=None if (nodes := int(self.nodes[row, stage])) == self.nodes[row, -1] else nodes,
            )
            for stage in np.flatnonzero(self.batch[row, :-1]).tolist()
        )


def _make_rows_without_stages(count: int) -> StageTable:
    dtypes = (np.int64 if field.name in ("nodes", "batch") else np.float64 for field in fields(StageTable))
    columns: list[Any] = [np.zeros((count, 0), dtype=dtype) for dtype in dtypes]
    return StageTable(*columns)


NO_STAGES = _make_rows_without_stages(0)
"""The stages of trainings whose batch is constant."""


class Candidates:
    """Configurations, each on a market, with the forecast of a training: a row each of one DataFrame.

    The columns are the fields of `Prediction`, which describes them with their units; those of its nested records have
    the record's name before theirs (`parts_steps`, `same_progress_hours`). nan stands for None. Objectives, limits and
    the Pareto front work on columns; records are only made of rows that are shown, because 100,000 take seconds. Column
    `stages` is the row of each configuration in the attribute `stages`.
    """

    def __init__(self, frame: "pd.DataFrame", stages: StageTable = NO_STAGES) -> None:
        self.frame, self.stages = frame, stages

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any], stages: StageTable = NO_STAGES) -> "Candidates":
        """Make a table of arrays of shape (n,), by name, and their stages; numbers that are not given are unknown."""
        count = len(columns["nodes"])
        empty = {
            column.name: np.full(count, np.nan if column.dtype == "float64" else False)
            for column in list_columns(Prediction)
            if column.dtype in ("float64", "bool")
        }
        return cls(make_column_frame({**empty, **columns, "stages": np.arange(count)}), stages)

    @classmethod
    def from_predictions(cls, rows: Sequence[Prediction]) -> "Candidates":
        """Make a table of records, without the stages of a batch that grows."""
        columns = (column for column in list_columns(Prediction) if column.name != "stages")
        return cls.from_columns(
            {column.name: np.array([column.get_value(row) for row in rows], dtype=column.dtype) for column in columns}
        )

    @classmethod
    def concatenate(cls, tables: Sequence["Candidates"]) -> "Candidates":
        """Return the rows of several tables, one after the other."""
        import pandas as pd

        stages = tables[0].stages
        frame = pd.concat([table.frame for table in tables], ignore_index=True)
        if any(table.stages is not stages for table in tables):
            stages = StageTable.concatenate([table._select_stages() for table in tables])
            frame = frame.assign(stages=np.arange(len(frame)))
        return cls(frame, stages)

    def _select_stages(self) -> StageTable:
        """Return the stages with a row for each configuration, also for those whose batch is constant."""
        if self.stages is NO_STAGES:
            return _make_rows_without_stages(len(self))
        return self.stages.select_rows(self["stages"])

    def __len__(self) -> int:
        return len(self.frame)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return a column as an array, shape (n,)."""
        return self.frame[name].to_numpy()

    def select_rows(self, rows: Flags | Ints | NDArray[np.intp] | Sequence[int]) -> "Candidates":
        """Return the flagged rows, or those with the given indices, in their order."""
        indices = np.asarray(rows)
        indices = np.flatnonzero(indices) if indices.dtype == bool else indices.astype(np.intp)
        return Candidates(self.frame.take(indices).reset_index(drop=True), self.stages)

    def with_columns(self, columns: Mapping[str, Any]) -> "Candidates":
        """Return the table with other values in some columns; a single value stands for every row."""
        return Candidates(self.frame.assign(**columns), self.stages)

    def sort_by_time(self) -> "Candidates":
        """Return the rows fastest first; ties by fewer nodes, then by the smaller batch."""
        return self.select_rows(np.lexsort((self["batch"], self["nodes"], self["hours"])))

    def list_configurations(self) -> list[Config]:
        """Return the configuration of each row."""
        return convert_to_configs(self["nodes"], self["batch"])

    def number_configurations(self) -> Ints:
        """Return for each row the number of its configuration, from 0, which is the same on both markets."""
        return np.asarray(self.frame.groupby(["type", "nodes", "batch"]).ngroup(), dtype=np.int64)

    def select_matching_rows(self, **values: Any) -> "Candidates":
        """Return the rows with the given values: `select(type="a100", market="spot")`."""
        selected = np.ones(len(self), dtype=bool)
        for name, value in values.items():
            selected &= self[name] == value
        return self.select_rows(selected)

    def satisfying(self, query: Query) -> "Candidates":
        """Return the rows within all limits of a query, in their order; none if no row is."""
        within = np.ones(len(self), dtype=bool)
        for limit in list_limits(query):
            within &= limit.flag_admitted_rows(self)
        return self.select_rows(within)

    def make_prediction(self, index: int) -> Prediction:
        """Return one row as a record."""
        return self.select_rows([index]).make_predictions()[0]

    def make_predictions(self) -> tuple[Prediction, ...]:
        """Return all rows as records, in their order."""
        stages: Any = [self.stages.build_records(row) for row in self["stages"].tolist()]
        return convert_frame_to_records(self.frame.assign(stages=stages), Prediction)

    def with_pareto_front(self) -> "Candidates":
        """Mark the rows of the Pareto front of time, cost and, if all rows have it, energy."""
        energy = [] if np.isnan(self["kwh"]).any() else [self["kwh"]]
        points: Floats = np.stack([self["hours"], self["cost"], *energy], axis=1)
        return self.with_columns({"pareto": find_pareto_front(points)})


# --- Limits

LimitOption = Literal["max_nodes", "max_batch", "min_efficiency", "deadline_hours", "budget"]


@dataclass(frozen=True)
class Limit:
    """A limit of a query on a column of the candidates: an upper one, or a lower one for `min_efficiency`."""

    option: LimitOption
    column: str
    bound: float

    def flag_admitted_rows(self, candidates: Candidates) -> Flags:
        """Return which rows are within the limit, shape (n,); rows whose value is unknown are not."""
        values = candidates[self.column]
        within: Flags = values >= self.bound if self.option == "min_efficiency" else values <= self.bound
        return within

    def find_closest(self, candidates: Candidates) -> Prediction:
        """Return the row closest to the limit if none is within it; of several, the fastest."""
        values = candidates[self.column]
        distance = -values if self.option == "min_efficiency" else values
        return candidates.make_prediction(int(np.lexsort((candidates["hours"], distance))[0]))


def list_limits(query: Query) -> list[Limit]:
    """Return the limits that a query sets; messages name the first of them that excludes every row."""
    progress = "same_progress_" if query.compares_at_equal_progress else ""
    limits: list[tuple[LimitOption, str, float | None]] = [
        ("max_nodes", "nodes", query.max_nodes),
        ("max_batch", "batch", query.max_batch),
        ("min_efficiency", "scaling_efficiency", query.min_efficiency),
        ("deadline_hours", f"{progress}hours", query.deadline_hours),
        ("budget", f"{progress}cost", query.budget),
    ]
    return [Limit(option, column, bound) for option, column, bound in limits if bound is not None]


# --- The Pareto front


def find_pareto_front(points: ArrayLike) -> Flags:
    """Return for each point whether no other is as small in all values and smaller in one, shape (n,).

    Equal points do not dominate each other: either all of them are in the front, or none.

    Args:
        points: two or three values to minimise, for example time and cost, shape (n, values).
    """
    values = np.asarray(points, dtype=float)
    if not len(values):
        return np.zeros(0, dtype=bool)
    order = np.lexsort(values.T[::-1])
    new = np.append(True, (values[order[1:]] != values[order[:-1]]).any(axis=1))
    # sorted by the first value, so that later points do not dominate earlier ones
    remaining_values = values[order[new]][:, 1:].tolist()
    inside = np.array(_find_undominated_points([(row[0], row[-1]) for row in remaining_values]))
    on_front = np.zeros(len(values), dtype=bool)
    on_front[order] = inside[np.cumsum(new) - 1]
    return on_front


def _find_undominated_points(points: list[tuple[float, float]]) -> list[bool]:
    """Return for each point whether no earlier one is as small in both values."""
    firsts: list[float] = []  # first values of the undominated points so far, ascending; their second values descend
    seconds: list[float] = []
    inside = []
    for first, second in points:
        count_before = bisect_right(firsts, first)
        inside.append(not count_before or seconds[count_before - 1] > second)
        if not inside[-1]:
            continue
        start = end = bisect_left(firsts, first, hi=count_before)
        while end < len(seconds) and seconds[end] >= second:
            end += 1
        firsts[start:end], seconds[start:end] = [first], [second]
    return inside
