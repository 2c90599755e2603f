"""What is stored in a run directory: frozen records, one JSON file each.

Outcomes that differ are different types: a probe is Measured, OutOfMemory or Failed. All times are seconds, all memory
is bytes, unless a name says otherwise.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from tula_cli.spec import JobSpec

OutcomeClass = Literal[
    "device_oom",
    "host_oom",
    "user",
    "peer",
    "signal",
    "port",
    "disk",
    "cancelled",
    "time_limit",
    "preempted",
    "node_failure",
    "unknown",
]


class Record(BaseModel):
    """Frozen; unknown keys are ignored, so that an older tula reads a newer run."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class Memory(Record):
    """Peak memory of one rank, split as in Eq. 3. Bytes."""

    parameters: int
    gradients: int
    optimizer: int
    factors: int  # AGS scaling factors
    batch: int  # inputs and targets of one micro-batch
    activations: int  # the peak less all of the above
    peak: int
    reserved: int  # what the allocator holds (CUDA); the peak on the CPU
    capacity: int | None  # what there is for one rank; None where nothing bounds it


class GradientStats(Record):
    """Squared gradient norms at the probe's weights, means over the timed steps."""

    norm_sqr: float  # of the averaged gradient (batch `batch`)
    local_norm_sqr: float  # mean over ranks of the norm of each rank's own gradient (batch `local_batch`)
    batch: int
    local_batch: int
    steps: int


class Environment(Record):
    """What a measurement was made on; a fit refuses to mix `hardware`."""

    hosts: tuple[str, ...]
    device: str  # "cuda" or "cpu"
    hardware: str  # GPU name, or the CPU's
    driver: str
    backend: str
    python: str
    torch: str
    torchvision: str
    tula: str


class Overheads(Record):
    """What training costs in time beside its steps. Seconds."""

    startup: float  # from the start of the worker process to its first step
    eval_batch: float  # one evaluation batch of eval_batch_size samples on one rank
    eval_batch_size: int
    checkpoint: float  # writing one
    refresh: float  # one refresh of the AGS factors (0 where the method has none)


class Measured(Record):
    """A probe that ran: (nodes, local batch) and what was seen."""

    kind: Literal["measured"] = "measured"
    id: str
    nodes: int
    gpus_per_node: int
    local_batch: int
    batch: int
    accumulate: int
    step_times: tuple[float, ...]  # wall time between optimizer steps, slowest rank's view on rank 0, after warm-up
    warmup_times: tuple[float, ...]
    sync_time: float  # exposed synchronisation: from the last local gradient to the end of the reduction; median
    compute_time: float  # a whole step without synchronisation; median
    data_wait: float  # waiting for the data loader, within step_times; median
    memory: Memory
    gradients: GradientStats
    overheads: Overheads
    environment: Environment
    dataset_size: int
    eval_size: int
    allocator_retries: int = 0
    oversubscribed: bool = False  # more ranks than cores: not comparable with anything
    measured_at: float  # Unix time


class OutOfMemory(Record):
    """A probe that does not fit: a result that bounds the grid."""

    kind: Literal["out_of_memory"] = "out_of_memory"
    id: str
    nodes: int
    gpus_per_node: int
    local_batch: int
    assumed: bool  # not run, because a smaller one did not fit
    thrash: bool = False  # it ran, but only by flushing the allocator's cache again and again
    message: str


class Failed(Record):
    """A probe that ended for another reason; it is run again by the next call."""

    kind: Literal["failed"] = "failed"
    id: str
    nodes: int
    gpus_per_node: int
    local_batch: int
    outcome: OutcomeClass
    message: str


Result = Annotated[Measured | OutOfMemory | Failed, Field(discriminator="kind")]
RESULT: TypeAdapter[Measured | OutOfMemory | Failed] = TypeAdapter(Result)


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


class Recommendation(Record):
    """The answer of `tula recommend`."""

    objective: Literal["time", "cost", "knee"]
    curve: Literal["time", "cost"]
    choice: Prediction
    reason: str
    rows: tuple[Prediction, ...]  # every feasible configuration, fastest first
    runners_up: tuple[Prediction, ...]
    warnings: tuple[str, ...] = ()
    currency: str
    price: str  # in words, with unit and source
    fit_error: float | None  # median relative error of the fit; None where exactly determined
    fit: str  # the fit in words
    created_at: float


class Rung(Record):
    """A batch the training may run at, with what is predicted for it."""

    batch: int
    prediction: Prediction | None = None


