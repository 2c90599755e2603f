"""The sections that say where it runs and what that costs."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tula_cli.spec.kinds import Arguments, Line, NonNegativeFloat, Positive, PositiveFloat, Section, Size, day, price
from tula_cli.spec.slurm_options import Slurm


class Cluster(Section):
    """Where jobs run, and what one of its nodes is."""

    kind: Literal["local", "slurm"] = "local"  # this machine, or SLURM
    gpus_per_node: Positive = 1  # ranks of one node (also where the ranks run on the CPU)
    device: Literal["auto", "cuda", "cpu"] = "auto"  # auto: a GPU where there is one
    memory_per_gpu: Size | None = None  # bytes that a rank may use; enforced
    collective: Literal["ring", "tree", "reduce_scatter_allgather", "parameter_server"] = "ring"  # of the time model
    interface: str | None = None  # network interface of gloo and NCCL
    slurm: Slurm | None = None  # with kind slurm

    @model_validator(mode="after")
    def _slurm_settings_belong_to_slurm(self) -> "Cluster":
        if self.kind == "local" and self.slurm is not None:
            raise ValueError("slurm settings mean nothing to kind 'local'; set kind: slurm")
        return self

    @property
    def collective_warning(self) -> str:
        """What to say where the time model is of another communication than training's; empty where it is not.

        Ring, tree and reduce-scatter with all-gather are ways to all-reduce, among which NCCL and gloo choose.
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


class Pricing(Section):
    """Price per node-hour, GPU-hour, or GB-hour of reserved GPU memory."""

    kind: Literal["node_hour", "gpu_hour", "gb_hour"] = "node_hour"  # what the price is for
    price: Annotated[PositiveFloat, BeforeValidator(price)]  # in currency
    currency: Annotated[Line, Field(min_length=1)] = "USD"  # shown with every cost
    source: Line = ""  # where the price comes from, shown beside it
    date: Annotated[str, AfterValidator(day)] = ""  # when it was looked up, 2025-11-30; shown beside it
    spot: Spot | None = None  # where the nodes may be taken away


UNPRICED = Pricing(price=1.0, currency="node-h")
"""Where no price is given, cost is a number of node-hours."""


class NodeType(Section):
    """What is special about one type of node: laid over those sections of the job, level by level."""

    cluster: Arguments = {}  # laid over section cluster
    pricing: Arguments = {}  # laid over section pricing
    search: Arguments = {}  # laid over section search

    @model_validator(mode="after")
    def _one_cap_for_all(self) -> "NodeType":
        if "max_node_hours" in self.search:
            raise ValueError("search.max_node_hours bounds all types together; set it in the job's own section search")
        return self


TypeName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$")]
