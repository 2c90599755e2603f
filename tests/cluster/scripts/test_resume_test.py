"""How a supervisor tests that a script resumes: small scripts, which tell their steps through tula_hooks and import no torch."""

import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from tula_cli.cluster.allocation import Allocation
from tula_cli.cluster.supervise import Supervisor, supervise
from tula_cli.host.processes import read_start_time
from tula_cli.run.directory import RunDir
from tula_cli.run.records.jobs import Job
from tula_cli.run.records.scripts import ResumeTestResult, Verdict
from tula_cli.run.records.tasks import JobSize, ResumeTestTask, Rung, TrainTask
from tula_cli.run.script_attempt import ResumeTestRecords
from tula_cli.show import train as show_train
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate_job
from tula_cli.spec.signature import compute_resume_test_signature

SCRIPT = """
import argparse, os, signal, time
from pathlib import Path
import tula_hooks as tula

parser = argparse.ArgumentParser()
parser.add_argument("-b", type=int)
parser.add_argument("--samples", type=int, default=10**9)
parser.add_argument("--out", type=Path)
parser.add_argument("--resume", type=Path)
options, world, number = parser.parse_args(), int(os.environ["WORLD_SIZE"]), 0


class Engine:
    def parameters(self):
        return []


def save():
    if os.environ["RANK"] == "0":
        (options.out / "draft").write_text(str(samples))
        (options.out / "draft").replace(options.out / "state")


again = options.resume is not None
samples = int(options.resume.read_text()) if again else 0
tula.wrap(Engine(), Engine())
WHAT_ELSE
while samples < options.samples:
    number += 1
    WITHIN
    time.sleep(0.002)
    samples += options.b * world
    tula.step(samples=options.b, loss=1 / number, lr=0.5)
    if SAVES:
        save()
"""


def job(folder: Path, *, what_else: str, within: str, saves: str, script: dict[str, Any], **changes: Any) -> JobSpec:
    """Return a job whose script is written into a folder."""
    code = SCRIPT.replace("WHAT_ELSE", what_else).replace("WITHIN", within).replace("SAVES", saves)
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(code)
    settings = {
        "command": COMMAND,
        "length": {"samples": 1600},
        "reference": {"batch": 16},
        "resume": {"args": "--resume {checkpoint}", "checkpoint": "{out}/state"},
    }
    return validate_job({"script": settings | script, "cluster": {"device": "cpu"}, **changes}, source="test")


COMMAND = "train.py -b {local_batch} --out {out} --samples {samples}"
NEVER = "False"


def run_resume_test(
    folder: Path,
    *,
    what_else: str = "",
    within: str = "pass",
    saves: str = "number == 10",
    script: Any = (),
    nodes: int = 1,
    **changes: Any,
) -> ResumeTestResult:
    """Rehearse a script, to the end."""
    spec = job(folder, what_else=what_else, within=within, saves=saves, script=dict(script), **changes)
    run = RunDir.create(folder / "tula-runs", spec)
    task = ResumeTestTask(
        id="rehearse-k-1", job="rehearse-k-1", spec=spec, workdir=str(folder), nodes=nodes, key="k", batch=16
    )
    run.write_task(task)
    supervise(run.path, task.id, environ=os.environ)
    text = ResumeTestRecords(run.path).read_result(task.id)
    assert text is not None and text.over_at is not None, text
    assert not (run.path / "script" / task.id).exists(), "the script's files are gone"
    return text


def seen(result: ResumeTestResult) -> list[tuple[str, int, str]]:
    return [(start.phase, start.batch, start.ended) for start in result.starts]


def test_a_script_that_counts_samples_may_go_on_at_any_batch(folder: Path) -> None:
    result = run_resume_test(folder)
    assert seen(result)[-2:] == [("same", 16, "ended"), ("half", 8, "ended")]
    assert {phase for phase, *_ in seen(result)} == {"begin", "same", "half"}
    assert result.verdict == "any" and not result.faults, result
    begin, same, half = result.starts[-3:]
    assert begin.saved_samples is not None and begin.ended == "killed"
    assert (same.samples, half.samples) == (same.whole - begin.saved_samples,) * 2  # type: ignore[operator]


def test_on_two_nodes_it_also_resumes_at_the_same_batch_on_twice_the_ranks(folder: Path) -> None:
    result = run_resume_test(folder, nodes=2)
    last = [(start.phase, start.nodes, start.batch, start.ended) for start in result.starts[-3:]]
    assert last == [("same", 1, 16, "ended"), ("more", 2, 16, "ended"), ("half", 1, 8, "ended")]
    begin, same, more, _ = result.starts[-4:]
    assert begin.nodes == 1 and more.samples == same.samples > 0
    assert (result.verdict, result.other_nodes, result.faults) == ("any", True, ())


