"""The supervisor with scripts of the user's own: small ones, which tell their steps through tula_hooks and import no torch."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tula_cli.cluster import attempt as cluster_attempt
from tula_cli.cluster.allocation import Allocation
from tula_cli.cluster.attempt import RunningAttempt
from tula_cli.cluster.directory_watcher import ChangeWatcher
from tula_cli.cluster.rank_processes import RankSpawner
from tula_cli.cluster.scripts import checkpoints
from tula_cli.cluster.scripts.probe import ScriptProbe
from tula_cli.cluster.supervise import supervise
from tula_cli.host.leftovers import GpuMemory
from tula_cli.run.code import choose_code, take_snapshot
from tula_cli.run.directory import RunDir
from tula_cli.run.records.jobs import Attempt, LeaderCommand
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.results import TrainResult
from tula_cli.run.records.tasks import BatchBounds, ProbeTask, Rung, TrainTask
from tula_cli.run.script_attempt import ScriptAttempt
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate_job

SCRIPT = """
import argparse, json, os, signal, sys, time
from pathlib import Path
import tula_hooks as tula

parser = argparse.ArgumentParser()
parser.add_argument("-b", type=int)
parser.add_argument("-a", type=int, default=1)
parser.add_argument("--steps", type=int, default=10**6)
parser.add_argument("--out", type=Path)
parser.add_argument("--resume", type=Path)
parser.add_argument("--first", default="")
options, rank = parser.parse_args(), int(os.environ.get("RANK", "0"))


class Engine:
    def parameters(self):
        return []


def save():
    if rank == 0:
        draft = options.out / "draft"
        draft.write_text(json.dumps({"samples": samples}))
        draft.replace(options.out / "state.json")


again = options.resume is not None
samples = json.loads(options.resume.read_text())["samples"] if again else 0
tula.wrap(Engine(), Engine())
WHAT_ELSE
world, number = int(os.environ.get("WORLD_SIZE", "1")), 0
while samples < options.steps * 16:
    number += 1
    WITHIN
    time.sleep(0.002)
    samples += options.b * options.a * world
    tula.step(samples=options.b * options.a, loss=1 / number, lr=0.5)
    if number % 10 == 0:
        save()
print(f"top1 {50 + options.b / 10}")
"""


def job(folder: Path, *, what_else: str = "", within: str = "pass", **changes: Any) -> JobSpec:
    """Return a job whose script is written into a folder."""
    code = SCRIPT.replace("WHAT_ELSE", what_else).replace("WITHIN", within)
    (folder / "train.py").write_text(code)
    script = {
        "command": "train.py -b {local_batch} --out {out}",
        "length": {"samples": 1600},
        "reference": {"batch": 16},
        "resume": {"args": "--resume {checkpoint}", "checkpoint": "{out}/state.json", "batch": "any"},
        "metric": {"top1": "top1 ([0-9.]+)"},
    }
    return validate_job(
        {
            "script": script | changes.pop("script", {}),
            "search": {
                "nodes": [1, 2],
                "min_steps": 5,
                "min_seconds": 0,
                **changes.pop("search", {}),
            },
            "cluster": {"device": "cpu"},
            **changes,
        },
        source="test",
    )


def probes(
    folder: Path,
    spec: JobSpec,
    *,
    nodes: int = 1,
    sizes: tuple[int, ...] = (4, 8),
    bounds: BatchBounds | None = None,
) -> RunDir:
    """Measure local batches on so many nodes, to the end; with bounds, search for the largest one."""
    run = RunDir.create(folder / "tula-runs", spec)
    task = ProbeTask(
        id="probe", job="probe", spec=spec, workdir=str(folder), nodes=nodes, local_batches=sizes, bounds=bounds
    )
    run.write_task(task)
    supervise(run.path, "probe", environ=os.environ)
    return run


def training(folder: Path, spec: JobSpec, *, ladder: tuple[int, ...] = (16,), nodes: int = 1) -> RunDir:
    """Train, to the end."""
    run = RunDir.create(folder / "tula-runs", spec)
    run.write_task(train_task(folder, spec, ladder=ladder, nodes=nodes))
    supervise(run.path, "train-x-1", environ=os.environ)
    return run


def train_task(folder: Path, spec: JobSpec, *, ladder: tuple[int, ...] = (16,), nodes: int = 1) -> TrainTask:
    return TrainTask(
        id="train-x-1", job="train-x", spec=spec, workdir=str(folder), nodes=nodes, signature="x", attempt=1,
        ladder=tuple(Rung(batch=batch) for batch in ladder), workers=0,
    )  # fmt: skip


def ended(run: RunDir) -> tuple[TrainResult | None, list[tuple[str, str | None]]]:
    """Return the result of a training, and each attempt's task with how it ended."""
    attempts = run.get_training("x").read_attempts()
    return run.get_training("x").read_result(), [(attempt.task, attempt.outcome) for attempt in attempts]


