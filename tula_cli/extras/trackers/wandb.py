"""Weights & Biases export: runs in one group, offline (uploaded by `wandb sync`) unless an address is given."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tula_cli.extras.trackers.destination import Point, Scalar, State, TrackerRun, compute_digest

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

import wandb


class WandbRun:
    """A run of W&B, whose steps only grow."""

    def __init__(self, run: Any) -> None:
        self.run, self.id = run, str(run.id)

    def params(self, values: Mapping[str, Scalar]) -> None:
        self.run.config.update(dict(values), allow_val_change=True)

    def tags(self, values: Mapping[str, str]) -> None:
        self.run.config.update({f"tula/{name}": value for name, value in values.items()}, allow_val_change=True)

    def points(self, points: Sequence[Point]) -> None:
        for point in points:
            self.run.log({**point.values, "_timestamp": point.time}, step=point.samples)

    def summary(self, values: Mapping[str, float], *, samples: int) -> None:
        del samples
        self.run.summary.update({f"summary/{name}": value for name, value in values.items()})

    def artifact(self, path: Path) -> None:
        self.run.save(str(path), base_path=str(path.parent), policy="now")

    def close(self, state: State, *, at: float) -> None:
        del at
        self.run.summary.update({"state": state})
        self.run.finish(exit_code=0 if state in ("running", "finished") else 1)


class WandbExporter:
    """A W&B project, on a server if `uri` is an address, otherwise in a folder."""

    def __init__(self, *, uri: str, project: str) -> None:
        self.project = project
        self.server = uri if "://" in uri else None
        self.folder = None if self.server else uri
        if self.folder:
            Path(self.folder).mkdir(parents=True, exist_ok=True)

    def open(self, run: TrackerRun, *, known: str | None) -> WandbRun:
        settings: dict[str, Any] = {
            "console": "off",
            "silent": True,
            "disable_git": True,
            "quiet": True,
            "disable_code": True,
            "x_disable_stats": True,
            **({"base_url": self.server} if self.server else {}),
        }
        begun = wandb.init(
            project=self.project,
            id=known or compute_digest([run.group, run.key, run.started]),
            name=run.name,
            group=run.group,
            job_type=run.kind,
            mode="online" if self.server else "offline",
            dir=self.folder,
            resume="allow" if self.server else None,
            reinit="create_new",
            settings=wandb.Settings(**settings),
        )
        return WandbRun(begun)


exporter = WandbExporter
