"""Digests of the settings on which measurements and trainings depend: the names of runs and trainings."""

import hashlib
import json
from collections.abc import Mapping, Set
from typing import Any

from tula_cli.spec.ags import Ags, ResolvedAgs
from tula_cli.spec.job import JobSpec, find_effective_lr_limit, get_default_beta1, get_warmup_epochs
from tula_cli.spec.resources import Cluster
from tula_cli.spec.scripts.script import Script
from tula_cli.spec.sections import BestCheckpoint, EarlyStopping, RampStage, Train
from tula_cli.spec.slurm_options import Slurm

LATER = ("collate_fn", "sampler", "length", "eval_length", "sharded")
"""Keys of section dataset that digests leave out at their default value."""

COMPUTING = {"tf32", "channels_last", "compile", "deterministic"}
"""Settings of section train that only change the duration of a step or its rounding."""

REMOVED_FROM_AGS: dict[str, Any] = {"consensus": "broadcast"}
REMOVED_FROM_ARMS: dict[str, Any] = {"warmup_epochs": 0.0, "ags": None}
REMOVED_FROM_AUTO: dict[str, Any] = {"holdout": 0.1}
REMOVED_FROM_STAGES: dict[str, Any] = {"samples": None}
REMOVED_FROM_TRAIN: dict[str, Any] = {"ghost_batch": None}
"""Removed keys with the values that tula now always uses.

Digests include them, so that older runs keep their names.
"""


def compute_measurement_signature(spec: JobSpec, code: str = "") -> str:
    """Return 8 hex digits of the settings that a measurement depends on, such as the model but not the price.

    Args:
        spec: the job.
        code: digest of the user code named by the spec; empty for none.
    """
    cluster = spec.cluster
    parts: dict[str, Any] = _list_loop_fields(spec) if spec.script is None else _list_script_fields(spec, spec.script)
    parts["cluster"] = cluster.model_dump(include={"kind", "gpus_per_node", "device", "memory_per_gpu", "interface"})
    if spec.node_types:  # where it runs is told by each type's own signature; a type more keeps the run
        parts = {**parts, "cluster": None, "node_types": True}
    elif spec.types:  # so are numbers of GPUs
        parts["cluster"] |= {"gpus_per_node": "searched"}
    return compute_digest({**parts, "code": code} if code else parts)


def _list_loop_fields(spec: JobSpec) -> dict[str, Any]:
    train = spec.train
    return {
        "model": _list_model_fields(spec),
        "dataset": _list_dataset_fields(spec),
        "transforms": spec.transforms.model_dump(),
        "loss": spec.loss.model_dump(),
        "optimizer": _list_optimizer_fields(spec, {"lr", "weight_decay", "beta2_half_life"}),
        "train": train.model_dump(
            include={
                "precision", "workers", "accumulate", "max_grad_norm", "activation_checkpointing", "reference_batch", "method",
            }
        ) | REMOVED_FROM_TRAIN | _list_computing_fields(train) | train.model_dump(include={"parallel", "fsdp_blocks"}, exclude_defaults=True),
        "ags": _list_ags_fields(spec.ags, {"granularity", "b_small", "source", "apply_to", *_list_refresh_fields(spec)}),
    }  # fmt: skip


def _list_script_fields(spec: JobSpec, script: Script) -> dict[str, Any]:
    """Return the settings on which a step of a script depends, which exclude the learning rate and the length."""
    settings = script.model_dump(include={"command", "launch", "samples", "probe"})
    parts = {"script": settings, "train": spec.train.model_dump(include={"accumulate", "workers"})}
    scaled = {"granularity", "source", "apply_to", *_list_refresh_fields(spec)}
    return {**parts, "ags": _list_ags_fields(spec.ags, scaled)} if spec.train.training_method.scales else parts


