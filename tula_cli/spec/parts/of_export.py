"""Section export: the trackers that a run's records are sent to while jobs run."""

import difflib
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, model_validator

from tula_cli.plugins import is_import_string
from tula_cli.spec.kinds import Line, Section

TRACKERS = ("mlflow", "wandb", "tensorboard")
_WITH_PASSWORD = re.compile(r"://[^/@\s]*@")


def without_password(uri: str) -> str:
    """Return the place of a tracker; refuse one that holds a name or a password, which would stand in the run's files."""
    if _WITH_PASSWORD.search(uri):
        raise ValueError(
            "a user's name or password does not belong into the address: give them to the tracker's own variables, such as"
            " MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or WANDB_API_KEY"
        )
    return uri


class Export(Section):
    """A tracker that what is recorded is sent to while jobs run. It reads the run's files: the training knows nothing of it."""

    to: Line  # mlflow, wandb, tensorboard, or package.module:callable that returns an exporter
    # mlflow: a tracking URI; null: $MLFLOW_TRACKING_URI, else a database in the run. tensorboard, wandb: a folder; null: one in
    # the run. wandb: https://... sends to that server, a folder is its offline mode
    uri: Annotated[Line, AfterValidator(without_password)] | None = None
    project: Line | None = None  # MLflow's experiment, W&B's project; null: the job's name
    # who sends: command: a command that waits for jobs, while it waits; job: the first node of a training, also where no command
    # waits
    by: Literal["command", "job"] = "command"

    @model_validator(mode="after")
    def _tracker_is_known(self) -> "Export":
        if self.to not in TRACKERS and not is_import_string(self.to):
            near = difflib.get_close_matches(self.to.lower(), TRACKERS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use {', '.join(TRACKERS)}, or package.module:callable"
            raise ValueError(f"to: unknown tracker {self.to!r}; {hint}")
        return self

    @model_validator(mode="after")
    def _tensorboard_has_a_folder(self) -> "Export":
        uri = self.uri or ""
        if self.to == "tensorboard" and "://" in uri and not uri.startswith("file:///"):
            raise ValueError(f"tensorboard writes into a folder, and {uri} is none; give a path, or file:///path")
        return self
