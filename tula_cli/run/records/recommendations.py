"""A recommendation and its predictions."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from pydantic import Field, field_validator, model_validator

from tula_cli.errors import SpecError
from tula_cli.query import Curve, Objective, Query, parse_hours
from tula_cli.run.frames import make_record_frame, render_html
from tula_cli.run.records.base import Market, Record, RecordedText
from tula_cli.words import (
    choose_time_unit,
    describe_configuration,
    format_count,
    format_duration,
    format_number,
    is_interval_too_wide,
    join_words,
)

if TYPE_CHECKING:
    import pandas as pd


class SameProgress(Record):
    """Epochs, hours and cost that a configuration needs for the progress of the spec's epochs at its reference batch.

    `low` and `high` bound the range due to the growth of the gradient noise and the 90 % interval of the step time.
    """

    epochs: float = Field(description="epochs needed for the same progress")
    epochs_low: float = Field(description="epochs, lower end of the range")
    epochs_high: float = Field(description="epochs, upper end of the range")
    epochs_alike: float = Field(
        description="epochs if every sample contributes equally at any batch (one end of the range)"
    )
    epochs_lossy: float = Field(description="epochs if a large batch loses most (the other end of the range)")
    hours: float = Field(description="hours for the same progress")
    hours_low: float = Field(description="hours, lower end of the range")
    hours_high: float = Field(description="hours, upper end of the range")
    cost: float = Field(description="cost for the same progress, in the currency of the pricing")


class TimeParts(Record):
    """Breakdown of a training's wall-clock time; seconds."""

    steps: float = Field(
        description="seconds of all steps, including data, synchronisation and updates of scaling factors"
    )
    data: float | None = Field(description="seconds in which steps wait for the data loader; None if not measured")
    evaluation: float = Field(description="seconds of evaluations")
    checkpoints: float = Field(description="seconds of writing checkpoints")
    branches: float = Field(description="seconds of the branches of a training with method auto")
    rest: float = Field(description="seconds of starts and exits of the ranks, and seconds lost to interruptions")

    @property
    def total(self) -> float:
        return self.steps + self.evaluation + self.checkpoints + self.branches + self.rest


class Stage(Record):
    """One stage of a batch-size ramp (`train.ramp`): the batch used from `begin` samples onwards."""

    begin: int  # samples trained before the stage
    batch: int  # global
    epoch: float | None = None  # `begin` in epochs, in stored recommendations; else None
    noise: float | None = None  # gradient noise scale (samples) at `begin`; None if the stages follow another rule
    nodes: int | None = None  # None if all stages run on the nodes of the training


class StageSteps(Record):
    """The predicted steps of one stage of a batch-size ramp (`train.ramp`)."""

    batch: int
    steps: int  # optimizer steps of this stage in the whole training
    share: float = 0.0  # share of the training's epochs
    step_time: float  # seconds
    step_low: float | None  # lower and upper end of the 90 % interval; None if there is no residual
    step_high: float | None
    nodes: int | None = None  # None: the nodes of the training


