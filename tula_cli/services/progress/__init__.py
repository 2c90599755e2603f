"""How far runs and their jobs are."""
