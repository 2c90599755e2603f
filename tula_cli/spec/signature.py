"""Digests of the settings on which measurements and trainings depend: the names of runs and trainings."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tula_cli.spec.ags import BRANCHING_EPOCH, Ags
from tula_cli.spec.job import JobSpec, find_effective_lr_limit, get_default_beta1
from tula_cli.spec.resources import Cluster
from tula_cli.spec.scripts.script import Script
from tula_cli.spec.slurm_options import Slurm
from tula_cli.version import RUN_FORMAT

COMPUTATION_KEYS = {"compile", "deterministic"}
"""Settings of section train that only change the duration of a step or its rounding."""
_REMOVED_KEY_VALUES: Mapping[str, dict[str, Any]] = {
    "train": {"tf32": True, "channels_last": "auto", "fsdp_blocks": "auto"},
    "trained": {"tf32": True, "ramp_noise": None},
    "probe": {"stop": "exit", "environment": {"WANDB_MODE": "disabled"}},
}
"""Values of keys that were removed: signatures contain them, so that earlier runs and trainings keep their names."""


def compute_measurement_signature(spec: JobSpec, code: str = "") -> str:
    """Return 8 hex digits of the settings that a measurement depends on, such as the model but not the price.

    Args:
        code: digest of the user code named by the spec; empty for none.
    """
    cluster = spec.cluster
    parts: dict[str, Any] = _list_loop_fields(spec) if spec.script is None else _list_script_fields(spec, spec.script)
    parts["cluster"] = cluster.model_dump(include={"kind", "gpus_per_node", "device", "memory_per_gpu", "interface"})
    if spec.node_types:  # each type has its own signature, so that adding a type does not change this one
        parts = {**parts, "cluster": None, "node_types": True}
    elif spec.types:  # likewise with several numbers of GPUs per node
        parts["cluster"] |= {"gpus_per_node": "searched"}
    return compute_digest({**parts, "code": code} if code else parts)


def _list_loop_fields(spec: JobSpec) -> dict[str, Any]:
    return {
        "model": spec.model.model_dump(exclude={"weights"}),
        "dataset": spec.dataset.model_dump(exclude={"download", "test"}),
        "transforms": spec.transforms.model_dump(),
        "loss": spec.loss.model_dump(),
        "optimizer": spec.optimizer.model_dump(exclude={"lr", "weight_decay", "beta2_half_life"}),
        "train": _REMOVED_KEY_VALUES["train"] | spec.train.model_dump(
            include={
                "precision", "workers", "accumulate", "max_grad_norm", "activation_checkpointing", "reference_batch", "method",
                "parallel", *COMPUTATION_KEYS,
            }
        ),
        "ags": _list_measured_ags_fields(spec, "b_small"),
    }  # fmt: skip


def _list_script_fields(spec: JobSpec, script: Script) -> dict[str, Any]:
    """Return the settings on which a step of a script depends, which exclude the learning rate and the length."""
    settings = script.model_dump(include={"command", "launch"})
    settings["probe"] = {"args": script.probe_args, **_REMOVED_KEY_VALUES["probe"]}
    parts = {"script": settings, "train": spec.train.model_dump(include={"accumulate", "workers"})}
    return {**parts, "ags": _list_measured_ags_fields(spec)} if spec.effective_ags else parts


def compute_train_signature(spec: JobSpec, *, nodes: int | None, batch: int, code: str = "") -> str:
    """Return 8 hex digits of all settings that change the weights.

    Args:
        nodes: number of nodes; None for a training that runs on any number, with the same weights up to rounding.
        batch: global batch at the start of the run.
        code: digest of the user code named by the spec; empty for none.
    """
    if spec.script is not None:
        return _compute_script_signature(spec, spec.script, {"nodes": nodes, "batch": batch, "code": code})
    parts = spec.model_dump(include={"transforms", "loss", "schedule", "optimizer"})
    parts["model"] = spec.model.model_dump(exclude={"weights"})
    parts["dataset"] = spec.dataset.model_dump(exclude={"download", "test"})
    if (beta1 := get_default_beta1(spec, batch)) is not None:
        parts["optimizer"]["beta1"] = beta1
    parts["schedule"]["warmup_epochs"] = spec.workload.warmup_epochs
    ags = spec.ags if spec.train.training_method.uses_section("ags") else Ags()  # no effect with other methods
    parts["ags"] = {"exclude": (), "norm_ewma": 0.0, **ags.fill_from_preset().model_dump(exclude={"preset"})}
    parts["schedule"]["args"] = {}
    parts["train"] = _REMOVED_KEY_VALUES["trained"] | spec.train.model_dump(
        exclude={
            *("workers", "checkpoint_every", "oom_policy", "max_attempts", "diagnostics"),
            *("metrics", "best_checkpoint"),  # evaluation only, without effect on the weights
            *("early_stopping", "max_lr_factor"),
            *(() if spec.train.is_sharded else ("parallel",)),
            *COMPUTATION_KEYS,  # change results no more than another type of GPU does
        }
    )
    parts["train"]["max_lr_factor"] = _get_lr_limit(spec, batch)
    if (stopping := spec.train.early_stopping) is not None:
        # The metric matters only if a value of it ends the training.
        best = spec.train.best_checkpoint
        metric = {} if stopping.target is None else {"metric": best.metric, "falls": best.is_lower_better}
        parts["train"]["early_stopping"] = stopping.model_dump() | metric
    parts["gpus_per_node"] = spec.cluster.gpus_per_node
    if spec.train.training_method.uses_section("auto"):
        parts["auto"] = {"after": BRANCHING_EPOCH, **spec.auto.model_dump()}
    if code:
        parts["code"] = code
    return compute_digest({**parts, "nodes": nodes, "batch": batch})


def _compute_script_signature(spec: JobSpec, script: Script, where: Mapping[str, Any]) -> str:
    """Return 8 hex digits of all settings of a script that change the weights."""
    settings = script.model_dump(exclude={"probe_args", "metric", "save", "resume"})
    train = spec.train.model_dump(include={"method", "lr_scaling", "accumulate", "seed"})
    train["max_lr_factor"] = _get_lr_limit(spec, where["batch"])
    ags = {"ags": spec.ags.model_dump()} if spec.effective_ags else {}
    return compute_digest(
        {"script": settings, "train": train, **ags, "gpus_per_node": spec.cluster.gpus_per_node, **where}
    )


def compute_resume_test_signature(spec: JobSpec, code: str) -> str:
    """Return 8 hex digits of the settings, and of the code (its digest), that determine how a job's script resumes."""
    script = spec.get_script()
    parts = script.model_dump(include={"command", "launch", "save", "dataset_size"})
    parts["resume"] = script.resume.model_dump(include={"args", "checkpoint"}) if script.resume else None
    train = spec.train.model_dump(include={"method", "lr_scaling", "accumulate"})
    return compute_digest(
        {**parts, "length": sorted(script.length.model_dump(exclude_none=True)), "train": train, "code": code}
    )


