"""A change of the step time is reported: which part of a step, since when, and its effect."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tula_cli.run.records.results import StepChange

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.proof]
HELPERS = Path(__file__).parents[1] / "helpers"
JOB = """
name: watched
model: {name: "watched:Loaded", args: {products: 12}}
dataset: {name: "watched:samples"}
optimizer: {name: SGD, lr: 0.01}
train: {epochs: 100000, workers: 0, method: lbt}
search: {nodes: [1], min_batch: 32, max_batch: 32, max_node_hours: 5}
cluster: {device: cpu}
pricing: {price: 2.0}
"""
SETTLED = 100
"""Rows of steps, one or two a look, after which their level is known; half as many looks are too few beside the hog's."""
EARLY = 3.0
"""Seconds by which a change may seem to begin before its cause: other load on the machine is in the same looks."""

MUCH = 1.3
"""By which a hog changes a step, at least; what else the machine does changes it less."""


@contextmanager
def hog() -> Iterator[float]:
    """Keep every core busy with three processes; yields the Unix time at which they began."""
    cores = len(os.sched_getaffinity(0))
    began = time.time()
    # Linux shares the cores out among sessions first (sched_autogroup): all of one session would weigh as little as one.
    hogs = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) for _ in range(3 * cores)
    ]
    try:
        yield began
    finally:
        for process in hogs:
            process.kill()
            process.wait()


def changes(tula: Any, *, since: float) -> list[StepChange]:
    """Return what the training under way has told of its steps, as far as it began then or later."""
    run = tula.run()
    result = run.get_training(run.list_train_signatures()[0]).read_step_changes()
    return [change for change in result if change.began_at >= since - EARLY]


def steps_told(tula: Any) -> int:
    run = tula.run()
    return sum(
        row["kind"] == "step" for name in run.list_train_signatures() for row in run.get_training(name).read_metrics()
    )


def test_a_hog_is_reported_when_it_comes_and_when_it_goes(tula: Any) -> None:
    (tula.folder / "job.yaml").write_text(JOB)
    shutil.copy(HELPERS / "watched.py", tula.folder)
    process = tula.start("train", "job.yaml", "--nodes", "1", "--batch", "32")
    tula.wait_until(lambda: list(tula.folder.glob("tula-runs/watched-*/train/*/metrics.jsonl")))
    tula.wait_until(lambda: steps_told(tula) >= SETTLED)
    with hog() as began:
        slower = tula.wait_until(
            lambda: [c for c in changes(tula, since=began) if c.after.step > MUCH * c.before.step]
        )[0]
    ended = time.time()
    faster = tula.wait_until(lambda: [c for c in changes(tula, since=ended) if MUCH * c.after.step < c.before.step])[0]

    assert slower.parts == faster.parts == ("compute",)
    assert slower.began_at < ended, "it began while the hog was there"
    assert slower.seconds_left > slower.seconds_left_before and slower.cost_more > 0
    assert faster.seconds_left < faster.seconds_left_before and faster.cost_more < 0
    message = tula("status")["data"]["training"]["changes"]
    assert {slower.began_at, faster.began_at} <= {change["began_at"] for change in message}
    tula("cancel")
    process.communicate(timeout=60)
    log = "\n".join(path.read_text() for path in tula.run().list_logs())
    assert "changed: since epoch" in log and "the nodes compute more slowly" in log
