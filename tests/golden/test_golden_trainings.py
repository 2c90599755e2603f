"""Short trainings of every method and precision end with the weights that are expected."""

import copy
from collections.abc import Iterator

import golden
import pytest
import trainings
from run_cases import Commands
from trainings import TRAININGS, Training, Weights

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    commands = Commands(tmp_path_factory.mktemp("golden"))
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def weights() -> Iterator[Weights]:
    weights = Weights()
    yield weights
    weights.close()


def parameters() -> list[object]:
    return [pytest.param(each, id=each.name, marks=[pytest.mark.proof] if each.slow else []) for each in TRAININGS]


@pytest.mark.parametrize("training", parameters())
def test_a_training_ends_with_the_expected_weights(training: Training, commands: Commands, weights: Weights) -> None:
    outcome, state = trainings.run_training(training, commands, weights)
    expected, known = golden.load_outcome(f"train-{training.name}"), trainings.load_weights(training.name)
    assert expected is not None and known is not None, "nothing is expected yet: make golden"
    lines = golden.list_differences(expected, outcome, "train", golden.read_renames())
    if state:
        lines += trainings.list_weight_differences(known, state)
    assert not lines, "\n".join(["differs from tests/golden (make golden renews it):", *lines])


@pytest.mark.proof
def test_changed_weights_are_noticed() -> None:
    known = trainings.load_weights("method-ags")
    assert known is not None
    key, digest = next(iter(known["hashes"].items()))
    same = {**copy.deepcopy(known), "key": key, "hash": digest}
    assert trainings.list_weight_differences(known, same) == []
    assert trainings.list_weight_differences(known, {**same, "hash": "0"}), (
        "another hash where torch and the CPU are known"
    )
    elsewhere = {**copy.deepcopy(same), "key": "torch 9, NEON", "hash": "0"}
    assert trainings.list_weight_differences(known, elsewhere) == []
    first = next(iter(elsewhere["weights"].values()))
    first[0] += 1e-7
    assert trainings.list_weight_differences(known, elsewhere) == [], "rounded otherwise"
    first[0] += 1e-3
    assert len(trainings.list_weight_differences(known, elsewhere)) == 1
    first.pop()
    assert len(trainings.list_weight_differences(known, elsewhere)) == 2
