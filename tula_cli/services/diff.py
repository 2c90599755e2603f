"""`tula diff`: list the differences between two runs, and name their likely cause.

Compared are the job, the code, the environment, the steps and the trainings.
"""

import difflib
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import SpecError
from tula_cli.models.time.changes import MIN_DIFFERENCE, TEST, StepRatio, compare_step_times, find_changed_parts
from tula_cli.models.time.noise import compute_trimmed_mean
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.frames import make_frame
from tula_cli.run.job_runs import compare_jobs, find_recommendation, list_runs_with_data
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.recommendations import Recommendation
from tula_cli.run.records.results import JobFile, StepPart, StepParts
from tula_cli.run.records.tasks import CodeSnapshot
from tula_cli.run.snapshot import Snapshot
from tula_cli.run.training_run import TrainingRun
from tula_cli.words import format_bytes, format_count, format_duration, format_number, shorten_pair

if TYPE_CHECKING:
    import pandas as pd


# --- A value of two runs


@dataclass(frozen=True)
class FieldDifference:
    """A field that differs between two runs; None if a run does not have it or does not record it."""

    about: str
    before: Any
    after: Any
    part: str = ""  # of the run: a type of node, another length of text; empty where there is one


def compare_mappings(
    before: Mapping[str, Any], after: Mapping[str, Any], *, part: str = ""
) -> tuple[FieldDifference, ...]:
    """Return the keys whose values differ between two mappings, in the order of the keys."""
    keys = dict.fromkeys([*before, *after])
    pairs = ((key, before.get(key), after.get(key)) for key in keys)
    return tuple(
        FieldDifference(key, value_before, value_after, part)
        for key, value_before, value_after in pairs
        if value_before != value_after
    )


def join_distinct(values: Iterable[object]) -> str | None:
    """Return the distinct values as a comma-separated text in their order; None if there are none."""
    distinct = dict.fromkeys(str(value) for value in values if value not in (None, "", ()))
    return ", ".join(distinct) or None


# --- Code

_MAX_BYTES = 200_000
"""Maximum size in bytes of a file whose changed lines are counted.

With 400 kB and every third line changed, the count took 5 s; it grows faster than the file.
"""


@dataclass(frozen=True)
class ChangedFile:
    """A code file that differs; added and removed lines as git counts them, None if they were not counted."""

    name: str
    state: str  # "changed", "only in A", "only in B"
    added: int | None = None
    removed: int | None = None


@dataclass(frozen=True)
class CodeDifference:
    """The difference between the code of two runs; empty if there is none, or if neither run has code."""

    files: tuple[ChangedFile, ...] = ()
    commits: tuple[str, str] = ("", "")  # of git, and whether files differ from it; empty where there is no repository
    digests: tuple[str, str] = ("", "")

    @property
    def same(self) -> bool:
        return not self.files and self.digests[0] == self.digests[1] and self.commits[0] == self.commits[1]


def compare_code(before: RunDir, after: RunDir) -> CodeDifference:
    """Compare the code snapshots that the newest jobs of two runs were submitted with.

    Args:
        before: a run, or one of its parts.
        after: the other run or part.
    """
    snapshot_before, snapshot_after = find_snapshot(before), find_snapshot(after)
    digests = snapshot_before.digest if snapshot_before else "", snapshot_after.digest if snapshot_after else ""
    files = (
        tuple(_list_changed_files(before, snapshot_before, after, snapshot_after))
        if snapshot_before or snapshot_after
        else ()
    )
    return CodeDifference(files, (_describe_commit(snapshot_before), _describe_commit(snapshot_after)), digests)


def find_snapshot(run: RunDir) -> CodeSnapshot | None:
    """Return the newest code snapshot of a run's tasks, or None if there is none."""
    tasks = run.read()
    names = [task.code for task in (*tasks.probe_tasks, *tasks.tasks) if task.code]
    snapshots = [snapshot for name in dict.fromkeys(names) if (snapshot := run.code(name)) is not None]
    return max(snapshots, key=lambda snapshot: snapshot.taken_at, default=None)


def _describe_commit(snapshot: CodeSnapshot | None) -> str:
    if snapshot is None or not snapshot.commit:
        return ""
    return snapshot.commit[:12] + " and changes" * snapshot.dirty


