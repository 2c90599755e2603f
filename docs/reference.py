"""Write the pages of reference/: job-file.md, commands.md and tables.md from the code, what-happens-when.md from the tests.

    python docs/reference.py        # run by `make docs`; a test compares the committed pages with its output

The description of a key is its comment in the source of its section: beside the field, or on the lines above it.
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from promises import GROUPS, promises
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.models import ArgumentInfo, ParameterInfo

from tula_cli import errors
from tula_cli.cli import options
from tula_cli.cli.app import BROKEN_PIPE_EXIT_CODE, COMMANDS
from tula_cli.cluster.decisions import TRAINING_RULES
from tula_cli.errors import TulaError
from tula_cli.host.failures import FAILURE_KINDS
from tula_cli.presets import AGS_PRESETS
from tula_cli.run.frames import list_columns
from tula_cli.run.records.base import OutcomeClass
from tula_cli.run.records.failures import NODE_FAILURES
from tula_cli.run.records.recommendations import ADDED_COLUMNS, CAVEATS, Prediction
from tula_cli.services.api import RESULT_COLUMNS
from tula_cli.spec.job import JobSpec
from tula_cli.spec.json_schema import describe_keys, list_inner_sections, walk_sections
from tula_cli.spec.kinds import Section, parse_minutes, parse_size, require_known_method
from tula_cli.spec.methods import METHODS
from tula_cli.spec.old_keys import REMOVED_KEYS, RENAMED_KEYS
from tula_cli.spec.resources import Cluster, JobBilling
from tula_cli.spec.scripts.placeholders import PLACEHOLDERS

REFERENCE = Path(__file__).parent / "reference"
NOTE = "<!-- Written by docs/reference.py from the code; edit that instead. -->"
PLAIN_TYPES = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    NoneType: "null",
    Any: "any value",
    JobBilling: "mapping",
}
PARSED_TYPES = {
    parse_size: "size such as 16GiB or 800MB",
    parse_minutes: "minutes, or a time as in SLURM: 1-12:00:00",
    require_known_method: ", ".join(f"`{name}`" for name in METHODS) + " or text",
}
"""Types with a special notation, by the function that parses it."""


# --- the job file

OLD_KEYS_HEAD = """tula still reads a renamed key under its old name, with a warning. For a removed key, it exits with an error that shows
what to set instead, or what tula does now. In runs of older versions, it ignores removed keys."""


def render_job_file_page() -> str:
    """Return the page of all keys of a job file."""
    parts = [NOTE, "# The job file", SPEC_HEAD, *_render_section(JobSpec)]
    seen: set[type[Section]] = {JobSpec}
    for path, section in walk_sections(JobSpec):
        if section not in seen:
            seen.add(section)
            parts += [f"## {path}", *_render_section(section)]
        if path == "script":
            parts += [
                "The texts of this section may contain placeholders, which tula replaces when it starts a process:",
                _render_placeholders(),
            ]
        if path == "ags":
            parts += ["Defaults of the keys by `preset`:", _render_presets()]
    parts += ["## Renamed and removed keys", OLD_KEYS_HEAD, _render_old_keys()]
    return "\n\n".join(parts) + "\n"


SPEC_HEAD = """All keys of the job file with type, default and meaning. For an unknown key, tula exits with an error that names the nearest known key.
`batch` is global: samples per optimizer step over all GPUs. `local_batch` is the batch of one GPU. `tula init` writes a file with
comments. [The quickstart](../tutorial/quickstart.md#the-job-file) shows the smallest useful file, and [settings](../how-to/settings.md) explains where values come from."""


def _render_old_keys() -> str:
    """Return the tables of renamed and removed keys."""
    renamed = [f"| `{old}` | `{new}` |" for old, new in RENAMED_KEYS.items()]
    removed = [f"| `{key}` | {advice} |" for key, advice in REMOVED_KEYS.items()]
    tables = (
        ["| old name | name |", "| --- | --- |", *renamed],
        ["| removed | what to set instead, or what tula does now |", "| --- | --- |", *removed],
    )
    return "\n\n".join("\n".join(table) for table in tables)


def _render_placeholders() -> str:
    rows = [f"| `{{{name}}}` | {_escape_cell(words)} |" for name, words in PLACEHOLDERS.items()]
    return "\n".join(["| placeholder | |", "|---|---|", *rows])


def _render_section(section: type[Section]) -> list[str]:
    keys = describe_keys(section)
    rows = [
        f"| `{name}` | {_escape_cell(_describe_type(hint))} | {_describe_default(section.model_fields[name])} | {_escape_cell(keys[name])} |"
        for name, hint in get_type_hints(section, include_extras=True).items()
        if name in section.model_fields
    ]
    words = inspect.cleandoc(section.__doc__ or "")
    return [words, "\n".join(["| key | type | default | |", "|---|---|---|---|", *rows])]


def _describe_type(hint: Any) -> str:
    """Describe a type in words."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _describe_annotated_type(parts[0], parts[1:])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in parts)
    if origin in (Union, UnionType):
        return " or ".join(_describe_type(part) for part in parts if part is not NoneType)
    if origin in (list, tuple):
        return f"list of {_describe_type(parts[0])}"
    if origin is dict:
        inner = next(list_inner_sections(parts[1]), None)
        return f"mapping of names to {_describe_type(parts[1])}" if inner else "mapping"
    if inner := next(list_inner_sections(hint), None):
        return f"[{inner.__name__}](#{_section_anchor(inner)})"
    return PLAIN_TYPES[hint]


def _section_anchor(section: type[Section]) -> str:
    path = next(path for path, result in walk_sections(JobSpec) if result is section)
    return path.replace(".", "").lower()


def _describe_annotated_type(base: Any, extras: tuple[Any, ...]) -> str:
    for extra in extras:
        if getattr(extra, "func", None) in PARSED_TYPES:
            return PARSED_TYPES[extra.func]
    limits = [limit for extra in extras if isinstance(extra, FieldInfo) for limit in extra.metadata]
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    words = [
        f"{word} {getattr(limit, sign):,}" for limit in limits for sign, word in signs.items() if hasattr(limit, sign)
    ]
    return ", ".join([_describe_type(base), *words])


def _describe_default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "required"
    if value is None or value in ([], (), {}, ""):
        return "none" if value is None else "empty"
    if isinstance(value, Section):
        return "as below" if value.model_dump() else "empty"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _render_presets() -> str:
    keys = AGS_PRESETS["paper"]
    rows = [
        f"| `{key}` | " + " | ".join(_format_value(preset[key]) for preset in AGS_PRESETS.values()) + " |"
        for key in keys
    ]
    names = " | ".join(f"`{name}`" for name in AGS_PRESETS)
    return "\n".join([f"| key | {names} |", "|---" * (len(AGS_PRESETS) + 1) + "|", *rows])


def _format_value(value: Any) -> str:
    return ", ".join(f"{key}: {inner}" for key, inner in value.items()) if isinstance(value, dict) else f"{value}"


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


# --- the commands


COMMANDS_HEAD = """Commands write their answer to stdout and progress to stderr. Tables and sentences fit the width of a terminal; through a
pipe, each row and each sentence is one line. The six commands of the workflow come first, in the order of use:"""


def render_commands_page() -> str:
    """Return the page of all commands and of the exit codes."""
    params = {name: _render_parameters(command.build_command().callback) for name, command in COMMANDS.items()}
    shared = set.intersection(*(set(rows) for rows in params.values()))
    parts = [NOTE, "# Commands", COMMANDS_HEAD, _render_overview()]
    parts += ["Every command takes:", _render_table([row for row in next(iter(params.values())) if row in shared])]
    for name, command in COMMANDS.items():
        value = [row for row in params[name] if row not in shared]
        parts += [f"## tula {name}", _command_summary(command), f"```sh\n{command.example}\n```", _render_table(value)]
    parts += ["## Exit codes", _render_exit_codes(), "## How a job ends", OUTCOMES_HEAD, _render_outcomes()]
    return "\n\n".join(parts) + "\n"


def _command_summary(command: options.Command) -> str:
    return inspect.cleandoc(command.load_function().__doc__ or "")


def _render_overview() -> str:
    rows = [f"| [`tula {name}`](#tula-{name}) | {command.summary} |" for name, command in COMMANDS.items()]
    return "\n".join(["| command | what it does |", "|---|---|", *rows])


def _render_table(rows: list[str]) -> str:
    return "\n".join(["| | |", "|---|---|", *rows])


def _render_parameters(callback: Any) -> list[str]:
    """Return a table row for each argument and option of a command."""
    return [
        f"| {_format_usage(param, info)} | {_escape_cell(info.help or '')}{_format_parameter_default(param)} |"
        for param in inspect.signature(callback).parameters.values()
        for info in get_args(param.annotation)[1:]
        if isinstance(info, ParameterInfo)
    ]


def _format_usage(param: inspect.Parameter, info: ParameterInfo) -> str:
    if isinstance(info, ArgumentInfo):
        several = any(get_origin(kind) is list for kind in get_args(get_args(param.annotation)[0]))
        return f"`{(info.metavar or param.name).strip('[] .')}{'...' * several}`"
    kind = get_args(param.annotation)[0]
    # Inside Annotated, typer reads the first of the names as the default.
    given = [name for name in (info.default, *(info.param_decls or ())) if isinstance(name, str)]
    named = given or [f"--{param.name.replace('_', '-')}"]
    names = ", ".join(f"`{name.replace('/', '`, `')}`" for name in sorted(named, key=len, reverse=True))
    if bool in (kind, *get_args(kind)):
        return names
    choices = ", ".join(f"`{choice}`" for choice in get_args(kind)) if get_origin(kind) is Literal else ""
    return (
        f"{names} {choices or _escape_cell(info.metavar or '') or ('TEXT' if str in (kind, *get_args(kind)) else 'N')}"
    )


def _format_parameter_default(param: inspect.Parameter) -> str:
    return (
        ""
        if param.default in (None, param.empty) or isinstance(param.default, bool)
        else f" Default: `{param.default}`."
    )


def _render_exit_codes() -> str:
    result = sorted({(kind.exit_code, kind.code, inspect.cleandoc(kind.__doc__ or "")) for kind in _error_classes()})
    rows = [f"| {number} | `{code}` | {words.splitlines()[0]} |" for number, code, words in result]
    last = f"| {BROKEN_PIPE_EXIT_CODE} | | The program that read the output (`head`, a pager) exited early. |"
    return "\n".join(["| exit code | `error.code` in `--json` | |", "|---|---|---|", "| 0 | | Done. |", *rows, last])


OUTCOMES_HEAD = """An attempt that fails has one of these outcomes. `tula status --json` lists the `attempts`. Each has its `outcome`, the host,
the rank if a single rank is the cause, and a `decision`. A command that waits for the job exits with this exit code, unless tula
starts the training again. The column "what follows" applies to trainings; the first condition that is true decides
(`cluster/decisions.py`). Without a scheduler, the next job is the next `tula train`. Attempts remain as long as fewer than `train.max_attempts` have failed without a
newer checkpoint. Failures of the file system are counted separately in each job. When a training ends, tula cancels the other jobs of
its chain. tula restarts profiling jobs and evaluations under the same conditions, but at most twice. Any other outcome
of a probe is stored as its result. The advice is for jobs without a script on SLURM; with a script, messages name the
settings of the script."""


def _describe_reaction(outcome: OutcomeClass) -> str:
    """Describe the reaction to a failure of a training, from the rows of the table of decisions."""
    rows = [(situation, action) for kind, situation, action in TRAINING_RULES if kind == outcome]
    if not rows or rows[-1][0] != "always":
        rows.append(("always", "the end"))
    texts = [f"If {situation}, {_describe_action(action)}." for situation, action in rows[:-1]]
    last = f"{_describe_action(rows[-1][1])}."
    return " ".join([*texts, f"Otherwise, {last}" if texts else last[0].upper() + last[1:]])


def _describe_action(action: str) -> str:
    """Describe an action of the table of decisions in a clause."""
    if action == "the end":
        return "the training ends"
    if action.startswith("new processes"):
        return f"tula starts {action}"
    return action.replace("the next job,", "the next job").replace("the next job", "the next job resumes", 1)


def _render_outcomes() -> str:
    rows = [
        f"| `{outcome}` | {_escape_cell(ending.means)} | {ending.error.exit_code} | {'yes' if outcome in NODE_FAILURES else '-'} | {_escape_cell(_describe_reaction(outcome))} | {_escape_cell(ending.format_advice(Cluster(kind='slurm')))} |"
        for outcome, ending in FAILURE_KINDS.items()
    ]
    return "\n".join(
        [
            "| outcome | what happened | exit code | names the node | what follows | what to do |",
            "|---|---|---|---|---|---|",
            *rows,
        ]
    )


def _error_classes() -> list[type[TulaError]]:
    """Return the error classes with an exit code, which two modules define."""
    named = [*vars(errors).values(), *vars(options).values()]
    kinds = [kind for kind in named if isinstance(kind, type) and issubclass(kind, TulaError)]
    return [kind for kind in kinds if "exit_code" in vars(kind)]


# --- what happens when


FAULTS_HEAD = """Each row shows a fault and tula's reaction, both tested in the named file (mark `promise`). The tests in
`tests/e2e` kill real processes, those in `tests/slurm` do so on a real SLURM cluster of several nodes. `make chaos` repeatedly
kills ranks, supervisors and nodes of trainings at times derived from `SEED`, and compares the resulting weights bit by bit with
those of an undisturbed training. [How a job ends](commands.md#how-a-job-ends) lists all outcomes with their exit codes."""


def render_faults_page() -> str:
    """Return the page of what happens when something goes wrong."""
    kept = promises()
    parts = [NOTE, "# What happens when ...", FAULTS_HEAD]
    for about in GROUPS:
        rows = [
            f"| {_escape_cell(item.when)} | {_escape_cell(item.then)} | `{item.test.partition('::')[0]}` |"
            for item in kept
            if item.about == about
        ]
        if rows:
            parts += [
                f"## {about[0].upper()}{about[1:]}",
                "\n".join(["| when | then | tested in |", "|---|---|---|", *rows]),
            ]
    return "\n\n".join(parts) + "\n"


# --- tables of the Python API

TABLES_HEAD = """The functions of [the Python API](../how-to/python.md) return results with a pandas DataFrame. `batch` is always global. An
integer column is of type `Int64` if values may be missing."""
ANSWER_HEAD = """`frame()` of the result of `tula.recommend`: one row per configuration, fastest first. `low` and `high` are the ends of a
90 % interval. Columns that begin with `parts` are a breakdown of the time. Those that begin with `same_progress`
apply to the progress that the job's epochs make at the reference batch. The rows of `tula recommend --json` have the same fields,
with `parts` and `same_progress` as objects."""


def render_tables_page() -> str:
    """Return the page of the columns of the tables that the Python API returns."""
    answer = {column.name: column.description for column in list_columns(Prediction)} | ADDED_COLUMNS
    return (
        "\n\n".join(
            [
                NOTE,
                "# Tables of the Python API",
                TABLES_HEAD,
                "## recommendation.frame()",
                ANSWER_HEAD,
                _render_columns(answer),
                "The names in `caveats`; those ending in `_within_noise` begin with the quantity (`time_within_noise`):",
                "\n".join(f"- `{name}`: {text}" for name, text in CAVEATS.items()),
                "## run.results()",
                "One row per probe of a run.",
                _render_columns(RESULT_COLUMNS),
            ]
        )
        + "\n"
    )


def _render_columns(columns: Mapping[str, str]) -> str:
    rows = [f"| `{name}` | {_escape_cell(description)} |" for name, description in columns.items()]
    return "\n".join(["| column | content |", "|---|---|", *rows])


PAGES = {
    "job-file.md": render_job_file_page,
    "commands.md": render_commands_page,
    "what-happens-when.md": render_faults_page,
    "tables.md": render_tables_page,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page(), encoding="utf-8")
