"""The report of a run: its numbers are those of `tula recommend` and `tula status`."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import make_reports as reports
import make_runs as make
import pytest
from make_reports import find_figure, find_section, find_series, find_table, make_report, read_column
from make_results import MIB, Truth

from tula_cli.errors import SpecError
from tula_cli.extras.report import training_sections
from tula_cli.extras.report.run_report import build_document
from tula_cli.extras.report.sections import build_scaling_study
from tula_cli.models.time.noise import compute_trimmed_mean
from tula_cli.query import Query
from tula_cli.run.directory import RunDir
from tula_cli.run.job_runs import open_run, open_runs_of_job
from tula_cli.run.records.results import Cell, Comparison
from tula_cli.run.step_series import StepRow, format_rows
from tula_cli.services import recommend as recommending
from tula_cli.services import status
from tula_cli.services.api import Run, report_text
from tula_cli.services.api import report as api_report
from tula_cli.services.document import Document
from tula_cli.words import format_duration, format_number


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run with everything; nobody changes it."""
    run = reports.make_probed_run(tmp_path_factory.mktemp("whole"))
    return reports.add_comparison(reports.add_training(reports.add_recommendation(run)))


@pytest.fixture(scope="module")
def told(whole: RunDir) -> Document:
    return make_report(whole)


@pytest.fixture(scope="module")
def by_script(tmp_path_factory: pytest.TempPathFactory) -> Document:
    root = tmp_path_factory.mktemp("script")
    return make_report(reports.add_recommendation(reports.make_probed_run(root, job=reports.script_job(), script=True)))


@pytest.fixture(scope="module")
def by_type(tmp_path_factory: pytest.TempPathFactory) -> Document:
    job = reports.job_spec(search={"nodes": [1, 2, 4, 8], "max_batch": 512}, node_types=reports.TYPES)
    return make_report(reports.add_recommendation(reports.make_probed_run(tmp_path_factory.mktemp("types"), job=job)))


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory: pytest.TempPathFactory) -> Document:
    run = RunDir.create(tmp_path_factory.mktemp("training"), reports.JOB)
    return make_report(reports.add_training(run, predicted_hours=None, predicted_step=None, predicted_cost=None))


# --- the answer


def test_the_answer_is_the_one_that_recommend_has_kept(whole: RunDir, told: Document) -> None:
    kept = whole.read_recommendation()
    assert kept is not None
    choice = kept.choice
    assert kept.headline is not None and told.answer.startswith(kept.headline.text)
    for value in (
        f"{choice.nodes} nodes, batch {choice.batch} (local {choice.local_batch}): ",
        format_duration(3600 * choice.hours),
        format_number(choice.cost),
        f"{format_number(choice.all_node_hours)} node-hours",
    ):
        assert value in told.answer
    assert (
        "Trained for 10 epochs on 2 nodes at batch 64: 6.00 min (predicted: 4.80 min), 0.200 USD, best top-1 83.00 %."
        in told.answer
    )
    assert told.question.endswith(f"for 10 epochs (objective {kept.criteria}, 1970-01-01 00:00)?")


def test_the_table_of_configurations_has_the_rows_of_recommend(whole: RunDir, told: Document) -> None:
    now = recommending.recommend_configuration(open_runs_of_job(whole), Query(objective="time"), now=1.0).recommendation
    result = find_table(told, "configurations")
    rows = sorted(now.rows, key=lambda row: row != now.choice)
    assert result.marks[0] == "chosen"
    assert [read_column(result, name) for name in ("nodes", "batch", "batch/GPU")] == [
        [getattr(row, name) for row in rows] for name in ("nodes", "batch", "local_batch")
    ]
    seconds = {"s": 3600, "min": 60, "h": 1}[next(item.unit for item in result.columns if item.title == "time")]
    assert read_column(result, "time") == pytest.approx([row.hours * seconds for row in rows])
    assert read_column(result, "cost") == pytest.approx([row.cost for row in rows])
    (chosen,) = [row for row, mark in zip(rows, result.marks, strict=True) if mark == "chosen"]
    assert chosen == now.choice
    front = [row for row, mark in zip(rows, result.marks, strict=True) if mark == "front"]
    assert front == [row for row in rows if row.pareto and row != chosen]


