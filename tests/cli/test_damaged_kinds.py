"""Every kind of file of a run x every damage x the commands that read it: each names the file, and shows the rest."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import make_runs as make
import pytest
from isolation import isolate_environment
from make_damages import (
    NEWER_CHECKPOINT,
    OLDER_CHECKPOINT,
    PROBE,
    SIGNATURE,
    TRAINING,
    join_lines,
    replace_by_folder,
    run_tula,
    truncate_to_half,
    write_whole_run,
)
from make_results import make_inspection

from tula_cli.cluster import inspection
from tula_cli.cluster import launcher as cluster_launcher
from tula_cli.errors import BadMeasurements
from tula_cli.run.directory import RunDir
from tula_cli.run.records.failures import Failure
from tula_cli.run.records.results import JobFile, RateSearch

RATES = "rates/00.json"
FAILURE = f"failures/train-{SIGNATURE}-1.001.0000.json"
KINDS = (
    "spec.yaml", "job_file.json", PROBE, "recommendation.json", "comparison.json", "jobs/probe-n001.json", "tasks/probe-n001.json",
    f"tasks/train-{SIGNATURE}-1.json", f"attempts/train-{SIGNATURE}-1.001.json", FAILURE, f"{TRAINING}/result.json",
    f"{TRAINING}/summary.json", f"{TRAINING}/tuning.json", f"{TRAINING}/energy.json", f"{TRAINING}/saves.json", f"{TRAINING}/evaluations/00.json",
)  # fmt: skip
"""The kinds of files that one command may miss while it shows the others."""
UNNAMED = ("spec.json", "latest", f"logs/train-{SIGNATURE}-1.001.log")
"""Files that another one stands in for, or that are text for people: their damage costs nothing and is not reported."""
ALL_SHOWN = ("status", "recommend", "profile --dry-run", "report --markdown", "list")
"""Commands that work whatever single file is damaged."""
OTHERS = (
    "logs", "diff", "cancel", "train --dry-run --nodes 2 --batch 128", "compare --show", "evaluate --dry-run", "clean --dry-run",
)  # fmt: skip
"""Commands that may need the file: the error then names it."""
LISTED = (PROBE, "recommendation.json", "jobs/probe-n001.json", f"{TRAINING}/result.json")
"""Kinds of which `tula list` reads something."""


def content(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(change(path.read_bytes())) and None


def unreadable(path: Path) -> None:
    """Mark a file as unreadable: a test may run as root, who may read everything."""
    UNREADABLE.add(str(path))


UNREADABLE: set[str] = set()
DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut": content(lambda text: text[: len(text) // 2]),
    "empty": content(lambda _: b""),
    "zeroed": content(lambda text: bytes(len(text))),
    "no text": content(lambda text: b"\xff\xfe" + text),
    "another type": content(lambda _: b"[]\n"),
    "no fields": content(lambda _: b"{}\n"),
    "unreadable": unreadable,
    "a folder": lambda path: replace_by_folder(path.name)(path.parent),
}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with every kind of file."""
    root = tmp_path_factory.mktemp("intact")
    run = write_whole_run(root / "tula-runs")
    run.save_job(run.read_spec(), JobFile(path=str(root / "job.yaml")))
    run.write_failure(Failure(task=f"train-{SIGNATURE}-1", attempt=1, rank=0, outcome="user", message="ValueError", failed_at=make.START))  # fmt: skip
    log = run.get_log_path(f"train-{SIGNATURE}-1", 1)
    log.parent.mkdir()
    log.write_text("epoch 1\n")
    return root


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    isolate_environment(monkeypatch, tmp_path)
    known = make_inspection(dataset_size=300, eval_size=50, parameters=1000, hardware="cpu")
    monkeypatch.setattr(inspection, "inspect", lambda spec: known)
    monkeypatch.setattr(cluster_launcher, "make_launcher", lambda spec, submits=True: make.FakeLauncher())
    opened = os.open

    def open_readable(path: object, *args: int, **options: int | None) -> int:
        if str(path) in UNREADABLE:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", open_readable)
    yield tmp_path
    UNREADABLE.clear()


def lay_out(intact: Path, folder: Path) -> RunDir:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(intact, folder, symlinks=True)
    UNREADABLE.clear()
    os.chdir(folder)
    (path,) = (folder / "tula-runs").glob("toy-*")
    return RunDir(path)


def run_command(intact: Path, run: RunDir, command: str) -> tuple[int, str, str]:
    name, *options = command.split()
    (other,) = (intact / "tula-runs").glob("toy-*")
    about = {"list": [], "diff": [str(run.path), str(other)], "clean": [str(run.path)]}
    return run_tula(name, *options, *about.get(name, ["--run", str(run.path)]))


