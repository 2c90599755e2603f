"""Export of a report as CSV, Markdown and LaTeX."""

import csv
import io
import re
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from tula_cli.services.document import Cell, Column, Document, Fact, Figure, Table, TextForm
from tula_cli.words import escape_spreadsheet_cell, format_number

# --- Cells as text


def format_column_title(column: Column) -> str:
    """Return the title of a column with its unit."""
    return f"{column.title} ({column.unit})" if column.unit and column.title else column.title or column.unit


def format_cell(cell: Cell, column: Column) -> str:
    """Format a cell as text; unknown values become a dash."""
    if cell is None:
        return "-"
    return format_number(cell, column.digits or 4) if isinstance(cell, float) else str(cell)


_SIGNS = {"chosen": "*", "front": "+"}
_MEANINGS = {"chosen": "* chosen", "front": "+ on the Pareto front"}


def format_table(table: Table) -> list[list[str]]:
    """Return the header and the rows of a table as text; if rows are marked, the first column has their signs."""
    rows = [[format_column_title(column) for column in table.columns]]
    rows += [[format_cell(cell, column) for cell, column in zip(row, table.columns, strict=True)] for row in table.rows]
    if not any(table.marks):
        return rows
    signs = ["", *(_SIGNS.get(mark, "") for mark in table.marks)]
    return [[sign, *row] for sign, row in zip(signs, rows, strict=True)]


def _list_alignments(table: Table) -> list[str]:
    return ["left"] * any(table.marks) + [column.align for column in table.columns]


def _describe_table(table: Table) -> str:
    """Return the caption of a table, and the meaning of the signs of its rows."""
    meanings = ", ".join(text for mark, text in _MEANINGS.items() if mark in table.marks)
    return " ".join(filter(None, [table.caption, meanings and f"{meanings}."]))


def _describe_figure(figure: Figure) -> str:
    """Return the title of a figure, with the paper's figure that it corresponds to, and its caption with its marks."""
    paper = f" ({figure.paper} of the paper)" if figure.paper else ""
    marks = "; ".join(mark.text for mark in figure.marks if mark.kind != "event")
    return " ".join(filter(None, [f"{figure.title}{paper}.", figure.caption, marks and f"Marked: {marks}."]))


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
    marks = [[mark] for mark in table.marks] if any(table.marks) else [[]] * len(table.rows)
    yield [*map(format_column_title, table.columns), *(["mark"] if any(table.marks) else [])]
    yield from ([*row, *mark] for row, mark in zip(table.rows, marks, strict=True))


def list_figure_rows(figure: Figure) -> Iterator[Sequence[Cell]]:
    """Yield the data of a figure: one row per point and per mark, or one row per cell of a density."""

    def format_x(x: float | None) -> Cell:
        if x is None:
            return None
        if figure.x_scale == "category":
            return figure.categories[int(x)]
        return x if x % 1 else int(x)  # prints a batch as 16 instead of 16.00

    if (density := figure.density) is not None:
        ends = [f"{label} {end}" for label in (figure.x_label, figure.y_label) for end in ("from", "to")]
        yield ["share", *ends]
        for i, shares in enumerate(density.shares):
            yield from (
                [share, *density.x_edges[i : i + 2], *density.y_edges[j : j + 2]] for j, share in enumerate(shares)
            )
        return
    yield ["series", figure.x_label, figure.y_label, "low", "high", "measured"]
    for series in figure.series:
        for row_index, x in enumerate(series.x):
            ends_of_point = [None if end is None else end[row_index] for end in (series.low, series.high)]
            measured = None if series.measured is None else str(series.measured[row_index]).lower()
            yield [series.name, format_x(x), series.y[row_index], *ends_of_point, measured]
    for mark in figure.marks:
        yield [f"{mark.kind}: {mark.text}", format_x(mark.x), mark.y, None, None, None]


