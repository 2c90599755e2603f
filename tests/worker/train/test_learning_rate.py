"""The learning rate over fractional epochs."""

import pytest
import torch
from pydantic import ValidationError

from tula_cli.errors import JobFailed
from tula_cli.spec.job import JobSpec
from tula_cli.spec.schedules import WARMUP_START
from tula_cli.worker.train.learning_rate import compute_learning_rate


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
    assert compute_learning_rate(spec(), epoch, 128) == 0.1


@pytest.mark.parametrize(("epoch", "lr"), [(0, 0.1), (4.99, 0.1), (5, 0.02), (9.5, 0.02), (10, 0.004), (19, 0.004)])
def test_multistep_falls_at_its_milestones(epoch, lr):
    job = spec(kind="multistep", milestones=[5, 10], gamma=0.2)
    assert compute_learning_rate(job, epoch, 128) == pytest.approx(lr)


def test_cosine_ends_at_the_minimum():
    job = spec(kind="cosine", min_lr=0.01)
    assert compute_learning_rate(job, 0, 128) == pytest.approx(0.1)
    assert compute_learning_rate(job, 10, 128) == pytest.approx(0.055)
    assert compute_learning_rate(job, 20, 128) == pytest.approx(0.01)
    assert compute_learning_rate(job, 20.5, 128) == pytest.approx(0.01)


def test_cosine_starts_where_the_warm_up_ends():
    job = spec(kind="cosine", warmup_epochs=4)
    assert compute_learning_rate(job, 4, 128) == pytest.approx(0.1)
    assert compute_learning_rate(job, 12, 128) == pytest.approx(0.05)


def test_cosine_with_warm_up_to_the_end_stays_finite():
    job = spec(kind="cosine", warmup_epochs=30)
    assert compute_learning_rate(job, 20, 128) < 0.1


@pytest.mark.parametrize("kind", ["constant", "multistep", "cosine"])
def test_warm_up_grows_linearly_from_its_start(kind):
    milestones = {"milestones": [15]} if kind == "multistep" else {}
    job = spec(kind=kind, warmup_epochs=2, **milestones)
    assert compute_learning_rate(job, 0, 128) == pytest.approx(0.1 * WARMUP_START)
    assert compute_learning_rate(job, 1, 128) == pytest.approx(0.1 * (1 + WARMUP_START) / 2)
    assert compute_learning_rate(job, 2, 128) == pytest.approx(0.1)


def test_milestone_inside_the_warm_up_counts():
    job = spec(kind="multistep", milestones=[1], gamma=0.1, warmup_epochs=2)
    assert compute_learning_rate(job, 2, 128) == pytest.approx(0.01)


@pytest.mark.parametrize("method", ["ags", "lbt", "polo", "static"])
@pytest.mark.parametrize("batch", [32, 128, 4096])
def test_large_batch_leaves_the_learning_rate(method, batch):
    assert compute_learning_rate(spec(method=method), 10, batch) == 0.1


@pytest.mark.parametrize("method", ["lrs", "lars"])
@pytest.mark.parametrize(("batch", "lr"), [(32, 0.025), (128, 0.1), (1024, 0.8)])
def test_linear_scaling_multiplies_by_the_batch(method, batch, lr):
    assert compute_learning_rate(spec(method=method), 10, batch) == pytest.approx(lr)


@pytest.mark.parametrize(("batch", "lr"), [(32, 0.05), (128, 0.1), (512, 0.2)])
def test_lamb_scales_by_the_square_root(batch, lr):
    assert compute_learning_rate(spec(method="lamb"), 10, batch) == pytest.approx(lr)


@pytest.mark.parametrize("method", ["lbt", "lrs", "lars", "lamb", "polo", "ags", "static"])
def test_a_rule_that_is_given_wins_over_the_methods_own(method):
    assert compute_learning_rate(spec(method=method, lr_scaling="sqrt"), 10, 512) == pytest.approx(0.2)
    assert compute_learning_rate(spec(method=method, lr_scaling="linear"), 10, 512) == pytest.approx(0.4)


def test_a_rule_that_undoes_the_method_is_refused():
    with pytest.raises(ValueError, match="method: lrs"):
        spec(method="lrs", lr_scaling="none")


@pytest.mark.parametrize(
    ("method", "epochs"),
    [("lars", 5), ("lamb", 5), ("polo", 5), ("ortho", 5), ("ags", 0), ("static", 0)],
)
def test_methods_warm_up_by_themselves_unless_told(method, epochs):
    job = spec(method=method)
    for length, expected in ((1000, epochs), (100, epochs), (60, 0.6 * epochs), (4, 0.04 * epochs), (1, 0.01 * epochs)):
        train = job.train.model_copy(update={"epochs": length})
        assert job.model_copy(update={"train": train}).workload.warmup_epochs == pytest.approx(expected)
    assert spec(method=method, warmup_epochs=0).workload.warmup_epochs == 0
    assert spec(method=method, warmup_epochs=2.5).workload.warmup_epochs == 2.5


