"""`tula recommend`: choose a configuration from what was measured, and write down the answer that training is to take."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tula_cli.cluster.launcher import Launcher
from tula_cli.errors import Infeasible
from tula_cli.models import cost, efficiency
from tula_cli.models.choice import pareto
from tula_cli.models.choice.objective import Curve, Objective, choose
from tula_cli.models.efficiency import Noise
from tula_cli.models.forecast import Forecast
from tula_cli.run.directory import Part, RunDir
from tula_cli.run.jobfile import adopt, begun, origin
from tula_cli.run.records.recommendations import Prediction, Recommendation
from tula_cli.services import status
from tula_cli.services.progress.job_status import ACTIVE
from tula_cli.services.recommendation.answer import Answer, write
from tula_cli.services.recommendation.fallback import first_fallback
from tula_cli.services.recommendation.from_training import UnderWay, continuation, results_now, under_way
from tula_cli.services.recommendation.lengths import at_lengths
from tula_cli.services.recommendation.limits import Criteria, Limits, described_limits
from tula_cli.services.recommendation.measured import (
    Results,
    TypeMeasurements,
    doubts,
    epochs_of,
    measurements_of,
    noise_of,
    rests_on,
    state_of_the_probes,
    trained_epochs,
    with_energy,
    without_gradients,
)
from tula_cli.spec.job import JobSpec
from tula_cli.words import plural


def recommend(
    run: RunDir,
    spec: JobSpec,
    *,
    objective: Objective,
    curve: Curve = "time",
    nodes: int | None = None,
    max_batch: int | None = None,
    max_nodes: int | None = None,
    deadline_hours: float | None = None,
    budget: float | None = None,
    node_type: str | None = None,
    options: Sequence[str] = (),
    overrides: Sequence[str] = (),
    pending: int | Mapping[str | None, int] = 0,
    from_training: bool = False,
    now: float,
) -> Answer:
    """Choose a configuration; nothing is written.

    Where the job names node types each has models of its own, and the choice is made over all of them.

    Args:
        run: where the results are.
        spec: the job.
        objective: time, cost, knee, accuracy-time or energy.
        curve: what the knee is looked for in.
        nodes: consider this number of nodes only.
        max_batch: largest global batch.
        max_nodes: most nodes.
        deadline_hours: longest training time; on spot nodes the expected one.
        budget: highest cost, in the currency of the pricing; on spot nodes the expected one.
        node_type: consider this type of node only.
        options: all but the objective, as typed; for the record.
        overrides: what of `spec` is not the job's own; for the record.
        pending: probes that are queued or running; by node type where the job names any.
        from_training: go by the steps of the training under way, to whose pace the probes are brought.
        now: Unix time.

    Raises:
        Pending: probes are under way, and those done do not determine the answer yet.
        BadMeasurements: too few probes, or none that can be used together.
        Infeasible: nothing fits, or nothing satisfies the limits; names the binding one and the closest configuration.
        SpecError: the job names no such node type.
    """
    limits = Limits(nodes, max_nodes, max_batch, deadline_hours, budget, same_progress=objective == "accuracy-time")
    parts = run.parts(spec, node_type)
    waiting = pending if isinstance(pending, Mapping) else {part.type: pending for part in parts}
    training, parts = _under_way(parts) if from_training else (None, parts)
    results, seen = _results(parts, training)
    all_measurements, left_out = measurements_of(parts, limits, waiting, results_of=lambda part: results[part.type])
    if objective == "energy":
        all_measurements, unknown = with_energy(all_measurements)
        left_out += unknown
    noise = noise_of(all_measurements, needed=objective == "accuracy-time")
    untold = without_gradients(all_measurements)
    allowed = _within(all_measurements, limits, noise)

    def answer(
        all_measurements: Sequence[TypeMeasurements], rows: Sequence[Prediction], warnings: Sequence[str]
    ) -> Recommendation:
        found = _answer(all_measurements, rows, limits, warnings, noise, objective=objective, curve=curve, now=now)
        return found.model_copy(update={"options": tuple(options), "overrides": tuple(overrides)})

    by_type = {
        measurements.part.type: answer([measurements], own, untold)
        for measurements in all_measurements
        if measurements.part.type is not None and (own := [row for row in allowed if row.type == measurements.type])
    }
    found = _continued(training, answer(all_measurements, allowed, [*seen, *left_out, *untold]), allowed)
    return Answer(found, by_type, all_measurements)


def _under_way(parts: Sequence[Part]) -> tuple[UnderWay, tuple[Part, ...]]:
    """Return the training under way, and the part that it runs on: it stays on its type of nodes."""
    found = under_way(parts)
    return found, (found.part,)


def _continued(training: UnderWay | None, found: Recommendation, rows: Sequence[Prediction]) -> Recommendation:
    """Return an answer with what the rest of a training takes, where it was asked by one's steps."""
    if training is None:
        return found
    at = training.part.type or "", training.task.nodes, training.task.batch, found.choice.market
    stay = next((row for row in rows if (row.type, row.nodes, row.batch, row.market) == at), None)
    return found.model_copy(update={"continuation": continuation(training, found.choice, stay)})


