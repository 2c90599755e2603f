"""Configurations, and how one is chosen."""
