"""Norms, changes and factors in the rows of epochs, and that no weight depends on looking at them."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worker_jobs import are_equal, copy_gradient, make_spec, make_train_task, make_trainer, read_rows

from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import TrainTask
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.entry import run_training
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train.diagnostics import HISTOGRAM_EDGES, Diagnostics, count_elements_per_bin

AGS = {"train": {"method": "ags"}, "ags": {"delta": 0.4}}
LEVELS = [0.05, 0.25, 0.5, 0.75, 0.95]


def run_job(run: RunDir, ranks: Ranks, task: TrainTask) -> dict[str, torch.Tensor]:
    run_training(task, run, ranks, build_datasets(task.spec))
    state: dict[str, torch.Tensor] = torch.load(run.get_training(task.signature).path / "last", weights_only=True)[
        "model"
    ]
    return state


def quantiles(values: list[float]) -> dict[str, float]:
    result = np.quantile(np.array(values), LEVELS)
    return dict(zip(["q05", "q25", "q50", "q75", "q95"], result.tolist(), strict=True))


def changes(squares: list[float]) -> list[float]:
    return [abs((now - before) / before) for before, now in pairwise(squares)]


@pytest.mark.parametrize(
    "job",
    [
        AGS,
        {"train": {"method": "lbt", "diagnostics": ["gradient_norms"]}},
        {
            "train": {"method": "lbt", "diagnostics": ["gradient_norms"], "max_grad_norm": 0.01}
        },  # seen before they are clipped
        {"train": {"method": "lbt", "diagnostics": ["gradient_norms"], "accumulate": 2}},
    ],
    ids=["ags", "lbt", "clipped", "accumulated"],
)
def test_the_quantiles_are_those_of_the_averaged_gradients(alone: Ranks, job: dict[str, Any]) -> None:
    subject = make_trainer(make_spec(**job), alone)
    result = Diagnostics.attach(subject)
    assert result is not None
    on_gradient, squares, reports = subject.on_gradient, [], []

    def look(seen: worker_train_loop.Trainer) -> None:
        squares.append(float(copy_gradient(seen).square().sum()))
        if on_gradient:
            on_gradient(seen)

    subject.on_gradient = look
    for step in worker_train_loop.run_steps(subject):
        result.record_step(subject, step)
        if step.epoch_ended:
            reports.append(result.report(subject, scaled=None))
    assert [report["steps"] for report in reports] == [6, 6]
    for first, report in ((0, reports[0]), (6, reports[1])):
        assert report["norm"] == pytest.approx(quantiles(np.sqrt(squares[first : first + 6]).tolist()), rel=1e-4)
        # The first step of all has no change; the first of the second epoch is against the last of the first.
        assert report["delta"] == pytest.approx(quantiles(changes(squares[max(0, first - 1) : first + 6])), rel=1e-3)


def test_a_scaled_loss_and_a_skipped_step_leave_no_trace_in_the_norms(alone: Ranks) -> None:
    plain, scaled = (
        make_trainer(make_spec(train={"method": "lbt", "diagnostics": ["gradient_norms"]}), alone) for _ in range(2)
    )
    scaled.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    reports = []
    for subject in (plain, scaled):
        result = Diagnostics.attach(subject)
        assert result is not None
        for number, step in enumerate(worker_train_loop.run_steps(subject)):
            if subject is scaled and number == 3:
                kept, result.square = result.square, torch.tensor(torch.inf)  # as GradScaler meets it
                result.record_step(subject, step)
                result.square = kept
            result.record_step(subject, step)
        reports.append(result.report(subject, scaled=None))
    for name in ("norm", "delta"):
        assert reports[1][name] == pytest.approx(reports[0][name], rel=1e-3)
    assert [report["steps"] for report in reports] == [12, 13]


def test_a_step_that_grad_scaler_skips_is_not_counted_for_ags(alone: Ranks) -> None:
    subject = make_trainer(make_spec(**AGS), alone)
    result = Diagnostics.attach(subject)
    assert result is not None
    steps = worker_train_loop.run_steps(subject)
    for _ in range(3):
        step = next(steps)
        result.record_step(subject, step)
        result.record_step(subject, step)  # nothing new
    assert result.report(subject, scaled=0.5)["steps"] == 3


def test_only_who_asks_or_scales_has_diagnostics(alone: Ranks) -> None:
    jobs = [{}, {"train": {"diagnostics": ["gradient_norms"]}}, AGS]
    assert [Diagnostics.attach(make_trainer(make_spec(**job), alone)) is not None for job in jobs] == [
        False,
        True,
        True,
    ]
    idle = make_trainer(make_spec(**AGS), alone, batch=8)  # the reference batch: nothing is scaled
    assert Diagnostics.attach(idle) is None


def test_every_element_is_in_one_bin_and_an_edge_in_the_bin_above() -> None:
    values = torch.tensor([0.0, 1e-9, 1.0, 1.41, 1.4143, 2.0, 1e9, *HISTOGRAM_EDGES])
    counts = count_elements_per_bin([values])
    assert len(counts) == len(HISTOGRAM_EDGES) + 1 and sum(counts) == len(values)
    expected = np.histogram(values.double().numpy(), bins=np.float32([-1.0, *HISTOGRAM_EDGES, 1e12]))[0]
    assert counts == expected.tolist()
    assert counts[0] == 2 and counts[-1] == 2


def test_large_and_several_factors_are_all_counted() -> None:
    assert sum(count_elements_per_bin([torch.ones(3, 2**20), torch.ones(()), torch.full((7,), 2.0)])) == 3 * 2**20 + 8


# --- in the rows of a training


def test_epoch_rows_hold_norms_changes_and_factors(alone: Ranks, run: RunDir) -> None:
    task = make_train_task(make_spec(**{**AGS, "ags": {"delta": "inf"}}))
    weights = run_job(run, alone, task)
    first, second = (row["diagnostics"] for row in read_rows(run, task, "epoch"))
    assert first["steps"] == second["steps"] == 6
    assert first["scaled"] < second["scaled"] == 1.0
    assert first["factors"]["edges"] == list(HISTOGRAM_EDGES)
    # The first refresh is in the last step of the first epoch: from there on each weight has a factor.
    assert (
        sum(first["factors"]["counts"]) == sum(second["factors"]["counts"]) == sum(w.numel() for w in weights.values())
    )
    assert first["norm"]["q05"] <= first["norm"]["q50"] <= first["norm"]["q95"]


def test_without_scaling_there_is_no_share_and_no_factor(alone: Ranks, run: RunDir) -> None:
    plain, requested = (
        make_train_task(make_spec()),
        make_train_task(make_spec(train={"diagnostics": ["gradient_norms"]}), signature="asked"),
    )
    for task in (plain, requested):
        run_job(run, alone, task)
    assert [row["diagnostics"] for row in read_rows(run, plain, "epoch")] == [None, None]
    diagnostics = next(read_rows(run, requested, "epoch"))["diagnostics"]
    assert diagnostics["scaled"] is None and diagnostics["factors"] is None and diagnostics["steps"] == 6


def test_curvature_rows_come_at_the_start_and_at_the_end_of_each_epoch(alone: Ranks, run: RunDir) -> None:
    settings = {"diagnostics": ["hessian"], "epochs": 2, "method": "ags"}
    task = make_train_task(make_spec(train=settings, ags={"b_small": 4}))
    run_job(run, alone, task)
    result = list(read_rows(run, task, "hessian"))
    assert [(row["epoch"], row["samples"], row["batch"]) for row in result] == [
        (0, 0, 100),
        (1, 96, 100),
        (2, 192, 100),
    ]
    for row in result:
        assert row["eigenvalue"] > 0 and row["gradient_norm"] > 0 and row["converged"]
        assert (row["s_min"], row["s_max"], row["lr"]) == (1e-3, 2.0, 0.1)
        assert row["lr_bound"] == pytest.approx(2 * 1e-3 / (row["smoothness"] * 4))


@pytest.mark.parametrize("method", ["lbt", "ags"])
def test_looking_changes_no_weight(alone: Ranks, tmp_path: Path, method: str) -> None:
    network = {"model": {"args": {"norm": True, "dropout": 0.3}}}
    plain = make_spec(**network, train={"method": method})
    requested = make_spec(**network, train={"method": method, "diagnostics": ["hessian", "gradient_norms"]})
    tasks = [make_train_task(job) for job in (plain, requested)]
    assert tasks[0].signature == tasks[1].signature
    results = [run_job(RunDir.create(tmp_path / str(n), task.spec), alone, task) for n, task in enumerate(tasks)]
    assert are_equal(*results)
