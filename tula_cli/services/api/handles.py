"""A run as Python code holds it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tula_cli.cluster import launcher
from tula_cli.models.time.noise import trimmed_mean
from tula_cli.run.directory import RunDir
from tula_cli.run.frames import make_frame
from tula_cli.run.jobfile import parts_with_data
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.recommendations import Recommendation
from tula_cli.run.step_series import StepSeries
from tula_cli.services import status
from tula_cli.services.status import RunStatus
from tula_cli.spec.job import JobSpec

if TYPE_CHECKING:
    import pandas as pd

    from tula_cli.services.reporting.document import Document

Result = Measured | OutOfMemory | Failed


@dataclass(frozen=True)
class Status:
    """How far a run is, on each type of node; None is the type of a job that names none."""

    types: Mapping[str | None, RunStatus]

    @property
    def active(self) -> bool:
        """Whether a job is queued or running."""
        return any(run_status.active() for run_status in self.types.values())

    def frame(self) -> "pd.DataFrame":
        """Return one row a job: id, kind, nodes, state, reason, probes done and in all, node-hours."""
        columns = ("id", "kind", "nodes", "state", "reason", "done", "total", "node_hours")
        rows = [
            {"node_type": name or "", **{column: getattr(job, column) for column in columns}}
            for name, run_status in self.types.items()
            for job in run_status.jobs
        ]
        return make_frame(rows)


@dataclass(frozen=True)
class Run:
    """A run directory: what was measured, recommended and trained of one job.

    Every method looks at the files anew. `tula.profile` returns one; `Run.open` opens one that is there.
    """

    path: Path
    directory: RunDir = field(repr=False, compare=False)

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """Return the run in a folder.

        Raises:
            SpecError: there is no such folder, or it is not a run directory.
        """
        return cls.of(RunDir.open(Path(path).absolute()))

    @classmethod
    def of(cls, directory: RunDir) -> "Run":
        """Return the handle of a run directory."""
        return cls(directory.path, directory)

    @property
    def id(self) -> str:
        """The folder's name: that of the job and a signature of what its measurements depend on."""
        return self.directory.id

    def spec(self) -> JobSpec:
        """Return the job's settings, resolved."""
        return self.directory.spec()

    def probes(self) -> dict[str | None, list[Result]]:
        """Return what was measured, as typed records by the name of a part: a type of node, `length-128` of other
        lengths of text (search.sequence), None of a job without types at its own length.

        Raises:
            BadMeasurements: a result is damaged.
        """
        return {part.name: part.run.results() for part in parts_with_data(self.directory, self.spec())}

    def results(self) -> "pd.DataFrame":
        """Return one row a probe: its configuration, outcome, times (seconds) and peak memory (bytes of one GPU).

        `batch` is global, `local_batch` one GPU's; columns of whole numbers are Int64, also where some are missing.

        Raises:
            BadMeasurements: a result is damaged.
        """
        return make_frame([_result_row(name, result) for name, results in self.probes().items() for result in results])

    def recommendation(self) -> Recommendation | None:
        """Return the answer that training takes; None where there is none yet."""
        return self.directory.recommendation()

    def weights(self, signature: str) -> Path | None:
        """Return the checkpoint of the best epoch of a training: a file of torch.save whose key "model" is a state_dict.

        Args:
            signature: of the training, as `tula.train` returns it.

        Returns:
            None where there is none yet, and for a script, which saves where it likes.
        """
        parts = parts_with_data(self.directory, self.spec())
        return next((path for part in parts if (path := part.run.training(signature).weights())), None)

    def steps(self, signature: str) -> StepSeries:
        """Return what is kept of every step of a training, in columns, plain lists; empty ones where nothing is.

        Args:
            signature: of the training, as `tula.train` returns it.
        """
        parts = parts_with_data(self.directory, self.spec())
        trainings = (part.run.training(signature) for part in parts)
        return next((training.steps() for training in trainings if training.steps_path.exists()), StepSeries())

    def report(self) -> "Document":
        """Return all that it has found, as `tula report` has it: plain values, in sections with tables and figures.

        Raises:
            TulaError: a record of the run cannot be read.
        """
        from tula_cli.services.reporting.run_report import build_run_report  # with the services of all commands

        make_launcher = partial(launcher.launcher_for, submits=False)
        return build_run_report(self.directory, self.spec(), make_launcher, now=time.time())

    def status(self) -> Status:
        """Return how far its jobs and its training are; the scheduler is asked."""
        parts = parts_with_data(self.directory, self.spec())
        return Status(
            {
                part.name: status.run_status(part.run, launcher.launcher_for(part.spec, submits=False), now=time.time())
                for part in parts
            }
        )


def _result_row(node_type: str | None, result: Result) -> dict[str, Any]:
    probe = result if isinstance(result, Measured) else None
    step = None if probe is None else trimmed_mean(probe.step_times)
    batch = result.local_batch * result.nodes * result.gpus_per_node
    return {
        "node_type": node_type or "",
        "nodes": result.nodes,
        "gpus_per_node": result.gpus_per_node,
        "batch": batch,
        "local_batch": result.local_batch,
        "outcome": result.kind,
        "step_time_s": step,
        "sync_time_s": probe and probe.sync_time,
        "compute_time_s": probe and probe.compute_time,
        "data_wait_s": probe and probe.data_wait,
        "cached_time_s": probe and probe.cached_time,
        "loader_time_s": probe and probe.loader_time,
        "samples_per_s": step and batch / step,
        "peak_memory_bytes": probe and probe.memory.peak,
        "message": "" if isinstance(result, Measured) else result.message,
    }
