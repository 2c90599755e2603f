"""The rules of the source tree: no import cycles, device code in one module, no question which method it is."""

import ast
import functools
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tula_cli.spec.methods import METHODS

ROOT = Path(__file__).parent.parent


parse = functools.cache(ast.parse)


def modules(root: Path) -> dict[str, Path]:
    """Return the modules of the product under `root` by their dotted names."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((root / "tula_cli").rglob("*.py"))
    }


def imports(name: str, tree: ast.AST, known: dict[str, Path], *, for_types: bool = False) -> set[str]:
    """Return the modules that run when the one of this name does, those imported inside functions too.

    Args:
        name: name of the module.
        tree: its syntax tree.
        known: all modules.
        for_types: whether imports for type checkers count too.
    """
    result = set()
    for node in ast.walk(tree) if for_types else _run_time(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            result |= _relative(node, name, known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            result |= {name if name in known else node.module for name in names}
        elif isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
    return result & known.keys()


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
    """Return the groups of modules that import each other in a circle; imports for type checkers count too."""
    known = modules(root)
    trees = {name: parse(path.read_text()) for name, path in known.items()}
    arrows = {name: imports(name, tree, known, for_types=True) - {name} for name, tree in trees.items()}
    reach = {name: _reached(name, arrows) for name in arrows}
    groups = {frozenset([name, *(other for other in reach[name] if name in reach[other])]) for name in arrows}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reached(start: str, arrows: dict[str, set[str]]) -> set[str]:
    result: set[str] = set()
    ahead = list(arrows[start])
    while ahead:
        name = ahead.pop()
        if name not in result:
            result.add(name)
            ahead += arrows[name]
    return result


WRAPPERS = {"Ortho", "TulaOptimizer", "Lars", "Lamb", "SGDScheduleFree", "AdamWScheduleFree"}
"""Optimizers that methods build from that of the job."""
OWN_FILES = ("tula_cli/worker/methods/", "tula_cli/spec/methods.py", "tula_cli/optim/")


def branches(root: Path) -> list[str]:
    """Return where the product asks which method it is, outside the method's own file."""
    results = []
    for path in modules(root).values():
        name = path.relative_to(root).as_posix()
        if not name.startswith(OWN_FILES):
            results += [f"{name}: {ast.unparse(n)}" for n in ast.walk(parse(path.read_text())) if _asks_which(n)]
    return results


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
    results = []
    for path in modules(root).values():
        name = path.relative_to(root).as_posix()
        if name != DEVICE_CODE and not name.startswith(LIBRARIES):
            results += [f"{name}: {ast.unparse(n)}" for n in ast.walk(parse(path.read_text())) if _of_a_device(n)]
    return results


def _of_a_device(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in OF_DEVICES and isinstance(node.value, ast.Name) and node.value.id == "torch"
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{name}" for name in names]
    return any(
        name.split(".")[0] == "torch" and name.split(".")[1:2] in [[kind] for kind in OF_DEVICES] for name in names
    )


VAGUE_NAMES = {"found", "told", "own", "one", "held", "said", "asked", "beside"}
FIELDS_OF_JSON = {
    ("run/records/recommendations.py", "beside"), ("run/records/scripts.py", "told"), ("services/clean.py", "held"),
    ("services/evaluate.py", "found"), ("worker/measure/node_report.py", "own"),
}  # fmt: skip
"""Names that programs read from `--json` or a run."""


def vague_names(root: Path) -> list[str]:
    """Return the names of variables, arguments and fields that do not say what they hold."""
    results = []
    for path in modules(root).values():
        name = path.relative_to(root / "tula_cli").as_posix()
        for node in ast.walk(parse(path.read_text())):
            stored = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store)
            text = node.arg if isinstance(node, ast.arg) else _last(node) if stored else ""
            if text.strip("_") in VAGUE_NAMES and (name, text) not in FIELDS_OF_JSON:
                results.append(f"{name}: {text}")
    return results


def test_names_say_what_they_hold() -> None:
    assert vague_names(ROOT) == []


def test_device_code_is_in_one_module() -> None:
    assert device_code(ROOT) == []


def test_nobody_asks_which_method_it_is() -> None:
    assert branches(ROOT) == []


def test_pytest_enters_every_folder_with_tests(request: pytest.FixtureRequest) -> None:
    """By default it leaves out folders named build, dist or venv."""
    tests = Path(__file__).parent
    names = {name for path in tests.rglob("test_*.py") for name in path.relative_to(tests).parent.parts}
    pairs = [(name, pattern) for name in names for pattern in request.config.getini("norecursedirs")]
    assert not [name for name, pattern in pairs if fnmatch(name, pattern)]


def test_no_module_imports_itself_in_a_circle() -> None:
    assert cycles(ROOT) == []


def test_a_training_imports_nothing_of_tuning() -> None:
    """Method auto's part is imported by the worker's entry alone, when a training starts that tunes itself."""
    known = modules(ROOT)
    arrows = {name: imports(name, parse(path.read_text()), known) for name, path in known.items()}
    train, entry = "tula_cli.worker.train", "tula_cli.worker.entry"
    tuning = f"{train}.auto_tune"
    assert tuning in known
    assert tuning not in _reached(f"{train}.training", arrows)
    search = f"{train}.rate_search"  # its branches are those of tuning; a task of its own
    assert [name for name in known if tuning in arrows[name]] == [entry, search]
    assert [name for name in known if search in arrows[name]] == ["tula_cli.worker.__main__"]
    tree = parse(known[entry].read_text())
    at_once = ast.Module([node for node in tree.body if not isinstance(node, ast.FunctionDef)], [])
    assert tuning not in imports(entry, at_once, known)


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


def test_a_cycle_of_local_imports_is_detected(tree: Path) -> None:
    product = tree / "tula_cli"
    (product / "cli/check.py").write_text("def f():\n    from tula_cli.spec import job\n    return job\n")
    (product / "spec/job.py").write_text("from tula_cli.cli.check import f\n")
    assert cycles(tree) == [["tula_cli.cli.check", "tula_cli.spec.job"]]


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
    (result,) = device_code(tree)
    assert result.startswith("tula_cli/cli/check.py: ")


def test_a_cycle_of_imports_for_types_is_detected(tree: Path) -> None:
    (tree / "tula_cli/spec/job.py").write_text(
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import tula_cli.cli.check\n"
    )
    (tree / "tula_cli/cli/check.py").write_text("import tula_cli.spec.job\n")
    assert cycles(tree) == [["tula_cli.cli.check", "tula_cli.spec.job"]]


def test_a_tree_that_keeps_the_rules_passes(tree: Path) -> None:
    (tree / "tula_cli/cli/check.py").write_text("import tula_cli.spec.job\n")
    assert not any([cycles(tree), device_code(tree)])
