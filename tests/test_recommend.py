import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from make_results import MIB, Truth, measured, out_of_memory, probe_all, spec

from tula_cli.errors import BadMeasurements, Infeasible, Pending
from tula_cli.recommend import recommend
from tula_cli.records import Failed, Measured, OutOfMemory, ProbeTask, Recommendation
from tula_cli.rundir import RunDir
from tula_cli.spec import JobSpec, load_spec

SWEEP = {2: (16, 32, 64, 128, 256), 4: (8,), 8: (4,), 16: (2, 256)}
JOB = spec(search={"max_batch": 4096})


def run_with(
    root: Path, results: list[Measured | OutOfMemory | Failed] | list[Measured], *, job: JobSpec = JOB
) -> RunDir:
    run = RunDir.create(root, job)
    for result in results:
        run.write_result(result)
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return run_with(tmp_path, [*probe_all(Truth(noise=0.01), SWEEP), out_of_memory(2, 512)])


def ask(run: RunDir, objective: str = "time", **rest: object) -> Recommendation:
    return recommend(run, run.spec(), objective=objective, now=1.0, **rest)  # type: ignore[arg-type]


def test_the_choice_is_the_best_of_the_rows(run: RunDir) -> None:
    fastest, cheapest = ask(run, "time"), ask(run, "cost")
    assert fastest.choice == fastest.rows[0]
    assert list(fastest.rows) == sorted(fastest.rows, key=lambda row: row.hours)
    assert cheapest.choice.cost == min(row.cost for row in cheapest.rows)
    assert fastest.choice.nodes > cheapest.choice.nodes
    assert max(row.local_batch for row in fastest.rows) == 256
    assert "10 epochs, whatever the batch" in fastest.reason
    assert fastest.fit_error is not None and "step = " in fastest.fit
    assert fastest.price == "2 USD per node-hour"


def test_the_answer_is_stored(run: RunDir) -> None:
    answer = ask(run, "knee", curve="cost")
    assert run.recommendation() == answer
    assert answer.created_at == 1.0 and answer.curve == "cost"


def test_the_command_names_run_nodes_and_batch(tmp_path: Path) -> None:
    run = run_with(tmp_path / "my runs", probe_all(Truth(), SWEEP))
    choice = ask(run).choice
    expected = f"tula train --run '{run.path}' --nodes {choice.nodes} --batch {choice.batch}"
    assert (run.path / "cmd.txt").read_text() == f"{expected}\n"
    run.write_task(
        ProbeTask(id="p", job="p", spec=JOB, workdir="/home/me/my project", nodes=1, local_batches=(1,), code="1234")
    )
    ask(run)
    assert (run.path / "cmd.txt").read_text() == f"cd '/home/me/my project' && {expected}\n"


def test_the_recommended_spec_names_the_same_run(run: RunDir) -> None:
    choice = ask(run).choice
    path = run.path / "recommended.yaml"
    assert load_spec(path, environ={}, site_files=()) == run.spec()
    assert (
        f"# Train it: tula train --run {run.path} --nodes {choice.nodes} --batch {choice.batch}\n" in path.read_text()
    )


def test_the_table_has_every_candidate_and_every_result(run: RunDir) -> None:
    answer = ask(run, max_nodes=8)
    table = pd.read_csv(run.path / "results.csv")
    assert list(table.columns) == [
        "nodes", "gpus_per_node", "batch", "local_batch", "outcome", "chosen", "within_limits", "step_time_s",
        "step_time_low_s", "step_time_high_s", "sync_time_s", "compute_time_s", "data_wait_s", "training_hours",
        "training_hours_low", "training_hours_high", "cost_USD", "peak_memory_bytes", "memory_headroom_share", "note",
    ]  # fmt: skip
    counts = table.outcome.value_counts()
    assert counts["measured"] == 9 and counts["out_of_memory"] == 1
    assert counts["predicted"] == table.within_limits.sum() + (table.nodes == 16).sum() - 9
    oom = table[table.outcome == "out_of_memory"].iloc[0]
    assert (oom.nodes, oom.local_batch) == (2, 512) and pd.isna(oom.step_time_s) and "memory" in oom.note
    assert (table.outcome == "left_out").sum() == (table.local_batch >= 512).sum() - 1
    chosen = table[table.chosen]
    assert len(chosen) == 1 and chosen.iloc[0].batch == answer.choice.batch


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_nodes": 1}, "at most 1 nodes; the closest is 2 nodes"),
        ({"max_batch": 16}, "a batch of at most 16; the closest is .*batch 32"),
        ({"deadline_hours": 0.001}, "a deadline of 0.001 hours; the closest is 16 nodes"),
        ({"budget": 0.01}, "a budget of 0.01; the closest is 2 nodes"),
        ({"max_nodes": 2, "deadline_hours": 0.02}, "a deadline of 0.02 hours; the closest is 2 nodes"),
        ({"nodes": 3}, "feasible on 3 nodes: no batch divides among its GPUs"),
    ],
)
def test_the_limit_that_leaves_nothing_is_named_with_the_closest(
    run: RunDir, limits: dict[str, float], words: str
) -> None:
    with pytest.raises(Infeasible, match=words):
        ask(run, **limits)
    assert run.recommendation() is None


