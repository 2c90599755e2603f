"""What sites ask for in an application, by templates: text files whose placeholders a run fills.

`{name}` is a value in words, a table on a line of its own, and `{name: column, column}` the table with these columns. A
brace that is meant is written twice. Templates stand in templates/sites/ and, before those, in `tula/sites/` of the folders
that hold site.yaml.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tula_cli.assets import config_folders, find_asset
from tula_cli.errors import BadMeasurements, SpecError
from tula_cli.plugins import nearest
from tula_cli.services.reporting.document import Table
from tula_cli.services.reporting.forms import cells
from tula_cli.services.reporting.forms.site_values import SiteValues

FOLDER, ENDING = "sites", ".txt"
_OWN = ("lcrc", "ncar", "scaling")
"""Those that come with tula."""
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}\n]*)\}|[{}]")


def names(*, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of all templates, those of the user and of the site among them."""
    own = [path.stem for folder in config_folders(environ=environ) for path in (folder / FOLDER).glob(f"*{ENDING}")]
    return sorted({*_OWN, *own})


def find(name: str, *, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the template that is meant: the path of a file, or a name.

    Raises:
        SpecError: there is none.
    """
    if "/" in name or name.endswith(ENDING):
        if not Path(name).is_file():
            raise SpecError(
                f"--for {name}: there is no such file", f"the names known are {', '.join(names(environ=environ))}"
            )
        return Path(name)
    for folder in config_folders(environ=environ):
        if (path := folder / FOLDER / f"{name}{ENDING}").is_file():
            return path
    if name not in _OWN:
        known = names(environ=environ)
        raise SpecError(
            f"--for {name}: there is no such template",
            nearest(name, known) or f"there are {', '.join(known)}; one of your own is the path of a text file",
        )
    return find_asset(f"templates/{FOLDER}/{name}{ENDING}")


def fill(template: Path, values: SiteValues) -> str:
    """Return a template with what a run has for it.

    Raises:
        SpecError: it names what there is not, or cannot be read.
        BadMeasurements: it names what this run has nothing for yet.
    """
    try:
        text = template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"{template}: cannot be read as text ({error})", "a template is a text file in UTF-8"
        ) from error

    def put(found: "re.Match[str]") -> str:
        word = found[0]
        if word in ("{{", "}}"):
            return word[0]
        line = text.count("\n", 0, found.start()) + 1
        if found[1] is None:
            raise SpecError(f"{template}, line {line}: a single {word}", "write it twice where it is meant")
        return _filled(found[1], values, where=f"{template}, line {line}")

    return _PLACEHOLDER.sub(put, text)


def _filled(placeholder: str, values: SiteValues, *, where: str) -> str:
    name, colon, columns = placeholder.partition(":")
    name = name.strip()
    if name in values.missing:
        raise BadMeasurements(f"{where}: this run does not tell {name}", values.missing[name])
    if name in values.tables:
        wanted = [word.strip() for word in columns.split(",") if word.strip()] if colon else None
        return "\n".join(_aligned(_picked(values.tables[name], wanted, where=where)))
    if name in values.words and not colon:
        return values.words[name]
    if name in values.words:
        raise SpecError(f"{where}: {{{placeholder}}}: {name} is no table, and has no columns", f"write {{{name}}}")
    raise SpecError(
        f"{where}: {{{placeholder}}} is nothing that a report has",
        nearest(name, values.names) or f"there are {', '.join(values.names)}",
    )


def _picked(table: Table, wanted: list[str] | None, *, where: str) -> Table:
    """Return a table with the columns that are wanted, in that order."""
    if wanted is None:
        return table
    titles = [column.title for column in table.columns]
    for title in wanted:
        if title not in titles:
            raise SpecError(
                f"{where}: table {table.key} has no column {title!r}",
                nearest(title, titles) or f"it has {', '.join(filter(None, titles))}",
            )
    places = [titles.index(title) for title in wanted]
    return Table(
        table.key,
        table.title,
        tuple(table.columns[place] for place in places),
        tuple(tuple(row[place] for place in places) for row in table.rows),
        table.caption,
        table.marks,
    )


def _aligned(table: Table) -> Iterator[str]:
    """Yield the lines of a table in plain text, its columns aligned by blanks."""
    heads, lines = tuple(map(cells.head, table.columns)), cells.lines(table)
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    for line in (heads, tuple("-" * width for width in widths), *lines):
        yield "  ".join(
            word.ljust(width) if column.align == "left" else word.rjust(width)
            for word, width, column in zip(line, widths, table.columns, strict=True)
        ).rstrip()
