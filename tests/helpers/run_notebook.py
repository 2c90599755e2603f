"""Execute the code cells of a notebook in one process, as Jupyter does: python tests/helpers/run_notebook.py NOTEBOOK.

Prints a JSON list with an entry for each cell that ends in an expression: the type of its value, and the text that Jupyter
would show (HTML if the value has `_repr_html_`; empty for a matplotlib figure, which is drawn).
"""

import ast
import io
import json
import sys
from pathlib import Path
from typing import Any


def run_notebook(path: Path) -> list[tuple[str, str]]:
    """Execute the code cells in order; return the type name and the text of each value that a cell shows."""
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
            shown.append((type(value).__name__, _render_value(value)))
    return shown


def _render_value(value: Any) -> str:
    if hasattr(value, "savefig"):
        value.savefig(io.BytesIO(), format="png")
        return ""
    return str(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run_notebook(Path(sys.argv[1]))))
