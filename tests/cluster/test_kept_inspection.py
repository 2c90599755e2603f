import os
import time
from pathlib import Path

import make_runs as make
import pytest
from make_results import make_inspection

from tula_cli.cluster import inspection as kept_inspection
from tula_cli.cluster.inspection import (
    BUILDING,
    CACHE_FOLDER,
    CachedInspection,
    find_newest_change,
    list_inspection_dependencies,
)
from tula_cli.errors import JobFailed


def inspection():
    return make_inspection(dataset_size=300, eval_size=50, parameters=1000, hardware="cpu")


class Built:
    """Counts how often model and dataset are built, and what was said of it."""

    def __init__(self, root: Path) -> None:
        self.root, self.count, self.said = root, 0, []

    def build(self, spec):
        self.count += 1
        return inspection()

    def inspect(self, spec=None, *, facts=list_inspection_dependencies, **options):
        kept = CachedInspection(self.root, self.build, note=self.said.append, facts=facts, **options)
        return kept(spec or make.spec())


@pytest.fixture
def built(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Built(tmp_path / "tula-runs")


def entries(built):
    return sorted((built.root / CACHE_FOLDER).glob("*.json"))


def test_a_second_inspection_builds_nothing_and_says_so(built):
    assert built.inspect() == built.inspect() == inspection()
    assert built.count == 1
    assert built.said[0] == BUILDING and "sizes measured" in built.said[1] and "--fresh" in built.said[1]


@pytest.mark.parametrize("part", [name for name in list_inspection_dependencies(make.spec()) if name != "dataset"])
def test_whatever_part_of_the_key_changes_builds_anew(built, part):
    built.inspect()
    built.inspect(facts=lambda spec: {**list_inspection_dependencies(spec), part: "another"})
    assert built.count == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"pricing": {"price": 3, "currency": "EUR"}},
        {"search": {"nodes": [2], "min_steps": 20, "strategy": "full", "max_minutes": 3, "max_batch": 4096}},
        {"optimizer": {"lr": 0.2}, "schedule": {"kind": "cosine"}, "train": {"epochs": 9, "seed": 1}},
        {"name": "another"},
    ],
)
def test_a_setting_that_building_does_not_depend_on_builds_nothing(built, changes):
    assert built.inspect() == built.inspect(make.spec(**changes)) == inspection()
    assert built.count == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"name": "vgg11"}},
        {"dataset": {"name": "digits", "eval_fraction": 0.3}},
        {"transforms": {"train": ["RandomHorizontalFlip"]}},
        {"train": {"epochs": 4, "precision": "bf16"}},
        {"optimizer": {"lr": 0.1, "weight_decay": 1e-4}},
        {"cluster": {"memory_per_gpu": "8GiB"}},
        {"search": {"nodes": [1]}},  # on one rank a step holds less, and has all of the machine's memory
        {"search": {"nodes": [1, 2], "min_batch": 2}},  # down to one sample, on which not every model can train
    ],
)
def test_a_setting_that_building_depends_on_builds_anew(built, changes):
    built.inspect()
    built.inspect(make.spec(**changes))
    assert built.count == 2


GROUPS = [{"parameters": ["norms"]}]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"schedule": {"kind": "rates:first"}}, {"schedule": {"kind": "rates:second"}}),
        ({"ags": {"parameters": ["norms"]}}, {"ags": {"parameters": ["heads"]}}),
        ({"optimizer": {"lr": 0.1, "groups": GROUPS}}, {"optimizer": {"lr": 0.2, "groups": GROUPS}}),  # it is shown
    ],
)
def test_a_name_that_building_resolves_or_a_value_that_it_shows_builds_anew(built, first, second):
    Path("rates.py").touch()
    for changes in (first, second):
        built.inspect(make.spec(train={"epochs": 4, "method": "ags"}, **changes))
    assert built.count == 2


