"""A report as one self-contained HTML page, without scripts or external resources."""

import html
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from operator import itemgetter

from tula_cli.extras.report.formats import format_cell, format_column_title, list_figure_rows
from tula_cli.extras.report.svg import COLORS, render_svg, replace_invalid_xml_characters, require_matplotlib
from tula_cli.extras.report.values import build_table
from tula_cli.services.document import Cell, Column, Document, Fact, Figure, Section, Table
from tula_cli.words import format_count

# --- Style

_SCREEN_CSS = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,
'DejaVu Sans',sans-serif;overflow-wrap:anywhere}
.page{max-width:78rem;margin:0 auto;padding:1.25rem 1rem 3rem}
h1{font-size:1.5rem;line-height:1.25;margin:0 0 1rem}
h2{font-size:1.25rem;line-height:1.3;margin:2.75rem 0 .75rem;padding-top:.75rem;border-top:1px solid var(--grid)}
h3{font-size:1rem;margin:0 0 .15rem}
p{max-width:75ch;margin:.5rem 0}
a{color:var(--link)}
.question{font-size:1.05rem;color:var(--muted)}
.answer{font-size:1.2rem;font-weight:600;max-width:60ch;border-left:.25rem solid var(--link);padding-left:.75rem}
.made,.caption,.paper{color:var(--muted);font-size:.875rem}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,19rem),1fr));gap:.4rem 2rem;margin:1.25rem 0}
.facts div{display:grid;grid-template-columns:7.5rem 1fr;gap:.75rem}
.facts .long{grid-column:1/-1}.facts .long dd{max-width:75ch}
.facts dt{color:var(--muted)}.facts dd{margin:0}
nav ul{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;list-style:none;padding:0;margin:.25rem 0 0}
nav h2{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);margin:0;padding:0;border:0}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,26rem),1fr));gap:2rem 2.5rem;margin-top:1.25rem;
align-items:start}
figure{margin:0;min-width:0;max-width:38rem}
svg.figure{display:block;width:100%;height:auto;margin-top:.35rem}
figcaption p{margin:.15rem 0}
.missing{border:1px dashed var(--muted);border-radius:.35rem;padding:.6rem .8rem;max-width:75ch}
.scroll{overflow-x:auto;margin:1.25rem 0;max-width:100%;background:linear-gradient(to right,var(--paper) 1rem,transparent),
linear-gradient(to left,var(--paper) 1rem,transparent) 100% 0,linear-gradient(to right,var(--shade),transparent),
linear-gradient(to left,var(--shade),transparent) 100% 0;background-size:3rem 100%,3rem 100%,.8rem 100%,.8rem 100%;
background-repeat:no-repeat;background-attachment:local,local,scroll,scroll}
.scroll:focus-visible,summary:focus-visible,a:focus-visible{outline:2px solid var(--link);outline-offset:2px}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums;overflow-wrap:normal}
caption{text-align:left;padding-bottom:.4rem}
caption div{overflow-wrap:anywhere;position:sticky;left:0;width:max-content;max-width:min(75ch,calc(100vw - 2rem))}
caption strong{display:block;font-size:1rem}
th,td{padding:.28rem .55rem;vertical-align:top;text-align:right;white-space:nowrap}
th{border-bottom:1px solid var(--muted);vertical-align:bottom;font-weight:600;white-space:normal}
th .unit{font-weight:400;color:var(--muted)}
td{border-bottom:1px solid var(--grid)}
th:first-child,td:first-child{padding-left:.2rem}
.left{text-align:left}
td.words{white-space:normal;min-width:24ch;max-width:48ch;overflow-wrap:anywhere}
tr.chosen td{font-weight:600;background:var(--chosen)}
td.mark{text-align:center;padding:.28rem .2rem}
details{margin-top:.5rem;font-size:.9rem}
summary{cursor:pointer;color:var(--muted);padding:.25rem 0}
details .scroll{max-height:24rem;overflow:auto;margin:.5rem 0}
details th,details td,details td.words{padding:.2rem .35rem;font-size:.8rem;min-width:0}details .left{white-space:normal}
.skip{position:absolute;left:-100vw}.skip:focus{left:1rem;top:.5rem;background:var(--paper);padding:.5rem}
"""
_PRINT_CSS = """
@media(max-width:30rem){.page{padding:1rem .75rem 2rem}}
@media screen and (max-width:48rem){
.cards thead{display:none}.cards table,.cards tbody,.cards caption{display:block}
.cards tr{display:grid;grid-template-columns:repeat(auto-fill,minmax(7rem,1fr));gap:.25rem .75rem;padding:.6rem .3rem;
border-bottom:1px solid var(--muted)}
.cards td,.cards td.words{display:block;overflow-wrap:anywhere;border:0;padding:0;text-align:left;white-space:normal;min-width:0;max-width:none}
.cards td:empty{display:none}.cards td.mark{grid-column:1/-1}
.cards tr.chosen{background:var(--chosen)}.cards tr.chosen td{background:none}
.cards td[data-label]::before{content:attr(data-label);display:block;color:var(--muted);font-size:.75rem;font-weight:400}
.cards td.words{grid-column:1/-1}
details th,details td,details td.words{padding:.15rem .2rem;font-size:.7rem;overflow-wrap:anywhere}
}
@page{margin:15mm}
@media print{
body{font-size:10.5pt}.page{max-width:none;padding:0}
nav,details,.skip{display:none}
.figures{grid-template-columns:1fr 1fr;gap:6mm 8mm}
figure,tr,.missing,.facts div{break-inside:avoid}
h1,h2,h3,caption{break-after:avoid}
.scroll{overflow:visible;background:none}
table{font-size:7.5pt}thead{display:table-header-group}
th{white-space:normal}th,td{padding:.1rem .3rem}td.words{min-width:20ch}
h2{margin-top:1.5rem}footer{break-before:avoid}
a{color:inherit;text-decoration:none}
}
"""
# The shade at the edge of a table indicates that it can be scrolled.
_COLORS = {**COLORS, "link": "#0a58a8", "chosen": "#eaf3fb", "shade": "#1b1f2440"}
_CSS_VARIABLES = "".join(f"--{role}:{color};" for role, color in _COLORS.items())
_CSS = f":root{{{_CSS_VARIABLES}}}{_SCREEN_CSS}{_PRINT_CSS}"


# --- The page

_MARKS = {"chosen": ("★", "chosen"), "front": ("◆", "marked")}
"""Sign and name of a row's mark; the caption of a table explains marks other than the choice."""
_MAX_ROWS = 1000  # maximum rows in the table of a figure's values
_SIGNIFICANT_DIGITS = 4  # significant digits in that table; the CSV files have all digits
_LONG_FACT_CHARACTERS = 90  # characters from which on a fact has its own line
_WRAPPED_CELL_CHARACTERS = 28  # characters from which on a cell is wrapped


