"""`tula check` and `tula init`; the inspection, the scheduler and the nodes are stand-ins."""

import re
import statistics
import sys
import time
from pathlib import Path

import make_runs as make
import pytest
from make_results import Truth, make_inspection, make_out_of_memory, make_probe
from read_diagnostics import codes, values

from tula_cli.cluster.slurm import queue as scheduler
from tula_cli.cluster.slurm import site
from tula_cli.cluster.slurm.site import Partition, PartitionNodeType
from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import JobFailed, Pending, SchedulerError, SpecError
from tula_cli.host.failures import describe_advice
from tula_cli.run.directory import RunDir
from tula_cli.run.records.failures import Failure
from tula_cli.run.records.inspections import Inspection, Transfer
from tula_cli.run.records.probes import Components, Footprint, Measured
from tula_cli.services import check as services_check
from tula_cli.services import estimate as services_estimate
from tula_cli.services import logs as services_logs
from tula_cli.services import messages
from tula_cli.services import nodes as services_nodes
from tula_cli.services.check import check_job, check_job_on_all_node_types
from tula_cli.services.estimate import estimate_memory
from tula_cli.services.nodes import choose_node_count, collect_node_check, submit_node_check, watch_node_check
from tula_cli.services.search import ASSUMED_START_SECONDS, estimate_search, list_measured_probes
from tula_cli.show import check as show_check
from tula_cli.show import check as show_estimate
from tula_cli.spec.job import JobSpec

MB = 10**6


def footprint(local_batch: int) -> Footprint:
    """Return 40 MB that stay, and 2 MB a sample."""
    return Footprint(local_batch=local_batch, memory=components(local_batch, peak=40 * MB + 2 * MB * local_batch))


def components(local_batch: int, *, peak: int, libraries: int = 0) -> Components:
    batch = MB // 2 * local_batch
    return Components(
        parameters=10 * MB, gradients=10 * MB, optimizer=10 * MB, factors=10 * MB, batch=batch,
        activations=peak - 40 * MB - batch, peak=peak, reserved=peak, libraries=libraries,
    )  # fmt: skip


def inspection(**changes) -> Inspection:
    values = {"dataset_size": 1000, "parameters": 2_500_000, "footprints": (footprint(8), footprint(16))}
    return make_inspection(**{**values, "hardware": "a processor", **changes})


@pytest.fixture
def found(monkeypatch):
    """Choose what the inspection finds."""

    def choose(**changes) -> None:
        result = inspection(**changes)
        monkeypatch.setattr(services_check, "inspect", lambda _: result)
        monkeypatch.setattr(services_estimate, "inspect", lambda _: result)

    choose()
    return choose


def spec(**sections) -> JobSpec:
    content = {
        "model": {"name": "small_cnn"},
        "dataset": {"name": "digits"},
        "optimizer": {"lr": 0.1},
        "train": {"epochs": 1},
        "search": {"nodes": [1, 2], "min_batch": 32, "max_minutes": 6, "max_node_hours": 1, "strategy": "sweep"},
        "pricing": {"kind": "node_hour", "price": 10.0},
    }
    for name, section in sections.items():
        content[name] = {**content.get(name, {}), **section}
    return JobSpec.model_validate(content)


# --- check


def test_a_scheduler_of_ones_own_that_is_not_there_is_reported_before_the_model_is_built():
    def never(spec):
        raise AssertionError("built")

    with pytest.raises(SpecError, match="there is no module 'no_such_site'"):
        check_job_on_all_node_types(
            [RunDir.from_spec(Path("runs"), make.spec(cluster={"kind": "no_such_site:Pbs"}))], inspector=never
        )


def test_jobs_are_those_of_the_search(found):
    report = check_job(spec())
    assert [(job.nodes, job.batches) for job in report.jobs] == [(1, (32, 64, 128, 256, 512)), (2, (32, 128, 512))]
    assert report.jobs[1].local_batches == (16, 64, 256)
    assert report.probes == 8
    assert report.problems == ()


def test_bounds_are_jobs_times_nodes_times_their_longest(found):
    report = check_job(spec())
    assert report.node_hours_at_most == pytest.approx((1 + 2) * 6 / 60)
    assert report.machine_hours_at_most == pytest.approx(2 * 6 / 60)
    assert report.price_at_most == pytest.approx(3.0)


def test_what_is_expected_follows_from_the_nearest_probes_and_stays_below_the_most(tmp_path):
    job = spec(search={"nodes": [1, 2], "max_minutes": 20})
    jobs = [(1, (32, 64, 1024)), (2, (16,))]
    supposed = estimate_search(job, jobs, [])
    assert supposed.probes == 0 and "0.1 s per step" in supposed.basis
    assert supposed.hours == pytest.approx(
        (2 * ASSUMED_START_SECONDS + 4 * job.search.estimate_probe_seconds(0.1)) / 3600
    )
    run = RunDir.create(tmp_path, job)
    for local in (32, 512):
        make.add_measured(run, 1, local)
    start, few, many = (
        run.read_result("probe-n001-l000032").overheads.startup,
        *(
            job.search.estimate_probe_seconds(statistics.median(run.read_result(f"probe-n001-l{local:06d}").step_times))
            for local in (32, 512)
        ),
    )
    known = estimate_search(job, jobs, list_measured_probes(run))
    assert known.probes == 2 and many > few
    assert known.hours == pytest.approx((2 * start + 3 * few + many) / 3600)
    assert known.node_hours == pytest.approx((3 * start + 4 * few + many) / 3600)
    brief = spec(search={"nodes": [1, 2], "max_minutes": 0.01})
    assert estimate_search(brief, jobs, list_measured_probes(run)).hours == pytest.approx(2 * 0.01 / 60)


