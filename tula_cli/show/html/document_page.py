"""A report as one page for a browser: a file that stands alone, without scripts and without anything to load."""

import html
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

from tula_cli.services.reporting.document import Cell, Column, Document, Fact, Figure, Section, Table
from tula_cli.services.reporting.forms import cells
from tula_cli.services.reporting.forms.csv_files import figure_rows
from tula_cli.show.html.figures import figure_svg, require_matplotlib
from tula_cli.show.html.fitted_text import clean
from tula_cli.show.html.page_style import style
from tula_cli.words import plural

_MARKS = {"chosen": ("★", "chosen"), "front": ("◆", "marked")}
"""The sign of a row and its name; what else is marked than the choice the caption of a table says."""
_MOST_ROWS = 1000  # of the numbers behind a figure
_DIGITS = 6  # of them
_WORDY = 90  # characters of a fact, from which on it has a line of its own
_LONG = 28  # characters, from which on a cell is broken into lines


@dataclass
class Drawn:
    """The figures of a page so far: how many, and how the series of each name look."""

    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    known: dict[str, int] = field(default_factory=dict)

    def looks_of(self, figure: Figure) -> dict[str, int]:
        """Return the looks of a figure's series: those that their names have had before, and no two the same."""
        names = list(dict.fromkeys(series.name for series in figure.series))
        found: dict[str, int] = {}
        for name in names:
            if name in self.known and self.known[name] not in found.values():
                found[name] = self.known[name]
        for name in names:
            if name not in found:
                found[name] = next(place for place in count() if place not in found.values())
                self.known.setdefault(name, found[name])
        return found


def page(document: Document) -> str:
    """Return the page of a report.

    Raises:
        SpecError: matplotlib is not installed.
    """
    require_matplotlib()
    title, drawn = text(document.title), Drawn()
    parts = [
        *_head(document),
        *_contents(document.sections),
        *_facts(document.facts),
        '<main id="main">',
        *(part for place, one in enumerate(document.sections) for part in _section(one, place, drawn)),
        "</main>",
        f'<footer><p class="made">{text(document.made)}</p></footer>',
    ]
    meta = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
    )
    head = f"<head>{meta}<title>{title}</title><style>{style()}</style></head>"
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en">{head}\n<body><div class="page">\n{body}\n</div></body></html>\n'


def text(words: str) -> str:
    """Return words as text of a page, whatever is in them."""
    return html.escape(clean(words))


def _head(document: Document) -> Iterator[str]:
    yield '<a class="skip" href="#main">To the report</a>'
    yield f"<header><h1>{text(document.title)}</h1>"
    if document.question:
        yield f'<p class="question">{text(document.question)}</p>'
    if document.answer:
        yield f'<p class="answer">{text(document.answer)}</p>'
    yield "</header>"


def _contents(sections: tuple[Section, ...]) -> Iterator[str]:
    if len(sections) > 1:
        yield '<nav aria-labelledby="contents"><h2 id="contents">Contents</h2><ul>'
        for place, section in enumerate(sections):
            yield f'<li><a href="#{_anchor(section, place)}">{text(section.title)}</a></li>'
        yield "</ul></nav>"


def _anchor(section: Section, place: int) -> str:
    """Return the id of a section, which no other has and nothing else on the page."""
    return f"section-{place + 1}-" + re.sub(r"[^a-z0-9]+", "-", section.key.lower()).strip("-")


def _facts(facts: tuple[Fact, ...]) -> Iterator[str]:
    if facts:
        yield '<dl class="facts">'
        for fact in facts:
            long = ' class="long"' * (len(fact.value) > _WORDY)
            yield f"<div{long}><dt>{text(fact.name)}</dt><dd>{text(fact.value)}</dd></div>"
        yield "</dl>"


