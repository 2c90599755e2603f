"""Rules for every scheduler: this machine, SLURM, and one that a user wrote by the docs."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import make_runs as make
import pytest
import tiny_queue
from fake_slurm import FakeSlurm, format_time

from tula_cli.cluster.batch_launcher import submit_script
from tula_cli.cluster.launcher import make_launcher
from tula_cli.cluster.scheduler import (
    JobRequest,
    LocalScheduler,
    Scheduler,
    SupportsNodeExclusion,
    exclude_nodes,
    load_scheduler,
)
from tula_cli.cluster.slurm import command as slurm_command
from tula_cli.cluster.slurm import queue as slurm_queue
from tula_cli.cluster.slurm.scheduler import SlurmScheduler
from tula_cli.errors import SchedulerError, SpecError
from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import Rung, TrainTask
from tula_cli.spec.backend import BACKENDS

PATIENCE = 60.0  # seconds; a loaded machine starts processes slowly
OWN = "tiny_queue:TinyQueue"


@dataclass
class Site:
    """A scheduler with what a test needs beside it; the fake SLURM runs nothing, and is told what becomes of its jobs."""

    scheduler: Scheduler
    folder: Path
    fake: FakeSlurm | None = None
    queues: bool = True  # whether jobs wait for anything
    limits: bool = True  # whether there are time limits
    patience: float = PATIENCE

    def job(self, program: str = "import time; time.sleep(600)", *, name: str = "job", **asked: Any) -> JobRequest:
        command = f"{sys.executable} -I -S -c {json.dumps(program)}"
        return JobRequest(name, command, folder=self.folder, logs=self.folder, **{"minutes": 1, **asked})

    def submit(self, job: JobRequest) -> str:
        path = self.folder / f"{job.name}.sh"
        path.write_text(self.scheduler.render_script(job))
        return self.scheduler.submit(path, job)

    def state(self, id_: str) -> str:
        """Return how a job stands; one that nobody knows any more is over."""
        result = self.scheduler.query_states([id_]).get(id_)
        return result.state if result is not None else "ended"

    def until(self, id_: str, state: str, *, by: str = "", reason: str = "None") -> None:
        """Wait until a job stands so; the fake is told `by`."""
        if self.fake is not None:
            self.fake.set(id_, by or {"running": "RUNNING", "ended": "COMPLETED"}[state], reason)
        self.wait(lambda: self.state(id_) == state)

    def wait(self, true: Callable[[], bool]) -> None:
        ends = time.monotonic() + self.patience
        while not true():
            assert time.monotonic() < ends, "waited in vain"
            time.sleep(0.05)


def this_machine(folder: Path) -> Iterator[Site]:
    yield Site(LocalScheduler(), folder, queues=False, limits=False)


def own_queue(folder: Path) -> Iterator[Site]:
    home = folder / "queue"
    home.mkdir()
    (home / "settings.json").write_text(json.dumps({"nodes": 2, "minute": 3.0, "grace": 1.0, "jobs": 6}))
    scheduler = load_scheduler(OWN, {"home": str(home)})
    assert isinstance(scheduler, tiny_queue.TinyQueue)
    yield Site(scheduler, folder)
    jobs = scheduler._jobs() or {}
    scheduler.cancel([id_ for id_, job in jobs.items() if job["state"] != "over"])


def fake_slurm(folder: Path) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patch:
        fake = FakeSlurm(folder / "slurm")
        fake.use(patch)
        for name in [name for name in os.environ if name.startswith(("SLURM_", "SUBMITIT_"))]:
            patch.delenv(name)
        patch.setattr(slurm_queue, "_recent_states", {})
        patch.setattr(slurm_command, "COMMAND_TIMEOUT", 10.0)
        yield Site(SlurmScheduler(), folder, fake=fake)


@pytest.fixture(scope="module")
def slurm_cluster() -> Iterator[dict[str, str]]:
    """A real cluster of two nodes; the environment in which its commands are called."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "slurm"))
    from cluster import SlurmCluster, describe_why_no_cluster

    if reason := describe_why_no_cluster():
        (pytest.fail if os.environ.get("TULA_REQUIRE_SLURM") == "1" else pytest.skip)(
            f"no SLURM cluster here: {reason}"
        )
    with SlurmCluster(2, prefix=f"t{os.getpid()}p") as cluster:
        yield dict(cluster.env)


