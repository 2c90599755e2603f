"""Another version of torch, or the lowest of everything that is allowed, in another Python where there is one.

    python tests/other_torch.py TORCH TORCHVISION PYTHON     # dry-runs the stages for a GPU
    python tests/other_torch.py lowest PYTHON [PYTEST ...] [-- PYTEST ...]

Makes .proof/torch-TORCH or .proof/lowest, an environment of its own (several GB, kept for the next time), and needs a package
registry for that. Pytest runs once for each list of its arguments.
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
NEEDED = 12  # GB
EXTRAS = ("torch", "trackers", "nvml", "transformers", "schedulefree", "report", "safetensors")
"""Of tula, for whoever trains; the others are of those who change it."""
FOR_TESTS = (
    "pytest>=8",
    "pytest-rerunfailures>=14",
    "pytest-xdist>=3.5",
    "hypothesis>=6",
    "torchmetrics>=1",
    "jsonschema>=4.18",
)
"""The second for .ci/run, which asks pytest for reruns."""


def main() -> int:
    return of_the_lowest(*sys.argv[2:]) if sys.argv[1] == "lowest" else of_torch(*sys.argv[1:])


def of_torch(torch: str, torchvision: str, version: str) -> int:
    """Dry-run the stages for a GPU under a version of torch."""
    wanted = [f"torch=={torch}", f"torchvision=={torchvision}", f"{ROOT}[torch,schedulefree,nvml]"]
    python = environment(ROOT / ".proof" / f"torch-{torch}", interpreter(version), wanted, gigabytes=NEEDED)
    version, result = versions(python)
    if not result.startswith(torch):
        print(f"{python} has torch {result}, not {torch}")
        return 1
    out = str(ROOT / ".proof" / f"gpu-torch-{torch}")
    dry_run = [str(ROOT / "benchmarks" / "on_gpu.py"), "--device", "cpu", "--tiny", "--again", "--out", out]
    return told(python, [dry_run], f"Python {version} and torch {result}")


def of_the_lowest(version: str, *words: str) -> int:
    """Run tests under the lowest versions that pyproject.toml allows."""
    pins = lowest((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    digest = hashlib.sha256(" ".join([*pins, *FOR_TESTS]).encode()).hexdigest()[:8]
    python = environment(
        ROOT / ".proof" / f"lowest-{digest}", interpreter(version), [*pins, *FOR_TESTS], gigabytes=NEEDED
    )
    version, result = versions(python)
    pytest = ["-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"]
    return told(
        python, [[*pytest, *some] for some in lists(words)], f"Python {version}, torch {result}, {len(pins)} pins"
    )


def lowest(project: str) -> list[str]:
    """Return the requirements of tula and of its `EXTRAS` at their lowest versions.

    Args:
        project: pyproject.toml. It is not parsed: Python 3.10 cannot.
    """
    results = []
    for name in ("dependencies", *EXTRAS):
        (words,) = re.findall(rf"^{name} = \[(.*?)\]", project, re.MULTILINE | re.DOTALL)
        required = re.findall(r'"([^"]*)"', words)
        pins = [re.fullmatch(r"([\w-]+)>=([\d.]+)", item) for item in required]
        assert all(pins), f"{name}: {required}"
        results += [f"{pin[1]}=={pin[2]}" for pin in pins if pin]
    return results


def lists(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield what stands between the words `--`."""
    rest = list(words)
    while "--" in rest:
        at = rest.index("--")
        yield rest[:at]
        rest = rest[at + 1 :]
    yield rest


def told(python: Path, commands: Iterable[Sequence[str]], under: str) -> int:
    """Run commands of a Python from the tree as it is; say how they ended, and return the first code that is not 0."""
    here = {**os.environ, "PYTHONPATH": str(ROOT)}  # tula as it is now, not as it was when the environment was made
    codes = [subprocess.run([str(python), *words], cwd=ROOT, env=here, check=False).returncode for words in commands]
    code = next(filter(None, codes), 0)
    print(f"under {under}: {'as it should be' if code == 0 else 'not as it should be'}")
    return code


def environment(folder: Path, interpreter: str, wanted: Sequence[str], *, gigabytes: int) -> Path:
    """Return the Python of an environment that holds what is wanted; it is made once.

    Args:
        folder: its place.
        interpreter: the Python that makes it.
        wanted: of pip.
        gigabytes: that it takes.

    Raises:
        SystemExit: they are not free.
    """
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        free = shutil.disk_usage(ROOT).free / 1e9
        if free < gigabytes:
            print(f"{folder} takes some {gigabytes} GB, {free:.0f} are free")
            raise SystemExit(1)
        subprocess.run([interpreter, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True)
        (folder / "complete").touch()
    return python


def versions(python: Path) -> tuple[str, str]:
    """Return the versions of an interpreter and of its torch."""
    message = "import platform, torch; print(platform.python_version(), torch.__version__)"
    version, torch = subprocess.run(
        [str(python), "-c", message], capture_output=True, text=True, check=True
    ).stdout.split()
    return version, torch


def interpreter(version: str) -> str:
    """Return a Python of a version ("3.12") that works, also one that pyenv keeps; else this one."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions").glob(f"{version}.*/bin/python")
    return first_that_works([shutil.which(f"python{version}"), *map(str, kept)])


def first_that_works(paths: Iterable[str | None]) -> str:
    """Return the first interpreter that can be started, or this one."""
    for path in filter(None, paths):
        if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    return sys.executable


if __name__ == "__main__":
    sys.exit(main())
