"""Live display while a command waits."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tula_cli.show.profile import describe_probe
from tula_cli.show.screen import Screen
from tula_cli.show.status import describe_job_state, describe_progress_of_training, describe_training
from tula_cli.words import describe_configuration, format_count, format_duration, format_number, get_first_line

if TYPE_CHECKING:
    from rich.progress import TaskID

    from tula_cli.services.events import ComparisonProgress, ProbeFinished
    from tula_cli.services.status import JobStatus, RunStatus
    from tula_cli.services.training_status import TrainingStatus

# --- Progress while waiting


@contextmanager
def open_live_display(screen: Screen) -> Iterator["LiveDisplay"]:
    """Show a changing status: bars redrawn in place on a terminal, otherwise one line per change."""
    if screen.quiet:
        yield LiveDisplay(screen)
    elif not screen.err.isatty() or os.environ.get("TERM") == "dumb" or screen.as_json:
        yield LineDisplay(screen)
    else:
        with ProgressBarDisplay(screen) as drawn:
            yield drawn


class LiveDisplay:
    """Quiet display, which shows only warnings."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen

    def update(self, now: "RunStatus") -> None:
        """Show a newer status of the run."""
        for warning in now.training.warnings if now.training is not None else ():
            self.screen.warn(warning)

    def add_probe(self, event: "ProbeFinished") -> None:
        """Show the result of a probe."""

    def update_comparison(self, now: "ComparisonProgress") -> None:
        """Show the progress of a comparison."""
        if now.problem and now.ended is not None:
            self.screen.warn(f"{now.ended.description} failed: {get_first_line(now.problem)}")


class LineDisplay(LiveDisplay):
    """Display with one line per change of state, for logs and terminals that cannot redraw."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(screen)
        self._states: dict[str, str] = {}

    def update(self, now: "RunStatus") -> None:
        super().update(now)
        for job in now.jobs:
            self._note_change(job.id, f"{job.state} {job.reason}", _describe_job(job))
        train = now.training
        if train is not None:
            finished = ", finished" if train.finished else ""
            branch = "" if train.tuning is None else f" {train.tuning.number} {train.tuning.chosen}"
            state = f"{train.signature} {train.batch} {int(train.epoch)}{branch}{finished}"
            self._note_change("training", state, describe_training(train))

    def add_probe(self, event: "ProbeFinished") -> None:
        self.screen.note(_describe_finished_probe(event))

    def update_comparison(self, now: "ComparisonProgress") -> None:
        super().update_comparison(now)
        cell = "" if now.cell is None else now.cell.description
        state = f"{now.done} {now.failed} {now.running} {now.total} {cell} {now.waits}"
        self._note_change("comparison", state, describe_comparison(now))

    def _note_change(self, subject: str, state: str, text: str) -> None:
        if self._states.get(subject) != state:
            self._states[subject] = state
            self.screen.note(text)


def _describe_job(job: "JobStatus") -> str:
    """Describe a job in one line."""
    parts = [f"{job.id}: {job.state}"]
    # The failure of a probe is reported by the line of its result.
    failed = job.kind == "probe" and job.state == "failed"
    parts += [reason] if not failed and (reason := describe_job_state(job)) else []
    if job.kind == "probe" and job.state in ("queued", "running"):
        parts.append(f"{job.done} of {format_count(job.total, 'probe')} done")
    return ", ".join(parts)


def _describe_finished_probe(event: "ProbeFinished") -> str:
    remaining = f", about {format_duration(event.left)} left" if event.left and event.number < event.total else ""
    return f"[{event.number}/{event.total}] {describe_probe(event.result)}{remaining}"


class ProgressBarDisplay(LiveDisplay):
    """Progress bars redrawn in place on stderr; probe results and warnings scroll above them."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(screen)
        from rich.live import Live as RichLive
        from rich.progress import BarColumn, Progress, TextColumn

        console = screen._make_console(screen.err)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[state]}"))
        self._bars = Progress(*columns, console=console, auto_refresh=False)
        self._bar_of: dict[str, TaskID] = {}
        self._live = RichLive(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> "ProgressBarDisplay":
        self._live.start()
        self.screen.drawn = self._live.console
        return self

    def __exit__(self, *_: object) -> None:
        self.screen.drawn = None
        self._live.stop()

    def update(self, now: "RunStatus") -> None:
        super().update(now)
        details = []
        for job in now.jobs:
            if job.kind == "train" and now.training is not None and job.state == "running":
                self._draw_training(job.id, now.training)
                details.append(describe_progress_of_training(now.training))
                continue
            self._draw(job.id, job.id, job.done, job.total, ", ".join([job.state, *_list_probe_progress(job)]))
            if job.state != "failed" and (reason := describe_job_state(job)):
                details.append(f"{job.id}: {reason}")
            if job.now is not None and job.state == "running":
                probe = describe_configuration(job.now.nodes, job.now.batch, job.now.local_batch)
                details.append(f"{job.id} measures {probe}")
        self._refresh(details)

    def add_probe(self, event: "ProbeFinished") -> None:
        self.screen.note(f"[{event.number}/{event.total}] {describe_probe(event.result)}")

    def update_comparison(self, now: "ComparisonProgress") -> None:
        super().update_comparison(now)
        total = now.total or 1
        remaining = [] if now.left is None else [f"{format_duration(now.left)} left"]
        state = ", ".join([f"{now.done} of {format_count(now.total, 'training')}", *remaining])
        self._draw("comparison", "comparison", now.done + now.failed, total, state)
        details = [describe_comparison(now)]
        if now.training is not None and not now.training.finished:
            self._draw_training("training", now.training)
            details.append(describe_progress_of_training(now.training))
        elif (bar := self._bar_of.pop("training", None)) is not None:
            self._bars.remove_task(bar)
        self._refresh(details)

    def _draw_training(self, key: str, now: "TrainingStatus") -> None:
        done, total = (now.epoch, now.epochs) if now.epochs is not None else (now.samples, now.samples_asked)
        unit = "epoch" if now.epochs is not None else "sample"
        count = (
            ""
            if total is None
            else f"{done:.1f} of {total} {unit}s"
            if unit == "epoch"
            else f"{done} of {total} samples"
        )
        rate = [f"{format_number(now.batch / now.step_time)} samples/s"] if now.step_time else []
        remaining = [f"{format_duration(now.eta)} left"] if now.eta is not None else []
        self._draw(key, f"training {now.signature}", done, total, ", ".join(filter(None, [count, *rate, *remaining])))

    def _draw(self, key: str, description: str, done: float, total: float | None, state: str) -> None:
        if key not in self._bar_of:
            self._bar_of[key] = self._bars.add_task(description, total=total, state=state)
        self._bars.update(self._bar_of[key], description=description, completed=done, total=total, state=state)

    def _refresh(self, details: Sequence[str]) -> None:
        from rich.console import Group

        self._live.update(Group(self._bars, *details), refresh=True)


def _list_probe_progress(job: "JobStatus") -> Iterator[str]:
    """Yield the progress, rate and remaining time of a job that measures probes."""
    if job.kind == "probe":
        yield f"{job.done} of {format_count(job.total, 'probe')}"
        if job.done and job.elapsed:
            yield f"{format_number(60 * job.done / job.elapsed, 2)} per minute"
    if job.left is not None:
        yield f"about {format_duration(job.left)} left"


# --- Progress of a comparison


def describe_comparison(now: "ComparisonProgress") -> str:
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
