"""Tables of measured step times, as sets in which a search can be replayed.

A set is one app on one cluster with one number of GPUs per node, measured on several numbers of nodes; or within one node, on several
numbers of GPUs. Its candidates are offered to a search: sizes that are power-of-two multiples of the smallest, and for each the
batches measured nearest to the power-of-two multiples of the smallest batch. The other sizes and batches are only predicted.
"""

import itertools
import math
import warnings
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import pandas as pd

from tula_cli.models.time.step_time import Observation

Kind = Literal["one GPU a node", "several GPUs a node", "one node"]
KINDS: tuple[Kind, ...] = ("one GPU a node", "several GPUs a node", "one node")

MAX_OCTAVES = (
    0.45  # octaves: maximum distance of the nearest measured batch from a multiple; half an octave is in the middle
)
TRAINING_HOURS = 2.0  # duration of the training at its fastest, on which the allowed cost of probes depends
_PLACE = ["nodes", "gpus_per_node", "local_batch"]
COLUMNS = ("cluster", "app", "nodes", "gpus_per_node", "replicas", "local_batch", "step_time_s", "sync_time_s", "flag")


@dataclass(frozen=True, order=True)
class Where:
    """The configuration of a measured step time."""

    nodes: int
    gpus_per_node: int
    local_batch: int

    @property
    def replicas(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Offer:
    """The candidates of a search, which are known before it measures."""

    candidates: tuple[Where, ...]  # by size, then local batch
    batches: Mapping[Where, int] = field(repr=False)  # nominal global batches
    collective: str
    along: Literal["nodes", "gpus_per_node"]  # the quantity that counts as the size of the cluster
    samples: float  # of the training for which the search is made
    whole_steps: bool  # whether compute is not measured separately from synchronisation

    def size(self, where: Where) -> int:
        return where.nodes if self.along == "nodes" else where.gpus_per_node

    @property
    def by_size(self) -> dict[int, list[int]]:
        """Size -> local batches, both ascending, for the strategies of `tula_cli.services.search`."""
        result: dict[int, list[int]] = {}
        for where in self.candidates:
            result.setdefault(self.size(where), []).append(where.local_batch)
        return result

    def at(self, size: int, local_batch: int) -> Where:
        return next(w for w in self.candidates if self.size(w) == size and w.local_batch == local_batch)


@dataclass(frozen=True, eq=False)
class MeasuredSet:
    """All measurements of one app on one cluster and one node type. Hashed by identity."""

    cluster: str
    app: str
    kind: Kind
    gpus_per_node: int | None  # None within one node, where it varies
    flag: str
    truth: Mapping[Where, Observation] = field(repr=False)
    batches: Mapping[Where, int] = field(repr=False)  # candidate -> nominal global batch, smallest x 2^k
    collective: str = "ring"
    hours: float = TRAINING_HOURS
    again: Mapping[Where, tuple[float, ...]] = field(
        default_factory=dict, repr=False
    )  # step times by run, if there are several
    first: Mapping[Where, Observation] = field(
        default_factory=dict, repr=False
    )  # what probes see, if the reference is other runs

    def probe(self, place: Where) -> Observation:
        """Return the observation of a probe of a configuration."""
        return self.first.get(place, self.truth[place])

    @cached_property
    def noise(self) -> tuple[float, ...]:
        """The differences |ln ratio| of all pairs of runs of each repeated configuration."""
        pairs = (pair for times in self.again.values() for pair in itertools.combinations(times, 2))
        return tuple(abs(math.log(first / other)) for first, other in pairs)

    @cached_property
    def offer(self) -> Offer:
        along: Literal["nodes", "gpus_per_node"] = "gpus_per_node" if self.kind == "one node" else "nodes"
        rates = (self.truth[place].seconds / (place.replicas * place.local_batch) for place in self.batches)
        samples = self.hours * 3600 / min(rates)
        whole_steps = not any(seen.compute_time > 0 for place, seen in self.truth.items() if place.replicas > 1)
        return Offer(tuple(sorted(self.batches)), self.batches, self.collective, along, samples, whole_steps)

    @cached_property
    def offered_sizes(self) -> frozenset[int]:
        return frozenset(self.offer.by_size)

    @property
    def name(self) -> str:
        shape = "one node" if self.gpus_per_node is None else f"{self.gpus_per_node} GPU/node"
        return f"{self.cluster} {self.app} {shape}"


def load_sets(
    *paths: Path | str, flagged: bool = False, sizes: Iterable[int] | None = None, repeats: bool = False
) -> list[MeasuredSet]:
    """Return the sets of the tables that offer at least two sizes and two batches, ordered by name.

    If a configuration was measured several times, its time is the median; with `repeats`, a probe sees the first run, and the median of
    the others is the reference. A missing sync_time_s stays missing (nan).

    Args:
        paths: CSV files with COLUMNS; gpus_per_node is empty if nodes differ (those rows are left out).
        flagged: the rows whose flag is not ok, instead of those whose flag is.
        sizes: the offered sizes, instead of the power-of-two multiples of the smallest.
        repeats: compare with other runs than those of the probes. A column `run` identifies the runs; without it, the n-th row of each
            configuration belongs to the n-th run.

    Raises:
        ValueError: a table lacks a column, which the message names.
    """
    rows = read_tables(*paths)
    rows = rows[((rows.flag != "ok") == flagged) & rows.gpus_per_node.notna()]
    wanted = None if sizes is None else frozenset(sizes)
    results = [
        made for key, group in _group_rows(rows) if (made := _make_set(*key, group, wanted, repeats)) is not None
    ]
    return sorted(results, key=lambda s: (s.cluster, s.app, s.kind, s.gpus_per_node or 0))


def read_tables(*paths: Path | str) -> pd.DataFrame:
    """Return the usable rows of the tables in one table; of a run's results.csv only measured rows.

    Raises:
        ValueError: a table lacks a column, which the message names.
    """
    tables = []
    for path in paths:
        table = pd.read_csv(path)
        if "outcome" in table.columns:
            table = _read_run(table, Path(path))
        for column in ("nodes", "local_batch", "step_time_s", "sync_time_s", "gpus_per_node", "replicas"):
            if column in table.columns:
                table[column] = pd.to_numeric(table[column], errors="coerce")
        if missing := [column for column in COLUMNS if column not in table.columns]:
            raise ValueError(f"{path} has no column {', '.join(missing)}")
        if "run" not in table.columns:
            table["run"] = table.groupby(list(COLUMNS[:6]), dropna=False).cumcount()
        tables.append(table[[*COLUMNS, "run"]])
    rows = pd.concat(tables, ignore_index=True)
    usable = (rows.step_time_s > 0) & (rows.local_batch >= 1) & (rows.nodes >= 1)
    if not usable.all():
        warnings.warn(
            f"{int((~usable).sum())} rows without a number of nodes, a batch or a step time are left out", stacklevel=2
        )
    return rows[usable]


def _read_run(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Return the measurements of a run, named by its directory."""
    result = table[table.outcome == "measured"]
    return result.assign(
        cluster=path.resolve().parent.name,
        app=result.node_type.astype(object).fillna("probes"),
        replicas=result.nodes * result.gpus_per_node,
        sync_time_s=result.step_time_s - pd.to_numeric(result.compute_time_s, errors="coerce"),
        flag="ok",
    )


def _group_rows(rows: pd.DataFrame) -> Iterable[tuple[tuple[str, str, str, int | None], pd.DataFrame]]:
    for key, group in rows.groupby(["cluster", "app", "flag", "gpus_per_node"]):
        cluster, app, flag, gpus = cast("tuple[str, str, str, float]", key)
        yield (cluster, app, flag, int(gpus)), group
    for key, group in rows[rows.nodes == 1].groupby(["cluster", "app", "flag"]):
        yield (*cast("tuple[str, str, str]", key), None), group


def _make_set(
    cluster: str, app: str, flag: str, gpus: int | None, rows: pd.DataFrame, wanted: Set[int] | None, repeats: bool
) -> MeasuredSet | None:
    """Return the set; None if fewer than two sizes, or fewer than two batches, are offered."""
    first = _select_first_run(rows) if repeats else rows.iloc[:0]
    others = rows.drop(first.index)
    truth = {**_make_observations(first), **_make_observations(others)}
    batches = _choose_candidates(truth, inside=gpus is None, wanted=wanted)
    sizes = {w.gpus_per_node if gpus is None else w.nodes for w in batches}
    if len(sizes) < 2 or len({w.local_batch for w in batches}) < 2:
        return None
    kind: Kind = "one node" if gpus is None else "one GPU a node" if gpus == 1 else "several GPUs a node"
    return MeasuredSet(
        cluster, app, kind, gpus, flag, truth, batches, again=_read_repeats(rows), first=_make_observations(first)
    )


def _read_repeats(rows: pd.DataFrame) -> dict[Where, tuple[float, ...]]:
    """Return the step time in each run for the configurations with several runs."""
    runs = rows.groupby([*_PLACE, "run"], as_index=False, sort=False)[["step_time_s"]].median()
    times: dict[Where, tuple[float, ...]] = defaultdict(tuple)
    for row in runs.to_dict("records"):
        times[make_where(row)] += (float(row["step_time_s"]),)
    return {place: result for place, result in times.items() if len(result) > 1}


def _select_first_run(rows: pd.DataFrame) -> pd.DataFrame:
    """Return for each configuration the rows of the first run that contains it."""
    order = {run: place for place, run in enumerate(rows.run.unique())}
    places = rows.run.map(order)
    return rows[places == places.groupby([rows[column] for column in _PLACE]).transform("min")]


def _make_observations(rows: pd.DataFrame) -> dict[Where, Observation]:
    medians = rows.groupby(_PLACE, as_index=False)[["step_time_s", "sync_time_s"]].median()
    return {make_where(row): _make_observation(row) for row in medians.to_dict("records")}


def make_where(row: Mapping[Hashable, Any]) -> Where:
    return Where(int(row["nodes"]), int(row["gpus_per_node"]), int(row["local_batch"]))


def _make_observation(row: Mapping[Hashable, Any]) -> Observation:
    step, sync = float(row["step_time_s"]), float(row["sync_time_s"])
    return Observation(
        nodes=int(row["nodes"]),
        gpus_per_node=int(row["gpus_per_node"]),
        local_batch=int(row["local_batch"]),
        step_times=(step,),
        compute_time=step - sync,
    )


def _choose_candidates(measured: Iterable[Where], *, inside: bool, wanted: Set[int] | None) -> dict[Where, int]:
    """Return the candidates with their nominal global batches."""
    local_batches: dict[int, list[Where]] = defaultdict(list)
    for place in sorted(measured):
        local_batches[place.gpus_per_node if inside else place.nodes].append(place)
    smallest_batch = min((place.local_batch for places in local_batches.values() for place in places), default=1)
    smallest = min(local_batches, default=1)
    return {
        place: nominal * place.replicas
        for size, places in local_batches.items()
        if (math.log2(size / smallest) % 1 == 0 if wanted is None else size in wanted)
        for nominal, place in _find_multiples(places, smallest_batch)
    }


def _find_multiples(places: Sequence[Where], smallest: int) -> Iterable[tuple[int, Where]]:
    """Return the power-of-two multiples of the smallest batch, each with the nearest measured configuration."""
    nominal = smallest
    while nominal <= places[-1].local_batch * 2**MAX_OCTAVES:
        nearest = min(places, key=lambda place: abs(math.log2(place.local_batch / nominal)))
        if abs(math.log2(nearest.local_batch / nominal)) < MAX_OCTAVES:
            yield nominal, nearest
        nominal *= 2
