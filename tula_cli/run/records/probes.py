"""Results of probes: measured, out of memory, or failed."""

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, computed_field, field_validator, model_validator

from tula_cli import words
from tula_cli.run.records.base import (
    Components,
    Count,
    NonNegative,
    OutcomeClass,
    PeakMemory,
    Positive,
    Record,
    RecordedText,
    Seconds,
)
from tula_cli.run.records.failures import Failure, convert_old_failure
from tula_cli.run.records.scripts import LearningRates


class GradientStats(Record):
    """Squared gradient norms at the probe's weights, averaged over its steps.

    With a single rank they come from two halves of a batch.
    """

    norm_sqr: float  # of the averaged gradient (batch `batch`)
    local_norm_sqr: float  # mean over ranks of the norm of each rank's own gradient (batch `local_batch`)
    batch: Count
    local_batch: Count
    steps: Count  # whose norms are finite
    # Squared standard errors of norm_sqr and of local_norm_sqr, and their covariance; None where both are of one batch.
    covariance: tuple[float, float, float] | None = None


class Host(Record):
    """The host of the ranks of one node."""

    name: str
    ranks: Count
    hardware: tuple[str, ...]  # names of the GPUs, or of the CPU: one where its ranks are alike
    driver: str  # of the GPUs; empty on a CPU


class Environment(Record):
    """The environment of a measurement; a fit does not mix different `hardware`."""

    hosts: tuple[str, ...]
    device: str  # "cuda" or "cpu"
    hardware: str  # GPU name, or the CPU's; all of them where the ranks differ
    driver: str  # of the GPUs, of all nodes; empty on a CPU
    backend: str
    python: str
    torch: str
    torchvision: str
    tula: str
    nodes: tuple[Host, ...] = ()
    cuda: str = ""  # the CUDA (or HIP) that torch was built with; empty in a build for CPUs
    nccl: str = ""
    allreduce: dict[
        int, str
    ] = {}  # bytes of an all-reduce -> what NCCL chose for it ("ring, simple"); the largest ones
    system: str = ""  # operating system and kernel of rank 0
    workers: Count | None = None  # data-loader processes of a rank
    variables: dict[str, str] = {}  # those of rank 0 that change how ranks run and talk

    @property
    def mixed(self) -> bool:
        """Whether the ranks ran on different hardware, so that the slowest sets the pace of all."""
        return len({name for node in self.nodes for name in node.hardware}) > 1


class Overheads(Record):
    """Overheads of training in addition to its steps. Seconds; None if not measured, which is not 0."""

    startup: NonNegative  # from the start of the worker process to its first step
    eval_batch: NonNegative | None  # one evaluation batch of eval_batch_size samples on one rank
    eval_batch_size: Count | None
    checkpoint: NonNegative | None  # writing one
    refresh: NonNegative | None  # one refresh of the AGS factors (0 where the method has none)


class GpuState(Record):
    """The state of all GPUs of a probe at one moment, as reported by NVML."""

    sm_mhz: Count  # of the slowest one
    watts: float  # of the one that draws most
    held_down: tuple[str, ...]  # why the clock of any is held down ("power cap", "heat" ...)


class Tokens(Record):
    """Average length of one text sample in the batches of a probe's loader."""

    length: float  # places, padding counted
    real: float  # of them, those that are not padding

    @property
    def padding(self) -> float:
        """The padding as a share of the length."""
        return 1 - self.real / self.length


class ScriptObservation(Record):
    """The settings that a script was observed to use, which are equal in all probes of one training."""

    optimizer: str | None  # class name; None where its loop tells its steps by hand
    parameters: Count | None  # numbers that the optimizer trains
    lr: LearningRates | None
    lr_given: float | None  # on its command line, or the factor that it is to multiply its own by; None without either
    notes: tuple[RecordedText, ...] = ()  # what is absent in the result, and why


