"""The sections for where a job runs and what it costs."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, WithJsonSchema, model_validator
from pydantic_core import InitErrorDetails

from tula_cli.plugins import is_import_string, suggest_name
from tula_cli.spec.backend import BACKENDS, Backend, get_backend
from tula_cli.spec.kinds import (
    Arguments,
    Command,
    GpusPerNode,
    Minutes,
    NonNegativeFloat,
    OneLineText,
    PositiveFloat,
    Section,
    Size,
    check_price,
)
from tula_cli.spec.slurm_options import Slurm


def _check_kind(name: str) -> str:
    if name in BACKENDS or is_import_string(name):
        return name
    hint = suggest_name(name, BACKENDS) or "set local, slurm, or package.module:attribute for your own scheduler"
    raise ValueError(f"unknown scheduler {name!r}; {hint}")


_WRITTEN_KIND = WithJsonSchema({"anyOf": [{"enum": list(BACKENDS)}, {"type": "string", "pattern": "^[^:]+:.+$"}]})


class Cluster(Section):
    """Where jobs run, and the properties of a node."""

    # local (this machine), slurm, or package.module:attribute of a user-defined scheduler
    kind: Annotated[str, AfterValidator(_check_kind), _WRITTEN_KIND] = "local"
    gpus_per_node: GpusPerNode = 1  # Number of ranks per node: one per GPU, or processes on the CPU
    device: Literal["auto", "cuda", "cpu"] = "auto"  # Device of the ranks; auto: the GPU if there is one, else the CPU
    memory_per_gpu: Size | None = None  # Memory limit of each rank, which tula enforces; null: the memory of the device
    # Communication pattern that the time model assumes; it does not change how trainings synchronise
    collective: Literal["ring", "tree", "reduce_scatter_allgather", "parameter_server"] = "ring"
    # Network interface of gloo and NCCL, for example ib0; null: lo on one machine, otherwise detected
    interface: str | None = None
    minutes: Minutes = 120  # Time limit of a training job; not with kind: local
    # Shell command that starts Python in jobs, for example in a container; null: the current interpreter. Not with kind:
    # local
    python: Command | None = None
    # Shell lines that run before a job; not with kind: local. With kind: slurm, also the path of a file with these lines;
    # null: slurm-setup.sh of the user or the site.
    setup: list[str] | OneLineText | None = None
    slurm: Slurm | None = None  # Options of sbatch and srun, with kind: slurm
    options: Arguments = {}  # Arguments of the class of a user-defined scheduler

    @model_validator(mode="after")
    def _check_settings_fit_scheduler(self) -> "Cluster":
        if self.kind != "slurm" and self.slurm is not None:
            raise ValueError(
                f"slurm: has no effect with cluster.kind: {self.kind}; remove section cluster.slurm, or set cluster.kind: slurm"
            )
        if self.is_included and self.options:
            raise ValueError(
                f"options: has no effect with cluster.kind: {self.kind}, only with your own scheduler (cluster.kind: package.module:attribute); remove the key"
            )
        defaults = type(self).model_fields
        given = [name for name in self.backend.unused_settings if getattr(self, name) != defaults[name].default]
        if given:
            raise ValueError(
                f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect with cluster.kind: {self.kind}, which submits no jobs; remove {'this key' if len(given) == 1 else 'these keys'}"
            )
        if isinstance(self.setup, str) and self.kind != "slurm":
            raise ValueError(
                "setup: must be a list of shell lines; the path of a file is only valid with cluster.kind: slurm"
            )
        return self

    @property
    def backend(self) -> Backend:
        return get_backend(self.kind)

    @property
    def slurm_options(self) -> Slurm | None:
        """Section slurm, or its defaults if it is left out; None if the jobs do not run on SLURM."""
        return Slurm() if self.kind == "slurm" and self.slurm is None else self.slurm

    @property
    def is_included(self) -> bool:
        """Whether the scheduler is one of tula's, not a user's class."""
        return self.kind in BACKENDS

    @property
    def network_interface(self) -> str | None:
        """The network interface of the ranks; None if it is to be detected on the nodes."""
        return self.interface or self.backend.default_interface


class Spot(Section):
    """Spot (preemptible) nodes: cheaper, but the provider may reclaim them.

    Interruptions are given per node, as providers state them. tula assumes that a job on N nodes is interrupted N times
    as often.
    """

    discount: Annotated[float, Field(ge=0, lt=1)]  # Share of the price that is saved, for example 0.6
    interruptions_per_day: NonNegativeFloat  # Interruptions per day of one node


@dataclass(frozen=True)
class JobBilling:
    """Charge of a job to the account's allocation, as SLURM reports it: the billing of its TRES, and the factor of its QOS."""

    node: NonNegativeFloat  # billing of each node
    job: NonNegativeFloat = 0.0  # billing of the job in addition to its nodes (licenses)
    usage_factor: NonNegativeFloat = 1.0  # UsageFactor of the QOS, which SLURM applies
    qos: str = ""  # QOS of the job; empty if unknown
    # resources allocated per node: cpu, mem (MB), node, gres/gpu ...
    tres: dict[str, float] = field(default_factory=dict)
    words: str = ""  # explanation of the values


