"""Files that are shipped with tula, and those with which a site or a user replaces them."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from tula_cli.errors import TulaError

SITE_FOLDER = Path("/etc/tula")
_PACKAGE = Path(__file__).parent


def find_asset(name: str) -> Path:
    """Return the path of a file that is shipped with tula: inside the package (wheel) or next to it (checkout).

    Args:
        name: for example "templates/job.yaml".

    Raises:
        TulaError: the file is missing from both folders.
    """
    return _find_shipped_path(name, Path.is_file)


def find_asset_folder(name: str) -> Path:
    """Return the path of a folder that is shipped with tula, such as "demo".

    Raises:
        TulaError: the folder is missing.
    """
    return _find_shipped_path(name, Path.is_dir)


def _find_shipped_path(name: str, exists: Callable[[Path], bool]) -> Path:
    for path in (_PACKAGE / name, _PACKAGE.parent / name):
        if exists(path):
            return path
    raise TulaError(f"this installation of tula has no {name}", "reinstall it from a wheel or a complete checkout")


def _list_config_folders(*, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the folders that may hold configuration files of the user and the site, existing or not, by precedence.

    They are `tula/` in $XDG_CONFIG_HOME (~/.config if it is unset) and in each of $XDG_CONFIG_DIRS, then /etc/tula,
    which is always included so that a variable set by an environment module cannot hide it. Paths that are not absolute
    are ignored (XDG Base Directory Specification 0.8).
    """
    home = Path(environ.get("XDG_CONFIG_HOME", ""))
    user = home if home.is_absolute() else Path("~/.config").expanduser()
    sites = [folder for text in environ.get("XDG_CONFIG_DIRS", "").split(":") if (folder := Path(text)).is_absolute()]
    return list(dict.fromkeys([*(folder / "tula" for folder in (user, *sites)), SITE_FOLDER]))


def list_config_files(name: str, *, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the existing configuration files called `name`, by precedence: the user's before the site's."""
    return [path for folder in _list_config_folders(environ=environ) if (path := folder / name).is_file()]


def find_site_asset(name: str) -> Path | None:
    """Return the user's or the site's version of a file, for example "slurm-setup.sh", or None if neither has one."""
    return next(iter(list_config_files(name)), None)
