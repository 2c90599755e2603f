"""Weights & Biases export: runs in one group, offline (uploaded by `wandb sync`) unless an address is given."""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tula_cli.errors import TrackerError
from tula_cli.extras.trackers.destination import Point, Scalar, State, TrackerRun, compute_digest

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

import wandb


class WandbRun:
    """A run of W&B; its steps only grow, so steps that are trained again are not sent again."""

    def __init__(self, run: Any) -> None:
        self.run = run

    @property
    def id(self) -> str:
        return str(self.run.id)

    def params(self, values: Mapping[str, Scalar]) -> None:
        with _convert_errors():
            self.run.config.update(dict(values), allow_val_change=True)

    def tags(self, values: Mapping[str, str]) -> None:
        with _convert_errors():
            self.run.config.update({f"tula/{name}": value for name, value in values.items()}, allow_val_change=True)

    def points(self, points: Sequence[Point]) -> None:
        with _convert_errors():
            for point in points:
                self.run.log({**point.values, "_timestamp": point.time}, step=point.samples)

    def summary(self, values: Mapping[str, float], *, at: Point | None) -> None:
        del at
        with _convert_errors():
            self.run.summary.update({f"summary/{name}": value for name, value in values.items()})

    def rewind(self, samples: int) -> bool:
        del samples
        return False

    def artifact(self, path: Path) -> None:
        with _convert_errors():
            self.run.save(str(path), base_path=str(path.parent), policy="now")

    def close(self, state: State, *, at: float) -> None:
        del at
        with _convert_errors():
            self.run.summary.update({"state": state})
            self.run.finish(exit_code=0 if state in ("running", "finished") else 1)


class WandbExporter:
    """A W&B project, on a server if `uri` is an address, otherwise in a folder."""

    def __init__(self, *, uri: str, project: str) -> None:
        self.project = project
        self.server = uri if "://" in uri else None
        self.folder = None if self.server else Path(uri)
        if self.folder is not None:
            with _convert_errors():
                self.folder.mkdir(parents=True, exist_ok=True)

    def open(self, run: TrackerRun, *, known: str | None, after: int | None) -> WandbRun:
        del after  # the steps tell the server what it has
        settings: dict[str, Any] = {
            "console": "off",
            "silent": True,
            "disable_git": True,
            "quiet": True,
            "disable_code": True,
            "x_disable_stats": True,
            **({"base_url": self.server} if self.server else {}),
        }
        run_id = known or compute_digest([run.group, run.key, run.started])
        if self.folder is not None:
            _await_unused_folder(self.folder / "wandb", run_id)
        with _convert_errors():
            begun = wandb.init(
                project=self.project,
                id=run_id,
                name=run.name,
                group=run.group,
                job_type=run.kind,
                mode="online" if self.server else "offline",
                dir=str(self.folder) if self.folder else None,
                resume="allow" if self.server else None,
                reinit="create_new",
                settings=wandb.Settings(**settings),
            )
        return WandbRun(begun)


exporter = WandbExporter


def _await_unused_folder(parent: Path, run_id: str) -> None:
    """Wait until an offline run's folder name (second and id) is unused; older W&B releases overwrite the folder."""
    while (parent / f"offline-run-{time.strftime('%Y%m%d_%H%M%S')}-{run_id}").exists():
        time.sleep(0.05)


@contextlib.contextmanager
def _convert_errors() -> Iterator[None]:
    """Convert errors of W&B or the network to TrackerError."""
    try:
        yield
    except (wandb.Error, OSError) as error:
        told = (str(error).strip().splitlines() or ["no answer"])[0]
        raise TrackerError(f"wandb: {told[:300]}", "what was not sent is sent by the next tula export") from error
