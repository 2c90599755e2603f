"""The gradient norms that one rank sees; those of two are in test_two_ranks."""

from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from worker_jobs import copy_gradient, make_probe_task, make_spec, make_trainer

from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import GradientStats, Measured
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.device import make_autocast_context
from tula_cli.worker.measure.probe import GradientNormRecorder, measure_half_batch_norms, run_probes
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import loop as worker_train_loop


def probed(run: RunDir, alone: Ranks, local_batch: int, **changes: dict[str, Any]) -> GradientStats:
    task = make_probe_task(make_spec(**changes), local_batch)
    run_probes(task, run, alone, build_datasets(task.spec), started_at=0.0)
    result = run.read_result(f"probe-n001-l{local_batch:06d}")
    assert isinstance(result, Measured)
    return result.gradients


def test_alone_both_norms_are_of_the_one_gradient(alone: Ranks) -> None:
    subject = make_trainer(make_spec(), alone)
    spy, expected = GradientNormRecorder.attach(subject), []
    subject.after_backward = lambda: expected.append(float(copy_gradient(subject).square().sum()))
    list(spy.watch_steps(islice(worker_train_loop.run_steps(subject), 2), subject.scaler))
    assert spy.gather_pairs() == [pytest.approx((norm, norm), rel=1e-5) for norm in expected]


def test_only_the_steps_of_the_window_are_seen(alone: Ranks) -> None:
    subject = make_trainer(make_spec(), alone)
    spy, steps = GradientNormRecorder.attach(subject), worker_train_loop.run_steps(subject)
    for _ in islice(steps, 2):
        pass
    assert len(list(spy.watch_steps(islice(steps, 3), subject.scaler))) == 3
    next(steps)
    assert len(spy.gather_pairs()) == 3 and not spy.local and not spy.reduced


def test_a_sparse_gradient_counts_rows_that_repeat_as_their_sum(alone: Ranks) -> None:
    values = torch.tensor([[1.0, 0.0], [2.0, 0.0], [1.0, 4.0]])
    rows = torch.sparse_coo_tensor(torch.tensor([[0, 2, 2]]), values, (4, 2), check_invariants=True)
    recorder = GradientNormRecorder(alone)
    recorder.watching = True
    record_reduced = recorder(SimpleNamespace(buffer=lambda: rows))  # type: ignore[arg-type]
    assert record_reduced is not None
    record_reduced()
    assert [float(norm) for norm in (*recorder.local, *recorder.reduced)] == pytest.approx([26**0.5] * 2)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_halves_are_two_gradients_and_their_mean(alone: Ranks, precision: str) -> None:
    subject = make_trainer(make_spec(train={"precision": precision}, model={"args": {"norm": True}}), alone)
    next(worker_train_loop.run_steps(subject))
    seen = measure_half_batch_norms(subject)
    inputs, targets = subject.last_batch or pytest.fail("a step leaves its batch")
    parts = []
    for part in (slice(0, 8), slice(8, 16)):
        subject.optimizer.zero_grad()
        with make_autocast_context(subject.spec.train, subject.ranks.device):
            subject.call.loss(subject.parallel.module(inputs[part]), targets[part]).backward()
        parts.append(copy_gradient(subject))
    norms = [float(vector.square().sum()) for vector in (*parts, (parts[0] + parts[1]) / 2)]
    assert seen == pytest.approx(((norms[0] + norms[1]) / 2, norms[2]), rel=1e-4 if precision == "fp32" else 0.05)


def test_a_search_on_one_rank_looks_at_halves(alone: Ranks, run: RunDir) -> None:
    result = probed(run, alone, 33, train={"accumulate": 3}, optimizer={"lr": 1e-6})
    assert (result.local_batch, result.batch, result.steps) == (5, 10, 5)
    assert result.local_norm_sqr > result.norm_sqr > 0
    assert result.covariance is not None


@pytest.mark.parametrize(("batch", "changes"), [(1, {}), (16, {"search": {"nodes": [1, 2]}})])
def test_one_rank_of_a_larger_search_tells_no_noise(
    alone: Ranks, run: RunDir, batch: int, changes: dict[str, Any]
) -> None:
    result = probed(run, alone, batch, **changes, dataset={"args": {"size": 64}})
    assert (result.local_batch, result.batch, result.covariance) == (batch, batch, None)
    assert result.local_norm_sqr == result.norm_sqr > 0


def test_the_hook_keeps_nothing_of_the_trainer_alive(alone: Ranks, tmp_path: Path) -> None:
    import gc
    import weakref

    subject = make_trainer(make_spec(), alone)
    spy = GradientNormRecorder.attach(subject)
    list(spy.watch_steps(islice(worker_train_loop.run_steps(subject), 2), subject.scaler))
    model = weakref.ref(subject.parallel.module)
    assert isinstance(model(), torch.nn.Module)
    del subject
    gc.collect()
    assert model() is None
