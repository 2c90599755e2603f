"""Compare predictions of `tula recommend` and `tula train` with measurements: rows, their CSV file, and tables."""

import csv
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tula_cli.words import format_count

LARGE_ERROR = 0.25  # minimum relative error of parts listed below the tables
SMALL_SHARE = 0.01  # parts with a smaller share of the whole are not listed
MEAN = "mean"  # of the full searches
TRAINING = "train"

Configuration = tuple[int, int]  # nodes, global batch
Data = dict[str, Any]  # `data` of a command's JSON


@dataclass(frozen=True)
class Row:
    """One predicted value and its actual value."""

    job: str
    sweep: int  # number of the sweep with the prediction
    nodes: int
    batch: int  # global
    probed: bool  # whether the sweep has measured this configuration
    quantity: str  # "step", "time" and the parts of it (seconds); "time lost" (share), "knee" (batch)
    predicted: float
    low: float | None  # 90 % interval
    high: float | None
    truth: str  # number of the full search, MEAN of all of them, or TRAINING
    actual: float

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return self.predicted / self.actual - 1

    @property
    def is_inside(self) -> bool | None:
        """Whether the interval contains the actual value; None without an interval."""
        return None if self.low is None or self.high is None else self.low <= self.actual <= self.high


# --- rows from the output of the commands


def compare_job(job: str, sweeps: Mapping[int, Data], truths: Sequence[Data], training: Data | None) -> list[Row]:
    """Return the rows of a job.

    Args:
        job: its name.
        sweeps: by number, the data of `profile` and of `recommend` with objectives `time` and `knee`.
        truths: the same of each full search.
        training: the data of `train`, at the choice of the first sweep; None without a training.
    """
    rows: list[Row] = []
    for number, sweep in sweeps.items():
        rows += compare_candidates(job, number, sweep, truths)
        rows += compare_choices(job, number, sweep, truths)
    if training is not None:
        rows += compare_training(job, sweeps[1], training)
    return rows


def compare_candidates(job: str, number: int, sweep: Data, truths: Sequence[Data]) -> Iterator[Row]:
    """Compare the step times of all candidates with the probes of each full search, and the parts of those without a probe."""
    for truth_number, truth in enumerate(truths, 1):
        steps = _measured_steps(truth)
        parts = {_configuration(row): _read_parts(row) for row in truth["time"]["rows"] if row["measured"]}
        for row in sweep["time"]["rows"]:
            where = _configuration(row)
            if where not in steps:
                continue
            key = job, number, *where, row["measured"]
            step = row["step_time"], row["step_low"], row["step_high"]
            yield Row(*key, "step", *step, str(truth_number), steps[where])
            for name, value in _read_parts(row).items():
                actual = parts[where].get(name)
                if actual and not row["measured"]:
                    interval = _time_interval(row) if name == "time" else (None, None)
                    yield Row(*key, name, value, *interval, str(truth_number), actual)


def compare_choices(job: str, number: int, sweep: Data, truths: Sequence[Data]) -> Iterator[Row]:
    """Compare the fastest choice with the fastest of the full searches by their mean times, and the knees of both."""
    times: dict[Configuration, list[float]] = {}
    for truth in truths:
        for row in truth["time"]["rows"]:
            times.setdefault(_configuration(row), []).append(3600 * row["hours"])
    means = {where: statistics.fmean(values) for where, values in times.items() if len(values) == len(truths)}
    choice, knee = sweep["time"]["choice"], sweep["knee"]["choice"]
    if _configuration(choice) in means:
        lost = means[_configuration(choice)] / min(means.values()) - 1
        yield Row(job, number, *_configuration(choice), choice["measured"], "time lost", 0.0, None, None, MEAN, lost)
    key = job, number, *_configuration(knee), knee["measured"]
    for truth_number, truth in enumerate(truths, 1):
        actual = float(truth["knee"]["choice"]["batch"])
        yield Row(*key, "knee", float(knee["batch"]), None, None, str(truth_number), actual)


