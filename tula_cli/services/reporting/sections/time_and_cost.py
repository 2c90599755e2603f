"""Time and cost against the batch, with the knee, and the front of both."""

from collections.abc import Callable, Iterator, Sequence

from tula_cli.models.choice.objective import envelope
from tula_cli.run.records.recommendations import Prediction
from tula_cli.services.reporting.document import Figure, Mark, Section, Series
from tula_cli.services.reporting.figures import MAX_CURVES, chosen_mark, convert, describe_nodes, hours_unit, scale_of
from tula_cli.services.reporting.material import Material
from tula_cli.words import time_unit

KEY, TITLE = "time_and_cost", "Time and cost against the batch"
INTERVALS = "Filled markers are measured, open ones predicted; bars are 90 % intervals."


def time_and_cost_section(material: Material) -> Section:
    """Return time of the training and of an epoch, and cost, against the batch, and cost against time."""
    choice, rows = material.choice, material.rows
    if choice is None or not rows:
        return Section(KEY, TITLE, missing=f"no curve is known: {material.unanswered}")
    text = []
    if material.knee is not None:
        text.append(
            f"The knee of time against batch is at {material.knee}: on the fitted curve, and smoothed, a doubling of the batch saves"
            " at least 29 % of the time up to about there, and less beyond it. Single points scatter about that curve."
        )
    else:
        text.append("The curve of time against batch has no knee within the batches that were searched.")
    figures = [
        _time_figure(material, choice),
        *_epoch_figure(material, choice),
        _cost_figure(material, choice),
        *_front_figure(material, choice),
    ]
    return Section(KEY, TITLE, tuple(text), figures=tuple(figures))


Value = Callable[[Prediction], tuple[float, float | None, float | None]]
"""Of a configuration: a value and the ends of its 90 % interval."""


def _curves(rows: Sequence[Prediction], value: Value, choice: Prediction) -> Iterator[Series]:
    """Yield a curve for each type and number of nodes; of many that of the choice, and one of the best of each batch."""
    kinds = sorted({(row.type, row.nodes) for row in rows})
    if len(kinds) > MAX_CURVES:
        kinds = [(choice.type, choice.nodes)]
        yield _curve("the best of each batch", envelope(rows), value)
    for kind in kinds:
        rows_of_kind = [row for row in rows if (row.type, row.nodes) == kind]
        yield _curve(describe_nodes(rows_of_kind[0]), sorted(rows_of_kind, key=lambda row: row.batch), value)


def _curve(name: str, rows: Sequence[Prediction], value: Value) -> Series:
    values = [value(row) for row in rows]
    middle, low, high = zip(*values, strict=True)
    return Series(
        name,
        tuple(float(row.batch) for row in rows),
        middle,
        low,
        high,
        measured=tuple(row.measured or bool(row.trained) for row in rows),
    )


def _choice_marks(material: Material, choice: Prediction, y: float) -> tuple[Mark, ...]:
    knee = () if material.knee is None else (Mark(float(material.knee), None, f"knee: batch {material.knee}", "knee"),)
    return (*knee, chosen_mark(choice, choice.batch, y))


def _time_figure(material: Material, choice: Prediction) -> Figure:
    factor, unit = hours_unit(row.hours for row in material.rows)

    def value(row: Prediction) -> tuple[float, float | None, float | None]:
        return row.hours * factor, convert(row.hours_low, factor), convert(row.hours_high, factor)

    return Figure(
        "time_by_batch",
        "Time of the training",
        f"Time of the whole training against the global batch. {INTERVALS}",
        "global batch",
        f"time ({unit})",
        tuple(_curves(material.rows, value, choice)),
        marks=_choice_marks(material, choice, choice.hours * factor),
        x_scale="log2",
        y_scale=scale_of([row.hours for row in material.rows]),
        paper="Figure 9",
    )


def _epoch_figure(material: Material, choice: Prediction) -> Iterator[Figure]:
    """Yield the time that the steps of an epoch take, without what is beside them."""
    sizes = (
        {measurements.type: measurements.forecast.dataset_size for measurements in material.answer.all_measurements}
        if material.answer
        else {}
    )
    rows = [row for row in material.rows if sizes.get(row.type, 0) >= row.batch]
    if not rows:
        return
    divisor, unit = time_unit(max(sizes[row.type] // row.batch * row.step_time for row in rows))

    def value(row: Prediction) -> tuple[float, float | None, float | None]:
        steps = sizes[row.type] // row.batch / divisor
        return row.step_time * steps, convert(row.step_low, steps), convert(row.step_high, steps)

    yield Figure(
        "epoch_time",
        "Time of an epoch",
        f"Time of the steps of one epoch against the global batch, without evaluation and checkpoints. {INTERVALS}",
        "global batch",
        f"time of an epoch ({unit})",
        tuple(_curves(rows, value, choice)),
        marks=_choice_marks(material, choice, value(choice)[0]),
        x_scale="log2",
        y_scale=scale_of([value(row)[0] for row in rows]),
        paper="Figure 1",
    )


def _cost_figure(material: Material, choice: Prediction) -> Figure:
    def value(row: Prediction) -> tuple[float, float | None, float | None]:
        low, high = (end and row.cost * end / row.hours for end in (row.hours_low, row.hours_high))
        return row.cost, low, high

    recommendation = material.shown_recommendation
    price = "" if recommendation is None else f" Price: {recommendation.price.splitlines()[0]}."
    return Figure(
        "cost_by_batch",
        "Cost of the training",
        f"Cost of the whole training against the global batch.{price} {INTERVALS} Cost is as uncertain as the time is.",
        "global batch",
        f"cost ({material.currency})",
        tuple(_curves(material.rows, value, choice)),
        marks=_choice_marks(material, choice, choice.cost),
        x_scale="log2",
        y_scale=scale_of([row.cost for row in material.rows]),
        paper="Figure 10",
    )


def _front_figure(material: Material, choice: Prediction) -> Iterator[Figure]:
    rows = sorted(material.rows, key=lambda row: (row.hours, row.cost))
    if len(rows) < 2:
        return
    factor, unit = hours_unit(row.hours for row in rows)
    best = [row for row in rows if row.pareto]

    def series(name: str, rows: Sequence[Prediction], style: str) -> Series:
        xs, ys = tuple(row.hours * factor for row in rows), tuple(row.cost for row in rows)
        return Series(name, xs, ys, style=style, measured=tuple(row.measured for row in rows))  # type: ignore[arg-type]

    yield Figure(
        "front",
        "Cost against time",
        "Every configuration that is drawn above. Nothing is faster and as cheap, or as fast and cheaper, than what is on the"
        " front. Filled markers are measured, open ones predicted.",
        f"time ({unit})",
        f"cost ({material.currency})",
        (series("configurations", rows, "points"), *([series("front", best, "line+points")] if best else [])),
        marks=(chosen_mark(choice, choice.hours * factor, choice.cost),),
    )
