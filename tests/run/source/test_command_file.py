"""Which word of a command is the user's own file, and its place in a snapshot."""

from pathlib import Path

import pytest

from tula_cli.errors import SpecError
from tula_cli.run.script_command import find_program, split_command


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a script, a shell script, one without suffix, a package, and an environment."""
    for name in (
        "train.py", "run.sh", "tool", "conf", "conf.py", "my train.py", "pkg/__init__.py", "pkg/train.py", "space/fit.py",
        "whole/__main__.py", "env/pyvenv.cfg", "env/bin/torchrun", "env/bin/python",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def found(command: str, here: Path) -> str | None:
    result = find_program(split_command(command), here, path=[])
    return None if result is None else result.file.relative_to(here).as_posix()


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("train.py -b {local_batch}", "train.py"),
        ("./train.py -b {local_batch}", "train.py"),
        ("python -u -X dev train.py", "train.py"),
        ("python -uW ignore train.py", "train.py"),
        ("torchrun --nproc-per-node 2 --rdzv-conf conf train.py -b {local_batch}", "train.py"),
        ("python -m torch.distributed.run --nproc-per-node=2 train.py --config conf.py", "train.py"),
        ("accelerate launch --num_processes {world} train.py", "train.py"),
        ("deepspeed --num_gpus 2 train.py --deepspeed", "train.py"),
        ("env/bin/python env/bin/torchrun train.py", "train.py"),
        ("srun -m block:block numactl -m 0 python3.11 train.py", "train.py"),
        ("bash run.sh {batch}", "run.sh"),
        ("bash -eo pipefail run.sh {batch}", "run.sh"),
        ("python tool {batch}", "tool"),
        ("sh tool train.py", "tool"),
        ("./tool --config conf.py", "tool"),
        ("python 'my train.py' {batch}", "my train.py"),
        ("python {{x}} train.py", None),
    ],
)
def test_the_file_of_a_command_is_found_behind_launchers_and_their_options(
    here: Path, command: str, file: str | None
) -> None:
    if file is None:
        with pytest.raises(SpecError, match=r"\{x\} is not in"):
            found(command, here)
    else:
        assert found(command, here) == file


@pytest.mark.parametrize(
    ("command", "module", "file"),
    [
        ("python -m pkg.train -b {local_batch}", "pkg.train", "pkg/train.py"),
        ("python -um pkg.train", "pkg.train", "pkg/train.py"),
        ("python -mpkg.train", "pkg.train", "pkg/train.py"),
        ("python -OPR -Xdev -umpkg.train", "pkg.train", "pkg/train.py"),
        ("python -uX dev -mtorch.distributed.run -m pkg.train", "pkg.train", "pkg/train.py"),
        ("torchrun --nnodes {nodes} -m pkg.train conf.py", "pkg.train", "pkg/train.py"),
        ("accelerate launch --module space.fit", "space.fit", "space/fit.py"),
        ("python -m whole", "whole", "whole/__main__.py"),
    ],
)
def test_a_module_of_ones_own_is_found_as_an_import_would_find_it(
    here: Path, command: str, module: str, file: str
) -> None:
    result = find_program(split_command(command), here, path=[])
    assert result is not None
    assert (result.module, result.file, result.root) == (module, here / file, here)


def test_a_module_is_looked_for_where_pythonpath_says(here: Path) -> None:
    (here / "src" / "own").mkdir(parents=True)
    (here / "src" / "own" / "fit.py").touch()
    assert find_program(["python", "-m", "own.fit"], here, path=[]) is None
    result = find_program(["python", "-m", "own.fit"], here, path=["src"])
    assert result is not None
    assert result.root == here / "src"


@pytest.mark.parametrize(
    "command",
    [
        "python -m timm.train --batch-size {local_batch}",
        "python -m timm.train --save-to made.py",  # which is for the module to make
        "lightning fit -c conf",
        "bash -c 'python train.py'",
        "bash -lc 'python train.py' train.py",
        "python -c 'import train' train.py",
        "python -Puc 'import train' train.py",
        "python -c'import train' train.py",
        "python {tula_run}/x.py conf.py",
        "python whole",
        "env/bin/torchrun --help",
    ],
)
def test_a_command_may_run_nothing_of_ones_own(here: Path, command: str) -> None:
    assert found(command, here) is None


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("trian.py -b {local_batch}", "trian.py is not in"),
        ("python trian.py --config conf.py", "trian.py is not in"),
        ("torchrun --standalone trian.py --config conf.py", "trian.py is not in"),
        ("python -m torch.distributed.run trian.py", "trian.py is not in"),
        ("bash go", "go is not in"),
        ("python -m pkg.trian", "no module pkg.trian in"),
        ("/nowhere/train.py", "/nowhere/train.py is not in"),
    ],
)
def test_a_file_that_is_not_there_is_reported_with_what_to_do(here: Path, command: str, what: str) -> None:
    with pytest.raises(SpecError) as error:
        found(command, here)
    assert error.value.message.startswith(f"script.command: {what}")
    assert str(here) in error.value.message
    assert "script.code: none" in error.value.hint


def test_a_link_is_followed_as_python_does(here: Path) -> None:
    (here / "deep").mkdir()
    (here / "deep" / "real.py").touch()
    (here / "linked.py").symlink_to("deep/real.py")
    result = find_program(["linked.py"], here, path=[])
    assert result is not None
    assert (result.file, result.root) == (here / "deep" / "real.py", here / "deep")


def test_a_word_too_long_for_a_name_is_none(here: Path) -> None:
    assert found(f"./tool '{'x' * 5000}'", here) == "tool"
    assert found(f"torchrun '{'x' * 5000}' train.py", here) == "train.py"
