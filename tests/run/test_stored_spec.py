"""Runs of older versions, whose jobs have a search strategy that was removed since, are read as `auto`."""

import json
from pathlib import Path

import make_runs as make
import pytest

from tula_cli.errors import SpecError
from tula_cli.run.directory import RunDir
from tula_cli.run.job_runs import load_with_overrides
from tula_cli.spec.load import load_spec, validate_job
from tula_cli.spec.old_keys import drop_removed_values


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run whose job, and a task of it, have strategies that were removed."""
    job = make.spec(search={"nodes": [1], "strategy": "partial"})
    run = RunDir.create(tmp_path, job)
    make.add_probes(run, 1, (32, 64))
    for path in (run.path / "spec.yaml", *run.path.glob("tasks/*.json")):
        text = path.read_text()
        assert "partial" in text
        path.write_text(text.replace("partial", "five"))
    return run


def test_the_job_is_read_from_yaml_and_from_json(run: RunDir) -> None:
    job = run.read_spec()
    assert job.search.strategy == "auto"
    run.save_job(job)  # with spec.json beside it, in which an older version had the name too
    content = json.loads((run.path / "spec.json").read_text())
    content["spec"]["search"]["strategy"] = "few"
    (run.path / "spec.json").write_text(json.dumps(content))
    assert run.read_spec().search.strategy == "auto"


def test_tasks_are_read(run: RunDir) -> None:
    (task,) = run.read_tasks()
    assert task.spec.search.strategy == "auto"


def test_overrides_are_laid_over_it_and_are_checked_as_a_job_file_is(run: RunDir) -> None:
    assert load_with_overrides(run, ["pricing.price=2"]).search.strategy == "auto"
    with pytest.raises(SpecError):
        load_with_overrides(run, ["search.strategy=two"])


def test_a_job_file_with_it_is_refused(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        load_spec(run.path / "spec.yaml", environ={}, site_files=())
    assert "set adaptive" in str(refused.value.problems)


def test_all_else_of_a_stored_job_is_kept() -> None:
    job = make.spec(search={"nodes": [1, 2], "strategy": "full"})
    content = job.model_dump(mode="json")
    assert validate_job(drop_removed_values(content), source="test") == job
