"""Probes: what is measured, what is left behind, and what one probe leaves for the next."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_jobs import make_probe_task, make_spec

from tula_cli.errors import Diverged, SpecError
from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import Failed, Measured
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.measure import probe as worker_measure_probe
from tula_cli.worker.measure.probe import run_probes
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import loop as worker_train_loop

DEEP = {"model": {"name": "worker_jobs:deep"}, "dataset": {"args": {"size": 128, "eval_size": 32}}}


def probe(run: RunDir, ranks: Ranks, *local_batches: int, **changes: dict[str, Any]) -> list[Measured]:
    """Run the probes of a job and return the results that are now there."""
    task = make_probe_task(make_spec(**changes), *local_batches)
    run_probes(task, run, ranks, build_datasets(task.spec), started_at=time.time())
    results = [run.read_result(f"probe-n001-l{local:06d}") for local in local_batches]
    assert all(isinstance(result, Measured) for result in results)
    return [result for result in results if isinstance(result, Measured)]


def test_a_probe_measures_what_there_is(alone: Ranks, run: RunDir) -> None:
    (result,) = probe(run, alone, 32, **DEEP, search={"min_steps": 5})
    assert (result.batch, result.local_batch, result.nodes, result.accumulate) == (32, 32, 1, 1)
    assert (len(result.step_times), len(result.warmup_times)) == (5, 5)
    assert all(0 < seconds < 60 for seconds in result.step_times)
    assert 0 < result.compute_time < 60
    assert 0 < result.data_wait < max(result.step_times)
    assert result.cached_time is not None and 0 < result.cached_time < 60
    assert result.loader_time is not None and 0 < result.loader_time < 60
    assert result.gpus is None
    assert (result.dataset_size, result.eval_size, result.oversubscribed) == (128, 32, False)
    assert result.memory.activations > 5 * 32 * 4096 * 4  # half of its layers' outputs
    assert result.memory.static_bytes + result.memory.batch + result.memory.activations == result.memory.peak
    assert result.memory.batch == 32 * (16 * 4 + 8)
    assert result.memory.factors == 0
    overheads = result.overheads
    assert 0 < overheads.checkpoint < 10
    assert 0 < overheads.eval_batch < 10
    assert overheads.eval_batch_size == 32
    assert 0 < overheads.startup < 60
    assert result.gradients.steps == make_spec().search.max_extra_timing_steps == 5


def test_the_energy_is_that_of_the_timed_steps(alone: Ranks, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    class Meter:
        """Counts a step's number as its joules."""

        def __init__(self, ranks: Ranks) -> None:
            self.begin = len(made)

        def read_joules(self) -> float:
            return float(sum(range(self.begin, len(made))))

    def step(*args: Any, **given: Any) -> Any:
        made.append(given)
        return take(*args, **given)

    take, made = worker_train_loop._train_step, []
    monkeypatch.setattr(worker_train_loop, "_train_step", step)
    assert probe(run, alone, 16)[0].energy is None
    job, before = 2, len(made)  # steps that the job takes before its first probe
    monkeypatch.setattr(worker_measure_probe, "EnergyMeter", Meter)
    (result,) = probe(run, alone, 32, search={"min_steps": 5})
    assert result.energy == before + job + 5 + 2  # the middle one of the five


@pytest.mark.usefixtures("processor_clock")
def test_one_rank_has_nothing_to_synchronise(alone: Ranks, run: RunDir) -> None:
    (result,) = probe(run, alone, 32, **DEEP, optimizer={"lr": 1e-6})
    assert result.sync_time < 0.5 * sorted(result.step_times)[2]
    assert result.gradients.norm_sqr == pytest.approx(result.gradients.local_norm_sqr, rel=0.5)


