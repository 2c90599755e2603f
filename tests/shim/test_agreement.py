"""All ranks do what rank 0 has decided."""

import json
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from tula_cli.shim.tula_shim import ranks as ranks_module
from tula_cli.shim.tula_shim import recorder
from tula_cli.shim.tula_shim.plan import read_plan
from tula_cli.shim.tula_shim.ranks import NoStoreError, broadcast_decision
from tula_cli.shim.tula_shim.supervision import HeartbeatWriter, SaveRequestPoller


class Store(dict[str, bytes]):
    """A stand-in for TCPStore, for ranks that run one after the other."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def wait(self, keys: list[str], patience: timedelta) -> None:
        assert patience > timedelta(minutes=1) and all(key in self for key in keys)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the group; set its `rank` to be another one."""
    store = Store()
    group = SimpleNamespace(rank=0, get_rank=lambda: group.rank)
    monkeypatch.setattr(ranks_module, "get_process_group", lambda: group)
    monkeypatch.setattr(ranks_module, "_get_store", lambda: store)
    return group


class Asked(HeartbeatWriter):
    """Steps of half a second on rank 0; counts who asks for that."""

    asked = 0

    @property
    def median_step_time(self) -> float:
        self.asked += 1
        return 0.5 if self.rank == 0 else 9.0


def test_the_others_take_the_answer_of_rank_0(ranks: SimpleNamespace) -> None:
    assert broadcast_decision("steps", lambda: "12", world=2) == "12"
    ranks.rank = 1
    assert broadcast_decision("steps", lambda: "7", world=2) == "12"


def test_a_single_rank_asks_nobody() -> None:
    assert broadcast_decision("steps", lambda: "7", world=1) == "7"


def test_ranks_that_have_no_store_cannot_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "get_process_group", lambda: None)
    with pytest.raises(NoStoreError):
        broadcast_decision("steps", lambda: "7", world=2)


def test_a_request_is_seen_by_all_ranks_at_the_same_look(ranks: SimpleNamespace, tmp_path: Path) -> None:
    plan = {"version": 1, "task": "t", "folder": str(tmp_path), "mode": "train", "warmup": 2, "save": True}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    seen: list[list[str]] = []
    for ranks.rank in (0, 1):
        pulse = Asked(read_plan(str(tmp_path / "plan.json")))
        pulse.rank = ranks.rank
        requests = SaveRequestPoller(pulse.plan)
        looks = []
        for step in range(1, 13):  # a step takes 0.5 s: a look every 4
            if step == 6 and ranks.rank == 0:
                (tmp_path / "save.json").write_text('{"then": "stop"}')
            if step == 9:
                (tmp_path / "save.json").unlink(missing_ok=True)
            looks.append(requests.poll_request(step, pulse, 2))
        seen.append(looks)
    assert seen[0] == seen[1]
    assert [(number, requested) for number, requested in enumerate(seen[0], 1) if requested] == [(8, "stop")]


@pytest.mark.parametrize("save", [False, True])
def test_a_median_is_taken_where_it_decides_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, save: bool
) -> None:
    monkeypatch.setattr(recorder, "HeartbeatWriter", Asked)
    plan = {"version": 1, "task": "t", "folder": str(tmp_path), "mode": "train", "heartbeat": 3600, "save": save}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    mine = recorder.Recorder(read_plan(str(tmp_path / "plan.json")))
    for _ in range(20):
        mine.after_step(lr=0.1)
    assert isinstance(mine.pulse, Asked) and mine.pulse.asked == 1 + save, "by the heartbeat, and by the first look"


def test_requests_are_off_where_ranks_cannot_agree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ranks_module, "get_process_group", lambda: None)
    plan = {"version": 1, "task": "t", "folder": str(tmp_path), "mode": "train", "warmup": 1, "save": True}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    pulse = Asked(read_plan(str(tmp_path / "plan.json")))
    requests = SaveRequestPoller(pulse.plan)
    assert [requests.poll_request(step, pulse, 2) for step in (1, 2)] == ["", ""]
    assert "cannot be requested" in requests.note
