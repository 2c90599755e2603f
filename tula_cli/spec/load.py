"""Loading the job spec: one YAML file, checked completely before anything runs.

`load_spec` merges defaults, site files, the file, `TULA_*` variables and `--set` overrides (later wins), and reports
all problems at once, each with its path and the nearest valid name. Units are in names or comments; `batch` is global,
`local_batch` is per GPU.
"""

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, ValidationError

from tula_cli.errors import Problem, SpecError
from tula_cli.spec.job import JobSpec
from tula_cli.spec.merge import merge_sources
from tula_cli.spec.old_keys import drop_removed_values
from tula_cli.spec.yaml_text import Dumper
from tula_cli.words import join_words


def load_spec(
    path: Path,
    *,
    overrides: Iterable[str] = (),
    environ: Mapping[str, str] = os.environ,
    site_files: Iterable[Path] | None = None,
) -> JobSpec:
    """Read, merge and check a job spec.

    Args:
        overrides: `a.b=c`, with c in YAML; later wins.
        environ: environment with TULA_SPEC_* variables.
        site_files: YAML files of site-wide values, weaker than the spec; None: those of the site and the user.

    Raises:
        SpecError: with all problems at once; keys that a site file or a variable sets are reported with it.
    """
    # A single string is left as it is; merging rejects it.
    overrides = overrides if isinstance(overrides, str) else tuple(overrides)
    merged, origins = merge_sources(path, overrides=overrides, environ=environ, site_files=site_files)
    source = " --set ".join((str(path), *overrides))
    try:
        return validate_job(merged, source=source)
    except SpecError as error:
        problems = tuple(_add_origin(problem, origins, known={str(path), "--set"}) for problem in error.problems)
        raise SpecError(error.message, error.hint, problems=problems) from None


def _add_origin(problem: Problem, origins: Mapping[str, str], *, known: Collection[str]) -> Problem:
    """Return the problem with the source of its key if that is another than the known ones.

    The source is that of the key, or of the list or section with the key, or of all keys of an unknown section.
    """
    key = problem.path.partition("[")[0]
    sources = {origin for leaf, origin in origins.items() if leaf.startswith(f"{key}.")}
    while key and key not in origins:
        key = key.rpartition(".")[0]
    if key:
        sources = {origins[key]}
    if not sources or sources & set(known):
        return problem
    return replace(problem, message=f"{problem.message}; the key is set by {join_words(sorted(sources))}")


def validate_job(content: Mapping[str, Any], *, source: str) -> JobSpec:
    """Check a mapping as a job spec.

    Raises:
        SpecError: with all problems at once; each names its path, the value and the expected value.
    """
    try:
        return JobSpec.model_validate(content)
    except ValidationError as error:
        from tula_cli.spec.problems import list_problems

        problems = list_problems(error.errors(), is_script="script" in content)
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise SpecError(f"{source} has {count}", problems=problems) from None


def dump_yaml(spec: JobSpec) -> str:
    """Return the whole spec as YAML that `load_spec` reads back to an equal spec."""
    content = spec.model_dump(mode="json")
    return yaml.dump(content, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


StoredSpec = Annotated[JobSpec, BeforeValidator(drop_removed_values)]
"""The job spec stored in a record, possibly by an older version of tula."""
