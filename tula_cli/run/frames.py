"""Records as a pandas table, for exports and the Python API."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


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
