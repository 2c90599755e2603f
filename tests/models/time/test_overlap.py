import numpy as np
import pytest
from statsmodels.regression.linear_model import OLS

from tula_cli.models.time import step_model
from tula_cli.models.time.step_model import PRIORS, SHAPES, ConfigurationPoints, OverlapFit

Floats = step_model.Floats
BATCHES = (16, 32, 64, 128, 256)


def points(nodes: list[int], local_batch: list[int], *, gpus: int = 1) -> ConfigurationPoints:
    count = np.array(nodes, dtype=float)
    alone = count * gpus == 1
    return ConfigurationPoints(count, np.array(local_batch, dtype=float), alone, (count == 1) & ~alone)


def grid(nodes: tuple[int, ...], batches: tuple[int, ...] = BATCHES, *, gpus: int = 1) -> ConfigurationPoints:
    pairs = [(n, b) for n in nodes for b in batches]
    return points([n for n, _ in pairs], [b for _, b in pairs], gpus=gpus)


def truth(at: ConfigurationPoints, *, hidden: float = 2 / 3, sync: float = 0.1) -> tuple[Floats, Floats]:
    """A backward pass that hides a ring: step and compute."""
    compute = np.maximum(0.02, 0.001 * at.local_batch)
    traffic = np.where(at.is_single_gpu, 0.0, sync * (1 - 1 / at.replicas))
    return (1 - hidden) * compute + np.maximum(hidden * compute, traffic) + 0.05 * traffic, compute


def fit_timed(
    at: ConfigurationPoints, step: Floats, compute: Floats, spread: float = np.nan, collective: str = "ring"
) -> OverlapFit:
    timed = step_model.TimedConfigurations(at, step=step, compute=compute, spread=np.full(len(at), spread))
    return step_model.fit_overlap(timed, collective=collective, priors=PRIORS)


def fitted(
    at: ConfigurationPoints, *, noise: float = 0.0, seed: int = 0, spread: float = np.nan, collective: str = "ring"
) -> OverlapFit:
    rng = np.random.default_rng(seed)
    step, compute = truth(at)
    return fit_timed(
        at,
        step * np.exp(noise * rng.standard_normal(len(at))),
        compute * np.exp(noise * rng.standard_normal(len(at))),
        spread,
        collective,
    )


@pytest.mark.parametrize("gpus", [None, np.array([1.0, 4.0, 1.0, 2.0, 4.0])])
def test_derivatives_are_those_of_the_model(gpus: Floats | None) -> None:
    at_points = ConfigurationPoints(
        np.array([1.0, 1.0, 2.0, 4.0, 16.0]),
        np.array([16.0, 64.0, 16.0, 48.0, 256.0]),
        is_single_gpu=np.array([True, False, False, False, False]),
        is_within_node=np.array([False, True, False, False, False]),
        gpus=gpus,
    )
    frame = step_model.ReferenceFrame.from_points(at_points, truth(at_points)[1], SHAPES["ring"], step_model.PRIORS)
    at, rng, small = frame.compute_features(at_points), np.random.default_rng(3), 1e-6
    for _ in range(5):
        z = 0.7 * rng.standard_normal(frame.size)
        result = step_model.evaluate_model(z, at)
        for index in range(frame.size):
            step = np.zeros(frame.size)
            step[index] = small
            ahead, behind = step_model.evaluate_model(z + step, at), step_model.evaluate_model(z - step, at)
            by_step = (ahead.log_step - behind.log_step) / (2 * small)
            by_compute = (ahead.log_compute - behind.log_compute) / (2 * small)
            assert result.of_step[:, index] == pytest.approx(by_step, abs=2e-7)
            assert result.of_compute[:, index] == pytest.approx(by_compute, abs=2e-7)


