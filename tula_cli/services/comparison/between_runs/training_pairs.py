"""The trainings of two runs, and what is recommended in each."""

from dataclasses import dataclass

from tula_cli.run.directory import RunDir
from tula_cli.run.records.recommendations import Recommendation
from tula_cli.run.training_run import TrainingRun


@dataclass(frozen=True)
class TrainingTold:
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
    before: TrainingTold | None
    after: TrainingTold | None
    same_signature: bool


def training_pairs(before: RunDir, after: RunDir, *, part: str = "") -> tuple[TrainingPair, ...]:
    """Return the trainings of two runs in pairs; none where neither has any.

    Args:
        before: a run, or its part of one type of node.
        after: the other.
        part: the type of node.
    """
    one, other = before.train_signatures(), after.train_signatures()
    common = [name for name in one if name in other]
    if common:
        return tuple(TrainingPair(part, _told(before, name), _told(after, name), True) for name in common)
    if not one and not other:
        return ()
    newest = [_told(run, names[0]) if names else None for run, names in ((before, one), (after, other))]
    return (TrainingPair(part, newest[0], newest[1], False),)


def _told(run: RunDir, signature: str) -> TrainingTold:
    training = run.training(signature)
    summary, task, attempts = training.summary(), training.newest_task(), training.attempts()
    best, metric, epoch = _best(training)
    causes = (*summary.causes, *filter(None, [summary.ended])) if summary else ()
    return TrainingTold(
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
        hosts=tuple(dict.fromkeys(one.hosts or one.host for one in attempts if one.hosts or one.host)),
        tula=tuple(dict.fromkeys(one.tula for one in attempts if one.tula)),
    )


def _best(training: TrainingRun) -> tuple[float | None, str, int | None]:
    summary = training.summary()
    if summary is None:
        return None, "", None
    if summary.best is not None:
        return summary.best.value, summary.best.metric, summary.best_epoch
    if summary.best_top1 is not None:
        return summary.best_top1, "top-1 (%)", summary.best_epoch
    return summary.best_loss, "loss" if summary.best_loss is not None else "", summary.best_epoch


@dataclass(frozen=True)
class Chosen:
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
    def of(cls, found: Recommendation | None) -> "Chosen | None":
        """Return the choice of an answer; None where there is none."""
        if found is None:
            return None
        row = found.choice
        return cls(
            found.objective, row.nodes, row.batch, row.local_batch, row.type, row.market, row.hours, row.cost, found.currency
        )  # fmt: skip
