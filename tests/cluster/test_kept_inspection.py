import os
import time
from pathlib import Path

import make_runs as make
import pytest

from tula_cli.cluster import kept_inspection
from tula_cli.cluster.kept_inspection import (
    BUILDING,
    FOLDER,
    MOST_KEPT,
    KeptInspection,
    facts_of,
    newest_change,
    packages,
)
from tula_cli.errors import JobFailed
from tula_cli.run.records.inspections import Inspection


def inspection():
    return Inspection(
        dataset_size=300, eval_size=50, classes=10, sample_shape=(1, 8, 8), parameters=1000, footprints=(), estimate_error="",
        device="cpu", hardware="cpu", capacity=None, cpus=2,
    )  # fmt: skip


class Built:
    """Counts how often model and dataset are built, and what was said of it."""

    def __init__(self, root: Path) -> None:
        self.root, self.count, self.said = root, 0, []

    def build(self, spec):
        self.count += 1
        return inspection()

    def inspect(self, spec=None, *, facts=facts_of, **options):
        kept = KeptInspection(self.root, self.build, note=self.said.append, facts=facts, **options)
        return kept(spec or make.spec())


@pytest.fixture
def built(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Built(tmp_path / "tula-runs")


def entries(built):
    return sorted((built.root / FOLDER).glob("*.json"))


def test_a_second_inspection_builds_nothing_and_says_so(built):
    assert built.inspect() == built.inspect() == inspection()
    assert built.count == 1
    assert built.said[0] == BUILDING and "as they were built" in built.said[1] and "--fresh" in built.said[1]


@pytest.mark.parametrize("part", [name for name in facts_of(make.spec()) if name != "dataset"])
def test_whatever_part_of_the_key_changes_builds_anew(built, part):
    built.inspect()
    built.inspect(facts=lambda spec: {**facts_of(spec), part: "another"})
    assert built.count == 2


def test_another_model_is_built_and_another_price_is_not(built):
    built.inspect()
    spec = make.spec()
    built.inspect(spec.model_copy(update={"pricing": spec.pricing.model_copy(update={"currency": "EUR"})}))
    assert built.count == 1
    built.inspect(make.spec(model={"name": "vgg11"}))
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


def test_nothing_is_written_where_nothing_may_be(built):
    built.inspect(keep=False)
    assert not built.root.exists()


def test_a_folder_that_cannot_be_written_costs_no_answer(built):
    built.root.write_text("a file")
    assert built.inspect() == inspection()


def test_old_entries_and_all_but_the_newest_are_removed(built, monkeypatch):
    monkeypatch.setattr(kept_inspection, "MOST_KEPT", 3)
    folder = built.root / FOLDER
    folder.mkdir(parents=True)
    for number in range(4):
        (folder / f"{number}.json").touch()
        os.utime(folder / f"{number}.json", (time.time() - number - 10,) * 2)
    old = folder / "old.json"
    old.touch()
    os.utime(old, (1, 1))
    built.inspect()
    names = {path.name for path in entries(built)}
    assert len(names) == 3 and {"0.json", "1.json"} < names and MOST_KEPT > 3


def test_packages_are_told_by_name_and_version_without_an_import(tmp_path):
    for name in ("torch-2.6.0.dist-info", "mine-0.1.dist-info", "torch"):
        (tmp_path / name).mkdir()
    assert packages([str(tmp_path), "/nowhere"]) == ["mine-0.1.dist-info", "torch-2.6.0.dist-info"]


def test_the_newest_change_of_no_dataset_is_none(tmp_path):
    assert newest_change(tmp_path / "none") == []
