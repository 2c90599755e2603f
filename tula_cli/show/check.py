"""Output of `tula init` and `tula check`."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tula_cli.show.profile import render_upper_bound_plan
from tula_cli.show.screen import Origin
from tula_cli.show.tables import describe_max_cost, join_numbers, make_table, render_each_type
from tula_cli.words import (
    choose_size_unit,
    format_bytes,
    format_count,
    format_duration,
    format_local_time,
    format_number,
    format_size,
    join_first_words,
    make_relative_path,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from tula_cli.cluster.scheduler import SchedulerState
    from tula_cli.cluster.slurm.site import Site
    from tula_cli.run.job_runs import ConfigDrift
    from tula_cli.run.records.inspections import ClusterReport, Inspection, NodeReport
    from tula_cli.run.records.tasks import CheckTask
    from tula_cli.services.check import CheckReport
    from tula_cli.services.estimate import EstimateReport
    from tula_cli.services.init import JobFileProposal
    from tula_cli.services.nodes import ClusterCheck
    from tula_cli.services.resume_test import ResumeTestFinding
    from tula_cli.services.search import SearchEstimate

_MAX_CHANGES_SHOWN = 6  # maximum number of changes of an edited job that are listed


# --- Plans


def render_check_reports(
    reports: "Mapping[str | None, CheckReport]", origins: Mapping[str, Origin]
) -> tuple[dict[str, Any], Iterator["RenderableType"]]:
    """Return the check reports of all node types as data for the envelope, and as output."""
    if None in reports:
        return {"report": reports[None], "origins": origins}, render_check(reports[None], origins)
    return {"types": dict(reports), "origins": origins}, render_each_type(
        reports, lambda report: render_check(report, {})
    )


def render_check(report: "CheckReport", origins: Mapping[str, Origin]) -> Iterator["RenderableType"]:
    """Yield the job, its search and the cost of the search, preceded by the origin of each job file value if given."""
    if origins:
        table = make_table(("key", "value", "from"), left=range(3))
        for key, origin in origins.items():
            table.add_row(key, json.dumps(origin.value), origin.source)
        yield table
        yield ""
    if report.inspection is not None:
        yield from render_inspection(report.inspection)
    if report.method_line:
        yield report.method_line
    yield from report.settings
    if report.interruption:
        yield f"checkpoints: {report.interruption}"
    if report.inspection is not None or report.method_line or report.settings:
        yield ""
    if report.jobs:
        yield from _render_jobs(report)
    if report.unsettled is not None:
        yield from render_upper_bound_plan(report.unsettled)
    elif report.is_extent_unknown:
        yield (
            "The probes are unknown: without search.max_batch, the size of the dataset bounds the batches, and --offline"
            " does not build the dataset. Run tula check without --offline, or set search.max_batch."
        )
    elif report.jobs:
        if report.expected is not None:
            yield describe_expectation(report.expected, local=report.machine_hours_at_most is not None)
        yield describe_max_cost(
            report.machine_hours_at_most, report.node_hours_at_most, report.price_at_most, report.currency
        )
        yield f"price: {report.price}"


def describe_expectation(expectation: "SearchEstimate", *, local: bool) -> str:
    """Describe the expected time and node-hours of the probes."""
    time = f"{format_duration(3600 * expectation.hours)} with one job at a time, " if local else ""
    return f"expected {time}{format_number(expectation.node_hours)} node-h {expectation.basis}"


def _render_jobs(report: "CheckReport") -> Iterator["RenderableType"]:
    table = make_table(("nodes", "probes", "global batches", "local batches"), left=(2, 3))
    for job in report.jobs:
        table.add_row(
            str(job.nodes), str(len(job.local_batches)), join_numbers(job.batches), join_numbers(job.local_batches)
        )
    yield table
    yield ""
    yield f"{format_count(report.probes, 'probe')} in {format_count(len(report.jobs), 'job')}"


def render_inspection(inspection: "Inspection") -> Iterator["RenderableType"]:
    """Yield model, data and hardware, one line each."""
    dimensions = "x".join(map(str, inspection.sample_shape))
    shape = f", each {inspection.sample}" if inspection.sample else f", of shape {dimensions}"
    classes = "" if inspection.classes is None else f", {inspection.classes} classes"
    capacity = "" if inspection.capacity is None else f", {format_bytes(inspection.capacity)} per rank"
    if inspection.script:
        yield f"script: {inspection.script}"
    else:
        yield f"model: {inspection.parameters} parameters"
        yield from map(str, inspection.notes)
        yield f"data: {inspection.dataset_size} samples to train on, {inspection.eval_size} to evaluate{shape}{classes}"
    yield f"hardware: {inspection.hardware or format_count(inspection.gpus, 'GPU')} ({inspection.device}){capacity}"


def render_hooks(path: Path) -> Iterator["RenderableType"]:
    """Yield the lines to add to a script's training loop."""
    yield f"wrote {path}. Keep it in the folder of the script; without tula, it has no effect"
    yield ""
    yield "import tula_hooks as tula"
    yield "optimizer = tula.wrap(optimizer, model)    # before the loop"
    yield "tula.save(lambda path: ...)                # writes a checkpoint, for script.save: hooks"
    yield "tula.step(samples=len(x), loss=loss)       # at the end of each optimizer step"


