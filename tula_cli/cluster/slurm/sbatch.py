"""The options of sbatch and srun for a job."""

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tula_cli.assets import find_site_asset
from tula_cli.cluster import messages
from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import SpecError
from tula_cli.run import package
from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import Task
from tula_cli.spec.job import JobSpec
from tula_cli.spec.resources import Cluster
from tula_cli.spec.sections import MIN_AUTO_WORKERS
from tula_cli.spec.signature import compute_cluster_signature
from tula_cli.spec.slurm_options import Slurm, normalize_option_name
from tula_cli.spec.yaml_text import read_text_file

SETUP, WRAPPER = "slurm-setup.sh", "slurm-wrapper.sh"
"""Files of the user or the site that are used if the spec gives none."""
_UNSET_BINDINGS_LINES = (
    "# If tula was started in a job, the CPU binding of that job would pin all ranks of this job to the same cores.",
    "unset SLURM_CPU_BIND SLURM_CPU_BIND_LIST SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_VERBOSE",
    "unset SLURM_MEM_BIND SLURM_MEM_BIND_LIST SLURM_MEM_BIND_TYPE SLURM_MEM_BIND_VERBOSE",
    "# Since SLURM 22.05, srun does not inherit --cpus-per-task from sbatch.",
    'if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi',
    "# With `extra: {export: NONE}`, srun would not pass the environment of the set-up to the ranks.",
    "export SLURM_EXPORT_ENV=ALL",
)
"""The first lines of the script of every job."""
FAULT_SECONDS = 86400.0
"""Seconds for which a faulty node is excluded; by then it is presumably repaired or drained."""
_SIGNAL_SECONDS = 90  # seconds before its time limit at which a job is signalled; fewer for short jobs
_DEFAULTED_OPTIONS = ("partition", "account", "qos", "constraint")  # by environment variables of sbatch
_WRAPPER = "TULA_WRAPPER"
_WRAPPER_END = "END_OF_TULA_WRAPPER"


