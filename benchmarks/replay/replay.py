"""Replay searches on measured step times, and report the errors of predictions for the configurations that were not probed.

    python benchmarks/replay/replay.py TABLE.csv... [--json] [--apart] [--sizes 2,4,8,16]
    python benchmarks/replay/replay.py TABLE.csv... --timing | --knee | --html FILE

Each strategy measures only its probes, each model is fitted to them, and all other step times are predicted. Errors are relative to
the measured step time: the median and the 90th percentile over the unseen configurations of a set (at the offered sizes), then the
mean over sets; the median over the candidates among them; and the median at sizes that were not offered. "-" means that no
configuration was unseen, so that there is no error. Regret is how much longer (or more expensive) the chosen configuration is than
the best; under a cap, only global batches up to the cap may be chosen, for each cap with a choice. The cost of probing is in
node-seconds relative to one job per candidate; the probes of one size share a job. Within one node, sizes and costs count GPUs.

With --repeats, a probe has the times of the first run of a configuration that was measured several times (a column `run` identifies
runs, else the order of the rows), and the reference is the median of the others, possibly of another day; without it both are the
median of all. The difference of two runs is reported if there are any: the noise floor. With --repeats, the coverage of the intervals
of measured configurations for their other runs is reported, too.
"""

import argparse
import itertools
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from replay_baselines import MODELS
from replay_data import KINDS, MeasuredSet, Where, load_sets, read_tables
from replay_score import (
    STRATEGIES,
    Score,
    choose_true_knee,
    fit_predictor,
    list_true_predictions,
    run_strategy,
    score_set,
)

from tula_cli.models.time import step_time
from tula_cli.models.time.noise import Z90

__all__ = ["load_sets", "score_set"]


@dataclass(frozen=True)
class Summary:
    """Means over sets, as shares; for regrets also the maximum. nan if no set has the value."""

    sets: int
    median: float
    p90: float
    candidates: float  # median error at candidates that were not measured
    elsewhere: float  # median error at sizes that were not offered
    fastest: float
    fastest_worst: float
    capped_fastest: float
    capped_fastest_worst: float
    cheapest: float
    cheapest_worst: float
    capped_cheapest: float
    capped_cheapest_worst: float
    knee: float
    knee_within_one: float
    knee_lost: float  # additional time compared with the true knee
    covered: float
    cost: float
    refused: int
    fit_milliseconds: float  # median

    @classmethod
    def of(cls, scores: Sequence[Score]) -> "Summary":
        knees = [score.knee for score in scores if score.knee is not None]
        fast = [score.fastest for score in scores if score.fastest is not None]
        cheap = [score.cheapest for score in scores if score.cheapest is not None]
        return cls(
            sets=len(scores),
            median=_mean(score.median for score in scores),
            p90=_mean(score.p90 for score in scores),
            candidates=_mean(float(np.median(score.candidates)) for score in scores if score.candidates),
            elsewhere=_mean(float(np.median(score.elsewhere)) for score in scores if score.elsewhere),
            fastest=_mean(regret.free for regret in fast),
            fastest_worst=_worst(regret.free for regret in fast),
            capped_fastest=_mean(_mean(regret.capped) for regret in fast),
            capped_fastest_worst=_worst(value for regret in fast for value in regret.capped),
            cheapest=_mean(regret.free for regret in cheap),
            cheapest_worst=_worst(regret.free for regret in cheap),
            capped_cheapest=_mean(_mean(regret.capped) for regret in cheap),
            capped_cheapest_worst=_worst(value for regret in cheap for value in regret.capped),
            knee=_mean(float(missed.steps == 0) for missed in knees),
            knee_within_one=_mean(float(abs(missed.steps) <= 1) for missed in knees),
            knee_lost=_mean(missed.lost for missed in knees),
            covered=_mean(_mean(map(float, score.covered)) for score in scores),
            cost=_mean(score.cost for score in scores),
            refused=sum(score.refused for score in scores),
            fit_milliseconds=float(np.median([score.fit_seconds for score in scores])) * 1e3,
        )


def _worst(values: Iterable[float]) -> float:
    return max(values, default=math.nan)


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


Group = tuple[str, list[MeasuredSet]]


def make_groups(sets: Sequence[MeasuredSet], *, apart: bool) -> list[Group]:
    """Return the groups of the report: each cluster by kind, or each cluster and each app; and all sets."""
    clusters = sorted({each.cluster for each in sets})
    if apart:
        results = [(f"cluster {name}", [s for s in sets if s.cluster == name]) for name in clusters]
        results += [(f"app {name}", [s for s in sets if s.app == name]) for name in sorted({s.app for s in sets})]
    else:
        pairs = [(cluster, kind) for cluster in clusters for kind in KINDS]
        results = [(f"{c}, {kind}", [s for s in sets if (s.cluster, s.kind) == (c, kind)]) for c, kind in pairs]
    return [*((title, members) for title, members in results if members), ("all", list(sets))]


