"""The report of a run as files, for trackers to keep beside its figures."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tula_cli.cluster import launcher
from tula_cli.run.directory import Part
from tula_cli.run.files import write_atomic
from tula_cli.services.reporting.document import Document

_TOLD_FROM = ("recommendation.json", "results/*.json", "train/*/result.json", "train/*/summary.json", "comparison.json")


def report_files(part: Part, *, page: Callable[[Document], str] | None = None) -> tuple[Path, ...]:
    """Write the report where something in the run is newer than it, and return its files; none of a run without results.

    Args:
        part: the run, or the part of it on one type of node.
        page: draws the HTML page; None for Markdown alone.

    Raises:
        TulaError: a record of the run cannot be read, or the report not be written.
    """
    folder = part.run.path / "exports"
    wanted = [folder / "report.md", *([folder / "report.html"] if page else [])]
    newest = max(_times(part.run.path), default=None)
    if newest is None:
        return ()
    if any(not path.is_file() or path.stat().st_mtime < newest for path in wanted):
        from tula_cli.services.reporting.forms.markdown import markdown
        from tula_cli.services.reporting.run_report import build_run_report

        document = build_run_report(part.run, part.spec, partial(launcher.launcher_for, submits=False), now=time.time())
        for path, form in zip(wanted, (markdown, page), strict=False):
            if form is not None:
                write_atomic(path, form(document))
    return tuple(wanted)


def _times(run: Path) -> Iterator[float]:
    for pattern in _TOLD_FROM:
        yield from (path.stat().st_mtime for path in run.glob(pattern))
