"""Read the rows of docs/reference/what-happens-when.md from the marks `promise` of tests.

The tests are parsed, not imported, because importing them needs torch and a cluster.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
GROUPS = ("a process", "a node", "the scheduler", "the file system", "the run directory", "the command line")
"""Groups of promises, in the order of the page."""


@dataclass(frozen=True)
class Promise:
    """A fault, the reaction to it, and the test that checks the reaction."""

    about: str  # one of GROUPS
    when: str
    then: str
    test: str  # tests/x/test_y.py::test_z


def promises(folder: Path = TESTS) -> list[Promise]:
    """Return the promises of the tests in a folder, in the order of the page.

    Raises:
        ValueError: a mark does not have three texts, or its first one is not in `GROUPS`.
    """
    all_promises = [promise for path in sorted(folder.rglob("test_*.py")) for promise in _read_module(path, folder)]
    return sorted(all_promises, key=lambda promise: GROUPS.index(promise.about))


def _read_module(path: Path, folder: Path) -> Iterator[Promise]:
    text = path.read_text(encoding="utf-8")
    if "mark.promise(" not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef):
            continue
        test = f"{path.relative_to(folder.parent).as_posix()}::{node.name}"
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
                words = [ast.literal_eval(argument) for argument in mark.args]
                if len(words) != 3 or words[0] not in GROUPS:
                    raise ValueError(f"{test}: promise(about, when, then), about one of {', '.join(GROUPS)}: {words}")
                about, when, then = words
                yield Promise(about, when, then, test)