# --- probes


@pytest.mark.parametrize("nodes", [1, 2])
def test_each_batch_is_a_start_of_the_command(folder: Path, nodes: int) -> None:
    run = probes(folder, job(folder, search={"min_steps": 6}), nodes=nodes)
    results = run.read_results()
    assert [type(result) for result in results] == [Measured, Measured], results
    for result, size in zip(results, (4, 8), strict=True):
        assert isinstance(result, Measured)
        assert (result.nodes, result.local_batch, result.batch, result.accumulate) == (nodes, size, size * nodes, 1)
        assert len(result.step_times) == 6 and min(result.step_times) >= 0.002
        assert result.overheads.startup > 0 and result.overheads.eval_batch is None
        assert (result.sync_time, result.compute_time is None) == ((0.0, False) if nodes == 1 else (None, True))
        assert (result.dataset_size, result.eval_size, result.gradients) == (1600, None, None)
        assert result.environment.device == "cpu" and result.environment.nodes[0].ranks == nodes
        assert result.script is not None and result.script.lr is not None and result.script.lr.first == 0.5
    assert [attempt.outcome for attempt in run.read_attempts("probe")] == ["done", "done"]
    assert ScriptAttempt(run.path, "probe", 2).output_folder.is_dir(), "a probe has a folder of its own"


def test_a_script_that_ignores_its_batch_is_reported_with_both_figures(folder: Path) -> None:
    run = probes(folder, job(folder, what_else="options.b = 3"))
    first, second = run.read_results()
    assert isinstance(first, Failed) and isinstance(second, Failed) and first.outcome == "user"
    assert "batch 4, but a step trains on 3 samples" in first.message
    assert "batch 8, but a step trains on 3 samples" in second.message


@pytest.mark.parametrize(
    ("what_else", "words"),
    [
        ("sys.exit()", "no step of a torch optimizer was observed"),
        ("print('this needs 2 GPUs'); sys.exit()", "last line of the script: this needs 2 GPUs"),
        ("options.steps = 1", "ended after 4 steps"),
        ("raise KeyError('data/train')", "KeyError: 'data/train'"),
    ],
)
def test_what_is_no_measurement_is_reported(folder: Path, what_else: str, words: str) -> None:
    (result,) = probes(folder, job(folder, what_else=what_else), sizes=(4,)).read_results()
    assert isinstance(result, Failed) and result.outcome == "user"
    assert words in result.message


