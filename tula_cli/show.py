"""Everything that is printed: the answer to stdout, all else to stderr. The only module that imports rich.

With `--json` the answer is one object, also on failure. rich and plotext are imported where they are used, so that
`tula --help` and `--json` do not wait for them.
"""

import dataclasses
import json
import math
import os
import shlex
import shutil
import sys
import textwrap
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tula_cli.errors import SpecError, TulaError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from tula_cli.check import CheckReport, ClusterCheck
    from tula_cli.compare import ComparePlan, CompareReport, Progress, Row, Stat
    from tula_cli.estimate import EstimateReport
    from tula_cli.jobfile import Edited
    from tula_cli.profile import ProfilePlan, ProfileReport
    from tula_cli.records import (
        Attempt,
        Branch,
        CheckTask,
        ClusterReport,
        Failed,
        Inspection,
        Measured,
        NodeReport,
        OutOfMemory,
        Prediction,
        Recommendation,
        Summary,
        TrainTask,
    )
    from tula_cli.scheduler import SchedulerState
    from tula_cli.site import Site
    from tula_cli.status import JobStatus, RunStatus, RunSummary, TrainingStatus, TuningStatus
    from tula_cli.train import TrainPlan

_CHANGES = 6  # of an edited job, that are spelled out
SCHEMA_VERSION = 1
"""Of the JSON envelope; a change that breaks a reader makes it 2."""


@dataclass(frozen=True)
class Origin:
    """A value of the spec and the file, variable or flag it comes from."""

    value: Any
    source: str


class Screen:
    """Where the words of one command go.

    Args:
        command: its name, for the envelope.
        as_json: the answer is one JSON object.
        quiet: nothing on stderr but warnings and errors.
        verbose: tracebacks and details as well.
        color: False for none; None asks the terminal, NO_COLOR and TERM.
        out: stdout, another one in tests.
        err: stderr, another one in tests.
    """

    def __init__(
        self,
        command: str = "",
        *,
        as_json: bool = False,
        quiet: bool = False,
        verbose: bool = False,
        color: bool | None = None,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> None:
        self.command = command
        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose
        self.color = color
        self.out = out or sys.stdout
        self.err = err or sys.stderr
        self.run_id: str | None = None
        self.status = "done"
        self.warnings: list[str] = []
        self._data: Any = None
        self._answered = False
        self.drawn: Console | None = None  # draws in place on stderr

    def expect(self, arguments: Sequence[str]) -> None:
        """Guess command and flags from the arguments, for what is wrong before they are parsed."""
        self.command = next((word for word in arguments if not word.startswith("-")), "")
        self.as_json = "--json" in arguments
        self.verbose = "-v" in arguments or "--verbose" in arguments
        self.color = False if "--no-color" in arguments else None

    # --- words beside the answer

    def note(self, text: str) -> None:
        """Say what goes on."""
        if not self.quiet:
            self._say(text)

    def warn(self, text: str) -> None:
        """Say something once that the user should know; the envelope carries it too."""
        if text not in self.warnings:
            self.warnings.append(text)
            self._say(f"warning: {text}")

    def _say(self, text: str) -> None:
        """Write to stderr; on a terminal without breaking words, and above what is drawn there."""
        if self.drawn is not None:
            self.drawn.print(text)
            return
        if self.err.isatty():
            width = shutil.get_terminal_size().columns
            text = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
        print(text, file=self.err, flush=True)

    def confirm(self, question: str) -> bool:
        """Ask on the terminal; anything but yes is no."""
        print(f"{question} [y/N] ", end="", file=self.err, flush=True)
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    # --- the answer

    def answer(self, data: Any, parts: Iterable["RenderableType"]) -> None:
        """Give the answer: `data` in the envelope, or else the parts, which are made only when they are shown."""
        self._answered = True
        if self.as_json:
            self._data = plain(data)
            return
        console = self._console(self.out)
        for part in parts:
            _print(console, part)

    def aside(self, parts: Iterable["RenderableType"]) -> None:
        """Show parts that are not the answer, on stderr."""
        if not self.quiet:
            console = self._console(self.err)
            for part in parts:
                _print(console, part)

    def line(self, text: str, data: Any) -> None:
        """Give one line of an answer that has no end (`tula logs`): text, or one JSON object a line."""
        print(json.dumps(plain(data)) if self.as_json else text, file=self.out, flush=True)

    def finish(self) -> None:
        """Print the envelope of a command that has an answer."""
        if self.as_json and self._answered:
            self._envelope(None)

    def fail(self, error: TulaError) -> None:
        """Say what is wrong and what to do about it; the envelope says the same."""
        if self.as_json:
            self._envelope(error)
        console = self._console(self.err)
        _print(console, _styled(f"error: {error.message}", "bold red", until=6))
        for problem in error.problems if isinstance(error, SpecError) else ():
            _print(console, f"  {problem}")
        if error.hint:
            _print(console, _styled(f"HINT: {error.hint}", "cyan", until=5))
        if self.verbose and error.__cause__ is not None:
            traceback.print_exception(error.__cause__, file=self.err)

    def _envelope(self, error: TulaError | None) -> None:
        envelope = {
            "schema_version": SCHEMA_VERSION,
            "command": self.command,
            "run_id": self.run_id,
            "status": self.status if error is None else "pending" if error.code == "pending" else "failed",
            "data": self._data,
            "warnings": self.warnings,
            "error": None if error is None else _error(error),
        }
        print(json.dumps(envelope, indent=1, allow_nan=False), file=self.out, flush=True)

    @property
    def width(self) -> int:
        """Columns of stdout; 80 where it is no terminal and COLUMNS says nothing."""
        return self._console(self.out).width

    @property
    def colored(self) -> bool:
        """Whether the answer may have colours."""
        return self._console(self.out).color_system is not None

    @contextmanager
    def live(self) -> Iterator["Live"]:
        """Show a status that changes: drawn in place on a terminal, otherwise one line a change."""
        if self.quiet:
            yield Live(self)
        elif not self.err.isatty() or os.environ.get("TERM") == "dumb" or self.as_json:
            yield ChangesLive(self)
        else:
            with DrawnLive(self) as drawn:
                yield drawn

    def _console(self, file: TextIO) -> "Console":
        from rich.console import Console

        no_color = self.color is False or bool(os.environ.get("NO_COLOR"))
        return Console(file=file, no_color=no_color, color_system=None if no_color else "auto", highlight=False, markup=False, emoji=False)  # fmt: skip


def _error(error: TulaError) -> dict[str, Any]:
    problems = error.problems if isinstance(error, SpecError) else ()
    return {"code": error.code, "message": error.message, "hint": error.hint, "problems": plain(problems)}


def plain(value: Any) -> Any:
    """Return a value in what JSON knows; a number that is none (nan, inf) is null."""
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(mode="json"))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


# --- numbers and words


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with `digits` significant digits, all of its digits before the point, and no exponent."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(decimals, 0), 12)}f}"


def duration(seconds: float | None) -> str:
    """Return a time with its unit."""
    if seconds is None:
        return "-"
    divisor, unit = time_unit(seconds)
    return f"{number(seconds / divisor)} {unit}"


