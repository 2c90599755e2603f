"""The second tier of the tests: what is too long for `make test`, in parts.

    python tests/proof.py [--budget 3m] [--seed 0] [--list] [PART ...]

A part is a command; its seed follows from --seed. What has passed is kept in .proof/, under the content of the tree and
the seed, so that the same call goes on where one was broken off. With a budget the tree's content decides which parts
run: another commit, other parts. Two parts run at a time, as most wait for processes and clusters more than they compute;
those that measure times run after them, one by one. A new part is one more entry in PARTS.
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
TOLD = 4000  # characters of a failed part's output that are shown
AT_A_TIME = min(2, os.cpu_count() or 1)
FASTER = 1.5
"""By which two cores run parts two at a time faster than one by one."""


@dataclass(frozen=True)
class Part:
    """A command that proves something, and about how long it takes by itself on two idle cores."""

    name: str
    minutes: float
    command: tuple[str, ...]  # of Python's arguments; {seed} stands for the part's own seed
    alone: bool = False  # it measures times, which another part beside it would change


def cases(name: str, minutes: float, path: str, *options: str, alone: bool = False) -> Part:
    """Return a part that runs the tests marked `proof` of a module, or those of them that pytest's options name."""
    pytest = ("-m", "pytest", "-q", "-m", "proof", "-p", "no:cacheprovider", "--hypothesis-seed={seed}")
    return Part(name, minutes, (*pytest, path, *options), alone)


def soak(number: int, *, nodes: int, kills: int, epochs: int, minutes: float, least: int | None = None) -> Part:
    """Return a part that kills a training on a SLURM cluster again and again; each number has moments of its own."""
    subject = None if least is None else "either"
    wishes = {"nodes": nodes, "kills": kills, "epochs": epochs, "seed": "{seed}", "least": least, "subject": subject}
    options = [word for name, value in wishes.items() if value is not None for word in (f"--{name}", str(value))]
    sizes = nodes if least is None else f"{least}-to-{nodes}"
    return Part(f"soak-{sizes}-nodes-{number}", minutes, ("tests/slurm/soak.py", *options))


GPU = ("--device", "cpu", "--tiny", "--again", "--out", ".proof/gpu")
"""Under another torch all stages run; under the newest one, those that ask torch for something of their own."""
SHORT = ("-m", "not proof and not torch", *(f"tests/{room}" for room in ("cli", "models", "spec", "services", "show")))
"""Tests without torch, for what tula takes of the libraries that it always has."""
LIGHT = ("-m", "not proof and not torch", "tests/models", "tests/spec", "tests/show")
"""Tests that pass where torch is not installed."""
_WITHOUT_TORCH = (
    *("-m", "not e2e and not torch and not slurm and not proof"),
    *(f"tests/{folder}" for folder in ("cli", "run", "services", "show")),
)
"""Tests of the core without its optional packages, of the folders that may ask for them (an import contract holds the others)."""
_GIVEN = "two_ranks or test_gradients or test_probe or test_operations or test_device or test_ranks or test_table"
OF_TORCH = ("tests/worker", "tests/optim", "-k", _GIVEN)
"""Tests of what torch gives and tula relies on, of which the lowest versions that it allows may give less."""
OF_EXTRAS = (
    *(f"tests/worker/{name}.py" for name in ("build/test_finetune", "build/test_source_text")),
    "tests/extras/trackers/test_trackers.py",
)
"""Tests of weights in safetensors, of transformers and of the trackers."""

