"""Records of inspections of a job and of checks of a cluster's nodes."""

from pydantic import computed_field

from tula_cli.run.records.base import Record, RecordedDiagnostic, RecordedText
from tula_cli.run.records.probes import Footprint


class Inspection(Record):
    """Properties of the model and the dataset, from building them in a separate process before anything is measured."""

    dataset_size: int
    eval_size: int
    classes: int | None
    sample_shape: tuple[int, ...]  # shape of one input; empty if it is not a tensor
    sample: str = ""  # description of one sample if its input is not a tensor, else empty
    sample_bytes: int = 0  # bytes per sample of a batch, input and target; 0 if unknown
    parameters: int  # number of scalar parameters
    footprints: tuple[Footprint, ...]  # at two or more local batches, ascending; empty if the estimate failed
    estimate_error: RecordedText  # why the estimate of memory failed; empty if it did not
    device: str  # device that the ranks of a local run would use on this machine: "cuda" or "cpu"
    hardware: str
    capacity: int | None
    """Bytes per rank: cluster.memory_per_gpu, or this machine's if the cluster is local; None if unknown."""
    cpus: int
    gpus: int = 0  # GPUs of this machine that a local run would use
    process: int = 0  # bytes held by a process that has loaded the libraries and the dataset; 0 if not measured
    notes: tuple[RecordedDiagnostic, ...] = ()  # on the model: initial weights, frozen layers, parameter groups
    warnings: tuple[RecordedDiagnostic, ...] = ()
    script: RecordedText = ""
    """Command of the user's script; empty if the job has none. With a script nothing is built, so that fields which are 0
    or empty are unknown."""


class FirstJob(Record):
    """The jobs that built the model and the dataset of a run on a node."""

    scheduler_id: str  # scheduler id of the newest job
    node_hours: float  # upper bound for all of these jobs; until the newest is over, its time limit counts
    earlier: float = 0.0  # node-hours of all jobs but the newest
    awaited: str = ""  # file name for the inspection that the newest job will return; empty once it is over


class NodeReport(Record):
    """The report of one node in `tula check --on-cluster`; on the local machine, of one set of ranks."""

    node: int  # from 0, in the order of ranks
    host: str
    ranks: int
    gpus: tuple[str, ...]  # names of all GPUs that its ranks see; empty without GPUs
    gpu_memory: int | None  # bytes of the smallest GPU; None without GPUs
    shared_gpus: tuple[tuple[int, ...], ...] = ()
    """Groups of two or more ranks that would train on the same GPU; ranks counted from 0 within the node."""
    driver: str  # version of the GPU driver; empty without GPUs
    torch: str
    cuda: str  # CUDA (or HIP) version of torch; empty in a build for CPUs
    nccl: str  # NCCL version of torch; empty without NCCL
    python: str
    cpus: int  # cores available to one rank
    memory: int  # bytes of main memory of the node
    shared: int | None = None  # free bytes of /dev/shm as seen by its ranks; None if there is none
    interface: str  # name of the network interface with `address`; empty if none has it
    address: str  # network address that its ranks use
    clock_offset: float  # seconds by which its clock is ahead of that of rank 0
    clock_error: float  # maximum error of clock_offset in seconds: half of the shortest round trip
    token: str  # token of the check as read from the run directory on this node; shows whether it sees the same files
    write_error: RecordedText  # why it could not write into the run directory; empty if it could
    dataset: bool | None  # dataset.root exists and is readable; None if the dataset needs no folder
    free_disk: int  # free bytes on the file system of the run directory


class Transfer(Record):
    """An all-reduce between two ranks, the best of several."""

    size: int  # bytes that each of the two sends and receives
    seconds: float  # duration

    @computed_field  # type: ignore[prop-decorator]
    @property
    def speed(self) -> float:
        """Bits per second in each direction."""
        return 8 * self.size / self.seconds


class ClusterReport(Record):
    """The reports of the ranks of a CheckTask, written by rank 0."""

    id: str
    job: str
    backend: str  # backend of the transfers: "nccl" or "gloo"
    ranks: int
    nodes: tuple[NodeReport, ...]
    transfers: tuple[Transfer, ...] = ()  # between the first two nodes, ascending by size; empty with one node
    inside: tuple[Transfer, ...] = ()
    """Between the first two ranks of the first node; empty unless each has its own GPU."""
    latency: float | None = None  # median seconds of an all-reduce of one number over all ranks; None if it failed
    network_error: RecordedText = ""  # error of the backend if the ranks could not exchange tensors, else empty
