"""Output of `tula report` without a format: the sections that exist, and what is missing."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tula_cli.show.tables import make_table
from tula_cli.words import format_count

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tula_cli.services.document import Document, Section


def render_overview(document: "Document", *, written: Sequence[str]) -> Iterator["RenderableType"]:
    """Yield question, answer and facts, then a table with one row per section."""
    from rich.text import Text

    yield document.question
    yield Text(document.answer, "bold green")
    yield ""
    yield from (f"{fact.name}: {fact.value}" for fact in document.facts)
    yield ""
    made = make_table(("section", "tables", "figures"), left=(0,))
    for section in document.sections:
        made.add_row(section.title, str(len(section.tables) or "-"), str(len(section.figures) or "-"))
    yield made
    yield from (f"{section.title}: {section.missing}" for section in document.sections if section.missing)
    yield ""
    if written:
        yield from (f"wrote {path}" for path in written)
        return
    yield f"{_count_sections(document.sections)}: --html FILE for a page, --markdown, --latex, --csv DIR, --svg DIR"


def _count_sections(sections: Sequence["Section"]) -> str:
    tables, figures = (sum(len(getattr(section, name)) for section in sections) for name in ("tables", "figures"))
    return f"{format_count(tables, 'table')} and {format_count(figures, 'figure')}"
