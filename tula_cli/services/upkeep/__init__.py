"""What keeps runs usable over the years."""
