"""Display of service events, confirmation before money is spent, and answers for jobs that run in the background."""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tula_cli import words
from tula_cli.cli.runs import JobOrRun, make_edit_check
from tula_cli.errors import OverBudget, SpecError
from tula_cli.show import check as show_check
from tula_cli.show import compare as show_compare
from tula_cli.show import live as show_live
from tula_cli.show import profile as show_profile
from tula_cli.show import train as show_train
from tula_cli.show.screen import Screen

if TYPE_CHECKING:
    from tula_cli.cluster.inspection import CachedInspection
    from tula_cli.run.directory import Run, RunDir
    from tula_cli.services.events import Event, NodeCheckProgress, Note, Planned, WarningEvent, Work
    from tula_cli.services.waiting import DetachedJobs, Submission
    from tula_cli.spec.job import JobSpec

T = TypeVar("T")


def follow_work(screen: Screen, work: "Work[T]") -> T:
    """Run the work of a service, show its events, and return its result."""
    from tula_cli.services import events

    with ExitStack() as drawn:
        return events.run_work(work, _EventDisplay(screen, drawn).show_event)


class _EventDisplay:
    """Displays events; the live display is removed before other output."""

    def __init__(self, screen: Screen, drawn: ExitStack) -> None:
        self.screen, self.drawn = screen, drawn
        self.live: show_live.LiveDisplay | None = None

    def show_event(self, event: "Event") -> None:
        from tula_cli.services import events

        match event:
            case events.JobsProgress(status):
                self._open_live_display().update_status(status)
            case events.ProbeFinished():
                self._open_live_display().add_probe(event)
            case events.ComparisonProgress():
                self._open_live_display().update_comparison(event)
            case _:
                self.drawn.close()
                self.live = None
                _show_message(self.screen, event)

    def _open_live_display(self) -> show_live.LiveDisplay:
        if self.live is None:
            self.live = self.drawn.enter_context(show_live.open_live_display(self.screen))
        return self.live


def _show_message(screen: Screen, event: "Note | WarningEvent | Planned | NodeCheckProgress") -> None:
    from tula_cli.services import events

    match event:
        case events.Note(text):
            screen.print_note(text)
        case events.WarningEvent(warning):
            screen.print_warning(warning)
        case events.NodeCheckProgress(task, state):
            screen.print_note(show_check.describe_check_state(task, state))
        case events.ProfilePlanned(plans, is_further_round=True):
            screen.print_to_stderr(show_profile.render_round(plans))
        case events.ProfilePlanned(plans):
            screen.print_to_stderr(show_profile.render_plans(plans))
        case events.TrainPlanned(plan, chain_nodes):
            screen.print_to_stderr(show_train.render_train_plan(plan, chain_nodes=chain_nodes))
        case events.SeedsPlanned(campaign, missing):
            screen.print_to_stderr(show_train.render_seeds_plan(campaign, missing))
        case events.EvaluationPlanned(task):
            screen.print_to_stderr(show_train.render_evaluation_plan(task))
        case events.RateSearchPlanned(search):
            screen.print_to_stderr(show_compare.render_search_plan(search))
        case events.ComparePlanned(compared):
            screen.print_to_stderr(show_compare.render_compare_plan(compared))


def make_submission(
    screen: Screen,
    chosen: JobOrRun,
    runs: "Sequence[Run]",
    *,
    yes: bool,
    wait: bool | None,
    timeout: float | None = None,
    keep: bool = True,
    fresh: bool = False,
    refuses_edits: bool = False,
) -> "Submission":
    """Return how a command submits its jobs and waits for them.

    Args:
        runs: the runs of the job, or that in which jobs are submitted.
        keep, fresh: as of `CachedInspection`.
        refuses_edits: whether an edited job file is an error, as described by `make_edit_check`.
    """
    from tula_cli.cluster import launcher
    from tula_cli.services.waiting import Submission

    inspect = make_inspector(screen, runs[0].path.parent, fresh=fresh, keep=keep)
    confirm = _make_confirmation(screen, runs[0].spec, yes=yes)
    if refuses_edits:
        confirm = make_edit_check(screen, runs, chosen, then=confirm)
    return Submission(launcher.make_launcher, inspect, confirm, wait, timeout, chosen.job_file, tuple(chosen.overrides))


def make_inspector(screen: Screen, root: Path, *, fresh: bool, keep: bool = True) -> "CachedInspection":
    """Return the inspector of jobs, which caches its findings under `root`."""
    from tula_cli.cluster import inspection
    from tula_cli.cluster.inspection import CachedInspection

    return CachedInspection(root.absolute(), inspection.inspect, fresh=fresh, keep=keep, note=screen.print_note)


def _make_confirmation(screen: Screen, spec: "JobSpec", *, yes: bool) -> "Callable[[Planned], bool]":
    """Return the confirmation callback of a command.

    Nobody is asked if `yes` is set, or if the job has a cap on node-hours and there is no terminal. With neither a
    terminal nor a cap the callback raises OverBudget.
    """

    def confirm(planned: "Planned") -> bool:
        if yes or (spec.search.max_node_hours is not None and not sys.stdin.isatty()):
            return True
        if not sys.stdin.isatty():
            raise OverBudget(
                "confirmation is needed, but there is no terminal",
                "add --yes, or set a limit, for example --set search.max_node_hours=10",
            )
        if screen.quiet:  # the plan has not been shown yet
            screen.quiet = False
            _show_message(screen, planned)
            screen.quiet = True
        return screen.ask_yes_or_no("start?")

    return confirm


def refuse_option(is_given: bool, option: str, why: str) -> None:
    if is_given:
        raise SpecError(f"{option} {why}")


def show_detached_jobs(
    screen: Screen, runs: "Sequence[RunDir]", detached_jobs: "DetachedJobs", data: dict[str, Any]
) -> None:
    """Answer for jobs that run in the background."""
    screen.status = "pending"
    started = [job for job in detached_jobs.jobs if job not in detached_jobs.under_way]
    sentences = [f"started {', '.join(started)}"] if started else []
    sentences += [f"already running: {', '.join(detached_jobs.under_way)}"] if detached_jobs.under_way else []
    named = " ".join(f"--run {words.quote_path(run.path)}" for run in runs)
    line = f"{'; '.join(sentences)}; tula status {named} shows the progress"
    screen.print_answer({"jobs": list(detached_jobs.jobs), **data}, [line])
