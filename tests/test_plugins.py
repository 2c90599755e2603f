"""Names that stand for code."""

import pytest

from tula_cli.errors import SpecError
from tula_cli.plugins import is_import_string, load_named_object, suggest_nearest

BUILTINS = {"one": 1, "three": 3}


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module into the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")

    return write


def test_name_of_the_dict_is_taken():
    assert load_named_object("three", BUILTINS, kind="number") == 3


def test_unknown_name_answers_with_the_nearest():
    with pytest.raises(SpecError) as caught:
        load_named_object("thre", BUILTINS, kind="number")
    assert caught.value.message == "unknown number 'thre'"
    assert caught.value.hint == "did you mean three?"


def test_unknown_name_near_nothing_tells_of_import_strings():
    with pytest.raises(SpecError) as caught:
        load_named_object("zzzz", BUILTINS, kind="number")
    assert "package.module:attribute" in caught.value.hint


@pytest.mark.parametrize("builtins", [BUILTINS, {}])
def test_dot_in_place_of_the_colon_is_corrected(builtins):
    with pytest.raises(SpecError) as caught:
        load_named_object("thre.part.Net", builtins, kind="number")
    assert caught.value.hint.startswith("did you mean thre.part:Net?")


def test_few_known_names_are_listed():
    with pytest.raises(SpecError) as caught:
        load_named_object("zzzz", BUILTINS, kind="number")
    assert caught.value.hint.startswith("choose from one, three, or write your own number")


def test_nearest_ignores_case_and_keeps_the_known_spelling():
    assert suggest_nearest("RESNET50", ["resnet50", "vgg11"]) == "did you mean resnet50?"
    assert suggest_nearest("xy", ["resnet50"]) == ""


def test_of_equally_near_names_those_with_the_same_start_come_first():
    known = ["Adam", "AdamW", "RAdam", "NAdam", "SGD"]
    assert suggest_nearest("Adamm", known) == "did you mean Adam or AdamW or RAdam?"


@pytest.mark.parametrize(("name", "expected"), [("a.b:c", True), ("resnet50", False)])
def test_import_strings_have_a_colon(name, expected):
    assert is_import_string(name) is expected


def test_import_string_reaches_nested_attributes_of_the_working_directory(module):
    module("plug_nested", "class Outer:\n    class Inner:\n        value = 5\n")
    assert load_named_object("plug_nested:Outer.Inner.value", {}, kind="number") == 5


def test_missing_module_is_a_spec_error_that_names_it():
    with pytest.raises(SpecError, match="no module 'plug_absent'"):
        load_named_object("plug_absent.part:thing", {}, kind="model")


def test_missing_submodule_is_a_spec_error(module):
    module("plug_flat", "")
    with pytest.raises(SpecError, match="plug_flat"):
        load_named_object("plug_flat.part:thing", {}, kind="model")


def test_missing_attribute_answers_with_the_nearest(module):
    module("plug_near", "def build_model(): ...\n")
    with pytest.raises(SpecError) as caught:
        load_named_object("plug_near:build_modle", {}, kind="model")
    assert "did you mean build_model?" in caught.value.hint


def test_failing_import_inside_the_users_module_keeps_its_own_error(module):
    module("plug_broken", "import plug_not_there_either\n")
    with pytest.raises(ModuleNotFoundError, match="plug_not_there_either"):
        load_named_object("plug_broken:thing", {}, kind="model")


def test_error_at_import_of_the_users_module_passes(module):
    module("plug_raises", "raise ZeroDivisionError('at import')\n")
    with pytest.raises(ZeroDivisionError):
        load_named_object("plug_raises:thing", {}, kind="model")
