"""The sections of a report in their order; each turns the report's data into text, tables and figures."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tula_cli.extras.report.material import ReportData, RunReportData
from tula_cli.extras.report.values import (
    build_table,
    choose_bytes_unit,
    choose_hours_unit,
    choose_scale,
    convert_unit,
    describe_nodes,
    describe_notes,
    explain_notes,
    has_prices,
    make_chosen_mark,
)
from tula_cli.models.choice.grid import Config
from tula_cli.models.choice.objective import find_envelope
from tula_cli.models.memory import MemoryModel
from tula_cli.models.time.noise import Z90, compute_standard_error, compute_trimmed_mean, split_step_time
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory, Result
from tula_cli.run.records.recommendations import HIGHEST_EFFICIENCY, Prediction, Recommendation, TradeOff, list_caveats
from tula_cli.services.document import Annotation, Cell, Column, Fact, Figure, Section, Series, Style, Table
from tula_cli.services.measurements import TypeMeasurements
from tula_cli.spec.sections import MEMORY_MARGIN
from tula_cli.words import (
    capitalize_first_letter,
    describe_configuration,
    format_count,
    format_duration,
    format_number,
    get_first_line,
    is_interval_too_wide,
)

# --- The choice


def build_choice_section(material: ReportData) -> Section:
    """Build the section of the choice: the reason for it, and the table of configurations."""
    section = Section("choice", "The chosen configuration")
    recommendation, choice = material.shown_recommendation, material.choice
    if recommendation is None or choice is None:
        return replace(section, missing=f"no recommendation: {material.unanswered}")
    rows = recommendation.rows if material.answer is None else material.answer.recommendation.rows
    return replace(
        section,
        text=tuple(_describe_choice(material, recommendation)),
        facts=tuple(_list_recommendation_facts(recommendation)),
        tables=(build_configurations_table(rows, choice, recommendation.currency),),
    )


def _describe_choice(material: ReportData, recommendation: Recommendation) -> Iterator[str]:
    """Yield the reason of the choice, the other market, the accuracy, and what has changed since."""
    yield f"{capitalize_first_letter(recommendation.reason).rstrip('.')}."
    if (other := recommendation.other_market) is not None:
        market = "on spot nodes" if other.market == "spot" else "on demand"
        cost = f"{format_number(other.cost)} {recommendation.currency}"
        yield f"The same {market}: {format_duration(3600 * other.hours)}, {cost}."
    now = None if material.answer is None else material.answer.recommendation
    if (accuracy := (now and now.accuracy) or recommendation.accuracy) is not None:
        yield f"Accuracy {accuracy.words}."
    if (other_choice := material.changed_choice) is not None:
        words = describe_configuration(other_choice.nodes, other_choice.batch, other_choice.local_batch)
        yield f"A new recommendation would choose {words}. Run tula recommend to update it."
    if material.answer is None:
        yield (
            "The values are those of the stored recommendation, because a new one cannot be made:"
            f" {material.unanswered}."
        )


def _list_recommendation_facts(recommendation: Recommendation) -> Iterator[Fact]:
    values = {
        "objective": recommendation.criteria,
        "price": recommendation.price,
        "fit": recommendation.fit,
        "energy": recommendation.power,
        "same progress": recommendation.efficiency,
        "stages": recommendation.ramp,
        "checkpoints": recommendation.interruption,
    }
    yield from (Fact(name, value) for name, value in values.items() if value)
    yield from (Fact("note", text) for text in recommendation.warnings)


def build_configurations_table(rows: Sequence[Prediction], choice: Prediction, currency: str) -> Table:
    """Build the table of configurations: the choice first, the others in the order of `rows`."""
    to_unit, unit = choose_hours_unit(row.hours for row in rows)
    to_size, size = choose_bytes_unit(row.peak_memory for row in rows)
    chosen, priced = choice.configuration, has_prices(rows, currency)
    has_spot = any(row.market == "spot" for row in rows)

    def list_notes(row: Prediction) -> list[str]:
        return [*list_caveats(row, choice), *["interval_unknown"] * (row.hours_low is None)]

    rows = sorted(rows, key=lambda row: row.configuration != chosen)
    return build_table(
        "configurations",
        "Configurations",
        rows,
        (
            (Column("nodes"), lambda row: row.nodes),
            (Column("type", align="left"), lambda row: row.type),
            (Column("batch"), lambda row: row.batch),
            (Column("batch/GPU"), lambda row: row.local_batch),
            (Column("step", "ms", digits=3), lambda row: 1000 * row.step_time),
            (Column("time", unit, digits=3), lambda row: row.hours * to_unit),
            (Column("low", unit, digits=3), lambda row: convert_unit(row.hours_low, to_unit)),
            (Column("high", unit, digits=3), lambda row: convert_unit(row.hours_high, to_unit)),
            (Column("node-hours", digits=3), lambda row: row.all_node_hours),
            (Column("cost", currency, digits=3), lambda row: row.cost if priced else None),
            (Column("energy", "kWh", digits=3), lambda row: row.kwh),
            (Column("memory/GPU", size, digits=3), lambda row: convert_unit(row.peak_memory, to_size)),
            (Column("free", "%", digits=3), lambda row: convert_unit(row.headroom, 100)),
            (Column("market", align="left"), lambda row: row.market.replace("_", " ") if has_spot else None),
            (Column("source", align="left"), lambda row: row.source),
            (Column("note", align="left"), lambda row: describe_notes(list_notes(row))),
        ),
        caption=f"{'Time, node-hours and cost' if priced else 'Time and node-hours'} of the whole training, the chosen"
        " configuration first; low and high: 90 % interval of the time. Also marked: the Pareto front (no"
        f" configuration is both faster and cheaper).{explain_notes(map(list_notes, rows))}",
        marks=["chosen" if row.configuration == chosen else "front" if row.pareto else "" for row in rows],
    )


# --- Time and cost

MAX_CURVES = 8
"""Largest number of curves that can be distinguished in one figure."""
MARKER_LEGEND = "Filled markers: measured; open markers: predicted; bars: 90 % intervals."


def build_time_and_cost_section(material: ReportData) -> Section:
    """Build the section of time and cost: both by batch, and time against cost."""
    section = Section("time_and_cost", "Time and cost by batch")
    choice, rows = material.choice, material.rows
    if choice is None or not rows:
        return replace(section, missing=f"times are unknown: {material.unanswered}")
    figures = [
        _build_batch_figure(material, choice, of_cost=False),
        _build_batch_figure(material, choice, of_cost=True),
        *([build_tradeoff_figure(rows, choice, material.currency)] if len(rows) > 1 else []),
    ]
    return replace(section, figures=tuple(figures))


def _build_batch_figure(material: ReportData, choice: Prediction, *, of_cost: bool) -> Figure:
    """Build the figure of time or cost by batch, with a curve per node type and node count.

    If there are more than `MAX_CURVES`, only the best of each batch and the curve of the choice are drawn.
    """
    rows = material.rows
    factor, unit = (1.0, material.currency) if of_cost else choose_hours_unit(row.hours for row in rows)
    kinds = sorted({(row.type, row.nodes) for row in rows})
    curves: dict[str, Sequence[Prediction]] = {}
    if len(kinds) > MAX_CURVES:
        kinds = [(choice.type, choice.nodes)]
        curves["best of each batch"] = find_envelope(rows)
    for kind in kinds:
        of_kind = sorted((row for row in rows if (row.type, row.nodes) == kind), key=lambda row: row.batch)
        curves[describe_nodes(of_kind[0])] = of_kind

    def get_value(row: Prediction) -> float:
        return row.cost if of_cost else row.hours * factor

    def make_series(name: str, rows: Sequence[Prediction]) -> Series:
        bounds = [
            tuple(hours and hours * get_value(row) / row.hours for row, hours in zip(rows, ends, strict=True))
            for ends in ([row.hours_low for row in rows], [row.hours_high for row in rows])
        ]
        xs, ys = tuple(float(row.batch) for row in rows), tuple(map(get_value, rows))
        return Series(name, xs, ys, bounds[0], bounds[1], measured=_list_measured_flags(rows))

    name = "cost" if of_cost else "time"
    recommendation = material.shown_recommendation
    price = f" Price: {recommendation.price.splitlines()[0]}." if of_cost and recommendation is not None else ""
    return Figure(
        f"{name}_by_batch",
        f"{name.capitalize()} of the training",
        f"{name.capitalize()} of the whole training by global batch.{price} {MARKER_LEGEND}",
        "global batch",
        f"{name} ({unit})",
        tuple(make_series(name, rows) for name, rows in curves.items()),
        marks=(make_chosen_mark(choice, choice.batch, get_value(choice)),),
        x_scale="log2",
        y_scale=choose_scale(map(get_value, rows)),
        paper="Figure 10" if of_cost else "Figure 9",
    )


def _list_measured_flags(rows: Sequence[Prediction]) -> tuple[bool, ...]:
    return tuple(row.measured or row.includes_training for row in rows)


def build_tradeoff_figure(
    rows: Sequence[Prediction], choice: Prediction, currency: str, *, against: TradeOff = "cost"
) -> Figure:
    """Build the figure of the time of every configuration (at least one) against its cost or its number of nodes."""
    factor, unit = choose_hours_unit(row.hours for row in rows)

    def get_x(row: Prediction) -> float:
        return row.cost if against == "cost" else float(row.nodes)

    def make_series(name: str, rows: Sequence[Prediction], style: Style) -> Series:
        xs, ys = tuple(map(get_x, rows)), tuple(row.hours * factor for row in rows)
        return Series(name, xs, ys, style=style, measured=_list_measured_flags(rows))

    ordered = sorted(rows, key=lambda row: (get_x(row), row.hours))
    if against == "cost":
        best = [row for row in ordered if row.pareto]
        name, label, quantity = "Pareto front", f"cost ({currency})", "cost"
        meaning = "No configuration is both faster and cheaper than a configuration on the Pareto front."
    else:
        fastest = {row.nodes: row for row in reversed(ordered)}
        best = [fastest[nodes] for nodes in sorted(fastest)]
        name, label, quantity = "fastest per number of nodes", "nodes", "number of nodes"
        meaning = "The line connects the fastest configuration of each number of nodes."
    return Figure(
        "front" if against == "cost" else "time_by_nodes",
        f"Time against {against}",
        f"Time of the training against its {quantity}. {meaning} Filled markers: measured; open markers: predicted.",
        label,
        f"time ({unit})",
        (make_series("configurations", ordered, "points"), *([make_series(name, best, "line+points")] if best else [])),
        marks=(make_chosen_mark(choice, get_x(choice), choice.hours * factor),),
        x_scale="linear" if against == "cost" else "log2",
        y_scale=choose_scale([row.hours for row in rows]),
    )


# --- Strong and weak scaling

MARKED_EFFICIENCY = 1.005
"""Efficiency from which on it is shown as above 100 %."""


@dataclass(frozen=True)
class ScalingPoint:
    """One node count of a scaling study, compared with the study's smallest one, `first`."""

    row: Prediction
    first: Prediction

    @property
    def samples(self) -> float:
        """Samples per second."""
        return self.row.batch / self.row.step_time

    @property
    def samples_interval(self) -> tuple[float | None, float | None]:
        """The 90 % interval of the samples per second; an end is None if the step time has no such bound."""
        low, high = (self.row.batch / end if end else None for end in (self.row.step_high, self.row.step_low))
        return low, high

    @property
    def speedup(self) -> float:
        return self.samples * self.first.step_time / self.first.batch

    @property
    def efficiency(self) -> float:
        """Speed-up compared with linear scaling; 1 is ideal."""
        return self.speedup * self.first.nodes / self.row.nodes

    @property
    def caveats(self) -> list[str]:
        low, high = self.row.step_low, self.row.step_high
        names = ["interval_unknown"] * (low is None) + ["wide_interval"] * is_interval_too_wide(low, high)
        if self.efficiency > HIGHEST_EFFICIENCY:
            return [*names, "efficiency_above_110"]
        return [*names, *["efficiency_above_100"] * (self.efficiency >= MARKED_EFFICIENCY)]


