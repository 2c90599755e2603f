"""The job spec: what is read, what is refused, and how."""

import math
import re
from pathlib import Path

import pytest
import yaml

from tula_cli.errors import SpecError
from tula_cli.presets import AGS_PRESETS
from tula_cli.spec.ags import Ags
from tula_cli.spec.job import JobSpec, compute_lr_scale, describe_training_method, get_default_beta1
from tula_cli.spec.kinds import parse_size
from tula_cli.spec.load import dump_yaml, load_spec, validate_job
from tula_cli.spec.merge import ENV_PREFIX, apply_overrides, flatten_mapping, merge_sources
from tula_cli.spec.methods import METHODS
from tula_cli.spec.resources import UNPRICED_PRICING
from tula_cli.spec.signature import compute_measurement_signature, compute_train_signature
from tula_cli.spec.yaml_text import parse_yaml, read_yaml

ROOT = Path(__file__).parents[2]
SHIPPED = sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "templates").glob("*.yaml")])

MINIMAL = """\
model: {name: resnet18}
dataset: {name: CIFAR10}
optimizer: {lr: 0.1}
train: {epochs: 10}
"""


@pytest.fixture
def write(tmp_path: Path):
    def write_(text: str, name: str = "job.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_


def load(path: Path, *overrides: str, environ=None, site_files=()) -> JobSpec:
    return load_spec(path, overrides=overrides, environ=environ or {}, site_files=site_files)


def spec(**changes) -> JobSpec:
    content = yaml.safe_load(MINIMAL)
    for path, value in changes.items():
        section = content
        *parents, last = path.split("__")
        for part in parents:
            section = section.setdefault(part, {})
        section[last] = value
    content["train"].setdefault("method", "ags")  # most settings act on it
    return JobSpec.model_validate(content)


def problems(path: Path, *overrides: str) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        load(path, *overrides)
    return {problem.path: str(problem) for problem in caught.value.problems}


# --- YAML


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 100000.0),
        ("1.0e-8", 1e-8),
        (".5", 0.5),
        ("-2.", -2.0),
        ("on", "on"),
        ("no", "no"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        (".inf", float("inf")),
        ("10", 10),
        ("null", None),
        ("1.2.3", "1.2.3"),
        ("1:30", "1:30"),
        ("2025-01-01", "2025-01-01"),
        ("0x1F", 31),
        ("0o17", 15),
        ("0", 0),
        ("~", None),
        ("", None),
        ("-1e3", -1000.0),
        ("-.inf", float("-inf")),
        ("[1, 2e0]", [1, 2.0]),
    ],
)
def test_plain_scalars_are_those_of_yaml_1_2(text, value):
    result = parse_yaml(text, source="here")
    assert result == value
    assert isinstance(result, type(value))
    assert isinstance(result, bool) == isinstance(value, bool)


NUMBERS_IN_TEXT = (
    "7e3", "12.10", "1.20", "0x1F", "1e10", "007", "1_000", "12:30:00", "yes", "off", "2024-01-01", ".inf", ".nan", "+5", "-0", "0o17",
    "1E5", "3.10", "9007199254740993", "100000000000000000000000", "1e400", "1.", "+.5",
)  # fmt: skip
KEYS_OF_TEXT = (
    "cluster.slurm.account", "cluster.slurm.partition", "cluster.slurm.qos", "cluster.slurm.constraint", "cluster.slurm.environment.TAG",
    "cluster.slurm.extra.comment", "cluster.slurm.srun_extra.comment", "cluster.interface", "dataset.root",
    "model.weights",
)  # fmt: skip


@pytest.mark.parametrize("source", ["file", "site file", "--set"])
def test_a_number_at_a_key_of_text_arrives_as_it_was_typed(write, tmp_path, source):
    def content(value):
        merged: dict = {"name": "n", "model": {"name": "small_cnn"}, "dataset": {"name": "digits"}}
        merged |= {
            "optimizer": {"lr": 0.1},
            "train": {"epochs": 1},
            "cluster": {"kind": "slurm", "setup": ["%%"]},
        }
        apply_overrides(merged, [f"{key}='%%'" for key in KEYS_OF_TEXT], {})
        return yaml.safe_dump(merged).replace("'%%'", value)

    for typed in NUMBERS_IN_TEXT:
        job, site = write(content("x" if source == "--set" else typed)), tmp_path / "site.yaml"
        site.write_text(job.read_text() if source == "site file" else "{}")
        if source == "site file":
            job = write("name: n")
        overrides = [f"{key}={typed}" for key in KEYS_OF_TEXT] if source == "--set" else []
        result = load_spec(job, overrides=overrides, site_files=[site], environ={})
        again = load_spec(write(dump_yaml(result)), site_files=[], environ={})
        assert again == result
        values = dict(flatten_mapping(again.model_dump(mode="json")))
        assert {key: values[key] for key in KEYS_OF_TEXT} == dict.fromkeys(KEYS_OF_TEXT, typed)
        assert values["cluster.setup"] == ["x" if source == "--set" else typed]


@pytest.mark.parametrize(
    ("value", "outcome"),
    [(4711, "4711"), ("12.10", "12.10"), (12.1, "with quotes"), (True, "write 'true' with quotes")],
)
def test_python_code_gives_text_exactly_or_is_refused(value, outcome):
    content = {
        "model": {"name": "small_cnn"}, "dataset": {"name": "digits"}, "optimizer": {"lr": 0.1}, "train": {"epochs": 1},
        "cluster": {"kind": "slurm", "slurm": {"account": value, "environment": {"TAG": value}}},
    }  # fmt: skip
    if not isinstance(value, float | bool):
        slurm = validate_job(content, source="here").cluster.slurm
        assert (slurm.account, slurm.environment["TAG"]) == (outcome, outcome)
    else:
        with pytest.raises(SpecError) as caught:
            validate_job(content, source="here")
        assert [problem.path for problem in caught.value.problems] == [
            "cluster.slurm.account",
            "cluster.slurm.environment.TAG",
        ]
        assert all(outcome in problem.message for problem in caught.value.problems)


SCALARS = (
    "1e-3", "1E5", "1:30", "2025-01-01", "0x1F", "0o17", "017", "0b1", "1_000", "~", "NULL", "nUll", "", "TRUE", "yes", "on",
    "-.inf", ".NaN", ".5", "5.", "+1", "-0", "1e", "<<", "=", "'a''b'", r'"\u00e9\n"', "\u65e5", "a #b", "a#b", "|\n  a\n  b\n",
    ">-\n  a\n  b\n", "!!str 1", "!!int '3'", "!!binary aGk=", "{a: 1, b: [x, 1e-3]}", "{a: , b: }", "[a,b:c]", "'a': 1",
    "a: &b {c: 1}\nd: {<<: [*b, {e: 1}]}", "a:\n- 1\n- 2", "a: 1\r\nb: 2", "--- 1\n...\n", "%YAML 1.2\n---\na: 1", "# only",
    "!foo 1", "!!int x", "!!python/object:os.system x", "*x", "a: b: c", "[1", "{a", "{a: 1, a: 2}", "? [x]\n: 1", "\t- 1",
    "@x", "`x", "'abc", "- 1\n-2", "a: 1\n b: 2", "--- 1\n--- 2", "\x07", "a: - b", r'"\ud800"', r'"\ud83d\ude00"',
)  # fmt: skip


@pytest.mark.parametrize("text", [text for scalar in SCALARS for text in (scalar, f"k: {scalar}\n")])
def test_libyaml_reads_what_python_reads_and_refuses_what_it_refuses(text, monkeypatch):
    assert yaml.__with_libyaml__

    def told() -> str:
        try:
            return repr(parse_yaml(text, source="here"))
        except SpecError as error:
            return error.message

    fast = told()
    monkeypatch.setattr(yaml, "__with_libyaml__", False)
    assert fast == told()


def test_learning_rate_in_exponent_form_is_a_number(write):
    assert load(write(MINIMAL.replace("0.1", "1e-3"))).optimizer.lr == 0.001


