"""Two ranks on one machine: all cases of worker_rank_cases in one start of two processes."""

from pathlib import Path

import pytest
import torch
from worker_jobs import make_spec, make_trainer, read_rows, train_to_end
from worker_rank_cases import MEASURED, NETWORK, TRAIN, TUNED, read_results

from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import Measured
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import evaluation, hessian

pytestmark = pytest.mark.torch


def measured(two_ranks: Path, name: str, local_batch: int) -> Measured:
    result = RunDir(two_ranks / name).read_result(f"probe-n001-l{local_batch:06d}")
    assert isinstance(result, Measured)
    return result


def test_two_ranks_train_what_one_does(two_ranks: Path, alone: Ranks) -> None:
    first, steps = train_to_end(make_spec(), alone)
    states = [torch.load(two_ranks / f"{rank}.pt") for rank in range(2)]
    for name, value in first.items():
        assert torch.equal(states[0][name], states[1][name])
        torch.testing.assert_close(states[0][name], value, rtol=1e-4, atol=1e-5)
    assert read_results(two_ranks, "train_without_changes")[0] == pytest.approx(
        [float(step.loss) for step in steps], abs=1e-4
    )


def test_an_interrupted_run_ends_at_the_same_weights_on_each_rank(two_ranks: Path) -> None:
    assert read_results(two_ranks, "resume") == [[True] * 3] * 2


def test_every_rank_starts_from_the_file_that_rank_0_reads(two_ranks: Path) -> None:
    assert read_results(two_ranks, "start_from_weights") == [True] * 2


def test_evaluation_is_over_both_shares(two_ranks: Path, alone: Ranks) -> None:
    expected = evaluation.Evaluator(make_trainer(make_spec(**MEASURED), alone)).evaluate()
    for fact in read_results(two_ranks, "evaluate"):
        expected_value = fact.pop("user_metrics")
        others = {name: value for name, value in vars(expected).items() if name != "user_metrics"}
        assert fact == pytest.approx(others, nan_ok=True)  # it is no language model
        assert expected_value == pytest.approx(
            dict.fromkeys(("error", "gathers", "merges", "torchmetrics"), 100 - fact["top1"])
        )


def test_curvature_is_that_of_one_rank_and_the_same_on_both(two_ranks: Path, alone: Ranks) -> None:
    result = read_results(two_ranks, "measure_curvature")
    expected = vars(hessian.measure_curvature(make_trainer(make_spec(**NETWORK), alone), samples=25)) | {"seconds": 0.0}
    assert result[0] == result[1] == pytest.approx(expected, rel=1e-3)


def test_both_ranks_take_the_same_choice(two_ranks: Path) -> None:
    result = RunDir(two_ranks / "tuned").get_training(TUNED.signature).read_tuning()
    assert result is not None and result.chosen is not None
    assert [branch.arm for branch in result.branches] == ["lbt", "x2", "robust"]
    arm = result.chosen.model_dump(mode="json")
    assert read_results(two_ranks, "train_self_tuned") == [{"arm": arm, "epoch": 1.0, "steps": 24}] * 2


def test_synchronisation_is_seen(two_ranks: Path) -> None:
    result = measured(two_ranks, "wide", 8)
    assert (result.batch, result.local_batch) == (16, 8)
    # Measured in steps of its own, which a loaded machine may have slowed.
    assert 0 < result.sync_time < 5 * max(result.step_times)
    assert result.compute_time > 0
    gradients = result.gradients
    assert gradients.local_norm_sqr > gradients.norm_sqr > 0
    assert (gradients.batch, gradients.local_batch, gradients.steps) == (16, 8, 5)
    assert gradients.covariance is not None and min(gradients.covariance[:2]) > 0


def test_the_norms_before_and_after_the_reduction_are_those_of_the_gradients(two_ranks: Path) -> None:
    for seen, expected in read_results(two_ranks, "record_norms"):
        assert seen == [pytest.approx(pair, rel=1e-4) for pair in expected]
        assert all(small > 1.01 * big > 0 for small, big in seen)


def test_watching_the_gradients_changes_no_weight(two_ranks: Path) -> None:
    assert read_results(two_ranks, "train_watched") == [True, True]


def test_ranks_end_a_window_at_the_same_step(two_ranks: Path) -> None:
    assert read_results(two_ranks, "end_windows") == [[3, 8]] * 2


def test_an_earlier_probe_leaves_no_memory_behind(two_ranks: Path) -> None:
    first, larger, second = (
        measured(two_ranks, name, local).memory for name, local in (("deep", 16), ("deep", 32), ("again", 16))
    )
    assert second.peak == pytest.approx(first.peak, rel=0.2)
    assert larger.activations - second.activations == pytest.approx(16 * 4096 * 4 * 10, rel=0.3)


def test_a_damaged_checkpoint_is_passed_over_on_both_ranks(two_ranks: Path) -> None:
    run = RunDir(two_ranks / "train")
    result = run.get_training(TRAIN.signature).read_result()
    assert result is not None
    assert (result.samples, result.steps) == (288, 18)
    assert [row["samples"] for row in read_rows(run, TRAIN, "start")] == [0, 272]
    assert [row["samples"] for row in read_rows(run, TRAIN, "epoch")] == [96, 192, 288]
