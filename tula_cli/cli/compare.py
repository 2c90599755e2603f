"""`tula compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tula_cli import words
from tula_cli.cli.options import (
    RUNS,
    CancelOnInterrupt,
    DryRun,
    Interrupted,
    MaybeRun,
    MaybeSpec,
    NodeType,
    Overrides,
    Root,
    Wait,
    Yes,
)
from tula_cli.cli.runs import adopt, part_of, require_unedited
from tula_cli.cli.waiting import allow, tell_new, waits, warn_all
from tula_cli.errors import BadMeasurements, JobFailed, SpecError
from tula_cli.show import compare as show_compare
from tula_cli.show import live as show_live
from tula_cli.show.screen import Screen

if TYPE_CHECKING:
    from tula_cli.cluster.launcher import Launcher
    from tula_cli.run.directory import RunDir
    from tula_cli.run.records.results import Comparison
    from tula_cli.services.compare import ComparePlan
    from tula_cli.services.comparison.accuracy import CompareReport
    from tula_cli.spec.job import JobSpec


def compare(
    screen: Screen,
    job: MaybeSpec = None,
    named: MaybeRun = None,
    root: Root = RUNS,
    overrides: Overrides = None,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="Values of train.method, or lbt-x2, lbt-x4, sqrt, robust; lbt,lrs,lars,polo,ags."
        ),
    ] = None,
    batch: Annotated[str | None, typer.Option(metavar="N,M", help="Global batches; else the recommended one.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds, from train.seed on (default: 3).")] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes; else the recommended ones, else the fewest of search.nodes.")
    ] = None,
    controls: Annotated[
        bool | None,
        typer.Option("--controls/--no-controls", help="lbt at twice and four times the learning rate (default: yes)."),
    ] = None,
    only_show: Annotated[bool, typer.Option("--show", help="Show what there is; start nothing.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with the table and its plots.")
    ] = None,
    node_type: NodeType = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    wait: Wait = None,
    cancel_on_interrupt: CancelOnInterrupt = False,
) -> None:
    """Train with several methods, batches and seeds, and compare the accuracy.

    The small batch (train.reference_batch, lbt) is always part of it. The same command again attaches to what is under
    way, trains what is missing, and stops; without --methods, --batch ... those of the last time.
    """
    import time

    from tula_cli.cluster import inspection
    from tula_cli.cluster import launcher as cluster_launcher
    from tula_cli.services import compare as services_compare

    _check_page(html)
    whole, all_types, part = part_of(screen, job, named, root, overrides, node_type)
    run, spec = part.run, part.spec
    known = run.comparison()
    if only_show:
        if {methods, batch, seeds, nodes, controls} != {None}:
            raise SpecError("--show shows the whole comparison", "leave --methods, --batch and the like out, or --show")
        if known is None:
            raise BadMeasurements(f"nothing was compared in {run.id} yet", "tula compare job.yaml --batch N,M")
        _compared(screen, run, spec, known, html=html)
        return
    grid = services_compare.Grid(
        methods=_words(methods) or (known.methods if known else services_compare.DEFAULT_METHODS),
        batches=_numbers("--batch", batch) or (known.batches if known else services_compare.default_batches(run)),
        seeds=seeds or (known.seeds if known else 3),
        nodes=nodes or (known.nodes if known else services_compare.default_nodes(run, spec)),
        controls=controls if controls is not None else known.controls if known else True,
    )
    plan = services_compare.plan(run, spec, grid, inspect=inspection.inspect, now=time.time())
    warn_all(screen, plan.warnings)
    launcher = cluster_launcher.launcher_for(spec)
    if dry_run:
        scripts = [launcher.script(run, plan.first.task)] if plan.first is not None else []
        data = {
            "comparison": plan.comparison,
            "missing": plan.missing,
            "hours_left": plan.hours_left,
            "scripts": scripts,
        }
        screen.answer(data, show_compare.compare_plan(plan, scripts=scripts))
        return
    if not plan.missing:
        screen.note("every training of this comparison is finished already")
    else:
        screen.aside(show_compare.compare_plan(plan))
        require_unedited(screen, whole, all_types, job or named, overrides)
        allow(screen, "start?", yes=yes, capped=spec.search.max_node_hours is not None)
    adopt(whole, all_types, [part], job, overrides)
    run.write_comparison(plan.comparison)
    if plan.missing:
        _compare(screen, run, plan, launcher, wait=wait, cancel_on_interrupt=cancel_on_interrupt)
    found = _compared(screen, run, spec, plan.comparison, html=html)
    failed = sum(row.count(*services_compare.ENDED) for row in found.rows)
    if failed and screen.status == "partial":
        raise JobFailed(
            f"{failed} of {words.plural(found.total, 'training')} failed",
            f"tula logs {words.near(run.path)} shows what they said; the same command tries them again",
        )


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in _words(text))
    except ValueError:
        raise SpecError(f"{option} {text}: must be numbers, with commas between them") from None


def _compare(
    screen: Screen,
    run: "RunDir",
    plan: "ComparePlan",
    launcher: "Launcher",
    *,
    wait: bool | None,
    cancel_on_interrupt: bool,
) -> None:
    """Train what is missing: here one after the other, on a cluster side by side.

    Raises:
        Interrupted: Ctrl-C.
    """
    from tula_cli.cluster import inspection
    from tula_cli.services import status
    from tula_cli.services.comparison import trainings

    local = plan.spec.cluster.kind == "local"
    if local and wait is False:
        raise SpecError(
            "--no-wait: on this machine one training follows the other, and this command starts the next",
            "leave it out; what is done is kept whenever it ends",
        )
    try:
        if local:
            steps = trainings.one_by_one(run, plan, launcher, inspect=inspection.inspect)
        else:
            screen.note(f"submitting {words.plural(len(plan.missing), 'training')}")
            jobs = trainings.submit_all(run, plan, launcher, inspect=inspection.inspect)
            tell_new(screen, run, launcher, jobs, [], plan.spec)
            screen.note(f"{words.plural(len(jobs), 'training')} under way")
            if not waits(wait, plan.spec):
                return
            steps = trainings.wait_for_all(run, plan, launcher, jobs)
        with show_live.live(screen) as live:
            for now in steps:
                live.compared(now)
    except KeyboardInterrupt:
        if cancel_on_interrupt:
            ended = status.cancel(run, launcher)
            raise Interrupted(f"interrupted; cancelled {', '.join(ended) or 'nothing'}") from None
        hint = f"the same command attaches to it and goes on; tula cancel {words.near(run.path)} ends it"
        raise Interrupted("interrupted; what is trained stays, and what runs goes on", hint) from None


def _check_page(html: Path | None) -> None:
    """Refuse a page that cannot be written, before anything is trained for it."""
    if html is not None and html.is_dir():
        raise SpecError(f"--html {html}: is a folder", f"name a file in it: --html {html / 'compare.html'}")
    if html is not None and not html.absolute().parent.is_dir():
        raise SpecError(f"--html {html}: there is no folder {html.absolute().parent}", "make it, or name another")


def _compared(
    screen: Screen, run: "RunDir", spec: "JobSpec", comparison: "Comparison", *, html: Path | None
) -> "CompareReport":
    """Answer with the table, and write the page."""
    import time

    from tula_cli.cluster import launcher as cluster_launcher
    from tula_cli.run.files import write_atomic
    from tula_cli.services import status
    from tula_cli.services.comparison import accuracy
    from tula_cli.show.html import page as show_html_page

    now = status.snapshot(run, cluster_launcher.launcher_for(spec, submits=False), now=time.time())
    found = accuracy.report(run, comparison, spec, jobs=now.jobs)
    screen.status = "done" if found.complete else "pending" if now.active() else "partial"
    warn_all(screen, found.warnings)
    screen.answer(found, show_compare.compared(found, width=screen.width, color=screen.colored))
    if html is not None:
        write_atomic(
            html, show_html_page.comparison(found, accuracy.curves(run, comparison), title=f"{spec.name}: {run.id}")
        )
        screen.note(f"wrote {words.near(html)}")
    return found
