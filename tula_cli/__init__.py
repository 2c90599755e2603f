"""tula: choose the nodes and the batch size of a distributed training job by measuring it."""
