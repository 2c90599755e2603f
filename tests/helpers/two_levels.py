"""A table of step times on nodes with several GPUs, in the format of the replays."""

import csv
from collections.abc import Iterable
from pathlib import Path

from replay_data import COLUMNS


def write_table(path: Path, batches: Iterable[int]) -> Path:
    """Write the step times of a cluster that reduces gradients within each node and then between nodes; return the file."""
    rows = []
    for nodes in (1, 2, 4):
        for gpus in (1, 2, 4):
            for batch in batches:
                compute, sync = 0.02 + 0.001 * batch, 0.06 * (nodes > 1) + 0.01 * (gpus - 1)
                step = compute / 3 + max(2 / 3 * compute, sync) + 0.05 * sync
                rows.append(["c", "app", nodes, gpus, nodes * gpus, batch, step, step - compute, "ok"])
    with path.open("w") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    return path