def test_a_check_tells_what_is_expected_beside_what_is_at_most(found):
    report = check_job(spec())
    shown = "\n".join(str(line) for line in show_check.render_check(report, {}))
    assert re.search(r"expected .* with one job at a time, .* node-h \(assuming 0.1 s per step\)\nat most", shown)


@pytest.mark.parametrize("setting", ["setup", "wrapper"])
def test_a_missing_file_of_the_jobs_is_an_error_before_anything_is_submitted(setting: str) -> None:
    sections = {"setup": {"setup": "nowhere.sh"}, "wrapper": {"slurm": {"wrapper": "nowhere.sh"}}}
    with pytest.raises(SpecError, match=rf"{setting}: cannot read .*nowhere\.sh: No such file or directory"):
        check_job(spec(cluster={"kind": "slurm", **sections[setting]}))


def test_slurm_has_no_machine_hours(found):
    assert check_job(spec(cluster={"kind": "slurm"})).machine_hours_at_most is None


def test_memory_price_needs_a_capacity(found):
    per_memory = spec(pricing={"kind": "gb_hour", "price": 1.0})
    assert check_job(per_memory).price_at_most is None
    found(capacity=10**9)
    assert check_job(per_memory).price_at_most == pytest.approx(0.3)


def test_memory_bounds_the_batches(found):
    found(capacity=200 * MB)
    report = check_job(spec())
    assert report.largest_local_batch == 70  # (200 x 0.9 - 40) / 2
    assert report.jobs[0].batches == (32, 64)
    assert report.jobs[1].batches == (32, 64, 128)


def test_model_that_does_not_fit_is_a_problem(found):
    found(capacity=30 * MB)
    report = check_job(spec())
    assert report.jobs == ()
    assert report.largest_local_batch == 0
    assert codes(report.problems) == ["no-feasible-batch"] and "memory" in report.problems[0].text


def test_batch_beyond_the_dataset_is_a_problem(found):
    found(dataset_size=20)
    assert "larger than the dataset" in check_job(spec()).problems[0].text


def test_batches_that_do_not_divide_are_a_problem(found):
    report = check_job(spec(search={"nodes": [3]}))
    assert report.jobs == ()
    assert "No batch 32 x 2^k up to 1000 is divisible by 3 nodes" in report.problems[0].text


def test_nodes_without_a_batch_are_left_out_aloud(found):
    report = check_job(spec(search={"nodes": [1, 3]}))
    assert [job.nodes for job in report.jobs] == [1]
    assert values(report.warnings, "nodes-without-batch") == {"nodes": [3]}


@pytest.mark.parametrize("strategy", ["adaptive", "partial"])
def test_nodes_that_a_strategy_does_not_measure_are_not_said_to_hold_no_batch(found, strategy):
    report = check_job(spec(search={"strategy": strategy, "nodes": [1, 2, 4]}))
    assert len(report.jobs) < 3
    assert "nodes-without-batch" not in codes(report.warnings)


def test_more_ranks_than_cores_are_a_warning(found):
    assert "ranks-share-cores" not in codes(check_job(spec()).warnings)
    report = check_job(spec(cluster={"gpus_per_node": 2}))
    assert values(report.warnings, "ranks-share-cores") == {"ranks": 4, "cores": 2}


def test_values_that_hardly_go_together_are_warnings(found):
    late = {"kind": "multistep", "milestones": [1, 10, 1000]}
    warnings = check_job(spec(train={"epochs": 10, "workers": 200}, schedule=late)).warnings
    assert values(warnings, "milestones-after-end") == {"milestones": [10, 1000], "epochs": 10}
    assert values(warnings, "too-many-loader-processes") == {"workers": 200, "processes": 200, "cores": 2}
    slow = check_job(spec(train={"epochs": 10}, schedule={"warmup_epochs": 11})).warnings
    assert messages.warmup_after_end(warmup_epochs=11.0, epochs=10) in slow
    small = check_job(
        spec(train={"epochs": 10, "method": "ags"}, ags={"b_small": 64}, search={"max_batch": 128})
    ).warnings
    assert messages.batch_not_scaled(b_small=64, batches=[32, 64], method="ags") in small
    short = {"name": "AdamW", "lr": 0.1, "beta2_half_life": 100}
    warnings = check_job(spec(optimizer=short, train={"epochs": 10, "reference_batch": 128})).warnings
    assert messages.beta2_half_life_below_batch(half_life=100.0, reference_batch=128) in warnings
    grown = {"epochs": 10, "method": "lrs", "ramp": [{"epochs": 1, "batch": 512}]}
    unplaced = check_job(spec(train=grown, search={"max_batch": 128}))
    assert codes(unplaced.problems) == ["nodes-unusable-for-stages"]
    assert "nodes-unusable-for-stages" not in codes(unplaced.warnings)
    soon = {"kind": "multistep", "milestones": [1, 9], "warmup_epochs": 10}
    fine = check_job(spec(train={"epochs": 10, "workers": 4}, schedule=soon)).warnings
    assert not {"milestones-after-end", "warmup-after-end", "too-many-loader-processes"} & set(codes(fine))


@pytest.mark.parametrize(
    ("gpus", "cluster", "needed", "advice"),
    [
        (2, {}, 0, ""),
        (1, {}, 2, "search.nodes: [1]"),
        (3, {"gpus_per_node": 2}, 4, "search.nodes: [1]"),
        (1, {"gpus_per_node": 2}, 4, "cluster.gpus_per_node: 1"),
    ],
)
def test_more_ranks_than_gpus_on_this_machine_are_a_problem(found, gpus, cluster, needed, advice):
    found(device="cuda", gpus=gpus)
    problems = check_job(spec(cluster=cluster)).problems
    problem = messages.too_few_gpus(nodes=[1, 2], needed=needed, available=gpus, advice=advice)
    assert problems == ((problem,) if needed else ())