def build_scaling_study(rows: Sequence[Prediction]) -> list[ScalingPoint]:
    """Build a scaling study from predictions at one global batch (strong) or one local batch (weak), fewest nodes first."""
    ordered = sorted(rows, key=lambda row: row.nodes)
    return [ScalingPoint(row, ordered[0]) for row in ordered]


def build_scaling_section(material: ReportData) -> Section:
    """Build the section of strong and weak scaling around the choice, over the node counts of the search."""
    section = Section("scaling", "Scaling")
    measurements, choice = material.choice_measurements, material.choice
    if measurements is None or choice is None:
        return replace(section, missing=f"scaling is unknown: {material.missing_prediction_reason}")
    spec, batch, local = measurements.run.spec, choice.batch, choice.local_batch
    nodes, gpus = sorted({*spec.search.nodes, choice.nodes}), spec.cluster.gpus_per_node
    strong = build_scaling_study(material.predict_configurations([Config(count, batch) for count in nodes]))
    weak = build_scaling_study(
        material.predict_configurations([Config(count, local * count * gpus) for count in nodes])
    )
    text = []
    if len(strong) < 2:
        known = format_count(len(strong), "node count")
        text.append(
            f"No strong scaling: batch {batch} has a prediction for only {known}. Add node counts to search.nodes to measure more."
        )
    highest = max((point.efficiency for point in (*strong, *weak)), default=0.0)
    if highest > HIGHEST_EFFICIENCY:
        text.append(
            f"An efficiency of {100 * highest:.0f} % is implausible: the step time on the fewest nodes is too uncertain, or other"
            " programs disturbed its probe. Increase search.min_seconds and run tula profile again."
        )
    tables = (
        _build_scaling_table(strong, "strong_scaling", f"Strong scaling: global batch {batch}", material, gpus),
        _build_scaling_table(weak, "weak_scaling", f"Weak scaling: batch {local} per GPU", material, gpus),
    )
    studies = {f"batch {batch}": strong, f"local batch {local}": weak}
    plotted = {name: study for name, study in studies.items() if len(study) > 1}
    figures = (_build_throughput_figure(plotted, choice),) if plotted else ()
    return replace(section, text=tuple(text), tables=tables, figures=figures)


