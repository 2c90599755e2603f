"""The plan, a JSON file of the launcher that TULA_PLAN names, and functions that write the shim's files."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLAN_VARIABLE = "TULA_PLAN"
OBSERVE_FILE = "observe.json"  # plan in the folder of sitecustomize.py, for observed jobs
OBSERVED_JOB_VARIABLE = "TULA_OBSERVED_JOB"
"""Names the folder of an observed job, in place of the SLURM step or the process."""
PLAN_VERSION = 1
DEFAULT_STEPS = 15
AGS_KEYS = {"code", "settings", "apply_to", "b_large", "b_small", "available", "steps_per_epoch", "seed", "resumed"}
ORTHO_KEYS = {"code", "beta2_power"}
RESUME_TEST_KEYS = {"checkpoint", "after"}
BRANCH_KEYS = {"steps", "factor", "norms"}


class PlanError(ValueError):
    """The plan cannot be followed."""


@dataclass(frozen=True)
class Plan:
    """The fields of the plan, which the contract explains. Times in seconds."""

    folder: Path
    task: str
    attempt: int
    mode: str
    expected: dict[str, float | None]
    warmup: int
    min_steps: int
    max_steps: int
    seconds: float
    split_steps: int
    heartbeat: float
    row: float
    save: bool
    checkpoint: str
    ags: dict[str, Any] | None
    ortho: dict[str, Any] | None
    rehearsal: dict[str, Any] | None
    branch: dict[str, Any] | None
    schedule: bool
    files: list[str] | None

    @property
    def is_training(self) -> bool:
        return self.mode == "train"

    @property
    def is_observing(self) -> bool:
        return self.mode == "observe"


def read_plan(path: str | None = None) -> Plan:
    """Return the plan in `path`, or in the file that TULA_PLAN names.

    Raises:
        PlanError: the file cannot be read, or requests something that this version does not support.
    """
    path = path or os.environ[PLAN_VARIABLE]
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"tula: the plan {path} cannot be read: {error}") from None
    if not isinstance(given, dict) or given.get("version") != PLAN_VERSION:
        raise PlanError(
            f"tula: the plan {path} does not have version {PLAN_VERSION}: copy the shim of the tula version that wrote the plan"
        )
    return _check_plan(path, given)


def _check_plan(path: str, given: dict[str, Any]) -> Plan:
    def read_number(name: str, default: float, least: float) -> float:
        value = given.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < least:
            raise PlanError(f"tula: plan {path}: key {name!r} must be a number of at least {least:g}, got {value!r}")
        return value

    for name in ("folder", "task"):
        if not isinstance(given.get(name), str):
            raise PlanError(f"tula: plan {path}: key {name!r} is missing")
    mode = given.get("mode", "probe")
    if mode not in ("probe", "train", "observe"):
        raise PlanError(f"tula: plan {path}: key 'mode' must be one of probe, train, observe, got {mode!r}")
    expected = given.get("expected")
    if not isinstance(expected, (dict, type(None))):
        raise PlanError(f"tula: plan {path}: key 'expected' must be a mapping or null, got {expected!r}")
    steps = int(read_number("steps", DEFAULT_STEPS, 1))
    low = int(read_number("min_steps", steps, 1))
    return Plan(
        folder=Path(given["folder"]),
        task=given["task"],
        attempt=int(read_number("attempt", 1, 1)),
        mode=mode,
        expected={name: (expected or {}).get(name) for name in ("world", "batch", "accumulate", "lr", "dataset")},
        warmup=int(read_number("warmup", 5, 1)),
        min_steps=low,
        max_steps=int(read_number("max_steps", max(low, steps), low)),
        seconds=read_number("seconds", 0.0, 0.0),
        split_steps=int(read_number("split_steps", 6, 0)),
        heartbeat=read_number("heartbeat", 1.0, 0.0),
        row=read_number("row", 10.0, 0.0),
        save=bool(given.get("save", False)),
        checkpoint=str(given.get("checkpoint", "")),
        ags=_read_part_of_plan(path, given, "ags", AGS_KEYS),
        ortho=_read_part_of_plan(path, given, "ortho", ORTHO_KEYS),
        rehearsal=_read_part_of_plan(path, given, "rehearsal", RESUME_TEST_KEYS),
        branch=_read_part_of_plan(path, given, "branch", BRANCH_KEYS),
        schedule=bool(given.get("schedule", False)),
        files=given.get("files"),
    )


def _read_part_of_plan(path: str, given: dict[str, Any], name: str, needed: set[str]) -> dict[str, Any] | None:
    part = given.get(name)
    if part is not None and (not isinstance(part, dict) or needed - part.keys()):
        names = ", ".join(sorted(needed))
        raise PlanError(f"tula: {name} is {part!r} in the plan {path}; give all of {names}, or null")
    return part


def make_observed_folder_path(root: Path, world: int) -> Path:
    """Return the folder of an observed training, root/<script>/<job>-<start>, the same on all of its ranks.

    Called at the first step, when the module that `python -m` runs and the number of ranks are known.

    Args:
        root: folder of the observations; may begin with ~.

    Raises:
        RuntimeError: the home directory is unknown.
    """
    environ, program = os.environ, Path(sys.argv[0] or "python")
    script = program.parent.name if program.name == "__main__.py" else program.stem
    step = "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" in environ
    if OBSERVED_JOB_VARIABLE in environ:
        job = environ[OBSERVED_JOB_VARIABLE]
    elif step:
        job = f"slurm-{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    else:
        job = socket.gethostname()
    return (
        root.expanduser()
        / ("python" if script.startswith("-") else script or "python")
        / f"{job}-{_make_start_name(world)}"
    )


def _make_start_name(world: int) -> str:
    """Return a name that distinguishes the trainings of a job, and that all ranks of one of them share."""
    environ = os.environ
    if world == 1:
        return str(os.getpid())
    restarts = f"{environ.get('SLURM_RESTART_COUNT', '0')}.{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    started_by_srun = environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    here = environ.get("LOCAL_WORLD_SIZE", environ.get("WORLD_SIZE", str(world)))
    if not started_by_srun and here == environ.get("WORLD_SIZE", str(world)):
        return f"{os.getppid()}.{restarts}"  # process id of the launcher, the parent of all ranks
    return f"{environ.get('MASTER_PORT', '0')}.{restarts}"


# --- Output files


def write_json(path: Path, content: dict[str, Any], *, durable: bool = True) -> None:
    """Replace `path` atomically; numbers that are not finite become null, because JSON cannot represent them.

    Args:
        path: its folder is created.
        durable: wait until the file is on the disk; not needed for a heartbeat.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    with open(draft, "w", encoding="utf-8", opener=_open_private_file) as file:
        file.write(json.dumps(_replace_non_finite(content), allow_nan=False))
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(draft, path)


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append a line to a JSONL file; a process killed meanwhile leaves a partial line, which readers skip."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8", opener=_open_private_file) as file:
        file.write(json.dumps(_replace_non_finite(row), allow_nan=False) + "\n")


def _open_private_file(path: str, flags: int) -> int:
    """Open a file; if it is created, only this user can access it."""
    return os.open(path, flags, 0o600)


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _replace_non_finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_non_finite(entry) for entry in value]
    return value
