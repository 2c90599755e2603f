"""Run the long tests, which `make test` leaves out, in parts.

    python tests/proof.py [--budget 3m] [--seed 0] [--list] [PART ...]

A part is a command. Its seed is derived from --seed. Passed parts are recorded in .proof/, by the hash of the working tree
and the seed, so that an interrupted call continues when it is repeated. With a budget, the hash of the tree selects the parts
that run, so that different commits run different parts. Two parts run at a time, because most parts wait for processes and
clusters more than they compute; parts that measure times run last, one by one. To add a part, add an entry to PARTS.
"""

import argparse
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_SHOWN_CHARS = 4000  # of a failed part's output
PARALLEL_PARTS = min(2, os.cpu_count() or 1)
PARALLEL_SPEEDUP = 1.5
"""Speedup on two cores of two parts at a time over one at a time."""


@dataclass(frozen=True)
class Part:
    """A command that runs long tests, and its approximate duration when it runs alone on two idle cores."""

    name: str
    minutes: float
    command: tuple[str, ...]  # arguments of Python; {seed} is replaced by the seed of the part
    alone: bool = False  # runs alone, because it measures times, which a concurrent part would change


def pytest_part(name: str, minutes: float, path: str, *options: str, alone: bool = False) -> Part:
    """Return a part that runs the tests of a module marked `proof`, or those of them that pytest options select."""
    pytest = ("-m", "pytest", "-q", "-m", "proof", "-p", "no:cacheprovider", "--hypothesis-seed={seed}")
    return Part(name, minutes, (*pytest, path, *options), alone)


def soak_part(number: int, *, nodes: int, kills: int, epochs: int, minutes: float, least: int | None = None) -> Part:
    """Return a part that kills a training on a SLURM cluster repeatedly; the times of the kills depend on `number`."""
    subject = None if least is None else "either"
    values = {"nodes": nodes, "kills": kills, "epochs": epochs, "seed": "{seed}", "least": least, "subject": subject}
    options = [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]
    sizes = nodes if least is None else f"{least}-to-{nodes}"
    return Part(f"soak-{sizes}-nodes-{number}", minutes, ("tests/slurm/soak.py", *options))


GPU_DRY_RUN = ("--device", "cpu", "--tiny", "--again", "--out", ".proof/gpu")
"""All stages run under another version of torch; under the newest one, those that use functions of torch no other test uses."""
CORE_TESTS = (
    *("-m", "not proof and not torch"),
    *(f"tests/{folder}" for folder in ("cli", "models", "spec", "services", "show")),
)
"""Tests that need no torch, for the features of the required libraries that tula uses."""
TESTS_WITHOUT_TORCH = ("-m", "not proof and not torch", "tests/models", "tests/spec", "tests/show")
"""Tests that pass where torch is not installed."""
_TESTS_WITHOUT_EXTRAS = (
    *("-m", "not e2e and not torch and not slurm and not proof"),
    *(f"tests/{folder}" for folder in ("cli", "run", "services", "show")),
)
"""Tests of the core without its optional packages, in the folders that may load them (an import contract covers the others)."""
_TORCH_FEATURE_TESTS = (
    "two_ranks or test_gradients or test_probe or test_operations or test_device or test_ranks or test_table"
)
TORCH_TESTS = ("tests/worker", "tests/optim", "-k", _TORCH_FEATURE_TESTS)
"""Tests of the features of torch that tula uses, which the lowest allowed versions may lack."""
EXTRAS_TESTS = (
    *(f"tests/worker/{name}.py" for name in ("build/test_weights_and_groups", "build/test_source_text")),
    "tests/extras/trackers/test_trackers.py",
)
"""Tests of safetensors, transformers and the trackers."""