def _build_scaling_table(study: Sequence[ScalingPoint], key: str, title: str, material: ReportData, gpus: int) -> Table:
    rows = [point.row for point in study]
    to_unit, unit = choose_hours_unit(row.hours for row in rows)
    priced, choice = has_prices(rows, material.currency), material.choice
    fewest = format_count(rows[0].nodes) if rows else "the fewest nodes"
    return build_table(
        key,
        title,
        study,
        (
            (Column("nodes"), lambda point: point.row.nodes),
            (Column("GPUs"), lambda point: point.row.nodes * gpus),
            (Column("batch"), lambda point: point.row.batch),
            (Column("batch/GPU"), lambda point: point.row.local_batch),
            (Column("step", "ms", digits=3), lambda point: 1000 * point.row.step_time),
            (Column("low", "ms", digits=3), lambda point: convert_unit(point.row.step_low, 1000)),
            (Column("high", "ms", digits=3), lambda point: convert_unit(point.row.step_high, 1000)),
            (Column("samples/s", digits=4), lambda point: point.samples),
            (Column("speed-up", digits=3), lambda point: point.speedup),
            (Column("efficiency", "%", digits=3), lambda point: 100 * point.efficiency),
            (Column("time", unit, digits=3), lambda point: point.row.hours * to_unit),
            (Column("node-hours", digits=3), lambda point: point.row.all_node_hours),
            (Column("cost", material.currency, digits=3), lambda point: point.row.cost if priced else None),
            (Column("source", align="left"), lambda point: point.row.source),
            (Column("note", align="left"), lambda point: describe_notes(point.caveats)),
        ),
        caption=f"Speed-up and efficiency are relative to {fewest}; low and high: 90 % interval of the step time; "
        f"{'time, node-hours and cost' if priced else 'time and node-hours'} are those of the whole training."
        f"{explain_notes(point.caveats for point in study)}",
        marks=["chosen" if row.configuration == (choice and choice.configuration) else "" for row in rows],
    )


