"""What was predicted of the trainings under a root, and what they came to (services/progress/ledger.py)."""

import json
from pathlib import Path

import make_runs as make
import pytest

from tula_cli.run.directory import RunDir
from tula_cli.services.progress.ledger import ledger


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


def test_a_damaged_one_is_told_and_hides_no_other(root: Path) -> None:
    other = RunDir.create(root, make.spec(name="other"))
    (other.path / "train/eeee").mkdir(parents=True)
    (other.path / "train/eeee/summary.json").write_text("{")
    found = ledger(root)
    assert len(found.outcomes) == 3 and "other" in found.problems[0] and "damaged" in found.problems[0]


def test_without_a_training_there_is_nothing_to_tell(tmp_path: Path) -> None:
    assert ledger(tmp_path) == ledger(tmp_path) and ledger(tmp_path).step_error is None
