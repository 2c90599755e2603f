"""Faults by administrators and networks during a training: it trains every sample once, and reports each fault.

The moments follow from a seed (`SEED` of `make chaos`).
"""

import random
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest
from cluster import SlurmCluster
from driver import Tula, slow_training_options
from faults import block_connection, kill_daemon, restore_connection, start_daemon
from test_recovery import TWO, attempts, finished, job, nodes_of, queue, story, submit, trained

pytestmark = [pytest.mark.slurm, pytest.mark.torch]
EPOCHS, LONG = 8, 30


@pytest.fixture
def moment(request: pytest.FixtureRequest) -> random.Random:
    """The random generator that draws the moments and victims of a test."""
    return random.Random(f"{request.config.getoption('--hypothesis-seed')} {request.node.name}")


def scontrol(*words: str) -> None:
    subprocess.run(["scontrol", *words], check=True, capture_output=True)


def begin(tula: Tula, moment: random.Random, *options: str, epochs: int = EPOCHS, pause: float = 0.05) -> None:
    """Submit a training on two nodes and let it run for a while."""
    submit(tula, *TWO, *slow_training_options(tula, epochs, pause=pause), *options)
    tula.wait_until(tula.epochs_done)
    time.sleep(moment.uniform(0.0, 1.5))


def ended(tula: Tula, *outcomes: str, epochs: int = EPOCHS) -> None:
    """Wait for the end, and hold what happened against what should have."""
    tula.wait_until(lambda: finished(tula) or (len(story(tula)) > len(outcomes) and all(how for how, _ in story(tula))))
    assert [outcome for outcome, _ in story(tula)] == [*outcomes, "done"], tula.logs()
    tula.wait_until(lambda: finished(tula))
    trained(tula, epochs)


@pytest.mark.promise(
    "the scheduler",
    "an administrator suspends the job and resumes it",
    "tula shows that the job is suspended, and does not treat its ranks as hung. Afterwards the same processes"
    " continue",
)
@pytest.mark.promise(
    "the scheduler",
    "a job of the chain is cancelled while it waits",
    "the next one still waits, because SLURM runs only one job of the chain at a time",
)
@pytest.mark.promise(
    "a node",
    "a node is drained while a job runs on it",
    "the job continues there to its end, and no later job starts on it",
)
@pytest.mark.proof
def test_a_training_goes_on_drained_suspended_and_with_a_waiting_link_cancelled(
    tula: Tula, on_slurm: SlurmCluster, moment: random.Random
) -> None:
    begin(tula, moment, "--set", "cluster.gpus_per_node=2")
    first, second, *_ = job(tula).links
    scontrol("update", f"NodeName={moment.choice(nodes_of(tula))}", "State=DRAIN", "Reason=test")
    subprocess.run(["scancel", second], check=True)
    scontrol("suspend", first)
    (status,) = tula("status")["data"]["jobs"]
    assert status["state"] == "suspended" and f"scontrol resume {first}" in status["reason"]
    time.sleep(moment.uniform(2.0, 4.0))
    assert "RUNNING" not in queue()
    scontrol("resume", first)
    until = time.monotonic() + 4.0
    while time.monotonic() < until and not finished(tula):
        assert queue().count("RUNNING") <= 1
        time.sleep(0.2)
    ended(tula)
    assert {attempt.allocation.partition(".")[0] for attempt in attempts(tula)} == {first}
    run = tula.run().path
    assert sorted(path.name for path in (run / "submitit").glob(f"{first}_*")) == [
        f"{first}_0_log.err",
        f"{first}_0_log.out",
        f"{first}_submitted.pkl",
    ], "a few files a job, however many supervisors it has"
    logs = sorted(path.name.partition(".")[2] for path in (run / "logs").glob("train-*"))
    assert logs == ["001.0001.log", "001.0002.log", "001.0003.log", "001.log"], "one a rank and attempt"


@pytest.mark.proof
@pytest.mark.promise(
    "the scheduler",
    "the controller and then the database are killed and restarted",
    "the running training loses nothing and is not submitted twice; meanwhile nothing new is submitted (exit code 5)",
)
def test_a_training_outlives_controller_and_database(tula: Tula, on_slurm: SlurmCluster, moment: random.Random) -> None:
    begin(tula, moment, epochs=LONG)
    kill_daemon(on_slurm, "slurmctld")
    try:
        assert tula("status")["data"]["jobs"][0]["state"] == "running", "its files say so"
        other = tula("train", "job.yaml", *TWO, *slow_training_options(tula, LONG + 1), code=5)
        assert "does not answer" in other["error"]["message"]
    finally:
        start_daemon(on_slurm, "slurmctld")
    kill_daemon(on_slurm, "slurmdbd")
    try:
        time.sleep(moment.uniform(0.0, 2.0))
        assert tula("status")["data"]["jobs"][0]["state"] == "running"
    finally:
        start_daemon(on_slurm, "slurmdbd")
    ended(tula, epochs=LONG)
    assert job(tula).submissions == 1
    tula.wait_until(lambda: not queue(), seconds=60)


