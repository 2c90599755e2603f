import dataclasses
import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import make_runs as make
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make_results import (
    MIB,
    Truth,
    add_gradient_noise,
    as_script_probe,
    make_out_of_memory,
    make_probe,
    make_probes,
    make_shared_storage_probes,
    make_spec,
)
from read_diagnostics import codes, values

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import BadMeasurements, Infeasible, Pending, SpecError
from tula_cli.models.choice.grid import Config
from tula_cli.models.choice.objective import Choice
from tula_cli.models.estimator import Estimator
from tula_cli.query import Query
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.job_runs import make_runs, open_run, open_runs_of_job
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory, PeakMemory
from tula_cli.run.records.recommendations import Prediction, Recommendation
from tula_cli.run.records.results import ScriptCheckpointSave, ScriptSaves
from tula_cli.run.records.tasks import ProbeTask
from tula_cli.services import api, messages
from tula_cli.services.measurements import describe_epochs
from tula_cli.services.recommend import count_pending_probes, list_choice_warnings, recommend_configuration
from tula_cli.services.recommendation_files import save_answer, should_replace_recommendation
from tula_cli.show import recommend as show_recommend
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import load_spec, validate_job
from tula_cli.spec.sections import MEMORY_MARGIN
from tula_cli.words import format_duration

SWEEP = {2: (16, 32, 64, 128, 256), 4: (8,), 8: (4,), 16: (2, 256)}
JOB = make_spec(search={"max_batch": 4096})


def run_with(
    root: Path, results: list[Measured | OutOfMemory | Failed] | list[Measured], *, job: JobSpec = JOB
) -> RunDir:
    run = RunDir.create(root, job)
    for result in results:
        run.write_result(result)
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return run_with(tmp_path, [*make_probes(Truth(noise=0.01), SWEEP), make_out_of_memory(2, 512)])


def ask(
    run: RunDir, objective: Any = "time", *, pending: int = 0, type_: str | None = None, **limits: Any
) -> Recommendation:
    """Ask, and keep the answer."""
    answer = recommend_configuration(
        open_runs_of_job(run), Query(objective=objective, **limits), pending={type_: pending}, now=1.0
    )
    save_answer(open_runs_of_job(run), answer)
    return answer.recommendation


def warnings_of(run: RunDir, objective: Any = "time", *, pending: int = 0, **limits: Any) -> Sequence[Diagnostic]:
    return recommend_configuration(
        open_runs_of_job(run), Query(objective=objective, **limits), pending={None: pending}, now=1.0
    ).warnings


def test_the_choice_is_the_best_of_the_rows(run: RunDir) -> None:
    fastest, cheapest = ask(run, "time"), ask(run, "cost")
    assert fastest.choice == fastest.rows[0]
    assert list(fastest.rows) == sorted(fastest.rows, key=lambda row: row.hours)
    assert cheapest.choice.cost == min(row.cost for row in cheapest.rows)
    assert fastest.choice.nodes > cheapest.choice.nodes
    assert max(row.local_batch for row in fastest.rows) == 256
    assert "10 epochs at every batch" in fastest.reason
    assert fastest.fit_error is not None and "step = " in fastest.fit
    assert fastest.price == "2 USD per node-hour"


def test_where_ranks_hold_each_other_up_the_choice_is_among_what_was_measured(tmp_path: Path) -> None:
    job = make_spec(search={"nodes": [1, 2, 4, 8], "max_batch": 1024})
    seen = [probe for probe in make_shared_storage_probes(0) if probe.nodes in (1, 8) or probe.local_batch <= 32]
    run = run_with(tmp_path, seen, job=job)
    answer = ask(run)
    assert "unmeasured-not-considered" in codes(warnings_of(run))
    assert f"the shortest time of {len(seen)} measured configurations" in answer.reason
    assert answer.choice.measured and answer.candidates > len(seen)


@pytest.mark.parametrize("is_complete", [False, True])
def test_measuring_more_is_advised_only_if_something_is_not_measured(is_complete: bool) -> None:
    job = make_spec(search={"nodes": [1, 2, 4, 8], "max_batch": 1024})
    probes = make_shared_storage_probes(0)
    if not is_complete:
        probes = [probe for probe in probes if probe.nodes in (1, 8) or probe.local_batch <= 32]
    estimator = Estimator.fit(job, probes)
    prediction = estimator.predict(Config(1, 32)).model_copy(update={"hours_low": 1.0, "hours_high": 9.0})
    warnings = list(list_choice_warnings(estimator, Choice(prediction, "", ()), Query(), other_market=None))
    assert values(warnings, "time-too-uncertain")["all_measured"] is is_complete
    assert ("unmeasured-not-considered" in codes(warnings)) is not is_complete


def test_limits_within_which_the_knee_is_do_not_change_the_choice(run: RunDir) -> None:
    free = ask(run, "knee").choice
    for limits in ({"deadline_hours": free.hours * 1.01}, {"budget": free.cost * 1.01}):
        assert ask(run, "knee", **limits).choice == free, limits


def test_the_batch_nearest_to_the_knee_is_chosen_if_a_deadline_excludes_the_knee(run: RunDir) -> None:
    answer = ask(run, "knee")
    free = answer.choice
    batch = min(row.batch for row in answer.rows if row.batch > free.batch)
    deadline = min(row.hours for row in answer.rows if row.batch == batch)
    assert not [row for row in answer.rows if row.batch <= free.batch and row.hours <= deadline]
    limited = ask(run, "knee", deadline_hours=deadline)
    assert limited.choice.batch == batch and limited.choice.hours <= deadline
    assert f"the batch nearest to {free.batch} that is within the limits" in limited.reason


