"""`tula evaluate`."""

from tula_cli.cli.options import DryRun, Yes
from tula_cli.cli.runs import JobOrRun
from tula_cli.cli.waiting import follow_work, make_submission, show_detached_jobs
from tula_cli.options import EvaluationRequest, Timeout, Wait
from tula_cli.show import train as show_train
from tula_cli.show.screen import Screen


def evaluate(
    screen: Screen,
    chosen: JobOrRun,
    request: EvaluationRequest,
    yes: Yes = False,
    dry_run: DryRun = False,
    wait: Wait = None,
    timeout: Timeout = None,
) -> None:
    """Evaluate the weights of a training on the test set.

    The test set is dataset.test; without it, the validation set is used. If the weights have been evaluated before,
    the stored result is shown. tula status also shows it.
    """
    from tula_cli.services import evaluate as service
    from tula_cli.services.waiting import DetachedJobs

    prepared = service.prepare_evaluation(chosen.open_runs(screen), request)
    run, task = prepared.run, prepared.task
    submission = make_submission(screen, chosen, [run], yes=yes, wait=wait, timeout=timeout)
    if dry_run:
        screen.print_warnings(prepared.warnings)
        script = submission.launcher_for(run.spec).render_script(run, task)
        return screen.print_answer(
            {"task": task, "found": prepared.known_record, "scripts": [script]},
            [*show_train.render_evaluation_plan(task), "", script],
        )
    evaluation = follow_work(screen, service.run_evaluation(prepared, submission))
    if isinstance(evaluation, DetachedJobs):
        return show_detached_jobs(screen, [run], evaluation, {"task": task})
    return screen.print_answer(evaluation, show_train.render_evaluation(evaluation))