def _render_csv_rows(rows: Iterable[Sequence[Cell]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(escape_spreadsheet_cell, row) for row in rows)
    return text.getvalue()


# --- Text


def _render_text(document: Document, markup: "Markdown | Latex", *, end: str) -> str:
    blocks = [markup.render_header(document), markup.render_facts(document.facts)]
    for section in document.sections:
        blocks += [markup.heading.format(markup.escape_text(section.title)), *map(markup.escape_text, section.text)]
        if section.missing:
            blocks.append(markup.emphasis.format(markup.escape_text(f"Missing: {section.missing.removesuffix('.')}.")))
        blocks += [markup.render_facts(section.facts), *map(markup.render_table, section.tables)]
        blocks += [
            f"{markup.render_figure_caption(figure)}: {markup.escape_text(_describe_figure(figure))}"
            for figure in section.figures
        ]
    return "\n\n".join(block for block in [*blocks, end] if block) + "\n"


def render_markdown(document: Document) -> str:
    """Return a report as GitHub-flavoured Markdown; figures are described by caption, see `--csv` and `--svg`."""
    return _render_text(document, Markdown(), end=f"Made {Markdown().escape_text(document.made)}.")


class Markdown:
    """GitHub-flavoured Markdown."""

    heading, emphasis = "## {}", "*{}*"  # of an escaped text

    def escape_text(self, text: str) -> str:
        r"""Escape text for Markdown (``*``, ``_``, brackets, HTML tags) and join its lines into one.

        ``<`` becomes an entity, because some Markdown readers do not support a backslash before it.
        """
        line = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
        return re.sub(r"([\\`*_\[\]>#|])", r"\\\1", line)

    def render_header(self, document: Document) -> str:
        title, question, answer = map(self.escape_text, (document.title, document.question, document.answer))
        return f"# {title}\n\n**{question}**\n\n{answer}"

    def render_facts(self, facts: Sequence[Fact]) -> str:
        return "\n".join(f"- {self.escape_text(fact.name)}: {self.escape_text(fact.value)}" for fact in facts)

    def render_table(self, table: Table) -> str:
        header, *rows = [f"| {' | '.join(map(self.escape_text, row))} |" for row in format_table(table)]
        rule = " | ".join(":--" if align == "left" else "--:" for align in _list_alignments(table))
        text = "\n".join([header, f"| {rule} |", *rows])
        return "\n\n".join(
            filter(None, [f"**{self.escape_text(table.title)}**", text, self.escape_text(_describe_table(table))])
        )

    def render_figure_caption(self, figure: Figure) -> str:
        return f"Figure `{figure.key}`"


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
    return _render_text(document, Latex(), end=r"\end{document}")


class Latex:
    """LaTeX of class article, without packages."""

    heading, emphasis = r"\section*{{{}}}", r"\emph{{{}}}"  # of an escaped text

    def escape_text(self, text: str) -> str:
        """Escape text for LaTeX.

        Letters missing in its standard fonts lose their accents; other unsupported characters become a question mark.
        """
        line = " ".join(text.split()).replace('"', "''")
        return "".join(
            LATEX_ESCAPES.get(character)
            or unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
            or "?"
            for character in line
        )

    def render_header(self, document: Document) -> str:
        title, made, question, answer = map(
            self.escape_text, (document.title, document.made, document.question, document.answer)
        )
        return (
            "\\documentclass[a4paper]{article}\n"
            "\\setlength{\\oddsidemargin}{-5mm}\\setlength{\\textwidth}{170mm}"
            "\\setlength{\\topmargin}{-10mm}\\setlength{\\textheight}{240mm}\n"
            f"\\begin{{document}}\n\\title{{{title}}}\n\\author{{}}\n\\date{{{made}}}\n\\maketitle\n"
            f"\\noindent\\textbf{{{question}}}\n\n\\noindent {answer}"
        )

    def render_facts(self, facts: Sequence[Fact]) -> str:
        items = [rf"\item[{{{self.escape_text(fact.name)}}}] {self.escape_text(fact.value)}" for fact in facts]
        return "\n".join([r"\begin{description}", *items, r"\end{description}"]) if items else ""

    def render_table(self, table: Table) -> str:
        header, *rows = format_table(table)
        letters = "".join("l" if align == "left" else "r" for align in _list_alignments(table))
        size = r"\small" if len(header) < WIDE_TABLE else r"\scriptsize\setlength{\tabcolsep}{2pt}"
        titles = [self._wrap_column_title(title, character) for title, character in zip(header, letters, strict=True)]
        lines = [titles, *([self.escape_text(cell) for cell in row] for row in rows)]
        first, *others = [rf"{' & '.join(line)} \\" for line in lines]
        caption = self.escape_text(" ".join(filter(None, [f"{table.title}.", _describe_table(table)])))
        begin = [
            rf"\begin{{table}}[htbp]\centering{size}",
            rf"\caption{{{caption}}}",
            rf"\begin{{tabular}}{{{letters}}}",
        ]
        end = [r"\end{tabular}", r"\end{table}"]
        return "\n".join([*begin, r"\hline", first, r"\hline", *others, r"\hline", *end])

    def _wrap_column_title(self, title: str, character: str) -> str:
        lines = textwrap.wrap(title, 10, break_long_words=False, break_on_hyphens=False)
        text = r"\\".join(map(self.escape_text, lines))
        return rf"\begin{{tabular}}[b]{{@{{}}{character}@{{}}}}{text}\end{{tabular}}" if len(lines) > 1 else text

    def render_figure_caption(self, figure: Figure) -> str:
        return rf"\noindent Figure \texttt{{{self.escape_text(figure.key)}}}"


RENDERERS: Mapping[TextForm, Callable[[Document], str]] = {
    "markdown": render_markdown,
    "latex": render_latex,
    "csv": render_csv,
}
