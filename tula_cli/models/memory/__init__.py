"""The peak memory of a GPU."""
