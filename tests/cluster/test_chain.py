"""A training as a chain of allocations: what the next link does after each way in which the one before has ended."""

import contextlib
import errno
import json
import os
import signal
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import make_runs
import pytest

from tula_cli.cluster import allocation, failures
from tula_cli.cluster import attempt as cluster_attempt
from tula_cli.cluster import supervise as cluster_supervise
from tula_cli.cluster.allocation import Allocation
from tula_cli.cluster.chains import derive_chain_state
from tula_cli.cluster.decisions import History, decide_next_action
from tula_cli.cluster.failures import convert_error_to_failure, write_follower_failure
from tula_cli.cluster.full_disk import release_held_jobs
from tula_cli.cluster.rank_processes import RankLaunchPlan
from tula_cli.cluster.rank_program import WorkerProgram
from tula_cli.cluster.relaunch import make_next_attempt
from tula_cli.cluster.scheduler import SchedulerState
from tula_cli.cluster.slurm import queue as scheduler
from tula_cli.cluster.slurm.sbatch import make_submitit_parameters
from tula_cli.cluster.slurm.scheduler import SlurmScheduler
from tula_cli.cluster.supervise import Supervisor
from tula_cli.errors import DeviceFault, DiskFull, JobFailed, SchedulerError, TulaError
from tula_cli.host.network import get_node_name
from tula_cli.run.directory import RunDir
from tula_cli.run.records.base import OutcomeClass
from tula_cli.run.records.failures import Failure, Fallback, Relaunch, Stop
from tula_cli.run.records.jobs import Attempt, Job, LeaderCommand
from tula_cli.run.records.probes import Failed
from tula_cli.run.records.recommendations import Stage
from tula_cli.run.records.results import Branch, TrainResult, Tuning
from tula_cli.run.records.tasks import CheckTask, JobSize, ProbeTask, Rung, TrainTask
from tula_cli.services import train
from tula_cli.services.training_end import make_training_error
from tula_cli.spec.ags import Arm
from tula_cli.spec.signature import compute_cluster_signature

GLOO = "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:31415"
LINKS = ("11", "12", "13", "14", "15")