def time_unit(longest: float) -> tuple[float, str]:
    """Return the unit in which a column up to `longest` seconds is read best: its seconds and its name."""
    if longest < 120:
        return 1.0, "s"
    return (60.0, "min") if longest < 7200 else (3600.0, "h")


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def place(nodes: int, batch: int, local_batch: int) -> str:
    """Return a configuration in words, with both of its batches."""
    return f"{plural(nodes, 'node')}, batch {batch} (local {local_batch})"


def near(path: Path) -> str:
    """Return a path as it is seen from the working directory, where it lies in it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def size_unit(largest: float | None) -> tuple[float, str]:
    """Return the unit in which a column up to `largest` bytes is read best: its bytes and its name."""
    return (1024**2, "MiB") if largest is not None and largest < 1024**3 else (1024**3, "GiB")


def size(value: float | None, divisor: float) -> str:
    return "-" if value is None else number(value / divisor)


def amount(value: float) -> str:
    """Return bytes with their unit."""
    divisor, unit = size_unit(value)
    return f"{number(value / divisor)} {unit}"


def moment(at: float | None) -> str:
    return "-" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


# --- tables


def table(columns: Sequence[str], *, left: Iterable[int] = (0,)) -> "Table":
    """Return an empty table; the columns numbered in `left` are words, the others numbers. A heading may have lines."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, header_style="bold")
    words = set(left)
    for index, heading in enumerate(columns):
        made.add_column(heading, justify="left" if index in words else "right", no_wrap=True, vertical="bottom")
    return made


def _print(console: "Console", part: "RenderableType") -> None:
    """Print a part; a table keeps the width it needs, words wrap on a terminal and are left alone in a file."""
    from rich.table import Table

    if isinstance(part, Table):
        width = console.width
        console.width = max(width, _fit(part, console))
        console.print(part, crop=False)
        console.width = width
    else:
        console.print(part, soft_wrap=not console.is_terminal)


def _fit(part: "Table", console: "Console") -> int:
    """Move a table's columns together where they are wider than the console; return the columns it needs."""
    from rich.measure import Measurement

    unbound = console.options.update(max_width=10_000)
    if Measurement.get(console, unbound, part).maximum > console.width:
        part.padding = 0
    return Measurement.get(console, unbound, part).maximum


def _styled(text: str, style: str, *, until: int | None = None) -> "RenderableType":
    from rich.text import Text

    made = Text(text)
    made.stylize(style, 0, until)
    return made


# --- before anything is submitted


def check(report: "CheckReport", origins: Mapping[str, Origin]) -> Iterator["RenderableType"]:
    """What the job is, what it would search, what that may cost; or where each value of the spec comes from."""
    if origins:
        made = table(("key", "value", "from"), left=range(3))
        for key, origin in origins.items():
            made.add_row(key, json.dumps(origin.value), origin.source)
        yield made
        yield ""
    if report.inspection is not None:
        yield from inspection(report.inspection)
        yield ""
    if not report.jobs:
        return
    made = table(("nodes", "probes", "global batches", "local batches"), left=(2, 3))
    for job in report.jobs:
        made.add_row(str(job.nodes), str(len(job.local_batches)), _list(job.batches), _list(job.local_batches))
    yield made
    yield ""
    yield f"{plural(report.probes, 'probe')} in {plural(len(report.jobs), 'job')}"
    yield _at_most(report.machine_hours_at_most, report.node_hours_at_most, report.price_at_most, report.currency)
    yield f"price: {report.price}"


def inspection(found: "Inspection") -> Iterator["RenderableType"]:
    """Model, data and hardware, a line each."""
    shape = "x".join(map(str, found.sample_shape))
    classes = "" if found.classes is None else f", {found.classes} classes"
    capacity = "memory not known" if found.capacity is None else f"{amount(found.capacity)} for each rank"
    yield f"model: {found.parameters} parameters"
    yield f"data: {found.dataset_size} samples to train on, {found.eval_size} to evaluate, of shape {shape}{classes}"
    yield f"hardware: {found.hardware} ({found.device}), {capacity}"


def offered(site: "Site | None") -> str:
    """Return what `tula init slurm` has filled in, in words."""
    from tula_cli.site import describe, with_gpus

    if site is None:
        return "no scheduler answers here: the cluster section is as it comes with tula; fill it in"
    own = site.default
    if own is None:
        return f"no partition is the default: name one of {', '.join(p.name for p in site.partitions)}"
    words = f"filled in from the scheduler: partition {describe(own)}"
    others = [partition.name for partition in with_gpus(site.partitions) if partition is not own]
    if others and own not in with_gpus(site.partitions):
        words += f"; {', '.join(others)} {'has' if len(others) == 1 else 'have'} GPUs"
    return words


def check_state(task: "CheckTask", state: "SchedulerState") -> str:
    """Return what a check of the cluster waits for."""
    starts = "" if state.starts_at is None else f", expected to start at {moment(state.starts_at)}"
    reason = f" ({state.reason})" if state.reason else ""
    return f"{task.job} on {plural(task.nodes, 'node')}: {state.state}{reason}{starts}"


def cluster_check(found: "ClusterCheck") -> Iterator["RenderableType"]:
    """A row a node for what it has and one for how it is reached, then the network."""
    report = found.report
    names = _node_names(report)
    made = table(("node", "ranks", "GPUs", "driver", "torch", "CUDA", "NCCL", "CPUs\na rank", "memory\n(GiB)"), left=(0, 2, 3, 4, 5, 6))  # fmt: skip
    for name, node in zip(names, report.nodes, strict=True):
        made.add_row(
            name, str(node.ranks), _gpus(node), node.driver or "-", node.torch, node.cuda or "-", node.nccl or "-",
            str(node.cpus), size(node.memory, 1024**3),
        )  # fmt: skip
    yield made
    yield ""
    made = table(("node", "interface", "address", "clock\n(ms)", "folder", "dataset", "free disk\n(GiB)"), left=(0, 1, 2, 4, 5))  # fmt: skip
    for name, node in zip(names, report.nodes, strict=True):
        made.add_row(
            name, node.interface or "-", node.address, _clock(node), "read only" if node.write_error else "shared",
            {True: "readable", False: "not there", None: "-"}[node.dataset], size(node.free_disk, 1024**3),
        )  # fmt: skip
    yield made
    yield ""
    yield from _network(report, names)


def _node_names(report: "ClusterReport") -> list[str]:
    """Return the hosts, with numbers where they are all one."""
    hosts = [node.host for node in report.nodes]
    return hosts if len(set(hosts)) == len(hosts) else [f"{host} #{number}" for number, host in enumerate(hosts, 1)]


def _clock(node: "NodeReport") -> str:
    """Return how far a clock is ahead of the first node's, in ms."""
    if node.node == 0:
        return "0"
    return f"{round(1000 * node.clock_offset, 2) + 0.0:+.2f} ± {1000 * node.clock_error:.2f}"


def _gpus(node: "NodeReport") -> str:
    """Return "4 x NVIDIA A100 (80.0 GiB)"."""
    names = " + ".join(f"{node.gpus.count(name)} x {name}" for name in dict.fromkeys(node.gpus))
    return f"{names} ({amount(node.gpu_memory)})" if node.gpu_memory else "-"