def test_a_batch_that_does_not_fit_bounds_the_others(folder: Path) -> None:
    full = "if options.b > 4: raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')"
    run = probes(folder, job(folder, what_else=full), sizes=(4, 8, 16))
    small, middle, large = run.read_results()
    assert isinstance(small, Measured) and isinstance(middle, OutOfMemory) and isinstance(large, OutOfMemory)
    assert (middle.assumed, large.assumed) == (False, True)
    assert "Tried to allocate 2.00 GiB" in middle.message


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_search_starts_the_script_anew_for_each_trial_until_the_largest_batch_is_known(
    folder: Path, nodes: int
) -> None:
    # Of two ranks only one runs out of memory.
    full = f"if options.b > 20 and rank == {nodes - 1}: raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')"
    spec = job(folder, what_else=full, cluster={"device": "cpu", "memory_per_gpu": "1GB"})
    bounds = BatchBounds(limit=48, start=4, capacity=spec.cluster.memory_per_gpu, footprints=())
    run = probes(folder, spec, nodes=nodes, sizes=(4,), bounds=bounds)
    fits = {result.local_batch: result.kind for result in run.read_results()}
    assert (fits[4], fits[20], fits[21]) == ("measured", "measured", "out_of_memory")
    assert all((kind == "measured") == (size <= 20) for size, kind in fits.items())
    task = run.read_task("probe")
    assert isinstance(task, ProbeTask) and sorted(task.local_batches) == sorted(fits), (
        "each is recorded as it was tried"
    )
    assert len(run.read_attempts("probe")) == len(fits) <= 7
    assert not any(result.assumed for result in run.read_results() if isinstance(result, OutOfMemory))


def test_a_search_that_fails_for_another_reason_ends(folder: Path) -> None:
    spec = job(folder, what_else="if options.b > 4: raise ValueError('no such batch')")
    bounds = BatchBounds(limit=48, start=4, capacity=2**30, footprints=())
    run = probes(folder, spec, sizes=(4,), bounds=bounds)
    assert [result.kind for result in run.read_results()] == ["measured", "failed"]


def test_a_rank_that_fails_takes_the_others_along(folder: Path) -> None:
    within = "if rank == 1 and number == 4: raise ValueError('sample 7 is broken')\n    if number > 4: time.sleep(600)"
    (result,) = probes(folder, job(folder, within=within), nodes=2, sizes=(4,)).read_results()
    assert isinstance(result, Failed) and result.message == "ValueError: sample 7 is broken"


def test_a_script_that_steps_no_more_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptProbe, "silence", 0.5)
    stuck = job(folder, within="if number == 4: time.sleep(600)", search={"min_steps": 8})
    (result,) = probes(folder, stuck, sizes=(4,)).read_results()
    assert isinstance(result, Failed) and "stopped, because no step finished for" in result.message


def test_a_command_that_is_not_there_is_reported(folder: Path) -> None:
    spec = job(folder, script={"command": "no-such-launcher {batch}"})
    (result,) = probes(folder, spec, sizes=(4,)).read_results()
    assert isinstance(result, Failed) and "cannot start no-such-launcher" in result.message


def test_a_command_a_node_starts_its_ranks_itself(folder: Path) -> None:
    (folder / "launch.sh").write_text(
        f"for r in 0 1; do RANK=$(($1 * 2 + r)) WORLD_SIZE=$2 {sys.executable} train.py -b $3 & done; wait\n"
    )
    command = "bash launch.sh {node_rank} {world} {local_batch}"
    spec = job(folder, script={"command": command, "launch": "node"}, cluster={"device": "cpu", "gpus_per_node": 2})
    (result,) = probes(folder, spec, nodes=2, sizes=(4,)).read_results()
    assert isinstance(result, Measured), result
    assert (result.batch, result.environment.nodes[0].ranks) == (16, 4)


@pytest.mark.parametrize(
    "command", ["train.py -b {batch} --out {out}", f"{sys.executable} -m train -b {{batch}} --out {{out}}"]
)
def test_what_was_submitted_is_what_runs(folder: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "amount.py").write_text("sixteen = 16")
    monkeypatch.chdir(folder)
    spec = job(folder, what_else="from amount import sixteen; assert sixteen == 16", script={"command": command})
    run = RunDir.create(folder / "tula-runs", spec)
    code = take_snapshot(run, spec, choose_code(run, spec, folder, keep=False))
    task = ProbeTask(id="p", job="p", spec=spec, workdir=str(folder), nodes=1, local_batches=(4,), code=code)
    run.write_task(task)
    (folder / "amount.py").write_text("sixteen = 17")
    (folder / "train.py").write_text("raise SystemExit('edited')")
    supervise(run.path, "p", environ=os.environ)
    assert isinstance(run.read_results()[0], Measured), run.read_results()


# --- trainings


