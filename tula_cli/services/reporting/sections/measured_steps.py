"""What was measured: every probe with its interval, and where a step's time goes."""

from collections.abc import Iterator, Sequence

from tula_cli.models.time.noise import Z90, centre, standard_error
from tula_cli.run.records.probes import Measured
from tula_cli.services.reporting.document import Column, Figure, Section, Series, Table
from tula_cli.services.reporting.material import Material, PartMaterial
from tula_cli.services.reporting.units import of_bytes
from tula_cli.words import first_line, plural

MEASURED, WHERE = ("measured", "What was measured"), ("step_parts", "Where a step's time goes")
MOST_BARS = 24
NONE = "tula profile measures"


def measured_section(seen: Material) -> Section:
    """Return every probe, those that did not run among them."""
    tables = [_probes(one) for one in seen.parts if one.look.results]
    if not tables:
        return Section(*MEASURED, missing=f"no probe has a result: {NONE}")
    counts = f"{plural(len(seen.measured), 'probe')} measured"
    waiting = [job for one in seen.parts for job in one.now.jobs if job.kind == "probe" and job.done < job.total]
    left = f", {sum(job.total - job.done for job in waiting)} still to come (tula profile)" * bool(waiting)
    return Section(*MEASURED, (f"{counts}{left}.",), tables=tuple(tables))


def _probes(one: PartMaterial) -> Table:
    probes = one.measured
    to_size, size = of_bytes(probe.memory.peak for probe in probes)
    columns = (Column("nodes"), Column("batch"), Column("local batch"), Column("step", "ms", digits=3), Column("from", "ms", digits=3),
               Column("to", "ms", digits=3), Column("compute", "ms", digits=3), Column("synchronisation", "ms", digits=3),
               Column("input", "ms", digits=3), Column("samples/s", digits=4), Column("memory of a GPU", size, digits=3),
               Column("steps"), Column("outcome", align="left"))  # fmt: skip
    rows: list[tuple[int, int, tuple[str | float | int | None, ...]]] = []
    for probe in probes:
        step, (low, high) = centre(probe.step_times), _interval(probe)
        told = [None if part is None else 1000 * part for part in _parts(probe)]
        cells = (1000 * step, low, high, *told, probe.batch / step, probe.memory.peak * to_size, len(probe.step_times))
        rows.append((probe.nodes, probe.local_batch, (probe.nodes, probe.batch, probe.local_batch, *cells, "measured")))
    for result in one.ended_otherwise:
        batch, words = result.nodes * result.gpus_per_node * result.local_batch, result.kind.replace("_", " ")
        why = "" if result.kind == "out_of_memory" else f": {first_line(result.message)}"
        assumed = ", as a smaller one was" if result.kind == "out_of_memory" and result.assumed else ""
        place = (result.nodes, batch, result.local_batch)
        rows.append((result.nodes, result.local_batch, (*place, *[None] * 9, f"{words}{assumed}{why}")))
    ordered = tuple(cells for *_, cells in sorted(rows, key=lambda row: row[:2]))
    caption = (
        "Means over the timed steps without the fastest and the slowest tenth; from and to are the ends of the 90 % interval of"
        " that mean. Synchronisation is what of it is exposed; compute is the rest of the step; - is not told."
    )
    return Table(f"probes{f'_{one.name}' if one.name else ''}", f"Probes{f': {one.name}' if one.name else ''}", columns, ordered, caption)  # fmt: skip


def _interval(probe: Measured) -> tuple[float | None, float | None]:
    """Return the ends of the 90 % interval of a probe's step time (ms); None of a few steps."""
    middle, error = centre(probe.step_times), standard_error(probe.step_times)
    if error == float("inf"):
        return None, None
    return 1000 * max(0.0, middle - Z90 * error), 1000 * (middle + Z90 * error)


def _parts(probe: Measured) -> tuple[float | None, float | None, float | None]:
    """Return compute, exposed synchronisation and input of a step (seconds), which are the step together; None where not told.

    Where a part alone is not told the rest is not told either, but for a job on one GPU, which synchronises with nobody.
    """
    step, wait = centre(probe.step_times), probe.data_wait
    sync = 0.0 if probe.sync_time is None and probe.nodes * probe.gpus_per_node == 1 else probe.sync_time
    if sync is None or wait is None:
        return None, sync, wait
    sync, wait = min(sync, step), min(wait, max(0.0, step - min(sync, step)))
    return step - sync - wait, sync, wait


def parts_section(seen: Material) -> Section:
    """Return the parts of a step by configuration."""
    if not seen.measured:
        return Section(*WHERE, missing=f"no step was measured: {NONE}")
    figures = [figure for one in seen.own_parts for figure in _figure(seen, one)]
    if not figures:
        return Section(*WHERE, missing=UNTOLD)
    return Section(*WHERE, figures=tuple(figures))


UNTOLD = (
    "the probes tell whole steps alone: of a script synchronisation is told apart under DistributedDataParallel, and input where"
    " it takes torch's DataLoader; tula profile measures what it then finds"
)


def _figure(seen: Material, one: PartMaterial) -> Iterator[Figure]:
    found = [probe for probe in one.measured if None not in _parts(probe)]
    if not found:
        return
    shown = _shown(seen, found)
    parts = [_parts(probe) for probe in shown]
    xs = tuple(float(place) for place in range(len(shown)))
    names = ("compute", "exposed synchronisation", "input")
    left = f" Of {len(found)} probes {len(shown)} are drawn." * (len(shown) < len(found))
    yield Figure(
        f"step_parts{f'_{one.name}' if one.name else ''}",
        f"Parts of a step{f': {one.name}' if one.name else ''}",
        f"Measured steps by nodes and local batch; the parts are the whole step together.{left}",
        "nodes x local batch",
        "time of a step (ms)",
        tuple(Series(name, xs, tuple(1000 * (told[place] or 0.0) for told in parts), style="stacked") for place, name in enumerate(names)),
        x_scale="category",
        categories=tuple(f"{probe.nodes} x {probe.local_batch}" for probe in shown),
    )  # fmt: skip


def _shown(seen: Material, probes: Sequence[Measured]) -> list[Measured]:
    """Return what is drawn: all of few probes, else those on the choice's nodes, at its local batch, and the first ones."""
    if len(probes) <= MOST_BARS:
        return list(probes)
    choice = seen.choice
    near = [
        p for p in probes if choice is not None and (p.nodes == choice.nodes or p.local_batch == choice.local_batch)
    ]
    kept = list({probe.id: probe for probe in (*near, *probes)}.values())[:MOST_BARS]
    return [probe for probe in probes if probe in kept]
