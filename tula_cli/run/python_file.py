"""Facts about a python file that are read without running it: its imports, and whether it loads code by computed names."""

import ast
import functools
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_LOADER_MODULES = {
    "gin", "imp", "invoke", "pexpect", "pkgutil", "pluggy", "plumbum", "pty", "pydoc", "runpy", "sh", "stevedore", "zipimport",
}  # fmt: skip
_LOADER_NAMES = {
    "__import__", "attach_stub", "create_subprocess_exec", "create_subprocess_shell", "check_call", "check_output",
    "DEFINE_config_file", "entry_points", "eval_str", "exec_module", "execfile", "execl", "execle", "execlp", "execlpe",
    "execv", "execve", "execvp", "execvpe", "find_spec", "fromfile", "get_class", "get_method", "get_object", "getoutput",
    "getstatusoutput", "import_file", "import_from_string", "import_module", "import_modules_from_strings", "import_string",
    "instantiate", "iter_entry_points", "LazyConfig", "load_module", "load_source", "locate", "meta_path", "path_hooks",
    "popen", "Popen", "posix_spawn", "posix_spawnp", "run_module", "run_path", "SourceFileLoader", "spawnl", "spawnle",
    "spawnlp", "spawnlpe", "spawnv", "spawnve", "spawnvp", "spawnvpe", "spec_from_file_location", "system",
}  # fmt: skip
"""Functions of python and of common libraries that load or start a file whose name is an argument."""
_LOADER_BUILTINS = {"builtins", "eval", "exec"}  # not as attributes: model.eval()
_PATH_ARGUMENTS = {
    None, "args", "cmd", "command", "config", "executable", "file", "filename", "fromlist", "fullname", "location", "mod_name",
    "model", "module", "name", "path", "path_name", "pathname", "repo_or_dir", "source",
}  # fmt: skip
"""Keyword arguments of these functions that name what they load; None stands for further keywords, as in `**options`."""
_WORD_PATTERN = re.compile(r"\w+")


@dataclass(frozen=True)
class PythonFile:
    """Modules, words and loader calls in the statements of a python file."""

    imports: tuple[
        tuple[str, int], ...
    ]  # names of modules, or of attributes of modules, with the number of leading dots
    words: frozenset[str]  # words of its strings and import statements; a file that it loads by name is among them
    loads_computed_names: bool  # it may load or start files whose names are not in its text


@functools.lru_cache(maxsize=4096)
def parse_python(content: bytes) -> PythonFile | None:
    """Parse a python file; None if python cannot parse it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the user's strings
            nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: deeply nested expressions
        return None
    return PythonFile(tuple(_list_imports(nodes)), frozenset(_list_words(nodes)), _loads_computed_names(nodes))


def split_words(text: str) -> list[str]:
    """Return the words of a text: runs of letters, digits and underscores."""
    return _WORD_PATTERN.findall(text)


def _list_imports(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, int]]:
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, 0) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = f"{module}." if module else ""
                yield from ((f"{base}{alias.name}", level) for alias in names)  # a submodule, or an attribute
            case ast.Call(func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module")):
                if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                    yield node.args[0].value, 0


def _list_words(nodes: Sequence[ast.AST]) -> Iterator[str]:
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from split_words(node.value)
    for name, _level in _list_imports(nodes):
        yield from split_words(name)


def _loads_computed_names(nodes: Sequence[ast.AST]) -> bool:
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    literal = {id(call.func) for call in calls if _has_literal_file_names(call)}
    return any(id(node) not in literal and _may_load_files(node) for node in nodes)


def _may_load_files(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            return any(alias.name.partition(".")[0] in _LOADER_MODULES for alias in names) or any(
                alias.asname and alias.name == "subprocess" for alias in names
            )
        case ast.ImportFrom(module=module, names=names):
            renamed = any(alias.asname and alias.name in _LOADER_NAMES | _LOADER_BUILTINS for alias in names)
            from_hub = module == "torch.hub" and any(alias.name == "load" for alias in names)
            return renamed or from_hub or (module or "").partition(".")[0] in {*_LOADER_MODULES, "subprocess"}
        # `from package import *` imports the submodules that __all__ names.
        case (
            ast.Assign(targets=[ast.Name(id="__all__")], value=names)
            | ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.AST() as names)
            | ast.AugAssign(target=ast.Name(id="__all__"), value=names)
            | ast.Call(func=ast.Attribute(attr="append" | "extend", value=ast.Name(id="__all__")), args=[names])
        ):
            return not _is_literal(names)
        case ast.Name(id=name):
            return name in _LOADER_NAMES or name in _LOADER_BUILTINS
        case ast.Attribute(attr="run" | "call", value=ast.Name(id="subprocess")):
            return True
        case ast.Attribute(attr="load", value=ast.Name(id="hub") | ast.Attribute(attr="hub")):
            return True
        case ast.Attribute(attr=name):
            return name in _LOADER_NAMES
        case ast.keyword(arg="trust_remote_code"):
            return True
    return False


def _has_literal_file_names(call: ast.Call) -> bool:
    """Return whether the arguments of a call that may name a file are literals."""
    return all(map(_is_literal, call.args)) and all(
        _is_literal(keyword.value) for keyword in call.keywords if keyword.arg in _PATH_ARGUMENTS
    )


def _is_literal(node: ast.AST) -> bool:
    match node:
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return all(map(_is_literal, elements))
        case ast.BinOp(left=left, op=ast.Add(), right=right) if isinstance(left, ast.List | ast.Attribute | ast.BinOp):
            return _is_literal(left) and _is_literal(right)
        case ast.Starred(value=ast.Attribute(attr="__all__")) | ast.Attribute(attr="__all__"):
            return True
        case ast.Attribute(attr="executable", value=ast.Name(id="sys")) | ast.Name(id="__package__" | "__name__"):
            return True
    return isinstance(node, ast.Constant)