PARTS = (
    pytest_part("fuzzed-runs", 1.5, "tests/cli/test_fuzzed_runs.py"),
    pytest_part("fuzzed-specs", 0.3, "tests/spec/test_fuzzed_specs.py"),
    pytest_part("paper-jobs", 1.0, "tests/worker/measure/test_paper_jobs.py"),
    pytest_part("inspected-paper-jobs", 0.25, "tests/worker/measure/test_inspect.py"),
    pytest_part("step-files", 0.2, "tests/worker/train/test_step_files.py"),
    pytest_part("stages-by-noise", 0.2, "tests/worker/train/watching/test_measured_noise.py"),
    pytest_part("golden-commands", 1.0, "tests/golden/test_golden_commands.py"),
    pytest_part("golden-commands-of-extras", 0.3, "tests/extras/test_golden_commands_of_extras.py"),
    pytest_part("golden-trainings", 1.8, "tests/golden/test_golden_trainings.py"),
    Part("core-alone", 4, ("tests/helpers/without_extras.py", "-n", "2", *_TESTS_WITHOUT_EXTRAS)),
    pytest_part("core-commands", 0.5, "tests/test_without_extras.py"),
    pytest_part("trackers", 0.25, "tests/extras/trackers/test_trackers.py"),
    pytest_part("activation-checkpointing", 0.5, "tests/worker/build/test_activation_checkpointing.py"),
    pytest_part("compiled", 1.0, "tests/worker/build/test_compiled.py"),
    pytest_part("footprint", 1.5, "tests/worker/measure/test_footprint.py"),
    pytest_part("four-ranks", 0.5, "tests/worker/methods/test_methods_ranks.py"),
    pytest_part("four-ranks-of-ddp", 0.5, "tests/optim/test_tula_ddp.py"),
    pytest_part("mutants", 0.5, "tests/optim/test_mutants.py"),
    pytest_part("trainers", 0.3, "tests/shim/test_trainers.py"),
    pytest_part("observed-jobs", 0.9, "tests/shim/test_observe.py"),
    pytest_part("examples", 1.2, "tests/test_examples.py"),
    pytest_part("slurm-versions", 0.3, "tests/cluster/test_launcher.py"),
    pytest_part("checks-of-a-cluster", 1.7, "tests/slurm/test_check_on_cluster.py", alone=True),
    pytest_part("measuring-lock", 0.5, "tests/host/test_machine_lock.py"),
    pytest_part("secrets", 0.4, "tests/e2e/test_secrets.py"),
    pytest_part("bounded-grid-and-ends", 1.0, "tests/e2e/test_main_job.py"),
    pytest_part("compared-script", 0.35, "tests/e2e/test_compare_script.py"),
    pytest_part("learning-rates-of-a-script", 0.28, "tests/e2e/test_script_learning_rates.py"),
    pytest_part("nodes-by-stage", 0.4, "tests/e2e/test_stage_nodes.py"),
    pytest_part("own-scripts", 0.8, "tests/e2e/test_own_script.py"),
    pytest_part("moved-run", 0.5, "tests/e2e/test_moved_run.py"),
    pytest_part("reported-replays", 0.25, "tests/benchmarks/test_replay.py"),
    pytest_part("containers", 0.3, "tests/cluster/slurm/test_containers.py"),
    pytest_part("test-cluster", 1.2, "tests/slurm/test_cluster.py"),
    pytest_part("meeting-nodes", 0.3, "tests/slurm/test_meeting.py"),
    pytest_part("on-a-cluster", 1.6, "tests/slurm/test_tula.py"),
    pytest_part("scaled-scripts", 0.5, "tests/shim/test_ags.py"),
    pytest_part("orthogonal-scripts", 0.3, "tests/shim/test_ortho.py"),
    pytest_part("other-peoples-loops", 1.0, "tests/shim/test_other_peoples_loops.py"),
    pytest_part("other-peoples-scripts", 2.0, "tests/e2e/test_other_peoples_scripts.py"),
    pytest_part("stragglers", 0.8, "tests/e2e/test_stragglers.py", alone=True),
    pytest_part("out-of-memory", 1.6, "tests/e2e/test_out_of_memory.py"),
    pytest_part("largest-batch", 0.8, "tests/e2e/test_largest_batch.py"),
    pytest_part("own-batches", 5.2, "tests/e2e/test_own_batches.py"),
    pytest_part("failing-loader", 2.2, "tests/e2e/test_failing_loader.py"),
    pytest_part("scripts-on-slurm", 3.0, "tests/slurm/test_script_on_slurm.py"),
    pytest_part("resuming-trainers", 2.0, "tests/e2e/test_resuming_trainers.py"),
    pytest_part("first-job", 0.6, "tests/slurm/test_first_job.py"),
    pytest_part("reality", 1.0, "tests/benchmarks/test_reality.py"),
    pytest_part("recovery", 4.5, "tests/slurm/test_recovery.py"),
    pytest_part("schedulers", 0.7, "tests/cluster/test_scheduler_protocol.py"),
    pytest_part("own-scheduler", 1.9, "tests/e2e/test_own_scheduler.py"),
    pytest_part("watched", 0.5, "tests/e2e/test_watched.py", alone=True),
    pytest_part("variants", 1.3, "tests/e2e/test_node_types.py"),
    pytest_part("links", 7.7, "tests/slurm/test_links.py", alone=True),
    pytest_part("growing-chain", 1.1, "tests/slurm/test_growing_chain.py"),
    pytest_part("moldable-script", 2.0, "tests/slurm/test_moldable_chain.py"),
    pytest_part("seeds", 0.8, "tests/slurm/test_seeds.py"),
    pytest_part("chaos", 5.5, "tests/slurm/test_chaos.py"),
    pytest_part("killed-at-calls", 1.2, "tests/slurm/test_killed_at_calls.py"),
    pytest_part("cached-attributes", 1.3, "tests/slurm/test_cached_attributes.py", alone=True),
    pytest_part("upgrade", 0.15, "tests/slurm/test_upgrade.py"),
    pytest_part("full-disk", 0.7, "tests/slurm/test_full_disk.py"),
    pytest_part("lost-folder", 3.0, "tests/slurm/test_lost_folder.py"),
    Part("gpu-dry-run", 1.9, ("benchmarks/on_gpu.py", *GPU_DRY_RUN, "--stages", "env,syncs,timing,oom,errors")),
    Part("gpu-dry-run-torch-2.11", 7.2, ("tests/other_torch.py", "2.11.0", "0.26.0", "3.12")),
    Part(
        "lowest-versions",
        4.75,
        ("tests/other_torch.py", "lowest", "3.10", *CORE_TESTS, "--", *TORCH_TESTS, "--", *EXTRAS_TESTS),
    ),
    Part("installed-under-python-3.13", 1.0, ("tests/installed.py", "3.13", *TESTS_WITHOUT_TORCH)),
    Part("script-under-torch-2.0", 5.0, ("tests/oldest_torch.py", "2.0.1")),
    soak_part(1, nodes=16, kills=2, epochs=20, minutes=2.0),
    soak_part(1, nodes=4, least=1, kills=6, epochs=150, minutes=3.2),
)


