"""Options are declared once: the command line and the Python API are made from the same classes."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import make_runs as make
import pytest
import typer
from typer.testing import CliRunner

import tula_cli as tula
from tula_cli.cli import app
from tula_cli.cli.options import register_command
from tula_cli.errors import SpecError
from tula_cli.options import (
    ComparisonRequest,
    EvaluationRequest,
    Option,
    TrainRequest,
    list_fields,
    with_arguments,
)
from tula_cli.query import Query, parse_budget, parse_hours, parse_share
from tula_cli.show.screen import Screen
from tula_cli.spec.load import dump_yaml

COMMANDS = app.COMMANDS


@dataclass(frozen=True, kw_only=True)
class WithNewOption(Query):
    """The query, and an option that this test adds."""

    min_nodes: Annotated[int | None, Option("At least so many nodes.", metavar="N", minimum=1)] = None


@with_arguments(WithNewOption)
def ask(query: WithNewOption) -> WithNewOption:
    """Return the query."""
    return query


class CommandLine:
    """A command that takes a query and keeps it."""

    def __init__(self) -> None:
        self.asked: list[WithNewOption] = []
        self.app = typer.Typer()
        register_command(self.app, self.ask(), example="tula ask")

    def ask(self):  # type: ignore[no-untyped-def]
        def ask(screen: Screen, query: WithNewOption) -> None:
            self.asked.append(query)
            screen.print_answer({}, [])

        return ask

    def run(self, *arguments: str) -> str:
        return CliRunner().invoke(self.app, arguments).output


def test_a_field_is_an_option_of_the_command_line_and_an_argument_of_python() -> None:
    command_line = CommandLine()
    command_line.run("--min-nodes", "2", "--deadline", "3.5", "--type", "fast", "--json")
    python = ask(min_nodes=2, deadline_hours=3.5, node_type="fast")
    assert command_line.asked == [python] and python.min_nodes == 2


def test_its_help_text_and_its_bound_are_in_both() -> None:
    command_line = CommandLine()
    assert "At least so many nodes." in command_line.run("--help")
    assert "min_nodes (N): At least so many nodes." in (ask.__doc__ or "")
    parameter = inspect.signature(ask).parameters["min_nodes"]
    assert parameter.annotation == int | None and parameter.default is None
    assert "greater than or equal to 1" in command_line.run("--min-nodes", "0") and not command_line.asked


def test_options_that_are_not_given_take_the_defaults_of_the_class() -> None:
    command_line = CommandLine()
    command_line.run("--json")
    assert command_line.asked == [WithNewOption()]


@pytest.mark.parametrize(
    "query",
    [
        WithNewOption(),
        WithNewOption(curve="cost", nodes=4, max_batch=1024),
        WithNewOption(max_nodes=8, deadline_hours=24.0, budget=1.5, node_type="gpus-4"),
    ],
)
def test_the_options_of_a_query_are_what_asks_it_again(query: WithNewOption) -> None:
    command_line = CommandLine()
    command_line.run(*" ".join(query.command_line_options).split(), "--json")
    assert command_line.asked == [query]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("recommend", Query),
        ("train", TrainRequest),
        ("evaluate", EvaluationRequest),
        ("compare", ComparisonRequest),
    ],
)
def test_a_command_and_its_function_take_every_field(name: str, options: type) -> None:
    fields = list_fields(options)
    parameters = inspect.signature(getattr(tula, name)).parameters
    assert {field.name for field, _ in fields} <= set(parameters)
    assert all(parameters[field.name].default == field.default for field, _ in fields)
    flags = {
        flag
        for parameter in COMMANDS[name].build_command().params
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }
    for field, option in fields:
        assert option is not None and set(option.make_flag(field.name).split("/")) <= flags


@pytest.mark.parametrize("name", [name for name in tula.__all__ if name not in ("Run", "TulaError", "__version__")])
def test_every_argument_of_a_function_is_described(name: str) -> None:
    function = getattr(tula, name)
    for parameter in inspect.signature(function).parameters:
        assert f"{parameter}: " in function.__doc__ or f"{parameter} (" in function.__doc__


@pytest.mark.parametrize(
    ("text", "hours"),
    [("36", 36), ("90s", 0.025), ("90m", 1.5), ("90min", 1.5), ("90 min", 1.5), ("3d", 72), ("2w", 336), ("1.5h", 1.5)],
)
def test_a_deadline_is_written_as_times_are_shown(text, hours):
    assert parse_hours(text) == pytest.approx(hours)


def test_a_share_may_be_in_percent():
    assert parse_share("0.6") == parse_share("60 %") == 0.6
    with pytest.raises(SpecError, match="--min-efficiency 60: must be between 0 and 1"):
        parse_share("60")
    with pytest.raises(SpecError, match="--budget 5 USD: expected a number"):
        parse_budget("5 USD")


@pytest.mark.parametrize("text", ["inf", "nan", "-inf"])
def test_a_limit_is_a_finite_number(text):
    with pytest.raises(SpecError, match=f"--budget {text}: expected a number"):
        parse_budget(text)
    for name in ("min_efficiency", "deadline_hours", "budget"):
        with pytest.raises(SpecError, match=f"{name} {text}: must be a finite number"):
            Query(**{name: float(text)})


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("profile", {"wait": "no"}, "wait 'no': must be True or False"),
        ("check", {"fresh": 1}, "fresh 1: must be True or False"),
        ("train", {"batch": 1.5}, "batch 1.5: must be an integer"),
        ("train", {"seeds": True}, "seeds True: must be an integer"),
        ("train", {"timeout": "3"}, "timeout '3': must be a number"),
        ("plan_trainings", {"trainings": "3"}, "trainings '3': must be an integer or a list"),
        ("plan_trainings", {"trainings": []}, r"trainings \[\]: must have at least one item"),
        ("estimate", {"memory": 1.5}, "memory 1.5: must be an integer or a string"),
        ("estimate", {"memory": "lots"}, "memory: must be a size such as 16GiB"),
        ("estimate", {"memory": -1}, "memory: must be a size above 0"),
        ("compare", {"methods": [5]}, "methods 5: must be a string"),
        ("compare", {"batches": []}, r"batches \[\]: must have at least one item"),
        ("export", {"to": 5}, "to 5: must be a string or a list"),
        ("evaluate", {"weights": 5}, "weights 5: must be a string or a path"),
        ("status", {"root": 5}, "root 5: must be a string or a path"),
        ("plan_trainings", {"trainings": [2, "3"]}, "trainings '3': must be an integer"),
        ("plan_trainings", {"trainings": 0}, "trainings 0: must be at least 1"),
    ],
)
def test_an_argument_of_another_type_is_refused(
    name: str, arguments: dict[str, object], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(dump_yaml(make.spec()))
    with pytest.raises(SpecError, match=f"^{problem}"):
        getattr(tula, name)("job.yaml", **arguments)


FUNCTIONS = [getattr(tula, name) for name in tula.__all__ if inspect.isfunction(getattr(tula, name))]


@pytest.mark.parametrize("function", [*FUNCTIONS, tula.Run.open], ids=lambda function: function.__name__)
def test_every_argument_of_another_type_is_a_tula_error(
    function: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parameters = inspect.signature(function).parameters.values()
    required = {each.name: "job.yaml" for each in parameters if each.default is each.empty}
    for parameter in parameters:
        with pytest.raises(tula.TulaError):
            function(**required | {parameter.name: 5j})


def test_a_curve_without_a_knee_is_refused():
    with pytest.raises(SpecError, match="curve cost has no effect with objective time"):
        Query(objective="time", curve="cost")


def test_an_unknown_argument_is_an_error_of_the_function_that_was_called():
    with pytest.raises(TypeError, match=r"^check\(\) got an unexpected keyword argument 'memory'"):
        tula.check("job.yaml", memory="16GiB")
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'deadline'; did you mean deadline_hours\?"):
        tula.recommend("job.yaml", deadline="2h")


@pytest.mark.parametrize("text", ["", "soon", "-1", "3 months", "minutes"])
def test_a_deadline_that_is_not_a_time_is_refused(text):
    with pytest.raises(SpecError, match="expected hours, or a number with a unit"):
        parse_hours(text)
