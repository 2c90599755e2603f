"""Training scripts of the user's own on a real cluster: a command a node that starts its ranks, and a process a rank."""

import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import SlurmCluster
from driver import Tula

from tula_cli.host.leftovers import find_processes_with_variable
from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import Measured
from tula_cli.run.script_attempt import ScriptAttempt
from tula_cli.services.observe import list_observed_reports
from tula_cli.services.observed_probes import add_observed_probes
from tula_cli.spec.load import load_spec

pytestmark = [pytest.mark.slurm, pytest.mark.torch]
ROOT = Path(__file__).resolve().parents[2]
CLUSTER = "cluster: {kind: slurm, device: cpu, minutes: 10, slurm: {memory: 1500M}}"
TORCHRUN = f"""
name: torchrun
script:
  command: {sys.executable} -m torch.distributed.run --nnodes {{nodes}} --node-rank {{node_rank}} --nproc-per-node {{gpus_per_node}}
    --master-addr {{master_addr}} --master-port {{master_port}} plain_ddp.py --local-batch {{local_batch}} --epochs 50
  launch: node
  length: {{epochs: 5}}
  reference: {{batch: 32}}
search: {{nodes: [2], min_batch: 32, max_batch: 32, min_steps: 5, min_seconds: 0, max_node_hours: 5}}
{CLUSTER}
"""
BY_HAND = f"""
name: by-hand
script:
  command: steps.py {{local_batch}} {{steps}} {{out}}
  length: {{samples: 16000}}
  reference: {{batch: 32}}
  resume: {{args: "{{checkpoint}}", checkpoint: "{{out}}/state", batch: any}}
search: {{nodes: [2], min_batch: 32}}
{CLUSTER}
"""
STEPS = """
import os, sys, time
from pathlib import Path
import tula_hooks as tula

size, steps, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
done = int(Path(sys.argv[4]).read_text()) if len(sys.argv) > 4 else 0
while done < steps:
    time.sleep(0.02)
    done += 1
    tula.step(samples=size, lr=0.1)
    if done % 10 == 0 and os.environ["RANK"] == "0":
        (out / "draft").write_text(str(done))
        (out / "draft").replace(out / "state")
"""
COMPARED = f"""
name: compared
script:
  command: says.py {{local_batch}} {{lr}} {{steps}}
  length: {{samples: 640}}
  reference: {{batch: 16, lr: 0.1}}
  metric: {{acc: "acc ([0-9.]+)"}}
train: {{method: lbt}}
search: {{nodes: [1], min_batch: 16, max_node_hours: 5}}
{CLUSTER}
"""
SAYS = """
import sys
import tula_hooks as tula

for _ in range(int(sys.argv[3])):
    tula.step(samples=int(sys.argv[1]), lr=float(sys.argv[2]))
print("acc", 100 * float(sys.argv[2]))
"""


def on_cluster(folder: Path, job: str, *files: Path) -> Tula:
    for file in files:
        shutil.copy(file, folder)
    return Tula(folder, job)


@pytest.mark.proof  # with a command from sbatch below
def test_a_command_a_node_starts_the_ranks_of_all(tmp_path: Path, on_slurm: SlurmCluster) -> None:
    tula = on_cluster(tmp_path, TORCHRUN, ROOT / "tests" / "scripts" / "plain_ddp.py")
    tula("profile", "job.yaml", "--wait")
    (result,) = tula.run().read_results()
    assert isinstance(result, Measured), result
    assert (result.nodes, result.batch, result.dataset_size) == (2, 32, 320)
    assert result.environment.hosts == tuple(on_slurm.names[:2]) and result.environment.backend == "gloo"
    assert result.sync_time and result.gradients is not None


def test_a_rank_that_is_killed_on_another_node_is_relaunched_from_the_scripts_checkpoint(
    tmp_path: Path, on_slurm: SlurmCluster
) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    tula = on_cluster(tmp_path, BY_HAND, ROOT / "templates" / "tula_hooks.py")
    training = tula.start("train", "job.yaml", "--nodes", "2", "--batch", "32", "--yes", "--wait")
    tula.wait_until(lambda: next(tmp_path.glob("tula-runs/by-hand-*/train/*/out/state"), None))
    attempt = ScriptAttempt(tula.run().path, tula.task().id, 1)
    beat = tula.wait_until(lambda: attempt.read_heartbeat(1))
    assert beat.host == on_slurm.names[1]
    plan, ranks = str(attempt.plan_path), find_processes_with_variable("RANK")
    (victim,) = [
        pid
        for pid, value in find_processes_with_variable("TULA_PLAN").items()
        if value == plan and ranks.get(pid) == "1"
    ]
    os.kill(victim, signal.SIGKILL)
    _, complaint = training.communicate(timeout=240)
    assert training.returncode == 0, complaint + tula.logs()
    run = tula.run()
    summary, result = (
        look()
        for look in (
            run.get_training(tula.task().signature).read_summary,
            run.get_training(tula.task().signature).read_result,
        )
    )
    assert summary is not None and result is not None
    assert summary.attempts == 2 and "SIGKILL" in summary.causes[0]
    assert result.samples == pytest.approx(16000, abs=60 * 32), "heartbeats come once a second"
    assert (next(tmp_path.glob("tula-runs/by-hand-*/train/*/out/state"))).read_text() == "500"


