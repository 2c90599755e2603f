"""Scripts that step in their own ways, and loops that tell their steps by hand."""

import json
from pathlib import Path

import pytest
from script_ranks import ScriptRanks

from tula_cli.models.claims import list_mismatches, select_undisturbed_steps
from tula_cli.run.records.scripts import ExpectedValues, RankResult, ShimPlan

pytestmark = pytest.mark.torch


def probe(folder: Path, **more: object) -> ShimPlan:
    settings = {"task": "probe", "folder": str(folder), "warmup": 2, "min_steps": 5, "max_steps": 5}
    return ShimPlan.model_validate(settings | more)


def test_the_optimizer_with_most_elements_is_the_clock(run: ScriptRanks, tmp_path: Path) -> None:
    outcome = run("odd_steps.py", "gan", plan=probe(tmp_path))
    assert set(outcome.json("result-0.json")) == set(RankResult.model_fields), "tula reads all that is written"
    (seen,) = outcome.results()
    assert (seen.optimizer, seen.parameters, seen.steps) == ("torch.optim.adam.Adam", 4 * 64 + 64, 7)
    assert seen.lr is not None and seen.lr.timed == 0.2
    assert {step.backwards for step in seen.timed} == {3}
    whole = 4 * (4 * 64 + 64 + 4 * 4 + 4)
    assert seen.bytes is not None and seen.bytes["parameters"] == whole, "of both optimizers"


@pytest.mark.parametrize("loop", ["closure", "frozen"])
def test_what_goes_on_in_every_step_disturbs_none(run: ScriptRanks, tmp_path: Path, loop: str) -> None:
    ranks = run("odd_steps.py", loop, plan=probe(tmp_path)).results()
    assert {(step.gap, step.backwards) for step in ranks[0].timed} == {(("eval",), 1)}
    assert len(select_undisturbed_steps(ranks)) == 5


@pytest.mark.parametrize("more", [(), ("--bare",)])
def test_a_loop_that_tells_its_steps_is_measured(run: ScriptRanks, tmp_path: Path, more: tuple[str, ...]) -> None:
    outcome = run("by_hand.py", 60, *more, plan=probe(tmp_path, expected=ExpectedValues(world=1, batch=4)))
    (seen,) = outcome.results()
    assert (seen.optimizer, seen.parameters, seen.why, seen.steps) == ("__main__.Engine", 0, "stopped", 7)
    assert [step.samples for step in seen.timed] == [4] * 5
    assert seen.lr is not None and seen.lr.last == 0.5
    assert all(step.seconds >= 0.002 for step in seen.timed)


def test_ranks_that_the_script_forks_itself_are_seen(run: ScriptRanks, tmp_path: Path) -> None:
    outcome = run("forking.py", plan=probe(tmp_path))
    assert (outcome.codes, outcome.leftover_processes, outcome.results()[0].why) == ([0], 0, "stopped"), outcome.output


def test_the_error_of_a_forked_rank_is_reported_once(run: ScriptRanks, tmp_path: Path) -> None:
    outcome = run("forking.py", "break", plan=probe(tmp_path))
    (failure,) = tmp_path.glob("failure-*.json")
    assert outcome.codes == [1] and "MemoryError: no room" in json.loads(failure.read_text())["text"]


def test_parameters_that_are_sharded_give_totals(run: ScriptRanks, tmp_path: Path) -> None:
    ranks = run("sharded.py", plan=probe(tmp_path, expected=ExpectedValues(world=2, batch=8)), world=2).results()
    assert list_mismatches(ranks) == []
    elements = 64 * 64 + 64
    for rank in ranks:
        assert (rank.parameters, rank.split, len(rank.timed)) == (elements, None, 5)
        assert rank.bytes == {"parameters": 2 * elements, "gradients": 2 * elements, "optimizer": 4 * elements + 2 * 4}
        assert "does not use DistributedDataParallel" in rank.notes[0]
