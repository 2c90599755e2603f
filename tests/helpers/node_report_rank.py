"""Program of a rank that reports its node, with the clock of rank 1 ahead: `python node_report_rank.py FOLDER`, run by start_ranks.

FOLDER/task contains the run directory and the id of a task of `tula check`, one per line.
"""

import os
import runpy
import sys
import time
from pathlib import Path

CLOCK_OFFSET_SECONDS = 5.0  # seconds


def main() -> None:
    run, task = Path(sys.argv[1], "task").read_text().splitlines()
    if os.environ["RANK"] == "1":
        now = time.time
        time.time = lambda: now() + CLOCK_OFFSET_SECONDS
    os.environ["LOCAL_RANK"] = "0"  # each rank is the first rank of a node
    sys.argv = ["tula_cli.worker", run, task, "1"]
    runpy.run_module("tula_cli.worker", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
