"""The wheel and the source distribution, checked for a package index, and the wheel's commands in another Python.

    python tests/installed.py PYTHON [PYTEST ...]

Takes a Python of that version where there is one, else this one, and says which it was. Makes .proof/installed-VERSION, an
environment of its own with tula's dependencies and without torch (kept for the next time), and needs a package registry for
that. Pytest then runs in it on the code of the tree.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from other_torch import environment, interpreter

ROOT = Path(__file__).parents[1]
NEEDED = 1  # GB
CHECKERS = ("twine>=6", "readme-renderer[md]")
"""The second lets twine see whether the README can be shown."""
COMMANDS = (
    ("--version",),
    ("init", "local"),
    ("recommend", "--demo"),
    ("recommend", "--demo", "--json"),
    ("report", "--help"),
    ("export", "--help"),
    ("list",),
)
"""Commands that need neither torch nor a run, in the order in which they run in an empty folder."""

PLAIN = ("--hypothesis-profile=ci",)
"""Without Hypothesis' limit on the time of an example, which other parts of the proof may exceed beside this one."""


def main() -> int:
    wanted, *tests = sys.argv[1:]
    result = interpreter(wanted)
    version = subprocess.run([result, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    with tempfile.TemporaryDirectory(prefix="tula-installed-") as place:
        folder = Path(place)
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
        wheel = next(folder.glob("*.whl"))
        python = make_environment(result, version, wheel)
        run(str(python), "-m", "twine", "check", "--strict", *map(str, folder.glob("tula_cli-*")))
        run(str(python), "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", str(wheel))
        run(str(python), "-m", "pip", "check")
        work = folder / "empty"
        work.mkdir()
        for command in COMMANDS:
            run(str(python.with_name("tula")), *command, cwd=work)
        assert (work / "job.yaml").exists()
    if tests:
        run(str(python), "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *PLAIN, *tests)
    print(f"under Python {version}: the wheel is installed and answers {len(COMMANDS)} commands; the tests pass")
    return 0


def make_environment(interpreter: str, version: str, wheel: Path) -> Path:
    """Return the Python of an environment that has what the wheel and its tests need."""
    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    needs = re.findall(r"^Requires-Dist: .*", zipfile.ZipFile(wheel).read(metadata).decode(), re.MULTILINE)
    digest = hashlib.sha256(" ".join([*needs, *CHECKERS]).encode()).hexdigest()[:8]
    folder = ROOT / ".proof" / f"installed-{version}-{digest}"
    return environment(folder, interpreter, [f"{wheel}[report,tests]", *CHECKERS], gigabytes=NEEDED)


def run(*command: str, cwd: Path = ROOT) -> None:
    """Run a command that finds tula only where it is installed; raises CalledProcessError if it fails."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    print("+", *command, flush=True)
    subprocess.run(command, cwd=cwd, env=environ, check=True)


if __name__ == "__main__":
    sys.exit(main())
