"""The answers, messages and exit codes of the optional packages' commands on the recorded runs are those that are expected."""

from collections.abc import Iterator

import pytest
from case_checks import check_case, make_parameters
from cases import CASES, Case
from run_cases import Commands


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    commands = Commands(tmp_path_factory.mktemp("golden"))
    yield commands
    commands.close()


@pytest.mark.torch
@pytest.mark.parametrize("case", make_parameters((case for case in CASES if case.package), slow=pytest.mark.proof))
def test_a_command_answers_as_expected(case: Case, commands: Commands) -> None:
    check_case(case, commands)
