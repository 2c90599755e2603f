"""profile -> recommend -> train with real ranks, and what is done to them on the way."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from driver import slow_training_options, weights_differ
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tula_cli
from tula_cli.cluster import inspection
from tula_cli.models.choice.knee import MAX_EQUAL_DIFFERENCE
from tula_cli.run.records.probes import Measured, OutOfMemory
from tula_cli.spec.load import load_spec

pytestmark = [pytest.mark.e2e, pytest.mark.torch]
DIGITS = 1437  # training samples
LIMIT = "cluster.memory_per_gpu=24MB"  # a batch of 512 does not fit the small network of these tests, one of 64 does


@pytest.fixture
def open_umask() -> Iterator[None]:
    """Take no permission from what is made, as some sites set it up for groups."""
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> set[str]:
    """Return what others than its owner may read or write, below a folder; what other programs write has a private folder."""
    others = {*folder.glob("*/exports/tensorboard"), *folder.glob("*/submitit"), *folder.glob("matplotlib")}
    made = [path for path in folder.rglob("*") if not path.is_symlink() and not others & {path, *path.parents}]
    return {str(path.relative_to(folder)) for path in made if path.stat().st_mode & 0o077}


def test_the_main_job_from_profile_to_trained_model(tula, tmp_path: Path, open_umask: None) -> None:
    profile = tula("profile", "job.yaml")
    assert profile["status"] == "done"
    run = tula.run()
    measured = [result for result in run.read_results() if isinstance(result, Measured)]
    # sweep: every batch at one node, the smallest, the middle and the largest at two
    at_two = {(2, 32), (2, 64), (2, 128)}
    assert {(probe.nodes, probe.local_batch) for probe in measured} == {(1, 64), (1, 128), (1, 256), *at_two}
    assert all(len(probe.step_times) == 5 and min(probe.step_times) > 0 for probe in measured)

    again = tula("profile", "job.yaml", "--set", "pricing.price=7.5")
    assert again["run_id"] == profile["run_id"], "a price changes no measurement"
    assert len(run.read_jobs()) == 2
    assert all(job.submissions == 1 for job in run.read_jobs()), "nothing was measured again"

    answer = tula("recommend", "--objective", "time")
    choice = answer["data"]["choice"]
    fastest = min(answer["data"]["rows"], key=lambda row: row["hours"])
    noise_said = (  # where noise made a fit uncertain, or the ranks held each other up
        f"batch {fastest['batch']} is predicted to need",
        "of 6 measured configurations",
    )
    as_fast = fastest["hours"] > choice["hours"] * (1 - MAX_EQUAL_DIFFERENCE / 2)  # less than that is not worth a word
    assert as_fast or any(words in answer["data"]["reason"] for words in noise_said)
    assert choice["cost"] == pytest.approx(choice["hours"] * choice["nodes"] * 7.5)
    for name in ("recommendation.json", "recommended.yaml", "results.csv"):
        assert (run.path / name).is_file()
    assert load_spec(run.path / "recommended.yaml") == run.read_spec()

    measuring = ("--set", "train.diagnostics=[gradient_noise]")
    summary = tula("train", *measuring)["data"]
    assert (summary["nodes"], summary["batch"]) == (choice["nodes"], choice["batch"])
    assert summary["predicted_hours"] == pytest.approx(choice["hours"])
    assert summary["actual_cost"] == pytest.approx(summary["actual_hours"] * choice["nodes"] * 7.5)
    for parts, hours in ((summary["predicted_parts"], "predicted_hours"), (summary["actual_parts"], "actual_hours")):
        # Waiting for data is a part of the steps, and not predicted where the choice is of no probe.
        assert sum(seconds for name, seconds in parts.items() if name != "data") == pytest.approx(3600 * summary[hours])
    spent = summary["actual_parts"]
    assert min(spent["steps"], spent["evaluation"], spent["checkpoints"], spent["rest"]) > 0
    result = run.get_training(summary["signature"]).read_result()
    assert result is not None
    assert result.samples == 3 * (DIGITS // choice["batch"]) * choice["batch"]
    assert tula("train", *measuring)["data"] == summary, "a finished run answers at once"
    assert Path(summary["weights"]) == run.get_training(summary["signature"]).path / "best"
    (log,) = (run.path / "logs").glob(f"train-{summary['signature']}*.log")
    assert f"epoch 3 of 3: {result.samples} samples, loss " in log.read_text()
    assert tula("status")["status"] == "done"

    data = tula("evaluate")["data"]
    best = run.get_training(summary["signature"]).read_result()
    assert best is not None
    assert (data["weights"], data["test"], data["size"]) == ("best", False, 359)
    assert data["metrics"]["top1"] == pytest.approx(best.best_top1)
    assert tula("status")["data"]["evaluations"] == [data]
    efficiency = tula("recommend", "--objective", "accuracy-time")["data"]["efficiency"]
    assert "after 1 of 3 epochs" in efficiency

    tula("export", "--to", "tensorboard")
    tula("report", "--csv", "asked-for")
    assert (run.path / "exports" / "tensorboard").is_dir() and (run.path / "exports").stat().st_mode & 0o777 == 0o700
    stores = (
        tula.folder / "tula-runs",
        (tula.folder / "tula-runs" / inspection.CACHE_FOLDER).resolve(),
        Path(tula.environment["XDG_RUNTIME_DIR"]),
    )
    assert {str(store.name): open_to_others(store) for store in stores} == {store.name: set() for store in stores}
    asked_for = [tula.folder / "asked-for", *(tula.folder / "asked-for").iterdir()]
    assert {path.stat().st_mode & 0o777 for path in asked_for} == {0o777, 0o666}, "what is asked for follows the umask"


def test_out_of_memory_relaunches_at_the_next_smaller_batch_with_samples_and_schedule_right(tula) -> None:
    shrink = ("--set", LIMIT, "--set", "train.oom_policy=shrink", "--set", "export=[{to: tensorboard}]")
    summary = tula("train", "job.yaml", "--nodes", "1", "--batch", "1024", *shrink)["data"]
    assert summary["start_batch"] == 1024
    assert summary["batch"] < 1024
    assert summary["causes"][0].startswith("out of memory at batch 1024")
    run = tula.run()
    rows = run.get_training(summary["signature"]).read_metrics()
    starts = [row["batch"] for row in rows if row["kind"] == "start"]
    assert starts == [1024 >> k for k in range(len(starts))]
    ends = [row["samples"] for row in rows if row["kind"] == "epoch"]
    assert len(ends) == 3
    expected = 0
    for end, row in zip(ends, [row for row in rows if row["kind"] == "epoch"], strict=True):
        batch = next(r["batch"] for r in reversed(rows[: rows.index(row)]) if r["kind"] == "start")
        expected += DIGITS // batch * batch
        assert end == expected
    rates = {row["epoch"]: row["lr"] for row in rows if row["kind"] == "epoch"}
    assert rates == {1: 0.05, 2: 0.05, 3: 0.025}
    board = EventAccumulator(str(run.path / "exports" / "tensorboard" / run.id / f"train-{summary['signature']}"))
    board.Reload()  # what the waiting command has written beside the training
    assert [result.step for result in board.Scalars("eval/top1")] == ends
    assert [outcome.value for outcome in board.Scalars("attempt")][-1] == len(starts)
    assert board.Scalars("summary/attempts")[-1].value == summary["attempts"]


@pytest.mark.proof
def test_a_batch_that_does_not_fit_is_a_result_that_bounds_the_grid(tula) -> None:
    """The model hoards memory that no estimate can see, so that a probe meets the real limit."""
    (tula.folder / "mine.py").write_text(
        "import torch\n"
        "class Hoarder(torch.nn.Module):\n"
        "    def __init__(self, num_classes=10):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(64, num_classes)\n"
        "    def forward(self, x):\n"
        "        self.kept = bytearray(len(x) * 1_000_000)\n"
        "        return self.layer(x.flatten(1))\n"
    )
    hoarder = ("--set", "model={name: 'mine:Hoarder'}", "--set", "cluster.memory_per_gpu=200MB")
    tula("profile", "job.yaml", *hoarder, "--set", "search.nodes=[1]", "--set", "search.max_batch=512")
    results = {result.local_batch: result for result in tula.run().read_results()}
    assert isinstance(results[64], Measured)
    assert isinstance(results[128], OutOfMemory)
    assert not results[128].assumed
    assert isinstance(results[256], OutOfMemory)
    assert results[256].assumed
    answer = tula("recommend", "--objective", "time")
    assert {row["batch"] for row in answer["data"]["rows"]} == {64}


@pytest.mark.proof
@pytest.mark.promise("a process", "not even the smallest batch fits", "the training ends with exit code 7")
def test_out_of_memory_at_the_smallest_batch_has_its_own_exit_code(tula) -> None:
    answer = tula("train", "job.yaml", "--nodes", "1", "--batch", "64", "--set", "cluster.memory_per_gpu=1MB", code=7)
    assert answer["error"]["code"] == "memory"


@pytest.mark.proof  # a script does in test_failing_loader
@pytest.mark.promise(
    "a process",
    "loss or weights are not finite",
    "the training ends with exit code 9 and reports the epoch. Its newest checkpoint was written before",
)
def test_a_training_that_diverges_ends_with_its_own_exit_code(tula) -> None:
    answer = tula("train", "job.yaml", "--nodes", "2", "--batch", "64", "--set", "optimizer.lr=1e30", code=9)
    assert answer["error"]["code"] == "diverged" and "the loss is not finite at epoch " in answer["error"]["message"]
    (job,) = [job for job in tula("status")["data"]["jobs"] if job["state"] == "diverged"]
    assert "lower optimizer.lr" in job["reason"]


@pytest.mark.promise(
    "the command line",
    "the command line is killed, or the connection to it is lost",
    "the job continues; the same command attaches to it",
)
@pytest.mark.promise(
    "the command line",
    "Ctrl-C is pressed while a command waits",
    "the job continues, and the message shows how to cancel it",
)
@pytest.mark.promise(
    "the command line", "`tula cancel` ends a training", "the same command resumes it from its newest checkpoint"
)
def test_a_command_line_that_is_interrupted_or_killed_ends_no_job_and_cancel_does_also_in_a_checkout_of_tula(
    tula,
) -> None:
    package = Path(tula_cli.__file__).parent
    shutil.copytree(package, tula.folder / package.name)
    command = ("train", "job.yaml", "--nodes", "1", "--batch", "64", *slow_training_options(tula, 20, pause=0.02))
    process = tula.start(*command)
    tula.wait_until(tula.epochs_done)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "tula cancel" in errors

    process = attached(tula, *command)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    done = tula.epochs_done()
    tula.wait_until(lambda: tula.epochs_done() > done)

    process = attached(tula, *command)
    cancelled = tula("cancel")
    assert len(cancelled["data"]["cancelled"]) == 1
    process.communicate(timeout=60)
    assert process.returncode == 6
    assert tula("status")["status"] == "done"
    (attempt,) = tula.run().read_attempts()
    assert attempt.outcome == "cancelled", "it went on without its command lines"
    summary = tula(*command)["data"]
    assert summary["attempts"] == 2
    assert tula.run().read_attempts()[1].samples, "from a checkpoint"


def attached(tula, *command: str):
    """Start a command and return it once it waits for the job, which runs already."""
    process = tula.start(*command)
    for line in process.stderr:
        if ": running" in line:
            return process
    raise AssertionError(process.communicate())


@pytest.mark.promise(
    "a process",
    "a rank is killed, or crashes",
    "the other ranks are stopped, and new processes resume from the newest checkpoint; the weights equal those of an undisturbed training bit by bit",
)
@pytest.mark.promise(
    "a process",
    "a supervisor is killed",
    "its ranks exit too; the next job of the chain, or the same command, resumes from the newest checkpoint",
)
def test_killed_ranks_and_supervisors_change_no_bit_of_the_result(tula) -> None:
    slow = slow_training_options(tula, 6, pause=0.05)  # so that each kill comes before the end, also on a fast machine
    command = ("train", "job.yaml", "--nodes", "2", "--batch", "128", *slow)
    straight = tula(*command)["data"]
    run = tula.run()
    last = run.get_training(straight["signature"]).path / "last"
    kept = tula.folder / "straight.pt"
    kept.write_bytes(last.read_bytes())
    for name in ("train", "tasks", "jobs", "attempts", "failures"):
        subprocess.run(["rm", "-rf", str(run.path / name)], check=True)

    process = tula.start(*command)
    tula.wait_until(tula.epochs_done)
    os.kill(tula.ranks(tula.task())[0], signal.SIGKILL)
    tula.wait_until(lambda: tula.task().attempt == 2 and tula.epochs_done() >= 3)
    attempt = run.read_attempts(tula.task().id)[-1]
    os.kill(attempt.pid, signal.SIGKILL)  # the supervisor
    process.communicate(timeout=60)

    summary = tula(*command)["data"]
    assert summary["attempts"] == 3
    assert len(summary["causes"]) == 1
    assert "killed by SIGKILL" in summary["causes"][0]
    result = run.get_training(straight["signature"]).read_result()
    assert result is not None
    assert result.samples == 6 * (DIGITS // 128) * 128
    assert not weights_differ(kept, last)


@pytest.mark.promise(
    "a process",
    "the model or the data raises an error",
    "the training ends with exit code 6 and shows that error; it is not started again",
)
def test_the_users_own_error_is_reported_with_its_words(tula) -> None:
    (tula.folder / "mine.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, num_classes=10):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(64, num_classes)\n"
        "        self.seen = 0\n"
        "    def forward(self, x):\n"
        "        self.seen += 1\n"
        "        if self.seen > 20 and len(x) > 1:\n"
        "            raise ValueError('the user is tired of it')\n"
        "        return self.layer(x.flatten(1))\n"
    )
    answer = tula("train", "job.yaml", "--nodes", "1", "--batch", "64", "--set", "model={name: 'mine:Net'}", code=6)
    assert "the user is tired of it" in answer["error"]["message"]


@pytest.mark.promise(
    "a process",
    "a rank hangs and does not exit",
    "after 10 min (or 20 median steps) without a finished step, it writes the stacks of its threads to the log and exits; `tula status` shows rank, node and line, and new processes resume from the newest checkpoint",
)
def test_a_rank_that_hangs_is_reported_with_its_stack_and_started_again(tula) -> None:
    (tula.folder / "hanging.py").write_text(
        "import os, pathlib, time, torch\n"
        "from tula_cli.worker.train import hang_watch\n"
        "hang_watch.MIN_HANG_SECONDS = 2.0\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, num_classes=10):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(64, num_classes)\n"
        "        self.seen = 0\n"
        "    def forward(self, x):\n"
        "        self.seen += 1\n"
        "        if self.training and self.seen == 20 and os.environ['RANK'] == '1' and not pathlib.Path('hung').exists():\n"
        "            pathlib.Path('hung').touch()\n"
        "            time.sleep(600)\n"
        "        return self.layer(x.flatten(1))\n"
    )
    model = ("--set", "model={name: 'hanging:Net'}")
    summary = tula("train", "job.yaml", "--nodes", "2", "--batch", "128", *model)["data"]
    assert summary["attempts"] == 2 and summary["causes"][0].startswith("hung: no step finished for 2 s")
    first, _ = tula.run().read_attempts()
    assert (first.outcome, first.rank) == ("hung", 1)
    assert "in forward, " in first.message and "hanging.py line 13" in first.message
    assert first.message in str(tula("status")["data"]["attempts"])
    log = tula.run().get_log_path(first.task, 1).read_text()
    assert "[rank1]: rank 1 hangs: no step finished" in log and "in forward" in log
    assert "rank 0 hangs" not in log, "it waited for the other"
