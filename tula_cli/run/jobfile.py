"""The job.yaml from which a run's settings came, and whether it has changed since."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tula_cli.errors import SpecError
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.records.results import JobFile
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import load_spec, validate, without_removed_values
from tula_cli.spec.merge import apply_overrides, flatten
from tula_cli.spec.signature import compute_measurement_signature
from tula_cli.spec.yaml_text import read_yaml


@dataclass(frozen=True)
class ConfigDrift:
    """A job file that no longer matches the settings of its run."""

    file: JobFile
    changes: Mapping[str, tuple[Any, Any]]  # by key: the run's value and the file's; None where there is none
    trains: bool = True  # whether a training would be another: more than prices and the search may have changed
    elsewhere: bool = False  # whether the file now belongs to another run: what was measured does not hold for it
    problem: str = ""  # why the file cannot be used; then nothing is known of its values


def find_settings_origin(run: RunDir, job: Path | None, overrides: Sequence[str]) -> JobFile | None:
    """Return where settings come from: `job`, else the file of the run's settings; with `overrides` added."""
    if job is not None:
        return JobFile(path=str(job.absolute()), overrides=tuple(overrides))
    stored_file = run.job_file()
    return stored_file and JobFile(path=stored_file.path, overrides=(*stored_file.overrides, *overrides))


def load_with_overrides(run: RunDir, overrides: Sequence[str]) -> JobSpec:
    """Return a run's settings with overrides that keep its measurements valid.

    Args:
        run: the run.
        overrides: `a.b=c`; later ones win.

    Raises:
        SpecError: an override changes settings that were measured, or is invalid.
    """
    stored = run.read_spec()
    if not overrides:
        return stored
    changed = _load_with_overrides(run.path / "spec.yaml", stored, overrides)
    parts_before, after = ({variant.path for variant in run.variants(spec)} for spec in (stored, changed))
    if compute_measurement_signature(changed) != compute_measurement_signature(stored) or (
        stored.types and not parts_before <= after
    ):
        raise SpecError(
            f"--set {' --set '.join(overrides)}: {run.id} was measured with other settings",
            "measure a new run: tula profile job.yaml with the same --set",
        )
    return changed


def _load_with_overrides(path: Path, stored: JobSpec, overrides: Sequence[str]) -> JobSpec:
    """Load a run's settings with overrides, so that `--set train.ramp=decay` means the same as in its job file.

    The run's file contains every default, and that of `train.ramp_nodes` depends on the ramp: it is derived again.
    """
    content = without_removed_values(read_yaml(path))
    default = "auto" if stored.train.ramp == "decay" else "same"
    if content.get("train", {}).get("ramp_nodes") == default:
        del content["train"]["ramp_nodes"]
    apply_overrides(content, overrides, {})
    return validate(content, source=" --set ".join((str(path), *overrides)))


def save_job(run: RunDir, spec: JobSpec, variants: Iterable[Run], file: JobFile | None) -> None:
    """Make a run and its parts the newest, with this spec, which comes from `file`.

    Raises:
        TulaError: it cannot be written.
    """
    for variant in variants:
        if variant.name is not None:
            variant.save_job(variant.spec)
    run.save_job(spec, file)


def list_variants_with_data(run: RunDir, spec: JobSpec, node_type: str | None = None) -> list[Run]:
    """Return the parts of a run (of the given node type) that have records, including those at other text lengths."""
    return [variant for variant in list_all_variants(run, spec, node_type) if variant.name is None or variant.exists]


def list_all_variants(run: RunDir, spec: JobSpec, node_type: str | None = None) -> tuple[Run, ...]:
    """Return a run's parts, each followed by its parts at other text lengths.

    Args:
        run: the run.
        spec: the job.
        node_type: the only node type to return; None for all.

    Raises:
        SpecError: there is no such type.
    """
    variants = run.variants(spec, node_type)
    return tuple(part_or_length for variant in variants for part_or_length in (variant, *variant.lengths()))


def find_config_drift(run: RunDir, spec: JobSpec, overrides: Sequence[str] = ()) -> ConfigDrift | None:
    """Return how the job file of a run's settings differs from them now; None if it does not, or no longer exists.

    The resolved settings are compared, with the current site files and environment; comments and formatting are
    ignored.

    Args:
        run: the run.
        spec: its settings, with `overrides`.
        overrides: `a.b=c`, of this command.
    """
    file = find_settings_origin(run, None, overrides)
    if file is None or not Path(file.path).is_file():
        return None
    try:
        current = load_spec(Path(file.path), overrides=file.overrides)
    except SpecError as error:
        problems = [str(problem) for problem in error.problems]
        return ConfigDrift(file, {}, problem="; ".join([error.message, *problems]))
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
    """Return the values of two jobs for each key in which they differ."""
    leaves_before, after = (dict(flatten(spec.model_dump(mode="json"))) for spec in (earlier, current))
    keys = [key for key in {**leaves_before, **after} if leaves_before.get(key, {}) != after.get(key, {})]
    return {key: (leaves_before.get(key), after.get(key)) for key in keys}