def test_linear_scaling_warms_up_for_five_epochs_of_a_hundred_by_itself():
    job = spec(method="lrs")
    job = job.model_copy(update={"train": job.train.model_copy(update={"epochs": 100})})
    assert compute_learning_rate(job, 0, 1024) == pytest.approx(0.1), "from the reference batch's rate"
    assert compute_learning_rate(job, 2.5, 1024) == pytest.approx(0.45)
    assert compute_learning_rate(job, 0, 64) == pytest.approx(0.05 * WARMUP_START), "nothing was scaled up"
    assert compute_learning_rate(job, 4.999, 1024) < 0.8
    assert compute_learning_rate(job, 5, 1024) == pytest.approx(0.8)


def test_linear_scaling_keeps_a_warm_up_that_is_given():
    assert compute_learning_rate(spec(method="lrs", warmup_epochs=1), 1, 1024) == pytest.approx(0.8)


def test_batch_changes_nothing_but_the_factor_of_linear_scaling():
    job = spec(kind="cosine", warmup_epochs=3, method="lrs")
    for epoch in (3, 11.3, 20):
        assert compute_learning_rate(job, epoch, 512) == pytest.approx(4 * compute_learning_rate(job, epoch, 128))


# --- linear, one-cycle, and of the user's own


@pytest.mark.parametrize(("epoch", "lr"), [(0, 0.01), (2, 0.1), (11, 0.06), (20, 0.02), (21, 0.02)])
def test_linear_falls_from_the_end_of_the_warm_up_to_the_minimum(epoch, lr):
    job = spec(kind="linear", warmup_epochs=2, min_lr=0.02)
    assert compute_learning_rate(job, epoch, 128) == pytest.approx(0.1 * WARMUP_START if epoch == 0 else lr)


@pytest.mark.parametrize(("epoch", "lr"), [(2, 0.1), (14, 0.1), (17, 0.05), (20, 0), (21, 0)])
def test_linear_is_constant_up_to_where_it_is_reported_to_fall(epoch, lr):
    assert compute_learning_rate(spec(kind="linear", warmup_epochs=2, decay_from=0.7), epoch, 128) == pytest.approx(lr)
    assert compute_learning_rate(spec(kind="linear", warmup_epochs=17, decay_from=0.7), 17, 128) == pytest.approx(0.1)


@pytest.mark.parametrize(("kind", "value"), [("cosine", 0.7), ("constant", 0.7), ("linear", 1.0), ("linear", -0.1)])
def test_a_share_to_fall_from_is_of_linear_and_below_the_whole(kind, value):
    with pytest.raises(ValueError, match="decay_from"):
        spec(kind=kind, decay_from=value)


@pytest.mark.parametrize(("epoch", "lr"), [(0, 0.004), (3, 0.052), (6, 0.1), (13, 0.05), (20, 0), (20.5, 0)])
def test_one_cycle_grows_to_its_peak_and_falls(epoch, lr):
    assert compute_learning_rate(spec(kind="one-cycle"), epoch, 128) == pytest.approx(lr)


def test_one_cycle_has_a_warm_up_of_its_own():
    assert spec(kind="one-cycle", method="lrs").workload.warmup_epochs == 0
    assert compute_learning_rate(spec(kind="one-cycle", method="lrs"), 6, 256) == pytest.approx(0.2)


def halves(epoch: float) -> float:
    return 0.5 ** (epoch / 2)


class Falls:
    def __init__(self, epochs: int) -> None:
        self.epochs, self.to = epochs, 0.5

    def __call__(self, epoch: float) -> float:
        return 1 - (1 - self.to) * epoch / self.epochs


def test_a_schedule_of_the_users_own_is_a_factor_under_warm_up_and_scaling():
    job = spec(kind=f"{__name__}:halves", warmup_epochs=1, lr_scaling="linear")
    assert compute_learning_rate(job, 4, 256) == pytest.approx(0.2 / 4)
    assert compute_learning_rate(job, 0, 128) == pytest.approx(0.1 * WARMUP_START)
    assert compute_learning_rate(spec(kind=f"{__name__}:Falls"), 10, 128) == pytest.approx(0.075)


def test_a_schedule_of_the_users_own_follows_torchs_lambda_lr():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    theirs = torch.optim.lr_scheduler.LambdaLR(optimizer, halves)
    for epoch in range(5):
        assert compute_learning_rate(spec(kind=f"{__name__}:halves"), epoch, 128) == pytest.approx(
            theirs.get_last_lr()[0]
        )
        optimizer.step()
        theirs.step()


def no_number(epoch: float) -> float:
    return float("nan")


def fails(epoch: float) -> float:
    raise ZeroDivisionError("here")


@pytest.mark.parametrize(
    ("name", "why"), [("no_number", "returns nan at epoch 3"), ("fails", "at epoch 3: ZeroDivisionError: here")]
)
def test_a_schedule_that_gives_no_factor_is_reported(name, why):
    with pytest.raises(JobFailed, match=why):
        compute_learning_rate(spec(kind=f"{__name__}:{name}"), 3, 128)


@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        ({"kind": "cosin"}, "did you mean cosine"),
        ({"kind": "zzz"}, "use constant, multistep, cosine, linear, one-cycle"),
        ({"kind": "one-cycle", "warmup_epochs": 2}, "one-cycle, which has a warm-up itself"),
    ],
)
def test_settings_that_mean_nothing_are_refused(schedule, why):
    with pytest.raises(ValidationError, match=why):
        spec(**schedule)
