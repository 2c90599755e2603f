"""Networks of other speeds: measured, recommended and trained on, and compared with the numbers of the emulation.

The compute of `emulated.py` is sleep and the links are shaped, so the step time of every configuration is known. At
both speeds the best configuration leads those on other numbers of nodes by 35 %. Allowed are 30 % between known, measured,
predicted and trained step times: a step takes .33 s and more, to which a loaded machine adds some .05 s.
"""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import emulated
import pytest
from cluster import SlurmCluster
from driver import Tula

from tula_cli.run.records.probes import Measured
from tula_cli.run.records.recommendations import Recommendation
from tula_cli.run.records.results import Summary

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.proof]

HELPERS = Path(__file__).parents[1] / "helpers"

JOB = """
name: links
model: {name: "emulated:Sleeping"}
dataset: {name: "emulated:samples"}
optimizer: {name: SGD, lr: 0.01}
train: {epochs: 200, workers: 0, method: lbt}   # so many that starting, which depends on the load, decides nothing
search: {nodes: [1, 2, 4], min_batch: 64, max_batch: 256, strategy: sweep, min_steps: 5, min_seconds: 0, max_seconds: 0.001, max_minutes: 4,
         max_node_hours: 5}
cluster: {kind: slurm, device: cpu, minutes: 10, slurm: {memory: 1500M}}
"""
MOVES = """
name: moves
model: {name: "watched:Loaded", args: {sleep: 0.002}}   # 0.064 s on each of two nodes, 0.128 s on one
dataset: {name: "watched:samples"}
optimizer: {name: SGD, lr: 0.01}
train: {epochs: 1000, workers: 0, method: lbt}
search: {nodes: [1, 2], min_batch: 64, max_batch: 64, min_steps: 5, min_seconds: 0, max_seconds: 0.001, max_minutes: 4,
         max_node_hours: 5}
cluster: {kind: slurm, device: cpu, minutes: 10, slurm: {memory: 1500M}}
"""
SETTLED = 30  # rows of steps, a look or two each, after which their level is known
GRADIENTS = 4 * emulated.FEATURES * emulated.CLASSES  # bytes
WITHIN = 0.3


@pytest.fixture
def over_links(on_slurm: SlurmCluster, tmp_path: Path) -> Callable[[int], Tula]:
    """The command line in a folder with the emulated job, after all links were given a speed in Mbit/s."""

    def at(rate: int) -> Tula:
        for node in on_slurm.names:
            on_slurm.set_rate(node, f"{rate}mbit")
        shutil.copy(emulated.__file__, tmp_path)
        return Tula(tmp_path, JOB)

    return at


def queue() -> str:
    return subprocess.run(["squeue", "-h"], capture_output=True, text=True, check=True).stdout


def step_time(nodes: int, local_batch: int, *, rate: int) -> float:
    """Return the seconds of a step: the sleep, and a ring over links of so many Mbit/s that hides behind nothing."""
    traffic = 2 * (nodes - 1) / nodes * GRADIENTS
    return emulated.FIXED_SECONDS + emulated.SECONDS_PER_SAMPLE * local_batch + traffic / (rate * 1e6 / 8)


def recommended(tula: Tula) -> Recommendation:
    tula("profile", "job.yaml")
    tula.wait_until(
        lambda: len(tula.run().read_results()) == 6
    )  # sooner than --wait, which asks SLURM now and then only
    tula("recommend", "--objective", "time")
    result = tula.run().read_recommendation()
    assert result is not None
    return result


def trained(tula: Tula) -> Summary:
    """Train some epochs as recommended."""
    tula("train", "--set", "train.epochs=2")
    run = tula.run()
    result: list[Summary] = tula.wait_until(
        lambda: [s for name in run.list_train_signatures() if (s := run.get_training(name).read_summary())]
    )
    return result[0]


@pytest.mark.parametrize(("rate", "nodes"), [(66, 4), (7, 1)])
def test_the_choice_follows_the_speed_of_the_links(over_links: Callable[[int], Tula], rate: int, nodes: int) -> None:
    tula = over_links(rate)
    answer = recommended(tula)
    measured = {(r.nodes, r.local_batch) for r in tula.run().read_results() if isinstance(r, Measured)}
    assert measured == {(1, 64), (1, 128), (1, 256), (2, 32), (4, 16), (4, 32)}

    known = {(row.nodes, row.batch): step_time(row.nodes, row.local_batch, rate=rate) for row in answer.rows}
    assert len(known) == 9
    assert {(r.nodes, r.batch): r.step_time for r in answer.rows} == pytest.approx(known, rel=WITHIN)
    fastest = min(known, key=lambda config: known[config] / config[1])
    assert fastest == (nodes, 256)
    choice = answer.choice
    assert choice.nodes == nodes
    # The next batch on the same nodes is but 10 % behind: either is a right answer to what was measured.
    assert known[nodes, choice.batch] / choice.batch <= 1.1 * known[fastest] / 256

    summary = trained(tula)
    assert (summary.nodes, summary.batch, summary.attempts) == (nodes, choice.batch, 1)
    assert summary.predicted_step == choice.step_time
    assert summary.actual_step == pytest.approx(summary.predicted_step, rel=WITHIN)


@pytest.mark.promise(
    "a node",
    "the network link of a node becomes slow",
    "`tula status` shows since when, and how much later the training will end. No sample is lost, even if the"
    " training resumes on other nodes",
)
def test_a_link_that_slows_down_is_reported_and_the_training_goes_on_elsewhere(
    on_slurm: SlurmCluster, tmp_path: Path
) -> None:
    """A megabyte takes 0.04 s over the links at first, and 0.4 s then: two nodes are slower than one."""
    shutil.copy(HELPERS / "watched.py", tmp_path)  # not imported: it sets the pace of its process
    tula = Tula(tmp_path, MOVES)
    tula("profile", "job.yaml")
    tula.wait_until(lambda: len(tula.run().read_results()) == 2)
    begun = tula("train", "--nodes", "1-2", "--batch", "64")["data"]["plan"]["task"]
    training = tula.run().get_training(begun["signature"])
    tula.wait_until(lambda: sum(row["kind"] == "step" for row in training.read_metrics()) >= SETTLED)
    for node in on_slurm.names:
        on_slurm.set_rate(node, "20mbit")
    change = tula.wait_until(
        lambda: [result for result in training.read_step_changes() if result.after.step > result.before.step]
    )[0]
    assert change.parts == ("network",)
    assert change.before.sync is not None and change.after.sync is not None
    assert change.after.sync > 2 * change.before.sync and change.seconds_left > change.seconds_left_before

    tula("cancel")
    tula.wait_until(
        lambda: not queue()
    )  # a loaded machine may not have saved in SLURM's few seconds: it goes on all the same
    saved = training.find_newest_checkpoint_samples()
    tula("train", "--nodes", "1-1", "--batch", "64")
    later = tula.wait_until(
        lambda: [row for row in training.read_metrics() if row["kind"] == "epoch" and row["samples"] > saved]
    )

    rows = training.read_metrics()
    starts = [(row["nodes"], row["batch"], row["samples"]) for row in rows if row["kind"] == "start"]
    assert starts == [(2, 64, 0), (1, 64, saved)] and saved > change.samples
    assert [attempt.samples for attempt in training.read_attempts()] == [0, saved]
    epochs = [(row["epoch"], row["samples"]) for row in rows if row["kind"] == "epoch"]
    assert epochs == [(epoch + 1, 1024 * (epoch + 1)) for epoch in range(later[-1]["epoch"])], (
        "no sample is lost or twice"
    )
