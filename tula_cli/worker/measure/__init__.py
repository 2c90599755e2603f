"""Measurements: probes, memory estimates, the inspection of a job and the report of a node."""