def _build_throughput_figure(studies: Mapping[str, Sequence[ScalingPoint]], choice: Prediction) -> Figure:
    """Build the figure of samples per second against nodes, with linear scaling from the smallest node count."""
    series, at_choice = [], None
    for name, study in studies.items():
        xs, ys = tuple(float(point.row.nodes) for point in study), tuple(point.samples for point in study)
        low, high = zip(*(point.samples_interval for point in study), strict=True)
        series.append(Series(name, xs, ys, low, high, measured=tuple(point.row.measured for point in study)))
        series.append(Series(f"ideal, {name}", xs, tuple(ys[0] * x / xs[0] for x in xs), style="line"))
        at_choice = at_choice or next((point.samples for point in study if point.row.nodes == choice.nodes), None)
    return Figure(
        "scaling_throughput",
        "Throughput against nodes",
        MARKER_LEGEND,
        "nodes",
        "samples/s",
        tuple(series),
        marks=(make_chosen_mark(choice, choice.nodes, at_choice),),
        x_scale="log2",
        y_scale="log2",
    )


# --- Measurements

MAX_BARS = 24
"""Largest number of probes in the figure of step times by component."""


def build_measured_section(material: ReportData) -> Section:
    """Build the tables of all probes, including failed ones, and the step time of those measured by component."""
    section = Section("measured", "Measurements")
    parts = [part for part in material.parts if part.snapshot.results]
    if not parts:
        return replace(section, missing="no probe has a result. Run tula profile.")
    jobs = [job for part in material.parts for job in part.status.jobs if job.kind == "probe"]
    remaining = sum(job.total - job.done for job in jobs)
    waiting = f", {remaining} missing (run tula profile)" if remaining else ""
    figures = tuple(figure for part in material.parts for figure in _build_parts_figure(part))
    text = [f"{format_count(len(material.measured), 'probe')} measured{waiting}."]
    text += [f"Left out: {error.message}." for part in material.parts for error in part.snapshot.damaged_results]
    if material.measured and not figures:
        text.append(
            "Only total step times were measured. In a script, communication is measured if it uses DistributedDataParallel,"
            " and data-loader wait if it uses torch's DataLoader."
        )
    return replace(section, text=tuple(text), tables=tuple(map(_build_probe_table, parts)), figures=figures)


