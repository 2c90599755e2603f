"""The object of each training method, found by its row of `spec.methods`."""

import functools
import importlib

from tula_cli.spec.job import JobSpec
from tula_cli.spec.methods import METHODS
from tula_cli.worker.methods.plain import Plain


def method_of(spec: JobSpec) -> Plain:
    """Return the object of the job's method; where arms have not parted yet, auto is plain."""
    return found(METHODS[spec.train.method].file)


@functools.cache
def found(file: str) -> Plain:
    """Return the method of a module of this folder."""
    method: Plain = importlib.import_module(f"{__package__}.{file}").METHOD
    return method
