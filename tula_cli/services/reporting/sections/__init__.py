"""The sections of a report, one a module."""