def test_an_answer_that_would_be_another_now_is_reported(tmp_path: Path) -> None:
    run = reports.add_recommendation(reports.make_probed_run(tmp_path))
    kept = run.read_recommendation()
    assert kept is not None
    other = next(row for row in kept.rows if row.batch != kept.choice.batch)
    run.write_recommendation(kept.model_copy(update={"choice": other}))
    text = " ".join(find_section(make_report(run), "choice").text)
    assert f"A new recommendation would choose {kept.choice.nodes} nodes, batch {kept.choice.batch}" in text
    limited = kept.model_copy(update={"choice": other, "options": ("--max-batch 64",)})
    run.write_recommendation(limited)
    assert "A new recommendation" not in " ".join(find_section(make_report(run), "choice").text)


def test_without_an_answer_the_knee_is_reported(tmp_path: Path) -> None:
    run = reports.make_probed_run(tmp_path)
    document = make_report(run)
    now = recommending.recommend_configuration(open_runs_of_job(run), Query(objective="knee"), now=1.0).recommendation
    assert f"{now.choice.nodes} nodes, batch {now.choice.batch} (" in document.answer or now.choice.nodes == 1
    assert run.read_recommendation() is None, "a report keeps no answer"
    assert find_section(document, "training").missing == "nothing has been trained yet. Run tula train."


# --- scaling


def test_strong_scaling_is_that_of_the_choices_batch(whole: RunDir, told: Document) -> None:
    result, kept = find_table(told, "strong_scaling"), whole.read_recommendation()
    assert kept is not None
    assert set(read_column(result, "batch")) == {kept.choice.batch}
    samples, nodes = read_column(result, "samples/s"), read_column(result, "nodes")
    assert read_column(result, "speed-up") == pytest.approx([value / samples[0] for value in samples])
    expected = [100 * value / samples[0] * nodes[0] / count for value, count in zip(samples, nodes, strict=True)]
    assert read_column(result, "efficiency") == pytest.approx(expected)
    at = nodes.index(kept.choice.nodes)
    assert read_column(result, "step")[at] == pytest.approx(1000 * kept.choice.step_time)
    assert result.marks[at] == "chosen"


def test_nodes_that_cost_no_synchronisation_scale_weakly_without_loss(tmp_path: Path) -> None:
    run = reports.add_recommendation(reports.make_probed_run(tmp_path, Truth(sync=0.0)))
    result = find_table(make_report(run), "weak_scaling")
    assert len(set(read_column(result, "batch/GPU"))) == 1
    assert len(result.rows) > 1
    assert read_column(result, "efficiency") == pytest.approx([100.0] * len(result.rows), abs=1.5)


def test_throughput_is_drawn_with_its_interval_and_the_ideal(told: Document) -> None:
    result, drawn = find_table(told, "strong_scaling"), find_figure(told, "scaling_throughput")
    value = next(first for first in drawn.series if first.name.startswith("batch "))
    assert value.y == pytest.approx(tuple(read_column(result, "samples/s")))
    assert value.measured == tuple(source == "measured" for source in read_column(result, "source"))
    ideal = next(item for item in drawn.series if item.name == f"ideal, {value.name}")
    assert ideal.y[-1] == pytest.approx(value.y[0] * value.x[-1] / value.x[0])  # type: ignore[operator]


# --- time, cost, steps, memory


def test_time_and_cost_are_drawn_by_batch_with_the_choice(whole: RunDir, told: Document) -> None:
    kept = whole.read_recommendation()
    assert kept is not None
    for key, value in (("time_by_batch", kept.choice.hours), ("cost_by_batch", kept.choice.cost)):
        drawn = find_figure(told, key)
        (mark,) = [item for item in drawn.marks if item.kind == "choice"]
        curve = find_series(drawn, f"{kept.choice.nodes} nodes")
        assert mark.y == pytest.approx(curve.y[curve.x.index(kept.choice.batch)])
        ratio = mark.y / value  # type: ignore[operator]
        assert any(ratio == pytest.approx(unit) for unit in (1, 60, 3600))
    assert [find_figure(told, key).paper for key in ("time_by_batch", "cost_by_batch")] == ["Figure 9", "Figure 10"]  # fmt: skip


