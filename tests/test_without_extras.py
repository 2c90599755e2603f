"""The core needs none of the optional packages: `make proof` runs some of its tests in a tree without them."""

from pathlib import Path

import pytest
from without_extras import run_tests

SOME = ("tests/cli/test_help.py", "tests/services/test_status.py", "tests/golden/test_golden_commands.py")
CASES = "help or status or recommend-time or recommend-types or compare-show or profile-measured or train-chain or check-job"


@pytest.mark.proof
@pytest.mark.torch
def test_commands_of_the_core_answer_without_the_optional_packages() -> None:
    assert run_tests([*SOME, "-k", CASES]) == 0


def test_the_tree_of_these_tests_has_no_optional_package(tmp_path: Path) -> None:
    """A test that imports one fails there."""
    (tmp_path / "test_imports.py").write_text("import tula_cli.extras.report\n")
    assert run_tests([str(tmp_path / "test_imports.py")]) != 0