def real_slurm(folder: Path, environ: dict[str, str]) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        patch.setattr(slurm_queue, "ACCOUNTING_PAUSE", 0.0)
        yield Site(SlurmScheduler(), folder, patience=180.0)


QUEUES = {"own": own_queue, "fake SLURM": fake_slurm}
SITES = {"this machine": this_machine, **QUEUES}
REAL = pytest.param("SLURM", marks=[pytest.mark.slurm, pytest.mark.proof])


def made(request: pytest.FixtureRequest, folder: Path) -> Iterator[Site]:
    if request.param == "SLURM":
        return real_slurm(folder, request.getfixturevalue("slurm_cluster"))
    return SITES[request.param](folder)


@pytest.fixture(params=[*SITES, REAL])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    yield from made(request, tmp_path)


@pytest.fixture(params=[*QUEUES, REAL])
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """A scheduler whose jobs wait."""
    yield from made(request, tmp_path)


# --- where jobs are submitted


def test_a_script_is_text_with_the_command_in_it_and_touches_nothing(site: Site) -> None:
    text = site.scheduler.render_script(site.job("print('hello there')", setup=("module load x",)))
    assert text.startswith("#!/bin/") and "hello there" in text and "module load x" in text
    assert not list(site.folder.glob("*.sh")) and site.scheduler.describe_why_absent() == ""


def test_a_job_waits_or_runs_and_is_over_when_it_has_ended(site: Site) -> None:
    id_ = site.submit(site.job("import pathlib; pathlib.Path('done').touch()"))
    assert id_ and not set(id_) & set(" \n/_")
    if site.fake is None:
        site.wait(lambda: site.state(id_) == "ended")
        site.wait(lambda: (site.folder / "done").exists())
    else:
        assert site.state(id_) == "pending"
        site.until(id_, "running")
        site.until(id_, "ended")
    assert site.scheduler.find_end_reason(id_) is None, "it ended by itself"
    assert site.scheduler.cancel([id_]) == "", "what is over is no complaint"


def test_all_jobs_are_asked_for_at_once_and_one_that_nobody_knows_is_not_alive(site: Site) -> None:
    ids = [site.submit(site.job(name=f"job{number}")) for number in range(2)]
    for id_ in ids:
        site.until(id_, "running")
    answer = site.scheduler.query_states([*ids, "987654"])
    assert {answer[id_].state for id_ in ids} == {"running"}
    assert "987654" not in answer or answer["987654"].state == "ended"
    assert site.scheduler.query_states([]) == {} and site.scheduler.cancel([]) == ""
    site.scheduler.cancel(ids)


def test_a_cancelled_job_is_over_and_the_one_beside_it_lives(site: Site) -> None:
    gone, stays = (site.submit(site.job(name=name)) for name in ("gone", "stays"))
    for id_ in (gone, stays):
        site.until(id_, "running")
    assert site.scheduler.cancel([gone]) == ""
    site.wait(lambda: site.state(gone) == "ended")
    assert site.state(stays) == "running"
    if site.queues:
        assert site.scheduler.find_end_reason(gone) == "cancelled" and site.scheduler.find_end_reason(stays) is None
    site.scheduler.cancel([stays])


def test_a_job_of_more_than_there_is_is_refused_in_a_sentence_or_told_to_be_hopeless(queue: Site) -> None:
    if queue.fake is not None:
        queue.fake.fault(sbatch=["refuse:Batch job submission failed: Node count specification invalid"])
    try:
        id_ = queue.submit(queue.job(nodes=64))
    except SchedulerError as error:
        assert error.message and error.hint and "\n" not in error.message
        return
    queue.wait(lambda: (state := queue.scheduler.query_states([id_]).get(id_)) is not None and state.hopeless)
    queue.scheduler.cancel([id_])


