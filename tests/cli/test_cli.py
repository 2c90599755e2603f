import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import make_runs as make
import pytest
import yaml
from driver import restore_sigint
from isolation import isolate_environment
from make_damages import write_checkpoint
from make_results import Truth, make_footprint, make_inspection, make_probe, make_probes
from typer.testing import CliRunner

from tula_cli import words
from tula_cli.cli import app, runs
from tula_cli.cluster import inspection as cluster_inspection
from tula_cli.cluster import inspection as inspecting
from tula_cli.cluster import launcher as cluster_launcher
from tula_cli.cluster.slurm import site
from tula_cli.errors import DiskFull, Infeasible, JobFailed, SchedulerError, SpecError, TulaError
from tula_cli.run.directory import RunDir
from tula_cli.run.job_runs import open_runs_of_job
from tula_cli.run.records.results import JobFile
from tula_cli.run.records.tasks import CheckTask, EvaluateTask, ProbeTask
from tula_cli.services import check as services_check
from tula_cli.services import estimate as services_estimate
from tula_cli.services import nodes as services_nodes
from tula_cli.show import live
from tula_cli.show import screen as show_screen
from tula_cli.spec.backend import BACKENDS
from tula_cli.spec.job import describe_training_method
from tula_cli.spec.load import dump_yaml, load_spec
from tula_cli.version import __version__
from tula_cli.words import make_relative_path

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty working directory with a job.yaml, no terminal, and no settings of the person who runs the tests."""
    isolate_environment(monkeypatch, tmp_path)
    local = dataclasses.replace(BACKENDS["local"], grace=0.05, poll=(0.01, 0.01))
    monkeypatch.setitem(BACKENDS, "local", local)
    monkeypatch.setattr(services_nodes, "POLL_INTERVALS", (0.01, 0.01))
    monkeypatch.setattr(site, "query_site", lambda: None)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(make.SPEC))
    return tmp_path


def tula(*arguments):
    screen = show_screen.Screen(out=io.StringIO(), err=io.StringIO())
    code = app.run([str(word) for word in arguments], screen=screen)
    return Answer(code, screen.out.getvalue(), screen.err.getvalue())


class Here(make.FakeLauncher):
    """Runs each job at once: a probe job measures, a training job ends with a summary. `fails` says what goes wrong."""

    def __init__(self, fails=""):
        super().__init__()
        self.fails = fails

    def submit(self, run, task):
        job = super().submit(run, task).model_copy(update={"submitted_at": time.time()})
        self.says[task.job] = "ended"
        if self.fails == "hangs":
            self.says[task.job] = "running"
        elif self.fails == "vanishes":
            pass
        elif isinstance(task, ProbeTask):
            self._probe(run, task)
        elif isinstance(task, CheckTask):
            self._look(run, task)
        elif isinstance(task, EvaluateTask):
            run.get_training(task.signature).write_evaluation(make.evaluation(task))
        else:
            self._train(run, task)
        return job

    def _probe(self, run, task):
        for local in task.local_batches:
            if self.fails == "memory":
                make.add_out_of_memory(run, task.nodes, local)
            elif self.fails == "user" or (self.fails == "partly" and local == max(task.local_batches)):
                make.add_failed(run, task.nodes, local, "KeyError: 'x'")
            else:
                truth = Truth(gpus_per_node=task.spec.cluster.gpus_per_node)
                run.write_result(make_probe(truth, task.nodes, local, measured_at=time.time()))

    def _look(self, run, task):
        if self.fails == "user":
            now = time.time()
            run.write_attempt(make.attempt(task.id, start=now, end=now, outcome="user", message="no interface ib7"))
            return
        for rank in range(task.nodes):
            run.checks.record_sign_in(task.id, rank, f"n{rank + 1}")
        other = {"token": "another"} if self.fails == "folder" else {"torch": "2.7"}
        run.checks.write_report(make.cluster_report(run, task, {}, other))

    def _train(self, run, task):
        if self.fails:
            outcome = "device_oom" if self.fails == "memory" else "user"
            now = time.time()
            run.write_attempt(make.attempt(task.id, start=now, end=now, outcome=outcome, message="no"))
            return
        run.write_train_result(make.train_result(task.signature))
        run.write_summary(make.summary(signature=task.signature))


class SlowExit(Here):
    """Its jobs are reported as running several times more after their results are complete."""

    def __init__(self):
        super().__init__()
        self.queries = {}

    def submit(self, run, task):
        self.queries[task.job] = 0
        return super().submit(run, task)

    def query_states(self, snapshot, jobs):
        for job in jobs:
            self.queries[job.id] += 1
            self.says[job.id] = "running" if self.queries[job.id] < 5 else "ended"
        return super().query_states(snapshot, jobs)


@pytest.fixture
def cluster(monkeypatch):
    """A cluster of this test's own; replace `.launcher` for another one."""
    kept = types.SimpleNamespace(launcher=Here(), inspection=inspection())
    monkeypatch.setattr(cluster_launcher, "make_launcher", lambda spec, **_: kept.launcher)
    for module in (inspecting, services_check, services_estimate):
        monkeypatch.setattr(module, "inspect", lambda spec: kept.inspection)
    return kept


def inspection(**changes):
    return make_inspection(**{"dataset_size": 300, "eval_size": 50, "parameters": 1000, "hardware": "cpu", **changes})


def newest():
    return RunDir.find_newest(Path("tula-runs").absolute())


# --- the whole way


def test_profile_recommend_train(cluster):
    profiled = tula("profile", "job.yaml")
    assert profiled.code == 0
    assert cluster.launcher.submitted == ["probe-n001", "probe-n002"]
    assert "next: tula recommend" in profiled.out
    assert "node-h" in profiled.err
    recommended = tula("recommend", "--objective", "time")
    assert recommended.code == 0
    assert re.match(r"\d nodes?, batch \d+: ", recommended.out)
    assert "(the newest)" in recommended.err
    recommended_json = tula("recommend", "--objective", "time", "--json").json["data"]
    trained = tula("train")
    assert trained.code == 0
    assert "predicted" in trained.out
    assert trained.out.rstrip().endswith("predicted -> measured.")
    gain = tula("train", "--json").json["data"]["gain"]
    assert gain["time"]["before"] == recommended_json["headline"]["baseline"]["hours"]
    assert cluster.launcher.submitted[2].startswith("train-")


def test_a_search_in_rounds_goes_on_although_its_jobs_exit_slowly(cluster):
    cluster.launcher, cluster.inspection = SlowExit(), inspection(dataset_size=50_000)
    answer = tula("profile", "job.yaml", "--set", "search.strategy=adaptive", "--set", "train.epochs=100000", "--json")
    assert answer.code == 0, answer.err
    assert not answer.json["data"]["missing"]
    assert len(cluster.launcher.submitted) > 2, "a second round"


def test_check_and_recommend_explain_print_one_line_about_the_method(cluster):
    tula("profile", "job.yaml")
    recommended = tula("recommend", "--json")
    line = describe_training_method(load_spec(Path("job.yaml")))
    assert recommended.json["data"]["method_line"] == line
    for text in (tula("recommend", "--explain").out, tula("check", "job.yaml", "--offline").out):
        assert " ".join(text.split()).count(line) == 1
    assert line not in " ".join((tula("recommend").out + tula("train", "--dry-run").out).split())


def test_profile_again_does_only_what_is_missing(cluster):
    tula("profile", "job.yaml")
    again = tula("profile", "job.yaml")
    assert again.code == 0
    assert "all probes already have results" in again.err
    assert len(cluster.launcher.submitted) == 2
    more = tula("profile", "job.yaml", "--set", "search.nodes=[1,2,4]")
    assert more.code == 0
    assert cluster.launcher.submitted[2:] == ["probe-n004"]


def test_a_changed_price_keeps_the_probes(cluster):
    tula("profile", "job.yaml")
    dear = tula("recommend", "job.yaml", "--set", "pricing.price=1000", "--set", "pricing.currency=EUR", "--json")
    assert dear.code == 0
    assert dear.json["data"]["currency"] == "EUR"
    assert tula("recommend", "--set", "pricing.price=1000").code == 0
    other = tula("recommend", "--set", "model.name=resnet34")
    assert other.code == 2
    assert "changes settings on which the measurements of" in other.err


@pytest.fixture
def own_code(here):
    """A job whose model is the user's own."""
    (here / "job.yaml").write_text(yaml.safe_dump({**make.SPEC, "model": {"name": "mine:Net"}}))
    (here / "mine.py").write_text("x = 1")
    return here / "mine.py"


def test_code_that_stays_as_it_is_keeps_the_run(cluster, own_code):
    assert tula("profile", "job.yaml").code == 0
    run = newest()
    for command in (["recommend"], ["recommend", "job.yaml"], ["train"], ["train", "job.yaml"], ["status"]):
        answer = tula(*command)
        assert (answer.code, newest().path) == (0, run.path), command
        assert "changed" not in answer.err
    assert len(list(Path("tula-runs").glob("toy-*"))) == 1


def test_edited_code_is_a_run_of_its_own(cluster, own_code):
    tula("profile", "job.yaml")
    first = newest()
    own_code.write_text("x = 2")
    answer = tula("recommend", "job.yaml", "--quiet")
    assert answer.code == 4
    assert (
        f"The code of mine:Net has changed since run {first.id} was made (mine.py changed), so a new run" in answer.err
    )
    assert f"For the earlier run, add --run {first.path.relative_to(Path.cwd())}." in answer.err
    assert tula("profile", "job.yaml").code == 0
    assert newest().path != first.path
    assert "changed" not in tula("recommend", "job.yaml").err
    own_code.write_text("x = 1")
    assert tula("recommend", "job.yaml").code == 0
    assert newest().path == first.path


def test_a_run_that_is_named_is_used_whatever_became_of_the_code(cluster, own_code):
    tula("profile", "job.yaml")
    tula("recommend")
    run = newest()
    own_code.write_text("x = 2")
    for command in ("recommend", "status", "logs", "profile"):
        assert tula(command, "--run", run.path).code == 0, command
    trained = tula("train", "--run", run.path)
    assert trained.code == 0
    assert (
        f"The code of mine:Net has changed since {run.id} was measured (mine.py changed). The new code is trained"
        in trained.err
    )
    assert newest().path == run.path


def test_train_again_starts_nothing(cluster):
    first = tula("train", "job.yaml", "--nodes", 1, "--batch", 64)
    again = tula("train", "job.yaml", "--nodes", 1, "--batch", 64)
    assert (first.code, again.code) == (0, 0)
    assert first.out == again.out
    assert len(cluster.launcher.submitted) == 1


