"""`tula diff`: the answer is right where it is known what was changed."""

import shutil
from pathlib import Path
from typing import Any

import make_runs as make
import numpy as np
import pytest
from make_results import Truth, as_script_probe, make_probe

import tula_cli as tula
from tula_cli.errors import SpecError
from tula_cli.run.directory import RunDir
from tula_cli.run.job_runs import open_run
from tula_cli.run.records.probes import GpuState
from tula_cli.run.records.tasks import CodeSnapshot, ProbeTask
from tula_cli.services.diff import RunDifference, choose_run, compare_runs
from tula_cli.show.diff import render_difference
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import dump_yaml

BEFORE = Truth(jitter=0.02)
PLACES = [(nodes, local) for nodes in (1, 2, 4) for local in (64, 128)]


def add(
    run: RunDir, truth: Truth = BEFORE, *, places: Any = PLACES, seed: int = 0, script: bool = False, **own: Any
) -> None:
    """Add probes; `own` replaces fields of their environment, or the clock of their GPUs."""
    clock = own.pop("clock", 1980)
    state = GpuState(sm_mhz=clock, watts=300, held_down=("power cap",) if clock < 1500 else ())
    for index, (nodes, local) in enumerate(places):
        probe = make_probe(truth, nodes, local, rng=np.random.default_rng(100 * seed + index), gpus=(state, state))
        probe = probe.model_copy(update={"environment": probe.environment.model_copy(update=own)})
        run.write_result(as_script_probe(probe) if script else probe)


@pytest.fixture
def runs(tmp_path):
    """Return a function that makes a run of a spec under a name."""

    def made(name: str, spec: JobSpec | None = None) -> RunDir:
        return RunDir.create(tmp_path / name, spec or make.spec())

    return made


def shown(result: RunDifference) -> str:
    return "\n".join(part for part in render_difference(result) if isinstance(part, str))


def test_a_copy_differs_in_nothing(runs, tmp_path):
    item = runs("a")
    add(item)
    copy = shutil.copytree(item.path, tmp_path / "copy")
    result = compare_runs(open_run(item), open_run(RunDir.open(copy)))
    assert result.same
    message = (
        "nothing differs: the same job, code and environment; step times are equal within noise (6 configurations)"
    )
    assert result.headline == (message,)
    assert set(result.frame()["ratio"]) == {1.0}


def test_noise_alone_is_no_difference(runs):
    first, other = runs("a"), runs("b")
    add(first, seed=1)
    add(other, seed=2)
    result = compare_runs(open_run(first), open_run(other))
    assert result.same and {row.ratio for row in result.steps.rows} != {1.0}


def test_slower_clocks_and_another_driver_are_the_answer(runs):
    first, other = runs("a"), runs("b")
    add(first, driver="550.54")
    slow = Truth(jitter=0.02, fixed=BEFORE.fixed * 1.4, slope=BEFORE.slope * 1.4)
    add(other, slow, driver="560.35", clock=1410)
    result = compare_runs(open_run(first), open_run(other))
    pace, what = result.headline
    assert pace.endswith("x as slow at 6 of 6 configurations (compute, not network or input)")
    assert float(pace.split()[2]) == pytest.approx(1.32, abs=0.08)
    assert what == (
        "what differs: GPU driver 550.54 -> 560.35, GPU clocks 1980 -> 1410 MHz, clocks throttled by none -> power cap"
    )


def test_a_slower_network_is_distinguished_from_slower_nodes(runs):
    first, other = runs("a"), runs("b")
    add(first)
    add(other, Truth(jitter=0.02, sync=0.09))
    result = compare_runs(open_run(first), open_run(other))
    assert result.headline[0].endswith("at 4 of 6 configurations (network, not compute or input)")
    assert [row.nodes for row in result.steps.changed_rows] == [2, 2, 4, 4]
    assert "no recorded property differs" in result.headline[1]
    assert compare_runs(open_run(other), open_run(first)).headline[0].partition(" at ")[0].endswith("x as fast")


def test_faster_here_and_slower_there_is_no_one_number(runs):
    first, other = runs("a"), runs("b")
    add(first)
    add(other, Truth(jitter=0.02, fixed=0.005, sync=0.09))
    assert (
        compare_runs(open_run(first), open_run(other))
        .headline[0]
        .startswith("B is slower at 4 and faster at 2 of 6 configurations (")
    )


def test_keys_of_the_job_are_reported_with_defaults_filled_in(runs):
    item = runs("a", make.spec(search={"nodes": [1, 2], "max_node_hours": 10}))
    other = runs("b", make.spec(search={"nodes": [1, 2], "max_node_hours": 10, "min_steps": 20}, pricing={"price": 3}))
    add(item)
    add(other)
    result = compare_runs(open_run(item), open_run(other))
    assert {key.about: (key.before, key.after) for key in result.job} == {
        "search.min_steps": (10, 20),
        "pricing.price": (1.0, 3.0),
        "pricing.currency": ("node-h", "USD"),
    }
    assert "search.min_steps 10 -> 20" in result.headline[1]


def test_a_section_of_one_run_alone_has_no_rows_for_its_unset_keys(runs):
    before = runs("a")
    after = runs("b", make.spec(dataset={**make.SPEC["dataset"], "test": {"name": "mine:test_set"}}))
    fields = compare_runs(open_run(before), open_run(after)).job
    assert fields and all(field.before != field.after for field in fields)
    assert "dataset.test.name" in [field.about for field in fields]