def test_samples_that_a_checkpoint_counts_per_rank_are_wrong_on_other_nodes(folder: Path) -> None:
    result = run_resume_test(folder, nodes=2, what_else="samples = samples * world")
    assert (result.verdict, result.other_nodes) == ("any", False), result
    (fault,) = result.faults
    assert fault.startswith("at batch 16 on 2 nodes instead of 1 it trains") and fault.endswith("too few")


def test_a_folder_may_have_brackets_in_its_name(folder: Path) -> None:
    result = run_resume_test(folder / "lr [0.1] *")
    assert result.verdict == "any", result.told


def test_a_checkpoint_that_the_script_cannot_read_is_reported_in_its_own_words(folder: Path) -> None:
    within = "if again: raise KeyError('optimizer')"
    result = run_resume_test(folder, within=within)
    assert result.verdict == "none" and seen(result)[-1] == ("same", 16, "failed")
    assert result.faults == ("at batch 16 it cannot resume from its own checkpoint: KeyError: 'optimizer'",)
    assert (result.starts[-1].error, result.starts[-1].outcome) == ("KeyError", "user")


def test_a_script_that_does_not_read_its_checkpoint_begins_anew(folder: Path) -> None:
    result = run_resume_test(folder, what_else="samples = 0")
    assert result.verdict == "none" and "starts from the beginning" in result.faults[0], result


def test_steps_counted_at_the_old_batch_train_too_many_samples(folder: Path) -> None:
    # A step number is kept, and so many steps are left at whatever batch: those before it stand for half as many samples.
    result = run_resume_test(folder, what_else="samples = samples * options.b // 16")
    assert result.verdict == "same", result
    (fault,) = result.faults
    begin = result.starts[-3]
    assert begin.saved_samples is not None and begin.whole is not None
    share = begin.saved_samples / 2 / begin.whole
    assert f"{100 * share:.1f} % too many" in fault and fault.startswith("at batch 8 it trains")


def test_a_script_that_saves_nothing_is_not_resumed(folder: Path) -> None:
    result = run_resume_test(folder, saves=NEVER)
    assert result.verdict is None
    assert result.told == ("not tested: the script ended without a checkpoint that matches script.resume.checkpoint",)


def test_no_checkpoint_within_the_time_is_reported(folder: Path) -> None:
    script = {"command": "train.py -b {local_batch} --out {out}"}
    result = run_resume_test(folder, saves=NEVER, script=script, search={"max_minutes": 0.1})
    assert result.verdict is None and result.told[0].startswith("not tested: no checkpoint within"), result


def test_a_batch_that_does_not_fit_is_halved(folder: Path) -> None:
    full = "if options.b == 16: raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')"
    result = run_resume_test(folder, within=full)
    assert (
        result.verdict == "any" and seen(result)[0] == ("begin", 16, "failed") and seen(result)[-1][:2] == ("half", 4)
    )


@pytest.mark.parametrize(
    ("save", "what_else", "within"),
    [
        ("SIGUSR1", "signal.signal(signal.SIGUSR1, lambda *_: save())", "pass"),
        ("file:{out}/please", "", "if (options.out / 'please').exists(): (options.out / 'please').unlink(); save()"),
    ],
)
def test_a_script_that_can_be_asked_is_asked(folder: Path, save: str, what_else: str, within: str) -> None:
    result = run_resume_test(folder, what_else=what_else, within=within, saves=NEVER, script={"save": save})
    assert result.verdict == "any", result
    begin = result.starts[0]
    assert begin.whole == 1152 and 20 <= (begin.saved_steps or 0) <= 30, "three times the samples up to the question"


def test_two_ranks_are_killed_together(folder: Path) -> None:
    result = run_resume_test(folder, cluster={"device": "cpu", "gpus_per_node": 2})
    assert result.verdict == "any" and result.starts[0].ended == "killed", result


