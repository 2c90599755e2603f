"""Records as a pandas table, for exports and the Python API."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def frame(rows: Sequence[Mapping[str, Any]]) -> "pd.DataFrame":
    """Return a table of rows that all have the same columns.

    A column of whole numbers stays one (Int64) where some are missing: bytes are not written as 486539264.0.
    """
    import pandas as pd

    return pd.DataFrame({name: _column([row[name] for row in rows]) for name in (rows[0] if rows else ())})


def _column(values: Sequence[Any]) -> "pd.Series[Any]":
    import pandas as pd

    known = [value for value in values if value is not None]
    whole = bool(known) and all(isinstance(value, int) and not isinstance(value, bool) for value in known)
    return pd.Series(values, dtype="Int64" if whole else None)
