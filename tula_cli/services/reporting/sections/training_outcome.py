"""The training: what it came to, predicted against actual, its attempts and their ends, and its curves."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tula_cli.run.records.results import Evaluated, Summary
from tula_cli.services.reporting.document import Cell, Column, Fact, Figure, Mark, Section, Series, Table
from tula_cli.services.reporting.figures import Row, TrainingMaterial, newest_trainings, thin_out, value_of
from tula_cli.services.reporting.material import Material
from tula_cli.words import duration, first_line, moment, number, percent, plural, time_unit

KEY, TITLE = "training", "The training"
NAMES = {"top1": "top-1 (%), last epoch", "top5": "top-5 (%), last epoch", "eval_loss": "evaluation loss, last epoch"}
TRAIN = "nothing was trained yet: tula train trains what is recommended"
Place = Callable[[Row], float]
TITLES = {"top1": "Top-1 accuracy", "eval_loss": "Loss on the evaluation set", "perplexity": "Perplexity"}
UNITS = {"top1": "top-1 (%)", "eval_loss": "loss"}


def training_section(material: Material) -> Section:
    """Return the newest training of each type of node."""
    trainings = newest_trainings(material)
    if not trainings:
        return Section(KEY, TITLE, missing=TRAIN)
    return Section(
        KEY,
        TITLE,
        tuple(text for training in trainings for text in _describe_training(training)),
        tuple(fact for training in trainings for fact in _training_facts(training)),
        tuple(table for training in trainings for table in _training_tables(training)),
        tuple(figure for training in trainings for figure in figures(training, suffix=_figure_suffix(training))),
    )


def _figure_suffix(training: TrainingMaterial) -> str:
    return f"_{training.part.name}" if training.part.name else ""


def _describe_training(training: TrainingMaterial) -> Iterator[str]:
    task, end = training.task, training.summary
    where = f"on {plural(task.own_nodes)}{f' of type {training.part.name}' if training.part.name else ''}"
    others_text = f", the newest of {training.count}" if training.count > 1 else ""
    if end is None:
        batch = f"batch {task.batch}"
        yield f"Training {task.signature}{others_text}, {where}, {batch}: {training.state}{_describe_progress(training)}."
    else:
        changed = f" (started with {end.start_batch})" if end.batch != end.start_batch else ""
        yield f"Training {task.signature}{others_text}, {where}, batch {end.batch}{changed}: done in {duration(3600 * end.actual_hours)}."
        if end.ended:
            yield f"It ended {end.ended} (train.early_stopping); what is predicted is for the epochs that it took."
    for cause in end.causes if end is not None else ():
        yield f"Relaunched: {first_line(cause)}."


def _describe_progress(training: TrainingMaterial) -> str:
    """Say how far a training is that has not ended."""
    training_status = training.part.now.training
    if training_status is None or training_status.signature != training.task.signature:
        return ""
    epochs = (
        f", epoch {training_status.epoch:.2f} of {training_status.epochs}" if training_status.epochs is not None else ""
    )
    remaining_text = f", {duration(training_status.eta)} left" if training_status.eta is not None else ""
    return f"{epochs}, {training_status.samples} samples{remaining_text}"


def _training_facts(training: TrainingMaterial) -> Iterator[Fact]:
    task, end = training.task, training.summary
    yield Fact("method", task.spec.train.method)
    yield Fact("attempts", str(len(training.attempts)))
    if (result := training.files.result()) is not None:
        yield Fact("samples", f"{result.samples} in {result.steps} steps")
    if end is not None:
        yield from _best_facts(end)
        yield from (Fact(NAMES.get(name, name), number(value, 4)) for name, value in end.metrics.items())
    for evaluation in training.files.evaluations():
        yield Fact(f"{evaluation.weights} weights", _describe_evaluation(evaluation))
    warnings = dict.fromkeys(row["message"] for row in training.rows_of_kind("warning"))
    yield from (Fact("warning", text) for text in warnings)


def _best_facts(end: Summary) -> Iterator[Fact]:
    at = f" at epoch {end.best_epoch}" if end.best_epoch else ""
    if end.best is not None:
        yield Fact(f"best {end.best.metric}", f"{number(end.best.value, 4)}{at}")
    elif "top1" in end.metrics:
        yield Fact("best top-1", f"{number(end.best_top1, 4)} %{at}")
    elif end.best_loss is not None:
        yield Fact("least loss", f"{number(end.best_loss, 4)}{at}")


def _describe_evaluation(evaluation: Evaluated) -> str:
    metrics_text = ", ".join(f"{metric} {number(value, 4)}" for metric, value in evaluation.metrics.items())
    return f"on the {'test' if evaluation.test else 'validation'} set: {metrics_text}"


def _training_tables(training: TrainingMaterial) -> Iterator[Table]:
    if training.summary is not None:
        yield _predicted_against_actual(training, training.summary)
    if training.attempts:
        yield _attempts_table(training)
    tuning = training.files.tuning()
    if tuning is not None and tuning.branches:
        columns = (Column("arm", align="left"), Column("rung"), Column("epochs", digits=3), Column("held-out loss", digits=4),
                   Column("top-1", "%", digits=4), Column("", align="left"))  # fmt: skip
        chosen = tuning.chosen.name if tuning.chosen is not None else None
        rows = tuple((b.arm, b.rung, b.epochs, b.loss, b.top1, "diverged" if b.diverged else "chosen" if b.arm == chosen else "") for b in tuning.branches)  # fmt: skip
        yield Table(f"tuning{_figure_suffix(training)}", "Branches of the self-tuning", columns, rows)


def _predicted_against_actual(training: TrainingMaterial, end: Summary) -> Table:
    """Return what was predicted beside what came of it; errors are of the prediction, shares of the actual value."""
    divisor, unit = time_unit(3600 * end.actual_hours)
    told: list[tuple[str, str, float | None, float | None, float]] = [
        ("step time", "ms", end.predicted_step, end.actual_step, 1000),
        ("time", unit, end.predicted_hours, end.actual_hours, 3600 / divisor),
        *((f"time: {name}", unit, predicted, actual, 1 / divisor) for name, predicted, actual in _time_parts(end)),
        ("cost", end.currency, end.predicted_cost, end.actual_cost, 1),
        ("energy", "kWh", end.predicted_kwh, end.actual_kwh, 1),
    ]
    rows: list[tuple[Cell, ...]] = []
    for name, unit_, predicted, actual, factor in told:
        if predicted is None and actual is None:
            continue
        error = None if predicted is None or not actual else 100 * (predicted - actual) / actual
        predicted_value, actual_value = (None if value is None else value * factor for value in (predicted, actual))
        rows.append((name, unit_, predicted_value, actual_value, error))
    columns = (Column("", align="left"), Column("unit", align="left"), Column("predicted", digits=3), Column("actual", digits=3), Column("error", "%", digits=3))  # fmt: skip
    counted = "" if end.counted is None else f" Energy was counted over {percent(end.counted)} % of the time."
    caption = f"Errors are those of the prediction, as shares of the actual value.{counted}"
    return Table(f"predicted_actual{_figure_suffix(training)}", "Predicted and actual", columns, tuple(rows), caption)


def _time_parts(end: Summary) -> Iterator[tuple[str, float | None, float | None]]:
    """Yield where the time went (seconds): the name of each part that there is, predicted and actual."""
    if end.actual_parts is None:
        return
    names = {"steps": "steps", "data": "of them waiting for data", "evaluation": "evaluation", "checkpoints": "checkpoints",
             "branches": "branches of self-tuning", "rest": "starts, ends, repeated"}  # fmt: skip
    for field_name, name in names.items():
        actual, predicted = getattr(end.actual_parts, field_name), getattr(end.predicted_parts, field_name, None)
        if actual or predicted:
            yield name, predicted, actual


def _attempts_table(training: TrainingMaterial) -> Table:
    tasks = {task.id: task for task in training.files.tasks()}
    took = [(attempt.ended_at or training.part.now.at) - attempt.started_at for attempt in training.attempts]
    divisor, unit = time_unit(max(took))
    columns = (Column("attempt", align="left"), Column("started", align="left"), Column("took", unit, digits=3), Column("nodes"),
               Column("batch"), Column("from sample"), Column("ended", align="left"), Column("because", align="left"))  # fmt: skip
    rows = tuple(
        (f"{attempt.task} no. {attempt.number}", moment(attempt.started_at), seconds / divisor,
         tasks[attempt.task].nodes if attempt.task in tasks else None, tasks[attempt.task].batch if attempt.task in tasks else None,
         attempt.samples, attempt.outcome or "open", first_line(attempt.message))
        for attempt, seconds in zip(training.attempts, took, strict=True)
    )  # fmt: skip
    return Table(f"attempts{_figure_suffix(training)}", "Attempts", columns, rows)


def figures(training_material: TrainingMaterial, *, suffix: str) -> Iterator[Figure]:
    """Yield the curves of a training, those of which it has told something; `suffix` tells their keys from those of other parts."""
    for axis in _axes(training_material):
        for figure in (*axis.loss(training_material), *axis.metric(training_material)):
            yield _renamed(figure, suffix)
    samples = _axes(training_material)[0]
    for figure in (*samples.rate(training_material), *samples.step_time(training_material)):
        yield _renamed(figure, suffix)


def _renamed(figure: Figure, suffix: str) -> Figure:
    return replace(figure, key=f"{figure.key}{suffix}")


def _axes(training_material: TrainingMaterial) -> "list[_Axis]":
    found = [_Axis("samples", "samples seen", lambda row: float(row["samples"]))]
    began, times = (
        training_material.began_at,
        [row["time"] for row in training_material.rows if row.get("time") is not None],
    )
    if began is not None and times:
        divisor, unit = time_unit(max(times) - began)
        found.append(_Axis("time", f"time since its start ({unit})", lambda row: (row["time"] - began) / divisor))
    return found


class _Axis:
    """The horizontal axis of curves.

    Args:
        key: for the keys of the figures.
        label: of the axis.
        place: of a row.
    """

    def __init__(self, key: str, label: str, place: Place) -> None:
        self.key = key
        self.label = label
        self.place = place

    def series(
        self, name: str, rows: Sequence[Row], value: Callable[[Row], float | None], style: str = "line"
    ) -> Iterator[Series]:
        """Yield the curve of what rows tell; nothing where they tell nothing."""
        told = thin_out([(self.place(row), found) for row in rows if (found := value(row)) is not None])
        if told:
            xs, ys = zip(*told, strict=True)
            yield Series(name, xs, ys, style=style)  # type: ignore[arg-type]

    def starts(self, training_material: TrainingMaterial) -> tuple[Mark, ...]:
        """Return where attempts began after the first one, and where the batch changed."""
        marks = [
            Mark(self.place(row), None, f"attempt {number}", "event")
            for number, row in enumerate(training_material.rows_of_kind("start"), 1)
            if number > 1
        ]
        stages = training_material.rows_of_kind("stage")[1:]
        return (*marks, *(Mark(self.place(row), None, f"batch {row['batch']}", "event") for row in stages))

    def loss(self, training_material: TrainingMaterial) -> Iterator[Figure]:
        steps, epochs = training_material.rows_of_kind("step"), training_material.rows_of_kind("epoch")
        series = (
            *self.series("training", steps or epochs, lambda row: value_of(row, "loss")),
            *self.series("evaluation", epochs, lambda row: value_of(row, "eval_loss"), "line+points"),
        )
        if series:
            low = min(y for one_ in series for y in one_.y if y is not None)
            yield Figure(f"loss_by_{self.key}", f"Loss over {self.key}", "Of training steps as they were logged, and on the evaluation set at the end of epochs.",
                         self.label, "loss", series, marks=self.starts(training_material), y_scale="log" if low > 0 else "linear")  # fmt: skip

    def metric(self, training_material: TrainingMaterial) -> Iterator[Figure]:
        name, epochs = training_material.metric, training_material.rows_of_kind("epoch")
        if name == "eval_loss":  # it is in the figure of the loss
            return
        series = [
            *self.series(name if name != "top1" else "top-1", epochs, lambda row: value_of(row, name), "line+points")
        ]
        series += (
            self.series("top-5", epochs, lambda row: value_of(row, "top5"), "line+points") if name == "top1" else []
        )
        if series:
            title = TITLES.get(name, name)
            yield Figure(f"metric_by_{self.key}", f"{title} over {self.key}", "On the evaluation set, at the end of epochs.",
                         self.label, UNITS.get(name, name), tuple(series), marks=self.starts(training_material))  # fmt: skip

    def rate(self, training_material: TrainingMaterial) -> Iterator[Figure]:
        rows = training_material.rows_of_kind("step", "epoch")
        series = tuple(self.series("learning rate", rows, lambda row: value_of(row, "lr")))
        if series:
            yield Figure("learning_rate", "Learning rate", "Of the steps as they were logged.", self.label, "learning rate",
                         series, marks=self.starts(training_material))  # fmt: skip

    def step_time(self, training_material: TrainingMaterial) -> Iterator[Figure]:
        """Yield the step time as it was logged, beside what was predicted with its interval."""
        series = [*self.series("logged", training_material.rows_of_kind("step"), lambda row: _ms(row, "step_time"))]
        if not series:
            return
        predicted_rows = [
            row for row in training_material.rows_of_kind("epoch") if row.get("predicted_step") is not None
        ]
        if predicted_rows:
            predicted_rows = thin_out(predicted_rows)
            ends = [
                tuple(_ms(row, name) for row in predicted_rows) for name in ("predicted_step", "step_low", "step_high")
            ]
            series.append(
                Series(
                    "predicted",
                    tuple(self.place(row) for row in predicted_rows),
                    ends[0],
                    ends[1],
                    ends[2],
                    style="line",
                )
            )
        changes = tuple(
            Mark(float(change.samples), None, f"changed: {', '.join(change.parts)}", "event")
            for change in training_material.files.changes()
        )
        caption = "Means over the steps between two rows of the log; the band of the prediction is its 90 % interval."
        yield Figure("step_time", "Step time", caption, self.label, "step time (ms)", tuple(series), marks=(*self.starts(training_material), *changes))  # fmt: skip


def _ms(row: Row, name: str) -> float | None:
    value = value_of(row, name)
    return None if value is None else 1000 * value
