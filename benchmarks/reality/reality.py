"""Compare predictions of `tula recommend` and `tula train` with measurements on real ranks.

    python benchmarks/reality/reality.py [--jobs loop script ...] [--sweeps 3] [--full 2] [--budget 25m] [--out build/reality]
        [--keep FILE.csv] [--json] [--tiny]
    python benchmarks/reality/reality.py --summary benchmarks/results/reality.csv

Computation sleeps (plateau.py: one third in the forward pass and the rest in the backward pass, on a curve with a plateau), so that
four ranks share a small machine; gloo really synchronises. The jobs: `loop` (tula's training loop), `script` (a user's script) and
`fsdp` on 1, 2 and 4 ranks of this machine, and the same as `loop-links`, `script-links` and `fsdp-links` on four nodes of a SLURM
cluster in network namespaces (root, `make slurm-packages`), whose links have a bandwidth and, if the kernel has netem, a delay.

For each job there are several sweeps, each with a recommendation by time and by knee, and several full searches, which measure all
configurations as reference. One training uses the first sweep's recommendation. Compared are the step times of all configurations,
the parts of a training's time, the coverage of the intervals, the differences among the full searches, and the time lost by the
choice. Stages that are complete under --out are not run again.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from comparison import Row, compare_job, format_tables, read_rows, write_rows

HERE = Path(__file__).resolve().parent
KINDS = ("loop", "script", "fsdp")
LINKS_SUFFIX = "-links"
JOBS = (*KINDS, *(f"{kind}{LINKS_SUFFIX}" for kind in KINDS))
DEFAULT_JOBS = ("loop", "loop-links", "script", "fsdp")
NODES = 4  # number of nodes of the SLURM cluster
ONE_JOB = (
    "Licenses=machine:1"  # line of slurm.conf: nodes share this machine's cores, so only one job may run at a time
)
DEFAULT_SECONDS = {"sweep": 70.0, "full": 110.0, "train": 40.0}  # seconds, until a stage of the kind has run
TIME_MARGIN = 1.2  # factor by which a stage may take longer than the previous one

BUILT_IN = """\
model: {name: "plateau:Net"}
dataset: {name: "plateau:Samples"}
optimizer: {name: SGD, lr: 0.01}
"""
SCRIPT = """\
script:
  command: python train_plateau.py --local-batch {local_batch} --epochs {epochs} --out {out}
  length: {epochs: EPOCHS}
  reference: {batch: 32}
  resume: {checkpoint: "{out}/last.pt", batch: epoch}
