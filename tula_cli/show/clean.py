"""Output of `tula clean`."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tula_cli.show.tables import render_long_table
from tula_cli.words import format_bytes, format_count, format_local_time

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tula_cli.services.clean import CleanResult, RunDiskUsage

KIND_DESCRIPTIONS = {
    "checkpoints": "older checkpoints",
    "compared": "trainings of tula compare",
    "damaged": "damaged checkpoints",
    "drafts": "incompletely written files",
    "scratch": "files written by probes and searches",
}


def render_spaces(run_spaces: "Sequence[RunDiskUsage]", *, width: int) -> "Iterator[RenderableType]":
    """Yield a table with one row per run and kind of removable files, followed by the consequences of removing them."""
    rows = [row for run_space in run_spaces for row in _list_space_rows(run_space)]
    yield from render_long_table(
        ("run", "last written", "run size", "removable", "files", "file size"), rows, left=(0, 1, 3), width=width
    )
    yield ""
    yield from (f"{run_space.id} is skipped: {run_space.kept}" for run_space in run_spaces if run_space.kept)
    for run_space in run_spaces:
        if run_space.final:
            yield (
                f"{run_space.id}: {_describe_trainings(run_space.final)} cannot be resumed afterwards; the best weights are kept and can be evaluated"
            )
        if run_space.compared:
            yield f"{run_space.id}: {_describe_trainings(run_space.compared)} can neither be resumed nor evaluated afterwards; results are kept"
    freed = sum(run_space.size for run_space in run_spaces)
    in_use = sum(run_space.held for run_space in run_spaces)
    yield f"{format_bytes(freed)} of {format_bytes(in_use)} in {format_count(len(run_spaces), 'run')} can be freed; results and metrics are kept"


def _describe_trainings(signatures: Sequence[str]) -> str:
    return f"{'training' if len(signatures) == 1 else 'trainings'} {', '.join(signatures)}"


def _list_space_rows(run_space: "RunDiskUsage") -> list[list[str]]:
    first = [run_space.id, format_local_time(run_space.changed, "%Y-%m-%d"), format_bytes(run_space.held)]
    kinds = [kind for kind in KIND_DESCRIPTIONS if any(holding.kind == kind for holding in run_space.holdings)]
    if not kinds:
        return [[*first, "-", "-", "-"]]
    rows = []
    for kind in kinds:
        sizes = [holding.size for holding in run_space.holdings if holding.kind == kind]
        rows.append([*first, KIND_DESCRIPTIONS[kind], str(len(sizes)), format_bytes(sum(sizes))])
        first = ["", "", ""]
    return rows


def describe_freed_space(result: "CleanResult") -> Iterator[str]:
    """Yield the disk space that was freed, and the problems."""
    yield f"freed {format_bytes(result.size)} in {result.files} {'file or folder' if result.files == 1 else 'files or folders'}"
    yield from (f"not everything was deleted: {problem}" for problem in result.problems)


def make_clean_data(run_spaces: "Sequence[RunDiskUsage]", done: "CleanResult | None") -> dict[str, Any]:
    """Return the removable files and the result for --json (sizes in bytes); `freed` is None if nothing was removed."""
    return {
        "runs": [{**vars(run_space), "size": run_space.size} for run_space in run_spaces],
        "size": sum(run_space.size for run_space in run_spaces),
        "freed": done,
    }
