"""The command line shared by the benchmarks of this folder: tables as input, one line per row or JSON as output."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from replay_data import MeasuredSet, load_sets

Row = TypeVar("Row")


def run_command(
    judge: Callable[[Sequence[MeasuredSet]], Sequence[Row]], line: Callable[[Row], str], *, about: str | None
) -> None:
    """Evaluate the tables that the arguments name, and print the rows.

    Args:
        judge: returns rows, each a dataclass.
        line: formats a row as text.
        about: description for --help.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", metavar="TABLE.csv")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: list[Any] = list(judge(load_sets(*arguments.tables)))
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    for row in rows:
        print(line(row))
