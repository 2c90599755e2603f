"""Shared parts of the commands: their registration, and arguments used by several commands."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from tula_cli.errors import Interruption, SpecError, TulaError
from tula_cli.show.screen import Screen

RUNS = Path("tula-runs")
USAGE_ERROR = cast(type[Exception], typer.BadParameter.__mro__[2])
"""Base class of click's usage errors; typer has its own copy of click and does not export the class."""


class Interrupted(TulaError):
    """Ctrl-C. Jobs stay alive unless the user asked otherwise."""

    exit_code = 130
    code = "interrupted"


# --- what commands have in common

Spec = Annotated[Path, typer.Argument(metavar="JOB.YAML", help="The job spec; tula init writes one.")]
MaybeSpec = Annotated[
    Path | None,
    typer.Argument(
        metavar="[JOB.YAML]", help="The job spec, or a run by its name or folder; else the run as by --run."
    ),
]
RunArgument = Annotated[
    Path | None,
    typer.Argument(metavar="[RUN]", readable=False, help="The run: its name, folder or job file; else as by --run."),
]
# Without `readable`, typer's own words would come before whose an unreadable run is.
MaybeRun = Annotated[
    Path | None,
    typer.Option("--run", metavar="DIR", readable=False, help="The run; else $TULA_RUN, else the newest one."),
]
Root = Annotated[Path, typer.Option("--run-dir", metavar="ROOT", readable=False, help="Where runs are kept.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a key of the spec; may be repeated.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be submitted, and touch nothing.")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Build the model and the dataset anew, although nothing has changed.")
]
Wait = Annotated[
    bool | None, typer.Option("--wait/--no-wait", help="Wait for the jobs (default: yes on this machine, no on SLURM).")
]
Timeout = Annotated[
    float | None, typer.Option(min=0, metavar="SECONDS", help="Wait no longer; exit code 75 when jobs still run.")
]
NodeType = Annotated[
    str | None,
    typer.Option(
        "--type", metavar="NAME", help="Only this type of node, of those in node_types; gpus-4 of search.gpus_per_node."
    ),
]
Objective = Annotated[
    Literal["time", "cost", "knee", "accuracy-time", "energy"],
    typer.Option(help="What to choose by; accuracy-time: the least time to the same progress; energy: the least kWh."),
]
Curve = Annotated[Literal["time", "cost"], typer.Option(help="The curve whose knee is looked for.")]
OnlyNodes = Annotated[int | None, typer.Option(min=1, help="Consider this number of nodes only.")]
MaxNodes = Annotated[int | None, typer.Option(min=1, help="At most so many nodes.")]
MaxBatch = Annotated[int | None, typer.Option(min=1, help="A global batch of at most this.")]
Deadline = Annotated[float | None, typer.Option(min=0, metavar="HOURS", help="Train within.")]
Budget = Annotated[float | None, typer.Option(min=0, metavar="PRICE", help="Spend at most.")]
Pareto = Annotated[
    bool,
    typer.Option("--pareto", help="Show only what nothing else beats in time, cost and energy, where that is known."),
]
Every = Annotated[
    bool,
    typer.Option("--all", help="Show every configuration, however many there are, and write all into results.csv."),
]
Validate = Annotated[
    bool, typer.Option("--validate", help="Tell too how well each strategy would have foreseen the other probes.")
]
Explain = Annotated[
    bool, typer.Option("--explain", help="Show how the fit was made too, with the summaries of its regressions.")
]
Save = Annotated[bool, typer.Option("--save", help="Make this answer the one that tula train takes.")]
FromTraining = Annotated[
    bool, typer.Option("--from-training", help="Go by what the steps of the training under way take now.")
]
TrainNodes = Annotated[int | None, typer.Option(min=1, help="Nodes; else the recommended ones.")]
TrainBatch = Annotated[int | None, typer.Option(min=1, help="Global batch; else the recommended one.")]
Rehearse = Annotated[
    bool,
    typer.Option(
        "--rehearse/--no-rehearse",
        help="Try a script's resume first, once, where training takes more than an hour (default: yes).",
    ),
]
WithinBalance = Annotated[
    bool,
    typer.Option(
        "--within-balance",
        help="Refuse where the account's balance (GrpTRESMins) does not carry it; needs pricing.kind billing.",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(metavar="best|last|FILE", help="Which weights (default: best where there is one, else last)."),
]
Training = Annotated[
    str | None, typer.Option(metavar="SIGNATURE", help="Of which training; else of the one that was started last.")
]
EvaluateNodes = Annotated[int, typer.Option(min=1, help="How many nodes share the samples.")]
EvaluateAnew = Annotated[bool, typer.Option("--fresh", help="Evaluate although it is known what they come to.")]
Methods = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        help="Values of train.method, or lbt-x2, lbt-x4, sqrt, sqrt-beta2, robust, with settings behind colons"
        " (ags:delta=0.1,lbt:optimizer.lr=0.2); without it rows that fit the job's optimizer, with"
        " its own method and one control.",
    ),
]
Batches = Annotated[str | None, typer.Option(metavar="N,M", help="Global batches; else the recommended one.")]
Seeds = Annotated[
    int | None,
    typer.Option(min=1, help="How many seeds, from train.seed on (default: 3; 1 where a script takes none)."),
]
CompareNodes = Annotated[
    int | None, typer.Option(min=1, help="Nodes; else the recommended ones, else the fewest of search.nodes.")
]
Controls = Annotated[
    bool | None,
    typer.Option("--controls/--no-controls", help="lbt at twice and four times the learning rate (default: yes)."),
]
OnlyShow = Annotated[bool, typer.Option("--show", help="Show what there is; start nothing.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with the table and its plots.")]
CancelOnInterrupt = Annotated[bool, typer.Option("--cancel-on-interrupt", help="Ctrl-C ends the jobs as well.")]

