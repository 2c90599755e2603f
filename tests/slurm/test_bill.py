"""The billing of real jobs compared with the prediction, and a balance that is too small: with slurmctld, slurmdbd and sacct."""

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import SlurmCluster, wait_until
from make_results import Truth, make_inspection, make_probes
from make_runs import spec

from tula_cli.cluster.launcher import make_launcher
from tula_cli.cluster.slurm.submit import SlurmLauncher
from tula_cli.errors import OverBudget
from tula_cli.models.cost import compute_hourly_charge
from tula_cli.options import TrainRequest
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.records.jobs import Job
from tula_cli.run.records.tasks import CheckTask
from tula_cli.services import train
from tula_cli.services.events import WarningEvent, run_work
from tula_cli.services.site_charges import add_site_billing, check_balance_of_task, find_site_charge
from tula_cli.services.waiting import Submission
from tula_cli.spec.job import JobSpec

pytestmark = pytest.mark.slurm

SITE = """PriorityType=priority/multifactor
PriorityFlags=MAX_TRES
PriorityDecayHalfLife=0
PriorityUsageResetPeriod=NONE
PriorityCalcPeriod=1
AccountingStorageTRES=gres/gpu,gres/gpu:a100
PartitionName=billed Nodes=ALL MaxTime=120 TRESBillingWeights=CPU=1.0,Mem=0.75G,GRES/gpu=2.5
PartitionName=typed Nodes=ALL MaxTime=120 DefMemPerNode=2000 TRESBillingWeights=CPU=0.3,GRES/gpu:a100=1.3,Node=0.5
"""
ACCOUNTS = (
    ("add", "account", "big", "Description=x", "GrpTRESMins=billing=100,cpu=6000"),
    ("add", "account", "proj", "parent=big", "GrpTRESMins=billing=6000"),
    ("add", "user", "root", "account=proj", "DefaultAccount=proj"),
    ("add", "qos", "dear"),
    ("modify", "qos", "dear", "set", "usagefactor=2"),
    ("modify", "user", "root", "where", "account=proj", "set", "qos=normal,dear"),
)
FORMS: list[tuple[dict[str, Any], int]] = [
    ({"partition": "billed", "memory": "1500M"}, 2),
    ({"partition": "billed"}, 1),
    ({"partition": "billed", "qos": "dear", "memory": "0"}, 1),
    ({"partition": "billed", "exclusive": False, "memory": "3G", "gpus": "none"}, 2),
    ({"partition": "billed", "exclusive": False, "memory": "500M", "cpus_per_task": 2}, 1),
    ({"partition": "typed"}, 2),
    ({"partition": "typed", "exclusive": False, "gpu_type": "a100"}, 2),
    ({"memory": "700M", "extra": {"mem-per-cpu": None}}, 2),  # the default partition, without weights
]


@pytest.fixture(scope="module")
def site(needs_slurm: None, own_prefix: str) -> Iterator[SlurmCluster]:
    """A site with weights, a dear QOS and accounts with a balance, which counts the largest of a node's resources."""
    with SlurmCluster(2, prefix=f"{own_prefix}b", extra=SITE) as cluster:
        for words in ACCOUNTS:
            cluster.run("login", "sacctmgr", "-i", *words)
        yield cluster


