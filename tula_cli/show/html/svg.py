"""Drawings as SVG: axes, curves, points."""

import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")
WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 30, 44  # of the drawing's frame, in pixels


@dataclass(frozen=True)
class Point:
    """A place on a curve; `spread` is the half length of its error bar."""

    x: float
    y: float
    spread: float | None = None


@dataclass(frozen=True)
class Series:
    """A curve and its name."""

    name: str
    color: str
    points: tuple[Point, ...]


def look(row: Any, path: str) -> Any:
    """Return what a row holds under a path like "ags.mean"; None where there is nothing."""
    for part in path.split("."):
        if not isinstance(row, Mapping):
            return None
        row = row.get(part)
    return row


# --- drawing


@dataclass(frozen=True)
class Frame:
    """Where numbers lie on a drawing."""

    low_x: float
    high_x: float
    low_y: float
    high_y: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.low_x) / (self.high_x - self.low_x) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low_y) / (self.high_y - self.low_y) * (HEIGHT - TOP - BOTTOM)


def chart(
    series: Sequence[Series],
    *,
    title: str,
    x: str,
    ticks: Sequence[tuple[float, str]] | None = None,
    log: bool = False,
) -> str:
    """Draw curves; empty where there are none.

    Args:
        series: the curves.
        title: above.
        x: label of the horizontal axis.
        ticks: of the horizontal axis, place and word; None for round numbers.
        log: draw the decimal logarithm of y; values at or below 0 are left out.
    """
    shown = [_logarithmic(one) for one in series] if log else list(series)
    points = [point for one in shown for point in one.points]
    if not points:
        return ""
    frame = _frame(points, [place for place, _ in ticks or ()])
    across = ticks if ticks is not None else [(v, short(v)) for v in round_numbers(frame.low_x, frame.high_x)]
    upright = round_logarithms if log else round_numbers
    up = [(v, short(10**v) if log else short(v)) for v in upright(frame.low_y, frame.high_y)]
    return drawing([*axes(frame, across, up), *(part for one in shown for part in _curve(one, frame))], title, x)


def drawing(body: Iterable[str], title: str, x: str) -> str:
    words = [_text(LEFT, 18, title, size=13), _text((WIDTH + LEFT) / 2, HEIGHT - 8, x, anchor="middle")]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img"'
        f' aria-label="{html.escape(title)}">{"".join([*body, *words])}</svg>'
    )


def _logarithmic(one: Series) -> Series:
    return Series(one.name, one.color, tuple(Point(p.x, math.log10(p.y)) for p in one.points if p.y > 0))


def _frame(points: Sequence[Point], places: Sequence[float]) -> Frame:
    xs = [*(point.x for point in points), *places]
    ys = [point.y + sign * (point.spread or 0.0) for point in points for sign in (-1, 1)]
    return Frame(*_padded(min(xs), max(xs)), *_padded(min(ys), max(ys)))


def _padded(low: float, high: float) -> tuple[float, float]:
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def round_numbers(low: float, high: float, about: int = 6) -> list[float]:
    """Return some round numbers between two bounds: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / about
    power = 10 ** math.floor(math.log10(rough))
    step = power * min((1, 2, 5, 10), key=lambda factor: abs(math.log(factor * power / rough)))
    first = math.ceil(low / step)
    return [step * number for number in range(first, math.floor(high / step) + 1)]


def round_logarithms(low: float, high: float) -> list[float]:
    """Return the decimal logarithms between two bounds of 1, 2 or 5 times a power of ten; of powers alone where many."""
    factors = (1, 2, 5) if high - low < 3 else (1,)
    found = [power + math.log10(factor) for power in range(math.floor(low), math.ceil(high) + 1) for factor in factors]
    shown = [value for value in found if low <= value <= high]
    return shown if len(shown) > 1 else round_numbers(low, high)


def short(value: float) -> str:
    """Return a number for an axis: 1.2M, 40k, 0.05."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.4g}"


def axes(frame: Frame, across: Sequence[tuple[float, str]], up: Sequence[tuple[float, str]]) -> Iterator[str]:
    left, right, top, bottom = LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM
    for value, word in up:
        yield _line(left, frame.y(value), right, frame.y(value), "#e5e5e5")
        yield _text(left - 6, frame.y(value) + 4, word, anchor="end")
    for value, word in across:
        yield _line(frame.x(value), bottom, frame.x(value), bottom + 4, "#444")
        yield _text(frame.x(value), bottom + 17, word, anchor="middle")
    yield f'<rect x="{left}" y="{top}" width="{right - left}" height="{bottom - top}" fill="none" stroke="#444"/>'


def _curve(one: Series, frame: Frame) -> Iterator[str]:
    places = [(frame.x(point.x), frame.y(point.y)) for point in one.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline points="{path}" fill="none" stroke="{one.color}" stroke-width="1.6"/>'
    for point, (x, y) in zip(one.points, places, strict=True):
        if point.spread:
            yield _line(x, frame.y(point.y - point.spread), x, frame.y(point.y + point.spread), one.color)
        if len(places) <= 40:
            tip = html.escape(f"{one.name}: {point.y:.4g}")
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.8" fill="{one.color}"><title>{tip}</title></circle>'


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{html.escape(words)}</text>'
