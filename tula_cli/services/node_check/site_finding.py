"""One thing that `tula check --site` has found."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SiteFinding:
    """What is so, or is wrong, and what to do about it."""

    verdict: Literal["ok", "warning", "problem"]  # with a problem jobs fail, or are refused
    about: str  # the key, or what it is about
    message: str
    advice: str = ""  # empty where there is nothing to do
    source: Literal["file", "scheduler", "jobs"] = "file"  # what tells it


def ok(about: str, message: str, source: Literal["file", "scheduler", "jobs"] = "file") -> SiteFinding:
    return SiteFinding("ok", about, message, source=source)


def warning(
    about: str, message: str, advice: str, source: Literal["file", "scheduler", "jobs"] = "file"
) -> SiteFinding:
    return SiteFinding("warning", about, message, advice, source)


def problem(
    about: str, message: str, advice: str, source: Literal["file", "scheduler", "jobs"] = "file"
) -> SiteFinding:
    return SiteFinding("problem", about, message, advice, source)
