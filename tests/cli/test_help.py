"""The output of `--help`, and shell completion."""

import ast
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tula_cli.cli import app
from tula_cli.cli.options import ExtraCommand
from tula_cli.show.screen import Screen

COMMANDS = app.COMMANDS
each_command = pytest.mark.parametrize(
    "name", [name for name, command in COMMANDS.items() if not isinstance(command, ExtraCommand)]
)


def shown(*words: str) -> str:
    return CliRunner().invoke(app.app, words, prog_name="tula").output


def completed(words: str) -> list[str]:
    """Return what bash is offered for the last, unfinished word."""
    environ = {"_TULA_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    command = [sys.executable, "-m", "tula_cli"]
    return subprocess.run(command, env=environ, text=True, capture_output=True, check=True).stdout.split()


def test_help_has_a_short_name() -> None:
    assert shown("-h") == shown("--help")
    assert shown("train", "-h") == shown("train", "--help")


def test_the_commands_of_the_workflow_are_listed_first_in_the_order_of_use() -> None:
    before, _, after = shown("--help").partition("\nMore commands:\n")
    listed = [line.split()[0] for line in before.partition("\nWorkflow:\n")[2].splitlines() if line]
    assert listed == ["init", "check", "profile", "recommend", "train", "status"]
    assert {line.split()[0] for line in after.splitlines() if line} == set(COMMANDS) - set(listed)


def test_no_description_in_the_list_of_commands_is_cut() -> None:
    assert "..." not in shown("--help").partition("\nWorkflow:\n")[2]


@each_command
def test_help_shows_every_option_once_and_the_ordinary_ones_fit_a_screen(name: str) -> None:
    text = shown(name, "--help")
    panels = re.split(r"^(?:Arguments|Options|Advanced):$", text, maxsplit=1, flags=re.MULTILINE)[1]
    for param in COMMANDS[name].build_command().params:
        if param.param_type_name == "option":
            name_of_option = max(param.opts, key=len)
            assert len(re.findall(rf"^  (?:-\w, )?{name_of_option}(?![\w-])", panels, re.MULTILINE)) == 1, param.opts
    ordinary = re.split(r"^(?:Advanced|Output):$", text, flags=re.MULTILINE)[0]
    assert len(ordinary.partition("\nOptions:\n")[2].splitlines()) <= 30


@each_command
def test_a_command_takes_the_name_of_a_run_or_a_job_file_as_its_argument(name: str) -> None:
    if name not in ("init", "list", "observe"):
        assert "run" in shown(name, "--help").partition("\nArguments:\n")[2].split("\n\n")[0].lower()


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("run job.yaml", "tula train job.yaml"),
        ("job.yaml", "tula train job.yaml"),
        ("start job.yaml", "tula profile job.yaml"),
        ("ls", "tula list"),
        ("kill digits", "tula cancel digits"),
        ("help train", "tula train --help"),
        ("version", "tula --version"),
        ("trian job.yaml", "train"),
        ("status --run", "tula status --help"),
    ],
)
def test_a_wrong_first_word_suggests_the_right_command(
    words: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(words.split()) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and hint.startswith("HINT: ") and command in hint


def test_each_other_name_suggests_a_command_that_exists() -> None:
    for word, hint in app.COMMAND_HINTS.items():
        assert word not in COMMANDS
        commands = set(re.findall(r"tula (\w+)", hint))
        assert commands <= set(COMMANDS) and (commands or word in ("version", "help"))


@each_command
def test_the_list_of_commands_shows_the_summary_of_each_function(name: str) -> None:
    """The list has it from a table, because it imports no command."""
    function = COMMANDS[name].load_function()
    assert inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0] == COMMANDS[name].summary
    assert function.__name__.rstrip("_") == name


def test_the_list_of_commands_imports_none_of_them() -> None:
    code = (
        "import sys; from tula_cli.cli import app; app.run(['--help']);"
        "print([name for name in sys.modules if name.startswith('tula_cli.') and name.count('.') > 1])"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    imported = set(ast.literal_eval(done.stdout.splitlines()[-1]))
    assert {name for name in imported if name.startswith("tula_cli.cli.")} == {
        "tula_cli.cli.app",
        "tula_cli.cli.options",
    }
    assert not any(name.startswith(("tula_cli.services", "tula_cli.models")) for name in imported)


@each_command
def test_help_ends_with_an_example_that_is_understood(name: str) -> None:
    *_, last = shown(name, "--help").strip().splitlines()
    tula, command, *arguments = shlex.split(last.removeprefix("  Example: "))
    assert (tula, command) == ("tula", name)
    COMMANDS[name].make_context(name, arguments)


def test_a_shell_completes_commands_options_and_values() -> None:
    assert completed("tula rec") == ["recommend"]
    assert "--objective" in completed("tula recommend --ob")
    assert completed("tula recommend --objective acc") == ["accuracy-time"]


def test_completion_is_installed_for_a_shell(tmp_path: Path) -> None:
    command = shlex.join([sys.executable, "-m", "tula_cli", "--install-completion", "bash"])
    # The shell is looked for among the parents; bash stays one where another command follows.
    in_bash = ["bash", "-c", f"{command}; exit $?"]
    done = subprocess.run(
        in_bash, env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = (tmp_path / ".bash_completions").iterdir()
    assert str(written) in (tmp_path / ".bashrc").read_text()


@each_command
def test_an_option_with_one_value_that_is_given_twice_is_an_error(name: str) -> None:
    for param in COMMANDS[name].build_command().params:
        if negative := getattr(param, "secondary_opts", ()):
            words = [param.opts[0], negative[0]]
        elif param.param_type_name == "option" and not (param.multiple or param.is_flag):
            words = [param.opts[0], "1", param.opts[-1], "1"]
        else:
            continue
        assert shown(name, *words, "--help").startswith("Usage:")
        err = io.StringIO()
        assert app.run([name, *words], screen=Screen(out=io.StringIO(), err=err)) == 2
        assert err.getvalue().startswith(f"error: {param.opts[0]}") and "is given 2 times" in err.getvalue()


def test_lists_and_plain_flags_may_be_repeated() -> None:
    words = ["recommend", "--demo", "--demo", "--json", "--json", "--set", "pricing.price=2", "--set", "train.epochs=3"]
    assert app.run(words, screen=Screen(out=io.StringIO(), err=io.StringIO())) == 0


def test_a_line_with_a_repeated_option_can_be_completed() -> None:
    assert "--no-wait" in completed("tula train --nodes 4 --nodes 2 --no")
