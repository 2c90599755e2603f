"""Tables of measured step times, as sets in which a search can be replayed.

A set is one app on one cluster with one number of GPUs a node, measured on several numbers of nodes; or inside one node,
on several numbers of GPUs. What is offered to a search are its candidates: sizes that are power-of-two multiples of the
smallest, and of each the batch measured nearest to every power-of-two multiple of the smallest batch. The other sizes
and the batches in between are there to be predicted.
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

NEAR = 0.45  # octaves: how far the batch measured nearest to a multiple may be from it; half an octave is in between
HOURS = 2.0  # that a training takes where it is fastest: what a probe may cost depends on it
_PLACE = ["nodes", "gpus_per_node", "local_batch"]
COLUMNS = ("cluster", "app", "nodes", "gpus_per_node", "replicas", "local_batch", "step_time_s", "sync_time_s", "flag")


@dataclass(frozen=True, order=True)
class Where:
    """What a step time is measured at."""

    nodes: int
    gpus_per_node: int
    local_batch: int

    @property
    def replicas(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Offer:
    """What a search knows before it measures: where it may."""

    candidates: tuple[Where, ...]  # by size, then local batch
    batches: Mapping[Where, int] = field(repr=False)  # nominal global batches
    collective: str
    along: Literal["nodes", "gpus_per_node"]  # what the size of the cluster is counted in
    samples: float  # of the training that the search is for
    whole_steps: bool  # compute is not measured apart from synchronisation

    def size(self, where: Where) -> int:
        return where.nodes if self.along == "nodes" else where.gpus_per_node

    @property
    def by_size(self) -> dict[int, list[int]]:
        """Size to local batches, both ascending: what the strategies of `tula_cli.services.search` take."""
        result: dict[int, list[int]] = {}
        for where in self.candidates:
            result.setdefault(self.size(where), []).append(where.local_batch)
        return result

    def at(self, size: int, local_batch: int) -> Where:
        return next(w for w in self.candidates if self.size(w) == size and w.local_batch == local_batch)


@dataclass(frozen=True, eq=False)
class MeasuredSet:
    """All that was measured of one app on one cluster and one shape of node. Hashed by identity."""

    cluster: str
    app: str
    kind: Kind
    gpus_per_node: int | None  # None inside one node, where it is what changes
    flag: str
    truth: Mapping[Where, Observation] = field(repr=False)
    batches: Mapping[Where, int] = field(repr=False)  # candidate to its nominal global batch, smallest x 2^k
    collective: str = "ring"
    hours: float = HOURS
    again: Mapping[Where, tuple[float, ...]] = field(default_factory=dict, repr=False)  # step times by run, of several
    first: Mapping[Where, Observation] = field(
        default_factory=dict, repr=False
    )  # what probes see, where truth is other runs

    def probe(self, place: Where) -> Observation:
        """Return what a probe of a configuration sees."""
        return self.first.get(place, self.truth[place])

    @cached_property
    def noise(self) -> tuple[float, ...]:
        """How far two runs of a configuration are apart, |ln ratio|, of each two of each that was measured again."""
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


def load(
    *paths: Path | str, flagged: bool = False, sizes: Iterable[int] | None = None, repeats: bool = False
) -> list[MeasuredSet]:
    """Return the sets of the tables that offer at least two sizes and two batches, ordered by name.

    Where a configuration was measured more than once, the median counts; with `repeats` what its first run has seen is what a
    probe sees, and the median of the others the truth. A missing sync_time_s stays missing (nan).

    Args:
        paths: CSV files with COLUMNS; gpus_per_node is empty where nodes differ (those rows are left out).
        flagged: the rows whose flag is not ok, instead of those whose flag is.
        sizes: the sizes offered instead of the power-of-two multiples of the smallest.
        repeats: judge by other runs than the probes are taken from. A column `run` says which rows belong together; without
            one the n-th row of each configuration is that of the n-th run.

    Raises:
        ValueError: a table lacks a column; names it.
    """
    rows = read(*paths)
    rows = rows[((rows.flag != "ok") == flagged) & rows.gpus_per_node.notna()]
    wanted = None if sizes is None else frozenset(sizes)
    results = [made for key, group in _sets(rows) if (made := _set(*key, group, wanted, repeats)) is not None]
    return sorted(results, key=lambda s: (s.cluster, s.app, s.kind, s.gpus_per_node or 0))


def read(*paths: Path | str) -> pd.DataFrame:
    """Return the usable rows of the tables below each other; of a run's results.csv what was measured.

    Raises:
        ValueError: a table lacks a column; names it.
    """
    tables = []
    for path in paths:
        table = pd.read_csv(path)
        if "outcome" in table.columns:
            table = _of_run(table, Path(path))
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


def _of_run(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Return what a run has measured, under the name of its directory."""
    result = table[table.outcome == "measured"]
    return result.assign(
        cluster=path.resolve().parent.name,
        app=result.node_type.astype(object).fillna("probes"),
        replicas=result.nodes * result.gpus_per_node,
        sync_time_s=result.step_time_s - pd.to_numeric(result.compute_time_s, errors="coerce"),
        flag="ok",
    )


