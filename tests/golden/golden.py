"""Outcomes of cases in a form that can be stored and compared: data as JSON, sentences separately, without values that depend on
the machine or the day.

A text with a space is a sentence. In the data it is replaced by `<sentence>`; the sentences are stored by their position in the
data. So a change of wording changes only `expected/sentences/COMMAND.txt`.
"""

import csv
import json
import math
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EXPECTED = HERE / "expected"
RENAMES = HERE / "renames.csv"
TOLERANCE = 1e-9
SENTENCE = "<sentence>"
FIRST_BUILD_WARNINGS = re.compile(
    r"^(building the model and the dataset|using the model and dataset sizes measured .*)\n", re.MULTILINE
)
"""Warnings about whether a case was the first to build the model of a job, which depends on the selected cases."""
MACHINE_KEYS = (
    "hardware",
    "held",  # bytes on disk, including links
    "capacity",
    "cpus",
    "gpus",
    "process",
    "largest_local_batch",
    "torch",
    "torchvision",
    "python",
    "system",
)
TIME_KEYS = re.compile(r"(^|_)(at|time|changed)$")
DURATION_KEYS = ("wait",)
"""Keys of durations until now, in seconds."""

Value = Any
Flat = dict[str, Value]


# --- values that depend on the machine


@dataclass
class Normaliser:
    """Replaces times, paths, hosts, versions and ids; within a case, the same id gets the same number.

    Args:
        folder: of the case.
    """

    folder: Path
    ids: dict[str, str] = field(default_factory=dict)

    def text(self, text: str) -> str:
        """Return a text without values that depend on the machine."""
        text = FIRST_BUILD_WARNINGS.sub("", text)
        for path, name in (
            (self.folder, "<folder>"),
            (HERE.parents[1], "<tula>"),
            (sys.executable, "<python>"),
            (sys.prefix, "<prefix>"),
        ):
            text = text.replace(str(path), name)
        text = re.sub(rf"(?<![\w.-]){re.escape(socket.gethostname())}(?![\w-])", "<host>", text)
        text = re.sub(r"\b(20\d\d-\d\d-\d\d([ T]\d\d:\d\d(:\d\d)?)?|\d\d-\d\d \d\d:\d\d)(?!\d)", "<date>", text)
        text = re.sub(r"\b\d\d:\d\d:\d\d\b", "<clock>", text)
        text = re.sub(r"\btula[ -]\d+\.\d+\.\d+[\w.+]*", "tula <version>", text)
        text = re.sub(r"\bprocess \d+", "process <pid>", text)
        text = re.sub(r"\b[\d.]+ (s|min|h|d|days|hours) ago\b", "<age> ago", text)
        text = re.sub(r"(?<![\w.])(?=[0-9a-f]*[a-f])[0-9a-f]{8}(?![\w])|(?<=[-/])[0-9a-f]{8}(?![\w])", self._id, text)
        return "\n".join(line.rstrip() for line in text.split("\n"))

    def _id(self, match: re.Match[str]) -> str:
        return self.ids.setdefault(match[0], f"<id{len(self.ids) + 1}>")

    def value(self, value: Value, key: str = "") -> Value:
        """Return a JSON value without values that depend on the machine."""
        if isinstance(value, Mapping):
            return {self.text(name): self.value(inner, name) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.value(inner, key) for inner in value]
        if key in MACHINE_KEYS and value and (key, type(value)) != ("gpus", str):
            return "<machine>"
        if isinstance(value, str):
            if key == "signature" and (
                name := re.fullmatch(r"\d{8}", value)
            ):  # a hexadecimal signature may by chance have no letter
                return self._id(name)
            return "<version>" if key == "tula" else self.text(value)
        if key in DURATION_KEYS and isinstance(value, float):
            return "<seconds>"
        if isinstance(value, int | float) and TIME_KEYS.search(key) and value > 1.6e9:
            return "<time>"
        if key == "pid" and value:  # pid of a process of this run
            return "<pid>"
        return value


# --- data and sentences


