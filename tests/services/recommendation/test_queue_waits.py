from pathlib import Path

import pytest
from make_results import Truth, probe_all, spec

from tula_cli.cluster.slurm.accounting.waits import Estimate, WaitHistory
from tula_cli.errors import SpecError
from tula_cli.models.queue.size_classes import PastWait
from tula_cli.run.directory import RunDir
from tula_cli.services.recommend import recommend
from tula_cli.services.recommendation.queue_waits import MOST_ASKED, as_chosen, first_bound

NOW = 1_700_000_000.0
SWEEP = {1: (16, 64, 256), 2: (16, 32, 64, 128, 256), 4: (8,), 8: (4, 64)}


class MadeUp:
    """A queue in which many nodes and long limits wait long."""

    def __init__(self, *, per_node: float, estimate: float | None = None) -> None:
        self.per_node, self.told = per_node, estimate
        self.asked: list[tuple[int, int]] = []

    def history(self, run: object, spec: object, *, now: float) -> WaitHistory:
        waits = [
            PastWait(
                now - 5000 + number - self.per_node * nodes * minutes / 60,
                self.per_node * nodes * minutes / 60,
                nodes,
                minutes,
            )
            for nodes in (1, 2, 4, 8, 16)
            for minutes in (60, 240, 720, 1440)
            for number in range(60)
        ]
        return WaitHistory(waits, "made-up jobs")

    def estimate(self, run: object, spec: object, *, nodes: int, minutes: int, now: float) -> Estimate:
        self.asked.append((nodes, minutes))
        words = "" if self.told is not None else "nobody tells"
        return Estimate(nodes=nodes, minutes=minutes, partition="", asked_at=now, wait=self.told, words=words)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    job = spec(search={"max_batch": 4096}, cluster={"kind": "slurm", "slurm": {"minutes": 1440}})
    found = RunDir.create(tmp_path, job)
    for result in probe_all(Truth(noise=0.01), SWEEP):
        found.write_result(result)
    return found


def ask(run: RunDir, queue: MadeUp):
    return recommend(run, run.spec(), objective="result-time", now=NOW, queue=queue).recommendation


def test_a_calm_queue_changes_nothing_and_a_long_one_takes_fewer_nodes(run: RunDir) -> None:
    fastest = recommend(run, run.spec(), objective="time", now=NOW).recommendation.choice
    assert ask(run, MadeUp(per_node=0.0)).choice.nodes == fastest.nodes
    busy = ask(run, MadeUp(per_node=1000.0)).choice
    assert busy.nodes < fastest.nodes
    assert busy.result_time is not None and busy.result_time.wait > 0


def test_a_shorter_limit_is_taken_where_that_waits_less(run: RunDir) -> None:
    choice = ask(run, MadeUp(per_node=500.0)).choice
    assert choice.result_time is not None and choice.result_time.minutes < 1440
    assert choice.result_time.links >= choice.hours / (choice.result_time.minutes / 60)
    job = as_chosen(run.spec(), choice)
    assert job.cluster.slurm is not None and job.cluster.slurm.minutes == choice.result_time.minutes
    assert as_chosen(run.spec(), choice.model_copy(update={"result_time": None})) == run.spec()


def test_the_choice_is_the_least_of_wait_and_run(run: RunDir) -> None:
    found = ask(run, MadeUp(per_node=2000.0))
    assert all(row.result_time for row in found.rows)
    least = min(row.result_time.hours for row in found.rows)  # but for what uncertain forecasts are passed over by
    assert least <= found.choice.result_time.hours <= 1.005 * least
    for row in found.rows:
        assert row.result_time.hours >= row.hours + row.result_time.wait
        assert row.result_time.bound >= row.result_time.first_bound


def test_the_schedulers_estimate_is_chosen_by_and_never_lowers_the_bound(run: RunDir) -> None:
    queue = MadeUp(per_node=2000.0, estimate=10.0)
    found = ask(run, queue)
    assert len(queue.asked) == len(set(queue.asked)) <= MOST_ASKED
    own = found.choice.result_time
    assert own is not None and own.wait < own.bound and own.first_bound >= 2000.0 / 3600
    late = ask(run, MadeUp(per_node=2000.0, estimate=1e6)).choice.result_time
    assert late is not None and late.first_bound >= 1e6 / 3600


def test_what_the_wait_rests_on_is_named(run: RunDir) -> None:
    found = ask(run, MadeUp(per_node=2000.0))
    assert "the shortest time to the result" in found.reason
    assert "90 % bound" in found.reason and "made-up jobs" in found.reason and "nobody tells" in found.reason
    assert found.queue == (
        "bounds of 90 % by waits of made-up jobs",
        "the scheduler estimates no start (nobody tells)",
    )


def test_the_bound_goes_with_the_training_that_was_recommended(run: RunDir) -> None:
    found = ask(run, MadeUp(per_node=2000.0))
    choice = found.choice
    assert first_bound(found, nodes=choice.nodes, batch=choice.batch) == 3600 * choice.result_time.first_bound
    assert first_bound(found, nodes=choice.nodes, batch=2 * choice.batch) is None
    assert first_bound(None, nodes=1, batch=1) is None


def test_on_one_machine_there_is_no_queue(tmp_path: Path) -> None:
    alone = RunDir.create(tmp_path, spec(search={"max_batch": 4096}))
    for result in probe_all(Truth(noise=0.01), SWEEP):
        alone.write_result(result)
    with pytest.raises(SpecError, match=r"cluster\.kind is local"):
        recommend(alone, alone.spec(), objective="result-time", now=NOW)