def test_the_answer_is_stored(run: RunDir) -> None:
    answer = ask(run, "knee", curve="cost")
    assert run.read_recommendation() == answer
    assert answer.created_at == 1.0 and answer.curve == "cost"


def test_how_sure_the_knee_is_is_reported_in_shares_of_the_curves_that_may_be(run: RunDir) -> None:
    answer = re.findall(r"given the uncertainty of the probes, the knee is ([^;]*)", ask(run, "knee").reason)
    likeliest = re.findall(r"at batch (\d+) with a probability of (\d+) %", answer[0])
    shares = {int(batch): int(share) for batch, share in likeliest + re.findall(r"(\d+): (\d+) %", answer[0])}
    assert 0 < sum(shares.values()) <= 101 and shares.keys() <= {row.batch for row in ask(run, "knee").rows}
    assert "given the uncertainty of the probes" not in ask(run, "time").reason


def test_more_nodes_than_any_probe_had_are_reported_to_be_extrapolated(run: RunDir) -> None:
    answer = ask(run, "time", nodes=32)
    assert answer.choice.further
    expected = {"nodes": 32, "probed_nodes": 16, "gpus_per_node": None}
    assert values(warnings_of(run, "time", nodes=32), "beyond-probed-nodes") == expected
    assert not any(row.further for row in ask(run, "time").rows)


def test_an_answer_alone_writes_nothing(run: RunDir) -> None:
    before = sorted(run.path.iterdir())
    recommend_configuration(open_runs_of_job(run), Query(objective="time"), now=1.0)
    assert sorted(run.path.iterdir()) == before


def test_only_the_first_answer_and_those_to_the_same_question_are_kept_unasked(run: RunDir) -> None:
    def answer(objective: Any = "time", *, overrides: tuple[str, ...] = (), **limits: Any) -> Recommendation:
        query = Query(objective=objective, **limits)
        runs = open_runs_of_job(run, overrides)
        return recommend_configuration(runs, query, overrides=overrides, now=1.0).recommendation

    assumed, limited = answer(overrides=("pricing.price=9",)), answer(max_nodes=2)
    assert (
        should_replace_recommendation(answer(), None)
        and should_replace_recommendation(limited, None)
        and not should_replace_recommendation(assumed, None)
    )
    assert (
        should_replace_recommendation(answer(), answer())
        and should_replace_recommendation(limited, limited)
        and should_replace_recommendation(assumed, assumed)
    )
    assert not any(should_replace_recommendation(result, answer()) for result in (answer("cost"), limited, assumed))
    assert limited.criteria == "time, --max-nodes 2" and assumed.criteria == "time, --set pricing.price=9"


def test_overrides_that_change_nothing_are_not_assumed(run: RunDir) -> None:
    runs = open_runs_of_job(run, ["search.max_batch=4096"])
    answer = recommend_configuration(runs, Query(objective="time"), overrides=["search.max_batch=4096"], now=1.0)
    assert answer.recommendation.overrides == ()


def test_what_an_answer_assumes_is_not_written_as_the_jobs_own(run: RunDir) -> None:
    dear = make_spec(search={"max_batch": 4096}, pricing={"price": 9.0, "currency": "EUR"})
    answer = recommend_configuration(
        [Run(run.path, dear)], Query(objective="time"), overrides=["pricing={price: 9.0, currency: EUR}"], now=1.0
    )
    save_answer(open_runs_of_job(run), answer)
    path = run.path / "recommended.yaml"
    assert load_spec(path, environ={}, site_files=()) == run.read_spec()
    assert "EUR" in path.read_text() and "# Criteria: time, --set pricing=" in path.read_text()


def test_the_command_names_run_nodes_and_batch(tmp_path: Path) -> None:
    run = run_with(tmp_path / "my runs", make_probes(Truth(), SWEEP))
    choice = ask(run).choice
    expected = f"tula train --run '{run.path}' --nodes {choice.nodes} --batch {choice.batch}"
    assert f"# To train: {expected}\n" in (run.path / "recommended.yaml").read_text()
    run.write_task(
        ProbeTask(id="p", job="p", spec=JOB, workdir="/home/me/my project", nodes=1, local_batches=(1,), code="1234")
    )
    ask(run)
    assert f"# To train: cd '/home/me/my project' && {expected}\n" in (run.path / "recommended.yaml").read_text()


def test_the_recommended_spec_names_the_same_run(run: RunDir) -> None:
    choice = ask(run).choice
    path = run.path / "recommended.yaml"
    assert load_spec(path, environ={}, site_files=()) == run.read_spec()
    assert (
        f"# To train: tula train --run {run.path} --nodes {choice.nodes} --batch {choice.batch}\n" in path.read_text()
    )


