"""The tables of decisions, row by row: each row has a case in which it decides, and nothing else does."""

from dataclasses import replace
from typing import Any, get_args

import make_runs as make
import pytest

from tula_cli.cluster import decisions
from tula_cli.cluster.decisions import (
    CHECK_RULES,
    EVALUATION_RULES,
    PROBE_RULES,
    RATE_SEARCH_RULES,
    RESUME_TEST_RULES,
    TRAINING_RULES,
    History,
    Rule,
    attribute_failure,
    decide_next_action,
    find_decision_rule,
    is_resumed_by_next_job,
)
from tula_cli.run.records.base import OutcomeClass
from tula_cli.run.records.failures import Failure, Fallback, Relaunch, Requeue, Stop
from tula_cli.run.records.jobs import Attempt
from tula_cli.run.records.recommendations import Stage
from tula_cli.run.records.tasks import (
    MAX_RESTARTS,
    CheckTask,
    EvaluateTask,
    ProbeTask,
    RateSearchTask,
    ResumeTestTask,
    Rung,
    Task,
    TrainTask,
)
from tula_cli.spec.job import JobSpec

FAILURES = get_args(OutcomeClass)
COMMON: dict[str, Any] = {"id": "t-1", "job": "t", "workdir": "/", "nodes": 1}
HALF = Fallback(rung=0, splits=2, batch=64, micro_batch=32, micro_batches=2)


def spec_of(kind: str = "slurm", **train: Any) -> JobSpec:
    return make.spec(train={"epochs": 1, "max_attempts": 3, **train}, cluster={"kind": kind})


def training(kind: str = "slurm", **changes: Any) -> TrainTask:
    ladder = (Rung(batch=64), Rung(batch=32))
    task = TrainTask(**COMMON, spec=spec_of(kind, workers=2), signature="s", attempt=1, ladder=ladder, workers=2)
    return task.model_copy(update=changes)


def probe(kind: str = "slurm", **changes: Any) -> ProbeTask:
    return ProbeTask(**COMMON, spec=spec_of(kind), local_batches=(8, 16)).model_copy(update=changes)


def rehearsal(kind: str = "slurm") -> ResumeTestTask:
    return ResumeTestTask(**COMMON, spec=spec_of(kind), key="k", batch=8)


def evaluation(kind: str = "slurm") -> EvaluateTask:
    where = {"signature": "s", "key": "k", "weights": "best", "path": "/w.pt", "samples": 1, "local_batch": 8}
    return EvaluateTask(**COMMON, spec=spec_of(kind), **where)


def rates(kind: str = "slurm") -> RateSearchTask:
    return RateSearchTask(**COMMON, spec=spec_of(kind), key="k", batches=(64,))


def check(kind: str = "slurm") -> CheckTask:
    return CheckTask(**COMMON, spec=spec_of(kind))


def attempt(outcome: OutcomeClass | None = None, **changes: Any) -> Attempt:
    failure = None if outcome is None else Failure(outcome=outcome, message="so it was")
    fields = {"task": "t-1", "number": 1, "started_at": 100.0, "ended_at": 200.0, "allocation": "11.0", "samples": 96}
    return Attempt(**{**fields, "failure": failure, **changes})


def history(**known: Any) -> History:
    return replace(History(attempt(), allocation="11.0", progress=96, current_batch=8), **known)


def lost(times: int, outcome: OutcomeClass = "signal") -> list[Attempt]:
    return [attempt(outcome) for _ in range(times)]


AT_ONCE = attempt(ended_at=103.0)
GROWS = {"stages": (Stage(begin=0, batch=32, nodes=1), Stage(begin=96, batch=64, nodes=2))}
TWICE = "the same failure occurs twice within 30 s of a start, or after the same samples"
AFTER_STEP = "it is the first failure since the newest checkpoint, after at least one step"
AFTER_STEP_AND_WAITS = f"{AFTER_STEP}, and a later job waits"
SUPERVISORS = "the supervisor has failed `train.max_attempts` times without a newer checkpoint"
PERMANENT = Failure(outcome="user", permanent=True)

