"""The sentences of the run directory: one function per code of a `Diagnostic`."""

import shlex
from collections.abc import Sequence

from tula_cli.diagnostics import diagnostic
from tula_cli.words import capitalize_first_letter, describe_files, join_words

_RESTORE_ADVICE = "Restore it from a copy of the run, if there is one."


@diagnostic
def damaged_record(*, problem: str, consequence: str, advice: str) -> str:
    return f"{problem}, so {consequence}. {capitalize_first_letter(advice)}."


@diagnostic
def damaged_lines(*, path: str, lines: str, count: int, consequence: str) -> str:
    return f"{path} is damaged: {lines} cannot be read, so {consequence} {'it' if count == 1 else 'them'}. {_RESTORE_ADVICE}"


@diagnostic
def damaged_weights(*, problem: str, consequence: str) -> str:
    return f"{problem}, so {consequence}. {_RESTORE_ADVICE}"


@diagnostic
def damaged_job(*, problem: str) -> str:
    return f"{problem}, so the job is not shown. If the job still runs, cancel the job with the scheduler, then delete that file."


@diagnostic
def earlier_overrides_apply(*, overrides: Sequence[str], runs: Sequence[str]) -> str:
    settings = " ".join(f"--set {shlex.quote(override)}" for override in overrides)
    verb = "applies" if len(overrides) == 1 else "apply"
    return f"{settings} of an earlier command still {verb} to {join_words(runs)}. Commands that plan or train use the values of the job file if you name it."


@diagnostic
def code_has_changed(*, code: str, earlier_run: str, run: str, earlier_path: str, files: Sequence[str]) -> str:
    return (
        f"{capitalize_first_letter(code)} has changed since run {earlier_run} was made{describe_files(files)}, so a new run is used: {run}."
        f" For the earlier run, add --run {earlier_path}."
    )


@diagnostic
def copy_of_run(*, original: str) -> str:
    return f"This run is a copy of {original}. The jobs of that run are not shown or cancelled here."


@diagnostic
def code_not_copied() -> str:
    return "With script.code: none, no code is copied: each job runs the files as they are when the job starts."


@diagnostic
def command_names_no_file() -> str:
    return "script.command names none of your files, so no code is copied: each job runs the program that is installed when the job starts."


@diagnostic
def only_shell_script_copied(*, name: str, folder: str) -> str:
    return (
        f"{name} is copied, but the files that it names are read from {folder}."
        " A change to them also affects jobs that were already submitted."
    )


@diagnostic
def files_too_large_to_copy(*, paths: str, file_megabytes: int, total_megabytes: int, files: int) -> str:
    return (
        f"Too large for the code snapshot: {paths} (limit: {file_megabytes} MB per file, {total_megabytes} MB and"
        f" {files} files in total). Such a path is linked instead, so a change there also affects jobs that were already submitted."
    )


@diagnostic
def code_unreadable(*, paths: str) -> str:
    return (
        f"No permission to read {paths}, so the code snapshot does not contain their contents."
        " If a job needs these, change the permissions."
    )


@diagnostic
def secrets_linked(*, paths: str) -> str:
    return (
        f"Judging by their names, these files may contain secrets: {paths}. They are linked instead of copied: a change to"
        " them affects jobs that were already submitted, and starts no new run."
    )


@diagnostic
def folder_with_many_files(*, paths: str, most: int, folder: str) -> str:
    return (
        f"More than {most} files are next to the code in {paths}. Jobs find them by their path from {folder},"
        " but not through __file__."
    )


@diagnostic
def earlier_code_used(*, code: str, run: str, missing_from: str | None, files: Sequence[str]) -> str:
    change = f"has changed{describe_files(files)}" if missing_from is None else f"is not in {missing_from}"
    return f"{capitalize_first_letter(code)} {change}. {run} continues with the code that it was measured with."


@diagnostic
def code_changed_since_measurement(*, code: str, run: str, files: Sequence[str]) -> str:
    return (
        f"{capitalize_first_letter(code)} has changed since {run} was measured{describe_files(files)}."
        " The new code is trained, but times and costs are predicted for the old code."
    )