class Prediction(Record):
    """A forecast of one configuration; `low` and `high` bound a 90 % interval (None if there is no residual).

    Its fields, with those of `parts` and `same_progress`, are the columns of the table of candidates
    (`frames.list_columns`): each is described here, with its unit, and nowhere else.
    """

    nodes: int = Field(description="number of nodes")
    batch: int = Field(description="global batch: samples per optimizer step over all GPUs")
    local_batch: int = Field(description="samples per optimizer step on one GPU")
    step_time: float = Field(description="seconds per optimizer step")
    step_low: float | None = Field(description="seconds per step, lower end of the interval")
    step_high: float | None = Field(description="seconds per step, upper end of the interval")
    hours: float = Field(description="hours of the training; on spot nodes the expected hours")
    hours_low: float | None = Field(description="hours, lower end of the interval")
    hours_high: float | None = Field(description="hours, upper end of the interval")
    cost: float = Field(description="cost in the currency of the pricing; on spot nodes the expected cost")
    peak_memory: int | None = Field(description="reserved memory of one GPU, bytes")
    headroom: float | None = Field(description="share of a GPU's memory that remains free")
    measured: bool = Field(description="whether a probe or training measured the step time")
    further: bool = Field(default=False, description="whether the number of nodes is larger than that of any probe")
    step_fitted: float | None = Field(
        default=None, description="seconds per step predicted by the fit, if step_time is measured"
    )
    scaling_efficiency: float | None = Field(
        default=None,
        description="samples/s per GPU, relative to the fewest nodes of the search with the same batch per GPU; None if unknown",
    )
    trained: str = Field(
        default="", description="signature of the newest training with this configuration; empty if there is none"
    )
    trained_hours: float | None = Field(
        default=None,
        description="hours that this training took; None if it has not finished, had another length, or changed its"
        " configuration",
    )
    includes_training: bool = Field(
        default=False, description="whether step_time is based on steps of trainings with this configuration"
    )
    type: str = Field(default="", description="node type; empty if the job names none")
    market: Market = Field(default="on_demand", description="on_demand or spot")
    same_progress: SameProgress | None = Field(default=None, description="None if the gradient noise was not measured")
    refresh_share: float | None = Field(
        default=0.0, description="share of the hours for updates of scaling factors; None if not measured"
    )
    energy: float | None = Field(
        default=None, description="joules per step of all GPUs; None (and kwh too) if a GPU has no energy counter"
    )
    kwh: float | None = Field(default=None, description="kWh of the training, all GPUs")
    kwh_low: float | None = Field(default=None, description="kWh, lower end of the interval")
    kwh_high: float | None = Field(default=None, description="kWh, upper end of the interval")
    parts: TimeParts | None = Field(default=None, description="breakdown of the hours; None for a script")
    stages: tuple[StageSteps, ...] = Field(
        default=(), description="stages before the training's own batch (train.ramp), ascending by batch"
    )
    node_hours: float | None = Field(
        default=None,
        description="node-hours to pay for; fewer than nodes x hours if stages run on fewer nodes; None in results"
        " of an older tula",
    )
    pareto: bool = Field(
        default=False,
        description="whether no other row is at least as good in time, cost and (if all rows have it) kWh, and"
        " better in one of them",
    )

    @property
    def configuration(self) -> tuple[str, int, int, str]:
        """The values that identify the configuration: node type, nodes, batch and market."""
        return self.type, self.nodes, self.batch, self.market

    @property
    def kind_text(self) -> str:
        """The node type and market, to follow a number of nodes; empty if neither matters."""
        return f" of type {self.type}" * bool(self.type) + " on spot" * (self.market == "spot")

    @property
    def source(self) -> str:
        """Where the step time comes from, in a word, and whether the configuration was trained, with the duration."""
        duration = "" if self.trained_hours is None else f" ({format_duration(3600 * self.trained_hours)})"
        if self.includes_training:
            return f"training{duration}"
        source = "measured" if self.measured else "extrapolated" if self.further else "predicted"
        return f"{source}, trained{duration}" if self.trained else source

    @property
    def all_node_hours(self) -> float:
        """The node-hours to be paid for."""
        return self.nodes * self.hours if self.node_hours is None else self.node_hours

    def compute_hours_on_nodes(self, nodes: int) -> float:
        """Return the hours of steps in the stages that run on `nodes` nodes, fewer than the training's own."""
        return sum(stage.steps * stage.step_time for stage in self.stages if stage.nodes == nodes) / 3600

    def get_prediction_at_batch(self, batch: int) -> "Prediction | StageSteps | None":
        """Return the prediction for a step at a batch of this training; None if there is none."""
        if batch == self.batch:
            return self
        return next((stage for stage in self.stages if stage.batch == batch), None)


HIGHEST_EFFICIENCY = 1.1
"""Highest plausible ratio to ideal scaling (caches and noise may exceed 1); above it a measurement is wrong."""


def list_caveats(row: Prediction, choice: Prediction) -> tuple[str, ...]:
    """Return the reasons not to trust a figure of a configuration, by the keys of `CAVEATS`.

    They are marked in every table and named in the JSON of each row.

    Args:
        choice: the configuration with which the others are compared.
    """
    names = ["wide_interval"] * is_interval_too_wide(row.hours_low, row.hours_high)
    if row.configuration != choice.configuration:
        intervals, intervals_of_choice = _list_quantity_intervals(row), _list_quantity_intervals(choice)
        names += [
            f"{name}_within_noise"
            for name, interval in intervals.items()
            if _intervals_overlap(interval, intervals_of_choice[name])
        ]
    return (*names, *["efficiency_above_110"] * ((row.scaling_efficiency or 0.0) > HIGHEST_EFFICIENCY))


