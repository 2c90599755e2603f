"""`make proof`: which parts run, which results are recorded, and the messages of failures."""

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
import proof
from other_torch import EXTRAS, pin_lowest_versions, split_at_dashes
from proof import (
    PARTS,
    Part,
    derive_seed,
    estimate_minutes,
    hash_tree,
    parse_minutes,
    run_part,
    run_parts,
    select_parts,
)

ROOT = proof.ROOT
TREES = [f"{number:040x}" for number in range(200)]


def file_of(part: Part) -> str:
    """Return the test module or program that a part runs."""
    return next(word for word in part.command if word.endswith(".py"))


def test_without_a_budget_everything_runs_within_75_minutes() -> None:
    assert select_parts(PARTS, TREES[0], None) == list(PARTS)
    assert estimate_minutes(PARTS) <= 75


def test_two_parts_run_at_a_time_and_parts_that_measure_times_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part run_part if the expected number of parts has started when it exits, and none starts while it runs."""
    monkeypatch.setattr(proof, "PARALLEL_PARTS", 2)
    begun = tmp_path / "begun"
    begun.mkdir()
    wait = """
import pathlib, sys, time
folder, name, count = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
(folder / name).touch()
deadline = time.monotonic() + 10
while len(list(folder.iterdir())) < count and time.monotonic() < deadline:
    time.sleep(0.01)
time.sleep(0.2)
print("done")
sys.exit(len(list(folder.iterdir())) != count)
"""

    def part(name: str, count: int, *, alone: bool = False) -> Part:
        return Part(name, 1.0, ("-c", wait, str(begun), name, str(count)), alone)

    parts = [part("last", 4, alone=True), part("one", 2), part("other", 2), part("first alone", 3, alone=True)]
    assert [failed.name for failed in run_parts([*parts[1:], parts[0]], tmp_path, 0)] == []
    assert [failed.name for failed in run_parts([part("wrong", 4)], tmp_path, 0)] == ["wrong"]


def test_selected_parts_fit_the_budget_and_each_short_part_is_selected_for_some_tree() -> None:
    drawn = [select_parts(PARTS, tree, 3.0) for tree in TREES]
    assert drawn == [select_parts(PARTS, tree, 3.0) for tree in TREES]
    assert all(parts and round(sum(part.minutes for part in parts), 6) <= 3.0 for parts in drawn)
    assert {part.name for parts in drawn for part in parts} >= {part.name for part in PARTS if part.minutes <= 3.0}


def test_names_and_seeds_of_parts_are_unique_and_their_files_exist() -> None:
    assert len({part.name for part in PARTS}) == len({derive_seed(part, 0) for part in PARTS}) == len(PARTS)
    assert derive_seed(PARTS[0], 0) != derive_seed(PARTS[0], 1)
    assert all((ROOT / file_of(part)).is_file() for part in PARTS)


def test_the_lowest_allowed_python_is_tested_and_linted() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    python = re.search(r'requires-python = ">=([\d.]+)"', project)[1]  # type: ignore[index]
    command = next(part.command for part in PARTS if part.name == "lowest-versions")
    assert command[1:3] == ("lowest", python)
    assert f'target-version = "py{python.replace(".", "")}"' in project


def test_every_dependency_is_tested_at_its_lowest_version() -> None:
    pins = pin_lowest_versions((ROOT / "pyproject.toml").read_text())
    names = [pin.partition("==")[0] for pin in pins]
    assert len(set(names)) == len(names) >= 16
    assert {"typer", "pydantic", "pandas", "statsmodels", "submitit", "torch", "safetensors", "tensorboard"} <= set(
        names
    )
    assert pin_lowest_versions(
        'dependencies = [\n  "a>=1.2", # why\n  "b-c>=3",\n]\n' + "".join(f"{name} = []\n" for name in EXTRAS)
    ) == [
        "a==1.2",
        "b-c==3",
    ]


def test_each_list_of_arguments_is_a_separate_run_of_pytest() -> None:
    assert list(split_at_dashes(["a", "-m", "b", "--", "c"])) == [["a", "-m", "b"], ["c"]]


def test_mypy_checks_against_the_python_of_the_gpu_dry_run() -> None:
    command = next(part.command for part in PARTS if part.name == "gpu-dry-run-torch-2.11")
    assert f'python_version = "{command[3]}"' in (ROOT / "pyproject.toml").read_text()


def test_each_python_of_the_classifiers_is_tested() -> None:
    """CI uses one of them and a part of `make proof` each of the others; the light workflow uses all."""
    named = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text()))
    of_ci = re.findall(r"image: python:(3\.\d+)-", (ROOT / ".github/workflows/ci.yml").read_text())
    of_parts = [word for part in PARTS for word in part.command if re.fullmatch(r"3\.\d+", word)]
    assert named == {*of_ci, *of_parts} and len(of_ci) == 1
    (matrix,) = re.findall(r"python: \[(.*)\]", (ROOT / ".github/workflows/light.yml").read_text())
    assert named == set(re.findall(r"3\.\d+", matrix))


def test_make_chaos_names_parts() -> None:
    (names,) = re.findall(r"^CHAOS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"soak-16-nodes-1", "recovery"} <= set(names.split()) <= {part.name for part in PARTS}


def test_every_module_with_proof_tests_has_a_part() -> None:
    modules = [path for path in proof.ROOT.glob("tests/**/test_*.py") if path != Path(__file__)]
    marked = {str(path.relative_to(proof.ROOT)) for path in modules if "mark.proof" in path.read_text()}
    assert marked == {name for part in PARTS if Path(name := file_of(part)).name.startswith("test_")}


def test_a_passed_part_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = Part("counts", 1.0, ("-c", f"open({str(tmp_path / 'runs')!r}, 'a').write('{{seed}} '); print('all well')"))
    assert run_part(part, tmp_path, 7) and run_part(part, tmp_path, 7)
    assert (tmp_path / "runs").read_text() == f"{derive_seed(part, 7)} "
    first, second = (line for line in capsys.readouterr().out.splitlines() if line.startswith("counts: passed"))
    assert first.endswith("all well") and "passed before" in second


def test_the_output_of_a_failed_part_is_shown_and_the_part_runs_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = Part("fails", 1.0, ("-c", "print('the reason'); raise SystemExit(3)"))
    assert not run_part(part, tmp_path, 0) and not run_part(part, tmp_path, 0)
    assert capsys.readouterr().out.count("the reason\n\nfails: FAILED with exit code 3") == 2


def test_the_hash_of_a_tree_depends_only_on_its_content(tmp_path: Path) -> None:
    proof.run_git("init", "--quiet", root=tmp_path)
    (tmp_path / "file").write_text("one")
    first = hash_tree(tmp_path)
    (tmp_path / "file").write_text("two")
    second = hash_tree(tmp_path)
    (tmp_path / "file").write_text("one")
    assert first == hash_tree(tmp_path) != second


@pytest.mark.parametrize(("text", "expected"), [("90s", 1.5), ("3m", 3.0), ("1h", 60.0)])
def test_a_budget_may_be_in_hours_minutes_or_seconds(text: str, expected: float) -> None:
    assert parse_minutes(text) == expected


@pytest.mark.parametrize("text", ["3", "m", "threem", "3d", "-1m", ""])
def test_an_invalid_budget_is_rejected(text: str) -> None:
    with pytest.raises(ValueError):
        parse_minutes(text)