class RankPace(Record):
    """The durations of one rank's step. Seconds, medians."""

    host: str
    compute: float  # a whole step without synchronisation, its wait for data included
    wait: float  # for its data loader


class Measured(Record):
    """A successful probe: its configuration (nodes, local batch) and measurements.

    A user's script does not reveal everything: a value that was not measured is None, never 0 and never an estimate.
    Probes of one run may differ in what was measured.
    """

    kind: Literal["measured"] = "measured"
    id: str
    nodes: Positive
    gpus_per_node: Positive
    local_batch: Positive
    batch: Positive
    accumulate: Positive
    step_times: Annotated[
        tuple[Seconds, ...], Field(min_length=1)
    ]  # wall time between optimizer steps, slowest rank's view on rank 0, after warm-up
    warmup_times: tuple[float, ...]
    sync_time: float | None  # exposed synchronisation: from the last local gradient to the end of the reduction; median
    compute_time: float | None  # a whole step without synchronisation; median
    data_wait: float | None  # waiting for the data loader, within step_times; median
    ranks: tuple[RankPace, ...] = ()  # in their order; none where there is one, or where they do not work alone
    cached_time: float | None = None  # a whole step on data that is on the device already; median
    loader_time: float | None = None  # that the data loader takes for the data of a step while nothing else is done
    tokens: Tokens | None = None  # None where batches are not known to be text
    memory: Components | PeakMemory
    capacity: Positive | None  # bytes that there are for one rank; None where nothing bounds it, or nothing tells
    gradients: GradientStats | None
    overheads: Overheads
    environment: Environment
    dataset_size: Count
    eval_size: Count | None  # held-out samples
    energy: float | None = None  # joules a step of all GPUs together; None where any has no counter of them
    gpus: tuple[GpuState, GpuState] | None = None  # early in the timed steps, and at their end; None without NVML
    allocator_retries: Count = 0
    oversubscribed: bool = False  # more ranks than cores, or GPUs: not comparable with anything
    measured_at: float  # Unix time
    script: ScriptObservation | None = None  # None where tula's own loop was measured

    @field_validator("energy")
    @classmethod
    def _ignore_counter_that_stands_still(cls, joules: float | None) -> float | None:
        """Take a counter that stands still for none; some virtual GPUs have such a counter."""
        return joules if joules is not None and joules > 0 else None

    @property
    def description(self) -> str:
        """One line for the job's log."""
        step = sum(self.step_times) / len(self.step_times)
        configuration_text = words.describe_configuration(self.nodes, self.batch, self.local_batch)
        pace = f"{words.format_number(1000 * step)} ms per step, {words.format_number(self.batch / step)} samples/s"
        return words.stamp_line(
            f"measured {configuration_text}: {pace}, {words.format_bytes(self.memory.peak)} per GPU"
        )


class OutOfMemory(Record):
    """A probe that does not fit in memory: a result that limits the grid."""

    kind: Literal["out_of_memory"] = "out_of_memory"
    id: str
    nodes: Positive
    gpus_per_node: Positive
    local_batch: Positive
    assumed: bool  # not run, because a smaller one did not fit
    message: RecordedText


class Failed(Record):
    """A probe that failed for another reason; the next call runs it again."""

    kind: Literal["failed"] = "failed"
    id: str
    nodes: Positive
    gpus_per_node: Positive
    local_batch: Positive
    failure: Failure

    @model_validator(mode="before")
    @classmethod
    def _lift_failure(cls, fields: Any) -> Any:
        return convert_old_failure(fields)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def outcome(self) -> OutcomeClass:
        """The kind of failure."""
        return self.failure.outcome

    @computed_field  # type: ignore[prop-decorator]
    @property
    def message(self) -> RecordedText:
        """Why it failed."""
        return self.failure.description


Result = Annotated[Measured | OutOfMemory | Failed, Field(discriminator="kind")]
RESULT: TypeAdapter[Measured | OutOfMemory | Failed] = TypeAdapter(Result)
