"""The runs of a job: one for each node type and number of GPUs per node that it names; and its job file.

Each is a run directory of its own. Those of one job know each other by name (`Variant.runs`), so that a command that is
given none of them reads all.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tula_cli.errors import SpecError
from tula_cli.options import require_list
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.parsed_spec import read_unvalidated_spec
from tula_cli.run.records.recommendations import Recommendation
from tula_cli.run.records.results import JobFile, Variant
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import load_spec, validate_job
from tula_cli.spec.merge import apply_overrides, flatten_mapping
from tula_cli.spec.signature import compute_measurement_signature
from tula_cli.words import describe_node_type, join_first_words, make_relative_path

_HARDWARE_SECTIONS = ("name", "cluster", "pricing", "search", "baseline", "export")
"""Sections of a job in which runs of one job may differ."""
_MAX_KEYS_SHOWN = 4


def list_variants(spec: JobSpec) -> list[tuple[Variant, JobSpec]]:
    """Return each variant of a job (a node type with a number of GPUs per node) with its job."""
    variants: list[tuple[Variant, JobSpec]] = []
    for name, job in spec.split_by_type().items():
        node_type, gpus = (None, None) if name is None else spec.hardware_by_type[name]
        in_addition: Literal["gpus"] | None = "gpus" if job.is_supplement_with_fewer_gpus else None
        variants.append((Variant(node_type=node_type, gpus=gpus, in_addition=in_addition), job))
    return variants


def make_runs(root: Path, spec: JobSpec, *, code: str = "") -> tuple[Run, ...]:
    """Return the runs of a job under `root`, including those that do not exist yet; nothing is written.

    Args:
        code: digest of the user's code that the spec names; empty for none.
    """
    jobs = [(variant, RunDir.from_spec(root, job, code=code)) for variant, job in list_variants(spec)]
    names = tuple(run.id for _, run in jobs) if len(jobs) > 1 or spec.types else ()
    return _link_runs_of_job(
        [Run(run.path, run.spec, variant.model_copy(update={"runs": names})) for variant, run in jobs]
    )


def list_runs_of_job(run: RunDir) -> list[RunDir]:
    """Return all existing runs of a run's job, including the run itself."""
    variant = run.read_variant()
    if variant is None or variant.in_addition == "length":  # measured by an earlier version at another text length
        return [run]
    siblings = [RunDir(run.path.parent / name) for name in variant.runs]
    if run.path not in [sibling.path for sibling in siblings]:  # no siblings, or a copy of a run under another name
        return [run]
    variants = [(sibling, sibling.read_variant()) for sibling in siblings if sibling.exists]
    return [sibling for sibling, other in variants if other is None or other.in_addition != "length"]


def open_runs_of_job(run: RunDir, overrides: Sequence[str] = ()) -> tuple[Run, ...]:
    """Return all existing runs of a run's job, including the run itself.

    Args:
        overrides: `a.b=c`, which override the settings of each run.

    Raises:
        SpecError: an override changes settings that were measured, or is invalid.
    """
    stored = [(sibling, sibling.read_variant() or Variant()) for sibling in list_runs_of_job(run)]
    node_types = {variant.node_type for _, variant in stored if variant.node_type}
    runs = []
    for sibling, variant in stored:
        spec = load_with_overrides(sibling, _select_overrides(overrides, variant, node_types))
        runs.append(Run(sibling.path, spec.with_fewer_gpus(variant.in_addition == "gpus"), variant))
    return _link_runs_of_job(runs)


def open_run(run: RunDir, overrides: Sequence[str] = ()) -> Run:
    """Return an existing run with its job. Arguments and errors as in `open_runs_of_job`."""
    return next(sibling for sibling in open_runs_of_job(run, overrides) if sibling.path == run.path)


def open_runs(runs: Sequence[RunDir], overrides: Sequence[str] = ()) -> tuple[Run, ...]:
    """Return existing runs of one job that are named one by one. Arguments as in `open_runs_of_job`.

    Raises:
        SpecError: as in `open_runs_of_job` and `combine_runs`.
    """
    return combine_runs(_open_runs_with_overrides(runs, overrides))


def open_runs_by_job(runs: Sequence[RunDir], overrides: Sequence[str] = ()) -> list[tuple[Run, ...]]:
    """Group existing runs, named one by one, by their jobs; the jobs are in the order of their first runs.

    Arguments and errors as in `open_runs_of_job`.
    """
    jobs: list[list[Run]] = []
    for run in _open_runs_with_overrides(runs, overrides):
        job = next((job for job in jobs if not _list_differences(job[0], run)), None)
        if job is None:
            jobs.append([run])
        else:
            job.append(run)
    return [combine_runs(job) for job in jobs]


def list_distinct_runs(runs: Sequence[RunDir]) -> list[RunDir]:
    """Return the runs without repetitions, in their order."""
    distinct: dict[Path, RunDir] = {}
    for run in runs:
        distinct.setdefault(run.path.resolve(), run)
    return list(distinct.values())


