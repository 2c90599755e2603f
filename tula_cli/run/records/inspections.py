"""What building model and dataset tells."""

from tula_cli.run.records.base import Record


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
