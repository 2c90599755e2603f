"""Files that are shipped with tula, and those with which a site or a user replaces them."""

import os
from collections.abc import Mapping
from pathlib import Path

from tula_cli.errors import TulaError

SITE_FOLDER = Path("/etc/tula")
_PACKAGE = Path(__file__).parent


def find_asset(name: str) -> Path:
    """Return the path of a file or folder that is shipped with tula: inside the package (wheel) or next to it (checkout).

    Args:
        name: for example "templates/job.yaml", or "demo".

    Raises:
        TulaError: there is no such file or folder.
    """
    for path in (_PACKAGE / name, _PACKAGE.parent / name):
        if path.exists():
            return path
    raise TulaError(f"this installation of tula has no {name}", "reinstall it from a wheel or a complete checkout")


def list_config_files(name: str, *, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the existing configuration files called `name`, by precedence: the user's before the site's.

    Their folders are `tula/` in $XDG_CONFIG_HOME (~/.config if it is unset) and in each of $XDG_CONFIG_DIRS, then
    /etc/tula, which is always included so that a variable set by an environment module cannot hide it. Paths that are
    not absolute are ignored (XDG Base Directory Specification 0.8).
    """
    home = Path(environ.get("XDG_CONFIG_HOME", ""))
    user = home if home.is_absolute() else Path("~/.config").expanduser()
    sites = [folder for text in environ.get("XDG_CONFIG_DIRS", "").split(":") if (folder := Path(text)).is_absolute()]
    folders = dict.fromkeys([*(folder / "tula" for folder in (user, *sites)), SITE_FOLDER])
    return [path for folder in folders if (path := folder / name).is_file()]


def find_site_asset(name: str) -> Path | None:
    """Return the user's or the site's version of a file, for example "slurm-setup.sh", or None if neither has one."""
    return next(iter(list_config_files(name)), None)