@pytest.mark.parametrize("text", [MINIMAL + "model: {name: vgg11}\n", MINIMAL.replace("{lr: 0.1}", "{lr: 0.1, lr: 1}")])
def test_key_given_twice_is_refused_with_its_line(write, text):
    path = write(text)
    with pytest.raises(SpecError, match=r"line \d+, column \d+.*given twice"):
        load(path)


def test_key_that_is_no_word_is_refused(write):
    with pytest.raises(SpecError, match=r"line 1, column 3.*a key must be text"):
        load(write("? [model]\n: 3\n"))
    assert problems(write(MINIMAL.replace("epochs: 10", "epochs: 10, 5: 1"))) == {
        "train.5": "train.5: a key must be text"
    }


@pytest.mark.parametrize(
    "key",
    [
        "model.name",
        "model.args.x",
        "dataset.args.root",
        "cluster.interface",
        "optimizer.name",
        "name",
        "pricing.currency",
    ],
)
@pytest.mark.parametrize("half", [r"a\ud800b", r"\udc80", r"\U0000dfff", r"\ude00\ud83d"])
def test_text_that_cannot_be_written_is_refused_with_its_line(write, key, half):
    with pytest.raises(SpecError, match=r"not valid YAML: .* contains half of a UTF-16 pair"):
        load(write(MINIMAL), f'{key}="{half}"')
    section, _, inner = key.rpartition(".")
    with pytest.raises(SpecError, match=r"line 1, column \d+: not valid YAML: .* contains half of a UTF-16 pair"):
        load(write(f'{section or "x"}: {{{inner}: "{half}"}}\n'))


def test_json_escapes_of_a_character_beyond_16_bits_are_one_character():
    assert parse_yaml(r'{"a": "\ud83d\ude00 \u00e9"}', source="here") == {"a": "\U0001f600 \u00e9"}


def test_anchors_and_merge_keys_are_read():
    assert parse_yaml("a: &a {b: 1, c: 2}\nd: {<<: *a, c: 3}\n", source="here")["d"] == {"b": 1, "c": 3}


def test_text_that_is_no_yaml_is_refused_with_its_line(write):
    with pytest.raises(SpecError, match=r"job\.yaml, line 2, column"):
        load(write("model: {name: a}\n  - b: [\n"))


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("extra: {nodelist: node[001-004,007]}", 'nodelist: "node[001-004,007]"'),
        ("extra: {exclude: gpu[01-02], comment: x}", 'exclude: "gpu[01-02]"'),
        ("extra: {comment: x, nodelist: gpu[01-02]}", 'nodelist: "gpu[01-02]"'),
        ("extra: {mail-user: @me}", 'mail-user: "@me"'),
        ("constraint: [a100|h100]&ib", 'constraint: "[a100|h100]&ib"'),
        ("exclude: *bad", 'exclude: "*bad"'),
        ("partition: %gpu", 'partition: "%gpu"'),
        ("comment: a: b", 'comment: "a: b"'),
        ("account: `x`", 'account: "`x`"'),
        ("setup: [module load cuda/{11,12}]", '"module load cuda/{11,12}"'),
        ("extra: {nodelist: node{1,2}}", 'nodelist: "node{1,2}"'),
        ('wrapper: "srun" -x', """wrapper: '"srun" -x'"""),
        ("qos: !high", 'qos: "!high"'),
        ("cluster:\n  slurm:\n    extra: {nodelist: n[1,2]}", 'nodelist: "n[1,2]"'),
        ("cluster: {slurm: {extra: {nodelist: n[1,2]}}}", 'nodelist: "n[1,2]"'),
        ("setup:\n  - @echo", '"@echo"'),
        ("extra: {nodelist: node[001-004]}  # ours", 'nodelist: "node[001-004]"'),
    ],
)  # fmt: skip
def test_a_value_at_which_yaml_stumbles_is_shown_in_quotes(text, quoted):
    with pytest.raises(SpecError) as error:
        parse_yaml(text, source="job.yaml")
    assert error.value.hint == f"put the value in quotes: {quoted}"
    if ": " in quoted:
        assert parse_yaml(quoted, source="job.yaml"), "as shown it is read"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("a: [1\n", "close each bracket"),
        ("[1,2", "close each bracket"),
        ("a: {b: 1\n", "close each bracket"),
        ("a: 1\na: 2\n", "remove one of the two"),
        ("search: {nodes: [1]}\nsearch: {nodes: [1]}\n", "remove one of the two"),
        ("optimizer: {name: SGD lr: 0.1}\n", "write a comma between the entries"),
        ("\tb: 1\n", "use spaces"),
        ("a: 'b\n", ""),
    ],
)
def test_other_mistakes_in_yaml_have_their_own_hint(text, hint):
    with pytest.raises(SpecError) as error:
        parse_yaml(text, source="job.yaml")
    assert hint in error.value.hint and "put the value in quotes" not in error.value.hint


def test_yaml_tags_that_build_python_objects_are_refused(write):
    with pytest.raises(SpecError, match="not valid YAML"):
        load(write("model: !!python/object/apply:os.system ['true']\n"))


@pytest.mark.parametrize(("text", "found"), [("", "empty"), ("- a\n", "a list"), ("resnet\n", "plain text")])
def test_file_without_a_mapping_is_refused(write, text, found):
    with pytest.raises(SpecError, match=f"but it is {found}"):
        load(write(text))


def test_a_file_in_another_encoding_is_named_with_line_and_byte(tmp_path):
    (tmp_path / "latin.yaml").write_bytes("name: x\n# caf\xe9\n".encode("latin-1"))
    with pytest.raises(SpecError, match=r"\(byte 0xe9 in line 2\)\nHINT: save the file as UTF-8"):
        load(tmp_path / "latin.yaml")


def test_only_files_with_a_similar_name_are_proposed(tmp_path):
    for name in ("unkopt.yaml", "nodes0.yaml", "digits.yml"):
        (tmp_path / name).touch()
    with pytest.raises(SpecError, match=r"no such file: .*\nHINT: tula init"):
        load(tmp_path / "nothere.yaml")
    with pytest.raises(SpecError, match=r"did you mean .*digits\.yml\?"):
        load(tmp_path / "digit.yaml")


def test_missing_file_names_the_way_to_one(tmp_path):
    with pytest.raises(SpecError) as caught:
        load(tmp_path / "none.yaml")
    assert "no such file" in caught.value.message
    assert "tula init" in caught.value.hint
    (tmp_path / "none.yaml").symlink_to("nowhere.yaml")
    with pytest.raises(SpecError, match=r"none\.yaml is a link to a missing file") as caught:
        load(tmp_path / "none.yaml")
    assert "did you mean" not in caught.value.hint


def test_folder_and_binary_file_are_refused(tmp_path):
    with pytest.raises(SpecError, match="is a folder, not a job file") as caught:
        read_yaml(tmp_path)
    assert "name a file" in caught.value.hint
    binary = tmp_path / "job.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="cannot read"):
        read_yaml(binary)


# --- problems


def test_minimal_spec_has_defaults_for_the_rest(write):
    data = load(write(MINIMAL))
    assert data.search.nodes == [2, 4, 8, 16]
    assert data.search.min_batch == 32
    assert data.train.method == "ramp"
    assert data.ags.fill_from_preset().delta == 0.5
    assert data.cluster.slurm is None


