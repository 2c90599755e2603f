"""Rows of a comparison with settings of their own: what they say, and what is no row."""

import json

import make_runs as make
import pytest
from make_results import make_inspection

from tula_cli.errors import SpecError
from tula_cli.options import split_methods
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.records.inspections import Inspection
from tula_cli.services import compare, messages
from tula_cli.services.compare import Grid, make_job_of_cell
from tula_cli.services.comparison.rows import parse_row
from tula_cli.services.plans import ComparePlan
from tula_cli.spec.job import JobSpec

JOB = make.spec(train={"epochs": 4, "reference_batch": 32, "seed": 5}, ags={"b_small": 8})


def test_commas_part_rows_where_they_stand_in_no_bracket_and_no_quotes() -> None:
    text = "lbt, ags:refresh={every: 5, }:delta=0.1,lbt:optimizer.betas=[0.9,0.99],a.b:C:train.best_checkpoint={metric: 'x,y'},"
    assert split_methods(text) == (
        "lbt", "ags:refresh={every: 5, }:delta=0.1", "lbt:optimizer.betas=[0.9,0.99]", "a.b:C:train.best_checkpoint={metric: 'x,y'}",
    )  # fmt: skip
    for empty in (",", "", " , "):
        with pytest.raises(SpecError, match="must be methods separated by commas"):
            split_methods(empty)


@pytest.mark.parametrize(
    ("row", "method", "settings"),
    [
        ("lbt", "lbt", ()),
        ("ags:delta=0.1", "ags", ("ags.delta=0.1",)),
        ("ags:delta=0.1:b_small=4", "ags", ("ags.delta=0.1", "ags.b_small=4")),
        ("ags:refresh={every: 5}:ags.delta=inf", "ags", ("ags.refresh={every: 5}", "ags.delta=inf")),
        ("robust:delta=0.3", "ags", ("ags.delta=0.3",)),
        ("auto:branch_epochs=2", "auto", ("auto.branch_epochs=2",)),
        ("lbt-x2:schedule.warmup_epochs=1", "lbt", ("schedule.warmup_epochs=1",)),
        ("lbt:optimizer.name=my.code:Opt:optimizer.lr=0.2", "lbt", ("optimizer.name=my.code:Opt", "optimizer.lr=0.2")),
        ("my.code:Own", "my.code:Own", ()),
        ("my.code:Own.part:train.epochs=2", "my.code:Own.part", ("train.epochs=2",)),
    ],
)
def test_a_row_is_a_method_and_settings(row: str, method: str, settings: tuple[str, ...]) -> None:
    result = parse_row(row)
    assert (result.method, result.settings) == (method, settings)


def test_the_settings_are_laid_over_the_job_and_checked_by_the_spec() -> None:
    job = make_job_of_cell(JOB, "static:factor=4:optimizer.lr=0.5:train.max_grad_norm=1", 7)
    assert (job.train.method, job.ags.factor, job.ags.b_small) == ("static", 4, 8)
    assert (job.optimizer.lr, job.train.max_grad_norm, job.train.seed) == (0.5, 1, 7)
    assert make_job_of_cell(JOB, "robust:delta=0.3", 7).ags.preset == "robust"
    assert make_job_of_cell(JOB, "lbt-x2:optimizer.lr=0.3", 7).optimizer.lr == 0.3  # the row's own words are the last
    assert JOB.ags.factor == "auto"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("agz:delta=1", "there is no method 'agz' did you mean ags"),
        ("nothing", "name your own method as package.module:attribute"),
        ("ags:0.1", "'0.1' is not a setting write ags:KEY=VALUE, as in ags:delta=0.1"),
        ("ags:delta", "'ags:delta': delta has no value write ags:KEY=VALUE"),
        ("my.code:", "there is no method 'my.code:'"),
        (
            "lbt:lr=0.2",
            "method lbt has no section, so lr needs the name of its section write lbt:optimizer.lr=0.2",
        ),
        ("lbt:model.name=vgg11", "a row cannot set section model, which is the same in all rows"),
        ("ags:train.seed=3", "sets train.seed, which --seeds changes"),
        ("ags:train.method=lbt", "sets train.method, which is the first word of the row"),
        ("lbt:ags.delta=0.1", "section ags has no effect with method lbt"),
        ("ags:auto.branch_epochs=1", "section auto has no effect with method ags"),
        ("ags:delta=", "delta has no value"),
        ("ags:delta=0.1:ags.delta=0.2", "sets ags.delta twice"),
        ("ags:delta=[0.1", "--methods: 'ags:delta=[0.1': ags.delta, line 1, column 5: not valid YAML"),
    ],
)
def test_what_is_no_row_is_refused(row: str, words: str) -> None:
    with pytest.raises(SpecError) as error:
        Grid(methods=("lbt", row), batches=(128,), seeds=1, nodes=1)
    assert words in f"{error.value.message} {error.value.hint}"


