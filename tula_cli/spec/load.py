"""Loading the job spec: one YAML file, checked completely before anything runs.

`load_spec` merges defaults, site files, the file, `TULA_*` variables and `--set` overrides (later wins), and reports
all problems at once, each with its path and the nearest valid name. Units are in names or comments; `batch` is global,
`local_batch` is per GPU.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, ValidationError

from tula_cli.errors import Problem, SpecError
from tula_cli.spec.job import JobSpec
from tula_cli.spec.merge import merge_sources
from tula_cli.spec.old_keys import without_removed_values
from tula_cli.spec.yaml_text import Dumper


def load_spec(
    path: Path,
    *,
    overrides: Iterable[str] = (),
    environ: Mapping[str, str] = os.environ,
    site_files: Iterable[Path] | None = None,
) -> JobSpec:
    """Read, merge and check a job spec.

    Args:
        path: the YAML file.
        overrides: `a.b=c`, with c in YAML; later wins.
        environ: environment with TULA_SPEC_* variables.
        site_files: YAML files of site-wide values, weaker than the spec; None: those of the site and the user.

    Raises:
        SpecError: with all problems at once; keys that a site file or a variable sets are reported with it.
    """
    overrides = overrides if isinstance(overrides, str) else tuple(overrides)  # a text is refused where they are merged
    merged, origins = merge_sources(path, overrides=overrides, environ=environ, site_files=site_files)
    source = " --set ".join((str(path), *overrides))
    other_origins = {key: origin for key, origin in origins.items() if origin not in (str(path), "--set")}
    try:
        return validate(merged, source=source)
    except SpecError as error:
        problems = tuple(_name_origin(problem, other_origins) for problem in error.problems)
        raise SpecError(error.message, error.hint, problems=problems) from None


def _name_origin(problem: Problem, origins: Mapping[str, str]) -> Problem:
    """Return the problem with the source of its key, or of the list or section with the key, if `origins` has it."""
    key = problem.path.partition("[")[0]
    while key and key not in origins:
        key = key.rpartition(".")[0]
    return replace(problem, message=f"{problem.message}; it is set by {origins[key]}") if key else problem


def validate(content: Mapping[str, Any], *, source: str) -> JobSpec:
    """Check a mapping as a job spec.

    Raises:
        SpecError: with all problems at once; each names its path, the value and the expected value.
    """
    try:
        return JobSpec.model_validate(content)
    except ValidationError as error:
        from tula_cli.spec.problems import describe_problem, merge_unions

        problems = merge_unions([describe_problem(item, of_script="script" in content) for item in error.errors()])
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise SpecError(f"{source} has {count}", problems=problems) from None


def dump_yaml(spec: JobSpec) -> str:
    """Return the whole spec as YAML that `load_spec` reads back to an equal spec."""
    content = spec.model_dump(mode="json")
    return yaml.dump(content, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


StoredSpec = Annotated[JobSpec, BeforeValidator(without_removed_values)]
"""The job spec stored in a record, possibly by an older version of tula."""