def test_evaluate_tells_what_the_weights_come_to_and_status_tells_it_again(cluster):
    answer = tula("evaluate", "job.yaml", "--json")
    assert (answer.code, answer.json["error"]["code"]) == (4, "measurements")
    summary = tula("train", "job.yaml", "--nodes", "1", "--batch", "64", "-y", "--json").json["data"]
    path = newest().get_training(summary["signature"]).get_checkpoint_path(5120)
    path.parent.mkdir(parents=True)
    write_checkpoint(path)
    plan = tula("evaluate", "--dry-run").out
    assert f"evaluate the last weights of training {summary['signature']} at 5120 samples on the validation set" in plan
    answer = tula("evaluate", "--json").json
    assert (answer["status"], answer["data"]["samples"], answer["data"]["metrics"]["top1"]) == ("done", 5120, 91.5)
    output = tula("evaluate")
    assert "top1 91.50 %, loss 0.3100" in output.out and "set dataset.test to use a separate test set" in output.out
    assert "these weights were evaluated" in output.err
    assert "evaluated last at 5120 samples on the validation set: top1 91.50, loss 0.3100" in tula("status").out
    assert tula("status", "--json").json["data"]["evaluations"][0]["size"] == 360
    assert tula("evaluate", "--weights", "nothing.pt").code == 2


def test_profile_attaches_to_what_is_under_way_without_asking(cluster):
    cluster.launcher = Here("hangs")
    assert tula("profile", "job.yaml", "--no-wait").code == 0
    without_cap = tula("profile", "job.yaml", "--set", "search.max_node_hours=null", "--timeout", 0)
    assert without_cap.code == 75, "not 8: nothing new is started"
    assert len(cluster.launcher.submitted) == 2


def test_an_override_that_equals_the_job_file_is_not_named(cluster):
    Path("job.yaml").write_text(dump_yaml(make.spec()))
    tula("profile", "job.yaml", "--set", "search.max_node_hours=10.0", "--set", "train.epochs=7")
    quiet = tula("status", "-q")
    warning = "warning: --set train.epochs=7 of an earlier command still applies to tula-runs/toy-"
    assert quiet.err.startswith(warning) and "max_node_hours" not in quiet.err, "it changes the answer"
    (diagnostic,) = tula("status", "--json").json["diagnostics"]
    assert diagnostic["code"] == "earlier-overrides-apply"
    assert "earlier" not in tula("train", "--set", "train.epochs=8", "--dry-run").err, "another value replaces it"


@pytest.mark.parametrize(
    ("overrides", "new_overrides", "remaining"),
    [
        (["a.b={c: 1}", "a.b.c=2", "a.b={c: 3}"], [], ["a.b={c: 3}"]),
        (["a.b={c: 1}", "a.b.c=2", "a.bc=4"], [], ["a.b={c: 1}", "a.b.c=2", "a.bc=4"]),
        (["a=1", "b=2", "a =3"], [], ["b=2", "a =3"]),
        (["a.b=1", "b=2"], ["a={c: 1}"], ["b=2"]),
    ],
)
def test_overrides_are_listed_in_an_order_that_means_the_same(overrides, new_overrides, remaining):
    assert runs._list_overrides(JobFile(path="job.yaml", overrides=tuple(overrides)), new_overrides) == tuple(remaining)


def test_a_run_is_found_by_flag_variable_and_name(cluster, monkeypatch):
    tula("profile", "job.yaml", "--set", "name=first")
    first = newest()
    tula("profile", "job.yaml", "--set", "name=second")
    assert tula("status", "--json").json["run_id"].startswith("second")
    assert tula("status", "--run", first.path, "--json").json["run_id"] == first.id
    assert tula("status", "--run", first.id, "--json").json["run_id"] == first.id
    for named in (["--run", str(first.path)], [first.id], [str(first.path)]):
        shown = tula("status", *named)
        assert (
            shown.err
            == f"warning: --set name=first of an earlier command still applies to {make_relative_path(first.path)}. Commands that plan or train use the values of the job file if you name it.\n"
        )
        assert tula("status", *named, "--json").json["overrides"] == ["name=first"]
    assert "did you mean first" in tula("logs", first.id.replace("first", "frst")).err
    assert tula("cancel", "first", "--json").json["run_id"] == first.id, "by the job's name"
    shutil.copytree(first.path, first.path.with_name("first-00000000"))
    for command in ("status", "cancel", "train"):
        refused = tula(command, "first")
        assert (
            refused.code == 2
            and "2 runs have the name first" in refused.err
            and f"first-00000000, {first.id}" in refused.err
        )
        assert "nor tula-runs/third" in tula("status", "third").err
    monkeypatch.setenv("TULA_RUN", str(first.path))
    named = tula("status")
    assert first.id in named.out
    assert "from TULA_RUN" in named.err


def test_a_job_in_a_folder_that_is_not_utf_8_is_an_error_and_nothing_is_started(cluster, here, monkeypatch):
    odd = here / os.fsdecode(b"\xe9t\xff")
    odd.mkdir()
    (odd / "job.yaml").write_text((here / "job.yaml").read_text())
    monkeypatch.chdir(odd)
    for command in (("profile",), ("train", "--nodes", 1, "--batch", 64)):
        refused = tula(*command, "job.yaml", "--run-dir", here / "runs")
        assert refused.code not in (0, 70) and "a path or text in it is not UTF-8" in refused.err, refused.err
        assert "defect" not in refused.err and cluster.launcher.submitted == []


def test_the_status_of_a_run_with_a_damaged_result_warns(cluster):
    assert tula("profile", "job.yaml").code == 0
    damaged = sorted(Path("tula-runs").glob("*/results/*.json"))[0]
    damaged.write_text("{")
    shown = tula("status", "--json")
    assert shown.code == 0
    assert shown.json["data"]["measured"] > 0
    assert [damaged.name in warning for warning in shown.json["warnings"]] == [True]


# --- nothing is touched by a dry run


def test_a_dry_run_of_profile_touches_nothing(cluster, here):
    shown = tula("profile", "job.yaml", "--dry-run")
    assert shown.code == 0
    assert "#!/bin/bash\n# probe-n001" in shown.out
    assert cluster.launcher.submitted == []
    assert [path.name for path in here.iterdir()] == ["job.yaml"]


def test_a_dry_run_of_train_submits_nothing(cluster):
    shown = tula("train", "job.yaml", "--nodes", 1, "--batch", 64, "--dry-run", "--json")
    assert shown.code == 0
    assert shown.json["data"]["plan"]["task"]["nodes"] == 1
    assert shown.json["data"]["scripts"] == [f"#!/bin/bash\n# {shown.json['data']['plan']['task']['job']}"]
    assert cluster.launcher.submitted == []


def test_a_dry_run_of_a_training_that_runs_says_that_it_follows_it(cluster):
    command = ("train", "job.yaml", "--nodes", 1, "--batch", 64)
    assert "submits nothing" not in tula(*command, "--dry-run").out
    cluster.launcher = Here("hangs")
    assert tula(*command, "--no-wait", "--yes").code == 0
    (job,) = cluster.launcher.submitted
    assert f"{job} is pending or running: tula train follows it and submits nothing" in tula(*command, "--dry-run").out


# --- waiting


def test_no_wait_returns_at_once(cluster):
    cluster.launcher = Here("hangs")
    started = tula("profile", "job.yaml", "--no-wait", "--json")
    assert started.code == 0
    assert started.json["status"] == "pending"
    assert started.json["data"]["jobs"] == ["probe-n001", "probe-n002"]
    assert tula("status", "--json").json["status"] == "pending"


def test_the_second_command_says_that_it_started_nothing_and_what_differs(cluster):
    cluster.launcher = Here("hangs")
    assert "started probe-n001, probe-n002" in tula("profile", "job.yaml", "--no-wait").out
    again = tula("profile", "job.yaml", "--no-wait", "--set", "cluster.collective=reduce_scatter_allgather")
    assert "already running: probe-n001, probe-n002" in again.out
    assert "started" not in again.out
    assert "submitted with other settings in section cluster" in again.err


def test_slurm_is_not_waited_for_by_default(cluster):
    cluster.launcher = Here("hangs")
    assert tula("profile", "job.yaml", "--set", "cluster.kind=slurm").code == 0


def test_75_when_the_time_to_wait_is_over(cluster):
    cluster.launcher = Here("hangs")
    waited = tula("profile", "job.yaml", "--timeout", 0, "--json")
    assert waited.code == 75
    assert waited.json["status"] == "pending"
    assert waited.json["error"]["code"] == "pending"
    assert "not finished within the timeout: probe-n001 (running)" in waited.json["error"]["message"]


def test_130_on_ctrl_c_and_the_jobs_continue(cluster, monkeypatch):
    cluster.launcher = Here("hangs")

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(live.LineDisplay, "update_status", lambda self, now: interrupt(now))
    ended = tula("profile", "job.yaml")
    assert ended.code == 130 and cluster.launcher.cancelled == []
    assert "the jobs continue" in ended.err and "tula cancel tula-runs/toy-" in ended.err


def test_130_on_ctrl_c_elsewhere(cluster, monkeypatch):
    def interrupt(spec):
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster_inspection, "inspect", interrupt)
    assert tula("profile", "job.yaml", "--json").json["error"]["code"] == "interrupted"
    assert tula("profile", "job.yaml").code == 130


# --- confirming


def test_8_without_terminal_cap_and_yes(cluster):
    refused = tula("profile", "job.yaml", "--set", "search.max_node_hours=null")
    assert refused.code == 8
    assert "there is no terminal" in refused.err
    assert cluster.launcher.submitted == []
    assert tula("profile", "job.yaml", "--set", "search.max_node_hours=null", "-y").code == 0


def test_8_above_the_cap_even_with_yes(cluster):
    refused = tula("profile", "job.yaml", "--set", "search.max_node_hours=0.5", "-y")
    assert refused.code == 8
    assert "search.max_node_hours is 0.5" in refused.err
    assert cluster.launcher.submitted == []


class TypedOn(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("typed", "code"), [("y\n", 0), ("n\n", 8), ("", 8)])
def test_asks_on_a_terminal(cluster, monkeypatch, typed, code):
    for command in (["profile", "job.yaml"], ["train", "job.yaml", "--nodes", 1, "--batch", 64]):
        monkeypatch.setattr("sys.stdin", TypedOn(typed))
        answered = tula(*command)
        assert answered.code == code
        assert "start? [y/N]" in answered.err
        assert bool(cluster.launcher.submitted) == (code == 0)


def test_a_quiet_command_shows_the_plan_before_it_asks(cluster, monkeypatch):
    monkeypatch.setattr("sys.stdin", TypedOn("n\n"))
    answered = tula("profile", "job.yaml", "-q")
    assert answered.code == 8 and "node-h" in answered.err.partition("start? [y/N]")[0]


def test_train_needs_a_cap_or_yes_too(cluster):
    arguments = ["train", "job.yaml", "--nodes", 1, "--batch", 64, "--set", "search.max_node_hours=null"]
    assert tula(*arguments).code == 8
    assert tula(*arguments, "-y").code == 0


# --- what goes wrong


def test_3_nothing_feasible(cluster):
    cluster.inspection = inspection(dataset_size=8)
    assert tula("profile", "job.yaml").code == 3