def test_all_problems_are_reported_at_once_with_their_paths(write):
    path = write(
        "modle: {name: resnet18}\n"
        "dataset: {name: CIFAR10, eval_fraction: 1.5}\n"
        "optimizer: {lr: -1, momentom: 0.9}\n"
        "train: {epochs: 0, method: agz}\n"
        "search: {nodes: [2, -4]}\n"
    )
    result = problems(path)
    assert set(result) == {
        "model", "modle", "dataset.eval_fraction", "optimizer.lr", "optimizer.momentom",
        "train.epochs", "train.method", "search.nodes[1]",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("override", "path", "words"),
    [
        ("optimizer.momentom=0.9", "optimizer.momentom", "did you mean momentum"),
        ("searhc.min_steps=6", "searhc", "did you mean search"),
        ("search.steps=50", "search.steps", "set search.min_steps, search.min_seconds or search.max_seconds"),
        ("search.strategy=five", "search.strategy", "set adaptive"),
        ("search.strategy=few", "search.strategy", "set partial"),
        ("search.strategy=two", "search.strategy", "'two' was removed"),
        ("train.method=adascale", "train.method", "'adascale' was removed"),
        ("search.min_seconds=61", "search.max_seconds", "must be at least search.min_seconds (61 s), got 60"),
        ("search.min_steps=4", "search.min_steps", "at least 5"),
        ("train.method=agz", "train.method", "did you mean ags"),
        ("train.precision=fp23", "train.precision", "must be fp32, bf16 or fp16, got 'fp23'"),
        ("cluster.xyz=1", "cluster.xyz", "keys of this section: "),
        ("train.epochs=many", "train.epochs", "got 'many'"),
        ("search.nodes=[]", "search.nodes", "at least 1"),
        ("search.nodes=[2,2]", "search.nodes", "each number once"),
        ("search.nodes=4", "search.nodes", "list"),
        (
            "search.gpus_per_node=[1,2]",
            "search.gpus_per_node",
            "contains 2, but a node has 1 GPU (cluster.gpus_per_node)",
        ),
        ("search.max_batch=16", "search.max_batch", "at least search.min_batch"),
        ("cluster.memory_per_gpu=lots", "cluster.memory_per_gpu", "16GiB"),
        ("cluster.slurm={partition: gpu}", "cluster.slurm", "kind: slurm"),
        ("schedule.kind=multistep", "schedule.milestones", "is required"),
        ('dataset.args={files: ["a\\0b"]}', "the job file", "dataset.args.files[0] contains a null character"),
        (
            'dataset.args={a: [x, "\\0", "\\0"], b: "\\0"}',
            "the job file",
            "dataset.args.a[1] contains a null character",
        ),
        ("dataset.args={a: [1, .nan, .inf], b: .nan}", "dataset.args", "a[1] is nan"),
        ("optimizer={lr: 0.1, momentum: 0.9, args: {momentum: 0.5}}", "optimizer.momentum", "remove one of the two"),
        ("schedule.milestones=[3]", "schedule.milestones", "multistep"),
        ("name=../up", "name", "letters"),
        ("ags.refresh={evry: 3}", "ags.refresh.evry", "every"),
        ("optimizer.lr=.nan", "optimizer.lr", "finite"),
        ("search.sequence={lengths: [128]}", "search.sequence", "--set dataset.args.length=512"),
        ("ags=[128]", "ags", "a section (keys: preset, granularity"),
        ("ags.exclude=norms", "ags.exclude", "set ags.parameters"),
        ("ags.parameters=norms", "ags.parameters", "must be auto or all, or a list"),
    ],
)
def test_wrong_value_is_named_with_its_path_and_a_way_out(write, override, path, words):
    result = problems(write(MINIMAL), override)
    assert path in result
    assert words in result[path]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("epochs=5", "train.epochs"),
        ("num_epochs=5", "train.epochs"),
        ("lr=0.1", "optimizer.lr"),
        ("seed=1", "train.seed"),
        ("workers=4", "train.workers"),
        ("nodes=[1]", "search.nodes"),
        ("minutes=30", "cluster.minutes"),
        ("weight_decay=0.1", "optimizer.weight_decay"),
        ("root=data", "dataset.root"),
        ("method=ags", "train.method"),
        ("partition=gpu", "cluster.slurm.partition"),
    ],
)
def test_a_key_without_its_section_is_the_likely_one(write, override, key):
    name = override.partition("=")[0]
    assert f"did you mean {key}?" in problems(write(MINIMAL), override)[name]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("epochs", "script.length.epochs?"),
        ("lr", "script.reference.lr?"),
        ("metric", "script.metric?"),
        ("seed", "train.seed?"),
        ("batch", "script.reference.batch to the batch that script.reference.lr"),
    ],
)
def test_a_key_without_its_section_is_one_of_the_scripts_where_there_is_a_script(key, meant):
    script = {"command": "t.py -b {batch}", "length": {"epochs": 1}, "reference": {"batch": 8}}
    with pytest.raises(SpecError) as error:
        validate_job({"name": "j", "script": script, key: 1}, source="j")
    assert meant in str(error.value)


def test_milestones_must_ascend(write):
    result = problems(write(MINIMAL), "schedule.kind=multistep", "schedule.milestones=[60, 30]")
    assert "ascend" in result["schedule.milestones"]


@pytest.mark.parametrize("kind", ["constant", "multistep"])
def test_final_learning_rate_belongs_to_the_cosine(write, kind):
    overrides = [f"schedule={{kind: {kind}, min_lr: 0.001}}"]
    if kind == "multistep":
        overrides.append("schedule.milestones=[5]")
    assert "cosine" in problems(write(MINIMAL), *overrides)["schedule.min_lr"]


def test_union_reports_one_problem_a_path(write):
    result = problems(write(MINIMAL), "ags.delta=-1")
    assert list(result) == ["ags.delta"]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("ags.refresh", "often", "must be epoch, got 'often'"),  # and not: or must be a section
        ("train.workers", "many", "must be auto or an integer, got 'many'"),
        ("auto", "x", "must be a section (keys: branch_epochs, arms), got 'x'"),
    ],
)
def test_a_section_is_asked_for_only_if_the_value_has_no_other_form(write, key, value, words):
    assert problems(write(MINIMAL), f"{key}={value}")[key] == f"{key}: {words}"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 16 * 2**30),
        ("800 MB", 800_000_000),
        ("1TB", 10**12),
        ("2 TiB", 2**41),
        ("1.5G", 1_500_000_000),
        ("2000000", 2_000_000),
        (2**30, 2**30),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["16", 16])
def test_a_size_whose_unit_was_forgotten_is_refused(text):
    with pytest.raises(ValueError, match="add the unit"):
        parse_size(text)


@pytest.mark.parametrize("text", ["800K", "1 KB", "12B"])
def test_a_size_below_a_megabyte_is_refused(text):
    with pytest.raises(ValueError, match="must be at least 1MB"):
        parse_size(text)


# --- SLURM

ON_SLURM = MINIMAL + "cluster: {kind: slurm, gpus_per_node: 4, slurm: {%s}}\n"


def slurm(write, text: str):
    return load(write(ON_SLURM % text)).cluster.slurm


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90", 90),
        ("'90'", 90),
        ("10:30", 11),
        ("0:01", 1),
        ("2:00:00", 120),
        ("1:59:01", 120),
        ("1-12", 2160),
        ("1-12:30", 2190),
        ("1-00:00:30", 1441),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(write, text, minutes):
    assert load(write(ON_SLURM % ""), f"cluster.minutes={text}").cluster.minutes == minutes


def test_numbers_are_names_too(write):
    result = slurm(write, "account: 4711, memory: 64000, qos: '', gpu_type: 4090")
    assert (result.account, result.memory, result.qos, result.gpu_type) == ("4711", "64000", "", "4090")


