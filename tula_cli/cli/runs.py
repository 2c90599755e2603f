"""Resolution of the run that the user means."""

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tula_cli import words
from tula_cli.errors import SpecError
from tula_cli.options import DEFAULT_RUNS_FOLDER, Option, Overrides, Root
from tula_cli.show.screen import Screen

if TYPE_CHECKING:
    from tula_cli.run.directory import Run, RunDir
    from tula_cli.run.job_runs import ConfigDrift
    from tula_cli.run.records.results import JobFile
    from tula_cli.services.events import Planned


NamedRuns = Annotated[
    Sequence[Path],
    Option(
        "Run to use; may be repeated (default: $TULA_RUN, otherwise the newest run).",
        "--run",
        metavar="RUN",
        type=list[Path] | None,
        advanced=True,
    ),
]


@dataclass(frozen=True, kw_only=True)
class JobOrRun:
    """The job or run that a command uses, and the settings that override the job's."""

    job: Annotated[
        Path | None,
        typer.Argument(metavar="JOB_OR_RUN", help="A job file, or the name or folder of a run (default: newest run)."),
    ] = None
    named: NamedRuns = ()
    root: Root = DEFAULT_RUNS_FOLDER
    overrides: Overrides = ()

    @property
    def is_named(self) -> bool:
        """Whether the command line names a job or a run."""
        return self.job is not None or bool(self.named)

    @cached_property
    def _target(self) -> tuple[Path | None, Sequence[Path]]:
        """The job file that the command line names, or the runs."""
        return resolve_job_or_run(self.job, self.named, Path(self.root))

    @property
    def job_file(self) -> Path | None:
        """The job file that the command line names; None if it names a run."""
        return self._target[0]

    def open_runs(self, screen: Screen) -> tuple["Run", ...]:
        """Return the runs of a job.yaml, which may not exist yet, or existing runs."""
        job, named = self._target
        if job is None:
            runs = find_runs(screen, named, self.root, self.overrides)
            self._warn_config_drift(screen, runs)
            return runs
        from tula_cli.run import messages
        from tula_cli.run.code import get_user_code, list_code_changes, list_runs_with_other_code, make_runs_of_job
        from tula_cli.spec.load import load_spec

        runs = make_runs_of_job(Path(self.root), load_spec(job, overrides=self.overrides))
        screen.overrides = tuple(self.overrides)
        first = runs[0]
        if not any(run.exists for run in runs) and (before := list_runs_with_other_code(first)):
            code = get_user_code(first.spec, Path.cwd())
            screen.print_warning(
                messages.code_has_changed(
                    code=str(code),
                    earlier_run=before[0].id,
                    run=first.id,
                    earlier_path=words.quote_path(before[0].path),
                    files=list_code_changes(before[0], first.spec, Path.cwd()),
                )
            )
        screen.run_id = format_run_ids(runs)
        return runs

    def open_runs_by_job(self, screen: Screen) -> list[tuple["Run", ...]]:
        """Return the runs of each job, if runs of several jobs are named; otherwise those of `open_runs`."""
        if self.job is not None or len(self.named) < 2:
            return [self.open_runs(screen)]
        from tula_cli.run.job_runs import open_runs_by_job

        directories = _find_run_directories(screen, self.named, self.root, self.overrides)
        jobs = open_runs_by_job(directories, self.overrides)
        for runs in jobs:
            self._warn_config_drift(screen, runs)
        return jobs

    def _warn_config_drift(self, screen: Screen, runs: "Sequence[Run]") -> None:
        from tula_cli.run.job_runs import find_config_drift

        drifts = (find_config_drift(run, self.overrides) for run in runs)
        if (drift := next(filter(None, drifts), None)) is not None:
            from tula_cli.show import check

            screen.print_warning(check.describe_config_drift(drift, screen.command))

    def find_settings_origin(self, runs: "Sequence[Run]") -> "JobFile | None":
        """Return the job file and overrides that the settings come from, as the runs record them; None without a file."""
        from tula_cli.run.job_runs import find_settings_origin

        return find_settings_origin(runs[0], self.job_file, self.overrides)


@dataclass(frozen=True, kw_only=True)
class ExistingRun:
    """The run that a command uses, or all runs of a job."""

    target: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", readable=False, help="Name, folder or job file of a run (default: newest run)."),
    ] = None
    named: NamedRuns = ()
    root: Root = DEFAULT_RUNS_FOLDER

    def find_runs(self, screen: Screen) -> tuple["Run", ...]:
        """Return the runs, by default that of $TULA_RUN or those of the newest job."""
        if self.target is not None and self.named:
            raise _make_two_runs_error(self.target, self.named)
        return find_runs(screen, self.named if self.target is None else [self.target], self.root)


def format_run_ids(runs: "Sequence[RunDir]") -> str:
    return ", ".join(run.id for run in runs)


