"""The gradient noise that trainings have measured on their way."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import make_runs
import pytest
from make_results import Truth, add_gradient_noise, make_inspection, make_probes

from tula_cli.errors import BadMeasurements
from tula_cli.query import Query
from tula_cli.run import training_run
from tula_cli.run.directory import RunDir
from tula_cli.run.files import read_json_lines
from tula_cli.run.job_runs import open_run, open_runs_of_job
from tula_cli.run.records.probes import GradientStats
from tula_cli.services import recommend, train
from tula_cli.services.measurements import (
    find_noise_near_tenth,
    list_trainings_with_noise,
    make_noise_path,
)
from tula_cli.services.plans import TrainPlan
from tula_cli.show.recommend import _explain_progress_stages_and_checkpoints

NOISES = {1: 100.0, 2: 300.0, 10: 900.0}


def stats(noise: float) -> GradientStats:
    """Return the norms that this noise scale makes, |G|^2 being 1, known to a hundredth."""
    small, big = 1 + noise / 16, 1 + noise / 128
    return GradientStats(
        norm_sqr=big, local_norm_sqr=small, batch=128, local_batch=16, steps=4, covariance=(1e-4, 1e-4, 0.0)
    )


def trained(run: RunDir, name: str, *, batch: int, noise: bool = True, factor: float = 1.0) -> None:
    rows = [
        {"kind": "noise", "samples": 1, "epoch": epoch, "batch": batch, "stats": stats(factor * value).model_dump()}
        for epoch, value in NOISES.items()
    ]
    make_runs.add_training(run, rows=rows, signature=name)
    task = run.get_training(name).read_newest_task()
    assert task is not None
    job = make_runs.spec(
        train={**task.spec.train.model_dump(exclude_unset=True), "diagnostics": ["gradient_noise"] if noise else []}
    )
    run.write_task(task.model_copy(update={"spec": job}))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, make_runs.spec())


@pytest.mark.parametrize(("epochs", "at"), [(20, 2), (10, 1), (200, 10), (16, 2)])
def test_the_noise_after_a_tenth_of_the_epochs_counts(run: RunDir, epochs: int, at: int) -> None:
    trained(run, "a" * 8, batch=64)
    noise_near_tenth = find_noise_near_tenth(list_trainings_with_noise(run), reference=64, epochs=epochs)
    assert noise_near_tenth is not None and (noise_near_tenth.epoch, noise_near_tenth.scale) == (
        at,
        pytest.approx(NOISES[at]),
    )


def test_a_training_at_the_reference_batch_goes_before_others(run: RunDir) -> None:
    trained(run, "a" * 8, batch=512, factor=5.0)
    assert find_noise_near_tenth(list_trainings_with_noise(run), reference=64, epochs=20).scale == pytest.approx(1500)
    trained(run, "b" * 8, batch=64)
    assert find_noise_near_tenth(list_trainings_with_noise(run), reference=64, epochs=20).scale == pytest.approx(300)


def test_trainings_that_measure_none_tell_none(run: RunDir) -> None:
    trained(run, "a" * 8, batch=64, noise=False)
    assert list_trainings_with_noise(run) == []
    assert find_noise_near_tenth([], reference=64, epochs=20) is None


def test_what_trainings_have_logged_is_read_once(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(run, "a" * 8, batch=64)
    trained(run, "b" * 8, batch=128, noise=False)
    for probe in make_probes(Truth(), {1: (32, 128), 2: (32,)}):
        run.write_result(probe)
    read: list[Path] = []

    def counted(path: Path, **named: Any) -> Iterator[dict[str, Any]]:
        read.append(path)
        return read_json_lines(path, **named)

    monkeypatch.setattr(training_run, "read_json_lines", counted)
    for objective in ("accuracy-time", "time"):
        recommend.recommend_configuration(open_runs_of_job(run), Query(objective=objective), now=1.0)  # type: ignore[arg-type]
    assert sorted(read) == [run.get_training(name * 8).metrics_path for name in "ab"]
    trained(run, "a" * 8, batch=64, factor=2.0)
    assert find_noise_near_tenth(list_trainings_with_noise(run), reference=64, epochs=20).scale == pytest.approx(600)


# --- stages from it


def noisy_run(tmp_path: Path, **train: object) -> RunDir:
    settings = {"method": "lrs", "epochs": 20, "reference_batch": 64, "ramp": "noise", **train}
    return RunDir.create(tmp_path, make_runs.spec(train=settings, search={"nodes": [1, 2], "min_batch": 32}))


def plan(run: RunDir, **named: object) -> TrainPlan:
    return train.plan_training(open_run(run), **{"inspect": lambda _: make_inspection(), **named})  # type: ignore[arg-type]


def test_the_noise_over_a_training_is_of_its_probes_and_of_each_epoch_measured(tmp_path: Path) -> None:
    run = noisy_run(tmp_path)
    assert make_noise_path([run], run.read_spec(), []) is None
    probes = add_gradient_noise(make_probes(Truth(), {2: (8, 16)}), 50.0)
    start = make_noise_path([run], run.read_spec(), probes)
    assert start is not None and start.points == ((0.0, pytest.approx(50, rel=0.1)),)
    trained(run, "a" * 8, batch=512, factor=5.0)
    trained(run, "b" * 8, batch=64)
    noise_path = make_noise_path([run], run.read_spec(), probes)
    assert noise_path is not None and noise_path.points[1:] == tuple(
        (at, pytest.approx(NOISES[at])) for at in (1, 2, 10)
    )
    other = run.read_spec().model_copy(update={"train": run.read_spec().train.model_copy(update={"ramp": "auto"})})
    assert make_noise_path([run], other, probes) is None


def test_a_training_begins_with_its_stages_in_the_task(tmp_path: Path) -> None:
    run = noisy_run(tmp_path)
    with pytest.raises(BadMeasurements, match="needs the gradient noise scale") as refused:
        plan(run, nodes=2, batch=512)
    assert "train once with train.diagnostics: [gradient_noise]" in refused.value.hint
    trained(run, "b" * 8, batch=64)
    task = plan(run, nodes=2, batch=512).task
    assert [stage.batch for stage in task.stages] == [64, 128, 256, 512]
    assert all(stage.noise and stage.noise >= stage.batch * 0.99 for stage in task.stages[1:])
    assert [stage.epoch for stage in task.stages] == [
        stage.begin / make_inspection().dataset_size for stage in task.stages
    ]
    run.write_task(task)
    trained(run, "c" * 8, batch=64, factor=9.0)
    assert plan(run, nodes=2, batch=512).task.stages == task.stages, "one that has begun keeps its own"


def test_other_rules_leave_their_stages_in_the_task_too(tmp_path: Path) -> None:
    run = noisy_run(tmp_path, ramp="auto")
    assert [stage.batch for stage in plan(run, nodes=2, batch=256).task.stages] == [64, 128, 256]
    plain = noisy_run(tmp_path / "plain", ramp=None)
    assert plan(plain, nodes=2, batch=256).task.stages == ()


def test_a_recommendation_tells_the_stages_of_its_choice(tmp_path: Path) -> None:
    run = noisy_run(tmp_path)
    for result in add_gradient_noise(make_probes(Truth(dataset_size=12_800), {2: (32, 256), 4: (32, 256)}), 50.0):
        run.write_result(result)
    trained(run, "b" * 8, batch=64)
    recommendation = recommend.recommend_configuration(
        open_runs_of_job(run), Query(objective="time"), now=1.0
    ).recommendation
    assert recommendation.stages[-1].batch == recommendation.choice.batch and recommendation.stages[0].batch == 64
    assert recommendation.ramp.startswith("batch 64 from epoch 0: noise scale 50.0; batch 128 from epoch ")
    assert [stage.batch for stage in recommendation.choice.stages] == [
        stage.batch for stage in recommendation.stages[:-1]
    ]
    assert f"stages: {recommendation.ramp}" in list(_explain_progress_stages_and_checkpoints(recommendation))
