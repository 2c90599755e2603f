"""`tula clean`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tula_cli.cli.options import Yes
from tula_cli.cli.runs import find_run, parse_age
from tula_cli.errors import BadMeasurements, Pending, SpecError
from tula_cli.options import ROOT, Root
from tula_cli.show import clean as show_clean
from tula_cli.show.screen import Screen

if TYPE_CHECKING:
    from tula_cli.run.directory import RunDir


def clean(
    screen: Screen,
    named: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN", help="These runs; else all under --run-dir.")
    ] = None,
    root: Root = ROOT,
    older: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only runs in which nothing was written for 30d, 12h, 8w.")
    ] = None,
    keep: Annotated[
        Literal["best"] | None,
        typer.Option(
            metavar="best",
            help="For finished trainings, keep only the best checkpoint: for evaluation, not for resuming.",
        ),
    ] = None,
    compared: Annotated[
        bool, typer.Option("--compared", help="Free the weights of tula compare's finished trainings too, all of them.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be freed, and touch nothing.")] = False,
    yes: Yes = False,
) -> None:
    """Free what runs no longer need: older checkpoints, damaged and unfinished ones, files of scripts under probes.

    Results, metrics and recommendations stay, and so does what a training goes on from. A run with a live job is left as it is.
    """
    from tula_cli.services import clean as service

    long = None if older is None else parse_age(older, "--older")
    run_spaces = service.measure_runs(
        _find_runs(screen, named, Path(root)), keep_best=keep == "best", compared=compared, older=long
    )
    if named and (kept_run := next((run_space for run_space in run_spaces if run_space.kept), None)):
        kept_words = f"{kept_run.id}: {kept_run.kept}; nothing was freed"
        raise (
            Pending(kept_words, "tula cancel ends its jobs; or leave it out")
            if kept_run.lives
            else BadMeasurements(kept_words)
        )
    if dry_run or not any(run_space.holdings for run_space in run_spaces):
        shown = (
            show_clean.render_spaces(run_spaces, width=screen.width)
            if run_spaces
            else [f"no run {'is that old' if older else 'is here'}"]
        )
        return screen.answer(show_clean.clean_data(run_spaces, None), shown)
    screen.aside(show_clean.render_spaces(run_spaces, width=screen.width))
    if not _confirm_deletion(screen, yes=yes):
        return screen.answer(show_clean.clean_data(run_spaces, None), ["nothing was freed"])
    done = service.remove_files(run_spaces)
    for problem in done.problems:
        screen.warn(f"not all was freed of {problem}")
    return screen.answer(show_clean.clean_data(run_spaces, done), show_clean.describe_cleaned(done))


def _find_runs(screen: Screen, named: Sequence[Path] | None, root: Path) -> "list[RunDir]":
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
        if root != Path(ROOT) and not root.is_dir():
            raise SpecError(f"--run-dir {root}: there is no such folder", "name the one that holds the runs")
        every = RunDir.all(root.absolute())
        owned_runs = [run for run in every if not owner.find_other_owner(run.path)]
        if len(owned_runs) < len(every):
            screen.note(f"{len(every) - len(owned_runs)} of {len(every)} runs are other users', and left out")
        return owned_runs
    runs = {(run := find_run(screen, name, root)).path.resolve(): run for name in named}
    for run in runs.values():
        run_format.require_known_format(run.path)
        owner.require_own(run.path)
    return list(runs.values())


def _confirm_deletion(screen: Screen, *, yes: bool) -> bool:
    if yes:
        return True
    if not sys.stdin.isatty():
        raise SpecError(
            "not confirmed, so nothing was freed: there is no terminal to ask on",
            "add --yes, or --dry-run to see what would go",
        )
    return screen.confirm("free it?")
