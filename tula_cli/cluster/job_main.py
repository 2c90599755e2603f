"""The program that a job starts once per task: python -m tula_cli.cluster.job_main KIND RUN TASK [OPTIONS].

On SLURM, submitit calls the supervisor instead.
"""

import json
import os
import sys
from pathlib import Path

from tula_cli.cluster.scheduler import load_scheduler
from tula_cli.cluster.supervise import supervise
from tula_cli.errors import TulaError

_ENCLOSING_JOB_PREFIXES = ("SLURM_", "SUBMITIT_", "TULA_WRAPPER")
"""Prefixes of variables by which an enclosing job, in which tula was started, would be mistaken for this local job."""


def main(kind: str, run: str, task: str, options: str = "{}") -> None:
    """Supervise a task of a run in this process of its job."""
    try:
        scheduler = load_scheduler(kind, json.loads(options))
    except TulaError as error:
        sys.stderr.write(f"tula: {error.message}. {error.hint}\n")
        raise SystemExit(error.exit_code) from error
    environ = dict(os.environ)
    if kind == "local":
        environ = {name: value for name, value in environ.items() if not name.startswith(_ENCLOSING_JOB_PREFIXES)}
    supervise(Path(run), task, environ=environ, scheduler=scheduler)


if __name__ == "__main__":
    main(*sys.argv[1:])
