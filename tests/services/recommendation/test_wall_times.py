"""Bins of wall time: which nodes they allow, in how many jobs, and what is told of it."""

from pathlib import Path

import pytest
from make_results import Truth, inspected, probe_all, spec
from read_diagnostics import values

from tula_cli.cluster.chains import list_chain_tasks
from tula_cli.errors import Infeasible, SpecError
from tula_cli.query import Query
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.job_runs import open_family, open_run
from tula_cli.services import profile, train
from tula_cli.services.check import check
from tula_cli.services.recommend import recommend
from tula_cli.services.wall_times import count_chain_links
from tula_cli.spec.slurm_options import Slurm

NOW = 1_700_000_000.0
SWEEP = {1: (16, 64, 256), 2: (16, 32, 64, 128, 256), 4: (8,), 8: (4, 64)}
FRONTIER = [{"nodes": 2, "hours": 0.5}, {"nodes": 4, "hours": 1}, {"nodes": 8, "hours": 12}]


def job(limits, *, minutes=1440, **search):
    slurm = {"minutes": minutes, "limits": limits}
    return spec(search={"max_batch": 4096, **search}, cluster={"kind": "slurm", "slurm": slurm})


def measured(root: Path, outcome) -> RunDir:
    run = RunDir.create(root, outcome)
    for result in probe_all(Truth(fixed=2.0, noise=0.01), SWEEP):
        run.write_result(result)
    return run


def asked(root: Path, limits):
    run = measured(root, job(limits))
    return recommend(open_family(run), Query(objective="cost"), now=NOW).recommendation


@pytest.mark.parametrize(("nodes", "minutes"), [(1, 30), (2, 30), (3, 60), (4, 60), (8, 720), (9, 0)])
def test_the_smallest_bin_that_holds_the_nodes_counts(nodes, minutes):
    assert Slurm(limits=FRONTIER[::-1], minutes=1440).job_minutes(nodes) == minutes
    assert Slurm(limits=FRONTIER, minutes=20).job_minutes(nodes) == min(20, minutes)
    assert Slurm(minutes=1440).job_minutes(nodes) == 1440


def test_nodes_that_no_bin_holds_are_not_recommended(tmp_path):
    free = {row.nodes for row in asked(tmp_path / "free", []).rows}
    bound = {row.nodes for row in asked(tmp_path / "bound", FRONTIER[:2]).rows}
    assert free - bound and max(bound) <= 4
    assert "(cluster.slurm.limits)" not in asked(tmp_path / "free", []).reason


def test_a_training_longer_than_its_bin_is_a_chain_that_is_reported(tmp_path):
    result = asked(tmp_path, [{"nodes": 8, "hours": 0.1}])
    whole = 60 * result.choice.hours
    assert whole > 6
    jobs = int(result.reason.partition("a chain of ")[2].split()[0])
    assert jobs >= whole / 6
    assert f"a chain of {jobs} jobs of 6 min: the site allows" in result.reason
    short = asked(tmp_path / "long", [{"nodes": 8, "hours": 300}])
    assert "; one job of 1440 min: the site allows" in short.reason


def test_a_chain_of_too_many_jobs_is_left_out(tmp_path):
    """In 3 minutes each job has little time beside its start and its save: only the fastest trainings come to their end."""
    everything = asked(tmp_path / "free", [])
    slow = max(row.hours for row in everything.rows)
    bound = asked(tmp_path / "tight", [{"nodes": 8, "hours": slow / 40}])
    assert max(row.hours for row in bound.rows) < slow
    with pytest.raises(Infeasible, match=r"within the site's bins of wall time .*0.03 h for up to 8 nodes"):
        asked(tmp_path / "none", [{"nodes": 8, "hours": 0.03}])


def test_jobs_ask_for_no_more_than_their_bin(tmp_path):
    run = measured(tmp_path, job(FRONTIER))
    planned = train.plan_training(open_run(run), nodes=2, batch=256, inspect=lambda _: inspected())
    assert planned.task.time_limit == 30
    longer = train.plan_training(open_run(run), nodes=8, batch=256, inspect=lambda _: inspected())
    assert longer.task.time_limit == 720
    assert len(list_chain_tasks(planned.task)) > len(list_chain_tasks(longer.task))
    with pytest.raises(
        SpecError, match=r"the site allows no job on 16 nodes \(cluster.slurm.limits: 0.5 h for up to 2 nodes"
    ):
        train.plan_training(open_run(run), nodes=16, batch=256, inspect=lambda _: inspected())


def test_a_measuring_job_that_does_not_fit_is_a_problem_before_it_is_submitted():
    short = job([{"nodes": 8, "hours": 0.1}], nodes=[1, 2], max_minutes=20, min_batch=32, max_node_hours=10)
    result = check(short, online=False)
    needs = [
        (p.values["nodes"], p.values["needed_minutes"]) for p in result.problems if p.code == "time-limit-too-short"
    ]
    assert needs == [(1, 22.0), (2, 22.0)]
    with pytest.raises(Infeasible, match=r"search.max_minutes"):
        profile.plan_probes(Run(Path("x"), short), inspected())


def test_searched_nodes_beyond_the_bins_are_left_out_and_said():
    some = job([{"nodes": 2, "hours": 5}], nodes=[1, 2, 64], max_minutes=20, min_batch=64, max_node_hours=100)
    result = check(some, online=False)
    assert {item.nodes for item in result.jobs} == {1, 2}
    assert values(result.warnings, "nodes-beyond-site-limit")["nodes"] == [64]
    none = check(job([{"nodes": 2, "hours": 5}], nodes=[4], min_batch=64), online=False)
    assert "search.nodes" in values(none.problems, "no-feasible-batch")["reason"]


@pytest.mark.parametrize(
    ("minutes", "limit", "restart", "links"),
    [(60, 60, 0, 1), (61, 60, 0, 2), (180, 60, 0, 3), (180, 60, 20, 4), (59, 60, 5, 1)],
)
def test_links_that_a_training_takes(minutes: float, limit: float, restart: float, links: int) -> None:
    assert count_chain_links(minutes, limit, restart=restart) == links
