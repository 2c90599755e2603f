"""Untouched scripts are measured, verified and stopped."""

from pathlib import Path

import pytest
from script_ranks import ScriptRanks

from tula_cli.models.claims import ObservedRate, join_steps, list_mismatches, warn_script_scales_lr
from tula_cli.run.records.scripts import ExpectedValues, RankResult, ShimPlan

pytestmark = pytest.mark.torch


def probe(folder: Path, *, steps: int = 6, **more: object) -> ShimPlan:
    settings = {"warmup": 3, "min_steps": steps, "max_steps": steps, "split_steps": 3} | more
    return ShimPlan.model_validate({"task": "probe", "folder": str(folder)} | settings)


def expecting(world: int, batch: int, accumulate: int = 1, lr: float | None = None) -> ExpectedValues:
    return ExpectedValues(world=world, batch=batch, accumulate=accumulate, lr=lr)


def test_two_ranks_under_ddp(run: ScriptRanks, tmp_path: Path) -> None:
    outcome = run("plain_ddp.py", "--local-batch", 8, plan=probe(tmp_path, expected=expecting(2, 16)), world=2)
    assert (outcome.codes, outcome.leftover_processes) == ([0, 0], 0), outcome.output
    assert not any("FINISHED" in text for text in outcome.output)
    ranks = outcome.results()
    assert list_mismatches(ranks) == []
    assert [(rank.rank, rank.world, rank.why, rank.steps, len(rank.timed)) for rank in ranks] == [
        (0, 2, "stopped", 18, 6),
        (1, 2, "stopped", 18, 6),
    ]
    for rank in ranks:
        assert (rank.optimizer, rank.parameters) == ("torch.optim.sgd.SGD", 16 * 32 + 32 + 32 * 4 + 4)
        assert rank.bytes == {"parameters": 2704, "gradients": 2704, "optimizer": 2704}
        assert rank.lr is not None and (rank.lr.first, rank.lr.base) == (0.1, None)
        assert rank.loader is not None and (rank.loader.dataset, rank.loader.batches) == (320, 20)
        assert 50 * 2**20 < rank.peak["timed"].allocated < 4 * 2**30
        assert rank.samples == 18 * 8
        assert rank.notes == ()


def test_the_steps_after_the_timed_ones_split_them(run: ScriptRanks, tmp_path: Path) -> None:
    splits = [rank.split for rank in run("plain_ddp.py", plan=probe(tmp_path), world=2).results()]
    first, second = splits
    assert first is not None and second is not None
    assert (first.hook, first.modules, len(first.sync), len(first.local)) == ("default", 1, 3, 3)
    assert all(0 < seconds < 5 for seconds in first.sync)
    assert all(0 < step.seconds < 5 for step in first.local)
    reduced = [[norm for _, norm in split.norms] for split in (first, second)]
    assert len(reduced[0]) == 3 and reduced[0] == pytest.approx(reduced[1])  # the reduced gradient is everybody's
    for (value, mean), (other, _) in zip(first.norms, second.norms, strict=True):
        assert value is not None and other is not None and mean is not None and value != other
        assert mean <= (value + other) / 2 * (1 + 1e-6)  # the mean of two vectors is no longer than they are
        assert mean >= (value**0.5 - other**0.5) ** 2 / 4 * (1 - 1e-6)


def test_a_hook_of_the_script_s_own_goes_on_reducing(run: ScriptRanks, tmp_path: Path) -> None:
    split = run("plain_ddp.py", "--half", plan=probe(tmp_path), world=2).results()[0].split
    assert split is not None and split.hook == "fp16_compress_hook"
    assert len(split.norms) == 3 and all(value and mean for value, mean in split.norms)


def test_norms_are_those_of_the_loss_before_it_was_scaled(run: ScriptRanks, tmp_path: Path) -> None:
    plain, scaled = (
        run("plain_ddp.py", *more, plan=probe(tmp_path / str(len(more))), world=2).results()[0].split
        for more in ((), ("--scaler",))
    )
    assert plain is not None and scaled is not None
    assert [pair[1] for pair in scaled.norms] == pytest.approx([pair[1] for pair in plain.norms], rel=1e-3)


def test_accumulation_without_a_data_loader(run: ScriptRanks, tmp_path: Path) -> None:
    plan = probe(tmp_path, steps=8, expected=expecting(2, 16, accumulate=2))
    ranks = run("accumulating.py", "--gradient_accumulation_steps=4", plan=plan, world=2).results()
    assert list_mismatches(ranks) == []
    assert {step.backwards for rank in ranks for step in rank.timed} == {2}
    assert [step.samples for step in ranks[0].timed] == [None] * 8
    assert ranks[0].split is not None and all(len(r.split.norms) == 3 for r in ranks if r.split)