def read_files(run: RunDir) -> dict[str, bytes]:
    return {str(path.relative_to(run.path)): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


DERIVED = ("recommendation.json", "recommended.yaml", "results.csv", "spec.yaml", "spec.json", "job_file.json", "news")
"""Files that `tula recommend` may write."""


@pytest.mark.promise(
    "the run directory",
    "one file is damaged, unreadable or a folder",
    "`status`, `list`, `recommend`, `profile` and `report` name the file and show the rest; other commands may stop with an error"
    " that names it; no advice deletes anything measured",
)
@pytest.mark.parametrize("kind", KINDS)
def test_one_damaged_file_keeps_no_command_from_the_others(intact: Path, here: Path, kind: str) -> None:
    damages, start = list(DAMAGES), KINDS.index(kind)
    for number, command in enumerate((*ALL_SHOWN, *OTHERS)):
        damage = damages[(start + number) % len(damages)]
        if kind == "spec.yaml" and damage in (
            "another type",
            "no fields",
            "a folder",
        ):  # an edit, and no run: see test_parsed_spec.py
            damage = "cut"
        run = lay_out(intact, here / "work")
        DAMAGES[damage](run.path / kind)
        before = read_files(run)
        code, out, err = run_command(intact, run, command)
        case = (command, damage, code, err)
        path, text = str(run.path / kind), join_lines(err)
        refuses = command == "profile --dry-run" and kind == PROBE and damage == "unreadable"  # it might be intact
        if command in ALL_SHOWN and not refuses:
            assert code == 0 and out, case
        if code or refuses:
            assert code in (4, 75) and path in text and ("HINT:" in text or command.startswith("clean")), case
        elif command == "list":
            assert (path in join_lines(out)) == (kind in LISTED), case
        elif command in ALL_SHOWN and kind.startswith(TRAINING) is False:
            assert path in text, case
        assert not re.search(r"\b([Dd]elete|[Rr]emove|rm) ", text) or kind.startswith("jobs/"), case
        after = read_files(run)
        assert {name for name in before if before[name] != after.get(name)} <= set(DERIVED), case


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_of_every_kind_is_named_with_what_to_do(intact: Path, here: Path, damage: str) -> None:
    for kind in KINDS:
        if kind == "spec.yaml" and damage in ("another type", "no fields", "a folder"):
            continue
        run = lay_out(intact, here / "work")
        if damage == "no fields" and kind.endswith("saves.json"):  # all its fields have defaults
            continue
        DAMAGES[damage](run.path / kind)
        (warning,) = [text.text for text in run.read_snapshot().damage_warnings if str(run.path / kind) in text.text]
        assert "so " in warning and warning.endswith("."), (kind, warning)
        assert any(word in warning for word in ("writes it again", "measures it again", "Restore", "chmod", "cancel the job")), (kind, warning)  # fmt: skip


@pytest.mark.parametrize("kind", UNNAMED)
@pytest.mark.parametrize("damage", ["cut", "empty", "no text"])
def test_a_file_that_another_stands_in_for_costs_nothing(intact: Path, here: Path, kind: str, damage: str) -> None:
    run = lay_out(intact, here / "work")
    DAMAGES[damage](run.path.parent / kind if kind == "latest" else run.path / kind)
    for command in ("status", "logs"):
        assert run_command(intact, run, command)[0] == 0
        assert run_tula(command)[0] == 0


LATER = {
    PROBE: ("kind", "estimated"),
    "recommendation.json": ("objective", "happiness"),
    f"attempts/train-{SIGNATURE}-1.001.json": ("failure", {"outcome": "teleported", "message": "", "failed_at": 1.0}),
    f"tasks/train-{SIGNATURE}-1.json": ("kind", "dream"),
}


@pytest.mark.promise(
    "the run directory",
    "a file has a value that only a later version knows",
    "the file counts as unreadable, is not replaced, and the advice is to use that version",
)
@pytest.mark.parametrize("kind", LATER)
def test_a_value_of_a_later_version_is_no_damage(intact: Path, here: Path, kind: str) -> None:
    run = lay_out(intact, here / "work")
    key, value = LATER[kind]
    record = json.loads((run.path / kind).read_text())
    (run.path / kind).write_text(json.dumps({**record, key: value, "of_a_later_version": 1}))
    for command in ("status", "report --markdown"):
        code, out, err = run_command(intact, run, command)
        text = join_lines(err)
        assert code == 0 and out and str(run.path / kind) in text, (command, err)
        assert "does not know" in text and "Use the version of tula that wrote this file" in text, (command, err)
    assert run_command(intact, run, "profile --dry-run")[0] == (4 if kind == PROBE else 0)


def test_a_plan_that_minimises_what_only_a_later_version_knows_is_named(intact: Path, here: Path) -> None:
    run = lay_out(intact, here / "work")
    assert run_command(intact, run, "recommend --trainings 2 --save")[0] == 0
    path = run.path / "trainings.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "minimises": "happiness"}))
    code, _, err = run_command(intact, run, "train --seeds 2 --dry-run")
    assert code == 4 and f"{path} contains a value" in join_lines(err) and "'happiness' at minimises" in err
    path.write_text("{")
    code, _, err = run_command(intact, run, "train --seeds 2 --dry-run")
    assert code == 4 and str(path) in join_lines(err) and "tula recommend --trainings N --save" in join_lines(err)


def test_damaged_weights_are_not_submitted_for_evaluation(intact: Path, here: Path) -> None:
    run = lay_out(intact, here / "work")
    truncate_to_half(OLDER_CHECKPOINT)(run.path)
    code, _, err = run_command(intact, run, "evaluate")
    assert (
        code == 4
        and str(run.path / OLDER_CHECKPOINT) in join_lines(err)
        and f"--weights {run.path / NEWER_CHECKPOINT}" in join_lines(err)
    )
    assert not list(run.path.glob("tasks/evaluate-*"))


def test_a_damaged_search_for_a_learning_rate_is_named(intact: Path, here: Path) -> None:
    run = lay_out(intact, here / "work")
    run.write_rate_search(
        RateSearch(
            key="00", nodes=1, batches=(64,), reference_batch=32, samples=1, total=2, start_epoch=1, start_loss=1
        )
    )
    truncate_to_half(RATES)(run.path)
    with pytest.raises(BadMeasurements, match="is damaged") as caught:
        run.read_rate_search("00")
    assert str(run.path / RATES) in str(caught.value)
