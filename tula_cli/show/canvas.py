"""Curves drawn with characters, in a frame with ticks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tula_cli.words import number

SHADES = {"red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36}
"""ANSI's numbers of colours."""
Y_STEP = 3
"""Rows from one tick to the next."""


@dataclass(frozen=True)
class Curve:
    """Points (x, y), ascending by x, with dots between them where there are several."""

    points: Sequence[tuple[float, float]]
    marker: str
    shade: str = ""  # of SHADES


def draw(
    title: str,
    curves: Sequence[Curve],
    *,
    ticks: Mapping[float, str],
    label: str,
    width: int,
    height: int,
    color: bool,
) -> str:
    """Return a drawing of curves; later ones lie over earlier ones.

    Args:
        title: above it.
        curves: what is drawn.
        ticks: what stands below which x.
        label: below the ticks.
        width: of all of it, in columns.
        height: of all of it, in lines.
        color: whether to colour the curves, by ANSI's sequences.
    """
    ys = [y for curve in curves for _, y in curve.points]
    low, high, rows = min(ys), max(ys), height - 5
    if low == high:
        low, high = low - abs(low or 1) / 2, high + abs(high or 1) / 2
    marks = {row: number(high - row * (high - low) / (rows - 1)) for row in range(rows - 1, -1, -Y_STEP)}
    margin = max(map(len, marks.values()))
    inner = max(width - margin - 2, len(ticks))
    xs = [x for curve in curves for x, _ in curve.points] + list(ticks)
    grid = _Grid(inner, rows, (min(xs), max(xs)), (low, high))
    for curve in curves:
        grid.add(curve)
    columns = {grid.column(x): text for x, text in ticks.items()}
    lines = [
        f"{'':{margin}} {title:^{inner}}",
        f"{'':{margin}}┌{'─' * inner}┐",
        *(
            f"{marks.get(row, ''):>{margin}}{'┤' if row in marks else '│'}{text}│"
            for row, text in enumerate(grid.lines(color=color))
        ),
        f"{'':{margin}}└{''.join('┬' if column in columns else '─' for column in range(inner))}┘",
        f"{'':{margin}} {_below(columns, inner)}",
        f"{'':{margin}} {label:^{inner}}",
    ]
    return "\n".join(line.rstrip() for line in lines)


def _below(columns: Mapping[int, str], width: int) -> str:
    """Return the words of ticks, each about the middle of its column and inside the frame."""
    line = [" "] * width
    for column, text in columns.items():
        start = max(0, min(column - (len(text) - 1) // 2, width - len(text)))
        line[start : start + len(text)] = text
    return "".join(line)


class _Grid:
    """Characters by row, from the top, and column.

    Args:
        width: columns.
        height: rows.
        x: the values of the first and the last column.
        y: the values of the last and the first row.
    """

    def __init__(self, width: int, height: int, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.width, self.height, self.x, self.y = width, height, x, y
        self.cells: dict[tuple[int, int], tuple[str, str]] = {}

    def column(self, x: float) -> int:
        low, high = self.x
        return round((x - low) / (high - low) * (self.width - 1)) if high > low else self.width // 2

    def row(self, y: float) -> int:
        low, high = self.y
        return round((high - y) / (high - low) * (self.height - 1))

    def add(self, curve: Curve) -> None:
        """Draw a curve over what is there."""
        places = [(self.row(y), self.column(x)) for x, y in curve.points]
        for start, end in pairwise(places):
            for place in _between(start, end):
                self.cells[place] = ("·", curve.shade)
        for place in places:
            self.cells[place] = (curve.marker, curve.shade)

    def lines(self, *, color: bool) -> Iterator[str]:
        for row in range(self.height):
            found = [self.cells.get((row, column), (" ", "")) for column in range(self.width)]
            yield "".join(f"\x1b[{SHADES[shade]}m{char}\x1b[0m" if color and shade else char for char, shade in found)


def _between(start: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the places of a straight line."""
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    for step in range(steps + 1):
        share = step / steps
        yield round(start[0] + share * (end[0] - start[0])), round(start[1] + share * (end[1] - start[1]))
