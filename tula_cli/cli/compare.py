"""`tula compare`."""

from typing import TYPE_CHECKING, Annotated

import typer

from tula_cli.cli.options import DryRun, Yes
from tula_cli.cli.runs import JobOrRun
from tula_cli.cli.waiting import follow_work, make_submission, show_detached_jobs
from tula_cli.errors import SpecError
from tula_cli.options import ComparisonRequest, LearningRates, NearBatches, NodeType, Wait
from tula_cli.show import compare as show_compare
from tula_cli.show.screen import Screen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tula_cli.run.directory import Run
    from tula_cli.services.comparison.learning_rates import LearningRateReport
    from tula_cli.services.comparison.session import ComparisonResult, PreparedComparison
    from tula_cli.services.plans import LearningRateSearchPlan
    from tula_cli.services.waiting import Submission


def compare(
    screen: Screen,
    chosen: JobOrRun,
    request: ComparisonRequest,
    learning_rates: LearningRates = False,
    near_batches: NearBatches = False,
    only_show: Annotated[
        bool, typer.Option("--show", help="Show the results so far, without starting anything.")
    ] = False,
    node_type: NodeType = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    wait: Wait = None,
) -> None:
    """Compare the accuracy of several methods and batch sizes.

    The small batch (train.reference_batch with method lbt) is always included. Unless this could cost more, all rows
    except lbt are first trained for a quarter of the epochs; then only the best two, lbt and the job's method are trained for
    all epochs. Run the same command again to follow running trainings and to start missing ones. Without --methods and
    --batch, the command continues the last comparison.

    With --learning-rates, the command only finds the learning rate for one batch. At k times train.reference_batch,
    it tries 1, sqrt(k) and k times the learning rate, in short trainings from one checkpoint.
    """
    from tula_cli.services.comparison import session
    from tula_cli.services.comparison.learning_rates import prepare_rate_search

    runs = chosen.open_runs(screen)
    submission = make_submission(screen, chosen, runs, yes=yes, wait=wait, keep=not dry_run, refuses_edits=True)
    if learning_rates or near_batches:
        work = prepare_rate_search(
            runs,
            submission.inspect,
            batch=_choose_searched_batch(request),
            nodes=request.nodes,
            node_type=node_type,
            near_batches=near_batches,
        )
        return _search_learning_rate(
            screen, follow_work(screen, work), submission, only_show=only_show, dry_run=dry_run
        )
    if only_show:
        return _show_comparison(screen, runs, request, node_type=node_type)
    prepared = follow_work(screen, session.prepare_comparison(runs, request, submission.inspect, node_type=node_type))
    if dry_run:
        return _show_dry_run(screen, prepared, submission)
    comparison = follow_work(screen, session.run_comparison(prepared, submission))
    _show_result_table(screen, comparison)
    return comparison.require_none_failed()


def _choose_searched_batch(request: ComparisonRequest) -> int | None:
    """Return the batch to search a learning rate for; None for the recommended one.

    Raises:
        SpecError: there are several, or options that only concern whole trainings.
    """
    batches = request.batches or ()
    if request != ComparisonRequest(batches=request.batches, nodes=request.nodes):
        raise SpecError(
            "--methods, --seeds and --controls have no effect on a search for a learning rate",
            "remove these options, or remove --learning-rates and --batches",
        )
    if len(batches) > 1:
        raise SpecError(
            "a learning rate can be searched for only one batch at a time", f"for example --batch {max(batches)}"
        )
    return batches[0] if batches else None


def _search_learning_rate(
    screen: Screen, search: "LearningRateSearchPlan", submission: "Submission", *, only_show: bool, dry_run: bool
) -> None:
    """Find the learning rate of a batch, show the plan, or show what was found."""
    from tula_cli.services.comparison import learning_rates
    from tula_cli.services.waiting import DetachedJobs

    if only_show:
        report = learning_rates.read_search_report(search, submission.find_settings_origin(search.run))
        return _show_learning_rate_report(screen, report)
    if dry_run:
        scripts = [submission.launcher_for(search.run.spec).render_script(search.run, search.task)]
        data = {
            "plan": search.plan,
            "share": search.plan.training_share,
            "arms": search.arms,
            "hours": search.hours,
            "scripts": scripts,
        }
        return screen.print_answer(data, show_compare.render_search_plan(search, scripts=scripts))
    result = follow_work(screen, learning_rates.run_rate_search(search, submission))
    if isinstance(result, DetachedJobs):
        return show_detached_jobs(screen, [search.run], result, {"plan": search.plan})
    return _show_learning_rate_report(screen, result)


def _show_learning_rate_report(screen: Screen, report: "LearningRateReport") -> None:
    screen.print_answer(report, show_compare.render_learning_rates(report))
    screen.print_warnings(report.warnings)


def _show_comparison(
    screen: Screen, runs: "Sequence[Run]", request: ComparisonRequest, *, node_type: str | None
) -> None:
    from tula_cli.cluster import launcher
    from tula_cli.services.comparison import session

    if request != ComparisonRequest():
        raise SpecError(
            "--methods, --batch and similar options have no effect with --show, which shows the whole comparison",
            "remove these options, or remove --show",
        )
    run, comparison = session.load_comparison(runs, node_type=node_type)
    if run.type is not None:
        screen.print_note(f"node type {run.type}")
    read_only_launcher = launcher.make_launcher(run.spec, submits=False)
    _show_result_table(screen, session.read_comparison_result(run, comparison, read_only_launcher))


def _show_dry_run(screen: Screen, prepared: "PreparedComparison", submission: "Submission") -> None:
    plan, run = prepared.plan, prepared.run
    launcher = submission.launcher_for(run.spec)
    scripts = [launcher.render_script(run, plan.first.task)] if plan.first is not None else []
    data = {
        "comparison": plan.comparison,
        "missing": plan.missing,
        "undecided": len(plan.state.undecided),
        "hours_left": plan.hours_left,
        "scripts": scripts,
    }
    screen.print_answer(data, show_compare.render_compare_plan(plan, scripts=scripts))


def _show_result_table(screen: Screen, comparison_result: "ComparisonResult") -> None:
    report = comparison_result.report
    screen.status = "done" if report.complete else "pending" if comparison_result.active else "partial"
    screen.print_answer(report, show_compare.render_comparison(report))
    screen.print_warnings(report.warnings)