def _list_changed_files(
    before: RunDir, snapshot_before: CodeSnapshot | None, after: RunDir, snapshot_after: CodeSnapshot | None
) -> Iterator[ChangedFile]:
    names = sorted(
        {*(snapshot_before.files if snapshot_before else ()), *(snapshot_after.files if snapshot_after else ())}
    )
    for name in names:
        old = (
            _read_file(before.code_dir(snapshot_before.name) / name)
            if snapshot_before and name in snapshot_before.files
            else None
        )
        new = (
            _read_file(after.code_dir(snapshot_after.name) / name)
            if snapshot_after and name in snapshot_after.files
            else None
        )
        if old == new:
            continue
        state = "only in B" if old is None else "only in A" if new is None else "changed"
        counted = _count_changed_lines(old, new)
        yield ChangedFile(name, state, *counted)


def _read_file(path: Path) -> bytes | None:
    """Return the content of a copied file; None if it is missing or a symbolic link."""
    try:
        return None if path.is_symlink() else path.read_bytes()
    except OSError:
        return None


def _count_changed_lines(old: bytes | None, new: bytes | None) -> tuple[int | None, int | None]:
    """Return the numbers of added and removed lines; None for files that are binary or too long."""
    texts = [content or b"" for content in (old, new)]
    if any(b"\0" in text or len(text) > _MAX_BYTES for text in texts):
        return None, None
    lines_before, after = (text.decode(errors="replace").splitlines() for text in texts)
    diff_lines = list(difflib.unified_diff(lines_before, after, n=0, lineterm=""))[2:]
    return sum(line.startswith("+") for line in diff_lines), sum(line.startswith("-") for line in diff_lines)


# --- Environments

_MIN_CLOCK_DIFFERENCE = 0.03
_MIN_WATT_DIFFERENCE = 0.1
"""Relative differences below which a GPU's clock and power count as equal: they are never exactly the same."""


def list_environment_differences(
    before: Sequence[Measured], after: Sequence[Measured], *, part: str = ""
) -> tuple[FieldDifference, ...]:
    """Return the differences between the environments of two sets of probes; empty if either set is empty.

    Args:
        before: probes of one run, on one node type.
        after: probes of the other run.
        part: the node type.
    """
    if not before or not after:
        return ()
    differences = compare_mappings(_describe_software(before), _describe_software(after), part=part)
    return (*differences, *_compare_gpu_states(before, after, part), *_compare_variables(before, after, part))


def _describe_software(probes: Sequence[Measured]) -> dict[str, str | None]:
    """Return the software and hardware that the probes recorded; each value is a text with the distinct values."""
    environments = [probe.environment for probe in probes]
    scripts = [probe.script for probe in probes if probe.script is not None]
    reserved = [probe.capacity for probe in probes if probe.capacity is not None]
    return {
        "hardware": join_distinct(environment.hardware for environment in environments),
        "device": join_distinct(environment.device for environment in environments),
        "GPU driver": join_distinct(environment.driver for environment in environments),
        "torch": join_distinct(environment.torch for environment in environments),
        "torchvision": join_distinct(environment.torchvision for environment in environments),
        "CUDA": join_distinct(environment.cuda for environment in environments),
        "NCCL": join_distinct(environment.nccl for environment in environments),
        "backend": join_distinct(environment.backend for environment in environments),
        "all-reduce": join_distinct(how for environment in environments for how in environment.allreduce.values()),
        "Python": join_distinct(environment.python for environment in environments),
        "tula": join_distinct(environment.tula for environment in environments),
        "system": join_distinct(environment.system for environment in environments),
        "data-loader processes": join_distinct(environment.workers for environment in environments),
        "memory for a rank": join_distinct(map(format_bytes, reserved)),
        "samples of the dataset": join_distinct(probe.dataset_size for probe in probes),
        "optimizer of the script": join_distinct(environment.optimizer for environment in scripts),
        "parameters of the script": join_distinct(environment.parameters for environment in scripts),
        "hosts": join_distinct(sorted({host for environment in environments for host in environment.hosts})),
    }


