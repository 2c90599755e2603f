"""`tula recommend`: choose a configuration from what was measured, and write down the answer that training is to take."""

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tula_cli.errors import BadMeasurements, Infeasible, Pending
from tula_cli.grid import Config, counted
from tula_cli.models import cost, efficiency, pareto
from tula_cli.models.efficiency import Noise
from tula_cli.models.forecast import Forecast, TooFew
from tula_cli.models.objective import Choice, Curve, Objective, choose
from tula_cli.records import Attempt, Failed, Inspection, Measured, OutOfMemory, Prediction, ProbeTask, Recommendation
from tula_cli.rundir import Part, RunDir
from tula_cli.spec import JobSpec, dump_yaml

_DISAGREE = 0.15  # a second opinion that is further off than this share, and outside the interval, is told

Results = Sequence[Measured | OutOfMemory | Failed]


@dataclass(frozen=True)
class Limits:
    """What the user allows. None means no bound."""

    nodes: int | None = None  # this number of nodes and no other
    max_nodes: int | None = None
    max_batch: int | None = None  # global
    deadline_hours: float | None = None
    budget: float | None = None  # in the currency of the pricing
    same_progress: bool = False  # the deadline and the budget are for the same progress, not for the spec's epochs

    def hours(self, row: Prediction) -> float:
        return row.same_progress.hours if self.same_progress and row.same_progress else row.hours

    def latest(self, row: Prediction) -> float:
        """Return the upper bound of the hours; 0 where there is none."""
        high = row.same_progress.hours_high if self.same_progress and row.same_progress else row.hours_high
        return high or 0.0

    def cost(self, row: Prediction) -> float:
        return row.same_progress.cost if self.same_progress and row.same_progress else row.cost

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
            (f"a deadline of {{:g}} hours{self._to}", self.deadline_hours, self.hours),
            (f"a budget of {{:g}}{self._to}", self.budget, self.cost),
        ):
            if most is not None:
                yield _Bound(words.format(most), most, value)

    @property
    def _to(self) -> str:
        return " to the same progress" if self.same_progress else ""


@dataclass(frozen=True)
class _Bound:
    """One limit: its words, its value, and what of a configuration it bounds."""

    words: str
    most: float
    value: Callable[[Prediction], float]


@dataclass(frozen=True)
class _Survey:
    """What the probes of one type of node tell."""

    part: Part
    results: Results
    forecast: Forecast
    unknown: Mapping[Config, str]
    pending: int

    @property
    def prefix(self) -> str:
        return f"{self.part.type}: " if self.part.type else ""

    def rows(self, limits: Limits) -> tuple[Prediction, ...]:
        """Return the forecasts on each market."""
        found = self.forecast.offers(limits.wanted)
        name = self.part.type
        return tuple(row.model_copy(update={"type": name}) for row in found) if name else found

    def other_market(self, row: Prediction) -> Prediction | None:
        """Return a forecast on the market that it is not for."""
        on_demand = self.forecast.predict(Config(row.nodes, row.batch))
        found = self.forecast.on_spot(on_demand) if row.market == "on_demand" else on_demand
        return found and found.model_copy(update={"type": row.type})


