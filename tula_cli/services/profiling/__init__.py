"""Measuring in rounds, on each type of node."""
