"""`tula export` from Python."""

from collections.abc import Sequence
from pathlib import Path

from tula_cli.errors import require_callable, require_number
from tula_cli.services.api.calls import ROOT, Call, OnEvent, Target, warn_of_event
from tula_cli.services.events import follow as done
from tula_cli.services.exporting import export as service
from tula_cli.services.exporting.export import Exported


def export(
    run: Target,
    to: str | Sequence[str] = (),
    *,
    uri: str | None = None,
    project: str | None = None,
    follow: bool = False,
    every: float | None = None,
    on_event: OnEvent | None = None,
    root: str | Path = ROOT,
) -> tuple[Exported, ...]:
    """Send a run's settings, probes, recommendation and trainings to trackers: `tula export`. What was sent is not sent again.

    Args:
        run: a run, the path of its folder, or its job.
        to: "mlflow", "wandb", "tensorboard" or "package.module:callable", one or several; none: those of section export.
        uri: the place of the one that is named; None: the tracker's own, or the run.
        project: MLflow's experiment, W&B's project; None: the job's name.
        follow: go on while jobs run.
        every: seconds between two looks; None: 30.
        on_event: is given every event; without it what deserves a warning is a Python warning, and the rest is dropped.
        root: where the runs of jobs are kept.

    Returns:
        What was sent to each, and how much of it is new. The report on the run is sent as Markdown.

    Raises:
        SpecError: the job or an argument cannot be used, a tracker's package is missing, or nothing says where to.
        BadMeasurements: there is no run of it yet.
        TrackerError: one did not answer, or not to all; the same call sends what was missed.
        TulaError: the run cannot be read or written.
        KeyboardInterrupt: Ctrl-C while it follows.

    Example:
        >>> tula.export(run, "mlflow", uri="http://tracking.example.org:5000")[0].new_points
    """
    require_number(every=every)
    require_callable(on_event=on_event)
    call = Call.from_target(run, root=root).measured()
    trackers = service.asked(call.spec, [to] if isinstance(to, str) else list(to), uri=uri, project=project)
    results = done(service.export(call.run, trackers, follow=follow, every=every), on_event or warn_of_event)
    service.require_sent(results)
    return results