def test_options_keep_their_kind(write):
    result = slurm(write, "extra: {nice: 3, hold: true, comment: a b, mail-type: [END, 1], requeue-not: null}")
    assert result.extra == {"nice": "3", "hold": True, "comment": "a b", "mail-type": ["END", "1"], "requeue-not": None}


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("memory: 64 GiB", "memory", "a size such as 64G"),
        ("launcher: mpirun", "launcher", "must be srun or torchrun, got 'mpirun'"),
        ("gpus: gpus_per_nod", "gpus", "did you mean gpus_per_node"),
        ("gpu_type: 'gpu:a100'", "gpu_type", "a type of GPU"),
        ("gpu_type: a100, gpus: none", "gpu_type", "no effect with cluster.slurm.gpus: none"),
        ("launcher: torchrun, gpus: gpus_per_task", "gpus", "launcher: torchrun"),
        ('partition: "a\\nb"', "partition", "one line"),
        ("extra: {time: 3}", "extra.time", "cluster.minutes"),
        ("extra: {job_name: x}", "extra.job_name", "set name"),
        ("extra: {nodes: 3}", "extra.nodes", "search.nodes"),
        ("extra: {output: log}", "extra.output", "tula sets this"),
        ("extra: {requeue: true}", "extra.requeue", "tula sets this"),
        ("extra: {dependency: 'afterok:1'}", "extra.dependency", "tula sets this"),
        ("extra: {--mail-type: END}", "extra.--mail-type", "long name"),
        ("extra: {comment: [{a: 1}]}", "extra.comment", "text, a number"),
        ("extra: {gpus-per-task: 1}", "extra.gpus-per-task", "in addition to cluster.slurm.gpus"),
        ("extra: {gres: 'gpu:4'}", "extra.gres", "in addition to cluster.slurm.gpus"),
        ("extra: {mem-per-cpu: 4G}, memory: 8G", "extra.mem-per-cpu", "remove one of the two"),
        ("extra: {cpus_per_gpu: 4}, cpus_per_task: 8", "extra.cpus-per-gpu", "remove one of the two"),
        ("extra: {mail-type: END, mail_type: FAIL}", "extra.mail-type", "twice"),
        ("srun_extra: {cpus-per-task: 3}", "srun_extra.cpus-per-task", "cluster.slurm.cpus_per_task"),
        ("srun_extra: {kill-on-bad-exit: 0}", "srun_extra.kill-on-bad-exit", "tula sets this"),
        ("environment: {A-B: 1}", "environment.A-B", "must be the name of an environment variable"),
        ("environment: {RANK: 1}", "environment.RANK", "tula sets this"),
        ("environment: {DEBUG: true}", "environment.DEBUG", "with quotes"),
        ("wrapper: [numactl, '']", "wrapper[1]", "empty string"),
    ],
)
def test_what_slurm_cannot_be_asked_for_is_named_with_a_way_out(write, text, path, words):
    result = problems(write(ON_SLURM % text))
    assert words in result[f"cluster.slurm.{path}"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("minutes=2h", "MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"),
        ("minutes='1:2:3:4'", "as in SLURM, got '1:2:3:4'"),
        ("minutes='365-48:01:00'", "at most a year"),
        ("minutes=99999999999", "at most a year"),
        ("minutes=0", "at least 1"),
        ("minutes=UNLIMITED", "as in SLURM, got 'UNLIMITED'"),
        ('python="apptainer exec \'image python"', "must be a command"),
        ("python=' '", "empty"),
    ],
)
def test_what_no_job_can_be_started_with_is_refused(write, text, words):
    path = f"cluster.{text.partition('=')[0]}"
    assert words in problems(write(ON_SLURM % ""), f"cluster.{text}")[path]


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("train.reference_batch=1000000000000000000000000", "9.2"),
        ("train.accumulate=100000000", "1000000"),
        ("search.nodes=[100000000]", "1000000"),
        ("search.max_minutes=1e9", "527040"),
        ("cluster.gpus_per_node=5000", "1000"),
    ],
)
def test_numbers_that_no_cluster_has_are_refused(write, text, most):
    ((path, words),) = problems(write(ON_SLURM % ""), text).items()
    assert path.startswith(text.partition("=")[0]) and "of at most" in words and most in words.replace(",", "")


def test_gpus_in_a_form_of_ones_own_need_tula_to_ask_for_none(write):
    assert slurm(write, "gpus: none, extra: {gpus-per-socket: 2}").extra == {"gpus-per-socket": "2"}
    assert slurm(write, "extra: {gres: 'nvme:1', gpus: 0}").extra["gres"] == "nvme:1"


def test_all_that_slurm_cannot_be_asked_for_is_reported_at_once(write):
    text = "extra: {time: 3, nodes: 2, nice: 1}, environment: {RANK: 1}"
    assert set(problems(write(ON_SLURM % text), "cluster.minutes=soon")) == {
        "cluster.minutes",
        *(f"cluster.slurm.{path}" for path in ("extra.time", "extra.nodes", "environment.RANK")),
    }
    text = "gpus: gpus_per_task, launcher: torchrun, memory: 1G, extra: {gpus: 4, mem-per-cpu: 1G}"
    assert set(problems(write(ON_SLURM % text))) == {
        f"cluster.slurm.{path}" for path in ("gpus", "extra.gpus", "extra.mem-per-cpu")
    }


def test_settings_of_slurm_survive_a_round_trip(write):
    text = (
        "launcher: torchrun, gpus: gres, gpu_type: a100, exclusive: false,"
        " wrapper: w.sh, extra: {nice: 3, hold: true, mail-type: [END]}, srun_extra: {label: true},"
        " environment: {A: 'on', B: 1e-3, C: null, D: ''}"
    )
    data = load(write(ON_SLURM % text), "cluster.minutes=1-00", "cluster.setup=[]", "cluster.python=p -u")
    assert load(write(dump_yaml(data))) == data
    assert data.cluster.slurm.environment == {"A": "on", "B": "1e-3", "C": None, "D": ""}


def test_settings_of_a_site_can_be_taken_back_by_a_job(write):
    site = write("cluster: {slurm: {qos: normal, extra: {nice: 5}, environment: {A: 1}}}\n", "site.yaml")
    data = load(write(ON_SLURM % "qos: null, extra: {nice: false}, environment: {A: null}"), site_files=[site])
    assert (data.cluster.slurm.qos, data.cluster.slurm.extra) == (None, {"nice": False})
    assert data.cluster.slurm.environment == {"A": None}


def test_template_shows_every_setting_of_slurm_as_it_can_be_written(write):
    text = (ROOT / "templates" / "slurm.yaml").read_text(encoding="utf-8")
    section = text[text.index("  slurm:") : text.index("\n# pricing:")]
    given = re.sub(r"^    # (?=[a-z_]+: )", "    ", section, flags=re.MULTILINE)
    result = load(write(text.replace(section, given))).cluster.slurm
    assert result.model_fields_set == set(type(result).model_fields)


def test_a_probe_is_expected_to_take_its_warm_up_its_window_and_its_other_looks():
    assert spec().search.estimate_probe_seconds(0.1) == pytest.approx((10 + 20 + 3 * 5 + 10) * 0.1)
    assert spec().search.estimate_probe_seconds(30) == pytest.approx((10 + 5 + 3 * 5 + 10) * 30)


# --- sources


def test_override_beats_environment_beats_file_beats_site(write, tmp_path):
    site = write("search: {min_steps: 11, max_seconds: 30}\ncluster: {interface: ib0}\n", "site.yaml")
    path = write(MINIMAL + "search: {min_steps: 12, min_batch: 16}\n")
    environ = {f"{ENV_PREFIX}SEARCH__MIN_STEPS": "13", f"{ENV_PREFIX}SEARCH__MIN_BATCH": "64", "OTHER": "1"}
    data = load(path, "search.min_steps=14", environ=environ, site_files=[site, tmp_path / "absent.yaml"])
    assert (data.search.min_steps, data.search.min_batch, data.search.max_seconds) == (14, 64, 30)
    assert data.cluster.interface == "ib0"


def test_later_site_file_and_later_override_win(write):
    first, two = write("name: one\n", "1.yaml"), write("name: two\n", "2.yaml")
    path = write(MINIMAL)
    assert load(path, site_files=[first, two]).name == "two"
    assert load(path, "name=a", "name=b", site_files=[first, two]).name == "b"


def test_origins_name_the_source_of_each_leaf(write):
    path = write(MINIMAL)
    environ = {f"{ENV_PREFIX}TRAIN__SEED": "3"}
    merged, origins = merge_sources(path, overrides=["search.nodes=[1]"], environ=environ, site_files=())
    assert merged["train"] == {"epochs": 10, "seed": 3}
    assert origins["train.epochs"] == str(path)
    assert origins["train.seed"] == f"{ENV_PREFIX}TRAIN__SEED"
    assert origins["search.nodes"] == "--set"


def test_mapping_in_an_override_replaces_the_section(write):
    data = load(write(MINIMAL), "model.args={width: 3, depth: 2}", "model={name: vgg11}")
    assert data.model.name == "vgg11"
    assert data.model.args == {}


@pytest.mark.parametrize("override", ["search.nodes", "=3", " =3"])
def test_override_of_another_form_is_refused(write, override):
    with pytest.raises(SpecError, match=r"key\.subkey=value"):
        load(write(MINIMAL), override)