def test_the_table_has_every_candidate_and_every_result(run: RunDir) -> None:
    answer = ask(run, max_nodes=8)
    table = pd.read_csv(run.path / "results.csv")
    assert list(table.columns) == [
        "node_type", "nodes", "gpus_per_node", "batch", "local_batch", "outcome", "chosen", "within_limits", "pareto",
        "step_time_s", "step_time_low_s", "step_time_high_s", "training", "trained_hours", "sync_time_s", "compute_time_s",
        "data_wait_s", "cached_time_s", "loader_time_s",
        "training_hours", "training_hours_low", "training_hours_high", "cost_USD", "same_progress_epochs",
        "same_progress_hours", "same_progress_hours_low", "same_progress_hours_high", "same_progress_cost_USD",
        "step_energy_joules", "energy_kwh", "energy_kwh_low", "energy_kwh_high", "spot_hours", "spot_cost_USD", "peak_memory_bytes", "memory_headroom_share", "note",
    ]  # fmt: skip
    counts = table.outcome.value_counts()
    assert counts["measured"] == 9 and counts["out_of_memory"] == 1
    assert counts["predicted"] == table.within_limits.sum() + (table.nodes == 16).sum() - 9
    oom = table[table.outcome == "out_of_memory"].iloc[0]
    assert (oom.nodes, oom.local_batch) == (2, 512) and pd.isna(oom.step_time_s) and "memory" in oom.note
    assert (table.outcome == "left_out").sum() == (table.local_batch >= 512).sum() - 1
    chosen = table[table.chosen]
    assert len(chosen) == 1 and chosen.iloc[0].batch == answer.choice.batch
    text = pd.read_csv(run.path / "results.csv", dtype=str)
    whole = [text[name].dropna() for name in ("nodes", "gpus_per_node", "batch", "local_batch", "peak_memory_bytes")]
    assert 0 < len(whole[-1]) < len(text) and all(column.str.fullmatch("[0-9]+").all() for column in whole)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_nodes": 1}, "at most 1 node; the closest is 2 nodes"),
        ({"max_batch": 16}, "a batch of at most 16; the closest is .*batch 32"),
        ({"deadline_hours": 0.001}, r"a deadline of 3.60 s; the closest is 16 nodes.*: [0-9.]+ s, "),
        ({"budget": 0.01}, "a budget of 0.01; the closest is 2 nodes"),
        ({"max_nodes": 2, "deadline_hours": 0.02}, r"a deadline of 72.0 s; the closest is 2 nodes"),
        ({"nodes": 3}, "feasible on 3 nodes: no batch is divisible among the GPUs"),
    ],
)
def test_the_limit_that_leaves_nothing_is_named_with_the_closest(
    run: RunDir, limits: dict[str, float], words: str
) -> None:
    with pytest.raises(Infeasible, match=words):
        ask(run, **limits)
    assert run.read_recommendation() is None


def test_nodes_whose_step_time_is_unknown_are_to_be_profiled(tmp_path: Path) -> None:
    run = run_with(tmp_path, make_probes(Truth(), {1: (16, 64, 256)}))
    with pytest.raises(Infeasible, match="only one node was measured") as caught:
        ask(run, nodes=4)
    assert caught.value.hint == "measure more: tula profile --set search.nodes=[4]"


def test_limits_are_kept(run: RunDir) -> None:
    free = ask(run)
    rows = ask(run, max_nodes=8, max_batch=1024, deadline_hours=free.choice.hours * 3, budget=free.choice.cost * 2).rows
    assert rows and all(row.nodes <= 8 and row.batch <= 1024 for row in rows)
    assert all(row.hours <= free.choice.hours * 3 and row.cost <= free.choice.cost * 2 for row in rows)
    assert {row.nodes for row in ask(run, nodes=4).rows} == {4}
    assert {row.nodes for row in ask(run, nodes=1).rows} == {1}  # not in the search, but within what the fit tells


def test_a_deadline_within_the_interval_is_warned_of(run: RunDir) -> None:
    choice = ask(run).choice
    near = values(warnings_of(run, deadline_hours=choice.hours * 1.0001), "may-miss-deadline")
    assert near == {"high_hours": choice.hours_high, "deadline_hours": choice.hours * 1.0001}
    assert "may-miss-deadline" not in codes(warnings_of(run, deadline_hours=choice.hours * 10))


def test_a_reference_batch_above_the_dataset_size_is_warned_of(tmp_path: Path) -> None:
    job = make_spec(search={"max_batch": 4096}, train={"reference_batch": 50_001, "method": "lbt"})
    run = run_with(tmp_path, make_probes(Truth(noise=0.01), SWEEP), job=job)
    values = [warning.values for warning in warnings_of(run) if warning.code == "reference-batch-exceeds-dataset"]
    assert values == [{"reference_batch": 50_001, "dataset_size": 50_000}]


def test_an_exactly_determined_fit_is_said_to_be(tmp_path: Path) -> None:
    run = run_with(tmp_path, make_probes(Truth(), {2: (256,), 16: (2,)}))
    answer = ask(run)
    assert answer.fit_error is None
    assert "fit-error-unknown" in codes(warnings_of(run))
    for row in answer.rows:
        assert row.measured or (row.step_low and row.step_high and row.step_high > 1.1 * row.step_low)


def test_the_choice_with_little_memory_left_is_warned_of(tmp_path: Path) -> None:
    truth = Truth(capacity=Truth().peak(256) + 10 * MIB)
    run = run_with(tmp_path, make_probes(truth, SWEEP))
    choice = ask(run, nodes=16).choice
    assert choice.local_batch == 256 and choice.measured
    expected = {"free_share": choice.headroom, "wanted_share": MEMORY_MARGIN}
    assert values(warnings_of(run, nodes=16), "little-memory-free") == expected


def test_while_probes_are_pending_an_undetermined_answer_waits(tmp_path: Path) -> None:
    run = run_with(tmp_path, [])
    with pytest.raises(Pending, match="3 probes are still queued or running"):
        ask(run, pending=3)
    for probe in make_probes(Truth(), {2: (16, 64)}):
        run.write_result(probe)
    with pytest.raises(Pending, match="one number of nodes"):
        ask(run, pending=1)
    assert ask(run, pending=1, nodes=2).choice.nodes == 2


