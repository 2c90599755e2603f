import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tula_cli.cluster.slurm.site import Site, parse_partitions
from tula_cli.services.init import (
    make_job_from_command,
    make_job_from_template,
    shorten_job_file,
    write_schemas_and_add_reference,
)
from tula_cli.services.init_from_sbatch import make_job_from_sbatch
from tula_cli.spec.job import JobSpec


@pytest.mark.parametrize(("kind", "line"), [("local", "  kind: local"), ("slurm", "  kind: slurm")])
def test_templates_name_their_cluster(kind, line):
    assert any(text.startswith(line) for text in make_job_from_template(kind).splitlines())


@pytest.mark.parametrize(("gpus", "nodes"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4])])
def test_a_local_job_searches_the_gpus_that_are_here(gpus, nodes):
    filled, plain = (
        make_job_from_template("local", gpus=gpus).splitlines(),
        make_job_from_template("local").splitlines(),
    )
    changed = [(new, old) for new, old in zip(filled, plain, strict=True) if new != old]
    assert len(changed) == 1
    assert yaml.safe_load("\n".join(filled))["search"]["nodes"] == nodes


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_templates_name_the_ramp_and_a_job_without_a_method_has_it_too(kind):
    content = yaml.safe_load(make_job_from_template(kind))
    assert (content["train"].pop("method"), content["optimizer"]["name"]) == ("ramp", "SGD")
    assert JobSpec.model_validate(content).train.method == "ramp"
    assert "ags" not in content, "what means nothing to the ramp"


def test_local_template_mentions_every_setting():
    script = make_job_from_command("train.py --batch-size 8 --epochs 3 --resume x --output-dir y", "local").text
    text = make_job_from_template("local") + script.partition("\nsearch:")[0]
    schema = JobSpec.model_json_schema()
    for name, section in schema["$defs"].items():
        if name not in ("Slurm", "Every"):
            value = section["properties"].keys() - ({"slurm_billing"} if name == "Pricing" else set())
            missing = [key for key in value if f"{key}:" not in text]
            assert not missing, (name, missing)


def test_slurm_template_mentions_the_usual_options():
    text = make_job_from_template("slurm")
    usual = ("partition", "account", "qos", "constraint", "minutes", "cpus_per_task", "memory", "setup", "extra")
    for key in usual:
        assert f"{key}:" in text


# --- the short file

GPU_SITE = "gpu*|up|1:00:00|1-2|4|idle|16|64000|gpu:a100:4\nfast|up|1:00:00|1-infinite|2|idle|16|64000|gpu:h100:4\n"
COMMAND = "torchrun --nproc-per-node 4 train.py --batch-size 64 --lr 0.1 --epochs 90 --output-dir out --resume x"
SBATCH_SCRIPTS = Path(__file__).parents[2] / "fixtures/sbatch/typed"


def site(told: str, *accounts: str) -> Site:
    return Site(parse_partitions(told), accounts)


def full_files() -> Iterator[tuple[str, str]]:
    """Yield job files with all keys, by how they are made."""
    yield "local", make_job_from_template("local")
    yield "four GPUs", make_job_from_template("local", gpus=4)
    yield "slurm", make_job_from_template("slurm")
    yield "a site", make_job_from_template("slurm", site(GPU_SITE, "lab", "other"))
    yield "few cores per GPU", make_job_from_template("slurm", site(GPU_SITE.replace("|16|", "|4|"), "lab"))
    yield "no default partition", make_job_from_template("slurm", site(GPU_SITE.replace("*", ""), "lab", "other"))
    yield "from a command", make_job_from_command(COMMAND, "local").text
    yield "from a command for a site", make_job_from_command(COMMAND, "slurm", site(GPU_SITE)).text
    yield "from a command without a length", make_job_from_command("python t.py -b 8 --lr 0.1", "local").text
    for name, row in yaml.safe_load((SBATCH_SCRIPTS / "expected.yaml").read_text()).items():
        if "refused" not in row:
            yield name, make_job_from_sbatch((SBATCH_SCRIPTS / f"{name}.sbatch").read_text(), name).text


FULL_FILES = dict(full_files())


@pytest.mark.parametrize("name", FULL_FILES)
def test_the_short_file_is_the_same_job_in_at_most_40_lines(name, tmp_path):
    full = write_schemas_and_add_reference(FULL_FILES[name], tmp_path / "job.yaml")
    short = write_schemas_and_add_reference(shorten_job_file(FULL_FILES[name]), tmp_path / "job.yaml")
    assert len(short.splitlines()) <= 40 < len(full.splitlines())
    assert yaml.safe_load(short) == yaml.safe_load(full)
    assert "tula init --full" in short and "tula profile job.yaml" in short


@pytest.mark.parametrize("name", FULL_FILES)
def test_every_key_of_the_short_file_has_a_comment(name):
    keys = [line for line in shorten_job_file(FULL_FILES[name]).splitlines() if re.match(r"^ *[a-z_]+: +\S", line)]
    value = ("command:",)  # it is the user's own
    assert [line for line in keys if " # " not in line and not line.lstrip().startswith(value)] == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("slurm", "    # partition: gpu # "),
        ("slurm", "    # account: project # "),
        ("slurm", "# pricing: {kind: gpu_hour, "),
        ("a site", "    # account: lab # yours: lab, other"),
        ("no default partition", "    # partition: gpu # SLURM has no default partition here: choose one of gpu, fast"),
        ("from a command", "  # metric: {"),
        ("from a command without a length", "  # resume: {"),
        ("from a command without a length", "  # length: {epochs: 90} # REQUIRED: "),
    ],
)
def test_the_short_file_shows_commented_out_keys_that_most_jobs_need(name, line):
    assert any(text.startswith(line) for text in shorten_job_file(FULL_FILES[name]).splitlines())
