"""Submitted code is what runs: the files that a spec refers to, their digest, and their snapshot."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import make_runs
import pytest
from make_results import make_inspection
from make_runs import FakeLauncher

from tula_cli.errors import SpecError, TulaError
from tula_cli.run import code as run_code
from tula_cli.run import code_selection, imports, messages
from tula_cli.run import code_selection as git_state
from tula_cli.run.code import make_runs_of_job
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.records.tasks import ProbeTask, TrainTask
from tula_cli.services import profile, profile_plan, train
from tula_cli.services.plans import TrainPlan
from tula_cli.spec.job import JobSpec


def write(folder: Path, **files: str) -> None:
    """Write python files; `a__b` is a/b.py."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/').replace('/init', '/__init__')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def job(model: str = "mine:Net", **changes: object) -> JobSpec:
    return make_runs.spec(model={"name": model}, **changes)


def names(spec: JobSpec, workdir: Path, *path: str) -> list[str]:
    return [file.relative_to(workdir).as_posix() for file in imports.list_files_of_imports(spec, workdir, path=path)]


# --- which files


def test_all_parts_of_a_spec_that_can_name_code_are_followed(here: Path) -> None:
    write(here, mine="", data="", crops="", wipes="", losses="", optimizers="", unrelated="")
    spec = job(
        dataset={"name": "data:Digits"},
        transforms={"train": ["crops:Crop", {"wipes:Wipe": {"p": 1}}], "eval": ["ToTensor"]},
        loss={"name": "losses:focal"},
        optimizer={"name": "optimizers:Lion", "lr": 0.1},
    )
    assert names(spec, here) == ["crops.py", "data.py", "losses.py", "mine.py", "optimizers.py", "wipes.py"]


def test_a_spec_of_built_in_names_leads_to_no_code(here: Path) -> None:
    write(here, resnet18="", digits="")
    assert imports.list_files_of_imports(make_runs.spec(), here) == ()
    assert run_code.compute_code_digest(make_runs.spec(), here) == ""


@pytest.mark.parametrize(
    "statement",
    [
        "import blocks.conv",
        "import torch, blocks.conv as c",
        "from blocks import conv",
        "from blocks.conv import Conv",
        "def build():\n    if True:\n        import blocks.conv",
        "import importlib\nimportlib.import_module('blocks.conv')",
    ],
)
def test_every_form_of_import_is_followed(here: Path, statement: str) -> None:
    write(here, mine=statement, blocks__init="", blocks__conv="", blocks__other="")
    assert names(job(), here) == ["blocks/__init__.py", "blocks/conv.py", "mine.py"]


@pytest.mark.parametrize(
    "statement",
    [
        "from . import sub",
        "from .sub import x",
        "from .. import top",
        "from ..top import x",
        "from ..inner.sub import x",
    ],
)
def test_relative_imports_are_followed(here: Path, statement: str) -> None:
    write(here, pack__init="", pack__top="", pack__inner__init="", pack__inner__sub="", pack__inner__net=statement)
    expected = "pack/top.py" if "top" in statement else "pack/inner/sub.py"
    always = {"pack/__init__.py", "pack/inner/__init__.py", "pack/inner/net.py"}
    assert set(names(job("pack.inner.net:Net"), here)) == {*always, expected}


def test_a_package_that_is_named_itself_is_followed_from_its_init(here: Path) -> None:
    write(here, pack__init="from .net import Net", pack__net="from . import blocks", pack__blocks="", pack__tests="")
    assert names(job("pack:Net"), here) == ["pack/__init__.py", "pack/blocks.py", "pack/net.py"]


def test_cycles_end(here: Path) -> None:
    write(here, mine="import other", other="import mine")
    assert names(job(), here) == ["mine.py", "other.py"]


@pytest.mark.parametrize("text", ["import other\ndef (", "import other\n\0", "# coding: martian\nimport other"])
def test_a_file_that_does_not_parse_is_kept_and_not_followed(here: Path, text: str) -> None:
    write(here, mine=text, other="")
    assert names(job(), here) == ["mine.py"]


