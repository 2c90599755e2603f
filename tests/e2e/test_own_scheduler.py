"""A whole job on a scheduler of the user's own, loaded by its import string: a small batch queue with time limits."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_queue
from driver import weights_differ

from tula_cli.run.records.probes import Measured

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.proof]

STEPS, EPOCHS = 1437 // 64, 5
JOB = """
name: own-scheduler
model: {name: "slow_net:Slow"}
dataset: {name: digits}
optimizer: {name: SGD, lr: 0.05}
train: {epochs: 5, reference_batch: 32, workers: 0, seed: 7, checkpoint_every: 1}
search: {nodes: [1, 2], min_batch: 64, max_batch: 128, strategy: full, min_steps: 5, min_seconds: 0, max_seconds: 0.001, max_node_hours: 5}
cluster: {kind: "tiny_queue:TinyQueue", device: cpu, interface: lo, minutes: 1, options: {home: HOME}}
"""
SLOW = """
import pathlib, time
from torch import nn

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        time.sleep(float(pathlib.Path("PACE").read_text()))
        return self.layer(x.flatten(1))
"""


def installed(tula: Any) -> tiny_queue.TinyQueue:
    """Put the job, its model and the queue into the folder of a user."""
    home = tula.folder / "queue"
    home.mkdir()
    (home / "settings.json").write_text(json.dumps({"nodes": 2, "minute": 60.0, "grace": 20.0}))
    for name in ("tiny_queue.py", "tiny_queue_commands.py"):
        (tula.folder / name).write_text((Path(tiny_queue.__file__).with_name(name)).read_text())
    (tula.folder / "pace").write_text("0.1")  # seconds of a step
    (tula.folder / "slow_net.py").write_text(SLOW.replace("PACE", str(tula.folder / "pace")))
    (tula.folder / "job.yaml").write_text(JOB.replace("HOME", str(home)))
    return tiny_queue.TinyQueue(str(home))


def sized(tula: Any, queue: tiny_queue.TinyQueue) -> None:
    """Let a training need about one and a half jobs on this machine as busy as it is now: by how long a probe took to start."""
    first = next(job for job in tula.run().read_jobs() if job.id == "probe-n002")
    began = (queue._jobs() or {})[first.scheduler_id]["began"]
    start = min(probe.measured_at for probe in tula.run().read_results() if probe.nodes == 2) - began
    limit = 25.0 + 2 * start  # seconds, of which a job leaves the last ten unused
    (tula.folder / "queue" / "settings.json").write_text(json.dumps({"nodes": 2, "minute": limit, "grace": 20.0}))
    (tula.folder / "pace").write_text(str(1.5 * (limit - 10 - start) / (STEPS * EPOCHS)))


def trained(tula: Any) -> Any:
    """Train; where a chain ends because the machine has become slower, the same command goes on."""
    words = ("train", "job.yaml", "--nodes", "2", "--batch", "64", "--yes", "--wait", "--json")
    for _ in range(3):
        process = tula.start(*words)
        answer, errors = process.communicate()
        data = json.loads(answer)
        if process.returncode == 0:
            return data["data"]
        assert "time limit of job" in data["error"]["message"], f"{answer}\n{errors}\n{tula.logs()}"
    raise AssertionError(tula.logs())


def test_a_job_is_measured_and_trained_over_time_limits_on_a_scheduler_of_the_users_own(tula: Any) -> None:
    queue = installed(tula)
    probed = tula("profile", "job.yaml", "--yes", "--wait")
    assert probed["status"] == "done"
    measured = {(probe.nodes, probe.batch) for probe in tula.run().read_results() if isinstance(probe, Measured)}
    assert measured == {(1, 64), (1, 128), (2, 64), (2, 128)}
    assert {job.scheduler for job in tula.run().read_jobs()} == {"tiny_queue:TinyQueue"}
    sized(tula, queue)
    summary = trained(tula)
    run = tula.run()
    training = run.get_training(summary["signature"])
    ends = [attempt.outcome for attempt in training.read_attempts()]
    assert ends[-1] == "done" and set(ends[:-1]) == {"time_limit"}, ends
    jobs = [attempt.scheduler_id for attempt in training.read_attempts()]
    assert len(set(jobs)) == len(ends), "each in a job of its own"
    result = training.read_result()
    assert result is not None and result.epochs == EPOCHS and result.samples == EPOCHS * STEPS * 64
    (link,) = [job for job in run.read_jobs() if job.id.startswith("train")]
    assert jobs[-1] in link.links
    tula.wait_until(lambda: {state.state for state in queue.query_states(link.links).values()} == {"ended"})
    status = tula("status")["data"]
    assert status["jobs"][-1]["scheduler"] == "tiny_queue:TinyQueue" and status["jobs"][-1]["state"] == "done"

    (tula.folder / "queue" / "settings.json").write_text('{"nodes": 2, "minute": 1200.0}')
    (tula.folder / "pace").write_text("0")
    tula("train", "job.yaml", "--nodes", "2", "--batch", "64", "--yes", "--wait", "--run-dir", "undisturbed")
    (other,) = (tula.folder / "undisturbed").glob("*/train/*/last")
    assert not weights_differ(training.path / "last", other), "as in one job"


def test_a_job_that_is_cancelled_there_is_over(tula: Any) -> None:
    queue = installed(tula)
    tula("train", "job.yaml", "--nodes", "1", "--batch", "64", "--yes", "--no-wait")
    (job,) = tula.run().read_jobs()
    tula.wait_until(lambda: tula.run().read_attempts())
    assert tula("cancel")["data"]["cancelled"] == [job.id]
    tula.wait_until(lambda: {state.state for state in queue.query_states(job.scheduler_ids).values()} == {"ended"})
    assert tula("status")["data"]["jobs"][0]["state"] == "cancelled"
