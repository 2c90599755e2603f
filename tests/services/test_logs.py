import errno
import os
import shutil
import time
import tracemalloc

import make_runs as make
import pytest

from tula_cli.errors import SpecError, TulaError
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.records.failures import Failure
from tula_cli.services import logs
from tula_cli.services.logs import LogQuery

NOISE = "[W1124 00:14:54.1 socket.cpp:755] [c10d] The hostname of the client socket cannot be retrieved. err=-3\n"


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path / "tula-runs", make.spec())


def write_log(run, task, number, text, *, index=0):
    path = run.get_log_path(task, number, index)
    path.parent.mkdir(exist_ok=True)
    with open(path, "a") as file:
        file.write(text)
    return path


def texts(lines):
    return [line.text for line in lines]


def test_logs_of_the_newest_attempt(run):
    make.add_probes(run, 1, (32,))
    write_log(run, "probe-n001", 1, "old\n")
    newest = write_log(run, "probe-n001", 2, "one\ntwo\nthree")
    lines = list(logs.read_logs(run))
    assert texts(lines) == ["one", "two", "three"]
    assert {line.file for line in lines} == {newest}
    assert texts(logs.read_logs(run, LogQuery(last=1))) == ["three"]
    assert texts(logs.read_logs(run, LogQuery(last=0))) == []


def test_logs_of_one_job(run):
    make.add_probes(run, 1, (32,))
    make.add_probes(run, 2, (16,))
    write_log(run, "probe-n001", 1, "first\n")
    write_log(run, "probe-n002", 1, "second\n")
    assert texts(logs.read_logs(run, LogQuery(job="probe-n001"))) == ["first"]


def test_logs_of_a_job_in_a_copy_of_its_run(run, tmp_path):
    make.add_probes(run, 1, (32,))
    write_log(run, "probe-n001", 1, "said\n")
    (job,) = run.read_jobs()
    run.write_job(job.model_copy(update={"folder": str(run.path.resolve())}))
    copy = RunDir(shutil.copytree(run.path, tmp_path / "copy"))
    assert copy.read_snapshot().jobs == [] and texts(logs.read_logs(copy, LogQuery(job="probe-n001"))) == ["said"]
    variant = Run(copy.path, make.spec())
    assert logs.find_last_written_run([variant], "probe-n001") is variant
    assert logs.find_last_written_run([variant], "probe-n002") is None


def test_logs_of_an_unknown_job_name_the_nearest(run):
    make.add_probes(run, 1, (32,))
    with pytest.raises(SpecError, match="no job 'probe-n01'") as caught:
        list(logs.read_logs(run, LogQuery(job="probe-n01")))
    assert "probe-n001" in caught.value.hint


def test_logs_that_are_no_text_are_shown_all_the_same(run):
    make.add_probes(run, 1, (32,))
    path = write_log(run, "probe-n001", 1, "")
    path.write_bytes(b"caf\xe9\r\n")
    assert texts(logs.read_logs(run)) == ["caf\ufffd"]


def test_a_log_that_may_not_be_read_is_named(run, monkeypatch):
    path = write_log(run, "probe-n001", 1, "one\n")

    def refused(_):  # root may read whatever the mode says
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(logs, "open_file", refused)
    with pytest.raises(TulaError, match=f"cannot read {path}: Permission denied") as error:
        list(logs.read_logs(run))
    assert error.value.hint == f"make it readable: chmod u+r {path}"


def test_a_log_that_is_removed_after_it_is_listed(run, monkeypatch):
    make.add_probes(run, 1, (32,))
    log = write_log(run, "probe-n001", 1, "first\n")
    listed = [run.get_log_path("gone", 1), log]
    monkeypatch.setattr(RunDir, "list_logs", lambda _: listed)
    assert logs.find_last_written_run([run], None) is run
    assert texts(logs.read_logs(run)) == ["first"]
    assert logs.describe_missing_output(run, LogQuery()).endswith("job with output: tula logs --job probe-n001")


def test_no_logs_yet(run):
    assert list(logs.read_logs(run)) == []


