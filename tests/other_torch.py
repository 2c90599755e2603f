"""Another version of torch: `python tests/other_torch.py TORCH TORCHVISION` dry-runs the stages for a GPU under it.

Makes .proof/torch-TORCH, an environment of its own (several GB, kept for the next time), with Python 3.12 where there is
one, and needs a package registry for that.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = 12  # GB


def main() -> int:
    torch, torchvision = sys.argv[1:]
    wanted = [f"torch=={torch}", f"torchvision=={torchvision}", f"{ROOT}[torch,schedulefree]"]
    python = environment(ROOT / ".proof" / f"torch-{torch}", interpreter(), wanted, gigabytes=NEEDED)
    version, found = versions(python)
    if not found.startswith(torch):
        print(f"{python} has torch {found}, not {torch}")
        return 1
    out = ROOT / ".proof" / f"gpu-torch-{torch}"
    words = ["--device", "cpu", "--tiny", "--again", "--out", str(out)]
    code = subprocess.run([str(python), str(ROOT / "benchmarks" / "on_gpu.py"), *words], check=False).returncode
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


def interpreter() -> str:
    """Return a Python 3.12 that works, or this one."""
    return first_that_works([shutil.which("python3.12")])


def first_that_works(paths: Iterable[str | None]) -> str:
    """Return the first interpreter that can be started, or this one."""
    for path in filter(None, paths):
        if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    return sys.executable


if __name__ == "__main__":
    sys.exit(main())
