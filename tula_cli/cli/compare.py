"""`tula compare`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tula_cli import words
from tula_cli.cli.options import CancelOnInterrupt, DryRun, Html, Yes, check_page
from tula_cli.cli.runs import JobOrRun, confirm_unedited, print_node_type
from tula_cli.cli.waiting import follow_work, make_confirm, make_dependencies, make_inspector
from tula_cli.errors import SpecError
from tula_cli.options import ComparisonRequest, NodeType, Wait
from tula_cli.show import compare as show_compare
from tula_cli.show.screen import Screen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tula_cli.run.directory import Run
    from tula_cli.run.records.results import Comparison
    from tula_cli.services.comparison.session import ComparisonResult, PreparedComparison
    from tula_cli.services.waiting import Dependencies


def compare(
    screen: Screen,
    chosen: JobOrRun,
    request: ComparisonRequest,
    only_show: Annotated[
        bool, typer.Option("--show", help="Show the results so far, without starting anything.")
    ] = False,
    html: Html = None,
    node_type: NodeType = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    wait: Wait = None,
    cancel_on_interrupt: CancelOnInterrupt = False,
) -> None:
    """Compare the accuracy of several methods and batch sizes.

    The small batch (train.reference_batch with method lbt) is always included. If there are more than two other rows,
    all of them are trained for a quarter of the epochs, and then the best two, lbt and the job's method for all epochs.
    Run the same command again to follow trainings that are running and to start missing ones; without --methods and
    --batch it continues the last comparison.
    """
    from tula_cli.services.comparison import session
    from tula_cli.services.waiting import WaitPolicy

    _check_page(html)
    runs = chosen.open(screen)
    if only_show:
        return _show(screen, runs, request, node_type=node_type, html=html)
    own_dependencies = make_dependencies(
        make_inspector(screen, runs[0].path.parent, keep=not dry_run),
        confirm_unedited(screen, runs, chosen, then=make_confirm(screen, runs[0].spec, yes=yes)),
    )
    prepared = follow_work(screen, session.prepare(runs, request, own_dependencies, node_type=node_type))
    if dry_run:
        return _show_dry_run(screen, prepared, own_dependencies)
    wait_policy = WaitPolicy(wait, cancel_on_interrupt=cancel_on_interrupt)
    comparison = follow_work(
        screen,
        session.run_comparison(
            prepared, own_dependencies, wait_policy, file=chosen.find_settings_origin([prepared.run])
        ),
    )
    _answer_with_table(screen, prepared.run, prepared.plan.comparison, comparison, html=html)
    return comparison.require_none_failed()


def _show(
    screen: Screen,
    runs: "Sequence[Run]",
    request: ComparisonRequest,
    *,
    node_type: str | None,
    html: Path | None,
) -> None:
    """Show the current comparison without starting anything."""
    from tula_cli.cluster import launcher
    from tula_cli.services.comparison import session

    if request != ComparisonRequest():
        raise SpecError(
            "--show always shows the whole comparison",
            "remove --show, or remove --methods, --batch and similar options",
        )
    run, comparison = session.load_comparison(runs, node_type=node_type)
    print_node_type(screen, run)
    looks = launcher.make_launcher(run.spec, submits=False)
    _answer_with_table(screen, run, comparison, session.read_comparison_result(run, comparison, looks), html=html)


def _show_dry_run(screen: Screen, prepared: "PreparedComparison", dependencies: "Dependencies") -> None:
    plan, run = prepared.plan, prepared.run
    launcher = dependencies.launcher_for(run.spec)
    scripts = [launcher.script(run, plan.first.task)] if plan.first is not None else []
    data = {
        "comparison": plan.comparison,
        "missing": plan.missing,
        "undecided": len(plan.standing.undecided),
        "hours_left": plan.hours_left,
        "scripts": scripts,
    }
    screen.answer(data, show_compare.render_compare_plan(plan, scripts=scripts))


def _check_page(html: Path | None) -> None:
    """Reject a page that cannot be written, before anything is trained for it."""
    check_page(html, "compare.html")
    if html is not None:
        from tula_cli.services.document import load_report_package

        load_report_package().require_page_library()


def _answer_with_table(
    screen: Screen, run: "Run", comparison: "Comparison", comparison_result: "ComparisonResult", *, html: Path | None
) -> None:
    """Show the comparison table, and write the page if requested."""
    report = comparison_result.report
    screen.status = "done" if report.complete else "pending" if comparison_result.active else "partial"
    screen.answer(report, show_compare.render_comparison(report, width=screen.width, color=screen.colored))
    screen.warn_all(report.warnings)
    if html is not None:
        from tula_cli.run.files import MODE_FOR_ALL, write_atomic
        from tula_cli.services.document import load_report_package

        package = load_report_package()
        document = package.build_comparison(run, comparison, report, at=time.time())
        write_atomic(html, package.render_page(document), mode=MODE_FOR_ALL)
        screen.note(f"wrote {words.make_relative_path(html)}")