def compare_training(job: str, sweep: Data, training: Data) -> Iterator[Row]:
    """Compare a training with its prediction: step time, total time and the parts of it."""
    where = training["nodes"], training["batch"]
    choice: Data = next((row for row in sweep["time"]["rows"] if _configuration(row) == where), {})
    key = job, 1, *where, bool(choice.get("measured"))
    step = training["predicted_step"], choice.get("step_low"), choice.get("step_high")
    time = 3600 * training["predicted_hours"], *_time_interval(choice)
    yield Row(*key, "step", *step, TRAINING, training["actual_step"])
    yield Row(*key, "time", *time, TRAINING, 3600 * training["actual_hours"])
    predicted, actual = training["predicted_parts"] or {}, training["actual_parts"] or {}
    for name, value in predicted.items():
        if value is not None and actual.get(name):  # 0 if a training has no such part
            yield Row(*key, name, value, None, None, TRAINING, actual[name])


def _measured_steps(truth: Data) -> dict[Configuration, float]:
    return {
        (probe["nodes"], probe["batch"]): statistics.fmean(probe["step_times"])
        for probe in truth["profile"]["measured"]
    }


def _configuration(row: Data) -> Configuration:
    return row["nodes"], row["batch"]


def _time_interval(row: Data) -> tuple[float | None, float | None]:
    low, high = row.get("hours_low"), row.get("hours_high")
    return None if low is None else 3600 * low, None if high is None else 3600 * high


def _read_parts(row: Data) -> dict[str, float]:
    """Return the seconds of the whole training and of its parts that are known and not 0."""
    parts = {name: value for name, value in (row["parts"] or {}).items() if value}
    return {"time": 3600 * row["hours"], **parts}


# --- the stored file


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write the rows as CSV, numbers with four digits."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields(Row)])
        for row in rows:
            writer.writerow([_round_value(value) for value in asdict(row).values()])


def _round_value(value: object) -> object:
    if isinstance(value, bool):
        return int(value)
    return f"{value:.4g}" if isinstance(value, float) else value


