"""A result of the Python API as HTML: the table that a notebook shows for it."""

from collections.abc import Sequence
from html import escape

from tula_cli.words import format_count, strip_control_characters

MAX_ROWS = 20
"""Rows shown of one table; a notebook cell is an overview, and `.frame()` has every row."""


def render_html(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    notes: Sequence[str] = (),
    bold_rows: int = 0,
) -> str:
    """Return a title, a table and notes as HTML; all text is escaped.

    Args:
        title: one line.
        columns: headings, with units.
        rows: cells in the order of the columns; the table is left out if there are none.
        notes: lines below the table.
        bold_rows: number of rows at the top that are emphasised.
    """
    lines = [f"<p><b>{_escape(title)}</b></p>"]
    if rows:
        lines += ["<table>", f"<thead><tr>{_render_cells(columns, 'th')}</tr></thead>", "<tbody>"]
        for index, row in enumerate(rows[:MAX_ROWS]):
            style = ' style="font-weight: bold"' * (index < bold_rows)
            lines.append(f"<tr{style}>{_render_cells(row, 'td')}</tr>")
        lines += ["</tbody>", "</table>"]
    if len(rows) > MAX_ROWS:
        notes = (f"{format_count(len(rows) - MAX_ROWS, 'row')} not shown", *notes)
    lines += [f"<p>{_escape(note)}</p>" for note in notes]
    return "\n".join(["<div>", *lines, "</div>"])


def _render_cells(cells: Sequence[str], tag: str) -> str:
    return "".join(f"<{tag}>{_escape(cell)}</{tag}>" for cell in cells)


def _escape(text: str) -> str:
    return escape(strip_control_characters(text))
