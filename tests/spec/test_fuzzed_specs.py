"""Job specs of random values, tags and nesting: each is refused in one line, or is the same after it was kept and read again."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from tula_cli.errors import SpecError
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import dump_yaml, load_spec, validate_job
from tula_cli.spec.yaml_text import parse_yaml

BASE = """
name: fuzzed
model: {name: small_cnn, args: {in_channels: 1, width: 8}}
dataset: {name: digits}
optimizer: {name: SGD, lr: 0.05}
train: {epochs: 3, reference_batch: 32}
"""
VALUES = (
    "-1", "0", "1", "3", "64", "1.5", "1e308", "-1e-300", "1e400", ".inf", "-.inf", ".nan", "9" * 400, "9" * 5000, "0x10", "0o17",
    "true", "null", "''", "word", "'a b'", '"\\n"', '"\\0"', '"\\u202e"', "'%j'", "'$(touch x)'", "'; rm -rf x'", "../../x", "~", "auto", "cpu",
    "[]", "[1, 2]", "[1, [2, [3]]]", "{}", "{a: 1}", "{a: {b: .nan}}", "{1: 2}", "{a: [.inf]}", "&a [*a]", "&a {b: *a}", "[" * 40 + "]" * 40,
    "!!bool x", "!!timestamp x", "!!timestamp 2024-01-01", "!!binary x", "!!binary aGk=", "!!set {a, b}", "!!omap [a: 1]", "!!int x",
    "!!python/object/apply:os.system [touch x]", "2024-01-01", "1:30", "16GiB", "1e9GB", "800MB", "12:00:00", "1-00:00:00", "package.module:name",
)  # fmt: skip


def places(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the paths of all keys of a section, and of those inside it."""
    results = []
    for name, field in model.model_fields.items():
        results.append((*prefix, name))
        for kind in (field.annotation, *get_args(field.annotation)):
            # list[str] is no class, though Python 3.10 says so
            if get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, BaseModel):
                results += places(kind, (*prefix, name))
    return results


PLACES = [*places(JobSpec), ("model", "args", "width"), ("dataset", "args", "x"), ("optimizer", "args", "x"), ("x",), ("train", "x")]  # fmt: skip


def changed(text: str, random_: random.Random) -> dict[str, Any]:
    """Return a spec with one to four keys set to any value, as --set does it."""
    spec: dict[str, Any] = parse_yaml(text, source="base")
    for _ in range(random_.choice((1, 1, 2, 4))):
        set_value(spec, random_.choice(PLACES), random_.choice(VALUES))
    return spec


def set_value(spec: dict[str, Any], place: tuple[str, ...], value: str) -> dict[str, Any]:
    *sections, key = place
    section = spec
    for name in sections:
        inner = section.get(name)
        section[name] = section = inner if isinstance(inner, dict) else {}
    section[key] = parse_yaml(value, source="value")
    return spec


def check_spec(make_content: Callable[[], dict[str, Any]]) -> None:
    try:
        spec = validate_job(make_content(), source="fuzzed")
    except SpecError as error:
        assert len(error.message.splitlines()) == 1 and all(len(str(problem)) < 2000 for problem in error.problems)
        return
    assert validate_job(parse_yaml(dump_yaml(spec), source="kept"), source="kept") == spec
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


def check(seed: int) -> None:
    check_spec(lambda: changed(BASE, random.Random(seed)))


@pytest.mark.parametrize(
    "value", ["9" * 400, "-" + "9" * 400, "9" * 5000, "1e308", "1e400", "-1e-300", ".nan", "[]", "!!binary x"]
)
def test_every_key_refuses_or_keeps_a_number_out_of_range(value: str) -> None:
    for place in PLACES:
        check_spec(lambda place=place: set_value(parse_yaml(BASE, source="base"), place, value))


@pytest.mark.parametrize("part", range(5))
def test_a_spec_of_any_values_is_refused_or_kept_as_it_is(part: int) -> None:
    for seed in range(100 * part, 100 * part + 100):
        check(seed)


@pytest.mark.proof
@pytest.mark.parametrize("part", range(100))
def test_many_specs_of_any_values_are_refused_or_kept_as_they_are(part: int) -> None:
    for seed in range(1000 + 100 * part, 1000 + 100 * part + 100):
        check(seed)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x: !!bool x", "does not have the type of its tag"),
        ("x: !!timestamp x", "does not have the type of its tag"),
        ("x: " + "[" * 3000 + "]" * 3000, "has more than 50 levels"),
        ("x: " + "{a: " * 3000 + "1" + "}" * 3000, "has more than 50 levels"),
        ("x: &a [*a]", "has more than 50 levels"),
        ("cluster: {memory_per_gpu: " + "9" * 400 + "}", "must be less than 1 EiB"),
        ("cluster: {memory_per_gpu: " + "9" * 400 + "MB}", "must be less than 1 EiB"),
        ("loss: {args: {weight: .nan}}", "loss.args: weight is nan"),
        ("loss: {args: {weight: [1, {a: .inf}]}}", "loss.args: weight[1].a is inf"),
        ("loss: {args: {weight: {1: 2}}}", "key 1 of weight must be text; put the key in quotes"),
        ("loss: {args: {weight: !!timestamp 2024-01-01}}", "weight is a date"),
        (
            "loss: {args: {" + ", ".join(f"k{k}: &k{k} [" + ", ".join([f"*k{k - 1}"] * 9 if k else ["1"] * 9) + "]" for k in range(9)) + "}}",
            "100000 values",
        ),
        (
            "node_types: {" + ", ".join(f"k{k}: &k{k} {{" + ", ".join(f"b{n}: " + (f"*k{k - 1}" if k else "1") for n in range(9)) + "}" for k in range(9)) + "}",
            "100000 values",
        ),
        ("loss: {args: {weight: [" + "1, " * 20000 + "1]}}", "10000 values"),
    ],
    ids=range(14),
)  # fmt: skip
def test_what_breaks_other_readers_is_refused_by_name(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "job.yaml").write_text(f"{BASE}{text}\n")
    with pytest.raises(SpecError) as raised:
        load_spec(tmp_path / "job.yaml", environ={}, site_files=())
    assert told in str(raised.value)


def test_a_job_without_end_is_refused() -> None:
    with pytest.raises(SpecError, match="larger than 16 MiB"):
        load_spec(Path("/dev/zero"), environ={}, site_files=())
