"""`tula init` and `tula check`."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from tula_cli.cli.options import ADVANCED_PANEL
from tula_cli.cli.runs import JobOrRun, find_runs, resolve_job_or_run
from tula_cli.cli.waiting import follow_work, make_inspector, refuse_option
from tula_cli.errors import SpecError
from tula_cli.options import DEFAULT_RUNS_FOLDER, CheckedNodes, Fresh, NodeType, Overrides, Root, Timeout
from tula_cli.show import check as show_check
from tula_cli.show import screen as show_screen
from tula_cli.show import tables
from tula_cli.show.screen import Screen

if TYPE_CHECKING:
    from tula_cli.run.directory import Run
    from tula_cli.services.init import JobFileProposal
    from tula_cli.spec.job import JobSpec


def init(
    screen: Screen,
    kind: Annotated[Literal["local", "slurm"], typer.Argument(help="Where the job will run.")] = "local",
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Job file to write.")] = Path(
        "job.yaml"
    ),
    command: Annotated[
        str | None,
        typer.Option(
            "--from-command",
            metavar="COMMAND",
            help="Write a job for your own script, from the command that starts it today.",
        ),
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option(
            "--from-sbatch",
            metavar="FILE",
            help="Write a job for your own script, from the sbatch file that starts it today.",
        ),
    ] = None,
    hooks: Annotated[
        bool,
        typer.Option(
            "--hooks",
            help="Write only tula_hooks.py, for a script whose loop has no torch optimizer.",
            rich_help_panel=ADVANCED_PANEL,
        ),
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Write all keys, with defaults and explanations.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a job file with the most important keys.

    With --from-command or --from-sbatch, the job runs your own script. If a value is missing in its command, tula
    init asks for it, or exits with an error if there is no terminal.
    """
    if hooks:
        unused = {kind: "kind", "--output": "output", "--full": "full"}
        given = {option: parameter in screen.given_options for option, parameter in unused.items()}
        _refuse_options(given, tuple(unused), to="--hooks")
        return _write_hooks(screen, command or script, force=force)
    refuse_option(command is not None and script is not None, "--from-command", "and --from-sbatch cannot be combined")
    from tula_cli.cluster.slurm import site
    from tula_cli.host import devices
    from tula_cli.run.files import MODE_FOR_ALL, write_file_atomically
    from tula_cli.services.init import (
        make_job_from_command,
        make_job_from_template,
        name_file_in_comments,
        shorten_job_file,
        warn_missing_file,
        write_schemas_and_add_reference,
    )
    from tula_cli.services.init_from_sbatch import make_job_from_sbatch
    from tula_cli.spec.job import describe_training_method
    from tula_cli.spec.load import validate_job
    from tula_cli.spec.methods import get_training_method
    from tula_cli.spec.scripts.script import get_default_train
    from tula_cli.spec.yaml_text import parse_yaml

    _check_output_path(output, force=force)
    if script is not None:
        is_local = kind == "local" and "kind" in screen.given_options
        refuse_option(is_local, "local", "cannot be combined with --from-sbatch, which writes a job for SLURM")
        kind = "slurm"
    offered = site.query_site() if kind == "slurm" else None
    gpus = devices.count_gpus()
    make_proposal: Callable[..., JobFileProposal] | None = None
    if script is not None:
        make_proposal = partial(make_job_from_sbatch, _read_script(script), str(script), offered)
    elif command is not None:
        cores = len(os.sched_getaffinity(0))
        make_proposal = partial(make_job_from_command, command, kind, offered, gpus=gpus, cores=cores)
    if make_proposal is None:
        text = make_job_from_template(kind, offered, gpus=gpus)
        lines: list[str] = [f"wrote {output}; next: tula check {shlex.quote(str(output))}"]
        data: dict[str, object] = {}
        spec = validate_job(parse_yaml(text, source=str(output)), source=str(output))
        method, line = spec.train.method, describe_training_method(spec)
    else:
        draft = _prompt_for_missing_settings(screen, make_proposal)
        text = draft.text
        data, lines = show_check.summarize_proposal(draft, output)
        default, reason = get_default_train(draft.recognised.script["command"])
        method, line = default["method"], get_training_method(default["method"]).describe(None, reason)
        screen.print_warnings((*draft.warnings, *warn_missing_file(draft.recognised.script["command"])))
    text = name_file_in_comments(text if full else shorten_job_file(text), output)
    write_file_atomically(output, write_schemas_and_add_reference(text, output), mode=MODE_FOR_ALL)
    if kind == "slurm" and script is None:
        screen.print_note(show_check.describe_site(offered))
    screen.print_note(f"train.method is {method}: {get_training_method(method).summary.partition(';')[0]}.")
    screen.print_answer({"path": output, "kind": kind, "site": offered, "method_line": line, **data}, lines)
    return None