def _compare_gpu_states(
    before: Sequence[Measured], after: Sequence[Measured], part: str
) -> tuple[FieldDifference, ...]:
    """Return the differences in clocks, power and throttle reasons, by NVML at the end of the probes' timed steps."""
    states_before, states_after = ([probe.gpus[1] for probe in probes if probe.gpus] for probes in (before, after))
    if not states_before or not states_after:
        return ()
    differences = []
    clocks = [statistics.median(state.sm_mhz for state in states) for states in (states_before, states_after)]
    if clocks[0] and abs(clocks[1] / clocks[0] - 1) > _MIN_CLOCK_DIFFERENCE:
        differences.append(FieldDifference("GPU clocks (MHz)", round(clocks[0]), round(clocks[1]), part))
    watts = [statistics.median(state.watts for state in states) for states in (states_before, states_after)]
    if watts[0] and abs(watts[1] / watts[0] - 1) > _MIN_WATT_DIFFERENCE:
        differences.append(FieldDifference("GPU power (W)", round(watts[0]), round(watts[1]), part))
    limits = [
        join_distinct(sorted({why for state in states for why in state.held_down}))
        for states in (states_before, states_after)
    ]
    if limits[0] != limits[1]:
        differences.append(FieldDifference("clocks throttled by", limits[0], limits[1], part))
    return tuple(differences)


def _compare_variables(before: Sequence[Measured], after: Sequence[Measured], part: str) -> tuple[FieldDifference, ...]:
    variables_before, variables_after = (_merge_variables(probes) for probes in (before, after))
    return tuple(
        FieldDifference(f"variable {difference.about}", difference.before, difference.after, part)
        for difference in compare_mappings(variables_before, variables_after, part=part)
    )


def _merge_variables(probes: Sequence[Measured]) -> Mapping[str, Any]:
    names = dict.fromkeys(name for probe in probes for name in probe.environment.variables)
    return {name: join_distinct(probe.environment.variables.get(name) for probe in probes) for name in names}


# --- Steps

Result = Measured | OutOfMemory | Failed


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

    part: str  # type of node, or length of text; empty where the job names none
    nodes: int
    gpus_per_node: int
    batch: int
    local_batch: int
    outcomes: tuple[str, str]  # measured, out_of_memory, failed
    step: ValuePair
    compute: ValuePair  # without synchronisation and without waiting for data
    sync: ValuePair
    data_wait: ValuePair
    memory: ValuePair
    ratio: float | None = None  # of the step times, B over A; None where either has none
    beyond_noise: bool = False  # more than the noise of the steps explains
    causes: tuple[StepPart, ...] = ()  # the parts that make a notable share of it, the most first


@dataclass(frozen=True)
class StepComparison:
    """The comparison of all configurations of two runs."""

    rows: tuple[StepDifference, ...]  # those that both have tried
    only: tuple[int, int]  # how many A alone has, and B alone

    @property
    def timed(self) -> tuple[StepDifference, ...]:
        """Configurations that were measured in both runs."""
        return tuple(row for row in self.rows if row.ratio is not None)

    @property
    def changed(self) -> tuple[StepDifference, ...]:
        """Configurations whose step times differ by more than noise."""
        return tuple(row for row in self.timed if row.beyond_noise)

    @property
    def ratio(self) -> float | None:
        """The median ratio of the changed configurations; None if there are none."""
        return statistics.median(row.ratio for row in self.changed if row.ratio) if self.changed else None

    @property
    def causes(self) -> tuple[StepPart, ...]:
        """The parts of a step that are a cause in more than half of the changed configurations with a known cause."""
        counted = Counter(part for row in self.changed for part in row.causes)
        with_causes = sum(bool(row.causes) for row in self.changed)
        return tuple(part for part, count in counted.most_common() if 2 * count > with_causes)


def compare_steps(pairs: Iterable[tuple[str, Sequence[Result], Sequence[Result]]]) -> StepComparison:
    """Compare the results of two runs.

    Args:
        pairs: for each part of the runs, its name and the results of both runs.
    """
    rows: list[StepDifference] = []
    alone = [0, 0]
    for part, before, after in pairs:
        results_before, results_after = (
            {_get_configuration(result): result for result in results} for results in (before, after)
        )
        common = [configuration for configuration in results_before if configuration in results_after]
        rows += [
            _compare_results(part, results_before[configuration], results_after[configuration])
            for configuration in common
        ]
        alone[0] += len(results_before) - len(common)
        alone[1] += len(results_after) - len(common)
    return StepComparison(tuple(rows), (alone[0], alone[1]))


