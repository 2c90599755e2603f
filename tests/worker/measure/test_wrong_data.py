"""Jobs whose data is wrong in the ways that users' data is: the inspection refuses each before a probe is submitted."""

from typing import Any

import pytest
from read_diagnostics import codes, values

from tula_cli.errors import JobFailed, SpecError
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate_job
from tula_cli.worker.measure.inspect import inspect_job

CPU, SLURM = {"device": "cpu"}, {"kind": "slurm", "gpus_per_node": 4}


def job(
    data: str, *, model: str = "Linear", loss: str = "cross_entropy", cluster: dict[str, Any] = CPU, **sections: Any
) -> JobSpec:
    content = {
        "name": "wrong",
        "model": {"name": f"wrong_data:{model}"},
        "dataset": {"name": "wrong_data:Data", "args": {"kind": data}},
        "loss": {"name": loss},
        "optimizer": {"lr": 0.1},
        "train": {"epochs": 1, "method": "lbt"},
        "search": {"nodes": [1, 2], "max_node_hours": 1},
        "cluster": cluster,
    }
    return validate_job({**content, **sections}, source="test")


FLOAT, LAST, NAN = "return float32", "make __len__ return", "check the samples, the model and the loss"
# kind of data -> (changes of the job, words of the message, words of the hint)
JOBS: dict[str, tuple[dict[str, Any], str, str]] = {
    "float64": ({}, "inputs of shape (4,), float64", FLOAT),
    "float64 images": ({"model": "Conv"}, "inputs of shape (3, 8, 8), float64", FLOAT),
    "half": ({}, "inputs of shape (4,), float16", FLOAT),
    "uint8 images": ({"model": "Conv"}, "uint8 (2, 3, 8, 8)", FLOAT),
    "int64 numbers": ({}, "int64 (2, 4)", FLOAT),
    "label of -1": ({}, "Target -1 is out of bounds", "from 0"),
    "label of 3 classes": ({}, "Target 3 is out of bounds", "more outputs"),
    "labels from 1": ({}, "has 3 outputs, but dataset wrong_data:Data has 4 classes", "num_classes: 4"),
    "late label": ({}, "has 3 outputs, but dataset wrong_data:Data has 8 classes", "num_classes: 8"),
    "ragged": ({}, "(float32 (3), int) and (float32 (4), int)", "collate_fn"),
    "empty": ({}, "has no training samples", ""),
    "no evaluation": ({}, "has no evaluation samples", ""),
    "text targets": ({}, "with the target (str, str)", "a number or a tensor"),
    "None targets": ({}, "(float32 (4), NoneType)", "collate_fn"),
    "dictionary targets": ({}, "with the target {label: int64 (2), weight: int64 (2)}", "a number or a tensor"),
    "wide": ({}, "inputs of shape (9,)", "model.args"),
    "gray images": ({"model": "Conv"}, "inputs of shape (1, 8, 8)", "(channels, height, width)"),
    "channels last": ({"model": "Conv"}, "inputs of shape (8, 8, 3)", "(channels, height, width)"),
    "float labels": ({}, "with the target float32 (2)", "class numbers as int64"),
    "int32 labels": ({}, "with the target int32 (2, 1)", "without an extra dimension"),
    "labels (1,)": ({}, "with the target int64 (2, 1)", "without an extra dimension"),
    "int targets": ({"loss": "BCEWithLogitsLoss", "model": "One"}, "int64", FLOAT[:6]),
    "nan": ({}, "the loss of the first two samples is nan", NAN),
    "infinite": ({}, "the loss of the first two samples is nan", NAN),
    "overflow": ({}, "the loss of the first two samples is nan", NAN),
    "raises at 0": ({}, "KeyError: 'no such row'", "wrong_data.py, line"),
    "raises at the end": ({}, "sample 19 fails: KeyError: 'no such row'", LAST),
    "length lies": ({}, "has 20 training samples by its __len__, but sample 19 fails", LAST),
    "length of a float": ({}, "'float' object", LAST),
    "negative length": ({}, "should return >= 0", LAST),
    "arrays of objects": ({}, "(ndarray, int)", "collate_fn"),
    "tuple of three": ({}, "float32 (2, 4), float32 (2, 4), int64 (2)", "of a tuple, it passes"),
}


@pytest.mark.parametrize("cluster", [CPU, SLURM], ids=["cpu", "gpu"])
@pytest.mark.parametrize("kind", JOBS)
def test_wrong_data_is_refused_with_its_value_and_what_to_do(kind: str, cluster: dict[str, Any]) -> None:
    changes, message, hint = JOBS[kind]
    with pytest.raises((SpecError, JobFailed)) as error:
        inspect_job(job(kind, cluster=cluster, **changes))
    assert message in error.value.message and hint in error.value.hint


@pytest.mark.parametrize("cluster", [CPU, SLURM], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("sound", {}),
        ("images", {"model": "Conv"}),
        ("numbers for mse", {"loss": "MSELoss", "model": "One"}),
        ("int targets", {"loss": "MSELoss", "model": "One"}),  # torch takes them
    ],
)
def test_sound_data_is_no_alarm(kind: str, changes: dict[str, Any], cluster: dict[str, Any]) -> None:
    answer = inspect_job(job(kind, cluster=cluster, **changes))
    assert "no-real-step" not in codes((*answer.notes, *answer.warnings))


def test_a_step_that_was_not_run_is_reported() -> None:
    notes = inspect_job(job("sound", model="Large")).notes
    assert values(notes, "no-real-step") == {"reason": "the model has 40000015 parameters"}


def test_code_that_needs_a_gpu_is_no_alarm() -> None:
    notes = inspect_job(job("sound", model="NeedsGpu", cluster=SLURM)).notes
    assert values(notes, "no-real-step")["reason"].startswith("it fails on the CPU (")