def test_folders_without_init_are_packages_too(here: Path) -> None:
    write(here, space__net="from . import blocks\nimport space.deep.more", space__blocks="", space__deep__more="")
    assert names(job("space.net:Net"), here) == ["space/blocks.py", "space/deep/more.py", "space/net.py"]


def test_a_module_wins_over_a_folder_without_init_and_loses_to_a_package(here: Path) -> None:
    write(here, mine="", mine__data="", net="", net__init="")
    assert names(job("mine:Net"), here) == ["mine.py"]
    assert names(job("net:Net"), here) == ["net/__init__.py"]


def test_a_src_folder_counts_where_python_looks_into_it(here: Path) -> None:
    write(here, src__pack__init="", src__pack__net="import helper", src__helper="")
    assert names(job("pack.net:Net"), here) == []
    assert names(job("pack.net:Net"), here, str(here / "src")) == [
        "src/helper.py", "src/pack/__init__.py", "src/pack/net.py",
    ]  # fmt: skip
    assert names(job("pack.net:Net"), here, "src") == names(job("pack.net:Net"), here, str(here / "src"))


def test_what_lies_elsewhere_is_not_the_users_own(here: Path) -> None:
    write(here.parent, outside="")
    write(here / "env", lib__installed="")
    write(here / "env" / "lib" / "site-packages", dep="")
    write(here / ".hidden", secret="")
    (here / "env" / "pyvenv.cfg").touch()
    write(here, mine="import outside, dep, secret, env.lib.installed, tula_cli.spec.sections, os, json")
    path = [
        str(here.parent),
        str(here / "env" / "lib" / "site-packages"),
        str(here / "env" / "lib"),
        str(here / ".hidden"),
    ]
    assert names(job(), here, *path) == ["mine.py"]


