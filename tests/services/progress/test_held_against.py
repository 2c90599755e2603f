"""How wide intervals have to be, by what trainings under a root came to (services/progress/held_against.py)."""

import json
import math
from pathlib import Path

import make_runs as make
import pytest
from make_results import Truth, probe_all, spec

from tula_cli.models.time.calibration import AS_MODELLED
from tula_cli.run.directory import RunDir
from tula_cli.services.progress.held_against import calibrated
from tula_cli.services.recommend import recommend
from tula_cli.show import tables


def finished(
    run: RunDir, name: str, *, off: float, market: str = "on_demand", attempts: int = 1, **spec: object
) -> None:
    """Add a training that has ended, whose step and whole took `off` times as long as predicted, to 10 %."""
    took, own = 0.1 * (1 + 0.001 * len(list((run.path / "train").glob("*")))), make.spec(**spec)
    told = {"step_time": took, "step_low": took / 1.1, "step_high": took * 1.1, "market": market, "batch": 64}
    task = own.model_dump(mode="json")
    ladder = [{"prediction": {**told, "nodes": 2, "hours": 2.0, "hours_low": 1.8, "hours_high": 2.2}}]
    summary = {"signature": name, "causes": [], "attempts": attempts, "predicted_step": took, "predicted_hours": 2.0}
    for path, found in (
        (f"tasks/train-{name}-1.json", {"spec": task, "ladder": ladder}),
        (f"train/{name}/summary.json", {**summary, "actual_step": took * off, "actual_hours": 2.0 * off}),
    ):
        (run.path / path).parent.mkdir(parents=True, exist_ok=True)
        (run.path / path).write_text(json.dumps(found))


def add_trainings(root: Path, *, count: int = 12, **changes: object) -> RunDir:
    """Add runs with trainings that took a quarter longer, or shorter, than predicted."""
    for number in range(count):
        run = RunDir.create(root, make.spec(name=f"job{number}"))
        finished(run, "abcd", off=1.25 if number % 2 else 0.8, **changes)  # type: ignore[arg-type]
    return run


def test_trainings_outside_their_intervals_widen_the_next_ones(tmp_path: Path) -> None:
    run = add_trainings(tmp_path)
    found, problems = calibrated(run.path, "local")
    assert (found.trainings, found.inside, found.hours_trainings, problems) == (12, 0, 12, ())
    assert found.step > 2 and found.hours > 1.8
    assert "intervals of steps are 3 times as wide: of 12 finished trainings 0 ended inside theirs" in found.words
    assert calibrated(run.path / "types" / "a100-1234", "local")[0] == found, "a node type's run lies in the job's"


def test_those_on_another_kind_of_cluster_tell_nothing(tmp_path: Path) -> None:
    run = add_trainings(tmp_path)
    assert calibrated(run.path, "slurm")[0] == AS_MODELLED


def test_methods_that_were_not_measured_tell_nothing(tmp_path: Path) -> None:
    run = add_trainings(tmp_path, train={"epochs": 4, "method": "ortho"})
    assert calibrated(run.path, "local")[0] == AS_MODELLED


def test_failures_and_spot_nodes_are_no_error_of_the_hours(tmp_path: Path) -> None:
    found = calibrated(add_trainings(tmp_path / "a", attempts=2).path, "local")[0]
    assert found.trainings == 12 and found.hours_trainings == 0 and found.hours == 1.0
    assert calibrated(add_trainings(tmp_path / "b", market="spot").path, "local")[0].hours == 1.0


def test_a_training_that_cannot_be_read_is_told_and_hides_no_other(tmp_path: Path) -> None:
    run = add_trainings(tmp_path)
    (run.path / "train/abcd/summary.json").write_text("{")
    found, (problem,) = calibrated(run.path, "local")
    assert found.trainings == 11 and problem.startswith(f"intervals are calibrated without {run.id}: ")


def test_recommend_widens_by_it_and_says_so(tmp_path: Path) -> None:
    own = RunDir.create(tmp_path, spec(search={"nodes": [2, 4], "max_batch": 512}))
    for probe in probe_all(Truth(), {2: (32, 128), 4: (8, 128)}):
        own.write_result(probe)
    before = recommend(own, own.spec(), objective="time", now=1.0).recommendation
    add_trainings(tmp_path)
    after = recommend(own, own.spec(), objective="time", now=1.0).recommendation
    assert before.calibration == AS_MODELLED and after.calibration is not None
    for old, new in zip(before.rows, after.rows, strict=True):
        assert new.step_time == old.step_time and new.hours == old.hours
        assert old.step_high is not None and new.step_high is not None
        assert old.hours_high is not None and new.hours_high is not None
        wider = math.log(new.step_high / new.step_time) / math.log(old.step_high / old.step_time)
        assert wider == pytest.approx(after.calibration.step) == new.step_widened
        assert (new.hours_high - new.hours) / (old.hours_high - old.hours) == pytest.approx(
            after.calibration.hours, rel=0.25
        )
    assert any(line.startswith("intervals of steps are ") for line in tables.learnt(after))
