"""Tables of measured step times, as sets in which a search can be replayed.

A set is one app on one cluster with one number of GPUs a node, measured on several numbers of nodes; or inside one node,
on several numbers of GPUs. What is offered to a search are its candidates: sizes that are power-of-two multiples of the
smallest, and of each the batch measured nearest to every power-of-two multiple of the smallest batch. The other sizes
and the batches in between are there to be predicted.
"""

import math
import warnings
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import pandas as pd

from tula_cli.models.time.steptime import Observation

Kind = Literal["one GPU a node", "several GPUs a node", "one node"]
KINDS: tuple[Kind, ...] = ("one GPU a node", "several GPUs a node", "one node")

NEAR = 0.45  # octaves: how far the batch measured nearest to a multiple may be from it; half an octave is in between
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

    def size(self, where: Where) -> int:
        return where.nodes if self.along == "nodes" else where.gpus_per_node

    @property
    def by_size(self) -> dict[int, list[int]]:
        """Size to local batches, both ascending: what the strategies of `tula_cli.services.search` take."""
        found: dict[int, list[int]] = {}
        for where in self.candidates:
            found.setdefault(self.size(where), []).append(where.local_batch)
        return found

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

    @cached_property
    def offer(self) -> Offer:
        along: Literal["nodes", "gpus_per_node"] = "gpus_per_node" if self.kind == "one node" else "nodes"
        return Offer(tuple(sorted(self.batches)), self.batches, self.collective, along)

    @cached_property
    def offered_sizes(self) -> frozenset[int]:
        return frozenset(self.offer.by_size)

    @property
    def name(self) -> str:
        shape = "one node" if self.gpus_per_node is None else f"{self.gpus_per_node} GPU/node"
        return f"{self.cluster} {self.app} {shape}"


def load(*paths: Path | str, flagged: bool = False, sizes: Iterable[int] | None = None) -> list[MeasuredSet]:
    """Return the sets of the tables that offer at least two sizes and two batches, ordered by name.

    Where a configuration was measured more than once, the median counts. A missing sync_time_s stays missing (nan).

    Args:
        paths: CSV files with COLUMNS; gpus_per_node is empty where nodes differ (those rows are left out).
        flagged: the rows whose flag is not ok, instead of those whose flag is.
        sizes: the sizes offered instead of the power-of-two multiples of the smallest.

    Raises:
        ValueError: a table lacks a column; names it.
    """
    rows = read(*paths)
    rows = rows[((rows.flag != "ok") == flagged) & rows.gpus_per_node.notna()]
    wanted = None if sizes is None else frozenset(sizes)
    found = [made for key, group in _sets(rows) if (made := _set(*key, group, wanted)) is not None]
    return sorted(found, key=lambda s: (s.cluster, s.app, s.kind, s.gpus_per_node or 0))


def read(*paths: Path | str) -> pd.DataFrame:
    """Return the usable rows of the tables below each other.

    Raises:
        ValueError: a table lacks a column; names it.
    """
    tables = []
    for path in paths:
        table = pd.read_csv(path)
        for column in ("nodes", "local_batch", "step_time_s", "sync_time_s", "gpus_per_node", "replicas"):
            if column in table.columns:
                table[column] = pd.to_numeric(table[column], errors="coerce")
        if missing := [column for column in COLUMNS if column not in table.columns]:
            raise ValueError(f"{path} has no column {', '.join(missing)}")
        tables.append(table[list(COLUMNS)])
    rows = pd.concat(tables, ignore_index=True)
    usable = (rows.step_time_s > 0) & (rows.local_batch >= 1) & (rows.nodes >= 1)
    if not usable.all():
        warnings.warn(
            f"{int((~usable).sum())} rows without a number of nodes, a batch or a step time are left out", stacklevel=2
        )
    return rows[usable]


def _sets(rows: pd.DataFrame) -> Iterable[tuple[tuple[str, str, str, int | None], pd.DataFrame]]:
    for key, group in rows.groupby(["cluster", "app", "flag", "gpus_per_node"]):
        cluster, app, flag, gpus = cast("tuple[str, str, str, float]", key)
        yield (cluster, app, flag, int(gpus)), group
    for key, group in rows[rows.nodes == 1].groupby(["cluster", "app", "flag"]):
        yield (*cast("tuple[str, str, str]", key), None), group


def _set(
    cluster: str, app: str, flag: str, gpus: int | None, rows: pd.DataFrame, wanted: Set[int] | None
) -> MeasuredSet | None:
    """Return the set; None where fewer than two sizes, or fewer than two batches, are offered."""
    truth = _observations(rows)
    batches = _candidates(truth, inside=gpus is None, wanted=wanted)
    sizes = {w.gpus_per_node if gpus is None else w.nodes for w in batches}
    if len(sizes) < 2 or len({w.local_batch for w in batches}) < 2:
        return None
    kind: Kind = "one node" if gpus is None else "one GPU a node" if gpus == 1 else "several GPUs a node"
    return MeasuredSet(cluster, app, kind, gpus, flag, truth, batches)


def _observations(rows: pd.DataFrame) -> dict[Where, Observation]:
    keys = ["nodes", "gpus_per_node", "local_batch"]
    medians = rows.groupby(keys, as_index=False)[["step_time_s", "sync_time_s"]].median()
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
