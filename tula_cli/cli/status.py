"""`tula status`, `tula list`, `tula logs` and `tula cancel`."""

from pathlib import Path
from typing import Annotated

import typer

from tula_cli.cli.options import ADVANCED_PANEL
from tula_cli.cli.runs import ExistingRun, require_runs_folder
from tula_cli.options import DEFAULT_RUNS_FOLDER, NodeType, Root
from tula_cli.show import status as show_status
from tula_cli.show import tables
from tula_cli.show.screen import Screen


def status(screen: Screen, chosen: ExistingRun) -> None:
    """Show the jobs, the training and the recommendation of a run."""
    from tula_cli.run.directory import RunDir
    from tula_cli.run.job_runs import find_chosen_run
    from tula_cli.services.site_charges import find_site_charge
    from tula_cli.services.status import query_run_status

    runs = chosen.find_runs(screen)
    statuses = {run.type: query_run_status(run) for run in runs}
    screen.status = "pending" if any(now.has_active_jobs() for now in statuses.values()) else "done"
    snapshot = (find_chosen_run(runs) or runs[0]).read_snapshot()
    recommendation = snapshot.recommendation
    charges = {
        name: charge
        for name, now in statuses.items()
        if now.training is not None
        and (charge := find_site_charge(RunDir(now.path), now.training.signature)) is not None
    }
    data = tables.make_data_by_type(statuses, recommendation=recommendation)
    if charges:  # a job without node types has a single charge, with key None
        attributes = data if isinstance(data, dict) else vars(data)
        data = {**attributes, **({"site_charge": charges[None]} if None in charges else {"site_charges": charges})}
    screen.print_answer(data, show_status.render_status_by_type(statuses, recommendation, charges))
    for now in statuses.values():
        screen.print_warnings(now.warnings)
    screen.print_warnings(snapshot.record_warnings)


def list_(screen: Screen, root: Root = DEFAULT_RUNS_FOLDER) -> None:
    """List all runs, the most recently changed one first."""
    from tula_cli.run import files, owner
    from tula_cli.services import run_list

    root = Path(root)
    require_runs_folder(root)
    if left_out := owner.describe_left_out_runs(root.absolute() / name for name in files.list_names(root.absolute())):
        screen.print_note(left_out)
    run_summaries = run_list.list_runs(root.absolute())
    if run_summaries:
        screen.print_answer(run_summaries, show_status.render_runs(run_summaries, width=screen.width))
        return
    from tula_cli.run.observed import make_observed_jobs_hint

    screen.print_answer([], [f"there are no runs in {root}; tula profile creates one{make_observed_jobs_hint()}"])


def logs(
    screen: Screen,
    chosen: ExistingRun,
    job: Annotated[
        str | None,
        typer.Option(metavar="JOB", help="Show only this job; tula status lists the jobs (default: newest job)."),
    ] = None,
    rank: Annotated[int | None, typer.Option(metavar="N", min=0, help="Show only this rank (default: rank 0).")] = None,
    every: Annotated[bool, typer.Option("--all", help="Show all attempts, not only the newest.")] = False,
    last: Annotated[
        int | None, typer.Option("--lines", "-n", metavar="N", min=0, help="Show only the last N lines.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines while jobs are running.")
    ] = False,
    node_type: NodeType = None,
) -> None:
    """Show the log of a job.

    Shows the log of rank 0 of the newest attempt. If an attempt failed, its error is shown first, with the log of the
    rank that failed. With --json, each line is one JSON object.
    """
    from tula_cli.run.job_runs import select_runs
    from tula_cli.services import logs as services_logs
    from tula_cli.services.status import query_run_status

    runs = chosen.find_runs(screen)
    if node_type is not None:
        runs = select_runs(runs, node_type)
    run = services_logs.find_last_written_run(runs, job) or runs[0]

    def is_active() -> bool:
        return query_run_status(run).has_active_jobs(job and [job])

    pause = run.spec.cluster.backend.poll[0] if follow else 0.0
    query = services_logs.LogQuery(job=job, rank=rank, every=every, last=last)
    previous_place = None
    for line in services_logs.read_logs(
        run, query, follow=follow, may_grow=services_logs.make_rate_limited_check(is_active, pause=pause)
    ):
        if line.heading_key != previous_place:
            previous_place = line.heading_key
            screen.print_note(f"==> {services_logs.describe_log_origin(run, line)}")
        screen.print_line(line.text, line)
    if previous_place is None and last != 0:
        screen.print_note(services_logs.describe_missing_output(run, query))
    screen.print_warnings(run.read_snapshot().record_warnings)


def cancel(
    screen: Screen,
    chosen: ExistingRun,
    yes: Annotated[  # noqa: ARG001
        bool,
        typer.Option("--yes", "-y", help="Has no effect, because cancel does not ask.", rich_help_panel=ADVANCED_PANEL),
    ] = False,
) -> None:
    """Cancel the jobs of a run; its results are kept."""
    from tula_cli.cluster import launcher
    from tula_cli.services import cancel

    runs = chosen.find_runs(screen)
    for run in runs:
        snapshot = run.read_snapshot()
        screen.print_warnings([*snapshot.job_warnings, *snapshot.record_warnings])
    ended = cancel.cancel_jobs(runs, lambda run: launcher.make_launcher(run.spec, submits=False))
    screen.print_answer(
        {"cancelled": ended}, [f"cancelled {', '.join(ended)}" if ended else "no job was queued or running"]
    )