def test_override_that_is_no_yaml_names_itself(write):
    with pytest.raises(SpecError, match=r"--set search\.nodes"):
        load(write(MINIMAL), "search.nodes=[1")


def test_override_below_a_value_is_a_problem_of_that_path(write):
    assert "train.epochs" in problems(write(MINIMAL), "train.epochs.more=3")


def test_null_section_is_a_problem_and_an_override_fills_it(write):
    path = write(MINIMAL + "search:\n")
    assert "search" in problems(path)
    assert load(path, "search.min_steps=7").search.min_steps == 7


# --- adaptive gradient scaling


def test_a_preset_fills_what_is_not_given(write):
    result = load(write(MINIMAL), "train.method=ags", "ags.preset=robust", "ags.delta=0.8").ags.fill_from_preset()
    assert (result.granularity, result.source, result.scale_ema) == ("tensor", "local_norms", 0.9)
    assert (result.delta, result.refresh.every, result.s_min) == (0.8, 1, 1e-3)
    paper = load(write(MINIMAL)).ags.fill_from_preset()
    assert (paper.granularity, paper.delta, paper.refresh, paper.source) == ("element", 0.5, "epoch", "small_batch")
    assert all(value is not None for value in paper.model_dump().values())


def test_no_threshold_can_be_written_in_two_ways(write):
    assert load(write(MINIMAL), "train.method=ags", "ags.delta=.inf") == load(
        write(MINIMAL), "train.method=ags", "ags.delta=inf"
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["ags.source=local_norms"], "granularity: tensor"),
        (["ags.preset=robust", "ags.granularity=element"], "source: small_batch"),
        (["ags.preset=robust", "ags.b_small=32"], "remove the key, or set ags.source: small_batch"),
        (
            ["ags.scale_ema=0.5"],
            "this key no longer exists: delete it (set ags.preset, which determines the value: paper uses 0, robust 0.9)",
        ),
        (["ags.s_min=0"], "this key no longer exists: delete it (both presets use 0.001)"),
    ],
)
def test_settings_of_ags_that_do_nothing_together_are_refused(write, given, words):
    assert any(words in message for message in problems(write(MINIMAL), *given).values())


def test_what_a_preset_says_can_be_written_out_for_the_same_training():
    same = (
        spec(ags={"preset": "robust"}),
        spec(
            ags={
                "preset": "robust",
                **{key: AGS_PRESETS["robust"][key] for key in Ags.model_fields if key in AGS_PRESETS["robust"]},
            }
        ),
    )
    assert len({compute_train_signature(job, nodes=2, batch=64) for job in same}) == 1
    assert compute_train_signature(same[0], nodes=2, batch=64) != compute_train_signature(spec(), nodes=2, batch=64)


def test_the_template_names_every_setting_of_ags():
    text = (ROOT / "templates" / "job.yaml").read_text(encoding="utf-8")
    section = text[text.index("\n# ags:") : text.index("\n# auto:")]
    assert set(Ags.model_fields) == set(re.findall(r"^#   ([a-z_]+): ", section, flags=re.MULTILINE))


# --- signatures


@pytest.mark.parametrize(
    "change",
    [
        {"pricing__price": 9.0},
        {"name": "other"},
        {"optimizer__lr": 0.2},
        {"train__epochs": 99},
        {"train__seed": 5},
        {"search__nodes": [1]},
        {"search__min_steps": 99},
        {"dataset__download": True},
        {"schedule__warmup_epochs": 2.0},
        {"ags__delta": 0.1},
        {"cluster__collective": "parameter_server"},
        {"cluster__collective": "tree"},
    ],
)
def test_what_no_measurement_depends_on_keeps_the_probes(change):
    assert compute_measurement_signature(spec(**change)) == compute_measurement_signature(spec())


@pytest.mark.parametrize(
    "change",
    [
        {"model__name": "vgg11"},
        {"model__args": {"width": 2}},
        {"dataset__name": "CIFAR100"},
        {"dataset__collate_fn": "mine:padded"},
        {"dataset__sampler": "mine:order"},
        {"dataset__length": 10},
        {"transforms__train": ["ToTensor"]},
        {"loss__args": {"label_smoothing": 0.1}},
        {"optimizer__momentum": 0.9},
        {"train__precision": "bf16"},
        {"train__workers": 7},
        {"train__compile": True},
        {"train__deterministic": True},
        {"train__accumulate": 2},
        {"train__method": "lbt"},
        {"ags__granularity": "tensor"},
        {"ags__refresh": {"every": 1}},
        {"cluster__gpus_per_node": 4},
        {"cluster__memory_per_gpu": 10**9},
    ],
)
def test_what_a_measurement_depends_on_changes_the_signature(change):
    assert compute_measurement_signature(spec(**change)) != compute_measurement_signature(spec())


@pytest.mark.parametrize(
    "change",
    [
        {"dataset__collate_fn": "mine:padded"},
        {"dataset__sampler": "mine:order"},
        {"dataset__length": 10},
        {"optimizer__lr": 0.2},
        {"train__epochs": 99},
        {"train__seed": 5},
        {"train__method": "lbt"},
        {"ags__delta": 0.1},
        {"schedule__warmup_epochs": 2.0},
        {"optimizer__weight_decay": 0.1},
        {"cluster__gpus_per_node": 2},
        {"train__lr_scaling": "sqrt"},
        {"train__ramp": "auto"},
        {"train__ramp": "noise"},
        {"train__ramp": [{"epochs": 1, "batch": 32}]},
        {"train__ramp": "decay", "train__method": "lbt", "schedule": {"kind": "cosine"}},
        {"train__max_lr_factor": 8},
    ],
)
def test_what_changes_the_weights_changes_the_training_signature(change):
    assert compute_train_signature(spec(**change), nodes=2, batch=64) != compute_train_signature(
        spec(), nodes=2, batch=64
    )


@pytest.mark.parametrize(
    "change",
    [
        {"pricing__price": 9.0},
        {"train__workers": 7},
        {"train__compile": True},
        {"train__deterministic": True},
        {"train__diagnostics": ["gradient_norms", "gradient_noise", "hessian"]},
        {"search__min_steps": 9},
        {"name": "b"},
    ],
)
def test_what_leaves_the_weights_alone_keeps_the_training_signature(change):
    assert compute_train_signature(spec(**change), nodes=2, batch=64) == compute_train_signature(
        spec(), nodes=2, batch=64
    )


def test_counted_epochs_change_the_signature_of_no_other_training():
    best, target = {"train__best_checkpoint": {"metric": "top1"}}, {"target": 0.7}
    names = [
        compute_train_signature(spec(**best, **change), nodes=1, batch=64)
        for change in ({}, {"train__early_stopping": target}, {"train__early_stopping": {**target, "epochs": 1}})
    ]
    assert len(set(names)) == 3


REGRESSION = {"loss": {"name": "MSELoss"}}


@pytest.mark.parametrize(
    ("change", "at_8", "at_16", "at_32"),
    [
        ({"train__method": "ramp", **REGRESSION}, 8, 8, 8),
        ({"train__method": "ramp"}, 8, 16, 16),
        ({"train__method": "ramp", "loss": {"name": "CrossEntropyLoss"}}, 8, 16, 16),
        ({"train__method": "ramp", "loss": {"name": "mine:loss"}}, 8, 8, 8),
        ({"train__method": "ramp", "train__max_lr_factor": None, **REGRESSION}, 8, 16, 32),
        ({"train__method": "ramp", "train__max_lr_factor": 20, **REGRESSION}, 8, 16, 20),
        ({"train__method": "ramp", "train__max_lr_factor": 4}, 4, 4, 4),
        ({"train__method": "ramp", "train__lr_scaling": "sqrt", **REGRESSION}, 8**0.5, 4, 32**0.5),
        ({"train__method": "ramp", "optimizer__name": "AdamW", **REGRESSION}, 8**0.5, 4, 32**0.5),
        ({"train__method": "lrs", **REGRESSION}, 8, 16, 32),
        ({"train__method": "lars", **REGRESSION}, 8, 16, 32),
        ({"train__method": "lbt", "train__lr_scaling": "linear", **REGRESSION}, 8, 16, 32),
        ({"train__method": "lbt", **REGRESSION}, 1, 1, 1),
    ],
)
def test_the_learning_rate_of_a_ramp_is_limited_and_others_are_as_their_paper_has_them(change, at_8, at_16, at_32):
    job = spec(train__reference_batch=16, **change)
    assert [compute_lr_scale(job, 16 * factor) for factor in (1, 8, 16, 32)] == pytest.approx([1, at_8, at_16, at_32])


