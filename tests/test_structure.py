"""The rules of the tree: short files and functions, small folders, no cycles, and one place for a name."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tula_cli.spec.methods import METHODS

ROOT = Path(__file__).parent.parent
MOST_LINES = 400
MOST_LINES_OF_A_FUNCTION = 45
MOST_IN_A_FOLDER = 12
ROWS_OF_TABLES = {"tula_cli/worker/methods"}
"""Folders with a file a row of a table: they may grow."""
SAME_COMMAND = {"cli", "show", "services"}
"""A command has a file of its name in each of these rooms."""


def modules(root: Path) -> dict[str, Path]:
    """Return the modules of the product under `root` by their dotted names."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((root / "tula_cli").rglob("*.py"))
    }


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each function and its lines without decorators and docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines, first = node.end_lineno - node.lineno + 1, node.body[0]
            if ast.get_docstring(node, clean=False) is not None and first.end_lineno is not None:
                lines -= first.end_lineno - first.lineno + 1
            yield node.name, lines


def imports(name: str, tree: ast.AST, known: dict[str, Path]) -> set[str]:
    """Return the modules that run when the one of this name does, those imported inside functions too."""
    found = set()
    for node in _run_time(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            found |= _relative(node, name, known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & known.keys()


def _relative(node: ast.ImportFrom, name: str, known: dict[str, Path]) -> set[str]:
    above = name.split(".")[: -node.level + (known[name].name == "__init__.py") or None]
    package = ".".join([*above, *([node.module] if node.module else [])])
    names = {f"{package}.{alias.name}" for alias in node.names}
    return {name if name in known else package for name in names}


def _run_time(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    for child in ast.iter_child_nodes(node):
        yield from _run_time(child)


def cycles(root: Path) -> list[list[str]]:
    """Return the groups of modules that import each other in a circle."""
    known = modules(root)
    arrows = {name: imports(name, ast.parse(path.read_text()), known) - {name} for name, path in known.items()}
    reach = {name: _reached(name, arrows) for name in arrows}
    groups = {frozenset([name, *(other for other in reach[name] if name in reach[other])]) for name in arrows}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reached(start: str, arrows: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    ahead = list(arrows[start])
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            ahead += arrows[name]
    return found


def too_long(root: Path) -> list[str]:
    """Return the files and functions that are longer than allowed."""
    found = []
    for path in modules(root).values():
        text, name = path.read_text(), path.relative_to(root).as_posix()
        if len(text.splitlines()) > MOST_LINES:
            found.append(name)
        found += [
            f"{name}:{function}" for function, lines in functions(ast.parse(text)) if lines > MOST_LINES_OF_A_FUNCTION
        ]
    return found


def too_full(root: Path) -> list[str]:
    """Return the folders with more modules, or more folders, than one sees at a look."""
    inside: defaultdict[str, set[str]] = defaultdict(set)
    for path in modules(root).values():
        if path.name not in ("__init__.py", "__main__.py"):
            inside[path.parent.relative_to(root).as_posix()].add(path.name)
    folders = Counter(Path(folder).parent.as_posix() for folder in inside)
    return sorted(
        {folder for folder, names in inside.items() if len(names) > MOST_IN_A_FOLDER and folder not in ROWS_OF_TABLES}
        | {folder for folder, count in folders.items() if count > MOST_IN_A_FOLDER}
    )


def twice(root: Path) -> list[str]:
    """Return the file names that stand in two places, but for those of one command."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for name, path in modules(root).items():
        if path.name not in ("__init__.py", "__main__.py"):
            places[path.name].append(name.split(".")[1])
    return sorted(name for name, rooms in places.items() if len(rooms) > 1 and not _of_one_command(rooms))


def _of_one_command(rooms: list[str]) -> bool:
    return set(rooms) <= SAME_COMMAND and len(set(rooms)) == len(rooms)


WRAPPERS = {"AdaScale", "Ortho", "TulaOptimizer", "Lars", "Lamb", "SGDScheduleFree", "AdamWScheduleFree"}
"""What methods make of an optimizer."""
OWN_FILES = ("tula_cli/worker/methods/", "tula_cli/spec/methods.py", "tula_cli/optim/")


def branches(root: Path) -> list[str]:
    """Return where the product asks which method it is, outside the method's own file."""
    found = []
    for path in modules(root).values():
        name = path.relative_to(root).as_posix()
        if not name.startswith(OWN_FILES):
            found += [f"{name}: {ast.unparse(n)}" for n in ast.walk(ast.parse(path.read_text())) if _asks_which(n)]
    return found


def _asks_which(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
        return any(isinstance(part, ast.Name | ast.Attribute) and _last(part) in WRAPPERS for part in ast.walk(node))
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    named = any(isinstance(part, ast.Constant) and part.value in METHODS for side in sides for part in ast.walk(side))
    return named and any(isinstance(side, ast.Name | ast.Attribute) and "method" in _last(side) for side in sides)


def _last(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


LIBRARIES = ("tula_cli/optim/", "tula_cli/shim/")
"""They stand alone: what they do with a GPU cannot be in the worker."""
DEVICE_CODE = "tula_cli/worker/device.py"
OF_DEVICES = {"cuda", "accelerator", "xpu", "mps"}


def device_code(root: Path) -> list[str]:
    """Return where something of torch's that is a device's is used outside the module of device code."""
    found = []
    for path in modules(root).values():
        name = path.relative_to(root).as_posix()
        if name != DEVICE_CODE and not name.startswith(LIBRARIES):
            found += [f"{name}: {ast.unparse(n)}" for n in ast.walk(ast.parse(path.read_text())) if _of_a_device(n)]
    return found


def _of_a_device(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in OF_DEVICES and isinstance(node.value, ast.Name) and node.value.id == "torch"
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{name}" for name in names]
    return any(
        name.split(".")[0] == "torch" and name.split(".")[1:2] in [[kind] for kind in OF_DEVICES] for name in names
    )


def test_device_code_is_in_one_module() -> None:
    assert device_code(ROOT) == []


def test_nobody_asks_which_method_it_is() -> None:
    assert branches(ROOT) == []


def test_files_and_functions_can_be_read_at_a_sitting() -> None:
    assert too_long(ROOT) == []


def test_folders_can_be_seen_at_a_look() -> None:
    assert too_full(ROOT) == []


def test_no_module_imports_itself_in_a_circle() -> None:
    assert cycles(ROOT) == []


def test_a_training_imports_nothing_of_tuning() -> None:
    """Method auto's part is imported by the worker's entry alone, when a training starts that tunes itself."""
    known = modules(ROOT)
    arrows = {name: imports(name, ast.parse(path.read_text()), known) for name, path in known.items()}
    train, entry = "tula_cli.worker.train", "tula_cli.worker.entry"
    tuning = {f"{train}.self_tuning", f"{train}.tuning"}
    assert tuning <= known.keys()
    assert not tuning & _reached(f"{train}.training", arrows)
    assert tuning <= _reached(entry, arrows)
    assert [name for name in known if f"{train}.self_tuning" in arrows[name]] == [entry]
    tree = ast.parse(known[entry].read_text())
    at_once = ast.Module([node for node in tree.body if not isinstance(node, ast.FunctionDef)], [])
    assert not tuning & imports(entry, at_once, known)


def test_a_file_name_says_where_a_thing_lives() -> None:
    assert twice(ROOT) == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a product of two modules that keeps the rules."""
    for name in ("cli/check.py", "spec/job.py"):
        (tmp_path / "tula_cli" / name).parent.mkdir(parents=True)
        (tmp_path / "tula_cli" / name).write_text("X = 1\n")
    return tmp_path


def test_a_circle_of_relative_imports_is_seen(tree: Path) -> None:
    (tree / "tula_cli/cli/check.py").write_text("from .run import g\nfrom ..spec import job\n")
    (tree / "tula_cli/cli/run.py").write_text("from . import check\n")
    (tree / "tula_cli/spec/job.py").write_text("def f():\n    from ..cli.check import g\n    return g\n")
    assert cycles(tree) == [["tula_cli.cli.check", "tula_cli.cli.run", "tula_cli.spec.job"]]


def test_breaches_are_seen(tree: Path) -> None:
    product = tree / "tula_cli"
    (product / "cli/check.py").write_text("def f():\n    from tula_cli.spec import job\n    return job\n")
    (product / "spec/job.py").write_text("from tula_cli.cli.check import f\n" + "X = 1\n" * MOST_LINES)
    (product / "spec/check.py").write_text("def g():\n    '''Doc.'''\n" + "    X = 1\n" * MOST_LINES_OF_A_FUNCTION)
    for number in range(MOST_IN_A_FOLDER + 1):
        (product / f"cli/part{number}.py").write_text("")
    assert cycles(tree) == [["tula_cli.cli.check", "tula_cli.spec.job"]]
    assert too_long(tree) == ["tula_cli/spec/check.py:g", "tula_cli/spec/job.py"]
    assert too_full(tree) == ["tula_cli/cli"]
    assert twice(tree) == ["check.py"]


@pytest.mark.parametrize(
    "line",
    ["spec.train.method == 'polo'", "method in ('ags', 'static')", "'polo' in grid.methods", "isinstance(o, Ortho)"],
)
def test_a_branch_on_a_method_is_seen(tree: Path, line: str) -> None:
    (tree / "tula_cli/cli/check.py").write_text(f"if {line}:\n    X = 1\n")
    assert branches(tree) == [f"tula_cli/cli/check.py: {line}"]


@pytest.mark.parametrize(
    "line",
    ["torch.cuda.synchronize()", "n = torch.accelerator.device_count()", "import torch.cuda", "from torch import cuda",
     "from torch.cuda import Event"],
)  # fmt: skip
def test_device_code_elsewhere_is_seen(tree: Path, line: str) -> None:
    (tree / "tula_cli/cli/check.py").write_text(f"def f():\n    {line}\n")
    (tree / "tula_cli/worker").mkdir()
    (tree / DEVICE_CODE).write_text("import torch.cuda\n")
    (tree / "tula_cli/spec/job.py").write_text("from torch.version import cuda\nX = torch.version.cuda\n")
    (found,) = device_code(tree)
    assert found.startswith("tula_cli/cli/check.py: ")


def test_a_tree_that_keeps_the_rules_passes(tree: Path) -> None:
    (tree / "tula_cli/show").mkdir()
    (tree / "tula_cli/show/check.py").write_text(
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import tula_cli.cli.check\n"
    )
    (tree / "tula_cli/cli/check.py").write_text("import tula_cli.show.check\n")
    assert not any([cycles(tree), too_long(tree), too_full(tree), twice(tree), device_code(tree)])
