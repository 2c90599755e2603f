"""Output of `tula diff`: the answer, the differences, and all configurations that both runs have."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tula_cli.services.diff import format_value
from tula_cli.show.profile import format_milliseconds
from tula_cli.show.tables import make_table, make_table_of_lines, style_text
from tula_cli.words import (
    choose_size_unit,
    format_count,
    format_local_time,
    format_number,
    format_size,
    make_relative_path,
    shorten_around_difference,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tula_cli.services.diff import FieldDifference, RunDifference, RunOverview, StepDifference, ValuePair

_MAX_VALUE_CHARACTERS = 48  # maximum characters of a value in a table


def render_difference(run_difference: "RunDifference") -> Iterator["RenderableType"]:
    """Yield the answer in one or two lines, and tables of the values that differ."""
    yield from (
        f"{run_label}  {_describe_run(run)}"
        for run_label, run in (("A", run_difference.before), ("B", run_difference.after))
    )
    yield ""
    yield from (style_text(line, "bold") for line in run_difference.headline)
    yield from _render_values("job", run_difference.job)
    yield from _render_files(run_difference)
    yield from _render_values("environment", run_difference.environment)
    yield from _render_values("code", run_difference.code)
    yield from _render_steps(run_difference)


def _describe_run(run_overview: "RunOverview") -> str:
    if run_overview.measured is None:
        return f"{make_relative_path(run_overview.path)}: nothing measured yet"
    first, last = map(format_local_time, run_overview.measured)
    return f"{make_relative_path(run_overview.path)}: measured {first}{f' to {last}' * (last != first)}"


def _render_values(heading: str, differences: Sequence["FieldDifference"]) -> Iterator["RenderableType"]:
    if not differences:
        return
    table = make_table((heading, "A", "B"), left=range(3))
    for difference in differences:
        table.add_row(
            difference.about,
            *shorten_around_difference(
                format_value(difference.before, "-"), format_value(difference.after, "-"), _MAX_VALUE_CHARACTERS
            ),
        )
    yield ""
    yield table


def _render_files(run_difference: "RunDifference") -> Iterator["RenderableType"]:
    before, other = run_difference.before.file, run_difference.after.file
    if before is None or other is None or before == other:
        return
    if before.path != other.path:
        yield f"job file: {before.path} -> {other.path}"
    if before.overrides != other.overrides:
        yield f"--set: {' '.join(before.overrides) or 'none'} -> {' '.join(other.overrides) or 'none'}"


def _render_steps(run_difference: "RunDifference") -> Iterator["RenderableType"]:
    steps = run_difference.steps
    if steps.rows:
        has_several_gpu_counts = len({row.gpus_per_node for row in steps.rows}) > 1
        divisor, unit = choose_size_unit(max((row.memory.before or 0 for row in steps.rows), default=0))
        times, parts = [], []
        for row in steps.rows:
            configuration = {
                "nodes": str(row.nodes),
                "GPUs/\nnode": str(row.gpus_per_node) if has_several_gpu_counts else None,
                "batch": str(row.batch),
                "local\nbatch": str(row.local_batch),
            }
            durations = {
                "step A\n(ms)": format_milliseconds(row.step.before),
                "step B\n(ms)": format_milliseconds(row.step.after),
                "B / A": format_number(row.ratio),
                "": _describe_step(row),
            }
            components = {
                "compute\n(ms)": _format_pair(row.compute, 1e-3),
                "sync\n(ms)": _format_pair(row.sync, 1e-3),
                "data wait\n(ms)": _format_pair(row.data_wait, 1e-3),
                f"memory\n({unit})": _format_pair(row.memory, divisor),
            }
            times.append({**configuration, **durations})
            parts.append({**configuration, **components})
        yield ""
        yield make_table_of_lines(times, left=("",))
        yield run_difference.test
        yield ""
        yield make_table_of_lines(parts, left=())
    for run_label, count in zip("AB", steps.only, strict=True):
        if count:
            yield f"{format_count(count, 'configuration')} only in {run_label}"


def _format_pair(each: "ValuePair", divisor: float) -> str:
    if each.before is None and each.after is None:
        return "-"
    return f"{format_size(each.before, divisor)} -> {format_size(each.after, divisor)}"


def _describe_step(row: "StepDifference") -> str:
    if row.outcomes[0] != row.outcomes[1]:
        return " -> ".join(outcome.replace("_", " ") for outcome in row.outcomes)
    if row.ratio is None:
        return row.outcomes[0].replace("_", " ")
    if not row.beyond_noise:
        return "within noise"
    causes = f": {', '.join(row.causes)}" if row.causes else ""
    return ("slower" if row.ratio > 1 else "faster") + causes
