"""What was predicted of the trainings under a root, and what they came to (services/progress/ledger.py)."""

import json
from pathlib import Path

import make_runs as make
import pytest

from tula_cli.run.directory import RunDir
from tula_cli.services.progress.ledger import ledger
from tula_cli.show import status as show_status


@pytest.fixture
def root(tmp_path: Path) -> Path:
    run = RunDir.create(tmp_path, make.spec())
    for name, predicted, actual in (("aaaa", 0.11, 0.1), ("bbbb", 0.08, 0.1), ("cccc", None, 0.1)):
        folder = run.path / "train" / name
        folder.mkdir(parents=True)
        told = {"signature": name, "nodes": 2, "batch": 64, "predicted_step": predicted, "actual_step": actual}
        (folder / "summary.json").write_text(json.dumps({**told, "predicted_hours": 1.5, "actual_hours": 2.0}))
    (run.path / "train" / "dddd").mkdir()  # it has not ended
    return tmp_path


def test_every_finished_training_is_held_against_its_prediction(root: Path) -> None:
    found = ledger(root)
    assert [one.signature for one in found.outcomes] == ["aaaa", "bbbb", "cccc"]
    assert [one.step_error for one in found.outcomes] == [pytest.approx(0.1), pytest.approx(-0.2), None]
    assert found.step_error == pytest.approx(0.15) and found.time_error == pytest.approx(0.25)
    assert found.problems == ()


def test_forecasts_stand_apart_from_what_trainings_or_probes_had_measured(root: Path) -> None:
    run = RunDir.newest(root)
    known = {"aaaa": {"trained": "1234", "measured": True}, "bbbb": {"measured": True}, "cccc": {}}
    for name, basis in known.items():
        told = {"step_time": 0.1, "step_low": 0.09, "step_high": 0.105, **basis}
        task = {"spec": make.spec().model_dump(mode="json"), "ladder": [{"prediction": told}]}
        (run.path / "tasks").mkdir(exist_ok=True)
        (run.path / f"tasks/train-{name}-1.json").write_text(json.dumps(task))
    found = ledger(root)
    assert [one.by for one in found.outcomes] == ["training", "probe", ""], "the last had no prediction"
    assert [one.inside for one in found.outcomes] == [True, True, None]
    assert found.step_errors == {"training": pytest.approx(0.1), "probe": pytest.approx(0.2)}
    assert list(found.calibrations) == ["local"]
    shown = "\n".join(str(line) for line in show_status.ledger(found, width=120))
    assert "by what it was known by: by a training 10.0 %, by a probe 20.0 %" in shown


def test_a_damaged_one_is_told_and_hides_no_other(root: Path) -> None:
    other = RunDir.create(root, make.spec(name="other"))
    (other.path / "train/eeee").mkdir(parents=True)
    (other.path / "train/eeee/summary.json").write_text("{")
    found = ledger(root)
    assert len(found.outcomes) == 3 and "other" in found.problems[0] and "damaged" in found.problems[0]


def test_without_a_training_there_is_nothing_to_tell(tmp_path: Path) -> None:
    assert ledger(tmp_path) == ledger(tmp_path) and ledger(tmp_path).step_error is None
