"""How much of the package one command runs, so that it can be read from the command to its answer."""

import json
import os
import subprocess
import sys
from pathlib import Path

from make_results import Truth, make_probes, make_spec

from tula_cli.run.directory import RunDir

ROOT = Path(__file__).parent.parent
TRACE = """
import json, sys
from tula_cli.cli import app

modules, stack, deepest = set(), [], 0

def trace(frame, event, _):
    global deepest
    code = frame.f_code
    if "/tula_cli/" not in code.co_filename:
        return
    if event == "call":
        is_body = not code.co_flags & 1  # of a module or a class, which an import runs
        stack.append(None if is_body or code.co_name.startswith("<") else code)
        if stack[-1] is not None:
            modules.add(code.co_filename)
            deepest = max(deepest, len(set(stack) - {None}))  # a function that calls itself is one to read
    elif event == "return" and stack:
        stack.pop()

sys.setprofile(trace)
app.run(sys.argv[1:])
sys.setprofile(None)
imported = [name for name in sys.modules if name.startswith("tula_cli")]
print(json.dumps([len(modules), deepest, len(imported)]), file=sys.stderr)
"""
"""Counts the modules whose functions run, the deepest chain of calls, and the modules imported."""

MAX_MODULES = 56
MAX_DEPTH = 16
MAX_IMPORTED = 99


def test_a_recommendation_runs_few_modules_at_a_small_depth(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, make_spec(search={"max_batch": 4096}))
    for probe in make_probes(Truth(noise=0.01), {2: (16, 64, 256), 4: (8,), 8: (4,), 16: (2, 32)}):
        run.write_result(probe)
    done = subprocess.run(
        [sys.executable, "-c", TRACE, "recommend", "--run", str(run.path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert "accuracy risk" in done.stdout
    modules, depth, imported = json.loads(done.stderr.splitlines()[-1])
    assert 20 < modules <= MAX_MODULES and 5 < depth <= MAX_DEPTH and imported <= MAX_IMPORTED, (
        modules,
        depth,
        imported,
    )
