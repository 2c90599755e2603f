"""A training by a script: where it goes on, how far it is, and what came of it."""

import glob
import math
import re
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tula_cli.cluster.exit_reason import ExitReason
from tula_cli.cluster.rank_processes import count_ranks, has_tagged_lines
from tula_cli.cluster.scripts.methods import summarize_scaling
from tula_cli.cluster.scripts.placeholders import ScriptProcess, get_learning_rate, get_script, list_placeholder_values
from tula_cli.errors import BadMeasurements
from tula_cli.models import claims, refresh
from tula_cli.models.out_of_memory import list_splits, make_batch_norm_limit
from tula_cli.models.resuming import NO_STEP_SEEN
from tula_cli.run.directory import RunDir
from tula_cli.run.files import (
    MAX_LINE,
    append_json_line,
    is_regular,
    open_file,
    parse_json_object,
    read_end,
    read_lines,
)
from tula_cli.run.records.base import MicroBatches, Splits
from tula_cli.run.records.jobs import Attempt, LeaderCommand
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.results import Save, ScriptProgress, TrainResult
from tula_cli.run.records.scripts import RankResult, Verdict
from tula_cli.run.records.tasks import TrainTask
from tula_cli.run.script_attempt import ResumeTestRecords, ScriptAttempt
from tula_cli.run.secrets import remove_secrets
from tula_cli.run.training_run import TrainingRun
from tula_cli.spec.scripts.placeholders import fill
from tula_cli.spec.scripts.script import Resume, Rows, Script, count_script_samples
from tula_cli.spec.signature import compute_rehearsal_signature
from tula_cli.words import parse_rank

if TYPE_CHECKING:
    from tula_cli.models.time.changes import ScriptLevelDetector


# --- Checkpoints

SETTLED_SECONDS = 2.0
"""Seconds without a change after which a checkpoint is taken to be written."""
_ZIPPED = (".pt", ".pth", ".bin", ".ckpt", ".tar")
"""Files of torch.save are ZIP files, with the table of contents at the end."""
_NUMBER = re.compile(r"\d+")


def find_newest_checkpoint(
    resume: Resume,
    values: Mapping[str, str | float],
    *,
    workdir: Path,
    since: float,
    left_out: tuple[str, float] = ("", 0.0),
) -> tuple[Path | None, list[Path]]:
    """Return the newest checkpoint that is whole (None where there is none), and the damaged ones that are newer.

    A folder that lacks files which the one before it has is half of one: its process was killed between two files.

    Args:
        resume: where they are.
        values: of the placeholders in its pattern.
        workdir: what a relative path starts from.
        since: Unix time; what is older is of another training.
        left_out: path of one that is of no use, as it was at a time (Unix time).
    """
    names = glob.iglob(make_checkpoint_pattern(resume, values, workdir=workdir), recursive=True)  # noqa: PTH207 - an absolute pattern
    candidates = ((path, get_checkpoint_change_time(path)) for path in map(Path, names))
    useless, unusable_since = left_out
    by_age = sorted(
        (
            (when, path)
            for path, when in candidates
            if when >= since and not (str(path) == useless and when <= unusable_since)
        ),
        reverse=True,
    )
    paths = [path for _, path in by_age]
    sound = [path for path in paths if is_complete_checkpoint(path)]
    best = next((path for number, path in enumerate(sound) if not _lacks_files(path, sound[number + 1 :])), None)
    return best, paths if best is None else paths[: paths.index(best)]


def _lacks_files(path: Path, older: Iterable[Path]) -> bool:
    """Return whether a folder lacks files that the next older one of such a name has; numbers in names do not count."""
    older_folder = next(
        (folder for folder in older if _without_numbers(folder.name) == _without_numbers(path.name)), None
    )
    return (
        older_folder is not None
        and path.is_dir()
        and older_folder.is_dir()
        and bool(_list_file_names(older_folder) - _list_file_names(path))
    )


def _list_file_names(folder: Path) -> set[str]:
    return {_without_numbers(str(file.relative_to(folder))) for file in _list_files(folder)}


def _without_numbers(name: str) -> str:
    """Return a name without the step, or the rank, that it was written by: of fewer ranks there are fewer files."""
    return _NUMBER.sub("#", name)