def test_gpus_of_a_cluster_are_not_those_of_this_machine(found):
    found(device="cuda", gpus=1)
    assert check_job(spec(cluster={"kind": "slurm"})).problems == ()


def test_more_than_the_cap_is_a_problem(found):
    report = check_job(spec(search={"max_node_hours": 0.2}))
    assert values(report.problems, "search-exceeds-cap") == {"node_hours": pytest.approx(0.3), "cap": 0.2}


def test_a_collective_that_training_does_not_use_is_a_warning(found):
    warnings = check_job(spec(cluster={"collective": "parameter_server"})).warnings
    assert codes(warnings).count("parameter-server-collective") == 1
    assert "parameter-server-collective" not in codes(check_job(spec(cluster={"collective": "tree"})).warnings)


def test_missing_cap_is_a_warning(found):
    assert "no-cap-on-node-hours" in codes(check_job(spec(search={"max_node_hours": None})).warnings)


def test_failed_estimate_is_a_warning_and_bounds_nothing(found):
    found(footprints=(), estimate_error="it reads numbers", capacity=10)
    report = check_job(spec())
    assert report.largest_local_batch is None
    assert report.probes == 8
    assert values(report.warnings, "memory-not-estimated") == {"reason": "it reads numbers"}


def test_warnings_of_the_inspection_are_passed_on(found):
    odd = Diagnostic("odd", {"samples": 3}, "Three samples are odd.")
    found(warnings=(odd,))
    assert odd in check_job(spec()).warnings


def test_reference_batch_above_the_dataset_size_is_warned_about(found):
    report = check_job(spec(train={"reference_batch": 1001}))
    expected = {"reference_batch": 1001, "dataset_size": 1000}
    assert values(report.warnings, "reference-batch-exceeds-dataset") == expected
    assert "reference-batch-exceeds-dataset" not in codes(check_job(spec(train={"reference_batch": 1000})).warnings)


def test_offline_nothing_is_built(monkeypatch):
    monkeypatch.setattr(services_check, "inspect", lambda _: pytest.fail("inspected"))
    unbounded = check_job(spec(), online=False)
    assert unbounded.jobs == () and unbounded.is_extent_unknown
    text = "\n".join(map(str, show_check.render_check(unbounded, {})))
    assert "without --offline, or set search.max_batch" in text and "finished" not in text
    report = check_job(spec(search={"max_batch": 64}), online=False)
    assert not report.is_extent_unknown
    assert report.inspection is None
    assert report.jobs[0].batches == (32, 64)


def test_what_a_plan_made_offline_does_not_know_is_warned_of(found):
    job = spec(search={"max_batch": 4096})
    assert values(check_job(job, online=False).warnings, "plan-made-offline") == {"strategy": job.search.strategy}
    online = check_job(job)
    assert "plan-made-offline" not in codes(online.warnings)
    assert max(online.jobs[0].batches) <= 1000 < max(check_job(job, online=False).jobs[0].batches), "of the dataset"
    assert "plan-made-offline" not in codes(check_job(spec(), online=False).warnings), "there is no plan"


# --- estimate


def test_rows_are_the_local_batches_of_the_search_up_to_the_first_that_does_not_fit(found):
    report = estimate_memory(spec(), capacity=200 * MB)
    assert [row.local_batch for row in report.rows] == [16, 32, 64, 128]
    assert [report.fits(row) for row in report.rows] == [True, True, True, False]
    assert report.largest_local_batch == 70
    assert report.rows[0].memory == footprint(16).memory


def test_capacity_of_the_inspection_is_the_default(found):
    found(capacity=100 * MB)
    assert estimate_memory(spec()).largest_local_batch == 25
    assert estimate_memory(spec(), capacity=200 * MB).capacity == 200 * MB


def test_without_a_capacity_nothing_is_said_to_fit(found):
    report = estimate_memory(spec())
    assert report.largest_local_batch is None
    assert report.fits(report.rows[0]) is None


def test_components_add_up_to_the_peak(found):
    for row in estimate_memory(spec()).rows:
        parts = row.memory.static_bytes + row.memory.batch + row.memory.activations
        assert parts == pytest.approx(row.memory.peak, abs=2)


def test_accumulation_counts_micro_batches(found):
    report = estimate_memory(spec(train={"accumulate": 4}), capacity=200 * MB)
    assert report.largest_local_batch % 4 == 0
    assert report.rows[0].local_batch % 4 == 0


def test_search_without_a_batch_still_tells_memory(found):
    assert [row.local_batch for row in estimate_memory(spec(search={"nodes": [3]})).rows][:3] == [1, 2, 4]


def test_estimate_that_failed_says_why(found):
    found(footprints=(), estimate_error="it reads numbers")
    with pytest.raises(JobFailed, match="it reads numbers"):
        estimate_memory(spec())


def probe(local_batch: int, **changes) -> Measured:
    """Return a probe of a job that takes 100 MB more than the estimate tells, and 3 MB a sample, on a GPU of 500 MB."""
    memory = components(local_batch, peak=140 * MB + 3 * MB * local_batch, libraries=50 * MB)
    return make_probe(Truth(), 1, local_batch, memory=memory, capacity=500 * MB, **changes)