def test_a_resume_is_tested_where_each_rank_has_a_supervisor(tmp_path: Path, on_slurm: SlurmCluster) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    job = (
        BY_HAND.replace(", batch: any", "")
        .replace("device: cpu,", "device: cpu, gpus_per_node: 2,")
        .replace("16000", "640")
    )
    tula = on_cluster(tmp_path, job, ROOT / "templates" / "tula_hooks.py")
    rehearsal = tula("check", "job.yaml", "--rehearse")["data"]["rehearsal"]
    assert rehearsal["verdict"] == "same", rehearsal
    assert [start["ended"] for start in rehearsal["starts"]] == ["killed", "ended", "ended"]
    (fault,) = rehearsal["faults"]  # it counts steps, whatever their batch
    assert fault.startswith("at batch 16 it trains") and "too many" in fault


def test_methods_of_a_script_are_compared_side_by_side(tmp_path: Path, on_slurm: SlurmCluster) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    tula = on_cluster(tmp_path, COMPARED, ROOT / "templates" / "tula_hooks.py")
    data = tula("compare", "job.yaml", "--methods", "lrs", "--batch", "32", "--no-controls", "--yes", "--wait")["data"]
    rows = [(row["method"], row["batch"], row["metrics"]["acc"]["mean"], row["gap"]) for row in data["rows"]]
    assert rows == [("lbt", 16, 10.0, None), ("lrs", 32, 20.0, -10.0)], tula.logs()
    assert (data["total"], data["finished"], data["reference_batch"]) == (2, 2, 16)


SEARCHED = f"""
name: searched
script:
  command: resumes_at_any_rate.py --batch {{batch}} --lr {{lr}} --samples {{samples}} --out {{out}}
  length: {{samples: 65536}}
  reference: {{batch: 16, lr: 0.0005}}
  resume: {{args: "--resume {{checkpoint}}", checkpoint: "{{out}}/last.pt", batch: any}}
train: {{method: lrs}}
search: {{nodes: [2], min_batch: 16, max_batch: 128, max_node_hours: 5}}
{CLUSTER}
"""


@pytest.mark.proof  # five starts of torch on each of two nodes
def test_a_search_for_the_learning_rate_of_a_script_continues_after_a_rank_was_killed(
    tmp_path: Path, on_slurm: SlurmCluster
) -> None:
    tula = on_cluster(tmp_path, SEARCHED, ROOT / "tests" / "scripts" / "resumes_at_any_rate.py")
    options = ("compare", "job.yaml", "--learning-rates", "--batch", "64", "--nodes", "2")
    tula(*options, "--yes", "--no-wait")
    run = tula.run()
    ranks = tula.wait_until(lambda: find_branch_ranks(on_slurm, tula), seconds=300)
    subprocess.run(["kill", "-9", str(ranks[0])], check=True)
    data = tula(*options, "--wait", "--yes")["data"]
    assert [(branch["rule"], branch["lr"]) for branch in data["branches"]] == [
        ("none", 0.0005), ("sqrt", 0.001), ("linear", 0.002),
    ]  # fmt: skip
    assert (data["chosen"]["rule"], data["nodes"]) == ("linear", 2)
    scale, low, high = data["critical_batch"]
    assert 0 < low < scale < (high or math.inf)
    (task,) = run.read_tasks()
    outcomes = [attempt.outcome for attempt in run.read_attempts(task.id)]
    assert outcomes.count("done") == 4 and outcomes.count("signal") == 1, outcomes


def find_branch_ranks(cluster: SlurmCluster, tula: Tula) -> list[int]:
    """Return the script's processes of a branch on the second node."""
    return cluster.processes(cluster.names[1], "resumes_at_any_rate.py --batch 64")


SBATCH = f"""#!/bin/bash
#SBATCH --job-name=from-sbatch
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --mem=1500M
#SBATCH --time=10
#SBATCH --output=%x-%j.out

export PATH={Path(sys.executable).parent}:$PATH
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun torchrun --nnodes=$SLURM_NNODES --nproc_per_node=1 --rdzv_id=$SLURM_JOB_ID --rdzv_backend=c10d \\
    --rdzv_endpoint=$MASTER_ADDR:29500 plain_ddp.py --local-batch 16 --epochs 50 2>&1 | tee log.txt
"""