def flatten(value: Value, place: str = "") -> Iterator[tuple[str, Value]]:
    """Yield each leaf of a value with its position, such as `data.rows[3].cost`."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from flatten(inner, f"{place}.{name}" if place else name)
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            yield from flatten(inner, f"{place}[{number}]")
    else:
        yield place, value


def is_sentence(value: Value) -> bool:
    return isinstance(value, str) and " " in value.strip()


def replace_sentences(value: Value) -> Value:
    """Return a value in which each sentence is replaced by a constant."""
    if isinstance(value, Mapping):
        return {name: replace_sentences(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [replace_sentences(inner) for inner in value]
    return SENTENCE if is_sentence(value) else value


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case: data, and the sentences by their position in the data (or `stdout`, `stderr`)."""

    data: Value
    sentences: Mapping[str, str]

    @classmethod
    def of(cls, answer: Value, **texts: str) -> "Outcome":
        """Make an outcome from an answer in JSON and further texts."""
        results = {place: value for place, value in flatten(answer) if is_sentence(value)}
        results |= {name: text for name, text in texts.items() if text.strip()}
        return cls(
            replace_sentences(answer),
            {place: "\n".join(line.rstrip() for line in text.rstrip().split("\n")) for place, text in results.items()},
        )


# --- comparison


@dataclass(frozen=True)
class Rename:
    """A key that was renamed, removed (`new` is empty) or added (`old` is empty); `[]` matches any index of a list."""

    command: str
    old: str
    new: str

    def applies(self, command: str) -> bool:
        return self.command in ("*", command)


def read_renames(path: Path = RENAMES) -> list[Rename]:
    with path.open() as file:
        return [Rename(row["command"], row["old"], row["new"]) for row in csv.DictReader(file)]


def _compile_position(place: str) -> re.Pattern[str]:
    return re.compile(re.escape(place).replace(r"\[\]", r"\[(\d+)\]") + r"(?=$|[.\[])")


def apply_renames(flat: Flat, command: str, table: list[Rename]) -> Flat:
    """Return expected values with their current keys."""
    for rename in table:
        if not rename.old or not rename.applies(command):
            continue
        pattern, moved = _compile_position(rename.old), {}
        for place, value in flat.items():
            match = pattern.match(place)
            if match is None:
                moved[place] = value
            elif rename.new:
                numbers = iter(match.groups())
                moved[re.sub(r"\[\]", lambda _: f"[{next(numbers)}]", rename.new) + place[match.end() :]] = value  # noqa: B023
        flat = moved
    return flat


def remove_added_keys(flat: Flat, command: str, table: list[Rename]) -> Flat:
    """Return actual values without the added keys of the table."""
    new = [_compile_position(rename.new) for rename in table if not rename.old and rename.applies(command)]
    return {place: value for place, value in flat.items() if not any(pattern.match(place) for pattern in new)}


_FRACTION = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
_MIN_EXACT_DECIMALS = 9
"""Decimals of a number in a text from which on it counts as unrounded, as in results.csv."""


def _are_texts_equal(expected: str, actual: str, tolerance: float) -> bool:
    """Return whether two texts are equal; numbers that are not rounded agree to a relative tolerance."""
    if _FRACTION.sub("", expected) != _FRACTION.sub("", actual):
        return False
    for before, now in zip(_FRACTION.findall(expected), _FRACTION.findall(actual), strict=True):
        is_exact = max(len(number.partition(".")[2]) for number in (before, now)) >= _MIN_EXACT_DECIMALS
        if before != now and not (is_exact and are_equal(float(before), float(now), tolerance)):
            return False
    return True


def are_equal(expected: Value, actual: Value, tolerance: float = TOLERANCE) -> bool:
    """Return whether two values have the same type and are equal; floats, also in texts, agree to a relative tolerance."""
    if type(expected) is not type(actual):
        return False
    if isinstance(expected, str) and isinstance(actual, str) and expected != actual:
        return _are_texts_equal(expected, actual, tolerance)
    if isinstance(expected, float):
        return math.isclose(expected, actual, rel_tol=tolerance, abs_tol=tolerance * 1e-3) or (
            math.isnan(expected) and math.isnan(actual)
        )
    return bool(expected == actual)


