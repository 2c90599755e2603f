"""Files that come with tula, and those that a site or a user puts in their place."""

import os
from collections.abc import Mapping
from pathlib import Path

from tula_cli.errors import TulaError

SITE_FOLDER = Path("/etc/tula")
_PACKAGE = Path(__file__).parent


def find_asset(name: str) -> Path:
    """Return the path of a file that comes with tula: inside the package in a wheel, beside it in a checkout.

    Args:
        name: for example "templates/job.yaml".

    Raises:
        TulaError: it is in neither place.
    """
    places = [_PACKAGE / name, _PACKAGE.parent / name]
    for path in places:
        if path.is_file():
            return path
    raise TulaError(f"this installation of tula lacks {name}", "install it again, from a wheel or a whole checkout")


def _list_config_folders(*, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the folders of the user's and the site's own files, whether they are there or not; the user's first, which wins.

    They are `tula/` of $XDG_CONFIG_HOME (~/.config where it is unset) and of each of $XDG_CONFIG_DIRS, and
    /etc/tula, which a variable that some module sets must not hide. Paths that are not absolute do not count
    (XDG Base Directory Specification 0.8).
    """
    home = Path(environ.get("XDG_CONFIG_HOME", ""))
    user = home if home.is_absolute() else Path("~/.config").expanduser()
    sites = [folder for text in environ.get("XDG_CONFIG_DIRS", "").split(":") if (folder := Path(text)).is_absolute()]
    return list(dict.fromkeys([*(folder / "tula" for folder in (user, *sites)), SITE_FOLDER]))


def config_files(name: str, *, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the user's and the site's files of a name, those that there are; the user's first, which wins."""
    return [path for folder in _list_config_folders(environ=environ) if (path := folder / name).is_file()]


def find_site_asset(name: str) -> Path | None:
    """Return a user's or a site's own file, for example "slurm-setup.sh", or None where neither has one."""
    return next(iter(config_files(name)), None)
