"""What building model and dataset tells."""

from tula_cli.run.records.base import Record, RecordedText
from tula_cli.run.records.components import Footprint


class Inspection(Record):
    """What building the model and the dataset (in a process of its own) tells before anything is measured."""

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
    convolutional: bool = False  # whether the model has 2-d convolutions
    gpus: int = 0  # that torch sees here, where a local run would use them
    process: int = 0  # bytes that a process holds that has loaded the libraries and the dataset
    notes: tuple[RecordedText, ...] = ()  # of the model: the weights it starts from, frozen layers, groups
    warnings: tuple[RecordedText, ...] = ()
    script: RecordedText = (
        ""  # the command of a script of the user's own: then nothing was built, and what is 0 or empty is not known
    )


class FirstJob(Record):
    """The jobs that have built the model and the dataset of a run on a node."""

    scheduler_id: str  # of the last one
    node_hours: float  # that all of them have taken, at most; the last one all its time, as long as it is awaited
    earlier: float = 0.0  # of these, by all but the last one
    awaited: str = ""  # name of the file that its answer is to be kept in; empty once that is there, or nobody waits
