"""Files beside the code that a release needs agree with it."""

import re
from pathlib import Path

import pytest
import yaml

from tula_cli import errors
from tula_cli.version import __version__

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_the_citation_names_this_version_and_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert citation["preferred-citation"]["title"].startswith("Tula: ")
    assert {author["family-names"] for author in citation["preferred-citation"]["authors"]} == {"Tyagi", "Wang"}


def test_agents_page_is_short_and_its_exit_codes_are_those_of_errors() -> None:
    page = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 60
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.TulaError)]
    codes = {(kind.exit_code, kind.code) for kind in classes}
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", page, re.MULTILINE)
    assert len(rows) >= 5
    assert {(int(exit_code), code) for exit_code, code in rows} <= codes


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_command_of_a_workflow_exists(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert any(command == ".ci/run" or command.startswith("make ") for command in commands)
    for command in commands:
        if command.startswith("make "):
            assert command.split()[1] in targets
        elif not command.startswith("git "):
            assert (ROOT / command).is_file()


def test_forms_of_issues_ask_for_what_a_maintainer_needs() -> None:
    forms = {
        path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
        for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")
    }
    assert forms.keys() == {"bug", "prediction", "idea"}
    for form in forms.values():
        assert form["name"] and form["description"]
        assert any(field.get("validations", {}).get("required") for field in form["body"])
