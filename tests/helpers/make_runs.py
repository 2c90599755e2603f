"""Run directories for tests, and a launcher that starts no processes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from make_results import Truth, make_probe

from tula_cli.cluster.decisions import decide_next_action
from tula_cli.cluster.relaunch import apply_decision, read_history
from tula_cli.cluster.scheduler import SchedulerState
from tula_cli.run import job_runs
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.records.base import OutcomeClass
from tula_cli.run.records.failures import Failure, Fallback, Recovery, Relaunch
from tula_cli.run.records.inspections import ClusterReport, NodeReport, Transfer
from tula_cli.run.records.jobs import Attempt, Job
from tula_cli.run.records.probes import Failed, OutOfMemory
from tula_cli.run.records.recommendations import Prediction, Recommendation
from tula_cli.run.records.results import Branch, EvaluationRecord, StepChange, StepParts, Summary, TrainResult, Tuning
from tula_cli.run.records.tasks import CheckTask, EvaluateTask, ProbeTask, Rung, Task, TrainTask, make_probe_id
from tula_cli.run.snapshot import Snapshot
from tula_cli.spec.ags import Arm
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate_job

SPEC: dict[str, Any] = {
    "name": "toy",
    "model": {"name": "resnet18"},
    "dataset": {"name": "digits"},
    "optimizer": {"lr": 0.1},
    "train": {"epochs": 4, "method": "ags"},
    "search": {"nodes": [1, 2], "max_node_hours": 10, "strategy": "sweep"},
}
START = 1_700_000_000.0  # Unix time


def spec(**changes: Any) -> JobSpec:
    """Return a small spec; `changes` replace whole sections. The default method is ags, the default strategy sweep."""
    content = {**SPEC, **changes}
    train, search = {"method": "ags", **content["train"]}, {"strategy": "sweep", **content["search"]}
    return validate_job({**content, "train": train, "search": search}, source="test")


def script_spec(cluster: dict[str, Any] | None = None, **length: int) -> JobSpec:
    """Return a small spec with a script of the user; `length` is that of section script."""
    command = "python /home/me/finetune.py -b {local_batch}"
    script = {"command": command, "length": length, "reference": {"batch": 256}}
    content = {"name": "own", "script": script, "search": SPEC["search"], **({"cluster": cluster} if cluster else {})}
    return validate_job(content, source="test")


def create_runs(root: Path, job: JobSpec) -> tuple[Run, ...]:
    """Create the runs of all node types and text lengths of a job."""
    runs = job_runs.make_runs(root, job)
    job_runs.save_runs(runs, None)
    return runs


@dataclass
class FakeLauncher:
    """A launcher that reports the states set by a test and records all calls."""

    says: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    starts_at: float | None = None
    submitted: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    asked: int = 0
    scheduler: str = "local"
    flags: dict[str, bool] = field(default_factory=dict)  # attributes of a state: held, suspended ...

    def render_script(self, run: RunDir, task: ProbeTask | TrainTask) -> str:
        return f"#!/bin/bash\n# {task.job}"

    def submit(self, run: RunDir, task: ProbeTask | TrainTask) -> Job:
        self.submitted.append(task.job)
        self.says.setdefault(task.job, "running")
        return scheduler_job(task.job, nodes=task.nodes, scheduler=self.scheduler)

    def query_states(self, snapshot: Snapshot, jobs: Sequence[Job]) -> dict[str, SchedulerState]:
        self.asked += 1
        text = {job.id: self.says.get(job.id, "ended") for job in jobs}
        return {id_: SchedulerState(state, self.reason, self.starts_at, **self.flags) for id_, state in text.items()}  # type: ignore[arg-type]

    def cancel(self, run: RunDir, job: Job) -> None:
        assert run.is_cancelled(job.id), "the mark comes first"
        self.cancelled.append(job.id)
        self.says[job.id] = "ended"


def scheduler_job(id_: str, *, nodes: int = 1, scheduler: str = "local", at: float = START) -> Job:
    return Job(id=id_, scheduler=scheduler, scheduler_id="4711", nodes=nodes, submitted_at=at)


def attempt(task: str, *, number: int = 1, start: float = START, end: float | None = None, **changes: Any) -> Attempt:
    outcome = None if end is None else "done"
    fields = {"outcome": outcome, "host": "n1", **changes}
    return Attempt(task=task, number=number, started_at=start, ended_at=end, **fields)


def execute_reaction(
    run: RunDir, task: Task, failure: Failure | None, *, before: int = 0, reached: int | None = None
) -> Task | None:
    """Execute the reaction to the outcome of a local attempt after `before` equal failures; return the task started next."""
    last = attempt(task.id, end=START + 60)
    earlier = [last.model_copy(update={"failure": failure, "number": -number}) for number in range(before)]
    known = read_history(run, task, failure, last, earlier=earlier, reached=reached)
    return apply_decision(run, task, failure, decide_next_action(task, failure, known))


def evaluation(task: EvaluateTask, **changes: Any) -> EvaluationRecord:
    """Return the evaluation record of a task."""
    same = task.model_dump(include={"signature", "key", "weights", "path", "samples", "nodes", "local_batch"})
    fields = {"test": task.spec.dataset.test is not None, "dataset": "digits in data", "size": 360, "seconds": 0.5}
    record = {"metrics": {"top1": 91.5, "loss": 0.31}, "evaluated_at": START + 50}
    return EvaluationRecord(**{**same, **fields, **record, **changes})


def add_probes(run: RunDir, nodes: int, local_batches: tuple[int, ...], *, at: float = START) -> str:
    """Add a submitted probe job without results; return its id."""
    name = f"probe-n{nodes:03d}"
    run.write_task(
        ProbeTask(id=name, job=name, spec=run.read_spec(), workdir="/", nodes=nodes, local_batches=local_batches)
    )
    run.write_job(scheduler_job(name, nodes=nodes, at=at))
    return name


def add_measured(run: RunDir, nodes: int, local: int, *, at: float = START + 10) -> None:
    run.write_result(make_probe(Truth(), nodes, local, measured_at=at))


def probe_identity(nodes: int, local: int) -> dict[str, Any]:
    """Return the common first fields of all results of a probe with one GPU per node."""
    return {"id": make_probe_id(nodes, local), "nodes": nodes, "gpus_per_node": 1, "local_batch": local}


def add_out_of_memory(run: RunDir, nodes: int, local: int, *, assumed: bool = False) -> None:
    words = "CUDA out of memory"
    run.write_result(OutOfMemory(**probe_identity(nodes, local), assumed=assumed, message=words))


def add_failed(
    run: RunDir, nodes: int, local: int, message: str = "ValueError: bad", outcome: OutcomeClass = "user"
) -> None:
    run.write_result(Failed(**probe_identity(nodes, local), outcome=outcome, message=message))


def prediction(nodes: int, batch: int, **changes: Any) -> Prediction:
    fields: dict[str, Any] = {
        "step_time": 0.1,
        "step_low": 0.09,
        "step_high": 0.11,
        "hours": 0.5 / nodes,
        "hours_low": 0.45 / nodes,
        "hours_high": 0.56 / nodes,
        "cost": 0.7,
        "peak_memory": 3 * 1024**3,
        "headroom": 0.25,
        "measured": True,
        **changes,
    }
    return Prediction(nodes=nodes, batch=batch, local_batch=batch // nodes, **fields)


def recommendation(**changes: Any) -> Recommendation:
    rows = tuple(
        prediction(nodes, batch, hours=1.5 / nodes + 8 / batch, cost=1.4 + 8 * nodes / batch, measured=batch < 256)
        for nodes in (1, 2)
        for batch in (32, 64, 128, 256, 512)
    )
    rows = tuple(sorted(rows, key=lambda row: row.hours))
    fields: dict[str, Any] = {
        "objective": "knee",
        "curve": "time",
        "choice": rows[2],
        "reason": "the knee of the fastest time at each batch",
        "rows": rows,
        "runners_up": (rows[1], rows[4]),
        "currency": "USD",
        "price": "1.00 USD a node-hour (on-demand list price)",
        "fit_error": 0.021,
        "fit": "12 probes, median error 2.1 %",
        "created_at": START,
        **changes,
    }
    return Recommendation(**fields)


def add_training(
    run: RunDir,
    *,
    rows: Sequence[Mapping[str, Any]] = (),
    signature: str = "ab12cd34",
    at: float = START,
) -> str:
    """Add a submitted training job and its metrics; return the job's id."""
    name = f"train-{signature}"
    ladder = (Rung(batch=128, prediction=prediction(2, 128)), Rung(batch=64), Rung(batch=32))
    run.write_task(
        TrainTask(
            id=f"{name}-1", job=name, spec=run.read_spec(), workdir="/", nodes=2, signature=signature, attempt=1, ladder=ladder, workers=2,
        )
    )  # fmt: skip
    run.write_job(scheduler_job(name, nodes=2, at=at))
    path = run.get_training(signature).metrics_path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def metrics(now: float = START + 60) -> list[dict[str, Any]]:
    """Return the rows of a training run that is half finished."""
    return [
        {"kind": "start", "time": START, "samples": 0, "epoch": 0.0, "attempt": 1, "batch": 128, "nodes": 2},
        {"kind": "step", "time": START + 20, "samples": 640, "epoch": 0.5, "step": 5, "loss": 2.1, "lr": 0.1,
         "step_time": 0.12, "data_wait": 0.01, "eta": 100.0},
        {"kind": "epoch", "time": START + 40, "samples": 1280, "epoch": 1, "loss": 1.9, "lr": 0.1, "eval_loss": 1.8,
         "top1": 61.0, "top5": 90.0, "step_time": 0.12, "predicted_step": 0.1, "step_low": 0.09, "step_high": 0.11,
         "within": False, "eval_seconds": 1.0, "ags": None},
        {"kind": "warning", "time": START + 40, "samples": 1280, "message": "a step takes 120 ms, predicted 90 to 110"},
        {"kind": "step", "time": now - 10, "samples": 1920, "epoch": 1.5, "step": 15, "loss": 1.7, "lr": 0.1,
         "step_time": 0.11, "data_wait": 0.01, "eta": 80.0},
    ]  # fmt: skip


