"""`tula recommend --what-if`: what is read of it, what it tells, and that nothing of it is kept."""

from pathlib import Path

import make_runs as make
import pytest
from make_results import Truth, out_of_memory, probe_all, spec

from tula_cli.errors import Infeasible, SpecError
from tula_cli.models.time.what_if import Change
from tula_cli.run.directory import RunDir
from tula_cli.services.recommend import recommend, save_answer, should_replace, store_answer
from tula_cli.services.recommendation.answer import Answer
from tula_cli.services.recommendation.beyond.suppositions import parsed
from tula_cli.services.recommendation.limits import Criteria
from tula_cli.show.recommend import only_shown, recommendation

SWEEP = {2: (16, 32, 64, 128, 256), 4: (8,), 8: (4,), 16: (2, 256)}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path, spec(search={"max_batch": 4096}))
    truth = Truth(noise=0.01, watts=200.0)
    for result in [*probe_all(truth, SWEEP), out_of_memory(2, 512)]:
        run.write_result(result)
    return run


def ask(run: RunDir, *what_if: str, objective: str = "time", **rest: object) -> Answer:
    return recommend(run, run.spec(), objective=objective, what_if=what_if, now=1.0, **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("texts", "change"),
    [
        ([], Change()),
        (["compute=2.1x"], Change(compute=2.1)),
        (["interconnect=0.5x", "compute=1x"], Change(compute=1.0, interconnect=0.5)),
        (["interconnect=200Gbit"], Change(bandwidth=2e11)),
        (["interconnect=400 Mbit/s"], Change(bandwidth=4e8)),
    ],
)
def test_what_is_supposed_is_read_as_it_is_typed(texts: list[str], change: Change) -> None:
    assert parsed(texts) == change


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["compute=H100"], "'H100' cannot be used.*measure one step of your job on both"),
        (["compute=2.1"], "'2.1' cannot be used"),
        (["compute=0x"], "no ratio from 0.001x to 1000x"),
        (["compute=1.2.3x"], "no ratio"),
        (["interconnect=200GB"], "'200GB' cannot be used.*give a bandwidth, as 200Gbit"),
        (["interconnect=0Gbit"], "no bandwidth from 1 Mbit"),
        (["interconect=4x"], "did you mean interconnect"),
        (["latency=20us"], "give interconnect=... or compute=..."),
        (["compute"], "for example"),
        (["compute=2x", "compute=3x"], "given more than once"),
    ],
)
def test_what_cannot_be_supposed_is_one_error_that_names_it(texts: list[str], said: str) -> None:
    with pytest.raises(SpecError, match="(?s)" + said) as error:
        parsed(texts)
    assert f"--what-if {texts[-1]}" in error.value.message


def test_nothing_supposed_goes_with_energy_of_other_gpus_or_a_training_under_way() -> None:
    with pytest.raises(SpecError, match="energy of other GPUs"):
        Criteria("energy", what_if=("compute=2x",))
    with pytest.raises(SpecError, match="--from-training"):
        Criteria(what_if=("compute=2x",), from_training=True)
    assert Criteria("energy", what_if=("interconnect=2x",)).options == ["--what-if interconnect=2x"]


def test_no_row_is_measured_and_the_choice_stands_beside_the_one_as_it_is(run: RunDir) -> None:
    usual, found = ask(run).recommendation, ask(run, "compute=3x", "interconnect=100x").recommendation
    assert found.what_if is not None and found.what_if.asked == ("compute=3x", "interconnect=100x")
    assert all(row.what_if and not row.measured for row in found.rows) and not any(row.what_if for row in usual.rows)
    assert found.what_if.as_it_is == usual.choice and found.what_if.there in found.rows
    assert found.what_if.there.hours < usual.choice.hours and found.choice.hours <= found.what_if.there.hours
    assert {row.peak_memory for row in found.rows} == {row.peak_memory for row in usual.rows}
    assert all(row.kwh is None for row in found.rows)
    network, compute = found.what_if.told
    assert "100 times the" in network and "100 MiB of gradients among 16 nodes" in network
    assert "3 times as fast, by your ratio, at a local batch of 23" in compute and "memory" in compute


def test_a_network_keeps_the_energy_of_a_gpu_and_a_bandwidth_is_held_against_the_fits(run: RunDir) -> None:
    found = ask(run, "interconnect=200Gbit").recommendation
    assert all(row.kwh for row in found.rows)
    assert found.what_if and "200 Gbit/s and carry 43 to 88 % of them" in found.what_if.told[0]


def test_what_is_in_reach_only_under_it_is_told_so(run: RunDir) -> None:
    fastest = ask(run).recommendation.choice.hours
    with pytest.raises(Infeasible):
        ask(run, deadline_hours=fastest * 0.9)
    found = ask(run, "compute=8x", "interconnect=8x", deadline_hours=fastest * 0.9).recommendation
    assert found.what_if and found.what_if.as_it_is is None
    shown = "\n".join(str(line) for line in recommendation(found, width=120, color=False))
    assert shown.startswith("WHAT IF") and "as it is: no configuration is within the limits" in shown


def test_what_the_choice_takes_there_is_told_also_where_it_is_out_of_the_limits(run: RunDir) -> None:
    cheapest = ask(run, objective="cost").recommendation.choice
    found = ask(run, "compute=0.5x", deadline_hours=cheapest.hours * 1.2, objective="cost").recommendation
    assert found.what_if and found.what_if.there and found.what_if.as_it_is
    assert found.what_if.there.hours > cheapest.hours * 1.2 and found.what_if.there not in found.rows


def test_nothing_of_it_is_ever_kept(run: RunDir) -> None:
    before = sorted(run.path.iterdir())
    answer = ask(run, "compute=2x")
    assert not should_replace(answer.recommendation, None) and not should_replace(
        answer.recommendation, answer.recommendation
    )
    for store in (lambda: store_answer(run, run.spec(), answer), lambda: save_answer(run, run.spec(), answer)):
        with pytest.raises(SpecError, match="such an answer is not saved"):
            store()
    assert sorted(run.path.iterdir()) == before
    assert "nothing of a what-if is saved" in only_shown(answer.recommendation, make.recommendation())
