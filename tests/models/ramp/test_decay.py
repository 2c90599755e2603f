"""A decay of the learning rate that is spent as batch (`train.ramp: decay`): its stages, its rates, their nodes."""

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_results import Truth, make_probes
from make_results import make_spec as searched

from tula_cli.errors import SpecError
from tula_cli.models.choice.grid import Config
from tula_cli.models.estimator import Estimator
from tula_cli.models.ramp import Ramp, build_ramp
from tula_cli.models.ramp_costs import check_stages, describe_stage_nodes, list_stage_diagnostics
from tula_cli.run.records.recommendations import Stage
from tula_cli.spec.job import JobSpec, choose_max_lr_factor, compute_lr_scale, compute_reference_lr
from tula_cli.spec.load import validate_job
from tula_cli.spec.signature import compute_train_signature
from tula_cli.worker.train.learning_rate import compute_learning_rate

SIZE, EPOCHS = 10_000, 20
COSINE = {"kind": "cosine"}


def job(schedule: Any = COSINE, optimizer: Any = None, **train: Any) -> JobSpec:
    sections = {"model": {"name": "small_cnn"}, "dataset": {"name": "digits"}, "optimizer": optimizer or {"lr": 0.1}}
    value = {"epochs": EPOCHS, "method": "lbt", "ramp": "decay", **train}
    return validate_job({**sections, "schedule": schedule, "train": value}, source="a test")


def of(schedule: Any = COSINE, *, batch: int = 1024, parts: int = 1, **train: Any) -> Ramp:
    return build_ramp(job(schedule, **train), batch=batch, divisor=parts, dataset_size=SIZE)


def begins(ramp: Ramp) -> dict[int, float]:
    """Return the epoch at which each batch begins."""
    return {stage.batch: round(stage.begin / SIZE, 2) for stage in ramp.stages}


# --- stages


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (COSINE, {128: 0, 256: 10, 512: 13.33, 1024: 15.40}),  # half at half, a quarter at two thirds
        ({"kind": "cosine", "warmup_epochs": 2}, {128: 0, 256: 11, 512: 14, 1024: 15.86}),
        ({"kind": "cosine", "min_lr": 0.01}, {128: 0, 256: 10.71, 512: 14.65, 1024: 17.87}),
        ({"kind": "linear"}, {128: 0, 256: 10, 512: 15, 1024: 17.5}),
        ({"kind": "linear", "decay_from": 0.6}, {128: 0, 256: 16, 512: 18, 1024: 19}),
        ({"kind": "one-cycle"}, {128: 0, 256: 13, 512: 15.33, 1024: 16.78}),  # not while it rises from 1/25
        ({"kind": "multistep", "milestones": [4, 8, 12], "gamma": 0.5}, {128: 0, 256: 4, 512: 8, 1024: 12}),
        ({"kind": "multistep", "milestones": [10, 15]}, {128: 0, 1024: 10}),  # a tenth at once
        ({"kind": "multistep", "milestones": [2, 4, 6, 8, 10, 12], "gamma": 2**-0.5}, {128: 0, 256: 4, 512: 8, 1024: 12}),
        ({"kind": "multistep", "milestones": [1, 6], "gamma": 0.1, "warmup_epochs": 3}, {128: 0, 1024: 3}),
    ],
)  # fmt: skip
def test_the_batch_doubles_where_the_schedule_halves_the_rate(schedule: Any, expected: dict[int, float]) -> None:
    assert begins(of(schedule)) == expected


SCHEDULES = st.one_of(
    st.builds(
        lambda kind, low, warmup: {"kind": kind, "min_lr": low, "warmup_epochs": warmup},
        st.sampled_from(["cosine", "linear"]), st.sampled_from([0.0, 0.001, 0.02]), st.sampled_from([0, 1.5, 5]),
    ),
    st.builds(lambda share: {"kind": "linear", "decay_from": share}, st.floats(0, 0.9)),
    st.just({"kind": "one-cycle"}),
    st.builds(
        lambda at, gamma: {"kind": "multistep", "milestones": sorted(at), "gamma": gamma},
        st.lists(st.integers(0, 19), min_size=1, max_size=5), st.sampled_from([0.1, 0.2, 0.5]),
    ),
)  # fmt: skip


@given(schedule=SCHEDULES, batch=st.sampled_from([200, 256, 1024, 4096]), name=st.sampled_from(["SGD", "AdamW"]))
@settings(max_examples=80)
def test_rate_and_batch_are_worth_the_rate_of_the_reference_batch(schedule: Any, batch: int, name: str) -> None:
    """lr / batch with SGD, lr / root of the batch with AdamW, at every point; the rate never exceeds the job's own."""
    subject = job(schedule, {"name": name, "lr": 0.1})
    ramp = build_ramp(subject, batch=batch, divisor=1, dataset_size=SIZE)
    for passed in range(0, EPOCHS * SIZE, 997):
        value, epoch = ramp.find_batch(passed), passed / SIZE
        worth = (value / 128) ** (1 if name == "SGD" else 0.5)
        assert compute_learning_rate(subject, epoch, value) == pytest.approx(
            compute_reference_lr(subject, epoch) * worth
        )
        assert compute_learning_rate(subject, epoch, value) <= 0.1 * (1 + 1e-6)
        assert value == 128 or 0.1 * 128 / value >= compute_reference_lr(subject, epoch) * (1 - 1e-6)
    for stage, following in pairwise(ramp.stages):
        assert following.begin > stage.begin and following.batch > stage.batch
    assert ramp.stages[0] == Stage(begin=0, batch=128) or schedule.get("milestones", [1])[0] == 0
    assert ramp.stages[-1].batch == batch