def _open_runs_with_overrides(runs: Sequence[RunDir], overrides: Sequence[str]) -> list[Run]:
    opened: dict[Path, Run] = {}
    runs = list_distinct_runs([run for run in runs if run.exists] or runs[:1])
    for run in runs:
        if run.path not in opened:
            opened |= {sibling.path: sibling for sibling in open_runs_of_job(run, overrides)}
    return [opened[run.path] for run in runs]


def _select_overrides(overrides: Sequence[str], variant: Variant, node_types: Collection[str]) -> list[str]:
    """Return overrides as they apply to one run: without those of other node types, and without `node_types.NAME`."""
    require_list(overrides=overrides)
    selected = []
    for text in overrides:
        node_type = next((name for name in node_types if text.startswith(f"node_types.{name}.")), None)
        if node_type in (None, variant.node_type):
            selected.append(text if node_type is None else text.removeprefix(f"node_types.{node_type}."))
    return selected


def _link_runs_of_job(runs: Sequence[Run]) -> tuple[Run, ...]:
    family = tuple(runs)
    for run in family:
        run.family = family
    return family


def save_runs(runs: Sequence[Run], file: JobFile | None) -> None:
    """Make runs the newest, with their jobs, which come from `file`.

    Raises:
        TulaError: they cannot be written.
    """
    for run in runs:
        stored = run.read_variant()
        run.save_job(run.spec, file)
        if run.variant.runs:
            run.write_variant(run.variant.model_copy(update={"chosen": stored.chosen if stored else ""}))


# --- Selection of runs


def list_runs_with_data(runs: Sequence[Run]) -> list[Run]:
    """Return the runs that exist, and the run of a job without variants whether or not it exists."""
    return [run for run in runs if run.type is None or run.exists]


def select_runs(runs: Sequence[Run], node_type: str | None) -> tuple[Run, ...]:
    """Return the runs, or only that of a node type.

    Raises:
        SpecError: there is no such node type.
    """
    selected = tuple(run for run in runs if node_type is None or run.type == node_type)
    if not selected:
        types = ", ".join(run.type for run in runs if run.type)
        hint = (
            f"choose from: {types}"
            if types
            else "remove the node type: the job has neither section node_types nor search.gpus_per_node"
        )
        raise SpecError(f"no node type {node_type!r}", hint)
    return selected


def get_only_run(runs: Sequence[Run], node_type: str | None, *, purpose: str) -> Run:
    """Return the run of one node type.

    Args:
        purpose: what needs it, for the message.

    Raises:
        SpecError: there are several node types and none is given, or there is no such node type.
    """
    selected = select_runs(runs, node_type)
    if len(selected) > 1:
        types = " or [[--type]] ".join(str(run.type) for run in selected)
        raise SpecError(f"{purpose} needs a node type: add [[--type]] {types}")
    return selected[0]


def find_chosen_run(runs: Sequence[Run]) -> Run | None:
    """Return the only run, or the one that the job's stored recommendation has chosen; None if neither is known."""
    if len(runs) == 1:
        return runs[0]
    names = {variant.chosen for run in runs if (variant := run.read_variant()) is not None}
    return next((run for run in runs if run.id in names), None)


def find_recommendation(runs: Sequence[Run]) -> Recommendation | None:
    """Return the stored recommendation over all runs of a job."""
    chosen = find_chosen_run(runs)
    return None if chosen is None else chosen.read_recommendation()


def mark_chosen_run(run: Run, compared: Sequence[Run]) -> None:
    """Record in all runs of a job that its recommendation has chosen this run.

    Nothing is recorded if only some of the job's runs were compared: the choice among them is not that of the job.
    """
    existing = {sibling.path for sibling in run.family if sibling.exists}
    if len(compared) == 1 or not existing <= {other.path for other in compared}:
        return
    for sibling in run.family:
        if (variant := sibling.read_variant()) is not None:
            sibling.write_variant(variant.model_copy(update={"chosen": run.id}))


