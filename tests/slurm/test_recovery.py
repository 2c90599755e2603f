"""Faults of clusters during a training: it ends as an undisturbed one, and reports each fault."""

import itertools
import json
import subprocess
from pathlib import Path

import pytest
from cluster import SlurmCluster
from driver import TIMEOUT_SECONDS, Tula, slow_training_options

from tula_cli.run.directory import RunDir
from tula_cli.run.records.jobs import Attempt, Job
from tula_cli.run.records.results import Summary

pytestmark = [pytest.mark.slurm, pytest.mark.torch]
SAMPLES = 1437 // 128 * 128  # of an epoch at batch 128
ONE, TWO = (("--nodes", nodes, "--batch", "128") for nodes in ("1", "2"))
PASSES = 14  # of an epoch: 11 steps and the batches of the evaluation
FEW_NODES = pytest.mark.parametrize("nodes", [ONE, pytest.param(TWO, marks=pytest.mark.proof)], ids=["one", "two"])
"""Each node of a job imports torch for itself: most of what a short job costs."""


def story(tula: Tula) -> list[tuple[str | None, str]]:
    """Return how each attempt ended, and its nodes."""
    return [(attempt.outcome, attempt.hosts) for attempt in attempts(tula)]


def attempts(tula: Tula) -> list[Attempt]:
    run = tula.run()
    return [attempt for name in run.list_train_signatures() for attempt in run.get_training(name).read_attempts()]


def job(tula: Tula) -> Job:
    result = tula.run().find_job(tula.task().job)
    assert result is not None
    return result


def finished(tula: Tula) -> Summary | None:
    """Return the training's summary once its last attempt has been closed, which comes after."""
    run = tula.run()
    if not all(outcome for outcome, _ in story(tula)):
        return None
    return next(
        (summary for name in run.list_train_signatures() if (summary := run.get_training(name).read_summary())), None
    )


def trained(tula: Tula, epochs: int) -> None:
    """Assert that every sample was trained once and every epoch told once, whatever happened."""
    run = tula.run()
    signature = run.list_train_signatures()[0]
    result = run.get_training(signature).read_result()
    assert result is not None
    assert result.samples == epochs * SAMPLES
    rows = [row["samples"] for row in run.get_training(signature).read_metrics() if row["kind"] == "epoch"]
    assert rows == [SAMPLES * (epoch + 1) for epoch in range(epochs)]
    starts = [attempt.samples for attempt in attempts(tula)]
    assert starts == sorted(starts), "no start lies behind the newest checkpoint"


def queue() -> str:
    return subprocess.run(["squeue", "-h", "-o", "%i %T"], capture_output=True, text=True, check=True).stdout


def accounted(*ids: str) -> list[str]:
    """Return the states of jobs as the accounting has them, which lags."""
    words = ["sacct", "-n", "-P", "-X", "-o", "State", "-j", ",".join(ids)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]


def nodes_of(tula: Tula) -> list[str]:
    """Return the nodes of the attempt under way, that of rank 0 first."""
    hosts = attempts(tula)[-1].hosts
    words = ["scontrol", "show", "hostnames", hosts]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()


def submit(tula: Tula, *options: str) -> None:
    answer = tula("train", "job.yaml", *options)
    assert answer["status"] == "pending"


@pytest.mark.promise(
    "the scheduler",
    "the time limit is reached",
    "the ranks save before it, and the next job of the chain resumes; no sample is trained twice",
)
@pytest.mark.proof
def test_the_chain_goes_on_after_a_time_limit_and_nothing_is_trained_twice(tula: Tula) -> None:
    # 56 s of pauses at least, of which a minute's allocation has room for less than 50.
    submit(tula, *ONE, *slow_training_options(tula, 20, pause=56 / 20 / PASSES), "--set", "cluster.minutes=1")
    tula.wait_until(lambda: finished(tula), seconds=600)
    outcomes = [outcome for outcome, _ in story(tula)]
    assert outcomes[-1] == "done"
    assert set(outcomes[:-1]) == {"time_limit"}
    trained(tula, 20)
    saved = [attempt.samples or 0 for attempt in attempts(tula)]
    assert all(later > earlier for earlier, later in itertools.pairwise(saved))
    summary = finished(tula)
    assert summary is not None
    assert summary.causes[0].startswith("time limit of job ")


