"""`tula recommend`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tula_cli.cli.options import RUNS, MaybeRun, MaybeSpec, NodeType, Overrides, Root
from tula_cli.cli.runs import adopt, open_run, started
from tula_cli.cli.waiting import warn_all
from tula_cli.errors import BadMeasurements
from tula_cli.show import recommend as show_recommend
from tula_cli.show.screen import Screen

if TYPE_CHECKING:
    from tula_cli.run.directory import RunDir
    from tula_cli.run.records.recommendations import Recommendation
    from tula_cli.spec.job import JobSpec


def recommend(
    screen: Screen,
    job: MaybeSpec = None,
    named: MaybeRun = None,
    root: Root = RUNS,
    overrides: Overrides = None,
    objective: Annotated[
        Literal["time", "cost", "knee", "accuracy-time"],
        typer.Option(help="What to choose by; accuracy-time: the least time to the same progress."),
    ] = "knee",
    curve: Annotated[Literal["time", "cost"], typer.Option(help="The curve whose knee is looked for.")] = "time",
    nodes: Annotated[int | None, typer.Option(min=1, help="Consider this number of nodes only.")] = None,
    max_nodes: Annotated[int | None, typer.Option(min=1, help="At most so many nodes.")] = None,
    max_batch: Annotated[int | None, typer.Option(min=1, help="A global batch of at most this.")] = None,
    deadline: Annotated[float | None, typer.Option(min=0, metavar="HOURS", help="Train within.")] = None,
    budget: Annotated[float | None, typer.Option(min=0, metavar="PRICE", help="Spend at most.")] = None,
    node_type: NodeType = None,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Show only what nothing else beats in both time and cost.")
    ] = False,
    save: Annotated[bool, typer.Option("--save", help="Make this answer the one that tula train takes.")] = False,
) -> None:
    """Choose nodes and batch size from what was measured.

    A run's first answer is what tula train takes; the same question again renews it. An answer to another question
    (objective, curve, limits, type), or with --set, is only shown, unless --save. What --set says is never kept for later
    commands.
    """
    import time

    from tula_cli.services import recommend as services_recommend

    run, spec = _measured(screen, job, named, root, overrides)
    assumed = tuple(overrides or ()) if overrides and spec != run.spec() else ()
    limits = {"nodes": nodes, "max-nodes": max_nodes, "max-batch": max_batch, "deadline": deadline, "budget": budget}
    asked = {"curve": None if curve == "time" else curve, **limits, "type": node_type}
    answer = services_recommend.recommend(
        run,
        spec,
        objective=objective,
        curve=curve,
        nodes=nodes,
        max_batch=max_batch,
        max_nodes=max_nodes,
        deadline_hours=deadline,
        budget=budget,
        node_type=node_type,
        options=[f"--{name} {value}" for name, value in asked.items() if value is not None],
        overrides=assumed,
        pending={part.type: _pending(part.run, part.spec) for part in run.parts(spec)},
        now=time.time(),
    )
    found = answer.recommendation
    warn_all(screen, found.warnings)
    saved = save or _renews(screen, run, found)
    if saved:
        own = run.spec() if assumed else spec
        services_recommend.keep(run, own, answer)
        adopt(run, own, started(run, own), None if assumed else job, None if assumed else overrides)
    data = {**dict(found), "saved": saved}
    screen.answer(data, show_recommend.recommendation(found, width=screen.width, color=screen.colored, pareto=pareto))


def _renews(screen: Screen, run: "RunDir", found: "Recommendation") -> bool:
    """Return whether an answer takes the place of the kept one unasked; say so where it does not."""
    from tula_cli.services import recommend as services_recommend

    known = run.recommendation()
    if not services_recommend.renews(found, known):
        screen.note(show_recommend.only_shown(known))
        return False
    return True


def _measured(
    screen: Screen, job: Path | None, named: Path | None, root: Path, overrides: Sequence[str] | None
) -> tuple["RunDir", "JobSpec"]:
    """Return run and spec; a job.yaml must have a run already."""
    run, spec = open_run(screen, job, named, root, overrides)
    if not run.exists:
        raise BadMeasurements(f"nothing was measured for {job} yet", f"run tula profile {job} first")
    return run, spec


def _pending(run: "RunDir", spec: "JobSpec") -> int:
    """Return how many probes are queued or running."""
    import time

    from tula_cli.cluster import launcher
    from tula_cli.services import status
    from tula_cli.services.progress import job_status

    if not run.jobs():
        return 0
    now = status.snapshot(run, launcher.launcher_for(spec, submits=False), now=time.time())
    return sum(job.total - job.done for job in now.jobs if job.kind == "probe" and job.state in job_status.ACTIVE)
