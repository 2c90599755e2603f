"""Export of a report as CSV, Markdown and LaTeX."""

import csv
import io
import re
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tula_cli.services.document import Cell, Column, Document, Fact, Figure, Section, Table
from tula_cli.words import escape_spreadsheet_cell, format_number

# --- Cells as text


def format_column_title(column: Column) -> str:
    """Return the title of a column with its unit."""
    return f"{column.title} ({column.unit})" if column.unit and column.title else column.title or column.unit


def format_cell(cell: Cell, column: Column) -> str:
    """Format a cell as text; unknown values become a dash."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return format_number(cell, column.digits or 4)
    return str(cell)


def format_rows(table: Table) -> Sequence[tuple[str, ...]]:
    """Return the rows of a table as text."""
    return [
        tuple(format_cell(cell, column) for cell, column in zip(row, table.columns, strict=True)) for row in table.rows
    ]


def list_row_signs(table: Table) -> Sequence[str]:
    """Return the sign of each row: * chosen, + on the Pareto front, else empty; an empty list if no row is marked."""
    signs = {"chosen": "*", "front": "+"}
    return [signs.get(mark, "") for mark in table.marks] if any(table.marks) else []


def explain_signs(table: Table) -> str:
    """Return the legend of the row signs; empty if no row is marked."""
    legend = {"chosen": "* chosen", "front": "+ on the Pareto front"}
    return ", ".join(text for mark, text in legend.items() if mark in table.marks)


# --- CSV


def render_csv_files(document: Document) -> dict[str, str]:
    """Return the CSV text of each table and figure of a report, by its key."""
    texts: dict[str, str] = {}
    for section in document.sections:
        for table in section.tables:
            texts[_choose_free_name(f"table_{table.key}", texts)] = _render_csv_rows(list_table_rows(table))
        for figure in section.figures:
            texts[_choose_free_name(f"figure_{figure.key}", texts)] = _render_csv_rows(list_figure_rows(figure))
    return texts


def _choose_free_name(name: str, taken: Mapping[str, str]) -> str:
    """Return `name`, with a number appended if the name is already taken."""
    names = (name, *(f"{name}_{number}" for number in range(2, len(taken) + 3)))
    return next(candidate for candidate in names if candidate not in taken)


def render_csv(document: Document) -> str:
    """Return all tables and figures as one CSV text: "# key: title" before each, an empty line after it."""
    titles = [
        title
        for section in document.sections
        for title in (*(table.title for table in section.tables), *(figure.title for figure in section.figures))
    ]
    return "\n".join(
        f"# {name}: {' '.join(title.split())}\n{text}"
        for (name, text), title in zip(render_csv_files(document).items(), titles, strict=True)
    )


def list_table_rows(table: Table) -> Iterator[Sequence[Cell]]:
    """Yield the header and the rows of a table; numbers are not rounded, and unknown values remain None."""
    marks = table.marks if any(table.marks) else ()
    yield [*(format_column_title(column) for column in table.columns), *(["mark"] if marks else [])]
    for place, row in enumerate(table.rows):
        yield [*row, *([marks[place]] if marks else [])]


def list_figure_rows(figure: Figure) -> Iterator[Sequence[Cell]]:
    """Yield the data of a figure: one row per point and per mark, or one row per cell of a density."""
    if figure.density is not None:
        yield from _list_density_rows(figure)
        return
    yield ["series", figure.x_label, figure.y_label, "low", "high", "measured"]
    for series in figure.series:
        for place, x in enumerate(series.x):
            ends = [None if end is None else end[place] for end in (series.low, series.high)]
            measured = None if series.measured is None else str(series.measured[place]).lower()
            yield [series.name, _format_x(figure, x), series.y[place], *ends, measured]
    for mark in figure.marks:
        yield [
            f"{mark.kind}: {mark.text}",
            None if mark.x is None else _format_x(figure, mark.x),
            mark.y,
            None,
            None,
            None,
        ]


def _list_density_rows(figure: Figure) -> Iterator[Sequence[Cell]]:
    density = figure.density
    assert density is not None
    yield ["share", f"{figure.x_label} from", f"{figure.x_label} to", f"{figure.y_label} from", f"{figure.y_label} to"]
    for column, shares in enumerate(density.shares):
        for row, share in enumerate(shares):
            yield [share, *density.x_edges[column : column + 2], *density.y_edges[row : row + 2]]


def _format_x(figure: Figure, x: float) -> Cell:
    return figure.categories[int(x)] if figure.x_scale == "category" else x


def _render_csv_rows(rows: Iterable[Sequence[Cell]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(escape_spreadsheet_cell, row) for row in rows)
    return text.getvalue()


# --- Markdown


def render_markdown(document: Document) -> str:
    """Return a report as GitHub-flavoured Markdown; figures are described by caption, see `--csv` and `--svg`."""
    return "\n".join(_render_markdown_lines(document)) + "\n"


def _render_markdown_lines(document: Document) -> Iterator[str]:
    yield f"# {_escape_markdown(document.title)}"
    yield ""
    yield f"**{_escape_markdown(document.question)}**"
    yield ""
    yield _escape_markdown(document.answer)
    yield ""
    yield from _render_markdown_facts(document.facts)
    yield f"Made {_escape_markdown(document.made)}."
    for section in document.sections:
        yield ""
        yield f"## {_escape_markdown(section.title)}"
        yield from _render_markdown_section(section)


def _render_markdown_section(section: Section) -> Iterator[str]:
    parts = [
        *map(_escape_markdown, section.text),
        *([f"*Missing: {_escape_markdown(section.missing)}.*"] if section.missing else []),
    ]
    for paragraph in parts:
        yield ""
        yield paragraph
    if section.facts:
        yield ""
        yield from _render_markdown_facts(section.facts)
    for table in section.tables:
        yield ""
        yield from _render_markdown_table(table)
    for figure in section.figures:
        yield ""
        yield _render_markdown_figure(figure)


def _render_markdown_facts(facts: Sequence[Fact]) -> Iterator[str]:
    yield from (f"- {_escape_markdown(fact.name)}: {_escape_markdown(fact.value)}" for fact in facts)
    if facts:
        yield ""


def _render_markdown_table(table: Table) -> Iterator[str]:
    yield f"**{_escape_markdown(table.title)}**"
    yield ""
    yield from render_markdown_rows(table)
    if words := " ".join(filter(None, [table.caption, explain_signs(table) and f"{explain_signs(table)}."])):
        yield ""
        yield _escape_markdown(words)


def render_markdown_rows(table: Table) -> Iterator[str]:
    """Yield the Markdown lines of a table, starting with its header."""
    signs = list_row_signs(table)
    heads = [*([""] if signs else []), *(format_column_title(column) for column in table.columns)]
    yield f"| {' | '.join(map(_escape_markdown, heads))} |"
    bars = [*([":--"] if signs else []), *(":--" if column.align == "left" else "--:" for column in table.columns)]
    yield f"| {' | '.join(bars)} |"
    for place, line in enumerate(format_rows(table)):
        yield f"| {' | '.join(map(_escape_markdown, [*([signs[place]] if signs else []), *line]))} |"


def _render_markdown_figure(figure: Figure) -> str:
    title, caption = _describe_figure(figure)
    return f"Figure `{figure.key}`: {_escape_markdown(title)}. {_escape_markdown(caption)}".rstrip()


def _describe_figure(figure: Figure) -> tuple[str, str]:
    """Return the title of a figure, with the paper's figure that it corresponds to, and its caption with its marks."""
    paper = f" ({figure.paper} of the paper)" if figure.paper else ""
    marks = "; ".join(mark.text for mark in figure.marks if mark.kind in ("choice", "knee", "limit"))
    return f"{figure.title}{paper}", f"{figure.caption} Marked: {marks}." if marks else figure.caption