def describe_site(site: "Site | None") -> str:
    """Describe the scheduler settings that `tula init slurm` has filled in."""
    from tula_cli.cluster.slurm.site import describe_partition, list_partitions_with_gpus

    if site is None:
        return "SLURM was not found here. Fill in section cluster by hand."
    default_partition = site.default_partition
    if default_partition is None:
        return f"SLURM has no default partition. Set cluster.slurm.partition to one of {', '.join(p.name for p in site.partitions)}."
    words = f"Section cluster is filled in from SLURM: partition {describe_partition(default_partition)}"
    with_gpus = list_partitions_with_gpus(site.partitions)
    if with_gpus and default_partition not in with_gpus:
        names = ", ".join(partition.name for partition in with_gpus)
        words += f"; {names} {'has' if len(with_gpus) == 1 else 'have'} GPUs"
    return words


def summarize_proposal(job_proposal: "JobFileProposal", path: Path) -> tuple[dict[str, object], list[str]]:
    """Return what was recognised and not recognised in a command, as data for the envelope and as lines."""
    spans, proposal = job_proposal.placeholders, job_proposal.recognised
    rows = [(f"{flag} {was}", f"{{{name}}}") for flag, (was, name) in spans.items()]
    width = max((len(was) for was, _ in rows), default=0)
    lines = [f"understood: {proposal.summary}", *(f"{written}: {meaning}" for written, meaning in proposal.sources)]
    lines += [f"{' '.join(proposal.wrapper)}: put before the command of each rank"] * bool(proposal.wrapper)
    lines += [f"left out: {text}" for text in proposal.left_out]
    lines += ["", *(f"{was:<{width}}  ->  {now}" for was, now in rows), *[""] * bool(rows)]
    lines += [
        f"Not found in the command (required): {key.key}, {key.words}" for key in job_proposal.missing if key.required
    ]
    named = {"script.command": "{out} in script.command"}  # the only optional part of the command is its output folder
    optional = [named.get(key.key, key.key) for key in job_proposal.missing if not key.required]
    lines += [f"Not found in the command (optional): {', '.join(optional)}"] * bool(optional)
    command = f"tula check {shlex.quote(str(path))}"
    after = command if job_proposal.is_complete else f"add the required keys, then run {command}"
    data: dict[str, object] = {
        "recognised": {flag: {"value": was, "placeholder": name} for flag, (was, name) in spans.items()},
        "understood": {
            "summary": proposal.summary,
            "launch": proposal.script["launch"],
            "nodes": proposal.nodes,
            "processes_per_node": proposal.gpus_per_node or 1,
            **{key: proposal.script.get(key) for key in ("reference", "length")},
            "options": dict(proposal.sources),
            "wrapper": proposal.wrapper,
            "left_out": proposal.left_out,
        },
        "missing": job_proposal.missing,
        "complete": job_proposal.is_complete,
    }
    return data, [*lines, "", f"wrote {path}; next: {after}"]


def describe_check_state(task: "CheckTask", state: "SchedulerState") -> str:
    """Describe the scheduler state of a cluster check: state, reason and expected start."""
    starts = "" if state.starts_at is None else f", expected to start at {format_local_time(state.starts_at)}"
    reason = f" ({state.reason})" if state.reason else ""
    return f"{task.job} on {format_count(task.nodes)}: {state.state}{reason}{starts}"


def render_cluster_check(cluster_check: "ClusterCheck") -> Iterator["RenderableType"]:
    """Yield two tables with one row per node (equipment and connection), then the network measurements."""
    report = cluster_check.report
    names = _list_node_names(report)
    table = make_table(("node", "ranks", "GPUs", "driver", "torch", "CUDA", "NCCL", "CPUs/\nrank", "memory\n(GiB)", "/dev/shm\n(GiB)"), left=(0, 2, 3, 4, 5, 6))  # fmt: skip
    for name, node in zip(names, report.nodes, strict=True):
        table.add_row(
            name, str(node.ranks), _describe_gpus(node), node.driver or "-", node.torch, node.cuda or "-", node.nccl or "-",
            str(node.cpus), format_size(node.memory, 1024**3), format_size(node.shared, 1024**3),
        )  # fmt: skip
    yield table
    yield ""
    table = make_table(("node", "interface", "address", "clock\n(ms)", "folder", "dataset", "free disk\n(GiB)"), left=(0, 1, 2, 4, 5))  # fmt: skip
    for name, node in zip(names, report.nodes, strict=True):
        table.add_row(
            name, node.interface or "-", node.address, _describe_clock(node), "read only" if node.write_error else "shared",
            {True: "readable", False: "missing", None: "-"}[node.dataset], format_size(node.free_disk, 1024**3),
        )  # fmt: skip
    yield table
    yield ""
    yield from _render_network(report, names)


