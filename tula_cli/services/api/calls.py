"""The arguments that the functions of the Python API share: job or run, settings, launcher, and callbacks."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from tula_cli.cluster import inspection, launcher
from tula_cli.cluster.inspection import CachedInspection
from tula_cli.errors import BadMeasurements, CannotWrite, OverBudget, SpecError, require_callable, require_number
from tula_cli.run.code import run_of_job
from tula_cli.run.directory import RunDir
from tula_cli.run.jobfile import load_with_overrides, settings_origin
from tula_cli.run.records.results import JobFile
from tula_cli.services.api.handles import Run
from tula_cli.services.events import Event, Note, Planned, WarningEvent
from tula_cli.services.waiting import Dependencies, WaitPolicy
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import load_spec, validate
from tula_cli.spec.merge import override
from tula_cli.spec.old_keys import replace_old_keys

ROOT = "tula-runs"
Job = str | Path | Mapping[str, Any] | JobSpec
"""A job: the path of a job.yaml, its content as a mapping, or a spec."""
Target = Job | Run
"""A run, or the path of its folder, or the job that it is of."""
OnEvent = Callable[[Event], object]
Confirm = Callable[[Planned], bool]


class Settings(TypedDict, total=False):
    """Arguments of all functions that submit jobs.

    Keys:
        root: where the runs of jobs are kept; "tula-runs".
        overrides: settings laid over the job's, as `--set` does: ["search.nodes=[1,2]"].
        confirm: is given what is planned (with `.node_hours`), and tells whether to submit it; None for yes, within
            search.max_node_hours.
        wait: whether to wait for the jobs; None: on this machine, not on SLURM.
        on_event: is given every event; without it what deserves a warning is a Python warning, and the rest is dropped.
    """

    root: str | Path
    overrides: Sequence[str]
    confirm: Confirm | None
    wait: bool | None
    on_event: OnEvent | None


@dataclass(frozen=True)
class Call:
    """The subject of a call: the run (which may not exist yet), its settings, and their origin."""

    run: RunDir
    spec: JobSpec
    job: Path | None  # the file of the settings; None for those of the run, of a mapping or of a spec
    overrides: tuple[str, ...] = ()

    @classmethod
    def from_target(cls, target: Target, *, root: str | Path = ROOT, overrides: Sequence[str] = ()) -> "Call":
        """Return the run that is meant; of a job the one under `root`.

        Raises:
            SpecError: the job or an override cannot be used, or a folder is no run.
        """
        if isinstance(target, str | Path) and Path(target).is_dir():
            target = Run.open(target)
        if isinstance(target, Run):
            return cls(target.directory, load_with_overrides(target.directory, overrides), None, tuple(overrides))
        spec = load_job(target, overrides)
        run = run_of_job(Path(root), spec)
        return cls(run, spec, Path(target) if isinstance(target, str | Path) else None, tuple(overrides))

    @property
    def file(self) -> JobFile | None:
        """Where the settings come from, as a run keeps it."""
        return settings_origin(self.run, self.job, self.overrides)

    def measured(self) -> "Call":
        """Return this call, about a run that is there.

        Raises:
            BadMeasurements: it is not.
        """
        if not self.run.exists:
            raise BadMeasurements(f"nothing was measured for {self.spec.name} yet", "call profile first")
        return self


@dataclass(frozen=True)
class Submission:
    """A call that submits jobs."""

    call: Call
    dependencies: Dependencies
    wait_policy: WaitPolicy
    tell: OnEvent

    @classmethod
    def from_arguments(
        cls,
        target: Target,
        *,
        root: str | Path = ROOT,
        overrides: Sequence[str] = (),
        confirm: Confirm | None = None,
        wait: bool | None = None,
        timeout: float | None = None,
        fresh: bool = False,
        on_event: OnEvent | None = None,
    ) -> "Submission":
        """Return the call that the arguments of a function make.

        Raises:
            SpecError: the job, an override or an argument cannot be used, or a folder is no run.
        """
        require_number(timeout=timeout)
        require_callable(confirm=confirm, on_event=on_event)
        call, tell = Call.from_target(target, root=root, overrides=overrides), on_event or warn_of_event
        inspect = make_inspector(call.run.path.parent, fresh=fresh, tell=tell)
        asks = _make_confirm(call.spec, confirm)
        dependencies = Dependencies(launcher.launcher_for, inspect, asks)
        return cls(call, dependencies, WaitPolicy(wait, timeout), tell)


def load_job(job: Job, overrides: Sequence[str] = ()) -> JobSpec:
    """Return the settings of a job, with overrides.

    Raises:
        SpecError: the job or an override cannot be used.
    """
    if isinstance(job, str | Path):
        return load_spec(Path(job), overrides=overrides)
    if not isinstance(job, JobSpec | Mapping):
        raise SpecError(f"{job!r} is no job", "give the path of a job.yaml, its content as a mapping, or a spec")
    if isinstance(job, JobSpec) and not overrides:
        return job
    content = job.model_dump(mode="json", exclude_unset=True) if isinstance(job, JobSpec) else deepcopy(dict(job))
    content = replace_old_keys(content, source="the job")
    override(content, overrides, {})
    return validate(content, source="the job")


def make_inspector(root: str | Path, *, fresh: bool = False, tell: OnEvent | None = None) -> CachedInspection:
    """Return what inspects jobs, and remembers under `root` what it found."""
    note = tell or warn_of_event
    return CachedInspection(Path(root).absolute(), inspection.inspect, fresh=fresh, note=lambda text: note(Note(text)))


def _make_confirm(spec: JobSpec, confirm: Confirm | None) -> Confirm:
    """Return who is asked before jobs are submitted: nobody where the job has a cap."""

    def allowed(planned: Planned) -> bool:
        if confirm is not None:
            return confirm(planned)
        if spec.search.max_node_hours is None:
            raise OverBudget(
                "not confirmed: the job has no search.max_node_hours, and there is nobody to ask",
                "set it, or give confirm=lambda planned: True",
            )
        return True

    return allowed


def warn_of_event(event: Event) -> None:
    """Make a Python warning of what deserves one, and drop the rest."""
    if isinstance(event, WarningEvent):
        warnings.warn(event.text, stacklevel=2)


def save_or_warn(write: Callable[[], object], *, is_required: bool) -> None:
    """Write what was asked for, or else where it can be: then it is a Python warning that it cannot.

    Raises:
        CannotWrite: what was asked for cannot be written.
    """
    try:
        write()
    except CannotWrite as error:
        if is_required:
            raise
        warnings.warn(f"not saved: {error.message}", stacklevel=3)
