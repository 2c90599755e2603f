"""The command-line application: the error boundary around the commands, and the only place that exits."""

import errno
import functools
import itertools
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, TextIO, get_args

import typer
from typer.core import TyperGroup

from tula_cli.cli.options import COMMON_OPTIONS, USAGE_ERROR, Command, ExtraCommand, Interrupted
from tula_cli.errors import DiskFull, SpecError, StorageFailed, TulaError
from tula_cli.options import DEFAULT_RUNS_FOLDER
from tula_cli.run.disk_space import FULL_DISK_ERRNOS, IO_ERRNOS
from tula_cli.run.files import choose_storage_hint
from tula_cli.run.owner import ACCESS_ERRNOS
from tula_cli.show.screen import Screen, replace_missing_letters
from tula_cli.spec.old_keys import OldKeyWarning
from tula_cli.version import __version__
from tula_cli.words import simplify_validation_message

WORKFLOW_COMMANDS = (
    Command("init", "Write a job file with the most important keys.", "tula init slurm", module="check"),
    Command("check", "Check a job file, and show what profiling it would cost.", "tula check job.yaml --on-cluster"),
    Command(
        "profile",
        "Measure short training runs over nodes and batch sizes.",
        "tula profile job.yaml --set search.nodes=[1,2,4]",
    ),
    Command(
        "recommend",
        "Choose nodes and batch size from the measurements.",
        "tula recommend --objective cost --deadline 24",
    ),
    Command("train", "Train at the recommended nodes and batch size.", "tula train --nodes 4 --batch 1024"),
    Command("status", "Show the jobs, the training and the recommendation of a run.", "tula status digits"),
)
FURTHER_COMMANDS = (
    Command("logs", "Show the log of a job.", "tula logs digits --follow", module="status"),
    Command(
        "cancel", "Cancel the jobs of a run; its results are kept.", "tula cancel digits-1f0c5b7e", module="status"
    ),
    Command(
        "compare",
        "Compare the accuracy of several methods and batch sizes.",
        "tula compare job.yaml --methods lbt,lrs,ortho --batch 1024",
    ),
    Command("evaluate", "Evaluate the weights of a training on the test set.", "tula evaluate --weights best"),
    ExtraCommand(
        "report", "Write a report of a run as HTML, Markdown, LaTeX or CSV.", "tula report --html report.html"
    ),
    ExtraCommand(
        "export",
        "Send results to MLflow, Weights & Biases or TensorBoard.",
        "tula export --to mlflow --follow",
        module="trackers",
    ),
    Command(
        "list",
        "List all runs, the most recently changed one first.",
        "tula list --run-dir /scratch/tula-runs",
        module="status",
    ),
    Command("diff", "Show the differences between two runs.", "tula diff digits-1f0c5b7e digits-9a4e02cd"),
    Command(
        "observe",
        "Run a training unchanged, and report how well it uses its nodes.",
        "tula observe -- python train.py --epochs 3",
    ),
    Command("clean", "Delete files that runs no longer need.", "tula clean --older 30d --dry-run"),
)
COMMANDS: Mapping[str, Command] = {str(command.name): command for command in (*WORKFLOW_COMMANDS, *FURTHER_COMMANDS)}
"""The commands by name, in order of use, each with the first paragraph of its help text and an example."""
MAX_HELP_COLUMNS = 100
"""Maximum number of columns of --help."""


class Commands(TyperGroup):
    """The commands of tula, listed in two panels: those of the workflow first."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the names of the commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Command | None:  # noqa: ARG002
        """Return a command by its name; None if there is none of that name."""
        return COMMANDS.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the commands, each under the name of its panel."""
        for panel, commands in (("Workflow", WORKFLOW_COMMANDS), ("More commands", FURTHER_COMMANDS)):
            with formatter.section(panel):
                formatter.write_dl([(command.name, command.summary) for command in commands])


app = typer.Typer(
    name="tula",
    cls=Commands,
    help="Measure a PyTorch training job, choose its number of nodes and batch size, and train.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": MAX_HELP_COLUMNS},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
