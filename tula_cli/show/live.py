"""Live display while a command waits."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tula_cli.show.screen import Screen
from tula_cli.show.status import describe_job_state, describe_training, make_jobs_table
from tula_cli.show.tables import fit
from tula_cli.words import describe_configuration, format_count, format_duration, format_number, get_first_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tula_cli.services.comparison.trainings import Progress
    from tula_cli.services.status import JobStatus, RunStatus

# --- what changes while one waits


@contextmanager
def open_live_display(screen: Screen) -> Iterator["Live"]:
    """Show a changing status: redrawn in place on a terminal, otherwise one line per change."""
    if screen.quiet:
        yield Live(screen)
    elif not screen.err.isatty() or os.environ.get("TERM") == "dumb" or screen.as_json:
        yield ChangesLive(screen)
    else:
        with DrawnLive(screen) as drawn:
            yield drawn


class Live:
    """Quiet display, which shows only warnings."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen

    def update(self, now: "RunStatus") -> None:
        """Show a newer status of the run."""
        for warning in now.training.warnings if now.training is not None else ():
            self.screen.warn(warning)

    def compared(self, now: "Progress") -> None:
        """Show the progress of a comparison."""
        if now.problem and now.ended is not None:
            self.screen.warn(f"{now.ended.description} failed: {get_first_line(now.problem)}")


class ChangesLive(Live):
    """Display with one line per change of state, for logs and terminals that cannot redraw."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(screen)
        self._said: dict[str, str] = {}

    def update(self, now: "RunStatus") -> None:
        super().update(now)
        for job in now.jobs:
            self._say(job.id, _describe_changes(job), _describe_log_tail(job))
        train = now.training
        if train is not None:
            finished = ", finished" if train.finished else ""
            branch = "" if train.tuning is None else f" {train.tuning.rung} {train.tuning.number} {train.tuning.chosen}"
            state = f"{train.signature} {train.batch} {int(train.epoch)}{branch}{finished}"
            self._say("training", state, describe_training(train))

    def compared(self, now: "Progress") -> None:
        super().compared(now)
        cell = "" if now.cell is None else now.cell.description
        self._say(
            "comparison",
            f"{now.done} {now.failed} {now.running} {now.total} {cell} {now.waits}",
            describe_comparison(now),
        )

    def _say(self, about: str, state: str, text: str) -> None:
        if self._said.get(about) != state:
            self._said[about] = state
            self.screen.note(text)


def _describe_changes(job: "JobStatus") -> str:
    return f"{job.state} {job.done} {job.now} {job.reason}"


def _describe_log_tail(job: "JobStatus") -> str:
    """Describe a job in one line."""
    parts = [f"{job.id}: {job.state}"]
    ended = job.kind == "probe" and job.state == "failed"  # what follows tells why, once
    parts += [story] if not ended and (story := describe_job_state(job)) else []
    parts += [f"{job.done} of {format_count(job.total, 'probe')}"] if job.kind == "probe" else []
    if job.now is not None:
        parts.append(f"next: {describe_configuration(job.now.nodes, job.now.batch, job.now.local_batch)}")
    if job.left is not None:
        parts.append(f"about {format_duration(job.left)} and {format_number(job.node_hours_left)} node-h left")
    return ", ".join(parts)


class DrawnLive(Live):
    """Table redrawn in place on stderr."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(screen)
        from rich.live import Live as RichLive

        self._live = RichLive(console=screen._console(screen.err), auto_refresh=False, transient=True)

    def __enter__(self) -> "DrawnLive":
        self._live.start()
        self.screen.drawn = self._live.console
        return self

    def __exit__(self, *_: object) -> None:
        self.screen.drawn = None
        self._live.stop()

    def update(self, now: "RunStatus") -> None:
        from rich.console import Group

        super().update(now)
        parts: list[RenderableType] = []
        if now.jobs:
            parts.append(drawn := make_jobs_table(now.jobs))
            fit(drawn, self._live.console)
        parts += [describe_training(now.training)] if now.training is not None else []
        self._live.update(Group(*parts), refresh=True)

    def compared(self, now: "Progress") -> None:
        from rich.console import Group

        super().compared(now)
        parts = [describe_comparison(now), *([describe_training(now.training)] if now.training is not None else [])]
        self._live.update(Group(*parts), refresh=True)


# --- compare


def describe_comparison(now: "Progress") -> str:
    """Describe the progress of a comparison in one line."""
    at_most, of_two = "at most " if now.undecided else "", f"round {now.round} of 2: " if now.round else ""
    parts = [f"{of_two}{now.done} of {at_most}{format_count(now.total, 'training')} done"]
    parts += [f"{now.failed} failed"] if now.failed else []
    parts += [f"now: {now.cell.description}"] if now.cell is not None else []
    parts += [now.waits] if now.waits else []
    parts += [f"{now.running} running"] if now.cell is None and now.running else []
    parts += (
        [f"about {format_duration(now.left)} left"]
        if now.left is not None and now.done + now.failed < now.total
        else []
    )
    return ", ".join(parts)
