import json
import os
import subprocess
import sys

import pytest

from tula_cli.host.installed import PROGRAM, read_installed_versions


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of packages that python looks through."""
    (tmp_path / "my_nets" / "big").mkdir(parents=True)
    for name in ("__init__.py", "big/__init__.py", "big/wide.py", "other.py"):
        (tmp_path / "my_nets" / name).write_text("raise AssertionError('imported')\n")
    (tmp_path / "My_Nets-0.1.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_package_is_reported_by_its_metadata_and_its_files_without_an_import(site):
    [names, files] = read_installed_versions(["my_nets.big.wide"])["my_nets.big.wide"]
    assert names == ["My_Nets-0.1.dist-info"] and len(files) == 3 and "my_nets" not in sys.modules


@pytest.mark.parametrize(("changed", "tells"), [("big/wide.py", True), ("__init__.py", True), ("other.py", False)])
def test_a_change_of_a_file_that_is_imported_tells(site, changed, tells):
    before = read_installed_versions(["my_nets.big.wide"])
    os.utime(site / "my_nets" / changed, (1, 1))
    assert (read_installed_versions(["my_nets.big.wide"]) != before) is tells


def test_a_module_that_is_not_there_has_nothing(site):
    assert read_installed_versions(["nowhere.x", "my_nets.none"])["nowhere.x"] == [[], []]


def test_an_interpreter_answers_for_itself(site):
    done = subprocess.run([sys.executable, "-m", PROGRAM, "torch"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == json.loads(json.dumps(read_installed_versions(["torch"])))
