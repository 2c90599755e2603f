"""What `--help` shows, and what a shell completes."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tula_cli.cli import app
from tula_cli.cli.options import ExtraCommand

COMMANDS = typer.main.get_command(app.app).commands  # type: ignore[attr-defined]
OF_PACKAGES = {command.name for command in app.WORKFLOW if isinstance(command, ExtraCommand)}
each_command = pytest.mark.parametrize("name", COMMANDS)


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


def test_commands_stand_in_the_order_of_the_work() -> None:
    places = [
        shown("--help").index(f"\n  {name} ") for name in ("init", "check", "profile", "recommend", "train", "status")
    ]
    assert places == sorted(places)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in OF_PACKAGES])
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
