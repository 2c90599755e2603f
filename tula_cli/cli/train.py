"""`tula train`."""

import contextlib
from typing import TYPE_CHECKING

from tula_cli.cli.options import DryRun, Yes
from tula_cli.cli.runs import JobOrRun
from tula_cli.cli.waiting import follow_work, make_submission, show_detached_jobs
from tula_cli.errors import SchedulerError
from tula_cli.options import Timeout, TrainRequest, Wait
from tula_cli.show import train as show_train
from tula_cli.show.screen import Screen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tula_cli.run.directory import Run
    from tula_cli.run.records.results import Summary
    from tula_cli.services.train import PreparedTraining
    from tula_cli.services.waiting import Submission


def train(
    screen: Screen,
    chosen: JobOrRun,
    request: TrainRequest,
    yes: Yes = False,
    dry_run: DryRun = False,
    wait: Wait = None,
    timeout: Timeout = None,
) -> None:
    """Train at the recommended nodes and batch size.

    Run the same command again to follow a training that is running, or to resume it from its newest checkpoint.
    """
    from tula_cli.services import train as service
    from tula_cli.services.waiting import DetachedJobs

    runs = chosen.open_runs(screen)
    submission = make_submission(
        screen, chosen, runs, yes=yes, wait=wait, timeout=timeout, keep=not dry_run, refuses_edits=True
    )
    if request.seeds is not None:
        return _train_seeds(screen, runs, request, submission, dry_run=dry_run)
    training = follow_work(screen, service.prepare_training(runs, request, submission.inspect))
    if dry_run:
        return _show_dry_run(screen, training, submission)
    summary = follow_work(screen, service.run_training(training, submission))
    if isinstance(summary, DetachedJobs):
        return show_detached_jobs(screen, [training.run], summary, {"plan": training.plan})
    return _show_training_summary(screen, training, summary)


def _train_seeds(
    screen: Screen, runs: "Sequence[Run]", request: TrainRequest, submission: "Submission", *, dry_run: bool
) -> None:
    from tula_cli.services import train_seeds as service

    prepared = follow_work(screen, service.prepare_seed_trainings(runs, request, submission.inspect))
    if dry_run:
        first, run = prepared.first, prepared.run
        scripts = [] if first is None else [submission.launcher_for(run.spec).render_script(run, first.task)]
        data = {"plan": prepared.plan, "trainings": prepared.trainings, "scripts": scripts}
        return screen.print_answer(
            data, show_train.render_seeds_plan(prepared.plan, len(prepared.missing_trainings), scripts=scripts)
        )
    report = follow_work(screen, service.run_seed_trainings(prepared, submission))
    is_over = all(training.is_over for training in report.trainings)
    screen.status = "done" if is_over else "pending"
    screen.print_answer(report, show_train.render_seed_trainings(report))
    return report.require_none_failed()


def _show_training_summary(screen: Screen, training: "PreparedTraining", summary: "Summary") -> None:
    from tula_cli.services.site_charges import find_site_charge
    from tula_cli.services.train import find_baseline_saving

    run = training.run
    files = run.get_training(summary.signature)
    weights, charge = files.find_weights(), find_site_charge(run, summary.signature)
    gain = find_baseline_saving(run, summary)
    data = {**dict(summary), "causes": summary.causes, "weights": weights, "site_charge": charge}
    data |= {} if gain is None else {"gain": gain}
    parts = show_train.render_summary(
        summary, weights=weights, script_output=files.find_script_output(), charge=charge, gain=gain
    )
    return screen.print_answer(data, parts)


def _show_dry_run(screen: Screen, training: "PreparedTraining", submission: "Submission") -> None:
    from tula_cli.cluster.chains import list_nodes_of_chain_jobs
    from tula_cli.cluster.launcher import list_unfinished_jobs

    plan, run = training.plan, training.run
    launcher = submission.launcher_for(run.spec)
    scripts = [launcher.render_script(run, plan.task)]
    is_running = False
    with contextlib.suppress(SchedulerError):  # a silent scheduler does not prevent a dry run
        is_running = bool(list_unfinished_jobs(run, launcher, [plan.task.job]))
    shown = show_train.render_train_plan(
        plan, chain_nodes=list_nodes_of_chain_jobs(plan.task), scripts=scripts, is_running=is_running
    )
    screen.print_answer({"plan": plan, "scripts": scripts}, shown)
