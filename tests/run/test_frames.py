"""The one place where records become a table: whole numbers stay whole."""

from pathlib import Path

import tula_cli
from tula_cli.run.frames import make_frame

ROWS = (
    {"name": "a", "bytes": 2**60 + 1, "nodes": 1, "seconds": 0.5, "chosen": True, "saved": None},
    {"name": "b", "bytes": None, "nodes": 2, "seconds": None, "chosen": False, "saved": None},
)


def test_a_column_of_whole_numbers_is_one_where_some_are_missing() -> None:
    types = {name: str(dtype) for name, dtype in make_frame(ROWS).dtypes.items()}
    assert types == {
        "name": types["name"], "bytes": "Int64", "nodes": "Int64", "seconds": "float64", "chosen": "bool", "saved": "object",
    }  # fmt: skip


def test_whole_numbers_are_written_as_such_and_exactly() -> None:
    assert make_frame(ROWS).to_csv(index=False).splitlines() == [
        "name,bytes,nodes,seconds,chosen,saved",
        "a,1152921504606846977,1,0.5,True,",
        "b,,2,,False,",
    ]


def test_every_table_is_made_there() -> None:
    root = Path(tula_cli.__file__).parent
    made = [path.relative_to(root).as_posix() for path in root.rglob("*.py") if "DataFrame(" in path.read_text()]
    assert made == ["run/frames.py"]
