"""The choice, its reasons and its alternatives."""

from collections.abc import Iterator, Sequence

from tula_cli.run.records.recommendations import Caveats, Prediction, Recommendation
from tula_cli.services.reporting.document import Cell, Column, Fact, Section, Table
from tula_cli.services.reporting.figures import (
    as_sentence,
    bytes_unit,
    convert,
    describe_nodes,
    describe_notes,
    explain_notes,
    hours_unit,
    is_priced,
)
from tula_cli.services.reporting.material import Material
from tula_cli.words import configuration, duration, interval_of_hours, number, time_unit

KEY, TITLE = "choice", "What was chosen"


def choice_section(material: Material) -> Section:
    """Return the choice with its reason, and the table of what was possible."""
    recommendation, choice = material.shown_recommendation, material.choice
    if recommendation is None or choice is None:
        return Section(KEY, TITLE, missing=f"nothing is chosen: {material.unanswered}")
    rows = recommendation.rows if material.answer is None else material.answer.recommendation.rows
    text = [as_sentence(recommendation.reason), *_extra_sentences(material, recommendation)]
    if material.has_changed:
        text.append(
            f"By all that was measured and trained up to now that configuration takes {_describe_time(choice)}; tables and figures have it so."
        )
    if (moved := material.changed_choice) is not None:
        text.append(
            f"Asked again now, the answer would be {configuration(moved.nodes, moved.batch, moved.local_batch)};"
            " tula recommend renews it."
        )
    if material.answer is None:
        text.append(f"These are the figures of that answer, and not of now: {material.unanswered}.")
    tables = [
        _possible_table(rows, choice, recommendation.currency),
        *_time_parts_tables(recommendation.choice),
        *_length_tables(recommendation),
    ]
    return Section(KEY, TITLE, tuple(text), tuple(_choice_facts(recommendation)), tuple(tables))


def _describe_time(row: Prediction) -> str:
    return f"{duration(3600 * row.hours)}{interval_of_hours(row.hours_low, row.hours_high)}"


def _extra_sentences(material: Material, recommendation: Recommendation) -> Iterator[str]:
    """Yield what else is worth a sentence of a choice."""
    progress, other_market, fallback = (
        recommendation.choice.same_progress,
        recommendation.other_market,
        recommendation.fallback,
    )
    accuracy = (
        recommendation.accuracy
        if material.answer is None
        else material.answer.recommendation.accuracy or recommendation.accuracy
    )
    if progress is not None:
        yield (
            f"To the progress of the small batch: {number(progress.epochs)} epochs, {duration(3600 * progress.hours)}"
            f"{interval_of_hours(progress.hours_low, progress.hours_high)}, {number(progress.cost)} {recommendation.currency}."
        )
    if other_market is not None:
        market = "on spot nodes" if other_market.market == "spot" else "on demand"
        yield f"The same {market}: {duration(3600 * other_market.hours)}, {number(other_market.cost)} {recommendation.currency}."
    if fallback is not None:
        yield (
            f"After an out-of-memory it goes on with batch {fallback.batch} as micro-batch {fallback.micro_batch} x"
            f" {fallback.micro_batches}: a step {number(1000 * fallback.step_time)} ms,"
            f" {duration(3600 * fallback.hours)} in all ({fallback.basis})."
        )
    if accuracy is not None:
        yield f"Accuracy: it {accuracy.words}."


def _choice_facts(recommendation: Recommendation) -> Iterator[Fact]:
    values = {
        "asked by": recommendation.criteria,
        "price": recommendation.price,
        "fit": recommendation.fit,
        "energy": recommendation.power,
        "same progress": recommendation.efficiency,
        "stages": recommendation.ramp,
        "checkpoints": recommendation.interruption,
    }
    yield from (Fact(name, value) for name, value in values.items() if value)
    yield from (Fact("note", text) for text in recommendation.warnings)


