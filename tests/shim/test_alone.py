"""The shim goes into other people's Python: what it needs, and what it does where tula is not."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIM = ROOT / "tula_cli" / "shim"
HOOKS = ROOT / "templates" / "tula_hooks.py"
FILES = [*sorted(SHIM.rglob("*.py")), HOOKS]
TRAINERS = {"transformers", "lightning"}
"""Imported by the functions that make their callbacks, and nowhere else."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_python_3_8_and_needs_torch_at_most(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    result = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    result |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    tops = {name.partition(".")[0] for name in result} - sys.stdlib_module_names
    assert tops <= {"torch"} | (TRAINERS if path == HOOKS else set())


def test_torch_is_not_imported_by_importing_the_shim() -> None:
    for path in FILES:
        at_once = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [n for n in at_once if "torch" in ast.unparse(n)], path


def python(code: str, *folders: Path, plan: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run code with the shim on PYTHONPATH before other folders; without site-packages, so that no real torch is met."""
    environment = {"PYTHONPATH": ":".join(map(str, (SHIM, *folders))), "PATH": "/usr/bin:/bin"}
    environment |= {"TULA_PLAN": str(plan)} if plan else {}
    command = [getattr(sys, "_base_executable", sys.executable), "-c", code]
    return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=60, check=False)


ASK = "import sys; print([type(f).__name__ for f in sys.meta_path if type(f).__module__ == 'sitecustomize'], sorted(m for m in sys.modules if m.startswith('tula')))"


def test_nothing_happens_outside_of_tula() -> None:
    assert python(ASK).stdout.strip() == "[] []"


def test_nothing_but_a_finder_is_there_before_torch(tmp_path: Path) -> None:
    done = python(ASK, plan=tmp_path / "absent.json")
    assert (done.stdout.strip(), done.returncode) == ("['TorchImportHook'] []", 0)


def test_the_sitecustomize_that_is_hidden_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.hidden = __file__, __name__\n")
    done = python("import sys; print(sys.hidden)", tmp_path)
    assert done.stdout.strip() == str((str(tmp_path / "sitecustomize.py"), "sitecustomize")), done.stderr


def test_a_plan_that_cannot_be_followed_ends_the_script_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("ran = True\n")
    done = python("import torch; print(torch.ran)", tmp_path, plan=tmp_path / "absent.json")
    assert done.returncode == 1
    assert (
        done.stderr.startswith(f"tula: the plan {tmp_path / 'absent.json'} cannot be read")
        and "Traceback" not in done.stderr
    )


def test_the_three_lines_do_nothing_outside_of_tula(tmp_path: Path) -> None:
    code = (
        "import tula_hooks as tula; o = object(); assert tula.wrap(o, None) is o; tula.save(print); "
        "tula.step(samples=3, loss=1.0); tula.saved('x'); print(repr(tula.asked()))"
    )
    done = python(code, HOOKS.parent)
    assert done.stdout.strip() == "''", done.stderr


def test_a_script_that_clears_its_environment_still_imports(tmp_path: Path) -> None:
    (tmp_path / "later.py").write_text("print('imported')")
    shim = Path(__file__).parents[2] / "tula_cli" / "shim"
    environment = {"PYTHONPATH": str(shim), "TULA_PLAN": str(tmp_path / "plan.json"), "TULA_CODE": str(tmp_path)}
    (tmp_path / "torch.py").write_text("")  # whose import would be hooked
    script = "import os; os.environ.clear(); import later, torch"
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd="/", capture_output=True, text=True)
    assert done.stdout == "imported\n", done.stderr
