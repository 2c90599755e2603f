"""The replay of measured step times (benchmarks/replay/replay.py)."""

import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import replay
import replay_knee
from replay_baselines import MODELS
from replay_data import MeasuredSet, Offer, Where, load_sets
from replay_score import STRATEGIES, KneeError, Measure, Meter, list_true_predictions, score_set

from tula_cli.models.time.step_time import Estimate, Observation
from tula_cli.run.records.recommendations import Prediction

TABLE = Path(__file__).parents[1] / "fixtures" / "step_times.csv"
HEADER = TABLE.read_text().partition("\n")[0] + "\n"


@pytest.fixture(scope="module")
def sets() -> dict[str, MeasuredSet]:
    return {each.name: each for each in load_sets(TABLE)}


def made(seconds: float = 1.0, *, nodes: Sequence[int] = (1, 2, 3, 4), batches: Sequence[int] = (8, 11, 16, 32, 64)):
    """A set whose step time is `seconds` everywhere."""
    return pd.DataFrame(
        [
            {
                "cluster": "c",
                "app": "a",
                "nodes": n,
                "gpus_per_node": 1,
                "replicas": n,
                "local_batch": b,
                "step_time_s": seconds,
                "sync_time_s": math.nan,
                "flag": "ok",
            }
            for n in nodes
            for b in batches
        ]
    )


@pytest.fixture
def flat(tmp_path: Path) -> MeasuredSet:
    made().to_csv(tmp_path / "t.csv", index=False)
    return load_sets(tmp_path / "t.csv")[0]


def memory(probes: Sequence[Observation], _: str):
    """A model that knows its probes by heart, and says twice the time anywhere else."""
    known = {Where(o.nodes, o.gpus_per_node, o.local_batch): o.seconds for o in probes}
    return lambda places: [Estimate(known.get(place, 2 * probes[0].seconds)) for place in places]


def test_a_set_is_a_shape_of_node_and_one_node_is_a_set_of_its_own(sets: dict[str, MeasuredSet]) -> None:
    assert sorted(sets) == [
        "aws cifar10 1 GPU/node",
        "aws cifar10 2 GPU/node",
        "aws cifar10 one node",
        "rtx imagenet 4 GPU/node",
    ]
    assert {place.nodes for place in sets["aws cifar10 one node"].truth} == {1}


def test_sizes_and_batches_offered_are_power_of_two_multiples_of_the_smallest(sets: dict[str, MeasuredSet]) -> None:
    offered = sets["aws cifar10 1 GPU/node"]
    assert offered.offer.by_size == {nodes: [32, 64, 129, 257, 513] for nodes in (1, 2, 4, 8)}
    assert offered.batches[Where(4, 1, 513)] == 2048  # nominally 512 on each of four
    assert {place.nodes for place in offered.truth} == {1, 2, 3, 4, 8}


def test_other_sizes_can_be_offered() -> None:
    assert load_sets(TABLE, sizes=[2, 4])[0].offered_sizes == {2, 4}


def test_repeats_count_as_their_median_and_missing_sync_stays_missing(tmp_path: Path) -> None:
    rows = pd.concat([made(1.0), made(3.0), made(4.0)])
    rows.to_csv(tmp_path / "t.csv", index=False)
    observation = load_sets(tmp_path / "t.csv")[0].truth[Where(1, 1, 8)]
    assert observation.seconds == 3.0
    assert math.isnan(observation.compute_time)


def two_days(folder: Path, *, day: Sequence[float], runs: bool = True) -> Path:
    """A table of days that take so many seconds each; the second lacks a configuration and has one of its own."""
    first, *others = (made(seconds).assign(run=f"day {place}") for place, seconds in enumerate(day))
    others[0] = pd.concat([others[0].iloc[1:], others[0].iloc[[-1]].assign(local_batch=128)])
    rows = pd.concat([first, *others])
    (rows if runs else rows.drop(columns="run")).to_csv(folder / "t.csv", index=False)
    return folder / "t.csv"


