"""The name that a command is shown by."""

import pytest

from tula_cli.spec.scripts.placeholders import get_program_name


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python -m mod.train --lr 0.1 -m 0.9", "mod.train"),
        ("python -m torch.distributed.run --nproc-per-node 2 -m mod.train -m 0.9", "mod.train"),
        ("torchrun --nproc-per-node 2 -m mod.train", "mod.train"),
        ("python -m torch.distributed.run train.py -m 0.9", "train.py"),
        ("./train --lr 1", "train"),
    ],
)
def test_a_command_is_named_by_its_program_not_by_its_options(command: str, name: str) -> None:
    assert get_program_name(command) == name