def _escape_markdown(words: str) -> str:
    r"""Escape text for Markdown (``*``, ``_``, brackets, HTML tags) and join its lines into one.

    ``<`` becomes an entity, because some Markdown readers do not support a backslash before it.
    """
    line = " ".join(words.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]>#|])", r"\\\1", line)


# --- LaTeX

LATEX_ESCAPES = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "*": r"$\ast$", "[": "{[}", "]": "{]}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    '"': r"\textquotedbl{}", "±": r"$\pm$", "×": r"$\times$", "·": r"$\cdot$", "–": "--", "—": "---", "δ": r"$\delta$",
    "Δ": r"$\Delta$", "≤": r"$\le$", "≥": r"$\ge$", "µ": r"$\mu$", "€": "EUR", "…": r"\ldots{}",
}  # fmt: skip
"""LaTeX escapes of special characters, also at the start of a row, and of those missing in standard fonts."""
WIDE_TABLE = 9
"""Number of columns from which a table is set in script size."""


def render_latex(document: Document) -> str:
    """Return a report as a complete LaTeX document (class article, plain tabular)."""
    return "\n".join(_render_latex_lines(document)) + "\n"


def escape_latex(words: str) -> str:
    """Escape text for LaTeX.

    Letters missing in its standard fonts lose their accents; other unsupported characters become a question mark.
    """
    words = " ".join(words.split()).replace('"', "''")
    return "".join(LATEX_ESCAPES.get(letter) or _escape_letter(letter) for letter in words)