def make_submitit_parameters(
    run: RunDir, task: Task, *, name: str | None = None, dependency: str | None = None
) -> dict[str, Any]:
    """Return the parameters of submitit for a job.

    Args:
        name: name of the job; default: "tula-<run>-<job>".
        dependency: dependency in the format of sbatch, e.g. "afterany:4711".

    Raises:
        SpecError: a file that the spec names cannot be read.
    """
    slurm = get_slurm_section(task.spec)
    minutes = task.time_limit_minutes
    options = {key: value for key in _DEFAULTED_OPTIONS if (value := getattr(slurm, key))}
    if nodes := make_excluded_nodes_option(run, task):
        options["exclude"] = nodes
    if dependency:
        options["dependency"] = dependency
    return {
        **options,
        **_make_size_options(task, slurm),
        "job_name": name or f"tula-{run.id}-{task.job}",
        "time": minutes,
        "signal_delay_s": min(_SIGNAL_SECONDS, minutes * 60 // 4),
        "exclusive": True if slurm.exclusive else None,
        "wckey": None,
        "setup": [
            *_make_granted_nodes_lines(task, run.submitit_dir.absolute()),
            *_make_setup_lines(task, slurm),
            *package.make_package_path_lines(run.path),
        ],
        "srun_args": [*_list_srun_options(task, slurm), *_make_single_log_options(run, task)],
        "additional_parameters": _list_extra_options(task, slurm),
    }


def make_excluded_nodes_option(run: RunDir, task: Task, *, also: str = "") -> str:
    """Return the nodes excluded for a job: those of the spec, and those with a device fault in the last FAULT_SECONDS.

    Faults of jobs with another cluster section are ignored, as those jobs request other GPUs of a node.

    Args:
        also: a faulty node that is not recorded yet.
    """
    since, section = time.time() - FAULT_SECONDS, compute_cluster_signature(task.spec.cluster)
    recent = [attempt for attempt in run.read_attempts_of_task(task) if attempt.started_at > since]
    faulty = [attempt.host for attempt in recent if attempt.outcome == "device_fault" and attempt.cluster == section]
    return ",".join(dict.fromkeys(filter(None, [get_slurm_section(task.spec).exclude, *faulty, also])))


def get_wrapper_arguments(spec: JobSpec, *, environ: Mapping[str, str]) -> list[str]:
    """Return the wrapper before a rank's command: that of the spec, or one that runs the script submitted with the job.

    Args:
        environ: environment of the job, which contains the script as it was at submission.
    """
    words, script = get_slurm_section(spec).wrapper, environ.get(_WRAPPER)
    if isinstance(words, list):
        return words
    return ["bash", "-c", script, "tula-wrapper"] if script else []


def warn_too_few_cpus(spec: JobSpec) -> list[Diagnostic]:
    """Return a warning if the CPUs per task are too few for a rank and its data-loader processes, or are not set."""
    slurm = spec.cluster.slurm_options
    if not spec.workload.takes_workers:
        return []  # a script chooses its loader processes itself
    workers = MIN_AUTO_WORKERS if spec.train.workers == "auto" else spec.train.workers
    needed = workers + 1
    if slurm is None or (slurm.cpus_per_task or 0) >= needed or needed == 1:
        return []
    if slurm.cpus_per_task is not None:
        return [messages.too_few_cpus_per_task(cpus_per_task=slurm.cpus_per_task, workers=workers)]
    if "cpus-per-gpu" in slurm.extra:
        return []
    if spec.train.workers == "auto":
        return [messages.cpus_per_task_not_set(workers=None, needed=None)]
    return [messages.cpus_per_task_not_set(workers=workers, needed=needed)]


def get_slurm_section(spec: JobSpec) -> Slurm:
    """Return the options of sbatch and srun of a job; their defaults if section slurm is missing."""
    return spec.cluster.slurm or Slurm()


def _make_size_options(task: Task, slurm: Slurm) -> dict[str, Any]:
    """Return the options for nodes, tasks, CPUs and GPUs; GPUs in one form only, as SLURM 24.11 refuses two."""
    ranks = task.spec.cluster.gpus_per_node
    size: dict[str, Any] = {"nodes": task.nodes, "ntasks_per_node": _count_tasks_per_node(task)}
    if len(task.node_counts) > 1:  # with a number of tasks, SLURM would grant only the minimum of nodes
        size = {"nodes": f"{task.node_counts[0]}-{task.node_counts[-1]}"}
    if cpus := _count_cpus_per_task(task, slurm):
        size["cpus_per_task"] = cpus
    kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
    if task.spec.cluster.device == "cpu" or slurm.gpus == "none":
        return size
    match slurm.gpus:
        case "gpus_per_node":
            return {**size, "gpus_per_node": f"{kind}{ranks}"}
        case "gpus_per_task":
            return {**size, "gpus_per_task": f"{kind}1"}
        case "gres":
            gres = [
                _format_option(value)
                for key, value in slurm.extra.items()
                if normalize_option_name(key) == "gres" and value
            ]
            return {**size, "gres": ",".join([f"gpu:{kind}{ranks}", *gres])}


def _count_tasks_per_node(task: Task) -> int:
    return 1 if task.spec.starts_one_task_per_node else task.spec.cluster.gpus_per_node


def _count_cpus_per_task(task: Task, slurm: Slurm) -> int | None:
    """Return the CPUs of one SLURM task, which may contain all ranks of a node."""
    if slurm.cpus_per_task is None:
        return None
    return slurm.cpus_per_task * (task.spec.cluster.gpus_per_node if task.spec.starts_one_task_per_node else 1)


def _list_extra_options(task: Task, slurm: Slurm) -> dict[str, Any]:
    """Return the options of sbatch that submitit has no name for."""
    # tula relaunches by itself; a requeue by SLURM would start the job twice.
    options: dict[str, Any] = {"no-requeue": True}
    if slurm.memory:
        options["mem"] = slurm.memory
    if len(task.node_counts) > 1:
        options["mincpus"] = _count_tasks_per_node(task) * (_count_cpus_per_task(task, slurm) or 1)
    extra = _format_options(slurm.extra)
    if "gres" in _make_size_options(task, slurm):
        extra.pop("gres", None)  # the GPUs are included in it
    return {**options, **extra}


def _format_options(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with normalised names; those that are false, None or empty are left out."""
    return {
        normalize_option_name(name): True if value is True else _format_option(value)
        for name, value in extra.items()
        if value is not False and value not in (None, "", [])
    }


def _format_option(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


def _list_srun_options(task: Task, slurm: Slurm) -> list[str]:
    """Return the command-line options of srun."""
    # When a rank dies, the others must not wait in a collective.
    options: dict[str, Any] = {"kill-on-bad-exit": 1}
    if cpus := _count_cpus_per_task(task, slurm):
        options["cpus-per-task"] = cpus  # srun of SLURM 22.05 and later does not inherit it from sbatch
    if ":" in _make_size_options(task, slurm).get("gpus_per_task", ""):
        options["gpu-bind"] = "per_task:1"  # the default, but srun of 22.05 hides all GPUs if they have a type
    options |= _format_options(slurm.srun_extra)
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]


def _make_single_log_options(run: RunDir, task: Task) -> list[str]:
    """Return srun options that send the output of all supervisors to two files, not two per supervisor as in submitit."""
    if task.has_log_per_supervisor:
        return []
    folder = run.submitit_dir.absolute()
    return [f"--output={folder}/%j_0_log.out", f"--error={folder}/%j_0_log.err"]


def _make_granted_nodes_lines(task: Task, folder: Path) -> list[str]:
    """Return the shell lines that adapt a job which requested a range of nodes to the nodes that it was granted.

    SLURM grants any number within the range; 22.05 knows no lists. Nodes that the batch does not divide among go back to
    the cluster. If the site forbids that, they are idle.
    """
    if len(task.node_counts) == 1:
        return []
    counts = " ".join(map(str, reversed(task.node_counts)))
    resized = f'{shlex.quote(str(folder))}/slurm_job_"$SLURM_JOB_ID"_resize'
    tasks = _count_tasks_per_node(task)
    return [
        "# Release the nodes that the batch cannot use.",
        f'for tula_nodes in {counts}; do [ "$tula_nodes" -gt "$SLURM_JOB_NUM_NODES" ] || break; done',
        'if [ "$tula_nodes" -lt "$SLURM_JOB_NUM_NODES" ]; then',
        f'  (cd {shlex.quote(str(folder))} && scontrol update JobId="$SLURM_JOB_ID" NumNodes="$tula_nodes") && . {resized}.sh',
        f"  rm -f {resized}.sh {resized}.csh",
        "fi",
        f'export SLURM_NTASKS_PER_NODE={tasks} SLURM_NTASKS="$((SLURM_JOB_NUM_NODES * {tasks}))"',
    ]


def _make_setup_lines(task: Task, slurm: Slurm) -> list[str]:
    """Return the shell lines before the job, read now, so that later changes of files do not affect the job."""
    workdir = Path(task.workdir)
    wrapper_lines = _read_wrapper_lines(slurm, workdir)
    return [
        *_UNSET_BINDINGS_LINES,
        *read_setup_lines(task.spec.cluster, workdir),
        # After the set-up, so that modules do not override them.
        *(f"export {name}={shlex.quote(value)}" for name, value in slurm.environment.items() if value is not None),
        *(_make_wrapper_lines(wrapper_lines) if wrapper_lines else []),
    ]


def read_setup_lines(cluster: Cluster, workdir: Path) -> list[str]:
    """Return the set-up lines of a job: from its spec, or else from the file of the spec, the user or the site.

    Raises:
        SpecError: the file cannot be read.
    """
    if isinstance(cluster.setup, list):
        return ["# cluster.setup", *cluster.setup] if cluster.setup else []
    return _read_lines_of_file(SETUP, cluster.setup, setting="cluster.setup", workdir=workdir)


def _read_wrapper_lines(slurm: Slurm, workdir: Path) -> list[str]:
    if isinstance(slurm.wrapper, list):
        return []
    return _read_lines_of_file(WRAPPER, slurm.wrapper, setting="cluster.slurm.wrapper", workdir=workdir)


def check_setup_files(cluster: Cluster, workdir: Path) -> None:
    """Check that the files of `cluster.setup` and `cluster.slurm.wrapper` can be read, before a job is submitted to SLURM.

    Raises:
        SpecError: a file cannot be read.
    """
    if cluster.slurm_options is not None:
        read_setup_lines(cluster, workdir)
        _read_wrapper_lines(cluster.slurm_options, workdir)


def _make_wrapper_lines(lines: Sequence[str]) -> list[str]:
    """Return lines that pass the wrapper's text to the supervisors in an environment variable, which srun hands on."""
    return [f"IFS= read -r -d '' {_WRAPPER} <<'{_WRAPPER_END}' || true", *lines, _WRAPPER_END, f"export {_WRAPPER}"]


def _read_lines_of_file(name: str, given: str | None, *, setting: str, workdir: Path) -> list[str]:
    """Return the lines of the file that the spec names, else of that of the user or the site, if there is one.

    Args:
        name: name of the file of the user or the site.
        given: path from the spec; None: use the file of the user or the site.

    Raises:
        SpecError: the file cannot be read.
    """
    path = find_site_asset(name) if given is None else workdir / Path(given).expanduser()
    if path is None:
        return []
    try:
        return [f"# {path}", *read_text_file(path).splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        hint = f"set {setting} to a list of shell lines, or to the path of a file with them; [] runs none"
        raise SpecError(f"{setting}: cannot read {path}: {reason}", hint) from None


def fill_environment_defaults(spec: JobSpec) -> JobSpec:
    """Return a job with its unset options filled from sbatch's environment variables (e.g. SBATCH_ACCOUNT)."""
    slurm = spec.cluster.slurm_options
    if slurm is None:
        return spec
    values = {
        name: value
        for name in _DEFAULTED_OPTIONS
        if not getattr(slurm, name) and (value := os.environ.get(f"SBATCH_{name.upper()}"))
    }
    cluster = spec.cluster.model_copy(update={"slurm": slurm.model_copy(update=values)})
    return spec.model_copy(update={"cluster": cluster}) if values else spec
