"""Probes of the same job with other numbers of GPUs a node: with them, what is inside a node and what is between nodes is known apart.

"4 nodes of 8 GPUs" follow from "1 node of 8" and "2 nodes of 1", which are runs of their own.
"""

from collections.abc import Sequence
from pathlib import Path

from tula_cli.errors import BadMeasurements, SpecError
from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.tasks import ProbeTask
from tula_cli.spec.job import JobSpec
from tula_cli.spec.signature import signature
from tula_cli.words import plural


def probes_of_others(run: RunDir, spec: JobSpec, paths: Sequence[Path]) -> tuple[list[Measured], list[str]]:
    """Return the probes of other runs, and what is to be said of them.

    Args:
        run: the run that is asked.
        spec: its job.
        paths: of the others, or their names beside it.

    Raises:
        SpecError: one is no run, or not of the same job with another number of GPUs a node.
        BadMeasurements: nothing was measured there.
    """
    if paths and spec.node_types:
        raise SpecError(
            "--with-run: this job names node types, each of which is fitted by itself", "leave --with-run out"
        )
    probes, told = [], []
    for path in paths:
        found = _probes(run, spec, RunDir.open((path if path.exists() else run.path.parent / path).absolute()))
        gpus = plural(found[0].gpus_per_node, "GPU")
        told.append(
            f"the fit takes the probes of run {path.name} as well ({plural(len(found), 'probe')}, {gpus} a node)"
        )
        probes += found
    return probes, told


def _probes(run: RunDir, spec: JobSpec, other: RunDir) -> list[Measured]:
    theirs = other.spec()
    gpus = theirs.cluster.gpus_per_node
    as_here = theirs.model_copy(update={"cluster": theirs.cluster.model_copy(update=_size(spec))})
    if signature(as_here) != signature(spec) or _code(other) != _code(run):
        raise SpecError(
            f"--with-run {other.id}: it is not of this job: more than its GPUs a node differs",
            "profile the same job: tula profile job.yaml --set cluster.gpus_per_node=1",
        )
    if gpus == spec.cluster.gpus_per_node:
        raise SpecError(
            f"--with-run {other.id}: it has {plural(gpus, 'GPU')} a node, as this run has",
            "give a run with another cluster.gpus_per_node",
        )
    found = [result for result in other.results() if isinstance(result, Measured)]
    if not found:
        raise BadMeasurements(f"--with-run {other.id}: nothing was measured there", "run tula profile for it first")
    return found


def _size(spec: JobSpec) -> dict[str, int]:
    return {"gpus_per_node": spec.cluster.gpus_per_node}


def _code(run: RunDir) -> set[str]:
    """Return the digests of the user's own code that the run's probes ran."""
    return {task.code for task in run.tasks() if isinstance(task, ProbeTask) and task.code}
