"""The options that the command line and the Python API share, each declared once.

The options of a command are the fields of a frozen dataclass, for example `Query` of `tula recommend`. A field's annotation
has an `Option`, with its help text. A command that takes such a class gets an option for every field
(`cli/options.py`), and a Python function gets a keyword argument for every field (`with_arguments`).
"""

import functools
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ParamSpec, TypeVar, Union, cast, get_args, get_origin

from tula_cli.errors import ARGUMENT_BY_FLAG, SpecError
from tula_cli.words import split_outside_brackets

MAX_COUNT = 2**31 - 1
"""Maximum of whole numbers on the command line, such as nodes, samples and lines."""
MAX_SEEDS = 1000
"""Maximum number of seeds in one request; each training is planned by itself."""

P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")


@dataclass(frozen=True)
class Option:
    """The help text of an option, and how it is written on the command line."""

    help: str
    flag: str = ""  # long flag; empty: derived from the name of the field
    short: str = ""  # one-letter flag; empty: none
    metavar: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    type: Any = None  # type on the command line; None: the same as in Python
    parse: Callable[[str], object] | None = None  # converts the text of the command line to the field's value
    advanced: bool = False  # shown under "Advanced" in --help

    def make_flag(self, name: str) -> str:
        """Return the option of the command line for the field `name`."""
        return self.flag or f"--{name.replace('_', '-')}"

    def check_value(self, label: str, value: object) -> None:
        """Check that the numbers of a value are within its bounds, and that none exceeds `MAX_COUNT`.

        Raises:
            SpecError: a number is out of bounds.
        """
        for number in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
            if not isinstance(number, int | float) or isinstance(number, bool):
                continue
            if self.minimum is not None and not number >= self.minimum:
                raise SpecError(f"{label} {max(number, -MAX_COUNT):.12g}: must be at least {self.minimum:g}")
            maximum = MAX_COUNT if self.maximum is None and isinstance(number, int) else self.maximum
            if maximum is not None and not number <= maximum:
                raise SpecError(f"{label}: must be at most {maximum}")


def find_option(parameter: inspect.Parameter) -> Option | None:
    """Return the Option in a parameter's annotation, or None."""
    return next((extra for extra in get_args(parameter.annotation) if isinstance(extra, Option)), None)


def list_fields(options: Callable[..., object]) -> list[tuple[inspect.Parameter, Option]]:
    """Return the fields of a class of options as parameters, each with its Option; a text describes an argument of Python only."""
    fields = inspect.signature(options).parameters.values()
    return [(field, find_option(field) or Option(get_args(field.annotation)[1])) for field in fields]