def _results(parts: Sequence[Part], training: UnderWay | None) -> tuple[dict[str | None, Results], list[str]]:
    """Return the results of each type of node, at the pace of a training where one is given, and what that rests on."""
    found: dict[str | None, Results] = {part.type: part.run.results() for part in parts}
    if training is None:
        return found, []
    own = training.part.type
    found[own], told = results_now(training, found[own])
    return found, list(told)


def pending_probes(run: RunDir, spec: JobSpec, launcher_for: Callable[[JobSpec], Launcher]) -> dict[str | None, int]:
    """Return how many probes of each type of node are queued or running."""
    return {part.type: _pending(part, launcher_for) for part in run.parts(spec)}


def _pending(part: Part, launcher_for: Callable[[JobSpec], Launcher]) -> int:
    if not part.run.jobs():
        return 0
    now = status.snapshot(part.run, launcher_for(part.spec), now=time.time())
    return sum(job.total - job.done for job in now.jobs if job.kind == "probe" and job.state in ACTIVE)


def ask(
    run: RunDir,
    spec: JobSpec,
    criteria: Criteria,
    *,
    launcher_for: Callable[[JobSpec], Launcher],
    overrides: Sequence[str] = (),
) -> Answer:
    """Choose a configuration of what was measured so far, as `recommend` does, now; nothing is written.

    Args:
        run: where the results are.
        spec: the job.
        criteria: objective, limits, curve and type of node.
        launcher_for: knows whether probes are under way.
        overrides: what was laid over the job's own settings, which an answer with other ones only assumes.

    Raises:
        Pending, BadMeasurements, Infeasible, SpecError: as `recommend`.
    """
    limits = criteria.limits
    return recommend(
        run,
        spec,
        objective=criteria.objective,
        curve=criteria.curve,
        nodes=limits.nodes,
        max_batch=limits.max_batch,
        max_nodes=limits.max_nodes,
        deadline_hours=limits.deadline_hours,
        budget=limits.budget,
        node_type=criteria.node_type,
        options=criteria.options,
        overrides=tuple(overrides) if overrides and spec != run.spec() else (),
        pending=pending_probes(run, spec, launcher_for),
        from_training=criteria.from_training,
        now=time.time(),
    )


def renews(found: Recommendation, known: Recommendation | None) -> bool:
    """Return whether an answer is kept unasked: the first one under the job's own settings, and one to the same criteria.

    Args:
        found: the answer.
        known: the one that the run keeps.
    """
    if found.continuation is not None:  # it moves a training
        return False
    return not found.overrides if known is None else found.criteria == known.criteria


def keep(run: RunDir, own: JobSpec, answer: Answer) -> None:
    """Write recommendation.json, recommended.yaml, results.csv and cmd.txt: what `tula train` takes.

    Args:
        run: where they go; in those of its node types what `tula train --type` takes.
        own: the job's own settings, without what the answer only assumes.
        answer: what was chosen.

    Raises:
        TulaError: they cannot be written.
    """
    all_measurements = {measurements.part.type: measurements for measurements in answer.all_measurements}
    for part in run.parts(own):
        if part.type is not None and part.type in answer.by_type:
            write(part.run, part.spec, [all_measurements[part.type]], answer.by_type[part.type])
    write(run, own, answer.all_measurements, answer.recommendation)


def save(run: RunDir, spec: JobSpec, answer: Answer, *, overrides: Sequence[str] = (), job: Path | None = None) -> None:
    """Make an answer the one that `tula train` takes, under the job's own settings: what it only assumes is not kept.

    Args:
        run: the run.
        spec: the settings that it was asked with.
        answer: what was chosen.
        overrides: what of `spec` was laid over its file or run.
        job: the file of the settings; None for the run's own.

    Raises:
        TulaError: the files cannot be written.
    """
    assumed = bool(answer.recommendation.overrides)
    own = run.spec() if assumed else spec
    keep(run, own, answer)
    file = origin(run, None, ()) if assumed else origin(run, job, overrides)
    adopt(run, own, begun(run, own), file)