def test_an_estimate_tells_what_data_takes_of_the_nodes_own_memory(found):
    assert estimate_memory(spec()).data is None  # no size of a sample is known
    found(sample_bytes=MB, cpus=5)
    report = estimate_memory(spec(), capacity=200 * MB)
    assert (report.largest_row, report.loaders) == (64, 4)
    assert report.data.shared == 2 * (2 * 4 + 1) * 64 * MB  # two loaders, two batches a process, one in use
    assert any("up to 1.07 GiB in /dev/shm per rank, at local batch 64 with 4 loader processes" in line
               for line in show_estimate.render_estimate(report) if isinstance(line, str))  # fmt: skip


def test_probes_of_the_job_correct_the_estimate(found):
    report = estimate_memory(spec(), results=[probe(16), probe(64)])
    row = next(row for row in report.rows if row.local_batch == 32)
    assert (row.memory.peak, row.memory.libraries) == (236 * MB, 50 * MB)
    assert report.capacity == 500 * MB
    assert report.largest_local_batch == (450 - 50 - 140) // 3
    assert report.correction == "corrected by 2 probes of this job (local batches 16 to 64)"
    assert estimate_memory(spec(), results=[]).correction == ""


def test_how_far_the_corrected_model_is_off_is_reported(found):
    report = estimate_memory(spec(), results=[probe(16), probe(32), probe(64)])
    assert report.correction.endswith("(local batches 16 to 64; median error of the peak memory 0.0 %)")


def test_probes_stand_in_for_an_estimate_that_failed(found):
    found(footprints=(), estimate_error="it reads numbers")
    report = estimate_memory(spec(), results=[probe(16), probe(64)])
    assert report.largest_local_batch == 86
    assert report.correction.startswith("from 2 probes alone")


def test_out_of_memory_in_a_probe_bounds_the_estimate(found):
    report = estimate_memory(spec(), results=[probe(16), make_out_of_memory(1, 64)])
    assert report.largest_local_batch == 63
    assert [report.fits(row) for row in report.rows] == [True, True, False]
    assert "a local batch of 64 ran out of memory" in report.correction


def test_what_ran_fits_even_above_the_margin(found):
    report = estimate_memory(spec(), results=[probe(16), probe(96)])
    assert report.largest_local_batch == 96


def test_outcomes_on_the_probes_gpu_say_nothing_of_another_one(found):
    results = [probe(16), probe(96), make_out_of_memory(1, 128)]
    assert estimate_memory(spec(), capacity=10_000 * MB, results=results).largest_local_batch > 1000
    assert estimate_memory(spec(), capacity=300 * MB, results=results).largest_local_batch == (270 - 50 - 140) // 3


def test_probes_on_different_hardware_do_not_correct(found):
    other = probe(64)
    other = other.model_copy(update={"environment": other.environment.model_copy(update={"hardware": "another"})})
    report = estimate_memory(spec(), results=[probe(16), other])
    assert report.rows[0].memory.peak == footprint(16).memory.peak
    assert "different hardware" in report.correction


# --- on the cluster

SLURM = {"kind": "slurm", "device": "cpu"}


class Nodes:
    """A check's job on SLURM: a run directory, a launcher that runs nothing, and what the nodes write."""

    def __init__(self, folder, job: JobSpec) -> None:
        self.spec, self.launcher = job, make.FakeLauncher(scheduler="slurm")
        self.run = RunDir.create(folder, job)
        self.now = 0.0
        self.task = self.start()

    def start(self, job: JobSpec | None = None, nodes: int = 2):
        return submit_node_check(self.run.with_spec(job or self.spec), self.launcher, nodes=nodes)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def watch(self, **how) -> list[str]:
        states = watch_node_check(self.run, self.launcher, self.task, clock=lambda: self.now, sleep=self.sleep, **how)
        return [state.state for state in states]

    def conclude(self):
        return collect_node_check(self.run, self.task, clock=lambda: self.now, sleep=self.sleep)

    def log(self, *tasks: int) -> None:
        """Leave what SLURM writes for each of its tasks on the task's own node."""
        job = self.run.find_job(self.task.job)
        self.run.submitit_dir.mkdir(exist_ok=True)
        for number in tasks:
            (self.run.submitit_dir / f"{job.scheduler_id}_{number}_log.out").touch()

    def report(self, first=None, second=None, *, silent: tuple[int, ...] = (), **changes) -> None:
        """Write the report of two nodes, with changes to each and to all; the silent ones' own files do not appear."""
        report = make.cluster_report(self.run, self.task, first or {}, second or {}).model_copy(update=changes)
        for node in report.nodes:
            if node.node not in silent:
                self.run.checks.record_sign_in(self.task.id, node.node, node.host)
        self.run.checks.write_report(report)

    def ends(self, **how) -> None:
        attempt = make.attempt(self.task.id, start=time.time(), end=time.time(), **how)
        self.run.write_attempt(attempt)


@pytest.fixture
def nodes(tmp_path, monkeypatch) -> Nodes:
    monkeypatch.setattr(scheduler, "find_job_outcome", lambda _: None)
    monkeypatch.setattr(site, "list_allocated_hosts", lambda _: ("n1", "n2"))
    monkeypatch.setattr(site, "list_partitions", lambda: ())
    return Nodes(tmp_path, spec(cluster=SLURM))


def test_nodes_as_they_should_be_are_no_problem(nodes):
    nodes.report()
    assert nodes.watch() == []
    result = nodes.conclude()
    assert (result.problems, result.warnings) == ((), ())
    assert [node.host for node in result.report.nodes] == ["n1", "n2"]


