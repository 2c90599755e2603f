"""The optimizers are a library of their own: a training script pays for no more than torch."""

import subprocess
import sys

import pytest


@pytest.mark.torch
def test_importing_the_optimizers_imports_nothing_of_the_command_line() -> None:
    code = (
        "import sys; import tula_cli.optim; print(*sorted({n.partition('.')[0] for n in sys.modules} & {'pydantic', 'submitit',"
        " 'typer', 'rich', 'pandas'}), *(n for n in sys.modules if n.startswith('tula_cli.') and '.optim' not in n))"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=120, check=True)
    assert done.stdout.split() == ["tula_cli.presets"]
