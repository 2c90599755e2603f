"""`tula export`: what is sent beside a run."""

import sys

import pytest

from tula_cli.cli import export


def test_a_page_is_drawn_where_matplotlib_works_and_left_out_where_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matplotlib that is there and cannot be imported, as one built for another numpy, is no reason to send nothing."""
    assert callable(export._load_page_renderer())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert export._load_page_renderer() is None
