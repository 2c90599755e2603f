"""The format of a run directory, and which tula its jobs were submitted with."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import make_runs as make
import pytest
import yaml
from fake_slurm import FakeSlurm
from isolation import isolate_environment

from tula_cli.cli import app
from tula_cli.cluster import local
from tula_cli.cluster.allocation import Allocation
from tula_cli.cluster.directory_watcher import ChangeWatcher
from tula_cli.cluster.supervise import require_current_format, supervise
from tula_cli.errors import BadMeasurements, OtherFormat
from tula_cli.run.directory import RunDir
from tula_cli.run.files import open_file_to_append
from tula_cli.run.records.failures import Recovery
from tula_cli.run.records.probes import Failed
from tula_cli.run.records.tasks import ProbeTask
from tula_cli.show.screen import Screen
from tula_cli.version import RUN_FORMAT, __version__

HOUR = 3600


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    isolate_environment(monkeypatch, tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(make.SPEC))
    return RunDir.create(tmp_path / "tula-runs", make.spec())


def newer(run: RunDir) -> None:
    (run.path / "format").write_text(f"{RUN_FORMAT + 1} tula 9.1\n")


def files(run: RunDir) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_a_new_run_has_the_format_of_its_tula(run: RunDir) -> None:
    path = run.path / "format"
    assert path.read_text() == f"{RUN_FORMAT} tula {__version__}\n"
    path.unlink()  # a run from before there were formats is of the first
    assert run.read_spec().name == "toy"
    with pytest.raises(OtherFormat, match="is in format 1"):
        run.save_job(run.read_spec())
    assert not path.exists()


def test_the_run_of_each_node_type_has_a_format(tmp_path: Path) -> None:
    types = {name: {"cluster": {"gpus_per_node": 1}} for name in ("old", "new")}
    assert all((run.path / "format").exists() for run in make.create_runs(tmp_path, make.spec(node_types=types)))


@pytest.mark.parametrize("folder", ["types", "lengths"])
def test_a_run_with_measurements_of_several_node_types_inside_is_refused(run: RunDir, folder: str) -> None:
    (run.path / folder).mkdir()
    with pytest.raises(OtherFormat, match="makes separate runs") as caught:
        run.read_spec()
    assert caught.value.hint == "measure the job again: tula profile job.yaml"


@pytest.mark.promise(
    "the run directory",
    "a command opens a run of a newer format",
    "it exits with code 16 and does not change the run",
)
@pytest.mark.parametrize(
    "words",
    ["status", "recommend", "logs", "train --yes", "cancel", "evaluate", "compare --show", "profile job.yaml --yes", "train job.yaml --yes"],
)  # fmt: skip
def test_every_command_refuses_a_run_of_a_newer_format_and_leaves_it(run: RunDir, words: str) -> None:
    newer(run)
    before, screen = files(run), Screen(out=io.StringIO(), err=io.StringIO())
    assert app.run([*words.split(), "--json"], screen=screen) == OtherFormat.exit_code == 16
    error = json.loads(screen.out.getvalue())["error"]
    assert error["code"] == "format"
    assert (
        "made by tula 9.1, has format 3" in error["message"]
        and f"tula {__version__} reads formats 1 to 2" in error["message"]
    )
    assert files(run) == before


def test_the_list_tells_a_run_of_a_newer_format_among_the_others(run: RunDir) -> None:
    newer(run)
    RunDir.create(run.path.parent, make.spec(name="other"))
    screen = Screen(out=io.StringIO(), err=io.StringIO())
    assert app.run(["list"], screen=screen) == 0
    assert f"{run.id} cannot be read:" in screen.out.getvalue() and "other-" in screen.out.getvalue()


def test_a_format_before_the_oldest_is_refused(run: RunDir) -> None:
    (run.path / "format").write_text("0 tula 0.0.1\n")
    with pytest.raises(OtherFormat, match="reads formats 1 to 2") as caught:
        run.read_spec()
    assert "the older tula" in caught.value.hint


# --- a run of the first format


@pytest.fixture
def older(run: RunDir) -> RunDir:
    make.make_older(run)
    return run


@pytest.mark.promise(
    "the run directory",
    "a command opens a run of an older format",
    "it shows the results. It does not start or resume jobs: it exits with code 16 and names the version to use",
)
@pytest.mark.parametrize("words", ["status", "recommend", "list", "logs"])
def test_the_results_of_an_older_format_are_read_and_nothing_is_written(older: RunDir, words: str) -> None:
    before, screen = files(older), Screen(out=io.StringIO(), err=io.StringIO())
    assert app.run([*words.split(), "--json"], screen=screen) == 0, screen.err.getvalue()
    assert files(older) == before
    if words == "recommend":
        assert "could not be stored" in screen.err.getvalue() and "is in format 1" in screen.err.getvalue()


@pytest.mark.parametrize(
    "words", ["train --yes --nodes 1 --batch 32", "compare --batch 32 --yes", "recommend --save", "profile --yes"]
)
def test_no_job_of_an_older_format_is_started_or_continued(older: RunDir, words: str) -> None:
    before, screen = files(older), Screen(out=io.StringIO(), err=io.StringIO())
    command, *options = words.split()
    assert app.run([command, "--run", str(older.path), *options, "--json"], screen=screen) == OtherFormat.exit_code
    error = json.loads(screen.out.getvalue())["error"]
    assert error["code"] == "format" and "made by tula 0.0.9, is in format 1" in error["message"]
    assert "use the version of tula that made the run" in error["hint"]
    assert files(older) == before


def test_a_job_of_a_newer_tula_does_not_continue_a_training_of_an_older_format(older: RunDir) -> None:
    before = files(older)
    with pytest.raises(SystemExit) as ended:
        supervise(older.path, "train-x-1", environ={})
    assert ended.value.code == OtherFormat.exit_code and files(older) == before


def test_failures_of_an_older_format_are_read(older: RunDir) -> None:
    (attempt,) = (item for item in older.read_attempts() if item.outcome == "user")
    failed = older.read_result("probe-n002-l000256")
    assert attempt.message == "KeyError: 'label'" and attempt.rank == 0
    assert isinstance(failed, Failed) and failed.message == "KeyError: 'label'"


@pytest.mark.parametrize("told", ["", "\n", "2 tu", "x", "1 2 3", "-1", "9" * 40, "1 tula " + "v" * 99])
def test_a_damaged_format_is_reported(run: RunDir, told: str) -> None:
    (run.path / "format").write_text(told)
    with pytest.raises(BadMeasurements, match="it does not contain the number of a run format") as caught:
        run.read_spec()
    assert "do not delete this file" in caught.value.hint
    (run.path / "format").write_text(f"{RUN_FORMAT}\n")  # as the hint has it
    assert f"echo {RUN_FORMAT} > " in caught.value.hint
    run.save_job(run.read_spec())


# --- the links of a chain


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "slurm")
    fake.use(monkeypatch)
    return fake


@pytest.fixture
def chain(run: RunDir, slurm: FakeSlurm) -> list[str]:
    """Return the jobs of a training's chain, the first of which runs."""
    links = [slurm.add(f"tula-{number}", "PENDING" if number else "RUNNING") for number in range(3)]
    job = {"of": "a record of the future", "links": links}
    (run.path / "jobs").mkdir()
    (run.path / "jobs/damaged.json").write_text("{")
    (run.path / "jobs/train-x.json").write_text(json.dumps(job))
    return links


