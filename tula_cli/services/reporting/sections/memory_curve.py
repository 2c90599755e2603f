"""Memory of one GPU against its batch: what it consists of (Eq. 3), what was measured, and the limit."""

from collections.abc import Iterator, Sequence

from tula_cli.models.memory.memory import MemoryModel
from tula_cli.run.records.probes import Measured
from tula_cli.services.recommendation.measured import TypeMeasurements
from tula_cli.services.reporting.document import Column, Figure, Mark, Section, Series, Table
from tula_cli.services.reporting.figures import bytes_unit
from tula_cli.services.reporting.material import Material
from tula_cli.spec.sections import MEMORY_MARGIN
from tula_cli.words import number, plural

KEY, TITLE = "memory", "Memory"
COMPONENTS = ("parameters", "gradients", "optimizer", "factors", "batch", "activations")


def memory_section(material: Material) -> Section:
    """Return memory against the local batch on the choice's nodes."""
    measurements, choice = material.choice_measurements, material.choice
    if measurements is None or choice is None:
        why = material.unanswered
        return Section(
            KEY, TITLE, missing=f"memory is not known: {why}; before probes tula check --memory tells what it may be"
        )
    model = measurements.forecast.memory.for_ranks(choice.nodes * measurements.part.spec.cluster.gpus_per_node)
    sizes = _drawn_sizes(measurements, choice.nodes)
    probes = [result for result in measurements.results if isinstance(result, Measured)]
    if measurements.forecast.memory.sharded:  # another number of GPUs holds other shares
        probes = [probe for probe in probes if probe.nodes == choice.nodes]
    text = [_describe_limit(measurements, choice.nodes)]
    if not model.by_component:
        text.append("What the peak consists of is not told by a script; it is told as a whole.")
    figure = _memory_figure(measurements, model, sizes, probes, choice.local_batch)
    return Section(KEY, TITLE, tuple(text), tables=tuple(_error_tables(model, probes)), figures=(figure,))


def _drawn_sizes(measurements: TypeMeasurements, nodes: int) -> list[int]:
    """Return the local batches that are drawn: of the candidates on a number of nodes, and those that were measured."""
    gpus = measurements.part.spec.cluster.gpus_per_node
    sizes = {config.local_batch(gpus) for config in measurements.forecast.candidates([nodes])}
    return sorted({*sizes, *(local for _, local in measurements.forecast.probes)})


def _describe_limit(measurements: TypeMeasurements, nodes: int) -> str:
    capacity, largest = measurements.forecast.capacity, measurements.forecast.largest_local_batch(nodes)
    if capacity is None:
        return "Nothing bounds the memory of a rank (cluster.memory_per_gpu sets a limit)."
    factor, unit = bytes_unit([capacity])
    margin = f"{MEMORY_MARGIN:.0%}"
    bound = "every local batch fits" if largest is None else f"a local batch of at most {largest} fits"
    return f"One GPU has {number(capacity * factor)} {unit}; with {margin} of it left free {bound}."


def _memory_figure(
    measurements: TypeMeasurements, model: MemoryModel, sizes: Sequence[int], probes: Sequence[Measured], chosen: int
) -> Figure:
    capacity = measurements.forecast.capacity
    peaks = [model.peak(size) for size in sizes]
    factor, unit = bytes_unit([*peaks, *(probe.memory.peak for probe in probes)])
    position_by_size = {size: float(at) for at, size in enumerate(sizes)}
    xs = tuple(position_by_size.values())
    libraries = model.libraries > 0
    series = [*_stacked_series(model, sizes, xs, factor)] if model.by_component else []
    series.append(Series("peak, model", xs, tuple(peak * factor for peak in peaks), style="line"))
    sorted_probes = sorted(probes, key=lambda probe: probe.local_batch)
    peaked = tuple(probe.memory.peak * factor for probe in sorted_probes)
    positions = tuple(position_by_size[probe.local_batch] for probe in sorted_probes)
    series.append(Series("peak, measured", positions, peaked, style="points", measured=(True,) * len(sorted_probes)))
    marks = (
        [Mark(position_by_size[chosen], None, f"chosen: local batch {chosen}", "choice")]
        if chosen in position_by_size
        else []
    )
    if capacity is not None:
        room = capacity - model.libraries
        marks.append(Mark(None, room * factor, "memory of a GPU" + " less libraries" * libraries, "limit"))
    return Figure(
        "memory",
        "Memory of one GPU",
        "Peak of a step against the local batch, by component where that is told (Eq. 3).",
        "local batch",
        f"memory ({unit})",
        tuple(series),
        marks=tuple(marks),
        x_scale="category",
        categories=tuple(map(str, sizes)),
        paper="Figure 4",
    )


def _stacked_series(model: MemoryModel, sizes: Sequence[int], xs: tuple[float, ...], factor: float) -> Iterator[Series]:
    components = [model.footprint(size).memory for size in sizes]
    for name in COMPONENTS:
        values = tuple(getattr(memory, name) * factor for memory in components)
        if any(values):
            title = {"optimizer": "optimizer state", "factors": "scaling factors"}.get(name, name)
            yield Series(title, xs, values, style="stacked")


def _error_tables(model: MemoryModel, probes: Sequence[Measured]) -> Iterator[Table]:
    """Yield what the model says of each measured peak."""
    if not probes:
        return
    factor, unit = bytes_unit(probe.memory.peak for probe in probes)
    columns = (Column("nodes"), Column("local batch"), Column("measured", unit, digits=4), Column("model", unit, digits=4), Column("error", "%", digits=2))  # fmt: skip
    rows = tuple(
        (p.nodes, p.local_batch, p.memory.peak * factor, model.peak(p.local_batch) * factor, 100 * (model.peak(p.local_batch) / max(p.memory.peak, 1) - 1))
        for p in probes
    )  # fmt: skip
    off = "" if model.error is None else f" The median is {number(100 * model.error, 2)} % away, signs aside."
    count = plural(len(probes), "probe")
    yield Table(
        "memory_model",
        "Peak memory, measured and by the model",
        columns,
        rows,
        f"The model has seen these {count}.{off}",
    )