def make_checkpoint_pattern(resume: Resume, values: Mapping[str, str | float], *, workdir: Path) -> str:
    """Return the absolute pattern of a script's checkpoints; of brackets and stars the user's own alone act, no folder's."""
    literal = {name: glob.escape(value) if isinstance(value, str) else value for name, value in values.items()}
    return str(Path(glob.escape(str(workdir))) / fill(resume.checkpoint, literal))


def get_checkpoint_change_time(path: Path) -> float:
    """Return when a checkpoint was written last (Unix time): of a folder, the newest of its files; 0 where it is gone."""
    return max((_get_change_time(file) for file in _list_files(path)), default=0.0)


def is_complete_checkpoint(path: Path) -> bool:
    """Return whether a checkpoint was written to its end, as far as its files tell: the process may have been killed."""
    return all(_is_complete_file(file) for file in _list_files(path))


def _list_files(path: Path) -> Iterable[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def _get_change_time(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _is_complete_file(file: Path) -> bool:
    try:
        if not is_regular(file) or file.stat().st_size == 0:
            return False
        with open(file, "rb") as opened:
            head = opened.read(4)
        if file.suffix not in _ZIPPED:
            return True
        # zeros are blocks that a lost node has never written
        return zipfile.is_zipfile(file) if head == b"PK\x03\x04" else head != b"\0\0\0\0"
    except OSError:
        return False


# --- Metrics that a script prints or writes

TAIL_BYTES = 16_384
"""Bytes at the end of a log in which its last line is looked for."""
MAX_QUOTED = 300
"""Characters of it that are quoted."""
_LESS_IS_BETTER = re.compile(
    r"loss|error|perplexity|(err|ppl|nll|mse|mae)(?![a-z])|(?<![a-z])(wer|cer|fid)(?![a-z])", re.IGNORECASE
)
"""Short ones end a word, or are one: an answer_f1 or a confidence is no error rate."""

_BLOCK = 2**22  # bytes of a log that are searched at a time


def read_metrics(
    script: Script,
    values: Mapping[str, str | float],
    logs: Iterable[Path],
    *,
    first_rank_only: bool = False,
    workdir: Path,
) -> dict[str, list[float]]:
    """Return each metric's values, in their order, nan and infinity too; of one that is nowhere to be found an empty list.

    Args:
        script: its section `metric`.
        values: of placeholders in the files' names.
        logs: of all attempts, oldest first.
        first: only what rank 0 says counts, where lines of others begin with their rank.
        workdir: what a relative path starts from.
    """
    patterns = {name: source for name, source in script.metric.items() if not isinstance(source, Rows)}
    values_by_metric: dict[str, list[object]] = {name: [] for name in script.metric}
    for text in (text for log in logs if patterns for text in _read_blocks(log)):
        counted = _list_lines_of_rank_0(text) if first_rank_only else text
        for name, pattern in patterns.items():
            values_by_metric[name] += re.findall(pattern, counted, re.MULTILINE)
    for name, source in script.metric.items():
        if isinstance(source, Rows):
            values_by_metric[name] += _read_json_values(workdir / fill(source.jsonl, values), source.key)
    return {
        name: [number for value in values if (number := _as_number(value)) is not None]
        for name, values in values_by_metric.items()
    }


def _read_blocks(log: Path) -> Iterator[str]:
    """Yield a log's text, some MiB of whole lines at a time: it may be of any size."""
    if not log.exists():
        return
    with open_file(log) as file:
        while block := file.read(_BLOCK):
            yield (block + file.readline(MAX_LINE)).decode(errors="replace")


def _list_lines_of_rank_0(text: str) -> str:
    return "\n".join(line for line in text.split("\n") if parse_rank(line) in (None, 0))


def find_last_script_line(log: Path) -> str:
    """Return the last line that a command has written, without its rank; empty without one. tula's own do not count."""
    try:
        lines = read_end(log, TAIL_BYTES).splitlines()
    except (OSError, BadMeasurements):
        return ""
    of_script = (line.strip() for line in reversed(lines) if not line.startswith("tula: "))
    return next((line for line in of_script if line), "")[:MAX_QUOTED]


def describe_missing_step(log: Path) -> str:
    """Return that no step was seen, with the last line of the script, which may say why, or else what to look for."""
    line = find_last_script_line(log)
    return f"no optimizer step of torch was seen; the last line of the script is: {line}" if line else NO_STEP_SEEN


def is_lower_better(name: str) -> bool:
    """Return whether the name of a metric says that the least is the best: a loss, an error, a perplexity ..."""
    return _LESS_IS_BETTER.search(name) is not None


def find_best_value(name: str, values: Iterable[float]) -> float:
    """Return the best of a metric's values: the least or the most, by its name."""
    return (min if is_lower_better(name) else max)(values)


def _read_json_values(path: Path, key: str) -> Iterator[object]:
    if not path.exists():
        return
    with open_file(path) as file:
        for line in read_lines(file):
            row = parse_json_object(line)
            if row is not None and key in row:
                yield row[key]


def find_last_and_best(values_by_metric: Mapping[str, Iterable[float]]) -> dict[str, float]:
    """Return the last value of each metric, and the best under `best_`, as far as they are finite numbers."""
    metrics: dict[str, float] = {}
    for name, values in values_by_metric.items():
        values_ = list(values)
        finite = [value for value in values_ if math.isfinite(value)]
        metrics |= {name: values_[-1]} if finite and math.isfinite(values_[-1]) else {}
        metrics |= {f"best_{name}": find_best_value(name, finite)} if finite else {}
    return metrics


def _as_number(value: object) -> float | None:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


# --- The training

SHORT_TOLERANCE = 0.05
"""Share of the samples that were asked for by which a training may fall short (last batches that are dropped), unsaid."""
MAX_SAVES_REMEMBERED = 50
"""Checkpoints of which is kept how much was trained before them."""


@dataclass(frozen=True)
class ScriptTraining:
    """One training, as the leader of its supervisors sees it."""

    run: RunDir
    task: TrainTask
    _first_steps: list[RankResult] = field(default_factory=list, compare=False)

    @property
    def training(self) -> TrainingRun:
        return self.run.training(self.task.signature)

    @property
    def world(self) -> int:
        return count_ranks(self.task)

    # --- where it goes on

    @property
    def output_folder(self) -> Path:
        """The folder of the script's own files. After a smaller batch that may not go on from them, a new one."""
        first_batch = next((task.batch for task in self.training.tasks()), self.task.batch)
        anew = self.task.batch != first_batch and not self._resumes_at_any_batch
        return (self.training.path / (f"out-{self.task.batch}" if anew else "out")).absolute()

    @property
    def resume_settings(self) -> Resume | None:
        """How the script goes on: as the spec says, else as it was seen to by itself; None if it begins anew."""
        configured, pattern = get_script(self.task.spec).resume, self.training.script_saves().resumes_from
        return Resume(checkpoint=pattern, batch="same") if configured is None and pattern else configured

    @property
    def _resumes_at_any_batch(self) -> bool:
        return self.resume_verdict in ("epoch", "any")

    @cached_property
    def resume_verdict(self) -> Verdict:
        """With which batch the script may go on from a checkpoint: as the spec says, else as a rehearsal has found.

        Where that has found its checkpoint to be of no use, nobody's word helps. What was not rehearsed goes on at the same.
        """
        resume, code = self.resume_settings, self.run.code(self.task.code)
        if resume is None:
            return "none"
        key = compute_rehearsal_signature(self.task.spec, code.digest if code is not None else "")
        resume_test = ResumeTestRecords(self.run.path).newest_verdict(key)
        if resume_test is not None and resume_test.verdict == "none":
            return "none"
        if resume.batch != "rehearse":
            return resume.batch
        return "same" if resume_test is None or resume_test.verdict is None else resume_test.verdict

    @property
    def placeholder_values(self) -> dict[str, str | float]:
        """Return the values of the placeholders in paths."""
        process = ScriptProcess(self.task.nodes, 0, "", 0)
        task, run = self.task, self.run.path.absolute()
        return list_placeholder_values(
            task.spec, process, batch=task.batch, out=self.output_folder, run=run, workers=0, splits=task.splits
        )

    def newest_checkpoint(self) -> Path | None:
        """Return the checkpoint to go on from; None where it begins anew."""
        return self._checkpoints()[0]

    def _checkpoints(self) -> tuple[Path | None, list[Path]]:
        """Return the checkpoint to go on from, and the newer ones that are passed over because they are damaged."""
        resume, attempts = self.resume_settings, self.training.attempts()
        if not self._resumes_at_any_batch:
            alike = {task.id for task in self.training.tasks() if task.batch == self.task.batch}
            attempts = [attempt for attempt in attempts if attempt.task in alike]
        if resume is None or self.resume_verdict == "none" or not attempts:
            return None, []
        began = min(attempt.started_at for attempt in attempts)
        useless = self.training.script_saves().left_out
        left_out = ("", 0.0) if useless is None else (useless.checkpoint, useless.saved_at)
        return find_newest_checkpoint(
            resume, self.placeholder_values, workdir=Path(self.task.workdir), since=began, left_out=left_out
        )

    # --- how far it is

    @property
    def dataset_size(self) -> int | None:
        """Samples of an epoch: as the spec says, else as probes or the training's own first steps have shown."""
        known_size = get_script(self.task.spec).known_dataset_size or self._measured_size
        return (
            claims.find_dataset_size(self._first_rank_results)
            if known_size is None and self._first_rank_results
            else known_size
        )

    @cached_property
    def _measured_size(self) -> int | None:
        measured = (result.dataset_size for result in self.run.read().results if isinstance(result, Measured))
        return next(measured, None)

    @property
    def _first_rank_results(self) -> Sequence[RankResult]:
        """The first steps of the first start at this batch, which had the whole dataset before it; empty until it has them."""
        if not self._first_steps:
            attempts = self.run.attempts(self.task.id)
            first_results = (
                ScriptAttempt(self.run.path, self.task.id, attempts[0].number).first_results() if attempts else []
            )
            if first_results and len(first_results) >= first_results[0].world:
                self._first_steps.extend(first_results)
        return self._first_steps

    @property
    def epoch_samples(self) -> int | None:
        """Samples that an epoch trains on: those of the dataset without what the loader drops, with what it repeats."""
        size, observed = self.dataset_size, claims.count_epoch_samples(self._first_rank_results)
        by_loader = claims.find_dataset_size(self._first_rank_results) if self._first_rank_results else None
        if get_script(self.task.spec).length.epochs is None or observed is None or by_loader != size:
            return size  # a loader of a part of the dataset tells nothing of an epoch
        return observed

    @property
    def total_samples(self) -> int | None:
        """Samples of the whole training."""
        size = self.epoch_samples
        return None if size is None else count_script_samples(get_script(self.task.spec), size)

    def base(self, command: LeaderCommand) -> tuple[int, int]:
        """Return the samples and the steps that an attempt begins with."""
        progress = self._progress
        goes_on = command.checkpoint or self._resumed_by_itself(command)
        return (progress.samples, progress.steps) if goes_on and progress is not None else (0, 0)

    def _resumed_by_itself(self, command: LeaderCommand) -> bool:
        """Return whether an attempt that was given no checkpoint has loaded one, as was noted at its first step."""
        return self.training.script_saves().resumed_attempt == (command.task, command.attempt)

    def detect_own_resume(self, attempt: ScriptAttempt, command: LeaderCommand) -> None:
        """Notice, at the first step of an attempt, that the script has loaded what an earlier attempt has saved.

        How much that holds is what the earlier one had trained when it was written.
        """
        earlier = [
            earlier_attempt
            for earlier_attempt in self.training.attempts()
            if (earlier_attempt.task, earlier_attempt.number) != (command.task, command.attempt)
        ]
        if get_script(self.task.spec).resume is not None or command.checkpoint or not earlier:
            return
        first_start = min(earlier_attempt.started_at for earlier_attempt in earlier)
        loads = [row for row in attempt.loads(0) if first_start <= row["written"] < _get_plan_write_time(attempt)]
        if not loads:
            return
        newest = max(loads, key=lambda row: float(row["written"]))
        path, written = Path(newest["path"]), float(newest["written"])
        writer = max(
            (earlier_attempt for earlier_attempt in earlier if earlier_attempt.started_at <= written),
            key=lambda earlier_attempt: earlier_attempt.started_at,
        )
        steps, counted = _find_position_at(ScriptAttempt(self.run.path, writer.task, writer.number), written)
        samples, batch = steps * self.task.batch if counted is None else round(counted * self.world), self.task.batch
        self.training.write_script_progress(
            ScriptProgress(samples=samples, steps=steps, batch=batch, checkpoint=str(path), saved_at=written)
        )
        pattern, saves = self._pattern_like(path), self.training.script_saves()
        lost = (*saves.lost[:-1], *(max(0, value - samples) for value in saves.lost[-1:]))
        update = {"lost": lost, "resumes_from": pattern, "resumed_attempt": (command.task, command.attempt)}
        self.training.write_script_saves(saves.model_copy(update=update))
        message = (
            f"the script has resumed by itself from {path.name}, which holds {samples} samples, and is counted from there;"
            f' so that it is known beforehand, write in section script: resume: {{checkpoint: "{pattern}"}}'
        )
        self._add("warning", samples, message=message)

    def _pattern_like(self, path: Path) -> str:
        """Return the pattern of checkpoints like one, with * for its numbers."""
        folder = self.output_folder.resolve()
        if not path.is_relative_to(folder):
            return glob.escape(str(path)).replace("{", "{{").replace("}", "}}")
        name = glob.escape(str(path.relative_to(folder))).replace("{", "{{").replace("}", "}}")
        return "{out}/" + re.sub(r"\d+", "*", name)

    @property
    def _progress(self) -> ScriptProgress | None:
        """The newest checkpoint that was settled, where this batch may go on from it."""
        progress = self.training.script_progress()
        return (
            progress
            if progress is not None and (progress.batch == self.task.batch or self._resumes_at_any_batch)
            else None
        )

    def log_start(self, command: LeaderCommand) -> None:
        """Write the row of a start."""
        if self.resume_verdict == "none" and get_script(self.task.spec).resume is not None:
            message = "a rehearsal has found that the script cannot go on from its own checkpoint: each interruption begins it anew"
            self._add("warning", 0, message=message)
        for message in self._describe_damaged():
            self._add("warning", self.base(command)[0], message=message)
        lr = get_learning_rate(self.task.spec, self.task.batch)
        self._add("start", self.base(command)[0], batch=self.task.batch, attempt=self.task.attempt, lr=lr)

    def _describe_damaged(self) -> Iterator[str]:
        """Yield a line for each damaged checkpoint that this start passes over."""
        used, damaged = self._checkpoints()
        progress = self.training.script_progress()
        resumes = f"resumes from {used.name}" if used is not None else "begins anew"
        for path in damaged:
            is_known = progress is not None and progress.checkpoint == str(path)
            samples = f" ({progress.samples} samples)" if progress is not None and is_known else ""
            yield (
                f"the checkpoint {path.name}{samples} is damaged and passed over: the training {resumes}, and what came after"
                " is trained again"
            )

    def log_progress(self, attempt: ScriptAttempt, command: LeaderCommand, *, after: int) -> int:
        """Write a row of how far an attempt is, where it has stepped since; return the steps it stands at.

        Args:
            attempt: what its ranks' shims write.
            command: what it was started with.
            after: steps at the last row.
        """
        beat = attempt.heartbeat(0)
        if beat is None or beat.step <= after:
            return after
        if after == 0:
            self.detect_own_resume(attempt, command)
        for note in attempt.notes(0) if after == 0 else ():
            self._add("warning", self.base(command)[0], message=note)
        row = attempt.newest_row(0)
        samples, steps = self._position_reached(command, beat.step, beat.samples)
        batch = (beat.step_samples or 0) * self.world or self.task.batch
        remaining = None if self.total_samples is None else max(0, self.total_samples - samples) / batch * beat.seconds
        self._add(
            "step",
            samples,
            step=steps,
            loss=row.get("loss"),
            lr=row.get("lr"),
            step_time=beat.seconds,
            eta=remaining,
            **({"ags": row["ags"]} if "ags" in row else {}),
        )
        return beat.step

    def check_step_samples(self, attempt: ScriptAttempt, command: LeaderCommand, *, previous: float) -> float:
        """Warn of steps that have come to train on another number of samples; return that of the newest steps.

        Args:
            attempt: what its ranks' shims write.
            command: what it was started with.
            before: samples of a step that were seen, or asked for, until now.
        """
        beat = attempt.heartbeat(0)
        observed = None if beat is None or beat.step_samples is None else beat.step_samples * self.world
        changed = claims.find_changed_batch(observed, before=previous)
        if beat is None or changed is None:
            return previous
        samples, steps = self._position_reached(command, beat.step, beat.samples)
        message = (
            f"by step {steps} a step has come to train on {changed:g} samples, and the command was given a batch of"
            f" {self.task.batch}: step time, cost and learning rate were predicted for {self.task.batch}. Does the script"
            " accumulate more, or enlarge its batch, after its first steps?"
        )
        self._add("warning", samples, message=message)
        return changed

    def check_step_time(self, pace: "ScriptLevelDetector", attempt: ScriptAttempt, command: LeaderCommand) -> None:
        """Say where steps have come to take another time."""
        from tula_cli.models.time.changes import describe_level_change  # numpy: of use while a script trains alone

        beat = attempt.heartbeat(0)
        if beat is None or beat.lost is not None:
            return
        samples, _ = self._position_reached(command, beat.step, beat.samples)
        level = pace.judge_steps(beat, attempt.gaps(0), samples=samples, epoch=self._epoch(samples))
        if level is None:
            return
        remaining_steps = None if self.total_samples is None else max(0, self.total_samples - samples) / self.task.batch
        change = describe_level_change(
            level, self.task, lambda step_time: None if remaining_steps is None else remaining_steps * step_time
        )
        self._add("change", samples, change=change.model_dump(mode="json"))

    def record_save(self, attempt: ScriptAttempt, command: LeaderCommand, *, settled: float = SETTLED_SECONDS) -> None:
        """Keep how much was trained before a checkpoint that an attempt has written since the last look.

        Args:
            attempt: what its ranks' shims write.
            command: what it was started with.
            settled: seconds without a change after which it is taken to be whole.
        """
        checkpoint = self.newest_checkpoint()
        saved_at = 0.0 if checkpoint is None else get_checkpoint_change_time(checkpoint)
        saves, began, beat = self.training.script_saves(), _get_plan_write_time(attempt), attempt.heartbeat(0)
        if settled and (beat is None or beat.stepped_at <= saved_at):
            return  # the row that tells in which step it was written comes with the next one
        if not max([began, *(save.saved_at for save in saves.saves[-1:])]) < saved_at <= time.time() - settled:
            return
        previous_save = next((save.saved_at for save in saves.saves[-1:] if save.saved_at > began), None)
        steps, samples = self._trained_between(attempt, command, previous_save, saved_at)
        if steps < 1:
            return
        seconds = None if previous_save is None else saved_at - previous_save
        save = Save(saved_at=saved_at, batch=self.task.batch, steps=steps, samples=samples, seconds=seconds)
        update = {"saves": (*saves.saves, save)[-MAX_SAVES_REMEMBERED:]}
        self.training.write_script_saves(saves.model_copy(update=update))

    def _trained_between(
        self, attempt: ScriptAttempt, command: LeaderCommand, begin: float | None, end: float
    ) -> tuple[int, int]:
        """Return the steps and samples that an attempt has trained from one checkpoint, or its start, to another."""
        begin_position = (
            self.base(command) if begin is None else self._position_reached(command, *_find_position_at(attempt, begin))
        )
        end_position = self._position_reached(command, *_find_position_at(attempt, end))
        return end_position[1] - begin_position[1], end_position[0] - begin_position[0]

    def _record_lost(self, samples: int) -> None:
        """Keep what was trained after the newest checkpoint, by an attempt that has reached so many samples."""
        progress, saves = self._progress, self.training.script_saves()
        lost = max(0, samples - (0 if progress is None else progress.samples))
        self.training.write_script_saves(saves.model_copy(update={"lost": (*saves.lost, lost)}))

    def _position_reached(self, command: LeaderCommand, step: int, samples: float | None) -> tuple[int, int]:
        """Return samples (of all ranks, by the steps where rank 0 does not count) and steps of the whole training."""
        samples_before, steps = self.base(command)
        samples_seen = step * self.task.batch if samples is None else round(samples * self.world)
        return samples_before + samples_seen, steps + step

    def _add(self, kind: str, samples: int, **values: Any) -> None:
        row = {
            "kind": kind,
            "time": time.time(),
            "samples": samples,
            "epoch": self._epoch(samples),
            **remove_secrets(values),
        }
        append_json_line(self.training.metrics_path, row)

    def _epoch(self, samples: int) -> float | None:
        """Return the epochs of so many samples; None where nothing has told how many one has."""
        return samples / self.epoch_samples if self.epoch_samples else None

    def broken_claims(self, ranks: Sequence[RankResult], command: LeaderCommand) -> ExitReason | None:
        """Return why an attempt is not what its command was given; None where it is, or not all ranks have told."""
        violation = claims.describe_broken_claims(ranks, resumed=bool(command.checkpoint))
        return ExitReason("user", violation, final=True) if violation else None

    # --- after an attempt

    def settle_attempt(self, command: LeaderCommand, reason: ExitReason) -> ExitReason:
        """Keep what an attempt has saved, and the result of the last one; return why it ended, once that is known."""
        attempt = ScriptAttempt(self.run.path, self.task.id, command.attempt)
        beat = attempt.heartbeat(0)
        step, counted = (beat.step, beat.samples) if beat is not None else (0, None)
        samples, steps = self._position_reached(command, step, counted)
        log = self.run.log_path(self.task.id, command.attempt)
        if reason.outcome is None and beat is None and not command.checkpoint:
            return ExitReason("user", f"the command ended well, but {describe_missing_step(log)}")
        if reason.outcome is None and (broken := self.broken_claims(attempt.results(), command)) is not None:
            return broken
        if (
            reason.outcome == "user"
            and beat is None
            and (retry_reason := self._fall_back_to_older(attempt, command, reason)) is not None
        ):
            return retry_reason
        self.record_save(attempt, command, settled=0.0)
        self._record_newest_checkpoint(attempt, command)
        if reason.outcome is not None:
            self._record_lost(samples)
        if reason.outcome is None:
            self._warn_short(samples)
            self._write_result(samples, steps, None if beat is None else beat.seconds)
        return reason if beat is None else replace(reason, reached=samples)

    def _fall_back_to_older(
        self, attempt: ScriptAttempt, command: LeaderCommand, reason: ExitReason
    ) -> ExitReason | None:
        """Leave out a checkpoint at which the script failed before its first step; return why it starts again.

        None where it is not the checkpoint's fault, or there is none before it. If the one before fails too, the script is
        at fault, and the newest counts again.
        """
        saves, progress = self.training.script_saves(), self._progress
        failed = any(failure.where == "script" and failure.step == 0 for failure in attempt.failures())
        if not failed or progress is None or progress.checkpoint != command.checkpoint:
            return None
        if saves.left_out is not None and saves.left_out.saved_at > progress.saved_at:
            self.training.write_script_progress(saves.left_out)
            self.training.write_script_saves(saves.model_copy(update={"left_out": None}))
            return None
        self.training.write_script_saves(saves.model_copy(update={"left_out": progress}))
        if (older := self.newest_checkpoint()) is None:
            self.training.write_script_saves(saves)
            return None
        self._use_older_checkpoint(progress, older)
        message = f"{reason.description}; {Path(progress.checkpoint).name} is left out, and the checkpoint before it tried: {older.name}"
        self._add("warning", progress.samples, message=message)
        return ExitReason("unknown", message, reason.rank, reason.host)

    def _use_older_checkpoint(self, progress: ScriptProgress, older: Path) -> None:
        """Let an older checkpoint be the one to go on from: it holds what the newest does but for what came between."""
        saved_at, saves = get_checkpoint_change_time(older), self.training.script_saves()
        since = [save for save in saves.saves if saved_at < save.saved_at <= progress.saved_at]
        samples = max(0, progress.samples - sum(save.samples for save in since))
        steps = max(0, progress.steps - sum(save.steps for save in since))
        progress_fields = {"samples": samples, "steps": steps, "checkpoint": str(older), "saved_at": saved_at}
        self.training.write_script_progress(progress.model_copy(update=progress_fields))
        lost = (*saves.lost, progress.samples - samples)
        self.training.write_script_saves(saves.model_copy(update={"lost": lost}))

    def recover_lost_attempt(self, lost: Attempt) -> None:
        """Keep what an attempt of this task has saved whose supervisor was lost, and could not."""
        progress = self._progress
        command = LeaderCommand(
            task=lost.task, attempt=lost.number, checkpoint=progress.checkpoint if progress is not None else ""
        )
        attempt = ScriptAttempt(self.run.path, lost.task, lost.number)
        beat = attempt.heartbeat(0)
        self.record_save(attempt, command, settled=0.0)
        samples, _ = self._position_reached(command, *((0, 0.0) if beat is None else (beat.step, beat.samples)))
        self._record_newest_checkpoint(attempt, command)
        self._record_lost(samples)

    def _record_newest_checkpoint(self, attempt: ScriptAttempt, command: LeaderCommand) -> None:
        """Note the newest checkpoint, and how many samples it holds: those of the last row before it was written."""
        checkpoint = self.newest_checkpoint()
        if checkpoint is None or (
            str(checkpoint) == command.checkpoint
            and get_checkpoint_change_time(checkpoint) < _get_plan_write_time(attempt)
        ):
            return
        saved_at = get_checkpoint_change_time(checkpoint)
        samples, steps = self._position_reached(command, *_find_position_at(attempt, saved_at))
        progress = ScriptProgress(
            samples=samples, steps=steps, batch=self.task.batch, checkpoint=str(checkpoint), saved_at=saved_at
        )
        self.training.write_script_progress(progress)

    def _warn_short(self, samples: int) -> None:
        total = self.total_samples
        if total is not None and abs(samples - total) > max(SHORT_TOLERANCE * total, self.task.batch):
            message = f"the script ended after {samples} samples, and its length is {total}: {_explain_length(samples < total)}"
            self._add("warning", samples, message=message)

    def _write_result(self, samples: int, steps: int, seconds: float | None) -> None:
        script, task = get_script(self.task.spec), self.task
        attempts = self.training.attempts()
        logs = [self.run.log_path(attempt.task, attempt.number) for attempt in attempts]
        rows = read_metrics(
            script, self.placeholder_values, logs, first_rank_only=has_tagged_lines(task), workdir=Path(task.workdir)
        )
        for name, values in rows.items():
            if not values:
                self._add(
                    "warning", samples, message=f"script.metric {name} was nowhere to be found in what the script told"
                )
        metrics = find_last_and_best(rows)
        self.run.write_train_result(
            TrainResult(
                signature=task.signature,
                nodes=task.nodes,
                batch=task.batch,
                samples=samples,
                steps=steps,
                epochs=script.length.epochs or 0,
                metrics=metrics,
                best_top1=metrics.get("best_top1"),
                best_epoch=0,
                step_time=seconds or None,
                finished_at=time.time(),
                scaled=summarize_scaling(
                    ScriptAttempt(self.run.path, attempt_.task, attempt_.number).newest_row(0) for attempt_ in attempts
                ),
            )
        )


def _explain_length(fewer: bool) -> str:
    return (
        "does its command hold {epochs}, {steps} or {samples}, and is script.dataset_size right?"
        if fewer
        else "did it count anew when it went on from its checkpoint?"
    )


def _find_position_at(attempt: ScriptAttempt, when: float) -> tuple[int, float | None]:
    """Return the steps, and rank 0's samples, that were over when a checkpoint was written (Unix time).

    A row of a save tells of the step in which it was written. Else those of the last row, or heartbeat, before it count:
    rather too few than too many.
    """
    rows = attempt.rows(0)
    after = [row for row in rows if row["kind"] == "gap" and "save" in row["causes"] and row["time"] >= when]
    if after:
        return after[0]["step"] - 1, after[0].get("before")  # a loader may be ahead by then, so no share of "samples"
    stood = [(row["step"], row["samples"]) for row in rows if "step" in row and row["time"] <= when]
    beat = attempt.heartbeat(0)
    if beat is not None and beat.stepped_at <= when:
        stood.append((beat.step, beat.samples))
    return max(stood, key=lambda stand: stand[0], default=(0, None))


def _get_plan_write_time(attempt: ScriptAttempt) -> float:
    """Return when an attempt's plan was written."""
    try:
        return attempt.plan_path.stat().st_mtime
    except OSError:
        return 0.0


# --- Limits of micro-batches


def list_possible_micro_batches(run: RunDir, task: TrainTask) -> MicroBatches:
    """Return it for each batch of the ladder.

    Where no rank has told whether there is a BatchNorm (it was killed), there is taken to be one, on each rank by itself.
    """
    attempts = run.attempts(task.id)
    number = attempts[-1].number if attempts else 1
    batch_norms = [failure.batch_norm for failure in ScriptAttempt(run.path, task.id, number).failures()]
    norms = {norm for norm in batch_norms if norm is not None} or {"batch"}
    world, micro_batches = count_ranks(task), task.spec.train.accumulate
    over = [1] * ("batch" in norms) or [world] * ("sync" in norms)
    limits = [make_batch_norm_limit(ranks=ranks) for ranks in over]

    def of(batch: int) -> Splits:
        micro_batch = batch // world // micro_batches
        fewest = refresh.compute_max_samples_drawn(task.spec, batch, available=micro_batch, world=world)
        ags_limit = (lambda samples: samples >= fewest, f"AGS takes a small batch of {fewest} samples of it")
        return list_splits(batch, micro_batch=micro_batch, micro_batches=micro_batches, limits=[ags_limit, *limits])

    splits = tuple(of(rung.batch) for rung in task.ladder)
    return MicroBatches(splits=splits, normalised=over[0] if over and batch_norms else 0)
