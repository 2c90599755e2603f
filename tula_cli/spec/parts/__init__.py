"""Sections that stand in other sections."""
