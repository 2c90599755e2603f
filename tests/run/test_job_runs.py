"""The runs of a job: one for each node type, number of GPUs per node and text length."""

import shutil
from pathlib import Path

import make_runs as make
import pytest

from tula_cli.errors import SpecError
from tula_cli.query import Query
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.job_runs import (
    combine_runs,
    find_chosen_run,
    make_runs,
    mark_chosen_run,
    open_run,
    open_runs,
    open_runs_of_job,
    save_runs,
    select_runs,
)
from tula_cli.services.recommend import recommend_configuration
from tula_cli.services.recommendation_files import save_answer

TYPES = {"a": {"pricing": {"price": 1.0}}, "b.x": {"cluster": {"gpus_per_node": 2}, "pricing": {"price": 2.0}}}


@pytest.fixture
def family(tmp_path: Path) -> tuple[Run, ...]:
    return make.create_runs(tmp_path, make.spec(node_types=TYPES))


def test_each_node_type_is_a_run_that_its_own_spec_identifies(family: tuple[Run, ...], tmp_path: Path) -> None:
    assert [run.id.rpartition("-")[0] for run in family] == ["toy-a", "toy-b.x"]
    for run in family:
        assert run.path.parent == tmp_path and not run.read_spec().node_types
        assert RunDir.from_spec(tmp_path, run.read_spec()).path == run.path
        assert run.job_name == "toy"
    (alone,) = make_runs(tmp_path, make.spec())
    assert alone.path == RunDir.from_spec(tmp_path, make.spec()).path and alone.type is None


def test_runs_of_a_job_find_each_other_and_a_copy_is_alone(family: tuple[Run, ...], tmp_path: Path) -> None:
    opened = open_runs_of_job(family[1])
    assert [(run.path, run.type) for run in opened] == [(run.path, run.type) for run in family]
    assert open_run(family[1]).family[0].path == family[0].path
    copy = tmp_path / "copy"
    shutil.copytree(family[1].path, copy)
    assert [run.path for run in open_runs_of_job(RunDir(copy))] == [copy]
    shutil.rmtree(family[0].path)
    assert [run.path for run in open_runs_of_job(family[1])] == [family[1].path]


def test_overrides_of_a_node_type_apply_to_its_run(family: tuple[Run, ...]) -> None:
    opened = open_runs_of_job(family[0], ["node_types.b.x.pricing.price=9", "train.epochs=7"])
    assert [run.spec.pricing.price for run in opened] == [1.0, 9.0]
    assert {run.spec.train.epochs for run in opened} == {7}
    with pytest.raises(SpecError, match="changes settings on which the measurements of"):
        open_runs_of_job(family[0], ["node_types.b.x.cluster.gpus_per_node=3"])
    with pytest.raises(SpecError):
        open_runs_of_job(family[0], ["node_types.c.pricing.price=9"])


def test_runs_of_different_jobs_are_refused_with_the_keys_that_differ(tmp_path: Path) -> None:
    first = RunDir.create(tmp_path, make.spec())
    longer = RunDir.create(tmp_path / "longer", make.spec(train={"epochs": 5}, optimizer={"lr": 0.2}))
    with pytest.raises(SpecError, match=r"are runs of different jobs: .*optimizer\.lr, train\.epochs.* differ"):
        open_runs([first, longer])
    euros = RunDir.create(tmp_path / "euros", make.spec(pricing={"price": 1.0, "currency": "EUR"}))
    with pytest.raises(SpecError, match=r"different jobs: pricing\.currency differs"):
        open_runs([first, euros])
    with pytest.raises(SpecError, match="several jobs together with tula recommend and --trainings N"):
        open_runs([first, euros])