def test_another_folder_builds_nothing_and_another_interpreter_of_the_jobs_does(built, tmp_path, monkeypatch):
    built.inspect()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    built.inspect()
    assert built.count == 1
    for python in ("/opt/a/python", "/opt/b/python"):
        built.inspect(make.spec(cluster={"kind": "slurm", "python": python}))
    assert built.count == 3


def test_another_version_of_a_package_that_the_job_names_builds_anew(built, tmp_path, monkeypatch):
    package = tmp_path / "elsewhere" / "some_models"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    spec = make.spec(model={"name": "some_models.zoo:create"})
    built.inspect(spec)
    built.inspect(spec)
    assert built.count == 1
    os.utime(package / "__init__.py", (1, 1))
    built.inspect(spec)
    assert built.count == 2


def test_nothing_stored_holds_if_the_interpreter_of_the_jobs_cannot_be_asked(built):
    spec = make.spec(cluster={"kind": "slurm", "python": "/missing/python"})
    built.inspect(spec)
    built.inspect(spec)
    assert built.count == 2


def test_a_change_of_the_users_code_builds_anew(built, monkeypatch):
    monkeypatch.syspath_prepend(Path.cwd())
    Path("nets.py").write_text("class Net: pass\n")
    spec = make.spec(model={"name": "nets:Net"})
    built.inspect(spec)
    built.inspect(spec)
    assert built.count == 1
    Path("nets.py").write_text("class Net: size = 2\n")
    built.inspect(spec)
    assert built.count == 2


def test_a_file_more_in_the_dataset_builds_anew(built):
    folder = Path("data") / "train" / "cats"
    folder.mkdir(parents=True)
    os.utime(folder, (1, 1))
    built.inspect()
    (folder / "1.jpg").touch()
    built.inspect()
    assert built.count == 2


def test_a_dataset_that_building_downloads_is_part_of_what_is_kept(built, monkeypatch):
    build = built.build
    monkeypatch.setattr(built, "build", lambda spec: Path("data").mkdir() or build(spec))
    built.inspect()
    monkeypatch.setattr(built, "build", build)
    built.inspect()
    assert built.count == 1


def test_what_changes_while_it_is_built_is_not_kept(built):
    moments = iter(range(9))
    built.inspect(facts=lambda spec: {"code": next(moments), "dataset": None})
    assert entries(built) == []


def test_fresh_builds_anew_and_replaces_what_is_kept(built):
    built.inspect()
    built.inspect(fresh=True)
    assert built.count == 2 and len(entries(built)) == 1


def test_a_damaged_entry_is_built_anew_and_replaced(built):
    built.inspect()
    entries(built)[0].write_text('{"dataset_size": 3')
    assert built.inspect() == built.inspect() == inspection()
    assert built.count == 2


def test_what_failed_is_not_kept(built, monkeypatch):
    def fails(spec):
        raise JobFailed("its code fails")

    monkeypatch.setattr(built, "build", fails)
    with pytest.raises(JobFailed):
        built.inspect()
    assert entries(built) == []


def test_nothing_is_written_where_nothing_may_be_and_its_key_is_found_once(built):
    requests = []
    built.inspect(keep=False, facts=lambda spec: requests.append(spec) or list_inspection_dependencies(spec))
    assert not built.root.exists()
    assert len(requests) == 1


def test_a_folder_that_cannot_be_written_costs_no_answer(built):
    built.root.write_text("a file")
    assert built.inspect() == inspection()


def test_all_but_the_newest_entries_are_removed(built, monkeypatch):
    monkeypatch.setattr(kept_inspection, "MAX_ENTRIES_KEPT", 3)
    folder = built.root / CACHE_FOLDER
    folder.mkdir(parents=True)
    for number in range(4):
        (folder / f"{number}.json").touch()
        os.utime(folder / f"{number}.json", (time.time() - number - 10,) * 2)
    built.inspect()
    names = {path.name for path in entries(built)}
    assert len(names) == 3 and {"0.json", "1.json"} < names


def test_the_newest_change_of_no_dataset_is_none(tmp_path):
    assert find_newest_change(tmp_path / "none") == []
