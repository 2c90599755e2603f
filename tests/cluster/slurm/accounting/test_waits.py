"""What is made of sacct's history and of sbatch --test-only, on the fake SLURM."""

import getpass
import math
import time

import make_runs
import pytest
from fake_slurm import FakeSlurm, local

from tula_cli.cluster.slurm.accounting.waits import KEPT_SECONDS, SlurmQueue, parse_limit_minutes, waits_of_run
from tula_cli.run.directory import RunDir

NOW = 1_700_000_000.0


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    fake = FakeSlurm(tmp_path / "slurm")
    fake.use(monkeypatch)
    return fake


@pytest.fixture
def run(tmp_path):
    cluster = {"kind": "slurm", "slurm": {"partition": "gpu", "minutes": 240}}
    return RunDir.create(tmp_path, make_runs.spec(cluster=cluster))


def row(
    *,
    wait=100.0,
    nodes=2,
    limit="02:00:00",
    partition="gpu",
    qos="normal",
    state="COMPLETED",
    user="other",
    at=NOW - 9000,
):
    start = "Unknown" if wait is None else local(at + wait)
    return "|".join([local(at), local(at), start, str(nodes), limit, partition, qos, state, user])


def test_waits_of_others_are_read_from_accounting(slurm, run):
    slurm.fault(history=[row(), row(wait=50, nodes=4, limit="1-00:00:00"), "garbage", row(limit="UNLIMITED")])
    found = SlurmQueue().history(run, run.spec(), now=NOW)
    assert [(past.wait, past.nodes, past.minutes) for past in found.waits] == [(100, 2, 120), (50, 4, 1440)]
    assert found.words == "2 jobs of partition gpu by sacct, 14 days"
    (call,) = slurm.calls("sacct")
    assert "--partition=gpu" in call.arguments and "--allusers" in call.arguments
    assert f"--starttime={local(NOW - 14 * 86400)}" in call.arguments


def test_waits_are_those_of_the_partition_and_qos_that_sbatch_takes_from_the_environment(slurm, tmp_path, monkeypatch):
    run = RunDir.create(tmp_path, make_runs.spec(cluster={"kind": "slurm"}))
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    monkeypatch.setenv("SBATCH_QOS", "Dear")
    slurm.fault(history=[row(qos="dear"), row()])
    found = SlurmQueue().history(run, run.spec(), now=NOW)
    assert found.words == "1 jobs of partition gpu by sacct, 14 days"
    assert "--partition=gpu" in slurm.calls("sacct")[0].arguments


def test_an_estimate_is_not_kept_for_another_partition_of_the_environment(slurm, tmp_path, monkeypatch):
    run = RunDir.create(tmp_path, make_runs.spec(cluster={"kind": "slurm"}))
    for partition in ("gpu", "debug"):
        monkeypatch.setenv("SBATCH_PARTITION", partition)
        assert SlurmQueue().estimate(run, run.spec(), nodes=2, minutes=60, now=NOW).partition == partition
    assert len(slurm.calls("sbatch")) == 2


def test_jobs_that_wait_still_count_and_those_that_never_will_do_not(slurm, run):
    slurm.fault(history=[row(wait=None, state="PENDING"), row(wait=None, state="CANCELLED by 1000")])
    (past,) = SlurmQueue().history(run, run.spec(), now=NOW).waits
    assert math.isinf(past.wait) and past.submitted == NOW - 9000


def test_a_site_that_shows_ones_own_jobs_alone_is_named(slurm, run):
    slurm.fault(history=[row(user=getpass.getuser())])
    assert (
        "your own alone: sacct shows no others (PrivateData?)" in SlurmQueue().history(run, run.spec(), now=NOW).words
    )


def test_without_accounting_the_runs_own_jobs_tell(slurm, run):
    slurm.fault(sacct="disabled")
    job = make_runs.add_probes(run, 2, (8,), at=NOW - 500)
    run.write_job(make_runs.job(job, nodes=2, scheduler="slurm", at=NOW - 500))
    run.write_attempt(make_runs.attempt(job, start=NOW - 440, end=NOW - 100, allocation="4711.0"))
    found = SlurmQueue().history(run, run.spec(), now=NOW)
    assert (
        [(past.wait, past.nodes) for past in found.waits] == [(60, 2)] == [(p.wait, p.nodes) for p in waits_of_run(run)]
    )
    assert found.words == "1 jobs of this run alone (Slurm accounting storage is disabled)"


def test_the_scheduler_is_asked_once_with_the_very_script_and_kept_for_ten_minutes(slurm, run):
    slurm.fault(starts=local(NOW + 1800))
    queue, spec = SlurmQueue(), run.spec()
    found = queue.estimate(run, spec, nodes=2, minutes=60, now=NOW)
    assert found.wait == 1800
    assert queue.estimate(run, spec, nodes=2, minutes=60, now=NOW + KEPT_SECONDS - 1) == found
    (call,) = slurm.calls("sbatch")
    assert call.arguments[0] == "--test-only" and slurm.jobs() == []
    with open(call.arguments[1]) as file:
        text = file.read()
    assert "#SBATCH --time=60" in text and "#SBATCH --nodes=2" in text and "#SBATCH --partition=gpu" in text
    queue.estimate(run, spec, nodes=4, minutes=60, now=NOW)
    queue.estimate(run, spec, nodes=2, minutes=60, now=NOW + KEPT_SECONDS)
    assert len(slurm.calls("sbatch")) == 3


def test_a_refusal_is_an_estimate_that_tells_nothing(slurm, run):
    slurm.fault(sbatch=["refuse:Batch job submission failed: Requested node configuration is not available"])
    found = SlurmQueue().estimate(run, run.spec(), nodes=2, minutes=60, now=time.time())
    assert found.wait is None and "Requested node configuration" in found.words


@pytest.mark.parametrize(
    ("words", "minutes"), [("01:30:00", 90), ("2-00:00:00", 2880), ("00:00:30", 0.5), ("UNLIMITED", None), ("", None)]
)
def test_time_limits_as_slurm_writes_them(words, minutes):
    assert parse_limit_minutes(words) == minutes
