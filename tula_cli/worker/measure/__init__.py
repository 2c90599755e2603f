"""Measurements: the probe, memory, the inspection of a job, the report of a node."""