PARTS = (
    cases("fuzzed-runs", 1.5, "tests/cli/test_fuzzed_runs.py"),
    cases("fuzzed-specs", 0.3, "tests/spec/test_fuzzed_specs.py"),
    cases("paper-jobs", 1.0, "tests/worker/measure/test_paper_jobs.py"),
    cases("inspected-paper-jobs", 0.25, "tests/worker/measure/test_inspect.py"),
    cases("step-files", 0.2, "tests/worker/train/test_step_files.py"),
    cases("stages-by-noise", 0.2, "tests/worker/train/watching/test_measured_noise.py"),
    cases("golden-commands", 1.0, "tests/golden/test_golden_commands.py"),
    cases("golden-commands-of-extras", 0.3, "tests/extras/test_golden_commands_of_extras.py"),
    cases("golden-trainings", 1.8, "tests/golden/test_golden_trainings.py"),
    Part("core-alone", 4, ("tests/helpers/without_extras.py", "-n", "2", *_WITHOUT_TORCH)),
    cases("core-commands", 0.5, "tests/test_without_extras.py"),
    cases("trackers", 0.25, "tests/extras/trackers/test_trackers.py"),
    cases("recompute", 0.5, "tests/worker/build/test_recompute.py"),
    cases("compiled", 1.0, "tests/worker/build/test_compiled.py"),
    cases("footprint", 1.5, "tests/worker/measure/test_footprint.py"),
    cases("four-ranks", 0.5, "tests/worker/methods/test_methods_ranks.py"),
    cases("four-ranks-of-ddp", 0.5, "tests/optim/test_tula_ddp.py"),
    cases("mutants", 0.5, "tests/optim/test_mutants.py"),
    cases("trainers", 0.3, "tests/shim/test_trainers.py"),
    cases("observed-jobs", 0.9, "tests/shim/test_observe.py"),
    cases("examples", 1.2, "tests/test_examples.py"),
    cases("slurm-versions", 0.3, "tests/cluster/test_launcher.py"),
    cases("checks-of-a-cluster", 1.7, "tests/slurm/test_check_on_cluster.py", alone=True),
    cases("measuring-lock", 0.5, "tests/host/test_machine_lock.py"),
    cases("secrets", 0.4, "tests/e2e/test_secrets.py"),
    cases("bounded-grid-and-ends", 1.0, "tests/e2e/test_main_job.py"),
    cases("compared-script", 0.35, "tests/e2e/test_compare_script.py"),
    cases("learning-rates-of-a-script", 0.28, "tests/e2e/test_script_learning_rates.py"),
    cases("nodes-by-stage", 0.4, "tests/e2e/test_stage_nodes.py"),
    cases("own-scripts", 0.8, "tests/e2e/test_own_script.py"),
    cases("moved-run", 0.5, "tests/e2e/test_moved_run.py"),
    cases("reported-replays", 0.25, "tests/benchmarks/test_replay.py"),
    cases("containers", 0.3, "tests/cluster/slurm/test_containers.py"),
    cases("test-cluster", 1.2, "tests/slurm/test_cluster.py"),
    cases("meeting-nodes", 0.3, "tests/slurm/test_meeting.py"),
    cases("on-a-cluster", 1.6, "tests/slurm/test_tula.py"),
    cases("scaled-scripts", 0.5, "tests/shim/test_ags.py"),
    cases("orthogonal-scripts", 0.3, "tests/shim/test_ortho.py"),
    cases("other-peoples-loops", 1.0, "tests/shim/test_other_peoples_loops.py"),
    cases("other-peoples-scripts", 2.0, "tests/e2e/test_other_peoples_scripts.py"),
    cases("stragglers", 0.8, "tests/e2e/test_stragglers.py", alone=True),
    cases("out-of-memory", 1.6, "tests/e2e/test_out_of_memory.py"),
    cases("largest-batch", 0.8, "tests/e2e/test_largest_batch.py"),
    cases("own-batches", 5.2, "tests/e2e/test_own_batches.py"),
    cases("failing-loader", 2.2, "tests/e2e/test_failing_loader.py"),
    cases("scripts-on-slurm", 3.0, "tests/slurm/test_script_on_slurm.py"),
    cases("resuming-trainers", 2.0, "tests/e2e/test_resuming_trainers.py"),
    cases("first-job", 0.6, "tests/slurm/test_first_job.py"),
    cases("reality", 1.0, "tests/benchmarks/test_reality.py"),
    cases("recovery", 4.5, "tests/slurm/test_recovery.py"),
    cases("schedulers", 0.7, "tests/cluster/test_scheduler_protocol.py"),
    cases("own-scheduler", 1.9, "tests/e2e/test_own_scheduler.py"),
    cases("watched", 0.5, "tests/e2e/test_watched.py", alone=True),
    cases("variants", 1.3, "tests/e2e/test_node_types.py"),
    cases("links", 7.7, "tests/slurm/test_links.py", alone=True),
    cases("growing-chain", 1.1, "tests/slurm/test_growing_chain.py"),
    cases("moldable-script", 2.0, "tests/slurm/test_moldable_chain.py"),
    cases("seeds", 0.8, "tests/slurm/test_seeds.py"),
    cases("chaos", 5.5, "tests/slurm/test_chaos.py"),
    cases("killed-at-calls", 1.2, "tests/slurm/test_killed_at_calls.py"),
    cases("cached-attributes", 1.3, "tests/slurm/test_cached_attributes.py", alone=True),
    cases("upgrade", 0.15, "tests/slurm/test_upgrade.py"),
    cases("full-disk", 0.7, "tests/slurm/test_full_disk.py"),
    cases("lost-folder", 3.0, "tests/slurm/test_lost_folder.py"),
    Part("gpu-dry-run", 1.9, ("benchmarks/on_gpu.py", *GPU, "--stages", "env,syncs,timing,oom,errors")),
    Part("gpu-dry-run-torch-2.11", 7.2, ("tests/other_torch.py", "2.11.0", "0.26.0", "3.12")),
    Part(
        "lowest-versions", 4.75, ("tests/other_torch.py", "lowest", "3.10", *SHORT, "--", *OF_TORCH, "--", *OF_EXTRAS)
    ),
    Part("installed-under-python-3.13", 1.0, ("tests/installed.py", "3.13", *LIGHT)),
    Part("script-under-torch-2.0", 5.0, ("tests/oldest_torch.py", "2.0.1")),
    soak(1, nodes=16, kills=2, epochs=20, minutes=2.0),
    soak(1, nodes=4, least=1, kills=6, epochs=150, minutes=3.2),
)