@pytest.mark.parametrize(
    ("row", "path", "words"),
    [
        ("ags:dleta=0.1", "ags.dleta", "did you mean delta"),
        ("ags:delta=-1", "ags.delta", "at least 0"),
        ("lbt:train.epochs=none", "train.epochs", "integer"),
    ],
)
def test_a_setting_that_the_spec_does_not_take_is_reported_as_it_tells_it(row: str, path: str, words: str) -> None:
    with pytest.raises(SpecError) as error:
        make_job_of_cell(JOB, row, 5)
    (problem,) = error.value.problems
    assert problem.path == path and words in f"{problem.message} {problem.hint}"
    assert row in error.value.message


# --- in a plan


def plan(run: RunDir, *rows: str, inspect=lambda spec: make_inspection()) -> ComparePlan:
    grid = Grid(methods=rows, batches=(128,), seeds=1, nodes=1, controls=False)
    return compare.plan_comparison(Run(run.path, run.read_spec()), grid, inspect=inspect, now=1.0)


@pytest.fixture
def run(tmp_path) -> RunDir:
    return RunDir.create(tmp_path / "tula-runs", JOB)


def test_each_row_is_a_training_of_its_own_under_its_own_words(run: RunDir) -> None:
    rows = ("lbt", "ags", "ags:delta=0.1", "ags:delta=0.2", "static:factor=4")
    comparison = plan(run, *rows).comparison
    assert [cell.method for cell in comparison.cells if not cell.reference] == list(rows)
    assert len({cell.signature for cell in comparison.cells}) == 6
    assert json.loads(comparison.model_dump_json())["methods"] == list(rows)


def test_a_row_that_changes_nothing_is_one_with_the_other_and_that_is_said(run: RunDir) -> None:
    result = plan(run, "ags", "ags:delta=0.5", "lbt:train.diagnostics=[gradient_norms]")
    assert [cell.method for cell in result.comparison.cells] == ["lbt", "ags", "lbt:train.diagnostics=[gradient_norms]"]
    assert messages.duplicate_row(row="ags:delta=0.5", twin="ags") in result.warnings


def test_a_control_that_a_row_with_settings_is_already_is_said_too(run: RunDir) -> None:
    grid = Grid(methods=("lbt", "lbt:optimizer.lr=0.2"), batches=(128,), seeds=1, nodes=1)
    comparison = compare.plan_comparison(
        Run(run.path, run.read_spec()), grid, inspect=lambda spec: make_inspection(), now=1.0
    )
    assert messages.duplicate_row(row="lbt-x2", twin="lbt:optimizer.lr=0.2") in comparison.warnings


def test_a_method_of_ones_own_is_inspected_and_its_code_is_a_part_of_the_signature(
    run: RunDir, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = tmp_path / "mine.py"
    signatures, seen = [], list[str]()

    def inspect(spec: JobSpec) -> Inspection:
        seen.append(spec.train.method)
        return make_inspection()

    for text in ("A = 1", "A = 2"):
        code.write_text(text)
        cells = plan(run, "lbt", "mine:Own", inspect=inspect).comparison.cells
        signatures.append({cell.method: cell.signature for cell in cells if not cell.reference})
    assert seen.count("mine:Own") == 2
    assert signatures[0]["lbt"] == signatures[1]["lbt"] and signatures[0]["mine:Own"] != signatures[1]["mine:Own"]


def test_a_method_of_ones_own_that_cannot_be_built_ends_the_plan(run: RunDir) -> None:
    def inspect(spec: JobSpec) -> Inspection:
        if spec.train.method == "lbt":
            return make_inspection()
        raise SpecError("training method 'mine:Own': there is no module 'mine'", "install it")

    with pytest.raises(SpecError, match="method mine:Own: training method 'mine:Own': there is no module"):
        plan(run, "lbt", "mine:Own", inspect=inspect)