@pytest.mark.parametrize("runs", [True, False])
def test_what_is_probed_is_of_the_first_run_and_judged_by_the_others(tmp_path: Path, runs: bool) -> None:
    (each,) = data = load_sets(two_days(tmp_path, day=(1.0, 1.1, 1.3), runs=runs), repeats=True)
    here, lost, new = Where(2, 1, 16), Where(1, 1, 8), Where(4, 1, 128)
    assert (each.probe(here).seconds, each.truth[here].seconds) == (1.0, pytest.approx(1.2))
    assert each.probe(lost).seconds == 1.0, "measured on the first day and on the third"
    assert each.truth[lost].seconds == pytest.approx(1.3) and each.probe(new).seconds == each.truth[new].seconds == 1.1
    meter = Meter(each)
    assert [probe.seconds for probe in meter([here])] == [1.0]
    assert sorted({round(off, 6) for off in each.noise}) == pytest.approx(
        sorted(math.log(ratio) for ratio in (1.1, 1.3, 1.3 / 1.1)), abs=1e-6
    )
    assert str(replay.RepeatDifferences.of(data)).startswith("noise floor: two runs of a configuration are ")
    (plain,) = load_sets(tmp_path / "t.csv")
    assert plain.probe(here) == plain.truth[here] and plain.truth[here].seconds == 1.1


def test_even_what_was_measured_whole_is_judged_by_another_run(tmp_path: Path) -> None:
    table = made(nodes=(1, 2, 4), batches=(8, 16, 32))
    later = table.assign(step_time_s=1 + 0.5 * (table.local_batch == 32))
    pd.concat([table, later]).to_csv(tmp_path / "t.csv", index=False)
    (each,) = load_sets(tmp_path / "t.csv", repeats=True)
    result = score_set(each, "full", "tula")
    assert result.fastest is not None and max(result.fastest.capped) == 0.5 and math.isnan(result.median)
    assert score_set(load_sets(tmp_path / "t.csv")[0], "full", "tula").fastest is None


def test_the_noise_floor_is_reported_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two_days(tmp_path, day=(1.0, 1.1))
    words = [str(tmp_path / "t.csv"), "--strategies", "partial", "--models", "tula"]
    for more, message in ([], 0.0953), (["--repeats"], 0.0953):
        monkeypatch.setattr(sys, "argv", ["replay.py", *words, *more, "--json"])
        replay.main()
        repeats = json.loads(capsys.readouterr().out)["repeats"]
        assert repeats["configurations"] == 19 and repeats["median"] == pytest.approx(message, abs=1e-4)
    made().to_csv(tmp_path / "t.csv", index=False)
    monkeypatch.setattr(sys, "argv", ["replay.py", *words])
    replay.main()
    assert "noise floor" not in capsys.readouterr().out


def test_the_results_of_a_run_are_a_table_too(tmp_path: Path) -> None:
    result = made(nodes=(1, 2), batches=(8, 16)).drop(columns=["cluster", "app", "replicas", "flag"])
    result = result.assign(node_type=math.nan, outcome="measured", compute_time_s=0.75)
    result.loc[3, "outcome"] = "predicted"
    (tmp_path / "job-1").mkdir()
    result.to_csv(tmp_path / "job-1/results.csv", index=False)
    (each,) = load_sets(tmp_path / "job-1/results.csv")
    assert each.name == "job-1 probes 1 GPU/node" and len(each.truth) == 3
    assert {o.compute_time for o in each.truth.values()} == {0.75}


def test_a_time_that_comes_out_negative_is_chosen_and_wrong(tmp_path: Path) -> None:
    table = made(nodes=(1, 2, 4), batches=(8, 16, 32, 64))
    table.step_time_s = table.nodes.map({1: 1.0, 2: 0.2, 4: 0.1}) * table.local_batch / 64 + 0.001
    table.to_csv(tmp_path / "t.csv", index=False)
    (each,) = load_sets(tmp_path / "t.csv")
    least = MODELS["paper OLS"]([each.truth[place] for place in each.offer.candidates], "ring")(each.offer.candidates)
    assert min(estimate.seconds for estimate in least) == pytest.approx(0, abs=1e-8)
    assert max(score_set(each, "partial", "paper OLS").errors) > 0.9


