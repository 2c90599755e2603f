"""Files that come with tula, and those that take their place."""

from pathlib import Path

import pytest

from tula_cli import assets
from tula_cli.assets import find_asset, find_site_asset, list_config_files
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
    with pytest.raises(TulaError, match="has no templates/none"):
        find_asset("templates/none")


def test_assets_of_this_checkout_are_found() -> None:
    assert find_asset("configs/quickstart.yaml").is_relative_to(Path(assets.__file__).parent.parent)


def test_a_users_own_file_wins_over_the_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(assets, "SITE_FOLDER", tmp_path / "site")
    assert find_site_asset("setup.sh") is None
    for folder in ("site", ".config/tula"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "setup.sh").touch()
        assert find_site_asset("setup.sh") == tmp_path / folder / "setup.sh"


def test_xdg_names_the_folders_and_the_sites_own_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "SITE_FOLDER", tmp_path / "site")
    monkeypatch.chdir(tmp_path)
    folders = ["mine/tula", "first/tula", "second/tula", "site"]
    for folder in (*folders, "relative/tula"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "site.yaml").touch()
    environ = {
        "XDG_CONFIG_HOME": str(tmp_path / "mine"),
        "XDG_CONFIG_DIRS": f"{tmp_path}/first:relative:{tmp_path}/second:",
    }
    assert list_config_files("site.yaml", environ=environ) == [tmp_path / folder / "site.yaml" for folder in folders]
