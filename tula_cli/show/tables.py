"""Tables and text lines that fit the screen."""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tula_cli.words import (
    describe_configuration,
    describe_node_type,
    format_count,
    format_duration,
    format_local_time,
    format_number,
    format_percent,
    is_cost_in_node_hours,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from tula_cli.run.records.recommendations import Prediction, Recommendation

T = TypeVar("T")

# --- Tables


def make_table(columns: Sequence[str], *, left: Iterable[int] = (0,)) -> "Table":
    """Return an empty table.

    Columns whose index is in `left` hold text, the others numbers; a heading may have several lines.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, header_style="bold")
    words = set(left)
    for index, heading in enumerate(columns):
        table.add_column(heading, justify="left" if index in words else "right", no_wrap=True, vertical="bottom")
    return table


def make_table_of_columns(columns: "Mapping[str, Sequence[str | Text]]", *, left: Collection[str]) -> "Table":
    """Return a table of cells by heading; a column without a value (all `-`) is left out.

    Columns whose heading is in `left` hold text, the others numbers.
    """
    known = {heading: cells for heading, cells in columns.items() if any(str(cell) != "-" for cell in cells)}
    table = make_table(list(known), left=[index for index, heading in enumerate(known) if heading in left])
    for cells in zip(*known.values(), strict=True):
        table.add_row(*cells)
    return table


def make_table_of_lines(
    lines: Sequence[Mapping[str, str | None]], *, left: Collection[str], chosen: str | None = None
) -> "Table":
    """Return a table from the cells of each line by heading; a column without cells (None) is left out.

    Columns whose heading is in `left` hold text, the others numbers. A line is highlighted if the cell under the empty
    heading, its mark, starts with `chosen`.
    """
    headings = list(dict.fromkeys(name for line in lines for name, cell in line.items() if cell is not None))
    table = make_table(headings, left=[index for index, heading in enumerate(headings) if heading in left])
    for line in lines:
        is_chosen = chosen is not None and (line[""] or "").startswith(chosen)
        table.add_row(*(line[heading] for heading in headings), style="bold green" if is_chosen else None)
    return table


def measure_long_table_width(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return the width of a table of `render_long_table` with the smallest gap between its columns."""
    from rich.cells import cell_len

    cells = [[*heading.split("\n"), *column] for heading, *column in zip(columns, *rows, strict=True)]
    return sum(max(map(cell_len, column)) for column in cells) + len(cells) - 1


def render_long_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Iterable[int], width: int
) -> Iterator["RenderableType"]:
    """Yield a table in the style of `make_table` without its cost: rich needs a millisecond per row.

    Args:
        columns: headings, which may have several lines.
        left: indices of the columns of text; the others hold numbers.
        width: columns of the screen; the gap between columns shrinks if the table is wider.
    """
    from rich.cells import cell_len
    from rich.text import Text

    depth = max(heading.count("\n") for heading in columns) + 1
    heads = [[""] * (depth - len(lines)) + lines for lines in (heading.split("\n") for heading in columns)]
    above = list(zip(*heads, strict=True))
    widths = [max(map(cell_len, cells)) for cells in zip(*above, *rows, strict=True)]
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= width else " "
    text_columns = set(left)

    def format_line(cells: Sequence[str]) -> str:
        blanks = [" " * (column_width - cell_len(cell)) for column_width, cell in zip(widths, cells, strict=True)]
        both = enumerate(zip(cells, blanks, strict=True))
        return gap.join(
            cell + blank if index in text_columns else blank + cell for index, (cell, blank) in both
        ).rstrip()

    rule = "─" * (sum(widths) + len(gap) * (len(widths) - 1))
    yield Text("\n".join(map(format_line, above)), "bold", no_wrap=True)
    yield Text("\n".join([rule, *map(format_line, rows)]), no_wrap=True)


def print_renderable(console: "Console", part: "RenderableType") -> None:
    """Print text or a table; lines are wrapped only on a terminal, so that grep and awk can process other output."""
    from rich.table import Table
    from rich.text import Text

    if isinstance(part, Table):
        width, needed = console.width, fit_table_to_width(part, console)
        if needed > width and console.is_terminal:
            needed -= _wrap_text_columns(part)
        console.width = max(width, needed)
        with console.capture() as capture:
            console.print(part, crop=False)
        for line in capture.get().splitlines():
            print(line.rstrip(), file=console.file)
        console.width = width
    else:
        keeps = isinstance(part, Text) and part.no_wrap  # lines of a long table
        console.print(part, soft_wrap=keeps or not console.is_terminal)