def _answer(
    all_measurements: Sequence[TypeMeasurements],
    allowed: Sequence[Prediction],
    limits: Limits,
    warnings: Sequence[str],
    noise: Noise | None,
    *,
    objective: Objective,
    curve: Curve,
    now: float,
) -> Recommendation:
    rows = _with_front(allowed)
    choice = choose(rows, objective=objective, curve=curve)
    own = next(measurements for measurements in all_measurements if measurements.type == choice.prediction.type)
    spec = own.part.spec
    told = [f"{measurements.prefix}{text}" for measurements in all_measurements for text in _told(measurements)]
    lengths, growth = at_lengths(own)
    return Recommendation(
        objective=objective,
        curve=curve,
        choice=choice.prediction,
        reason=f"{choice.reason}; {epochs_of(choice.prediction, own, objective)}",
        rows=rows,
        runners_up=choice.runners_up,
        warnings=(*warnings, *told, *doubts(own.forecast, choice, limits)),
        currency=spec.pricing.currency,
        price="\n".join(
            f"{measurements.prefix}{cost.price_words(measurements.part.spec.pricing)}"
            for measurements in all_measurements
        ),
        fit_error=own.forecast.steps.error,
        fit="\n".join(f"{measurements.prefix}{measurements.forecast.steps.words}" for measurements in all_measurements),
        power="\n".join(
            f"{measurements.prefix}{model.words}"
            for measurements in all_measurements
            if (model := measurements.forecast.power) is not None
        ),
        efficiency="" if noise is None else rests_on(noise, own),
        interruption=own.forecast.interruption(choice.prediction),
        fallback=first_fallback(own.forecast, choice.prediction),
        lengths=lengths,
        growth=growth,
        other_market=own.other_market(choice.prediction),
        created_at=now,
    )


def _with_front(rows: Sequence[Prediction]) -> tuple[Prediction, ...]:
    """Return the rows with those marked that are in the Pareto front of time, cost and, where all tell it, energy."""
    third = [row.kwh for row in rows if row.kwh is not None]
    energy = third if len(third) == len(rows) else [0.0] * len(rows)
    front = pareto.front([(row.hours, row.cost, kwh) for row, kwh in zip(rows, energy, strict=True)])
    return tuple(
        row if row.pareto == inside else row.model_copy(update={"pareto": inside})
        for row, inside in zip(rows, front, strict=True)
    )


def _told(measurements: TypeMeasurements) -> list[str]:
    missing = state_of_the_probes(measurements.results, measurements.unknown, pending=measurements.pending)
    return [*missing, *measurements.forecast.warnings, *measurements.part.run.read().damaged_jobs]


def _with_progress(row: Prediction, measurements: TypeMeasurements, noise: Noise | None) -> Prediction:
    """Return a forecast with what the same progress takes beside it, where the noise is known."""
    if noise is None:
        return row
    spec = measurements.part.spec
    epochs = trained_epochs(spec, measurements.forecast.dataset_size)
    found = efficiency.same_progress(row, epochs=epochs, reference=spec.train.reference_batch, noise=noise)
    return row.model_copy(update={"same_progress": found})


def _within(
    all_measurements: Sequence[TypeMeasurements], limits: Limits, noise: Noise | None = None
) -> tuple[Prediction, ...]:
    """Return the forecasts within the limits, fastest first.

    Raises:
        Infeasible: there is none; names the first limit that leaves nothing and the configuration closest to it.
    """
    found = [
        _with_progress(row, measurements, noise)
        for measurements in all_measurements
        for row in measurements.rows(limits)
    ]
    left = tuple(sorted(found, key=lambda row: (row.hours, row.nodes, row.batch)))
    if not left:
        raise _nothing_fits(all_measurements[0].forecast, limits)
    for bound in limits:
        allowed = tuple(row for row in left if bound.value(row) <= bound.most)
        if not allowed:
            closest = min(left, key=lambda row: (bound.value(row), row.hours))
            update = {"hours": limits.hours(closest), "cost": limits.cost(closest)}
            described = described_limits(
                closest.model_copy(update=update), all_measurements[0].part.spec.pricing.currency
            )
            raise Infeasible(
                f"no configuration is within {bound.words}; the closest is {described}",
                "relax that limit, or search other numbers of nodes and batches",
            )
        left = allowed
    return left


def _nothing_fits(forecast: Forecast, limits: Limits) -> Infeasible:
    """Say of the smallest batch on the wanted nodes why it cannot run."""
    on = f" on {plural(limits.nodes)}" if limits.nodes is not None else ""
    tried = forecast.candidates(limits.wanted)
    why = next((why for config in tried if (why := forecast.why_not(config))), "no batch divides among its GPUs")
    return Infeasible(f"no configuration is feasible{on}: {why}", "tula recommend without --nodes shows those that are")
