"""Models of the step time, and of its noise and changes."""