def test_the_parts_of_a_step_are_the_step_together(whole: RunDir, told: Document) -> None:
    drawn, probes = find_figure(told, "step_parts"), [r for r in whole.read_results() if r.kind == "measured"]
    assert drawn.categories == tuple(f"{probe.nodes} x {probe.local_batch}" for probe in probes)
    together = [sum(item.y[place] or 0.0 for item in drawn.series) for place in range(len(probes))]
    assert together == pytest.approx([1000 * compute_trimmed_mean(probe.step_times) for probe in probes])
    assert [first.name for first in drawn.series] == ["compute", "exposed communication", "data-loader wait"]


def test_every_probe_is_reported_also_one_that_did_not_fit(told: Document) -> None:
    result = find_table(told, "probes")
    outcomes = dict(zip(zip(read_column(result, "nodes"), read_column(result, "batch/GPU"), strict=True), read_column(result, "outcome"), strict=True))  # fmt: skip
    assert outcomes[1, 512] == "out of memory"
    assert outcomes[4, 128] == "measured"
    low, step, high = (read_column(result, name)[0] for name in ("low", "step", "high"))
    assert low < step < high


def test_memory_is_stacked_to_its_peak_below_the_limit(told: Document) -> None:
    drawn = find_figure(told, "memory")
    stacked = [first for first in drawn.series if first.style == "stacked"]
    peak, seen = find_series(drawn, "peak, model"), find_series(drawn, "peak, measured")
    for place in range(len(drawn.categories)):
        assert sum(item.y[place] or 0.0 for item in stacked) == pytest.approx(peak.y[place], rel=1e-6)
    at = drawn.categories.index("256")
    truth, unit = Truth(), {"MiB": MIB, "GiB": 1024 * MIB}[drawn.y_label.partition("(")[2].rstrip(")")]
    assert seen.y[seen.x.index(at)] == pytest.approx(truth.peak(256) / unit)
    (limit,) = [mark for mark in drawn.marks if mark.kind == "limit"]
    assert (limit.x, limit.y) == (None, pytest.approx((truth.capacity or 0) / unit))


# --- the training


def test_predicted_and_actual_are_those_of_the_summary(told: Document) -> None:
    result = find_table(told, "predicted_actual")
    rows = {row[0]: row[2:] for row in result.rows}
    assert rows["step time"] == pytest.approx((100.0, 105.0, 100 * (0.1 - 0.105) / 0.105))
    assert rows["time"] == pytest.approx((4.8, 6.0, -20.0))
    assert rows["cost"] == pytest.approx((0.16, 0.2, -20.0))


def test_energy_that_was_counted_in_part_has_no_error() -> None:
    errors = {}
    for counted in (0.98, 0.5):
        summary = make.summary(predicted_kwh=1.1, actual_kwh=1.0, counted=counted)
        training = SimpleNamespace(part=SimpleNamespace(make_unique_key=str))
        table = training_sections._build_predicted_against_actual(training, summary)  # type: ignore[arg-type]
        errors[counted] = {row[0]: row[-1] for row in table.rows}["energy"]
    assert errors == {0.98: pytest.approx(10.0), 0.5: None}


def test_attempts_are_those_of_status_with_their_ends(whole: RunDir, told: Document) -> None:
    now = status.read_run_status(whole, make.FakeLauncher(), now=reports.REPORT_TIME)
    result = find_table(told, "attempts")
    assert len(result.rows) == len([attempt for attempt in now.attempts if attempt.job == "train-ab12cd34"]) == 2
    assert read_column(result, "ended") == ["node_failure", "done"]
    assert read_column(result, "because")[0] == "node n1 is gone"
    assert read_column(result, "from sample") == [0, 1000]


def test_loss_metric_and_step_time_are_drawn_over_samples(told: Document) -> None:
    assert find_series(find_figure(told, "metric_by_samples"), "top-1").y == (60.0, 70.0, 80.0)
    assert find_series(find_figure(told, "metric_by_samples"), "top-1").x == (1000.0, 2000.0, 3000.0)
    assert find_series(find_figure(told, "loss_by_samples"), "evaluation").y == (1.0, 0.5, 1 / 3)
    predicted = find_series(find_figure(told, "step_time"), "predicted")
    assert (predicted.low, predicted.high) == ((80.0,) * 3, (100.0,) * 3)