Scores = dict[tuple[str, str], dict[str, Score]]
"""(strategy, model) -> name of the set -> score"""


def score_all(sets: Sequence[MeasuredSet], strategies: Iterable[str], models: Iterable[str]) -> Scores:
    return {
        (strategy, model): {each.name: score_set(each, strategy, model) for each in sets}
        for strategy, model in itertools.product(strategies, models)
    }


_HEAD = (
    f"{'':24}  error  error    may  other  fastest       capped       cheapest      capped       knee        90 %  cost\n"
    f"{'strategy, model':24} median    p90     be  sizes   mean worst   mean worst   mean worst   mean worst  exact +-1  cover probe"
)


def format_table(group: Group, result: Scores) -> str:
    title, members = group
    lines = [f"{title} ({len(members)} sets)", _HEAD]
    for (strategy, model), by_set in result.items():
        lines.append(_format_row(f"{strategy}, {model}", Summary.of([by_set[each.name] for each in members])))
    return "\n".join([*lines, describe_constant_answer(members), ""])


def describe_constant_answer(members: Sequence[MeasuredSet]) -> str:
    """Report how often the best answer without probes is the true knee: always the k-th batch, from either end."""
    places = [place for each in members if (place := _find_knee_position(each)) is not None]
    if not places:
        return ""
    best = max(
        (_count_hits(side, k), -k, name) for name, side in _count_by_side(places).items() for k in range(max(side) + 1)
    )
    (exact, within), k, name = best
    return (
        f"best constant answer to the knee: step {-k} from the {name}, exact {exact:.0%}, within one step {within:.0%}"
    )


def _find_knee_position(measured: MeasuredSet) -> tuple[int, int] | None:
    """Return the number of smaller and of larger batches than the true knee; None with too few batches."""
    knee = choose_true_knee(measured)
    if knee is None:
        return None
    batches = sorted({row.batch for row in list_true_predictions(measured)})
    return batches.index(knee), len(batches) - 1 - batches.index(knee)


def _count_by_side(places: Sequence[tuple[int, int]]) -> dict[str, list[int]]:
    return {"smallest": [place[0] for place in places], "largest": [place[1] for place in places]}


def _count_hits(places: Sequence[int], k: int) -> tuple[float, float]:
    return _mean(float(place == k) for place in places), _mean(float(abs(place - k) <= 1) for place in places)


def _format_row(name: str, s: Summary) -> str:
    regrets = [
        (s.fastest, s.fastest_worst),
        (s.capped_fastest, s.capped_fastest_worst),
        (s.cheapest, s.cheapest_worst),
        (s.capped_cheapest, s.capped_cheapest_worst),
    ]
    return (
        f"{name:24} {_format_percent(s.median)}  {_format_percent(s.p90)}  {_format_percent(s.candidates)}  {_format_percent(s.elsewhere)}"
        + "".join(f"  {_format_percent(mean)} {_format_percent(worst, 0)}" for mean, worst in regrets)
        + f"  {_format_percent(s.knee, 0)} {_format_percent(s.knee_within_one, 0)}  {_format_percent(s.covered, 0)} {s.cost:5.2f}"
        + (f"  {s.refused} refused" if s.refused else "")
    )


def _format_percent(share: float, digits: int = 1) -> str:
    return "    -" if math.isnan(share) else f"{share:5.{digits}%}"


# Rows that no search could have requested


@dataclass(frozen=True)
class UnequalErrors:
    rows: int
    median: float
    p90: float

    @classmethod
    def of(cls, errors: Iterable[float]) -> "UnequalErrors":
        known = [error for error in errors if not math.isnan(error)]
        return cls(len(known), float(np.median(known)), float(np.percentile(known, 90)))


def score_unequal(
    paths: Sequence[Path], sets: Sequence[MeasuredSet], strategy: str, model: str
) -> dict[str, UnequalErrors]:
    """Return by cluster the prediction errors of rows with unequal numbers of GPUs on their nodes.

    Each row is treated as having its nodes and the nearest equal number of GPUs for which there is a set.
    """
    errors: dict[str, list[float]] = defaultdict(list)
    for each, rows in _nearest_sets(paths, sets):
        estimates = fit_predictor(each, strategy, model)([place for place, _ in rows])
        pairs = zip(estimates, rows, strict=True)
        errors[each.cluster] += [abs(estimate.seconds / seconds - 1) for estimate, (_, seconds) in pairs]
    return {cluster: UnequalErrors.of(result) for cluster, result in errors.items()}


