"""The folder of one start of a user's script: the plan, the files of its ranks' shim, and a probe's output."""

from pathlib import Path
from typing import Any

from tula_cli.run.files import (
    is_listed,
    list_files,
    read_json_lines,
    read_record,
    read_records,
    read_text,
    touch_change_marker,
    write_file_atomically,
    write_record,
)
from tula_cli.run.records.scripts import Heartbeat, KillRecord, RankResult, ResumeTestResult, ScriptFailure, ShimPlan

TAIL_BYTES = 16_384
"""Bytes at the end of a row file that are searched for the newest row."""


def read_rank_results(folder: Path, pattern: str) -> list[RankResult]:
    """Return the results in the files of a folder that match a pattern, by rank; missing and damaged ones are left out."""
    return sorted(read_records(folder, RankResult, pattern), key=lambda result: result.rank)


def read_heartbeats(folder: Path) -> list[Heartbeat]:
    """Return the newest heartbeat of each rank that has written one into a folder."""
    return read_records(folder, Heartbeat, "heartbeat-*.json")


class ScriptAttempt:
    """One attempt of a task. Reading a file that does not exist yet never fails; the result is None or an empty list."""

    def __init__(self, run: Path, task_id: str, number: int) -> None:
        self.run = run
        self.path = (run / "script" / f"{task_id}.{number:03d}").absolute()

    @property
    def plan_path(self) -> Path:
        return self.path / "plan.json"

    @property
    def output_folder(self) -> Path:
        """The folder for the script's own files, unless they belong to a training."""
        return self.path / "out"

    def write_plan(self, plan: ShimPlan) -> None:
        write_record(self.plan_path, plan)

    def write_allocation_end(self, ends_at: float) -> None:
        """Announce the approaching time limit (Unix time) to all supervisors, because only the leader knows it."""
        if not (self.path / "ends_at").exists():
            write_file_atomically(self.path / "ends_at", f"{ends_at:.1f}\n")
            touch_change_marker(self.run)

    def read_end_time(self) -> float | None:
        """Return the time limit (Unix time) once it has been announced."""
        path = self.path / "ends_at"
        text = read_text(path) if is_listed(path) else ""
        return float(text) if text else None

    def write_save_request(self) -> None:
        """Request that the hooks in the script's loop save and stop."""
        write_file_atomically(self.path / "save.json", '{"then": "stop"}\n')

    def read_results(self) -> list[RankResult]:
        """Return the results that the ranks wrote at their end, by rank."""
        return read_rank_results(self.path, "result-*.json")

    def read_first_results(self) -> list[RankResult]:
        """Return the results that the ranks of a training wrote after their first steps, by rank."""
        return read_rank_results(self.path, "begun-*.json")

    def read_failures(self) -> list[ScriptFailure]:
        """Return the uncaught exceptions, earliest first."""
        failures = read_records(self.path, ScriptFailure, "failure-*.json")
        return sorted(failures, key=lambda failure: failure.failed_at)

    def read_rows(self, rank: int) -> list[dict[str, Any]]:
        """Return the rows that a rank writes every few seconds, oldest first; an incomplete row is left out."""
        return list(read_json_lines(self.path / f"steps-{rank}.jsonl"))

    def read_notes(self, rank: int) -> list[str]:
        """Return the notes that a rank of a training wrote at its first step."""
        return [row["text"] for row in self.read_rows(rank) if row["kind"] == "note"]

    def read_loaded_files(self, rank: int) -> list[dict[str, Any]]:
        """Return the files that a rank of a training had loaded by its first step, with their modification times."""
        return [row for row in self.read_rows(rank) if row["kind"] == "load"]

    def read_newest_row(self, rank: int) -> dict[str, Any]:
        """Return the newest progress row of a rank if it is among the last lines, because the file grows for days."""
        rows = reversed(list(read_json_lines(self.path / f"steps-{rank}.jsonl", last_bytes=TAIL_BYTES)))
        return next((row for row in rows if row["kind"] == "row"), {})

    def read_gaps(self, rank: int) -> list[dict[str, Any]]:
        """Return the rows, among the last lines, of steps that included an evaluation, a save or a new epoch."""
        rows = read_json_lines(self.path / f"steps-{rank}.jsonl", last_bytes=TAIL_BYTES)
        return [row for row in rows if row["kind"] == "gap"]

    def read_changed_files(self, host: str) -> list[dict[str, Any]]:
        """Return the file changes recorded by the processes of a node, by process."""
        return [row for path in list_files(self.path, f"files-{host}-*.jsonl") for row in read_json_lines(path)]

    @property
    def moved_files_folder(self) -> Path:
        """The folder for files that were written outside the script's own folder."""
        return self.path / "aside"

    def read_moved_files(self) -> list[str]:
        """Return descriptions of the files that were moved into `aside` or remain changed, by all nodes."""
        return [row["text"] for row in read_json_lines(self.path / "aside.jsonl")]

    def read_heartbeat(self, rank: int) -> Heartbeat | None:
        return read_record(self.path / f"heartbeat-{rank}.json", Heartbeat)

    def read_kill(self) -> KillRecord | None:
        """Return the record of the first start of a resume test about its checkpoint."""
        return read_record(self.path / "rehearsal.json", KillRecord)


class ResumeTestRecords:
    """Results of resume tests: one file each, `script/<its task>.json`, written only by its leader."""

    def __init__(self, run: Path) -> None:
        self.path = run / "script"

    def get_script_folder(self, task_id: str) -> Path:
        """Return the folder for the script's own files during a resume test; it is removed at the end."""
        return (self.path / task_id).absolute()

    def write_result(self, record: ResumeTestResult) -> None:
        write_record(self.path / f"{record.task}.json", record)

    def read_result(self, task_id: str) -> ResumeTestResult | None:
        return read_record(self.path / f"{task_id}.json", ResumeTestResult)

    def read_results_of_script(self, key: str) -> list[ResumeTestResult]:
        """Return the resume tests of a script and its code (`compute_resume_test_signature`), oldest first."""
        records = read_records(self.path, ResumeTestResult, f"rehearse-{key}-*.json")
        return sorted(records, key=lambda record: record.began_at)

    def find_newest_verdict(self, key: str) -> ResumeTestResult | None:
        """Return the newest resume test with a verdict, or None if there is none."""
        return next(
            (record for record in reversed(self.read_results_of_script(key)) if record.verdict is not None), None
        )

    def find_newest_verdict_on_other_nodes(self, key: str) -> ResumeTestResult | None:
        """Return the newest resume test that found whether the script resumes on other nodes, or None."""
        return next(
            (record for record in reversed(self.read_results_of_script(key)) if record.other_nodes is not None), None
        )
