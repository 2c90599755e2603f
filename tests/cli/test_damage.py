"""Whatever is damaged in a run is named with what follows from it: by `tula status`, with --json, and by what reads it."""

import json
import shutil
from pathlib import Path

import pytest
from make_damages import (
    DAMAGES,
    TRAINING,
    check_command,
    damage_sharded_checkpoint,
    join_lines,
    make_whole_run,
    run_tula,
)

from tula_cli.run.directory import RunDir


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    return make_whole_run(tmp_path, monkeypatch)


@pytest.mark.promise(
    "the run directory",
    "results, metrics or weights are damaged",
    "`tula status` and every command that reads them name the file and the consequence, and show the rest",
)
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_with_what_follows(run: RunDir, name: str) -> None:
    damage = DAMAGES[name]
    damage.edit(run.path)
    code, out, err = run_tula("status", "--run", str(run.path), "--json")
    assert code == 0, out
    warnings = json.loads(out)["warnings"]
    (warning,) = [text for text in warnings if str(run.path / damage.file) in text]
    assert [words for words in damage.words if words not in warning] == []
    assert join_lines(err).count(f"warning: {join_lines(warning)}") == 1
    for command in damage.commands:
        check_command(run, damage, *command.split())


def test_a_whole_run_has_no_such_warnings(run: RunDir) -> None:
    assert json.loads(run_tula("status", "--run", str(run.path), "--json")[1])["warnings"] == []
    damage_sharded_checkpoint(lambda _: None)(run.path)
    assert json.loads(run_tula("status", "--run", str(run.path), "--json")[1])["warnings"] == []
    shutil.rmtree(run.path / TRAINING / "checkpoints")
    for name in ("best", "last"):
        (run.path / TRAINING / name).unlink()
    assert json.loads(run_tula("status", "--run", str(run.path), "--json")[1])["warnings"] == []
