"""`tula recommend`: choose a configuration from what was measured, and write the answer down."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tula_cli.errors import BadMeasurements, Infeasible, Pending
from tula_cli.grid import Config
from tula_cli.models import cost
from tula_cli.models.forecast import Forecast, TooFew
from tula_cli.models.objective import Choice, Curve, Objective, choose
from tula_cli.records import Attempt, Failed, Inspection, Measured, OutOfMemory, Prediction, ProbeTask, Recommendation
from tula_cli.rundir import RunDir
from tula_cli.spec import JobSpec, dump_yaml

Results = Sequence[Measured | OutOfMemory | Failed]


@dataclass(frozen=True)
class Limits:
    """What the user allows. None means no bound."""

    nodes: int | None = None  # this number of nodes and no other
    max_nodes: int | None = None
    max_batch: int | None = None  # global
    deadline_hours: float | None = None
    budget: float | None = None  # in the currency of the pricing

    @property
    def wanted(self) -> list[int] | None:
        return None if self.nodes is None else [self.nodes]

    def reach(self, config: Config) -> bool:
        """Return whether the configuration is within what can be told without a forecast."""
        return (self.max_nodes is None or config.nodes <= self.max_nodes) and (
            self.max_batch is None or config.batch <= self.max_batch
        )

    def __iter__(self) -> Iterator["_Bound"]:
        """Iterate over the bounds there are, in the order they are applied."""
        for words, most, value in (
            ("at most {:g} nodes", self.max_nodes, lambda row: row.nodes),
            ("a batch of at most {:g}", self.max_batch, lambda row: row.batch),
            ("a deadline of {:g} hours", self.deadline_hours, lambda row: row.hours),
            ("a budget of {:g}", self.budget, lambda row: row.cost),
        ):
            if most is not None:
                yield _Bound(words.format(most), most, value)


@dataclass(frozen=True)
class _Bound:
    """One limit: its words, its value, and what of a configuration it bounds."""

    words: str
    most: float
    value: Callable[[Prediction], float]


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
    pending: int = 0,
    inspection: Inspection | None = None,
    now: float,
) -> Recommendation:
    """Choose a configuration and write recommendation.json, recommended.yaml, results.csv and cmd.txt.

    Args:
        run: where the results are and the answer goes.
        spec: the job.
        objective: time, cost or knee.
        curve: what the knee is looked for in.
        nodes: consider this number of nodes only.
        max_batch: largest global batch.
        max_nodes: most nodes.
        deadline_hours: longest training time.
        budget: highest cost, in the currency of the pricing.
        pending: probes that are queued or running.
        inspection: memory estimates and capacity, for what the probes do not tell.
        now: Unix time.

    Raises:
        Pending: probes are under way, and those done do not determine the answer yet.
        BadMeasurements: too few probes, or none that can be used together.
        Infeasible: nothing fits, or nothing satisfies the limits; names the binding one and the closest configuration.
    """
    limits = Limits(nodes, max_nodes, max_batch, deadline_hours, budget)
    results = run.results()
    forecast = _forecast(spec, results, run.attempts(), pending=pending, inspection=inspection)
    unknown = _unknown(forecast, limits)
    _require_enough(forecast, unknown, pending=pending)
    allowed = _within(forecast, limits)
    choice = choose(allowed, objective=objective, curve=curve)
    recommendation = Recommendation(
        objective=objective,
        curve=curve,
        choice=choice.prediction,
        reason=f"{choice.reason}; every time is for {spec.train.epochs} epochs, whatever the batch",
        rows=allowed,
        runners_up=choice.runners_up,
        warnings=(
            *_state_of_the_probes(results, unknown, pending=pending),
            *forecast.warnings,
            *_doubts(forecast, choice, limits),
        ),
        currency=spec.pricing.currency,
        price=cost.price_words(spec.pricing),
        fit_error=forecast.steps.error,
        fit=forecast.steps.words,
        created_at=now,
    )
    _write(run, recommendation, results, forecast)
    return recommendation


def _forecast(
    spec: JobSpec, results: Results, attempts: Sequence[Attempt], *, pending: int, inspection: Inspection | None
) -> Forecast:
    try:
        return Forecast.from_results(spec, results, inspection=inspection, attempts=attempts)
    except (TooFew, Infeasible) as error:
        if pending:
            raise _pending(pending, error.message) from error
        raise


def _pending(pending: int, why: str) -> Pending:
    return Pending(
        f"{_under_way(pending)}, and those done do not tell enough: {why}",
        "tula status shows how far they are; run tula recommend again when they are done",
    )


def _under_way(pending: int) -> str:
    return "1 probe is still under way" if pending == 1 else f"{pending} probes are still under way"


def _unknown(forecast: Forecast, limits: Limits) -> dict[Config, str]:
    """Return the configurations within the limits whose step time the probes do not tell, and why."""
    return {
        config: why
        for config in forecast.feasible(limits.wanted)
        if limits.reach(config) and (why := forecast.why_unknown(config))
    }


def _require_enough(forecast: Forecast, unknown: Mapping[Config, str], *, pending: int) -> None:
    """Raise Pending or BadMeasurements where choosing among what is known would be no choice."""
    if not unknown:
        return
    why = next(iter(unknown.values()))
    if pending:
        raise _pending(pending, why)
    if len(forecast.probes) < 2:
        raise BadMeasurements(
            f"one probe is too few to choose by: {why}", "run tula profile again; it measures what is missing"
        )


def _within(forecast: Forecast, limits: Limits) -> tuple[Prediction, ...]:
    """Return the forecasts within the limits, fastest first.

    Raises:
        Infeasible: there is none; names the first limit that leaves nothing and the configuration closest to it.
    """
    left = forecast.predictions(limits.wanted)
    if not left:
        raise _nothing_fits(forecast, limits)
    for bound in limits:
        allowed = tuple(row for row in left if bound.value(row) <= bound.most)
        if not allowed:
            closest = min(left, key=lambda row: (bound.value(row), row.hours))
            raise Infeasible(
                f"no configuration is within {bound.words}; the closest is {_described(closest, forecast.spec)}",
                "relax that limit, or search other numbers of nodes and batches",
            )
        left = allowed
    return left


def _nothing_fits(forecast: Forecast, limits: Limits) -> Infeasible:
    """Say of the smallest batch on the wanted nodes why it cannot run."""
    on = f" on {_nodes(limits.nodes)}" if limits.nodes is not None else ""
    tried = forecast.candidates(limits.wanted)
    why = next((why for config in tried if (why := forecast.why_not(config))), "no batch divides among its GPUs")
    return Infeasible(f"no configuration is feasible{on}: {why}", "tula recommend without --nodes shows those that are")


def _described(row: Prediction, spec: JobSpec) -> str:
    return (
        f"{_nodes(row.nodes)}, batch {row.batch} (local batch {row.local_batch}): {row.hours:.3g} hours,"
        f" {row.cost:.4g} {spec.pricing.currency}"
    )


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _state_of_the_probes(results: Results, unknown: Mapping[Config, str], *, pending: int) -> list[str]:
    """Say what is missing: probes under way, probes that failed, configurations left out of the table."""
    warnings = []
    if pending:
        warnings.append(f"{_under_way(pending)}: the answer may change when they are done")
    warnings += [
        f"the probe with {_nodes(result.nodes)} and local batch {result.local_batch} failed ({result.message});"
        " tula profile runs it again"
        for result in results
        if isinstance(result, Failed)
    ]
    for why in dict.fromkeys(unknown.values()):
        left_out = [config for config, reason in unknown.items() if reason == why]
        on = ", ".join(str(count) for count in sorted({config.nodes for config in left_out}))
        warnings.append(f"{len(left_out)} configurations on {on} nodes are left out: {why}")
    return warnings


def _doubts(forecast: Forecast, choice: Choice, limits: Limits) -> list[str]:
    """Say why the choice may be less than it seems."""
    chosen, warnings = choice.prediction, []
    if forecast.steps.determined_exactly and not all(row.measured for row in (chosen, *choice.runners_up)):
        warnings.append(
            "the fit is exactly determined: as many parameters as probes, so nothing tells its error;"
            " measure more (search.strategy: sweep or full) to know it"
        )
    margin = forecast.spec.search.memory_margin
    if chosen.headroom is not None and chosen.headroom < margin:
        warnings.append(
            f"the choice ran in its probe, but leaves only {chosen.headroom:.0%} of the memory free (wanted: {margin:.0%})"
        )
    late = limits.deadline_hours is not None and (chosen.hours_high or 0) > limits.deadline_hours
    if late:
        warnings.append(f"the choice may miss the deadline: up to {chosen.hours_high:.3g} hours (90 % interval)")
    return warnings


def command(run: RunDir, choice: Prediction) -> str:
    """Return the command line that trains the choice from this run, wherever it is typed.

    It goes to the folder of the probes first: relative paths of the spec and the user's code are found there.
    """
    train = f"tula train --run {shlex.quote(str(run.path.absolute()))} --nodes {choice.nodes} --batch {choice.batch}"
    folder = next((task.workdir for task in run.tasks() if isinstance(task, ProbeTask)), None)
    return train if folder is None else f"cd {shlex.quote(folder)} && {train}"


def _write(run: RunDir, recommendation: Recommendation, results: Results, forecast: Forecast) -> None:
    """Write the files; recommendation.json last, so that where it stands the others do too."""
    run.write_text("results.csv", _table(results, recommendation, forecast))
    train = command(run, recommendation.choice)
    run.write_text("recommended.yaml", _recommended_yaml(forecast.spec, recommendation, train=train))
    run.write_text("cmd.txt", f"{train}\n")
    run.write_recommendation(recommendation)


def _recommended_yaml(spec: JobSpec, recommendation: Recommendation, *, train: str) -> str:
    """Return the spec, unchanged, below the choice.

    It stays unchanged so that it names the same run: its probes and this recommendation are found again.
    """
    choice = recommendation.choice
    return (
        f"# tula recommends {_described(choice, spec)}.\n"
        f"# Why: {recommendation.reason}.\n"
        f"# Train it: {train}\n"
        f"{dump_yaml(spec)}"
    )


def _table(results: Results, recommendation: Recommendation, forecast: Forecast) -> str:
    """Return every candidate and every result as CSV, ordered by nodes and local batch."""
    import pandas as pd

    gpus = forecast.spec.cluster.gpus_per_node
    configs = {Config(result.nodes, result.local_batch * result.nodes * gpus) for result in results}
    configs.update(forecast.candidates())
    configs.update(Config(row.nodes, row.batch) for row in recommendation.rows)
    by_config = {(result.nodes, result.local_batch): result for result in results}
    rows = [
        _row(config, by_config.get((config.nodes, config.local_batch(gpus))), recommendation, forecast)
        for config in sorted(configs)
    ]
    return pd.DataFrame(rows).to_csv(index=False)


def _row(
    config: Config,
    result: Measured | OutOfMemory | Failed | None,
    recommendation: Recommendation,
    forecast: Forecast,
) -> dict[str, Any]:
    """Return one line of results.csv; every line has the same columns."""
    why = forecast.why_not(config) or forecast.why_unknown(config)
    row = None if why else forecast.predict(config)
    probe = result if isinstance(result, Measured) else None
    return {
        "nodes": config.nodes,
        "gpus_per_node": forecast.spec.cluster.gpus_per_node,
        "batch": config.batch,
        "local_batch": config.local_batch(forecast.spec.cluster.gpus_per_node),
        "outcome": _outcome(result, predicted=row is not None),
        "chosen": row == recommendation.choice,
        "within_limits": row in recommendation.rows,
        "step_time_s": row and row.step_time,
        "step_time_low_s": row and row.step_low,
        "step_time_high_s": row and row.step_high,
        "sync_time_s": probe and probe.sync_time,
        "compute_time_s": probe and probe.compute_time,
        "data_wait_s": probe and probe.data_wait,
        "training_hours": row and row.hours,
        "training_hours_low": row and row.hours_low,
        "training_hours_high": row and row.hours_high,
        f"cost_{recommendation.currency}": row and row.cost,
        "peak_memory_bytes": row and row.peak_memory,
        "memory_headroom_share": row and row.headroom,
        "note": result.message if isinstance(result, OutOfMemory | Failed) else why,
    }


def _outcome(result: Measured | OutOfMemory | Failed | None, *, predicted: bool) -> str:
    if isinstance(result, OutOfMemory):
        return "out_of_memory_assumed" if result.assumed else "out_of_memory"
    if predicted:
        return "measured" if isinstance(result, Measured) else "predicted"
    return "failed" if isinstance(result, Failed) else "left_out"
