"""Alternatives to a choice with a batch-size ramp: its nodes throughout, its batch fixed, and the reference batch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tula_cli.models.choice.grid import Config
from tula_cli.models.forecast import Forecast
from tula_cli.models.ramp.stage_nodes import nodes_named_by_stages
from tula_cli.models.ramp.stages import Ramp
from tula_cli.run.records.recommendations import Beside, Prediction
from tula_cli.spec.job import JobSpec
from tula_cli.words import duration, number, plural


def ramp_alternatives(forecast: Forecast, choice: Prediction) -> tuple[Beside, ...]:
    """Return what a choice takes whose batch grows, and beside it what it would without that; none where its batch stays.

    Nodes of the reference batch are those where it takes the least by what stages go by, time or cost. That a fixed batch may lose
    accuracy is not in it: `tula compare` tells.

    Args:
        forecast: on the nodes' type of the choice.
        choice: on demand, or on spot nodes, as the others then are.
    """
    spec = forecast.spec
    if not choice.stages:
        return ()
    predictions: dict[str, Prediction | None] = {"as chosen": choice}
    if any(stage.nodes is not None for stage in choice.stages) and not nodes_named_by_stages(spec):
        predictions["its nodes throughout"] = _predict_batch(
            _with_train_settings(forecast, ramp_nodes="same"), choice, choice.batch
        )
    fixed = _with_train_settings(
        forecast, ramp=None, ramp_nodes="same", ramp_noise=None, **({"method": "lrs"} if spec.train.facts.ramps else {})
    )
    predictions["a fixed batch"] = _predict_batch(fixed, choice, choice.batch)
    reference = [
        row
        for row in fixed.offers().records()
        if row.batch == spec.train.reference_batch and row.market == choice.market
    ]
    if reference:
        by_cost = forecast.stages_by == "cost"
        predictions["the reference batch"] = min(reference, key=lambda row: row.cost if by_cost else row.hours)
    return tuple(
        Beside(
            what=name,
            nodes=row.nodes,
            batch=row.batch,
            hours=row.hours,
            cost=row.cost,
            node_hours=row.all_node_hours,
            steps=_count_steps(forecast, row),
        )
        for name, row in predictions.items()
        if row is not None
    )


def _count_steps(forecast: Forecast, row: Prediction) -> int:
    """Return the steps of a whole training, at the batches of its stages."""
    size, epochs = forecast.dataset_size, forecast.spec.train.epochs_at_most
    stages = forecast.trainings.stages.stage_positions(Config(row.nodes, row.batch)) if row.stages else ()
    return sum(
        (Ramp(stages) if stages else Ramp.constant(row.batch)).remaining_steps(size=size, epochs=epochs).values()
    )


def _with_train_settings(forecast: Forecast, **train: Any) -> Forecast:
    settings: Mapping[str, Any] = train
    return replace(
        forecast, spec=forecast.spec.model_copy(update={"train": forecast.spec.train.model_copy(update=dict(settings))})
    )


def _predict_batch(forecast: Forecast, choice: Prediction, batch: int) -> Prediction | None:
    """Return the forecast at the choice's nodes, on its market; None where it cannot run, or nothing tells."""
    configuration = Config(choice.nodes, batch)
    if forecast.why_not(configuration) or forecast.why_unknown(configuration):
        return None
    row = forecast.predict(configuration)
    return row if choice.market == "on_demand" else forecast.on_spot(row)


def describe_alternatives(alternatives: tuple[Beside, ...]) -> str:
    """Say it in words: hours, node-hours of each."""
    descriptions = [
        f"{alternative.what} (batch {alternative.batch} on {plural(alternative.nodes)}) {duration(3600 * alternative.hours)}, {number(alternative.node_hours)} node-h"
        for alternative in alternatives
    ]
    return "; ".join(descriptions)


def describe_decay_savings(spec: JobSpec, alternatives: tuple[Beside, ...]) -> str:
    """Return the steps, hours and cost that `train.ramp: decay` saves over the reference batch throughout, in words."""
    if spec.train.stages != "decay" or not alternatives:
        return ""
    rows = {row.what: row for row in alternatives}
    chosen, reference = rows["as chosen"], rows.get("the reference batch")
    if reference is None:
        return f"what the decay saves is not known: nothing tells the step time at batch {spec.train.reference_batch}"
    changes = [
        f"{after} instead of {reference_value} ({100 * (new / old - 1):+.0f} %)"
        for after, reference_value, new, old in (
            (f"{chosen.steps} steps", str(reference.steps), chosen.steps or 0, reference.steps or 1),
            (duration(3600 * chosen.hours), duration(3600 * reference.hours), chosen.hours, reference.hours),
            (f"{number(chosen.cost)} {spec.pricing.currency}", number(reference.cost), chosen.cost, reference.cost),
        )
    ]
    where = f"batch {reference.batch} throughout on {plural(reference.nodes)}"
    return f"decay spent as batch, compared with {where}: {', '.join(changes)}"
