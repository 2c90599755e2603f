"""The training: what it came to, predicted against actual, its attempts and their ends, and its curves."""

from collections.abc import Iterator

from tula_cli.run.records.results import Evaluated, Summary
from tula_cli.services.reporting.document import Cell, Column, Fact, Section, Table
from tula_cli.services.reporting.material import Material
from tula_cli.services.reporting.sections.training_curves import figures
from tula_cli.services.reporting.training_look import TrainingLook, trainings
from tula_cli.words import duration, first_line, moment, number, percent, plural, time_unit

KEY, TITLE = "training", "The training"
NAMES = {"top1": "top-1 (%), last epoch", "top5": "top-5 (%), last epoch", "eval_loss": "evaluation loss, last epoch"}
TRAIN = "nothing was trained yet: tula train trains what is recommended"


def section(seen: Material) -> Section:
    """Return the newest training of each type of node."""
    found = trainings(seen)
    if not found:
        return Section(KEY, TITLE, missing=TRAIN)
    return Section(
        KEY,
        TITLE,
        tuple(text for one in found for text in _text(one)),
        tuple(fact for one in found for fact in _facts(one)),
        tuple(table for one in found for table in _tables(one)),
        tuple(figure for one in found for figure in figures(one, suffix=_suffix(one))),
    )


def _suffix(one: TrainingLook) -> str:
    return f"_{one.part.name}" if one.part.name else ""


def _text(one: TrainingLook) -> Iterator[str]:
    task, end = one.task, one.summary
    where = f"on {plural(task.own_nodes)}{f' of type {one.part.name}' if one.part.name else ''}"
    others = f", the newest of {one.count}" if one.count > 1 else ""
    if end is None:
        batch = f"batch {task.batch}"
        yield f"Training {task.signature}{others}, {where}, {batch}: {one.state}{_so_far(one)}."
    else:
        changed = f" (started with {end.start_batch})" if end.batch != end.start_batch else ""
        yield f"Training {task.signature}{others}, {where}, batch {end.batch}{changed}: done in {duration(3600 * end.actual_hours)}."
        if end.ended:
            yield f"It ended {end.ended} (train.until); what is predicted is for the epochs that it took."
    for cause in end.causes if end is not None else ():
        yield f"Relaunched: {first_line(cause)}."


def _so_far(one: TrainingLook) -> str:
    """Say how far a training is that has not ended."""
    now = one.part.now.training
    if now is None or now.signature != one.task.signature:
        return ""
    epochs = f", epoch {now.epoch:.2f} of {now.epochs}" if now.epochs is not None else ""
    left = f", {duration(now.eta)} left" if now.eta is not None else ""
    return f"{epochs}, {now.samples} samples{left}"


def _facts(one: TrainingLook) -> Iterator[Fact]:
    task, end = one.task, one.summary
    yield Fact("method", task.spec.train.method)
    yield Fact("attempts", str(len(one.attempts)))
    if (result := one.files.result()) is not None:
        yield Fact("samples", f"{result.samples} in {result.steps} steps")
    if end is not None:
        yield from _best(end)
        yield from (Fact(NAMES.get(name, name), number(value, 4)) for name, value in end.metrics.items())
    for found in one.files.evaluations():
        yield Fact(f"{found.weights} weights", _evaluated(found))
    warnings = dict.fromkeys(row["message"] for row in one.of_kind("warning"))
    yield from (Fact("warning", text) for text in warnings)


def _best(end: Summary) -> Iterator[Fact]:
    at = f" at epoch {end.best_epoch}" if end.best_epoch else ""
    if end.best is not None:
        yield Fact(f"best {end.best.metric}", f"{number(end.best.value, 4)}{at}")
    elif "top1" in end.metrics:
        yield Fact("best top-1", f"{number(end.best_top1, 4)} %{at}")
    elif end.best_loss is not None:
        yield Fact("least loss", f"{number(end.best_loss, 4)}{at}")


def _evaluated(found: Evaluated) -> str:
    told = ", ".join(f"{metric} {number(value, 4)}" for metric, value in found.metrics.items())
    return f"on the {'test' if found.test else 'validation'} set: {told}"