def chosen(parts: Sequence[Part], tree: str, budget: float | None) -> list[Part]:
    """Return the parts that a tree's hash draws for so many minutes, the shortest where none fits; all without a budget."""
    if budget is None:
        return list(parts)
    fit = [part for part in parts if part.minutes <= budget] or [min(parts, key=lambda part: part.minutes)]
    drawn, remaining = [], budget
    for part in random.Random(tree).sample(fit, len(fit)):
        if part.minutes <= remaining or not drawn:
            drawn.append(part)
            remaining -= part.minutes
    return drawn


def planned(parts: Sequence[Part]) -> float:
    """Return about how many minutes parts take on two idle cores."""
    alone = sum(part.minutes for part in parts if part.alone)
    return alone + sum(part.minutes for part in parts if not part.alone) / FASTER


def git(*words: str, root: Path, **environment: str) -> str:
    """Return what a git command prints."""
    done = subprocess.run(
        ["git", *words], cwd=root, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def tree_hash(root: Path = ROOT) -> str:
    """Return git's name for the content of the working tree as it stands, files that are new included."""
    with tempfile.TemporaryDirectory() as folder:
        index = str(Path(folder, "index"))
        git("add", "--all", root=root, GIT_INDEX_FILE=index)
        return git("write-tree", root=root, GIT_INDEX_FILE=index)


def own_seed(part: Part, seed: int) -> int:
    """Return a seed that no other part has."""
    return int.from_bytes(hashlib.sha256(f"{part.name} {seed}".encode()).digest()[:4], "big")


def passes(part: Part, folder: Path, seed: int) -> bool:
    """Run a part unless its success is recorded; tell what came of it."""
    record, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
    if record.exists():
        print(f"{part.name}: passed before, in {json.loads(record.read_text())['seconds']:.0f} s", flush=True)
        return True
    command = [sys.executable, *(word.format(seed=own_seed(part, seed)) for word in part.command)]
    print(f"{part.name}: about {part.minutes:g} min: {' '.join(command[1:])}", flush=True)
    began = time.monotonic()
    with open(log, "wb") as output:
        code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    seconds = time.monotonic() - began
    lines = log.read_text(errors="replace")
    if code:
        print(f"{lines[-TOLD:]}\n{part.name}: FAILED with {code} after {seconds:.0f} s; all of it: {log}", flush=True)
        return False
    record.write_text(json.dumps({"seconds": seconds, "command": command[1:]}))
    print(f"{part.name}: passed in {seconds:.0f} s; {lines.strip().splitlines()[-1]}", flush=True)
    return True


def failing(parts: Sequence[Part], folder: Path, seed: int) -> Iterator[Part]:
    """Run parts, those that need not be alone two at a time and first; yield those that fail."""
    together, alone = ([part for part in parts if part.alone is is_alone] for is_alone in (False, True))
    runners = ThreadPoolExecutor(AT_A_TIME)
    try:
        ends = runners.map(lambda part: passes(part, folder, seed), together)
        yield from (part for part, passed in zip(together, ends, strict=True) if not passed)
    finally:  # also after Ctrl-C: what has begun ends by it, and nothing more begins
        runners.shutdown(cancel_futures=True)
    yield from (part for part in alone if not passes(part, folder, seed))


def minutes(text: str) -> float:
    """Return the minutes of "3m", "1h" or "90s"; raises ValueError for anything else."""
    result = re.fullmatch(r"(\d+(?:\.\d+)?)([hms])", text)
    if result is None:
        raise ValueError(text)
    return float(result[1]) * {"h": 60.0, "m": 1.0, "s": 1 / 60}[result[2]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[[], *(part.name for part in PARTS)])
    parser.add_argument("--budget", type=minutes, help="about how long: 90s, 3m, 1h; without it, all parts run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="show the parts, run none")
    arguments = parser.parse_args()
    if arguments.list:
        for part in PARTS:
            print(f"{part.minutes:5.1f} min  {part.name}{', alone' if part.alone else ''}")
        print(f"{planned(PARTS):5.1f} min  all, two at a time")
        return 0
    tree = tree_hash()
    named = [part for part in PARTS if part.name in arguments.parts] or PARTS
    folder = ROOT / ".proof" / f"{tree[:12]}-{arguments.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    failed = [part.name for part in failing(chosen(named, tree, arguments.budget), folder, arguments.seed)]
    print(f"FAILED: {', '.join(failed)}" if failed else f"all passed (tree {tree[:12]}, seed {arguments.seed})")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
