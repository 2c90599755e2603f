"""Events that a service yields while it works. A service prints nothing: the caller shows the events or ignores them."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from tula_cli.cluster.scheduler import SchedulerState
    from tula_cli.run.records.tasks import CheckTask, EvaluateTask
    from tula_cli.services.compare import ComparePlan
    from tula_cli.services.comparison.trainings import Progress
    from tula_cli.services.profile import ProfilePlan, UpperBoundPlan
    from tula_cli.services.status import RunStatus
    from tula_cli.services.train import TrainPlan

T = TypeVar("T")


@dataclass(frozen=True)
class Note:
    """A message about progress."""

    text: str


@dataclass(frozen=True)
class WarningEvent:
    """A warning; the same text may be repeated."""

    text: str


@dataclass(frozen=True)
class ProfilePlanned:
    """The plan of profiling on each node type; the key is None for a job without node types."""

    plans: "Mapping[str | None, ProfilePlan]"

    @property
    def node_hours(self) -> float:
        """Node-hours that it takes at most."""
        return sum(plan.node_hours_at_most for plan in self.plans.values())


@dataclass(frozen=True)
class FirstJobPlanned:
    """The jobs that are about to build the model and the dataset on a node, and what may follow from them.

    The probes that they settle are within what is allowed here: nobody is asked again.
    """

    plans: "Mapping[str | None, UpperBoundPlan]"
    cap: float | None  # search.max_node_hours

    @property
    def node_hours(self) -> float:
        """Node-hours that all of it takes at most; with search.strategy: adaptive and no cap, its first round."""
        total = sum(plan.node_hours_at_most for plan in self.plans.values())
        return total if self.cap is None else min(total, self.cap)


@dataclass(frozen=True)
class TrainPlanned:
    """The training that is about to be submitted, as a chain of jobs."""

    plan: "TrainPlan"
    links: tuple[int, ...]  # nodes that each of them asks for

    @property
    def node_hours(self) -> float | None:
        """Node-hours that it is expected to take; None where nothing was measured."""
        predicted = self.plan.prediction
        return None if predicted is None else predicted.all_node_hours


@dataclass(frozen=True)
class ComparePlanned:
    """The trainings that a comparison is about to submit."""

    plan: "ComparePlan"

    @property
    def node_hours(self) -> float | None:
        """Node-hours that they are expected to take; None where nothing tells."""
        hours = self.plan.hours_left
        return None if hours is None else hours * self.plan.comparison.nodes


@dataclass(frozen=True)
class EvaluationPlanned:
    """The evaluation that is about to be submitted."""

    task: "EvaluateTask"

    @property
    def node_hours(self) -> None:
        """Nothing tells how long it takes: less than an epoch, mostly."""
        return


Planned = ProfilePlanned | FirstJobPlanned | TrainPlanned | ComparePlanned | EvaluationPlanned


@dataclass(frozen=True)
class JobsProgress:
    """How far the jobs are that one waits for."""

    status: "RunStatus"


@dataclass(frozen=True)
class NodeCheckProgress:
    """The state of the job that checks the nodes, sent when it changes."""

    task: "CheckTask"
    state: "SchedulerState"


@dataclass(frozen=True)
class ComparisonProgress:
    """How far a comparison is."""

    progress: "Progress"


Event = Note | WarningEvent | Planned | JobsProgress | NodeCheckProgress | ComparisonProgress
Work = Generator[Event, None, T]
"""Events, and in the end (as the value of StopIteration) the result."""


def follow(work: Work[T], tell: Callable[[Event], object]) -> T:
    """Do the work, tell every event, and return the result. Ctrl-C while an event is told ends the work as well."""
    try:
        event = next(work)
        while True:
            try:
                tell(event)
            except KeyboardInterrupt as pressed:
                event = work.throw(pressed)
            else:
                event = next(work)
    except StopIteration as end:
        result: T = end.value
        return result
