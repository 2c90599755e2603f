"""`search.gpus_per_node`: one job measured, chosen and trained with several numbers of GPUs a node."""

import math
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from make_results import Truth, make_probe, make_spec
from make_runs import create_runs
from read_diagnostics import codes, values

from tula_cli.errors import BadMeasurements
from tula_cli.options import TrainRequest
from tula_cli.query import Query
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.job_runs import make_runs, open_runs_of_job
from tula_cli.services import train
from tula_cli.services.recommend import Answer, recommend_configuration
from tula_cli.services.recommendation_files import save_answer
from tula_cli.services.search import choose_probes
from tula_cli.spec.job import JobSpec

SYNC = 0.18


class Overlapped(Truth):
    """A backward pass hides as much of the synchronisation as it can, of which nodes of several GPUs have more."""

    def step_time(self, nodes: int, local_batch: int) -> float:
        sync = self.sync * (1 - 1 / nodes) + 0.02 * (1 - 1 / self.gpus_per_node)
        return math.hypot(self.fixed + self.slope * local_batch, sync)


def job(**search: object) -> JobSpec:
    searched = {"nodes": [1, 2, 4], "gpus_per_node": [1, 2, 4], "max_batch": 4096, **search}
    return make_spec(cluster={"gpus_per_node": 4}, search=searched, pricing={"price": 1.0, "kind": "gpu_hour"})


def planned(part: Run) -> dict[int, tuple[int, ...]]:
    return choose_probes(part.spec, dataset_size=50_000, max_local_batch=1024)


def truth(part: Run) -> Truth:
    return Overlapped(gpus_per_node=part.spec.cluster.gpus_per_node, sync=SYNC)


def write(part: Run) -> None:
    for nodes, local_batches in planned(part).items():
        for local in local_batches:
            part.write_result(make_probe(truth(part), nodes, local))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    runs = create_runs(tmp_path, job())
    for part in runs:
        write(part)
    return runs[0]


def ask(run: RunDir, **limits: Any) -> Answer:
    return recommend_configuration(open_runs_of_job(run), Query(objective="time", **limits), now=1.0)


def test_fewer_gpus_than_the_most_are_probed_twice_on_the_fewest_nodes(run: RunDir) -> None:
    item, two, four = open_runs_of_job(run)
    assert [part.type for part in (item, two, four)] == ["gpus-1", "gpus-2", "gpus-4"]
    assert planned(item) == {1: (32, 256)} and planned(two) == {1: (16, 128)}
    assert {nodes: len(batches) for nodes, batches in planned(four).items()} == {1: 8, 2: 1, 4: 3}
    every = make_runs(run.path.parent, job(strategy="full"))
    assert [sum(map(len, planned(part).values())) for part in every] == [21, 23, 24]


def test_what_was_measured_at_one_number_of_gpus_tells_of_the_others(run: RunDir) -> None:
    rows = ask(run).with_all_rows().rows
    assert {(row.type, row.nodes) for row in rows} == {(f"gpus-{g}", n) for g in (1, 2, 4) for n in (1, 2, 4)}
    off, inside = [], []
    for row in rows:
        seconds = Overlapped(gpus_per_node=int(row.type[-1]), sync=SYNC).step_time(row.nodes, row.local_batch)
        off.append(abs(row.step_time / seconds - 1))
        inside.append((row.step_low or 0.0) <= seconds <= (row.step_high or 0.0))
        assert row.further is (row.type != "gpus-4" and row.nodes > 1), "no probe of its GPUs was on as many nodes"
    assert median(off) < 0.05 and max(off) < 0.4 and sum(inside) >= 0.9 * len(rows)


