"""The data of a report, collected once: the records of a run, its fitted models and the choice."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from tula_cli.cluster import launcher
from tula_cli.cluster.launcher import Launcher
from tula_cli.errors import BadMeasurements, Infeasible, Pending, SpecError
from tula_cli.extras.report.values import Row, get_metric_value, has_position
from tula_cli.models.choice.baseline import is_not_clearly_worse, make_headline, predict_baseline
from tula_cli.models.choice.grid import Config
from tula_cli.models.choice.objective import Choice
from tula_cli.query import Query
from tula_cli.run.directory import Run
from tula_cli.run.job_runs import find_recommendation, list_runs_with_data
from tula_cli.run.records.jobs import Attempt
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.recommendations import Headline, Prediction, Recommendation
from tula_cli.run.records.results import Summary
from tula_cli.run.records.tasks import TrainTask
from tula_cli.run.snapshot import Snapshot
from tula_cli.run.training_run import TrainingRun
from tula_cli.services import recommend as recommending
from tula_cli.services import status
from tula_cli.services.measurements import TypeMeasurements, find_gradient_noise_of_job
from tula_cli.services.recommend import Answer
from tula_cli.services.status import RunStatus
from tula_cli.spec.job import JobSpec


@dataclass(frozen=True)
class RunReportData:
    """The records and status of one run: one node type."""

    run: Run
    snapshot: Snapshot
    status: RunStatus

    @property
    def name(self) -> str:
        """Node type of the run; empty if the job names none."""
        return self.run.type or ""

    def make_unique_key(self, key: str) -> str:
        """Return the key of a table, figure or section on this run, unique in the report."""
        return f"{key}_{self.name}" if self.name else key

    def make_unique_title(self, title: str) -> str:
        """Return the title of a table, figure or section on this run."""
        return f"{title}: {self.name}" if self.name else title


@dataclass(frozen=True)
class ReportData:
    """All data of the runs of a job that a report uses.

    `kept` is the stored recommendation, which `tula train` uses. `answer` is the current recommendation over all
    configurations, without the limits of the stored question so that no part of a curve is hidden; it is None if the
    probes do not allow a recommendation, and `unanswered` explains why.
    """

    parts: tuple[RunReportData, ...]
    kept: Recommendation | None
    answer: Answer | None
    unanswered: str
    at: float  # Unix time

    @property
    def spec(self) -> JobSpec:
        """The job on the first hardware."""
        return self.parts[0].run.spec

    @property
    def measured(self) -> list[Measured]:
        return [probe for part in self.parts for probe in part.snapshot.measured]

    @cached_property
    def choice(self) -> Prediction | None:
        """The chosen configuration, with its current prediction if there is one; None without any recommendation."""
        if self.kept is None:
            return None if self.answer is None else self.answer.recommendation.choice
        if self.answer is None:
            return self.kept.choice
        row = self.kept.choice
        matching = self.answer.candidates.select_matching_rows(
            type=row.type, nodes=row.nodes, batch=row.batch, market=row.market
        )
        return matching.make_prediction(0) if len(matching) else row

    @property
    def shown_recommendation(self) -> Recommendation | None:
        """The recommendation to show: the stored one, otherwise the current one."""
        return self.kept or (None if self.answer is None else self.answer.recommendation)

    @cached_property
    def headline(self) -> Headline | None:
        """The comparison of the choice with today's configuration, by the current predictions if there are any."""
        recommendation, choice, measurements = self.shown_recommendation, self.choice, self.choice_measurements
        if self.answer is None or recommendation is None or choice is None or measurements is None:
            return None if recommendation is None else recommendation.headline
        objective = recommendation.objective
        noise = find_gradient_noise_of_job(self.answer.all_measurements, needed=objective == "accuracy-time")
        return make_headline(
            Choice(choice, recommendation.reason, recommendation.runners_up),
            predict_baseline(measurements.estimator, noise, node_type=choice.type),
            self.answer.candidates,
            measurements.estimator,
            noise,
            objective=objective,
            accuracy=recommendation.accuracy,
        )

    @property
    def changed_choice(self) -> Prediction | None:
        """The current choice for the stored question, if it is another configuration and better beyond the noise."""
        if self.kept is None or self.answer is None or self.kept.options or self.kept.overrides:
            return None  # the stored query had limits that the current one does not have
        current_choice = self.answer.recommendation.choice
        assert self.choice is not None
        return None if is_not_clearly_worse(self.choice, current_choice) else current_choice

    @cached_property
    def rows(self) -> tuple[Prediction, ...]:
        """The configurations to draw, on the market of the choice."""
        if self.answer is None or self.choice is None:
            return ()
        return tuple(row for row in self.answer.with_figure_rows().rows if row.market == self.choice.market)

    @property
    def choice_measurements(self) -> TypeMeasurements | None:
        """The fitted models of the choice's node type."""
        if self.answer is None or self.choice is None:
            return None
        of_type = {measurements.type: measurements for measurements in self.answer.all_measurements}
        return of_type.get(self.choice.type)

    @property
    def missing_prediction_reason(self) -> str:
        """Why the choice has no models."""
        return self.unanswered or f"node type {self.choice.type if self.choice else ''} has no measurements"

    def predict_configurations(self, configs: Sequence[Config]) -> list[Prediction]:
        """Predict configurations on the choice's node type and market; those without a prediction are left out."""
        measurements, choice = self.choice_measurements, self.choice
        if measurements is None or choice is None:
            return []
        estimator = measurements.estimator
        startable = [config for config in configs if not estimator.describe_why_not_startable(config)]
        rows = [estimator.predict_if_known(configuration, choice.market) for configuration in startable]
        return [row.model_copy(update={"type": measurements.type}) for row in rows if row is not None]

    @property
    def currency(self) -> str:
        return self.spec.pricing.currency


