"""The job spec and what derives from it."""