def combine_runs(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Return separately named runs as one family, after checking that they are of one job on different hardware.

    Runs that their node types do not distinguish are named after their directories.

    Raises:
        SpecError: the jobs differ in more than their hardware.
    """
    first = runs[0]
    for other in runs[1:]:
        if keys := _list_differences(first, other):
            raise SpecError(
                f"{make_relative_path(first.path)} and {make_relative_path(other.path)} are runs of different jobs:"
                f" {join_first_words(keys, _MAX_KEYS_SHOWN)} {'differs' if len(keys) == 1 else 'differ'}",
                "give runs of one job on different hardware, or plan several jobs together with tula recommend and --trainings N after each --run",
            )
    if len({run.type for run in runs}) < len(runs):
        ids_differ = len({run.id for run in runs}) == len(runs)
        for run in runs:
            run.type = run.id if ids_differ else make_relative_path(run.path)
    return tuple(runs)


def _list_differences(first: Run, other: Run) -> list[str]:
    """Return the keys in which the jobs of two runs differ; empty if it is one job on different hardware."""
    if other.path in [sibling.path for sibling in first.family]:
        return []
    keys = [key for key in compare_jobs(first.spec, other.spec) if key.split(".")[0] not in _HARDWARE_SECTIONS]
    keys += ["pricing.currency"] * (first.spec.pricing.currency != other.spec.pricing.currency)
    if keys:
        return keys
    digests, others = first.read_code_digests(), other.read_code_digests()
    return ["the code"] if digests and others and digests.isdisjoint(others) else []


# --- Comparison with the job file


@dataclass(frozen=True)
class ConfigDrift:
    """A job file that no longer matches the settings of its run."""

    file: JobFile
    changes: Mapping[str, tuple[Any, Any]]  # key -> (value of the run, value of the file); None for a missing value
    trains: bool = True  # the changes affect trainings, not only prices or the search
    elsewhere: bool = False  # the file now leads to another run, because measurements of this run do not apply to it
    problem: str = ""  # why the file cannot be read, in which case `changes` is empty; else empty


def find_settings_origin(run: RunDir, job: Path | None, overrides: Sequence[str]) -> JobFile | None:
    """Return the job file of the settings with `overrides` added: `job`, else the file recorded in the run, else None."""
    if job is not None:
        return JobFile(path=str(job.absolute()), overrides=tuple(overrides))
    stored_file = run.read_job_file()
    if stored_file is None:
        return None
    kept = (override for override in stored_file.overrides if override not in overrides)
    return JobFile(path=stored_file.path, overrides=(*kept, *overrides))


def load_with_overrides(run: RunDir, overrides: Sequence[str]) -> JobSpec:
    """Return a run's settings with overrides that keep its measurements valid.

    Args:
        overrides: `a.b=c`; later ones win.

    Raises:
        SpecError: an override changes settings that were measured, or is invalid.
    """
    stored = run.read_spec()
    if not overrides:
        return stored
    content = read_unvalidated_spec(run.path)
    # The run's file contains every default, and that of `train.ramp_nodes` depends on the ramp: it is derived again.
    if content.get("train", {}).get("ramp_nodes") == ("auto" if stored.train.ramp == "decay" else "same"):
        del content["train"]["ramp_nodes"]
    apply_overrides(content, overrides, {})
    changed = validate_job(content, source=" --set ".join((str(run.path / "spec.yaml"), *overrides)))
    if changed.types or compute_measurement_signature(changed) != compute_measurement_signature(stored):
        raise SpecError(
            f"[[--set {' --set '.join(overrides)}]] changes settings on which the measurements of {run.id} depend",
            "measure a new run: tula profile job.yaml with the same --set",
        )
    return changed


def find_config_drift(run: Run, overrides: Sequence[str] = ()) -> ConfigDrift | None:
    """Return how the job file of a run's settings differs from them now; None if it does not, or no longer exists.

    The resolved settings are compared, with the current site files and environment; comments and formatting are
    ignored.

    Args:
        overrides: `a.b=c`, of this command; they already apply to the settings of `run`.
    """
    file = find_settings_origin(run, None, overrides)
    if file is None or not os.path.isfile(file.path):  # noqa: PTH113 - raises no PermissionError in another user's folder
        return None
    try:
        job = load_spec(Path(file.path), overrides=file.overrides)
    except SpecError as error:
        return ConfigDrift(file, {}, problem="; ".join([error.message, *map(str, error.problems)]))
    spec, variant = run.spec, (run.variant.node_type, run.variant.gpus)
    jobs = {(variant.node_type, variant.gpus): job for variant, job in list_variants(job)}
    current = jobs.get(variant)
    if current is None:
        named = "the hardware of the run" if run.type is None else describe_node_type(run.type)
        return ConfigDrift(file, {}, problem=f"{named} is no longer in the file")
    if current == spec:
        return None
    return ConfigDrift(
        file,
        compare_jobs(spec, current),
        trains=_select_training_settings(current) != _select_training_settings(spec),
        elsewhere=(current.name, compute_measurement_signature(current))
        != (spec.name, compute_measurement_signature(spec)),
    )


def _select_training_settings(spec: JobSpec) -> dict[str, Any]:
    return spec.model_dump(exclude={"pricing", "search", "export"})


def compare_jobs(earlier: JobSpec, current: JobSpec) -> dict[str, tuple[Any, Any]]:
    """Return the values of two jobs for each key in which they differ; an absent or empty section counts as None."""
    earlier_values, current_values = (
        {key: None if value == {} else value for key, value in flatten_mapping(spec.model_dump(mode="json"))}
        for spec in (earlier, current)
    )
    keys = [key for key in {**earlier_values, **current_values} if earlier_values.get(key) != current_values.get(key)]
    return {key: (earlier_values.get(key), current_values.get(key)) for key in keys}
