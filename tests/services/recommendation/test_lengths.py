"""search.sequence: what is measured at each length of text, and what is told of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from make_results import MIB, Truth, inspected, measured, out_of_memory
from make_runs import create_runs
from read_diagnostics import values

from tula_cli.errors import BadMeasurements, Infeasible, SpecError
from tula_cli.query import Query
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.job_runs import list_runs_with_data, make_runs, open_family, select_runs
from tula_cli.run.records.base import Components, Footprint
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.probes import Tokens
from tula_cli.run.records.recommendations import Recommendation
from tula_cli.services import profiling_rounds
from tula_cli.services.check import check, check_all
from tula_cli.services.recommend import recommend
from tula_cli.show import check as show_check
from tula_cli.show import recommend as show_recommend
from tula_cli.show.tables import list_data_by_type
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate

TEXT: dict[str, Any] = {
    "name": "text",
    "model": {"name": "transformers:GPT2LMHeadModel", "args": {"n_positions": 256}},
    "dataset": {"name": "python_source", "args": {"length": 128, "size": 100_000}},
    "optimizer": {"name": "AdamW", "lr": 0.001},
    "train": {"epochs": 2, "method": "lbt"},
    "search": {"nodes": [2, 1], "min_batch": 32, "max_batch": 256, "max_node_hours": 10, "strategy": "sweep", "sequence": {"lengths": [64, 128, 256]}},
}  # fmt: skip


def text(sequence: dict[str, Any] | None = None, **changes: Any) -> JobSpec:
    search = {**TEXT["search"], **({"sequence": sequence} if sequence else {})}
    return validate({**TEXT, "search": search, **changes}, source="test")


def step(length: int) -> Truth:
    """Return a job whose samples take L + L^2 / 512, in time and memory."""
    growth = length * (1 + length / 512)
    return Truth(
        fixed=0.01, slope=2e-6 * growth, sample_bytes=int(MIB * growth / 100), noise=0.0, dataset_size=128_000 // length
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    runs = create_runs(tmp_path, text())
    for part in runs:
        length = part.length or 128
        sizes = {1: (32, 64, 128, 256), 2: (16, 128)} if part.length is None else {1: (32, 128, 256)}
        for nodes, local in ((nodes, local) for nodes, locals_ in sizes.items() for local in locals_):
            part.write_result(measured(step(length), nodes, local, tokens=Tokens(length=length, real=0.75 * length)))
    return runs[0]


def ask(run: RunDir) -> Recommendation:
    return recommend(open_family(run), Query(objective="time"), now=1.0).recommendation


# --- what a job at another length is


def test_each_length_is_written_into_its_options_and_a_few_batches_are_measured() -> None:
    job = text({"lengths": [256, 128, 64], "lengths_map_to": ["dataset.args.length", "model.args.n_positions"]})
    result = job.by_length()
    assert job.length == 128 and list(result) == [64, 256]
    other = result[256]
    assert (other.dataset.args, other.model.args) == ({"length": 256, "size": 100_000}, {"n_positions": 256})
    assert (other.search.nodes, other.measured_in_addition, other.by_length()) == ([1], "length", {})
    assert text().by_length()[64].model.args == {"n_positions": 256}
    assert validate(TEXT | {"search": {}}, source="test").by_length() == {}


@pytest.mark.parametrize(
    ("job", "told"),
    [
        ({"dataset": {"name": "python_source"}}, "needs the length of the job: set dataset.args.length"),
        ({"dataset": {"name": "python_source", "args": {"length": "long"}}}, "needs the length of the job"),
        ({"model": {"name": "transformers:GPT2LMHeadModel", "args": {"n_positions": 128}}}, "at most 128 positions"),
    ],
)
def test_a_length_that_cannot_be_is_refused(job: dict[str, Any], told: str) -> None:
    with pytest.raises(Exception, match="search") as refused:
        text(**job)
    assert told in str([refused.value, *refused.value.problems])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "sequence", [{"lengths": []}, {"lengths": [8, 8]}, {"lengths": [8], "lengths_map_to": ["train.epochs"]}]
)
def test_lengths_and_options_are_checked(sequence: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="sequence"):
        text(sequence)


def test_a_script_has_no_lengths_of_its_own() -> None:
    script = {"command": "python t.py -b {local_batch}", "length": {"epochs": 1}, "reference": {"batch": 8}}
    with pytest.raises(Exception, match="sequence") as refused:
        validate({"script": script, "search": TEXT["search"]}, source="test")
    assert "profile a script once per length" in str([refused.value, *refused.value.problems])  # type: ignore[attr-defined]


# --- where it is kept


def test_lengths_are_parts_inside_the_run_that_are_reported_apart(run: RunDir) -> None:
    runs = open_family(run)
    assert [(part.name, part.length) for part in runs] == [
        (None, None),
        ("length-64", 64),
        ("length-256", 256),
    ]
    assert runs[2].name_jobs(["probe-n001"]) == ["length-256/probe-n001"]
    assert [part.path for part in select_runs(runs, None)] == [run.path], "what may be trained"
    assert [part.spec.measured_in_addition for part in runs] == [None, "length", "length"]
    with pytest.raises(SpecError, match="measures text length 64"):
        select_runs(runs[1:], None)
    typed = validate(TEXT | {"node_types": {"a": {}, "b": {}}}, source="test")
    names = [part.name for part in make_runs(run.path.parent, typed)]
    assert names == ["a", "a-length-64", "a-length-256", "b", "b-length-64", "b-length-256"]
    longer = text({"lengths": [64, 512]}, model={"name": "mine:net"})
    assert [part.name for part in list_runs_with_data(make_runs(run.path.parent, longer))] == [None], "never begun"


# --- what would be measured


def inspection(length: int, **changes: Any) -> Inspection:
    growth = MIB * length // 32
    rows = [Footprint(local_batch=n, memory=Components(parameters=MIB, gradients=MIB, optimizer=MIB, factors=0, batch=0,
            activations=n * growth, peak=3 * MIB + n * growth, reserved=3 * MIB + n * growth)) for n in (8, 16)]  # fmt: skip
    return inspected(dataset_size=128_000 // length, capacity=1500 * MIB, footprints=tuple(rows), **changes)


def looks(spec: JobSpec) -> Inspection:
    return inspection(spec.dataset.args["length"])


def test_check_tells_what_memory_holds_at_each_length_and_what_measuring_costs() -> None:
    report = check(text(), inspector=looks)
    rows = {item.length: item for item in report.lengths}
    assert {length: first.batches for length, first in rows.items()} == {
        64: (32, 128, 256), 128: (32, 64, 128, 256), 256: (32, 64, 128),
    }  # fmt: skip
    assert rows[128].own and rows[64].largest_batch == (1350 - 3) // 2 and rows[256].largest_batch == (1350 - 3) // 8
    assert rows[256].memory == tuple((3 + 8 * batch) * MIB for batch in rows[256].batches)
    alone = check(text({"lengths": [128]}), inspector=looks)
    assert report.node_hours_at_most == pytest.approx(alone.node_hours_at_most + 2 * 20 / 60)
    assert alone.lengths == () and report.expected.hours > alone.expected.hours  # type: ignore[union-attr]
    shown = [str(part) for part in show_check.render_check(report, {})]
    assert any("as if steps took as long at every length" in line for line in shown)


def test_check_leaves_a_length_out_that_does_not_fit_and_says_so() -> None:
    def small(spec: JobSpec) -> Inspection:
        return looks(spec).model_copy(update={"capacity": 250 * MIB})

    report = check(text(), inspector=small)
    assert not report.problems and values(report.warnings, "length-left-out")["length"] == 256
    offline = check_all(make_runs(Path("tula-runs"), text()), online=False).reports[None]
    assert [(length.length, length.batches, length.memory) for length in offline.lengths][2] == (
        256,
        (32, 128, 256),
        (),
    )


def planned(runs: Sequence[Run], most: int) -> tuple[dict[str | None, dict[int, tuple[int, ...]]], list[str]]:
    message, work = [], profiling_rounds.plan_variants(runs, {
        part.name: inspection(part.length or 128).model_copy(update={"capacity": most * MIB}) for part in runs
    })  # fmt: skip
    while True:
        try:
            message.append(next(work).text)  # type: ignore[union-attr]
        except StopIteration as end:
            return {
                part.name: {task.nodes: task.local_batches for task in plan.tasks} for part, plan in end.value
            }, message


def test_profile_measures_the_lengths_as_jobs_of_their_own(tmp_path: Path) -> None:
    runs = make_runs(tmp_path, text())
    result, _ = planned(runs, 1500)
    assert result["length-64"] == {1: (32, 128, 256)} and result["length-256"] == {1: (32, 64, 128)}
    assert result[None] == {1: (32, 64, 128, 256), 2: (16, 64, 128)}
    result, message = planned(runs, 250)
    assert (
        set(result) == {None, "length-64"}
        and message
        and message[0].startswith("Length 256 is left out: out of memory")
    )
    with pytest.raises(Infeasible):
        planned(runs, 60)  # the job's own length is what is trained


# --- what is told of it


def test_each_length_tells_what_fits_and_its_tokens_a_second(run: RunDir) -> None:
    answer = ask(run)
    rows = {item.length: item for item in answer.lengths}
    assert list(rows) == [64, 128, 256] and [entry.own for entry in answer.lengths] == [False, True, False]
    assert answer.rows == tuple(row for row in answer.rows if row.nodes in (1, 2)) and answer.choice.batch <= 256
    for length, first in rows.items():
        fastest = first.fastest
        assert fastest is not None and fastest.batch == 256 and first.nodes == 1
        rate = 0.75 * length * 256 / step(length).step_time(1, 256)
        assert first.tokens_per_second(fastest) == pytest.approx(rate, rel=1e-3)
        assert first.padding == pytest.approx(0.25)
        sample = step(length).sample_bytes
        assert first.largest_batch == pytest.approx((0.9 * 16 * 1024 * MIB - 400 * MIB) / sample, rel=0.05)
    assert "33 % grow with the square of the length at 256" in answer.growth
    assert answer.growth.count("33 %") == 2, "time and memory alike"


def test_a_length_without_results_says_so_and_keeps_the_others(run: RunDir) -> None:
    longest = open_family(run)[2]
    for result in longest.results():
        (longest.path / f"results/{result.id}.json").unlink()
    longest.write_result(out_of_memory(1, 32))
    last = ask(run).lengths[-1]
    assert last.rows == () and last.fastest is None and "every probe ran out of memory" in last.note
    assert ask(run).lengths[0].rows


def test_what_was_out_of_memory_bounds_the_largest_batch(run: RunDir) -> None:
    longest = open_family(run)[2]
    longest.write_result(out_of_memory(1, 256))
    last = ask(run).lengths[-1]
    assert last.largest_batch == 255 and last.fastest is not None and last.fastest.batch == 128


def test_a_job_without_lengths_has_none(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, validate(TEXT | {"search": {"nodes": [1]}}, source="test"))
    with pytest.raises(BadMeasurements):
        ask(run)
    for local in (32, 64):
        run.write_result(measured(step(128), 1, local))
    answer = ask(run)
    assert answer.lengths == () and answer.growth == ""


def test_the_screen_has_a_row_a_length(run: RunDir) -> None:
    answer = ask(run)
    made = show_recommend.make_lengths_table(answer)
    cells = [list(column.cells) for column in made.columns]
    assert cells[0] == ["64", "128 (own)", "256"] and cells[3] == ["25.0"] * 3
    parts = [str(part) for part in show_recommend.render_recommendation(answer)]
    assert any(part.startswith("lengths: of a sample's share") for part in parts)


def test_in_json_other_lengths_stand_beside_the_jobs_own(run: RunDir) -> None:
    report = check(text(), inspector=looks)
    data = list_data_by_type({None: report, "length-64": report})
    assert data["lengths"] == {"length-64": report} and data["jobs"] == report.jobs
