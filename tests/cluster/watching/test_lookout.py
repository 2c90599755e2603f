"""Who looks at the run directory, how often, and how fast a dead rank is known on all nodes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import make_runs
import pytest

from tula_cli.cluster import directory_watcher as lookouts
from tula_cli.cluster.allocation import Allocation
from tula_cli.cluster.directory_watcher import ChangeWatcher
from tula_cli.run import files
from tula_cli.run.directory import RunDir

HELPERS = Path(__file__).parents[2] / "helpers"
NODES, PER_NODE, HERE = 64, 8, 2
CALLS_A_SECOND = 400  # of the whole job, in the steady state
SECONDS = 8.0
ENDED_WITHIN = 7.0


def until(condition: Callable[[], bool], *, within: float = 60.0) -> float:
    """Wait for a condition; return the seconds that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within
        time.sleep(0.02)
    return time.monotonic() - began


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Callable[[], int]]:
    """Supervisors of two nodes of a job of 64, under strace; called, it tells the file calls in the run directory so far."""
    trace = tmp_path / "trace"
    strace = ["strace", "-f", "-y", "-qq", "-s", "512", "-e", "trace=%file,getdents64", "-o", str(trace)]
    command = [
        *strace,
        sys.executable,
        str(HELPERS / "many_supervisors.py"),
        str(tmp_path),
        *map(str, (HERE, PER_NODE, NODES)),
    ]
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, start_new_session=True
    )

    def calls() -> int:
        inside = f"{tmp_path}/runs/"
        return sum(inside in line for line in trace.read_text(errors="replace").splitlines())

    yield calls
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_job_of_512_ranks_makes_few_calls_and_ends_the_peers_of_a_dead_rank_in_time(
    traced: Callable[[], int], tmp_path: Path
) -> None:
    def pids() -> list[int]:
        return [int(path.read_text()) for path in sorted(tmp_path.glob("*.pid"))]

    until(lambda: len(pids()) == HERE * PER_NODE)
    time.sleep(lookouts.REREAD_DELAYS_SECONDS[1] + 3.0)
    before = traced()
    time.sleep(SECONDS)
    of_job = (traced() - before) / SECONDS * NODES / HERE
    print(f"{of_job:.1f} calls a second at {NODES * PER_NODE} ranks")
    assert 0 < of_job <= CALLS_A_SECOND
    assert len(list((tmp_path / "runs").glob("*/logs/train-s-1.001*.log"))) == HERE * PER_NODE, "one a rank"
    ranks = pids()
    os.kill(ranks[3], signal.SIGKILL)
    took = until(lambda: not any(map(lives, ranks)))
    print(f"all peers ended after {took:.1f} s")
    assert took <= ENDED_WITHIN + 0.5, "half a second is for a loaded machine"


def test_a_supervisor_reads_where_something_is_new_and_always_where_no_news_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("MAX_STAT_INTERVAL_SECONDS", 0.0),
        ("POLL_SECONDS", 0.0),
        ("MAX_STATS_PER_SECOND", 1e9),
        ("REREAD_DELAYS_SECONDS", ()),
    ):
        monkeypatch.setattr(lookouts, name, value)
    monkeypatch.setattr(lookouts, "IDLE_READ_SECONDS", (600.0, 600.0))
    run = RunDir.create(tmp_path, make_runs.spec())
    files.create_polled_folders(run.path)
    watcher = ChangeWatcher(run.path, Allocation(1, 2, 1, str(tmp_path), nodes=1))
    assert watcher.is_due()
    assert not watcher.is_due(), "nothing is new"
    run.mark_job_cancelled("train-s")
    assert watcher.is_due() and not watcher.is_due()
    watcher.force_check()
    assert watcher.is_due() and not watcher.is_due()
    (run.path / "news").unlink()
    assert watcher.is_due() and watcher.is_due(), "without news it reads each time"


@pytest.mark.parametrize(("count", "seconds"), [(1, 0.2), (40, 1.0), (512, 1.5), (3500, 10.0)])
def test_the_supervisors_of_a_job_share_a_rate_of_stats(tmp_path: Path, count: int, seconds: float) -> None:
    assert ChangeWatcher(tmp_path, Allocation(0, count))._stat_interval == pytest.approx(seconds, rel=0.03)


def test_a_command_is_not_asked_for_by_name_before_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir.create(tmp_path, make_runs.spec())
    requested: list[Path] = []
    monkeypatch.setattr("tula_cli.run.directory.read_record", lambda path, _: requested.append(path))
    assert run.read_leader_command("7.0", 0) is None
    assert requested == []
