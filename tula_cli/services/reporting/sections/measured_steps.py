"""The measurements: every probe with its interval, and the breakdown of a step's time."""

from collections.abc import Iterator, Sequence

from tula_cli.models.time.noise import Z90, standard_error, trimmed_mean
from tula_cli.run.records.probes import Measured
from tula_cli.services.reporting.document import Column, Figure, Section, Series, Table
from tula_cli.services.reporting.figures import bytes_unit
from tula_cli.services.reporting.material import Material, PartMaterial
from tula_cli.words import first_line, plural

MEASURED, WHERE = ("measured", "What was measured"), ("step_parts", "Where a step's time goes")
MAX_BARS = 24
HOW_TO_MEASURE = "tula profile measures"


def measured_section(material: Material) -> Section:
    """Return every probe, those that did not run among them."""
    tables = [_probe_table(part_material) for part_material in material.parts if part_material.look.results]
    if not tables:
        return Section(*MEASURED, missing=f"no probe has a result: {HOW_TO_MEASURE}")
    counts = f"{plural(len(material.measured), 'probe')} measured"
    waiting = [
        job
        for part_material in material.parts
        for job in part_material.now.jobs
        if job.kind == "probe" and job.done < job.total
    ]
    remaining_text = f", {sum(job.total - job.done for job in waiting)} still to come (tula profile)" * bool(waiting)
    return Section(*MEASURED, (f"{counts}{remaining_text}.",), tables=tuple(tables))


def _probe_table(part_material: PartMaterial) -> Table:
    probes = part_material.measured
    to_size, size = bytes_unit(probe.memory.peak for probe in probes)
    columns = (Column("nodes"), Column("batch"), Column("local batch"), Column("step", "ms", digits=3), Column("from", "ms", digits=3),
               Column("to", "ms", digits=3), Column("compute", "ms", digits=3), Column("synchronisation", "ms", digits=3),
               Column("input", "ms", digits=3), Column("samples/s", digits=4), Column("memory of a GPU", size, digits=3),
               Column("steps"), Column("outcome", align="left"))  # fmt: skip
    rows: list[tuple[int, int, tuple[str | float | int | None, ...]]] = []
    for probe in probes:
        step, (low, high) = trimmed_mean(probe.step_times), _interval(probe)
        milliseconds = [None if seconds is None else 1000 * seconds for seconds in _step_parts(probe)]
        cells = (
            1000 * step,
            low,
            high,
            *milliseconds,
            probe.batch / step,
            probe.memory.peak * to_size,
            len(probe.step_times),
        )
        rows.append((probe.nodes, probe.local_batch, (probe.nodes, probe.batch, probe.local_batch, *cells, "measured")))
    for result in part_material.ended_otherwise:
        batch, outcome = result.nodes * result.gpus_per_node * result.local_batch, result.kind.replace("_", " ")
        why = "" if result.kind == "out_of_memory" else f": {first_line(result.message)}"
        assumed = ", as a smaller one was" if result.kind == "out_of_memory" and result.assumed else ""
        configuration = (result.nodes, batch, result.local_batch)
        rows.append((result.nodes, result.local_batch, (*configuration, *[None] * 9, f"{outcome}{assumed}{why}")))
    ordered = tuple(cells for *_, cells in sorted(rows, key=lambda row: row[:2]))
    caption = (
        "Means over the timed steps without the fastest and the slowest tenth; from and to are the ends of the 90 % interval of"
        " that mean. Synchronisation is what of it is exposed; compute is the rest of the step; - is not told."
    )
    return Table(f"probes{f'_{part_material.name}' if part_material.name else ''}", f"Probes{f': {part_material.name}' if part_material.name else ''}", columns, ordered, caption)  # fmt: skip


def _interval(probe: Measured) -> tuple[float | None, float | None]:
    """Return the ends of the 90 % interval of a probe's step time (ms); None of a few steps."""
    middle, error = trimmed_mean(probe.step_times), standard_error(probe.step_times)
    if error == float("inf"):
        return None, None
    return 1000 * max(0.0, middle - Z90 * error), 1000 * (middle + Z90 * error)


def _step_parts(probe: Measured) -> tuple[float | None, float | None, float | None]:
    """Return compute, exposed synchronisation and input of a step (seconds), which are the step together; None where not told.

    Where a part alone is not told the rest is not told either, but for a job on one GPU, which synchronises with nobody.
    """
    step, wait = trimmed_mean(probe.step_times), probe.data_wait
    sync = 0.0 if probe.sync_time is None and probe.nodes * probe.gpus_per_node == 1 else probe.sync_time
    if sync is None or wait is None:
        return None, sync, wait
    sync, wait = min(sync, step), min(wait, max(0.0, step - min(sync, step)))
    return step - sync - wait, sync, wait


def parts_section(material: Material) -> Section:
    """Return the parts of a step by configuration."""
    if not material.measured:
        return Section(*WHERE, missing=f"no step was measured: {HOW_TO_MEASURE}")
    figures = [figure for part_material in material.own_parts for figure in _parts_figure(material, part_material)]
    if not figures:
        return Section(*WHERE, missing=NO_PARTS)
    return Section(*WHERE, figures=tuple(figures))


NO_PARTS = (
    "the probes tell whole steps alone: of a script synchronisation is told apart under DistributedDataParallel, and input where"
    " it takes torch's DataLoader; tula profile measures what it then finds"
)


def _parts_figure(material: Material, part_material: PartMaterial) -> Iterator[Figure]:
    complete_probes = [probe for probe in part_material.measured if None not in _step_parts(probe)]
    if not complete_probes:
        return
    shown = _probes_shown(material, complete_probes)
    parts_by_probe = [_step_parts(probe) for probe in shown]
    xs = tuple(float(index) for index in range(len(shown)))
    names = ("compute", "exposed synchronisation", "input")
    drawn_text = f" Of {len(complete_probes)} probes {len(shown)} are drawn." * (len(shown) < len(complete_probes))
    yield Figure(
        f"step_parts{f'_{part_material.name}' if part_material.name else ''}",
        f"Parts of a step{f': {part_material.name}' if part_material.name else ''}",
        f"Measured steps by nodes and local batch; the parts are the whole step together.{drawn_text}",
        "nodes x local batch",
        "time of a step (ms)",
        tuple(Series(name, xs, tuple(1000 * (step_parts[index] or 0.0) for step_parts in parts_by_probe), style="stacked") for index, name in enumerate(names)),
        x_scale="category",
        categories=tuple(f"{probe.nodes} x {probe.local_batch}" for probe in shown),
    )  # fmt: skip


def _probes_shown(material: Material, probes: Sequence[Measured]) -> list[Measured]:
    """Return what is drawn: all of few probes, else those on the choice's nodes, at its local batch, and the first ones."""
    if len(probes) <= MAX_BARS:
        return list(probes)
    choice = material.choice
    near = [
        p for p in probes if choice is not None and (p.nodes == choice.nodes or p.local_batch == choice.local_batch)
    ]
    selected = list({probe.id: probe for probe in (*near, *probes)}.values())[:MAX_BARS]
    return [probe for probe in probes if probe in selected]