def compute_train_signature(spec: JobSpec, *, nodes: int, batch: int, code: str = "") -> str:
    """Return 8 hex digits of all settings that change the weights.

    Args:
        spec: the job.
        nodes: number of nodes.
        batch: global batch at the start of the run.
        code: digest of the user code named by the spec; empty for none.
    """
    if spec.script is not None:
        return _compute_script_signature(spec, spec.script, {"nodes": nodes, "batch": batch, "code": code})
    parts = spec.model_dump(
        include={"transforms", "loss"},
    )
    parts["model"], parts["optimizer"] = _list_model_fields(spec), _list_optimizer_fields(spec)
    if (beta1 := get_default_beta1(spec, batch)) is not None:
        parts["optimizer"]["beta1"] = beta1
    new = {"args", "decay_from"}
    later = spec.schedule.model_dump(include=new, exclude_defaults=True)
    parts["schedule"] = spec.schedule.model_dump(exclude=new) | later
    parts["dataset"] = _list_dataset_fields(spec)
    acts = spec.ags if spec.train.training_method.reads("ags") else Ags()  # to others the section means nothing
    parts["ags"] = _list_ags_fields(acts, set(ResolvedAgs.model_fields) - {"preset"})
    parts["train"] = (
        spec.train.model_dump(
            exclude={
                *("workers", "checkpoint_every", "oom_policy", "max_attempts", "diagnostics"),
                *("metrics", "best_checkpoint"),  # they tell of the weights and change none
                "early_stopping",
                *(name for name in ("ramp", "ramp_noise") if getattr(spec.train, name) is None),
                "max_lr_factor",
                *(() if spec.train.ramp_nodes != "same" else ("ramp_nodes",)),
                *(() if spec.train.sharded else ("parallel",)),
                "fsdp_blocks",
                *COMPUTING,  # but for tf32 they change what is learned no more than another GPU does
            }
        )
        | REMOVED_FROM_TRAIN
        | _list_computing_fields(spec.train, {"tf32"})
        | _list_lr_limit(spec, batch)
    )
    if (stopping := spec.train.early_stopping) is not None:  # `until` was its name
        parts["train"]["until"] = _list_stopping_fields(stopping, spec.train.best_checkpoint)
    if isinstance(spec.train.ramp, list):
        parts["train"]["ramp"] = [
            REMOVED_FROM_STAGES | stage.model_dump(exclude=_without_nodes(stage)) for stage in spec.train.ramp
        ]
    parts["schedule"]["warmup_epochs"] = get_warmup_epochs(spec)
    parts["gpus_per_node"] = spec.cluster.gpus_per_node
    if spec.train.training_method.tunes:
        branches = {"epochs": spec.auto.branch_epochs, **REMOVED_FROM_AUTO}
        parts["auto"] = spec.auto.model_dump(exclude={"arms", "branch_epochs"}) | branches
        parts["auto"]["arms"] = [arm.model_dump() | REMOVED_FROM_ARMS for arm in spec.auto.arms]
    if code:
        parts["code"] = code
    return compute_digest({**parts, "nodes": nodes, "batch": batch})


def _list_stopping_fields(stopping: EarlyStopping, best: BestCheckpoint) -> dict[str, Any]:
    """Return the conditions for the end of a training, under the keys of older versions."""
    target, bound = stopping.target, "at_most" if best.falls else "at_least"
    has_metric = target is not None  # only then does a metric end it
    fields = {
        "metric": best.metric if has_metric else "auto",
        "at_least": None,
        "at_most": None,
        "patience": stopping.patience,
        bound: target,
    }
    return fields if stopping.epochs is None else {**fields, "epochs": stopping.epochs}


def _without_nodes(stage: RampStage) -> set[str]:
    """Return the keys added to stages later, if they have no value."""
    return {"nodes"} if stage.nodes is None else set()


def _compute_script_signature(spec: JobSpec, script: Script, where: Mapping[str, Any]) -> str:
    """Return 8 hex digits of all settings of a script that change the weights."""
    settings = script.model_dump(exclude={"probe", "metric", "save", "samples", "resume"})
    train = spec.train.model_dump(include={"method", "lr_scaling", "accumulate", "seed"})
    train |= _list_lr_limit(spec, where["batch"])
    ags = {}
    if spec.train.training_method.scales:
        removed = {**dict.fromkeys(("s_min", "eps", "norm_ewma", "scale_ema")), **REMOVED_FROM_AGS}
        ags["ags"] = spec.ags.model_dump(exclude={"exclude", *_list_later_ags_fields(spec.ags)}) | removed
    return compute_digest(
        {"script": settings, "train": train, **ags, "gpus_per_node": spec.cluster.gpus_per_node, **where}
    )


