"""Escapes control characters before printing untrusted text, such as exceptions, file names and data from other machines."""

from __future__ import annotations

import re

# Control characters except tab and newline, other line separators, surrogates, and bidirectional control characters, which
# could disguise a line.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def printable(text: str) -> str:
    """Return ``text`` with control characters escaped as in ``repr``; letters are kept, whatever their script."""
    return _CONTROL.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    number = ord(found[0])
    return {13: "\\r"}.get(number) or (f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}")