def render_page(document: Document) -> str:
    """Render the HTML page of a report.

    Raises:
        SpecError: matplotlib is not installed.
    """
    require_matplotlib()
    title, numbers = escape_text(document.title), count(1)
    parts = [
        *_render_head(document),
        *_render_contents(document.sections),
        *_render_facts(document.facts),
        '<main id="main">',
        *(part for index, section in enumerate(document.sections) for part in _render_section(section, index, numbers)),
        "</main>",
        f'<footer><p class="made">{escape_text(document.made)}</p></footer>',
    ]
    meta = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        '<link rel="icon" href="data:,">'
    )
    head = f"<head>{meta}<title>{title}</title><style>{_CSS}</style></head>"
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en">{head}\n<body><div class="page">\n{body}\n</div></body></html>\n'


def escape_text(words: str) -> str:
    """Escape text for HTML."""
    return html.escape(replace_invalid_xml_characters(words))


def _render_head(document: Document) -> Iterator[str]:
    yield '<a class="skip" href="#main">To the report</a>'
    yield f"<header><h1>{escape_text(document.title)}</h1>"
    if document.question:
        yield f'<p class="question">{escape_text(document.question)}</p>'
    if document.answer:
        yield f'<p class="answer">{escape_text(document.answer)}</p>'
    yield "</header>"


def _render_contents(sections: tuple[Section, ...]) -> Iterator[str]:
    if len(sections) > 1:
        yield '<nav aria-labelledby="contents"><h2 id="contents">Contents</h2><ul>'
        for index, section in enumerate(sections):
            yield f'<li><a href="#{_make_section_id(section, index)}">{escape_text(section.title)}</a></li>'
        yield "</ul></nav>"


def _make_section_id(section: Section, index: int) -> str:
    """Return the id of a section, unique on the page."""
    return f"section-{index + 1}-" + re.sub(r"[^a-z0-9]+", "-", section.key.lower()).strip("-")


def _render_facts(facts: tuple[Fact, ...]) -> Iterator[str]:
    if facts:
        yield '<dl class="facts">'
        for fact in facts:
            long = ' class="long"' * (len(fact.value) > _LONG_FACT_CHARACTERS)
            yield f"<div{long}><dt>{escape_text(fact.name)}</dt><dd>{escape_text(fact.value)}</dd></div>"
        yield "</dl>"