def test_4_nothing_measured(cluster):
    assert tula("recommend", "job.yaml").code == 4
    assert tula("train", "job.yaml").code == 4
    assert not Path("tula-runs").exists(), "what was refused leaves nothing behind"
    assert tula("recommend").code == 2


def test_a_dry_run_of_train_touches_nothing(cluster):
    assert tula("train", "job.yaml", "--nodes", 1, "--batch", 64, "--dry-run").code == 0
    assert not Path("tula-runs").exists()


def files(run):
    """Return what later commands take from a run."""
    names = ("spec.yaml", "recommendation.json", "recommended.yaml", "results.csv")
    return {name: (run.path / name).read_bytes() for name in names}


@pytest.mark.parametrize(
    "question",
    [["--objective", "cost"], ["--curve", "cost"], ["--max-nodes", 1], ["--nodes", 1], ["--set", "train.epochs=33"],
     ["job.yaml", "--set", "pricing.price=1000"]],
)  # fmt: skip
def test_just_looking_changes_nothing_that_later_commands_take(cluster, question):
    tula("profile", "job.yaml")
    first = tula("recommend", "--json").json["data"]
    before = files(newest())
    looked = tula("recommend", *question)
    assert looked.code == 0 and files(newest()) == before
    assert f"stored recommendation: tula train still uses {first['choice']['nodes']} node" in looked.err
    assert "(knee; 20" in looked.err and "To store the new one, add --save" in looked.err
    assert "as recommended (knee; 20" in tula("train", "--dry-run").out


def test_the_removed_objective_of_recommend_names_its_replacement(cluster):
    refused = tula("recommend", "--objective", "result-time")
    assert refused.code == 2
    assert "tula recommend --objective: value result-time was removed\nHINT: use --objective time" in refused.err
    other = tula("recommend", "--objective", "soon")
    assert other.code == 2 and "was removed" not in other.err and "'soon' is not one of" in other.err


@pytest.mark.parametrize(
    ("option", "replacement"),
    [
        (("--what-if", "compute=2.1x"), "run tula profile and tula recommend on that hardware"),
        (("--with-run", "tula-runs/other"), "set search.gpus_per_node in the job"),
        (("--validate",), "tula recommend --explain shows the fit"),
    ],
)
def test_a_removed_option_of_recommend_names_its_replacement(cluster, option, replacement):
    refused = tula("recommend", *option)
    assert refused.code == 2
    assert f"tula recommend: option {option[0]} was removed\nHINT: {replacement}" in refused.err


def test_where_a_run_cannot_be_written_the_answer_is_shown_all_the_same(cluster):
    tula("profile", "job.yaml")
    (newest().path / "results.csv").mkdir()
    shown = tula("recommend", "--json")
    assert shown.code == 0 and shown.json["data"]["saved"] is False
    assert "could not be stored" in shown.err and "results.csv" in shown.err
    requested = tula("recommend", "--save")
    assert requested.code == 1 and "cannot write" in requested.err


def test_the_same_question_renews_the_answer_and_save_keeps_another(cluster):
    tula("profile", "job.yaml")
    requested = ("recommend", "--objective", "cost", "--max-nodes", 1)
    first, second = (tula(*requested, "--json").json["data"] for _ in range(2))
    assert first["saved"] and second["saved"] and second["created_at"] > first["created_at"]
    assert tula("recommend", "--json").json["data"]["saved"] is False
    assert "as recommended (cost, --max-nodes 1; 20" in tula("train", "--dry-run").out
    assert "only shown" not in tula("recommend", "--save").err
    assert "as recommended (knee; 20" in tula("train", "--dry-run").out


def test_what_a_saved_answer_assumes_is_reported_and_is_not_a_setting_of_the_job(cluster):
    tula("profile", "job.yaml")
    spec = newest().read_spec()
    dear = ("recommend", "job.yaml", "--set", "pricing.price=1000")
    assert "not stored, because of --set" in tula(*dear).err
    assert newest().read_recommendation() is None
    assert tula(*dear, "--save", "--json").json["data"]["saved"]
    assert newest().read_spec() == spec
    plan = tula("train", "--dry-run").out
    assert "as recommended (knee, --set pricing.price=1000; 20" in plan and "1000 USD" not in plan


def test_what_the_run_was_measured_with_is_its_own_setting(cluster):
    tula("profile", "job.yaml", "--set", "pricing.price=5")
    answer = tula("recommend", "job.yaml", "--set", "pricing.price=5", "--json").json["data"]
    assert answer["saved"] and answer["overrides"] == []
    assert newest().read_spec().pricing.price == 5


def test_what_an_edited_job_recommends_is_kept(cluster, here):
    tula("profile", "job.yaml")
    tula("recommend")
    (here / "job.yaml").write_text(yaml.safe_dump({**make.SPEC, "pricing": {"price": 7.0}}))
    assert tula("recommend", "job.yaml", "--json").json["data"]["saved"]
    assert newest().read_spec().pricing.price == 7


def edit(here, **changes):
    (here / "job.yaml").write_text(yaml.safe_dump({**make.SPEC, **changes}))


def test_a_training_does_not_start_from_settings_that_the_job_no_longer_has(cluster, here):
    tula("profile", "job.yaml")
    tula("recommend")
    edit(here, train={"epochs": 9, "method": "ags"}, optimizer={"lr": 0.002})
    message = "job.yaml differs from this run: optimizer.lr 0.002 (run: 0.1), train.epochs 9 (run: 4)"
    for command in (["train"], ["compare", "--batch", 64]):
        refused = tula(*command)
        assert refused.code == 2 and "(optimizer.lr, train.epochs)" in refused.err and message in refused.err
        assert (
            f"tula {command[0]} job.yaml; to use the run: tula {command[0]} --run {words.make_relative_path(newest().path)}"
            in refused.err
        )
    assert len(cluster.launcher.submitted) == 2, "the probes"
    assert tula("train", "--dry-run").code == 0
    as_it_was = tula("train", "--run", newest().path)
    assert as_it_was.code == 0 and message in as_it_was.err
    assert newest().read_spec().train.epochs == 4
    assert tula("train").code == 0, "finished already: nothing is started"
    assert tula("train", "job.yaml").code == 0
    assert newest().read_spec().train.epochs == 9
    assert "differs from the run" not in tula("train").err


def test_a_training_under_way_is_attached_to_whatever_became_of_the_job(cluster, here):
    cluster.launcher = Here("hangs")
    requested = ("--nodes", 1, "--batch", 64, "--no-wait")
    tula("train", "job.yaml", *requested)
    edit(here, train={"epochs": 9})
    again = tula("train", *requested)
    assert again.code == 0 and "already running" in again.out and "train.epochs 9 (run: 4)" in again.err


def test_an_edited_price_is_reported_and_trained_with(cluster, here):
    tula("profile", "job.yaml")
    edit(here, pricing={"price": 7.0})
    recommended = tula("recommend")
    assert recommended.code == 0 and "pricing.price 7.0 (run: 1.0)" in recommended.err
    assert "To use the file: tula recommend job.yaml" in recommended.err
    assert "pricing.price" in tula("profile").err
    assert tula("train").code == 0


def test_a_job_that_names_another_model_is_measured_first(cluster, here):
    tula("profile", "job.yaml")
    tula("recommend")
    edit(here, model={"name": "resnet34"})
    assert "to use the file: tula profile job.yaml; " in tula("train").err


def test_a_job_that_is_gone_is_no_error(cluster, here):
    tula("profile", "job.yaml")
    tula("recommend")
    (here / "job.yaml").rename(here / "moved.yaml")
    trained = tula("train")
    assert trained.code == 0 and "differs from the run" not in trained.err


def test_a_job_that_cannot_be_read_any_more_is_not_trained_in_silence(cluster, here):
    tula("profile", "job.yaml")
    (here / "job.yaml").write_text("model: [")
    assert tula("recommend").code == 0
    refused = tula("train")
    assert refused.code == 2 and "job.yaml cannot be used" in refused.err


def test_5_the_scheduler_refuses(cluster, monkeypatch):
    def refuse(spec):
        raise SchedulerError("sbatch: error: invalid partition specified: nope", "sinfo lists partitions")

    monkeypatch.setattr(cluster_launcher, "make_launcher", refuse)
    refused = tula("profile", "job.yaml")
    assert refused.code == 5
    assert "HINT: sinfo lists partitions" in refused.err


def test_6_the_users_code_fails(cluster):
    cluster.launcher = Here("user")
    failed = tula("profile", "job.yaml", "--json")
    assert failed.code == 6
    assert "KeyError: 'x'" in failed.json["error"]["message"]
    assert tula("train", "--nodes", 1, "--batch", 64).code == 6


def test_7_the_smallest_batch_does_not_fit(cluster):
    cluster.launcher = Here("memory")
    assert tula("profile", "job.yaml").code == 7
    assert tula("train", "--nodes", 1, "--batch", 64).code == 7


def test_a_profile_that_failed_in_part_says_so(cluster):
    cluster.launcher = Here("partly")
    result = tula("profile", "job.yaml", "--json")
    assert result.code == 0
    assert result.json["status"] == "partial"
    assert any("KeyError: 'x'" in warning for warning in result.json["warnings"])
    assert len(result.json["data"]["failed"]) == 2


def test_a_training_job_that_vanished_has_failed(cluster):
    cluster.launcher = Here("vanishes")
    gone = tula("train", "job.yaml", "--nodes", 1, "--batch", 64)
    assert gone.code == 6
    assert "is lost" in gone.err


def test_probes_that_vanished_are_no_measurements(cluster):
    cluster.launcher = Here("vanishes")
    assert tula("profile", "job.yaml").code == 4


def test_warnings_of_the_inspection_are_shown(cluster):
    cluster.inspection = inspection(warnings=("more ranks than cores",))
    assert "warning: more ranks than cores" in tula("profile", "job.yaml").err


