"""`tula list`: the runs under a root."""

from dataclasses import dataclass
from pathlib import Path

from tula_cli.errors import TulaError
from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.recommendations import Recommendation

# --- all runs


@dataclass(frozen=True)
class RunSummary:
    """A line of `tula list`; `problem` says why a damaged run cannot be read."""

    id: str
    path: Path
    changed: float | None  # Unix time
    model: str = ""
    dataset: str = ""
    measured: int = 0
    out_of_memory: int = 0
    failed: int = 0
    recommendation: Recommendation | None = None
    trained: int = 0  # finished training runs
    best_top1: float | None = None
    problem: str = ""


def list_runs(root: Path) -> tuple[RunSummary, ...]:
    """Return the runs under `root`, last changed first. The scheduler is not asked."""
    return tuple(_summary(run) for run in RunDir.all(root))


def _summary(run: RunDir) -> RunSummary:
    try:
        spec, recommendation = run.spec(), run.recommendation()
        runs = [part.run for part in run.parts(spec)]  # of each node type
        results = [result for own in runs for result in own.results()]
        finished = [
            result for own in runs for name in own.train_signatures() if (result := own.training(name).result())
        ]
        moments = [result.measured_at for result in results if isinstance(result, Measured)]
        moments += [job.submitted_at for own in runs for job in own.jobs()]
        moments += [result.finished_at for result in finished]
        moments += [] if recommendation is None else [recommendation.created_at]
    except TulaError as error:
        return RunSummary(id=run.id, path=run.path, changed=None, problem=error.message)
    return RunSummary(
        id=run.id,
        path=run.path,
        changed=max(moments, default=None),
        model=spec.model.name,
        dataset=spec.dataset.name,
        measured=sum(isinstance(result, Measured) for result in results),
        out_of_memory=sum(isinstance(result, OutOfMemory) for result in results),
        failed=sum(isinstance(result, Failed) for result in results),
        recommendation=recommendation,
        trained=len(finished),
        best_top1=max((result.best_top1 for result in finished), default=None),
    )
