"""Cells of tables as text, which Markdown and LaTeX have in common."""

from collections.abc import Sequence

from tula_cli.services.reporting.document import Cell, Column, Table
from tula_cli.words import number


def head(column: Column) -> str:
    """Return the title of a column, with its unit."""
    return f"{column.title} ({column.unit})" if column.unit and column.title else column.title or column.unit


def text(cell: Cell, column: Column) -> str:
    """Return a cell as text; what is not known is a dash."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return number(cell, column.digits or 4)
    return str(cell)


def lines(table: Table) -> Sequence[tuple[str, ...]]:
    """Return the rows of a table as text."""
    return [tuple(text(cell, column) for cell, column in zip(row, table.columns, strict=True)) for row in table.rows]


def marked(table: Table) -> Sequence[str]:
    """Return the sign of each row: * chosen, + on the front, else nothing; none at all where no row has one."""
    signs = {"chosen": "*", "front": "+"}
    return [signs.get(mark, "") for mark in table.marks] if any(table.marks) else []


def signs(table: Table) -> str:
    """Say what the signs of rows are; empty where there are none."""
    return "* chosen" if "chosen" in table.marks else ""
