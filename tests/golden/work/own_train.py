"""A training script that knows nothing of tula: one process, a checkpoint each epoch."""

import argparse
import os
import time

import torch

parser = argparse.ArgumentParser()
for name in ("--batch", "--epochs", "--seed"):
    parser.add_argument(name, type=int, default=0)
parser.add_argument("--lr", type=float)
parser.add_argument("--out", default=".")
parser.add_argument("--resume", default="")
options = parser.parse_args()

torch.manual_seed(options.seed)
model = torch.nn.Linear(16, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
samples = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
labels = samples[:, :3].argmax(1)
first = 0
if options.resume:
    state = torch.load(options.resume, weights_only=True)
    model.load_state_dict(state["model"])
    first = state["epoch"]
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(samples, labels), options.batch, shuffle=True)
for epoch in range(first, options.epochs):
    for inputs, targets in loader:
        time.sleep(0.002 + 0.0001 * len(inputs))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    accuracy = (model(samples).argmax(1) == labels).float().mean().item()
    print(f"epoch {epoch + 1} accuracy {accuracy:.4f}", flush=True)
    draft = os.path.join(options.out, "draft")
    torch.save({"model": model.state_dict(), "epoch": epoch + 1}, draft)
    os.replace(draft, os.path.join(options.out, "checkpoint.pth"))