"""
SEARCH = "max_node_hours: 5, max_minutes: 10, min_seconds: 0"
LOCAL = "{kind: local, device: cpu}"
ON_LINKS = "{kind: slurm, device: cpu, minutes: 20, slurm: {memory: 1500M, extra: {licenses: 'machine:1'}}}"


@dataclass(frozen=True)
class Stage:
    """One step of the benchmark: a search with its recommendations, or the training."""

    job: str
    kind: str  # "sweep", "full", "train"
    number: int

    @property
    def name(self) -> str:
        return self.kind if self.kind == "train" else f"{self.kind}{self.number}"

    def path(self, out: Path) -> Path:
        """Return the file with its results, which exists when the stage is complete."""
        return out / self.job / f"{self.name}.json"


class StageFailed(Exception):
    """A command of a stage failed; the message is the end of its output."""


class Tula:
    """The command line of this environment in a job's folder."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        given = {**os.environ, **environment}
        path = f"{Path(sys.executable).parent}{os.pathsep}{given['PATH']}"  # also for `python` in the script's command
        self.environment = {**given, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

    def __call__(self, *arguments: str) -> dict[str, Any]:
        """Run a command with --json; return its data, or raise StageFailed."""
        command = [sys.executable, "-m", "tula_cli", *arguments, "--json"]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if done.returncode != 0:
            raise StageFailed(f"tula {' '.join(arguments)}: exit code {done.returncode}: {done.stderr[-1500:]}")
        data: dict[str, Any] = json.loads(done.stdout)["data"]
        return data


# --- stages


def uses_cluster(job: str) -> bool:
    """Return whether a job runs on the nodes of the SLURM cluster."""
    return job.endswith(LINKS_SUFFIX)


def plan_stages(jobs: Sequence[str], *, sweeps: int, full: int) -> list[Stage]:
    """Return all stages in the order in which they run: first one of each kind for each job, then the repetitions."""
    stages = []
    for number in range(1, max(sweeps, full) + 1):
        for job in jobs:
            stages += [Stage(job, "sweep", number)] * (number <= sweeps)
            stages += [Stage(job, "full", number)] * (number <= full)
            stages += [Stage(job, "train", 1)] * (number == 1)
    return stages


def render_job(job: str, strategy: str, *, tiny: bool) -> str:
    """Return the job file of a job."""
    kind = job.removesuffix(LINKS_SUFFIX)
    epochs, nodes, steps, seconds = (1, [1, 2], 5, 0.001) if tiny else (10, [1, 2, 4], 10, 1.5)
    if kind == "script":
        work = SCRIPT.replace("EPOCHS", str(epochs))
        train = "{method: lbt}"
    else:
        work = BUILT_IN
        parallel = "fsdp" if kind == "fsdp" else "ddp"
        train = f"{{epochs: {epochs}, method: lbt, workers: 0, reference_batch: 32, parallel: {parallel}}}"
    return f"""\
name: {job}
{work}train: {train}
search: {{nodes: {nodes}, min_batch: 32, max_batch: 256, strategy: {strategy}, min_steps: {steps},
         max_seconds: {seconds}, {SEARCH}}}
cluster: {ON_LINKS if uses_cluster(job) else LOCAL}
pricing: {{kind: node_hour, price: 1.0}}
"""


def write_files(folder: Path, job: str, *, tiny: bool) -> None:
    """Write the job files and the modules that they name; up-to-date files are not touched."""
    folder.mkdir(parents=True, exist_ok=True)
    modules = {name: (HERE / name).read_text() for name in ("plateau.py", "train_plateau.py")}
    jobs = {f"{strategy}.yaml": render_job(job, strategy, tiny=tiny) for strategy in ("sweep", "full")}
    for name, text in {**modules, **jobs}.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def run_stage(stage: Stage, tula: Tula, seconds: float) -> dict[str, Any]:
    """Run a stage and return its results; its jobs are cancelled after `seconds`."""
    runs = "sweep1" if stage.kind == "train" else stage.name
    where = ("full.yaml" if stage.kind == "full" else "sweep.yaml", "--run-dir", runs)
    wait = ("--yes", "--wait", "--timeout", f"{seconds:.0f}")
    try:
        if stage.kind == "train":
            return {"train": tula("train", *where, *wait)}
        profile = tula("profile", *where, *wait)
        by = {name: tula("recommend", *where, "--objective", name) for name in ("time", "knee")}
    except (StageFailed, KeyboardInterrupt):
        with suppress(StageFailed):  # there may be no submitted job
            tula("cancel", "--run-dir", runs)
        raise
    return {"profile": profile, **by}


def estimate_seconds(stage: Stage, out: Path) -> float:
    """Return the expected duration of a stage: the maximum of its kind for this job with a margin; else for all jobs; else a default."""
    seconds = {path: json.loads(path.read_text())["seconds"] for path in sorted(out.glob(f"*/{stage.kind}*.json"))}
    same_job = [value for path, value in seconds.items() if path.parent.name == stage.job]
    measured = same_job or list(seconds.values())
    return TIME_MARGIN * max(measured) if measured else DEFAULT_SECONDS[stage.kind]


def run_stages(
    stages: Sequence[Stage], out: Path, *, deadline: float, tiny: bool, cluster: Mapping[str, str]
) -> Iterator[tuple[Stage, str]]:
    """Run the stages that are not complete; yield those that remain incomplete, each with its reason.

    Args:
        stages: in their order.
        out: folder of all jobs.
        deadline: by time.monotonic().
        tiny: whether searches are minimal.
        cluster: environment variables of the SLURM cluster for commands.
    """
    failed: set[str] = set()
    for stage in stages:
        if stage.path(out).exists():
            continue
        expected, remaining = estimate_seconds(stage, out), deadline - time.monotonic()
        if expected > remaining:
            yield stage, f"it takes about {expected:.0f} s, and {max(remaining, 0):.0f} s are left"
        elif stage.kind == "train" and not Stage(stage.job, "sweep", 1).path(out).exists():
            yield stage, "there is no recommendation to follow"
        elif stage.job in failed:
            yield stage, "a stage of this job has failed"
        else:
            print(
                f"{stage.job}: {stage.name}, about {expected:.0f} s; {remaining / 60:.0f} min left",
                file=sys.stderr,
                flush=True,
            )
            write_files(out / stage.job, stage.job, tiny=tiny)
            began = time.monotonic()
            try:
                results = run_stage(stage, Tula(out / stage.job, cluster if uses_cluster(stage.job) else {}), remaining)
            except StageFailed as failure:
                failed.add(stage.job)
                yield stage, str(failure)
                continue
            draft = stage.path(out).with_suffix(".draft")
            draft.write_text(json.dumps({"seconds": time.monotonic() - began, **results}))
            draft.replace(stage.path(out))


def load_rows(stages: Sequence[Stage], out: Path) -> list[Row]:
    """Return the rows of all complete stages."""
    rows = []
    for job in dict.fromkeys(stage.job for stage in stages):
        complete = {
            stage: json.loads(stage.path(out).read_text())
            for stage in stages
            if stage.job == job and stage.path(out).exists()
        }
        sweeps = {stage.number: data for stage, data in complete.items() if stage.kind == "sweep"}
        truths = [data for stage, data in complete.items() if stage.kind == "full"]
        training = next((data["train"] for stage, data in complete.items() if stage.kind == "train"), None)
        rows += compare_job(job, sweeps, truths, training)
    return rows


# --- the cluster


def _cluster_module() -> Any:
    folder = str(HERE.parents[1] / "tests" / "slurm")
    if folder not in sys.path:
        sys.path.append(folder)
    return import_module("cluster")


@contextmanager
def cluster_with_links(rate: str, delay: str) -> Iterator[dict[str, str]]:
    """Start a SLURM cluster whose links have a bandwidth and a delay in tc's notation; return its environment variables."""
    with _cluster_module().SlurmCluster(NODES, prefix=f"r{os.getpid()}n", rate=rate, extra=ONE_JOB) as cluster:
        if delay and not delay_links(cluster, rate, delay):
            print(f"links have {rate} and no delay: the kernel has no netem", file=sys.stderr, flush=True)
        yield cluster.env


def delay_links(cluster: Any, rate: str, delay: str) -> bool:
    """Add a delay to both directions of each link; return whether the kernel supports this."""
    for number, name in enumerate(cluster.names, 1):
        for link in (["qdisc", "replace", "dev", f"link{number}"], ["-n", name, "qdisc", "replace", "dev", "eth0"]):
            shape = ["root", "netem", "rate", rate, "delay", delay]
            if cluster.run("login", "tc", *link, *shape, check=False).returncode:
                return False
    return True


# --- the command line


def parse_duration(text: str) -> float:
    """Convert a duration such as 90s, 25m or 1.5h to seconds; a plain number is in minutes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration such as 90s, 25m or 1.5h")
    return float(match[1]) * {"s": 1, "m": 60, "": 60, "h": 3600}[match[2]]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--jobs", nargs="+", choices=JOBS, help=f"{' '.join(DEFAULT_JOBS)}, where there can be a cluster"
    )
    parser.add_argument("--sweeps", type=int, default=3, help="sweeps of each job (%(default)s)")
    parser.add_argument("--full", type=int, default=2, help="full searches of each job (%(default)s)")
    parser.add_argument(
        "--budget", type=parse_duration, default="25m", help="start no stage that does not end in it (%(default)s)"
    )
    parser.add_argument("--rate", default="200mbit", help="bandwidth of each link (%(default)s)")
    parser.add_argument("--delay", default="500us", help="of each link, each way (%(default)s); empty for none")
    parser.add_argument("--tiny", action="store_true", help="searches on 1 and 2 nodes, one epoch")
    parser.add_argument("--out", type=Path, default=Path("build/reality"), help="folder of all results (%(default)s)")
    parser.add_argument("--keep", type=Path, metavar="FILE.csv", help="write the rows that the tables are made of")
    parser.add_argument(
        "--summary", type=Path, metavar="FILE.csv", help="print the tables of such a file, and run nothing"
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    return parser.parse_args(words)


def main() -> int:
    options = parse_arguments()
    if options.summary:
        print_rows(read_rows(options.summary), as_json=options.json)
        return 0
    out = options.out.absolute() / ("tiny" if options.tiny else "")
    jobs = options.jobs or list(DEFAULT_JOBS)
    if any(map(uses_cluster, jobs)) and (reason := _cluster_module().describe_why_no_cluster()):
        if options.jobs:
            sys.exit(f"no cluster can run here: {reason}")
        print(f"no jobs on links: {reason}", file=sys.stderr)
        jobs = [job for job in jobs if not uses_cluster(job)]
    deadline = time.monotonic() + options.budget
    stages = plan_stages(jobs, sweeps=options.sweeps, full=options.full)
    needs_cluster = any(uses_cluster(stage.job) and not stage.path(out).exists() for stage in stages)
    links: AbstractContextManager[dict[str, str]] = (
        cluster_with_links(options.rate, options.delay) if needs_cluster else nullcontext({})
    )
    with links as cluster:
        missing = list(run_stages(stages, out, deadline=deadline, tiny=options.tiny, cluster=cluster))
    for stage, reason in missing:
        print(f"missing: {stage.job} {stage.name}: {reason}", file=sys.stderr)
    rows = load_rows(stages, out)
    if options.keep:
        write_rows(options.keep, rows)
    print_rows(rows, as_json=options.json)
    return 1 if missing else 0


def print_rows(rows: Sequence[Row], *, as_json: bool) -> None:
    print(json.dumps([asdict(row) for row in rows], indent=1) if as_json else format_tables(rows))


if __name__ == "__main__":
    sys.exit(main())
