"""The object of each training method, found by its row of `spec.methods`, or by the import string of the user's own."""

import functools
import importlib

from tula_cli import plugins
from tula_cli.errors import SpecError
from tula_cli.spec.job import JobSpec
from tula_cli.worker.methods.plain import Plain


def get_method(spec: JobSpec) -> Plain:
    """Return the object of the job's method; where arms have not parted yet, auto is plain.

    Raises:
        SpecError: one of the user's own is not there, or no method.
    """
    file = spec.train.facts.file
    return load_user_method(file) if plugins.is_import_string(file) else load_method(file)


@functools.cache
def load_method(file: str) -> Plain:
    """Return the method of a module of this folder."""
    method: Plain = importlib.import_module(f"{__package__}.{file}").METHOD
    return method


def load_user_method(name: str) -> Plain:
    """Return the user's own method: an object as it is, or of a class a new one, so that each training has its own.

    Raises:
        SpecError: the import string leads to nothing, or to no method.
    """
    target = plugins.load(name, {}, kind="training method")
    if isinstance(target, type) and issubclass(target, Plain):
        try:
            return target()
        except TypeError as error:
            raise SpecError(
                f"train.method {name}: its class cannot be made without arguments: {error}",
                "name an object of it in its place: METHOD = Method(...)",
            ) from error
    if isinstance(target, Plain):
        return target
    description = f"class {target.__name__}" if isinstance(target, type) else f"of type {type(target).__name__}"
    raise SpecError(
        f"train.method {name} is no training method but {description}",
        "derive it from tula_cli.worker.methods.plain.Plain; name the class, or an object of it",
    )
