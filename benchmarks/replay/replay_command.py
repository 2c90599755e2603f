"""What the judges of single questions have in common as commands: tables in, a line a row or JSON out."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from replay_data import MeasuredSet, load

Row = TypeVar("Row")


def run(
    judge: Callable[[Sequence[MeasuredSet]], Sequence[Row]], line: Callable[[Row], str], *, about: str | None
) -> None:
    """Judge the tables that the arguments name, and print what comes of it.

    Args:
        judge: returns rows, each a dataclass.
        line: a row in words.
        about: what is judged, for --help.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", metavar="TABLE.csv")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: list[Any] = list(judge(load(*arguments.tables)))
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    for row in rows:
        print(line(row))
