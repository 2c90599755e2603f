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

    def update_status(self, status: "RunStatus") -> None:
        """Show a newer status of the run."""
        for warning in status.training.warnings if status.training is not None else ():
            self.screen.print_warning(warning)

    def add_probe(self, event: "ProbeFinished") -> None:
        """Show the result of a probe."""

    def update_comparison(self, progress: "ComparisonProgress") -> None:
        """Show the progress of a comparison."""
        if progress.problem and progress.ended is not None:
            self.screen.print_warning(f"{progress.ended.description} failed: {get_first_line(progress.problem)}")


class LineDisplay(LiveDisplay):
    """Display with one line per change of state, for logs and terminals that cannot redraw."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(screen)
        self._states: dict[str, str] = {}

    def update_status(self, status: "RunStatus") -> None:
        super().update_status(status)
        for job in status.jobs:
            self._print_change(job.id, f"{job.state} {job.reason}", _describe_job(job))
        train = status.training
        if train is not None:
            finished = ", finished" if train.finished else ""
            branch = "" if train.tuning is None else f" {train.tuning.number} {train.tuning.chosen}"
            state = f"{train.signature} {train.batch} {int(train.epoch)}{branch}{finished}"
            self._print_change("training", state, describe_training(train))

    def add_probe(self, event: "ProbeFinished") -> None:
        remaining = f", about {format_duration(event.left)} left" if event.left and event.number < event.total else ""
        self.screen.print_note(f"[{event.number}/{event.total}] {describe_probe(event.result)}{remaining}")

    def update_comparison(self, progress: "ComparisonProgress") -> None:
        super().update_comparison(progress)
        cell = "" if progress.cell is None else progress.cell.description
        state = f"{progress.done} {progress.failed} {progress.running} {progress.total} {cell} {progress.waits}"
        self._print_change("comparison", state, describe_comparison_progress(progress))

    def _print_change(self, subject: str, state: str, text: str) -> None:
        if self._states.get(subject) != state:
            self._states[subject] = state
            self.screen.print_note(text)


def _describe_job(job: "JobStatus") -> str:
    parts = [f"{job.id}: {job.state}"]
    # The failure of a probe is reported by the line of its result.
    failed = job.kind == "probe" and job.state == "failed"
    parts += [reason] if not failed and (reason := describe_job_state(job)) else []
    if job.kind == "probe" and job.state in ("queued", "running"):
        parts.append(f"{job.done} of {format_count(job.total, 'probe')} done")
    return ", ".join(parts)


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

    def update_status(self, status: "RunStatus") -> None:
        super().update_status(status)
        details = []
        for job in status.jobs:
            if job.kind == "train" and status.training is not None and job.state == "running":
                self._draw_training_bar(job.id, status.training)
                details.append(describe_progress_of_training(status.training))
                continue
            self._draw_bar(job.id, job.id, job.done, job.total, ", ".join([job.state, *_list_probe_progress(job)]))
            if job.state != "failed" and (reason := describe_job_state(job)):
                details.append(f"{job.id}: {reason}")
            if job.now is not None and job.state == "running":
                probe = describe_configuration(job.now.nodes, job.now.batch, job.now.local_batch)
                details.append(f"{job.id} measures {probe}")
        self._show_details(details)

    def add_probe(self, event: "ProbeFinished") -> None:
        self.screen.print_note(f"[{event.number}/{event.total}] {describe_probe(event.result)}")

    def update_comparison(self, progress: "ComparisonProgress") -> None:
        super().update_comparison(progress)
        total = progress.total or 1
        remaining = [] if progress.left is None else [f"{format_duration(progress.left)} left"]
        state = ", ".join([f"{progress.done} of {format_count(progress.total, 'training')}", *remaining])
        self._draw_bar("comparison", "comparison", progress.done + progress.failed, total, state)
        details = [describe_comparison_progress(progress)]
        if progress.training is not None and not progress.training.finished:
            self._draw_training_bar("training", progress.training)
            details.append(describe_progress_of_training(progress.training))
        elif (bar := self._bar_of.pop("training", None)) is not None:
            self._bars.remove_task(bar)
        self._show_details(details)

    def _draw_training_bar(self, key: str, status: "TrainingStatus") -> None:
        done: float
        total: float | None
        if status.epochs is not None:
            done, total = status.epoch, status.epochs
            count = f"{done:.1f} of {total} epochs"
        else:
            done, total = status.samples, status.samples_asked
            count = "" if total is None else f"{done} of {total} samples"
        rate = [f"{format_number(status.batch / status.step_time)} samples/s"] if status.step_time else []
        remaining = [f"{format_duration(status.eta)} left"] if status.eta is not None else []
        self._draw_bar(
            key, f"training {status.signature}", done, total, ", ".join(filter(None, [count, *rate, *remaining]))
        )

    def _draw_bar(self, key: str, description: str, done: float, total: float | None, state: str) -> None:
        if key not in self._bar_of:
            self._bar_of[key] = self._bars.add_task(description, total=total, state=state)
        self._bars.update(self._bar_of[key], description=description, completed=done, total=total, state=state)

    def _show_details(self, details: Sequence[str]) -> None:
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


def describe_comparison_progress(progress: "ComparisonProgress") -> str:
    """Describe the progress of a comparison in one line."""
    bound_text = "at most " if progress.undecided else ""
    round_text = f"round {progress.round} of 2: " if progress.round else ""
    parts = [f"{round_text}{progress.done} of {bound_text}{format_count(progress.total, 'training')} done"]
    parts += [f"{progress.failed} failed"] if progress.failed else []
    parts += [f"now: {progress.cell.description}"] if progress.cell is not None else []
    parts += [progress.waits] if progress.waits else []
    parts += [f"{progress.running} running"] if progress.cell is None and progress.running else []
    if progress.left is not None and progress.done + progress.failed < progress.total:
        parts.append(f"about {format_duration(progress.left)} left")
    return ", ".join(parts)
