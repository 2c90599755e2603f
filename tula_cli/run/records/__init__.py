"""The records of a run directory: immutable, one JSON file each."""
