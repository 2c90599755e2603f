"""The query of a recommendation: an objective, and the limits that the choice must satisfy."""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from tula_cli.errors import SpecError
from tula_cli.options import NodeType, Option, list_fields
from tula_cli.words import SECONDS_PER_UNIT

Objective = Literal["time", "cost", "knee", "accuracy-time", "energy"]
Curve = Literal["time", "cost"]
QuantityName = Literal["time", "cost", "accuracy-time", "energy"]


@dataclass(frozen=True)
class Quantity:
    """A quantity that an objective minimises.

    Attributes:
        name: as in the options --objective and --curve.
        attribute: of a `Prediction`; the column of the table of candidates has the same name with `_` for `.`.
        lowest: noun for its lowest value.
        saving: what a configuration with a lower value needs less of.
        interval: quantity whose 90 % interval, the columns `_low` and `_high`, gives the relative uncertainty.
        grows_with_nodes: whether each node adds to it. Plans of many trainings then minimise it instead of the time, and
            the nodes of the stages of a ramp are chosen by cost.
        unit: unit of the values; empty for hours and the currency of the job.
    """

    name: QuantityName
    attribute: str
    lowest: str
    saving: str = "time"
    interval: str = "hours"
    grows_with_nodes: bool = False
    unit: str = ""

    @property
    def column(self) -> str:
        """The column of the table of candidates."""
        return self.attribute.replace(".", "_")


QUANTITIES: dict[QuantityName, Quantity] = {
    quantity.name: quantity
    for quantity in (
        Quantity("time", "hours", "shortest time"),
        Quantity("cost", "cost", "lowest cost", saving="money", grows_with_nodes=True),
        Quantity("accuracy-time", "same_progress.hours", "shortest time to the same progress"),
        Quantity("energy", "kwh", "lowest energy", saving="energy", interval="kwh", grows_with_nodes=True, unit="kWh"),
    )
}
"""The quantity of each objective; objective knee uses that of its curve."""


def get_quantity(objective: Objective, curve: Curve) -> Quantity:
    """Return the quantity that an objective minimises, or in whose curve objective knee chooses."""
    return QUANTITIES[curve if objective == "knee" else objective]


def parse_hours(text: str) -> float:
    """Return the hours of a duration such as 36, 30s, 90m, 90min, 36h, 3d or 2w.

    Raises:
        SpecError: the text is not a duration.
    """
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([smhdw]?|min)", text.strip())
    if match is None:
        raise SpecError(
            f"[[--deadline]] {text}: expected hours, or a number with a unit", "for example 36, 30s, 90m, 36h, 3d or 2w"
        )
    return float(match[1]) * (SECONDS_PER_UNIT[{"": "h", "min": "m"}.get(match[2], match[2])] / 3600)


def parse_share(text: str) -> float:
    """Return the share of a text such as 0.6 or 60%.

    Raises:
        SpecError: the text is not a share between 0 and 1.
    """
    share = _parse_number("--min-efficiency", text.strip().removesuffix("%"), "for example 0.6 or 60%")
    share = share / 100 if text.strip().endswith("%") else share
    if not 0 <= share <= 1:
        raise SpecError(f"[[--min-efficiency]] {text}: must be between 0 and 1", "for example 0.6 or 60%")
    return share


def parse_budget(text: str) -> float:
    """Return a budget.

    Raises:
        SpecError: the text is not a number.
    """
    return _parse_number("--budget", text, "give the number alone, in pricing.currency of the job")


def _parse_number(option: str, text: str, hint: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise SpecError(f"{option} {text}: expected a number", hint)
    return number


@dataclass(frozen=True, kw_only=True)
class Query:
    """Objective and limits of a recommendation; None is no limit.

    The fields are the options of `tula recommend` and arguments of `tula.recommend`. `max_batch` is global, `budget` is in
    the currency of the pricing, and on spot nodes deadline and budget are compared with the expected time and cost. Types
    and lower bounds of the limits are checked as for every option, on the command line and in Python.

    Raises:
        SpecError: there is no such objective or curve, the objective has no curve, or a limit is not finite, or an efficiency above 1.
    """

    objective: Annotated[
        Objective,
        Option(
            "time, cost, energy: choose the lowest value; knee: the batch beyond which a larger one saves little"
            " time; accuracy-time: the lowest time to the same training progress.",
        ),
    ] = "knee"
    curve: Annotated[
        Curve, Option("With --objective knee: choose the knee of the training time or of the cost.", advanced=True)
    ] = "time"
    nodes: Annotated[int | None, Option("Consider only this number of nodes.", minimum=1)] = None
    max_nodes: Annotated[int | None, Option("Maximum number of nodes.", minimum=1)] = None
    max_batch: Annotated[int | None, Option("Maximum global batch size.", minimum=1)] = None
    min_efficiency: Annotated[
        float | None,
        Option(
            "Minimum scaling efficiency, such as 0.6.", metavar="SHARE", minimum=0, type=str | None, parse=parse_share
        ),
    ] = None
    deadline_hours: Annotated[
        float | None,
        Option(
            "Maximum training time, in hours or with a unit (90m, 36h, 3d).",
            "--deadline",
            metavar="TIME",
            minimum=0,
            type=str | None,
            parse=parse_hours,
        ),
    ] = None
    budget: Annotated[
        float | None,
        Option(
            "Maximum cost of the training, in the job's currency.",
            metavar="PRICE",
            minimum=0,
            type=str | None,
            parse=parse_budget,
        ),
    ] = None
    node_type: NodeType = None

    @property
    def quantity(self) -> Quantity:
        """The quantity that is minimised, or in whose curve the knee is sought."""
        return get_quantity(self.objective, self.curve)

    def __post_init__(self) -> None:
        for name, value, allowed in (("objective", self.objective, Objective), ("curve", self.curve, Curve)):
            if value not in get_args(allowed):
                from tula_cli.plugins import suggest_nearest

                raise SpecError(
                    f"unknown {name} {value!r}; use one of {', '.join(get_args(allowed))}",
                    suggest_nearest(str(value), get_args(allowed)),
                )
        if self.curve != "time" and self.objective != "knee":
            raise SpecError(f"curve {self.curve} has no effect with objective {self.objective}", "use objective knee")
        for name in ("min_efficiency", "deadline_hours", "budget"):
            limit = getattr(self, name)
            if limit is not None and not math.isfinite(limit):
                raise SpecError(f"{name} {limit}: must be a finite number", f"leave out {name} to set no limit")
        if self.min_efficiency is not None and self.min_efficiency > 1:
            raise SpecError(f"min_efficiency {self.min_efficiency:g}: must be at most 1", "write 0.8 for 80 %")

    @property
    def compares_at_equal_progress(self) -> bool:
        """Whether deadline and budget apply to trainings of equal progress instead of the job's number of epochs."""
        return self.objective == "accuracy-time"

    @property
    def node_counts(self) -> list[int] | None:
        """The numbers of nodes to consider; None for those of the search."""
        return None if self.nodes is None else [self.nodes]

    @property
    def command_line_options(self) -> list[str]:
        """All options that differ from their defaults, except the objective, as typed on the command line."""
        typed = []
        for parameter, option in list_fields(Query):
            value = getattr(self, parameter.name)
            if parameter.name != "objective" and value != parameter.default:
                flag = option.make_flag(parameter.name)
                if parameter.name == "deadline_hours" and round(value, 3) != value:  # not a round number of hours
                    value = f"{60 * value:g}m"
                typed.append(flag if value is True else f"{flag} {value}")
        return typed
