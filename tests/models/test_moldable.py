"""Which numbers of nodes a job may be granted: what divides, fits the memory, and is within the limits that were recommended."""

import make_runs
import pytest
from make_results import MIB, Truth, make_probes, make_spec

from tula_cli.errors import Infeasible, SpecError
from tula_cli.models.estimator import Estimator
from tula_cli.models.moldable import choose_job_sizes
from tula_cli.options import NodeRange, parse_nodes
from tula_cli.run.records.recommendations import Stage
from tula_cli.run.records.tasks import JobSize, TrainTask
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate_job

SWEEP = {2: (16, 32, 64, 128), 4: (8, 64), 8: (4, 32), 16: (2, 16)}
ON_SLURM = {"cluster": {"kind": "slurm"}, "search": {"nodes": [1, 2, 4, 8, 16]}}


def choose(
    bounds: NodeRange,
    batch: int,
    *,
    limits: dict[str, float] | None = None,
    truth: Truth | None = None,
    **changes: object,
) -> tuple[JobSize, ...]:
    job = make_spec(**{**ON_SLURM, **changes})
    estimator = None if truth is None else Estimator.fit(job, make_probes(truth, SWEEP))
    recommendation = make_runs.recommendation(choice=make_runs.prediction(8, batch), limits=limits or {})
    return choose_job_sizes(job, bounds, batch, estimator=estimator, recommendation=recommendation)


def nodes_of(sizes: tuple[JobSize, ...]) -> list[int]:
    return [size.nodes for size in sizes]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4", 4), ("2-8", NodeRange(2, 8)), ("2-", NodeRange(2)), ("-8", NodeRange(most=8)), ("auto", NodeRange())],
)
def test_nodes_are_a_number_or_a_range(text: str, expected: int | NodeRange) -> None:
    assert parse_nodes(text) == expected


@pytest.mark.parametrize("text", ["0", "0-4", "00-4", "-0", "-1", "8-2", "-", "two", "2-4-8", ""])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match=f"--nodes {text}:"):
        parse_nodes(text)


def test_only_nodes_among_which_the_batch_divides_are_used() -> None:
    sizes = choose(NodeRange(2, 8), 96)
    assert nodes_of(sizes) == [2, 3, 4, 6, 8]
    assert all(size.ladder[0].batch == 96 and size.prediction is None for size in sizes)
    assert nodes_of(choose(NodeRange(2, 8), 96, cluster={"kind": "slurm", "gpus_per_node": 4})) == [2, 3, 4, 6, 8]
    assert nodes_of(choose(NodeRange(3, 8), 32)) == [4, 8]


def test_a_range_without_such_a_number_is_refused() -> None:
    with pytest.raises(Infeasible, match="from 3 to 3"):
        choose(NodeRange(3, 3), 32)
    with pytest.raises(Infeasible, match="lower bound is 9, and its upper bound from the recommendation is 8"):
        choose(NodeRange(9), 32)


def test_a_range_may_end_far_above_the_batch() -> None:
    assert nodes_of(choose(NodeRange(16, 999_999_999), 32)) == [16, 32]


def test_a_batch_that_does_not_fit_few_nodes_is_computed_there_in_parts() -> None:
    truth = Truth(capacity=800 * MIB)  # 400 MiB and 2 MiB a sample: at most some 180 with the margin
    sizes = choose(NodeRange(2, 8), 512, truth=truth)
    assert [(size.nodes, size.splits, size.micro_batch) for size in sizes] == [(2, 2, 128), (4, 1, 128), (8, 1, 64)]
    assert all(size.prediction is not None for size in sizes)
    slower, faster = sizes[0].prediction, sizes[1].prediction
    assert slower is not None and faster is not None and slower.hours > faster.hours
    shrinking = {"epochs": 10, "method": "ags", "oom_policy": "shrink"}
    assert nodes_of(choose(NodeRange(2, 8), 512, truth=truth, train=shrinking)) == [4, 8]


def script_job(arguments: str) -> JobSpec:
    script = {"command": f"train.py {arguments}", "length": {"samples": 5120}, "reference": {"batch": 64}}
    return validate_job({"script": script, "cluster": {"kind": "slurm", "device": "cpu"}}, source="test")


