"""One training as a report sees it: its rows, its attempts, its end."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tula_cli.run.records.jobs import Attempt
from tula_cli.run.records.results import Summary
from tula_cli.run.records.tasks import TrainTask
from tula_cli.run.training_run import TrainingRun
from tula_cli.services.reporting.material import Material, PartMaterial

Row = Mapping[str, Any]


@dataclass(frozen=True)
class TrainingMaterial:
    """A training; `number` of `count` that the part has beside those of a comparison, this one the newest."""

    part: PartMaterial
    files: TrainingRun
    task: TrainTask
    count: int

    @cached_property
    def rows(self) -> Sequence[Row]:
        """The rows of its metrics; of the steps of a long training every so many-th."""
        return [row for row in self.files.sampled_metrics() if is_placed(row)]

    def rows_of_kind(self, *kinds: str) -> list[Row]:
        return [row for row in self.rows if row["kind"] in kinds]

    @cached_property
    def summary(self) -> Summary | None:
        return self.files.summary()

    @cached_property
    def attempts(self) -> list[Attempt]:
        return self.files.attempts()

    @property
    def began_at(self) -> float | None:
        """Unix time of its first row or attempt; None where there is neither."""
        moments = [row["time"] for row in self.rows[:1]] + [attempt.started_at for attempt in self.attempts[:1]]
        return min(moments, default=None)

    @property
    def state(self) -> str:
        """How its job is, as `tula status` has it; done where it has ended well."""
        if self.summary is not None:
            return "done"
        return next((job.state for job in self.part.now.jobs if job.id == self.task.job), "not submitted")

    @property
    def metric(self) -> str:
        """What it is judged by: train.best_checkpoint, top1, perplexity, or the loss on the evaluation set."""
        requested_metric = self.task.spec.train.best_checkpoint.metric
        epochs = self.rows_of_kind("epoch")
        names = (
            [requested_metric, "top1", "perplexity"]
            if self.task.spec.script is None
            else [*self.task.spec.script.metric]
        )
        return next((name for name in names if any(value_of(row, name) is not None for row in epochs)), "eval_loss")


def is_placed(row: Row) -> bool:
    """Return whether a row says at which sample it is, and at a time that is one: a damaged row may not."""
    return isinstance(row.get("samples"), int | float) and isinstance(row.get("time", 0.0), int | float)


def value_of(row: Row, metric: str) -> float | None:
    """Return a metric of an epoch's row, the user's own among them; None where it is not there, or no number."""
    user_metrics = row.get("metrics")
    value = row.get(metric, user_metrics.get(metric) if isinstance(user_metrics, Mapping) else None)
    return float(value) if isinstance(value, int | float) and abs(value) < float("inf") else None


def value_at(row: Any, path: str) -> Any:
    """Return what a row holds under a path like "ags.mean"; None where there is nothing."""
    for key in path.split("."):
        if not isinstance(row, Mapping):
            return None
        row = row.get(key)
    return row


def newest_trainings(material: Material) -> list[TrainingMaterial]:
    """Return the newest training of each part; one of a comparison only where there is no other."""
    return [training for part_material in material.own_parts for training in _newest_training(part_material)]


def _newest_training(part_material: PartMaterial) -> Iterator[TrainingMaterial]:
    comparison = part_material.part.run.comparison()
    compared = {cell.signature for cell in comparison.cells} if comparison is not None else set()
    tasks = [task for task in part_material.look.tasks if isinstance(task, TrainTask)]
    own_tasks = [task for task in tasks if task.signature not in compared] or tasks
    submitted = {job.id: job.submitted_at for job in part_material.look.jobs}
    newest = max(own_tasks, key=lambda task: (submitted.get(task.job, 0.0), task.attempt), default=None)
    if newest is not None:
        count = len({task.signature for task in own_tasks})
        yield TrainingMaterial(part_material, part_material.look.training(newest.signature), newest, count)
