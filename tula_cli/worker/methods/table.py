"""The object of each training method, found by its row of `spec.methods` or by the import string of a user's method."""

import importlib

from tula_cli import plugins
from tula_cli.errors import SpecError
from tula_cli.spec.job import JobSpec
from tula_cli.worker.methods.plain import Plain


def get_method(spec: JobSpec) -> Plain:
    """Return the job's method object; for method auto this is the plain one before its arms branch.

    Raises:
        SpecError: a user's method cannot be imported, or is not a training method.
    """
    file = spec.train.training_method.file
    return load_user_method(file) if plugins.is_import_string(file) else make_method(file)


def make_method(file: str) -> Plain:
    """Return a new object of the method class of a module of this package."""
    method: Plain = importlib.import_module(f"{__package__}.{file}").METHOD()
    return method


def load_user_method(name: str) -> Plain:
    """Return a user's method: an object unchanged, or a new instance of a class, one for each training.

    Raises:
        SpecError: the import string cannot be resolved, or does not name a method.
    """
    target = plugins.load_named_object(name, {}, kind="training method")
    if isinstance(target, type) and issubclass(target, Plain):
        try:
            return target()
        except TypeError as error:
            raise SpecError(
                f"train.method {name}: the class cannot be called without arguments: {error}",
                "create an object in your module (METHOD = Method(...)), and name the object instead",
            ) from error
    if isinstance(target, Plain):
        return target
    description = f"class {target.__name__}" if isinstance(target, type) else f"of type {type(target).__name__}"
    raise SpecError(
        f"train.method {name} is not a training method but {description}",
        "derive a class from tula_cli.worker.methods.plain.Plain, and name the class or an object of it",
    )
