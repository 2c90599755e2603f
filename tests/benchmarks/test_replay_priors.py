"""Priors found without an app and judged on it (benchmarks/replay/replay_priors.py)."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import replay_priors
from replay_data import MeasuredSet, Where, load_sets
from replay_priors import Posterior, derive_priors, leave_one_out, mean_score, refine_priors, score_sets

from tula_cli.models.time.step_model import PRIORS
from tula_cli.models.time.step_time import Observation

TABLE = Path(__file__).parents[1] / "fixtures" / "step_times.csv"


def posterior(level: float, *, variance: float = 0.0, noise: float = 1.0, compute: float = 1.0) -> Posterior:
    means = PRIORS.means.copy()
    means[2] = level
    return Posterior(means, np.full(len(means), variance), np.full(4, compute), np.ones(3), noise)


def test_a_prior_is_what_other_apps_show() -> None:
    result = refine_priors(PRIORS, [posterior(-3.0), posterior(-1.0), posterior(1.0)], ["a", "a", "b"])
    assert result.level.mean == pytest.approx((-2 + 1) / 2), "each app counts once"
    # Sets of one app: (1 + 0) / 2; apps: 4.5, of a further one half as much again.
    assert result.level.sd == pytest.approx(math.sqrt(0.5 + 4.5 * 1.5))
    assert result.growth.sd == pytest.approx(0.0)


def test_what_posteriors_leave_open_widens_the_prior() -> None:
    assert refine_priors(PRIORS, [posterior(-1.0, variance=0.25)] * 2, ["a", "b"]).level.sd == pytest.approx(0.5)


def test_noise_and_residuals_take_their_measured_size() -> None:
    result = refine_priors(
        PRIORS, [posterior(0.0, noise=1.0, compute=4.0), posterior(0.0, noise=7.0, compute=4.0)], ["a", "b"]
    )
    assert result.step_noise == pytest.approx(5 * PRIORS.step_noise)
    assert result.sync_noise / result.step_noise == pytest.approx(PRIORS.sync_noise / PRIORS.step_noise)
    assert result.compute.sd == pytest.approx(2 * PRIORS.compute.sd) and result.compute.length == PRIORS.compute.length
    assert result.sync == PRIORS.sync


def simulated(app: str, *, sync: float, cluster: str = "c") -> MeasuredSet:
    """A job whose synchronisation takes `sync` times the compute of its smallest batch."""
    truth, batches = {}, {}
    for nodes in (1, 2, 4, 8):
        for batch in (16, 24, 32, 48, 64, 128):
            compute = 0.001 * (batch + 16)
            wait = 0.032 * sync * (nodes > 1) * (nodes / 2) ** 0.3
            step = compute / 3 + max(2 / 3 * compute, wait) + 0.1 * wait
            place = Where(nodes, 1, batch)
            truth[place] = Observation(nodes, 1, batch, (step,), compute)
            if batch not in (24, 48):
                batches[place] = batch * nodes
    return MeasuredSet(cluster, app, "one GPU a node", 1, "ok", truth, batches)


def test_priors_are_found_from_a_vague_start() -> None:
    little = derive_priors([simulated("a", sync=0.3), simulated("b", sync=0.4)], turns=6)
    much = derive_priors([simulated("a", sync=3.0), simulated("b", sync=4.0)], turns=6)
    assert much.level.mean - little.level.mean == pytest.approx(math.log(10), abs=0.8)
    assert little.step_noise < replay_priors.VAGUE.step_noise


def test_priors_of_alike_jobs_predict_from_few_probes() -> None:
    alike = [simulated(app, sync=2.5) for app in "abc"]
    other = [simulated("d", sync=2.5)]
    wrong = replace(PRIORS, level=replace(PRIORS.level, mean=-5.0, sd=0.3))
    result, off = (
        mean_score(score_sets(other, "partial", priors).values()).median
        for priors in (derive_priors(alike, turns=6), wrong)
    )
    assert result < 0.3 * off


def test_what_is_left_out_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []

    def record(sets: list[MeasuredSet], *, turns: int) -> object:
        seen.append({each.app for each in sets})
        return PRIORS

    monkeypatch.setattr(replay_priors, "derive_priors", record)
    monkeypatch.setattr(replay_priors, "STRATEGIES", ("partial",))
    sets = [simulated(app, sync=1.0) for app in "abc"]
    result = leave_one_out(sets, lambda each: each.app, "app", turns=1)
    assert seen == [{"a", "b", "c"}, {"b", "c"}, {"a", "c"}, {"a", "b"}]
    assert [row.left_out for row in result] == ["app a", "app b", "app c", "each app once"]
    assert [row.sets for row in result] == [1, 1, 1, 3]
    assert result[-1].without == result[-1].shipped


def test_a_table_of_one_app_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = TABLE.read_text().splitlines()
    app = load_sets(TABLE)[0].app
    (tmp_path / "t.csv").write_text("\n".join([lines[0], *(line for line in lines[1:] if f",{app}," in line)]))
    monkeypatch.setattr("sys.argv", ["replay_priors.py", str(tmp_path / "t.csv")])
    with pytest.raises(SystemExit, match="fewer than two apps"):
        replay_priors.main()