def test_a_training_ends_with_its_samples_and_what_it_printed(folder: Path) -> None:
    result, attempts = ended(run := training(folder, job(folder, script={"command": COMMAND})))
    assert result is not None and attempts == [("train-x-1", "done")]
    assert (result.samples, result.steps, result.batch) == (1600, 100, 16)
    assert result.metrics == {"top1": 51.6, "best_top1": 51.6} and result.best_top1 == 51.6
    summary, rows = run.get_training("x").read_summary(), run.get_training("x").read_metrics()
    assert summary is not None and summary.attempts == 1
    assert rows[0]["kind"] == "start" and rows[-1]["samples"] == 1600
    assert not [row for row in rows if row["kind"] == "warning"]


COMMAND = "train.py -b {local_batch} --out {out} --steps {steps}"


def test_a_killed_training_goes_on_from_its_checkpoint(folder: Path) -> None:
    kill = "if not again and number == 25: os.kill(os.getpid(), signal.SIGKILL)"
    result, attempts = ended(run := training(folder, job(folder, within=kill, script={"command": COMMAND}), nodes=1))
    assert attempts == [("train-x-1", "signal"), ("train-x-2", "done")]
    assert result is not None and result.metrics["top1"] == 51.6
    (first, again) = [row["samples"] for row in run.get_training("x").read_metrics() if row["kind"] == "start"]
    assert first == 0 < again <= 320, "of 25 steps the 20 up to the checkpoint are kept; a heart beats once a second"
    assert result.samples == again + 80 * 16


def test_after_an_out_of_memory_the_same_batch_goes_on_in_smaller_micro_batches(folder: Path) -> None:
    full = "if options.b > 4 and number == 12: raise RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')"
    resume = {"args": "--resume {checkpoint}", "checkpoint": "{out}/state.json", "batch": "same"}
    command = "train.py -b {micro_batch} -a {accumulate} --out {out} --steps {steps}"
    spec = job(folder, within=full, script={"command": command, "resume": resume})
    result, attempts = ended(run := training(folder, spec, ladder=(16, 8)))
    assert attempts == [("train-x-1", "device_oom"), ("train-x-2", "device_oom"), ("train-x-3", "done")]
    plans = [ScriptAttempt(run.path, name, 1).plan_path for name, _ in attempts]
    expected = [json.loads(plan.read_text())["expected"] for plan in plans]
    assert [(plan["batch"], plan["accumulate"]) for plan in expected] == [(16, 1), (16, 2), (16, 4)]
    starts = [row["samples"] for row in run.get_training("x").read_metrics() if row["kind"] == "start"]
    assert result is not None and result.batch == 16 and 0 < starts[1] < starts[2]
    summary = run.get_training("x").read_summary()
    assert summary is not None and summary.causes == tuple(
        f"out of memory at batch 16: each rank now computes a step in {16 // size} micro-batches of {size}"
        for size in (8, 4)
    )
    assert json.loads((run.get_training("x").path / "out" / "state.json").read_text())["samples"] == 1600


def test_a_command_that_cannot_accumulate_says_so(folder: Path) -> None:
    full = "if options.b == 16: raise RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')"
    _, attempts = ended(run := training(folder, job(folder, within=full, script={"command": COMMAND}), ladder=(16, 8)))
    assert [outcome for _, outcome in attempts] == ["device_oom", "done"]
    summary = run.get_training("x").read_summary()
    assert summary is not None and summary.causes[0].endswith(
        "not split: the command has no {micro_batch} with {accumulate} or {accumulate_total}"
    )


@pytest.mark.parametrize(("batch", "place", "began"), [("any", "out", True), ("same", "out-8", False)])
def test_after_an_out_of_memory_the_next_smaller_batch_goes_on_as_far_as_it_may(
    folder: Path, batch: str, place: str, began: bool
) -> None:
    full = "if options.b == 16 and number == 12: raise RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')"
    resume = {"args": "--resume {checkpoint}", "checkpoint": "{out}/state.json", "batch": batch}
    spec = job(
        folder, within=full, script={"command": "train.py -b {local_batch} --out {out} --steps 100", "resume": resume}
    )
    result, attempts = ended(run := training(folder, spec, ladder=(16, 8)))
    assert attempts == [("train-x-1", "device_oom"), ("train-x-2", "done")]
    assert result is not None and result.batch == 8
    (_, again) = [row["samples"] for row in run.get_training("x").read_metrics() if row["kind"] == "start"]
    assert (again > 0) is began
    assert json.loads((run.get_training("x").path / place / "state.json").read_text())["samples"] > 1500