def test_of_a_script_only_one_that_accumulates_is_given_smaller_micro_batches_after_an_out_of_memory() -> None:
    whole, divided = (
        moldable_task(job, choose_job_sizes(job, NodeRange(2, 8), 512, estimator=None, recommendation=None))
        for job in (script_job("-b {local_batch}"), script_job("-b {micro_batch} -a {accumulate}"))
    )
    assert whole.node_counts == divided.node_counts == (2, 4, 8)
    shrunk = [task.model_copy(update={"max_micro_batch": 64}).with_granted_nodes(2) for task in (whole, divided)]
    assert [(task.nodes, task.batch, task.splits) for task in shrunk] == [(2, 512, 1), (2, 512, 4)]


def test_open_bounds_follow_from_deadline_efficiency_and_the_recommended_nodes() -> None:
    truth = Truth()
    assert nodes_of(choose(NodeRange(), 256, truth=truth)) == [1, 2, 4, 8]
    assert nodes_of(choose(NodeRange(most=16), 256, truth=truth)) == [2, 4, 8, 16], (
        "an eighth of the most is worth a start"
    )
    every = choose(NodeRange(2, 16), 256, truth=truth)
    hours = {size.nodes: size.prediction.hours for size in every if size.prediction}
    efficiency = {size.nodes: size.prediction.scaling_efficiency for size in every if size.prediction}
    assert nodes_of(choose(NodeRange(), 256, truth=truth, limits={"deadline_hours": hours[4] + 0.01})) == [4, 8]
    least = (efficiency[4] or 0) - 0.001
    assert max(nodes_of(choose(NodeRange(2), 256, truth=truth, limits={"min_efficiency": least}))) == 4
    of_many = choose(NodeRange(), 256, truth=truth, limits={"min_efficiency": least, "max_nodes": 64})
    assert nodes_of(of_many) == [1, 2, 4], (
        "it begins at an eighth of its end, not of the most nodes that are considered"
    )
    assert nodes_of(
        choose(NodeRange(2, 16), 256, truth=truth, limits={"deadline_hours": 0.001, "min_efficiency": least})
    ) == [2, 4, 8, 16], "bounds that are given are taken as they are"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cluster": {"kind": "local"}}, "only SLURM"),
        ({"train": {"method": "ags", "ramp": [{"epochs": 1, "batch": 32, "nodes": 1}]}}, "train.ramp_nodes"),
        ({"train": {"method": "ags", "ramp": "auto", "ramp_nodes": "auto"}}, "train.ramp_nodes"),
        ({"train": {"method": "polo"}}, "train.method: polo"),
        ({"train": {"method": "auto"}}, "train.method: auto"),
        ({"cluster": {"kind": "slurm", "slurm": {"gpus": "gpus_per_task"}}}, "gpus_per_task"),
    ],
)
def test_jobs_that_cannot_use_what_they_are_granted_are_refused(changes: dict[str, object], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        choose(NodeRange(2, 8), 64, **changes)


def moldable_task(job: JobSpec, sizes: tuple[JobSize, ...]) -> TrainTask:
    largest = sizes[-1]
    return TrainTask(
        id="train-s-1", job="train-s", spec=job, workdir="/", nodes=largest.nodes, signature="s", attempt=1,
        ladder=largest.ladder, workers=0, sizes=sizes, splits=largest.splits,
    )  # fmt: skip


def test_a_task_takes_the_largest_size_that_it_is_granted_and_keeps_its_batch() -> None:
    job = make_spec(**ON_SLURM)
    task = moldable_task(job, choose(NodeRange(2, 8), 512, truth=Truth(capacity=800 * MIB)))
    assert (task.node_counts, task.training_nodes) == ((2, 4, 8), 8)
    for granted, nodes, splits in ((8, 8, 1), (7, 4, 1), (3, 2, 2), (2, 2, 2)):
        resized = task.with_granted_nodes(granted)
        assert (resized.nodes, resized.batch, resized.splits) == (nodes, 512, splits)
        assert resized.prediction == next(size.prediction for size in task.sizes if size.nodes == nodes)
    shrunk = task.with_granted_nodes(2).model_copy(update={"max_micro_batch": 32})  # after an out-of-memory
    assert [shrunk.with_granted_nodes(nodes).splits for nodes in (4, 8)] == [4, 2]
    stages = (Stage(begin=0, batch=4), Stage(begin=100, batch=512))
    assert task.model_copy(update={"stages": stages}).with_divisible_sizes().node_counts == (2, 4)
    smaller = task.model_copy(update={"ladder": task.ladder[1:]})
    assert smaller.with_granted_nodes(4).batch == 256