def _escape_letter(letter: str) -> str:
    if letter.isascii():
        return letter
    base = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()
    return base or "?"


def _render_latex_lines(document: Document) -> Iterator[str]:
    yield r"\documentclass[a4paper]{article}"
    yield r"\setlength{\oddsidemargin}{-5mm}\setlength{\textwidth}{170mm}\setlength{\topmargin}{-10mm}\setlength{\textheight}{240mm}"
    yield r"\begin{document}"
    yield rf"\title{{{escape_latex(document.title)}}}"
    yield r"\author{}"
    yield rf"\date{{{escape_latex(document.made)}}}"
    yield r"\maketitle"
    yield rf"\noindent\textbf{{{escape_latex(document.question)}}}"
    yield ""
    yield rf"\noindent {escape_latex(document.answer)}"
    yield from _render_latex_facts(document.facts)
    for section in document.sections:
        yield ""
        yield rf"\section*{{{escape_latex(section.title)}}}"
        yield from _render_latex_section(section)
    yield r"\end{document}"


def _render_latex_section(section: Section) -> Iterator[str]:
    for paragraph in section.text:
        yield ""
        yield escape_latex(paragraph)
    if section.missing:
        yield ""
        yield rf"\emph{{Missing: {escape_latex(section.missing)}.}}"
    yield from _render_latex_facts(section.facts)
    for table in section.tables:
        yield ""
        yield from render_latex_table(table)
    for figure in section.figures:
        yield ""
        yield _render_latex_figure(figure)


def _render_latex_facts(facts: Sequence[Fact]) -> Iterator[str]:
    if not facts:
        return
    yield r"\begin{description}"
    yield from (rf"\item[{{{escape_latex(fact.name)}}}] {escape_latex(fact.value)}" for fact in facts)
    yield r"\end{description}"


def render_latex_table(table: Table) -> Iterator[str]:
    """Yield the LaTeX lines of a table with its caption."""
    signs = list_row_signs(table)
    heads = [*([""] if signs else []), *(format_column_title(column) for column in table.columns)]
    bars = "l" * bool(signs) + "".join("l" if column.align == "left" else "r" for column in table.columns)
    size = r"\small" if len(heads) < WIDE_TABLE else r"\scriptsize\setlength{\tabcolsep}{2pt}"
    yield rf"\begin{{table}}[htbp]\centering{size}"
    words = " ".join(
        filter(None, [f"{table.title}.", table.caption, explain_signs(table) and f"{explain_signs(table)}."])
    )
    yield rf"\caption{{{escape_latex(words)}}}"
    yield rf"\begin{{tabular}}{{{bars}}}"
    yield r"\hline"
    yield rf"{' & '.join(_render_latex_head(words, left=bar == 'l') for words, bar in zip(heads, bars, strict=True))} \\"
    yield r"\hline"
    for place, line in enumerate(format_rows(table)):
        yield rf"{' & '.join(escape_latex(cell) for cell in [*([signs[place]] if signs else []), *line])} \\"
    yield r"\hline"
    yield r"\end{tabular}"
    yield r"\end{table}"


def _render_latex_head(words: str, *, left: bool) -> str:
    """Return the title of a column, broken into short lines."""
    lines = [escape_latex(line) for line in textwrap.wrap(words, 10, break_long_words=False, break_on_hyphens=False)]
    broken = r"\\".join(lines)
    return (
        rf"\begin{{tabular}}[b]{{@{{}}{'l' if left else 'r'}@{{}}}}{broken}\end{{tabular}}"
        if len(lines) > 1
        else broken
    )


def _render_latex_figure(figure: Figure) -> str:
    return (
        rf"\noindent Figure \texttt{{{escape_latex(figure.key)}}}: {escape_latex('. '.join(_describe_figure(figure)))}"
    )
