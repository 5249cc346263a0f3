"""Translates messages into the user's language as gettext does: the English text is the key.

``from echelon.base.messages.translation import gettext as _`` and ``_("{path} is not a folder", path=path)``. A text that
is made when a module is imported is marked with ``gettext_noop as N_``, and translated by ``_`` when it is shown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from echelon.base import environ

LOCALES = Path(__file__).resolve().parent.parent.parent / "locale"
"""Folder with ``<language>/LC_MESSAGES/echelon.po``."""

_SIMPLIFIED_CHINESE = frozenset({"zh", "zh_cn", "zh_sg", "zh_hans", "zh_hans_cn"})


class Translated(str):
    """A message in the user's language."""

    english: str
    """The message in English, for log files, records and programs."""


def gettext(message: str, /, **values: object) -> str:
    """Return ``message`` with ``values`` in the user's language, or in English if it has no translation."""
    code = language()
    if code is None:
        return message.format(**values) if values else message
    text = messages_of(code).get(message, message)
    shown = Translated(text.format(**values) if values else text)
    shown.english = message.format(**in_english(values)) if values else message
    return shown


def gettext_noop(message: str) -> str:
    """Return ``message`` unchanged. The text is in the catalogues; ``gettext`` translates it when shown."""
    return message


def in_english(value: object) -> Any:
    """Return translated messages in English, also in lists and mappings such as JSON data; all else unchanged."""
    if isinstance(value, Mapping):
        return {name: in_english(each) for name, each in value.items()}
    if isinstance(value, list):
        return [in_english(each) for each in value]
    text = value if isinstance(value, str) else str(value)  # that of a setting's origin is translated, too
    return text.english if isinstance(text, Translated) else value


def language() -> str | None:
    """Return the catalogue for the locale that the environment names, or None for English."""
    for name in environ.locale_names().split(":"):
        code = name.partition(".")[0].partition("@")[0].replace("-", "_").lower()
        if code in _SIMPLIFIED_CHINESE:
            return "zh_CN" if _can_print("\u4e2d") else None
        if code in ("c", "posix") or code.startswith("en"):
            return None
    return None


@cache
def messages_of(code: str) -> Mapping[str, str]:
    """Return the messages of the catalogue for the language ``code``, and their translations."""
    entries = {}
    for entry in (LOCALES / code / "LC_MESSAGES" / "echelon.po").read_text(encoding="utf-8").split("\n\n"):
        message, _, translation = f"\n{entry}".partition("\nmsgid ")[2].partition("\nmsgstr ")
        entries[_joined(message)] = _joined(translation)
    del entries[""]  # the header
    return entries


def _joined(literals: str) -> str:
    return "".join(map(json.loads, literals.splitlines()))


def _can_print(character: str) -> bool:
    stream = sys.stderr if sys.stderr is not None else sys.stdout
    try:
        character.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
