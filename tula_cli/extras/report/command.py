"""`tula report`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tula_cli.cli.runs import ExistingRun
from tula_cli.errors import SpecError
from tula_cli.show.screen import Screen
from tula_cli.show.tables import make_table
from tula_cli.words import format_count, make_relative_path

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tula_cli.services.document import Document, TextForm


def report(
    screen: Screen,
    chosen: ExistingRun,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an HTML page with tables and figures.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FOLDER", readable=False, help="Write each figure as SVG.")
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR_OR_FILE",
            readable=False,
            help="Write tables and data of figures as CSV: to a folder (one file each), to one .csv file, or to stdout"
            " (-).",
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the report as Markdown.")] = False,
    latex: Annotated[
        bool, typer.Option("--latex", help="Print the report as LaTeX (class article, without packages).")
    ] = False,
) -> None:
    """Write a report of a run as HTML, Markdown, LaTeX or CSV.

    The report contains settings, measurements, predictions, the recommendation and trainings. Without an option for a
    format, the command lists what the report contains and what is missing.
    """
    import time

    from tula_cli.extras.report.formats import RENDERERS
    from tula_cli.extras.report.material import collect_report_data
    from tula_cli.extras.report.run_report import build_document

    form = _choose_form_for_stdout(csv, markdown=markdown, latex=latex)
    _check_output_paths(html, svg, csv)
    material = collect_report_data(chosen.find_runs(screen), now=time.time())
    for part in material.parts:
        screen.print_warnings(part.status.warnings)
    document = build_document(material)
    text = None if form is None else RENDERERS[form](document)
    written = _write_files(document, html, svg, csv)
    if text is None:
        screen.print_answer({"report": document, "written": written}, render_overview(document, written=written))
        return
    if screen.as_json:
        screen.print_answer({"report": document, "text": text, "written": written}, ())
        return
    screen.print_line(text.rstrip("\n"), None)
    for path in written:
        screen.print_note(f"wrote {path}")


def _choose_form_for_stdout(csv: Path | None, *, markdown: bool, latex: bool) -> "TextForm | None":
    options: dict[TextForm, tuple[str, bool]] = {
        "markdown": ("--markdown", markdown),
        "latex": ("--latex", latex),
        "csv": ("--csv -", csv == Path("-")),
    }
    forms = [form for form, (_, is_requested) in options.items() if is_requested]
    if len(forms) > 1:
        names = " and ".join(options[form][0] for form in forms)
        raise SpecError(f"{names} both print to stdout", "choose one of them")
    return forms[0] if forms else None


def _check_output_paths(html: Path | None, svg: Path | None, csv: Path | None) -> None:
    """Reject files that cannot be written, before anything is read for them."""
    if html is not None:
        _check_page_path(html)
    for option, path in (("--svg", svg), ("--csv", csv)):
        if path is None or path == Path("-"):
            continue
        if not (folder := path.absolute().parent).is_dir():
            raise SpecError(f"{option} {path}: the folder {folder} does not exist", "create it, or name another folder")
        if path.is_file() and (option == "--svg" or path.suffix != ".csv"):
            raise SpecError(f"{option} {path} is a file", "name a folder; --csv can also write a single .csv file")


def _write_files(document: "Document", html: Path | None, svg: Path | None, csv: Path | None) -> list[str]:
    """Write the requested files, and return the given paths, relative to the current folder."""
    from tula_cli.extras.report import formats
    from tula_cli.run.files import MODE_FOR_ALL, write_file_atomically

    texts: dict[Path, str] = {}
    if html is not None:
        from tula_cli.extras.report.page import render_page

        texts[html] = render_page(document)
    if svg is not None:
        from tula_cli.extras.report.svg import render_svg

        figures = (figure for section in document.sections for figure in section.figures)
        texts |= {svg / f"{figure.key}.svg": render_svg(figure) for figure in figures}
    if csv is not None and csv.suffix == ".csv":
        texts[csv] = formats.render_csv(document)
    elif csv is not None and csv != Path("-"):
        texts |= {csv / f"{name}.csv": text for name, text in formats.render_csv_files(document).items()}
    for path, text in texts.items():
        write_file_atomically(path, text, mode=MODE_FOR_ALL)
    given_paths = [path for path in (html, svg, csv) if path is not None and path != Path("-")]
    return [make_relative_path(path.absolute()) for path in given_paths]


def render_overview(document: "Document", *, written: Sequence[str]) -> Iterator["RenderableType"]:
    """Yield question, answer and facts, then a table with one row per section."""
    from rich.text import Text

    yield document.question
    yield Text(document.answer, "bold green")
    yield ""
    yield from (f"{fact.name}: {fact.value}" for fact in document.facts)
    yield ""
    table = make_table(("section", "tables", "figures"), left=(0,))
    for section in document.sections:
        table.add_row(section.title, str(len(section.tables) or "-"), str(len(section.figures) or "-"))
    yield table
    yield from (f"{section.title}: {section.missing}" for section in document.sections if section.missing)
    yield ""
    if written:
        yield from (f"wrote {path}" for path in written)
        return
    tables = format_count(sum(len(section.tables) for section in document.sections), "table")
    figures = format_count(sum(len(section.figures) for section in document.sections), "figure")
    yield f"{tables} and {figures}. To write them: --html FILE, --markdown, --latex, --csv DIR or --svg DIR"


def _check_page_path(html: Path) -> None:
    if html.is_dir():
        raise SpecError(f"--html {html} is a folder", f"name a file, for example --html {html / 'report.html'}")
    if not (folder := html.absolute().parent).is_dir():
        raise SpecError(f"--html {html}: the folder {folder} does not exist", "create it, or name another folder")
    # A page replaces the file at its path, so the path must not be a device such as /dev/stdout.
    if html == Path("-") or folder == Path("/dev") or (html.exists() and not html.is_file()):
        raise SpecError(
            f"--html {html}: the page can only be written to a regular file", "name one, for example --html report.html"
        )
