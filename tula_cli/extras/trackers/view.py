"""Output of `tula export`: what was sent or written, and where to view it."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tula_cli.words import format_count

if TYPE_CHECKING:
    from tula_cli.services.tracking import ExportResult


def describe_exports(exporteds: "Sequence[ExportResult]") -> "Iterator[str]":
    """Yield two lines per tracker: the result of the export and its destination."""
    for exported in exporteds:
        new = [
            format_count(count, noun)
            for count, noun in ((exported.new_runs, "run"), (exported.new_points, "point"), (exported.files, "file"))
            if count
        ]
        news = ", ".join(new) or "nothing new"
        if exported.offline:
            failed = "; incomplete, because of a write error" if exported.problem else ""
            yield f"{exported.to} (offline): wrote {news}; {format_count(exported.runs, 'run')} in the folder{failed}; not sent until you run"
        else:
            failed = "; not all, for it did not answer" if exported.problem else ""
            yield f"{exported.to}: sent {news}; {format_count(exported.runs, 'run')} there by now{failed}"
        yield f"  {_describe_destination(exported)}"


def _describe_destination(exported: "ExportResult") -> str:
    """Return the command or address for viewing the exported data."""
    if exported.to == "tensorboard":
        return f"tensorboard --logdir {exported.uri}"
    if exported.offline:
        return f"wandb sync {exported.uri}/wandb/offline-run-*   (project {exported.project})"
    if exported.to == "mlflow" and exported.uri.startswith("sqlite:"):
        return f"mlflow ui --backend-store-uri {exported.uri}   (experiment {exported.project})"
    return f"{exported.uri or exported.to}   (project {exported.project})"
