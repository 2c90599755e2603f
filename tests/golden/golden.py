"""What a case came to, in a form that can be kept and compared: data in JSON, sentences apart from them, nothing that differs
from one machine or day to the next.

A text is a sentence if it has a space. In the data it is `<sentence>`; in the sentences it stands under its place. So a
change of wording is a change of `expected/sentences/COMMAND.txt` alone.
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
NOTES = re.compile(
    r"^(building the model and the dataset|using the model and dataset sizes measured .*)\n", re.MULTILINE
)
"""They say whether a case was the first to build a job's model, which differs with the cases that are run."""
OF_MACHINE = (
    "hardware",
    "held",  # bytes on disk, links included
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
SINCE_KEYS = ("wait",)
"""Seconds until now."""

Value = Any
Flat = dict[str, Value]


# --- what differs from machine to machine


@dataclass
class Normaliser:
    """Replaces times, paths, hosts, versions and ids; the same id gets the same number within a case.

    Args:
        folder: in which the case was run.
    """

    folder: Path
    ids: dict[str, str] = field(default_factory=dict)

    def text(self, text: str) -> str:
        """Return a text without what differs."""
        text = NOTES.sub("", text)
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
        """Return a value of JSON without what differs."""
        if isinstance(value, Mapping):
            return {self.text(name): self.value(inner, name) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.value(inner, key) for inner in value]
        if key in OF_MACHINE and value and (key, type(value)) != ("gpus", str):
            return "<machine>"
        if isinstance(value, str):
            if key == "signature" and (name := re.fullmatch(r"\d{8}", value)):  # by chance without a letter
                return self._id(name)
            return "<version>" if key == "tula" else self.text(value)
        if key in SINCE_KEYS and isinstance(value, float):
            return "<seconds>"
        if isinstance(value, int | float) and TIME_KEYS.search(key) and value > 1.6e9:
            return "<time>"
        if key == "pid" and value:  # of a process of this run
            return "<pid>"
        return value


# --- data and sentences


def flatten(value: Value, place: str = "") -> Iterator[tuple[str, Value]]:
    """Yield each value that holds no others with its place, such as `data.rows[3].cost`."""
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


def without_sentences(value: Value) -> Value:
    """Return a value whose sentences are replaced by a word."""
    if isinstance(value, Mapping):
        return {name: without_sentences(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_sentences(inner) for inner in value]
    return SENTENCE if is_sentence(value) else value


@dataclass(frozen=True)
class Outcome:
    """What a case came to: data, and the sentences by their place in the data (or `stdout`, `stderr`)."""

    data: Value
    sentences: Mapping[str, str]

    @classmethod
    def of(cls, answer: Value, **texts: str) -> "Outcome":
        """Return the outcome of an answer in JSON and further texts."""
        results = {place: value for place, value in flatten(answer) if is_sentence(value)}
        results |= {name: text for name, text in texts.items() if text.strip()}
        return cls(
            without_sentences(answer),
            {place: "\n".join(line.rstrip() for line in text.rstrip().split("\n")) for place, text in results.items()},
        )


# --- comparison


@dataclass(frozen=True)
class Rename:
    """A key that has another name, is gone (`new` is empty) or is new (`old` is empty); `[]` is any number of a list."""

    command: str
    old: str
    new: str

    def applies(self, command: str) -> bool:
        return self.command in ("*", command)


def renames(path: Path = RENAMES) -> list[Rename]:
    with path.open() as file:
        return [Rename(row["command"], row["old"], row["new"]) for row in csv.DictReader(file)]


def _matching(place: str) -> re.Pattern[str]:
    return re.compile(re.escape(place).replace(r"\[\]", r"\[(\d+)\]") + r"(?=$|[.\[])")


def renamed(flat: Flat, command: str, table: list[Rename]) -> Flat:
    """Return expected values under the names that they have now."""
    for rename in table:
        if not rename.old or not rename.applies(command):
            continue
        pattern, moved = _matching(rename.old), {}
        for place, value in flat.items():
            match = pattern.match(place)
            if match is None:
                moved[place] = value
            elif rename.new:
                numbers = iter(match.groups())
                moved[re.sub(r"\[\]", lambda _: f"[{next(numbers)}]", rename.new) + place[match.end() :]] = value  # noqa: B023
        flat = moved
    return flat


def without_new(flat: Flat, command: str, table: list[Rename]) -> Flat:
    """Return actual values without the keys that the table says are new."""
    new = [_matching(rename.new) for rename in table if not rename.old and rename.applies(command)]
    return {place: value for place, value in flat.items() if not any(pattern.match(place) for pattern in new)}


def equal(expected: Value, actual: Value, tolerance: float = TOLERANCE) -> bool:
    """Return whether two values are the same, of the same type; floats agree to a relative tolerance."""
    if type(expected) is not type(actual):
        return False
    if isinstance(expected, float):
        return math.isclose(expected, actual, rel_tol=tolerance, abs_tol=tolerance * 1e-3) or (
            math.isnan(expected) and math.isnan(actual)
        )
    return bool(expected == actual)


def differences(expected: Outcome, actual: Outcome, command: str, table: list[Rename]) -> list[str]:
    """Return a line for each difference between two outcomes; none where they are the same."""
    lines = []
    pairs = (
        (dict(flatten(expected.data)), dict(flatten(actual.data))),
        (dict(expected.sentences), dict(actual.sentences)),
    )
    for before, now in pairs:
        before, now = renamed(before, command, table), without_new(now, command, table)
        for place in [*before, *(place for place in now if place not in before)]:
            if place not in now:
                lines.append(f"- {place}: {before[place]!r} is no longer there")
            elif place not in before:
                lines.append(f"+ {place}: {now[place]!r} is new")
            elif not equal(before[place], now[place]):
                lines += [
                    f"  {place}:",
                    *(f"    {mark} {_shown(value)}" for mark, value in (("-", before[place]), ("+", now[place]))),
                ]
    return lines


def _shown(value: Value) -> str:
    return value.replace("\n", "\n      ") if isinstance(value, str) else f"{value!r} ({type(value).__name__})"


# --- files


def command_of(case: str) -> str:
    """Return the command that a case is of, by its name `COMMAND-WHAT`."""
    return case.partition("-")[0]


def load(case: str) -> Outcome | None:
    """Return what is expected of a case; None where nothing is yet."""
    path = EXPECTED / f"{case}.json"
    if not path.exists():
        return None
    return Outcome(json.loads(path.read_text()), load_sentences(command_of(case)).get(case, {}))


def save(outcomes: Mapping[str, Outcome], *, all_cases: bool) -> None:
    """Write what is expected of some cases; with `all_cases` nothing else remains."""
    EXPECTED.mkdir(exist_ok=True)
    if all_cases:
        for path in EXPECTED.glob("**/*.*"):
            if path.is_file():
                path.unlink()
    for case, outcome in outcomes.items():
        text = json.dumps(outcome.data, indent=1, sort_keys=True, ensure_ascii=False)
        (EXPECTED / f"{case}.json").write_text(text + "\n")
    for command in sorted({command_of(case) for case in outcomes}):
        kept = load_sentences(command) | {
            case: outcome.sentences for case, outcome in outcomes.items() if command_of(case) == command
        }
        save_sentences(command, kept)


def _sentences_path(command: str) -> Path:
    return EXPECTED / "sentences" / f"{command}.txt"


def save_sentences(command: str, cases: Mapping[str, Mapping[str, str]]) -> None:
    """Write sentences: a heading for each case, and `place: sentence` with further lines indented."""
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
    """Return the sentences of each case of a command by their place."""
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