def list_differences(expected: Outcome, actual: Outcome, command: str, table: list[Rename]) -> list[str]:
    """Return a line for each difference between two outcomes."""
    lines = []
    pairs = (
        (dict(flatten(expected.data)), dict(flatten(actual.data))),
        (dict(expected.sentences), dict(actual.sentences)),
    )
    for before, now in pairs:
        before, now = apply_renames(before, command, table), remove_added_keys(now, command, table)
        for place in [*before, *(place for place in now if place not in before)]:
            if place not in now:
                lines.append(f"- {place}: {before[place]!r} is no longer there")
            elif place not in before:
                lines.append(f"+ {place}: {now[place]!r} is new")
            elif not are_equal(before[place], now[place]):
                lines += [
                    f"  {place}:",
                    *(
                        f"    {mark} {_format_value(value)}"
                        for mark, value in (("-", before[place]), ("+", now[place]))
                    ),
                ]
    return lines


def _format_value(value: Value) -> str:
    return value.replace("\n", "\n      ") if isinstance(value, str) else f"{value!r} ({type(value).__name__})"


# --- files


def parse_command(case: str) -> str:
    """Return the command of a case from its name `COMMAND-TOPIC`."""
    return case.partition("-")[0]


def load_outcome(case: str) -> Outcome | None:
    """Return the expected outcome of a case, or None if there is none."""
    path = EXPECTED / f"{case}.json"
    if not path.exists():
        return None
    return Outcome(json.loads(path.read_text()), load_sentences(parse_command(case)).get(case, {}))


def _retain_equal(expected: Any, actual: Any) -> Any:
    """Return actual values; those that equal the expected ones up to the tolerance remain as they were written."""
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        return {
            name: _retain_equal(expected[name], inner) if name in expected else inner for name, inner in actual.items()
        }
    if isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        return [_retain_equal(before, now) for before, now in zip(expected, actual, strict=True)]
    return expected if are_equal(expected, actual) else actual


def save_outcomes(outcomes: Mapping[str, Outcome], *, all_cases: bool) -> None:
    """Write the expected outcomes of some cases; with `all_cases`, remove all others."""
    EXPECTED.mkdir(exist_ok=True)
    outcomes = {
        case: Outcome(_retain_equal(expected.data, outcome.data), _retain_equal(expected.sentences, outcome.sentences))
        if (expected := load_outcome(case))
        else outcome
        for case, outcome in outcomes.items()
    }
    if all_cases:
        for path in EXPECTED.glob("**/*.*"):
            if path.is_file():
                path.unlink()
    for case, outcome in outcomes.items():
        text = json.dumps(outcome.data, indent=1, sort_keys=True, ensure_ascii=False)
        (EXPECTED / f"{case}.json").write_text(text + "\n")
    for command in sorted({parse_command(case) for case in outcomes}):
        kept = load_sentences(command) | {
            case: outcome.sentences for case, outcome in outcomes.items() if parse_command(case) == command
        }
        save_sentences(command, kept)


def _sentences_path(command: str) -> Path:
    return EXPECTED / "sentences" / f"{command}.txt"


def save_sentences(command: str, cases: Mapping[str, Mapping[str, str]]) -> None:
    """Write sentences: a heading for each case, and `position: sentence` with further lines indented."""
    lines = []
    for case in sorted(cases):
        lines.append(f"== {case}")
        lines += [
            f"{place}: {text}".rstrip("\n").replace("\n", "\n    ") for place, text in sorted(cases[case].items())
        ]
    path = _sentences_path(command)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join("\n".join(line.rstrip() for line in entry.split("\n")) for entry in lines) + "\n")


def load_sentences(command: str) -> dict[str, dict[str, str]]:
    """Return the sentences of each case of a command by their position."""
    path, cases = _sentences_path(command), {}
    if not path.exists():
        return {}
    sentences: dict[str, str] = {}
    place = ""
    for line in path.read_text().split("\n")[:-1]:
        if line.startswith("== "):
            sentences = cases.setdefault(line[3:], {})
        elif line.startswith("    ") or not line:
            sentences[place] += "\n" + line[4:]
        else:
            place, _, text = line.partition(": ") if ": " in line else (line.rstrip(":"), "", "")
            sentences[place] = text
    return cases
