"""`tula logs`: the logs of jobs by attempt; for a failed attempt, the output of its first failing rank comes first."""

import contextlib
import itertools
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tula_cli import words
from tula_cli.errors import BadMeasurements, SpecError
from tula_cli.host.failures import find_root_failure
from tula_cli.plugins import suggest_nearest
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.disk_space import measure_file_size
from tula_cli.run.files import make_read_error, open_file, read_change_time, read_lines, read_lines_reversed
from tula_cli.run.records.jobs import Attempt
from tula_cli.run.records.tasks import BaseTask, Task
from tula_cli.run.snapshot import Snapshot
from tula_cli.spec.backend import get_backend

_LOG_NAME_PATTERN = re.compile(r"(?P<task>.+?)\.(?P<attempt>[0-9]{3,})(?:\.(?P<index>[0-9]{4,}))?\.log")
"""File names of `RunDir.get_log_path`."""
_MAX_LINE_BYTES = 2**16
"""Maximum bytes of a line that is shown whole; longer lines are shown in pieces."""
_HARMLESS_LINE_PATTERN = re.compile(rb"\[c10d\] The hostname of the client socket cannot be retrieved")
"""torch prints this for each connection if a node's address has no name, and then continues."""


@dataclass(frozen=True)
class LogLine:
    """A line of a job's log, and its origin."""

    file: Path
    text: str
    task: str = ""  # id of the task; empty for a log of the scheduler
    attempt: int = 0
    rank: int | None = None  # None if the log is of several ranks and the line does not name one
    failure: bool = False  # whether the line is of the first failing rank: its traceback or the end of its log

    @property
    def heading_key(self) -> tuple[Path, bool]:
        """The key of the heading above the line: its file, and whether it belongs to a failure."""
        return self.file, self.failure


@dataclass(frozen=True)
class LogQuery:
    """The logs of a run that are requested.

    Args:
        job: only logs of this job; None for the job that wrote last.
        rank: only lines of this rank; None for the whole log that contains rank 0.
        every: the logs of all attempts, not only of the newest.
        last: only the last so many existing lines.
    """

    job: str | None = None
    rank: int | None = None
    every: bool = False
    last: int | None = None


@dataclass(frozen=True)
class _AttemptLog:
    """The log of one attempt that contains the requested rank."""

    file: Path
    task: str
    attempt: int
    changed: float  # Unix time
    first: int = 0  # lowest rank in the log
    tagged: bool = True  # whether lines of all ranks but the lowest begin with the rank

    def parse_line(self, raw: bytes) -> LogLine:
        # Progress bars overwrite their line, so only the last state is kept. A lost node leaves blocks of zero bytes.
        text = raw.replace(b"\0", b"").rstrip(b"\r\n").rpartition(b"\r")[2].decode(errors="replace")
        rank = words.parse_rank(text)
        if rank is None and self.tagged:
            rank = self.first
        return LogLine(self.file, text, self.task, self.attempt, rank)


