"""Another version of torch, in another Python where there is one; without tests named, it dry-runs the stages for a GPU.

    python tests/other_torch.py TORCH TORCHVISION PYTHON [TESTS...]

Makes .proof/torch-TORCH, an environment of its own (several GB, kept for the next time), and needs a package registry for that.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = 12  # GB
FOR_TESTS = ("pytest>=8", "pytest-rerunfailures>=14", "hypothesis>=6", "torchmetrics>=1")
"""The second for .ci/run, which asks pytest for reruns."""


def main() -> int:
    torch, torchvision, version, *tests = sys.argv[1:]
    wanted = [f"torch=={torch}", f"torchvision=={torchvision}", f"{ROOT}[torch,schedulefree,nvml]", *FOR_TESTS]
    python = environment(ROOT / ".proof" / f"torch-{torch}", interpreter(version), wanted, gigabytes=NEEDED)
    version, found = versions(python)
    if not found.startswith(torch):
        print(f"{python} has torch {found}, not {torch}")
        return 1
    out = str(ROOT / ".proof" / f"gpu-torch-{torch}")
    dry_run = [str(ROOT / "benchmarks" / "on_gpu.py"), "--device", "cpu", "--tiny", "--again", "--out", out]
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    here = {**os.environ, "PYTHONPATH": str(ROOT)}  # tula as it is now, not as it was when the environment was made
    code = subprocess.run([str(python), *(pytest if tests else dry_run)], cwd=ROOT, env=here, check=False).returncode
    print(f"under Python {version} and torch {found}: {'as it should be' if code == 0 else 'not as it should be'}")
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
    told = "import platform, torch; print(platform.python_version(), torch.__version__)"
    version, torch = subprocess.run(
        [str(python), "-c", told], capture_output=True, text=True, check=True
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
