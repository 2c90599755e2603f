"""What of a run was sent to a tracker already: kept in the run, so that nothing is sent twice."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tula_cli.run.files import cannot_read, listing, open_file, read_record, write_record
from tula_cli.run.records.base import Record


class SentRun(Record):
    """What was sent of one run at a tracker."""

    id: str  # the tracker's
    settled: dict[str, str] = {}  # digests of its settings, words, single numbers and state
    artifacts: dict[str, str] = {}  # digest of each file by its name
    offset: int = 0  # bytes of metrics.jsonl that were read
    last: str = ""  # digest of the last line of them
    starts: tuple[float, ...] = ()  # times of its rows of kind "start"
    samples: int = -1  # of the newest point


class Sent(Record):
    """Where a run is sent to, and what was."""

    to: str
    uri: str
    project: str
    runs: dict[str, SentRun] = {}  # by their keys in tula's run
    sending: str = (
        ""  # key of the run whose points are on their way; another process finds it only where that was killed
    )
    problem: str = ""  # why the newest try has failed; empty where it has not


_SENT = TypeAdapter(Sent)


def read(path: Path) -> Sent | None:
    """Return what was sent by the file of a tracker; None where there is no such file."""
    return read_record(path, _SENT)


def problems(folder: Path) -> list[str]:
    """Return what is wrong with trackers that a run is sent to, by what was written down in its folder of exports."""
    found = [read(path) for path in listing(folder)]
    return [
        f"export to {one.to}: {one.problem}; tula export sends what was missed" for one in found if one and one.problem
    ]


def write(path: Path, sent: Sent) -> None:
    write_record(path, sent)


def digest(content: Any) -> str:
    """Return 16 hex digits over plain values, or over bytes."""
    data = content if isinstance(content, bytes) else json.dumps(content, sort_keys=True, default=str).encode()
    return hashlib.sha256(data).hexdigest()[:16]


@dataclass(frozen=True)
class NewRows:
    """The rows of metrics.jsonl that come after those that were sent, and what to remember of them."""

    rows: tuple[dict[str, Any], ...]
    offset: int
    last: str
    starts: tuple[float, ...]


def new_rows(path: Path, known: SentRun, *, whole: bool) -> NewRows:
    """Return the rows that are new.

    A training that goes on from a checkpoint cuts what came after it, so the place where the last look ended may be gone: then
    the rows from the first start on that was not seen are new.

    Args:
        path: of metrics.jsonl.
        known: what was sent.
        whole: nothing more is to come. Else the rows of the newest position are left for later, so that all rows of one
            position are sent as one point.

    Raises:
        TulaError: it cannot be read.
    """
    try:
        file = open_file(path)
    except FileNotFoundError:
        return NewRows((), known.offset, known.last, known.starts)
    except OSError as error:
        raise cannot_read(path, error) from error
    with file:
        there = file.seek(0, os.SEEK_END)
        goes_on = known.offset <= there and _line_before(file, known.offset) == known.last
        begin = known.offset if goes_on else 0
        file.seek(begin)
        lines = file.read().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):  # still being written
        lines.pop()
    rows = [_row(line) for line in lines]
    first = 0 if goes_on else _first_new_start(rows, known.starts)
    end = len(rows) if whole else _before_newest(rows, first)
    taken = [row for row in rows[first:end] if row]
    if end <= first:
        return NewRows((), known.offset, known.last, known.starts)
    starts = (*known.starts, *(float(row["time"]) for row in taken if row.get("kind") == "start"))
    return NewRows(tuple(taken), begin + sum(map(len, lines[:end])), _digest_of(lines[end - 1]), starts)


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


def _line_before(file: Any, offset: int) -> str:
    """Return the digest of the line that ends at an offset; empty at the beginning of the file."""
    if not offset:
        return ""
    file.seek(max(0, offset - 2**16))
    before = file.read(min(offset, 2**16))
    return _digest_of(before[before.rfind(b"\n", 0, -1) + 1 :])


def _digest_of(line: bytes) -> str:
    return digest(line[-(2**15) :])


def _first_new_start(rows: Sequence[dict[str, Any]], known: Sequence[float]) -> int:
    """Return the index of the first start that was not seen; the number of rows where there is none yet."""
    return next(
        (at for at, row in enumerate(rows) if row.get("kind") == "start" and row["time"] not in known), len(rows)
    )


def _before_newest(rows: Sequence[dict[str, Any]], first: int) -> int:
    """Return the index of the first row at the newest position, from `first` on."""
    end, newest = len(rows), None
    while end > first and (not rows[end - 1] or newest in (None, rows[end - 1]["samples"])):
        newest = rows[end - 1].get("samples", newest)
        end -= 1
    return end