def _get_configuration(result: Result) -> tuple[int, int, int]:
    return result.nodes, result.gpus_per_node, result.local_batch


def _compare_results(part: str, before: Result, after: Result) -> StepDifference:
    probe_before, probe_after = (result if isinstance(result, Measured) else None for result in (before, after))
    steps = _compare_steps(probe_before, probe_after)
    step_parts = [_list_step_parts(probe) for probe in (probe_before, probe_after)]
    beyond = steps is not None and steps.is_beyond_noise
    causes = find_changed_parts(step_parts[0], step_parts[1]) if beyond and step_parts[0] and step_parts[1] else ()

    def both(name: str) -> ValuePair:
        values = [getattr(parts, name) if parts is not None else None for parts in step_parts]
        return ValuePair(values[0], values[1])

    return StepDifference(
        part,
        *_get_configuration(before)[:2],
        batch=before.nodes * before.gpus_per_node * before.local_batch,
        local_batch=before.local_batch,
        outcomes=(before.kind, after.kind),
        step=both("step"),
        compute=both("compute"),
        sync=both("sync"),
        data_wait=both("data"),
        memory=ValuePair(*(probe.memory.peak if probe else None for probe in (probe_before, probe_after))),
        ratio=steps.ratio if steps else None,
        beyond_noise=beyond,
        causes=causes,
    )


def _compare_steps(probe_before: Measured | None, probe_after: Measured | None) -> StepRatio | None:
    """Return the comparison of the step times of two probes; None if either has no valid step time."""
    if probe_before is None or probe_after is None or not (_is_timed(probe_before) and _is_timed(probe_after)):
        return None
    return compare_step_times(probe_before.step_times, probe_after.step_times)


def _is_timed(probe: Measured) -> bool:
    return bool(probe.step_times) and 0 < compute_trimmed_mean(probe.step_times) < math.inf


def _list_step_parts(probe: Measured | None) -> StepParts | None:
    """Return the breakdown of a probe's step time; None if it was not measured."""
    if probe is None or not _is_timed(probe):
        return None
    wait, work = probe.data_wait, probe.compute_time
    return StepParts(
        step=compute_trimmed_mean(probe.step_times),
        data=wait,
        compute=None if work is None else max(0.0, work - (wait or 0.0)),
        sync=probe.sync_time,
    )


# --- Trainings


@dataclass(frozen=True)
class TrainingOverview:
    """The outcome of a training; None for values that it has not reported."""

    signature: str
    ended: bool
    nodes: int | None
    batch: int | None  # global, at the end
    attempts: int
    hours: float | None
    cost: float | None
    currency: str
    step_time: float | None  # seconds
    best: float | None
    best_of: str  # the metric; empty where there is none
    best_epoch: int | None
    causes: tuple[str, ...]  # of relaunches, and why it ended before its last epoch
    hosts: tuple[str, ...]  # of its attempts, as the scheduler writes them
    tula: tuple[str, ...]  # versions that ran them


@dataclass(frozen=True)
class TrainingPair:
    """Two trainings to compare: those with the same signature, else the newest training of each run."""

    part: str  # type of node; empty where the job names none
    before: TrainingOverview | None
    after: TrainingOverview | None
    same_signature: bool


def match_trainings(before: RunDir, after: RunDir, *, part: str = "") -> tuple[TrainingPair, ...]:
    """Return pairs of trainings of two runs; empty if neither run has any.

    Args:
        before: a run, or its part for one node type.
        after: the other run or part.
        part: the node type.
    """
    signatures_before, signatures_after = before.train_signatures(), after.train_signatures()
    common = [name for name in signatures_before if name in signatures_after]
    if common:
        return tuple(
            TrainingPair(part, _make_training_overview(before, name), _make_training_overview(after, name), True)
            for name in common
        )
    if not signatures_before and not signatures_after:
        return ()
    newest = [
        _make_training_overview(run, names[0]) if names else None
        for run, names in ((before, signatures_before), (after, signatures_after))
    ]
    return (TrainingPair(part, newest[0], newest[1], False),)


