"""Plans: what a profile, a training, a comparison or a search would run and cost, before anything is submitted."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tula_cli.diagnostics import Diagnostic
from tula_cli.models.cost import MaxCost
from tula_cli.run.directory import Run
from tula_cli.run.imports import Source
from tula_cli.run.records.recommendations import Prediction
from tula_cli.run.records.results import Cell, Comparison, Summary
from tula_cli.run.records.tasks import ProbeTask, RateSearchTask, TrainTask
from tula_cli.services.site_charges import BalanceCheck
from tula_cli.spec.job import JobSpec

if TYPE_CHECKING:
    from tula_cli.models.rate_search import RateArm, SearchPlan
    from tula_cli.services.comparison.rounds import ComparisonState


@dataclass(frozen=True)
class ProfilePlan(MaxCost):
    """The probes that profiling would run now, those without a result, and their maximum cost."""

    tasks: tuple[ProbeTask, ...]  # one task per number of nodes with missing probes
    total: int  # probes of the whole search
    done: int
    minutes_at_most: float  # total time limit of all jobs
    code: Source  # the user's code that the probes run
    reasons: tuple[str, ...] = ()  # reason for each probe, with strategy: adaptive
    certainty: str = ""  # how certain the decisions are, with strategy: adaptive
    in_rounds: bool = False  # whether further probes may follow from the results

    @property
    def missing_count(self) -> int:
        return sum(len(task.local_batches) for task in self.tasks)

    @property
    def job_ids(self) -> tuple[str, ...]:
        return tuple(task.job for task in self.tasks)


@dataclass(frozen=True)
class UpperBoundPlan(MaxCost):
    """A first job on one node, and the probes that depend on its result: their maximum cost, within the cap."""

    why: str  # why the job cannot be inspected on this machine; empty if it was
    remedy: str  # what would make the inspection possible on this machine; empty if it was done
    first_job_minutes: float  # minutes of the job that inspects on a node; 0 without one
    nodes: tuple[int, ...]  # numbers of nodes in the search
    probe_node_hours: float  # upper bound for all probes; with search.strategy: adaptive, for one round
    cap: float | None  # search.max_node_hours; None without a cap
    adaptive: bool  # whether further rounds may follow

    @property
    def first_job_node_hours(self) -> float:
        return self.first_job_minutes / 60


@dataclass(frozen=True)
class TrainPlan:
    """The plan of a training, before anything is submitted."""

    task: TrainTask
    prediction: Prediction | None
    source: str  # origin of nodes and batch, in words
    finished: bool  # whether the training has already finished
    resumes: int | None  # samples of the newest checkpoint; None if it starts from the beginning
    code: Source  # the user's code that the training runs
    price: str = ""  # in words, with unit, source and date
    interruption: str = ""  # cost of an interruption of a script, in words; empty if unknown
    rehearses: bool = False  # whether a resume test of the script runs first
    balance: BalanceCheck | None = None  # balance of the account; None unless SLURM's billing is the price
    finished_elsewhere: tuple[Summary, ...] = ()  # finished trainings of the job with other nodes or another batch
    warnings: tuple[Diagnostic, ...] = ()  # warnings about the range of nodes


@dataclass(frozen=True)
class ComparePlan:
    """A comparison before anything is submitted."""

    comparison: Comparison
    spec: JobSpec  # the job whose settings the cells change
    state: "ComparisonState"
    missing: tuple[Cell, ...]  # wanted trainings without a result, most useful first
    # expected hours of one training by row (method, batch); None if unknown
    hours: Mapping[tuple[str, int], float | None]
    currency: str
    price: str
    first: TrainPlan | None  # plan of the first missing training; None if none is missing
    warnings: tuple[Diagnostic, ...] = ()

    @property
    def hours_left(self) -> float | None:
        """Upper bound of the hours of all missing trainings, one after another; None if no duration is known."""
        return sum_hours((*self.missing, *self.state.undecided), self.hours)


def sum_hours(cells: Iterable[Cell], hours: Mapping[tuple[str, int], float | None]) -> float | None:
    """Return the total expected hours of `cells`, or None if the hours of no row are known.

    A row of unknown duration counts as the mean of the known ones; without cells the total is 0.
    """
    expected = [(hours.get((cell.method, cell.batch)), cell.epoch_share) for cell in cells]
    known_hours = [value for value in hours.values() if value is not None]
    if not expected or not known_hours:
        return None if expected else 0.0
    return sum(share * (statistics.fmean(known_hours) if value is None else value) for value, share in expected)


@dataclass(frozen=True)
class LearningRateSearchPlan:
    """A search for a learning rate before anything is submitted."""

    run: Run
    task: RateSearchTask
    plan: "SearchPlan"
    arms: "tuple[RateArm, ...]"  # learning rates to try at the batch, ascending
    code: Source
    training_hours: float | None  # predicted hours of a training with this batch; None without measurements
    price: str
    startup_hours: float = 0.0  # hours that a script takes to start once per branch

    @property
    def hours(self) -> float | None:
        """Expected hours of the search, if its samples take as long as those of the training."""
        return (
            None if self.training_hours is None else self.plan.training_share * self.training_hours + self.startup_hours
        )

    @property
    def node_hours(self) -> float | None:
        return None if self.hours is None else self.hours * self.task.nodes