def test_limits_are_kept(run: RunDir) -> None:
    free = ask(run)
    rows = ask(run, max_nodes=8, max_batch=1024, deadline_hours=free.choice.hours * 3, budget=free.choice.cost * 2).rows
    assert rows and all(row.nodes <= 8 and row.batch <= 1024 for row in rows)
    assert all(row.hours <= free.choice.hours * 3 and row.cost <= free.choice.cost * 2 for row in rows)
    assert {row.nodes for row in ask(run, nodes=4).rows} == {4}
    assert {row.nodes for row in ask(run, nodes=1).rows} == {1}  # not in the search, but within what the fit tells


def test_a_deadline_within_the_interval_is_warned_of(run: RunDir) -> None:
    choice = ask(run).choice
    assert any("may miss the deadline" in text for text in ask(run, deadline_hours=choice.hours * 1.0001).warnings)
    assert not any("may miss" in text for text in ask(run, deadline_hours=choice.hours * 10).warnings)


def test_an_exactly_determined_fit_is_said_to_be(tmp_path: Path) -> None:
    answer = ask(run_with(tmp_path, probe_all(Truth(), {2: (16, 256), 16: (2,)})))
    assert answer.fit_error is None
    assert any("exactly determined" in text for text in answer.warnings)
    assert any(row.step_low is None for row in answer.rows if not row.measured)


def test_the_choice_with_little_memory_left_is_warned_of(tmp_path: Path) -> None:
    truth = Truth(capacity=Truth().peak(256) + 10 * MIB)
    answer = ask(run_with(tmp_path, probe_all(truth, SWEEP)), nodes=16)
    assert answer.choice.local_batch == 256 and answer.choice.measured
    assert any("memory free" in text for text in answer.warnings)


def test_while_probes_are_pending_an_undetermined_answer_waits(tmp_path: Path) -> None:
    run = run_with(tmp_path, [])
    with pytest.raises(Pending, match="3 probes are still under way"):
        ask(run, pending=3)
    for probe in probe_all(Truth(), {2: (16, 64)}):
        run.write_result(probe)
    with pytest.raises(Pending, match="one number of nodes"):
        ask(run, pending=1)
    assert ask(run, pending=1, nodes=2).choice.nodes == 2


def test_out_of_memory_so_far_waits_for_the_rest(tmp_path: Path) -> None:
    run = run_with(tmp_path, [out_of_memory(2, 16)])
    with pytest.raises(Pending):
        ask(run, pending=1)
    with pytest.raises(Infeasible):
        ask(run)


def test_enough_probes_answer_while_others_are_pending(run: RunDir) -> None:
    answer = ask(run, pending=2)
    assert "2 probes are still under way" in answer.warnings[0]


def test_too_few_probes_are_refused_when_nothing_is_pending(tmp_path: Path) -> None:
    with pytest.raises(BadMeasurements, match="no probe"):
        ask(run_with(tmp_path / "none", []))
    with pytest.raises(BadMeasurements, match="one probe is too few"):
        ask(run_with(tmp_path / "one", [measured(Truth(), 2, 16)]))


def test_one_probe_is_enough_where_there_is_one_configuration(tmp_path: Path) -> None:
    job = spec(search={"nodes": [2], "max_batch": 32})
    assert ask(run_with(tmp_path, [measured(Truth(), 2, 16)], job=job)).choice.batch == 32


def test_hardware_is_not_mixed_even_while_probes_are_pending(tmp_path: Path) -> None:
    run = run_with(tmp_path, [measured(Truth(), 2, 16), measured(Truth(hardware="other"), 4, 16)])
    with pytest.raises(BadMeasurements, match="different hardware"):
        ask(run, pending=1)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    failed = Failed(id="probe-n004-l000008", nodes=4, gpus_per_node=1, local_batch=8, outcome="port", message="in use")
    answer = ask(run_with(tmp_path, [*probe_all(Truth(), {2: (16, 32, 64)}), failed]))
    assert {row.nodes for row in answer.rows} == {2}
    text = "\n".join(answer.warnings)
    assert "4 nodes and local batch 8 failed (in use)" in text
    assert "on 4, 8, 16 nodes are left out: one number of nodes was measured" in text


def test_neither_torch_nor_plotting_is_imported(run: RunDir) -> None:
    program = (
        "import sys; from pathlib import Path; from tula_cli.rundir import RunDir\n"
        "from tula_cli.recommend import recommend\n"
        "run = RunDir(Path(sys.argv[1])); recommend(run, run.spec(), objective='cost', now=0.0)\n"
        "print([m for m in ('torch', 'matplotlib', 'kneed', 'rich', 'submitit', 'statsmodels.api') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(run.path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