def test_13_a_full_disk(cluster, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    ended = tula("profile", "job.yaml", "--json")
    assert ended.code == 13
    assert "No space left" in ended.json["error"]["message"]


# --- bad input


@pytest.mark.parametrize("command", ["profile", "recommend", "train"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file: bad.yaml"),
        ("", "but it is empty"),
        ("- a\n", "but it is a list"),
        ("model: [", "line 1"),
        ("a: 1\na: 2\n", "given twice"),
        ("\t", "not valid YAML"),
        ("{name: x, modle: {}}", "did you mean model?"),
        ("search: {nodes: [0]}", "search.nodes[0]"),
    ],
)
def test_2_a_job_that_cannot_be_used(cluster, command, content, words):
    if content is not None:
        Path("bad.yaml").write_text(content)
    refused = tula(command, "bad.yaml")
    assert refused.code == 2
    assert words in refused.err
    assert refused.out == ""
    assert "Traceback" not in refused.err


def test_2_a_misspelt_run_is_reported_with_the_nearest_of_the_runs_there_are(cluster):
    Path("tula-runs/digits-e7dc068f").mkdir(parents=True)
    Path("tula-runs/digits-e7dc068f/spec.yaml").touch()
    refused = tula("status", "--run", "digits-e7dc068e", "--json")
    assert refused.code == 2 and refused.json["error"]["hint"] == "did you mean digits-e7dc068f?"


def test_the_newest_run_is_also_called_latest(cluster, here):
    tula("profile", "job.yaml")
    newest = tula("status", "--json").json["run_id"]
    for named in (("latest",), ("tula-runs/latest",), ("--run", "latest"), ("--run", "tula-runs/latest")):
        assert tula("status", *named, "--json").json["run_id"] == newest
    assert tula("recommend", "latest", "--json").json["run_id"] == newest


def test_2_all_problems_of_a_spec_one_a_line(cluster):
    Path("bad.yaml").write_text("{optimizer: {lr: -1}, trian: {}, model: {name: x}}")
    refused = tula("profile", "bad.yaml", "--json")
    paths = [problem["path"] for problem in refused.json["error"]["problems"]]
    assert {"optimizer.lr", "trian", "dataset", "train"} == set(paths)
    assert all(f"  {path}: " in refused.err for path in paths)


@pytest.mark.parametrize("setting", ["search.nodes", "=3", "search.nodez=[1]", "search.nodes=[1", "train.epochs=many"])
def test_2_a_setting_that_cannot_be_used(cluster, setting):
    assert tula("profile", "job.yaml", "--set", setting).code == 2


@pytest.mark.parametrize("command", ["status", "logs", "cancel", "recommend", "train", "profile"])
def test_2_a_run_directory_that_is_none(cluster, here, command):
    (here / "empty").mkdir()
    for run in ("empty", "nowhere", "job.yaml"):
        refused = tula(command, "--run", run, "--json")
        assert refused.code == 2
        assert refused.json["error"]["code"] == "spec"
    assert tula(command).code == 2


def test_4_a_run_whose_spec_is_damaged(cluster):
    tula("profile", "job.yaml")
    (newest().path / "spec.yaml").write_text("model: [")
    assert tula("status").code == 4
    listed = tula("list")
    assert listed.code == 0
    assert "cannot be read" in listed.out
    assert tula("profile", "job.yaml").code == tula("status").code == 0


def test_a_result_that_is_damaged_is_named_and_measured_again(cluster):
    tula("profile", "job.yaml")
    damaged = next((newest().path / "results").glob("*.json"))
    intact = json.loads(damaged.read_text())
    damaged.write_text("{")
    answered = tula("recommend")
    assert answered.code == 0
    assert str(damaged) in answered.err
    assert tula("profile", "job.yaml").code == 0
    assert json.loads(damaged.read_text()) | {"measured_at": intact["measured_at"]} == intact


def test_2_a_job_and_a_run(cluster):
    tula("profile", "job.yaml")
    assert tula("train", "job.yaml", "--run", newest().path, "--nodes", 1, "--batch", 64).code == 2


def test_2_a_batch_that_does_not_divide(cluster):
    refused = tula("train", "job.yaml", "--nodes", 2, "--batch", 33)
    assert refused.code == 2
    assert "33" in refused.err


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["prof"], ["profile", "job.yaml", "--bogus"], ["train", "--nodes", "0"], ["train", "--batch", "x"],
        ["recommend", "--objective", "speed"], ["init", "cloud"], ["check"], ["profile", "job.yaml", "--timeout", "-1"],
    ],
)  # fmt: skip
def test_2_arguments_that_cannot_be_used(cluster, arguments):
    refused = tula(*arguments, "--json") if arguments else tula("--json")
    assert refused.code == 2
    assert refused.json["error"]["code"] == "spec"
    assert refused.json["error"]["message"]


# --- status, list, logs, cancel


def test_an_option_of_all_commands_comes_after_the_command(cluster):
    for option in ("--json", "-q"):
        failed = tula(option, "status")
        assert failed.code == 2
        assert f"error: tula itself has no option {option}" in failed.err and f"tula status {option}" in failed.err


def test_warnings_come_below_the_answer(cluster):
    both = io.StringIO()
    wide = ("--set", "search.max_node_hours=null")
    assert app.run(["check", "job.yaml", *wide], screen=show_screen.Screen(out=both, err=both)) == 0
    assert 0 < both.getvalue().index("probes in") < both.getvalue().index("warning: search.max_node_hours is not set")


def test_a_folder_of_runs_that_is_not_there_is_reported(cluster):
    failed = tula("list", "--run-dir", "nowhere")
    assert failed.code == 2 and "--run-dir nowhere: this folder does not exist" in failed.err


def test_a_file_in_place_of_the_folder_of_runs_is_reported(cluster):
    Path("afile").touch()
    for command in ("list", "clean"):
        failed = tula(command, "--run-dir", "afile")
        assert failed.code == 2 and "--run-dir afile: this is a file" in failed.err
    failed = tula("check", "job.yaml", "--run-dir", "afile")
    assert f"Not a directory: {Path('afile').absolute()} is a file" in failed.err
    assert "HINT: choose another folder" in failed.err and failed.code == 1


def test_check_takes_the_name_of_a_run(here):
    run = RunDir.create(here / "tula-runs", make.spec())
    make.add_probes(run, 1, (32,))
    before = tula("check", "--offline", str(run.path), "--json").json
    assert before["error"] is None and before["run_id"] == run.id
    by_name = tula(
        "check", "--offline", run.id.rpartition("-")[0], "--json", "--set", "train.epochs=7", "--show-origin"
    )
    assert by_name.json["error"] is None and by_name.json["run_id"] == run.id
    assert by_name.json["overrides"] == ["train.epochs=7"]


def test_list(cluster):
    assert tula("list").out == "there are no runs in tula-runs; tula profile creates one\n"
    tula("profile", "job.yaml")
    assert newest().id in tula("list").out
    listed = tula("list", "--json").json["data"]
    assert [run["id"] for run in listed] == [newest().id]


@pytest.mark.parametrize(
    ("words", "replacement"),
    [
        (("list", "--accuracy"), "show predicted and actual values of the trainings of a run"),
        (("profile", "job.yaml", "--progress"), "train with --set train.diagnostics=[gradient_noise]"),
    ],
)
def test_a_removed_option_names_what_replaces_it(cluster, words, replacement):
    refused = tula(*words)
    assert (refused.code, refused.out) == (2, "")
    assert f"tula {words[0]}: option {words[-1]} was removed" in refused.err and replacement in refused.err
    assert tula(*words, "--json").json["error"]["code"] == "spec"
    assert words[-1] not in tula(words[0], "--help").out


def test_logs(cluster):
    tula("profile", "job.yaml")
    assert tula("logs").err.endswith("the jobs have not written a log yet\n")
    assert tula("logs", "--job", "probe-n002").err.endswith("job probe-n002 has not written a log yet\n")
    path = newest().get_log_path("probe-n002", 1)
    path.parent.mkdir()
    path.write_text("one\ntwo [bold]\n")
    shown = tula("logs")
    assert shown.out == "one\ntwo [bold]\n"
    assert "==> tula-runs/toy-" in shown.err
    assert tula("logs", "-n", 1).out == "two [bold]\n"
    assert tula("logs", "--job", "probe-n002", "--follow").out == shown.out
    rows = [json.loads(line) for line in tula("logs", "--json").out.splitlines()]
    assert [row["text"] for row in rows] == ["one", "two [bold]"]
    assert tula("logs", "--job", "probe-n2").code == 2
    assert [(row["task"], row["attempt"], row["rank"]) for row in rows] == [("probe-n002", 1, 0)] * 2
    assert tula("logs", "--rank", "7").code == 2
    assert tula("logs", "--all").out == shown.out


def test_cancel(cluster):
    cluster.launcher = Here("hangs")
    tula("profile", "job.yaml", "--no-wait")
    ended = tula("cancel", newest().id, "--yes")
    assert ended.code == 0
    assert ended.out == "cancelled probe-n001, probe-n002\n"
    assert cluster.launcher.cancelled == ["probe-n001", "probe-n002"]
    assert "no job was queued" in tula("cancel").out
    assert {job["state"] for job in tula("status", "--json").json["data"]["jobs"]} == {"cancelled"}


# --- init


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_init_writes_a_spec_that_can_be_checked_but_not_over_another(cluster, kind):
    assert tula("init", kind, "-o", "new.yaml").code == 0
    assert tula("check", "new.yaml", "--offline").code == 0
    Path("new.yaml").write_text("mine")
    refused = tula("init", kind, "-o", "new.yaml")
    assert refused.code == 2
    assert "already exists" in refused.err
    assert Path("new.yaml").read_text() == "mine"
    assert tula("init", kind, "-o", "new.yaml", "--force").code == 0
    assert Path("new.yaml").read_text() != "mine"


def test_init_writes_all_keys_if_asked(cluster):
    for name, options in {"short.yaml": (), "full.yaml": ("--full",)}.items():
        assert tula("init", "-o", name, *options).code == 0
    short, full = Path("short.yaml").read_text(), Path("full.yaml").read_text()
    assert full.endswith((ROOT / "templates/job.yaml").read_text().replace("job.yaml", "full.yaml"))
    assert len(short.splitlines()) <= 40 and yaml.safe_load(short) == yaml.safe_load(full)


@pytest.mark.parametrize("source", [(), ("slurm",), ("--from-command", "python train.py -b 8 --lr 0.1 --epochs 3")])
def test_init_shows_commands_with_the_name_of_the_file_that_a_shell_reads(here, source):
    (here / "train.py").write_text("import torch.distributed\n")
    answer = tula("init", *source, "-o", "my job.yaml", "--full")
    text = (here / "my job.yaml").read_text()
    assert "tula check 'my job.yaml'" in answer.out
    assert "tula check 'my job.yaml'" in text and "job.yaml, " not in text.replace("'my job.yaml'", "")
    assert ("made up" in text) == (source == ()), "only the example has a price"


def test_init_says_which_method_the_job_has_and_why(cluster):
    written = tula("init", "-o", "new.yaml", "--json")
    line = written.json["data"]["method_line"]
    assert line.startswith("method ramp, the default because")
    assert "train.method is ramp: batch and learning rate grow over the first epochs" in written.err
    method = "train.method is lrs: the large batch with a scaled learning rate.\n"
    missing = tula("init", "-o", "own.yaml", "--from-command", COMMAND).err
    assert "warning: script.command: train.py is not in " in missing and method in missing
    Path("train.py").touch()
    assert tula("init", "-o", "own.yaml", "--from-command", COMMAND, "--force").err == method
    assert describe_training_method(load_spec(Path("new.yaml"))) == line