def test_an_evaluation_of_rank_0_alone_disturbs_the_step_of_all(run: ScriptRanks, tmp_path: Path) -> None:
    ranks = run("accumulating.py", plan=probe(tmp_path, steps=12, split_steps=0), world=2).results()
    apart = [[number for number, step in enumerate(rank.timed) if step.gap] for rank in ranks]
    assert apart == [[4, 11], []]  # before the 8th and the 15th step
    assert [number for number, step in enumerate(join_steps(ranks)) if step.causes] == [4, 11]


def test_a_wrong_launch_and_a_wrong_accumulation_are_reported(run: ScriptRanks, tmp_path: Path) -> None:
    plan = probe(tmp_path, expected=expecting(2, 16, accumulate=2))
    (rank,) = run("accumulating.py", plan=plan).results()
    alone = rank.model_copy(update={"expected": expecting(1, 16, accumulate=2)})
    (of_world,), (of_accumulation,) = list_mismatches([rank]), list_mismatches([alone])
    assert (of_world.code, of_world.values) == ("rank-count-differs", {"expected": 2, "observed": 1})
    assert (of_accumulation.code, of_accumulation.values) == ("micro-batches-differ", {"expected": 2, "observed": 4})


def reference(run: ScriptRanks, folder: Path, *arguments: object, **more: object) -> RankResult:
    outcome = run("reference.py", "--output-dir", folder, *arguments, plan=probe(folder, **more))  # type: ignore[arg-type]
    assert (outcome.codes, outcome.leftover_processes) == ([0], 0), outcome.output
    return outcome.results()[0]


def test_a_script_that_scales_its_learning_rate_is_detected(run: ScriptRanks, tmp_path: Path) -> None:
    rates = []
    for batch in (8, 16):
        seen = reference(run, tmp_path / str(batch), "-b", batch, "--scale-lr", expected=expecting(1, batch, lr=0.1))
        rates.append(ObservedRate.from_rates(batch, seen.lr, seen.expected.lr))
        assert list_mismatches([seen]) == []
    (warning,) = warn_script_scales_lr([rate for rate in rates if rate is not None])
    assert warning.values == {"exponent": pytest.approx(1), "rates": "0.003125 at batch 8, 0.00625 at batch 16"}


def test_batches_as_lists_and_loader_workers(run: ScriptRanks, tmp_path: Path) -> None:
    seen = reference(run, tmp_path, "-b", 8, "--list", "-j", 2, expected=expecting(1, 8))
    assert {step.samples for step in seen.timed} == {8} and list_mismatches([seen]) == []


def test_a_batch_that_the_script_ignores_is_reported_with_both_figures(run: ScriptRanks, tmp_path: Path) -> None:
    (result,) = list_mismatches([reference(run, tmp_path, "-b", 8, expected=expecting(1, 32))])[:1]
    assert (result.code, result.values["expected"], result.values["observed"]) == ("batch-differs", 32, 8)


def test_a_script_that_ends_first_tells_what_it_had(run: ScriptRanks, tmp_path: Path) -> None:
    seen = reference(run, tmp_path, "--epochs", 2, steps=50, expected=expecting(1, 16))
    assert (seen.why, seen.steps, len(seen.timed), seen.samples) == ("ended", 20, 17, 320)
    assert [(number, step.gap) for number, step in enumerate(seen.timed) if step.gap] == [
        (7, ("eval", "epoch", "save"))
    ]
    assert list_mismatches([seen]) == []  # samples of the evaluation are not taken for trained ones


def test_a_probe_exits_without_the_script_s_finally(run: ScriptRanks, tmp_path: Path) -> None:
    outcome = run("reference.py", plan=probe(tmp_path))
    assert (outcome.codes, outcome.results()[0].why) == ([0], "stopped")
    assert "CLEANED UP" not in outcome.output[0]


def test_rank_0_decides_how_many_steps_fit(run: ScriptRanks, tmp_path: Path) -> None:
    ranks = run("accumulating.py", plan=probe(tmp_path, min_steps=4, max_steps=9, seconds=60.0), world=2).results()
    assert [(len(rank.timed), rank.steps) for rank in ranks] == [(9, 21), (9, 21)]
    (tmp_path / "short").mkdir()
    plan = probe(tmp_path / "short", min_steps=4, max_steps=9, seconds=0.0)
    assert [len(rank.timed) for rank in run("accumulating.py", plan=plan, world=2).results()] == [4, 4]