@pytest.mark.parametrize(
    ("second", "code"),
    [
        ({"token": ""}, "run-directory-not-shared"),
        ({"token": "other"}, "run-directory-not-shared"),
        ({"write_error": "read-only"}, "cannot-write-run-directory"),
        ({"dataset": False}, "cannot-read-dataset"),
    ],
)
def test_a_node_that_a_job_cannot_use_is_a_problem(nodes, second, code):
    nodes.report(second=second)
    (problem,) = nodes.conclude().problems
    assert problem.code == code and "n2" in problem.values.values()
    assert problem.values.get("other_content", False) is (second.get("token") == "other")


def test_what_a_node_wrote_has_to_be_seen_here_in_time(nodes):
    nodes.report(silent=(1,))
    (problem,) = nodes.conclude().problems
    assert problem.code == "files-not-visible" and problem.values["host"] == "n2"
    assert nodes.now >= 30


def test_a_file_that_appears_late_is_no_problem(nodes, monkeypatch):
    nodes.report(silent=(1,))
    monkeypatch.setattr(nodes, "sleep", lambda _: nodes.run.checks.record_sign_in(nodes.task.id, 1, "n2"))
    assert nodes.conclude().problems == ()


@pytest.mark.parametrize(("device", "problems"), [("cpu", 0), ("auto", 1), ("cuda", 1)])
def test_a_node_without_a_gpu_is_a_problem_where_gpus_are_wanted(tmp_path, nodes, device, problems):
    wanted = Nodes(tmp_path / device, spec(cluster={**SLURM, "device": device}))
    wanted.report(second={"gpus": (), "gpu_memory": None, "driver": ""})
    result = wanted.conclude()
    assert len(result.problems) == problems
    assert all(problem == messages.no_gpu_visible(hosts="n2") for problem in result.problems)


def test_no_gpu_at_all_is_a_warning_where_any_device_will_do(tmp_path, nodes):
    without = {"gpus": (), "gpu_memory": None}
    for device, problems, warnings in (("auto", 0, 1), ("cuda", 1, 0), ("cpu", 0, 0)):
        wanted = Nodes(tmp_path / device, spec(cluster={**SLURM, "device": device}))
        wanted.report(without, without)
        result = wanted.conclude()
        assert (len(result.problems), len(result.warnings)) == (problems, warnings)


def test_ranks_that_share_a_gpu_are_a_problem(tmp_path, nodes):
    wanted = Nodes(tmp_path / "auto", spec(cluster={**SLURM, "device": "auto"}))
    wanted.report(second={"ranks": 2})
    assert wanted.conclude().problems == (messages.fewer_gpus_than_ranks(host="n2", ranks=2, gpus=1),)


def test_ranks_that_are_bound_to_one_gpu_of_several_are_a_problem(tmp_path, nodes):
    wanted = Nodes(tmp_path / "cuda", spec(cluster={**SLURM, "device": "cuda"}))
    wanted.report(second={"ranks": 4, "gpus": ("A100",) * 4, "shared_gpus": ((0, 2), (1, 3))})
    first, second = wanted.conclude().problems
    assert first == messages.ranks_share_gpu(host="n2", ranks=(0, 2), gpus=4)
    assert second == messages.ranks_share_gpu(host="n2", ranks=(1, 3), gpus=4)


def test_gpus_of_one_node_without_a_fast_link_are_a_warning(nodes):
    nodes.report(inside=(Transfer(size=10**9, seconds=0.1),))
    (warning,) = nodes.conclude().warnings
    assert warning == messages.slow_gpu_link(host="n1", gigabytes_per_second=10.0)


def test_fast_links_inside_a_node_are_none(nodes):
    nodes.report(inside=(Transfer(size=10**9, seconds=0.01),))
    assert nodes.conclude().warnings == ()


def test_what_the_backend_says_of_a_broken_network_is_a_problem(nodes):
    nodes.report(network_error="NCCL error: unhandled system error; ibv_create_cq failed", latency=None, transfers=())
    (problem,) = nodes.conclude().problems
    assert problem == messages.ranks_cannot_communicate(
        backend="nccl", reason="NCCL error: unhandled system error; ibv_create_cq failed"
    )


def test_what_the_nodes_told_before_the_network_ended_the_ranks_is_not_lost(nodes):
    nodes.run.checks.write_draft_report(make.cluster_report(nodes.run, nodes.task, {}, {"dataset": False}))
    nodes.ends(outcome="signal", message="killed by SIGABRT")
    nodes.log(0, 1)
    result = nodes.conclude()
    assert [node.host for node in result.report.nodes] == ["n1", "n2"]
    assert values(result.problems, "cannot-read-dataset")["hosts"] == "n2"
    assert "SIGABRT" in values(result.problems, "ranks-cannot-communicate")["reason"]


def test_ranks_on_cpus_that_the_kernel_killed_for_memory_are_to_request_more(nodes):
    nodes.run.checks.write_draft_report(make.cluster_report(nodes.run, nodes.task, {"gpus": ()}, {"gpus": ()}))
    nodes.ends(outcome="device_oom", message="the kernel killed a process because the memory was used up")
    nodes.log(0, 1)
    reason = values(nodes.conclude().problems, "ranks-cannot-communicate")["reason"]
    assert reason.endswith(f"was used up; {nodes.task.spec.cluster.backend.more_memory_advice}")


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ({"gpus": ("V100",)}, messages.nodes_differ(aspect="GPU", differences="A100 on n1; V100 on n2")),
        ({"torch": "2.7"}, messages.nodes_differ(aspect="torch", differences="2.6 on n1; 2.7 on n2")),
        ({"driver": ""}, messages.nodes_differ(aspect="GPU driver", differences="550 on n1; none on n2")),
        ({"clock_offset": 1.5}, messages.clock_offset(host="n2", seconds=1.5, first_host="n1")),
        ({"clock_offset": -90.0}, messages.clock_offset(host="n2", seconds=-90.0, first_host="n1")),
        ({"shared": 64 * 2**20}, messages.small_shared_memory(host="n2", free_bytes=64 * 2**20)),
    ],
)
def test_what_spoils_measurements_is_a_warning(nodes, second, expected):
    nodes.report(second=second)
    result = nodes.conclude()
    assert result.problems == ()
    assert result.warnings == (expected,)