def test_init_writes_the_hooks_of_a_script_once(here):
    before = (here / "job.yaml").read_text()
    assert "tula.step(samples=len(x), loss=loss)" in tula("init", "--hooks").out
    compile((here / "tula_hooks.py").read_text(), "tula_hooks.py", "exec")
    assert (here / "job.yaml").read_text() == before
    refused = tula("init", "--hooks")
    assert refused.code == 2 and "tula_hooks.py already exists" in refused.err
    assert tula("init", "--hooks", "--force").code == 0
    assert tula("init", "--hooks", "--from-command", "x").code == 2
    assert tula("init", "--hooks", "--from-sbatch", "x").code == 2


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("--hooks -o other.py", "--output"),
        ("--hooks --output job.yaml", "--output"),
        ("--hooks --full", "--full"),
        ("slurm --hooks", "slurm"),
        ("local --from-sbatch job.sbatch", "local"),
    ],
)
def test_an_option_of_init_without_effect_is_refused(here, words, option):
    answer = tula("init", *words.split(), "--force")
    assert (answer.code, answer.err.startswith(f"error: {option} ")) == (2, True), answer.err
    assert not (here / "tula_hooks.py").exists() and not (here / "other.py").exists()


@pytest.mark.parametrize(
    ("words", "root"), [([], "~/tula-observed"), (["--folder", "tula-observed"], "here"), (["--folder", "~/x"], "~/x")]
)
def test_the_folder_of_installed_hooks_is_the_given_one(here, words, root):
    answer = tula("observe", "--install", "hooks", *words, "--json").json
    assert answer["data"]["root"] == (str(here / "tula-observed") if root == "here" else root)


def test_init_asks_the_scheduler_where_there_is_one(monkeypatch):
    assert "SLURM was not found here" in tula("init", "slurm", "-o", "alone.yaml").err
    message = (
        "main*|up|1:00:00|1-infinite|4|idle|16|64000|(null)\nfast|up|1:00:00|1-infinite|2|idle|16|64000|gpu:a100:4\n"
    )
    monkeypatch.setattr(site, "query_site", lambda: site.Site(site.parse_partitions(message), ()))
    answer = tula("init", "slurm", "-o", "new.yaml")
    assert "filled in from SLURM: partition main: 4 nodes (no GPUs, 16 CPUs), at most 60 min" in answer.err
    assert "fast has GPUs" in answer.err
    assert yaml.safe_load(Path("new.yaml").read_text())["cluster"]["slurm"]["partition"] == "main"
    assert tula("check", "new.yaml", "--offline").code == 0
    assert "filled" not in tula("init", "local", "-o", "local.yaml").err


def test_init_names_the_partitions_to_choose_from_where_none_is_the_default(monkeypatch):
    message = (
        "main|up|1:00:00|1-infinite|4|idle|16|64000|(null)\nfast|up|1:00:00|1-infinite|2|idle|16|64000|gpu:a100:4\n"
    )
    monkeypatch.setattr(site, "query_site", lambda: site.Site(site.parse_partitions(message), ()))
    answer = tula("init", "slurm", "-o", "new.yaml")
    assert "SLURM has no default partition. Set cluster.slurm.partition to one of main, fast." in answer.err


COMMAND = "torchrun --nproc-per-node 2 train.py --batch-size 64 --lr 0.1 --epochs 90"


def test_init_writes_a_job_around_a_command_and_tells_what_it_recognised(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})  # 2 nodes of 2 processes
    answer = tula("init", "-o", "new.yaml", "--from-command", COMMAND)
    assert answer.code == 0
    assert "--batch-size 64  ->  {local_batch}\n--lr 0.1         ->  {lr}\n" in answer.out
    optional = "{out} in script.command, script.dataset_size, script.resume, script.metric, script.save"
    assert f"Not found in the command (optional): {optional}\n" in answer.out
    assert "(required)" not in answer.out
    assert "wrote new.yaml; next: tula check new.yaml" in answer.out
    checked = tula("check", "new.yaml", "--offline", "--json").json["data"]["report"]
    assert [job["batches"] for job in checked["jobs"]] == [[64, 128, 256, 512, 1024], [64, 256, 1024]]
    assert tula("init", "-o", "new.yaml", "--from-command", COMMAND).code == 2


def test_init_from_a_command_tells_what_is_required_yet():
    line = COMMAND.partition(" --lr")[0]
    answer = tula("init", "slurm", "-o", "new.yaml", "--from-command", line, "--json")
    data = answer.json["data"]
    assert data["recognised"] == {"--batch-size": {"value": "64", "placeholder": "local_batch"}}
    assert (data["complete"], data["kind"]) == (False, "slurm")
    assert [key["key"] for key in data["missing"] if key["required"]] == ["script.length"]
    shown = tula("init", "slurm", "-o", "new.yaml", "--from-command", line, "--force")
    assert "Not found in the command (required): script.length, length of the training: {epochs: N}" in shown.out
    assert "next: add the required keys, then run tula check new.yaml" in shown.out
    assert tula("check", "new.yaml", "--offline").code == 2


def test_init_tells_what_it_understood_in_the_envelope_too():
    message = tula("init", "-o", "new.yaml", "--from-command", f"uv run {COMMAND} > log", "--json").json["data"][
        "understood"
    ]
    words = "2 processes per node, 64 samples per process: global batch 128; 90 epochs; learning rate 0.1"
    assert (message["summary"], message["processes_per_node"], message["wrapper"]) == (words, 2, ["uv", "run"])
    assert message["options"] == {"--nproc-per-node 2": "2 processes per node"} and message["left_out"] == ["> log"]


def test_init_from_a_script_of_sbatch_is_a_job_of_slurm():
    script = ROOT / "tests/fixtures/sbatch/typed/resnet_torchrun.sbatch"
    answer = tula("init", "-o", "new.yaml", "--from-sbatch", str(script))
    assert answer.code == 0
    assert (
        "understood: 2 nodes, 4 processes per node, 64 samples per process: global batch 512; 90 epochs" in answer.out
    )
    assert "left out: --output=logs/%x-%j.out: tula decides this for each of its jobs" in answer.out
    assert tula("init", "-o", "new.yaml", "--force", "--from-sbatch", "nowhere.sbatch").code == 2
    assert tula("init", "-o", "new.yaml", "--force", "--from-sbatch", str(script), "--from-command", "x").code == 2


def test_init_asks_on_a_terminal_what_the_command_does_not_tell(monkeypatch):
    line = "torchrun --nproc_per_node=$N train.py --train_batch_size 64 --lr 0.1"
    assert tula("init", "-o", "new.yaml", "--from-command", line).code == 2
    answers = io.StringIO("many\n4\nall\n30\n")
    answers.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", answers)
    answer = tula("init", "-o", "new.yaml", "--from-command", line)
    assert answer.code == 0, answer.err
    assert "'many' is not an integer of at least 1" in answer.err
    assert "is this the batch of one process, or of all 4? [one/all]" in answer.err
    assert "understood: 4 processes per node: global batch 64; 30 epochs; learning rate 0.1" in answer.out
    monkeypatch.setattr("sys.stdin", type("Gone", (io.StringIO,), {"isatty": lambda _: True})(""))
    assert tula("init", "-o", "other.yaml", "--from-command", line).code == 2
    assert not Path("other.yaml").exists()


def test_init_refuses_a_command_without_a_batch_and_writes_nothing():
    refused = tula("init", "-o", "new.yaml", "--from-command", "python train.py --lr 0.1 --bz 8", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "spec")
    assert "its options are --lr, --bz" in refused.json["error"]["message"]
    assert "--bz {local_batch}" in refused.json["error"]["hint"]
    assert not Path("new.yaml").exists()


# --- check, its memory


def test_check_shows_what_would_be_searched_and_cost(cluster):
    checked = tula("check", "job.yaml")
    assert checked.code == 0
    assert "data: 300 samples to train on, 50 to evaluate, of shape 1x8x8, 10 classes" in checked.out
    assert "32 64 128 256" in checked.out
    assert "node-h" in checked.out
    assert tula("check", "job.yaml", "--json").json["data"]["report"]["inspection"]["dataset_size"] == 300


def test_check_fails_where_nothing_can_run(cluster):
    over = tula("check", "job.yaml", "--set", "search.max_node_hours=0.1", "--json")
    assert over.code == 8
    assert "search.max_node_hours is 0.1" in over.json["error"]["message"]
    assert over.json["data"]["report"]["node_hours_at_most"] > 0.1


def test_check_shows_where_values_come_from(cluster, monkeypatch):
    monkeypatch.setenv("TULA_SPEC_TRAIN__SEED", "7")
    shown = tula("check", "job.yaml", "--offline", "--show-origin", "--set", "pricing.price=3", "--json")
    origins = shown.json["data"]["origins"]
    assert origins["pricing.price"] == {"value": 3.0, "source": "--set"}
    assert origins["train.seed"] == {"value": 7, "source": "TULA_SPEC_TRAIN__SEED"}
    assert origins["train.epochs"]["source"] == "job.yaml"
    assert origins["train.precision"] == {"value": "fp32", "source": "default"}
    text = tula("check", "job.yaml", "--offline", "--show-origin", "--set", "pricing.price=3").out
    assert any(line.split() == ["pricing.price", "3.0", "--set"] for line in text.splitlines())


def test_check_estimates_the_memory(cluster):
    cluster.inspection = inspection(footprints=tuple(make_footprint(Truth(), local) for local in (1, 8)))
    shown = tula("check", "job.yaml", "--memory", "1GiB")
    assert shown.code == 0
    assert "400 MiB at every batch size, and 2.00 MiB more per sample" in shown.out
    assert [line.split()[-1] for line in shown.out.splitlines() if line.strip().startswith(("16 ", "256 "))] == [
        "yes",
        "yes",
    ]
    assert "with 10 % of 1.00 GiB kept free, the largest local batch is 260" in shown.out
    data = tula("check", "job.yaml", "--memory", "512MiB", "--json").json["data"]
    assert data["largest_local_batch"] == 30
    refused = tula("check", "job.yaml", "--memory", "much")
    assert refused.code == 2
    assert "--memory: must be a size such as 16GiB or 800MB, got 'much'" in refused.err
    for other in ("--offline", "--show-origin", "--on-cluster", "--rehearse"):
        refused = tula("check", "job.yaml", "--memory", "1GiB", other)
        assert refused.code == 2 and "Traceback" not in refused.err, refused.err


def test_check_estimates_the_memory_by_what_the_run_of_the_job_has_measured(cluster):
    cluster.inspection = inspection(footprints=tuple(make_footprint(Truth(), local) for local in (1, 8)))
    assert "corrected" not in tula("check", "job.yaml", "--memory", "1GiB").out
    tula("profile", "job.yaml")
    assert "corrected by" in tula("check", "job.yaml", "--memory", "1GiB").out
    assert tula("check", "job.yaml", "--memory", "1GiB", "--json").json["data"]["probes"] > 1
    assert "corrected" not in tula("check", "job.yaml", "--memory", "1GiB", "--run-dir", "elsewhere").out