class ProbeTask(Record):
    """A job that measures local batches, ascending, on one number of nodes."""

    kind: Literal["probe"] = "probe"
    id: str
    job: str
    spec: JobSpec
    workdir: str
    nodes: int
    local_batches: tuple[int, ...]
    skip: tuple[int, ...] = ()  # those that failed in this job already; the supervisor goes on with the others


class TrainTask(Record):
    """A job that trains: the first rung of the ladder is this attempt's batch, the others what an OOM falls back to."""

    kind: Literal["train"] = "train"
    id: str  # train-<signature>-<attempt>
    job: str  # train-<signature>
    spec: JobSpec
    workdir: str
    nodes: int
    signature: str
    attempt: int  # from 1
    ladder: tuple[Rung, ...]  # descending batches
    workers: int  # data-loader processes a rank (fewer after a host OOM)
    cause: str = ""  # why this is a relaunch

    @property
    def batch(self) -> int:
        return self.ladder[0].batch


class CheckTask(Record):
    """A short job that looks at the nodes of a site: `tula check --on-cluster`."""

    kind: Literal["check"] = "check"
    id: str
    job: str
    spec: JobSpec
    workdir: str
    nodes: int


Task = Annotated[ProbeTask | TrainTask, Field(discriminator="kind")]
TASK: TypeAdapter[ProbeTask | TrainTask] = TypeAdapter(Task)


class Job(Record):
    """A job as submitted; written by the command line alone."""

    id: str
    scheduler: Literal["local", "slurm"]
    scheduler_id: str
    nodes: int
    submitted_at: float
    submissions: int = 1  # how often it was submitted
    links: tuple[str, ...] = ()  # ids of the chain that a training job on SLURM is, scheduler_id first
    process_started: float | None = None  # local: start time of the process, against reused process ids
    log_dir: str = ""


class Failure(Record):
    """What one failing rank saw."""

    task: str
    attempt: int
    rank: int
    host: str
    pid: int
    outcome: OutcomeClass
    message: str
    detail: str  # traceback, or the end of the log
    local_batch: int | None = None
    samples: int | None = None
    failed_at: float


class Attempt(Record):
    """One start of the workers by a supervisor."""

    task: str
    number: int  # from 1, within the task
    started_at: float
    ended_at: float | None = None
    outcome: Literal["done"] | OutcomeClass | None = None  # None while it runs
    message: str = ""
    rank: int | None = None  # the rank at the root of a failure
    host: str = ""
    pid: int = 0  # of the process that started the ranks
    allocation: str = ""  # SLURM's job id and how often it was requeued, "123.0"; empty on this machine
    hosts: str = ""  # the allocation's nodes as SLURM writes them, "node[1-4]"
    samples: int | None = None  # of the newest checkpoint when it started; None for probes


class Order(Record):
    """What all supervisors of a job do next; written by that of task 0. `task` None ends the job."""

    task: str | None
    attempt: int = 0


class TrainResult(Record):
    """The end of a training run, written by rank 0 once, when the last epoch is evaluated and saved."""

    signature: str
    nodes: int
    batch: int  # at the end; a relaunch may have made it smaller
    samples: int
    steps: int
    epochs: int
    metrics: dict[str, float]  # of the last epoch: loss, top1, top5
    best_top1: float
    best_epoch: int
    step_time: float  # median at the last batch
    finished_at: float


class Summary(Record):
    """Predicted against actual, written when a training run has ended."""

    signature: str
    nodes: int
    start_batch: int
    batch: int
    attempts: int
    predicted_hours: float | None
    actual_hours: float
    predicted_cost: float | None
    actual_cost: float
    predicted_step: float | None
    actual_step: float
    metrics: dict[str, float]
    best_top1: float
    currency: str
    causes: tuple[str, ...]  # why each relaunch happened


class Footprint(Record):
    """Estimated peak memory of one rank at one local batch, split as in Eq. 3, without a GPU. Bytes."""

    local_batch: int
    parameters: int
    gradients: int
    optimizer: int
    factors: int
    batch: int
    activations: int
    peak: int


class Inspection(Record):
    """What building the model and the dataset (in a process of its own) tells before anything is measured."""

    dataset_size: int
    eval_size: int
    classes: int | None
    sample_shape: tuple[int, ...]  # one input
    parameters: int  # how many numbers
    footprints: tuple[Footprint, ...]  # at two or more local batches, ascending; empty where the estimate failed
    estimate_error: str  # why it failed, or empty
    device: str  # what the ranks of a local run would use here: "cuda" or "cpu"
    hardware: str
    capacity: int | None  # bytes for one rank: memory_per_gpu, else this machine's where the cluster is local
    cpus: int
    warnings: tuple[str, ...] = ()