def _build_probe_table(part: RunReportData) -> Table:
    to_size, size = choose_bytes_unit(probe.memory.peak for probe in part.snapshot.measured)

    def make_measured_getter(get_cell: Callable[[Measured], float | None]) -> Callable[[Result], Cell]:
        return lambda result: get_cell(result) if isinstance(result, Measured) else None

    def make_part_getter(index: int) -> Callable[[Result], Cell]:
        return make_measured_getter(lambda probe: convert_unit(_list_step_parts(probe)[index], 1000))

    return build_table(
        part.make_unique_key("probes"),
        part.make_unique_title("Probes"),
        sorted(part.snapshot.results, key=lambda result: (result.nodes, result.local_batch)),
        (
            (Column("nodes"), lambda result: result.nodes),
            (Column("batch"), lambda result: result.nodes * result.gpus_per_node * result.local_batch),
            (Column("batch/GPU"), lambda result: result.local_batch),
            (
                Column("step", "ms", digits=3),
                make_measured_getter(lambda probe: 1000 * compute_trimmed_mean(probe.step_times)),
            ),
            (Column("low", "ms", digits=3), make_measured_getter(lambda probe: _compute_step_interval(probe)[0])),
            (Column("high", "ms", digits=3), make_measured_getter(lambda probe: _compute_step_interval(probe)[1])),
            (Column("compute", "ms", digits=3), make_part_getter(0)),
            (Column("exposed comm", "ms", digits=3), make_part_getter(1)),
            (Column("data wait", "ms", digits=3), make_part_getter(2)),
            (
                Column("samples/s", digits=4),
                make_measured_getter(lambda probe: probe.batch / compute_trimmed_mean(probe.step_times)),
            ),
            (Column("memory/GPU", size, digits=3), make_measured_getter(lambda probe: probe.memory.peak * to_size)),
            (Column("steps"), make_measured_getter(lambda probe: len(probe.step_times))),
            (Column("outcome", align="left"), _describe_outcome),
        ),
        caption="Mean step times without the fastest and the slowest 10 % of the steps; low and high: 90 % interval of the mean."
        " Exposed communication does not overlap with computing; compute is the rest of the step; -: not measured.",
    )


