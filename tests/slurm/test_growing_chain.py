"""A training on SLURM whose nodes become more with its batch: each link asks for those of its stage, whatever happens between."""

import json
import os
import shutil
import signal
from collections import Counter

import pytest
import seen_samples
from cluster import SlurmCluster
from driver import Tula
from seen_samples import EPOCHS, SIZE
from test_recovery import attempts, queue, submit

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.proof]
RAMP = [{"epochs": 1, "batch": 8, "nodes": 1}, {"epochs": 1, "batch": 16, "nodes": 2}]


def grown(tula: Tula, *, pause: float = 0.0) -> None:
    """Submit a training of one epoch on one node, one on two, and one on four."""
    text = seen_samples.JOB.replace("[1, 2]", "[1, 2, 4]")
    cluster = "cluster: {kind: slurm, device: cpu, minutes: 10, slurm: {memory: 1500M}}\n"
    (tula.folder / "job.yaml").write_text(text + cluster)
    shutil.copy(seen_samples.__file__, tula.folder)
    model = f"model={{name: 'seen_samples:Watching', args: {{pause: {pause}}}}}"
    submit(tula, "--nodes", "4", "--batch", "32", "--set", f"train.ramp={json.dumps(RAMP)}", "--set", model)


def over(tula: Tula) -> bool:
    run = tula.run()
    result = all(attempt.outcome for attempt in attempts(tula))
    return result and any(run.get_training(name).read_summary() for name in run.list_train_signatures())


def nodes_of(tula: Tula) -> list[int]:
    """Return the nodes that each attempt had, by what its task says, held against those that its ranks had."""
    run = tula.run()
    tasks = {task.id: task.nodes for task in run.get_training(run.list_train_signatures()[0]).read_tasks()}
    return [tasks[attempt.task] for attempt in attempts(tula)]


def test_links_have_the_nodes_of_their_stages_and_every_sample_is_trained_once_an_epoch(tula: Tula) -> None:
    grown(tula)
    (job,) = tula.run().read_jobs()
    assert sorted({*job.link_nodes}) == [1, 2, 4] and list(job.link_nodes) == sorted(job.link_nodes)
    tula.wait_until(lambda: over(tula))
    assert [attempt.outcome for attempt in attempts(tula)] == ["stage_end", "stage_end", "done"]
    assert nodes_of(tula) == [1, 2, 4]
    links = [attempt.allocation.partition(".")[0] for attempt in attempts(tula)]
    assert [job.get_nodes(link) for link in links] == [1, 2, 4]
    assert links == [job.links[job.link_nodes.index(nodes)] for nodes in (1, 2, 4)], "nobody waits for surplus links"
    assert seen_samples.count_samples(tula.folder) == Counter(dict.fromkeys(range(SIZE), EPOCHS))
    worlds = Counter((row["world"], len(row["samples"])) for row in seen_samples.read_batches(tula.folder))
    assert worlds == {(1, 8): SIZE // 8, (2, 8): 2 * SIZE // 16, (4, 8): 4 * SIZE // 32}
    data = tula("status")["data"]
    assert [row["nodes"] for row in data["attempts"]] == [1, 2, 4]
    (row,) = data["jobs"]
    assert [link["nodes"] for link in row["links"]] == list(job.link_nodes) and row["nodes"] == 4
    tula.wait_until(lambda: not queue().strip())


def test_ranks_killed_at_a_change_of_nodes_train_every_sample_all_the_same(tula: Tula, on_slurm: SlurmCluster) -> None:
    grown(tula, pause=0.3)
    log = tula.folder / "seen.jsonl"
    tula.wait_until(lambda: log.exists() and len(log.read_text().splitlines()) >= SIZE // 8)
    for pid in [pid for name in on_slurm.names for pid in on_slurm.processes(name, "tula_cli.worker")]:
        os.kill(pid, signal.SIGKILL)
    tula.wait_until(lambda: over(tula))
    outcomes = [attempt.outcome for attempt in attempts(tula)]
    assert outcomes[-1] == "done" and outcomes.count("stage_end") == 2, outcomes
    assert nodes_of(tula) == sorted(nodes_of(tula)) and {*nodes_of(tula)} == {1, 2, 4}
    result = tula.run().get_training(tula.run().list_train_signatures()[0]).read_result()
    assert (
        result is not None and result.samples == EPOCHS * SIZE and result.steps == SIZE // 8 + SIZE // 16 + SIZE // 32
    )
    every = seen_samples.count_samples(tula.folder)
    assert set(every) == set(range(SIZE)) and min(every.values()) == EPOCHS
    assert sum(every.values()) - EPOCHS * SIZE <= 3 * 8, "what was trained past the newest checkpoint is trained again"


def test_tula_cancel_ends_the_links_of_all_stages(tula: Tula) -> None:
    grown(tula, pause=0.5)
    tula.wait_until(lambda: (tula.folder / "seen.jsonl").exists())
    tula("cancel")
    tula.wait_until(lambda: not queue().strip())
    tula.wait_until(lambda: [attempt.outcome for attempt in attempts(tula)] == ["cancelled"])
    (job,) = tula.run().read_jobs()
    assert tula.run().is_cancelled(job.id)
