"""tula: choose the nodes and the batch size of a distributed training job by measuring it."""

__version__ = "0.1.0"
