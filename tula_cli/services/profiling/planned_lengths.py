"""What would be measured at each length of text (search.sequence), and what memory holds there, before anything has run."""

from collections.abc import Sequence
from dataclasses import dataclass

from tula_cli.cluster.inspection import Inspect, NotInspected
from tula_cli.errors import Infeasible
from tula_cli.models.choice.grid import on_nodes
from tula_cli.run.records.inspections import Inspection
from tula_cli.services.search import largest_local_batch, probes
from tula_cli.spec.job import JobSpec


@dataclass(frozen=True)
class PlannedLength:
    """The probes at one length of text, on the fewest nodes, and the memory that is estimated for them."""

    length: int
    own: bool  # the job's
    nodes: int
    local_batches: tuple[int, ...]  # one GPU's, ascending; empty where nothing fits
    batches: tuple[int, ...]  # global
    largest_batch: int | None = None  # global, that memory holds less the margin; None for no bound, or unknown
    memory: tuple[int, ...] = ()  # bytes of one GPU at each of the batches; empty where it is not known
    problem: str = ""  # why nothing is measured


def planned_lengths(
    spec: JobSpec, inspection: Inspection | None, local_batches: Sequence[int], inspector: Inspect | None
) -> tuple[PlannedLength, ...]:
    """Return what is planned at the job's own length and at the others, ascending; nothing where there is no other.

    Args:
        spec: the job.
        inspection: of its own length; None where it was not built.
        local_batches: that are measured there on the fewest nodes.
        inspector: builds model and dataset at the others; None where only the file may be looked at.

    Raises:
        SpecError, JobFailed: they cannot be built at a length.
    """
    others = spec.by_length()
    if spec.length is None or not others:
        return ()
    found = [_planned(spec, spec.length, inspection, local_batches, own=True)]
    for length, other in others.items():
        told = _inspected(other, inspector)
        size = told.dataset_size if told else other.search.max_batch
        if size is None:
            found.append(
                _planned(other, length, told, (), own=False, problem="how many samples there are is not known yet")
            )
            continue
        try:
            largest = largest_local_batch(other, told) if told else None
            (sizes,) = probes(other, dataset_size=size, max_local_batch=largest).values()
        except Infeasible as error:
            found.append(_planned(other, length, told, (), own=False, problem=error.message))
        else:
            found.append(_planned(other, length, told, sizes, own=False))
    return tuple(sorted(found, key=lambda one: one.length))


def _inspected(spec: JobSpec, inspector: Inspect | None) -> Inspection | None:
    try:
        return None if inspector is None else inspector(spec)
    except NotInspected:
        return None


def _planned(
    spec: JobSpec, length: int, told: Inspection | None, sizes: Sequence[int], *, own: bool, problem: str = ""
) -> PlannedLength:
    from tula_cli.models.memory import memory  # numpy, of no use where nothing was built

    nodes = min(spec.search.nodes)
    world = nodes * spec.cluster.gpus_per_node
    largest = on_nodes(largest_local_batch(spec, told), nodes) if told else None
    model = None
    if told and told.footprints:
        train = spec.train
        model = memory.fit(told.footprints, accumulate=train.accumulate, sharded=train.sharded).on(world)
    return PlannedLength(
        length=length,
        own=own,
        nodes=nodes,
        local_batches=tuple(sizes),
        batches=tuple(size * world for size in sizes),
        largest_batch=None if largest is None else largest * world,
        memory=() if model is None else tuple(model.needed(size) for size in sizes),
        problem=problem,
    )


def other_lengths(planned: Sequence[PlannedLength]) -> list[PlannedLength]:
    """Return the other lengths than the job's own at which something is measured: each is a job."""
    return [one for one in planned if not one.own and one.local_batches]


def lengths_node_hours(spec: JobSpec, planned: Sequence[PlannedLength]) -> float:
    """Return the node-hours that the other lengths may take at most."""
    return sum(one.nodes for one in other_lengths(planned)) * spec.measuring_minutes() / 60


def lengths_left_out(planned: Sequence[PlannedLength]) -> tuple[str, ...]:
    """Say which lengths are not measured, and why."""
    return tuple(f"length {one.length} is left out: {one.problem}" for one in planned if one.problem)