COMMON: dict[str, Any] = {
    "as_json": Annotated[bool, typer.Option("--json", help="One JSON object on stdout, also on failure.")],
    "quiet": Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and errors beside the answer.")],
    "verbose": Annotated[bool, typer.Option("--verbose", "-v", help="Tracebacks of errors.")],
    "no_color": Annotated[bool, typer.Option("--no-color", help="No colour (as NO_COLOR=1).")],
}


def check_page(html: Path | None, example: str) -> None:
    """Reject a page that cannot be written, before any work is done for it.

    A page replaces the file at its path, so the path must not be a device (such as /dev/stdout).

    Args:
        html: path of the page; None for no page.
        example: example of a file name.

    Raises:
        SpecError: the path is a folder or not a regular file, or its folder does not exist.
    """
    if html is None:
        return
    if html.is_dir():
        raise SpecError(f"--html {html}: is a folder", f"name a file in it: --html {html / example}")
    if not html.absolute().parent.is_dir():
        raise SpecError(f"--html {html}: there is no folder {html.absolute().parent}", "make it, or name another")
    if html == Path("-") or html.absolute().parent == Path("/dev") or (html.exists() and not html.is_file()):
        raise SpecError(
            f"--html {html}: a page is written to a file, and to nothing else", f"name one: --html {example}"
        )


def register(app: typer.Typer, function: Callable[..., None], *, example: str) -> None:
    """Register a function as a command of `app`.

    The function's first parameter is the screen, which is set up by the options common to all commands.

    Args:
        app: application of the command.
        function: implementation of the command; its docstring is the help text.
        example: example of a command line, shown at the end of the help text.
    """

    @functools.wraps(function)
    def wrapper(ctx: typer.Context, **arguments: Any) -> None:
        shared = {name: arguments.pop(name) for name in COMMON}
        screen = ctx.obj if isinstance(ctx.obj, Screen) else Screen()
        screen.command = function.__name__.rstrip("_")
        screen.as_json, screen.quiet, screen.verbose = shared["as_json"], shared["quiet"], shared["verbose"]
        screen.color = False if shared["no_color"] else None
        try:
            function(screen, **arguments)
        except Interruption as interruption:
            raise Interrupted(interruption.message, interruption.hint) from None
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None
        screen.finish()

    parameter, keyword = inspect.Parameter, inspect.Parameter.KEYWORD_ONLY
    parameters = [p.replace(kind=keyword) for p in list(inspect.signature(function).parameters.values())[1:]]
    common = [parameter(name, keyword, default=False, annotation=kind) for name, kind in COMMON.items()]
    context = parameter("ctx", keyword, annotation=typer.Context)
    wrapper.__signature__ = inspect.Signature([context, *parameters, *common])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in [context, *parameters, *common]}
    app.command(name=function.__name__.rstrip("_"), epilog=f"Example: {example}")(wrapper)
