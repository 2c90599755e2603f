"""Section `cluster.slurm`, and the options of sbatch and srun that it rejects."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ValidationError, WithJsonSchema, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from tula_cli.spec.kinds import (
    OneLineText,
    Positive,
    Section,
    convert_to_typed_text,
    require_not_empty,
    require_one_line,
)
from tula_cli.spec.scripts.placeholders import RANK_VARIABLES

_SBATCH_SETTINGS = {
    "job-name": "name (the name of the job)",
    "nodes": "search.nodes",
    "ntasks": "cluster.gpus_per_node",
    "ntasks-per-node": "cluster.gpus_per_node",
    "tasks-per-node": "cluster.gpus_per_node",
    "ntasks-per-gpu": "cluster.gpus_per_node",
    "time": "cluster.minutes (training jobs) or search.max_minutes (profiling jobs)",
    "partition": "cluster.slurm.partition",
    "account": "cluster.slurm.account",
    "qos": "cluster.slurm.qos",
    "constraint": "cluster.slurm.constraint",
    "exclude": "cluster.slurm.exclude",
    "exclusive": "cluster.slurm.exclusive",
    "mem": "cluster.slurm.memory",
    "cpus-per-task": "cluster.slurm.cpus_per_task",
}
"""Options of sbatch that have a separate setting."""
_RESERVED_SBATCH_OPTIONS = frozenset({
    "array", "dependency", "error", "no-requeue", "open-mode", "output", "parsable", "quiet", "requeue", "signal",
    "test-only", "wait", "wrap",
})  # fmt: skip
_RESERVED_SRUN_OPTIONS = frozenset(
    {"error", "kill-on-bad-exit", "output", "unbuffered", "ntasks", "ntasks-per-node", "nodes"}
)
_GPU_OPTIONS = frozenset({"gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "tres-per-task"})
_RESERVED_VARIABLES = RANK_VARIABLES | {"SUBMITIT_EXECUTOR", "TULA_WRAPPER"}


def normalize_option_name(name: str) -> str:
    """Return an option of sbatch or srun as spelled on a command line, without leading dashes."""
    return name.replace("_", "-")


def _check_option_name(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_-]+", name):
        raise ValueError(f"must be the long name of an option, such as mail-type for --mail-type, got {name!r}")
    return name


def _check_sbatch_option(name: str) -> str:
    option = normalize_option_name(_check_option_name(name))
    if setting := _SBATCH_SETTINGS.get(option):
        raise ValueError(f"remove this option, and set {setting}")
    if option in _RESERVED_SBATCH_OPTIONS:
        raise ValueError("tula sets this itself; remove the key")
    if option == "clusters":
        raise ValueError(
            f"{name!r} selects another cluster than the one that tula queries; remove the key, and run tula on a login node of that cluster"
        )
    return name


def _check_srun_option(name: str) -> str:
    option = normalize_option_name(_check_option_name(name))
    if option == "cpus-per-task":
        raise ValueError("remove this option, and set cluster.slurm.cpus_per_task")
    if option in _RESERVED_SRUN_OPTIONS:
        raise ValueError("tula sets this itself; remove the key")
    return name


def _check_slurm_memory(value: str) -> str:
    if value and not re.fullmatch(r"\d+[KMGT]?B?", value.upper()):
        raise ValueError(f"must be a size such as 64G, or 0 for all memory of a node, got {value!r}")
    return value


def _check_gpu_type(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]*", value):
        raise ValueError(f"must be a type of GPU, such as a100 in gpu:a100:4, got {value!r}")
    return value


def _check_variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(
            f"must be the name of an environment variable: letters, digits and '_', not starting with a digit, got {name!r}"
        )
    if name in _RESERVED_VARIABLES:
        raise ValueError("tula sets this itself; remove the key")
    return name


def _check_option_value(value: object) -> object:
    if isinstance(value, list):
        return [_check_option_value(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int | float | str):
        raise ValueError(
            f"must be text, a number, a list of text and numbers, true (option without value) or false (no option), got {value!r}"
        )
    return require_one_line(str(convert_to_typed_text(value)))


_WRITTEN_MEMORY = WithJsonSchema(
    {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^([0-9]+[KMGTkmgt]?[Bb]?)?$"}]}
)
_WRITTEN_OPTION = {
    "type": ["boolean", "number", "string", "array", "null"],
    "items": {"type": ["string", "number"]},
}
OptionValue = Annotated[
    bool | str | list[str] | None, BeforeValidator(_check_option_value), WithJsonSchema(_WRITTEN_OPTION)
]
"""True is the bare option; False, None, "" and [] omit the option; a list is joined by commas."""
_OMITTED_VALUES: tuple[object, ...] = (False, None, "", [])


EXTRA_MINUTES = 2
"""Additional minutes requested from SLURM, so that the supervisor can stop the job first and record the reason."""
MAX_CHAINED_JOBS = 50
"""Maximum jobs of one chain, as queues limit the jobs of a user; the same command resumes after the last one."""
SPARE_CHAINED_JOBS = 2
"""Jobs of a chain beyond the predicted number, for preemptions, lost nodes and slow hardware."""


class Slurm(Section):
    """Options of sbatch and srun; an option that is null is not passed."""

    # srun: one task of SLURM per GPU; torchrun: one task per node, which starts the ranks of the node
    launcher: Literal["srun", "torchrun"] = "srun"
    partition: OneLineText | None = None  # sbatch --partition
    account: OneLineText | None = None  # sbatch --account
    qos: OneLineText | None = None  # sbatch --qos
    constraint: OneLineText | None = None  # sbatch --constraint
    exclude: OneLineText | None = None  # sbatch --exclude
    # Memory per node, as in sbatch --mem; 0: all memory of the node
    memory: Annotated[OneLineText, AfterValidator(_check_slurm_memory), _WRITTEN_MEMORY] | None = None
    cpus_per_task: Positive | None = None  # CPU cores per rank, with either launcher
    # Option that requests the GPUs; none: no GPUs are requested
    gpus: Literal["gpus_per_node", "gres", "gpus_per_task", "none"] = "gpus_per_node"
    # Type of GPU to request, as the site names it, for example a100
    gpu_type: Annotated[OneLineText, AfterValidator(_check_gpu_type)] | None = None
    exclusive: bool = True  # Request whole nodes; on shared nodes other jobs distort the step times
    # Further options of sbatch by their long names. true: an option without a value; false: the option is omitted
    extra: dict[Annotated[str, AfterValidator(_check_sbatch_option)], OptionValue] = {}
    # Further options of srun, in the form of cluster.slurm.extra
    srun_extra: dict[Annotated[str, AfterValidator(_check_srun_option)], OptionValue] = {}
    # Environment variables, which are exported after cluster.setup. A variable that is null is not exported.
    environment: dict[Annotated[str, AfterValidator(_check_variable)], str | None] = {}
    # Words put before the command of every rank, or the path of a script that runs this command; null: slurm-wrapper.sh
    # of the user or the site
    wrapper: list[Annotated[OneLineText, AfterValidator(require_not_empty)]] | OneLineText | None = None

    @model_validator(mode="after")
    def _check_settings(self) -> "Slurm":
        problems = [*_list_gpu_problems(self), *_list_option_problems(self)]
        if problems:  # reported together, each with its path
            details = [
                InitErrorDetails(type=PydanticCustomError("value_error", "{why}", {"why": why}), loc=path, input=None)
                for path, why in problems
            ]
            raise ValidationError.from_exception_data("Slurm", details)
        return self


_OptionProblems = Iterator[tuple[tuple[str, ...], str]]


def _list_gpu_problems(slurm: Slurm) -> _OptionProblems:
    if slurm.launcher == "torchrun" and slurm.gpus == "gpus_per_task":
        yield (
            ("gpus",),
            "gpus_per_task requests GPUs for each task, but cluster.slurm.launcher: torchrun starts one task per node; set gpus_per_node or gres",
        )
    if slurm.gpus == "none":
        if slurm.gpu_type:
            yield (
                ("gpu_type",),
                f"{slurm.gpu_type!r} has no effect with cluster.slurm.gpus: none; remove cluster.slurm.gpu_type, or set cluster.slurm.gpus: gpus_per_node",
            )
        return
    for name, value in slurm.extra.items():
        option = normalize_option_name(name)
        # gres may request other resources than GPUs, for which there is no other key.
        requests_gpus = option in _GPU_OPTIONS and (option != "gres" or "gpu" in str(value))
        if requests_gpus and value not in (*_OMITTED_VALUES, "0"):
            yield (
                ("extra", name),
                "requests GPUs in addition to cluster.slurm.gpus; remove the option and set cluster.slurm.gpus and cluster.slurm.gpu_type, or set cluster.slurm.gpus: none",
            )


def _list_option_problems(slurm: Slurm) -> _OptionProblems:
    given = [normalize_option_name(name) for name, value in slurm.extra.items() if value]
    for name in ("mem-per-cpu", "mem-per-gpu"):
        if name in given and slurm.memory:
            yield (
                ("extra", name),
                f"cannot be combined with cluster.slurm.memory ({slurm.memory}); remove one of the two",
            )
    if "cpus-per-gpu" in given and slurm.cpus_per_task:
        yield (
            ("extra", "cpus-per-gpu"),
            f"cannot be combined with cluster.slurm.cpus_per_task ({slurm.cpus_per_task}); remove one of the two",
        )
    for name in sorted({name for name in given if given.count(name) > 1}):
        yield ("extra", name), "is given twice, with '-' and with '_'; remove one of the two"