def test_where_nothing_is_left_unseen_no_figure_is_perfect_by_construction(tmp_path: Path) -> None:
    made(nodes=(1, 2), batches=(8, 16)).to_csv(tmp_path / "t.csv", index=False)
    (each,) = load_sets(tmp_path / "t.csv")
    result = score_set(each, "full", "paper OLS")
    assert (result.errors, result.candidates, result.fastest, result.cheapest, result.knee) == (
        (),
        (),
        None,
        None,
        None,
    )
    assert math.isnan(replay.Summary.of([result]).fastest_worst)


def test_flagged_rows_are_apart(sets: dict[str, MeasuredSet]) -> None:
    assert not any(each.app == "yolov3" for each in sets.values())
    assert {each.app for each in load_sets(TABLE, flagged=True)} == {"yolov3"}


def test_a_table_without_a_column_is_refused(tmp_path: Path) -> None:
    made().drop(columns="flag").to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(ValueError, match="has no column flag"):
        load_sets(tmp_path / "t.csv")


@pytest.mark.parametrize("strategy", ["partial", "sweep", "full"])
def test_no_probe_leaks_into_the_score(flat: MeasuredSet, strategy: str) -> None:
    result = score_set(flat, strategy, memory)
    assert set(result.errors) | set(result.elsewhere) == {1.0}  # all that is scored was unknown
    assert result.probes + len(result.errors) + len(result.elsewhere) == len(flat.truth)


@pytest.mark.parametrize("model", MODELS)
def test_what_was_not_probed_does_not_change_what_is_predicted(sets: dict[str, MeasuredSet], model: str) -> None:
    honest = sets["aws cifar10 1 GPU/node"]
    seen: list[list[float]] = []

    def spy(probes: Sequence[Observation], collective: str):
        predict = MODELS[model](probes, collective)

        def spied(places: Sequence[Where]) -> list[Estimate]:
            estimates = predict(places)
            seen.append([estimate.seconds for estimate in estimates])
            return estimates

        return spied

    meter = Meter(honest)
    STRATEGIES["partial"](honest.offer, meter)
    altered = {
        place: o if place in meter.seen else replace(o, step_times=(99.0 + place.local_batch,))
        for place, o in honest.truth.items()
    }
    score_set(honest, "partial", spy)
    score_set(replace(honest, truth=altered), "partial", spy)
    assert seen[:2] == seen[2:], "of what was not measured, and of what was"


def test_a_strategy_may_measure_in_rounds_and_only_what_is_offered(flat: MeasuredSet) -> None:
    def rounds(offer: Offer, measure: Measure) -> None:
        first = measure([offer.at(1, 8)])
        measure([offer.at(1, 8), offer.at(1, 64)] if first[0].seconds == 1.0 else [])

    result = score_set(flat, rounds, memory)
    assert result.probes == 2
    one_job, per_round = 30 + 50, 2 * (30 + 50)
    assert result.cost == pytest.approx(per_round / ((1 + 2 + 4) * 4 * one_job))
    with pytest.raises(AssertionError, match="only candidates"):
        Meter(flat)([Where(3, 1, 8)])


def test_adaptive_starts_from_four_probes_and_stops_before_all(sets: dict[str, MeasuredSet]) -> None:
    each = sets["aws cifar10 1 GPU/node"]
    rounds: list[int] = []

    def counted(offer: Offer, measure: Measure) -> None:
        def spy(places: Iterable[Where]) -> list[Observation]:
            result = measure(places)
            rounds.append(len(result))
            return result

        STRATEGIES["adaptive"](offer, spy)

    outcome = score_set(each, counted, "tula")
    assert rounds[0] == 4 and sum(rounds) == outcome.probes < len(each.batches)
    assert outcome.cost < score_set(each, "full", "tula").cost


def test_batches_of_one_size_share_a_job(flat: MeasuredSet) -> None:
    """A probe of steps of a second takes 10 of them to warm up, 10 that are timed, and 25 for its other looks."""
    assert score_set(flat, "full", memory).cost == pytest.approx((30 + 4 * 45) / (4 * (30 + 45)))


