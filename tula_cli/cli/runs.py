"""Which run the user means, and its parts."""

import os
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
    from tula_cli.run.jobfile import Edited
    from tula_cli.services.events import Planned
    from tula_cli.spec.job import JobSpec


def find_run(screen: Screen, named: Path | None, root: Path) -> "RunDir":
    """Return the run the user means, and say which where it was not named on the command line."""
    from tula_cli.run.directory import RunDir

    root = root.absolute()
    if named is not None:
        # A run's name is enough where it lies under the root.
        inside = not named.exists() and (root / named).is_dir()
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


def _spec_of(run: "RunDir", overrides: Sequence[str] | None) -> "JobSpec":
    """Return a run's spec with overrides that leave its measurements valid.

    Raises:
        SpecError: an override changes what was measured.
    """
    from tula_cli.spec.load import load_spec
    from tula_cli.spec.signature import signature

    known = run.spec()
    if not overrides:
        return known
    changed = load_spec(run.path / "spec.yaml", overrides=overrides, environ={}, site_files=())
    before, after = ({part.run.path for part in run.parts(spec)} for spec in (known, changed))
    if signature(changed) != signature(known) or (known.node_types and not before <= after):
        raise SpecError(
            f"--set {' --set '.join(overrides)}: {run.id} was measured otherwise",
            "make it a run of its own: tula profile job.yaml with the same --set",
        )
    return changed


def open_run(
    screen: Screen, job: Path | None, named: Path | None, root: Path, overrides: Sequence[str] | None
) -> tuple["RunDir", "JobSpec"]:
    """Return run and spec: those of a job.yaml (whose run may not be there yet), else those of a run."""
    from tula_cli.run.code import behind, fingerprint, others
    from tula_cli.run.directory import RunDir
    from tula_cli.run.jobfile import edited

    if job is None:
        run = find_run(screen, named, root)
        spec = _spec_of(run, overrides)
        if (found := edited(run, spec, overrides or ())) is not None:
            screen.warn(check.edited(found, screen.command))
        return run, spec
    if named is not None:
        raise SpecError(f"both {job} and --run {named} given", "name one of them")
    spec = load(job, overrides)
    code = fingerprint(spec, Path.cwd())
    run = RunDir.of(root.absolute(), spec, code=code)
    if code and not run.exists and (before := others(run, spec)):
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
    from tula_cli.run.jobfile import edited

    def confirm(planned: "Planned") -> bool:
        if named is None and (found := edited(run, spec, overrides or ())) is not None and found.trains:
            raise _edited(screen, run, found)
        return then(planned)

    return confirm


def _edited(screen: Screen, run: "RunDir", found: "Edited") -> SpecError:
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
