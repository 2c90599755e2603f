"""The results of benchmarks/table1/table1.py: a CSV file with a row per training, tables by setting, and the goals."""

import csv
import fcntl
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from table1_settings import METHODS, SETTINGS

Key = tuple[str, str, int]
"""Setting, method and seed of a training."""


@dataclass(frozen=True)
class Result:
    """The outcome of a training."""

    batch: int
    metric: str  # top1 (percent) or loss, of the last epoch; diverged
    value: float  # NaN if it diverged
    steps: int
    samples: int
    seconds: float  # of CPU time
    restarts: int

    @property
    def words(self) -> str:
        """The outcome in words."""
        if math.isnan(self.value):
            return "diverged"
        return f"{self.metric} {self.value:.4g}, {self.steps} steps, {self.seconds:.0f} s of CPU" + (
            ", restarted once" if self.restarts else ""
        )


Results = Mapping[Key, Result]
HEAD = ("setting", "method", "seed", *(column.name for column in fields(Result)))


def read_results(file: Path) -> dict[Key, Result]:
    """Return the trainings of a file; none if there is no file. Raises SystemExit for a file of another kind."""
    if not file.exists():
        return {}
    with file.open(newline="") as lines:
        rows = csv.DictReader(lines)
        if tuple(rows.fieldnames or ()) != HEAD:
            raise SystemExit(f"{file} does not hold trainings of this table: its first line must be {','.join(HEAD)}")
        kinds = {"metric": str, "value": float, "seconds": float}
        return {
            (row["setting"], row["method"], int(row["seed"])): Result(
                **{column.name: kinds.get(column.name, int)(row[column.name]) for column in fields(Result)}
            )
            for row in rows
        }


