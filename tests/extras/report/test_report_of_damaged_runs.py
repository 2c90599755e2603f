"""A report of a run with damaged files names them, and shows the rest."""

from pathlib import Path

import pytest
from make_damages import DAMAGES, check_command, make_whole_run, run_tula

from tula_cli.run.directory import RunDir

OF_REPORTS = [name for name, damage in DAMAGES.items() if "recommend" in damage.commands] + ["comparison cut"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    return make_whole_run(tmp_path, monkeypatch)


@pytest.mark.parametrize("name", OF_REPORTS)
def test_damage_is_named(run: RunDir, name: str) -> None:
    DAMAGES[name].edit(run.path)
    check_command(run, DAMAGES[name], "report", "--markdown")


def test_a_report_of_a_whole_run_names_none(run: RunDir) -> None:
    assert "damaged" not in run_tula("report", "--markdown", "--run", str(run.path))[2]