@dataclass(frozen=True)
class Answer:
    """What was chosen, and what it rests on."""

    recommendation: Recommendation
    by_type: Mapping[str, Recommendation]  # of each node type alone, where the job names any
    surveys: Sequence[_Survey]


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
    pending: int | Mapping[str, int] = 0,
    inspection: Inspection | None = None,
    now: float,
) -> Answer:
    """Choose a configuration; nothing is written.

    Where the job names node types each has models of its own, and the choice is made over all of them.

    Args:
        run: where the results are.
        spec: the job.
        objective: time, cost, knee or accuracy-time.
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
        inspection: memory estimates and capacity, for what the probes do not tell.
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
    surveys, left_out = _surveys(parts, limits, waiting, inspection)
    noise = _noise(surveys, needed=objective == "accuracy-time")
    allowed = _within(surveys, limits, noise)

    def answer(surveys: Sequence[_Survey], rows: Sequence[Prediction], warnings: Sequence[str]) -> Recommendation:
        found = _answer(surveys, rows, limits, warnings, noise, objective=objective, curve=curve, now=now)
        return found.model_copy(update={"options": tuple(options), "overrides": tuple(overrides)})

    by_type = {
        survey.part.type: answer([survey], own, [])
        for survey in surveys
        if survey.part.type and (own := [row for row in allowed if row.type == survey.part.type])
    }
    return Answer(answer(surveys, allowed, left_out), by_type, surveys)


def renews(found: Recommendation, known: Recommendation | None) -> bool:
    """Return whether an answer is kept unasked: the first one under the job's own settings, and one to the same question.

    Args:
        found: the answer.
        known: the one that the run keeps.
    """
    return not found.overrides if known is None else found.question == known.question


def keep(run: RunDir, own: JobSpec, answer: Answer) -> None:
    """Write recommendation.json, recommended.yaml, results.csv and cmd.txt: what `tula train` takes.

    Args:
        run: where they go; in those of its node types what `tula train --type` takes.
        own: the job's own settings, without what the answer only assumes.
        answer: what was chosen.

    Raises:
        TulaError: they cannot be written.
    """
    surveys = {survey.part.type: survey for survey in answer.surveys}
    for part in run.parts(own) if own.node_types else ():
        if part.type in answer.by_type:
            _write(part.run, part.spec, [surveys[part.type]], answer.by_type[part.type])
    _write(run, own, answer.surveys, answer.recommendation)


def _surveys(
    parts: Sequence[Part], limits: Limits, pending: Mapping[str, int], inspection: Inspection | None
) -> tuple[list[_Survey], list[str]]:
    """Return what is known of each type, and what is to be said of those that are left out.

    Raises:
        Pending, BadMeasurements, Infeasible: no type is left.
    """
    found, errors = [], []
    for part in parts:
        try:
            found.append(_survey(part, limits, pending=pending.get(part.type, 0), inspection=inspection))
        except (Pending, BadMeasurements, Infeasible) as error:
            errors.append((part, error))
    if not found:
        raise next((error for _, error in errors if isinstance(error, Pending)), errors[0][1])
    return found, [f"node type {part.type} is left out: {error.message}" for part, error in errors]


def _survey(part: Part, limits: Limits, *, pending: int, inspection: Inspection | None) -> _Survey:
    results = part.run.results()
    forecast = _forecast(part.spec, results, part.run.attempts(), pending=pending, inspection=inspection)
    unknown = _unknown(forecast, limits)
    _require_enough(forecast, unknown, pending=pending)
    return _Survey(part, results, forecast, unknown, pending)


def _noise(surveys: Sequence[_Survey], *, needed: bool) -> Noise | None:
    """Return the gradient noise scale that the probes of all node types tell: it is the job's, not the hardware's.

    Raises:
        Pending, BadMeasurements: it is needed, and no probe tells it yet, or none does.
    """
    probes = [result for survey in surveys for result in survey.results if isinstance(result, Measured)]
    noise = efficiency.noise_scale(probe.gradients for probe in probes)
    if noise is not None or not needed:
        return noise
    why = f"no probe ({len(probes)} measured) tells the gradient noise that time to accuracy follows from"
    if pending := sum(survey.pending for survey in surveys):
        raise _pending(pending, why)
    raise BadMeasurements(
        why,
        "it takes a probe on two or more GPUs (or, on one, a local batch of 2 or more) whose gradients are finite; where the"
        " results are older than this objective, delete some in results/ and run tula profile again",
    )


def _answer(
    surveys: Sequence[_Survey],
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
    own = next(survey for survey in surveys if survey.part.type == choice.prediction.type)
    spec = own.part.spec
    told = [f"{survey.prefix}{text}" for survey in surveys for text in _told(survey)]
    return Recommendation(
        objective=objective,
        curve=curve,
        choice=choice.prediction,
        reason=f"{choice.reason}; {_epochs(choice.prediction, spec, objective)}",
        rows=rows,
        runners_up=choice.runners_up,
        warnings=(*warnings, *told, *_doubts(own.forecast, choice, limits)),
        currency=spec.pricing.currency,
        price="\n".join(f"{survey.prefix}{cost.price_words(survey.part.spec.pricing)}" for survey in surveys),
        fit_error=own.forecast.steps.error,
        fit="\n".join(f"{survey.prefix}{survey.forecast.steps.words}" for survey in surveys),
        efficiency="" if noise is None else _rests_on(noise, spec),
        other_market=own.other_market(choice.prediction),
        created_at=now,
    )


def _epochs(chosen: Prediction, spec: JobSpec, objective: Objective) -> str:
    """Say how many epochs the times are for."""
    epochs, found = spec.train.epochs, chosen.same_progress
    if objective != "accuracy-time" or found is None:
        return f"every time is for {epochs} epochs, whatever the batch"
    return (
        f"batch {chosen.batch} needs about {found.epochs:.3g} epochs ({found.epochs_low:.3g} to {found.epochs_high:.3g}) for"
        f" the progress of {epochs} epochs at batch {spec.train.reference_batch}; tula train runs train.epochs, {epochs} as"
        f" it is: --set train.epochs={math.ceil(found.epochs)} trains to the same progress"
    )


def _rests_on(noise: Noise, spec: JobSpec) -> str:
    return efficiency.words(noise, epochs=spec.train.epochs, reference=spec.train.reference_batch)


def _with_front(rows: Sequence[Prediction]) -> tuple[Prediction, ...]:
    """Return the rows with those marked that are in the Pareto front of time and cost."""
    front = pareto.front([(row.hours, row.cost) for row in rows])
    return tuple(
        row if row.pareto == inside else row.model_copy(update={"pareto": inside})
        for row, inside in zip(rows, front, strict=True)
    )


def _told(survey: _Survey) -> list[str]:
    missing = _state_of_the_probes(survey.results, survey.unknown, pending=survey.pending)
    return [*missing, *survey.forecast.warnings]


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


def _with_progress(row: Prediction, spec: JobSpec, noise: Noise | None) -> Prediction:
    """Return a forecast with what the same progress takes beside it, where the noise is known."""
    if noise is None:
        return row
    train = spec.train
    found = efficiency.same_progress(row, epochs=train.epochs, reference=train.reference_batch, noise=noise)
    return row.model_copy(update={"same_progress": found})


def _within(surveys: Sequence[_Survey], limits: Limits, noise: Noise | None = None) -> tuple[Prediction, ...]:
    """Return the forecasts within the limits, fastest first.

    Raises:
        Infeasible: there is none; names the first limit that leaves nothing and the configuration closest to it.
    """
    found = [_with_progress(row, survey.part.spec, noise) for survey in surveys for row in survey.rows(limits)]
    left = tuple(sorted(found, key=lambda row: (row.hours, row.nodes, row.batch)))
    if not left:
        raise _nothing_fits(surveys[0].forecast, limits)
    for bound in limits:
        allowed = tuple(row for row in left if bound.value(row) <= bound.most)
        if not allowed:
            closest = min(left, key=lambda row: (bound.value(row), row.hours))
            update = {"hours": limits.hours(closest), "cost": limits.cost(closest)}
            described = _described(closest.model_copy(update=update), surveys[0].part.spec.pricing.currency)
            raise Infeasible(
                f"no configuration is within {bound.words}; the closest is {described}",
                "relax that limit, or search other numbers of nodes and batches",
            )
        left = allowed
    return left


def _nothing_fits(forecast: Forecast, limits: Limits) -> Infeasible:
    """Say of the smallest batch on the wanted nodes why it cannot run."""
    on = f" on {counted(limits.nodes)}" if limits.nodes is not None else ""
    tried = forecast.candidates(limits.wanted)
    why = next((why for config in tried if (why := forecast.why_not(config))), "no batch divides among its GPUs")
    return Infeasible(f"no configuration is feasible{on}: {why}", "tula recommend without --nodes shows those that are")


def _described(row: Prediction, currency: str) -> str:
    kind = f" of type {row.type}" * bool(row.type) + " on spot" * (row.market == "spot")
    return (
        f"{counted(row.nodes)}{kind}, batch {row.batch} (local batch {row.local_batch}): {row.hours:.3g} hours,"
        f" {row.cost:.4g} {currency}"
    )


def _state_of_the_probes(results: Results, unknown: Mapping[Config, str], *, pending: int) -> list[str]:
    """Say what is missing: probes under way, probes that failed, configurations left out of the table."""
    warnings = []
    if pending:
        warnings.append(f"{_under_way(pending)}: the answer may change when they are done")
    warnings += [
        f"the probe with {counted(result.nodes)} and local batch {result.local_batch} failed ({result.message});"
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
    warnings += _second_opinion(forecast, chosen)
    margin = forecast.spec.search.memory_margin
    if chosen.headroom is not None and chosen.headroom < margin:
        warnings.append(
            f"the choice ran in its probe, but leaves only {chosen.headroom:.0%} of the memory free (wanted: {margin:.0%})"
        )
    late = limits.deadline_hours is not None and limits.latest(chosen) > limits.deadline_hours
    if late:
        warnings.append(f"the choice may miss the deadline: up to {limits.latest(chosen):.3g} hours (90 % interval)")
    if chosen.market == "on_demand" and forecast.spec.pricing.spot is not None and forecast.on_spot(chosen) is None:
        warnings.append(f"no spot nodes for {counted(chosen.nodes)}: interruptions would leave no time to get anywhere")
    if chosen.market == "spot" and limits.deadline_hours is not None:
        warnings.append("the time on spot nodes is an expected one: a run with more interruptions takes longer")
    return warnings


def _second_opinion(forecast: Forecast, chosen: Prediction) -> list[str]:
    """Say where a fit without overlap, which is right where little is overlapped, sees the choice quite differently."""
    gpus = forecast.spec.cluster.gpus_per_node
    other = None if chosen.measured else forecast.steps.second_opinion(chosen.nodes, gpus, chosen.local_batch)
    if other is None or chosen.step_low is None or chosen.step_high is None:
        return []
    if chosen.step_low <= other <= chosen.step_high or abs(other / chosen.step_time - 1) < _DISAGREE:
        return []
    return [
        f"a plain additive fit of the same probes gives {other * 1e3:.3g} ms a step for the choice, not"
        f" {chosen.step_time * 1e3:.3g} ms: measure it (search.strategy: full, or adaptive) before relying on it"
    ]


def command(run: RunDir, spec: JobSpec, choice: Prediction) -> str:
    """Return the command line that trains the choice from this run, wherever it is typed.

    It goes to the folder of the probes first: relative paths of the spec and the user's code are found there.
    """
    kind = f" --type {choice.type}" if spec.node_types else ""
    where = f"--run {shlex.quote(str(run.path.absolute()))}{kind}"
    train = f"tula train {where} --nodes {choice.nodes} --batch {choice.batch}"
    tasks = (task for part in run.parts(spec) for task in part.run.tasks())
    folder = next((task.workdir for task in tasks if isinstance(task, ProbeTask)), None)
    return train if folder is None else f"cd {shlex.quote(folder)} && {train}"


def _write(run: RunDir, spec: JobSpec, surveys: Sequence[_Survey], recommendation: Recommendation) -> None:
    """Write the files; recommendation.json last, so that where it stands the others do too."""
    run.write_text("results.csv", _table(surveys, recommendation))
    train = command(run, spec, recommendation.choice)
    run.write_text("recommended.yaml", _recommended_yaml(spec, recommendation, train=train))
    run.write_text("cmd.txt", f"{train}\n")
    run.write_recommendation(recommendation)


def _recommended_yaml(spec: JobSpec, recommendation: Recommendation, *, train: str) -> str:
    """Return the spec, unchanged, below the choice.

    It stays unchanged so that it names the same run: its probes and this recommendation are found again.
    """
    choice = recommendation.choice
    return (
        f"# tula recommends {_described(choice, recommendation.currency)}.\n"
        f"# Asked by: {recommendation.question}.\n"
        f"# Why: {recommendation.reason}.\n"
        f"# Train it: {train}\n"
        f"{dump_yaml(spec)}"
    )


def _table(surveys: Sequence[_Survey], recommendation: Recommendation) -> str:
    """Return every candidate and every result as CSV, ordered by node type, nodes and local batch."""
    import pandas as pd

    by_config: dict[tuple[str, Config], list[Prediction]] = {}
    for row in recommendation.rows:
        by_config.setdefault((row.type, Config(row.nodes, row.batch)), []).append(row)
    rows = []
    for survey in surveys:
        known = {Config(row.nodes, row.batch): row for row in survey.forecast.predictions()}
        for config, result in _configs(survey, by_config).items():
            within = by_config.get((survey.part.type, config), [])
            rows.append(_row(survey, config, known.get(config), result, recommendation, within))
    return pd.DataFrame(rows).to_csv(index=False)


def _configs(
    survey: _Survey, within: Iterable[tuple[str, Config]]
) -> dict[Config, Measured | OutOfMemory | Failed | None]:
    """Return all candidates of a node type and what was asked for besides, each with its probe."""
    gpus = survey.part.spec.cluster.gpus_per_node
    probes = {Config(result.nodes, result.local_batch * result.nodes * gpus): result for result in survey.results}
    found = {*probes, *survey.forecast.candidates(), *(config for name, config in within if name == survey.part.type)}
    return {config: probes.get(config) for config in sorted(found)}


def _row(
    survey: _Survey,
    config: Config,
    known: Prediction | None,
    result: Measured | OutOfMemory | Failed | None,
    recommendation: Recommendation,
    within: Sequence[Prediction],
) -> dict[str, Any]:
    """Return one line of results.csv; every line has the same columns. `within`: its forecasts within the limits."""
    forecast = survey.forecast
    why = "" if known else forecast.why_not(config) or forecast.why_unknown(config)
    row = known or (None if why else forecast.predict(config))
    spot = forecast.on_spot(row) if row else None
    probe = result if isinstance(result, Measured) else None
    gpus = forecast.spec.cluster.gpus_per_node
    return {
        "node_type": survey.part.type,
        "nodes": config.nodes,
        "gpus_per_node": gpus,
        "batch": config.batch,
        "local_batch": config.local_batch(gpus),
        "outcome": _outcome(result, predicted=row is not None),
        "chosen": recommendation.choice in within,
        "within_limits": bool(within),
        "pareto": any(offer.pareto for offer in within),
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
        **_progress_cells(within, recommendation.currency),
        "spot_hours": spot and spot.hours,
        f"spot_cost_{recommendation.currency}": spot and spot.cost,
        "peak_memory_bytes": row and row.peak_memory,
        "memory_headroom_share": row and row.headroom,
        "note": result.message if isinstance(result, OutOfMemory | Failed) else why,
    }


def _progress_cells(within: Sequence[Prediction], currency: str) -> dict[str, float | None]:
    """Return the columns of the same progress, of the first forecast within the limits."""
    found = within[0].same_progress if within else None
    names = {name: name for name in ("epochs", "hours", "hours_low", "hours_high")} | {"cost": f"cost_{currency}"}
    return {
        f"same_progress_{column}": None if found is None else getattr(found, name) for name, column in names.items()
    }


def _outcome(result: Measured | OutOfMemory | Failed | None, *, predicted: bool) -> str:
    if isinstance(result, OutOfMemory):
        return "out_of_memory_assumed" if result.assumed else "out_of_memory"
    if predicted:
        return "measured" if isinstance(result, Measured) else "predicted"
    return "failed" if isinstance(result, Failed) else "left_out"
