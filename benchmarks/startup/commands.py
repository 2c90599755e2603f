"""CPU seconds (user and system) of the most frequent commands.

    python benchmarks/startup/commands.py [--folder .] [--repeat 5] [--json]

The folder must have a run with probes, as this one after `make quickstart`. For comparison, the table also has python itself, the
import of numpy, which a recommendation needs, and that of statsmodels, which only `--explain` imports. The minimum of the repetitions
is shown, because files are in the cache then, and CPU time, too, is larger on a busy machine.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PYTHON = [sys.executable, "-c"]
TULA = [sys.executable, "-m", "tula_cli"]
COMMANDS = {
    "python": [*PYTHON, ""],
    "import of numpy": [*PYTHON, "import numpy"],
    "import of statsmodels": [*PYTHON, "from statsmodels.regression.linear_model import OLS"],
    "tula --help": [*TULA, "--help"],
    "tula status": [*TULA, "status"],
    "tula recommend": [*TULA, "recommend", "--objective", "knee"],
    "tula recommend --demo": [*TULA, "recommend", "--demo"],
    "tula recommend --explain": [*TULA, "recommend", "--objective", "knee", "--explain"],
}  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]


def cpu_seconds(command: Sequence[str], *, folder: Path, repeat: int) -> float:
    """Return the minimum CPU time over repetitions of a command, in seconds."""
    return min(_run_once(command, folder) for _ in range(repeat))


def _run_once(command: Sequence[str], folder: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder, env=environ, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.cwd())
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = {
        name: cpu_seconds(command, folder=options.folder, repeat=options.repeat) for name, command in COMMANDS.items()
    }
    if options.json:
        print(json.dumps(results))
        return
    for name, seconds in results.items():
        print(f"{name:30}{seconds:8.3f} s")


if __name__ == "__main__":
    main()
