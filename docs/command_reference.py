"""The site's page with the help text of every command, which it asks the commands for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["help_texts", "page"]

_COMMAND = re.compile(r"^  ([a-z][a-z-]*)(?:  |$)")
_ENVIRON = {
    "LC_ALL": "C.UTF-8",
    "NO_COLOR": "1",
    "COLUMNS": "94",
    "PYTHONPATH": str(Path(__file__).resolve().parent.parent / "src"),
}


def page() -> str:
    """Return the page."""
    lines = [
        "# Command reference",
        "",
        "The help text of each command. [The command line](command_line.md) is the introduction.",
        "",
    ]
    for command, text in help_texts():
        lines += [f"{'#' * min(len(command) + 1, 3)} {' '.join(('echelon', *command))}", "", "```text", text, "```", ""]
    return "\n".join(lines)


def help_texts(command: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each command below ``command``, as its words, and its help text."""
    text = _help(command)
    if command:
        yield command, text
    if "\nCommands:\n" in text:
        for line in text.partition("\nCommands:\n")[2].splitlines():
            if found := _COMMAND.match(line):
                yield from help_texts((*command, found[1]))


def _help(command: tuple[str, ...]) -> str:
    flag = "--help_all" if command == ("launch",) else "--help"
    ran = subprocess.run(
        [sys.executable, "-m", "echelon", *command, flag],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=os.environ | _ENVIRON,  # noqa: TID251 - this program does not import echelon
    )
    return ran.stdout.rstrip()
