"""Keys of older job files: renamed ones are read with a warning, removed ones are refused with advice."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from tula_cli.errors import SpecError
from tula_cli.services.api import load_job
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import load_spec, validate_job
from tula_cli.spec.merge import ENV_PREFIX
from tula_cli.spec.old_keys import REMOVED_KEYS, RENAMED_KEYS, OldKeyWarning, drop_removed_values
from tula_cli.spec.scripts.script import Script
from tula_cli.spec.signature import compute_measurement_signature, compute_train_signature

OLD = json.loads((Path(__file__).parents[1] / "fixtures" / "old_specs.json").read_text())
"""Jobs as runs of an older version hold them, whole, with the names of their runs, trainings, nodes and resume tests there."""
JOB = "model: {name: resnet18}\ndataset: {name: CIFAR10}\noptimizer: {lr: 0.1}\ntrain: {epochs: 10}\n"
CONTENT = {"model": {"name": "resnet18"}, "dataset": {"name": "CIFAR10"}, "optimizer": {"lr": 0.1}}


def at(spec: JobSpec, path: str) -> Any:
    value: Any = spec
    for part in path.split("."):
        value = getattr(value, part)
    return value


def loaded(tmp_path: Path, text: str, *overrides: str, **more: Any) -> JobSpec:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return load_spec(path, overrides=overrides, **{"environ": {}, "site_files": (), **more})


@pytest.mark.parametrize("name", OLD)
def test_jobs_of_older_runs_are_read_without_a_word_and_have_other_names_in_this_format(name: str) -> None:
    old = OLD[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spec = validate_job(drop_removed_values(old["spec"]), source=name)
    assert compute_measurement_signature(spec) != old["signature"]
    assert compute_train_signature(spec, nodes=2, batch=1024) != old["training"]
    assert validate_job(spec.model_dump(mode="json"), source=name).model_dump() == spec.model_dump()


def test_what_older_runs_say_is_kept_under_the_new_names() -> None:
    train = validate_job(drop_removed_values(OLD["judged"]["spec"]), source="").train
    assert (train.oom_policy, train.best_checkpoint.metric, train.early_stopping and train.early_stopping.patience) == ("shrink", "loss", 5)  # fmt: skip


def test_a_problem_of_a_site_file_or_variable_names_it(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("cluster: {kind: slurm, slurm: {reservation: maintenance}}\nexport: [{to: tensorboard, by: job}]\n")
    with pytest.raises(SpecError) as caught:
        loaded(
            tmp_path, JOB, "search.packing=one", "trian.epochs=2",
            environ={f"{ENV_PREFIX}TRAIN__TF32": "false", f"{ENV_PREFIX}SERCH__NODES": "[2]"}, site_files=[site],
        )  # fmt: skip
    problems = {problem.path: problem.message for problem in caught.value.problems}
    assert problems == {
        "cluster.slurm.reservation": f"this key no longer exists: delete it; the key is set by {site}",
        "export[0].by": f"this key no longer exists: delete it; the key is set by {site}",
        "search.packing": "this key no longer exists: delete it",
        "train.tf32": f"this key no longer exists: delete it; the key is set by {ENV_PREFIX}TRAIN__TF32",
        "serch": f"no such key; the key is set by {ENV_PREFIX}SERCH__NODES",
        "trian": "no such key",
    }


def test_a_renamed_key_is_read_and_reported_wherever_a_user_writes_it(tmp_path: Path) -> None:
    text = JOB.replace("epochs: 10", "epochs: 10, until: {patience: 3}")
    site = tmp_path / "site.yaml"
    site.write_text("train: {oom: shrink}\n")
    variable = f"{ENV_PREFIX}TRAIN__BEST__METRIC"
    with pytest.warns(OldKeyWarning) as caught:
        spec = loaded(tmp_path, text, "train.until.epochs=4", environ={variable: "loss"}, site_files=[site])
    stopping = spec.train.early_stopping
    assert stopping is not None and (stopping.patience, stopping.epochs) == (3, 4)
    assert (spec.train.oom_policy, spec.train.best_checkpoint.metric) == ("shrink", "loss")
    assert sorted(str(each.message).replace(f"{tmp_path}/", "") for each in caught) == [
        "--set: train.until was renamed to train.early_stopping; use the new name (the old one still works)",
        f"{variable}: train.best was renamed to train.best_checkpoint; use the new name (the old one still works)",
        "job.yaml: train.until was renamed to train.early_stopping; use the new name (the old one still works)",
        "site.yaml: train.oom was renamed to train.oom_policy; use the new name (the old one still works)",
    ]


def test_a_renamed_key_of_a_mapping_in_python_is_reported_and_the_mapping_stays() -> None:
    content = {**CONTENT, "train": {"epochs": 3, "oom": "shrink"}}
    with pytest.warns(OldKeyWarning, match=r"the job: train\.oom was renamed to train\.oom_policy"):
        spec = load_job(content)
    assert spec.train.oom_policy == "shrink" and content["train"] == {"epochs": 3, "oom": "shrink"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_job({**CONTENT, "train": {"epochs": 3, "oom_policy": "shrink"}}) == spec


def test_settings_of_a_scheduler_are_read_where_older_files_have_them_and_reported(tmp_path: Path) -> None:
    text = f"{JOB}cluster: {{kind: slurm, slurm: {{partition: gpu, minutes: 60, setup: [module load cuda]}}}}\n"
    types = '{a.b: {cluster: {slurm: {python: "python3 -u"}}}}'
    with pytest.warns(OldKeyWarning) as caught:
        spec = loaded(tmp_path, text, "cluster.slurm.minutes=90", f"node_types={types}")
    assert (spec.cluster.minutes, spec.cluster.setup) == (90, ["module load cuda"])
    assert spec.cluster.slurm is not None and spec.cluster.slurm.partition == "gpu"
    assert spec.select_node_type("a.b").cluster.python == "python3 -u"
    assert {str(each.message).partition(": ")[2].partition(";")[0] for each in caught} == {
        "cluster.slurm.minutes was renamed to cluster.minutes",
        "cluster.slurm.setup was renamed to cluster.setup",
        "node_types.a.b.cluster.slurm.python was renamed to node_types.a.b.cluster.python",
    }
    own = {"options": {"queue": "gpu"}, "minutes": 3, "python": None, "setup": []}
    stored = {"cluster": {"kind": "mine:Queue", "slurm": None, "scheduler": own}}
    cluster = validate_job(drop_removed_values({**CONTENT, "train": {"epochs": 3}, **stored}), source="a run").cluster
    assert (cluster.options, cluster.minutes, cluster.setup) == ({"queue": "gpu"}, 3, [])


def test_later_sources_win_whichever_name_they_use(tmp_path: Path) -> None:
    text = JOB.replace("epochs: 10", "epochs: 10, oom_policy: shrink")
    with pytest.warns(OldKeyWarning):
        assert loaded(tmp_path, text, "train.oom=accumulate").train.oom_policy == "accumulate"


def test_both_names_of_a_key_are_refused(tmp_path: Path) -> None:
    text = JOB.replace("epochs: 10", "epochs: 10, oom_policy: shrink, oom: shrink")
    with pytest.raises(SpecError) as caught:
        loaded(tmp_path, text)
    assert [str(problem) for problem in caught.value.problems] == [
        "train.oom: this key no longer exists: delete it (it was renamed to train.oom_policy, which is also set)"
    ]


def test_every_name_in_the_tables_is_right() -> None:
    spec = validate_job(drop_removed_values(OLD["defaults"]["spec"]), source="")
    for old, new in RENAMED_KEYS.items():
        section, _, name = new.rpartition(".")
        keys = (Script if section == "script" else type(at(spec, section))).model_fields
        assert name in keys and old.startswith(f"{section}.")
        if old.count(".") == 1:
            assert old.rpartition(".")[2] not in keys
    assert all(REMOVED_KEYS.values())


def test_measurements_that_older_runs_switched_on_by_a_key_each_are_left_out_as_no_training_of_theirs_goes_on() -> None:
    train = {"epochs": 3, "diagnostics": True, "hessian": {"samples": 64}, "gradient_noise": False}
    stored = validate_job(drop_removed_values({**CONTENT, "train": train}), source="a run")
    assert stored.train.diagnostics == []


def test_collections_of_python_are_lists_of_measurements() -> None:
    for given in (("hessian",), {"hessian"}, "hessian"):
        assert load_job({**CONTENT, "train": {"epochs": 3, "diagnostics": given}}).train.diagnostics == ["hessian"]


def test_old_keys_of_a_node_type_with_a_dot_in_its_name_have_advice() -> None:
    types = {"a.b": {"search": {"packing": "single"}}}
    with pytest.raises(SpecError) as caught:
        load_job({**CONTENT, "train": {"epochs": 3}, "node_types": types})
    assert "tula measures each number of nodes in a separate job" in str(caught.value.problems)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("ags.exclude", ["norms"]), ("auto.after", 2), ("cluster.slurm.limits", [{"nodes": 2, "hours": 1}]),
        ("cluster.slurm.reservation", "course"), ("pricing.per_node", 64), ("pricing.spot.wait_minutes", 5),
        ("schedule.args", {"half": 10}), ("search.sequence", {"lengths": [64]}), ("train.channels_last", True),
        ("train.fsdp_blocks", ["Block"]), ("train.ramp_noise", 2), ("train.tf32", True), ("search.warmup_steps", 3),
        ("auto.holdout", 0.2), ("schedule.peak", 0.2), ("search.packing", "single"), ("train.cudnn_benchmark", False),
        ("train.ghost_batch", 32), ("train.ramp", [{"samples": 500, "batch": 64}]),
        ("train.hessian", True), ("train.gradient_noise", {"every": 2}),
        ("train.early_stopping", {"at_least": 0.7}), ("train.early_stopping", {"target": 0.7, "metric": "top1"}),
    ],
)  # fmt: skip
def test_a_removed_key_is_refused_with_advice_and_left_out_of_stored_jobs(path: str, value: Any) -> None:
    section, *_, key = path.split(".")
    spot = {"discount": 0.5, "interruptions_per_day": 1}
    content: dict[str, Any] = {**CONTENT, "train": {"epochs": 3, "method": "auto" if section == "auto" else "lbt"}}
    content |= {"pricing": {"price": 2, "spot": spot}, "cluster": {"kind": "slurm", "slurm": {}}}
    place: Any = content
    for part in path.split(".")[:-1]:
        place = place.setdefault(part, {})
    place[key] = value
    with pytest.raises(SpecError) as caught:
        load_job(content)
    assert "this key no longer exists" in str(caught.value.problems)
    validate_job(drop_removed_values(content), source="a run")