def _render_section(section: Section, index: int, numbers: Iterator[int]) -> Iterator[str]:
    names = dict.fromkeys(series.name for figure in section.figures for series in figure.series)
    # a series has the same colour and marker in all figures of a section
    style_indices = {name: style_index for style_index, name in enumerate(names)}
    anchor = _make_section_id(section, index)
    yield f'<section id="{anchor}" aria-labelledby="{anchor}-head"><h2 id="{anchor}-head">{escape_text(section.title)}</h2>'
    yield from (f"<p>{escape_text(words)}</p>" for words in section.text)
    if section.missing:
        yield f'<p class="missing"><strong>Missing:</strong> {escape_text(section.missing)}</p>'
    yield from _render_facts(section.facts)
    yield from (part for table in section.tables for part in _render_table(table))
    if section.figures:
        yield '<div class="figures">'
        yield from (part for figure in section.figures for part in _render_figure(figure, next(numbers), style_indices))
        yield "</div>"
    yield "</section>"


def _render_figure(figure: Figure, number: int, style_indices: Mapping[str, int]) -> Iterator[str]:
    prefix = f"figure-{number}"
    yield f'<figure id="{prefix}"><h3>{escape_text(figure.title)}</h3>'
    yield render_svg(figure, prefix=f"{prefix}-drawn", style_indices=style_indices)
    yield "<figcaption>"
    if figure.caption:
        yield f'<p class="caption">{escape_text(figure.caption)}</p>'
    if figure.paper:
        yield f'<p class="paper">{escape_text(figure.paper)} of the paper, for this job.</p>'
    yield "</figcaption>"
    table = make_figure_table(figure)
    if table.rows:
        yield f"<details><summary>The numbers of this figure ({format_count(len(table.rows), 'row')})</summary>"
        yield from _render_table(table, max_rows=_MAX_ROWS)
        yield "</details>"
    yield "</figure>"


def make_figure_table(figure: Figure) -> Table:
    """Return the data of a figure as a table, without empty columns."""
    header, *rows = list_figure_rows(figure)
    is_text = [any(isinstance(row[index], str) for row in rows) for index in range(len(header))]
    columns = [
        Column(str(title), align="left" if has_words else "right", digits=_SIGNIFICANT_DIGITS)
        for title, has_words in zip(header, is_text, strict=True)
    ]
    fields = [(column, itemgetter(index)) for index, column in enumerate(columns)]
    return build_table(f"{figure.key}-numbers", f"{figure.title}: numbers", rows, fields)


# --- Tables


def _render_table(table: Table, *, max_rows: int | None = None) -> Iterator[str]:
    """Yield a table; on a narrow screen each row is a card, except for the numbers of a figure, of which there are `max_rows`."""
    marked, cards = any(table.marks), max_rows is None
    yield f'<div class="scroll{" cards" * cards}" role="region" tabindex="0" aria-label="{escape_text(table.title)}"><table>'
    yield _render_caption(table)
    header_cells = '<th scope="col" aria-label="mark"></th>' if marked else ""
    yield f"<thead><tr>{header_cells}{''.join(map(_render_head_cell, table.columns))}</tr></thead><tbody>"
    for index, row in enumerate(table.rows[:max_rows]):
        mark = table.marks[index] if index < len(table.marks) else ""
        yield _render_row(table, row, mark, marked=marked, cards=cards)
    yield "</tbody></table>"
    if max_rows is not None and len(table.rows) > max_rows:
        yield f"<p>The first {max_rows} of {len(table.rows)} rows.</p>"
    yield "</div>"


def _render_caption(table: Table) -> str:
    notes = [words for words in (table.caption, "★ chosen" * ("chosen" in table.marks)) if words]
    captions = "".join(f'<span class="caption">{escape_text(words)} </span>' for words in notes)
    return f"<caption><div><strong>{escape_text(table.title)}</strong>{captions}</div></caption>"


def _render_head_cell(column: Column) -> str:
    unit = f' <span class="unit">({escape_text(column.unit)})</span>' if column.unit else ""
    return f'<th scope="col"{_get_cell_class(column, "")}>{escape_text(column.title)}{unit}</th>'


def _render_row(table: Table, row: Iterable[Cell], mark: str, *, marked: bool, cards: bool) -> str:
    sign, words = _MARKS.get(mark, ("", ""))
    first = f'<td class="mark"><span role="img" aria-label="{words}">{sign}</span></td>' if sign else "<td></td>"
    row_cells = []
    for column, cell in zip(table.columns, row, strict=True):
        text = format_cell(cell, column)
        label = f' data-label="{escape_text(format_column_title(column))}"' if cards else ""
        row_cells.append(f"<td{_get_cell_class(column, text)}{label}>{escape_text(text)}</td>")
    return f"<tr{' class=chosen' * (mark == 'chosen')}>{first * marked}{''.join(row_cells)}</tr>"


def _get_cell_class(column: Column, text: str) -> str:
    names = ["left"] * (column.align == "left") + ["words"] * (len(text) > _WRAPPED_CELL_CHARACTERS)
    return f' class="{" ".join(names)}"' if names else ""
