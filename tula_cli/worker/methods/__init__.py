"""Training methods, one a file."""
