"""What `tula export` has sent, and where to look at it."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tula_cli.words import plural

if TYPE_CHECKING:
    from tula_cli.services.exporting.export import Exported


def exported(found: "Sequence[Exported]") -> "Iterator[str]":
    """A line or two a tracker."""
    for one in found:
        sent = [
            plural(count, noun)
            for count, noun in ((one.new_runs, "run"), (one.new_points, "point"), (one.files, "file"))
            if count
        ]
        failed = "; not all, for it did not answer" if one.problem else ""
        yield f"{one.to}: sent {', '.join(sent) or 'nothing new'}; {plural(one.runs, 'run')} there by now{failed}"
        yield f"  {_look_at(one)}"


def _look_at(one: "Exported") -> str:
    """Return how to look at what a tracker has."""
    if one.to == "tensorboard":
        return f"tensorboard --logdir {one.uri}"
    if one.to == "wandb" and "://" not in one.uri:
        return f"wandb sync {one.uri}/wandb/offline-run-*   (project {one.project})"
    if one.to == "mlflow" and one.uri.startswith("sqlite:"):
        return f"mlflow ui --backend-store-uri {one.uri}   (experiment {one.project})"
    return f"{one.uri or one.to}   (project {one.project})"
