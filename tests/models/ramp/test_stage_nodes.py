"""On how many nodes each stage of a growing batch runs: the least time or node-hours, by hand, by trying all, and in forecasts."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_results import Truth, make_probes, make_spec

from tula_cli.errors import SpecError
from tula_cli.models.choice.grid import Config
from tula_cli.models.estimator import Estimator
from tula_cli.models.ramp_costs import (
    MAX_CHANGES,
    StageObjective,
    assign_nodes_to_stages,
    build_ramp_on_nodes,
    choose_stage_nodes,
    choose_stage_objective,
    list_allowed_stage_nodes,
    move_task_to_stage_nodes,
)
from tula_cli.query import Curve, Objective, get_quantity
from tula_cli.run.records.recommendations import Stage
from tula_cli.run.records.tasks import Rung, TrainTask
from tula_cli.spec.job import JobSpec
from tula_cli.spec.signature import compute_measurement_signature, compute_train_signature

STAGES = ({1: 100.0, 2: 60.0, 4: 50.0}, {4: 200.0})
"""Seconds of two stages: four nodes halve what one takes of the first."""
PROBES = {1: (16, 32, 64, 128, 256), 8: (2, 64)}
TRUTH = Truth(dataset_size=12_800)


def job(**train: object) -> JobSpec:
    expected_value = {"method": "lrs", "ramp": "auto", "epochs": 10, "reference_batch": 32, **train}
    return make_spec(train=expected_value, search={"nodes": [1, 2, 4, 8]})


def forecast(by: StageObjective, **train: object) -> Estimator:
    return replace(Estimator.fit(job(**train), make_probes(TRUTH, PROBES)), stages_by=by)


# --- by hand


@pytest.mark.parametrize(
    ("by", "start", "queue", "nodes"),
    [
        ("time", 10, 0, (4, 4)),  # 10 + 50 + 200, and with 2 at first 10 + 60 + 10 + 200
        ("cost", 10, 0, (1, 4)),  # 110 + 4 x 210 = 950; 2 x 70 + 840 = 980; 4 x 260 = 1,040
        ("cost", 99, 0, (1, 4)),  # 199 + 4 x 299 = 1,395, and 4 x 349 = 1,396
        ("cost", 100, 0, (4, 4)),  # 1,400 both: fewest changes
        ("cost", 10, 1e6, (1, 4)),  # waiting is not paid for
    ],
)
def test_each_stage_has_the_nodes_that_it_is_worth(
    by: StageObjective, start: float, queue: float, nodes: tuple[int, ...]
) -> None:
    assert choose_stage_nodes(STAGES, start=start, queue=queue, by=by) == nodes


def test_a_small_batch_that_is_faster_on_few_nodes_has_them_where_that_pays_for_the_start_and_the_wait() -> None:
    slow = ({1: 40.0, 4: 100.0}, {4: 200.0})
    assert choose_stage_nodes(slow, start=10, by="time") == (1, 4)
    assert choose_stage_nodes(slow, start=10, queue=49, by="time") == (1, 4)
    assert choose_stage_nodes(slow, start=10, queue=51, by="time") == (4, 4)


@pytest.mark.parametrize(
    ("objective", "curve", "by"),
    [
        ("time", "time", "time"),
        ("knee", "time", "time"),
        ("accuracy-time", "time", "time"),
        ("cost", "time", "cost"),
        ("energy", "time", "cost"),
        ("knee", "cost", "cost"),
    ],
)
def test_objectives_that_are_of_money_or_energy_choose_by_node_hours(
    objective: Objective, curve: Curve, by: str
) -> None:
    assert choose_stage_objective(get_quantity(objective, curve)) == by


def value(options: Sequence[dict[int, float]], path: Sequence[int], *, start: float, queue: float, by: str) -> float:
    total, before = 0.0, 0
    for stage, nodes in zip(options, path, strict=True):
        starting = start if nodes != before else 0.0
        waiting = queue if nodes != before and before else 0.0
        total += nodes * (stage[nodes] + starting) if by == "cost" else stage[nodes] + starting + waiting
        before = nodes
    return total


TIMES = st.lists(st.floats(1.0, 1000.0), min_size=4, max_size=4)


@given(
    times=st.lists(TIMES, min_size=1, max_size=4), start=st.floats(0, 300), queue=st.floats(0, 300), cost=st.booleans()
)
@settings(max_examples=150)
def test_no_other_ascending_nodes_are_better_and_those_throughout_never(
    times: list[list[float]], start: float, queue: float, cost: bool
) -> None:
    options = [dict(zip((1, 2, 4, 8), seconds, strict=True)) for seconds in times] + [{8: 100.0}]
    by: StageObjective = "cost" if cost else "time"
    stage_nodes = choose_stage_nodes(options, start=start, queue=queue, by=by)
    paths = [
        path for path in itertools.product(*options) if list(path) == sorted(path) and len({*path}) <= MAX_CHANGES + 1
    ]
    least = min(value(options, path, start=start, queue=queue, by=by) for path in paths)
    assert value(options, stage_nodes, start=start, queue=queue, by=by) == pytest.approx(least)
    assert stage_nodes in paths
    assert least <= value(options, (8,) * len(options), start=start, queue=queue, by=by)


def test_nodes_change_a_bounded_number_of_times() -> None:
    stages = [{nodes: 100.0 if nodes == 1 << k else 1e4 for nodes in (1, 2, 4, 8, 16, 32)} for k in range(5)]
    stage_nodes = choose_stage_nodes([*stages, {32: 1.0}], start=0.1, by="time")
    assert len({*stage_nodes}) == MAX_CHANGES + 1 and list(stage_nodes) == sorted(stage_nodes)


# --- which nodes may be had


def test_a_gpu_has_samples_enough_for_its_statistics_on_fewer_nodes() -> None:
    subject = job(ramp_nodes="auto")
    assert list_allowed_stage_nodes(subject, 32, nodes=8) == (1, 2, 4, 8)  # 32, 16, 8, 4 samples a GPU
    assert list_allowed_stage_nodes(subject, 16, nodes=8) == (
        1,
        2,
        8,
    )  # 4 samples are too few but where the training has them anyway
    assert list_allowed_stage_nodes(subject, 36, nodes=8) == (1, 2, 4)  # 8 do not divide it
    assert list_allowed_stage_nodes(subject, 4, nodes=8) == (1,)  # too few on any: as few nodes as there are
    assert list_allowed_stage_nodes(subject, 32, nodes=2) == (1, 2)


def test_a_stage_too_small_for_all_nodes_is_trained_on_fewer_and_without_them_left_out() -> None:
    small = {"batch": 64, "nodes": 8, "dataset_size": 1000}
    stages = {
        kind: build_ramp_on_nodes(job(ramp_nodes=kind, reference_batch=4), **small).stages for kind in ("same", "auto")
    }
    assert [stage.batch for stage in stages["same"]] == [8, 16, 32, 64]
    assert [stage.batch for stage in stages["auto"]] == [4, 8, 16, 32, 64]


def test_what_does_not_divide_among_the_nodes_of_a_stage_is_refused() -> None:
    stages = (Stage(begin=0, batch=24), Stage(begin=100, batch=32))
    with pytest.raises(SpecError, match="batch 32 is not divisible by 3"):
        assign_nodes_to_stages(stages, {24: 3}, spec=job(), nodes=8)
    with pytest.raises(SpecError, match="batch 32 would run on 2 nodes, but batch 24 before it on 4"):
        assign_nodes_to_stages(stages, {24: 4}, spec=job(), nodes=2)
    with pytest.raises(SpecError, match=r"has 16 nodes, more than the training \(8\)"):
        build_ramp_on_nodes(job(ramp=[{"epochs": 1, "batch": 32, "nodes": 16}]), batch=64, nodes=8, dataset_size=1000)
    with pytest.raises(Exception, match="nodes of the stages must not decrease"):
        job(ramp=[{"epochs": 1, "batch": 32, "nodes": 2}, {"epochs": 1, "batch": 64, "nodes": 1}])
    assert assign_nodes_to_stages(stages, {}, spec=job(), nodes=8) == stages


# --- in forecasts


def test_node_hours_and_hours_are_the_sums_over_the_stages_and_their_starts() -> None:
    grown = forecast("cost", ramp_nodes="auto").predict(Config(8, 256))
    same, plain = (forecast("cost", ramp=ramp).predict(Config(8, 256)) for ramp in ("auto", None))
    assert [stage.nodes for stage in same.stages] == [None] * 3 and same.node_hours == pytest.approx(8 * same.hours)
    nodes = [stage.nodes or 8 for stage in grown.stages]
    assert nodes == sorted(nodes) and nodes[0] == 1
    for stage, count in zip(grown.stages, nodes, strict=True):
        assert stage.step_time == pytest.approx(
            forecast("cost", ramp=None).predict(Config(count, stage.batch)).step_time
        )
    model = forecast("cost", ramp=None)
    start = float(
        model.overheads.estimate_overheads(*(__import__("numpy").array([n]) for n in (8, 32, 256))).startup[0]
    )
    changes = len({*nodes, 8}) - 1
    longer = sum(a.steps * (a.step_time - b.step_time) for a, b in zip(grown.stages, same.stages, strict=True))
    assert grown.hours - same.hours == pytest.approx((longer + changes * start) / 3600)
    steps = sum(count * stage.steps * stage.step_time for stage, count in zip(grown.stages, nodes, strict=True))
    on_eight = same.hours * 3600 - start - sum(stage.steps * stage.step_time for stage in same.stages)
    assert grown.node_hours == pytest.approx((steps + 8 * on_eight + sum({*nodes, 8}) * start) / 3600)
    assert grown.cost / same.cost == pytest.approx(grown.node_hours / (8 * same.hours))
    assert plain.node_hours == pytest.approx(8 * plain.hours)


@pytest.mark.parametrize("by", ["time", "cost"])
def test_no_configuration_is_worse_than_with_the_same_nodes_by_its_own_objective(by: StageObjective) -> None:
    same = {(row.nodes, row.batch): row for row in forecast(by, ramp="auto").predict_candidates().make_predictions()}
    rows = forecast(by, ramp_nodes="auto").predict_candidates().make_predictions()
    assert {(row.nodes, row.batch) for row in rows} == set(same)
    for row in rows:
        other = same[row.nodes, row.batch]
        if [stage.batch for stage in row.stages] != [stage.batch for stage in other.stages]:
            continue  # fewer nodes have stages that leave a GPU of more without a sample
        mine, its = ((item.hours, item.cost)[by == "cost"] for item in (row, other))
        assert mine <= its * (1 + 1e-9)
    assert any(stage.nodes for row in rows for stage in row.stages) or by == "time"


def test_a_stage_that_does_not_fit_the_memory_of_fewer_gpus_stays_where_it_fits() -> None:
    small = forecast("cost", ramp_nodes="auto")
    tight = replace(small, ooms=((1, 64), (2, 64)), probes={k: v for k, v in small.probes.items() if k[1] < 64})
    stages = tight.predict(Config(8, 256)).stages
    assert all(stage.batch // (stage.nodes or 8) < 64 for stage in stages)
    assert any(stage.batch // (stage.nodes or 8) >= 64 for stage in small.predict(Config(8, 256)).stages)


def test_the_wait_for_nodes_counts_in_the_time_and_not_in_the_cost() -> None:
    at_once, later = (
        replace(forecast("cost", ramp_nodes="auto"), queue=queue).predict(Config(8, 256)) for queue in (0, 360)
    )
    changes = len({stage.nodes or 8 for stage in later.stages} | {8}) - 1
    assert changes and later.hours - at_once.hours == pytest.approx(changes * 0.1)
    assert later.cost == pytest.approx(at_once.cost)


# --- what its jobs take


def task(subject: JobSpec, forecast_: Estimator | None) -> TrainTask:
    row = None if forecast_ is None else forecast_.predict(Config(8, 256))
    rung = Rung(batch=256, prediction=row)
    stages = build_ramp_on_nodes(subject, batch=256, nodes=8, dataset_size=12_800).stages
    return TrainTask(
        id="t-1", job="t", spec=subject, workdir="/", nodes=8, signature="s", attempt=1, ladder=(rung,), workers=0,
        stages=stages,
    )  # fmt: skip


def test_a_training_begins_on_the_nodes_of_its_first_stage_by_what_was_predicted_or_named() -> None:
    subject = forecast("cost", ramp_nodes="auto")
    result = move_task_to_stage_nodes(task(subject.spec, subject), samples=0)
    chosen = [stage.nodes or 8 for stage in subject.predict(Config(8, 256)).stages]
    assert [stage.nodes for stage in result.stages] == [*chosen, 8]
    assert [stage.begin for stage in result.stages] == [0, 6400, 12_800, 19_200]
    assert (result.nodes, result.training_nodes) == (chosen[0], 8)
    assert result.next_stage is not None and result.next_stage.nodes > result.nodes
    named = job(ramp=[{"epochs": 1, "batch": 32, "nodes": 2}, {"epochs": 1, "batch": 64}])
    expected_value = move_task_to_stage_nodes(task(named, None), samples=0)
    assert expected_value.stages == (
        Stage(begin=0, batch=32, nodes=2),
        Stage(begin=12_800, batch=64, nodes=8),
        Stage(begin=25_600, batch=256, nodes=8),
    )
    assert expected_value.next_stage == expected_value.stages[1]
    assert [move_task_to_stage_nodes(task(named, None), samples=count).nodes for count in (0, 12_799, 12_800)] == [
        2,
        2,
        8,
    ]
    assert move_task_to_stage_nodes(task(job(), None), samples=0) == task(job(), None)


def test_jobs_without_the_option_keep_their_names() -> None:
    item = job(ramp=[{"epochs": 1, "batch": 32}])
    other = job(ramp=[{"epochs": 1, "batch": 32, "nodes": 1}])
    assert (
        compute_measurement_signature(item)
        == compute_measurement_signature(other)
        == compute_measurement_signature(job(ramp_nodes="auto"))
    )
    names = [
        compute_train_signature(subject, nodes=8, batch=256) for subject in (item, other, job(), job(ramp_nodes="auto"))
    ]
    assert len({*names}) == 4
    assert names[0] == "505dfbe3" and names[2] == "d9ab36e8"
