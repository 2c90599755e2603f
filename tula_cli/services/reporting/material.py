"""The data of a report: a run read once, its models fitted once, and the choice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tula_cli.cluster.launcher import Launcher
from tula_cli.errors import BadMeasurements, Infeasible, Pending, SpecError, TulaError
from tula_cli.models.choice.grid import Config
from tula_cli.models.choice.objective import find_knee_batch
from tula_cli.models.choice.offers import Offers
from tula_cli.run.directory import Part, RunDir
from tula_cli.run.jobfile import list_parts_with_data
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.recommendations import Prediction, Recommendation
from tula_cli.run.snapshot import Snapshot
from tula_cli.services import recommend as recommending
from tula_cli.services import status
from tula_cli.services.recommendation.answer import Answer
from tula_cli.services.recommendation.measured import TypeMeasurements
from tula_cli.services.status import ACTIVE, RunStatus
from tula_cli.spec.job import JobSpec

MIN_RELATIVE_CHANGE = 0.005
"""Share by which two forecasts differ that are told as one."""


@dataclass(frozen=True)
class PartMaterial:
    """The records and status of one part of a run: a type of node, or another length of text."""

    part: Part
    look: Snapshot
    now: RunStatus

    @property
    def name(self) -> str:
        """Its type of node, or length; empty where the job names none."""
        return self.part.name or ""

    @property
    def measured(self) -> list[Measured]:
        """Its probes that ran, by nodes and local batch."""
        return [result for result in self.look.results if isinstance(result, Measured)]

    @property
    def ended_otherwise(self) -> list[OutOfMemory | Failed]:
        return [result for result in self.look.results if not isinstance(result, Measured)]


@dataclass(frozen=True)
class Material:
    """A run as a report sees it.

    `kept` is the answer that `tula train` takes. `answer` is what the probes say now of all configurations, without the
    limits of a question, for limits hide nothing of a curve; None where they tell none, and `unanswered` says why.
    """

    run: RunDir
    spec: JobSpec
    parts: tuple[PartMaterial, ...]
    kept: Recommendation | None
    answer: Answer | None
    unanswered: str
    at: float  # Unix time

    @property
    def own_parts(self) -> list[PartMaterial]:
        """The parts that train: of a job with other lengths of text those at its own."""
        return [part_material for part_material in self.parts if part_material.part.length is None]

    @property
    def measured(self) -> list[Measured]:
        return [probe for part_material in self.own_parts for probe in part_material.measured]

    @cached_property
    def choice(self) -> Prediction | None:
        """The choice, with its current prediction."""
        if self.kept is None:
            return None if self.answer is None else self.answer.recommendation.choice
        return self._current_prediction(self.kept.choice) or self.kept.choice

    def _current_prediction(self, row: Prediction) -> Prediction | None:
        if self.answer is None:
            return None
        offers = self.answer.offers
        same = (offers.nodes == row.nodes) & (offers.batch == row.batch)
        matching = offers.take(same & (offers.type == row.type) & (offers.market == row.market))
        return matching.record(0) if len(matching) else None

    @property
    def has_other_question(self) -> bool:
        """Whether the kept answer has limits, or settings by `--set`, that `answer` has not."""
        return self.kept is not None and bool(self.kept.options or self.kept.overrides)

    @property
    def shown_recommendation(self) -> Recommendation | None:
        """The answer that is told: the kept one, else that of now."""
        return self.kept or (None if self.answer is None else self.answer.recommendation)

    @property
    def has_changed(self) -> bool:
        """Whether what is forecast for the choice now is another time than the kept answer has, as trainings have taught."""
        if self.kept is None or self.choice is None:
            return False
        return abs(self.choice.hours / self.kept.choice.hours - 1) > MIN_RELATIVE_CHANGE

    @property
    def changed_choice(self) -> Prediction | None:
        """The choice that the same question has now, if it is another configuration than the stored one."""
        if self.kept is None or self.answer is None or self.has_other_question:
            return None
        current_choice = self.answer.recommendation.choice
        return None if _get_configuration(current_choice) == _get_configuration(self.kept.choice) else current_choice

    @cached_property
    def rows(self) -> tuple[Prediction, ...]:
        """The configurations that are drawn, on the market of the choice: all of some hundreds, else what is worth a look."""
        if self.answer is None or self.choice is None:
            return ()
        return tuple(row for row in self.answer.with_drawn_rows().rows if row.market == self.choice.market)

    @property
    def choice_measurements(self) -> TypeMeasurements | None:
        """The fitted models of the choice's type of node."""
        if self.answer is None or self.choice is None:
            return None
        return next(
            (measurements for measurements in self.answer.all_measurements if measurements.type == self.choice.type),
            None,
        )

    def forecast(self, places: Sequence[Config]) -> list[Prediction]:
        """Return what is known of configurations on the choice's type of node and market; those of which nothing is are left out."""
        measurements, choice = self.choice_measurements, self.choice
        if measurements is None or choice is None:
            return []
        forecast = measurements.forecast
        predictions = [
            forecast.predict(configuration)
            for configuration in places
            if not forecast.why_not_begun(configuration) and not forecast.why_unknown(configuration)
        ]
        rows = [row if choice.market == "on_demand" else forecast.on_spot(row) for row in predictions]
        return [row.model_copy(update={"type": measurements.type}) for row in rows if row is not None]

    @cached_property
    def knee(self) -> int | None:
        """The batch at the knee of time against batch, over all that is feasible on the choice's type of node; None without one."""
        measurements, choice = self.choice_measurements, self.choice
        if measurements is None or choice is None or self.answer is None:
            return None
        offers = self.answer.offers
        line: Offers = offers.take((offers.type == measurements.type) & (offers.market == choice.market))
        measured_line = (
            line.take(line.measured) if measurements.forecast.held_up and bool(np.any(line.measured)) else line
        )
        return find_knee_batch(measured_line, "time")

    @property
    def currency(self) -> str:
        return self.spec.pricing.currency


