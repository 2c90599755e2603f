"""The command-line application: the error boundary around the commands, and the only place that exits."""

import functools
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TextIO, get_args

import typer

from tula_cli.cli import check, clean, compare, diff, evaluate, profile, recommend, status, train
from tula_cli.cli.options import COMMON, USAGE_ERROR, ExtraCommand, Interrupted, register, register_extra
from tula_cli.errors import DiskFull, SpecError, TulaError
from tula_cli.run.disk_space import FULL_DISK_ERRNOS
from tula_cli.show.screen import Screen, replace_missing_letters
from tula_cli.spec.old_keys import OldKeyWarning
from tula_cli.version import __version__

app = typer.Typer(
    name="tula",
    help="How many nodes, what batch size, how long, how much: measure a training job, then run it there.",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


WORKFLOW: Mapping[Callable[..., None] | ExtraCommand, str] = {
    check.init: "tula init slurm",
    check.check: "tula check job.yaml --on-cluster",
    profile.profile: "tula profile job.yaml --set search.nodes=[1,2,4]",
    recommend.recommend: "tula recommend --objective cost --deadline 24",
    train.train: "tula train --nodes 4 --batch 1024",
    evaluate.evaluate: "tula evaluate --weights best",
    compare.compare: "tula compare job.yaml --methods lbt,lrs,ortho --batch 1024",
    ExtraCommand(
        "report", "report", "Tell all that a run has found: what was asked and answered, measured, predicted, trained."
    ): "tula report --html report.html",
    status.status: "tula status --run digits-1f0c5b7e",
    status.list_: "tula list --run-dir /scratch/tula-runs",
    status.logs: "tula logs --follow",
    status.cancel: "tula cancel digits-1f0c5b7e",
    diff.diff: "tula diff digits-1f0c5b7e digits-9a4e02cd",
    ExtraCommand(
        "export",
        "trackers",
        "Send a run's parameters, probes, recommendation and trainings to MLflow, Weights & Biases or TensorBoard.",
    ): "tula export --to mlflow --follow",
    clean.clean: "tula clean --older 30d --dry-run",
}
"""The commands in order of use, as in `tula --help`, with an example of each."""
REPLACED: Mapping[str, str] = {
    "estimate": "type tula check job.yaml --memory 32GiB",
    "schema": "tula init writes .tula/job.schema.json and .tula/site.schema.json beside the job file",
}
"""Commands that were removed, and what to use instead."""
REMOVED_OPTIONS: Mapping[tuple[str, str], str] = {
    **dict.fromkeys(
        (("tula report", "--for"), ("tula report", "--runs")),
        "tula report --markdown, --latex and --csv write the scaling tables",
    ),
    ("tula recommend", "--with-run"): "set search.gpus_per_node in the job, and run tula profile",
    ("tula recommend", "--what-if"): "run tula profile on that hardware, and tula recommend on its run",
    ("tula list", "--accuracy"): "tula status and tula report show the trainings of a run, predicted against actual",
    (
        "tula profile",
        "--progress",
    ): "a training with train.diagnostics=[gradient_noise] measures it, and train.early_stopping.epochs ends it early",
}
"""Options that were removed, by command, and what to use instead."""
REMOVED_VALUES: Mapping[tuple[str, str, str], str] = {
    ("tula recommend", "--objective", "result-time"): (
        "choose by time: the answer shows the scheduler's own estimate of the start"
    ),
}
"""Values of options that were removed, by command and option, and what to use instead."""
for _command, _example in WORKFLOW.items():
    if isinstance(_command, ExtraCommand):
        register_extra(app, _command, example=_example)
    else:
        register(app, _command, example=_example)


_SHARED = {
    word for kind in COMMON.values() for option in get_args(kind)[1:] for word in (option.default, *option.param_decls)
}
"""Options that every command takes but `tula` itself does not; typer keeps the first word as the default."""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tula {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _show_help(
    ctx: typer.Context,
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help(), err=True)
        raise SpecError("no command given")


# --- the error boundary


READER_IS_GONE = 128 + signal.SIGPIPE
"""Exit code if the reader of the output is gone, as a shell reports it for other programs."""


def run(arguments: Sequence[str], *, screen: Screen | None = None) -> int:
    """Run one command and return its exit code; errors that the user cannot fix are raised."""
    screen = screen or Screen()
    screen.expect(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("always", OldKeyWarning)
        warnings.showwarning = functools.partial(_show_warning, screen, warnings.showwarning)
        return _run(arguments, screen)


def _show_warning(
    screen: Screen, default: Callable[..., None], message: Warning | str, *where: Any, **more: Any
) -> None:
    """Show renamed keys as warnings of the command, and other Python warnings unchanged."""
    if isinstance(message, OldKeyWarning):
        screen.warn(str(message))
    else:
        default(message, *where, **more)


def _run(arguments: Sequence[str], screen: Screen) -> int:
    if hint := REPLACED.get(screen.command):
        return _report_error(screen, SpecError(f"there is no command {screen.command} any more", hint))
    try:
        code = typer.main.get_command(app)(args=list(arguments), prog_name="tula", standalone_mode=False, obj=screen)
    except TulaError as error:
        return _report_error(screen, error)
    except BrokenPipeError:
        return _exit_on_broken_pipe()
    except SystemExit as end:  # typer's and rich's, of code 1, for the same
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        return _exit_on_broken_pipe()
    except (KeyboardInterrupt, typer.Abort):
        return _report_error(screen, Interrupted("interrupted"))
    except typer.Exit as error:
        return error.exit_code
    except USAGE_ERROR as error:
        return _report_error(screen, _convert_usage_error(error, arguments))
    except OSError as error:
        known = _describe_machine_error(error)
        if known is None:
            raise
        _discard_unwritable()
        return _report_error(screen, known)
    return code if isinstance(code, int) else 0


def _report_error(screen: Screen, error: TulaError) -> int:
    """Show an error and return its exit code, even if the output cannot be written."""
    try:
        screen.fail(error)
    except (OSError, SystemExit):  # rich exits by itself where the reader is gone
        _discard_unwritable()
    return error.exit_code


def _describe_machine_error(error: OSError) -> TulaError | None:
    """Return the error for a full disk or a removed working directory; None for other errors."""
    if error.errno in FULL_DISK_ERRNOS:
        hint = "free some space there, or send the answer elsewhere, and run the same command again"
        return DiskFull(f"cannot write {error.filename or 'the answer'}: {error.strerror}", hint)
    if isinstance(error, FileNotFoundError) and _has_lost_working_directory():
        hint = "cd to another folder, or once more into this one where it was made anew, and run the same command again"
        return SpecError("the current folder is no longer there: it was removed", hint)
    return None


def _has_lost_working_directory() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - Path.cwd() is the same
    except FileNotFoundError:
        return True
    return False


def _discard(stream: TextIO) -> None:
    """Redirect unwritten output to /dev/null, because Python flushes at exit and would change the exit code."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _discard_unwritable() -> None:
    """Discard the output of streams that cannot be written any more."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _discard(stream)


def _convert_usage_error(error: Any, arguments: Sequence[str]) -> SpecError:
    """Convert click's usage error to a SpecError."""
    path = error.ctx.command_path if getattr(error, "ctx", None) is not None else "tula"
    message = error.format_message().replace("Value error, ", "")  # pydantic's, which checks typer's literals
    option = getattr(error, "option_name", None)
    if path == "tula" and option in _SHARED:
        return SpecError(f"{option} comes after the command", f"for example tula status {option}")
    if hint := REMOVED_OPTIONS.get((path, str(option))):
        return SpecError(f"{path} has no option {option} any more", hint)
    names = getattr(getattr(error, "param", None), "opts", ())
    for (command, name, value), hint in REMOVED_VALUES.items():
        if command == path and name in names and {value, f"{name}={value}"} & set(arguments):
            return SpecError(f"{path} {name} has no value {value} any more", hint)
    return SpecError(message, f"{path} --help shows what it takes")


def _exit_on_broken_pipe() -> int:
    """Discard the output after a pager or `head` has closed the pipe, and return the exit code."""
    _discard(sys.stdout)
    return READER_IS_GONE


_REPORT = "this is a defect of tula; please report it with the lines above"


def _report_defect(screen: Screen, kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Show an unexpected error of tula or of user code with its traceback, also in the envelope."""
    screen.print_traceback(error.with_traceback(trace))
    theirs = _find_user_line(trace)
    hint = f"raised by {theirs}, which is no part of tula" if theirs else _REPORT
    _report_error(screen, TulaError(f"{kind.__name__}: {error}", hint))


def _find_user_line(trace: Any) -> str:
    """Return file and line of the user code that raised an error; empty if the error comes from tula."""
    import sysconfig
    import traceback

    ours = str(Path(__file__).parents[1])
    installed = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    for frame in reversed(traceback.extract_tb(trace)):
        if frame.filename.startswith(ours):
            return ""
        if not frame.filename.startswith(("<", *installed)):
            return f"{frame.filename}, line {frame.lineno}"
    return ""


NARROWEST = 20
"""Minimum number of columns; a smaller COLUMNS (0, for example) is not from a real terminal and is ignored."""


def main() -> None:
    """Run the command line and exit."""
    for name in ("stdout", "stderr"):  # python has none where the shell has closed it (`>&-`)
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - until the end
        replace_missing_letters(getattr(sys, name))
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) < NARROWEST:
        del os.environ["COLUMNS"]
    screen = Screen()
    sys.excepthook = functools.partial(_report_defect, screen)
    sys.exit(run(sys.argv[1:], screen=screen))