def test_what_a_scheduler_cannot_do_it_says(tmp_path: Path) -> None:
    here = next(this_machine(tmp_path))
    id_ = here.submit(here.job())
    assert here.scheduler.hold([id_]) and here.scheduler.release([id_]), "no job waits here"
    assert exclude_nodes(here.scheduler, [id_], "node1") == "this machine cannot exclude nodes from waiting jobs"
    assert isinstance(SlurmScheduler(), SupportsNodeExclusion) and not isinstance(here.scheduler, SupportsNodeExclusion)
    with pytest.raises(SchedulerError, match="cannot wait for each other"):
        here.submit(here.job(name="later", after=(id_,)))
    assert here.scheduler.list_queued_jobs(["job"]) == [] and here.scheduler.list_partitions() == []
    here.scheduler.cancel([id_])


# --- jobs that wait


def test_a_job_is_found_again_by_its_name_while_it_is_not_over(queue: Site) -> None:
    id_ = queue.submit(queue.job(name="tula-toy-train"))
    queue.submit(queue.job(name="tula-toy-train.2", after=(id_,)))
    result = queue.scheduler.list_queued_jobs(["tula-toy-train", "tula-toy-probe"])
    assert [(job.id, job.name) for job in result] == [(id_, "tula-toy-train")]
    queue.scheduler.cancel([job.id for job in queue.scheduler.list_queued_jobs(["tula-toy-train.2"])])
    queue.scheduler.cancel([id_])
    queue.wait(
        lambda: (
            queue.state(id_) == "ended" and not queue.scheduler.list_queued_jobs(["tula-toy-train", "tula-toy-train.2"])
        )
    )


@pytest.mark.parametrize("how", ["well", "cancelled"])
def test_a_job_starts_when_those_before_it_are_over_however_they_ended(queue: Site, how: str) -> None:
    program = f"import time; time.sleep({2 if how == 'well' else 600})"
    first = queue.submit(queue.job(program, name="first", minutes=10))
    second = queue.submit(queue.job(name="second", after=(first,)))
    queue.until(first, "running")
    if queue.fake is not None:
        assert queue.fake.jobs()[1]["dependency"] == f"afterany:{first}"
        queue.fake.set(second, "PENDING", "Dependency")
    queue.wait(lambda: queue.scheduler.query_states([second])[second].reason == "Dependency")
    if how == "cancelled":
        queue.scheduler.cancel([first])
    elif queue.fake is not None:
        queue.fake.set(first, "COMPLETED")
    queue.wait(lambda: queue.state(first) == "ended")
    queue.until(second, "running")
    queue.scheduler.cancel([second])


def test_a_held_job_waits_until_it_is_released(queue: Site) -> None:
    first = queue.submit(queue.job(name="first", minutes=10))
    id_ = queue.submit(queue.job(name="second", after=(first,)))
    queue.until(first, "running")
    assert queue.scheduler.hold([id_]) == ""
    queue.wait(lambda: queue.scheduler.query_states([id_])[id_].on_hold)
    assert queue.scheduler.query_states([id_])[id_].hopeless, "waiting does not bring it"
    assert queue.scheduler.release([id_]) == ""
    queue.wait(lambda: not queue.scheduler.query_states([id_])[id_].on_hold)
    queue.scheduler.cancel([id_, first])


def test_a_job_has_an_end_and_is_ended_there(queue: Site) -> None:
    id_, began = queue.submit(queue.job()), time.time()
    ends = time.time() + 60
    queue.wait(lambda: id_ in queue.scheduler.query_states([id_]))
    if queue.fake is not None:
        queue.fake.set(id_, "RUNNING", ends=format_time(ends))
    queue.until(id_, "running") if queue.fake is None else None
    answer = queue.scheduler.find_end_time(id_, {})
    assert answer is not None and began < answer < began + 100
    if queue.fake is not None:
        queue.fake.set(id_, "TIMEOUT")
    elif isinstance(
        queue.scheduler, SlurmScheduler
    ):  # which lets a minute be two: tests/slurm/test_recovery.py waits for it
        queue.scheduler.cancel([id_])
        return
    queue.wait(lambda: queue.state(id_) == "ended")
    queue.wait(lambda: queue.scheduler.find_end_reason(id_) == "time_limit")


