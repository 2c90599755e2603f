"""Shell lines with which a job opens its own log, and waits for the folders and files that it cannot start without.

A scheduler that opens the log itself fails the job at once where its folder is away, and so it does with every later job of the
chain: seconds without a file system would cost them all.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

MAX_PAUSE = 30
"""Seconds between two attempts to open the log, at most; the first pause is a second, and each is twice the one before."""


def lines_to_open_log(
    log: str,
    *,
    folder: str,
    patience: int,
    python: str = "",
    on_wait: Sequence[str] = (),
    on_give_up: Sequence[str] = (),
    on_resume: Sequence[str] = (),
) -> list[str]:
    """Return the lines (POSIX sh) that open `<log>.out` and `<log>.err` and enter the folder, or end the job.

    In the lines of the caller, `$tula_why` is the reason and `$tula_waited` the seconds so far.

    Args:
        log: its path without suffix, as a shell word.
        folder: that the job starts in, as a shell word.
        patience: seconds to wait for all of that.
        python: path of the interpreter that has to be there; empty where a set-up brings it.
        on_wait: lines that report why the job waits.
        on_give_up: lines before the job ends in vain.
        on_resume: lines after a wait.
    """
    python_word = shlex.quote(python)
    interpreter = (
        f" && {{ [ -x {python_word} ] || {{ echo {python_word}: not executable; exit 1; }}; }}" if python else ""
    )
    return [
        "# The job waits for its log, its folder and its Python, where a scheduler that opened the log would fail it.",
        f"tula_log={log}",
        f'tula_try() {{ (cd {folder} && : >>"$tula_log.out" && : >>"$tula_log.err"{interpreter}) 2>&1; }}',
        "tula_waited=0 tula_pause=1 tula_first=",
        "until tula_why=$(tula_try); do",
        """  tula_why="$(printf '%s on %s' "${tula_why#*: line *: }" "$(uname -n)" | tr '|\\n' '  ')\"""",
        f'  if [ "$tula_waited" -ge {patience} ]; then',
        *(f"    {line}" for line in on_give_up),
        "    exit 1",
        "  fi",
        '  if [ "$tula_waited" -eq 0 ]; then',
        '    tula_first="$tula_why"',
        *(f"    {line}" for line in on_wait),
        "  fi",
        '  sleep "$tula_pause"',
        "  tula_waited=$((tula_waited + tula_pause))",
        f"  tula_pause=$((2 * tula_pause < {MAX_PAUSE} ? 2 * tula_pause : {MAX_PAUSE}))",
        "done",
        f"cd {folder}",
        'exec >>"$tula_log.out" 2>>"$tula_log.err"',
        'if [ "$tula_waited" -gt 0 ]; then',
        *(f"  {line}" for line in on_resume),
        '  echo "tula: the job waited $tula_waited s: $tula_first" >&2',
        "fi",
    ]


def log_word(folder: Path, id_: str, name: str) -> str:
    """Return the path of a job's log without suffix, as a shell word.

    Args:
        folder: of the logs.
        id_: the job's id as a shell reads it in the job: "$PBS_JOBID".
        name: of the log, after the id.
    """
    return f'{shlex.quote(str(folder))}/"{id_}"_{name}'