CAVEATS = {
    "wide_interval": "the 90 % interval is too wide for a decision",
    "within_noise": "the 90 % interval overlaps that of the choice, so the difference may be noise",
    "efficiency_above_110": "samples/s per GPU exceed 110 % of those on the fewest nodes; a step time is probably"
    " wrong",
}
"""Descriptions of the caveats; those of a quantity (time, cost, energy, progress) are named `QUANTITY_within_noise`."""


def get_caveat_kind(name: str) -> str:
    """Return the key of a caveat in `CAVEATS`."""
    return "within_noise" if name.endswith("_within_noise") else name


Interval = tuple[float | None, float | None]


def _list_quantity_intervals(row: Prediction) -> dict[str, Interval]:
    """Return the 90 % interval of each quantity of a configuration; cost is as uncertain as time."""
    low, high = row.hours_low, row.hours_high
    cost = row.cost / row.hours if row.hours else 0.0
    progress = row.same_progress
    return {
        "time": (low, high),
        "cost": (None if low is None else cost * low, None if high is None else cost * high),
        "energy": (row.kwh_low, row.kwh_high),
        "progress": (None, None) if progress is None else (progress.hours_low, progress.hours_high),
    }


def _intervals_overlap(a: Interval, b: Interval) -> bool:
    if a[0] is None or a[1] is None or b[0] is None or b[1] is None:
        return False
    return a[0] <= b[1] and b[0] <= a[1]


class TrainedSteps(Record):
    """Measured step times of a training at one configuration, which supplement the probes. Seconds."""

    signature: str
    nodes: int
    gpus_per_node: int
    batch: int
    step_time: float  # trimmed mean of step_times
    step_times: tuple[float, ...]  # mean step times of consecutive stretches of equal length, without AGS refreshes
    compute: float | None
    """A step without synchronisation, including the wait for data; None if not measured separately."""
    sync: float | None  # exposed synchronisation; None if not measured
    data_wait: float | None  # None for a script
    steps: int  # steps that were evaluated, over all attempts; in a long training a sample of the logged steps
    probed: float | None = None  # step time measured by a probe of the same configuration; None without one
    changed: float  # |ln(step time after / before)| of the largest change during the training; 0 without a change
    noise: float  # relative standard deviation of step_time as an estimate for other jobs
    since: float  # Unix time of the first evaluated step
    until: float  # Unix time of the last evaluated step

    @property
    def local_batch(self) -> int:
        return self.batch // (self.nodes * self.gpus_per_node)


class StartEstimate(Record):
    """The scheduler's own estimate of when the first job of a training would start (`sbatch --test-only`)."""

    nodes: int
    minutes: int  # time limit of the job
    asked_at: float  # Unix time
    wait: float | None  # seconds from asked_at to the start; None if the scheduler gave no start time
    reason: RecordedText = ""  # why there is no start time; empty if there is one


class Accuracy(Record):
    """Accuracy of the job's method at a batch compared with the small batch, from trainings of `tula compare`."""

    outcome: Literal["keeps", "may lose"]
    batch: int  # trained batch: that of the choice, or the next larger one
    reference_batch: int
    metric: str
    gap: float
    """How much worse than the reference, in the metric's unit (top1: percentage points); negative: better than it."""
    error: float | None  # standard error of the gap; None with one seed
    seeds: int  # number of seeds
    words: str  # the result as text


RiskLevel = Literal["low", "medium", "high", "unknown"]

LOW_RISK, HIGH_RISK = 0.5, 1.0
"""Batch, as a multiple of the gradient noise scale, up to which the accuracy risk is low, and above which it is high.

At the noise scale the same progress takes twice as many samples as with a small batch, at half of it 1.5 times as many
(1 + batch / noise scale; McCandlish et al. 2018, "An Empirical Model of Large-Batch Training").
"""
FEW_STEPS_MEDIUM, FEW_STEPS_HIGH = 2, 8
"""Batch, as a multiple of the reference batch, above which the risk is at least medium, and from which it is high, if
the batch does not grow: at 8 to 16 times the reference batch most methods with a constant batch lost accuracy in the
project's own trainings (docs/reference/results.md, "Accuracy")."""