def test_the_fit_is_the_most_probable_one() -> None:
    at_points = grid((1, 2, 8))
    rng = np.random.default_rng(0)
    step, compute = (part * np.exp(0.05 * rng.standard_normal(len(at_points))) for part in truth(at_points))
    data = step_model._FitData(
        step_model.ReferenceFrame.from_points(at_points, compute, SHAPES["ring"], step_model.PRIORS).compute_features(
            at_points
        ),
        np.log(step),
        np.log(compute),
        np.zeros(len(at_points)),
    )
    spread = data.compute_spread(step_model.evaluate_model(np.zeros(data.at.frame.size), data.at), 1.0)
    best = step_model._maximize_posterior(np.zeros(data.at.frame.size), data, spread)
    for index in range(len(best.z)):
        for away in (-0.1, 0.1):
            z = best.z + away * np.eye(len(best.z))[index]
            assert (
                step_model._LinearisedFit.from_coordinates(z, data, spread).minus_2_log_posterior
                > best.minus_2_log_posterior
            )


@pytest.mark.parametrize("nodes", [(1,), (2, 4), (1, 2, 4, 8, 16)])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_covariance_is_that_of_generalised_least_squares_by_statsmodels(
    nodes: tuple[int, ...], noise: float
) -> None:
    result = fitted(grid(nodes), noise=noise).fitted
    assert result.covariance == pytest.approx(result.regression.cov_params(), rel=1e-8, abs=1e-12)
    assert result.compute_gauss_newton_step(0.0) == pytest.approx(result.regression.params, rel=1e-8, abs=1e-10)


@pytest.mark.parametrize("damping", [1e-9, 1e-2, 10.0])
def test_a_damped_step_is_least_squares_with_rows_that_hold_each_coordinate(damping: float) -> None:
    result = fitted(grid((1, 2, 8)), noise=0.05).fitted
    whitener, size = result.spread.whitener, len(result.z)
    hold = np.diag(np.sqrt(damping * (1 + np.square(whitener @ result.jacobian).sum(axis=0))))
    rows = np.vstack([whitener @ result.jacobian, np.eye(size), hold])
    target = np.concatenate(
        [whitener @ (result.row_residuals + result.jacobian @ result.z), np.zeros(size), hold @ result.z]
    )
    assert result.compute_gauss_newton_step(damping) == pytest.approx(
        OLS(target, rows).fit().params, rel=1e-8, abs=1e-10
    )


@pytest.mark.parametrize("nodes", [(1, 2, 4, 8, 16), (2, 4, 8, 16)])
def test_a_backward_pass_that_hides_a_ring_is_found(nodes: tuple[int, ...]) -> None:
    result = fitted(grid(nodes))
    between = grid((3, 6, 12), (24, 96, 192))
    assert np.exp(result.predict(between)[0]) == pytest.approx(truth(between)[0], rel=0.09)


def test_four_corners_predict_what_lies_between() -> None:
    result = fitted(grid((2, 16), (16, 256)))
    between = grid((4, 8), (32, 64, 128))
    off = np.abs(np.exp(result.predict(between)[0]) / truth(between)[0] - 1)
    assert np.median(off) < 0.17


def test_one_gpu_has_no_synchronisation() -> None:
    result = fitted(grid((1, 2, 4)))
    step, compute, sync = result.compute_parts(points([1, 1], [20, 200]))
    assert (sync == 0).all() and step == pytest.approx(compute)


def test_one_node_of_several_gpus_has_its_own_level() -> None:
    at = grid((1, 2, 4), gpus=4)
    step, compute = truth(at)
    step = np.where(at.is_within_node, compute, step)  # nothing to see inside the node
    overlap = fit_timed(at, step, compute, spread=0.0)
    sync = overlap.compute_parts(points([1, 2], [16, 16], gpus=4))[2]
    assert sync[0] < 0.3 * sync[1]