@pytest.mark.promise(
    "the scheduler",
    "the job is preempted",
    "the ranks save within the grace time, and the next job resumes when nodes are free again",
)
def test_a_preempted_training_goes_on_when_the_nodes_are_free_again(tula: Tula) -> None:
    submit(tula, *ONE, *slow_training_options(tula, 12), "--set", "cluster.slurm.partition=spare")
    tula.wait_until(tula.epochs_done)
    command = ["sbatch", "--nodes=4", "--exclusive", "--time=1", "--output=/dev/null", "--wrap=sleep 3"]
    subprocess.run(command, check=True, capture_output=True)
    tula.wait_until(lambda: finished(tula))
    assert [outcome for outcome, _ in story(tula)] == ["preempted", "done"]
    assert attempts(tula)[1].samples, "it saved on the way out"
    trained(tula, 12)


@pytest.mark.parametrize("victim", ["rank 0", pytest.param("the other")])
@pytest.mark.promise(
    "a node",
    "a node loses power or its network",
    "the next job of the chain resumes from the newest checkpoint on other nodes",
)
@pytest.mark.proof
def test_a_node_that_falls_silent_is_replaced(tula: Tula, on_slurm: SlurmCluster, victim: str) -> None:
    submit(tula, *TWO, *slow_training_options(tula, 12))
    tula.wait_until(tula.epochs_done)
    node = nodes_of(tula)[0 if victim == "rank 0" else 1]
    on_slurm.power_off(node)
    tula.wait_until(lambda: finished(tula))
    outcomes = [outcome for outcome, _ in story(tula)]
    assert outcomes[0] in ("node_failure", "peer")
    assert "node_failure" in outcomes
    assert outcomes[-1] == "done"
    assert node not in nodes_of(tula)
    trained(tula, 12)


@pytest.mark.proof  # as a node that falls silent, but told at once
@pytest.mark.promise(
    "a node", "the slurmd of a node dies", "the next job of the chain resumes from the newest checkpoint"
)
def test_a_node_whose_daemon_died_is_replaced(tula: Tula, on_slurm: SlurmCluster) -> None:
    submit(tula, *TWO, *slow_training_options(tula, 40))
    tula.wait_until(tula.epochs_done)
    on_slurm.kill_slurmd(nodes_of(tula)[1])
    tula.wait_until(lambda: len(story(tula)) > 1)
    assert story(tula)[0][0] == "node_failure"
    assert attempts(tula)[1].samples
    tula("cancel")


@pytest.mark.proof
@pytest.mark.promise(
    "a node",
    "a GPU is faulty (ECC, XID, fallen off the bus)",
    "tula names its node, and excludes it from the following jobs",
)
@FEW_NODES
def test_a_node_with_a_faulty_device_is_left_out_by_the_next_job(tula: Tula, nodes: tuple[str, ...]) -> None:
    (tula.folder / "ecc.py").write_text(
        "import os, pathlib, torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, num_classes=10):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(64, num_classes)\n"
        "    def forward(self, x):\n"
        "        faulty, node = pathlib.Path('faulty'), os.environ.get('SLURMD_NODENAME', '')\n"
        f"        if os.environ.get('RANK') == '{int(nodes == TWO)}' and not faulty.exists():\n"
        "            faulty.write_text(node)\n"
        "        if faulty.exists() and faulty.read_text() == node:\n"
        "            raise RuntimeError('CUDA error: uncorrectable ECC error encountered')\n"
        "        return self.layer(x.flatten(1))\n"
    )
    submit(tula, *nodes, "--set", "model={name: 'ecc:Net'}", "--set", "train.epochs=2")
    tula.wait_until(lambda: finished(tula))
    faulty = (tula.folder / "faulty").read_text()
    assert [outcome for outcome, _ in story(tula)] == ["device_fault", "done"]
    assert attempts(tula)[0].host == faulty
    assert faulty not in nodes_of(tula)
    summary = finished(tula)
    assert summary is not None
    assert summary.causes[0].endswith(f"on {faulty}; excluded from now on: {faulty}")