def _sets(rows: pd.DataFrame) -> Iterable[tuple[tuple[str, str, str, int | None], pd.DataFrame]]:
    for key, group in rows.groupby(["cluster", "app", "flag", "gpus_per_node"]):
        cluster, app, flag, gpus = cast("tuple[str, str, str, float]", key)
        yield (cluster, app, flag, int(gpus)), group
    for key, group in rows[rows.nodes == 1].groupby(["cluster", "app", "flag"]):
        yield (*cast("tuple[str, str, str]", key), None), group


def _set(
    cluster: str, app: str, flag: str, gpus: int | None, rows: pd.DataFrame, wanted: Set[int] | None, repeats: bool
) -> MeasuredSet | None:
    """Return the set; None where fewer than two sizes, or fewer than two batches, are offered."""
    first = _first_run(rows) if repeats else rows.iloc[:0]
    others = rows.drop(first.index)
    truth = {**_observations(first), **_observations(others)}
    batches = _candidates(truth, inside=gpus is None, wanted=wanted)
    sizes = {w.gpus_per_node if gpus is None else w.nodes for w in batches}
    if len(sizes) < 2 or len({w.local_batch for w in batches}) < 2:
        return None
    kind: Kind = "one node" if gpus is None else "one GPU a node" if gpus == 1 else "several GPUs a node"
    return MeasuredSet(cluster, app, kind, gpus, flag, truth, batches, again=_again(rows), first=_observations(first))


def _again(rows: pd.DataFrame) -> dict[Where, tuple[float, ...]]:
    """Return the step time in each run of the configurations that several have measured."""
    runs = rows.groupby([*_PLACE, "run"], as_index=False, sort=False)[["step_time_s"]].median()
    times: dict[Where, tuple[float, ...]] = defaultdict(tuple)
    for row in runs.to_dict("records"):
        times[where(row)] += (float(row["step_time_s"]),)
    return {place: result for place, result in times.items() if len(result) > 1}


def _first_run(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the run that comes first of those that hold a configuration, of each configuration."""
    order = {run: place for place, run in enumerate(rows.run.unique())}
    places = rows.run.map(order)
    return rows[places == places.groupby([rows[column] for column in _PLACE]).transform("min")]


def _observations(rows: pd.DataFrame) -> dict[Where, Observation]:
    medians = rows.groupby(_PLACE, as_index=False)[["step_time_s", "sync_time_s"]].median()
    return {where(row): _observation(row) for row in medians.to_dict("records")}


def where(row: Mapping[Hashable, Any]) -> Where:
    return Where(int(row["nodes"]), int(row["gpus_per_node"]), int(row["local_batch"]))


def _observation(row: Mapping[Hashable, Any]) -> Observation:
    step, sync = float(row["step_time_s"]), float(row["sync_time_s"])
    return Observation(
        nodes=int(row["nodes"]),
        gpus_per_node=int(row["gpus_per_node"]),
        local_batch=int(row["local_batch"]),
        step_times=(step,),
        compute_time=step - sync,
    )


def _candidates(measured: Iterable[Where], *, inside: bool, wanted: Set[int] | None) -> dict[Where, int]:
    """Return what is offered, with its nominal global batch."""
    local_batches: dict[int, list[Where]] = defaultdict(list)
    for place in sorted(measured):
        local_batches[place.gpus_per_node if inside else place.nodes].append(place)
    smallest_batch = min((place.local_batch for places in local_batches.values() for place in places), default=1)
    smallest = min(local_batches, default=1)
    return {
        place: nominal * place.replicas
        for size, places in local_batches.items()
        if (math.log2(size / smallest) % 1 == 0 if wanted is None else size in wanted)
        for nominal, place in _multiples(places, smallest_batch)
    }


def _multiples(places: Sequence[Where], smallest: int) -> Iterable[tuple[int, Where]]:
    """Return the power-of-two multiples of the smallest batch, each with the place measured nearest to it."""
    nominal = smallest
    while nominal <= places[-1].local_batch * 2**NEAR:
        nearest = min(places, key=lambda place: abs(math.log2(place.local_batch / nominal)))
        if abs(math.log2(nearest.local_batch / nominal)) < NEAR:
            yield nominal, nearest
        nominal *= 2
