"""`tula observe`."""

from pathlib import Path
from typing import Annotated

import typer

from tula_cli.errors import BadMeasurements, SpecError
from tula_cli.options import DEFAULT_OBSERVATIONS_FOLDER
from tula_cli.show.screen import Screen


def observe(
    screen: Screen,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND ...]", help="Command to run and observe; with --report, the job to report on."
        ),
    ] = None,
    report: Annotated[
        bool,
        typer.Option(
            "--report",
            help="Report on observed jobs without running a command: on the newest job, on SCRIPT or on SCRIPT/JOB.",
        ),
    ] = False,
    install: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Copy the hooks to FOLDER, without running a command. Add FOLDER to PYTHONPATH to"
            " observe all trainings.",
        ),
    ] = None,
    folder: Annotated[
        Path, typer.Option(metavar="ROOT", help="Folder in which observations are stored.", readable=False)
    ] = Path(DEFAULT_OBSERVATIONS_FOLDER),
) -> None:
    """Run a training unchanged, and report how well it uses its nodes.

    The output and the exit code of the command do not change. tula times its first steps, and reports how long the
    training would take on other numbers of nodes.
    """
    from tula_cli.services import observe as service
    from tula_cli.show.observe import render_installation, render_observations

    words = command or []
    if install is not None:
        if words or report:
            raise SpecError(
                "--install cannot be combined with a command or --report", "run tula observe --install FOLDER alone"
            )
        root = folder if "folder" in screen.given_options else Path("~") / folder
        if not str(root).startswith("~"):
            root = root.absolute()
        service.install_observer(install, root)
        installed = {"folder": install.absolute(), "root": str(root)}
        screen.print_answer(installed, render_installation(install.absolute(), root))
    elif report:
        if len(words) > 1:
            raise SpecError(f"--report takes one name, got {len(words)}", "run tula observe --report SCRIPT")
        reports = service.list_observed_reports(folder.expanduser(), words[0] if words else None)
        screen.print_answer({"jobs": reports}, render_observations(reports))
    elif words:
        code, job = service.run_observed_command(words, folder.expanduser(), quiet_stdout=screen.as_json)
        if service.is_reporting_process():
            _show_report(screen, folder.expanduser(), job, code)
        if code:
            screen.finish_answer()
            raise typer.Exit(code)
    else:
        raise SpecError(
            "no command to observe", "write the command after --: tula observe -- python train.py --epochs 3"
        )


def _show_report(screen: Screen, folder: Path, job: str, code: int) -> None:
    """Show the report on stderr, because stdout and the exit code are those of the command."""
    from tula_cli.services import observe as service
    from tula_cli.show.observe import render_observations

    try:
        reports = service.collect_job_reports(folder, job)
    except BadMeasurements as error:
        failed = f"the command failed with exit code {code}; " if code else ""
        screen.print_warning(f"no report: {failed}{error.message}; {error.hint}")
        reports = []
    except Exception as error:  # noqa: BLE001 - an error in the report must not replace the job's exit code
        screen.print_warning(f"no report, because of a bug in tula ({error!r}); please report this bug")
        reports = []
    if screen.as_json:
        screen.print_answer({"exit_code": code, "jobs": reports}, ())
    elif reports:
        screen.print_to_stderr(["", *render_observations(reports)])