def _list_node_names(report: "ClusterReport") -> list[str]:
    """Return the host names, numbered if they are not unique."""
    hosts = [node.host for node in report.nodes]
    return hosts if len(set(hosts)) == len(hosts) else [f"{host} #{number}" for number, host in enumerate(hosts, 1)]


def _describe_clock(node: "NodeReport") -> str:
    """Return the offset of a node's clock from the first node's, in ms."""
    if node.node == 0:
        return "0"
    return f"{round(1000 * node.clock_offset, 2) + 0.0:+.2f} ± {1000 * node.clock_error:.2f}"


def _describe_gpus(node: "NodeReport") -> str:
    """Describe the GPUs of a node, such as "4 x NVIDIA A100 (80.0 GiB)"."""
    names = " + ".join(f"{node.gpus.count(name)} x {name}" for name in dict.fromkeys(node.gpus))
    return f"{names} ({format_bytes(node.gpu_memory)})" if node.gpu_memory else "-"


def _render_network(report: "ClusterReport", names: Sequence[str]) -> Iterator["RenderableType"]:
    if report.transfers:
        largest = report.transfers[-1]  # small transfers may be bursts
        table = make_table(("all-reduce\n(KiB)", "time\n(ms)", "Gbit/s\neach way"), left=())
        for transfer in report.transfers:
            table.add_row(
                format_number(transfer.size / 1024),
                format_number(1000 * transfer.seconds),
                format_number(transfer.speed / 1e9),
            )
        yield table
        yield ""
        yield f"network between {names[0]} and {names[1]}: {format_number(largest.speed / 1e9)} Gbit/s each way, as measured with {report.backend}"
    if report.inside:
        largest = report.inside[-1]
        yield f"between two GPUs of {names[0]}: {format_number(largest.speed / 1e9)} Gbit/s each way, as measured with {report.backend}"
    if report.latency is not None:
        yield f"an all-reduce of one number over {format_count(report.ranks, 'rank')} takes {format_number(1e6 * report.latency)} µs"


_PHASE_NAMES = {"begin": "from the start", "same": "resumed", "more": "on more nodes", "half": "resumed at half"}
_VERDICT_DESCRIPTIONS = {
    "none": "the script cannot resume from its own checkpoint: after an interruption it would start from the beginning",
    "same": "the script resumes from its checkpoint at the same batch",
    "epoch": "the script resumes from its checkpoint, at another batch only from the end of an epoch",
    "any": "the script resumes from its checkpoint, also at another batch",
}


def make_resume_test_data(resume_finding: "ResumeTestFinding") -> dict[str, Any]:
    """Return the findings of a resume test for the envelope."""
    return {
        "rehearsal": resume_finding.rehearsal,
        "resumes": resume_finding.resumes,
        "setting": resume_finding.setting,
        "kept": resume_finding.kept,
    }


def render_resume_test(resume_finding: "ResumeTestFinding") -> Iterator["RenderableType"]:
    """Yield a table with one row per start of the script, followed by the conclusion of the resume test."""
    table = make_table(
        ("start", "batch", "steps", "samples", "samples\nleft", "first\nlr", "seconds", "ended"), left=(0, 7)
    )
    rows = resume_finding.rehearsal.starts
    saved = next((row.saved_samples for row in reversed(rows) if row.saved_samples is not None), 0)
    for row in rows:
        remaining = None if row.whole is None else row.whole - (saved if row.phase != "begin" else 0)
        table.add_row(
            _PHASE_NAMES[row.phase], str(row.batch), str(row.steps), str(row.samples), "-" if remaining is None else str(remaining),
            "-" if row.first_lr is None else format_number(row.first_lr, 4), format_number(row.seconds), row.ended,
        )  # fmt: skip
    yield table
    yield "If the command has a placeholder for the length, the test trains fewer samples than a training."
    yield ""
    yield from resume_finding.rehearsal.told
    verdict = resume_finding.rehearsal.verdict
    yield (
        _VERDICT_DESCRIPTIONS[verdict]
        if verdict is not None
        else "it is unknown at which batch sizes the script can resume"
    )
    if resume_finding.setting == "rehearse":
        yield f"script.resume.batch: rehearse now means {resume_finding.resumes}"
    else:
        yield f"script.resume.batch: {resume_finding.setting}"