@pytest.mark.parametrize(("kind", "least"), [("cosine", 0.36), ("linear", 0.33)])
def test_a_decay_to_nothing_saves_more_than_30_percent_of_the_steps(kind: str, least: float) -> None:
    result = of({"kind": kind}).count_remaining_steps(size=SIZE, epochs=EPOCHS)
    assert 1 - sum(result.values()) / (EPOCHS * (SIZE // 128)) >= least


def test_stages_divide_among_gpus_and_micro_batches() -> None:
    assert begins(of(parts=48, accumulate=2, batch=960)) == {96: 0, 240: 10, 480: 13.33, 960: 15.24}


def test_at_or_below_the_reference_batch_nothing_grows() -> None:
    assert of(batch=128).stages == (Stage(begin=0, batch=128),)
    assert of(batch=64).stages == (Stage(begin=0, batch=64),)
    assert compute_learning_rate(job(), 10, 64) == pytest.approx(0.025), "half of a half"


def test_after_an_out_of_memory_the_smaller_batch_keeps_its_stages() -> None:
    subject, decided = job(), of().stages
    ramp = build_ramp(subject, batch=512, divisor=1, dataset_size=SIZE, decided=decided)
    assert ramp.stages == decided[:3]
    assert build_ramp(subject, batch=96, divisor=1, dataset_size=SIZE, decided=decided) == Ramp.from_constant_batch(96)


# --- learning rate


@pytest.mark.parametrize(
    ("name", "method", "rule"),
    [
        *((name, "lbt", "linear") for name in ("SGD", "ASGD")),
        *(
            (name, "lbt", "sqrt")
            for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Muon")
        ),
        ("mine:Optimizer", "lbt", "sqrt"),  # which does not diverge, whatever it is
        ("SGD", "ortho", "linear"),  # at the length of SGD's step
        ("AdamW", "ortho", "sqrt"),
        ("SGD", "ramp", "linear"),
        ("AdamW", "ramp", "sqrt"),
        ("SGD", "lrs", "linear"),
        ("AdamW", "lrs", "sqrt"),
        ("SGD", "polo", "linear"),
        ("SGD", "lars", "sqrt"),  # divides by the gradient's norm
        ("AdamW", "lamb", "sqrt"),
        ("SGD", "mine:Method", "linear"),
    ],
)
def test_the_rule_is_that_of_the_optimizer(name: str, method: str, rule: str) -> None:
    subject = job(optimizer={"name": name, "lr": 0.1}, method=method)
    assert compute_lr_scale(subject, 128 * 16) == {"linear": 16, "sqrt": 4}[rule]
    other = {"linear": "sqrt", "sqrt": "linear"}[rule]
    requested = job(optimizer={"name": name, "lr": 0.1}, method=method, lr_scaling=other)
    assert compute_lr_scale(requested, 128 * 16) == {"linear": 4, "sqrt": 16}[rule]


def test_only_a_limit_that_is_given_holds() -> None:
    assert choose_max_lr_factor(job(method="ramp")) is None, "the rate never exceeds the job's own"
    assert compute_lr_scale(job(method="ramp", max_lr_factor=4), 2048) == 4


def test_a_warm_up_stays() -> None:
    subject = job({"kind": "cosine", "warmup_epochs": 2}, method="ramp")
    assert compute_learning_rate(subject, 0, 128) == pytest.approx(0.001)
    assert compute_learning_rate(subject, 1, 128) == pytest.approx(0.0505)
    assert compute_learning_rate(job(method="ortho"), 0, 128) == pytest.approx(0.001), "the method's own"


# --- what is refused


@pytest.mark.parametrize(
    ("schedule", "train", "words"),
    [
        ({}, {}, "schedule.kind: constant never halves it; set schedule.kind to cosine, linear, one-cycle or multistep"),
        ({"kind": "multistep", "milestones": [10], "gamma": 0.9}, {}, "schedule.kind: multistep does not halve it within 20 epochs"),
        ({"kind": "multistep", "milestones": [10], "gamma": 3.0}, {}, "schedule.kind: multistep does not halve it within 20 epochs"),
        ({"kind": "multistep", "milestones": [20]}, {}, "schedule.kind: multistep does not halve it within 20 epochs"),
        ({"kind": "cosine", "min_lr": 0.06}, {}, "schedule.kind: cosine does not halve it within 20 epochs"),
        ({"kind": "cosine", "min_lr": 0.5}, {}, "schedule.kind: cosine does not halve it within 20 epochs"),
        ({"kind": "cosine", "warmup_epochs": 20}, {}, "schedule.kind: cosine does not halve it within 20 epochs"),
        ({"kind": "linear", "decay_from": 0.99}, {}, "schedule.kind: linear does not halve it within 20 epochs"),
        (COSINE, {"early_stopping": {"epochs": 5}}, "schedule.kind: cosine does not halve it within 5 of 20 epochs"),
        ({"kind": "cosine", "warmup_epochs": 6}, {"early_stopping": {"epochs": 5}}, "does not halve it within 5 of 20 epochs"),
        ({"kind": "mine:halves"}, {}, "schedule.kind: mine:halves halves.* Set the stages, .*lr_scaling: linear"),
        (COSINE, {"method": "ags"}, "but train.method: ags already scales the gradients; set train.method to ramp"),
        (COSINE, {"method": "static"}, "but train.method: static already scales the gradients"),
        ({}, {"method": "schedule_free"}, "train.method: schedule_free keeps the learning rate constant"),
        (COSINE, {"method": "auto"}, "train.method: auto, which needs a constant batch"),
        (COSINE, {"lr_scaling": "none"}, "but train.lr_scaling is none; remove train.lr_scaling"),
        (COSINE, {"ramp": "decy"}, "did you mean decay"),
    ],
)  # fmt: skip
def test_what_has_no_decay_to_spend_is_refused(schedule: Any, train: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        job(schedule, **train)
    (problem,) = caught.value.problems
    assert re.search(words, str(problem))


def test_a_script_whose_batch_is_its_own_is_refused() -> None:
    script = {"command": "train.py --batch {local_batch}", "length": {"epochs": 2}}
    with pytest.raises(SpecError) as caught:
        validate_job({"script": script, "train": {"ramp": "decay"}}, source="a test")
    assert any("train.ramp: has no effect on a script" in str(problem) for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("where", "train", "words"),
    [
        ({"batch": 2048}, {}, "decay reaches at most batch 1268, not 2048: the schedule .* only to 1/9.91"),
        ({"nodes": 256}, {"ramp_nodes": "same"}, "starts at train.reference_batch 128, which is less than one sample"),
        (
            {"nodes": 64},
            {"ramp_nodes": "same", "accumulate": 4},
            "is less than one sample per GPU and micro-batch",
        ),
    ],
)
def test_a_place_without_its_stages_is_refused(where: dict[str, int], train: dict[str, Any], words: str) -> None:
    subject = job({"kind": "cosine", "min_lr": 0.01}, **train)
    check_stages(subject, batch=1024, nodes=1, dataset_size=SIZE)
    with pytest.raises(SpecError, match=words):
        check_stages(subject, **{"batch": 1024, "nodes": 1, "dataset_size": SIZE, **where})


# --- nodes, and what it saves

TRUTH, PROBES = Truth(dataset_size=12_800), {1: (16, 32, 64, 128, 256), 8: (2, 64)}


def forecast(schedule: Any = COSINE, **train: Any) -> Estimator:
    value = {"method": "lbt", "ramp": "decay", "epochs": 10, "reference_batch": 32, **train}
    subject = searched(train=value, schedule=schedule, search={"nodes": [1, 2, 4, 8]})
    return replace(Estimator.fit(subject, make_probes(TRUTH, PROBES)), stages_by="cost")


def test_each_stage_has_the_nodes_that_it_is_worth_unless_the_job_says_otherwise() -> None:
    choice = forecast().predict(Config(8, 256))
    assert [(stage.batch, stage.nodes) for stage in choice.stages] == [(32, 1), (64, 1), (128, 1)]
    assert describe_stage_nodes(choice) == "nodes: 1 at batch 32, 1 at batch 64, 1 at batch 128, 8 at batch 256"
    same = forecast(ramp_nodes="same").predict(Config(8, 256))
    assert {stage.nodes for stage in same.stages} == {None} and same.cost > choice.cost
    assert describe_stage_nodes(same) == ""
    plain = searched(train={"method": "lbt"})
    assert plain.train.ramp_nodes == "same"
    named = {
        compute_train_signature(forecast(**value).spec, nodes=8, batch=256) for value in ({}, {"ramp_nodes": "same"})
    }
    assert len(named) == 2, "stages are rounded to other numbers of GPUs"


def test_batches_that_the_decay_never_comes_to_are_no_candidates() -> None:
    low = {"kind": "cosine", "min_lr": 0.01}
    assert {row.batch for row in forecast(low).predict_candidates().make_predictions()} == {32, 64, 128, 256}
    assert 2048 in {row.batch for row in forecast().predict_candidates().make_predictions()}
    subject = forecast(low, reference_batch=4, ramp_nodes="same").spec
    problems, (warning,) = list_stage_diagnostics(subject, dataset_size=12_800)
    assert problems == [] and warning.code == "nodes-unusable-for-stages"
    assert warning.values["nodes"] == [8] and "train.ramp: decay starts at" in str(warning.values["reason"])
