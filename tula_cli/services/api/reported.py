"""`tula report` from Python."""

from pathlib import Path
from typing import Literal, get_args

from tula_cli.errors import SpecError
from tula_cli.plugins import nearest
from tula_cli.services.api.calls import ROOT, Call, Target
from tula_cli.services.api.handles import Run
from tula_cli.services.reporting.document import Document
from tula_cli.services.reporting.forms import csv_files, latex, markdown

Form = Literal["markdown", "latex", "csv"]


def report(run: Target, *, root: str | Path = ROOT) -> Document:
    """Return all that a run has found: sections with tables and figures, in plain values.

    Args:
        run: a run, the path of its folder, or its job.
        root: where the runs of jobs are kept.

    Raises:
        SpecError: the job cannot be used.
        BadMeasurements: there is no run of it yet.
        TulaError: a record of the run cannot be read.

    Example:
        >>> tula.report(run).answer
    """
    return Run.of(Call.from_target(run, root=root).measured().run).report()


def report_text(run: Target, *, form: Form = "markdown", root: str | Path = ROOT) -> str:
    """Return the report of a run as text.

    Args:
        run: a run, the path of its folder, or its job.
        form: "markdown", "latex" or "csv".
        root: where the runs of jobs are kept.

    Raises:
        SpecError: the job cannot be used, or there is no such form.
        BadMeasurements: there is no run of it yet.
        TulaError: a record of the run cannot be read.

    Example:
        >>> print(tula.report_text(run, form="latex"))
    """
    if form not in get_args(Form):
        raise SpecError(f"form {form!r} is none of {', '.join(get_args(Form))}", nearest(str(form), get_args(Form)))
    forms = {"markdown": markdown.markdown, "latex": latex.latex, "csv": csv_files.together}
    return forms[form](report(run, root=root))