def step_change(**changes: Any) -> StepChange:
    fields: dict[str, Any] = {
        "samples": 320, "epoch": 0.25, "began_at": START + 10, "parts": ("network",), "seconds_left": 90.0,
        "before": StepParts(step=0.06, data=0.002, compute=0.05, sync=0.008),
        "after": StepParts(step=0.09, data=0.002, compute=0.05, sync=0.038),
        "seconds_left_before": 60.0, "cost_more": 0.5, "currency": "USD", **changes,
    }  # fmt: skip
    return StepChange(**fields)


def branch(arm: str, **changes: Any) -> Branch:
    fields = {"epochs": 1.0, "samples": 640, "loss": 1.5, "top1": 50.0, "diverged": False, "seconds": 3.0}
    return Branch(arm=arm, **{**fields, **changes})


def tuning(branches: Sequence[Branch], *, chosen: str | None = None) -> Tuning:
    arms = {name: Arm(name=name, lr_factor=factor) for name, factor in (("lbt", 1), ("x2", 2), ("x4", 4))}
    return Tuning(
        signature="ab12cd34", batch=128, start=1280, epoch=1.0, arms=tuple(arms.values()), branches=tuple(branches),
        chosen=arms[chosen] if chosen else None,
    )  # fmt: skip


def train_result(signature: str = "ab12cd34") -> TrainResult:
    return TrainResult(
        signature=signature, nodes=2, batch=64, samples=5120, steps=60, epochs=4, metrics={"loss": 0.9, "top1": 81.0, "top5": 97.0},
        best_top1=83.0, best_epoch=3, step_time=0.105, finished_at=START + 300,
    )  # fmt: skip