def test_a_training_under_way_is_reported_as_status_has_it(tmp_path: Path) -> None:
    run = reports.add_recommendation(reports.make_probed_run(tmp_path))
    name = make.add_training(run, rows=make.metrics())
    run.write_attempt(make.attempt(f"{name}-1"))
    look = reports.read_material(run, make.FakeLauncher({name: "running"}))
    now = look.parts[0].status.training
    assert now is not None
    (text,) = find_section(build_document(look), "training").text
    assert (
        text.startswith("Training ab12cd34 on 2 nodes, batch 128, epoch 1.50 of 10, 1920 samples")
        and ": running" in text
    )


def test_a_finished_training_is_shown_after_a_newer_one_was_cancelled(tmp_path: Path) -> None:
    run = reports.add_training(reports.make_probed_run(tmp_path))
    make.add_training(run, signature="0851f73d", at=make.START + 100)
    text = " ".join(find_section(make_report(run), "training").text)
    assert "done in 6.00 min" in text and "The newer training 0851f73d is " in text


def test_the_training_is_not_one_of_the_comparison(whole: RunDir, tmp_path: Path) -> None:
    assert find_section(make_report(whole), "training").text[0].startswith("Training ab12cd34,")


def test_a_row_of_an_earlier_comparison_is_not_the_training(tmp_path: Path) -> None:
    run = reports.add_training(RunDir.create(tmp_path, reports.JOB))

    def compare(signature: str, *, method: str) -> None:
        cell = Cell(method=method, batch=128, seed=1, nodes=2, signature=signature)
        run.write_comparison(
            Comparison(
                methods=(method,), batches=(128,), seeds=1, nodes=2, controls=False, cells=(cell,), created_at=1.0,
                job_row="ramp",
            )
        )  # fmt: skip

    compare("ab12cd34", method="lbt-x4")
    compare("c0c0c0c0", method="ags")
    assert "ab12cd34" not in " ".join(find_section(make_report(run), "training").text)
    compare("ab12cd34", method="ramp")
    assert find_section(make_report(run), "training").text[0].startswith("Training ab12cd34"), (
        "it trains the job unchanged"
    )
    compare("c0c0c0c0", method="lars")
    assert find_section(make_report(run), "training").text[0].startswith("Training ab12cd34"), (
        "also after another comparison"
    )


# --- gradients and methods


def test_the_density_of_factors_sums_up_to_one_each_epoch(told: Document) -> None:
    drawn = find_figure(told, "factors")
    density = drawn.density
    assert density is not None
    assert density.x_edges == (0.0, 1000.0, 2000.0, 3000.0)
    assert density.y_edges == (0.5, 1.0, 2.0, 4.0)
    assert density.shares[0] == pytest.approx((2 / 8, 5 / 8, 1 / 8))
    assert [sum(column) for column in density.shares] == pytest.approx([1.0] * 3)
    assert drawn.paper == "Figure 7"


def test_the_change_of_gradients_is_drawn_and_curvature_beside_the_norm(told: Document) -> None:
    assert find_figure(told, "gradient_change").series[0].y == pytest.approx((0.1, 0.2, 0.3))
    assert [item.name for item in find_figure(told, "eigenvalue").series] == ["largest eigenvalue", "gradient norm"]
    (norm,) = find_figure(told, "gradient_norm").series
    assert (norm.low, norm.high) == ((1.0,) * 3, (3.0,) * 3)


def test_what_is_kept_of_every_step_is_drawn_in_place_of_medians(tmp_path: Path) -> None:
    run = reports.add_training(RunDir.create(tmp_path, reports.JOB))
    rows = [
        StepRow.from_step(
            samples=32 * step, batch=32, lr=0.1, norm=5.0 if step == 700 else 1.0, delta=0.5, scaled=False
        )
        for step in range(1, 1001)
    ]
    run.get_training("ab12cd34").steps_path.write_text(format_rows(rows))
    document = make_report(run)
    (norm,) = find_figure(document, "gradient_norm").series
    assert len(norm.x) == 500 and norm.x[-1] == 32_000.0, "two steps a point"
    spike = norm.x.index(700 * 32.0)
    assert (norm.y[spike], norm.low[spike], norm.high[spike]) == (3.0, 1.0, 5.0)  # type: ignore[index]
    assert find_figure(document, "gradient_change").paper == "Figure 6"


