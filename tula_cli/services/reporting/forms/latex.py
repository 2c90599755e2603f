"""A report as LaTeX that every standard class sets, without a package."""

import textwrap
import unicodedata
from collections.abc import Iterator, Sequence

from tula_cli.services.reporting.document import Document, Fact, Figure, Section, Table
from tula_cli.services.reporting.forms import cells

SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "*": r"$\ast$", "[": "{[}", "]": "{]}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    '"': r"\textquotedbl{}", "±": r"$\pm$", "×": r"$\times$", "·": r"$\cdot$", "–": "--", "—": "---", "δ": r"$\delta$",
    "Δ": r"$\Delta$", "≤": r"$\le$", "≥": r"$\ge$", "µ": r"$\mu$", "€": "EUR", "…": r"\ldots{}",
}  # fmt: skip
"""What LaTeX takes for itself (a star or a bracket that begins a row, too), or its standard fonts lack."""
WIDE = 9
"""Columns from which on a table is set small, and turned where it has many more."""


def latex(document: Document) -> str:
    """Return a report as a whole LaTeX document: plain tabular, class article."""
    return "\n".join(_lines(document)) + "\n"


def escaped(words: str) -> str:
    """Return words as LaTeX sets them; letters that its standard fonts lack lose their accents, others become a question mark."""
    words = " ".join(words.split()).replace('"', "''")
    return "".join(SPECIAL.get(letter) or _plain(letter) for letter in words)


def _plain(letter: str) -> str:
    if letter.isascii():
        return letter
    base = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()
    return base or "?"


def _lines(document: Document) -> Iterator[str]:
    yield r"\documentclass[a4paper]{article}"
    yield r"\setlength{\oddsidemargin}{-5mm}\setlength{\textwidth}{170mm}\setlength{\topmargin}{-10mm}\setlength{\textheight}{240mm}"
    yield r"\begin{document}"
    yield rf"\title{{{escaped(document.title)}}}"
    yield r"\author{}"
    yield rf"\date{{{escaped(document.made)}}}"
    yield r"\maketitle"
    yield rf"\noindent\textbf{{{escaped(document.question)}}}"
    yield ""
    yield rf"\noindent {escaped(document.answer)}"
    yield from _facts(document.facts)
    for section in document.sections:
        yield ""
        yield rf"\section*{{{escaped(section.title)}}}"
        yield from _section(section)
    yield r"\end{document}"


def _section(section: Section) -> Iterator[str]:
    for paragraph in section.text:
        yield ""
        yield escaped(paragraph)
    if section.missing:
        yield ""
        yield rf"\emph{{Missing: {escaped(section.missing)}.}}"
    yield from _facts(section.facts)
    for table in section.tables:
        yield ""
        yield from tabular(table)
    for figure in section.figures:
        yield ""
        yield _figure(figure)


def _facts(facts: Sequence[Fact]) -> Iterator[str]:
    if not facts:
        return
    yield r"\begin{description}"
    yield from (rf"\item[{{{escaped(fact.name)}}}] {escaped(fact.value)}" for fact in facts)
    yield r"\end{description}"


def tabular(table: Table) -> Iterator[str]:
    """Yield a table with its caption, as LaTeX."""
    signs = cells.marked(table)
    heads = [*([""] if signs else []), *(cells.head(column) for column in table.columns)]
    bars = "l" * bool(signs) + "".join("l" if column.align == "left" else "r" for column in table.columns)
    size = r"\small" if len(heads) < WIDE else r"\scriptsize\setlength{\tabcolsep}{2pt}"
    yield rf"\begin{{table}}[htbp]\centering{size}"
    words = " ".join(filter(None, [f"{table.title}.", table.caption, cells.signs(table) and f"{cells.signs(table)}."]))
    yield rf"\caption{{{escaped(words)}}}"
    yield rf"\begin{{tabular}}{{{bars}}}"
    yield r"\hline"
    yield rf"{' & '.join(_head(words, left=bar == 'l') for words, bar in zip(heads, bars, strict=True))} \\"
    yield r"\hline"
    for place, line in enumerate(cells.lines(table)):
        yield rf"{' & '.join(escaped(cell) for cell in [*([signs[place]] if signs else []), *line])} \\"
    yield r"\hline"
    yield r"\end{tabular}"
    yield r"\end{table}"


def _head(words: str, *, left: bool) -> str:
    """Return the head of a column, in short lines."""
    lines = [escaped(line) for line in textwrap.wrap(words, 10, break_long_words=False, break_on_hyphens=False)]
    broken = r"\\".join(lines)
    return (
        rf"\begin{{tabular}}[b]{{@{{}}{'l' if left else 'r'}@{{}}}}{broken}\end{{tabular}}"
        if len(lines) > 1
        else broken
    )


def _figure(figure: Figure) -> str:
    paper = f" ({figure.paper} of the paper)" if figure.paper else ""
    marks = "; ".join(mark.text for mark in figure.marks if mark.kind in ("choice", "knee", "limit"))
    told = f"{figure.caption} Marked: {marks}." if marks else figure.caption
    return rf"\noindent Figure \texttt{{{escaped(figure.key)}}}: {escaped(f'{figure.title}{paper}. {told}')}"
