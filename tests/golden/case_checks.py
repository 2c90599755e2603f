"""What the golden tests of the core and of the optional packages share."""

from collections.abc import Iterable

import golden
import pytest
from cases import Case
from run_cases import Commands


def make_parameters(cases: Iterable[Case], *, slow: pytest.MarkDecorator) -> list[object]:
    """Return the cases as parameters of a test; `slow` marks those that take long."""
    return [pytest.param(case, id=case.name, marks=[slow] if case.slow else []) for case in cases]


def check_case(case: Case, commands: Commands) -> None:
    """Run a case and compare its outcome with what is expected."""
    expected = golden.load(case.name)
    assert expected is not None, "nothing is expected yet: make golden"
    lines = golden.differences(expected, commands.case(case), golden.command_of(case.name), golden.renames())
    assert not lines, "\n".join(["differs from tests/golden/expected (make golden renews it):", *lines])