class Cluster:
    """Stands in for SLURM: how its jobs have ended, and which it was told to end."""

    def __init__(self) -> None:
        self.endings: dict[str, OutcomeClass] = {}
        self.cancelled: list[str] = []
        self.held: list[str] = []
        self.excluded: list[tuple[list[str], str]] = []
        self.prompt: list[tuple[str, str]] = []  # jobs whose delay was ended, and the job before each
        self.delayed: list[tuple[str, int]] = []  # jobs that were delayed, and minutes
        self.complaint = ""

    def find_end_reason(self, job_id: str, *, restart: int | None = None) -> OutcomeClass | None:
        return self.endings.get(job_id)

    def exclude(self, ids: Sequence[str], nodes: str) -> str:
        self.excluded.append((list(ids), nodes))
        return self.complaint

    def cancel(self, ids: Sequence[str]) -> None:
        self.cancelled += ids

    def end_delay(self, id_: str, after: str) -> str:
        self.prompt.append((id_, after))
        return self.complaint

    def delay(self, id_: str, minutes: int) -> str:
        self.delayed.append((id_, minutes))
        return self.complaint

    def hold(self, ids: Sequence[str]) -> str:
        self.held += ids
        return self.complaint

    def release(self, ids: Sequence[str]) -> str:
        self.held = [id_ for id_ in self.held if id_ not in ids]
        return self.complaint

    def query_states(self, ids: Sequence[str]) -> dict[str, SchedulerState]:
        reason = "JobHeldUser: will not start, because you hold the job; release it with scontrol release"
        return {
            id_: SchedulerState("pending", reason if id_ in self.held else "", on_hold=id_ in self.held) for id_ in ids
        }


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    result = Cluster()
    monkeypatch.setattr(scheduler, "find_job_outcome", result.find_end_reason)
    monkeypatch.setattr(scheduler, "cancel_jobs", result.cancel)
    for order in ("delay", "end_delay", "exclude", "hold", "release", "query_states"):
        monkeypatch.setattr(SlurmScheduler, order, getattr(result, order))
    monkeypatch.setattr(scheduler, "find_end_time", lambda *_: None)
    monkeypatch.setattr(cluster_attempt, "PEER_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(cluster_supervise, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(allocation, "ACCOUNTING_LAG", 0.0)
    return result


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Chain:
    """A run with one training, and its links as SLURM starts them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        spec = make_runs.spec(train={"epochs": 1, "max_attempts": 3, "workers": 0}, cluster={"kind": "slurm"})
        self.run = RunDir.create(folder / "runs", spec)
        self.task = TrainTask(
            id="train-s-1", job="train-s", spec=spec, workdir=str(folder), nodes=1, signature="s", attempt=1,
            ladder=(Rung(batch=64), Rung(batch=32)), workers=0,
        )  # fmt: skip
        self.run.write_task(self.task)
        self.script = ""
        self.submit(LINKS)
        monkeypatch.setattr(
            RankLaunchPlan, "make_command_line", lambda _: [sys.executable, "-c", textwrap.dedent(self.script)]
        )

    def submit(self, links: tuple[str, ...]) -> None:
        job = Job(id="train-s", scheduler="slurm", scheduler_id=links[0], nodes=1, submitted_at=1.0, links=links)
        self.run.write_job(job)

    def grows(self) -> None:
        """Let the first epoch have one node, and what follows two; the first three links are for that epoch."""
        stages = (Stage(begin=0, batch=32, nodes=1), Stage(begin=96, batch=64, nodes=2))
        self.task = self.task.model_copy(update={"stages": stages})
        self.run.write_task(self.task)
        job = self.run.find_job("train-s")
        assert job is not None
        self.run.write_job(job.model_copy(update={"link_nodes": (1, 1, 1, 2, 2)}))

    def will_leave(self, then: str = "raise SystemExit(0)") -> None:
        """Let the first attempt end where its stage does, and the one after it do something else."""
        path = self.run.path / "stopped" / "train-s-1.001"
        leave = f"""
            import pathlib
            path = pathlib.Path({str(path)!r})
            path.parent.mkdir(exist_ok=True)
            if not path.exists():
                path.write_text("stage_end")
                raise SystemExit(0)
        """
        self.script = textwrap.dedent(leave) + textwrap.dedent(then)

    def start(self, link: str, *, restarts: int = 0, nodes: int = 1) -> None:
        """Run a link as srun would start its one supervisor."""
        environ = {
            "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_JOB_ID": link,
            "SLURM_RESTART_COUNT": str(restarts), "SLURM_JOB_NODELIST": f"node{link}", "SLURM_JOB_NUM_NODES": str(nodes),
            "PATH": "/usr/bin:/bin",
        }  # fmt: skip
        cluster_supervise.supervise(self.run.path, self.task.id, environ=environ)

    def was_killed(self, link: str, *, samples: int = 0) -> None:
        """Leave an attempt behind as a killed supervisor does."""
        task = self.newest()
        attempt = Attempt(
            task=task.id, number=len(self.run.read_attempts(task.id)) + 1, started_at=float(link), host="h",
            allocation=f"{link}.0", hosts=f"node{link}", samples=samples, cluster=compute_cluster_signature(task.spec.cluster),
        )  # fmt: skip
        self.run.write_attempt(attempt)

    def has_gpu_on_rank_0(self, task: str) -> None:
        path = self.run.get_rendezvous_path(task, 1)
        path.parent.mkdir(exist_ok=True)
        path.write_text("node1 4711 cuda\n")

    def asks_for(self, **slurm: object) -> None:
        """Let the next links ask for other nodes."""
        spec = make_runs.spec(
            train={"epochs": 1, "max_attempts": 3, "workers": 0}, cluster={"kind": "slurm", "slurm": slurm}
        )
        self.run.write_task(self.newest().model_copy(update={"spec": spec}))

    def newest(self) -> TrainTask:
        task = self.run.get_training("s").read_newest_task()
        assert task is not None
        return task

    def save(self, samples: int) -> None:
        path = self.run.get_training("s").get_checkpoint_path(samples)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def will_finish(self) -> None:
        result = TrainResult(
            signature="s", nodes=1, batch=64, samples=128, steps=2, epochs=1, metrics={}, best_top1=9.0, best_epoch=1,
            step_time=0.1, finished_at=2.0,
        )  # fmt: skip
        self.will_write(self.run.path / "train/s/result.json", result.model_dump_json())

    def will_write(self, path: Path, text: str) -> None:
        self.script = f"""
            import pathlib
            path = pathlib.Path({str(path)!r})
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text({text!r})
        """

    def outcomes(self) -> list[str | None]:
        return [attempt.outcome for attempt in self.run.get_training("s").read_attempts()]


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> Chain:
    return Chain(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("time_limit", "time limit of job 11 reached"),
        ("preempted", "job 11 was preempted"),
        ("node_failure", "a node of job 11 failed"),
        (None, "signal: job 11 was stopped by something other than tula, or its supervisor was killed"),
    ],
)
def test_the_next_link_goes_on_and_tells_why(
    chain: Chain, cluster: Cluster, how: OutcomeClass | None, words: str
) -> None:
    chain.was_killed("11")
    chain.save(32)
    cluster.endings = {} if how is None else {"11": how}
    chain.will_finish()
    chain.start("12")
    assert chain.outcomes() == [how or "signal", "done"]
    summary = chain.run.get_training("s").read_summary()
    assert summary is not None
    assert summary.causes == (words,)
    attempt = chain.run.get_training("s").read_attempts()[-1]
    assert (attempt.task, attempt.hosts, attempt.samples) == ("train-s-2", "node12", 32)


def test_a_verdict_that_came_too_late_for_the_link_itself_is_taken_up_by_the_next(
    chain: Chain, cluster: Cluster
) -> None:
    chain.script = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    chain.start("11")
    assert chain.outcomes() == ["signal"]
    cluster.endings = {"11": "preempted"}
    chain.will_finish()
    chain.start("12")
    assert chain.outcomes() == ["preempted", "done"]


def test_a_finished_training_gives_the_other_links_back(chain: Chain, cluster: Cluster) -> None:
    chain.will_finish()
    chain.start("11")
    assert cluster.cancelled == ["12", "13", "14", "15"]


def test_a_link_that_starts_after_the_end_does_nothing(chain: Chain) -> None:
    chain.will_finish()
    chain.start("11")
    chain.script = "raise SystemExit(1)"
    chain.start("12")
    assert chain.outcomes() == ["done"]


def test_a_stage_that_ends_leaves_its_nodes_and_the_first_link_with_more_goes_on(
    chain: Chain, cluster: Cluster
) -> None:
    chain.grows()
    chain.will_leave()
    chain.start("11")
    assert chain.outcomes() == ["stage_end"] and chain.newest().nodes == 2
    assert cluster.cancelled == ["12", "13"], "links with too few nodes are given back to the queue"
    chain.start("12")
    assert chain.outcomes() == ["stage_end"], "and one that starts all the same ends at once"
    cluster.endings = {"12": "cancelled", "13": "cancelled"}
    chain.will_finish()
    chain.start("14", nodes=2)
    assert chain.outcomes() == ["stage_end", "done"] and not chain.run.is_cancelled("train-s")
    summary = chain.run.get_training("s").read_summary()
    assert summary is not None and (summary.nodes, summary.causes) == (2, ("the stage with batch 64 runs on 2 nodes",))


def test_each_link_of_a_moldable_training_uses_the_nodes_that_it_is_granted(chain: Chain, cluster: Cluster) -> None:
    sizes = tuple(JobSize(nodes=n, micro_batch=64 // n, splits=1, ladder=chain.task.ladder) for n in (1, 2, 4))
    chain.run.write_task(chain.task.model_copy(update={"nodes": 4, "sizes": sizes}))
    chain.script = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    cluster.endings = dict.fromkeys(LINKS, "preempted")
    chain.start("11", nodes=3)
    first = chain.newest()
    assert (first.id, first.nodes, first.batch) == ("train-s-2", 2, 64)
    assert first.cause == "3 nodes granted instead of 4; the batch can be divided among 2 of them"
    chain.save(32)
    chain.start("12", nodes=4)
    chain.will_finish()
    chain.start("13", nodes=1)
    assert chain.outcomes() == ["preempted", "preempted", "done"]
    training = chain.run.get_training("s")
    assert [task.nodes for task in training.read_tasks()] == [4, 2, 4, 1]
    assert [attempt.idle_nodes for attempt in training.read_attempts()] == [1, 0, 0]
    summary = training.read_summary()
    assert summary is not None and summary.nodes == 1
    assert summary.causes == (first.cause, "job 11 was preempted", "job 12 was preempted")
    seconds = [
        attempt.ended_at - attempt.started_at for attempt in training.read_attempts() if attempt.ended_at is not None
    ]
    node_hours = sum(nodes * each for nodes, each in zip((3, 4, 1), seconds, strict=True)) / 3600
    assert summary.actual_cost == pytest.approx(node_hours, rel=0.05), "with the node that was idle"


def test_after_an_out_of_memory_other_numbers_of_nodes_have_no_larger_micro_batches(chain: Chain) -> None:
    sizes = tuple(JobSize(nodes=n, micro_batch=64 // n, splits=1, ladder=chain.task.ladder) for n in (1, 2, 4))
    task = chain.task.model_copy(update={"sizes": sizes})
    smaller = Fallback(rung=0, splits=4, batch=64)
    relaunch = make_next_attempt(task, Failure(outcome="device_oom"), Relaunch(fallback=smaller))
    assert (relaunch.splits, relaunch.max_micro_batch) == (4, 16)
    assert [relaunch.with_granted_nodes(nodes).splits for nodes in (1, 2, 4)] == [4, 2, 1]


def test_a_job_that_has_started_tula_ends_the_delay_of_the_next_one(chain: Chain, cluster: Cluster) -> None:
    chain.grows()
    chain.will_leave()
    chain.start("11")
    assert cluster.prompt == [("12", "11"), ("14", "11")], "the next stage's first job takes the place of the next one"


def test_a_job_without_a_later_one_has_no_delay_to_end(chain: Chain, cluster: Cluster) -> None:
    chain.start("15")
    assert cluster.prompt == []


@pytest.mark.parametrize(
    ("finishes", "why"), [(True, "the training is finished"), (False, "later jobs would fail in the same way")]
)
def test_jobs_that_the_supervisor_has_cancelled_are_reported_as_cancelled_by_tula(
    chain: Chain, finishes: bool, why: str
) -> None:
    chain.script = "raise ValueError('classes do not match')"
    if finishes:
        chain.will_finish()
    chain.start("12")
    job, released = chain.run.find_job("train-s"), chain.run.read_snapshot().read_released_jobs("train-s")
    assert job is not None and released == dict.fromkeys(LINKS[2:], why)
    cancelled = SchedulerState("ended", "CANCELLED by 0: the job was cancelled by scancel or by an administrator")
    known = {
        **dict.fromkeys(LINKS, cancelled),
        "12": SchedulerState("ended", "FAILED: the script of the job ended with an error", failed=True),
    }
    state = derive_chain_state(job, known, forgotten="", released=released)
    assert state.failed and state.released == f"tula cancelled jobs 13 to 15 of the chain: {why}"


def test_what_scancel_has_ended_in_a_stage_stays_ended(chain: Chain, cluster: Cluster) -> None:
    chain.grows()
    cluster.endings = {"11": "cancelled"}
    chain.start("12")
    assert chain.run.is_cancelled("train-s") and chain.outcomes() == []


def test_a_link_with_more_nodes_than_the_stage_ends_that_and_goes_on_with_all(chain: Chain, cluster: Cluster) -> None:
    chain.grows()
    result = {
        "signature": "s", "nodes": 2, "batch": 64, "samples": 128, "steps": 2, "epochs": 1, "metrics": {}, "best_top1": 9.0,
        "best_epoch": 1, "step_time": 0.1, "finished_at": 2.0,
    }  # fmt: skip
    (chain.run.path / "train/s").mkdir(parents=True, exist_ok=True)
    chain.will_leave(f"""
        import json, os
        assert os.environ["WORLD_SIZE"] == "2", os.environ["WORLD_SIZE"]
        pathlib.Path({str(chain.run.path / "train/s/result.json")!r}).write_text(json.dumps({result!r}))
    """)
    chain.start("14", nodes=2)
    assert chain.outcomes() == ["stage_end", "done"]
    assert {attempt.allocation for attempt in chain.run.get_training("s").read_attempts()} == {"14.0"}


def test_an_out_of_memory_in_a_stage_goes_on_with_more_nodes_at_the_same_batch(chain: Chain) -> None:
    chain.grows()
    chain.script = "raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')"
    chain.start("11")
    newest = chain.newest()
    assert (newest.nodes, newest.batch, newest.splits) == (2, 64, 1)
    assert newest.cause == "out of memory on 1 node, so the training continues on 2"


def test_a_stage_whose_supervisor_was_killed_goes_on_in_the_next_link_of_that_stage(
    chain: Chain, cluster: Cluster
) -> None:
    chain.grows()
    chain.was_killed("11")
    chain.save(32)
    cluster.endings = {"11": "preempted"}
    chain.script = """
        import pathlib
        path = pathlib.Path("STOPPED")
        path.parent.mkdir(exist_ok=True)
        path.write_text("stage_end")
    """.replace("STOPPED", str(chain.run.path / "stopped" / "train-s-2.001"))
    chain.start("12")
    assert chain.outcomes() == ["preempted", "stage_end"]
    assert [(task.nodes, task.cause) for task in chain.run.get_training("s").read_tasks()] == [
        (1, ""), (1, "job 11 was preempted"), (2, "the stage with batch 64 runs on 2 nodes"),
    ]  # fmt: skip
    assert cluster.cancelled == ["13"]


def test_what_scancel_has_ended_stays_ended(chain: Chain, cluster: Cluster) -> None:
    chain.was_killed("11")
    cluster.endings = {"11": "cancelled"}
    chain.will_finish()
    chain.start("12")
    assert chain.outcomes() == ["cancelled"]
    assert chain.run.is_cancelled("train-s")
    assert set(cluster.cancelled) >= {"13", "14", "15"}


def test_a_link_cancelled_before_it_started_ends_the_chain_too(chain: Chain, cluster: Cluster) -> None:
    cluster.endings = {"11": "cancelled"}
    chain.will_finish()
    chain.start("12")
    assert chain.outcomes() == []
    assert chain.run.is_cancelled("train-s")


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ("raise ValueError('mine')", "user"),
        ("from tula_cli.errors import Diverged; raise Diverged('the loss is not finite')", "diverged"),
    ],
)
def test_a_final_failure_is_not_repeated_by_the_next_link(
    chain: Chain, cluster: Cluster, script: str, outcome: OutcomeClass
) -> None:
    chain.script = script
    chain.start("11")
    assert chain.outcomes() == [outcome]
    assert cluster.cancelled == ["12", "13", "14", "15"]
    chain.start("12")
    assert chain.outcomes() == [outcome]


def test_a_ramp_that_diverges_restarts_in_the_same_allocation_and_the_links_stay_until_it_is_over(
    chain: Chain, cluster: Cluster
) -> None:
    row = {"kind": "diverged", "samples": 640, "lr_factor": 16.0}
    chain.will_write(chain.run.get_training("s").metrics_path, json.dumps(row) + "\n")
    ending = textwrap.dedent(chain.script)
    chain.script = f"{ending}\nfrom tula_cli.errors import Diverged; raise Diverged('the loss is not finite')"
    chain.start("11")
    assert chain.outcomes() == ["diverged", "diverged"]
    assert [(task.attempt, task.max_lr_factor) for task in chain.run.get_training("s").read_tasks()] == [
        (1, None),
        (2, 8.0),
    ]
    assert {attempt.scheduler_id for attempt in chain.run.read_attempts()} == {"11"}
    assert cluster.cancelled == ["12", "13", "14", "15"]


def test_lost_processes_are_counted_over_all_links(chain: Chain) -> None:
    chain.was_killed("11")
    chain.script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    chain.start("12")
    assert chain.outcomes() == ["signal"] * 3, "train.max_attempts"
    chain.start("13")
    assert chain.outcomes() == ["signal"] * 3


def test_a_new_submission_begins_anew(chain: Chain) -> None:
    chain.script = "raise ValueError('mine')"
    chain.start("11")
    chain.submit(("21", "22"))
    chain.will_finish()
    chain.start("21")
    assert chain.outcomes() == ["user", "done"]


def test_a_link_that_the_command_line_has_not_written_down_yet_does_not_heed_the_last_submission(chain: Chain) -> None:
    chain.script = "raise ValueError('mine')"
    chain.start("11")
    chain.will_finish()
    chain.start("21")
    assert chain.outcomes() == ["user", "done"]


def test_time_limits_go_on_for_as_long_as_checkpoints_advance(chain: Chain, cluster: Cluster) -> None:
    chain.submit(tuple(str(link) for link in range(11, 20)))
    for link in range(11, 18):
        cluster.endings[str(link)] = "time_limit"
        chain.save(100 * link)
        chain.will_write(chain.run.path / "stopped" / f"{chain.newest().id}.001", "time_limit")
        chain.script += f"\n            pathlib.Path({str(chain.run.get_training('s').get_checkpoint_path(100 * link + 50))!r}).touch()"
        if link > 11:  # the link before left this as the newest task, the next one writes its own
            name = f"train-s-{link - 10}.001"
            chain.will_write(chain.run.path / "stopped" / name, "time_limit")
        chain.start(str(link))
    assert chain.outcomes() == ["time_limit"] * 7
    assert cluster.cancelled == []


def test_a_time_limit_too_short_to_save_anything_ends_the_chain_with_advice(chain: Chain, cluster: Cluster) -> None:
    chain.will_write(chain.run.path / "stopped/train-s-1.001", "time_limit")
    chain.start("11")
    assert chain.outcomes() == ["time_limit"]
    assert cluster.cancelled == []
    chain.will_finish()
    chain.start("12")
    assert chain.outcomes() == ["time_limit"]
    assert "raise cluster.minutes" in chain.run.get_training("s").read_attempts()[-1].message
    assert cluster.cancelled == ["11", "13", "14", "15"]


@pytest.mark.parametrize("how", ["preempted", "node_failure"])
@pytest.mark.promise(
    "the scheduler",
    "jobs are repeatedly preempted before they save a checkpoint",
    "all remaining jobs of the chain still run",
)
def test_jobs_that_are_taken_away_do_not_end_the_chain(chain: Chain, cluster: Cluster, how: OutcomeClass) -> None:
    chain.save(64)
    chain.script = TERM
    for link in LINKS:  # more than train.max_attempts
        cluster.endings[link] = how
        chain.start(link)
    assert chain.outcomes() == [how] * len(LINKS) and not cluster.cancelled


@pytest.mark.promise(
    "the scheduler",
    "an administrator requeues the job",
    "the training resumes from the newest checkpoint in the same job",
)
def test_a_requeue_by_an_administrator_goes_on_in_the_same_job(chain: Chain) -> None:
    chain.was_killed("11")
    chain.will_finish()
    chain.start("11", restarts=1)
    assert chain.outcomes() == ["signal", "done"]
    assert chain.run.get_training("s").read_attempts()[-1].allocation == "11.1"


def test_an_allocation_taken_while_it_trains_leaves_the_rest_to_the_next_link(chain: Chain, cluster: Cluster) -> None:
    cluster.endings = {"11": "preempted"}
    chain.script = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    chain.start("11")
    assert chain.outcomes() == ["preempted"]
    assert cluster.cancelled == []


def test_scancel_of_the_running_link_gives_the_other_links_back(chain: Chain, cluster: Cluster) -> None:
    cluster.endings = {"11": "cancelled"}
    chain.script = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    chain.start("11")
    assert chain.outcomes() == ["cancelled"]
    assert chain.run.is_cancelled("train-s")
    assert cluster.cancelled == ["12", "13", "14", "15"]


def test_ranks_that_are_done_when_the_allocation_is_taken_have_succeeded(chain: Chain, cluster: Cluster) -> None:
    cluster.endings = {"11": "preempted"}
    chain.will_finish()
    chain.script += """
            import os, signal, time
            signal.signal(signal.SIGTERM, lambda *_: None)
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(1)
    """
    chain.start("11")
    assert chain.outcomes() == ["done"]
    assert chain.run.get_training("s").read_summary() is not None


def test_the_signal_that_warns_of_a_time_limit_ends_neither_supervisor_nor_ranks(chain: Chain) -> None:
    chain.will_finish()
    chain.script = textwrap.dedent("""
            import os, signal
            for pid in (os.getpid(), os.getppid()):
                os.kill(pid, signal.SIGUSR2)
                os.kill(pid, signal.SIGUSR1)
        """) + textwrap.dedent(chain.script)
    chain.start("11")
    assert chain.outcomes() == ["done"]


def test_the_time_limit_is_reported_to_the_ranks_with_room_to_save(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "find_end_time", lambda *_: allocation.time.time() + 600)
    path = tmp_path / "told"
    chain.script = f"""
        import os, time
        open({str(path)!r}, "w").write(str(float(os.environ["TULA_LEAVE_AT"]) - time.time()))
    """
    monkeypatch.setattr(cluster_supervise, "decide_next_action", lambda *_: Stop())
    chain.start("11")
    assert 560 < float(path.read_text()) < 575


TERM = """
    import os, signal, time
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
"""


def test_a_relaunch_late_in_an_allocation_that_has_saved_something_is_no_lack_of_progress(
    chain: Chain, cluster: Cluster
) -> None:
    cluster.endings = {"11": "time_limit"}
    chain.was_killed("11")
    chain.save(1000)
    second = chain.task.model_copy(update={"id": "train-s-2", "attempt": 2})
    chain.run.write_task(second)
    chain.was_killed("11", samples=1000)
    chain.will_finish()
    chain.start("12")
    assert chain.outcomes() == ["time_limit", "time_limit", "done"]


@pytest.mark.parametrize(("branches", "outcomes"), [(1, ["time_limit", "done"]), (0, ["time_limit"])])
def test_an_allocation_that_has_ended_a_branch_is_no_lack_of_progress(
    chain: Chain, cluster: Cluster, branches: int, outcomes: list[str]
) -> None:
    cluster.endings = {"11": "time_limit"}
    chain.was_killed("11")
    branch = Branch(arm="lbt", epochs=1, samples=640, loss=1.0, top1=50.0, diverged=False, seconds=9.0)
    arms = (Arm(name="lbt"), Arm(name="x2", lr_factor=2))
    chain.run.write_tuning(
        Tuning(signature="s", batch=64, start=0, epoch=1.0, arms=arms, branches=(branch,) * branches)
    )
    chain.will_finish()
    chain.start("12")
    assert chain.outcomes() == outcomes


def test_allocations_that_ended_without_a_verdict_go_on_while_checkpoints_advance(chain: Chain) -> None:
    for link in LINKS:  # more than train.max_attempts
        path = chain.run.get_training("s").get_checkpoint_path(10 * int(link))
        path.parent.mkdir(parents=True, exist_ok=True)
        chain.script = f"open({str(path)!r}, 'w').close()\n{textwrap.dedent(TERM)}"
        chain.start(link)
    assert chain.outcomes() == ["signal"] * len(LINKS)


@pytest.mark.promise(
    "a node", "the memory of the node is used up", "the training continues with fewer data-loader processes"
)
def test_an_out_of_memory_of_the_whole_allocation_goes_on_with_fewer_loader_processes(
    chain: Chain, cluster: Cluster
) -> None:
    spec = make_runs.spec(train={"epochs": 1, "workers": 4}, cluster={"kind": "slurm"})
    chain.run.write_task(chain.task.model_copy(update={"workers": 4, "spec": spec}))
    chain.was_killed("11")
    cluster.endings = {"11": "host_oom"}
    chain.will_finish()
    chain.start("12")
    assert chain.outcomes() == ["host_oom", "done"]
    assert chain.newest().workers == 2


@pytest.mark.parametrize("missing", ["wrapper", "workdir", "interface"])
def test_what_is_missing_on_the_node_is_reported_once_and_ends_the_chain(
    chain: Chain, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    chain.script = "pass"
    if missing == "wrapper":
        monkeypatch.setattr(RankLaunchPlan, "make_command_line", lambda _: ["nosuch-wrapper", sys.executable])
    elif missing == "workdir":
        chain.run.write_task(chain.task.model_copy(update={"workdir": "/nosuch-workdir"}))
    else:
        slurm = {"kind": "slurm", "interface": "nosuch0", "slurm": {"launcher": "torchrun"}}
        chain.run.write_task(chain.task.model_copy(update={"spec": make_runs.spec(cluster=slurm)}))
    chain.start("11")
    assert chain.outcomes() == ["user"]
    assert "nosuch" in chain.run.get_training("s").read_attempts()[0].message
    assert cluster.cancelled == ["12", "13", "14", "15"]


def test_ranks_that_lose_a_peer_on_the_way_out_have_left_for_the_time_limit(chain: Chain) -> None:
    chain.will_write(chain.run.path / "stopped/train-s-1.001", "time_limit")
    chain.script += """
            print("RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:31415")
            raise SystemExit(1)
    """
    chain.start("11")
    assert chain.outcomes() == ["time_limit"]


def test_a_killed_child_of_ours_does_not_hide_what_its_peer_said(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_supervise, "decide_next_action", lambda *_: Stop())
    failure = Failure(
        task="train-s-1", attempt=1, rank=1, host="other", pid=1, outcome="peer", message="closed", detail="",
        failed_at=1.0,
    )  # fmt: skip
    chain.will_write(chain.run.path / "failures/train-s-1.001.0001.json", failure.model_dump_json())
    chain.script += "\n            import time; time.sleep(60)"
    chain.start("11")
    (attempt,) = chain.run.get_training("s").read_attempts()
    assert (attempt.outcome, attempt.rank, attempt.host) == ("peer", 1, "other")


@pytest.mark.promise(
    "a node",
    "a node that was considered lost is still running",
    "it stops as soon as another job has taken over, so that only one job writes to the run",
)
def test_an_allocation_given_up_for_lost_stops_when_another_has_taken_over(chain: Chain) -> None:
    later = chain.task.model_copy(update={"id": "train-s-2", "attempt": 2})
    chain.will_write(chain.run.path / "tasks/train-s-2.json", later.model_dump_json())
    chain.script += "\n            import time; time.sleep(60)"
    chain.start("11")
    assert chain.outcomes() == ["node_failure"]


def test_attempt_numbers_are_not_used_twice(chain: Chain) -> None:
    chain.was_killed("11")
    chain.was_killed("11")
    (chain.run.path / "attempts/train-s-1.001.json").unlink()
    assert cluster_attempt.open_attempt(chain.run, Allocation(0, 1), chain.task).number == 3


def test_a_follower_waits_for_what_a_command_is_about(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_supervise, "MAX_NFS_DELAY_SECONDS", 0.5)
    follower = Supervisor(chain.run, Allocation(1, 2, 0, "11"))
    chain.run.write_leader_command("11.0", 0, LeaderCommand(task="train-s-1", attempt=1, ranks=2))
    with pytest.raises(TulaError, match="named by the leader, cannot be read"):
        follower.follow_leader()


def test_a_follower_sees_later_on_nfs_what_was_written_before_its_command(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_supervise, "POLL_SECONDS", 0.0)
    attempt, reads = make_runs.attempt(chain.task.id, start=1.0), []

    def appear_late(run: RunDir, task: str, number: int) -> Attempt | None:
        reads.append(number)
        return attempt if len(reads) == 3 else None

    monkeypatch.setattr(RunDir, "read_attempt", appear_late)
    for number, task in enumerate((chain.task.id, None)):
        chain.run.write_leader_command("11.0", number, LeaderCommand(task=task, attempt=1, ranks=1))
    Supervisor(chain.run, Allocation(1, 2, 0, "11")).follow_leader()
    assert reads == [1, 1, 1]


def test_a_rendezvous_of_the_shell_does_not_reach_the_ranks(chain: Chain) -> None:
    environ = {"MASTER_ADDR": "login1", "MASTER_PORT": "29500"}
    inherited = Allocation(0, 2, 0, "11", environ=environ)
    start = RankLaunchPlan(chain.run, inherited, chain.task, LeaderCommand(task=chain.task.id, attempt=1, ranks=2))
    assert not set(environ) & set(start.make_environments()[0])


def test_a_rank_does_not_repeat_in_its_own_name_what_another_has_told(chain: Chain, tmp_path: Path) -> None:
    root = Failure(
        task="train-s-1", attempt=1, rank=5, host="other", pid=1, outcome="user", message="mine", detail="",
        failed_at=9e9,
    )  # fmt: skip
    chain.run.write_failure(root)
    exited = failures.RankExit(exit_code=-9, oom_kill=False, words="", rank=0)
    attempt = make_runs.attempt("train-s-1", start=1.0)
    failure = failures.find_rank_failure(chain.run, chain.task, attempt, exited)
    failures.write_exit_report(chain.run, chain.task, attempt, exited, failure)
    assert failures.find_root_cause(chain.run, chain.task, attempt, failure).rank == 5, "by a clock that runs ahead"


def test_a_kill_for_memory_is_reported_although_another_rank_failed_first(chain: Chain, tmp_path: Path) -> None:
    chain.run.write_failure(
        Failure(task="train-s-1", attempt=1, rank=5, host="other", pid=1, outcome="unknown", message="exit 1", detail="",
                failed_at=1.0)
    )  # fmt: skip
    exited = failures.RankExit(exit_code=-9, oom_kill=True, words="", rank=0)
    failure = failures.find_rank_failure(chain.run, chain.task, make_runs.attempt("train-s-1", start=1.0), exited)
    assert failure.outcome in ("host_oom", "device_oom")


@pytest.mark.parametrize(
    ("log", "outcome", "words"),
    [
        ("subprocess.CalledProcessError: Command '['python', 'train.py']' died with <Signals.SIGKILL: 9>.", "signal",
         "the launcher reports that a rank was killed by SIGKILL"),
        (f"RuntimeError: {GLOO}\n[launch.py] exits with return code = -9", "signal",
         "the launcher reports that a rank was killed by SIGKILL"),
        ("Traceback (most recent call last):\nValueError: mine\n\nTraceback (most recent call last):\n"
         "subprocess.CalledProcessError: Command 'x' returned non-zero exit status 1.", "user", "ValueError: mine"),
        ("the end is near\nresource_tracker.py:310: UserWarning: resource_tracker: 1 leaked\n  warnings.warn(", "unknown",
         "the end is near"),
        ("", "unknown", "exited with code 1 without any output"),
    ],
)  # fmt: skip
def test_what_a_launcher_says_of_an_end_is_reported(
    chain: Chain, tmp_path: Path, log: str, outcome: str, words: str
) -> None:
    exited = failures.RankExit(exit_code=1, oom_kill=False, words=log, rank=0)
    failure = failures.find_rank_failure(chain.run, chain.task, make_runs.attempt("train-s-1", start=1.0), exited)
    assert (failure.outcome, failure.message) == (outcome, words)


def test_an_exit_code_that_a_script_has_chosen_is_reported_with_its_own_last_line(chain: Chain) -> None:
    log = "epoch 2 done\n2026-11-28 05:34:16+0000 epoch 2, sample 128: batch 8, 1340 samples/s, 0 s left"
    exited = failures.RankExit(exit_code=7, oom_kill=False, words=log, rank=0)
    failure = failures.find_rank_failure(chain.run, chain.task, make_runs.attempt("train-s-1", start=1.0), exited)
    assert failure.message == "exited with code 7; last output: epoch 2 done"


def test_the_exit_code_of_a_full_disk_is_known_from_tulas_worker_only(tmp_path: Path) -> None:
    job = make_runs.script_spec(epochs=3)
    run = RunDir.create(tmp_path, job)
    fields: dict[str, Any] = {"job": "j", "spec": job, "workdir": "/", "nodes": 1}
    check, probe = CheckTask(id="check-n001-1", **fields), ProbeTask(id="j", local_batches=(8,), **fields)
    exited = failures.RankExit(exit_code=DiskFull.exit_code, oom_kill=False, words="", rank=0)
    outcomes = [
        failures.find_rank_failure(run, task, make_runs.attempt(task.id, start=1.0), exited).outcome
        for task in (check, probe)
    ]
    assert outcomes == ["disk", "unknown"], "tula's worker also checks the nodes of a job with a script"


def test_a_lost_rank_is_reported_in_short_by_those_that_noticed(chain: Chain, tmp_path: Path) -> None:
    noticed = Failure(
        task="train-s-1", attempt=1, rank=1, host="other", pid=1, outcome="peer", message=f"RuntimeError: {GLOO}",
        detail="", failed_at=1.0,
    )  # fmt: skip
    chain.run.write_failure(noticed)
    attempt = make_runs.attempt("train-s-1", start=1.0)
    exited = failures.RankExit(exit_code=1, oom_kill=False, words="", rank=0)
    failure = failures.find_rank_failure(chain.run, chain.task, attempt, exited)
    assert failure.summary == "rank 1 lost its connection to another rank, which reported no error"
    exited = failures.RankExit(exit_code=-9, oom_kill=False, words="", rank=0)
    failure = failures.find_rank_failure(chain.run, chain.task, attempt, exited)
    assert (failure.outcome, failure.message) == ("signal", "its process was killed by SIGKILL"), (
        "the first cause, where it is known"
    )


# --- faulty devices and nodes

ECC = "CUDA error: uncorrectable ECC error encountered"


NO_GPU = "No CUDA GPUs are available"


def dies_of(words: str) -> str:
    return f"raise RuntimeError({words!r})"


def test_the_next_links_leave_out_the_node_of_a_faulty_device(
    chain: Chain, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "gpu11")
    chain.save(32)
    chain.script = dies_of(ECC)
    chain.start("11")
    assert chain.outcomes() == ["device_fault"], "not again on the same node"
    assert cluster.excluded == [(["12", "13", "14", "15"], "gpu11")]
    assert cluster.cancelled == []
    monkeypatch.setenv("SLURMD_NODENAME", "gpu12")
    chain.start("12")
    assert cluster.excluded[-1] == (["13", "14", "15"], "gpu11,gpu12")
    chain.will_finish()
    chain.start("13")
    assert chain.outcomes() == ["device_fault", "device_fault", "done"]
    summary = chain.run.get_training("s").read_summary()
    assert summary is not None
    first, second = summary.causes
    assert first == f"device_fault: RuntimeError: {ECC} on gpu11; excluded from now on: gpu11"
    assert second.endswith("on gpu12; excluded from now on: gpu11,gpu12")


def test_nodes_that_the_user_excludes_stay_excluded(
    chain: Chain, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_runs.spec(train={"epochs": 1}, cluster={"kind": "slurm", "slurm": {"exclude": "old[1-3]"}})
    chain.task = chain.task.model_copy(update={"spec": spec})
    chain.run.write_task(chain.task)
    monkeypatch.setenv("SLURMD_NODENAME", "gpu11")
    chain.script = dies_of(ECC)
    chain.start("11")
    assert cluster.excluded == [(["12", "13", "14", "15"], "old[1-3],gpu11")]
    submitted = make_submitit_parameters(chain.run, chain.newest())
    assert submitted["exclude"] == "old[1-3],gpu11", "in what is submitted later too"


def test_where_nodes_cannot_be_excluded_it_is_said(chain: Chain, cluster: Cluster) -> None:
    cluster.complaint = "Access/permission denied"
    chain.script = dies_of(ECC)
    chain.start("11")
    assert chain.newest().cause.endswith("could not be excluded: Access/permission denied")


def test_faults_without_progress_are_bounded_and_end_in_words_of_their_own(
    chain: Chain, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain.script = dies_of(ECC)
    for link in ("11", "12", "13"):
        assert cluster.cancelled == []
        monkeypatch.setenv("SLURMD_NODENAME", f"gpu{link}")
        chain.start(link)
    assert cluster.cancelled == ["11", "12", "14", "15"]
    chain.start("14")
    assert chain.outcomes() == ["device_fault"] * 3, "train.max_attempts"
    with pytest.raises(DeviceFault) as error:
        train.load_summary(chain.run, "s")
    assert error.value.exit_code == 10
    assert error.value.message.endswith("faulty nodes: gpu11, gpu12, gpu13")
    assert "(rank 0, gpu13)" in error.value.message
    assert "memory of a GPU" in error.value.hint


@pytest.mark.parametrize("words", ["No CUDA GPUs are available", "CUDA error: no CUDA-capable device is detected"])
def test_that_no_node_has_shown_a_gpu_is_the_users_to_mend_and_no_nodes_fault(
    chain: Chain, cluster: Cluster, words: str
) -> None:
    chain.script = dies_of(words)
    chain.start("11")
    assert chain.outcomes() == ["user"]
    (attempt,) = chain.run.get_training("s").read_attempts()
    assert f"{words} on {attempt.host}" in attempt.message
    assert "check that the job requests GPUs (on SLURM: cluster.slurm.gpus)" in attempt.message
    assert cluster.excluded == []
    assert cluster.cancelled == ["12", "13", "14", "15"]
    assert "exclude" not in make_submitit_parameters(chain.run, chain.newest())
    with pytest.raises(JobFailed, match=words):
        train.load_summary(chain.run, "s")


@pytest.mark.parametrize("earlier", [False, True], ids=["in this attempt", "in an earlier one"])
def test_a_node_without_gpu_is_faulty_where_others_have_some(
    chain: Chain, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, *, earlier: bool
) -> None:
    if earlier:
        chain.was_killed("10")
    chain.has_gpu_on_rank_0("train-s-1")
    monkeypatch.setenv("SLURMD_NODENAME", "gpu11")
    chain.script = dies_of(NO_GPU)
    chain.start("11")
    assert chain.outcomes()[-1] == "device_fault"
    assert cluster.excluded == [(["12", "13", "14", "15"], "gpu11")]


def test_gpus_under_another_cluster_section_say_nothing_of_this_one(chain: Chain, cluster: Cluster) -> None:
    chain.script = dies_of(ECC)
    chain.start("11")
    chain.has_gpu_on_rank_0("train-s-1")
    chain.asks_for(gpus="none")
    chain.script = dies_of(NO_GPU)
    chain.start("12")
    assert chain.outcomes() == ["device_fault", "user"]


def test_a_driver_that_fails_is_a_fault_also_where_no_node_has_shown_a_gpu(chain: Chain, cluster: Cluster) -> None:
    chain.script = dies_of(f"NoGpu: torch sees no GPU: Error 802: system not yet initialized. {NO_GPU}")
    chain.start("11")
    assert chain.outcomes() == ["device_fault"]
    assert cluster.excluded


def test_nodes_that_were_faulty_under_another_cluster_section_are_not_left_out(chain: Chain) -> None:
    chain.script = dies_of(ECC)
    chain.start("11")
    (attempt,) = chain.run.get_training("s").read_attempts()
    chain.asks_for(minutes=10, exclude="old1")
    assert make_submitit_parameters(chain.run, chain.newest())["exclude"] == f"old1,{attempt.host}"
    chain.asks_for(gpu_type="h100")
    assert "exclude" not in make_submitit_parameters(chain.run, chain.newest())


@pytest.mark.parametrize("words", ["CUDA error: an illegal memory access was encountered", "CUDA error: unspecified launch failure"])  # fmt: skip
def test_what_a_kernel_may_have_caused_is_tried_once_more_and_then_the_users(chain: Chain, words: str) -> None:
    chain.script = dies_of(words)
    chain.start("11")
    assert chain.outcomes() == ["device_error", "user"]
    last = chain.run.get_training("s").read_attempts()[-1]
    assert words in last.message
    assert "as in the previous attempt" in last.message
    chain.start("12")
    assert chain.outcomes() == ["device_error", "user"]


def test_what_a_device_did_once_is_nobodys_error(chain: Chain) -> None:
    mark = chain.run.path / "tried"
    chain.will_finish()
    tries = f"""
            import pathlib
            if not pathlib.Path({str(mark)!r}).exists():
                pathlib.Path({str(mark)!r}).touch()
                raise RuntimeError("CUDA error: unspecified launch failure")
    """
    chain.script = tries + chain.script
    chain.start("11")
    assert chain.outcomes() == ["device_error", "done"]


def test_a_rank_that_the_runtime_aborts_leaves_its_words_in_the_log(chain: Chain) -> None:
    chain.script = """
        import os, sys
        sys.stderr.write("Memory access fault by GPU node-4 (Agent handle: 0x55) on address 0x7f00. Reason: Unknown.\\n")
        sys.stderr.flush()
        os.abort()
    """
    chain.start("11")
    assert chain.outcomes() == ["device_error", "user"]
    assert "Memory access fault by GPU node-4" in chain.run.get_training("s").read_attempts()[0].message


def probed(chain: Chain, error: str) -> tuple[ProbeTask, Attempt, Failed]:
    """Start a probe whose ranks die of an error; return it, its only attempt and its only result."""
    spec = chain.task.spec
    probe = ProbeTask(id="probe-n001", job="probe-n001", spec=spec, workdir="/", nodes=1, local_batches=(8, 16))
    chain.run.write_task(probe)
    chain.task = chain.task.model_copy(update={"id": probe.id})
    chain.script = dies_of(error)
    chain.start("11")
    (attempt,) = chain.run.read_attempts(probe.id)
    (result,) = chain.run.read_results()
    assert isinstance(result, Failed)
    return probe, attempt, result


def test_a_probe_on_a_faulty_node_fails_and_is_submitted_elsewhere(chain: Chain) -> None:
    probe, attempt, result = probed(chain, ECC)
    assert (attempt.outcome, result.outcome) == ("device_fault", "device_fault")
    assert result.message.endswith(f"on {attempt.host}")
    assert make_submitit_parameters(chain.run, probe)["exclude"] == attempt.host


def test_a_probe_without_any_gpu_fails_once_and_no_node_is_left_out(chain: Chain) -> None:
    probe, attempt, result = probed(chain, NO_GPU)
    assert (attempt.outcome, result.outcome) == ("user", "user")
    assert "cluster.slurm.gpus" in result.message
    assert "exclude" not in make_submitit_parameters(chain.run, probe)


# --- a full disk


FULL = """
    raise OSError(28, "No space left on device", "{folder}/1.pt")
"""


def filled(chain: Chain, folder: Path, link: str) -> Attempt:
    """Return the first attempt, in a link of the chain, which ends of a full disk."""
    chain.script = FULL.format(folder=folder)
    chain.start(link)
    (last,) = chain.run.get_training("s").read_attempts()
    return last


def with_failure(attempt: Attempt, **values: object) -> Attempt:
    assert attempt.failure is not None
    return attempt.model_copy(update={"failure": attempt.failure.model_copy(update=values)})


def never_fits(chain: Chain, last: Attempt) -> None:
    """Have an attempt that ended of a full disk have wanted more than any disk has."""
    assert last.shortage is not None
    chain.run.write_attempt(with_failure(last, shortage=last.shortage.model_copy(update={"needed": 2**61})))


@pytest.mark.promise(
    "the file system",
    "the disk is full, or the quota is used up",
    "tula shows the folder and the missing space, and holds the waiting jobs. `tula train` releases them when there"
    " is space again",
)
def test_a_full_disk_holds_the_links_that_wait_and_room_lets_them_go(
    chain: Chain, cluster: Cluster, tmp_path: Path
) -> None:
    last = filled(chain, tmp_path, "12")
    assert last.outcome == "disk" and last.message.endswith("; jobs held: 13 to 15")
    assert (cluster.held, cluster.cancelled) == (["13", "14", "15"], [])
    never_fits(chain, last)
    with pytest.raises(DiskFull, match=r"there is still too little space: .* are missing") as error:
        release_held_jobs(chain.run, chain.task)
    assert error.value.exit_code == 13 and cluster.held
    chain.run.write_attempt(last)
    release_held_jobs(chain.run, chain.task)
    assert cluster.held == []
    chain.will_finish()
    chain.start("13")
    assert chain.outcomes() == ["disk", "done"]
    assert "now that there is free space" in chain.newest().cause


def test_a_link_that_is_released_too_early_holds_the_others_again(
    chain: Chain, cluster: Cluster, tmp_path: Path
) -> None:
    last = filled(chain, tmp_path, "11")
    never_fits(chain, last)
    cluster.held.clear()
    with pytest.raises(SystemExit) as ended:
        chain.start("12")
    assert ended.value.code == 13 and cluster.held == ["13", "14", "15"]
    assert chain.outcomes() == ["disk", "disk"]
    again = chain.run.get_training("s").read_attempts()[-1]
    assert again.shortage is not None and again.shortage.needed == 2**61


def test_where_nothing_tells_what_was_to_be_written_room_for_a_checkpoint_is_asked_for(chain: Chain) -> None:
    chain.script = "raise SystemExit(13)"  # a rank that could write nothing any more
    chain.start("11")
    (last,) = chain.run.get_training("s").read_attempts()
    assert last.outcome == "disk" and last.shortage is not None and last.shortage.needed is None
    release_held_jobs(chain.run, chain.task)  # nothing is known of its checkpoints, and the small files have room
    chain.save(96)
    huge = chain.run.get_training("s").get_checkpoint_path(96)
    os.truncate(huge, 2**42)  # a file with a hole, as large as no disk here
    with pytest.raises(DiskFull, match=r"4096\.?\d* GiB are needed, so .* are missing"):
        release_held_jobs(chain.run, chain.task)
    elsewhere = last.shortage.model_copy(update={"folder": "/dev/shm/data"})
    chain.run.write_attempt(with_failure(last, shortage=elsewhere))
    release_held_jobs(chain.run, chain.task)  # no checkpoint was to go there


def test_where_jobs_cannot_be_held_or_released_it_is_said(chain: Chain, cluster: Cluster, tmp_path: Path) -> None:
    cluster.complaint = "Access/permission denied"
    last = filled(chain, tmp_path, "11")
    assert last.message.endswith("; 12 to 15 could not be held: Access/permission denied")
    with pytest.raises(SchedulerError, match="Access/permission denied") as error:
        release_held_jobs(chain.run, chain.task)
    assert error.value.hint == "release the jobs by hand: scontrol release 12,13,14,15"


# --- a supervisor that fails, and the same end twice


class Broken(RuntimeError):
    """A defect of tula's own."""


@pytest.mark.promise(
    "a process",
    "the supervisor itself fails",
    "the log has its traceback, and the next job of the chain resumes. If that supervisor also fails, right after"
    " its start, the chain ends",
)
def test_a_supervisor_that_fails_is_named_with_its_traceback_and_twice_at_once_ends_the_chain(
    chain: Chain, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> LeaderCommand:
        raise Broken("no such key")

    monkeypatch.setattr(WorkerProgram, "make_leader_command", broken)
    with pytest.raises(Broken):
        chain.start("11")
    (first,) = chain.run.get_training("s").read_attempts()
    assert (first.outcome, first.host) == ("supervisor", get_node_name())
    assert first.message.startswith("tula's supervisor failed: Broken: no such key (test_chain.py, line ")
    assert "Broken: no such key" in chain.run.get_log_path(first.task, first.number).read_text()
    with pytest.raises(Broken):
        chain.start("12")
    assert "twice in the same way within" in chain.run.get_training("s").read_attempts()[-1].message
    chain.start("13")
    assert chain.outcomes() == ["supervisor", "supervisor"]
    assert set(cluster.cancelled) == {"11", "12", "14", "15"}, "no job of it repeats that"


def test_a_supervisor_that_failed_once_is_followed_by_the_next_link(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = WorkerProgram.make_leader_command

    def broken(*_: object, **__: object) -> LeaderCommand:
        monkeypatch.setattr(WorkerProgram, "make_leader_command", whole)
        raise Broken("once")

    monkeypatch.setattr(WorkerProgram, "make_leader_command", broken)
    with pytest.raises(Broken):
        chain.start("11")
    chain.will_finish()
    chain.start("12")
    assert chain.outcomes() == ["supervisor", "done"]


@pytest.mark.promise(
    "the file system",
    "the file system times out or loses a file (ETIMEDOUT, ESTALE, EIO)",
    "tula shows the outcome `storage` (exit code 14) and the host, and new processes resume",
)
def test_a_file_system_that_fails_under_a_supervisor_is_named_so(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object, **__: object) -> LeaderCommand:
        raise OSError(116, "Stale file handle", str(chain.run.path / "leader"))

    monkeypatch.setattr(WorkerProgram, "make_leader_command", gone)
    with pytest.raises(SystemExit) as ended:
        chain.start("11")
    assert ended.value.code == 14 and chain.outcomes() == ["storage"]


def test_what_a_follower_failed_of_is_the_end_that_its_leader_tells(chain: Chain, cluster: Cluster) -> None:
    chain.was_killed("11")
    (lost,) = chain.run.get_training("s").read_attempts()
    error = Broken("at the other node")
    failure = convert_error_to_failure(error, chain.run, chain.task)
    write_follower_failure(chain.run, chain.task, lost, 3, failure, error)
    chain.will_finish()
    chain.start("12")
    first, _ = chain.run.get_training("s").read_attempts()
    assert first.outcome == "supervisor" and "at the other node" in first.message


def after_two(chain: Chain, one: Attempt, two: Attempt | None, progress: int) -> str:
    """Return what the end of the second of two attempts is said to lead to, if no third follows; else empty."""
    last = one if two is None else two
    known = History(last, [] if two is None else [one], progress=progress, reached=last.reached)
    decision = decide_next_action(chain.task, last.failure, known)
    return decision.consequence if isinstance(decision, Stop) else ""


@pytest.mark.parametrize(
    ("outcome", "signal_name", "seconds", "ends"),
    [
        ("unknown", "", 3.0, True),
        ("storage", "", 3.0, False),
        ("supervisor", "", 3.0, True),
        ("signal", "SIGSEGV", 3.0, True),
        ("signal", "SIGKILL", 3.0, False),
        ("signal", "", 3.0, False),
        ("unknown", "", 40.0, False),
        ("peer", "", 3.0, False),
        ("preempted", "", 3.0, False),
    ],
)
@pytest.mark.promise(
    "a process",
    "the same failure occurs twice within half a minute of a start",
    "the chain ends; tula does not start it a third time",
)
def test_the_same_end_at_once_twice_is_final(
    chain: Chain, outcome: OutcomeClass, signal_name: str, seconds: float, ends: bool
) -> None:
    failure = Failure(outcome=outcome, message="so it was", signal=signal_name)
    attempt = Attempt(task="t", number=1, started_at=0.0, ended_at=seconds, failure=failure, samples=96)
    two = attempt.model_copy(update={"number": 2, "started_at": 100.0, "ended_at": 100.0 + seconds})
    assert ("twice in the same way within 3 s" in after_two(chain, attempt, two, 96)) == ends
    assert not after_two(chain, attempt, two, 128), "something was saved"
    assert not after_two(chain, with_failure(attempt, outcome="port"), two, 96)
    assert not after_two(chain, two, None, 96)


# --- every kind of death


ENDED_FROM_OUTSIDE = ("cancelled", "time_limit", "preempted", "node_failure")
RAISED: dict[OutcomeClass, tuple[str, ...]] = {
    "device_oom": ("import resource; resource.setrlimit(resource.RLIMIT_AS, (2**28, 2**28)); bytearray(2**30)",),
    "host_oom": ("raise MemoryError('no room for an array')",),
    "user": ("import nothing_of_that_name", "[1, 2][3]"),
    "diverged": (
        'from tula_cli.errors import Diverged; raise Diverged(f\'the loss is {float("inf") - float("inf")}\')',
    ),
    "device_fault": ("raise RuntimeError('CUDA error: uncorrectable ECC error encountered')",),
    "device_error": ("raise RuntimeError('CUDA error: an illegal memory access was encountered')",),
    "peer": (f"raise RuntimeError({GLOO!r})",),
    "signal": ("import os; os.kill(os.getpid(), 9)", "import os; os.kill(os.getpid(), 15)", "raise SystemExit(137)"),
    "host_limit": (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); kept = [open('/dev/null') for _ in range(99)]",
        "import errno, os; raise OSError(errno.ENFILE, os.strerror(errno.ENFILE), '/scratch/1.jpg')",
    ),
    "port": (
        "import socket; a, b = socket.socket(), socket.socket(); a.bind(('127.0.0.1', 0)); b.bind(a.getsockname())",
    ),
    "disk": (
        "open('/dev/full', 'w', buffering=1).write('x\\n')",
        "import errno, os; raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), '/dev/shm/x/1.pt')",
    ),
    "storage": tuple(
        f"import errno, os; raise OSError(errno.{name}, os.strerror(errno.{name}), '/scratch/1.pt')"
        for name in ("ESTALE", "ETIMEDOUT", "EIO", "EREMOTEIO", "ESHUTDOWN", "EROFS")
    ),
    "unknown": ("raise SystemExit(3)",),
}
"""Code of a rank that ends it, by the class of its ending."""
DEATHS = [
    *((outcome, script) for outcome, scripts in RAISED.items() for script in scripts),
    *((outcome, "") for outcome in (*ENDED_FROM_OUTSIDE, "supervisor", "stage_end", "hung")),
]


def table_of_endings() -> dict[str, list[str]]:
    """Return the rows of the table of endings in the documents, by class."""
    page = (Path(__file__).parents[2] / "docs/reference/commands.md").read_text().partition("## How a job ends")[2]
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines() if line.startswith("| `")
    ]
    return {row[0].strip("` "): row for row in rows}


def test_each_class_of_the_documents_is_provoked() -> None:
    assert {outcome for outcome, _ in DEATHS} == set(table_of_endings()) == set(get_args(OutcomeClass))


@pytest.mark.promise(
    "a process",
    "an attempt fails",
    "tula shows the outcome, the node, the exit code and what to do, as in the [table](commands.md#how-a-job-ends)",
)
@pytest.mark.parametrize(("outcome", "script"), DEATHS)
def test_every_kind_of_death_has_the_class_the_exit_code_and_the_host_of_the_documents(
    outcome: OutcomeClass, script: str, chain: Chain, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain.script = script
    if outcome == "host_oom":  # on CPUs the node's memory is the device's
        monkeypatch.setattr(failures, "find_device_type", lambda *_: "cuda")
    if outcome in ENDED_FROM_OUTSIDE:
        chain.script = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
        cluster.endings["11"] = outcome
    if outcome == "hung":  # as the watch beside a rank tells it, which has tests of its own
        failure = Failure(
            task=chain.task.id, attempt=1, rank=0, host=get_node_name(), pid=7, outcome="hung", message="no step for 9 min",
            detail="", failed_at=1.0,
        )  # fmt: skip
        chain.will_write(chain.run.path / f"failures/{chain.task.id}.001.0000.json", failure.model_dump_json())
        chain.script = f"{textwrap.dedent(chain.script)}raise SystemExit(1)"
    if outcome == "stage_end":
        chain.grows()
        chain.will_leave()
    if outcome == "supervisor":
        monkeypatch.setattr(WorkerProgram, "make_leader_command", lambda *_, **__: {}["no such key"])
    with contextlib.suppress(SystemExit, KeyError):
        chain.start("11")
    first = chain.run.get_training("s").read_attempts()[0]
    assert first.outcome == outcome, first.message
    assert first.host == get_node_name() and first.hosts == "node11" and first.message
    error = make_training_error(chain.task, [first], saved_samples=0)
    row = table_of_endings()[outcome]
    assert str(error.exit_code) == row[2] and error.hint
    follows = make_runs.execute_reaction(chain.run, chain.task, first.failure)
    assert row[3] == "-" or follows is None or first.host in follows.cause


# --- a failure that looks like the user's, after progress


def after_progress(chain: Chain, samples: int, end: str) -> str:
    """Return a rank that has trained some samples, and saved none, when it ends."""
    row = {
        "kind": "step",
        "time": 4e9,
        "step": 1,
        "samples": samples,
        "epoch": 0.5,
        "batch": 64,
        "loss": 1.0,
        "count": 1,
        "step_time": 0.1,
        "data_wait": 0.0,
    }
    path = chain.run.get_training("s").metrics_path
    return f"""
        import json, pathlib, sys
        path = pathlib.Path({str(path)!r})
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps({row!r}) + "\\n")
        {end}
    """


@pytest.mark.promise(
    "a process",
    "a training fails with an error of the script after its first step",
    "the next job of the chain tries once more. The later jobs are cancelled only if the error occurs again",
)
def test_a_failure_after_progress_is_tried_once_more_in_the_next_job(chain: Chain, cluster: Cluster) -> None:
    chain.script = after_progress(chain, 64, "{}['label']")
    chain.start("11")
    assert chain.outcomes() == ["user"] and not cluster.cancelled
    assert "tula starts it again" in chain.newest().cause
    chain.start("12")
    assert chain.outcomes() == ["user", "user"]
    assert set(cluster.cancelled) == {"11", "13", "14", "15"}


def test_a_failure_that_does_not_come_again_costs_nothing(chain: Chain, cluster: Cluster) -> None:
    chain.script = after_progress(chain, 64, "{}['label']")
    chain.start("11")
    chain.will_finish()
    chain.start("12")
    assert chain.outcomes() == ["user", "done"]


def test_a_failure_before_the_first_step_is_the_users_at_once(chain: Chain, cluster: Cluster) -> None:
    chain.script = "{}['label']"
    chain.start("11")
    assert chain.outcomes() == ["user"] and set(cluster.cancelled) == {"12", "13", "14", "15"}


def test_without_a_next_job_the_same_one_tries_once_more(chain: Chain, cluster: Cluster) -> None:
    chain.submit(("11",))
    chain.script = after_progress(chain, 64, "{}['label']")
    chain.start("11")
    assert chain.outcomes() == ["user", "user"]


def test_the_same_end_at_the_same_step_from_the_same_checkpoint_is_final(chain: Chain, cluster: Cluster) -> None:
    failure = Failure(outcome="unknown", message="exit code 3, pid 71")
    item = Attempt(task="t", number=1, started_at=0.0, ended_at=900.0, failure=failure, samples=96, reached=160)
    two = with_failure(item.model_copy(update={"number": 2}), message="exit code 3, pid 88")
    assert "after 160 samples" in after_two(chain, item, two, 96)
    assert not after_two(chain, item, two.model_copy(update={"reached": 192}), 96)
    assert not after_two(chain, item, with_failure(two, message="another end"), 96)
    storage = [with_failure(attempt, outcome="storage") for attempt in (item, two)]
    assert not after_two(chain, *storage, 96), "its cause lies outside the process"


def test_a_loss_that_is_not_finite_ends_a_script_at_once(chain: Chain, cluster: Cluster) -> None:
    chain.script = after_progress(chain, 64, "print('Loss is nan, stopping training'); sys.exit(1)")
    chain.start("11")
    assert chain.outcomes() == ["diverged"]
    error = make_training_error(chain.task, chain.run.get_training("s").read_attempts(), saved_samples=0)
    assert error.exit_code == 9 and "Loss is nan, stopping training" in error.message


@pytest.mark.promise(
    "the file system",
    "the file system fails for a moment (EIO, ESHUTDOWN, ENOTCONN, EROFS)",
    "new processes start after a pause, which grows with each failure",
)
def test_a_storage_failure_waits_before_new_processes(
    chain: Chain, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_supervise, "FIRST_PAUSE", 0.3)
    chain.script = "import errno, os; raise OSError(errno.EIO, os.strerror(errno.EIO))"
    chain.start("11")
    first, second, third = chain.run.get_training("s").read_attempts()
    assert {first.outcome, second.outcome, third.outcome} == {"storage"} and not cluster.cancelled
    assert second.started_at - (first.ended_at or 0) >= 0.3 and third.started_at - (second.ended_at or 0) >= 1.2


# --- a file system that fails for longer

EIO = "import errno, os; raise OSError(errno.EIO, os.strerror(errno.EIO))"


@pytest.mark.promise(
    "the file system",
    "the file system fails in every attempt of a job",
    "the next job of the chain starts 10 minutes later, and the following ones 20 and 30 minutes later. These"
    " attempts do not count towards `train.max_attempts`",
)
def test_a_storage_outage_that_outlasts_the_pauses_delays_the_next_jobs(chain: Chain, cluster: Cluster) -> None:
    chain.script = EIO
    for link in LINKS[:4]:
        chain.start(link)
    assert chain.outcomes() == ["storage"] * 12 and not cluster.cancelled
    assert cluster.delayed == [("12", 10), ("13", 20), ("14", 30), ("15", 30)]
    last = chain.run.get_training("s").read_attempts()[2]
    assert last.message.endswith("Input/output error; job 12 starts in 10 min at the earliest")
    chain.will_finish()
    chain.start("15")
    assert chain.outcomes()[-1] == "done"


def test_the_last_job_of_a_chain_ends_with_the_storage_failure(chain: Chain, cluster: Cluster) -> None:
    chain.script = EIO
    chain.start("15")
    assert chain.outcomes() == ["storage"] * 3 and not cluster.delayed
    error = make_training_error(chain.task, chain.run.get_training("s").read_attempts(), saved_samples=0)
    assert error.exit_code == 14


def test_a_newer_checkpoint_shortens_the_delay_again(chain: Chain, cluster: Cluster) -> None:
    chain.script = EIO
    chain.start("11")
    chain.start("12")
    chain.save(96)
    chain.start("13")
    assert cluster.delayed == [("12", 10), ("13", 20), ("14", 10)]


def test_where_the_next_job_cannot_be_delayed_it_is_said(chain: Chain, cluster: Cluster) -> None:
    cluster.complaint = "Access/permission denied"
    chain.script = EIO
    chain.start("11")
    assert (
        "job 12 could not be delayed: Access/permission denied"
        in chain.run.get_training("s").read_attempts()[-1].message
    )
    assert not cluster.cancelled


def test_storage_failures_leave_the_attempts_of_other_failures_alone(chain: Chain, cluster: Cluster) -> None:
    count = chain.run.path / "count"
    chain.script = f"""
        import os, pathlib
        count = pathlib.Path({str(count)!r})
        number = int(count.read_text()) if count.exists() else 0
        count.write_text(str(number + 1))
        if number % 2:
            os.kill(os.getpid(), 9)
        raise OSError(5, "Input/output error")
    """
    chain.start("11")
    assert chain.outcomes() == ["storage", "signal"] * 2 + ["storage"], "three of the storage leave the job to the next"
    assert cluster.delayed == [("12", 10)] and not cluster.cancelled
    chain.start("12")
    assert chain.outcomes()[5:] == ["signal"] and cluster.cancelled, "three lost processes end the training"


def test_a_time_limit_before_the_first_checkpoint_is_no_verdict_where_storage_has_failed(
    chain: Chain, cluster: Cluster
) -> None:
    chain.was_killed("11")
    (lost,) = chain.run.get_training("s").read_attempts()
    chain.run.write_attempt(lost.model_copy(update={"failure": Failure(outcome="storage"), "ended_at": 12.0}))
    chain.was_killed("11")
    cluster.endings = {"11": "time_limit"}
    chain.will_finish()
    chain.start("12")
    assert chain.outcomes() == ["storage", "time_limit", "done"]


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EIO])
def test_a_supervisor_that_finds_its_file_system_gone_is_no_defect_of_tula(
    chain: Chain, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def gone(*_: object, **__: object) -> LeaderCommand:
        raise OSError(number, os.strerror(number), str(chain.run.path / "leader"))

    monkeypatch.setattr(WorkerProgram, "make_leader_command", gone)
    with pytest.raises(SystemExit) as ended:
        chain.start("11")
    assert ended.value.code == 14 and chain.outcomes() == ["storage"]
    assert cluster.delayed == [("12", 10)], "it was over within half a minute, and so would be the next one"


def test_supervisors_that_could_write_nothing_do_not_end_the_chain(chain: Chain, cluster: Cluster) -> None:
    for link in LINKS[:4]:  # more than train.max_attempts; SLURM knows their exit code
        chain.was_killed(link)
        cluster.endings[link] = "storage"
    chain.will_finish()
    chain.start("15")
    assert chain.outcomes() == ["storage"] * 4 + ["done"]
    assert (
        chain.run.get_training("s").read_attempts()[0].message == "a file-system error stopped the supervisor of job 11"
    )
