"""`tula profile`."""

from tula_cli.cli.options import DryRun, Yes
from tula_cli.cli.runs import JobOrRun
from tula_cli.cli.waiting import follow_work, make_submission, show_detached_jobs
from tula_cli.options import Fresh, Largest, Timeout, Wait
from tula_cli.show import profile as show_profile
from tula_cli.show import tables
from tula_cli.show.screen import Screen


def profile(
    screen: Screen,
    chosen: JobOrRun,
    yes: Yes = False,
    dry_run: DryRun = False,
    largest: Largest = False,
    fresh: Fresh = False,
    wait: Wait = None,
    timeout: Timeout = None,
) -> None:
    """Measure short training runs over nodes and batch sizes.

    Run the same command again to follow jobs that are running and to measure what is missing.
    """
    from tula_cli.run.owner import require_ownership
    from tula_cli.services import profile

    runs = chosen.open_runs(screen)
    for run in () if dry_run else runs:
        require_ownership(run.path)  # before the model is built
    submission = make_submission(
        screen, chosen, runs, yes=yes, wait=wait, timeout=timeout, keep=not dry_run, fresh=fresh
    )
    if dry_run:
        dry_runs = follow_work(screen, profile.make_dry_run(runs, submission, largest=largest))
        return screen.print_answer(tables.make_data_by_type(dry_runs), show_profile.render_dry_run(dry_runs))
    profiled = follow_work(screen, profile.run_profile(runs, submission, largest=largest))
    if isinstance(profiled, profile.SubmittedProbes):
        return show_detached_jobs(screen, runs, profiled, {"plan": tables.make_data_by_type(profiled.plans)})
    screen.status = "partial" if profiled.partial else screen.status
    data = tables.make_data_by_type(profiled.reports)
    return screen.print_answer(data, tables.render_each_type(profiled.reports, show_profile.render_report))