def _get_configuration(row: Prediction) -> tuple[str, int, int, str]:
    return row.type, row.nodes, row.batch, row.market


def gather_material(run: RunDir, spec: JobSpec, launcher_for: Callable[[JobSpec], Launcher], *, now: float) -> Material:
    """Look at a run once, and fit its models once.

    Args:
        run: the run.
        spec: its job.
        launcher_for: knows whether jobs are under way.
        now: Unix time.

    Raises:
        TulaError: a record of the run cannot be read.
    """
    parts = [
        PartMaterial(
            part, part.run.read(skip_damaged=True), status.run_status(part.run, launcher_for(part.spec), now=now)
        )
        for part in list_parts_with_data(run, spec)
    ]
    stored = run.recommendation()
    answer, why = _recommend_now(run, spec, parts, stored, now=now)
    return Material(run, spec, tuple(parts), stored, answer, why, now)


def _recommend_now(
    run: RunDir, spec: JobSpec, parts: Sequence[PartMaterial], stored: Recommendation | None, *, now: float
) -> tuple[Answer | None, str]:
    """Return what the probes say of every configuration, by the kept question's objective; else why they say nothing."""
    pending = {
        part_material.part.type: sum(
            job.total - job.done for job in part_material.now.jobs if job.kind == "probe" and job.state in ACTIVE
        )
        for part_material in parts
        if part_material.part.length is None
    }
    objective, curve = (stored.objective, stored.curve) if stored is not None else ("knee", "time")
    for objective_tried in (objective, "knee"):
        try:
            return recommending.recommend(
                run, spec, objective=objective_tried, curve=curve, pending=pending, now=now
            ), ""
        except (Pending, BadMeasurements, Infeasible, SpecError) as error:
            why = error
    return None, describe_error(why)


def describe_error(error: TulaError) -> str:
    """Return what is wrong and what to do about it, in one line."""
    return f"{error.message}; {error.hint}" if error.hint else error.message