class AccuracyRisk(Record):
    """Risk that a batch trains to a lower accuracy than the batch that the learning rate was tuned for."""

    level: RiskLevel
    reason: str
    batch_over_noise_scale: float | None = None  # None if the noise scale is unknown

    @property
    def text(self) -> str:
        return f"accuracy risk {self.level} ({self.reason})"


class RiskBasis(Record):
    """The values from which the accuracy risk of every batch follows."""

    reference_batch: int  # batch that the learning rate was tuned for
    noise_scale: float | None
    """Gradient noise scale in samples; None if unknown. If it grows during the training, the constant one that has the same
    effect on the training as a whole."""
    is_lower_bound: bool  # noise_scale is only a lower bound
    batch_grows: bool  # the batch grows during the training

    def assess_batch(self, batch: int, accuracy: Accuracy | None = None) -> AccuracyRisk:
        """Return the risk of a global batch; a result of `tula compare` that covers the batch takes precedence."""
        ratio = None if self.noise_scale is None else batch / max(self.noise_scale, 1e-9)
        if batch <= self.reference_batch:
            reason = "batch is not above the one that the learning rate was tuned for"
            return AccuracyRisk(level="low", reason=reason, batch_over_noise_scale=ratio)
        if accuracy is not None and accuracy.outcome == "keeps" and batch <= accuracy.batch:
            return AccuracyRisk(level="low", reason="measured by tula compare", batch_over_noise_scale=ratio)
        if accuracy is not None and accuracy.outcome == "may lose" and batch >= accuracy.batch:
            return AccuracyRisk(level="high", reason="measured by tula compare", batch_over_noise_scale=ratio)
        if ratio is None or (self.is_lower_bound and ratio > LOW_RISK):
            return AccuracyRisk(level="unknown", reason="run tula compare", batch_over_noise_scale=ratio)
        multiple = batch / self.reference_batch
        by_noise = 0 if ratio <= LOW_RISK else 1 if ratio <= HIGH_RISK else 2
        by_steps = 0 if self.batch_grows or multiple <= FEW_STEPS_MEDIUM else 1 if multiple < FEW_STEPS_HIGH else 2
        times = f"{format_number(ratio, 2)} of" if ratio < 1 else f"{format_number(ratio, 2)} times"
        reason = f"batch is {'at most ' * self.is_lower_bound}{times} the noise scale"
        if by_steps > by_noise:
            reason = f"a constant batch of {multiple:.3g} times the reference batch"
        may_lose = accuracy is not None and accuracy.outcome == "may lose"
        if may_lose and not max(by_noise, by_steps):
            by_noise, reason = 1, "a larger batch lost accuracy in tula compare"
        levels: tuple[RiskLevel, ...] = ("low", "medium", "high")
        return AccuracyRisk(level=levels[max(by_noise, by_steps)], reason=reason, batch_over_noise_scale=ratio)


class Change(Record):
    """A quantity with today's configuration and with the choice."""

    before: float
    after: float
    ratio: float  # before / after; above 1 if the choice needs less
    within_noise: bool  # the 90 % interval of the ratio includes 1, or they differ by less than 2 %


class Headline(Record):
    """The choice of a recommendation compared with today's configuration, the baseline."""

    text: str  # sentence with the result of the comparison
    comparison: str  # sentence that describes the baseline
    length: str = ""  # training length as text, such as "20 epochs"; empty in results of an older tula
    interval: str  # 90 % interval of the choice's time as text; empty if there is none
    preference: str  # why a knee was chosen although another row is faster and cheaper; empty if no row is
    nodes: int  # nodes of the baseline
    batch: int  # global batch of the baseline
    baseline: Prediction | None  # None if the baseline cannot run, or its step time is unknown
    problem: str = ""  # why there is no prediction of the baseline; empty if there is one
    is_baseline: bool  # the choice is the baseline
    baseline_predicted: bool  # the step time of the baseline was not measured
    choice_predicted: bool  # the step time of the choice was not measured
    time: Change | None  # hours; None without a prediction of the baseline, or if it is the choice
    cost: Change | None  # in the currency of the pricing; None also without prices
    energy: Change | None  # kWh; None except for objective energy
    risk: AccuracyRisk
    risk_basis: RiskBasis

    def compute_speed_up(self, row: Prediction) -> float | None:
        """Return how many times as fast as the baseline a configuration trains the job's epochs; None if unknown."""
        return None if self.baseline is None else self.baseline.hours / row.hours


