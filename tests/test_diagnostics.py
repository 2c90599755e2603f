"""Diagnostics: a code and values beside the sentence, in memory and in JSON; and what every sentence has to be."""

import ast
import importlib
import inspect
import io
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tula_cli.diagnostics import Diagnostic, diagnostic
from tula_cli.run.records.base import Record, RecordedDiagnostic
from tula_cli.show.screen import Screen, convert_to_plain_data

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.glob("tula_cli/**/messages.py")
)


@diagnostic
def too_many_epochs(*, epochs: int, most: int) -> str:
    return f"{epochs} epochs are more than {most}."


def test_the_function_names_the_code_and_its_arguments_are_the_values() -> None:
    assert too_many_epochs(epochs=9, most=3) == Diagnostic(
        "too-many-epochs", {"epochs": 9, "most": 3}, "9 epochs are more than 3."
    )
    assert str(too_many_epochs(epochs=9, most=3)) == "9 epochs are more than 3."


def test_a_dataclass_keeps_its_sentences_and_has_the_codes_beside_them() -> None:
    @dataclass(frozen=True)
    class Report:
        warnings: tuple[Diagnostic, ...]
        reason: Diagnostic | None
        nodes: int

    coded = {"code": "too-many-epochs", "values": {"epochs": 9, "most": 3}, "text": "9 epochs are more than 3."}
    warning = too_many_epochs(epochs=9, most=3)
    assert convert_to_plain_data(Report((warning,), warning, 2)) == {
        "warnings": [coded["text"]],
        "reason": coded["text"],
        "nodes": 2,
        "diagnostics": {"warnings": [coded], "reason": [coded]},
    }
    assert convert_to_plain_data(Report((), None, 2)) == {"warnings": [], "reason": None, "nodes": 2}


def test_a_record_stores_codes_and_values_without_secrets_and_shows_the_sentences() -> None:
    class Report(Record):
        warnings: tuple[RecordedDiagnostic, ...] = ()
        nodes: int = 2

    @diagnostic
    def download_failed(*, url: str) -> str:
        return f"{url} cannot be read."

    report = Report(warnings=(too_many_epochs(epochs=9, most=3), download_failed(url="https://me:hunter2@example.org")))
    stored = report.model_dump_json()
    assert "hunter2" not in stored
    first, second = Report.model_validate_json(stored).warnings
    assert first == too_many_epochs(epochs=9, most=3) and second.code == "download-failed"
    data = convert_to_plain_data(Report.model_validate_json(stored))
    assert data["warnings"] == [first.text, second.text] and data["nodes"] == 2
    assert [entry["code"] for entry in data["diagnostics"]["warnings"]] == ["too-many-epochs", "download-failed"]


def test_the_texts_that_older_versions_have_recorded_are_read() -> None:
    class Report(Record):
        warnings: tuple[RecordedDiagnostic, ...]

    assert Report.model_validate({"warnings": ["odd"]}).warnings == (Diagnostic("", {}, "odd"),)


def test_the_envelope_has_the_codes_of_warnings_once() -> None:
    screen = Screen(as_json=True, out=io.StringIO(), err=io.StringIO())
    screen.print_warning(too_many_epochs(epochs=9, most=3))
    screen.print_warning(too_many_epochs(epochs=9, most=3))
    screen.print_warning("text of another program")
    screen.print_answer(1, ())
    screen.finish_answer()
    envelope = json.loads(screen.out.getvalue())
    assert envelope["warnings"] == ["9 epochs are more than 3.", "text of another program"]
    assert [(entry["code"], entry["values"]["most"]) for entry in envelope["diagnostics"]] == [("too-many-epochs", 3)]


@pytest.mark.parametrize("module", MODULES)
def test_sentences_use_all_their_values_and_nothing_is_said_twice(module: str) -> None:
    """Every public function of a module `messages` is a diagnostic that mentions each of its keyword-only arguments."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    assert functions and len({function.name for function in functions}) == len(functions)
    for function in functions:
        assert [ast.unparse(decorator) for decorator in function.decorator_list] == ["diagnostic"], function.name
        arguments = {argument.arg for argument in function.args.kwonlyargs}
        assert not function.args.args and not any(function.args.kw_defaults), function.name
        used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        assert arguments <= used, function.name


def test_a_code_has_one_sentence() -> None:
    names = [
        node.name
        for module in MODULES
        for node in ast.parse(inspect.getsource(importlib.import_module(module))).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]
    assert sorted(set(names)) == sorted(names)
