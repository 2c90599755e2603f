"""Every train.method through the training run: saved, resumed, relaunched at another batch, and probed."""

import json
import warnings as python_warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from worker_jobs import (
    Interrupted,
    are_equal,
    copy_weights,
    load_final_weights,
    make_probe_task,
    make_spec,
    make_train_task,
    make_trainer,
    read_rows,
    train_to_end,
)

from tula_cli.errors import SpecError
from tula_cli.optim import TulaOptimizer
from tula_cli.optim.layerwise import Lamb, Lars
from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.tasks import TrainTask
from tula_cli.spec.ags import Ags
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.entry import run_training
from tula_cli.worker.measure.probe import run_probes
from tula_cli.worker.methods.ags import list_excluded_parameters
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import loop as worker_train_loop

ADAM = {"name": "AdamW", "lr": 0.01, "momentum": None, "weight_decay": 0.01}
METHODS: dict[str, dict[str, Any]] = {
    "lrs": {},
    "lars": {"optimizer": {"lr": 2.0, "weight_decay": 5e-4}},
    "lamb": {"optimizer": ADAM},
    "polo": {},
    "ortho": {},
    "static": {"ags": {"delta": "inf", "factor": 1.5}},
    "sqrt": {"train": {"method": "lbt", "lr_scaling": "sqrt"}},
}
each = pytest.mark.parametrize("name", METHODS)
varied = pytest.mark.parametrize("name", ["sqrt"])  # test_table has the methods


def job(name: str, **changes: Any) -> dict[str, Any]:
    """Return the sections of a job: 7 epochs of 6 steps, a network with BatchNorm and dropout."""
    value = METHODS[name]
    method = value.get("train", {"method": name})
    model = {"args": {"norm": True, "dropout": 0.3}}
    return {"model": model, **value, "train": {"epochs": 7, "checkpoint_every": 1e-9, **method}, **changes}


def run_one(run: RunDir, ranks: Ranks, task: TrainTask) -> None:
    run_training(task, run, ranks, build_datasets(task.spec))


def broken_off(run: RunDir, ranks: Ranks, sections: dict[str, Any], *, after: int) -> TrainTask:
    """Train until so many samples are loaded; return the task that goes on."""
    task = make_train_task(make_spec(**sections))
    ending = make_spec(**sections, dataset={"args": {"ends_after": after}})
    with pytest.raises(Interrupted):
        run_one(run, ranks, make_train_task(ending, signature=task.signature))
    return task


@varied
def test_a_broken_run_ends_at_the_same_weights(alone: Ranks, run: RunDir, tmp_path: Path, name: str) -> None:
    task = broken_off(run, alone, job(name), after=5 * 96 + 70)
    run_one(run, alone, task)
    assert [row["samples"] for row in read_rows(run, task, "start")] == [0, 5 * 96 + 64]
    whole = RunDir.create(tmp_path / "whole", task.spec)
    run_one(whole, alone, task)
    assert are_equal(load_final_weights(run, task), load_final_weights(whole, task))


@varied
def test_a_relaunch_at_another_batch_goes_on(alone: Ranks, run: RunDir, name: str) -> None:
    task = broken_off(run, alone, job(name), after=100)
    smaller = make_train_task(task.spec, batch=8, signature=task.signature)
    run_one(run, alone, smaller)
    starts = [(row["samples"], row["batch"]) for row in read_rows(run, task, "start")]
    assert starts == [(0, 16), (96, 8)]
    result = run.get_training(task.signature).read_result()
    assert result is not None
    assert (result.epochs, result.batch, result.samples) == (7, 8, 7 * 96)


@each
def test_a_method_is_not_the_plain_large_batch_and_learns(alone: Ranks, name: str) -> None:
    sections = job(name)
    ours, steps = train_to_end(make_spec(**sections), alone)
    plain = {**sections, "train": {**sections["train"], "method": "lbt", "lr_scaling": "auto"}}
    theirs, _ = train_to_end(make_spec(**plain), alone)
    assert not are_equal(ours, theirs)
    assert float(steps[-1].loss) < 0.5 * float(steps[0].loss)


@pytest.mark.parametrize("name", ["lars", "lamb", "polo", "static", "ortho"])
def test_half_precision_and_clipping_train(alone: Ranks, name: str) -> None:
    sections = job(name)
    sections["train"] |= {"precision": "fp16", "max_grad_norm": 5.0}
    state, steps = train_to_end(make_spec(**sections), alone)
    assert float(steps[-1].loss) < 0.7 * float(steps[0].loss)
    assert all(bool(value.isfinite().all()) for value in state.values())


@pytest.mark.parametrize("name", ["lars", "lamb", "polo", "static", "ortho"])
def test_a_probe_measures_it(alone: Ranks, run: RunDir, name: str) -> None:
    sections = job(name)
    task = make_probe_task(make_spec(**sections), 16)
    run_probes(task, run, alone, build_datasets(task.spec), started_at=0.0)
    result = run.read_result("probe-n001-l000016")
    assert isinstance(result, Measured)
    assert len(result.step_times) == 5
    copies = 2 if name == "lamb" else 1
    assert result.memory.optimizer == pytest.approx(copies * result.memory.gradients, rel=0.01)


# --- each


def test_lars_and_lamb_take_over_the_optimizers_settings(alone: Ranks) -> None:
    lars = make_trainer(make_spec(**job("lars")), alone).base
    assert isinstance(lars, Lars)
    assert {lars.defaults[name] for name in ("momentum", "weight_decay")} == {0.9, 5e-4}
    lamb = make_trainer(make_spec(**job("lamb", optimizer={**ADAM, "args": {"betas": [0.8, 0.9]}})), alone).base
    assert isinstance(lamb, Lamb)
    assert (lamb.defaults["betas"], lamb.defaults["weight_decay"]) == ((0.8, 0.9), 0.01)