def _tables(one: TrainingLook) -> Iterator[Table]:
    if one.summary is not None:
        yield _against_actual(one, one.summary)
    if one.attempts:
        yield _attempts(one)
    tuning = one.files.tuning()
    if tuning is not None and tuning.branches:
        columns = (Column("arm", align="left"), Column("rung"), Column("epochs", digits=3), Column("held-out loss", digits=4),
                   Column("top-1", "%", digits=4), Column("", align="left"))  # fmt: skip
        chosen = tuning.chosen.name if tuning.chosen is not None else None
        rows = tuple((b.arm, b.rung, b.epochs, b.loss, b.top1, "diverged" if b.diverged else "chosen" if b.arm == chosen else "") for b in tuning.branches)  # fmt: skip
        yield Table(f"tuning{_suffix(one)}", "Branches of the self-tuning", columns, rows)


def _against_actual(one: TrainingLook, end: Summary) -> Table:
    """Return what was predicted beside what came of it; errors are of the prediction, shares of the actual value."""
    divisor, unit = time_unit(3600 * end.actual_hours)
    told: list[tuple[str, str, float | None, float | None, float]] = [
        ("step time", "ms", end.predicted_step, end.actual_step, 1000),
        ("time", unit, end.predicted_hours, end.actual_hours, 3600 / divisor),
        *((f"time: {name}", unit, predicted, actual, 1 / divisor) for name, predicted, actual in _parts(end)),
        ("cost", end.currency, end.predicted_cost, end.actual_cost, 1),
        ("energy", "kWh", end.predicted_kwh, end.actual_kwh, 1),
    ]
    rows: list[tuple[Cell, ...]] = []
    for name, unit_, predicted, actual, factor in told:
        if predicted is None and actual is None:
            continue
        error = None if predicted is None or not actual else 100 * (predicted - actual) / actual
        here, there = (None if value is None else value * factor for value in (predicted, actual))
        rows.append((name, unit_, here, there, error))
    columns = (Column("", align="left"), Column("unit", align="left"), Column("predicted", digits=3), Column("actual", digits=3), Column("error", "%", digits=3))  # fmt: skip
    counted = "" if end.counted is None else f" Energy was counted over {percent(end.counted)} % of the time."
    caption = f"Errors are those of the prediction, as shares of the actual value.{counted}"
    return Table(f"predicted_actual{_suffix(one)}", "Predicted and actual", columns, tuple(rows), caption)


def _parts(end: Summary) -> Iterator[tuple[str, float | None, float | None]]:
    """Yield where the time went (seconds): the name of each part that there is, predicted and actual."""
    if end.actual_parts is None:
        return
    names = {"steps": "steps", "data": "of them waiting for data", "evaluation": "evaluation", "checkpoints": "checkpoints",
             "branches": "branches of self-tuning", "rest": "starts, ends, repeated"}  # fmt: skip
    for part, name in names.items():
        actual, predicted = getattr(end.actual_parts, part), getattr(end.predicted_parts, part, None)
        if actual or predicted:
            yield name, predicted, actual


def _attempts(one: TrainingLook) -> Table:
    tasks = {task.id: task for task in one.files.tasks()}
    took = [(attempt.ended_at or one.part.now.at) - attempt.started_at for attempt in one.attempts]
    divisor, unit = time_unit(max(took))
    columns = (Column("attempt", align="left"), Column("started", align="left"), Column("took", unit, digits=3), Column("nodes"),
               Column("batch"), Column("from sample"), Column("ended", align="left"), Column("because", align="left"))  # fmt: skip
    rows = tuple(
        (f"{attempt.task} no. {attempt.number}", moment(attempt.started_at), seconds / divisor,
         tasks[attempt.task].nodes if attempt.task in tasks else None, tasks[attempt.task].batch if attempt.task in tasks else None,
         attempt.samples, attempt.outcome or "open", first_line(attempt.message))
        for attempt, seconds in zip(one.attempts, took, strict=True)
    )  # fmt: skip
    return Table(f"attempts{_suffix(one)}", "Attempts", columns, rows)
