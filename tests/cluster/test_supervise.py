"""The supervisor with ranks that are small scripts: what it does with each way of ending."""

import json
import math
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from typing import Any, cast

import make_runs
import pytest
from make_results import Truth, make_probe

from tula_cli.cluster import attempt as cluster_attempt
from tula_cli.cluster import failures
from tula_cli.cluster import supervise as cluster_supervise
from tula_cli.cluster.allocation import Allocation
from tula_cli.cluster.attempt import RunningAttempt
from tula_cli.cluster.rank_processes import RankLaunchPlan, get_first_rank
from tula_cli.cluster.supervise import Supervisor
from tula_cli.errors import TulaError
from tula_cli.host import devices
from tula_cli.host.processes import read_start_time
from tula_cli.models.out_of_memory import list_splits
from tula_cli.run import shortages
from tula_cli.run.directory import RunDir
from tula_cli.run.records import tasks as task_records
from tula_cli.run.records.base import OutcomeClass
from tula_cli.run.records.failures import Failure
from tula_cli.run.records.jobs import LeaderCommand
from tula_cli.run.records.probes import OutOfMemory
from tula_cli.run.records.results import MicroBatches, TrainResult
from tula_cli.run.records.tasks import MAX_RESTARTS, ProbeTask, Rung, Task, TrainTask, make_probe_id
from tula_cli.services.training_end import make_training_error

GLOO = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:31415"
CPU_OOM = "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."
KILLED = "Root Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 77)\n"