def compute_rehearsal_signature(spec: JobSpec, code: str) -> str:
    """Return 8 hex digits of the settings that determine how a script resumes.

    Args:
        spec: the job, with a script.
        code: digest of the script's code.
    """
    assert spec.script is not None
    parts = spec.script.model_dump(include={"command", "launch", "save", "dataset_size"})
    parts["resume"] = spec.script.resume.model_dump(include={"args", "checkpoint"}) if spec.script.resume else None
    train = spec.train.model_dump(include={"method", "lr_scaling", "accumulate"})
    return compute_digest(
        {**parts, "length": sorted(spec.script.length.model_dump(exclude_none=True)), "train": train, "code": code}
    )


def compute_evaluation_signature(spec: JobSpec, weights: Mapping[str, Any], *, code: str = "") -> str:
    """Return 8 hex digits of the settings that an evaluation depends on, in addition to the training.

    Args:
        spec: the job.
        weights: values that identify the file of weights.
        code: digest of the user code that the evaluation runs; empty for none.
    """
    test = spec.dataset.test
    settings = {"weights": weights, "test": test and test.model_dump(), "metrics": spec.train.metrics}
    return compute_digest({**settings, "code": code} if code else settings)


def compute_cluster_signature(cluster: Cluster) -> str:
    """Return 8 hex digits of the settings that determine which nodes a job gets, and what it gets of them.

    Time limits and excluded nodes are left out, because they do not change the kind of nodes.
    """
    options = (cluster.slurm or Slurm()).model_dump(mode="json", exclude={"minutes", "exclude", "limits"})
    scheduler = (
        {}
        if cluster.scheduler is None
        else {"scheduler": cluster.scheduler.model_dump(mode="json", exclude={"minutes"})}
    )
    return compute_digest({**cluster.model_dump(mode="json", exclude={"scheduler"}), "slurm": options, **scheduler})


def _list_dataset_fields(spec: JobSpec) -> dict[str, Any]:
    """Return the settings of the dataset; later keys are included only if given, to keep the names of older runs."""
    later = {key for key in LATER if getattr(spec.dataset, key) == type(spec.dataset).model_fields[key].default}
    return spec.dataset.model_dump(exclude={"download", "test", *later})


def _list_model_fields(spec: JobSpec) -> dict[str, Any]:
    """Return the settings of the model without its weights file; later keys are included only if given."""
    settings = spec.model.model_dump(exclude={"weights", "strict", "frozen"})
    return settings | spec.model.model_dump(include={"strict", "frozen"}, exclude_defaults=True)


def _list_optimizer_fields(spec: JobSpec, without: Set[str] = frozenset()) -> dict[str, Any]:
    """Return the settings of the optimizer; later keys are included only if given, to keep the names of older runs."""
    later = {"groups": spec.optimizer.groups, "beta2_half_life": spec.optimizer.beta2_half_life}
    return spec.optimizer.model_dump(exclude={*without, *(name for name, given in later.items() if not given)})


def _list_computing_fields(train: Train, names: Set[str] = COMPUTING) -> dict[str, Any]:
    """Return the settings among `names` that are not at their default."""
    return train.model_dump(include=set(names), exclude_defaults=True)


def _list_lr_limit(spec: JobSpec, batch: int) -> dict[str, float | None]:
    """Return the learning-rate limit if given or effective at this batch, so that other runs keep their names."""
    given = spec.train.max_lr_factor
    limit = given if isinstance(given, float) else find_effective_lr_limit(spec, batch)
    return {} if limit is None else {"max_lr_factor": limit}


def _list_refresh_fields(spec: JobSpec) -> set[str]:
    """Return {"refresh"} if AGS refreshes in every step and so changes its duration, else an empty set."""
    return {"refresh"} if spec.ags.resolved().each_step else set()


def _list_ags_fields(ags: Ags, names: set[str]) -> dict[str, Any]:
    """Return settings of section ags; later keys are included only if given, so that older runs keep their names."""
    return ags.resolved().model_dump(include=names - _list_later_ags_fields(ags)) | REMOVED_FROM_AGS


def _list_later_ags_fields(ags: Ags) -> set[str]:
    """Return the keys added to section ags later that are at their default."""
    given = {"exclude": bool(ags.exclude), "parameters": ags.parameters != "auto"}
    return {name for name, counts in given.items() if not counts}


def compute_digest(parts: Mapping[str, Any]) -> str:
    """Return 8 hex digits of a hash over named values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:8]
