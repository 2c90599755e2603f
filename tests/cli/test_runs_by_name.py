"""Runs named on the command line."""

from pathlib import Path

import make_runs as make
import pytest

from tula_cli.cli.runs import find_named_runs
from tula_cli.errors import SpecError


def test_the_name_of_a_job_with_variants_suggests_its_runs(tmp_path: Path) -> None:
    runs = make.create_runs(
        tmp_path, make.spec(node_types={"fast": {"pricing": {"price": 2.0}}, "slow": {"pricing": {"price": 1.0}}})
    )
    with pytest.raises(SpecError, match="there is no run toy ") as caught:
        find_named_runs(Path("toy"), tmp_path)
    assert caught.value.hint == f"the runs of job toy are {', '.join(run.id for run in runs)}"