def test_out_of_memory_so_far_waits_for_the_rest(tmp_path: Path) -> None:
    run = run_with(tmp_path, [make_out_of_memory(2, 16)])
    with pytest.raises(Pending):
        ask(run, pending=1)
    with pytest.raises(Infeasible):
        ask(run)


def test_enough_probes_answer_while_others_are_pending(run: RunDir) -> None:
    assert values(warnings_of(run, pending=2), "probes-pending") == {"probes": 2}
    assert ask(run, pending=2).warnings[0] == messages.probes_pending(probes=2).text


def test_too_few_probes_are_refused_when_nothing_is_pending(tmp_path: Path) -> None:
    with pytest.raises(BadMeasurements, match="no probe"):
        ask(run_with(tmp_path / "none", []))
    with pytest.raises(BadMeasurements, match="one probe is too few"):
        ask(run_with(tmp_path / "one", [make_probe(Truth(), 2, 16)]))


def test_one_probe_is_enough_where_there_is_one_configuration(tmp_path: Path) -> None:
    job = make_spec(search={"nodes": [2], "max_batch": 32})
    assert ask(run_with(tmp_path, [make_probe(Truth(), 2, 16)], job=job)).choice.batch == 32


def test_hardware_is_not_mixed_even_while_probes_are_pending(tmp_path: Path) -> None:
    run = run_with(tmp_path, [make_probe(Truth(), 2, 16), make_probe(Truth(hardware="other"), 4, 16)])
    with pytest.raises(BadMeasurements, match="different hardware"):
        ask(run, pending=1)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    failed = Failed(id="probe-n004-l000008", nodes=4, gpus_per_node=1, local_batch=8, outcome="port", message="in use")
    run = run_with(tmp_path, [*make_probes(Truth(), {2: (16, 32, 64)}), failed])
    assert {row.nodes for row in ask(run).rows} == {2}
    warnings = warnings_of(run)
    assert values(warnings, "probe-failed") == {"nodes": 4, "local_batch": 8, "reason": "in use"}
    left_out = values(warnings, "configurations-left-out")
    assert left_out["nodes"] == (4, 8, 16) and left_out["reason"].startswith("only one number of nodes was measured")


def test_neither_torch_nor_plotting_is_imported(run: RunDir) -> None:
    program = (
        "import sys; from pathlib import Path; from tula_cli.run.directory import RunDir\n"
        "from tula_cli.run.job_runs import open_runs_of_job\n"
        "from tula_cli.query import Query; from tula_cli.services.recommend import recommend_configuration\n"
        "run = RunDir(Path(sys.argv[1])); recommend_configuration(open_runs_of_job(run), Query(objective='cost'), now=0.0)\n"
        "print([m for m in ('torch', 'matplotlib', 'kneed', 'rich', 'submitit', 'statsmodels.api') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(run.path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("hours", "typed"), [(36, "36"), (1.5, "1.5"), (1 / 3, "20m"), (1.1 / 60, "1.1m")])
def test_the_criteria_have_the_deadline_as_it_was_typed(hours: float, typed: str) -> None:
    assert Query(deadline_hours=hours).command_line_options == [f"--deadline {typed}"]


def test_a_deadline_that_may_be_missed_is_a_duration() -> None:
    warning = messages.may_miss_deadline(high_hours=0.5, deadline_hours=1 / 3)
    assert (
        warning.text
        == "The chosen configuration may miss the deadline of 20.0 min: the 90 % interval of its time ends at 30.0 min."
    )


# --- energy


@pytest.fixture
def counted(tmp_path: Path) -> RunDir:
    return run_with(tmp_path, make_probes(Truth(noise=0.01, watts=300.0), SWEEP))


def test_energy_is_what_the_counters_say_over_the_time_of_training(counted: RunDir) -> None:
    answer = ask(counted)
    for row in answer.rows:
        assert row.energy == pytest.approx(300 * row.nodes * row.step_time, rel=1e-6)
        assert row.kwh == pytest.approx(0.3 * row.nodes * row.hours, rel=1e-6)
        assert row.kwh_low is not None and row.kwh_high is not None and row.kwh is not None
        assert row.kwh_low < row.kwh < row.kwh_high
    assert answer.power == "300 W per GPU at every batch, from 9 of 9 probes; median error 0.0 %"
    table = pd.read_csv(counted.path / "results.csv")
    assert table.energy_kwh.count() == len(answer.rows) == table.step_energy_joules.count()
    assert answer.frame().kwh.notna().all()


def test_the_choice_by_energy_takes_least_of_it(counted: RunDir) -> None:
    answer = ask(counted, "energy")
    assert answer.choice.kwh == min(row.kwh for row in answer.rows if row.kwh is not None)
    assert answer.reason.startswith("the lowest energy of ")


def test_energy_is_an_axis_of_the_front(tmp_path: Path) -> None:
    """A configuration that is good for energy alone is in no front of time and cost."""

    def with_power(probe: Measured) -> Measured:
        watts = 100 if (probe.nodes, probe.local_batch) == (2, 64) else 300
        return probe.model_copy(update={"energy": watts * probe.nodes * sum(probe.step_times) / len(probe.step_times)})

    job, probes = make_spec(search={"nodes": [2], "max_batch": 512}), make_probes(Truth(), {2: (16, 32, 64, 128, 256)})
    counted = run_with(tmp_path / "with", [with_power(probe) for probe in probes], job=job)
    silent = run_with(tmp_path / "without", probes, job=job)
    front, smaller = ({(row.nodes, row.batch) for row in ask(each).rows if row.pareto} for each in (counted, silent))
    least = ask(counted, "energy").choice
    assert (least.nodes, least.batch) == (2, 128)
    assert front - smaller == {(2, 128)}


def test_without_a_counter_nothing_has_energy_and_nothing_is_chosen_by_it(run: RunDir) -> None:
    answer = ask(run)
    assert {(row.energy, row.kwh, row.kwh_low, row.kwh_high) for row in answer.rows} == {(None,) * 4}
    assert answer.power == ""
    assert pd.read_csv(run.path / "results.csv").energy_kwh.isna().all()
    with pytest.raises(BadMeasurements, match=r"needs the energy per step, which no probe measured") as raised:
        ask(run, "energy")
    assert "tula-cli[nvml]" in raised.value.hint
    with pytest.raises(Pending, match="no probe"):
        ask(run, "energy", pending=1)


def test_node_types_without_a_counter_are_left_out_of_a_choice_by_energy(tmp_path: Path) -> None:
    job = make_spec(search={"max_batch": 4096}, node_types={"a": {}, "b": {"pricing": {"price": 0.5}}})
    runs = make.create_runs(tmp_path, job)
    run = runs[0]
    for part in runs:
        for probe in make_probes(Truth(watts=300.0 if part.type == "a" else None), SWEEP):
            part.write_result(probe)
    answer = ask(run, "energy")
    assert {row.type for row in answer.rows} == {"a"}
    assert values(warnings_of(run, "energy"), "node-type-left-out")["node_type"] == "b"
    mixed = ask(run, "cost")
    assert mixed.choice.type == "b" and mixed.choice.kwh is None
    assert {row.type for row in mixed.rows if row.kwh is not None} == {"a"}


# --- the Pareto front


def test_the_front_is_marked_and_both_extremes_are_in_it(run: RunDir) -> None:
    answer = ask(run)
    front = [row for row in answer.rows if row.pareto]
    assert 2 < len(front) < len(answer.rows)
    assert [row.cost for row in front] == sorted((row.cost for row in front), reverse=True)
    assert front[0] == answer.choice and front[-1].cost == min(row.cost for row in answer.rows)
    table = pd.read_csv(run.path / "results.csv")
    assert set(zip(table[table.pareto].nodes, table[table.pareto].batch, strict=True)) == {
        (row.nodes, row.batch) for row in front
    }


def test_a_deadline_cuts_the_front_and_changes_nothing_in_it(run: RunDir) -> None:
    def front(**limits: float) -> set[tuple[int, int]]:
        return {(row.nodes, row.batch) for row in ask(run, **limits).rows if row.pareto}

    hours = sorted(row.hours for row in ask(run).rows)[5]
    within = {(row.nodes, row.batch) for row in ask(run).rows if row.hours <= hours}
    assert front(deadline_hours=hours) == front() & within != front()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=5)
