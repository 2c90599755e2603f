"""Many trainings by a plan on a real cluster: never on more nodes than planned, and each to its end."""

import pytest
from driver import Tula, slow_training_options

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.proof]


def test_trainings_of_a_plan_take_turns_on_its_nodes(tula: Tula) -> None:
    short = slow_training_options(tula, 2)
    tula("profile", "job.yaml", "--yes", "--wait", *short)
    plan = tula("recommend", "--trainings", "4", "--max-nodes", "2", "--save")["data"]
    submitted = tula("train", "--seeds", "4", "--yes", "--no-wait")
    assert submitted["status"] == "pending" and len(submitted["data"]["trainings"]) == 4
    jobs = {job["id"] for job in tula("status")["data"]["jobs"] if job["kind"] == "train"}
    assert len(jobs) == 4, "status lists all"
    ended = tula("train", "--seeds", "4", "--yes", "--wait")["data"]
    assert [row["seed"] for row in ended["trainings"]] == [0, 1, 2, 3]
    assert all(row["summary"] for row in ended["trainings"]) and ended["cost"] > 0
    run = tula.run()
    spans = [(attempt.started_at, attempt.ended_at or 0.0, task.nodes)
             for task in run.read_tasks() if task.job in jobs for attempt in run.read_attempts_of_task(task)]  # fmt: skip
    assert len(spans) == 4, "each was trained once"
    in_use = [sum(nodes for begin, end, nodes in spans if begin <= moment < end) for moment, _, _ in spans]
    assert max(in_use) <= 2
    if any(wave["side_by_side"] > 1 for wave in plan["waves"]):
        assert max(in_use) == 2