@pytest.mark.usefixtures("processor_clock")
def test_ags_has_factors_and_a_refresh_and_the_plain_method_none(alone: Ranks, run: RunDir, tmp_path: Path) -> None:
    (plain,) = probe(run, alone, 32, **DEEP)
    ags = {"train": {"method": "ags"}, "ags": {"b_small": 48}}
    scaled = [
        probe(RunDir.create(tmp_path / name, make_spec()), alone, 64, **DEEP, **ags)[0] for name in ("a", "b", "c")
    ]
    assert plain.overheads.refresh == 0
    # The difference of two medians: a loaded machine may hide it once.
    assert max(result.overheads.refresh for result in scaled) > 0
    assert scaled[0].memory.factors == scaled[0].memory.gradients > 0


def test_the_libraries_of_a_metric_are_no_memory_of_a_probe(
    alone: Ranks, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "LIBRARY = bytes(range(256)) * (1 << 18)\n\ndef error(outputs, targets):\n    return outputs.sum() * 0\n"
    (tmp_path / "large_metric.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    first, second = (
        p.memory.peak for p in probe(run, alone, 16, 32, train={"metrics": {"error": "large_metric:error"}})
    )
    assert max(first, second) < 32 << 20, "not the 64 MiB that the module holds"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_can_be_probed(alone: Ranks, run: RunDir, precision: str) -> None:
    (result,) = probe(run, alone, 32, train={"precision": precision, "max_grad_norm": 1.0}, optimizer={"lr": 1e-6})
    assert result.gradients.local_norm_sqr == pytest.approx(result.gradients.norm_sqr, rel=0.5)


def test_steps_are_timed_with_factors_also_where_the_first_ones_overflow(
    alone: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, **kw: scaler(device, init_scale=2.0**30, **kw))
    job = make_spec(
        train={"method": "ags", "precision": "fp16", "reference_batch": 16},
        search={"min_steps": 24, "max_seconds": 60},
    )
    trainer = worker_measure_probe._build_trainer(make_probe_task(job, 64), alone, build_datasets(job), local_batch=64)
    worker_measure_probe._run_warm_up(trainer, worker_measure_probe.repeat_steps(trainer))
    assert trainer.scaler.get_scale() < 2.0**29 and trainer.ags is not None and trainer.ags.factors.has_factors


def test_a_training_that_diverges_in_its_first_steps_is_not_measured(alone: Ranks, run: RunDir) -> None:
    with pytest.raises(
        Diverged,
        match=r"the weights are not finite at epoch \d\.\d\d, step 5, 80 samples, because a gradient was not finite",
    ):
        probe(run, alone, 16, optimizer={"lr": 1e30})
    assert run.read_result("probe-n001-l000016") is None


def test_accumulation_is_measured_by_micro_batches(alone: Ranks, run: RunDir) -> None:
    (result,) = probe(run, alone, 32, train={"accumulate": 4})
    assert (result.batch, result.accumulate) == (32, 4)
    assert result.memory.batch == 8 * (16 * 4 + 8)
    assert result.overheads.eval_batch_size == 8


def test_only_results_are_left_behind(alone: Ranks, run: RunDir) -> None:
    before = set(run.path.rglob("*"))
    probe(run, alone, 16, 32)
    remaining = {str(path.relative_to(run.path)) for path in set(run.path.rglob("*")) - before}
    assert remaining == {"results", "results/probe-n001-l000016.json", "results/probe-n001-l000032.json"}


def test_what_is_known_is_not_measured_again_and_what_failed_is(alone: Ranks, run: RunDir) -> None:
    (first,) = probe(run, alone, 16)
    failed = Failed(
        id="probe-n001-l000032", nodes=1, gpus_per_node=1, local_batch=32, outcome="peer", message="a rank was lost"
    )
    run.write_result(failed)
    again, second = probe(run, alone, 16, 32)
    assert again == first
    assert second.measured_at > first.measured_at


def test_a_small_dataset_is_gone_through_again(alone: Ranks, run: RunDir) -> None:
    (result,) = probe(run, alone, 32, train={"epochs": 1}, dataset={"args": {"size": 40}})
    assert len(result.step_times) == 5


def test_a_batch_beyond_the_dataset_is_refused(alone: Ranks, run: RunDir) -> None:
    with pytest.raises(SpecError, match="larger than the dataset"):
        probe(run, alone, 128)
