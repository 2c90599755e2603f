"""The report that trackers get, as files of the run."""

import os
from pathlib import Path

import pytest
from make_runs import add_measured
from make_runs import spec as toy_spec

from tula_cli.extras.trackers.export import write_report_file
from tula_cli.run.directory import Run, RunDir


@pytest.fixture
def part(tmp_path: Path) -> Run:
    return RunDir.create(tmp_path, toy_spec())


def test_a_run_without_results_has_no_report(part: Run) -> None:
    assert write_report_file(part) == () and not (part.path / "exports").exists()


def test_a_report_is_written_anew_only_where_something_is_newer(part: Run) -> None:
    for nodes in (1, 2):
        for local in (32, 64, 128):
            add_measured(part, nodes, local)
    (written,) = write_report_file(part)
    assert written.name == "report.md" and "measured" in written.read_text()
    os.utime(written, (at := written.stat().st_mtime + 60, at))
    assert write_report_file(part) == (written,) and written.stat().st_mtime == at
    os.utime(written, (1, 1))
    write_report_file(part)
    assert written.stat().st_mtime > 1
