"""The files of `tula check --on-cluster` in a run: what its nodes leave there, and what was told of it."""

import time
from pathlib import Path

from pydantic import TypeAdapter

from tula_cli.run.files import list_files, read_record, read_text, write_atomic, write_record
from tula_cli.run.records.cluster_reports import ClusterReport


class ClusterChecks:
    """The checks of one run.

    Args:
        path: their folder, which may not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write_token(self, task_id: str, token: str) -> None:
        """Leave what the nodes have to find: they see this folder, and not another one of the same name."""
        write_atomic(self.path / f"{task_id}.token", f"{token}\n")

    def token(self, task_id: str) -> str:
        return read_text(self.path / f"{task_id}.token")

    def sign_in(self, task_id: str, rank: int, host: str) -> None:
        """Show whoever started a check that this rank's node can write here.

        Raises:
            TulaError: it cannot.
        """
        write_atomic(self.path / f"{task_id}.{rank:04d}.here", f"{host}\n")

    def signed_in(self, task_id: str) -> dict[int, str]:
        """Return the hosts of a check's ranks that could write here."""
        return {int(path.name.split(".")[-2]): read_text(path) for path in list_files(self.path, f"{task_id}.*.here")}

    def write_report(self, report: ClusterReport) -> None:
        write_record(self.path / f"{report.id}.json", report)

    def write_draft(self, report: ClusterReport) -> None:
        """Keep what is known before the network is tried, which may end the ranks."""
        write_record(self.path / f"{report.id}.draft", report)

    def draft(self, task_id: str) -> ClusterReport | None:
        return read_record(self.path / f"{task_id}.draft", TypeAdapter(ClusterReport))

    def report(self, task_id: str) -> ClusterReport | None:
        return read_record(self.path / f"{task_id}.json", TypeAdapter(ClusterReport))

    def mark_told(self, task_id: str) -> None:
        """Note that the user has seen how a check ended: the next one is a new one."""
        write_atomic(self.path / f"{task_id}.told", f"{time.time()}\n")

    def is_told(self, task_id: str) -> bool:
        return (self.path / f"{task_id}.told").exists()