def test_a_limit_names_another_training_only_where_it_acts():
    def name(batch, **change):
        return compute_train_signature(spec(train__reference_batch=16, **REGRESSION, **change), nodes=1, batch=batch)

    for method in ("ramp", "auto"):
        default, none = {"train__method": method}, {"train__method": method, "train__max_lr_factor": None}
        assert name(128, **default) == name(128, **none) and name(256, **default) != name(256, **none)
    assert name(256, train__method="ramp") == name(256, train__method="ramp", train__max_lr_factor=8)
    assert name(256, train__method="lrs") == name(256, train__method="lrs", train__max_lr_factor=None)


def test_a_batch_that_grows_is_measured_as_one_that_stays():
    assert compute_measurement_signature(
        spec(train__ramp="auto", train__max_lr_factor=8)
    ) == compute_measurement_signature(spec())


def test_every_method_and_a_warm_up_of_zero_have_a_training_signature_of_their_own():
    methods = [{"train__method": method} for method in METHODS]
    messages = [{"train__method": "lars", "schedule__warmup_epochs": epochs} for epochs in (0, 1)]
    result = {compute_train_signature(spec(**change), nodes=1, batch=64) for change in [*methods, *messages]}
    assert len(result) == len(methods) + 2


def test_training_signature_knows_nodes_and_batch():
    result = {compute_train_signature(spec(), nodes=nodes, batch=batch) for nodes in (1, 2) for batch in (32, 64)}
    assert len(result) == 4


def test_signatures_stay_what_they_were_within_a_format():
    # Others would lose their measurements and checkpoints.
    job = load(ROOT / "configs" / "quickstart.yaml")
    assert compute_measurement_signature(job) == "d8a23d5b"
    assert compute_train_signature(job, nodes=2, batch=256) == "024ac197"


def test_the_users_code_is_part_of_both_signatures_where_there_is_some():
    codes = ("", "1111", "2222")
    assert len({compute_measurement_signature(spec(), code) for code in codes}) == 3
    assert len({compute_train_signature(spec(), nodes=2, batch=64, code=code) for code in codes}) == 3
    assert compute_measurement_signature(spec(), "") == compute_measurement_signature(spec())
    assert compute_train_signature(spec(), nodes=2, batch=64, code="") == compute_train_signature(
        spec(), nodes=2, batch=64
    )


def test_signatures_are_eight_hex_digits():
    assert len(compute_measurement_signature(spec())) == 8
    assert int(compute_measurement_signature(spec()), 16) >= 0


# --- round trip


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_files_load_and_survive_a_round_trip(path, write):
    data = load(path)
    again = load(write(dump_yaml(data)))
    assert again == data
    assert compute_measurement_signature(again) == compute_measurement_signature(data)
    assert data.search.max_node_hours is not None


def test_there_are_shipped_files():
    assert {path.name for path in SHIPPED} >= {
        "job.yaml", "slurm.yaml", "quickstart.yaml", "resnet50_imagenet.yaml", "vgg11_cifar100.yaml",
        "alexnet_caltech101.yaml", "mobilenetv3_caltech256.yaml",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "lr", "decay", "milestones", "gamma"),
    [
        ("resnet50_imagenet", 0.05, 5e-4, [100, 150, 200], 0.1),
        ("vgg11_cifar100", 0.01, 5e-4, [50, 75, 100], 0.2),
        ("alexnet_caltech101", 0.01, 5e-4, [25, 50, 75], 0.1),
        ("mobilenetv3_caltech256", 0.01, 1e-4, [40, 80], 0.1),
    ],
)
def test_configs_have_the_hyper_parameters_of_the_paper(name, lr, decay, milestones, gamma):
    data = load(ROOT / "configs" / f"{name}.yaml")
    assert (data.optimizer.name, data.optimizer.momentum) == ("SGD", 0.9)
    assert (data.optimizer.lr, data.optimizer.weight_decay) == (lr, decay)
    assert (data.schedule.milestones, data.schedule.gamma) == (milestones, gamma)
    assert data.search.nodes == [2, 4, 8, 16]
    assert (data.cluster.gpus_per_node, data.cluster.collective) == (1, "ring")
    assert (data.pricing.kind, data.pricing.price) == ("gpu_hour", 2.48)


@pytest.mark.parametrize("name", ["ags", "auto"])
def test_a_section_of_a_method_that_the_job_does_not_name_is_refused(write, name):
    settings = {"ags": "ags.delta=0.2", "auto": "auto.branch_epochs=2"}[name]
    with pytest.raises(SpecError, match=f"train.method: ramp, the default. Set train.method: {name}"):
        load(write(MINIMAL), settings)
    assert load(write(MINIMAL), settings, f"train.method={name}", "train.epochs=9").train.method == name
    assert load(write(MINIMAL), settings, "train.method=lbt").train.method == "lbt", "named, so that it is a choice"


@pytest.mark.parametrize(
    ("optimizer", "method", "words", "silent"),
    [
        ("SGD", "ramp", "the default because tula's own loop", "betas"),
        ("SGD", "ramp", "clipped to norm 1", "betas"),
        (
            "AdamW",
            "ramp",
            "linear, decreasing after 0.7 of the epochs, and beta1 is 0.8 at batches above 1024",
            "clipped",
        ),
        ("NAdam", "ramp", "With NAdam", "Muon"),
        ("RMSprop", "ramp", "the default", "betas"),
        ("Muon", "ramp", "already orthogonalises its updates", "betas"),
        ("AdamW", "lbt", "With AdamW, orthogonalised updates", "default"),
        ("SGD", "ags", "Try train.method: ramp", "default"),
        ("SGD", "auto", "uses ramp unless", "default"),
        ("mine:Adam8bit", "ramp", "With mine:Adam8bit", "Muon"),
    ],
)
def test_a_line_says_which_method_a_job_has_and_gives_advice_for_its_optimizer(optimizer, method, words, silent):
    epochs = {"train__epochs": 9} if method == "auto" else {}
    line = describe_training_method(spec(optimizer__name=optimizer, train__method=method, **epochs))
    assert line.startswith(f"method {method}") and words in line and silent not in line
    assert "\n" not in line and "%" not in line, "results are those of docs/reference/results.md"


def test_the_line_names_the_schedule_also_where_betas_are_given_or_the_decay_is_spent_as_batch():
    betas = {"optimizer__name": "AdamW", "optimizer__args": {"betas": [0.9, 0.99]}}
    line = describe_training_method(spec(train__method="ramp", **betas))
    assert "decreasing after 0.7 of the epochs, and beta1 is that of optimizer.args.betas" in line
    assert "also try" not in line
    decay = {"optimizer__name": "AdamW", "train__ramp": "decay", "schedule__kind": "cosine"}
    line = describe_training_method(spec(train__method="ramp", **decay))
    assert "the batch doubles each time the schedule halves" in line and "decay_from" not in line


@pytest.mark.parametrize("setting", ["decay_from=0.5", "min_lr=0.001", "milestones=[3]"])
def test_a_key_of_another_schedule_is_refused_without_naming_a_kind_that_the_job_does_not(write, setting):
    with pytest.raises(SpecError, match=r"while schedule\.kind is not set") as caught:
        load(write(MINIMAL), f"schedule.{setting}")
    assert "constant" not in str(caught.value.problems[0])