def test_regret_is_what_the_choice_takes_more_than_the_best(flat: MeasuredSet) -> None:
    """Every step takes a second, but one configuration is believed to be a hundred times as fast."""

    def wrong(probes: Sequence[Observation], _: str):
        return lambda places: [Estimate(0.01 if p == Where(4, 1, 16) else 1.0) for p in places]

    result = score_set(flat, "partial", wrong)
    assert result.fastest.free == pytest.approx(3.0)  # 16 samples a second instead of 64, on four nodes
    assert result.cheapest.free == pytest.approx(3.0)
    assert result.fastest.capped[0] == 0.0  # it may not be chosen under a cap of 16
    assert score_set(flat, "full", wrong).fastest is None  # all is known


def test_cost_counts_nodes_and_inside_one_node_gpus(sets: dict[str, MeasuredSet]) -> None:
    for name, sizes in (("aws cifar10 2 GPU/node", {1, 2, 4, 8}), ("aws cifar10 one node", {1, 2})):
        rows = list_true_predictions(sets[name])
        assert {row.nodes for row in rows} == sizes
        assert [row.cost for row in rows] == pytest.approx([row.nodes * row.hours for row in rows])


def test_the_knee_is_compared_in_steps_of_the_batch(sets: dict[str, MeasuredSet]) -> None:
    truth = sets["aws cifar10 1 GPU/node"]
    assert score_set(
        truth, "partial", lambda *_: lambda places: [Estimate(truth.truth[p].seconds) for p in places]
    ).knee == KneeError(0, 0.0)

    def linear(probes: Sequence[Observation], _: str):
        return lambda places: [Estimate(1e-9 * p.local_batch) for p in places]

    missed = score_set(truth, "partial", linear).knee
    assert missed is not None and missed.steps != 0


def plane(nodes: int, batch: int, *, gpus: int = 1) -> Observation:
    """A step time that all but the interpolation can express."""
    return Observation(nodes, gpus, batch, (0.1 + 0.01 * batch + 0.4 * (1 - 1 / nodes),), math.nan)


@pytest.mark.parametrize("model", ["paper OLS", "NNLS"])
def test_linear_baselines_find_the_plane_they_are_given(model: str) -> None:
    predict = MODELS[model]([plane(n, b) for n in (1, 2, 4) for b in (8, 16, 64)], "ring")
    assert [e.seconds for e in predict([Where(8, 1, 32)])] == pytest.approx([plane(8, 32).seconds])


def test_non_negative_least_squares_never_predicts_less_work_for_more() -> None:
    falling = [replace(plane(n, b), step_times=(1.0 - 0.01 * b - 0.01 * n,)) for n in (1, 2, 4) for b in (8, 16)]
    small, large = MODELS["NNLS"](falling, "ring")([Where(1, 1, 8), Where(64, 1, 64)])
    assert large.seconds >= small.seconds > 0


def test_interpolation_goes_through_its_probes_and_is_a_power_law_between() -> None:
    probes = [replace(plane(n, b), step_times=(0.01 * b * n**0.5,)) for n in (1, 4) for b in (8, 32)]
    predict = MODELS["interpolation"](probes, "ring")
    places = [Where(1, 1, 8), Where(2, 1, 16), Where(16, 1, 64)]
    assert [e.seconds for e in predict(places)] == pytest.approx([0.08, 0.16 * 2**0.5, 0.64 * 4])


def test_interpolation_borrows_the_slope_where_a_size_has_one_probe() -> None:
    probes = [replace(plane(n, b), step_times=(0.01 * b * n,)) for n, b in ((1, 8), (1, 32), (4, 8))]
    assert MODELS["interpolation"](probes, "ring")([Where(4, 1, 32)])[0].seconds == pytest.approx(1.28)


