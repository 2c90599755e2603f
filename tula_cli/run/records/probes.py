"""Results of probes (measured, out of memory, or failed), and the memory of a rank, measured or estimated."""

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, computed_field, field_validator, model_validator

from tula_cli import words
from tula_cli.run.records.base import OutcomeClass, Positive, Record, RecordedText
from tula_cli.run.records.failures import Failure, convert_old_failure
from tula_cli.run.records.scripts import LearningRates

Count = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""An integer that fits in 64 bits, as arrays need: a record with a larger one is damaged."""

NonNegative = Annotated[float, Field(ge=0)]
"""A duration in seconds that may be 0; a negative one results from a clock that was set back, and is an error."""

Seconds = Annotated[float, Field(gt=0)]
"""A duration in seconds that is never 0, such as that of a step."""


class ModelStates(Record):
    """The terms of Eq. 3 that do not depend on the batch: ZeRO's model states, and the factors of AGS. Bytes."""

    parameters: Count  # including buffers
    gradients: Count
    optimizer: Count  # optimizer state
    factors: Count  # AGS scaling factors, which Eq. 3 does not include

    @property
    def static_bytes(self) -> int:
        """Sum of all terms."""
        return self.parameters + self.gradients + self.optimizer + self.factors


class Components(ModelStates):
    """The terms of Eq. 3 on one rank at the peak of a step, and the memory of its allocator and libraries. Bytes."""

    batch: Count  # inputs and targets of one micro-batch
    activations: Count  # activations and workspaces: the peak minus all of the above
    peak: Count  # largest memory in use at any time
    reserved: Count  # held by the CUDA allocator for this peak if the GPU is not nearly full; on the CPU the peak
    libraries: Count = 0
    """Memory in addition to `reserved`: on a GPU the context, cuBLAS and NCCL; on the CPU the process before training, of
    which a memory limit may count only a part."""


class PeakMemory(Record):
    """The peak memory of one rank if its components are unknown, as for a user's script. Bytes."""

    states: ModelStates | None
    """Sizes of the tensors that the optimizer holds; None if no optimizer was observed. How the rest of the peak divides
    into activations, batch and workspaces (on the CPU also the process itself) is unknown."""
    peak: Count  # largest memory in use at any time; on the CPU resident memory
    reserved: Count  # as in Components
    libraries: Count | None = None  # as in Components; None if not measured


class Footprint(Record):
    """The memory of one rank (Eq. 3) at one local batch, estimated without a GPU."""

    local_batch: Count
    memory: Components
    room: Count = 0  # bytes: smallest sufficient size of the CUDA allocator's reserved memory; 0 if not simulated


class GradientStats(Record):
    """Squared gradient norms at the probe's weights, averaged over its steps.

    With a single rank they come from two halves of a batch.
    """

    norm_sqr: float  # squared norm of the averaged gradient (batch `batch`)
    local_norm_sqr: float  # mean over ranks of the squared norm of each rank's own gradient (batch `local_batch`)
    batch: Count
    local_batch: Count
    steps: Count  # steps with finite norms, over which the norms are averaged
    covariance: tuple[float, float, float] | None = None
    """Squared standard errors of norm_sqr and of local_norm_sqr, and their covariance; None if they cannot be estimated."""


class Host(Record):
    """The host of the ranks of one node."""

    name: str
    ranks: Count
    hardware: tuple[str, ...]  # distinct names of its GPUs, or of its CPU
    driver: str  # version of the GPU driver; empty on a CPU


class Environment(Record):
    """The environment of a measurement; a fit does not mix different `hardware`."""

    hosts: tuple[str, ...]
    device: str  # "cuda" or "cpu"
    hardware: str  # name of the GPU or CPU; all names if the ranks differ
    driver: str  # versions of the GPU driver on all nodes; empty on a CPU
    backend: str
    python: str
    torch: str
    torchvision: str
    tula: str
    nodes: tuple[Host, ...] = ()
    cuda: str = ""  # CUDA (or HIP) version of torch; empty in a build for CPUs
    nccl: str = ""
    allreduce: dict[int, str] = {}
    """Bytes of an all-reduce -> NCCL's algorithm and protocol ("ring, simple"); the largest."""
    system: str = ""  # operating system and kernel of rank 0
    workers: Count | None = None  # data-loader processes per rank; None if unknown
    variables: dict[str, str] = {}  # environment variables of rank 0 that affect computation and communication

    @property
    def is_mixed(self) -> bool:
        """Whether the ranks ran on different hardware, so that the slowest determines the step time."""
        return len({name for node in self.nodes for name in node.hardware}) > 1


