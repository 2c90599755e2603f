"""Metrics of the user's own, which epoch is the best by them, and what ends a training before its last epoch."""

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from worker_jobs import make_spec, make_train_task, make_trainer, read_rows

from tula_cli.errors import JobFailed, SpecError, TulaError
from tula_cli.models.choice import early_stopping
from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import TrainTask
from tula_cli.spec.sections import Train
from tula_cli.spec.signature import compute_measurement_signature, compute_train_signature
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.entry import run_training
from tula_cli.worker.measure.inspect import inspect_job
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train.evaluation import Evaluator, build_metrics

OWN = {"error": "worker_jobs:error", "gathers": "worker_jobs:Errors"}
HERE = __name__


def train(run: RunDir, ranks: Ranks, **section: Any) -> TrainTask:
    of = make_spec(train=section)
    task = make_train_task(of)
    run_training(task, run, ranks, build_datasets(of))
    return task


def section(**keys: Any) -> Train:
    return make_spec(train=keys).train


# --- metrics


def whole(outputs: torch.Tensor, batch: Any) -> float:
    return float(len(batch[0]))


class WithBatch:
    def __init__(self, factor: float = 1) -> None:
        self.factor = factor

    def reset(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def update(self, outputs: torch.Tensor, batch: Any) -> None:
        assert len(outputs) == len(batch[0]) == len(batch[1])
        self.shapes.append(tuple(batch[0].shape))

    def compute(self) -> torch.Tensor:
        return torch.tensor(self.factor * sum(shape[0] for shape in self.shapes))


def fails(outputs: torch.Tensor, batch: Any) -> float:
    raise KeyError("labels")


def several(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return outputs.mean(0)


def test_a_mean_counts_each_sample_once_also_those_of_a_smaller_last_batch(alone: Ranks) -> None:
    of = make_spec(dataset={"args": {"eval_size": 37}}, train={"metrics": {**OWN, "size": f"{HERE}:whole"}})
    result = Evaluator(make_trainer(of, alone)).evaluate()
    assert result.user_metrics["error"] == result.user_metrics["gathers"] == pytest.approx(100 - result.top1)
    assert result.user_metrics["size"] == pytest.approx((2 * 16 * 16 + 5 * 5) / 37)


def test_an_object_is_built_with_arguments_and_may_take_the_whole_batch(alone: Ranks) -> None:
    of = make_spec(train={"metrics": {"twice": {f"{HERE}:WithBatch": {"factor": 2}}}})
    evaluator = Evaluator(make_trainer(of, alone))
    assert [evaluator.evaluate().user_metrics["twice"] for _ in range(2)] == [20, 20]  # it is reset


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fails", "train.metrics.own fails: KeyError: 'labels'"),
        ("several", "train.metrics.own returned a Tensor, not one number"),
    ],
)
def test_a_metric_that_fails_is_named(name: str, why: str, alone: Ranks) -> None:
    with pytest.raises(JobFailed, match=why):
        Evaluator(make_trainer(make_spec(train={"metrics": {"own": f"{HERE}:{name}"}}), alone)).evaluate()


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (f"{HERE}:nothing", "has no 'nothing'"),
        ({f"{HERE}:whole": {"a": 1}}, "is not a class, so it cannot have arguments"),
        ({f"{HERE}:WithBatch": {"fact": 1}}, "train.metrics.own.fact: .* has no such argument"),
        (f"{HERE}:HERE", "is a str"),
    ],
)
def test_what_cannot_be_a_metric_is_refused(entry: Any, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        build_metrics(section(metrics={"own": entry}))


def test_check_builds_the_metrics() -> None:
    with pytest.raises(TulaError, match="has no 'nothing'"):
        inspect_job(make_spec(train={"metrics": {"own": f"{HERE}:nothing"}}))


def test_check_tells_which_metrics_send_their_batches() -> None:
    metrics = {**OWN, "merges": "worker_jobs:MergedErrors", "own": f"{HERE}:WithBatch"}
    several = inspect_job(make_spec(train={"metrics": metrics}, search={"nodes": [2], "min_batch": 16}))
    assert [(note.values["metric"], note.values["with_inputs"]) for note in several.notes] == [
        ("gathers", False),
        ("own", True),
    ]
    assert inspect_job(make_spec(train={"metrics": metrics})).notes == ()


def test_metrics_are_reported_in_rows_and_result_and_by_the_best_epoch(alone: Ranks, run: RunDir) -> None:
    task = train(run, alone, epochs=4, metrics=OWN, best_checkpoint={"metric": "error", "mode": "min"})
    result = run.get_training(task.signature).read_result()
    epochs = list(read_rows(run, task, "epoch"))
    errors = [row["metrics"]["error"] for row in epochs]
    assert errors == [pytest.approx(100 - row["top1"]) for row in epochs]
    assert result is not None and result.best is not None
    assert (result.best.metric, result.best.value) == ("error", min(errors))
    assert result.best_epoch == 1 + errors.index(min(errors))
    assert result.metrics["error"] == errors[-1] and result.ended == ""


def never(outputs: Any, batch: Any) -> float:
    return math.nan


def test_a_best_that_is_no_number_is_said_once_and_at_the_end(alone: Ranks, run: RunDir) -> None:
    task = train(
        run, alone, epochs=2, metrics={"never": f"{HERE}:never"}, best_checkpoint={"metric": "never", "mode": "min"}
    )
    result = run.get_training(task.signature).read_result()
    assert result is not None and result.best is not None
    assert (result.best.metric, result.best.value, result.best_epoch) == ("never", None, 1)
    (text,) = [row["message"] for row in read_rows(run, task, "warning")]
    assert "never is not a finite number at epoch 1" in text


# --- the best


def values(**known: float) -> dict[str, float]:
    return {"top1": math.nan, "top5": math.nan, "loss": 1.0, **known}


@pytest.mark.parametrize(
    ("best", "new", "old", "is_better"),
    [
        ({}, {"top1": 51.0}, {"top1": 50.0}, True),
        ({}, {"loss": 0.9}, {}, True),
        ({"metric": "loss"}, {"loss": 0.9, "top1": 1.0}, {"top1": 50.0}, True),
        ({"metric": "top1", "mode": "min"}, {"top1": 51.0}, {"top1": 50.0}, False),
        ({"metric": "f1"}, {"f1": 0.2}, {"f1": 0.1}, True),
        ({"metric": "f1", "mode": "min"}, {"f1": 0.2}, {"f1": 0.1}, False),
        ({"metric": "f1"}, {"f1": math.nan}, {"f1": 0.1}, False),
        ({"metric": "f1"}, {"f1": 0.1}, {"f1": math.nan}, True),
    ],
)
def test_better_in_either_direction(best: dict[str, str], new: Any, old: Any, is_better: bool) -> None:
    best_checkpoint = section(metrics={"f1": "a:b"}, best_checkpoint=best).best_checkpoint
    kept = early_stopping.select_best_values(values(**old), best_checkpoint, epoch=1)
    assert early_stopping.is_better_evaluation(values(**new), kept, best_checkpoint) is is_better
    assert early_stopping.is_better_evaluation(values(**new), {}, best_checkpoint)


def test_a_best_that_was_kept_by_another_metric_gives_way() -> None:
    assert early_stopping.is_better_evaluation(
        values(f1=0.1),
        {"top1": 99.0, "loss": 0.1, "epoch": 3.0},
        section(metrics={"f1": "a:b"}, best_checkpoint={"metric": "f1"}).best_checkpoint,
    )


# --- the end


@pytest.mark.parametrize(
    ("metric", "stopping", "found", "why"),
    [
        ("top1", {"target": 0.76}, {"top1": 76.2}, "top1 is 76.20, at least 76.00"),
        ("top1", {"target": 76}, {"top1": 75.9}, ""),
        ("top1", {"target": 76}, {"top1": math.nan}, ""),
        ("loss", {"target": 0.5}, {"loss": 0.4}, "loss is 0.4000, at most 0.5000"),
        ("loss", {"target": 0.5}, {"loss": 0.6}, ""),
        ("auto", {"patience": 3}, {}, "no better epoch than 2 in 3 epochs"),
        ("auto", {"patience": 4}, {}, ""),
    ],
)
def test_what_ends_a_training(metric: str, stopping: dict[str, Any], found: dict[str, float], why: str) -> None:
    kept = {"top1": 50.0, "loss": 1.0, "epoch": 2.0}
    assert (
        early_stopping.describe_stop_reason(
            values(**found), kept, section(best_checkpoint={"metric": metric}, early_stopping=stopping), epoch=5
        )
        == why
    )


LOSS_BELOW_100 = {"best_checkpoint": {"metric": "loss"}, "early_stopping": {"target": 100}}


def test_a_training_ends_at_its_target_with_a_result_and_stays_ended(alone: Ranks, run: RunDir) -> None:
    task = train(run, alone, epochs=50, **LOSS_BELOW_100)
    result = run.get_training(task.signature).read_result()
    assert result is not None
    assert (result.epochs, result.samples) == (1, 96) and result.ended.startswith("loss is")
    assert run.get_training(task.signature).find_weights() is not None
    train(run, alone, epochs=50, **LOSS_BELOW_100)
    assert len(list(read_rows(run, task, "start"))) == 1


def test_a_training_killed_between_its_early_end_and_its_result_trains_no_more(alone: Ranks, run: RunDir) -> None:
    task = train(run, alone, epochs=50, **LOSS_BELOW_100)
    result = run.get_training(task.signature).read_result()
    assert result is not None
    (run.get_training(task.signature).path / "result.json").unlink()
    train(run, alone, epochs=50, **LOSS_BELOW_100)
    again = run.get_training(task.signature).read_result()
    assert again is not None
    assert (again.samples, again.ended, again.metrics) == (result.samples, result.ended, result.metrics)


def test_a_training_ends_when_no_epoch_is_better(alone: Ranks, run: RunDir) -> None:
    task = train(
        run,
        alone,
        epochs=50,
        metrics={"size": f"{HERE}:whole"},
        best_checkpoint={"metric": "size"},
        early_stopping={"patience": 2},
    )
    result = run.get_training(task.signature).read_result()
    assert result is not None
    assert (result.epochs, result.best_epoch) == (3, 1) and result.ended == "no better epoch than 1 in 2 epochs"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"metrics": {"top1": "a:b"}}, "metrics.top1: tula uses this name"),
        ({"metrics": {"f1": "f1"}}, "must be an import string package.module:attribute"),
        ({"best_checkpoint": {"metric": "los"}}, "there is no metric 'los'; did you mean loss"),
        ({"early_stopping": {}}, "must set target, patience or epochs"),
        ({"early_stopping": {"target": 0.5}}, "but train.best_checkpoint.metric is auto"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(keys: dict[str, Any], why: str) -> None:
    with pytest.raises((ValidationError, SpecError)) as caught:
        section(**keys)
    message = str(caught.value) + "".join(problem.message for problem in getattr(caught.value, "problems", ()))
    assert why in message


def test_metrics_name_no_training_and_its_end_does() -> None:
    plain, value = make_spec(), make_spec(train={"metrics": OWN, "best_checkpoint": {"metric": "error"}})
    ends = make_spec(train={"early_stopping": {"patience": 2}})
    assert compute_train_signature(plain, nodes=1, batch=8) == compute_train_signature(value, nodes=1, batch=8)
    assert compute_train_signature(plain, nodes=1, batch=8) != compute_train_signature(ends, nodes=1, batch=8)
    assert (
        compute_measurement_signature(plain)
        == compute_measurement_signature(value)
        == compute_measurement_signature(ends)
    )
