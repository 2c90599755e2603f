"""The installed package: a wheel contains the templates and configs, and the import rules are enforced."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def python(*arguments: object, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, text=True, capture_output=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two wheels: one built from the tree, one from the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    results = []
    for name, what in (("direct", ["--wheel"]), ("through", [])):  # without --wheel: sdist first, the wheel from it
        built = python("-m", "build", "--no-isolation", *what, "--outdir", folder / name, cwd=ROOT)
        assert built.returncode == 0, built.stdout + built.stderr
        results += (folder / name).glob("*.whl")
    return results


def test_wheels_hold_templates_and_configs_and_no_tests(wheels: list[Path]) -> None:
    assert len(wheels) == 2
    for wheel in wheels:
        names = set(zipfile.ZipFile(wheel).namelist())
        assert {"tula_cli/templates/job.yaml", "tula_cli/configs/quickstart.yaml", "tula_cli/py.typed"} <= names
        assert {"tula_cli/templates/tula_hooks.py", "tula_cli/shim/sitecustomize.py"} <= names
        assert [name for name in names if name.startswith("tula_cli/demo/") and name.endswith("/spec.yaml")]
        assert {"tula_cli/templates/slurm-setup.sh", "tula_cli/templates/slurm-wrapper.sh"} <= names
        assert not [name for name in names if name.startswith("tests/")]


def test_an_installed_wheel_finds_its_templates(wheels: list[Path], tmp_path: Path) -> None:
    zipfile.ZipFile(wheels[0]).extractall(tmp_path / "site")
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); from tula_cli.services.init import make_job_from_template; print(make_job_from_template('local'))"
    done = python("-I", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (ROOT / "templates/job.yaml").read_text().strip()


def test_an_installed_wheel_finds_its_optional_packages(wheels: list[Path], tmp_path: Path) -> None:
    """By the entry points of its own metadata, not by those of the tree that the tests run in."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheels[1]).extractall(site)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r}); from tula_cli.entry_points import load_extra;"
        "extras = [load_extra(name) for name in ('report', 'trackers', 'figures', 'slurm_site')];"
        "print(*(sys.modules[getattr(extra, '__module__', None) or extra.__name__].__file__ for extra in extras))"
    )
    done = python("-I", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [Path(file).parent for file in done.stdout.split()] == [
        site / "tula_cli/extras" / name for name in ("report", "trackers", "figures", "slurm_site")
    ]


def test_an_installed_wheel_answers_from_its_demo_run(wheels: list[Path], tmp_path: Path) -> None:
    zipfile.ZipFile(wheels[1]).extractall(tmp_path / "site")
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); from tula_cli.cli.app import main; main()"
    done = python("-I", "-c", code, "recommend", "--demo", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Demo: ")
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


OF_EXTRAS = "the arrows of the optional packages"


def contracts(tree: Path) -> "subprocess.CompletedProcess[str]":
    # By -c, so that the copy in the working directory is what is looked at.
    code = (
        "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command as c; c(['--no-cache'])"
    )
    return python("-c", code, cwd=tree)


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("services/recommend.py", "import torch", "torch in the worker and the optimizers alone"),
        ("models/cost.py", "from tula_cli import show", "the arrows of the architecture"),
        (
            "models/memory.py",
            "import tula_cli.run.directory",
            "a model of time, memory or cost reads no file and starts no job",
        ),
        ("cluster/launcher.py", "from tula_cli.services import status", "the arrows of the architecture"),
        ("services/status.py", "from tula_cli.worker import device", "the arrows of the architecture"),
        ("worker/build/zoo.py", "from tula_cli.worker.train import loop", "the arrows of the worker"),
        ("words.py", "import rich", "rich in show alone, typer in cli"),
        ("show/status.py", "import typer", "typer in cli alone"),
        (
            "models/choice/candidates.py",
            "from tula_cli.optim import TulaOptimizer",
            "torch in the worker and the optimizers alone",
        ),
        ("optim/gradient_stats.py", "from tula_cli.spec.sections import JobSpec", "the optimizers stand alone"),
        (
            "shim/tula_shim/ranks.py",
            "from tula_cli.errors import TulaError",
            "the shim needs nothing of tula and nothing but torch",
        ),
        ("services/train.py", "import rich", "rich in show alone, typer in cli"),
        ("services/api.py", "from tula_cli.extras.report import page", "the arrows of the architecture"),
        (
            "show/compare.py",
            "if TYPE_CHECKING:\n    from tula_cli.extras.trackers.export import export_runs",
            "the arrows of the architecture",
        ),
        ("extras/trackers/export.py", "from tula_cli.extras.report import formats", OF_EXTRAS),
        ("extras/report/sections.py", "from tula_cli.extras.figures import gradients", OF_EXTRAS),
        ("extras/trackers/payload.py", "import matplotlib", "matplotlib in the report alone"),
        ("models/time/noise.py", "import pathlib", "a model of time, memory or cost reads no file and starts no job"),
    ],
)
def test_a_forbidden_import_breaks_its_contract(tmp_path: Path, module: str, line: str, contract: str) -> None:
    shutil.copytree(ROOT / "tula_cli", tmp_path / "tula_cli", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / "tula_cli" / module
    path.write_text(f"{path.read_text()}\n{line}\n")
    done = contracts(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{contract} BROKEN" in " ".join(done.stdout.split())


def test_the_tree_keeps_its_contracts() -> None:
    done = contracts(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
