"""Probes of the same job with other numbers of GPUs a node: with them, what is inside a node and what is between nodes is known apart.

"4 nodes of 8 GPUs" follow from "1 node of 8" and "2 nodes of 1". They are parts of one run (`search.gpus_per_node`), or runs
of their own (`tula recommend --with-run`).
"""

from collections.abc import Sequence
from pathlib import Path

from tula_cli.errors import BadMeasurements, SpecError
from tula_cli.models.observations import OtherSizes
from tula_cli.models.time.stretches import TrainingObservations
from tula_cli.run.directory import Part, RunDir
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.recommendations import Recommendation
from tula_cli.run.records.tasks import ProbeTask
from tula_cli.services.recommendation.by_trainings import observations_from_trainings
from tula_cli.spec.job import JobSpec
from tula_cli.spec.signature import signature
from tula_cli.words import plural


class CachedTrainings:
    """What the trainings of parts tell, each part read once."""

    def __init__(self) -> None:
        self._known: dict[Path, TrainingObservations] = {}

    def __call__(self, part: Part) -> TrainingObservations:
        if part.run.path not in self._known:
            self._known[part.run.path] = observations_from_trainings(part.run, part.spec, part.run.results())
        return self._known[part.run.path]


def measurements_of_other_sizes(part: Part, tell: CachedTrainings) -> OtherSizes:
    """Return what was measured on the nodes of a part with other numbers of their GPUs."""
    probes = [
        result for other_part in part.sizes for result in other_part.run.results() if isinstance(result, Measured)
    ]
    return OtherSizes(tuple(probes), tuple(steps for other_part in part.sizes for steps in tell(other_part).found))


def of_runs(run: RunDir, spec: JobSpec, paths: Sequence[Path]) -> tuple[OtherSizes, list[str]]:
    """Return what was measured in other runs, and what is to be said of them.

    Args:
        run: the run that is asked.
        spec: its job.
        paths: of the others, or their names beside it.

    Raises:
        SpecError: one is no run, or not of the same job with another number of GPUs a node.
        BadMeasurements: nothing was measured there.
    """
    if paths and spec.types:
        raise SpecError(
            "--with-run: this job names node types (or search.gpus_per_node), each of which is fitted by itself",
            "leave --with-run out",
        )
    found, told = OtherSizes(), []
    for path in paths:
        own = _measured(run, spec, RunDir.open(place_of(run, path)))
        gpus = plural(own.probes[0].gpus_per_node, "GPU")
        counts = plural(len(own.probes), "probe") + f" and {plural(len(own.trained), 'training')}" * bool(own.trained)
        told.append(f"the fit takes the probes of run {path.name} as well ({counts}, {gpus} a node)")
        found += own
    return found, told


def recommended_by(part: Part, recommendation: Recommendation | None) -> tuple[OtherSizes, list[str]]:
    """Return what a part's recommendation rests on beside its own probes, and why some of it is not there any more.

    Args:
        part: that is trained.
        recommendation: of its nodes and batch; None where there is none.
    """
    found, told = measurements_of_other_sizes(part, CachedTrainings()), list[str]()
    for path in () if recommendation is None else recommendation.with_runs:
        try:
            found += of_runs(part.run, part.spec, [Path(path)])[0]
        except (SpecError, BadMeasurements) as error:
            told.append(f"what the training takes is predicted without {Path(path).name}: {error.message}")
    return found, told


def place_of(run: RunDir, path: Path) -> Path:
    """Return where another run lies: as given, or beside this one."""
    return (path if path.exists() else run.path.parent / path).absolute()


def places(run: RunDir, paths: Sequence[Path]) -> tuple[str, ...]:
    return tuple(str(place_of(run, path)) for path in paths)


def _measured(run: RunDir, spec: JobSpec, other: RunDir) -> OtherSizes:
    theirs = other.spec()
    gpus = theirs.cluster.gpus_per_node
    as_here = theirs.model_copy(update={"cluster": theirs.cluster.model_copy(update=_size_settings(spec))})
    if signature(as_here) != signature(spec) or _code_digests(other) != _code_digests(run):
        raise SpecError(
            f"--with-run {other.id}: it is not of this job: more than its GPUs a node differs",
            "profile the same job: tula profile job.yaml --set cluster.gpus_per_node=1",
        )
    if gpus == spec.cluster.gpus_per_node:
        raise SpecError(
            f"--with-run {other.id}: it has {plural(gpus, 'GPU')} a node, as this run has",
            "give a run with another cluster.gpus_per_node",
        )
    results = other.results()
    found = tuple(result for result in results if isinstance(result, Measured))
    if not found:
        raise BadMeasurements(f"--with-run {other.id}: nothing was measured there", "run tula profile for it first")
    return OtherSizes(found, observations_from_trainings(other, theirs, results).found)


def _size_settings(spec: JobSpec) -> dict[str, int]:
    return {"gpus_per_node": spec.cluster.gpus_per_node}


def _code_digests(run: RunDir) -> set[str]:
    """Return the digests of the user's own code that the run's probes ran."""
    return {task.code for task in run.tasks() if isinstance(task, ProbeTask) and task.code}
