import io
import json
import shutil

import make_runs as make
import pytest
from isolation import isolate_environment

from tula_cli.cli import app
from tula_cli.run.directory import RunDir
from tula_cli.show.screen import Screen


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    isolate_environment(monkeypatch, tmp_path)
    return tmp_path


def tula(*words):
    screen = Screen(out=io.StringIO(), err=io.StringIO())
    code = app.run(words, screen=screen)
    return code, screen.out.getvalue(), screen.err.getvalue()


def test_runs_are_named_by_folder_or_by_name_and_a_difference_is_no_failure(here):
    run = RunDir.create(here / "tula-runs", make.spec())
    make.add_measured(run, 1, 64)
    shutil.copytree(run.path, here / "copy")
    make.add_measured(RunDir.open(here / "copy"), 2, 64)
    make.add_out_of_memory(RunDir.open(here / "copy"), 1, 64)
    code, out, _ = tula("diff", run.id, "copy")
    assert code == 0 and "measured -> out of memory" in out and "1 configuration only in B" in out
    data = json.loads(tula("diff", "copy", run.id, "--json")[1])["data"]
    assert (data["before"]["path"], data["steps"]["only"]) == (str(here / "copy"), [1, 0])
    assert data["steps"]["rows"][0]["outcomes"] == ["out_of_memory", "measured"]


def test_what_is_no_pair_of_runs_is_refused(here):
    run = RunDir.create(here / "tula-runs", make.spec())
    for words, message in (
        ((run.id, run.id), "are the same run"),
        ((run.id, "nope"), "there is no run"),
        ((run.id,), "RUN_B"),
    ):
        code, _, err = tula("diff", *words)
        assert code == 2 and message in err


def test_the_newest_run_twice_is_refused(here):
    RunDir.create(here / "tula-runs", make.spec())
    code, _, err = tula("diff", "latest", "latest")
    assert code == 2 and "are the same run" in err
