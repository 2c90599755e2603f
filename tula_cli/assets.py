"""Files that come with tula, and those that a site or a user puts in their place."""

from pathlib import Path

from tula_cli.errors import TulaError

SITE_FOLDERS = (Path("~/.config/tula"), Path("/etc/tula"))
"""Where a file of one's own is looked for, before the one that comes with tula; the user's wins over the site's."""

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


def site_asset(name: str) -> Path | None:
    """Return a user's or a site's own file, for example "slurm-setup.sh", or None where neither has one."""
    places = [folder.expanduser() / name for folder in SITE_FOLDERS]
    return next((path for path in places if path.is_file()), None)
