"""Events that a service yields while it works. Services print nothing: the caller shows the events or ignores them."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tula_cli.diagnostics import Diagnostic

if TYPE_CHECKING:
    from tula_cli.cluster.scheduler import SchedulerState
    from tula_cli.models.choice.campaign import Campaign
    from tula_cli.run.records.probes import Result
    from tula_cli.run.records.results import Cell
    from tula_cli.run.records.tasks import CheckTask, EvaluateTask
    from tula_cli.services.plans import ComparePlan, LearningRateSearchPlan, ProfilePlan, TrainPlan, UpperBoundPlan
    from tula_cli.services.status import RunStatus
    from tula_cli.services.training_status import TrainingStatus

T = TypeVar("T")


@dataclass(frozen=True)
class Note:
    """A message about progress."""

    text: str


@dataclass(frozen=True)
class WarningEvent:
    """A warning; the same one may be repeated."""

    warning: Diagnostic | str

    @property
    def text(self) -> str:
        """The sentence for the user."""
        return str(self.warning)


@dataclass(frozen=True)
class ProfilePlanned:
    """The plan of profiling on each node type; the key is None for a job without node types.

    If jobs are about to build the model and the dataset on a node, the confirmation of this plan includes the probes that
    may follow from them: it is not requested again.
    """

    plans: "Mapping[str | None, ProfilePlan] | Mapping[str | None, UpperBoundPlan]"
    cap: float | None  # search.max_node_hours
    is_further_round: bool = False  # whether an earlier round of this search was shown before

    @property
    def node_hours(self) -> float:
        """Upper bound of all node-hours; with search.strategy: adaptive and no cap, of the first round only."""
        total = sum(plan.node_hours_at_most for plan in self.plans.values())
        return total if self.cap is None else min(total, self.cap)


@dataclass(frozen=True)
class TrainPlanned:
    """The training that is about to be submitted, as a chain of jobs."""

    plan: "TrainPlan"
    links: tuple[int, ...]  # nodes requested by each job of the chain

    @property
    def node_hours(self) -> float | None:
        """Expected node-hours of the training; None if nothing was measured."""
        predicted = self.plan.prediction
        return None if predicted is None else predicted.all_node_hours


@dataclass(frozen=True)
class ComparePlanned:
    """The trainings that a comparison is about to submit."""

    plan: "ComparePlan"

    @property
    def node_hours(self) -> float | None:
        """Expected node-hours of the trainings; None if no duration is known."""
        hours = self.plan.hours_left
        return None if hours is None else hours * self.plan.comparison.nodes


@dataclass(frozen=True)
class SeedsPlanned:
    """The trainings of a plan that are about to be submitted."""

    plan: "Campaign"
    missing: int  # trainings of the plan that are neither finished nor running
    node_hours: float  # expected node-hours of the missing trainings


@dataclass(frozen=True)
class EvaluationPlanned:
    """The evaluation that is about to be submitted."""

    task: "EvaluateTask"

    @property
    def node_hours(self) -> None:
        """None: the duration is not known; it is usually less than that of an epoch."""
        return


@dataclass(frozen=True)
class RateSearchPlanned:
    """The search for a learning rate that is about to be submitted."""

    search: "LearningRateSearchPlan"

    @property
    def node_hours(self) -> float | None:
        """Expected node-hours of the search; None if nothing was measured."""
        return self.search.node_hours


Planned = ProfilePlanned | TrainPlanned | ComparePlanned | SeedsPlanned | EvaluationPlanned | RateSearchPlanned


@dataclass(frozen=True)
class JobsProgress:
    """The progress of the jobs that are waited for."""

    status: "RunStatus"


@dataclass(frozen=True)
class ProbeFinished:
    """The result of a probe of the jobs that are waited for, sent as soon as it is known."""

    result: "Result"
    number: int  # results so far, this one included
    total: int  # probes of these jobs
    left: float | None  # estimated seconds until all probes are finished; None if unknown


@dataclass(frozen=True)
class NodeCheckProgress:
    """The state of the job that checks the nodes, sent when it changes."""

    task: "CheckTask"
    state: "SchedulerState"


@dataclass(frozen=True)
class ComparisonProgress:
    """The progress of a comparison that is waited for. Times in seconds."""

    total: int  # upper bound of the number of trainings
    done: int  # finished trainings, including diverged ones
    failed: int  # failed trainings that this call started or waited for
    cell: "Cell | None"  # the running training; None between two trainings, or if several run concurrently
    training: "TrainingStatus | None"
    left: float | None
    running: int = 0
    ended: "Cell | None" = None  # the training that has just ended; None if none has
    problem: str = ""  # why that training failed; empty if it did not
    waits: str = ""  # why the training is still queued; empty unless it waits unusually long
    round: int | None = None  # number of the round; None for a comparison without rounds
    undecided: int = 0  # trainings of the total that may not be needed


Event = Note | WarningEvent | Planned | JobsProgress | ProbeFinished | NodeCheckProgress | ComparisonProgress
Work = Generator[Event, None, T]
"""A generator of events that returns the result (as the value of StopIteration)."""


def run_work(work: Work[T], on_event: Callable[[Event], object]) -> T:
    """Run `work`, pass every event to `on_event`, and return the result.

    A KeyboardInterrupt raised in `on_event` is thrown into `work`, so that Ctrl-C also ends the work.
    """
    try:
        event = next(work)
        while True:
            try:
                on_event(event)
            except KeyboardInterrupt as pressed:
                event = work.throw(pressed)
            else:
                event = next(work)
    except StopIteration as end:
        result: T = end.value
        return result
