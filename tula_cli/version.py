"""The version of tula, the single source from which the package is built."""

__version__ = "0.1.0"