@pytest.fixture
def on_site(site: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    for name in [name for name in os.environ if name.startswith(("SLURM", "SBATCH", "SUBMITIT"))]:
        monkeypatch.delenv(name)
    for name, value in site.env.items():
        monkeypatch.setenv(name, value)
    yield site
    site.reset()


def job(**slurm: Any) -> JobSpec:
    cluster = {"kind": "slurm", "minutes": 30, "slurm": {"account": "proj", **slurm}}
    search = {"nodes": [1, 2], "min_batch": 32, "max_batch": 256}
    return spec(cluster=cluster, search=search, pricing={"kind": "billing"})


def submitted(folder: Path, result: JobSpec, nodes: int) -> str:
    """Submit a job in the form that a training has, which takes a second: of none sacct bills nothing; return its id."""
    run = RunDir(folder)
    run.submitit_dir.mkdir(parents=True)
    look = folder / "look"
    look.write_text("sleep 1.1\n")
    value = result.model_copy(update={"cluster": result.cluster.model_copy(update={"python": f"sh {look}"})})
    task = CheckTask(id="check", job="check", spec=value, workdir=str(folder), nodes=nodes)
    (folder / "job.sh").write_text(SlurmLauncher().render_script(run, task))
    done = subprocess.run(["sbatch", "--parsable", str(folder / "job.sh")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def told_billing(id_: str) -> float | None:
    """Return what sacct has a job allocated as billing, once it has ended."""
    text = subprocess.run(
        ["sacct", "-XPn", f"--jobs={id_}", "--format=State,AllocTRES"], capture_output=True, text=True, check=True
    ).stdout.strip()
    state, _, tres = text.partition("|")
    if not state or state in ("PENDING", "RUNNING", "COMPLETING"):
        return None
    counts = dict(entry.split("=") for entry in tres.split(","))
    return float(counts.get("billing", 0))


def predicted_and_told(
    folder: Path, forms: list[tuple[dict[str, Any], int]]
) -> tuple[list[float], list[float | None], list[str]]:
    """Return the billing of jobs as predicted and as sacct has it, and their ids."""
    predicted, ids = [], []
    for number, (slurm, nodes) in enumerate(forms):
        result = add_site_billing(job(**slurm), folder)
        assert result.pricing.slurm_billing is not None
        assert result.pricing.slurm_billing.usage_factor == (2 if slurm.get("qos") == "dear" else 1)
        predicted.append(compute_hourly_charge(result.pricing, nodes) / result.pricing.slurm_billing.usage_factor)
        ids.append(submitted(folder / str(number), result, nodes))
    wait_until(lambda: all(told_billing(id_) is not None for id_ in ids), "all jobs have ended", seconds=60)
    return predicted, [told_billing(id_) for id_ in ids], ids


def test_jobs_are_billed_what_was_predicted(on_site: SlurmCluster, tmp_path: Path) -> None:
    largest, message, ids = predicted_and_told(tmp_path / "largest", FORMS)
    assert largest == message
    _held_against_the_accounting(tmp_path, ids)
    conf = on_site.folder / "slurm.conf"
    conf.write_text(conf.read_text().replace("PriorityFlags=MAX_TRES", "PriorityFlags=NO_NORMAL_ALL"))
    on_site.run("login", "scontrol", "reconfigure")
    summed, message, _ = predicted_and_told(tmp_path / "summed", FORMS[:4])
    assert summed == message
    assert summed != largest[:4]


def _held_against_the_accounting(root: Path, ids: list[str]) -> None:
    """A training whose jobs these were is held against what sacct has billed them, its QOS counted twice."""
    result = job(partition="billed", qos="dear")
    run = measured(root, result)
    prepared = run_work(
        train.prepare_training([Run(run.path, result)], TrainRequest(nodes=1, batch=32), lambda _: make_inspection()),
        lambda _: None,
    )
    task = prepared.plan.task
    run.write_task(task)
    chain = {"scheduler": "slurm", "scheduler_id": ids[0], "links": tuple(ids), "submitted_at": time.time()}
    run.write_job(Job(id=task.job, nodes=1, **chain))
    rows = subprocess.run(
        ["sacct", "-XPn", f"--jobs={','.join(ids)}", "--format=ElapsedRaw,AllocTRES"], capture_output=True, text=True
    ).stdout.splitlines()
    messages = [
        (int(row.partition("|")[0]), dict(e.split("=") for e in row.partition("|")[2].split(","))) for row in rows
    ]
    hours = sum(seconds * float(tres.get("billing", 0)) for seconds, tres in messages) / 3600
    found_charge = find_site_charge(run, task.signature)
    assert found_charge is not None and not found_charge.open
    assert found_charge.billing_hours == pytest.approx(hours)
    assert found_charge.cost == pytest.approx(2 * hours)
    assert found_charge.predicted_billing == 5 and 5 in found_charge.billings


def measured(root: Path, outcome: JobSpec) -> RunDir:
    """Return a run that was measured: its training takes some 10 hours, and so 50 units or more on a node."""
    run = RunDir.create(root, outcome)
    for result in make_probes(Truth(fixed=5.0), {1: (32, 64, 256), 2: (16, 128)}):
        run.write_result(result)
    return run


def test_a_training_beyond_the_balance_is_reported_and_refused(on_site: SlurmCluster, tmp_path: Path) -> None:
    result = job(partition="billed")
    run, message = measured(tmp_path, result), []
    for within in (False, True):
        work = train.prepare_training(
            [Run(run.path, result)], TrainRequest(nodes=1, batch=32, within_balance=within), lambda _: make_inspection()
        )
        prepared = run_work(work, message.append)
    warned = [event.text for event in message if isinstance(event, WarningEvent)]
    beyond = r"account big has 1\.6\d of 1\.67 SU left, but up to (43\.6|61\.1) SU"  # the largest, or the sum
    assert any(re.search(beyond, text) for text in warned), warned
    submission = Submission(make_launcher, lambda _: make_inspection(), lambda _: True, wait=False)
    with pytest.raises(OverBudget, match=beyond):
        run_work(train.run_training(prepared, submission), message.append)
    assert not on_site.run("login", "squeue", "--noheader").stdout
    cheap = check_balance_of_task(prepared.plan.task, remaining_share=1e-6)
    assert cheap is not None and not cheap.lacking and not cheap.unknown
    assert "; the training needs " in cheap.words
