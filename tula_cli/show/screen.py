"""The screen: the answer to stdout, all else to stderr, the JSON envelope."""

import codecs
import dataclasses
import io
import json
import math
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from tula_cli.errors import SpecError, TulaError
from tula_cli.show.tables import print_part, style_text
from tula_cli.words import without_controls

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_ASCII = str.maketrans("┌┐└┘┬┤│─━·•●◆★…–—−×±µ≤≥→", "++++++|--.**o*.---x~u<>>")
"""The nearest letters to what tables and plots are drawn of, one for one: columns stay where they are."""


def replace_missing_letters(stream: TextIO) -> None:
    """From now on write something else for what a stream has no letters for: latin-1, and ascii where LC_ALL is C."""
    codecs.register_error("tula", _find_nearest_characters)
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="tula")


def _find_nearest_characters(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letter = error.object[error.start]
    if "\udc80" <= letter <= "\udcff":  # a byte of a file's name that was no text
        return bytes([ord(letter) - 0xDC00]), error.start + 1
    near = letter.translate(_ASCII)
    return near if near.isascii() else "?", error.start + 1


SCHEMA_VERSION = 1
"""Of the JSON envelope; a change that breaks a reader makes it 2."""


@dataclass(frozen=True)
class Origin:
    """A value of the spec and the file, variable or flag it comes from."""

    value: Any
    source: str


class Screen:
    """Where the words of one command go.

    Args:
        command: its name, for the envelope.
        as_json: the answer is one JSON object.
        quiet: nothing on stderr but warnings and errors.
        verbose: tracebacks and details as well.
        color: False for none; None asks the terminal, NO_COLOR and TERM.
        out: stdout, another one in tests.
        err: stderr, another one in tests.
    """

    def __init__(
        self,
        command: str = "",
        *,
        as_json: bool = False,
        quiet: bool = False,
        verbose: bool = False,
        color: bool | None = None,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> None:
        self.command = command
        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose
        self.color = color
        self.out = out or sys.stdout
        self.err = err or sys.stderr
        self.run_id: str | None = None
        self.overrides: tuple[str, ...] = ()  # of the job (--set), those of earlier commands that still hold among them
        self.status = "done"
        self.warnings: list[str] = []
        self._data: Any = None
        self._answered = False
        self.drawn: Console | None = None  # draws in configuration on stderr

    def expect(self, arguments: Sequence[str]) -> None:
        """Guess command and flags from the arguments, for what is wrong before they are parsed."""
        self.command = next((word for word in arguments if not word.startswith("-")), "")
        self.as_json = "--json" in arguments
        self.verbose = "-v" in arguments or "--verbose" in arguments
        self.color = False if "--no-color" in arguments else None

    # --- words beside the answer

    def note(self, text: str) -> None:
        """Say what goes on."""
        if not self.quiet:
            self._say(text)

    def warn(self, text: str) -> None:
        """Say something once that the user should know; the envelope carries it too."""
        if text not in self.warnings:
            self.warnings.append(text)
            self._say(f"warning: {text}")

    def _say(self, text: str) -> None:
        """Write to stderr; on a terminal without breaking words, and above what is drawn there."""
        text = without_controls(text)
        if self.drawn is not None:
            self.drawn.print(text)
            return
        if self.err.isatty():
            width = shutil.get_terminal_size().columns
            text = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
        print(text, file=self.err, flush=True)

    def confirm(self, question: str) -> bool:
        """Ask on the terminal; anything but yes is no."""
        print(f"{without_controls(question)} [y/N] ", end="", file=self.err, flush=True)
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def ask(self, why: str, question: str, choices: Sequence[str] = ()) -> str | None:
        """Ask on the terminal for one of the choices, or without any for a whole number; None where nobody answers."""
        if why:
            print(why, file=self.err)
        offered = f" [{'/'.join(choices)}]" if choices else ""
        while True:
            print(f"{question}{offered} ", end="", file=self.err, flush=True)
            answer = sys.stdin.readline().strip()
            if not answer or answer in choices or (not choices and answer.isdigit() and int(answer)):
                return answer or None
            expected = f"one of {', '.join(choices)}" if choices else "a whole number from 1 on"
            print(f"{answer!r} is not {expected}; press Enter alone to stop", file=self.err)

    # --- the answer

    def answer(self, data: Any, parts: Iterable["RenderableType"]) -> None:
        """Give the answer: `data` in the envelope, or else the parts, which are made only when they are shown."""
        self._answered = True
        if self.as_json:
            self._data = to_plain_data(data)
            return
        console = self._console(self.out)
        for part in parts:
            print_part(console, part)
        self.out.flush()  # warnings follow on stderr, which may be the same file

    def aside(self, parts: Iterable["RenderableType"]) -> None:
        """Show parts that are not the answer, on stderr."""
        if not self.quiet:
            console = self._console(self.err)
            for part in parts:
                print_part(console, part)

    def line(self, text: str, data: Any) -> None:
        """Give one line of an answer that has no end (`tula logs`): text, or one JSON object a line."""
        print(json.dumps(to_plain_data(data)) if self.as_json else without_controls(text), file=self.out, flush=True)

    def finish(self) -> None:
        """Print the envelope of a command that has an answer."""
        if self.as_json and self._answered:
            self._envelope(None)

    def fail(self, error: TulaError) -> None:
        """Say what is wrong and what to do about it; the envelope says the same."""
        console = self._console(self.err)
        print_part(console, style_text(f"error: {error.message}", "bold red", until=6))
        for problem in error.problems if isinstance(error, SpecError) else ():
            print_part(console, f"  {problem}")
        if error.hint:
            print_part(console, style_text(f"HINT: {error.hint}", "cyan", until=5))
        if self.verbose and error.__cause__ is not None:
            self.print_traceback(error.__cause__)
        if self.as_json:  # last: whoever reads it may be gone
            self._envelope(error)

    def print_traceback(self, error: BaseException) -> None:
        print(without_controls("".join(traceback.format_exception(error))), end="", file=self.err, flush=True)

    def _envelope(self, error: TulaError | None) -> None:
        envelope = {
            "schema_version": SCHEMA_VERSION,
            "command": self.command,
            "run_id": self.run_id,
            "overrides": self.overrides,
            "status": self.status if error is None else "pending" if error.code == "pending" else "failed",
            "data": self._data,
            "warnings": self.warnings,
            "error": None if error is None else _convert_error_to_data(error),
        }
        later: list[Lines] = []

        def token(value: Any) -> str:
            later.append(value)
            return _TOKEN

        text = json.dumps(envelope, indent=1, allow_nan=False, default=token)
        first, *rest = text.split(json.dumps(_TOKEN)) if later else [text]
        self.out.write(first)
        for lines, after in zip(later, rest, strict=True):
            self.out.writelines(lines.array())
            self.out.write(after)
        print(file=self.out, flush=True)

    @property
    def width(self) -> int:
        """Columns of stdout; 80 where it is no terminal and COLUMNS says nothing."""
        return self._console(self.out).width

    @property
    def colored(self) -> bool:
        """Whether the answer may have colours."""
        return self._console(self.out).color_system is not None

    def _console(self, file: TextIO) -> "Console":
        from rich.console import Console, ConsoleOptions, RenderableType
        from rich.segment import Segment

        class CleanConsole(Console):
            """The one way of tables and parts to a terminal: no text of another program may steer it."""

            def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
                for segment in super().render(renderable, options):
                    yield segment if segment.control else segment._replace(text=without_controls(segment.text))

        no_color = self.color is False or bool(os.environ.get("NO_COLOR"))
        return CleanConsole(file=file, no_color=no_color, color_system=None if no_color else "auto", highlight=False, markup=False, emoji=False)  # fmt: skip


def _convert_error_to_data(error: TulaError) -> dict[str, Any]:
    problems = error.problems if isinstance(error, SpecError) else ()
    return {"code": error.code, "message": error.message, "hint": error.hint, "problems": to_plain_data(problems)}


@dataclasses.dataclass(frozen=True)
class Lines:
    """An array of an answer in JSON whose items are made when they are written, a line each."""

    items: Iterable[str]  # each a JSON text

    def array(self) -> Iterator[str]:
        yield "["
        for index, item in enumerate(self.items):
            yield f"{',' * bool(index)}\n{item}"
        yield "\n]"


_TOKEN = "\0lines"
"""Stands for no output, in place of `Lines`."""


def to_plain_data(value: Any) -> Any:
    """Return a value in what JSON knows; a number that is none (nan, inf) is null, and `Lines` are left to be written."""
    if isinstance(value, Lines):
        return value
    if hasattr(value, "model_dump"):
        return to_plain_data(value.model_dump(mode="json"))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): to_plain_data(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_plain_data(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
