"""The command line: read arguments, call one service, show the result. The only place that exits.

Services are imported inside the commands, so that `tula --help` waits for none of them.
"""

import functools
import inspect
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import typer

from tula_cli import __version__, show
from tula_cli.errors import (
    BadMeasurements,
    Infeasible,
    JobFailed,
    OutOfMemoryAtMinimum,
    OverBudget,
    Pending,
    SpecError,
    TulaError,
)
from tula_cli.show import Screen

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tula_cli.compare import ComparePlan, CompareReport
    from tula_cli.launch import Launcher
    from tula_cli.profile import ProfilePlan, ProfileReport
    from tula_cli.records import Comparison, Inspection, Recommendation
    from tula_cli.rundir import Part, RunDir
    from tula_cli.spec import JobSpec
    from tula_cli.status import RunStatus
    from tula_cli.train import TrainPlan

DISK_IS_FULL = 2**16  # bytes free; below, the small files of a run cannot be written
app = typer.Typer(
    name="tula",
    help="How many nodes, what batch size, how long, how much: measure a training job, then run it there.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

RUNS = Path("tula-runs")
T = TypeVar("T")
USAGE_ERROR = cast(type[Exception], typer.BadParameter.__mro__[2])
"""The base of click's errors about arguments; typer brings its own copy of click and does not name it."""


class Interrupted(TulaError):
    """Ctrl-C. Jobs stay alive unless the user asked otherwise."""

    exit_code = 130
    code = "interrupted"


# --- what commands have in common

Spec = Annotated[Path, typer.Argument(metavar="JOB.YAML", help="The job spec; tula init writes one.")]
MaybeSpec = Annotated[
    Path | None, typer.Argument(metavar="[JOB.YAML]", help="The job spec; without it the run found as by --run.")
]
MaybeRun = Annotated[
    Path | None, typer.Option("--run", metavar="DIR", help="The run; else $TULA_RUN, else the newest one.")
]
Root = Annotated[Path, typer.Option("--run-dir", metavar="ROOT", help="Where runs are kept.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a key of the spec; may be repeated.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be submitted, and touch nothing.")]
Wait = Annotated[
    bool | None, typer.Option("--wait/--no-wait", help="Wait for the jobs (default: yes on this machine, no on SLURM).")
]
Timeout = Annotated[
    float | None, typer.Option(min=0, metavar="SECONDS", help="Wait no longer; exit code 75 when jobs still run.")
]
NodeType = Annotated[
    str | None, typer.Option("--type", metavar="NAME", help="Only this type of node, of those in node_types.")
]
CancelOnInterrupt = Annotated[bool, typer.Option("--cancel-on-interrupt", help="Ctrl-C ends the jobs as well.")]

COMMON: dict[str, Any] = {
    "as_json": Annotated[bool, typer.Option("--json", help="One JSON object on stdout, also on failure.")],
    "quiet": Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and errors beside the answer.")],
    "verbose": Annotated[bool, typer.Option("--verbose", "-v", help="Tracebacks of errors.")],
    "no_color": Annotated[bool, typer.Option("--no-color", help="No colour (as NO_COLOR=1).")],
}


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a command: its first parameter is the screen, which the flags that all commands share set up."""

    @functools.wraps(function)
    def wrapper(ctx: typer.Context, **arguments: Any) -> None:
        shared = {name: arguments.pop(name) for name in COMMON}
        screen = ctx.obj if isinstance(ctx.obj, Screen) else Screen()
        screen.command = function.__name__.rstrip("_")
        screen.as_json, screen.quiet, screen.verbose = shared["as_json"], shared["quiet"], shared["verbose"]
        screen.color = False if shared["no_color"] else None
        try:
            function(screen, **arguments)
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None
        screen.finish()

    parameter, keyword = inspect.Parameter, inspect.Parameter.KEYWORD_ONLY
    own = [p.replace(kind=keyword) for p in list(inspect.signature(function).parameters.values())[1:]]
    common = [parameter(name, keyword, default=False, annotation=kind) for name, kind in COMMON.items()]
    context = parameter("ctx", keyword, annotation=typer.Context)
    wrapper.__signature__ = inspect.Signature([context, *own, *common])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in [context, *own, *common]}
    app.command(name=function.__name__.rstrip("_"))(wrapper)
    return function


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tula {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _top(
    ctx: typer.Context,
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help(), err=True)
        raise SpecError("no command given")


def _find_run(screen: Screen, named: Path | None, root: Path) -> "RunDir":
    """Return the run the user means, and say which where it was not named on the command line."""
    from tula_cli.rundir import RunDir

    root = root.absolute()
    if named is not None:
        # A run's name is enough where it lies under the root.
        inside = not named.exists() and (root / named).is_dir()
        run = RunDir.open(root / named if inside else named.absolute())
    elif os.environ.get("TULA_RUN"):
        run = RunDir.open(Path(os.environ["TULA_RUN"]).absolute())
        screen.note(f"run {show.near(run.path)} (from TULA_RUN)")
    else:
        run = RunDir.newest(root)
        screen.note(f"run {show.near(run.path)} (the newest)")
    screen.run_id = run.id
    return run


def _load(path: Path, overrides: Sequence[str] | None) -> "JobSpec":
    from tula_cli.spec import load_spec

    return load_spec(path, overrides=overrides or ())


def _spec_of(run: "RunDir", overrides: Sequence[str] | None) -> "JobSpec":
    """Return a run's spec with overrides that leave its measurements valid.

    Raises:
        SpecError: an override changes what was measured.
    """
    from tula_cli.spec import load_spec, signature

    known = run.spec()
    if not overrides:
        return known
    changed = load_spec(run.path / "spec.yaml", overrides=overrides, environ={}, site_files=())
    before, after = ({part.run.path for part in run.parts(spec)} for spec in (known, changed))
    if signature(changed) != signature(known) or (known.node_types and not before <= after):
        raise SpecError(
            f"--set {' --set '.join(overrides)}: {run.id} was measured otherwise",
            "make it a run of its own: tula profile job.yaml with the same --set",
        )
    return changed


def _open(
    screen: Screen, job: Path | None, named: Path | None, root: Path, overrides: Sequence[str] | None
) -> tuple["RunDir", "JobSpec"]:
    """Return run and spec: those of a job.yaml (whose run may not be there yet), else those of a run."""
    from tula_cli.code import behind, fingerprint, others
    from tula_cli.jobfile import edited
    from tula_cli.rundir import RunDir

    if job is None:
        run = _find_run(screen, named, root)
        spec = _spec_of(run, overrides)
        if (found := edited(run, spec, overrides or ())) is not None:
            screen.warn(show.edited(found, screen.command))
        return run, spec
    if named is not None:
        raise SpecError(f"both {job} and --run {named} given", "name one of them")
    spec = _load(job, overrides)
    code = fingerprint(spec, Path.cwd())
    run = RunDir.of(root.absolute(), spec, code=code)
    if code and not run.exists and (before := others(run, spec)):
        screen.note(f"{behind(spec)} has changed since run {before[0].id}: a new run directory, {run.id}")
    screen.run_id = run.id
    return run, spec


def _by_type(
    screen: Screen, found: Mapping[str, T], parts: Callable[[T], Iterator["RenderableType"]], **whole: Any
) -> None:
    """Give the answer of a job without node types, or those of all its types, and what holds for the `whole` job."""
    if list(found) == [""]:
        return screen.answer(found[""], parts(found[""]))
    return screen.answer({"types": dict(found), **whole}, _headed(found, lambda _, one: parts(one)))


def _headed(
    found: Mapping[str, T], parts: Callable[[str, T], Iterator["RenderableType"]]
) -> Iterator["RenderableType"]:
    for index, (name, one) in enumerate(found.items()):
        yield from show.heading(name, first=index == 0)
        yield from parts(name, one)


def _adopt(
    run: "RunDir", spec: "JobSpec", parts: Sequence["Part"], job: Path | None, overrides: Sequence[str] | None
) -> None:
    """Make a run the newest, with this spec (of `job`, else its own, with `overrides`), and so its parts."""
    from tula_cli.jobfile import origin

    for part in parts:
        if part.type:
            part.run.adopt(part.spec)
    run.adopt(spec, origin(run, job, overrides or ()))


def _require_unedited(
    screen: Screen, run: "RunDir", spec: "JobSpec", named: Path | None, overrides: Sequence[str] | None
) -> None:
    """Refuse to start a training from settings that their job.yaml no longer has, where neither it nor --run is `named`.

    Raises:
        SpecError: the file has other values that a training depends on, or cannot be used.
    """
    from tula_cli.jobfile import edited

    if named is None and (found := edited(run, spec, overrides or ())) is not None and found.trains:
        name, run_path = show.near(Path(found.file.path)), shlex.quote(show.near(run.path))
        what = "cannot be used" if found.problem else f"says otherwise ({', '.join(found.changes)})"
        raise SpecError(
            f"{name} {what}, and nothing tells which settings to train with; nothing was started",
            f"the file's: {show.with_file(found, screen.command)}; those of the run: tula {screen.command} --run {run_path}",
        )


def _started(run: "RunDir", spec: "JobSpec", node_type: str | None = None) -> Sequence["Part"]:
    """Return the parts of a run (the one named) that there is something of."""
    parts = run.parts(spec, node_type)
    return [part for part in parts if not part.type or part.run.exists]


def _allow(screen: Screen, question: str, *, yes: bool, capped: bool) -> None:
    """Go on if the user says yes, said so before, or has set a cap where there is nobody to ask.

    Raises:
        OverBudget: not confirmed.
    """
    if yes or (capped and not sys.stdin.isatty()):
        return
    if not sys.stdin.isatty():
        raise OverBudget("not confirmed: there is no terminal to ask on", "add -y, or set search.max_node_hours")
    if not screen.confirm(question):
        raise OverBudget("not confirmed; nothing was submitted")


def _wait(
    screen: Screen,
    run: "RunDir",
    launcher: "Launcher",
    jobs: Sequence[str],
    *,
    timeout: float | None,
    cancel_on_interrupt: bool,
) -> "RunStatus":
    """Show the jobs until they have ended; return how.

    Raises:
        Pending: the time to wait is over, they are not.
        Interrupted: Ctrl-C.
    """
    from tula_cli import status as service

    now = None
    try:
        with screen.live() as live:
            for now in service.watch(run, launcher, jobs, timeout=timeout):
                live.update(now)
    except KeyboardInterrupt:
        if cancel_on_interrupt:
            ended = service.cancel(run, launcher)
            raise Interrupted(f"interrupted; cancelled {', '.join(ended) or 'nothing'}") from None
        hint = f"the same command attaches to them again; tula cancel {show.near(run.path)} ends them"
        raise Interrupted("interrupted; the jobs go on", hint) from None
    assert now is not None
    left = [job for job in now.jobs if job.id in jobs and job.state in service.ACTIVE]
    if left:
        words = ", ".join(f"{job.id} ({job.state})" for job in left)
        raise Pending(f"not over after {timeout:g} s: {words}", "the same command attaches to them again")
    for job in now.jobs:
        if job.id in jobs and job.state in ("lost", "failed", "diverged", "cancelled"):
            screen.warn(f"{job.id} {job.state}: {show.first_line(job.reason)}")
    return now


def _waits(wait: bool | None, spec: "JobSpec") -> bool:
    return spec.cluster.kind == "local" if wait is None else wait


# --- the commands


@command
def init(
    screen: Screen,
    kind: Annotated[Literal["local", "slurm"], typer.Argument(help="Where the job will run.")] = "local",
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write.")] = Path("job.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a commented job.yaml that runs as it is."""
    from tula_cli import check as service
    from tula_cli import site
    from tula_cli.rundir import write_atomic

    if output.exists() and not force:
        raise SpecError(f"{output} is there already", "choose another name with -o, or --force to replace it")
    offered = site.ask() if kind == "slurm" else None
    write_atomic(output, service.init(kind, offered))
    if kind == "slurm":
        screen.note(show.offered(offered))
    screen.answer({"path": output, "kind": kind, "site": offered}, [f"wrote {output}; next: tula check {output}"])


@command
def check(
    screen: Screen,
    job: Spec,
    overrides: Overrides = None,
    show_origin: Annotated[bool, typer.Option("--show-origin", help="Show where each value comes from.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Do not build the model and the dataset.")] = False,
    on_cluster: Annotated[
        bool, typer.Option("--on-cluster", help="Look at the nodes instead, in a job of a minute or so.")
    ] = False,
    nodes: Annotated[int | None, typer.Option(min=1, help="With --on-cluster: how many nodes (default: 2).")] = None,
    root: Root = RUNS,
    node_type: NodeType = None,
    timeout: Timeout = None,
) -> None:
    """Check a job spec, and show what it would search and cost; or check the nodes of the cluster.

    With --on-cluster the same command again attaches to a job that is under way.
    """
    from tula_cli import check as service

    if on_cluster:
        _refuse(show_origin, "--show-origin", "means nothing to --on-cluster")
        _refuse(offline, "--offline", "means nothing to --on-cluster")
        return _check_on_cluster(screen, job, root, overrides, nodes=nodes, node_type=node_type, timeout=timeout)
    _refuse(nodes is not None, "--nodes", "is for --on-cluster; search.nodes says what is measured")
    _refuse(timeout is not None, "--timeout", "is for --on-cluster")
    spec = _load(job, overrides)
    origins = _origins(job, spec, overrides) if show_origin else {}
    if not offline:
        screen.note("building the model and the dataset")
    reports = {name: service.check(own, online=not offline) for name, own in spec.by_type(node_type).items()}
    for report in reports.values():
        _warn_all(screen, report.warnings)
    if list(reports) == [""]:
        screen.answer({"report": reports[""], "origins": origins}, show.check(reports[""], origins))
    else:
        _by_type(screen, reports, lambda report: show.check(report, {}), origins=origins)
    problems = {name: report.problems for name, report in reports.items() if report.problems}
    if len(problems) == len(reports):
        kind = OverBudget if any(report.jobs for report in reports.values()) else Infeasible
        told = dict.fromkeys(problem for found in problems.values() for problem in found)
        raise kind(f"{job} cannot run as it is: {'; '.join(told)}")
    _warn_all(screen, [f"node type {name} is left out: {'; '.join(found)}" for name, found in problems.items()])
    _require_within_cap([report.node_hours_at_most for report in reports.values()], spec.search.max_node_hours)
    return None


def _refuse(given: bool, option: str, why: str) -> None:
    if given:
        raise SpecError(f"{option} {why}")


def _check_on_cluster(
    screen: Screen,
    job: Path,
    root: Path,
    overrides: Sequence[str] | None,
    *,
    nodes: int | None,
    node_type: str | None,
    timeout: float | None,
) -> None:
    from tula_cli import check as service
    from tula_cli import launch

    whole, all_types = _open(screen, job, None, root, overrides)
    parts = whole.parts(all_types, node_type)
    _refuse(
        len(parts) > 1,
        "--on-cluster",
        f"looks at one type of node: add --type {' or --type '.join(all_types.node_types)}",
    )
    run, spec = parts[0].run, parts[0].spec
    _adopt(whole, all_types, parts, job, overrides)
    launcher = launch.launcher_for(spec)
    count = service.cluster_nodes(spec, nodes)
    task = service.start_on_cluster(run, spec, launcher, nodes=count)
    told = ""
    try:
        for state in service.watch_cluster(run, launcher, task, timeout=timeout):
            words = show.check_state(task, state)
            if words != told:
                screen.note(words)
            told = words
        found = service.conclude_cluster(run, task)
    except KeyboardInterrupt:
        hint = f"the same command attaches to it again; tula cancel {show.near(run.path)} ends it"
        raise Interrupted(f"interrupted; {task.job} goes on", hint) from None
    _warn_all(screen, found.warnings)
    screen.answer(found, show.cluster_check(found))
    if found.problems:
        raise JobFailed(f"these nodes are not as {job} needs them: {'; '.join(found.problems)}")


def _origins(job: Path, spec: "JobSpec", overrides: Sequence[str] | None) -> dict[str, show.Origin]:
    """Return each value of the spec and where it comes from."""
    from tula_cli.spec import leaves, merge_sources

    sources = merge_sources(job, overrides=overrides or ())[1]
    values = leaves(spec.model_dump(mode="json"))
    return {key: show.Origin(value, _source(key, sources)) for key, value in values}


def _source(key: str, sources: dict[str, str]) -> str:
    """Return what set a key; a list or mapping may have been set as a whole."""
    parts = key.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((sources[prefix] for prefix in prefixes if prefix in sources), "default")


@command
def estimate(
    screen: Screen,
    job: Spec,
    overrides: Overrides = None,
    capacity: Annotated[
        str | None,
        typer.Option(
            "--memory", "--capacity", metavar="SIZE", help="Memory of one GPU, for example 16GiB; else what is known."
        ),
    ] = None,
    root: Root = RUNS,
    node_type: NodeType = None,
) -> None:
    """Estimate the memory of one GPU by batch size; needs no GPU. Where the job has been probed, that corrects it."""
    from tula_cli import estimate as service
    from tula_cli.code import fingerprint
    from tula_cli.rundir import RunDir

    spec = _load(job, overrides)
    size = _size(capacity)
    screen.note("building the model")
    run = RunDir.of(root.absolute(), spec, code=fingerprint(spec, Path.cwd()))
    reports = {
        part.type: service.estimate(part.spec, capacity=size, results=part.run.results())
        for part in run.parts(spec, node_type)
    }
    _by_type(screen, reports, show.estimate)


def _size(text: str | None) -> int | None:
    from tula_cli.spec import parse_size

    if text is None:
        return None
    try:
        size: int = int(parse_size(text))  # type: ignore[call-overload]
    except ValueError as error:
        raise SpecError(f"--memory: {error}") from None
    if size <= 0:
        raise SpecError(f"--memory: {text!r} is no memory at all", "write it like 16GiB")
    return size


@command
def profile(
    screen: Screen,
    job: MaybeSpec = None,
    named: MaybeRun = None,
    root: Root = RUNS,
    overrides: Overrides = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    wait: Wait = None,
    timeout: Timeout = None,
    cancel_on_interrupt: CancelOnInterrupt = False,
) -> None:
    """Measure short training runs over nodes and batch sizes.

    The same command again attaches to what is under way, does what is missing, and stops.
    """
    import time

    from tula_cli import launch
    from tula_cli import profile as service

    if dry_run:
        return _profile_dry_run(screen, job, named, root, overrides)
    run, spec = _open(screen, job, named, root, overrides)
    end = None if timeout is None else time.monotonic() + timeout
    stopped: set[str] = set()  # types whose last round ended without all its results
    again = True  # what failed before; what fails now is left to the next call
    while True:
        planned = _profile_plans(screen, run, spec, again=again)
        missing = [(part, plan) for part, plan in planned if plan.missing and part.type not in stopped]
        if not missing:
            _adopt(run, spec, [part for part, _ in planned], job, overrides)
            screen.note(
                next((plan.certainty for _, plan in planned if plan.certainty), "every probe has a result already")
            )
            break
        at_work = [_AtWork(part, plan, launch.launcher_for(part.spec)) for part, plan in missing]
        if any(work.fresh for work in at_work):
            _confirm_profile(screen, planned, spec, yes=yes)
            yes = True  # for the rounds to come
        _adopt(run, spec, [part for part, _ in planned], job, overrides)
        for work in at_work:
            work.started = service.start(work.part.run, work.plan, work.launcher)
        if not all(_waits(wait, work.part.spec) for work in at_work):
            return _profile_detached(screen, run, at_work, {"plan": _whole({p.type: plan for p, plan in planned})})
        _wait_for_probes(screen, at_work, deadline=end, cancel_on_interrupt=cancel_on_interrupt)
        again = False
        further = {
            part.type
            for part, plan in missing
            if part.spec.search.strategy == "adaptive" and service.measured(part.run, plan)
        }
        stopped |= {part.type for part, _ in missing} - further
        if not further:
            break
    reports = _profile_reports(screen, planned)
    if any(report.failed or report.missing for report in reports.values()):
        screen.status = "partial"
    _by_type(screen, reports, show.profile_report)
    return None


def _confirm_profile(
    screen: Screen, planned: Sequence[tuple["Part", "ProfilePlan"]], spec: "JobSpec", *, yes: bool
) -> None:
    """Show what is to be submitted and what it may cost; raise OverBudget where that is not allowed."""
    cap = spec.search.max_node_hours
    screen.aside(_headed({part.type: plan for part, plan in planned}, lambda _, plan: show.profile_plan(plan)))
    screen.aside(show.all_types([plan for _, plan in planned]))
    _require_within_cap([plan.node_hours_at_most for _, plan in planned], cap)
    _allow(screen, "start?", yes=yes, capped=cap is not None)


class _AtWork:
    """The jobs that measure one part of a run."""

    def __init__(self, part: "Part", plan: "ProfilePlan", launcher: "Launcher") -> None:
        from tula_cli import launch

        self.part, self.plan, self.launcher = part, plan, launcher
        self.under_way = launch.under_way(part.run, launcher, list(plan.jobs))
        self.fresh = len(self.under_way) < len(plan.jobs)  # whether there is something to submit
        self.started: Sequence[str] = ()

    def named(self, jobs: Sequence[str]) -> list[str]:
        """Return jobs as the user tells those of one type from those of another."""
        return [f"{self.part.type}/{job}" if self.part.type else job for job in jobs]


def _profile_plans(
    screen: Screen, run: "RunDir", spec: "JobSpec", *, again: bool = True
) -> list[tuple["Part", "ProfilePlan"]]:
    """Return what is to be measured on each type; one that nothing fits is a warning as long as there is another.

    Raises:
        Infeasible: nothing fits anywhere.
    """
    from tula_cli import profile as service

    found: list[tuple[Part, ProfilePlan]] = []
    errors = []
    parts = run.parts(spec)
    rounds = any(part.spec.search.strategy == "adaptive" for part in parts)
    spent = {part.type: service.spent(part.run) if rounds else 0.0 for part in parts}
    for part in parts:
        elsewhere = sum(spent.values()) - spent[part.type] + sum(plan.node_hours_at_most for _, plan in found)
        try:
            plan = service.plan(part.spec, _inspect(screen, part.spec), part.run, elsewhere=elsewhere, again=again)
            found.append((part, plan))
        except Infeasible as error:
            errors.append((part.type, error))
    if not found:
        raise errors[0][1]
    _warn_all(screen, [f"node type {name} is left out: {error.message}" for name, error in errors])
    for _, plan in found:
        _warn_all(screen, plan.code.warnings)
    return found


def _whole(found: Mapping[str, T]) -> Any:
    """Return what is known of a job without types, or of each type."""
    return found[""] if list(found) == [""] else {"types": dict(found)}


def _profile_detached(screen: Screen, run: "RunDir", at_work: Sequence[_AtWork], data: dict[str, Any]) -> None:
    for work in at_work:
        _tell_new(screen, work.part.run, work.launcher, work.started, work.under_way, work.part.spec)
    started = [job for work in at_work for job in work.named(work.started)]
    under_way = [job for work in at_work for job in work.named(work.under_way)]
    _detached(screen, run, started, under_way, data)


def _wait_for_probes(
    screen: Screen, at_work: Sequence[_AtWork], *, deadline: float | None, cancel_on_interrupt: bool
) -> None:
    """Wait for the jobs of one type after the other, until `deadline` (monotonic): all of them are submitted."""
    import time

    from tula_cli import status as service

    for work in at_work:
        if work.part.type:
            screen.note(f"node type {work.part.type}:")
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            _wait(
                screen,
                work.part.run,
                work.launcher,
                work.started,
                timeout=left,
                cancel_on_interrupt=cancel_on_interrupt,
            )
        except Interrupted:
            for other in at_work if cancel_on_interrupt else ():
                service.cancel(other.part.run, other.launcher)
            raise


def _profile_reports(screen: Screen, planned: Sequence[tuple["Part", "ProfilePlan"]]) -> dict[str, "ProfileReport"]:
    """Return what was measured; a type of which nothing was is a warning as long as there is another.

    Raises:
        TulaError: nothing was measured.
    """
    from tula_cli import profile as service

    found, errors = {}, []
    for part, plan in planned:
        try:
            found[part.type] = service.report(part.run, plan)
        except (BadMeasurements, JobFailed, OutOfMemoryAtMinimum) as error:
            errors.append(error)
            if part.type:
                screen.warn(f"node type {part.type}: {error.message}")
    if not found:
        raise errors[0]
    if errors:
        screen.status = "partial"
    return found


def _inspect(screen: Screen, spec: "JobSpec") -> "Inspection":
    from tula_cli import launch

    screen.note("building the model and the dataset")
    inspection = launch.inspect(spec)
    _warn_all(screen, inspection.warnings)
    return inspection


def _profile_dry_run(
    screen: Screen, job: Path | None, named: Path | None, root: Path, overrides: Sequence[str] | None
) -> None:
    from tula_cli import launch

    run, spec = _open(screen, job, named, root, overrides)
    plans, scripts = {}, {}
    for part, plan in _profile_plans(screen, run, spec):
        launcher = launch.launcher_for(part.spec)
        plans[part.type] = plan
        scripts[part.type] = [launcher.script(part.run, tasks[0]) for tasks in plan.jobs.values()]

    def shown() -> Iterator["RenderableType"]:
        yield from _headed(plans, lambda name, plan: show.profile_plan(plan, scripts=scripts[name]))
        yield from show.all_types(list(plans.values()))

    screen.answer(_whole({name: {"plan": plan, "scripts": scripts[name]} for name, plan in plans.items()}), shown())


def _require_within_cap(node_hours: Sequence[float], cap: float | None) -> None:
    if cap is not None and sum(node_hours) > cap:
        types = f" on all {len(node_hours)} node types" if len(node_hours) > 1 else ""
        raise OverBudget(
            f"the probes{types} may take {show.number(sum(node_hours))} node-hours, search.max_node_hours is {cap:g}",
            "raise it with --set search.max_node_hours=..., or lower search.max_minutes, or search fewer nodes",
        )


def _warn_all(screen: Screen, warnings: Sequence[str]) -> None:
    for text in warnings:
        screen.warn(text)


def _detached(
    screen: Screen, run: "RunDir", jobs: Sequence[str], under_way: Sequence[str], data: dict[str, Any]
) -> None:
    """Answer for jobs that nobody waits for."""
    screen.status = "pending"
    started = [job for job in jobs if job not in under_way]
    told = [f"started {', '.join(started)}"] if started else []
    told += [f"under way already: {', '.join(under_way)}"] if under_way else []
    words = f"{'; '.join(told)}; tula status --run {show.near(run.path)} shows how far they are"
    screen.answer({"jobs": list(jobs), **data}, [words])


def _tell_new(
    screen: Screen,
    run: "RunDir",
    launcher: "Launcher",
    jobs: Sequence[str],
    under_way: Sequence[str],
    spec: "JobSpec",
) -> None:
    """Warn of jobs that will not start, and of those that were submitted with other settings of the cluster."""
    known = [found for found in run.jobs() if found.id in jobs]
    for id_, state in launcher.states(run, known).items():
        if state.hopeless:
            screen.warn(f"{id_}: {state.reason}; tula cancel, correct the cluster section, and start again")
    tasks = {task.job: task for task in run.tasks()}
    for id_ in under_way:
        if id_ in tasks and tasks[id_].spec.cluster != spec.cluster:
            screen.warn(f"{id_} was submitted with another cluster section; tula cancel first, to have this one")


@command
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

    from tula_cli import recommend as service

    run, spec = _measured(screen, job, named, root, overrides)
    assumed = tuple(overrides or ()) if overrides and spec != run.spec() else ()
    limits = {"nodes": nodes, "max-nodes": max_nodes, "max-batch": max_batch, "deadline": deadline, "budget": budget}
    asked = {"curve": None if curve == "time" else curve, **limits, "type": node_type}
    answer = service.recommend(
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
    _warn_all(screen, found.warnings)
    saved = save or _renews(screen, run, found)
    if saved:
        own = run.spec() if assumed else spec
        service.keep(run, own, answer)
        _adopt(run, own, _started(run, own), None if assumed else job, None if assumed else overrides)
    data = {**dict(found), "saved": saved}
    screen.answer(data, show.recommendation(found, width=screen.width, color=screen.colored, pareto=pareto))


def _renews(screen: Screen, run: "RunDir", found: "Recommendation") -> bool:
    """Return whether an answer takes the place of the kept one unasked; say so where it does not."""
    from tula_cli import recommend as service

    known = run.recommendation()
    if not service.renews(found, known):
        screen.note(show.only_shown(known))
        return False
    return True


def _measured(
    screen: Screen, job: Path | None, named: Path | None, root: Path, overrides: Sequence[str] | None
) -> tuple["RunDir", "JobSpec"]:
    """Return run and spec; a job.yaml must have a run already."""
    run, spec = _open(screen, job, named, root, overrides)
    if not run.exists:
        raise BadMeasurements(f"nothing was measured for {job} yet", f"run tula profile {job} first")
    return run, spec


def _pending(run: "RunDir", spec: "JobSpec") -> int:
    """Return how many probes are queued or running."""
    import time

    from tula_cli import launch
    from tula_cli import status as service

    if not run.jobs():
        return 0
    now = service.snapshot(run, launch.launcher_for(spec, submits=False), now=time.time())
    return sum(job.total - job.done for job in now.jobs if job.kind == "probe" and job.state in service.ACTIVE)


@command
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
    from tula_cli import launch
    from tula_cli import train as service

    whole, all_types = _open(screen, job, named, root, overrides)
    part, recommendation = service.part(whole, all_types, node_type)
    run, spec = part.run, part.spec
    if part.type:
        screen.note(f"node type {part.type}")
    plan = service.plan(run, spec, nodes=nodes, batch=batch, recommendation=recommendation, inspect=launch.inspect)
    _warn_all(screen, plan.code.warnings)
    links = launch.links(plan.task)
    if dry_run:
        scripts = [launch.launcher_for(spec).script(run, plan.task)]
        return screen.answer({"plan": plan, "scripts": scripts}, show.train_plan(plan, links=links, scripts=scripts))
    if plan.finished:
        screen.note("this training run is finished already")
    else:
        launcher = launch.launcher_for(spec)
        under_way = launch.under_way(run, launcher, [plan.task.job])
        if not under_way:
            screen.aside(show.train_plan(plan, links=links))
            _require_unedited(screen, whole, all_types, job or named, overrides)
            _allow(screen, "start?", yes=yes, capped=spec.search.max_node_hours is not None)
        _adopt(whole, all_types, [part], job, overrides)
        started = service.start(run, plan, launcher)
        if not _waits(wait, spec):
            _tell_new(screen, run, launcher, [started], under_way, spec)
            return _detached(screen, run, [started], under_way, {"plan": plan})
        now = _wait(screen, run, launcher, [started], timeout=timeout, cancel_on_interrupt=cancel_on_interrupt)
        _require_found(now, plan)
    summary = service.report(run, plan.task.signature)
    return screen.answer(summary, show.summary(summary))


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


@command
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

    from tula_cli import compare as service
    from tula_cli import launch

    _check_page(html)
    whole, all_types, part = _part(screen, job, named, root, overrides, node_type)
    run, spec = part.run, part.spec
    known = run.comparison()
    if only_show:
        if {methods, batch, seeds, nodes, controls} != {None}:
            raise SpecError("--show shows the whole comparison", "leave --methods, --batch and the like out, or --show")
        if known is None:
            raise BadMeasurements(f"nothing was compared in {run.id} yet", "tula compare job.yaml --batch N,M")
        _compared(screen, run, spec, known, html=html)
        return
    grid = service.Grid(
        methods=_words(methods) or (known.methods if known else service.DEFAULT_METHODS),
        batches=_numbers("--batch", batch) or (known.batches if known else service.default_batches(run)),
        seeds=seeds or (known.seeds if known else 3),
        nodes=nodes or (known.nodes if known else service.default_nodes(run, spec)),
        controls=controls if controls is not None else known.controls if known else True,
    )
    plan = service.plan(run, spec, grid, inspect=launch.inspect, now=time.time())
    _warn_all(screen, plan.warnings)
    launcher = launch.launcher_for(spec)
    if dry_run:
        scripts = [launcher.script(run, plan.first.task)] if plan.first is not None else []
        data = {
            "comparison": plan.comparison,
            "missing": plan.missing,
            "hours_left": plan.hours_left,
            "scripts": scripts,
        }
        screen.answer(data, show.compare_plan(plan, scripts=scripts))
        return
    if not plan.missing:
        screen.note("every training of this comparison is finished already")
    else:
        screen.aside(show.compare_plan(plan))
        _require_unedited(screen, whole, all_types, job or named, overrides)
        _allow(screen, "start?", yes=yes, capped=spec.search.max_node_hours is not None)
    _adopt(whole, all_types, [part], job, overrides)
    run.write_comparison(plan.comparison)
    if plan.missing:
        _compare(screen, run, plan, launcher, wait=wait, cancel_on_interrupt=cancel_on_interrupt)
    found = _compared(screen, run, spec, plan.comparison, html=html)
    failed = sum(row.count(*service.ENDED) for row in found.rows)
    if failed and screen.status == "partial":
        raise JobFailed(
            f"{failed} of {show.plural(found.total, 'training')} failed",
            f"tula logs {show.near(run.path)} shows what they said; the same command tries them again",
        )


def _part(
    screen: Screen,
    job: Path | None,
    named: Path | None,
    root: Path,
    overrides: Sequence[str] | None,
    node_type: str | None,
) -> tuple["RunDir", "JobSpec", "Part"]:
    """Return the whole run, its job, and the part of it for one type of node."""
    from tula_cli import train as service

    whole, spec = _open(screen, job, named, root, overrides)
    part, _ = service.part(whole, spec, node_type)
    if part.type:
        screen.note(f"node type {part.type}")
    return whole, spec, part


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
    from tula_cli import compare as service
    from tula_cli import launch
    from tula_cli import status as states

    local = plan.spec.cluster.kind == "local"
    if local and wait is False:
        raise SpecError(
            "--no-wait: on this machine one training follows the other, and this command starts the next",
            "leave it out; what is done is kept whenever it ends",
        )
    try:
        if local:
            steps = service.one_by_one(run, plan, launcher, inspect=launch.inspect)
        else:
            screen.note(f"submitting {show.plural(len(plan.missing), 'training')}")
            jobs = service.submit_all(run, plan, launcher, inspect=launch.inspect)
            _tell_new(screen, run, launcher, jobs, [], plan.spec)
            screen.note(f"{show.plural(len(jobs), 'training')} under way")
            if not _waits(wait, plan.spec):
                return
            steps = service.wait_for_all(run, plan, launcher, jobs)
        with screen.live() as live:
            for now in steps:
                live.compared(now)
    except KeyboardInterrupt:
        if cancel_on_interrupt:
            ended = states.cancel(run, launcher)
            raise Interrupted(f"interrupted; cancelled {', '.join(ended) or 'nothing'}") from None
        hint = f"the same command attaches to it and goes on; tula cancel {show.near(run.path)} ends it"
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

    from tula_cli import compare as service
    from tula_cli import launch, page
    from tula_cli import status as states
    from tula_cli.rundir import write_atomic

    now = states.snapshot(run, launch.launcher_for(spec, submits=False), now=time.time())
    found = service.report(run, comparison, spec, jobs=now.jobs)
    screen.status = "done" if found.complete else "pending" if now.active() else "partial"
    _warn_all(screen, found.warnings)
    screen.answer(found, show.compared(found, width=screen.width, color=screen.colored))
    if html is not None:
        write_atomic(html, page.comparison(found, service.curves(run, comparison), title=f"{spec.name}: {run.id}"))
        screen.note(f"wrote {show.near(html)}")
    return found


@command
def status(screen: Screen, named: MaybeRun = None, root: Root = RUNS) -> None:
    """Show a run's jobs, training and recommendation."""
    import time

    from tula_cli import launch
    from tula_cli import status as service

    run = _find_run(screen, named, root)
    spec = run.spec()
    found = {
        part.type: service.snapshot(part.run, launch.launcher_for(part.spec, submits=False), now=time.time())
        for part in _started(run, spec)
    }
    screen.status = "pending" if any(now.active() for now in found.values()) else "done"
    for now in found.values():
        _warn_all(screen, now.warnings)
    if not spec.node_types:
        return _by_type(screen, found, show.status)
    chosen = run.recommendation()
    return screen.answer({"types": found, "recommendation": chosen}, show.status_by_type(run.path, found, chosen))


@command
def list_(screen: Screen, root: Root = RUNS) -> None:
    """List the runs, last changed first."""
    from tula_cli import status as service

    found = service.list_runs(root.absolute())
    screen.answer(found, show.runs(found) if found else [f"no run under {root}"])


@command
def logs(
    screen: Screen,
    named: MaybeRun = None,
    root: Root = RUNS,
    job: Annotated[str | None, typer.Option(help="Only this job's; tula status names them.")] = None,
    last: Annotated[int | None, typer.Option("--lines", "-n", min=0, help="Only the last so many lines.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on while jobs run.")] = False,
    node_type: NodeType = None,
) -> None:
    """Show what the newest job (or --job) wrote."""
    import time

    from tula_cli import launch
    from tula_cli import status as service

    whole = _find_run(screen, named, root)
    run = service.newest_part(_started(whole, whole.spec(), node_type), job) or whole

    def active() -> bool:
        return service.snapshot(run, launch.launcher_for(run.spec(), submits=False), now=time.time()).active(
            job and [job]
        )

    pause = service.POLL[run.spec().cluster.kind][0] if follow else 0.0
    file = None
    for line in service.logs(run, job=job, last=last, follow=follow, active=service.seldom(active, pause=pause)):
        if line.file != file:
            file = line.file
            screen.note(f"==> {show.near(file)}")
        screen.line(line.text, line)
    if file is None:
        screen.note("no log yet")


@command
def cancel(
    screen: Screen,
    target: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="The run; else as by --run.")] = None,
    named: MaybeRun = None,
    root: Root = RUNS,
) -> None:
    """End a run's jobs; what was measured or saved stays."""
    from tula_cli import launch
    from tula_cli import status as service

    run = _find_run(screen, target or named, root)
    ended = [
        f"{part.type}/{job}" if part.type else job
        for part in _started(run, run.spec())
        for job in service.cancel(part.run, launch.launcher_for(part.spec, submits=False))
    ]
    screen.answer({"cancelled": ended}, [f"cancelled {', '.join(ended)}" if ended else "nothing was queued or running"])


