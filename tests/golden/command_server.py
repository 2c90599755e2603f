"""A process that imports the modules of the commands once and forks for each command, so that cases need no time for imports.

    python command_server.py

Reads one line of JSON per command from stdin (`words` of a command line or `code` in Python, `folder`, `environment`,
`output`, a folder for stdout and stderr) and answers with the exit code. A command runs as `python -m tula_cli` does.
"""

import contextlib
import importlib
import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    for number, line in enumerate(sys.stdin):
        request = json.loads(line)
        pid = os.fork()
        if not pid:
            run_command(request)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps(code), flush=True)
        if not number:
            import_modules(Path(request["output"]) / "modules")


def run_command(request: dict[str, Any]) -> None:
    """Run one command in this process, and exit with the command's exit code."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    output = Path(request["output"])
    for number, stream in enumerate((os.devnull, output / "stdout", output / "stderr")):
        os.dup2(os.open(stream, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644), number)
    code: Any = 99  # if an error escapes from the command
    try:
        if request["code"]:
            exec(compile(request["code"], "case", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = ["tula", *request["words"]]
            runpy.run_module("tula_cli", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
    finally:
        if code == 99:
            traceback.print_exc()
        exit_process(output, code)


def exit_process(output: Path, code: Any) -> None:
    """Record the imported modules, and exit this process."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    (output / "modules").write_text("\n".join(name for name in sys.modules if name != "__main__"))
    os._exit(code if isinstance(code, int) else int(code is not None))


def import_modules(names: Path) -> None:
    """Import the modules that the first command imported, for all later commands."""
    for name in names.read_text().splitlines():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


if __name__ == "__main__":
    main()