@pytest.mark.parametrize(
    ("change", "kind", "decay_from", "beta1"),
    [
        ({}, "linear", 0.7, 0.8),
        ({"optimizer__name": "NAdam"}, "linear", 0.7, 0.8),
        ({"schedule__warmup_epochs": 1.0}, "linear", 0.7, 0.8),
        ({"schedule": {"kind": "constant"}}, "constant", 0.0, 0.8),
        ({"schedule": {"kind": "cosine"}}, "cosine", 0.0, 0.8),
        ({"optimizer__args": {"betas": [0.9, 0.95]}}, "linear", 0.7, None),
        ({"optimizer__name": "SGD"}, "constant", 0.0, None),
        ({"optimizer__name": "RMSprop"}, "constant", 0.0, None),
        ({"optimizer__name": "Muon"}, "constant", 0.0, None),
        ({"train__method": "lbt"}, "constant", 0.0, None),
        ({"train__method": "ortho"}, "constant", 0.0, None),
        ({"train__method": "auto", "train__epochs": 9}, "constant", 0.0, None),
        ({"train__ramp": "decay", "schedule": {"kind": "cosine"}}, "cosine", 0.0, None),
    ],
)
def test_a_ramp_with_adam_decays_late_and_has_a_lower_beta1_above_8_times_the_batch(change, kind, decay_from, beta1):
    job = spec(**{"optimizer__name": "AdamW", "train__method": "ramp", "train__reference_batch": 16, **change})
    assert (job.schedule.kind, job.schedule.decay_from) == (kind, decay_from)
    assert [get_default_beta1(job, batch) for batch in (16, 128, 129)] == [None, None, beta1]
    assert JobSpec.model_validate(job.model_dump(mode="json")) == job
    content = job.model_dump(mode="json", exclude_unset=True)
    as_lbt = JobSpec.model_validate({**content, "train": {**content["train"], "method": "lbt", "ramp": None}})
    assert as_lbt.schedule.kind == ("constant" if "kind" not in content.get("schedule", {}) else kind)


@pytest.mark.parametrize(
    ("change", "norm"),
    [
        ({}, 1.0),
        ({"loss": {"name": "CrossEntropyLoss"}}, 1.0),
        ({"optimizer__name": "ASGD"}, 1.0),
        ({"train__method": "auto", "train__epochs": 9}, 1.0),
        ({"train__max_grad_norm": 5.0}, 5.0),
        ({"train__max_grad_norm": None}, None),
        (REGRESSION, None),
        ({"optimizer__name": "AdamW"}, None),
        ({"train__method": "lbt"}, None),
        ({"train__method": "lrs", "train__ramp": "auto"}, None),
        ({"train__ramp": "decay", "schedule": {"kind": "cosine"}}, None),
    ],
)
def test_a_ramp_with_sgd_and_a_cross_entropy_clips_gradients_unless_the_job_says_otherwise(change, norm):
    job = spec(**{"train__method": "ramp", **change})
    assert job.train.max_grad_norm == norm
    assert JobSpec.model_validate(job.model_dump(mode="json")).train.max_grad_norm == norm


def test_a_run_of_earlier_defaults_keeps_them():
    for optimizer in ("SGD", "AdamW"):
        job = spec(optimizer__name=optimizer, train__method="ramp")
        stored = job.model_dump(mode="json")
        stored["train"]["max_grad_norm"] = None
        stored["schedule"] |= {"kind": "constant", "decay_from": 0.0}
        earlier = JobSpec.model_validate(stored)
        assert earlier.train.max_grad_norm is None and earlier.schedule.kind == "constant"
        assert compute_train_signature(earlier, nodes=1, batch=64) != compute_train_signature(job, nodes=1, batch=64)


def test_the_first_beta_of_a_ramp_names_another_training_only_where_it_acts():
    def name(batch, **change):
        cosine = {"schedule": {"kind": "cosine"}, "train__reference_batch": 16, "train__method": "ramp"}
        return compute_train_signature(spec(optimizer__name="AdamW", **cosine, **change), nodes=1, batch=batch)

    with_late = spec(optimizer__name="AdamW", train__reference_batch=16, train__method="ramp")
    assert name(256) != compute_train_signature(with_late, nodes=1, batch=256)
    betas = {"optimizer__args": {"betas": [0.8, 0.999]}}
    assert name(256) != name(256, **betas), "given betas are a training of their own, as they were"


def test_extreme_values_survive_a_round_trip(write):
    result = spec(ags__delta="inf", ags__refresh={"every": 7}, cluster__memory_per_gpu="3GiB", optimizer__lr=1e-30)
    assert load(write(dump_yaml(result))) == result


@pytest.mark.parametrize("word", ["1e-3", "on", "1:30", "0o17", "+12e3", "null", "2025-01-01", "~", "<<", "=", "1e5"])
def test_words_that_look_like_something_else_survive_a_round_trip(write, word):
    result = spec(model__args={"word": word})
    assert load(write(dump_yaml(result))).model.args == {"word": word}


def test_spec_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        spec().train.epochs = 3


# --- prices


@pytest.mark.parametrize(
    ("pricing", "words"),
    [
        (
            {"price": 0},
            "pricing.price: must be a number above 0, got 0; to show costs in node-hours, remove section pricing",
        ),
        ({"price": -2.5}, "pricing.price: must be a number above 0, got -2.5"),
        ({"price": math.nan}, "pricing.price: must be a number above 0, got nan"),
        ({"price": "free"}, "pricing.price: must be a number"),
        ({"kind": "gpu_hour"}, "pricing.price: is required"),
        (
            {"price": 1, "spot": {"discount": 60, "interruptions_per_day": 1}},
            "spot.discount: must be a number below 1, got 60",
        ),
        ({"price": 1, "spot": {"discount": 0.6}}, "pricing.spot.interruptions_per_day: is required"),
        ({"price": 1, "spot": {"discount": 0.6, "interruptions_per_day": -1}}, "must be a number of at least 0"),
    ],
)
def test_a_price_that_is_none_is_refused(pricing, words):
    with pytest.raises(SpecError) as caught:
        validate_job({**yaml.safe_load(MINIMAL), "pricing": pricing}, source="test")
    assert words in "; ".join(map(str, caught.value.problems))


def test_without_a_price_cost_counts_node_hours():
    assert (spec().pricing, spec().pricing.currency) == (UNPRICED_PRICING, "node-h")


# --- several types of nodes


def typed(**types):
    return validate_job(
        {**yaml.safe_load(MINIMAL), "cluster": {"gpus_per_node": 2}, "node_types": types}, source="test"
    )


def test_a_type_is_the_job_with_what_is_special_about_it():
    job = typed(
        a={"cluster": {"gpus_per_node": 8}, "pricing": {"price": 3}},
        b={"pricing": {"price": 1}, "search": {"nodes": [4]}},
    )
    a, b = job.split_by_type().values()
    assert (a.cluster.gpus_per_node, a.pricing.price, a.search.nodes) == (8, 3.0, job.search.nodes)
    assert (b.cluster.gpus_per_node, b.pricing.currency, b.search.nodes) == (2, "USD", [4])
    assert a.search.max_node_hours == job.search.max_node_hours and not a.node_types
    assert (a.name, b.name) == ("job-a", "job-b") and a.split_by_type() == {None: a}


def test_types_survive_a_round_trip(write):
    job = typed(a={"pricing": {"price": 3}}, b={"pricing": {"price": 1, "currency": "USD"}})
    again = load(write(dump_yaml(job)))
    assert again == job and again.split_by_type() == job.split_by_type()


def test_settings_of_the_cluster_are_laid_over_one_by_one():
    slurm = {"kind": "slurm", "slurm": {"partition": "all", "account": "me"}}
    job = validate_job(
        {
            **yaml.safe_load(MINIMAL),
            "cluster": slurm,
            "node_types": {"a": {"cluster": {"slurm": {"constraint": "a100"}}}},
        },
        source="test",
    )
    result = job.split_by_type()["a"].cluster.slurm
    assert result is not None and (result.partition, result.account, result.constraint) == ("all", "me", "a100")


