"""A report as Markdown."""

import re
from collections.abc import Iterator, Sequence

from tula_cli.services.reporting.document import Document, Fact, Figure, Section, Table
from tula_cli.services.reporting.forms import cells


def markdown(document: Document) -> str:
    """Return a report as Markdown (GitHub's, for its tables); a figure is its data, see `--csv` and `--svg`."""
    return "\n".join(_lines(document)) + "\n"


def _lines(document: Document) -> Iterator[str]:
    yield f"# {_text(document.title)}"
    yield ""
    yield f"**{_text(document.question)}**"
    yield ""
    yield _text(document.answer)
    yield ""
    yield from _facts(document.facts)
    yield f"Made {_text(document.made)}."
    for section in document.sections:
        yield ""
        yield f"## {_text(section.title)}"
        yield from _section(section)


def _section(section: Section) -> Iterator[str]:
    told = [*map(_text, section.text), *([f"*Missing: {_text(section.missing)}.*"] if section.missing else [])]
    for paragraph in told:
        yield ""
        yield paragraph
    if section.facts:
        yield ""
        yield from _facts(section.facts)
    for table in section.tables:
        yield ""
        yield from _table(table)
    for figure in section.figures:
        yield ""
        yield _figure(figure)


def _facts(facts: Sequence[Fact]) -> Iterator[str]:
    yield from (f"- {_text(fact.name)}: {_text(fact.value)}" for fact in facts)
    if facts:
        yield ""


def _table(table: Table) -> Iterator[str]:
    yield f"**{_text(table.title)}**"
    yield ""
    yield from rows(table)
    if words := " ".join(filter(None, [table.caption, cells.signs(table) and f"{cells.signs(table)}."])):
        yield ""
        yield _text(words)


def rows(table: Table) -> Iterator[str]:
    """Yield the lines of a table, its head first."""
    signs = cells.marked(table)
    heads = [*([""] if signs else []), *(cells.head(column) for column in table.columns)]
    yield f"| {' | '.join(map(_text, heads))} |"
    bars = [*([":--"] if signs else []), *(":--" if column.align == "left" else "--:" for column in table.columns)]
    yield f"| {' | '.join(bars)} |"
    for place, line in enumerate(cells.lines(table)):
        yield f"| {' | '.join(map(_text, [*([signs[place]] if signs else []), *line]))} |"


def _figure(figure: Figure) -> str:
    paper = f" ({figure.paper} of the paper)" if figure.paper else ""
    marks = "; ".join(mark.text for mark in figure.marks if mark.kind in ("choice", "knee", "limit"))
    told = f"{figure.caption} Marked: {marks}." if marks else figure.caption
    return f"Figure `{figure.key}`: {_text(figure.title)}{paper}. {_text(told)}".rstrip()


def _text(words: str) -> str:
    r"""Return words in which nothing is taken for markup: ``*``, ``_``, brackets, tags of HTML; and lines are one.

    ``<`` is an entity: some readers of Markdown know no escaped one.
    """
    line = " ".join(words.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]>#|])", r"\\\1", line)
