"""Records as a pandas table, for the table of candidates, exports and the Python API.

pandas is imported in the functions that make or read a table, so that commands without one start without it.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

from tula_cli.run.records.base import Record
from tula_cli.words import format_count, strip_control_characters

if TYPE_CHECKING:
    import pandas as pd
RecordType = TypeVar("RecordType", bound=Record)


def make_frame(rows: Sequence[Mapping[str, Any]]) -> "pd.DataFrame":
    """Return a table of rows that all have the same columns.

    A column of whole numbers keeps an integer type (Int64) even if values are missing: bytes are not written as
    486539264.0.
    """
    import pandas as pd

    return pd.DataFrame({name: _make_column([row[name] for row in rows]) for name in (rows[0] if rows else ())})


def _make_column(values: Sequence[Any]) -> "pd.Series[Any]":
    import pandas as pd

    known_values = [value for value in values if value is not None]
    are_integers = bool(known_values) and all(
        isinstance(value, int) and not isinstance(value, bool) for value in known_values
    )
    return pd.Series(values, dtype="Int64" if are_integers else None)


@dataclass(frozen=True)
class Column:
    """A column of a table of records: a field of the record, or of a record nested in it."""

    name: str  # name of the column: the field, prefixed by its parent if nested, as in parts_steps
    field: str
    parent: str  # field of the record that holds the nested one; empty for a field of the record itself
    dtype: str  # numpy dtype; optional numbers are float64 with nan for None
    is_integer: bool
    is_optional: bool
    description: str  # including the unit

    def get_value(self, record: Record) -> Any:
        """Return the value of the column for a record; None if the nested record is missing."""
        holder = getattr(record, self.parent) if self.parent else record
        return None if holder is None else getattr(holder, self.field)

    def read_values(self, frame: "pd.DataFrame") -> list[Any]:
        """Return the column's values as they stand in records."""
        values: list[Any] = frame[self.name].tolist()
        if self.is_optional:
            values = [None if value != value else value for value in values]
        return [value if value is None else int(value) for value in values] if self.is_integer else values


@functools.cache
def list_columns(kind: type[Record], parent: str = "") -> tuple[Column, ...]:
    """Return the columns of a table of records, in the order of their fields, with those of nested records in place."""
    columns: list[Column] = []
    for name, field in kind.model_fields.items():
        is_collection = get_origin(field.annotation) is tuple
        members = (field.annotation,) if is_collection else get_args(field.annotation) or (field.annotation,)
        nested = _find_nested_record(members)
        if nested is not None:
            columns += list_columns(nested, name)
            continue
        is_optional = NoneType in members
        columns.append(
            Column(
                name=f"{parent}_{name}" if parent else name,
                field=name,
                parent=parent,
                dtype=_find_dtype(members, is_optional=is_optional),
                is_integer=int in members,
                is_optional=is_optional,
                description=field.description or "",
            )
        )
    return tuple(columns)


def _find_nested_record(members: Sequence[Any]) -> type[Record] | None:
    classes = (member for member in members if get_origin(member) is None and isinstance(member, type))
    return next((member for member in classes if issubclass(member, Record)), None)


def _find_dtype(members: Sequence[Any], *, is_optional: bool) -> str:
    if bool in members:
        return "bool"
    if int in members and not is_optional:
        return "int64"
    return "float64" if float in members or int in members else "object"


def make_record_frame(records: Sequence[Record], kind: type[Record]) -> "pd.DataFrame":
    """Return a table of records of one kind for users, a row each: whole numbers stay whole even if some are missing."""
    import pandas as pd

    return pd.DataFrame(
        {
            column.name: pd.Series(
                [column.get_value(record) for record in records], dtype="Int64" if column.is_integer else column.dtype
            )
            for column in list_columns(kind)
        }
    )


def make_column_frame(columns: Mapping[str, Any]) -> "pd.DataFrame":
    """Return a table of arrays of equal length, by name."""
    import pandas as pd

    return pd.DataFrame(dict(columns), copy=False)


def convert_frame_to_records(frame: "pd.DataFrame", kind: type[RecordType]) -> tuple[RecordType, ...]:
    """Return the rows of a table as records, in their order; a nested record without any known value is None."""
    values: dict[str, list[Any]] = {}
    nested: dict[str, dict[str, list[Any]]] = {}
    for column in list_columns(kind):
        holder = nested.setdefault(column.parent, {}) if column.parent else values
        holder[column.field] = column.read_values(frame)
    for parent, values_by_field in nested.items():
        record = _find_nested_record(get_args(kind.model_fields[parent].annotation))
        assert record is not None
        values[parent] = [
            record(**dict(zip(values_by_field, row, strict=True))) if _has_known_value(row) else None
            for row in zip(*values_by_field.values(), strict=True)
        ]
    return tuple(kind(**dict(zip(values, row, strict=True))) for row in zip(*values.values(), strict=True))


def _has_known_value(row: Sequence[Any]) -> bool:
    return any(value is not None and value == value for value in row)


MAX_ROWS = 20
"""Rows shown of one table; a notebook cell is an overview, and `.frame()` has every row."""


def render_html(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    notes: Sequence[str],
    bold_rows: int = 0,
) -> str:
    """Return a title, a table and notes as HTML; all text is escaped.

    Args:
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
