"""Records of inspections of a job and of checks of a cluster's nodes."""

from pydantic import computed_field

from tula_cli.run.records.base import Footprint, Record, RecordedText


class Inspection(Record):
    """Properties of the model and the dataset, from building them in a separate process before anything is measured."""

    dataset_size: int
    eval_size: int
    classes: int | None
    sample_shape: tuple[int, ...]  # one input; empty where that is no tensor
    sample: str = ""  # one sample in words, where its input is no tensor
    sample_bytes: int = 0  # of one input with its target, as a batch holds them; 0 where it is not known
    parameters: int  # how many numbers
    footprints: tuple[Footprint, ...]  # at two or more local batches, ascending; empty where the estimate failed
    estimate_error: RecordedText  # why it failed, or empty
    device: str  # what the ranks of a local run would use here: "cuda" or "cpu"
    hardware: str
    capacity: int | None  # bytes for one rank: memory_per_gpu, else this machine's where the cluster is local
    cpus: int
    gpus: int = 0  # that torch sees here, where a local run would use them
    process: int = 0  # bytes that a process holds that has loaded the libraries and the dataset
    notes: tuple[RecordedText, ...] = ()  # of the model: the weights it starts from, frozen layers, groups
    warnings: tuple[RecordedText, ...] = ()
    script: RecordedText = (
        ""  # the command of a script of the user's own: then nothing was built, and what is 0 or empty is not known
    )


class FirstJob(Record):
    """The jobs that built the model and the dataset of a run on a node."""

    scheduler_id: str  # of the last one
    node_hours: float  # that all of them have taken, at most; the last one all its time, as long as it is awaited
    earlier: float = 0.0  # of these, by all but the last one
    awaited: str = ""  # name of the file that its answer is to be kept in; empty once that is there, or nobody waits


class NodeReport(Record):
    """The report of one node in `tula check --on-cluster`; on the local machine, of one set of ranks."""

    node: int  # from 0, in the order of ranks
    host: str
    ranks: int
    gpus: tuple[str, ...]  # names of the GPUs that its ranks see, together; empty where there are none
    gpu_memory: int | None  # bytes, of the smallest of them
    shared_gpus: tuple[
        tuple[int, ...], ...
    ] = ()  # ranks of this node, from 0, that would train on one and the same GPU
    driver: str  # of the GPUs; empty where there is none
    torch: str
    cuda: str  # torch's CUDA (or HIP) version; empty in a build for CPUs
    nccl: str  # empty where torch has none
    python: str
    cpus: int  # cores that one rank may use
    memory: int  # bytes of the node
    shared: int | None = None  # free bytes of /dev/shm, as its ranks see it; None where there is none
    interface: str  # of the network; empty where no interface has the address
    address: str
    clock_offset: float  # seconds that its clock is ahead of rank 0's
    clock_error: float  # half of the shortest round trip, in seconds: the offset is known no better
    token: str  # as read there from the run directory
    write_error: RecordedText  # why it could not write into the run directory, or empty
    dataset: bool | None  # whether dataset.root is there and readable; None where the dataset needs no folder
    free_disk: int  # bytes, where the run directory lies


class Transfer(Record):
    """An all-reduce between two ranks, the best of several."""

    size: int  # bytes that each of the two sends and receives
    seconds: float

    @computed_field  # type: ignore[prop-decorator]
    @property
    def speed(self) -> float:
        """Bits per second in each direction."""
        return 8 * self.size / self.seconds


class ClusterReport(Record):
    """The reports of the ranks of a CheckTask, written by rank 0."""

    id: str
    job: str
    backend: str  # what the transfers went through: "nccl" or "gloo"
    ranks: int
    nodes: tuple[NodeReport, ...]
    transfers: tuple[
        Transfer, ...
    ] = ()  # between the first node and the second, ascending; empty where there is one node
    inside: tuple[Transfer, ...] = ()  # between the first two ranks of the first node, where each has a GPU of its own
    latency: float | None = None  # seconds of an all-reduce of one number over all ranks, median; None where it failed
    network_error: RecordedText = (
        ""  # why the ranks could not exchange tensors, in the words of what they went through; else empty
    )