BILLING_UNIT = "SU"
"""A billing-hour, as SLURM counts it."""
_UNPRICED_UNITS = ("node-h", BILLING_UNIT)
"""Units of costs if no price is given."""


class Pricing(Section):
    """Price per node-hour, GPU-hour, GB-hour of reserved GPU memory, or billing-hour as counted by the site's SLURM."""

    # Unit of the price; billing: what SLURM bills
    kind: Literal["node_hour", "gpu_hour", "gb_hour", "billing"] = "node_hour"
    # Price per unit, in currency. It may be omitted only with kind: billing.
    price: Annotated[PositiveFloat, BeforeValidator(check_price)] = 1.0
    # Currency of all costs. With kind: billing and no price, costs are in SU instead.
    currency: Annotated[OneLineText, Field(min_length=1)] = "USD"
    spot: Spot | None = None  # Discount and interruptions of spot nodes; null: on demand only
    # With kind: billing: values that tula reads from SLURM and records in a run. Do not set this key.
    slurm_billing: Annotated[JobBilling | None, WithJsonSchema({"type": ["object", "null"]})] = None

    @model_validator(mode="after")
    def _check_pricing_by_kind(self) -> "Pricing":
        if self.kind == "billing":
            # A run stores all fields, so a stored price of 1.0 in node-h or SU also means that no price is given.
            if "price" not in self.model_fields_set or (self.price == 1.0 and self.currency in _UNPRICED_UNITS):
                if self.currency not in ("USD", *_UNPRICED_UNITS):
                    raise ValueError(
                        f"currency: {self.currency} needs pricing.price; set the price of a billing-hour, or remove the currency to show costs in {BILLING_UNIT}"
                    )
                object.__setattr__(self, "currency", BILLING_UNIT)  # the model is frozen
            return self
        if "price" not in self.model_fields_set:
            details = InitErrorDetails(type="missing", loc=("price",), input={})
            raise ValidationError.from_exception_data("Pricing", [details])
        if self.slurm_billing is not None:
            raise ValueError(f"slurm_billing: is only valid with pricing.kind: billing, got pricing.kind: {self.kind}")
        return self


UNPRICED_PRICING = Pricing(price=1.0, currency="node-h")
"""Without a price, cost is the number of node-hours."""


class NodeType(Section):
    """Settings of one node type. They override single keys of the sections cluster, pricing and search."""

    cluster: Arguments = {}  # Keys that override section cluster
    pricing: Arguments = {}  # Keys that override section pricing
    search: Arguments = {}  # Keys that override section search, except max_node_hours

    @model_validator(mode="after")
    def _check_no_node_hour_limit(self) -> "NodeType":
        if "max_node_hours" in self.search:
            raise ValueError(
                "search.max_node_hours: limits all node types together; set this key in section search of the job, not in a node type"
            )
        return self


TypeName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$")]