def _check_output_path(output: Path, *, force: bool) -> None:
    if output == Path("-"):
        raise SpecError("-o -: tula init cannot write to standard output", "name a file, for example -o job.yaml")
    if output.is_dir():
        raise SpecError(f"-o {output} is a folder", f"name a file, for example -o {output / 'job.yaml'}")
    if output.exists() and not force:
        raise SpecError(f"{output} already exists", "choose another name with -o, or overwrite it with --force")
    if not output.absolute().parent.is_dir():
        raise SpecError(f"folder {output.parent} does not exist", "create it, or choose another file with -o")


def _read_script(path: Path) -> str:
    from tula_cli.spec.yaml_text import read_text_file

    try:
        return read_text_file(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise SpecError(
            f"cannot read {path}: {reason}", "--from-sbatch needs the file that you pass to sbatch"
        ) from None


def _prompt_for_missing_settings(screen: Screen, make_proposal: "Callable[..., JobFileProposal]") -> "JobFileProposal":
    """Return the job, asking on a terminal for `answers` that the command does not state; an error without a terminal."""
    from tula_cli.services.init import LENGTH_QUESTION
    from tula_cli.spec.scripts.launchers import UnknownFact

    asks = sys.stdin.isatty() and not screen.as_json
    answers: dict[str, str] = {}
    while True:
        try:
            draft = make_proposal(answers=answers)
        except UnknownFact as unknown:
            if not asks or (answer := screen.ask_for_value(unknown.message, unknown.question, unknown.choices)) is None:
                raise
            answers[unknown.key] = answer
            continue
        if draft.is_complete or not asks or LENGTH_QUESTION in answers or "length" in draft.recognised.script:
            return draft
        question = "how many epochs does the command train? (press Enter to set the number in the file later)"
        answers[LENGTH_QUESTION] = screen.ask_for_value("", question) or ""


def _write_hooks(screen: Screen, given: object, *, force: bool) -> None:
    refuse_option(
        given is not None,
        "--hooks",
        "cannot be combined with --from-command or --from-sbatch; run tula init once for each",
    )
    from tula_cli.assets import find_asset
    from tula_cli.run.files import MODE_FOR_ALL, write_file_atomically

    path = Path("tula_hooks.py")
    if path.exists() and not force:
        raise SpecError(f"{path} already exists", "overwrite it with --force")
    write_file_atomically(path, find_asset(f"templates/{path}").read_text(encoding="utf-8"), mode=MODE_FOR_ALL)
    screen.print_answer({"path": path}, show_check.render_hooks(path))


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The options of `tula check`."""

    job: Annotated[
        Path | None,
        typer.Argument(
            metavar="JOB_OR_RUN",
            help="A job file (tula init writes one), or the name or folder of a run.",
        ),
    ] = None
    overrides: Overrides = ()
    show_origin: Annotated[
        bool, typer.Option("--show-origin", help="Show for each value which file, variable or option sets it.")
    ] = False
    offline: Annotated[
        bool,
        typer.Option("--offline", help="Do not build the model and the dataset.", rich_help_panel=ADVANCED_PANEL),
    ] = False
    on_cluster: Annotated[
        bool, typer.Option("--on-cluster", help="Check the nodes of the cluster, in a job of about one minute.")
    ] = False
    rehearse: Annotated[
        bool,
        typer.Option("--rehearse", help="Test that your script resumes from its own checkpoint, in a job on one node."),
    ] = False
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="Estimate, without a GPU, which batch sizes fit into a GPU with this memory, for example 16GiB.",
        ),
    ] = None
    nodes: CheckedNodes = None
    root: Root = DEFAULT_RUNS_FOLDER
    fresh: Fresh = False
    node_type: NodeType = None
    timeout: Timeout = None


def check(screen: Screen, options: CheckOptions) -> None:
    """Check a job file, and show what profiling it would cost.

    Only --on-cluster and --rehearse submit a job. Run the same command again to follow that job.
    """
    job = options.job
    if job is None:
        raise SpecError("no job file was given", "for example tula check job.yaml")
    given = {
        "--on-cluster": options.on_cluster,
        "--rehearse": options.rehearse,
        "--show-origin": options.show_origin,
        "--offline": options.offline,
        "--nodes": options.nodes is not None,
        "--timeout": options.timeout is not None,
        "--fresh": options.fresh,
    }
    if options.memory is not None:
        unused = ("--on-cluster", "--rehearse", "--show-origin", "--offline", "--nodes", "--timeout")
        _refuse_options(given, unused, to="--memory")
        return _show_memory_estimate(screen, job, options, size=options.memory)
    if options.rehearse:
        _refuse_options(given, ("--on-cluster", "--nodes", "--show-origin", "--offline"), to="--rehearse")
        return _test_resume(screen, job, options)
    if options.on_cluster:
        _refuse_options(given, ("--show-origin", "--offline", "--fresh"), to="--on-cluster")
        return _check_on_cluster(screen, job, options)
    refuse_option(
        given["--nodes"],
        "--nodes",
        "needs --on-cluster; to set the numbers of nodes of the probes, set search.nodes",
    )
    refuse_option(given["--timeout"], "--timeout", "needs --on-cluster or --rehearse")
    return _check_job(screen, job, options)


def _check_job(screen: Screen, job: Path, options: CheckOptions) -> None:
    from tula_cli.services import check as services_check

    file, spec, runs = _load_check_target(screen, job, options)
    origins = _list_value_origins(file, spec, options.overrides) if options.show_origin else {}
    refuse_option(
        options.fresh and options.offline, "--fresh", "has no effect with --offline; remove one of the two options"
    )
    inspect = make_inspector(screen, Path(options.root), fresh=options.fresh)
    checked = services_check.check_job_on_all_node_types(
        runs, node_type=options.node_type, online=not options.offline, inspector=inspect
    )
    screen.print_answer(*show_check.render_check_reports(checked.reports, origins))
    for report in checked.reports.values():
        screen.print_warnings(report.warnings)
    screen.print_warnings(checked.left_out)
    checked.require_sound(str(job))


class CheckTarget(NamedTuple):
    """The job or run to check."""

    file: Path  # that the settings come from
    spec: "JobSpec"
    runs: "Sequence[Run]"  # may not exist yet


def _load_check_target(screen: Screen, job: Path, options: CheckOptions) -> CheckTarget:
    """Return the job or run that the command line names."""
    from tula_cli.run.code import make_runs_of_job
    from tula_cli.run.job_runs import make_runs
    from tula_cli.spec.load import load_spec

    root = Path(options.root)
    job_file, named = resolve_job_or_run(job, (), root)
    if job_file is not None:
        spec = load_spec(job_file, overrides=options.overrides)
        runs = make_runs(root, spec) if options.offline else make_runs_of_job(root, spec)
        return CheckTarget(job_file, spec, runs)
    runs = find_runs(screen, named, root, options.overrides)
    return CheckTarget(runs[0].path / "spec.yaml", runs[0].spec, runs)


def _refuse_options(given: dict[str, bool], unused: Sequence[str], *, to: str) -> None:
    for option in unused:
        refuse_option(given[option], option, f"has no effect with {to}; remove one of the two options")


def _check_on_cluster(screen: Screen, job: Path, options: CheckOptions) -> None:
    from tula_cli.cluster import launcher
    from tula_cli.services import nodes as service

    chosen = JobOrRun(job=job, root=options.root, overrides=options.overrides)
    runs = chosen.open_runs(screen)
    work = service.run_node_check(
        runs,
        launcher.make_launcher,
        nodes=options.nodes,
        node_type=options.node_type,
        timeout=options.timeout,
        file=chosen.find_settings_origin(runs),
    )
    cluster_check = follow_work(screen, work)
    screen.print_answer(cluster_check, show_check.render_cluster_check(cluster_check))
    screen.print_warnings(cluster_check.warnings)
    cluster_check.require_sound(str(job))


def _test_resume(screen: Screen, job: Path, options: CheckOptions) -> None:
    from tula_cli.cluster import launcher
    from tula_cli.services import resume_test as service

    chosen = JobOrRun(job=job, root=options.root, overrides=options.overrides)
    runs = chosen.open_runs(screen)
    work = service.run_resume_test(
        runs,
        launcher.make_launcher,
        node_type=options.node_type,
        timeout=options.timeout,
        fresh=options.fresh,
        file=chosen.find_settings_origin(runs),
    )
    finding = follow_work(screen, work)
    if finding.contradiction:
        screen.print_warning(finding.contradiction)
    screen.print_answer(show_check.make_resume_test_data(finding), show_check.render_resume_test(finding))
    finding.require_found(str(job))
    finding.require_resumable_script(
        str(job), f"correct how the script resumes, and run tula check --rehearse {shlex.quote(str(job))} again"
    )


def _list_value_origins(job: Path, spec: "JobSpec", overrides: Sequence[str]) -> dict[str, show_screen.Origin]:
    from tula_cli.spec.merge import flatten_mapping, merge_sources

    sources = merge_sources(job, overrides=overrides)[1]
    values = flatten_mapping(spec.model_dump(mode="json"))
    return {key: show_screen.Origin(value, _find_origin_of_key(key, sources)) for key, value in values}


def _find_origin_of_key(key: str, sources: dict[str, str]) -> str:
    """Return the source of a key, which may have been set as part of a list or mapping."""
    parts = key.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((sources[prefix] for prefix in prefixes if prefix in sources), "default")


def _show_memory_estimate(screen: Screen, job: Path, options: CheckOptions, *, size: str) -> None:
    """Show the estimated memory of one GPU by batch size, corrected by probes of the job if there are any."""
    from tula_cli.services import estimate as service

    runs = _load_check_target(screen, job, options).runs
    capacity = service.parse_capacity("--memory", size)
    inspect = make_inspector(screen, Path(options.root), fresh=options.fresh)
    reports = service.estimate_memory_on_all_node_types(
        runs, capacity=capacity, node_type=options.node_type, inspector=inspect
    )
    screen.print_answer(tables.make_data_by_type(reports), tables.render_each_type(reports, show_check.render_estimate))