def _make_training_overview(run: RunDir, signature: str) -> TrainingOverview:
    training = run.training(signature)
    summary, task, attempts = training.summary(), training.newest_task(), training.attempts()
    best, metric, epoch = _find_best_metric(training)
    causes = (*summary.causes, *filter(None, [summary.ended])) if summary else ()
    return TrainingOverview(
        signature,
        ended=summary is not None,
        nodes=summary.nodes if summary else task.training_nodes if task else None,
        batch=summary.batch if summary else task.batch if task else None,
        attempts=len(attempts),
        hours=summary.actual_hours if summary else None,
        cost=summary.actual_cost if summary else None,
        currency=summary.currency if summary else "",
        step_time=summary.actual_step if summary else None,
        best=best,
        best_of=metric,
        best_epoch=epoch,
        causes=causes,
        hosts=tuple(
            dict.fromkeys(attempt.hosts or attempt.host for attempt in attempts if attempt.hosts or attempt.host)
        ),
        tula=tuple(dict.fromkeys(attempt.tula for attempt in attempts if attempt.tula)),
    )


def _find_best_metric(training: TrainingRun) -> tuple[float | None, str, int | None]:
    summary = training.summary()
    if summary is None:
        return None, "", None
    if summary.best is not None:
        return summary.best.value, summary.best.metric, summary.best_epoch
    if summary.best_top1 is not None:
        return summary.best_top1, "top-1 (%)", summary.best_epoch
    return summary.best_loss, "loss" if summary.best_loss is not None else "", summary.best_epoch


@dataclass(frozen=True)
class RecommendedConfiguration:
    """The configuration that a run recommends."""

    objective: str
    nodes: int
    batch: int
    local_batch: int
    type: str
    market: str
    hours: float
    cost: float
    currency: str

    @classmethod
    def from_recommendation(cls, recommendation: Recommendation | None) -> "RecommendedConfiguration | None":
        """Return the choice of a recommendation; None if there is no recommendation."""
        if recommendation is None:
            return None
        row = recommendation.choice
        return cls(
            recommendation.objective, row.nodes, row.batch, row.local_batch, row.type, row.market, row.hours, row.cost, recommendation.currency
        )  # fmt: skip


# --- The difference


@dataclass(frozen=True)
class RunOverview:
    """One of the two compared runs."""

    id: str
    path: Path
    measured: tuple[float, float] | None  # Unix time of its first and last probe; None where it has none
    file: JobFile | None  # that its settings came from, and --set


