"""A rank that reports what it sees of its node, the clock of rank 1 ahead: `python looks_around.py FOLDER`, as start_ranks does.

FOLDER/task holds the run directory and the id of a task of `tula check`, a line each.
"""

import os
import runpy
import sys
import time
from pathlib import Path

AHEAD = 5.0  # seconds


def main() -> None:
    run, task = Path(sys.argv[1], "task").read_text().splitlines()
    if os.environ["RANK"] == "1":
        now = time.time
        time.time = lambda: now() + AHEAD
    os.environ["LOCAL_RANK"] = "0"  # each is the first rank of a node
    sys.argv = ["tula_cli.worker", run, task, "1"]
    runpy.run_module("tula_cli.worker", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