def _nearest_sets(
    paths: Sequence[Path], sets: Sequence[MeasuredSet]
) -> list[tuple[MeasuredSet, list[tuple[Where, float]]]]:
    """Return for each set the corresponding configurations of unequal rows and their step times."""
    rows = read_tables(*paths)
    rows = rows[(rows.flag == "ok") & rows.gpus_per_node.isna() & (rows.nodes > 1)]
    result: dict[str, list[tuple[Where, float]]] = defaultdict(list)
    for row in rows.to_dict("records"):
        alike = [s for s in sets if (s.cluster, s.app) == (row["cluster"], row["app"]) and s.gpus_per_node is not None]
        if alike:
            mean = row["replicas"] / row["nodes"]
            nearest = min(alike, key=lambda s: abs((s.gpus_per_node or 0) - mean))
            place = Where(int(row["nodes"]), nearest.gpus_per_node or 1, int(row["local_batch"]))
            result[nearest.name].append((place, float(row["step_time_s"])))
    return [(each, result[each.name]) for each in sets if each.name in result]


# Repeated runs


@dataclass(frozen=True)
class RepeatDifferences:
    """The difference of two runs of the same configuration, a lower limit for errors of any model. |ln ratio|."""

    configurations: int
    median: float
    p90: float

    @classmethod
    def of(cls, sets: Iterable[MeasuredSet]) -> "RepeatDifferences | None":
        """Return the differences of the sets; None without repeated runs. Runs within one node count once."""
        whole = [each for each in sets if each.gpus_per_node is not None]
        noise = [off for each in whole for off in each.noise]
        if not noise:
            return None
        return cls(sum(len(each.again) for each in whole), float(np.median(noise)), float(np.percentile(noise, 90)))

    def __str__(self) -> str:
        return (
            f"noise floor: two runs of a configuration are {self.median:.1%} apart in the median, p90 {self.p90:.1%}"
            f" ({self.configurations} were measured more than once)"
        )


@dataclass(frozen=True)
class MeasuredRows:
    """Coverage of the interval of a measured configuration for its other runs."""

    strategy: str
    configurations: int  # number of configurations with several runs
    covered: float

    def __str__(self) -> str:
        return (
            f"{self.strategy}: intervals of measured configurations hold their other runs in {self.covered:.0%} of"
            f" {self.configurations}"
        )


def score_measured_rows(sets: Iterable[MeasuredSet], strategy: str) -> MeasuredRows | None:
    """Return the coverage of the intervals of a fit to a strategy's probes for these probes; None if none was repeated."""
    inside: list[bool] = []
    for each in sets:
        probes = run_strategy(each, STRATEGIES[strategy]).seen
        again = [place for place in probes if place in each.first and place in each.again]
        if each.gpus_per_node is None or not again:
            continue
        fit = step_time.fit_step_time(list(probes.values()), collective=each.collective)
        columns = ([p.nodes for p in again], [p.gpus_per_node for p in again], [p.local_batch for p in again])
        for place, repeats in zip(again, fit.compute_repeat_deviation(*columns), strict=True):
            off = math.log(each.truth[place].seconds / probes[place].seconds)
            inside.append(abs(off) <= Z90 * math.sqrt(2) * repeats)
    return MeasuredRows(strategy, len(inside), float(np.mean(inside))) if inside else None


# Computing time


@dataclass(frozen=True)
class Timing:
    """Processor time, which is independent of other processes."""

    fit_median: float  # seconds
    fit_worst: float  # seconds
    predictions: int
    predicting: float  # seconds

    def __str__(self) -> str:
        fits = f"a fit {self.fit_median * 1e3:.2f} ms (median; worst {self.fit_worst * 1e3:.1f} ms)"
        return f"{fits}, {self.predictions} predictions {self.predicting:.2f} s of processor time"


