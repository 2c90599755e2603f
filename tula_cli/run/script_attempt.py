"""The folder of one start of a script of the user's own: the plan, what its ranks' shim writes, and a probe's own files."""

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tula_cli.run.file_changes import is_listed, touch_news
from tula_cli.run.files import list_files, read_json_lines, read_record, read_text, write_atomic, write_record
from tula_cli.run.records.scripts import Heartbeat, Killed, RankResult, Rehearsal, ScriptFailure, ShimPlan

TAIL = 16_384
"""Bytes at the end of a file of rows that are looked through for the newest one."""
_RESULT, _FAILURE, _HEARTBEAT = TypeAdapter(RankResult), TypeAdapter(ScriptFailure), TypeAdapter(Heartbeat)
_KILLED, _REHEARSAL = TypeAdapter(Killed), TypeAdapter(Rehearsal)


class ScriptAttempt:
    """One attempt of a task. Reading never fails on a file that is not there yet; it answers None or an empty list.

    Args:
        run: the run directory.
        task_id: of the task.
        number: of the attempt, from 1.
    """

    def __init__(self, run: Path, task_id: str, number: int) -> None:
        self.run = run
        self.path = (run / "script" / f"{task_id}.{number:03d}").absolute()

    @property
    def plan_path(self) -> Path:
        return self.path / "plan.json"

    @property
    def output_folder(self) -> Path:
        """The folder of the script's own files, where they are not a training's."""
        return self.path / "out"

    def write_plan(self, plan: ShimPlan) -> None:
        write_record(self.plan_path, plan)

    def announce_end(self, ends_at: float) -> None:
        """Let all supervisors know that the time limit is near; the leader alone knows when it is (Unix time)."""
        if not (self.path / "ends_at").exists():
            write_atomic(self.path / "ends_at", f"{ends_at:.1f}\n")
            touch_news(self.run)

    def ends_at(self) -> float | None:
        """Return the time limit, once it is near."""
        path = self.path / "ends_at"
        text = read_text(path) if is_listed(path) else ""
        return float(text) if text else None

    def write_save_request(self) -> None:
        """Ask the hooks in the script's loop to save and stop."""
        write_atomic(self.path / "save.json", '{"then": "stop"}\n')

    def results(self) -> list[RankResult]:
        """Return what the ranks have written at their end, by rank."""
        return self._rank_results("result-*.json")

    def first_results(self) -> list[RankResult]:
        """Return what the ranks of a training have written of their first steps, by rank."""
        return self._rank_results("begun-*.json")

    def _rank_results(self, pattern: str) -> list[RankResult]:
        results = [read_record(path, _RESULT) for path in list_files(self.path, pattern)]
        return sorted((result for result in results if result is not None), key=lambda result: result.rank)

    def failures(self) -> list[ScriptFailure]:
        """Return the exceptions that nobody caught, earliest first."""
        failures = [read_record(path, _FAILURE) for path in list_files(self.path, "failure-*.json")]
        return sorted((failure for failure in failures if failure is not None), key=lambda failure: failure.failed_at)

    def rows(self, rank: int) -> list[dict[str, Any]]:
        """Return what a rank of a training has written every few seconds, oldest first; half a line is left out."""
        return list(read_json_lines(self.path / f"steps-{rank}.jsonl"))

    def notes(self, rank: int) -> list[str]:
        """Return what a rank of a training has noted at its first step."""
        return [row["text"] for row in self.rows(rank) if row["kind"] == "note"]

    def loads(self, rank: int) -> list[dict[str, Any]]:
        """Return the files that a rank of a training had loaded by its first step: path, and when each was written."""
        return [row for row in self.rows(rank) if row["kind"] == "load"]

    def newest_row(self, rank: int) -> dict[str, Any]:
        """Return the last row of where a rank stands, if it is among the last lines: the file grows for days."""
        rows = reversed(list(read_json_lines(self.path / f"steps-{rank}.jsonl", last_bytes=TAIL)))
        return next((row for row in rows if row["kind"] == "row"), {})

    def gaps(self, rank: int) -> list[dict[str, Any]]:
        """Return the rows, among the last lines, of steps that held an evaluation, a save or a new epoch."""
        rows = read_json_lines(self.path / f"steps-{rank}.jsonl", last_bytes=TAIL)
        return [row for row in rows if row["kind"] == "gap"]

    def changed_files(self, host: str) -> list[dict[str, Any]]:
        """Return what the processes of a node have written down of the files that they change, by process."""
        return [row for path in list_files(self.path, f"files-{host}-*.jsonl") for row in read_json_lines(path)]

    @property
    def aside(self) -> Path:
        """The folder of what was written outside of the script's own one."""
        return self.path / "aside"

    def put_aside(self) -> list[str]:
        """Return what was put there, or left changed, by all nodes, in words."""
        return [row["text"] for row in read_json_lines(self.path / "aside.jsonl")]

    def heartbeat(self, rank: int) -> Heartbeat | None:
        return read_record(self.path / f"heartbeat-{rank}.json", _HEARTBEAT)

    def killed(self) -> Killed | None:
        """Return what a rehearsal's first start has told of its checkpoint."""
        return read_record(self.path / "rehearsal.json", _KILLED)


class ResumeTestRecords:
    """Results of resume tests: one file each, `script/<its task>.json`, written only by its leader.

    Args:
        run: the run directory.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / "script"

    def folder(self, task_id: str) -> Path:
        """Return where a rehearsal keeps the script's own files; they go with its end."""
        return (self.path / task_id).absolute()

    def write(self, record: Rehearsal) -> None:
        write_record(self.path / f"{record.task}.json", record)

    def read(self, task_id: str) -> Rehearsal | None:
        return read_record(self.path / f"{task_id}.json", _REHEARSAL)

    def records_of(self, key: str) -> list[Rehearsal]:
        """Return the rehearsals of a script and its code (`compute_rehearsal_signature`), oldest first."""
        records = [read_record(path, _REHEARSAL) for path in list_files(self.path, f"rehearse-{key}-*.json")]
        return sorted(
            (rehearsal for rehearsal in records if rehearsal is not None), key=lambda records: records.began_at
        )

    def newest_verdict(self, key: str) -> Rehearsal | None:
        """Return the newest that came to a verdict; None where none has."""
        return next((record for record in reversed(self.records_of(key)) if record.verdict is not None), None)