def test_of_many_differences_the_headline_names_six_and_counts_the_others(runs):
    search = {"min_steps": 20, "min_seconds": 6, "max_seconds": 61, "min_batch": 16, "max_batch": 2048}
    other = runs(
        "b", make.spec(search={**make.SPEC["search"], **search}, train={**make.SPEC["train"], "seed": 9, "workers": 1})
    )
    result = compare_runs(open_run(runs("a")), open_run(other))
    assert len(result.job) > 6
    line = result.headline[-1]
    assert line.count(" -> ") == 6 and line.endswith(f", and {len(result.job) - 6} more")


def code(run: RunDir, files: dict[str, str], commit: str) -> None:
    name = f"c{len(files)}{commit}"
    for path, text in files.items():
        (place := run.get_code_dir(name) / path).parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    run.write_code(
        CodeSnapshot(
            name=name, digest=name, taken_at=make.START, workdir="/", roots=(".",), modules=tuple(files), files=tuple(files),
            commit=commit,
        )
    )  # fmt: skip
    run.write_task(
        ProbeTask(
            id="probe-n001",
            job="probe-n001",
            spec=run.read_spec(),
            workdir="/",
            nodes=1,
            local_batches=(64,),
            code=name,
        )
    )


def test_files_of_the_code_and_its_commit_are_reported(runs):
    first, other = runs("a"), runs("b")
    code(first, {"train.py": "a\nb\nc\n", "same.py": "x\n", "gone.py": "1\n2\n"}, "1111111111111111")
    code(other, {"train.py": "a\nB\nc\nd\n", "same.py": "x\n", "pkg/new.py": "1\n"}, "2222222222222222")
    result = compare_runs(open_run(first), open_run(other))
    assert {file.about: (bool(file.before), bool(file.after)) for file in result.code} == {
        "commit": (True, True),
        "gone.py": (True, False),
        "train.py": (True, True),
        "pkg/new.py": (False, True),
    }
    assert (result.code[0].before, result.code[0].after) == ("111111111111", "222222222222")
    assert "code (3 files)" in result.headline[-1] and "commit" not in result.headline[-1] and not result.same


def test_a_commit_is_the_difference_if_no_file_is(runs):
    first, other = runs("a"), runs("b")
    code(first, {"train.py": "a\n"}, "1111111111111111")
    code(other, {"train.py": "a\n"}, "2222222222222222")
    assert compare_runs(open_run(first), open_run(other)).headline[-1] == (
        "what differs: commit 111111111111 -> 222222222222"
    )


def test_what_fits_in_one_run_alone_is_reported(runs):
    first, other = runs("a"), runs("b")
    add(first, places=[(1, 64), (1, 128)])
    add(other, places=[(1, 64), (2, 64)])
    make.add_out_of_memory(other, 1, 128)
    result = compare_runs(open_run(first), open_run(other))
    assert [row.outcomes for row in result.steps.rows] == [("measured", "measured"), ("measured", "out_of_memory")]
    assert result.steps.only == (0, 1)
    assert "1 configuration only in B" in shown(result)


def test_a_script_tells_whole_steps(runs):
    spec = make.script_spec(epochs=3)
    first, other = runs("a", spec), runs("b", spec)
    add(first, script=True)
    add(other, Truth(jitter=0.02, fixed=0.08), script=True, torch="2.8")
    result = compare_runs(open_run(first), open_run(other))
    assert result.headline[0].endswith("x as slow at 6 of 6 configurations")
    assert result.headline[1] == "what differs: torch 2.6 -> 2.8"


def test_of_a_job_with_several_node_types_one_run_is_named(tmp_path):
    types = {"large": {"pricing": {"price": 3}}, "small": {"pricing": {"price": 1}}}
    runs = make.create_runs(tmp_path, make.spec(node_types=types))
    for run in runs:
        add(run)
    with pytest.raises(SpecError, match="2 runs, one for each node type") as caught:
        choose_run(runs)
    assert caught.value.hint == f"name one of them: {runs[0].id}, {runs[1].id}"
    assert choose_run(runs[:1]).id == runs[0].id


def test_runs_without_a_measurement_are_compared_by_their_jobs(runs):
    result = compare_runs(open_run(runs("a")), open_run(runs("b")))
    assert result.headline == ("nothing differs: the same job and code; neither run has measurements",)
    other = runs("c")
    add(other)
    message = "nothing differs: the same job and code; no configuration was measured in both runs"
    assert compare_runs(open_run(runs("a")), open_run(other)).headline == (message,)


def test_a_damaged_result_is_left_out_and_told(runs):
    first, other = runs("a"), runs("b")
    add(first)
    add(other)
    (other.path / "results" / "probe-n001-l000064.json").write_text("{")
    result = compare_runs(open_run(first), open_run(other))
    assert len(result.steps.rows) == 5 and "probe-n001-l000064" in result.warnings[0].text


@pytest.mark.parametrize("times", [(), (0.0,) * 10, (-1.0,) * 10])
def test_times_that_no_step_takes_are_not_compared(runs, times):
    first, other = runs("a"), runs("b")
    add(first)
    add(other)
    other.write_result(make_probe(BEFORE, 1, 64, step_times=times))
    result = compare_runs(open_run(first), open_run(other))
    assert len(result.steps.rows) == 5 and "probe-n001-l000064" in result.warnings[0].text


def test_python_takes_names_folders_and_runs(runs, tmp_path):
    first, other = runs("a"), runs("a/more")
    add(first)
    add(other)
    by_name = tula.diff(first.id, tula.Run.open(other.path), root=tmp_path / "a")
    assert by_name.same and by_name.before.path == first.path
    job = tmp_path / "job.yaml"
    job.write_text(dump_yaml(first.read_spec()))
    assert tula.diff(job, other.path, root=tmp_path / "a").before.path == first.path
    with pytest.raises(SpecError, match="are the same run"):
        tula.diff(first.path, str(first.path) + "/")
    with pytest.raises(SpecError, match="there is no run"):
        tula.diff(first.path, Path("nowhere"))