def with_arguments(arguments: Callable[P, A]) -> Callable[[Callable[[A], R]], Callable[P, R]]:
    """Decorate a function of one dataclass object so that callers pass the fields of the object as arguments.

    A function `train` decorated by `@with_arguments(TrainArguments)` is called as `train(run, nodes=4)`, and is given
    `TrainArguments(run, nodes=4)`. Type checkers, `inspect.signature` and `help` show the fields, the last with their help
    texts.

    Args:
        arguments: a dataclass. A field's annotation has an Option or a text that describes it.
    """

    def decorate(function: Callable[[A], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                given = call.__signature__.bind(*args, **kwargs).arguments  # type: ignore[attr-defined]
            except TypeError as error:  # raised again with the name of the function instead of its arguments' class
                from tula_cli.plugins import suggest_nearest

                names = [field.name for field in plain]
                unknown = next((name for name in kwargs if name not in names), None)
                hint = "" if unknown is None else suggest_nearest(unknown, names)
                raise TypeError(f"{function.__name__}() {error}{hint and f'; {hint}'}") from None
            for parameter, option in list_fields(arguments):
                if parameter.name not in given:
                    continue
                value = given[parameter.name]
                check_type(parameter.name, value, get_args(parameter.annotation)[0])
                if isinstance(value, list | tuple) and not value and parameter.default != ():
                    raise SpecError(f"{parameter.name} {value!r}: must have at least one item")
                option.check_value(parameter.name, value)
            token = ARGUMENT_BY_FLAG.set(argument_by_flag)
            try:
                return function(arguments(*args, **kwargs))
            finally:
                ARGUMENT_BY_FLAG.reset(token)

        argument_by_flag = dict(_list_flags(arguments))
        plain = [field.replace(annotation=get_args(field.annotation)[0]) for field, _ in list_fields(arguments)]
        signature = inspect.signature(function).replace(parameters=plain)
        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Args:", *_describe_fields(arguments)])
        return call

    return decorate


def _list_flags(arguments: Callable[..., object]) -> Iterator[tuple[str, str]]:
    """Yield the flags of a class of options, each with the argument of the Python function that it stands for."""
    for field, option in list_fields(arguments):
        flag, _, negative = option.make_flag(field.name).partition("/")
        yield flag, f"{field.name}=True" if get_args(field.annotation)[0] is bool or negative else field.name
        if negative:
            yield negative, f"{field.name}=False"


_TYPES: dict[object, tuple[type | tuple[type, ...], str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    str: (str, "a string"),
    Path: ((str, os.PathLike), "a path"),
    Sequence: (Collection, "a list"),
    NoneType: (NoneType, "None"),
}
"""Types of values that an annotation accepts, and how messages name them."""


def check_type(name: str, value: object, annotation: object) -> None:
    """Check the type of a boolean, a number, a text, a path or a list; other types are checked where they are used.

    Python itself would take "no" as true, and a string as a list of characters.

    Args:
        name: the argument.
        value: its value.
        annotation: the type that the argument takes.

    Raises:
        SpecError: the value, or an item of the list, is of another type.
    """
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    origins = {kind: get_origin(kind) or kind for kind in kinds}
    if not _TYPES.keys() >= set(origins.values()):
        return
    matching = [kind for kind, origin in origins.items() if _is_of_type(value, origin)]
    if not matching:
        expected = " or ".join(_TYPES[origin][1] for origin in origins.values() if origin is not NoneType)
        items = [get_args(kind)[0] for kind, origin in origins.items() if origin is Sequence]
        example = f"for example [{value!r}]" if any(_is_of_type(value, item) for item in items) else ""
        raise SpecError(f"{name} {value!r}: must be {expected}", example)
    if origins[matching[0]] is Sequence:
        for item in cast("Collection[object]", value):
            check_type(name, item, get_args(matching[0])[0])


def require_positive(**given: object) -> None:
    """Check that arguments are whole numbers of at least 1: Python callers bypass the checks of the command line.

    Args:
        given: values by argument name; None if not given.

    Raises:
        SpecError: a value is not a whole number, or is below 1.
    """
    for name, value in given.items():
        if value is None:
            continue
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise SpecError(f"{name} {value!r}: must be an integer")
        if value < 1:
            raise SpecError(f"{name} {value}: must be at least 1")


def require_callable(**given: object) -> None:
    """Check that arguments are callable.

    Args:
        given: values by argument name; None if not given.

    Raises:
        SpecError: a value is not callable.
    """
    for name, value in given.items():
        if value is not None and not callable(value):
            raise SpecError(f"{name} {value!r}: must be a function")


def require_list(**given: object) -> None:
    """Check that arguments are lists and not strings, which would be iterated by character.

    Args:
        given: values by argument name; None if not given.

    Raises:
        SpecError: a value is a string or not iterable.
    """
    for name, value in given.items():
        if value is not None and (isinstance(value, str) or not isinstance(value, Iterable)):
            raise SpecError(f"{name} must be a list, got {value!r}", f"for example [{value!r}]")


def _is_of_type(value: object, kind: object) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind is Sequence and isinstance(value, str | bytes | Mapping):
        return False
    return isinstance(value, _TYPES[kind][0])


def _describe_fields(options: Callable[..., object]) -> list[str]:
    """Return a line for each field, as in the section Args of a docstring."""
    lines = []
    for parameter, option in list_fields(options):
        unit = f" ({option.metavar})" if option.metavar else ""
        lines.append(f"    {parameter.name}{unit}: {option.help}")
    return lines


# --- Options of several commands

DEFAULT_RUNS_FOLDER = "tula-runs"
DEFAULT_OBSERVATIONS_FOLDER = "tula-observed"
"""Folder of the observations of `tula observe`."""
Root = Annotated[
    str | Path, Option("Folder that contains the runs.", "--run-dir", metavar="FOLDER", type=Path, advanced=True)
]
Overrides = Annotated[
    Sequence[str],
    Option(
        "Override a key of the job file, for example train.epochs=5; may be repeated.",
        "--set",
        metavar="KEY=VALUE",
        type=list[str] | None,
    ),
]
NodeType = Annotated[
    str | None,
    Option(
        "Use only this node type: a name in node_types, or gpus-N for N GPUs per node (from search.gpus_per_node).",
        "--type",
        metavar="NAME",
        advanced=True,
    ),
]
Largest = Annotated[
    bool, Option("Only find the largest batch that fits into GPU memory, on the fewest nodes of search.nodes.")
]
LearningRates = Annotated[
    bool, Option("Only find the learning rate for the batch, in short trainings that cost about 8 % of a training.")
]
NearBatches = Annotated[
    bool, Option("Find the learning rate for the batch, and also try half and twice the batch.", "--batches")
]
Fresh = Annotated[bool, Option("Build the model and the dataset again, even if nothing has changed.", advanced=True)]
Wait = Annotated[
    bool | None,
    Option(
        "Wait until the jobs have finished (default: yes on this machine, no on SLURM).",
        "--wait/--no-wait",
        advanced=True,
    ),
]
Timeout = Annotated[
    float | None,
    Option(
        "Stop waiting after this time. The exit code is 75 if jobs are still running.",
        metavar="SECONDS",
        minimum=0,
        advanced=True,
    ),
]
Every = Annotated[
    bool,
    Option("Show all configurations, not only the best ones, and write all of them to results.csv.", "--all"),
]
Observed = Annotated[
    str | None,
    Option(
        "Use the jobs of this script that tula observe has measured instead of probes. Give the script's name, or"
        " the folder of the jobs.",
        "--observed",
        metavar="SCRIPT",
        advanced=True,
    ),
]
CheckedNodes = Annotated[
    int | None, Option("Number of nodes for --on-cluster (default: 2).", "--nodes", minimum=1, advanced=True)
]
Trackers = Annotated[
    str | Sequence[str],
    Option(
        "mlflow, wandb, tensorboard, or package.module:callable; may be repeated (default: those in section export).",
        "--to",
        metavar="TRACKER",
        type=list[str] | None,
    ),
]


# --- Options of each command


@dataclass(frozen=True)
class NodeRange:
    """The numbers of nodes that each job of a training may be granted; None for a bound that follows from the recommendation."""

    least: int | None = None
    most: int | None = None


def parse_nodes(text: str) -> int | NodeRange:
    """Return a number of nodes, or the range of 2-8, 2-, -8 or auto.

    Raises:
        SpecError: the text is neither, or the range is empty.
    """
    if text.strip() == "auto":
        return NodeRange()
    match = re.fullmatch(r"([0-9]{1,9})|([0-9]{0,9})-([0-9]{0,9})", text.strip())
    if match is None or match[0] == "-":
        raise SpecError(
            f"[[--nodes]] {text}: expected a number of nodes or a range", "for example 4, 2-8, 2-, -8 or auto"
        )
    min_nodes, max_nodes = (int(bound) if bound else None for bound in match.groups()[1:])
    if "0" in {bound.lstrip("0") or "0" for bound in match.groups() if bound} or match[0] == "-1":
        raise SpecError(f"[[--nodes]] {text}: must be at least 1", "for example 4, 2-8, 2-, -8 or auto")
    if min_nodes is not None and max_nodes is not None and min_nodes > max_nodes:
        raise SpecError(f"[[--nodes]] {text}: the range is empty", f"did you mean [[--nodes]] {max_nodes}-{min_nodes}?")
    return int(match[1]) if match[1] else NodeRange(min_nodes, max_nodes)


def _check_nodes(text: str) -> str:
    parse_nodes(text)
    return text


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """The training to run: `tula train` and `tula.train`."""

    nodes: Annotated[
        int | str | None,
        Option(
            "Number of nodes (default: as recommended). With a range such as 2-8, each job uses the nodes that SLURM"
            " grants. For 2-, -8 and auto, the missing bounds are taken from the recommendation.",
            metavar="N|MIN-MAX|auto",
            type=str | None,
            parse=_check_nodes,
        ),
    ] = None
    batch: Annotated[int | None, Option("Global batch size (default: as recommended).", minimum=1)] = None
    seeds: Annotated[
        int | None,
        Option(
            "Train N times with different seeds, as planned by tula recommend --trainings N --save.",
            metavar="N",
            minimum=1,
            maximum=MAX_SEEDS,
        ),
    ] = None
    node_type: NodeType = None
    rehearse: Annotated[
        bool,
        Option(
            "Before a script trains for more than an hour, or on a range of nodes, test once that it resumes from"
            " its checkpoint (default: yes).",
            "--rehearse/--no-rehearse",
            advanced=True,
        ),
    ] = True
    within_balance: Annotated[
        bool,
        Option(
            "Do not start a training that costs more than the balance of the SLURM account (GrpTRESMins). Needs"
            " pricing.kind: billing.",
            advanced=True,
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """The weights to evaluate: `tula evaluate` and `tula.evaluate`."""

    weights: Annotated[
        str | Path | None,
        Option(
            "Weights to evaluate (default: best, or last if there are no best weights).",
            metavar="best|last|FILE",
            type=str | None,
        ),
    ] = None
    training: Annotated[
        str | None,
        Option(
            "Training to evaluate (default: the one that was started last).",
            metavar="SIGNATURE",
            advanced=True,
        ),
    ] = None
    nodes: Annotated[int, Option("Number of nodes to evaluate on.", minimum=1, advanced=True)] = 1
    node_type: NodeType = None
    fresh: Annotated[bool, Option("Evaluate again, even if the result is known.", advanced=True)] = False


def split_methods(text: str) -> tuple[str, ...]:
    """Return the rows of `--methods`, split at commas outside brackets and quotes.

    Raises:
        SpecError: there is no row.
    """
    rows = tuple(row.strip() for row in split_outside_brackets(text, ",") if row.strip())
    if not rows:
        raise SpecError(
            f"[[--methods]] {text!r}: must be methods separated by commas", "for example [[--methods]] lbt,ags"
        )
    return rows


def _split_batches(text: str) -> tuple[int, ...]:
    try:
        batches = tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        batches = ()
    if not batches:
        raise SpecError(
            f"[[--batch]] {text!r}: must be integers separated by commas", "for example [[--batch]] 512,1024"
        )
    return batches


@dataclass(frozen=True, kw_only=True)
class ComparisonRequest:
    """The rows of a comparison: `tula compare` and `tula.compare`.

    None takes the value of the last comparison, of the recommendation, or the default.
    """

    methods: Annotated[
        Sequence[str] | None,
        Option(
            "Methods to compare, separated by commas: values of train.method, or lbt-x2, lbt-x4, sqrt, sqrt-beta2,"
            " robust. Append settings with colons (ags:delta=0.1,lbt:optimizer.lr=0.2). Default: the job's method,"
            " methods that suit its optimizer, and one control.",
            metavar="A,B",
            type=str | None,
            parse=split_methods,
        ),
    ] = None
    batches: Annotated[
        Sequence[int] | None,
        Option(
            "Global batch sizes, separated by commas (default: as recommended).",
            "--batch",
            metavar="N,M",
            type=str | None,
            parse=_split_batches,
        ),
    ] = None
    seeds: Annotated[
        int | None,
        Option(
            "Number of seeds, starting at train.seed (default: 3, or 1 if a script takes no seed).",
            minimum=1,
            maximum=MAX_SEEDS,
        ),
    ] = None
    nodes: Annotated[
        int | None,
        Option(
            "Number of nodes (default: as recommended, otherwise the fewest in search.nodes).", minimum=1, advanced=True
        ),
    ] = None
    controls: Annotated[
        bool | None,
        Option(
            "Also train lbt at 2 and 4 times the learning rate (default: yes).",
            "--controls/--no-controls",
            advanced=True,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """How to send a run to trackers: `tula export` and `tula.export`."""

    uri: Annotated[
        str | None,
        Option(
            "Tracking URI, server address or folder (default: that set for the tracker, otherwise a folder in the"
            " run).",
            metavar="PLACE",
        ),
    ] = None
    project: Annotated[
        str | None, Option("MLflow experiment or W&B project (default: the job's name).", metavar="NAME")
    ] = None
    follow: Annotated[bool, Option("Keep sending new results while jobs are running.", short="-f")] = False
    every: Annotated[
        float | None,
        Option("Interval between updates with --follow (default: 30).", metavar="SECONDS", minimum=1, advanced=True),
    ] = None