def test_a_training_that_is_shorter_than_asked_for_is_reported(folder: Path) -> None:
    spec = job(folder, script={"command": "train.py -b {local_batch} --out {out} --steps 40"})
    _, attempts = ended(run := training(folder, spec))
    assert attempts == [("train-x-1", "done")]
    (warning,) = [row["message"] for row in run.get_training("x").read_metrics() if row["kind"] == "warning"]
    assert "ended after 640 samples instead of 1600" in warning


def test_a_metric_that_is_nowhere_is_reported(folder: Path) -> None:
    spec = job(folder, script={"command": COMMAND, "metric": {"wer": "WER ([0-9.]+)"}})
    result, _ = ended(run := training(folder, spec))
    assert result is not None and result.metrics == {}
    assert "wer does not occur in the output" in run.get_training("x").read_metrics()[-1]["message"]


def test_a_metric_that_ends_as_nan_is_reported(folder: Path) -> None:
    within = "print('WER nan' if number >= 12 else 'WER 0.5', flush=True)"
    spec = job(folder, within=within, script={"command": COMMAND, "metric": {"wer": "WER ([0-9.]+|nan)"}})
    result, attempts = ended(run := training(folder, spec))
    assert [outcome for _, outcome in attempts] == ["done"]
    assert result is not None and result.metrics == {"best_wer": 0.5}
    assert "the last value of script.metric wer is nan" in run.get_training("x").read_metrics()[-1]["message"]


# --- before a time limit


@pytest.mark.parametrize(
    ("save", "what_else", "within"),
    [
        ("SIGUSR1", "signal.signal(signal.SIGUSR1, lambda *_: save())", "pass"),
        ("file:{out}/please", "", "if (options.out / 'please').exists(): (options.out / 'please').unlink(); save()"),
        ("hooks", "tula.save(lambda path: Path(path).write_text(json.dumps({'samples': samples})))", "pass"),
    ],
)
def test_a_script_is_asked_to_save_before_the_time_limit(
    folder: Path, save: str, what_else: str, within: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "UNCHANGED_SECONDS", 0.2)
    monkeypatch.setattr(cluster_attempt, "SIGKILL_DELAY_SECONDS", 1.0)
    never = "if number % 10 == 0: number += 1"  # no checkpoint by itself
    spec = job(
        folder,
        what_else=what_else,
        within=f"{within}\n    {never}",
        script={"command": "train.py -b {local_batch} --out {out}", "save": save},
    )
    run = RunDir.create(folder / "tula-runs", spec)
    task = train_task(folder, spec)
    run.write_task(task)
    allocation = Allocation(0, 1, job_id="7", environ=dict(os.environ), ends_at=time.time() + 30)
    run.write_attempt(Attempt(task=task.id, number=1, started_at=time.time()))
    command = LeaderCommand(task=task.id, attempt=1, ranks=1, meeting="127.0.0.1:9", batch=16)
    running = RunningAttempt(
        run,
        allocation,
        RankSpawner(),
        GpuMemory(),
        task,
        Attempt(task=task.id, number=1, started_at=0.0),
        command,
        float("inf"),
        ChangeWatcher(run.path, allocation),
    )
    monkeypatch.setattr(Allocation, "compute_exit_deadline", lambda *_: time.time() + 2.0)
    monkeypatch.setattr(RunningAttempt, "_exit_deadline", property(lambda _: began + 2.0))
    began = time.time()
    reason = running.run_ranks_to_exit()
    assert (reason.outcome, reason.message) == ("time_limit", "time limit of job 7 reached")
    assert (run.get_training("x").path / "out" / "state.json").exists()
