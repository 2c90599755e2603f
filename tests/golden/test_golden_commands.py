"""The answers, messages and exit codes of every command on the recorded runs are those that are expected."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import golden
import pytest
from case_checks import check_case, make_parameters
from cases import CASES, Case
from recorded_runs import PYTHON, RUNS
from run_cases import Commands

HERE = Path(__file__).parent
PUBLIC = {
    "Run", "TulaError", "__version__", "check", "check_nodes", "compare", "diff", "evaluate", "export", "observed_jobs",
    "find_largest_batch", "find_learning_rate", "plan_trainings", "profile", "recommend", "rehearse", "report", "report_text", "status", "train",
}  # fmt: skip


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    commands = Commands(tmp_path_factory.mktemp("golden"))
    yield commands
    commands.close()


@pytest.mark.torch
@pytest.mark.parametrize("case", make_parameters((case for case in CASES if not case.package), slow=pytest.mark.proof))
def test_a_command_answers_as_expected(case: Case, commands: Commands) -> None:
    check_case(case, commands)


def test_every_expected_file_is_of_a_case() -> None:
    from trainings import TRAININGS, WEIGHTS

    names = {case.name for case in CASES} | {f"train-{training.name}" for training in TRAININGS}
    assert {path.stem for path in golden.EXPECTED.glob("*.json")} == names
    assert {path.stem for path in WEIGHTS.glob("*.json")} == {training.name for training in TRAININGS}
    assert len(names) == len(CASES) + len(TRAININGS), "two cases have the same name"
    kept = {path.stem: set(golden.load_sentences(path.stem)) for path in golden.EXPECTED.glob("sentences/*.txt")}
    assert all(
        cases <= names and {golden.parse_command(case) for case in cases} == {command}
        for command, cases in kept.items()
    )


def test_recorded_runs_name_no_path_of_the_recording() -> None:
    texts = {path.name: path.read_text() for path in RUNS.glob("*.json")}
    paths = {(name, path) for name, text in texts.items() for path in re.findall(r"[\w@./-]*/site-packages/", text)}
    assert texts and {path for _, path in paths if not path.startswith(f"{PYTHON}/")} == set(), paths


def test_nothing_internal_is_used() -> None:
    """Neither these modules, nor what they import of the helpers, nor the code of a case knows tula but by its public API."""
    paths = [*HERE.glob("*.py"), *HERE.glob("work/*.py")]
    seen: set[Path] = set()
    texts = [(case.name, case.code) for case in CASES if case.code]
    while paths:
        path = paths.pop()
        if path in seen:
            continue
        seen.add(path)
        texts.append((path.name, path.read_text()))
        names = re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
        paths += [helper for name in names if (helper := HERE.parent / "helpers" / f"{name}.py").exists()]
    assert len(texts) > 15
    for name, text in texts:
        assert internal(ast.parse(text)) == [], name


def internal(tree: ast.AST) -> list[str]:
    """Return what a program uses of tula that is not public."""
    uses = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            uses += [alias.name for alias in node.names if alias.name.startswith("tula_cli.")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tula_cli":
            uses.append(ast.unparse(node))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tula":
            uses += [] if node.attr in PUBLIC else [ast.unparse(node)]
    return uses


@pytest.mark.parametrize("text", ["import tula_cli.run.directory", "from tula_cli.spec import load", "tula.services"])
def test_internal_use_is_noticed(text: str) -> None:
    assert internal(ast.parse(text))
