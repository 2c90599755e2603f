"""The sections for where a job runs and what it costs."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, WithJsonSchema, model_validator
from pydantic_core import InitErrorDetails

from tula_cli.plugins import is_import_string, suggest_nearest
from tula_cli.spec.kinds import (
    Arguments,
    Command,
    Line,
    Minutes,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    Size,
)
from tula_cli.spec.kinds import check_price as no_free_price
from tula_cli.spec.slurm_options import Slurm

KINDS = ("local", "slurm")
"""Schedulers included in tula; a user-defined one is named by an import string."""


def _check_kind(name: str) -> str:
    if name in KINDS or is_import_string(name):
        return name
    hint = suggest_nearest(name, KINDS) or "a scheduler of your own is written package.module:attribute"
    raise ValueError(f"unknown scheduler {name!r}: {hint}")


_WRITTEN_KIND = WithJsonSchema({"anyOf": [{"enum": list(KINDS)}, {"type": "string", "pattern": "^[^:]+:.+$"}]})


class OwnScheduler(Section):
    """Settings of a scheduler of your own: `cluster.kind` is its import string."""

    options: Arguments = {}  # passed to it when it is made
    minutes: Minutes = 120  # time limit of a training job
    python: Command | None = None  # how python is started in the job: a command of the shell
    setup: list[Line] = []  # shell lines before the job


class Cluster(Section):
    """Where jobs run, and what one of its nodes is."""

    # this machine, SLURM, or a scheduler of your own by its import string: package.module:attribute
    kind: Annotated[str, AfterValidator(_check_kind), _WRITTEN_KIND] = "local"
    gpus_per_node: Positive = 1  # ranks of one node (also where the ranks run on the CPU)
    device: Literal["auto", "cuda", "cpu"] = "auto"  # auto: a GPU where there is one
    memory_per_gpu: Size | None = None  # bytes that a rank may use; enforced
    collective: Literal["ring", "tree", "reduce_scatter_allgather", "parameter_server"] = "ring"  # of the time model
    interface: str | None = None  # network interface of gloo and NCCL
    slurm: Slurm | None = None  # with kind slurm
    scheduler: OwnScheduler | None = None  # with a scheduler of your own

    @model_validator(mode="after")
    def _settings_belong_to_their_scheduler(self) -> "Cluster":
        if self.kind != "slurm" and self.slurm is not None:
            raise ValueError(f"slurm settings mean nothing to kind {self.kind!r}; set kind: slurm")
        if self.kind in KINDS and self.scheduler is not None:
            raise ValueError(
                f"scheduler settings mean nothing to kind {self.kind!r}; they are for one of your own, package.module:attribute"
            )
        return self

    @property
    def own_scheduler(self) -> OwnScheduler | None:
        """Settings of a user-defined scheduler; None for the included ones."""
        return None if self.kind in KINDS else self.scheduler or OwnScheduler()

    @property
    def minutes(self) -> int:
        """The time limit of a training job that waits in a queue."""
        scheduler = self.own_scheduler
        return (self.slurm or Slurm()).minutes if scheduler is None else scheduler.minutes

    @property
    def minutes_setting(self) -> str:
        """The key that sets `minutes`."""
        return "cluster.slurm.minutes" if self.kind in KINDS else "cluster.scheduler.minutes"

    @property
    def memory_setting(self) -> str:
        """The key that requests a node's memory."""
        return "cluster.slurm.memory" if self.kind in KINDS else "cluster.scheduler.options"

    @property
    def more_memory(self) -> str:
        """Advice to a user whose job has used up a node's memory."""
        return "end other programs there" if self.kind == "local" else f"ask for more with {self.memory_setting}"

    @property
    def python(self) -> str | None:
        """Shell command that starts Python in jobs; None for the current interpreter."""
        settings = self.own_scheduler or self.slurm
        return None if settings is None else settings.python

    @property
    def collective_warning(self) -> str:
        """A warning if the time model assumes a different communication pattern than training uses; empty otherwise.

        Ring, tree and reduce-scatter with all-gather are ways to all-reduce, from which NCCL and gloo choose.
        """
        if self.collective != "parameter_server":
            return ""
        return (
            "cluster.collective: parameter_server is a model of time only (Eq. 2c): probes and training synchronise by"
            " all-reduce, and predictions on other numbers of nodes than those measured are for a parameter server"
        )


