"""The job spec and the values derived from it."""
