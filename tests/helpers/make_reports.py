"""Runs for tests of reports, and their reports."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import make_runs as make
from make_results import Truth, add_gradient_noise, as_script_probe, make_out_of_memory, make_probe
from make_results import make_spec as job_spec

from tula_cli.query import Query
from tula_cli.run.directory import RunDir
from tula_cli.run.job_runs import open_runs_of_job
from tula_cli.run.records.results import Cell, Comparison
from tula_cli.services import recommend as recommending
from tula_cli.services import recommendation_files
from tula_cli.services.document import Document, Figure, Section, Series, Table

if TYPE_CHECKING:
    from tula_cli.extras.report.material import ReportData

REPORT_TIME = make.START + 1000
JOB = job_spec(search={"nodes": [1, 2, 4, 8], "min_batch": 32, "max_batch": 512})
SWEEP_PROBES = {1: (32, 64, 128, 256), 2: (16,), 4: (128,), 8: (4,)}
TYPES = {"a": {}, "b": {"pricing": {"price": 0.5}}}


def make_probed_run(root: Path, truth: Truth | None = None, *, job: Any = JOB, script: bool = False) -> RunDir:
    """Return a run with probes computed from known parameters for each node type, including an out-of-memory probe."""
    runs = make.create_runs(root, job)
    for part in runs:
        probes = [
            make_probe(truth or Truth(jitter=0.01), nodes, local)
            for nodes, locals_ in SWEEP_PROBES.items()
            for local in locals_
        ]
        probes = [as_script_probe(probe) for probe in probes] if script else add_gradient_noise(probes, 200.0)
        for result in [*probes, make_out_of_memory(1, 512)]:
            part.write_result(result)
    return runs[0]


def script_job() -> Any:
    """Return a job that trains a script of the user."""
    command = "python /home/me/finetune.py -b {local_batch}"
    script = {"command": command, "length": {"epochs": 3}, "reference": {"batch": 256}}
    search = {"nodes": [1, 2, 4, 8], "min_batch": 32, "max_batch": 512}
    return make.validate_job({"name": "own", "script": script, "search": search}, source="test")


def add_recommendation(run: RunDir, objective: Any = "time") -> RunDir:
    """Return the run with a saved recommendation, which training uses."""
    runs = open_runs_of_job(run)
    recommendation_files.save_answer(
        runs, recommending.recommend_configuration(runs, Query(objective=objective), now=1.0)
    )
    return run


def make_epoch_rows(*, scaled: bool = True) -> list[dict[str, Any]]:
    """Return the epoch rows of a training that records all quantities."""
    rows: list[dict[str, Any]] = [
        {"kind": "start", "time": make.START, "samples": 0, "epoch": 0.0, "attempt": 1, "batch": 128}
    ]
    for epoch in (1, 2, 3):
        at = {"time": make.START + 10 * epoch, "samples": 1000 * epoch}
        counts = [0, 2, 6 - epoch, epoch, 0] if scaled else [0] * 5
        diagnostics = {
            "norm": {"q05": 1.0, "q50": 2.0 / epoch, "q95": 3.0}, "delta": {"q05": 0.01, "q50": 0.1 * epoch, "q95": 1.0},
            "factors": {"edges": [0.5, 1.0, 2.0, 4.0], "counts": counts},
        }  # fmt: skip
        rows += [
            {"kind": "step", **at, "epoch": epoch - 0.5, "step": 10 * epoch, "loss": 2.0 / epoch, "lr": 0.1, "batch": 128, "step_time": 0.1},
            {"kind": "noise", **at, "epoch": epoch, "batch": 128, "scale": 100.0 * epoch, "low": 50.0, "high": float("inf")},
            {"kind": "hessian", **at, "epoch": epoch, "eigenvalue": 4.0 * epoch, "gradient_norm": 0.5, "lr_bound": 0.2},
            {"kind": "epoch", **at, "epoch": epoch, "loss": 2.0 / epoch, "lr": 0.1, "batch": 128, "eval_loss": 1.0 / epoch,
             "top1": 50.0 + 10 * epoch, "top5": 90.0, "step_time": 0.1, "predicted_step": 0.09, "step_low": 0.08,
             "step_high": 0.1, "ags": {"mean": 1.5, "scaled": 0.25} if scaled else None, "diagnostics": diagnostics},
        ]  # fmt: skip
    return rows


def add_training(run: RunDir, rows: Sequence[dict[str, Any]] | None = None, **summary: Any) -> RunDir:
    """Return the run with a finished training that was relaunched once."""
    name = make.add_training(run, rows=make_epoch_rows() if rows is None else rows)
    first = {"start": make.START, "end": make.START + 15, "outcome": "node_failure", "message": "node n1 is gone"}
    run.write_attempt(make.attempt(f"{name}-1", **first, samples=0))
    run.write_attempt(make.attempt(f"{name}-1", number=2, start=make.START + 16, end=make.START + 40, samples=1000))
    run.write_train_result(make.train_result())
    run.write_summary(make.summary(**summary))
    return run


def add_comparison(run: RunDir) -> RunDir:
    """Return the run with a comparison of two methods at batch 512, two seeds each, and the reference."""
    rows = [("lbt", 128, True, 90.0), ("lbt", 512, False, 80.0), ("ags", 512, False, 85.0)]
    cells = []
    for seed in (0, 1):
        for method, batch, reference, top1 in rows:
            signature = f"{method}{batch}{seed}"
            cells.append(Cell(method=method, batch=batch, seed=seed, nodes=1, signature=signature, reference=reference))
            metrics = {"top1": top1 + seed, "top5": 99.0, "eval_loss": 0.5}
            path = run.get_training(signature).metrics_path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in make_epoch_rows(scaled=method == "ags")))
            run.write_summary(
                make.summary(signature=signature, start_batch=batch, batch=batch, metrics=metrics, actual_hours=0.5)
            )
            run.write_train_result(make.train_result(signature))
    run.write_comparison(
        Comparison(
            methods=("lbt", "ags"), batches=(512,), seeds=2, nodes=1, controls=False, cells=tuple(cells), created_at=1.0
        )
    )
    return run


def read_material(run: RunDir, launcher: make.FakeLauncher | None = None) -> "ReportData":
    from tula_cli.extras.report.material import collect_report_data

    return collect_report_data(open_runs_of_job(run), lambda _: launcher or make.FakeLauncher(), now=REPORT_TIME)


def make_report(run: RunDir) -> Document:
    from tula_cli.extras.report.run_report import build_document

    return build_document(read_material(run))


def find_section(document: Document, key: str) -> Section:
    return next(item for item in document.sections if item.key == key)


def find_table(document: Document, key: str) -> Table:
    return next(item for part in document.sections for item in part.tables if item.key == key)


def find_figure(document: Document, key: str) -> Figure:
    return next(item for part in document.sections for item in part.figures if item.key == key)


def find_series(drawn: Figure, name: str) -> Series:
    return next(item for item in drawn.series if item.name == name)


def read_column(result: Table, title: str) -> list[Any]:
    place = [item.title for item in result.columns].index(title)
    return [row[place] for row in result.rows]
