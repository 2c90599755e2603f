"""The base of all records."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer

from tula_cli.run.secrets import redact_secrets

OutcomeClass = Literal[
    "device_oom",
    "host_oom",
    "user",
    "diverged",
    "device_fault",
    "device_error",
    "peer",
    "signal",
    "hung",
    "host_limit",
    "port",
    "disk",
    "storage",
    "supervisor",
    "cancelled",
    "time_limit",
    "preempted",
    "node_failure",
    "stage_end",
    "unknown",
]


Market = Literal["on_demand", "spot"]
"""How nodes are obtained: for as long as needed, or at a discount until they are reclaimed."""


Count = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""A whole number that fits 64 bits, as in arrays: a record with a larger one is damaged."""


Positive = Annotated[int, Field(ge=1, lt=2**63)]
"""A whole number from 1 on."""

NonNegative = Annotated[float, Field(ge=0)]
"""A duration that may be 0; a negative one was taken from a clock that was set back."""

Seconds = Annotated[float, Field(gt=0)]
"""A duration that is never 0, such as that of a step."""


RecordedText = Annotated[str, AfterValidator(redact_secrets), PlainSerializer(redact_secrets)]
"""Text that another program may have written, from which possible secrets (tokens, URLs with passwords) are removed.

Removed both on validation and on serialisation, because `model_copy` does not validate."""


class Record(BaseModel):
    """Base class: frozen; unknown keys are ignored, so that an older version of tula can read a newer run."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


# --- Parts of a memory footprint


class ModelStates(Record):
    """The terms of Eq. 3 that do not depend on the batch: ZeRO's model states, and the factors of AGS. Bytes."""

    parameters: Count  # and buffers
    gradients: Count
    optimizer: Count  # its state
    factors: Count  # AGS scaling factors; the paper leaves them out

    @property
    def static(self) -> int:
        """Sum of all terms."""
        return self.parameters + self.gradients + self.optimizer + self.factors


class Components(ModelStates):
    """Eq. 3 of one rank at the peak of a step, and the memory of its allocator and libraries. Bytes."""

    batch: Count  # inputs and targets of one micro-batch
    activations: Count  # and workspaces: the peak less all of the above
    peak: Count  # in use at a time
    reserved: Count  # what the allocator holds for that where it has room (CUDA); the peak on the CPU
    # What takes from the capacity beside that: on a GPU the context, cuBLAS and NCCL; on the CPU what the process held
    # before, and under a limit only the part that the limit counts.
    libraries: Count = 0


class PeakMemory(Record):
    """The peak of one rank if its components are unknown, as for a user's script. Bytes."""

    # Counted from the tensors that its optimizer holds; None where it has none. What the rest of the peak is (activations,
    # batch, workspaces; on the CPU the process itself) is not known apart.
    states: ModelStates | None
    peak: Count  # in use at a time; on the CPU what was resident
    reserved: Count  # as of Components
    libraries: Count | None = None  # as of Components, beside the peak; None where it was not measured


class Footprint(Record):
    """Eq. 3 at one local batch, estimated without a GPU."""

    local_batch: Count
    memory: Components
    room: Count = 0  # bytes: the least that a GPU's allocator gets by with; 0 where that was not simulated


# --- Micro-batches


class Splits(Record):
    """The numbers of parts into which micro-batches may be split at one batch, and why not into more."""

    batch: int  # global
    micro_batch: int  # samples that a GPU takes at a time, uncut
    micro_batches: int  # of a step on one GPU, uncut
    into: tuple[int, ...]  # numbers of parts from 2, ascending
    limit: str  # why there are no more of them, in words


class MicroBatches(Record):
    """The splits of every batch that a training may fall back to; written by rank 0, which knows the model."""

    splits: tuple[Splits, ...]
    normalised: (
        int  # micro-batches that BatchNorm takes its statistics over: several of SyncBatchNorm; 0 without either
    )

    def get_splits(self, batch: int) -> Splits | None:
        """Return the splits of a batch, or None if it is not included."""
        return next((splits for splits in self.splits if splits.batch == batch), None)
