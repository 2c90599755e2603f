"""The base of all records, and the records of the memory of a GPU."""

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from tula_cli.diagnostics import Diagnostic
from tula_cli.run.secrets import redact_secrets, remove_secrets

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
"""An integer that fits in 64 bits, as arrays need: a record with a larger one is damaged."""

Positive = Annotated[int, Field(ge=1, lt=2**63)]
"""An integer from 1 on."""

NonNegative = Annotated[float, Field(ge=0)]
"""A duration in seconds that may be 0; a negative one results from a clock that was set back, and is an error."""

Seconds = Annotated[float, Field(gt=0)]
"""A duration in seconds that is never 0, such as that of a step."""


RecordedText = Annotated[str, AfterValidator(redact_secrets), PlainSerializer(redact_secrets)]
"""Text that another program may have written, from which possible secrets (tokens, URLs with passwords) are removed.

Removed both on validation and on serialisation, because `model_copy` does not validate."""


def _read_diagnostic(value: Any) -> Any:
    """Return the content of a diagnostic; older versions of tula recorded only the text."""
    return {"code": "", "values": {}, "text": value} if isinstance(value, str) else value


RecordedDiagnostic = Annotated[
    Diagnostic,
    BeforeValidator(_read_diagnostic),
    PlainSerializer(lambda diagnostic: remove_secrets(dataclasses.asdict(diagnostic))),
]
"""A warning or note that another process has given, stored without possible secrets."""


class Record(BaseModel):
    """Base class: frozen; unknown keys are ignored, so that an older version of tula can read a newer run."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


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


class Splits(Record):
    """The numbers of parts into which micro-batches can be split at one batch, and why not into more."""

    batch: int  # global
    micro_batch: int  # samples per micro-batch on one GPU, before splitting
    micro_batches: int  # micro-batches per step on one GPU, before splitting
    into: tuple[int, ...]  # possible numbers of parts, 2 or more, ascending; empty if it cannot be split
    limit: str  # reason why micro-batches cannot be split into more parts, for messages


class MicroBatches(Record):
    """The splits of every batch that a training may fall back to; written by rank 0, which knows the model."""

    splits: tuple[Splits, ...]
    normalised: int
    """Micro-batches over which BatchNorm computes its statistics: 1, or several with SyncBatchNorm; 0 without either."""

    def get_splits(self, batch: int) -> Splits | None:
        """Return the splits of a batch, or None if it is not included."""
        return next((splits for splits in self.splits if splits.batch == batch), None)
