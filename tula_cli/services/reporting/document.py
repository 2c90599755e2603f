"""The content of a report, apart from its presentation: plain values, no library of tables or plots."""

from dataclasses import dataclass
from typing import Literal

Cell = str | float | int | None
"""Of a table; None is what is not known."""
Style = Literal["line", "points", "line+points", "bars", "stacked"]
MarkKind = Literal["choice", "knee", "limit", "event"]
Numbers = tuple[float, ...]
Known = tuple[float | None, ...]


@dataclass(frozen=True)
class Fact:
    """A name and what it stands for: "GPU", "NVIDIA A100 80 GB"."""

    name: str
    value: str


@dataclass(frozen=True)
class Column:
    """A column of a table; `digits` are significant ones of its numbers, None for whole numbers and words."""

    title: str
    unit: str = ""
    align: Literal["left", "right"] = "right"
    digits: int | None = None


@dataclass(frozen=True)
class Table:
    """Rows of cells; `marks` has one a row ("chosen", "front" or ""), or none at all."""

    key: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Series:
    """A curve, points or bars. `low` and `high` are a 90 % interval or a spread, as the caption says."""

    name: str
    x: Numbers
    y: Known
    low: Known | None = None
    high: Known | None = None
    style: Style = "line+points"
    measured: tuple[bool, ...] | None = None  # a filled marker where it was, an open one where it is predicted


@dataclass(frozen=True)
class Density:
    """Shares of a mass in the cells between edges: `shares[i][j]` lies between x edges i and i + 1, y edges j and j + 1.

    The shares of a column sum up to 1, or to 0 where nothing is known of it.
    """

    x_edges: Numbers
    y_edges: Numbers
    shares: tuple[Numbers, ...]


@dataclass(frozen=True)
class Mark:
    """A place on a figure. Without `y` it is a vertical line, without `x` a horizontal one."""

    x: float | None
    y: float | None
    text: str
    kind: MarkKind


@dataclass(frozen=True)
class Figure:
    """A figure; with a category scale, x counts `categories` from 0."""

    key: str
    title: str
    caption: str
    x_label: str
    y_label: str
    series: tuple[Series, ...] = ()
    density: Density | None = None
    marks: tuple[Mark, ...] = ()
    x_scale: Literal["linear", "log", "log2", "category"] = "linear"
    y_scale: Literal["linear", "log", "log2"] = "linear"
    categories: tuple[str, ...] = ()
    paper: str = ""  # the figure of the paper that this is for one's own job: "Figure 4"


@dataclass(frozen=True)
class Section:
    """A part of a report; `missing` says why there is nothing in it, and which command would bring it."""

    key: str
    title: str
    text: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class Document:
    """A report: the question and the answer in a line each, what it is about, and its sections."""

    title: str
    question: str
    answer: str
    made: str  # when, and by what
    facts: tuple[Fact, ...]
    sections: tuple[Section, ...]