def _section(section: Section, place: int, drawn: Drawn) -> Iterator[str]:
    anchor = _anchor(section, place)
    yield f'<section id="{anchor}" aria-labelledby="{anchor}-head"><h2 id="{anchor}-head">{text(section.title)}</h2>'
    yield from (f"<p>{text(words)}</p>" for words in section.text)
    if section.missing:
        yield f'<p class="missing"><strong>Missing:</strong> {text(section.missing)}</p>'
    yield from _facts(section.facts)
    yield from (part for table in section.tables for part in _table(table))
    if section.figures:
        yield '<div class="figures">'
        yield from (part for figure in section.figures for part in _figure(figure, drawn))
        yield "</div>"
    yield "</section>"


def _figure(figure: Figure, drawn: Drawn) -> Iterator[str]:
    prefix = f"figure-{next(drawn.numbers)}"
    yield f'<figure id="{prefix}"><h3>{text(figure.title)}</h3>'
    yield figure_svg(figure, prefix=f"{prefix}-drawn", looks=drawn.looks_of(figure))
    yield "<figcaption>"
    if figure.caption:
        yield f'<p class="caption">{text(figure.caption)}</p>'
    if figure.paper:
        yield f'<p class="paper">{text(figure.paper)} of the paper, for this job.</p>'
    yield "</figcaption>"
    table = numbers(figure)
    if table.rows:
        yield f"<details><summary>The numbers of this figure ({plural(len(table.rows), 'row')})</summary>"
        yield from _table(table, most=_MOST_ROWS)
        yield "</details>"
    yield "</figure>"


def numbers(figure: Figure) -> Table:
    """Return what is drawn as a table; what no row has is no column."""
    head, *rows = figure_rows(figure)
    shown = [place for place in range(len(head)) if any(row[place] not in (None, "") for row in rows)]
    columns = [
        Column(
            str(head[place]),
            align="left" if any(isinstance(row[place], str) for row in rows) else "right",
            digits=_DIGITS,
        )
        for place in shown
    ]
    told = tuple(tuple(row[place] for place in shown) for row in rows)
    return Table(f"{figure.key}-numbers", f"{figure.title}: numbers", tuple(columns), told)


# --- tables


def _table(table: Table, *, most: int | None = None) -> Iterator[str]:
    """Yield a table in a box of its own, which scrolls where the page has no room for it."""
    marked = any(table.marks)
    yield f'<div class="scroll" role="region" tabindex="0" aria-label="{text(table.title)}"><table>'
    yield _caption(table)
    head = '<th scope="col" aria-label="mark"></th>' if marked else ""
    yield f"<thead><tr>{head}{''.join(map(_head_cell, table.columns))}</tr></thead><tbody>"
    for place, row in enumerate(table.rows[:most]):
        yield _row(table, row, table.marks[place] if place < len(table.marks) else "", marked=marked)
    yield "</tbody></table>"
    if most is not None and len(table.rows) > most:
        yield f"<p>The first {most} of {len(table.rows)} rows.</p>"
    yield "</div>"


def _caption(table: Table) -> str:
    notes = [words for words in (table.caption, "★ chosen" * ("chosen" in table.marks)) if words]
    told = "".join(f'<span class="caption">{text(words)} </span>' for words in notes)
    return f"<caption><div><strong>{text(table.title)}</strong>{told}</div></caption>"


def _head_cell(column: Column) -> str:
    unit = f' <span class="unit">({text(column.unit)})</span>' if column.unit else ""
    return f'<th scope="col"{_class(column, "")}>{text(column.title)}{unit}</th>'


def _row(table: Table, row: Iterable[Cell], mark: str, *, marked: bool) -> str:
    sign, words = _MARKS.get(mark, ("", ""))
    first = f'<td class="mark"><span role="img" aria-label="{words}">{sign}</span></td>' if sign else "<td></td>"
    told_cells = [
        f"<td{_class(column, told)}>{text(told)}</td>"
        for column, told in (
            (column, cells.text(cell, column)) for column, cell in zip(table.columns, row, strict=True)
        )
    ]
    return f"<tr{' class=chosen' * (mark == 'chosen')}>{first * marked}{''.join(told_cells)}</tr>"


def _class(column: Column, told: str) -> str:
    names = ["left"] * (column.align == "left") + ["words"] * (len(told) > _LONG)
    return f' class="{" ".join(names)}"' if names else ""