@given(st.floats(1.001, 1000))
def test_a_higher_price_never_changes_the_fastest_choice(run: RunDir, factor: float) -> None:
    dear = run.read_spec().pricing.model_copy(update={"price": 2.0 * factor})
    usual = ask(run)
    expensive = run.read_spec().model_copy(update={"pricing": dear})
    answer = recommend_configuration([Run(run.path, expensive)], Query(objective="time"), now=1.0).recommendation
    assert (answer.choice.nodes, answer.choice.batch) == (usual.choice.nodes, usual.choice.batch)
    assert answer.choice.cost == pytest.approx(factor * usual.choice.cost)


# --- spot nodes


def on_spot(
    run: RunDir, objective: Any = "cost", *, limits: dict[str, Any] | None = None, **spot: float
) -> Recommendation:
    pricing = {"price": 2.0, "spot": {"discount": 0.6, "interruptions_per_day": 2.0, **spot}}
    job = make_spec(search={"max_batch": 4096}, pricing=pricing)
    answer = recommend_configuration([Run(run.path, job)], Query(objective=objective, **(limits or {})), now=1.0)
    save_answer(open_runs_of_job(run), answer)
    return answer.recommendation


def by_market(answer: Recommendation) -> tuple[dict[tuple[int, int], Prediction], dict[tuple[int, int], Prediction]]:
    def rows(market: str) -> dict[tuple[int, int], Prediction]:
        return {(row.nodes, row.batch): row for row in answer.rows if row.market == market}

    return rows("on_demand"), rows("spot")


def test_spot_is_offered_beside_on_demand(run: RunDir) -> None:
    answer = on_spot(run)
    here, spot = by_market(answer)
    assert here.keys() == spot.keys()
    for key, row in spot.items():
        assert row.hours > here[key].hours
        assert row.cost == pytest.approx(0.4 * here[key].cost * row.hours / here[key].hours)
    other, row = answer.other_market, here[answer.choice.nodes, answer.choice.batch]
    assert answer.choice.market == "spot" and other is not None
    assert other.step_fitted == pytest.approx(row.step_fitted)  # one at a time, or all at once: up to rounding
    assert other.model_copy(update={"step_fitted": row.step_fitted}) == row
    assert on_spot(run, "time").choice.market == "on_demand"
    assert "spot 60 % off, 2 interruptions per day and node" in answer.price
    table = pd.read_csv(run.path / "results.csv")
    assert table.spot_hours.notna().sum() == len(spot)


def test_more_nodes_lose_more_to_interruptions(run: RunDir) -> None:
    here, spot = by_market(on_spot(run, interruptions_per_day=24.0))
    lost = {nodes: spot[nodes, 1024].hours / here[nodes, 1024].hours for nodes in (4, 8, 16)}
    assert 1 < lost[4] < lost[8] < lost[16]


