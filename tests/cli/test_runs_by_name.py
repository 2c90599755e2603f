"""Runs named on the command line."""

import io
from pathlib import Path

import make_runs as make
import pytest

from tula_cli.cli.runs import find_named_runs, find_runs
from tula_cli.errors import SpecError
from tula_cli.run.directory import RunDir
from tula_cli.run.records.results import JobFile
from tula_cli.show.screen import Screen


def test_the_name_of_a_job_with_variants_suggests_its_runs(tmp_path: Path) -> None:
    runs = make.create_runs(
        tmp_path, make.spec(node_types={"fast": {"pricing": {"price": 2.0}}, "slow": {"pricing": {"price": 1.0}}})
    )
    with pytest.raises(SpecError, match="there is no run toy ") as caught:
        find_named_runs(Path("toy"), tmp_path)
    assert caught.value.hint == f"name one of the runs of job toy: {', '.join(run.id for run in runs)}"


def test_a_run_that_is_named_twice_is_one_run_and_its_job_file_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run,) = make.create_runs(tmp_path, make.spec())
    run.save_job(run.spec, JobFile(path=str(tmp_path / "job.yaml"), overrides=("train.epochs=5",)))
    reads: list[Path] = []
    read = RunDir.read_job_file
    monkeypatch.setattr(RunDir, "read_job_file", lambda run: (reads.append(run.path), read(run))[1])
    err = io.StringIO()
    screen = Screen("recommend", err=err)
    assert [found.path for found in find_runs(screen, [Path(run.id), run.path], tmp_path)] == [run.path]
    assert (screen.run_id, screen.overrides) == (run.id, ("train.epochs=5",))
    assert err.getvalue().count(run.id) == 1 and "--set train.epochs=5" in err.getvalue()
    assert reads == [run.path]


def test_a_name_is_that_of_a_run_before_that_of_a_folder_that_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (run,) = make.create_runs(tmp_path / "runs", make.spec())
    for folder in ("toy", run.id):
        (tmp_path / folder).mkdir()
        assert find_named_runs(Path(folder), tmp_path / "runs")[0].path == run.path
    (tmp_path / "other").mkdir()
    with pytest.raises(SpecError, match="other is not a run"):
        find_named_runs(Path("other"), tmp_path / "runs")
