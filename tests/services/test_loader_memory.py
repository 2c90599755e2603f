"""Whether the shared memory of a node holds a batch of each rank."""

from pathlib import Path

import make_runs as make
import pytest
from make_results import make_inspection, make_spec
from read_diagnostics import codes

from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import CheckTask
from tula_cli.services import check, messages
from tula_cli.services.check import check_job, find_free_shared_memory
from tula_cli.services.job_warnings import check_shared_memory

MB, GB = 2**20, 2**30
SAMPLE = {"sample_bytes": MB, "cpus": 8}


def job(**sections):
    return make_spec(**{"train": {"epochs": 1, "workers": 2}, **sections})


def find_problems(free: int | None, sizes, *, of=None, **inspection):
    return check_shared_memory(of or job(), make_inspection(**{**SAMPLE, **inspection}), sizes, free=free)


def test_where_one_batch_of_each_rank_fits_nothing_is_said() -> None:
    assert find_problems(1000 * GB, {1: (8, 16), 2: (8,)}) == find_problems(128 * MB, {1: (128, 256)}) == ()
    assert find_problems(None, {1: (128,)}) == ()


def test_a_container_that_holds_no_batch_is_a_problem() -> None:
    (problem,) = find_problems(64 * MB, {1: (128, 256)})
    assert problem == messages.shared_memory_too_small(
        free_bytes=64 * MB, ranks=1, needed_bytes=128 * MB, local_batch=128
    )


def test_where_fewer_nodes_can_run_it_is_no_problem_that_more_ranks_of_this_machine_cannot() -> None:
    assert find_problems(100 * MB, {1: (64,), 2: (64,)}) == ()
    (problem,) = find_problems(100 * MB, {2: (64,)})
    assert problem.values["ranks"] == 2


def test_without_loader_processes_shared_memory_is_not_needed() -> None:
    assert find_problems(0, {1: (128,)}, of=job(train={"epochs": 1, "workers": 0})) == ()


def test_accumulation_takes_a_micro_batch_at_a_time() -> None:
    halved = job(train={"epochs": 1, "workers": 2, "accumulate": 2})
    assert find_problems(64 * MB, {1: (128,)}, of=halved) == () != find_problems(64 * MB, {1: (128,)})


def test_of_a_script_nothing_is_known() -> None:
    assert find_problems(0, {1: (128,)}, sample_bytes=0) == ()
    assert check_shared_memory(job(), None, {1: (128,)}, free=0) == ()


def test_check_refuses_a_search_of_which_no_batch_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "read_shared_memory", lambda: MB)
    report = check_job(job(), inspector=lambda _: make_inspection(**SAMPLE))
    assert "shared-memory-too-small" in codes(report.problems)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs", slurm())


def slurm(**settings):
    return job(cluster={"kind": "slurm", "slurm": settings})


def look(run: RunDir, number: int, **node: int) -> None:
    task = CheckTask(id=f"check-n002-{number}", job=f"check-n002-{number}", spec=slurm(), workdir="/", nodes=2)
    run.write_task(task)
    run.checks.write_report(make.cluster_report(run, task, node, node))


def test_nodes_that_were_checked_tell_the_newest(run: RunDir) -> None:
    look(run, 9, shared=GB, memory=8 * GB)
    look(run, 10, shared=2 * GB, memory=16 * GB)
    assert find_free_shared_memory(slurm(), run) == 2 * GB
    assert find_free_shared_memory(slurm(), None) is None
