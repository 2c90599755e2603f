"""A recommendation and its predictions."""

from typing import TYPE_CHECKING, Literal

from tula_cli.run.records.base import Market, Record

if TYPE_CHECKING:
    import pandas as pd


class SameProgress(Record):
    """What a configuration takes to the progress that the spec's epochs make at its reference batch.

    `low` and `high` are the range that the growth of the gradient noise and the 90 % interval of the step time leave.
    """

    epochs: float
    epochs_low: float
    epochs_high: float
    epochs_alike: float  # the end of the range where every sample counts alike
    epochs_lossy: float  # and that where a large batch loses most
    hours: float
    hours_low: float
    hours_high: float
    cost: float


class TimeParts(Record):
    """Where the wall-clock time of a training goes; seconds."""

    steps: float  # with their data and their synchronisation, and the refreshing of scaling factors
    data: float | None  # of them, waiting for the data loader; None where no probe tells
    evaluation: float
    checkpoints: float
    branches: float  # of a self-tuning training
    rest: float  # starts and ends of the ranks; what interruptions cost

    @property
    def total(self) -> float:
        return self.steps + self.evaluation + self.checkpoints + self.branches + self.rest


class Prediction(Record):
    """A forecast of one configuration; `low` and `high` bound a 90 % interval (None where there is no residual)."""

    nodes: int
    batch: int
    local_batch: int
    step_time: float
    step_low: float | None
    step_high: float | None
    hours: float
    hours_low: float | None
    hours_high: float | None
    cost: float
    peak_memory: int | None  # bytes a GPU
    headroom: float | None  # share of the capacity left free
    measured: bool
    type: str = ""  # of the nodes; empty where the job names none
    market: Market = "on_demand"  # on spot nodes hours and cost are expected values
    same_progress: SameProgress | None = None  # None where no probe has told the gradient noise
    refresh_share: float | None = 0.0  # of the hours, for refreshing the scaling factors; None where no probe tells
    energy: float | None = None  # joules a step of all GPUs; None, as of the kWh, where no probe has a counter of them
    kwh: float | None = None  # of the training, all GPUs
    kwh_low: float | None = None
    kwh_high: float | None = None
    parts: TimeParts | None = None  # of the hours; None of a script
    pareto: bool = (
        False  # nothing within the limits is better in time, cost or (where all have it) kWh and as good in all
    )


class Fallback(Record):
    """What a training goes on with after its first out-of-memory."""

    batch: int
    micro_batch: int  # samples that a GPU takes at a time
    micro_batches: int  # of a step on one GPU
    step_time: float  # seconds
    hours: float  # of the whole training, were it all trained so
    basis: str  # what the two rest on, in words


class SequenceLength(Record):
    """What a job takes at one length of text (search.sequence), on the fewest nodes."""

    length: int
    own: bool  # the job's, at which the choice is made
    nodes: int
    tokens: float = 0.0  # of a sample, on average, without padding
    padding: float = 0.0  # share of a sample's places
    largest_batch: int | None = (
        None  # global, that memory holds with its margin; None where it sets no bound, or unknown
    )
    rows: tuple[Prediction, ...] = ()  # every candidate that fits, ascending by batch
    note: str = ""  # why there are no rows

    def tokens_per_second(self, row: Prediction) -> float:
        """Return the tokens of all GPUs a second at one of the rows, without padding."""
        return self.tokens * row.batch / row.step_time

    @property
    def fastest(self) -> Prediction | None:
        """The row with most tokens a second; None where there is none."""
        return max(self.rows, key=self.tokens_per_second, default=None)


class Continuation(Record):
    """What the rest of a training takes at the recommended configuration, and at its own."""

    signature: str  # of the training
    attempt: int  # that it was at
    nodes: int  # that it had then
    batch: int
    samples: int  # trained
    left: float  # share of the training that is still to come
    moves: bool  # the recommended configuration is another
    hours: float  # of the rest as recommended, a new start included
    cost: float
    hours_as_it_is: float | None  # of the rest as it goes; None where its configuration is no candidate
    cost_as_it_is: float | None


class Recommendation(Record):
    """The answer of `tula recommend`."""

    objective: Literal["time", "cost", "knee", "accuracy-time", "energy"]
    curve: Literal["time", "cost"]
    choice: Prediction
    reason: str
    rows: tuple[Prediction, ...]  # every feasible configuration, fastest first
    runners_up: tuple[Prediction, ...]
    warnings: tuple[str, ...] = ()
    currency: str
    price: str  # in words, with unit, source and date; a line a node type
    fit_error: float | None  # median relative error of the fit; None where exactly determined
    fit: str  # the fit in words; a line a node type
    power: str = ""  # what kWh rest on, in words, a line a node type; empty where no probe tells its energy
    efficiency: str = ""  # what `same_progress` rests on, in words; empty where there is none
    interruption: str = ""  # what one costs a script, in words; empty for tula's own loop
    fallback: Fallback | None = None  # of the choice; None where there is none, or nothing tells what it takes
    continuation: Continuation | None = None  # of a training under way, by whose steps this was asked
    lengths: tuple[SequenceLength, ...] = ()  # of text, ascending; empty where search.sequence asks for no other
    growth: str = ""  # how time and memory grow with the length, in words
    other_market: Prediction | None = None  # the choice on demand where it is on spot nodes, and the other way round
    options: tuple[str, ...] = ()  # what else was asked for, as typed: "--max-nodes 2"
    overrides: tuple[str, ...] = ()  # --set values that are not the job's own settings
    created_at: float

    def frame(self) -> "pd.DataFrame":
        """Return every feasible configuration, fastest first: hours, cost, kWh, step times (seconds), peak memory (bytes)."""
        from tula_cli.run.frames import frame

        columns = [name for name in Prediction.model_fields if name not in ("same_progress", "parts")]
        return frame(
            [{**{name: getattr(row, name) for name in columns}, "chosen": row == self.choice} for row in self.rows]
        )

    @property
    def criteria(self) -> str:
        """What this answers, in the words of the command line; the same words are the same question."""
        return ", ".join([self.objective, *self.options, *(f"--set {override}" for override in self.overrides)])