def test_an_interpreter_below_the_workdir_is_not_the_users_code(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(here, mine="import json")
    write(here / "python" / "lib", json="")
    library = str(here / "python" / "lib")
    assert names(job(), here, library) == ["mine.py", "python/lib/json.py"]
    monkeypatch.setattr(sys, "base_prefix", str(here / "python"))
    assert names(job(), here, library) == ["mine.py"]


def test_tula_itself_is_not_the_users_code(here: Path) -> None:
    checkout = Path(imports.__file__).parents[1]
    assert imports.list_files_of_imports(job("tula_cli.spec.sections:JobSpec"), checkout, path=[]) == ()


def test_earlier_runs_are_not_the_users_code(here: Path) -> None:
    write(here, mine="import runs.old")
    write(here / "runs", old="")
    assert names(job(), here) == ["mine.py", "runs/old.py"]
    RunDir.create(here / "runs", job())
    assert names(job(), here) == ["mine.py"]


# --- the digest


def test_the_digest_tells_contents_names_and_nothing_else(here: Path) -> None:
    write(here, mine="import other", other="x = 1")
    first = run_code.compute_code_digest(job(), here)
    assert len(first) == 8
    write(here, unrelated="y = 1")
    os.utime(here / "mine.py", (0, 0))
    assert run_code.compute_code_digest(job(), here) == first
    write(here, other="x = 2")
    edited = run_code.compute_code_digest(job(), here)
    write(here, other="x = 1")
    assert run_code.compute_code_digest(job(), here) == first
    (here / "other.py").rename(here / "moved.py")
    write(here, mine="import moved")
    assert len({first, edited, run_code.compute_code_digest(job(), here)}) == 3


def test_the_digest_does_not_depend_on_where_the_folder_is(tmp_path: Path) -> None:
    for place in ("one", "two"):
        write(tmp_path / place, mine="x = 1")
    assert run_code.compute_code_digest(job(), tmp_path / "one") == run_code.compute_code_digest(
        job(), tmp_path / "two"
    )


def test_contents_cannot_pass_for_another_file(tmp_path: Path) -> None:
    write(tmp_path, a="b.py\0c")
    digest = imports.compute_digest_of_files([tmp_path / "a.py"], tmp_path)
    write(tmp_path, a="", b="c")
    assert imports.compute_digest_of_files([tmp_path / "a.py", tmp_path / "b.py"], tmp_path) != digest


def test_a_file_that_cannot_be_read_is_named(here: Path) -> None:
    (here / "mine.py").symlink_to("/proc/self/mem")  # whose first page nobody can read, root neither
    with pytest.raises(SpecError, match=r"cannot read .*mine\.py: Input/output error"):
        run_code.compute_code_digest(job(), here)


# --- the snapshot


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs", job())


def take(run: RunDir, spec: JobSpec, workdir: Path) -> str:
    return run_code.take_snapshot(run, spec, run_code.choose_code(None, spec, workdir, keep=True))


def copied(run: RunDir, name: str) -> set[str]:
    """Return the files of a snapshot that are copies, not links."""
    home = run.get_code_dir(name)
    files = {path for path in home.rglob("*") if path.is_file() and not path.is_symlink()}
    return {path.relative_to(home).as_posix() for path in files if not any(p.is_symlink() for p in path.parents)}


def test_a_snapshot_keeps_what_was_there(here: Path, run: RunDir) -> None:
    write(here, mine="import pack", pack__init="x = 1", unrelated="")
    name = take(run, job(), here)
    write(here, pack__init="x = 2")
    home = run.get_code_dir(name)
    assert copied(run, name) == {"mine.py", "pack/__init__.py"}
    assert (home / "pack" / "__init__.py").read_text() == "x = 1"
    result = run.read_code(name)
    assert result is not None
    assert (result.name, result.workdir, result.roots) == (name, str(here), (".",))
    assert result.modules == result.files == ("mine.py", "pack/__init__.py")


def test_the_same_code_is_copied_once_and_edited_code_beside_it(here: Path, run: RunDir) -> None:
    write(here, mine="x = 1")
    first = take(run, job(), here)
    made = run.get_code_dir(first).stat().st_ino
    assert take(run, job(), here) == first
    assert run.get_code_dir(first).stat().st_ino == made
    write(here, mine="x = 2")
    second = take(run, job(), here)
    assert (run.get_code_dir(first) / "mine.py").read_text() == "x = 1"
    assert (run.get_code_dir(second) / "mine.py").read_text() == "x = 2"
    assert {path.name for path in (run.path / "code").iterdir()} == {
        first, f"{first}.json", second, f"{second}.json",
    }  # fmt: skip


def test_a_package_comes_with_its_other_files_which_do_not_count_in_the_digest(here: Path, run: RunDir) -> None:
    write(here, pack__init="", pack__net="", pack__lazy="", pack__sub__more="")
    (here / "pack" / "labels.txt").write_text("cat")
    (here / "pack" / "__pycache__").mkdir()
    (here / "pack" / "__pycache__" / "net.pyc").touch()
    (here / "pack" / ".secret").touch()
    digest, name = run_code.compute_code_digest(job("pack.net:Net"), here), take(run, job("pack.net:Net"), here)
    assert copied(run, name) == {
        "pack/__init__.py", "pack/net.py", "pack/lazy.py", "pack/sub/more.py", "pack/labels.txt",
    }  # fmt: skip
    (here / "pack" / "labels.txt").write_text("dog")
    again = take(run, job("pack.net:Net"), here)
    assert again != name
    assert (run.get_code_dir(again) / "pack" / "labels.txt").read_text() == "dog"
    assert run_code.compute_code_digest(job("pack.net:Net"), here) == digest


def test_keys_in_a_package_are_neither_copied_nor_in_the_diff(here: Path, run: RunDir) -> None:
    write(here, pack__init="", pack__net="", pack__id_map="")
    keys = ["id_rsa", "tls.pem", "aws-Credentials.json", "prod.env", "_netrc"]
    hidden = [".env", ".netrc", ".ssh/config"]
    (here / "pack" / ".ssh").mkdir()
    for name in (*keys, *hidden, "labels.txt"):
        (here / "pack" / name).write_text("planted-before\n")
    git(here, "init", "-q")
    git(here, "add", ".")
    git(here, "commit", "-qm", "first")
    for name in (*keys, *hidden, "labels.txt"):
        (here / "pack" / name).write_text("planted-now\n")
    (here / "pack" / "labels.txt").write_text("cat\n")
    name = take(run, job("pack.net:Net"), here)
    assert copied(run, name) == {"pack/__init__.py", "pack/net.py", "pack/id_map.py", "pack/labels.txt"}
    assert all((run.get_code_dir(name) / "pack" / key).is_symlink() for key in keys), "code that reads them finds them"
    record = run.read_code(name)
    assert record is not None and "+cat" in record.diff
    assert "planted-now" not in record.diff
    written = [path for path in run.path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert not [path for path in written if b"planted-now" in path.read_bytes()]


def test_what_is_too_large_is_linked_and_told(here: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_selection, "MAX_FILE_BYTES", 1000)
    monkeypatch.setattr(code_selection, "MAX_TOTAL_BYTES", 2500)
    monkeypatch.setattr(code_selection, "MAX_ENTRIES", 20)
    write(here, pack__init="", pack__big="#" * 3000, mine="import pack.big")
    for number in range(4):
        (here / "pack" / f"data{number}.bin").write_bytes(bytes(900))
    (here / "pack" / "a_weights.bin").write_bytes(bytes(1001))
    for number in range(21):
        write(here / "pack" / "images", **{f"i{number}": ""})
    name = take(run, job(), here)
    assert copied(run, name) == {"mine.py", "pack/__init__.py", "pack/big.py", "pack/data0.bin", "pack/data1.bin"}
    home = run.get_code_dir(name)
    for remaining in ("data2.bin", "a_weights.bin", "images"):
        assert (home / "pack" / remaining).is_symlink()
        assert (home / "pack" / remaining).resolve() == (here / "pack" / remaining).resolve()
    (warning,) = run_code.choose_code(None, job(), here, keep=True).warnings
    assert warning.code == "files-too-large-to-copy"
    assert warning.values["paths"] == "pack/a_weights.bin, pack/data2.bin, pack/data3.bin and 1 more"


def test_data_beside_a_module_is_found_by_its_own_path(here: Path, run: RunDir) -> None:
    write(here, mine="")
    (here / "data").mkdir()
    (here / "data" / "x.txt").write_text("1")
    (here / ".venv").mkdir()
    RunDir.create(here / "tula-runs", job())
    home = run.get_code_dir(take(run, job(), here))
    assert (home / "data" / "x.txt").read_text() == "1"
    assert {path.name for path in home.iterdir()} == {"mine.py", "data"}


def test_files_beside_the_code_that_are_too_many_to_link_are_reported(
    here: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_selection, "MAX_ENTRIES", 3)
    write(here, mine="", one="", two="")
    assert run_code.choose_code(None, job(), here, keep=True).warnings == ()
    write(here, three="")
    (warning,) = run_code.choose_code(None, job(), here, keep=True).warnings
    assert warning == messages.folder_with_many_files(paths=".", most=3, folder=str(here))
    assert [path.name for path in run.get_code_dir(take(run, job(), here)).iterdir()] == ["mine.py"]


def test_code_that_cannot_be_read_is_not_reported_as_too_large(
    here: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(here, mine="import pack", pack__init="", pack__other="")
    unreadable = {here, here / "pack" / "other.py"}
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) not in unreadable)
    scan = os.scandir

    def scan_readable(folder: Path) -> Any:
        if folder == here:
            raise PermissionError
        return scan(folder)

    monkeypatch.setattr(os, "scandir", scan_readable)
    (warning,) = run_code.choose_code(None, job(), here, keep=True).warnings
    assert warning == messages.code_unreadable(paths="., pack/other.py")


def test_code_that_changes_between_plan_and_submission_is_refused(here: Path, run: RunDir) -> None:
    write(here, mine="x = 1")
    planned = run_code.choose_code(None, job(), here, keep=True)
    write(here, mine="x = 2")
    with pytest.raises(TulaError, match="mine:Net changed while tula copied it"):
        run_code.take_snapshot(run, job(), planned)
    assert list((run.path / "code").iterdir()) == []


def test_a_crash_before_the_record_is_mended(here: Path, run: RunDir) -> None:
    write(here, mine="x = 1")
    name = take(run, job(), here)
    (run.path / "code" / f"{name}.json").unlink()
    assert take(run, job(), here) == name
    assert run.read_code(name) is not None


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


def test_git_tells_the_commit_and_what_differs_from_it(
    here: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(here.parent, "init", "-q")
    write(here, mine="x = 1\n", unrelated="y = 1\n")
    git(here.parent, "add", ".")
    git(here.parent, "commit", "-qm", "first")
    clean = run.read_code(take(run, job(), here))
    write(here, mine="x = 2\n", unrelated="password = 2\n")
    dirty = run.read_code(take(run, job(), here))
    assert clean is not None
    assert dirty is not None
    assert clean.commit == dirty.commit == git(here, "rev-parse", "HEAD").strip()
    assert (clean.dirty, clean.diff) == (False, "")
    assert dirty.dirty
    assert "-x = 1\n+x = 2\n" in dirty.diff
    assert "password" not in dirty.diff
    monkeypatch.setattr(git_state, "MAX_DIFF_CHARACTERS", 10)
    write(here, mine="x = 3\n")
    cut = run.read_code(take(run, job(), here))
    assert cut is not None
    assert len(cut.diff) < 100
    assert "cut" in cut.diff


def test_files_that_git_cannot_compare_with_the_commit_may_differ_from_it(
    here: Path, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(here.parent, "init", "-q")
    write(here, mine="x = 1\n")
    git(here.parent, "add", ".")
    git(here.parent, "commit", "-qm", "first")
    real = shutil.which("git")
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text(f'#!/bin/sh\ncase "$*" in *status*) exec sleep 60;; esac\nexec {real} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(git_state, "GIT_TIMEOUT", 0.5)
    result = run.read_code(take(run, job(), here))
    assert result is not None and result.commit and result.dirty
    assert result.diff.startswith(f"git could not compare the files with commit {result.commit}: ")


@pytest.mark.parametrize("path", ["", "/usr/bin:/bin"])
def test_without_git_or_a_repository_there_is_no_commit(
    here: Path, run: RunDir, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", path)
    write(here, mine="")
    result = run.read_code(take(run, job(), here))
    assert result is not None
    assert (result.commit, result.dirty, result.diff) == ("", False, "")


# --- what a submission runs


def submit(run: RunDir, spec: JobSpec, launcher: FakeLauncher) -> dict[str, ProbeTask]:
    """Profile; return the tasks."""
    profile.submit_probes(run, profile_plan.plan_probes(Run(run.path, spec), make_inspection()), launcher)
    return {task.id: task for task in run.read_tasks() if isinstance(task, ProbeTask)}


def plan_training(run: RunDir, spec: JobSpec) -> TrainPlan:
    return train.plan_training(Run(run.path, spec), nodes=1, batch=32, inspect=lambda _: make_inspection())


def test_tasks_name_the_snapshot(here: Path, run: RunDir) -> None:
    write(here, mine="x = 1")
    tasks = submit(run, job(), FakeLauncher())
    (name,) = {task.code for task in tasks.values()}
    assert (run.get_code_dir(name) / "mine.py").read_text() == "x = 1"
    planned = plan_training(run, job())
    train.submit_training(run, planned, FakeLauncher())
    task = run.read_task(planned.task.id)
    assert isinstance(task, TrainTask)
    assert (task.code, task.workdir) == (name, str(here))
    assert planned.code.warnings == ()


def test_a_spec_without_own_code_takes_no_snapshot(here: Path, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "runs", make_runs.spec())
    assert {task.code for task in submit(run, run.read_spec(), FakeLauncher()).values()} == {""}
    assert not (run.path / "code").exists()


def test_a_job_under_way_keeps_the_code_it_was_submitted_with(here: Path, run: RunDir) -> None:
    write(here, pack__init="x = 1", pack__lazy="x = 1")
    launcher = FakeLauncher()
    before = submit(run, job("pack:Net"), launcher)
    for edited in ("pack__lazy", "pack__init"):
        write(here, **{edited: "x = 2"})
        assert submit(run, job("pack:Net"), launcher) == before
        assert len(list((run.path / "code").glob("*.json"))) == 1


def test_a_run_is_measured_to_its_end_with_the_code_it_began_with(here: Path, run: RunDir) -> None:
    write(here, mine="x = 1")
    launcher = FakeLauncher()
    before = submit(run, job(), launcher)
    launcher.says = dict.fromkeys(launcher.says, "ended")
    write(here, mine="x = 2")
    (warning,) = profile_plan.plan_probes(Run(run.path, job()), make_inspection()).code.warnings
    assert warning == messages.earlier_code_used(
        code="the code of mine:Net", run=run.id, missing_from=None, files=["mine.py changed"]
    )
    assert submit(run, job(), launcher) == before


def test_training_takes_the_code_that_is_there_now_and_says_so(here: Path, run: RunDir) -> None:
    write(here, mine="x = 1")
    submit(run, job(), FakeLauncher())
    before = plan_training(run, job())
    write(here, mine="x = 2")
    now = plan_training(run, job())
    assert now.task.signature != before.task.signature
    (warning,) = now.code.warnings
    assert warning == messages.code_changed_since_measurement(
        code="the code of mine:Net", run=run.id, files=["mine.py changed"]
    )
    train.submit_training(run, now, FakeLauncher())
    task = run.read_task(now.task.id)
    assert isinstance(task, TrainTask)
    assert (run.get_code_dir(task.code) / "mine.py").read_text() == "x = 2"


def test_training_never_goes_on_from_a_checkpoint_of_other_code_and_says_so(here: Path, run: RunDir) -> None:
    write(here, mine="x = 1")
    before = plan_training(run, job())
    train.submit_training(run, before, FakeLauncher())
    checkpoint = run.get_training(before.task.signature).get_checkpoint_path(640)
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    assert plan_training(run, job()).resumes == 640
    write(here, mine="x = 2")
    now = plan_training(run, job())
    assert now.resumes is None
    (warning,) = now.code.warnings
    assert warning.code == "earlier-training-unfinished"
    assert (warning.values["training"], warning.values["samples"]) == (before.task.signature, 640)
    write(here, mine="x = 1")
    assert plan_training(run, job()).resumes == 640


def test_elsewhere_the_runs_own_code_and_folder_are_used(
    here: Path, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(here, mine="x = 1")
    (task, *_) = submit(run, job(), FakeLauncher()).values()
    there = plan_training(run, job())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    planned = plan_training(run, job())
    assert planned.task == there.task
    assert planned.task.workdir == str(here)
    assert planned.code.kept == task.code
    assert planned.code.warnings[0].values["missing_from"] == str(tmp_path / "elsewhere")


def test_code_that_has_become_an_installed_package_is_trained_as_it_is_installed(here: Path, run: RunDir) -> None:
    write(here, json="")  # found elsewhere too
    submit(run, job("json:Net"), FakeLauncher())
    (here / "json.py").unlink()
    planned = plan_training(run, job("json:Net"))
    assert (planned.code.kept, planned.code.digest) == ("", "")


def test_other_runs_of_the_same_job_are_those_with_other_code(here: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    old = RunDir.create(root, job(), code="11111111")
    RunDir.create(root, job("mine:Other"), code="11111111")
    damaged = RunDir.create(root, job("mine:Third"))
    (damaged.path / "spec.yaml").write_text("{")
    new = RunDir.create(root, job(), code="22222222")
    assert [other.id for other in run_code.list_runs_with_other_code(new)] == [old.id]
    plain = RunDir.create(root, make_runs.spec())
    RunDir.create(root, make_runs.spec(), code="11111111")
    assert run_code.list_runs_with_other_code(plain.with_spec(make_runs.spec())) == [], (
        "a job that names no code has none that changes"
    )


def test_the_run_of_a_job_is_that_of_its_code_as_it_is_now(here: Path) -> None:
    root = Path("tula-runs")  # as a command is given it
    write(here, mine="x = 1")
    (first,) = make_runs_of_job(root, job())
    assert first.path.is_absolute() and first.path == make_runs_of_job(root, job())[0].path
    write(here, mine="x = 2")
    assert make_runs_of_job(root, job())[0].id != first.id
    assert make_runs_of_job(root, make_runs.spec())[0].path == RunDir.from_spec(root.absolute(), make_runs.spec()).path
    assert not root.exists()


# --- what runs

ENTER = """
import importlib.util, json, multiprocessing, sys
from pathlib import Path
from tula_cli.run.directory import Run, RunDir
from tula_cli.worker.__main__ import change_to_job_folder
from tula_cli.plugins import load_named_object

def look(queue):
    import mine, pack.lazy, late
    queue.put([mine.VALUE, mine.helper.VALUE, pack.lazy.VALUE, late.VALUE])

if __name__ == "__main__":
    run = RunDir(Path(sys.argv[1]))
    change_to_job_folder(run.read_task(sys.argv[2]), run)
    answer = {"model": load_named_object("mine:VALUE", {}, kind="model"), "cwd": str(Path.cwd())}
    answer["far"] = importlib.util.find_spec("far") is not None
    answer["data"] = Path("data/x.txt").read_text()
    for method in sys.argv[3:]:
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=look, args=(queue,))
        child.start()
        answer[method] = queue.get(timeout=60)
        child.join()
    print(json.dumps(answer))
"""


def entered(run: RunDir, task: ProbeTask, script: Path, *methods: str, **environ: str) -> dict[str, object]:
    """Enter a task as a rank does, in a process that is started as the supervisor starts it."""
    import json

    root = str(Path(imports.__file__).parents[1])
    inherited = environ.get("PYTHONPATH")
    done = subprocess.run(
        [sys.executable, "-m", script.stem, str(run.path), task.id, *methods],
        cwd=run.get_code_dir(task.code),
        env={
            **os.environ,
            **environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [inherited, root, str(script.parent)])),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    data: dict[str, object] = json.loads(done.stdout)
    return data


@pytest.fixture
def submitted(here: Path, run: RunDir, tmp_path: Path) -> tuple[ProbeTask, Path]:
    """A task whose code was edited after its submission, and a program that enters it."""
    write(
        here,
        mine="import helper\nVALUE = 1",
        helper="VALUE = 1",
        pack__init="",
        pack__lazy="VALUE = 1",
        late="VALUE = 1",
    )
    write(here, mine="import helper, pack\nVALUE = 1")
    (here / "data").mkdir()
    (here / "data" / "x.txt").write_text("relative to the workdir")
    task = next(iter(submit(run, job(), FakeLauncher()).values()))
    edited = "VALUE = 2"
    write(here, mine=f"import helper, pack\n{edited}", helper=edited, pack__init="", pack__lazy=edited, late=edited)
    (tmp_path / "programs").mkdir()
    script = tmp_path / "programs" / "rank_program.py"
    script.write_text(ENTER)
    return task, script


@pytest.mark.parametrize("python_path", ["", ".", "../lib"])
def test_an_edit_after_submission_changes_nothing_but_what_no_statement_leads_to(
    here: Path, run: RunDir, submitted: tuple[ProbeTask, Path], python_path: str
) -> None:
    task, script = submitted
    write(here.parent / "lib", far="")
    answer = entered(run, task, script, "fork", "spawn", "forkserver", PYTHONPATH=python_path)
    assert answer == {
        "model": 1,
        "cwd": str(here),
        "far": "lib" in python_path,  # relative to the workdir, though the process starts in the snapshot
        "data": "relative to the workdir",
        # mine, helper and the package's module are the submitted ones; `late` is imported by nobody we can see.
        **{method: [1, 1, 1, 2] for method in ("fork", "spawn", "forkserver")},
    }


def test_the_workdir_in_front_of_the_path_does_not_win(
    here: Path, run: RunDir, submitted: tuple[ProbeTask, Path]
) -> None:
    task, script = submitted
    answer = entered(run, task, script, "spawn", PYTHONPATH=str(here), PYTHONSAFEPATH="1")
    assert (answer["model"], answer["spawn"]) == (1, [1, 1, 1, 2])


def test_a_src_folder_is_taken_from_the_snapshot(
    here: Path, run: RunDir, submitted: tuple[ProbeTask, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, script = submitted
    for name in ("mine.py", "helper.py", "late.py"):
        (here / name).unlink()
    write(here, src__mine="import helper, pack\nVALUE = 3", src__helper="VALUE = 3", src__late="VALUE = 3")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(here / "src"))
        task = next(iter(submit(RunDir.create(run.path.parent, job(), code="x"), job(), FakeLauncher()).values()))
        run = RunDir.from_spec(run.path.parent, job(), code="x")
    write(here, src__mine="import helper, pack\nVALUE = 4", src__helper="VALUE = 4", src__late="VALUE = 4")
    result = run.read_code(task.code)
    assert result is not None
    assert result.roots == (".", "src")
    for python_path in (str(here / "src"), "src"):
        answer = entered(run, task, script, "spawn", PYTHONPATH=python_path)
        assert (answer["model"], answer["spawn"]) == (3, [3, 3, 2, 4])


OWN = """
import torch
from pathlib import Path
import helper

class Data(torch.utils.data.Dataset):
    classes = ("a", "b")

    def __init__(self, train, transform):
        assert Path("data/x.txt").read_text() == "relative to the workdir"

    def __len__(self):
        return 32

    def __getitem__(self, index):
        print(f"item by {helper.VERSION}", flush=True)
        return torch.full((1, 2, 2), float(index)), index % 2

def net(num_classes):
    print(f"net by {helper.VERSION}", flush=True)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, num_classes))
"""


@pytest.mark.torch
def test_ranks_and_their_loaders_run_what_was_submitted(here: Path, tmp_path: Path) -> None:
    write(here, mine=OWN, helper="VERSION = 'submitted'")
    (here / "data").mkdir()
    (here / "data" / "x.txt").write_text("relative to the workdir")
    spec = job(
        "mine:net",
        dataset={"name": "mine:Data"},
        train={"epochs": 1, "workers": 1, "method": "lbt"},
        cluster={"device": "cpu"},
    )
    run = RunDir.create(tmp_path / "runs", spec)
    planned = plan_training(run, spec)
    train.submit_training(run, planned, FakeLauncher())
    write(here, mine="raise SystemExit('edited')", helper="VERSION = 'edited'")
    task = run.read_task(planned.task.id)
    assert isinstance(task, TrainTask)
    root = str(Path(imports.__file__).parents[1])
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1",
            "-m", "tula_cli.worker", str(run.path), task.id, "1",
        ],
        cwd=run.get_code_dir(task.code),
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert run.get_training(task.signature).read_result() is not None
    assert {line for line in done.stdout.splitlines() if " by " in line} == {"item by submitted", "net by submitted"}
    (environment,) = (row for row in run.get_training(task.signature).read_metrics() if row["kind"] == "environment")
    assert environment["hosts"] == [os.uname().nodename]
    assert environment["variables"]["OMP_NUM_THREADS"] == "1"
    assert not {name for name in environment["variables"] if name in ("PATH", "HOME", "PYTHONPATH")}


def test_a_snapshot_that_is_gone_is_said_so(run: RunDir, submitted: tuple[ProbeTask, Path]) -> None:
    task, script = submitted
    (run.path / "code" / f"{task.code}.json").unlink()
    with pytest.raises(AssertionError, match="the snapshot of the submitted code is missing"):
        entered(run, task, script)
