"""One process that forks the ranks of all tests here."""

from collections.abc import Iterator

import pytest
from script_ranks import ScriptRanks


@pytest.fixture(scope="session")
def run() -> Iterator[ScriptRanks]:
    with ScriptRanks() as ranks:
        yield ranks