Row = tuple[str, str, Task, Failure | None, History, Relaunch | Requeue | Stop]
"""Failure and situation of a row; a case in which it applies; what follows."""


def twice(outcome: OutcomeClass) -> History:
    return history(attempt=AT_ONCE, earlier=[attempt(outcome, ended_at=103.0)])


def f(outcome: OutcomeClass) -> Failure:
    return Failure(outcome=outcome, message="so it was")


TRAININGS: list[Row] = [
    ("none", "always", training(), None, history(), Stop()),
    ("any", "the job is cancelled", training(), f("signal"), history(cancelled=True), Stop(why="cancelled")),
    ("any", "the job is cancelled", training(), f("cancelled"), history(), Stop(why="cancelled")),
    ("any", "a new start would fail too", training(), PERMANENT, history(), Stop()),
    ("any", "the allocation has ended", training(), f("device_oom"), history(allocation_ended=True), Requeue()),
    ("device_oom", "the next stage has more nodes", training(**GROWS), f("device_oom"), history(fallback=HALF),
     Relaunch(nodes=2, nodes_before=1, stage_batch=64)),
    ("device_oom", "a configuration takes less memory", training(), f("device_oom"), history(fallback=HALF), Relaunch(fallback=HALF)),
    ("host_oom", "the number of loader processes can be lowered", training(), f("host_oom"), history(), Relaunch(workers=1, workers_before=2)),
    ("user", AFTER_STEP_AND_WAITS, training(), f("user"), history(reached=128, later_jobs=2), Requeue(after_progress=True)),
    ("user", AFTER_STEP, training(), f("user"), history(reached=128), Relaunch(after_progress=True)),
    ("user", AFTER_STEP, training(), f("user"), history(progress=128), Relaunch(after_progress=True)),
    ("diverged", "the learning rate of the growing batch can be lowered", training(), f("diverged"), history(lr_factor=8.0),
     Relaunch(max_lr_factor=4.0)),
    ("device_fault", "attempts remain, and there is no scheduler", training("local"), f("device_fault"), history(allocation=""), Relaunch()),
    ("device_fault", "attempts remain", training(), f("device_fault"), history(), Requeue(first="exclude")),
    ("device_error", "attempts remain", training(), f("device_error"), history(), Relaunch()),
    ("disk", "always", training(), f("disk"), history(), Requeue(first="hold")),
    ("storage", "attempts remain", training(), f("storage"), history(earlier=lost(5)), Relaunch(pause=True)),
    ("storage", "a later job waits", training(), f("storage"), history(earlier=lost(2, "storage"), later_jobs=1),
     Requeue(first="delay", minutes=10)),
    ("supervisor", TWICE, training(), f("supervisor"), twice("supervisor"), Stop(why="same_failure", seconds=3.0)),
    ("supervisor", SUPERVISORS, training(), f("supervisor"), history(earlier=lost(2, "supervisor")),
     Stop(why="supervisors_failed", count=3)),
    ("supervisor", "always", training(), f("supervisor"), history(earlier=lost(1, "supervisor")), Requeue()),
    ("hung", "attempts remain", training(), f("hung"), history(earlier=lost(1)), Relaunch()),
    ("host_limit", TWICE, training(), f("host_limit"), twice("host_limit"), Stop(why="same_failure", seconds=3.0)),
    ("host_limit", "attempts remain", training(), f("host_limit"), history(), Relaunch(pause=True)),
    ("port", "attempts remain", training(), f("port"), history(earlier=lost(1)), Relaunch()),
    ("time_limit", "the job saved nothing", training(), f("time_limit"), history(of_allocation=[attempt()]),
     Stop(why="nothing_saved", setting="cluster.minutes")),
    ("time_limit", "always", training(), f("time_limit"), history(of_allocation=[attempt(samples=0)]), Requeue()),
    ("time_limit", "always", training(), f("time_limit"), history(of_allocation=[attempt("storage")]), Requeue()),
    ("preempted", "always", training(), f("preempted"), history(), Requeue()),
    ("node_failure", "always", training(), f("node_failure"), history(), Requeue()),
    ("stage_end", "the next stage has more nodes", training(**GROWS), f("stage_end"), history(),
     Relaunch(nodes=2, nodes_before=1, stage_batch=64)),
    ("unknown", TWICE, training(), f("unknown"), history(earlier=[attempt("unknown", reached=128)], reached=128),
     Stop(why="same_failure", samples=128)),
    ("unknown", "attempts remain", training(), f("unknown"), history(earlier=[attempt("unknown", reached=64)], reached=128), Relaunch()),
    ("signal", TWICE, training(), Failure(outcome="signal", signal="SIGSEGV"),
     history(attempt=AT_ONCE, earlier=[attempt(ended_at=103.0, failure=Failure(outcome="signal", signal="SIGBUS"))]),
     Stop(why="same_failure", seconds=3.0)),
    ("signal", "attempts remain", training(), Failure(outcome="signal", signal="SIGKILL"), twice("signal"), Relaunch()),
    ("peer", "attempts remain", training(), f("peer"), history(), Relaunch()),
    ("any", "always", training(), f("user"), history(), Stop()),
    ("any", "always", training(), f("user"), history(reached=128, earlier=lost(1, "user")), Stop()),
    ("any", "always", training(), f("device_oom"), history(), Stop()),
    ("any", "always", training(workers=1), f("host_oom"), history(), Stop()),
    ("any", "always", training(), f("diverged"), history(lr_factor=1.0), Stop()),
    ("any", "always", training(max_lr_factor=4.0), f("diverged"), history(lr_factor=8.0), Stop()),
    ("any", "always", training(), f("stage_end"), history(), Stop()),
    ("any", "always", training(), f("storage"), history(earlier=lost(2, "storage")), Stop()),
    *(("any", "always", training(), f(outcome), history(earlier=lost(2), later_jobs=2), Stop())
      for outcome in ("device_fault", "device_error", "hung", "host_limit", "port", "unknown", "signal", "peer")),
]  # fmt: skip
FINISHED, ENDED = history(finished=True), history(allocation_ended=True)
RECORDED = Stop(why="batch_failed")
PROBES: list[Row] = [
    ("any", "the job has all its results", probe(), f("user"), FINISHED, Stop()),
    ("none", "the job has all its results", probe(), None, FINISHED, Stop()),
    ("none", "the search for the largest batch continues", probe(), None, history(finished=True, next_trial=12), Relaunch()),
    ("none", "always", probe(), None, history(), Relaunch()),
    ("any", "the allocation has ended", probe(), f("time_limit"), ENDED, Stop()),
    ("any", "a new start would fail too", probe(), PERMANENT, history(), Stop()),
    ("device_oom", "the search for the largest batch continues", probe(), f("device_oom"), history(next_trial=4), Relaunch(skip=8)),
    ("device_oom", "always", probe(), f("device_oom"), history(), RECORDED),
    ("device_fault", "attempts remain, and there is no scheduler", probe("local"), f("device_fault"), history(allocation=""), Relaunch()),
    *((outcome, "attempts remain", probe(), f(outcome), history(earlier=lost(1)), Relaunch())
      for outcome in ("device_error", "hung", "port", "unknown", "signal", "peer")),
    *((outcome, "attempts remain", probe(), f(outcome), history(), Relaunch(pause=True)) for outcome in ("storage", "host_limit")),
    ("cancelled", "the job is cancelled", probe(), f("cancelled"), history(cancelled=True), Stop(why="cancelled")),
    ("diverged", "no batch was skipped yet", probe(), f("diverged"), history(), Relaunch(skip=8)),
    ("user", "no batch was skipped yet, and there is a GPU", probe(), f("user"), history(), Relaunch(skip=8)),
    ("any", "always", probe(), Failure(outcome="user", fault="no_gpu"), history(), RECORDED),
    ("any", "always", probe(skip=(8,)), f("user"), history(), RECORDED),
    ("any", "always", probe(skip=(8,)), f("diverged"), history(), RECORDED),
    ("any", "always", probe(), f("cancelled"), history(), RECORDED),  # its minutes were over
    ("any", "always", probe(), f("device_fault"), history(), RECORDED),
    ("any", "always", probe(), f("disk"), history(), RECORDED),
    ("any", "always", probe(), f("signal"), history(earlier=lost(MAX_RESTARTS)), RECORDED),
]  # fmt: skip
REHEARSALS: list[Row] = [
    ("any", "the job has all its results", rehearsal(), f("user"), FINISHED, Stop()),
    ("none", "the job has all its results", rehearsal(), None, FINISHED, Stop()),
    ("none", "always", rehearsal(), None, history(), Relaunch()),
    ("any", "the job is cancelled", rehearsal(), f("user"), history(cancelled=True), Stop(why="cancelled")),
    ("any", "the allocation has ended", rehearsal(), f("time_limit"), ENDED, Stop()),
    ("any", "a new start would fail too", rehearsal(), PERMANENT, history(), Stop()),
    ("supervisor", "always", rehearsal(), f("supervisor"), history(), Stop()),
    ("disk", "always", rehearsal(), f("disk"), history(), Stop()),
    ("storage", "attempts remain", rehearsal(), f("storage"), history(), Relaunch(pause=True)),
    ("host_limit", "attempts remain", rehearsal(), f("host_limit"), history(), Relaunch(pause=True)),
    ("any", "attempts remain", rehearsal(), f("user"), history(), Relaunch()),
    ("any", "always", rehearsal(), f("signal"), history(earlier=lost(MAX_RESTARTS)), Stop()),
]
EVALUATIONS: list[Row] = [
    ("none", "always", evaluation(), None, history(), Stop()),
    ("any", "the allocation has ended", evaluation(), f("signal"), ENDED, Stop()),
    ("any", "a new start would fail too", evaluation(), PERMANENT, history(), Stop()),
    ("device_fault", "attempts remain, and there is no scheduler", evaluation("local"), f("device_fault"), history(allocation=""), Relaunch()),
    *((outcome, "attempts remain", evaluation(), f(outcome), history(earlier=lost(1)), Relaunch())
      for outcome in ("device_error", "hung", "port", "unknown", "signal", "peer")),
    *((outcome, "attempts remain", evaluation(), f(outcome), history(), Relaunch(pause=True))
      for outcome in ("storage", "host_limit")),
    ("any", "always", evaluation(), f("user"), history(), Stop()),
    ("any", "always", evaluation(), f("device_fault"), history(), Stop()),
    ("any", "always", evaluation(), f("signal"), history(earlier=lost(MAX_RESTARTS)), Stop()),
]  # fmt: skip
RATE_SEARCHES: list[Row] = [
    ("none", "the job has all its results", rates(), None, history(finished=True), Stop()),
    ("none", "always", rates(), None, history(), Relaunch()),
    *((kind, situation, rates(task.spec.cluster.kind), failure, known, expected)
      for kind, situation, task, failure, known, expected in EVALUATIONS if kind != "none"),
]  # fmt: skip
CHECKS: list[Row] = [
    ("none", "always", check(), None, history(), Stop()),
    ("any", "the allocation has ended", check(), f("port"), ENDED, Stop()),
    ("port", "attempts remain", check(), f("port"), history(earlier=lost(1)), Relaunch()),
    ("any", "always", check(), f("signal"), history(), Stop()),
    ("any", "always", check(), f("port"), history(earlier=lost(MAX_RESTARTS)), Stop()),
]
TABLES: list[tuple[tuple[Rule, ...], list[Row]]] = [
    (TRAINING_RULES, TRAININGS), (PROBE_RULES, PROBES), (RESUME_TEST_RULES, REHEARSALS), (EVALUATION_RULES, EVALUATIONS),
    (RATE_SEARCH_RULES, RATE_SEARCHES), (CHECK_RULES, CHECKS),
]  # fmt: skip
CASES = [row for _, rows in TABLES for row in rows]


