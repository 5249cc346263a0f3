"""Wraps texts by the width of their characters in a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from unicodedata import east_asian_width

__all__ = ["num_columns", "wrap"]

_STYLE = re.compile(r"\x1b\[[\d;]*m")


def wrap(text: str, width: int) -> list[str]:
    """Return ``text`` as lines of at most ``width`` columns; a line may end after each Chinese character, except before punctuation."""
    lines, line = [], ""
    for token in _tokens(text):
        if line and num_columns(line) + num_columns(token.rstrip()) > width:
            lines.append(line.rstrip())
            line = token.lstrip()
        else:
            line += token
    return [*lines, line.rstrip()] if line.strip() else lines


_WIDE = r"\u4e00-\u9fff\u3000-\u303f\uff00-\uffef"
_OPENING = r"[\u300a\u300c\uff08\u201c(]*"
_CLOSING = r"[\u3001\u3002\uff0c\uff1b\uff1a\uff09\uff01\uff1f\u300d\u300b\u201d]*"
# A word or a wide character, with the brackets before it and the punctuation and spaces after it.
_TOKEN = re.compile(rf"{_OPENING}(?:[{_WIDE}]|[^\s{_WIDE}]+){_CLOSING}\s*|\s+")


def _tokens(text: str) -> Iterator[str]:
    return (match[0] for match in _TOKEN.finditer(text))


def num_columns(text: str) -> int:
    """Return the width of ``text`` in a terminal, in which a Chinese character takes two columns, and colours none."""
    return (
        len(text)
        if text.isascii() and "\x1b" not in text
        else sum(2 if east_asian_width(one) in "WF" else 1 for one in _STYLE.sub("", text))
    )