@pytest.mark.parametrize("gamma", [1.0, 3.0])
def test_pollux_finds_its_own_parameters(gamma: float) -> None:
    def seconds(nodes: int, batch: int) -> float:
        sync = 0.0 if nodes == 1 else 0.3 + 0.05 * (nodes - 2)
        return ((0.05 + 0.01 * batch) ** gamma + sync**gamma) ** (1 / gamma)

    probes = [replace(plane(n, b), step_times=(seconds(n, b),)) for n in (1, 2, 4, 8) for b in (8, 16, 32, 64)]
    predicted = [e.seconds for e in MODELS["Pollux"](probes, "ring")([Where(6, 1, 24), Where(16, 1, 48)])]
    assert predicted == pytest.approx([seconds(6, 24), seconds(16, 48)], rel=0.03)


def test_pollux_takes_what_it_has_not_seen_for_free() -> None:
    one_node = MODELS["Pollux"]([plane(1, 8), plane(1, 16), plane(1, 64)], "ring")
    alone, many = one_node([Where(1, 1, 1), Where(16, 4, 1)])
    assert many.seconds == pytest.approx(alone.seconds, rel=1e-6)


def test_a_refused_configuration_is_counted_and_not_scored(flat: MeasuredSet) -> None:
    def refuses(probes: Sequence[Observation], _: str):
        return lambda places: [Estimate(math.nan if p.nodes == 3 else 1.0) for p in places]

    result = score_set(flat, "partial", refuses)
    assert (result.refused, result.elsewhere) == (5, ())


def test_coverage_counts_intervals_alone(flat: MeasuredSet) -> None:
    def half(probes: Sequence[Observation], _: str):
        return lambda places: [
            Estimate(1.0, 0.9, 1.1) if p.local_batch > 11 else Estimate(1.0, 2.0, 3.0) for p in places
        ]

    covered = score_set(flat, "partial", half).covered
    assert 0 < np.mean(covered) < 1
    assert score_set(flat, "partial", memory).covered == ()


def test_the_same_table_gives_the_same_numbers(sets: dict[str, MeasuredSet]) -> None:
    each = sets["rtx imagenet 4 GPU/node"]
    first, second = (replace(score_set(each, "sweep", model), fit_seconds=0.0) for model in ("Pollux", "Pollux"))
    assert first == second


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["replay.py", str(TABLE), *arguments])
    replay.main()
    return capsys.readouterr().out


@pytest.mark.proof
def test_the_report_has_every_group_and_model(monkeypatch, capsys) -> None:
    text = run(monkeypatch, capsys)
    for expected in (
        "aws, one GPU a node (1 sets)",
        "rtx, several GPUs a node",
        "aws, one node",
        "all (4 sets)",
        "flagged",
    ):
        assert expected in text
    assert all(f"sweep, {model}" in text for model in MODELS)
    assert "best constant answer to the knee" in text
    assert "nodes with unequal numbers of GPUs" in text


def test_timing_tells_fits_and_predictions(monkeypatch, capsys) -> None:
    text = run(monkeypatch, capsys, "--timing", "--models", "NNLS")
    assert "a fit" in text and "100000 predictions" in text


def test_json_is_valid_and_apart_reports_clusters_and_apps(monkeypatch, capsys) -> None:
    answer = json.loads(run(monkeypatch, capsys, "--json", "--apart", "--models", "NNLS", "--strategies", "sweep"))
    assert {"cluster aws", "cluster rtx", "app cifar10", "app imagenet", "all"} <= set(answer["groups"])
    assert 0 < answer["groups"]["all"]["sweep, NNLS"]["median"] < 0.5
    assert answer["groups"]["all"]["sweep, NNLS"]["covered"] is None


def test_the_rules_of_the_knee_are_compared(monkeypatch, capsys) -> None:
    monkeypatch.setattr(replay_knee, "DRAWS", 3)
    text = run(monkeypatch, capsys, "--knee", "--strategies", "sweep")
    assert all(rule in text for rule in replay_knee.RULES)


def line(*gains: float) -> list[Prediction]:
    """A curve that loses these shares of its time at its doublings."""
    times = np.cumprod([1.0, *(1 - gain for gain in gains)])
    return [make_row(32 * 2**k, float(time)) for k, time in enumerate(times)]


