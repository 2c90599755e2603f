"""Post-local SGD on two and on four ranks: all cases in one start of each (gloo, loopback)."""

import json
from pathlib import Path
from typing import Any

import method_rank_cases
import pytest
import torch
from method_rank_cases import FREE, GROWING_BATCH_JOBS, LAYOUTS, make_growing_job
from start_ranks import read_errors, start_ranks
from worker_jobs import make_spec, make_trainer

from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import checkpoint
from tula_cli.worker.train import loop as worker_train_loop

pytestmark = pytest.mark.torch


class RankResults:
    """Results of the ranks of one start in each case."""

    def __init__(self, folder: Path, world: int) -> None:
        self.world = world
        self.ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]

    def of_case(self, case: str) -> list[Any]:
        return [rank[case] for rank in self.ranks]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.proof)])
def rank_results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    world: int = request.param
    folder = tmp_path_factory.mktemp(f"methods-{world}-")
    assert start_ranks(method_rank_cases.__file__, folder, world=world), read_errors(folder, world)
    return RankResults(folder, world)


def test_replicas_part_after_five_epochs_and_meet_four_times_an_epoch(rank_results: RankResults) -> None:
    for rank in rank_results.of_case("compare_replicas"):
        assert rank["parameters"] == [True] * 30 + [False, True, True, False, True, True] * 2


def test_where_they_meet_buffers_and_momentum_are_equal_too(rank_results: RankResults) -> None:
    for rank in rank_results.of_case("compare_replicas"):
        assert rank["everything"][30:] == [False, True, True, False, True, True] * 2


def test_running_statistics_are_rank_0s_at_first_and_each_ranks_own_after_the_switch(rank_results: RankResults) -> None:
    first, *others = (rank["kept"] for rank in rank_results.of_case("compare_replicas"))
    assert first == [True] * 41
    assert others == [[False] * 29 + [True] * 12] * (rank_results.world - 1)


def test_the_synchronous_epochs_are_those_of_the_large_batch(rank_results: RankResults) -> None:
    assert rank_results.of_case("compare_synchronous_phase") == [True] * rank_results.world


def test_parameters_are_those_of_torchs_post_local_sgd(rank_results: RankResults) -> None:
    assert max(rank_results.of_case("compare_with_torch")) < 1e-6


def test_a_broken_run_goes_on_from_the_newest_average_to_the_same_weights(rank_results: RankResults) -> None:
    # broken off after 4 steps of epoch 6, of which the third was the newest to be averaged
    assert rank_results.of_case("resume") == [{"starts": [0, 5 * 96 + 48], "same": True}] * rank_results.world


def test_a_relaunch_at_another_batch_goes_on_behind_the_switch(rank_results: RankResults) -> None:
    for rank in rank_results.of_case("relaunch_at_half_batch"):
        assert rank == {"starts": [[0, 16], [5 * 96 + 48, 8]], "epochs": 7}


def test_leaving_averages_before_it_saves(rank_results: RankResults) -> None:
    expected = {"before": False, "apart": True, "after": True, "still": False}
    assert rank_results.of_case("save_between_averages") == [expected] * rank_results.world


def test_loss_scales_meet_at_the_smallest(rank_results: RankResults) -> None:
    assert rank_results.of_case("agree_on_loss_scale") == [8.0] * rank_results.world


def test_schedule_frees_averages_are_those_of_one_rank(rank_results: RankResults, alone: Ranks) -> None:
    item = make_trainer(make_spec(**FREE), alone)
    list(worker_train_loop.run_steps(item))
    expected = torch.cat(
        [p.flatten() for p in checkpoint.make_checkpoint_state(item, best={})["model"].values()]
    ).tolist()
    for rank in rank_results.of_case("train_schedule_free"):
        assert rank["weights"] == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_schedule_frees_statistics_are_those_of_all_ranks(rank_results: RankResults) -> None:
    for rank in rank_results.of_case("train_schedule_free"):
        assert rank["agree"] and rank["by_hand"] < 1e-5


def test_schedule_free_goes_on_from_where_it_was_broken_off_to_the_same_weights(rank_results: RankResults) -> None:
    """Bit for bit on two ranks. More add up in an order that depends on DDP's buckets, which the first step rearranges."""
    for rank in rank_results.of_case("resume_schedule_free"):
        assert rank["off"] <= (0.0 if rank_results.world == 2 else 1e-6)
        assert rank["starts"][0] == 0 and 96 <= rank["starts"][1] < 192


@pytest.mark.parametrize("name", GROWING_BATCH_JOBS)
def test_a_batch_that_grows_is_resumed_around_its_change(rank_results: RankResults, alone: Ranks, name: str) -> None:
    item = make_trainer(make_growing_job(name), alone)
    list(worker_train_loop.run_steps(item))
    expected = torch.cat([value.flatten() for value in item.parallel.module.state_dict().values()]).tolist()
    for rank in rank_results.of_case("resume_growing_batch"):
        assert rank[name]["starts"] == 2
        # Bit for bit on two ranks; turning a step lifts its small directions, their rounding too, by up to 3.4^5.
        assert rank[name]["off"] <= (0.0 if rank_results.world == 2 else 1e-4 if name == "ramp" else 1e-6)
        if name == "ramp":  # the others compare the gradients of as many ranks
            assert rank[name]["weights"] == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_every_rank_has_the_same_stages_and_a_break_changes_none(rank_results: RankResults) -> None:
    first, *others = rank_results.of_case("resume_growth_by_noise")
    assert all(other == first for other in others)
    assert first["off"] <= (0.0 if rank_results.world == 2 else 1e-6)
    assert first["same"] and first["batches"] == [8, 16, 16, 16, 32, 32, 32, 32]


@pytest.mark.parametrize("method", LAYOUTS)
def test_channels_last_changes_the_layout_and_not_what_is_learned(rank_results: RankResults, method: str) -> None:
    for rank in rank_results.of_case("compare_layouts"):
        message = rank[method]
        assert message["off"] < 1e-3
        assert (message["turned"], message["otherwise"], message["agree"]) == (1, [], True)


def test_turned_steps_keep_the_replicas_together(rank_results: RankResults) -> None:
    """Step 3 leaves a rank with other bits, as other hardware might; the fifth hands out rank 0's."""
    assert rank_results.of_case("align_with_rounding") == [[True, True, True, False, True, True]] * rank_results.world
