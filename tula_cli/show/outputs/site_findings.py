"""What `tula check --site` shows."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tula_cli.show.tables import styled

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tula_cli.services.node_check.site_check import SiteCheck

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
_WIDEST = max(map(len, _STYLES))


def site_check(found: "SiteCheck") -> Iterator["RenderableType"]:
    """A line for each finding: whether it is right, what it is about, what is so, and what to do."""
    for one in found.findings:
        advice = f" ({one.advice})" if one.advice else ""
        line = f"{one.verdict.ljust(_WIDEST)}  {one.about}: {one.message}{advice}"
        yield styled(line, _STYLES[one.verdict], until=len(one.verdict))