def test_clocks_less_than_a_second_apart_will_do(nodes):
    nodes.report(second={"clock_offset": 0.9, "shared": 2**31})
    assert nodes.conclude().warnings == ()


def test_a_dataset_that_is_still_to_be_downloaded_is_a_warning(tmp_path, nodes):
    wanted = Nodes(tmp_path / "x", spec(cluster=SLURM, dataset={"name": "CIFAR10", "root": "none", "download": True}))
    wanted.report({"dataset": False}, {"dataset": False})
    result = wanted.conclude()
    assert result.problems == ()
    assert codes(result.warnings) == ["dataset-not-downloaded"]


# --- its job


def test_the_same_check_is_taken_up_until_its_end_was_reported(nodes):
    assert nodes.start().id == nodes.task.id == "check-n002-1"
    nodes.report()
    assert nodes.start().id == "check-n002-1", "ended, but nobody has seen it"
    nodes.conclude()
    assert nodes.start().id == "check-n002-2"
    assert nodes.launcher.submitted == ["check-n002-1", "check-n002-2"]


def test_a_check_measures_nothing_and_trains_nothing(nodes):
    assert nodes.run.read_check_tasks() == [nodes.task]
    assert nodes.run.read_tasks() == []


def test_the_logs_of_a_check_are_found(nodes):
    path = nodes.run.get_log_path(nodes.task.id, 1)
    path.parent.mkdir()
    path.write_text("no interface\n")
    assert [line.text for line in services_logs.read_logs(nodes.run, services_logs.LogQuery(job=nodes.task.job))] == [
        "no interface"
    ]


def test_checks_are_numbered_on_beyond_nine(nodes):
    for number in range(2, 13):
        nodes.run.checks.mark_reported(f"check-n002-{number - 1}")
        assert nodes.start().id == f"check-n002-{number}"


def test_a_check_with_other_settings_takes_the_place_of_one_that_waits(nodes):
    nodes.start(nodes=4)
    changed = nodes.start(spec(cluster={**SLURM, "slurm": {"partition": "gpu"}}))
    assert changed.id == "check-n002-3"
    assert nodes.launcher.cancelled == ["check-n002-1"], "not the one on other nodes"


def test_a_check_that_was_refused_is_submitted_again(nodes, monkeypatch):
    nodes.run.checks.mark_reported(nodes.task.id)
    submit = nodes.launcher.submit

    def refuse(*_):
        raise SchedulerError("no")

    monkeypatch.setattr(nodes.launcher, "submit", refuse)
    with pytest.raises(SchedulerError):
        nodes.start()
    monkeypatch.setattr(nodes.launcher, "submit", submit)
    assert nodes.start().id == "check-n002-2"


def test_states_are_reported_until_the_report_is_there(nodes):
    nodes.launcher.says[nodes.task.job] = "pending"
    states = watch_node_check(nodes.run, nodes.launcher, nodes.task, sleep=nodes.sleep)
    assert next(states).state == "pending"
    nodes.report()
    assert list(states) == []


def test_an_expected_start_is_reported_again_where_another_minute_is_shown(nodes, monkeypatch):
    starts = (None, 600.0, 601.0, 659.9, 660.0, 660.0)
    states = [scheduler.SchedulerState("pending", "Priority", at) for at in starts]
    monkeypatch.setattr(services_nodes, "watch_node_check", lambda *_, **__: iter(states))
    monkeypatch.setattr(services_nodes, "collect_node_check", lambda *_: None)
    events = services_nodes.run_node_check([nodes.run], lambda _: nodes.launcher, nodes=2)
    assert [event.state.starts_at for event in events] == [None, 600.0, 660.0]


def test_waiting_ends_with_the_time_and_says_why_it_waits(nodes):
    nodes.launcher.says[nodes.task.job], nodes.launcher.reason = "pending", "Priority"
    with pytest.raises(Pending, match=r"check-n002-1 has not finished after 20 s: pending \(Priority\)"):
        nodes.watch(timeout=20)
    assert nodes.now == pytest.approx(20)
    assert nodes.start().id == nodes.task.id


def test_a_job_that_will_never_start_is_cancelled(nodes):
    nodes.launcher.says[nodes.task.job], nodes.launcher.reason = "pending", "PartitionDown: will not start"
    nodes.launcher.flags = {"hopeless": True}
    with pytest.raises(SchedulerError, match="PartitionDown"):
        nodes.watch()
    assert nodes.launcher.cancelled == ["check-n002-1"]
    assert nodes.start().id == "check-n002-2"


def test_a_hopeless_moment_does_not_count(nodes, monkeypatch):
    nodes.launcher.says[nodes.task.job], nodes.launcher.reason = "pending", "PartitionDown"
    nodes.launcher.flags = {"hopeless": True}
    monkeypatch.setattr(nodes, "sleep", lambda _: (nodes.launcher.flags.clear(), nodes.report()))
    assert nodes.watch() == ["pending"]


def test_nodes_that_leave_nothing_do_not_see_the_folder(nodes):
    nodes.launcher.says[nodes.task.job] = "ended"
    assert nodes.watch() == ["ended"]
    with pytest.raises(JobFailed, match="n1, n2 reported nothing") as caught:
        nodes.conclude()
    assert nodes.now >= 30, "what they wrote may be late"
    assert str(nodes.run.path) in caught.value.message
    assert "--run-dir" in caught.value.hint


