"""Another version of torch: `python tests/other_torch.py TORCH TORCHVISION` dry-runs the stages for a GPU under it.

Makes .proof/torch-TORCH, an environment of its own (several GB, kept for the next time), with Python 3.12 where there is
one, and needs a package registry for that.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = 12  # GB


def main() -> int:
    torch, torchvision = sys.argv[1:]
    folder = ROOT / ".proof" / f"torch-{torch}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        free = shutil.disk_usage(ROOT).free / 1e9
        if free < NEEDED:
            print(f"{folder} takes some {NEEDED} GB, {free:.0f} are free")
            return 1
        subprocess.run([interpreter(), "-m", "venv", "--clear", str(folder)], check=True)
        wanted = [f"torch=={torch}", f"torchvision=={torchvision}", f"{ROOT}[torch,schedulefree]"]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True)
        (folder / "complete").touch()
    told = "import platform, torch; print(platform.python_version(), torch.__version__)"
    found = subprocess.run([str(python), "-c", told], capture_output=True, text=True, check=True).stdout.split()
    if not found[1].startswith(torch):
        print(f"{python} has torch {found[1]}, not {torch}")
        return 1
    out = ROOT / ".proof" / f"gpu-torch-{torch}"
    words = ["--device", "cpu", "--tiny", "--again", "--out", str(out)]
    code = subprocess.run([str(python), str(ROOT / "benchmarks" / "on_gpu.py"), *words], check=False).returncode
    print(f"under Python {found[0]} and torch {found[1]}: {'as it should be' if code == 0 else 'not as it should be'}")
    return code


def interpreter() -> str:
    """Return a Python 3.12 that works, or this one."""
    path = shutil.which("python3.12")
    works = path is not None and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0
    return path if path is not None and works else sys.executable


if __name__ == "__main__":
    sys.exit(main())
