"""A site's and a user's settings for all jobs: found, read, and checked without a job."""

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tula_cli.assets import SITE_FOLDER, config_files
from tula_cli.errors import SpecError
from tula_cli.services.node_check.site_finding import SiteFinding, ok, problem, warning
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate
from tula_cli.spec.merge import SITE_FILE, leaves, merge
from tula_cli.spec.old_keys import replace_old_keys
from tula_cli.spec.yaml_text import read_yaml
from tula_cli.words import plural

_ANY_JOB: Mapping[str, Any] = {
    "model": {"name": "small_cnn"},
    "dataset": {"name": "digits"},
    "optimizer": {"lr": 0.1},
    "train": {"epochs": 1000},
}
"""What a job says at least; a site file is laid over it to be checked by the job's own rules, whatever keys they know."""


@dataclass(frozen=True)
class SiteSettings:
    """Site files laid over each other, as every job meets them."""

    files: tuple[Path, ...]  # the weaker first
    content: Mapping[str, Any]
    origins: Mapping[str, str]  # key -> the file that sets it

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that they set, `a.b.c`."""
        return tuple(key for key, _ in leaves(dict(self.content)))

    @property
    def sections(self) -> tuple[str, ...]:
        """What these keys stand in."""
        return tuple(dict.fromkeys(key.rpartition(".")[0] for key in self.keys))

    def origin(self, path: str) -> str:
        """Return the file that sets a key, or something of a section; the strongest where none does."""
        files = [file for key, file in self.origins.items() if key == path or key.startswith((f"{path}.", f"{path}["))]
        outer = [file for key, file in self.origins.items() if path.startswith((f"{key}.", f"{key}["))]
        return next(iter([*files, *outer]), str(self.files[-1]))


def read_site(file: Path | None, *, environ: Mapping[str, str] = os.environ) -> SiteSettings:
    """Read one file, or those that jobs read here.

    Args:
        file: checked by itself, wherever it lies; None: those of the site and the user.
        environ: where XDG's variables are looked up.

    Raises:
        SpecError: there is none, or one cannot be read or is no YAML.
    """
    files = tuple(reversed(config_files(SITE_FILE, environ=environ))) if file is None else (file,)
    if not files:
        raise SpecError(
            f"no {SITE_FILE} is found here: not in {SITE_FOLDER}, nor in tula/ of $XDG_CONFIG_DIRS and $XDG_CONFIG_HOME"
            " (~/.config)",
            f"name one: tula check --site FILE; examples/slurm_site/{SITE_FILE} is one to begin with",
        )
    content: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for settings_file in files:
        merge(
            content,
            replace_old_keys(read_yaml(settings_file), source=str(settings_file)),
            origins,
            source=str(settings_file),
        )
    return SiteSettings(files, content, origins)


def job_of_site(site: SiteSettings) -> JobSpec:
    """Return any job of the site, as its settings make it.

    Raises:
        SpecError: with all that is wrong in them at once.
    """
    job: dict[str, Any] = {}
    merge(job, _ANY_JOB, {}, source="")
    cluster, pricing = site.content.get("cluster"), site.content.get("pricing")
    if isinstance(cluster, dict) and cluster.get("slurm") is not None:  # a job for SLURM says so, if the site does not
        job["cluster"] = {"kind": "slurm"}
    if isinstance(pricing, dict):  # the rest of it is the job's
        job["pricing"] = {"price": 1.0}
    merge(job, site.content, {}, source="")
    return validate(job, source=", ".join(map(str, site.files)))


def file_findings(site: SiteSettings) -> Iterator[SiteFinding]:
    """Yield whether the files can be read by all, and whether keys and values are those of a job."""
    for file in site.files:
        yield from _readable_findings(file)
    yield from _relative_path_findings(site)
    if "cluster.slurm" in site.sections and "cluster.kind" not in site.keys:
        yield warning(
            "cluster.kind",
            "is not set: cluster.slurm is for jobs alone that say kind: slurm",
            "set kind: slurm for all",
        )
    try:
        job_of_site(site)
    except SpecError as error:
        several = len(site.files) > 1
        for problem_ in error.problems:
            where = f", in {site.origin(problem_.path)}" if several else ""
            yield problem(problem_.path, f"{problem_.message}{where}", problem_.hint)
    else:
        for file in site.files:
            keys_of_file = [key for key, source in site.origins.items() if source == str(file)]
            yield ok(str(file), f"{plural(len(keys_of_file), 'setting')}, all of keys that a job has")


def _readable_findings(file: Path) -> Iterator[SiteFinding]:
    if file.is_relative_to(Path("~").expanduser()) or not file.is_file():
        return
    if not file.stat().st_mode & stat.S_IROTH:
        yield warning(str(file), "not everybody may read it, and who may not can load no job", f"chmod a+r {file}")


def _relative_path_findings(site: SiteSettings) -> Iterator[SiteFinding]:
    """Yield paths that mean another file in each user's folder."""
    slurm = site.content.get("cluster") or {}
    slurm = (slurm.get("slurm") if isinstance(slurm, dict) else None) or {}
    for key in ("setup", "wrapper"):
        path = slurm.get(key) if isinstance(slurm, dict) else None
        if not isinstance(path, str):
            continue
        expanded = Path(path).expanduser()
        about = f"cluster.slurm.{key}"
        if not expanded.is_absolute():
            yield warning(about, f"{path!r} is looked for in the folder that each user is in", "write an absolute path")
        elif not expanded.is_file():
            yield problem(about, f"there is no file {path}", "set it right, or leave it out")
