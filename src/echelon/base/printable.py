"""Text from elsewhere (an exception, a file name, another machine) as it can be printed: it cannot steer the terminal that shows it."""

from __future__ import annotations

import re

__all__ = ["printable"]

# Control characters (but tab and newline), what ends a line in other ways, half characters, and what turns the direction of
# the text around, so that a line reads as another one than it is.
_STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def printable(text: str) -> str:
    """Return ``text`` with every character that steers a terminal as an escape, as repr has it; all others, of any script, stay."""
    return _STEERS.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    number = ord(found[0])
    return {13: "\\r"}.get(number) or (f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}")
