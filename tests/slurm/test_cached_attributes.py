"""A file system that keeps what it knows of files for half a minute, as NFS does: jobs are as right there, and as fast."""

import os
import signal
import time
from pathlib import Path

import pytest
from cluster import SlurmCluster
from driver import Tula, slow_training_options
from faults import cache_attributes
from test_recovery import TWO, attempts, finished, story, submit, trained

from tula_cli.run.records.jobs import Attempt

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.torch,
    pytest.mark.proof,
    pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="no FUSE here"),
]
SECONDS = 30
SLOWER = 1.3
EPOCHS = 14


def taken(result: list[Attempt]) -> float:
    """Return the seconds from the first start to the last end; a node's clock is this machine's."""
    return max(attempt.ended_at or time.time() for attempt in result) - min(attempt.started_at for attempt in result)


def probed(tula: Tula) -> float:
    """Return the seconds of a job that measures two batches on two nodes."""
    tula("profile", "job.yaml", "--set", "search.nodes=[2]", "--wait")
    assert all(result.kind == "measured" for result in tula.run().read_results())
    return taken(tula.run().read_attempts())


def killed_and_trained(tula: Tula, cluster: SlurmCluster) -> float:
    """Return the seconds of a training on two nodes of which a rank is killed on the way."""
    submit(tula, *TWO, *slow_training_options(tula, EPOCHS))
    tula.wait_until(tula.epochs_done)
    os.kill(max(pid for name in cluster.names for pid in cluster.processes(name, "-m tula_cli.worker")), signal.SIGKILL)
    tula.wait_until(lambda: len(story(tula)) > 1 and story(tula)[-1][0])
    assert [outcome for outcome, _ in story(tula)] == ["signal", "done"], tula.logs()
    tula.wait_until(lambda: finished(tula))
    trained(tula, EPOCHS)
    return taken([attempt for attempt in attempts(tula) if attempt.task.startswith("train")])


@pytest.mark.promise(
    "the file system",
    "each node caches file attributes for half a minute (NFS)",
    "the results are still correct, and jobs take at most 1.3 times as long",
)
def test_jobs_on_cached_attributes_are_right_and_nearly_as_fast(tula: Tula, on_slurm: SlurmCluster) -> None:
    plain = probed(tula), killed_and_trained(tula, on_slurm)
    cache_attributes(on_slurm, tula.folder, SECONDS)
    for name in [path.name for path in (tula.folder / "tula-runs").iterdir() if path.is_dir() and path.name[0] != "."]:
        (tula.folder / "tula-runs" / name).rename(tula.folder / f"before-{name}")
    cached = probed(tula), killed_and_trained(tula, on_slurm)
    print(f"plain {plain[0]:.1f} and {plain[1]:.1f} s, cached {cached[0]:.1f} and {cached[1]:.1f} s")
    assert cached[0] <= SLOWER * plain[0]
    assert cached[1] <= SLOWER * plain[1]
