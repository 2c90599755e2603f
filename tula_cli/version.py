"""The version of tula, the single source from which the package is built, and the format of its runs."""

__version__ = "0.1.0"

RUN_FORMAT = 2
"""Format of the runs that this version creates; increased by a change that an older version would fail on or damage.

The names of runs and trainings depend on it, so that no version starts or continues anything in a run of another format.
"""
