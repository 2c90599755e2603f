"""`tula clean`."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tula_cli.cli.options import Yes
from tula_cli.cli.runs import find_named_runs, format_run_ids, require_runs_folder
from tula_cli.errors import BadMeasurements, Pending, SpecError
from tula_cli.options import DEFAULT_RUNS_FOLDER, Root
from tula_cli.show import clean as show_clean
from tula_cli.show.screen import Screen
from tula_cli.words import SECONDS_PER_UNIT

if TYPE_CHECKING:
    from tula_cli.run.directory import RunDir


def clean(
    screen: Screen,
    named: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN", help="Names, folders or job files of runs (default: all runs)."),
    ] = None,
    root: Root = DEFAULT_RUNS_FOLDER,
    older: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Clean only runs in which no file has changed for at least this time, such as 12h, 30d or 8w.",
        ),
    ] = None,
    keep: Annotated[
        Literal["best"] | None,
        typer.Option(
            metavar="best",
            help="Keep only the best checkpoint of finished trainings. They can still be evaluated, but not resumed.",
        ),
    ] = None,
    compared: Annotated[
        bool,
        typer.Option("--compared", help="Also delete all weights of finished trainings of tula compare."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be deleted, without deleting it.")
    ] = False,
    yes: Yes = False,
) -> None:
    """Delete files that runs no longer need.

    Deletes older, damaged and unfinished checkpoints, and files that scripts wrote while they were probed. Results,
    metrics, recommendations and the checkpoint from which a training resumes are kept. A run with an active job is not
    changed.
    """
    from tula_cli.services import clean as service

    min_age_seconds = None if older is None else _parse_age(older)
    disk_usages = service.measure_runs_disk_usage(
        _find_runs_to_clean(screen, named, Path(root)),
        keep_best=keep == "best",
        compared=compared,
        older=min_age_seconds,
    )
    if named and (kept_run := next((usage for usage in disk_usages if usage.kept), None)):
        message = f"{kept_run.id}: {kept_run.kept}; nothing was deleted"
        if kept_run.lives:
            hint = f"cancel the jobs of this run with tula cancel {kept_run.id}, or leave the run out of the command"
            raise Pending(message, hint)
        raise BadMeasurements(message, "tula status names each damaged file and what to do about it")
    if not disk_usages:
        reason = "no run is that old: files of all runs have changed since then"
        lines = [reason if older else f"there are no runs in {root}"]
        return screen.print_answer(show_clean.make_clean_data(disk_usages, None), lines)
    if dry_run or not any(usage.holdings for usage in disk_usages):
        shown = show_clean.render_disk_usage(disk_usages, width=screen.width)
        return screen.print_answer(show_clean.make_clean_data(disk_usages, None), shown)
    screen.print_to_stderr(show_clean.render_disk_usage(disk_usages, width=screen.width))
    if not _confirm_deletion(screen, yes=yes):
        return screen.print_answer(show_clean.make_clean_data(disk_usages, None), ["nothing was deleted"])
    result = service.remove_files(disk_usages)
    for problem in result.problems:
        screen.print_warning(f"cannot delete all files of {problem}")
    return screen.print_answer(
        show_clean.make_clean_data(disk_usages, result), [show_clean.describe_freed_space(result)]
    )


def _find_runs_to_clean(screen: Screen, named: Sequence[Path] | None, root: Path) -> "list[RunDir]":
    """Return the user's runs to clean, each once.

    Raises:
        NotYours: a named run belongs to another user.
        OtherFormat: a named run has a format that this version of tula does not read.
        SpecError: `root` is given and does not exist.
    """
    from tula_cli.run import format as run_format
    from tula_cli.run import owner
    from tula_cli.run.directory import RunDir

    if not named:
        require_runs_folder(root)
        all_runs = RunDir.list_all(root.absolute())
        owned_runs = [run for run in all_runs if not owner.find_other_owner(run.path)]
        if len(owned_runs) < len(all_runs):
            screen.print_note(
                f"{len(all_runs) - len(owned_runs)} of {len(all_runs)} runs belong to other users and are not shown"
            )
        return owned_runs
    runs = {run.path.resolve(): run for name in named for run in find_named_runs(name, root)}
    screen.run_id = format_run_ids([*runs.values()])
    for run in runs.values():
        run_format.require_known_format(run.path)
        owner.require_ownership(run.path)
    return list(runs.values())


def _confirm_deletion(screen: Screen, *, yes: bool) -> bool:
    if yes:
        return True
    if not sys.stdin.isatty():
        raise SpecError(
            "nothing was deleted: confirmation is needed, but there is no terminal",
            "add --yes to delete, or --dry-run to see what would be deleted",
        )
    return screen.ask_yes_or_no("delete these files?")


def _parse_age(text: str) -> float:
    """Return the seconds of the value of --older, such as 90s, 30m, 2h or 30d.

    Raises:
        SpecError: the text is not an age.
    """
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw])", text.strip())
    if match is None:
        raise SpecError(f"--older {text}: expected a number with a unit", "for example 90s, 30m, 2h, 30d or 4w")
    return float(match[1]) * SECONDS_PER_UNIT[match[2]]