class Overheads(Record):
    """Overheads of training in addition to its steps. Seconds; None if not measured, which is not 0."""

    startup: NonNegative  # from the start of the worker process to its first step
    eval_batch: NonNegative | None  # one evaluation batch of eval_batch_size samples on one rank
    eval_batch_size: Count | None  # samples
    checkpoint: NonNegative | None  # writing one checkpoint
    refresh: NonNegative | None  # one refresh of the AGS factors (0 where the method has none)


class GpuState(Record):
    """The state of all GPUs of a probe at one moment, as reported by NVML."""

    sm_mhz: Count  # clock of the slowest GPU
    watts: float  # power of the GPU that draws most
    held_down: tuple[str, ...]  # reasons why any GPU's clock is throttled ("power cap", "heat" ...); empty if none is


class Tokens(Record):
    """Average length of one text sample in the batches of a probe's loader."""

    length: float  # tokens, including padding
    real: float  # tokens that are not padding

    @property
    def padding(self) -> float:
        """The padding as a share of the length."""
        return 1 - self.real / self.length


class ScriptObservation(Record):
    """The settings that a script was observed to use, which are equal in all probes of one training."""

    optimizer: str | None  # class name; None if the loop reports its steps itself
    parameters: Count | None  # number of scalar parameters that the optimizer trains
    lr: LearningRates | None
    lr_given: float | None
    """Learning rate on the script's command line, or the factor by which it multiplies its own; None without either."""
    notes: tuple[RecordedText, ...] = ()  # reasons why measurements are missing


class RankStepTimes(Record):
    """The median durations of one rank's steps. Seconds."""

    host: str
    compute: float  # a whole step without synchronisation, including the wait for data
    wait: float  # wait for its data loader


class Measured(Record):
    """A successful probe: its configuration (nodes, local batch) and measurements. Times in seconds.

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
    step_times: Annotated[tuple[Seconds, ...], Field(min_length=1)]
    """Wall times between optimizer steps on rank 0 after the warm-up; synchronised steps include the wait for the slowest
    rank."""
    warmup_times: tuple[float, ...]
    sync_time: float | None  # exposed synchronisation: from the last local gradient to the end of the reduction; median
    compute_time: float | None  # a whole step without synchronisation; median
    data_wait: float | None  # the part of step_times spent waiting for the data loader; median
    ranks: tuple[RankStepTimes, ...] = ()
    """In rank order; empty with one rank, or if ranks cannot run without synchronisation."""
    cached_time: float | None = None  # a whole step on data that is on the device already; median
    loader_time: float | None = None  # time of the data loader for the data of one step while the GPUs are idle
    tokens: Tokens | None = None  # None unless batches are known to be text
    memory: Components | PeakMemory
    capacity: Positive | None  # bytes available to one rank; None if unlimited or unknown
    gradients: GradientStats | None
    overheads: Overheads
    environment: Environment
    dataset_size: Count
    eval_size: Count | None  # held-out samples
    energy: float | None = None  # joules per step of all GPUs together; None if a GPU has no energy counter
    gpus: tuple[GpuState, GpuState] | None = None  # at the start and the end of the timed steps; None without NVML
    allocator_retries: Count = 0
    oversubscribed: bool = False  # more ranks than cores or GPUs, so the times are not comparable with others
    measured_at: float  # Unix time
    script: ScriptObservation | None = None  # None if tula's own loop was measured

    @field_validator("energy")
    @classmethod
    def _discard_stopped_energy_counter(cls, joules: float | None) -> float | None:
        """Return None for an energy counter that does not advance, as that of some virtual GPUs."""
        return joules if joules is not None and joules > 0 else None

    @property
    def description(self) -> str:
        """One line for the job's log."""
        step = sum(self.step_times) / len(self.step_times)
        configuration_text = words.describe_configuration(self.nodes, self.batch, self.local_batch)
        pace = f"{words.format_number(1000 * step)} ms per step, {words.format_number(self.batch / step)} samples/s"
        return words.add_timestamp(
            f"measured {configuration_text}: {pace}, {words.format_bytes(self.memory.peak)} per GPU"
        )


class OutOfMemory(Record):
    """A probe that does not fit in memory: a result that limits the grid."""

    kind: Literal["out_of_memory"] = "out_of_memory"
    id: str
    nodes: Positive
    gpus_per_node: Positive
    local_batch: Positive
    assumed: bool  # the probe did not run, because a smaller local batch did not fit
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
    def _convert_old_failure(cls, fields: Any) -> Any:
        return convert_old_failure(fields)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def outcome(self) -> OutcomeClass:
        """The kind of failure."""
        return self.failure.outcome

    @computed_field  # type: ignore[prop-decorator]
    @property
    def message(self) -> RecordedText:
        """The reason for the failure."""
        return self.failure.description


Result = Measured | OutOfMemory | Failed
RESULT: TypeAdapter[Result] = TypeAdapter(Annotated[Result, Field(discriminator="kind")])