def out_of_memory_at(batch: int) -> Recovery:
    """Return a relaunch at the next smaller batch."""
    fallback = Fallback(rung=0, splits=1, batch=batch)
    return Recovery(failure=Failure(outcome="device_oom"), decision=Relaunch(fallback=fallback))


def summary(**changes: Any) -> Summary:
    fields: dict[str, Any] = {
        "signature": "ab12cd34", "nodes": 2, "start_batch": 128, "batch": 64, "attempts": 2, "predicted_hours": 0.08,
        "actual_hours": 0.1, "predicted_cost": 0.16, "actual_cost": 0.2, "predicted_step": 0.1, "actual_step": 0.105,
        "metrics": {"loss": 0.9, "top1": 81.0}, "best_top1": 83.0, "best_epoch": 3, "currency": "USD",
        "recoveries": (out_of_memory_at(128),), **changes,
    }  # fmt: skip
    return Summary(**fields)


# --- a check of the cluster


def node_report(number: int, **changes: Any) -> NodeReport:
    """Return the report of one node of an imaginary cluster."""
    fields = {
        "node": number, "host": f"n{number + 1}", "ranks": 1, "gpus": ("A100",), "gpu_memory": 10**9, "driver": "550",
        "torch": "2.6", "cuda": "12", "nccl": "2.2", "python": "3.11", "cpus": 8, "memory": 10**10, "interface": "ib0",
        "address": f"10.0.0.{number}", "clock_offset": 0.0, "clock_error": 0.001, "token": "", "write_error": "",
        "dataset": None, "free_disk": 10**9, **changes,
    }  # fmt: skip
    return NodeReport.model_validate(fields)


def cluster_report(run: RunDir, task: CheckTask, *changes: dict[str, Any]) -> ClusterReport:
    """Return a cluster report with one node per element of `changes`."""
    token = run.checks.read_token(task.id)
    nodes = tuple(node_report(number, **{"token": token, **change}) for number, change in enumerate(changes))
    sizes = (Transfer(size=10**6, seconds=0.001), Transfer(size=4 * 10**6, seconds=0.02))
    return ClusterReport(
        id=task.id, job=task.job, backend="nccl", ranks=len(nodes), nodes=nodes, transfers=sizes[: 2 * (len(nodes) > 1)],
        latency=1e-4,
    )  # fmt: skip


OLD_FAILURE = {"outcome": "user", "message": "KeyError: 'label'", "rank": 0, "host": "n1"}


def make_older(run: RunDir) -> None:
    """Fill a run in the first format: probes, one of them failed, and a training with a failed attempt."""
    for nodes in (1, 2):
        add_probes(run, nodes, (32, 64, 128, 256))
        for local_batch in (32, 64, 128):
            add_measured(run, nodes, local_batch)
    failed = {"kind": "failed", "id": "probe-n002-l000256", "nodes": 2, "gpus_per_node": 1, "local_batch": 256}
    (run.path / "results/probe-n002-l000256.json").write_text(json.dumps(failed | OLD_FAILURE))
    name = add_training(run)
    (run.path / "attempts").mkdir(exist_ok=True)
    attempt = {"task": f"{name}-1", "number": 1, "started_at": START, "ended_at": START + 9}
    (run.path / f"attempts/{name}-1.001.json").write_text(json.dumps(attempt | OLD_FAILURE))
    (run.path / "format").write_text("1 tula 0.0.9\n")
