"""What of a run was sent to a tracker already: kept in the run, so that nothing is sent twice."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tula_cli.run.files import list_files, open_file, read_error, read_record, write_record
from tula_cli.run.records.base import Record


class SentRun(Record):
    """What was sent of one run at a tracker."""

    id: str  # the tracker's
    settled: dict[str, str] = {}  # digests of its settings, words, single numbers and state
    artifacts: dict[str, str] = {}  # digest of each file by its name
    starts: tuple[float, ...] = ()  # times of its rows of kind "start"
    samples: int = -1  # of the newest point


class Sent(Record):
    """Where a run is sent to, and what was."""

    to: str
    uri: str
    project: str
    runs: dict[str, SentRun] = {}  # by their keys in tula's run
    problem: str = ""  # why the newest try has failed; empty where it has not


_SENT = TypeAdapter(Sent)


def read(path: Path) -> Sent | None:
    """Return what was sent by the file of a tracker; None where there is no such file."""
    return read_record(path, _SENT)


def problems(folder: Path) -> list[str]:
    """Return what is wrong with trackers that a run is sent to, by what was written down in its folder of exports."""
    found = [read(path) for path in list_files(folder)]
    return [
        f"export to {one.to}: {one.problem}; tula export sends what was missed" for one in found if one and one.problem
    ]


def write(path: Path, sent: Sent) -> None:
    write_record(path, sent)


def digest(content: Any) -> str:
    """Return 16 hex digits over plain values, or over bytes."""
    data = content if isinstance(content, bytes) else json.dumps(content, sort_keys=True, default=str).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def rows_to_send(path: Path, *, whole: bool) -> list[dict[str, Any]]:
    """Return the rows of a training's metrics.jsonl whose positions are complete.

    Args:
        path: of metrics.jsonl.
        whole: nothing more is to come. Else the rows of the newest position are kept for later, so that all rows of one
            position are sent as one point.

    Raises:
        TulaError: it cannot be read.
    """
    try:
        with open_file(path) as file:
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise read_error(path, error) from error
    if lines and not lines[-1].endswith(b"\n"):  # still being written
        lines.pop()
    rows = [row for row in map(_row, lines) if row]
    return rows if whole else rows[: _newest_position(rows)]


def _row(line: bytes) -> dict[str, Any]:
    """Return the object of a line; an empty one where a lost node has left half of it."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    is_row = isinstance(found, dict) and isinstance(found.get("kind"), str)
    placed = is_row and all(_is_number(found.get(name)) for name in ("time", "samples"))
    return found if placed else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18


def _newest_position(rows: Sequence[dict[str, Any]]) -> int:
    """Return the index of the first of the rows at the newest position."""
    begin = len(rows)
    while begin and rows[begin - 1]["samples"] == rows[-1]["samples"]:
        begin -= 1
    return begin