def read_logs(
    run: RunDir,
    query: LogQuery = LogQuery(),
    *,
    follow: bool = False,
    may_grow: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[LogLine]:
    """Yield the lines of the newest attempt, or of the requested ones; the failure of an attempt comes before its log.

    Args:
        follow: continue with lines as they are written, also in later attempts, while `may_grow()`.
        may_grow: returns whether further lines may be written.

    Raises:
        SpecError: the run has no such job, or none of its attempts has such a rank.
        TulaError: a log cannot be read.
    """
    reader = _LogReader(run, query)
    logs = reader.list_attempt_logs()
    shown = logs if query.every else logs[-1:]
    reader.skip_to_end(log for log in logs if log not in shown)
    for log in shown:
        yield from reader.read_first_failure(log)
    if query.last is not None:
        yield from reader.read_last_lines(shown, query.last)
    for log in shown:
        yield from reader.read_new_lines(log, with_incomplete=not follow)
    while follow:
        is_active = may_grow()
        for log in reader.list_attempt_logs():
            yield from reader.read_new_lines(log, with_incomplete=not is_active)
            yield from reader.read_first_failure(log)
        if not is_active:
            return
        sleep(get_backend("local").poll[0])


def _read_task(run: RunDir, task_id: str) -> Task | None:
    """Return a task; None if there is none, or it is damaged: its logs are shown all the same."""
    with contextlib.suppress(BadMeasurements):
        return run.read_task(task_id)
    return None


def _read_attempt(run: RunDir, task_id: str, number: int) -> Attempt | None:
    """Return an attempt; None if there is none, or it is damaged: its logs are shown all the same."""
    with contextlib.suppress(BadMeasurements):
        return run.read_attempt(task_id, number)
    return None


def describe_log_origin(run: RunDir, line: LogLine) -> str:
    """Return the heading for the first line from a log: its file and attempt, and the outcome of the attempt."""
    where = words.make_relative_path(line.file)
    attempt = _read_attempt(run, line.task, line.attempt) if line.task else None
    if line.failure:
        failure = find_root_failure(run.read_failures(line.task, line.attempt))
        assert failure is not None
        return f"rank {failure.rank} on {failure.host} failed first in attempt {line.attempt} of {line.task} ({failure.outcome})"
    if attempt is None:
        return where
    began = f"attempt {line.attempt} of {line.task} on {attempt.hosts or attempt.host}, from {words.format_local_time(attempt.started_at)}"
    if attempt.ended_at is None:
        return f"{where}: {began}"
    end_text = (
        attempt.outcome if not attempt.message else f"{attempt.outcome} ({words.get_first_line(attempt.message)})"
    )
    return f"{where}: {began} to {words.format_local_time(attempt.ended_at)}: {end_text}"


def describe_missing_output(run: RunDir, query: LogQuery) -> str:
    """Return why no line of the requested logs was shown, and which job has written a log, if there is one."""
    logs = _LogReader(run, query).list_attempt_logs()
    if query.rank is not None or not logs:
        subject = f"job {query.job} has" if query.job else "the jobs have"
        return f"{subject} not written {'a log' if query.rank is None else f'lines of rank {query.rank}'} yet"
    newest = logs[-1]
    attempt = _read_attempt(run, newest.task, newest.attempt)
    ended = attempt is not None and attempt.ended_at is not None
    description = (
        f"{newest.task or newest.file.name} has {'ended without output' if ended else 'not written a line yet'}"
    )
    with_output = [
        log for log in _LogReader(run, LogQuery()).list_attempt_logs() if log.task and measure_file_size(log.file)
    ]
    task = _read_task(run, with_output[-1].task) if with_output else None
    return description if task is None else f"{description}. The newest job with output: tula logs --job {task.job}"


@dataclass
class _LogReader:
    """Reads logs incrementally, each from the position up to which it has been read."""

    run: RunDir
    wanted: LogQuery
    _offsets: defaultdict[Path, int] = field(default_factory=lambda: defaultdict(int))
    _inodes: dict[Path, int] = field(default_factory=dict)  # inode of each file at its offset
    _shown_failures: set[tuple[str, int]] = field(default_factory=set)  # attempts whose failure was shown
    _tasks: dict[str, Task | None] = field(default_factory=dict)

    def list_attempt_logs(self) -> list[_AttemptLog]:
        """Return the log of each attempt that contains the rank, the last written last."""
        attempts = _group_logs_by_attempt(_list_log_files(self.run, self.wanted.job))
        selected = [log for logs in attempts if (log := self._select_log_of_rank(logs)) is not None]
        if attempts and not selected:
            ranks = max(self._count_ranks(logs[0]) for logs in attempts)
            raise SpecError(
                f"--rank {self.wanted.rank}: no log of this rank in {self.run.path}", f"ranks are 0 to {ranks - 1}"
            )
        return selected

    def _select_log_of_rank(self, logs: Sequence[_AttemptLog]) -> _AttemptLog | None:
        """Return the log of an attempt that contains the rank's lines; None if there is none."""
        rank, placed = self.wanted.rank or 0, self._list_first_ranks(logs)
        candidates = [log for log in placed if log.first <= rank]
        if not candidates or rank >= self._count_ranks(candidates[-1]):
            if self.wanted.rank is not None:
                return None
            candidates = placed[:1]
        return replace(candidates[-1], changed=max(log.changed for log in logs))

    def _list_first_ranks(self, logs: Sequence[_AttemptLog]) -> list[_AttemptLog]:
        """Return an attempt's logs with the lowest rank of each; a log has the ranks up to those of the next log."""
        task = self._read_task(logs[0])
        if task is None:
            return list(logs)
        ranks_each = task.ranks_per_supervisor
        has_one_rank = task.spec.cluster.backend.has_queue and ranks_each == 1
        tagged = task.script is None or has_one_rank
        return [replace(log, first=log.first * ranks_each, tagged=tagged) for log in logs]

    def _count_ranks(self, log: _AttemptLog) -> int:
        task = self._read_task(log)
        return log.first + 1 if task is None else task.ranks

    def _read_task(self, log: _AttemptLog) -> Task | None:
        if log.task not in self._tasks:
            self._tasks[log.task] = _read_task(self.run, log.task) if log.task else None
        return self._tasks[log.task]

    def skip_to_end(self, logs: Iterable[_AttemptLog]) -> None:
        """Mark logs as read to their ends."""
        for log in logs:
            self._set_offset(log, measure_file_size(log.file))
            self._shown_failures.add((log.task, log.attempt))

    def _set_offset(self, log: _AttemptLog, offset: int) -> None:
        self._offsets[log.file] = offset
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            self._inodes[log.file] = log.file.stat().st_ino

    def read_last_lines(self, logs: Sequence[_AttemptLog], count: int) -> list[LogLine]:
        """Return the last requested lines of logs, read backwards, and mark the logs as read."""
        lines: list[LogLine] = []
        for log in reversed(logs):
            self._set_offset(log, measure_file_size(log.file))
            lines[:0] = reversed(list(itertools.islice(self._read_backwards(log), count - len(lines))))
        return lines

    def _read_backwards(self, log: _AttemptLog) -> Iterator[LogLine]:
        try:
            with open_file(log.file) as file:
                for raw in read_lines_reversed(file, end=self._offsets[log.file], block=_MAX_LINE_BYTES):
                    yield from self._select_line(log, raw)
        except OSError as error:
            raise make_read_error(log.file, error) from error

    def read_first_failure(self, log: _AttemptLog) -> Iterator[LogLine]:
        """Yield, once per attempt, the output of the first failing rank, or of the requested rank if it failed."""
        key, requested_rank = (log.task, log.attempt), self.wanted.rank
        failures = self.run.read_failures(*key) if log.task and key not in self._shown_failures else []
        root_failure = find_root_failure(failure for failure in failures if requested_rank in (None, failure.rank))
        if root_failure is None:
            return
        self._shown_failures.add(key)
        for text in (root_failure.detail.strip() or root_failure.message).splitlines():
            yield LogLine(log.file, text, log.task, log.attempt, root_failure.rank, failure=True)

    def read_new_lines(self, log: _AttemptLog, *, with_incomplete: bool) -> Iterator[LogLine]:
        """Yield the lines added to a log since it was last read; an incomplete last line only if `with_incomplete`."""
        try:
            with open_file(log.file) as file:
                status = os.fstat(file.fileno())
                if self._inodes.setdefault(log.file, status.st_ino) != status.st_ino:  # the file was replaced
                    self._set_offset(log, 0)
                elif status.st_size < self._offsets[log.file]:  # the file was truncated: the rest was shown already
                    self._set_offset(log, status.st_size)
                file.seek(self._offsets[log.file])
                for raw in read_lines(file, longest=_MAX_LINE_BYTES):
                    if not raw.endswith(b"\n") and len(raw) < _MAX_LINE_BYTES and not with_incomplete:
                        return
                    self._offsets[log.file] += len(raw)
                    yield from self._select_line(log, raw)
        except OSError as error:
            raise make_read_error(log.file, error) from error

    def _select_line(self, log: _AttemptLog, raw: bytes) -> Iterator[LogLine]:
        """Yield a line, unless it is harmless or of another rank than the requested one."""
        line = log.parse_line(raw)
        is_requested = self.wanted.rank is None or line.rank in (None, self.wanted.rank)
        if is_requested and not _HARMLESS_LINE_PATTERN.search(raw):
            yield line


def make_rate_limited_check(
    check: Callable[[], bool], *, pause: float, clock: Callable[[], float] = time.monotonic
) -> Callable[[], bool]:
    """Return a check that repeats its last answer for `pause` seconds, since a scheduler serves many users."""
    at, answer = float("-inf"), False

    def check_or_remember() -> bool:
        nonlocal at, answer
        if clock() - at >= pause:
            answer, at = check(), clock()
        return answer

    return check_or_remember


def find_last_written_run(runs: Iterable[Run], job: str | None) -> Run | None:
    """Return the run that wrote a log last, among those that have the job; None if there is none."""
    having = [run for run in runs if job is None or job in _list_job_ids(run.read_snapshot())]
    return max(having, key=lambda run: max(map(read_change_time, run.list_logs()), default=0.0), default=None)


def _list_job_ids(snapshot: Snapshot) -> list[str]:
    """Return the ids of a run's jobs, including those only known from tasks.

    A copied run has the logs and tasks of its jobs, but the jobs belong to another run.
    """
    ids = (*(job.id for job in snapshot.jobs), *(task.job for task in snapshot.select_tasks(BaseTask)))
    return list(dict.fromkeys(ids))


def _list_log_files(run: RunDir, job: str | None) -> list[Path]:
    """Return the log files of a job, or of all jobs, the last written last."""
    snapshot = run.read_snapshot()
    if job is None:
        return run.list_logs() or snapshot.list_scheduler_logs(
            id_ for job_record in snapshot.jobs for id_ in job_record.scheduler_ids
        )
    job_ids = _list_job_ids(snapshot)
    if job not in job_ids:
        raise SpecError(
            f"no job {job!r} in {run.path}",
            suggest_nearest(job, job_ids) or f"choose from: {', '.join(job_ids) or '-'}",
        )
    tasks = tuple(f"{task.id}." for task in snapshot.select_tasks(BaseTask) if task.job == job)
    task_logs = [path for path in run.list_logs() if path.name.startswith(tasks)]
    return task_logs or snapshot.list_scheduler_logs(
        id_ for job_record in snapshot.jobs if job_record.id == job for id_ in job_record.scheduler_ids
    )


def _group_logs_by_attempt(files: Iterable[Path]) -> list[list[_AttemptLog]]:
    """Return the logs of each attempt, lowest ranks first; the attempt that wrote last comes last."""
    logs_by_attempt: defaultdict[tuple[str, int], list[_AttemptLog]] = defaultdict(list)
    for number, path in enumerate(files):
        name, changed = _LOG_NAME_PATTERN.fullmatch(path.name), read_change_time(path)
        if name is None:  # a log of the scheduler: each one is a group
            logs_by_attempt["", -number].append(_AttemptLog(path, "", 0, changed))
        else:
            key = name["task"], int(name["attempt"])
            logs_by_attempt[key].append(_AttemptLog(path, *key, changed, first=int(name["index"] or 0)))
    attempts = [sorted(logs, key=lambda log: log.first) for logs in logs_by_attempt.values()]
    return sorted(attempts, key=lambda logs: max(log.changed for log in logs))