TradeOff = Literal["cost", "nodes"]
"""A quantity against which `Recommendation.plot` shows the time."""

ADDED_COLUMNS = {
    "chosen": "whether the row is the choice",
    "speed_up": "hours of today's configuration (section `baseline`) divided by those of the row; None if unknown",
    "accuracy_risk": "accuracy risk of the batch: low, medium, high or unknown; None in results of an older tula",
    "caveats": "names of the reasons to distrust a value of the row; empty if there are none",
}
"""Columns of `Recommendation.frame()` that are not fields of `Prediction`, with their descriptions."""


class RowNotes(NamedTuple):
    """The values of `ADDED_COLUMNS` for a row, which also the rows of `tula recommend --json` have."""

    chosen: bool
    speed_up: float | None
    accuracy_risk: RiskLevel | None
    caveats: tuple[str, ...]


def _format_interval(low: float | None, high: float | None, divisor: float) -> str:
    """Return an interval of hours in a unit of `divisor` seconds."""
    if low is None or high is None:
        return "unknown"
    ends = f"{format_number(3600 * low / divisor)} to {format_number(3600 * high / divisor)}"
    return f"{ends} (too uncertain to decide by)" if is_interval_too_wide(low, high) else ends


class QueryLimits(Record):
    """The limits of the query that a recommendation answers; None is no limit."""

    nodes: int | None = None
    max_nodes: int | None = None
    max_batch: int | None = None
    min_efficiency: float | None = None
    deadline_hours: float | None = None
    budget: float | None = None

    @classmethod
    def from_query(cls, query: Query) -> "QueryLimits":
        """Return the limits of a query."""
        return cls(**{name: getattr(query, name) for name in cls.model_fields})

    @classmethod
    def from_options(cls, options: Iterable[str]) -> "QueryLimits":
        """Return the limits among options as typed, such as "--deadline 24", which older versions stored alone."""
        typed = dict(option.split(maxsplit=1) for option in options if " " in option)
        values: dict[str, Any] = {name: typed.get(f"--{name.replace('_', '-')}") for name in cls.model_fields}
        return cls(**values | {"deadline_hours": parse_hours(typed["--deadline"]) if "--deadline" in typed else None})


