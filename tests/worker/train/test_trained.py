"""The weights of a training, evaluated on a test set or on what the training was evaluated on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from read_diagnostics import values
from worker_jobs import Blobs, make_spec, make_train_task

from tula_cli.errors import JobFailed, SpecError
from tula_cli.run.directory import RunDir
from tula_cli.run.records.results import EvaluationRecord
from tula_cli.run.records.tasks import EvaluateTask
from tula_cli.spec.job import JobSpec
from tula_cli.worker.build.data import build_datasets, build_test_dataset
from tula_cli.worker.entry import run_training
from tula_cli.worker.measure.inspect import inspect_job
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train.evaluation import evaluate_checkpoint

HERE = __name__
NORM = {"args": {"norm": True, "dropout": 0.2}}


class OtherBlobs(Blobs):
    """A set of its own: what is trained with other noise, and never seen by a training."""

    def __init__(self, train: bool, transform: Any, size: int = 37) -> None:
        super().__init__(True, transform, size=size)
        assert not train
        self.train = False


class FourClasses(Blobs):
    classes = ("a", "b", "c", "d")  # type: ignore[assignment]


def trained(run: RunDir, ranks: Ranks, job: JobSpec) -> Path:
    """Train; return the last checkpoint."""
    task = make_train_task(job)
    run_training(task, run, ranks, build_datasets(job))
    return (run.get_training(task.signature).path / "last").resolve()


def evaluated(run: RunDir, ranks: Ranks, job: JobSpec, path: Path, **changes: Any) -> EvaluationRecord:
    name = make_train_task(job).signature
    settings = {"key": "k", "weights": "last", "path": str(path), "samples": 192, "local_batch": 16, **changes}
    task = EvaluateTask(id="e", job="e", spec=job, workdir=".", nodes=1, signature=name, **settings)
    evaluate_checkpoint(task, run, ranks, build_datasets(job))
    result = run.get_training(name).read_evaluation(task.key)
    assert result is not None
    return result


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"method": "ags", "accumulate": 2},
        {"method": "schedule_free"},
        {"method": "lrs", "precision": "bf16", "metrics": {"error": "worker_jobs:error"}},
    ],
)
def test_the_last_weights_come_to_what_the_training_has_told_of_its_last_epoch(
    train: dict[str, Any], alone: Ranks, run: RunDir
) -> None:
    job = make_spec(model=NORM, dataset={"args": {"eval_size": 37}}, train=train)
    path = trained(run, alone, job)
    outcome = evaluated(run, alone, job, path)
    result = run.get_training(outcome.signature).read_result()
    assert result is not None
    metrics = dict(result.metrics)
    metrics["loss"] = metrics.pop("eval_loss")
    assert outcome.metrics == pytest.approx(metrics)
    assert (outcome.size, outcome.test, outcome.samples, outcome.dataset) == (37, False, 192, "worker_jobs:Blobs")


def test_a_test_set_of_its_own_is_evaluated_whole(alone: Ranks, run: RunDir) -> None:
    job = make_spec(dataset={"test": {"name": f"{HERE}:OtherBlobs"}})
    path = trained(run, alone, make_spec())
    result = evaluated(run, alone, job, path)
    assert (result.size, result.test, result.dataset) == (37, True, f"{HERE}:OtherBlobs")
    assert result.metrics["top1"] > 90
    assert values(inspect_job(job).notes, "size-of-test-set") == {"samples": 37}


def test_a_second_start_evaluates_nothing(alone: Ranks, run: RunDir) -> None:
    path = trained(run, alone, make_spec())
    result = evaluated(run, alone, make_spec(), path)
    path.unlink()
    assert evaluated(run, alone, make_spec(), path) == result


def test_a_checkpoint_that_is_gone_and_weights_of_another_model_are_reported(
    alone: Ranks, run: RunDir, tmp_path: Path
) -> None:
    with pytest.raises(JobFailed, match=r"5\.pt no longer exists: the training has saved newer checkpoints"):
        evaluated(run, alone, make_spec(), tmp_path / "5.pt")
    torch.save({"0.weight": torch.ones(3)}, tmp_path / "a.pt")
    with pytest.raises(SpecError, match=r"^--weights: .*a.pt does not fit model worker_jobs:net: missing: ") as caught:
        evaluated(run, alone, make_spec(), tmp_path / "a.pt", samples=None)
    assert "strict" not in str(caught.value)


# --- the test set


def picture_folders(folder: Path, **classes: int) -> None:
    import PIL.Image

    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            PIL.Image.new("RGB", (4, 4), (number, 0, 0)).save(folder / name / f"{number}.png")


def test_the_test_set_of_an_image_folder_is_another_folder_with_all_of_its_images(tmp_path: Path) -> None:
    picture_folders(tmp_path / "data" / "train", cat=3, dog=2)
    picture_folders(tmp_path / "data" / "val", cat=1, dog=1)
    picture_folders(tmp_path / "test", cat=2, dog=3)
    section = {"name": "ImageFolder", "root": str(tmp_path / "data"), "test": {"root": str(tmp_path / "test")}}
    job = make_spec(dataset=section)
    test_dataset = build_test_dataset(job, build_datasets(job))
    assert [test_dataset[index][1] for index in range(len(test_dataset))] == [0, 0, 1, 1, 1]  # type: ignore[index]
    (tmp_path / "test" / "cat").rename(tmp_path / "test" / "hen")
    with pytest.raises(SpecError, match=r"dataset.test and the training set have different classes: cat, hen"):
        build_test_dataset(job, build_datasets(job))


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ({"name": f"{HERE}:FourClasses"}, "dataset.test and the training set have different classes: d"),
        ({"args": {"eval_size": 0}}, "has no samples"),
        ({"args": {"split": "test"}}, "dataset.test.args.split: .*has no such argument"),
        ({"args": {"eval_size": 3}, "length": 3}, "is only for iterable datasets"),
    ],
)
def test_a_test_set_that_cannot_be_meant_is_refused(test: dict[str, Any], why: str) -> None:
    job = make_spec(dataset={"test": test})
    with pytest.raises(SpecError, match=why):
        build_test_dataset(job, build_datasets(job))
