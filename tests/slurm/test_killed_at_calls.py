"""A training whose ranks and supervisors are killed at file calls in the run directory ends as if nothing had happened."""

import collections
from pathlib import Path

import pytest
from driver import Tula, slow_training_options, weights_differ
from test_recovery import TWO, finished, submit, trained

from tula_cli.run.directory import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.proof]
KILLING = Path(__file__).parents[1] / "helpers" / "killing"
FEWEST, KILLS, EPOCHS = 3, 6, 16


def newest(run: RunDir) -> Path:
    (signature,) = run.list_train_signatures()
    return run.get_training(signature).list_checkpoints()[0]


@pytest.mark.promise(
    "a process",
    "ranks and supervisors are killed while they open, rename, remove or sync files of the run",
    "every sample is trained once, every epoch is logged once, and the weights equal those of an undisturbed training bit by bit",
)
def test_a_training_killed_at_file_calls_has_the_weights_of_an_undisturbed_one(
    tula: Tula, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> None:
    marks, seed = tmp_path_factory.mktemp("marks"), request.config.getoption("--hypothesis-seed")
    options = (*TWO, *slow_training_options(tula, EPOCHS), "--set", "train.max_attempts=40")
    killing = f"{tula.folder}/tula-runs|{marks}|{seed}|{KILLS}"
    setup = f"cluster.setup=['export PYTHONPATH={KILLING}', 'export KILLING=\"{killing}\"']"
    undisturbed = tula.folder / "undisturbed"
    submit(tula, *options, "--run-dir", str(undisturbed))  # beside the other, on two nodes that nobody needs
    submit(tula, *options, "--set", setup)
    tula.wait_until(lambda: finished(tula), seconds=480)
    kills = [mark.read_text() for mark in sorted(marks.iterdir())]
    print(*kills, sep="")
    assert FEWEST <= len(kills) <= KILLS, "the training may end before all are spent"
    trained(tula, EPOCHS)
    calls = collections.Counter(kill.split()[1] for kill in kills)
    assert len(calls) > 1, "at calls of several kinds"
    disturbed = newest(tula.run())
    run = RunDir.find_newest(undisturbed)
    tula.wait_until(lambda: run.get_training(run.list_train_signatures()[0]).read_summary())
    assert not weights_differ(disturbed, newest(run))
