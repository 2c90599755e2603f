"""Settings beside train.parallel: fsdp are rejected or completed when the job is read."""

from typing import Any

import pytest

from tula_cli.errors import SpecError
from tula_cli.spec.load import validate_job

BASE: dict[str, Any] = {
    "model": {"name": "resnet18"},
    "dataset": {"name": "fake"},
    "optimizer": {"lr": 0.1},
    "train": {"epochs": 2, "method": "ags"},
}


def job(train: dict[str, Any] | None = None, **sections: Any) -> Any:
    content = {**BASE, **sections, "train": {**BASE["train"], "parallel": "fsdp", **(train or {})}}
    return validate_job(content, source="test")


def test_factors_are_of_tensors_unless_it_is_said_otherwise() -> None:
    assert job().ags.granularity == "tensor"
    assert job({"parallel": "ddp"}).ags.granularity is None
    assert job({"method": "lbt"}).ags.granularity is None
    again = validate_job(job().model_dump(mode="json", exclude_unset=True), source="test")
    assert again == job(), "a job that was written is read as itself"


@pytest.mark.parametrize(
    ("train", "sections", "why"),
    [
        (
            {"method": "lars"},
            {},
            "method lars needs complete gradients or weights on each GPU; set train.method to one of ags, lbt, lrs, ortho, ramp",
        ),
        ({"method": "auto", "epochs": 5}, {}, "method auto needs complete"),
        ({"precision": "fp16"}, {}, "set train.precision: bf16"),
        ({"compile": True}, {}, "train.compile"),
        ({"diagnostics": ["hessian"]}, {}, "train.diagnostics: .hessian."),
        ({}, {"ags": {"granularity": "element"}}, "set ags.granularity: tensor"),
        ({}, {"ags": {"preset": "robust"}}, "set ags.source: small_batch"),
    ],
)
def test_what_needs_the_whole_is_refused(train: dict[str, Any], sections: dict[str, Any], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        job(train, **sections)
