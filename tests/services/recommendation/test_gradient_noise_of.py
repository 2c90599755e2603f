"""The gradient noise that trainings have measured on their way."""

from pathlib import Path

import make_runs
import pytest

from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import GradientStats
from tula_cli.services.recommendation.gradient_noise_of import after_training, noisy_trainings

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
    task = run.training(name).newest_task()
    assert task is not None
    job = make_runs.spec(train={**task.spec.train.model_dump(exclude_unset=True), "gradient_noise": noise})
    run.write_task(task.model_copy(update={"spec": job}))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, make_runs.spec())


@pytest.mark.parametrize(("epochs", "at"), [(20, 2), (10, 1), (200, 10), (16, 2)])
def test_the_noise_after_a_tenth_of_the_epochs_counts(run: RunDir, epochs: int, at: int) -> None:
    trained(run, "a" * 8, batch=64)
    found = after_training(noisy_trainings(run), reference=64, epochs=epochs)
    assert found is not None and (found.epoch, found.scale) == (at, pytest.approx(NOISES[at]))


def test_a_training_at_the_reference_batch_goes_before_others(run: RunDir) -> None:
    trained(run, "a" * 8, batch=512, factor=5.0)
    assert after_training(noisy_trainings(run), reference=64, epochs=20).scale == pytest.approx(1500)
    trained(run, "b" * 8, batch=64)
    assert after_training(noisy_trainings(run), reference=64, epochs=20).scale == pytest.approx(300)


def test_trainings_that_measure_none_tell_none(run: RunDir) -> None:
    trained(run, "a" * 8, batch=64, noise=False)
    assert noisy_trainings(run) == []
    assert after_training([], reference=64, epochs=20) is None
