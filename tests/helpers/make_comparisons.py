"""Comparisons of methods whose trainings finish at once, for tests of the command and of its report."""

import io
import json
import math
import time
from pathlib import Path

import make_runs as make
import pytest
import yaml
from make_results import make_inspection

from tula_cli.cli import app
from tula_cli.cluster import inspection
from tula_cli.cluster import launcher as cluster_launcher
from tula_cli.cluster.scripts.start import compute_script_learning_rate
from tula_cli.options import ComparisonRequest
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.results import Comparison
from tula_cli.run.records.tasks import TrainTask
from tula_cli.services import compare as services_compare
from tula_cli.services import status as services_status
from tula_cli.services.compare import Grid
from tula_cli.services.comparison import accuracy, session, trainings
from tula_cli.services.plans import ComparePlan
from tula_cli.show import screen as show_screen
from tula_cli.spec.job import JobSpec

SPEC = {
    **make.SPEC,
    "train": {"method": "ags", "epochs": 4, "reference_batch": 32, "seed": 5},
    "search": {"nodes": [1], "max_node_hours": 1},
}
GRID = Grid(methods=("lbt", "lrs", "ags"), batches=(128, 256), seeds=2, nodes=1)
# Top-1 by method at a large batch; each seed adds to it. The reference is at 90.
TOP1 = {"lbt": 80.0, "ortho": 75.0, "lrs": 85.0, "ags": 90.0, "lbt-x2": 70.0, "lbt-x4": 10.0}

ENVIRONMENT = {
    "kind": "environment", "samples": 0, "device": "cuda", "hardware": "NVIDIA A100", "driver": "550.54", "python": "3.11.7",
    "torch": "2.6.0", "cuda": "12.4", "nccl": "", "tula": "0.1.0", "system": "",
}  # fmt: skip


def inspect(spec: JobSpec) -> Inspection:
    return make_inspection()


class ImmediateTraining(make.FakeLauncher):
    """A launcher that finishes each training at once. Methods in `fails` end with an error; the loss of methods in `diverges` is NaN."""

    DIVERGED = "Diverged: the loss is not finite at epoch 1.50, step 24, 3000 samples"

    def __init__(
        self, fails: tuple[str, ...] = (), diverges: tuple[str, ...] = (), classes: bool = True, words: bool = False
    ) -> None:
        super().__init__()
        self.fails, self.diverges, self.classes, self.words = fails, diverges, classes, words
        self.tasks: list[TrainTask] = []

    def submit(self, run, task):
        job = super().submit(run, task).model_copy(update={"submitted_at": time.time()})
        self.tasks.append(task)
        self.says[task.job] = "ended"
        lr = task.spec.optimizer.lr / make.SPEC["optimizer"]["lr"]
        method = task.spec.train.method if lr == 1 else f"lbt-x{lr:.0f}"
        now = time.time()
        if method in self.fails:
            run.write_attempt(make.attempt(task.id, start=now, end=now, outcome="user", message="KeyError: 'x'\nmore"))
        elif method in self.diverges:
            run.write_attempt(make.attempt(task.id, start=now, end=now, outcome="diverged", message=self.DIVERGED))
        else:
            self._train(run, task, method)
        return job

    def _train(self, run, task, method):
        reference = task.batch == task.spec.train.reference_batch
        top1 = (90.0 if reference else TOP1[method]) + 2 * (task.spec.train.seed - 5)
        metrics = {"top1": top1, "top5": 99.0, "eval_loss": (100 - top1) / 10}
        if not self.classes or self.words:
            metrics = {"eval_loss": metrics["eval_loss"]}
        if self.words:
            metrics["perplexity"] = math.exp(metrics["eval_loss"])
        hours = 32 / task.batch
        result = make.train_result(task.signature).model_copy(update={"metrics": metrics, "samples": 8000})
        run.write_train_result(result)
        rows = [
            {"kind": "epoch", "samples": 2000 * epoch, "epoch": epoch, **metrics, "ags": {"mean": 2.0}}
            for epoch in (1, 2)
        ]
        rows.insert(0, ENVIRONMENT)
        if method == "ags":
            rows[-1]["diagnostics"] = {
                "norm": {"q50": 3.0}, "delta": None, "factors": {"edges": [0.5, 1.0, 2.0], "counts": [0, 1, 3, 0]}
            }  # fmt: skip
            rows.append({"kind": "hessian", "samples": 4000, "eigenvalue": 7.5, "lr_bound": None})
        run.get_training(task.signature).metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        run.write_summary(
            make.summary(
                signature=task.signature, start_batch=task.batch, batch=task.batch, metrics=metrics, actual_hours=hours,
                best_top1=metrics.get("top1", 0.0) + 1,
            )
        )  # fmt: skip