def test_table_one_has_means_gaps_and_what_is_recovered(told: Document) -> None:
    result = find_table(told, "methods")
    rows = {
        (row[0], row[1]): dict(zip([item.title for item in result.columns], row, strict=True)) for row in result.rows
    }
    ags = rows[512, "ags"]
    assert (ags["top-1"], ags["gap"], ags["recovered"], ags["seeds"]) == (85.5, 5.0, 50.0, 2)
    assert rows[128, "lbt (reference)"]["gap"] is None
    assert result.marks == ("front", "", "front"), "the best of each batch"
    drawn = find_figure(told, "top1_by_batch")
    assert (drawn.paper, drawn.categories) == ("Figure 2", ("128", "512"))
    assert find_series(drawn, "ags").y == (85.5,)
    assert "At batch 512 ags is best" in find_section(told, "comparison").text[0]


# --- runs of which little is known


def missing(document: Document) -> dict[str, str]:
    """Return what is missing, by section."""
    return {item.key: item.missing for item in document.sections if item.missing}


def test_a_run_with_nothing_says_of_each_section_what_would_bring_it(tmp_path: Path) -> None:
    result = missing(make_report(RunDir.create(tmp_path, reports.JOB)))
    assert len(result) == 8
    assert all("tula " in words for words in result.values())


def test_a_run_with_a_training_alone_tells_it(trained_alone: Document) -> None:
    assert trained_alone.answer.startswith("No recommendation yet: no probe was measured")
    assert "Trained for 10 epochs on 2 nodes at batch 64: 6.00 min, 0.200 USD" in trained_alone.answer
    assert {"training", "gradients"}.isdisjoint(missing(trained_alone))
    rows = {row[0]: row[2:] for row in find_table(trained_alone, "predicted_actual").rows}
    assert rows["time"] == (None, pytest.approx(6.0), None)


def test_a_script_has_whole_steps_and_peaks_alone(by_script: Document) -> None:
    assert "finetune.py" in by_script.question
    assert [item.name for item in find_figure(by_script, "memory").series] == ["peak, model", "peak, measured"]
    assert "DistributedDataParallel" in " ".join(find_section(by_script, "measured").text)
    probes = find_table(by_script, "probes")
    assert set(read_column(probes, "exposed comm")) == {0.0, None}, (
        "on one GPU nothing is synchronised, but input is not told"
    )
    assert "data wait" not in [item.title for item in probes.columns], "a column without values is left out"


def test_each_node_type_has_its_probes_and_its_curve(by_type: Document) -> None:
    assert {entry.key for entry in find_section(by_type, "measured").tables} == {"probes_a", "probes_b"}
    assert {first.name for first in find_figure(by_type, "time_by_batch").series} >= {
        "1 node of type a",
        "8 nodes of type b",
    }
    assert "of types a, b" in by_type.question and "of type " in by_type.answer
    assert "type" in [item.title for item in find_table(by_type, "configurations").columns]


def test_a_choice_on_hardware_without_measurements_is_reported(tmp_path: Path) -> None:
    run = reports.add_recommendation(reports.make_probed_run(tmp_path))
    stored = run.read_recommendation()
    assert stored is not None
    choice = stored.choice.model_copy(update={"type": "sold"})
    run.write_recommendation(stored.model_copy(update={"choice": choice}))
    document = make_report(run)
    assert "of type sold" in document.answer
    assert missing(document)["scaling"] == "scaling is unknown: node type sold has no measurements"


def test_a_damaged_result_leaves_what_does_not_rest_on_it(tmp_path: Path) -> None:
    run = reports.add_training(reports.add_recommendation(reports.make_probed_run(tmp_path)))
    (run.path / "results/probe-n001-l000064.json").write_text("{")
    document = make_report(run)
    assert set(missing(document)) == {"comparison"}
    assert "Left out: " in find_section(document, "measured").text[1]
    assert "probe-n001-l000064.json is damaged" in find_section(document, "measured").text[1]


