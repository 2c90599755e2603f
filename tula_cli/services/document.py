"""The content of a report in plain values, and the interface of the optional package that builds and renders it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from tula_cli.entry_points import load_extra
from tula_cli.run.directory import Run
from tula_cli.run.records.recommendations import Recommendation, TradeOff

Cell = str | float | int | None
"""A cell of a table; None if the value is unknown."""
Style = Literal["line", "points", "line+points", "stacked"]
Numbers = tuple[float, ...]
Known = tuple[float | None, ...]


@dataclass(frozen=True)
class Fact:
    """A named value, such as "GPU": "NVIDIA A100 80 GB"."""

    name: str
    value: str


@dataclass(frozen=True)
class Column:
    """A column of a table; `digits` is the number of significant digits, None for integers and text."""

    title: str
    unit: str = ""
    align: Literal["left", "right"] = "right"
    digits: int | None = None


@dataclass(frozen=True)
class Table:
    """A table; `marks` has one entry per row ("chosen", "front" or ""), or is empty."""

    key: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Series:
    """A curve, points or stacked bars over categories; `low` and `high` are a 90 % interval or a spread, as the caption states."""

    name: str
    x: Numbers
    y: Known
    low: Known | None = None
    high: Known | None = None
    style: Style = "line+points"
    # per point: True for measured (filled marker), False for predicted (open); None: no distinction
    measured: tuple[bool, ...] | None = None


@dataclass(frozen=True)
class Density:
    """A two-dimensional histogram: `shares[i][j]` lies between x edges i and i + 1, and y edges j and j + 1.

    The shares of a column sum to 1, or to 0 if there is no data for the column.
    """

    x_edges: Numbers
    y_edges: Numbers
    shares: tuple[Numbers, ...]


@dataclass(frozen=True)
class Annotation:
    """An annotation of a figure: a point, a vertical line without `y`, or a horizontal line without `x`."""

    x: float | None
    y: float | None
    text: str
    kind: Literal["choice", "limit", "event"]


@dataclass(frozen=True)
class Figure:
    """A figure; with a category scale, x values are indices into `categories`, from 0."""

    key: str
    title: str
    caption: str
    x_label: str
    y_label: str
    series: tuple[Series, ...] = ()
    density: Density | None = None
    marks: tuple[Annotation, ...] = ()
    x_scale: Literal["linear", "log", "log2", "category"] = "linear"
    y_scale: Literal["linear", "log", "log2"] = "linear"
    categories: tuple[str, ...] = ()
    paper: str = ""  # corresponding figure of the paper, such as "Figure 4"; empty if none


@dataclass(frozen=True)
class Section:
    """A section of a report; `missing` explains why the section is empty and which command would fill it."""

    key: str
    title: str
    text: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class Document:
    """A report: a question and an answer of one line each, general facts, and sections."""

    title: str
    question: str
    answer: str
    made: str  # creation date and version of tula
    facts: tuple[Fact, ...]
    sections: tuple[Section, ...]


# --- The optional package `report`

TextForm = Literal["markdown", "latex", "csv"]


class ReportPackage(Protocol):
    """The optional package `report` (`extras/report`)."""

    @property
    def command(self) -> Callable[..., None]:
        """The function of `tula report`."""

    def build(self, runs: Sequence[Run], *, now: float) -> Document:
        """Build the report of the runs of a job at a Unix time.

        Raises:
            TulaError: a record of the run cannot be read.
        """

    def render_text(self, document: Document, form: TextForm) -> str:
        """Return a document as text."""

    def render_page(self, document: Document) -> str:
        """Return a document as one HTML page."""

    def plot(self, recommendation: Recommendation, against: TradeOff) -> Any:
        """Return a `matplotlib.figure.Figure` of the configurations: `Recommendation.plot`.

        Raises:
            SpecError: matplotlib is not installed.
        """


def load_report_package() -> ReportPackage:
    """Return package `report`.

    Raises:
        SpecError: it is not installed.
    """
    return cast(ReportPackage, load_extra("report"))
