"""What a report is made of: one look at a run, the models fitted once, and what was chosen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from tula_cli.cluster.launcher import Launcher
from tula_cli.errors import BadMeasurements, Infeasible, Pending, SpecError, TulaError
from tula_cli.models.choice.grid import Config
from tula_cli.models.choice.objective import knee_batch
from tula_cli.models.choice.offers import Offers
from tula_cli.run.directory import Part, RunDir
from tula_cli.run.jobfile import begun
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.recommendations import Prediction, Recommendation
from tula_cli.run.snapshot import Snapshot
from tula_cli.services import recommend as recommending
from tula_cli.services import status
from tula_cli.services.progress.job_status import ACTIVE
from tula_cli.services.recommendation.answer import Answer
from tula_cli.services.recommendation.measured import TypeMeasurements
from tula_cli.services.status import RunStatus
from tula_cli.spec.job import JobSpec

NEARLY = 0.005
"""Share by which two forecasts differ that are told as one."""


@dataclass(frozen=True)
class PartMaterial:
    """What there is of one part of a run: a type of node, or another length of text."""

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
        return [one for one in self.parts if one.part.length is None]

    @property
    def measured(self) -> list[Measured]:
        return [probe for one in self.own_parts for probe in one.measured]

    @cached_property
    def choice(self) -> Prediction | None:
        """What was chosen, as it is forecast now."""
        if self.kept is None:
            return None if self.answer is None else self.answer.recommendation.choice
        return self._now(self.kept.choice) or self.kept.choice

    def _now(self, row: Prediction) -> Prediction | None:
        if self.answer is None:
            return None
        offers = self.answer.offers
        same = (offers.nodes == row.nodes) & (offers.batch == row.batch)
        found = offers.take(same & (offers.type == row.type) & (offers.market == row.market))
        return found.record(0) if len(found) else None

    @property
    def asked_otherwise(self) -> bool:
        """Whether the kept answer has limits, or suppositions, that `answer` has not."""
        return self.kept is not None and bool(self.kept.options or self.kept.overrides)

    @property
    def words(self) -> Recommendation | None:
        """The answer that is told: the kept one, else that of now."""
        return self.kept or (None if self.answer is None else self.answer.recommendation)

    @property
    def changed(self) -> bool:
        """Whether what is forecast for the choice now is another time than the kept answer has, as trainings have taught."""
        if self.kept is None or self.choice is None:
            return False
        return abs(self.choice.hours / self.kept.choice.hours - 1) > NEARLY

    @property
    def moved(self) -> Prediction | None:
        """What the same question would be answered with now, where that is another configuration than the kept one."""
        if self.kept is None or self.answer is None or self.asked_otherwise or self.kept.objective == "result-time":
            return None
        now = self.answer.recommendation.choice
        return None if _place(now) == _place(self.kept.choice) else now

    @cached_property
    def rows(self) -> tuple[Prediction, ...]:
        """The configurations that are drawn, on the market of the choice: all of some hundreds, else what is worth a look."""
        if self.answer is None or self.choice is None:
            return ()
        return tuple(row for row in self.answer.drawn().rows if row.market == self.choice.market)

    @property
    def own(self) -> TypeMeasurements | None:
        """The fitted models of the choice's type of node."""
        if self.answer is None or self.choice is None:
            return None
        return next((one for one in self.answer.all_measurements if one.type == self.choice.type), None)

    def forecast(self, places: Sequence[Config]) -> list[Prediction]:
        """Return what is known of configurations on the choice's type of node and market; those of which nothing is are left out."""
        own, choice = self.own, self.choice
        if own is None or choice is None:
            return []
        known = own.forecast
        told = [known.predict(one) for one in places if not known.why_not_begun(one) and not known.why_unknown(one)]
        rows = [row if choice.market == "on_demand" else known.on_spot(row) for row in told]
        return [row.model_copy(update={"type": own.type}) for row in rows if row is not None]

    @cached_property
    def knee(self) -> int | None:
        """The batch at the knee of time against batch, over all that is feasible on the choice's type of node; None without one."""
        own, choice = self.own, self.choice
        if own is None or choice is None or self.answer is None:
            return None
        offers = self.answer.offers
        line: Offers = offers.take((offers.type == own.type) & (offers.market == choice.market))
        known = line.take(line.measured) if own.forecast.held_up and bool(np.any(line.measured)) else line
        return knee_batch(known, "time")

    @property
    def currency(self) -> str:
        return self.spec.pricing.currency


def _place(row: Prediction) -> tuple[str, int, int, str]:
    return row.type, row.nodes, row.batch, row.market


def gather(run: RunDir, spec: JobSpec, launcher_for: Callable[[JobSpec], Launcher], *, now: float) -> Material:
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
            part, part.run.read(skip_damaged=True), status.snapshot(part.run, launcher_for(part.spec), now=now)
        )
        for part in begun(run, spec)
    ]
    kept = run.recommendation()
    answer, why = _asked(run, spec, parts, kept, now=now)
    return Material(run, spec, tuple(parts), kept, answer, why, now)


def _asked(
    run: RunDir, spec: JobSpec, parts: Sequence[PartMaterial], kept: Recommendation | None, *, now: float
) -> tuple[Answer | None, str]:
    """Return what the probes say of every configuration, by the kept question's objective; else why they say nothing."""
    pending = {
        one.part.type: sum(job.total - job.done for job in one.now.jobs if job.kind == "probe" and job.state in ACTIVE)
        for one in parts
        if one.part.length is None
    }
    told = (
        kept is not None and kept.objective != "result-time"
    )  # waits are the queue's to tell, and nobody asks it here
    objective, curve = (kept.objective, kept.curve) if kept is not None and told else ("knee", "time")
    with_runs = [Path(name) for name in kept.with_runs] if kept is not None else []
    for wanted, runs in ((objective, with_runs), ("knee", [])):
        try:
            return recommending.recommend(
                run, spec, objective=wanted, curve=curve, with_runs=runs, pending=pending, now=now
            ), ""
        except (Pending, BadMeasurements, Infeasible, SpecError) as error:
            why = error
    return None, in_words(why)


def in_words(error: TulaError) -> str:
    """Return what is wrong and what to do about it, in one line."""
    return f"{error.message}; {error.hint}" if error.hint else error.message