def read_rows(path: Path) -> list[Row]:
    """Read the file of `write_rows`; exit with a message if it has other columns."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != [field.name for field in fields(Row)]:
            raise SystemExit(f"{path} does not hold rows of this benchmark")
        return [
            Row(
                job=line["job"], sweep=int(line["sweep"]), quantity=line["quantity"], nodes=int(line["nodes"]),
                batch=int(line["batch"]), probed=line["probed"] == "1", predicted=float(line["predicted"]),
                low=_number(line["low"]), high=_number(line["high"]), truth=line["truth"], actual=float(line["actual"]),
            )
            for line in reader
        ]  # fmt: skip


def _number(text: str) -> float | None:
    return float(text) if text else None


# --- tables


def format_tables(rows: Sequence[Row]) -> str:
    """Return Markdown tables of the candidates, of their parts and of the trainings, and a line with large errors of parts."""
    if not rows:
        return "nothing to compare yet"
    jobs = list(dict.fromkeys(row.job for row in rows))
    lines = [
        "| job | sweeps, full searches | unprobed: median / max error | intervals hold: unprobed, probed"
        " | full searches differ: median / max | time lost by the choice | knee as in the full search |",
        "|" + "---|" * 7,
        *(_format_candidates(job, [row for row in rows if row.job == job]) for job in jobs),
        "",
        "| job | part of an unprobed configuration | median / max error | full searches differ: median / max |",
        "|" + "---|" * 4,
        *(line for job in jobs for line in _format_parts(job, [row for row in rows if row.job == job])),
        "",
        "| job | training | part | predicted (s) | actual (s) | error | in the interval |",
        "|" + "---|" * 7,
        *(_format_training(row) for row in rows if row.truth == TRAINING),
    ]
    if far := list_large_errors(rows):
        lines += ["", f"more than {LARGE_ERROR:.0%} off: " + "; ".join(far)]
    return "\n".join(lines)


def _format_candidates(job: str, rows: Sequence[Row]) -> str:
    steps = [row for row in rows if row.quantity == "step" and row.truth != TRAINING]
    lost = [row.actual for row in rows if row.quantity == "time lost"]
    knees = [row.predicted == row.actual for row in rows if row.quantity == "knee"]
    sweeps, truths = {row.sweep for row in rows}, {row.truth for row in steps}
    cells = [
        job,
        f"{len(sweeps)}, {len(truths)}",
        _format_errors([row for row in steps if not row.probed]),
        ", ".join(_format_coverage([row for row in steps if row.probed is probed]) for probed in (False, True)),
        _format_repeat_noise(steps),
        f"{statistics.fmean(lost):.1%}, at most {max(lost):.1%}" if lost else "",
        f"{sum(knees)} of {len(knees)}" if knees else "",
    ]
    return f"| {' | '.join(cells)} |"


def _format_parts(job: str, rows: Sequence[Row]) -> Iterator[str]:
    parts = [row for row in rows if row.truth not in (TRAINING, MEAN) and row.quantity not in ("step", "knee")]
    for name in dict.fromkeys(row.quantity for row in parts):
        part = [row for row in parts if row.quantity == name]
        yield f"| {job} | {name} | {_format_errors(part)} | {_format_repeat_noise(part)} |"


def _format_training(row: Row) -> str:
    inside = {None: "", True: "yes", False: "no"}[row.is_inside]
    where = f"{format_count(row.nodes, 'node')}, batch {row.batch}"
    return f"| {row.job} | {where} | {row.quantity} | {row.predicted:.3g} | {row.actual:.3g} | {row.error:+.1%} | {inside} |"


def list_errors(rows: Iterable[Row]) -> list[float]:
    """Return the absolute errors relative to the mean of the full searches, one per sweep and configuration."""
    groups: dict[tuple[int, int, int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.sweep, row.nodes, row.batch, row.quantity), []).append(row)
    values = []
    for group in groups.values():
        actual = statistics.fmean(row.actual for row in group)
        values.append(abs(group[0].predicted / actual - 1))
    return values


def _format_errors(rows: Sequence[Row]) -> str:
    values = list_errors(rows)
    return f"{statistics.median(values):.1%} / {max(values):.1%}" if values else "none"


def _format_coverage(rows: Iterable[Row]) -> str:
    inside = [row.is_inside for row in rows if row.is_inside is not None]
    return f"{statistics.fmean(inside):.0%} of {len(inside)}" if inside else "none"


def list_repeat_differences(rows: Iterable[Row]) -> list[float]:
    """Return for each configuration the relative difference of its largest and smallest measurement over the full searches."""
    groups: dict[Configuration, dict[str, float]] = {}
    for row in rows:
        groups.setdefault((row.nodes, row.batch), {})[row.truth] = row.actual
    repeated = [list(values.values()) for values in groups.values() if len(values) > 1]
    return [max(values) / min(values) - 1 for values in repeated]


def _format_repeat_noise(rows: Sequence[Row]) -> str:
    values = list_repeat_differences(rows)
    return f"{statistics.median(values):.1%} / {max(values):.1%}" if values else "none"


def list_large_errors(rows: Sequence[Row]) -> list[str]:
    """List the steps and parts with an error above FAR_OFF; for a training, only parts with a significant share."""
    whole = {row.job: row.actual for row in rows if row.truth == TRAINING and row.quantity == "time"}
    names = [
        f"{row.job}, training: {row.quantity} {row.error:+.1%}"
        for row in rows
        if row.truth == TRAINING and abs(row.error) > LARGE_ERROR
        if row.quantity == "step" or max(row.actual, row.predicted) > SMALL_SHARE * whole[row.job]
    ]
    unprobed = [row for row in rows if row.truth not in (TRAINING, MEAN) and row.quantity != "knee" and not row.probed]
    for job, quantity in dict.fromkeys((row.job, row.quantity) for row in unprobed):
        error = statistics.median(list_errors(row for row in unprobed if (row.job, row.quantity) == (job, quantity)))
        names += [f"{job}, unprobed: {quantity} {error:.0%} in the median"] * (error > LARGE_ERROR)
    return names
