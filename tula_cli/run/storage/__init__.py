"""The file system that a run lies on: what is free, and what is kept back for the last words."""
