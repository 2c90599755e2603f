"""Check the wheel and the source distribution as a package index does, and run commands of the wheel in another Python.

    python tests/installed.py PYTHON [PYTEST ...]

If no interpreter of version PYTHON is installed, this one is used; the last line names the version. The program creates a
separate environment .proof/installed-VERSION with the dependencies of tula but without torch (kept for the next call), and
needs a package index. If pytest arguments are given, pytest then runs in this environment on the code of the working tree.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from other_torch import create_environment, find_interpreter

ROOT = Path(__file__).parents[1]
NEEDED_GIGABYTES = 1  # GB
CHECKERS = ("twine>=6", "readme-renderer[md]")
"""twine needs the second to check that the README can be rendered."""
COMMANDS = (
    ("--version",),
    ("init", "local"),
    ("recommend", "--demo"),
    ("recommend", "--demo", "--json"),
    ("report", "--help"),
    ("export", "--help"),
    ("list",),
)
"""Commands that need neither torch nor a run; they run in this order in an empty folder."""

PYTEST_OPTIONS = ("--hypothesis-profile=ci",)
"""This profile has no time limit per example, which a machine with concurrent parts of `make proof` may exceed."""


def main() -> int:
    requested, *tests = sys.argv[1:]
    interpreter = find_interpreter(requested)
    version = subprocess.run([interpreter, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    with tempfile.TemporaryDirectory(prefix="tula-installed-") as temporary:
        folder = Path(temporary)
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
        wheel = next(folder.glob("*.whl"))
        python = create_wheel_environment(interpreter, version, wheel)
        run(str(python), "-m", "twine", "check", "--strict", *map(str, folder.glob("tula_cli-*")))
        run(str(python), "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", str(wheel))
        run(str(python), "-m", "pip", "check")
        work = folder / "empty"
        work.mkdir()
        for command in COMMANDS:
            run(str(python.with_name("tula")), *command, cwd=work)
        assert (work / "job.yaml").exists()
    if tests:
        run(str(python), "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *PYTEST_OPTIONS, *tests)
    print(f"under Python {version}: the wheel is installed and runs {len(COMMANDS)} commands; the tests pass")
    return 0


def create_wheel_environment(interpreter: str, version: str, wheel: Path) -> Path:
    """Return the interpreter of an environment with the requirements of the wheel and of its tests."""
    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    needs = re.findall(r"^Requires-Dist: .*", zipfile.ZipFile(wheel).read(metadata).decode(), re.MULTILINE)
    digest = hashlib.sha256(" ".join([*needs, *CHECKERS]).encode()).hexdigest()[:8]
    folder = ROOT / ".proof" / f"installed-{version}-{digest}"
    return create_environment(folder, interpreter, [f"{wheel}[report,tests]", *CHECKERS], gigabytes=NEEDED_GIGABYTES)


def run(*command: str, cwd: Path = ROOT) -> None:
    """Run a command that can import tula only if it is installed; raise CalledProcessError if the command fails."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    print("+", *command, flush=True)
    subprocess.run(command, cwd=cwd, env=environ, check=True)


if __name__ == "__main__":
    sys.exit(main())
