"""Whether a training goes on as fast as it began, and which part of its steps does not."""