class Recommendation(Record):
    """The answer of `tula recommend`."""

    objective: Objective
    curve: Curve
    headline: Headline | None = None  # None in results of an older tula
    choice: Prediction
    reason: str  # why it was chosen
    rows: tuple[Prediction, ...]  # all feasible configurations if they are few, else a selection; fastest first
    runners_up: tuple[Prediction, ...]
    candidates: int | None = None
    """Number of feasible configurations; None in results of an older tula, where rows has all."""
    warnings: tuple[RecordedText, ...] = ()
    currency: str
    price: str  # text with unit, source and date of the price; one line per node type
    fit_error: float | None  # median relative error of the fit; None if it has as many parameters as points
    fit: str  # description of the fit; one line per node type
    power: str = ""  # source of the kWh, one line per node type; empty if no probe measured energy
    efficiency: str = ""  # source of `same_progress` as text; empty if there is none
    interruption: str = ""  # cost of an interruption of a script as text; empty for tula's own loop
    start_estimate: StartEstimate | None = None  # for the choice; None if SLURM was not asked
    stages: tuple[Stage, ...] = ()
    """Stages of the choice, that of its full batch last; empty if its batch does not grow."""
    ramp: str = ""  # the stages as text; empty without stages
    accuracy: Accuracy | None = None  # None if tula compare has trained no such batch with the job's method
    other_market: Prediction | None = None  # the choice on on-demand nodes if it is on spot nodes, and vice versa
    trainings: tuple[TrainedSteps, ...] = ()  # trainings included in the fit, of all node types
    trainings_left_out: tuple[str, ...] = ()  # sentences on trainings that are not included, with the reason
    options: tuple[str, ...] = ()  # further options of the query, as typed: "--max-nodes 2"
    limits: QueryLimits  # limits of the query
    overrides: tuple[str, ...] = ()  # --set values that differ from the job's own settings
    created_at: float  # Unix time

    @model_validator(mode="before")
    @classmethod
    def _convert_old_limits(cls, content: Any) -> Any:
        if isinstance(content, dict) and "limits" not in content:
            return content | {"limits": QueryLimits.from_options(content.get("options", ()))}
        return content

    @field_validator("objective", mode="before")
    @classmethod
    def _convert_removed_objective(cls, objective: Any) -> Any:
        """Convert the objective `result-time` of an older version, which included the queue, to `time`."""
        return "time" if objective == "result-time" else objective

    def __repr__(self) -> str:
        return f"<Recommendation: {self.summary}; objective {self.objective}, {format_count(len(self.rows), 'row')}>"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """Return the choice and the configurations, the chosen one first, for a notebook."""
        divisor, unit = choose_time_unit(3600 * max(row.hours for row in self.rows))
        is_typed = any(row.type for row in self.rows)
        rows = [row for row in self.rows if row != self.choice]
        cells = [
            (
                *([row.type] if is_typed else []),
                str(row.nodes),
                str(row.batch),
                str(row.local_batch),
                format_number(3600 * row.hours / divisor),
                _format_interval(row.hours_low, row.hours_high, divisor),
                format_number(row.cost),
                row.source,
            )
            for row in (self.choice, *rows)
        ]
        columns = [
            *(["node type"] if is_typed else []),
            "nodes",
            "batch",
            "batch/GPU",
            f"time ({unit})",
            f"90 % interval ({unit})",
            f"cost ({self.currency})",
            "source",
        ]
        title = f"Chosen by {self.objective}: {self.summary}"
        headline = [] if self.headline is None else [self.headline.text]
        return render_html(title, columns, cells, notes=[*headline, self.reason, *self.warnings], bold_rows=1)

    @property
    def summary(self) -> str:
        """The chosen configuration with its time and cost, in one line."""
        choice = self.choice
        kind = f" of type {choice.type}" * bool(choice.type)
        configuration = describe_configuration(choice.nodes, choice.batch, choice.local_batch)
        return f"{configuration}{kind}: {format_duration(3600 * choice.hours)}, {format_number(choice.cost)} {self.currency}"

    def frame(self) -> "pd.DataFrame":
        """Return the table of candidates with the rows of this answer, fastest first.

        The columns are the fields of `Prediction`, those of its time parts and of the same progress (`parts_steps`,
        `same_progress_hours`), and those of `ADDED_COLUMNS`; docs/reference/tables.md lists them with their units.
        """
        notes = [self.get_notes(row)._asdict() for row in self.rows]
        additions: dict[str, Any] = {name: [values[name] for values in notes] for name in ADDED_COLUMNS}
        return make_record_frame(self.rows, Prediction).assign(**additions)

    def get_notes(self, row: Prediction) -> RowNotes:
        """Compare a row with the choice and with today's configuration."""
        headline = self.headline
        return RowNotes(
            chosen=row == self.choice,
            speed_up=headline.compute_speed_up(row) if headline is not None else None,
            accuracy_risk=headline.risk_basis.assess_batch(row.batch, self.accuracy).level
            if headline is not None
            else None,
            caveats=list_caveats(row, self.choice),
        )

    def plot(self, against: TradeOff = "cost") -> Any:
        """Plot the time of every configuration against its cost or its number of nodes, with the choice marked.

        Returns:
            A `matplotlib.figure.Figure`. Its axes name quantity and unit; filled markers are measured configurations.

        Raises:
            SpecError: tula's optional package report or matplotlib is not installed, or `against` has another value.
        """
        from tula_cli.entry_points import load_extra

        if against not in get_args(TradeOff):
            raise SpecError(f"against {against!r}: must be one of {join_words(get_args(TradeOff))}")
        return load_extra("report").plot(self, against)

    @property
    def criteria(self) -> str:
        """The query that this answers, in the form of command-line options; equal text means the same query."""
        return ", ".join([self.objective, *self.options, *(f"--set {override}" for override in self.overrides)])