def find_runs(
    screen: Screen, named: Sequence[Path], root: str | Path, overrides: Sequence[str] = ()
) -> tuple["Run", ...]:
    """Return the runs given by their names, folders or job file; by default that of $TULA_RUN or those of the newest job.

    A note names the runs if they were not given on the command line, and a warning the overrides of earlier commands.
    """
    from tula_cli.run.job_runs import open_runs

    return open_runs(_find_run_directories(screen, named, root, overrides), overrides)


def _find_run_directories(
    screen: Screen, named: Sequence[Path], root: str | Path, overrides: Sequence[str]
) -> "list[RunDir]":
    from tula_cli.run import messages
    from tula_cli.run.directory import RunDir
    from tula_cli.run.job_runs import list_distinct_runs, list_runs_of_job

    root, why = Path(root).absolute(), ""
    if named:
        runs = [run for name in named for run in find_named_runs(name, root)]
    elif os.environ.get("TULA_RUN"):
        runs, why = [RunDir.open(Path(os.environ["TULA_RUN"]).absolute())], "(from TULA_RUN)"
    else:
        runs, why = list_runs_of_job(RunDir.find_newest(root)), "(the newest)"
    runs = list_distinct_runs(runs)
    screen.run_id = format_run_ids(runs)
    files = [run.read_job_file() for run in runs]
    screen.overrides = (*_list_overrides(files[0]), *overrides)
    paths = [words.make_relative_path(run.path) for run in runs]
    if why:
        screen.print_note(f"{'run' if len(paths) == 1 else 'runs'} {', '.join(paths)} {why}")
    paths_by_overrides: dict[tuple[str, ...], list[str]] = {}
    for path, file in zip(paths, files, strict=True):
        paths_by_overrides.setdefault(_list_changing_overrides(file, overrides), []).append(path)
    for earlier, changed_paths in paths_by_overrides.items():
        if earlier:
            screen.print_warning(messages.earlier_overrides_apply(overrides=earlier, runs=changed_paths))
    return runs


def find_named_runs(named: Path, root: Path) -> "list[RunDir]":
    """Return the existing run with a name or folder, or all runs of a job file.

    Raises:
        SpecError: there is none, or the name is that of several.
    """
    from tula_cli.run.directory import RunDir

    if (folder := _resolve_latest_folder(named, root)) is not None:
        return [RunDir.find_newest(folder)]
    # os.path, because Path raises PermissionError in another user's folder.
    if os.path.isfile(named):  # noqa: PTH113
        return _find_runs_of_job(named, root)
    folders = (named.absolute(), root / named)
    for folder in folders:
        if os.path.isfile(folder / "spec.yaml"):  # noqa: PTH113
            return [RunDir.open(folder)]
    ids = _find_ids_of_name(named, root)
    if len(ids) == 1:
        return [RunDir.open(root / ids[0])]
    if ids:
        raise SpecError(
            f"{words.format_count(len(ids), 'run')} have the name {named}",
            f"name one of them in full: {', '.join(ids)}",
        )
    for folder in folders:
        if os.path.exists(folder):  # noqa: PTH110
            return [RunDir.open(folder)]  # raises an error that says why it is not a run
    raise SpecError(
        f"there is no run {named} (neither {named.absolute()} nor {words.make_relative_path(root / named.name)} is a folder)",
        _suggest_runs(named, root) or "tula list shows all runs",
    )


def _resolve_latest_folder(named: Path, root: Path) -> Path | None:
    """Return the folder whose newest run is meant by `named`; None if it is neither `latest` nor the path of such a file.

    That is `root` for the name `latest`, and the file's folder for a path.
    """
    from tula_cli.run.directory import LATEST_FILE

    if named.name != LATEST_FILE:
        return None
    if os.path.exists(named):  # noqa: PTH110
        return named.absolute().parent if os.path.isfile(named) else None  # noqa: PTH113
    return root if len(named.parts) == 1 and os.path.isfile(root / named) else None  # noqa: PTH113


def _suggest_runs(named: Path, root: Path) -> str:
    """Return a hint that lists the runs of job `named`, or the run with the most similar name; empty if there is none."""
    from tula_cli.plugins import suggest_nearest
    from tula_cli.run.directory import RunDir

    runs = RunDir.list_all(root)
    variants = [
        run.id
        for run in runs
        if (part := run.read_variant()) is not None and run.id.rpartition("-")[0] == f"{named.name}-{part.type}"
    ]
    if variants:
        return f"name one of the runs of job {named.name}: {', '.join(sorted(variants))}"
    return suggest_nearest(named.name, [run.id for run in runs])


def _find_ids_of_name(named: Path, root: Path) -> list[str]:
    """Return the ids of the runs of a job name; an id is name and signature, such as plain-9accf564 for plain."""
    from tula_cli.run import files

    form = re.compile(rf"{re.escape(str(named))}-[0-9a-f]{{8}}")
    return sorted(filter(form.fullmatch, files.list_names(root)))


