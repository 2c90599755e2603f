"""Candidate configurations, and the choice among them."""
