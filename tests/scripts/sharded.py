"""FSDP2: two ranks share the parameters of a network."""

import torch
from torch.distributed.fsdp import fully_shard

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
network = torch.nn.Linear(64, 64)
fully_shard(network)
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(800, 64))
sampler = torch.utils.data.distributed.DistributedSampler(data)
for (x,) in torch.utils.data.DataLoader(data, 4, sampler=sampler):
    network(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
