"""Translates finished messages into the user's language. Without a catalogue for it, messages stay as they are, in English."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.base import environ

if TYPE_CHECKING:
    from echelon.base.messages.catalogue import Catalogue

LOCALES = Path(__file__).resolve().parent.parent.parent / "locale"
"""Folder with ``<language>/LC_MESSAGES/echelon.po``."""

_SIMPLIFIED_CHINESE = frozenset({"zh", "zh_cn", "zh_sg", "zh_hans", "zh_hans_cn"})


def language() -> str | None:
    """Return the catalogue for the locale that the environment names, or None for English."""
    for name in environ.locale_names().split(":"):
        code = name.partition(".")[0].partition("@")[0].replace("-", "_").lower()
        if code in _SIMPLIFIED_CHINESE:
            return "zh_CN" if _can_print("\u4e2d") else None
        if code in ("c", "posix") or code.startswith("en"):
            return None
    return None


def translate(text: str) -> str:
    """Return ``text`` in the user's language, or unchanged if its catalogue has no entry for it."""
    code = language()
    return text if code is None else _catalogue(code).translate(text)


def translated_template(msgid: str) -> str | None:
    """Return the translation of a template (with ``{name}`` for values), or None in English and without an entry for it."""
    code = language()
    return None if code is None else _catalogue(code).entries.get(msgid)


def translate_lines(text: str) -> str:
    """Return a report such as an error's text in the user's language: each line on its own, with labels such as ``do:``."""
    code = language()
    return text if code is None else _catalogue(code).translate_lines(text)


def format_error(what: str, where: str | None, do: str | None) -> str:
    """Return an error's text in English, one line each for what happened, where, and what to do."""
    lines = [what]
    if where:
        lines.append(f"  where: {where}")
    if do:
        lines.append(f"  do:    {do}")
    return "\n".join(lines)


def _can_print(character: str) -> bool:
    stream = sys.stderr if sys.stderr is not None else sys.stdout
    try:
        character.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


@cache
def _catalogue(code: str) -> Catalogue:
    from echelon.base.messages.catalogue import Catalogue, read_po  # noqa: PLC0415 - not needed in English

    return Catalogue(read_po((LOCALES / code / "LC_MESSAGES" / "echelon.po").read_text(encoding="utf-8")))
