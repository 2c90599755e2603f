"""`tula recommend --demo`: the answer from measurements that are shipped with tula."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from isolation import isolate_environment

from tula_cli.assets import find_asset
from tula_cli.cli import app
from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import Measured
from tula_cli.show.screen import Screen

MAX_BYTES = 200_000
COUNT_TORCH = """
import sys
from tula_cli.cli import app
code = app.run(sys.argv[1:])
sys.exit(code or "torch" in sys.modules)
"""


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    isolate_environment(monkeypatch, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_demo(*options: str) -> tuple[int, str, str]:
    screen = Screen(out=io.StringIO(), err=io.StringIO())
    code = app.run(["recommend", "--demo", *options], screen=screen)
    return code, screen.out.getvalue(), screen.err.getvalue()


def list_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_demo_chooses_among_measured_and_predicted_configurations() -> None:
    code, out, err = run_demo("--json")
    assert code == 0, err
    data = json.loads(out)["data"]
    assert "Pollux" in data["demo"]
    assert not data["saved"]
    assert {row["measured"] for row in data["rows"]} == {True, False}
    assert data["choice"]["nodes"] > 1
    assert 0 < data["choice"]["hours_low"] < data["choice"]["hours"] < data["choice"]["hours_high"]
    assert data["choice"]["cost"] > 0


def test_the_demo_shows_where_its_numbers_come_from_and_how_to_get_ones_own() -> None:
    code, out, _ = run_demo()
    assert code == 0
    assert out.splitlines()[0].startswith("Demo: ")
    assert "tula init" in out.splitlines()[-1]


@pytest.mark.parametrize(
    "options",
    [
        ("--objective", "time"),
        ("--objective", "cost", "--deadline", "1"),
        ("--objective", "accuracy-time"),
        ("--explain",),
        ("--all",),
        ("--set", "pricing.price=2"),
        ("--max-nodes", "2"),
    ],
)
def test_the_demo_takes_the_options_of_recommend(options: tuple[str, ...]) -> None:
    code, out, err = run_demo(*options, "--json")
    assert code == 0, err
    assert json.loads(out)["data"]["choice"]["nodes"] in (1, 2, 4, 8, 16)


def test_the_demo_refuses_what_it_cannot_measure() -> None:
    code, _, err = run_demo("--objective", "energy")
    assert code != 0
    assert "energy" in err


@pytest.mark.parametrize("options", [("job.yaml",), ("--run", "digits"), ("--save",)])
def test_the_demo_takes_no_run_and_saves_nothing(options: tuple[str, ...]) -> None:
    code, _, err = run_demo(*options)
    assert code == 2
    assert "remove the job" in err


def test_the_demo_writes_nothing(empty_folder: Path) -> None:
    before = list_files(find_asset("demo"))
    assert run_demo()[0] == run_demo("--all")[0] == 0
    assert list_files(find_asset("demo")) == before
    assert list(empty_folder.iterdir()) == []


def test_the_demo_needs_no_torch(empty_folder: Path) -> None:
    words = [sys.executable, "-c", COUNT_TORCH, "recommend", "--demo", "--explain"]
    done = subprocess.run(words, cwd=empty_folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_the_demo_is_small_and_its_probes_are_published_measurements() -> None:
    files = list_files(find_asset("demo"))
    assert sum(map(len, files.values())) < MAX_BYTES
    results = RunDir.find_newest(find_asset("demo")).read_results()
    assert len(results) >= 8
    for probe in results:
        assert isinstance(probe, Measured)
        assert len(probe.step_times) == 1  # the table has the mean step time
        assert probe.environment.hardware == "Tesla T4"
        assert probe.overheads.eval_batch is None


def test_a_large_difference_within_noise_is_called_uncertain() -> None:
    code, out, _ = run_demo("--nodes", "64", "--json")
    headline = json.loads(out)["data"]["headline"]
    assert code == 0 and headline["time"]["within_noise"] and headline["time"]["ratio"] > 1.1
    assert re.search(r": time uncertain \(\S+ -> \S+ min, within noise\), \d+x more expensive ", headline["text"])
