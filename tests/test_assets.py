"""Files that come with tula, and those that take their place."""

from pathlib import Path

import pytest

from tula_cli import assets
from tula_cli.assets import find_asset, site_asset
from tula_cli.errors import TulaError


def test_asset_inside_the_package_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "tula_cli"
    for folder in (tmp_path, package):
        (folder / "configs").mkdir(parents=True)
        (folder / "configs" / "a.yaml").write_text("a: 1\n", encoding="utf-8")
    monkeypatch.setattr(assets, "_PACKAGE", package)
    assert find_asset("configs/a.yaml") == package / "configs" / "a.yaml"
    (package / "configs" / "a.yaml").unlink()
    assert find_asset("configs/a.yaml") == tmp_path / "configs" / "a.yaml"


def test_missing_asset_is_an_error() -> None:
    with pytest.raises(TulaError, match="lacks templates/none"):
        find_asset("templates/none")


def test_assets_of_this_checkout_are_found() -> None:
    assert find_asset("configs/quickstart.yaml").is_relative_to(Path(assets.__file__).parent.parent)


def test_a_users_own_file_wins_over_the_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(assets, "SITE_FOLDERS", (Path("~/mine"), tmp_path / "site"))
    assert site_asset("setup.sh") is None
    for folder in ("site", "mine"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "setup.sh").touch()
        assert site_asset("setup.sh") == tmp_path / folder / "setup.sh"