def test_empty_log_of_an_ended_job_names_the_job_with_output(run):
    make.add_probes(run, 1, (32,))
    make.add_probes(run, 2, (16,))
    write_log(run, "probe-n002", 1, "")
    run.write_attempt(make.attempt("probe-n002"))
    assert logs.describe_missing_output(run, LogQuery()) == "probe-n002 has not written a line yet"
    run.write_attempt(make.attempt("probe-n002", end=make.START + 5))
    assert logs.describe_missing_output(run, LogQuery()) == "probe-n002 has ended without output"
    os.utime(write_log(run, "probe-n001", 1, "first\n"), (1, 1))
    assert logs.describe_missing_output(run, LogQuery()) == (
        "probe-n002 has ended without output. The newest job with output: tula logs --job probe-n001"
    )


def test_following_sees_what_is_added_and_the_log_of_a_relaunch(run):
    make.add_probes(run, 1, (32,))
    write_log(run, "probe-n001", 1, "one\nhal")
    steps = iter(
        [
            lambda: write_log(run, "probe-n001", 1, "f\n"),
            lambda: write_log(run, "probe-n001", 2, "again\nlast"),
            lambda: None,
        ]
    )
    remaining = iter([True, True, True, False])
    lines = logs.read_logs(run, follow=True, may_grow=lambda: next(remaining), sleep=lambda _: next(steps)())
    assert texts(lines) == ["one", "half", "again", "last"]


def test_a_scheduler_is_not_asked_at_every_look():
    now, requested = [0.0], []
    check = logs.make_rate_limited_check(lambda: bool(requested.append(now[0])) or True, pause=10, clock=lambda: now[0])
    for now[0] in (0.0, 0.5, 9.9, 10.0, 11.0):
        assert check()
    assert requested == [0.0, 10.0]


def fail(run, task, number, rank, *, at, outcome="user", detail="Traceback\n  line\nKeyError: 'x'"):
    run.write_failure(
        Failure(
            task=task, attempt=number, rank=rank, host=f"node{rank}", pid=1, outcome=outcome,
            message="KeyError: 'x'", detail=detail, failed_at=at,
        )
    )  # fmt: skip


@pytest.fixture
def slurm(tmp_path):
    """A run on SLURM, of two nodes with a supervisor each."""
    cluster = {"kind": "slurm", "gpus_per_node": 1, "slurm": {"account": "a"}}
    run = RunDir.create(tmp_path / "tula-runs", make.spec(cluster=cluster))
    make.add_probes(run, 2, (16,))
    return run


def test_rank_0_is_shown_although_another_wrote_last(slurm):
    first = write_log(slurm, "probe-n002", 1, "one\n")
    other = write_log(slurm, "probe-n002", 1, "two\n", index=1)
    os.utime(first, (1, 1))
    assert texts(logs.read_logs(slurm)) == ["one"]
    (line,) = logs.read_logs(slurm, LogQuery(rank=1))
    assert (line.text, line.file, line.task, line.attempt, line.rank) == ("two", other, "probe-n002", 1, 1)
    with pytest.raises(SpecError, match="--rank 2: no log of this rank") as refused:
        list(logs.read_logs(slurm, LogQuery(rank=2)))
    assert refused.value.hint == "ranks are 0 to 1"


def test_each_rank_on_slurm_has_a_log_of_its_own(tmp_path):
    cluster = {"kind": "slurm", "gpus_per_node": 2, "slurm": {"account": "a"}}
    for spec in (make.spec(cluster=cluster), make.script_spec(cluster, epochs=2)):
        run = RunDir.create(tmp_path / "tula-runs", spec)
        make.add_probes(run, 2, (16,))
        for rank, text in enumerate(("zero", "[rank1]: one", "two without a tag", "[rank3]: three")):
            write_log(run, "probe-n002", 1, f"{text}\n", index=rank)
        results = [texts(logs.read_logs(run, LogQuery(rank=rank))) for rank in range(4)]
        assert results == [["zero"], ["[rank1]: one"], ["two without a tag"], ["[rank3]: three"]]
        assert texts(logs.read_logs(run)) == ["zero"], "of rank 0, where no rank is asked for"
        with pytest.raises(SpecError, match="--rank 4: no log of this rank"):
            list(logs.read_logs(run, LogQuery(rank=4)))


def test_the_lines_of_a_rank_in_a_log_that_several_share(run):
    make.add_probes(run, 2, (16,))
    write_log(run, "probe-n002", 1, "zero\n[rank1]: one\nzero again\n")
    assert texts(logs.read_logs(run)) == ["zero", "[rank1]: one", "zero again"]
    assert texts(logs.read_logs(run, LogQuery(rank=0))) == ["zero", "zero again"]
    assert texts(logs.read_logs(run, LogQuery(rank=1))) == ["[rank1]: one"]
    assert [line.rank for line in logs.read_logs(run)] == [0, 1, 0]


