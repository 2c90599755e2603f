"""Parallelism of a model over ranks: a copy (DDP) or a shard (FSDP) of it per rank."""