class Ranks:
    """Stands in for torchrun: the n-th start runs the n-th script, and the last one again after that."""

    def __init__(self, run: RunDir, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.folder = run, folder
        self.starts: list[str] = []
        self.scripts: list[str] = []
        monkeypatch.setattr(RankLaunchPlan, "make_command_line", lambda start: self.argv(start.task))

    def will(self, *scripts: str) -> None:
        self.scripts = list(scripts)

    def argv(self, task: Task) -> list[str]:
        script = self.scripts[min(len(self.starts), len(self.scripts) - 1)]
        self.starts.append(task.id)
        return [sys.executable, "-c", textwrap.dedent(script)]

    def fail(
        self,
        task: str,
        message: str,
        outcome: str,
        *,
        attempt: int = 1,
        rank: int = 0,
        at: float = 1.0,
        fault: str | None = None,
    ) -> str:
        """Return a script that leaves a rank's failure file and exits as torchrun does."""
        failure = Failure(
            task=task,
            attempt=attempt,
            rank=rank,
            host="h",
            pid=1,
            outcome=outcome,
            message=message,
            fault=fault,
            detail="",
            failed_at=at,
        )
        path = self.run.path / "failures" / f"{task}.{attempt:03d}.{rank:04d}.json"
        return f"""
            import pathlib, sys
            path = pathlib.Path({str(path)!r})
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text({failure.model_dump_json()!r})
            sys.exit(1)
        """

    def finish(self, signature: str) -> str:
        """Return a script that leaves a training result."""
        result = TrainResult(
            signature=signature, nodes=1, batch=64, samples=128, steps=2, epochs=1, metrics={"top1": 90.0},
            best_top1=90.0, best_epoch=1, step_time=0.1, finished_at=2.0,
        )  # fmt: skip
        path = self.run.path / f"train/{signature}/result.json"
        text = result.model_dump_json()
        return f"import pathlib; p = pathlib.Path({str(path)!r}); p.parent.mkdir(parents=True, exist_ok=True); p.write_text({text!r})"

    def measure(self, nodes: int, *local_batches: int) -> str:
        """Return a script that leaves results of probes, measured when it runs."""
        files = {
            str(self.run.path / "results" / f"{make_probe_id(nodes, local)}.json"): make_probe(
                Truth(), nodes, local
            ).model_dump_json()
            for local in local_batches
        }
        return f"""
            import json, pathlib, time
            for path, text in json.loads({json.dumps(files)!r}).items():
                pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
                pathlib.Path(path).write_text(json.dumps({{**json.loads(text), "measured_at": time.time()}}))
        """


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return RunDir.create(tmp_path / "runs", make_runs.spec(train={"epochs": 1, "max_attempts": 3, "workers": 4}))


@pytest.fixture
def ranks(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(run, tmp_path, monkeypatch)


@pytest.fixture
def probe(run: RunDir) -> ProbeTask:
    task = ProbeTask(
        id="probe-n001",
        job="probe-n001",
        spec=run.read_spec(),
        workdir=str(run.path),
        nodes=1,
        local_batches=(32, 64, 128),
    )
    run.write_task(task)
    return task


@pytest.fixture
def training(run: RunDir) -> TrainTask:
    ladder = tuple(Rung(batch=batch) for batch in (128, 64, 32))
    task = TrainTask(
        id="train-s-1", job="train-s", spec=run.read_spec(), workdir=str(run.path), nodes=1, signature="s", attempt=1,
        ladder=ladder, workers=4,
    )  # fmt: skip
    run.write_task(task)
    return task


def outcomes(run: RunDir, task: str) -> list[str | None]:
    return [attempt.outcome for attempt in run.read_attempts(task)]


def test_a_probe_job_that_measures_everything_is_over(run: RunDir, ranks: Ranks, probe: ProbeTask) -> None:
    ranks.will(ranks.measure(1, 32, 64, 128))
    cluster_supervise.supervise(run.path, probe.id)
    assert ranks.starts == [probe.id]
    assert outcomes(run, probe.id) == ["done"]


def test_start_is_resume_nothing_is_started_where_all_results_are_there(
    run: RunDir, ranks: Ranks, probe: ProbeTask
) -> None:
    for local in probe.local_batches:
        run.write_result(make_probe(Truth(), 1, local))
    ranks.will("raise SystemExit(1)")
    cluster_supervise.supervise(run.path, probe.id)
    assert ranks.starts == []


def test_an_out_of_memory_is_a_result_and_bounds_the_larger_batches(
    run: RunDir, ranks: Ranks, probe: ProbeTask
) -> None:
    ranks.will(textwrap.dedent(ranks.measure(1, 32)) + textwrap.dedent(ranks.fail(probe.id, CPU_OOM, "device_oom")))
    cluster_supervise.supervise(run.path, probe.id)
    results = {result.local_batch: result for result in run.read_results()}
    assert results[32].kind == "measured"
    assert isinstance(results[64], OutOfMemory)
    assert not results[64].assumed
    assert isinstance(results[128], OutOfMemory)
    assert results[128].assumed
    assert ranks.starts == [probe.id], "an out-of-memory is not tried again"


def test_a_lost_rank_is_started_again(run: RunDir, ranks: Ranks, probe: ProbeTask) -> None:
    ranks.will(f"print({KILLED!r}); raise SystemExit(1)", ranks.measure(1, 32, 64, 128))
    cluster_supervise.supervise(run.path, probe.id)
    assert outcomes(run, probe.id) == ["signal", "done"]
    assert "exitcode : -9" in run.read_attempts(probe.id)[0].message


def test_a_probe_job_gives_up_after_some_restarts(run: RunDir, ranks: Ranks, probe: ProbeTask) -> None:
    ranks.will(f"print({KILLED!r}); raise SystemExit(1)")
    cluster_supervise.supervise(run.path, probe.id)
    assert len(ranks.starts) == MAX_RESTARTS + 1
    failed = run.read_result(make_probe_id(1, 32))
    assert failed is not None
    assert failed.kind == "failed"
    assert failed.outcome == "signal"
    assert run.read_result(make_probe_id(1, 64)) is None


@pytest.mark.parametrize(("words", "outcome"), [("ValueError: mine", "user"), ("Diverged: not finite", "diverged")])
def test_what_one_batch_fails_by_itself_is_not_tried_again_but_the_other_batches_are(
    run: RunDir, ranks: Ranks, probe: ProbeTask, words: str, outcome: OutcomeClass
) -> None:
    ranks.will(ranks.fail(probe.id, words, outcome), ranks.measure(1, 64, 128))
    cluster_supervise.supervise(run.path, probe.id)
    assert [result.kind for result in run.read_results()] == ["failed", "measured", "measured"]
    assert len(ranks.starts) == 2


def test_a_second_failure_of_the_users_code_ends_the_job(run: RunDir, ranks: Ranks, probe: ProbeTask) -> None:
    ranks.will(*(ranks.fail(probe.id, "ValueError: mine", "user", attempt=k) for k in (1, 2)))
    cluster_supervise.supervise(run.path, probe.id)
    assert [result.kind for result in run.read_results()] == ["failed", "failed"]
    assert len(ranks.starts) == 2


def test_restarts_share_the_minutes_of_the_job(tmp_path: Path, ranks: Ranks) -> None:
    run = RunDir.create(tmp_path / "other", make_runs.spec(search={"nodes": [1], "max_minutes": 0.02}))
    task = ProbeTask(id="p", job="p", spec=run.read_spec(), workdir=str(run.path), nodes=1, local_batches=(32,))
    run.write_task(task)
    ranks.will(f"import time; time.sleep(0.7); print({KILLED!r}); raise SystemExit(1)")
    cluster_supervise.supervise(run.path, "p")
    assert len(ranks.starts) == 2, "the second start is ended 1.2 s after the first began"


def test_a_full_disk_is_reported_where_the_scheduler_keeps_its_log(
    run: RunDir, ranks: Ranks, training: TrainTask, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise TulaError("cannot write x: No space left on device", "free some space")

    monkeypatch.setattr(RunDir, "write_attempt", full)
    with pytest.raises(SystemExit):
        cluster_supervise.supervise(run.path, training.id)
    assert "No space left on device" in capsys.readouterr().err


def test_a_full_disk_under_the_ranks_is_reported_with_the_folder_and_not_tried_again(
    run: RunDir, ranks: Ranks, training: TrainTask
) -> None:
    ranks.will("raise OSError(28, 'No space left on device', '/scratch/gone/1.pt')", ranks.finish(training.signature))
    cluster_supervise.supervise(run.path, training.id)
    (attempt,) = run.read_attempts(training.id)
    assert attempt.outcome == "disk" and attempt.host
    assert attempt.shortage is not None and attempt.shortage.folder == "/scratch/gone"
    assert "free on the disk of /scratch/gone" in attempt.message
    assert len(ranks.starts) == 1 and not (run.path / shortages.RESERVE_NAME).exists(), "it was given back"
    error = make_training_error(training, [attempt], saved_samples=0)
    assert (error.exit_code, error.code) == (13, "disk")
    cluster_supervise.supervise(run.path, training.id)  # as `tula train` starts it once there is room
    assert (
        run.get_training(training.signature).read_result() is not None and (run.path / shortages.RESERVE_NAME).exists()
    )


def test_ranks_that_could_not_write_why_they_ended_are_known_by_their_exit_code(
    run: RunDir, ranks: Ranks, training: TrainTask
) -> None:
    ranks.will("raise SystemExit(13)")
    cluster_supervise.supervise(run.path, training.id)
    assert outcomes(run, training.id) == ["disk"]


def test_an_out_of_memory_beats_the_peers_that_noticed_it_first(run: RunDir, ranks: Ranks, probe: ProbeTask) -> None:
    peer = textwrap.dedent(ranks.fail(probe.id, GLOO, "peer", rank=0, at=1.0)).replace("sys.exit(1)", "")
    ranks.will(peer + textwrap.dedent(ranks.fail(probe.id, CPU_OOM, "device_oom", rank=1, at=2.0)))
    cluster_supervise.supervise(run.path, probe.id)
    attempt = run.read_attempts(probe.id)[0]
    assert (attempt.outcome, attempt.rank) == ("device_oom", 1)


def test_a_device_error_at_another_batch_is_not_one_that_came_twice(
    run: RunDir, ranks: Ranks, probe: ProbeTask
) -> None:
    failed = [
        ranks.fail(probe.id, "CUDA error: unspecified launch failure", "device_error", attempt=n) for n in (1, 2, 3)
    ]
    ranks.will(
        ranks.measure(1, 32) + failed[0],
        ranks.measure(1, 64) + failed[1],  # another one
        failed[2],
    )
    cluster_supervise.supervise(run.path, probe.id)
    assert outcomes(run, probe.id)[:3] == ["device_error", "device_error", "user"]
    result = run.read_result(make_probe_id(1, 128))
    assert result is not None and result.kind == "failed"
    assert result.message.endswith("as in the previous attempt")


def test_a_batch_after_one_that_a_device_refused_twice_is_tried_twice_too(
    run: RunDir, ranks: Ranks, probe: ProbeTask
) -> None:
    failed = [
        ranks.fail(probe.id, "CUDA error: unspecified launch failure", "device_error", attempt=n) for n in (1, 2, 3)
    ]
    ranks.will(*failed, ranks.measure(1, 64, 128))
    cluster_supervise.supervise(run.path, probe.id)
    assert outcomes(run, probe.id) == ["device_error", "user", "device_error", "done"]


def test_a_killed_rank_is_distinguished_from_the_peers_that_lost_it(
    run: RunDir, ranks: Ranks, probe: ProbeTask
) -> None:
    peer = textwrap.dedent(ranks.fail(probe.id, GLOO, "peer", rank=0)).replace("sys.exit(1)", "")
    ranks.will(f"{peer}\nprint({KILLED!r}); raise SystemExit(1)", ranks.measure(1, 32, 64, 128))
    cluster_supervise.supervise(run.path, probe.id)
    assert outcomes(run, probe.id) == ["signal", "done"]


def told(run: RunDir, *batches: int) -> None:
    """Let the ranks of training s have told how far their micro-batches may be cut: on one GPU, to one sample."""
    splits = tuple(list_splits(batch, micro_batch=batch, micro_batches=1) for batch in batches)
    run.get_training("s").write_micro_batches(MicroBatches(splits=splits, normalised=0))


@pytest.mark.promise(
    "a process",
    "a GPU is out of memory",
    "the training continues with the same batch in smaller micro-batches. If that fails too, it continues with the"
    " next smaller batch",
)
def test_training_out_of_memory_goes_on_in_smaller_micro_batches_and_then_at_a_smaller_batch(
    run: RunDir, ranks: Ranks, training: TrainTask
) -> None:
    run.write_task(training.model_copy(update={"ladder": (Rung(batch=6), Rung(batch=2))}))
    told(run, 6, 2)
    ranks.will(*(ranks.fail(f"train-s-{k}", CPU_OOM, "device_oom") for k in (1, 2)), ranks.finish("s"))
    cluster_supervise.supervise(run.path, training.id)
    tasks = run.get_training("s").read_tasks()
    assert [(task.batch, task.splits) for task in tasks] == [(6, 1), (6, 2), (6, 6)]
    summary = run.get_training("s").read_summary()
    assert summary is not None and summary.causes == (
        "out of memory at batch 6: each rank now computes a step in 2 micro-batches of 3",
        "out of memory at batch 6: each rank now computes a step in 6 micro-batches of 1",
    )


def test_training_out_of_memory_with_micro_batches_of_one_sample_ends(
    run: RunDir, ranks: Ranks, training: TrainTask
) -> None:
    run.write_task(training.model_copy(update={"ladder": (Rung(batch=4), Rung(batch=2))}))
    told(run, 4, 2)
    ranks.will(*(ranks.fail(f"train-s-{k}", CPU_OOM, "device_oom") for k in (1, 2, 3)))
    cluster_supervise.supervise(run.path, training.id)
    assert ranks.starts == ["train-s-1", "train-s-2", "train-s-3"], "a smaller batch takes as much at a time"
    newest = run.get_training("s").read_newest_task()
    assert newest is not None and (newest.batch, newest.splits) == (4, 4)
    error = make_training_error(newest, run.get_training("s").read_attempts(), saved_samples=0)
    assert "out of memory at the smallest batch, 4 with micro-batches of 1:" in error.message


def test_training_out_of_memory_goes_on_at_the_next_smaller_batch_where_that_is_asked_for(
    run: RunDir, ranks: Ranks, training: TrainTask
) -> None:
    shrink = make_runs.spec(train={"epochs": 1, "oom_policy": "shrink"})
    times = {128: 0.4, 64: 0.25, 32: 0.2}
    ladder = tuple(Rung(batch=b, prediction=make_runs.prediction(1, b, step_time=s)) for b, s in times.items())
    run.write_task(training.model_copy(update={"spec": shrink, "ladder": ladder}))
    told(run, 128, 64, 32)
    ranks.will(ranks.fail("train-s-1", CPU_OOM, "device_oom"), ranks.finish("s"))
    cluster_supervise.supervise(run.path, training.id)
    relaunch = run.read_task("train-s-2")
    assert isinstance(relaunch, TrainTask)
    assert relaunch.batch == 64
    assert [rung.batch for rung in relaunch.ladder] == [64, 32]
    summary = run.get_training("s").read_summary()
    assert summary is not None
    assert summary.start_batch == 128
    assert summary.attempts == 2
    assert summary.predicted_step == 0.25, "of the batch that the actual step time is of"
    assert summary.causes == (
        "out of memory at batch 128; its micro-batches are not split: train.oom_policy is shrink",
    )


def test_a_crash_under_a_memory_limit_is_out_of_memory(tmp_path: Path, ranks: Ranks) -> None:
    limited = make_runs.spec(search={"nodes": [1]}, cluster={"memory_per_gpu": "100MB", "device": "cpu"})
    run = RunDir.create(tmp_path / "other", limited)
    task = ProbeTask(id="p", job="p", spec=limited, workdir=str(run.path), nodes=1, local_batches=(32,))
    run.write_task(task)
    ranks.will(f"print({KILLED.replace('-9', '-11')!r}); raise SystemExit(1)")
    cluster_supervise.supervise(run.path, "p")
    assert isinstance(run.read_result(make_probe_id(1, 32)), OutOfMemory)


def test_training_out_of_memory_at_the_smallest_batch_ends(run: RunDir, ranks: Ranks, training: TrainTask) -> None:
    ranks.will(*(ranks.fail(f"train-s-{k}", CPU_OOM, "device_oom") for k in (1, 2, 3)))
    cluster_supervise.supervise(run.path, training.id)
    assert ranks.starts == ["train-s-1", "train-s-2", "train-s-3"]
    assert run.get_training("s").read_summary() is None


def test_a_training_that_diverges_is_not_started_again(run: RunDir, ranks: Ranks, training: TrainTask) -> None:
    ranks.will(ranks.fail("train-s-1", "Diverged: the loss is not finite", "diverged"), ranks.finish("s"))
    cluster_supervise.supervise(run.path, training.id)
    assert ranks.starts == ["train-s-1"] and run.get_training("s").read_summary() is None
    assert run.get_training("s").find_diverged_attempt() == run.read_attempts()[-1]


@pytest.mark.promise(
    "a process",
    "the loss of a training with a growing batch is not finite, or rises and stays high",
    "the training restarts once from the previous checkpoint, with half the learning-rate factor. If this"
    " happens again, it ends with exit code 9",
)
def test_a_ramp_that_diverges_is_started_again_once_at_half_the_factor(
    run: RunDir, ranks: Ranks, training: TrainTask
) -> None:
    row = {"kind": "diverged", "samples": 640, "message": "the loss is not finite", "sound": 512, "lr_factor": 8.0}
    path = run.get_training("s").metrics_path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(row) + "\n")
    words = "Diverged: the loss is not finite at epoch 2.00"
    ranks.will(*(ranks.fail(f"train-s-{k}", words, "diverged") for k in (1, 2)), ranks.finish("s"))
    cluster_supervise.supervise(run.path, training.id)
    assert ranks.starts == ["train-s-1", "train-s-2"], "once"
    relaunch = run.read_task("train-s-2")
    assert isinstance(relaunch, TrainTask) and relaunch.max_lr_factor == 4
    assert relaunch.cause == f"{words}; restarted from the previous checkpoint with train.max_lr_factor: 4"
    assert run.get_training("s").find_diverged_attempt() == run.read_attempts()[-1]


def test_host_memory_goes_on_once_with_fewer_loader_processes(run: RunDir, ranks: Ranks, training: TrainTask) -> None:
    ranks.will(*(ranks.fail(f"train-s-{k}", "DataLoader worker is killed", "host_oom") for k in (1, 2)))
    cluster_supervise.supervise(run.path, training.id)
    assert ranks.starts == ["train-s-1", "train-s-2"]
    relaunch = run.read_task("train-s-2")
    assert isinstance(relaunch, TrainTask)
    assert (relaunch.workers, relaunch.batch) == (2, 128)


def test_loader_processes_from_the_cores_become_the_fewest_and_then_one(
    run: RunDir, ranks: Ranks, training: TrainTask
) -> None:
    job = make_runs.spec(train={"epochs": 1, "workers": "auto"})
    first = training.model_copy(update={"spec": job, "workers": "auto"})
    run.write_task(first)
    ranks.will(*(ranks.fail(f"train-s-{k}", "DataLoader worker is killed", "host_oom") for k in (1, 2, 3)))
    cluster_supervise.supervise(run.path, first.id)
    tasks = [run.read_task(name) for name in ranks.starts]
    assert [task.workers for task in tasks if isinstance(task, TrainTask)] == ["auto", 2, 1]


def test_lost_processes_restart_training_a_bounded_number_of_times(
    run: RunDir, ranks: Ranks, training: TrainTask
) -> None:
    ranks.will(f"print({KILLED!r}); raise SystemExit(1)")
    cluster_supervise.supervise(run.path, training.id)
    assert len(ranks.starts) == run.read_spec().train.max_attempts


def test_a_machine_that_has_lost_its_gpu_is_not_tried_again(run: RunDir, ranks: Ranks, training: TrainTask) -> None:
    run.write_attempt(make_runs.attempt("train-s-1", start=1.0, end=2.0))
    rendezvous_file = run.get_rendezvous_path("train-s-1", 1)
    rendezvous_file.parent.mkdir()
    rendezvous_file.write_text("127.0.0.1 4711 cuda\n")
    ranks.will(ranks.fail("train-s-1", "NoGpu: torch sees no GPU on h", "device_fault", attempt=2, fault="no_gpu"))
    cluster_supervise.supervise(run.path, training.id)
    assert ranks.starts == ["train-s-1"]
    last = run.read_attempts("train-s-1")[-1]
    assert last.outcome == "user"
    assert "nvidia-smi" in last.message


def test_a_second_call_goes_on_at_the_newest_attempt(run: RunDir, ranks: Ranks, training: TrainTask) -> None:
    smaller = training.model_copy(update={"id": "train-s-2", "attempt": 2, "ladder": training.ladder[1:]})
    run.write_task(smaller)
    ranks.will(ranks.finish("s"))
    cluster_supervise.supervise(run.path, training.id)
    assert ranks.starts == ["train-s-2"]


def test_a_summary_that_a_killed_supervisor_still_owed_is_written(
    run: RunDir, ranks: Ranks, training: TrainTask
) -> None:
    subprocess.run([sys.executable, "-c", ranks.finish("s")], check=True)
    run.write_attempt(make_runs.attempt(training.id, start=1000.0, end=1036.0))
    ranks.will("raise SystemExit(1)")
    cluster_supervise.supervise(run.path, training.id)
    assert ranks.starts == []
    summary = run.get_training("s").read_summary()
    assert summary is not None
    assert summary.actual_hours == pytest.approx(0.01)


def test_a_cancelled_job_is_not_started(run: RunDir, ranks: Ranks, training: TrainTask) -> None:
    run.mark_job_cancelled(training.job)
    ranks.will(ranks.finish("s"))
    cluster_supervise.supervise(run.path, training.id)
    assert ranks.starts == []


def test_ranks_that_end_well_without_a_result_have_not_succeeded(
    run: RunDir, ranks: Ranks, training: TrainTask, probe: ProbeTask
) -> None:
    ranks.will("")
    cluster_supervise.supervise(run.path, training.id)
    assert len(ranks.starts) == 2, "the same at once, twice"
    assert "twice in the same way within" in run.get_training(training.signature).read_attempts()[-1].message
    assert outcomes(run, training.id) == ["unknown"]
    cluster_supervise.supervise(run.path, probe.id)
    failed = run.read_result(make_probe_id(1, 32))
    assert failed is not None
    assert failed.kind == "failed"


def test_cancelling_ends_the_ranks_and_starts_nothing_more(run: RunDir, ranks: Ranks, training: TrainTask) -> None:
    mark = run.path / "jobs" / f"{training.job}.cancelled"
    ranks.will(f"import pathlib, time; pathlib.Path({str(mark)!r}).parent.mkdir(exist_ok=True); "
               f"pathlib.Path({str(mark)!r}).touch(); time.sleep(60)")  # fmt: skip
    began = time.monotonic()
    cluster_supervise.supervise(run.path, training.id)
    assert time.monotonic() - began < 20
    assert outcomes(run, training.id) == ["cancelled"]


def test_a_probe_job_ends_when_its_minutes_are_over(tmp_path: Path, ranks: Ranks) -> None:
    run = RunDir.create(tmp_path / "other", make_runs.spec(search={"nodes": [1], "max_minutes": 0.01}))
    task = ProbeTask(id="p", job="p", spec=run.read_spec(), workdir=str(run.path), nodes=1, local_batches=(32,))
    run.write_task(task)
    ranks.will("import time; time.sleep(60)")
    cluster_supervise.supervise(run.path, "p")
    failed = run.read_result(make_probe_id(1, 32))
    assert failed is not None
    assert failed.kind == "failed"
    assert "max_minutes" in failed.message


def test_an_attempt_of_a_killed_supervisor_is_closed_at_its_last_sign_of_life(
    run: RunDir, ranks: Ranks, training: TrainTask
) -> None:
    run.write_attempt(make_runs.attempt(training.id, start=1000.0))
    log = run.get_log_path(training.id, 1)
    log.parent.mkdir()
    log.touch()
    os.utime(log, (1500.0, 1500.0))
    ranks.will(ranks.finish("s"))
    cluster_supervise.supervise(run.path, training.id)
    lost, done = run.read_attempts(training.id)
    assert (lost.outcome, lost.ended_at, lost.number) == ("signal", 1500.0, 1)
    assert (done.outcome, done.number) == ("done", 2)


_HOLD = """
    import sys, time, pathlib
    sys.path[:0] = sys.argv[1].split(":")
    from tula_cli.cluster import local
    from tula_cli.run.directory import RunDir
    run, name, seconds = RunDir(pathlib.Path(sys.argv[2])), sys.argv[3], float(sys.argv[4])
    task = run.read_task(name)
    with local.register_job_on_machine(run, task) as ticket, open(run.path / "times", "a") as times:
        print(name, "begin", time.monotonic(), file=times, flush=True)
        time.sleep(seconds)
        print(name, "end", time.monotonic(), [one.holder for one in ticket.list_conflicting_trainings()], file=times, flush=True)
"""


def _hold(run: RunDir, name: str, seconds: float = 0.5, **environ: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", textwrap.dedent(_HOLD), ":".join(sys.path), str(run.path), name, str(seconds)]
    return subprocess.Popen(command, env={**os.environ, **environ})


def _times(run: RunDir) -> dict[tuple[str, str], float]:
    rows = [line.split() for line in (run.path / "times").read_text().splitlines()]
    return {(row[0], row[1]): float(row[2]) for row in rows}


def test_probes_of_one_machine_run_one_after_the_other_and_trainings_wait_for_none(
    run: RunDir, training: TrainTask, tmp_path: Path
) -> None:
    for name in ("p1", "p2"):
        run.write_task(
            ProbeTask(id=name, job=name, spec=run.read_spec(), workdir=str(run.path), nodes=1, local_batches=(32,))
        )
    run.write_task(training)
    (tmp_path / "other").mkdir()
    children = [
        _hold(run, "p1", 1.0),
        _hold(run, "p2", 1.0, TMPDIR=str(tmp_path / "other")),
        _hold(run, training.id, 2.0),
    ]
    assert [child.wait(30) for child in children] == [0, 0, 0]
    times = _times(run)
    first, second = sorted(("p1", "p2"), key=lambda name: times[name, "begin"])
    assert times[second, "begin"] >= times[first, "end"], "two values of TMPDIR are one machine"
    assert times[training.id, "begin"] < times[second, "begin"], "a training does not wait"
    assert f"['{training.job} of {run.path}']" in (run.path / "times").read_text(), "a probe sees it"


def test_the_ranks_die_with_a_killed_supervisor(run: RunDir, tmp_path: Path, training: TrainTask) -> None:
    code = f"""
        import sys, tempfile
        tempfile.tempdir = {str(tmp_path)!r}
        sys.path[:0] = sys.argv[1].split(":")
        from tula_cli.cluster import rank_processes, supervise
        script = "import os, time; open({str(tmp_path / "pid")!r}, 'w').write(str(os.getpid())); time.sleep(60)"
        rank_processes.RankLaunchPlan.make_command_line = lambda _: [sys.executable, "-c", script]
        import pathlib
        supervise.supervise(pathlib.Path({str(run.path)!r}), "train-s-1")
    """
    supervisor = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), ":".join(sys.path)])
    pid_file = tmp_path / "pid"
    deadline = time.monotonic() + 30
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    supervisor.kill()
    supervisor.wait()
    deadline = time.monotonic() + 5
    while read_start_time(int(pid_file.read_text())) is not None:
        assert time.monotonic() < deadline, "the rank outlived its supervisor"
        time.sleep(0.05)


