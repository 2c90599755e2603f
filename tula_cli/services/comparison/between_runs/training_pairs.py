"""The trainings of two runs, and what is recommended in each."""

from dataclasses import dataclass

from tula_cli.run.directory import RunDir
from tula_cli.run.records.recommendations import Recommendation
from tula_cli.run.training_run import TrainingRun


@dataclass(frozen=True)
class TrainingOverview:
    """What came of a training; None is what it does not tell (yet)."""

    signature: str
    ended: bool
    nodes: int | None
    batch: int | None  # global, at the end
    attempts: int
    hours: float | None
    cost: float | None
    currency: str
    step_time: float | None  # seconds
    best: float | None
    best_of: str  # the metric; empty where there is none
    best_epoch: int | None
    causes: tuple[str, ...]  # of relaunches, and why it ended before its last epoch
    hosts: tuple[str, ...]  # of its attempts, as the scheduler writes them
    tula: tuple[str, ...]  # versions that ran them


@dataclass(frozen=True)
class TrainingPair:
    """Two trainings that are held against each other: of one signature, else the newest of each run."""

    part: str  # type of node; empty where the job names none
    before: TrainingOverview | None
    after: TrainingOverview | None
    same_signature: bool


def pair_trainings(before: RunDir, after: RunDir, *, part: str = "") -> tuple[TrainingPair, ...]:
    """Return the trainings of two runs in pairs; none where neither has any.

    Args:
        before: a run, or its part of one type of node.
        after: the other.
        part: the type of node.
    """
    signatures_before, signatures_after = before.train_signatures(), after.train_signatures()
    common = [name for name in signatures_before if name in signatures_after]
    if common:
        return tuple(
            TrainingPair(part, _training_overview(before, name), _training_overview(after, name), True)
            for name in common
        )
    if not signatures_before and not signatures_after:
        return ()
    newest = [
        _training_overview(run, names[0]) if names else None
        for run, names in ((before, signatures_before), (after, signatures_after))
    ]
    return (TrainingPair(part, newest[0], newest[1], False),)


def _training_overview(run: RunDir, signature: str) -> TrainingOverview:
    training = run.training(signature)
    summary, task, attempts = training.summary(), training.newest_task(), training.attempts()
    best, metric, epoch = _best_metric(training)
    causes = (*summary.causes, *filter(None, [summary.ended])) if summary else ()
    return TrainingOverview(
        signature,
        ended=summary is not None,
        nodes=summary.nodes if summary else task.own_nodes if task else None,
        batch=summary.batch if summary else task.batch if task else None,
        attempts=len(attempts),
        hours=summary.actual_hours if summary else None,
        cost=summary.actual_cost if summary else None,
        currency=summary.currency if summary else "",
        step_time=summary.actual_step if summary else None,
        best=best,
        best_of=metric,
        best_epoch=epoch,
        causes=causes,
        hosts=tuple(
            dict.fromkeys(attempt.hosts or attempt.host for attempt in attempts if attempt.hosts or attempt.host)
        ),
        tula=tuple(dict.fromkeys(attempt.tula for attempt in attempts if attempt.tula)),
    )


def _best_metric(training: TrainingRun) -> tuple[float | None, str, int | None]:
    summary = training.summary()
    if summary is None:
        return None, "", None
    if summary.best is not None:
        return summary.best.value, summary.best.metric, summary.best_epoch
    if summary.best_top1 is not None:
        return summary.best_top1, "top-1 (%)", summary.best_epoch
    return summary.best_loss, "loss" if summary.best_loss is not None else "", summary.best_epoch


@dataclass(frozen=True)
class RecommendedConfiguration:
    """What a run recommends."""

    objective: str
    nodes: int
    batch: int
    local_batch: int
    type: str
    market: str
    hours: float
    cost: float
    currency: str

    @classmethod
    def from_recommendation(cls, recommendation: Recommendation | None) -> "RecommendedConfiguration | None":
        """Return the choice of an answer; None where there is none."""
        if recommendation is None:
            return None
        row = recommendation.choice
        return cls(
            recommendation.objective, row.nodes, row.batch, row.local_batch, row.type, row.market, row.hours, row.cost, recommendation.currency
        )  # fmt: skip
