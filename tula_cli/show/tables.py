"""Tables and lines of text that fit the screen."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tula_cli.words import (
    configuration,
    duration,
    is_cost_in_node_hours,
    moment,
    number,
    part_words,
    percent,
    plural,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from tula_cli.run.records.recommendations import Prediction, Recommendation

T = TypeVar("T")

# --- tables


def table(columns: Sequence[str], *, left: Iterable[int] = (0,)) -> "Table":
    """Return an empty table; the columns numbered in `left` are words, the others numbers. A heading may have lines."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, header_style="bold")
    words = set(left)
    for index, heading in enumerate(columns):
        made.add_column(heading, justify="left" if index in words else "right", no_wrap=True, vertical="bottom")
    return made


def long_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Iterable[int] = (0,), width: int
) -> Iterator["RenderableType"]:
    """Yield a table that looks like one of `table`, without its cost: rich takes a millisecond a row.

    Args:
        columns: headings, which may have lines.
        rows: a word or number a column.
        left: columns of words, the others hold numbers.
        width: of the screen; the columns move together where the table is wider.
    """
    from rich.cells import cell_len
    from rich.text import Text

    depth = max(heading.count("\n") for heading in columns) + 1
    heads = [[""] * (depth - len(lines)) + lines for lines in (heading.split("\n") for heading in columns)]
    above = list(zip(*heads, strict=True))
    widths = [max(map(cell_len, cells)) for cells in zip(*above, *rows, strict=True)]
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= width else " "
    words = set(left)

    def line(cells: Sequence[str]) -> str:
        blanks = [" " * (wide - cell_len(cell)) for wide, cell in zip(widths, cells, strict=True)]
        both = enumerate(zip(cells, blanks, strict=True))
        return gap.join(cell + blank if index in words else blank + cell for index, (cell, blank) in both).rstrip()

    rule = "─" * (sum(widths) + len(gap) * (len(widths) - 1))
    yield Text("\n".join(map(line, above)), "bold", no_wrap=True)
    yield Text("\n".join([rule, *map(line, rows)]), no_wrap=True)


def printed(console: "Console", part: "RenderableType") -> None:
    """Print a part; a table keeps the width it needs, words wrap on a terminal and are left alone in a file."""
    from rich.table import Table
    from rich.text import Text

    if isinstance(part, Table):
        width = console.width
        console.width = max(width, fit(part, console))
        console.print(part, crop=False)
        console.width = width
    else:
        keeps = isinstance(part, Text) and part.no_wrap  # a long table's lines
        console.print(part, soft_wrap=keeps or not console.is_terminal)


def fit(part: "Table", console: "Console") -> int:
    """Move a table's columns together where they are wider than the console; return the columns it needs."""
    from rich.measure import Measurement

    unbound = console.options.update(max_width=10_000)
    if Measurement.get(console, unbound, part).maximum > console.width:
        part.padding = 0
    return Measurement.get(console, unbound, part).maximum


def styled(text: str, style: str, *, until: int | None = None) -> "RenderableType":
    from rich.text import Text

    made = Text(text)
    made.stylize(style, 0, until)
    return made


def listed(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


def cost_in_words(node_hours: float, cost: float, currency: str) -> str:
    """Return node-hours and cost, which without a price are one."""
    hours = f"{number(node_hours)} node-h"
    return hours if is_cost_in_node_hours(cost, node_hours, currency) else f"{hours}, {number(cost)} {currency}"


def at_most(hours: float | None, node_hours: float, price: float | None, currency: str) -> str:
    """Return an upper bound in words: time on this machine, node-hours, price."""
    time = "" if hours is None else f"{duration(3600 * hours)} one job after the other, "
    cost = f"{number(node_hours)} node-h" if price is None else cost_in_words(node_hours, price, currency)
    return f"at most {time}{cost}"


def by_type(
    found: Mapping[str | None, T], parts: Callable[[T], Iterator["RenderableType"]]
) -> Iterator["RenderableType"]:
    """The answer for each part of a job, under a heading where there are several: types of node, lengths of text."""
    for index, (name, one) in enumerate(found.items()):
        if name is not None:
            yield from () if index == 0 else ("",)
            yield styled(part_words(name), "bold")
        yield from parts(one)


def data_by_type(found: Mapping[str | None, T], **whole: Any) -> Any:
    """Return the same for the envelope: what is known of a job without types, or of each part and the `whole` job.

    What is known at other lengths of text stands beside that of the job's own, under `lengths`.
    """
    if None not in found:
        return {"types": dict(found), **whole}
    lengths = {name: one for name, one in found.items() if name is not None}
    return {**vars(found[None]), "lengths": lengths} if lengths else found[None]


def place_of(row: "Prediction") -> str:
    """Return a configuration in words, with the type and market of its nodes where there are several."""
    kind = f" of type {row.type}" * bool(row.type) + " on spot" * (row.market == "spot")
    return configuration(row.nodes, row.batch, row.local_batch).replace(",", f"{kind},", 1)


def or_dash(value: float | None) -> str:
    return "-" if value is None else number(value, 4)


def learnt(found: "Recommendation") -> Iterator[str]:
    """Say what trainings have told of the steps at their configurations."""
    for (nodes, batch), own in itertools.groupby(found.trainings, key=lambda one: (one.nodes, one.batch)):
        seen = list(own)
        who = f"training{'s' * (len(seen) > 1)} {', '.join(one.signature for one in seen)}"
        took = f"{', '.join(number(1000 * one.step_time) for one in seen)} ms a step"
        probe = seen[0].probed
        beside = "" if probe is None else f" (its probe {number(1000 * probe)}, which counts too)"
        changed = ", less where the pace has changed" * any(one.changed for one in seen)
        noise = ", ".join(percent(one.noise) for one in seen)
        yield (
            f"measured by {who}: {plural(nodes)}, batch {batch}, {took}{beside}, up to {moment(seen[-1].until)}; counts as known"
            f" to {noise} %{changed}"
        )
    yield from (f"left out of the fit: {why}" for why in found.trainings_left_out)
