"""`tula train`."""

import shutil
from typing import TYPE_CHECKING, Annotated

import typer

from tula_cli.cli.options import (
    RUNS,
    CancelOnInterrupt,
    DryRun,
    MaybeRun,
    MaybeSpec,
    NodeType,
    Overrides,
    Root,
    Timeout,
    Wait,
    Yes,
)
from tula_cli.cli.runs import adopt, open_run, require_unedited
from tula_cli.cli.waiting import allow, detached, tell_new, wait_for, waits, warn_all
from tula_cli.errors import JobFailed, TulaError
from tula_cli.show import train as show_train
from tula_cli.show.screen import Screen

if TYPE_CHECKING:
    from tula_cli.services.status import RunStatus
    from tula_cli.services.train import TrainPlan

DISK_IS_FULL = 2**16  # bytes free; below, the small files of a run cannot be written


def train(
    screen: Screen,
    job: MaybeSpec = None,
    named: MaybeRun = None,
    root: Root = RUNS,
    overrides: Overrides = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes; else the recommended ones.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Global batch; else the recommended one.")] = None,
    node_type: NodeType = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    wait: Wait = None,
    timeout: Timeout = None,
    cancel_on_interrupt: CancelOnInterrupt = False,
) -> None:
    """Train at the recommended nodes and batch size.

    The same command again attaches to what is under way, or goes on from the newest checkpoint.
    """
    from tula_cli.cluster import inspection
    from tula_cli.cluster import launcher as cluster_launcher
    from tula_cli.cluster.slurm import submit
    from tula_cli.services import train as service

    whole, all_types = open_run(screen, job, named, root, overrides)
    part, recommendation = service.part(whole, all_types, node_type)
    run, spec = part.run, part.spec
    if part.type:
        screen.note(f"node type {part.type}")
    plan = service.plan(run, spec, nodes=nodes, batch=batch, recommendation=recommendation, inspect=inspection.inspect)
    warn_all(screen, plan.code.warnings)
    links = submit.links(plan.task)
    if dry_run:
        scripts = [cluster_launcher.launcher_for(spec).script(run, plan.task)]
        return screen.answer(
            {"plan": plan, "scripts": scripts}, show_train.train_plan(plan, links=links, scripts=scripts)
        )
    if plan.finished:
        screen.note("this training run is finished already")
    else:
        launcher = cluster_launcher.launcher_for(spec)
        under_way = cluster_launcher.under_way(run, launcher, [plan.task.job])
        if not under_way:
            screen.aside(show_train.train_plan(plan, links=links))
            require_unedited(screen, whole, all_types, job or named, overrides)
            allow(screen, "start?", yes=yes, capped=spec.search.max_node_hours is not None)
        adopt(whole, all_types, [part], job, overrides)
        started = service.start(run, plan, launcher)
        if not waits(wait, spec):
            tell_new(screen, run, launcher, [started], under_way, spec)
            return detached(screen, run, [started], under_way, {"plan": plan})
        now = wait_for(screen, run, launcher, [started], timeout=timeout, cancel_on_interrupt=cancel_on_interrupt)
        _require_found(now, plan)
    summary = service.report(run, plan.task.signature)
    return screen.answer(summary, show_train.summary(summary))


def _require_found(now: "RunStatus", plan: "TrainPlan") -> None:
    """Refuse to call a lost job pending.

    Raises:
        JobFailed: the job is gone and has not said why.
    """
    for job in now.jobs:
        if job.id == plan.task.job and job.state == "lost":
            if shutil.disk_usage(now.path).free < DISK_IS_FULL:
                raise TulaError(
                    f"{job.id} ended because the disk that holds {now.path} is full",
                    "free some space and run the same command again; it goes on where the newest checkpoint stands",
                )
            raise JobFailed(
                f"{job.id} is gone: {job.reason}", "the same command goes on where the newest checkpoint stands"
            )
