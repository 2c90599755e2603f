"""Shared parts of the commands: their registration, and arguments used by several commands."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Annotated, Any, cast, get_args

import typer
from typer.core import TyperCommand

from tula_cli.errors import Interruption, SpecError, TulaError
from tula_cli.options import Option, find_option
from tula_cli.show.screen import Screen

USAGE_ERROR = cast(type[Exception], typer.BadParameter.__mro__[2])
"""Base class of click's usage errors; typer has its own copy of click and does not export the class."""


class Interrupted(TulaError):
    """Ctrl-C was pressed. Jobs continue; tula cancel cancels them."""

    exit_code = 130
    code = "interrupted"


# --- Panels of --help

ADVANCED_PANEL = "Advanced"
OUTPUT_PANEL = "Output"


class CommandWithPanels(TyperCommand):
    """A command whose --help shows its options in panels: Options, Advanced, and Output, which all commands share.

    An option that takes one value is an error if it is given twice; click would use the last value.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line.

        Raises:
            SpecError: an option with one value, or with a negative form, is given more than once.
        """
        _, _, params = self.make_parser(ctx).parse_args(list(args))
        given = [param for param in params if _takes_one_value(param)]
        repeated = next((param for param in given if given.count(param) > 1), None)
        asks_for_help = any("--help" in param.opts for param in params)  # its name differs between versions of click
        is_checked = not (asks_for_help or ctx.resilient_parsing)  # not while a shell completes the command line
        if repeated is not None and is_checked:
            flags = "/".join((*repeated.opts, *repeated.secondary_opts))
            raise SpecError(
                f"{flags} is given {given.count(repeated)} times",
                f"give it once: {flags} {getattr(repeated, 'metavar', '') or ''}".rstrip(),
            )
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, each under the name of its panel."""
        panels: dict[str, list[tuple[str, str]]] = {
            "Arguments": [],
            "Options": [],
            ADVANCED_PANEL: [],
            OUTPUT_PANEL: [],
        }
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                default = "Arguments" if param.param_type_name == "argument" else "Options"
                panel = OUTPUT_PANEL if "--help" in param.opts else getattr(param, "rich_help_panel", None)
                panels[panel or default].append(record)
        for name, records in panels.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


def _takes_one_value(param: Any) -> bool:
    is_plain_flag = getattr(param, "is_flag", False) and not param.secondary_opts
    return param.param_type_name == "option" and not param.multiple and not is_plain_flag


# --- Common options

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be submitted, without submitting it.")]

COMMON_OPTIONS: dict[str, Any] = {
    "as_json": Annotated[
        bool,
        typer.Option(
            "--json", help="Print one JSON object to stdout, also after an error.", rich_help_panel=OUTPUT_PANEL
        ),
    ],
    "quiet": Annotated[
        bool,
        typer.Option(
            "--quiet",
            "-q",
            help="Print only the answer, warnings and errors, not the progress.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ],
    "verbose": Annotated[
        bool, typer.Option("--verbose", "-v", help="Print the traceback of an error.", rich_help_panel=OUTPUT_PANEL)
    ],
    "no_color": Annotated[
        bool,
        typer.Option("--no-color", help="Print without colours (as with NO_COLOR=1).", rich_help_panel=OUTPUT_PANEL),
    ],
}


def register_command(app: typer.Typer, function: Callable[..., None], *, example: str) -> None:
    """Register a function as a command of `app`.

    The function's first parameter is the screen, which is set up by the options common to all commands. A parameter whose
    type is a dataclass becomes an argument or option for each field of that class. Its docstring is the help text, which
    ends with the example of a command line.
    """
    name = function.__name__.rstrip("_")
    parameters = list(inspect.signature(function).parameters.values())[1:]

    @functools.wraps(function)
    def wrapper(ctx: typer.Context, **values: Any) -> None:
        screen = ctx.obj if isinstance(ctx.obj, Screen) else Screen()
        screen.command = name
        sources = {parameter: ctx.get_parameter_source(parameter) for parameter in values}
        screen.given_options = frozenset(
            parameter for parameter, source in sources.items() if source and source.name == "COMMANDLINE"
        )
        screen.as_json, screen.quiet, screen.verbose = values["as_json"], values["quiet"], values["verbose"]
        screen.color = False if values["no_color"] else None
        try:
            function(screen, **{parameter.name: _make_argument(parameter, values) for parameter in parameters})
        except Interruption as interruption:
            raise Interrupted(interruption.message, interruption.hint) from None
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None
        screen.finish_answer()

    keyword = inspect.Parameter.KEYWORD_ONLY
    command_options = [
        _make_typer_parameter(field, option) for parameter in parameters for field, option in _list_fields(parameter)
    ]
    common = [inspect.Parameter(name, keyword, default=False, annotation=kind) for name, kind in COMMON_OPTIONS.items()]
    context = inspect.Parameter("ctx", keyword, annotation=typer.Context)
    wrapper.__signature__ = inspect.Signature([context, *command_options, *common])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in [context, *command_options, *common]}
    app.command(name, cls=CommandWithPanels, epilog=f"Example: {example}")(wrapper)


def _list_fields(parameter: inspect.Parameter) -> list[tuple[inspect.Parameter, Option | None]]:
    """Return the fields of a class of options, or the parameter itself; each with its `Option`, None if it has none."""
    if _is_class_of_options(parameter):
        return [(field, find_option(field)) for field in inspect.signature(parameter.annotation).parameters.values()]
    return [(parameter, find_option(parameter))]


def _is_class_of_options(parameter: inspect.Parameter) -> bool:
    return dataclasses.is_dataclass(parameter.annotation)


def _make_argument(parameter: inspect.Parameter, values: Mapping[str, Any]) -> Any:
    """Return the argument of a command for a parameter, from the values on the command line."""
    fields = {
        field.name: _convert_value(field, option, values[field.name]) for field, option in _list_fields(parameter)
    }
    return parameter.annotation(**fields) if _is_class_of_options(parameter) else fields[parameter.name]


def _convert_value(field: inspect.Parameter, option: Option | None, value: Any) -> Any:
    """Return the value of a field for a value of the command line, where None means that the option is not given."""
    if value is None:
        return field.default
    if option is None:  # annotated for typer, which takes the first flag for the default
        info = get_args(field.annotation)[1]
        option = Option(
            "", next((flag for flag in (info.default, *(info.param_decls or ())) if isinstance(flag, str)), "")
        )
    parsed = option.parse(value) if option.parse else value
    # Not typer's `max`, because every line of --help would show MAX_COUNT.
    option.check_value(option.make_flag(field.name), parsed)
    return parsed


def _make_typer_parameter(field: inspect.Parameter, option: Option | None) -> inspect.Parameter:
    """Return a field as typer reads it; one without an Option is annotated for typer already."""
    field = field.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    if option is None:
        return field
    # With `readable`, typer would report an unreadable run before tula can name its owner.
    flags = [flag for flag in (option.make_flag(field.name), option.short) if flag]
    panel = ADVANCED_PANEL if option.advanced else None
    metavar = option.metavar or (None if option.minimum is None else "N")
    kind = option.type or get_args(field.annotation)[0]
    info = typer.Option(
        *flags,
        help=option.help,
        metavar=metavar,
        min=option.minimum,
        max=option.maximum,
        readable=False,
        rich_help_panel=panel,
    )
    default = None if field.default == () else field.default
    return field.replace(annotation=Annotated[kind, info], default=default)


# --- Commands by name


class Command(TyperCommand):
    """A command whose module is imported only when it runs or its help is shown, so that `tula` starts quickly.

    Args:
        summary: the first paragraph of its help text.
        module: its module in tula_cli.cli, if it has another name than the command.
    """

    def __init__(self, name: str, summary: str, example: str, *, module: str | None = None) -> None:
        super().__init__(name, help=summary)
        self.module, self.summary, self.example = module or name, summary, example

    def load_function(self) -> Callable[..., None]:
        """Return the function of the command."""
        module = import_module(f"tula_cli.cli.{self.module}")
        function: Callable[..., None] = getattr(module, "list_" if self.name == "list" else str(self.name))
        return function

    def build_command(self) -> TyperCommand:
        """Return the command with its arguments and options."""
        app = typer.Typer(rich_markup_mode=None, add_completion=False)
        register_command(app, self.load_function(), example=self.example)
        return cast(TyperCommand, typer.main.get_command(app))

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Return the context of the imported command, in which click runs it."""
        return self.build_command().make_context(info_name, args, parent, **extra)


class ExtraCommand(Command):
    """A command of an optional package, whose name is `module`."""

    def load_function(self) -> Callable[..., None]:
        """Return the function of the command.

        Raises:
            SpecError: the package is not installed.
        """
        from tula_cli.entry_points import load_extra

        command: Callable[..., None] = load_extra(self.module).command
        return command