def test_the_node_that_leaves_nothing_is_named_and_the_job_ended(nodes):
    nodes.log(0)
    with pytest.raises(JobFailed, match="n1 wrote files there, n2 did not") as caught:
        nodes.watch()
    assert 30 < nodes.now < 60
    assert "exclude=n2" in caught.value.hint
    assert nodes.launcher.cancelled == ["check-n002-1"]


def test_nodes_are_reported_by_number_where_nobody_knows_their_names(nodes, monkeypatch):
    monkeypatch.setattr(site, "list_allocated_hosts", lambda _: ())
    nodes.log(0)
    with pytest.raises(JobFailed, match="node 1 of the job wrote files there, node 2 of the job did not") as caught:
        nodes.watch()
    assert "exclude" not in caught.value.hint


@pytest.mark.parametrize(("launcher", "logs"), [("srun", (0, 2)), ("torchrun", (0, 1))])
def test_a_node_has_as_many_tasks_as_its_launcher_starts(tmp_path, nodes, launcher, logs):
    two = Nodes(tmp_path / launcher, spec(cluster={**SLURM, "gpus_per_node": 2, "slurm": {"launcher": launcher}}))
    two.log(*logs)
    two.ends(outcome="user", message="no interface")
    with pytest.raises(JobFailed, match="no interface"):
        two.conclude()
    assert two.now == 0, "both nodes were heard of"


def test_a_failure_is_reported_with_its_cause(nodes):
    nodes.log(0, 1)
    nodes.ends(outcome="user", message="no network interface 'ib7'", rank=1)
    assert nodes.watch() == []
    with pytest.raises(JobFailed, match=r"check-n002-1 failed \(rank 1 on n1\): no network interface 'ib7'"):
        nodes.conclude()


@pytest.mark.parametrize("outcome", ["host_oom", "hung", "user"])
def test_a_failure_is_reported_with_what_to_do_about_it(nodes, outcome):
    nodes.log(0, 1)
    nodes.ends(outcome=outcome, message="the end")
    with pytest.raises(JobFailed, match="check-n002-1 failed: the end") as caught:
        nodes.conclude()
    assert caught.value.hint == describe_advice(Failure(outcome=outcome), nodes.task.spec)


def test_a_port_that_was_taken_is_tried_again(nodes):
    nodes.ends(outcome="port")
    nodes.launcher.says[nodes.task.job] = "ended"
    assert nodes.watch() == ["ended"], "not over until the scheduler says so"


def test_a_job_that_ends_before_its_ranks_is_reported_by_its_log(nodes):
    nodes.log(0, 1)
    job = nodes.run.find_job(nodes.task.job)
    (nodes.run.submitit_dir / f"{job.scheduler_id}_0_log.err").write_text("module: command not found\n")
    with pytest.raises(JobFailed, match="module: command not found"):
        nodes.conclude()


@pytest.mark.parametrize(
    ("how", "words"), [("cancelled", "the job was cancelled"), ("node_failure", "a node was lost")]
)
def test_a_job_that_was_ended_is_no_story_of_folders(nodes, monkeypatch, how, words):
    monkeypatch.setattr(scheduler, "find_job_outcome", lambda _: how)
    with pytest.raises(JobFailed, match=f"ended before it could check the nodes: {words}"):
        nodes.conclude()


def test_tula_cancel_ends_the_waiting(nodes):
    nodes.run.mark_job_cancelled(nodes.task.job)
    assert nodes.watch() == []
    with pytest.raises(JobFailed, match="was cancelled"):
        nodes.conclude()


# --- on how many nodes


def offer(monkeypatch, **sizes: int) -> None:
    results = [
        Partition(n, n == "main", True, 60, None, (PartitionNodeType(size, 4, 0, ()),)) for n, size in sizes.items()
    ]
    monkeypatch.setattr(site, "list_partitions", lambda: tuple(results))


@pytest.mark.parametrize(("searched", "nodes"), [([1, 2], 2), ([4, 8], 4), ([1], 2), ([8, 3], 3)])
def test_the_fewest_nodes_of_the_search_are_looked_at(monkeypatch, searched, nodes):
    offer(monkeypatch, main=16)
    assert choose_node_count(spec(cluster=SLURM, search={"nodes": searched}), None) == nodes


def test_a_small_partition_bounds_the_nodes(monkeypatch):
    offer(monkeypatch, main=2, tiny=1)
    job = spec(cluster=SLURM, search={"nodes": [4, 8]})
    assert choose_node_count(job, None) == 2
    with pytest.raises(SpecError, match="--nodes 3: a job can have at most 2 nodes here"):
        choose_node_count(job, 3)
    tiny = spec(cluster={**SLURM, "slurm": {"partition": "tiny"}})
    assert choose_node_count(tiny, None) == 1


def test_nodes_are_taken_as_wanted_where_nobody_knows_the_partition(monkeypatch):
    offer(monkeypatch)
    assert choose_node_count(spec(cluster=SLURM), 64) == 64
    assert choose_node_count(spec(search={"nodes": [1]}), None) == 1
    offer(monkeypatch, main=2)
    assert choose_node_count(spec(cluster={**SLURM, "slurm": {"partition": "other"}}), 64) == 64


def test_of_a_script_nothing_is_reported_that_it_decides_by_itself():
    on_slurm = {"cluster": {"kind": "slurm", "minutes": 60, "slurm": {"cpus_per_task": 8}}}
    value = JobSpec.model_validate({**make.script_spec(epochs=1).model_dump(), **on_slurm})
    assert "data loader" in check_job(spec(**on_slurm), online=False).settings[0]
    assert check_job(value, online=False).settings == ()
    with pytest.raises(SpecError, match="tula cannot build its model"):
        estimate_memory(value, inspector=lambda _: pytest.fail("built something"))