def test_the_collective_decides_where_the_probes_do_not() -> None:
    at = grid((2, 4), (16, 32))
    far = points([64], [16])
    predicted = {name: float(np.exp(fitted(at, collective=name).predict(far)[0][0])) for name in SHAPES}
    assert predicted["parameter_server"] > 1.5 * max(predicted["ring"], predicted["tree"])


@pytest.mark.parametrize("name", SHAPES)
def test_synchronisation_grows_with_the_replicas(name: str) -> None:
    assert (np.diff(SHAPES[name](np.array([2.0, 3.0, 8.0, 64.0]))) > 0).all()


def test_noise_is_learned_from_the_residuals() -> None:
    at = grid((1, 2, 4, 8, 16))
    quiet, loud = fitted(at, noise=0.005), fitted(at, noise=0.1)
    assert quiet.noise < 0.8 < 1.3 < loud.noise
    place = points([4], [64])
    assert quiet.predict(place)[1] < loud.predict(place)[1]


def test_steps_that_spread_count_less_and_leave_more_open() -> None:
    at = grid((1, 2, 4, 8))
    place = points([4], [64])
    assert fitted(at, spread=0.3).predict(place)[1] > fitted(at, spread=0.0).predict(place)[1]


def test_ninety_per_cent_intervals_hold_nine_times_in_ten() -> None:
    rng, inside = np.random.default_rng(1), []
    between = grid((4, 8), (24, 96))
    for seed in range(60):
        mean, sd = fitted(grid((2, 4, 8, 16)), noise=0.04, seed=seed).predict(between)
        again = np.log(truth(between)[0]) + 0.04 * rng.standard_normal(len(between))
        inside.append(np.abs(again - mean) < 1.645 * sd)
    assert 0.84 <= np.mean(inside) <= 0.99


def test_the_joint_distribution_agrees_with_the_single_ones() -> None:
    result = fitted(grid((1, 2, 8), (16, 64)), noise=0.03)
    places = grid((1, 2, 4, 16), (16, 48, 300))
    mean, covariance = result.predict_jointly(places)
    alone, sd = result.predict(places)
    assert mean == pytest.approx(alone)
    assert np.diag(covariance) + result.compute_measurement_noise(places) ** 2 == pytest.approx(sd**2)
    assert np.linalg.eigvalsh(covariance).min() > -1e-9
    # Neighbours are wrong together.
    assert covariance[9, 10] / np.sqrt(covariance[9, 9] * covariance[10, 10]) > 0.3


def test_compute_that_was_not_measured_apart_is_no_obstacle() -> None:
    at = grid((1, 2, 4, 8))
    step, _ = truth(at)
    overlap = fit_timed(at, step, np.full(len(at), np.nan))
    between = points([3, 6], [100, 24])
    assert np.exp(overlap.predict(between)[0]) == pytest.approx(truth(between)[0], rel=0.1)


def literal(probes: list[tuple[int, int, float, float]]) -> OverlapFit:
    at = points([n for n, *_ in probes], [b for _, b, *_ in probes])
    step, compute = (np.array([row[column] for row in probes]) for column in (2, 3))
    return fit_timed(at, step, compute)


def test_a_fit_goes_through_probes_that_leave_room_to_go_astray() -> None:
    probes = [(2, 8, 0.13173355, np.nan), (2, 128, 0.21276504, np.nan), (16, 8, 0.12570381, np.nan)]
    at = points([n for n, *_ in probes], [b for _, b, *_ in probes])
    assert np.exp(literal(probes).predict(at)[0]) == pytest.approx([row[2] for row in probes], rel=0.05)


def test_one_probe_that_is_slow_beyond_reason_ends_in_a_fit_all_the_same() -> None:
    for factor in (50, 492, 5e3, 1e5):
        probes = [(2, 8, 0.0623 * factor, 0.026 * factor), (2, 128, 0.266, 0.266), (16, 8, 0.115, 0.026)]
        predicted, sd = literal(probes).predict(points([4], [64]))
        assert np.isfinite(predicted).all() and np.isfinite(sd).all()