def test_partitions_tell_what_a_job_can_have(queue: Site) -> None:
    if queue.fake is not None:
        queue.fake.fault(
            sinfo="main*|up|1:00:00|infinite|2|idle|4|8000|(null)\nold|down|1:00:00|infinite|2|idle|4|8000|(null)"
        )
    (only,) = [partition for partition in queue.scheduler.list_partitions() if partition.default]
    assert only.name and only.usable == 2 and (only.minutes is None or only.minutes > 0)


# --- inside a job


def test_each_task_knows_its_place_and_a_process_outside_knows_none(queue: Site) -> None:
    program = "import json, os, uuid; open(f'task-{uuid.uuid4().hex}.json', 'w').write(json.dumps(dict(os.environ)))"
    id_ = queue.submit(queue.job(program, nodes=2, tasks_per_node=2))
    if queue.fake is None:
        queue.wait(lambda: len(list(queue.folder.glob("task-*.json"))) == 4 and queue.state(id_) == "ended")
        tasks = [json.loads(path.read_text()) for path in queue.folder.glob("task-*.json")]
    else:  # what srun of SLURM 22.05 gives
        same = {"SLURM_JOB_ID": id_, "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_STEP_ID": "0"}  # fmt: skip
        value = [
            {"SLURM_PROCID": str(at), "SLURM_LOCALID": str(at % 2), "SLURM_NODEID": str(at // 2)} for at in range(4)
        ]
        tasks = [same | item for item in value]
    places = sorted(
        (queue.scheduler.find_position(task) for task in tasks), key=lambda place: place.index if place else -1
    )
    assert [place and (place.index, place.local_index) for place in places] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert {place and (place.job_id, place.count, place.nodes, place.restarts) for place in places} == {(id_, 4, 2, 0)}
    assert all(place and place.hosts for place in places)
    assert queue.scheduler.find_position({"PATH": "/bin"}) is None


def test_a_requeued_job_tells_of_each_of_its_starts(tmp_path: Path) -> None:
    """By the outsider's queue, whose requeue is its own; tests/cluster/slurm has SLURM's."""
    site = next(value := own_queue(tmp_path))
    id_ = site.submit(site.job("import os; open('starts', 'a').write(os.environ['TQ_STARTS']); import time; time.sleep(60)", minutes=10))  # fmt: skip
    site.wait(lambda: (site.folder / "starts").exists() and (site.folder / "starts").read_text() == "1")
    assert isinstance(site.scheduler, tiny_queue.TinyQueue) and site.scheduler._complaint("requeue", [id_]) == ""
    site.wait(lambda: (site.folder / "starts").read_text() == "12")
    assert site.scheduler.find_end_reason(id_, restart=0) == "preempted" and site.scheduler.find_end_reason(id_) is None
    next(value, None)


# --- one of the user's own


def spec(tmp_path: Path, **cluster: Any) -> Any:
    settings = {"options": {"home": str(tmp_path / "queue")}, "minutes": 30, **cluster}
    return make.spec(
        cluster={"kind": OWN, "device": "cpu", "scheduler": settings}, train={"epochs": 4, "max_attempts": 3}
    )


def test_a_training_on_it_is_a_chain_that_is_found_again_and_cancelled(tmp_path: Path) -> None:
    site = next(value := own_queue(tmp_path))
    (tmp_path / "queue" / "settings.json").write_text('{"nodes": 0}')  # so that nothing of it starts
    run = RunDir.create(tmp_path / "tula-runs", spec(tmp_path))
    task = TrainTask(
        id="train-s-1", job="train-s", spec=run.read_spec(), workdir=str(tmp_path), nodes=1, signature="s", attempt=1,
        ladder=(Rung(batch=64, prediction=make.prediction(1, 64, hours=1.0)),), workers=0,
    )  # fmt: skip
    run.write_task(task)
    launcher = make_launcher(run.read_spec())
    with pytest.raises(SchedulerError, match="rejected: 1 nodes, and the queue has 0"):
        launcher.submit(run, task)
    (tmp_path / "queue" / "settings.json").write_text('{"nodes": 1, "jobs": 4}')
    blocker = site.submit(site.job(minutes=10))
    site.until(blocker, "running")
    job = launcher.submit(run, task)
    assert (job.scheduler, len(job.links), job.scheduler_id) == (OWN, 3, job.links[0]), (
        "the queue takes no more of them"
    )
    run.write_job(job)
    assert launcher.submit(run, task) == job, "what waits is taken as it is"
    state = launcher.query_states(run.read_snapshot(), [job])[job.id]
    assert (state.state, state.reason) == ("pending", "all nodes are taken")
    script = launcher.render_script(run, task)
    assert f"-m tula_cli.cluster.job_main {OWN}" in script and "train-s-1" in script
    launcher.cancel(run, job)
    assert {site.state(id_) for id_ in job.links} == {"ended"} and site.state(blocker) == "running"
    assert launcher.query_states(run.read_snapshot(), [job])[job.id].state == "ended"
    next(value, None)


def test_names_are_those_of_the_table_or_import_strings() -> None:
    assert [type(load_scheduler(kind)).__name__ for kind in BACKENDS] == ["LocalScheduler", "SlurmScheduler"]
    assert make.spec(cluster={"kind": "slurm"}).cluster.kind == "slurm"
    with pytest.raises(SpecError) as error:
        make.spec(cluster={"kind": "slrum"})
    assert "unknown scheduler 'slrum'; did you mean slurm?" in str(error.value.problems[0])
    with pytest.raises(SpecError) as error:
        make.spec(cluster={"kind": OWN, "slurm": {}})
    assert "cluster.slurm: has no effect with cluster.kind: tiny_queue:TinyQueue" in str(error.value.problems[0])
    for settings, problem in (
        ({"options": {"home": "x"}}, "cluster.options: has no effect with cluster.kind: local"),
        ({"minutes": 3, "setup": []}, "minutes, setup have no effect with cluster.kind: local"),
        ({"kind": OWN, "setup": "lines.sh"}, "the path of a file is only valid with cluster.kind: slurm"),
    ):
        with pytest.raises(SpecError) as error:
            make.spec(cluster={"kind": "local", **settings})
        assert problem in str(error.value.problems[0])


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("tiny_queue:TinyQeue", {}, "did you mean TinyQueue"),
        ("no_such_module:Queue", {}, "there is no module 'no_such_module'"),
        (OWN, {"hom": "x"}, "unexpected keyword argument 'hom'"),
        (OWN, {}, "missing 1 required positional argument: 'home'"),
        ("collections:OrderedDict", {}, "has no cancel, describe_why_absent, find_end_reason"),
        (":TinyQueue", {}, "does not start with the full name"),
        (".queue:TinyQueue", {}, "does not start with the full name"),
    ],
)
def test_what_is_no_scheduler_is_refused_with_what_it_lacks(kind: str, options: dict[str, str], words: str) -> None:
    with pytest.raises(SpecError) as error:
        load_scheduler(kind, options)
    assert words in f"{error.value.message}; {error.value.hint}"


def test_an_id_that_is_no_text_is_refused_with_what_it_was(tmp_path: Path) -> None:
    class Numbered(LocalScheduler):
        def submit(self, script: Path, job: JobRequest) -> str:
            return 4711  # type: ignore[return-value]

    run = RunDir.create(tmp_path, make.spec())
    with pytest.raises(SchedulerError, match="gave a job the id 4711"):
        submit_script(Numbered(), run, JobRequest(name="job", command="true"), "")


def test_a_process_that_its_scheduler_does_not_know_supervises_nothing(tmp_path: Path) -> None:
    from tula_cli.cluster.allocation import Allocation

    with pytest.raises(
        SchedulerError, match=r"method find_position\(\) of scheduler TinyQueue returned None for this process"
    ):
        Allocation.from_environment({}, tiny_queue.TinyQueue(str(tmp_path)))
