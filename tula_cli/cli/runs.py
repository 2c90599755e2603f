"""Which run the user means, and its parts."""

import os
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tula_cli import words
from tula_cli.errors import SpecError
from tula_cli.show import check
from tula_cli.show.screen import Screen

if TYPE_CHECKING:
    from tula_cli.run.directory import Part, RunDir
    from tula_cli.run.jobfile import ConfigDrift
    from tula_cli.services.events import Planned
    from tula_cli.spec.job import JobSpec


def find_run(screen: Screen, named: Path | None, root: Path) -> "RunDir":
    """Return the run the user means, and say which where it was not named on the command line."""
    from tula_cli.plugins import nearest
    from tula_cli.run import files
    from tula_cli.run.directory import RunDir

    root = root.absolute()
    if named is not None:
        # A run's name is enough where it lies under the root.
        # os.path's, which raise nothing where another user's folder is in the way.
        there = os.path.exists(named)  # noqa: PTH110
        inside = not there and os.path.isdir(root / named)  # noqa: PTH112
        if not there and not inside and named.name == str(named) and (like := nearest(named.name, files.names(root))):
            raise SpecError(f"no such run directory: {named.absolute()}, nor {words.near(root / named)}", like)
        run = RunDir.open(root / named if inside else named.absolute())
    elif os.environ.get("TULA_RUN"):
        run = RunDir.open(Path(os.environ["TULA_RUN"]).absolute())
        screen.note(f"run {words.near(run.path)} (from TULA_RUN)")
    else:
        run = RunDir.newest(root)
        screen.note(f"run {words.near(run.path)} (the newest)")
    screen.run_id = run.id
    return run


def load(path: Path, overrides: Sequence[str] | None) -> "JobSpec":
    from tula_cli.spec.load import load_spec

    return load_spec(path, overrides=overrides or ())


def open_run(
    screen: Screen, job: Path | None, named: Path | None, root: Path, overrides: Sequence[str] | None
) -> tuple["RunDir", "JobSpec"]:
    """Return run and spec: those of a job.yaml (whose run may not be there yet), else those of a run."""
    from tula_cli.run.code import behind, others, run_of
    from tula_cli.run.jobfile import config_drift, overridden

    if job is None:
        run = find_run(screen, named, root)
        spec = overridden(run, overrides or ())
        if (found := config_drift(run, spec, overrides or ())) is not None:
            screen.warn(check.config_drift(found, screen.command))
        return run, spec
    if named is not None:
        raise SpecError(f"both {job} and --run {named} given", "name one of them")
    spec = load(job, overrides)
    run = run_of(root, spec)
    if not run.exists and (before := others(run, spec)):
        screen.note(f"{behind(spec)} has changed since run {before[0].id}: a new run directory, {run.id}")
    screen.run_id = run.id
    return run, spec


def unedited(
    screen: Screen,
    run: "RunDir",
    spec: "JobSpec",
    named: Path | None,
    overrides: Sequence[str] | None,
    *,
    then: "Callable[[Planned], bool]",
) -> "Callable[[Planned], bool]":
    """Return who is asked before a training starts: `then`, but settings that their job.yaml no longer has are refused.

    They are where neither it nor --run is `named`, and it has other values that a training depends on, or cannot be used:
    a SpecError.
    """
    from tula_cli.run.jobfile import config_drift

    def confirm(planned: "Planned") -> bool:
        if named is None and (found := config_drift(run, spec, overrides or ())) is not None and found.trains:
            raise _edited(screen, run, found)
        return then(planned)

    return confirm


def _edited(screen: Screen, run: "RunDir", found: "ConfigDrift") -> SpecError:
    name, run_path = words.near(Path(found.file.path)), shlex.quote(words.near(run.path))
    what = "cannot be used" if found.problem else f"says otherwise ({', '.join(found.changes)})"
    return SpecError(
        f"{name} {what}, and nothing tells which settings to train with; nothing was started",
        f"the file's: {check.with_file(found, screen.command)}; those of the run: tula {screen.command} --run {run_path}",
    )


def say_type(screen: Screen, part: "Part") -> None:
    """Say which type of node a command is about, where the job names any."""
    if part.type is not None:
        screen.note(f"node type {part.type}")


def age(text: str, option: str) -> float:
    """Return the seconds that an option's value such as 90s, 30m, 2h or 30d stands for.

    Raises:
        SpecError: it stands for none.
    """
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw])", text.strip())
    if found is None:
        raise SpecError(f"{option} {text}: not a time", "a number and its unit: 90s, 30m, 2h, 30d or 4w")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}[found[2]]


def since_when(text: str, *, now: float) -> float:
    """Return the Unix time that --since means: so long before `now`, or a local date, with or without the time of day.

    Raises:
        SpecError: it means none.
    """
    day = text.strip()
    missing = " 00:00:00"[len(day) - 10 :] if 10 <= len(day) < 19 else ""  # 2026-11-24, 2026-11-24 09:30
    if (told := words.told_time(day + missing)) is not None:
        return told
    return now - age(text, "--since")