@pytest.mark.parametrize(
    ("words", "replacement"),
    [
        (("estimate",), "tula check job.yaml --memory 32GiB"),
        (("estimate", "job.yaml"), "tula check job.yaml --memory 32GiB"),
        (("estimate", "job.yaml", "--memory", "1GiB"), "tula check job.yaml --memory 32GiB"),
        (("estimate", "--help"), "tula check job.yaml --memory 32GiB"),
        (("schema",), "tula init writes .tula/job.schema.json"),
        (("schema", "site", "--out", "site.schema.json"), ".tula/site.schema.json beside the job file"),
        (("schema", "--help"), "tula init"),
    ],
)
def test_a_removed_command_names_what_replaces_it(here, words, replacement):
    refused = tula(*words)
    assert (refused.code, refused.out) == (2, "")
    assert replacement in refused.err and "Traceback" not in refused.err
    assert tula(*words, "--json").json["error"]["code"] == "spec"
    assert f"\n  {words[0]} " not in tula("--help").out
    assert not (here / "site.schema.json").exists()


def test_check_on_cluster_shows_the_nodes_and_the_network(cluster):
    answer = tula("check", "job.yaml", "--on-cluster")
    assert answer.code == 0
    for text in ("n1", "n2", "1 x A100", "10.0.0.1", "ib0", "1.60 Gbit/s each way, as measured with nccl"):
        assert text in answer.out
    assert "warning: The nodes differ in torch: 2.6 on n1; 2.7 on n2" in answer.err
    again = tula("check", "job.yaml", "--on-cluster", "--json").json
    assert again["data"]["report"]["id"] == "check-n002-2"
    assert again["data"]["report"]["transfers"][1]["speed"] == 1.6e9
    assert again["warnings"]


@pytest.mark.parametrize(
    ("fails", "code", "words"),
    [
        ("folder", 6, "n2 does not share the run directory"),
        ("user", 6, "no interface ib7"),
        ("vanishes", 6, "ended before its ranks reported"),
    ],
)
def test_check_on_cluster_fails_as_its_job_does(cluster, monkeypatch, fails, code, words):
    monkeypatch.setitem(BACKENDS, "local", dataclasses.replace(BACKENDS["local"], file_lag=0.05))
    cluster.launcher = Here(fails)
    answer = tula("check", "job.yaml", "--on-cluster")
    assert (answer.code, words in answer.err) == (code, True), answer.err


def test_check_on_cluster_is_pending_when_its_time_is_over_and_attaches_again(cluster):
    cluster.launcher = Here("hangs")
    for _ in range(2):
        answer = tula("check", "job.yaml", "--on-cluster", "--timeout", "0.05")
        assert answer.code == 75
        assert "follow the job" in answer.err
    assert cluster.launcher.submitted == ["check-n002-1"]
    assert answer.err.count("check-n002-1 on 2 nodes: running") == 1


def test_check_on_cluster_goes_on_when_interrupted(cluster, monkeypatch):
    cluster.launcher = Here("hangs")

    def interrupt(*_, **__):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(services_nodes, "watch_node_check", interrupt)
    answer = tula("check", "job.yaml", "--on-cluster")
    assert answer.code == 130
    assert "check-n002-1 continues" in answer.err
    assert cluster.launcher.cancelled == []


@pytest.mark.parametrize(
    "options", [["--nodes", "2"], ["--timeout", "1"], ["--on-cluster", "--offline"], ["--on-cluster", "--show-origin"]]
)
def test_options_that_would_do_nothing_are_refused(cluster, options):
    assert tula("check", "job.yaml", *options).code == 2
    assert cluster.launcher.submitted == []


# --- the boundary


@pytest.mark.parametrize(
    ("error", "code"),
    [(TulaError("x"), 1), (SpecError("x"), 2), (Infeasible("x"), 3), (JobFailed("x"), 6)],
)
def test_an_error_keeps_its_code_in_text_and_json(cluster, monkeypatch, error, code):
    def fail(spec):
        raise error

    monkeypatch.setattr(cluster_inspection, "inspect", fail)
    assert tula("profile", "job.yaml").code == code
    failed = tula("profile", "job.yaml", "--json")
    assert failed.code == code
    assert failed.json["run_id"]
    assert failed.json["error"]["message"] == "x"
    assert not Path("tula-runs").exists(), "what was refused leaves nothing behind"


def test_a_defect_is_not_swallowed(cluster, monkeypatch):
    def fail(spec):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(cluster_inspection, "inspect", fail)
    with pytest.raises(ZeroDivisionError):
        tula("profile", "job.yaml")


def test_a_second_check_builds_nothing_unless_it_is_to(cluster, monkeypatch):
    assert "building the model" in tula("check", "job.yaml").err
    monkeypatch.setattr(cluster_inspection, "inspect", lambda spec: pytest.fail("it was built anew"))
    for command in (
        ("check", "job.yaml"),
        ("profile", "job.yaml", "--dry-run"),
        ("profile", "job.yaml", "-y", "--wait"),
    ):
        answer = tula(*command)
        assert answer.code == 0
        assert "sizes measured" in answer.err and "building" not in answer.err
    monkeypatch.setattr(cluster_inspection, "inspect", lambda spec: inspection(warnings=("built anew",)))
    assert "built anew" in tula("check", "job.yaml", "--fresh").err


def test_every_command_has_the_common_flags():
    runner = CliRunner()
    commands = [
        "init",
        "check",
        "profile",
        "recommend",
        "train",
        "status",
        "list",
        "logs",
        "cancel",
        "clean",
    ]
    for command in commands:
        text = runner.invoke(app.app, [command, "--help"]).output
        assert all(flag in text for flag in ("--json", "--quiet", "--verbose", "--no-color")), command
    text = runner.invoke(app.app, ["--help"]).output
    assert all(f"  {command} " in text for command in commands)


# --- as a process


def process(*arguments, cwd, stdout=subprocess.PIPE, **environment):
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-m", "tula_cli", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=cwd, stdout=stdout, stderr=subprocess.PIPE, text=True, env=variables, preexec_fn=restore_sigint
    )


def ended(*arguments, cwd, **environment):
    started = process(*arguments, cwd=cwd, **environment)
    out, err = started.communicate(timeout=60)
    return Answer(started.returncode, out, err)


def test_version(here):
    assert ended("--version", cwd=here).out == f"tula {__version__}\n"


def test_a_failure_as_a_process(here):
    failed = ended("status", "--json", cwd=here)
    assert failed.code == 2
    assert failed.json["error"]["message"].startswith("no run under")
    assert failed.err.startswith("error: no run under")


def test_a_defect_as_a_process_shows_its_traceback_and_an_envelope(here):
    run = RunDir.create(here / "tula-runs", make.spec())
    (run.path / "metrics.py").write_text("")
    (here / "sitecustomize.py").write_text(
        "import sys\nfrom tula_cli.services import run_list\n"
        "def fail(*_, **__): raise ZeroDivisionError('ours')\nrun_list.list_runs = fail\n"
    )
    failed = ended("list", "--json", cwd=here, PYTHONPATH=os.pathsep.join([str(here), str(ROOT)]))
    assert failed.code == 1
    assert "Traceback" in failed.err
    assert "ZeroDivisionError: ours" in failed.json["error"]["message"]


