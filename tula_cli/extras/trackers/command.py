"""`tula export`."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tula_cli.cli.runs import ExistingRun
from tula_cli.cli.waiting import follow_work
from tula_cli.options import ExportRequest, Trackers
from tula_cli.show.screen import Screen
from tula_cli.words import format_count

if TYPE_CHECKING:
    from tula_cli.services.tracking import ExportResult


def export(
    screen: Screen,
    chosen: ExistingRun,
    to: Trackers = (),
    *,
    request: ExportRequest,
) -> None:
    """Send results to MLflow, Weights & Biases or TensorBoard.

    Sends parameters, probes, the recommendation and trainings. Data that were sent before are not sent again.
    """
    from tula_cli.extras.trackers import export as service

    runs = chosen.find(screen)
    results = follow_work(screen, service.export_requested(runs, list(to), request))
    screen.answer(results, describe_exports(results))
    service.require_sent(results)


def describe_exports(results: "Sequence[ExportResult]") -> "Iterator[str]":
    """Yield two lines per tracker: what was sent, and where it can be viewed."""
    for result in results:
        counts = ((result.new_runs, "run"), (result.new_points, "point"), (result.files, "file"))
        new = ", ".join(format_count(count, noun) for count, noun in counts if count) or "nothing new"
        runs = format_count(result.runs, "run")
        if result.offline:
            failed = "; incomplete, because of a write error" if result.problem else ""
            yield f"{result.to} (offline): wrote {new}; {runs} in the folder{failed}; not sent until you run"
        else:
            failed = "; incomplete, because it did not answer" if result.problem else ""
            yield f"{result.to}: sent {new}; {runs} there now{failed}"
        yield f"  {_describe_destination(result)}"


def _describe_destination(result: "ExportResult") -> str:
    """Return the command or address for viewing the exported data."""
    if result.to == "tensorboard":
        return f"tensorboard --logdir {result.uri}"
    if result.offline:
        return f"wandb sync {result.uri}/wandb/offline-run-*   (project {result.project})"
    if result.to == "mlflow" and result.uri.startswith("sqlite:"):
        return f"mlflow ui --backend-store-uri {result.uri}   (experiment {result.project})"
    return f"{result.uri or result.to}   (project {result.project})"