def make_row(batch: int, hours: float) -> Prediction:
    rest = dict.fromkeys(("step_low", "step_high", "hours_low", "hours_high", "peak_memory", "headroom"))
    return Prediction(
        nodes=1, batch=batch, local_batch=batch, step_time=1.0, hours=hours, cost=hours, measured=False, **rest
    )


@pytest.mark.parametrize(
    ("rule", "knee"),
    [
        ("product", 128),
        ("Kneedle, linear time", 128),
        ("chord, log time", 128),
        ("last doubling saves 20%", 256),
        ("last doubling saves 29%", 128),
        ("least time x batch^0.3", 256),
        ("least time x batch^0.7", 128),
    ],
)
def test_each_rule_has_its_knee(rule: str, knee: int) -> None:
    assert replay_knee.RULES[rule](line(0.5, 0.5, 0.25, 0.05, 0.01)) == knee


def test_a_rule_is_judged_by_repeats_by_what_it_costs_and_against_a_constant(
    sets: dict[str, MeasuredSet], monkeypatch
) -> None:
    monkeypatch.setattr(replay_knee, "RULES", {"largest": lambda line: line[-1].batch, "odd": odd})
    monkeypatch.setattr(replay_knee, "DRAWS", 10)
    largest, noisy = replay_knee.judge(sets.values(), ["full"])
    assert (largest.repeats, largest.at_the_largest, largest.constant) == (1.0, 1.0, 1.0)
    assert largest.predicted["full"] == (1.0, 1.0, 0.0)
    assert noisy.repeats < 0.9 and noisy.slowness > largest.slowness >= 1.0


def test_a_rule_is_judged_on_the_curve_that_is_believed(sets: dict[str, MeasuredSet], monkeypatch) -> None:
    monkeypatch.setattr(replay_knee, "RULES", {"fastest": lambda line: min(line, key=lambda row: row.hours).batch})
    monkeypatch.setattr(replay_knee, "DRAWS", 1)
    monkeypatch.setattr(
        replay_knee, "list_predicted_curve", lambda each, strategy: replay_knee.list_true_curve(each)[:2]
    )
    exact, near, lost = replay_knee.judge(sets.values(), ["partial"])[0].predicted["partial"]
    assert (exact, near) == (0.0, 0.0) and lost > 0.5


def odd(line: Sequence[Prediction]) -> int:
    """A rule that noise throws about: the parity of a late digit of the time."""
    return line[0].batch if int(line[0].hours * 1e9) % 2 else line[1].batch


def test_the_page_has_a_plot_of_every_set_with_enough_batches(monkeypatch, capsys, tmp_path: Path) -> None:
    run(monkeypatch, capsys, "--html", str(tmp_path / "knees.html"))
    page = (tmp_path / "knees.html").read_text().replace("\\u002f", "/")
    drawn = [each for each in load_sets(TABLE) if replay_knee.list_true_curve(each)]
    assert len(drawn) >= 2 and all(each.name in page for each in drawn)
    assert page.count("Plotly.newPlot(") >= len(drawn)
    assert "knee: product" in page and "chosen after sweep" in page


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (None, "No such file"),
        ("", "No columns"),
        ("a,b\n1,2\n", "has no column cluster"),
        (HEADER, "no set with two sizes"),
    ],
)
def test_a_table_that_is_none_is_one_line(tmp_path, monkeypatch, rows, words) -> None:
    path = tmp_path / "table.csv"
    if rows is not None:
        path.write_text(rows)
    monkeypatch.setattr("sys.argv", ["replay.py", str(path)])
    with pytest.raises(SystemExit, match=words):
        replay.main()


@pytest.mark.parametrize("wrong", [["--models", "foo"], ["--strategies", "foo"], ["--json", "--timing"]])
def test_wrong_names_and_flags_that_exclude_each_other_are_usage_errors(monkeypatch, capsys, wrong) -> None:
    monkeypatch.setattr("sys.argv", ["replay.py", "table.csv", *wrong])
    with pytest.raises(SystemExit) as ended:
        replay.main()
    assert ended.value.code == 2 and ("foo" in capsys.readouterr().err or "--json" in wrong)
