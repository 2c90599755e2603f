"""The cost of the first out-of-memory fallback of a choice."""

from tula_cli.models import refresh
from tula_cli.models.choice.grid import Config
from tula_cli.models.forecast import Forecast
from tula_cli.models.out_of_memory import MIN_NORMALISED, cannot_accumulate, splits_of
from tula_cli.run.records.recommendations import Fallback, Prediction


def first_fallback(forecast: Forecast, choice: Prediction) -> Fallback | None:
    """Return the first out-of-memory fallback of a configuration, or None if there is none or its step time is unknown.

    Whether the model has a BatchNorm, which sets a bound to it, only the training knows.

    Args:
        forecast: of the choice's kind of nodes.
        choice: what is recommended.
    """
    spec = forecast.spec
    world, accumulate = choice.nodes * spec.cluster.gpus_per_node, spec.train.accumulate
    micro_batch = choice.local_batch // accumulate
    fewest = refresh.max_samples_drawn(spec, choice.batch, available=micro_batch, world=world)
    limits = [(lambda samples: samples >= fewest, "AGS's small batch")]
    splits = splits_of(choice.batch, micro_batch=micro_batch, micro_batches=accumulate, limits=limits)
    if cannot_accumulate(spec) or not splits.into:
        return _smaller_batch(forecast, choice)
    split = splits.into[0]
    row = _on_market(forecast, choice, forecast.predict_split(Config(choice.nodes, choice.batch), split))
    local_batch = choice.local_batch // split
    measured = (choice.nodes, local_batch) in forecast.probes
    bound = ", unless its BatchNorm forbids it" if micro_batch // split < MIN_NORMALISED else ""
    if row is None:
        return None
    return Fallback(
        batch=choice.batch,
        micro_batch=micro_batch // split,
        micro_batches=accumulate * split,
        step_time=row.step_time,
        hours=row.hours,
        basis=f"by the {'probe' if measured else 'fit'} at local batch {local_batch}{bound}",
    )


def _smaller_batch(forecast: Forecast, choice: Prediction) -> Fallback | None:
    """Return the next smaller batch."""
    below = [config for config in forecast.feasible([choice.nodes]) if config.batch < choice.batch]
    config = max(below, key=lambda config: config.batch, default=None)
    if config is None or forecast.why_unknown(config):
        return None
    row = _on_market(forecast, choice, forecast.predict(config))
    if row is None:
        return None
    accumulate = forecast.spec.train.accumulate
    return Fallback(
        batch=row.batch,
        micro_batch=row.local_batch // accumulate,
        micro_batches=accumulate,
        step_time=row.step_time,
        hours=row.hours,
        basis="measured" if row.measured else f"by the fit at local batch {row.local_batch}",
    )


def _on_market(forecast: Forecast, choice: Prediction, row: Prediction | None) -> Prediction | None:
    """Return a forecast on the kind of nodes that the choice is on."""
    return row if row is None or choice.market == "on_demand" else forecast.on_spot(row)
