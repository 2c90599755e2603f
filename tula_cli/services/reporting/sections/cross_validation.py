"""How well the run's own probes foresee each other: Figures 9 and 11 of the paper for one's own job."""

from collections.abc import Iterator

from tula_cli.errors import BadMeasurements
from tula_cli.models.choice.grid import Config
from tula_cli.models.observations import as_observation
from tula_cli.models.time import steptime
from tula_cli.models.time.noise import trimmed_mean
from tula_cli.services.recommendation.measured import TypeMeasurements
from tula_cli.services.recommendation.validation import Validation
from tula_cli.services.reporting.document import Column, Figure, Section, Series, Table
from tula_cli.services.reporting.material import Material, describe_error
from tula_cli.services.search import STRATEGIES, group_by_nodes
from tula_cli.words import plural

KEY, TITLE = "predictions", "How well it predicts"


def section(material: Material) -> Section:
    """Return what each search would have said of the probes that it does not take."""
    measurements = material.choice_measurements
    if measurements is None:
        return Section(KEY, TITLE, missing=f"nothing is predicted: {material.unanswered}")
    try:
        found = measurements.cross_validate()
    except BadMeasurements as error:
        return Section(KEY, TITLE, missing=f"nothing tells how well: {describe_error(error)}")
    return Section(KEY, TITLE, tables=(_table(found),), figures=(_errors(found), *_curves(material, measurements)))


def _name(row: Validation) -> str:
    return f"{row.strategy}, each left out once" if row.left_out_once else row.strategy


def _table(validations: tuple[Validation, ...]) -> Table:
    columns = (Column("search", align="left"), Column("probes"), Column("judged by"), Column("median error", "%", digits=3),
               Column("90th percentile", "%", digits=3), Column("inside 90 % interval", "%", digits=3))  # fmt: skip
    rows = tuple(
        (_name(row), row.probes, row.unseen, 100 * row.median, 100 * row.p90, 100 * row.held) for row in validations
    )
    caption = (
        "Each search takes its probes of those that were measured; the step time is fitted to them, and the others judge it."
        " Errors are shares of the measured step time, signs aside."
    )
    return Table("validation", "Errors of the step time by search", columns, rows, caption)


def _errors(validations: tuple[Validation, ...]) -> Figure:
    xs = tuple(float(place) for place in range(len(validations)))
    return Figure(
        "prediction_errors",
        "Errors of the step time by search",
        "Relative errors on configurations that the search has not measured.",
        "search",
        "error (%)",
        (
            Series("median", xs, tuple(100 * row.median for row in validations), style="bars"),
            Series("90th percentile", xs, tuple(100 * row.p90 for row in validations), style="bars"),
        ),
        x_scale="category",
        categories=tuple(_name(row) for row in validations),
        paper="Figure 11",
    )


def _curves(material: Material, type_measurements: TypeMeasurements) -> Iterator[Figure]:
    """Yield what was measured on the choice's nodes beside the fits to all probes and to those of the partial search."""
    choice, forecast = material.choice, type_measurements.forecast
    assert choice is not None  # of which `own` is
    spec, gpus, nodes = type_measurements.part.spec, type_measurements.part.spec.cluster.gpus_per_node, choice.nodes
    probes = forecast.probes
    partial = {(n, local) for n, locals_ in STRATEGIES["partial"](group_by_nodes(probes)).items() for local in locals_}
    here = sorted(local for count, local in probes if count == nodes)
    gaps = [config.local_batch(gpus) for config in forecast.feasible([nodes])]
    known = [size for size in sorted({*here, *gaps}) if not forecast.steps.refusal(nodes, gpus, size)]
    if len(known) < 2 or not here:
        return
    fits = {"fit to all": forecast.steps}
    if len(partial) < len(probes):
        few = steptime.fit_step_time([as_observation(probes[place]) for place in sorted(partial)], collective=spec.cluster.collective, priors=forecast.steps.priors)  # fmt: skip
        fits["fit to the partial search's"] = few
    series = [_measured(type_measurements, here, nodes)]
    for name, fit in fits.items():
        sizes = [size for size in known if not fit.refusal(nodes, gpus, size)]
        told = [fit.predict(nodes, gpus, size) for size in sizes]
        xs = tuple(float(Config(nodes, size * nodes * gpus).batch) for size in sizes)
        series.append(
            Series(name, xs, tuple(1000 * one.seconds for one in told), tuple(one.low and 1000 * one.low for one in told),
                   tuple(one.high and 1000 * one.high for one in told), style="line")
        )  # fmt: skip
    trained = ", and to the steps of trainings," * bool(forecast.trained)
    yield Figure(
        "step_time_fits",
        f"Step time on {plural(nodes)}, measured and by the models",
        f"Probes beside the fit to all {len(probes)} of them{trained} and to the {len(partial)} that the partial search takes;"
        " bands are 90 % intervals.",
        "global batch",
        "step time (ms)",
        tuple(series),
        x_scale="log2",
        paper="Figure 9",
    )


def _measured(type_measurements: TypeMeasurements, sizes: list[int], nodes: int) -> Series:
    gpus, probes = type_measurements.part.spec.cluster.gpus_per_node, type_measurements.forecast.probes
    xs = tuple(float(size * nodes * gpus) for size in sizes)
    ys = tuple(1000 * trimmed_mean(probes[nodes, size].step_times) for size in sizes)
    return Series("measured", xs, ys, style="points", measured=(True,) * len(sizes))