def test_spot_without_interruptions_is_on_demand_for_less(run: RunDir) -> None:
    here, spot = by_market(on_spot(run, interruptions_per_day=0.0))
    usual = {(row.nodes, row.batch): row.hours for row in ask(run).rows}
    for key, row in spot.items():
        assert row.hours == here[key].hours == usual[key]
        assert row.cost == pytest.approx(0.4 * here[key].cost)


def test_a_deadline_holds_for_the_expected_time(run: RunDir) -> None:
    free = on_spot(run, interruptions_per_day=20.0)
    here = by_market(free)[0][free.choice.nodes, free.choice.batch]
    between = (here.hours + free.choice.hours) / 2
    answer = on_spot(run, interruptions_per_day=20.0, limits={"deadline_hours": between})
    here_left, spot_left = by_market(answer)
    assert (here.nodes, here.batch) in here_left and (here.nodes, here.batch) not in spot_left
    assert all(row.hours <= between for row in answer.rows)
    late = on_spot(run, limits={"deadline_hours": 100.0})
    assert messages.spot_time_is_expected().text in late.warnings


def test_a_budget_lets_spot_in_where_on_demand_is_too_dear(run: RunDir) -> None:
    cheapest = min(row.cost for row in by_market(on_spot(run))[0].values())
    answer = on_spot(run, "time", limits={"budget": 0.9 * cheapest})
    assert {row.market for row in answer.rows} == {"spot"}


def test_spot_nodes_that_are_taken_away_at_once_are_no_offer(run: RunDir) -> None:
    answer = on_spot(run, interruptions_per_day=200_000.0)
    assert {row.market for row in answer.rows} == {"on_demand"} and answer.other_market is None
    assert messages.no_spot_too_many_interruptions(nodes=answer.choice.nodes).text in answer.warnings


# --- several types of nodes

TYPES = {"fast": {"pricing": {"price": 9.0}}, "slow": {"cluster": {"gpus_per_node": 2}, "pricing": {"price": 1.0}}}
FAST = Truth(hardware="Fast GPU", slope=0.0001, fixed=0.01)
SLOW = Truth(hardware="Slow GPU", gpus_per_node=2)


def two_types(root: Path, *, fast: bool = True, slow: bool = True) -> RunDir:
    job = make_spec(search={"max_batch": 4096}, node_types=TYPES)
    runs = make.create_runs(root, job)
    truths = {"fast": FAST if fast else None, "slow": SLOW if slow else None}
    for part in runs:
        if (truth := truths[str(part.type)]) is not None:
            for result in make_probes(dataclasses.replace(truth), SWEEP):
                part.write_result(result)
    return runs[0]


def test_the_choice_is_made_over_all_types(tmp_path: Path) -> None:
    run = two_types(tmp_path)
    fastest, cheapest = ask(run, "time"), ask(run, "cost")
    assert (fastest.choice.type, cheapest.choice.type) == ("fast", "slow")
    assert {row.type for row in fastest.rows} == {"fast", "slow"}
    assert fastest.price == "fast: 9 USD per node-hour\nslow: 1 USD per node-hour"
    table = pd.read_csv(open_runs_of_job(run)[1].path / "results.csv")
    assert set(table[table.chosen].node_type) == {"slow"} and set(table.gpus_per_node) == {1, 2}
    assert {row.type for row in ask(run, "cost", node_type="fast").rows} == {"fast"}
    with pytest.raises(SpecError, match="no node type 'quick'"):
        ask(run, node_type="quick")


def test_each_type_is_fitted_alone(tmp_path: Path) -> None:
    run = two_types(tmp_path)
    together = recommend_configuration(open_runs_of_job(run), Query(objective="time"), now=1.0).with_all_rows()
    for name, part in zip(("fast", "slow"), open_runs_of_job(run), strict=True):
        alone = recommend_configuration([part], Query(objective="time"), now=1.0).recommendation
        merged = [row for row in together.rows if row.type == name]
        assert [(row.step_time, row.hours, row.cost) for row in merged] == [
            (row.step_time, row.hours, row.cost) for row in alone.rows
        ]
    assert "Fast GPU" not in "".join(together.warnings)


def test_each_type_keeps_its_own_best(tmp_path: Path) -> None:
    run = two_types(tmp_path)
    answer = ask(run, "time")
    fast, slow = open_runs_of_job(run)
    known = [part.read_recommendation() for part in (fast, slow)]
    assert known[0] is not None and known[0].choice.batch == answer.choice.batch
    assert known[1] is not None and known[1].choice.type == "slow"
    assert f"--run {fast.path} --nodes {answer.choice.nodes}" in (fast.path / "recommended.yaml").read_text()


def test_a_type_that_was_not_measured_is_left_out_aloud(tmp_path: Path) -> None:
    run = two_types(tmp_path, slow=False)
    answer = ask(run)
    assert {row.type for row in answer.rows} == {"fast"}
    (problem,) = values(warnings_of(run), "node-type-left-out")["problems"]
    assert problem.startswith("No probe was measured")
    with pytest.raises(BadMeasurements, match="no probe"):
        ask(two_types(tmp_path / "none", fast=False, slow=False))
    with pytest.raises(Pending):
        ask(two_types(tmp_path / "wait", fast=False, slow=False), pending=3, type_="slow")


def test_limits_hold_over_all_types(tmp_path: Path) -> None:
    run = two_types(tmp_path)
    cheapest = ask(run, "cost").choice.cost
    answer = ask(run, budget=cheapest * 1.01)
    assert {row.type for row in answer.rows} == {"slow"}
    with pytest.raises(Infeasible, match=r"closest is .* of type slow"):
        ask(run, budget=cheapest * 0.9)


