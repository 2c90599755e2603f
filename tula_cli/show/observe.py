"""Output of `tula observe`."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tula_cli.show.tables import make_table
from tula_cli.words import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from tula_cli.models.observed import ObservedReport

_SHARE_LABELS = {"data": "waiting for data", "eval": "evaluation", "epoch": "starting epochs", "save": "checkpoints"}


def render_observations(reports: Sequence["ObservedReport"]) -> Iterator["RenderableType"]:
    """Yield the reports of jobs, one after the other."""
    for index, report in enumerate(reports):
        if index:
            yield ""
        yield from _render_report(report)
    if not reports:
        return
    yield ""
    if reports[-1].configurations_fitted < 2:
        yield "next: observe the script with another batch or number of processes, because"
        yield "a recommendation needs two jobs that differ in one of them;"
        yield "or measure the script now: tula init --from-command '...'"
    else:
        yield "next: to choose nodes and batch size from these jobs, run tula init --from-command '...',"
        yield f"then tula recommend job.yaml --observed {shlex.quote(reports[-1].script)}"


def render_installation(folder: Path, root: Path) -> Iterator[str]:
    """Yield the line for a shell or module file, and the folder of the observations."""
    yield f'export PYTHONPATH={shlex.quote(str(folder))}"${{PYTHONPATH:+:$PYTHONPATH}}"'
    yield ""
    yield f"With this line, tula observes every training with torch and writes to {root}."
    yield "To turn this off, set TULA_OBSERVE=0."
    yield f"Read the observations with tula observe --report --folder {shlex.quote(str(root))}"


def _render_report(report: "ObservedReport") -> Iterator["RenderableType"]:
    gpus = "GPU" if report.capacity_bytes else "process"
    plural = "" if report.gpus_per_node == 1 else "es" if gpus == "process" else "s"
    batch = "" if report.batch is None else f", batch {report.batch} ({report.local_batch} per {gpus})"
    yield (
        f"{report.script}/{report.job}: {format_count(report.nodes)} with {report.gpus_per_node} {gpus}{plural}"
        f"{'' if report.nodes == 1 else ' each'}{batch}, {format_count(report.steps, 'step')}"
        f"{'' if report.is_complete else ' in its newest report; the job is still running, or was stopped'}"
    )
    yield ""
    yield _make_step_table(report)
    yield ""
    yield from _describe_whole_job(report)
    if report.other_requests:
        yield ""
        yield _make_requests_table(report)
        yield f"Relative to this job, for the same number of samples and batch per {gpus}; 90 % intervals in parentheses."
    yield from (f"note: {note}" for note in report.notes)
    if report.warnings:
        yield ""
        yield from (str(advice) for advice in report.warnings)


def _make_step_table(report: "ObservedReport") -> "Table":
    table = make_table(["one step", "time", "share"])
    parts = (
        ("computing", report.compute_seconds),
        ("exchanging gradients", report.sync_seconds),
        ("waiting for data", report.data_seconds),
    )
    for label, seconds in parts:
        share = None if seconds is None else seconds / report.step_seconds
        table.add_row(label, _format_step(seconds), "-" if share is None else f"{100 * share:.0f} %")
    table.add_row("whole step", _format_step(report.step_seconds), "")
    return table


def _format_step(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _describe_whole_job(report: "ObservedReport") -> Iterator[str]:
    if report.samples_per_second is not None:
        yield f"speed               {report.samples_per_second:,.0f} samples/s"
    if report.training_seconds:
        parts = {label: report.shares.get(kind, 0.0) for kind, label in _SHARE_LABELS.items()}
        parts["steps and the code between them"] = 1 - sum(parts.values())
        shares = [f"{label} {100 * share:.0f} %" for label, share in parts.items() if share >= 0.005]
        label = "training time" if report.is_complete else "training so far"
        of_it = f", of which {', '.join(shares)}" if shares else ""
        yield f"{label:19} {format_duration(report.training_seconds)}{of_it}"
    capacity = "" if report.capacity_bytes is None else f" of {format_bytes(report.capacity_bytes)}"
    yield f"peak memory         {format_bytes(report.peak_bytes)}{capacity} per {'GPU' if capacity else 'process'}"


def _make_requests_table(report: "ObservedReport") -> "Table":
    has_several_node_counts = any(request.nodes != report.nodes for request in report.other_requests)
    table = make_table(["nodes" if has_several_node_counts else "processes", "batch", "time", "node-hours"], left=())
    for request in report.other_requests:
        table.add_row(
            str(request.nodes if has_several_node_counts else request.gpus_per_node),
            "-" if request.batch is None else str(request.batch),
            f"{request.time_ratio:.2f}x ({request.time_low:.2f} to {request.time_high:.2f})",
            f"{request.node_hours_ratio:.2f}x ({request.node_hours_low:.2f} to {request.node_hours_high:.2f})",
        )
    return table
