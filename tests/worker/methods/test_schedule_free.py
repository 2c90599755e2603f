"""Method schedule_free: what is evaluated and saved, and what it refuses."""

import sys
from typing import Any

import pytest
import torch
from schedulefree import AdamWScheduleFree, SGDScheduleFree
from worker_jobs import same, spec, trained, trainer

from tula_cli.errors import SpecError
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import checkpoint
from tula_cli.worker.train import loop as worker_train_loop

ADAM = {"name": "AdamW", "lr": 0.01, "momentum": None}
FREE: dict[str, Any] = {"method": "schedule_free"}


@pytest.mark.parametrize(("optimizer", "kind"), [({}, SGDScheduleFree), (ADAM, AdamWScheduleFree)])
def test_it_takes_the_place_of_sgd_and_of_adamw_and_learns(
    alone: Ranks, optimizer: dict[str, Any], kind: type[torch.optim.Optimizer]
) -> None:
    job = spec(train={**FREE, "epochs": 7}, optimizer=optimizer)
    assert isinstance(trainer(job, alone).base, kind)
    _, steps = trained(job, alone)
    assert float(steps[-1].loss) < 0.5 * float(steps[0].loss)


def test_the_averaged_weights_are_evaluated_and_saved_and_no_step_changes(alone: Ranks) -> None:
    subject = trainer(spec(train=FREE), alone)
    stream = worker_train_loop.steps(subject)
    for _ in range(5):
        next(stream)
    before = _weights(subject)
    with subject.method.evaluating(subject):
        averaged = _weights(subject)
    assert not same(averaged, before)
    state = checkpoint.state(subject, best={})
    assert same(state["model"], averaged)
    assert same(_weights(subject), before)
    fresh = trainer(spec(train=FREE), alone)
    checkpoint.restore(fresh, state)
    assert same(_weights(fresh), before)
    stream.close()


@pytest.mark.parametrize("schedule", [{"kind": "cosine"}, {"kind": "multistep", "milestones": [1]}])
def test_a_learning_rate_that_falls_is_refused(schedule: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as told:
        spec(train=FREE, schedule=schedule)
    assert f"set schedule.kind: constant, not {schedule['kind']}" in str(told.value.problems or told.value)


def test_a_missing_package_is_told_with_the_line_to_type(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    with pytest.raises(SpecError, match="needs the package schedulefree") as told:
        trainer(spec(train=FREE), alone)
    assert told.value.hint == "pip install 'tula-cli[schedulefree]'"


def _weights(subject: worker_train_loop.Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in subject.ddp.module.state_dict().items()}