def _network(report: "ClusterReport", names: Sequence[str]) -> Iterator["RenderableType"]:
    if report.transfers:
        largest = report.transfers[-1]  # small ones may go through in a burst
        made = table(("all-reduce\n(KiB)", "time\n(ms)", "Gbit/s\neach way"), left=())
        for transfer in report.transfers:
            made.add_row(number(transfer.size / 1024), number(1000 * transfer.seconds), number(transfer.speed / 1e9))
        yield made
        yield ""
        yield f"network between {names[0]} and {names[1]}: {number(largest.speed / 1e9)} Gbit/s each way, as measured with {report.backend}"
    yield f"an all-reduce of one number over {plural(report.ranks, 'rank')} takes {number(1e6 * report.latency)} µs"


def _list(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


def _at_most(hours: float | None, node_hours: float, price: float | None, currency: str) -> str:
    """Return an upper bound in words: time on this machine, node-hours, price."""
    time_ = "" if hours is None else f"{duration(3600 * hours)} one job after the other, "
    cost = "" if price is None else f", {number(price)} {currency}"
    return f"at most {time_}{number(node_hours)} node-h{cost}"


def estimate(report: "EstimateReport") -> Iterator["RenderableType"]:
    """Memory of one GPU by local batch, component by component."""
    yield from inspection(report.inspection)
    yield ""
    yield _components(report)
    yield ""
    yield from _apart(report)
    yield f"{amount(report.fixed)} whatever the batch, and {amount(report.per_sample)} a sample"
    if report.correction:
        yield report.correction
    if report.capacity is None:
        yield "how much a GPU has is not known here; tell with --memory or cluster.memory_per_gpu"
        return
    largest = {None: "every batch fits", 0: "nothing fits"}.get(
        report.largest_local_batch, f"the largest local batch is {report.largest_local_batch}"
    )
    yield f"of {amount(report.capacity)} with {100 * report.margin:g} % kept free, {largest}"


def _components(report: "EstimateReport") -> "Table":
    """Eq. 3 at each local batch; for a GPU also what the libraries hold, what the allocator keeps, and what is needed."""
    byte, unit = size_unit(max(*report.needed, *(row.reserved for row in report.rows)))
    parts = ["parameters", "gradients", "optimizer", "factors", "batch", "activations", "peak"]
    extra = ["reserved", "libraries"] if report.gpu else []
    headings = [f"{part}\n({unit})" for part in (*parts, *extra, *(["needed"] if report.gpu else []))]
    made = table(("local\nbatch", *headings, "fits"), left=(1 + len(headings),))
    for row, needed in zip(report.rows, report.needed, strict=True):
        sizes = [getattr(row, part) for part in (*parts, *extra)] + ([needed] if report.gpu else [])
        fits = {True: "yes", False: "no", None: "-"}[report.fits(row)]
        made.add_row(str(row.local_batch), *(size(value, byte) for value in sizes), fits)
    return made


def _apart(report: "EstimateReport") -> Iterator[str]:
    """Say what the libraries are, and what PyTorch's allocator is to that."""
    if report.gpu:
        yield (
            "reserved: what PyTorch's allocator takes where there is room; needed: the least it runs in, and the libraries"
            f" (CUDA context, cuBLAS, cuDNN, NCCL: {'as measured' if report.probed else 'a rule of thumb until a probe has measured them'})"
        )
    elif report.inspection.process:
        yield f"on the CPU; the process itself holds {amount(report.inspection.process)} beside that, which no limit counts"
        if not report.probed:
            yield (
                "tensors below 32 MiB share a heap with holes: what is measured of small jobs on the CPU is two to three"
                " times this, until a probe has corrected it"
            )


def heading(name: str, *, first: bool) -> Iterator["RenderableType"]:
    """What stands above the answer for one node type; nothing where the job names none."""
    if name:
        yield from () if first else ("",)
        yield _styled(f"node type {name}", "bold")


def all_types(plans: Sequence["ProfilePlan"]) -> Iterator["RenderableType"]:
    """What measuring all node types may cost at most, where there are several."""
    if len(plans) > 1:
        prices = [plan.price_at_most for plan in plans]
        known = [price for price in prices if price is not None]
        price = sum(known) if len(known) == len(prices) else None
        hours = sum(plan.node_hours_at_most for plan in plans)
        yield ""
        yield f"all node types together: {_at_most(None, hours, price, plans[0].currency)}"


def profile_plan(plan: "ProfilePlan", *, scripts: Sequence[str] = ()) -> Iterator["RenderableType"]:
    """What would be measured and what it may cost at most."""
    if not plan.missing:
        yield f"all {plural(plan.total, 'probe')} have a result already"
        yield from _certainty(plan.certainty)
        return
    made = table(("job", "nodes", "probes", "global batches", "local batches"), left=(0, 3, 4))
    for task in plan.tasks:
        world = task.nodes * task.spec.cluster.gpus_per_node
        batches = _list(local * world for local in task.local_batches)
        made.add_row(task.job, str(task.nodes), str(len(task.local_batches)), batches, _list(task.local_batches))
    yield made
    yield ""
    done = f", {plan.done} of {plan.total} done already" if plan.done else ""
    yield f"{plural(plan.missing, 'probe')} in {plural(len({task.job for task in plan.tasks}), 'job')}{done}"
    yield from plan.reasons
    yield from _certainty(plan.certainty)
    if plan.reasons:
        yield "one round of several: what follows depends on its results and stays within search.max_node_hours"
    yield _at_most(plan.minutes_at_most / 60, plan.node_hours_at_most, plan.price_at_most, plan.currency)
    yield f"price: {plan.price}"
    for script in scripts:
        yield ""
        yield script


def _certainty(words: str) -> Iterator[str]:
    if words:
        yield words


def profile_report(report: "ProfileReport") -> Iterator["RenderableType"]:
    """One row a probe."""
    byte, memory = size_unit(max((row.memory.peak for row in report.measured), default=None))
    made = table(
        ("nodes", "batch", "local\nbatch", "step\n(ms)", "sync\n(ms)", "data wait\n(ms)", "samples/s", f"memory\n({memory}/GPU)", "outcome"),
        left=(8,),
    )  # fmt: skip
    rows: list[Measured | OutOfMemory | Failed] = [*report.measured, *report.out_of_memory, *report.failed]
    for row in sorted(rows, key=lambda row: (row.nodes, row.local_batch)):
        made.add_row(*_probe_row(row, byte))
    yield made
    yield from (f"{row.id} failed ({row.outcome}): {first_line(row.message)}" for row in report.failed)
    if report.missing:
        yield f"missing: {', '.join(report.missing)}; run tula profile again"
    yield from _certainty(report.certainty)
    yield ""
    yield "next: tula recommend"


def _probe_row(row: "Measured | OutOfMemory | Failed", byte: float) -> tuple[str, ...]:
    where = (str(row.nodes), str(row.local_batch * row.nodes * row.gpus_per_node), str(row.local_batch))
    match row.kind:
        case "measured":
            from tula_cli.models.noise import centre

            step = centre(row.step_times)  # what the fit takes
            times = (number(1000 * step), number(1000 * row.sync_time), number(1000 * row.data_wait))
            outcome = "oversubscribed" if row.oversubscribed else "measured"
            return (*where, *times, number(row.batch / step), size(row.memory.peak, byte), outcome)
        case "out_of_memory":
            outcome = "out of memory (assumed)" if row.assumed else "out of memory"
            return (*where, "-", "-", "-", "-", "-", outcome)
        case _:
            return (*where, "-", "-", "-", "-", "-", "failed")


def train_plan(plan: "TrainPlan", *, links: int = 1, scripts: Sequence[str] = ()) -> Iterator["RenderableType"]:
    """Where training would run, in how many jobs, and what it may take and cost."""
    yield from _training_plan(plan)
    if links > 1:
        yield f"a chain of {links} jobs, each waiting for the end of the one before (afterany); what is not needed ends at once"
    for script in scripts:
        yield ""
        yield script


def _branches_planned(task: "TrainTask") -> Iterator[str]:
    """Say what a self-tuning training trains beside itself."""
    from tula_cli.models import halving

    if task.spec.train.method != "auto":
        return
    rungs = halving.sizes(len(halving.arms(task.spec, task.batch)))
    if not rungs:
        yield f"nothing to tune: batch {task.batch} is not above train.reference_batch"
        return
    epochs = sum(count * halving.epochs(task.spec, rung) for rung, count in enumerate(rungs, 1))
    beside = f"{sum(rungs)} branches of {number(epochs)} epochs in all"
    yield f"tunes itself after epoch {task.spec.auto.after}: {rungs[0]} arms, {beside} beside the training"


def _training_plan(plan: "TrainPlan") -> Iterator["RenderableType"]:
    task, predicted = plan.task, plan.prediction
    local = task.batch // (task.nodes * task.spec.cluster.gpus_per_node)
    yield f"train on {place(task.nodes, task.batch, local)}, {plan.source}"
    yield f"{plural(task.spec.train.epochs, 'epoch')}, method {task.spec.train.method}, run train-{task.signature}"
    yield from _branches_planned(task)
    if plan.resumes is not None:
        yield f"goes on from the checkpoint at {plan.resumes} samples"
    if len(task.ladder) > 1:
        yield f"after an out-of-memory at the next smaller batch: {', '.join(str(rung.batch) for rung in task.ladder[1:])}"
    if predicted is None:
        yield "no prediction of time and cost: nothing was measured for this"
        return
    currency = task.spec.pricing.currency
    at_most = predicted.hours_high
    high = "" if at_most is None else f" (90 % interval up to {duration(3600 * at_most)})"
    on_spot = ", on spot nodes" * (predicted.market == "spot")
    yield f"{duration(3600 * predicted.hours)}{high}, {number(predicted.hours * task.nodes)} node-h, {number(predicted.cost)} {currency}{on_spot}"
    yield f"price: {plan.price}"


# --- recommend


def recommendation(
    found: "Recommendation", *, width: int, color: bool, pareto: bool = False
) -> Iterator["RenderableType"]:
    """The choice and its reason, the table of what was possible, and the plot of time and cost.

    With `pareto` the table holds only what nothing else beats in both time and cost.
    """
    from rich.text import Text

    choice = found.choice
    costs = f"{duration(3600 * choice.hours)}, {number(choice.cost)} {found.currency}"
    yield Text.assemble((f"CHOSEN  {_place_of(choice)}: {costs}", "bold green"))
    yield from _other_market(found)
    yield from _progress(found)
    yield from _refreshes(found)
    yield found.reason
    yield ""
    yield front(found) if pareto else predictions(found)
    yield ""
    if found.objective == "accuracy-time":
        yield same_progress(found)
        yield ""
    marks = ["* chosen", *(["2, 3 ... runners-up"] if found.runners_up else [])]
    if pareto and not found.choice.pareto:
        marks = [f"the choice ({found.objective}) is not among them: something is both faster and cheaper", *marks[1:]]
    yield "; ".join(marks if pareto else [*marks, "P: nothing is both faster and cheaper"])
    yield from (f"price: {line}" for line in found.price.splitlines())
    yield from (f"fit: {line}" for line in found.fit.splitlines())
    if found.efficiency:
        yield f"same progress: {found.efficiency}"
    for drawn in () if pareto else plots(found, width=width, color=color):
        yield ""
        yield Text.from_ansi(drawn)


def edited(found: "Edited", command: str) -> str:
    """Say how a job file differs from the run that came from it, with both values, and what takes the file's."""
    name, more = near(Path(found.file.path)), len(found.changes) - _CHANGES
    if found.problem:
        return f"{name} cannot be used any more, so these are the run's own settings: {found.problem}"
    told = [f"{key} {_short(now)} (here {_short(then)})" for key, (then, now) in list(found.changes.items())[:_CHANGES]]
    words = ", ".join(told) + (f" and {more} more" if more > 0 else "")
    return f"{name} says otherwise by now: {words}; {with_file(found, command)} takes what it says"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def with_file(found: "Edited", command: str) -> str:
    """Return the command line that takes the values of a job file; where it is another job by now, it is measured."""
    words = ["tula", "profile" if found.elsewhere else command, near(Path(found.file.path))]
    return shlex.join([*words, *(word for override in found.file.overrides for word in ("--set", override))])


def only_shown(known: "Recommendation | None") -> str:
    """Say of an answer that is not kept what `tula train` takes instead: `known`, or nothing."""
    if known is None:
        return "only shown, as --set assumes something; --save makes it what tula train takes"
    kept = f"{_place_of(known.choice)} ({known.question}; {moment(known.created_at)})"
    return f"only shown: tula train takes {kept}; --save makes it this one"


def _place_of(row: "Prediction") -> str:
    """Return a configuration in words, with the type and market of its nodes where there are several."""
    kind = f" of type {row.type}" * bool(row.type) + " on spot" * (row.market == "spot")
    return place(row.nodes, row.batch, row.local_batch).replace(",", f"{kind},", 1)


def _progress(found: "Recommendation") -> Iterator[str]:
    """Say what the choice takes to the same progress, apart from what it takes for the epochs of the spec."""
    row = found.choice.same_progress
    if row is not None:
        yield (
            f"to the same progress: {number(row.epochs)} epochs, {duration(3600 * row.hours)}"
            f" ({duration(3600 * row.hours_low)} to {duration(3600 * row.hours_high)}), {number(row.cost)} {found.currency}"
        )


def _refreshes(found: "Recommendation") -> Iterator[str]:
    """Say what refreshing the scaling factors takes of the choice's time, where it is worth a word."""
    share = found.choice.refresh_share
    if share > 0.01:
        yield f"of that {100 * share:.2g} % for refreshing the scaling factors (ags.refresh says how often)"


def same_progress(found: "Recommendation") -> "Table":
    """The best configuration of each batch on the way to the same progress, beside its time for the spec's epochs."""
    from tula_cli.models.objective import envelope

    rows = [(row, row.same_progress) for row in envelope(found.rows, curve="accuracy-time")]
    divisor, unit = time_unit(3600 * max(row.hours for row in found.rows))
    columns = ["", "batch", "nodes", "epochs", "range", f"time to\nsame\nprogress\n({unit})", f"range\n({unit})",
               f"cost\n({found.currency})", f"time for\nspec's\nepochs\n({unit})"]  # fmt: skip
    made = table(columns)
    for row, progress in rows:
        assert progress is not None
        chosen = row == found.choice
        made.add_row(
            "*" if chosen else "",
            str(row.batch),
            str(row.nodes),
            number(progress.epochs),
            f"{number(progress.epochs_low)} .. {number(progress.epochs_high)}",
            number(3600 * progress.hours / divisor),
            f"{number(3600 * progress.hours_low / divisor)} .. {number(3600 * progress.hours_high / divisor)}",
            number(progress.cost),
            number(3600 * row.hours / divisor),
            style="bold green" if chosen else None,
        )
    return made


MARKETS = {"on_demand": "on demand", "spot": "on spot"}


def _other_market(found: "Recommendation") -> Iterator[str]:
    """Say what the choice takes on the market that it is not for, and how that compares."""
    here, there = found.choice, found.other_market
    if there is None:
        return
    cost, hours = there.cost / here.cost - 1 if here.cost else 0.0, there.hours / here.hours - 1
    compared = f"{_by(cost, 'dearer', 'cheaper')}, {_by(hours, 'longer', 'shorter')}"
    expected = " expected" * (there.market == "spot")
    yield (
        f"the same {MARKETS[there.market]}: {duration(3600 * there.hours)}{expected}, {number(there.cost)}"
        f" {found.currency} ({compared})"
    )


def _by(change: float, more: str, less: str) -> str:
    return f"{number(100 * abs(change), 2)} % {more if change > 0 else less}" if abs(change) >= 0.0005 else f"no {more}"


def predictions(found: "Recommendation") -> "Table":
    """One row a feasible configuration, as the recommendation orders them; what spot nodes take is beside it."""
    divisor, unit = time_unit(3600 * max(row.hours for row in found.rows))
    byte, memory = size_unit(max((row.peak_memory or 0 for row in found.rows), default=None))
    marks = _marks(found)
    typed, on_spot = any(row.type for row in found.rows), any(row.market == "spot" for row in found.rows)
    kinds = ["type"] if typed else []
    spot = [f"spot\ntime\n({unit})", f"spot\ncost\n({found.currency})", "cheaper"] if on_spot else []
    columns = ["", *kinds, "nodes", "batch", "local\nbatch", f"time\n({unit})", f"90 % interval\n({unit})",
               f"cost\n({found.currency})", *spot, f"memory\n({memory}/GPU)", "free\n(%)", "basis"]  # fmt: skip
    words = {index for index, name in enumerate(columns) if name in ("", "type", "cheaper", "basis")}
    made = table(columns, left=words)
    for offers in _by_config(found.rows):
        row = next(iter(offers.values()))
        mark = marks.get(_key(row), "")
        made.add_row(
            f"{mark} P" if any(offer.pareto for offer in offers.values()) else mark,
            *([row.type] if typed else []),
            str(row.nodes),
            str(row.batch),
            str(row.local_batch),
            *_time_and_cost(offers.get("on_demand"), divisor),
            *(_spot_cells(offers, divisor) if on_spot else []),
            size(row.peak_memory, byte),
            percent(row.headroom),
            "measured" if row.measured else "predicted",
            style="bold green" if mark == "*" else None,
        )
    return made


def front(found: "Recommendation") -> "Table":
    """One row a configuration that nothing else beats in both time and cost, fastest first."""
    rows = [row for row in found.rows if row.pareto]
    divisor, unit = time_unit(3600 * max(row.hours for row in rows))
    typed, on_spot = any(row.type for row in found.rows), any(row.market == "spot" for row in found.rows)
    kinds = [*(["type"] if typed else []), *(["market"] if on_spot else [])]
    columns = ["", *kinds, "nodes", "batch", "local\nbatch", f"time\n({unit})", f"90 % interval\n({unit})",
               f"cost\n({found.currency})", "basis"]  # fmt: skip
    made = table(columns, left=[*range(1 + len(kinds)), len(columns) - 1])
    runners_up = {_offer(row): str(rank) for rank, row in enumerate(found.runners_up, 2)}
    marks = {_offer(found.choice): "*", **runners_up}
    for row in rows:
        mark = marks.get(_offer(row), "")
        made.add_row(
            mark,
            *([row.type] if typed else []),
            *([MARKETS[row.market]] if on_spot else []),
            str(row.nodes),
            str(row.batch),
            str(row.local_batch),
            *_time_and_cost(row, divisor),
            "measured" if row.measured else "predicted",
            style="bold green" if mark == "*" else None,
        )
    return made


def _marks(found: "Recommendation") -> dict[tuple[str, int, int], str]:
    runners_up = {_key(row): str(rank) for rank, row in reversed([*enumerate(found.runners_up, 2)])}
    return {**runners_up, _key(found.choice): "*"}


def _by_config(rows: Iterable["Prediction"]) -> list[dict[str, "Prediction"]]:
    """Return what each configuration takes by market, in the order of the rows."""
    found: dict[tuple[str, int, int], dict[str, Prediction]] = {}
    for row in rows:
        found.setdefault(_key(row), {})[row.market] = row
    return list(found.values())


def _time_and_cost(row: "Prediction | None", divisor: float) -> tuple[str, str, str]:
    """Return the cells of a time, its interval and a cost; dashes where the limits leave none."""
    if row is None:
        return "-", "-", "-"
    low, high = row.hours_low, row.hours_high
    interval = "-" if low is None or high is None else f"{number(3600 * low / divisor)} .. {number(3600 * high / divisor)}"  # fmt: skip
    return number(3600 * row.hours / divisor), interval, number(row.cost)


def _spot_cells(offers: Mapping[str, "Prediction"], divisor: float) -> tuple[str, str, str]:
    here, spot = offers.get("on_demand"), offers.get("spot")
    time_, _, cost = _time_and_cost(spot, divisor)
    if here is None or spot is None:
        return time_, cost, "-"
    return time_, cost, "spot" if spot.cost < here.cost else "on demand" if here.cost < spot.cost else "-"


def _key(row: "Prediction") -> tuple[str, int, int]:
    return row.type, row.nodes, row.batch


def _offer(row: "Prediction") -> tuple[str, int, int, str]:
    return (*_key(row), row.market)


MARKERS = "ox+#@%&=~"
COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red")


def plots(found: "Recommendation", *, width: int, color: bool) -> Iterator[str]:
    """Time and cost against the global batch, one curve for each number (and type) of nodes; O marks the choice."""
    rows = [row for row in found.rows if row.market == found.choice.market]
    curves = sorted({_key(row)[:2] for row in rows})
    if len({row.batch for row in rows}) < 2:
        return
    divisor, unit = time_unit(3600 * max(row.hours for row in rows))
    names = [f"{plural(count, 'node')}{f' of type {kind}' if kind else ''}" for kind, count in curves]
    times = {_key(row): 3600 * row.hours / divisor for row in rows}
    costs = {_key(row): row.cost for row in rows}
    for title, values in ((f"time ({unit})", times), (f"cost ({found.currency})", costs)):
        yield _plot(title, values, choice=_key(found.choice), width=width, color=color)
    legend = [f"{marker} {name}" for marker, name in zip(_cycle(MARKERS, curves), names, strict=True)]
    yield "   ".join([*legend, "O chosen"])


def _cycle(choices: Sequence[str], items: Sequence[Any]) -> list[str]:
    return [choices[index % len(choices)] for index in range(len(items))]


def _plot(
    title: str,
    values: dict[tuple[str, int, int], float],
    *,
    choice: tuple[str, int, int],
    width: int,
    color: bool,
) -> str:
    """Draw values by (type, nodes, batch) over a binary logarithm of the batch, as text of at most `width` columns."""
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(min(width, 100), 15)
    figure.legend(active=False)
    curves, batches = sorted({key[:2] for key in values}), sorted({key[2] for key in values})
    for curve, marker, shade in zip(curves, _cycle(MARKERS, curves), _cycle(COLORS, curves), strict=True):
        points = sorted((math.log2(key[2]), value) for key, value in values.items() if key[:2] == curve)
        xs, ys = [point[0] for point in points], [point[1] for point in points]
        for symbol, joined in (("·", True), (marker, False)):
            dots = plotext.marker(symbol, plotext.pixel(shade)) if color else symbol
            figure.draw(figure.signal(xs, ys, marker=dots).lines(joined))
    figure.draw(figure.signal([math.log2(choice[2])], [values[choice]], marker="O"))
    figure.ruler("x", "lower").ticks([math.log2(batch) for batch in batches], [str(batch) for batch in batches])
    figure.label("global batch", "x")
    figure.title(title)
    drawn: str = figure.build().string(colorless=not color)
    return "\n".join(line.rstrip() for line in drawn.splitlines())


# --- status

STATE_STYLES = {
    "running": "cyan",
    "done": "green",
    "failed": "bold red",
    "diverged": "bold red",
    "lost": "bold red",
    "cancelled": "yellow",
}


def status(now: "RunStatus") -> Iterator["RenderableType"]:
    """Jobs, training, attempts, recommendation."""
    counts = f"{now.measured} measured, {now.out_of_memory} out of memory, {now.failed} failed"
    yield f"{near(now.path)}: {counts}"
    if now.jobs:
        yield ""
        yield jobs(now.jobs)
        yield from (f"{job.id} {job.state}: {story}" for job in now.jobs if (story := _story(job)))
    if now.training is not None:
        yield ""
        yield training(now.training)
        if now.training.tuning is not None and now.training.tuning.branches:
            yield ""
            yield branches(now.training.tuning.branches, now.training.tuning.chosen)
        yield from (f"warning: {text}" for text in now.training.warnings)
    if now.attempts:
        yield ""
        yield attempts(now)
        yield from _causes(now)
    if now.between_rounds:
        yield ""
        yield "next: tula profile submits the next round, or says that nothing more is worth measuring"
    if now.recommendation is not None:
        choice = now.recommendation.choice
        yield ""
        yield f"recommended: {place(choice.nodes, choice.batch, choice.local_batch)}, {now.recommendation.objective}"


def status_by_type(
    path: Path, found: Mapping[str, "RunStatus"], chosen: "Recommendation | None"
) -> Iterator["RenderableType"]:
    """The same for each node type, and what is recommended over all."""
    if not found:
        yield f"{near(path)}: nothing was started yet"
    for index, (name, now) in enumerate(found.items()):
        yield from heading(name, first=index == 0)
        yield from status(now)
    if chosen is not None:
        yield ""
        yield f"recommended over all node types: {_place_of(chosen.choice)}, {chosen.objective}"


def _story(job: "JobStatus") -> str:
    """Return why a job is in its state, and when it is expected to start."""
    start = [] if job.starts_at is None else [f"expected to start {moment(job.starts_at)}"]
    return ", ".join([first_line(job.reason), *start] if job.reason else start)


def attempts(now: "RunStatus") -> "Table":
    """One row a start of ranks: where, from which sample on, and how it ended."""
    from rich.text import Text

    active = {job.id for job in now.jobs if job.state == "running"}
    seconds = [_took(row.attempt, now.at if row.job in active else None) for row in now.attempts]
    divisor, unit = time_unit(max(took or 0.0 for took in seconds))
    allocated = any(row.attempt.allocation for row in now.attempts)
    made = table(
        ("attempt", "no.", "started", f"took\n({unit})", *(["allocation"] if allocated else []), "hosts", "batch",
         "from\nsample", "ended"),
        left=(0, 2, 4, 5, 8) if allocated else (0, 2, 4, 7),
    )  # fmt: skip
    for row, took in zip(now.attempts, seconds, strict=True):
        attempt = row.attempt
        state = attempt.outcome or ("running" if row.job in active else "lost")
        made.add_row(
            attempt.task,
            str(attempt.number),
            moment(attempt.started_at),
            "-" if took is None else number(took / divisor),
            *([attempt.allocation] if allocated else []),
            attempt.hosts or attempt.host,
            "-" if row.batch is None else str(row.batch),
            "-" if attempt.samples is None else str(attempt.samples),
            Text(state, STATE_STYLES.get(state, "bold red")),
        )
    return made


def _took(attempt: "Attempt", now: float | None) -> float | None:
    """Return the seconds that an attempt took; of one that is open until now, or None where it does not run."""
    until = attempt.ended_at or now
    return None if until is None else max(0.0, until - attempt.started_at)


def _causes(now: "RunStatus") -> Iterator["RenderableType"]:
    """Why attempts ended before their time, and why others followed."""
    for row in now.attempts:
        attempt = row.attempt
        if row.cause:
            yield f"{attempt.task} follows: {first_line(row.cause)}"
        if attempt.outcome not in (None, "done"):
            rank = "" if attempt.rank is None else f" rank {attempt.rank}"
            where = f"{attempt.task} attempt {attempt.number} on {attempt.host}{rank}"
            yield f"{where}: {attempt.outcome}: {first_line(attempt.message)}"


def jobs(rows: Iterable["JobStatus"]) -> "Table":
    """One row a job; a probe job names the probe that runs."""
    from rich.text import Text

    found = list(rows)
    divisor, unit = time_unit(max((job.elapsed or 0.0) + (job.left or 0.0) for job in found))
    ids = {job.scheduler_id for job in found if job.scheduler != "local"}
    columns = ["job", *(["scheduler's\nid"] if ids else []), "state", "nodes", "probes", "now\nbatch", "now\nlocal",
               f"elapsed\n({unit})", f"left\n({unit})", "used\n(node-h)", "left\n(node-h)"]  # fmt: skip
    made = table(columns, left=range(columns.index("state") + 1))
    for job in found:
        made.add_row(
            job.id,
            *([job.scheduler_id] if ids else []),
            Text(job.state, STATE_STYLES.get(job.state, "")),
            str(job.nodes),
            f"{job.done}/{job.total}" if job.kind == "probe" else "-",
            "-" if job.now is None else str(job.now.batch),
            "-" if job.now is None else str(job.now.local_batch),
            "-" if job.elapsed is None else number(job.elapsed / divisor),
            "-" if job.left is None else number(job.left / divisor),
            number(job.node_hours),
            number(job.node_hours_left),
        )
    return made


def training(now: "TrainingStatus") -> str:
    """One line: where a training run stands."""
    parts = [
        f"training {now.signature} on {plural(now.nodes, 'node')}, batch {now.batch}",
        f"epoch {now.epoch:.2f} of {now.epochs}",
        f"{now.samples} samples",
    ]
    parts += [f"loss {number(now.loss, 4)}"] if now.loss is not None else []
    parts += [f"top-1 {number(now.top1, 4)} %"] if now.top1 is not None else []
    parts += [f"lr {number(now.lr)}"] if now.lr is not None else []
    parts += [_tuning(now.tuning)] if now.tuning is not None else []
    if now.step_time is not None:
        predicted = "" if now.predicted_step is None else f" (predicted {number(1000 * now.predicted_step)})"
        parts.append(f"{number(1000 * now.step_time)} ms a step{predicted}")
    if now.finished:
        parts.append("finished")
    elif now.eta is not None:
        parts.append(f"{duration(now.eta)} left")
    return ", ".join(parts)


def _tuning(now: "TuningStatus") -> str:
    if now.arm is None:
        return f"as tuned: {now.chosen}" if now.chosen else "tuning ends"
    return f"tuning: arm {now.number} of {now.count} ({now.arm}), rung {now.rung}"


def branches(found: "Sequence[Branch]", chosen: str | None) -> "Table":
    """What each arm of a self-tuning training came to on the held-out samples, in its longest branch."""
    from tula_cli.models.halving import ranked

    longest = {branch.arm: branch for branch in found}  # rungs ascend
    made = table(("arm", "rung", "epochs", "held-out\nloss", "top-1 (%)", ""), left=(0, 5))
    order = sorted(ranked(list(longest.values())), key=lambda branch: (branch.arm != chosen, -branch.rung))
    for branch in order:
        note = "chosen" if branch.arm == chosen else "diverged" if branch.diverged else ""
        made.add_row(
            branch.arm, str(branch.rung), number(branch.epochs), _or_dash(branch.loss), _or_dash(branch.top1), note
        )
    return made


def _or_dash(value: float | None) -> str:
    return "-" if value is None else number(value, 4)


def first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0]