def test_runs_of_one_job_on_two_clusters_are_chosen_among(tmp_path: Path) -> None:
    runs = [
        RunDir.create(tmp_path, make.spec(name=name, cluster={"interface": name}, pricing={"price": price}))
        for name, price in (("dear", 5.0), ("cheap", 1.0))
    ]
    for run in runs:
        for nodes, local in ((1, 32), (1, 64), (2, 16), (2, 32)):
            make.add_measured(run, nodes, local)
    together = open_runs(runs)
    answer = recommend_configuration(together, Query(objective="cost"), now=1.0)
    assert {row.type for row in answer.recommendation.rows} == {run.id for run in runs}
    assert answer.chosen_run.path == runs[1].path
    save_answer(together, answer)
    kept = [run.read_recommendation() for run in runs]
    assert kept[0] is not None and kept[1] is not None
    assert not any(row.type for recommendation in kept for row in recommendation.rows), (
        "as later commands call the runs"
    )
    assert kept[1].choice == answer.recommendation.choice.model_copy(update={"type": ""})
    assert RunDir.find_newest(tmp_path).path == runs[1].path, "what tula train takes without an argument"


def test_copies_of_a_run_are_compared_and_each_keeps_its_type(family: tuple[Run, ...], tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / family[0].id
    for nodes, local in ((1, 32), (1, 64), (2, 16), (2, 32)):
        make.add_measured(family[0], nodes, local)
    shutil.copytree(family[0].path, copy)
    (tmp_path / "link").symlink_to(family[0].path)
    together = open_runs([family[0], RunDir(tmp_path / "link"), family[0], RunDir(copy)])
    assert [run.path for run in together] == [family[0].path, copy]
    answer = recommend_configuration(together, Query(), now=1.0)
    assert len({row.type for row in answer.recommendation.rows}) == 2
    save_answer(together, answer, every=True)
    for run in together:
        kept = run.read_recommendation()
        assert kept is not None and {row.type for row in kept.rows} == {"a"} == {kept.choice.type}
        assert (run.path / "results.csv").read_text().splitlines()[1].startswith("a,")


def test_only_a_comparison_of_all_its_runs_chooses_the_run_of_a_job(family: tuple[Run, ...], tmp_path: Path) -> None:
    other = Run(RunDir.create(tmp_path, make.spec(name="other")).path, make.spec(name="other"))
    mark_chosen_run(family[1], family)
    mark_chosen_run(family[0], (family[0], other))
    mark_chosen_run(family[0], family[:1])
    assert find_chosen_run(family) is family[1]
    mark_chosen_run(family[0], (*family, other))
    assert find_chosen_run(family) is family[0]


def test_one_run_or_those_of_a_family_are_not_renamed(family: tuple[Run, ...]) -> None:
    assert [run.type for run in combine_runs(open_runs_of_job(family[0]))] == ["a", "b.x"]
    assert select_runs(family, "a") == (family[0],)
    with pytest.raises(SpecError, match="no node type 'c'") as caught:
        select_runs(family, "c")
    assert caught.value.hint == "choose from: a, b.x"


def test_the_chosen_run_is_known_in_every_run_and_outlives_another_profile(family: tuple[Run, ...]) -> None:
    assert find_chosen_run(family) is None
    family[1].write_recommendation(make.recommendation())
    mark_chosen_run(family[1], family)
    save_runs(make_runs(family[0].path.parent, make.spec(node_types=TYPES | {"c": TYPES["a"]})), None)
    opened = open_runs_of_job(family[0])
    assert len(opened) == 3
    chosen = find_chosen_run(opened)
    assert chosen is not None and chosen.path == family[1].path


def test_runs_of_fewer_gpus_are_known_when_they_are_opened(tmp_path: Path) -> None:
    job = make.spec(cluster={"gpus_per_node": 2}, search={"gpus_per_node": [1, 2], "nodes": [1]})
    runs = make.create_runs(tmp_path, job)
    for family in (runs, open_runs_of_job(runs[0], [])):
        assert [(run.spec.cluster.gpus_per_node, run.spec.is_supplement_with_fewer_gpus) for run in family] == [
            (1, True), (2, False),
        ]  # fmt: skip
