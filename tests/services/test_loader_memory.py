"""Whether a node holds what data takes: what cannot run, what may not, and what to do about it."""

from pathlib import Path

import make_runs as make
import pytest
from make_results import inspected, spec
from read_diagnostics import codes, values

from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import CheckTask
from tula_cli.services import messages
from tula_cli.services.check import check
from tula_cli.services.job_warnings import NodeMemory, check_memory

MB, GB = 2**20, 2**30
SAMPLE = {"sample_bytes": MB, "cpus": 8}
PLENTY = NodeMemory(1000 * GB, 1000 * GB)


def job(**sections):
    return spec(**{"train": {"epochs": 1, "workers": 2}, **sections})


def told(room: NodeMemory, sizes, *, of=None, **inspection):
    return check_memory(of or job(), inspected(**{**SAMPLE, **inspection}), sizes, room)


def test_where_there_is_enough_nothing_is_said() -> None:
    assert told(PLENTY, {1: (8, 16), 2: (8,)}) == ((), ())


def test_a_container_that_holds_no_batch_is_a_problem() -> None:
    (problem,), warnings = told(NodeMemory(64 * MB, 64 * GB), {1: (128, 256)})
    assert problem == messages.shared_memory_too_small(
        free_bytes=64 * MB, ranks=1, needed_bytes=128 * MB, local_batch=128
    )
    assert not warnings


def test_where_only_large_batches_fill_it_the_first_of_them_is_named() -> None:
    problems, (warning,) = told(NodeMemory(640 * MB, 64 * GB), {1: (32, 64, 128)})
    assert not problems  # 2 x (2 x 2 + 1) batches are ready at most: 64 samples take all there is
    assert warning == messages.shared_memory_may_fill(
        first_local_batch=128, free_bytes=640 * MB, needed_bytes=1280 * MB, local_batch=128, ranks=1, workers=2
    )


def test_where_fewer_nodes_can_run_it_is_no_problem_that_more_ranks_of_this_machine_cannot() -> None:
    problems, (warning,) = told(NodeMemory(100 * MB, 64 * GB), {1: (64,), 2: (64,)})
    assert not problems and warning.values["ranks"] == 2


def test_of_several_jobs_the_first_batch_and_the_most_memory_are_reported() -> None:
    _, (warning,) = told(NodeMemory(300 * MB, 64 * GB), {1: (16, 32, 64), 2: (64,)})
    assert warning == messages.shared_memory_may_fill(
        first_local_batch=32, free_bytes=300 * MB, needed_bytes=1280 * MB, local_batch=64, ranks=2, workers=2
    )


def test_without_loader_processes_shared_memory_is_not_needed() -> None:
    assert told(NodeMemory(0, 64 * GB), {1: (128,)}, of=job(train={"epochs": 1, "workers": 0})) == ((), ())


def test_accumulation_takes_a_micro_batch_at_a_time() -> None:
    room = NodeMemory(640 * MB, 64 * GB)
    assert told(room, {1: (128,)}, of=job(train={"epochs": 1, "workers": 2, "accumulate": 2})) == ((), ())


def test_all_memory_counts_processes_and_on_a_gpu_pinned_copies() -> None:
    room = NodeMemory(64 * GB, 4 * GB, "this machine has")
    assert told(room, {1: (128,)}, process=GB) == ((), ())  # 1 + 1.25 + 0.25 GiB
    gpu = job(cluster={"device": "cuda"})
    _, (warning,) = told(room, {1: (128,)}, of=gpu, process=2 * GB, device="cuda")
    assert warning == messages.memory_may_run_out(
        first_local_batch=128,
        available_bytes=4 * GB,
        source="this machine has",
        needed_bytes=4864 * MB,
        local_batch=128,
        ranks=1,
        workers=2,
        shared_bytes=1280 * MB,
        pinned_bytes=1280 * MB,
    )