def make_plan(run: RunDir, grid: Grid = GRID, spec: JobSpec | None = None) -> ComparePlan:
    return services_compare.plan_comparison(Run(run.path, spec or run.read_spec()), grid, inspect=inspect, now=1.0)


def run_comparison(run: RunDir, launcher: make.FakeLauncher, grid: Grid = GRID) -> accuracy.CompareReport:
    planned = make_plan(run, grid)
    list(trainings.train_cells_one_by_one(run, planned, launcher, inspect=inspect))
    return compare(run, planned.comparison)


def compare(run: RunDir, comparison: Comparison, launcher: make.FakeLauncher | None = None) -> accuracy.CompareReport:
    now = services_status.read_run_status(run, launcher or make.FakeLauncher(), now=time.time())
    return accuracy.build_compare_report(Run(run.path, run.read_spec()), comparison, jobs=now.jobs)


def find_row(report: accuracy.CompareReport, method: str, batch: int) -> accuracy.ComparisonRow:
    (result,) = [row for row in report.rows if (row.method, row.batch) == (method, batch)]
    return result


def run_tula(*arguments: object) -> tuple[int, str, str]:
    screen = show_screen.Screen(out=io.StringIO(), err=io.StringIO())
    code = app.run([str(word) for word in arguments], screen=screen)
    return code, screen.out.getvalue(), screen.err.getvalue()  # type: ignore[attr-defined]


def use_immediate_training(monkeypatch: pytest.MonkeyPatch, folder: Path) -> ImmediateTraining:
    """Write job.yaml into a folder, and replace the launcher of all commands by one that finishes trainings at once; return it."""
    launcher = ImmediateTraining()
    monkeypatch.setattr(cluster_launcher, "make_launcher", lambda spec, **_: launcher)
    monkeypatch.setattr(inspection, "inspect", inspect)
    (folder / "job.yaml").write_text(yaml.safe_dump(SPEC))
    return launcher


COMPARE_ARGUMENTS = ("compare", "job.yaml", "--methods", "lbt,ags", "--batch", "128,256", "--seeds", 2)


COMMAND = "python finetune.py -b {local_batch} --lr {lr} --seed {seed}"
METRIC = {"acc": "acc ([0-9.]+)", "loss": "loss ([0-9.]+)"}


def script_job(command: str = COMMAND, lr: float | None = 0.1, **changes) -> JobSpec:
    Path("finetune.py").touch()
    script = {
        "command": command, "length": {"epochs": 1}, "dataset_size": 4096, "metric": METRIC,
        "reference": {"batch": 32, **({} if lr is None else {"lr": lr})}, **changes,
    }  # fmt: skip
    return make.validate_job(
        {"name": "own", "script": script, "train": {"method": "lbt"}, "search": {"nodes": [1], "max_node_hours": 1}},
        source="test",
    )


class ImmediateScripts(make.FakeLauncher):
    """A launcher that finishes each script at once. Accuracy falls with the batch; a raised learning rate restores it."""

    def __init__(self, told: bool = True) -> None:
        super().__init__()
        self.told, self.lrs = told, list[tuple[int, float]]()

    def submit(self, run, task):
        job = super().submit(run, task)
        self.says[task.job] = "ended"
        lr = compute_script_learning_rate(task.spec, task.batch)
        self.lrs.append((task.batch, lr))
        acc = 0.9 - 0.1 * math.log2(task.batch / 32) + 0.1 * math.log2(lr / 0.1) + 0.01 * task.spec.train.seed
        metrics = {"acc": acc, "best_acc": acc + 0.05, "loss": 1 - acc, "best_loss": 0.9 - acc} if self.told else {}
        run.write_train_result(make.train_result(task.signature).model_copy(update={"metrics": metrics}))
        run.write_summary(
            make.summary(
                signature=task.signature, start_batch=task.batch, batch=task.batch, metrics=metrics, best_top1=0.0
            )
        )
        return job


def compare_scripts(folder: Path, launcher: make.FakeLauncher, spec: JobSpec, **requested) -> accuracy.CompareReport:
    run = RunDir.create(folder / "tula-runs", spec)
    grid = session.complete_grid(ComparisonRequest(batches=(64, 128), **requested), Run(run.path, spec), None)
    planned = services_compare.plan_comparison(Run(run.path, spec), grid, inspect=inspect, now=1.0)
    list(trainings.train_cells_one_by_one(run, planned, launcher, inspect=inspect))
    return accuracy.build_compare_report(Run(run.path, spec), planned.comparison)