def runs(found: Iterable["RunSummary"]) -> Iterator["RenderableType"]:
    """One row a run."""
    made = table(
        ("run", "changed", "model", "data", "probes", "nodes", "batch", "trained", "top-1\n(%)"), left=range(4)
    )
    rows = list(found)
    for run in rows:
        choice = None if run.recommendation is None else run.recommendation.choice
        made.add_row(
            run.id,
            moment(run.changed),
            run.model,
            run.dataset,
            str(run.measured),
            "-" if choice is None else str(choice.nodes),
            "-" if choice is None else str(choice.batch),
            str(run.trained),
            number(run.best_top1, 4),
        )
    yield made
    yield from (f"{run.id} cannot be read: {run.problem}" for run in rows if run.problem)


# --- what changes while one waits


class Live:
    """Shows nothing but warnings; the quiet one."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen

    def update(self, now: "RunStatus") -> None:
        """Show a newer status."""
        for text in now.training.warnings if now.training is not None else ():
            self.screen.warn(text)

    def compared(self, now: "Progress") -> None:
        """Show how far a comparison is."""
        if now.problem and now.ended is not None:
            self.screen.warn(f"{now.ended.words} failed: {first_line(now.problem)}")


class ChangesLive(Live):
    """One line a change of state, for logs and terminals that cannot draw."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(screen)
        self._said: dict[str, str] = {}

    def update(self, now: "RunStatus") -> None:
        super().update(now)
        for job in now.jobs:
            self._say(job.id, _changes(job), _tail(job))
        train = now.training
        if train is not None:
            finished = ", finished" if train.finished else ""
            branch = "" if train.tuning is None else f" {train.tuning.rung} {train.tuning.number} {train.tuning.chosen}"
            state = f"{train.signature} {train.batch} {int(train.epoch)}{branch}{finished}"
            self._say("training", state, training(train))

    def compared(self, now: "Progress") -> None:
        super().compared(now)
        cell = "" if now.cell is None else now.cell.words
        self._say("comparison", f"{now.done} {now.failed} {now.running} {cell} {now.waits}", comparison(now))

    def _say(self, about: str, state: str, text: str) -> None:
        if self._said.get(about) != state:
            self._said[about] = state
            self.screen.note(text)


