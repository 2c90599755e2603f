"""A script's code: which files are copied, which identify it, and what runs them from the snapshot."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tula_cli.errors import JobFailed, SpecError, TulaError
from tula_cli.run import code, code_selection, messages, script_files
from tula_cli.run import code_selection as git_files
from tula_cli.run.code import make_runs_of_job
from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import ProbeTask
from tula_cli.run.script_command import list_snapshot_python_path, move_command_to_snapshot
from tula_cli.run.script_files import select_script_files
from tula_cli.run.secrets import may_be_secret, redact_secrets
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate_job


def job(command: str = "train.py -b {local_batch}", **changes: object) -> JobSpec:
    script = {"command": command, "length": {"epochs": 1}, "reference": {"batch": 32}, **changes}
    return validate_job({"name": "toy", "script": script, "search": {"nodes": [1]}}, source="test")


def write(folder: Path, *files: str | dict[str, str]) -> None:
    """Write files by their paths: empty ones, or with a text."""
    for file in files:
        for name, text in (file if isinstance(file, dict) else {file: ""}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


def commit(folder: Path) -> None:
    """Make a folder a repository, with all that is in it."""
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs", job())


def list_copied_files(spec: JobSpec, workdir: Path, *path: str) -> list[str]:
    assert spec.script is not None
    result = select_script_files(spec.script, workdir, path=path)
    return sorted(file.relative_to(result.base).as_posix() for file in (*result.modules, *result.others))


def list_identifying_files(spec: JobSpec, workdir: Path, *path: str) -> list[str]:
    """Return the copied files that the digest covers."""
    assert spec.script is not None
    result = select_script_files(spec.script, workdir, path=path)
    return [file.relative_to(result.base).as_posix() for file in result.modules]


def take(run: RunDir, spec: JobSpec, workdir: Path) -> Path:
    """Take a snapshot; return its folder."""
    return run.get_code_dir(code.take_snapshot(run, spec, code.choose_code(None, spec, workdir, keep=True)))


# --- what is copied


def test_a_repository_is_copied_with_what_is_new_in_it_but_not_with_what_it_ignores(here: Path) -> None:
    write(here, "train.py", "pkg/model.py", "README.md", "conf/base.yaml", "data/labels.csv")
    write(here, "gone.py")
    commit(here)
    (here / "gone.py").unlink()
    (here / ".gitignore").write_text("big/\n*.log\n")
    write(here, "new.py", "notes.txt", "big/x.py", "train.log")
    (here / "weights.bin").write_bytes(b"\0\1")
    assert list_copied_files(job(), here) == [
        "README.md", "conf/base.yaml", "data/labels.csv", "new.py", "notes.txt", "pkg/model.py", "train.py",
    ]  # fmt: skip


def test_without_git_code_and_settings_below_the_script_are_copied(here: Path) -> None:
    write(here, "main/train.py", "main/deep/net.py", "main/a.yaml", "main/b.toml", "main/c.cfg")
    write(here, "main/run.sh", "main/log.json", "main/data.csv", "main/notes.md", "beside.py", "other/x.py")
    names = ("a.yaml", "b.toml", "c.cfg", "deep/net.py", "log.json", "run.sh", "train.py")
    assert list_copied_files(job("main/train.py {batch}"), here) == [f"main/{name}" for name in names]


def test_without_git_packages_that_the_script_imports_come_with_it(here: Path) -> None:
    write(here, "lib/block.py", "lib/more.py", {"main/train.py": "import lib.net", "lib/net.py": "from . import block"})
    assert list_copied_files(job("main/train.py {batch}"), here) == ["lib/block.py", "lib/net.py", "main/train.py"]


@pytest.mark.parametrize("with_git", [True, False])
def test_keys_caches_environments_and_runs_stay_where_they_are(here: Path, run: RunDir, with_git: bool) -> None:
    write(here, "train.py", "id_map.py", "env/lib/x.py")
    for name in ("env/pyvenv.cfg", "node_modules/x.json", "__pycache__/x.json", ".hidden/x.py", ".env", ".env.yaml"):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).touch()
    keys = [
        "id_rsa",
        "id_ed25519.json",
        "tls.pem",
        "tls.key",
        "gcp-Credentials.json",
        "aws_credentials.py",
        "gcp-key.json",
        "auth.json",
    ]
    keys += ["secrets.yaml", "token.txt", "kaggle.json", "service-account-1.json", "my_api_key.txt"]
    for name in keys:
        (here / name).write_text("secret")
    RunDir.create(here / "tula-runs", job())
    if with_git:
        commit(here)
    home = take(run, job(), here)
    assert {path.name for path in home.iterdir() if path.is_file() and not path.is_symlink()} == {
        "train.py",
        "id_map.py",
    }
    assert all((home / name).is_symlink() for name in keys), "a script that reads them finds them"
    assert not any((home / name).exists() for name in ("env", "tula-runs", ".env", ".git", "node_modules"))
    (warning,) = code.choose_code(None, job(), here, keep=True).warnings
    assert warning.code == "secrets-linked" and "aws_credentials.py" in str(warning.values["paths"])


def test_what_is_large_is_linked_and_told_and_what_is_near_the_script_comes_first(
    here: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_selection, "MAX_FILE_BYTES", 1000)
    monkeypatch.setattr(code_selection, "MAX_TOTAL_BYTES", 2000)
    write(
        here,
        {"a/far.py": "#" * 900, "main/train.py": "#" * 1500, "main/near.py": "#" * 400, "main/table.csv": "x" * 1001},
    )
    commit(here)
    spec = job("main/train.py {batch}")
    home = take(run, spec, here)
    assert not (home / "main" / "near.py").is_symlink()
    assert (home / "main" / "table.csv").is_symlink() and (home / "main" / "table.csv").read_text() == "x" * 1001
    assert (home / "a").is_symlink()
    (warning,) = code.choose_code(None, spec, here, keep=True).warnings
    assert warning.code == "files-too-large-to-copy" and warning.values["paths"] == "main/table.csv, a/far.py"


def test_a_repository_inside_comes_along(here: Path, run: RunDir) -> None:
    write(here / "third", {"net.py": "x = 1"})
    commit(here / "third")
    write(here, {"train.py": "import third.net, third.new"})
    commit(here)
    write(here / "third", "new.py", {"net.py": "x = 2"})
    home = take(run, job(), here)
    result = run.read_code(home.name)
    assert result is not None
    assert result.modules == ("third/net.py", "third/new.py", "train.py")
    assert result.dirty, "its changes count"


def test_a_walk_without_git_ends_and_tells_what_it_left_out(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(here, "train.py", "a/one.py", "b/two.py", *(f"data/{number}.jpg" for number in range(6)))
    assert len(list_copied_files(job(), here)) == 3
    monkeypatch.setattr(code_selection, "MAX_ENTRIES", 5)
    assert code.choose_code(None, job(), here, keep=True).warnings == (), "a folder of data is none of code"
    write(here, "data/net.py")
    (warning,) = code.choose_code(None, job(), here, keep=True).warnings
    assert warning.code == "files-too-large-to-copy" and warning.values["paths"] == "data"
    monkeypatch.setattr(script_files, "MAX_FILES_WALKED", 4)
    assert list_copied_files(job(), here) == ["train.py"]
    (warning,) = code.choose_code(None, job(), here, keep=True).warnings
    assert warning.code == "files-too-large-to-copy" and warning.values["paths"] == "a, b, data"


def test_what_the_script_imports_is_copied_though_git_ignores_it(here: Path) -> None:
    (here / ".gitignore").write_text("made.py\nunused.py\n")
    write(here, {"train.py": "import made"})
    commit(here)
    write(here, "made.py", "unused.py")
    assert list_copied_files(job(), here) == ["made.py", "train.py"]


def test_a_script_that_git_ignores_comes_with_its_own_folder(here: Path) -> None:
    write(here, "pkg.py")
    (here / ".gitignore").write_text("scratch\n")
    commit(here)
    write(here, "scratch/train.py", "scratch/mine.py")
    assert list_copied_files(job("scratch/train.py {batch}"), here) == ["scratch/mine.py", "scratch/train.py"]


# --- the digest


Change = Callable[[Path], None]


@pytest.mark.parametrize("with_git", [True, False])
@pytest.mark.parametrize(
    ("change", "another"),
    [
        (lambda here: write(here, {"train.py": "x = 2"}), True),
        (lambda here: write(here, {"pkg/helper.py": "x = 2"}), True),
        (lambda here: write(here, {"conf.yaml": "lr: 2"}), True),
        (lambda here: write(here, "fresh.py", "plot.py", "submit.sh"), False),
        (lambda here: write(here, "queue.py"), True),  # in place of python's module
        (lambda here: write(here, {"ds.json": "2"}), True),  # the command names it
        (lambda here: write(here, {"data.csv": "2", "README.md": "2"}), False),
        (lambda here: write(here, {"history.json": "[1]"}), False),  # as a script writes it
        (lambda here: write(here, {"job.yaml": "script:\n  command: train.py\npricing: {}"}), False),
        (lambda here: write(here, "wandb/run/config.yaml", "outputs/made.py"), False),
    ],
)
def test_an_edit_of_the_code_is_another_run_and_data_is_not(
    here: Path, change: Change, another: bool, with_git: bool
) -> None:
    write(
        here,
        {
            "train.py": "import pkg.helper",
            "pkg/helper.py": "x = 1",
            "conf.yaml": "lr: 1",
            "ds.json": "1",
            "data.csv": "1",
            "README.md": "1",
        },
    )
    write(here, {"job.yaml": "script:\n  command: train.py\n"})
    if with_git:
        commit(here)
    spec = job("train.py -b {local_batch} --deepspeed=ds.json")
    before = make_runs_of_job(here / "tula-runs", spec)[0].id
    change(here)
    assert (make_runs_of_job(here / "tula-runs", spec)[0].id != before) == another


def test_two_scripts_of_one_repository_are_two_runs_wherever_they_are_called(here: Path) -> None:
    write(here, "a/train.py", "b/train.py", "main.py")
    commit(here)
    assert code.compute_code_digest(job(), here / "a") != code.compute_code_digest(job(), here / "b")
    assert code.compute_code_digest(job("main.py {batch}"), here) == code.compute_code_digest(
        job("../main.py {batch}"), here / "a"
    )


FOLDER = {
    "train.py": "import numpy as np\nfrom model import Net\nnp.plot()",
    "model.py": "class Net: pass",
    "plot.py": "import model",
    "prepare.py": "",
    "submit.sh": "sbatch train.py",
    "models/__init__.py": "",
    "models/resnet.py": "from . import blocks",
    "models/blocks.py": "",
    "evaluate.py": "",
}


@pytest.mark.parametrize(
    ("changes", "command", "loadable"),
    [
        ({}, "train.py {batch}", ""),
        ({}, "env A=1 torchrun --nproc_per_node 4 train.py {batch}", ""),
        ({}, "python -m torch.distributed.run --nproc_per_node 4 train.py {batch}", ""),
        ({}, "train.py {batch} --model resnet", "models/__init__.py models/blocks.py models/resnet.py"),
        ({}, "train.py {batch} --plugins=models", "models/__init__.py models/blocks.py models/resnet.py"),
        ({}, "train.py {batch} --then evaluate.py", "evaluate.py"),
        ({"model.py": "NAMES = ['resnet']"}, "train.py {batch}", "models/__init__.py models/blocks.py models/resnet.py"),
        ({"model.py": '"""See prepare.py."""'}, "train.py {batch}", ""),
        ({"model.py": "import subprocess, sys\nsubprocess.run([sys.executable, 'evaluate.py'], check=True)"},
         "train.py {batch}", "evaluate.py"),
        ({"model.py": "import importlib\nimportlib.import_module('models.blocks')"},
         "train.py {batch}", "models/__init__.py models/blocks.py"),
        ({"model.py": "import sys\nsys.path.append('lib')\nimport helper", "lib/helper.py": "import other", "lib/other.py": ""},
         "train.py {batch}", "lib/helper.py lib/other.py"),
        ({"net.yaml": "_target_: models.blocks.Block"}, "train.py {batch}", "models/__init__.py models/blocks.py net.yaml"),
    ],
)  # fmt: skip
def test_only_scripts_that_can_be_loaded_identify_the_code(
    here: Path, changes: dict[str, str], command: str, loadable: str
) -> None:
    write(here, FOLDER | changes)
    assert list_identifying_files(job(command), here) == sorted(["train.py", "model.py", *loadable.split()])
    assert list_copied_files(job(command), here) == sorted(FOLDER | changes)


@pytest.mark.parametrize(
    "text",
    [
        "import importlib\nimportlib.import_module(f'models.{name}')",
        "from importlib import import_module as load\nload(name)",
        "from importlib import import_module\nlist(map(import_module, names))",
        "__import__(name)",
        "import runpy",
        "from pkgutil import iter_modules",
        "exec(open(name).read())",
        "import subprocess\nsubprocess.run(['python', name])",
        "import subprocess as sp\nsp.run(['python', name])",
        "import os\nos.system(f'bash {name}.sh')",
        "hydra.utils.instantiate(config)",
        "torch.hub.load(repo_or_dir=path, model='net', source='local')",
        "AutoModel.from_pretrained('mine', trust_remote_code=True)",
        "Config.fromfile(f'configs/{name}.py')",
        "hydra.utils.instantiate(config=config)",
        "__import__('models', fromlist=[name])",
        "os.execlp('python', 'python', name)",
        "import gin\ngin.parse_config_file(path)",
        "from torch.hub import load\nload(path, 'net', source='local')",
        "__all__ = [path.stem for path in folder.glob('*.py')]",
        "__all__: list[str] = names",
        "__all__ = []\nfor name in os.listdir(folder):\n    __all__.append(name[:-3])",
        "print 'python 2'",
        "x = " + "-" * 200_000 + "1",
    ],
    ids=lambda text: text[:40],
)
def test_all_scripts_identify_code_that_loads_files_by_computed_names(here: Path, text: str) -> None:
    write(here, FOLDER | {"model.py": text})
    assert list_identifying_files(job(), here) == sorted(FOLDER)


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "import platform\nplatform.system()",
        "import subprocess\nsubprocess.check_output(['git', 'rev-parse', 'HEAD'], cwd=root)",
        "torch.hub.load('pytorch/vision', 'resnet18', pretrained=flag)",
        "torch.load(path)",
        "__all__ = ['Net', *base.__all__] + other.__all__ + more.__all__\n__all__ += ['Block']",
    ],
)
def test_usual_calls_of_training_scripts_load_no_other_files(here: Path, text: str) -> None:
    write(here, FOLDER | {"model.py": text})
    assert list_identifying_files(job(), here) == ["model.py", "train.py"]


@pytest.mark.parametrize(
    "command", ["bash submit.sh {batch}", "python -m pytest train.py {batch}", "runner train.py {batch}"]
)
def test_all_scripts_identify_code_whose_launch_cannot_be_followed(here: Path, command: str) -> None:
    write(here, FOLDER)
    assert list_identifying_files(job(command), here) == sorted(FOLDER)


def test_settings_elsewhere_that_the_command_names_can_load_scripts(here: Path) -> None:
    write(
        here,
        {f"project/{name}": text for name, text in FOLDER.items()},
        {"net.yaml": "class_path: models.blocks.Block"},
    )
    (here / "model.yaml").symlink_to(here / "none.yaml")
    command = "project/train.py {batch} --config ../net.yaml --config=net.yaml --model model.yaml"
    assert "project/models/blocks.py" in list_identifying_files(job(command), here)


def test_the_digest_of_a_folder_with_loadable_scripts_is_that_of_all_its_files(here: Path) -> None:
    write(here, {"train.py": "import model", "model.py": "x = 1"})
    assert code.compute_code_digest(job(), here) == "be7bf05a"


# --- what runs


def test_the_file_runs_from_the_snapshot_as_it_was_submitted(here: Path, run: RunDir) -> None:
    write(here, "helper.py", {"sub/train.py": "x = 1"})
    commit(here)
    home = take(run, job("python -u sub/train.py -b {local_batch}"), here)
    write(here, {"sub/train.py": "x = 2"})
    for named in ("sub/train.py", str(here / "sub" / "train.py"), "./sub/../sub/train.py"):
        words = ["torchrun", "--rdzv-conf", "conf.py", named, "-b", "8"]
        assert move_command_to_snapshot(words, here, home) == [*words[:3], str(home / "sub/train.py"), "-b", "8"]
    assert (home / "sub" / "train.py").read_text() == "x = 1"
    assert list_snapshot_python_path(home) == [str(home / "sub")], "python does not look where only tula was called"
    (here / "sub" / "train.py").unlink()
    assert move_command_to_snapshot(["sub/train.py"], here, home) == [str(home / "sub/train.py")], (
        "nor need it be there any more"
    )


def test_a_name_with_blanks_is_one_word(here: Path, run: RunDir) -> None:
    write(here / "a folder", "train.py")
    home = take(run, job("python 'a folder/train.py' -b {local_batch}"), here)
    assert move_command_to_snapshot(["python", "a folder/train.py", "-b", "8"], here, home)[1] == str(
        home / "a folder" / "train.py"
    )


def test_a_module_is_found_in_the_snapshot(here: Path, run: RunDir) -> None:
    write(here, "pkg/__init__.py", "helper.py", {"pkg/train.py": "import helper"})
    home = take(run, job("python -m pkg.train -b {local_batch}"), here)
    result = run.read_code(home.name)
    assert result is not None
    assert result.modules == ("helper.py", "pkg/__init__.py", "pkg/train.py")
    words = ["python", "-m", "pkg.train", "-b", "8", "--config", "helper.py"]
    assert move_command_to_snapshot(words, here, home) == words
    assert list_snapshot_python_path(home) == [str(home)]


def test_folders_of_pythonpath_are_taken_from_the_snapshot(
    here: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(here, "scripts/train.py", "src/own/__init__.py")
    commit(here)
    with monkeypatch.context() as patch:
        patch.setattr("sys.path", ["", str(here / "src")])
        home = take(run, job("scripts/train.py {batch}"), here)
    assert list_snapshot_python_path(home) == [str(home / "scripts"), str(home / "src")]


def test_a_script_above_the_working_directory_comes_with_its_repository(here: Path, run: RunDir) -> None:
    write(here, "train.py", "pkg/net.py", "exp/notes.txt")
    commit(here)
    home = take(run, job("../train.py {batch}"), here / "exp")
    result = run.read_code(home.name)
    assert result is not None
    assert (result.base, result.workdir, result.program) == (str(here), str(here / "exp"), "train.py")
    assert move_command_to_snapshot(["../train.py", "8"], here / "exp", home) == [str(home / "train.py"), "8"]


def test_a_script_elsewhere_without_git_comes_with_its_own_folder(here: Path, run: RunDir, tmp_path: Path) -> None:
    write(tmp_path / "shared" / "vision", "utils.py", {"train.py": "import utils, deep.net", "deep/net.py": ""})
    write(tmp_path / "shared", "outside.py")
    name = str(tmp_path / "shared" / "vision" / "train.py")
    home = take(run, job(f"{name} {{batch}}"), here)
    result = run.read_code(home.name)
    assert result is not None
    assert result.modules == ("deep/net.py", "train.py", "utils.py")
    assert move_command_to_snapshot([name, "8"], here, home) == [str(home / "train.py"), "8"]


def test_without_a_snapshot_a_command_stays_as_it_is_and_one_that_is_gone_is_reported(here: Path, run: RunDir) -> None:
    assert move_command_to_snapshot(["train.py"], here, None) == ["train.py"]
    assert list_snapshot_python_path(None) == []
    write(here, "train.py")
    home = take(run, job(), here)
    with pytest.raises(JobFailed, match=r"is not in the command: other\.py"):
        move_command_to_snapshot(["other.py"], here, home)
    (home.parent / f"{home.name}.json").unlink()
    with pytest.raises(JobFailed, match="the snapshot of the submitted code is missing"):
        list_snapshot_python_path(home)


def test_a_module_whose_package_is_a_repository_or_a_link_is_found_from_the_working_directory(
    here: Path, run: RunDir, tmp_path: Path
) -> None:
    write(here, {"pkg/train.py": "import beside", "beside.py": ""})
    commit(here / "pkg")
    write(tmp_path / "far", "net.py", {"fit.py": "import far.net"})
    (here / "far").symlink_to(tmp_path / "far")
    for module, modules in (("pkg.train", {"pkg/train.py", "beside.py"}), ("far.fit", {"far/fit.py", "far/net.py"})):
        home = take(run, job(f"python -m {module} -b {{batch}}"), here)
        assert list_snapshot_python_path(home) == [str(home)]
        result = run.read_code(home.name)
        assert result is not None and {*result.modules} >= modules


def test_git_that_lists_nothing_in_time_is_reported(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(here, "train.py")
    commit(here)
    slow = tmp_path / "bin" / "git"
    write(tmp_path, {"bin/git": f'#!/bin/sh\ncase "$*" in *ls-files*) exec sleep 60;; esac\necho {here}\n'})
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:/usr/bin:/bin")
    monkeypatch.setattr(git_files, "LISTING_TIMEOUT", 0.1)
    with pytest.raises(TulaError, match="git has not listed the files of"):
        code.compute_code_digest(job(), here)


# --- what is decided at submission


@pytest.mark.parametrize(
    ("spec", "code_of_warning"),
    [
        (job(code="none"), "code-not-copied"),
        (job("lightning fit {batch}"), "command-names-no-file"),
        (job("python -m timm.train {batch}"), None),
    ],
)
def test_a_job_without_code_of_ones_own_has_no_snapshot_and_says_why(
    here: Path, run: RunDir, spec: JobSpec, code_of_warning: str | None
) -> None:
    source = code.choose_code(run, spec, here, keep=False)
    assert [warning.code for warning in source.warnings] == [code_of_warning] * (code_of_warning is not None)
    assert (source.digest, code.take_snapshot(run, spec, source), code.compute_code_digest(spec, here)) == ("", "", "")
    assert not (run.path / "code").exists()


def test_what_a_shell_script_names_is_reported_to_be_outside_of_the_snapshot(here: Path) -> None:
    write(here, "train.py", {"run.sh": "python train.py"})
    (warning,) = code.choose_code(None, job("bash run.sh {batch}"), here, keep=True).warnings
    assert warning == messages.only_shell_script_copied(name="run.sh", folder=str(here))


def test_a_script_that_is_missing_is_reported_before_anything_is_submitted(here: Path) -> None:
    for decide in (lambda: code.choose_code(None, job(), here, keep=False), lambda: make_runs_of_job(here, job())):
        with pytest.raises(SpecError, match=r"script\.command: train\.py is not in"):
            decide()


def probe(run: RunDir, spec: JobSpec, workdir: Path) -> str:
    """Write a probe's task as a submission does; return its snapshot's name."""
    name = take(run, spec, workdir).name
    task = ProbeTask(id="p", job="p", spec=spec, workdir=str(workdir), nodes=1, local_batches=(8,), code=name)
    run.write_task(task)
    return name


def test_a_run_goes_on_with_its_own_code_where_the_script_is_not(here: Path, run: RunDir, tmp_path: Path) -> None:
    write(here, {"train.py": "x = 1"})
    name = probe(run, job(), here)
    write(here, {"train.py": "x = 2"})
    kept = code.choose_code(run, job(), here, keep=True)
    assert (kept.kept, kept.workdir) == (name, here)
    code_name = "the code of train.py"
    assert kept.warnings == (
        messages.earlier_code_used(code=code_name, run=run.id, missing_from=None, files=["train.py changed"]),
    )
    now = code.choose_code(run, job(), here, keep=False)
    assert now.kept == "" and now.warnings[0] == messages.code_changed_since_measurement(
        code=code_name, run=run.id, files=["train.py changed"]
    )
    elsewhere = code.choose_code(run, job(), tmp_path, keep=False)
    assert (elsewhere.kept, elsewhere.workdir) == (name, here)
    assert elsewhere.warnings[0].values["missing_from"] == str(tmp_path)


def test_the_files_that_differ_are_named(here: Path, run: RunDir) -> None:
    write(
        here, {"train.py": "import gone, model", "gone.py": "", "model.py": "x = 1", "plot.py": "", "old.yaml": "a: 1"}
    )
    probe(run, job(), here)
    write(here, {"train.py": "import model, more, new", "model.py": "x = 2", "plot.py": "x = 2"}, "more.py", "new.py")
    (here / "gone.py").unlink()
    (here / "plot.py").unlink()
    warning = code.choose_code(run, job(), here, keep=False).warnings[0]
    names = ["gone.py removed", "model.py changed", "more.py added", "new.py added", "train.py changed"]
    assert warning.values["files"] == names
    assert "was measured (gone.py removed, model.py changed, more.py added and 2 more). The" in str(warning)
    assert code.list_code_changes(run, job(), here) == names
    assert code.list_code_changes(run, job(), here, digest="unknown") == []


def test_runs_of_the_same_script_with_other_code_are_found(here: Path, tmp_path: Path) -> None:
    root = tmp_path / "others"
    old, new = (RunDir.create(root, job(), code=digest) for digest in ("1" * 8, "2" * 8))
    assert [other.id for other in code.list_runs_with_other_code(new)] == [old.id]
    assert code.list_runs_with_other_code(new.with_spec(job(code="none"))) == []


def test_a_script_that_changes_between_plan_and_submission_is_refused(here: Path, run: RunDir) -> None:
    write(here, "helper.py", {"train.py": "import helper"})
    planned = code.choose_code(None, job(), here, keep=True)
    write(here, {"helper.py": "x = 2"})
    with pytest.raises(TulaError, match=r"the code of train\.py changed while tula copied it"):
        code.take_snapshot(run, job(), planned)
    assert list((run.path / "code").iterdir()) == []


def test_git_tells_what_differs_in_the_copied_files_and_nothing_of_others(here: Path, run: RunDir) -> None:
    write(here, {"conf/train.py": "x = 1\n", "conf/credentials.json": "1\n", "conf/a.yaml": "a: 1\n"})
    commit(here)
    spec = job("conf/train.py {batch}")
    clean = run.read_code(take(run, spec, here).name)
    write(here, {"conf/credentials.json": "password\n"})
    again = run.read_code(take(run, spec, here).name)
    write(here, {"conf/a.yaml": "a: 2\n"})
    edited = run.read_code(take(run, spec, here).name)
    assert clean is not None and again is not None and edited is not None
    assert (clean.commit, clean.dirty, clean.diff) == (git(here, "rev-parse", "HEAD").strip(), False, "")
    assert not again.dirty
    assert edited.dirty and "-a: 1\n+a: 2\n" in edited.diff and "password" not in edited.diff


@pytest.mark.parametrize(
    ("name", "value", "is_secret"),
    [
        ("SLURM_AUTH", "x", True), ("MYSQL_PWD", "x", True), ("DB_PASS", "x", True), ("SSH_KEY", "x", True), ("SENTRY_DSN", "x", True),
        ("AZURE_SAS", "x", True), ("NCCL_COOKIE", "x", True), ("HF_TOKEN", "x", True), ("A", "https://b/c?sv=1&sig=abc%3D", True),
        ("A", "https://u:p@host/x", True), ("A", "https://b/c?X-Amz-Signature=abc", True), ("A", "ghp_0123456789abcdefghij", True),
        ("NCCL_DEBUG", "INFO", False), ("SLURM_JOB_ID", "12", False), ("OMP_PASSIVE", "1", False), ("A", "https://b/c?page=2", False),
        ("TOKENIZERS_PARALLELISM", "1", False), ("key", "val_acc", False),
    ],
)  # fmt: skip
def test_secrets_are_known_by_name_and_by_value(name: str, value: str, is_secret: bool) -> None:
    assert may_be_secret(name, value) is is_secret


SECRET = "s3cr3tXYZ9"


@pytest.mark.parametrize(
    "text",
    [
        f"GET https://b.blob.core.windows.net/c?sv=1&sig={SECRET}", f"https://h/x?token={SECRET}", f"https://user:{SECRET}@host/x",
        f"--password {SECRET}", f"--password={SECRET}", f"-p x --api-key '{SECRET}'", f"AWS_SECRET_ACCESS_KEY={SECRET}",
        f"aws_secret_access_key = {SECRET}", f"HF_TOKEN={SECRET} python x.py", f"export WANDB_API_KEY='{SECRET}'",
        f"Authorization: Bearer {SECRET}", f"--auth-token {SECRET}", f"psycopg2 postgresql://u:{SECRET}@db/x failed",
        f"{{'password': '{SECRET}'}}", f'{{"api_key": "{SECRET}"}}', f"redis://:{SECRET}@h:6379", f"--db.password {SECRET}",
        f"X-Auth-Token: {SECRET}", f"s3://b/k?X-Amz-Signature={SECRET}&a=1", f"sshpass -p {SECRET} ssh h",
        f"mysql -u me -p{SECRET} db", f"mysqldump -p'{SECRET}' db", f"redis-cli -h x -a {SECRET} ping", f"docker login -u me -p {SECRET}",
        f"curl -u user:{SECRET} https://h", f'--secret "{SECRET} and more"', f"AccountKey={SECRET}==;EndpointSuffix=x",
        f"SharedAccessSignature={SECRET}", f"MYSQL_PWD={SECRET}", f"DB_PASS: {SECRET}", f"invalid token {SECRET}",
        f"https://oauth2:{SECRET}@gitlab.com/x.git", f"--token\n{SECRET}",
        f"-----BEGIN RSA PRIVATE KEY-----\nMII{SECRET}\n-----END RSA PRIVATE KEY-----",
        f"wandb login {2 * SECRET}", f"wandb login --relogin {2 * SECRET}", f"wandb.login(key='{SECRET}')",
        f"https://hooks.slack.com/services/T0/B0/{SECRET}", f"https://discord.com/api/webhooks/1/{SECRET}",
        *(f"got {start}{2 * SECRET}" for start in ("npm_", "pypi-", "AIza", "dop_v1_", "rpa_", "SG.", "ya29.", "dckr_pat_", "gsk_", "hvs.", "sk_live_")),
        f"--wandb.key={SECRET}", f"--login.pass {SECRET}", f"db.pwd={SECRET}",
        f'curl -u "me:a {SECRET}" https://h', f"sshpass -p 'a {SECRET}' ssh h", f'mysql -p"a {SECRET}" db', f"wandb.login(key='a {SECRET}')",
        f'password="a\\"b {SECRET}"', f'--password "a {SECRET}',
    ],
)  # fmt: skip
def test_secrets_in_text_are_hidden_once_and_for_all(text: str) -> None:
    shown = redact_secrets(text)
    assert SECRET not in shown and "***" in shown
    assert redact_secrets(shown) == shown  # records are written and read many times


@pytest.mark.parametrize(
    "text",
    [
        "neither token_jobs:First nor the loss takes it", "tokens are counted twice", "tokens per second: 1200", "12 tokens a sample", "the token embedding has 50257 rows",
        "secrets of the loader", "max_tokens=4096", "--max-tokens 4096", "--num_tokens 100k", "KeyError: 'input_ids'",
        "TOKENIZERS_PARALLELISM=true", "tokenizer.model is missing", "password is wrong", "cookie jar", "--pad-token-id 0",
        "Tokenizer: special token not found", "pass 1 of 3", "forward pass: nan", "SLURM_JOB_ID=12", "--author me",
        "--use_auth_token true", "--max-tokens 1e6", "num_tokens=1e9", "special_tokens=[PAD]", "pad_token=[PAD]", "eos_token='</s>'",
        "--pad_token '<pad>'", "mask_token: [MASK]", "eos_token=<|endoftext|>", "token=None", "wandb: use `wandb login --relogin` to force relogin",
        "PWD=/home/me/project", "docker run -p 8080:80 x", "mysql -P 3306 -u me db", "redis-cli -p 6379", "python -u -m torch.distributed.run train.py", "CUDA out of memory. Tried to allocate 2.00 GiB",
    ],
)  # fmt: skip
def test_text_without_secrets_is_left_as_it_is(text: str) -> None:
    assert redact_secrets(text) == text


@pytest.mark.parametrize(
    "word", ["mysql ", "docker login ", "curl x ", "redis-cli -x ", "mongoo", "mysqla", "token ", "Bearer x "]
)
def test_hiding_secrets_takes_time_in_proportion_to_the_text(word: str) -> None:
    start = time.process_time()
    redact_secrets(word * 20_000)
    assert time.process_time() - start < 20
