"""Loops for gradient scaling and orthogonalised steps: SGD or AdamW under DistributedDataParallel, micro-batches, a scaler that skips, a schedule, a closure.

`--by-hand`: the optimizer is wrapped in the loop itself. `--hooks`: the three lines. `--alone`: without DistributedDataParallel.
"""

import argparse
import os
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="")
parser.add_argument("--optimizer", default="SGD")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--resume", default="")
for flag in (
    "alone",
    "by-hand",
    "catching",
    "closure",
    "compressed",
    "fused",
    "hooks",
    "ortho-by-hand",
    "own-reduction",
    "scaler",
    "sync-each",
    "within",
):
    parser.add_argument(f"--{flag}", action="store_true")
arguments = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
if world > 1:
    torch.distributed.init_process_group("gloo")
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
model = net if arguments.alone else DistributedDataParallel(net)
if arguments.compressed:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model.register_comm_hook(None, fp16_compress_hook)
settings = {"SGD": {"momentum": 0.9}, "AdamW": {}}[arguments.optimizer]
if arguments.fused:
    settings["fused"] = True
optimizer = getattr(torch.optim, arguments.optimizer)(net.parameters(), lr=0.05, **settings)
micro = 8 // arguments.accumulate
if arguments.by_hand:
    from tula_cli.optim import PRESETS, TulaOptimizer, configure_ags

    target = "gradient" if arguments.optimizer == "SGD" else "update"
    made = configure_ags({**PRESETS["robust"], "apply_to": target})
    optimizer = TulaOptimizer(optimizer, model=model, b_large=8 * world, b_small=4, available=micro, **made)
if arguments.ortho_by_hand:
    from tula_cli.optim import Ortho

    if arguments.optimizer == "AdamW":
        optimizer.param_groups[0]["betas"] = (0.9, 0.999**2)
    optimizer = Ortho(optimizer, model=model)
if arguments.hooks:
    import tula_hooks as tula

    optimizer = tula.wrap(optimizer, model)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
scaler = torch.amp.GradScaler("cpu", enabled=arguments.scaler)
first = 0
if arguments.resume:
    state = torch.load(arguments.resume, weights_only=True)
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    first = state["step"]


def batch(step):
    made = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 8, generator=made), torch.randint(4, (8,), generator=made)


def loss_of(network, x, y):
    return nn.functional.cross_entropy(network(x), y)


def backward(step):
    x, y = batch(step)
    for part in range(arguments.accumulate):
        last = part == arguments.accumulate - 1
        if not arguments.alone:
            model.require_backward_grad_sync = last or arguments.sync_each
        value = slice(part * micro, (part + 1) * micro)
        loss = loss_of(net if arguments.within else model, x[value], y[value]) / arguments.accumulate
        scaler.scale(loss * float("inf") if arguments.scaler and step == 1 and last else loss).backward()
    if arguments.own_reduction:
        for parameter in net.parameters():
            torch.distributed.all_reduce(parameter.grad)
    if arguments.hooks:
        tula.small_batch(lambda n: loss_of(net, x[:n], y[:n]))
    return loss


def train(step):
    optimizer.zero_grad(set_to_none=True)
    if arguments.closure:
        optimizer.step(lambda: backward(step))
    else:
        backward(step)
        scaler.step(optimizer)
        scaler.update()
    schedule.step()


for step in range(first, arguments.steps):
    try:
        train(step)
    except RuntimeError:
        if not arguments.catching:
            raise
if arguments.out:
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    torch.save({**state, "step": arguments.steps}, f"{arguments.out}.{rank}")
print("FINISHED", file=sys.stderr)
