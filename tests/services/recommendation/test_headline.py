"""The first line of a recommendation compares the choice with today's configuration."""

import json
from pathlib import Path
from typing import Any

import make_runs as make
import pytest
from make_results import Truth, add_gradient_noise, as_script_probe, make_out_of_memory, make_probes, make_spec

import tula_cli as tula
from tula_cli.errors import Infeasible, SpecError
from tula_cli.models.choice import baseline
from tula_cli.models.choice.baseline import compute_baseline_saving
from tula_cli.query import Query
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.job_runs import open_runs_of_job
from tula_cli.run.records.recommendations import Accuracy, Headline, Prediction, Recommendation, RiskBasis
from tula_cli.services.recommend import recommend_configuration
from tula_cli.show.train import render_summary
from tula_cli.spec.job import JobSpec
from tula_cli.spec.resources import UNPRICED_PRICING

SWEEP = {2: (16, 32, 64, 128, 256), 4: (8,), 8: (4,), 16: (2, 256)}


def run_with(
    root: Path,
    *,
    noise: float | None = 100_000,
    results: Any = None,
    method: str = "ags",
    reference: int = 64,
    **sections: Any,
) -> RunDir:
    """A run of a job with a price, probed without scatter."""
    job = make_spec(search={"max_batch": 4096}, train={"reference_batch": reference, "method": method}, **sections)
    run = RunDir.create(root, job)
    probes = make_probes(Truth(noise=0.0), SWEEP) if results is None else results
    for probe in probes if noise is None else add_gradient_noise(probes, noise):
        run.write_result(probe)
    return run


def ask(run: RunDir, objective: Any = "time", **limits: Any) -> Recommendation:
    return recommend_configuration(open_runs_of_job(run), Query(objective=objective, **limits), now=1.0).recommendation


def headline(run: RunDir, objective: Any = "time", **limits: Any) -> Headline:
    answer = ask(run, objective, **limits).headline
    assert answer is not None
    return answer


def row_of(answer: Recommendation, nodes: int, batch: int) -> Prediction:
    return next(row for row in answer.rows if (row.nodes, row.batch) == (nodes, batch))


def test_the_baseline_is_the_reference_batch_on_the_fewest_nodes(tmp_path: Path) -> None:
    answer = ask(run_with(tmp_path))
    line, choice = answer.headline, answer.choice
    assert line is not None and line.time is not None and line.cost is not None and line.baseline is not None
    today = row_of(answer, 2, 64)
    assert (line.nodes, line.batch, line.baseline.hours) == (2, 64, today.hours)
    assert line.time.ratio == pytest.approx(today.hours / choice.hours) and line.time.ratio > 2
    assert line.cost.after == choice.cost and line.cost.before == today.cost
    assert line.compute_speed_up(choice) == line.time.ratio and line.compute_speed_up(today) == 1.0
    assert line.text.startswith(f"{choice.nodes} nodes, batch {choice.batch}: ") and "x faster (" in line.text
    assert "configuration, 2 nodes, batch 64 (train.reference_batch on the fewest nodes)" in line.comparison
    assert not line.baseline_predicted and "which is predicted" not in line.comparison
    assert ("the choice is predicted" in line.comparison) == (not choice.measured)


