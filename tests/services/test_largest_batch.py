"""`tula profile --largest` as a service: its bounds, the next trial, and its result."""

from pathlib import Path
from typing import Any

import make_runs
import pytest
from make_results import make_inspection
from make_runs import FakeLauncher

from tula_cli.errors import Infeasible, OutOfMemoryAtMinimum, SpecError
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.records.tasks import ProbeTask
from tula_cli.services import largest_batch, profile
from tula_cli.services.status import read_run_status
from tula_cli.spec.job import JobSpec

GPU = make_inspection(device="cuda", capacity=10 * 2**30, footprints=())


def spec_of(**changes: Any) -> JobSpec:
    return make_runs.spec(
        **{"search": {"nodes": [2, 1], "min_batch": 32, "max_batch": 512, "max_seconds": 60}, **changes}
    )


def run_of(folder: Path, spec: JobSpec) -> Run:
    return Run(RunDir.create(folder, spec).path, spec)


def test_the_bounds_are_those_of_the_fewest_nodes_in_whole_micro_batches() -> None:
    bounds = largest_batch.make_largest_batch_bounds(spec_of(train={"epochs": 1, "accumulate": 3}), GPU)
    assert (bounds.limit, bounds.start, bounds.capacity) == (510, 30, GPU.capacity)
    without = spec_of(search={"nodes": [2]})
    assert largest_batch.make_largest_batch_bounds(without, GPU).limit == GPU.dataset_size // 2


def test_a_cpu_needs_a_memory_limit_so_that_the_search_never_fills_the_machine() -> None:
    here = make_inspection(device="cpu", capacity=2**34)
    with pytest.raises(SpecError, match="no memory limit"):
        largest_batch.make_largest_batch_bounds(spec_of(), here)
    limited = spec_of(cluster={"memory_per_gpu": "1GB"})
    assert largest_batch.make_largest_batch_bounds(limited, here).limit == 512


def test_a_batch_below_one_sample_per_gpu_is_infeasible() -> None:
    with pytest.raises(Infeasible, match="has less than one sample for each of 1000 GPUs"):
        largest_batch.make_largest_batch_bounds(spec_of(cluster={"gpus_per_node": 1000}), GPU)


def test_each_plan_starts_from_the_results_so_far(tmp_path: Path) -> None:
    run = run_of(tmp_path, spec_of())
    plan = largest_batch.plan_largest_batch_search(run, GPU)
    (task,) = plan.tasks
    assert (task.job, task.nodes, task.local_batches) == ("largest-n001", 1, (32,))
    assert (task.spec.search.max_seconds, task.spec.search.min_steps) == (largest_batch.TRIAL_SECONDS, 5)
    make_runs.add_measured(run, 1, 100)
    make_runs.add_out_of_memory(run, 1, 104)
    make_runs.add_out_of_memory(run, 2, 16)  # other nodes
    make_runs.add_failed(run, 1, 102)  # tried again
    assert [task.local_batches for task in largest_batch.plan_largest_batch_search(run, GPU).tasks] == [(102,)]
    make_runs.add_out_of_memory(run, 1, 102)
    plan = largest_batch.plan_largest_batch_search(run, GPU)
    assert (plan.tasks, plan.missing_count, plan.done) == ((), 0, 3)
    result = largest_batch.make_largest_batch(run, GPU, plan)
    assert (result.local_batch, result.batch, result.too_large, result.finished) == (100, 100, 102, True)
    assert [probe.local_batch for probe in result.out_of_memory] == [102, 104]


def test_where_only_other_nodes_were_measured_nothing_fits(tmp_path: Path) -> None:
    run = run_of(tmp_path, spec_of())
    make_runs.add_measured(run, 2, 16)
    make_runs.add_out_of_memory(run, 1, 1)
    with pytest.raises(OutOfMemoryAtMinimum, match="local batch 1 on 1 node"):
        largest_batch.make_largest_batch(run, GPU, largest_batch.plan_largest_batch_search(run, GPU))


def test_a_search_between_two_trials_is_running_until_its_job_has_ended(tmp_path: Path) -> None:
    run, launcher = run_of(tmp_path, spec_of()), FakeLauncher()
    profile.submit_probes(run, largest_batch.plan_largest_batch_search(run, GPU), launcher)
    task = run.read_task("largest-n001")
    assert isinstance(task, ProbeTask)
    make_runs.add_measured(run, 1, task.local_batches[0])
    states = []
    for answer in ("running", "ended"):
        launcher.says["largest-n001"] = answer
        states += [job.state for job in read_run_status(run, launcher, now=make_runs.START + 9).jobs]
    assert states == ["running", "done"]
