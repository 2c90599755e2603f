"""Terminal output: answers on stdout, everything else on stderr, and the JSON envelope."""

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import SpecError, TulaError
from tula_cli.show.tables import print_renderable, style_text
from tula_cli.words import strip_control_characters

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_ASCII = str.maketrans("─━·•●◆★…–—−×±µ≤≥→", "--.**o*.---x~u<>>")
"""ASCII replacements of the characters of tables, one for one to keep columns aligned."""


def replace_missing_letters(stream: TextIO) -> None:
    """Make a stream replace characters that its encoding lacks, for example latin-1, or ASCII with LC_ALL=C."""
    codecs.register_error("tula", _find_nearest_characters)
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="tula")


def _find_nearest_characters(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if "\udc80" <= character <= "\udcff":  # a byte of a file name that is not valid UTF-8
        return bytes([ord(character) - 0xDC00]), error.start + 1
    near = character.translate(_ASCII)
    return near if near.isascii() else "?", error.start + 1


SCHEMA_VERSION = 1
"""Version of the JSON envelope, increased by changes that break readers."""


@dataclass(frozen=True)
class Origin:
    """A value of the job spec and the file, variable or flag it comes from."""

    value: Any
    source: str


class Screen:
    """Output of one command.

    Args:
        as_json: whether the answer is a single JSON object.
        quiet: whether only warnings and errors appear on stderr.
        verbose: whether to print tracebacks and details as well.
        color: False to disable colours; None decides by the terminal, NO_COLOR and TERM.
        out, err: replacements of stdout and stderr.
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
        self.given_options: frozenset[str] = frozenset()  # names of the parameters that the command line sets
        self.run_id: str | None = None
        # overrides of the job (--set), including those of earlier commands that still apply
        self.overrides: tuple[str, ...] = ()
        self.status = "done"
        self.warnings: list[str] = []
        self.diagnostics: list[Diagnostic] = []
        self._data: Any = None
        self._answered = False
        self.drawn: Console | None = None  # console that redraws in place on stderr; None if not used

    def guess_command(self, arguments: Sequence[str]) -> None:
        """Set command and flags from unparsed arguments, for errors that occur before parsing."""
        self.command = next((word for word in arguments if not word.startswith("-")), "")
        self.as_json = "--json" in arguments
        self.verbose = "-v" in arguments or "--verbose" in arguments
        self.color = False if "--no-color" in arguments else None

    # --- Messages on stderr

    def print_note(self, text: str) -> None:
        """Report progress on stderr, unless quiet."""
        if not self.quiet:
            self._print_text(text)

    def print_warning(self, warning: Diagnostic | str) -> None:
        """Print a warning unless it was printed before; the envelope contains it too."""
        text = str(warning)
        if text not in self.warnings:
            self.warnings.append(text)
            self.diagnostics += [warning] if isinstance(warning, Diagnostic) else []
            self._print_text(f"warning: {text}")

    def print_warnings(self, warnings: Iterable[Diagnostic | str]) -> None:
        """Print warnings about an answer; to be called after it, because they would be overlooked above a long table."""
        for warning in warnings:
            self.print_warning(warning)

    def _print_text(self, text: str) -> None:
        """Write to stderr; on a terminal, wrap at spaces and print above a live display."""
        text = strip_control_characters(text)
        if self.drawn is not None:
            self.drawn.print(text)
            return
        if self.err.isatty():
            width = shutil.get_terminal_size().columns
            text = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
        print(text, file=self.err, flush=True)

    def ask_yes_or_no(self, question: str) -> bool:
        """Ask a yes/no question on the terminal; any answer except y or yes counts as no."""
        print(f"{strip_control_characters(question)} [y/N] ", end="", file=self.err, flush=True)
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def ask_for_value(self, why: str, question: str, choices: Sequence[str] = ()) -> str | None:
        """Ask on the terminal for one of `choices`, or without them for a positive integer; None without an answer."""
        if why:
            print(why, file=self.err)
        offered = f" [{'/'.join(choices)}]" if choices else ""
        while True:
            print(f"{question}{offered} ", end="", file=self.err, flush=True)
            answer = sys.stdin.readline().strip()
            if not answer or answer in choices or (not choices and answer.isdigit() and int(answer)):
                return answer or None
            expected = f"one of {', '.join(choices)}" if choices else "an integer of at least 1"
            print(f"{answer!r} is not {expected}; press Enter to skip the question", file=self.err)

    # --- The answer

    def print_answer(self, data: Any, parts: Iterable["RenderableType"]) -> None:
        """Print the answer: with --json `data` in the envelope, otherwise `parts`, which are created only when shown."""
        self._answered = True
        if self.as_json:
            self._data = convert_to_plain_data(data)
            return
        console = self._make_console(self.out)
        for part in parts:
            print_renderable(console, part)
        self.out.flush()  # flushed before the warnings on stderr, which may be the same file

    def print_to_stderr(self, parts: Iterable["RenderableType"]) -> None:
        """Show parts that do not belong to the answer on stderr."""
        if not self.quiet:
            console = self._make_console(self.err)
            for part in parts:
                print_renderable(console, part)

    def print_line(self, text: str, data: Any) -> None:
        """Print one line of an endless answer (`tula logs`): text, or one JSON object per line."""
        print(
            json.dumps(convert_to_plain_data(data)) if self.as_json else strip_control_characters(text),
            file=self.out,
            flush=True,
        )

    def finish_answer(self) -> None:
        """Print the envelope of a command that has given an answer."""
        if self.as_json and self._answered:
            self._print_envelope(None)

    def print_error(self, error: TulaError) -> None:
        """Print an error and its hint, and add them to the envelope."""
        console = self._make_console(self.err)
        heading = "" if error.code == "interrupted" else "error: "
        print_renderable(console, style_text(f"{heading}{error.message}", "bold red", until=len(heading)))
        for problem in error.problems if isinstance(error, SpecError) else ():
            print_renderable(console, f"  {problem}")
        if error.hint:
            print_renderable(console, style_text(f"HINT: {error.hint}", "cyan", until=5))
        if self.verbose and error.__cause__ is not None:
            self.print_traceback(error.__cause__)
        if self.as_json:  # last, because writing to a closed pipe fails
            self._print_envelope(error)

    def print_traceback(self, error: BaseException) -> None:
        print(strip_control_characters("".join(traceback.format_exception(error))), end="", file=self.err, flush=True)

    def _print_envelope(self, error: TulaError | None) -> None:
        envelope = {
            "schema_version": SCHEMA_VERSION,
            "command": self.command,
            "run_id": self.run_id,
            "overrides": self.overrides,
            "status": self.status if error is None else "pending" if error.code == "pending" else "failed",
            "data": self._data,
            "warnings": self.warnings,
            "diagnostics": [_convert_diagnostic_to_data(diagnostic) for diagnostic in self.diagnostics],
            "error": None if error is None else _convert_error_to_data(error),
        }
        _write_json_with_lines(envelope, self.out)
        print(file=self.out, flush=True)

    @property
    def width(self) -> int:
        """Columns of stdout; 80 if stdout is not a terminal and COLUMNS is not set."""
        return self._make_console(self.out).width

    def _make_console(self, file: TextIO) -> "Console":
        from rich.console import Console, ConsoleOptions, RenderableType
        from rich.segment import Segment

        class CleanConsole(Console):
            """A console that strips control characters, so that other programs' output cannot control the terminal."""

            def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
                for segment in super().render(renderable, options):
                    yield segment if segment.control else segment._replace(text=strip_control_characters(segment.text))

        no_color = self.color is False or bool(os.environ.get("NO_COLOR"))
        return CleanConsole(file=file, no_color=no_color, color_system=None if no_color else "auto", highlight=False, markup=False, emoji=False)  # fmt: skip


def _convert_diagnostic_to_data(diagnostic: Diagnostic) -> dict[str, Any]:
    return {"code": diagnostic.code, "values": convert_to_plain_data(dict(diagnostic.values)), "text": diagnostic.text}


def _list_diagnostics(value: Any) -> list[dict[str, Any]]:
    """Return the diagnostics in the value of a field, one or a sequence, as plain data."""
    values = value if isinstance(value, (list, tuple)) else (value,)
    return [_convert_diagnostic_to_data(diagnostic) for diagnostic in values if isinstance(diagnostic, Diagnostic)]


def _convert_fields_to_data(owner: Any, fields: dict[str, Any]) -> dict[str, Any]:
    diagnostics = {name: coded for name in fields if (coded := _list_diagnostics(getattr(owner, name, None)))}
    texts = {name: getattr(owner, name) for name in diagnostics}
    data = {name: convert_to_plain_data(value) for name, value in {**fields, **texts}.items()}
    return data | ({"diagnostics": diagnostics} if diagnostics else {})


def _convert_error_to_data(error: TulaError) -> dict[str, Any]:
    problems = error.problems if isinstance(error, SpecError) else ()
    return {
        "code": error.code,
        "message": error.message,
        "hint": error.hint,
        "problems": convert_to_plain_data(problems),
    }


@dataclasses.dataclass(frozen=True)
class Lines:
    """A JSON array in an answer whose items are created while they are written, one per line."""

    items: Iterable[str]  # JSON texts of the items


_LINES_PLACEHOLDER = "\0lines"
"""Placeholder for `Lines`; no other output contains it."""


def _write_json_with_lines(envelope: dict[str, Any], out: TextIO) -> None:
    """Write the JSON text around placeholders of `Lines`, and in their places the items one by one."""
    arrays: list[Lines] = []

    def store_array(value: Lines) -> str:
        arrays.append(value)
        return _LINES_PLACEHOLDER

    text = json.dumps(envelope, indent=1, allow_nan=False, default=store_array)
    first, *rest = text.split(json.dumps(_LINES_PLACEHOLDER)) if arrays else [text]
    out.write(first)
    for array, after in zip(arrays, rest, strict=True):
        out.write("[")
        out.writelines(f"{',' * bool(index)}\n{item}" for index, item in enumerate(array.items))
        out.write(f"\n]{after}")


def convert_to_plain_data(value: Any) -> Any:
    """Convert a value to JSON types; nan and inf become None, and `Lines` are kept for writing later.

    A `Diagnostic` becomes its text; the dataclass or record that has it gets a key `diagnostics`, with the codes and
    values of its diagnostics by field.
    """
    if isinstance(value, Lines):
        return value
    if isinstance(value, Diagnostic):
        return value.text
    if hasattr(value, "model_dump"):
        return _convert_fields_to_data(value, value.model_dump(mode="json"))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _convert_fields_to_data(
            value, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        )
    if isinstance(value, dict):
        return {str(key): convert_to_plain_data(field_value) for key, field_value in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [convert_to_plain_data(field_value) for field_value in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