def test_each_counts_with_its_own_price_and_the_cheapest_is_chosen_among_all(run: RunDir) -> None:
    answer = recommend_configuration(open_runs_of_job(run), Query(objective="cost"), now=1.0)
    recommendation, every = answer.recommendation, answer.with_all_rows().rows
    rows = {(row.type, row.nodes, row.batch): row for row in every}
    for kind, gpus in (("gpus-1", 1), ("gpus-4", 4)):
        row = rows[kind, 2, 1024]
        assert row.cost == pytest.approx(row.hours * 2 * gpus)
    assert recommendation.choice.cost == min(row.cost for row in every)


def test_the_table_tells_gpus_of_each_line(run: RunDir) -> None:
    answer = ask(run)
    save_answer(open_runs_of_job(run), answer)
    header, *lines = (line.split(",") for line in (answer.chosen_run.path / "results.csv").read_text().splitlines())
    message = {(line[header.index("node_type")], line[header.index("gpus_per_node")]) for line in lines}
    assert message == {("gpus-1", "1"), ("gpus-2", "2"), ("gpus-4", "4")}


def test_training_is_predicted_as_it_was_recommended(run: RunDir) -> None:
    row = next(row for row in ask(run).with_all_rows().rows if (row.type, row.nodes, row.batch) == ("gpus-2", 4, 2048))
    part = open_runs_of_job(run)[1]
    preparing = train.prepare_training(
        open_runs_of_job(run), TrainRequest(nodes=4, batch=2048, node_type="gpus-2"), pytest.fail
    )
    messages = []
    while True:
        try:
            messages.append(next(preparing))
        except StopIteration as end:
            ready = end.value
            break
    assert ready.run.spec == part.spec and ready.plan.prediction is not None
    assert ready.plan.prediction.step_time == pytest.approx(row.step_time) and not row.measured


def test_one_that_was_not_measured_is_left_out_and_tells_nothing(tmp_path: Path) -> None:
    item, _, run = create_runs(tmp_path, job())
    write(run)
    answer = ask(run)
    recommendation = answer.recommendation
    assert {row.type for row in recommendation.rows} == {"gpus-4"}
    assert codes(answer.warnings).count("node-type-left-out") == 2
    before = next(row for row in recommendation.rows if (row.nodes, row.batch) == (2, 512))
    write(item)
    after = next(r for r in ask(run, node_type="gpus-4").recommendation.rows if (r.nodes, r.batch) == (2, 512))
    assert after.step_time != before.step_time, "asked for one type alone, the others' probes count too"


def test_a_choice_on_more_nodes_than_its_gpus_were_probed_on_says_what_it_follows_from(run: RunDir) -> None:
    answer = ask(run, node_type="gpus-2", nodes=4)
    assert {(row.nodes, row.further, row.measured) for row in answer.recommendation.rows} == {(4, True, False)}
    expected = {"nodes": 4, "probed_nodes": 1, "gpus_per_node": 2}
    assert values(answer.warnings, "beyond-probed-nodes") == expected


def test_probes_of_other_sizes_on_other_hardware_are_refused(tmp_path: Path) -> None:
    small, _, run = create_runs(tmp_path, job())
    write(run)
    for local_batch in (32, 256):
        small.write_result(make_probe(Truth(hardware="H100", sync=SYNC), 1, local_batch))
    with pytest.raises(BadMeasurements, match="different hardware"):
        ask(run)


def test_node_types_each_have_their_own(tmp_path: Path) -> None:
    typed = make_spec(
        search={"nodes": [1, 2], "max_batch": 1024},
        cluster={"gpus_per_node": 4},
        node_types={"a": {"search": {"gpus_per_node": [1, 4]}}, "b": {"cluster": {"gpus_per_node": 2}}},
    )
    parts = {part.type: part for part in make_runs(tmp_path, typed)}
    assert {name: [other.type for other in part.runs_of_other_sizes] for name, part in parts.items()} == {
        "a-gpus-1": ["a-gpus-4"], "a-gpus-4": ["a-gpus-1"], "b": [],
    }  # fmt: skip
    assert [part.spec.cluster.gpus_per_node for part in parts.values()] == [1, 4, 2]