def test_an_error_of_the_users_own_code_is_not_called_a_defect_of_tula(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("import json\ndef ask(): json.loads('x')\ndef call(function): function()\n")
    space = {}
    exec(compile(path.read_text(), str(path), "exec"), space)

    def where(function):
        try:
            function()
        except (ValueError, TypeError, AttributeError) as error:
            return app._find_user_line(error.__traceback__)

    assert where(space["ask"]) == f"{path}, line 2"
    assert where(lambda: space["call"](lambda: app._convert_usage_error(None, []))) == ""


def test_ctrl_c_while_modules_are_imported_exits_without_a_traceback():
    code = (
        "import sys\nfrom tula_cli.__main__ import main\n"
        "class Pressed:\n    def find_spec(self, name, *_):\n        if name == 'tula_cli.show': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Pressed())\nmain()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize("words", ["--help", "status", "status --json"])
def test_141_where_the_reader_leaves(here, words):
    RunDir.create(here / "tula-runs", make.spec())
    started = process(*words.split(), cwd=here)
    started.stdout.close()
    assert started.wait(timeout=60) == 141
    assert started.stderr.read() in ("", f"run {newest().path.relative_to(here)} (the newest)\n")
    started.stderr.close()


@pytest.mark.parametrize("words", ["status", "status --json", "--version", "list --json"])
def test_13_an_answer_on_a_full_disk(here, words):
    RunDir.create(here / "tula-runs", make.spec())
    with open("/dev/full", "w") as full:
        started = process(*words.split(), cwd=here, stdout=full)
        _, err = started.communicate(timeout=60)
    assert started.returncode == DiskFull.exit_code
    assert "error: cannot write the output: No space left on device\n" in err and "Traceback" not in err


def test_an_error_keeps_its_exit_code_where_it_cannot_be_written(here):
    with open("/dev/full", "w") as full:
        for words in ("recommend nothing", "recommend nothing --json"):
            started = process(*words.split(), cwd=here, stdout=full)
            assert started.wait(timeout=60) == SpecError.exit_code
            assert "Traceback" not in started.stderr.read()
            started.stderr.close()


def test_a_usage_error_shows_what_to_type(here):
    observed = tula("observe", "python", "train.py", "--batch-size", "64")
    assert observed.code == 2 and "HINT: put -- before the command: tula observe -- python" in observed.err
    assert "HINT: tula diff [OPTIONS] RUN_A RUN_B" in tula("diff", "a").err
    assert "--nodes -1: must be at least 1" in tula("train", "--nodes", "-1").err


def test_init_writes_into_no_missing_folder(here):
    answer = tula("init", "-o", "missing/job.yaml")
    assert answer.code == 2 and "folder missing does not exist" in answer.err and not Path("missing").exists()


def test_a_missing_script_is_named(here):
    answer = tula("init", "-o", "new.yaml", "--from-command", "python nothere.py --lr 0.1")
    assert answer.code == 2 and "nothere.py does not exist in " in answer.err


def test_an_error_keeps_its_exit_code_when_its_reader_leaves(here):
    started = process("recommend", "nothing", "--json", cwd=here)
    started.stdout.close()
    assert started.wait(timeout=60) == SpecError.exit_code
    assert started.stderr.read().splitlines()[0] == "error: no such file: nothing"
    started.stderr.close()


def test_an_error_keeps_its_exit_code_when_nobody_reads_it(here):
    started = process("recommend", "nothing", cwd=here)
    started.stderr.close()
    assert started.wait(timeout=60) == SpecError.exit_code
    started.stdout.close()


def test_a_closed_stdin_is_no_terminal(here, monkeypatch):
    """Python has none where the shell has closed it (`<&-`), and a confirmation asks whether it is a terminal."""
    for name, value in (("argv", ["tula", "list"]), ("excepthook", sys.excepthook), ("stdin", None)):
        monkeypatch.setattr(sys, name, value)
    with pytest.raises(SystemExit):
        app.main()
    assert sys.stdin is not None and not sys.stdin.isatty()


@pytest.mark.parametrize(("words", "code"), [("list --json", 0), ("recommend nothing --json", SpecError.exit_code)])
def test_a_closed_stdout_is_no_error(here, words, code):
    command = f"{shlex.join([sys.executable, '-m', 'tula_cli'])} {words} >&-"
    done = subprocess.run(
        ["bash", "-c", command], cwd=here, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)


@pytest.mark.parametrize(
    "encoding",
    [{"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
)
def test_a_terminal_without_letters_to_draw_with_shows_others(here, encoding):
    RunDir.create(here / "tula-runs", make.spec())
    shown = ended("list", cwd=here, **encoding)
    assert shown.code == 0, shown.err
    *_, head, rule, _ = shown.out.splitlines()
    assert rule == "-" * len(head)


@pytest.mark.parametrize("words", ["list", "status", "--help"])
def test_columns_in_which_nothing_can_be_shown_count_as_not_given(here, words):
    RunDir.create(here / "tula-runs", make.spec())
    shown = [ended(words, cwd=here, COLUMNS=columns).out for columns in ("", "0", "19")]
    assert shown[0] == shown[1] == shown[2] and len(shown[0]) > 60


def test_what_a_stream_cannot_write_takes_as_many_columns(here):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show_screen.replace_missing_letters(stream)
    stream.write("━ 1 ± 2 ─ ★ € x\udcff y\ud800")
    stream.flush()
    assert stream.buffer.getvalue() == b"- 1 ~ 2 - * ? x\xff y?"


def test_a_folder_that_is_gone_is_reported(here):
    folder = here / "gone"
    folder.mkdir()
    tula = shlex.join([sys.executable, "-m", "tula_cli"])
    done = subprocess.run(
        ["bash", "-c", f"rmdir {folder}; {tula} status"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == SpecError.exit_code and "Traceback" not in done.stderr
    assert "error: the current folder was deleted" in done.stderr


def test_ctrl_c_as_a_process(here):
    run = RunDir.create(here / "tula-runs", make.spec())
    make.add_probes(run, 1, (32,))
    path = run.get_log_path("probe-n001", 1)
    path.parent.mkdir()
    path.write_text("one\n")
    (here / "sitecustomize.py").write_text(
        "from tula_cli.cluster import local\nfrom tula_cli.cluster.scheduler import SchedulerState\n"
        "local.LocalLauncher.query_states = lambda self, run, jobs: {job.id: SchedulerState('running') for job in jobs}\n"
    )
    variables = {"PYTHONPATH": os.pathsep.join([str(here), str(ROOT)]), "PYTHONUNBUFFERED": "1"}
    started = process("logs", "--follow", cwd=here, **variables)
    assert started.stdout.readline() == "one\n"
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "Traceback" not in err


def cpu_seconds(*command, cwd):
    """Return the CPU seconds that a command takes."""
    before = os.times()
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_help_waits_for_little_more_than_typer(here):
    commands = ("-c", "import typer"), ("-m", "tula_cli", "--help")
    # One after the other, and the least of each: what other processes do slows both.
    rounds = [[cpu_seconds(sys.executable, *command, cwd=here) for command in commands] for _ in range(5)]
    typer, ours = map(min, zip(*rounds, strict=True))
    assert ours < 2 * typer + 0.05


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        ("--help", set()),
        ("check job.yaml --offline", {"pydantic", "yaml", "rich"}),
        ("status", {"pydantic", "yaml", "rich"}),
        ("list", {"pydantic", "rich"}),
        ("logs", {"pydantic", "yaml", "rich"}),
        ("cancel", {"pydantic", "yaml", "rich"}),
    ],
)
def test_no_command_imports_what_it_does_not_need(here, words, allowed):
    run = RunDir.create(here / "tula-runs", make.spec())
    make.add_probes(run, 1, (32,))
    heavy = {"torch", "numpy", "scipy", "pandas", "statsmodels", "kneed", "submitit"}
    heavy |= {"pydantic", "yaml", "rich"}
    code = (
        f"import sys; from tula_cli.cli import app; app.run({words.split()}); "
        f"extras = [name for name in sys.modules if name.startswith('tula_cli.extras')]; "
        f"print('imported:', *sorted({heavy - allowed} & set(sys.modules)), *extras, file=sys.stderr)"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, env=environ)
    assert done.stderr.endswith("imported:\n"), done.stderr


@pytest.mark.parametrize(
    ("words", "imported"),
    [
        ("recommend", set()),
        ("recommend --objective cost --json", set()),
        ("recommend --explain", {"statsmodels"}),
        ("status --json", set()),
        ("check job.yaml --offline", set()),
        ("profile job.yaml --set search.strategy=adaptive --dry-run", set()),
        ("train --dry-run", set()),
        ("list", set()),
        ("logs", set()),
    ],
)
def test_statsmodels_is_imported_to_explain_alone(here, words, imported):
    run = RunDir.create(here / "tula-runs", make.spec())
    for result in make_probes(Truth(noise=0.01), {1: (16, 32, 64), 2: (16, 32, 64)}):
        run.write_result(result)
    code = (
        f"import sys; from tula_cli.cli import app; code = app.run({words.split()}); "
        "print('exit', code, *sorted({'statsmodels', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, env=environ)
    _, outcome, *value = done.stderr.splitlines()[-1].split()
    assert set(value) == imported, done.stderr
    assert outcome == "0" or not words.startswith(("recommend", "status", "check", "list")), done.stderr


# --- several types of nodes

TYPES = {
    "single": {"pricing": {"price": 1.0}},
    "pair": {"cluster": {"gpus_per_node": 2}, "pricing": {"price": 1.7}},
}


@pytest.fixture
def two_types(here, cluster, monkeypatch):
    """A job on two types of nodes; `fails` says what goes wrong on each."""
    (here / "job.yaml").write_text(yaml.safe_dump({**make.SPEC, "node_types": TYPES}, sort_keys=False))
    cluster.launchers = {gpus: Here() for gpus in (1, 2, 4)}  # their jobs have the same names
    monkeypatch.setattr(
        cluster_launcher, "make_launcher", lambda spec, **_: cluster.launchers[spec.cluster.gpus_per_node]
    )
    return cluster


def parts():
    return {part.type: part for part in open_runs_of_job(newest())}


def test_all_types_are_measured_compared_and_trained_on(two_types):
    profiled = tula("profile", "job.yaml", "--json")
    assert profiled.code == 0
    assert set(profiled.json["data"]["types"]) == {"single", "pair"}
    assert [two_types.launchers[gpus].submitted for gpus in (1, 2)] == [["probe-n001", "probe-n002"]] * 2
    assert {result.gpus_per_node for result in parts()["pair"].read_results()} == {2}
    answer = tula("recommend", "--objective", "time", "--json").json["data"]
    assert {row["type"] for row in answer["rows"]} == {"single", "pair"}
    assert answer["choice"]["type"] == "pair", "twice the GPUs at the same speed each"
    assert (
        tula("recommend", "--objective", "time", "--type", "single", "--json").json["data"]["choice"]["type"]
        == "single"
    )
    tula("recommend", "--objective", "time")
    trained = tula("train", "--json")
    assert trained.code == 0
    assert parts()["pair"].list_train_signatures() and not parts()["single"].list_train_signatures()
    assert tula("train", "--type", "single").code == 0
    assert parts()["single"].list_train_signatures()


def test_the_same_command_does_not_measure_a_type_again(two_types, here):
    tula("profile", "job.yaml")
    again = tula("profile", "job.yaml")
    assert again.code == 0 and "all probes already have results" in again.err
    more = {**TYPES, "quad": {"cluster": {"gpus_per_node": 4}, "pricing": {"price": 3.0}}}
    (here / "job.yaml").write_text(yaml.safe_dump({**make.SPEC, "node_types": more}, sort_keys=False))
    before = {name: part.path for name, part in parts().items()}
    assert tula("profile", "job.yaml").code == 0
    assert parts().keys() == more.keys() and all(parts()[name].path == path for name, path in before.items())
    assert [len(launcher.submitted) for launcher in two_types.launchers.values()] == [2, 2, 2]
    assert tula("recommend", "--set", "node_types.pair.pricing.price=99").code == 0
    changed = tula("recommend", "--set", "node_types.pair.cluster.gpus_per_node=3")
    assert changed.code == 2 and "changes settings on which the measurements of" in changed.err


def test_the_screens_tell_the_types_apart(two_types):
    plan = tula("profile", "job.yaml", "--dry-run")
    assert plan.out.count("node type ") == 2 and "all node types together: at most 2.00 node-h" in plan.out
    assert "price: 1.7 USD per node-hour" in plan.out
    assert not Path("tula-runs").exists()
    assert "node type pair" in tula("profile", "job.yaml").out
    table = tula("recommend").out
    assert "price: single: 1 USD per node-hour" in table
    assert "1 node of type pair" in tula("recommend", "--explain").out
    shown = tula("status")
    assert shown.out.count("node type ") == 2 and "recommended over all node types: 1 node of type pair" in shown.out
    tula("recommend", "--type", "single", "--save")
    shown = tula("status").out
    assert (
        "over all" not in shown
        and "recommended: 2 nodes of type single, " in shown
        and ", knee, --type single" in shown
    )
    assert set(tula("status", "--json").json["data"]["types"]) == {"single", "pair"}
    counted = {row["id"]: row["measured"] for row in tula("list", "--json").json["data"]}
    assert counted == {part.id: len(part.read_results()) for part in parts().values()}
    assert tula("logs", "--type", "pear").code == 2
    checked = tula("check", "job.yaml", "--json").json["data"]["types"]
    assert checked["pair"]["price"].startswith("1.7 USD")
    assert "add --type single or --type pair" in tula("check", "job.yaml", "--on-cluster").err


def test_the_cap_holds_for_all_types_together(two_types):
    plan = tula("profile", "job.yaml", "--set", "search.max_node_hours=1.5")
    assert plan.code == 8 and "the probes of all 2 node types may take 2.00 node-hours" in plan.err
    assert not any(launcher.submitted for launcher in two_types.launchers.values())
    assert tula("check", "job.yaml", "--set", "search.max_node_hours=1.5").code == 8


def test_cancel_and_interrupts_reach_all_types(two_types):
    two_types.launchers.update({gpus: Here(fails="hangs") for gpus in (1, 2)})
    assert tula("profile", "job.yaml", "--no-wait").code == 0
    started = tula("profile", "job.yaml", "--no-wait", "--json").json["data"]["jobs"]
    assert started == ["single/probe-n001", "single/probe-n002", "pair/probe-n001", "pair/probe-n002"]
    assert tula("profile", "job.yaml", "--timeout", "0.1").code == 75
    assert tula("cancel", "--json").json["data"]["cancelled"] == started


def test_ctrl_c_tells_of_the_jobs_of_all_types(two_types, monkeypatch):
    two_types.launchers.update({gpus: Here(fails="hangs") for gpus in (1, 2)})

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(live.LineDisplay, "update_status", interrupt)
    ended = tula("profile", "job.yaml")
    assert ended.code == 130
    cancels = "; ".join(f"tula cancel tula-runs/{part.id}" for part in parts().values())
    assert f"{cancels} stops them" in ended.err


def test_a_type_without_any_measurement_does_not_hide_the_others(two_types):
    two_types.launchers[2] = Here(fails="memory")
    profiled = tula("profile", "job.yaml", "--json")
    assert profiled.code == 0 and profiled.json["status"] == "partial"
    assert list(profiled.json["data"]["types"]) == ["single"]
    assert "Node type pair: out of memory at the smallest local batch" in profiled.err
    answer = tula("recommend")
    assert answer.code == 0 and "Node type pair is left out. Every probe ran out of memory" in answer.err


def test_a_type_that_nothing_fits_is_left_out_aloud(two_types, monkeypatch):
    large, small = make_footprint(Truth(), 8), make_footprint(Truth(), 16)

    def inspect(spec):
        capacity = 1000 if spec.cluster.gpus_per_node == 2 else None
        return inspection(footprints=(large, small), capacity=capacity)

    for module in (inspecting, services_check):
        monkeypatch.setattr(module, "inspect", inspect)
    left_out = "Node type pair is left out"
    assert left_out in tula("check", "job.yaml").err
    profiled = tula("profile", "job.yaml", "--json")
    assert profiled.code == 0 and list(profiled.json["data"]["types"]) == ["single"]
    assert left_out in profiled.err
    assert tula("check", "job.yaml", "--type", "pair").code == 3


def test_training_needs_a_type_where_none_is_recommended(two_types):
    tula("profile", "job.yaml")
    answer = tula("train")
    assert answer.code == 4 and "--type" in answer.err
    assert tula("train", "--type", "pair", "--nodes", "1", "--batch", "64").code == 0


def test_training_on_a_type_that_recommend_left_out_says_where_the_reason_is(two_types):
    two_types.launchers[2] = Here(fails="user")
    tula("profile", "job.yaml")
    assert "Node type pair is left out" in tula("recommend").err
    answer = tula("train", "--type", "pair")
    assert answer.code == 4 and "run tula recommend, or give both" in answer.err


# --- spot and the Pareto front


def test_spot_is_shown_beside_on_demand_and_trained_at_its_price(cluster, here):
    spot = {"price": 2.0, "spot": {"discount": 0.5, "interruptions_per_day": 1.0}}
    (here / "job.yaml").write_text(yaml.safe_dump({**make.SPEC, "pricing": spot}))
    tula("profile", "job.yaml")
    shown = tula("recommend", "--objective", "cost").out
    assert "on spot, batch" in shown.splitlines()[0]
    assert re.search(r"^the same on demand: .*more expensive", shown, re.MULTILINE)
    assert "cheaper" in shown and "spot 50 % off, 1 interruptions per day and node" in shown
    plan = tula("train", "--dry-run")
    assert "on spot nodes" in plan.out
    task = tula("train", "--dry-run", "--json").json["data"]["plan"]["task"]
    assert {rung["prediction"]["market"] for rung in task["ladder"]} == {"spot"}


def test_rows_of_the_pareto_front_are_marked(cluster):
    tula("profile", "job.yaml")
    front = [row for row in tula("recommend", "--json").json["data"]["rows"] if row["pareto"]]
    rows = [line for line in tula("recommend").out.splitlines() if line.rstrip().endswith(("measured", "predicted"))]
    assert sum("P" in line.split()[:2] for line in rows) == len(front) > 1


def test_a_choice_by_energy_is_refused_where_no_probe_tells_it(cluster):
    tula("profile", "job.yaml")
    refused = tula("recommend", "--objective", "energy")
    assert refused.code == 4 and "needs the energy per step" in refused.err and "Traceback" not in refused.err
    assert {row["kwh"] for row in tula("recommend", "--json").json["data"]["rows"]} == {None}


def test_explain_shows_how_the_fit_was_made_and_the_summaries_of_its_regressions(cluster):
    tula("profile", "job.yaml", "--set", "search.strategy=full")
    plain, explained = tula("recommend"), tula("recommend", "--explain")
    for text in ("fit: step = compute", "coefficient  ", "1 - 1/N", "micro-batch"):
        assert text in explained.out and text not in plain.out
    assert "Regression Results" not in explained.out
    assert "--explain" in plain.out
    without, data = (tula("recommend", "--json", *more).json["data"] for more in ([], ["--explain"]))
    summaries = data.pop("explanation")[""]
    assert {**data, "created_at": 0} == {**without, "created_at": 0}
    assert [each["name"] for each in summaries] == ["step time", "step time by the paper", "memory", "cost"]
    for each in summaries:
        assert each["coefficients"] and all(name in each["summary"] for name in each["coefficients"])
        assert "Regression Results" in each["summary"]
        assert all(item["low"] <= item["value"] <= item["high"] for item in each["coefficients"].values())
    assert 0 < summaries[0]["coefficients"]["slope"]["standard_error"] < 0.5, "the probes tell it"


def test_explain_says_where_probes_are_too_few_for_a_regression(cluster):
    tula("profile", "job.yaml", "--set", "search.nodes=[2]", "--set", "search.strategy=partial")
    explained = tula("recommend", "--explain")
    assert explained.code == 0 and "coefficient  " in explained.out
    assert "probes are too few for 2 coefficients and an error" in explained.out


# --- rounds


def test_an_adaptive_search_goes_round_by_round_and_explains_each(cluster):
    answer = tula("profile", "job.yaml", "--set", "search.strategy=adaptive", "--set", "search.nodes=[1,2,4]")
    assert answer.code == 0 and "next: tula recommend" in answer.out
    assert answer.err.count("start?") == 0
    assert "initial probes: " in answer.err and "Measuring all configurations" in answer.out
    assert answer.err.count("price: ") == 1 and answer.err.count(" probes in ") >= 1, "the whole plan once"
    assert 2 < len(newest().read_results()) < 10
    again = tula("profile", "job.yaml", "--set", "search.strategy=adaptive", "--set", "search.nodes=[1,2,4]")
    assert again.code == 0 and "Measuring all configurations" in again.out and "initial probes: " not in again.err


def test_detached_one_call_is_one_round(cluster):
    words = ("profile", "job.yaml", "--no-wait", "--set", "search.strategy=adaptive", "--set", "search.nodes=[1,2,4]")
    assert tula(*words).code == 0
    first = len(newest().read_results())
    assert "next: run tula profile again; it submits the next round" in tula("status").out
    assert tula(*words).code == 0
    assert first == 4 <= len(newest().read_results())


class FailsAt(Here):
    """One configuration always fails."""

    def __init__(self, nodes, local_batch):
        super().__init__()
        self.place = nodes, local_batch

    def _probe(self, run, task):
        super()._probe(run, task)
        if task.nodes == self.place[0] and self.place[1] in task.local_batches:
            make.add_failed(run, *self.place, "KeyError: 'x'")


ROUNDS = ("--set", "search.strategy=adaptive", "--set", "search.nodes=[1,2,4]")


def test_an_adaptive_search_goes_on_without_a_probe_that_fails(cluster):
    cluster.launcher = FailsAt(4, 8)
    answer = tula("profile", "job.yaml", *ROUNDS, "--json")
    assert answer.json["status"] == "partial" and "Measuring all configurations" in answer.json["data"]["certainty"]
    places = [(probe.nodes, probe.local_batch) for probe in newest().read_results() if probe.kind == "measured"]
    assert (4, 16) in places and (4, 8) not in places, "the next batch stands in for it"
    assert cluster.launcher.submitted.count("probe-n004") < 4, "it is not tried in every round"
    before = len(cluster.launcher.submitted)
    tula("profile", "job.yaml", *ROUNDS)
    assert cluster.launcher.submitted[before:] == ["probe-n004"], "but by the next call"


def test_rounds_end_where_nothing_is_measured_any_more(cluster):
    cluster.launcher = Here("partly")
    answer = tula("profile", "job.yaml", *ROUNDS)
    assert answer.err.count("initial probes: ") >= 1
    assert len(cluster.launcher.submitted) <= 4


ADAPTIVE_SINGLE = ("--set", "node_types.single.search={strategy: adaptive, nodes: [1, 2, 4]}")


def test_a_type_may_search_in_rounds_where_the_job_does_not(two_types):
    answer = tula("profile", "job.yaml", *ADAPTIVE_SINGLE)
    assert answer.code == 0 and len(parts()["single"].read_results()) > 3
    assert "Measuring all configurations" in answer.out


def test_what_fails_on_one_type_does_not_end_the_rounds_of_another(two_types):
    two_types.launchers[2] = Here(fails="partly")
    tula("profile", "job.yaml", *ADAPTIVE_SINGLE)
    assert len(parts()["single"].read_results()) > 3
    assert two_types.launchers[2].submitted == ["probe-n001", "probe-n002"], "that is not tried again in each round"


@pytest.mark.parametrize("words", ["report --html", "diff a"])
def test_a_path_that_cannot_be_used_is_one_error(here, words):
    RunDir.create(here / "tula-runs", make.spec())
    answer = tula(*words.split(), "x" * 300)
    assert (answer.code, answer.err.count("error: "), "Traceback" in answer.err) == (SpecError.exit_code, 1, False)


@pytest.mark.parametrize(
    "words",
    [
        ["status", ""],
        ["cancel", "--run", ""],
        ["clean", ""],
        ["list", "--run-dir="],
        ["check", ""],
        ["observe", "--install", ""],
    ],
)
def test_an_empty_argument_is_not_the_current_folder(here, words):
    run = RunDir.create(here / "tula-runs", make.spec())
    os.chdir(run.path)
    answer = tula(*words)
    assert (answer.code, "an argument is empty" in answer.err) == (SpecError.exit_code, True)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("init -o .", "-o . is a folder"),
        ("init -o new.yaml --from-sbatch /dev/zero", "/dev/zero is larger than 16 MiB"),
        ("logs -n 99999999999", "--lines: must be at most"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named_as_it_is_typed(here, words, error):
    answer = tula(*words.split())
    assert answer.code == SpecError.exit_code and f"error: {error}" in answer.err


def test_a_file_does_not_replace_a_pipe(here):
    os.mkfifo("job")
    assert "is a device or a pipe" in tula("init", "-o", "job", "--force").err
    assert Path("job").is_fifo()


def test_an_argument_of_blanks_is_one_that_a_command_does_not_take(here):
    answer = tula("list", " ")
    assert answer.code == SpecError.exit_code and "tula list does not take the argument" in answer.err


@pytest.mark.parametrize(
    "words", ["logs --lines", "logs --rank", "compare job.yaml --seeds", "train --seeds", "recommend --max-batch"]
)
def test_a_number_that_no_job_has_is_refused_at_once(here, words):
    RunDir.create(here / "tula-runs", make.spec())
    answer = tula(*words.split(), 10**20)
    assert answer.code == SpecError.exit_code and re.search(r"must be at most|not in the range", answer.err)
