"""Functions shared by the golden tests of the core and of the optional packages."""

from collections.abc import Iterable

import golden
import pytest
from cases import Case
from run_cases import Commands


def make_parameters(cases: Iterable[Case], *, slow: pytest.MarkDecorator) -> list[object]:
    """Return the cases as parameters of a test; slow cases get the mark `slow`."""
    return [pytest.param(case, id=case.name, marks=[slow] if case.slow else []) for case in cases]


def check_case(case: Case, commands: Commands) -> None:
    """Run a case and compare its outcome with the expected outcome."""
    expected = golden.load_outcome(case.name)
    assert expected is not None, "nothing is expected yet: make golden"
    lines = golden.list_differences(
        expected, commands.case(case), golden.parse_command(case.name), golden.read_renames()
    )
    assert not lines, "\n".join(["differs from tests/golden/expected (make golden renews it):", *lines])
