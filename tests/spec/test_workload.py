"""Workloads: whether a script or tula's loop trains, and which settings it has."""

from typing import Any

import pytest

from tula_cli.spec.load import validate_job
from tula_cli.spec.workload import Workload

LOOP = {
    "model": {"name": "resnet18"},
    "dataset": {"name": "digits"},
    "optimizer": {"name": "SGD", "lr": 0.1},
    "train": {"epochs": 20, "reference_batch": 8, "method": "lrs"},
}


def script(command: str, **section: Any) -> dict[str, Any]:
    reference = {"batch": 8, **({"lr": 0.1} if "{lr}" in command else {})}
    return {"script": {"command": command, "length": {"epochs": 20}, "reference": reference, **section}}


def workload(job: dict[str, Any]) -> Workload:
    return validate_job(job, source="test").workload


def test_tulas_own_loop_takes_every_setting() -> None:
    loop = workload(LOOP)
    assert loop.description == "resnet18 on digits" and loop.takes_workers and {"lr", "seed"} <= loop.settings
    assert (loop.epochs_key, loop.count_epochs(1000), loop.short_epochs) == ("train.epochs", 20, 20)
    assert loop.warmup_epochs == 1.0 and not loop.reported_metrics and not loop.describe_accumulation_conflict()


@pytest.mark.parametrize(
    ("command", "settings", "short"),
    [
        ("run.py -b {batch}", {"batch"}, None),
        ("run.py -b {batch} --lr {lr} -e {epochs}", {"batch", "lr", "epochs"}, 20),
    ],
)
def test_a_script_takes_what_its_command_names(command: str, settings: set[str], short: int | None) -> None:
    value = workload(script(command, metric={"acc": "acc=(.*)"}))
    assert (value.description, value.settings, value.short_epochs, value.reported_metrics) == (
        "run.py",
        settings,
        short,
        ("acc",),
    )
    assert (
        value.warmup_epochs == 0.0
        and value.optimizer_name is None
        and not value.takes_workers
        and "{micro_batch}" in value.describe_accumulation_conflict()
    )


def test_a_script_takes_workers_if_its_command_names_them() -> None:
    assert workload(script("python run.py -b {local_batch} -j {workers}")).takes_workers


@pytest.mark.parametrize(
    ("length", "epochs", "samples", "words"),
    [
        ({"samples": 2600}, 3, 2600, "2600 samples"),
        ({"steps": 10}, 1, 80, "10 steps at batch 8"),
        ({"epochs": 7}, 7, 7000, "7 epochs"),
    ],
)
def test_the_length_of_a_script(length: dict[str, int], epochs: int, samples: int, words: str) -> None:
    value = workload(script("run.py -b {batch}", length=length))
    assert value.count_epochs(1000) == epochs and value.epochs_key == "script.length.epochs"
    assert value.count_samples(1000) == samples and value.describe_length() == words
    assert (value.max_epochs, value.requested_samples) == ((7, None) if "epochs" in length else (None, samples))
