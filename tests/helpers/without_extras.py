"""Run the tests of the core in a copy of the working tree without the optional packages.

    python tests/helpers/without_extras.py [PYTEST'S ARGUMENTS ...]

The copy lacks `tula_cli/extras` and `tests/extras`, while the installed metadata still names the packages.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
REMOVED_FOLDERS = ("tula_cli/extras/", "tests/extras/")


def copy_core(target: Path) -> None:
    """Copy tracked and new files of the working tree, except the optional packages and their tests."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if not name.startswith(REMOVED_FOLDERS) and (ROOT / name).is_file():
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
