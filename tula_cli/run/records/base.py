"""The base class of all records, and the types of fields that records of several modules have."""

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

Positive = Annotated[int, Field(ge=1, lt=2**63)]
"""An integer from 1 on."""

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