def test_each_rank_may_have_a_supervisor_of_its_own(folder: Path) -> None:
    """As on SLURM, where the leader's rank alone is killed from within, and the follower ends its own."""
    cluster = {"kind": "slurm", "device": "cpu", "gpus_per_node": 2}
    spec = job(folder, what_else="", within="pass", saves="number == 10", script={}, cluster=cluster)
    run = RunDir.create(folder / "tula-runs", spec)
    task = ResumeTestTask(id="r", job="r", spec=spec, workdir=str(folder), nodes=1, key="k", batch=16)
    run.write_task(task)
    leader, follower = (Supervisor(run, Allocation(index, 2, index, "7", environ=os.environ)) for index in (0, 1))
    following = threading.Thread(target=follower.follow_leader)
    following.start()
    leader._run_as_leader(task.id)
    following.join()
    text = ResumeTestRecords(run.path).read_result(task.id)
    assert text is not None and text.verdict == "any", text
    assert [attempt.outcome for attempt in run.read_attempts(task.id)] == ["done"] * len(text.starts)


# --- a training that comes after its rehearsal


def training_after(folder: Path, verdict: Verdict, *, sizes: tuple[JobSize, ...] = ()) -> RunDir:
    """Start a training behind a resume test that takes another half second, and then finds so."""
    spec = job(folder, what_else="", within="pass", saves="number == 10", script={})
    run = RunDir.create(folder / "tula-runs", spec)
    task = TrainTask(
        id="train-x-1", job="train-x", spec=spec, workdir=str(folder), nodes=1, signature="x", attempt=1,
        ladder=(Rung(batch=16),), workers=0, after="rehearse-k-1", sizes=sizes,
    )  # fmt: skip
    run.write_task(task)
    rehearsal = ResumeTestResult(
        task=task.after, key="k", began_at=0.0, over_at=1.0, verdict=verdict, faults=("KeyError: 'a'",)
    )

    with subprocess.Popen(["sh", "-c", f"sleep 0.5; touch {folder / 'over'}"]) as process:
        here = Job(
            id=task.after, scheduler="local", scheduler_id=str(process.pid), nodes=1, submitted_at=0.0,
            process_started=read_start_time(process.pid),
        )  # fmt: skip
        run.write_job(here)
        ResumeTestRecords(run.path).write_result(rehearsal)
        waiting = threading.Thread(target=process.wait)
        waiting.start()
        supervise(run.path, task.id, environ=os.environ)
        waiting.join()
    return run


def test_a_training_waits_for_its_rehearsal(folder: Path) -> None:
    run = training_after(folder, "same")
    (attempt,) = run.get_training("x").read_attempts()
    assert attempt.outcome == "done" and attempt.started_at >= (folder / "over").stat().st_mtime


def test_a_training_that_its_rehearsal_forbids_does_not_start(folder: Path) -> None:
    run = training_after(folder, "none")
    (attempt,) = run.get_training("x").read_attempts()
    assert attempt.outcome == "user" and "cannot resume after an interruption: KeyError: 'a'" in attempt.message
    assert not (run.path / "logs").exists()


def test_a_training_does_not_start_on_nodes_that_it_is_granted_if_the_test_tried_no_others(folder: Path) -> None:
    sizes = tuple(JobSize(nodes=nodes, micro_batch=8, splits=1, ladder=(Rung(batch=16),)) for nodes in (1, 2))
    (attempt,) = training_after(folder, "any", sizes=sizes).get_training("x").read_attempts()
    assert (
        attempt.outcome == "user"
        and "unknown whether the script can resume on another number of nodes" in attempt.message
    )


def test_where_the_checkpoint_is_of_no_use_a_relaunch_begins_anew_and_the_summary_says_so(folder: Path) -> None:
    kill = "if number == 25 and not (options.out / 'once').exists(): (options.out / 'once').touch(); os.kill(os.getpid(), 9)"
    spec = job(folder, what_else="", within=kill, saves="number == 10", script={})
    run = RunDir.create(folder / "tula-runs", spec)
    key = compute_resume_test_signature(spec, "")
    ResumeTestRecords(run.path).write_result(
        ResumeTestResult(task=f"rehearse-{key}-1", key=key, began_at=0.0, verdict="none")
    )
    run.write_task(
        TrainTask(
            id="train-x-1", job="train-x", spec=spec, workdir=str(folder), nodes=1, signature="x", attempt=1,
            ladder=(Rung(batch=16),), workers=0,
        )
    )  # fmt: skip
    supervise(run.path, "train-x-1", environ=os.environ)
    summary, result = run.get_training("x").read_summary(), run.get_training("x").read_result()
    assert summary is not None and result is not None
    assert (summary.attempts, result.samples, result.steps) == (2, 1600, 100), "all of it again"
    assert [row["samples"] for row in run.get_training("x").read_metrics() if row["kind"] == "start"] == [0, 0]
    (warning,) = summary.warnings
    assert "it starts from the beginning after each interruption" in warning and f"warning: {warning}" in list(
        show_train.render_summary(summary)
    )