@pytest.mark.proof
@pytest.mark.promise(
    "the scheduler", "a job is cancelled with scancel", "the whole chain stops until the same command is run again"
)
def test_scancel_by_the_user_stays_and_the_same_command_goes_on(tula: Tula) -> None:
    training = (*ONE, *slow_training_options(tula, 12))
    submit(tula, *training)
    tula.wait_until(tula.epochs_done)
    links = job(tula).links
    assert len(links) > 1
    subprocess.run(["scancel", links[0]], check=True)
    tula.wait_until(lambda: not queue())
    assert [outcome for outcome, _ in story(tula)] == ["cancelled"]
    assert tula("status")["status"] == "done"
    process = tula.start("train", "job.yaml", *training, "--wait", "--json")
    answer, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, f"{answer}\n{errors}\n{tula.logs()}"
    assert json.loads(answer)["data"]["attempts"] == 2
    assert attempts(tula)[1].samples
    trained(tula, 12)


@pytest.mark.promise(
    "a process",
    "the kernel kills a rank because the memory is full",
    "tula reports this cause. On CPUs, the training continues with the same batch in smaller micro-batches",
)
@FEW_NODES
def test_the_cgroup_out_of_memory_is_reported_and_smaller_micro_batches_fit(tula: Tula, nodes: tuple[str, ...]) -> None:
    (tula.folder / "hungry.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, num_classes=10):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(64, num_classes)\n"
        "    def forward(self, x):\n"
        "        if len(x) > 64:\n"
        "            self.waste = torch.ones(300_000_000)\n"
        "        return self.layer(x.flatten(1))\n"
    )
    model = ("--set", "model={name: 'hungry:Net'}", "--set", "cluster.slurm.memory=900M")
    batch = 128 if nodes == ONE else 256
    command = ("train", "job.yaml", *nodes[:2], "--batch", str(batch), *model, "--wait")
    summary = tula(*command)["data"]
    assert summary["start_batch"] == summary["batch"] == batch
    assert summary["causes"] == [
        f"out of memory at batch {batch}: each rank now computes a step in 2 micro-batches of 64"
    ]
    assert attempts(tula)[0].message == "the kernel killed a process because the memory was used up"
    assert job(tula).submissions == 1


@pytest.mark.promise(
    "the scheduler", "a training finishes before all jobs of its chain have run", "its waiting jobs are cancelled"
)
def test_one_link_at_a_time_waits_and_a_finished_training_leaves_no_link(tula_in_spaces: Tula) -> None:
    tula = tula_in_spaces
    submit(tula, *ONE, *slow_training_options(tula, 2))
    tula.wait_until(lambda: finished(tula))
    tula.wait_until(lambda: not queue(), seconds=60)
    first, *others = job(tula).links
    tula.wait_until(lambda: accounted(first) == ["COMPLETED"], seconds=60)
    states = accounted(*others)
    assert len(states) == len(others)
    assert all(state.startswith("CANCELLED") for state in states), "given back, not started"


@pytest.mark.proof  # torchrun and its ranks import torch each for itself: 70 s of a core
def test_torchrun_starts_the_ranks_of_a_node_and_a_killed_one_is_relaunched(tula: Tula, on_slurm: SlurmCluster) -> None:
    options = ("--set", "cluster.slurm.launcher=torchrun", "--set", "cluster.gpus_per_node=2")
    submit(tula, *TWO, *slow_training_options(tula, 12), *options)
    tula.wait_until(tula.epochs_done)
    ranks = on_slurm.processes(nodes_of(tula)[1], f"tula_cli.worker {tula.run().path} {tula.task().id}")
    workers = [pid for pid in ranks if "torch.distributed.run" not in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(workers) == 2
    subprocess.run(["kill", "-9", str(workers[0])], check=True)
    tula.wait_until(lambda: finished(tula))
    assert [outcome for outcome, _ in story(tula)] == ["signal", "done"]
    assert attempts(tula)[0].host == nodes_of(tula)[1]
    assert job(tula).submissions == 1
    trained(tula, 12)


@pytest.mark.proof  # test_submission has the same without a command line
def test_a_run_directory_that_the_nodes_do_not_see_is_reported(tula: Tula, on_slurm: SlurmCluster) -> None:
    folder = on_slurm.local / "runs"
    submitted = tula("train", "job.yaml", *TWO, "--run-dir", str(folder))
    assert submitted["status"] == "pending"
    (reason,) = tula.wait_until(
        lambda: [
            j["reason"] for j in tula("status", "--run-dir", str(folder))["data"]["jobs"] if "waits" in j["reason"]
        ]
    )
    assert "No such file or directory on " in reason and "share" in reason
    assert str(folder) in reason
    tula("cancel", "--run", str(RunDir.find_newest(folder).path))