REPLACED_COMMANDS: Mapping[str, str] = {
    "estimate": "use tula check job.yaml --memory 32GiB",
    "schema": "tula init writes .tula/job.schema.json and .tula/site.schema.json beside the job file",
}
"""Commands that were removed, and what to use instead."""
REMOVED_OPTIONS: Mapping[tuple[str, str], str] = {
    **dict.fromkeys(
        (("tula report", "--for"), ("tula report", "--runs")),
        "tula report --markdown, --latex and --csv write the scaling tables",
    ),
    **dict.fromkeys(
        (("tula check", "--site"), ("tula check", "--run-setup")),
        "tula check job.yaml names the site file that sets a wrong key; tula check job.yaml --on-cluster tests the settings in a job",
    ),
    (
        "tula recommend",
        "--validate",
    ): "tula recommend --explain shows the fit; tula train compares predicted with actual values",
    **dict.fromkeys(
        ((f"tula {name}", "--cancel-on-interrupt") for name in ("profile", "train", "compare", "evaluate")),
        "after Ctrl-C, jobs continue; tula cancel cancels them",
    ),
    (
        "tula recommend",
        "--pareto",
    ): "tula recommend marks the configurations of the Pareto front with P; results.csv has a column pareto",
    ("tula recommend", "--from-training"): "tula train --nodes 2-8 uses the nodes that its jobs are granted",
    ("tula logs", "--since"): "use tula logs --all for all attempts, or tula logs -n 50 for the last 50 lines",
    ("tula compare", "--html"): "tula report --html writes a page with the comparison",
    ("tula recommend", "--with-run"): "set search.gpus_per_node in the job file, and run tula profile",
    ("tula recommend", "--what-if"): "run tula profile and tula recommend on that hardware",
    (
        "tula list",
        "--accuracy",
    ): "tula status and tula report show predicted and actual values of the trainings of a run",
    (
        "tula profile",
        "--progress",
    ): "to measure the gradient noise, train with --set train.diagnostics=[gradient_noise]; train.early_stopping.epochs ends the training early",
}
"""Options that were removed, by command, and what to use instead."""
REMOVED_VALUES: Mapping[tuple[str, str, str], str] = {
    ("tula recommend", "--objective", "result-time"): (
        "use --objective time; the output shows when the scheduler expects to start the job"
    ),
}
"""Values of options that were removed, by command and option, and what to use instead."""

_TRAIN_HINT = "tula train {} trains; tula profile {} measures configurations first"
COMMAND_HINTS: Mapping[str, str] = {
    **dict.fromkeys(("run", "start", "launch", "submit", "sbatch", "execute"), _TRAIN_HINT),
    **dict.fromkeys(("fit", "resume", "continue", "restart"), "tula train {}"),
    **dict.fromkeys(("measure", "probe", "bench", "benchmark", "sweep", "search", "scan", "tune"), "tula profile {}"),
    **dict.fromkeys(("choose", "predict", "suggest", "optimize", "optimise", "plan", "answer"), "tula recommend {}"),
    **dict.fromkeys(("validate", "verify", "lint", "test", "doctor"), "tula check {}"),
    **dict.fromkeys(("new", "create", "setup", "config", "configure", "template"), "tula init"),
    **dict.fromkeys(("ps", "queue", "watch", "info", "progress", "jobs"), "tula status {}"),
    **dict.fromkeys(("ls", "runs"), "tula list"),
    **dict.fromkeys(("log", "tail", "output"), "tula logs {}"),
    **dict.fromkeys(("stop", "kill", "abort", "scancel"), "tula cancel {}"),
    **dict.fromkeys(("rm", "remove", "delete", "gc", "prune"), "tula clean {}"),
    **dict.fromkeys(("eval", "score"), "tula evaluate {}"),
    **dict.fromkeys(("show", "plot", "html", "results"), "tula report {}"),
    "version": "tula --version",
    "help": "tula {} --help",
}
"""Words that users of other tools type in place of a command, with the command to use; {} is the argument after them."""