@pytest.mark.parametrize(
    ("method", "optimizer", "message"),
    [
        (
            "lars",
            {"name": "Adam", "momentum": None},
            "method lars replaces SGD, so it cannot be used with optimizer.name: Adam",
        ),
        ("lamb", {"name": "SGD"}, "method lamb replaces Adam or AdamW"),
        ("lamb", {"name": "Adam", "momentum": 0.9}, "Adam has no argument momentum"),
        ("lars", {"args": {"dampening": 0.1}}, r"optimizer.args.dampening: SGD has no such argument"),
        ("lars", {"args": {"trust_coefficient": -1.0}}, "trust_coefficient must be a number above 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    alone: Ranks, method: str, optimizer: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        make_trainer(make_spec(train={"method": method}, optimizer=optimizer), alone)


@pytest.mark.parametrize(
    ("sections", "batch", "message"),
    [
        ({"train": {"method": "polo"}, "schedule": {"warmup_epochs": 1}}, 16, "polo has no effect on one GPU"),
        ({"train": {"method": "static"}}, 8, "AGS does not change the gradients"),
        ({"train": {"method": "lrs"}}, 16, ""),
        ({"schedule": {"warmup_epochs": 2}}, 16, "the warm-up takes 2 epochs, but the training has only 2"),
        ({"schedule": {"warmup_epochs": 1.9}}, 16, ""),
        (
            {"train": {"method": "ags", "accumulate": 4}, "ags": {"b_small": 8, "delta": "inf"}},
            16,
            "a small batch of 4 samples instead of ags.b_small (8), because with train.accumulate: 4",
        ),
        ({"train": {"method": "ags", "accumulate": 2}, "ags": {"b_small": 8, "delta": "inf"}}, 16, ""),
        (
            {"train": {"method": "static", "accumulate": 4}, "ags": {"b_small": 8, "delta": "inf"}},
            16,
            "instead of ags.b_small (8)",
        ),
        ({"train": {"method": "static", "accumulate": 4}, "ags": {"b_small": 8, "factor": 2, "delta": "inf"}}, 16, ""),
    ],
)
def test_what_does_nothing_is_reported(
    alone: Ranks, run: RunDir, sections: dict[str, Any], batch: int, message: str
) -> None:
    task = make_train_task(make_spec(**sections), batch=batch)
    run_one(run, alone, task)
    warnings = [row["message"] for row in read_rows(run, task, "warning")]
    assert len(warnings) == bool(message)
    assert all(message in text for text in warnings)
    json.dumps(warnings)


def test_the_identity_is_reported_by_the_training_alone(alone: Ranks, run: RunDir) -> None:
    job = make_spec(train={"method": "ags"})
    task = make_train_task(job, batch=8)
    with python_warnings.catch_warnings():
        python_warnings.simplefilter("error")
        run_one(run, alone, task)
        probed = make_probe_task(job, 8)
        run_probes(probed, run, alone, build_datasets(job), started_at=0.0)
    assert len(list(read_rows(run, task, "warning"))) == 1


def test_polo_on_one_rank_is_the_large_batch_with_a_warm_up(alone: Ranks) -> None:
    polo = make_trainer(make_spec(**job("polo")), alone)
    for _ in worker_train_loop.run_steps(polo):
        pass
    sections = job("polo", schedule={"warmup_epochs": polo.spec.workload.warmup_epochs})
    sections["train"] |= {"method": "lbt"}
    assert are_equal(copy_weights(polo), train_to_end(make_spec(**sections), alone)[0])


def test_ags_leaves_out_embeddings_unless_the_job_says_all() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
            self.head.weight = self.words.weight
            self.inner = nn.Sequential(nn.EmbeddingBag(5, 4), nn.Linear(4, 4), nn.LayerNorm(4))

    model = Tied()
    names = {parameter: name for name, parameter in model.named_parameters()}

    def left_out(**ags: Any) -> set[str]:
        return {names[parameter] for parameter in list_excluded_parameters(model, Ags(**ags))}

    embeddings = {"words.weight", "inner.0.weight"}
    assert left_out() == left_out(parameters=["*", "!embeddings"]) == embeddings
    assert left_out(parameters=["*", "!embeddings", "!norms"]) == embeddings | {"inner.2.weight", "inner.2.bias"}
    assert left_out(parameters="all") == left_out(parameters=["*"]) == set()
    assert left_out(parameters=["*", "!norms"]) == {"inner.2.weight", "inner.2.bias"}
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    for given, expected in (({}, embeddings), ({"exclude": ()}, set())):
        subject = TulaOptimizer(base, model=model, b_large=32, b_small=8, **given)
        assert {names[parameter] for parameter in subject.setup.excluded} == expected
    alone = nn.Embedding(9, 4)
    with pytest.raises(ValueError, match="embeddings"):
        TulaOptimizer(torch.optim.SGD(alone.parameters(), lr=0.1), model=alone, b_large=32, b_small=8)


def test_ags_leaves_out_what_the_job_names(alone: Ranks) -> None:
    sections = job("static", ags={"parameters": ["*", "!norms", "!biases"]})
    subject = make_trainer(make_spec(**sections), alone)
    assert subject.ags is not None
    names = {p: name for name, p in subject.parallel.module.named_parameters()}
    remaining = {names[p] for p in names if p not in subject.ags.setup.excluded}
    assert remaining and all(name.endswith("weight") for name in remaining)
    with pytest.raises(SpecError, match=r"ags\.parameters"):
        make_trainer(make_spec(**job("static", ags={"parameters": ["nothing.*"]})), alone)