def test_a_scripts_lines_are_of_no_rank_and_shown_for_each(tmp_path):
    run = RunDir.create(tmp_path / "tula-runs", make.script_spec(epochs=2))
    make.add_probes(run, 2, (16,))
    write_log(run, "probe-n002", 1, "said by some rank\n")
    for rank in (None, 0, 1):
        assert [(line.text, line.rank) for line in logs.read_logs(run, LogQuery(rank=rank))] == [
            ("said by some rank", None)
        ]


def test_ranks_of_a_script_that_starts_them_share_the_log_of_their_node(tmp_path):
    cluster = {"kind": "slurm", "gpus_per_node": 2, "slurm": {"account": "a"}}
    spec = make.script_spec(cluster, epochs=2)
    by_node = spec.model_copy(update={"script": spec.script.model_copy(update={"launch": "node"})})
    run = RunDir.create(tmp_path / "tula-runs", by_node)
    make.add_probes(run, 2, (16,))
    for node in range(2):
        write_log(run, "probe-n002", 1, f"from node {node}\n", index=node)
    for rank, node in enumerate((0, 0, 1, 1)):
        (line,) = logs.read_logs(run, LogQuery(rank=rank))
        assert (line.text, line.rank) == (f"from node {node}", None)
    with pytest.raises(SpecError, match="--rank 4: no log of this rank") as refused:
        list(logs.read_logs(run, LogQuery(rank=4)))
    assert refused.value.hint == "ranks are 0 to 3"


def test_what_torch_says_of_addresses_without_a_name_is_left_out(run):
    make.add_probes(run, 1, (32,))
    write_log(run, "probe-n001", 1, f"one\n{NOISE}two\n{NOISE.replace('hostname', 'port')}")
    assert texts(logs.read_logs(run)) == ["one", "two", NOISE.replace("hostname", "port").strip()]


def test_why_the_first_rank_failed_comes_first_and_whole(run):
    make.add_probes(run, 2, (16,))
    run.write_attempt(make.attempt("probe-n002", end=make.START + 9, outcome="user", message="KeyError: 'x'"))
    log = write_log(run, "probe-n002", 1, "begun\n")
    fail(run, "probe-n002", 1, 0, at=2.0, outcome="peer", detail="lost its peer")
    fail(run, "probe-n002", 1, 1, at=3.0)
    lines = list(logs.read_logs(run))
    assert texts(lines) == ["Traceback", "  line", "KeyError: 'x'", "begun"]
    assert [line.failure for line in lines] == [True] * 3 + [False]
    assert logs.describe_log_origin(run, lines[0]) == "rank 1 on node1 failed first in attempt 1 of probe-n002 (user)"
    assert logs.describe_log_origin(run, lines[-1]).startswith(f"{log}: attempt 1 of probe-n002 on ")
    assert logs.describe_log_origin(run, lines[-1]).endswith(": user (KeyError: 'x')")
    assert texts(logs.read_logs(run, LogQuery(rank=0))) == ["lost its peer", "begun"]


def test_every_attempt_apart(run):
    make.add_probes(run, 1, (32,))
    old, new = time.time() - 7200, time.time()
    for number, at in ((1, old), (2, old), (3, new)):
        run.write_attempt(make.attempt("probe-n001", number=number, start=at))
    os.utime(write_log(run, "probe-n001", 1, "long ago\n"), (old, old))
    write_log(run, "probe-n001", 2, "before\nafter that\n")
    write_log(run, "probe-n001", 3, "newest\n")
    assert [line.attempt for line in logs.read_logs(run, LogQuery(every=True))] == [1, 2, 2, 3]


def test_following_tells_why_a_rank_failed_once(run):
    make.add_probes(run, 1, (32,))
    write_log(run, "probe-n001", 1, "one\n")
    remaining = iter([True, True, False])
    sleeps = iter([lambda: fail(run, "probe-n001", 1, 0, at=1.0), lambda: None])
    lines = logs.read_logs(run, follow=True, may_grow=lambda: next(remaining), sleep=lambda _: next(sleeps)())
    assert texts(lines) == ["one", "Traceback", "  line", "KeyError: 'x'"]


