"""What is hung into torch: data loaders, DistributedDataParallel, optimizers, and the end of a process by an exception."""