@pytest.mark.proof
@pytest.mark.promise(
    "the scheduler",
    "an administrator requeues a job that was submitted with `--no-requeue`",
    "no other job of the chain runs at the same time, and the training resumes from the newest checkpoint",
)
def test_a_requeued_training_goes_on_and_nothing_runs_beside_it(tula: Tula, moment: random.Random) -> None:
    begin(tula, moment)
    link = job(tula).links[0]
    scontrol("update", f"JobId={link}", "Requeue=1")
    scontrol("requeue", link)
    most = 0
    while not (finished(tula) and len(story(tula)) > 1):
        most = max(most, queue().count("RUNNING"))
        time.sleep(0.2)
    assert most <= 1
    assert [outcome for outcome, _ in story(tula)][-1] == "done"
    assert attempts(tula)[1].samples, "from a checkpoint"
    trained(tula, EPOCHS)


@pytest.mark.proof
@pytest.mark.promise(
    "the scheduler",
    "an administrator shortens the time limit of a running job",
    "the ranks save when SLURM ends the job, and the next job of the chain resumes; no sample is trained twice",
)
def test_a_training_whose_time_limit_is_shortened_goes_on_in_the_next_link(tula: Tula, moment: random.Random) -> None:
    begin(tula, moment, epochs=16, pause=75 / 16 / 14)  # some 75 s, of a job that has 60 now
    scontrol("update", f"JobId={job(tula).links[0]}", "TimeLimit=1")
    ended(tula, "time_limit", epochs=16)
    assert attempts(tula)[1].samples


@pytest.mark.proof
@pytest.mark.promise(
    "a node",
    "two nodes cannot reach each other for a while",
    "their ranks exit when the connection times out, and resume from the newest checkpoint once the connection is back",
)
def test_a_training_outlives_a_partition_of_the_network(
    tula: Tula, on_slurm: SlurmCluster, moment: random.Random
) -> None:
    begin(tula, moment)
    item, other = nodes_of(tula)
    block_connection(on_slurm, item, other)
    try:
        tula.wait_until(lambda: story(tula)[0][0])
    finally:
        restore_connection(on_slurm, item, other)
    tula.wait_until(lambda: finished(tula))
    first, *others = [outcome for outcome, _ in story(tula)]
    assert first == "peer" and others[-1] == "done", tula.logs()
    trained(tula, EPOCHS)


HANGING = """
import os, pathlib, time
from emulated import Waiting
from tula_cli.worker.train import hang_watch
hang_watch.MIN_HANG_SECONDS = 3.0

class Hanging(Waiting):
    seen = 0
    def forward(self, inputs):
        self.seen += self.training
        if self.seen == {step} and os.environ["RANK"] == "{rank}" and not pathlib.Path("hung").exists():
            pathlib.Path("hung").touch()
            time.sleep(600)
        return super().forward(inputs)
"""


@pytest.mark.proof
@pytest.mark.promise(
    "a node",
    "a rank on a node hangs and does not exit",
    "tula shows the rank, its node and the line of code, and new processes resume in the same job",
)
def test_a_rank_that_hangs_on_a_node_is_the_root_and_the_job_goes_on(tula: Tula, moment: random.Random) -> None:
    rank = moment.choice((0, 1))
    pauses = slow_training_options(tula, EPOCHS)
    (tula.folder / "hanging.py").write_text(HANGING.format(step=moment.randrange(15, 40), rank=rank))
    submit(tula, *TWO, *pauses, "--set", "model={name: 'hanging:Hanging', args: {pause: 0.05}}")
    ended(tula, "hung")
    first, second = attempts(tula)
    assert first.rank == rank and "hanging.py line" in first.message and "in forward, " in first.message
    assert first.allocation == second.allocation and first.host == nodes_of(tula)[rank]


SKEWED = """
import os, time
_real, _ahead = time.time, {ahead}.get(os.uname().nodename, 0.0)
time.time = lambda: _real() + _ahead
"""


@pytest.fixture
def skewed(tula: Tula, on_slurm: SlurmCluster, moment: random.Random) -> Iterator[tuple[str, ...]]:
    """Options of a job whose nodes' clocks are apart by minutes: Python's, for the kernel has one for all nodes."""
    folder = tula.folder / "skewed"
    folder.mkdir()
    ahead = {name: round(moment.uniform(-200.0, 200.0), 1) for name in on_slurm.names}
    (folder / "sitecustomize.py").write_text(SKEWED.format(ahead=ahead))
    yield "--set", f"cluster.setup=['export PYTHONPATH={folder}']"
    shutil.rmtree(folder)


@pytest.mark.proof
@pytest.mark.promise(
    "a node",
    "the clocks of nodes differ by minutes while ranks are killed",
    "every sample is trained once, and no displayed time is negative or wrong by that difference",
)
def test_a_training_on_nodes_whose_clocks_are_apart_is_right(
    tula: Tula, on_slurm: SlurmCluster, moment: random.Random, skewed: tuple[str, ...]
) -> None:
    began = time.time()
    begin(tula, moment, *skewed, epochs=LONG)
    ranks = [pid for name in on_slurm.names for pid in on_slurm.processes(name, "-m tula_cli.worker")]
    subprocess.run(["kill", "-9", str(moment.choice(sorted(ranks)))], check=True)
    tula.wait_until(lambda: len(story(tula)) > 1 and tula.epochs_done() > 1)
    data = tula("status")["data"]
    for row in data["jobs"]:
        assert row.get("elapsed") is None or 0 <= row["elapsed"] <= time.time() - began + 60, row
    ended(tula, "signal", epochs=LONG)
