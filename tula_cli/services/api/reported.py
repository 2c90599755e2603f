"""`tula report` from Python."""

import time
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from tula_cli.cluster import launcher
from tula_cli.errors import SpecError, require_positive
from tula_cli.plugins import nearest
from tula_cli.services.api.calls import ROOT, Call, Target
from tula_cli.services.api.handles import Run
from tula_cli.services.reporting.document import Document
from tula_cli.services.reporting.forms import csv_files, latex, markdown
from tula_cli.services.reporting.material import gather_material
from tula_cli.services.reporting.run_report import build_document, for_site

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


def report_text(
    run: Target,
    *,
    form: Form = "markdown",
    site: str | Path | None = None,
    runs: int = 1,
    root: str | Path = ROOT,
) -> str:
    """Return the report of a run as text, or what a site asks for in an application.

    Args:
        run: a run, the path of its folder, or its job.
        form: "markdown", "latex" or "csv".
        site: in its place lcrc, ncar, scaling, a template of yours by name, or its path.
        runs: of a site: how many trainings are asked for.
        root: where the runs of jobs are kept.

    Raises:
        SpecError: the job cannot be used, there is no such form or template, or a template names what there is not.
        BadMeasurements: there is no run of it yet, or it has nothing for what a template names.
        TulaError: a record of the run cannot be read.

    Example:
        >>> print(tula.report_text(run, site="lcrc", runs=3))
    """
    require_positive(runs=runs)
    if form not in get_args(Form):
        raise SpecError(f"form {form!r} is none of {', '.join(get_args(Form))}", nearest(str(form), get_args(Form)))
    if site is not None and form != "markdown":
        raise SpecError(f"form {form!r} is not for a site, which has a form of its own", "leave it out")
    run_ = Call.from_target(run, root=root).measured().run
    material = gather_material(run_, run_.spec(), partial(launcher.launcher_for, submits=False), now=time.time())
    document = build_document(material)
    if site is not None:
        return for_site(material, document, str(site), runs=runs)
    forms = {"markdown": markdown.markdown, "latex": latex.latex, "csv": csv_files.together}
    return forms[form](document)