def _wrap_text_columns(part: "Table") -> int:
    """Allow line breaks between the words of text cells; return by how many characters this may narrow the table."""
    saved = 0
    for column in part.columns:
        column.vertical = "top"
        if column.justify == "left":
            lines = [line for cell in (column.header, *column.cells) for line in str(cell).split("\n")]
            longest_word = max((len(word) for line in lines for word in line.split()), default=0)
            column.no_wrap, column.min_width = False, longest_word
            saved += max(map(len, lines)) - longest_word
    return saved


def fit_table_to_width(part: "Table", console: "Console") -> int:
    """Remove a table's padding if it is wider than the console; return the width it needs."""
    from rich.measure import Measurement

    unbound = console.options.update(max_width=10_000)
    needed = Measurement.get(console, unbound, part).maximum
    if needed <= console.width:
        return needed
    part.padding = 0
    return Measurement.get(console, unbound, part).maximum


def style_text(text: str, style: str, *, until: int | None = None) -> "RenderableType":
    from rich.text import Text

    styled = Text(text)
    styled.stylize(style, 0, until)
    return styled


def render_scripts(scripts: Iterable[str]) -> Iterator[str]:
    """Yield job scripts, with an empty line before each."""
    for script in scripts:
        yield ""
        yield script


def join_numbers(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


def describe_cost(node_hours: float, cost: float, currency: str) -> str:
    """Describe node-hours and cost; only node-hours if there is no price."""
    hours = f"{format_number(node_hours)} node-h"
    return hours if is_cost_in_node_hours(cost, node_hours, currency) else f"{hours}, {format_number(cost)} {currency}"


def describe_max_cost(hours: float | None, node_hours: float, price: float | None, currency: str) -> str:
    """Describe the maximum duration, node-hours and price of a plan; the duration (hours) is only known on this machine."""
    time = "" if hours is None else f"{format_duration(3600 * hours)} with one job at a time, "
    cost = f"{format_number(node_hours)} node-h" if price is None else describe_cost(node_hours, price, currency)
    return f"at most {time}{cost}"


def render_each_type(
    parts_by_name: Mapping[str | None, T], describe: Callable[[T], Iterator["RenderableType"]]
) -> Iterator["RenderableType"]:
    """Yield the output for each node type of a job, with headings if the job names node types."""
    for index, (name, part) in enumerate(parts_by_name.items()):
        if name is not None:
            yield from () if index == 0 else ("",)
            yield style_text(describe_node_type(name), "bold")
        yield from describe(part)


def make_data_by_type(parts_by_name: Mapping[str | None, T], **whole: Any) -> Any:
    """Return the data of each node type and of the `whole` job for the envelope; without node types, only the run's data."""
    return {"types": dict(parts_by_name), **whole} if None not in parts_by_name else parts_by_name[None]


def describe_prediction_row(row: "Prediction") -> str:
    """Describe a configuration, with node type and market if they matter."""
    return describe_configuration(row.nodes, row.batch, row.local_batch).replace(",", f"{row.kind_text},", 1)


def describe_metrics(metrics: Mapping[str, float]) -> str:
    """Describe metrics by their values, those of `select_shown_metrics`."""
    return ", ".join(f"{name} {format_number(value, 4)}" for name, value in select_shown_metrics(metrics).items())


def select_shown_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics without a top-5 accuracy of 100 %, which five classes or fewer always have."""
    return {name: value for name, value in metrics.items() if (name, value) != ("top5", 100.0)}


def describe_measured_trainings(recommendation: "Recommendation") -> Iterator[str]:
    """Describe the step times measured by trainings, and which trainings the fit leaves out."""
    for (nodes, batch), steps_here in itertools.groupby(
        recommendation.trainings, key=lambda steps: (steps.nodes, steps.batch)
    ):
        trainings = list(steps_here)
        who = f"training{'s' * (len(trainings) > 1)} {', '.join(steps.signature for steps in trainings)}"
        step_times_text = f"{', '.join(format_number(1000 * steps.step_time) for steps in trainings)} ms per step"
        probe = trainings[0].probed
        probe_in_words = "" if probe is None else f" (its probe: {format_number(1000 * probe)})"
        changed = " (higher because the step time changed)" * any(steps.changed for steps in trainings)
        noise = ", ".join(format_percent(steps.noise) for steps in trainings)
        yield (
            f"measured by {who}: {format_count(nodes)}, batch {batch}, {step_times_text}{probe_in_words}, up to {format_local_time(trainings[-1].until)}; the fit assumes"
            f" a standard deviation of {noise} %{changed}"
        )
    yield from (f"not used in the fit: {why}" for why in recommendation.trainings_left_out)
