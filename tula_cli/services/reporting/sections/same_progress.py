"""The gradient noise scale, and what each batch takes to the same progress."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from tula_cli.models.choice.objective import envelope
from tula_cli.models.efficiency import Noise
from tula_cli.run.records.recommendations import Caveats, Prediction, SameProgress
from tula_cli.services.recommendation.measured import gradient_noise_of_job
from tula_cli.services.reporting.document import Cell, Column, Fact, Figure, Mark, Section, Series, Table
from tula_cli.services.reporting.figures import (
    as_sentence,
    chosen_mark,
    describe_notes,
    explain_notes,
    hours_unit,
    value_of,
)
from tula_cli.services.reporting.material import Material
from tula_cli.words import is_too_wide, number

KEY, TITLE = "same_progress", "Gradient noise and the same progress"


def same_progress_section(material: Material) -> Section:
    """Return the noise scale, how it went over the training, and the time to the same progress by batch."""
    if material.answer is None or material.choice is None:
        return Section(KEY, TITLE, missing=f"no gradient noise is known: {material.unanswered}")
    noise, trained = gradient_noise_of_job(material.answer.all_measurements, needed=False), _noise_rows(material)
    rows = (
        [row for row in envelope(material.rows, curve="accuracy-time") if row.same_progress]
        if _has_progress(material.rows)
        else []
    )
    if noise is None and not trained:
        return Section(KEY, TITLE, missing=NO_NOISE)
    facts = [Fact("noise scale", _describe_scale(noise))] if noise is not None else []
    description = material.shown_recommendation.efficiency if material.shown_recommendation is not None else ""
    figures = [*_noise_figures(trained), *_progress_figures(material, rows, material.choice)]
    return Section(
        KEY,
        TITLE,
        (as_sentence(description),) if description else (),
        tuple(facts),
        tuple(_progress_tables(material, rows)),
        tuple(figures),
    )


NO_NOISE = (
    "gradients were not measured: it takes probes on two or more GPUs, or a local batch of 2 or more (of a script"
    " DistributedDataParallel); a training with train.gradient_noise measures the noise after each epoch"
)


def _has_progress(rows: Sequence[Prediction]) -> bool:
    return bool(rows) and all(row.same_progress is not None for row in rows)


def _describe_scale(noise: Noise) -> str:
    high = "more than can be told" if math.isinf(noise.high) else number(noise.high)
    at = f"after epoch {noise.epoch:g}" if noise.epoch else "at the start of training"
    return f"{number(noise.scale)} samples ({number(noise.low)} to {high}), {at}"


def _noise_rows(material: Material) -> list[dict[str, Any]]:
    """Return what the newest training has measured of its noise, by epoch."""
    for part_material in material.own_parts:
        if part_material.now.training is not None:
            rows = part_material.look.training(part_material.now.training.signature).sampled_metrics()
            noisy = [row for row in rows if row["kind"] == "noise"]
            if found := [row for row in noisy if (value_of(row, "scale") or 0.0) > 0]:
                return found
    return []


def _noise_figures(rows: Sequence[dict[str, Any]]) -> Iterator[Figure]:
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


def _require_progress(row: Prediction) -> SameProgress:
    assert row.same_progress is not None  # of those that were picked out
    return row.same_progress


def _caveats(material: Material, row: Prediction) -> list[str]:
    """Return what the figures of a batch on the way to the same progress leave open."""
    names = [] if material.choice is None else Caveats.among_rows([row], material.choice).caveats_of(row)
    wide = is_too_wide(_require_progress(row).hours_low, _require_progress(row).hours_high)
    return [*["wide_interval"] * wide, *(name for name in names if name == "progress_within_noise")]


def _progress_tables(material: Material, rows: Sequence[Prediction]) -> Iterator[Table]:
    if not rows:
        return
    to_unit, unit = hours_unit([*(_require_progress(row).hours for row in rows), *(row.hours for row in rows)])
    notes = [_caveats(material, row) for row in rows]
    columns = (Column("batch"), Column("nodes"), Column("epochs", digits=3), Column("from", digits=3), Column("to", digits=3),
               Column("time to the same progress", unit, digits=3), Column("from", unit, digits=3), Column("to", unit, digits=3),
               Column("cost", material.currency, digits=3), Column("time for the job's epochs", unit, digits=3),
               *([Column("note", align="left")] if any(notes) else []))  # fmt: skip
    rows_with_progress = [(row, _require_progress(row)) for row in rows]
    cells: tuple[tuple[Cell, ...], ...] = tuple(
        (row.batch, row.nodes, progress.epochs, progress.epochs_low, progress.epochs_high, progress.hours * to_unit, progress.hours_low * to_unit,
         progress.hours_high * to_unit, progress.cost, row.hours * to_unit,
         *([describe_notes(names)] if any(notes) else []))
        for (row, progress), names in zip(rows_with_progress, notes, strict=True)
    )  # fmt: skip
    caption = f"The best configuration of each batch to the progress of the job's epochs at batch {material.spec.train.reference_batch}; from and to are a 90 % interval.{explain_notes(notes)}"
    marks = tuple("chosen" if material.choice is not None and row == material.choice else "" for row in rows)
    yield Table("same_progress", "Time to the same progress", columns, cells, caption, marks)


def _progress_figures(material: Material, rows: Sequence[Prediction], choice: Prediction) -> Iterator[Figure]:
    if len(rows) < 2:
        return
    progress_by_row = [_require_progress(row) for row in rows]
    factor, unit = hours_unit([*(own.hours for own in progress_by_row), *(row.hours for row in rows)])
    xs = tuple(float(row.batch) for row in rows)
    progress = Series(
        "to the same progress",
        xs,
        tuple(own.hours * factor for own in progress_by_row),
        tuple(own.hours_low * factor for own in progress_by_row),
        tuple(own.hours_high * factor for own in progress_by_row),
    )
    fixed = Series("for the job's epochs", xs, tuple(row.hours * factor for row in rows), style="line")
    y = choice.same_progress.hours if choice.same_progress is not None else choice.hours
    reference = Mark(float(material.spec.train.reference_batch), None, "reference batch", "event")
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