def own_job(command: str, **sections) -> JobSpec:
    content = make.script_spec(samples=1000).model_dump(mode="json", exclude_unset=True)
    return JobSpec.model_validate({**content, "script": {**content["script"], "command": command}, **sections})


def test_a_program_that_is_missing_is_reported_before_anything_starts():
    with pytest.raises(SpecError, match="the program torchrunn does not exist on this machine"):
        check_job(own_job("torchrunn train.py -b {local_batch}"))
    on_slurm = {"cluster": {"kind": "slurm", "minutes": 60}}
    result = check_job(own_job("torchrunn train.py -b {local_batch}", **on_slurm))
    assert values(result.warnings, "program-not-here") == {"program": "torchrunn"}
    for command in (
        "train.py -b {local_batch}",
        f"{sys.executable} train.py -b {{local_batch}}",
        "sh -c {local_batch}",
    ):
        assert "program-not-here" not in codes(check_job(own_job(command)).warnings)


@pytest.mark.parametrize(("name", "fails"), [("python", True), ("python3.11", True), ("python3", False)])
def test_a_python_without_torch_is_reported_before_anything_starts(tmp_path, name, fails):
    other = tmp_path / name
    other.write_text(f"#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit {int(fails)}\n")
    other.chmod(0o755)
    command = f"{other} train.py -b {{local_batch}}"
    on_slurm = {"cluster": {"kind": "slurm", "minutes": 60}}
    if fails:
        with pytest.raises(SpecError, match="cannot import torch: ModuleNotFoundError"):
            check_job(own_job(command))
    warnings = check_job(own_job(command, **on_slurm)).warnings
    assert ("torch-not-here" in codes(warnings)) is fails
    if fails:
        reason = "ModuleNotFoundError: No module named 'torch'"
        assert values(warnings, "torch-not-here") == {"python": str(other), "reason": reason}


@pytest.mark.parametrize(
    ("nodes", "gpus", "method", "other_nodes"),
    [([1], 1, "ags", []), ([1, 2, 4], 1, "ags", [2, 4]), ([1, 2], 2, "ags", None), ([1], 1, "lbt", None)],
)
def test_gradients_of_one_gpu_cannot_be_scaled_in_a_script(nodes, gpus, method, other_nodes):
    search, cluster = {"nodes": nodes, "max_batch": 64}, {"gpus_per_node": gpus}
    value = own_job("train.py -b {local_batch}", train={"method": method}, search=search, cluster=cluster)
    message = [warning for warning in check_job(value, online=False).warnings if warning.code == "ags-on-one-rank"]
    expected = messages.ags_on_one_rank(nodes=[1], other_nodes=other_nodes or [])
    assert message == ([] if other_nodes is None else [expected])


def test_what_an_interruption_of_a_script_costs_is_reported(tmp_path):
    value = own_job("train.py -b {local_batch}")
    run = RunDir.create(tmp_path, value)
    assert "the script cannot resume (no script.resume)" in check_job(value, run=run).interruption
    assert check_job(spec(), online=False).interruption == ""
    text = "\n".join(str(part) for part in show_check.render_check(check_job(value, run=run), {}))
    assert "checkpoints: the script cannot resume" in text


def test_the_figures_of_an_adaptive_search_are_reported_to_be_those_of_its_first_round(found):
    assert "adaptive-first-round" not in codes(check_job(spec()).warnings)
    report = check_job(spec(search={"strategy": "adaptive"}))
    assert report.probes <= 4 and values(report.warnings, "adaptive-first-round") == {
        "chosen_by_auto": False,
        "capped": True,
    }


@pytest.mark.parametrize(
    ("epochs", "expected"), [(1, [(1, 3), (4, 1)]), (1_000_000, [(1, 5), (2, 1), (4, 3)])], ids=["adaptive", "sweep"]
)
def test_auto_is_a_sweep_where_it_takes_little_of_the_training_and_else_adaptive(found, epochs, expected):
    job = spec(search={"strategy": "auto", "nodes": [1, 2, 4]}, train={"epochs": epochs})
    assert [(item.nodes, len(item.batches)) for item in check_job(job).jobs] == expected
    first_round = messages.adaptive_first_round(chosen_by_auto=True, capped=job.search.max_node_hours is not None)
    assert (first_round in check_job(job).warnings) == (epochs == 1)
    assert len(check_job(job, online=False).jobs) == 0, "the size of the dataset is not known"


# --- how it computes


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({}, "data loader: 7 to 8 processes per rank, from the rank's share of 16 cores"),
        ({"search": {"nodes": [2]}}, "data loader: 7 processes per rank, from the rank's share of 16 cores"),
        ({"search": {"nodes": [1, 16]}}, "data loader: 2 to 8 processes per rank"),
        (
            {"cluster": {"kind": "slurm", "slurm": {"cpus_per_task": 5}}},
            "data loader: 4 processes per rank, cluster.slurm",
        ),
        ({"cluster": {"kind": "slurm"}}, "data loader: 2 to 8 processes per rank, from the cores that SLURM assigns"),
    ],
)
def test_a_check_tells_the_loader_processes_that_follow_from_the_cores(found, sections, told):
    found(cpus=16)
    (line,) = check_job(spec(**sections)).settings
    assert line.startswith(told) and line.endswith("(train.workers: auto)")


def test_a_check_does_not_repeat_a_number_of_loader_processes(found):
    assert check_job(spec(train={"epochs": 1, "workers": 3})).settings == ()
