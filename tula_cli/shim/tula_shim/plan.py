"""The plan: what the launcher asks for, one JSON file that TULA_PLAN names."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "TULA_PLAN"
VERSION = 1
STEPS = 15
AGS = {"code", "settings", "apply_to", "b_large", "b_small", "available", "steps_per_epoch", "seed", "resumed"}
ORTHO = {"code", "beta2_power"}
REHEARSAL = {"checkpoint", "after"}


class PlanError(ValueError):
    """The plan cannot be followed."""


@dataclass(frozen=True)
class Plan:
    """See the contract for what each means. Times in seconds."""

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
    stop: str
    heartbeat: float
    row: float
    save: bool
    checkpoint: str
    ags: dict[str, Any] | None
    ortho: dict[str, Any] | None
    rehearsal: dict[str, Any] | None
    schedule: bool
    files: list[str] | None

    @property
    def training(self) -> bool:
        return self.mode == "train"


def read_plan(path: str | None = None) -> Plan:
    """Return the plan in `path`, or in the file that TULA_PLAN names.

    Raises:
        PlanError: there is no such file, or it asks for what this version does not know.
    """
    path = path or os.environ[VARIABLE]
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"tula: the plan {path} cannot be read: {error}") from None
    if not isinstance(given, dict) or given.get("version") != VERSION:
        raise PlanError(f"tula: the plan {path} is not of version {VERSION}: copy the shim of the tula that wrote it")
    return _checked(path, given)


def _checked(path: str, given: dict[str, Any]) -> Plan:
    def number(name: str, default: float, least: float) -> float:
        value = given.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < least:
            raise PlanError(f"tula: {name} is {value!r} in the plan {path}; a number of at least {least:g} is needed")
        return value

    def one_of(name: str, *values: str) -> str:
        value = given.get(name, values[0])
        if value not in values:
            raise PlanError(f"tula: {name} is {value!r} in the plan {path}; it is one of {', '.join(values)}")
        return str(value)

    for name in ("folder", "task"):
        if not isinstance(given.get(name), str):
            raise PlanError(f"tula: the plan {path} lacks {name}")
    expected = given.get("expected")
    if not isinstance(expected, (dict, type(None))):
        raise PlanError(f"tula: expected is {expected!r} in the plan {path}; a mapping or null is needed")
    steps = int(number("steps", STEPS, 1))
    low = int(number("min_steps", steps, 1))
    return Plan(
        folder=Path(given["folder"]),
        task=given["task"],
        attempt=int(number("attempt", 1, 1)),
        mode=one_of("mode", "probe", "train"),
        expected={name: (expected or {}).get(name) for name in ("world", "batch", "accumulate", "lr", "dataset")},
        warmup=int(number("warmup", 5, 1)),
        min_steps=low,
        max_steps=int(number("max_steps", max(low, steps), low)),
        seconds=number("seconds", 0.0, 0.0),
        split_steps=int(number("split_steps", 6, 0)),
        stop=one_of("stop", "exit", "raise"),
        heartbeat=number("heartbeat", 1.0, 0.0),
        row=number("row", 10.0, 0.0),
        save=bool(given.get("save", False)),
        checkpoint=str(given.get("checkpoint", "")),
        ags=_part(path, given, "ags", AGS),
        ortho=_part(path, given, "ortho", ORTHO),
        rehearsal=_part(path, given, "rehearsal", REHEARSAL),
        schedule=bool(given.get("schedule", False)),
        files=given.get("files"),
    )


def _part(path: str, given: dict[str, Any], name: str, needed: set[str]) -> dict[str, Any] | None:
    """Return a part of the plan that is null or has all that it needs."""
    part = given.get(name)
    if part is not None and (not isinstance(part, dict) or needed - part.keys()):
        told = ", ".join(sorted(needed))
        raise PlanError(f"tula: {name} is {part!r} in the plan {path}; null or all of {told} are needed")
    return part