_SHARED_OPTIONS = {
    word
    for kind in COMMON_OPTIONS.values()
    for option in get_args(kind)[1:]
    for word in (option.default, *option.param_decls)
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
        raise SpecError("no command given", "tula init writes a job file; tula --help lists the commands")


BROKEN_PIPE_EXIT_CODE = 128 + signal.SIGPIPE
"""Exit code if the reader of the output is gone, as a shell reports it for other programs."""


def run(arguments: Sequence[str], *, screen: Screen | None = None) -> int:
    """Run one command and return its exit code; errors that the user cannot fix are raised."""
    screen = screen or Screen()
    screen.guess_command(arguments)
    if hint := REPLACED_COMMANDS.get(screen.command):
        return _report_error(screen, SpecError(f"command {screen.command} was removed", hint))
    if _has_empty_argument(screen.command, arguments):
        hint = "if a shell variable stands for this argument, set the variable; otherwise remove the argument"
        return _report_error(screen, SpecError("an argument is empty", hint))
    try:
        with _show_old_keys(screen):
            command = typer.main.get_command(app)
            code = command(args=list(arguments), prog_name="tula", standalone_mode=False, obj=screen)
    except TulaError as error:
        return _report_error(screen, error)
    except SystemExit as end:  # typer and rich raise it, with code 1, after a pager or `head` has closed the pipe
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        _redirect_to_dev_null(sys.stdout)
        return BROKEN_PIPE_EXIT_CODE
    except (KeyboardInterrupt, typer.Abort):
        return _report_error(screen, Interrupted("interrupted"))
    except USAGE_ERROR as error:
        return _report_error(screen, _convert_usage_error(error, arguments))
    except OSError as error:
        known = _convert_os_error(error)
        if known is None:
            raise
        _discard_unwritable()
        return _report_error(screen, known)
    return code if isinstance(code, int) else 0


def _has_empty_argument(command: str, arguments: Sequence[str]) -> bool:
    """Return whether an argument is empty, which would mean the current folder; a user's command may have empty words."""
    if "--from-command" in arguments:
        return False
    if command == "observe":
        pairs = itertools.pairwise(arguments)
        return any(option in ("--install", "--folder") and not value for option, value in pairs)
    return any(not argument or re.fullmatch(r"--[a-z-]+=", argument) for argument in arguments)


@contextmanager
def _show_old_keys(screen: Screen) -> Iterator[None]:
    """Show renamed keys of a job file as warnings of the command."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", OldKeyWarning)
        show_other_warning = warnings.showwarning

        def show_warning(message: Warning | str, *where: Any, **more: Any) -> None:
            if isinstance(message, OldKeyWarning):
                screen.print_warning(str(message))
            else:
                show_other_warning(message, *where, **more)

        warnings.showwarning = show_warning
        yield


def _report_error(screen: Screen, error: TulaError) -> int:
    """Show an error and return its exit code, even if the output cannot be written."""
    try:
        screen.print_error(error)
    except (OSError, SystemExit):  # rich raises SystemExit if the reader has closed the pipe
        _discard_unwritable()
    return error.exit_code


def _convert_os_error(error: OSError) -> TulaError | None:
    """Return the error for a file or disk that cannot be used, or a removed working directory; None for other errors."""
    if error.errno in FULL_DISK_ERRNOS:
        hint = "free some disk space, and run the same command again"
        return DiskFull(f"cannot write {error.filename or 'the output'}: {error.strerror}", hint)
    if isinstance(error, FileNotFoundError) and _has_lost_working_directory():
        hint = "change to an existing folder (cd) and run the same command again"
        return SpecError("the current folder was deleted", hint)
    if error.filename is None or _find_user_line(error.__traceback__):
        return None
    message = f"cannot use {error.filename}: {error.strerror}"
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return SpecError(message, "give another path")
    if error.errno in ACCESS_ERRNOS:
        return TulaError(message, "check the permissions of the file and of its folders")
    if error.errno in IO_ERRNOS:
        return StorageFailed(message, choose_storage_hint(Path(error.filename), error))
    return None


def _has_lost_working_directory() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - Path.cwd() does the same
    except FileNotFoundError:
        return True
    return False


def _redirect_to_dev_null(stream: TextIO) -> None:
    """Redirect unwritten output to /dev/null, because Python flushes at exit and would change the exit code."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _discard_unwritable() -> None:
    """Discard the output of streams that cannot be written any more."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _redirect_to_dev_null(stream)


def _convert_usage_error(error: Any, arguments: Sequence[str]) -> SpecError:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "tula"
    if path == "tula" and arguments and arguments[0] in COMMANDS:
        path = f"tula {arguments[0]}"  # click's error for an option without its value has no context
    message = simplify_validation_message(error.format_message())
    option = getattr(error, "option_name", None)
    if path == "tula" and option in _SHARED_OPTIONS:
        return SpecError(f"tula itself has no option {option}", f"write it after the command: tula status {option}")
    if path == "tula" and option is None:
        return _make_unknown_command_error(arguments)
    if hint := REMOVED_OPTIONS.get((path, str(option))):
        return SpecError(f"{path}: option {option} was removed", hint)
    names = getattr(getattr(error, "param", None), "opts", ())
    for (command, name, value), hint in REMOVED_VALUES.items():
        if command == path and name in names and {value, f"{name}={value}"} & set(arguments):
            return SpecError(f"{path} {name}: value {value} was removed", hint)
    if option is not None and message.startswith("No such option"):
        nearest = " or ".join(getattr(error, "possibilities", None) or ())
        message, help_hint = f"{path} has no option {option}", f"{path} --help lists its options"
        if path == "tula observe":
            nearest, help_hint = "", "put -- before the command: tula observe -- python train.py --epochs 3"
        return SpecError(message, f"did you mean {nearest}?" if nearest else help_hint)
    if match := re.fullmatch(r"Got unexpected extra arguments? ?(?:\(s\))? \((.*)\)", message):
        return _make_extra_argument_error(match[1], arguments, path)
    if match := re.fullmatch(r"Invalid value for '([^']*)'(?: / '[^']*')*: (.*)", message):
        message = f"{match[1]}: {match[2]}"
    if message.startswith("Missing argument") and context is not None:
        return SpecError(message.rstrip("."), re.sub(r"Usage: |[{}]", "", context.get_usage()))
    return SpecError(message, f"{path} --help lists arguments and options")


def _make_extra_argument_error(words: str, arguments: Sequence[str], path: str) -> SpecError:
    """Return the error for arguments that a command does not have, often the value of --set after a space."""
    value = next(iter(words.split()), words)
    before = list(arguments[: arguments.index(value)]) if value in arguments else []
    if before[-2:-1] == ["--set"] and "=" not in before[-1]:
        return SpecError(f"--set {before[-1]}: the value is missing", f"write --set {before[-1]}={value}")
    return SpecError(f"{path} does not take the argument {words}", f"{path} --help lists arguments and options")


def _make_unknown_command_error(arguments: Sequence[str]) -> SpecError:
    """Return the error for a first word that is not a command, with the command that was probably meant."""
    from tula_cli.plugins import suggest_nearest

    word, *rest = [argument for argument in arguments if not argument.startswith("-")]
    argument = shlex.quote(rest[0]) if rest else ""
    if word in COMMAND_HINTS:
        return SpecError(
            f"there is no command {word}", " ".join(COMMAND_HINTS[word].format(argument, argument).split())
        )
    # os.path, because Path.exists raises PermissionError in another user's folder.
    run_folders = (os.path.join(folder, word, "spec.yaml") for folder in ("", DEFAULT_RUNS_FOLDER))  # noqa: PTH118
    quoted = shlex.quote(word)
    if word.endswith((".yaml", ".yml")) or any(map(os.path.exists, run_folders)):
        return SpecError(
            f"{word} is not a command", f"{_TRAIN_HINT.format(quoted, quoted)}; tula status {quoted} shows its run"
        )
    hint = suggest_nearest(word, COMMANDS)
    return SpecError(f"there is no command {word}", hint or "tula --help lists the commands")


def _report_defect(screen: Screen, kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Show an unexpected error of tula or of user code with its traceback, also in the envelope."""
    screen.print_traceback(error.with_traceback(trace))
    hint = "this is a bug in tula; please report the lines above"
    if user_line := _find_user_line(trace):
        hint = f"the error was raised in {user_line}, which is not part of tula; correct this code"
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


MIN_COLUMNS = 20
"""Minimum number of columns; a smaller COLUMNS (0, for example) is not from a real terminal and is ignored."""


def main() -> None:
    """Run the command line and exit."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the shell (`<&-`, `>&-`)
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - open until the process exits
    replace_missing_letters(sys.stdout)
    replace_missing_letters(sys.stderr)
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) < MIN_COLUMNS:
        del os.environ["COLUMNS"]
    screen = Screen()
    sys.excepthook = functools.partial(_report_defect, screen)
    sys.exit(run(sys.argv[1:], screen=screen))
