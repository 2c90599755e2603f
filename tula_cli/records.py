"""What is stored in a run directory: frozen records, one JSON file each.

Outcomes that differ are different types: a probe is Measured, OutOfMemory or Failed. All times are seconds, all memory
is bytes, unless a name says otherwise.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, computed_field

from tula_cli.spec import Arm, JobSpec

OutcomeClass = Literal[
    "device_oom",
    "host_oom",
    "user",
    "diverged",
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


Market = Literal["on_demand", "spot"]
"""How nodes are had: for as long as wanted, or for less money until they are taken away."""


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
    # What takes from the capacity beside that: on a GPU the context, cuBLAS and NCCL; on the CPU what the process held
    # before, and under a limit only the part that the limit counts.
    libraries: int = 0


class GradientStats(Record):
    """Squared gradient norms at the probe's weights, means over its steps; from two halves of a batch where one rank runs."""

    norm_sqr: float  # of the averaged gradient (batch `batch`)
    local_norm_sqr: float  # mean over ranks of the norm of each rank's own gradient (batch `local_batch`)
    batch: int
    local_batch: int
    steps: int  # whose norms are finite
    # Squared standard errors of norm_sqr and of local_norm_sqr, and their covariance. None where both are of one batch,
    # and in results older than the noise scale, whose two norms are of different steps.
    covariance: tuple[float, float, float] | None = None


class Host(Record):
    """What the ranks of one node ran on."""

    name: str
    ranks: int
    hardware: tuple[str, ...]  # names of the GPUs, or of the CPU: one where its ranks are alike
    driver: str  # of the GPUs; empty on a CPU


class Environment(Record):
    """What a measurement was made on; a fit refuses to mix `hardware`."""

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
    system: str = ""  # operating system and kernel of rank 0
    variables: dict[str, str] = {}  # those of rank 0 that change how ranks run and talk

    @property
    def mixed(self) -> bool:
        """Return whether the ranks ran on different hardware: the slowest sets the pace of all."""
        return len({name for node in self.nodes for name in node.hardware}) > 1


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
    refresh_share: float = 0.0  # of the hours, for refreshing the scaling factors
    pareto: bool = False  # no other configuration within the limits is faster and no dearer, or cheaper and no slower


class JobFile(Record):
    """Where a run's settings came from; what they were then is in its spec.yaml."""

    path: str  # of the job.yaml, absolute
    overrides: tuple[str, ...] = ()  # what --set laid over it


class Recommendation(Record):
    """The answer of `tula recommend`."""

    objective: Literal["time", "cost", "knee", "accuracy-time"]
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
    efficiency: str = ""  # what `same_progress` rests on, in words; empty where there is none
    other_market: Prediction | None = None  # the choice on demand where it is on spot nodes, and the other way round
    options: tuple[str, ...] = ()  # what else was asked for, as typed: "--max-nodes 2"
    overrides: tuple[str, ...] = ()  # --set values that are not the job's own settings
    created_at: float

    @property
    def question(self) -> str:
        """What this answers, in the words of the command line; the same words are the same question."""
        return ", ".join([self.objective, *self.options, *(f"--set {override}" for override in self.overrides)])


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
    then: tuple[str, ...] = ()  # tasks that run after this one in the same allocation (search.packing: single)
    code: str = ""  # the snapshot of the user's code that runs; empty where the spec names none


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
    code: str = ""  # the snapshot of the user's code that runs; empty where the spec names none

    @property
    def batch(self) -> int:
        return self.ladder[0].batch


class CheckTask(Record):
    """A short job that looks at the nodes of a site: `tula check --on-cluster`."""

    MINUTES: ClassVar[float] = 3.0  # the most it may take

    kind: Literal["check"] = "check"
    id: str
    job: str
    spec: JobSpec
    workdir: str
    nodes: int
    code: str = ""  # as in the others; a check runs none of the user's code


class CodeSnapshot(Record):
    """The user's own code as it was when a job was submitted: what lies in `code/<name>/`."""

    name: str
    digest: str  # over the Python files that the spec leads to; part of the signatures
    taken_at: float  # Unix time
    workdir: str  # where it was copied from
    roots: tuple[str, ...]  # folders that python imports from, relative; "." is the snapshot itself
    modules: tuple[str, ...]  # the files of the digest, relative
    files: tuple[str, ...]  # all that was copied, relative
    commit: str = ""  # git's, of the workdir's repository; empty where there is none
    dirty: bool = False  # these files differ from the commit
    diff: str = ""  # how, as far as git knows them; cut where it is very long


Task = ProbeTask | TrainTask | CheckTask
TASK: TypeAdapter[Task] = TypeAdapter(Annotated[Task, Field(discriminator="kind")])


class Job(Record):
    """A job as submitted; written by the command line alone."""

    id: str
    scheduler: Literal["local", "slurm"]
    scheduler_id: str
    nodes: int
    submitted_at: float
    submissions: int = 1  # how often it was submitted
    links: tuple[str, ...] = ()  # ids of the chain that a training job on SLURM is, scheduler_id first
    host: str = ""  # local: the machine it runs on
    process_started: float | None = None  # local: start time of the process, against reused process ids
    log_dir: str = ""

    @property
    def ids(self) -> tuple[str, ...]:
        """The scheduler's ids of all its links."""
        return self.links or (self.scheduler_id,)


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
    tuned: int = 0  # samples of finished branches when it started (train.method: auto)

    @property
    def progress(self) -> int | None:
        """Return the samples that had been trained for good when it started; None for probes."""
        return None if self.samples is None else self.samples + self.tuned


