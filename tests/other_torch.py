"""Run tests under another version of torch, or under the lowest allowed versions of all dependencies.

    python tests/other_torch.py TORCH TORCHVISION PYTHON     # dry-runs the stages for a GPU
    python tests/other_torch.py lowest PYTHON [PYTEST ...] [-- PYTEST ...]

PYTHON is a version such as 3.12; if it is not installed, this interpreter is used. The program creates a separate environment
in .proof/torch-TORCH or .proof/lowest-HASH (several GB, kept for the next call) and needs a package index. Pytest runs once
per list of arguments.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED_GIGABYTES = 12  # GB
EXTRAS = ("torch", "trackers", "nvml", "transformers", "schedulefree", "report", "safetensors")
"""Extras of tula for users; the other extras are for developers."""
TEST_REQUIREMENTS = (
    "pytest>=8",
    "pytest-rerunfailures>=14",
    "pytest-xdist>=3.5",
    "hypothesis>=6",
    "torchmetrics>=1",
    "jsonschema>=4.18",
)
"""The second is for .ci/run, which sets --reruns."""


def main() -> int:
    return (
        run_tests_under_lowest_versions(*sys.argv[2:])
        if sys.argv[1] == "lowest"
        else dry_run_under_torch(*sys.argv[1:])
    )


def dry_run_under_torch(torch: str, torchvision: str, version: str) -> int:
    """Dry-run the stages of `make gpu` under a version of torch."""
    requirements = [f"torch=={torch}", f"torchvision=={torchvision}", f"{ROOT}[torch,schedulefree,nvml]"]
    folder = ROOT / ".proof" / f"torch-{torch}"
    python = create_environment(folder, find_interpreter(version), requirements, gigabytes=NEEDED_GIGABYTES)
    python_version, torch_version = query_versions(python)
    if not torch_version.startswith(torch):
        print(f"{python} has torch {torch_version}, not {torch}")
        return 1
    out = str(ROOT / ".proof" / f"gpu-torch-{torch}")
    dry_run = [str(ROOT / "benchmarks" / "on_gpu.py"), "--device", "cpu", "--tiny", "--again", "--out", out]
    return run_commands(python, [dry_run], f"Python {python_version} and torch {torch_version}")


def run_tests_under_lowest_versions(version: str, *words: str) -> int:
    """Run tests under the lowest versions that pyproject.toml allows; `words` are lists of pytest arguments, split by `--`."""
    pins = pin_lowest_versions((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    digest = hashlib.sha256(" ".join([*pins, *TEST_REQUIREMENTS]).encode()).hexdigest()[:8]
    folder = ROOT / ".proof" / f"lowest-{digest}"
    python = create_environment(
        folder, find_interpreter(version), [*pins, *TEST_REQUIREMENTS], gigabytes=NEEDED_GIGABYTES
    )
    python_version, torch_version = query_versions(python)
    pytest = ["-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"]
    commands = [[*pytest, *arguments] for arguments in split_at_dashes(words)]
    return run_commands(python, commands, f"Python {python_version}, torch {torch_version}, {len(pins)} pins")


def pin_lowest_versions(project: str) -> list[str]:
    """Return the requirements of tula and of its `EXTRAS` at their lowest versions.

    Args:
        project: text of pyproject.toml. It is searched, not parsed, because Python 3.10 has no TOML parser.
    """
    results = []
    for name in ("dependencies", *EXTRAS):
        (words,) = re.findall(rf"^{name} = \[(.*?)\]", project, re.MULTILINE | re.DOTALL)
        required = re.findall(r'"([^"]*)"', words)
        pins = [re.fullmatch(r"([\w-]+)>=([\d.]+)", item) for item in required]
        assert all(pins), f"{name}: {required}"
        results += [f"{pin[1]}=={pin[2]}" for pin in pins if pin]
    return results


def split_at_dashes(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield the lists of words between the words `--`."""
    rest = list(words)
    while "--" in rest:
        at = rest.index("--")
        yield rest[:at]
        rest = rest[at + 1 :]
    yield rest


def run_commands(python: Path, commands: Iterable[Sequence[str]], under: str) -> int:
    """Run commands with an interpreter, print whether all passed, and return the first exit code that is not 0.

    Args:
        under: name of the environment, for the message.
    """
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}  # tula of the working tree, not of the time of installation
    codes = [subprocess.run([str(python), *words], cwd=ROOT, env=environ, check=False).returncode for words in commands]
    code = next(filter(None, codes), 0)
    print(f"under {under}: {'passed' if code == 0 else f'failed with exit code {code}'}")
    return code


def create_environment(folder: Path, interpreter: str, requirements: Sequence[str], *, gigabytes: int) -> Path:
    """Create a virtual environment unless it exists, and return its interpreter.

    Args:
        folder: of the environment.
        interpreter: that creates it.
        requirements: arguments of pip.
        gigabytes: size of the environment.

    Raises:
        SystemExit: the disk has less free space.
    """
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        free = shutil.disk_usage(ROOT).free / 1e9
        if free < gigabytes:
            print(f"{folder} needs about {gigabytes} GB, but only {free:.0f} GB are free")
            raise SystemExit(1)
        subprocess.run([interpreter, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *requirements], check=True)
        (folder / "complete").touch()
    return python


def query_versions(python: Path) -> tuple[str, str]:
    """Return the version of an interpreter and the version of torch that it imports."""
    code = "import platform, torch; print(platform.python_version(), torch.__version__)"
    version, torch = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    return version, torch


def find_interpreter(version: str) -> str:
    """Return a working interpreter of a version such as "3.12" (also one installed by pyenv), or else this interpreter."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions").glob(f"{version}.*/bin/python")
    return find_working_interpreter([shutil.which(f"python{version}"), *map(str, pyenv)])


def find_working_interpreter(paths: Iterable[str | None]) -> str:
    """Return the first interpreter that starts, or else this interpreter."""
    for path in filter(None, paths):
        if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    return sys.executable


if __name__ == "__main__":
    sys.exit(main())
