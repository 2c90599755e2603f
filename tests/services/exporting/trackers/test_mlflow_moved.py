import shutil
import sqlite3
from pathlib import Path

import pytest

from tula_cli.errors import TrackerError
from tula_cli.services.exporting import destination as module
from tula_cli.services.exporting.exporter import Described
from tula_cli.services.exporting.trackers.mlflow_moved import bring_along


def database(path: Path, *places: str) -> Path:
    """Return a database with the columns of MLflow's that hold places."""
    path.parent.mkdir(parents=True)
    with sqlite3.connect(path) as store:
        store.execute("CREATE TABLE experiments (artifact_location)")
        store.execute("CREATE TABLE runs (artifact_uri)")
        store.executemany("INSERT INTO experiments VALUES (?)", [(place,) for place in places])
        store.executemany("INSERT INTO runs VALUES (?)", [(f"{place}/1/artifacts",) for place in places])
    return path


def places(path: Path) -> list[str]:
    with sqlite3.connect(path) as store:
        found = [*store.execute("SELECT * FROM experiments"), *store.execute("SELECT * FROM runs")]
    return [place for (place,) in found]


def test_the_files_of_a_moved_run_lie_where_it_is_now(tmp_path: Path) -> None:
    run = tmp_path / "new place" / "toy"
    path = database(run / "exports/mlflow.db", "file:///old%20place/toy/exports/mlartifacts/toy")
    bring_along(path, run)
    now = f"file://{tmp_path}/new%20place/toy/exports/mlartifacts/toy"
    assert places(path) == [now, f"{now}/1/artifacts"]


def test_places_that_are_not_of_the_run_stay(tmp_path: Path) -> None:
    others = ["file:///data/mlartifacts/toy", "s3://bucket/exports/mlartifacts/toy", "./mlruns/0"]
    path = database(tmp_path / "toy/exports/mlflow.db", *others)
    bring_along(path, tmp_path / "toy")
    assert places(path)[:3] == others


def test_the_database_in_the_run_alone_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._BUILTINS, "mlflow", "fake_tracker:FakeTracker")
    old, run = "file:///old/exports/mlartifacts/toy", tmp_path / "toy"
    own, other = (database(folder / "exports/mlflow.db", old) for folder in (run, tmp_path / "store"))
    for path in (own, other):
        module.destination("mlflow", uri=f"sqlite:///{path}", project=None, run=run, job="toy").exporter()
    assert places(own)[0] == f"{run.as_uri()}/exports/mlartifacts/toy"
    assert places(other)[0] == old


def test_a_folder_in_a_copied_run_has_the_files_of_the_copy(tmp_path: Path) -> None:
    """Of MLflow's own making; a place of a user's own stays."""
    run, copy = tmp_path / "a/toy", tmp_path / "b c/toy"
    uri = f"file://{run}/exports/mlruns"
    first = module.destination("mlflow", uri=uri, project=None, run=run, job="toy").exporter()
    tracked = first.open(Described("run", "run", "toy", 0.0), known=None, after=None, torn=False)
    first.client.create_experiment("own", "file:///data/own")  # type: ignore[attr-defined]
    shutil.copytree(run, copy)
    again = module.destination("mlflow", uri=str(copy / "exports/mlruns"), project=None, run=copy, job="toy").exporter()
    (tmp_path / "results.csv").write_text("a,b\n")
    again.open(Described("run", "run", "toy", 0.0), known=tracked.id, after=None, torn=False).artifact(
        tmp_path / "results.csv"
    )
    assert not [*run.rglob("results.csv")] and len([*copy.rglob("results.csv")]) == 1
    found = again.client.get_run(tracked.id)  # type: ignore[attr-defined]
    assert found.info.artifact_uri.startswith((copy / "exports/mlruns/mlartifacts/toy").as_uri())
    assert again.client.get_experiment_by_name("own").artifact_location == "file:///data/own"  # type: ignore[attr-defined]


def test_a_database_that_is_damaged_is_told(tmp_path: Path) -> None:
    path = database(tmp_path / "toy/exports/mlflow.db")
    path.write_bytes(b"no database" * 100)
    with pytest.raises(TrackerError, match=r"mlflow\.db .*: file is not a database") as told:
        bring_along(path, tmp_path / "toy")
    assert "--uri" in told.value.hint
