import pytest
import yaml

from tula_cli.services.init import make_job_from_command, make_job_from_template
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


OF_BILLING = {"unit", "per_node", "qos_factors", "partition_factors", "slurm_billing"}
"""Of section pricing: what SLURM bills, which there is none of on this machine; the last is what SLURM reported."""


def test_local_template_mentions_every_setting():
    script = make_job_from_command("train.py --batch-size 8 --epochs 3 --resume x --output-dir y", "local").text
    text = make_job_from_template("local") + script.partition("\nsearch:")[0]
    schema = JobSpec.model_json_schema()
    for name, section in schema["$defs"].items():
        if name not in ("Slurm", "Every"):
            own = section["properties"].keys() - (OF_BILLING if name == "Pricing" else set())
            missing = [key for key in own if f"{key}:" not in text]
            assert not missing, (name, missing)


def test_slurm_template_mentions_the_usual_options():
    text = make_job_from_template("slurm")
    usual = ("partition", "account", "qos", "constraint", "minutes", "cpus_per_task", "memory", "setup", "extra")
    for key in (*usual, *(OF_BILLING - {"slurm_billing"})):
        assert f"{key}:" in text