def environ(job: str, rank: int = 0) -> dict[str, str]:
    return {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": job}


@pytest.mark.promise(
    "the run directory",
    "a job of a chain opens a run of a format that its tula cannot read",
    "it exits with code 16 and changes nothing; waiting jobs are held until `scontrol release`",
)
def test_a_link_that_meets_a_newer_format_changes_nothing_and_the_chain_is_held(
    run: RunDir, chain: list[str], slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    newer(run)
    before = files(run)
    with pytest.raises(SystemExit) as ended:
        supervise(run.path, "train-x-1", environ=environ(chain[0]))
    assert ended.value.code == 16
    assert [job["reason"] for job in slurm.jobs()] == ["None", "JobHeldUser", "JobHeldUser"]
    message = capsys.readouterr().err
    assert f"scontrol release {chain[1]},{chain[2]}" in message
    assert message.count("has format 3") == 1
    assert files(run) == before


def test_one_supervisor_of_a_job_holds_the_chain_and_that_it_cannot_be_held_is_reported(
    run: RunDir, chain: list[str], slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    newer(run)
    with pytest.raises(OtherFormat):
        require_current_format(run.path, Allocation.from_environment(environ(chain[0], rank=1)))
    assert slurm.calls("scontrol") == []
    slurm.fault(scontrol="unreachable")
    with pytest.raises(OtherFormat):
        require_current_format(run.path, Allocation.from_environment(environ(chain[0])))
    assert "could not be held" in capsys.readouterr().err


# --- a job of another machine


@pytest.fixture
def elsewhere(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str]]:
    """Return what is told of a job of another machine, a time after its last sign of life (s; None: it never began)."""

    def told(silent: float | None, *, tula: str = __version__, **attempt: float) -> tuple[str, str]:
        name = make.add_probes(run, 1, (32,))
        job = make.scheduler_job(name).model_copy(update={"host": "far", "tula": tula})
        run.write_job(job)
        if silent is not None:
            run.write_attempt(make.attempt(name, **attempt))  # type: ignore[arg-type]
            with open_file_to_append(run.get_log_path(name, 1)):
                pass
            monkeypatch.setattr(local.time, "time", lambda: run.get_log_path(name, 1).stat().st_mtime + silent)
        state = local.LocalLauncher().query_states(run.read_snapshot(), [job])[name]
        return state.state, state.reason

    return told


def test_a_job_of_another_machine_lives_while_it_gives_signs_of_life(elsewhere: Callable[..., tuple[str, str]]) -> None:
    assert elsewhere(HOUR - 60) == ("running", "on far, according to its files")


@pytest.mark.promise(
    "a node",
    "there is no scheduler, and the machine of a job fails",
    "jobs send a heartbeat every minute. Commands on other machines consider the job lost an hour after its last one",
)
def test_a_job_of_another_machine_that_is_silent_for_an_hour_is_lost(elsewhere: Callable[..., tuple[str, str]]) -> None:
    state, reason = elsewhere(HOUR + 60)
    assert state == "ended" and reason.startswith("on far, without a heartbeat since 2")


def test_nothing_is_decided_of_jobs_that_give_no_signs(elsewhere: Callable[..., tuple[str, str]]) -> None:
    assert elsewhere(None) == ("running", "waiting or ended on far; only commands on far see which")
    assert elsewhere(0, end=make.START + 5)[0] == "ended"


def test_a_job_on_one_machine_gives_a_sign_of_life_each_minute(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    from tula_cli.cluster import attempt
    from tula_cli.host.leftovers import GpuMemory
    from tula_cli.run.records.jobs import LeaderCommand

    name, clock = make.add_probes(run, 1, (32,)), [100.0]
    monkeypatch.setattr(attempt.time, "monotonic", lambda: clock[0])
    touched: list[Path] = []
    monkeypatch.setattr(attempt.os, "utime", touched.append)
    task = run.read_task(name)
    assert isinstance(task, ProbeTask)
    running = attempt.RunningAttempt(
        run, Allocation(0, 1), None, GpuMemory(), task, make.attempt(name), LeaderCommand(task=name), 1e9, ChangeWatcher(run.path, Allocation(0, 1))  # type: ignore[arg-type]
    )  # fmt: skip
    for clock[0] in (100.0, 100.2, 159.0, 160.1, 161.0):
        running._touch_log()
    assert touched == [run.get_log_path(name, 1)] * 2


def test_a_training_that_an_earlier_version_moved_is_read() -> None:
    move = {"kind": "move", "nodes": 1, "batch": 128, "nodes_before": 2, "batch_before": 256}
    recovery = Recovery.model_validate({"failure": None, "decision": move})
    assert recovery.description == "continues on 1 node instead of 2, because --nodes has changed"