def _changes(job: "JobStatus") -> str:
    return f"{job.state} {job.done} {job.now} {job.reason}"


def _tail(job: "JobStatus") -> str:
    """Return a job in one line."""
    parts = [f"{job.id}: {job.state}"]
    parts += [story] if (story := _story(job)) else []
    parts += [f"{job.done} of {plural(job.total, 'probe')}"] if job.kind == "probe" else []
    if job.now is not None:
        parts.append(f"next: {place(job.now.nodes, job.now.batch, job.now.local_batch)}")
    if job.left is not None:
        parts.append(f"about {duration(job.left)} and {number(job.node_hours_left)} node-h left")
    return ", ".join(parts)


class DrawnLive(Live):
    """A table redrawn in place on stderr."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(screen)
        from rich.live import Live as RichLive

        self._live = RichLive(console=screen._console(screen.err), auto_refresh=False, transient=True)

    def __enter__(self) -> "DrawnLive":
        self._live.start()
        self.screen.drawn = self._live.console
        return self

    def __exit__(self, *_: object) -> None:
        self.screen.drawn = None
        self._live.stop()

    def update(self, now: "RunStatus") -> None:
        from rich.console import Group

        super().update(now)
        parts: list[RenderableType] = []
        if now.jobs:
            parts.append(drawn := jobs(now.jobs))
            _fit(drawn, self._live.console)
        parts += [training(now.training)] if now.training is not None else []
        self._live.update(Group(*parts), refresh=True)

    def compared(self, now: "Progress") -> None:
        from rich.console import Group

        super().compared(now)
        parts = [comparison(now), *([training(now.training)] if now.training is not None else [])]
        self._live.update(Group(*parts), refresh=True)


# --- compare


def comparison(now: "Progress") -> str:
    """One line: how far a comparison is, and what it does."""
    parts = [f"{now.done} of {plural(now.total, 'training')} done"]
    parts += [f"{now.failed} failed"] if now.failed else []
    parts += [f"now: {now.cell.words}"] if now.cell is not None else []
    parts += [now.waits] if now.waits else []
    parts += [f"{now.running} running"] if now.cell is None and now.running else []
    parts += [f"about {duration(now.left)} left"] if now.left is not None and now.done + now.failed < now.total else []
    return ", ".join(parts)


def compare_plan(plan: "ComparePlan", *, scripts: Sequence[str] = ()) -> Iterator["RenderableType"]:
    """The grid in the order it is trained, and what it may take."""
    todo = {cell.signature for cell in plan.missing}
    made = table(
        ("", "method", "batch", "local\nbatch", "nodes", "seed", "run", f"expected\n({_plan_unit(plan)[1]})"),
        left=(1, 6),
    )
    divisor = _plan_unit(plan)[0]
    for place_, cell in enumerate(plan.comparison.cells, 1):
        hours = plan.hours.get((cell.method, cell.batch))
        local = cell.batch // (cell.nodes * plan.spec.cluster.gpus_per_node)
        made.add_row(
            str(place_),
            f"{cell.method} (reference)" if cell.reference else cell.method,
            str(cell.batch),
            str(local),
            str(cell.nodes),
            str(cell.seed),
            f"train-{cell.signature}",
            "done" if cell.signature not in todo else "-" if hours is None else number(3600 * hours / divisor),
        )
    yield made
    yield ""
    done = len(plan.comparison.cells) - len(todo)
    yield f"{plural(len(todo), 'training')} to do, {done} of {len(plan.comparison.cells)} done"
    yield from _compare_costs(plan)
    for script in scripts:
        yield ""
        yield script


def _plan_unit(plan: "ComparePlan") -> tuple[float, str]:
    return time_unit(max((3600 * hours for hours in plan.hours.values() if hours is not None), default=0.0))


def _compare_costs(plan: "ComparePlan") -> Iterator[str]:
    hours = plan.hours_left
    if not plan.missing:
        return
    if hours is None:
        yield "no estimate of time and cost: nothing was measured or trained yet"
        return
    node_hours = hours * plan.comparison.nodes
    # Memory has a price only where it was measured, so gb_hour is left to each training's own prediction.
    yield f"about {duration(3600 * hours)} one after the other, {number(node_hours)} node-h"
    yield f"price: {plan.price}"


def compared(found: "CompareReport", *, width: int, color: bool) -> Iterator["RenderableType"]:
    """Table I for the user's own job, and accuracy (or loss) against the batch."""
    yield comparison_table(found)
    yield ""
    yield f"{found.finished} of {plural(found.total, 'training')} done" + (
        ""
        if found.complete or found.hours_left is None
        else f", about {duration(3600 * found.hours_left)} one after the other left"
    )
    what = "top-1" if found.metric == "top1" else "loss"
    yield (
        f"mean ± standard deviation over n seeds, after the last epoch; gap: {what} lost against lbt at batch"
        f" {found.reference_batch}, over the seeds of both; recovered: share of lbt's gap at the same batch, - where that"
        " is within the noise or not known (one seed, no lbt)"
    )
    drawn = _comparison_plot(found, width=width, color=color)
    if drawn:
        from rich.text import Text

        yield ""
        yield Text.from_ansi(drawn)


