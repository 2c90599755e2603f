"""The report of an export while W&B is offline: files in a folder, from which nothing has been sent."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from isolation import isolate_environment
from make_runs import spec as toy_spec

import tula_cli as tula
from tula_cli.cli import app
from tula_cli.run.directory import RunDir
from tula_cli.show.screen import Screen


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answers of exports of one run to W&B without an address: on the screen, of the folder named, as JSON, in Python."""
    folder = tmp_path_factory.mktemp("wandb")
    run = RunDir.create(folder / "tula-runs", toy_spec())

    def shown(*words: str) -> str:
        screen = Screen(out=io.StringIO(), err=io.StringIO())
        assert app.run(["export", str(run.path), "--to", "wandb", *words], screen=screen) == 0, screen.err.getvalue()
        return str(screen.out.getvalue())  # type: ignore[attr-defined]

    with pytest.MonkeyPatch.context() as patch:
        isolate_environment(patch, folder)
        return {
            "default": shown(),
            "folder": shown("--uri", str(folder / "mine")),
            "again": shown("--uri", str(folder / "mine")),
            "json": json.loads(shown("--json"))["data"],
            "python": tula.export(run.path, "wandb"),
        }


@pytest.mark.parametrize("name", ["default", "folder", "again"])
def test_nothing_is_reported_as_sent_while_wandb_is_offline(answers: dict[str, Any], name: str) -> None:
    text = answers[name]
    assert "wandb sync" in text, "it has what uploads the folder"
    assert re.findall(r"(?<!not )(?<!nothing )\bsent\b|stored there", text) == []


def test_json_has_that_wandb_was_offline(answers: dict[str, Any]) -> None:
    assert [row.get("offline") for row in answers["json"]] == [True]


def test_python_has_that_wandb_was_offline(answers: dict[str, Any]) -> None:
    assert [getattr(answer, "offline", None) for answer in answers["python"]] == [True]


def test_the_files_that_wandb_sync_uploads_are_there(answers: dict[str, Any]) -> None:
    folder = re.search(r"wandb sync (\S+)/offline-run-\*", answers["folder"].replace("\n", ""))
    assert folder is not None and list(Path(folder[1]).glob("offline-run-*/*.wandb"))
