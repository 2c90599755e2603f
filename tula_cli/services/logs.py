"""`tula logs`: what jobs wrote."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tula_cli.errors import SpecError
from tula_cli.plugins import nearest
from tula_cli.run.directory import Part, RunDir
from tula_cli.run.files import open_file
from tula_cli.services.status import POLL

# --- logs


@dataclass(frozen=True)
class LogLine:
    """A line that a job wrote, and where."""

    file: Path
    text: str


def logs(
    run: RunDir,
    *,
    job: str | None = None,
    last: int | None = None,
    follow: bool = False,
    active: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[LogLine]:
    """Yield the lines of the newest log file, of one job or of all.

    Args:
        run: the run.
        job: only this job's.
        last: only the last so many lines of what is there already.
        follow: go on with what is written from now on, in later files (relaunches) too, while `active()`.
        active: whether something may still be written.
        sleep: waits for some seconds.

    Raises:
        SpecError: the run has no such job.
    """
    files = _log_files(run, job)
    offsets = {path: path.stat().st_size for path in files[:-1]}
    lines = [line for path in files[-1:] for line in _read_lines(path, offsets, whole=not follow)]
    yield from lines if last is None else lines[max(0, len(lines) - last) :]
    while follow:
        going_on = active()
        for path in _log_files(run, job):
            yield from _read_lines(path, offsets, whole=not going_on)
        if not going_on:
            return
        sleep(POLL["local"][0])


def seldom(
    check: Callable[[], bool], *, pause: float, clock: Callable[[], float] = time.monotonic
) -> Callable[[], bool]:
    """Return a check that asks again only when its last answer is `pause` seconds old: a scheduler serves many users."""
    at, answer = float("-inf"), False

    def remembered() -> bool:
        nonlocal at, answer
        if clock() - at >= pause:
            answer, at = check(), clock()
        return answer

    return remembered


def newest_part(parts: Iterable[Part], job: str | None) -> RunDir | None:
    """Return the run of the node type that wrote last (of those that have that job); None where none has."""
    having = [part.run for part in parts if job is None or part.run.job(job) is not None]
    return max(having, key=lambda run: max((log.stat().st_mtime for log in run.logs()), default=0.0), default=None)


def _log_files(run: RunDir, job: str | None) -> list[Path]:
    """Return the log files of a job (of all), last written last."""
    look = run.read()
    if job is None:
        return run.logs() or look.scheduler_logs(id_ for found in look.jobs for id_ in found.ids)
    known = [found.id for found in look.jobs]
    if job not in known:
        raise SpecError(f"no job {job!r} in {run.path}", nearest(job, known) or f"there are: {', '.join(known) or '-'}")
    tasks = tuple(f"{task.id}." for task in (*look.tasks, *look.check_tasks) if task.job == job)
    own = [path for path in run.logs() if path.name.startswith(tasks)]
    return own or look.scheduler_logs(id_ for found in look.jobs if found.id == job for id_ in found.ids)


def _read_lines(path: Path, offsets: dict[Path, int], *, whole: bool) -> Iterator[LogLine]:
    """Yield what was added to a file since its offset; a line without its end only where `whole`."""
    with open_file(path) as file:
        file.seek(offsets.get(path, 0))
        for line in file:
            if not line.endswith(b"\n") and not whole:
                return
            offsets[path] = offsets.get(path, 0) + len(line)
            yield LogLine(path, line.decode(errors="replace").rstrip("\r\n"))