def _describe_outcome(result: Result) -> str:
    outcome = result.kind.replace("_", " ")
    if isinstance(result, OutOfMemory) and result.assumed:
        return f"{outcome} (assumed, because a smaller batch was)"
    return f"{outcome}: {get_first_line(result.message)}" if isinstance(result, Failed) else outcome


def _compute_step_interval(probe: Measured) -> tuple[float | None, float | None]:
    """Return the 90 % interval of a probe's step time in ms, or (None, None) if it has too few steps."""
    middle, error = compute_trimmed_mean(probe.step_times), compute_standard_error(probe.step_times)
    if error == float("inf"):
        return None, None
    return 1000 * max(0.0, middle - Z90 * error), 1000 * (middle + Z90 * error)


def _list_step_parts(probe: Measured) -> tuple[float | None, float | None, float | None]:
    """Return compute, exposed synchronisation and input time of a step, in seconds."""
    parts = split_step_time(probe)
    return parts.compute, parts.sync, parts.data


def _build_parts_figure(part: RunReportData) -> Iterator[Figure]:
    """Yield the figure of step times by component; nothing if no probe measured all components."""
    probes = [probe for probe in part.snapshot.measured if None not in _list_step_parts(probe)]
    shown = probes[:MAX_BARS]
    if not shown:
        return
    xs = tuple(float(index) for index in range(len(shown)))
    components = zip(*map(_list_step_parts, shown), strict=True)
    names = ("compute", "exposed communication", "data-loader wait")
    yield Figure(
        part.make_unique_key("step_parts"),
        part.make_unique_title("Step time by component"),
        "Measured step time by nodes and batch per GPU."
        + f" Shown: the first {len(shown)} of {len(probes)} probes." * (len(shown) < len(probes)),
        "nodes x batch per GPU",
        "time per step (ms)",
        tuple(
            Series(name, xs, tuple(convert_unit(seconds, 1000) for seconds in component), style="stacked")
            for name, component in zip(names, components, strict=True)
        ),
        x_scale="category",
        categories=tuple(f"{probe.nodes} x {probe.local_batch}" for probe in shown),
    )


# --- Memory

MEMORY_COMPONENTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "factors": "scaling factors",
    "batch": "batch",
    "activations": "activations",
}