def comparison_table(found: "CompareReport") -> "Table":
    """One row a method at a batch."""
    divisor, unit = time_unit(3600 * max((row.hours or 0.0 for row in found.rows), default=0.0))
    accuracy = found.metric == "top1"
    metrics = ("top-1 (%)", "top-5 (%)") if accuracy else ("loss",)
    shown = [row for row in found.rows if row.cells]
    made = table(
        ("batch", "method", "n", *metrics, "gap", "recovered\n(%)", "samples", f"time\n({unit})", "note"),
        left=(1, 6 + len(metrics) + 1),
    )
    batch = None
    for row in shown:
        stats = (row.top1, row.top5) if accuracy else (row.loss,)
        made.add_row(
            str(row.batch) if row.batch != batch else "",
            f"{row.method} (reference)" if row.reference else row.method,
            str(row.seeds),
            *(spread(value, 2 if accuracy else 4) for value in stats),
            "-" if row.gap is None else f"{row.gap:.{2 if accuracy else 4}f}",
            "-" if row.recovered is None else f"{100 * row.recovered:.0f}",
            "-" if row.samples is None else f"{row.samples:.0f}",
            "-" if row.hours is None else number(3600 * row.hours / divisor),
            comparison_note(row),
        )
        batch = row.batch
    return made


