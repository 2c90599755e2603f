"""Ranks that are forked where a checkout of tula lies in the working directory."""

from tula_cli.worker import preloaded


def test_the_archive_of_a_run_is_hidden_by_no_checkout_but_what_is_the_users_is(tmp_path):
    archive = tmp_path / "tula.zip"
    archive.write_bytes(b"")
    assert preloaded._is_resolved_to("tula_cli", str(archive / "tula_cli/__init__.py"))
    assert not preloaded._is_resolved_to("json", str(archive / "json/__init__.py"))