def select_parts(parts: Sequence[Part], tree: str, budget: float | None) -> list[Part]:
    """Return parts drawn at random, with the hash of the tree as seed, that take up to `budget` minutes.

    If no part fits the budget, return the shortest. Without a budget, return all.
    """
    if budget is None:
        return list(parts)
    fit = [part for part in parts if part.minutes <= budget] or [min(parts, key=lambda part: part.minutes)]
    drawn, remaining = [], budget
    for part in random.Random(tree).sample(fit, len(fit)):
        if part.minutes <= remaining or not drawn:
            drawn.append(part)
            remaining -= part.minutes
    return drawn


def estimate_minutes(parts: Sequence[Part]) -> float:
    """Return the approximate duration of all parts on two idle cores."""
    alone = sum(part.minutes for part in parts if part.alone)
    return alone + sum(part.minutes for part in parts if not part.alone) / PARALLEL_SPEEDUP


def run_git(*words: str, root: Path, **environment: str) -> str:
    """Return the output of a git command."""
    completed = subprocess.run(
        ["git", *words], cwd=root, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return completed.stdout.strip()


def hash_tree(root: Path = ROOT) -> str:
    """Return git's hash of the content of the working tree, including untracked files."""
    with tempfile.TemporaryDirectory() as folder:
        index = str(Path(folder, "index"))
        run_git("add", "--all", root=root, GIT_INDEX_FILE=index)
        return run_git("write-tree", root=root, GIT_INDEX_FILE=index)


def derive_seed(part: Part, seed: int) -> int:
    """Return a seed that differs from the seeds of all other parts."""
    return int.from_bytes(hashlib.sha256(f"{part.name} {seed}".encode()).digest()[:4], "big")


def run_part(part: Part, folder: Path, seed: int) -> bool:
    """Run a part unless it is recorded as passed, print its outcome, and return whether it passed."""
    record, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
    if record.exists():
        print(f"{part.name}: passed before, in {json.loads(record.read_text())['seconds']:.0f} s", flush=True)
        return True
    command = [sys.executable, *(word.format(seed=derive_seed(part, seed)) for word in part.command)]
    print(f"{part.name}: about {part.minutes:g} min: {' '.join(command[1:])}", flush=True)
    start = time.monotonic()
    with open(log, "wb") as output:
        code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    seconds = time.monotonic() - start
    text = log.read_text(errors="replace")
    if code:
        print(text[-MAX_SHOWN_CHARS:])
        print(f"{part.name}: FAILED with exit code {code} after {seconds:.0f} s. Complete output: {log}", flush=True)
        return False
    record.write_text(json.dumps({"seconds": seconds, "command": command[1:]}))
    print(f"{part.name}: passed in {seconds:.0f} s; {text.strip().splitlines()[-1]}", flush=True)
    return True


def run_parts(parts: Sequence[Part], folder: Path, seed: int) -> Iterator[Part]:
    """Run parts, first those that may run two at a time, then the others one by one; yield the parts that fail."""
    together, alone = ([part for part in parts if part.alone is is_alone] for is_alone in (False, True))
    pool = ThreadPoolExecutor(PARALLEL_PARTS)
    try:
        outcomes = pool.map(lambda part: run_part(part, folder, seed), together)
        yield from (part for part, passed in zip(together, outcomes, strict=True) if not passed)
    finally:  # also after Ctrl-C, which ends the running parts: start no more
        pool.shutdown(cancel_futures=True)
    yield from (part for part in alone if not run_part(part, folder, seed))


def parse_minutes(text: str) -> float:
    """Convert "3m", "1h" or "90s" to minutes; raise ValueError for other texts."""
    result = re.fullmatch(r"(\d+(?:\.\d+)?)([hms])", text)
    if result is None:
        raise ValueError(text)
    return float(result[1]) * {"h": 60.0, "m": 1.0, "s": 1 / 60}[result[2]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[[], *(part.name for part in PARTS)])
    parser.add_argument(
        "--budget", type=parse_minutes, help="approximate duration, as 90s, 3m or 1h; default: all parts run"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="list the parts without running them")
    arguments = parser.parse_args()
    if arguments.list:
        for part in PARTS:
            print(f"{part.minutes:5.1f} min  {part.name}{', alone' if part.alone else ''}")
        print(f"{estimate_minutes(PARTS):5.1f} min  all, two at a time")
        return 0
    tree = hash_tree()
    named = [part for part in PARTS if part.name in arguments.parts] or PARTS
    folder = ROOT / ".proof" / f"{tree[:12]}-{arguments.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    failed = [part.name for part in run_parts(select_parts(named, tree, arguments.budget), folder, arguments.seed)]
    print(f"FAILED: {', '.join(failed)}" if failed else f"all passed (tree {tree[:12]}, seed {arguments.seed})")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