def test_the_same_nodes_as_two_types_are_one_job(tmp_path: Path) -> None:
    """Splitting a job by type changes no number."""
    whole = run_with(
        tmp_path / "whole", make_probes(FAST, SWEEP), job=make_spec(search={"max_batch": 4096}, pricing={"price": 9.0})
    )
    split = two_types(tmp_path / "split", slow=False)
    assert [(row.nodes, row.batch, row.hours, row.cost, row.pareto) for row in ask(whole).rows] == [
        (row.nodes, row.batch, row.hours, row.cost, row.pareto) for row in ask(split).rows
    ]


# --- time to the same progress


@pytest.fixture
def noisy(tmp_path: Path) -> RunDir:
    return run_with(tmp_path, add_gradient_noise(make_probes(Truth(noise=0.01), SWEEP), 50.0))


def test_the_same_progress_takes_smaller_batches_than_the_same_epochs(noisy: RunDir) -> None:
    result, fastest = ask(noisy, "accuracy-time"), ask(noisy, "time")
    best = min(row.same_progress.hours for row in result.rows if row.same_progress)
    assert result.choice.same_progress is not None and result.choice.same_progress.hours == best
    assert result.choice.batch < fastest.choice.batch
    assert result.choice.hours > fastest.choice.hours
    assert result.rows == fastest.rows
    epochs = result.choice.same_progress.epochs
    assert f"needs about {epochs:.3g} epochs" in result.reason and "batch 128" in result.reason
    assert result.reason.endswith(f"--set train.epochs={math.ceil(epochs)}")
    assert "noise scale 50 samples" in result.efficiency


def test_the_more_noise_the_larger_the_batch(tmp_path: Path) -> None:
    probes = make_probes(Truth(), SWEEP)
    runs = [run_with(tmp_path / str(scale), add_gradient_noise(probes, scale)) for scale in (1.0, 1e3, 1e7)]
    batches = [ask(run, "accuracy-time").choice.batch for run in runs]
    assert batches == sorted(batches) and batches[0] < batches[-1] == ask(runs[0], "time").choice.batch


def test_the_reference_batch_takes_the_epochs_of_the_spec(noisy: RunDir) -> None:
    rows = [row for row in ask(noisy, "time").rows if row.batch == JOB.train.reference_batch]
    assert rows
    assert all(row.same_progress and row.same_progress.hours == pytest.approx(row.hours) for row in rows)


@pytest.mark.parametrize(
    ("length", "epochs", "asked", "advice"),
    [
        ({"epochs": 10}, 10, "10 epochs", "--set script.length.epochs=13"),
        ({"steps": 100}, 26, "100 steps at batch 256", ", as set by script.length"),
    ],
)
def test_the_length_of_a_script_is_reported_as_its_section_has_it(
    noisy: RunDir, length: dict[str, int], epochs: int, asked: str, advice: str
) -> None:
    measurements: Any = SimpleNamespace(
        run=SimpleNamespace(spec=make.script_spec(**length)), estimator=SimpleNamespace(dataset_size=1000)
    )
    choice = ask(noisy, "accuracy-time").choice
    assert choice.same_progress is not None
    row = choice.model_copy(update={"same_progress": choice.same_progress.model_copy(update={"epochs": 12.4})})
    assert measurements.run.spec.workload.count_epochs(1000) == epochs
    assert describe_epochs(row, measurements, "time") == f"all times are for {asked} at every batch"
    answer = describe_epochs(row, measurements, "accuracy-time")
    assert f"the progress of {asked} at batch 256; tula train runs {asked}" in answer and advice in answer


def test_a_deadline_and_a_budget_hold_for_the_same_progress(noisy: RunDir) -> None:
    best = ask(noisy, "accuracy-time").choice.same_progress
    assert best is not None
    kept = ask(noisy, "accuracy-time", budget=0.5 * best.cost)
    assert all(row.same_progress and row.same_progress.cost <= 0.5 * best.cost for row in kept.rows)
    with pytest.raises(Infeasible, match="to the same progress; the closest is") as caught:
        ask(noisy, "accuracy-time", deadline_hours=0.99 * best.hours)
    assert f": {format_duration(3600 * best.hours)}, " in str(caught.value)
    assert ask(noisy, "time", deadline_hours=0.99 * best.hours).choice.hours < best.hours


def test_without_gradient_statistics_there_is_no_time_to_accuracy(run: RunDir) -> None:
    with pytest.raises(BadMeasurements, match=r"needs the gradient noise, which no probe measured") as caught:
        ask(run, "accuracy-time")
    assert caught.value.exit_code == 4 and "two or more GPUs" in caught.value.hint
    with pytest.raises(Pending, match="gradient noise"):
        ask(run, "accuracy-time", pending=1)
    result = ask(run, "time")
    assert result.efficiency == "" and all(row.same_progress is None for row in result.rows)


def test_the_table_tells_the_same_progress_apart(noisy: RunDir) -> None:
    result = ask(noisy, "knee")
    table = pd.read_csv(noisy.path / "results.csv").set_index(["nodes", "batch"])
    assert len(table) > 10
    for row in result.rows:
        line, message = table.loc[(row.nodes, row.batch)], row.same_progress
        assert message is not None and line.training_hours == pytest.approx(row.hours)
        assert line.same_progress_hours == pytest.approx(message.hours)
        assert (line.same_progress_epochs, line.same_progress_cost_USD) == pytest.approx((message.epochs, message.cost))
        assert line.same_progress_hours_low <= message.hours <= line.same_progress_hours_high