# --- the error boundary


def run(arguments: Sequence[str], *, screen: Screen | None = None) -> int:
    """Run one command; return its exit code. What is not the user's to mend is raised."""
    screen = screen or Screen()
    screen.expect(arguments)
    try:
        code = typer.main.get_command(app)(args=list(arguments), prog_name="tula", standalone_mode=False, obj=screen)
    except TulaError as error:
        screen.fail(error)
        return error.exit_code
    except BrokenPipeError:
        return _reader_is_gone()
    except (KeyboardInterrupt, typer.Abort):
        screen.fail(Interrupted("interrupted"))
        return Interrupted.exit_code
    except typer.Exit as error:
        return error.exit_code
    except USAGE_ERROR as error:
        screen.fail(_usage(error))
        return SpecError.exit_code
    return code if isinstance(code, int) else 0


def _usage(error: Any) -> SpecError:
    """Return click's complaint about the arguments as an error of ours."""
    path = error.ctx.command_path if getattr(error, "ctx", None) is not None else "tula"
    return SpecError(error.format_message(), f"{path} --help shows what it takes")


def _reader_is_gone() -> int:
    """End quietly when a pager or `head` has closed the pipe; python would complain when it flushes stdout."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _defect(screen: Screen, kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Show a defect of ours with its traceback; the envelope says so too."""
    sys.__excepthook__(kind, error, trace)
    screen.fail(
        TulaError(f"{kind.__name__}: {error}", "this is a defect of tula; please report it with the lines above")
    )


def main() -> None:
    """Run the command line and exit."""
    screen = Screen()
    sys.excepthook = functools.partial(_defect, screen)
    sys.exit(run(sys.argv[1:], screen=screen))
