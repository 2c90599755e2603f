"""The JSON Schema takes what the loader takes, as it is written, and says what every key means."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import jsonschema
import pytest

from tula_cli.errors import SpecError
from tula_cli.services.init import make_job_from_command
from tula_cli.spec.job import JobSpec
from tula_cli.spec.json_schema import make_json_schema, walk_sections
from tula_cli.spec.kinds import Section
from tula_cli.spec.load import dump_yaml, validate_job
from tula_cli.spec.yaml_text import parse_yaml

ROOT = Path(__file__).parents[3]
JOB, SITE = make_json_schema("job"), make_json_schema("site")


def refused(content: Any, schema: Any = JOB) -> list[str]:
    return [
        f"{error.json_path}: {error.message}" for error in jsonschema.Draft202012Validator(schema).iter_errors(content)
    ]


def written() -> Iterator[tuple[str, str]]:
    """Yield every job or part of one that the project shows, with its place."""
    for folder in ("configs", "templates", "examples"):
        yield from ((str(path.relative_to(ROOT)), path.read_text()) for path in sorted((ROOT / folder).rglob("*.yaml")))
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]:
        for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)):
            yield f"{page.name}, {number}", block
    yield "from a command", make_job_from_command("torchrun train.py --batch-size 64 --lr 0.1 --epochs 9", "slurm").text


WRITTEN = dict(written())
SMALL: dict[str, Any] = {
    "model": {"name": "small_cnn"},
    "dataset": {"name": "digits"},
    "optimizer": {"lr": 0.1},
    "train": {"epochs": 3},
    "cluster": {"kind": "slurm", "slurm": {}},
    "pricing": {"price": 1},
}


def with_value(path: str, value: Any) -> dict[str, Any]:
    content = copy.deepcopy(SMALL)
    *sections, last = path.split(".")
    inside = content
    for name in sections:
        inside = inside.setdefault(name, {})
    inside[last] = value
    return content


@pytest.mark.parametrize("schema", [JOB, SITE], ids=["job", "site"])
def test_it_is_a_schema_in_the_dialect_that_it_names_and_in_draft_7(schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft7Validator.check_schema(schema)
    assert schema["$schema"] == jsonschema.Draft202012Validator.META_SCHEMA["$id"]


def test_every_key_says_what_it_means():
    for name, section in {"": JOB, **JOB["$defs"]}.items():
        assert section["description"], name
        assert [key for key, value in section["properties"].items() if not value["description"].strip()] == [], name


@pytest.mark.parametrize("place", WRITTEN)
def test_what_the_project_shows_is_taken(place):
    content = parse_yaml(WRITTEN[place], source=place)
    whole = (content.keys() >= {"model", "train"} or "script" in content) and "site.yaml" not in place
    if not content.keys() <= SITE["properties"].keys():  # keys of one section
        sections = [name for name, part in SITE["$defs"].items() if content.keys() <= part["properties"].keys()]
        assert any(refused(content, {"$ref": f"#/$defs/{name}", "$defs": SITE["$defs"]}) == [] for name in sections)
    else:
        assert refused(content, JOB if whole else SITE) == []


@pytest.mark.parametrize("place", [place for place in WRITTEN if place.startswith(("configs", "templates", "from"))])
def test_the_resolved_job_is_taken_too(place):
    content = parse_yaml(WRITTEN[place], source=place)
    assert refused(parse_yaml(dump_yaml(validate_job(content, source=place)), source=place)) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("cluster.memory_per_gpu", "24MB"),
        ("cluster.memory_per_gpu", "1.5 gib"),
        ("cluster.memory_per_gpu", 16_000_000_000),
        ("cluster.memory_per_gpu", None),
        ("cluster.minutes", "1-12:00:00"),
        ("cluster.minutes", "90:00"),
        ("cluster.minutes", 90),
        ("cluster.slurm.account", 4711),
        ("cluster.slurm.memory", "64G"),
        ("cluster.setup", ["module load cuda"]),
        ("cluster.setup", "setup.sh"),
        ("cluster.slurm.wrapper", []),
        ("cluster.slurm.extra", {"mail-type": ["END", "FAIL"], "spread-job": True, "nice": 5, "x-y": None}),
        ("cluster.slurm.environment", {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": 1, "LEFT_OUT": None}),
        ("pricing.spot", {"discount": 0.6, "interruptions_per_day": 0.5}),
        ("model.name", "package.module:callable"),
        ("dataset.collate_fn", {"mine:collate": {"pad": 0}}),
        ("transforms.train", ["ToTensor", {"RandomCrop": {"size": 32}}, "mine:transform"]),
        ("schedule.kind", "mine:schedule"),
        ("optimizer.beta2_half_life", "auto"),
        ("train.workers", "auto"),
        ("train.compile", "max-autotune-no-cudagraphs"),
        ("train.ramp", "noise"),
        ("train.ramp", [{"epochs": 1, "batch": 64}]),
        ("train.diagnostics", ["gradient_noise"]),
        ("train.metrics", {"f1": {"torchmetrics:F1Score": {"task": "binary"}}}),
        ("train.early_stopping", {"patience": 7}),
        ("ags.delta", "inf"),
        ("ags.delta", float("inf")),
        ("ags.refresh", {"every": 50}),
        ("ags.parameters", ["*", "!norms"]),
        ("ags.parameters", "all"),
        ("auto.arms", [{"name": "x4", "lr_factor": 4}]),
        ("search.gpus_per_node", [1]),
        ("node_types", {"a100": {"cluster": {"slurm": {"constraint": "a100"}}, "pricing": {"price": 3.7}}}),
    ],
)
def test_a_value_is_taken_as_the_loader_takes_it(path, value):
    content = with_value(path, value)
    if (section := path.partition(".")[0]) in ("ags", "auto"):
        content["train"] = {**content["train"], "method": section}
    validate_job(content, source="the test")
    assert refused(content) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("trian", {}),
        ("train.epcohs", 3),
        ("train.epochs", "three"),
        ("train.epochs", 0),
        ("train.method", "rmap"),
        ("train.precision", "float32"),
        ("optimizer.lr", [0.1]),
        ("optimizer.lr", -1),
        ("model", "resnet18"),
        ("model.name", None),
        ("transforms.train", "ToTensor"),
        ("search.nodes", 4),
        ("search.nodes", []),
        ("search.strategy", "all"),
        ("cluster.memory_per_gpu", "24 potatoes"),
        ("cluster.memory_per_gpu", True),
        ("cluster.memory_per_gpu", 16),
        ("cluster.minutes", "two hours"),
        ("cluster.minutes", True),
        ("cluster.slurm.partitions", "gpu"),
        ("cluster.slurm.extra", {"mail-type": {"a": 1}}),
        ("pricing.price", 0),
        ("node_types", {"a 100": {}}),
        ("node_types", {"a100": {"slurm": {}}}),
        ("node_types", {"a100": {"cluster": {"slrum": {}}}}),
        ("auto.arms", [{"lr_factor": 4}]),
    ],
)
def test_a_typical_mistake_is_refused_as_the_loader_refuses_it(path, value):
    content = with_value(path, value)
    with pytest.raises(SpecError):
        validate_job(content, source="the test")
    assert refused(content) != []


@pytest.mark.parametrize("left_out", ["model", "dataset", "optimizer", "train"])
def test_a_job_without_a_script_needs_its_sections_and_a_site_needs_nothing(left_out):
    content = {key: value for key, value in SMALL.items() if key != left_out}
    assert any(f"'{left_out}' is a required property" in result for result in refused(content))
    assert refused(content, SITE) == []
    assert refused({"pricing": {"currency": "EUR"}, "train": {"workers": 4}}, SITE) == []


def test_a_script_needs_none_of_them_but_its_own():
    script = {"command": "train.py -b {batch}", "length": {"epochs": 3}, "reference": {"batch": 8}}
    assert refused({"script": script, "train": {"workers": 4}}) == []
    assert refused({"script": {**script, "length": None}}) != []
    assert refused({"script": {"command": "train.py"}}) != []
    assert refused({"train": {"workers": 4}, "script": None}) != []


POOL: list[Any] = [
    None, True, False, 0, 1, 8, 0.5, 1e-3, "auto", "x", "a.b:c", "10", "16GiB", "1-12:00:00", "2025-11-30", "", [], [1], ["a"],
    {}, {"a": 1}, {"every": 2}, {"a.b:c": {}}, {"size": [64]}, [{"epochs": 1, "batch": 64}], "SIGTERM", "cosine", float("inf"),
]  # fmt: skip


def keys() -> Iterator[str]:
    """Yield every key of the sections that a job has by itself."""
    for name, value in JOB["properties"].items():
        sections = [part["$ref"] for part in [*value.get("allOf", ()), *value.get("anyOf", ())] if "$ref" in part]
        if name != "script" and sections:
            yield from (f"{name}.{key}" for key in JOB["$defs"][sections[0].rpartition("/")[2]]["properties"])
    yield from (f"cluster.slurm.{key}" for key in JOB["$defs"]["Slurm"]["properties"])


def is_another_spelling(value: Any) -> bool:
    """Return whether the loader reads a value as one of another type: true for 1, '10' for 10."""
    return isinstance(value, bool) or value in (0, 1, "10")


def test_nothing_is_refused_that_the_loader_takes():
    """For every key, also those to come: what a validator reads before its type is checked says itself how it is written."""
    refused_alone = []
    for key in keys():
        for value in POOL:
            content = with_value(key, value)
            if is_another_spelling(value) or not refused(content):
                continue
            try:
                validate_job(content, source="the test")
            except SpecError:
                continue
            refused_alone.append((key, value))
    assert refused_alone == []


def test_a_job_file_has_at_most_150_keys() -> None:
    """A key counts unless all that it can hold is one section, whose keys count instead; lists of sections count themselves too."""

    def is_section(hint: Any) -> bool:
        union = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kinds = [kind for kind in union if kind is not NoneType]
        return all(isinstance(kind, type) and not get_args(kind) and issubclass(kind, Section) for kind in kinds)

    keys = [
        f"{path}.{name}".lstrip(".")
        for path, section in (("", JobSpec), *walk_sections(JobSpec))
        for name, hint in get_type_hints(section).items()
        if name in section.model_fields and not is_section(hint)
    ]
    assert {"train.ramp", "train.ramp.epochs", "export", "cluster.slurm.partition"} <= set(keys)
    assert not {"train", "script", "cluster.slurm", "pricing.spot"} & set(keys)
    assert len(keys) <= 150, len(keys)
