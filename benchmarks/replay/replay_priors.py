"""Derive priors without one app or one cluster, and evaluate the step-time model on it.

    python benchmarks/replay/replay_priors.py TABLE.csv... [--json] [--turns 8]

The priors of the step-time model come from measurements (`tula_cli.models.time.step_model.PRIORS`), so errors on the same measurements
are too small. Here they are derived again by expectation maximisation (empirical Bayes) from a vague start and without using
prediction errors: each set is fitted to all its measurements; the parameters of all sets give the new priors their means and spreads,
and so on. Sets of one app are similar, so the spread for another app is derived from the differences of apps. (The parameters of the
shapes of the curves, p, q and the lengths of the residuals, are not changed: four numbers.) Each app, then each cluster, is left out
once, and the model is evaluated on it as in replay.py: it sees only the probes and predicts all other step times.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from replay_baselines import make_product_model
from replay_data import MeasuredSet, load_sets
from replay_score import score_set

from tula_cli.models.time import step_time
from tula_cli.models.time.step_model import PARAMETERS, PRIORS, Prior, Priors, SmoothResidual, StepModel

Floats = NDArray[np.float64]

STRATEGIES = ("partial", "sweep", "full")

VAGUE = replace(
    PRIORS,
    slope=Prior(0.0, 3.0),
    floor=Prior(0.0, 2.5),
    level=Prior(-1.0, 2.5),
    growth=Prior(0.0, 1.0),
    log_sync_within_node=Prior(-1.0, 1.5),
    forward=Prior(-0.7, 1.0),  # a third of the compute, the usual share of the forward pass
    exposed=Prior(-2.0, 1.5),
    compute=replace(PRIORS.compute, sd=0.1, white=0.1),
    sync=replace(PRIORS.sync, sd=0.3, white=0.3),
    step_noise=0.05,
    compute_noise=0.05,
    sync_noise=0.05,
)
"""Start of the expectation maximisation."""


@dataclass(frozen=True)
class Posterior:
    """The posterior after the probes, as far as it is used to derive priors for other jobs."""

    means: Floats  # of the parameters, in the order of Priors.parameters
    variances: Floats
    compute: Floats  # expected squares of the residual's whitened coordinates: 1 if it is as large as its prior
    sync: Floats
    noise: float  # relative to that of the priors

    @classmethod
    def of(cls, model: StepModel) -> "Posterior":
        """Return the posterior of the most probable member."""
        fit = model.members[int(np.argmax(model.weights))]
        priors, z, variances = fit.frame.priors, fit.fitted.z, np.diag(fit.fitted.covariance)
        compute, sync = np.split((z**2 + variances)[PARAMETERS:], [len(fit.frame.u.positions)])
        return cls(
            means=priors.means + priors.sds * z[:PARAMETERS],
            variances=priors.sds**2 * variances[:PARAMETERS],
            compute=compute,
            sync=sync,
            noise=fit.noise,
        )


def derive_priors(sets: Sequence[MeasuredSet], *, turns: int) -> Priors:
    """Return the priors derived from the sets by `turns` iterations of expectation maximisation from VAGUE."""
    priors = VAGUE
    for _ in range(turns):
        fits = [step_time.fit_step_time(list(s.truth.values()), collective=s.collective, priors=priors) for s in sets]
        priors = refine_priors(priors, [Posterior.of(fit.model) for fit in fits], [each.app for each in sets])
    return priors


def refine_priors(priors: Priors, posteriors: Sequence[Posterior], apps: Sequence[str]) -> Priors:
    """Return the priors for a job of another app, derived from many jobs (the M step).

    Residuals keep the shares of their smooth and rough parts, and noises their ratios.
    """
    expected_value = _make_prior(
        np.array([result.means for result in posteriors]), np.array([found.variances for found in posteriors]), apps
    )
    noise = math.sqrt(float(np.mean([outcome.noise**2 for outcome in posteriors])))
    return replace(
        priors,
        slope=expected_value[0],
        floor=expected_value[1],
        level=expected_value[2],
        growth=expected_value[3],
        log_sync_within_node=expected_value[4],
        forward=expected_value[5],
        exposed=expected_value[6],
        compute=_scale_residual(priors.compute, [value.compute for value in posteriors]),
        sync=_scale_residual(priors.sync, [posterior.sync for posterior in posteriors]),
        step_noise=noise * priors.step_noise,
        compute_noise=noise * priors.compute_noise,
        sync_noise=noise * priors.sync_noise,
    )


def _make_prior(means: Floats, variances: Floats, apps: Sequence[str]) -> list[Prior]:
    """Return the prior for a set of another app, from posteriors of shape (sets, parameters).

    Its variance is the sum of the variances of the sets' posteriors, of sets of one app, and of apps; another app differs from their mean
    by the deviation of one app and that of the mean.
    """
    names = sorted(set(apps))
    members = [np.array([app == name for app in apps]) for name in names]
    centres = np.array([means[value].mean(axis=0) for value in members])
    inside = np.mean([means[member].var(axis=0) for member in members], axis=0)
    between = centres.var(axis=0, ddof=1) * (1 + 1 / len(names)) if len(names) > 1 else 0.0
    sds = np.sqrt(variances.mean(axis=0) + inside + between)
    return [Prior(float(mean), float(sd)) for mean, sd in zip(centres.mean(axis=0), sds, strict=True)]


def _scale_residual(residual: SmoothResidual, squares: Iterable[Floats]) -> SmoothResidual:
    scale = math.sqrt(float(np.mean(np.concatenate(list(squares)))))
    return replace(residual, sd=scale * residual.sd, white=scale * residual.white)


@dataclass(frozen=True)
class PriorScore:
    """Means over sets, as shares."""

    median: float
    p90: float
    covered: float  # by the 90 % interval


def score_sets(sets: Sequence[MeasuredSet], strategy: str, priors: Priors) -> dict[str, PriorScore]:
    """Return the errors of each set by its name."""
    scores = {each.name: score_set(each, strategy, make_product_model(priors)) for each in sets}
    return {
        name: PriorScore(result.median, result.p90, float(np.mean(result.covered)) if result.covered else math.nan)
        for name, result in scores.items()
    }


def mean_score(result: Iterable[PriorScore]) -> PriorScore:
    rows = list(result)
    return PriorScore(
        *(float(np.nanmean([getattr(row, name) for row in rows])) for name in ("median", "p90", "covered"))
    )


@dataclass(frozen=True)
class Row:
    """One app or cluster: errors with the current priors, with priors derived from all sets, and with those derived without it."""

    left_out: str
    sets: int
    strategy: str
    shipped: PriorScore
    same: PriorScore
    without: PriorScore


def leave_one_out(sets: Sequence[MeasuredSet], of: Callable[[MeasuredSet], str], kind: str, *, turns: int) -> list[Row]:
    """Leave out each value of `of` once; the last rows are means over all sets."""
    everywhere = derive_priors(sets, turns=turns)
    made: dict[str, list[Row]] = {name: [] for name in STRATEGIES}
    by_set: dict[str, list[tuple[PriorScore, PriorScore, PriorScore]]] = {name: [] for name in STRATEGIES}
    for value in sorted({of(each) for each in sets}):
        inside = [each for each in sets if of(each) == value]
        elsewhere = derive_priors([each for each in sets if of(each) != value], turns=turns)
        for strategy in STRATEGIES:
            columns = [score_sets(inside, strategy, priors) for priors in (PRIORS, everywhere, elsewhere)]
            by_set[strategy] += zip(*(column.values() for column in columns), strict=True)
            made[strategy].append(
                Row(f"{kind} {value}", len(inside), strategy, *(mean_score(c.values()) for c in columns))
            )
    for strategy, result in by_set.items():
        together = [mean_score(column) for column in zip(*result, strict=True)]
        made[strategy].append(Row(f"each {kind} once", len(sets), strategy, *together))
    return [row for strategy in STRATEGIES for row in made[strategy]]


def format_row(row: Row) -> str:
    cells = "".join(
        f"   {100 * j.median:5.1f} / {100 * j.p90:4.1f} %, {100 * j.covered:3.0f} %"
        for j in (row.shipped, row.same, row.without)
    )
    return f"{row.strategy:8} {row.left_out:22} {row.sets:4}{cells}"


HEAD = (
    f"{'':36}   priors of the product     found on all sets         found without it\n"
    f"{'strategy':8} {'left out':22} sets" + "   median /  p90, covered" * 3
)


def main() -> None:
    arguments = _parse_arguments()
    try:
        sets = load_sets(*arguments.tables)
        if len({each.app for each in sets}) < 2:
            raise ValueError("the tables hold sets of fewer than two apps: none can be left out")
    except (OSError, ValueError) as error:
        sys.exit(f"replay_priors.py: {error}")
    result = leave_one_out(sets, lambda each: each.app, "app", turns=arguments.turns)
    if len({each.cluster for each in sets}) > 1:
        result += leave_one_out(sets, lambda each: each.cluster, "cluster", turns=arguments.turns)
    if arguments.json:
        everywhere = derive_priors(sets, turns=arguments.turns)
        print(json.dumps({"rows": [asdict(row) for row in result], "found_on_all": asdict(everywhere)}, indent=1))
        return
    print(HEAD, *map(format_row, result), sep="\n")
    print(f"\nfound on all sets: {derive_priors(sets, turns=arguments.turns)}")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE.csv")
    parser.add_argument("--json", action="store_true", help="print the same numbers, and the priors found, as JSON")
    parser.add_argument("--turns", type=int, default=8, help="of expectation maximisation")
    return parser.parse_args()


if __name__ == "__main__":
    main()
