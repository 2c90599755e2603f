"""A job whose model records the samples that each rank trains, to check that no sample is lost or repeated when nodes change."""

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

SIZE, EPOCHS = 96, 3
JOB = f"""
name: seen
model: {{name: 'seen_samples:Watching'}}
dataset: {{name: 'seen_samples:Numbered'}}
optimizer: {{name: SGD, lr: 0.05, momentum: 0.9}}
train: {{method: lrs, epochs: {EPOCHS}, reference_batch: 8, workers: 0, checkpoint_every: 1e-9}}
search: {{nodes: [1, 2], max_node_hours: 5, strategy: sweep}}
"""


def read_batches(folder: Path) -> list[dict[str, Any]]:
    """Return the recorded batches of the training."""
    lines = (folder / "seen.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def count_samples(folder: Path) -> Counter[int]:
    """Return how often each sample was trained."""
    return Counter(index for row in read_batches(folder) for index in row["samples"])


try:
    import torch
except ImportError:  # the process of the tests does not need torch
    pass
else:

    class Numbered(torch.utils.data.Dataset):  # type: ignore[type-arg]
        """Samples that contain their index."""

        def __init__(self, train: bool) -> None:
            self.size = SIZE if train else 4

        def __len__(self) -> int:
            return self.size

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            noise = torch.randn(6, generator=torch.Generator().manual_seed(index))
            return torch.cat([torch.tensor([float(index)]), noise]), index % 3

    class Watching(torch.nn.Module):
        """A small network that appends its rank and the indices of each training batch to a file."""

        def __init__(self, num_classes: int = 3, pause: float = 0.0) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(6, num_classes)
            self.pause = pause

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and "RANK" in os.environ:
                time.sleep(self.pause)
                indices = [int(index) for index in x[:, 0].tolist()]
                row = {"rank": int(os.environ["RANK"]), "world": int(os.environ["WORLD_SIZE"]), "samples": indices}
                with open("seen.jsonl", "a", encoding="ascii") as file:
                    file.write(json.dumps(row) + "\n")
            return self.layer(x[:, 1:])
