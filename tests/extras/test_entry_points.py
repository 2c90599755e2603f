"""The optional packages are found by their entry points, and what one lacks is named with the extra that installs it."""

import inspect
import os
import shlex
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest

from tula_cli import entry_points
from tula_cli.cli import app
from tula_cli.cli.options import ExtraCommand
from tula_cli.entry_points import GROUP, load_extra, load_extra_if_installed
from tula_cli.errors import SpecError
from tula_cli.run.package import write_package_archive
from tula_cli.show.screen import Screen

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = tuple(PROJECT["entry-points"][GROUP])
COMMANDS = [command for command in app.COMMANDS.values() if isinstance(command, ExtraCommand)]


def test_every_optional_package_has_a_folder_an_entry_point_and_a_pip_extra() -> None:
    folders = {path.parent.name for path in (ROOT / "tula_cli/extras").glob("*/__init__.py")}
    assert folders == set(PACKAGES) <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("name", PACKAGES)
def test_an_entry_point_names_the_object_of_its_package(name: str) -> None:
    assert load_extra(name) is load_extra_if_installed(name) is import_module(f"tula_cli.extras.{name}").package


def test_a_source_tree_that_is_only_on_the_path_has_the_packages_of_its_project_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    packages = {name: import_module(f"tula_cli.extras.{name}").package for name in PACKAGES}
    assert {name: load_extra_if_installed(name) for name in PACKAGES} == packages


def test_an_installed_tree_has_the_packages_of_its_metadata(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A project file of another package may lie beside it."""
    entry = metadata.EntryPoint("report", "tula_cli.extras.report:package", GROUP)
    monkeypatch.setattr(metadata, "entry_points", lambda **_: (entry,))
    monkeypatch.setattr(entry_points, "PROJECT_FILE", tmp_path / "pyproject.toml")
    assert load_extra_if_installed("report") and load_extra_if_installed("trackers") is None
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n')
    assert load_extra_if_installed("report") and load_extra_if_installed("trackers") is None


def test_a_package_that_is_not_installed_is_named_with_its_extra() -> None:
    with pytest.raises(SpecError, match="optional package weather is not installed") as error:
        load_extra("weather")
    assert "pip install 'tula-cli[weather]'" in error.value.hint
    assert load_extra_if_installed("weather") is None


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path, in which an installed package has the entry points `lacking` and `gone`."""
    (tmp_path / "weather-1.dist-info").mkdir()
    (tmp_path / "weather-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: weather\nVersion: 1\n")
    (tmp_path / "weather-1.dist-info/entry_points.txt").write_text(
        f"[{GROUP}]\nlacking = of_weather:package\ngone = of_no_module:package\n"
    )
    (tmp_path / "of_weather.py").write_text("import barometer\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_library_that_a_package_lacks_is_named_with_its_extra(installed: Path) -> None:
    with pytest.raises(SpecError, match="optional package lacking needs barometer, which is missing") as error:
        load_extra("lacking")
    assert "pip install 'tula-cli[lacking]'" in error.value.hint


def test_an_entry_point_whose_package_was_removed_is_that_of_no_package(installed: Path) -> None:
    assert [entry.name for entry in metadata.entry_points(group=GROUP, name="gone")] == ["gone"]
    with pytest.raises(SpecError, match="optional package gone is not installed"):
        load_extra("gone")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_shows_the_summary_of_the_function(command: ExtraCommand) -> None:
    """`tula --help` has it from the core, `tula COMMAND --help` from the package."""
    text = inspect.cleandoc(command.load_function().__doc__ or "")
    assert text.partition("\n\n")[0] == command.summary
    assert command.load_function().__name__ == command.name


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_command_of_a_package_that_is_not_installed_names_the_extra(
    command: ExtraCommand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, f"tula_cli.extras.{command.module}", None)
    assert app.run([command.name]) == SpecError.exit_code
    assert f"pip install 'tula-cli[{command.module}]'" in capsys.readouterr().err
    assert app.run([command.name, "--json"], screen=Screen()) == SpecError.exit_code


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_ends_with_an_example_that_is_understood(
    command: ExtraCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    app.run([command.name, "--help"])
    assert capsys.readouterr().out.strip().endswith(f"Example: {command.example}")
    tula, name, *arguments = shlex.split(command.example)
    assert (tula, name) == ("tula", command.name)
    command.make_context(name, arguments)


def test_a_job_finds_the_optional_packages_in_the_archive_of_its_run(tmp_path: Path) -> None:
    """Also where tula is installed for nobody: its metadata is in the archive."""
    place = write_package_archive(tmp_path)
    program = (
        "import sys; sys.path = [path for path in sys.path if 'site-packages' not in path];"
        "from tula_cli.entry_points import load_extra;"
        "print(load_extra('trackers').__module__, load_extra('report').__module__)"
    )
    environ = {**os.environ, "PYTHONPATH": str(place)}
    done = subprocess.run([sys.executable, "-c", program], env=environ, cwd=tmp_path, text=True, capture_output=True)
    assert done.stdout.split() == ["tula_cli.extras.trackers", "tula_cli.extras.report"], done.stderr
