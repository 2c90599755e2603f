"""What stands beside a choice whose batch grows: the same with its nodes throughout, its batch fixed, and the reference batch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tula_cli.models.choice.grid import Config
from tula_cli.models.forecast import Forecast
from tula_cli.models.ramp.stage_nodes import named
from tula_cli.models.ramp.stages import Ramp
from tula_cli.run.records.recommendations import Beside, Prediction
from tula_cli.spec.job import JobSpec
from tula_cli.words import duration, number, plural


def beside_a_ramp(forecast: Forecast, choice: Prediction) -> tuple[Beside, ...]:
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
    found: dict[str, Prediction | None] = {"as chosen": choice}
    if any(stage.nodes is not None for stage in choice.stages) and not named(spec):
        found["its nodes throughout"] = _predicted(_with(forecast, ramp_nodes="same"), choice, choice.batch)
    fixed = _with(
        forecast, ramp=None, ramp_nodes="same", ramp_noise=None, **({"method": "lrs"} if spec.train.facts.ramps else {})
    )
    found["a fixed batch"] = _predicted(fixed, choice, choice.batch)
    reference = [
        row
        for row in fixed.offers().records()
        if row.batch == spec.train.reference_batch and row.market == choice.market
    ]
    if reference:
        by_cost = forecast.stages_by == "cost"
        found["the reference batch"] = min(reference, key=lambda row: row.cost if by_cost else row.hours)
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
        for name, row in found.items()
        if row is not None
    )


def _count_steps(forecast: Forecast, row: Prediction) -> int:
    """Return the steps of a whole training, at the batches of its stages."""
    size, epochs = forecast.dataset_size, forecast.spec.train.epochs_at_most
    stages = forecast.trainings.stages.stages(Config(row.nodes, row.batch)) if row.stages else ()
    return sum((Ramp(stages) if stages else Ramp.constant(row.batch)).steps(size=size, epochs=epochs).values())


def _with(forecast: Forecast, **train: Any) -> Forecast:
    settings: Mapping[str, Any] = train
    return replace(
        forecast, spec=forecast.spec.model_copy(update={"train": forecast.spec.train.model_copy(update=dict(settings))})
    )


def _predicted(forecast: Forecast, choice: Prediction, batch: int) -> Prediction | None:
    """Return the forecast at the choice's nodes, on its market; None where it cannot run, or nothing tells."""
    place = Config(choice.nodes, batch)
    if forecast.why_not(place) or forecast.why_unknown(place):
        return None
    row = forecast.predict(place)
    return row if choice.market == "on_demand" else forecast.on_spot(row)


def beside_words(found: tuple[Beside, ...]) -> str:
    """Say it in words: hours, node-hours of each."""
    told = [
        f"{one.what} (batch {one.batch} on {plural(one.nodes)}) {duration(3600 * one.hours)}, {number(one.node_hours)} node-h"
        for one in found
    ]
    return "; ".join(told)


def decay_words(spec: JobSpec, found: tuple[Beside, ...]) -> str:
    """Return the steps, hours and cost that `train.ramp: decay` saves over the reference batch throughout, in words."""
    if spec.train.stages != "decay" or not found:
        return ""
    rows = {row.what: row for row in found}
    chosen, reference = rows["as chosen"], rows.get("the reference batch")
    if reference is None:
        return f"what the decay saves is not known: nothing tells the step time at batch {spec.train.reference_batch}"
    changes = [
        f"{after} instead of {before} ({100 * (new / old - 1):+.0f} %)"
        for after, before, new, old in (
            (f"{chosen.steps} steps", str(reference.steps), chosen.steps or 0, reference.steps or 1),
            (duration(3600 * chosen.hours), duration(3600 * reference.hours), chosen.hours, reference.hours),
            (f"{number(chosen.cost)} {spec.pricing.currency}", number(reference.cost), chosen.cost, reference.cost),
        )
    ]
    where = f"batch {reference.batch} throughout on {plural(reference.nodes)}"
    return f"decay spent as batch, compared with {where}: {', '.join(changes)}"
