"""`tula check --site`: are the settings for all jobs of a site right, and does the site answer as they say."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tula_cli.cluster.slurm.site_facts import SiteFacts, ask_site_facts
from tula_cli.errors import JobFailed, SchedulerError, SpecError, TulaError
from tula_cli.services.node_check.site_file import SiteSettings, file_findings, job_of_site, read_site
from tula_cli.services.node_check.site_finding import SiteFinding
from tula_cli.services.node_check.site_jobs import job_findings
from tula_cli.services.node_check.site_scheduler import command_findings, setting_findings
from tula_cli.words import plural

_ERRORS: Mapping[str, type[TulaError]] = {"file": SpecError, "scheduler": SchedulerError, "jobs": JobFailed}
"""What is raised where the first problem is of this source: the file, then the scheduler, then what jobs begin with."""


@dataclass(frozen=True)
class SiteCheck:
    """What was looked at and found."""

    files: tuple[Path, ...]
    keys: tuple[str, ...]  # that they set
    findings: tuple[SiteFinding, ...]

    @property
    def problems(self) -> tuple[SiteFinding, ...]:
        return tuple(finding for finding in self.findings if finding.verdict == "problem")

    def require_sound(self) -> None:
        """Refuse settings with which jobs fail, or are refused.

        Raises:
            SpecError: a key or a value is wrong.
            SchedulerError: the files are right, but the scheduler does not answer, or has not what they ask for.
            JobFailed: all of that is right, but the set-up or the python of jobs fails.
        """
        if not self.problems:
            return
        source = next(source for source in _ERRORS if any(finding.source == source for finding in self.problems))
        names = ", ".join(dict.fromkeys(finding.about for finding in self.problems))
        raise _ERRORS[source](
            f"{', '.join(map(str, self.files))}: {plural(len(self.problems), 'problem')} ({names})",
            "mend what is said above, and check again",
        )


def check_site(
    file: Path | None = None,
    *,
    run_setup: bool = False,
    environ: Mapping[str, str] = os.environ,
    ask: Callable[[], SiteFacts] = ask_site_facts,
) -> SiteCheck:
    """Check site settings; submits nothing.

    Args:
        file: a site.yaml wherever it lies; None: those that jobs read here.
        run_setup: run the set-up lines of jobs on this machine too.
        environ: where XDG's variables are looked up.
        ask: asks the scheduler.

    Raises:
        SpecError: there is no file, or it cannot be read or is no YAML.
    """
    site = read_site(file, environ=environ)
    return SiteCheck(site.files, site.keys, tuple(_site_findings(site, ask, run_setup=run_setup)))


def _site_findings(site: SiteSettings, ask: Callable[[], SiteFacts], *, run_setup: bool) -> Iterator[SiteFinding]:
    yield from file_findings(site)
    try:
        spec = job_of_site(site)
    except SpecError:  # told by what it is above; what it asks for is not known
        return
    if not any(job.cluster.kind == "slurm" for job in spec.by_type().values()):
        return
    facts = ask()
    yield from command_findings(facts)
    if facts.answers:
        yield from setting_findings(spec, facts)
    yield from job_findings(spec, run_setup=run_setup, workdir=Path.cwd())