def test_every_row_is_compared_with_the_baseline(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    answer = recommend_configuration(open_runs_of_job(run), Query(), now=1.0)
    recommendation, line = answer.recommendation, answer.recommendation.headline
    assert line is not None and line.baseline is not None
    table = recommendation.frame()
    assert table["speed_up"].tolist() == [line.baseline.hours / row.hours for row in recommendation.rows]
    assert set(table["accuracy_risk"]) <= {"low", "medium", "high", "unknown"}
    chosen = table[table["chosen"]].iloc[0]
    assert line.time is not None and chosen["speed_up"] == line.time.ratio
    assert chosen["accuracy_risk"] == line.risk.level
    for rows, every in ((recommendation.rows, False), (answer.candidates.make_predictions(), True)):
        notes = [recommendation.get_notes(row)._asdict() for row in rows]
        as_json = [json.loads(text) for text in answer.list_rows_as_json(every=every)]
        names = ("chosen", "speed_up", "accuracy_risk", "caveats")
        assert [[row[name] for name in names] for row in as_json] == [
            [values["chosen"], values["speed_up"], values["accuracy_risk"], list(values["caveats"])] for values in notes
        ]
        assert sum(row["chosen"] for row in as_json) == 1


def test_rows_of_an_older_recommendation_are_not_compared(tmp_path: Path) -> None:
    recommendation = ask(run_with(tmp_path)).model_copy(update={"headline": None})
    table = recommendation.frame()
    assert table["speed_up"].isna().all() and table["accuracy_risk"].isna().all()
    assert Recommendation.model_validate_json(recommendation.model_dump_json()) == recommendation


def test_the_job_names_another_baseline(tmp_path: Path) -> None:
    line = headline(run_with(tmp_path, baseline={"nodes": 4, "batch": 128}))
    assert (line.nodes, line.batch, line.baseline_predicted) == (4, 128, True)
    assert "4 nodes, batch 128 (baseline.batch on baseline.nodes)" in line.comparison
    assert "predicted" in line.comparison
    line = headline(run_with(tmp_path / "nodes", baseline={"nodes": 8}))
    assert (line.nodes, line.batch) == (8, 64)


def test_a_baseline_keeps_the_run_and_is_left_out_of_a_job_that_has_none(tmp_path: Path) -> None:
    assert run_with(tmp_path / "a").id == run_with(tmp_path / "b", baseline={"nodes": 4}).id
    assert "baseline" not in make_spec().model_dump()
    assert JobSpec.model_validate(make_spec(baseline={"batch": 64}).model_dump()).baseline.batch == 64


def test_slower_and_more_expensive_are_said_as_they_are(tmp_path: Path) -> None:
    run = run_with(tmp_path, baseline={"nodes": 16, "batch": 4096})
    line = headline(run, "cost", max_batch=32)
    assert line.time is not None and line.time.ratio < 1 and "x slower (" in line.text
    run = run_with(tmp_path / "dear", baseline={"nodes": 2, "batch": 512})
    line = headline(run, "time")
    assert line.cost is not None and line.cost.ratio < 1 and "more expensive (" in line.text and "x faster" in line.text


def test_a_difference_within_noise_is_called_none(tmp_path: Path) -> None:
    scattered = make_probes(Truth(noise=0.1), SWEEP)
    run = run_with(tmp_path, results=scattered, baseline={"nodes": 2, "batch": 4096})
    line = headline(run, "time", max_nodes=2)
    assert line.time is not None and line.time.within_noise and "about as fast (" in line.text


def test_a_choice_that_is_the_baseline_says_so(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    choice = ask(run).choice
    line = headline(run_with(tmp_path / "same", baseline={"nodes": choice.nodes, "batch": choice.batch}))
    assert line.is_baseline and line.time is None and "today's configuration is the choice" in line.text


@pytest.mark.parametrize(
    ("baseline", "problem"),
    [
        ({"nodes": 2, "batch": 2048}, "ran out of memory"),
        ({"nodes": 2, "batch": 65}, "is not divisible"),
        ({"batch": 10**9}, "larger than the dataset"),
    ],
)
def test_a_baseline_that_cannot_run_is_named_with_the_reason(tmp_path: Path, baseline: Any, problem: str) -> None:
    results = [*make_probes(Truth(noise=0.0), SWEEP), make_out_of_memory(2, 512)]
    line = headline(run_with(tmp_path, noise=None, results=results, baseline=baseline))
    assert line.baseline is None and line.time is None and problem in line.problem
    assert line.comparison.startswith("Not compared with today's configuration, ") and problem in line.comparison
    assert "USD" in line.text and "accuracy risk" in line.text


def test_without_prices_there_is_no_cost(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    free = run.read_spec().model_copy(update={"pricing": UNPRICED_PRICING})
    line = recommend_configuration([Run(run.path, free)], Query(objective="time"), now=1.0).recommendation.headline
    assert line is not None and line.cost is None and "USD" not in line.text and "node-h" not in line.text


def test_the_time_to_the_same_progress_is_compared_where_it_is_the_objective(tmp_path: Path) -> None:
    answer = ask(run_with(tmp_path, noise=1000), "accuracy-time")
    line, progress = answer.headline, answer.choice.same_progress
    assert line is not None and line.time is not None and progress is not None
    assert line.time.after == progress.hours and "to the same progress" in line.text


def test_a_faster_and_cheaper_row_than_the_knee_is_explained(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    answer = ask(run, "knee")
    better = [
        row for row in answer.rows if row.hours < 0.98 * answer.choice.hours and row.cost < 0.98 * answer.choice.cost
    ]
    assert better and answer.headline is not None
    cheapest = min(better, key=lambda row: row.cost)
    assert (
        answer.headline.preference.startswith(f"{cheapest.nodes} node")
        and "objective knee" in answer.headline.preference
    )
    assert headline(run, "time").preference == ""


def test_accuracy_is_no_reason_against_the_reference_batch(tmp_path: Path) -> None:
    larger = ask(run_with(tmp_path / "small"), "knee")
    assert (
        larger.headline is not None
        and "less than the 29 % that the knee requires, and may cost accuracy." in larger.headline.preference
    )
    smaller = ask(run_with(tmp_path / "large", reference=4096, baseline={"batch": 64}), "knee")
    assert smaller.headline is not None
    assert "less than the 29 % that the knee requires." in smaller.headline.preference


def test_todays_configuration_is_kept_if_it_is_as_good_as_the_knee(tmp_path: Path) -> None:
    knee = ask(run_with(tmp_path), "knee")
    better = next(
        row for row in knee.rows if row.hours < 0.98 * knee.choice.hours and row.cost < 0.98 * knee.choice.cost
    )
    run = run_with(tmp_path / "better", baseline={"nodes": better.nodes, "batch": better.batch})
    kept = ask(run, "knee")
    assert kept.headline is not None and kept.headline.is_baseline
    assert (kept.choice.nodes, kept.choice.batch) == (better.nodes, better.batch)
    assert kept.runners_up[0] == knee.choice and len(kept.runners_up) == len(knee.runners_up)
    assert ask(run, "time").choice == ask(run_with(tmp_path), "time").choice
    assert ask(run, "knee", max_batch=better.batch - 1).choice.batch < better.batch  # it is no candidate


def test_todays_configuration_is_kept_if_the_knee_is_faster_by_noise_only(tmp_path: Path) -> None:
    scattered = make_probes(Truth(noise=0.1, fixed=0.01, sync=0.01), SWEEP)
    knee = ask(run_with(tmp_path, results=scattered), "knee", nodes=2).choice

    def answer(batch: int) -> Recommendation:
        run = run_with(tmp_path / str(batch), results=scattered, baseline={"nodes": 2, "batch": batch})
        return ask(run, "knee", nodes=2)

    kept = answer(1024)
    assert kept.choice.batch == 1024 and kept.choice.hours > knee.hours
    faster = answer(128)
    assert faster.choice.batch == knee.batch and faster.headline is not None
    assert faster.headline.text.startswith(f"2 nodes, batch {knee.batch}: 1.5x faster (")


# --- the accuracy risk


def basis(noise: float | None, *, grows: bool = True, is_lower_bound: bool = False) -> RiskBasis:
    return RiskBasis(reference_batch=64, noise_scale=noise, is_lower_bound=is_lower_bound, batch_grows=grows)


def accuracy(batch: int, outcome: Any) -> Accuracy:
    return Accuracy(
        outcome=outcome, batch=batch, reference_batch=64, metric="top1", gap=0.1, error=0.1, seeds=3, words=""
    )


@pytest.mark.parametrize(
    ("known", "batch", "level"),
    [
        (basis(1024), 512, "low"),
        (basis(1024), 1024, "medium"),
        (basis(1024), 2048, "high"),
        (basis(None), 64, "low"),  # the reference batch
        (basis(None), 128, "unknown"),
        (basis(1024, is_lower_bound=True), 512, "low"),
        (basis(1024, is_lower_bound=True), 1024, "unknown"),
        # a constant batch, which has few steps
        (basis(1e6, grows=False), 128, "low"),
        (basis(1e6, grows=False), 256, "medium"),
        (basis(1e6, grows=False), 512, "high"),
        (basis(100, grows=False), 128, "high"),
    ],
)
def test_the_accuracy_risk_follows_from_noise_and_reference_batch(known: RiskBasis, batch: int, level: str) -> None:
    assert known.assess_batch(batch).level == level


def test_a_comparison_decides_the_risk_of_the_batches_that_it_covers() -> None:
    keeps = accuracy(batch=512, outcome="keeps")
    assert [basis(None).assess_batch(batch, keeps).level for batch in (256, 512, 1024)] == ["low", "low", "unknown"]
    loses = accuracy(batch=512, outcome="may lose")
    assert [basis(1e6).assess_batch(batch, loses).level for batch in (256, 512, 1024)] == ["medium", "high", "high"]


def test_the_risk_names_its_values_or_what_to_run(tmp_path: Path) -> None:
    line = headline(run_with(tmp_path, method="ramp"))
    scale = line.risk_basis.noise_scale
    assert scale is not None and line.risk.batch_over_noise_scale is not None
    assert f"accuracy risk {line.risk.level} (batch is " in line.text and "noise scale)" in line.text
    unknown = headline(
        run_with(tmp_path / "none", noise=None, results=[as_script_probe(p) for p in make_probes(Truth(), SWEEP)])
    )
    assert "accuracy risk unknown (run tula compare)" in unknown.text


# --- the scaling efficiency


def test_the_scaling_efficiency_is_the_throughput_of_a_gpu_relative_to_the_fewest_nodes(tmp_path: Path) -> None:
    truth, answer = Truth(noise=0.0), ask(run_with(tmp_path))
    assert {row.scaling_efficiency for row in answer.rows if row.nodes == 2 and row.measured} == {1.0}
    row = row_of(answer, 4, 32)
    assert row.scaling_efficiency == pytest.approx(truth.step_time(2, 8) / truth.step_time(4, 8), rel=0.05)


def test_a_minimum_efficiency_limits_the_choice_and_is_named_where_nothing_reaches_it(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    free = ask(run)
    limit = (free.choice.scaling_efficiency or 0.0) + 0.01
    answer = ask(run, min_efficiency=limit)
    assert answer.choice != free.choice and all((row.scaling_efficiency or 0.0) >= limit for row in answer.rows)
    assert free.headline != answer.headline and answer.options == (f"--min-efficiency {limit}",)
    highest = max(row.scaling_efficiency or 0.0 for row in ask(run, nodes=4, max_batch=32).rows)
    with pytest.raises(
        Infeasible,
        match=rf"a scaling efficiency of at least 0\.99; the closest is .*, scaling efficiency {highest:.2f}\n",
    ):
        ask(run, nodes=4, max_batch=32, min_efficiency=0.99)
    efficiencies = {row.batch: row.scaling_efficiency or 0.0 for row in ask(run, nodes=4).rows}
    batch = next(batch for batch, efficiency in efficiencies.items() if round(efficiency, 2) > efficiency + 1e-4)
    bound = efficiencies[batch] + 1e-4  # two decimals would round the closest one up beyond it
    with pytest.raises(Infeasible, match=r"scaling efficiency 0\.\d{3,}\n") as caught:
        ask(run, nodes=4, max_batch=batch, min_efficiency=bound)
    assert float(str(caught.value).splitlines()[0].rpartition(" ")[2]) < bound
    for share in (80, 1.5):
        with pytest.raises(SpecError, match=f"min_efficiency {share}: must be at most 1") as refused:
            Query(min_efficiency=share)
        assert refused.value.hint == "write 0.8 for 80 %"
    with pytest.raises(SpecError, match="min_efficiency 'much': must be a number"):
        tula.recommend("job.yaml", min_efficiency="much")  # type: ignore[arg-type]


# --- costs of nothing


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (0.0, 0.0, "at about the same cost (0 -> 0 SU)"),
        (0.0, 2.0, "more expensive (0 -> 2.00 SU)"),
        (2.0, 0.0, "100 % cheaper (2.00 -> 0 SU)"),
    ],
)
def test_a_cost_of_nothing_is_compared_in_words(tmp_path: Path, before: float, after: float, text: str) -> None:
    """SLURM may bill nothing for a QOS or a partition."""
    row = ask(run_with(tmp_path)).choice
    today, choice = (row.model_copy(update={"cost": cost}) for cost in (before, after))
    assert baseline._describe_cost_change(baseline._make_change(today.cost, choice.cost, 0.1), "SU") == text
    assert baseline.is_not_clearly_worse(today, choice) is (before <= after)


# --- what a training gained


def test_a_training_ends_with_what_it_gained(tmp_path: Path) -> None:
    line = headline(run_with(tmp_path))
    assert line.baseline is not None
    summary = make.summary(actual_hours=line.baseline.hours / 2, actual_cost=line.baseline.cost, currency="USD")
    gain = compute_baseline_saving(line, summary, length=line.length)
    assert gain is not None and gain.cost is not None and gain.time.ratio == pytest.approx(2) and gain.cost.within_noise
    assert "2.0x faster" in gain.text and "predicted -> measured" in gain.text
    (*_, last) = render_summary(summary, gain=gain)
    assert last == gain.text and "of type" not in gain.text
    of_type = line.model_copy(update={"baseline": line.baseline.model_copy(update={"type": "a100"})})
    gain_of_type = compute_baseline_saving(of_type, summary, length=line.length)
    assert gain_of_type is not None and f"configuration, {line.nodes} nodes of type a100, batch" in gain_of_type.text
    assert (
        compute_baseline_saving(line, summary.model_copy(update={"ended": "after 3 epochs"}), length=line.length)
        is None
    )
    assert line.length == "10 epochs" and compute_baseline_saving(line, summary, length="20 epochs") is None
    assert compute_baseline_saving(None, summary, length="") is None
    same = summary.model_copy(update={"nodes": line.nodes, "start_batch": line.batch})
    assert compute_baseline_saving(line, same, length=line.length) is None