def _peak_of(call):
    """Return what a call returns, and the most memory that Python held in it (bytes)."""
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


STAMP = "2026-11-25 09:31:39+0000 epoch 1, {} ms a step\n"
# a large log, made by the test that reads it, and the last two lines of it that are shown (of their ends alone)
LARGE = [
    ("lines", lambda: "".join(map(STAMP.format, range(200_000))), ["199998 ms a step", "199999 ms a step"]),
    ("one line", lambda: "x" * 8_000_000, ["x", "x"]),
    ("a progress bar", lambda: "".join(f"\r{n}% [####]" for n in range(500_000)), ["%", "499999% [####]"]),
    ("zeros of a lost node", lambda: "\0" * 8_000_000 + "\nthe end\n", ["", "the end"]),
    ("a last line without its end", lambda: "line\n" * 1_000_000 + "the end", ["line", "the end"]),
    ("empty lines", lambda: "\n" * 5_000_000, ["", ""]),
    ("lines of Windows", lambda: "line\r\n" * 1_000_000, ["line", "line"]),
    ("no text", lambda: "\udcff\udcfe\n" * 1_000_000, ["\ufffd\ufffd", "\ufffd\ufffd"]),
]


@pytest.mark.parametrize(("make_text", "ends"), [row[1:] for row in LARGE], ids=[row[0] for row in LARGE])
@pytest.mark.parametrize("follow", [False, True])
def test_the_last_lines_are_read_from_the_end(run, make_text, ends, follow):
    make.add_probes(run, 1, (32,))
    path = write_log(run, "probe-n001", 1, "")
    path.write_bytes(make_text().encode(errors="surrogateescape"))
    read = lambda: texts(logs.read_logs(run, LogQuery(last=2), follow=follow))  # noqa: E731
    shown, peak = _peak_of(read)
    assert len(shown) == 2 and all(end in line for line, end in zip(shown, ends, strict=True))
    assert peak < 2_000_000


def test_a_whole_large_log_is_not_held_in_memory(run):
    make.add_probes(run, 1, (32,))
    write_log(run, "probe-n001", 1, "".join(map(STAMP.format, range(100_000))))
    count, peak = _peak_of(lambda: sum(1 for _ in logs.read_logs(run)))
    assert count == 100_000 and peak < 2_000_000


def test_the_last_lines_of_several_attempts(run):
    make.add_probes(run, 1, (32,))
    write_log(run, "probe-n001", 1, "2026-01-01 08:00:00+0000 a\nb\n")
    os.utime(run.get_log_path("probe-n001", 1), (1e9, 1e9))
    newest = write_log(run, "probe-n001", 2, "2026-01-01 09:00:00+0000 c\nd\n2026-01-01 10:00:00+0000 e\nf\n")
    assert texts(logs.read_logs(run, LogQuery(last=5, every=True))) == [
        "b", "2026-01-01 09:00:00+0000 c", "d", "2026-01-01 10:00:00+0000 e", "f",
    ]  # fmt: skip
    assert texts(logs.read_logs(run, LogQuery(last=2, every=True))) == ["2026-01-01 10:00:00+0000 e", "f"]
    assert newest.exists()


# what happens to a log that is followed, and what is shown of it then
CHANGES = [
    ("it grows", lambda path: path.open("a").write("new\n"), ["new"]),
    ("it is cut", lambda path: path.write_text("tail\n"), []),
    ("it is cut to nothing and grows", lambda path: (path.write_text(""), None), []),
    ("it is replaced", lambda path: (path.with_name("x").write_text("another\n"), path.with_name("x").replace(path)), ["another"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "more"), [row[1:] for row in CHANGES], ids=[row[0] for row in CHANGES])
def test_a_log_that_changes_while_it_is_followed(run, change, more):
    make.add_probes(run, 1, (32,))
    path = write_log(run, "probe-n001", 1, "one\ntwo\nthree\n")
    steps = iter([lambda: change(path), lambda: path.open("a").write("after\n")])
    active = iter([True, True, False])
    shown = logs.read_logs(
        run, LogQuery(last=1), follow=True, may_grow=lambda: next(active), sleep=lambda _: next(steps)()
    )
    assert texts(shown) == ["three", *more, "after"]
