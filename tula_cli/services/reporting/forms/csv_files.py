"""Tables and the data of figures as CSV."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tula_cli.services.reporting.document import Cell, Document, Figure, Table
from tula_cli.services.reporting.forms.cells import head
from tula_cli.words import escape_spreadsheet_cell


def files(document: Document) -> dict[str, str]:
    """Return the CSV of each table and figure of a report, by its key."""
    found: dict[str, str] = {}
    for section in document.sections:
        for table in section.tables:
            found[_free(f"table_{table.key}", found)] = _text(table_rows(table))
        for figure in section.figures:
            found[_free(f"figure_{figure.key}", found)] = _text(figure_rows(figure))
    return found


def _free(name: str, taken: Mapping[str, str]) -> str:
    """Return a name that is not taken yet."""
    names = (name, *(f"{name}_{number}" for number in range(2, len(taken) + 3)))
    return next(one for one in names if one not in taken)


def together(document: Document) -> str:
    """Return all of them as one text: a line "# key: title" before each, and an empty one after it."""
    titles = [
        title
        for section in document.sections
        for title in (*(table.title for table in section.tables), *(figure.title for figure in section.figures))
    ]
    return "\n".join(
        f"# {name}: {' '.join(title.split())}\n{text}"
        for (name, text), title in zip(files(document).items(), titles, strict=True)
    )


def table_rows(table: Table) -> Iterator[Sequence[Cell]]:
    """Yield the head and the rows of a table; numbers are whole, and what is not known is empty."""
    marks = table.marks if any(table.marks) else ()
    yield [*(head(column) for column in table.columns), *(["mark"] if marks else [])]
    for place, row in enumerate(table.rows):
        yield [*row, *([marks[place]] if marks else [])]


def figure_rows(figure: Figure) -> Iterator[Sequence[Cell]]:
    """Yield what is drawn: a row a point and a mark, or a row a cell of a density."""
    if figure.density is not None:
        yield from _cells(figure)
        return
    yield ["series", figure.x_label, figure.y_label, "low", "high", "measured"]
    for series in figure.series:
        for place, x in enumerate(series.x):
            ends = [None if end is None else end[place] for end in (series.low, series.high)]
            measured = None if series.measured is None else str(series.measured[place]).lower()
            yield [series.name, _place(figure, x), series.y[place], *ends, measured]
    for mark in figure.marks:
        yield [
            f"{mark.kind}: {mark.text}",
            None if mark.x is None else _place(figure, mark.x),
            mark.y,
            None,
            None,
            None,
        ]


def _cells(figure: Figure) -> Iterator[Sequence[Cell]]:
    density = figure.density
    assert density is not None
    yield ["share", f"{figure.x_label} from", f"{figure.x_label} to", f"{figure.y_label} from", f"{figure.y_label} to"]
    for column, shares in enumerate(density.shares):
        for row, share in enumerate(shares):
            yield [share, *density.x_edges[column : column + 2], *density.y_edges[row : row + 2]]


def _place(figure: Figure, x: float) -> Cell:
    return figure.categories[int(x)] if figure.x_scale == "category" else x


def _text(rows: Iterable[Sequence[Cell]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(escape_spreadsheet_cell, row) for row in rows)
    return text.getvalue()
