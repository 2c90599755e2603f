"""Lines on what `tula export` has sent or written, and where to look at it."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tula_cli.words import plural

if TYPE_CHECKING:
    from tula_cli.services.exporting.export import Exported


def describe_exports(found: "Sequence[Exported]") -> "Iterator[str]":
    """A line or two a tracker."""
    for one in found:
        new = [
            plural(count, noun)
            for count, noun in ((one.new_runs, "run"), (one.new_points, "point"), (one.files, "file"))
            if count
        ]
        news = ", ".join(new) or "nothing new"
        if one.offline:
            failed = "; not all could be written" if one.problem else ""
            yield f"{one.to} (offline): wrote {news}; {plural(one.runs, 'run')} in the folder{failed}; not sent until you run"
        else:
            failed = "; not all, for it did not answer" if one.problem else ""
            yield f"{one.to}: sent {news}; {plural(one.runs, 'run')} there by now{failed}"
        yield f"  {_describe_destination(one)}"


def _describe_destination(one: "Exported") -> str:
    """Return how to look at what a tracker has."""
    if one.to == "tensorboard":
        return f"tensorboard --logdir {one.uri}"
    if one.offline:
        return f"wandb sync {one.uri}/wandb/offline-run-*   (project {one.project})"
    if one.to == "mlflow" and one.uri.startswith("sqlite:"):
        return f"mlflow ui --backend-store-uri {one.uri}   (experiment {one.project})"
    return f"{one.uri or one.to}   (project {one.project})"
