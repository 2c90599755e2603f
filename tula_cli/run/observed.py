"""The files that the shim writes about observed jobs (`tula observe`): <folder>/<script>/<job>/, a few per rank."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tula_cli.options import DEFAULT_OBSERVATIONS_FOLDER
from tula_cli.run.records.scripts import Heartbeat, RankResult
from tula_cli.run.script_attempt import read_heartbeats, read_rank_results


@dataclass(frozen=True)
class ObservedJob:
    """One job that was observed, or still is. Files that are missing or damaged are as if their rank had not written."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def script(self) -> str:
        return self.path.parent.name

    @cached_property
    def ranks(self) -> tuple[RankResult, ...]:
        """The measurements by rank: at the end, or of the first steps if the rank runs or was killed."""
        first_steps = {result.rank: result for result in read_rank_results(self.path, "begun-*.json")}
        ends = {result.rank: result for result in read_rank_results(self.path, "result-*.json")}
        merged = first_steps | {rank: end for rank, end in ends.items() if end.timed or rank not in first_steps}
        return tuple(merged[rank] for rank in sorted(merged))

    @cached_property
    def heartbeats(self) -> tuple[Heartbeat, ...]:
        """The newest heartbeat of each rank."""
        return tuple(read_heartbeats(self.path))

    @property
    def observed_at(self) -> float:
        """Unix time of the last sign of the job; 0 without any."""
        return max((heartbeat.alive_at for heartbeat in self.heartbeats), default=0.0)


def list_observed_jobs(root: Path) -> list[ObservedJob]:
    """Return the jobs in a folder of observations, by script, oldest first."""
    folders = [path for path in root.glob("[!.]*/*") if path.is_dir()] if root.is_dir() else []
    jobs = [job for job in map(ObservedJob, folders) if job.heartbeats]
    return sorted(jobs, key=lambda job: (job.script, job.observed_at))


def make_observed_jobs_hint() -> str:
    """Return a hint for commands that find no run; empty if no job was observed in this folder either."""
    is_observed = bool(list_observed_jobs(Path(DEFAULT_OBSERVATIONS_FOLDER)))
    return "; tula observe --report shows the observed jobs" * is_observed
