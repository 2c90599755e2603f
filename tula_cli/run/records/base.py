"""What all records have in common."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer

from tula_cli.run.source.keys import without_secrets

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
"""How nodes are had: for as long as wanted, or for less money until they are taken away."""


Count = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""A whole number as arrays hold it: a record with a larger one is damaged."""


RecordedText = Annotated[str, AfterValidator(without_secrets), PlainSerializer(without_secrets)]
"""Text that another program may have written: an error may quote a token, or a URL with a password.

Neither read nor written with it: `model_copy` validates nothing.
"""


class Record(BaseModel):
    """Frozen; unknown keys are ignored, so that an older tula reads a newer run."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())
