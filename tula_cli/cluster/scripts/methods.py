"""Training methods around a script's optimizer (AGS and ortho), and the copies of shim and optimizers in a run."""

import hashlib
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from tula_cli.models.refresh import compute_small_batch_size
from tula_cli.presets import AGS_PRESETS
from tula_cli.run.directory import RunDir
from tula_cli.run.files import make_write_error, publish_folder
from tula_cli.run.records.jobs import LeaderCommand
from tula_cli.run.records.results import ScalingSummary
from tula_cli.run.records.scripts import AgsPlan, OrthoPlan
from tula_cli.run.records.tasks import Task

# --- Copies of the shim and the optimizers

OPTIM_COPY_NAME = "tula_ags"
"""Package name of the copied optimizers, distinct from an installed tula, which may have another version."""


def copy_shim(run: Path) -> Path:
    """Copy the shim into a run unless it is already there; return its folder. Containers can see the run, but not tula.

    Raises:
        OSError: the copy cannot be written.
    """
    return _copy_contents(run, "shim", read_module_sources("shim"))


def copy_optim(run: Path) -> Path:
    """Copy the optimizers into a run as the package `OPTIM_COPY_NAME`; return the folder that contains the package.

    Raises:
        OSError: the copy cannot be written.
    """
    presets = {Path("presets.py"): files("tula_cli").joinpath("presets.py").read_bytes()}
    sources = read_module_sources("optim") | presets
    old, new = b"from tula_cli.presets import", f"from {OPTIM_COPY_NAME}.presets import".encode()
    return _copy_contents(
        run, "ags", {OPTIM_COPY_NAME / name: content.replace(old, new) for name, content in sources.items()}
    )


def read_module_sources(folder: str) -> dict[Path, bytes]:
    """Return the modules in a folder of tula by their relative paths, even if tula is imported from an archive."""
    sources, pending = {}, [(Path(), files("tula_cli").joinpath(folder))]
    for path, resource in pending:
        for file in resource.iterdir():
            if file.is_dir():
                pending.append((path / file.name, file))
            elif file.name.endswith(".py"):
                sources[path / file.name] = file.read_bytes()
    return dict(sorted(sources.items()))


def _copy_contents(run: Path, name: str, contents: Mapping[Path, bytes]) -> Path:
    digest = hashlib.sha256()
    for path, content in contents.items():
        digest.update(f"{path}\0".encode() + content)
    folder = (run / "script" / f"{name}-{digest.hexdigest()[:8]}").absolute()
    if folder.is_dir():
        return folder
    draft = folder.with_name(f".{folder.name}.{socket.gethostname()}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    for path, content in contents.items():
        copy = draft / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
    try:
        publish_folder(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


# --- The plan of a method and what it reports

NEVER_REFRESH_STEPS = 10**9
"""Steps per epoch for a probe: its timed steps contain no refresh, unless every step is one."""


def make_ags_plan(
    run: RunDir, task: Task, command: LeaderCommand, *, count_steps_per_epoch: Callable[[int], int]
) -> AgsPlan | None:
    """Return the AGS plan for the shim, or None if the method does not scale; copies the library into the run.

    Args:
        count_steps_per_epoch: returns the steps of an epoch at a batch.

    Raises:
        TulaError: the run directory cannot be written.
        JobFailed: factors are refreshed per epoch, and the number of steps per epoch is unknown.
    """
    spec = task.spec
    if (ags := spec.effective_ags) is None:
        return None
    settings = ags.model_dump()
    return AgsPlan(
        code=_copy_library(run),
        settings={name: settings[name] for name in (*AGS_PRESETS["paper"], "parameters")},
        apply_to=spec.ags.apply_to,
        b_large=command.batch,
        b_small=compute_small_batch_size(spec, command.batch),
        available=max(1, command.batch // command.ranks // spec.train.accumulate),
        steps_per_epoch=count_steps_per_epoch(command.batch),
        seed=spec.train.seed,
        resumed=bool(command.checkpoint),
    )


def make_ortho_plan(run: RunDir, task: Task, command: LeaderCommand) -> OrthoPlan | None:
    """Return the plan for orthogonalised steps, or None for other methods; copies the library into the run.

    Raises:
        TulaError: the run directory cannot be written.
    """
    train = task.spec.train
    if not train.training_method.orthogonalises:
        return None
    return OrthoPlan(code=_copy_library(run), beta2_power=command.batch / train.reference_batch)


def _copy_library(run: RunDir) -> str:
    try:
        return str(copy_optim(run.path))
    except OSError as error:
        raise make_write_error(run.path, error) from error


def summarize_scaling(rows: Iterable[Mapping[str, Any]]) -> ScalingSummary | None:
    """Return a summary of AGS in a training, from the newest row of each attempt; None if AGS was not used."""
    summaries = [row["ags"]["so_far"] for row in rows if row.get("ags")]
    steps = sum(summary["steps"] for summary in summaries)
    if not steps:
        return None
    scaled, mean = (
        sum(summary[name] * summary["steps"] for summary in summaries) / steps for name in ("scaled", "mean")
    )
    return ScalingSummary(steps=round(steps), scaled=scaled, mean=mean, apply_to=summaries[-1]["apply_to"])
