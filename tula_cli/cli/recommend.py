"""`tula recommend`."""

import itertools
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tula_cli.cli.runs import JobOrRun
from tula_cli.errors import BadMeasurements, SpecError
from tula_cli.options import Every, Observed
from tula_cli.query import Query
from tula_cli.show import recommend as show_recommend
from tula_cli.show.screen import Lines, Screen

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tula_cli.run.directory import Run
    from tula_cli.services.recommend import Answer


def recommend(
    screen: Screen,
    chosen: JobOrRun,
    query: Query,
    every: Every = False,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Also show the reason for the choice, intervals, memory and the fitted models.",
        ),
    ] = False,
    save: Annotated[bool, typer.Option("--save", help="Store this recommendation for tula train.")] = False,
    demo: Annotated[
        bool,
        typer.Option("--demo", help="Show a recommendation for an example that comes with tula: ResNet-18 on 16 GPUs."),
    ] = False,
    trainings: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Plan N trainings that together use at most --max-nodes nodes at a time. For several jobs, give --run and --trainings once per job.",
        ),
    ] = None,
    observed: Observed = None,
) -> None:
    """Choose nodes and batch size from the measurements.

    tula train uses the first recommendation of a run. To update it, repeat its command. With another objective,
    other limits or --set, the recommendation is only shown, unless you add --save. Later commands do not use the
    values of --set.
    """
    from tula_cli.services import recommend as service
    from tula_cli.services import recommendation_files
    from tula_cli.spec.job import describe_training_method

    flags = {"--all": every, "--explain": explain}
    if trainings and (unused := [name for name, given in flags.items() if given]):
        raise SpecError(
            f"{', '.join(unused)} {'has' if len(unused) == 1 else 'have'} no effect with --trainings", "remove it"
        )
    jobs: Sequence[Sequence[Run]]
    if demo:
        jobs = [[_open_demo_run(screen, chosen, saves=save or observed is not None)]]
    else:
        jobs = chosen.open_runs_by_job(screen) if trainings else [chosen.open_runs(screen)]
        _require_measurements(screen, jobs, chosen, observed)
    if trainings:
        _show_campaign(screen, jobs, query, trainings, overrides=chosen.overrides, demo=demo, save=save)
        return
    runs = jobs[0]
    pending = {} if demo else service.count_pending_probes(runs)
    answer = service.recommend_configuration(runs, query, overrides=chosen.overrides, pending=pending, now=time.time())
    if not demo:
        answer = service.add_start_estimate(answer)
    recommendation, saved = answer.recommendation, False
    warnings = [*answer.warnings]
    if not demo:
        stored = recommendation_files.store_answer(
            runs, answer, requested=save, overrides=chosen.overrides, job=chosen.job_file, every=every
        )
        saved = stored.is_stored
        warnings += stored.warnings
        if not saved and not stored.warnings:
            screen.print_note(show_recommend.describe_unsaved_answer(stored.earlier))
    rows = {"rows": Lines(answer.list_rows_as_json(every=every))}
    explanations = service.list_regressions(answer) if explain else {}
    line = describe_training_method(runs[0].spec)
    details_as_json = {"explanation": explanations} if explain else {}
    source = {"demo": show_recommend.DEMO_CITATION} if demo else {}
    data = {**dict(recommendation), **rows, "saved": saved, "method_line": line, **details_as_json, **source}
    shown = _render_answer(answer, every=every, kept=saved)
    details: Iterable[RenderableType] = [show_recommend.EXPLAIN_HINT]
    if explain:
        details = itertools.chain([line], show_recommend.render_explanation(recommendation, explanations))
    first, last = show_recommend.render_demo_lines() if demo else ((), ())
    screen.print_answer(data, itertools.chain(first, shown, details, last))
    screen.print_warnings(warnings)


def _show_campaign(
    screen: Screen,
    jobs: "Sequence[Sequence[Run]]",
    query: Query,
    trainings: Sequence[int],
    *,
    overrides: Sequence[str],
    demo: bool,
    save: bool,
) -> None:
    """Show a plan for many trainings, and store it if `save` is set."""
    from tula_cli.services import campaign as service
    from tula_cli.show import campaign as show_campaign

    plan = service.plan_trainings(jobs, query, trainings, overrides=overrides, save=save)
    if save:
        backend = jobs[0][0].spec.cluster.backend
        one_by_one = "" if backend.has_queue else "; on this machine, this command runs one training after the other"
        screen.print_note(f"The plan is stored for tula train --seeds {plan.trainings}{one_by_one}.")
    first, last = show_recommend.render_demo_lines() if demo else ((), ())
    data = {**vars(plan), **({"demo": show_recommend.DEMO_CITATION} if demo else {})}
    screen.print_answer(data, itertools.chain(first, show_campaign.render_campaign(plan), last))
    screen.print_warnings(plan.warnings)


def _render_answer(answer: "Answer", *, every: bool, kept: bool) -> "Iterator[RenderableType]":
    """Yield the answer for terminal output; `kept` states whether the answer was written."""
    whole = every and len(answer.candidates) <= show_recommend.MAX_TABLE_ROWS
    yield from show_recommend.render_recommendation(
        answer.with_all_rows() if whole else answer.recommendation,
        every=whole,
        more=show_recommend.describe_saved_table(kept=kept) if every else show_recommend.ALL_ROWS_HINT,
    )


def _open_demo_run(screen: Screen, chosen: JobOrRun, *, saves: bool) -> "Run":
    """Return the run that is shipped with tula, with its settings.

    Raises:
        SpecError: another run is named, or the answer is to be saved.
    """
    from tula_cli.assets import find_asset
    from tula_cli.run.directory import RunDir
    from tula_cli.run.job_runs import open_run

    if chosen.is_named or saves:
        raise SpecError(
            "--demo uses a run that is part of tula, and saves nothing",
            "remove the job, --run, --observed and --save, or remove --demo",
        )
    run = RunDir.find_newest(find_asset("demo"))
    screen.run_id = run.id
    screen.overrides = tuple(chosen.overrides)
    return open_run(run, chosen.overrides)


def _require_measurements(
    screen: Screen, jobs: "Sequence[Sequence[Run]]", chosen: JobOrRun, observed: str | None
) -> None:
    """Check that each job has a run, after taking over observed jobs if a script of them is named.

    Raises:
        SpecError: observed jobs are named for several jobs.
        BadMeasurements: there is no run of a job yet, or no observed job can be used.
    """
    if observed is not None:
        from tula_cli.cli.waiting import follow_work
        from tula_cli.services.observed_probes import add_observed_probes

        if len(jobs) > 1:
            raise SpecError(
                f"--observed {observed}: is only possible for one job, but {len(jobs)} jobs are named",
                "add the observed jobs to each job first: tula recommend --run RUN --observed SCRIPT",
            )
        follow_work(screen, add_observed_probes(jobs[0], observed, chosen.find_settings_origin(jobs[0])))
    for runs in jobs:
        if not any(run.exists for run in runs):
            raise BadMeasurements(
                f"{chosen.job} has no measurements yet", f"run tula profile {shlex.quote(str(chosen.job))} first"
            )
