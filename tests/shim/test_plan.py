"""Both sides of the contract mean the same."""

import dataclasses
import json
from pathlib import Path

import pytest

from tula_cli.run.records.scripts import ExpectedValues, ShimPlan
from tula_cli.shim.tula_shim.plan import Plan, PlanError, read_plan

GIVEN = {"version": 1, "task": "probe", "folder": "/run/x"}


def written(folder: Path, content: object) -> str:
    path = folder / "plan.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_what_tula_writes_is_what_the_shim_reads(tmp_path: Path) -> None:
    plan = ShimPlan(
        task="t", attempt=2, folder="/run/x", expected=ExpectedValues(world=2, batch=64), seconds=3.0, max_steps=40
    )
    read = dataclasses.asdict(read_plan(written(tmp_path, plan.model_dump_json())))
    assert read | {"folder": str(read["folder"])} == {k: v for k, v in plan.model_dump().items() if k != "version"}


def test_what_is_left_out_is_the_same_on_both_sides(tmp_path: Path) -> None:
    short = read_plan(written(tmp_path, GIVEN))
    assert short == read_plan(written(tmp_path, ShimPlan(task="probe", folder="/run/x").model_dump_json()))
    assert isinstance(short, Plan) and (short.min_steps, short.max_steps) == (15, 15)


def test_nothing_may_be_expected(tmp_path: Path) -> None:
    plan = read_plan(written(tmp_path, GIVEN | {"expected": None}))
    assert plan == read_plan(written(tmp_path, GIVEN))
    assert set(plan.expected.values()) == {None}


def test_steps_are_both_bounds(tmp_path: Path) -> None:
    plan = read_plan(written(tmp_path, GIVEN | {"steps": 8}))
    assert (plan.min_steps, plan.max_steps) == (8, 8)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read"),
        (GIVEN | {"version": 2}, "does not have version 1"),
        ([1], "does not have version 1"),
        ({"version": 1, "task": "probe"}, "key 'folder' is missing"),
        (GIVEN | {"mode": "watch"}, "key 'mode' must be one of"),
        (GIVEN | {"warmup": 0}, "key 'warmup' must be a number of at least 1, got 0"),
        (GIVEN | {"warmup": True}, "got True"),
        (GIVEN | {"min_steps": 9, "max_steps": 8}, "key 'max_steps' must be a number of at least 9, got 8"),
        (GIVEN | {"seconds": "1"}, "got '1'"),
        (GIVEN | {"expected": []}, "mapping or null, got []"),
        (GIVEN | {"rehearsal": {"after": 5}}, "all of after, checkpoint, or null"),
        (GIVEN | {"expected": 64}, "mapping or null, got 64"),
    ],
)
def test_a_plan_of_another_kind_is_refused(tmp_path: Path, content: object, words: str) -> None:
    with pytest.raises(PlanError, match="plan") as error:
        read_plan(written(tmp_path, content))
    assert words in str(error.value) and str(tmp_path) in str(error.value)
