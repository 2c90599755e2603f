"""`tula recommend --with-run`: probes of the same job with other numbers of GPUs a node."""

import shutil
from pathlib import Path

import pytest
from make_results import Truth, measured, spec

from tula_cli.errors import BadMeasurements, Infeasible, SpecError
from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import ProbeTask
from tula_cli.services import train
from tula_cli.services.events import WarningEvent
from tula_cli.services.recommend import recommend, store_answer
from tula_cli.services.recommendation.answer import Answer
from tula_cli.services.recommendation.limits import Criteria

BATCHES = (16, 64, 256)


def run_of(root: Path, gpus: int, nodes: tuple[int, ...], **sections: object) -> RunDir:
    """Return a run in which nodes of some GPUs were measured, whose synchronisation between nodes takes 90 ms and more."""
    job = spec(cluster={"gpus_per_node": gpus}, search={"nodes": list(nodes), "max_batch": 4096}, **sections)
    run = RunDir.create(root, job)
    truth = Truth(gpus_per_node=gpus, sync=0.18)
    for count in nodes:
        for local in BATCHES:
            run.write_result(measured(truth, count, local))
    return run


@pytest.fixture
def large(tmp_path: Path) -> RunDir:
    """One node of eight GPUs."""
    return run_of(tmp_path, 8, (1,))


def ask(run: RunDir, *others: Path, nodes: int = 4) -> Answer:
    return recommend(run, run.spec(), objective="time", nodes=nodes, with_runs=others, now=1.0)


def test_several_large_nodes_follow_from_one_and_from_several_small_ones(large: RunDir, tmp_path: Path) -> None:
    with pytest.raises(Infeasible, match="on 4 nodes: only one node was measured"):
        ask(large)
    small = run_of(tmp_path, 1, (1, 2))
    found = ask(large, small.path).recommendation
    assert {(row.nodes, row.further, row.measured) for row in found.rows} == {(4, True, False)}
    truth = Truth(gpus_per_node=8, sync=0.18)
    for row in found.rows:
        seconds = measured(truth, 4, row.local_batch).step_times[0]
        assert row.step_low is not None and row.step_high is not None and row.step_low < seconds < row.step_high
    said = " ".join(found.warnings)
    assert f"the fit takes the probes of run {small.path.name} as well (6 probes, 1 GPU a node)" in said
    assert "no probe had 8 GPUs a node on more than 1 node: what 4 nodes take follows from probes with other" in said
    assert ask(large, Path(small.path.name)).recommendation.rows == found.rows, "its name beside the run will do"


def test_what_was_measured_stays_as_it_was(large: RunDir, tmp_path: Path) -> None:
    alone, more = (ask(large, *paths, nodes=1).recommendation for paths in ((), (run_of(tmp_path, 1, (1, 2)).path,)))
    seconds = [{row.batch: row.step_time for row in found.rows if row.measured} for found in (alone, more)]
    assert seconds[0] == seconds[1] and seconds[0]
    assert all(row.nodes == 1 for row in more.rows)


def test_a_run_of_another_job_is_refused(large: RunDir, tmp_path: Path) -> None:
    other = run_of(tmp_path / "other", 1, (1, 2), train={"epochs": 10, "precision": "bf16"})
    with pytest.raises(SpecError, match="more than its GPUs a node differs"):
        ask(large, other.path)
    same = run_of(tmp_path / "same", 8, (2,))
    with pytest.raises(SpecError, match="8 GPUs a node, as this run has"):
        ask(large, same.path)
    empty = RunDir.create(tmp_path / "empty", spec(cluster={"gpus_per_node": 1}))
    with pytest.raises(BadMeasurements, match="nothing was measured there"):
        ask(large, empty.path)
    with pytest.raises(SpecError, match="no such run"):
        ask(large, tmp_path / "nowhere")


def test_other_code_or_other_hardware_is_refused(large: RunDir, tmp_path: Path) -> None:
    edited = run_of(tmp_path / "edited", 1, (1, 2))
    edited.write_task(
        ProbeTask(id="p", job="p", spec=edited.spec(), workdir="/", nodes=1, local_batches=(1,), code="1234")
    )
    with pytest.raises(SpecError, match="more than its GPUs a node differs"):
        ask(large, edited.path)
    small = run_of(tmp_path / "small", 1, (1,))
    small.write_result(measured(Truth(hardware="H100", sync=0.18), 2, 16))
    with pytest.raises((BadMeasurements, Infeasible), match="different hardware"):
        ask(large, small.path)


def test_it_is_part_of_the_question_and_not_for_a_training_under_way() -> None:
    assert Criteria(with_runs=(Path("/runs/a-1"),)).options == ["--with-run a-1"]
    with pytest.raises(SpecError, match="--from-training"):
        Criteria(with_runs=(Path("a"),), from_training=True)


def prepared(run: RunDir) -> tuple[train.PreparedTraining, list[str]]:
    """Return the training that is recommended, and what is warned of."""
    preparing, told = train.prepare_training(run, run.spec(), pytest.fail), []
    while True:
        try:
            told += [event.text for event in [next(preparing)] if isinstance(event, WarningEvent)]
        except StopIteration as end:
            return end.value, told


def test_what_is_trained_is_predicted_by_the_other_run_too(large: RunDir, tmp_path: Path) -> None:
    small = run_of(tmp_path, 1, (1, 2))
    answer = ask(large, Path(small.path.name))
    store_answer(large, large.spec(), answer)
    ready, told = prepared(large)
    assert told == [] and ready.plan.prediction is not None
    chosen = answer.recommendation.choice
    assert ready.plan.prediction.step_time == pytest.approx(chosen.step_time)
    assert ready.plan.prediction.cost == pytest.approx(chosen.cost)
    assert all(rung.prediction is not None for rung in ready.plan.task.ladder), "smaller batches too"


def test_where_the_other_run_is_gone_that_is_said_and_the_training_starts(large: RunDir, tmp_path: Path) -> None:
    small = run_of(tmp_path, 1, (1, 2))
    store_answer(large, large.spec(), ask(large, small.path))
    shutil.rmtree(small.path)
    ready, told = prepared(large)
    assert ready.plan.prediction is None and ready.plan.task.nodes == 4
    (line,) = told
    assert f"predicted without {small.path.name}: no such run" in line
