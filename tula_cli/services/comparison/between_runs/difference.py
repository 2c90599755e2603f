"""What is different between two runs: job, code, environment, step times, recommendation, trainings."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tula_cli.errors import SpecError
from tula_cli.models.time.changes.two_probes import TEST
from tula_cli.run.directory import Part, RunDir
from tula_cli.run.frames import make_frame
from tula_cli.run.jobfile import job_changes, parts_with_data
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.results import JobFile
from tula_cli.run.snapshot import Snapshot
from tula_cli.services.comparison.between_runs.codes import CodeDifference, compare_code, snapshot_of
from tula_cli.services.comparison.between_runs.differing import FieldDifference
from tula_cli.services.comparison.between_runs.environments import environment_differences
from tula_cli.services.comparison.between_runs.headline import write_headline
from tula_cli.services.comparison.between_runs.steps import Result, StepComparison, compare_steps
from tula_cli.services.comparison.between_runs.training_pairs import (
    RecommendedConfiguration,
    TrainingPair,
    pair_trainings,
)
from tula_cli.spec.job import JobSpec

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class RunOverview:
    """One of the two runs."""

    id: str
    path: Path
    measured: tuple[float, float] | None  # Unix time of its first and last probe; None where it has none
    file: JobFile | None  # that its settings came from, and --set


@dataclass(frozen=True)
class RunDifference:
    """What two runs do not have alike; `headline` is the answer in a line or two."""

    before: RunOverview  # A
    after: RunOverview  # B
    job: tuple[FieldDifference, ...]  # keys of the resolved jobs, defaults filled in
    environment: tuple[FieldDifference, ...]
    code: CodeDifference
    steps: StepComparison
    chosen: tuple[RecommendedConfiguration | None, RecommendedConfiguration | None]
    trainings: tuple[TrainingPair, ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]  # parts that A alone has, and B alone: types of node, lengths of text
    headline: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    test: str = TEST  # how noise is told from a difference

    @property
    def same(self) -> bool:
        """Whether nothing differs: job, code, environment, and step times beyond noise."""
        return not (self.job or self.environment or not self.code.same or self.steps.changed or any(self.only))

    def frame(self) -> "pd.DataFrame":
        """Return one row a configuration that both runs have tried; times in seconds, memory in bytes of one GPU."""
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


def compare_runs(before: RunDir, after: RunDir) -> RunDifference:
    """Compare two runs; nothing is written, and no scheduler is asked.

    Args:
        before: A, which B is held against.
        after: B.

    Raises:
        SpecError: both are one run, or one's job cannot be read.
        BadMeasurements: a record is damaged.
    """
    if before.path.resolve() == after.path.resolve():
        raise SpecError(f"A and B are one run: {before.path.resolve()}", "name two runs, or a run and its copy")
    specs = before.spec(), after.spec()
    pairs, only = _pair_parts(before, specs[0], after, specs[1])
    snapshots_by_part = [
        (name, part_before.run.read(), part_after.run.read()) for name, part_before, part_after in pairs
    ]
    measured = [
        (name, _measured_probes(part_before.results), _measured_probes(part_after.results))
        for name, part_before, part_after in snapshots_by_part
    ]
    environment = [
        difference
        for name, part_before, part_after in measured
        for difference in environment_differences(part_before, part_after, part=name)
    ]
    trained = [
        (name, part_before.run, part_after.run) for name, part_before, part_after in pairs if part_before.length is None
    ]
    difference = RunDifference(
        before=_run_overview(before, specs[0]),
        after=_run_overview(after, specs[1]),
        job=tuple(FieldDifference(key, *values) for key, values in job_changes(*specs).items()),
        environment=tuple(environment),
        code=_compare_code_of_parts((part_before.run, part_after.run) for _, part_before, part_after in pairs),
        steps=compare_steps(
            (name, part_before.results, part_after.results) for name, part_before, part_after in snapshots_by_part
        ),
        chosen=(
            RecommendedConfiguration.from_recommendation(before.recommendation()),
            RecommendedConfiguration.from_recommendation(after.recommendation()),
        ),
        trainings=tuple(
            pair
            for name, part_before, part_after in trained
            for pair in pair_trainings(part_before, part_after, part=name)
        ),
        only=only,
        warnings=tuple(
            warning
            for _, *snapshots in snapshots_by_part
            for snapshot in snapshots
            for warning in _damage_warnings(snapshot)
        ),
    )
    return replace(difference, headline=write_headline(difference))


def _compare_code_of_parts(pairs: Iterable[tuple[RunDir, RunDir]]) -> CodeDifference:
    """Return how the code differs: one job's parts all run the same, so the first that were submitted tell it."""
    differences = (
        compare_code(part_before, part_after)
        for part_before, part_after in pairs
        if snapshot_of(part_before) or snapshot_of(part_after)
    )
    return next(differences, CodeDifference())


def _damage_warnings(snapshot: Snapshot) -> list[str]:
    return [*snapshot.record_warnings, *snapshot.training_warnings]


def _measured_probes(results: Iterable[Result]) -> list[Measured]:
    return [result for result in results if isinstance(result, Measured)]


def _run_overview(run: RunDir, spec: JobSpec) -> RunOverview:
    moments = [
        probe.measured_at for part in parts_with_data(run, spec) for probe in _measured_probes(part.run.read().results)
    ]
    return RunOverview(run.id, run.path, (min(moments), max(moments)) if moments else None, run.job_file())


def _pair_parts(
    before: RunDir, job_before: JobSpec, after: RunDir, job_after: JobSpec
) -> tuple[list[tuple[str, Part, Part]], tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the parts that two runs have alike by name, or the only one of each; and the names of the others."""
    parts_before = {part.name or "": part for part in parts_with_data(before, job_before)}
    right = {part.name or "": part for part in parts_with_data(after, job_after)}
    if len(parts_before) == len(right) == 1:
        (name, part_before), (_, part_after) = *parts_before.items(), *right.items()
        return [(name, part_before, part_after)], ((), ())
    pairs = [(name, parts_before[name], right[name]) for name in parts_before if name in right]
    alone = tuple(
        tuple(name or "the job's own" for name in own_parts if name not in other_parts)
        for own_parts, other_parts in ((parts_before, right), (right, parts_before))
    )
    return pairs, (alone[0], alone[1])