def build_memory_section(material: ReportData) -> Section:
    """Build the section of memory against the local batch on the choice's nodes."""
    section = Section("memory", "Memory")
    measurements, choice = material.choice_measurements, material.choice
    if measurements is None or choice is None:
        why = f"memory is unknown: {material.missing_prediction_reason}. To estimate it without probes, run tula check --memory"
        return replace(section, missing=why)
    estimator, gpus = measurements.estimator, measurements.run.spec.cluster.gpus_per_node
    model = estimator.memory.adapt_to_ranks(choice.nodes * gpus)
    probes = measurements.snapshot.measured
    if estimator.memory.sharded:  # probes on other numbers of GPUs have other shards
        probes = [probe for probe in probes if probe.nodes == choice.nodes]
    text = [_describe_memory_limit(measurements, choice.nodes)]
    if model.error is not None:
        text.append(f"Median absolute error of the model: {format_number(100 * model.error, 2)} %.")
    if not model.by_component:
        text.append("For a script, only the total peak memory is known, not its components.")
    sizes = {config.compute_local_batch(gpus) for config in estimator.list_configurations([choice.nodes])}
    sizes |= {local for _, local in estimator.probes}
    figure = _build_memory_figure(estimator.capacity, model, sorted(sizes), probes, choice.local_batch)
    return replace(section, text=tuple(text), figures=(figure,))


def _describe_memory_limit(measurements: TypeMeasurements, nodes: int) -> str:
    capacity, largest = measurements.estimator.capacity, measurements.estimator.compute_largest_local_batch(nodes)
    if capacity is None:
        return "The memory per rank has no limit. To set one, use cluster.memory_per_gpu."
    factor, unit = choose_bytes_unit([capacity])
    samples = measurements.estimator.dataset_size
    if largest is None:
        bound = "every batch fits"
    elif largest < samples:
        bound = f"at most {largest} samples per GPU fit"
    else:
        bound = f"all {samples} samples of the dataset fit on one GPU"
    return f"One GPU has {format_number(capacity * factor)} {unit}; with {MEMORY_MARGIN:.0%} kept free, {bound}."


def _build_memory_figure(
    capacity: float | None, model: MemoryModel, sizes: Sequence[int], probes: Sequence[Measured], chosen: int
) -> Figure:
    peaks = [model.compute_peak(size) for size in sizes]
    factor, unit = choose_bytes_unit([*peaks, *(probe.memory.peak for probe in probes)])
    xs = tuple(float(position) for position in range(len(sizes)))
    series = []
    if model.by_component:
        memories = [model.compute_footprint(size).memory for size in sizes]
        for field_name, name in MEMORY_COMPONENTS.items():
            values = tuple(getattr(memory, field_name) * factor for memory in memories)
            series += [Series(name, xs, values, style="stacked")] if any(values) else []
    series.append(Series("peak, model", xs, tuple(peak * factor for peak in peaks), style="line"))
    at = sorted((float(sizes.index(probe.local_batch)), probe.memory.peak * factor) for probe in probes)
    if at:
        configs, measured_peaks = zip(*at, strict=True)
        series.append(Series("peak, measured", configs, measured_peaks, style="points", measured=(True,) * len(at)))
    marks = (
        [Annotation(xs[sizes.index(chosen)], None, f"chosen: {chosen} per GPU", "choice")] if chosen in sizes else []
    )
    if capacity is not None:
        limit = "memory per GPU" + " minus libraries" * (model.libraries > 0)
        marks.append(Annotation(None, (capacity - model.libraries) * factor, limit, "limit"))
    return Figure(
        "memory",
        "Memory per GPU",
        "Peak memory of a step by batch per GPU, split into components if they are known (Eq. 3 of the paper).",
        "local batch",
        f"memory ({unit})",
        tuple(series),
        marks=tuple(marks),
        x_scale="category",
        categories=tuple(map(str, sizes)),
        paper="Figure 4",
    )
