"""Numbers that no job can have are refused by name, on the command line and in Python."""

from typing import Any

import pytest

import tula_cli as tula
from tula_cli.errors import SpecError
from tula_cli.spec.merge import apply_overrides


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"batch": 0}, "batch 0: must be at least 1"), ({"batch": 10**400}, "batch: must be at most 2147483647"),
        ({"seeds": 5000}, "seeds: must be at most 1000"), ({"batch": -(10**400)}, "batch -2147483647: must be at least 1"),
    ],
)  # fmt: skip
def test_a_number_out_of_bounds_is_refused_before_a_job_is_read(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        tula.train("no such job.yaml", **arguments)


def test_each_number_of_a_list_is_checked() -> None:
    with pytest.raises(SpecError, match="batches: must be at most"):
        tula.compare("no such job.yaml", batches=(64, 10**400))


def test_an_override_that_is_no_text_and_a_path_that_cannot_exist_are_refused() -> None:
    with pytest.raises(SpecError, match="overrides: 3 is not text"):
        apply_overrides({}, [3], {})  # type: ignore[list-item]
    with pytest.raises(SpecError, match="cannot read"):
        tula.check("a\0b")
