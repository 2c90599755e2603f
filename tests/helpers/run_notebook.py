"""Executes the code cells of a notebook in one process, as Jupyter does: python tests/helpers/run_notebook.py NOTEBOOK.

Prints a JSON list with an entry per cell whose last line is an expression: the type of its value, and the text that Jupyter
would show for it (HTML if the value has `_repr_html_`; a matplotlib figure is drawn and shows nothing).
"""

import ast
import io
import json
import sys
from pathlib import Path
from typing import Any


def run_notebook(path: Path) -> list[tuple[str, str]]:
    """Execute the code cells in order and return the type name and the text of each value that a cell shows."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = tree.body[-1]
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, str(path), "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), str(path), "eval"), namespace)
            shown.append((type(value).__name__, _show(value)))
    return shown


def _show(value: Any) -> str:
    if hasattr(value, "savefig"):
        value.savefig(io.BytesIO(), format="png")
        return ""
    return str(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run_notebook(Path(sys.argv[1]))))
