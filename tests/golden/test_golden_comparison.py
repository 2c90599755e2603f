"""The comparison of outcomes notices every change, but those that the table of renamed keys allows."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden
import pytest
from golden import Normaliser, Outcome, Rename, list_differences

ANSWER: dict[str, Any] = {
    "status": "done",
    "rows": [{"nodes": 1, "cost": 0.25, "tags": []}, {"nodes": 2, "cost": 0.5, "tags": ["a"]}],
    "reason": "the cheapest of 2",
    "choice": {"nodes": 1},
    "error": None,
}


def changed(change: Callable[[dict[str, Any]], object], *table: Rename, stderr: str = "two words") -> list[str]:
    """Return the differences after a change of the answer."""
    answer = copy.deepcopy(ANSWER)
    change(answer)
    expected, actual = Outcome.of(ANSWER, stderr="two words"), Outcome.of(answer, stderr=stderr)
    return list_differences(expected, actual, "recommend", list(table))


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: answer["rows"][0].update(cost=0.25 * (1 + 1e-8)),
        lambda answer: answer["rows"][0].update(nodes=1.0),
        lambda answer: answer["rows"][0].update(nodes=True),
        lambda answer: answer["rows"][1].pop("cost"),
        lambda answer: answer["rows"].pop(),
        lambda answer: answer["rows"].reverse(),
        lambda answer: answer["rows"][0].update(tags=None),
        lambda answer: answer["rows"][0].update(extra=1),
        lambda answer: answer.update(reason="the cheapest of 3"),
        lambda answer: answer.update(reason=None),
        lambda answer: answer.update(status="failed"),
        lambda answer: answer.update(error="none"),
        lambda answer: answer["choice"].clear(),
    ],
)  # fmt: skip
def test_a_change_is_noticed(change: Callable[[dict[str, Any]], object]) -> None:
    assert changed(change)


def test_what_is_the_same_is_no_difference() -> None:
    assert changed(lambda answer: answer["rows"][0].update(cost=0.25 * (1 + 1e-11))) == []
    assert len(changed(lambda answer: None, stderr="two other words")) == 3


@pytest.mark.parametrize(
    ("expected", "actual", "equal"),
    [
        ("batch,step_s\n32,0.00868401059762568\n", "batch,step_s\n32,0.008684010597625682\n", True),
        ("0.5 s", "0.49999999999999994 s", True),
        ("-1.2345678901e-05", "-1.2345678902e-05", True),
        ("0.00868401059762568 s", "0.00868401069762568 s", False),
        ("step 8.68 ms", "step 8.69 ms", False),
        ("32,0.125", "64,0.125", False),
        ("a 0.123456789012 b", "a 0.123456789012 c", False),
        ("0.123456789012", "0.123456789012 0.123456789012", False),
    ],
)
def test_unrounded_numbers_in_texts_agree_to_nine_digits(expected: str, actual: str, equal: bool) -> None:
    assert golden.are_equal(expected, actual) is golden.are_equal(actual, expected) is equal


def test_a_sentence_is_no_part_of_the_data() -> None:
    before, after = Outcome.of(ANSWER), Outcome.of(ANSWER | {"reason": "other words"})
    assert before.data == after.data and before.sentences != after.sentences


def test_renamed_and_dropped_keys_are_compared_under_their_new_names() -> None:
    def rename(answer: dict[str, Any]) -> None:
        answer["candidates"] = [
            {"nodes": row["nodes"], "price": {"total": row["cost"]}, "tags": row["tags"]} for row in answer.pop("rows")
        ]
        del answer["choice"]
        answer["version"] = 2

    table = [
        Rename("*", "rows[].cost", "candidates[].price.total"),
        Rename("recommend", "rows", "candidates"),
        Rename("recommend", "choice", ""),
        Rename("*", "", "version"),
    ]
    assert changed(rename, *table) == []
    assert changed(rename), "no table, no renamed key"
    assert changed(rename, *[Rename("train", row.old, row.new) for row in table]), "a table of another command"

    def rename_and_change(answer: dict[str, Any]) -> None:
        rename(answer)
        answer["candidates"][1]["price"]["total"] = 0.6

    assert len(changed(rename_and_change, *table)) == 3, "the value is compared under its new name"


def test_outcomes_are_read_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "EXPECTED", tmp_path)
    outcome = Outcome.of(ANSWER, stdout="one two\n\n    three: four  \n\nfive\n", stderr=" indented: words")
    golden.save_outcomes({"list-some": outcome, "list-more": Outcome.of({}, stderr="a b")}, all_cases=True)
    read = golden.load_outcome("list-some")
    assert read is not None and list_differences(outcome, read, "list", []) == []
    golden.save_outcomes({"list-more": Outcome.of({}, stderr="c d")}, all_cases=False)
    again = golden.load_outcome("list-some")
    assert again is not None and again.sentences == outcome.sentences


def test_what_differs_from_day_to_day_is_replaced(tmp_path: Path) -> None:
    normalise = Normaliser(tmp_path)
    assert normalise.text(f"{tmp_path}/job-1a2b3c4d at 2026-11-25 10:09") == "<folder>/job-<id1> at <date>"
    assert normalise.text("1a2b3c4d, then 0000beef; tula 1.2.3") == "<id1>, then <id2>; tula <version>"
    assert normalise.value({"at": 1.7e9, "time": 3.5, "tula": "1.2"}) == {
        "at": "<time>",
        "time": 3.5,
        "tula": "<version>",
    }
