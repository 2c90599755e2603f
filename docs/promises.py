"""What tests promise of faults: the table of docs/reference/what-happens-when.md, from their marks `promise`.

The tests are read, not imported: that would take torch and a cluster.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
GROUPS = ("a process", "a node", "the scheduler", "the file system", "the run directory", "the command line")
"""What a promise is about, in the order of the page."""


@dataclass(frozen=True)
class Promise:
    """What happens when something does, and the test that shows it."""

    about: str  # one of GROUPS
    when: str
    then: str
    test: str  # tests/x/test_y.py::test_z


def promises(folder: Path = TESTS) -> list[Promise]:
    """Return what the tests of a folder promise, by the page's order.

    Raises:
        ValueError: a mark is not made of three texts, or is about nothing of `GROUPS`.
    """
    found = [one for path in sorted(folder.rglob("test_*.py")) for one in _of_module(path, folder)]
    return sorted(found, key=lambda one: GROUPS.index(one.about))


def _of_module(path: Path, folder: Path) -> Iterator[Promise]:
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
