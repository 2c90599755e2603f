"""Job scripts written by submitit's executor; tula submits them itself."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import submitit

from tula_cli.cluster.chains import MAX_START_DELAY_MINUTES
from tula_cli.cluster.scheduler import make_lines_to_open_log, quote_log_path
from tula_cli.cluster.slurm.queue import DELAYED, GAVE_UP, WAITS

NULL_DEVICE = "/dev/null"


class ScriptWriter(submitit.SlurmExecutor):
    """An executor that writes submitit's script and does not call sbatch.

    submitit's submission has no timeout, passes on variables of an allocation, prints the output of sbatch, and cannot
    adopt a job that was accepted without an answer. The two hooks used here are those that its executors override.

    Args:
        timeout: seconds for which the job waits for its folders.
        python: shell command that starts Python; None for the interpreter that runs tula now.
    """

    def __init__(self, folder: Path, *, timeout: int, python: str | None = None) -> None:
        super().__init__(folder=folder, python=python)
        self._timeout = timeout
        self._interpreter = "" if python else sys.executable

    def render_text(self, command: str | None = None) -> str:
        """Return the script for sbatch, with the parameters set so far.

        Args:
            command: command that srun starts; default: submitit, which calls the pickled function of the job.
        """
        options = self.parameters.get("additional_parameters") or {}
        setup = self.parameters.get("setup") or []
        # SLURM fails a job whose log it cannot open, so the script opens it.
        self.update_parameters(
            setup=[*self._make_lines_to_open_log(options), *setup],
            additional_parameters={"output": NULL_DEVICE, "error": NULL_DEVICE, **options},
        )
        return str(self._make_submission_file_text(command or self._submitit_command_str, ""))

    def _make_lines_to_open_log(self, options: Mapping[str, Any]) -> Sequence[str]:
        """Return the lines that open the log; a comment set by the options of sbatch is restored after a wait."""
        comment = str(options.get("comment", ""))
        job = 'scontrol update JobId="$SLURM_JOB_ID"'
        explanation = f"{DELAYED} by {MAX_START_DELAY_MINUTES} min, because job $SLURM_JOB_ID gave up: $tula_why"
        next_comment = "" if comment else f' Comment="{explanation}"'
        pending = 'squeue --noheader --user="$(id -u)" --name="$SLURM_JOB_NAME" --states=PENDING --format=%i'
        return make_lines_to_open_log(
            quote_log_path(Path(self.folder).absolute(), "$SLURM_JOB_ID", "0_log"),
            folder=shlex.quote(str(options["chdir"])) if "chdir" in options else '"$SLURM_SUBMIT_DIR"',
            timeout=self._timeout,
            python=self._interpreter,
            on_wait=[f'{job} Comment="{WAITS}: $tula_why"'],
            on_give_up=[
                f'{job} Comment="{GAVE_UP} after $tula_waited s: $tula_why"',
                f"tula_next=$({pending} | sort -n | head -n 1)",
                f'[ -z "$tula_next" ] || scontrol update JobId="$tula_next" StartTime=now+{MAX_START_DELAY_MINUTES}minutes'
                + next_comment,
            ],
            on_resume=[f"{job} Comment={shlex.quote(comment)}"],
        )