@dataclass(frozen=True)
class RunDifference:
    """The differences between two runs; `headline` summarises them in one or two lines."""

    before: RunOverview  # A
    after: RunOverview  # B
    job: tuple[FieldDifference, ...]  # keys of the resolved jobs, defaults filled in
    environment: tuple[FieldDifference, ...]
    code: CodeDifference
    steps: StepComparison
    chosen: tuple[RecommendedConfiguration | None, RecommendedConfiguration | None]
    trainings: tuple[TrainingPair, ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]  # node types that A alone has, and B alone
    headline: tuple[str, ...] = ()
    warnings: tuple[Diagnostic, ...] = ()
    test: str = TEST  # how noise is told from a difference

    @property
    def same(self) -> bool:
        """Whether nothing differs: job, code, environment, and step times beyond noise."""
        return not (self.job or self.environment or not self.code.same or self.steps.changed or any(self.only))

    def frame(self) -> "pd.DataFrame":
        """Return one row per configuration tried in both runs; times in seconds, memory in bytes of one GPU."""
        numbers = ("step", "compute", "sync", "data_wait", "memory")
        return make_frame(
            [
                {
                    "node_type": row.part,
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


def compare_runs(before: Sequence[Run], after: Sequence[Run]) -> RunDifference:
    """Compare two runs, or the runs of two jobs; nothing is written, and the scheduler is not queried.

    Args:
        before: A, the baseline of the comparison.
        after: B.

    Raises:
        SpecError: both are the same run.
        BadMeasurements: a record is damaged.
    """
    if before[0].path.resolve() == after[0].path.resolve():
        raise SpecError(f"A and B are the same run: {before[0].path.resolve()}", "name two runs, or a run and its copy")
    pairs, only = _match_parts(before, after)
    snapshots_by_part = [(name, part_before.read(), part_after.read()) for name, part_before, part_after in pairs]
    measured = [
        (name, _select_measured_probes(part_before.results), _select_measured_probes(part_after.results))
        for name, part_before, part_after in snapshots_by_part
    ]
    environment = [
        difference
        for name, part_before, part_after in measured
        for difference in list_environment_differences(part_before, part_after, part=name)
    ]
    difference = RunDifference(
        before=_run_overview(before),
        after=_run_overview(after),
        job=tuple(FieldDifference(key, *values) for key, values in compare_jobs(before[0].spec, after[0].spec).items()),
        environment=tuple(environment),
        code=_compare_code_of_parts((part_before, part_after) for _, part_before, part_after in pairs),
        steps=compare_steps(
            (name, part_before.results, part_after.results) for name, part_before, part_after in snapshots_by_part
        ),
        chosen=(
            RecommendedConfiguration.from_recommendation(find_recommendation(before)),
            RecommendedConfiguration.from_recommendation(find_recommendation(after)),
        ),
        trainings=tuple(
            pair
            for name, part_before, part_after in pairs
            for pair in match_trainings(part_before, part_after, part=name)
        ),
        only=only,
        warnings=tuple(
            warning
            for _, *snapshots in snapshots_by_part
            for snapshot in snapshots
            for warning in _list_damage_warnings(snapshot)
        ),
    )
    return replace(difference, headline=write_headline(difference))


def _compare_code_of_parts(pairs: Iterable[tuple[RunDir, RunDir]]) -> CodeDifference:
    """Return the code difference of the first parts that have a snapshot: all parts of a job run the same code."""
    differences = (
        compare_code(part_before, part_after)
        for part_before, part_after in pairs
        if find_snapshot(part_before) or find_snapshot(part_after)
    )
    return next(differences, CodeDifference())


def _list_damage_warnings(snapshot: Snapshot) -> list[Diagnostic]:
    return [*snapshot.record_warnings, *snapshot.training_warnings]


def _select_measured_probes(results: Iterable[Result]) -> list[Measured]:
    return [result for result in results if isinstance(result, Measured)]


def _run_overview(runs: Sequence[Run]) -> RunOverview:
    moments = [probe.measured_at for run in runs for probe in _select_measured_probes(run.read().results)]
    first = runs[0]
    return RunOverview(first.id, first.path, (min(moments), max(moments)) if moments else None, first.job_file())


def _match_parts(
    before: Sequence[Run], after: Sequence[Run]
) -> tuple[list[tuple[str, Run, Run]], tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return pairs of parts with the same name, or the only part of each run; and the names of the unmatched parts."""
    parts_before = {run.name or "": run for run in list_runs_with_data(before)}
    right = {run.name or "": run for run in list_runs_with_data(after)}
    if len(parts_before) == len(right) == 1:
        (name, part_before), (_, part_after) = *parts_before.items(), *right.items()
        return [(name, part_before, part_after)], ((), ())
    pairs = [(name, parts_before[name], right[name]) for name in parts_before if name in right]
    alone = tuple(
        tuple(name or "the job's own" for name in own_runs if name not in other_runs)
        for own_runs, other_runs in ((parts_before, right), (right, parts_before))
    )
    return pairs, (alone[0], alone[1])


# --- The headline

_MAX_CAUSES = 6
"""Maximum number of differences in the headline; the tables show all of them."""
_PARTS: tuple[StepPart, ...] = ("compute", "network", "input")
_LIKELY_CAUSES = ("hardware", "GPU driver", "GPU clocks (MHz)", "clocks throttled by", "torch", "CUDA", "NCCL")
"""Settings that change the time of a step most often; they are shown first."""
_MAX_VALUE_LENGTH = 40  # characters of a value


def write_headline(difference: "RunDifference") -> tuple[str, ...]:
    """Return the summary of the differences, one line per item."""
    pace, causes, trained = (
        _describe_pace(difference),
        list(_list_differences(difference)),
        tuple(_describe_trainings(difference)),
    )
    if not causes and not difference.steps.changed:
        alike = "the same job, code and environment" if difference.steps.timed else "the same job and code"
        return (f"nothing differs: {alike}; {pace or 'neither run has measurements'}", *trained)
    lines = [*filter(None, [pace]), *trained]
    if causes:
        more_text = f", and {len(causes) - _MAX_CAUSES} more" if len(causes) > _MAX_CAUSES else ""
        lines.append(f"what differs: {', '.join(causes[:_MAX_CAUSES])}{more_text}")
    else:
        lines.append(
            "no recorded property differs: the cause may be the load of the machines or of the network,"
            " or random variation between jobs"
        )
    return tuple(lines)


def _describe_pace(difference: "RunDifference") -> str:
    steps = difference.steps
    if not steps.timed:
        return "no configuration was measured in both" * bool(steps.rows or any(steps.only))
    of = f"{len(steps.timed)} {'configuration' if len(steps.timed) == 1 else 'configurations'}"
    if not steps.changed or steps.ratio is None:
        return f"step times are equal within noise at all of {of}"
    slower = sum((row.ratio or 1) > 1 for row in steps.changed)
    faster = len(steps.changed) - slower
    if slower and faster:
        ratios = sorted(row.ratio or 1 for row in steps.changed)
        return (
            f"B is slower at {slower} and faster at {faster} of {of} ({format_number(ratios[0])} to {format_number(ratios[-1])} x the step"
            f" time of A)"
        )
    how = f"{format_number(steps.ratio)} x as slow" if slower else f"{format_number(1 / steps.ratio)} x as fast"
    return f"B is {how} at {len(steps.changed)} of {of}{_describe_causes(steps.causes)}"


def _describe_trainings(difference: "RunDifference") -> Iterator[str]:
    """Yield a sentence for each pair of trainings whose durations differ by more than `MIN_DIFFERENCE`.

    A training has one duration only, so noise cannot be estimated and small changes are left out.
    """
    for pair in difference.trainings:
        if pair.before is None or pair.after is None or not pair.before.hours or not pair.after.hours:
            continue
        ratio = pair.after.hours / pair.before.hours
        if abs(math.log(ratio)) <= math.log1p(MIN_DIFFERENCE):
            continue
        training_name = f"training {pair.before.signature}" if pair.same_signature else "the newest training"
        where = f" ({pair.part})" * bool(pair.part)
        times = f"{format_duration(3600 * pair.before.hours)} -> {format_duration(3600 * pair.after.hours)}"
        yield f"{training_name}{where} took {format_number(ratio)} x as long ({times})"


def _describe_causes(causes: tuple[StepPart, ...]) -> str:
    if not causes:
        return ""
    other_parts = [part for part in _PARTS if part not in causes]
    return f" ({' and '.join(causes)}{', not ' + ' or '.join(other_parts) if other_parts else ''})"


def _list_differences(difference: "RunDifference") -> Iterator[str]:
    """Yield descriptions of the other differences, those most likely to affect step times first."""
    environment = sorted(
        difference.environment, key=lambda entry: (entry.about not in _LIKELY_CAUSES, entry.about == "hosts")
    )
    likely = [entry for entry in environment if entry.about in _LIKELY_CAUSES]
    yield from map(_describe_change, likely)
    if not difference.code.same:
        yield _describe_code(difference)
    yield from map(_describe_change, [entry for entry in environment if entry not in likely and entry.about != "hosts"])
    yield from map(_describe_change, difference.job)
    yield from map(_describe_change, [entry for entry in environment if entry.about == "hosts"])
    yield from (
        f"only {where} has {name}" for where, names in zip("AB", difference.only, strict=True) for name in names
    )


def _describe_code(difference: "RunDifference") -> str:
    if difference.code.files:
        return f"code ({format_count(len(difference.code.files), 'file')})"
    if difference.code.commits[0] != difference.code.commits[1]:
        return f"commit {difference.code.commits[0] or 'none'} -> {difference.code.commits[1] or 'none'}"
    return "code"


def _describe_change(difference: FieldDifference) -> str:
    kind, unit = [*difference.about.removesuffix(")").split(" ("), ""][:2]
    where = f" ({difference.part})" * bool(difference.part)
    text_before, after = shorten_pair(_as_text(difference.before), _as_text(difference.after), _MAX_VALUE_LENGTH)
    return f"{kind}{where} {text_before} -> {after}{f' {unit}' * bool(unit)}"


def _as_text(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
