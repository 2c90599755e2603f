"""Trainings of a run, finished or not, as measurements of `tula recommend` beside its probes."""

import json
from pathlib import Path
from typing import Any

import make_runs as make
import pytest
from make_results import Truth, make_probe, make_probes, make_spec

from tula_cli.query import Query
from tula_cli.run.directory import RunDir
from tula_cli.run.job_runs import open_run, open_runs_of_job
from tula_cli.run.records.recommendations import Prediction, Recommendation
from tula_cli.run.records.tasks import Rung, TrainTask
from tula_cli.services.measurements import MAX_TRAININGS, fit_estimator_of_recommendation
from tula_cli.services.recommend import recommend_configuration
from tula_cli.show import tables
from tula_cli.spec.job import JobSpec

TRUTH = Truth(fixed=0.02, slope=0.0005, sync=0.05)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A job that was measured on a cluster that turned out to be slower."""
    run = RunDir.create(tmp_path, make_spec(search={"nodes": [1, 2, 4], "max_batch": 512}))
    for probe in make_probes(TRUTH, {1: (32, 128, 512), 2: (32, 256), 4: (8, 128)}):
        run.write_result(probe)
    return run


def train(run: RunDir, seconds: float, *, own: JobSpec | None = None, name: str = "ab12cd34", **where: Any) -> None:
    """Add a training on 2 nodes at batch 128 that is under way."""
    job, own = f"train-{name}", own or run.read_spec()
    environment = {**make_probe(TRUTH, 1, 8).environment.model_dump(mode="json"), **where}
    run.write_task(
        TrainTask(
            id=f"{job}-1", job=job, spec=own, workdir="/", nodes=2, signature=name, attempt=1, ladder=(Rung(batch=128),),
            workers=own.train.workers,
        )
    )  # fmt: skip
    fields = {
        "kind": "step",
        "count": 10,
        "step_time": seconds,
        "plain_time": seconds,
        "refreshed": 0,
        "data_wait": 0.0,
        "epoch": 0.0,
    }
    rows = [
        {"kind": "start", "time": 0.0, "samples": 0, "epoch": 0.0, "attempt": 1},
        {"kind": "environment", "time": 0.0, "samples": 0, **environment},
        *({**fields, "step": 10 * at, "time": 1.0 + at, "samples": 1280 * at} for at in range(30)),
    ]
    path = run.get_training(name).metrics_path
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def ask(run: RunDir) -> Recommendation:
    return recommend_configuration(open_runs_of_job(run), Query(objective="time"), now=1.0).recommendation


def get_row(result: Recommendation, nodes: int = 2, batch: int = 128) -> Prediction:
    return next(row for row in result.rows if (row.nodes, row.batch) == (nodes, batch))


def finish(run: RunDir, hours: float, name: str = "ab12cd34", **changes: Any) -> None:
    summary = make.summary(signature=name, nodes=2, start_batch=128, batch=128, actual_hours=hours, **changes)
    run.write_summary(summary)


def drop_trainings(result: Recommendation) -> list[Prediction]:
    return [row.model_copy(update={"trained": ""}) for row in result.rows]


def step_time(result: Recommendation, nodes: int, batch: int) -> float:
    return next(row.step_time for row in result.rows if (row.nodes, row.batch) == (nodes, batch))


def test_the_next_answer_has_learnt_from_a_training(run: RunDir) -> None:
    before, slow = ask(run), 1.15 * TRUTH.step_time(2, 64)
    train(run, slow)
    after = ask(run)
    assert step_time(after, 2, 128) == pytest.approx(slow)
    assert step_time(before, 2, 256) < step_time(after, 2, 256) < 1.15 * TRUTH.step_time(2, 128)
    assert "(7 probes and 1 training, " in after.fit and "training" not in before.fit
    (message,) = after.trainings
    assert (message.signature, message.nodes, message.batch, message.probed) == ("ab12cd34", 2, 128, None)
    assert Recommendation.model_validate_json(after.model_dump_json()) == after
    row = next(row for row in after.rows if (row.nodes, row.batch) == (2, 128))
    assert row.measured and row.trained == "ab12cd34" and row.source == "training"
    (line,) = tables.describe_measured_trainings(after)
    assert line.startswith("measured by training ab12cd34: 2 nodes, batch 128, ")


def test_what_is_trained_is_predicted_as_it_was_recommended(run: RunDir) -> None:
    train(run, 1.15 * TRUTH.step_time(2, 64))
    forecast = fit_estimator_of_recommendation(open_run(run))
    assert forecast.predict_candidates().make_predictions()[0] == ask(run).rows[0].model_copy(
        update={"pareto": False, "same_progress": None}
    )


def test_a_training_takes_precedence_over_the_probe_of_its_configuration(run: RunDir) -> None:
    run.write_result(make_probe(TRUTH, 2, 64))
    probed, slow = TRUTH.step_time(2, 64), 1.1 * TRUTH.step_time(2, 64)
    train(run, slow)
    after = ask(run)
    row = get_row(after)
    assert row.step_time == pytest.approx(slow) and row.source == "training"
    assert row.step_low is not None and row.step_low < probed, "the interval includes the probe"
    (line,) = tables.describe_measured_trainings(after)
    assert "84.7 ms per step (its probe: 77.0), up to " in line


@pytest.mark.parametrize("probed", [True, False])
def test_a_training_whose_steps_are_left_out_is_shown_with_its_duration(run: RunDir, probed: bool) -> None:
    if probed:
        run.write_result(make_probe(TRUTH, 2, 64))
    before = get_row(ask(run))
    assert (before.trained, before.trained_hours, before.source) == ("", None, "measured" if probed else "predicted")
    train(run, 0.5, hardware="Other GPU")
    row = get_row(ask(run))
    assert (row.trained, row.trained_hours, row.source) == ("ab12cd34", None, f"{before.source}, trained")
    assert row.step_time == before.step_time and not row.includes_training
    finish(run, 0.25)
    row = get_row(ask(run))
    assert (row.trained, row.trained_hours, row.source) == ("ab12cd34", 0.25, f"{before.source}, trained (15.0 min)")
    assert not get_row(ask(run), 2, 256).trained
    (run.path / "train" / "ab12cd34" / "summary.json").write_text("{")
    assert get_row(ask(run)).trained_hours is None


@pytest.mark.parametrize(
    "settings", [{"method": "auto"}, {"method": "polo"}, {"method": "lbt", "diagnostics": ["gradient_norms"]}]
)
def test_a_training_whose_steps_are_not_those_of_probes_is_shown(tmp_path: Path, settings: dict[str, Any]) -> None:
    run = RunDir.create(tmp_path, make_spec(search={"nodes": [1, 2, 4], "max_batch": 512}, train=settings))
    for probe in make_probes(TRUTH, {1: (32, 128, 512), 2: (32, 256), 4: (8, 128)}):
        run.write_result(probe)
    before = get_row(ask(run))
    train(run, 0.5)
    finish(run, 0.25)
    row = get_row(ask(run))
    assert (row.trained, row.source) == ("ab12cd34", "predicted, trained (15.0 min)")
    assert row.step_time == before.step_time and not row.includes_training


def test_of_several_trainings_of_a_configuration_the_newest_is_shown(run: RunDir) -> None:
    train(run, 0.08, name="ab12cd30")
    train(run, 0.5, name="ab12cd31", hardware="Other GPU")
    path = run.get_training("ab12cd31").metrics_path
    path.write_text(path.read_text().replace('"time": ', '"time": 1'))
    for name, hours in (("ab12cd30", 1.0), ("ab12cd31", 2.0)):
        finish(run, hours, name)
    row = get_row(ask(run))
    assert (row.trained, row.trained_hours, row.source) == ("ab12cd31", 2.0, "training (2.00 h)")


def test_the_duration_of_a_training_of_another_length_is_not_shown(run: RunDir) -> None:
    train(run, 0.08, own=make_spec(search={"nodes": [1, 2, 4], "max_batch": 512}, train={"epochs": 1}))
    finish(run, 0.25)
    assert (get_row(ask(run)).trained, get_row(ask(run)).trained_hours) == ("ab12cd34", None)


@pytest.mark.parametrize("factor", [0.4, 10.0])
def test_a_training_that_no_drift_explains_does_not_replace_a_probe(run: RunDir, factor: float) -> None:
    run.write_result(make_probe(TRUTH, 2, 64))
    before = ask(run)
    train(run, factor * TRUTH.step_time(2, 64))
    after = ask(run)
    assert drop_trainings(after) == drop_trainings(before) and not after.trainings
    assert [why.partition(":")[0] for why in after.trainings_left_out] == ["training ab12cd34"]


def test_the_newest_trainings_of_a_configuration_count(run: RunDir) -> None:
    for number in range(MAX_TRAININGS + 2):
        train(run, 0.08, name=f"ab12cd3{number}")
        for path in run.path.glob(f"train/ab12cd3{number}/metrics.jsonl"):
            path.write_text(path.read_text().replace('"time": ', f'"time": {number}'))
    after = ask(run)
    assert [training.signature for training in after.trainings] == [
        f"ab12cd3{number}" for number in range(2, MAX_TRAININGS + 2)
    ]
    (line,) = tables.describe_measured_trainings(after)
    assert line.startswith(
        "measured by trainings ab12cd32, ab12cd33, ab12cd34, ab12cd35, ab12cd36: 2 nodes, batch 128, "
    )


def test_of_a_long_training_some_steps_are_read(run: RunDir) -> None:
    train(run, 0.08)
    path = run.get_training("ab12cd34").metrics_path
    head, step = path.read_text().splitlines()[:2], path.read_text().splitlines()[-1]
    path.write_text("\n".join([*head, *[step] * 15_000]) + "\n")
    (message,) = ask(run).trainings
    assert message.step_time == pytest.approx(0.08) and 30_000 < message.steps < 100_000


@pytest.mark.parametrize(
    "other",
    [{"train": {"method": "ortho"}}, {"train": {"precision": "bf16"}}, {"model": {"name": "resnet34"}}, {"train": {"method": "auto"}}],
    ids=["method", "precision", "model", "self-tuning"],
)  # fmt: skip
def test_a_training_of_other_steps_tells_nothing(run: RunDir, other: dict[str, Any]) -> None:
    before = ask(run)
    train(run, 0.5, own=make_spec(search={"nodes": [1, 2, 4], "max_batch": 512}, **other))
    assert ask(run) == before


def test_settings_that_change_no_step_are_no_hindrance(run: RunDir) -> None:
    train(run, 0.08, own=make_spec(optimizer={"lr": 0.4}, train={"epochs": 3, "seed": 7}))
    assert len(ask(run).trainings) == 1


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ({"hardware": "Other GPU"}, "it ran on Other GPU, the probes on Test GPU"),
        ({"torch": "2.9"}, "it ran with torch 2.9, the probes with 2.6"),
        ({"oversubscribed": True}, "the ranks of the training shared cores or GPUs"),
    ],
)
def test_one_that_ran_elsewhere_is_left_out_and_that_is_said(run: RunDir, where: dict[str, Any], why: str) -> None:
    before = ask(run)
    train(run, 0.5, **where)
    after = ask(run)
    assert drop_trainings(after) == drop_trainings(before) and after.trainings_left_out == (
        f"training ab12cd34: {why}",
    )
    assert list(tables.describe_measured_trainings(after)) == [f"not used in the fit: training ab12cd34: {why}"]


def test_oversubscribed_as_the_probes_were_it_counts(run: RunDir) -> None:
    for probe in make_probes(TRUTH, {2: (32, 256)}):
        run.write_result(probe.model_copy(update={"oversubscribed": True}))
    train(run, 0.08, oversubscribed=True)
    assert len(ask(run).trainings) == 1