def spread(value: "Stat | None", digits: int) -> str:
    """Return "62.43 ± 0.86"; one seed has no spread."""
    if value is None:
        return "-"
    return f"{value.mean:.{digits}f}" + ("" if value.sd is None else f" ± {value.sd:.{digits}f}")


def comparison_note(row: "Row") -> str:
    """Return what of a row has not ended well, or not at all."""
    words = ("diverged", "failed", "cancelled", "lost", "running", "queued", "missing")
    return ", ".join(f"{count} {word}" for word in words if (count := row.count(word)))  # type: ignore[arg-type]


def _comparison_plot(found: "CompareReport", *, width: int, color: bool) -> str:
    """Draw the metric against the batch, a curve a method; the reference is a point of its own."""
    import plotext

    curves: dict[str, list[tuple[float, float]]] = {}
    for row in found.rows:
        value = row.stat(found.metric)
        if value is not None:
            label = f"{row.method} (reference)" if row.reference else row.method
            curves.setdefault(label, []).append((math.log2(row.batch), value.mean))
    batches = sorted({row.batch for row in found.rows})
    if len(batches) < 2 or len(curves) < 2:
        return ""
    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(min(width, 100), 18)
    figure.legend(active=False)
    names = list(curves)
    for name, marker, shade in zip(names, _cycle(MARKERS, names), _cycle(COLORS, names), strict=True):
        xs, ys = [point[0] for point in curves[name]], [point[1] for point in curves[name]]
        for symbol, joined in (("·", True), (marker, False)) if len(xs) > 1 else ((marker, False),):
            dots = plotext.marker(symbol, plotext.pixel(shade)) if color else symbol
            figure.draw(figure.signal(xs, ys, marker=dots).lines(joined))
    figure.ruler("x", "lower").ticks([math.log2(batch) for batch in batches], [str(batch) for batch in batches])
    figure.label("global batch", "x")
    figure.title("top-1 (%)" if found.metric == "top1" else "loss")
    drawn: str = figure.build().string(colorless=not color)
    legend = "   ".join(f"{marker} {name}" for marker, name in zip(_cycle(MARKERS, names), names, strict=True))
    return "\n".join([*(line.rstrip() for line in drawn.splitlines()), legend])


