"""Files of a run that are damaged in any way: every command says so in a line, and none hangs or breaks off."""

import io
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import make_runs as make
import pytest
from isolation import isolate_environment
from make_results import make_inspection

from tula_cli.cli import app
from tula_cli.cluster import inspection
from tula_cli.cluster import launcher as cluster_launcher
from tula_cli.run.directory import RunDir
from tula_cli.show import screen as show_screen

COMMANDS = (
    "status", "list", "recommend", "recommend --objective knee", "logs", "train --dry-run", "compare --show", "cancel", "profile --dry-run", "clean --dry-run --keep best", "diff", "report --markdown",
)  # fmt: skip
SIGNATURE = "ab12cd34"
SECONDS = 60  # that a command may take, on a machine that others use; a file that cannot be read must not hold it up


def whole_run(root: Path) -> RunDir:
    """Return a run that has a file of each kind that a command reads."""
    run = RunDir.create(root / "tula-runs", make.spec())
    for nodes in (1, 2):
        make.add_probes(run, nodes, (16, 32, 64))
        for local in (16, 32, 64):
            make.add_measured(run, nodes, local)
    make.add_training(run, rows=make.metrics(), signature=SIGNATURE)
    run.write_attempt(make.attempt(f"train-{SIGNATURE}-1", end=make.START + 50))
    run.write_recommendation(make.recommendation())
    run.write_train_result(make.train_result(SIGNATURE))
    run.write_summary(make.summary(signature=SIGNATURE))
    run.write_tuning(make.tuning((make.branch("lbt"), make.branch("x2")), chosen="x2"))
    log = run.get_log_path(f"train-{SIGNATURE}-1", 1)
    log.parent.mkdir()
    log.write_text("epoch 1\n")
    return run


ABSURD = (-1, 0, 1e308, -1e308, 10**30, "", "x" * 1000, None, [], {}, True, "nan", "../../etc")


def absurd_value(content: bytes, random_: random.Random) -> bytes:
    """Put an absurd value into one place of a record; what is no record is cut."""
    lines = content.splitlines(keepends=True)
    number = random_.randrange(len(lines)) if lines else 0
    try:
        whole = json.loads(content)
    except ValueError:
        try:
            whole = json.loads(lines[number])
        except (ValueError, IndexError):
            return content[: len(content) // 2]
        lines[number] = _with_absurd(whole, random_) + b"\n"
        return b"".join(lines)
    return _with_absurd(whole, random_)


def _with_absurd(record: object, random_: random.Random) -> bytes:
    places: list[tuple[dict[str, object] | list[object], str | int]] = []
    remaining = [record]
    while remaining:
        result = remaining.pop()
        items = result.items() if isinstance(result, dict) else enumerate(result) if isinstance(result, list) else ()
        for key, inner in items:
            places.append((result, key))
            remaining.append(inner)
    if places:
        holder, key = random_.choice(places)
        holder[key] = random_.choice(ABSURD)  # type: ignore[index]
    return json.dumps(record).encode()


def _changed_bytes(content: bytes, random_: random.Random) -> bytes:
    result = bytearray(content)
    for _ in range(random_.randint(1, 4)):
        if result:
            result[random_.randrange(len(result))] = random_.randrange(256)
    return bytes(result)


CONTENTS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bytes": _changed_bytes,
    "value": absurd_value,
    "cut": lambda content, random_: content[: random_.randrange(len(content) + 1)],
    "undecodable": lambda content, _: b"\xff\xfe" + content,
    "empty": lambda content, _: b"",
    "deep": lambda content, _: b"[" * 5000 + b"]" * 5000,
    "twice": lambda content, _: content + content,
    "another record": lambda content, _: b'{"kind": "other", "id": 3}',
}
PLACES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a device without end": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    isolate_environment(monkeypatch, tmp_path)
    without_jobs(monkeypatch)
    return tmp_path


def without_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be started, neither a job nor what builds a model."""
    known = make_inspection(dataset_size=300, eval_size=50, parameters=1000, hardware="cpu")
    monkeypatch.setattr(inspection, "inspect", lambda spec: known)
    monkeypatch.setattr(cluster_launcher, "make_launcher", lambda spec, submits=True: make.FakeLauncher())


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError(f"no answer within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def no_number(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def require_json(text: str) -> None:
    """Refuse what is not one JSON value, or several (logs: an object a line)."""
    decoder, place = json.JSONDecoder(parse_constant=no_number), 0
    while place < len(text):
        _, place = decoder.raw_decode(text, place)
        place += len(text[place:]) - len(text[place:].lstrip())


def damaged_once(root: Path, random_: random.Random) -> list[str]:
    """Damage one file of a run in one way and run commands; return what went wrong, as far as it should not."""
    run = whole_run(root)
    files = sorted(path for path in root.joinpath("tula-runs").rglob("*") if path.is_file() and not path.is_symlink())
    path, how = random_.choice(files), random_.choice([*CONTENTS, *PLACES])
    if how in CONTENTS:
        path.write_bytes(CONTENTS[how](path.read_bytes(), random_))
    else:
        path.unlink()
        PLACES[how](path)
    wrong = []
    for command in random_.sample(COMMANDS, 3):
        about = ["--run", str(run.path)]
        if command == "diff":
            about = [str(run.path), str(whole_run(root / "whole").path)][:: random_.choice((1, -1))]
        if command.startswith("clean"):
            about = [str(run.path)]
        words = [*command.split(), *(() if command == "list" else about)]
        words += ["--json"] if random_.random() < 0.5 else []
        screen = show_screen.Screen(out=io.StringIO(), err=io.StringIO())
        signal.alarm(SECONDS)
        try:
            code = app.run(words, screen=screen)
        except Exception as error:  # noqa: BLE001 - whatever leaves a command is a finding
            wrong.append(f"{' '.join(words)}: {how} in {path.relative_to(root)}: {type(error).__name__}: {error}")
            continue
        finally:
            signal.alarm(0)
        text = screen.err.getvalue()
        if "--json" in words:
            require_json(screen.out.getvalue())
        elif code and "error: " not in text:
            wrong.append(
                f"{' '.join(words)}: {how} in {path.relative_to(root)}: exit code {code} without a word: {text}"
            )
    return wrong


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.proof) for seed in range(8, 24))])
def test_a_damaged_file_is_reported_in_a_line(here: Path, seed: int) -> None:
    assert damaged_once(here, random.Random(seed)) == []


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(1000, 1500))
def test_a_damaged_file_is_reported_in_a_line_at_length(here: Path, seed: int) -> None:
    assert damaged_once(here, random.Random(seed)) == []
