"""`tula export`: what is sent beside a run."""

import inspect

import pytest
from typer.testing import CliRunner

import tula_cli as tula
from tula_cli.cli import app
from tula_cli.options import ExportRequest, list_fields


def test_the_command_and_the_function_take_every_field_of_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    help_text = CliRunner().invoke(app.app, ["export", "--help"]).output
    parameters = inspect.signature(tula.export).parameters
    for field, option in list_fields(ExportRequest):
        assert parameters[field.name].default == field.default
        assert option is not None and option.make_flag(field.name) in help_text