def describe_config_drift(config_drift: "ConfigDrift", command: str) -> str:
    """Describe how a job file differs from its run (both values), and the command that applies the file."""
    name = make_relative_path(Path(config_drift.file.path))
    if config_drift.problem:
        return f"{name} can no longer be used, so the settings of the run are used: {config_drift.problem}"
    changes = [
        f"{key} {_shorten_text(now)} (run: {_shorten_text(then)})" for key, (then, now) in config_drift.changes.items()
    ]
    return f"{name} differs from this run: {join_first_words(changes, _MAX_CHANGES_SHOWN)}. To use the file: {make_apply_command(config_drift, command)}"


def _shorten_text(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def make_apply_command(config_drift: "ConfigDrift", command: str) -> str:
    """Return the command line that applies a job file; `tula profile` if the file is a different job by now."""
    words = ["tula", "profile" if config_drift.elsewhere else command, make_relative_path(Path(config_drift.file.path))]
    return shlex.join([*words, *(word for override in config_drift.file.overrides for word in ("--set", override))])


# --- Memory

GPU_MEMORY_COMPONENTS = ("reserved", "libraries")
"""Memory components that exist only on a GPU."""


def render_estimate(report: "EstimateReport") -> Iterator["RenderableType"]:
    """Yield the estimated memory of one GPU by local batch and component."""
    yield from render_inspection(report.inspection)
    yield ""
    yield _make_components_table(report)
    yield ""
    yield from _describe_excluded_memory(report)
    yield f"{format_bytes(report.fixed)} at every batch size, and {format_bytes(report.per_sample)} more per sample"
    if report.sharing:
        yield f"sharded: each of {format_count(report.sharing, 'GPU')} holds a share of parameters, gradients and optimizer states"
    yield from _describe_data_memory(report)
    if report.correction:
        yield report.correction
    if report.capacity is None:
        yield "the GPU memory is unknown here; set --memory or cluster.memory_per_gpu"
        return
    size, samples = report.largest_local_batch, report.inspection.dataset_size
    largest = {None: "every batch fits", 0: "no batch fits"}.get(size, f"the largest local batch is {size}")
    if size is not None and size >= samples:
        largest = f"every batch up to {samples}, the size of the dataset, fits"
    yield f"with {100 * report.margin:g} % of {format_bytes(report.capacity)} kept free, {largest}"


def _make_components_table(report: "EstimateReport") -> "Table":
    """Build the table of Eq. 3 at each local batch.

    For a GPU it includes the memory of libraries, the memory reserved by the allocator, and the memory needed.
    """
    from tula_cli.run.records.probes import Components

    byte, unit = choose_size_unit(max(*report.needed, *(row.memory.reserved for row in report.rows)))
    parts = [part for part in Components.model_fields if report.gpu or part not in GPU_MEMORY_COMPONENTS]
    headings = [f"{part}\n({unit})" for part in (*parts, *(["needed"] if report.gpu else []))]
    table = make_table(("local\nbatch", *headings, "fits"), left=(1 + len(headings),))
    for row, needed in zip(report.rows, report.needed, strict=True):
        sizes = [getattr(row.memory, part) for part in parts] + ([needed] if report.gpu else [])
        fits = {True: "yes", False: "no", None: "-"}[report.fits(row)]
        table.add_row(str(row.local_batch), *(format_size(value, byte) for value in sizes), fits)
    return table


def _describe_data_memory(report: "EstimateReport") -> Iterator[str]:
    if report.data is None or not (report.data.shared or report.data.pinned):
        return
    pinned = f" and {format_bytes(report.data.pinned)} pinned" if report.data.pinned else ""
    processes = "no loader processes" if not report.loaders else f"{report.loaders} loader processes"
    yield (
        f"data loading, in host memory: up to {format_bytes(report.data.shared)} in /dev/shm{pinned} per rank, at local batch"
        f" {report.largest_row} with {processes}"
    )


def _describe_excluded_memory(report: "EstimateReport") -> Iterator[str]:
    """Explain the memory outside of tensors: libraries and PyTorch's allocator, or the process on a CPU."""
    if report.gpu:
        yield (
            "reserved: memory that PyTorch's allocator takes if enough is free; needed: the minimum for a training, including"
            f" libraries (CUDA context, cuBLAS, cuDNN, NCCL; {'measured' if report.probed else 'a rule of thumb until a probe has measured them'})"
        )
    elif report.inspection.process:
        yield f"On a CPU, the process itself takes another {format_bytes(report.inspection.process)}, which does not count towards a limit."
        if not report.probed:
            yield (
                "The table counts only tensors. Until a probe has measured heap and workspaces, column fits adds 50 % for them."
                " Very small jobs need two to three times the estimate."
            )