# --- what holds of every report


def test_figures_and_tables_hold_together(
    told: Document, by_script: Document, by_type: Document, trained_alone: Document
) -> None:
    for document in (told, by_script, by_type, trained_alone):
        figures = [first for part in document.sections for first in part.figures]
        tables = [one for part in document.sections for one in part.tables]
        assert len({one.key for one in figures}) == len(figures)
        assert len({item.key for item in tables}) == len(tables)
        for one in tables:
            assert all(len(row) == len(one.columns) for row in one.rows)
            assert len(one.marks) in (0, len(one.rows))
        for drawn in figures:
            assert drawn.series or drawn.density, drawn.key
            for curve in drawn.series:
                ends = [end for end in (curve.low, curve.high, curve.measured) if end is not None]
                assert {len(values) for values in (curve.y, *ends)} == {len(curve.x)}, drawn.key
                numbers = [y for values in (curve.y, *ends) for y in values if y is not None]
                assert all(math.isfinite(y) for y in numbers), drawn.key
                if drawn.x_scale == "category":
                    assert set(curve.x) <= {float(place) for place in range(len(drawn.categories))}
        assert json.dumps([entry.series[0].x for entry in figures if entry.series])  # plain numbers, no numpy


def test_the_api_returns_the_same_report(whole: RunDir, told: Document) -> None:
    assert api_report(Run.from_directories([open_run(whole)])).answer == told.answer


def test_the_api_returns_text_too(tmp_path: Path) -> None:
    run = Run.from_directories([open_run(reports.add_training(RunDir.create(tmp_path, reports.JOB)))])
    assert report_text(run).startswith("# test\n") and report_text(run, form="latex").startswith("\\documentclass")
    assert "table_predicted_actual" in report_text(run, form="csv")
    with pytest.raises(SpecError, match="unknown form 'markdwn'"):
        report_text(run, form="markdwn")  # type: ignore[arg-type]


def test_rows_that_are_damaged_are_left_out(tmp_path: Path) -> None:
    broken = [
        {"kind": "hessian", "samples": {}, "eigenvalue": 1.0},
        {"kind": "noise", "samples": 10, "epoch": 1, "batch": 32, "scale": "x"},
        {"kind": "epoch", "time": make.START, "samples": 500, "epoch": 1, "ags": "x", "metrics": 3,
         "diagnostics": {"factors": {"edges": [1.0, "x"], "counts": [1, 2, 3]}, "norm": []}},
        {"kind": "stage", "time": [], "samples": 5, "batch": 64},
    ]  # fmt: skip
    document = make_report(
        reports.add_training(RunDir.create(tmp_path, reports.JOB), rows=[*reports.make_epoch_rows(), *broken])
    )
    assert find_figure(document, "eigenvalue").series[0].x == (1000.0, 2000.0, 3000.0)
    assert find_figure(document, "factors").density.x_edges == (0.0, 1000.0, 2000.0, 3000.0)  # type: ignore[union-attr]


def test_a_step_time_without_a_lower_bound_has_no_upper_throughput() -> None:
    (point,) = build_scaling_study([make.prediction(2, 64, step_low=0.0)])
    assert point.samples_interval == (pytest.approx(64 / 0.11), None)


def test_figures_mark_the_later_attempts_and_batches_of_a_training(tmp_path: Path) -> None:
    starts = [{"kind": "start", "time": make.START, "samples": at, "epoch": 0.0, "attempt": at} for at in (500, 900)]
    stages = [{"kind": "stage", "time": make.START, "samples": at, "batch": at + 64} for at in (0, 800)]
    rows = [*reports.make_epoch_rows(), *starts, *stages]
    document = make_report(reports.add_training(RunDir.create(tmp_path, reports.JOB), rows=rows))
    assert [(mark.x, mark.text) for mark in find_figure(document, "loss_by_samples").marks] == [
        (500.0, "attempt 2"), (900.0, "attempt 3"), (800.0, "batch 864"),
    ]  # fmt: skip
