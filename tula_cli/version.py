"""The version of tula, in the one place that the package is built from."""

__version__ = "0.1.0"
