"""The gradient noise scale, and what each batch takes to the same progress."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from tula_cli.models.choice.objective import envelope
from tula_cli.models.efficiency import Noise
from tula_cli.run.records.recommendations import Caveats, Prediction, SameProgress
from tula_cli.services.recommendation.measured import noise_of
from tula_cli.services.reporting.document import Cell, Column, Fact, Figure, Mark, Section, Series, Table
from tula_cli.services.reporting.material import Material
from tula_cli.services.reporting.training_look import value_of
from tula_cli.services.reporting.units import chosen_mark, note_words, notes_explained, of_hours, sentence
from tula_cli.words import is_too_wide, number

KEY, TITLE = "same_progress", "Gradient noise and the same progress"


def section(seen: Material) -> Section:
    """Return the noise scale, how it went over the training, and the time to the same progress by batch."""
    if seen.answer is None or seen.choice is None:
        return Section(KEY, TITLE, missing=f"no gradient noise is known: {seen.unanswered}")
    noise, trained = noise_of(seen.answer.all_measurements, needed=False), _trained(seen)
    rows = [row for row in envelope(seen.rows, curve="accuracy-time") if row.same_progress] if _told(seen.rows) else []
    if noise is None and not trained:
        return Section(KEY, TITLE, missing=UNTOLD)
    facts = [Fact("noise scale", _scale(noise))] if noise is not None else []
    words = seen.words.efficiency if seen.words is not None else ""
    figures = [*_noise(trained), *_figure(seen, rows, seen.choice)]
    return Section(
        KEY, TITLE, (sentence(words),) if words else (), tuple(facts), tuple(_table(seen, rows)), tuple(figures)
    )


UNTOLD = (
    "gradients were not measured: it takes probes on two or more GPUs, or a local batch of 2 or more (of a script"
    " DistributedDataParallel); tula profile --progress measures the noise a tenth into the training"
)


def _told(rows: Sequence[Prediction]) -> bool:
    return bool(rows) and all(row.same_progress is not None for row in rows)


def _scale(noise: Noise) -> str:
    high = "more than can be told" if math.isinf(noise.high) else number(noise.high)
    at = f"after epoch {noise.epoch:g}" if noise.epoch else "at the start of training"
    return f"{number(noise.scale)} samples ({number(noise.low)} to {high}), {at}"


def _trained(seen: Material) -> list[dict[str, Any]]:
    """Return what the newest training has measured of its noise, by epoch."""
    for one in seen.own_parts:
        if one.now.training is not None:
            rows = one.look.training(one.now.training.signature).sampled_metrics()
            noisy = [row for row in rows if row["kind"] == "noise"]
            if found := [row for row in noisy if (value_of(row, "scale") or 0.0) > 0]:
                return found
    return []


def _noise(rows: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    if not rows:
        return
    low, high = (tuple(value_of(row, name) for row in rows) for name in ("low", "high"))
    yield Figure(
        "noise_scale",
        "Gradient noise scale over the training",
        "As the training has measured it on its way; bars are 90 % intervals. Beside it the batch that it then had.",
        "epoch",
        "samples",
        (
            Series("noise scale", tuple(float(row["epoch"]) for row in rows), tuple(row["scale"] for row in rows), low, high),
            Series("batch", tuple(float(row["epoch"]) for row in rows), tuple(float(row["batch"]) for row in rows), style="line"),
        ),
        y_scale="log",
    )  # fmt: skip


def _progress(row: Prediction) -> SameProgress:
    assert row.same_progress is not None  # of those that were picked out
    return row.same_progress


def _caveats(seen: Material, row: Prediction) -> list[str]:
    """Return what the figures of a batch on the way to the same progress leave open."""
    names = [] if seen.choice is None else Caveats.among([row], seen.choice).of(row)
    wide = is_too_wide(_progress(row).hours_low, _progress(row).hours_high)
    return [*["wide_interval"] * wide, *(name for name in names if name == "progress_within_noise")]


def _table(seen: Material, rows: Sequence[Prediction]) -> Iterator[Table]:
    if not rows:
        return
    to_unit, unit = of_hours([*(_progress(row).hours for row in rows), *(row.hours for row in rows)])
    notes = [_caveats(seen, row) for row in rows]
    columns = (Column("batch"), Column("nodes"), Column("epochs", digits=3), Column("from", digits=3), Column("to", digits=3),
               Column("time to the same progress", unit, digits=3), Column("from", unit, digits=3), Column("to", unit, digits=3),
               Column("cost", seen.currency, digits=3), Column("time for the job's epochs", unit, digits=3),
               *([Column("note", align="left")] if any(notes) else []))  # fmt: skip
    found = [(row, _progress(row)) for row in rows]
    cells: tuple[tuple[Cell, ...], ...] = tuple(
        (row.batch, row.nodes, own.epochs, own.epochs_low, own.epochs_high, own.hours * to_unit, own.hours_low * to_unit,
         own.hours_high * to_unit, own.cost, row.hours * to_unit,
         *([note_words(names)] if any(notes) else []))
        for (row, own), names in zip(found, notes, strict=True)
    )  # fmt: skip
    caption = f"The best configuration of each batch to the progress of the job's epochs at batch {seen.spec.train.reference_batch}; from and to are a 90 % interval.{notes_explained(notes)}"
    marks = tuple("chosen" if seen.choice is not None and row == seen.choice else "" for row in rows)
    yield Table("same_progress", "Time to the same progress", columns, cells, caption, marks)


def _figure(seen: Material, rows: Sequence[Prediction], choice: Prediction) -> Iterator[Figure]:
    if len(rows) < 2:
        return
    found = [_progress(row) for row in rows]
    factor, unit = of_hours([*(own.hours for own in found), *(row.hours for row in rows)])
    xs = tuple(float(row.batch) for row in rows)
    progress = Series(
        "to the same progress",
        xs,
        tuple(own.hours * factor for own in found),
        tuple(own.hours_low * factor for own in found),
        tuple(own.hours_high * factor for own in found),
    )
    fixed = Series("for the job's epochs", xs, tuple(row.hours * factor for row in rows), style="line")
    y = choice.same_progress.hours if choice.same_progress is not None else choice.hours
    reference = Mark(float(seen.spec.train.reference_batch), None, "reference batch", "event")
    yield Figure(
        "same_progress",
        "Time to the same progress against the batch",
        "Of each batch its best configuration; bars are 90 % intervals over what the noise leaves open.",
        "global batch",
        f"time ({unit})",
        (progress, fixed),
        marks=(chosen_mark(choice, choice.batch, y * factor), *([reference] if xs[0] <= (reference.x or 0) <= xs[-1] else [])),
        x_scale="log2",
    )  # fmt: skip
