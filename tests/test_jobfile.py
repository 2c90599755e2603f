"""Whether the job.yaml that a run came from says something else by now."""

from pathlib import Path
from typing import Any

import make_runs
import pytest
import yaml
from isolation import isolate_environment

from tula_cli.cli.runs import JobOrRun
from tula_cli.run import job_runs
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.job_runs import ConfigDrift
from tula_cli.spec.load import load_spec


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    isolate_environment(monkeypatch, tmp_path)
    path = tmp_path / "job.yaml"
    write(path)
    return path


def write(job: Path, **changes: Any) -> None:
    content = {**make_runs.SPEC, **changes}
    job.write_text(yaml.safe_dump({**content, "train": {**make_runs.SPEC["train"], **content["train"]}}))


def run_of(job: Path, *overrides: str) -> RunDir:
    spec = load_spec(job, overrides=overrides)
    run = RunDir.from_spec(job.parent / "tula-runs", spec)
    run.save_job(spec, job_runs.find_settings_origin(run, job, overrides))
    return run


def config_drift(run: RunDir, *overrides: str) -> ConfigDrift | None:
    return job_runs.find_config_drift(Run(run.path, load_spec(run.path / "spec.yaml", overrides=overrides)), overrides)


def test_an_edited_file_is_reported_by_its_keys_and_both_values(job: Path) -> None:
    run = run_of(job)
    write(job, optimizer={"lr": 0.002}, train={"epochs": 9})
    result = config_drift(run)
    assert result is not None and result.changes == {"optimizer.lr": (0.1, 0.002), "train.epochs": (4, 9)}
    assert result.trains and not result.elsewhere


def test_prices_and_the_search_leave_the_training_as_it_is(job: Path) -> None:
    run = run_of(job)
    write(job, pricing={"price": 3.0}, search={"nodes": [1]})
    result = config_drift(run)
    assert result is not None and {"pricing.price", "search.nodes"} <= result.changes.keys()
    assert not result.trains and not result.elsewhere


def test_a_file_of_another_model_belongs_to_another_run(job: Path) -> None:
    run = run_of(job)
    write(job, model={"name": "resnet34", "args": {"width": 3}})
    result = config_drift(run)
    assert result is not None and result.trains and result.elsewhere
    assert result.changes == {"model.name": ("resnet18", "resnet34"), "model.args.width": (None, 3)}


def test_comments_formatting_and_defaults_written_out_are_no_change(job: Path) -> None:
    run = run_of(job)
    job.write_text("# mine\n" + yaml.safe_dump({**make_runs.SPEC, "schedule": {}}, default_flow_style=True))
    assert config_drift(run) is None


def test_a_file_that_is_gone_and_a_run_of_no_file_are_no_change(job: Path) -> None:
    run = run_of(job)
    job.unlink()
    assert config_drift(run) is None
    bare = RunDir.create(job.parent / "others", make_runs.spec())
    assert bare.read_job_file() is None and config_drift(bare) is None


def test_a_file_that_cannot_be_used_says_why(job: Path) -> None:
    run = run_of(job)
    write(job, train={"epochs": -1})
    result = config_drift(run)
    assert result is not None and result.trains and "train.epochs" in result.problem


def test_what_was_set_on_the_command_line_is_laid_over_the_file_as_it_is_now(job: Path) -> None:
    run = run_of(job, "train.epochs=2")
    assert config_drift(run) is None
    write(job, train={"epochs": 9})
    assert config_drift(run) is None, "--set decides"
    write(job, optimizer={"lr": 0.5})
    assert config_drift(run) is not None and config_drift(run, "optimizer.lr=0.3") is None
    run.save_job(load_spec(run.path / "spec.yaml", overrides=["optimizer.lr=0.3"]), job_runs.find_settings_origin(run, None, ["optimizer.lr=0.3"]))  # fmt: skip
    known = run.read_job_file()
    assert known is not None and known.overrides == ("train.epochs=2", "optimizer.lr=0.3") and config_drift(run) is None


def test_a_run_named_instead_of_its_job_file_keeps_the_job_file(job: Path) -> None:
    run = run_of(job)
    runs = [Run(run.path, run.read_spec())]
    for named in (run.path, Path(run.id)):
        assert JobOrRun(job=named, root=run.path.parent).find_settings_origin(runs) == run.read_job_file()
    assert JobOrRun(job=job, root=run.path.parent).find_settings_origin(runs) == run.read_job_file()


def test_an_override_of_a_run_derives_the_defaults_that_follow_from_it(job: Path) -> None:
    write(job, train={"method": "lrs", "reference_batch": 32}, schedule={"kind": "cosine"})
    run = run_of(job)
    assert run.read_spec().train.ramp_nodes == "same"
    changed = job_runs.load_with_overrides(run, ["train.ramp=decay"])
    assert changed.train.ramp_nodes == load_spec(job, overrides=["train.ramp=decay"]).train.ramp_nodes == "auto"
    assert changed.schedule == run.read_spec().schedule
    assert job_runs.load_with_overrides(run, ["train.ramp=decay", "train.ramp_nodes=same"]).train.ramp_nodes == "same"


def test_an_override_retains_what_the_user_chose(job: Path) -> None:
    write(job, train={"method": "ramp", "reference_batch": 32, "max_grad_norm": 5.0}, schedule={"kind": "cosine"})
    changed = job_runs.load_with_overrides(run_of(job), ["train.ramp=decay"])
    assert (changed.train.ramp_nodes, changed.train.max_grad_norm, changed.schedule.kind) == ("auto", 5, "cosine")