def test_every_rank_of_a_job_here_is_started_by_its_supervisor(run: RunDir, probe: ProbeTask, tmp_path: Path) -> None:
    two_nodes, command = probe.model_copy(update={"nodes": 2}), LeaderCommand(task=probe.id, attempt=1)
    here = Allocation(0, 1, environ={"MASTER_ADDR": "elsewhere"})
    starts = RankLaunchPlan(run, here, two_nodes, command).make_rank_commands(tmp_path / "log")
    assert [start.environment["RANK"] for start in starts] == ["0", "1"]
    assert {(start.environment["WORLD_SIZE"], start.environment["OMP_NUM_THREADS"]) for start in starts} == {("2", "1")}
    assert all("MASTER_ADDR" not in start.environment for start in starts), "they meet through a file"
    assert all(start.is_forkable and start.command[-3:] == (str(run.path.resolve()), probe.id, "1") for start in starts)


@pytest.mark.promise("a process", "one rank fails and makes other ranks fail", "the rank that failed first is reported")
def test_of_several_ranks_the_killed_one_is_reported_and_not_those_that_lost_it(
    run: RunDir, probe: ProbeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"""
        import os, signal, time
        if os.environ["RANK"] == "1" and not os.path.exists("once"):
            open("once", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        print({GLOO!r})
        raise SystemExit(1)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    monkeypatch.setattr(RankLaunchPlan, "make_command_line", lambda _: command)
    monkeypatch.setattr(task_records, "MAX_RESTARTS", 0)
    run.write_task(probe.model_copy(update={"nodes": 2}))
    cluster_supervise.supervise(run.path, probe.id)
    (attempt,) = run.read_attempts(probe.id)
    assert (attempt.outcome, attempt.rank, attempt.message) == ("signal", 1, "its process was killed by SIGKILL")


def test_ranks_that_do_not_notice_the_loss_of_one_are_ended(
    run: RunDir, probe: ProbeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import os, time; time.sleep(60 * (os.environ['RANK'] == '0')); os._exit(3)"
    monkeypatch.setattr(RankLaunchPlan, "make_command_line", lambda _: [sys.executable, "-c", script])
    monkeypatch.setattr(cluster_attempt, "PEER_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(task_records, "MAX_RESTARTS", 0)
    run.write_task(probe.model_copy(update={"nodes": 2}))
    cluster_supervise.supervise(run.path, probe.id)
    (attempt,) = run.read_attempts(probe.id)
    assert attempt.outcome == "unknown", "rank 1 left of itself; that rank 0 was killed then is no finding"


# --- on SLURM


def allocation(index: int, count: int) -> Allocation:
    return Allocation(index, count, index % 2, "7", environ={}, cpus=8)


def on_slurm(probe: ProbeTask, **slurm: object) -> ProbeTask:
    spec = make_runs.spec(cluster={"kind": "slurm", "gpus_per_node": 2, "slurm": slurm})
    return probe.model_copy(update={"spec": spec, "nodes": 2})


def test_a_leader_waits_for_a_cause_where_ranks_have_only_lost_a_peer(run: RunDir, probe: ProbeTask) -> None:
    task = on_slurm(probe, launcher="torchrun")
    run.write_task(task)
    attempt = cluster_attempt.open_attempt(run, allocation(0, 2), task)
    command = LeaderCommand(task=task.id, attempt=attempt.number, ranks=4)
    leader = RunningAttempt(
        run, allocation(0, 2), cast(Any, None), cast(Any, None), task, attempt, command, math.inf, cast(Any, None)
    )

    def write(rank: int, outcome: str) -> None:
        failure = Failure(
            task=task.id, attempt=attempt.number, rank=rank, host="n", pid=1, outcome=cast(Any, outcome), message="",
            detail="", failed_at=1.0,
        )  # fmt: skip
        run.write_failure(failure)

    for rank in (0, 1, 3):
        write(rank, "peer")
    writing = threading.Timer(0.5, write, (2, "signal"))
    started = time.monotonic()
    writing.start()
    leader._wait_for_reports()
    assert 0.4 < time.monotonic() - started < cluster_attempt.PEER_GRACE_SECONDS
    assert [failure.outcome for failure in run.read_failures(task.id)].count("signal") == 1


def test_srun_starts_a_rank_for_each_supervisor(run: RunDir, probe: ProbeTask) -> None:
    task = on_slurm(probe)
    start = RankLaunchPlan(run, allocation(3, 4), task, LeaderCommand(task=task.id, attempt=2, ranks=4))
    assert start.make_command_line() == [sys.executable, "-u", "-m", "tula_cli.worker", str(run.path), probe.id, "2"]
    environment = start.make_environments()[0]
    ranks = {name: environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")}
    assert ranks == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "OMP_NUM_THREADS": "8"}


def test_torchrun_starts_the_ranks_of_a_node_where_all_agents_meet(run: RunDir, probe: ProbeTask) -> None:
    task = on_slurm(probe, launcher="torchrun")
    command = LeaderCommand(task=task.id, attempt=1, ranks=4, meeting="10.0.0.1:4711")
    start = RankLaunchPlan(run, allocation(1, 2), task, command)
    wanted = {"--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=4711", "--nproc-per-node=2"}
    assert wanted < set(start.make_command_line())
    environment = start.make_environments()[0]
    assert "RANK" not in environment, "torchrun sets it"
    assert environment["OMP_NUM_THREADS"] == "4"
    assert get_first_rank(allocation(1, 2), task) == 2


def test_a_wrapper_stands_before_every_rank(run: RunDir, probe: ProbeTask) -> None:
    words, command = ["numactl", "--localalloc"], LeaderCommand(task=probe.id, attempt=1, ranks=4, meeting="h:1")
    by_srun = on_slurm(probe, wrapper=words)
    assert RankLaunchPlan(run, allocation(0, 4), by_srun, command).make_command_line()[:3] == [*words, sys.executable]
    by_torchrun = on_slurm(probe, wrapper=words, launcher="torchrun")
    argv = RankLaunchPlan(run, allocation(0, 4), by_torchrun, command).make_command_line()
    at = argv.index("--no-python")
    assert argv[at + 1 : at + 4] == [*words, sys.executable]


def test_ranks_beyond_a_smaller_number_of_nodes_sit_it_out(
    run: RunDir, probe: ProbeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(
        RunningAttempt, "run_ranks_to_exit", lambda value: started.append(f"{value.task.id}.{value.attempt.number}")
    )
    run.write_attempt(make_runs.attempt(probe.id, start=1.0))
    commands = [*(LeaderCommand(task=probe.id, attempt=1, ranks=ranks) for ranks in (4, 2)), LeaderCommand(task=None)]
    for index in (1, 3):
        follower = Supervisor(run, allocation(index, 4))
        for number, command in enumerate(commands):
            run.write_leader_command("7.0", number, command)
        follower.follow_leader()
    assert len(started) == 3, "the second command is for ranks 0 and 1"


def test_an_out_of_memory_of_the_cgroup_is_the_hosts_on_a_gpu_and_the_batchs_on_a_cpu(
    run: RunDir, probe: ProbeTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome(device: str, *driver: str) -> str | None:
        monkeypatch.setattr(devices, "GPU_DRIVER_FILES", [str(tmp_path / name) for name in driver])
        spec = make_runs.spec(cluster={"device": device})
        failure = failures.find_rank_failure(run, probe.model_copy(update={"spec": spec}), attempt, exited)
        assert failure.rank == 1
        return failure.outcome

    (tmp_path / "kfd").touch()
    exited = failures.RankExit(exit_code=-9, oom_kill=True, words="", rank=1)
    attempt = make_runs.attempt(probe.id, start=1.0)
    assert outcome("cuda", "nvidiactl") == "host_oom", "as asked for, whatever is to be seen"
    assert outcome("auto", "nvidiactl", "kfd") == "host_oom", "an AMD GPU"
    assert outcome("auto", "nvidiactl") == "device_oom"
    assert outcome("cpu", "kfd") == "device_oom"
    result = make_probe(Truth(), 1, 32)
    on_gpu = result.environment.model_copy(update={"device": "cuda"})
    run.write_result(result.model_copy(update={"environment": on_gpu}))
    assert outcome("auto", "nvidiactl") == "host_oom", "as the ranks of a probe saw it"


@pytest.mark.parametrize(
    ("cgroups", "counter"),
    [
        (
            "9:memory:/slurm_n1/uid_0/job_7/step_0/task_0",
            "memory/slurm_n1/uid_0/job_7/step_0/task_0/memory.oom_control",
        ),
        ("0::/system.slice/slurmstepd.scope/job_7/step_0", "system.slice/slurmstepd.scope/job_7/step_0/memory.events"),
        ("3:cpu:/x\n0::/", None),
        ("no colons\n0::/", None),
    ],
)
def test_kills_for_memory_are_counted_in_the_own_cgroup(
    cgroups: str, counter: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "CONTROL_GROUPS_FOLDER", tmp_path)
    oom_counters = failures._list_oom_counters(cgroups)
    assert oom_counters == ([] if counter is None else [tmp_path / counter])
    for path in oom_counters:
        path.parent.mkdir(parents=True)
        path.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
        assert failures._read_oom_kills(path) == 3
        assert failures._read_oom_kills(path.with_name("gone")) is None


def test_nothing_of_a_failed_attempt_holds_the_device_when_the_next_one_starts(
    run: RunDir, ranks: Ranks, training: TrainTask, tmp_path: Path
) -> None:
    device, message = tmp_path / "device", tmp_path / "held"
    device.touch()
    leaves = f"""
        import subprocess, sys
        with open({str(device)!r}) as held:
            subprocess.Popen(["sleep", "60"], stdin=held, stdout=subprocess.DEVNULL, start_new_session=True)
        sys.exit({CPU_OOM!r})
    """
    looks = f"""
        import pathlib
        links = [str(link.readlink()) for link in pathlib.Path("/proc").glob("[0-9]*/fd/0") if link.is_symlink()]
        pathlib.Path({str(message)!r}).write_text(str(links.count({str(device)!r})))
    """
    ranks.will(leaves, textwrap.dedent(looks) + ranks.finish("s"))
    cluster_supervise.supervise(run.path, training.id)
    assert message.read_text() == "0"
    assert outcomes(run, "train-s-1") == ["device_oom"]
    assert outcomes(run, "train-s-2") == ["done"], "one rung, not two"
    assert "killed processes of an earlier attempt" in run.get_log_path("train-s-2", 1).read_text()