def append_result(file: Path, key: Key, result: Result) -> None:
    """Add a training; several processes may do so at a time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", newline="") as lines:
        fcntl.flock(lines, fcntl.LOCK_EX)
        writer = csv.writer(lines, lineterminator="\n")
        if lines.tell() == 0:
            writer.writerow(HEAD)
        cells = (f"{cell:.6g}" if isinstance(cell, float) else cell for cell in astuple(result))
        writer.writerow((*key, *cells))


# --- the share of the lost accuracy that a method recovers


@dataclass(frozen=True)
class Mean:
    """A mean over seeds with its standard error; NaN with one seed."""

    value: float
    error: float
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean | None":
        """Return the mean of values; None if there are none."""
        if not values:
            return None
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(statistics.fmean(values), error, len(values))


def select_values(results: Results, setting: str, method: str) -> dict[int, float]:
    """Return the value of each seed of a row."""
    return {key[2]: result.value for key, result in results.items() if key[:2] == (setting, method)}


def is_less_better(results: Results, setting: str) -> bool:
    """Return whether the metric of a setting is a loss."""
    return any(result.metric == "loss" for key, result in results.items() if key[0] == setting)


def compute_recovered_share(results: Results, setting: str, method: str, reference: str = "small") -> Mean | None:
    """Return the share of the accuracy lost by `lbt` compared with a small batch that a method recovers, in percent, paired by seed.

    The standard error is that of the ratio of means, by leaving out one seed at a time.
    """
    rows = [select_values(results, setting, name) for name in (method, "lbt", reference)]
    seeds = sorted(set.intersection(*(set(row) for row in rows)))
    gains = [rows[0][seed] - rows[1][seed] for seed in seeds]
    gaps = [rows[2][seed] - rows[1][seed] for seed in seeds]
    lost = sum(gaps)
    if not seeds or not (lost < 0 if is_less_better(results, setting) else lost > 0):
        return None
    share = 100 * sum(gains) / lost
    if len(seeds) == 1:
        return Mean(share, math.nan, 1)
    without = [100 * (sum(gains) - gain) / (lost - gap) for gain, gap in zip(gains, gaps, strict=True)]
    error = math.sqrt((len(seeds) - 1) * statistics.pvariance(without))
    return Mean(share, error, len(seeds))


# --- the tables


def format_tables(results: Results) -> Iterator[str]:
    """Yield a Markdown table of each setting, then the goals."""
    for setting in (name for name in SETTINGS if any(key[0] == name for key in results)):
        small, large = SETTINGS[setting].small, SETTINGS[setting].large
        metric = "loss" if is_less_better(results, setting) else "top-1 (%)"
        yield f"### {setting}: batch {small} to {large}, {SETTINGS[setting].epochs} epochs"
        yield ""
        yield f"| method | seeds | {metric} | recovered (%) | against the same tricks (%) | steps | CPU (s) | restarts |"
        yield "|" + "---|" * 8
        trained = {key[1] for key in results if key[0] == setting}
        for method in (name for name in METHODS if name in trained):
            yield f"| {' | '.join(format_cells(results, setting, method))} |"
        yield ""
    for family in dict.fromkeys(setting.family for setting in SETTINGS.values()):
        yield from format_overview(results, family)
    yield from format_goals(results)


def format_overview(results: Results, family: str) -> Iterator[str]:
    """Yield a table of a family: the values of the small batch and lbt, and the share that each method recovers."""
    trained = {key[0] for key in results}
    names = [name for name, setting in SETTINGS.items() if setting.family == family and name in trained]
    if not names:
        return
    yield f"### {family}: recovered (%); in brackets against the small batch with the same tricks"
    yield ""
    yield f"| method | {' | '.join(names)} |"
    yield "|" + "---|" * (len(names) + 1)
    for method in (name for name in METHODS if any(key[0] in names and key[1] == name for key in results)):
        yield f"| {method} | {' | '.join(format_overview_cell(results, name, method) for name in names)} |"
    yield ""


def format_overview_cell(results: Results, setting: str, method: str) -> str:
    """Return the values of the small batch and `lbt`, of other methods the share recovered."""
    values = list(select_values(results, setting, method).values())
    if method in ("small", "lbt"):
        return format_mean(Mean.of(values), 3 if is_less_better(results, setting) else 2)
    if any(math.isnan(value) for value in values):
        return f"diverged ({sum(math.isnan(value) for value in values)} of {len(values)})"
    tricks = METHODS[method].same_tricks
    compared = format_mean(compute_recovered_share(results, setting, method, tricks)) if tricks else ""
    return format_mean(compute_recovered_share(results, setting, method)) + (f" ({compared})" if compared else "")


def format_cells(results: Results, setting: str, method: str) -> Iterator[str]:
    """Yield the cells of a row."""
    row = [result for key, result in results.items() if key[:2] == (setting, method)]
    yield method
    yield str(len(row))
    digits = 3 if is_less_better(results, setting) else 2
    finite = [result.value for result in row if not math.isnan(result.value)]
    diverged = len(row) - len(finite)
    yield format_mean(Mean.of(finite), digits) + (f" ({diverged} diverged)" if diverged else "")
    tricks = METHODS[method].same_tricks
    yield "" if method in ("small", "lbt") else format_mean(compute_recovered_share(results, setting, method))
    yield format_mean(compute_recovered_share(results, setting, method, tricks)) if tricks else ""
    yield f"{statistics.fmean(result.steps for result in row):.0f}"
    yield f"{statistics.fmean(result.seconds for result in row):.0f}"
    yield str(sum(result.restarts for result in row) or "")


def format_mean(mean: Mean | None, digits: int = 0) -> str:
    """Return a mean and its standard error as a cell."""
    if mean is None:
        return ""
    error = "" if math.isnan(mean.error) else f" ± {mean.error:.{digits}f}"
    return f"{mean.value:.{digits}f}{error}"


# --- the goals


def format_goals(results: Results) -> Iterator[str]:
    """Yield a line per goal: whether it is reached, with the values."""
    adamw = [name for name, setting in SETTINGS.items() if setting.family == "AdamW"]
    for title, reference, average, least in (
        ("ramp with AdamW, of the small batch", "small", 90, 80),
        ("ramp with AdamW, of the small batch with the same tricks", "small-ortho", 80, 65),
    ):
        shares = {name: compute_recovered_share(results, name, "ramp", reference) for name in adamw}
        present = {name: share.value for name, share in shares.items() if share is not None}
        if present:
            mean = statistics.fmean(present.values())
            each = ", ".join(f"{name} {format_mean(shares[name])}" for name in present)
            yield format_goal(
                mean >= average and min(present.values()) >= least,
                f"{title}: {mean:.0f} % on average (goal {average}), each at least {least}: {each}",
            )
    below = [key for key in results if key[1] == "ramp" and is_below_lbt(results, key)]
    rows = sum(key[1] == "ramp" for key in results)
    names = ", ".join(f"{key[0]} seed {key[2]}" for key in below)
    yield format_goal(not below, f"ramp is never below lbt: below in {len(below)} of {rows} trainings {names}".rstrip())
    diverged = [
        f"{key[0]} seed {key[2]}" for key, result in results.items() if key[1] == "ramp" and math.isnan(result.value)
    ]
    yield format_goal(not diverged, f"no ramp diverges: {len(diverged)} of {rows} {', '.join(diverged)}".rstrip())
    for name in SETTINGS:
        capped, uncapped = (
            Mean.of(list(select_values(results, name, row).values())) for row in ("ramp", "ramp-uncapped")
        )
        if capped and uncapped and min(capped.seeds, uncapped.seeds) > 1:
            behind = capped.value - uncapped.value if is_less_better(results, name) else uncapped.value - capped.value
            error = math.hypot(capped.error, uncapped.error)
            yield format_goal(
                math.isnan(uncapped.value) or behind <= 2 * error,
                f"{name}: ramp {format_mean(capped, 4)} is within two standard errors of the one without a limit, {format_mean(uncapped, 4)}",
            )
    for name in SETTINGS:
        decay, small = (
            [result for key, result in results.items() if key[:2] == (name, method)] for method in ("decay", "small")
        )
        if decay and small:
            steps = statistics.fmean(row.steps for row in decay) / statistics.fmean(row.steps for row in small)
            means = [Mean.of([row.value for row in rows]) for rows in (decay, small)]
            yield format_goal(
                steps <= 0.7,
                f"{name}: decay takes {steps:.0%} of the small batch's steps (goal 70%) and ends at"
                f" {format_mean(means[0], 3)} (small batch {format_mean(means[1], 3)})",
            )


def is_below_lbt(results: Results, key: Key) -> bool:
    """Return whether a training ended worse than the plain large batch with the same seed, or diverged."""
    lbt = results.get((key[0], "lbt", key[2]))
    if lbt is None or math.isnan(lbt.value):
        return False
    value = results[key].value
    is_better = value <= lbt.value if is_less_better(results, key[0]) else value >= lbt.value
    return not is_better


def format_goal(is_reached: bool, text: str) -> str:
    """Return a goal's line."""
    return f"- {'reached' if is_reached else '**missed**'}: {text}"