def _possible_table(rows: Sequence[Prediction], choice: Prediction, currency: str) -> Table:
    """Return the table of configurations, fastest first."""
    to_unit, unit = hours_unit(row.hours for row in rows)
    to_size, size = bytes_unit(row.peak_memory for row in rows)
    caveats = Caveats.among_rows(rows, choice)
    notes = [caveats.caveats_of(row) for row in rows]
    typed, spot = any(row.type for row in rows), any(row.market == "spot" for row in rows)
    energy, priced = any(row.kwh is not None for row in rows), is_priced(rows, currency)
    columns = [Column("nodes"), *([Column("type", align="left")] if typed else []), Column("batch"), Column("local batch"),
               Column("step", "ms", digits=3), Column("time", unit, digits=3), Column("from", unit, digits=3),
               Column("to", unit, digits=3), Column("node-hours", digits=3),
               *([Column("cost", currency, digits=3)] if priced else []),
               *([Column("energy", "kWh", digits=3)] if energy else []), Column("memory of a GPU", size, digits=3),
               Column("free", "%", digits=3), *([Column("market", align="left")] if spot else []),
               Column("basis", align="left"), *([Column("note", align="left")] if any(notes) else [])]  # fmt: skip

    def cells(row: Prediction) -> tuple[Cell, ...]:
        return (
            row.nodes, *([row.type] if typed else []), row.batch, row.local_batch,
            1000 * row.step_time, row.hours * to_unit, convert(row.hours_low, to_unit), convert(row.hours_high, to_unit),
            row.all_node_hours, *([row.cost] if priced else []), *([row.kwh] if energy else []), convert(row.peak_memory, to_size),
            convert(row.headroom, 100), *([row.market.replace("_", " ")] if spot else []), describe_basis(row),
            *([describe_notes(caveats.caveats_of(row))] if any(notes) else []),
        )  # fmt: skip

    chosen_key = (choice.type, choice.nodes, choice.batch, choice.market)
    marks = [
        "chosen" if (row.type, row.nodes, row.batch, row.market) == chosen_key else "front" if row.pareto else ""
        for row in rows
    ]
    return Table(
        "configurations",
        "Configurations",
        tuple(columns),
        tuple(map(cells, rows)),
        f"{'Time, node-hours and cost' if priced else 'Time and node-hours'} are those of the whole training; from and to are"
        " the ends of the 90 % interval of the time."
        f" Marked besides the choice: nothing is faster and as cheap, or as fast and cheaper.{explain_notes(notes)}",
        tuple(marks),
    )


def describe_basis(row: Prediction) -> str:
    """Return what the step time of a configuration rests on, in a word or two."""
    return "measured" if row.measured else "trained" if row.trained else "predicted"


def _time_parts_tables(choice: Prediction) -> Iterator[Table]:
    """Yield where the time of the training goes, as far as that is forecast."""
    parts = choice.parts
    if parts is None:
        return
    divisor, unit = time_unit(parts.total)
    names = {"steps": "steps", "data": "of them waiting for data", "evaluation": "evaluation", "checkpoints": "checkpoints",
             "branches": "branches of self-tuning", "rest": "starts and ends"}  # fmt: skip
    told = [(name, getattr(parts, field_name)) for field_name, name in names.items()]
    rows = tuple((name, seconds / divisor, 100 * seconds / parts.total) for name, seconds in told if seconds)
    columns = (Column("part", align="left"), Column("time", unit, digits=3), Column("share", "%", digits=3))
    title = f"Where the time of the choice goes: {describe_nodes(choice)}, batch {choice.batch}"
    yield Table("training_parts", title, columns, rows)


def _length_tables(recommendation: Recommendation) -> Iterator[Table]:
    """Yield what the job takes at other lengths of text."""
    if not recommendation.lengths:
        return
    columns = (Column("length"), Column("padding", "%", digits=3), Column("largest batch"), Column("fastest batch"),
               Column("tokens/s", digits=3), Column("note", align="left"))  # fmt: skip
    rows = []
    for length in recommendation.lengths:
        best = length.fastest
        best_cells = (None, None) if best is None else (best.batch, length.tokens_per_second(best))
        rows.append(
            (
                length.length,
                100 * length.padding,
                length.largest_batch,
                *best_cells,
                "the job's own" if length.own else length.note,
            )
        )
    nodes = recommendation.lengths[0].nodes
    yield Table("lengths", f"Lengths of text, on {nodes} nodes" if nodes > 1 else "Lengths of text, on 1 node", columns, tuple(rows), as_sentence(recommendation.growth))  # fmt: skip