def test_auto_takes_the_most_processes_that_a_rank_may_get() -> None:
    auto = job(train={"epochs": 1})
    assert told(NodeMemory(GB, 64 * GB), {1: (128,)}, of=auto)[1][0].values["workers"] == 7
    assert told(NodeMemory(GB, 64 * GB), {2: (128,)}, of=auto)[1][0].values["workers"] == 3
    slurm = job(train={"epochs": 1}, cluster={"kind": "slurm", "gpus_per_node": 2})
    job_values = told(NodeMemory(GB, 640 * GB), {4: (128,)}, of=slurm)[1][0].values
    assert (job_values["ranks"], job_values["workers"]) == (2, 8)


def test_of_a_script_nothing_is_known() -> None:
    assert told(NodeMemory(0, 0), {1: (128,)}, sample_bytes=0) == ((), ())
    assert check_memory(job(), None, {1: (128,)}, NodeMemory(0, 0)) == ((), ())


def test_check_tells_both() -> None:
    result = inspected(**SAMPLE)
    report = check(job(), inspector=lambda _: result, room=NodeMemory(MB, 64 * GB))
    assert "shared-memory-too-small" in codes(report.problems)
    report = check(job(), inspector=lambda _: result, room=NodeMemory(64 * GB, GB))
    assert not report.problems and values(report.warnings, "memory-may-run-out")["available_bytes"] == GB


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs", slurm())


def slurm(**settings):
    return job(cluster={"kind": "slurm", "slurm": settings})


def look(run: RunDir, number: int, **node: int) -> None:
    task = CheckTask(id=f"check-n002-{number}", job=f"check-n002-{number}", spec=slurm(), workdir="/", nodes=2)
    run.write_task(task)
    run.checks.write_report(make.cluster_report(run, task, node, node))


@pytest.mark.parametrize(
    ("asked", "memory"), [("64G", 64 * GB), ("2000", 2000 * MB), ("512mb", 512 * MB), ("1T", 1024 * GB), ("0", None)]
)
def test_memory_is_what_slurm_is_asked_for(run: RunDir, asked: str, memory: int | None) -> None:
    room = NodeMemory.of_nodes(slurm(memory=asked), run)
    assert (room.memory, room.shared) == (memory, None)


@pytest.mark.parametrize(
    ("settings", "memory"),
    [
        ({"extra": {"mem-per-gpu": "16G"}}, 4 * 16 * GB),
        ({"extra": {"mem_per_cpu": "2G"}, "cpus_per_task": 8}, 4 * 8 * 2 * GB),
        ({"extra": {"mem-per-gpu": "16gb"}}, 4 * 16 * GB),
        ({"extra": {"mem-per-gpu": "10.5G"}}, None),  # sbatch refuses it
        ({"extra": {"mem-per-gpu": "64X"}}, None),
        ({"extra": {"mem-per-cpu": "2G"}}, None),  # how many there are is SLURM's to say
        ({}, None),
    ],
)
def test_memory_may_be_asked_for_by_gpus_or_cores(settings: dict[str, object], memory: int | None) -> None:
    of = job(cluster={"kind": "slurm", "gpus_per_node": 4, "slurm": settings})
    assert NodeMemory.of_nodes(of, None).memory == memory


def test_nodes_that_were_looked_at_tell_the_newest(run: RunDir) -> None:
    look(run, 9, shared=GB, memory=8 * GB)
    look(run, 10, shared=2 * GB, memory=16 * GB)
    room = NodeMemory.of_nodes(slurm(), run)
    assert (room.shared, room.memory, room.source) == (2 * GB, 16 * GB, "a node has")
    assert NodeMemory.of_nodes(slurm(memory="4G"), run).memory == 4 * GB
    assert NodeMemory.of_nodes(slurm(), None) == NodeMemory(None, None, "a node has")


def test_this_machine_is_asked_itself() -> None:
    room = NodeMemory.of_nodes(job(), None)
    assert room.memory and room.source == "this machine has"
