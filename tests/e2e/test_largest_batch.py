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
    before = {result.local_batch: result for result in tula.run().read_results()}
    fits = {local_batch: result.kind for local_batch, result in before.items()}
    assert not answer["failed"] and answer["finished"] and answer["batch"] == 2 * answer["local_batch"]
    assert fits[answer["local_batch"]] == "measured" and fits[answer["too_large"]] == "out_of_memory"
    assert answer["too_large"] == answer["local_batch"] + 1 < 200 / 8
    assert 0 <= answer["headroom"] < 0.3 and answer["local_batch_with_margin"] <= answer["local_batch"]

    (tula.run().path / "results" / f"probe-n002-l{answer['too_large']:06d}.json").unlink()
    again = tula("profile", "job.yaml", "--largest", *words)["data"]
    # the memory of a process varies by some MB, so that a batch at the limit may fit once and not the next time
    assert answer["local_batch"] <= again["local_batch"] <= answer["local_batch"] + 2
    assert again["too_large"] == again["local_batch"] + 1
    after = {result.local_batch: result for result in tula.run().read_results()}
    assert answer["too_large"] in after, "the missing trial was repeated"
    repeated = {local_batch for local_batch, result in before.items() if after[local_batch] != result}
    assert repeated <= {answer["too_large"]}, "no trial with a result was repeated"