def _find_runs_of_job(job: Path, root: Path) -> "list[RunDir]":
    """Return the runs of a job file in its current state, otherwise those of the newest run created from the file."""
    from tula_cli.run.code import make_runs_of_job
    from tula_cli.run.directory import RunDir
    from tula_cli.run.job_runs import list_runs_of_job
    from tula_cli.spec.load import load_spec

    if runs := [run for run in make_runs_of_job(root, load_spec(job)) if run.exists]:
        return [*runs]
    for other in RunDir.list_all(root):
        file = other.read_job_file()
        if file is not None and Path(file.path) == job.absolute():
            return list_runs_of_job(other)
    raise SpecError(
        f"{job} has no run under {words.make_relative_path(root)}", f"tula profile {shlex.quote(str(job))} starts one"
    )


def _list_overrides(file: "JobFile | None", new_overrides: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the overrides (`a.b=c`) of a run's settings that no later one replaces, by its key or by the mapping around."""
    overrides = file.overrides if file else ()
    keys = [text.partition("=")[0].strip() + "." for text in (*overrides, *new_overrides)]
    return tuple(
        text for number, text in enumerate(overrides) if not keys[number].startswith(tuple(keys[number + 1 :]))
    )


def _list_changing_overrides(file: "JobFile | None", new_overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides of a run's settings that change a value of its job file, and are not replaced by new ones."""
    from tula_cli.spec.merge import flatten_mapping
    from tula_cli.spec.yaml_text import parse_yaml, read_yaml

    overrides = _list_overrides(file, new_overrides)
    job = dict[str, object]()
    if overrides and file is not None:
        with contextlib.suppress(SpecError):
            job = dict(flatten_mapping(read_yaml(Path(file.path))))
    changing = []
    for text in overrides:
        key, _, value = text.partition("=")
        if key.strip() not in job or job[key.strip()] != parse_yaml(value, source=f"--set {key}"):
            changing.append(text)
    return tuple(changing)


def resolve_job_or_run(job: Path | None, named: Sequence[Path], root: Path) -> tuple[Path | None, Sequence[Path]]:
    """Return job file and runs of a command that accepts either as its argument; only one of them is given."""
    from tula_cli.plugins import suggest_nearest
    from tula_cli.run import files

    if job is None:
        return None, named
    if named:
        raise _make_two_runs_error(job, named)
    if _resolve_latest_folder(job, root) is not None:
        return None, [job]
    if os.path.exists(job):  # noqa: PTH110
        is_run = os.path.isfile(job / "spec.yaml")  # noqa: PTH113
        return (None, [job]) if is_run else (job, [])
    is_like = job.suffix not in (".yaml", ".yml") and (
        _find_ids_of_name(job, root) or suggest_nearest(job.name, files.list_names(root))
    )
    return (None, [job]) if is_like or os.path.isdir(root / job) else (job, [])  # noqa: PTH112


def _make_two_runs_error(target: Path, named: Sequence[Path]) -> SpecError:
    return SpecError(f"{target} and --run {named[0]} both name a run", "remove one of them")


def make_edit_check(
    screen: Screen,
    runs: "Sequence[Run]",
    chosen: JobOrRun,
    *,
    then: "Callable[[Planned], bool]",
) -> "Callable[[Planned], bool]":
    """Return a confirmation callback that checks for an edited job.yaml before it calls `then`.

    The callback raises a SpecError if neither the job file nor the run is named on the command line, and the job file was changed in
    settings that affect training or cannot be used.
    """
    from tula_cli.run.job_runs import find_config_drift

    def confirm(planned: "Planned") -> bool:
        for run in () if chosen.is_named else runs:
            if (drift := find_config_drift(run, chosen.overrides)) is not None and drift.trains:
                raise _make_edited_error(screen, run, drift)
        return then(planned)

    return confirm


def _make_edited_error(screen: Screen, run: "RunDir", config_drift: "ConfigDrift") -> SpecError:
    from tula_cli.show import check

    name = words.make_relative_path(Path(config_drift.file.path))
    what = "cannot be used" if config_drift.problem else f"differs from the run ({', '.join(config_drift.changes)})"
    return SpecError(
        f"{name} {what}, so the settings of the training are ambiguous; nothing was started",
        f"to use the file: {check.make_apply_command(config_drift, screen.command)}; to use the run: tula {screen.command} --run {words.quote_path(run.path)}",
    )


def require_runs_folder(root: Path) -> None:
    """Check the folder of --run-dir; only the default one may be missing.

    Raises:
        SpecError: it does not exist, or is a file.
    """
    if not root.is_dir() and (root != Path(DEFAULT_RUNS_FOLDER) or root.exists()):
        problem = "this is a file" if root.exists() else "this folder does not exist"
        raise SpecError(f"--run-dir {root}: {problem}", "name the folder that contains the runs")
