"""torch.compile: the same training and the same checkpoints, and nothing compiled in what is timed."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from worker_jobs import are_equal, copy_weights, make_probe_task, make_spec, make_train_task, make_trainer, read_rows

from tula_cli.run.directory import RunDir
from tula_cli.spec.job import JobSpec
from tula_cli.worker.build import compiled
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.device import MemoryMeter
from tula_cli.worker.entry import run_training
from tula_cli.worker.measure.probe import run_probes
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import checkpoint, evaluation, hessian
from tula_cli.worker.train import loop as worker_train_loop

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:This DataLoader will create")]
AGS: dict[str, Any] = {"train": {"method": "ags"}, "ags": {"delta": "inf", "b_small": 6, "refresh": {"every": 2}}}
NORM: dict[str, Any] = {"model": {"args": {"norm": True}}}


class Compiler:
    """Compiles nothing: it passes graphs on as they are, and keeps whether each was to be differentiated."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.seen.append(torch.is_grad_enabled())
        return graph.forward


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    result = Compiler()
    monkeypatch.setattr(compiled, "COMPILE_BACKEND", result)
    torch._dynamo.reset()
    yield result
    torch._dynamo.reset()


def job(*, compile: bool, **sections: Any) -> JobSpec:
    return make_spec(**{**sections, "train": {**sections.get("train", {}), "compile": compile}})


def close(one: nn.Module, other: nn.Module) -> None:
    for (name, value), (_, expected) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name} {text}")


def test_it_learns_what_it_learns_as_written_with_one_graph_for_all_steps(alone: Ranks, compiler: Compiler) -> None:
    plain, subject = (make_trainer(job(compile=wanted, **AGS, **NORM), alone) for wanted in (False, True))
    for each in (plain, subject):
        list(worker_train_loop.run_steps(each))
    close(subject.parallel.module, plain.parallel.module)
    assert subject.ags is not None and subject.ags.factors.n_refresh > 2, "the small batches have other shapes"
    assert compiler.seen == [True]


def test_a_small_batch_in_each_step_is_compiled_too(alone: Ranks, compiler: Compiler) -> None:
    each_step = {**AGS, "ags": {**AGS["ags"], "refresh": {"every": 1}}}
    list(islice(worker_train_loop.run_steps(make_trainer(job(compile=True, **each_step), alone)), 4))
    assert compiler.seen == [True, True]


def test_nothing_is_compiled_unless_that_is_asked_for(alone: Ranks, compiler: Compiler) -> None:
    next(worker_train_loop.run_steps(make_trainer(job(compile=False), alone)))
    assert compiler.seen == []


@pytest.mark.parametrize("before", [True, False])
def test_checkpoints_are_the_same_with_and_without(alone: Ranks, compiler: Compiler, run: RunDir, before: bool) -> None:
    first, subject = (make_trainer(job(compile=wanted, **AGS, **NORM), alone) for wanted in (before, not before))
    list(islice(worker_train_loop.run_steps(first), 3))
    path = checkpoint.save_checkpoint(run, "5" * 8, first, best={}, is_best=False)
    checkpoint.restore_checkpoint(subject, torch.load(path, weights_only=True))
    assert are_equal(copy_weights(subject), copy_weights(first))
    for each in (first, subject):
        next(worker_train_loop.run_steps(each))
    close(subject.parallel.module, first.parallel.module)


def test_an_evaluation_compiles_one_graph_for_all_batches_but_the_odd_last(alone: Ranks, compiler: Compiler) -> None:
    sizes = {"dataset": {"args": {"eval_size": 40}}}  # 16, 16 and 8
    plain, subject = (make_trainer(job(compile=wanted, **sizes), alone) for wanted in (False, True))
    results = [evaluation.Evaluator(each).evaluate() for each in (plain, subject)]
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-5) and results[0].samples == 40
    assert compiler.seen == [False]


def test_curvature_is_that_of_the_model_as_written(
    alone: Ranks, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "COMPILE_BACKEND", "aot_eager")  # which has no second derivative
    plain, subject = (hessian.measure_curvature(make_trainer(job(compile=c), alone), samples=20) for c in (False, True))
    assert plain.eigenvalue == subject.eigenvalue


def test_recomputed_blocks_write_their_statistics_once(
    alone: Ranks, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "COMPILE_BACKEND", "aot_eager")
    requested = {"model": {"name": "worker_jobs:normed_blocks"}, "train": {"activation_checkpointing": True}}
    plain, subject = (make_trainer(job(compile=wanted, **requested), alone) for wanted in (False, True))
    for each in (plain, subject):
        list(islice(worker_train_loop.run_steps(each), 3))
    close(subject.parallel.module, plain.parallel.module)


def test_nothing_is_compiled_in_what_a_probe_times(
    alone: Ranks, compiler: Compiler, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_before_timing, restart = [], MemoryMeter.restart_counts_after_warmup

    def restart_and_record(meter: MemoryMeter) -> None:
        compiled_before_timing.append(list(compiler.seen))
        restart(meter)

    monkeypatch.setattr(MemoryMeter, "restart_counts_after_warmup", restart_and_record)
    requested = {
        "ags": {"delta": "inf", "b_small": 4},
        "search": {"min_steps": 5},
        "dataset": {"args": {"eval_size": 40}},
    }
    subject = job(compile=True, **{**AGS, **requested})
    run_probes(make_probe_task(subject, 16), run, alone, build_datasets(subject), started_at=0.0)
    assert compiled_before_timing == [[True, False]], "a step and an evaluation"
    assert compiler.seen == [True, False], "nothing is compiled while the probe is timed"


@pytest.mark.proof
@pytest.mark.parametrize("mode", [True, "max-autotune-no-cudagraphs"])
def test_a_whole_training_is_compiled(alone: Ranks, run: RunDir, mode: Any) -> None:
    """With torch's own compiler, which needs one of C++ here."""
    subject = make_spec(**{**AGS, **NORM, "train": {**AGS["train"], "compile": mode, "diagnostics": ["hessian"]}})
    task = make_train_task(subject)
    run_training(task, run, alone, build_datasets(subject))
    losses = [row["loss"] for row in read_rows(run, task, "epoch")]
    plain = RunDir(run.path.with_name("plain"))
    as_written = make_train_task(make_spec(**{**AGS, **NORM, "train": {**AGS["train"], "diagnostics": ["hessian"]}}))
    run_training(as_written, plain, alone, build_datasets(subject))
    assert losses == pytest.approx([row["loss"] for row in read_rows(plain, as_written, "epoch")], rel=1e-3)


def test_each_batch_of_one_that_grows_is_compiled(alone: Ranks, compiler: Compiler) -> None:
    stages = [{"epochs": 0.27, "batch": batch} for batch in range(4, 14)]
    subject = make_trainer(make_spec(train={"compile": True, "ramp": stages, "epochs": 4}), alone)
    taken = {step.batch for step in worker_train_loop.run_steps(subject)}
    assert len(taken) == 11 and len(compiler.seen) >= 11