class Order(Record):
    """What all supervisors of a job do next; written by that of task 0. `task` None ends the job."""

    task: str | None
    attempt: int = 0
    ranks: int = 0  # how many ranks take part; the other supervisors sit it out
    meeting: str = ""  # "address:port" of torchrun's rendezvous; ranks under srun meet through a file


class Branch(Record):
    """A short training from a common checkpoint, to compare its arm with others (train.method: auto)."""

    arm: str
    rung: int  # from 1
    epochs: float  # trained, of the training set without the held-out part
    samples: int  # trained
    loss: float | None  # on the held-out part; None where it is not finite
    top1: float | None  # percent; None where there are no classes
    diverged: bool
    seconds: float


class Tuning(Record):
    """How a self-tuning training came to its settings; written by rank 0 after each branch."""

    signature: str
    batch: int
    start: int  # samples at the checkpoint where the arms part
    epoch: float  # epochs done there
    arms: tuple[Arm, ...]
    beginning: int = 0  # samples that the branches' common beginning was trained on, without the held-out part
    branches: tuple[Branch, ...] = ()
    chosen: Arm | None = None  # None while branches are missing
    broken: tuple[str, ...] = ()  # arms that were chosen before and broke down in the training
    lost: int = 0  # samples trained with them, which went with them

    @property
    def samples(self) -> int:
        """Samples trained beside the training itself."""
        return sum(branch.samples for branch in self.branches) + self.beginning + self.lost


class TrainResult(Record):
    """The end of a training run, written by rank 0 once, when the last epoch is evaluated and saved."""

    signature: str
    nodes: int
    batch: int  # at the end; a relaunch may have made it smaller
    samples: int
    steps: int
    epochs: int
    metrics: dict[str, float]  # of the last epoch: loss, top1, top5; those that are finite
    best_top1: float
    best_epoch: int
    step_time: float  # median at the last batch
    finished_at: float
    tuning: Tuning | None = None  # of method auto


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
    tuning: Tuning | None = None  # of method auto


class Cell(Record):
    """One training of a comparison: a method at a batch, with a seed."""

    method: str  # of train.method, or a variant of one (lbt-x4)
    batch: int  # the one it starts with
    seed: int
    nodes: int
    signature: str  # of its training run
    reference: bool = False  # the small batch that the others are held against

    @property
    def words(self) -> str:
        return f"{self.method}, batch {self.batch}, seed {self.seed}"


class Comparison(Record):
    """What `tula compare` was asked for, and its trainings in the order of their worth."""

    methods: tuple[str, ...]
    batches: tuple[int, ...]
    seeds: int
    nodes: int
    controls: bool
    cells: tuple[Cell, ...]
    created_at: float


class NodeReport(Record):
    """What one node said of itself in a `tula check --on-cluster`; on this machine, one of its sets of ranks."""

    node: int  # from 0, in the order of ranks
    host: str
    ranks: int
    gpus: tuple[str, ...]  # names of the GPUs that its ranks see, together; empty where there are none
    gpu_memory: int | None  # bytes, of the smallest of them
    driver: str  # of the GPUs; empty where there is none
    torch: str
    cuda: str  # torch's CUDA (or HIP) version; empty in a build for CPUs
    nccl: str  # empty where torch has none
    python: str
    cpus: int  # cores that one rank may use
    memory: int  # bytes of the node
    interface: str  # of the network; empty where no interface has the address
    address: str
    clock_offset: float  # seconds that its clock is ahead of rank 0's
    clock_error: float  # half of the shortest round trip, in seconds: the offset is known no better
    token: str  # as read there from the run directory
    write_error: str  # why it could not write into the run directory, or empty
    dataset: bool | None  # whether dataset.root is there and readable; None where the dataset needs no folder
    free_disk: int  # bytes, where the run directory lies


class Transfer(Record):
    """An all-reduce between the first ranks of two nodes, the best of some."""

    size: int  # bytes that each of the two sends and receives
    seconds: float

    @computed_field  # type: ignore[prop-decorator]
    @property
    def speed(self) -> float:
        """Return bits a second in each direction."""
        return 8 * self.size / self.seconds


class ClusterReport(Record):
    """What the ranks of a CheckTask found, written by rank 0."""

    id: str
    job: str
    backend: str  # what the transfers went through: "nccl" or "gloo"
    ranks: int
    nodes: tuple[NodeReport, ...]
    transfers: tuple[Transfer, ...]  # between the first node and the second, ascending; empty where there is one node
    latency: float  # seconds of an all-reduce of one number over all ranks; median
    checked_at: float


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
    libraries: int = 0  # of a GPU, beside the peak; on the CPU a limit does not count them
    reserved: int = 0  # what a GPU's allocator holds for the peak where it has room; 0 where that was not simulated
    room: int = 0  # the least that it gets by with; 0 where that was not simulated


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
    process: int = 0  # bytes that a process holds that has loaded the libraries and the dataset
    warnings: tuple[str, ...] = ()
