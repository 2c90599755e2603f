"""Hooks into torch: data loaders, DistributedDataParallel, optimizers, and the exit of a process by an exception."""
