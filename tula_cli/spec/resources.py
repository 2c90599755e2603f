"""The sections that say where it runs and what that costs."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tula_cli.plugins import is_import_string, nearest
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
    day,
    price,
)
from tula_cli.spec.slurm_options import Slurm

KINDS = ("local", "slurm")
"""Of schedulers that come with tula; one of the user's own is an import string."""


def _kind(name: str) -> str:
    if name in KINDS or is_import_string(name):
        return name
    hint = nearest(name, KINDS) or "a scheduler of your own is written package.module:attribute"
    raise ValueError(f"unknown scheduler {name!r}: {hint}")


class OwnScheduler(Section):
    """What a scheduler of the user's own is asked for: `cluster.kind` is its import string."""

    options: Arguments = {}  # passed to it when it is made
    minutes: Minutes = 120  # time limit of a training job
    python: Command | None = None  # how python is started in the job: a command of the shell
    setup: list[Line] = []  # shell lines before the job


class Cluster(Section):
    """Where jobs run, and what one of its nodes is."""

    # this machine, SLURM, or a scheduler of your own by its import string: package.module:attribute
    kind: Annotated[str, AfterValidator(_kind)] = "local"
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
        """What a scheduler of the user's own is asked for; None with those that come with tula."""
        return None if self.kind in KINDS else self.scheduler or OwnScheduler()

    @property
    def minutes(self) -> int:
        """The time limit of a training job that waits in a queue."""
        own = self.own_scheduler
        return (self.slurm or Slurm()).minutes if own is None else own.minutes

    @property
    def minutes_setting(self) -> str:
        """What sets that limit."""
        return "cluster.slurm.minutes" if self.kind in KINDS else "cluster.scheduler.minutes"

    @property
    def python(self) -> str | None:
        """The shell's words that start the python of jobs; None for the one that runs now."""
        own = self.own_scheduler or self.slurm
        return None if own is None else own.python

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
