"""The learning rate over fractional epochs."""

import pytest

from tula_cli.spec.job import JobSpec, warmup_epochs
from tula_cli.worker.train.learning_rate import WARMUP_START, learning_rate


def spec(*, method: str = "lbt", epochs: int = 20, lr_scaling: str = "auto", **schedule) -> JobSpec:
    return JobSpec.model_validate(
        {
            "model": {"name": "small_cnn"},
            "dataset": {"name": "digits"},
            "optimizer": {"lr": 0.1},
            "schedule": schedule,
            "train": {"epochs": epochs, "method": method, "reference_batch": 128, "lr_scaling": lr_scaling},
        }
    )


@pytest.mark.parametrize("epoch", [0, 0.5, 19.99])
def test_constant_stays(epoch):
    assert learning_rate(spec(), epoch, 128) == 0.1


@pytest.mark.parametrize(("epoch", "lr"), [(0, 0.1), (4.99, 0.1), (5, 0.02), (9.5, 0.02), (10, 0.004), (19, 0.004)])
def test_multistep_falls_at_its_milestones(epoch, lr):
    job = spec(kind="multistep", milestones=[5, 10], gamma=0.2)
    assert learning_rate(job, epoch, 128) == pytest.approx(lr)


def test_cosine_ends_at_the_minimum():
    job = spec(kind="cosine", min_lr=0.01)
    assert learning_rate(job, 0, 128) == pytest.approx(0.1)
    assert learning_rate(job, 10, 128) == pytest.approx(0.055)
    assert learning_rate(job, 20, 128) == pytest.approx(0.01)
    assert learning_rate(job, 20.5, 128) == pytest.approx(0.01)


def test_cosine_starts_where_the_warm_up_ends():
    job = spec(kind="cosine", warmup_epochs=4)
    assert learning_rate(job, 4, 128) == pytest.approx(0.1)
    assert learning_rate(job, 12, 128) == pytest.approx(0.05)


def test_cosine_with_warm_up_to_the_end_stays_finite():
    job = spec(kind="cosine", warmup_epochs=30)
    assert learning_rate(job, 20, 128) < 0.1


@pytest.mark.parametrize("kind", ["constant", "multistep", "cosine"])
def test_warm_up_grows_linearly_from_its_start(kind):
    milestones = {"milestones": [15]} if kind == "multistep" else {}
    job = spec(kind=kind, warmup_epochs=2, **milestones)
    assert learning_rate(job, 0, 128) == pytest.approx(0.1 * WARMUP_START)
    assert learning_rate(job, 1, 128) == pytest.approx(0.1 * (1 + WARMUP_START) / 2)
    assert learning_rate(job, 2, 128) == pytest.approx(0.1)


def test_milestone_inside_the_warm_up_counts():
    job = spec(kind="multistep", milestones=[1], gamma=0.1, warmup_epochs=2)
    assert learning_rate(job, 2, 128) == pytest.approx(0.01)


@pytest.mark.parametrize("method", ["ags", "lbt", "polo", "adascale", "static"])
@pytest.mark.parametrize("batch", [32, 128, 4096])
def test_large_batch_leaves_the_learning_rate(method, batch):
    assert learning_rate(spec(method=method), 10, batch) == 0.1


@pytest.mark.parametrize("method", ["lrs", "lars"])
@pytest.mark.parametrize(("batch", "lr"), [(32, 0.025), (128, 0.1), (1024, 0.8)])
def test_linear_scaling_multiplies_by_the_batch(method, batch, lr):
    assert learning_rate(spec(method=method), 10, batch) == pytest.approx(lr)


@pytest.mark.parametrize(("batch", "lr"), [(32, 0.05), (128, 0.1), (512, 0.2)])
def test_lamb_scales_by_the_square_root(batch, lr):
    assert learning_rate(spec(method="lamb"), 10, batch) == pytest.approx(lr)


@pytest.mark.parametrize("method", ["lbt", "lrs", "lars", "lamb", "polo", "ags", "static"])
def test_a_rule_that_is_given_wins_over_the_methods_own(method):
    assert learning_rate(spec(method=method, lr_scaling="sqrt"), 10, 512) == pytest.approx(0.2)
    assert learning_rate(spec(method=method, lr_scaling="linear"), 10, 512) == pytest.approx(0.4)


@pytest.mark.parametrize(("method", "rule"), [("lrs", "none"), ("adascale", "linear"), ("adascale", "sqrt")])
def test_a_rule_that_undoes_the_method_is_refused(method, rule):
    with pytest.raises(ValueError, match=f"method {method}"):
        spec(method=method, lr_scaling=rule)


@pytest.mark.parametrize(
    ("method", "epochs"),
    [("lars", 5), ("lamb", 5), ("polo", 5), ("ortho", 5), ("adascale", 0), ("ags", 0), ("static", 0)],
)
def test_methods_warm_up_by_themselves_unless_told(method, epochs):
    assert warmup_epochs(spec(method=method)) == epochs
    assert warmup_epochs(spec(method=method, warmup_epochs=0)) == 0
    assert warmup_epochs(spec(method=method, warmup_epochs=2.5)) == 2.5


def test_linear_scaling_warms_up_for_five_epochs_by_itself():
    job = spec(method="lrs")
    assert learning_rate(job, 0, 1024) == pytest.approx(0.1), "from the reference batch's rate"
    assert learning_rate(job, 2.5, 1024) == pytest.approx(0.45)
    assert learning_rate(job, 0, 64) == pytest.approx(0.05 * WARMUP_START), "nothing was scaled up"
    assert learning_rate(job, 4.999, 1024) < 0.8
    assert learning_rate(job, 5, 1024) == pytest.approx(0.8)


def test_linear_scaling_keeps_a_warm_up_that_is_given():
    assert learning_rate(spec(method="lrs", warmup_epochs=1), 1, 1024) == pytest.approx(0.8)


def test_batch_changes_nothing_but_the_factor_of_linear_scaling():
    job = spec(kind="cosine", warmup_epochs=3, method="lrs")
    for epoch in (3, 11.3, 20):
        assert learning_rate(job, epoch, 512) == pytest.approx(4 * learning_rate(job, epoch, 128))
