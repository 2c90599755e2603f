"""`tula profile --largest` with real ranks and a real memory limit."""

import pytest

# tests/cluster/scripts has a search with the processes of a script
pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.proof]
HOARDER = """
import torch

class Hoarder(torch.nn.Module):
    '''Hoards memory that no estimate can see, so that a probe meets the real limit.'''

    def __init__(self, num_classes=10):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, num_classes))

    def forward(self, x):
        self.hoard = bytearray(len(x) * 8_000_000)
        return self.layers(x.flatten(1))
"""


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_largest_batch_fits_and_the_search_continues_where_it_was_ended(tula, parallel: str) -> None:
    (tula.folder / "mine.py").write_text(HOARDER)
    settings = {
        "model": "{name: 'mine:Hoarder'}",
        "train.method": "lbt",
        "train.parallel": parallel,
        "cluster.memory_per_gpu": "200MB",
        "search.nodes": "[2]",
        "search.min_batch": "16",
        "search.max_batch": "32",
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    answer = tula("profile", "job.yaml", "--largest", *words)["data"]
    fits = {result.local_batch: result.kind for result in tula.run().read_results()}
    assert not answer["failed"] and answer["finished"] and answer["batch"] == 2 * answer["local_batch"]
    assert fits[answer["local_batch"]] == "measured" and fits[answer["too_large"]] == "out_of_memory"
    assert answer["too_large"] == answer["local_batch"] + 1 < 200 / 8
    assert 0 <= answer["headroom"] < 0.3 and answer["local_batch_with_margin"] <= answer["local_batch"]

    (tula.run().path / "results" / f"probe-n002-l{answer['too_large']:06d}.json").unlink()
    attempts = len(tula.run().read_attempts())
    again = tula("profile", "job.yaml", "--largest", *words)["data"]
    assert (again["local_batch"], again["too_large"]) == (answer["local_batch"], answer["too_large"])
    repeated = [attempt.failure.local_batch for attempt in tula.run().read_attempts()[attempts:] if attempt.failure]
    assert answer["too_large"] in repeated, "the trial whose result is missing was repeated"
    assert set(repeated) & set(fits) == {answer["too_large"]}, "no other trial was repeated"
    assert len(tula.run().read_attempts()) == attempts + len(repeated), "no batch that fits was tried again"
