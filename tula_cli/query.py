"""The query of a recommendation: an objective, and the limits that the choice must satisfy."""

from dataclasses import dataclass
from typing import Literal, get_args

from tula_cli.errors import SpecError, require_number, require_positive
from tula_cli.plugins import suggest_nearest

Objective = Literal["time", "cost", "knee", "accuracy-time", "energy"]
Curve = Literal["time", "cost"]


@dataclass(frozen=True, kw_only=True)
class Query:
    """Objective and limits of a recommendation, as the command line and the Python API take them; None is no limit.

    Raises:
        SpecError: there is no such objective or curve, or a limit is not a number or below 1.
    """

    objective: Objective = "knee"
    curve: Curve = "time"  # whose knee is looked for
    nodes: int | None = None  # this number of nodes and no other
    max_nodes: int | None = None
    max_batch: int | None = None  # global
    deadline_hours: float | None = None  # on spot nodes of the expected training time
    budget: float | None = None  # in the currency of the pricing; on spot nodes of the expected cost
    node_type: str | None = None  # this type of node only
    from_training: bool = False  # by the steps of the training under way

    def __post_init__(self) -> None:
        for name, value, allowed in (("objective", self.objective, Objective), ("curve", self.curve, Curve)):
            if value not in get_args(allowed):
                raise SpecError(
                    f"{name} {value!r} is none of {', '.join(get_args(allowed))}",
                    suggest_nearest(str(value), get_args(allowed)),
                )
        require_positive(nodes=self.nodes, max_nodes=self.max_nodes, max_batch=self.max_batch)
        require_number(deadline_hours=self.deadline_hours, budget=self.budget)

    @property
    def same_progress(self) -> bool:
        """Whether deadline and budget are for the same progress, not for the epochs of the job."""
        return self.objective == "accuracy-time"

    @property
    def node_counts(self) -> list[int] | None:
        """The numbers of nodes to consider; None for those of the search."""
        return None if self.nodes is None else [self.nodes]

    @property
    def options(self) -> list[str]:
        """All options except the objective, as typed on the command line."""
        options = {
            "curve": None if self.curve == "time" else self.curve,
            "nodes": self.nodes,
            "max-nodes": self.max_nodes,
            "max-batch": self.max_batch,
            "deadline": self.deadline_hours,
            "budget": self.budget,
            "type": self.node_type,
        }
        by = ["--from-training"] * self.from_training
        return [*(f"--{name} {value}" for name, value in options.items() if value is not None), *by]