def measure_timing(sets: Sequence[MeasuredSet], strategy: str, model: str, count: int = 100_000) -> Timing:
    """Return the times of a fit and of predicting many candidates."""
    fits = [score_set(each, strategy, model).fit_seconds for each in sets]
    largest = max((each for each in sets if each.kind != "one node"), key=lambda each: len(each.truth), default=sets[0])
    predict = fit_predictor(largest, strategy, model)
    gpus = largest.gpus_per_node or 1
    places = [Where(nodes, gpus, batch) for nodes in range(1, 101) for batch in range(1, count // 100 + 1)]
    began = time.process_time()
    predict(places)
    return Timing(float(np.median(fits)), max(fits), len(places), time.process_time() - began)


def main() -> None:
    arguments = _parse_arguments()
    try:
        _print_report(arguments)
    except (OSError, ValueError) as error:  # an invalid table, or a page that cannot be written
        sys.exit(f"replay.py: {error}")


def _print_report(arguments: argparse.Namespace) -> None:
    sets = load_sets(*arguments.tables, sizes=arguments.sizes, repeats=arguments.repeats)
    if not sets:
        raise ValueError("the tables hold no set with two sizes and two batches to offer (see --sizes and the columns)")
    if arguments.timing:
        for model in arguments.models:
            print(f"{model:14} {measure_timing(sets, 'sweep', model)}")
        return
    if arguments.knee or arguments.html:
        _print_knees(sets, arguments)
        return
    flagged = load_sets(*arguments.tables, sizes=arguments.sizes, repeats=arguments.repeats, flagged=True)
    reported = make_groups(sets, apart=arguments.apart)
    if flagged:
        reported.append(("flagged, in no figure above", flagged))
    result = score_all([*sets, *flagged], arguments.strategies, arguments.models)
    apart = {name: score_unequal(arguments.tables, sets, *name) for name in result}
    again = RepeatDifferences.of(sets)
    measured = [row for name in arguments.strategies if (row := score_measured_rows(sets, name)) is not None]
    if arguments.json:
        rows = {"repeats": again and asdict(again), "measured": [asdict(row) for row in measured]}
        print(json.dumps({**_as_json(reported, result, apart), **rows}, indent=1))
        return
    print("\n".join([_format_report(reported, result, apart), *map(str, filter(None, [again, *measured]))]))


def _print_knees(sets: Sequence[MeasuredSet], arguments: argparse.Namespace) -> None:
    import replay_knee  # only this option needs plotly

    if arguments.knee:
        print(replay_knee.format_table(sets, arguments.strategies))
    if arguments.html:
        replay_knee.write_page(sets, arguments.html)


def _format_report(
    reported: Sequence[Group], result: Scores, apart: Mapping[tuple[str, str], Mapping[str, UnequalErrors]]
) -> str:
    lines = [format_table(group, result) for group in reported]
    lines.append("nodes with unequal numbers of GPUs, predicted at the nearest equal number")
    for (strategy, model), by_cluster in apart.items():
        cells = [f"{c}: median {a.median:.1%}, p90 {a.p90:.1%} of {a.rows}" for c, a in by_cluster.items()]
        lines.append(f"{f'{strategy}, {model}':24} {'; '.join(cells)}")
    return "\n".join(lines)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE.csv")
    parser.add_argument("--json", action="store_true", help="print the same numbers as JSON")
    parser.add_argument("--apart", action="store_true", help="report each cluster and each app apart")
    parser.add_argument("--timing", action="store_true", help="print how long fits and predictions take, no errors")
    parser.add_argument("--knee", action="store_true", help="compare rules for the knee, and nothing else")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with every set's curve and its knees")
    parser.add_argument("--sizes", type=_parse_numbers, help="offer these sizes, such as 2,4,8,16")
    parser.add_argument("--repeats", action="store_true", help="take probes of one run, and judge them by the others")
    parser.add_argument("--strategies", type=_parse_names, default=list(STRATEGIES), help=f"of {', '.join(STRATEGIES)}")
    parser.add_argument("--models", type=_parse_names, default=list(MODELS), help=f"of {', '.join(MODELS)}")
    arguments = parser.parse_args()
    for given, known in ((arguments.strategies, STRATEGIES), (arguments.models, MODELS)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"{unknown[0]!r} is none of {', '.join(known)}")
    if arguments.json + arguments.timing + (arguments.knee or arguments.html is not None) > 1:
        parser.error("--json, --timing and --knee or --html exclude each other")
    return arguments


def _parse_numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _parse_names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _as_json(
    reported: Sequence[Group], result: Scores, apart: Mapping[tuple[str, str], Mapping[str, UnequalErrors]]
) -> dict[str, Any]:
    """Return all values of the text; null if no set has the value."""

    def plain(record: Summary | UnequalErrors) -> dict[str, Any]:
        return {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in asdict(record).items()}

    names = {key: ", ".join(key) for key in result}
    return {
        "groups": {
            title: {
                names[key]: plain(Summary.of([by_set[each.name] for each in members])) for key, by_set in result.items()
            }
            for title, members in reported
        },
        "unequal nodes": {
            names[key]: {c: plain(a) for c, a in by_cluster.items()} for key, by_cluster in apart.items()
        },
    }


if __name__ == "__main__":
    main()