_make_launcher = partial(launcher.make_launcher, submits=False)


def collect_report_data(
    runs: Sequence[Run],
    launcher_for: Callable[[JobSpec], Launcher] = _make_launcher,
    *,
    now: float,
) -> ReportData:
    """Read the runs of a job and fit their models.

    Args:
        launcher_for: returns the launcher of a job, which knows whether jobs are active.
        now: Unix time.

    Raises:
        TulaError: a record of the run cannot be read.
    """
    parts = [
        RunReportData(run, run.read_snapshot(), status.read_run_status(run, launcher_for(run.spec), now=now))
        for run in list_runs_with_data(runs)
    ]
    stored = find_recommendation(runs)
    answer, why = _recommend_from_current_probes([part.run for part in parts], stored, launcher_for, now=now)
    return ReportData(tuple(parts), stored, answer, why, now)


def _recommend_from_current_probes(
    runs: Sequence[Run], stored: Recommendation | None, launcher_for: Callable[[JobSpec], Launcher], *, now: float
) -> tuple[Answer | None, str]:
    """Recommend from the current probes by the stored objective, else by the knee; return the answer or the reason."""
    pending = recommending.count_pending_probes(runs, launcher_for)
    objective, curve = (stored.objective, stored.curve) if stored is not None else ("knee", "time")
    why = ""
    for objective_tried in dict.fromkeys((objective, "knee")):
        try:
            query = Query(objective=objective_tried, curve=curve)
            return recommending.recommend_configuration(runs, query, pending=pending, now=now), ""
        except (Pending, BadMeasurements, Infeasible, SpecError) as error:
            why = f"{error.message}; {error.hint}" if error.hint else error.message
    return None, why


# --- One training


@dataclass(frozen=True)
class TrainingReportData:
    """A training of a run; `count` trainings of the run exist outside its comparison.

    If all trainings belong to the comparison, `count` is their number.
    """

    part: RunReportData
    files: TrainingRun
    task: TrainTask
    count: int
    newer: tuple["TrainingReportData", ...] = ()  # newer trainings that were cancelled or failed

    @cached_property
    def rows(self) -> Sequence[Row]:
        """Rows of the training's metrics; the steps of a long training are subsampled."""
        return [row for row in self.files.read_sampled_metrics() if has_position(row)]

    def select_rows_of_kind(self, *kinds: str) -> list[Row]:
        return [row for row in self.rows if row["kind"] in kinds]

    @cached_property
    def summary(self) -> Summary | None:
        return self.files.read_summary()

    @cached_property
    def attempts(self) -> list[Attempt]:
        return self.files.read_attempts()

    @property
    def state(self) -> str:
        """State of the training's job, as in `tula status`; "done" if the training has a summary."""
        if self.summary is not None:
            return "done"
        return next((job.state for job in self.part.status.jobs if job.id == self.task.job), "not submitted")

    @property
    def metric(self) -> str:
        """The metric that judges the training; the loss on the evaluation set if no preferred metric was logged.

        Preferred are `train.best_checkpoint`, top1 and perplexity, in this order, or the metrics of a script.
        """
        requested_metric, epochs = self.task.spec.train.best_checkpoint.metric, self.select_rows_of_kind("epoch")
        names = self.task.spec.workload.reported_metrics or (requested_metric, "top1", "perplexity")
        logged = (name for name in names if any(get_metric_value(row, name) is not None for row in epochs))
        return next(logged, "eval_loss")


def list_newest_trainings(material: ReportData) -> list[TrainingReportData]:
    """Return one training per run: the newest that is active or finished, otherwise the newest.

    A training of a comparison is used only if it trains the job unchanged and the run has no other trainings.
    """
    return [training for part in material.parts for training in _find_newest_training(part)]


def _find_newest_training(part: RunReportData) -> Iterator[TrainingReportData]:
    comparison = part.snapshot.comparison
    compared = frozenset[str]() if comparison is None else comparison.signatures
    tasks = part.snapshot.train_tasks
    unchanged = frozenset[str]() if comparison is None else comparison.unchanged_job_signatures
    shown_tasks = [task for task in tasks if task.signature not in compared]
    shown_tasks = shown_tasks or [task for task in tasks if task.signature in unchanged]
    submitted = {job.id: job.submitted_at for job in part.snapshot.jobs}
    newest_by_signature = {
        task.signature: task
        for task in sorted(shown_tasks, key=lambda task: (submitted.get(task.job, 0.0), task.attempt))
    }
    count = len(newest_by_signature)
    trainings = [
        TrainingReportData(part, part.snapshot.get_training(task.signature), task, count)
        for task in sorted(newest_by_signature.values(), key=lambda task: submitted.get(task.job, 0.0), reverse=True)
    ]
    shown = next((training for training in trainings if training.state in ("done", *status.ACTIVE_STATES)), None)
    if shown is not None:
        yield replace(shown, newer=tuple(trainings[: trainings.index(shown)]))
    else:
        yield from trainings[:1]