@pytest.mark.parametrize(
    ("types", "words"),
    [
        (
            {"a": {"cluster": {"gpus_per_nod": 4}}},
            "node_types.a.cluster.gpus_per_nod: no such key (did you mean gpus_per_node?)",
        ),
        ({"a": {"clster": {}}}, "node_types.a.clster: no such key (did you mean cluster?)"),
        ({"a": {"pricing": {"price": 0}}}, "node_types.a.pricing.price: must be a number above 0"),
        ({"a": {"pricing": {"kind": "gpu_hour"}}}, "node_types.a.pricing.price: is required"),
        (
            {"a": {"cluster": {"kind": "slrm"}}},
            "node_types.a.cluster.kind: unknown scheduler 'slrm'; did you mean slurm?",
        ),
        (
            {"a": {"search": {"max_node_hours": 1}}},
            "node_types.a.search.max_node_hours: limits all node types together",
        ),
        (
            {"a": {"pricing": {"price": 1}}, "b": {}},
            "all node types must have the same pricing.currency, got a in USD, b in node-h",
        ),
        ({"../a": {}}, "must be 1 to 32 letters, digits"),
    ],
)
def test_a_type_that_is_none_is_refused_with_its_path(types, words):
    with pytest.raises(SpecError) as caught:
        typed(**types)
    assert words in "; ".join(map(str, caught.value.problems))


def test_problems_of_all_types_are_reported_at_once():
    with pytest.raises(SpecError) as caught:
        typed(a={"cluster": {"gpus_per_node": 0}}, b={"pricing": {"price": 0}})
    assert [problem.path for problem in caught.value.problems] == [
        "node_types.a.cluster.gpus_per_node",
        "node_types.b.pricing.price",
    ]


def test_another_type_or_price_keeps_the_run_and_another_cluster_is_measured_anew():
    item = typed(a={"cluster": {"gpus_per_node": 4}})
    two = typed(a={"cluster": {"gpus_per_node": 4}}, b={})
    assert (
        compute_measurement_signature(item)
        == compute_measurement_signature(two)
        != compute_measurement_signature(spec())
    )
    other = typed(a={"cluster": {"gpus_per_node": 8}}, b={})
    assert compute_measurement_signature(other.split_by_type()["a"]) != compute_measurement_signature(
        two.split_by_type()["a"]
    )
    assert compute_measurement_signature(other.split_by_type()["b"]) == compute_measurement_signature(
        two.split_by_type()["b"]
    )
    base = validate_job({**two.model_dump(exclude_unset=True), "cluster": {"gpus_per_node": 6}}, source="test")
    assert compute_measurement_signature(base) == compute_measurement_signature(two), (
        "a type that has its own GPUs keeps what was measured"
    )
    assert compute_measurement_signature(base.split_by_type()["a"]) == compute_measurement_signature(
        two.split_by_type()["a"]
    )


def test_a_job_with_types_and_no_price_reads_back_as_it_was_written(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(MINIMAL + "node_types: {a: {search: {nodes: [1, 2]}}, b: {search: {nodes: [1]}}}\n")
    path.write_text(dump_yaml(load_spec(path)))
    assert {name: part.search.nodes for name, part in load_spec(path).split_by_type().items()} == {
        "a": [1, 2],
        "b": [1],
    }


@pytest.mark.parametrize(
    ("optimizer", "train", "ags", "expected"),
    [
        ("AdamW", {"method": "ags"}, {}, "update"),
        ("RMSprop", {"method": "static"}, {}, "update"),
        ("AdamW", {"method": "ags"}, {"apply_to": "gradient"}, "gradient"),
        ("AdamW", {"method": "lbt"}, {}, None),
        ("SGD", {"method": "ags"}, {}, None),
    ],
)
def test_ags_scales_updates_where_the_optimizer_divides_by_the_gradient(optimizer, train, ags, expected):
    content = {
        "model": {"name": "small_cnn"},
        "dataset": {"name": "digits"},
        "optimizer": {"name": optimizer, "lr": 0.1},
        "train": {"epochs": 1, **train},
        "ags": ags,
    }
    job = validate_job(content, source="test")
    assert job.ags.apply_to == expected
    assert JobSpec.model_validate_json(job.model_dump_json()) == job


def test_what_ags_leaves_out_is_another_training_and_no_other_run_where_nothing_is():
    def job(**ags):
        sections = {"model": {"name": "small_cnn"}, "dataset": {"name": "digits"}, "optimizer": {"lr": 0.1}}
        return validate_job({**sections, "train": {"epochs": 1, "method": "ags"}, "ags": ags}, source="test")

    plain, norms, whole = job(), job(parameters=["*", "!norms"]), job(parameters="all")
    assert len({compute_train_signature(spec, nodes=1, batch=64) for spec in (plain, norms, whole)}) == 3
    assert compute_measurement_signature(plain) == compute_measurement_signature(norms)
    script = {
        "script": {"command": "python t.py --batch {batch}", "length": {"epochs": 1}, "reference": {"batch": 256}},
        "train": {"method": "ags"},
        "ags": {"parameters": ["norms"]},
    }
    with pytest.raises(SpecError, match=r"tula_hooks\.wrap"):
        validate_job(script, source="test")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("epochs", "train.epochs"), ("lr", "optimizer.lr"), ("batch_size", "train.reference_batch"), ("nodes", "search.nodes"),
        ("gpus", "cluster.gpus_per_node"), ("model_name", "model.name"), ("seed", "train.seed"), ("partition", "cluster.slurm.partition"),
        ("account", "cluster.slurm.account"), ("train.batch_size", "train.reference_batch"), ("trian", "train?"), ("method", "train.method"),
    ],
)  # fmt: skip
def test_a_usual_name_leads_to_the_key_that_is_meant(write, key, hint):
    with pytest.raises(SpecError) as caught:
        load_spec(write(MINIMAL), overrides=[f"{key}=1"], site_files=[], environ={})
    assert any(hint in problem.hint for problem in caught.value.problems)


@pytest.mark.parametrize(
    "override", ["train.epochs=true", "optimizer.lr=true", "search.nodes=[true,2]", "pricing.price=true"]
)
def test_true_is_not_the_number_one(write, override):
    (problem,) = problems(write(MINIMAL), override).values()
    assert "must be a number, got true" in problem


def test_sections_that_a_script_does_not_take_are_named_together(write):
    text = "script: {command: python t.py}\nmodel: {name: x}\ndataset: {name: y}\n"
    assert "model, dataset have no effect" in str(problems(write(text)))


EXAMPLES = ROOT / "examples"
SITE_FILES = [EXAMPLES / "slurm_site" / "site.yaml", *sorted((EXAMPLES / "sites").glob("*.yaml"))]


@pytest.mark.parametrize("path", SITE_FILES, ids=lambda path: path.parent.name)
def test_a_job_loads_with_the_site_files_that_come_with_tula(path, tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text(
        "model: {name: small_cnn}\ndataset: {name: digits}\noptimizer: {lr: 0.1}\ntrain: {epochs: 1}\npricing: {price: 1}\n"
    )
    assert load_spec(job, environ={}, site_files=[path]).cluster.slurm.partition


@pytest.mark.parametrize("path", SITE_FILES[1:], ids=lambda path: path.name)
def test_a_site_file_from_documentation_says_so_and_from_which_and_when(path):
    head = path.read_text().partition("\ncluster:")[0]
    assert "FROM PUBLIC DOCUMENTATION, NOT RUN THERE" in head
    assert re.search(r"pages \".*\" and \".*\"", head) and re.search(r"as of\s(?:# )?\d+ \w+ 20\d\d", head)


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        ({"name": "mine:dataset", "test": {"root": "data/test"}}, "test.root: has no effect with dataset mine:dataset"),
        (
            {"name": "ImageFolder", "test": {"name": "mine:dataset", "root": "x"}},
            "test.root: has no effect with dataset mine:",
        ),
        ({"name": "mine:dataset", "test": {"name": "ImageFolder"}}, "test.root: is required with ImageFolder"),
        ({"name": "mine:dataset", "test": {}}, "test: must differ from the training set"),
        ({"name": "CIFAR10", "test": {"root": "x"}}, "test: dataset CIFAR10 has no separate test set"),
    ],
)
def test_a_test_set_that_would_be_the_evaluation_set_is_refused(dataset, why):
    with pytest.raises(SpecError, match=why):
        validate_job({**yaml.safe_load(MINIMAL), "dataset": dataset}, source="test")