def name_of(row: Row) -> str:
    return f"{row[2].kind}: {'success' if row[3] is None else row[3].outcome}: {row[1]}"


@pytest.mark.parametrize("row", CASES, ids=name_of)
def test_each_row_decides_as_it_says(row: Row) -> None:
    kind, situation, task, failure, known, expected = row
    assert find_decision_rule(task, failure, known)[:2] == (kind, situation)
    assert decide_next_action(task, failure, known) == expected


@pytest.mark.parametrize(("rules", "rows"), TABLES, ids=["train", "probe", "rehearse", "evaluate", "rates", "check"])
def test_every_row_of_the_tables_has_a_case(rules: tuple[Rule, ...], rows: list[Row]) -> None:
    assert {rule[:2] for rule in rules} == {row[:2] for row in rows}


@pytest.mark.parametrize(
    "task", [training(), probe(), rehearsal(), evaluation(), rates(), check()], ids=lambda task: task.kind
)
def test_every_failure_of_every_task_is_decided(task: Task) -> None:
    for outcome in FAILURES:
        assert isinstance(decide_next_action(task, f(outcome), history()), Relaunch | Requeue | Stop)
    assert isinstance(decide_next_action(task, None, history()), Relaunch | Stop)


def test_every_situation_and_action_is_used() -> None:
    rules = [rule for table, _ in TABLES for rule in table]
    assert {rule[1] for rule in rules} == set(get_args(decisions.Situation)) == set(decisions._SITUATIONS)
    assert {rule[2] for rule in rules} == set(get_args(decisions.Action)) == set(decisions._ACTIONS)


