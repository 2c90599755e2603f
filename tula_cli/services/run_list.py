"""`tula list`: the runs below a folder.

Only the fields that a line shows are read, as plain JSON; records are not validated in full.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tula_cli.errors import BadMeasurements, TulaError
from tula_cli.run import files, parsed_spec
from tula_cli.spec.scripts.placeholders import find_program_name
from tula_cli.words import compute_perplexity

# --- Summaries of runs


@dataclass(frozen=True)
class RunSummary:
    """One line of `tula list`; for a damaged run, `problem` is the reason why it cannot be read."""

    id: str
    path: Path
    changed: float | None  # Unix time of the newest record; None if there is none
    model: str = ""
    dataset: str = ""
    script: str = ""  # file name of the script; empty for a job with model and dataset
    measured: int = 0
    out_of_memory: int = 0
    failed: int = 0
    recommendation: Mapping[str, Any] | None = None  # content of recommendation.json
    trained: int = 0  # finished training runs
    best_top1: float | None = None  # percent (as reported, for a script); None if no training has classes
    best_loss: float | None = None  # lowest evaluation loss of all trainings
    best_perplexity: float | None = None  # perplexity of a language model at that loss; None for other models
    damaged: tuple[str, ...] = ()  # problems of unreadable records, which are left out
    problem: str = ""


def list_runs(root: Path) -> tuple[RunSummary, ...]:
    """Return the runs below `root`, the last changed first, unreadable ones last; the scheduler is not queried.

    Raises:
        TulaError: `root` cannot be read.
    """
    summaries = [_summarize_run(run) for run in parsed_spec.list_run_folders(root)]
    return tuple(sorted(summaries, key=lambda run: run.changed or 0.0, reverse=True))


def _summarize_run(run: Path) -> RunSummary:
    damaged: list[str] = []
    try:
        names = _read_job_names(run)
        recommended = _read_sound_records([run / "recommendation.json"], damaged, _RECOMMENDATION_TYPES)
        results = _read_sound_records(files.list_files(run / "results"), damaged, _RESULT_TYPES)
        jobs = _read_sound_records(files.list_files(run / "jobs"), damaged, _JOB_TYPES)
        trainings = [run / "train" / name / "result.json" for name in files.list_names(run / "train")]
        finished = _read_sound_records(trainings, damaged, _TRAINED_TYPES)
    except TulaError as error:
        return RunSummary(id=run.name, path=run, changed=None, problem=error.message)
    kinds = [result["kind"] for result in results]
    moments = [at for result in results if (at := result.get("measured_at")) is not None]
    moments += [job["submitted_at"] for job in jobs] + [result["finished_at"] for result in finished]
    moments += [record["created_at"] for record in recommended]
    top1, loss, perplexity = _find_best_result(finished)
    return RunSummary(
        id=run.name,
        path=run,
        changed=max(moments, default=None),
        **names,
        measured=kinds.count("measured"),
        out_of_memory=kinds.count("out_of_memory"),
        failed=kinds.count("failed"),
        recommendation=recommended[0] if recommended else None,
        trained=len(finished),
        best_top1=top1,
        best_loss=loss,
        best_perplexity=perplexity,
        damaged=tuple(damaged),
    )


def _find_best_result(finished: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None, float | None]:
    """Return the best top-1, loss and perplexity over all finished trainings; each is None if it is not known."""
    lowest_loss = min((loss for result in finished if (loss := result.get("best_loss")) is not None), default=None)
    is_language_model = any("perplexity" in result.get("metrics", ()) for result in finished)
    # An older tula wrote a top-1 of 0 where there were no classes.
    with_top1 = [result for result in finished if {"top1", "best_top1"} & set(result.get("metrics", ()))]
    top1 = max((top1 for result in with_top1 if (top1 := result["best_top1"]) is not None), default=None)
    return top1, lowest_loss, compute_perplexity(lowest_loss) if is_language_model and lowest_loss is not None else None


def _read_job_names(run: Path) -> dict[str, str]:
    known = parsed_spec.read_parsed_spec(run)
    if known is not None:
        with contextlib.suppress(KeyError, TypeError, AttributeError):  # damaged record: read the YAML instead
            return _select_names(known.spec)
    from tula_cli.run.directory import RunDir  # the job file was edited by hand: validate it as other commands do

    return _select_names(RunDir(run).read_spec().model_dump())


def _select_names(spec: Mapping[str, Any]) -> dict[str, str]:
    if script := spec.get("script"):
        return {"script": find_program_name(script["command"])}
    return {"model": spec["model"]["name"], "dataset": spec["dataset"]["name"]}


# --- Unvalidated records

_Types = Mapping[str, tuple[type, ...]]
"""The types of a record's fields; a field that may be missing has NoneType among them."""
_NUMBER_TYPES, _OPTIONAL_NUMBER_TYPES = (int, float), (int, float, type(None))
_RECOMMENDATION_TYPES: _Types = {"choice": (dict,), "created_at": _NUMBER_TYPES}
_RESULT_TYPES: _Types = {"kind": (str,), "measured_at": _OPTIONAL_NUMBER_TYPES}
_JOB_TYPES: _Types = {"submitted_at": _NUMBER_TYPES}
_TRAINED_TYPES: _Types = {
    "finished_at": _NUMBER_TYPES,
    "best_top1": _OPTIONAL_NUMBER_TYPES,
    "best_loss": _OPTIONAL_NUMBER_TYPES,
    "metrics": (dict, type(None)),
}


def _read_sound_records(paths: Iterable[Path], damaged: list[str], types: _Types) -> list[dict[str, Any]]:
    """Return the records that exist and are valid; the errors of damaged ones are appended to `damaged`."""
    records = []
    for path in paths:
        try:
            record = _read_record_as_dict(path, types)
        except BadMeasurements as error:
            damaged.append(error.message)
            continue
        if record is not None:
            records.append(record)
    return records


def _read_record_as_dict(path: Path, types: _Types) -> dict[str, Any] | None:
    """Return a record whose fields have the types, or None if the file does not exist.

    Raises:
        BadMeasurements: the record is damaged, lacks a field, or has one of another type.
        TulaError: the file cannot be read.
    """
    try:
        record = json.loads(files.read_content(path))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise files.make_damaged_error(path, str(error)) from None
    fields = record if isinstance(record, dict) else {}
    for key, allowed in types.items():
        if not isinstance(fields.get(key), allowed):
            raise files.make_damaged_error(
                path, f"it has no {key}" if key not in fields else f"{key} is no valid value"
            )
    return fields