def compute_evaluation_signature(spec: JobSpec, weights: Mapping[str, Any], *, code: str) -> str:
    """Return 8 hex digits of the settings that an evaluation depends on, in addition to the training.

    Args:
        weights: values that identify the file of weights.
        code: digest of the user code that the evaluation runs; empty for none.
    """
    test = spec.dataset.test
    settings = {"weights": weights, "test": test and test.model_dump(), "metrics": spec.train.metrics}
    return compute_digest({**settings, "code": code} if code else settings)


def compute_cluster_signature(cluster: Cluster) -> str:
    """Return 8 hex digits of the settings that determine which nodes a job gets, and which of their resources.

    Time limits and excluded nodes are left out, because they do not change the kind of nodes.
    """
    settings = cluster.model_dump(mode="json", exclude={"minutes", "slurm"})
    options = (cluster.slurm or Slurm()).model_dump(mode="json", exclude={"exclude"})
    # Form of earlier versions, so that the signature of nodes does not change.
    options |= {"reservation": None, **{name: settings.pop(name) for name in ("python", "setup")}}
    if not settings["options"]:
        del settings["options"]
    return compute_digest({**settings, "slurm": options})


def _get_lr_limit(spec: JobSpec, batch: int) -> float | None:
    """Return the learning-rate limit if given or effective at this batch, else None."""
    given = spec.train.max_lr_factor
    return given if isinstance(given, float) else find_effective_lr_limit(spec, batch)


def _list_measured_ags_fields(spec: JobSpec, *more: str) -> dict[str, Any]:
    """Return the settings of section ags on which the duration and memory of a step depend, and `more` of them."""
    ags = spec.ags.fill_from_preset()
    fields = {"granularity", "source", "apply_to", *more, *(["refresh"] if ags.refreshes_each_step else [])}
    return ags.model_dump(include=fields)


def compute_digest(parts: Mapping[str, Any]) -> str:
    """Return 8 hex digits of a hash over named values and the format of runs, so that the names of runs differ between formats."""
    text = json.dumps({**parts, "format": RUN_FORMAT}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
