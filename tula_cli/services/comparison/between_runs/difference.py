"""What is different between two runs: job, code, environment, step times, recommendation, trainings."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tula_cli.errors import SpecError
from tula_cli.models.time.changes.two_probes import TEST
from tula_cli.run.directory import Part, RunDir
from tula_cli.run.frames import frame
from tula_cli.run.jobfile import begun, changes
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.results import JobFile
from tula_cli.run.snapshot import Snapshot
from tula_cli.services.comparison.between_runs.codes import CodeDifference, code_difference, snapshot_of
from tula_cli.services.comparison.between_runs.differing import Differing
from tula_cli.services.comparison.between_runs.environments import environment_differences
from tula_cli.services.comparison.between_runs.headline import headline
from tula_cli.services.comparison.between_runs.steps import Result, StepsCompared, compare_steps
from tula_cli.services.comparison.between_runs.training_pairs import Chosen, TrainingPair, training_pairs
from tula_cli.spec.job import JobSpec

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class RunTold:
    """One of the two runs."""

    id: str
    path: Path
    measured: tuple[float, float] | None  # Unix time of its first and last probe; None where it has none
    file: JobFile | None  # that its settings came from, and --set


@dataclass(frozen=True)
class RunDifference:
    """What two runs do not have alike; `headline` is the answer in a line or two."""

    before: RunTold  # A
    after: RunTold  # B
    job: tuple[Differing, ...]  # keys of the resolved jobs, defaults filled in
    environment: tuple[Differing, ...]
    code: CodeDifference
    steps: StepsCompared
    chosen: tuple[Chosen | None, Chosen | None]
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
        return frame(
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


def difference(before: RunDir, after: RunDir) -> RunDifference:
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
    pairs, only = _parts(before, specs[0], after, specs[1])
    looks = [(name, one.run.read(), other.run.read()) for name, one, other in pairs]
    measured = [(name, _measured(one.results), _measured(other.results)) for name, one, other in looks]
    environment = [found for name, one, other in measured for found in environment_differences(one, other, part=name)]
    trained = [(name, one.run, other.run) for name, one, other in pairs if one.length is None]
    found = RunDifference(
        before=_told(before, specs[0]),
        after=_told(after, specs[1]),
        job=tuple(Differing(key, *values) for key, values in changes(*specs).items()),
        environment=tuple(environment),
        code=_code((one.run, other.run) for _, one, other in pairs),
        steps=compare_steps((name, one.results, other.results) for name, one, other in looks),
        chosen=(Chosen.of(before.recommendation()), Chosen.of(after.recommendation())),
        trainings=tuple(pair for name, one, other in trained for pair in training_pairs(one, other, part=name)),
        only=only,
        warnings=tuple(words for _, *both in looks for look in both for words in _damage(look)),
    )
    return replace(found, headline=headline(found))


def _code(pairs: Iterable[tuple[RunDir, RunDir]]) -> CodeDifference:
    """Return how the code differs: one job's parts all run the same, so the first that were submitted tell it."""
    found = (code_difference(one, other) for one, other in pairs if snapshot_of(one) or snapshot_of(other))
    return next(found, CodeDifference())


def _damage(look: Snapshot) -> list[str]:
    return [*look.record_warnings, *look.training_warnings]


def _measured(results: Iterable[Result]) -> list[Measured]:
    return [result for result in results if isinstance(result, Measured)]


def _told(run: RunDir, spec: JobSpec) -> RunTold:
    moments = [probe.measured_at for part in begun(run, spec) for probe in _measured(part.run.read().results)]
    return RunTold(run.id, run.path, (min(moments), max(moments)) if moments else None, run.job_file())


def _parts(
    before: RunDir, one: JobSpec, after: RunDir, other: JobSpec
) -> tuple[list[tuple[str, Part, Part]], tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the parts that two runs have alike by name, or the only one of each; and the names of the others."""
    left = {part.name or "": part for part in begun(before, one)}
    right = {part.name or "": part for part in begun(after, other)}
    if len(left) == len(right) == 1:
        (name, own), (_, theirs) = *left.items(), *right.items()
        return [(name, own, theirs)], ((), ())
    pairs = [(name, left[name], right[name]) for name in left if name in right]
    alone = tuple(
        tuple(name or "the job's own" for name in mine if name not in others)
        for mine, others in ((left, right), (right, left))
    )
    return pairs, (alone[0], alone[1])
