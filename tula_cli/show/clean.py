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


def render_disk_usage(disk_usages: "Sequence[RunDiskUsage]", *, width: int) -> "Iterator[RenderableType]":
    """Yield a table with one row per run and kind of removable files, followed by the consequences of removing them."""
    rows = [row for disk_usage in disk_usages for row in _list_disk_usage_rows(disk_usage)]
    yield from render_long_table(
        ("run", "last written", "run size", "removable", "files", "file size"), rows, left=(0, 1, 3), width=width
    )
    yield ""
    yield from (f"{disk_usage.id} is skipped: {disk_usage.kept}" for disk_usage in disk_usages if disk_usage.kept)
    for disk_usage in disk_usages:
        if disk_usage.final:
            yield (
                f"{disk_usage.id}: {_describe_trainings(disk_usage.final)} cannot be resumed afterwards; the best weights are kept and can be evaluated"
            )
        if disk_usage.compared:
            yield f"{disk_usage.id}: {_describe_trainings(disk_usage.compared)} can neither be resumed nor evaluated afterwards; results are kept"
    freed = sum(disk_usage.size for disk_usage in disk_usages)
    in_use = sum(disk_usage.held for disk_usage in disk_usages)
    yield f"{format_bytes(freed)} of {format_bytes(in_use)} in {format_count(len(disk_usages), 'run')} can be freed; results and metrics are kept"


def _describe_trainings(signatures: Sequence[str]) -> str:
    return f"{'training' if len(signatures) == 1 else 'trainings'} {', '.join(signatures)}"


def _list_disk_usage_rows(disk_usage: "RunDiskUsage") -> list[list[str]]:
    first = [disk_usage.id, format_local_time(disk_usage.changed, "%Y-%m-%d"), format_bytes(disk_usage.held)]
    kinds = [kind for kind in KIND_DESCRIPTIONS if any(holding.kind == kind for holding in disk_usage.holdings)]
    if not kinds:
        return [[*first, "-", "-", "-"]]
    rows = []
    for kind in kinds:
        sizes = [holding.size for holding in disk_usage.holdings if holding.kind == kind]
        rows.append([*first, KIND_DESCRIPTIONS[kind], str(len(sizes)), format_bytes(sum(sizes))])
        first = ["", "", ""]
    return rows


def describe_freed_space(result: "CleanResult") -> str:
    """Describe the disk space that was freed."""
    return f"freed {format_bytes(result.size)} in {result.files} {'file or folder' if result.files == 1 else 'files or folders'}"


def make_clean_data(disk_usages: "Sequence[RunDiskUsage]", done: "CleanResult | None") -> dict[str, Any]:
    """Return the removable files and the result for --json (sizes in bytes); `freed` is None if nothing was removed."""
    return {
        "runs": [{**vars(disk_usage), "size": disk_usage.size} for disk_usage in disk_usages],
        "size": sum(disk_usage.size for disk_usage in disk_usages),
        "freed": done,
    }