def test_the_other_market_is_that_of_the_chosen_type(tmp_path: Path) -> None:
    two_types(tmp_path)
    spot = {"price": 1.0, "spot": {"discount": 0.6, "interruptions_per_day": 2.0}}
    job = make_spec(search={"max_batch": 4096}, node_types=TYPES, pricing=spot)
    answer = recommend_configuration(make_runs(tmp_path, job), Query(objective="cost"), now=1.0).recommendation
    other = answer.other_market
    assert (answer.choice.type, answer.choice.market) == ("slow", "spot") and other is not None
    same = [row for row in answer.rows if (row.type, row.nodes, row.batch) == ("slow", other.nodes, other.batch)]
    assert {row.market: (row.hours, row.cost) for row in same}["on_demand"] == (other.hours, other.cost)


# --- a script of the user's own, which does not tell everything


@pytest.fixture
def script(tmp_path: Path) -> RunDir:
    job = make_spec(search={"max_batch": 4096}, train={"method": "lbt"})
    return run_with(tmp_path, [as_script_probe(probe) for probe in make_probes(Truth(noise=0.01), SWEEP)], job=job)


def test_a_script_is_recommended_by_its_steps_and_told_what_is_missing(script: RunDir) -> None:
    result = ask(script, "knee")
    assert "only from the times of complete steps" in result.fit
    assert [
        code for code in codes(warnings_of(script, "knee")) if code in ("times-exclude", "same-progress-unknown")
    ] == ["same-progress-unknown", "times-exclude"]
    assert result.efficiency == "" and result.choice.same_progress is None
    assert RunDir.open(script.path).read_recommendation() == result


def test_the_cost_of_an_interruption_of_a_script_is_reported(tmp_path: Path) -> None:
    resume = {"args": "--resume {checkpoint}", "checkpoint": "{out}/c.pt"}
    content = make.script_spec(epochs=10).model_dump(mode="json", exclude_unset=True)
    content["script"] |= {"resume": resume, "save": "SIGUSR1"}
    content["pricing"] = {"price": 1.0, "spot": {"discount": 0.7, "interruptions_per_day": 1}}
    job = validate_job({**content, "search": {"nodes": [2, 4], "max_batch": 4096}}, source="test")
    run = run_with(tmp_path, [as_script_probe(probe) for probe in make_probes(Truth(noise=0.01), SWEEP)], job=job)
    result = ask(run)
    assert result.interruption.startswith("the checkpoint interval is unknown until the script trains")
    assert values(warnings_of(run), "no-spot-saves-unknown") == {"nodes": result.choice.nodes}
    save = ScriptCheckpointSave(saved_at=5.0, batch=64, steps=100, samples=6400, seconds=None)
    run.get_training("old").write_script_saves(
        ScriptSaves(saves=(save.model_copy(update={"saved_at": 1.0, "steps": 7}),))
    )
    run.get_training("new").write_script_saves(ScriptSaves(saves=(save, save)))
    result = ask(run, "cost")
    assert result.interruption.startswith("saves every 100 steps (115 s), so") and "(SIGUSR1)" in result.interruption
    assert result.choice.market == "spot" and "no-spot-saves-unknown" not in codes(warnings_of(run, "cost"))
    shown = "\n".join(str(part) for part in show_recommend._explain_progress_stages_and_checkpoints(result))
    assert f"checkpoints: {result.interruption}" in shown


def test_gradients_of_some_probes_are_enough_for_the_same_progress(tmp_path: Path) -> None:
    value = add_gradient_noise(make_probes(Truth(), SWEEP), 500)
    mixed = [as_script_probe(probe, gradients=None if probe.nodes == 2 else probe.gradients) for probe in value]
    run = run_with(tmp_path, mixed)
    assert "4 probes" in ask(run, "accuracy-time").efficiency
    assert "same-progress-unknown" not in codes(warnings_of(run, "accuracy-time"))


def test_without_gradients_there_is_no_choice_by_accuracy_time(script: RunDir) -> None:
    with pytest.raises(BadMeasurements, match="gradient noise") as caught:
        ask(script, "accuracy-time")
    assert "DistributedDataParallel" in caught.value.hint and "another objective" in caught.value.hint


def test_cells_of_what_was_not_measured_are_empty(script: RunDir) -> None:
    ask(script)
    table = pd.read_csv(script.path / "results.csv")
    seen = table[table.outcome == "measured"]
    assert len(seen) == 9 and seen.step_time_s.notna().all() and seen.peak_memory_bytes.notna().all()
    assert seen[["sync_time_s", "compute_time_s", "data_wait_s"]].isna().all().all()
    frame = api.Run.from_directories([open_run(script)]).results()
    assert frame.step_time_s.notna().all() and frame[["sync_time_s", "data_wait_s"]].isna().all().all()
    stored = json.loads((script.path / "results" / "probe-n002-l000016.json").read_text())
    assert (stored["sync_time"], stored["gradients"], stored["memory"]["libraries"]) == (None, None, None)
    assert isinstance(script.read_results()[0].memory, PeakMemory)  # type: ignore[union-attr]


def test_a_damaged_job_is_reported_and_left_out(run: RunDir) -> None:
    (run.path / "jobs").mkdir()
    (run.path / "jobs/probe-n001.json").write_text("{")
    assert count_pending_probes(open_runs_of_job(run), lambda _: make.FakeLauncher()) == {None: 0}
    assert ["probe-n001.json is damaged" in text for text in ask(run).warnings].count(True) == 1