@pytest.mark.parametrize(
    ("failure", "known", "outcome"),
    [
        (Failure(outcome="device_fault", fault="no_gpu"), {}, "user"),
        (Failure(outcome="device_fault", fault="no_gpu"), {"has_seen_gpus": True}, "device_fault"),
        (Failure(outcome="device_fault", fault="memory"), {}, "device_fault"),
        (Failure(outcome="device_error"), {}, "device_error"),
        (Failure(outcome="device_error"), {"similar": lost(1, "device_error")}, "user"),
        (Failure(outcome="device_error"), {"similar": lost(1, "peer")}, "device_error"),
    ],
)
def test_what_looks_like_a_fault_of_a_device_may_be_the_programs(
    failure: Failure, known: dict[str, Any], outcome: OutcomeClass
) -> None:
    for task in (training(), probe()):
        attributed = attribute_failure(task, failure, history(**known))
        assert attributed is not None and attributed.outcome == outcome
        assert attributed.permanent == (outcome == "user" and isinstance(task, TrainTask))
    assert attribute_failure(training(), None, history()) is None


@pytest.mark.parametrize(
    ("workers", "configured", "fewer"),
    [("auto", "auto", 2), (2, "auto", 1), (1, "auto", None), (4, 4, 2), (2, 4, None), (0, 0, None)],
)
def test_loader_processes_are_halved_once_or_down_from_auto(workers: Any, configured: Any, fewer: int | None) -> None:
    task = training(workers=workers, spec=spec_of(workers=configured))
    decision = decide_next_action(task, f("host_oom"), history())
    assert decision == (Stop() if fewer is None else Relaunch(workers=fewer, workers_before=workers))


@pytest.mark.parametrize(
    ("last_attempt", "elsewhere"),
    [
        (attempt("signal", decision=Requeue()), True),
        (attempt("time_limit", decision=Stop(why="nothing_saved")), False),
        (attempt("storage", decision=Relaunch(pause=True)), False),
        (attempt("preempted"), True),  # its supervisor was killed before it could decide
        (attempt("device_fault"), True),
        (attempt("device_fault", allocation=""), False),  # on this machine
        (attempt("user"), False),
    ],
)
def test_whether_the_next_job_goes_on(last_attempt: Attempt, elsewhere: bool) -> None:
    assert is_resumed_by_next_job(last_attempt) == elsewhere
