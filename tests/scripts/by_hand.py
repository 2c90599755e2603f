"""A loop that tells its steps: no torch optimizer, no data loader; it saves when it is asked to. `--bare`: without torch at all."""

import json
import os
import sys
import time
from pathlib import Path

import tula_hooks as tula

if "--bare" not in sys.argv:
    import torch

    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")


class Engine:
    """Trains by itself."""

    def parameters(self):
        return []


state = {"steps": 0}
rank = os.environ.get("RANK", "0")
engine = tula.wrap(Engine(), Engine())
tula.save(lambda path: Path(f"{path}.{rank}").write_text(json.dumps(state)))
for _ in range(int(sys.argv[1])):
    time.sleep(0.002)
    state["steps"] += 1
    tula.step(samples=4, loss=1 / state["steps"], lr=0.5)
print("FINISHED", file=sys.stderr)