class Spot(Section):
    """The same nodes for less money, but they may be taken away (spot, preemptible).

    The rate is that of one node, as providers state it: a job loses its first node N times as often on N nodes, so that
    one number holds for the whole search.
    """

    discount: Annotated[float, Field(ge=0, lt=1)]  # share of the price that is saved
    interruptions_per_day: NonNegativeFloat  # of one node
    wait_minutes: NonNegativeFloat = 0.0  # until a lost node is replaced; nothing is paid meanwhile


@dataclass(frozen=True)
class SiteBill:
    """Charge of a job to the account's allocation, as SLURM reports it: the billing of its TRES, and its factors."""

    node: NonNegativeFloat  # billing of each of its nodes
    job: NonNegativeFloat = 0.0  # billing of the job beside them (licenses)
    usage_factor: NonNegativeFloat = 1.0  # of its QOS, by which SLURM multiplies what it counts
    charge_factor: NonNegativeFloat = 1.0  # of its QOS and partition, as the site multiplies beside SLURM
    qos: str = ""  # of the job; empty where nothing tells
    tres: dict[str, float] = field(
        default_factory=dict
    )  # what each node is allocated: cpu, mem (MB), node, gres/gpu ...
    words: str = ""  # what it follows from


_NO_MONEY = ("node-h", "SU")
"""Units of costs if no price is given."""


class Pricing(Section):
    """Price per node-hour, GPU-hour, GB-hour of reserved GPU memory, or billing-hour as the site's SLURM counts it."""

    kind: Literal["node_hour", "gpu_hour", "gb_hour", "billing"] = "node_hour"  # what the price is for
    price: Annotated[PositiveFloat, BeforeValidator(no_free_price)] = (
        1.0  # in currency; kind billing alone can do without one
    )
    currency: Annotated[Line, Field(min_length=1)] = "USD"  # shown with every cost; without a price it is the unit
    source: Line = ""  # where the price comes from and when it was looked up, shown beside it
    spot: Spot | None = None  # where the nodes may be taken away
    unit: Annotated[Line, Field(min_length=1)] = (
        "SU"  # of kind billing: how the site calls a billing-hour, as core-hours
    )
    per_node: PositiveFloat | None = None  # of kind billing: billing of a whole node; null: SLURM is asked
    qos_factors: dict[str, NonNegativeFloat] = {}  # of kind billing: charge factors that SLURM does not know, by QOS
    partition_factors: dict[str, NonNegativeFloat] = {}  # likewise, by partition
    # of kind billing: what SLURM reported, as tula records it in a run; leave it out
    slurm_billing: Annotated[SiteBill | None, WithJsonSchema({"type": ["object", "null"]})] = None

    @model_validator(mode="after")
    def _priced_as_its_kind_is(self) -> "Pricing":
        if self.kind == "billing":
            # A run writes all that its job has down: what stands for no price there is none here either.
            if "price" not in self.model_fields_set or (self.price == 1.0 and self.currency in _NO_MONEY):
                if self.currency not in ("USD", self.unit, *_NO_MONEY):
                    raise ValueError(
                        f"currency {self.currency} needs a price, of one {self.unit}; without one costs are in {self.unit}"
                    )
                object.__setattr__(self, "currency", self.unit)  # it is frozen
            return self
        if "price" not in self.model_fields_set:
            details = InitErrorDetails(type="missing", loc=("price",), input={})
            raise ValidationError.from_exception_data("Pricing", [details])
        of_billing = ("unit", "per_node", "qos_factors", "partition_factors", "slurm_billing")
        given = [name for name in of_billing if getattr(self, name) != type(self).model_fields[name].default]
        if given:
            raise ValueError(f"{', '.join(given)}: of kind billing, and kind is {self.kind}")
        return self


UNPRICED = Pricing(price=1.0, currency="node-h")
"""Without a price, cost is the number of node-hours."""


class NodeType(Section):
    """Settings of one type of node: laid over those sections of the job, level by level."""

    cluster: Arguments = {}  # laid over section cluster
    pricing: Arguments = {}  # laid over section pricing
    search: Arguments = {}  # laid over section search

    @model_validator(mode="after")
    def _one_cap_for_all(self) -> "NodeType":
        if "max_node_hours" in self.search:
            raise ValueError("search.max_node_hours bounds all types together; set it in the job's own section search")
        return self


TypeName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$")]
