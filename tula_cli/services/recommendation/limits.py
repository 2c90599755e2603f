"""Limits on a recommendation: deadline, budget, batch and nodes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import get_args

import numpy as np

from tula_cli.errors import SpecError, require_number, require_positive
from tula_cli.models.choice.columns import Flags, Floats, Ints
from tula_cli.models.choice.objective import Curve, Objective
from tula_cli.models.choice.offers import Offers
from tula_cli.plugins import suggest_nearest
from tula_cli.run.records.recommendations import Prediction
from tula_cli.words import format_count, format_duration


@dataclass(frozen=True)
class Limits:
    """Bounds that the user sets on a recommendation. None means no bound.

    Raises:
        SpecError: a number of nodes or a batch is below 1.
    """

    nodes: int | None = None  # this number of nodes and no other
    max_nodes: int | None = None
    max_batch: int | None = None  # global
    deadline_hours: float | None = None
    budget: float | None = None  # in the currency of the pricing
    same_progress: bool = False  # the deadline and the budget are for the same progress, not for the spec's epochs

    def __post_init__(self) -> None:
        require_positive(nodes=self.nodes, max_nodes=self.max_nodes, max_batch=self.max_batch)
        require_number(deadline_hours=self.deadline_hours, budget=self.budget)

    def hours(self, rows: Offers) -> Floats:
        return rows.same_progress.hours if self.same_progress and rows.same_progress else rows.hours

    def latest(self, row: Prediction) -> float:
        """Return the upper bound of the hours; 0 if there is none."""
        high = row.same_progress.hours_high if self.same_progress and row.same_progress else row.hours_high
        return high or 0.0

    def cost(self, rows: Offers) -> Floats:
        return rows.same_progress.cost if self.same_progress and rows.same_progress else rows.cost

    @property
    def wanted(self) -> list[int] | None:
        return None if self.nodes is None else [self.nodes]

    def reach(self, nodes: Ints, batch: Ints) -> Flags:
        """Return which configurations satisfy the bounds that need no forecast, shape (n,)."""
        most_nodes, most_batch = (np.inf if most is None else most for most in (self.max_nodes, self.max_batch))
        return (nodes <= most_nodes) & (batch <= most_batch)

    def __iter__(self) -> Iterator["_Bound"]:
        """Iterate over the bounds that are set, in the order in which they are applied."""
        for name, most, value in (
            ("at most {:g} nodes", self.max_nodes, lambda rows: rows.nodes),
            ("a batch of at most {:g}", self.max_batch, lambda rows: rows.batch),
            (f"a deadline of {self._deadline}{self._to}", self.deadline_hours, self.hours),
            (f"a budget of {{:g}}{self._to}", self.budget, self.cost),
        ):
            if most is not None:
                yield _Bound(name.format(most), most, value)

    @property
    def _deadline(self) -> str:
        """The deadline as it was given, and in the unit in which durations are displayed."""
        hours = self.deadline_hours or 0.0
        duration_text = format_duration(3600 * hours)
        return f"{hours:g} h" if duration_text.endswith(" h") else f"{hours:g} h ({duration_text})"

    @property
    def _to(self) -> str:
        return " to the same progress" if self.same_progress else ""


@dataclass(frozen=True)
class Criteria:
    """The query of a recommendation: the objective, and the configurations to choose among.

    Raises:
        SpecError: there is no such objective or curve.
    """

    objective: Objective = "knee"
    limits: Limits = Limits()
    curve: Curve = "time"  # whose knee is looked for
    node_type: str | None = None  # this type of node only
    from_training: bool = False  # by the steps of the training under way

    def __post_init__(self) -> None:
        for name, value, allowed in (("objective", self.objective, Objective), ("curve", self.curve, Curve)):
            if value not in get_args(allowed):
                raise SpecError(
                    f"{name} {value!r} is none of {', '.join(get_args(allowed))}",
                    suggest_nearest(str(value), get_args(allowed)),
                )

    @property
    def options(self) -> list[str]:
        """All options except the objective, as typed on the command line."""
        limits = self.limits
        options = {
            "curve": None if self.curve == "time" else self.curve,
            "nodes": limits.nodes,
            "max-nodes": limits.max_nodes,
            "max-batch": limits.max_batch,
            "deadline": limits.deadline_hours,
            "budget": limits.budget,
            "type": self.node_type,
        }
        by = ["--from-training"] * self.from_training
        return [*(f"--{name} {value}" for name, value in options.items() if value is not None), *by]


@dataclass(frozen=True)
class _Bound:
    """One limit: its description, its value, and the quantity of configurations that it bounds."""

    words: str
    most: float
    value: Callable[[Offers], Floats | Ints]


def describe_limits(row: Prediction, currency: str) -> str:
    kind = f" of type {row.type}" * bool(row.type) + " on spot" * (row.market == "spot")
    return (
        f"{format_count(row.nodes)}{kind}, batch {row.batch} (local batch {row.local_batch}): {format_duration(3600 * row.hours)},"
        f" {row.cost:.4g} {currency}"
    )