@pytest.mark.proof  # other scripts train and compare above; test_from_sbatch reads such files
def test_a_script_of_sbatch_becomes_a_job_that_profiles(tmp_path: Path, on_slurm: SlurmCluster) -> None:
    (tmp_path / "train.sbatch").write_text(SBATCH)
    tula = on_cluster(tmp_path, "", ROOT / "tests" / "scripts" / "plain_ddp.py")
    summary = tula("init", "--from-sbatch", "train.sbatch", "--force")["data"]["understood"]["summary"]
    assert summary == "2 nodes, 1 process per node, 16 samples per process: global batch 32; 50 epochs"
    short = ("nodes=[2]", "min_batch=32", "max_batch=32", "min_steps=5", "min_seconds=0")
    settings = [f"--set=search.{text}" for text in short]
    tula("profile", "job.yaml", "--wait", "--yes", "--set=cluster.device=cpu", *settings)
    (result,) = tula.run().read_results()
    assert isinstance(result, Measured), result
    assert (result.nodes, result.batch, result.dataset_size) == (2, 32, 320)
    assert result.environment.hosts == tuple(on_slurm.names[:2]) and result.environment.backend == "gloo"
    assert result.sync_time and result.gradients is not None


FAILING = f"""
name: failing
script:
  command: failing_loader.py --batch {{local_batch}} --epochs {{epochs}} --out {{out}} --fault FAULT
  length: {{epochs: 4}}
  reference: {{batch: 64}}
  resume: {{args: "--resume {{checkpoint}}", checkpoint: "{{out}}/e*.pt", batch: epoch}}
search: {{nodes: [2], min_batch: 64, max_batch: 64, max_node_hours: 5}}
{CLUSTER}
"""


@pytest.mark.proof
@pytest.mark.parametrize(("fault", "outcome"), [("ESHUTDOWN", "storage"), ("SIGSEGV", "signal"), ("KeyError", "user")])
def test_what_another_start_cures_does_not_empty_the_chain(
    tmp_path: Path, on_slurm: SlurmCluster, fault: str, outcome: str
) -> None:
    tula = on_cluster(tmp_path, FAILING.replace("FAULT", fault), ROOT / "tests" / "scripts" / "failing_loader.py")
    tula("train", "job.yaml", "--nodes", "2", "--batch", "64", "--no-rehearse", "--yes", "--wait")
    run = tula.run()
    training = run.get_training(run.list_train_signatures()[0])
    attempts = training.read_attempts()
    assert [attempt.outcome for attempt in attempts] == [outcome, "done"], [item.message for item in attempts]
    assert (attempts[0].scheduler_id == attempts[1].scheduler_id) == (outcome != "user"), (
        "the user's class goes on in the next job"
    )
    assert training.read_result() is not None


OBSERVED = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --mem=1500M --time=5 --wait --output=job.out
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29400 WORLD_SIZE=2 GLOO_SOCKET_IFNAME={interface}
srun bash -c 'RANK=$SLURM_PROCID exec {python} -m tula_cli observe -- {python} plain_ddp.py --samples 6400 --epochs 1'
"""


@pytest.mark.proof
def test_a_step_of_two_nodes_is_observed_as_one_job(on_slurm: SlurmCluster, tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "scripts" / "plain_ddp.py", tmp_path)
    batch = tmp_path / "job.sh"
    batch.write_text(OBSERVED.replace("{python}", sys.executable).replace("{interface}", "eth0"))
    done = subprocess.run(["sbatch", str(batch)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    output = (tmp_path / "job.out").read_text()
    assert done.returncode == 0, output
    assert output.count("whole step") == 1, "one report, by the first rank"
    (report,) = list_observed_reports(tmp_path / "tula-observed")
    assert (report.nodes, report.gpus_per_node, report.batch) == (2, 1, 16)
    assert report.sync_seconds is not None and report.sync_seconds > 0
    assert [request.nodes for request in report.other_requests] == [1, 4]
    (tmp_path / "job.yaml").write_text(TORCHRUN)
    spec = load_spec(tmp_path / "job.yaml")
    run = RunDir.from_spec(tmp_path / "runs", spec)
    list(add_observed_probes([run], str(tmp_path / "tula-observed" / "plain_ddp")))
    (probe,) = run.read_results()
    assert isinstance(probe, Measured) and (probe.nodes, probe.batch) == (2, 16) and probe.compute_time is not None
