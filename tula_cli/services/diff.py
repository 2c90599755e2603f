"""`tula diff`: list the differences between two runs, and name their likely cause.

Job, environment and code are compared key by key, step times by their noise.
"""

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import SpecError
from tula_cli.models.time.changes import NOISE_TEST, compare_step_times, find_changed_parts
from tula_cli.models.time.noise import compute_trimmed_mean, split_step_time
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.frames import make_frame
from tula_cli.run.job_runs import compare_jobs, list_runs_with_data
from tula_cli.run.records.probes import Environment, GpuState, Measured, Result
from tula_cli.run.records.results import JobFile, StepPart
from tula_cli.words import format_bytes, format_count, format_number, shorten_around_difference

if TYPE_CHECKING:
    import pandas as pd


# --- A value of two runs


@dataclass(frozen=True)
class FieldDifference:
    """A field that differs between two runs; None if a run does not have it or does not record it."""

    about: str
    before: Any
    after: Any


def compare_mappings(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[FieldDifference, ...]:
    """Return the keys whose values differ between two mappings, in the order of the keys."""
    return tuple(
        FieldDifference(key, before.get(key), after.get(key))
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
    )


def format_value(value: object, missing: str = "none") -> str:
    if value is None or isinstance(value, bool):
        return missing if value is None else str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _join_distinct(values: Iterable[object]) -> str | None:
    """Return the distinct values as a comma-separated text in their order; None if there are none."""
    distinct = dict.fromkeys(str(value) for value in values if value not in (None, "", ()))
    return ", ".join(distinct) or None


# --- Code


def _summarize_code(run: RunDir) -> dict[str, str]:
    """Return commit and files of a run's newest code snapshot; a file by a digest of its content."""
    tasks = run.read_snapshot()
    names = dict.fromkeys(task.code for task in (*tasks.probe_tasks, *tasks.tasks) if task.code)
    snapshots = [snapshot for name in names if (snapshot := run.read_code(name)) is not None]
    snapshot = max(snapshots, key=lambda snapshot: snapshot.taken_at, default=None)
    if snapshot is None:
        return {}
    commit = {"commit": snapshot.commit[:12] + " and changes" * snapshot.dirty} if snapshot.commit else {}
    contents = {name: _read_file(run.get_code_dir(snapshot.name) / name) for name in sorted(snapshot.files)}
    return commit | {
        name: hashlib.sha256(content).hexdigest()[:8] for name, content in contents.items() if content is not None
    }


def _read_file(path: Path) -> bytes | None:
    """Return the content of a copied file; None if it is missing or a symbolic link."""
    try:
        return None if path.is_symlink() else path.read_bytes()
    except OSError:
        return None


# --- Environments

_SOFTWARE_FIELDS = {
    "hardware": "hardware",
    "device": "device",
    "GPU driver": "driver",
    "torch": "torch",
    "torchvision": "torchvision",
    "CUDA": "cuda",
    "NCCL": "nccl",
    "backend": "backend",
    "Python": "python",
    "tula": "tula",
    "system": "system",
    "data-loader processes": "workers",
}
"""Names of compared fields of `Environment`."""
_MIN_CLOCK_DIFFERENCE = 0.03
_MIN_WATT_DIFFERENCE = 0.1
"""Relative differences below which a GPU's clock and power count as equal: they are never exactly the same."""


def _compare_environments(before: Sequence[Measured], after: Sequence[Measured]) -> tuple[FieldDifference, ...]:
    """Return the differences between the environments of two sets of probes; empty if either set is empty."""
    if not before or not after:
        return ()
    differences = compare_mappings(_summarize_environment(before), _summarize_environment(after))
    return (*differences, *_compare_gpu_states(before, after))


def _summarize_environment(probes: Sequence[Measured]) -> dict[str, str | None]:
    """Return the software, hardware and variables that the probes recorded, by name; each as a text with its distinct values."""
    environments: list[Environment] = [probe.environment for probe in probes]
    scripts = [probe.script for probe in probes if probe.script is not None]
    names = dict.fromkeys(name for environment in environments for name in environment.variables)
    return {
        **{
            label: _join_distinct(getattr(environment, field) for environment in environments)
            for label, field in _SOFTWARE_FIELDS.items()
        },
        "all-reduce": _join_distinct(how for environment in environments for how in environment.allreduce.values()),
        "memory for a rank": _join_distinct(
            format_bytes(probe.capacity) for probe in probes if probe.capacity is not None
        ),
        "samples of the dataset": _join_distinct(probe.dataset_size for probe in probes),
        "optimizer of the script": _join_distinct(script.optimizer for script in scripts),
        "parameters of the script": _join_distinct(script.parameters for script in scripts),
        "hosts": _join_distinct(sorted({host for environment in environments for host in environment.hosts})),
        **{
            f"variable {name}": _join_distinct(environment.variables.get(name) for environment in environments)
            for name in names
        },
    }


def _compare_gpu_states(before: Sequence[Measured], after: Sequence[Measured]) -> Iterator[FieldDifference]:
    """Yield the differences in clocks, power and throttle reasons, by NVML at the end of the probes' timed steps."""
    states: list[list[GpuState]] = [[probe.gpus[1] for probe in probes if probe.gpus] for probes in (before, after)]
    if not all(states):
        return
    for about, field, least in (
        ("GPU clocks (MHz)", "sm_mhz", _MIN_CLOCK_DIFFERENCE),
        ("GPU power (W)", "watts", _MIN_WATT_DIFFERENCE),
    ):
        first, second = (statistics.median(getattr(state, field) for state in run_states) for run_states in states)
        if first and abs(second / first - 1) > least:
            yield FieldDifference(about, round(first), round(second))
    reasons, reasons_after = (
        _join_distinct(sorted({why for state in run_states for why in state.held_down})) for run_states in states
    )
    if reasons != reasons_after:
        yield FieldDifference("clocks throttled by", reasons, reasons_after)


# --- Steps


@dataclass(frozen=True)
class ValuePair:
    """A value in each of two runs; None if it was not measured."""

    before: float | None
    after: float | None

    @property
    def ratio(self) -> float | None:
        return self.after / self.before if self.before and self.after is not None else None


@dataclass(frozen=True)
class StepDifference:
    """One configuration in both runs. Times in seconds, memory in bytes of one GPU."""

    nodes: int
    gpus_per_node: int
    batch: int
    local_batch: int
    outcomes: tuple[str, str]  # measured, out_of_memory, failed
    step: ValuePair
    compute: ValuePair  # compute time of a step, without synchronisation and data waits
    sync: ValuePair
    data_wait: ValuePair
    memory: ValuePair
    ratio: float | None = None  # step time of B over that of A; None if either is missing
    beyond_noise: bool = False  # whether the step times differ by more than their noise
    causes: tuple[StepPart, ...] = ()  # parts of a step that explain a notable share of the difference, largest first


@dataclass(frozen=True)
class StepComparison:
    """The comparison of all configurations of two runs."""

    rows: tuple[StepDifference, ...]  # configurations tried in both runs
    only: tuple[int, int]  # numbers of configurations tried only in A, and only in B

    @property
    def rows_measured_in_both(self) -> tuple[StepDifference, ...]:
        """Configurations that were measured in both runs."""
        return tuple(row for row in self.rows if row.ratio is not None)

    @property
    def changed_rows(self) -> tuple[StepDifference, ...]:
        """Configurations whose step times differ by more than noise."""
        return tuple(row for row in self.rows_measured_in_both if row.beyond_noise)

    @property
    def ratio(self) -> float | None:
        """The median ratio of the changed configurations; None if there are none."""
        return statistics.median(row.ratio for row in self.changed_rows if row.ratio) if self.changed_rows else None

    @property
    def causes(self) -> tuple[StepPart, ...]:
        """The parts of a step that are a cause in more than half of the changed configurations with a known cause."""
        counted = Counter(part for row in self.changed_rows for part in row.causes)
        with_causes = sum(bool(row.causes) for row in self.changed_rows)
        return tuple(part for part, count in counted.most_common() if 2 * count > with_causes)


def compare_steps(before: Sequence[Result], after: Sequence[Result]) -> StepComparison:
    """Compare the step times of two runs in the configurations that both have measured, and count the others."""
    results_before, results_after = (
        {_get_configuration(result): result for result in results} for results in (before, after)
    )
    common = [configuration for configuration in results_before if configuration in results_after]
    rows = [_compare_results(results_before[configuration], results_after[configuration]) for configuration in common]
    return StepComparison(tuple(rows), (len(results_before) - len(common), len(results_after) - len(common)))


def _get_configuration(result: Result) -> tuple[int, int, int]:
    return result.nodes, result.gpus_per_node, result.local_batch


def _compare_results(before: Result, after: Result) -> StepDifference:
    probes = [result if isinstance(result, Measured) else None for result in (before, after)]
    timed_before, timed_after = (probe if probe is not None and _has_step_time(probe) else None for probe in probes)
    steps = (
        compare_step_times(timed_before.step_times, timed_after.step_times) if timed_before and timed_after else None
    )
    step_parts = [split_step_time(probe) if probe is not None else None for probe in (timed_before, timed_after)]
    is_beyond_noise = steps is not None and steps.is_beyond_noise
    causes = (
        find_changed_parts(step_parts[0], step_parts[1]) if is_beyond_noise and step_parts[0] and step_parts[1] else ()
    )

    def make_pair(name: str) -> ValuePair:
        values = [getattr(parts, name) if parts is not None else None for parts in step_parts]
        return ValuePair(values[0], values[1])

    return StepDifference(
        *_get_configuration(before)[:2],
        batch=before.nodes * before.gpus_per_node * before.local_batch,
        local_batch=before.local_batch,
        outcomes=(before.kind, after.kind),
        step=make_pair("step"),
        compute=make_pair("compute"),
        sync=make_pair("sync"),
        data_wait=make_pair("data"),
        memory=ValuePair(*(probe.memory.peak if probe else None for probe in probes)),
        ratio=steps.ratio if steps else None,
        beyond_noise=is_beyond_noise,
        causes=causes,
    )


def _has_step_time(probe: Measured) -> bool:
    return bool(probe.step_times) and 0 < compute_trimmed_mean(probe.step_times) < math.inf


# --- The difference


@dataclass(frozen=True)
class RunOverview:
    """One of the two compared runs."""

    id: str
    path: Path
    measured: tuple[float, float] | None  # Unix time of the first and last probe; None without probes
    file: JobFile | None  # the job file and --set overrides of the settings; None if unknown


@dataclass(frozen=True)
class RunDifference:
    """The differences between two runs; `headline` summarises them in one or two lines."""

    before: RunOverview  # A
    after: RunOverview  # B
    job: tuple[FieldDifference, ...]  # keys of the resolved jobs, defaults filled in
    environment: tuple[FieldDifference, ...]
    code: tuple[FieldDifference, ...]  # the commit, and files compared by content digest
    steps: StepComparison
    headline: tuple[str, ...] = ()
    warnings: tuple[Diagnostic, ...] = ()
    test: str = NOISE_TEST  # description of the test that separates differences from noise

    @property
    def same(self) -> bool:
        """Whether nothing differs: job, code, environment, and step times beyond noise."""
        return not (self.job or self.environment or self.code or self.steps.changed_rows)

    def frame(self) -> "pd.DataFrame":
        """Return one row per configuration tried in both runs; times in seconds, memory in bytes of one GPU."""
        numbers = ("step", "compute", "sync", "data_wait", "memory")
        return make_frame(
            [
                {
                    "nodes": row.nodes,
                    "gpus_per_node": row.gpus_per_node,
                    "batch": row.batch,
                    "local_batch": row.local_batch,
                    **{f"{name}_a": getattr(row, name).before for name in numbers},
                    **{f"{name}_b": getattr(row, name).after for name in numbers},
                    "ratio": row.ratio,
                    "beyond_noise": row.beyond_noise,
                }
                for row in self.steps.rows
            ]
        )


def choose_run(runs: Sequence[Run]) -> Run:
    """Return the run to compare of those of a job.

    Raises:
        SpecError: there are several, one for each node type, or none yet.
    """
    existing = list_runs_with_data(runs)
    if len(existing) != 1:
        ids = ", ".join(run.id for run in existing)
        raise SpecError(
            f"job {runs[0].job_name} has {f'{len(existing)} runs, one for each node type' if existing else 'no run'}",
            f"name one of them: {ids}" if existing else "run tula profile first",
        )
    return existing[0]


def compare_runs(before: Run, after: Run) -> RunDifference:
    """Compare run A (`before`) with run B (`after`); nothing is written, and the scheduler is not queried.

    Raises:
        SpecError: both are the same run.
        BadMeasurements: the record of a copy of the code is damaged.
    """
    if before.path.resolve() == after.path.resolve():
        raise SpecError(f"A and B are the same run: {before.path.resolve()}", "name two runs, or a run and its copy")
    snapshots = before.read_snapshot(), after.read_snapshot(strict=True)
    measured = [each.measured for each in snapshots]
    difference = RunDifference(
        before=_make_overview(before, measured[0]),
        after=_make_overview(after, measured[1]),
        job=tuple(FieldDifference(key, *values) for key, values in compare_jobs(before.spec, after.spec).items()),
        environment=_compare_environments(*measured),
        code=compare_mappings(_summarize_code(before), _summarize_code(after)),
        steps=compare_steps(*(each.results for each in snapshots)),
        warnings=tuple(warning for each in snapshots for warning in each.record_warnings),
    )
    return replace(difference, headline=_make_headline_lines(difference))


def _make_overview(run: Run, probes: Sequence[Measured]) -> RunOverview:
    moments = [probe.measured_at for probe in probes]
    return RunOverview(run.id, run.path, (min(moments), max(moments)) if moments else None, run.read_job_file())


# --- The headline

_MAX_CAUSES = 6
"""Maximum number of differences in the headline; the tables show all of them."""
_STEP_PART_NAMES: tuple[StepPart, ...] = ("compute", "network", "input")
_LIKELY_CAUSES = ("hardware", "GPU driver", "GPU clocks (MHz)", "clocks throttled by", "torch", "CUDA", "NCCL")
"""Settings that change the time of a step most often; they are shown first."""
_MAX_VALUE_LENGTH = 40  # characters of a value


def _make_headline_lines(difference: RunDifference) -> tuple[str, ...]:
    """Return the summary of the differences, one line per item."""
    pace, causes = _describe_step_time_change(difference.steps), list(_list_causes(difference))
    if not causes and not difference.steps.changed_rows:
        equal = (
            "the same job, code and environment" if difference.steps.rows_measured_in_both else "the same job and code"
        )
        return (f"nothing differs: {equal}; {pace or 'neither run has measurements'}",)
    lines = [pace] if pace else []
    if causes:
        more_text = f", and {len(causes) - _MAX_CAUSES} more" if len(causes) > _MAX_CAUSES else ""
        lines.append(f"what differs: {', '.join(causes[:_MAX_CAUSES])}{more_text}")
    else:
        lines.append(
            "no recorded property differs: the cause may be the load of the machines or of the network,"
            " or random variation between jobs"
        )
    return tuple(lines)


def _describe_step_time_change(steps: StepComparison) -> str:
    if not steps.rows_measured_in_both:
        return "no configuration was measured in both runs" * bool(steps.rows or any(steps.only))
    count = format_count(len(steps.rows_measured_in_both), "configuration")
    if not steps.changed_rows or steps.ratio is None:
        return f"step times are equal within noise ({count})"
    slower = sum((row.ratio or 1) > 1 for row in steps.changed_rows)
    faster = len(steps.changed_rows) - slower
    if slower and faster:
        ratios = sorted(row.ratio or 1 for row in steps.changed_rows)
        return (
            f"B is slower at {slower} and faster at {faster} of {count} ({format_number(ratios[0])} to"
            f" {format_number(ratios[-1])} x the step time of A)"
        )
    how = f"{format_number(steps.ratio)} x as slow" if slower else f"{format_number(1 / steps.ratio)} x as fast"
    other_parts = [part for part in _STEP_PART_NAMES if part not in steps.causes]
    causes = f" ({' and '.join(steps.causes)}{', not ' + ' or '.join(other_parts) if other_parts else ''})"
    return f"B is {how} at {len(steps.changed_rows)} of {count}{causes if steps.causes else ''}"


def _list_causes(difference: RunDifference) -> Iterator[str]:
    """Yield descriptions of the other differences, those most likely to affect step times first."""
    likely, others, hosts = list[str](), list[str](), list[str]()
    for field in difference.environment:
        kind = likely if field.about in _LIKELY_CAUSES else hosts if field.about == "hosts" else others
        kind.append(_describe_change(field))
    yield from likely
    files = [field for field in difference.code if field.about != "commit"]
    if files:
        yield f"code ({format_count(len(files), 'file')})"
    yield from (_describe_change(field) for field in difference.code if field.about == "commit" and not files)
    yield from others
    yield from map(_describe_change, difference.job)
    yield from hosts


def _describe_change(difference: FieldDifference) -> str:
    kind, unit = [*difference.about.removesuffix(")").split(" ("), ""][:2]
    text_before, after = shorten_around_difference(
        format_value(difference.before), format_value(difference.after), _MAX_VALUE_LENGTH
    )
    return f"{kind} {text_before} -> {after}{f' {unit}' * bool(unit)}"