# --- the end of a training run


def summary(found: "Summary") -> Iterator["RenderableType"]:
    """Predicted against actual, and how good it is."""
    changed = "" if found.batch == found.start_batch else f" (started with {found.start_batch})"
    accuracy = f", best top-1 {number(found.best_top1, 4)} %"
    yield f"trained on {plural(found.nodes, 'node')} at batch {found.batch}{changed}{accuracy}"
    yield ", ".join(f"{name} {number(value, 4)}" for name, value in found.metrics.items())
    yield ""
    divisor, unit = time_unit(3600 * found.actual_hours)
    made = table(("", "predicted", "actual", "error (%)"))
    to_unit = 3600 / divisor
    made.add_row("step time (ms)", *_compared(found.predicted_step, found.actual_step, 1000))
    made.add_row(f"time ({unit})", *_compared(found.predicted_hours, found.actual_hours, to_unit))
    made.add_row(f"cost ({found.currency})", *_compared(found.predicted_cost, found.actual_cost, 1))
    yield made
    if found.tuning is not None and found.tuning.chosen is not None:
        yield ""
        beside = f"{found.tuning.samples} samples in {len(found.tuning.branches)} branches beside the training"
        yield f"tuned: {found.tuning.chosen.name}, {beside}"
        yield branches(found.tuning.branches, found.tuning.chosen.name)
    if found.attempts > 1:
        yield ""
        yield f"{plural(found.attempts, 'attempt')}; relaunched because of: {'; '.join(found.causes) or 'an earlier end'}"


def _compared(predicted: float | None, actual: float, factor: float) -> tuple[str, str, str]:
    """Return predicted, actual, and the error of the prediction relative to actual."""
    if predicted is None:
        return "-", number(actual * factor), "-"
    error = f"{100 * (predicted - actual) / actual:+.1f}" if actual else "-"
    return number(predicted * factor), number(actual * factor), error
