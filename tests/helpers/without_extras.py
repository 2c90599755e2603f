"""Runs tests in a copy of the tree that has no optional packages: those of the core need none.

    python tests/helpers/without_extras.py [PYTEST'S ARGUMENTS ...]

The copy has neither `tula_cli/extras` nor `tests/extras`, while the installed metadata still names the packages.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
WITHOUT = ("tula_cli/extras/", "tests/extras/")


def copy_core(target: Path) -> None:
    """Copy what git knows of the tree, and what is new in it, without the optional packages and their tests."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if not name.startswith(WITHOUT) and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_tests(arguments: list[str]) -> int:
    """Run pytest on the copy, and return its exit code."""
    with tempfile.TemporaryDirectory(prefix="tula-core-") as folder:
        tree = Path(folder) / "tula"
        tree.mkdir()
        copy_core(tree)
        path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
        environ = {**os.environ, "PYTHONPATH": path}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(command, cwd=tree, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(run_tests(sys.argv[1:]))
