"""Alternatives to a choice: a fixed batch instead of a ramp, and its first out-of-memory fallback."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tula_cli.models import refresh
from tula_cli.models.choice.grid import Config
from tula_cli.models.estimator import Estimator
from tula_cli.models.out_of_memory import MIN_NORMALISED, cannot_accumulate, list_splits
from tula_cli.models.ramp.by_noise import describe_stages
from tula_cli.models.ramp.stage_nodes import describe_stage_nodes, list_nodes_named_by_stages
from tula_cli.models.ramp.stages import Ramp
from tula_cli.run.records.recommendations import Fallback, Prediction, RampAlternative, Stage
from tula_cli.spec.job import JobSpec
from tula_cli.words import format_count, format_duration, format_number


def predict_ramp_alternatives(estimator: Estimator, choice: Prediction) -> tuple[RampAlternative, ...]:
    """Return the predicted hours and cost of a choice with a batch-size ramp, and of its alternatives without one.

    Empty if the batch does not grow. The nodes of the reference batch are those with the least time or cost, whichever
    determines the stages. A possible loss of accuracy at a fixed batch is not included; `tula compare` measures it.

    Args:
        estimator: the models of the node type of the choice.
        choice: the choice; alternatives are predicted on its market, on demand or spot.
    """
    spec = estimator.spec
    if not choice.stages:
        return ()
    configuration = Config(choice.nodes, choice.batch)
    predictions: dict[str, Prediction | None] = {"as chosen": choice}
    if any(stage.nodes is not None for stage in choice.stages) and not list_nodes_named_by_stages(spec):
        on_its_nodes = _with_train_settings(estimator, ramp_nodes="same")
        predictions["its nodes throughout"] = on_its_nodes.predict_if_known(configuration, choice.market)
    fixed = _with_train_settings(
        estimator,
        ramp=None,
        ramp_nodes="same",
        **({"method": "lrs"} if spec.train.training_method.ramps else {}),
    )
    predictions["a fixed batch"] = fixed.predict_if_known(configuration, choice.market)
    reference = fixed.candidates().select(batch=spec.train.reference_batch, market=choice.market).predictions()
    if reference:
        by_cost = estimator.stages_by == "cost"
        predictions["the reference batch"] = min(reference, key=lambda row: row.cost if by_cost else row.hours)
    return tuple(
        RampAlternative(
            what=name,
            nodes=row.nodes,
            batch=row.batch,
            hours=row.hours,
            cost=row.cost,
            node_hours=row.all_node_hours,
            steps=_count_steps(estimator, row),
        )
        for name, row in predictions.items()
        if row is not None
    )


def _count_steps(estimator: Estimator, row: Prediction) -> int:
    """Return the number of steps of a whole training, at the batches of its stages."""
    size, epochs = estimator.dataset_size, estimator.spec.train.epochs_at_most
    stages = estimator.stages.stage_positions(Config(row.nodes, row.batch)) if row.stages else ()
    return sum(
        (Ramp(stages) if stages else Ramp.constant(row.batch)).remaining_steps(size=size, epochs=epochs).values()
    )


def _with_train_settings(estimator: Estimator, **train: Any) -> Estimator:
    settings: Mapping[str, Any] = train
    return replace(
        estimator,
        spec=estimator.spec.model_copy(update={"train": estimator.spec.train.model_copy(update=dict(settings))}),
    )


def describe_ramp(
    spec: JobSpec, choice: Prediction, stages: tuple[Stage, ...], alternatives: tuple[RampAlternative, ...]
) -> str:
    """Describe the stages of a growing batch, their nodes, what `decay` saves, and the alternatives without a ramp."""
    sentences = [
        describe_stages(stages),
        describe_stage_nodes(choice),
        describe_decay_savings(spec, alternatives),
        describe_alternatives(alternatives),
    ]
    return ". ".join(filter(None, sentences))


def describe_alternatives(alternatives: tuple[RampAlternative, ...]) -> str:
    """Describe the hours and node-hours of each alternative."""
    descriptions = [
        f"{alternative.what} (batch {alternative.batch} on {format_count(alternative.nodes)}) {format_duration(3600 * alternative.hours)}, {format_number(alternative.node_hours)} node-h"
        for alternative in alternatives
    ]
    return "; ".join(descriptions)


def describe_decay_savings(spec: JobSpec, alternatives: tuple[RampAlternative, ...]) -> str:
    """Describe the steps, hours and cost that `train.ramp: decay` saves over the reference batch throughout."""
    if spec.train.stages != "decay" or not alternatives:
        return ""
    rows = {row.what: row for row in alternatives}
    chosen, reference = rows["as chosen"], rows.get("the reference batch")
    if reference is None:
        return f"the saving of train.ramp: decay is unknown, because there is no step time for batch {spec.train.reference_batch}"
    changes = [
        f"{after} instead of {reference_value} ({100 * (new / old - 1):+.0f} %)"
        for after, reference_value, new, old in (
            (f"{chosen.steps} steps", str(reference.steps), chosen.steps or 0, reference.steps or 1),
            (
                format_duration(3600 * chosen.hours),
                format_duration(3600 * reference.hours),
                chosen.hours,
                reference.hours,
            ),
            (
                f"{format_number(chosen.cost)} {spec.pricing.currency}",
                format_number(reference.cost),
                chosen.cost,
                reference.cost,
            ),
        )
    ]
    where = f"batch {reference.batch} throughout on {format_count(reference.nodes)}"
    return f"train.ramp: decay, compared with {where}: {', '.join(changes)}"


# --- The fallback


def predict_first_fallback(estimator: Estimator, choice: Prediction) -> Fallback | None:
    """Return the first out-of-memory fallback of a configuration, or None if there is none or its step time is unknown.

    Whether the model has a BatchNorm, which limits the fallback, is known only to the training.

    Args:
        estimator: the models of the node type of the choice.
        choice: the recommended configuration.
    """
    spec = estimator.spec
    world, accumulate = choice.nodes * spec.cluster.gpus_per_node, spec.train.accumulate
    micro_batch = choice.local_batch // accumulate
    fewest = refresh.compute_max_samples_drawn(spec, choice.batch, available=micro_batch, world=world)
    limits = [(lambda samples: samples >= fewest, "AGS's small batch")]
    splits = list_splits(choice.batch, micro_batch=micro_batch, micro_batches=accumulate, limits=limits)
    if cannot_accumulate(spec) or not splits.into:
        below = [config for config in estimator.feasible([choice.nodes]) if config.batch < choice.batch]
        smaller = max(below, key=lambda config: config.batch, default=None)
        row = None if smaller is None else estimator.predict_if_known(smaller, choice.market)
        parts, bound = 1, ""
    else:
        parts = splits.into[0]
        row = estimator.predict_split(Config(choice.nodes, choice.batch), parts, choice.market)
        bound = ", if its BatchNorm allows it" if micro_batch // parts < MIN_NORMALISED else ""
    if row is None:
        return None
    local_batch = row.local_batch // parts
    is_measured = row.measured if parts == 1 else (choice.nodes, local_batch) in estimator.probes
    basis = f"from the {'probe' if is_measured else 'fit'} at local batch {local_batch}{bound}"
    return Fallback(
        batch=row.batch,
        micro_batch=local_batch // accumulate,
        micro_batches=accumulate * parts,
        step_time=row.step_time,
        hours=row.hours,
        basis="measured" if parts == 1 and is_measured else basis,
    )
